"""How are the toy's models made? Text first, then pictures and text (arXiv:2605.30170, section 3).

Examples of a step depend on seed, stage and step alone, so a run that was killed goes on bit for
bit where it stood, and two runs of one configuration on one machine give the same file.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from circuits.counting.cards import CARD, WEIGHTS, as_json, make_card
from circuits.counting.lessons import Epochs, Lesson, Lessons
from circuits.counting.presets import TASKS, Preset, Recipe, Stage, preset
from circuits.counting.questions import MODALITIES, Asker
from circuits.counting.subject import device_named
from circuits.places import put_file
from circuits.runs import RunFolder
from interp.errors import InputError
from interp.toy import ToyVLM
from interp.toy.weights import to_bytes

CHECKPOINT_EVERY = 200  # steps; about ten seconds of the tiny preset
CURVE_EVERY = 200


@dataclass(frozen=True)
class Config:
    """Train both models of one seed: the one that answers with a number, and True or False."""

    out: Path
    """The folder to write: number/ and truth/ with weights and a card each."""
    model: str = "tiny"
    """A preset."""
    seed: int = 0
    device: str = "cpu"
    """Where to train: cpu, cuda, cuda:1, ... Only one kind of device gives the same bytes again."""


def answer_logits(model: ToyVLM, lesson: Lesson) -> Float[Tensor, "example answer d_vocab"]:
    """Logits of every token of the right answer (teacher-forced), with gradients if they are on."""
    batch, raw = lesson.batch.extend(lesson.answers[:, :-1]), model.raw
    inputs = {k: v.to(model.device) for k, v in batch.inputs.items()}
    image = raw.encode_image(**inputs) if inputs else None
    x = raw.input_to_embed(batch.tokens.to(model.device), image)
    x = raw.decode(
        x,
        batch.positions.to(model.device),
        key_masks=[None] * len(raw.blocks),
        read_from=lesson.batch.layout.n_prompt - 1,
    )
    return raw.unembed(raw.ln_final(x))


class Learner:
    """A model and its optimiser, somewhere in a recipe."""

    def __init__(self, preset: Preset, task: str, seed: int, *, device: str = "cpu") -> None:
        self.recipe: Recipe = preset.recipes[task]
        self.model = ToyVLM(preset.config, seed=seed).to(device)
        self.model.raw.requires_grad_(True)
        self.model.raw.set_use_fused_attention(True)
        asker = Asker(self.model)
        self.lessons = Lessons(asker, preset.world, task, seed, self.recipe.near)
        per_count = self.recipe.per_count
        self.epochs = None if per_count is None else Epochs(self.lessons, per_count)
        self.stage, self.step, self.curve = 0, 0, []
        self.optimiser = self._optimiser()

    def _optimiser(self) -> torch.optim.Optimizer:
        """Two groups of parameters: the decoder with the projector, and the vision tower."""
        named = list(self.model.raw.named_parameters())
        tower = [p for name, p in named if name.startswith("vision.")]
        rest = [p for name, p in named if not name.startswith("vision.")]
        recipe = self.recipe
        return torch.optim.AdamW(
            [{"params": rest}, {"params": tower}],
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
        )

    def advance(self) -> None:
        """One step of the current stage; behind its last step the next stage begins."""
        stage = self.recipe.stages[self.stage]
        rate = learning_rate(self.recipe, stage, self.step)
        slower = 1.0 if stage.decoder_lr is None else stage.decoder_lr / stage.lr
        for group, share in zip(self.optimiser.param_groups, (slower, 1.0), strict=True):
            group["lr"] = rate * share
        modality = stage.modalities[self.step // stage.turn % len(stage.modalities)]
        lesson = self._lesson(modality)
        loss = F.cross_entropy(
            answer_logits(self.model, lesson).flatten(0, 1),
            lesson.answers.flatten().to(self.model.device),
        )
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        if self.recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.raw.parameters(), self.recipe.clip)
        self.optimiser.step()
        self.step += 1
        if self.step % CURVE_EVERY == 0 or self.step == stage.steps:
            self.curve.append(self._point(loss.item()))
        if self.step == stage.steps:
            self.stage, self.step, self.optimiser = self.stage + 1, 0, self._optimiser()

    def _lesson(self, modality: str) -> Lesson:
        """The next batch: fresh, or the next part of the current epoch."""
        if self.epochs is None:
            return self.lessons.draw(modality, (self.stage, self.step), self.recipe.batch)
        stage = self.recipe.stages[self.stage]
        cycle, within = divmod(self.step, stage.turn * len(stage.modalities))
        earlier = cycle * stage.turn + within % stage.turn  # batches of this modality
        return self.epochs.draw(
            modality, self.stage, earlier * self.recipe.batch, self.recipe.batch
        )

    @property
    def done(self) -> bool:
        return self.stage == len(self.recipe.stages)

    @torch.no_grad()
    def _point(self, loss: float) -> dict[str, float | int]:
        """Loss and accuracy on fresh training counts: VE is never looked at while training."""
        point: dict[str, float | int] = {"stage": self.stage + 1, "step": self.step, "loss": loss}
        for i, modality in enumerate(MODALITIES):
            lesson = self.lessons.draw(modality, (100 + i, self.step), 128)
            point[modality] = float(right(self.model, lesson).mean())
        return point

    # --- checkpoints ----------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Everything that the next step depends on."""
        tensors = {f"model.{k}": v.contiguous() for k, v in self.model.raw.state_dict().items()}
        for i, kept in self.optimiser.state_dict()["state"].items():
            tensors |= {f"adam.{i}.{name}": value.contiguous() for name, value in kept.items()}
        place = {"stage": self.stage, "step": self.step, "curve": self.curve}
        return save(tensors, {"place": json.dumps(place)})

    def restore(self, path: Path) -> bool:
        """Take up a checkpoint; False where there is none or it is not whole."""
        try:
            with safe_open(path, "pt") as file:
                place = json.loads(file.metadata()["place"])
                tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, ValueError):
            return False
        self.stage, self.step, self.curve = place["stage"], place["step"], place["curve"]
        own = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
        self.model.raw.load_state_dict(own)
        self.optimiser = self._optimiser()
        state = self.optimiser.state_dict()
        for key, value in tensors.items():
            if key.startswith("adam."):
                _, index, name = key.split(".")
                state["state"].setdefault(int(index), {})[name] = value
        self.optimiser.load_state_dict(state)
        return True


