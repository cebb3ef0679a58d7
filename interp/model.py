"""What every vision-language model here can do, whichever library runs it; and greedy generation.

A batch goes in, some sites are kept, some edits are applied on the way: `HookedVLM.run`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp import sites
from interp.errors import InputError
from interp.interventions import Edit, Mask
from interp.layout import ROLES, Indices, Layout, Patches, Tokens, integers


@dataclass(frozen=True)
class StackDims:
    """Sizes of one stack of transformer blocks."""

    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    d_mlp: int


@dataclass(frozen=True)
class ModelDims(StackDims):
    """Sizes of the decoder, and under `vision` of the tower."""

    d_vocab: int
    vision: StackDims


@dataclass(frozen=True)
class ModelSpec:
    """How to build this model again elsewhere: a backend, and what it loads from."""

    backend: str
    source: str | None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """A piece of a prompt's text; with a name it can be addressed as a span."""

    text: str
    name: str | None = None


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture of a prompt: height x width x 3, eight bits a channel; or a PIL image."""

    pixels: Any
    name: str | None = None


@dataclass(frozen=True)
class Prompt:
    """Ordered text and pictures: `Prompt(picture, "How many black stones are there ?")`.

    Strings become `Text`, arrays and PIL images become `Picture`.
    """

    segments: tuple[Text | Picture, ...]

    def __init__(self, *segments: Any) -> None:
        if len(segments) == 1 and isinstance(segments[0], list | tuple):
            segments = tuple(segments[0])
        if not segments:
            raise InputError("a prompt needs at least one segment: text or a picture")
        object.__setattr__(self, "segments", tuple(_segment(s) for s in segments))
        names = [s.name for s in self.segments if s.name is not None]
        for name in names:
            if name in ROLES or names.count(name) > 1:
                reason = "is a role" if name in ROLES else "is given twice"
                raise InputError(f"the segment name {name!r} {reason}; choose another")


def _segment(segment: Any) -> Text | Picture:
    if isinstance(segment, Text | Picture):
        return segment
    return Text(segment) if isinstance(segment, str) else Picture(segment)


@dataclass(frozen=True, eq=False)
class Batch:
    """Encoded prompts: tokens, what every column is, and what the model needs besides."""

    tokens: Int[Tensor, "batch pos"]
    positions: Int[Tensor, "axis batch pos"]
    """Rotary positions: temporal, height, width (or one axis)."""
    layout: Layout
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """What the tower sees, by the model's own names."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def mask(self) -> Bool[Tensor, "batch pos"]:
        """True at real tokens."""
        return self.layout.mask

    @property
    def patches(self) -> Patches:
        return self.layout.patches

    def select(self, tokens: Tokens | None) -> Bool[Tensor, "batch pos"]:
        """True at the tokens of a role, span or list of positions (see `interp.layout`)."""
        return self.layout.columns(tokens)

    def repeat(self, n: int) -> "Batch":
        """A batch of one row, `n` times: the frame for many prompts of one form."""
        if len(self) != 1:
            raise InputError(f"repeat takes a batch of one row; this one has {len(self)}")
        return Batch(
            self.tokens.repeat(n, 1),
            self.positions.repeat(1, n, 1),
            self.layout.repeat(n),
            {k: v.repeat(n, 1) if k == "patches" else v for k, v in self.inputs.items()},
        )

    def reserve(self, n: int) -> "Batch":
        """The batch with room for `n` new tokens: in `prefill` and `step` edits may reach into it.

        `generate` does this itself.
        """
        return replace(self, layout=replace(self.layout, room=n))

    def extend(self, new: Int[Tensor, "batch new"]) -> "Batch":
        """The batch with new tokens behind the prompt: teacher forcing, or one naive step."""
        if new.shape[0] != len(self):
            raise InputError(f"{new.shape[0]} rows of new tokens for a batch of {len(self)}")
        n, new = new.shape[1], new.cpu()
        if bool(self.mask[:, -1].all()):  # then the last token is the furthest, on some axis
            last = self.positions[:, :, -1].amax(0)
        else:
            last = self.positions.masked_fill(~self.mask, -1).amax((0, 2))
        new_positions = (last[:, None] + 1 + torch.arange(n)).expand(len(self.positions), -1, -1)
        return replace(
            self,
            tokens=torch.cat([self.tokens, new], 1),
            positions=torch.cat([self.positions, new_positions], 2),
            layout=self.layout.extend(n),
        )


