"""How sure is a number? Intervals of shares, means and differences, and the paired test.

Shares have Wilson's interval (Wilson 1927; recommended by Brown, Cai and DasGupta 2001,
doi:10.1214/ss/1009213286), which does not collapse at 0 and 1 as the bootstrap does. Means of
anything else have a percentile bootstrap that draws whole groups where examples come in groups
(Efron and Tibshirani 1993, chapters 8 and 13).
"""

from typing import NamedTuple, SupportsIndex

import numpy as np
from jaxtyping import Bool, Float, Real, Shaped
from scipy.stats import binomtest

from interp.errors import InputError

_BLOCK = 1_000_000  # draws held at once: 8 MB


class Interval(NamedTuple):
    """An estimate, the ends of its interval, and the number of examples behind it."""

    value: float
    low: float
    high: float
    n: int


def wilson(successes: SupportsIndex, n: SupportsIndex, confidence: float = 0.95) -> Interval:
    """Share of successes with Wilson's score interval (Wilson 1927, doi:10.2307/2276774).

    Raises:
        InputError: n is 0, or there are more successes than trials.

    >>> [round(x, 4) for x in wilson(20, 20)]
    [1.0, 0.8389, 1.0, 20]
    """
    k, n = int(successes.__index__()), int(n.__index__())
    _check_confidence(confidence)
    if n < 1:
        raise InputError(f"a share of {n} examples has no interval: leave it out")
    if not 0 <= k <= n:
        raise InputError(f"{k} successes in {n} examples: they lie between 0 and {n}")
    low, high = binomtest(k, n).proportion_ci(confidence, method="wilson")
    return Interval(k / n, float(low), float(high), n)


def proportion(correct: Bool[np.ndarray, "sample"], confidence: float = 0.95) -> Interval:
    """Share of true entries, with Wilson's interval.

    Raises:
        InputError: there is no entry, or they are not Booleans.
    """
    if correct.dtype != np.bool_:
        raise InputError(f"a share is of Booleans, these are {correct.dtype}: compare them first")
    return wilson(correct.sum(), correct.size, confidence)


def difference(
    a_successes: SupportsIndex,
    a_n: SupportsIndex,
    b_successes: SupportsIndex,
    b_n: SupportsIndex,
    confidence: float = 0.95,
) -> Interval:
    """Share in a minus share in b, for two independent samples; `n` is both sizes together.

    Newcombe's hybrid of two Wilson intervals (Newcombe 1998, method 10,
    doi:10.1002/(SICI)1097-0258(19980430)17:8<873::AID-SIM779>3.0.CO;2-I).

    Raises:
        InputError: a sample is empty or has more successes than trials.
    """
    a, b = wilson(a_successes, a_n, confidence), wilson(b_successes, b_n, confidence)
    value = a.value - b.value
    below = float(np.hypot(a.value - a.low, b.high - b.value))
    above = float(np.hypot(a.high - a.value, b.value - b.low))
    return Interval(value, value - below, value + above, a.n + b.n)


