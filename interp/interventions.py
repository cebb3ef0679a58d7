"""What to change in a forward pass, and where: edits are values, applied by `HookedVLM.run`.

Every edit is a pure function of the activation at its site; `Mask` has no site and hides tokens as
keys. An edit that changes nothing because it chooses nothing is an error, never a silent no-op.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp import sites
from interp.errors import InputError
from interp.layout import Frame, Indices, Layout, Places, Tokens, integers


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


class _Value:
    """Equality field by field, tensors by content."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            _equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        )

    __hash__ = None  # tensors in it have no hash that agrees with equality by content


_CHOICES = {"tokens": "pos", "heads": "head", "queries": "query", "keys": "key", "patches": "patch"}
"""The axis that each choice of a `Where` is made on."""


@dataclass(frozen=True, eq=False)
class Where(_Value):
    """The part of an activation that an edit touches; None is all of that axis.

    Pads, and keys that come after their query, are never touched.

    Attributes:
        tokens: a role ("prompt", "image", "text", "last", "new", "answer"), a named span, absolute
            positions (negative ones count from the prompt's end; one list for all rows or a list
            for each), or a bool mask (batch pos).
        heads: indices of heads.
        queries, keys: as `tokens`, for patterns and scores; in the vision tower places of patches.
        patches: places in every picture, a list for each picture, or a bool mask (patch).
    """

    tokens: Tokens | None = None
    heads: Indices | None = None
    queries: Tokens | None = None
    keys: Tokens | None = None
    patches: Places | None = None

    @property
    def chosen(self) -> list[str]:
        """The names of the choices that are made."""
        return [name for name in _CHOICES if getattr(self, name) is not None]

    def mask(self, site: str, activation: Tensor, frame: Frame) -> Bool[Tensor, "*axes"]:
        """True where the edit touches; broadcasts against the activation.

        Raises:
            InputError: the site lacks an axis that is chosen from, or something is out of range.
        """
        axes = sites.axes(site)
        self._check_axes(site, axes)
        result = torch.ones([1] * len(axes), dtype=torch.bool, device=activation.device)
        for names, chosen in self._choices(site, activation, frame, axes):
            shape = [s if a in names else 1 for a, s in zip(axes, activation.shape, strict=True)]
            result = result & chosen.to(activation.device).reshape(shape)
        return result

    def _check_axes(self, site: str, axes: tuple[str, ...]) -> None:
        for name in self.chosen:
            if _CHOICES[name] not in axes:
                usable = [n for n, axis in _CHOICES.items() if axis in axes]
                raise InputError(
                    f"Where({name}=...) at {site}: its axes are {' '.join(axes)};"
                    f" choose by {', '.join(usable) or 'nothing'} there"
                )

    def _choices(self, site: str, activation: Tensor, frame: Frame, axes: tuple[str, ...]):
        """Pairs of the axes that a choice is made on, and the choice over them."""
        layout = frame.layout
        if "pos" in axes:
            yield ("batch", "pos"), frame.columns(self.tokens)
        if "patch" in axes:
            yield ("patch",), layout.patch_mask(self.patches)
        if self.heads is not None:
            yield ("head",), _heads(self.heads, activation.shape[axes.index("head")], site)
        if "query" in axes and "batch" in axes:
            yield ("batch", "query", "key"), frame.cells(self.queries, self.keys)
        if "query" in axes and "image" in axes:
            yield ("image", "query"), layout.patch_mask(self.queries)
            yield ("image", "key"), layout.patch_mask(self.keys)


def _heads(heads: Indices, n_heads: int, site: str) -> Bool[Tensor, " head"]:
    indices = integers(heads)
    if indices is None:
        raise InputError(f"heads must be whole numbers, not {heads!r}")
    wrong = [h for h in indices if not 0 <= h < n_heads]
    if wrong:
        raise InputError(f"no head {wrong[0]} at {site}, which has heads 0 to {n_heads - 1}")
    chosen = torch.zeros(n_heads, dtype=torch.bool)
    chosen[indices] = True
    return chosen


