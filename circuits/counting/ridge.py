"""Is a number read linearly from activations, and how well?

A ridge whose penalty is chosen on counts that it was not fitted on; its read-outs are scored as
exact numbers, by their distance and by their rank.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from interp.errors import InputError
from interp.stats import Interval, bootstrap_mean, proportion

PENALTIES = tuple(10.0**power for power in range(-2, 5))
"""Of the ridge, on standardised activations; the best on counts left out is taken."""
FOLDS = 5  # blocks of neighbouring counts, left out in turn: the outer two are extrapolated to
_RESAMPLES = 1000
_BLOCK = 1_000_000  # numbers held at once by the bootstrap: 8 MB an array


@dataclass(frozen=True, eq=False)
class ReadOut:
    """A number read linearly from raw activations."""

    weight: Float[np.ndarray, " d_model"]
    bias: float
    penalty: float
    """Of `PENALTIES`, on standardised activations."""
    left_out: float
    """Mean squared error on counts left out, of the penalty that was taken."""

    def __call__(self, x: Float[np.ndarray, "item d_model"]) -> Float[np.ndarray, " item"]:
        return x.astype(float) @ self.weight + self.bias


def fit_ridge(
    x: Float[np.ndarray, "item d_model"], counts: Int[np.ndarray, " item"], *, between: bool = False
) -> ReadOut:
    """A ridge on standardised activations, with the penalty that errs least on counts left out.

    Means, scales and weights of a fold come from its own items alone (see `folds`).

    Raises:
        InputError: fewer than two counts.
    """
    x, errors = x.astype(float), []
    for fitted, left in folds(counts, between=between):
        weights, biases = _solutions(x[fitted], counts[fitted])
        errors.append(((x[left] @ weights + biases - counts[left, None]) ** 2).mean(0))
    error = np.mean(errors, axis=0)
    weights, biases = _solutions(x, counts)
    best = int(error.argmin())
    return ReadOut(weights[:, best], float(biases[best]), PENALTIES[best], float(error[best]))


def folds(
    counts: Int[np.ndarray, " item"], *, between: bool = False
) -> list[tuple[Int[np.ndarray, " fitted"], Int[np.ndarray, " left_out"]]]:
    """Items to fit on and to test on; no count is in both.

    Blocks of neighbouring counts are left out in turn, so that the outer ones are extrapolated to.
    With `between`, every fifth count is, so that all lie among counts that are fitted.

    Raises:
        InputError: fewer than two counts.
    """
    labels = np.unique(counts)
    if len(labels) < 2:
        raise InputError(f"a ridge is fitted on two counts or more; these are {labels.tolist()}")
    n = min(FOLDS, len(labels))
    parts = [labels[i::n] for i in range(n)] if between else np.array_split(labels, n)
    left_out = [np.isin(counts, part) for part in parts]
    return [(np.flatnonzero(~own), np.flatnonzero(own)) for own in left_out]


def _solutions(
    x: Float[np.ndarray, "item d_model"], counts: Int[np.ndarray, " item"]
) -> tuple[Float[np.ndarray, "d_model penalty"], Float[np.ndarray, " penalty"]]:
    """Weights and biases of all penalties at once, on raw activations."""
    scaler, targets = StandardScaler(), np.tile(counts[:, None], len(PENALTIES))
    z = scaler.fit_transform(_without_rounding(x))
    ridge = Ridge(alpha=np.array(PENALTIES), solver="svd").fit(z, targets)  # a target a penalty
    weights = (ridge.coef_ / scaler.scale_).T
    return weights, ridge.intercept_ - scaler.mean_ @ weights


def _without_rounding(x: Float[np.ndarray, "item d_model"]) -> Float[np.ndarray, "item d_model"]:
    """One value where rounding alone varies, which standardising would blow up to a signal."""
    rounding = 2 * np.finfo(np.float32).eps * np.abs(x).max(0)
    return np.where(np.ptp(x, axis=0) <= rounding, x[0], x)


def read_out_scores(
    values: Float[np.ndarray, " example"], counts: Int[np.ndarray, " example"]
) -> dict[str, Interval]:
    """How good read-outs are, by the end of the key: exact share, `.error` and `.spearman`."""
    scores = {
        "": proportion(np.rint(values) == counts),
        ".error": bootstrap_mean(np.abs(values - counts), groups=counts),
    }
    rank = spearman(values, counts)
    return scores | ({} if rank is None else {".spearman": rank})


def spearman(
    values: Float[np.ndarray, " example"], counts: Int[np.ndarray, " example"], *, seed: int = 0
) -> Interval | None:
    """Rank correlation with a percentile bootstrap that draws whole counts.

    Ties have their mean rank. Draws of one count alone have no correlation and are left out. None
    where there is one count, or all values are equal. The interval is widened to hold the estimate.
    """
    labels, group = np.unique(counts, return_inverse=True)
    levels, level = np.unique(values, return_inverse=True)
    if min(len(labels), len(levels)) < 2:
        return None
    even = np.full(len(labels), 1 / len(labels))
    drawn = np.random.default_rng(seed).multinomial(len(labels), even, size=_RESAMPLES)
    times = np.concatenate([np.ones((1, len(labels)), dtype=int), drawn])
    parts = np.array_split(times, 1 + times.shape[0] * len(values) // _BLOCK)
    value, *found = np.concatenate([_rank_correlations(part, group, level) for part in parts])
    low, high = np.nanquantile(found, [0.025, 0.975])
    return Interval(float(value), float(min(low, value)), float(max(high, value)), int(len(values)))


def _rank_correlations(
    times: Int[np.ndarray, "draw count"],
    group: Int[np.ndarray, " example"],
    level: Int[np.ndarray, " example"],
) -> Float[np.ndarray, " draw"]:
    """Spearman's coefficient when the examples of each count are there so many times; or NaN."""
    weight = times[:, group].astype(float)
    order = np.argsort(level, kind="stable")
    starts = np.flatnonzero(np.diff(level[order], prepend=-1))
    middle = (weight.sum(1, keepdims=True) + 1) / 2
    x = _midranks(times * np.bincount(group))[:, group] - middle
    y = _midranks(np.add.reduceat(weight[:, order], starts, axis=1))[:, level] - middle
    scale = np.sqrt((weight * x * x).sum(1) * (weight * y * y).sum(1))
    with np.errstate(invalid="ignore"):  # a draw of one count: 0 / 0
        return (weight * x * y).sum(1) / scale


def _midranks(sizes: np.ndarray) -> Float[np.ndarray, "draw tie"]:
    """Mean rank of each group of ties, from the sizes of the groups in their order."""
    return np.cumsum(sizes, axis=1) - (sizes - 1) / 2
