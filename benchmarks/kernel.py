"""Tree attention alone: seconds against the device's roofline and against other attentions at the same shape.

python -m benchmarks.kernel --shapes llama-7b --rows 1,64 --context 2048 --slots 8 --prefill 4096 --json kernel.json
python -m benchmarks.kernel --check 60

A measurement is one compiled program of many calls, each fed with the output of the one before, over several copies of
the cache where one would stay in the device's own caches. All candidates of a shape take turns. The first output of
every program is compared with the XLA implementation's: a wrong candidate is named and gets no time.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention_candidates import (
    DTYPES,
    OTHER_TOLERANCE,
    OWN_TOLERANCE,
    SHAPES,
    Candidate,
    Problem,
    attend,
    block_table_of,
    candidates_of,
    contiguous,
    dense_calls,
    normals,
    reason,
)
from benchmarks.machine import available_cores, describe_machine
from benchmarks.roofline import (
    COLD_BYTES,
    Limits,
    Work,
    alternate,
    causal_work,
    find_peaks,
    measure_limits,
    plan_calls,
    repeated,
)
from pallas_kernels.tree_attention import IMPLEMENTATIONS, causal_words, tree_attention
from pallas_kernels.tree_attention.choose import kernel_here
from specinfer_jax.errors import ConfigError

PREFILL_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured candidate."""

    candidate: str
    """Which."""
    seconds: float
    """Of one call, median of the repeats."""
    seconds_min: float
    """Of one call, least of the repeats."""
    error: float
    """max|d| / max|ref| of the first call."""
    calls: int
    """Calls per measurement."""
    kernels: Sequence[str]
    """Custom calls in the program: whether a kernel ran, and which."""
    bytes_per_second: float
    """Bytes by formula over the median."""
    flops_per_second: float
    """FLOPs by formula over the median."""
    share_of_peak: float | None
    """Roofline of the data sheet over the median; None on a device that is not in the table."""
    share_of_measured: float
    """The same with the measured copy and product."""


@dataclasses.dataclass(frozen=True)
class Device:
    """What candidates are held against, and how they are measured."""

    dtype: str
    """Of queries, keys and values."""
    peaks: Limits | None
    """Data sheet."""
    measured: Limits
    """Copy and product on this device."""
    repeats: int
    """Measurements per candidate."""
    seconds: float
    """Wanted length of a measurement, at the roofline."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return jnp.dtype(self.dtype).itemsize


class Wrong(Exception):
    """A candidate's output is not the expected one."""


def relative_error(out: jax.Array, expected: jax.Array) -> float:
    """max|d| / max|ref|; infinite where there is a NaN."""
    d = np.abs(np.asarray(out, np.float32) - np.asarray(expected, np.float32)).max()
    return math.inf if np.isnan(d) else float(d / np.abs(np.asarray(expected, np.float32)).max())


# --- measuring


def measure(
    q: jax.Array, candidates: Sequence[Candidate], work: Work, device: Device, *, trips: int
) -> tuple[list[Row], dict[str, str]]:
    """Compile all, compare the first outputs, time those that are right; returns rows and why others have none."""
    lowered, failed = {}, {}
    for c in candidates:
        try:
            lowered[c.name] = jax.jit(repeated(c.call, trips)).lower(q, c.sets)
        except Exception as error:  # a candidate that refuses the shape is named, whatever it raises
            failed[c.name] = reason(error)
    with concurrent.futures.ThreadPoolExecutor(min(8, available_cores())) as pool:
        compiling = {name: pool.submit(program.compile) for name, program in lowered.items()}
    runs, errors = {}, {}
    for c in candidates:
        if c.name not in compiling:
            continue
        try:
            run = functools.partial(compiling[c.name].result(), q, c.sets)
            errors[c.name] = relative_error(run()[0], c.expected)
            if errors[c.name] > c.tolerance:
                raise Wrong(f"max|d| / max|ref| {errors[c.name]:.1e}, allowed {c.tolerance:.0e}")
            runs[c.name] = run
        except Exception as error:
            failed[c.name] = reason(error)
    calls = {c.name: 1 + trips * len(c.sets) for c in candidates}
    rows = [
        make_row(name, [t / calls[name] for t in times], work, device, errors[name], calls[name], lowered[name])
        for name, times in alternate(runs, repeats=device.repeats).items()
    ]
    return rows, failed


