"""How are the toy's models made? Text first, then pictures and text (arXiv:2605.30170, section 3).

Examples of a step depend on seed, stage and step alone, so a run that was killed goes on bit for
bit where it stood, and two runs of one configuration on one machine give the same file.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from circuits.counting.boards import World, draw_boards, draw_strings, generator
from circuits.counting.cards import CARD, WEIGHTS, as_json, make_card
from circuits.counting.presets import TASKS, Preset, Recipe, Stage, preset
from circuits.counting.questions import MODALITIES, Asker
from circuits.runs import RunFolder
from interp.errors import InputError
from interp.model import Batch
from interp.toy import ToyVLM
from interp.toy.weights import to_bytes

CHECKPOINT_EVERY = 200  # steps; about ten seconds of the tiny preset
CURVE_EVERY = 100
_ITEMS, _STRINGS, _DRAWS = 1, 2, 3  # streams of one step's seed


@dataclass(frozen=True)
class Config:
    """Train both models of one seed: the one that answers with a number, and True or False."""

    out: Path
    """The folder to write: number/ and truth/ with weights and a card each."""
    model: str = "tiny"
    """A preset."""
    seed: int = 0


class Lesson(NamedTuple):
    """A batch of questions and the tokens of their right answers."""

    batch: Batch
    answers: Int[Tensor, "example answer"]


class Lessons:
    """The examples of one model: a function of stage and step, never seen twice."""

    def __init__(self, asker: Asker, world: World, task: str, seed: int, near: float) -> None:
        self.asker, self.world, self.task, self.seed, self.near = asker, world, task, seed, near

    def draw(
        self, modality: str, place: tuple[int, int], n: int, *, split: str = "train"
    ) -> Lesson:
        """`n` examples of counts that the modality is shown in training."""
        top = self.world.vision_max if modality == "vision" else self.world.text_max
        counts = generator((self.seed, *place), stream=_DRAWS).integers(0, top + 1, n)
        return self.of(modality, counts, place, split=split)

    def of(
        self,
        modality: str,
        counts: Int[np.ndarray, " example"],
        place: tuple[int, int],
        *,
        split: str = "train",
    ) -> Lesson:
        """Examples of the given counts."""
        items = self._items(modality, counts, (self.seed, *place, _ITEMS), split)
        if self.task == "number":
            return Lesson(self.asker.number(modality, items), self.asker.number_answer(counts))
        others = self._others(counts, generator((self.seed, *place), stream=_DRAWS + 1))
        strings = self._items("text", others, (self.seed, *place, _STRINGS), split)
        answers = self.asker.truth_answer(others == counts)
        return Lesson(self.asker.truth(modality, items, strings), answers)

    def _items(
        self, modality: str, counts: np.ndarray, seed: tuple[int, ...], split: str
    ) -> np.ndarray:
        size = self.world.size
        if modality == "vision":
            spread = self.world.spread
            return draw_boards(counts, size=size, spread=spread, seed=seed, split=split)
        return draw_strings(counts, length=size**2, seed=seed, split=split)

    def _others(self, counts: np.ndarray, rng: np.random.Generator) -> Int[np.ndarray, " example"]:
        """Half the same number, half another: uniform, or (a share `near`) 1 to 5 away.

        Never all letters: that string exists once, so one of the splits lacks it.
        """
        n, most = len(counts), self.world.size**2 - 1
        far = (counts + rng.integers(1, most + 1, n)) % (most + 1)
        step = rng.integers(1, min(5, most) + 1, n) * rng.choice([-1, 1], n)
        close = np.where((counts + step < 0) | (counts + step > most), counts - step, counts + step)
        other = np.where(rng.random(n) < self.near, close, far)
        return np.where(rng.random(n) < 0.5, counts, other)


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

    def __init__(self, preset: Preset, task: str, seed: int) -> None:
        self.recipe: Recipe = preset.recipes[task]
        self.model = ToyVLM(preset.config, seed=seed)
        self.model.raw.requires_grad_(True)
        self.model.raw.set_use_fused_attention(True)
        asker = Asker(self.model)
        self.lessons = Lessons(asker, preset.world, task, seed, self.recipe.near)
        self.stage, self.step, self.curve = 0, 0, []
        self.optimiser = self._optimiser()

    def _optimiser(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        return torch.optim.AdamW(
            self.model.raw.parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay
        )

    def advance(self) -> None:
        """One step of the current stage; behind its last step the next stage begins."""
        stage = self.recipe.stages[self.stage]
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(stage, self.step, self.recipe.floor)
        modality = stage.modalities[self.step % len(stage.modalities)]
        lesson = self.lessons.draw(modality, (self.stage, self.step), self.recipe.batch)
        loss = F.cross_entropy(
            answer_logits(self.model, lesson).flatten(0, 1),
            lesson.answers.flatten().to(self.model.device),
        )
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.raw.parameters(), self.recipe.clip)
        self.optimiser.step()
        self.step += 1
        if self.step % CURVE_EVERY == 0 or self.step == stage.steps:
            self.curve.append(self._point(loss.item()))
        if self.step == stage.steps:
            self.stage, self.step, self.optimiser = self.stage + 1, 0, self._optimiser()

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


def learning_rate(stage: Stage, step: int, floor: float) -> float:
    """Linear warm-up times a cosine from 1 down to `floor`."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / stage.steps))
    return stage.lr * min(1.0, (step + 1) / stage.warmup) * (floor + (1 - floor) * cosine)


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
    facts = {"model": config.model, "seed": config.seed, **as_json(chosen)}
    with RunFolder.open(config.out, command="counting train", config=facts) as folder, one_thread():
        cards = {}
        for task in TASKS:
            content, card = _trained(folder, chosen, task, config.seed, progress)
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
    chosen: Preset,
    task: str,
    seed: int,
    progress: Callable[[str, float], None],
) -> tuple[bytes, dict]:
    """One model's file and card; what was finished or begun before is not done again."""
    learner = Learner(chosen, task, seed)
    checkpoint = folder.scratch / f"{task}.safetensors"
    learner.restore(checkpoint)
    total = sum(stage.steps for stage in learner.recipe.stages)
    while not learner.done:
        learner.advance()
        before = sum(stage.steps for stage in learner.recipe.stages[: learner.stage])
        progress(f"{task} model", (before + learner.step) / total)
        if learner.step % CHECKPOINT_EVERY == 0:
            _replace(checkpoint, learner.to_bytes())
    return _finished(learner, chosen, task, seed)


def _finished(learner: Learner, chosen: Preset, task: str, seed: int) -> tuple[bytes, dict]:
    """Half precision where no score changes, else single; and the card."""
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


def _replace(path: Path, content: bytes) -> None:
    """Write beside, then rename: a kill leaves the old checkpoint or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(path)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread: sums in one order, and faster at this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
