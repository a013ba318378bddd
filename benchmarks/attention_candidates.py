"""What benchmarks.kernel times: tree attention and its rivals, each with the arrays it wants, for one shape."""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.roofline import Work, tree_work
from pallas_kernels.tree_attention import ancestor_words, tree_attention


class Heads(NamedTuple):
    """Attention of one model."""

    H: int
    """Query heads."""
    G: int
    """Key/value heads."""
    K: int
    """Head size."""


SHAPES: Mapping[str, Heads] = {
    "llama-7b": Heads(32, 32, 128),
    "opt-13b": Heads(40, 40, 128),
    "llama-65b": Heads(64, 64, 128),
    "llama-3-8b": Heads(32, 8, 128),
    "smollm2-135m": Heads(9, 3, 64),
    "tiny": Heads(4, 2, 16),
}
DTYPES = ("bfloat16", "float32")
OWN_TOLERANCE = {"bfloat16": 8e-3, "float32": 2e-5}
"""Largest max|d| / max|ref| of tree attention; the reference is float32 itself, so float32 is not judged sharply here:
`--check` does that, against float64."""
OTHER_TOLERANCE = 5e-2
"""The same of what it is compared with: bfloat16 probabilities and TF32 products are allowed, a wrong mask is not."""
QUERY_SCALE = 4.0
"""Deviation of the queries: peaked attention, in which one key too many or too few shows in the output."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One line of the table: a verify pass of one layer."""

    shape: str
    """Name in `SHAPES`."""
    rows: int
    """Tree rows of every slot, Q = N."""
    context: int
    """Committed tokens of every slot."""
    slots: int
    """B."""

    def work(self, itemsize: int) -> Work:
        """Bytes and FLOPs by formula."""
        prefixes = [self.context] * self.slots
        return tree_work(prefixes=prefixes, Q=self.rows, N=self.rows, itemsize=itemsize, **SHAPES[self.shape]._asdict())


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to compute a problem."""

    name: str
    """As in the table."""
    call: Callable[..., jax.Array]
    """From queries and a set's arrays to the output."""
    sets: Sequence[Sequence[jax.Array]]
    """The other arguments, once per copy of the cache."""
    expected: jax.Array
    """float32: what the first call must give."""
    tolerance: float
    """Largest max|d| / max|expected|."""


def attend(implementation: str | None, scale: float) -> Callable[..., jax.Array]:
    """Tree attention without its log-sum-exp."""
    return lambda q, *arrays: tree_attention(q, *arrays, scale=scale, implementation=implementation)[0]


