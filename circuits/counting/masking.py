"""Does the answer follow the stones? Hide some, and ask again. (arXiv:2605.30170, masking)

On boards of ID counts, k patches that the probe calls black are hidden as keys in the encoder and
in the decoder: the right answer is k lower. Hidden white or empty patches should change nothing;
patches hidden at random should take off the black ones among them. In text, letters are hidden in
the same way in the decoder. A mask leaves fewer keys to average over, so a model that counts by a
share of its keys is moved by any mask: the controls show it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int8
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from circuits.counting import hidden_number
from circuits.counting.boards import BLACK, EMPTY, WHITE, C, generator
from circuits.counting.display import percent, stones
from circuits.counting.questions import Asker
from circuits.counting.subject import Progress, Subject, chunks, silent
from circuits.report import Table
from circuits.runs import Result, interval_metrics
from interp.errors import InputError
from interp.interventions import Mask, Where
from interp.stats import Interval, bootstrap_mean, proportion

KINDS = {"vision": ("black", "white", "empty", "random"), "text": ("c", "other")}
"""What is hidden: patches by what the probe calls them, letters by what they are."""
NAMES = {"vision": "boards", "text": "strings"}
_CALLED = {"black": BLACK, "white": WHITE, "empty": EMPTY}
_CHOICE, _ORDER = 11, 12  # streams of the masking seed; with _ORDER comes the place of the kind


@dataclass(frozen=True)
class Config(hidden_number.Config):
    """Hide 1 to `most` stones or letters, and ask for the number again."""

    most: int = 5
    """The most that are hidden; boards need as many of every kind, strings as many c and others."""
    boards: int = 200
    """At most so many boards, and so many strings, are asked about."""
    mask_seed: int = 0
    """Seed of the choice of boards and of what is hidden on them."""


class Items(NamedTuple):
    """Boards or strings of one modality, and in which order each kind's places are hidden."""

    modality: str
    items: np.ndarray
    counts: Int[np.ndarray, " item"]
    orders: dict[str, Int[np.ndarray, "item hidden"]]
    """By kind: the first k places of a row are hidden, so those of k are among those of k + 1."""
    drops: dict[str, Int[np.ndarray, "item hidden"]]
    """By kind: how far the right answer falls when the first 1, 2, ... places are hidden."""


def run(config: Config, subject: Subject | None = None, progress: Progress = silent) -> Result:
    """Share of answers that are right once k patches or letters are hidden.

    `masking.{modality}.{kind}.k{k}`: free answers, with `.digits` answers held to two digits; both
    with Wilson intervals. Right is the count less k (black, c), less the black ones among them
    (random), or the count itself (white, empty, other). `masking.{modality}.{kind}.shift.k{k}`:
    mean answer held to digits less the count without a mask, in stones (bootstrap by count).

    The same items stand behind every kind and k, all answered right without a mask:
    `masking.vision.boards` and `masking.text.strings` say how many. Left out were
    `masking.{modality}.few` that have fewer than `most` of a kind, `.wrong` that are answered
    wrong, and `.spare` that were more than asked for.

    Raises:
        InputError: `most` or `boards` under 1.
    """
    if config.most < 1 or config.boards < 1:
        raise InputError(f"most is {config.most}, boards is {config.boards}: ask for at least 1")
    subject = subject or Subject.load(config)
    metrics: dict[str, float | int | str] = {}
    data: dict = {"k": list(range(1, config.most + 1)), "right": {}, "shift": {}}
    for modality, name in NAMES.items():
        chosen, left_out = select(config, subject, modality, progress)
        metrics[f"masking.{modality}.{name}"] = len(chosen.items)
        metrics |= {f"masking.{modality}.{why}": n for why, n in left_out.items()}
        if not len(chosen.items):
            continue
        for what in ("right", "shift"):
            data[what][modality] = {kind: [] for kind in KINDS[modality]}
        for kind, k in product(KINDS[modality], data["k"]):
            progress(f"{modality}, {k} {kind} hidden", _share(modality, kind, k, config.most))
            found = _measured(subject, chosen, kind, k)
            metrics |= _metrics(f"masking.{modality}.{kind}", k, found)
            for what in ("right", "shift"):
                data[what][modality][kind].append(found[what]._asdict())
    return Result(metrics, data)


