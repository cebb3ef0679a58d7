"""Prompts to batches: every token, span and patch in its place, and nothing taken silently."""

import numpy as np
import pytest
import torch
from PIL import Image

from interp.errors import InputError
from interp.layout import Span, integers
from interp.model import HookedVLM, Picture, Prompt, Text, as_pixels, generate
from interp.toy import ToyConfig, ToyVLM
from interp.toy.config import SPECIAL
from interp.toy.vlm import normalised


def words(model, batch, row: int) -> str:
    return " ".join(model.config.words[t] for t in batch.tokens[row, batch.mask[row]])


def test_a_prompt_is_bos_and_its_segments_with_pictures_framed(model, batch):
    picture = " ".join(["<image_start>", *["<image>"] * 16, "<image_end>"])
    assert words(model, batch, 0) == f"<bos> {picture} How many black stones ?"
    assert words(model, batch, 1) == "<bos> How many a b b a stones ?"
    assert words(model, batch, 2) == f"<bos> a b {picture} black {picture} How many ?"
    assert model.decode(batch.tokens)[1] == "<bos> How many a b b a stones ?"


def test_pads_stand_on_the_side_that_was_asked_for(model, prompts):
    left, right = (model.encode(prompts, padding_side=side).mask for side in ("left", "right"))
    lengths = [24, 9, 43]
    assert left.sum(1).tolist() == right.sum(1).tolist() == lengths
    assert all(left[i, 43 - n :].all() and right[i, :n].all() for i, n in enumerate(lengths))


def test_spans_are_absolute_whatever_the_padding(batch):
    assert batch.layout.spans == (
        {"board": Span(2, 18), "question": Span(19, 24)},
        {"string": Span(3, 7), "end": Span(7, 9)},
        {
            "string": Span(1, 3),
            "left": Span(4, 20),
            "right": Span(23, 39),
            "question": Span(40, 43),
        },
    )


def test_the_patch_table_says_where_every_patch_is(batch, config):
    table, p = batch.patches, config.patch
    assert len(table) == 48 and table.n_images == 3
    expected = [
        (row, image, y, x, first + 4 * y + x, [p * x, p * y, p * (x + 1), p * (y + 1)])
        for image, (row, first) in enumerate([(0, 2), (2, 4), (2, 23)])
        for y in range(4)
        for x in range(4)
    ]
    found = [
        (
            int(table.row[i]),
            int(table.image[i]),
            int(table.y[i]),
            int(table.x[i]),
            int(table.token[i]),
            table.box[i].tolist(),
        )
        for i in range(48)
    ]
    assert found == expected
    assert table.index.tolist() == [*range(16)] * 3 and not table.tile.any()


def test_the_table_leads_from_patches_to_tokens_and_back(model, batch):
    chosen = batch.layout.patch_mask([[0], [1, 2], [15]])
    tokens = batch.layout.image_tokens(chosen)
    assert tokens.sum() == 4
    assert (batch.tokens[tokens] == model.raw.image_token).all()
    assert torch.equal(batch.layout.patches_of(tokens), chosen)


def test_each_patch_is_the_box_of_its_picture(model, prompts, batch):
    pictures = [s.pixels for prompt in prompts for s in prompt.segments if isinstance(s, Picture)]
    table, inputs = batch.patches, batch.inputs
    for i in range(len(table)):
        x0, y0, x1, y1 = table.box[i]
        image = int(table.image[i])
        box = pictures[image][y0:y1, x0:x1].transpose(2, 0, 1).reshape(-1)
        kind = inputs["kinds"][inputs["patches"][image, table.index[i]]]
        torch.testing.assert_close(kind, normalised(torch.from_numpy(box.copy())))


def test_equal_patches_are_kept_once(model):
    flat = np.zeros((12, 12, 3), dtype=np.uint8)
    flat[:3, :3] = 255
    batch = model.encode([Prompt(flat, "a"), Prompt(flat, "b")])
    assert batch.inputs["kinds"].shape == (2, 27) and batch.inputs["patches"].shape == (2, 16)
    assert batch.inputs["kinds"].unique().tolist() == [-1, 1]


def test_pil_images_and_arrays_are_the_same_picture(model, pixels):
    array = pixels(3)
    rgba = np.concatenate([array, np.full((12, 12, 1), 255, np.uint8)], 2)
    logits = [
        model.run(model.encode([Prompt(picture, "How many ?")])).logits
        for picture in (
            array,
            Image.fromarray(array),
            Image.fromarray(rgba),
            torch.from_numpy(array),
        )
    ]
    assert all(torch.equal(x, logits[0]) for x in logits)


def test_segments_may_be_given_as_one_list(model, pixels):
    parts = ["How many", Picture(pixels(0), "board"), Text("?", "end")]
    a, b = model.encode([Prompt(*parts)]), model.encode([Prompt(parts)])
    assert torch.equal(a.tokens, b.tokens) and a.layout.spans == b.layout.spans
    assert torch.equal(model.encode(Prompt(*parts)).tokens, a.tokens)


def test_an_empty_text_is_an_empty_span(model):
    batch = model.encode([Prompt("How", Text("", "string"), "?")])
    assert batch.layout.spans[0]["string"] == Span(2, 2) and not batch.select("string").any()


