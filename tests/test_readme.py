"""The README's page of Python runs, and prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_page_of_python_prints_what_stands_below_it():
    text = README.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    printed = re.search(r"It prints \(.*?```\n(.*?)```", text, re.DOTALL).group(1)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, str(README), "exec"), {"__name__": "page"})
    assert said.getvalue().splitlines() == printed.splitlines()
