"""Are the ids of speculative decoding those of incremental decoding, and are these transformers' own?

python -m benchmarks.equality --prompts PROMPTS.jsonl --limit 100 --max-tokens 64 --against transformers --json OUT.json

Every prompt is continued greedily under the model's chat template: incrementally, with the n-gram tree, with the model
as its own SSM, and with its first layers as SSM (whole trees, no gate, for both). Each difference is listed with the
margin between the two largest logits at the first differing step: under float32, sums in another order can turn a
choice whose margin is below the rounding, and nothing else may. transformers, which reads the same file and gets the
same prompt ids, may leave the incremental ids only from a step on whose margin is small.

With `--temperature 1` every prompt gets a seed of its own. Trees are verified by naive sampling, whose draws are keyed
by position, so the ids must be those of incremental decoding with the same seed; margins are then those of the logits
with the draw's noise on them.

Ends with status 1 if anything differs that rounding does not explain.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.peer_systems import PeerMissingError, torch_model
from benchmarks.peers import encode_prompts
from pallas_kernels.tree_attention import causal_words
from specinfer_jax import LLM, Model, SamplingParams, Speculation
from specinfer_jax.checkpoint.resolve import resolve
from specinfer_jax.config import DEFAULT_MODEL
from specinfer_jax.errors import SamplingError, SpecInferError
from specinfer_jax.metrics import total
from specinfer_jax.models.kv_cache import init_cache
from specinfer_jax.models.transformer import forward, vocabulary_logits
from specinfer_jax.opened import open_model
from specinfer_jax.outputs import RequestOutput
from specinfer_jax.prompts import read_prompts
from specinfer_jax.sampling_params import GREEDY
from specinfer_jax.speculation.randomness import Role, gumbel, keys_at, request_key

SELF_MARGIN, TRANSFORMERS_MARGIN = 1e-4, 1e-3
"""Margins below which a different choice counts as rounding, against ourselves and against transformers."""
ALLOWED_TIES = 2
"""Prompts of a mode that may differ at such a margin."""
SELF_DRAFT_TREE = "1,1,3,1,1"


@dataclasses.dataclass(frozen=True)
class Difference:
    """One prompt whose ids differ."""

    mode: str
    """What was compared with incremental decoding."""
    prompt: int
    """Number of the prompt, from 0."""
    step: int
    """First new token that differs, from 0."""
    expected: int | None
    """Incremental decoding's id there; None: it had ended."""
    found: int | None
    """The id of the mode."""
    margin: float
    """Difference of the two largest logits at that step."""


