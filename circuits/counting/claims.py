"""What of the paper holds? Its figures beside ours, claim by claim (arXiv:2605.30170).

Published figures are those of the paper and, where accounts of it differ, of those too. Ours are
read from the metrics of diagnoses; nothing here is measured or written down beforehand. A claim
*holds* where the interval reaches the published figure within the margin that its rule names; it
*holds with a control* where it does, and a control beside it changes what it means.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from circuits.counting.display import percent, stones
from circuits.counting.verdict import ABOVE_CHANCE, HALF, KNOWS, MARGIN, STAGES
from circuits.report import Table

HOLDS = "holds"
CONTROL = "holds with a control"
FAILS = "does not hold"
UNMEASURED = "cannot be measured so"
WIDEST = 0.15
"""An interval wider than this says nothing where it would hold: there are too few examples."""
PLACES = ("edge", "last_decade", "small")
"""Where the paper sees wrong answers fall; see `attractors.topology`."""

Metrics = Mapping[str, float | int | str]
Seeds = Mapping[int, Metrics]
"""The metrics of each seed of one preset."""
Judge = Callable[[Metrics], str]
"""Gives the verdict on a claim."""


class Shown(NamedTuple):
    """A number beside a claim: what it is, its key, how it is written."""

    what: str
    key: str
    written: Callable[[Metrics, str], str] = percent


@dataclass(frozen=True)
class Claim:
    """A published figure, what other accounts of the paper say, and how ours is judged."""

    claim: str
    published: str
    others: str
    shown: tuple[Shown, ...]
    judge: Judge
    reading: str
    """The rule, and what a reader must know."""


def reaches(key: str, lowest: float, highest: float) -> Judge:
    """Holds where the interval meets a range; where it does and is too wide, nothing is said."""

    def judge(metrics: Metrics) -> str:
        low, high = metrics[f"{key}.low"], metrics[f"{key}.high"]
        if low > highest or high < lowest:
            return FAILS
        return HOLDS if high - low <= WIDEST else UNMEASURED

    return judge


def every(*judges: Judge) -> Judge:
    """Holds where all parts do."""

    def judge(metrics: Metrics) -> str:
        found = [judge(metrics) for judge in judges]
        return next((said for said in (FAILS, UNMEASURED) if said in found), HOLDS)

    return judge


def controlled(judge: Judge, passes: Callable[[Metrics], bool]) -> Judge:
    """Holds with a control where it would hold and the control does not pass."""

    def judged(metrics: Metrics) -> str:
        said = judge(metrics)
        return CONTROL if said == HOLDS and not passes(metrics) else said

    return judged


def needing(judge: Judge, given: Callable[[Metrics], bool]) -> Judge:
    """Cannot be measured so where what the claim needs is not given."""
    return lambda metrics: judge(metrics) if given(metrics) else UNMEASURED


def _vision_gap(metrics: Metrics) -> str:
    if any(metrics[f"vision_gap.{r}.high"] >= HALF for r in ("id", "ve", "fe")):
        return FAILS
    return HOLDS if metrics["vision_gap.untrained.ve.low"] >= HALF else CONTROL


def _language_gap(metrics: Metrics) -> str:
    jumps = metrics["language_gap.ve.low"] > HALF > metrics["language_gap.id.high"]
    return HOLDS if jumps else FAILS


def _attractors(metrics: Metrics) -> str:
    drawn = [metrics[f"topology.excess.ve.{place}.low"] > 0 for place in PLACES]
    return CONTROL if any(drawn) else FAILS


def _heads(metrics: Metrics) -> str:
    if "heads.excess" not in metrics:
        return UNMEASURED
    return CONTROL if metrics["heads.excess.low"] > 0 else FAILS


def _masking(figures: Mapping[int, float]) -> Judge:
    parts = [reaches(f"masking.vision.black.k{k}", f - 0.02, f + 0.02) for k, f in figures.items()]
    white = [f"masking.vision.white.k{k}.low" for k in figures]
    return controlled(every(*parts), lambda metrics: all(metrics[key] > KNOWS for key in white))


def _plain(metrics: Metrics, key: str) -> str:
    """A number without an interval, or a word."""
    value = metrics.get(key, "-")
    return value if isinstance(value, str) else f"{value:.2g}"


_EXACT = "Rule: the interval reaches the figure within 1 point."
CLAIMS = (
    Claim(
        "Pictures of seen counts are answered right",
        "ID 100 %",
        "-",
        (Shown("pictures, ID, %", "accuracy.vision.id"),),
        reaches("accuracy.vision.id", 0.99, 1.0),
        _EXACT,
    ),
    Claim(
        "Pictures of unseen counts are never answered right, although text has taught the words",
        "VE 0 %",
        "-",
        (
            Shown("pictures, VE, %", "accuracy.vision.ve"),
            Shown("held to digits, %", "accuracy.vision.ve.digits"),
            Shown("no number, %", "no_number.vision.ve"),
            Shown("text, VE, %", "accuracy.text.ve"),
        ),
        needing(
            reaches("accuracy.vision.ve", 0.0, 0.01),
            lambda metrics: metrics["accuracy.text.ve.low"] >= KNOWS,
        ),
        f"{_EXACT} The control: text must name the same counts in nine cases of ten. How far"
        " pictures fall depends on the boundary and on the seed.",
    ),
    Claim(
        "Pictures of counts beyond both fail",
        "FE 0 %",
        "-",
        (
            Shown("pictures, FE, %", "accuracy.vision.fe"),
            Shown("text, FE, %", "accuracy.text.fe"),
        ),
        controlled(
            reaches("accuracy.vision.fe", 0.0, 0.01),
            lambda metrics: metrics["accuracy.text.fe.low"] >= KNOWS,
        ),
        f"{_EXACT} The control: unless text is surely right in nine cases of ten, this says nothing"
        " of pictures. On 19x19 boards a right answer has three digits, and none was ever trained:"
        " an answer of two digits cannot be right there.",
    ),
    Claim(
        "Text is answered right up to the largest number taught",
        "ID and VE 100 %",
        "-",
        (
            Shown("text, ID, %", "accuracy.text.id"),
            Shown("text, VE, %", "accuracy.text.ve"),
        ),
        every(reaches("accuracy.text.id", 0.99, 1.0), reaches("accuracy.text.ve", 0.99, 1.0)),
        _EXACT,
    ),
    Claim(
        "Text goes beyond the largest number taught",
        "FE about 99 %",
        "0 %",
        (
            Shown("text, FE, %", "accuracy.text.fe"),
            Shown("no number, %", "no_number.text.fe"),
        ),
        needing(reaches("accuracy.text.fe", 0.98, 1.0), lambda metrics: metrics["fe.last"] < 100),
        f"{_EXACT} On 19x19 boards the right answers have three digits. No model was trained to"
        " give three, and an answer of two digits cannot be right: nothing can be said there.",
    ),
    Claim(
        "The vision encoder counts every board (vision gap 0)",
        "0 stones up to 120",
        "-",
        (
            Shown("vision gap, VE, stones", "vision_gap.ve", stones),
            Shown("FE, stones", "vision_gap.fe", stones),
            Shown("untrained encoder, VE, stones", "vision_gap.untrained.ve", stones),
            Shown("raw pixels, VE, stones", "vision_gap.pixels.ve", stones),
        ),
        _vision_gap,
        "Rule: the interval lies below half a stone in all regimes. The control: an untrained"
        " encoder and raw pixels do the same, so the gap does not show that training taught it.",
    ),
    Claim(
        "The language gap jumps where pictures end",
        "0, then a jump at the first unseen count",
        "-",
        (
            Shown("language gap, ID, stones", "language_gap.id", stones),
            Shown("VE, stones", "language_gap.ve", stones),
            Shown("the same for text, VE, stones", "language_gap.text.ve", stones),
        ),
        needing(_language_gap, lambda metrics: metrics["language_gap.text.ve.high"] < HALF),
        "Rule: the interval lies below half a stone in ID and above it in VE, wherever in VE it"
        " begins. The control: that of text must lie below half a stone in VE.",
    ),
    Claim(
        "A True/False model still compares the amounts it cannot name",
        "VE above 90 %",
        "92 %; above 70 %",
        (
            Shown("published pairs, VE, %", "comparison.vision.ve"),
            Shown("pairs 1 to 3 apart, VE, %", "comparison.vision.ve.near"),
            Shown("text, 1 to 3 apart, VE, %", "comparison.text.ve.near"),
            Shown("lost from ID beyond text, points", "comparison.gap.ve.beyond_id"),
        ),
        needing(
            controlled(
                reaches("comparison.vision.ve", 0.9, 1.0),
                lambda metrics: metrics["comparison.gap.ve.beyond_id.high"] < MARGIN,
            ),
            lambda metrics: metrics["comparison.text.ve.near.low"] >= ABOVE_CHANCE,
        ),
        "Rule: the interval reaches 90 % on the published kind of pair (half equal, half a uniform"
        " other number, chance 50 %). The control: such pairs are mostly far apart. On pairs 1 to 3"
        " apart, which need the amount itself, pictures must lose less than 5 points more than text"
        " from ID to VE; and text must be above 60 % there, or nothing can be said.",
    ),
    Claim(
        "The comparison is near perfect on seen counts",
        "ID 98 %",
        "-",
        (Shown("published pairs, ID, %", "comparison.vision.id"),),
        reaches("comparison.vision.id", 0.96, 1.0),
        "Rule: the interval reaches the figure within 2 points.",
    ),
    Claim(
        "The comparison is near chance beyond both",
        "FE 55 %",
        "-",
        (
            Shown("published pairs, FE, %", "comparison.vision.fe"),
            Shown("text, FE, %", "comparison.text.fe"),
        ),
        controlled(
            reaches("comparison.vision.fe", 0.0, 0.6),
            lambda metrics: metrics["comparison.text.fe.low"] >= KNOWS,
        ),
        "Rule: the interval reaches 60 % or less (chance is 50 %). The control: unless text is"
        " surely right in nine cases of ten, this says little of pictures.",
    ),
    Claim(
        "Wrong answers fall on attractors: the visual edge, the last decade, small numbers",
        "49, 90..99, and 9, 5, 6",
        "-",
        (
            Shown("at an attractor, VE, %", "topology.vision.ve.attractors"),
            Shown("text at an attractor, VE, %", "topology.text.ve.attractors"),
            Shown("at the edge, %", "topology.vision.ve.edge"),
            Shown("in the last decade, %", "topology.vision.ve.last_decade"),
            Shown("below 10, %", "topology.vision.ve.small"),
            Shown("at the edge, pictures less text, points", "topology.excess.ve.edge"),
            Shown("in the last decade, less text", "topology.excess.ve.last_decade"),
            Shown("below 10, less text", "topology.excess.ve.small"),
        ),
        _attractors,
        "Rule: at least one of the three places draws more answers (held to digits) than text of"
        " the same counts does, whose answers are right; the last rows say which. Right answers"
        " lie in the last decade too, so the bare share says little.",
    ),
    Claim(
        "Seeing and reading need different heads",
        "95.7 % of pairs differ",
        "-",
        (
            Shown("picture with text, %", "heads.differ.cross"),
            Shown("picture with picture, %", "heads.differ.vision"),
            Shown("text with text, %", "heads.differ.text"),
            Shown("beyond the larger baseline, points", "heads.excess"),
            Shown("heads needed most, number compared", "heads.top.n", _plain),
            Shown("of these, shared by both, %", "heads.top.cross"),
            Shown("p of sharing so many by chance", "heads.top.cross.p", _plain),
            Shown("the least p that so few can have", "heads.top.smallest_p", _plain),
            Shown("p within blocks", "heads.top.cross.p_within_blocks", _plain),
        ),
        _heads,
        "Rule: the share lies above both baselines, two pictures and two texts of one count, which"
        " differ as well; the published figure alone would say nothing. Two samples differ as soon"
        " as one head does: where there are many heads, nearly all pairs can differ while the heads"
        " needed most are the same. Of those the last rows say how many are shared (with the middle"
        " 95 % of random halves), and whether by chance: where p is small and p within blocks is"
        " not, pictures and text need the same block, and nothing is known of its heads.",
    ),
    Claim(
        "Most pairs share no head at all",
        "-",
        "73.6 %",
        (
            Shown("picture with text, %", "heads.disjoint.cross"),
            Shown("picture with picture, %", "heads.disjoint.vision"),
            Shown("text with text, %", "heads.disjoint.text"),
        ),
        reaches("heads.disjoint.cross", 0.636, 0.836),
        "Rule: the interval reaches the figure within 10 points. Pairs in which a sample needs no"
        " head are left out: two empty sets are no agreement.",
    ),
    Claim(
        "Hiding k black patches takes k off the answer, k up to 4",
        "100 %",
        "-",
        tuple(Shown(f"k = {k}, %", f"masking.vision.black.k{k}") for k in (1, 2, 3, 4))
        + (Shown("k = 4 white ones: unchanged, %", "masking.vision.white.k4"),),
        _masking({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}),
        "Rule: the interval reaches the figure within 2 points for every k. The control: hiding k"
        " white patches should change nothing.",
    ),
    Claim(
        "Hiding 5 black patches takes 5 off the answer less often",
        "77.2 %",
        "-",
        (
            Shown("k = 5, %", "masking.vision.black.k5"),
            Shown("k = 5 white ones: unchanged, %", "masking.vision.white.k5"),
        ),
        _masking({5: 0.772}),
        "Rule: the interval reaches the figure within 2 points.",
    ),
)
"""What the paper says of its own small model."""

ELSEWHERE = (
    (
        "Qwen3-VL-32B on 6x6 boards: text stays above about 50 % to 20, pictures fall after 5",
        "about 5 % at 8, 0 at 15; vision gap about 0.1",
        "-",
    ),
    (
        "Qwen3-VL-32B: probes on image tokens, layer by layer",
        "above 99 % in the first 40 of 64 layers, lower in the last",
        "100 %",
    ),
)
"""Claims on a large model; its weights are not here, so nothing of ours stands beside them."""

BEYOND = (
    *(Shown(f"is the {stage} where it breaks?", f"verdict.{stage}", _plain) for stage in STAGES),
    Shown("count read by ridge, text to text, ID, %", "answer_ridge.text_to_text.{}.id"),
    Shown("text to text, VE, %", "answer_ridge.text_to_text.{}.ve"),
    Shown("pictures to pictures, ID, %", "answer_ridge.vision_to_vision.{}.id"),
    Shown("pictures to pictures, VE, %", "answer_ridge.vision_to_vision.{}.ve"),
    Shown("text to pictures, ID, %", "answer_ridge.text_to_vision.{}.id"),
    Shown("text to pictures, VE, %", "answer_ridge.text_to_vision.{}.ve"),
    Shown("pictures, fitted on all counts, VE, %", "answer_ridge.vision_to_vision.all.{}.ve"),
    Shown("text, fitted on all counts, VE, %", "answer_ridge.text_to_text.all.{}.ve"),
    Shown("untrained model, pictures, VE, %", "answer_ridge.untrained.vision_to_vision.{}.ve"),
    Shown("untrained model, text, VE, %", "answer_ridge.untrained.text_to_text.{}.ve"),
    Shown("pictures lose more than text, 1 to 3 apart, points", "comparison.gap.ve.beyond_id"),
    Shown("heads needed most: shared by pictures and text, %", "heads.top.cross"),
    Shown("shared by halves of the pictures, %", "heads.top.vision"),
    Shown("shared by halves of the texts, %", "heads.top.text"),
)
"""What the paper does not measure; the ridge reads the last block."""


def verdict(claim: Claim, seeds: Seeds) -> str:
    """One word for a preset: its seeds' common verdict, or which seed says what."""
    found: dict[str, list[str]] = {}
    for seed, metrics in seeds.items():
        known = all(shown.key in metrics for shown in claim.shown)
        said = claim.judge(metrics) if known else UNMEASURED
        found.setdefault(said, []).append(str(seed))
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{said} (seed {', '.join(which)})" for said, which in found.items())


