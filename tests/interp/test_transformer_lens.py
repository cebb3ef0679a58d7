"""TransformerLens's own tools run on the toy, and say what the toy's own edits say."""

from itertools import islice, product

import pytest
import torch
from transformer_lens import ActivationCache, head_detector, patching
from transformer_lens.tools.analysis import direct_logit_attribution, logit_lens
from transformer_lens.utilities import get_act_name

from interp import sites
from interp.errors import InputError
from interp.interventions import Patch, Where
from interp.model import Picture, Prompt
from interp.toy import Bound, BoundVision, StackConfig, ToyConfig
from interp.toy.hooks import site_of

N_LAYERS, N_HEADS, GRID = 2, 3, 2


@pytest.fixture(scope="module")
def small(built, config):
    """Few enough units that every cell of every sweep can be checked."""
    stack = StackConfig(n_layers=N_LAYERS, n_heads=N_HEADS, d_model=20, d_head=8, d_mlp=12)
    tower = StackConfig(n_layers=2, n_heads=2, d_model=12, d_head=4, d_mlp=8)
    return built(ToyConfig(config.words, grid=GRID, patch=2, decoder=stack, tower=tower))


@pytest.fixture(scope="module")
def pair(small, pixels):
    """Clean and corrupted prompts of one length: other pictures, other words."""
    return [
        small.encode([
            Prompt(Picture(pixels(seed, GRID, 2), "board"), text),
            Prompt(text, Picture(pixels(seed + 1, GRID, 2), "board")),
        ])
        for seed, text in ((0, "How many ?"), (7, "a b stones"))
    ]  # fmt: skip


def bound(model, batch):
    return Bound(model.raw, position_ids=batch.positions, **batch.inputs)


def cached(model, batch, **kwargs) -> tuple[torch.Tensor, ActivationCache]:
    return bound(model, batch).run_with_cache(batch.tokens, **kwargs)


EVERYTHING = {"names_filter": lambda name: True}


def score(logits):
    return (logits[:, -1, 5] - logits[:, -1, 9]).sum()


def edited(model, batch, *edits):
    """The same score of a run with edits."""
    logits = model.run(batch, edits=edits).logits
    return logits[:, 0, 5].sum() - logits[:, 0, 9].sum()


# --- caches ---------------------------------------------------------------------------------------


def test_a_cached_run_is_an_activation_cache_and_changes_no_bit(small, pair):
    plain = bound(small, pair[0])(pair[0].tokens)
    logits, cache = cached(small, pair[0])
    assert isinstance(cache, ActivationCache) and torch.equal(logits, plain)
    assert cache["z", 1].shape == (2, pair[0].tokens.shape[1], N_HEADS, 8)
    assert set(cache) == {
        n for n in small.raw.live(lambda n: True) if not n.endswith(("scores", "pattern"))
    }


def test_scores_and_patterns_are_kept_on_request(small, pair):
    _, cache = cached(small, pair[0], **EVERYTHING)
    expected = small.run(pair[0], cache=["blocks.1.attn.pattern"]).cache["blocks.1.attn.pattern"]
    assert torch.equal(cache["pattern", 1], expected)
    _, cache = cached(small, pair[0], names_filter="blocks.0.attn.hook_attn_scores")
    assert list(cache) == ["blocks.0.attn.hook_attn_scores"]


def test_every_cached_hook_equals_the_site_of_that_name(small, pair):
    _, cache = cached(small, pair[0], **EVERYTHING)
    kept = small.run(pair[0], cache=small.sites).cache
    assert {site_of(hook) for hook in cache} == set(small.sites)
    for hook, value in cache.items():
        torch.testing.assert_close(value.reshape(kept[site_of(hook)].shape), kept[site_of(hook)])


