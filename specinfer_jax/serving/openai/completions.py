"""POST /v1/completions. Free of jax."""

from collections.abc import Iterator, Sequence

from fastapi import Request

from specinfer_jax.outputs import Logprob
from specinfer_jax.serving.openai.call import Call, Continuation, encoded
from specinfer_jax.serving.openai.generation import Piece
from specinfer_jax.serving.openai.logprobs import CompletionColumns, prompt_logprobs
from specinfer_jax.serving.openai.parameters import completion_params
from specinfer_jax.serving.openai.requests import CompletionRequest
from specinfer_jax.serving.openai.responses import Completion, CompletionChoice, CompletionLogprobs
from specinfer_jax.serving.openai.state import FINGERPRINT, ServerState


class CompletionEndpoint:
    """Answers of one call, whole or as events."""

    def __init__(self, call: Call, body: CompletionRequest, texts: Sequence[str]) -> None:
        """Begin.

        Args:
          call: the call.
          body: its body.
          texts: what `echo` puts before the answers, one for each prompt.
        """
        self.call, self._body, self._texts = call, body, texts
        self._wants_ids = bool(body.return_token_ids)
        self._columns: dict[int, CompletionColumns] = {}
        self._begun: set[int] = set()

    @classmethod
    async def open(cls, http: Request, body: CompletionRequest) -> "CompletionEndpoint":
        """Check a request.

        Raises:
          ApiError, SpecInferError: what is wrong with it.
        """
        state: ServerState = http.app.state.serving
        params = completion_params(body, cap=state.settings.max_tokens)
        given = _prompts(body.prompt)
        prompts = [
            await encoded(state.engine.encode, one, prompt_field="prompt") if isinstance(one, str) else one
            for one in given
        ]
        texts = [""] * len(given)
        if body.echo:
            texts = [one if isinstance(one, str) else state.engine.tokenizer.decode(one) for one in given]
        call = Call(
            http, body, params, prompts, prompt_field="prompt", prefix="cmpl", drops_tokens=body.max_tokens == 0
        )  # fmt: skip
        return cls(call, body, texts)

    def whole(self, answers: Sequence[Sequence[Continuation]]) -> Completion:
        """The answer in one piece."""
        choices = [
            self._choice(prompt, i, answer) for prompt, group in enumerate(answers) for i, answer in enumerate(group)
        ]
        completion = self._completion(*choices)
        completion.usage = self.call.tally.usage()
        return completion

    def _choice(self, prompt: int, index: int, answer: Continuation) -> CompletionChoice:
        ids, measured = answer.token_ids, list(answer.logprobs)
        of_prompt = self.call.prompt_logprobs.get(prompt)
        if self._body.echo and self._body.logprobs is not None:
            assert of_prompt is not None, "an engine measures the prompt where it is asked to"
            ids, measured = [*self.call.prompts[prompt], *ids], [*of_prompt, *measured]
        number = prompt * self.call.params.n + index
        shows_prompt = self._body.prompt_logprobs is not None and of_prompt is not None
        return CompletionChoice(
            index=number, text=self._texts[prompt] + answer.text, logprobs=self._logprobs(number, ids, measured),
            finish_reason=answer.finish_reason,  # type: ignore[arg-type]
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if self._wants_ids else None,
            prompt_token_ids=self.call.prompts[prompt] if self._wants_ids else None,
            prompt_logprobs=prompt_logprobs(of_prompt or ()) if shows_prompt else None,
        )  # fmt: skip

    def events(self, piece: Piece) -> Iterator[Completion]:
        """What a piece adds to its choice; a piece without text waits for the next unless there is more to it."""
        output = piece.output
        number = piece.prompt * self.call.params.n + output.index
        is_first = number not in self._begun
        self._begun.add(number)
        text = (self._texts[piece.prompt] if is_first else "") + output.text
        measured = output.logprobs
        shows_ids = self._wants_ids and (is_first or bool(output.token_ids))
        if text or measured or shows_ids or output.finish_reason is not None:
            yield self._completion(
                CompletionChoice(
                    index=number, text=text,
                    logprobs=None if measured is None else self._logprobs(number, output.token_ids, measured),
                    finish_reason=output.finish_reason,  # type: ignore[arg-type]
                    stop_reason=output.stop_reason,
                    token_ids=output.token_ids if self._wants_ids else None,
                    prompt_token_ids=self.call.prompts[piece.prompt] if self._wants_ids and is_first else None,
                )
            )  # fmt: skip

    def usage_event(self) -> Completion:
        """The last event, without choices."""
        return self._completion()

    def _completion(self, *choices: CompletionChoice) -> Completion:
        call = self.call
        return Completion(
            id=call.id, created=call.created, model=call.model, choices=list(choices), system_fingerprint=FINGERPRINT
        )  # fmt: skip

    def _logprobs(
        self, number: int, ids: Sequence[int], measured: Sequence[dict[int, Logprob] | None]
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        if number not in self._columns:
            tokenizer = self.call.tokenizer
            shows_special = self._body.skip_special_tokens is False
            self._columns[number] = CompletionColumns(
                self.call.names, num_top=self._body.logprobs,
                hidden=frozenset() if shows_special else tokenizer.special_token_ids,
                start=len(self._texts[number // self.call.params.n]) if self._is_prompt_apart else 0,
            )  # fmt: skip
        return self._columns[number].rows(ids, measured)

    @property
    def _is_prompt_apart(self) -> bool:
        """Whether the echoed prompt has no rows of its own."""
        return bool(self._body.echo) and bool(self._body.stream)


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a request; one becomes a list of one."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]