def overview(presets: Mapping[str, Seeds]) -> Table:
    """Every claim, and its verdict for each preset."""
    rows = [
        [c.claim, c.published, c.others, *(verdict(c, seeds) for seeds in presets.values())]
        for c in CLAIMS
    ]
    rows += [[*row, *[UNMEASURED] * len(presets)] for row in map(list, ELSEWHERE)]
    columns = ["claim", "published", "other accounts", *presets]
    return Table("What of the paper holds?", columns, rows)


def tally(presets: Mapping[str, Seeds]) -> Table:
    """How many claims about the paper's own small model got which verdict."""
    words = (HOLDS, CONTROL, FAILS, UNMEASURED)
    rows = [[word] for word in (*words, "seeds differ")]
    for seeds in presets.values():
        found = [verdict(claim, seeds) for claim in CLAIMS]
        times = [found.count(word) for word in words]
        for row, n in zip(rows, [*times, len(found) - sum(times)], strict=True):
            row.append(str(n))
    return Table(f"Of {len(CLAIMS)} claims", ["verdict", *presets], rows)


def details(presets: Mapping[str, Seeds]) -> list[tuple[Claim, Table]]:
    """For every claim our numbers, a row for each preset and number, a column for each seed."""
    most = sorted({seed for seeds in presets.values() for seed in seeds})
    found = []
    for claim in CLAIMS:
        rows = [
            [preset, shown.what, *_cells(shown, seeds, most)]
            for preset, seeds in presets.items()
            for shown in claim.shown
        ]
        columns = ["preset", "ours", *(f"seed {seed}" for seed in most)]
        found.append((claim, Table(claim.claim, columns, rows)))
    return found


