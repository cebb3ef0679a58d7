"""Linear probes: they find what was planted, nothing in noise, and refuse what cannot be fitted."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from interp import probes
from interp.errors import InputError
from interp.probes import LinearProbe

LABELS = (7, -3, 40)  # neither consecutive nor ascending nor from 0


def planted(n=600, width=8, labels=LABELS, seed=0, noise=0.3):
    """Clusters around one direction a label; the features have very different scales."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.arange(n) % len(labels)
    x = noise * torch.randn(n, width, generator=generator)
    x[torch.arange(n), which] += 1.0
    return x, torch.tensor(labels)[which]


def oracle(x, y, l2=1.0):
    """scikit-learn's own pipeline, with another solver, at its optimum."""
    logistic = LogisticRegression(C=1 / l2, solver="newton-cg", tol=1e-10, max_iter=1000)
    return make_pipeline(StandardScaler(), logistic).fit(x.double().numpy(), y.numpy())


@pytest.mark.parametrize("labels", [LABELS, (5, 2)])
def test_a_planted_direction_is_found_in_data_that_were_not_fitted(labels):
    probe = LinearProbe.fit(*planted(labels=labels))
    x, y = planted(labels=labels, seed=1)
    assert probe.accuracy(x, y).value > 0.95
    assert probe.classes.tolist() == sorted(labels)


def test_the_interval_on_noise_covers_chance():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1200, 16, generator=generator)
    y = torch.randint(3, (1200,), generator=generator)
    found = LinearProbe.fit(x[:600], y[:600]).accuracy(x[600:], y[600:])
    assert found.low < 1 / 3 < found.high
    assert found.n == 600


@pytest.mark.parametrize("labels", [LABELS, (5, 2)])
@pytest.mark.parametrize("l2", [0.1, 1.0, 30.0])
def test_probabilities_equal_scikit_learns_on_standardised_features(labels, l2):
    x, y = planted(labels=labels)
    x = x * torch.logspace(-3, 4, 8) + torch.arange(8)
    new = planted(labels=labels, seed=1)[0] * torch.logspace(-3, 4, 8) + torch.arange(8)
    found = LinearProbe.fit(x, y, l2=l2).logits(new).softmax(-1).numpy()
    want = oracle(x, y, l2).predict_proba(new.double().numpy())
    np.testing.assert_allclose(found, want, atol=2e-4)


def test_the_weights_apply_to_raw_activations_at_any_scale_and_offset():
    x, y = planted()
    moved = x.double() * torch.logspace(-6, 6, 8, dtype=torch.double) + 100.0
    raw, scaled = LinearProbe.fit(x.double(), y), LinearProbe.fit(moved, y)
    torch.testing.assert_close(scaled.logits(moved), raw.logits(x), atol=1e-6, rtol=1e-6)
    product = moved @ scaled.weight.T + scaled.bias
    torch.testing.assert_close(product, scaled.logits(moved))


def test_logits_and_predictions_keep_the_axes_before_the_width():
    probe = LinearProbe.fit(*planted())
    x = planted(seed=1)[0].view(20, 30, 8)
    assert probe.logits(x).shape == (20, 30, 3)
    assert torch.equal(probe.predict(x).flatten(), probe.predict(x.flatten(0, 1)))


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e20])
def test_a_constant_feature_gets_no_weight_even_where_it_varies_later(constant):
    x, y = planted()
    with_constant = torch.cat([x, torch.full((len(x), 1), constant)], 1)
    probe = LinearProbe.fit(with_constant, y)
    assert (probe.weight[:, -1] == 0).all()
    torch.testing.assert_close(probe.logits(with_constant), LinearProbe.fit(x, y).logits(x))
    with_constant[:, -1] += 5.0
    torch.testing.assert_close(probe.logits(with_constant), LinearProbe.fit(x, y).logits(x))


def test_a_feature_that_varies_by_rounding_alone_counts_as_constant():
    x, y = planted()
    nearly = torch.full((len(x), 1), 3.0)
    nearly[::2] = torch.nextafter(torch.tensor(3.0), torch.tensor(4.0))
    assert (LinearProbe.fit(torch.cat([x, nearly], 1), y).weight[:, -1] == 0).all()


def test_half_precision_and_whole_numbers_are_read_as_they_are():
    x, y = planted()
    half = x.half()
    assert torch.equal(LinearProbe.fit(half, y).weight, LinearProbe.fit(half.float(), y).weight)
    whole = (10 * x).round().long()
    probe = LinearProbe.fit(whole, y)
    assert torch.equal(probe.weight, LinearProbe.fit(whole.float(), y).weight)


def test_two_fits_are_equal_bit_for_bit_and_leave_the_data_alone():
    x, y = planted()
    before = x.clone()
    first, second = LinearProbe.fit(x, y), LinearProbe.fit(x, y)
    assert torch.equal(first.weight, second.weight) and torch.equal(first.bias, second.bias)
    assert torch.equal(x, before)


def test_a_stronger_penalty_gives_smaller_weights():
    x, y = planted()
    norms = [LinearProbe.fit(x, y, l2=l2).weight.norm() for l2 in (0.1, 1.0, 10.0)]
    assert norms[0] > norms[1] > norms[2]


def test_a_fit_that_does_not_converge_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr(probes, "_STEPS", 2)
    with pytest.raises(InputError, match="did not converge in 2 steps with l2 = 1.0: raise l2"):
        LinearProbe.fit(*planted())


def test_the_users_own_filters_of_warnings_come_back():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = list(warnings.filters)
        LinearProbe.fit(*planted())
        assert warnings.filters == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:-1], y), "599 samples and 600 labels"),
        (lambda x, y: (x, torch.full_like(y, 7)), r"all labels are \[7\]"),
        (lambda x, y: (x[:0], y[:0]), r"all labels are \[\]"),
        (lambda x, y: (x[:, :0], y), "width 0"),
        (lambda x, y: (x.index_fill(1, torch.tensor([2]), torch.nan), y), "feature 2 of sample 0"),
        (lambda x, y: (x.index_fill(0, torch.tensor([4]), torch.inf), y), "sample 4 is inf"),
    ],
)
def test_data_that_cannot_be_fitted_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        LinearProbe.fit(*change(*planted()))


@pytest.mark.parametrize("l2", [0.0, -1.0, float("nan"), float("inf")])
def test_a_penalty_that_is_not_positive_and_finite_is_refused(l2):
    with pytest.raises(InputError, match="penalty must be positive"):
        LinearProbe.fit(*planted(), l2=l2)


def test_activations_of_another_width_and_labels_of_another_length_are_refused():
    probe = LinearProbe.fit(*planted())
    x, y = planted(width=9)
    with pytest.raises(InputError, match="width 9, this probe reads 8"):
        probe.logits(x)
    with pytest.raises(InputError, match="600 samples and 599 labels"):
        probe.accuracy(x[:, :8], y[:-1])


def test_a_column_of_labels_or_values_not_finite_are_refused():
    x = torch.tensor([[0.0], [1.0], [0.2], [0.9]])
    y = torch.tensor([0, 1, 0, 1])
    probe = LinearProbe.fit(x, y)
    assert probe.accuracy(x, y).value == 1
    for use in (probe.accuracy, LinearProbe.fit):
        with pytest.raises(InputError, match=r"labels of shape \(4, 1\)"):
            use(x, y[:, None])
    with pytest.raises(InputError, match="not finite"):
        probe.predict(x * torch.nan)
