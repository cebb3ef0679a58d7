"""What does the decoder hold where the answer is given? The stream at both answer positions.

Position 0 is the prompt's last token, which predicts the first digit; at position 1 that digit,
the true one, is the input.
"""

from typing import NamedTuple

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from circuits.counting.boards import check_total, draw_boards, draw_strings
from circuits.counting.questions import Asker
from circuits.counting.subject import Progress, Subject, chunks, silent
from interp.errors import InputError
from interp.toy import ToyVLM

_ENCODER = "vision.ln_final.normalized"


class Items(NamedTuple):
    """Boards or strings, and their counts."""

    cells: Int8[np.ndarray, "item *cells"]
    counts: Int[np.ndarray, " item"]

    def select(self, which: Bool[np.ndarray, " item"]) -> "Items":
        return Items(self.cells[which], self.counts[which])


class Activations(NamedTuple):
    """What ridges read, of some boards or strings."""

    counts: Int[np.ndarray, " item"]
    answer: Float[np.ndarray, "item layer position d_model"]
    """After each block; position 0 is the prompt's last token, 1 the true first digit."""
    encoder: Float[np.ndarray, "item d_vision"] | None
    """Mean over the patches of the encoder's output; None for text."""

    def select(self, which: Bool[np.ndarray, " item"]) -> "Activations":
        encoder = None if self.encoder is None else self.encoder[which]
        return Activations(self.counts[which], self.answer[which], encoder)


def fit_items(subject: Subject, modality: str, *, per_count: int, seed: int) -> Items:
    """Boards or strings of all ID and VE counts, from the training split.

    None is among the test examples, whatever split those are of.

    Raises:
        InputError: more cells than one call may ask for, or nothing to fit on for lack of ID
            counts or because the test examples leave none of them.
    """
    world, cells = subject.world, subject.world.size**2
    counts = np.repeat(np.arange(world.text_max + 1), per_count)
    check_total(len(counts), cells, f"board of {world.size}x{world.size}")
    if modality == "vision":
        drawn = draw_boards(counts, size=world.size, spread=world.spread, seed=seed, split="train")
    else:
        drawn = draw_strings(counts, length=cells, seed=seed, split="train")
    tests = {item.tobytes() for item in subject.items(modality).astype(np.int8)}
    kept = np.array([item.tobytes() not in tests for item in drawn])
    n_left = len(np.unique(counts[kept & (counts <= world.vision_max)]))
    if n_left < 3:
        raise InputError(
            f"{n_left} ID counts ({modality}) are left to fit a ridge on, and it needs three:"
            " choose a larger fit_per_count, or a model that was shown more counts"
        )
    return Items(drawn[kept], counts[kept])


def activations(
    model: ToyVLM, modality: str, items: Items, progress: Progress = silent
) -> Activations:
    """The stream after each block at both answer positions, from one forward pass an item."""
    asker, sites = Asker(model), [f"blocks.{i}.resid_post" for i in range(model.cfg.n_layers)]
    answers, encoders = [], []
    for part in chunks(items.cells):
        batch = asker.number(modality, items.cells[part])
        batch = batch.extend(first_digits(asker, items.counts[part]))
        kept = [*sites, _ENCODER] if modality == "vision" else sites
        cache = model.run(batch, cache=kept, cache_at="answer").cache
        answers.append(torch.stack([cache[site] for site in sites], 1).cpu().numpy())
        if modality == "vision":  # pooled at once: all patches of 4000 boards are 190 MB
            patches = rearrange(cache[_ENCODER], "(item patch) d -> item patch d", item=len(batch))
            encoders.append(patches.mean(1).cpu().numpy())
        progress(modality, part.stop / len(items.cells))
    encoder = np.concatenate(encoders) if encoders else None
    return Activations(items.counts, np.concatenate(answers), encoder)


def first_digits(asker: Asker, counts: Int[np.ndarray, " item"]) -> Int[Tensor, "item 1"]:
    """First token of the right answers: the tens, from 100 on the hundreds."""
    first = torch.empty(len(counts), 1, dtype=torch.long)
    for own in (counts < 100, counts >= 100):
        first[torch.from_numpy(own)] = asker.number_answer(counts[own])[:, :1]
    return first
