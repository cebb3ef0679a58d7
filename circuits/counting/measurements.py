"""The measurements of the counting study by name, in the order in which a reader meets them."""

from importlib import import_module
from types import ModuleType

from interp.errors import InputError

MODULES = {
    "accuracy": "behaviour",
    "attractors": "attractors",
    "hidden-number": "hidden_number",
    "masking": "masking",
    "comparison": "comparison",
    "heads": "head_overlap",
    "answer-ridge": "answer_ridge",
}
"""Command to module; each has `Config`, `run`, `figure` and `table`."""


def measurement(name: str) -> ModuleType:
    """The module of a measurement.

    Raises:
        InputError: there is none of that name.
    """
    if name not in MODULES:
        raise InputError(f"no measurement {name!r}; there are {', '.join(MODULES)}")
    return import_module(f"circuits.counting.{MODULES[name]}")
