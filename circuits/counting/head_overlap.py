"""Do pictures and text use different heads to count? (arXiv:2605.30170, the head analysis.)

The two digits of the right answer are forced, one decoder head's output is set to zero, and the
head is *needed* for a digit when that digit is no longer the most likely one. Vectors of needed
heads of samples of one count are compared. The paper compares vision with text alone; two pictures
of one count differ too, so here the same is done within each modality, samples that the model
answers wrong are left out, and pairs in which no head is needed are counted apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from circuits.counting.display import MODALITY_STYLE, percent
from circuits.counting.head_pairs import (
    KINDS,
    CountTable,
    by_count,
    excess,
    over_counts,
    pair_sums,
    permutation_p,
)
from circuits.counting.head_ranking import Samples, top_metrics
from circuits.counting.questions import MODALITIES, Asker
from circuits.counting.subject import (
    Progress,
    Setting,
    Subject,
    chunks,
    first_of_each_count,
    silent,
)
from circuits.report import Table
from circuits.runs import Result, interval_metrics
from interp.errors import InputError
from interp.interventions import Ablate, Where
from interp.stats import Interval, proportion
from interp.toy import ToyVLM

DIGITS = ("digit_0", "digit_1")  # tens, units
ALPHA = 0.05
MEASURES = {
    "differ": ("differ", "not_empty"),
    "disjoint": ("disjoint", "filled"),
    "jaccard": ("jaccard", "not_empty"),
    "empty": ("empty", "any"),
}
"""Relations of pairs: what is summed, over how many pairs."""


@dataclass(frozen=True)
class Config(Setting):
    """Compare the heads that pictures and text of the same count need."""

    samples_per_count: int = 20
    """Test examples of every count of ID and modality, at most."""
    permutations: int = 1000
    """Of the labels vision and text within each count, for the p value."""


def run(config: Config, subject: Subject | None = None, progress: Progress = silent) -> Result:
    """Needed heads in ID; shares are fractions of 1, over pairs of samples of the same count.

    With K `cross` (vision, text), `vision` (two pictures) or `text` (two strings):
    `heads.differ.{K}`: not the same vector; `heads.jaccard.{K}`: mean overlap; both over pairs that
    are not both empty. `heads.disjoint.{K}`: no head shared, over pairs of which neither is empty.
    `heads.empty.{K}`: both empty, over all pairs. `heads.excess`: differ.cross minus the larger of
    the two baselines: different circuits show as an excess above 0. `heads.p`: permutation test of
    differ.cross against the mean of the baselines. `heads.smallest_p`: what the overlap of two sets
    of half of the heads can reach at best. `heads.left_out.{modality}`: share not answered right.
    `heads.needed.{modality}.{digit}.block_L.head_H`: share of samples that need the head.
    `heads.top...`: the heads needed most, see `head_ranking.top_metrics`.

    Shares of pairs are ratios of sums over counts, so a count weighs by its pairs; see
    `over_counts` for their intervals, whose n counts pairs. What has no examples is absent.

    Raises:
        InputError: fewer than one sample of a count, or no permutation.
    """
    _check(config)
    subject = Subject.load(config) if subject is None else subject
    samples, metrics = {}, {}
    for i, modality in enumerate(MODALITIES if "id" in subject.regimes else ()):
        samples[modality], left_out = _samples(subject, modality, config.samples_per_count)
        metrics |= interval_metrics(f"heads.left_out.{modality}", left_out)
        progress("leaving heads out", (i + 1) / len(MODALITIES))
    tables = by_count({modality: _vectors(own) for modality, own in samples.items()})
    metrics |= _pair_metrics(tables) | _needed_metrics(samples)
    metrics |= top_metrics(samples, seed=config.data_seed)
    p = permutation_p(tables, config.permutations, seed=config.data_seed)
    if p is not None:
        metrics["heads.p"] = p
    dims = subject.number.cfg
    metrics["heads.smallest_p"] = smallest_p(dims.n_layers * dims.n_heads)
    return Result(metrics, _data(metrics, tables, [dims.n_layers, dims.n_heads]))


def needed_heads(
    model: ToyVLM, modality: str, items: np.ndarray, counts: Int[np.ndarray, " sample"]
) -> Bool[np.ndarray, "sample digit layer head"]:
    """Whether a digit changes when one head's output is zero everywhere, the first digit forced."""
    asker, dims = Asker(model), model.cfg
    needed = np.zeros((len(items), len(DIGITS), dims.n_layers, dims.n_heads), dtype=bool)
    for part in chunks(items):
        first = asker.number_answer(counts[part])[:, :1]
        batch = asker.number(modality, items[part]).extend(first)
        clean = model.run(batch).logits.argmax(-1)
        for layer, head in np.ndindex(dims.n_layers, dims.n_heads):
            off = Ablate(f"blocks.{layer}.attn.z", Where(heads=[head]))
            changed = model.run(batch, edits=[off]).logits.argmax(-1) != clean
            needed[part, :, layer, head] = changed.cpu().numpy()
    return needed


