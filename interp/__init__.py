"""Interpretability of vision-language models on hooks.

The names that a user learns first; each is loaded when it is first used, so that importing `interp`
costs nothing.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Ablate": "interventions",
    "Mask": "interventions",
    "Patch": "interventions",
    "Project": "interventions",
    "Steer": "interventions",
    "Where": "interventions",
    "Batch": "model",
    "HookedVLM": "model",
    "Picture": "model",
    "Prompt": "model",
    "Run": "model",
    "Text": "model",
    "generate": "model",
    "InputError": "errors",
    "LinearProbe": "probes",
    "ToyConfig": "toy",
    "ToyVLM": "toy",
    "kl_divergence": "metrics",
    "log_probability": "metrics",
    "logit_difference": "metrics",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"interp has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"interp.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, *globals()]
