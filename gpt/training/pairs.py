"""Pairs → batches in which the completions alone count: a pair a row, filled up to the longest of the step.

A row is ids(prompt) + ids(completion) + end-of-text, as sampling has it: `gpt.decoding.engine` starts from the
prompt's ids, from end-of-text where there are none, and the prompt is encoded apart from what follows. The targets of
the completion's ids and of the end-of-text count.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpt.config import TextConfig, TrainConfig, find_preset
from gpt.errors import UserError
from gpt.evaluate import Window
from gpt.model.loss import IGNORED
from gpt.text.batches import Int64s, shuffled
from gpt.text.pairs import Pair, PairCorpus, read_pairs
from gpt.text.source import Piece, utf8_size
from gpt.text.split import Spread
from gpt.text.tokenizer import Tokenizer
from gpt.text.tokenizer_files import make_tokenizer
from gpt.text.tokens import is_token_folder
from gpt.training.recipe import Recipe, preset_name


class PairSet:
    """Encoded pairs: each one's ids, how many of its targets do not count, and where it was read."""

    def __init__(self, pairs: Sequence[Pair], tokenizer: Tokenizer) -> None:
        eot = np.array([tokenizer.eot])
        self.ids: list[Int64s] = []
        self.skipped: list[int] = []
        self.where = [pair.where for pair in pairs]
        for pair in pairs:
            prompt = tokenizer.encode(pair.prompt) if pair.prompt else eot
            self.ids.append(np.concatenate([prompt, tokenizer.encode(pair.completion), eot]).astype(np.int64))
            self.skipped.append(len(prompt) - 1)

    def __len__(self) -> int:
        """Ids in all."""
        return sum(len(ids) for ids in self.ids)

    @property
    def counted(self) -> int:
        """Targets that count: the completions' ids and an end-of-text each."""
        return len(self) - len(self.ids) - sum(self.skipped)

    def window(self, number: int) -> Window:
        """A pair as what it is measured by."""
        ids = self.ids[number]
        return Window(number, 0, ids[:-1], ids[1:], self.skipped[number])

    def spread(self, wanted: int) -> list[Window]:
        """At most ``wanted`` of the pairs, spread over all of them."""
        total = len(self.ids)
        return [self.window(i * total // min(wanted, total)) for i in range(min(wanted, total))]

    def check(self, block_size: int) -> None:
        """Raises `UserError` naming a pair that is longer than the context."""
        for ids, where in zip(self.ids, self.where, strict=True):
            if len(ids) - 1 > block_size:
                raise UserError(
                    f"{where}: the pair has {len(ids) - 1:,} tokens; the context holds {block_size:,}",
                    "shorten it, or give a larger --block-size",
                )


@dataclass(frozen=True)
class PairBatches:
    """Batches of ``rows`` pairs, all pairs once an epoch in an order of its own: a function of seed and step."""

    pairs: PairSet
    rows: int
    seed: int

    def global_batch(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Int64s, Int64s]:
        """Inputs x and targets y of a step, each (rows / ranks, T) for the T of the longest pair of the step; targets
        that do not count are `IGNORED`. Steps count from 0; of many processes, each takes its rows."""
        places = np.arange(step * self.rows, (step + 1) * self.rows, dtype=np.int64)
        chosen = [self.pairs.window(number) for number in shuffled(places, len(self.pairs.ids), self.seed).tolist()]
        shape = (self.rows // ranks, max(len(window.x) for window in chosen))
        x, y = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        for row, window in enumerate(chosen[rank * shape[0] : (rank + 1) * shape[0]]):
            x[row, : len(window.x)] = window.x
            y[row, window.skipped : len(window.y)] = window.y[window.skipped :]
        return x, y


@dataclass(frozen=True)
class PairData:
    """What a run on pairs trains on and is measured by: `gpt.training.prepare.Data` for pairs."""

    corpus: PairCorpus
    tokenizer: Tokenizer
    train: PairSet
    held_out: PairSet

    @property
    def rows(self) -> int:
        """Pairs to train on."""
        return len(self.train.ids)

    @property
    def bytes(self) -> int:
        """All pairs' text in UTF-8."""
        return sum(source["bytes"] for source in self.corpus.sources)

    @property
    def held_out_bytes(self) -> int:
        """The held-out completions' size in UTF-8."""
        return sum(utf8_size(pair.completion) for pair in self.corpus.held_out)

    @property
    def held_out_targets(self) -> int:
        """Held-out ids that are predicted."""
        return self.held_out.counted

    @property
    def prompt(self) -> str:
        """What shows how the model learns: a held-out prompt where there is one."""
        return (self.corpus.held_out or self.corpus.train)[0].prompt

    def sources(self) -> list[dict[str, Any]]:
        """What was read, for the run's record."""
        return self.corpus.sources

    def batches(self, recipe: Recipe) -> PairBatches:
        """The batches to train on. Raises `UserError` for a pair that is longer than the context."""
        self.train.check(recipe.model.block_size)
        self.held_out.check(recipe.model.block_size)
        return PairBatches(self.train, recipe.rows, recipe.seed)

    def windows(self, block_size: int) -> Iterator[Window]:
        """All that is held out."""
        return map(self.held_out.window, range(len(self.held_out.ids)))

    def some_windows(self, block_size: int, wanted: int) -> list[Window]:
        """At most ``wanted`` of the held-out pairs, spread over all of them."""
        return self.held_out.spread(wanted)


def make_pairs(
    texts: Sequence[str],
    config: TrainConfig,
    device: str,
    note: Callable[[str], None],
    tokenizer: Tokenizer | None = None,
) -> PairData:
    """Reads and encodes the pairs of ``texts`` with the ``tokenizer`` of the model that is fine-tuned; else the
    vocabulary is learnt from the prompts and completions that are trained on."""
    for text in filter(is_token_folder, texts):
        raise UserError(f"{text} is tokenized: --pairs reads JSON lines", "give the pairs as text")
    usual = TextConfig()
    for name in ("field", "split_on"):
        if getattr(config, name) != getattr(usual, name):
            note(f"--pairs reads prompts and completions: --{name.replace('_', '-')} is not used")
    corpus = read_pairs(texts, config)
    data_bytes = sum(utf8_size(pair.prompt) + utf8_size(pair.completion) for pair in corpus.train)
    if tokenizer is None:
        words = (Piece(text, True) for pair in corpus.train for text in (pair.prompt, pair.completion))
        most = find_preset(preset_name(config, data_bytes, device)).model.vocab_size
        sample = Spread(words, data_bytes, config.sample_bytes)
        tokenizer = make_tokenizer(config.tokenizer, config.vocab_size, sample, data_bytes, most)
    data = PairData(corpus, tokenizer, PairSet(corpus.train, tokenizer), PairSet(corpus.held_out, tokenizer))
    note(f"{', '.join(texts)}: {data.rows:,} pairs to train on, {len(corpus.held_out):,} held out")
    if corpus.skipped:
        note(f"{corpus.skipped:,} files or lines could not be read and were left out")
    note(
        f"tokenizer {tokenizer.name}: {tokenizer.vocab_size:,} ids, {len(data.train):,} tokens to train on, of which "
        f"{data.train.counted:,} count"
    )
    return data