def make_row(
    name: str, times: Sequence[float], work: Work, device: Device, error: float, calls: int, lowered: Any
) -> Row:
    """A candidate's figures from its times."""
    seconds = statistics.median(times)
    return Row(
        name, seconds, min(times), error, calls, kernels_in(lowered.as_text()),
        work.bytes / seconds, work.flops / seconds,
        None if device.peaks is None else work.seconds(device.peaks, device.dtype) / seconds,
        work.seconds(device.measured, device.dtype) / seconds,
    )  # fmt: skip


def kernels_in(text: str) -> list[str]:
    """Names of a lowered program's custom calls."""
    return sorted({part.split("(")[0].strip() for part in text.split("custom_call @")[1:]})


def measure_problem(
    problem: Problem, device: Device, *, page_size: int, implementations: Sequence[str], without: Sequence[str]
) -> dict[str, Any]:
    """One problem's entry of the JSON file."""
    heads, work = SHAPES[problem.shape], problem.work(device.itemsize)
    cache_bytes = 2 * problem.slots * max(problem.context, 1) * heads.G * heads.K * device.itemsize
    copies, trips = plan_calls(work, cache_bytes, device.measured, device.dtype, seconds=device.seconds)
    q, candidates, missing = candidates_of(
        problem, device.dtype, page_size=page_size, copies=copies, implementations=implementations, without=without
    )
    rows, failed = measure(q, candidates, work, device, trips=trips)
    entry = {
        **dataclasses.asdict(problem),
        **heads._asdict(),
        "copies": copies,
        "is_cold": copies * cache_bytes >= COLD_BYTES,
    }
    return entry | entry_of(rows, work, missing, failed)


def entry_of(rows: Sequence[Row], work: Work, missing: Mapping[str, str], failed: Mapping[str, str]) -> dict[str, Any]:
    """What the JSON file tells of one comparison."""
    return {
        **dataclasses.asdict(work),
        "rows_measured": [dataclasses.asdict(row) for row in rows],
        "skipped": {**missing, **failed},
        "failed": sorted(failed),
    }


