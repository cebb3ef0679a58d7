"""Does the vision encoder hold the count, and does the answer use it? (arXiv:2605.30170, section 4)

A linear probe says of every patch whether it is black, white or empty. N_H, the hidden number, is
how many it calls black; N_G is the true count, N_P the answer. Vision gap: `|N_H - N_G|`. Language
gap: `|N_H - N_P|`. The same probe on an untrained encoder and on raw pixels says what training
adds.
A control task (random labels by kind of patch) says nothing here: there are three kinds of patch,
so what reads their colours reads any labels of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int8, Shaped
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from circuits.counting.boards import (
    BLACK,
    EMPTY,
    WHITE,
    cell_patches,
    check_total,
    draw_boards,
    generator,
)
from circuits.counting.display import MODALITY_STYLE, mark_regimes, percent, stones
from circuits.counting.examples import Examples
from circuits.counting.subject import Progress, Setting, Subject, chunks, encoder_output, silent
from circuits.report import Table
from circuits.runs import Result, interval_metrics
from interp.errors import InputError
from interp.probes import LinearProbe
from interp.stats import Interval, bootstrap_mean, proportion, wilson
from interp.toy import ToyVLM

ENCODERS = ("trained", "untrained", "pixels")
"""What the probe reads: the encoder's output, that of the untrained encoder, a patch's pixels."""
_BALANCE = 10  # stream of the seed that balances the classes


@dataclass(frozen=True)
class Config(Setting):
    """A probe for black, white and empty on every patch, trained on boards of ID counts."""

    probe_boards: int = 400
    """Boards of ID counts, from the training split, that the probe is fitted on."""
    probe_seed: int = 0
    """Seed of these boards."""
    l2: float = 1.0
    """Penalty of the probe (scikit-learn's 1 / C)."""


def run(config: Config, subject: Subject | None = None, progress: Progress = silent) -> Result:
    """Hidden numbers of three encoders, and their distance from the truth and from the answers.

    `probe.{encoder}.exact.{regime}`: share of boards with N_H = N_G (Wilson).
    `probe.{encoder}.patch.{regime}`: share of patches called right (bootstrap by count; Wilson with
    one trial a board where all or none are). `vision_gap.{regime}`: mean `|N_H - N_G|` in stones,
    and the same under `vision_gap.untrained` and `vision_gap.pixels`. `language_gap.{regime}`: mean
    `|N_H - N_P|` of answers held to digits; `language_gap.text.{regime}`: `|N_G - N_P|` of answers
    about text. Gaps have bootstrap intervals by count.
    """
    subject = subject or Subject.load(config)
    calls = _calls(config, subject, progress)
    gaps = _gaps(subject, {name: hidden_number(called) for name, called in calls.items()}, progress)
    metrics: dict[str, float | int | str] = {}
    for regime, own in subject.regimes.items():
        metrics |= _probe_metrics(regime, calls, subject.examples.select(own), own)
        for key, gap in gaps.items():
            mean = bootstrap_mean(gap[own], groups=subject.examples.counts[own])
            metrics |= interval_metrics(f"{key}.{regime}", mean)
    curves = {key: _by_count(subject.examples.counts, gap) for key, gap in gaps.items()}
    return Result(metrics, {"regimes": subject.edges, **curves})


def _gaps(
    subject: Subject, hidden: Mapping[str, Int[np.ndarray, " board"]], progress: Progress
) -> dict[str, Int[np.ndarray, " example"]]:
    """Stones between hidden number, truth and answer, by the name of the metric."""
    counts = subject.examples.counts
    vision = subject.answers("vision", digits=True, progress=progress)
    text = subject.answers("text", digits=True, progress=progress)
    return {
        "vision_gap": np.abs(hidden["trained"] - counts),
        "vision_gap.untrained": np.abs(hidden["untrained"] - counts),
        "vision_gap.pixels": np.abs(hidden["pixels"] - counts),
        "language_gap": np.abs(hidden["trained"] - vision),
        "language_gap.text": np.abs(counts - text),
    }


def _probe_metrics(
    regime: str,
    calls: Mapping[str, Int[np.ndarray, "board cell"]],
    examples: Examples,
    own: Bool[np.ndarray, " board"],
) -> dict[str, float | int | str]:
    metrics: dict[str, float | int | str] = {}
    for name, called in calls.items():
        exact = proportion(hidden_number(called[own]) == examples.counts)
        patch = _patch_share(called[own], examples.boards, examples.counts)
        metrics |= interval_metrics(f"probe.{name}.exact.{regime}", exact)
        metrics |= interval_metrics(f"probe.{name}.patch.{regime}", patch)
    return metrics


def fit_probe(subject: Subject, config: Config, *, encoder: str = "trained") -> LinearProbe:
    """The probe on what an encoder makes of every patch; it names EMPTY, BLACK or WHITE.

    Classes are balanced, black to the rest 1 : 1 and white to empty 1 : 1.

    Raises:
        InputError: no such encoder, or too few boards to have patches of every kind.
    """
    boards = probe_boards(subject, config)
    kinds = boards.reshape(-1)
    chosen = balanced(kinds, seed=config.probe_seed)
    if encoder == "pixels":
        features = _pixels(subject)[torch.from_numpy(kinds[chosen]).long()]
    else:
        features = encoder_output(_model(subject, encoder), boards).flatten(0, 1)[chosen]
    return LinearProbe.fit(features, torch.from_numpy(kinds[chosen]).long(), l2=config.l2)


def probe_boards(subject: Subject, config: Config) -> Int8[np.ndarray, "board row column"]:
    """Boards to fit a probe on: ID counts in equal parts, from the training split.

    None is among the test examples, whatever split those are of.

    Raises:
        InputError: fewer than one board asked for.
    """
    if config.probe_boards < 1:
        raise InputError(f"probe_boards is {config.probe_boards}: ask for 100 or more")
    world = subject.world
    check_total(config.probe_boards, world.size**2, f"board of {world.size}x{world.size}")
    counts = np.resize(np.array(world.regimes["id"]), config.probe_boards)
    boards = draw_boards(
        counts, size=world.size, spread=world.spread, seed=config.probe_seed, split="train"
    )
    tests = {board.tobytes() for board in subject.examples.boards.astype(np.int8)}
    return boards[[board.tobytes() not in tests for board in boards]]


def balanced(kinds: Int8[np.ndarray, " patch"], *, seed: int) -> Int[np.ndarray, " chosen"]:
    """Patches, drawn without replacement: half black, a quarter white, a quarter empty.

    As many as the rarest kind allows.

    Raises:
        InputError: fewer than two black patches, or none of another kind.
    """
    places = {kind: np.flatnonzero(kinds == kind) for kind in (BLACK, WHITE, EMPTY)}
    quarter = min(len(places[BLACK]) // 2, len(places[WHITE]), len(places[EMPTY]))
    if not quarter:
        raise InputError(
            f"the probe's boards have {len(places[BLACK])} black, {len(places[WHITE])} white and"
            f" {len(places[EMPTY])} empty cells: it needs two, one and one; ask for more boards"
        )
    rng, sizes = generator(seed, stream=_BALANCE), {BLACK: 2 * quarter}
    drawn = [
        rng.choice(own, sizes.get(kind, quarter), replace=False) for kind, own in places.items()
    ]
    return np.sort(np.concatenate(drawn))


def called_kinds(
    probe: LinearProbe,
    subject: Subject,
    boards: Int8[np.ndarray, "board row column"],
    *,
    encoder: str = "trained",
    progress: Progress = silent,
) -> Int[np.ndarray, "board cell"]:
    """What the probe calls every cell, in order of cells: EMPTY, BLACK or WHITE."""
    if encoder == "pixels":  # there are three patches of pixels: look up what each is called
        return probe.predict(_pixels(subject)).numpy()[boards.reshape(len(boards), -1)]
    model, found = _model(subject, encoder), []
    for part in chunks(boards):  # the outputs of 12,000 boards of 19x19 are half a gigabyte
        found.append(probe.predict(encoder_output(model, boards[part])).numpy())
        progress("encoding boards", part.stop / len(boards))
    return np.concatenate(found) if found else np.zeros((0, subject.world.size**2), dtype=int)


def hidden_number(called: Int[np.ndarray, "board cell"]) -> Int[np.ndarray, " board"]:
    """N_H: how many cells are called black."""
    return (called == BLACK).sum(1)


def _calls(
    config: Config, subject: Subject, progress: Progress
) -> dict[str, Int[np.ndarray, "board cell"]]:
    calls = {}
    for i, encoder in enumerate(ENCODERS):
        progress(f"probe on {encoder}", i / len(ENCODERS))
        probe = fit_probe(subject, config, encoder=encoder)
        calls[encoder] = called_kinds(probe, subject, subject.examples.boards, encoder=encoder)
    return calls


def _model(subject: Subject, encoder: str) -> ToyVLM:
    models = {"trained": subject.number, "untrained": subject.untrained}
    if encoder not in models:
        raise InputError(f"no encoder {encoder!r}; there are {', '.join(ENCODERS)}")
    return models[encoder]


def _pixels(subject: Subject) -> Float[Tensor, "kind pixel"]:
    """The pixels of each kind of cell, 0..1: all that a picture of a board is made of."""
    patches = cell_patches(subject.number.config.patch).copy()
    return torch.from_numpy(patches).flatten(1).float() / 255


def _patch_share(
    called: Int[np.ndarray, "board cell"],
    boards: Int8[np.ndarray, "board row column"],
    counts: Int[np.ndarray, " board"],
) -> Interval:
    """Share of patches called right; patches of one board come together, so boards are the n."""
    right: Bool[np.ndarray, "board cell"] = called == boards.reshape(len(boards), -1)
    if right.all() or not right.any():  # no bootstrap would have a width
        return wilson(len(right) if right.all() else 0, len(right))
    return bootstrap_mean(right.mean(1), groups=counts)


def _by_count(
    counts: Int[np.ndarray, " example"], values: Shaped[np.ndarray, " example"]
) -> list[dict]:
    """Mean of every count, with its bootstrap interval."""
    return [
        {"count": int(count), **bootstrap_mean(values[counts == count])._asdict()}
        for count in np.unique(counts)
    ]


STYLES: dict[str, dict[str, Any]] = {
    "vision_gap": {"label": "trained encoder", **MODALITY_STYLE["vision"]},
    "vision_gap.untrained": {
        "label": "untrained encoder",
        "color": "#E69F00",
        "marker": "^",
        "linestyle": "--",
    },
    "vision_gap.pixels": {"label": "raw pixels", "color": "0.2", "marker": "x", "linestyle": ":"},
    "language_gap": {"label": "pictures", **MODALITY_STYLE["vision"]},
    "language_gap.text": {"label": "text (control)", **MODALITY_STYLE["text"]},
}
"""Okabe-Ito colours, told apart by marker and line too; the largest marker is drawn first."""


def figure(result: Result) -> Figure:
    """Gaps in stones against the count: hidden number and truth above, and answer below."""
    fig, axes = plt.subplots(2, 1, figsize=(7.5, 5.2), sharex=True, layout="constrained")
    for ax, head in zip(axes, ("vision_gap", "language_gap"), strict=True):
        keys = [key for key in STYLES if key.split(".")[0] == head]
        for size, key in zip((7.0, 4.5, 3.0), keys, strict=False):
            _draw(ax, result.data[key], STYLES[key], size)
        bottom, top = ax.get_ylim()
        span = max(top, 1.0)  # a gap of 0 everywhere is drawn on a scale of one stone
        ax.set_ylim(min(bottom, -0.06 * span), 1.12 * span)
        mark_regimes(ax, result.data["regimes"])
        ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, 0.93))
    axes[0].set_ylabel("vision gap (stones):\n|hidden number - truth|")
    axes[1].set_ylabel("language gap (stones):\n|hidden number - answer|")
    axes[1].set_xlabel("black stones (pictures) or letters c (text)")
    return fig


def _draw(ax: Axes, rows: list[dict], style: Mapping[str, Any], size: float) -> None:
    x, y = [row["count"] for row in rows], [row["value"] for row in rows]
    ax.plot(x, y, ms=size, lw=1.2, **style)
    low, high = [row["low"] for row in rows], [row["high"] for row in rows]
    ax.fill_between(x, low, high, color=style["color"], alpha=0.18, lw=0)


def table(result: Result) -> Table:
    """One row for each regime."""
    metrics, rows = result.metrics, []
    for regime in result.data["regimes"]:
        exact = [percent(metrics, f"probe.{name}.exact.{regime}") for name in ENCODERS]
        gaps = ("vision_gap", "language_gap", "language_gap.text")
        rows.append([regime.upper(), *exact, *(stones(metrics, f"{g}.{regime}") for g in gaps)])
    columns = ["regime", "exact, trained (%)", "exact, untrained (%)", "exact, pixels (%)"]
    columns += ["vision gap (stones)", "language gap (stones)", "text control (stones)"]
    return Table("Hidden number: boards counted exactly, and gaps [95 % interval]", columns, rows)
