"""A native model with its pictures fixed, for TransformerLens tools that pass tokens only."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.toy.hooks import all_but_patterns
from interp.toy.native import NativeVLM


class Bound:
    """`Bound(model, pixels=...)` can be given to `transformer_lens.patching` and to its lenses.

    So can `Bound(model.raw, position_ids=batch.positions, **batch.inputs)`.
    """

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
    """The same for the tower: names of hooks, sizes and attributes are the tower's.

    The model reads `tokens`, whatever a tool passes: tools count positions from what they pass,
    and here positions are patches, so pass `places`. Caches are `model.vision_cache(cache)`, or
    come from `run_with_cache` of this.
    """

    def __init__(self, model: NativeVLM, tokens: Int[Tensor, "batch pos"], **inputs: Any) -> None:
        super().__init__(model, **inputs)
        self._tokens = tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.vision, name)

    @property
    def places(self) -> Int[Tensor, "batch patch"]:
        """As many positions as a picture has patches."""
        n_patches = self._model.config.grid**2
        return torch.zeros(len(self._tokens), n_patches, dtype=torch.long)

    def __call__(self, places: Tensor, **kwargs: Any) -> Float[Tensor, "..."]:
        return super().__call__(self._tokens, **kwargs)

    def run_with_cache(self, places: Tensor, names_filter: Any = None, **kwargs: Any) -> Any:
        names = self._of_tower(all_but_patterns if names_filter is None else names_filter)
        out, cache = super().run_with_cache(self._tokens, names_filter=names, **kwargs)
        return out, self._model.vision_cache(cache)

    def run_with_hooks(self, places: Tensor, fwd_hooks: Sequence = (), **kwargs: Any) -> Any:
        hooks = [(name, hook) for names, hook in fwd_hooks for name in self._of_tower(names)]
        return super().run_with_hooks(self._tokens, fwd_hooks=hooks, **kwargs)

    def _of_tower(self, names: Any) -> list[str]:
        return [f"vision.{name}" for name in self._model.vision.live(names)]
