"""Pre-norm transformer blocks with TransformerLens's hook points at their canonical names.

TransformerLens 4 ships no components to build from. Names, shapes and attributes here are the ones
its tools look for, so that caches, patching and lenses work unchanged.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformer_lens import FactoredMatrix, TransformerBridgeConfig
from transformer_lens.hook_points import HookPoint

from interp.toy.rope import Rotary, rotate


class Memory:
    """Keys (rotated) and values of one block; what is read later is added by `extend`.

    Copies share their tensors. There is room behind them, which the first copy that reads on
    writes into; another copy that then reads on from the same place takes tensors of its own.
    """

    ROOM = 8  # tokens that are added without copying what is there

    def __init__(self) -> None:
        self.length = 0
        self._tensors: tuple[Tensor, Tensor] | None = None
        self._written = [0]  # shared by copies: how far somebody has written

    def copy(self) -> "Memory":
        other = Memory()
        other.__dict__.update(self.__dict__)
        return other

    def __iter__(self) -> Iterator[Tensor]:
        """Keys, then values: batch pos head d_head."""
        return (tensor[:, : self.length] for tensor in self._tensors or ())

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all that was read, these included."""
        length = self.length + k.shape[1]
        fits = self._tensors is not None and length <= self._tensors[0].shape[1]
        if not fits or self._written[0] != self.length:
            self._tensors = (self._moved(k, length, 0), self._moved(v, length, 1))
            self._written = [self.length]
        for tensor, new in zip(self._tensors, (k, v), strict=True):
            tensor[:, self.length : length] = new
        self.length = self._written[0] = length
        keys, values = self
        return keys, values

    def _moved(self, like: Tensor, length: int, which: int) -> Tensor:
        """A tensor with room, and what is known so far at its beginning."""
        new = like.new_empty(len(like), length + self.ROOM, *like.shape[2:])
        if self._tensors is not None:
            new[:, : self.length] = self._tensors[which][:, : self.length]
        return new


class LayerNorm(nn.Module):
    def __init__(self, cfg: TransformerBridgeConfig) -> None:
        super().__init__()
        self.cfg, self.eps = cfg, cfg.eps
        self.w = nn.Parameter(torch.ones(cfg.d_model))
        self.b = nn.Parameter(torch.zeros(cfg.d_model))
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        hooked = self.hook_scale.has_hooks() or self.hook_normalized.has_hooks()
        if self.cfg.use_fused_attention and not hooked:  # the same up to rounding, in one pass
            return F.layer_norm(x, self.w.shape, self.w, self.b, self.eps)
        x = x - x.mean(-1, keepdim=True)
        scale = self.hook_scale((x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        return self.hook_normalized(x / scale * self.w + self.b)


class Attention(nn.Module):
    """Multi-head attention with separate heads; `hook_z` comes before `W_O`."""

    def __init__(self, cfg: TransformerBridgeConfig) -> None:
        super().__init__()
        self.cfg = cfg
        for name in "QKV":
            weight = torch.empty(cfg.n_heads, cfg.d_model, cfg.d_head)
            setattr(self, f"W_{name}", nn.Parameter(weight))
            setattr(self, f"b_{name}", nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head)))
        self.W_O = nn.Parameter(torch.empty(cfg.n_heads, cfg.d_head, cfg.d_model))
        self.b_O = nn.Parameter(torch.zeros(cfg.d_model))
        self.hook_attn_in = HookPoint()
        self.hook_q_input, self.hook_k_input, self.hook_v_input = (HookPoint() for _ in "qkv")
        self.hook_q, self.hook_k, self.hook_v = (HookPoint() for _ in "qkv")
        self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
        self.hook_z, self.hook_result, self.hook_out = HookPoint(), HookPoint(), HookPoint()

    def forward(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        rope: tuple[Rotary, Rotary],
        allowed: Bool[Tensor, "#batch 1 query key"] | None,
        memory: Memory | None = None,
    ) -> Float[Tensor, "batch query d_model"]:
        """`inputs`: normalised streams for q, k, v; `rope`: rotary of queries and of keys.

        `allowed` None (fused attention only): every key, in a decoder every key up to the query.
        """
        q, k, v = (
            hook(_project(x, weight, bias))
            for hook, x, weight, bias in (
                (self.hook_q, inputs[0], self.W_Q, self.b_Q),
                (self.hook_k, inputs[1], self.W_K, self.b_K),
                (self.hook_v, inputs[2], self.W_V, self.b_V),
            )
        )
        q, k = self.hook_rot_q(rotate(q, rope[0])), self.hook_rot_k(rotate(k, rope[1]))
        if memory is not None:
            k, v = memory.extend(k, v)
        return self.hook_out(self._write(self.hook_z(self._attend(q, k, v, allowed))))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # batch head pos d_head
        if self.cfg.use_fused_attention:
            causal = allowed is None and self.cfg.attention_dir == "causal" and q.shape[2] > 1
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal)
        else:
            # a finite floor: a query without any key gets uniform weights, not NaN; zeroed below
            floor, hidden = torch.finfo(q.dtype).min, ~allowed
            scores = (q @ k.mT / math.sqrt(self.cfg.d_head)).masked_fill(hidden, floor)
            # once more: edited scores must not take weight from the keys that can be seen
            scores = self.hook_attn_scores(scores).masked_fill(hidden, floor)
            z = self.hook_pattern(F.softmax(scores, -1).masked_fill(hidden, 0.0)) @ v
        return z.transpose(1, 2)

    def _write(self, z: Tensor) -> Tensor:
        if self.cfg.use_attn_result:
            return (
                self.hook_result(einsum(z, self.W_O, "b p h d, h d m -> b p h m")).sum(2) + self.b_O
            )
        return F.linear(z.flatten(2), self.W_O.flatten(0, 1).T, self.b_O)

    @property
    def OV(self) -> FactoredMatrix:
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def QK(self) -> FactoredMatrix:
        return FactoredMatrix(self.W_Q, self.W_K.mT)


