"""Which token is what: pads, prompt and answer, named spans, and the patches of the pictures.

Positions are absolute: 0 is a row's first real token, whatever the padding, and the first new token
comes right behind the prompt. Columns are places in the padded tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.errors import InputError

Indices = int | Sequence[int] | Tensor | np.ndarray
"""One index or several."""

Places = Indices | Sequence[Sequence[int]]
"""A choice of patches: places in every picture, a list for each picture, or a mask."""

Tokens = str | Places
"""A choice of tokens: a role or span, positions (of all rows, or a list for each), or a mask."""

ROLES = ("prompt", "image", "text", "last", "new", "answer")
"""Every row has these: the prompt, its picture tokens, the rest of it, its last token, what follows
it, and `answer`: the tokens at which an answer is read (the prompt's last and all new ones)."""


class Span(NamedTuple):
    """Positions `start` to `stop` (exclusive) of one row."""

    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Patches:
    """The patches of all pictures of a batch: which row, picture, cell and token each one is."""

    row: Int[Tensor, " patch"]
    image: Int[Tensor, " patch"]
    """Counts the pictures of the whole batch, in order of rows."""
    tile: Int[Tensor, " patch"]
    y: Int[Tensor, " patch"]
    x: Int[Tensor, " patch"]
    token: Int[Tensor, " patch"]
    """Absolute position in the row."""
    box: Int[Tensor, "patch 4"]
    """Left, top, right, bottom in pixels of the original picture."""

    def __len__(self) -> int:
        return len(self.row)

    @property
    def n_images(self) -> int:
        return int(self.image.max()) + 1 if len(self) else 0

    @property
    def index(self) -> Int[Tensor, " patch"]:
        """Place of each patch within its picture."""
        if not len(self):
            return self.image
        first = torch.searchsorted(self.image, torch.arange(self.n_images))
        return torch.arange(len(self)) - first[self.image]

    def repeat(self, n: int) -> "Patches":
        """One row's patches, in `n` rows."""
        row = torch.arange(n).repeat_interleave(len(self))
        return replace(
            self,
            row=row,
            image=self.image.repeat(n) + row * self.n_images,
            **{name: getattr(self, name).repeat(n) for name in ("tile", "y", "x", "token")},
            box=self.box.repeat(n, 1),
        )


@dataclass(frozen=True, eq=False)
class Layout:
    """What every column of a batch is. The prompt takes the first `n_prompt` columns."""

    mask: Bool[Tensor, "batch pos"]
    """True at real tokens, False at pads."""
    n_prompt: int
    spans: tuple[Mapping[str, Span], ...]
    patches: Patches
    room: int = 0
    """New tokens that may still follow: choices may reach into them."""

    @property
    def starts(self) -> Int[Tensor, " batch"]:
        """Column of each row's first real token."""
        return self.mask[:, : self.n_prompt].int().argmax(1)

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Number of real tokens in each row's prompt."""
        return self.mask[:, : self.n_prompt].sum(1)

    @property
    def width(self) -> int:
        return self.mask.shape[1]

    @property
    def n_new(self) -> int:
        return self.width - self.n_prompt

    def extend(self, n: int) -> "Layout":
        """The layout with `n` new tokens behind the prompt."""
        mask = torch.nn.functional.pad(self.mask, (0, n), value=True)
        return replace(self, mask=mask, room=max(0, self.room - n))

    def repeat(self, n: int) -> "Layout":
        """One row's layout, `n` times."""
        rows, patches = self.mask.repeat(n, 1), self.patches.repeat(n)
        return replace(self, mask=rows, spans=self.spans * n, patches=patches)

    def columns(self, tokens: Tokens | None) -> Bool[Tensor, "batch pos"]:
        """True at the chosen tokens; None chooses all real ones.

        Raises:
            InputError: no such role or span, a position out of range, a mask of another shape.
        """
        return self.mask if tokens is None else self.ranks(tokens)[:, : self.width] >= 0

    def ranks(self, tokens: Tokens) -> Int[Tensor, "batch full"]:
        """Where each column, also of those to follow, stands among its row's chosen tokens (0 is
        the first); -1 if it is none of them.

        Positions stand as they are listed, all else in the order of the sequence.
        """
        if self.room:
            return self.extend(self.room).ranks(tokens)
        tokens = _plain(tokens)
        if isinstance(tokens, Tensor | str):
            chosen = self._named(tokens) if isinstance(tokens, str) else self._masked(tokens)
            return torch.where(chosen, chosen.cumsum(1) - 1, -1)
        return self._positions(_lists(tokens, len(self.mask), "positions", "rows"))

    def gather(self, tokens: Tokens) -> Int[Tensor, "batch at"]:
        """Columns of the chosen tokens, positions as they are listed; every row must have as many.

        Raises:
            InputError: the rows have different numbers of such tokens, or none.
        """
        ranks = self.ranks(tokens)[:, : self.width]
        number = (ranks >= 0).sum(1)
        if number.min() != number.max() or number.max() == 0:
            raise InputError(
                f"tokens {_brief(tokens)} are {number.min()} to {number.max()} a row;"
                " choose tokens of which every row has as many, and at least one"
            )
        return ranks.argsort(1)[:, self.width - int(number.max()) :]

    def patch_index(self, patches: Places | None) -> Int[Tensor, " chosen"]:
        """Rows of the patch table at the chosen patches, as they are listed; None chooses all.

        Raises:
            InputError: a place outside the picture, a mask or a list of another length.
        """
        table, patches = self.patches, _plain(patches)
        if patches is None:
            return torch.arange(len(table))
        if isinstance(patches, Tensor):
            if patches.shape != (len(table),):
                raise InputError(
                    f"a mask of patches must be bool ({len(table)},) (patch);"
                    f" this one is {tuple(patches.shape)}"
                )
            return patches.cpu().nonzero()[:, 0]
        chosen = [torch.zeros(0, dtype=torch.long)]
        for image, places in enumerate(_lists(patches, table.n_images, "patches", "pictures")):
            own = (table.image == image).nonzero()[:, 0]
            wrong = [p for p in places if not 0 <= p < len(own)]
            if wrong:
                raise InputError(
                    f"no patch {wrong[0]} in picture {image}, which has 0 to {len(own) - 1}"
                )
            chosen.append(own[places])
        return torch.cat(chosen)

    def patch_mask(self, patches: Places | None) -> Bool[Tensor, " patch"]:
        """True at the chosen patches (see `patch_index`)."""
        chosen = torch.zeros(len(self.patches), dtype=torch.bool)
        chosen[self.patch_index(patches)] = True
        return chosen

    def image_tokens(self, patches: Bool[Tensor, " patch"]) -> Bool[Tensor, "batch pos"]:
        """True at the tokens of the given patches."""
        chosen = torch.zeros_like(self.mask)
        rows = self.patches.row[patches]
        chosen[rows, self.starts[rows] + self.patches.token[patches]] = True
        return chosen

    def patches_of(self, columns: Bool[Tensor, "batch pos"]) -> Bool[Tensor, " patch"]:
        """True at the patches whose tokens are chosen: the inverse of `image_tokens`."""
        table = self.patches
        return columns[table.row, self.starts[table.row] + table.token]

    def _named(self, name: str) -> Bool[Tensor, "batch pos"]:
        place = torch.arange(self.width)
        prompt = self.mask & (place < self.n_prompt)
        new = self.mask & (place >= self.n_prompt)
        last = place == (self.starts + self.lengths - 1)[:, None]
        if name in ("image", "text"):
            image = self.image_tokens(torch.ones(len(self.patches), dtype=torch.bool))
            return image if name == "image" else prompt & ~image
        roles = {"prompt": prompt, "new": new, "last": last, "answer": last | new}
        return roles[name] if name in roles else self._span(name)

    def _span(self, name: str) -> Bool[Tensor, "batch pos"]:
        if not any(name in spans for spans in self.spans):
            have = sorted({n for spans in self.spans for n in spans})
            raise InputError(
                f"no role or span {name!r}; roles are {', '.join(ROLES)},"
                f" spans are {', '.join(have) or 'none (name a segment to have one)'}"
            )
        place = torch.arange(self.width)
        chosen = torch.zeros_like(self.mask)
        for row, spans in enumerate(self.spans):
            if name in spans:
                start, stop = (self.starts[row] + p for p in spans[name])
                chosen[row] = (place >= start) & (place < stop)
        return chosen

    def _masked(self, mask: Tensor) -> Bool[Tensor, "batch pos"]:
        n_batch, n_pos = self.mask.shape
        if mask.shape not in ((n_batch, self.n_prompt), (n_batch, n_pos)):
            raise InputError(
                f"a mask of tokens must be bool ({n_batch}, {n_pos}) (batch pos);"
                f" this one is {tuple(mask.shape)}"
            )
        mask = torch.nn.functional.pad(mask.cpu(), (0, n_pos - mask.shape[1]))
        if (mask & ~self.mask).any():
            raise InputError("the mask of tokens chooses pads; leave them out (mask & batch.mask)")
        return mask

    def _positions(self, rows: list[list[int]]) -> Int[Tensor, "batch pos"]:
        ranks = torch.full(self.mask.shape, -1)
        for row, (positions, length) in enumerate(zip(rows, self.lengths.tolist(), strict=True)):
            end = length + self.n_new
            wrong = [p for p in positions if not -length <= p < end]
            if wrong:
                raise InputError(
                    f"no position {wrong[0]} in row {row}, which has {length} prompt tokens and"
                    f" {self.n_new} new ones (0 to {end - 1}; -1 is the prompt's last)"
                )
            at = torch.tensor([p + length if p < 0 else p for p in positions], dtype=torch.long)
            if len(at.unique()) < len(at):
                raise InputError(f"positions {_brief(positions)} name a token of row {row} twice")
            column = torch.where(at < length, self.starts[row] + at, self.n_prompt + at - length)
            ranks[row, column] = torch.arange(len(at))
        return ranks


class Frame(NamedTuple):
    """What part of a sequence an activation holds: columns `first` to `first + n`."""

    layout: Layout
    first: int
    n: int

    @classmethod
    def whole(cls, layout: Layout) -> "Frame":
        """All columns that there are by now."""
        return cls(layout, 0, layout.width)

    @property
    def own(self) -> slice:
        return slice(self.first, self.first + self.n)

    def columns(self, tokens: Tokens | None) -> Bool[Tensor, "batch pos"]:
        return self.layout.columns(tokens)[:, self.own]

    def cells(self, queries: Tokens | None, keys: Tokens | None) -> Bool[Tensor, "batch query key"]:
        """The chosen pairs of a query and a key that it can attend to: real and not later."""
        end = self.first + self.n
        key = self.layout.columns(keys)[:, :end] & self.layout.mask[:, :end]
        causal = torch.ones(self.n, end, dtype=torch.bool).tril(self.first)
        return self.columns(queries)[:, :, None] & key[:, None] & causal


def _plain(choice: Any) -> Any:
    """Arrays of integers as lists, arrays of truth values as masks, the rest as it is."""
    if not hasattr(choice, "tolist"):
        return choice
    array = torch.as_tensor(choice)
    return array if array.dtype == torch.bool else array.tolist()


def _lists(choice: Any, n: int, what: str, of: str) -> list[list[int]]:
    """A list of integers for each of `n`; one number or one list serves them all."""
    if not isinstance(choice, str):
        whole = integers(choice)
        if whole is not None:
            return [whole] * n
        lists = [integers(part) for part in choice] if isinstance(choice, Sequence) else []
        if len(lists) == n and None not in lists:
            return lists
    raise InputError(
        f"{what} must be whole numbers for all {of}, or a list for each of the {n} {of}, not"
        f" {_brief(choice)}"
    )


def integers(choice: Any) -> list[int] | None:
    """A number, or a sequence or array of numbers, as a list of ints; None if it is neither."""
    choice = choice.tolist() if hasattr(choice, "tolist") else choice
    parts = [choice] if isinstance(choice, Integral) else choice
    if isinstance(parts, str) or not isinstance(parts, Sequence):
        return None
    good = all(isinstance(p, Integral) and not isinstance(p, bool) for p in parts)
    return [int(p) for p in parts] if good else None


def _brief(tokens: object) -> str:
    text = " ".join(repr(tokens).split())
    return text if len(text) < 60 else text[:57] + "..."
