"""Seconds of one LLM pass by sampling settings: what temperature, filters, penalties and log-probabilities cost.

python -m benchmarks.sampling_cost --nodes 16 --context 256

The pass is that of benchmarks.verify_cost: a scripted tree, all nodes verified. The settings alternate, so that
a slow moment of the machine hits all of them.
"""

import argparse
import statistics
from collections.abc import Sequence

from benchmarks.verify_cost import VerifyCost
from specinfer_jax.compile_cache import enable_compile_cache
from specinfer_jax.config import DEFAULT_MODEL
from specinfer_jax.opened import choose_dtype, choose_max_model_len, open_model
from specinfer_jax.sampling_params import GREEDY, SamplingParams
from specinfer_jax.speculation.rules import MSS_RENORMALIZED, NAIVE

SETTINGS: dict[str, tuple[SamplingParams, str]] = {
    "temperature 0": (GREEDY, NAIVE),
    "temperature 1, naive": (SamplingParams(temperature=1), NAIVE),
    "temperature 1, mss": (SamplingParams(temperature=1), MSS_RENORMALIZED),
    "temperature 1, top_k 50, top_p 0.9, naive": (SamplingParams(temperature=1, top_k=50, top_p=0.9), NAIVE),
    "temperature 1, top_k 50, top_p 0.9, mss": (SamplingParams(temperature=1, top_k=50, top_p=0.9), MSS_RENORMALIZED),
    "temperature 0, penalties and bias": (
        SamplingParams(temperature=0, repetition_penalty=1.1, frequency_penalty=0.1, logit_bias={5: 1.0}), NAIVE,
    ),
    "temperature 0, logprobs": (SamplingParams(temperature=0, logprobs=5), NAIVE),
}  # fmt: skip


def measure(
    cost: VerifyCost, nodes: int, context: int, *, repeats: int, steps: int, names: Sequence[str] = tuple(SETTINGS)
) -> dict[str, list[float]]:
    """Seconds of a step in every repeat, by setting; settings alternate within each repeat."""
    cost.fill(context)

    def seconds(name: str, steps: int) -> float:
        sampling, verification = SETTINGS[name]
        return cost.seconds(nodes, context, steps=steps, sampling=sampling, verification=verification)

    for name in names:
        seconds(name, 1)  # compiles
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            times[name].append(seconds(name, steps))
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling_cost", description="What sampling costs.")
    parser.add_argument("--nodes", type=int, default=16, help="tree rows, root included")
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder, .gguf file or hub id")
    parser.add_argument("--repeats", type=int, default=15, help="bursts per setting")
    parser.add_argument("--steps", type=int, default=4, help="passes per burst")
    options = parser.parse_args(arguments)
    enable_compile_cache()
    dtype = choose_dtype("auto")
    model = open_model(options.model, dtype=dtype)
    longest = choose_max_model_len(model.config, None)
    cost = VerifyCost(model.params, model.config, max_model_len=longest, dtype=dtype)
    times = measure(cost, options.nodes, options.context, repeats=options.repeats, steps=options.steps)
    base = times["temperature 0"]
    print(f"{options.nodes} rows, context {options.context}, vocabulary {model.config.vocab_size}")
    print(f"{'':44} {'median ms':>10} {'x temperature 0':>16}")
    for name, found in times.items():
        ratio = statistics.median(t / b for t, b in zip(found, base, strict=True))
        print(f"{name:44} {statistics.median(found) * 1e3:10.2f} {ratio:16.2f}")


if __name__ == "__main__":
    main()
