"""Each kind of edit against a change written out by hand in a plain torch hook."""

import itertools

import numpy as np
import pytest
import torch

from interp.errors import InputError
from interp.interventions import Ablate, Mask, Patch, Project, Steer, Where
from interp.model import Prompt

SITE = "blocks.1.attn.z"
RAMP = torch.arange(24.0) / 10


def same(a, b):
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def real(batch, row: int) -> list[int]:
    """Columns of a row's real tokens, in order."""
    return batch.mask[row].nonzero()[:, 0].tolist()


# Choices of tokens, and the absolute positions that they mean for rows of 24, 9 and 43 tokens.
IMAGE = [list(range(2, 18)), [], [*range(4, 20), *range(23, 39)]]
TOKENS = {
    "image": ("image", IMAGE),
    "text": (
        "text",
        [[i for i in range(n) if i not in im] for n, im in zip((24, 9, 43), IMAGE, strict=True)],
    ),
    "last": ("last", [[23], [8], [42]]),
    "answer": ("answer", [[23], [8], [42]]),
    "prompt": ("prompt", [list(range(n)) for n in (24, 9, 43)]),
    "all": (None, [list(range(n)) for n in (24, 9, 43)]),
    "span of two rows": ("string", [[], [3, 4, 5, 6], [1, 2]]),
    "span of a picture": ("left", [[], [], list(range(4, 20))]),
    "one position": (3, [[3], [3], [3]]),
    "positions": ([0, 5], [[0, 5]] * 3),
    "negative positions": ([-1, 0, -3], [[23, 0, 21], [8, 0, 6], [42, 0, 40]]),
    "array": (np.array([2, 4]), [[2, 4]] * 3),
    "tensor": (torch.tensor([2, 4]), [[2, 4]] * 3),
    "range": (range(1, 4), [[1, 2, 3]] * 3),
    "positions a row": ([[1], [], [2, -1]], [[1], [], [2, 42]]),
}


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_are_chosen_as_documented(model, batch, hooked, name):
    choice, positions = TOKENS[name]

    def change(x):
        for row, chosen in enumerate(positions):
            for position in chosen:
                x[row, real(batch, row)[position]] += 1.5 * RAMP
        return x

    edit = Steer("blocks.1.resid_pre", RAMP, scale=1.5, where=Where(tokens=choice))
    same(
        model.run(batch, edits=[edit]).logits, hooked(model, batch, {"blocks.1.resid_pre": change})
    )


def test_a_mask_chooses_tokens(model, batch, hooked):
    mask = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0)) < 0.4
    mask &= batch.mask

    def change(x):
        x[mask] = 0
        return x

    expected = hooked(model, batch, {SITE: change})
    for choice in (mask, mask.numpy()):
        same(model.run(batch, edits=[Ablate(SITE, Where(tokens=choice))]).logits, expected)


def test_heads_are_chosen_at_any_site_that_has_them(model, batch, hooked):
    for site, heads in itertools.product(
        ["blocks.0.attn.q", "blocks.1.attn.v", "vision.blocks.1.attn.z"], [0, [1], (0, 1)]
    ):

        def change(x, heads=heads):
            x[..., [heads] if isinstance(heads, int) else list(heads), :] = 0
            return x

        expected = hooked(model, batch, {site: change})
        # a pad has a zeroed query, key and value too in `expected`; nothing sees them
        same(model.run(batch, edits=[Ablate(site, Where(heads=heads))]).logits, expected)
    arrays = [Where(heads=np.array([1, 3])), Where(heads=torch.tensor([1, 3])), Where(heads=[1, 3])]
    logits = [model.run(batch, edits=[Ablate(SITE, where)]).logits for where in arrays]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_tokens_and_heads_are_chosen_together(model, batch, hooked):
    def change(x):
        for row, position in enumerate((23, 8, 42)):
            x[row, real(batch, row)[position], 2] = 0
        return x

    edit = Ablate(SITE, Where(tokens="last", heads=2))
    same(model.run(batch, edits=[edit]).logits, hooked(model, batch, {SITE: change}))


def test_a_mean_has_the_last_axes_of_its_site(model, batch, hooked):
    generator = torch.Generator().manual_seed(1)
    for shape in [
        (),
        (8,),
        (4, 8),
        (batch.tokens.shape[1], 4, 8),
        (3, batch.tokens.shape[1], 4, 8),
    ]:
        mean = torch.randn(shape, generator=generator)

        def change(x, mean=mean):
            keep = x.clone()
            x[:] = mean
            x[:, :, [0, 1, 3]] = keep[:, :, [0, 1, 3]]
            return x

        edit = Ablate(SITE, Where(heads=2), mean=mean)
        same(model.run(batch, edits=[edit]).logits, hooked(model, batch, {SITE: change}))


