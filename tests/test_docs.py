"""The reference names every module, so that none is left undocumented unseen."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_module_is_in_the_reference_once():
    files = [*ROOT.glob("interp/**/*.py"), *ROOT.glob("circuits/**/*.py")]
    modules = [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files]
    pages = "".join(page.read_text() for page in ROOT.glob("docs/reference/*.md"))
    named = re.findall(r"automodule:: (\S+)", pages)
    assert sorted(named) == sorted(m for m in modules if "__" not in m)
