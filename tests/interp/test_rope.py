"""M-RoPE against Qwen2.5-VL of transformers: the rotation, and the positions of a prompt."""

import numpy as np
import pytest
import torch

from interp.errors import InputError
from interp.model import Prompt
from interp.toy.config import StackConfig
from interp.toy.rope import rotary, rotate


def qwen_config(d_head: int, sections, theta: float = 10000.0):
    from transformers import Qwen2_5_VLConfig

    return Qwen2_5_VLConfig(
        text_config=dict(
            hidden_size=2 * d_head,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=32,
            rope_parameters=dict(
                rope_type="default", rope_theta=theta, mrope_section=list(sections)
            ),
        ),
        vision_config=dict(
            depth=1,
            hidden_size=8,
            intermediate_size=8,
            num_heads=1,
            out_hidden_size=2 * d_head,
            spatial_merge_size=1,
            patch_size=2,
            window_size=4,
        ),  # fmt: skip
        image_token_id=3,
        vision_start_token_id=4,
        vision_end_token_id=5,
    )


@pytest.fixture(scope="module")
def qwen():
    """The part of Qwen2.5-VL that gives positions: tiny, random, one patch a token."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

    return qwen.Qwen2_5_VLModel(qwen_config(16, (2, 3, 3)))


@pytest.mark.parametrize("d_head, theta", [(4, 1e4), (8, 1e4), (16, 1e4), (16, 1e6), (64, 1e6)])
def test_rotation_equals_qwens(d_head, theta):
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 500, (3, 2, 9), generator=generator)
    q, k = torch.randn(2, 2, 9, 5, d_head, generator=generator)
    sections = StackConfig(d_head=d_head).rotary_sections
    assert sum(sections) == d_head // 2
    embedding = qwen.Qwen2_5_VLRotaryEmbedding(qwen_config(d_head, sections, theta).text_config)
    cos, sin = embedding(q, positions)
    by_head = (x.transpose(1, 2) for x in (q, k))
    expected = qwen.apply_rotary_pos_emb(*by_head, cos, sin)
    by = rotary(positions, sections, theta)
    for ours, theirs in zip((rotate(q, by), rotate(k, by)), expected, strict=True):
        assert torch.equal(ours, theirs.transpose(1, 2))


def test_a_quarter_of_the_channels_follows_time_as_in_qwen():
    assert StackConfig(d_head=16).rotary_sections == (2, 3, 3)
    assert StackConfig(d_head=128).rotary_sections == (16, 24, 24)


def test_scores_depend_on_the_distance_alone():
    x = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))
    score = [
        (
            rotate(x[0], rotary(at, (2, 3, 3), 1e4)) * rotate(x[1], rotary(at + 7, (2, 3, 3), 1e4))
        ).sum()
        for at in (torch.zeros(3, 1, 1, dtype=torch.long), torch.full((3, 1, 1), 31))
    ]
    torch.testing.assert_close(score[0], score[1], atol=1e-5, rtol=1e-5)


def positions_of(qwen, model, batch, **grid):
    n, side = batch.patches.n_images, model.config.grid
    image = batch.tokens == model.raw.image_token
    found, _ = qwen.get_rope_index(
        batch.tokens,
        mm_token_type_ids=image.int(),
        image_grid_thw=torch.tensor([[1, side, side]] * n) if n else None,
        attention_mask=batch.mask.long(),
    )
    return found


def test_positions_equal_qwens_for_any_number_of_pictures(qwen, model, batch):
    expected = positions_of(qwen, model, batch)
    real = batch.mask.expand(3, -1, -1)
    assert torch.equal(batch.positions[real], expected[real])


def test_positions_of_text_count_up(model):
    batch = model.encode([Prompt("How many a b ?")])
    assert torch.equal(batch.positions, torch.arange(6).expand(3, 1, 6))


def test_the_bare_model_finds_the_same_positions_for_one_picture(qwen, model, prompts, side):
    batch = model.encode(prompts[:2], padding_side=side)
    own = model.raw.position_ids(batch.tokens, batch.mask)
    real = batch.mask.expand(3, -1, -1)
    assert torch.equal(own[real], batch.positions[real])
    assert torch.equal(own[real], positions_of(qwen, model, batch)[real])
    unpadded = model.encode(prompts[:1])
    assert torch.equal(model.raw.position_ids(unpadded.tokens), unpadded.positions)


def test_the_bare_model_refuses_to_guess_positions_of_two_pictures(model, prompts):
    batch = model.encode([prompts[2]])
    with pytest.raises(InputError, match="position_ids"):
        model.raw(batch.tokens, **batch.inputs)
    logits = model.raw(batch.tokens, position_ids=batch.positions, **batch.inputs)
    torch.testing.assert_close(logits[:, -1:], model.run(batch).logits)


def test_new_tokens_count_on_behind_the_largest_position(model, batch):
    longer = batch.extend(torch.tensor([[7, 8]] * 3))
    for row in range(3):
        largest = int(np.max(batch.positions[:, row, batch.mask[row]].numpy()))
        assert longer.positions[:, row, -2:].tolist() == [[largest + 1, largest + 2]] * 3
