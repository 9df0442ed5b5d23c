"""Held-out loss and samples during training, and the final evaluation of the best checkpoint."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from gpt.config.device import Compute
from gpt.config.events import Rewards
from gpt.config.sample import SampleConfig
from gpt.decoding.context import Context
from gpt.decoding.engine import generate
from gpt.insight import evaluate, report
from gpt.insight.evaluate import Window
from gpt.model.decoder import GPT
from gpt.model.loss import bits_per_byte, score_preferences
from gpt.model.params import breakdown
from gpt.runs import folder
from gpt.runs.record import RunRecord
from gpt.system.errors import NotANumber, UserError
from gpt.system.interrupt import Stopped, StopSignal
from gpt.training.context import Answers, Result, RunContext
from gpt.training.data import Dataset
from gpt.training.example_rows import ExampleRows
from gpt.training.logs import Speed
from gpt.training.recipe import Recipe
from gpt.training.rewards import Judge
from gpt.training.state import TrainState
from gpt.training.strategy import Strategy

T = TypeVar("T")
Measure = Callable[[GPT, Iterable[Window], Compute], Sequence[float]]

SAMPLE = SampleConfig(max_tokens=80)
# Tokens in a periodic evaluation: this share of the training tokens, but within these limits.
EVAL_SHARE, EVAL_TOKENS = 0.005, (4096, 32_768)
GOLDEN_RATIO = 0.6180339887498949
MAX_CHECKED_PAIRS = 500  # maximum pairs per split to check for exact answers


def windows_to_evaluate(recipe: Recipe) -> int:
    """Returns the number of held-out windows in a periodic evaluation."""
    tokens = min(max(EVAL_TOKENS[0], round(EVAL_SHARE * recipe.steps * recipe.batch_tokens)), EVAL_TOKENS[1])
    return max(1, tokens * recipe.rows * recipe.sides // recipe.batch_tokens)


def evaluate_best(run: RunContext, strategy: Strategy, recipe: Recipe, state: TrainState, speed: Speed) -> Result:
    """Loads the best checkpoint into the model, evaluates it on all held-out text, or as much as the time budget
    allows, and samples from it. Raises `Stopped` after a signal."""
    path = Path(run.world.broadcast_object(lambda: str(folder.find_checkpoint(str(run.path)))))
    data, stop, budget = run.data, run.session.stop, recipe.budget
    loss = bits = None
    count, rewards = 0.0, dict[str, Any]()
    compute = strategy.load(path, recipe)
    if data.held_out_tokens:
        size, max_windows = recipe.model.block_size, budget.last_windows if budget else 0
        windows = data.sample_windows(size, max_windows) if max_windows else data.windows(size)
        if max_windows and not recipe.beta:  # The two answers of a preference stay together.
            windows = interleave(data.sample_windows(size, max_windows))
        loss, count, rewards = measure_held_out(strategy, data, recipe, windows, compute, stop)
        if recipe.scores:  # The deadline can pass before the second answer of the first preference.
            loss = loss if count else state.best_loss
        else:
            bits = bits_per_byte(loss * data.held_out_targets, data.held_out_bytes)
    max_pairs = (budget and budget.answers) or MAX_CHECKED_PAIRS
    answers = [_check_answers(strategy, side, max_pairs, compute, stop) for side in data.pairs or (None, None)]
    sample = sample_lines(run, strategy, compute, recipe.seed)
    tokens = state.step * recipe.batch_tokens
    return Result(
        run=run.path,
        checkpoint=path,
        steps=state.step,
        tokens_seen=tokens,
        val_loss=loss,
        val_tokens=int(count),
        bits_per_byte=bits,
        **speed.rates(tokens, state.step_seconds),
        step_seconds=state.step_seconds,
        seconds=0.0,  # until `Journal.end`
        parameters=breakdown(recipe.model).trainable,
        device=run.compute.device.type,
        dtype=run.compute.dtype_name,
        sample=sample,
        prompt=data.prompt,
        answers=answers[0],
        held_out_answers=answers[1],
        chat=data.chat,
        rewards=Rewards(**rewards) if rewards else None,
        **(_compare(run) if data.held_out_tokens and run.world.is_main else {}),
    )


def _compare(run: RunContext) -> dict[str, Any]:
    """Returns the yardsticks of the held-out text and the trend of the held-out loss, which is unknown with
    teachers."""
    trend = None
    with contextlib.suppress(UserError):  # The metrics are incomplete if the disk was full.
        trend = None if run.recipe.own_teachers else report.read_history(run.path).trend
    return {"yardsticks": report.stored_yardsticks(RunRecord.read(run.path)), "trend": trend}


def _check_answers(
    strategy: Strategy, pairs: ExampleRows | None, max_pairs: int, compute: Compute, stop: StopSignal
) -> Answers | None:
    if not pairs:
        return None
    rows = interleave(pairs.spread(max_pairs))
    exact, count = sum_over_ranks(evaluate.count_exact, strategy, rows, compute, stop)
    return Answers(int(exact), int(count), len(pairs))


def interleave(items: Sequence[T]) -> list[T]:
    """Reorders the items so that any number of the first are spread evenly over all (Weyl 1916)."""
    return [items[index] for index in sorted(range(len(items)), key=lambda index: index * GOLDEN_RATIO % 1)]


def measure_held_out(
    strategy: Strategy, data: Dataset, recipe: Recipe, windows: Iterable[Window], compute: Compute, stop: StopSignal
) -> tuple[float, float, dict[str, Any]]:
    """Returns the mean loss over held-out windows, the number of tokens, preferences or prompts in it, and the mean
    scores of preferences or answers. The ranks share the work. After a signal to any rank, all raise `Stopped`."""
    if data.prompts is not None:
        measure = partial(Judge(strategy, recipe, data.tokenizer, stop).measure, data.prompts[1])
        reward, tokens, count = sum_over_ranks(measure, strategy, windows, compute, stop, 3)
        scores = {"reward": reward / max(1, count), "answer_tokens": tokens / max(1, count)}
        return -scores["reward"] if count else math.nan, count, scores
    if data.preferences is None:
        total, count = sum_over_ranks(evaluate.total_loss, strategy, windows, compute, stop)
        return total / count if count else math.nan, count, {}
    rows = data.preferences[1]
    log_p = sum_log_probs(strategy, len(rows), windows, compute, stop)
    rewards = recipe.beta * (log_p - torch.from_numpy(rows.reference))
    measured = rewards[rewards.isfinite().all(-1)]
    if not len(measured):
        return math.nan, 0, {}
    loss, *means = (score_preferences(measured) / len(measured)).tolist()
    return loss, len(measured), dict(zip(recipe.scores, means, strict=True))


def sum_log_probs(
    strategy: Strategy, rows: int, windows: Iterable[Window], compute: Compute, stop: StopSignal
) -> torch.Tensor:
    """Returns the sum of log p(target) of each of ``rows`` sequences, as pairs (rows / 2, 2). It is NaN if no window of
    the sequence was measured. Raises `Stopped` like `measure_held_out`."""

    def measure(model: GPT, windows: Iterable[Window], compute: Compute) -> list[float]:
        sums = np.zeros((2, rows))
        for window, losses in evaluate.score_windows(model, windows, compute):
            sums[:, window.document] += -losses.sum(), len(losses) > 0
        return sums.ravel().tolist()

    sums = torch.tensor(sum_over_ranks(measure, strategy, windows, compute, stop, 2 * rows)).view(2, -1, 2)
    return sums[0] / sums[1]


def sum_over_ranks(
    measure: Measure, strategy: Strategy, windows: Iterable[Window], compute: Compute, stop: StopSignal, size: int = 2
) -> tuple[float, ...]:
    """Sums ``measure``, which returns ``size`` numbers, over all ranks' windows, as far as they get until the deadline
    of ``stop``. After a signal to any rank, all raise `Stopped`."""
    values: Sequence[float] = (0.0,) * size
    stopped = False
    try:
        values = measure(strategy.model, strategy.until_stopped(stop, strategy.windows(windows)), compute)
    except Stopped:
        stopped = True
    *sums, stopped_ranks = strategy.world.all_reduce_sum(*values, stopped)
    if stopped_ranks:
        raise Stopped
    return tuple(sums)


def sample_lines(run: RunContext, strategy: Strategy, compute: Compute, seed: int, max_tokens: int = 2**31) -> str:
    """Generates a sample of up to ``max_tokens`` that depends only on weights and ``seed``, without changing torch's
    random state. Raises `Stopped` after a signal."""
    return strategy.compute_on_all(lambda: _generate_sample(run, strategy, compute, seed, max_tokens))


def estimate_sample_seconds(strategy: Strategy, data: Dataset, tokens: int = 8) -> float:
    """Estimates the seconds per sample by timing a few ``tokens``. Ignores the first two tokens, because a GPU loads
    its kernels then."""

    def measure() -> float:
        context = Context(strategy.model, strategy.compute, vocab_size=data.tokenizer.vocab_size)
        stream = generate(context, data.prompt_ids, dataclasses.replace(SAMPLE, max_tokens=tokens), (), 0)
        times = [time.perf_counter() for _ in stream]
        return SAMPLE.max_tokens * (times[-1] - times[1]) / (tokens - 2)

    strategy.model.eval()
    try:
        return strategy.compute_on_all(measure)
    finally:
        strategy.model.train()


def _generate_sample(run: RunContext, strategy: Strategy, compute: Compute, seed: int, max_tokens: int) -> str:
    model, training = strategy.model, strategy.model.training
    model.eval()
    tokenizer, prompt = run.data.tokenizer, run.data.prompt
    max_tokens = min(SAMPLE.max_tokens, max_tokens)
    sample_config = dataclasses.replace(SAMPLE, greedy=run.data.rows > 0, max_tokens=max_tokens)
    try:
        context = Context(model, compute, vocab_size=tokenizer.vocab_size)
        stream = generate(context, run.data.prompt_ids, sample_config, tokenizer.ends, seed)
        tokens = strategy.until_stopped(run.session.stop, stream)
        ids = [token.id for token in tokens if token.id not in tokenizer.ends]
    except NotANumber as error:  # A failed sample does not end a run.
        run.session.warn(f"could not generate a sample: {error.message}")
        return ""
    finally:
        model.train(training)
    return prompt + tokenizer.decode(ids)
