"""Logits to one number per example: the metrics that patching, ablation and attribution share."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.errors import InputError


def logit_difference(
    logits: Float[Tensor, "batch at d_vocab"],
    right: Int[Tensor, "batch answer"],
    wrong: Int[Tensor, "batch wrong"],
) -> Float[Tensor, " batch"]:
    """Logit of the right token less that of the wrong one, summed over the answer's tokens.

    Preferred to probabilities, which saturate (Zhang & Nanda 2024, arXiv:2309.16042, section 4).
    """
    return (_pick(logits, right) - _pick(logits, wrong)).sum(1)


def log_probability(
    logits: Float[Tensor, "batch at d_vocab"], answer: Int[Tensor, "batch answer"]
) -> Float[Tensor, " batch"]:
    """Log probability (nats) of a whole answer under teacher forcing: the sum over its tokens."""
    return _pick(logits.float().log_softmax(-1), answer).sum(1)


def kl_divergence(
    clean: Float[Tensor, "batch at d_vocab"], edited: Float[Tensor, "..."]
) -> Float[Tensor, " batch"]:
    """KL(clean || edited) in nats, summed over the answer's tokens; in float32."""
    if clean.shape != edited.shape:
        raise InputError(
            f"clean logits are {tuple(clean.shape)} (batch at d_vocab), edited ones"
            f" {tuple(edited.shape)}: read both at the same tokens"
        )
    p, q = clean.float().log_softmax(-1), edited.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum((1, 2))


def _pick(
    logits: Float[Tensor, "batch at d_vocab"], tokens: Int[Tensor, "batch answer"]
) -> Float[Tensor, "batch at"]:
    if logits.shape[:2] != tokens.shape:
        raise InputError(
            f"answers are {tuple(tokens.shape)} (batch at), logits are read at"
            f" {tuple(logits.shape[:2])}: extend the batch by all but the last answer token and"
            " read logits_at='answer', so that every token of the answer is scored"
        )
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < logits.shape[2]:
        raise InputError(
            f"answer tokens from {int(tokens.min())} to {int(tokens.max())}; the vocabulary has"
            f" 0 to {logits.shape[2] - 1}"
        )
    return logits.gather(2, tokens.to(logits.device)[..., None])[..., 0]


def accuracy(
    logits: Float[Tensor, "batch at d_vocab"], answer: Int[Tensor, "batch answer"]
) -> Float[Tensor, " batch"]:
    """1.0 where every token of the answer is the most likely one, else 0.0."""
    _pick(logits, answer)
    return (logits.argmax(-1).cpu() == answer.cpu()).all(1).to(torch.float32)
