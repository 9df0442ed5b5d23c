"""Examples as rows of batches: pairs of prompt and completion, and conversations, of which answers alone count.

A row is padded to the longest of its step. A pair's ids are those of the prompt, the completion and end-of-text.
Sampling starts from the same ids (`Tokenizer.prompt`), and the prompt is encoded apart from what follows. A
conversation's ids are those of what the chat template makes of it (`gpt.text.chat`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from gpt.errors import UserError, WorkError
from gpt.evaluate import Window
from gpt.model.loss import IGNORED
from gpt.text import chat
from gpt.text.batches import Int64s, shuffled
from gpt.text.documents import utf8_size
from gpt.text.examples import Conversation, Example, Pair
from gpt.text.tokenizer import Tokenizer
from gpt.words import counted


@dataclass(frozen=True)
class ExampleRow:
    """The ids of an example, which of them count as targets, and the bytes of the text that these are."""

    ids: Int64s
    counts: npt.NDArray[np.bool_]
    bytes: int


class ExampleRows(list[ExampleRow]):
    """Encoded examples. ``examples`` counts those that have a row; one may have several."""

    examples = 0

    @property
    def tokens(self) -> int:
        """Ids of all examples."""
        return sum(len(row.ids) for row in self)

    @property
    def targets(self) -> int:
        """Targets that count, of all examples. The first id of each is none."""
        return sum(int(row.counts[1:].sum()) for row in self)

    @property
    def bytes(self) -> int:
        """Bytes of the text that these are."""
        return sum(row.bytes for row in self)

    def window(self, number: int) -> Window:
        """An example as a window to evaluate. Targets that do not count are `IGNORED`."""
        row = self[number]
        return Window(number, 0, row.ids[:-1], np.where(row.counts[1:], row.ids[1:], IGNORED), 0)

    def spread(self, wanted: int) -> list[Window]:
        """At most ``wanted`` of the examples, spread over all of them."""
        total = len(self)
        return [self.window(i * total // min(wanted, total)) for i in range(min(wanted, total))]


@dataclass(frozen=True)
class RowBatches:
    """Batches of ``rows`` examples ``of`` a set, as a function of seed and step. Each epoch has all of them once, in an
    order of its own."""

    of: ExampleRows
    rows: int
    seed: int

    def global_batch(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Int64s, Int64s]:
        """Inputs and targets of a step, counted from 0, each (rows / ranks, T): those of one of ``ranks``. T is the
        length of the step's longest example; targets that do not count are `IGNORED`."""
        places = np.arange(step * self.rows, (step + 1) * self.rows, dtype=np.int64)
        chosen = [self.of.window(number) for number in shuffled(places, len(self.of), self.seed).tolist()]
        shape = (self.rows // ranks, max(len(window.x) for window in chosen))
        x, y = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        for row, window in enumerate(chosen[rank * shape[0] : (rank + 1) * shape[0]]):
            x[row, : len(window.x)] = window.x
            y[row, : len(window.y)] = window.y
        return x, y


E = TypeVar("E", bound=Example)


class Encoder(Generic[E]):
    """Encodes examples for a context of ``block_size`` tokens."""

    def __init__(self, tokenizer: Tokenizer, block_size: int, skip_bad: bool) -> None:
        self.tokenizer, self.block_size, self.skip_bad = tokenizer, block_size, skip_bad

    def encode(self, examples: Sequence[E]) -> ExampleRows:
        """Encodes those that can be learnt from. Raises `UserError` naming one that cannot be encoded."""
        encoded = ExampleRows()
        for example in examples:
            rows = self.rows(example)
            encoded.examples += bool(rows)
            encoded.extend(rows)
        return encoded

    def rows(self, example: E) -> list[ExampleRow]:
        """Encodes an example; no rows where nothing of it counts."""
        raise NotImplementedError

    def prompt(self, example: E) -> tuple[str, list[int]]:
        """The text up to the first answer, and its ids."""
        raise NotImplementedError

    def notes(self) -> Iterator[str]:
        """Yields notes about what was changed or left out."""
        yield from ()


class PairEncoder(Encoder[Pair]):
    """Encodes pairs. The completion's ids and the end-of-text after it count."""

    def rows(self, example: Pair) -> list[ExampleRow]:
        """Encodes a pair, as one row. Raises `UserError` where it is longer than the context."""
        prompt = self.tokenizer.prompt(example.prompt)
        completion = self.tokenizer.encode(example.completion, continues=True).tolist()
        ids = np.array([*prompt, *completion, self.tokenizer.eot], np.int64)
        if len(ids) - 1 > self.block_size:
            raise UserError(
                f"{example.where}: the pair has {len(ids) - 1:,} tokens, but the context holds {self.block_size:,}",
                "shorten it, or use a larger --block-size",
            )
        return [ExampleRow(ids, np.arange(len(ids)) >= len(prompt), utf8_size(example.completion))]

    def prompt(self, example: Pair) -> tuple[str, list[int]]:
        """The prompt, and its ids."""
        return example.prompt, self.tokenizer.prompt(example.prompt)


class ChatEncoder(Encoder[Conversation]):
    """Encodes conversations, of each as many whole turns as fit into the context. The assistant's words and the ends of
    its turns count. `tokenizer` knows the ends of turns that it has seen."""

    def __init__(self, tokenizer: Tokenizer, block_size: int, skip_bad: bool) -> None:
        super().__init__(chat.with_template(tokenizer), block_size, skip_bad)
        self._cut_between = self._cut_within = self._left_out = self._refused = self._split = 0

    def rows(self, example: Conversation) -> list[ExampleRow]:
        """Encodes a conversation, as one row or as one per answer (`chat.answers`). Leaves out a row of which no answer
        fits even in part. Raises `UserError` where the chat template refuses it, unless ``skip_bad``."""
        try:
            texts, ends = chat.answers(self.tokenizer, example.messages, example.context)
        except UserError as error:
            if isinstance(error, WorkError):
                raise
            if not self.skip_bad:
                raise UserError(f"{example.where}: {error.message}", error.hint) from None
            self._refused += 1
            return []
        if not ends <= self.tokenizer.ends:
            self.tokenizer = replace(self.tokenizer, more_ends=(self.tokenizer.ends | ends) - {self.tokenizer.eot})
        self._split += len(texts) > 1
        return [row for text, spans in texts if (row := self._row(text, spans)) is not None]

    def _row(self, text: str, spans: list[chat.Span]) -> ExampleRow | None:
        ids, counts = self.tokenizer.encode_marked(text, spans)
        most = self.block_size + 1  # the last one is only predicted
        if len(ids) > most:
            ends_at = np.flatnonzero(counts[:-1] & ~counts[1:]) + 1  # ids up to the end of each answer
            fitting = ends_at[ends_at <= most].tolist()
            length = fitting[-1] if fitting else most
            ids, counts = ids[:length], counts[:length]
            within = not fitting and bool(counts[1:].any())
            self._cut_between += bool(fitting)
            self._cut_within += within
            self._left_out += not fitting and not within
        if not counts[1:].any():
            return None
        specials = self.tokenizer.all_specials.values()
        said = [id for id in ids[counts].tolist() if id not in specials]
        return ExampleRow(ids.astype(np.int64), counts, len(self.tokenizer.decode_bytes(said)))

    def prompt(self, example: Conversation) -> tuple[str, list[int]]:
        """The text up to the first answer to a message, and its ids."""
        answers = (at for at, message in enumerate(example.messages) if at and message["role"] == "assistant")
        first = next(answers, len(example.messages))
        text = chat.render(self.tokenizer, example.messages[:first])
        return text, self.tokenizer.encode(text, specials=True).tolist()

    def notes(self) -> Iterator[str]:
        """Yields notes about conversations that were divided, cut or left out."""
        if self._split:
            yield (
                "the chat template changes earlier messages as a conversation grows: "
                f"{counted(self._split, 'conversation', 'conversations')} with several answers became a row per answer"
            )
        what = "row" if self._split else "conversation"
        if total := self._cut_between + self._cut_within + self._left_out:
            yield (
                f"{counted(total, f'{what} is', f'{what}s are')} longer than the context of "
                f"{self.block_size:,} tokens (--block-size): {self._cut_between:,} cut after the last answer that "
                f"fits, {self._cut_within:,} within the first one, and {self._left_out:,} skipped, whose first answer "
                "starts too late"
            )
        if self._refused:
            yield f"{counted(self._refused, 'conversation', 'conversations')} skipped: rejected by the chat template"
