"""Hooks: none is ignored, none outlives its run, the user's own stay."""

from dataclasses import replace

import pytest
import torch

from interp.errors import InputError
from interp.interventions import Ablate, Edit, Steer, Where

OFF = {
    "attn.result": "set_use_attn_result",
    "attn.q_input": "set_use_split_qkv_input",
    "attn.k_input": "set_use_split_qkv_input",
    "attn.v_input": "set_use_split_qkv_input",
    "attn.attn_in": "set_use_attn_in",
    "mlp_in": "set_use_hook_mlp_in",
}


def n_hooks(model) -> int:
    points = model.raw.hook_points()
    return sum(len(p._forward_hooks) + len(p._backward_hooks) for p in points)


@pytest.fixture(scope="session")
def asked(model, prompts):
    """What `raw` takes for one prompt with a picture."""
    one = model.encode(prompts[:1])
    return one.tokens, dict(one.inputs)


@pytest.mark.parametrize("at", ["blocks.1.", "vision.blocks.0."])
@pytest.mark.parametrize("name", OFF)
def test_a_hook_that_is_off_says_how_to_turn_it_on(fresh, left, asked, at, name):
    tokens, inputs = asked
    site, raw = at + name, fresh.raw
    *path, leaf = site.split(".")
    hook = ".".join([*path, f"hook_{leaf}"])
    keep = lambda value, hook: value  # noqa: E731
    ways = [
        lambda: fresh.run(left, cache=[site]),
        lambda: fresh.run(left, edits=[Ablate(site)]),
        lambda: fresh.prefill(left, edits=[Ablate(site)]),
        lambda: raw.run_with_hooks(tokens, fwd_hooks=[(hook, keep)], **inputs),
        lambda: raw.run_with_hooks(tokens, fwd_hooks=[(lambda n: n == hook, keep)], **inputs),
        lambda: raw.run_with_cache(tokens, names_filter=hook, **inputs),
        lambda: raw.run_with_cache(tokens, names_filter=[hook], **inputs),
        lambda: raw.run_with_cache(tokens, names_filter=lambda n: n == hook, **inputs),
        lambda: raw.add_hook(hook, keep),
        lambda: raw.add_hook(lambda n: n == hook, keep),
        lambda: raw.add_perma_hook(hook, keep),
        lambda: raw.add_caching_hooks(hook),
        lambda: raw.hooks(fwd_hooks=[(hook, keep)]).__enter__(),
        lambda: raw.check_and_add_hook(raw.hook_dict[hook], hook, keep),
    ]
    for i, way in enumerate(ways):
        with pytest.raises(InputError, match=rf"{OFF[name]}\(True\)") as caught:
            way()
        assert "\n" not in str(caught.value), i
    assert n_hooks(fresh) == 0 and raw.context_level == 0
    getattr(raw, OFF[name])(True)
    assert site in fresh.sites
    assert site in fresh.run(left, cache=[site]).cache


@pytest.mark.parametrize("name", ["pattern", "attn_scores"])
def test_fused_attention_has_no_patterns_to_give(fresh, left, name):
    fresh.raw.set_use_fused_attention(True)
    for at in ("", "vision."):
        with pytest.raises(InputError, match=r"set_use_fused_attention\(False\)"):
            fresh.run(left, cache=[f"{at}blocks.0.attn.{name}"])
    assert not [site for site in fresh.sites if site.endswith(name)]


def test_split_and_joint_attention_inputs_exclude_each_other(fresh):
    fresh.raw.set_use_attn_in(True)
    with pytest.raises(InputError, match="exclude each other"):
        fresh.raw.set_use_split_qkv_input(True)
    fresh.raw.set_use_attn_in(False)
    fresh.raw.set_use_split_qkv_input(True)
    with pytest.raises(InputError, match="exclude each other"):
        fresh.raw.set_use_attn_in(True)


def test_the_tower_has_gates_of_its_own(fresh, left):
    fresh.raw.vision.set_use_attn_result(True)
    assert (
        "vision.blocks.0.attn.result"
        in fresh.run(left, cache=["vision.blocks.0.attn.result"]).cache
    )
    with pytest.raises(InputError, match="is off"):
        fresh.run(left, cache=["blocks.0.attn.result"])


def test_a_gate_with_a_hook_behind_it_does_not_close(fresh):
    fresh.raw.set_use_attn_result(True)
    fresh.raw.add_hook("blocks.0.attn.hook_result", lambda value, hook: value * 0)
    with pytest.raises(InputError, match="would stop firing"):
        fresh.raw.set_use_attn_result(False)
    fresh.raw.reset_hooks()
    fresh.raw.set_use_attn_result(False)


def test_a_hook_that_does_not_exist_names_its_neighbours(model, asked):
    tokens, inputs = asked
    with pytest.raises(InputError, match=r"blocks\.0\.attn\.hook_z"):
        model.raw.run_with_cache(tokens, names_filter="blocks.0.attn.hook_zz", **inputs)
    with pytest.raises(InputError, match=r"blocks\.0\.attn\.hook_z"):
        model.raw.add_hook("blocks.0.attn.hook_zz", lambda value, hook: value)


