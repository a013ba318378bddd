"""The LLM's answers to prompts, made by this project's own engine: what SSMs are trained on.

python -m train.data --prompts prompts.jsonl.gz --out answers/greedy --limit 2000 --max-tokens 160
python -m train.data --text books.txt.gz --out answers/books --temperature 0.8

Answers are appended as they are finished. Started again, even after a kill, it makes what is missing and nothing twice;
a greater --limit continues. Prompt ids are those that serving builds for the same chat.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specinfer_jax import LLM, SamplingParams, Speculation
from specinfer_jax.config import DEFAULT_MODEL, DTYPES
from specinfer_jax.errors import ConfigError, SpecInferError
from specinfer_jax.opened import choose_dtype
from specinfer_jax.progress_bar import OnProgress, progress_bar
from specinfer_jax.serving.request import EngineRequest
from train.answer_store import AnswerStore
from train.answers import Answer, read_answers, text_hash
from train.prompts import TrainPrompt, cut_text, mix_prompts, parse_weights, read_train_prompts

SPECULATIONS = {"off": Speculation.off(), "ngram": Speculation(ssms=())}


def answer_prompts(
    llm: LLM, prompts: Sequence[TrainPrompt], store: AnswerStore, *, is_chat: bool, temperature: float,
    max_tokens: int, seed: int, on_progress: OnProgress = lambda answers, tokens: None,
) -> None:  # fmt: skip
    """Answer the prompts that the store lacks; finished slots take the next prompt.

    Args:
      llm: its engine must be free.
      prompts: in the order of their turns.
      store: where answers go, one by one, and prompts that cannot be answered.
      is_chat: each prompt is a user's message under the chat template; otherwise it is continued as it stands.
      temperature: 0 is greedy. Above, a prompt's random numbers follow from its id and `seed` alone.
      max_tokens: most tokens of an answer; `llm.max_model_len` may end it earlier.
      seed: see there.
      on_progress: called whenever something comes in.
    """
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    end_ids = llm.model.stop_ids(sampling)
    accepted: list[TrainPrompt] = []
    requests: list[EngineRequest] = []
    for prompt in prompts:
        if prompt.id in store:
            continue
        ids, reason = encode_prompt(llm, prompt.prompt, is_chat=is_chat)
        if reason:
            store.skip(prompt.id, reason)
            on_progress(1, 0)
            continue
        accepted.append(prompt)
        requests.append(EngineRequest(ids, max_tokens, end_ids, sampling, text_hash(prompt.id, seed=seed)))
    ids_so_far: list[list[int]] = [[] for _ in requests]
    for progress in llm.engine.run(requests):
        i, new_ids = progress.index, progress.new_token_ids
        ids_so_far[i] += new_ids
        if progress.finish_reason == "error":
            store.skip(accepted[i].id, progress.error or "the engine failed")
        elif progress.finish_reason is not None:
            request = requests[i]
            store.add(Answer(accepted[i].id, temperature, tuple(request.prompt_ids), tuple(ids_so_far[i])))
        on_progress(int(progress.finish_reason is not None), len(new_ids))


def encode_prompt(llm: LLM, prompt: str, *, is_chat: bool) -> tuple[list[int], str | None]:
    """(ids, None), or (nothing, why it cannot be answered)."""
    if not prompt.strip():
        return [], "the prompt is empty"
    tokenizer = llm.tokenizer
    ids = tokenizer.encode_chat([{"role": "user", "content": prompt}]) if is_chat else tokenizer.encode(prompt)
    if len(ids) >= llm.max_model_len:
        return [], f"the prompt has {len(ids)} tokens and leaves no room within max_model_len {llm.max_model_len}"
    return ids, None


def run(options: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    prompts = select_prompts(options)
    with AnswerStore(options.out, settings_of(options)) as store:
        missing = [prompt for prompt in prompts if prompt.id not in store]
        print(f"{len(prompts)} prompts, {len(prompts) - len(missing)} of them done", file=sys.stderr)
        if not missing:
            return
        llm = LLM(
            options.model, speculation=SPECULATIONS[options.speculation], dtype=options.dtype,
            max_model_len=options.max_model_len, max_num_seqs=options.max_num_seqs,
        )  # fmt: skip
        is_chat = is_chat_asked(options)
        if is_chat and llm.tokenizer.chat_template is None:
            raise ConfigError(f"{options.model} has no chat template; --no-chat continues the prompts as they stand")
        skipped, began, tokens = len(store.skipped), time.perf_counter(), store.num_tokens
        with progress_bar("answers", len(missing)) as on_progress:
            answer_prompts(
                llm, missing, store, is_chat=is_chat, temperature=options.temperature,
                max_tokens=options.max_tokens, seed=options.seed, on_progress=on_progress,
            )  # fmt: skip
        seconds, tokens = time.perf_counter() - began, store.num_tokens - tokens
        print(
            f"{len(missing)} prompts, {len(store.skipped) - skipped} of them skipped, {tokens} tokens in {seconds:.1f} "
            f"s: {tokens / seconds:.1f} tokens/s; {len(store.answered)} answers of {store.num_tokens} tokens in "
            f"{options.out}",
            file=sys.stderr,
        )


def select_prompts(options: argparse.Namespace) -> list[TrainPrompt]:
    """The prompts in the order of their turns, without those that other files have answers to."""
    prompts = [prompt for path in options.prompts for prompt in read_train_prompts(path)]
    prompts += [prompt for path in options.text for prompt in cut_text(path, characters=options.text_characters)]
    weights = None if options.datasets is None else parse_weights(options.datasets)
    mixed = mix_prompts(prompts, weights, seed=options.seed)
    elsewhere = {answer.id for answer in read_answers(options.have)} if options.have else set()
    return [prompt for prompt in mixed[options.skip :] if prompt.id not in elsewhere][: options.limit]


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What an answer depends on besides its prompt."""
    is_greedy = SamplingParams(temperature=options.temperature).is_greedy
    return {
        "model": str(options.model), "dtype": choose_dtype(options.dtype).name, "chat": is_chat_asked(options),
        "temperature": options.temperature, "max_tokens": options.max_tokens, "max_model_len": options.max_model_len,
        "seed": None if is_greedy else options.seed, "speculation": None if is_greedy else options.speculation,
    }  # fmt: skip


