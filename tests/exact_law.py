"""The float64 oracle: what the LLM's law is, how trees are drawn, and what known mistakes would do to it.

Plain numpy, written from the definitions (SpecInfer, Algorithm 2; vLLM's sampler; the order statistics of draws), with
nothing taken from the package, so that a copied mistake cannot prove itself right. enumeration.py drives the package.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Rules(NamedTuple):
    """Sampling parameters of one request; the defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_tokens: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    bad: tuple[tuple[int, ...], ...] = ()
    """Token sequences that may not be completed."""

    @property
    def is_shaped(self) -> bool:
        """Anything but temperature and filters."""
        return self[4:] != Rules()[4:]


def shaped(
    logits_V: np.ndarray, rules: Rules, *, prompt: Sequence[int] = (), output: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
) -> np.ndarray:  # fmt: skip
    """Logits after bias, bans and penalties, in vLLM's order."""
    x_V = np.array(logits_V, np.float64)
    for token, bias in rules.bias:
        x_V[token] += bias
    if len(output) < rules.min_tokens:
        x_V[list(stop_ids)] = -np.inf
    context = [*prompt, *output]
    for *before, last in rules.bad:
        if len(before) <= len(context) and context[len(context) - len(before) :] == before:
            x_V[last] = -np.inf
    count_V = np.bincount(np.array(output, int), minlength=len(x_V)).astype(float)
    for token in {*prompt, *output}:
        x_V[token] = x_V[token] / rules.repetition if x_V[token] > 0 else x_V[token] * rules.repetition
    return x_V - rules.frequency * count_V - rules.presence * (count_V > 0)


def filtered(x_V: np.ndarray, rules: Rules) -> np.ndarray:
    """Probabilities after temperature, min-p, top-k and top-p, by sorting; ties with the last one kept are kept."""
    if not np.isfinite(x_V.max()):
        return np.zeros(len(x_V))
    if rules.temperature == 0:
        return (np.arange(len(x_V)) == np.argmax(x_V)) * 1.0
    p_V = np.exp((x_V - x_V.max()) / rules.temperature)
    p_V = p_V * (p_V >= rules.min_p * p_V.max())
    if 0 < rules.top_k < len(p_V):
        p_V = p_V * (p_V >= np.sort(p_V)[-rules.top_k])
    p_V = p_V / p_V.sum()
    if rules.top_p < 1:
        falling_V = -np.sort(-p_V)
        last = np.searchsorted(np.cumsum(falling_V), rules.top_p)  # the first that reaches top_p
        p_V = p_V * (p_V >= falling_V[min(last, len(p_V) - 1)])
    return p_V / p_V.sum()


class TableModel(NamedTuple):
    """A model of few tokens: fixed logits behind every path of tokens, and what its sampling parameters make of them.

    Paths are numbered: the empty one is 0, and token t behind path c is path `c * V + t + 1`.
    """

    logits_PV: np.ndarray
    """float32 `[P, V]`."""
    rules: Rules = Rules()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    """Generated before the root's path; its last token is the root."""
    stop_ids: tuple[int, ...] = ()
    """Banned before `rules.min_tokens` are out."""

    def law(self, path: Sequence[int]) -> np.ndarray:
        """float64 `[V]`, the token behind a path."""
        x_V = self.logits_PV[path_number(path, self.logits_PV.shape[1])]
        output = (*self.output, *path)
        return filtered(shaped(x_V, self.rules, prompt=self.prompt, output=output, stop_ids=self.stop_ids), self.rules)

    def laws(self, depth: int) -> np.ndarray:
        """float64 `[P', V]`: behind every path of at most `depth` tokens, by number."""
        V = self.logits_PV.shape[1]
        return np.stack([self.law(path) for d in range(depth + 1) for path in itertools.product(range(V), repeat=d)])

    def joint(self, length: int) -> np.ndarray:
        """float64 `[V ** length]`: the law of the next tokens."""
        nothing_yet = [np.array([[1.0]])]
        return continued(nothing_yet, self.laws(length - 1), length)


def path_number(path: Iterable[int], V: int) -> int:
    """The number of a path; numbers of equally long paths are consecutive, in the order of itertools.product."""
    number = 0
    for token in path:
        number = number * V + token + 1
    return number