@dataclasses.dataclass(frozen=True)
class ModeRow:
    """One mode over all prompts."""

    mode: str
    """Its name."""
    tokens: int
    """New tokens of all prompts."""
    tokens_per_step: float | None
    """Committed per LLM pass; None for transformers."""
    acceptance: list[float | None]
    """Share of the proposing steps in which depth 1, 2, ... was accepted."""
    differences: int
    """Prompts whose ids differ."""
    unexplained: int
    """Those that rounding does not explain."""


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Index of the first id that differs, or that only one side has; None if all are equal."""
    for step, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return step
    return None if len(expected) == len(found) else min(len(expected), len(found))


def speculations(model: Model, ssm_layers: int) -> dict[str, Speculation]:
    """The speculative modes by name."""
    ssm = model.first_layers(min(ssm_layers, model.config.num_layers))
    return {
        "n-gram": Speculation(ssms=()),
        "self-draft": Speculation(ssms=(model,), tree=SELF_DRAFT_TREE, ngram=False, adaptive=False),
        f"first {ssm.config.num_layers} layers": Speculation(ssms=(ssm,), ngram=False, adaptive=False),
    }


def plain_margin(
    model: Model, prompt: Sequence[int], continuation: Sequence[int], params: SamplingParams = GREEDY
) -> float:
    """Difference of the two largest logits behind the continuation, in one pass without a cache.

    At a temperature, of the logits with the noise of the token's draw, `temperature * Gumbel`, added.
    """
    ids = [*prompt, *continuation]
    config, dtype = model.config, model.params["embed"]["embedding"].dtype
    cache = init_cache(config, num_slots=1, max_model_len=1, page_size=1, dtype=dtype)
    token_1Q = jnp.asarray([ids], jnp.int32)

    @jax.jit
    def last_logits(params: Any) -> Any:
        position_1Q = jnp.arange(len(ids), dtype=jnp.int32)[None]
        x_DT, _ = forward(
            params, token_1Q, position_1Q, cache, causal_words(len(ids))[None],
            config=config, prompt_len_B=jnp.asarray([len(prompt)], jnp.int32),
        )  # fmt: skip
        return vocabulary_logits(params, x_DT[:, -1:], config=config)[:, 0]

    logits_1V = np.asarray(last_logits(model.params))[None]
    if not params.is_greedy:
        seed = jnp.asarray(divmod(params.seed or 0, 2**32), jnp.uint32)
        key_B2 = request_key(seed, jnp.int32(0))[None]
        key_B = keys_at(key_B2, jnp.asarray([len(ids)], jnp.int32), Role.TOKEN)
        vocab_size = min(model.tokenizer.vocab_size, config.vocab_size)
        noise_1V = np.asarray(gumbel(key_B, vocab_size))
        logits_1V = logits_1V[:, :vocab_size] + params.temperature * noise_1V
    return margins_of(logits_1V)[0]


def margins_of(logits_TV: np.ndarray) -> list[float]:
    """Difference of the two largest logits of every row."""
    top_T2 = np.sort(np.partition(logits_TV, -2, axis=1)[:, -2:], axis=1)
    return (top_T2[:, 1] - top_T2[:, 0]).tolist()


def check_modes(
    model: Model, prompts: Sequence[list[int]], *, max_tokens: int, ssm_layers: int, max_model_len: int,
    temperature: float = 0.0, with_self_draft: bool = True,
) -> tuple[list[ModeRow], list[Difference], list[list[int]]]:  # fmt: skip
    """Rows of incremental decoding and of every speculative mode, what differs, and the incremental ids."""

    def outputs(speculation: Speculation) -> list[RequestOutput]:
        # The last `LLM` is gone before the next one allocates its caches.
        llm = LLM(model, speculation=speculation, dtype="float32", max_model_len=max_model_len)
        return llm.generate(prompts, params)

    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=max_tokens) for number in range(len(prompts))
    ]
    plain = outputs(Speculation.off())
    expected = [output.token_ids for output in plain]
    rows, differences = [mode_row("incremental", plain, [])], []
    modes = speculations(model, ssm_layers)
    if not with_self_draft:
        del modes["self-draft"]
    for mode, speculation in modes.items():
        found = outputs(speculation)
        new = []
        for number, (prompt, ids, output) in enumerate(zip(prompts, expected, found, strict=True)):
            step = first_difference(ids, output.token_ids)
            if step is not None:
                margin = plain_margin(model, prompt, ids[:step], params[number])
                new.append(_difference(mode, number, step, ids, output.token_ids, margin))
        rows.append(mode_row(mode, found, new))
        differences += new
    return rows, differences, expected


def mode_row(mode: str, outputs: Sequence[RequestOutput], differences: Sequence[Difference]) -> ModeRow:
    """Sum over all prompts."""
    stats = total([output.stats for output in outputs if output.stats is not None])
    return ModeRow(
        mode,
        stats.tokens,
        stats.tokens_per_step,
        stats.acceptance_by_position,
        len(differences),
        count_unexplained(differences),
    )


def count_unexplained(differences: Sequence[Difference]) -> int:
    """Differences between our own modes, less the few whose margin is a matter of rounding."""
    ties = sum(difference.margin < SELF_MARGIN for difference in differences)
    return len(differences) - min(ties, ALLOWED_TIES)


def _difference(
    mode: str, prompt: int, step: int, expected: Sequence[int], found: Sequence[int], margin: float
) -> Difference:
    def at(ids: Sequence[int]) -> int | None:
        return ids[step] if step < len(ids) else None

    return Difference(mode, prompt, step, at(expected), at(found), margin)


def check_transformers(
    path: Path, prompts: Sequence[list[int]], expected: Sequence[list[int]]
) -> tuple[ModeRow, list[Difference]]:
    """transformers' greedy ids against ours, each prompt up to the first step with a small margin.

    Raises:
      PeerMissingError: torch or transformers is not installed or cannot read the model.
    """
    differences, unexplained, tokens = [], 0, 0
    for number, (ids, found, margins) in enumerate(_transformers_ids(path, prompts, expected)):
        tokens += len(found)
        step = first_difference(ids, found)
        if step is None:
            continue
        differences.append(_difference("transformers", number, step, ids, found, margins[step]))
        unexplained += min(margins[: step + 1]) >= TRANSFORMERS_MARGIN
    return ModeRow("transformers", tokens, None, [], len(differences), unexplained), differences


def _transformers_ids(
    path: Path, prompts: Sequence[list[int]], expected: Sequence[list[int]]
) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """Per prompt: our ids, as many of transformers', and their margins. Nothing but the count ends its decoding."""
    model = torch_model(path)
    import torch  # pyright: ignore[reportMissingImports]

    for prompt, ids in zip(prompts, expected, strict=True):
        tokens = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=len(ids),
                min_new_tokens=len(ids), output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        found = output.sequences[0, len(prompt) :].tolist()
        yield ids, found, margins_of(torch.cat(output.logits).float().numpy())


