"""What does a linear read-out find in an activation? (Alain and Bengio, arXiv:1610.01644)

A probe that succeeds shows that something can be read, not that the model reads it: set beside it
the same probe on an untrained model and on the raw input (Hewitt and Liang, arXiv:1909.03368).
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from interp.errors import InputError
from interp.stats import Interval, proportion

_STEPS = 5000  # of L-BFGS; separable classes at l2 = 1 take some dozens
_TOLERANCE = 1e-6  # of the gradient; scikit-learn's 1e-4 leaves weights right to two digits


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """A fitted linear classifier; its weights apply to raw activations, in double precision."""

    weight: Float[Tensor, "class d_model"]
    bias: Float[Tensor, " class"]
    classes: Int[Tensor, " class"]
    """The label of each row, ascending: labels that were fitted, not 0, 1, 2, ..."""

    @classmethod
    def fit(
        cls, x: Shaped[Tensor, "sample d_model"], y: Int[Tensor, "*label"], *, l2: float = 1.0
    ) -> "LinearProbe":
        """Fit logistic regression with an L2 penalty on standardised features.

        `l2` is half the weight of the squared norm against the summed loss (scikit-learn's 1 / C);
        intercepts are free. Features that are constant in `x` get weight 0.

        Raises:
            InputError: values that are not finite, lengths that differ, fewer than two classes, a
                penalty that is not positive, or a fit that does not converge.
        """
        features, labels = _double(x), y.cpu()
        _check(features, labels, l2)
        mean, scale = features.mean(0), _scale(x.cpu(), features)
        fitted = _fitted(((features - mean) / scale).numpy(), labels.numpy(), l2)
        weight, bias = torch.from_numpy(fitted.coef_), torch.from_numpy(fitted.intercept_)
        if len(weight) == 1:  # scikit-learn keeps one row, the second class's, for two classes
            weight = torch.cat([torch.zeros_like(weight), weight])
            bias = torch.cat([torch.zeros_like(bias), bias])
        weight = weight / scale
        return cls(weight, bias - weight @ mean, torch.from_numpy(fitted.classes_))

    def logits(self, x: Shaped[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch class"]:
        """Logits of each class; their softmax is the fitted probability.

        Raises:
            InputError: activations of another width than those fitted on, or not finite.
        """
        if x.shape[-1] != self.weight.shape[1]:
            raise InputError(
                f"activations of width {x.shape[-1]}, this probe reads {self.weight.shape[1]}:"
                " give it the site that it was fitted on"
            )
        if not x.isfinite().all():
            raise InputError("activations that are not finite: no class can be read from them")
        return _double(x) @ self.weight.T + self.bias

    def predict(self, x: Shaped[Tensor, "*batch d_model"]) -> Int[Tensor, "*batch"]:
        """The most likely class's label."""
        return self.classes[self.logits(x).argmax(-1)]

    def accuracy(self, x: Shaped[Tensor, "sample d_model"], y: Int[Tensor, "*label"]) -> Interval:
        """Share of labels found, with Wilson's interval for samples that are independent.

        Raises:
            InputError: no samples, or not one label for each.
        """
        _check_labels(x, y)
        return proportion((self.predict(x) == y.cpu()).numpy())


def _double(x: Shaped[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    return x.detach().cpu().double()


def _check_labels(x: Shaped[Tensor, "sample ..."], y: Shaped[Tensor, "label ..."]) -> None:
    if y.ndim != 1:
        raise InputError(
            f"labels of shape {tuple(y.shape)}: give one label for each sample, in one row"
        )
    if len(x) != len(y):
        raise InputError(f"{len(x)} samples and {len(y)} labels: give one label for each")


def _check(x: Float[Tensor, "sample d_model"], y: Int[Tensor, "*label"], l2: float) -> None:
    _check_labels(x, y)
    if not x.shape[1]:
        raise InputError("activations of width 0: there is nothing to read")
    if not x.isfinite().all():
        sample, feature = (~x.isfinite()).nonzero()[0].tolist()
        raise InputError(
            f"feature {feature} of sample {sample} is {float(x[sample, feature])}: a probe needs"
            " finite activations"
        )
    if len(found := y.unique()) < 2:
        raise InputError(f"all labels are {found.tolist()}: a probe needs at least two classes")
    if not 0 < l2 < float("inf"):
        raise InputError(f"l2 is {l2}: the penalty must be positive and finite; 1.0 is usual")


def _scale(
    x: Shaped[Tensor, "sample d_model"], features: Float[Tensor, "sample d_model"]
) -> Float[Tensor, " d_model"]:
    """Standard deviations; infinite, so that the weight is 0, where rounding alone varies."""
    step = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
    spread, size = features.amax(0) - features.amin(0), features.abs().amax(0)
    deviation = features.std(0, correction=0)
    return torch.where(spread <= 2 * step * size, torch.inf, deviation)


def _fitted(
    x: Float[np.ndarray, "sample d_model"], y: Int[np.ndarray, " sample"], l2: float
) -> LogisticRegression:
    model = LogisticRegression(C=1 / l2, tol=_TOLERANCE, max_iter=_STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            return model.fit(x, y)
        except ConvergenceWarning:
            raise InputError(
                f"the probe's fit did not converge in {_STEPS} steps with l2 = {l2}: raise l2,"
                " which keeps the weights of separable classes small"
            ) from None