def measure_prefill(shape: str, tokens: int, device: Device, *, page_size: int) -> dict[str, Any]:
    """A prompt in chunks through tree attention against one plain causal attention over it."""
    H, G, K = SHAPES[shape]
    scale, chunk, pages = K**-0.5, min(PREFILL_CHUNK, tokens), -(-tokens // page_size)
    work = causal_work(tokens=tokens, H=H, G=G, K=K, itemsize=device.itemsize)
    draw = functools.partial(normals, dtype=device.dtype)
    keys = jax.random.split(jax.random.key(0), 3)
    q = draw(keys[0], shape=(1, tokens, H, K))
    caches = [draw(key, shape=(G, pages + 1, page_size, K)) for key in keys[1:]]
    table = jnp.asarray(block_table_of(np.random.default_rng(0), 1, pages))
    nothing = jnp.zeros((1, 0, G, K), q.dtype)
    k, v = (contiguous(cache, nothing, table, context=tokens, padded=tokens) for cache in caches)
    words = causal_words(chunk)[None]

    def chunked(implementation: str | None) -> Callable[..., jax.Array]:
        attention = attend(implementation, scale)

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(tokens // chunk, 1, chunk, *x.shape[2:])

        def call(q: jax.Array, k: jax.Array, v: jax.Array, k_pages: jax.Array, v_pages: jax.Array) -> jax.Array:
            def one(chunk_of: tuple[jax.Array, ...]) -> jax.Array:
                q, k, v, done = chunk_of
                return attention(q, k, v, k_pages, v_pages, table, done, words)

            done = jnp.arange(0, tokens, chunk, dtype=jnp.int32)[:, None]
            return jax.lax.map(one, (split(q), split(k), split(v), done)).reshape(q.shape)

        return call

    sets = [(k, v, *caches)]
    expected = jax.jit(chunked("xla"))(q.astype(jnp.float32), *sets[0])
    candidates = [Candidate("default", chunked(None), sets, expected, OWN_TOLERANCE[device.dtype])]
    calls = dense_calls(scale, is_causal=True)
    for name, call in calls.items():
        if not isinstance(call, str):
            candidates.append(Candidate(name, call, [(k, v)], expected, OTHER_TOLERANCE))
    missing = {name: call for name, call in calls.items() if isinstance(call, str)}
    _, trips = plan_calls(work, 2 * k.nbytes, device.measured, device.dtype, seconds=device.seconds)
    rows, failed = measure(q, candidates, work, device, trips=trips)
    return {"shape": shape, "tokens": tokens, "chunk": chunk} | entry_of(rows, work, missing, failed)


def print_entry(title: str, entry: Mapping[str, Any]) -> None:
    """One comparison on the screen."""
    note = "" if entry.get("is_cold", True) else " (small: may stay in the device's caches)"
    print(f"{title}: {entry['bytes'] / 1e6:.1f} MB, {entry['flops'] / 1e9:.2f} GFLOP{note}")
    base = next((row["seconds"] for row in entry["rows_measured"] if row["candidate"] == "default"), None)
    for row in entry["rows_measured"]:
        peak = "" if row["share_of_peak"] is None else f", {row['share_of_peak']:4.0%} of the data sheet"
        ratio = "" if base is None else f" x{row['seconds'] / base:6.2f}"
        print(
            f"  {row['candidate']:12} {row['seconds'] * 1e6:10.1f} us (least {row['seconds_min'] * 1e6:10.1f}){ratio}  "
            f"{row['bytes_per_second'] / 1e9:7.1f} GB/s {row['flops_per_second'] / 1e12:6.2f} TFLOP/s, "
            f"{row['share_of_measured']:4.0%} of measured{peak}  {' '.join(row['kernels']) or 'no kernel'}"
        )
    for name, why in entry["skipped"].items():
        print(f"  {name:12} {'FAILED' if name in entry['failed'] else 'left out'}: {why}")
    sys.stdout.flush()


# --- correctness on the device


def check(number: int, implementation: str | None, *, seconds: float) -> dict[str, Any]:
    """Random cases of the tests against their float64 oracle, on this device; starts no new ones after the limit."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    cases = importlib.import_module("attention_cases")
    began, workers = time.perf_counter(), min(8, available_cores())
    attention = jax.jit(tree_attention, static_argnames=("scale", "implementation"))
    run = functools.partial(attention, implementation=implementation)
    worst: dict[str, float] = {}
    wrong, done = [], 0
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:  # compiling takes nearly all of the time
        while done < number and time.perf_counter() - began <= seconds:
            seeds = range(done, min(done + workers, number))
            for seed, (figures, why) in zip(
                seeds, pool.map(lambda seed: check_one(cases, run, seed, shapes=number), seeds), strict=True
            ):
                worst |= {name: max(worst.get(name, 0.0), value) for name, value in figures.items()}
                if why is not None:
                    wrong.append({"seed": seed, "why": why})
                    print(f"WRONG: attention_cases.random_case({seed}, shapes={number}): {why}", flush=True)
            done += len(seeds)
            told = ", ".join(f"{name} {value:.1e}" for name, value in sorted(worst.items()))
            print(f"{implementation or 'default'}: {done} of {number} cases, worst {told}", flush=True)
    return {"cases": done, "asked": number, "worst": worst, "wrong": wrong, "tolerance": cases.TOLERANCE}


def check_one(cases: Any, run: Callable[..., Any], seed: int, *, shapes: int) -> tuple[dict[str, float], str | None]:
    """Errors of output and log-sum-exp of one case by dtype, and what is wrong if anything is."""
    try:
        case = cases.random_case(seed, shapes=shapes)
        out, lse = (np.asarray(a, np.float64) for a in run(*map(jnp.asarray, case.arrays), scale=case.scale))
        ref_out, ref_lse = cases.oracle(case)
    except Exception as error:  # the other cases still tell something
        return {}, reason(error)
    dtype = case.q_BQHK.dtype.name
    found = {
        dtype: (np.abs(out - ref_out).max() / np.abs(ref_out).max(), cases.TOLERANCE[dtype]),
        f"{dtype} log-sum-exp": (np.abs(lse - ref_lse).max() / max(1.0, np.abs(ref_lse).max()), 2e-6),
    }
    # A NaN is not within anything.
    figures = {name: math.inf if np.isnan(value) else float(value) for name, (value, _) in found.items()}
    over = [
        f"{name} {figures[name]:.1e}, allowed {limit:.0e}"
        for name, (_, limit) in found.items()
        if figures[name] > limit
    ]
    return figures, "; ".join(over) or None


# --- the command


def default_problems(on_cpu: bool) -> list[Problem]:
    """What runs if nothing is asked for: minutes on one accelerator, seconds on a CPU."""
    if on_cpu:
        return [Problem("smollm2-135m", rows, 512, 1) for rows in (1, 16)]
    verify = [
        Problem(shape, rows, context, slots)
        for rows in (64, 1, 16)  # a run that is cut short has all shapes, and trees against single rows, first
        for slots in (8, 1)
        for context in (8192, 512)
        for shape in ("llama-7b", "opt-13b", "llama-65b")
    ]
    return [
        Problem("llama-3-8b", 64, 8192, 8),
        *verify,
        Problem("smollm2-135m", 16, 512, 8),
    ]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel", description="Tree attention alone.")

    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--shapes", type=names, help=f"of {', '.join(SHAPES)}; a set that suits the device by default")
    parser.add_argument("--rows", type=numbers, help="tree rows, root included: 1,16,64; goes with --shapes")
    parser.add_argument("--context", type=numbers, help="committed tokens: 512,8192; goes with --shapes")
    parser.add_argument("--slots", type=numbers, help="1,8; goes with --shapes")
    parser.add_argument("--dtype", help="bfloat16 or float32; bfloat16 by default, float32 on CPU")
    parser.add_argument("--page-size", type=int, default=128, help="tokens of a page")
    parser.add_argument("--implementations", type=names, default=[], help="also these: xla,reference")
    parser.add_argument("--without", type=names, default=[], help="leave these candidates out: tokamax,dense cudnn")
    parser.add_argument("--prefill", type=int, metavar="TOKENS", help="also a prompt of this length in chunks of 256")
    parser.add_argument("--check", type=int, metavar="N", help="instead: N random cases of the kernel against float64")
    parser.add_argument("--repeats", type=int, default=7, help="measurements per candidate")
    parser.add_argument("--milliseconds", type=float, default=10, help="length of a measurement, at the roofline")
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="start nothing new after this time")
    parser.add_argument("--json", type=Path, help="write the results here, after every shape")
    return parser.parse_args(arguments)


def check_options(options: argparse.Namespace) -> None:
    """Refuse what cannot be measured.

    Raises:
      ConfigError: an unknown shape, dtype or implementation, or a size out of range.
    """
    for what, asked, known in (
        ("shape", options.shapes or [], SHAPES),
        ("dtype", [options.dtype] if options.dtype is not None else [], DTYPES),
        ("implementation", options.implementations, IMPLEMENTATIONS),
    ):
        for name in asked:
            if name not in known:
                raise ConfigError(f"unknown {what} {name!r}; known are {', '.join(known)}")
    if options.shapes is None and (options.rows or options.context or options.slots):
        raise ConfigError("--rows, --context and --slots need --shapes")
    rows = options.rows or [1]
    if min(rows) < 1 or max(rows) > 256:
        raise ConfigError(f"rows must be from 1 to 256, got {', '.join(map(str, rows))}")
    least = [
        options.repeats,
        options.page_size,
        *(options.slots or []),
        *(x for x in (options.check,) if x is not None),
    ]
    if min(least) < 1 or min(options.context or [0]) < 0:
        raise ConfigError("slots, repeats, page size and cases must be at least 1, context at least 0")
    if not (options.milliseconds > 0 and options.limit_seconds > 0):
        raise ConfigError("milliseconds and limit-seconds must be above 0")
    tokens = options.prefill
    if tokens is not None and (tokens < 1 or tokens % min(PREFILL_CHUNK, tokens)):
        raise ConfigError(f"a prompt must be whole chunks of {PREFILL_CHUNK} tokens, got {tokens}")


def problems_of(options: argparse.Namespace) -> list[Problem]:
    """Every combination that is asked for, shapes innermost; or the default set."""
    if options.shapes is None:
        return default_problems(jax.default_backend() == "cpu")
    rows, contexts, slots = options.rows or [1, 16, 64], options.context or [512, 8192], options.slots or [1, 8]
    return [Problem(s, r, c, b) for b in slots for c in contexts for r in rows for s in options.shapes]


def prefill_shapes(options: argparse.Namespace) -> list[str]:
    """Shapes of the prompts."""
    if options.prefill is None:
        return []
    if options.shapes is not None:
        return options.shapes
    return ["smollm2-135m"] if jax.default_backend() == "cpu" else ["llama-3-8b", "llama-7b"]


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Replace the file in one go: whoever is stopped while writing leaves the one before."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.part")
        draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)


def run_table(options: argparse.Namespace, result: dict[str, Any], *, began: float) -> bool:
    """Measure everything that is asked for; False if tree attention itself failed somewhere."""
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    kind = jax.devices()[0].device_kind
    device = Device(dtype, find_peaks(kind), measure_limits(dtype), options.repeats, options.milliseconds / 1e3)
    result |= {
        "device_kind": kind, "dtype": dtype, "page_size": options.page_size, "repeats": options.repeats,
        "peaks": None if device.peaks is None else dataclasses.asdict(device.peaks),
        "measured": {"bytes_per_second": device.measured.bytes_per_second, "flops": device.measured.flops(dtype)},
        "problems": [], "prefill": [], "complete": False,
    }  # fmt: skip
    print(
        f"{result['machine']}, {dtype}: copy {device.measured.bytes_per_second / 1e9:.1f} GB/s, "
        f"product {(device.measured.flops(dtype) or 0) / 1e12:.2f} TFLOP/s",
        flush=True,
    )
    own = {"default", *options.implementations}
    settings = {"implementations": options.implementations, "without": options.without, "page_size": options.page_size}
    jobs: list[tuple[str, str, Callable[[], dict[str, Any]]]] = [
        ("problems", f"{p.shape}, {p.rows} rows, context {p.context}, {p.slots} slots",
         functools.partial(measure_problem, p, device, **settings))
        for p in problems_of(options)
    ]  # fmt: skip
    # Prompts behind the first problem: they are few, and a time limit should not cost all of them.
    jobs[1:1] = [
        ("prefill", f"{shape}, a prompt of {options.prefill} tokens",
         functools.partial(measure_prefill, shape, options.prefill, device, page_size=options.page_size))
        for shape in prefill_shapes(options)
    ]  # fmt: skip
    fine = True
    for number, (part, title, job) in enumerate(jobs, 1):
        if time.perf_counter() - began > options.limit_seconds:
            print(f"stopped after {options.limit_seconds:.0f} seconds, {len(jobs) - number + 1} of {len(jobs)} left")
            return fine
        try:
            entry = job()
        except Exception as error:  # the arrays do not fit, say: the other shapes still count
            entry = {"bytes": 0, "flops": 0, "rows_measured": [], "skipped": {"all": reason(error)}, "failed": ["all"]}
        fine &= not (own | {"all"}) & set(entry["failed"])
        print_entry(f"[{number}/{len(jobs)}, {time.perf_counter() - began:.0f} s] {title}", entry)
        result[part].append({"title": title, **entry})
        write_json(options.json, result)
    result["complete"] = True
    write_json(options.json, result)
    return fine


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or check; 1 if tree attention failed or was wrong."""
    options, began = parse_arguments(arguments), time.perf_counter()
    try:
        check_options(options)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    result: dict[str, Any] = {"machine": describe_machine(), "jax": jax.__version__}
    if options.check is None:
        return int(not run_table(options, result, began=began))
    fine = True
    for name in options.implementations or [kernel_here()]:
        found = check(options.check, name, seconds=options.limit_seconds)
        result.setdefault("check", {})[name or "default"] = found
        fine &= not found["wrong"] and found["cases"] > 0
        write_json(options.json, result)
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
