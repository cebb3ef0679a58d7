"""Does the model carry amounts that it cannot name? (arXiv:2605.30170, the comparison task.)

A model that answers True or False is asked whether a string has as many `c` as a board has black
stones (vision), or as another string has (text). As published, the unequal number is uniform over
all others, so most pairs are far apart and a rough idea of the amount is enough. Here accuracy is
also told by distance and balanced: always saying the same is right in one half of balanced pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int8
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from circuits.counting.boards import World, draw_strings, generator
from circuits.counting.display import MODALITY_STYLE, mark_regimes, percent
from circuits.counting.examples import Examples
from circuits.counting.lessons import Lesson
from circuits.counting.questions import MODALITIES, Asker, number_of_c
from circuits.counting.subject import (
    Progress,
    Setting,
    Subject,
    chunks,
    first_of_each_count,
    silent,
)
from circuits.counting.training import answer_logits
from circuits.report import Table
from circuits.runs import Result, interval_metrics
from interp.errors import InputError
from interp.stats import Interval, bootstrap_mean, proportion
from interp.toy import ToyVLM

NEAR = 3  # numbers at most this far apart are near
TRUE, FALSE, NEITHER = 1, 0, -1  # what an answer begins with
EQUAL, UNEQUAL, DRAWN = 0, 1, 2  # strings of `Pairs`: equal, published kind, then by distance
_SIGNS = 4  # stream of the seed; the examples use 1 to 3


@dataclass(frozen=True)
class Config(Setting):
    """Ask the True/False model to compare a board, or a string, with strings of other numbers."""

    distances: tuple[int, ...] = (1, 2, 3, 5, 10)
    """How far apart the unequal numbers are. One that some count of a regime cannot have on a board
    of this size is left out in that regime."""
    items_per_count: int = 10
    """Test examples of every count, at most; each is asked about with every string."""


class Pairs(NamedTuple):
    """Examples, and the strings that each is compared with.

    First the equal and the unequal string of the examples themselves, then one at each distance,
    more or fewer `c` with equal chance where both are possible.
    """

    examples: Examples
    strings: Int8[np.ndarray, "string example pos"]
    distances: tuple[int, ...]

    @property
    def same(self) -> Bool[np.ndarray, "string example"]:
        """Whether True is the right answer."""
        return np.stack([number_of_c(own) for own in self.strings]) == self.examples.counts


class _Asked(NamedTuple):
    """The pairs of a regime, and what the model says of them in a modality."""

    regime: str
    modality: str
    pairs: Pairs
    said: Int8[np.ndarray, "string example"]


def run(config: Config, subject: Subject | None = None, progress: Progress = silent) -> Result:
    """Shares of right answers, fractions of 1. Right: the first token is the right one of the two.

    `comparison.{modality}.{regime}`: balanced, the mean of `.equal` and `.unequal`, over the
    published kind of pair. `.distance_{d}`: pairs d apart (0: equal). `.balanced_{d}`: mean of
    the shares at 0 and at d. `.near`: the same with all d up to 3 pooled. `.says_true`: share of
    True over equal and drawn unequal pairs, half each. `comparison.invalid.{modality}.{regime}`:
    neither True nor False. `comparison.gap.{regime}`: near in text minus near in vision;
    `.beyond_id`: that minus the same of ID, where the model may not be equally good at both.

    Equal and unequal strings are the examples' own, also of records that others made; strings at a
    distance are always drawn here, of the test split, and both modalities get the same ones.
    Plain shares have Wilson intervals, the others those of `combined`; n counts examples.

    Raises:
        InputError: distances below 1 or given twice, or fewer than one item of a count.
    """
    _check(config)
    subject = Subject.load(config) if subject is None else subject
    if max(config.distances, default=0) >= subject.world.size**2:
        raise InputError(
            f"distances {config.distances}: numbers on a board of {subject.world.size**2} cells"
            f" are at most {subject.world.size**2 - 1} apart"
        )
    asked: list[_Asked] = []
    for regime, mask in subject.regimes.items():
        chosen = subject.examples.select(mask)
        chosen = chosen.select(first_of_each_count(chosen.counts, config.items_per_count))
        pairs = draw_pairs(chosen, subject.world, config.distances, config.data_seed)
        for modality in MODALITIES:
            asked.append(_Asked(regime, modality, pairs, says(subject.truth, modality, pairs)))
            progress("comparing", len(asked) / (len(MODALITIES) * len(subject.regimes)))
    metrics: dict[str, float | int | str] = {}
    for name, interval in (_shares(asked) | _gaps(asked)).items():
        metrics |= interval_metrics(f"comparison.{name}", interval)
    return Result(metrics, _data(subject.world, asked, metrics))


def draw_pairs(examples: Examples, world: World, distances: Sequence[int], seed: int) -> Pairs:
    """Examples of one regime with their strings.

    The full string is never drawn: there is only one.
    """
    counts, most = examples.counts, world.size**2 - 1
    fit = tuple(
        d for d in distances if all(count - d >= 0 or count + d <= most for count in counts)
    )
    strings = [examples.equal, examples.unequal]
    for distance in fit:
        own = (seed, distance, int(counts.min()))
        sign = generator(own, stream=_SIGNS).choice([-1, 1], len(counts))
        numbers = counts + distance * sign
        numbers = np.where((numbers < 0) | (numbers > most), counts - distance * sign, numbers)
        strings.append(draw_strings(numbers, length=world.size**2, seed=own, split="test"))
    return Pairs(examples, np.stack(strings), fit)


def says(model: ToyVLM, modality: str, pairs: Pairs) -> Int8[np.ndarray, "string example"]:
    """What the first token of each answer is: TRUE, FALSE or NEITHER."""
    asker, examples = Asker(model), pairs.examples
    items = examples.boards if modality == "vision" else examples.strings
    n_strings, n = pairs.strings.shape[:2]
    items, strings = np.concatenate([items] * n_strings), np.concatenate(pairs.strings)
    found = [_said(model, asker, modality, items[part], strings[part]) for part in chunks(items)]
    return np.concatenate(found).reshape(n_strings, n)


@torch.no_grad()
def _said(
    model: ToyVLM, asker: Asker, modality: str, items: np.ndarray, strings: np.ndarray
) -> Int8[np.ndarray, " example"]:
    false, true = asker.truth_answer(np.array([0, 1]))[:, 0].tolist()
    nothing = torch.zeros(len(items), 1, dtype=torch.long)  # only the first token is asked for
    lesson = Lesson(asker.truth(modality, items, strings), nothing)
    token = answer_logits(model, lesson)[:, 0].argmax(-1).cpu().numpy()
    return np.select([token == true, token == false], [TRUE, FALSE], NEITHER).astype(np.int8)


# --- estimates ----------------------------------------------------------------------------------


def combined(
    parts: Sequence[tuple[float, Bool[np.ndarray, " example"]]],
    counts: Int[np.ndarray, " example"],
) -> Interval:
    """A weighted sum of shares of the same examples: each part is a weight and who is counted.

    The interval takes the wider end of two: a bootstrap by count of the examples' own sums, and the
    hybrid of the parts' Wilson intervals (Newcombe 1998, extended to any weights by Zou, Huang and
    Zhang 2009). The first knows that examples of a count and parts of an example go together, but
    has no width where all answers are right; the second takes everything as independent.
    """
    sums = np.sum([weight * part for weight, part in parts], axis=0).round(12)  # 3 thirds are 1
    value, low, high, n = bootstrap_mean(sums, groups=counts)
    below, above = 0.0, 0.0
    for weight, part in parts:
        share = proportion(part)
        ends = weight * (share.low - share.value), weight * (share.high - share.value)
        below, above = below + min(ends) ** 2, above + max(ends) ** 2
    return Interval(value, min(low, value - below**0.5), max(high, value + above**0.5), n)


def _shares(asked: Sequence[_Asked]) -> dict[str, Interval]:
    """The intervals of each modality and regime, by the end of their key."""
    found = {}
    for regime, modality, pairs, said in asked:
        for name, interval in _of_modality(pairs, said).items():
            found[f"{modality}.{regime}{name}"] = interval
        neither = [(1 / len(said), row == NEITHER) for row in said]
        found[f"invalid.{modality}.{regime}"] = combined(neither, pairs.examples.counts)
    return found


def _gaps(asked: Sequence[_Asked]) -> dict[str, Interval]:
    """Text minus vision, paired by example and string; and how far that exceeds the one in ID."""
    near = {(one.regime, one.modality): _near(one.pairs, _right(*one[2:])) for one in asked}
    found = {}
    for regime, pairs in {one.regime: one.pairs for one in asked}.items():
        minus = [(-weight, part) for weight, part in near[regime, "vision"]]
        if minus:
            parts = [*near[regime, "text"], *minus]
            found[f"gap.{regime}"] = combined(parts, pairs.examples.counts)
    base = found.get("gap.id")
    beyond = {f"{k}.beyond_id": _minus(v, base) for k, v in found.items() if base and v is not base}
    return found | beyond


def _minus(a: Interval, b: Interval) -> Interval:
    """A difference of two estimates from different examples (as Newcombe 1998, method 10)."""
    value = a.value - b.value
    below = np.hypot(a.value - a.low, b.high - b.value)
    above = np.hypot(a.high - a.value, b.value - b.low)
    return Interval(value, value - float(below), value + float(above), a.n + b.n)


def _of_modality(pairs: Pairs, said: Int8[np.ndarray, "string example"]) -> dict[str, Interval]:
    counts, right = pairs.examples.counts, _right(pairs, said)
    equal, unequal = right[EQUAL], right[UNEQUAL]
    found = {
        "": combined([(0.5, equal), (0.5, unequal)], counts),
        ".equal": proportion(equal),
        ".unequal": proportion(unequal),
        ".distance_0": proportion(equal),
    }
    for distance, apart in zip(pairs.distances, right[DRAWN:], strict=True):
        found[f".distance_{distance}"] = proportion(apart)
        found[f".balanced_{distance}"] = combined([(0.5, equal), (0.5, apart)], counts)
    if near := _near(pairs, right):
        found[".near"] = combined(near, counts)
    if pairs.distances:
        share, true = 0.5 / len(pairs.distances), said == TRUE
        drawn = [(share, row) for row in true[DRAWN:]]
        found[".says_true"] = combined([(0.5, true[EQUAL]), *drawn], counts)
    return found


def _right(
    pairs: Pairs, said: Int8[np.ndarray, "string example"]
) -> Bool[np.ndarray, "string example"]:
    return said == pairs.same  # NEITHER is neither


def _near(
    pairs: Pairs, right: Bool[np.ndarray, "string example"]
) -> list[tuple[float, Bool[np.ndarray, " example"]]]:
    """Parts of the balanced share over equal pairs and those at most NEAR apart."""
    near = [row for d, row in zip(pairs.distances, right[DRAWN:], strict=True) if d <= NEAR]
    return [(0.5, right[EQUAL]), *((0.5 / len(near), row) for row in near)] if near else []


# --- what is shown ------------------------------------------------------------------------------


def _data(world: World, asked: Sequence[_Asked], metrics: dict[str, float | int | str]) -> dict:
    """What the figure and the table need: shares by distance, and near pairs by count."""
    regimes = {one.regime: world.regimes[one.regime] for one in asked}
    data: dict = {
        "regimes": {name: [counts[0], counts[-1]] for name, counts in regimes.items()},
        "distances": {one.regime: [0, *one.pairs.distances] for one in asked},
        "by_distance": {modality: {} for modality in MODALITIES},
        "by_count": {modality: [] for modality in MODALITIES},
    }
    for regime, modality, pairs, said in asked:
        data["by_distance"][modality][regime] = [
            {"distance": d, **_kept(metrics, f"comparison.{modality}.{regime}.distance_{d}")}
            for d in data["distances"][regime]
        ]
        data["by_count"][modality] += _by_count(pairs, _right(pairs, said))
    return data


def _kept(metrics: dict[str, float | int | str], key: str) -> dict:
    return {"value": metrics[key], **{end: metrics[f"{key}.{end}"] for end in ("low", "high", "n")}}


def _by_count(pairs: Pairs, right: Bool[np.ndarray, "string example"]) -> list[dict]:
    """Balanced share of right answers about near pairs, for every count."""
    rows, counts, parts = [], pairs.examples.counts, _near(pairs, right)
    for count in np.unique(counts) if parts else ():
        own = counts == count
        interval = combined([(weight, part[own]) for weight, part in parts], counts[own])
        rows.append({"count": int(count), **interval._asdict()})
    return rows


def figure(result: Result) -> Figure:
    """Right answers against the distance, by regime; below, near pairs against the count."""
    data, n = result.data, max(1, len(result.data["regimes"]))
    fig = plt.figure(figsize=(7.5, 5.2), layout="constrained")
    grid = fig.add_gridspec(2, n)
    tops = [fig.add_subplot(grid[0, i]) for i in range(len(data["regimes"]))]
    for ax, regime in zip(tops, data["regimes"], strict=True):
        _plot_distances(ax, data, regime)
    for ax in tops[1:]:
        ax.tick_params(labelleft=False)
    if tops:
        tops[0].set_ylabel("right answers")
        if len(data["distances"][next(iter(data["regimes"]))]) > 1:
            tops[0].legend(frameon=False, loc="lower right", fontsize=8)
    _plot_counts(fig.add_subplot(grid[1, :]), data)
    return fig


def _plot_distances(ax: Axes, data: dict, regime: str) -> None:
    places = data["distances"][regime]
    for shift, modality in zip((-0.07, 0.07), MODALITIES, strict=True):
        rows, style = data["by_distance"][modality][regime], MODALITY_STYLE[modality]
        x = np.arange(len(rows)) + shift
        _errorbar(ax, x[:1], rows[:1], {**style, "linestyle": "none"}, label=None)
        _errorbar(ax, x[1:], rows[1:], style, label=modality)
    ax.set_xticks(range(len(places)), ["equal", *map(str, places[1:])])
    ax.set(xlabel="numbers apart", ylim=(-0.04, 1.04), xlim=(-0.5, len(places) - 0.5))
    ax.set_title(regime.upper(), size=9)


def _errorbar(
    ax: Axes, x: Float[np.ndarray, " point"], rows: list[dict], style: dict, label: str | None
) -> None:
    y = np.array([row["value"] for row in rows])
    ends = [y - [row["low"] for row in rows], [row["high"] for row in rows] - y]
    if rows:
        ax.errorbar(x, y, np.maximum(ends, 0), ms=4, lw=1.2, elinewidth=1, label=label, **style)


def _plot_counts(ax: Axes, data: dict) -> None:
    for modality in MODALITIES:
        rows, style = data["by_count"][modality], MODALITY_STYLE[modality]
        x, y = [row["count"] for row in rows], [row["value"] for row in rows]
        ax.plot(x, y, ms=3.5, lw=1.2, label=modality, **style)
        low, high = [row["low"] for row in rows], [row["high"] for row in rows]
        ax.fill_between(x, low, high, color=style["color"], alpha=0.18, lw=0)
    ax.axhline(0.5, color="0.4", lw=0.8, ls=":")
    ax.text(1.0, 0.5, "chance", transform=ax.get_yaxis_transform(), size=8, color="0.3",
            ha="right", va="bottom")  # fmt: skip
    ax.set(
        xlabel="black stones (pictures) or letters c (text)",
        ylabel=f"right, balanced,\n1 to {NEAR} apart",
        ylim=(-0.04, 1.09),
    )
    mark_regimes(ax, data["regimes"])


def table(result: Result) -> Table:
    """One row for each modality and regime."""
    data, metrics = result.data, result.metrics
    distances = sorted({d for own in data["distances"].values() for d in own} - {0})
    parts = ["", *(f".balanced_{d}" for d in distances), ".near", ".says_true"]
    rows = [
        [
            modality,
            regime.upper(),
            *(percent(metrics, f"comparison.{modality}.{regime}{part}") for part in parts),
            percent(metrics, f"comparison.invalid.{modality}.{regime}"),
        ]
        for modality in MODALITIES
        for regime in data["regimes"]
    ]
    heads = ["as published", *(f"{d} apart" for d in distances), f"1 to {NEAR} apart"]
    heads += ["says True", "neither"]
    return Table(_caption(result), ["modality", "regime", *heads], rows)


def _caption(result: Result) -> str:
    metrics, data = result.metrics, result.data
    gaps = [
        f"{regime.upper()} {percent(metrics, f'comparison.gap.{regime}')}"
        for regime in data["regimes"]
        if f"comparison.gap.{regime}" in metrics
    ]
    caption = "Is the number the same? Right answers, balanced (chance 50), % [95 % interval]"
    if not gaps:
        return caption
    return f"{caption}. Text minus vision, 1 to {NEAR} apart: {', '.join(gaps)}"


def _check(config: Config) -> None:
    if config.items_per_count < 1:
        raise InputError(f"items_per_count is {config.items_per_count}; ask for at least 1")
    distances = config.distances
    if min(distances, default=1) < 1 or len(set(distances)) != len(distances):
        raise InputError(f"distances {distances}: give different whole numbers of at least 1")
