"""A native model with its pictures fixed, for TransformerLens tools that pass tokens only."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.toy.native import NativeVLM


class Bound:
    """`Bound(model, pixels=...)` can be given to `transformer_lens.patching` and to its lenses."""

    def __init__(self, model: NativeVLM, **inputs: Any) -> None:
        self._model, self._inputs = model, inputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: Int[Tensor, "batch pos"], **kwargs: Any) -> Float[Tensor, "..."]:
        return self._model(tokens, **{**self._inputs, **kwargs})

    def run_with_cache(self, tokens: Int[Tensor, "batch pos"], **kwargs: Any) -> Any:
        return self._model.run_with_cache(tokens, **{**self._inputs, **kwargs})

    def run_with_hooks(self, tokens: Int[Tensor, "batch pos"], **kwargs: Any) -> Any:
        return self._model.run_with_hooks(tokens, **{**self._inputs, **kwargs})


class BoundVision(Bound):
    """The same for the tower: canonical hook names mean the tower's, sizes are the tower's.

    Pair it with `model.vision_cache(cache)`. Positions are patches: pass `index_axis_names` or
    tokens of that length where a tool counts positions from its tokens.
    """

    @property
    def cfg(self) -> Any:
        return self._model.vcfg

    @property
    def blocks(self) -> torch.nn.ModuleList:
        return self._model.vision.blocks

    def run_with_hooks(
        self, tokens: Int[Tensor, "batch pos"], fwd_hooks: Sequence = (), **kwargs: Any
    ) -> Any:
        hooks = [(f"vision.{name}", hook) for name, hook in fwd_hooks]
        return super().run_with_hooks(tokens, fwd_hooks=hooks, **kwargs)
