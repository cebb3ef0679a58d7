"""What must hold exactly: the model is the sum of its parts, and a batch is the sum of its rows."""

import pytest
import torch

from interp.interventions import Ablate, Patch, Where
from interp.model import Batch, Prompt


def test_the_model_equals_the_one_computed_by_hand(model, reference, batch):
    logits = model.run(batch, logits_at="last").logits[:, 0]
    for row in range(len(batch)):
        by_hand = reference.logits(batch, row)[-1].float()
        torch.testing.assert_close(logits[row], by_hand, atol=2e-5, rtol=1e-5)


def test_every_position_equals_the_one_computed_by_hand(model, reference, prompts):
    batch = model.encode(prompts[:1])
    logits = model.run(batch, logits_at="prompt").logits[0]
    torch.testing.assert_close(logits, reference.logits(batch, 0).float(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("tower", ["decoder", "vision"])
def test_head_writes_and_the_bias_are_the_attention_output(model, batch, tower):
    raw, at = (model.raw, "") if tower == "decoder" else (model.raw.vision, "vision.")
    for layer, block in enumerate(raw.blocks):
        z, out, attn_out = (
            f"{at}blocks.{layer}.{name}" for name in ("attn.z", "attn.out", "attn_out")
        )
        cache = model.run(batch, cache=[z, out, attn_out]).cache
        writes = torch.einsum("...hd,hdm->...hm", cache[z], model.head_out(layer, tower))
        torch.testing.assert_close(
            writes.sum(-2) + block.attn.b_O, cache[out], atol=1e-5, rtol=1e-5
        )
        assert torch.equal(cache[out], cache[attn_out])


@pytest.mark.parametrize("at", ["", "vision."])
def test_the_stream_is_the_embedding_and_all_that_blocks_write(model, batch, at):
    parts = [
        s for s in model.sites if s.startswith(at + "blocks") and s.endswith(("n_out", "p_out"))
    ]
    last = [s for s in model.sites if s.startswith(at + "blocks") and s.endswith("resid_post")][-1]
    cache = model.run(batch, cache=[f"{at}embed", last, *parts]).cache
    total = cache[f"{at}embed"] + sum(cache[part] for part in parts)
    torch.testing.assert_close(total, cache[last], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("at", ["", "vision."])
def test_ablating_one_head_removes_exactly_its_write(model, batch, at):
    z, out = f"{at}blocks.1.attn.z", f"{at}blocks.1.attn.out"
    clean = model.run(batch, cache=[z, out]).cache
    edited = model.run(batch, edits=[Ablate(z, Where(heads=1))], cache=[out]).cache
    write = clean[z][..., 1, :] @ model.head_out(1, "vision" if at else "decoder")[1]
    real = batch.mask if not at else torch.ones(len(write), dtype=torch.bool)
    torch.testing.assert_close((clean[out] - edited[out])[real], write[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("at", ["", "vision."])
def test_ablating_all_heads_leaves_the_bias(model, batch, at):
    z, out = f"{at}blocks.0.attn.z", f"{at}blocks.0.attn.out"
    kept = model.run(batch, edits=[Ablate(z)], cache=[out]).cache[out]
    kept = kept if at else kept[batch.mask]
    raw = model.raw.vision if at else model.raw
    assert torch.equal(kept, raw.blocks[0].attn.b_O.expand_as(kept))


def test_the_last_residual_carries_the_whole_answer(model, prompts):
    ours, theirs = (model.encode([p]) for p in (prompts[0], prompts[2]))
    site = "blocks.2.resid_post"
    other = model.run(theirs, cache=[site], cache_at="last")
    patched = model.run(ours, edits=[Patch(site, other.cache[site], Where(tokens="last"))])
    assert torch.equal(patched.logits, other.logits)


def test_unembedding_the_last_residual_gives_the_logits(model, batch):
    site = "blocks.2.resid_post"
    run = model.run(batch, cache=[site, "ln_final.scale"], cache_at="last")
    torch.testing.assert_close(model.unembed(run.cache[site]), run.logits)
    scaled = model.unembed(run.cache[site], scale=run.cache["ln_final.scale"])
    torch.testing.assert_close(scaled, run.logits)


def test_with_a_frozen_scale_unembedding_is_linear_but_for_its_constant(model, batch):
    sites = ["embed", *(f"blocks.{i}.{w}" for i in range(3) for w in ("attn_out", "mlp_out"))]
    run = model.run(batch, cache=[*sites, "ln_final.scale"], cache_at="last")
    scale = run.cache["ln_final.scale"]
    constant = model.unembed(torch.zeros_like(run.cache["embed"]), scale=scale)
    parts = [model.unembed(run.cache[site], scale=scale) - constant for site in sites]
    torch.testing.assert_close(sum(parts) + constant, run.logits, atol=1e-4, rtol=1e-4)


def test_a_batch_equals_its_rows_alone(model, prompts, batch):
    together = model.run(batch, logits_at="last").logits
    for row, prompt in enumerate(prompts):
        alone = model.run(model.encode([prompt])).logits[0]
        torch.testing.assert_close(together[row], alone, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("site", ["blocks.1.attn.pattern", "blocks.2.resid_pre", "blocks.0.attn.z"])
def test_activations_of_a_batch_equal_those_of_its_rows_alone(model, prompts, batch, site):
    kept = model.run(batch, cache=[site]).cache[site]
    for row, prompt in enumerate(prompts):
        alone = model.run(model.encode([prompt]), cache=[site]).cache[site][0]
        real = batch.mask[row]
        own = kept[row][:, real][:, :, real] if site.endswith("pattern") else kept[row][real]
        torch.testing.assert_close(own, alone, atol=2e-5, rtol=1e-4)


def test_the_order_of_rows_does_not_matter(model, prompts, side):
    order = [2, 0, 1]
    plain = model.run(model.encode(prompts, padding_side=side)).logits
    turned = model.run(model.encode([prompts[i] for i in order], padding_side=side)).logits
    torch.testing.assert_close(turned, plain[order], atol=1e-6, rtol=1e-6)


def test_a_run_leaves_no_trace_on_the_next(model, prompts):
    first, second = (model.encode([p]) for p in (prompts[0], prompts[2]))
    before = model.run(first).logits
    model.run(second)
    assert torch.equal(model.run(first).logits, before)


def test_what_stands_at_pads_does_not_matter(model, batch):
    tokens = torch.where(batch.mask, batch.tokens, 9)
    positions = torch.where(batch.mask, batch.positions, 77)
    changed = Batch(tokens, positions, batch.layout, batch.inputs)
    assert torch.equal(model.run(changed).logits, model.run(batch).logits)


def test_later_tokens_do_not_reach_earlier_ones(model, prompts):
    batch = model.encode([prompts[1]])
    short = model.run(batch, logits_at="prompt").logits
    long = model.run(batch.extend(torch.tensor([[7, 8]])), logits_at="prompt").logits
    torch.testing.assert_close(long, short, atol=1e-6, rtol=1e-6)


def test_a_picture_changes_what_is_said_of_it(model, pixels):
    runs = [model.run(model.encode([Prompt(pixels(s), "How many ?")])).logits for s in (0, 1)]
    assert (runs[0] - runs[1]).abs().max() > 1e-2
