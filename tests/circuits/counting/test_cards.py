"""Weights and the card beside them: what belongs together loads, what does not is refused."""

import json
from pathlib import Path

import pytest
import torch

from circuits import presets
from circuits.counting import cards
from circuits.counting.presets import PRESETS
from interp.errors import InputError
from interp.toy import weights


@pytest.fixture
def folder(model_folder) -> Path:
    return model_folder


def test_what_was_saved_loads_bit_for_bit(folder, small_subject):
    model, card = cards.load(folder / "number")
    want = small_subject.number.raw.state_dict()
    assert all(torch.equal(v, want[k]) for k, v in model.raw.state_dict().items())
    assert cards.world_of(card) == small_subject.world
    assert model.config == small_subject.number.config


def test_half_precision_is_widened_on_loading(tmp_path, small_subject):
    (tmp_path / "half").write_bytes(weights.to_bytes(small_subject.number, dtype=torch.float16))
    model = weights.load(tmp_path / "half")
    assert model.raw.W_E.dtype == torch.float32
    assert torch.equal(model.raw.W_E, small_subject.number.raw.W_E.half().float())


def test_a_trained_folder_has_one_seed_and_loads_by_name(folder):
    assert cards.shipped_seeds(str(folder)) == [4]
    assert presets.load(folder, task="truth").config.grid == 4
    with pytest.raises(InputError, match="holds seed 4, not 1"):
        presets.load(folder, seed=1)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [_cut, _flip, _empty, Path.unlink])
def test_weights_that_are_not_those_of_the_card_are_refused(folder, harm):
    harm(folder / "number" / cards.WEIGHTS)
    with pytest.raises(InputError, match=r"does not match its card|is missing") as refused:
        cards.load(folder / "number")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "no card"),
        (b'{"preset": "small"', "no card"),
        (b"[]", "no card"),
        (b"\xff\xfe", "no card"),
        (b'{"preset": "small", "world": {"size": 4}}', "no card|lacks"),
    ],
)
def test_a_card_that_is_broken_is_refused(folder, content, match):
    (folder / "number" / cards.CARD).write_bytes(content)
    with pytest.raises(InputError, match=match):
        cards.load(folder / "number")


def test_a_card_of_another_world_is_refused(folder):
    path = folder / "number" / cards.CARD
    card = json.loads(path.read_text())
    card["world"]["size"] = 5
    path.write_text(json.dumps(card))
    with pytest.raises(InputError, match="says boards of 5, the weights are for 4"):
        cards.load(folder / "number")


def test_a_card_and_weights_of_the_other_task_are_refused(folder):
    for name in (cards.CARD, cards.WEIGHTS):
        (folder / "number" / name).write_bytes((folder / "truth" / name).read_bytes())
    with pytest.raises(InputError, match="is that of a truth model; get the number model"):
        cards.load(folder / "number")


@pytest.mark.parametrize("harm", [_cut, _empty, lambda p: p.write_bytes(b"PK\x03\x04 no weights")])
def test_a_weights_file_alone_that_is_broken_says_so(folder, harm):
    path = folder / "number" / cards.WEIGHTS
    harm(path)
    with pytest.raises(InputError, match="no toy weights, or cut short"):
        weights.load(path)


def test_weights_that_do_not_fit_their_configuration_name_the_tensor(tmp_path, small_subject):
    from safetensors.torch import load, save

    content = weights.to_bytes(small_subject.number)
    tensors = load(content)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    tensors["W_E"] = tensors["W_E"][:-1].contiguous()
    (tmp_path / "odd").write_bytes(save(tensors, header["__metadata__"]))
    with pytest.raises(InputError, match="W_E is"):
        weights.load(tmp_path / "odd")
    tensors["W_E"] = torch.full_like(small_subject.number.raw.W_E, float("nan"))
    (tmp_path / "nan").write_bytes(save(tensors, header["__metadata__"]))
    with pytest.raises(InputError, match="W_E holds values that are not finite"):
        weights.load(tmp_path / "nan")


def test_an_unknown_model_names_the_presets_and_an_unknown_seed_the_seeds():
    with pytest.raises(InputError, match="no preset and no folder 'huge'; presets are tiny"):
        presets.load("huge")
    with pytest.raises(InputError, match="tiny ships no seed 77; it ships 0, 1, 2"):
        presets.load("tiny", seed=77)
    with pytest.raises(InputError, match="task"):
        presets.load("tiny", task="poetry")


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_ships_every_seed_with_its_card(name):
    preset = PRESETS[name]
    assert cards.shipped_seeds(name) == list(preset.seeds)
    for seed in preset.seeds:
        for task in ("number", "truth"):
            model, card = cards.load(cards.model_folder(name, task, seed))
            assert (card["preset"], card["task"], card["seed"]) == (name, task, seed)
            assert model.config == preset.config
            assert card["recipe"] == cards.as_json(preset.recipes[task])
            assert cards.world_of(card) == preset.world


def test_all_weights_together_stay_under_twenty_megabytes():
    assert sum(path.stat().st_size for path in cards.SHIPPED.rglob("*.safetensors")) < 20_000_000


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_card_of_a_shipped_number_model_states_scores_that_are_measured_again(seed):
    from circuits.counting.questions import Asker
    from circuits.counting.training import Lessons, scores

    model, card = cards.load(cards.model_folder("tiny", "number", seed))
    lessons = Lessons(Asker(model), cards.world_of(card), "number", seed, 0.0)
    model.raw.set_use_fused_attention(True)
    found = scores(model, lessons)
    for key, value in card["scores"].items():
        assert found[key] == pytest.approx(value, abs=0.006), key  # a near tie may turn over
    assert found["vision.ve"] <= 0.3 and found["text.ve"] >= 0.99
    assert found["vision.id"] >= 0.99 and found["text.id"] >= 0.99
