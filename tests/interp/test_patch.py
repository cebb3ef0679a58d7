"""Patches: what another run had is laid over the right tokens, whatever the padding and length."""

import pytest
import torch

from interp.interventions import Patch, Where
from interp.model import Picture, Prompt, Text

SITES = ["blocks.1.resid_pre", "blocks.0.attn.z", "blocks.1.attn.rot_k", "ln_final.normalized"]


@pytest.fixture(scope="module")
def clean_and_corrupted(model, pixels):
    """Prompts of different lengths with a picture and a name in common."""

    def prompts(seed: int, words: str) -> list[Prompt]:
        return [
            Prompt("How many", pixels_of(seed), Text("c c", "tail"), "?"),
            Prompt(words, Text(words, "head"), pixels_of(seed + 1), Text("a b", "tail"), "?"),
        ]

    def pixels_of(seed):
        return Picture(pixels(seed), "board")

    return prompts(0, "black stones"), prompts(5, "a a a")


def laid(batch, row: int, positions, source, target):
    """Puts source[k] at a row's k-th position."""
    columns = batch.mask[row].nonzero()[:, 0]
    for k, position in enumerate(positions):
        target[row, columns[position]] = source[k]


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("where", ["board", "tail", "last"])
def test_a_span_is_patched_whatever_the_padding_and_the_length(
    model, hooked, clean_and_corrupted, site, where
):
    clean, corrupted = clean_and_corrupted
    for sides in (("left", "right"), ("right", "left")):
        theirs, ours = (
            model.encode(p, padding_side=s) for p, s in zip((clean, corrupted), sides, strict=True)
        )
        source = model.run(theirs, cache=[site], cache_at=where).cache[site]
        whole = model.run(theirs, cache=[site]).cache[site]

        def change(x, theirs=theirs, ours=ours, whole=whole):
            for row in range(2):
                x[row, ours.select(where)[row]] = whole[row, theirs.select(where)[row]]
            return x

        patched = model.run(ours, edits=[Patch(site, source, Where(tokens=where))]).logits
        torch.testing.assert_close(patched, hooked(model, ours, {site: change}))
        if where == "last" or not site.startswith("ln_final"):
            assert (patched - model.run(ours).logits).abs().max() > 1e-4


def test_a_selection_stands_as_its_positions_are_listed(model, prompts, hooked):
    site, batch = "blocks.1.resid_pre", model.encode(prompts[:1])
    clean = model.run(batch, cache=[site]).cache[site]
    source = model.run(batch, cache=[site], cache_at=[5, -1, 2]).cache[site]
    assert torch.equal(source[0], clean[0, [5, 23, 2]])

    def change(x):
        x[0, [7, 3, 8]] = clean[0, [5, 23, 2]]
        return x

    patched = model.run(batch, edits=[Patch(site, source, Where(tokens=[7, 3, 8]))]).logits
    torch.testing.assert_close(patched, hooked(model, batch, {site: change}))


def test_logits_stand_as_their_positions_are_listed(model, prompts):
    batch = model.encode(prompts[:1])
    every = model.run(batch, logits_at="prompt").logits
    listed = model.run(batch, logits_at=[-1, 4]).logits
    torch.testing.assert_close(listed[0], every[0, [23, 4]])


def test_a_whole_source_is_laid_where_the_choice_says(model, left, hooked):
    for site in SITES:
        source = torch.randn(
            model.run(left, cache=[site]).cache[site].shape,
            generator=torch.Generator().manual_seed(0),
        )

        def change(x, source=source):
            x[left.select("image")] = source[left.select("image")]
            return x

        patched = model.run(left, edits=[Patch(site, source, Where(tokens="image"))]).logits
        torch.testing.assert_close(patched, hooked(model, left, {site: change}))


def test_a_span_that_some_rows_lack_is_patched_in_the_others(model, prompts, left, hooked):
    site = "blocks.1.resid_pre"
    source = torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(0))

    def change(x):
        x[2, left.select("left")[2]] = source[2]
        return x

    patched = model.run(left, edits=[Patch(site, source, Where(tokens="left"))]).logits
    torch.testing.assert_close(patched, hooked(model, left, {site: change}))


def test_one_row_serves_all(model, prompts, left, hooked):
    site = "blocks.0.attn.z"
    source = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))

    def change(x):
        x[left.select("last")] = source[0, 0]
        return x

    patched = model.run(left, edits=[Patch(site, source, Where(tokens="last"))]).logits
    torch.testing.assert_close(patched, hooked(model, left, {site: change}))