def learning_rate(recipe: Recipe, stage: Stage, step: int) -> float:
    """Linear warm-up times a fall, cosine or linear, from 1 down to the floor."""
    done = step / stage.steps
    left = 1 - done if recipe.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    warm = min(1.0, (step + 1) / stage.warmup)
    return stage.lr * warm * (recipe.floor + (1 - recipe.floor) * left)


@torch.no_grad()
def right(model: ToyVLM, lesson: Lesson) -> Float[Tensor, " example"]:
    """1.0 where every token of the answer is the most likely one."""
    found = answer_logits(model, lesson).argmax(-1).cpu() == lesson.answers
    return found.all(1).float()


def scores(model: ToyVLM, lessons: Lessons, *, per_count: int = 20) -> dict[str, float]:
    """Shares of right answers on test examples, by modality and regime."""
    found = {}
    for i, modality in enumerate(MODALITIES):
        for j, (regime, counts) in enumerate(lessons.world.regimes.items()):
            lesson = lessons.of(modality, np.repeat(counts, per_count), (200 + i, j), split="test")
            found[f"{modality}.{regime}"] = round(float(right(model, lesson).mean()), 4)
    return found


def run(config: Config, progress: Callable[[str, float], None] = lambda what, share: None) -> Path:
    """Train both models, resuming what was begun; the folder appears once both are done.

    Raises:
        InputError: no such preset, or a folder that cannot be used.
    """
    chosen = preset(config.model)
    if config.seed < 0:
        raise InputError(f"seed is {config.seed}; give a whole number of at least 0")
    device = device_named(config.device)
    facts = {"model": config.model, "seed": config.seed, **as_json(chosen)}
    with RunFolder.open(config.out, command="counting train", config=facts) as folder, one_thread():
        cards = {}
        for task in TASKS:
            learner = Learner(chosen, task, config.seed, device=device)
            content, card = _trained(folder, learner, chosen, task, progress)
            folder.write(f"{task}/{WEIGHTS}", content)
            folder.write(f"{task}/{CARD}", json.dumps(card, indent=1) + "\n")
            folder.figure(f"curve_{task}", figure(card))
            cards[task] = card
        folder.finish(
            {f"{task}.{k}": v for task, card in cards.items() for k, v in card["scores"].items()}
        )
    return folder.path


