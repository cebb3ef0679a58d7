"""What a run does at its hooks: apply the edits of a site in their order, and keep copies."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from interp import sites
from interp.interventions import Edit, Mask
from interp.layout import Frame, Tokens
from interp.toy.hooks import site_of


class Recorder:
    """The one hook function of a run."""

    def __init__(
        self,
        edits: Sequence[Edit | Mask],
        cache: Sequence[str],
        frame: Frame,
        *,
        cache_at: Tokens | None = None,
        grad: bool = False,
        fired: frozenset[int] = frozenset(),
    ) -> None:
        self.frame, self.grad = frame, grad
        self.kept: dict[str, Tensor] = {}
        self.fired = set(fired)
        """Which edits have touched something."""
        self._keep = frozenset([cache] if isinstance(cache, str) else cache)
        self._at = None if cache_at is None else frame.layout.gather(cache_at)
        self._edits: dict[str, list[tuple[int, Edit]]] = defaultdict(list)
        for i, edit in enumerate(edits):
            if isinstance(edit, Edit):
                self._edits[edit.site].append((i, edit))

    @property
    def sites(self) -> list[str]:
        return sorted({*self._keep, *self._edits})

    def __call__(self, activation: Tensor, hook: HookPoint) -> Tensor | None:
        site = site_of(hook.name or "")
        # the tower's pictures side by side along one axis of patches, as the patch table has them
        packed = sites.axes(site)[0] == "patch"
        value = before = activation.flatten(0, 1) if packed else activation
        for i, edit in self._edits.get(site, ()):
            value, touched = edit.apply(value, self.frame)
            if touched:
                self.fired.add(i)
        if site in self._keep:
            value = self._record(site, value)
        return None if value is before else value.reshape(activation.shape)

    def _record(self, site: str, value: Tensor) -> Tensor:
        """Keep a copy; with `grad` it takes the activation's place, so that gradients reach it."""
        if self.grad:
            copy = value.clone()
            self.kept[site] = copy if copy.requires_grad else copy.requires_grad_()
            return copy
        self.kept[site] = self._cut(site, value).detach().clone()
        return value

    def _cut(self, site: str, value: Tensor) -> Tensor:
        """Only the tokens asked for, along pos or query."""
        axes = sites.axes(site)
        if self._at is None or "batch" not in axes:
            return value
        along = axes.index("pos" if "pos" in axes else "query")
        rows = torch.arange(len(value))[:, None]
        return value.movedim(along, 1)[rows, self._at].movedim(1, along)
