"""Cached answers equal the naive loop of full runs, whatever is edited."""

from dataclasses import replace

import pytest
import torch

from interp.errors import InputError
from interp.interventions import Ablate, Edit, Mask, Patch, Project, Steer, Where
from interp.model import Prompt, generate

N = 4
LENGTHS = (24, 8 + 1, 43)
STREAM, Z, PATTERN = "blocks.1.resid_pre", "blocks.0.attn.z", "blocks.1.attn.pattern"


def reached(tokens, n_new: int):
    """Positions that the sequence has by now."""
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        return [[p for p in row if p < n + n_new] for row, n in zip(tokens, LENGTHS, strict=True)]
    return tokens


def so_far(edits, batch):
    """The edits that have something to act on; their positions cut at the end of the sequence."""
    for edit in edits:
        names = [n for n in ("tokens", "queries", "keys") if getattr(edit.where, n) is not None]
        cut = {n: reached(getattr(edit.where, n), batch.layout.n_new) for n in names}
        where = replace(edit.where, **cut)
        vision = isinstance(edit, Edit) and edit.site.startswith("vision.")
        if vision or all(batch.layout.columns(getattr(where, n)).any() for n in names):
            yield replace(edit, where=where)


def naive(model, batch, edits, n: int = N, allowed=None, stop=None) -> torch.Tensor:
    """A full forward of the whole sequence for every new token."""
    new = torch.zeros(len(batch), 0, dtype=torch.long)
    for _ in range(n):
        longer = batch.extend(new)
        logits = model.run(longer, edits=list(so_far(edits, longer))).logits[:, -1]
        if allowed is not None:
            barred = torch.ones_like(logits, dtype=torch.bool)
            barred[:, allowed] = False
            logits = logits.masked_fill(barred, -torch.inf)
        token = logits.argmax(-1)
        if stop is not None:
            token[(new == stop).any(1)] = stop
        new = torch.cat([new, token[:, None]], 1)
        if stop is not None and (new == stop).any(1).all():
            break
    return new


def noise(*shape, seed: int = 0):
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


EVERY = [[0, n - 1, n, n + 2] for n in LENGTHS]
EDITS = {
    "nothing": [],
    "the prompt": [Ablate(Z, Where(tokens="prompt", heads=[0, 3]))],
    "the last token": [Steer(STREAM, noise(24), where=Where(tokens="last"))],
    "new tokens": [Steer(STREAM, noise(24), where=Where(tokens="new"))],
    "both": [Steer(STREAM, noise(24))],
    "the answer": [Project("blocks.1.mlp_out", noise(24, 24), Where(tokens="answer"))],
    "positions before and after the prompt's end": [Ablate(STREAM, Where(tokens=EVERY))],
    "keys and values": [
        Ablate("blocks.1.attn.rot_k", Where(tokens="image")),
        Steer("blocks.2.attn.v", noise(8), where=Where(heads=2)),
    ],
    "queries": [Ablate("blocks.1.attn.q", Where(tokens="new"))],
    "patterns": [Ablate(PATTERN, Where(queries="new", keys="prompt", heads=[1, 2]))],
    "patterns of both": [Ablate(PATTERN, mean=torch.tensor(0.2))],
    "scores": [Ablate("blocks.1.attn.attn_scores")],
    "scores of keys that come later": [
        Ablate("blocks.0.attn.attn_scores", Where(keys=EVERY, heads=0), mean=torch.tensor(2.0))
    ],
    "the final norm": [
        Steer("ln_final.normalized", noise(24), where=Where(tokens="last")),
        Ablate("ln_final.scale", Where(tokens="new"), mean=torch.tensor(0.5)),
    ],
    "the embedding": [Steer("embed", noise(24, seed=3), where=Where(tokens="new"))],
    "the tower": [Ablate("vision.blocks.1.attn.z", Where(patches=[3, 5], heads=0))],
    "the tower's patterns": [Ablate("vision.blocks.1.attn.pattern", Where(keys=[0, 9]))],
    "the projector": [Steer("projector", noise(24), where=Where(patches=[0, 1]))],
    "hidden patches": [Mask(Where(patches=[0, 1, 2, 3, 9]))],
    "hidden text": [Mask(Where(tokens="text"), layers=[1])],
    "hidden new tokens": [Mask(Where(tokens="new"))],
    "hidden positions": [Mask(Where(tokens=EVERY))],
    "several": [
        Mask(Where(patches=[7])),
        Steer(STREAM, noise(24), where=Where(tokens="new")),
        Ablate(Z, Where(heads=1)),
    ],
}