def bootstrap_mean(
    values: Shaped[np.ndarray, "sample"],
    *,
    groups: Shaped[np.ndarray, "label"] | None = None,
    n_resamples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Interval:
    """Mean of numbers or Booleans with a percentile bootstrap interval.

    `groups` names the group of each value (a count, a scene): then whole groups are drawn, with
    all their values (Davison and Hinkley 1997, section 3.8), because values of a group vary
    together. A single group cannot be drawn: its values are. A single value, or values that are
    all equal, give an interval of no width: use `proportion` for shares.

    Raises:
        InputError: no values, values that are not finite, or not one label for each value.
    """
    numbers = _finite(values, "values")
    if not len(numbers):
        raise InputError("the mean of 0 values has no interval: leave it out")
    sums, sizes = numbers, np.ones(len(numbers))
    if groups is not None:
        if groups.shape != values.shape:
            raise InputError(f"{len(values)} values and {len(groups)} group labels: give one each")
        found, index = np.unique(groups, return_inverse=True)
        if len(found) > 1:
            sums, sizes = np.bincount(index, numbers), np.bincount(index).astype(float)
    means = _drawn_ratios(sums, sizes, n_resamples, seed)
    interval = _percentile(float(numbers.mean()), means, confidence, len(numbers))
    return _within(interval, numbers)


def bootstrap_ratio(
    numerators: Shaped[np.ndarray, "group"],
    denominators: Shaped[np.ndarray, "group_"],
    *,
    n_resamples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Interval:
    """Sum of the numerators over sum of the denominators, when whole groups are drawn.

    For shares and means pooled over groups: each entry is one group, its numerator the sum over
    its examples, its denominator their number. A ratio of sums, not a mean of ratios, so a group
    with few examples does not dominate. Groups without examples are not drawn. `n` is the number
    of examples in all; a single group gives an interval of no width.

    Raises:
        InputError: all denominators are 0, one is not a number of examples, or a numerator stands
            over 0 examples.
    """
    top, bottom = _finite(numerators, "numerators"), _finite(denominators, "denominators")
    if top.shape != bottom.shape:
        raise InputError(f"{len(top)} numerators and {len(bottom)} denominators: give one each")
    if (bottom < 0).any() or (bottom != np.round(bottom)).any():
        raise InputError("denominators are numbers of examples: whole, and not below 0")
    if (top[bottom == 0] != 0).any():
        raise InputError("a group of 0 examples has a numerator that is not 0")
    top, bottom = top[bottom > 0], bottom[bottom > 0]
    if not len(top):
        raise InputError("all denominators are 0, so there is no ratio: leave it out")
    ratios = _drawn_ratios(top, bottom, n_resamples, seed)
    value, n = float(top.sum() / bottom.sum()), int(bottom.sum())
    return _within(_percentile(value, ratios, confidence, n), top / bottom)


def mcnemar(b: SupportsIndex, c: SupportsIndex) -> float:
    """Exact two-sided p value that one of two methods is right more often on the same items.

    b items only the first got right, c only the second; items on which both agree do not count
    (McNemar 1947, doi:10.1007/BF02295996). Without any disagreement it is 1.

    Raises:
        InputError: a number of items below 0.

    >>> mcnemar(1, 8)
    0.0390625
    """
    b, c = int(b.__index__()), int(c.__index__())
    if min(b, c) < 0:
        raise InputError(f"items that disagree: {b} and {c}, and neither can be below 0")
    return float(binomtest(b, b + c).pvalue) if b + c else 1.0


def _finite(values: Shaped[np.ndarray, "sample"], what: str) -> Float[np.ndarray, "sample"]:
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        raise InputError(f"{what} are a vector of numbers, not {values.shape} of {values.dtype}")
    numbers = values.astype(float)
    if not np.isfinite(numbers).all():
        bad = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise InputError(f"{what} must be finite: entry {bad} is {numbers[bad]}")
    return numbers


def _drawn_ratios(
    sums: Float[np.ndarray, "group"],
    sizes: Float[np.ndarray, "group"],
    n_resamples: int,
    seed: int,
) -> Float[np.ndarray, "resample"]:
    """Sum over size of as many groups as there are, drawn with replacement, again and again."""
    if n_resamples < 1:
        raise InputError(f"{n_resamples} resamples give no interval: take 1000 or more")
    rng, n_groups = np.random.default_rng(seed), len(sums)
    block, ratios = max(1, _BLOCK // n_groups), []
    for start in range(0, n_resamples, block):
        drawn = rng.integers(n_groups, size=(min(block, n_resamples - start), n_groups))
        ratios.append(sums[drawn].sum(1) / sizes[drawn].sum(1))
    return np.concatenate(ratios)


def _percentile(
    value: float, drawn: Float[np.ndarray, "resample"], confidence: float, n: int
) -> Interval:
    _check_confidence(confidence)
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, float(low), float(high), n)


def _within(interval: Interval, values: Real[np.ndarray, "sample"]) -> Interval:
    """A mean lies between the smallest and the largest value, rounding or not."""
    value, low, high = np.clip(interval[:3], values.min(), values.max())
    return Interval(float(value), float(low), float(high), interval.n)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise InputError(f"confidence {confidence} does not lie between 0 and 1: 0.95 is usual")
