"""One continuation while its ids arrive: text up to a stop string, streamed pieces, log-probabilities.

completion = Completion(tokenizer, params, prompt_ids=ids, end_ids=end_ids)
engine.run([EngineRequest(..., watch=completion.watch)])       # ends the request where a stop string completes
pieces = [completion.add(progress) for progress in ...]        # what each progress adds, for a stream
output = completion.output()                                   # the whole, once the last progress is in

Ids are read one by one, whatever a step committed, so text, ids and reasons are those of incremental decoding.
"""

from collections.abc import Collection, Sequence

from specinfer_jax.metrics import RequestStats
from specinfer_jax.outputs import CompletionOutput, Logprob, StreamOutput, TokenLogprobs
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.request import Progress
from specinfer_jax.tokenizer import IncrementalDetokenizer, Tokenizer


class StopText:
    """A growing text that ends at the first stop string.

    The string that completes first wins, token by token; of those that one token completes, the one that begins first,
    then the shortest. So much of the text's end is held back as a stop string could still reach into; the cost of a
    piece does not depend on the text's length.
    """

    def __init__(self, stop: Sequence[str], *, is_included: bool) -> None:
        self.match: str | None = None
        """The stop string that ended the text."""
        self._stop, self._is_included = tuple(stop), is_included
        self._reach = max(map(len, self._stop), default=1) - 1
        self._held = ""

    def push(self, piece: str, *, is_searched: bool = True) -> str:
        """What becomes certain with another piece; a stop string counts if it ends in a searched piece."""
        old, text = len(self._held), self._held + piece
        if is_searched:
            starts = ((text.find(string, max(0, old - len(string) + 1)), string) for string in self._stop)
            found = [(start, start + len(string), string) for start, string in starts if start >= 0]
            if found:
                start, end, self.match = min(found)
                self._held = ""
                return text[: end if self._is_included else start]
        certain = max(0, len(text) - self._reach)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What is still held back when nothing more comes."""
        held, self._held = self._held, ""
        return held


class Completion:
    """One continuation of a prompt, from progress to outputs.

    As in vLLM: a stop string counts if it ends behind the first `min_tokens` tokens, and a token of `end_ids` adds no
    text (so it completes no stop string either) unless `include_stop_str_in_output`. Text that the tokenizer holds back
    until the next token, such as the first bytes of a character, counts as that token's.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, *,
        prompt_ids: Sequence[int], end_ids: Collection[int], index: int = 0,
    ) -> None:  # fmt: skip
        """Begin with nothing.

        Args:
          tokenizer: the LLM's.
          params: what is asked for.
          prompt_ids: the prompt.
          end_ids: ids that end the request.
          index: number of the continuation.
        """
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.stats: RequestStats | None = None
        self.error: str | None = None
        # A prompt of one token has nothing to measure.
        asks_for_none = params.prompt_logprobs is not None and len(prompt_ids) == 1
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if asks_for_none else None
        self._tokenizer, self._params = tokenizer, params
        self._prompt_ids, self._end_ids = prompt_ids, end_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._text = StopText(params.stop or (), is_included=params.include_stop_str_in_output)
        self._pieces: list[str] = []
        self._num_streamed = 0  # pieces
        self._num_read = 0  # ids whose text is in
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0

    def watch(self, new_ids: list[int]) -> int | None:
        """The engine's stop rule: how many of a step's ids to keep if a stop string ends the request, else None."""
        before = self._num_read
        self._read(new_ids)
        return None if self._text.match is None else self._num_read - before

    def add(self, progress: Progress) -> StreamOutput:
        """Take in what the engine reports; returns what it adds to a stream."""
        new_ids = progress.new_token_ids
        self._read(new_ids[self._num_read - len(self.token_ids) :])  # those that `watch` has not seen
        new_ids = new_ids[: self._num_read - len(self.token_ids)]  # nothing behind a stop string
        self.token_ids += new_ids
        new_logprobs = self._add_logprobs(progress.logprobs, new_ids)
        prompt_logprobs = self._add_prompt_logprobs(progress.prompt_logprobs)
        if progress.finish_reason is not None:
            self._finish(progress)
        text = "".join(self._pieces[self._num_streamed :])
        self._num_streamed = len(self._pieces)
        return StreamOutput(
            text, new_ids, self.finish_reason, self.stats, self.index, new_logprobs, self.stop_reason, prompt_logprobs,
            self.error,
        )  # fmt: skip

    def output(self) -> CompletionOutput:
        """All of it; the last progress must be in."""
        assert self.finish_reason is not None, "the engine has not finished this request"
        wants_logprobs = self._params.logprobs is not None
        return CompletionOutput(
            self.index, "".join(self._pieces), self.token_ids, self.finish_reason, self.stop_reason,
            self._logprobs if wants_logprobs else None, self._cumulative_logprob if wants_logprobs else None,
        )  # fmt: skip

    def _read(self, ids: Sequence[int]) -> None:
        """Turn ids into text, up to the one that completes a stop string."""
        for token_id in ids:
            if self._text.match is not None:
                return
            self._num_read += 1
            if token_id not in self._end_ids or self._params.include_stop_str_in_output:
                self._push(self._detokenizer.push([token_id]))

    def _push(self, piece: str) -> None:
        if piece:
            self._pieces.append(self._text.push(piece, is_searched=self._num_read > self._params.min_tokens))

    def _finish(self, progress: Progress) -> None:
        if self._text.match is None:
            self._push(self._detokenizer.flush())
            self._pieces.append(self._text.flush())
        self.finish_reason, self.stats, self.error = progress.finish_reason, progress.stats, progress.error
        if progress.finish_reason == "error":
            return
        if self._text.match is not None:
            self.finish_reason, self.stop_reason = "stop", self._text.match
        elif progress.finish_reason == "stop" and self.token_ids[-1] in self._params.stop_token_ids:
            self.stop_reason = self.token_ids[-1]

    def _add_logprobs(self, measured: TokenLogprobs | None, ids: Sequence[int]) -> list[dict[int, Logprob]] | None:
        if self._params.logprobs is None or measured is None:
            return None
        new = logprob_dicts(self._tokenizer, ids, measured, num_top=self._params.logprobs)
        self._logprobs += new
        self._cumulative_logprob += sum(entry[token_id].logprob for entry, token_id in zip(new, ids, strict=True))
        return new

    def _add_prompt_logprobs(self, measured: TokenLogprobs | None) -> list[dict[int, Logprob] | None] | None:
        if self._params.prompt_logprobs is None or measured is None:
            return None
        behind_first = logprob_dicts(
            self._tokenizer, self._prompt_ids[1:], measured, num_top=self._params.prompt_logprobs
        )
        self.prompt_logprobs = [None, *behind_first]
        return self.prompt_logprobs


def logprob_dicts(
    tokenizer: Tokenizer, ids: Sequence[int], measured: TokenLogprobs, *, num_top: int
) -> list[dict[int, Logprob]]:
    """What was measured as vLLM returns it: a dict per token, the token itself first, then the `num_top` likeliest."""
    result = []
    for t, token_id in enumerate(ids):
        top = zip(measured.top_id_TK[t, :num_top].tolist(), measured.top_logprob_TK[t, :num_top].tolist(), strict=True)
        own = (token_id, float(measured.logprob_T[t]), int(measured.rank_T[t]))
        entries: dict[int, Logprob] = {}
        for i, logprob, rank in (own, *((i, logprob, k) for k, (i, logprob) in enumerate(top, 1))):
            entries.setdefault(i, Logprob(logprob, rank, _text_alone(tokenizer, i)))
        result.append(entries)
    return result


def _text_alone(tokenizer: Tokenizer, token_id: int) -> str | None:
    """A token's text with its leading space; None for an id without a piece."""
    if tokenizer.token_piece(token_id) is None:
        return None
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
