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
it, and `answer`: the tokens at which an answer is read (the last of the prompt and all new ones)."""


class Span(NamedTuple):
    """Positions `start` to `stop` (exclusive) of one row."""

    start: int
    stop: int


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Layout:
    """What every column of a batch is. The prompt takes the first `n_prompt` columns."""

    mask: Bool[Tensor, "batch pos"]
    """True at real tokens, False at pads."""
    n_prompt: int
    spans: tuple[Mapping[str, Span], ...]
    patches: Patches

    @property
    def starts(self) -> Int[Tensor, " batch"]:
        """Column of each row's first real token."""
        return self.mask[:, : self.n_prompt].int().argmax(1)

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Number of real tokens in each row's prompt."""
        return self.mask[:, : self.n_prompt].sum(1)

    @property
    def n_new(self) -> int:
        return self.mask.shape[1] - self.n_prompt

    def extend(self, n: int) -> "Layout":
        """The layout with `n` new tokens behind the prompt."""
        return replace(self, mask=torch.nn.functional.pad(self.mask, (0, n), value=True))

    def repeat(self, n: int) -> "Layout":
        """One row's layout, `n` times."""
        return Layout(self.mask.repeat(n, 1), self.n_prompt, self.spans * n, self.patches.repeat(n))

    def columns(self, tokens: Tokens | None, *, beyond: bool = False) -> Bool[Tensor, "batch pos"]:
        """True at the chosen tokens; None chooses all real ones.

        With `beyond`, positions that the answer has not reached yet are left out instead of
        refused.

        Raises:
            InputError: no such role or span, a position out of range, a mask of another shape.
        """
        return self.mask if tokens is None else self.ranks(tokens, beyond=beyond) >= 0

    def ranks(self, tokens: Tokens, *, beyond: bool = False) -> Int[Tensor, "batch pos"]:
        """Where each column stands among its row's chosen tokens (0 is the first), or -1.

        Positions stand as they are listed, all else in the order of the sequence.
        """
        tokens = _plain(tokens)
        if isinstance(tokens, Tensor | str):
            named = isinstance(tokens, str)
            chosen = self._named(tokens) if named else self._masked(tokens, beyond)
            return torch.where(chosen, chosen.cumsum(1) - 1, -1)
        return self._positions(_lists(tokens, len(self.mask), "positions", "rows"), beyond)

    def gather(self, tokens: Tokens) -> Int[Tensor, "batch at"]:
        """Columns of the chosen tokens, positions as they are listed; every row must have as many.

        Raises:
            InputError: the rows have different numbers of such tokens, or none.
        """
        ranks = self.ranks(tokens)
        number = (ranks >= 0).sum(1)
        if number.min() != number.max() or number.max() == 0:
            raise InputError(
                f"tokens {_brief(tokens)} are {number.min()} to {number.max()} a row;"
                " choose tokens of which every row has as many, and at least one"
            )
        return ranks.argsort(1)[:, ranks.shape[1] - int(number.max()) :]

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
        place = torch.arange(self.mask.shape[1])
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
        place = torch.arange(self.mask.shape[1])
        chosen = torch.zeros_like(self.mask)
        for row, spans in enumerate(self.spans):
            if name in spans:
                start, stop = (self.starts[row] + p for p in spans[name])
                chosen[row] = (place >= start) & (place < stop)
        return chosen

    def _masked(self, mask: Tensor, beyond: bool) -> Bool[Tensor, "batch pos"]:
        n_batch, n_pos = self.mask.shape
        widths = (self.n_prompt, n_pos)
        fits = mask.ndim == 2 and len(mask) == n_batch
        if not fits or not (mask.shape[1] in widths or beyond and mask.shape[1] > self.n_prompt):
            raise InputError(
                f"a mask of tokens must be bool ({n_batch}, {n_pos}) (batch pos);"
                f" this one is {tuple(mask.shape)}"
            )
        mask = torch.nn.functional.pad(mask.cpu(), (0, n_pos - mask.shape[1]))
        if (mask & ~self.mask).any():
            raise InputError("the mask of tokens chooses pads; leave them out (mask & batch.mask)")
        return mask

    def _positions(self, rows: list[list[int]], beyond: bool) -> Int[Tensor, "batch pos"]:
        ranks = torch.full(self.mask.shape, -1)
        starts, lengths = self.starts.tolist(), self.lengths.tolist()
        for row, (positions, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
            end = length + self.n_new
            there = [p + length if p < 0 else p for p in positions]
            wrong = [i for i, t in enumerate(there) if t < 0 or (t >= end and not beyond)]
            if wrong:
                raise InputError(
                    f"no position {positions[wrong[0]]} in row {row}, which has {length} prompt tokens"
                    f" and {self.n_new} new ones (0 to {end - 1}; -1 is the prompt's last)"
                )
            if len(set(there)) < len(there):
                raise InputError(f"positions {_brief(positions)} name a token of row {row} twice")
            reached = [(t, rank) for rank, t in enumerate(there) if t < end]
            at, rank = torch.tensor(reached, dtype=torch.long).view(-1, 2).T
            column = torch.where(at < length, start + at, self.n_prompt + at - length)
            ranks[row, column] = rank
        return ranks


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
