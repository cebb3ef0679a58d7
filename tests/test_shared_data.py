"""Tests on records made by others are left out where there are none, but never in CI."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def outcome(pytester, monkeypatch):
    """Runs one test that asks for the records, in a folder with this suite's conftest."""

    def run(data: Path, ci: str) -> pytest.RunResult:
        monkeypatch.setenv("VLM_CIRCUITS_DATA", str(data))
        monkeypatch.setenv("CI", ci)
        pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
        pytester.makepyfile("def test_it(shared_data): assert shared_data.is_dir()")
        return pytester.runpytest("-rs", "-p", "no:cacheprovider")

    return run


def test_records_that_are_there_are_used(outcome, tmp_path):
    outcome(tmp_path, ci="").assert_outcomes(passed=1)


def test_without_records_the_test_is_left_out_with_a_notice_of_both_places(outcome, tmp_path):
    result = outcome(tmp_path / "none", ci="false")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines([f"*$VLM_CIRCUITS_DATA ({tmp_path / 'none'})*shared/data*"])


def test_without_records_the_test_fails_in_ci(outcome, tmp_path):
    outcome(tmp_path / "none", ci="true").assert_outcomes(errors=1)
