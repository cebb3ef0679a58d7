"""Metrics against values worked out by hand."""

import math

import pytest
import torch

from interp.errors import InputError
from interp.metrics import accuracy, kl_divergence, log_probability, logit_difference

LOGITS = torch.tensor([[[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]], [[5.0, -1.0, 0.0], [0.0, 3.0, 1.0]]])
RIGHT, WRONG = torch.tensor([[2, 1], [1, 2]]), torch.tensor([[0, 0], [0, 1]])


def test_the_logit_difference_is_summed_over_the_answer():
    assert logit_difference(LOGITS, RIGHT, WRONG).tolist() == [3.0, -6.0 - 2.0]


def test_the_log_probability_is_that_of_the_whole_answer():
    expected = [
        4 - math.log(sum(map(math.exp, (1, 2, 4)))) - math.log(3),
        -1 - math.log(sum(map(math.exp, (5, -1, 0)))) + 1 - math.log(sum(map(math.exp, (0, 3, 1)))),
    ]
    torch.testing.assert_close(log_probability(LOGITS, RIGHT), torch.tensor(expected))


def test_the_probabilities_of_all_answers_sum_to_one():
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    every = [log_probability(LOGITS[:1], pair[None]) for pair in pairs]
    torch.testing.assert_close(torch.stack(every).exp().sum(), torch.tensor(1.0))


def test_the_divergence_of_a_coin_from_a_loaded_one():
    fair, loaded = torch.zeros(1, 1, 2), torch.tensor([[[math.log(3.0), 0.0]]])
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    torch.testing.assert_close(kl_divergence(fair, loaded), torch.tensor([expected]))
    assert kl_divergence(LOGITS, LOGITS).tolist() == [0.0, 0.0]


def test_the_divergence_is_exact_where_probabilities_vanish():
    """Clamped probabilities would say less than 100 nats."""
    clean, edited = torch.tensor([[[0.0, -300.0]]]), torch.tensor([[[-300.0, 0.0]]])
    torch.testing.assert_close(kl_divergence(clean, edited), torch.tensor([300.0]))


def test_half_precision_is_widened_before_the_softmax():
    half = LOGITS.to(torch.bfloat16)
    assert log_probability(half, RIGHT).dtype == torch.float32
    assert kl_divergence(half, half + 1).abs().max() < 1e-6


def test_an_answer_is_right_if_each_of_its_tokens_is():
    assert accuracy(LOGITS, torch.tensor([[2, 0], [0, 2]])).tolist() == [1.0, 0.0]


def test_answers_of_another_shape_are_refused():
    for metric in (log_probability, accuracy):
        with pytest.raises(InputError, match=r"answers are \(2, 1\) \(batch at\).*\(2, 2\)"):
            metric(LOGITS, RIGHT[:, :1])
    with pytest.raises(InputError, match="extend the batch"):
        logit_difference(LOGITS, RIGHT, WRONG[:, :1])
    with pytest.raises(InputError, match=r"\(2, 2, 3\).*\(2, 1, 3\)"):
        kl_divergence(LOGITS, LOGITS[:, :1])


def test_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(InputError, match="0 to 2"):
        log_probability(LOGITS, RIGHT + 1)
    with pytest.raises(InputError, match="0 to 2"):
        log_probability(LOGITS, RIGHT - 2)
