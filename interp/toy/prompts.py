"""Prompts of text and pictures to a batch of the toy: tokens, rotary positions, spans, patches."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from interp.errors import InputError
from interp.layout import Layout, Patches, Span
from interp.model import Batch, Picture, Prompt, Text, as_pixels
from interp.toy.config import BOS, IMAGE, IMAGE_END, IMAGE_START, PAD, ToyConfig
from interp.toy.rope import segment_positions
from interp.toy.tokenizer import WordTokenizer


class Row(NamedTuple):
    """One prompt, before padding."""

    ids: list[int]
    positions: Int[Tensor, "3 pos"]
    spans: dict[str, Span]
    pictures: list[int]
    """Where the tokens of each picture begin."""


def encode(
    config: ToyConfig, tokenizer: WordTokenizer, prompts: Sequence[Prompt], padding_side: str
) -> Batch:
    """See `ToyVLM.encode`."""
    rows = [_row(config, tokenizer, prompt) for prompt in prompts]
    width = max(len(row.ids) for row in rows)
    tokens = torch.full((len(rows), width), tokenizer.pad)
    positions = torch.zeros(3, len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        n = len(row.ids)
        own = slice(width - n, width) if padding_side == "left" else slice(n)
        tokens[i, own], positions[:, i, own] = torch.tensor(row.ids), row.positions
        mask[i, own] = True
    layout = Layout(mask, width, tuple(row.spans for row in rows), _table(config, rows))
    return Batch(tokens, positions, layout, _pictures(config, prompts))


def normalised(pixels: Tensor) -> Float[Tensor, "*axes"]:
    """Bytes 0..255 to -1..1."""
    return pixels.float() / 127.5 - 1.0


def _row(config: ToyConfig, tokenizer: WordTokenizer, prompt: Prompt) -> Row:
    pieces: list[list[int]] = [[tokenizer.id(BOS)]]
    grids: list[int | None] = [None]
    spans, pictures = {}, []
    for segment in prompt.segments:
        at = sum(map(len, pieces))
        if isinstance(segment, Picture):
            image = [tokenizer.id(IMAGE)] * config.grid**2
            pieces += [[tokenizer.id(IMAGE_START)], image, [tokenizer.id(IMAGE_END)]]
            grids += [None, config.grid, None]
            pictures.append(at + 1)
            span = Span(at + 1, at + 1 + len(image))
        else:
            pieces.append(_words(tokenizer, segment))
            grids.append(None)
            span = Span(at, at + len(pieces[-1]))
        if segment.name is not None:
            spans[segment.name] = span
    ids = [token for piece in pieces for token in piece]
    if not 1 < len(ids) <= config.n_ctx:
        raise InputError(
            f"a prompt of {len(ids)} tokens, of which one is <bos>; give 2 to {config.n_ctx}"
        )
    return Row(ids, segment_positions([len(p) for p in pieces], grids), spans, pictures)


def _words(tokenizer: WordTokenizer, segment: Text) -> list[int]:
    ids = tokenizer(segment.text)
    for word in (IMAGE, PAD):
        if tokenizer.id(word) in ids:
            raise InputError(
                f"the word {word} in a text; give a picture as a segment of its own, and let"
                " encode pad"
            )
    return ids


def _table(config: ToyConfig, rows: Sequence[Row]) -> Patches:
    """One line for every patch of every picture, in order of rows, pictures and cells."""
    place = [(i, start) for i, row in enumerate(rows) for start in row.pictures]
    row, start = torch.tensor(place, dtype=torch.long).view(-1, 2).T
    n, cell = len(place), torch.arange(config.grid**2)
    y, x = (cell // config.grid).repeat(n), (cell % config.grid).repeat(n)
    image = torch.arange(n).repeat_interleave(len(cell))
    return Patches(
        row=row.repeat_interleave(len(cell)),
        image=image,
        tile=torch.zeros_like(image),
        y=y,
        x=x,
        token=start.repeat_interleave(len(cell)) + cell.repeat(n),
        box=torch.stack([x, y, x + 1, y + 1], 1) * config.patch,
    )


def _pictures(config: ToyConfig, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
    """All pictures' patches, each different one once: `kinds` and, for every patch, its kind."""
    pictures = [s.pixels for p in prompts for s in p.segments if isinstance(s, Picture)]
    if not pictures:
        return {}
    flat = np.concatenate([_patches(config, picture) for picture in pictures])
    kinds, index = np.unique(flat, axis=0, return_inverse=True)
    return {
        "kinds": normalised(torch.from_numpy(kinds)),
        "patches": torch.from_numpy(index.reshape(len(pictures), -1)),
    }


def _patches(config: ToyConfig, picture: object) -> UInt8[np.ndarray, "patch pixel"]:
    pixels, side = as_pixels(picture), config.grid * config.patch
    if pixels.shape[:2] != (side, side):
        raise InputError(
            f"a picture of {pixels.shape[1]} x {pixels.shape[0]} pixels; this model sees"
            f" {side} x {side} ({config.grid} x {config.grid} patches of {config.patch})"
        )
    return rearrange(pixels, "(y p) (x q) c -> (y x) (c p q)", p=config.patch, q=config.patch)
