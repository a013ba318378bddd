"""Pearson's chi-square test of counts against a law, cells pooled, with its p-value; no scipy in the dependencies."""

import math
from collections.abc import Hashable, Mapping


def chi_square_p(seen: Mapping[Hashable, int], law: Mapping[Hashable, float], count: int) -> float:
    """Probability of counts at least as far from the law; cells expecting fewer than 5 are pooled, rarest first."""
    cells: list[tuple[float, int]] = []
    expected, found = 0.0, 0
    for key, p in sorted(law.items(), key=lambda item: item[1]):
        expected, found = expected + p * count, found + seen.get(key, 0)
        if expected >= 5:
            cells.append((expected, found))
            expected, found = 0.0, 0
    cells[-1] = (cells[-1][0] + expected, cells[-1][1] + found)
    statistic = sum((found - expected) ** 2 / expected for expected, found in cells)
    return upper_gamma((len(cells) - 1) / 2, statistic / 2)


def upper_gamma(a: float, x: float) -> float:
    """Regularised upper incomplete gamma function Q(a, x): a series below a + 1, a continued fraction above."""
    if x <= 0:
        return 1.0
    scale = math.exp(-x + a * math.log(x) - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while abs(term) > 1e-14 * abs(total):
            n += 1
            term *= x / n
            total += term
        return 1 - total * scale
    b = x + 1 - a
    c, d = 1e300, 1 / b
    h = d
    for i in range(1, 10_000):
        an = -i * (i - a)
        b += 2
        d = 1 / (an * d + b)
        c = b + an / c
        h *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return h * scale