@pytest.mark.parametrize("name", EDITS)
def test_cached_answers_equal_the_naive_loop(model, batch, name):
    expected = naive(model, batch, EDITS[name])
    assert torch.equal(generate(model, batch, max_new_tokens=N, edits=EDITS[name]), expected)


def test_edits_change_answers(model, left):
    """Or else the loop above would compare nothing."""
    plain = generate(model, left, max_new_tokens=N)
    changed = [
        name
        for name, edits in EDITS.items()
        if not torch.equal(generate(model, left, max_new_tokens=N, edits=edits), plain)
    ]
    assert len(changed) > len(EDITS) / 2


PATCHES = {
    "the prompt's activations": (STREAM, slice(None), Where()),
    "the prompt's activations at some tokens": (STREAM, slice(None), Where(tokens="image")),
    "the prompt's heads": (Z, slice(None), Where(heads=[0, 2])),
    "a pattern of the prompt": (PATTERN, slice(None), Where(heads=[0, 1])),
    "a pattern of the prompt, by queries": (PATTERN, slice(None), Where(queries="last")),
}


@pytest.mark.parametrize("new", [0, N - 1], ids=["prompt-sized", "full-sized"])
@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_of_either_size_equals_the_naive_loop(model, prompts, name, new):
    batch = model.encode(prompts, padding_side="right" if new else "left")
    site, _, where = PATCHES[name]
    other = model.encode([prompts[2]] + prompts[1:], padding_side="left")
    other = other.extend(torch.full((3, new), 8))
    source = model.run(other, cache=[site]).cache[site]
    edit = Patch(site, source, where)

    def cut(longer):
        n = longer.tokens.shape[1]
        if new == 0:
            return edit
        parts = source[:, :, :n, :n] if site == PATTERN else source[:, :n]
        return replace(edit, source=parts)

    expected = torch.zeros(3, 0, dtype=torch.long)
    for _ in range(N):
        longer = batch.extend(expected)
        token = model.run(longer, edits=[cut(longer)]).logits[:, -1].argmax(-1)
        expected = torch.cat([expected, token[:, None]], 1)
    assert torch.equal(generate(model, batch, max_new_tokens=N, edits=[edit]), expected)


@pytest.mark.parametrize("site", [STREAM, PATTERN])
@pytest.mark.parametrize("tokens", ["new", "answer", EVERY], ids=["new", "answer", "positions"])
def test_a_patch_of_chosen_tokens_reaches_into_the_answer(model, batch, site, tokens):
    """Also where there are more of them than the prompt has tokens."""
    n = {"new": N - 1, "answer": N}.get(tokens if isinstance(tokens, str) else "", 4)
    full = batch.extend(torch.full((3, N - 1), 7))
    width = full.tokens.shape[1]
    source = noise(3, n, 24) if site == STREAM else noise(3, 4, n, width).softmax(-1)
    where = Where(queries=tokens) if site == PATTERN else Where(tokens=tokens)
    new = generate(model, batch, max_new_tokens=N, edits=[Patch(site, source, where)])
    # one full run over the whole answer: causal, so each token is what the naive loop would say
    run = model.run(batch.extend(new[:, :-1]), edits=[Patch(site, source, where)])
    assert torch.equal(run.logits.argmax(-1), new)


def test_a_patch_of_more_new_tokens_than_the_prompt_has_is_laid_on_them(model, prompts):
    batch, n = model.encode(prompts[1:2]), 12
    edit = Patch(STREAM, noise(1, n - 1, 24), Where(tokens="new"))
    new = generate(model, batch, max_new_tokens=n, edits=[edit])
    run = model.run(batch.extend(new[:, :-1]), edits=[edit])
    assert torch.equal(run.logits.argmax(-1), new)