@dataclass(frozen=True, eq=False)
class Edit(_Value):
    """A change to the activation at one site."""

    site: str

    def new(self, activation: Tensor, touched: Tensor, frame: Frame) -> Tensor:
        """What the touched elements become; broadcasts against the activation."""
        raise NotImplementedError

    def apply(self, activation: Tensor, frame: Frame) -> tuple[Tensor, bool]:
        """The edited activation (a new tensor), and whether anything was touched.

        Raises:
            InputError: a shape that does not fit, or a choice out of range; says both.
        """
        touched = self.where.mask(self.site, activation, frame)
        if not touched.any():
            return activation, False
        new = self.new(activation, touched, frame).to(activation.dtype)
        return torch.where(touched, new, activation), True

    def check(self, layout: Layout) -> None:
        """Raise what `apply` would, as far as it can be told from the sequence alone."""

    def _like(self, name: str, value: Tensor, activation: Tensor) -> Tensor:
        """A value whose axes are the last ones of the activation, ready to broadcast."""
        want = tuple(activation.shape[activation.ndim - value.ndim :])
        if value.ndim > activation.ndim or tuple(value.shape) != want:
            raise InputError(
                f"{type(self).__name__} at {self.site}: {name} is {tuple(value.shape)}, the"
                f" activation is {tuple(activation.shape)} ({' '.join(sites.axes(self.site))});"
                " give its last axes"
            )
        return value.to(activation)


@dataclass(frozen=True, eq=False)
class Ablate(Edit):
    """Replace by a constant: zero, or `mean` over a reference set (mean ablation).

    `mean` has the last axes of the site, e.g. (d_head) or (head d_head) at `attn.z`.
    """

    where: Where = field(default_factory=Where)
    mean: Float[Tensor, "*axes"] | None = None

    def new(self, activation: Tensor, touched: Tensor, frame: Frame) -> Tensor:
        if self.mean is None:
            return torch.zeros_like(activation)
        return self._like("mean", self.mean, activation)


@dataclass(frozen=True, eq=False)
class Patch(Edit):
    """Replace by what another run had (activation patching, Meng et al. 2022, arXiv:2202.05262).

    `source` has the activation's shape; or, along positions, queries or patches, only the chosen
    ones as they are listed, so that what `run(..., cache_at=tokens)` kept fits
    `Where(tokens=tokens)` whatever the padding; or the prompt's shape where new tokens follow,
    which it then leaves alone. A source of one row serves all. All else, and the keys of a
    pattern, stand by column: there the other run must be padded alike.
    """

    source: Float[Tensor, "*axes"]
    where: Where = field(default_factory=Where)

    def apply(self, activation: Tensor, frame: Frame) -> tuple[Tensor, bool]:
        touched = self.where.mask(self.site, activation, frame)
        if not touched.any():
            return activation, False
        by_token = "batch" in sites.axes(self.site)
        laid, covered = (self._lay_tokens if by_token else self._lay_patches)(activation, frame)
        touched = touched & covered.to(touched.device)
        return torch.where(touched, laid.to(activation), activation), bool(touched.any())

    def check(self, layout: Layout) -> None:
        if "batch" in sites.axes(self.site):
            self._entries(self._by_token(), layout)

    def _lay_tokens(self, activation: Tensor, frame: Frame) -> tuple[Tensor, Bool[Tensor, "*axes"]]:
        """The source laid over the activation, and where it covers it."""
        source, live = self._by_token(), activation.movedim(self._along, 1)
        fixed = slice(2, -1 if self._along == 2 else None)
        if len(source) not in (1, len(live)) or source.shape[fixed] != live.shape[fixed]:
            raise self._misfit(f"the activation is {tuple(activation.shape)}")
        entry = self._entries(source, frame.layout)[:, frame.own]
        laid = source[torch.arange(len(live))[:, None] % len(source), entry.clamp(min=0)]
        if self._along == 2:
            laid = F.pad(laid, (0, live.shape[-1] - laid.shape[-1]))
        covered = (entry >= 0).reshape(*entry.shape, *[1] * (live.ndim - 2))
        return laid.movedim(1, self._along), covered.movedim(1, self._along)

    def _lay_patches(self, activation: Tensor, frame: Frame) -> tuple[Tensor, Bool[Tensor, ""]]:
        """The same in the tower."""
        if self.source.shape == activation.shape:
            return self.source, torch.tensor(True)
        chosen = frame.layout.patch_index(self.where.patches)
        if (len(chosen), *activation.shape[1:]) != self.source.shape:
            raise self._misfit(f"the activation is {tuple(activation.shape)}")
        return activation.index_put((chosen,), self.source.to(activation)), torch.tensor(True)

    @property
    def _along(self) -> int:
        """The axis that runs over tokens: positions, or the queries of a pattern."""
        return 1 if "pos" in sites.axes(self.site) else 2

    def _by_token(self) -> Float[Tensor, "row entry *rest"]:
        if self.source.ndim != len(sites.axes(self.site)):
            raise self._misfit(f"the site has {len(sites.axes(self.site))} axes")
        return self.source.movedim(self._along, 1)

    def _entries(
        self, source: Float[Tensor, "row entry *rest"], layout: Layout
    ) -> Int[Tensor, "batch full"]:
        """Which entry of the source each column of the sequence takes; -1 where it takes none."""
        n, sizes = source.shape[1], (layout.n_prompt, layout.width + layout.room)
        own = torch.arange(sizes[1]).expand(len(layout.mask), -1)
        entry, fits = torch.where(own < n, own, -1), n in sizes
        tokens = self.where.tokens if self._along == 1 else self.where.queries
        if tokens is not None:
            ranks = layout.ranks(tokens)
            number = (ranks >= 0).sum(1)
            if n and ((number == n) | (number == 0)).all():
                entry, fits = ranks, True
            fits = fits and not ((ranks >= 0) & (entry < 0)).any()
        keys = source.shape[-1] if self._along == 2 else sizes[1]
        if not fits or keys not in sizes or (entry[:, keys:] >= 0).any():
            raise self._misfit(f"the sequence has {sizes[0]} columns and {sizes[1] - sizes[0]} new")
        return entry

    def _misfit(self, there: str) -> InputError:
        return InputError(
            f"Patch at {self.site}: source is {tuple(self.source.shape)}, {there}"
            f" ({' '.join(sites.axes(self.site))}); cache the source at the same tokens"
            " (cache_at=...) or from a prompt of the same length"
        )


