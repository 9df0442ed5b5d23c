"""Rewards: answers that the model samples, and the numbers that a program gives them."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpt.config.device import Compute
from gpt.config.sample import SampleConfig
from gpt.corpus.batches import Int64s
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine
from gpt.decoding.write import TextGenerator
from gpt.insight.evaluate import Window, pad
from gpt.model.decoder import GPT
from gpt.system.child import run_command
from gpt.system.errors import ProgramFailure
from gpt.system.interrupt import Stopped, StopSignal
from gpt.system.words import as_json
from gpt.tokenizers.tokenizer import Tokenizer
from gpt.training.data import BatchSource
from gpt.training.example_rows import ExampleRow, ExampleRows, RowBatches
from gpt.training.recipe import Recipe
from gpt.training.strategy import Strategy

SECONDS = 600.0  # maximum time of the program for the answers of a step or an evaluation
# Log-probabilities come with the ids of all tokens. Short steps of torch are faster for many answers at once.
SAMPLE = SampleConfig(temperature=1.0, logprobs=0, batch=64)


@dataclass(frozen=True)
class Judge:
    """Samples answers to prompts, and lets the user's program reward them."""

    strategy: Strategy
    recipe: Recipe
    tokenizer: Tokenizer
    stop: StopSignal

    def answer(
        self, prompts: Sequence[ExampleRow], compute: Compute, config: SampleConfig, num: int = 1, seed: int = 0
    ) -> tuple[list[list[int]], npt.NDArray[np.float32]]:
        """Returns the ids of ``num`` answers to each prompt in turn, with their end-of-text, and their rewards. Raises
        `ProgramFailure` on all ranks if the program fails, and `Stopped` after a signal to a single process."""
        return self.strategy.world.raise_on_all(lambda: self._answer(prompts, compute, config, num, seed))

    def _answer(
        self, prompts: Sequence[ExampleRow], compute: Compute, config: SampleConfig, num: int, seed: int
    ) -> tuple[list[list[int]], npt.NDArray[np.float32]]:
        model, ids, lines = self.strategy.model, list[list[int]](), list[str]()
        training, is_alone = model.training, self.strategy.world.size == 1
        config = dataclasses.replace(config, max_tokens=self.recipe.answer_tokens)
        model.eval()
        try:
            # The weights have changed since the last step, so nothing in an earlier cache is valid.
            context = Context(model, compute, positions=1, vocab_size=self.tokenizer.vocab_size)
            engine = Engine(context, self.tokenizer.ends)
            generator = TextGenerator(engine, self.tokenizer, config, seed, None)
            for piece in generator.write([row.ids.tolist() for row in prompts], range(num)):
                if is_alone and self.stop.signum is not None:
                    raise Stopped
                if (sample := piece.sample) is not None:
                    ids.append([token.id for token in sample.logprobs or ()])
                    example = prompts[piece.prompt].prompt
                    assert example is not None
                    lines.append(as_json({"prompt": example.prompt, "text": sample.text, "record": example.record}))
        finally:
            model.train(training)
        return ids, self._reward(lines)

    def _reward(self, lines: Sequence[str]) -> npt.NDArray[np.float32]:
        command, hint = self.recipe.reward or "", "it must write one number for each line that it reads, in order"
        if not lines:
            return np.zeros(0, np.float32)
        output = [
            line
            for line in run_command(command, "".join(f"{line}\n" for line in lines).encode(), SECONDS)
            if line.strip()
        ]
        if len(output) != len(lines):
            raise ProgramFailure(f"{command} wrote {len(output):,} lines for {len(lines):,} answers", hint)
        rewards = []
        for number, line in enumerate(output, 1):
            try:
                rewards.append(float(line))
            except ValueError:
                rewards.append(math.nan)
            if not abs(rewards[-1]) < 3e38:
                raise ProgramFailure(
                    f'{command} wrote "{line:.80}" in line {number:,}, which is not a finite number', hint
                )
        return np.array(rewards, np.float32)

    def measure(
        self, prompts: ExampleRows, model: GPT, windows: Iterable[Window], compute: Compute
    ) -> tuple[float, float, float]:
        """Returns the sums of rewards and of tokens of greedy answers to the prompts that ``windows`` are of, and their
        number."""
        own = [prompts[window.document] for window in windows]
        ids, rewards = self.answer(own, compute, dataclasses.replace(SAMPLE, greedy=True))
        return float(rewards.sum(dtype=np.float64)), float(sum(map(len, ids))), len(ids)


@dataclass(frozen=True)
class AnswerBatches:
    """Batches of answers to prompts, which the current weights sample, determined by seed, step and weights."""

    prompts: RowBatches
    judge: Judge

    def global_batch(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Int64s, Int64s, npt.NDArray[np.float32]]:
        """Returns one rank's inputs and targets, (rows / ranks, T), and (rows / ranks, 4): the advantage of each
        answer, which is its reward minus the mean of its group (Liu et al. 2025, arXiv 2503.20783), its reward, whether
        its group is equal, and its tokens."""
        judge, group, count = self.judge, self.judge.recipe.group, self.prompts.rows // ranks
        own = self.prompts.indices(step)[rank * count : (rank + 1) * count].tolist()
        prompts = [self.prompts.examples[index] for index in own]
        ids, rewards = judge.answer(prompts, judge.strategy.compute, SAMPLE, group, judge.recipe.seed + step)
        groups = rewards.astype(np.float64).reshape(-1, group)
        equal = (groups == groups[:, :1]).all(-1, keepdims=True)
        advantages = np.where(equal, 0, groups - groups.mean(-1, keepdims=True))  # The mean can be rounded.
        rows = ExampleRows()
        for number, answer in enumerate(ids):
            prompt = prompts[number // group].ids
            all_ids = np.concatenate([prompt, np.array(answer, np.int64)])
            rows.append(ExampleRow(all_ids, np.arange(len(all_ids)) >= len(prompt), 0))
        x, y = pad([rows.window(index) for index in range(len(rows))])
        columns = advantages.ravel(), rewards, np.repeat(equal, group), list(map(len, ids))
        return x, y, np.stack(columns, -1).astype(np.float32)


def with_answers(
    batches: BatchSource, strategy: Strategy, recipe: Recipe, tokenizer: Tokenizer, stop: StopSignal
) -> BatchSource | AnswerBatches:
    """Lets the model answer the prompts of ``batches``. Returns other batches unchanged."""
    if not recipe.reward or not isinstance(batches, RowBatches):
        return batches
    return AnswerBatches(batches, Judge(strategy, recipe, tokenizer, stop))