def reason(error: BaseException) -> str:
    """The first line of an exception, not too long."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200]


def block_table_of(rng: np.random.Generator, slots: int, pages: int) -> np.ndarray:
    """int32 `[B, pages]`: every slot's pages, scattered over a cache with one page to spare."""
    return rng.permutation(slots * pages + 1)[: slots * pages].reshape(slots, pages).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def normals(key: jax.Array, *, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Random numbers made on the device."""
    return jax.random.normal(key, shape, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnames=("context", "padded"))
def contiguous(pages: jax.Array, new: jax.Array, block_table: jax.Array, *, context: int, padded: int) -> jax.Array:
    """`[B, padded, G, K]`: prefix and new rows of every slot in one array, zeros behind them."""
    G, _, Z, K = pages.shape
    B, table_pages = block_table.shape
    prefix = pages[:, block_table].reshape(G, B, table_pages * Z, K).transpose(1, 2, 0, 3)[:, :context]
    return jnp.pad(jnp.concatenate([prefix, new], 1), ((0, 0), (0, padded - context - new.shape[1]), (0, 0), (0, 0)))


def dense_mask(words: np.ndarray, *, context: int, padded: int) -> np.ndarray:
    """bool `[B, 1, Q, padded]`: the whole prefix, then the ancestors, nothing of the padding."""
    B, Q, _ = words.shape
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little").astype(bool)
    mask = np.zeros((B, 1, Q, padded), bool)
    mask[..., :context] = True
    mask[:, 0, :, context : context + Q] = bits[..., :Q]
    return mask


def candidates_of(
    problem: Problem,
    dtype: str,
    *,
    page_size: int,
    copies: int,
    implementations: Sequence[str],
    without: Sequence[str],
) -> tuple[jax.Array, list[Candidate], dict[str, str]]:
    """The queries, everything that can run on them, and why the rest cannot."""
    (H, G, K), B, Q, context = SHAPES[problem.shape], problem.slots, problem.rows, problem.context
    scale, pages, rng = K**-0.5, max(1, -(-context // page_size)), np.random.default_rng(0)
    draw = functools.partial(normals, dtype=dtype)
    keys = iter(jax.random.split(jax.random.key(0), 3 + 2 * copies))
    q = (QUERY_SCALE * draw(next(keys), shape=(B, Q, H, K))).astype(dtype)
    k_new, v_new = (draw(next(keys), shape=(B, Q, G, K)) for _ in range(2))
    caches = [tuple(draw(next(keys), shape=(G, B * pages + 1, page_size, K)) for _ in range(2)) for _ in range(copies)]
    parent = np.full((B, Q), Q, np.int32)
    for n in range(1, Q):
        parent[:, n] = rng.integers(0, n, B)
    words, table = ancestor_words(jnp.asarray(parent)), jnp.asarray(block_table_of(rng, B, pages))
    length = jnp.full((B,), context, jnp.int32)

    paged = [(k_new, v_new, *cache, table, length, words) for cache in caches]
    small = B * pages * page_size * H * K * 4 < 2**28  # the plain definition lays out all keys for every query head
    exact = jax.jit(attend("reference" if small else "xla", scale))
    expected = exact(q.astype(jnp.float32), *paged[0])
    own = {"default": None, **{name: name for name in implementations}}
    found = [
        Candidate(name, attend(implementation, scale), paged, expected, OWN_TOLERANCE[dtype])
        for name, implementation in own.items()
    ]

    def other(name: str, call: Callable[..., jax.Array], sets: Sequence[Any], expected: jax.Array = expected) -> None:
        found.append(Candidate(name, call, sets, expected, OTHER_TOLERANCE))

    missing: dict[str, str] = {}
    # Keys padded to whole tiles: kernels are fastest there, and some refuse anything else.
    padded = -(-(context + Q) // 128) * 128
    mask = jnp.asarray(dense_mask(np.asarray(words), context=context, padded=padded))
    lay_out = functools.partial(contiguous, block_table=table, context=context, padded=padded)
    dense = [(lay_out(k, k_new), lay_out(v, v_new), mask) for k, v in caches]
    for name, call in dense_calls(scale).items():
        if isinstance(call, str):
            missing[name] = call
        else:
            other(name, call, dense)

    paged_call = jax_paged_call(problem, scale, page_size=page_size, pages=pages)
    if isinstance(paged_call, str):
        missing["jax paged"] = paged_call
    else:  # it knows no new rows: its query attends to the prefix alone
        prefix_only = exact(q.astype(jnp.float32), *paged[0][:-1], jnp.zeros_like(words))
        other("jax paged", paged_call, [(*cache, table, length) for cache in caches], prefix_only)
    missing |= {c.name: "left out by --without" for c in found if c.name in without}
    return q, [c for c in found if c.name not in missing], missing


def dense_calls(scale: float, **causal: bool) -> dict[str, Callable[..., jax.Array] | str]:
    """Attentions over contiguous keys with a dense mask (or, with `is_causal`, a causal one); or why not, by name."""

    def masked(attention: Callable[..., Any]) -> Callable[..., jax.Array]:
        return lambda q, k, v, *mask: attention(q, k, v, mask=mask[0] if mask else None, scale=scale, **causal)

    calls: dict[str, Callable[..., jax.Array] | str] = {
        "dense": masked(jax.nn.dot_product_attention),
        "dense cudnn": "needs an NVIDIA GPU",
        "tokamax": "tokamax is not installed",
    }
    if jax.default_backend() == "gpu":
        calls["dense cudnn"] = masked(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"))
    try:
        calls["tokamax"] = masked(load_tokamax().dot_product_attention)
    except ModuleNotFoundError as error:
        if error.name != "tokamax":
            calls["tokamax"] = reason(error)
    except Exception as error:  # one that was made for another jax
        calls["tokamax"] = reason(error)
    return calls


def load_tokamax() -> Any:
    """The module, if it is installed; its settings are absl flags, which it would look for on our command line."""
    tokamax = importlib.import_module("tokamax")
    flags = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        flags(["benchmarks.kernel"])
    return tokamax


def jax_paged_call(problem: Problem, scale: float, *, page_size: int, pages: int) -> Callable[..., jax.Array] | str:
    """jax's own paged attention of one query, or why it cannot run."""
    backend = jax.default_backend()
    if problem.rows != 1:
        return "knows one query only"
    if problem.context == 0:
        return "needs a prefix"
    if backend not in ("gpu", "tpu"):
        return "needs a GPU or a TPU"
    if backend == "gpu":
        splits = math.gcd(16, pages)
        block = math.gcd(max(1, 128 // page_size), pages // splits)
        options = {"k_splits": splits, "pages_per_compute_block": block}
    else:
        options = {"pages_per_compute_block": math.gcd(max(1, 512 // page_size), pages)}
    try:
        attention = importlib.import_module(f"jax.experimental.pallas.ops.{backend}.paged_attention").paged_attention
    except ImportError as error:
        return reason(error)

    def call(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, length: jax.Array) -> jax.Array:
        arguments = (table, length) if backend == "gpu" else (length, table)
        return attention((q[:, 0] * scale).astype(q.dtype), k, v, *arguments, **options)[:, None]

    return call
