"""The vision tower of the toy: a ViT with rotary positions of the grid (arXiv:2409.12191)."""

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from interp.errors import InputError
from interp.toy.config import ToyConfig, lens_config
from interp.toy.hooks import GatedHooks
from interp.toy.layers import LayerNorm, TransformerBlock, accumulated_bias
from interp.toy.rope import Rotary, rotary


class HookedViT(GatedHooks):
    """Patches in, the encoder's output out: bidirectional, with rotary positions of the grid."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.cfg = lens_config(config, tower=True)
        self.cfg.use_fused_attention = False
        self.config = config
        self.W_patch = nn.Parameter(torch.empty(3 * config.patch**2, self.cfg.d_model))
        self.b_patch = nn.Parameter(torch.zeros(self.cfg.d_model))
        self.hook_embed = HookPoint()
        self.blocks = nn.ModuleList(TransformerBlock(self.cfg) for _ in range(self.cfg.n_layers))
        self.ln_final = LayerNorm(self.cfg)
        self.setup()

    def patchify(self, pixels: Float[Tensor, "image 3 y x"]) -> Float[Tensor, "image patch pixel"]:
        """Pictures to rows of patches: image patch (channel y x)."""
        p, side = self.config.patch, self.config.grid * self.config.patch
        if pixels.shape[2:] != (side, side):
            raise InputError(
                f"pictures of {pixels.shape[3]} x {pixels.shape[2]} pixels; this model sees"
                f" {side} x {side}"
            )
        return rearrange(pixels, "i c (y p) (x q) -> i (y x) (c p q)", p=p, q=p)

    def forward(
        self,
        pixels: Float[Tensor, "image 3 y x"] | None = None,
        *,
        kinds: Float[Tensor, "kind pixel"] | None = None,
        patches: Int[Tensor, "image patch"] | None = None,
        key_masks: Sequence[Bool[Tensor, "image patch"] | None] | None = None,
    ) -> Float[Tensor, "image patch d_vision"]:
        """The picture as `pixels` in -1..1, or as `patches` that look up `kinds` of patch.

        Looking up is exact: a patch's embedding depends on nothing but its pixels.
        """
        if kinds is None:
            x = self.patchify(pixels).to(self.W_patch.dtype) @ self.W_patch + self.b_patch
        else:
            x = (kinds.to(self.W_patch.dtype) @ self.W_patch + self.b_patch)[patches]
        x = self.hook_embed(x)
        rope = self._rotary(x.device)
        everything = torch.ones(1, x.shape[1], dtype=torch.bool, device=x.device)
        for block, mask in zip(self.blocks, key_masks or [None] * len(self.blocks), strict=True):
            if mask is None and self.cfg.use_fused_attention:
                x = block(x, rope, None)
            else:
                keys = everything if mask is None else mask.to(x.device)
                x = block(x, rope, keys[:, None, None].expand(-1, -1, x.shape[1], -1))
        return self.ln_final(x)

    def accumulated_bias(self, *args: Any, **kwargs: Any) -> Float[Tensor, " d_vision"]:
        return accumulated_bias(self.blocks, *args, **kwargs)

    def _rotary(self, device: torch.device) -> Rotary:
        cell = torch.arange(self.config.grid**2, device=device)
        thw = torch.stack([cell * 0, cell // self.config.grid, cell % self.config.grid])
        return rotary(thw[:, None], self.config.tower.rotary_sections, self.config.rotary_base)