def test_a_mask_of_the_full_sequence_reaches_into_the_answer(model, batch):
    full = batch.extend(torch.full((3, N - 1), 7))
    mask = full.mask & (torch.arange(full.tokens.shape[1]) % 3 == 0)
    edit = Steer(STREAM, noise(24), where=Where(tokens=mask))
    new = generate(model, batch, max_new_tokens=N, edits=[edit])
    run = model.run(batch.extend(new[:, :-1]), edits=[edit])
    assert torch.equal(run.logits.argmax(-1), new)


def test_a_mask_of_the_prompt_leaves_new_tokens_alone(model, batch):
    as_mask, as_role = (
        generate(
            model, batch, max_new_tokens=N, edits=[Steer(STREAM, noise(24), where=Where(tokens=t))]
        )
        for t in (batch.mask, "prompt")
    )
    assert torch.equal(as_mask, as_role)


def test_only_allowed_tokens_are_chosen(model, batch):
    allowed = [7, 9, 12]
    new = generate(model, batch, max_new_tokens=N, allowed=allowed)
    assert torch.equal(new, naive(model, batch, [], allowed=allowed))
    assert set(new.flatten().tolist()) <= set(allowed)


def test_an_answer_ends_at_its_stop(model, batch):
    plain = naive(model, batch, [])
    for stop in set(plain.flatten().tolist()):
        new = generate(model, batch, max_new_tokens=N, stop=stop)
        assert torch.equal(new, naive(model, batch, [], stop=stop))
        ended = (new == stop).cumsum(1) > 0
        assert (new[ended] == stop).all()


def test_every_row_stopping_at_once_ends_the_loop(model, batch):
    assert generate(model, batch, max_new_tokens=N, allowed=[7], stop=7).tolist() == [[7]] * 3


def test_an_edit_of_tokens_that_an_early_stop_never_reads_stands(model, batch):
    edit = Ablate(Z, Where(tokens="new"))
    new = generate(model, batch, max_new_tokens=N, allowed=[7], stop=7, edits=[edit])
    assert new.shape == (3, 1)


def test_a_row_of_a_batch_answers_as_it_does_alone(model, prompts, batch):
    together = generate(model, batch, max_new_tokens=N)
    for row, prompt in enumerate(prompts):
        alone = generate(model, model.encode([prompt]), max_new_tokens=N)
        assert torch.equal(together[row], alone[0])


def counted(model) -> dict[str, int]:
    calls = {"tower": 0, "decoder": 0}
    model.raw.vision.register_forward_hook(lambda *_: calls.update(tower=calls["tower"] + 1))
    model.raw.blocks[0].register_forward_hook(lambda *_: calls.update(decoder=calls["decoder"] + 1))
    return calls


def test_the_picture_is_encoded_once_and_each_token_read_once(fresh, left):
    calls, widths = counted(fresh), []
    fresh.raw.blocks[0].register_forward_hook(lambda m, args, out: widths.append(args[0].shape[1]))
    generate(fresh, left, max_new_tokens=N, edits=[Mask(Where(patches=0)), Ablate(Z)])
    assert calls == {"tower": 1, "decoder": N} and widths == [43, *[1] * (N - 1)]


def test_a_prompt_without_a_picture_does_not_call_the_tower(fresh, prompts):
    calls = counted(fresh)
    generate(fresh, fresh.encode(prompts[1:2]), max_new_tokens=2)
    assert calls["tower"] == 0


HOPELESS = {
    "a position beyond the answer": lambda: Ablate(Z, Where(tokens=[24 + N])),
    "a role that is empty": lambda: Ablate(Z, Where(tokens=[])),
    "a key beyond the answer": lambda: Ablate(PATTERN, Where(keys=[100])),
    "a patch that is not there": lambda: Ablate("projector", Where(patches=[])),
    "a place of the tower": lambda: Ablate("vision.blocks.0.attn.pattern", Where(keys=[])),
    "a mask of nothing": lambda: Mask(Where(patches=[])),
    "a prompt-sized source for new tokens": lambda: Patch(
        Z, noise(3, 43, 4, 8), Where(tokens="new")
    ),
    "too small a source": lambda: Patch(Z, noise(3, 2, 4, 8), Where(tokens="new")),
    "a source without an axis": lambda: Patch(Z, noise(43, 4, 8)),
    "no such site": lambda: Ablate("blocks.7.attn.z"),
    "a hook that is off": lambda: Ablate("blocks.0.attn.result"),
    "no such span": lambda: Mask(Where(tokens="bord")),
}


