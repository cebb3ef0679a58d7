"""The toy as a `HookedVLM`: prompts to batches, runs with edits and caches, cached steps."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp import sites
from interp.errors import InputError
from interp.interventions import Edit, Mask
from interp.layout import Frame, Tokens
from interp.model import Batch, ModelDims, ModelSpec, Prompt, Run, StackDims, State, check_fired
from interp.toy.config import StackConfig, ToyConfig
from interp.toy.hooks import hook_of
from interp.toy.layers import Memory
from interp.toy.native import NativeVLM
from interp.toy.prompts import encode
from interp.toy.prompts import normalised as normalised
from interp.toy.recorder import Recorder
from interp.toy.tokenizer import WordTokenizer

_ORDER = (
    "resid_pre attn.attn_in attn.q_input attn.k_input attn.v_input ln1.scale ln1.normalized attn.q"
    " attn.k attn.v attn.rot_q attn.rot_k attn.attn_scores attn.pattern attn.z attn.result attn.out"
    " attn_out resid_mid mlp_in ln2.scale ln2.normalized mlp.pre mlp.post mlp_out resid_post"
).split()


class ToyVLM:
    """A vision-language model of some ten thousand parameters that runs in milliseconds.

    `raw` is the module on TransformerLens underneath: `model.raw.run_with_cache(...)` works.
    """

    def __init__(self, config: ToyConfig, *, seed: int = 0, source: str | None = None) -> None:
        self.raw = NativeVLM(config, seed=seed).eval()
        self.raw.requires_grad_(False)
        self._source, self._seed = source, seed

    @cached_property
    def cfg(self) -> ModelDims:
        config = self.raw.config
        return ModelDims(
            **asdict(config.decoder), d_vocab=len(config.words), vision=_dims(config.tower)
        )

    @property
    def config(self) -> ToyConfig:
        return self.raw.config

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec("toy", self._source, {"config": asdict(self.config), "seed": self._seed})

    @property
    def device(self) -> torch.device:
        return self.raw.W_E.device

    def to(self, device: str | torch.device) -> "ToyVLM":
        self.raw.to(device)
        return self

    @property
    def sites(self) -> tuple[str, ...]:
        """What can be read and changed now; hooks that are off join once they are turned on."""
        return tuple(s for s in self._all_sites if self.raw.why_off(hook_of(s)) is None)

    @cached_property
    def _all_sites(self) -> tuple[str, ...]:
        norm = ("ln_final.scale", "ln_final.normalized")
        tower = ["embed", *_blocks(self.config.tower), *norm]
        decoder = ["embed", *_blocks(self.config.decoder), *norm]
        return (*(f"vision.{site}" for site in tower), "projector", *decoder)

    @property
    def tokenizer(self) -> WordTokenizer:
        return self.raw.tokenizer

    # --- prompts --------------------------------------------------------------------------------

    def encode(self, prompts: Prompt | Sequence[Prompt], *, padding_side: str = "left") -> Batch:
        """Prompts to a batch: `<bos>`, then the segments; a picture is framed by its two marks.

        Raises:
            InputError: no prompt, a word that is not in the vocabulary, a picture of another size.
        """
        prompts = [prompts] if isinstance(prompts, Prompt) else list(prompts)
        if not prompts or not all(isinstance(prompt, Prompt) for prompt in prompts):
            kinds = ", ".join({type(prompt).__name__ for prompt in prompts}) or "nothing"
            raise InputError(f"encode takes a list of at least one Prompt, not of {kinds}")
        if padding_side not in ("left", "right"):
            raise InputError(f"padding_side is {padding_side!r}; give 'left' or 'right'")
        return encode(self.config, self.tokenizer, prompts, padding_side)

    def decode(self, tokens: Int[Tensor, "batch pos"]) -> list[str]:
        return [self.tokenizer.decode(row) for row in tokens]

    # --- runs -----------------------------------------------------------------------------------

    def run(
        self,
        batch: Batch,
        *,
        edits: Sequence[Edit | Mask] = (),
        cache: Sequence[str] = (),
        logits_at: Tokens = "answer",
        cache_at: Tokens | None = None,
        grad: bool = False,
    ) -> Run:
        """See `HookedVLM.run`; a hook that is off raises too."""
        if grad and cache_at is not None:
            raise InputError("cache_at cuts activations out of the graph; leave it out with grad")
        frame = Frame.whole(batch.layout)
        recorder = Recorder(edits, cache, frame, cache_at=cache_at, grad=grad)
        columns = batch.layout.gather(logits_at)
        with torch.set_grad_enabled(grad), self._hooked(recorder):
            x = self.raw.ln_final(self._read(batch, edits, recorder))
            logits = self.raw.unembed(_at(x, columns))
        check_fired(edits, frozenset(recorder.fired))
        return Run(logits, recorder.kept)

    @torch.no_grad()
    def prefill(self, batch: Batch, *, edits: Sequence[Edit | Mask] = ()) -> State:
        """Read the prompt (and new tokens, if the batch has any), keeping keys and values."""
        recorder = Recorder(edits, (), Frame.whole(batch.layout))
        memories = [Memory() for _ in self.raw.blocks]
        ends = _ends(batch)
        fast = self.raw.cfg.use_fused_attention and not edits
        start = int(ends.min()) if fast else 0  # all that the last block must compute
        with self._hooked(recorder):
            x = self.raw.ln_final(self._read(batch, edits, recorder, memories, start))
            logits = self.raw.unembed(_at(x, ends - start))[:, 0]
        return State(batch, tuple(memories), logits, self, tuple(edits), frozenset(recorder.fired))

    @torch.no_grad()
    def step(
        self,
        tokens: Int[Tensor, " batch"],
        state: State,
        *,
        edits: Sequence[Edit | Mask] = (),
        cache: Sequence[str] = (),
    ) -> tuple[Run, State]:
        """Read one more token of every row; the edits see it at its place in the sequence."""
        state.check(self, edits)
        batch = state.batch.extend(tokens[:, None])
        frame = Frame(batch.layout, batch.layout.width - 1, 1)
        recorder = Recorder(edits, cache, frame, fired=state.fired)
        memories = [memory.copy() for memory in state.memory]
        with self._hooked(recorder):
            new = tokens[:, None].to(self.device)
            x = self._decode(
                self.raw.input_to_embed(new, image=torch.zeros_like(new, dtype=torch.bool)),
                batch.positions[:, :, -1:],
                edits,
                recorder,
                memories,
            )
            logits = self.raw.unembed(self.raw.ln_final(x))
        fired = frozenset(recorder.fired)
        later = replace(
            state, batch=batch, memory=tuple(memories), logits=logits[:, 0], fired=fired
        )
        return Run(logits, recorder.kept), later

    def _hooked(self, recorder: Recorder) -> AbstractContextManager:
        for site in recorder.sites:
            if site not in self._all_sites:
                raise sites.UnknownSiteError(site, self.sites)
        if not recorder.sites:  # leaving hooks() visits every hook point
            return nullcontext()
        return self.raw.hooks(fwd_hooks=[(hook_of(s), recorder) for s in recorder.sites])

    def _read(
        self,
        batch: Batch,
        edits: Sequence[Edit | Mask],
        recorder: Recorder,
        memories: Sequence[Memory] | None = None,
        read_from: int = 0,
    ) -> Float[Tensor, "batch read d_model"]:
        """All of a batch: pictures, then tokens; the last block from column `read_from` on."""
        image = self._see(batch, edits, recorder) if batch.inputs else None
        where = batch.layout.image_tokens(batch.layout.patch_mask(None))
        x = self.raw.input_to_embed(batch.tokens.to(self.device), image, image=where)
        return self._decode(x, batch.positions, edits, recorder, memories, read_from)

    def _see(
        self, batch: Batch, edits: Sequence[Edit | Mask], recorder: Recorder
    ) -> Float[Tensor, "image patch d_model"]:
        masks: list = [None] * len(self.raw.vision.blocks)
        for i, edit in enumerate(edits):
            if isinstance(edit, Mask):
                _, patches = edit.hidden(recorder.frame)
                hidden = patches.view(batch.patches.n_images, -1)
                if _hide(masks, torch.ones_like(hidden), hidden, edit, "tower"):
                    recorder.fired.add(i)
        inputs = {name: value.to(self.device) for name, value in batch.inputs.items()}
        return self.raw.encode_image(**inputs, key_masks=masks)

    def _decode(
        self,
        x: Float[Tensor, "batch pos d_model"],
        positions: Int[Tensor, "3 batch pos"],
        edits: Sequence[Edit | Mask],
        recorder: Recorder,
        memories: Sequence[Memory] | None,
        read_from: int = 0,
    ) -> Float[Tensor, "batch read d_model"]:
        real = recorder.frame.layout.mask
        masks: list = [None if real.all() else real] * len(self.raw.blocks)
        for i, edit in enumerate(edits):
            if isinstance(edit, Mask):
                columns, _ = edit.hidden(recorder.frame)
                if _hide(masks, real, columns, edit, "decoder"):
                    recorder.fired.add(i)
        return self.raw.decode(
            x,
            positions.to(self.device),
            key_masks=masks,
            memories=memories,
            read_from=read_from,
        )

    def unembed(
        self, resid: Float[Tensor, "*batch d_model"], *, scale: Tensor | None = None
    ) -> Float[Tensor, "*batch d_vocab"]:
        """Logits of a residual stream, through the final norm; with `scale`, that frozen scale."""
        norm = self.raw.ln_final
        centred = resid - resid.mean(-1, keepdim=True)
        if scale is None:
            scale = (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
        return self.raw.unembed(centred / scale * norm.w + norm.b)

    def head_out(self, layer: int, tower: str = "decoder") -> Float[Tensor, "head d_head width"]:
        """`W_O` of each head: `z @ head_out(layer)[head]` is what it writes."""
        blocks = {"decoder": self.raw.blocks, "vision": self.raw.vision.blocks}
        if tower not in blocks or not 0 <= layer < len(blocks[tower]):
            raise InputError(
                f"no block {layer} of {tower!r}; decoder has {len(blocks['decoder'])} blocks,"
                f" vision {len(blocks['vision'])}"
            )
        return blocks[tower][layer].attn.W_O


def _dims(stack: StackConfig) -> StackDims:
    return StackDims(**asdict(stack))


def _blocks(stack: StackConfig) -> list[str]:
    return [f"blocks.{layer}.{name}" for layer in range(stack.n_layers) for name in _ORDER]


def _hide(
    masks: list, real: Bool[Tensor, "row key"], hidden: Bool[Tensor, "row key"], mask: Mask, of: str
) -> bool:
    """Hide keys in the masks of the blocks that `mask` names; whether there is anything to hide."""
    if not hidden.any():
        return False
    for layer in mask.hides_in(len(masks), of):
        masks[layer] = (real if masks[layer] is None else masks[layer]) & ~hidden
    return True


def _at(
    x: Float[Tensor, "batch pos d_model"], columns: Int[Tensor, "batch at"]
) -> Float[Tensor, "batch at d_model"]:
    return x[torch.arange(len(x), device=x.device)[:, None], columns.to(x.device)]


def _ends(batch: Batch) -> Int[Tensor, "batch 1"]:
    """The column of each row's last real token."""
    return batch.mask.shape[1] - 1 - batch.mask.int().flip(1).argmax(1, keepdim=True)
