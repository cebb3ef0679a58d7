"""How fast is the toy: what its hooks cost, training, cached answers, a whole evaluation?

Fused attention as in training and evaluation, one thread; untrained weights, but for answers.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from circuits.counting.examples import make_examples
from circuits.counting.lessons import Lesson, Lessons
from circuits.counting.presets import PRESETS, TASKS, Preset, Stage
from circuits.counting.questions import MODALITIES, Asker
from circuits.counting.subject import MAX_NEW_TOKENS, Subject
from circuits.counting.training import Learner, answer_logits
from circuits.presets import load
from interp.model import Batch, generate
from interp.toy import ToyVLM
from tests.bench.figures import AT_LEAST, AT_MOST, Figure, Race, Size, race, seconds

Figures = Iterator[tuple[str, Figure]]

MOST_OVERHEAD = 1.05
LEAST_SPEEDUP = {"vision": 1.6, "text": 3.0}
MOST_EVALUATION = 300.0  # seconds
EVALUATED = 12_000  # examples of the published test set, in both modalities
OVERHEAD_BATCH, ANSWER_BATCH = 64, 32


def model_of(preset: Preset, seed: int = 0) -> ToyVLM:
    model = ToyVLM(preset.config, seed=seed)
    model.raw.set_use_fused_attention(True)
    return model


def lesson_of(model: ToyVLM, preset: Preset, modality: str, n: int) -> Lesson:
    return Lessons(Asker(model), preset.world, "number", 0, 0.0).draw(modality, (0, 0), n)


# --- what the hooks cost ---------------------------------------------------------------------


def hooks_overhead(size: Size) -> Figures:
    """`toy.hooks_overhead.text`, `.vision`, and the larger of the two."""
    preset = PRESETS[size.preset]
    hooked, plain = model_of(preset), without_hooks(model_of(preset))
    found = {}
    for modality in MODALITIES:
        lesson = lesson_of(hooked, preset, modality, OVERHEAD_BATCH)
        found[modality] = race_of_steps(hooked, plain, lesson, rounds=size.rounds)
        yield f"toy.hooks_overhead.{modality}", _overhead(found[modality], f"a {modality} batch")
    worst = max(found.values(), key=lambda one: one.slowdown or float("inf"))
    timings = {
        f"{modality}.{name}": times
        for modality, one in found.items()
        for name, times in zip(("hooked", "plain"), one, strict=True)
    }
    overall = _overhead(worst, "the dearer of a vision and a text batch")
    yield "toy.hooks_overhead", replace(overall, timings=timings)


def without_hooks(model: ToyVLM) -> ToyVLM:
    """The model itself, with a plain function in place of every `HookPoint`."""
    for module in list(model.raw.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, HookPoint):
                delattr(module, name)
                setattr(module, name, _passed)
    return model


def _passed(x: Tensor) -> Tensor:
    return x


_passed.has_hooks = lambda: False  # the norms ask before they take the fused way


def race_of_steps(hooked: ToyVLM, plain: ToyVLM, lesson: Lesson, *, rounds: int) -> Race:
    """Forward and backward of both, once outputs and gradients are equal bit for bit."""
    for model in (hooked, plain):
        model.raw.requires_grad_(True)
    ours, other = (lambda model=model: _step(model, lesson) for model in (hooked, plain))
    return race(ours, other, same=_same_tensors, rounds=rounds)


def _step(model: ToyVLM, lesson: Lesson) -> dict[str, Tensor | None]:
    model.raw.zero_grad(set_to_none=True)
    logits = answer_logits(model, lesson)
    F.cross_entropy(logits.flatten(0, 1), lesson.answers.flatten()).backward()
    return {"": logits.detach()} | {name: p.grad for name, p in model.raw.named_parameters()}


def _same_tensors(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
    """The same names, and the same values or none (a text batch gives the tower no gradient)."""
    return a.keys() == b.keys() and all(
        a[k] is b[k] if a[k] is None or b[k] is None else torch.equal(a[k], b[k]) for k in a
    )


def _overhead(one: Race, batch: str) -> Figure:
    return Figure(
        one.slowdown,
        "x",
        f"CPU time of forward and backward of {batch} of {OVERHEAD_BATCH}, no hook in use.",
        {"hooked": one.ours, "plain": one.other},
        "The same modules with a plain function in place of every HookPoint; outputs and gradients"
        " are equal bit for bit.",
        MOST_OVERHEAD,
        AT_MOST,
    )


# --- training --------------------------------------------------------------------------------


def train(size: Size) -> Figures:
    """`toy.train.text`, `.vision` of the number model, `toy.train.truth.*` of the other."""
    preset = PRESETS[size.preset]
    for task in TASKS:
        for modality in MODALITIES:
            key = f"toy.train.{'' if task == 'number' else f'{task}.'}{modality}"
            yield key, _training(preset, task, modality, size.steps)


def _training(preset: Preset, task: str, modality: str, steps: int) -> Figure:
    recipe = preset.recipes[task]
    stage = Stage(steps + 4, recipe.stages[0].lr, recipe.stages[0].warmup, (modality,))
    recipe = replace(recipe, stages=(stage,))
    learner = Learner(replace(preset, recipes={task: recipe}), task, 0)
    times = [seconds(learner.advance)[0] for _ in range(steps + 3)][3:]
    side = preset.world.size
    return Figure(
        recipe.batch / min(times),
        "examples/s",
        f"Examples a CPU-second in the fastest step of training the {task} model on {modality},"
        f" {side}x{side}, batch {recipe.batch}: drawing, forward, backward, clipping, AdamW.",
        {"step": times},
    )


# --- answers ---------------------------------------------------------------------------------


def answers(size: Size) -> Figures:
    """`toy.answers.vision`, `.text`: what keeping keys and values is worth."""
    preset = PRESETS[size.preset]
    model = load(preset.name)  # trained: untrained weights name one number for everything
    model.raw.set_use_fused_attention(True)
    for modality in MODALITIES:
        batch = lesson_of(model, preset, modality, ANSWER_BATCH).batch
        one = race_of_answers(model, reread, batch, rounds=size.rounds)
        yield f"toy.answers.{modality}", _speedup(one, modality, preset.world.size)


def race_of_answers(
    model: ToyVLM,
    other: Callable[[ToyVLM, Batch], Int[Tensor, "batch new"]],
    batch: Batch,
    *,
    rounds: int,
) -> Race:
    """Four greedy tokens with keys and values kept, and another way, once both give the same."""
    return race(
        lambda: generate(model, batch, max_new_tokens=MAX_NEW_TOKENS, stop=None),
        lambda: other(model, batch),
        same=torch.equal,
        rounds=rounds,
    )


@torch.no_grad()
def reread(model: ToyVLM, batch: Batch) -> Int[Tensor, "batch new"]:
    """Greedy answers as the published code gives them: all is read again for every token.

    The tower sees a picture once; projector and decoder run every time. The last block computes
    its last position only, as ours does when it reads a prompt.
    """
    raw, new = model.raw, batch.tokens[:, :0]
    seen = raw.vision(**batch.inputs) if batch.inputs else None
    for _ in range(MAX_NEW_TOKENS):
        whole = batch.extend(new)
        image = None if seen is None else raw.hook_projector(raw.projector(seen))
        x = raw.decode(
            raw.input_to_embed(whole.tokens, image),
            whole.positions,
            key_masks=[None] * len(raw.blocks),
            read_from=whole.tokens.shape[1] - 1,
        )
        token = raw.unembed(raw.ln_final(x)).argmax(-1)
        new = torch.cat([new, token], 1)
    return new


def _speedup(one: Race, modality: str, side: int) -> Figure:
    return Figure(
        one.speedup,
        "x faster",
        f"Greedy {modality} answers of {MAX_NEW_TOKENS} tokens, {side}x{side}, batch"
        f" {ANSWER_BATCH}, with keys and values kept; no early stop.",
        {"cached": one.ours, "reread": one.other},
        "Our loop that runs the decoder (and the projector, not the tower) on the whole sequence"
        " for every token, its last block for the last position only; the tokens are the same.",
        LEAST_SPEEDUP[modality],
        AT_LEAST,
    )


# --- a whole evaluation ----------------------------------------------------------------------


def evaluate(size: Size) -> Figures:
    """`toy.evaluate` in CPU seconds, and `toy.evaluate.wall`."""
    preset = PRESETS[size.preset]
    examples = make_examples(preset.world, per_count=size.per_count, seed=0)
    model = model_of(preset)

    def ask() -> None:
        subject = Subject(model, model, model, preset.world, examples)
        for modality in MODALITIES:
            subject.answers(modality)  # and those held to digits, from the same reading

    ask()
    cpu, wall = zip(*(seconds(ask) for _ in range(max(1, size.rounds // 6))), strict=True)
    what = (
        f"answers to {EVALUATED:,} examples in both modalities, free (untrained weights hardly ever"
        f" stop early) and held to digits; scaled from {len(examples)} of all counts."
    )
    timings, share = {"cpu": list(cpu), "wall": list(wall)}, EVALUATED / len(examples)
    yield (
        "toy.evaluate",
        Figure(
            min(cpu) * share, "s", f"CPU time of {what}", timings, None, MOST_EVALUATION, AT_MOST
        ),
    )
    yield "toy.evaluate.wall", Figure(min(wall) * share, "s", f"Wall time of {what}", timings)
