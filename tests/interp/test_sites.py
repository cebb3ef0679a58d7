"""Sites: what is advertised is there, has the axes it says, and matters."""

import pytest
import torch

from interp import sites
from interp.errors import InputError
from interp.interventions import Patch, Where
from interp.toy.hooks import hook_of, site_of

GATES = {
    "none": (),
    "results and mlp inputs": ("attn_result", "hook_mlp_in"),
    "split inputs": ("split_qkv_input",),
    "attention inputs": ("attn_in",),
}


@pytest.fixture(params=GATES, ids=lambda name: name.replace(" ", "-"))
def gated(request, fresh):
    """The model with some of its gates on."""
    for gate in GATES[request.param]:
        getattr(fresh.raw, f"set_use_{gate}")(True)
    return fresh


def sizes(model, batch) -> dict[str, dict[str, int]]:
    """The size of every axis, in the decoder and in the tower."""
    decoder, tower = model.config.decoder, model.config.tower
    n_pos, n_patch = batch.tokens.shape[1], model.config.grid**2
    shared = {"one": 1, "patch": len(batch.patches), "image": batch.patches.n_images}
    return {
        "decoder": shared
        | dict(batch=len(batch), pos=n_pos, query=n_pos, key=n_pos, d_model=decoder.d_model)
        | dict(head=decoder.n_heads, d_head=decoder.d_head, d_mlp=decoder.d_mlp),
        "vision": shared
        | dict(query=n_patch, key=n_patch, d_vision=tower.d_model)
        | dict(head=tower.n_heads, d_head=tower.d_head, d_mlp=tower.d_mlp),
    }


def test_every_site_has_the_axes_that_it_declares(gated, batch):
    batch_sizes = sizes(gated, batch)
    for site, value in gated.run(batch, cache=gated.sites).cache.items():
        size = batch_sizes["vision" if site.startswith("vision.") else "decoder"]
        assert tuple(value.shape) == tuple(size[axis] for axis in sites.axes(site)), site


def test_sites_stand_in_the_order_in_which_they_are_reached(gated, left):
    order = []
    handles = [
        point.register_forward_hook(lambda module, *_: order.append(site_of(module.name)))
        for point in gated.raw.hook_points()
    ]
    gated.run(left)
    for handle in handles:
        handle.remove()
    assert [site for site in order if site in gated.sites] == list(gated.sites)


def test_every_hook_that_fires_once_is_a_site_and_no_other(gated, left):
    fired = dict.fromkeys(gated.raw.hook_dict, 0)
    handles = [
        point.register_forward_hook(
            lambda module, *_: fired.update({module.name: fired[module.name] + 1})
        )
        for point in gated.raw.hook_points()
    ]
    gated.run(left)
    for handle in handles:
        handle.remove()
    per_head = gated.raw.cfg.use_attn_in
    live = {n for n, times in fired.items() if times == 1 and not (per_head and ".ln1." in n)}
    assert {hook_of(site) for site in gated.sites} == live


def test_every_site_changes_the_logits_when_it_is_edited(gated, model, left):
    closed = gated.sites == model.sites
    own = [site for site in gated.sites if closed or site not in model.sites]
    clean = gated.run(left, cache=own)
    generator = torch.Generator().manual_seed(0)
    assert len(own) >= 5
    for site, value in clean.cache.items():
        noise = torch.randn(value.shape, generator=generator)
        noisy = value * (1 + 0.5 * noise.abs()) if site.endswith("scale") else value + noise
        edited = gated.run(left, edits=[Patch(site, noisy)]).logits
        assert (edited - clean.logits).abs().max() > 1e-4, site


def test_patching_every_site_with_itself_changes_no_bit(gated, batch):
    clean = gated.run(batch, cache=gated.sites)
    edits = [Patch(site, value) for site, value in clean.cache.items()]
    edited = gated.run(batch, edits=edits, cache=gated.sites)
    assert torch.equal(edited.logits, clean.logits)
    for site, value in clean.cache.items():
        assert torch.equal(edited.cache[site], value), site


def test_gates_do_not_change_the_logits(gated, model, batch):
    torch.testing.assert_close(
        gated.run(batch).logits, model.run(batch).logits, atol=1e-5, rtol=1e-5
    )


def test_caching_changes_no_bit(model, batch):
    assert torch.equal(model.run(batch, cache=model.sites).logits, model.run(batch).logits)


def test_a_site_that_is_not_there_names_its_neighbours(model, left):
    with pytest.raises(sites.UnknownSiteError, match=r"blocks\.1\.attn\.z") as caught:
        model.run(left, cache=["blocks.1.attn.zz"])
    assert "\n" not in str(caught.value)
    for site in ("blocks.3.attn.z", "vision.blocks.2.attn.z", "resid_post", "blocks.0.embed", ""):
        with pytest.raises(sites.UnknownSiteError):
            model.run(left, cache=[site])
        with pytest.raises(sites.UnknownSiteError):
            model.run(left, edits=[Patch(site, torch.zeros(1), Where(tokens="last"))])


def test_a_glob_selects_sites_in_forward_order(model):
    assert sites.select(model.sites, "blocks.*.attn.z") == [f"blocks.{i}.attn.z" for i in range(3)]
    with pytest.raises(InputError, match="no site"):
        sites.select(model.sites, "blocks.*.attn.y")


def test_names_and_hooks_translate_both_ways(model):
    for site in model.sites:
        assert site_of(hook_of(site)) == site
        assert hook_of(site) in model.raw.hook_dict


def test_a_site_knows_its_layer():
    assert sites.layer("vision.blocks.11.attn.z") == 11
    assert sites.layer("vision.ln_final.scale") is None
    assert sites.layer("projector") is None
