"""Sizes of a toy vision-language model, and what TransformerLens calls them."""

from dataclasses import dataclass, replace

from transformer_lens import TransformerBridgeConfig

from interp.errors import InputError


@dataclass(frozen=True)
class StackConfig:
    """One stack of pre-norm blocks: n_heads x d_head need not be d_model."""

    n_layers: int = 2
    n_heads: int = 2
    d_model: int = 32
    d_head: int = 16
    d_mlp: int = 128

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_heads", "d_model", "d_mlp"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.d_head < 4 or self.d_head % 2:
            raise InputError(
                f"d_head is {self.d_head}; it must be even and at least 4, for rotary positions"
            )

    @property
    def rotary_sections(self) -> tuple[int, int, int]:
        """Frequencies given to time, height and width: a quarter, three and three eighths."""
        half = self.d_head // 2
        space = (half - half // 4) // 2
        return half - 2 * space, space, space


@dataclass(frozen=True)
class ToyConfig:
    """A ViT on `grid` x `grid` patches, a linear projector, and a causal decoder.

    `words` is the vocabulary, in order of token ids; it must hold the four special words.
    """

    words: tuple[str, ...]
    grid: int = 8
    patch: int = 14
    decoder: StackConfig = StackConfig()
    tower: StackConfig = StackConfig()
    rotary_base: float = 10000.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.grid < 1 or self.patch < 1:
            raise InputError(f"grid {self.grid} and patch {self.patch} must be at least 1")
        missing = [w for w in SPECIAL if w not in self.words]
        if missing or len(set(self.words)) != len(self.words):
            raise InputError(
                f"the vocabulary lacks {' '.join(missing) or 'nothing'} or names a word twice;"
                f" it must hold {' '.join(SPECIAL)} and every word once"
            )

    @property
    def n_ctx(self) -> int:
        """The most tokens of a prompt: 4096, or four pictures. Attention keeps their square."""
        return max(4096, 4 * self.grid**2)

    @classmethod
    def from_dict(cls, values: dict) -> "ToyConfig":
        """From plain JSON, as a weights file keeps it."""
        return cls(
            **{
                **values,
                "words": tuple(values["words"]),
                "decoder": StackConfig(**values["decoder"]),
                "tower": StackConfig(**values["tower"]),
            }
        )


PAD, BOS, EOS, IMAGE = "<pad>", "<bos>", "<eos>", "<image>"
IMAGE_START, IMAGE_END = "<image_start>", "<image_end>"
SPECIAL = (PAD, BOS, EOS, IMAGE, IMAGE_START, IMAGE_END)


def lens_config(config: ToyConfig, *, tower: bool = False) -> TransformerBridgeConfig:
    """The configuration object that TransformerLens's own tools read off a model."""
    stack = config.tower if tower else config.decoder
    n_patches = config.grid**2
    shared = dict(
        d_model=stack.d_model,
        d_head=stack.d_head,
        n_layers=stack.n_layers,
        n_heads=stack.n_heads,
        d_mlp=stack.d_mlp,
        eps=config.eps,
        act_fn="gelu",
        normalization_type="LN",
        positional_embedding_type="rotary",
        device="cpu",
    )
    if tower:
        return TransformerBridgeConfig(
            **shared, n_ctx=n_patches, attention_dir="bidirectional", is_visual_model=True
        )
    return TransformerBridgeConfig(
        **shared,
        n_ctx=config.n_ctx,
        d_vocab=len(config.words),
        attention_dir="causal",
        is_multimodal=True,
        vision_hidden_size=config.tower.d_model,
        vision_num_layers=config.tower.n_layers,
        vision_num_heads=config.tower.n_heads,
        mm_tokens_per_image=n_patches,
    )


def widened(config: ToyConfig, **changes: int) -> ToyConfig:
    """The same world with other sizes in both stacks: `widened(config, n_layers=4, n_heads=8)`."""
    return replace(
        config, decoder=replace(config.decoder, **changes), tower=replace(config.tower, **changes)
    )