class Run(NamedTuple):
    """What one forward pass gave."""

    logits: Float[Tensor, "batch at d_vocab"]
    """At `logits_at` only."""
    cache: dict[str, Tensor]
    """Site to activation, after the edits; at `cache_at` only."""


@dataclass(frozen=True, eq=False)
class State:
    """A prompt that has been read: what the next step needs."""

    batch: Batch
    """The prompt and the tokens taken so far."""
    memory: tuple[Iterable[Tensor], ...]
    """Keys (rotated) and values of each block: batch pos head d_head."""
    logits: Float[Tensor, "batch d_vocab"]
    """Of the last token read: what comes next."""
    reader: "HookedVLM"
    """The model that read it."""
    edits: tuple[Edit | Mask, ...] = ()
    """Those under which it was read, and under which it is read on."""
    fired: frozenset[int] = frozenset()
    """Which of the edits have changed something so far."""

    def check(self, model: "HookedVLM", edits: Sequence[Edit | Mask]) -> None:
        """Whether this model may read on under these edits.

        Raises:
            InputError: another model has read the prompts, or they were read under other edits.
        """
        if self.reader is not model:
            raise InputError("these prompts were read by another model: prefill them with this one")
        if [*map(id, edits)] != [*map(id, self.edits)]:
            raise InputError(
                f"these prompts were read under {len(self.edits)} edits, and now {len(edits)} are"
                " given that are not the same objects: give prefill and what follows the same edits"
            )


@runtime_checkable
class HookedVLM(Protocol):
    """A vision-language model whose sites can be read and changed."""

    @property
    def cfg(self) -> ModelDims: ...

    @property
    def sites(self) -> Sequence[str]:
        """Every site that can be read now, in the order in which the forward pass reaches it."""
        ...

    @property
    def spec(self) -> ModelSpec: ...

    def encode(self, prompts: Sequence[Prompt], *, padding_side: str = "left") -> Batch: ...

    def decode(self, tokens: Int[Tensor, "batch pos"]) -> list[str]: ...

    def run(
        self,
        batch: Batch,
        *,
        edits: Sequence[Edit | Mask] = (),
        cache: Sequence[str] = (),
        logits_at: Tokens = "answer",
        cache_at: Tokens | None = None,
        grad: bool = False,
    ) -> Run:
        """One forward pass.

        Args:
            edits: applied in this order where they share a site.
            cache: sites to keep, as they are after the edits.
            logits_at: the tokens whose logits are given, as many in every row.
            cache_at: the tokens whose activations are kept, likewise; None keeps all, pads too.
                What belongs to a picture is always kept whole.
            grad: the kept activations become part of the graph of the logits:
                `torch.autograd.grad(run.logits.sum(), run.cache["blocks.0.attn.z"])`.

        Raises:
            UnknownSiteError: a site that this model does not have.
            InputError: an edit that does not fit, or that touches nothing.
        """
        ...

    def prefill(self, batch: Batch, *, edits: Sequence[Edit | Mask] = ()) -> State:
        """Read a batch and keep keys and values; `Batch.reserve` lets edits reach further."""
        ...

    def step(
        self,
        tokens: Int[Tensor, " batch"],
        state: State,
        *,
        edits: Sequence[Edit | Mask] = (),
        cache: Sequence[str] = (),
    ) -> tuple[Run, State]:
        """Read one more token of every row, under the edits that `prefill` was given."""
        ...

    def unembed(
        self, resid: Float[Tensor, "*batch d_model"], *, scale: Tensor | None = None
    ) -> Float[Tensor, "*batch d_vocab"]:
        """Logits of a residual stream, through the final norm; with `scale`, that frozen scale."""
        ...

    def head_out(self, layer: int, tower: str = "decoder") -> Float[Tensor, "head d_head width"]:
        """`W_O` of each head: `z @ head_out(layer)[head]` is what it writes.

        Raises:
            InputError: no such block, or a tower that is neither "decoder" nor "vision".
        """
        ...


