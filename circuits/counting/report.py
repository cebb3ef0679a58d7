"""What a diagnosis says: the summary table, the verdicts, and the page that explains both."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from circuits.counting.display import percent, stones
from circuits.counting.measurements import MODULES, measurement
from circuits.counting.verdict import STAGES
from circuits.report import Section, Table, report_html
from circuits.runs import Result

Metrics = Mapping[str, float | int | str]


class Line(NamedTuple):
    """A row of the summary: what it says, its key with a place for the regime, how to write it."""

    what: str
    key: str
    written: Any


LINES = (
    Line("pictures: right answers, %", "accuracy.vision.{}", percent),
    Line("pictures: right, held to digits, %", "accuracy.vision.{}.digits", percent),
    Line("pictures: answer is no number, %", "no_number.vision.{}", percent),
    Line("text: right answers, %", "accuracy.text.{}", percent),
    Line("text: right, held to digits, %", "accuracy.text.{}.digits", percent),
    Line("probe on the encoder: boards exact, %", "probe.trained.exact.{}", percent),
    Line("  the same, encoder untrained, %", "probe.untrained.exact.{}", percent),
    Line("  the same, raw pixels, %", "probe.pixels.exact.{}", percent),
    Line("vision gap: probe against truth, stones", "vision_gap.{}", stones),
    Line("language gap: answer against probe, stones", "language_gap.{}", stones),
    Line("comparison, pictures, pairs 1 to 3 apart, %", "comparison.vision.{}.near", percent),
    Line("comparison, text, pairs 1 to 3 apart, %", "comparison.text.{}.near", percent),
)
"""What the summary shows for each regime."""

ID_LINES = (
    *(
        Line(f"{k} {what} hidden: right answers, %", f"masking.{kind}.k{k}", percent)
        for kind, what in (
            ("vision.black", "black stones"),
            ("vision.white", "white stones"),
            ("vision.empty", "empty cells"),
            ("text.c", "letters c"),
        )
        for k in (1, 3, 5)
    ),
    Line("needed heads differ: picture, text, %", "heads.differ.cross", percent),
    Line("  control: picture, picture, %", "heads.differ.vision", percent),
    Line("  control: text, text, %", "heads.differ.text", percent),
)
"""What it shows for seen counts alone."""

_TEXT = {
    "accuracy": """The same counts asked about pictures (black stones on a board) and about text
        (letters c in a string). ID: counts seen in both. VE: counts seen in text only. FE: counts
        never seen. Free answers may be no number; held to digits, the model must name one.""",
    "attractors": """Where the answers go. Shares are of answers held to two digits; bias is the
        mean answer less the true count.""",
    "hidden-number": """A linear probe on every patch of the vision encoder's output says black,
        white or empty; it is trained on boards of ID counts that are in no test. The number of
        patches it calls black is the hidden number. Vision gap: hidden number against the truth.
        Language gap: answer (held to digits) against the hidden number. The same probe on the
        untrained encoder and on raw pixels is the control: what it finds there, training did not
        put there.""",
    "masking": """k patches are hidden as keys in the encoder and in the decoder. Hiding black ones
        should take k off the answer; hiding white or empty ones should change nothing. ID boards
        that the model answers right. A model that reads a share of its keys is moved by any mask:
        then the controls fail too, and only the shift tells black from the others.""",
    "comparison": """A second model says whether a string has as many letters c as the board has
        black stones (or as another string). Far pairs are easy; near pairs need the amount. A model
        that always says True gets 50 % of balanced pairs.""",
    "heads": """One head's output is set to zero; the head is needed for a digit when that digit
        changes. Samples of one count are compared: picture with text, and, as the baseline that the
        claim of different circuits needs, picture with picture and text with text.""",
    "answer-ridge": """A ridge reads the count as one number from the residual stream at the answer,
        after each block; it is fitted on ID counts of pictures or of text, and tested in both.
        Text to text is the control: where such a ridge fails beyond ID within text, for counts that
        the model names right in text, its failure in pictures is no evidence of a fracture. Only
        what pictures lose beyond text would be. A ridge that crosses modalities and fails in ID
        already says that the two have different scales. Fitted on ID and VE together, the ridge
        says whether the number is there linearly at all. What an untrained model or the encoder's
        mean gives was not put there by training. At the second position (in metrics.json) the true
        first digit is part of the input, so an exact read-out there is partly a tautology:
        first_digit, a ridge on that digit alone, says how much the input gives away. A ridge
        fitted on ID meets first digits in VE that it never saw, so failing is no news.""",
}


def summary(found: Mapping[int, Mapping[str, Result]]) -> list[Table]:
    """One seed: regimes side by side. Several: seeds side by side."""
    metrics = {seed: _joined(results) for seed, results in found.items()}
    if len(metrics) > 1:
        return [_by_seed(metrics)]
    (own,) = metrics.values()
    regimes = [r for r in ("id", "ve", "fe") if f"accuracy.vision.{r}" in own]
    rows = [
        [line.what, *(line.written(own, line.key.format(r)) for r in regimes)] for line in LINES
    ]
    heading = ["", *(f"{r.upper()}" for r in regimes)]
    tables = [Table("Where does visual counting break? [95 % intervals]", heading, rows)]
    seen = [[line.what, line.written(own, line.key)] for line in ID_LINES if line.key in own]
    return [*tables, Table("On seen counts (ID)", ["", "ID"], seen)] if seen else tables


def _by_seed(metrics: Mapping[int, Metrics]) -> Table:
    rows = []
    for line in LINES:
        for regime in ("id", "ve", "fe"):
            key = line.key.format(regime)
            if any(key in own for own in metrics.values()):
                cells = [line.written(own, key) for own in metrics.values()]
                rows.append([f"{line.what.strip()} ({regime.upper()})", *cells])
    for line in ID_LINES:
        if any(line.key in own for own in metrics.values()):
            cells = [line.written(own, line.key) for own in metrics.values()]
            rows.append([f"{line.what.strip()} (ID)", *cells])
    heading = ["", *(f"seed {seed}" for seed in metrics)]
    return Table("Where does visual counting break? [95 % intervals]", heading, rows)


def verdict_table(verdicts: Mapping[int, Metrics]) -> Table:
    """Stage by stage; with several seeds a row for each."""
    rows = [
        [_stage(stage, seed, verdicts), *(str(own[f"verdict.{stage}{part}"]) for part in _PARTS)]
        for stage in STAGES
        for seed, own in verdicts.items()
    ]
    return Table("Is the break here?", ["stage", "verdict", "why", "controls"], rows)


_PARTS = ("", ".reason", ".controls")


def _stage(stage: str, seed: int, verdicts: Mapping[int, Metrics]) -> str:
    return stage if len(verdicts) == 1 else f"{stage}, seed {seed}"


def page(
    config: Any,
    found: Mapping[int, Mapping[str, Result]],
    verdicts: Mapping[int, Metrics],
    *,
    figures: Mapping[tuple[int, str], bytes],
) -> str:
    """The report as one HTML page."""
    sections = [Section("Summary", (_SUMMARY,), summary(found))]
    for name in MODULES:
        shown = [_shown(seed, name, figures[seed, name]) for seed in found]
        tables = [
            _labelled(measurement(name).table(results[name]), seed, found)
            for seed, results in found.items()
        ]
        sections.append(Section(_title(name), (" ".join(_TEXT[name].split()),), tables, shown))
    told = [
        (
            _stage(stage, seed, verdicts),
            str(own[f"verdict.{stage}"]),
            _sentence(own[f"verdict.{stage}.reason"])
            + " Controls: "
            + _sentence(own[f"verdict.{stage}.controls"]),
        )
        for stage in STAGES
        for seed, own in verdicts.items()
    ]
    return report_html(
        f"Where does visual counting break? Model {config.model}",
        sections,
        facts=_facts(config, list(found)),
        verdicts=told,
    )


_SUMMARY = (
    "Each row is one measurement, with its 95 % interval: Wilson for shares, bootstrap over counts"
    " for means. A stage is excluded where an interval shows it intact on counts that were never"
    " shown as pictures, supported where it shows it broken, undecided otherwise."
)


def _facts(config: Any, seeds: Sequence[int]) -> dict[str, str]:
    examples = str(config.data) if config.data else f"{config.per_count} fresh ones of each count"
    return {
        "model": str(config.model),
        "weights": ", ".join(f"seed {seed}" for seed in seeds),
        "test examples": f"{examples}, seed {config.data_seed}",
        "device": config.device,
    }


def _sentence(text: object) -> str:
    return f"{str(text)[0].upper()}{str(text)[1:]}."


def _shown(seed: int, name: str, png: bytes) -> tuple[bytes, str, str]:
    caption = f"{_title(name)}, seed {seed}"
    return png, f"{caption}; the numbers are in the table above and in metrics.json", caption


def _labelled(table: Table, seed: int, found: Mapping) -> Table:
    if len(found) == 1:
        return table
    return Table(f"{table.caption}, seed {seed}", table.columns, table.rows)


def _title(name: str) -> str:
    return name.replace("-", " ").capitalize()


def _joined(results: Mapping[str, Result]) -> dict[str, float | int | str]:
    return {key: value for result in results.values() for key, value in result.metrics.items()}