def test_a_list_with_one_hook_that_is_off_adds_none(fresh):
    keep = lambda value, hook: value  # noqa: E731
    with pytest.raises(InputError):
        with fresh.raw.hooks(
            fwd_hooks=[("blocks.0.attn.hook_z", keep), ("blocks.0.attn.hook_result", keep)]
        ):
            pass
    assert n_hooks(fresh) == 0


class Broken(Edit):
    where = Where()

    def apply(self, activation, frame):
        raise RuntimeError("broken on purpose")


def test_nothing_stays_hooked_after_an_exception(fresh, left):
    clean = fresh.run(left).logits
    state = fresh.prefill(left)
    tokens = state.logits.argmax(-1)
    for site in ("vision.blocks.0.attn.z", "blocks.1.resid_pre", "ln_final.normalized"):
        for fail in (fresh.run, fresh.prefill):
            with pytest.raises(RuntimeError, match="on purpose"):
                fail(left, edits=[Broken(site)])
    broken = Broken("blocks.0.attn.z")
    with pytest.raises(RuntimeError, match="on purpose"):
        fresh.step(tokens, replace(state, edits=(broken,)), edits=[broken])
    with pytest.raises(InputError):
        fresh.run(left, edits=[Steer("blocks.0.resid_pre", torch.zeros(7))])
    assert n_hooks(fresh) == 0 and fresh.raw.context_level == 0
    assert torch.equal(fresh.run(left).logits, clean)


def test_a_failing_hook_of_transformer_lens_leaves_nothing(fresh, asked):
    tokens, inputs = asked
    clean = fresh.raw(tokens, **inputs)

    def fail(value, hook):
        raise RuntimeError("broken on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fresh.raw.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_attn_out", fail)], **inputs)
    assert n_hooks(fresh) == 0
    assert torch.equal(fresh.raw(tokens, **inputs), clean)


def test_the_users_own_hooks_survive_a_run(fresh, left):
    counts = {"permanent": 0, "plain": 0, "context": 0}

    def count(which):
        return lambda value, hook: counts.update({which: counts[which] + 1})

    fresh.raw.add_perma_hook("blocks.0.attn.hook_z", count("permanent"))
    fresh.raw.add_hook("blocks.0.attn.hook_z", count("plain"))
    with fresh.raw.hooks(fwd_hooks=[("blocks.0.attn.hook_z", count("context"))]):
        for _ in range(2):
            fresh.run(left, cache=["blocks.0.attn.z"], edits=[Ablate("blocks.0.attn.z")])
    assert counts == {"permanent": 2, "plain": 2, "context": 2}
    fresh.run(left)
    assert counts == {"permanent": 3, "plain": 3, "context": 2}


def test_edits_see_what_the_users_hooks_made(fresh, left):
    fresh.raw.add_hook("blocks.0.attn.hook_z", lambda value, hook: value * 0 + 5)
    assert (fresh.run(left, cache=["blocks.0.attn.z"]).cache["blocks.0.attn.z"] == 5).all()


def test_hooks_fire_once_a_forward(fresh, left):
    counts = dict.fromkeys(fresh.raw.hook_dict, 0)
    for name in fresh.raw.hook_dict:
        fresh.raw.hook_dict[name].add_hook(
            lambda value, hook: counts.update({hook.name: counts[hook.name] + 1})
        )
    fresh.run(left)
    assert set(counts.values()) == {0, 1}
    assert {n for n, times in counts.items() if times == 0} == {
        n for n in counts if fresh.raw.why_off(n)
    }


def test_changing_what_was_kept_changes_no_later_run(model, left):
    clean = model.run(left, cache=model.sites)
    for value in clean.cache.values():
        value.fill_(7.0)
    again = model.run(left, cache=model.sites)
    assert torch.equal(again.logits, clean.logits)
    assert not any((value == 7.0).all() for value in again.cache.values())


def test_what_was_kept_shares_no_memory(model, left, asked):
    tokens, inputs = asked
    kept = model.run(left, cache=model.sites).cache
    _, cache = model.raw.run_with_cache(tokens, pos_slice=-1, **inputs)
    for values in (kept.values(), cache.values()):
        starts = [value.untyped_storage().data_ptr() for value in values]
        assert len(set(starts)) == len(starts)
    assert all(v.untyped_storage().nbytes() == v.numel() * 4 for v in cache.values())


def test_a_later_hook_that_works_in_place_leaves_the_cache_alone(model, asked):
    tokens, inputs = asked
    _, clean = model.raw.run_with_cache(tokens, **inputs)

    def spoil(value, hook):
        value.zero_()

    with model.raw.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", spoil)]):
        _, cache = model.raw.run_with_cache(
            tokens, names_filter="blocks.0.hook_resid_post", **inputs
        )
    kept = cache["blocks.0.hook_resid_post"]
    assert torch.equal(kept, clean["blocks.0.hook_resid_post"])