def test_a_prompt_sized_source_leaves_new_tokens_alone(model, left, hooked):
    site, longer = "blocks.1.resid_pre", left.extend(torch.tensor([[7, 8]] * 3))
    source = torch.randn(3, 43, 24, generator=torch.Generator().manual_seed(0))

    def change(x):
        x[:, :43][left.mask] = source[left.mask]
        return x

    expected = hooked(model, longer, {site: change})
    torch.testing.assert_close(model.run(longer, edits=[Patch(site, source)]).logits, expected)


def test_a_source_for_new_tokens_may_be_as_long_as_the_prompt(model, prompts, hooked):
    site, batch = "blocks.1.resid_pre", model.encode(prompts[1:2])
    longer = batch.extend(torch.full((1, 9), 7))
    source = torch.randn(1, 9, 24, generator=torch.Generator().manual_seed(0))

    def change(x):
        x[:, 9:] = source
        return x

    patched = model.run(longer, edits=[Patch(site, source, Where(tokens="new"))]).logits
    torch.testing.assert_close(patched, hooked(model, longer, {site: change}))


# --- patterns -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pattern", "attn_scores"])
def test_a_pattern_is_patched_where_queries_keys_and_heads_say(model, left, prompts, name, hooked):
    site = f"blocks.1.attn.{name}"
    other = model.encode([prompts[2], prompts[1], prompts[2]])  # as wide as `left`
    source = model.run(other, cache=[site]).cache[site]
    last, columns = [23, 8, 42], [left.mask[row].nonzero()[:, 0] for row in range(3)]

    def change(x):
        for row in range(3):
            query = columns[row][last[row]]
            for key in (0, 3, 5):
                x[row, 2, query, columns[row][key]] = source[row, 2, query, columns[row][key]]
        return x

    where = Where(queries="last", keys=[0, 3, 5], heads=2)
    expected = hooked(model, left, {site: change})
    torch.testing.assert_close(model.run(left, edits=[Patch(site, source, where)]).logits, expected)
    selected = model.run(other, cache=[site], cache_at="last").cache[site]
    assert selected.shape == (3, 4, 1, 43)
    torch.testing.assert_close(
        model.run(left, edits=[Patch(site, selected, where)]).logits, expected
    )


def test_a_prompts_pattern_leaves_new_tokens_alone(model, left, hooked):
    site, longer = "blocks.1.attn.pattern", left.extend(torch.tensor([[7, 8]] * 3))
    source = model.run(left, cache=["blocks.0.attn.pattern"]).cache["blocks.0.attn.pattern"]

    def change(x):
        for row in range(3):
            columns = left.mask[row].nonzero()[:, 0]
            x[row, :, columns[:, None], columns] = source[row, :, columns[:, None], columns]
        return x

    patched = model.run(longer, edits=[Patch(site, source)]).logits
    torch.testing.assert_close(patched, hooked(model, longer, {site: change}))


# --- the tower ------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["vision.blocks.1.attn.z", "vision.embed", "projector"])
def test_patches_of_the_tower_are_patched_whole_or_chosen(model, left, prompts, site, hooked):
    other = model.run(model.encode([prompts[2], prompts[0]]), cache=[site]).cache[site]
    chosen = [[5, 0], [], [7]]

    def change(x):
        flat = (x := x.contiguous()).view(other.shape)
        for place in (5, 0, 32 + 7):
            flat[place] = other[place]
        return x

    expected = hooked(model, left, {site: change})
    where = Where(patches=chosen)
    torch.testing.assert_close(model.run(left, edits=[Patch(site, other, where)]).logits, expected)
    selection = other[[5, 0, 39]]
    patched = model.run(left, edits=[Patch(site, selection, where)]).logits
    torch.testing.assert_close(patched, expected)


def test_the_towers_pattern_is_patched(model, left, prompts, hooked):
    site = "vision.blocks.1.attn.pattern"
    other = model.run(model.encode([prompts[2], prompts[0]]), cache=[site]).cache[site]

    def change(x):
        x[:, :, 3, 4] = other[:, :, 3, 4]
        return x

    patched = model.run(left, edits=[Patch(site, other, Where(queries=3, keys=4))]).logits
    torch.testing.assert_close(patched, hooked(model, left, {site: change}))


def test_patching_the_whole_projector_shows_the_other_picture(model, pixels):
    ours, theirs = (model.encode([Prompt(pixels(s), "How many ?")]) for s in (0, 1))
    other = model.run(theirs, cache=["projector"])
    patched = model.run(ours, edits=[Patch("projector", other.cache["projector"])])
    assert torch.equal(patched.logits, other.logits)
