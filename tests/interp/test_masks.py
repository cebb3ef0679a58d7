"""Masks: a hidden key is as good as not there."""

import pytest
import torch

from interp.interventions import Mask, Where

PATCHES = [1, 4, 5, 15]


def check(model, reference, batch, edit, **hidden):
    logits = model.run(batch, edits=[edit]).logits
    changed = torch.zeros(len(batch), dtype=torch.bool)
    for row in range(len(batch)):
        kwargs = {k: v[row] if k == "hidden" else v for k, v in hidden.items()}
        expected = reference.logits(batch, row, **kwargs)[-1].float()
        torch.testing.assert_close(logits[row, 0], expected, atol=2e-5, rtol=1e-5)
        changed[row] = (expected - reference.logits(batch, row)[-1]).abs().max() > 1e-4
    assert changed.any()


def tokens_of(batch, places) -> list[list[int]]:
    """Absolute positions, in each row, of these places of its pictures."""
    table, chosen = batch.patches, torch.isin(batch.patches.index, torch.tensor(places))
    return [table.token[chosen & (table.row == row)].tolist() for row in range(len(batch))]


def test_hidden_patches_are_as_good_as_removed_from_both_stacks(model, reference, batch):
    where = Where(patches=PATCHES)
    tokens = tokens_of(batch, PATCHES)
    check(model, reference, batch, Mask(where), hidden=tokens, hidden_patches=PATCHES)


def test_patches_may_be_hidden_in_the_tower_alone(model, reference, batch):
    edit = Mask(Where(patches=PATCHES), decoder=False)
    check(model, reference, batch, edit, hidden=[[]] * 3, hidden_patches=PATCHES)


def test_patches_may_be_hidden_in_the_decoder_alone(model, reference, batch):
    edit = Mask(Where(patches=PATCHES), tower=False)
    check(model, reference, batch, edit, hidden=tokens_of(batch, PATCHES))


def test_hiding_may_be_limited_to_some_blocks(model, reference, batch):
    edit = Mask(Where(patches=PATCHES), layers=[1])
    tokens = tokens_of(batch, PATCHES)
    check(model, reference, batch, edit, hidden=tokens, hidden_patches=PATCHES, layers=[1])
    for layers in (2, [2]):
        edit = Mask(Where(patches=PATCHES), tower=False, layers=layers)
        check(model, reference, batch, edit, hidden=tokens, layers=[2])


def test_hidden_tokens_are_as_good_as_removed(model, reference, batch):
    edit = Mask(Where(tokens=[0, 1]))
    check(model, reference, batch, edit, hidden=[[0, 1]] * 3)


def test_hiding_tokens_of_a_picture_hides_its_patches_too(model, batch):
    by_patch, by_token = (
        model.run(batch, edits=[Mask(where)]).logits
        for where in (Where(patches=PATCHES), Where(tokens=tokens_of(batch, PATCHES)))
    )
    assert torch.equal(by_patch, by_token)


def test_hiding_the_whole_picture_leaves_nothing_of_it(model, batch, prompts, pixels):
    edit = Mask(Where(tokens="image"))
    other = model.encode([type(p)(*(repaint(s, pixels) for s in p.segments)) for p in prompts])
    a, b = (
        model.run(x, edits=[edit], logits_at="last").logits for x in (model.encode(prompts), other)
    )
    assert torch.equal(a, b) and torch.isfinite(a).all()


def repaint(segment, pixels):
    return type(segment)(pixels(9), segment.name) if hasattr(segment, "pixels") else segment


def test_a_hidden_token_still_attends(model, reference, batch):
    """The last token is hidden as a key, from itself too; it is read all the same."""
    last = [[23], [8], [42]]
    check(model, reference, batch, Mask(Where(tokens="last")), hidden=last)


def test_masks_add_up(model, batch):
    first, second, both = (Mask(Where(patches=p)) for p in ([1, 4], [5, 15], PATCHES))
    a = model.run(batch, edits=[first, second]).logits
    assert torch.equal(a, model.run(batch, edits=[both]).logits)
    chosen = torch.isin(batch.patches.index, torch.tensor(PATCHES))
    assert torch.equal(a, model.run(batch, edits=[Mask(Where(patches=chosen))]).logits)


def test_hidden_keys_have_no_weight(model, batch):
    sites = ["blocks.1.attn.pattern", "vision.blocks.1.attn.pattern"]
    kept = model.run(batch, edits=[Mask(Where(patches=PATCHES))], cache=sites).cache
    hidden = batch.layout.image_tokens(batch.layout.patch_mask(PATCHES))
    assert (kept[sites[0]].movedim(3, 1)[hidden] == 0).all()
    assert (kept[sites[1]][..., PATCHES] == 0).all()
    sums = kept[sites[1]].sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_a_mask_works_with_a_prompt_without_pictures(model, reference, prompts):
    batch = model.encode(prompts[1:2])
    check(model, reference, batch, Mask(Where(tokens="string")), hidden=[[3, 4, 5, 6]])


@pytest.mark.parametrize("fused", [False, True])
def test_a_query_without_any_key_reads_nothing(fresh, left, fused):
    fresh.raw.set_use_fused_attention(fused)
    run = fresh.run(left, edits=[Mask(Where(tokens="prompt"))], cache=["blocks.1.attn.z"])
    assert (run.cache["blocks.1.attn.z"] == 0).all() and torch.isfinite(run.logits).all()


def test_fused_attention_equals_the_explicit_one(fresh, model, batch):
    fresh.raw.set_use_fused_attention(True)
    for edits in ([], [Mask(Where(patches=PATCHES))], [Mask(Where(tokens="image"), layers=0)]):
        torch.testing.assert_close(
            fresh.run(batch, edits=edits).logits,
            model.run(batch, edits=edits).logits,
            atol=1e-5,
            rtol=1e-5,
        )