@pytest.mark.parametrize("name", HOPELESS)
def test_an_edit_that_cannot_act_is_refused_before_any_work(fresh, left, name):
    calls = counted(fresh)
    with pytest.raises(InputError):
        generate(fresh, left, max_new_tokens=N, edits=[HOPELESS[name]()])
    assert calls == {"tower": 0, "decoder": 0}


def test_one_new_token_reads_the_prompt_only(fresh, left):
    calls = counted(fresh)
    new = generate(fresh, left, max_new_tokens=1)
    assert torch.equal(new, naive(fresh, left, [], n=1)) and calls["decoder"] == 2
    with pytest.raises(InputError, match="would never fire"):
        generate(fresh, left, max_new_tokens=1, edits=[Ablate(Z, Where(tokens="new"))])


def test_impossible_requests_are_refused(model, left):
    with pytest.raises(InputError, match="at least one"):
        generate(model, left, max_new_tokens=0)
    for allowed in ([], [24], [-1]):
        with pytest.raises(InputError, match="allowed.*from 0 to 23"):
            generate(model, left, max_new_tokens=1, allowed=allowed)
    with pytest.raises(InputError, match="stop is 24"):
        generate(model, left, max_new_tokens=1, stop=24)
    with pytest.raises(InputError, match=r"close ones are blocks\.0\.attn\.z"):
        generate(model, left, max_new_tokens=1, edits=[Ablate("blocks.0.attn.zz")])


def test_the_model_may_say_the_word_image(model, left):
    """A new token is never a picture, even if it is the word that stands for one."""
    image = model.tokenizer.id("<image>")
    new = generate(model, left, max_new_tokens=3, allowed=[image])
    run = model.run(left.extend(new[:, :-1]))
    assert (new == image).all() and run.logits.shape == (3, 3, 24)


# --- prefill and step by hand ---------------------------------------------------------------------


def test_each_step_gives_the_logits_of_a_full_run(model, batch):
    edits = [Steer(STREAM, noise(24), where=Where(tokens=EVERY)), Mask(Where(patches=[3]))]
    new = torch.tensor([[7, 8, 9]] * 3)
    full = model.run(batch.extend(new), edits=edits, cache=[Z])
    with pytest.raises(InputError, match="no position 24"):
        model.prefill(batch, edits=edits)
    state = model.prefill(batch.reserve(3), edits=edits)
    for i in range(4):
        torch.testing.assert_close(state.logits, full.logits[:, i], atol=1e-5, rtol=1e-5)
        if i < 3:
            run, state = model.step(new[:, i], state, edits=edits, cache=[Z])
            torch.testing.assert_close(
                run.cache[Z][:, 0], full.cache[Z][:, 43 + i], atol=1e-5, rtol=1e-5
            )
    assert state.fired == {0, 1}


def test_a_prefill_may_hold_part_of_the_answer(model, batch):
    new = torch.tensor([[7, 8, 9]] * 3)
    state = model.prefill(batch.extend(new[:, :2]))
    run, _ = model.step(new[:, 2], state)
    expected = model.run(batch.extend(new)).logits[:, -1]
    torch.testing.assert_close(run.logits[:, 0], expected, atol=1e-5, rtol=1e-5)


def test_a_state_can_be_continued_twice(model, batch):
    state = model.prefill(batch)
    kept = [tensor.clone() for pair in state.memory for tensor in pair]
    once, _ = model.step(torch.tensor([7, 7, 7]), state)
    model.step(torch.tensor([8, 8, 8]), state)
    again, _ = model.step(torch.tensor([7, 7, 7]), state)
    assert torch.equal(once.logits, again.logits)
    assert all(
        torch.equal(a, b)
        for a, b in zip(kept, [t for pair in state.memory for t in pair], strict=True)
    )


def test_two_continuations_of_a_state_do_not_write_into_each_other(model, batch):
    words = torch.tensor([[5, 6, 7], [8, 9, 10]])
    full = [model.run(batch.extend(own.expand(3, 3))).logits for own in words]
    states = [model.prefill(batch)] * 2
    for i in range(3):  # in turn: both read on from one state, then each from its own
        for j, own in enumerate(words):
            run, states[j] = model.step(own[i].expand(3), states[j])
            torch.testing.assert_close(run.logits[:, 0], full[j][:, i + 1], atol=1e-5, rtol=1e-5)


