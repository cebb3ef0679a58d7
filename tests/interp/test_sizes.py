"""Any depth, width and number of heads: each shape trains a step, generates and adds up."""

import pytest
import torch

from interp.errors import InputError
from interp.interventions import Ablate, Mask, Patch, Where
from interp.model import Picture, Prompt, generate
from interp.toy import StackConfig, ToyConfig
from interp.toy.config import widened

SHAPES = {
    "one layer, one head": dict(n_layers=1, n_heads=1, d_model=8, d_head=4, d_mlp=1),
    "six layers": dict(n_layers=6, n_heads=2, d_model=8, d_head=4, d_mlp=16),
    "eight heads of four": dict(n_layers=2, n_heads=8, d_model=20, d_head=4, d_mlp=24),
    "heads wider than the stream": dict(n_layers=2, n_heads=3, d_model=7, d_head=16, d_mlp=9),
    "an odd number of frequencies": dict(n_layers=2, n_heads=2, d_model=12, d_head=6, d_mlp=12),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_of_any_shape_works(config, built, pixels, shape):
    stack = StackConfig(**SHAPES[shape])
    tower = StackConfig(n_layers=2, n_heads=3, d_model=10, d_head=8, d_mlp=5)
    for decoder, vision, grid, patch in ((stack, tower, 1, 1), (tower, stack, 3, 14)):
        model = built(
            ToyConfig(config.words, grid=grid, patch=patch, decoder=decoder, tower=vision)
        )
        picture = Picture(pixels(0, grid, patch), "board")
        batch = model.encode([Prompt(picture, "How many ?"), Prompt("a b")])
        clean = model.run(batch, cache=model.sites)
        edits = [Patch(site, value) for site, value in clean.cache.items()]
        assert torch.equal(model.run(batch, edits=edits).logits, clean.logits)
        last, at = decoder.n_layers - 1, ".attn.z"
        edits = [
            Mask(Where(patches=0)),
            Ablate(f"blocks.{last}{at}", Where(heads=decoder.n_heads - 1)),
        ]
        new = generate(model, batch, max_new_tokens=3, edits=edits)
        run = model.run(batch.extend(new[:, :-1]), edits=edits)
        assert torch.equal(run.logits.argmax(-1), new)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_step_lowers_the_loss(config, built, pixels, fused):
    model = built(
        widened(ToyConfig(config.words, grid=3, patch=2), n_layers=1, n_heads=4, d_head=4)
    )
    model.raw.set_use_fused_attention(fused)
    model.raw.requires_grad_(True)
    batch = model.encode([Prompt(pixels(s, 3, 2), "How many ?") for s in (0, 1)])
    answers = torch.tensor([7, 12])
    optimiser, losses = torch.optim.SGD(model.raw.parameters(), lr=0.02), []
    for _ in range(3):
        logits = model.run(batch, grad=True).logits[:, 0]
        loss = torch.nn.functional.cross_entropy(logits, answers)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.raw.parameters())


@pytest.mark.parametrize(
    "sizes, message",
    [
        (dict(n_layers=0), "n_layers is 0"),
        (dict(n_heads=-1), "n_heads is -1"),
        (dict(d_model=0), "d_model is 0"),
        (dict(d_mlp=0), "d_mlp is 0"),
        (dict(d_head=2), "d_head is 2; it must be even and at least 4"),
        (dict(d_head=7), "d_head is 7"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(InputError, match=message):
        StackConfig(**sizes)


def test_an_impossible_grid_is_refused(config):
    for kwargs in (dict(grid=0), dict(patch=0)):
        with pytest.raises(InputError, match="at least 1"):
            ToyConfig(config.words, **kwargs)


def test_the_same_seed_builds_the_same_model_whatever_came_before(config):
    from interp.toy import ToyVLM

    torch.manual_seed(1)
    a = ToyVLM(config, seed=4).raw.state_dict()
    torch.manual_seed(2)
    b, c = ToyVLM(config, seed=4).raw.state_dict(), ToyVLM(config, seed=5).raw.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["W_E"], c["W_E"])


def test_building_a_model_leaves_the_random_state_alone(config):
    from interp.toy import ToyVLM

    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    ToyVLM(config)
    assert torch.equal(torch.rand(3), expected)