def ours(presets: Mapping[str, Seeds]) -> Table:
    """All claims and all our numbers in one table."""
    rows = [[claim.claim, *row] for claim, table in details(presets) for row in table.rows]
    columns = ["claim", *details(presets)[0][1].columns]
    shown = [
        ["" if i and rows[i - 1][0] == row[0] else row[0], *row[1:]] for i, row in enumerate(rows)
    ]
    return Table("The paper's claims: our numbers [95 % intervals]", columns, shown)


def beyond(presets: Mapping[str, Seeds]) -> Table:
    """What is measured beside the paper."""
    most = sorted({seed for seeds in presets.values() for seed in seeds})
    rows = []
    for preset, seeds in presets.items():
        last = _last_block(seeds)
        for shown in BEYOND:
            own = shown._replace(key=shown.key.format(last))
            rows.append([preset, own.what, *_cells(own, seeds, most)])
    return Table("Beside the paper", ["preset", "ours", *(f"seed {seed}" for seed in most)], rows)


def _cells(shown: Shown, seeds: Seeds, most: Sequence[int]) -> list[str]:
    return [shown.written(seeds[seed], shown.key) if seed in seeds else "-" for seed in most]


def _last_block(seeds: Seeds) -> str:
    head = "answer_ridge.text_to_text.block_"
    keys = [key for metrics in seeds.values() for key in metrics if key.startswith(head)]
    blocks = {int(key.removeprefix(head).split(".")[0]) for key in keys}
    return f"block_{max(blocks, default=0)}"
