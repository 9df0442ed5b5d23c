"""A few lines from a model as it learns, and the best checkpoint of a run, read back and measured."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from gpt import device, evaluate
from gpt.decoding.context import Context
from gpt.decoding.generate import generate
from gpt.device import Compute
from gpt.evaluate import Window
from gpt.interrupt import Stopped, StopSignal
from gpt.model.decoder import GPT
from gpt.model.loss import bits_per_byte
from gpt.parallel.world import World
from gpt.runs import checkpoint, folder
from gpt.sample_config import SampleConfig
from gpt.training.opening import Setting
from gpt.training.recipe import Recipe

SAMPLE = SampleConfig(max_tokens=80)  # what is shown as the model learns


@dataclass(frozen=True)
class Best:
    """The best checkpoint: its loss over all that is held out, nats a token, and a few lines from it."""

    path: Path
    model: GPT
    val_loss: float | None
    bits_per_byte: float | None
    text: str


def read_best(setting: Setting, recipe: Recipe, stop: StopSignal) -> Best:
    """Reads it back, measures it on the whole held-out text, and lets it speak. Raises `Stopped` after a signal."""
    path = setting.world.decided(lambda: folder.find_checkpoint(str(setting.run)))
    data, compute = setting.data, setting.compute
    if compute.dtype != torch.float32:  # `gpt eval` computes in its own default, so the two agree
        compute = device.pick(str(compute.device), "auto")
    model = checkpoint.load(path, compute.device).model
    loss = bits = None
    if len(data.held_out):
        whole = data.windows(recipe.model.block_size)
        loss = mean_loss(setting.world, model, whole, compute, stop)
        bits = bits_per_byte(loss * data.held_out_targets, data.held_out_bytes)
    return Best(path, model, loss, bits, sample_lines(setting, model, compute, recipe.seed, stop))


def mean_loss(world: World, model: GPT, some: Iterable[Window], compute: Compute, stop: StopSignal) -> float:
    """Nats a token over windows, of which each process computes its share, so that none waits long for another. Raises
    `Stopped` in all after a signal in one."""
    total, count, stopped = 0.0, 0, False
    try:
        total, count = evaluate.total_loss(model, stop.watching(world.share(some)), compute)
    except Stopped:
        stopped = True
    total, counted, stops = world.sum(total, count, stopped)
    if stops:
        raise Stopped
    return total / counted if counted else math.nan


def sample_lines(setting: Setting, model: GPT, compute: Compute, seed: int, stop: StopSignal) -> str:
    """The same lines for the same weights, from the first process; leaves torch's global random state alone. Raises
    `Stopped` after a signal."""
    return setting.world.decided(lambda: _sample_lines(setting, model, compute, seed, stop))


def _sample_lines(setting: Setting, model: GPT, compute: Compute, seed: int, stop: StopSignal) -> str:
    training = model.training
    model.eval()
    tokenizer, prompt = setting.data.tokenizer, setting.data.prompt
    given = tokenizer.encode(prompt).tolist()
    how = dataclasses.replace(SAMPLE, greedy=True) if prompt else SAMPLE
    try:
        tokens = stop.watching(generate(Context(model, compute), given, how, tokenizer.eot, seed))
        ids = [token.id for token in tokens if token.id != tokenizer.eot]
    finally:
        model.train(training)
    return prompt + tokenizer.decode(ids)
