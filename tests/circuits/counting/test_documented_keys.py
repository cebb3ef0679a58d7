"""docs/counting.md lists every key of metrics.json, and none that there is not."""

import re
from pathlib import Path

import numpy as np
import pytest

from circuits.counting import diagnose
from circuits.counting.attractors import topology
from circuits.counting.boards import World
from circuits.counting.hidden_number import ENCODERS
from circuits.counting.masking import KINDS
from circuits.counting.questions import MODALITIES
from circuits.counting.verdict import STAGES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "counting.md"
MEANINGS = {
    **dict.fromkeys("MAB", MODALITIES),
    "R": World().regimes,
    "P": ("cross", *MODALITIES),
    "E": ENCODERS,
    "W": topology(np.zeros(1, dtype=int), World()),
    "K": [kind for kinds in KINDS.values() for kind in kinds],
    "S": STAGES,
    **dict.fromkeys("NLH", (r"\d+",)),
}
"""What the capitals of the page stand for."""


def _documented() -> list[str]:
    """Regular expressions of the first column."""
    rows = PAGE.read_text("utf-8").split("## Keys of metrics.json")[1].split("\n## ")[0]
    first = [line.split("|")[1] for line in rows.splitlines() if line.startswith("| `")]
    keys = [key for cell in first for key in re.findall("`([^`]+)`", cell)]
    return [
        re.sub("[A-Z]", lambda found: f"(?:{'|'.join(MEANINGS[found[0]])})", re.escape(key))
        for key in keys
    ]


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> set[str]:
    """Keys of a diagnosis, without the ends of intervals, errors and rank correlations."""
    out = tmp_path_factory.mktemp("keys") / "run"
    diagnose.run(diagnose.Config(model="tiny", per_count=4, out=out))
    metrics = diagnose.read_run(out).metrics
    ends = re.compile(r"\.(low|high|n)$")
    plain = {ends.sub("", key) if key != "heads.top.n" else key for key in metrics}
    more = {key for key in plain if key.endswith((".error", ".spearman"))}
    assert more and all(key.startswith("answer_ridge.") for key in more)
    return plain - more


def test_every_key_is_on_the_page(keys):
    patterns = _documented()
    unknown = [key for key in keys if not any(re.fullmatch(p, key) for p in patterns)]
    assert unknown == []


def test_every_key_on_the_page_is_measured(keys):
    absent = [p for p in _documented() if not any(re.fullmatch(p, key) for key in keys)]
    assert absent == [] and len(_documented()) > 60