def first_number(length: int, V: int) -> int:
    """The number of the first path of a length."""
    return sum(V**d for d in range(length))


def continued(mass: Sequence[np.ndarray], law_PV: np.ndarray, length: int) -> np.ndarray:
    """The law of `length` tokens if the model goes on where less is known.

    Args:
      mass: at index a the probability that exactly these a tokens are known, float64 `[V ** a, 1]`.
      law_PV: the model's, behind every path shorter than `length`.
      length: tokens.
    """
    V = law_PV.shape[1]
    total = np.zeros((1, 1))
    for a in range(length):
        total = total + (mass[a] if a < len(mass) else 0.0)
        start = first_number(a, V)
        total = (total.reshape(-1, 1) * law_PV[start : start + V**a]).reshape(-1, 1)
    return (total + (mass[length] if length < len(mass) else 0.0)).ravel()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Total variation."""
    return 0.5 * float(np.abs(a - b).sum())


# How children are drawn. A draw is a token, or NOTHING where the distribution had no token left.

NOTHING = -1


def independent(q_V: np.ndarray, k: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every outcome of k draws with replacement, and its probability."""
    for tokens in itertools.product(np.flatnonzero(q_V).tolist(), repeat=k):
        yield float(np.prod(q_V[list(tokens)])), tokens


def one_after_the_other(q_V: np.ndarray, k: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every outcome of k draws without replacement, in order; draws beyond q's support are NOTHING."""
    support = np.flatnonzero(q_V).tolist()
    for tokens in itertools.permutations(support, min(k, len(support))):
        probability, left = 1.0, float(q_V.sum())
        for token in tokens:
            probability, left = probability * q_V[token] / left, left - q_V[token]
        yield probability, (*tokens, *[NOTHING] * (k - len(tokens)))


def likeliest(q_V: np.ndarray, k: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """The k likeliest tokens, without randomness."""
    yield 1.0, tuple(np.argsort(-q_V, kind="stable")[:k].tolist())


# What comes out of one node, given its draws: multi-step speculative sampling and known mistakes.

Draw = tuple[int, np.ndarray]
"""A token and the q_V that it is taken to be drawn from."""
Pick = Callable[[np.ndarray, Sequence[Draw]], np.ndarray]


def mss(
    p_V: np.ndarray, draws: Sequence[Draw], *, reduced: bool = True, correction: str = "residual"
) -> np.ndarray:  # fmt: skip
    """The law of the token emitted at a node (Algorithm 2).

    Args:
      p_V: the LLM's law.
      draws: in the order tried.
      reduced: take q out of p after a rejection; False is a mistake.
      correction: what the last token is drawn from: "residual"; "p" and "swapped" (max(0, q - p)) are mistakes.
    """
    out_V, reach, now_V, left_V = np.zeros(len(p_V)), 1.0, p_V, p_V
    for token, q_V in draws:
        accept = min(1.0, now_V[token] / q_V[token]) if q_V[token] > 0 else 0.0
        out_V[token] += reach * accept
        reach *= 1 - accept
        left_V = np.maximum(q_V - now_V if correction == "swapped" else now_V - q_V, 0)
        left_V = left_V / left_V.sum() if left_V.sum() > 1e-12 else now_V
        now_V = left_V if reduced else now_V
    return out_V + reach * (p_V if correction == "p" else left_V)


def renormalised(q_V: np.ndarray, tokens: Sequence[int]) -> list[Draw]:
    """Draws with q renormalised over what was not drawn before."""
    draws = []
    for token in tokens:
        draws.append((token, q_V / max(q_V.sum(), 1e-300)))
        q_V = np.where(np.arange(len(q_V)) == token, 0.0, q_V)
    return draws


def kept(q_V: np.ndarray, tokens: Sequence[int]) -> list[Draw]:
    """Draws with q as it was."""
    return [(token, q_V) for token in tokens]


def emitted(
    outcomes: Iterable[tuple[float, tuple[int, ...]]], given: Callable[[tuple[int, ...]], np.ndarray]
) -> np.ndarray:
    """The law of the emitted token over all outcomes of the draws."""
    return sum(probability * given(tokens) for probability, tokens in outcomes)
