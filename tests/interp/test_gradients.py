"""What is kept with `grad` is part of the graph; what is kept at some tokens is cut there."""

import pytest
import torch

from interp.errors import InputError
from interp.interventions import Ablate, Patch, Steer, Where
from interp.model import Prompt, generate


@pytest.fixture
def double(fresh):
    """In double precision, with every gate on that can be on at once."""
    fresh.raw.double()
    return fresh


def score(logits):
    """A number that every logit takes part in, each differently."""
    return (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum()


def directional(model, batch, site, value, direction, step=1e-6):
    """Central difference along a direction at one site."""
    ends = [
        score(model.run(batch, edits=[Patch(site, value + sign * step * direction)]).logits)
        for sign in (1, -1)
    ]
    return (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("gates", ["", "attn_result hook_mlp_in split_qkv_input", "attn_in"])
def test_gradients_at_every_site_equal_finite_differences(double, prompts, gates):
    closed = set(double.sites) if gates else set()
    for gate in gates.split():
        getattr(double.raw, f"set_use_{gate}")(True)
    batch = double.encode([prompts[0], prompts[1]])
    sites = [s for s in double.sites if ("blocks" not in s or "blocks.1." in s)]
    sites = [site for site in sites if site not in closed]
    run = double.run(batch, cache=sites, grad=True)
    gradients = torch.autograd.grad(score(run.logits), [run.cache[site] for site in sites])
    for site, gradient in zip(sites, gradients, strict=True):
        value = run.cache[site].detach()
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).double()
        # masked scores stand at the floor, and what pads hold is never changed by an edit
        touched = Where().mask(site, value, frame(batch))
        direction = torch.where(touched, noise, 0.0)
        expected = directional(double, batch, site, value, direction)
        found = (gradient * direction).sum()
        torch.testing.assert_close(
            found, expected, atol=1e-7, rtol=1e-5, msg=f"{site}: {found} {expected}"
        )


def frame(batch):
    from interp.interventions import Frame

    return Frame.whole(batch.layout)


def test_all_sites_can_be_kept_in_one_graph(model, left):
    run = model.run(left, cache=model.sites, grad=True)
    gradients = torch.autograd.grad(score(run.logits), list(run.cache.values()))
    assert all(torch.isfinite(g).all() and g.abs().max() > 0 for g in gradients)
    alone = model.run(left, cache=["blocks.1.attn.z"], grad=True)
    (expected,) = torch.autograd.grad(score(alone.logits), alone.cache["blocks.1.attn.z"])
    together = gradients[model.sites.index("blocks.1.attn.z")]
    torch.testing.assert_close(together, expected, atol=1e-6, rtol=1e-6)


def test_gradients_do_not_change_the_logits(model, left):
    assert torch.equal(model.run(left, cache=model.sites, grad=True).logits, model.run(left).logits)


def test_gradients_flow_through_edits(model, left):
    direction = torch.randn(24, requires_grad=True)
    run = model.run(left, edits=[Steer("blocks.0.resid_post", direction)], grad=True)
    (gradient,) = torch.autograd.grad(score(run.logits), direction)
    assert gradient.abs().max() > 1e-3
    edits = [Ablate("blocks.1.attn.z", Where(heads=1))]
    run = model.run(left, edits=edits, cache=["blocks.0.resid_post"], grad=True)
    torch.autograd.grad(score(run.logits), run.cache["blocks.0.resid_post"])


def test_without_grad_nothing_has_a_graph(model, left):
    run = model.run(left, cache=["blocks.0.attn.z"])
    assert not run.logits.requires_grad and not run.cache["blocks.0.attn.z"].requires_grad


def test_a_graph_cannot_be_cut(model, left):
    with pytest.raises(InputError, match="cache_at"):
        model.run(left, cache=["blocks.0.attn.z"], cache_at="last", grad=True)


def test_gradients_reach_the_weights_when_they_want_them(fresh, left):
    fresh.raw.requires_grad_(True)
    score(fresh.run(left, grad=True).logits).backward()
    missing = [n for n, p in fresh.raw.named_parameters() if p.grad is None]
    assert not missing


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_run_and_generate(fresh, model, left, dtype):
    fresh.raw.to(dtype)
    run = fresh.run(left, cache=fresh.sites)
    assert {value.dtype for value in run.cache.values()} == {dtype}
    tolerance = 1e-5 if dtype == torch.float64 else 0.3
    torch.testing.assert_close(run.logits.float(), model.run(left).logits, atol=tolerance, rtol=0.1)
    new = generate(fresh, left, max_new_tokens=2, edits=[Ablate("blocks.0.attn.z", Where(heads=0))])
    assert new.shape == (3, 2)


# --- what is kept at some tokens ------------------------------------------------------------------


@pytest.mark.parametrize(
    "at, positions", [("last", [[23], [8], [42]]), ([1, -1], [[1, 23], [1, 8], [1, 42]])]
)
def test_what_is_kept_at_some_tokens_is_cut_along_positions_or_queries(model, batch, at, positions):
    whole = model.run(batch, cache=model.sites).cache
    cut = model.run(batch, cache=model.sites, cache_at=at).cache
    for site, value in cut.items():
        if site.startswith(("vision.", "projector")):
            assert torch.equal(value, whole[site])
            continue
        pattern = site.endswith(("pattern", "attn_scores"))
        for row, chosen in enumerate(positions):
            columns = batch.mask[row].nonzero()[:, 0][chosen]
            full = whole[site][row].transpose(0, 1) if pattern else whole[site][row]
            own = value[row].transpose(0, 1) if pattern else value[row]
            assert torch.equal(own, full[columns]), site


def test_what_is_kept_at_a_span_is_that_span(model, batch, prompts):
    site = "blocks.0.resid_post"
    only = model.encode(prompts[:1])
    kept = model.run(only, cache=[site], cache_at="board").cache[site]
    assert kept.shape == (1, 16, 24)
    assert torch.equal(kept[0], model.run(only, cache=[site]).cache[site][0, 2:18])


def test_logits_are_given_where_they_are_asked_for(model, prompts):
    batch = model.encode([Prompt("How many a b ?")]).extend(torch.tensor([[7, 8]]))
    whole = model.run(batch, logits_at=[*range(8)]).logits
    assert whole.shape == (1, 8, 24)
    for at, columns in (("answer", [5, 6, 7]), ("last", [5]), ("new", [6, 7]), (0, [0])):
        torch.testing.assert_close(model.run(batch, logits_at=at).logits, whole[:, columns])