BAD_PIXELS = {
    "grey": np.zeros((12, 12), np.uint8),
    "one channel": np.zeros((12, 12, 1), np.uint8),
    "four channels": np.zeros((12, 12, 4), np.uint8),
    "fractions": np.zeros((12, 12, 3), np.float32),
    "sixteen bits": np.zeros((12, 12, 3), np.uint16),
    "channels first": np.zeros((3, 12, 12), np.uint8),
    "nothing": None,
    "a number": 5,
}


@pytest.mark.parametrize("name", BAD_PIXELS)
def test_what_is_no_picture_is_refused(model, name):
    with pytest.raises(InputError, match="height x width x 3 of uint8") as caught:
        model.encode([Prompt(BAD_PIXELS[name], "a")])
    assert "\n" not in str(caught.value)


def test_a_picture_of_another_size_is_refused(model, pixels):
    with pytest.raises(
        InputError, match=r"15 x 12 pixels; this model sees 12 x 12 \(4 x 4 patches of 3"
    ):
        model.encode([Prompt(np.zeros((12, 15, 3), np.uint8), "a")])
    assert as_pixels(pixels(0)).shape == (12, 12, 3)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Prompt(), "at least one segment"),
        (lambda: Prompt([]), "at least one segment"),
        (lambda: Prompt(Text("a", "image")), "'image' is a role"),
        (lambda: Prompt(Text("a", "answer")), "'answer' is a role"),
        (lambda: Prompt(Text("a", "x"), Text("b", "x")), "'x' is given twice"),
    ],
)
def test_a_prompt_that_cannot_be_addressed_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([], "at least one Prompt"),
        ([Prompt("How lots ?")], "no word 'lots' in the vocabulary of 24: 0 1 2"),
        ([Prompt("How", "manyx")], "no word 'manyx'"),
        ([Prompt("<image> How many ?")], "a picture as a segment of its own"),
        ([Prompt("<pad>")], "<pad> in a text"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(model, prompts, message):
    with pytest.raises(InputError, match=message) as caught:
        model.encode(prompts)
    assert "\n" not in str(caught.value)


def test_padding_has_two_sides(model, prompts):
    with pytest.raises(InputError, match="'middle'.*'left' or 'right'"):
        model.encode(prompts, padding_side="middle")


def test_a_vocabulary_holds_every_word_once():
    with pytest.raises(InputError, match="lacks <image>"):
        ToyConfig(tuple(w for w in SPECIAL if w != "<image>"))
    with pytest.raises(InputError, match="names a word twice"):
        ToyConfig((*SPECIAL, "a", "a"))


def test_words_split_into_known_characters(model):
    tokenizer = model.tokenizer
    assert tokenizer("abba 07") == [tokenizer.id(c) for c in "abba07"]
    assert tokenizer("") == [] and tokenizer.digits == [tokenizer.id(d) for d in "0123456789"]
    assert tokenizer.decode(torch.tensor([tokenizer.pad, *tokenizer("How many")])) == "How many"
    with pytest.raises(InputError, match="no word 'no'"):
        tokenizer.id("no")


def test_the_toy_is_a_hooked_vlm(model):
    assert isinstance(model, HookedVLM)
    assert model.cfg.n_heads == 4 and model.cfg.vision.n_heads == 2 and model.cfg.d_vocab == 24


def test_a_model_is_built_again_from_its_spec(config):
    model = ToyVLM(config, seed=3)
    spec = model.spec
    again = ToyVLM(ToyConfig.from_dict(spec.config["config"]), seed=spec.config["seed"])
    assert spec.backend == "toy" and again.config == config
    for name, value in model.raw.state_dict().items():
        assert torch.equal(again.raw.state_dict()[name], value)


def test_a_head_is_asked_for_where_there_is_one(model):
    assert model.head_out(2).shape == (4, 8, 24) and model.head_out(1, "vision").shape == (2, 8, 20)
    for layer, tower in ((3, "decoder"), (2, "vision"), (-1, "decoder"), (0, "projector")):
        with pytest.raises(InputError, match="decoder has 3 blocks, vision 2"):
            model.head_out(layer, tower)


def test_whole_numbers_are_told_from_the_rest():
    assert integers(3) == [3] and integers(range(2)) == [0, 1] and integers(np.int64(4)) == [4]
    assert integers(torch.tensor([1, 2])) == [1, 2] and integers(()) == []
    for other in (True, [True], 1.0, [0.5], "3", ["3"], None, [[1]], torch.tensor([1.5])):
        assert integers(other) is None


def test_numbers_of_new_tokens_do_not_change_the_prompt(model, prompts):
    batch = model.encode(prompts[:1])
    longer = batch.extend(generate(model, batch, max_new_tokens=3))
    assert longer.layout.n_prompt == 24 and longer.layout.n_new == 3 and batch.layout.n_new == 0
    assert torch.equal(longer.select("last")[:, :24], batch.select("last"))


@pytest.mark.parametrize("text", ["", "   ", "a " * 4096])
def test_an_empty_prompt_and_one_beyond_the_context_are_refused(model, text):
    with pytest.raises(InputError, match=r"a prompt of (1|4097) tokens.*give 2 to 4096"):
        model.encode([Prompt(text)])
    assert model.encode([Prompt("a " * 4095)]).tokens.shape == (1, 4096)
