"""Style, and which module may import which: the rules stand in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parents[1]


def python(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True)


def test_each_layer_imports_only_what_lies_below_it(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the linter adds to it
    status = lint_imports(no_cache=True, no_logo=True)
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("rule", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_finds_nothing(rule):
    found = python("-m", "ruff", *rule, "--no-cache", ".")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("package", ["interp", "circuits"])
def test_importing_a_package_imports_no_backend(package):
    backends = {"transformer_lens", "nnsight", "transformers"}
    imported = python("-c", f"import sys, {package}; print(*sys.modules)").stdout.split()
    assert package in imported and backends.isdisjoint(imported)
