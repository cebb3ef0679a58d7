"""What all tests share: one thread, no network, equal examples in CI, records made by others."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"
CI = os.environ.get("CI", "").lower() not in ("", "0", "false", "no")

# Read when torch and numpy are first imported, which is after this file.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MPLBACKEND"] = "agg"
os.environ["HF_HUB_OFFLINE"] = "1"

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if CI else "local")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of records made by others; without it a test is left out, and fails in CI."""
    named = os.environ.get("VLM_CIRCUITS_DATA")
    folder = Path(named) if named else BESIDE
    if folder.is_dir():
        return folder
    notice = (
        f"no records at $VLM_CIRCUITS_DATA ({named or 'not set'})"
        f" nor, where that is not set, at {BESIDE}"
    )
    if CI:
        pytest.fail(notice)
    pytest.skip(notice)