@pytest.mark.parametrize("cut", [2, -1, (1, 4), [0, 3], None])
def test_a_slice_of_positions_cuts_the_axis_of_positions(small, pair, cut):
    small.raw.set_use_attn_result(True)
    try:
        _, whole = cached(small, pair[0], **EVERYTHING)
        _, cache = cached(small, pair[0], pos_slice=cut, **EVERYTHING)
    finally:
        small.raw.set_use_attn_result(False)
    index = torch.arange(pair[0].tokens.shape[1])
    index = index[slice(*cut)] if isinstance(cut, tuple) else index if cut is None else index[cut]
    for hook, value in cache.items():
        axes = sites.axes(site_of(hook))
        along = [i for i, axis in enumerate(axes) if axis in ("pos", "query")]
        if along and not hook.startswith("vision."):
            expected = whole[hook].index_select(along[0], index.reshape(-1))
        else:
            expected = whole[hook]
        assert torch.equal(value, expected), hook


def test_the_batch_axis_is_removed_of_one_row_only(small, pair, pixels):
    one = small.encode([Prompt(pixels(0, GRID, 2), "How many")])
    _, cache = cached(small, one, remove_batch_dim=True, **EVERYTHING)
    _, whole = cached(small, one, **EVERYTHING)
    assert not cache.has_batch_dim
    assert all(torch.equal(cache[hook], whole[hook][0]) for hook in whole)
    with pytest.raises((InputError, AssertionError)):
        cached(small, pair[0], remove_batch_dim=True)
    two = small.encode([Prompt(pixels(0, GRID, 2), pixels(1, GRID, 2))])
    with pytest.raises(InputError, match="one picture"):
        cached(small, two, remove_batch_dim=True)


def test_backward_caches_are_refused(small, pair):
    with pytest.raises(InputError, match=r"run\(\.\.\., grad=True\)"):
        cached(small, pair[0], incl_bwd=True)


def test_caching_hooks_stay_until_they_are_reset(small, pair):
    kept = small.raw.add_caching_hooks("blocks.0.attn.hook_z")
    try:
        small.run(pair[0])
        assert list(kept) == ["blocks.0.attn.hook_z"]
    finally:
        small.raw.reset_hooks()


def test_a_cache_may_be_a_plain_dict(small, pair):
    _, cache = cached(small, pair[0], return_cache_object=False)
    assert type(cache) is dict


# --- decompositions -------------------------------------------------------------------------------


def both_stacks(small, pair):
    _, cache = cached(small, pair[0], **EVERYTHING)
    return [(small.raw, cache), (small.raw.vision, small.raw.vision_cache(cache))]


def test_the_stream_decomposes_exactly(small, pair):
    for raw, cache in both_stacks(small, pair):
        last = cache["resid_post", raw.cfg.n_layers - 1]
        for parts in (
            cache.decompose_resid(),
            cache.get_full_resid_decomposition(expand_neurons=False),
            cache.get_full_resid_decomposition(expand_neurons=True),
            cache.stack_head_results(incl_remainder=True),
        ):
            torch.testing.assert_close(parts.sum(0), last, atol=1e-5, rtol=1e-5)
        middle = cache.decompose_resid(1, mlp_input=True).sum(0)
        torch.testing.assert_close(middle, cache["resid_mid", 1], atol=1e-5, rtol=1e-5)


def test_heads_and_neurons_are_stacked_in_order(small, pair):
    for raw, cache in both_stacks(small, pair):
        heads, labels = cache.stack_head_results(return_labels=True)
        assert labels == [
            f"L{i}H{h}" for i in range(raw.cfg.n_layers) for h in range(raw.cfg.n_heads)
        ]
        expected = cache["z", 1][:, :, 1] @ raw.blocks[1].attn.W_O[1]
        torch.testing.assert_close(heads[labels.index("L1H1")], expected, atol=1e-6, rtol=1e-5)
        neurons = cache.stack_neuron_results(layer=raw.cfg.n_layers)
        mlp = sum(cache["mlp_out", i] - raw.blocks[i].mlp.b_out for i in range(raw.cfg.n_layers))
        torch.testing.assert_close(neurons.sum(0), mlp, atol=1e-5, rtol=1e-5)