def smallest_p(n_heads: int) -> float:
    """Chance that two random sets of half of the heads are the same: the hypergeometric's last."""
    return 1 / comb(n_heads, n_heads // 2)


def _samples(subject: Subject, modality: str, n: int) -> tuple[Samples, Interval]:
    """The first n of every count of ID as far as they are answered right; the share that is not."""
    chosen = np.flatnonzero(subject.regimes["id"])
    chosen = chosen[first_of_each_count(subject.examples.counts[chosen], n)]
    items, counts = subject.items(modality)[chosen], subject.examples.counts[chosen]
    said = [subject.ask(modality, items[part]) for part in chunks(items)]
    right = np.concatenate(said) == counts
    items, counts = items[right], counts[right]
    return Samples(counts, needed_heads(subject.number, modality, items, counts)), proportion(
        ~right
    )


def _vectors(samples: Samples) -> dict[int, Bool[np.ndarray, "sample feature"]]:
    flat = samples.needed.reshape(len(samples.needed), int(np.prod(samples.needed.shape[1:])))
    return {int(count): flat[samples.counts == count] for count in np.unique(samples.counts)}


def _sums(tables: Sequence[CountTable], name: str) -> Float[np.ndarray, "count kind"]:
    return np.array([pair_sums(t.relations[name], t.is_vision) for t in tables]).reshape(-1, 3)


def _pair_metrics(tables: Sequence[CountTable]) -> dict[str, float | int | str]:
    metrics: dict[str, float | int | str] = {}
    for measure, (top, bottom) in MEASURES.items():
        sums, pairs = _sums(tables, top), _sums(tables, bottom)
        for k, kind in enumerate(KINDS):
            interval = over_counts(sums[:, k], pairs[:, k])
            if interval is not None:
                metrics |= interval_metrics(f"heads.{measure}.{kind}", interval)
    interval = excess(_sums(tables, "differ"), _sums(tables, "not_empty"))
    return metrics if interval is None else metrics | interval_metrics("heads.excess", interval)


def _needed_metrics(samples: Mapping[str, Samples]) -> dict[str, float | int | str]:
    metrics: dict[str, float | int | str] = {}
    for modality, (_, needed) in samples.items():
        for digit, layer, head in np.ndindex(needed.shape[1:]) if len(needed) else ():
            key = f"heads.needed.{modality}.{DIGITS[digit]}.block_{layer}.head_{head}"
            metrics |= interval_metrics(key, proportion(needed[:, digit, layer, head]))
    return metrics


# --- what is shown ------------------------------------------------------------------------------


def _data(
    metrics: Mapping[str, float | int | str], tables: Sequence[CountTable], heads: list[int]
) -> dict:
    names = [f"block_{layer}.head_{head}" for layer in range(heads[0]) for head in range(heads[1])]
    return {
        "heads": heads,
        "pairs": {m: _rows(metrics, f"heads.{m}", KINDS) for m in MEASURES},
        "needed": {
            modality: {
                digit: _rows(metrics, f"heads.needed.{modality}.{digit}", names) for digit in DIGITS
            }
            for modality in MODALITIES
        },
        "by_count": [
            {
                "count": own.count,
                "samples": [int(own.is_vision.sum()), int((~own.is_vision).sum())],
                "differ": pair_sums(own.relations["differ"], own.is_vision).tolist(),
                "not_empty": pair_sums(own.relations["not_empty"], own.is_vision).tolist(),
            }
            for own in tables
        ],
    }


def _rows(
    metrics: Mapping[str, float | int | str], key: str, names: Sequence[str]
) -> dict[str, list[float]]:
    """Value, low and high by name, as far as they exist."""
    ends = ("", ".low", ".high")
    return {
        name: [metrics[f"{key}.{name}{end}"] for end in ends]
        for name in names
        if f"{key}.{name}" in metrics
    }


_KIND_STYLE = {
    "cross": {"color": "0.1", "marker": "D", "linestyle": "none"},
    "vision": {**MODALITY_STYLE["vision"], "linestyle": "none"},
    "text": {**MODALITY_STYLE["text"], "linestyle": "none"},
}
_KIND_NAME = {"cross": "vision, text", "vision": "vision, vision", "text": "text, text"}


def figure(result: Result) -> Figure:
    """How often vectors differ, by kind of pair; and which heads are needed for which digit."""
    data = result.data
    n_heads = data["heads"][0] * data["heads"][1]
    width = min(4.0, 2.0 + 0.12 * n_heads)
    fig, axes = plt.subplots(
        1, 3, figsize=(3.2 + 2 * width, 3.0), width_ratios=[3.2, width, width], layout="constrained"
    )
    _plot_pairs(axes[0], data["pairs"])
    for ax, digit, title in zip(axes[1:], DIGITS, ("tens digit", "units digit"), strict=True):
        _plot_needed(ax, data, digit)
        ax.set_title(title, size=9)
    axes[1].set_ylabel("share of samples that need it")
    axes[2].tick_params(labelleft=False)
    if axes[1].get_legend_handles_labels()[0]:
        axes[1].legend(frameon=False, fontsize=8)
    return fig


def _plot_pairs(ax: Axes, pairs: dict) -> None:
    names = {
        "differ": "not the\nsame heads",
        "disjoint": "no head\nshared",
        "empty": "no head\nat all",
    }
    for i, measure in enumerate(names):
        for shift, kind in zip((-0.2, 0.0, 0.2), KINDS, strict=True):
            if kind in pairs[measure]:
                label = _KIND_NAME[kind] if i == 0 else None
                _errorbar(ax, [i + shift], [pairs[measure][kind]], _KIND_STYLE[kind], label)
    ax.set_xticks(range(len(names)), names.values())
    ax.set(ylim=(-0.04, 1.04), ylabel="share of pairs of one count", xlim=(-0.5, len(names) - 0.5))
    ax.set_title("needed heads of two samples", size=9)
    if pairs["differ"]:
        ax.legend(frameon=False, fontsize=8, loc="upper right")


def _plot_needed(ax: Axes, data: dict, digit: str) -> None:
    n_layers, n_heads = data["heads"]
    for shift, modality in zip((-0.1, 0.1), MODALITIES, strict=True):
        rows = list(data["needed"][modality][digit].values())
        style = {**MODALITY_STYLE[modality], "linestyle": "none"}
        _errorbar(ax, np.arange(len(rows)) + shift, rows, style, modality)
    for layer in range(1, n_layers):
        ax.axvline(layer * n_heads - 0.5, color="0.8", lw=0.8)
    names = [f"{layer}.{head}" for layer in range(n_layers) for head in range(n_heads)]
    every = max(1, len(names) // 16)
    ax.set_xticks(range(0, len(names), every), names[::every], rotation=0 if len(names) < 9 else 90)
    ax.set(xlabel="block.head", ylim=(-0.04, 1.04), xlim=(-0.5, len(names) - 0.5))


def _errorbar(
    ax: Axes, x: Sequence[float] | np.ndarray, rows: list, style: dict, label: str | None
) -> None:
    if rows:
        value, low, high = np.array(rows).T
        ends = np.maximum([value - low, high - value], 0)
        ax.errorbar(x, value, ends, ms=5, elinewidth=1, label=label, **style)


def table(result: Result) -> Table:
    """Vision with text beside the two baselines."""
    metrics = result.metrics
    top, n_heads = metrics.get("heads.top.n", 0), int(np.prod(result.data["heads"]))

    def row(name: str, key: str) -> list[str]:
        return [name, *(percent(metrics, f"heads.{key}.{kind}") for kind in KINDS)]

    rows = [
        row("not the same heads, %", "differ"),
        row("no head shared, %", "disjoint"),
        row("heads shared of those needed (Jaccard), %", "jaccard"),
        row("no head needed by either, %", "empty"),
        ["pairs compared", *(str(metrics.get(f"heads.differ.{k}.n", "-")) for k in KINDS)],
        ["excess over the larger baseline, points", percent(metrics, "heads.excess"), "-", "-"],
        ["p, labels permuted within counts", _p(metrics, "heads.p"), "-", "-"],
        row(f"the {top} heads needed most: the same, %", "top"),
        [f"p of that many among {n_heads}", _p(metrics, "heads.top.cross.p"), "-", "-"],
        ["p within blocks", _p(metrics, "heads.top.cross.p_within_blocks"), "-", "-"],
        row("left out: not answered right, %", "left_out"),
    ]
    return Table(_caption(result), ["", *(_KIND_NAME[kind] for kind in KINDS)], rows)


def _p(metrics: Mapping[str, float | int | str], key: str) -> str:
    return f"{metrics[key]:.3g}" if key in metrics else "-"


def _caption(result: Result) -> str:
    caption = "Needed heads of two samples of one count, ID [95 % interval]"
    best, n = result.metrics["heads.smallest_p"], int(np.prod(result.data["heads"]))
    if best <= ALPHA:
        return caption
    return (
        f"{caption}. With {n} heads no overlap of heads can be significant: two halves that are the"
        f" same have p = {best:.2f}"
    )


def _check(config: Config) -> None:
    if min(config.samples_per_count, config.permutations) < 1:
        raise InputError(
            f"samples_per_count is {config.samples_per_count}, permutations is"
            f" {config.permutations}; ask for at least 1"
        )
