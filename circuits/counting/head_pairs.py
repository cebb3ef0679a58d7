"""How alike are the heads that samples of one count need? Pairs of samples, told by modality.

Every pair of samples of one count is compared: a picture with a text (`cross`), two pictures, two
texts. Intervals draw whole counts, since the pairs of a count share their samples.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from circuits.counting.boards import generator
from interp.stats import Interval, bootstrap_ratio, wilson

KINDS = ("cross", "vision", "text")  # of pairs: vision with text, and the two baselines
_RESAMPLES = 2000
_PERMUTE = 5  # stream of the seed

Vectors = Mapping[str, Mapping[int, Bool[np.ndarray, "sample feature"]]]
"""By modality and count: which heads each sample needs, flat."""


class CountTable(NamedTuple):
    """The samples of one count, of both modalities, and how each pair of them relates."""

    count: int
    is_vision: Bool[np.ndarray, " sample"]
    relations: dict[str, Float[np.ndarray, "sample sample"]]
    """By name; symmetric, zero between a sample and itself."""


def by_count(vectors: Vectors) -> list[CountTable]:
    """The relations of all samples of each count."""
    tables = []
    for count in sorted({count for own in vectors.values() for count in own}):
        parts = {m: own[count] for m, own in vectors.items() if count in own}
        is_vision = np.concatenate([np.full(len(v), m == "vision") for m, v in parts.items()])
        tables.append(CountTable(count, is_vision, relations(np.concatenate(list(parts.values())))))
    return tables


def relations(
    vectors: Bool[np.ndarray, "sample feature"],
) -> dict[str, Float[np.ndarray, "sample sample"]]:
    """What can be said of each pair of vectors: 1 or 0, and Jaccard's overlap."""
    ones = vectors.astype(float)
    shared, size = ones @ ones.T, ones.sum(1)
    union = size[:, None] + size - shared
    filled = (size[:, None] > 0) & (size > 0)
    found = {
        "any": np.ones_like(union),
        "empty": union == 0,
        "not_empty": union > 0,
        "filled": filled,
        "differ": union > shared,
        "disjoint": filled & (shared == 0),
        "jaccard": shared / np.maximum(union, 1),
    }
    apart = 1 - np.eye(len(vectors))
    return {name: relation * apart for name, relation in found.items()}


def pair_sums(
    relation: Float[np.ndarray, "sample sample"], is_vision: Bool[np.ndarray, "*draw sample"]
) -> Float[np.ndarray, "*draw kind"]:
    """Sum of a relation over the pairs of each of KINDS, every pair once."""
    vision = is_vision.astype(float)
    text = 1 - vision
    to_vision, to_text = vision @ relation, text @ relation
    sums = [to_vision * text, to_vision * vision / 2, to_text * text / 2]
    return np.stack([own.sum(-1) for own in sums], -1)


def over_counts(
    sums: Float[np.ndarray, " count"], pairs: Float[np.ndarray, " count"]
) -> Interval | None:
    """A share of pairs, with a bootstrap that draws whole counts; None without pairs.

    Where all pairs agree it would have no width: then the ends are Wilson's for as many counts as
    there are. A single count tells nothing about others: 0 to 1.
    """
    if not pairs.any():
        return None
    value, low, high, n = bootstrap_ratio(sums, pairs, n_resamples=_RESAMPLES)
    counts = int((pairs > 0).sum())
    if counts == 1:
        low, high = 0.0, 1.0
    elif value in (0.0, 1.0):
        _, low, high, _ = wilson(int(value) * counts, counts)
    return Interval(value, low, high, n)


def excess(
    differ: Float[np.ndarray, "count kind"], pairs: Float[np.ndarray, "count kind"]
) -> Interval | None:
    """Share of cross pairs that differ, minus the larger of the same within vision and text.

    All three are drawn together, by count; draws in which one has no pairs are left out. Where all
    draws agree the ends come from the intervals of both shares (Newcombe's hybrid).
    """
    if not pairs.any(0).all():
        return None
    counts = np.arange(len(pairs))
    drawn = np.random.default_rng(0).choice(counts, (_RESAMPLES, len(counts)))
    every = np.concatenate([counts[None], drawn])  # what was seen, then the draws
    shares = _shares(differ[every].sum(1), pairs[every].sum(1))
    value, *found = shares[:, 0] - shares[:, 1:].max(1)
    low, high = np.nanquantile(found, [0.025, 0.975])
    if low == high:
        larger = 1 + int(shares[0, 1:].argmax())
        a, b = (over_counts(differ[:, k], pairs[:, k]) for k in (0, larger))
        low = value - np.hypot(a.value - a.low, b.high - b.value)
        high = value + np.hypot(a.high - a.value, b.value - b.low)
    return Interval(float(value), float(low), float(high), int(pairs[:, 0].sum()))


def _shares(
    sums: Float[np.ndarray, "*draw kind"], pairs: Float[np.ndarray, "*draw kind"]
) -> Float[np.ndarray, "*draw kind"]:
    return np.where(pairs > 0, sums / np.maximum(pairs, 1), np.nan)


def permutation_p(tables: Sequence[CountTable], n: int, *, seed: int) -> float | None:
    """How often labels vision and text, permuted within counts, part the samples as much.

    Statistic: share of cross pairs that differ, minus the mean of the two baselines; one-sided,
    p = (1 + as large) / (1 + n). Permutations for which a share does not exist count as large. None
    where the statistic itself does not exist.
    """
    rng = generator(seed, stream=_PERMUTE)
    differ, pairs = np.zeros((n + 1, len(KINDS))), np.zeros((n + 1, len(KINDS)))
    for own in tables:
        drawn = rng.permuted(np.tile(own.is_vision, (n, 1)), axis=1)
        labels = np.concatenate([own.is_vision[None], drawn])
        differ += pair_sums(own.relations["differ"], labels)
        pairs += pair_sums(own.relations["not_empty"], labels)
    shares = _shares(differ, pairs)
    statistic = shares[:, 0] - shares[:, 1:].mean(1)
    if np.isnan(statistic[0]):
        return None
    as_large = int(np.count_nonzero(~(statistic[1:] < statistic[0])))
    return (1 + as_large) / (1 + n)