def test_the_accumulated_stream_is_normalised_by_the_final_norm(small, pair):
    for raw, cache in both_stacks(small, pair):
        stack, labels = cache.accumulated_resid(apply_ln=True, incl_mid=True, return_labels=True)
        assert labels[-1] == "final_post" and len(stack) == 2 * raw.cfg.n_layers + 1
        torch.testing.assert_close(stack[-1], cache["ln_final.hook_normalized"])
        x = cache["resid_mid", 0]
        by_hand = torch.nn.functional.layer_norm(
            x, x.shape[-1:], raw.ln_final.w, raw.ln_final.b, raw.cfg.eps
        )
        torch.testing.assert_close(stack[labels.index("0_mid")], by_hand, atol=1e-5, rtol=1e-5)


def test_a_stack_is_scaled_by_the_norm_of_a_layer(small, pair):
    for raw, cache in both_stacks(small, pair):
        parts = cache.decompose_resid(1, apply_ln=True)
        normalised = parts.sum(0) * raw.blocks[1].ln1.w + raw.blocks[1].ln1.b
        expected = cache["blocks.1.ln1.hook_normalized"]
        torch.testing.assert_close(normalised, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("unit", ["component", "head"])
def test_attributions_and_the_constant_add_up_to_the_logit_difference(small, pair, unit):
    logits, cache = cached(small, pair[0])
    right, wrong = torch.tensor([5, 8]), torch.tensor([9, 11])
    row = torch.arange(2)
    difference = logits[row, -1, right] - logits[row, -1, wrong]
    constant = small.raw.logit_constant(right) - small.raw.logit_constant(wrong)
    assert constant.abs().max() > 0.05
    found = direct_logit_attribution(bound(small, pair[0]), pair[0].tokens, right, wrong, unit=unit)
    torch.testing.assert_close(
        found.attribution.sum(0) + constant, difference, atol=1e-4, rtol=1e-4
    )
    parts = cache.get_full_resid_decomposition(expand_neurons=True, pos_slice=-1)
    attributions = cache.logit_attrs(parts, right, wrong, pos_slice=-1)
    torch.testing.assert_close(attributions.sum(0) + constant, difference, atol=1e-4, rtol=1e-4)


def test_attribution_takes_words_and_numbers(small, pair):
    logits, cache = cached(small, pair[0])
    for token in (
        "stones",
        small.tokenizer.id("stones"),
        torch.tensor(small.tokenizer.id("stones")),
    ):
        found = cache.logit_attrs(cache.decompose_resid(pos_slice=-1), token, pos_slice=-1).sum(0)
        expected = logits[:, -1, small.tokenizer.id("stones")] - small.raw.logit_constant(token)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_last_layer_of_the_lens_is_the_model(small, pair):
    logits, cache = cached(small, pair[0])
    for result in (
        cache.logit_lens(),
        logit_lens(bound(small, pair[0]), pair[0].tokens),
        logit_lens(small.raw, cache=cache),
    ):
        torch.testing.assert_close(result.values[-1], logits[:, -1], atol=1e-5, rtol=1e-5)


def test_earlier_layers_of_the_lens_use_a_scale_of_their_own(small, pair):
    _, cache = cached(small, pair[0])
    values = cache.logit_lens(positions=None).values
    for layer, name in enumerate(["blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre"]):
        torch.testing.assert_close(values[layer], small.unembed(cache[name]), atol=1e-5, rtol=1e-5)


# --- patching -------------------------------------------------------------------------------------

SWEEPS = {
    "resid_pre": (("layer", "pos"), patching.get_act_patch_resid_pre),
    "resid_mid": (("layer", "pos"), patching.get_act_patch_resid_mid),
    "attn_out": (("layer", "pos"), patching.get_act_patch_attn_out),
    "mlp_out": (("layer", "pos"), patching.get_act_patch_mlp_out),
    "z": (("layer", "head"), patching.get_act_patch_attn_head_out_all_pos),
    "q": (("layer", "head"), patching.get_act_patch_attn_head_q_all_pos),
    "k": (("layer", "head"), patching.get_act_patch_attn_head_k_all_pos),
    "v": (("layer", "head"), patching.get_act_patch_attn_head_v_all_pos),
    "pattern": (("layer", "head"), patching.get_act_patch_attn_head_pattern_all_pos),
    "z by pos": (("layer", "pos", "head"), patching.get_act_patch_attn_head_out_by_pos),
    "pattern by pos": (("layer", "head", "query"), patching.get_act_patch_attn_head_pattern_by_pos),
}


def cells(axes, model, n_pos):
    """Every fifth cell of a sweep."""
    sizes = {"layer": model.cfg.n_layers, "head": model.cfg.n_heads, "pos": n_pos, "query": n_pos}
    return islice(product(*(range(sizes[axis]) for axis in axes)), 0, None, 5)


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_equals_runs_with_patches(small, pair, name):
    clean, corrupted = pair
    axes, sweep = SWEEPS[name]
    _, cache = cached(small, clean, **EVERYTHING)
    model, site = bound(small, corrupted), name.split()[0]
    found = sweep(model, corrupted.tokens, cache, score)
    kept = small.run(clean, cache=small.sites).cache
    choice = {"pos": "tokens", "head": "heads", "query": "queries"}
    for cell in cells(axes, model, corrupted.tokens.shape[1]):
        where = {choice[a]: i for a, i in zip(axes, cell, strict=True) if a != "layer"}
        full = site_of(get_act_name(site, cell[0]))
        expected = edited(small, corrupted, Patch(full, kept[full], Where(**where)))
        torch.testing.assert_close(found[cell], expected, atol=1e-5, rtol=1e-5)
    assert found.std() > 1e-4


def test_the_sweep_over_all_kinds_of_head_runs(small, pair):
    clean, corrupted = pair
    _, cache = cached(small, clean, **EVERYTHING)
    model = bound(small, corrupted)
    every = patching.get_act_patch_attn_head_all_pos_every(model, corrupted.tokens, cache, score)
    single = patching.get_act_patch_attn_head_out_all_pos(model, corrupted.tokens, cache, score)
    assert every.shape == (5, N_LAYERS, N_HEADS) and torch.equal(every[0], single)


def test_statistics_of_a_sweep_have_the_unpatched_run_beside_them(small, pair):
    clean, corrupted = pair
    _, cache = cached(small, clean)
    result = patching.get_act_patch_attn_head_out_all_pos(
        bound(small, corrupted),
        corrupted.tokens,
        cache,
        lambda logits: logits[:, -1, 5],
        reduce="none",
        baseline=True,
    )
    assert result.values.shape == (N_LAYERS, N_HEADS, 2)
    torch.testing.assert_close(result.baseline, small.run(corrupted).logits[:, 0, 5])


def test_direct_paths_are_patched(small, pair):
    clean, corrupted = pair
    caches = [cached(small, batch)[1] for batch in pair]
    found = patching.get_act_patch_direct_path(
        bound(small, corrupted), corrupted.tokens, *caches, score, 0, 1, "v", verbose=False
    )
    z = [small.run(b, cache=["blocks.0.attn.z"]).cache["blocks.0.attn.z"][:, :, 1] for b in pair]
    write = (z[0] - z[1]) @ small.head_out(0)[1]
    small.raw.set_use_split_qkv_input(True)
    try:
        site = "blocks.1.attn.v_input"
        value = small.run(corrupted, cache=[site]).cache[site]
        value[:, :, 2] += write
        expected = edited(small, corrupted, Patch(site, value))
    finally:
        small.raw.set_use_split_qkv_input(False)
    torch.testing.assert_close(found[1, 2], expected, atol=1e-5, rtol=1e-5)
    assert (found[0] == 0).all()


def test_patching_needs_no_gradients_and_leaves_its_cache_alone(small, pair):
    clean, corrupted = pair
    _, cache = cached(small, clean)
    before = {hook: value.clone() for hook, value in cache.items()}
    patching.get_act_patch_resid_pre(bound(small, corrupted), corrupted.tokens, cache, score)
    assert all(torch.equal(cache[hook], value) for hook, value in before.items())


def tower(model, batch):
    return BoundVision(model.raw, batch.tokens, position_ids=batch.positions, **batch.inputs)


@pytest.mark.parametrize("name", ["resid_pre", "attn_out", "z", "q", "v", "pattern"])
def test_the_tower_is_swept_too(small, pair, name):
    clean, corrupted = (tower(small, batch) for batch in pair)
    _, cache = clean.run_with_cache(clean.places, **EVERYTHING)
    axes, sweep = SWEEPS[name]
    found = sweep(corrupted, corrupted.places, cache, score)
    kept = small.run(pair[0], cache=small.sites).cache
    choice = {"pos": "patches", "head": "heads", "query": "queries"}
    for cell in cells(axes, corrupted, GRID**2):
        where = {choice[a]: i for a, i in zip(axes, cell, strict=True) if a != "layer"}
        site = "vision." + site_of(get_act_name(name, cell[0]))
        expected = edited(small, pair[1], Patch(site, kept[site], Where(**where)))
        torch.testing.assert_close(found[cell], expected, atol=1e-5, rtol=1e-5)
    assert found.std() > 1e-5


def test_the_bound_tower_is_the_tower(small, pair):
    bound_tower = tower(small, pair[0])
    logits, cache = bound_tower.run_with_cache(bound_tower.places)
    assert torch.equal(bound_tower(bound_tower.places), logits)
    _, whole = cached(small, pair[0])
    own = small.raw.vision_cache(whole)
    assert set(cache) == set(own) and all(torch.equal(cache[n], own[n]) for n in own)
    assert bound_tower.ln_final is small.raw.vision.ln_final and bound_tower.cfg is small.raw.vcfg
    _, cache = bound_tower.run_with_cache(bound_tower.places, names_filter="blocks.0.attn.hook_z")
    assert list(cache) == ["blocks.0.attn.hook_z"]
    keep = lambda value, hook: value  # noqa: E731
    for name in ("blocks.0.attn.hook_result", "blocks.7.attn.hook_z"):
        with pytest.raises(InputError):
            bound_tower.run_with_hooks(bound_tower.places, fwd_hooks=[(name, keep)])


def test_heads_are_detected_from_a_cache_that_holds_patterns(small):
    one = small.encode([Prompt("a b a b a b")])
    names = {"names_filter": lambda name: name.endswith("pattern")}
    _, cache = small.raw.run_with_cache(one.tokens, remove_batch_dim=True, **names)
    scores = head_detector.detect_head(small.raw, "a b a b a b", "previous_token_head", cache=cache)
    pattern = small.run(one, cache=["blocks.1.attn.pattern"]).cache["blocks.1.attn.pattern"][0, 2]
    previous = sum(pattern[i + 1, i] for i in range(6)) / pattern.sum()
    torch.testing.assert_close(scores[1, 2], previous)


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_resuming_at_a_layer_equals_the_full_run_and_skips_the_others(small, pair, layer):
    batch, model = pair[0], bound(small, pair[0])
    full = model(batch.tokens)
    x = model(batch.tokens, stop_at_layer=layer)
    _, cache = cached(small, batch)
    name = ("resid_pre", layer) if layer < N_LAYERS else ("resid_post", layer - 1)
    assert torch.equal(x, cache[name])
    called = []
    handles = [
        block.register_forward_hook(lambda *_, i=i: called.append(i))
        for i, block in enumerate([*small.raw.blocks, *small.raw.vision.blocks])
    ]
    resumed = small.raw(
        batch.tokens, position_ids=batch.positions, start_at_layer=layer, residual=x
    )
    for handle in handles:
        handle.remove()
    assert torch.equal(resumed, full) and called == list(range(layer, N_LAYERS))


def test_a_patch_in_place_does_not_reach_the_residual_that_was_passed(small, pair):
    batch, model = pair[0], bound(small, pair[0])
    x = model(batch.tokens, stop_at_layer=1)
    before = x.clone()

    def spoil(value, hook):
        value.zero_()
        return value

    small.raw.run_with_hooks(
        batch.tokens,
        position_ids=batch.positions,
        start_at_layer=1,
        residual=x,
        fwd_hooks=[("blocks.1.hook_resid_pre", spoil)],
    )
    assert torch.equal(x, before)


def test_layers_that_are_not_there_are_refused(small, pair):
    batch, model = pair[0], bound(small, pair[0])
    x = model(batch.tokens, stop_at_layer=1)
    for kwargs in (
        {"stop_at_layer": 3},
        {"stop_at_layer": -1},
        {"start_at_layer": 5, "residual": x},
    ):
        with pytest.raises(InputError, match="2 blocks"):
            model(batch.tokens, **kwargs)
    for kwargs in ({"start_at_layer": 1}, {"residual": x}):
        with pytest.raises(InputError, match="go together"):
            model(batch.tokens, **kwargs)
    with pytest.raises(InputError, match="return_type"):
        model(batch.tokens, return_type="loss")


# --- the bare model -------------------------------------------------------------------------------


def test_the_bare_model_equals_a_run(small, pair):
    batch = pair[0]
    torch.testing.assert_close(
        bound(small, batch)(batch.tokens)[:, -1:], small.run(batch).logits, atol=1e-5, rtol=1e-5
    )


def test_pixels_and_looked_up_patches_are_the_same_picture(small, pixels):
    arrays = [pixels(seed, GRID, 2) for seed in (0, 1)]
    batch = small.encode([Prompt(array, "How many") for array in arrays])
    planes = torch.stack([torch.from_numpy(a) for a in arrays]).permute(0, 3, 1, 2)
    by_pixels = small.raw(batch.tokens, planes / 127.5 - 1)
    torch.testing.assert_close(
        by_pixels, small.raw(batch.tokens, **batch.inputs), atol=1e-5, rtol=1e-5
    )
    embeds = small.raw.encode_image(**batch.inputs)
    assert torch.equal(
        small.raw(batch.tokens, image_embeds=embeds), small.raw(batch.tokens, **batch.inputs)
    )


def test_a_picture_without_tokens_and_tokens_without_a_picture_are_refused(small, pair):
    batch = pair[0]
    with pytest.raises(InputError, match="8 image tokens for 0 patches"):
        small.raw(batch.tokens)
    text = small.encode([Prompt("How many ?")])
    with pytest.raises(InputError, match="0 image tokens for 8 patches"):
        small.raw(text.tokens, **batch.inputs)


def test_a_picture_of_another_size_is_refused_by_the_bare_model(small, pair):
    with pytest.raises(InputError, match="4 x 4"):
        small.raw(pair[0].tokens, torch.zeros(2, 3, 6, 6))


def test_text_can_be_given_to_the_bare_model(small):
    batch = small.encode([Prompt("How many a b ?")])
    assert torch.equal(small.raw("How many ab ?"), small.raw(batch.tokens))
    assert torch.equal(small.raw.to_tokens(["How many ab ?"]), batch.tokens)
    assert torch.equal(small.raw.to_tokens("How many ab ?", prepend_bos=False), batch.tokens[:, 1:])
    with pytest.raises(InputError, match="different lengths"):
        small.raw.to_tokens(["a", "a b"])
    with pytest.raises(InputError, match="2 tokens, not one"):
        small.raw.to_single_token("ab")


def test_reading_from_a_position_equals_slicing(small, pair):
    batch, model = pair[0], bound(small, pair[0])
    full = model(batch.tokens)
    for start in (1, 4, batch.tokens.shape[1] - 1):
        found = model(batch.tokens, read_from=start)
        torch.testing.assert_close(found, full[:, start:], atol=1e-5, rtol=1e-5)


def test_padding_is_masked_in_the_bare_model_too(small, pixels, side):
    batch = small.encode([Prompt(pixels(0, GRID, 2), "How many ?"), Prompt("a")], padding_side=side)
    logits = small.raw(batch.tokens, attention_mask=batch.mask.long(), **batch.inputs)
    last = small.run(batch, logits_at="last").logits[:, 0]
    column = batch.layout.gather("last")[:, 0]
    torch.testing.assert_close(logits[torch.arange(2), column], last, atol=1e-5, rtol=1e-5)


def test_factored_weights_multiply_as_the_heads_do(small):
    attn = small.raw.blocks[0].attn
    torch.testing.assert_close(attn.OV.AB, attn.W_V @ attn.W_O)
    torch.testing.assert_close(attn.QK.AB, attn.W_Q @ attn.W_K.mT)
    assert torch.equal(small.raw.W_O[0], attn.W_O) and torch.equal(small.raw.W_V[0], attn.W_V)