def test_mean_ablation_with_the_heads_own_value_changes_nothing(model, prompts):
    batch = model.encode(prompts[:1])
    clean = model.run(batch, cache=[SITE])
    own = clean.cache[SITE][0, -1, 2]
    edited = model.run(batch, edits=[Ablate(SITE, Where(tokens="last", heads=2), mean=own)])
    assert torch.equal(edited.logits, clean.logits)


def test_steering_adds_the_direction_times_its_scale(model, batch, hooked):
    direction = torch.randn(24, generator=torch.Generator().manual_seed(2))

    def change(x):
        for row in range(3):
            x[row, real(batch, row)] += -2.5 * direction
        return x

    edit = Steer("blocks.0.mlp_out", direction, scale=-2.5)
    same(model.run(batch, edits=[edit]).logits, hooked(model, batch, {"blocks.0.mlp_out": change}))


@pytest.mark.parametrize("site, width", [("blocks.1.resid_mid", 24), (SITE, 8), ("projector", 24)])
def test_projecting_multiplies_each_vector_by_the_matrix(model, batch, hooked, site, width):
    matrix = torch.randn(width, width, generator=torch.Generator().manual_seed(3)) / width**0.5

    def change(x):
        return torch.stack([matrix @ v for v in x.flatten(0, -2)]).reshape(x.shape)

    same(
        model.run(batch, edits=[Project(site, matrix)]).logits,
        hooked(model, batch, {site: change}),
    )


def test_edits_of_one_site_apply_in_their_order(model, batch):
    direction = torch.randn(24, generator=torch.Generator().manual_seed(5))
    add = Steer("blocks.1.resid_pre", direction)
    double = Project("blocks.1.resid_pre", 2 * torch.eye(24))
    add_two = Steer("blocks.1.resid_pre", direction, scale=2.0)
    logits = [
        model.run(batch, edits=edits).logits
        for edits in ([add, double], [double, add_two], [double, add])
    ]
    same(logits[0], logits[1])
    assert (logits[0] - logits[2]).abs().max() > 1e-3


def test_what_is_kept_is_what_the_edits_made(model, batch):
    steer = Steer("blocks.1.resid_pre", torch.ones(24), where=Where(tokens="last"))
    site = "blocks.1.resid_pre"
    clean, edited = (model.run(batch, edits=e, cache=[site]).cache[site] for e in ([], [steer]))
    last = batch.select("last")
    same(edited[last], clean[last] + 1)
    assert torch.equal(edited[~last], clean[~last])


# --- patterns and scores ------------------------------------------------------------------------


def pattern_change(batch, choose_query, choose_key, value):
    """Sets the cells of real tokens that the rule chooses, if the key is not later."""

    def change(x):
        for row in range(len(batch)):
            columns = real(batch, row)
            for (q, query), (k, key) in itertools.product(enumerate(columns), enumerate(columns)):
                if k <= q and choose_query(row, q) and choose_key(row, k):
                    x[row, :, query, key] = value
        return x

    return change


def test_queries_and_keys_of_a_pattern_are_chosen_by_role(model, batch, hooked):
    site, last = "blocks.1.attn.pattern", (23, 8, 42)
    change = pattern_change(
        batch, lambda row, q: q == last[row], lambda row, k: k in IMAGE[row], 0.0
    )
    edit = Ablate(site, Where(queries="last", keys="image"))
    same(model.run(batch, edits=[edit]).logits, hooked(model, batch, {site: change}))


def test_heads_of_a_pattern_are_chosen(model, batch, hooked):
    site = "blocks.1.attn.pattern"
    change = pattern_change(batch, lambda row, q: True, lambda row, k: k == 0, 0.25)
    kept = [0, 2]

    def one_head(x):
        clean, changed = x.clone(), change(x)
        changed[:, kept] = clean[:, kept]
        return changed

    edit = Ablate(site, Where(keys=0, heads=[1, 3]), mean=torch.tensor(0.25))
    same(model.run(batch, edits=[edit]).logits, hooked(model, batch, {site: one_head}))


