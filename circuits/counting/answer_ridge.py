"""Is the count one number where the answer is given? (Beyond arXiv:2605.30170.)

A ridge reads one number from the residual stream after every decoder block, at the two answer
positions. It is fitted on ID counts, in pictures or in text, and tested in both, on other items of
these counts and on counts that it never saw.

- Position 0 is the prompt's last token, which predicts the first digit. At position 1 that digit,
  the true one, is the input: an exact read-out there is partly a tautology, since only the units
  are left to find. `first_digit`, a ridge on that digit alone, says how much the input gives away.
  A ridge fitted on ID meets first digits in VE that it never saw, so its failure is no news either.
- That a ridge fitted on ID fails beyond ID is no sign of a fracture between seeing and naming: it
  mostly fails within text too, for counts that the model names right in text. So vision to vision
  is to be read against text to text, and a ridge that crosses modalities against both.
- `all`: a ridge fitted on ID and VE counts says whether the number is there linearly at all, with
  no need to extrapolate. The untrained model, and the mean of the encoder's patches, say what is
  there without training and before the decoder.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from circuits.counting.answer_stream import Activations, Items, activations, fit_items
from circuits.counting.boards import World
from circuits.counting.display import MODALITY_STYLE, mark_regimes, percent
from circuits.counting.display import stones as number
from circuits.counting.examples import Examples
from circuits.counting.questions import MODALITIES
from circuits.counting.ridge import fit_ridge, read_out_scores
from circuits.counting.subject import Progress, Setting, Subject, first_of_each_count, silent
from circuits.report import Table
from circuits.runs import Result, interval_metrics
from interp.errors import InputError
from interp.toy import ToyVLM

DIRECTIONS = tuple(f"{fitted}_to_{read}" for fitted in MODALITIES for read in MODALITIES)
_POSITIONS = ("", ".position_1")  # how they end a name


@dataclass(frozen=True)
class Config(Setting):
    """A ridge from the answer positions to the count, fitted on ID and tested in every regime."""

    fit_per_count: int = 20
    """Boards and strings of every count, from the training split, that ridges are fitted on."""
    fit_seed: int = 0
    """Seed of these."""
    items_per_count: int = 20
    """Test examples of every count that are read, at most."""


class Seen(NamedTuple):
    """The activations of one model, by modality: items to fit on, and the test examples."""

    fit: dict[str, Activations]
    test: dict[str, Activations]


def run(config: Config, subject: Subject | None = None, progress: Progress = silent) -> Result:
    """Read-outs of ridges that are fitted on A and read B (`vision` or `text`), block by block.

    `answer_ridge.{A}_to_{B}.block_{L}.{regime}`: share of read-outs that, rounded, are exactly the
    count (Wilson), at position 0, fitted on ID. `.error`: mean distance from the count, in stones,
    not rounded (bootstrap by count). `.spearman`: rank correlation with the count (see `spearman`),
    absent where there is one count or one read-out.

    The same three for: `{A}_to_{B}.block_{L}.position_1.{regime}`, with the first digit given;
    `{A}_to_{A}.all.block_{L}` (and `.position_1`), fitted on ID and VE; `untrained.{A}_to_{A}
    .block_{L}`, the untrained model; `encoder` and `encoder.untrained`, the mean of the encoder's
    patches; `first_digit`, the first digit alone.

    Raises:
        InputError: fewer than two items a count to fit on, fewer than one to read, or fewer than
            three ID counts.
    """
    _check(config)
    subject = Subject.load(config) if subject is None else subject
    drawn = {"per_count": config.fit_per_count, "seed": config.fit_seed}
    fit = {m: fit_items(subject, m, **drawn) for m in MODALITIES}
    in_id = {m: own.select(own.counts <= subject.world.vision_max) for m, own in fit.items()}
    few = first_of_each_count(subject.examples.counts, config.items_per_count)
    examples = subject.examples.select(few)
    trained = _seen(subject.number, fit, examples, _half(progress, "trained model", 0))
    untrained = _seen(subject.untrained, in_id, examples, _half(progress, "untrained model", 1))
    progress("fitting ridges", 1.0)
    read, layer = _read_outs(trained, untrained, subject.world)
    metrics: dict[str, float | int | str] = {}
    for name, values in read.items():
        for regime, own in examples.regimes(subject.world).items():
            scores = read_out_scores(values[own], examples.counts[own])
            for suffix, interval in scores.items():
                metrics |= interval_metrics(f"answer_ridge.{name}.{regime}{suffix}", interval)
    shown = {d: _by_count(read[f"{d}.block_{layer}"], examples.counts) for d in DIRECTIONS}
    n_layers = subject.number.cfg.n_layers
    return Result(
        metrics, {"regimes": subject.edges, "n_layers": n_layers, "layer": layer, "read": shown}
    )


# --- what is read -------------------------------------------------------------------------------


def _seen(model: ToyVLM, fit: Mapping[str, Items], examples: Examples, progress: Progress) -> Seen:
    found = {}
    tests = {
        "vision": Items(examples.boards, examples.counts),
        "text": Items(examples.strings, examples.counts),
    }
    for i, modality in enumerate(MODALITIES):
        for j, items in enumerate((fit[modality], tests[modality])):
            told = _part(progress, 2 * i + j, 4)
            found[modality, j] = activations(model, modality, items, told)
    return Seen(*({m: found[m, j] for m in MODALITIES} for j in (0, 1)))


def _half(progress: Progress, what: str, half: int) -> Progress:
    """Progress of one of two models."""
    return lambda modality, share: progress(f"{what} reads {modality}", (half + share) / 2)


def _part(progress: Progress, i: int, n: int) -> Progress:
    return lambda what, share: progress(what, (i + share) / n)


# --- ridges -------------------------------------------------------------------------------------


def _read_outs(
    trained: Seen, untrained: Seen, world: World
) -> tuple[dict[str, Float[np.ndarray, " example"]], int]:
    """Read-outs of all test examples by the name of the ridge; and the block to show.

    That is the one whose ridges, of both modalities at position 0, err least on ID counts left out.
    """
    read: dict[str, Float[np.ndarray, " example"]] = {}
    errors = np.zeros(trained.test["text"].answer.shape[1])
    for modality in MODALITIES:
        own, both = f"{modality}_to_{modality}", trained.fit[modality]
        in_id = both.select(both.counts <= world.vision_max)
        for layer, at, place in _places(both):
            ridge = fit_ridge(in_id.answer[:, layer, at], in_id.counts)
            errors[layer] += ridge.left_out if at == 0 else 0.0
            for other, seen in trained.test.items():
                read[f"{modality}_to_{other}.{place}"] = ridge(seen.answer[:, layer, at])
            ceiling = fit_ridge(both.answer[:, layer, at], both.counts, between=True)
            read[f"{own}.all.{place}"] = ceiling(trained.test[modality].answer[:, layer, at])
        for layer in range(len(errors)):
            fit, test = untrained.fit[modality], untrained.test[modality]
            ridge = fit_ridge(fit.answer[:, layer, 0], fit.counts)
            read[f"untrained.{own}.block_{layer}"] = ridge(test.answer[:, layer, 0])
    return read | _controls(trained, untrained, world), int(errors.argmin())


def _controls(
    trained: Seen, untrained: Seen, world: World
) -> dict[str, Float[np.ndarray, " example"]]:
    """Read-outs of what is there before the decoder, and of the digit that position 1 is given."""
    read = {}
    for name, seen in (("encoder", trained), ("encoder.untrained", untrained)):
        fit, test = seen.fit["vision"], seen.test["vision"]
        in_id = fit.counts <= world.vision_max
        read[name] = fit_ridge(fit.encoder[in_id], fit.counts[in_id])(test.encoder)
    fit, test = untrained.fit["text"], trained.test["text"]
    read["first_digit"] = fit_ridge(_digit(fit.counts), fit.counts)(_digit(test.counts))
    return read


def _places(of: Activations) -> Iterator[tuple[int, int, str]]:
    """Every block and answer position, and how they are named."""
    _, n_layers, n_positions, _ = of.answer.shape
    for layer in range(n_layers):
        for at in range(n_positions):
            yield layer, at, f"block_{layer}{_POSITIONS[at]}"


def _digit(counts: Int[np.ndarray, " item"]) -> Float[np.ndarray, "item 1"]:
    """The first digit of the answer, as a number."""
    return np.where(counts < 100, counts // 10, counts // 100)[:, None].astype(float)


def _by_count(
    values: Float[np.ndarray, " example"], counts: Int[np.ndarray, " example"]
) -> list[dict]:
    """Mean read-out of every count, and where the middle 80 % of them lie."""
    rows = []
    for count in np.unique(counts):
        own = values[counts == count]
        low, high = np.quantile(own, [0.1, 0.9])
        rows.append(
            {"count": int(count), "mean": float(own.mean()), "low": float(low), "high": float(high)}
        )
    return rows


# --- what is shown ------------------------------------------------------------------------------


def figure(result: Result) -> Figure:
    """Read-outs against counts at one block; below, how many are exact, block by block."""
    data = result.data
    fig, axes = plt.subplots(
        2, 2, figsize=(7.5, 6.0), sharey="row", layout="constrained", height_ratios=(1.6, 1)
    )
    for (top, bottom), read in zip(axes.T, MODALITIES, strict=True):
        for fitted in MODALITIES:
            _plot_read_outs(top, data["read"][f"{fitted}_to_{read}"], fitted)
        _frame_read_outs(top, data, read)
        _plot_blocks(bottom, result, read)
    axes[0, 0].set_ylabel("read-out (mean; band: middle 80 %)")
    axes[0, 0].legend(frameon=False, loc="lower right", fontsize=8)
    axes[1, 0].set_ylabel(f"read-outs exact in {_shown_regime(data).upper()}")
    handles = axes[1, 0].get_legend_handles_labels()
    fig.legend(*handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return fig


def _plot_read_outs(ax: Axes, rows: list[dict], fitted: str) -> None:
    x, y = [row["count"] for row in rows], [row["mean"] for row in rows]
    style = MODALITY_STYLE[fitted]
    ax.plot(x, y, ms=3, lw=1.0, label=f"fitted on {fitted}, ID", **style)
    low, high = [row["low"] for row in rows], [row["high"] for row in rows]
    ax.fill_between(x, low, high, color=style["color"], alpha=0.18, lw=0)


def _frame_read_outs(ax: Axes, data: dict, read: str) -> None:
    counts = [row["count"] for row in data["read"][f"{read}_to_{read}"]]
    first, last = min(counts, default=0), max(counts, default=1)
    ax.plot([first, last], [first, last], color="0.3", lw=0.8, ls=":")
    ax.set_title(f"read from {_NAMES[read]}, after block {data['layer']}", size=9, pad=4)
    ax.set_xlabel("count")
    mark_regimes(ax, data["regimes"])


_NAMES = {"vision": "pictures", "text": "text"}


def _plot_blocks(ax: Axes, result: Result, read: str) -> None:
    """Exact share after each block: fitted on either modality, and the two controls."""
    regime, layers = _shown_regime(result.data), range(result.data["n_layers"])
    own = f"{read}_to_{read}"
    lines = [
        (f"{fitted}_to_{read}.", {"label": f"fitted on {fitted}, ID", **MODALITY_STYLE[fitted]})
        for fitted in MODALITIES
    ]
    lines.append((f"{own}.all.", {**_CEILING, "label": "same modality, ID and VE"}))
    lines.append((f"untrained.{own}.", {**_UNTRAINED, "label": "untrained model, ID"}))
    for shift, (stem, style) in zip((-0.12, -0.04, 0.04, 0.12), lines, strict=True):
        keys = [f"answer_ridge.{stem}block_{layer}.{regime}" for layer in layers]
        y, low, high = ([result.metrics[k + end] for k in keys] for end in ("", ".low", ".high"))
        errors = np.maximum([np.subtract(y, low), np.subtract(high, y)], 0)
        ax.errorbar(np.arange(len(y)) + shift, y, errors, ms=4, lw=1.1, elinewidth=1, **style)
    ax.set_xticks(list(layers), [f"block {layer}" for layer in layers])
    ax.set(ylim=(-0.05, 1.05), xlim=(-0.4, len(layers) - 0.6))


_CEILING = {"color": "0.25", "marker": "^", "linestyle": ":"}
_UNTRAINED = {"color": "#E69F00", "marker": "x", "linestyle": ":"}


def _shown_regime(data: dict) -> str:
    """VE, or where it has no examples what comes last."""
    return "ve" if "ve" in data["regimes"] else list(data["regimes"])[-1]


def table(result: Result) -> Table:
    """Position 0: a row for each direction and block, then the controls."""
    regimes, layers = result.data["regimes"], range(result.data["n_layers"])
    named = [(name.replace("_", " "), f"{name}.") for name in DIRECTIONS]
    for modality in MODALITIES:
        own = f"{modality}_to_{modality}"
        named.append((f"  fitted on ID and VE: {own.replace('_', ' ')}", f"{own}.all."))
    for modality in MODALITIES:
        own = f"{modality}_to_{modality}"
        named.append((f"  untrained model: {own.replace('_', ' ')}", f"untrained.{own}."))
    rows = [
        [what, str(layer), *_cells(result.metrics, f"{stem}block_{layer}", regimes)]
        for what, stem in named
        for layer in layers
    ]
    for what, stem in (("encoder, mean of patches", "encoder"),
                       ("  untrained encoder", "encoder.untrained")):  # fmt: skip
        rows.append([what, "-", *_cells(result.metrics, stem, regimes)])
    heads = [f"{r.upper()} {what}" for r in regimes for what in ("exact (%)", "Spearman")]
    return Table(_CAPTION, ["fitted on ID, read from", "after block", *heads], rows)


_CAPTION = (
    "The count read as one number at the answer's first position, by a ridge fitted on ID"
    " [95 % interval]. Text to text is the control: where it fails on counts that the model names"
    " in text, failing in pictures is no sign of a fracture"
)


def _cells(metrics: Mapping, stem: str, regimes: Mapping) -> list[str]:
    keys = [f"answer_ridge.{stem}.{regime}" for regime in regimes]
    return [cell for k in keys for cell in (percent(metrics, k), number(metrics, f"{k}.spearman"))]


def _check(config: Config) -> None:
    if config.fit_per_count < 2:
        raise InputError(
            f"fit_per_count is {config.fit_per_count}: a ridge needs at least 2 items of every"
            " count, and some 20 to be worth it"
        )
    if config.items_per_count < 1:
        raise InputError(f"items_per_count is {config.items_per_count}; ask for at least 1")