@dataclass(frozen=True, eq=False)
class Steer(Edit):
    """Add `scale * direction`, in the activation's own units (nothing is normalised).

    `direction` has the last axes of the site.
    """

    direction: Float[Tensor, "*axes"]
    scale: float = 1.0
    where: Where = field(default_factory=Where)

    def new(self, activation: Tensor, touched: Tensor, frame: Frame) -> Tensor:
        return activation + self.scale * self._like("direction", self.direction, activation)


@dataclass(frozen=True, eq=False)
class Project(Edit):
    """Multiply the last axis by a matrix: `activation @ projection.T` (erasure, subspaces)."""

    projection: Float[Tensor, "d d"]
    where: Where = field(default_factory=Where)

    def new(self, activation: Tensor, touched: Tensor, frame: Frame) -> Tensor:
        width = activation.shape[-1]
        if tuple(self.projection.shape) != (width, width):
            raise InputError(
                f"Project at {self.site}: projection is {tuple(self.projection.shape)},"
                f" the last axis ({sites.axes(self.site)[-1]}) has {width}; give ({width}, {width})"
            )
        return activation @ self.projection.to(activation).T


@dataclass(frozen=True, eq=False)
class Mask(_Value):
    """Hide tokens as keys: nothing attends to them any more (they still attend).

    `where` chooses by `tokens` or by `patches`; a picture's patches are hidden in the tower too,
    and as the decoder's tokens, unless `tower` or `decoder` is False. `layers` limits it to some
    blocks of both; None is all.
    """

    where: Where
    tower: bool = True
    decoder: bool = True
    layers: Indices | None = None

    def __post_init__(self) -> None:
        if self.where.chosen not in (["tokens"], ["patches"]):
            raise InputError(
                f"Mask chooses by {' and '.join(self.where.chosen) or 'nothing'};"
                " choose by tokens or by patches"
            )
        if not (self.tower or self.decoder):
            raise InputError("Mask with tower=False and decoder=False hides nothing")
        if self.layers is not None and not integers(self.layers):
            raise InputError(f"Mask with layers={self.layers!r}; name at least one block, or None")

    def hidden(self, frame: Frame) -> tuple[Bool[Tensor, "batch pos"], Bool[Tensor, " patch"]]:
        """The hidden columns of the decoder, and the hidden patches of the tower."""
        layout = frame.layout
        if self.where.patches is not None:
            patches = layout.patch_mask(self.where.patches)
            columns = layout.image_tokens(patches)
        else:
            columns = layout.columns(self.where.tokens)
            patches = layout.patches_of(columns)
        return columns & self.decoder, patches & self.tower

    def hides_in(self, n_layers: int, stack: str) -> list[int]:
        """The blocks of a stack in which the tokens are hidden.

        Raises:
            InputError: a block that the stack does not have.
        """
        layers = range(n_layers) if self.layers is None else integers(self.layers) or []
        wrong = [layer for layer in layers if not 0 <= layer < n_layers]
        if wrong:
            raise InputError(
                f"Mask: no block {wrong[0]} in the {stack}, which has 0 to {n_layers - 1};"
                " limit it with tower=False or decoder=False, or name other layers"
            )
        return list(layers)
