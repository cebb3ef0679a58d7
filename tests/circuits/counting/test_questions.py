"""Questions and answers of the counting study."""

import json

import numpy as np
import pytest
import torch

from circuits.counting.boards import draw_boards, draw_strings, render
from circuits.counting.questions import QUESTIONS, Asker, letters, number_of_c, vocabulary
from interp.errors import InputError
from interp.toy.prompts import normalised


@pytest.fixture(scope="module")
def asker(small_subject) -> Asker:
    return Asker(small_subject.number)


@pytest.mark.parametrize("task", ["number", "truth"])
@pytest.mark.parametrize("modality", ["vision", "text"])
def test_a_batch_of_boards_equals_the_encoded_prompts_with_rendered_pictures(asker, task, modality):
    counts = np.array([0, 3, 7, 9])
    items = (
        draw_boards(counts, size=4, spread=2, seed=1, split="train")
        if modality == "vision"
        else draw_strings(counts, length=16, seed=1, split="train")
    )
    strings = draw_strings(counts, length=16, seed=2, split="train")
    own = (items,) if task == "number" else (items, strings)
    batch = getattr(asker, task)(modality, *own)
    prompts = [asker.prompt(task, modality, *parts) for parts in zip(*own, strict=True)]
    encoded = asker.model.encode(prompts)
    assert torch.equal(batch.tokens, encoded.tokens)
    assert torch.equal(batch.positions, encoded.positions)
    assert batch.layout.spans == encoded.layout.spans
    for name in ("row", "image", "tile", "y", "x", "token", "box"):
        assert torch.equal(getattr(batch.patches, name), getattr(encoded.patches, name)), name
    run, expected = asker.model.run(batch), asker.model.run(encoded)
    torch.testing.assert_close(run.logits, expected.logits, atol=1e-6, rtol=0)


def test_looking_patches_up_equals_convolving_the_rendered_picture(asker):
    boards = draw_boards(np.array([5, 8]), size=4, spread=2, seed=3, split="test")
    batch = asker.number("vision", boards)
    pixels = torch.from_numpy(np.stack([render(board) for board in boards]))
    planes = normalised(pixels.permute(0, 3, 1, 2))
    vision = asker.model.raw.vision
    kernel = vision.W_patch.T.reshape(-1, 3, 14, 14)
    convolved = torch.nn.functional.conv2d(planes, kernel, vision.b_patch, stride=14)
    embedded = (batch.inputs["kinds"] @ vision.W_patch + vision.b_patch)[batch.inputs["patches"]]
    torch.testing.assert_close(embedded, convolved.flatten(2).mT, atol=2e-5, rtol=0)


def test_a_question_has_the_published_words(asker, shared_data):
    records = (shared_data / "counting" / "testing_data_formal.jsonl").read_text().splitlines()
    asked = json.loads(records[0])["question"]
    for (task, modality), words in QUESTIONS.items():
        kind = {"vision": "multimodal", "text": "text_only"}[modality]
        assert words == asked[f"{kind}_{'num' if task == 'number' else 'tf'}"]


def test_numbers_are_two_digits_and_an_end_and_read_back(asker):
    counts = np.array([0, 7, 42, 99])
    answers = asker.number_answer(counts)
    assert asker.model.decode(answers) == ["0 0 <eos>", "0 7 <eos>", "4 2 <eos>", "9 9 <eos>"]
    assert asker.read_number(answers).tolist() == counts.tolist()


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("4 2", 42),
        ("4 2 <eos> <eos>", 42),
        ("4 <eos> <eos> <eos>", -1),
        ("4 2 1 <eos>", 421),
        ("1 0 0", 100),
        ("0 4 2 <eos>", -1),
        ("4 2 1 0", -1),
        ("a 2 <eos> <eos>", -1),
        ("<eos> 4 2 <eos>", -1),
    ],
)
def test_two_digits_or_three_without_a_leading_zero_and_then_the_end_are_a_number(
    asker, words, number
):
    tokens = torch.tensor([asker.model.tokenizer(words)])
    assert asker.read_number(tokens).tolist() == [number]


def test_numbers_from_100_on_are_three_digits_and_an_end_and_read_back(asker):
    counts = np.array([100, 107, 120])
    answers = asker.number_answer(counts)
    assert asker.model.decode(answers) == ["1 0 0 <eos>", "1 0 7 <eos>", "1 2 0 <eos>"]
    assert asker.read_number(answers).tolist() == counts.tolist()


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([3, 100], "counts 3 and 100 have answers of two and of three digits"),
        ([1000], "count 1000 has no answer"),
        ([-1, 5], "count -1 has no answer"),
    ],
)
def test_counts_that_have_no_answer_of_one_length_are_refused(asker, counts, said):
    with pytest.raises(InputError, match=said):
        asker.number_answer(np.array(counts))


def test_truth_answers_are_one_word_and_an_end(asker):
    answers = asker.truth_answer(np.array([True, False]))
    assert asker.model.decode(answers) == ["True <eos>", "False <eos>"]


def test_letters_and_their_number_belong_together():
    strings = np.array([[0, 2, 1, 2], [2, 2, 2, 2]], dtype=np.int8)
    assert [letters(s) for s in strings] == ["acbc", "cccc"]
    assert number_of_c(strings).tolist() == [2, 4]


def test_an_unknown_modality_and_a_missing_string_are_refused(asker):
    boards = draw_boards(np.array([2]), size=4, spread=2, seed=0, split="train")
    with pytest.raises(InputError, match="no modality 'sound'"):
        asker.number("sound", boards)
    with pytest.raises(InputError, match="needs the string"):
        asker.prompt("truth", "vision", boards[0])


def test_every_word_of_the_vocabulary_stands_once():
    words = vocabulary()
    assert len(words) == len(set(words))