def _metrics(key: str, k: int, found: Mapping[str, Interval]) -> dict[str, float | int | str]:
    return {
        **interval_metrics(f"{key}.k{k}", found["right"]),
        **interval_metrics(f"{key}.k{k}.digits", found["digits"]),
        **interval_metrics(f"{key}.shift.k{k}", found["shift"]),
    }


def _measured(subject: Subject, chosen: Items, kind: str, k: int) -> dict[str, Interval]:
    right = chosen.counts - chosen.drops[kind][:, k - 1]
    free, digits = (answers_without(subject, chosen, kind, k, digits=d) for d in (False, True))
    return {
        "right": proportion(free == right),
        "digits": proportion(digits == right),
        "shift": bootstrap_mean(digits - chosen.counts, groups=chosen.counts),
    }


def answers_without(
    subject: Subject, chosen: Items, kind: str, k: int, *, digits: bool = False
) -> Int[np.ndarray, " item"]:
    """The numbers that the model names while the first k places of a kind are hidden."""
    hidden, found = chosen.orders[kind][:, :k], []
    for part in chunks(chosen.items):
        mask = mask_of(subject, chosen.modality, chosen.items[part], hidden[part])
        found.append(subject.ask(chosen.modality, chosen.items[part], digits=digits, edits=(mask,)))
    return np.concatenate(found)


def mask_of(
    subject: Subject, modality: str, items: np.ndarray, places: Int[np.ndarray, "item hidden"]
) -> Mask:
    """Hide these places of each board (in tower and decoder) or string (in the decoder)."""
    if modality == "vision":
        return Mask(Where(patches=places.tolist()))
    spans = Asker(subject.number).number("text", items).layout.spans
    starts = np.array([span["item"].start for span in spans])
    return Mask(Where(tokens=(starts[:, None] + places).tolist()))


def select(
    config: Config, subject: Subject, modality: str, progress: Progress = silent
) -> tuple[Items, dict[str, int]]:
    """The ID items to hide parts of, and how many were left out for which reason.

    Every kind has at least `most` places on each item, and its free answer without a mask is right.
    """
    own = np.flatnonzero(subject.regimes.get("id", np.zeros(len(subject.examples), dtype=bool)))
    counts, items = subject.examples.counts[own], subject.items(modality)[own]
    right = subject.answers(modality, progress=progress)[own] == counts
    places = _places(config, subject, modality, items)
    enough = np.all([mask.sum(1) >= config.most for mask in places.values()], axis=0)
    usable = np.flatnonzero(enough & right)
    rng = generator(config.mask_seed, stream=_CHOICE)
    chosen = np.sort(rng.permutation(usable)[: config.boards])
    left_out = {
        "few": int((~enough).sum()),
        "wrong": int((enough & ~right).sum()),
        "spare": len(usable) - len(chosen),
    }
    taken = {kind: mask[chosen] for kind, mask in places.items()}
    return _items(config, modality, items[chosen], counts[chosen], taken), left_out


def _items(
    config: Config,
    modality: str,
    items: np.ndarray,
    counts: Int[np.ndarray, " item"],
    places: Mapping[str, Bool[np.ndarray, "item place"]],
) -> Items:
    orders = {
        kind: _orders(mask, config.most, seed=(config.mask_seed, i))
        for i, (kind, mask) in enumerate(places.items())
    }
    drops = {kind: _drops(kind, items, order) for kind, order in orders.items()}
    return Items(modality, items, counts, orders, drops)


def _places(
    config: Config, subject: Subject, modality: str, items: np.ndarray
) -> dict[str, Bool[np.ndarray, "item place"]]:
    """Where the places of each kind are."""
    if modality == "text":
        return {"c": items == C, "other": items != C}
    anywhere = np.ones((len(items), subject.world.size**2), dtype=bool)
    if not len(items):
        return dict.fromkeys(KINDS["vision"], anywhere)
    probe = hidden_number.fit_probe(subject, config)
    called = hidden_number.called_kinds(probe, subject, items)
    return {kind: called == label for kind, label in _CALLED.items()} | {"random": anywhere}


