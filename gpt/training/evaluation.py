"""Held-out loss, samples, and the best checkpoint of a run, read back and measured."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
from gpt.runs import folder
from gpt.sample_config import SampleConfig
from gpt.training.budget import TimeBudget
from gpt.training.context import Answers, RunContext
from gpt.training.data import Dataset
from gpt.training.example_rows import ExampleRows
from gpt.training.parallel import Parallel
from gpt.training.recipe import Recipe

Measure = Callable[[GPT, Iterable[Window], Compute], tuple[float, int]]

SAMPLE = SampleConfig(max_tokens=80)  # shown as the model learns
ASKED = 500  # pairs of each side whose answers are checked


@dataclass(frozen=True)
class Best:
    """The best checkpoint: its loss over ``val_tokens`` held-out tokens, in nats per token, a sample, and its answers
    to the pairs of each side, if the run is on pairs."""

    path: Path
    model: GPT
    val_loss: float | None
    val_tokens: int
    bits_per_byte: float | None
    text: str
    answers: Answers | None = None
    held_out_answers: Answers | None = None


def read_best(run: RunContext, parallel: Parallel, recipe: Recipe, budget: TimeBudget | None = None) -> Best:
    """Reads back the best checkpoint, measures it on all held-out text, or as much of it as the ``budget`` has time
    for, and samples from it. Raises `Stopped` after a signal."""
    path = Path(run.world.broadcast_object(lambda: str(folder.find_checkpoint(str(run.run)))))
    data, compute, stop = run.data, run.compute, run.session.stop
    if compute.dtype != torch.float32:  # `gpt eval` computes in its own default, so the two agree
        compute = device.pick(str(compute.device), "auto")
    model = parallel.load(path, recipe, compute)
    loss = bits = None
    count = 0.0
    if data.held_out_tokens:
        size, most = recipe.model.block_size, budget.last_windows if budget else 0
        windows = data.some_windows(size, most) if most else data.windows(size)
        total, count = _summed(evaluate.total_loss, parallel, model, windows, compute, stop)
        loss = total / count if count else math.nan
        bits = bits_per_byte(loss * data.held_out_targets, data.held_out_bytes)
    asked = (budget and budget.answers) or ASKED
    answers = [_answers(parallel, model, side, asked, compute, stop) for side in data.pairs or ()]
    text = sample_lines(run, parallel, model, compute, recipe.seed)
    return Best(path, model, loss, int(count), bits, text, *answers)


def _answers(
    parallel: Parallel, model: GPT, pairs: ExampleRows, wanted: int, compute: Compute, stop: StopSignal
) -> Answers | None:
    """Counts the pairs that are answered exactly; None if there are none. Raises `Stopped` after a signal."""
    if not pairs:
        return None
    exact, asked = _summed(evaluate.count_exact, parallel, model, pairs.spread(wanted), compute, stop)
    return Answers(int(exact), int(asked), len(pairs))


def mean_loss(parallel: Parallel, model: GPT, windows: Iterable[Window], compute: Compute, stop: StopSignal) -> float:
    """The mean loss over windows, in nats per token; each process computes its share of them. Raises `Stopped` on all
    after a signal on one."""
    total, count = _summed(evaluate.total_loss, parallel, model, windows, compute, stop)
    return total / count if count else math.nan


def _summed(
    measure: Measure, parallel: Parallel, model: GPT, windows: Iterable[Window], compute: Compute, stop: StopSignal
) -> tuple[float, float]:
    """Sums ``measure`` over windows, of which each process computes its share. Raises `Stopped` on all after a signal
    on one."""
    total, count, stopped = 0.0, 0, False
    try:
        total, count = measure(model, parallel.until_stopped(stop, parallel.windows(windows)), compute)
    except Stopped:
        stopped = True
    total, counted, stops = parallel.world.all_reduce_sum(total, count, stopped)
    if stops:
        raise Stopped
    return total, counted


def sample_lines(run: RunContext, parallel: Parallel, model: GPT, compute: Compute, seed: int) -> str:
    """A sample, the same for the same weights; torch's global random state stays as it is. Raises `Stopped` after a
    signal."""
    return parallel.once(lambda: _sample_lines(run, parallel, model, compute, seed))


def sample_seconds(parallel: Parallel, data: Dataset, tokens: int = 8) -> float:
    """Returns how long a sample takes, as estimated from a few ``tokens``."""

    def timed() -> float:
        context = Context(parallel.model, parallel.compute, vocab_size=data.tokenizer.vocab_size)
        started = time.perf_counter()
        for _ in generate(context, data.prompt_ids, dataclasses.replace(SAMPLE, max_tokens=tokens), (), 0):
            pass
        return SAMPLE.max_tokens * (time.perf_counter() - started) / tokens

    parallel.model.eval()
    try:
        return parallel.once(timed)
    finally:
        parallel.model.train()


def _sample_lines(run: RunContext, parallel: Parallel, model: GPT, compute: Compute, seed: int) -> str:
    training = model.training
    model.eval()
    tokenizer, prompt = run.data.tokenizer, run.data.prompt
    how = dataclasses.replace(SAMPLE, greedy=True) if prompt else SAMPLE
    try:
        context = Context(model, compute, vocab_size=tokenizer.vocab_size)
        drawn = generate(context, run.data.prompt_ids, how, tokenizer.ends, seed)
        tokens = parallel.until_stopped(run.session.stop, drawn)
        ids = [token.id for token in tokens if token.id not in tokenizer.ends]
    except NotANumber as error:  # the loss decides whether the run continues
        run.session.warn(f"there is no sample: {error.message}")
        return ""
    finally:
        model.train(training)
    return prompt + tokenizer.decode(ids)