def _project(x: Tensor, weight: Tensor, bias: Tensor) -> Float[Tensor, "batch pos head d_head"]:
    if x.ndim == 4:  # one copy of the stream for every head
        return einsum(x, weight, "b p h m, h m d -> b p h d") + bias
    flat = weight.mT.flatten(0, 1)  # (head d_head) d_model; einops costs as much as the product
    return F.linear(x, flat, bias.flatten()).unflatten(-1, bias.shape)


class MLP(nn.Module):
    def __init__(self, cfg: TransformerBridgeConfig) -> None:
        super().__init__()
        self.W_in = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp))
        self.b_in = nn.Parameter(torch.zeros(cfg.d_mlp))
        self.W_out = nn.Parameter(torch.empty(cfg.d_mlp, cfg.d_model))
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model))
        self.hook_pre = HookPoint()
        self.hook_post = HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        x = self.hook_post(F.gelu(self.hook_pre(x @ self.W_in + self.b_in)))
        return x @ self.W_out + self.b_out


class TransformerBlock(nn.Module):
    hook_out_is_single_residual_stream = True  # read by TransformerLens's logit lens

    def __init__(self, cfg: TransformerBridgeConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.ln1, self.attn = LayerNorm(cfg), Attention(cfg)
        self.ln2, self.mlp = LayerNorm(cfg), MLP(cfg)
        self.hook_resid_pre, self.hook_resid_mid = HookPoint(), HookPoint()
        self.hook_resid_post, self.hook_attn_out = HookPoint(), HookPoint()
        self.hook_mlp_out, self.hook_mlp_in = HookPoint(), HookPoint()

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        rope: Rotary,
        allowed: Bool[Tensor, "#batch 1 query key"] | None,
        memory: Memory | None = None,
        read_from: int = 0,
    ) -> Float[Tensor, "batch read d_model"]:
        """With `read_from`, only positions from there on come out (the others are keys alone)."""
        x = self.hook_resid_pre(x)
        inputs, query_rope = self._attention_inputs(x), rope
        if read_from:
            inputs = (inputs[0][:, read_from:], *inputs[1:])
            query_rope = Rotary(*(part[:, read_from:] for part in rope))
            x, allowed = x[:, read_from:], allowed[:, :, read_from:]
        out = self.attn(inputs, (query_rope, rope), allowed, memory)
        x = self.hook_resid_mid(x + self.hook_attn_out(out))
        mlp_in = self.hook_mlp_in(x.clone()) if self.cfg.use_hook_mlp_in else x
        return self.hook_resid_post(x + self.hook_mlp_out(self.mlp(self.ln2(mlp_in))))

    def _attention_inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attn, cfg = self.attn, self.cfg
        if not (cfg.use_split_qkv_input or cfg.use_attn_in):
            normalised = self.ln1(x)
            return normalised, normalised, normalised
        per_head = x[:, :, None].expand(-1, -1, cfg.n_heads, -1)
        if cfg.use_attn_in:
            normalised = self.ln1(attn.hook_attn_in(per_head.clone()))
            return normalised, normalised, normalised
        q, k, v = (
            self.ln1(hook(per_head.clone()))
            for hook in (attn.hook_q_input, attn.hook_k_input, attn.hook_v_input)
        )
        return q, k, v


def accumulated_bias(
    blocks: nn.ModuleList, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
) -> Float[Tensor, " d_model"]:
    """What the biases of the blocks before `layer` add to the stream."""
    total = torch.zeros_like(blocks[0].attn.b_O)
    for block in blocks[:layer]:
        total = total + block.attn.b_O + (block.mlp.b_out if include_mlp_biases else 0)
    return total + blocks[layer].attn.b_O if mlp_input else total


class Unembed(nn.Module):
    def __init__(self, cfg: TransformerBridgeConfig) -> None:
        super().__init__()
        self.W_U = nn.Parameter(torch.empty(cfg.d_model, cfg.d_vocab))
        self.b_U = nn.Parameter(torch.zeros(cfg.d_vocab))

    def forward(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_vocab"]:
        return x @ self.W_U + self.b_U