def print_report(rows: Sequence[ModeRow], differences: Sequence[Difference]) -> None:
    """The table, then every difference."""
    print(f"{'mode':<16} {'tokens':>7} {'per step':>8} {'differ':>7} {'unexplained':>11}  accepted at depth 1, 2, ...")
    for row in rows:
        per_step = "-" if row.tokens_per_step is None else f"{row.tokens_per_step:.2f}"
        accepted = " ".join("-" if share is None else f"{share:.3f}" for share in row.acceptance)
        print(f"{row.mode:<16} {row.tokens:7} {per_step:>8} {row.differences:7} {row.unexplained:11}  {accepted}")
    for d in differences:
        print(f"{d.mode}: prompt {d.prompt}, step {d.step}: {d.found} instead of {d.expected}, margin {d.margin:.2e}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equality", description="Are all ids the same?")
    parser.add_argument("--prompts", type=Path, required=True, help='JSONL file, a "prompt" a line')
    parser.add_argument("--limit", type=int, help="prompts from the start of the file; all without it")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or .gguf file")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy; above it prompt i has seed i")
    parser.add_argument("--ssm-layers", type=int, default=2, help="layers of the model that the third mode drafts with")
    parser.add_argument("--without-self-draft", action="store_true", help="leave out the slowest mode")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--against", choices=["transformers"], help="compare the incremental ids with this as well")
    parser.add_argument("--json", type=Path, help="write rows and differences here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, write; 1 if something differs that rounding does not explain."""
    options = parse_arguments(arguments)
    if options.against is not None and options.temperature > 0:
        raise SamplingError("transformers draws with other random numbers; compare with it at temperature 0")
    path = resolve(options.model)
    model = open_model(path, dtype=jnp.dtype(jnp.float32))
    entries = read_prompts(options.prompts, limit=options.limit)
    prompts = encode_prompts(model.tokenizer, [entry.prompt for entry in entries])
    rows, differences, expected = check_modes(
        model,
        prompts,
        max_tokens=options.max_tokens,
        ssm_layers=options.ssm_layers,
        max_model_len=options.max_model_len,
        temperature=options.temperature,
        with_self_draft=not options.without_self_draft,
    )
    if options.against == "transformers":
        row, more = check_transformers(path, prompts, expected)
        rows, differences = [*rows, row], [*differences, *more]
    print_report(rows, differences)
    if options.json is not None:
        report = {
            "machine": describe_machine(),
            "model": path.name,
            "prompts": len(prompts),
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "rows": [dataclasses.asdict(row) for row in rows],
            "differences": [dataclasses.asdict(difference) for difference in differences],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(any(row.unexplained for row in rows))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (SpecInferError, PeerMissingError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