def test_a_constant_pattern_reaches_neither_pads_nor_later_tokens(model, prompts, batch):
    edit = Ablate("blocks.0.attn.pattern", mean=torch.tensor(0.1))
    together = model.run(batch, edits=[edit], cache=["blocks.0.attn.pattern"])
    for row, prompt in enumerate(prompts):
        alone = model.run(model.encode([prompt]), edits=[edit]).logits[0]
        torch.testing.assert_close(together.logits[row], alone, atol=2e-5, rtol=1e-5)
    kept = together.cache["blocks.0.attn.pattern"]
    assert (kept.triu(1) == 0).all()


def test_scores_at_the_floor_equal_a_key_that_is_hidden(model, reference, batch):
    site = "blocks.1.attn.attn_scores"
    floor = torch.tensor(torch.finfo(torch.float32).min)
    logits = model.run(batch, edits=[Ablate(site, Where(keys=[1, 2]), mean=floor)]).logits
    for row in range(3):
        expected = reference.logits(batch, row, hidden=[1, 2], layers=[1])[-1].float()
        torch.testing.assert_close(logits[row, 0], expected, atol=2e-5, rtol=1e-5)


def test_edited_scores_make_a_softmax_over_the_keys_that_can_be_seen(model, batch):
    site, pattern = "blocks.1.attn.attn_scores", "blocks.1.attn.pattern"
    kept = model.run(batch, edits=[Ablate(site)], cache=[pattern]).cache[pattern]
    for row in range(3):
        columns = real(batch, row)
        n = len(columns)
        uniform = torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None]
        same(kept[row][:, columns][:, :, columns], uniform.expand(4, n, n))


@pytest.mark.parametrize(
    "site", ["vision.blocks.0.attn.pattern", "vision.blocks.1.attn.attn_scores"]
)
def test_the_towers_patterns_are_chosen_by_places_of_patches(model, batch, hooked, site):
    def change(x):
        x[0, 1, [3, 4], 7] = x[1, 1, 5, 7] = x[2, 1, 15, 7] = 0.5
        return x

    where = Where(queries=[[3, 4], [5], [15]], keys=[7], heads=1)
    edit = Ablate(site, where, mean=torch.tensor(0.5))
    same(model.run(batch, edits=[edit]).logits, hooked(model, batch, {site: change}))


# --- the tower ----------------------------------------------------------------------------------

PATCHES = {
    "all": (None, [range(16)] * 3),
    "one": (5, [[5]] * 3),
    "some": ([0, 15], [[0, 15]] * 3),
    "some of each picture": ([[0], [], [3, 4]], [[0], [], [3, 4]]),
    "array": (np.array([1, 2]), [[1, 2]] * 3),
}


@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.parametrize("site", ["vision.embed", "vision.blocks.1.resid_mid", "projector"])
def test_patches_are_chosen_as_documented(model, left, hooked, site, name):
    choice, places = PATCHES[name]

    def change(x):
        for image, chosen in enumerate(places):
            x[image, list(chosen)] = 0
        return x

    edit = Ablate(site, Where(patches=choice))
    same(model.run(left, edits=[edit]).logits, hooked(model, left, {site: change}))


def test_a_mask_chooses_patches(model, batch, hooked):
    mask = torch.arange(48) % 5 == 0

    def change(x):
        x.view(48, -1)[mask] = 0
        return x

    edit = Ablate("projector", Where(patches=mask))
    same(model.run(batch, edits=[edit]).logits, hooked(model, batch, {"projector": change}))


def test_an_edit_of_the_projector_equals_one_of_the_picture_tokens(model, batch):
    steer = torch.randn(24, generator=torch.Generator().manual_seed(4))
    edits = [Steer("projector", steer), Steer("embed", steer, where=Where(tokens="image"))]
    same(*(model.run(batch, edits=[edit]).logits for edit in edits))


# --- misuse -------------------------------------------------------------------------------------