def _trained(
    folder: RunFolder,
    learner: Learner,
    chosen: Preset,
    task: str,
    progress: Callable[[str, float], None],
) -> tuple[bytes, dict]:
    """One model's file and card; what was finished or begun before is not done again."""
    checkpoint = folder.scratch / f"{task}.safetensors"
    learner.restore(checkpoint)
    total = sum(stage.steps for stage in learner.recipe.stages)
    while not learner.done:
        learner.advance()
        before = sum(stage.steps for stage in learner.recipe.stages[: learner.stage])
        progress(f"{task} model", (before + learner.step) / total)
        if learner.step % CHECKPOINT_EVERY == 0:
            put_file(checkpoint, learner.to_bytes())
    return _finished(learner, chosen, task)


def _finished(learner: Learner, chosen: Preset, task: str) -> tuple[bytes, dict]:
    """Half precision where no score changes, else single; and the card."""
    seed = learner.lessons.seed
    model, single = learner.model, learner.model.raw.state_dict()
    single = {k: v.clone() for k, v in single.items()}
    found = scores(model, learner.lessons)
    model.raw.load_state_dict({k: v.half().float() for k, v in single.items()})
    same = scores(model, learner.lessons) == found
    if not same:
        model.raw.load_state_dict(single)
    content = to_bytes(model, dtype=torch.float16 if same else torch.float32)
    card = make_card(
        content,
        preset=chosen.name,
        task=task,
        seed=seed,
        command=f"python -m circuits counting train --model {chosen.name} --seed {seed} --out DIR",
        world=as_json(chosen.world),
        recipe=as_json(chosen.recipes[task]),
        precision="half" if same else "single",
        parameters=sum(p.numel() for p in model.raw.parameters()),
        torch=torch.__version__,
        scores=found,
        curve=[{k: round(v, 5) for k, v in point.items()} for point in learner.curve],
    )
    return content, card


def figure(card: dict) -> Figure:
    """Loss and accuracy over the steps of both stages."""
    curve, lengths = card["curve"], [stage["steps"] for stage in card["recipe"]["stages"]]
    step = [sum(lengths[: p["stage"] - 1]) + p["step"] for p in curve]
    fig, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    axes[0].plot(step, [p["loss"] for p in curve], color="0.2")
    axes[0].set(xlabel="step", ylabel="loss of a batch (nats)", yscale="log")
    for modality, style in zip(MODALITIES, ("-", "--"), strict=True):
        axes[1].plot(step, [p[modality] for p in curve], style, label=modality)
    axes[1].set(xlabel="step", ylabel="answers right, training counts", ylim=(-0.02, 1.02))
    axes[1].legend(frameon=False)
    for ax in axes:
        ax.axvline(lengths[0], color="0.7", lw=1)
    fig.suptitle(f"{card['preset']}, {card['task']} model, seed {card['seed']}", size=10)
    return fig


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread: sums in one order, and faster at this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