def test_more_tokens_than_there_was_room_for_are_read(model, left):
    new = torch.arange(3 * 20).view(3, 20) % 10 + 5
    state = model.prefill(left)
    for i in range(20):
        run, state = model.step(new[:, i], state)
    expected = model.run(left.extend(new)).logits[:, -1]
    torch.testing.assert_close(run.logits[:, 0], expected, atol=1e-5, rtol=1e-5)


def test_extending_takes_one_token_list_a_row(model, left):
    with pytest.raises(InputError, match="2 rows"):
        left.extend(torch.zeros(2, 1, dtype=torch.long))


def test_a_batch_of_one_row_repeats(model, prompts, pixels):
    batch = model.encode([prompts[2]])
    three = batch.repeat(3)
    logits = model.run(three, edits=[Ablate("projector", Where(patches=[[0]] * 6))]).logits
    assert torch.equal(model.run(three).logits[2], model.run(three).logits[0])
    torch.testing.assert_close(
        logits,
        model.run(batch, edits=[Ablate("projector", Where(patches=0))]).logits.expand_as(logits),
    )
    with pytest.raises(InputError, match="one row"):
        model.encode([Prompt("a"), Prompt("b")]).repeat(2)


@pytest.fixture
def fused(fresh):
    """The same model with fused attention, in which a prefill reads only what the answer needs."""
    fresh.raw.set_use_fused_attention(True)
    return fresh


@pytest.mark.parametrize("rows", [slice(None), slice(1), slice(1, 2)])  # one row has no padding
def test_a_fused_prefill_gives_what_the_explicit_one_gives(model, fused, prompts, side, rows):
    batch = model.encode(prompts[rows], padding_side=side)
    expected, found = model.prefill(batch), fused.prefill(batch)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
    for own, other in zip(found.memory, expected.memory, strict=True):
        for kept, full in zip(own, other, strict=True):
            real = batch.mask[..., None, None]
            torch.testing.assert_close(kept * real, full * real, atol=1e-5, rtol=1e-5)
    assert torch.equal(
        generate(fused, batch, max_new_tokens=N), generate(model, batch, max_new_tokens=N)
    )


@pytest.mark.parametrize("name", ["nothing", "the prompt", "both"])
def test_prompts_that_have_been_read_are_answered_in_several_ways(model, batch, name):
    edits = EDITS[name]
    state = model.prefill(batch.reserve(N - 1), edits=edits)
    for allowed in (None, [3, 4, 5], [6, 7]):
        options = dict(max_new_tokens=N, edits=edits, allowed=allowed)
        assert torch.equal(generate(model, state, **options), generate(model, batch, **options))


def test_what_was_read_by_another_model_or_under_other_edits_is_refused(model, fresh, left):
    edits = [Ablate(Z, Where(tokens="prompt", heads=[0, 3]))]
    same = [Ablate(Z, Where(tokens="prompt", heads=[0, 3]))]  # edits are told apart by identity
    tokens = torch.tensor([7, 7, 7])
    for read, given in ((edits, []), ([], edits), (edits, same), (edits, edits * 2)):
        state = model.prefill(left.reserve(N - 1), edits=read)
        said = f"read under {len(read)} edits, and now {len(given)} are given.*the same edits"
        with pytest.raises(InputError, match=said):
            generate(model, state, max_new_tokens=N, edits=given)
        with pytest.raises(InputError, match=said):
            model.step(tokens, state, edits=given)
    state = model.prefill(left)
    with pytest.raises(InputError, match="read by another model: prefill them with this one"):
        generate(fresh, state, max_new_tokens=2)
    with pytest.raises(InputError, match="read by another model: prefill them with this one"):
        fresh.step(tokens, state)


def test_edits_that_reach_further_than_the_prompt_was_read_for_are_refused(model, left):
    state = model.prefill(left.reserve(1), edits=EDITS["both"])
    with pytest.raises(InputError, match=r"room for 1 new tokens.*prefill batch.reserve\(3\)"):
        generate(model, state, max_new_tokens=N, edits=EDITS["both"])