PATTERN = "blocks.0.attn.pattern"
MISUSE = {
    "an axis that the site lacks": (
        lambda: Ablate("blocks.0.resid_pre", Where(heads=0)),
        r"heads=.*blocks\.0\.resid_pre.*batch pos d_model.*choose by tokens",
    ),
    "tokens of a pattern": (
        lambda: Ablate(PATTERN, Where(tokens="last")),
        "choose by heads, queries",
    ),
    "tokens in the tower": (
        lambda: Ablate("vision.blocks.0.attn.z", Where(tokens="image")),
        "choose by heads, patches",
    ),
    "patches in the decoder": (lambda: Ablate(SITE, Where(patches=0)), "choose by tokens, heads"),
    "queries of a stream": (lambda: Ablate(SITE, Where(queries="last")), "choose by tokens"),
    "no such span": (
        lambda: Ablate(SITE, Where(tokens="bord")),
        "no role or span 'bord'.*answer.*board, end, left, question, right, string",
    ),
    "a position beyond": (
        lambda: Ablate(SITE, Where(tokens=24)),
        "no position 24 in row 0, which has 24",
    ),
    "a position before": (lambda: Ablate(SITE, Where(tokens=-11)), "no position -11 in row 1"),
    "a position twice": (lambda: Ablate(SITE, Where(tokens=[8, -1])), "row 1 twice"),
    "lists for other rows": (lambda: Ablate(SITE, Where(tokens=[[0], [1]])), "each of the 3 rows"),
    "fractions": (lambda: Ablate(SITE, Where(tokens=torch.tensor([0.5]))), "whole numbers"),
    "truth values": (lambda: Ablate(SITE, Where(tokens=[True, False])), "whole numbers"),
    "a mask of another shape": (
        lambda: Ablate(SITE, Where(tokens=torch.ones(3, 5, dtype=torch.bool))),
        r"\(3, 43\) \(batch pos\).*\(3, 5\)",
    ),
    "a mask of pads": (
        lambda: Ablate(SITE, Where(tokens=torch.ones(3, 43, dtype=torch.bool))),
        "chooses pads",
    ),
    "no token": (lambda: Ablate(SITE, Where(tokens=[])), "never fired"),
    "no new token": (lambda: Ablate(SITE, Where(tokens="new")), "never fired"),
    "a key later than its query": (
        lambda: Ablate(PATTERN, Where(queries=[2], keys=[5])),
        "never fired",
    ),
    "no such head": (lambda: Ablate(SITE, Where(heads=4)), r"no head 4 at .*heads 0 to 3"),
    "a head of the decoder": (
        lambda: Ablate("vision.blocks.0.attn.z", Where(heads=2)),
        "heads 0 to 1",
    ),
    "a negative head": (lambda: Ablate(SITE, Where(heads=[-1])), "no head -1"),
    "no such patch": (lambda: Ablate("projector", Where(patches=[16])), "no patch 16 in picture 0"),
    "lists for other pictures": (lambda: Ablate("projector", Where(patches=[[0]])), "3 pictures"),
    "a mask of other patches": (
        lambda: Ablate("projector", Where(patches=torch.ones(16, dtype=torch.bool))),
        r"\(48,\) \(patch\)",
    ),
    "a place of another tower": (
        lambda: Ablate("vision.blocks.0.attn.pattern", Where(keys=[16])),
        "no patch 16",
    ),
    "a mean of another width": (
        lambda: Ablate(SITE, mean=torch.zeros(24)),
        r"mean is \(24,\), the activation is \(3, 43, 4, 8\) \(batch pos head d_head\)",
    ),
    "a direction of another width": (
        lambda: Steer(SITE, torch.zeros(4)),
        r"direction is \(4,\), the activation is \(3, 43, 4, 8\)",
    ),
    "a projection of another width": (
        lambda: Project(SITE, torch.eye(24)),
        r"projection is \(24, 24\).*\(d_head\) has 8",
    ),
    "a patch of another shape": (
        lambda: Patch(SITE, torch.zeros(3, 43, 2, 16)),
        r"source is \(3, 43, 2, 16\), the activation is \(3, 43, 4, 8\) \(batch pos head d_head\)",
    ),
    "a patch without an axis": (
        lambda: Patch(SITE, torch.zeros(43, 4, 8)),
        r"source is \(43, 4, 8\)",
    ),
    "a patch of other rows": (lambda: Patch(SITE, torch.zeros(2, 43, 4, 8)), r"\(2, 43, 4, 8\)"),
    "a patch of other tokens": (
        lambda: Patch(SITE, torch.zeros(3, 2, 4, 8), Where(tokens="last")),
        r"\(3, 2, 4, 8\)",
    ),
    "a patch of some tokens for all": (lambda: Patch(SITE, torch.zeros(3, 1, 4, 8)), "cache_at"),
    "an empty patch": (
        lambda: Patch(SITE, torch.zeros(3, 0, 4, 8), Where(tokens="last")),
        "cache_at",
    ),
    "a patch of other patches": (
        lambda: Patch("projector", torch.zeros(2, 24), Where(patches=0)),
        r"\(2, 24\)",
    ),
    "a pattern of another length": (
        lambda: Patch(PATTERN, torch.zeros(3, 4, 9, 9)),
        r"\(3, 4, 9, 9\)",
    ),
    "a pattern of the tower": (
        lambda: Patch("vision.blocks.0.attn.pattern", torch.zeros(3, 2, 9, 9)),
        r"\(3, 2, 16, 16\) \(image head query key\)",
    ),
    "a mask in the wrong block": (
        lambda: Mask(Where(patches=0), layers=[2]),
        "no block 2 in the tower.*0 to 1",
    ),
    "a mask in no such block": (
        lambda: Mask(Where(tokens=0), layers=3),
        "no block 3 in the decoder",
    ),
    "a mask of nothing": (lambda: Mask(Where(tokens=[])), "Mask never fired"),
    "a mask of text in the tower alone": (
        lambda: Mask(Where(tokens="text"), decoder=False),
        "Mask never fired",
    ),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_refused_in_one_line_that_helps(model, left, name):
    make, message = MISUSE[name]
    with pytest.raises(InputError, match=message) as caught:
        model.run(left, edits=[make()])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Mask(Where()), "chooses by nothing"),
        (lambda: Mask(Where(heads=0)), "chooses by heads; choose by tokens or by patches"),
        (lambda: Mask(Where(tokens="last", heads=0)), "tokens and heads"),
        (lambda: Mask(Where(tokens="last", patches=0)), "tokens and patches"),
        (lambda: Mask(Where(tokens=0), tower=False, decoder=False), "hides nothing"),
        (lambda: Mask(Where(tokens=0), layers=[]), "at least one block"),
    ],
)
def test_a_mask_that_cannot_be_meant_is_refused_when_it_is_made(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_an_edit_of_the_tower_without_a_picture_never_fires(model, prompts):
    batch = model.encode(prompts[1:2])
    for edit in (Ablate("projector"), Ablate("vision.blocks.0.attn.z"), Mask(Where(patches=[]))):
        with pytest.raises(InputError, match="never fired"):
            model.run(batch, edits=[edit])


def test_what_is_read_must_be_as_many_tokens_in_every_row(model, left):
    for what in ("image", "string", "new"):
        for kwargs in ({"logits_at": what}, {"cache": [SITE], "cache_at": what}):
            with pytest.raises(InputError, match="every row has as many"):
                model.run(left, **kwargs)
    with pytest.raises(InputError, match="no position 9 in row 1"):
        model.run(left, logits_at=9)


# --- values -------------------------------------------------------------------------------------


def test_edits_are_equal_by_content():
    makes = [
        lambda x: Ablate(SITE, Where(heads=[1]), mean=torch.tensor([x])),
        lambda x: Patch(SITE, torch.tensor([x])),
        lambda x: Steer(SITE, torch.ones(3), scale=x),
        lambda x: Project(SITE, torch.tensor([[x]])),
        lambda x: Mask(Where(tokens=[int(x)])),
        lambda x: Where(tokens=torch.tensor([x > 1])),
        lambda x: Where(patches=np.array([int(x), 2])),
    ]
    for make in makes:
        assert make(1.0) == make(1.0)
        assert make(1.0) != make(2.0)
    assert Where(tokens=[1]) != Where(tokens=np.array([1]))
    assert Where(tokens="last") != Where(queries="last")
    assert Ablate(SITE) != Steer(SITE, torch.ones(1))
    with pytest.raises(TypeError, match="unhashable"):
        hash(Ablate(SITE))


def test_edits_are_frozen():
    with pytest.raises(AttributeError):
        Ablate(SITE).site = "other"
    with pytest.raises(AttributeError):
        Where().tokens = "last"


def test_not_a_number_outside_the_choice_does_not_leak(model, left):
    source = torch.full((3, 43, 4, 8), torch.nan)
    source[:, :, 1] = 0
    edited = model.run(left, edits=[Patch(SITE, source, Where(heads=1))])
    assert torch.equal(edited.logits, model.run(left, edits=[Ablate(SITE, Where(heads=1))]).logits)


def test_a_run_does_not_change_its_edits(model, left):
    source = model.run(left, cache=[SITE]).cache[SITE]
    direction, projection = torch.ones(8), torch.eye(8) * 2
    before = [x.clone() for x in (source, direction, projection)]
    edits = [Patch(SITE, source), Steer(SITE, direction), Project(SITE, projection)]
    model.run(left, edits=edits, cache=[SITE]).cache[SITE].zero_()
    for value, old in zip((source, direction, projection), before, strict=True):
        assert torch.equal(value, old)


def test_a_prompt_of_one_row_serves_every_choice(model, pixels):
    batch = model.encode([Prompt(pixels(0), "How many ?")])
    assert model.run(batch, edits=[Ablate(SITE, Where(tokens=[[0, 1]]))]).logits.shape == (1, 1, 24)