@torch.no_grad()
def generate(
    model: HookedVLM,
    batch: "Batch | State",
    *,
    max_new_tokens: int,
    edits: Sequence[Edit | Mask] = (),
    allowed: Indices | None = None,
    stop: int | None = None,
) -> Int[Tensor, "batch new"]:
    """Greedy answers, with the prompt read once and its keys and values kept.

    Edits act as in a naive loop of full forwards: on the prompt, on new tokens, or on both, as
    their `Where` says.

    Args:
        batch: prompts, or prompts that have been read (what `model.prefill` gave under the same
            edit objects), so that several ways to answer read them once.
        allowed: only these tokens may be chosen (constrained decoding).
        stop: the token that ends an answer; what follows it in its row is `stop` again, and once
            every row has ended the loop does. None always takes `max_new_tokens`.

    Raises:
        InputError: an edit that cannot touch anything in a sequence of this length, or prompts that
            were read by another model or under other edits.
    """
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}; ask for at least one")
    read = isinstance(batch, State)
    state = batch if read else None
    if state is not None:
        state.check(model, edits)
    batch = batch.batch if read else batch.reserve(max_new_tokens - 1)
    if read and edits and batch.layout.room < max_new_tokens - 1:
        raise InputError(
            f"the prompts were read with room for {batch.layout.room} new tokens, and edits may"
            f" reach into {max_new_tokens - 1}: prefill batch.reserve({max_new_tokens - 1})"
        )
    _check_reach(batch.layout.extend(max_new_tokens - 1), edits, model.sites)
    ids = None if allowed is None else _tokens("allowed", allowed, model.cfg.d_vocab)
    if stop is not None:
        _tokens("stop", stop, model.cfg.d_vocab)
    if state is None:
        state = model.prefill(batch, edits=edits)
    new: list[Tensor] = []
    ended = torch.zeros(len(batch), dtype=torch.bool)
    for i in range(max_new_tokens):
        token = _choose(state.logits, ids)
        if stop is not None:
            token = torch.where(ended, torch.full_like(token, stop), token)
            ended |= token == stop
        new.append(token)
        if i + 1 == max_new_tokens or bool(ended.all()):
            break
        _, state = model.step(token, state, edits=edits)
    check_fired(edits, state.fired, full=i + 1 == max_new_tokens)
    return torch.stack(new, 1)


def _tokens(name: str, choice: Indices, d_vocab: int) -> Int[Tensor, " token"]:
    ids = integers(choice)
    if not ids or not all(0 <= i < d_vocab for i in ids):
        raise InputError(f"{name} is {choice!r}; give at least one token from 0 to {d_vocab - 1}")
    return torch.tensor(ids)


def _choose(
    logits: Float[Tensor, "batch d_vocab"], allowed: Int[Tensor, " allowed"] | None
) -> Int[Tensor, " batch"]:
    if allowed is None:
        return logits.argmax(-1).cpu()
    return allowed[logits[:, allowed.to(logits.device)].argmax(-1).cpu()]


def _check_reach(layout: Layout, edits: Sequence[Edit | Mask], known: Sequence[str]) -> None:
    """What cannot touch anything in a sequence like this is refused before any work."""
    for edit in edits:
        if isinstance(edit, Edit):
            if sites.kind(edit.site) not in sites.AXES:
                raise sites.UnknownSiteError(edit.site, known)
            edit.check(layout)
        vision = isinstance(edit, Edit) and "batch" not in sites.axes(edit.site)
        for name in set(edit.where.chosen) - {"heads"}:
            spec = getattr(edit.where, name)
            patches = vision or name == "patches"
            chosen = layout.patch_mask(spec) if patches else layout.columns(spec)
            if not chosen.any():
                raise InputError(
                    f"{_describe(edit)} would never fire: {name}={spec!r} chooses nothing in"
                    f" {layout.patches.n_images} pictures, {layout.n_prompt} prompt tokens and"
                    f" {layout.n_new} new ones that are read"
                )


def check_fired(edits: Sequence[Edit | Mask], fired: frozenset[int], *, full: bool = True) -> None:
    """Raise for the first edit that touched nothing.

    Where every answer ended early (`full` is False), edits on tokens that were never read stand.

    Raises:
        InputError: an edit whose index is not in `fired`.
    """
    for i, edit in enumerate(edits):
        late = not full and {"tokens", "queries", "keys"} & set(edit.where.chosen)
        if i not in fired and not late:
            raise InputError(
                f"{_describe(edit)} never fired: its Where chooses nothing in this batch"
            )


def _describe(edit: Edit | Mask) -> str:
    return f"{type(edit).__name__}{f' at {edit.site}' if isinstance(edit, Edit) else ''}"


def as_pixels(picture: Any) -> np.ndarray:
    """A picture as height x width x 3 bytes; PIL images are converted, arrays are checked.

    Raises:
        InputError: not a picture of eight bits a channel with three channels.
    """
    pixels = np.asarray(picture.convert("RGB") if hasattr(picture, "convert") else picture)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise InputError(
            f"a picture must be height x width x 3 of uint8 (or a PIL image);"
            f" this one is {pixels.shape} of {pixels.dtype}"
        )
    return pixels
