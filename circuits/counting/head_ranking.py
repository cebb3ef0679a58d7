"""Do two groups of samples agree on the heads that are needed most?

Vision and text are compared beside two halves of one modality, drawn within each count, so that
all comparisons rank heads by as many samples.
"""

from collections.abc import Mapping, Set
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.stats import hypergeom

from circuits.counting.boards import generator
from circuits.counting.head_pairs import KINDS
from circuits.runs import interval_metrics
from interp.stats import Interval

_DRAWS = 500
_TIES = 50  # draws of the order of heads that are needed equally often
_HALVES = 6  # stream of the seed


class Samples(NamedTuple):
    """The samples of one modality that are answered right, and the heads that each one needs."""

    counts: Int[np.ndarray, " sample"]
    needed: Bool[np.ndarray, "sample digit layer head"]


def top_metrics(samples: Mapping[str, Samples], *, seed: int) -> dict[str, float | int | str]:
    """How far two groups of samples agree on the heads needed most; absent without two groups.

    `heads.top.n`: how many heads are compared, a quarter of all, or as many as are needed at all by
    the modality that needs fewer. `heads.top.smallest_p`: the p of sharing all of them.
    `heads.top.{K}`: mean share of them that two halves have in common, `.low` and `.high` the
    middle 95 % of random halves. `heads.top.excess`: the smaller baseline minus cross, over the
    same halves. `heads.top.cross.p`: hypergeometric p of what the whole groups have in common;
    `.p_within_blocks`: the same when each group's heads are drawn anew within their blocks, for
    needing the same block is not needing the same heads. Ties are broken at random, for each group
    apart: one order for both would be an agreement. Both p are means over such draws.
    """
    rates = [rate(own.needed) for own in samples.values() if len(own.counts) > 1]
    n_heads = len(rates[0]) if rates else 0
    n = min([max(1, n_heads // 4), *(int((own > 0).sum()) for own in rates)])
    if len(rates) < 2 or not n:
        return {}
    rng = generator(seed, stream=_HALVES)
    shared = np.array([_shared(samples, n, rng) for _ in range(_DRAWS)]) / n
    found = {f"heads.top.{kind}": _middle(shared[:, k]) for k, kind in enumerate(KINDS)}
    found["heads.top.excess"] = _middle(shared[:, 1:].min(1) - shared[:, 0])
    metrics: dict[str, float | int | str] = {}
    for key, interval in found.items():
        metrics |= interval_metrics(key, interval)
    width = next(iter(samples.values())).needed.shape[3]
    drawn = [[_most(own, n, rng) for own in rates] for _ in range(_TIES)]
    p = [overlap_p(len(a & b), n, n_heads) for a, b in drawn]
    within = [overlap_p_within(a, b, n_heads, width) for a, b in drawn]
    return metrics | {
        "heads.top.n": n,
        "heads.top.smallest_p": overlap_p(n, n, n_heads),
        "heads.top.cross.p": float(np.mean(p)),
        "heads.top.cross.p_within_blocks": float(np.mean(within)),
    }


def rate(needed: Bool[np.ndarray, "sample digit layer head"]) -> Float[np.ndarray, " flat"]:
    """Share of samples and digits for which each head is needed."""
    return needed.mean((0, 1)).ravel()


def overlap_p(shared: int, chosen: int, n_heads: int) -> float:
    """Chance that two random sets of `chosen` of `n_heads` heads share at least `shared`."""
    return float(hypergeom.sf(shared - 1, n_heads, chosen, chosen))


def overlap_p_within(a: Set[int], b: Set[int], n_heads: int, width: int) -> float:
    """Chance that sets with as many heads in each block (of `width` heads) share at least as many.

    The number shared is a sum over blocks of independent hypergeometric numbers.
    """
    chances = np.ones(1)
    for start in range(0, n_heads, width):
        block = set(range(start, start + width))
        own = hypergeom(width, len(a & block), len(b & block))
        chances = np.convolve(chances, own.pmf(np.arange(width + 1)))
    return float(chances[len(a & b) :].sum())


def _shared(samples: Mapping[str, Samples], n: int, rng: np.random.Generator) -> list[int]:
    """Heads in common among the n needed most, of one random split in halves, for each of KINDS."""
    halves = {}
    for modality, own in samples.items():
        first = _half(own.counts, rng)
        halves[modality] = [_most(rate(own.needed[part]), n, rng) for part in (first, ~first)]
    vision, text = halves["vision"], halves["text"]
    return [len(a & b) for a, b in ((vision[0], text[0]), vision, text)]


def _most(rates: Float[np.ndarray, " flat"], n: int, rng: np.random.Generator) -> set[int]:
    """The n largest, ties broken at random."""
    return set(np.lexsort((rng.random(len(rates)), -rates))[:n].tolist())


def _half(
    counts: Int[np.ndarray, " sample"], rng: np.random.Generator
) -> Bool[np.ndarray, " sample"]:
    """True for a random half of the samples of every count."""
    order = np.lexsort((rng.random(len(counts)), counts))
    half = np.zeros(len(counts), dtype=bool)
    half[order[rng.integers(2) :: 2]] = True
    return half


def _middle(draws: Float[np.ndarray, " draw"]) -> Interval:
    """Mean and middle 95 %; the interval holds the mean also where nearly all draws agree."""
    low, high = np.quantile(draws, [0.025, 0.975])
    mean = float(draws.mean())
    return Interval(mean, min(float(low), mean), max(float(high), mean), len(draws))