def _orders(
    places: Bool[np.ndarray, "item place"], most: int, *, seed: Sequence[int]
) -> Int[np.ndarray, "item hidden"]:
    """`most` of the places of every item in random order."""
    keys = generator(seed, stream=_ORDER).random(places.shape)
    return np.where(places, keys, np.inf).argsort(1)[:, :most]


def _drops(
    kind: str, items: Int8[np.ndarray, "item *cells"], order: Int[np.ndarray, "item hidden"]
) -> Int[np.ndarray, "item hidden"]:
    """How far the right answer falls as one place after the other is hidden."""
    if kind == "random":
        counted = (items == BLACK).reshape(len(items), np.prod(items.shape[1:]))
        return np.take_along_axis(counted, order, 1).cumsum(1)
    return np.full_like(order, kind in ("black", "c")).cumsum(1)


def _share(modality: str, kind: str, k: int, most: int) -> float:
    """How much of the work is done before this step."""
    steps = [(m, name) for m, kinds in KINDS.items() for name in kinds]
    return (steps.index((modality, kind)) * most + k - 1) / (len(steps) * most)


STYLES: dict[str, dict[str, Any]] = {
    "black": {"color": "#000000", "marker": "o", "linestyle": "-"},
    "white": {"color": "#56B4E9", "marker": "D", "linestyle": "-"},
    "empty": {"color": "#E69F00", "marker": "^", "linestyle": "-"},
    "random": {"color": "#CC79A7", "marker": "v", "linestyle": ":"},
    "c": {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    "other": {"color": "#009E73", "marker": "P", "linestyle": "--"},
}
"""Okabe-Ito colours, told apart by marker and line too."""
_NAMES = {"c": "c (text)", "other": "a or b (text)"}


def figure(result: Result) -> Figure:
    """Share right, and how far the answer moves, against the number hidden."""
    fig, axes = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
    ks = result.data["k"]
    for ax, what in zip(axes, ("right", "shift"), strict=True):
        _draw(ax, ks, result.data[what])
        ax.set(xlabel="hidden patches or letters k", xticks=ks)
    axes[0].set(ylabel="right answers (free)", ylim=(-0.04, 1.04))
    axes[1].plot(ks, [-k for k in ks], color="0.6", lw=0.8, zorder=0)
    axes[1].axhline(0, color="0.6", lw=0.8, zorder=0)
    axes[1].set_ylabel("answer held to digits,\nless the count without a mask (stones)")
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        fig.legend(handles, labels, loc="outside right center", title="hidden", frameon=False)
    else:
        axes[0].text(0.5, 0.5, "no examples", transform=axes[0].transAxes, ha="center")
    return fig


def _draw(ax: Axes, ks: list[int], curves: dict[str, dict[str, list[dict]]]) -> None:
    drawn = {kind: rows for kinds in curves.values() for kind, rows in kinds.items()}
    for i, (kind, rows) in enumerate(drawn.items()):
        x = [k + 0.05 * (i - (len(drawn) - 1) / 2) for k in ks]  # beside each other, to be seen
        value = np.array([row["value"] for row in rows])
        ends = np.array([[row["low"] for row in rows], [row["high"] for row in rows]])
        bars = np.abs(ends - value)
        ax.errorbar(x, value, bars, ms=4, lw=1.2, elinewidth=0.8,
                    label=_NAMES.get(kind, kind), **STYLES[kind])  # fmt: skip


def table(result: Result) -> Table:
    """One row for each kind: right answers by k, and the shift at the largest k."""
    metrics, ks = result.metrics, result.data["k"]
    rows = [
        [
            f"{modality}: {kind}",
            *(percent(metrics, f"masking.{modality}.{kind}.k{k}") for k in ks),
            stones(metrics, f"masking.{modality}.{kind}.shift.k{ks[-1]}"),
        ]
        for modality, kinds in result.data["right"].items()
        for kind in kinds
    ]
    asked = [f"{metrics[f'masking.{modality}.{name}']} {name}" for modality, name in NAMES.items()]
    columns = ["hidden", *(f"k = {k} (%)" for k in ks), f"shift at k = {ks[-1]} (stones)"]
    caption = f"Right answers once k are hidden [95 % interval], {' and '.join(asked)} of ID counts"
    return Table(caption, columns, rows)
