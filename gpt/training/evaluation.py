"""Held-out loss, samples, and the best checkpoint of a run, read back and measured."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
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
from gpt.model.params import breakdown
from gpt.runs import folder
from gpt.sample_config import SampleConfig
from gpt.training.context import Answers, Result, RunContext
from gpt.training.data import Dataset
from gpt.training.example_rows import ExampleRows
from gpt.training.logs import Speed
from gpt.training.pace import TimeBudget
from gpt.training.parallel import Parallel
from gpt.training.recipe import Recipe
from gpt.training.state import TrainState

Measure = Callable[[GPT, Iterable[Window], Compute], tuple[float, int]]

SAMPLE = SampleConfig(max_tokens=80)  # shown as the model learns
EVAL_SHARE, EVAL_TOKENS = 0.005, (4096, 32_768)  # held-out tokens of a periodic evaluation: of all, within bounds
ASKED = 500  # pairs of each side whose answers are checked


def windows_to_evaluate(recipe: Recipe) -> int:
    """The held-out windows of a periodic evaluation."""
    tokens = min(max(EVAL_TOKENS[0], round(EVAL_SHARE * recipe.steps * recipe.batch_tokens)), EVAL_TOKENS[1])
    return max(1, tokens // recipe.model.block_size)


def read_best(
    run: RunContext, parallel: Parallel, recipe: Recipe, state: TrainState, budget: TimeBudget | None, speed: Speed
) -> tuple[Result, GPT]:
    """Reads back the best checkpoint, measures it on all held-out text, or as much of it as the ``budget`` has time
    for, and samples from it: the result of the run, and its model. Raises `Stopped` after a signal."""
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
    answers = [_answers(parallel, model, side, asked, compute, stop) for side in data.pairs or (None, None)]
    text = sample_lines(run, parallel, model, compute, recipe.seed)
    tokens = recipe.tokens(state.step)
    result = Result(
        run=run.run,
        checkpoint=path,
        steps=state.step,
        tokens_seen=tokens,
        val_loss=loss,
        val_tokens=int(count),
        bits_per_byte=bits,
        **speed.rates(tokens, state.step_seconds),
        seconds=time.perf_counter() - run.began,
        parameters=breakdown(recipe.model).trainable,
        device=run.compute.device.type,
        dtype=run.compute.dtype_name,
        sample=text,
        prompt=data.prompt,
        answers=answers[0],
        held_out_answers=answers[1],
        chat=data.chat,
    )
    return result, model


def _answers(
    parallel: Parallel, model: GPT, pairs: ExampleRows | None, wanted: int, compute: Compute, stop: StopSignal
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
    """Returns how long a sample takes, as estimated from a few ``tokens``: those after the first two, for which a GPU
    loads its kernels."""

    def timed() -> float:
        context = Context(parallel.model, parallel.compute, vocab_size=data.tokenizer.vocab_size)
        drawn = generate(context, data.prompt_ids, dataclasses.replace(SAMPLE, max_tokens=tokens), (), 0)
        times = [time.perf_counter() for _ in drawn]
        return SAMPLE.max_tokens * (times[-1] - times[1]) / (tokens - 2)

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
        run.session.warn(f"could not generate a sample: {error.message}")
        return ""
    finally:
        model.train(training)
    return prompt + tokenizer.decode(ids)
