"""A few lines from a model as it learns, and the best checkpoint of a run, read back and measured."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from gpt import device, evaluate
from gpt.decoding.context import Context
from gpt.decoding.engine import generate
from gpt.device import Compute
from gpt.errors import NotANumber
from gpt.evaluate import Window
from gpt.interrupt import Stopped, StopSignal
from gpt.model.decoder import GPT
from gpt.model.loss import bits_per_byte
from gpt.parallel.world import World
from gpt.runs import checkpoint, folder
from gpt.sample_config import SampleConfig
from gpt.training.opening import Setting
from gpt.training.pairs import PairData, PairSet
from gpt.training.recipe import Recipe
from gpt.training.result import Answers

Measure = Callable[[GPT, Iterable[Window], Compute], tuple[float, int]]

SAMPLE = SampleConfig(max_tokens=80)  # what is shown as the model learns
ASKED = 500  # pairs of each side that are compared with what the model answers


@dataclass(frozen=True)
class Best:
    """The best checkpoint: its loss over all that is held out, nats a token, a few lines from it, and how it answers
    the pairs of each side, where there are any."""

    path: Path
    model: GPT
    val_loss: float | None
    bits_per_byte: float | None
    text: str
    answers: Answers | None
    held_out_answers: Answers | None


def read_best(setting: Setting, recipe: Recipe, stop: StopSignal) -> Best:
    """Reads it back, measures it on the whole held-out text, and lets it speak. Raises `Stopped` after a signal."""
    path = Path(setting.world.decided(lambda: str(folder.find_checkpoint(str(setting.run)))))
    data, compute = setting.data, setting.compute
    if compute.dtype != torch.float32:  # `gpt eval` computes in its own default, so the two agree
        compute = device.pick(str(compute.device), "auto")
    model = _read(path, recipe, compute, setting.world)
    loss = bits = None
    if len(data.held_out):
        whole = data.windows(recipe.model.block_size)
        loss = mean_loss(setting.world, model, whole, compute, stop)
        bits = bits_per_byte(loss * data.held_out_targets, data.held_out_bytes)
    answers = held_out_answers = None
    if isinstance(data, PairData):
        answers, held_out_answers = (
            _answers(setting.world, model, side, compute, stop) for side in (data.train, data.held_out)
        )
    text = sample_lines(setting, model, compute, recipe.seed, stop)
    return Best(path, model, loss, bits, text, answers, held_out_answers)


def _read(path: Path, recipe: Recipe, compute: Compute, world: World) -> GPT:
    """The model of a checkpoint; where processes have parts of it, as they have."""
    if not world.in_step:
        return checkpoint.load(path, compute.device).model
    from gpt.training import parts  # torch's part of it takes seconds

    return parts.divided(recipe, compute, world, path).model


def _answers(world: World, model: GPT, pairs: PairSet, compute: Compute, stop: StopSignal) -> Answers | None:
    """How pairs are answered; None where there are none. Raises `Stopped` after a signal."""
    if not pairs.ids:
        return None
    exact, asked = _summed(evaluate.count_exact, world, model, pairs.spread(ASKED), compute, stop)
    return Answers(int(exact), int(asked), len(pairs.ids))


def mean_loss(world: World, model: GPT, some: Iterable[Window], compute: Compute, stop: StopSignal) -> float:
    """Nats a token over windows, of which each process computes its share, so that none waits long for another. Raises
    `Stopped` in all after a signal in one."""
    total, count = _summed(evaluate.total_loss, world, model, some, compute, stop)
    return total / count if count else math.nan


def _summed(
    measure: Measure, world: World, model: GPT, some: Iterable[Window], compute: Compute, stop: StopSignal
) -> tuple[float, float]:
    """The sums of what ``measure`` gives over windows, of which each process computes its share. Raises `Stopped` in
    all after a signal in one."""
    total, count, stopped = 0.0, 0, False
    try:
        total, count = measure(model, world.watching(stop, _share(world, some)), compute)
    except Stopped:
        stopped = True
    total, counted, stops = world.sum(total, count, stopped)
    if stops:
        raise Stopped
    return total, counted


def _share(world: World, some: Iterable[Window]) -> Iterator[Window]:
    """The windows that a process computes. Where all compute together, each has as many as the others: at the end
    maybe one of which nothing counts."""
    if not world.in_step:
        yield from world.share(some)
        return
    windows = iter(some)
    while at_once := list(islice(windows, world.rows)):
        mine = at_once[min(world.row, len(at_once) - 1)]
        yield mine if world.row < len(at_once) else dataclasses.replace(mine, skipped=len(mine.y))


def sample_lines(setting: Setting, model: GPT, compute: Compute, seed: int, stop: StopSignal) -> str:
    """The same lines for the same weights, from the first process; leaves torch's global random state alone. Raises
    `Stopped` after a signal."""
    if setting.world.in_step:  # which all compute together, and all come to the same
        return _sample_lines(setting, model, compute, seed, stop)
    return setting.world.decided(lambda: _sample_lines(setting, model, compute, seed, stop))


def _sample_lines(setting: Setting, model: GPT, compute: Compute, seed: int, stop: StopSignal) -> str:
    training = model.training
    model.eval()
    tokenizer, prompt = setting.data.tokenizer, setting.data.prompt
    given = tokenizer.encode(prompt).tolist()
    how = dataclasses.replace(SAMPLE, greedy=True) if prompt else SAMPLE
    try:
        tokens = setting.world.watching(stop, generate(Context(model, compute), given, how, tokenizer.eot, seed))
        ids = [token.id for token in tokens if token.id != tokenizer.eot]
    except NotANumber as error:  # the loss is what decides whether the run goes on
        setting.warn(f"there is no sample: {error.message}")
        return ""
    finally:
        model.train(training)
    return prompt + tokenizer.decode(ids)
