"""A small random toy, prompts of every form, and the same model computed by hand."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from interp.model import Batch, Picture, Prompt, Text
from interp.toy import StackConfig, ToyConfig, ToyVLM
from interp.toy.config import SPECIAL
from interp.toy.hooks import hook_of

GRID, PATCH = 4, 3
WORDS = (*SPECIAL, *"0123456789", *"abc", "How", "many", "black", "stones", "?")


def build(config: ToyConfig, seed: int = 0) -> ToyVLM:
    """A model in which nothing is trivial: gains, biases and weights are all random."""
    model, generator = ToyVLM(config, seed=seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.raw.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(".w"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.split(".")[-1].startswith("b") or name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-2] ** 0.5)
        model.raw.W_E.mul_(3)
    return model


@pytest.fixture(scope="session")
def config() -> ToyConfig:
    return ToyConfig(
        WORDS,
        grid=GRID,
        patch=PATCH,
        decoder=StackConfig(n_layers=3, n_heads=4, d_model=24, d_head=8, d_mlp=40),
        tower=StackConfig(n_layers=2, n_heads=2, d_model=20, d_head=8, d_mlp=32),
    )


@pytest.fixture(scope="session")
def model(config: ToyConfig) -> ToyVLM:
    """Shared: its flags and weights stay as they are."""
    return build(config)


@pytest.fixture
def fresh(config: ToyConfig) -> ToyVLM:
    """One's own, equal to `model`."""
    return build(config)


@pytest.fixture(scope="session")
def built() -> Callable[..., ToyVLM]:
    return build


def picture(seed: int, grid: int = GRID, patch: int = PATCH) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (grid * patch, grid * patch, 3), dtype=np.uint8)


@pytest.fixture(scope="session")
def pixels() -> Callable[..., np.ndarray]:
    return picture


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """One picture, none, two; of different lengths."""
    return [
        Prompt(Picture(picture(0), "board"), Text("How many black stones ?", "question")),
        Prompt("How many", Text("abba", "string"), Text("stones ?", "end")),
        Prompt(
            Text("a b", "string"),
            Picture(picture(1), "left"),
            "black",
            Picture(picture(2), "right"),
            Text("How many ?", "question"),
        ),
    ]


@pytest.fixture(scope="session", params=["left", "right"])
def side(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def batch(model: ToyVLM, prompts: list[Prompt], side: str) -> Batch:
    """All three prompts, padded on either side."""
    return model.encode(prompts, padding_side=side)


@pytest.fixture(scope="session")
def left(model: ToyVLM, prompts: list[Prompt]) -> Batch:
    """The same padded on the left, for what does not depend on the side."""
    return model.encode(prompts)


@pytest.fixture(scope="session")
def hooked() -> Callable[..., Tensor]:
    """Logits of a run in which plain torch hooks change the activations of sites."""

    def run(model: ToyVLM, batch: Batch, changes: dict[str, Callable], **kwargs) -> Tensor:
        handles = [
            model.raw.get_submodule(hook_of(site)).register_forward_hook(
                lambda module, args, out, change=change: change(out.clone())
            )
            for site, change in changes.items()
        ]
        try:
            return model.run(batch, **kwargs).logits
        finally:
            for handle in handles:
                handle.remove()

    return run


class Reference:
    """The toy computed by hand in double precision, one row at a time.

    No padding, no hooks, no masks: a key that cannot be seen is left out of the sum.
    """

    def __init__(self, model: ToyVLM) -> None:
        self.weights = {k: v.double() for k, v in model.raw.state_dict().items()}
        self.config = model.config

    def logits(
        self,
        batch: Batch,
        row: int,
        *,
        hidden: Iterable[int] = (),
        hidden_patches: Iterable[int] = (),
        layers: Iterable[int] | None = None,
    ) -> Tensor:
        """Of every real token of a row (pos d_vocab). `hidden` are absolute positions, and
        `hidden_patches` places in each of its pictures, that nothing may attend to.
        """
        real = batch.mask[row]
        ids, positions = batch.tokens[row, real], batch.positions[:, row, real]
        hidden, hidden_patches = set(hidden), set(hidden_patches)
        x = self.weights["W_E"][ids].clone()
        own = batch.patches.row == row
        for image in batch.patches.image[own].unique().tolist():
            mine = batch.patches.image == image
            kinds = batch.inputs["kinds"].double()[batch.inputs["patches"][image]]
            x[batch.patches.token[mine]] = self.picture(kinds, hidden_patches, layers)
        for layer in range(self.config.decoder.n_layers):
            hide = hidden if layers is None or layer in layers else set()
            keys = [[k for k in range(q + 1) if k not in hide] for q in range(len(x))]
            x = self.block(f"blocks.{layer}.", x, positions, keys, self.config.decoder)
        return self.norm("ln_final.", x) @ self.weights["unembed.W_U"] + self.weights["unembed.b_U"]

    def picture(self, kinds: Tensor, hidden: set[int], layers: Iterable[int] | None) -> Tensor:
        w, n = self.weights, self.config.grid**2
        cell = torch.arange(n)
        positions = torch.stack([0 * cell, cell // self.config.grid, cell % self.config.grid])
        x = kinds @ w["vision.W_patch"] + w["vision.b_patch"]
        for layer in range(self.config.tower.n_layers):
            hide = hidden if layers is None or layer in layers else set()
            keys = [[k for k in range(n) if k not in hide]] * n
            x = self.block(f"vision.blocks.{layer}.", x, positions, keys, self.config.tower)
        x = self.norm("vision.ln_final.", x)
        return x @ w["projector.weight"].T + w["projector.bias"]

    def block(
        self, at: str, x: Tensor, positions: Tensor, keys: list[list[int]], stack: StackConfig
    ) -> Tensor:
        w, normed = self.weights, self.norm(f"{at}ln1.", x)
        out = w[f"{at}attn.b_O"].expand(len(x), -1).clone()
        for head in range(stack.n_heads):
            q, k, v = (
                normed @ w[f"{at}attn.W_{c}"][head] + w[f"{at}attn.b_{c}"][head] for c in "QKV"
            )
            q, k = (self.turn(y, positions, stack) for y in (q, k))
            for query, seen in enumerate(keys):
                if seen:
                    weights = (k[seen] @ q[query] / stack.d_head**0.5).exp()
                    out[query] += weights / weights.sum() @ v[seen] @ w[f"{at}attn.W_O"][head]
        x = x + out
        hidden = self.norm(f"{at}ln2.", x) @ w[f"{at}mlp.W_in"] + w[f"{at}mlp.b_in"]
        gelu = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        return x + gelu @ w[f"{at}mlp.W_out"] + w[f"{at}mlp.b_out"]

    def turn(self, x: Tensor, positions: Tensor, stack: StackConfig) -> Tensor:
        """Channels i and i + half as one complex number, turned by position times frequency."""
        half = stack.d_head // 2
        axes = [a for a, n in enumerate(stack.rotary_sections) for _ in range(n)]
        angle = torch.stack(
            [positions[a] * self.config.rotary_base ** (-i / half) for i, a in enumerate(axes)], 1
        )
        z = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angle.double())
        return torch.cat([z.real, z.imag], 1)

    def norm(self, at: str, x: Tensor) -> Tensor:
        variance = x.var(-1, unbiased=False, keepdim=True)
        x = (x - x.mean(-1, keepdim=True)) / (variance + self.config.eps).sqrt()
        return x * self.weights[f"{at}w"] + self.weights[f"{at}b"]


@pytest.fixture(scope="session")
def reference(model: ToyVLM) -> Reference:
    return Reference(model)
