"""The toy vision-language model on TransformerLens: a ViT, a projector and a causal decoder.

Decoder hooks have their canonical names at the root, the tower's are under `vision.`, and
`hook_projector` is where the picture enters. TransformerLens's caches, patching and lenses run on
it; see `interp.toy.bound` for tools that pass tokens only.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils import skip_init
from transformer_lens import ActivationCache
from transformer_lens.hook_points import HookPoint

from interp.errors import InputError
from interp.toy.config import BOS, IMAGE, ToyConfig, lens_config
from interp.toy.hooks import GatedHooks
from interp.toy.layers import LayerNorm, Memory, TransformerBlock, Unembed, accumulated_bias
from interp.toy.rope import rotary
from interp.toy.tokenizer import WordTokenizer
from interp.toy.vision import HookedViT


class NativeVLM(GatedHooks):
    """Tokens and pictures to logits."""

    def __init__(self, config: ToyConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = WordTokenizer(config.words)
        self.image_token = self.tokenizer.id(IMAGE)
        self.cfg = lens_config(config)
        self.cfg.use_fused_attention = False
        self.vision = HookedViT(config)
        self.vcfg = self.vision.cfg
        # skipped: the draws of its own would come from torch's global random state
        self.projector = skip_init(nn.Linear, config.tower.d_model, config.decoder.d_model)
        self.hook_projector, self.hook_embed = HookPoint(), HookPoint()
        self.W_E = nn.Parameter(torch.empty(self.cfg.d_vocab, self.cfg.d_model))
        self.blocks = nn.ModuleList(TransformerBlock(self.cfg) for _ in range(self.cfg.n_layers))
        self.ln_final = LayerNorm(self.cfg)
        self.unembed = Unembed(self.cfg)
        self._initialise(seed)
        self.setup()

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Weights normal with standard deviation 0.8 / sqrt(32) at width 32, biases zero."""
        if not 0 <= seed < 2**64:
            raise InputError(f"seed is {seed}; give a whole number from 0 to 2**64 - 1")
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.split(".")[-1].startswith("W_") or name == "projector.weight":
                std = 0.8 / math.sqrt(self.config.decoder.d_model)
                parameter.normal_(0.0, std, generator=generator)
        self.projector.bias.zero_()

    # --- forward -----------------------------------------------------------------------------

    def encode_image(self, *pictures: Any, **inputs: Any) -> Float[Tensor, "image patch d_model"]:
        return self.hook_projector(self.projector(self.vision(*pictures, **inputs)))

    def input_to_embed(
        self,
        tokens: Int[Tensor, "batch pos"],
        image_embeds: Float[Tensor, "image patch d_model"] | None = None,
        *,
        image: Bool[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """`image` says where the patches go, in order; None: where the image token stands."""
        x = self.W_E[tokens]
        image = tokens == self.image_token if image is None else image.to(x.device)
        n_patches = 0 if image_embeds is None else image_embeds.shape[:2].numel()
        if int(image.sum()) != n_patches:
            raise InputError(
                f"{int(image.sum())} image tokens for {n_patches} patches of pictures;"
                " every patch takes one token"
            )
        if image_embeds is not None:
            x = x.masked_scatter(image[..., None], image_embeds.to(x.dtype))
        return self.hook_embed(x)

    def decode(
        self,
        x: Float[Tensor, "batch pos d_model"],
        positions: Int[Tensor, "3 batch pos"],
        *,
        key_masks: Sequence[Bool[Tensor, "batch key"] | None],
        memories: Sequence[Memory] | None = None,
        layers: slice = slice(None),
        read_from: int = 0,
    ) -> Float[Tensor, "batch read d_model"]:
        """Through the decoder's blocks. `key_masks`, one a block, are False at hidden keys;
        `memories` hold the keys and values of what was read before; the last block computes
        positions from `read_from` on only.
        """
        rope = rotary(positions, self.config.decoder.rotary_sections, self.config.rotary_base)
        order = range(len(self.blocks))[layers]
        for layer in order:
            memory = None if memories is None else memories[layer]
            past = 0 if memory is None else memory.length
            start = read_from if layer == len(self.blocks) - 1 else 0
            mask, allowed = key_masks[layer], None
            later = past and x.shape[1] > 1  # a single new token sees all that was read
            if not self.cfg.use_fused_attention or mask is not None or later or start:
                allowed = _causal(x.shape[1], past, mask, x.device)
            x = self.blocks[layer](x, rope, allowed, memory, start)
        return x

    def position_ids(
        self, tokens: Int[Tensor, "batch pos"], attention_mask: Tensor | None = None
    ) -> Int[Tensor, "3 batch pos"]:
        """Positions for rows with at most one picture; padding takes none up.

        Raises:
            InputError: a row with more; `ToyVLM.encode` gives positions for any number.
        """
        grid = self.config.grid
        image = tokens == self.image_token
        if (image.sum(1) > grid**2).any():
            raise InputError(
                f"a row with {int(image.sum(1).max())} image tokens, a picture has {grid**2};"
                " pass position_ids (batch.positions of ToyVLM.encode) for several pictures"
            )
        real = torch.ones_like(image) if attention_mask is None else attention_mask.bool()
        first = image & (image.cumsum(1) == 1)
        step = (real & ~image).long() + first.long() * grid
        text = step.cumsum(1) - step
        cell = (image.cumsum(1) - 1).clamp(min=0)
        start = (text * first).sum(1, keepdim=True)
        time, height, width = start, start + cell // grid, start + cell % grid
        return torch.stack([torch.where(image, axis, text) for axis in (time, height, width)])

    def forward(
        self,
        tokens: Int[Tensor, "batch pos"] | str,
        pixels: Float[Tensor, "image 3 y x"] | None = None,
        *,
        kinds: Tensor | None = None,
        patches: Int[Tensor, "image patch"] | None = None,
        image_embeds: Float[Tensor, "image patch d_model"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "3 batch pos"] | None = None,
        return_type: str = "logits",
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        residual: Float[Tensor, "batch pos d_model"] | None = None,
        read_from: int = 0,
    ) -> Float[Tensor, "batch read width"]:
        """Logits, or the stream before `stop_at_layer`; from `start_at_layer` on, `residual` in."""
        if return_type != "logits":
            raise InputError(f"return_type {return_type!r}; this model returns 'logits'")
        if (start_at_layer is None) != (residual is None):
            raise InputError("start_at_layer and residual go together")
        for name, layer in (("start_at_layer", start_at_layer), ("stop_at_layer", stop_at_layer)):
            if layer is not None and not 0 <= layer <= len(self.blocks):
                raise InputError(f"{name} is {layer}; this model has {len(self.blocks)} blocks")
        tokens = self.to_tokens(tokens)
        if position_ids is None:
            position_ids = self.position_ids(tokens, attention_mask)
        if residual is None:
            if image_embeds is None and (pixels is not None or patches is not None):
                image_embeds = self.encode_image(pixels, kinds=kinds, patches=patches)
            residual = self.input_to_embed(tokens, image_embeds)
        else:
            residual = residual.clone()  # a patch changes it in place; the caller keeps their own
        mask = None if attention_mask is None else attention_mask.bool()
        x = self.decode(
            residual,
            position_ids,
            key_masks=[mask] * len(self.blocks),
            layers=slice(start_at_layer, stop_at_layer),
            read_from=read_from,
        )
        return x if stop_at_layer is not None else self.unembed(self.ln_final(x))

    # --- what TransformerLens's tools look for -------------------------------------------------

    def run_with_cache(self, *args: Any, return_cache_object: bool = True, **kwargs: Any):
        """As the parent's, with an `ActivationCache` (or a dict) beside the logits."""
        whole = not kwargs.get("remove_batch_dim", False)
        out, kept = super().run_with_cache(*args, **kwargs)
        return out, ActivationCache(
            kept, self, has_batch_dim=whole
        ) if return_cache_object else kept

    def vision_cache(self, cache: ActivationCache) -> ActivationCache:
        """The tower's part of a cache under canonical names, without copies."""
        own = {k.removeprefix("vision."): v for k, v in cache.items() if k.startswith("vision.")}
        return ActivationCache(own, self.vision, has_batch_dim=cache.has_batch_dim)

    @property
    def configs(self) -> tuple[Any, Any]:
        return self.cfg, self.vcfg

    def config_of(self, name: str) -> Any:
        return self.vcfg if name.startswith("vision.") else self.cfg

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        return self.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        return self.unembed.b_U

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        return torch.stack([block.attn.W_O for block in self.blocks])

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        return torch.stack([block.attn.W_V for block in self.blocks])

    def to_tokens(
        self, text: Any, prepend_bos: bool | None = None, **_: Any
    ) -> Int[Tensor, "batch pos"]:
        """Text as `ToyVLM.encode` reads it, `<bos>` first; tokens as they are."""
        if isinstance(text, Tensor):
            return text
        first = [] if prepend_bos is False else [self.tokenizer.id(BOS)]
        rows = [first + self.tokenizer(t) for t in ([text] if isinstance(text, str) else text)]
        if len({len(row) for row in rows}) > 1:
            raise InputError("texts of different lengths; ToyVLM.encode pads them")
        return torch.tensor(rows, device=self.W_E.device)

    def to_single_token(self, text: str) -> int:
        ids = self.tokenizer(text)
        if len(ids) != 1:
            raise InputError(f"{text!r} is {len(ids)} tokens, not one")
        return ids[0]

    def tokens_to_residual_directions(self, tokens: Any) -> Float[Tensor, "*tokens d_model"]:
        """Unembedding directions with the final norm's gain multiplied in.

        Attribution is exact up to the constant `logit_constant`: TransformerLens assumes a folded
        norm, ours has a gain and a bias of its own.
        """
        return (self.W_U * self.ln_final.w[:, None]).T[self._ids(tokens)]

    def logit_constant(self, tokens: Any) -> Float[Tensor, "*tokens"]:
        """The part of a logit that no component writes: `ln_final.b @ W_U + b_U`."""
        return (self.ln_final.b @ self.W_U + self.b_U)[self._ids(tokens)]

    def _ids(self, tokens: Any) -> Int[Tensor, "*tokens"]:
        return torch.as_tensor(self.to_single_token(tokens) if isinstance(tokens, str) else tokens)

    def accumulated_bias(self, *args: Any, **kwargs: Any) -> Float[Tensor, " d_model"]:
        return accumulated_bias(self.blocks, *args, **kwargs)


def _causal(
    n: int, past: int, key_mask: Bool[Tensor, "batch key"] | None, device: torch.device
) -> Bool[Tensor, "#batch 1 query key"]:
    allowed = torch.ones(n, past + n, dtype=torch.bool, device=device).tril(past)[None, None]
    return allowed if key_mask is None else allowed & key_mask[:, None, None, :].to(device)