def is_chat_asked(options: argparse.Namespace) -> bool:
    """Prompts of JSONL are chats unless told otherwise, cut text is not."""
    return not options.text if options.chat is None else options.chat


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m train.data", description="The LLM's answers to prompts.")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help='JSONL of {"id", "prompt", "dataset"}')
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="plain text to cut into prompts")
    parser.add_argument("--text-characters", type=int, default=400, help="of each prompt that is cut")
    parser.add_argument("--out", type=Path, required=True, help="folder of the answers; given again, it is continued")
    parser.add_argument("--have", type=Path, nargs="+", default=[], help="answers elsewhere, not to be made again")
    parser.add_argument(
        "--skip", type=int, default=0, help="so many of the mixed order first, which another run took with its --limit"
    )
    parser.add_argument(
        "--datasets", help='weights by pattern, such as "dolly_*=3,gpteacher_*=1"; the rest is left out'
    )
    parser.add_argument("--limit", type=int, help="prompts, from the start of the mixed order")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or .gguf file")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, help="default: for --prompts, not for --text")
    parser.add_argument("--max-tokens", type=int, default=160, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of the order of prompts and of sampling")
    parser.add_argument("--speculation", default="off", choices=SPECULATIONS, help="for speed; greedy answers stay")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="prompts side by side")
    parser.add_argument("--max-model-len", type=int, default=512, help="tokens of a prompt and its answer together")
    options = parser.parse_args(arguments)
    if bool(options.prompts) == bool(options.text):
        parser.error("give --prompts or --text, one of them")
    for name in ("limit", "text_characters", "max_tokens", "max_num_seqs", "max_model_len"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if options.skip < 0:
        parser.error(f"--skip must be at least 0, got {options.skip}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer prompts."""
    options = parse_arguments(arguments)
    try:
        run(options)
    except SpecInferError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(f"stopped; the same command goes on with what is missing in {options.out}") from None


if __name__ == "__main__":
    main()
