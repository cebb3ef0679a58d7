"""Multimodal rotary positions (M-RoPE), as in Qwen2-VL (arXiv:2409.12191, section 2.1)."""

from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Rotary(NamedTuple):
    """Cosines and sines of every position; they broadcast over heads."""

    cos: Float[Tensor, "batch pos 1 d_head"]
    sin: Float[Tensor, "batch pos 1 d_head"]


def rotary(
    positions: Int[Tensor, "3 batch pos"], sections: tuple[int, int, int], base: float
) -> Rotary:
    """Angles in which each section of frequencies follows one axis: time, height or width."""
    inverse, axis = _frequencies(sections, base, positions.device)
    angle = positions[axis].permute(1, 2, 0).float() * inverse
    angle = torch.cat([angle, angle], -1)[:, :, None]
    return Rotary(angle.cos(), angle.sin())


@lru_cache(maxsize=16)
def _frequencies(
    sections: tuple[int, int, int], base: float, device: torch.device
) -> tuple[Float[Tensor, " frequency"], Int[Tensor, " frequency"]]:
    """Radians a position, and the axis that each frequency follows."""
    half = sum(sections)
    inverse = 1.0 / base ** (torch.arange(half, device=device).float() / half)
    return inverse, torch.repeat_interleave(torch.arange(3), torch.tensor(sections)).to(device)


def rotate(x: Float[Tensor, "batch pos head d_head"], by: Rotary) -> Float[Tensor, "..."]:
    """Channel i turns with channel i + d_head / 2 (halves, not even and odd channels)."""
    a, b = x.chunk(2, -1)
    return x * by.cos.to(x.dtype) + torch.cat([-b, a], -1) * by.sin.to(x.dtype)


def segment_positions(lengths: list[int], grids: list[int | None]) -> Int[Tensor, "3 pos"]:
    """Positions of one row: a text segment counts up on all axes, a picture of g x g patches
    takes its time from where it begins and its height and width from the cell, and what follows
    it begins behind the largest.
    """
    parts, start = [], 0
    for length, grid in zip(lengths, grids, strict=True):
        if grid is None:
            parts.append((start + torch.arange(length)).expand(3, -1))
            start += length
        else:
            cell = torch.arange(grid * grid)
            parts.append(start + torch.stack([cell * 0, cell // grid, cell % grid]))
            start += grid
    return torch.cat(parts, 1) if parts else torch.zeros(3, 0, dtype=torch.long)
