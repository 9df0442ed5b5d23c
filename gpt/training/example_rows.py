"""Encodes examples as batch rows: prompt-completion pairs, conversations, preferences and prompts. Only answers are
targets.

A pair is encoded as prompt, completion and end-of-text. The prompt is encoded separately, as for sampling
(`Tokenizer.prompt`). A conversation is encoded as rendered by its chat template (`gpt.chat.chat`). A preference is two
sequences, encoded like TRL's.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from gpt.chat import chat
from gpt.chat.examples import Conversation, Example, Pair, Preference, Prompt
from gpt.corpus.batches import Int64s, shuffle_indices
from gpt.decoding.context import count_common
from gpt.documents.documents import utf8_size
from gpt.insight.evaluate import Window, pad
from gpt.model.loss import IGNORED
from gpt.system.errors import UserError, WorkError
from gpt.system.words import counted
from gpt.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class ExampleRow:
    """A row's ids, the mask of its targets, and the number of bytes of the targets' text. A prompt has no targets, and
    keeps its example."""

    ids: Int64s
    counts: npt.NDArray[np.bool_]
    bytes: int
    prompt: Prompt | None = None


class ExampleRows(list[ExampleRow]):
    """The rows of encoded examples. ``examples`` counts the examples, which can have several rows. If there are two
    ``sides``, every two rows are the chosen and the rejected answer of a preference, and ``reference`` has their
    log-probabilities under the model before training, (pairs, 2)."""

    examples, sides = 0, 1
    reference: npt.NDArray[np.float32]

    @property
    def tokens(self) -> int:
        """The number of ids in all rows."""
        return sum(len(row.ids) for row in self)

    @property
    def targets(self) -> int:
        """The number of targets in all rows. The first id of a row is never a target."""
        return sum(int(row.counts[1:].sum()) for row in self)

    @property
    def bytes(self) -> int:
        """The bytes of the targets' text in all rows."""
        return sum(row.bytes for row in self)

    def window(self, index: int) -> Window:
        """Returns a row as an evaluation window. Ids that are not targets are `IGNORED`."""
        row = self[index]
        return Window(index, 0, row.ids[:-1], np.where(row.counts[1:], row.ids[1:], IGNORED), 0)

    def spread(self, count: int) -> list[Window]:
        """Returns at most ``count`` windows, spread evenly over all rows. A preference has two windows."""
        sides, total = self.sides, len(self) // self.sides
        count = min(-(-count // sides), total)
        return [self.window(i * total // count * sides + side) for i in range(count) for side in range(sides)]


@dataclass(frozen=True)
class RowBatches:
    """Batches of ``rows`` rows or preferences, determined by seed and step. Each epoch is reshuffled. In a
    step, longer rows come first."""

    examples: ExampleRows
    rows: int
    seed: int

    @property
    def length(self) -> int:
        """The length of the longest sequence."""
        return max(len(row.ids) for row in self.examples) - 1

    def indices(self, step: int) -> Int64s:
        """Returns the indices of a step's examples, in the order of the ranks."""
        positions = np.arange(step * self.rows, (step + 1) * self.rows, dtype=np.int64)
        return shuffle_indices(positions, len(self.examples) // self.examples.sides, self.seed)

    def global_batch(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[npt.NDArray[Any], ...]:
        """Returns one rank's inputs and targets for ``step``, which counts from 0. Their shape is (rows / ranks, T), or
        of preferences (rows / ranks, 2, T), with the reference's log-probabilities, (rows / ranks, 2). T is the length
        of the longest sequence. Ids that are not targets are `IGNORED`."""
        examples, sides, indices = self.examples, self.examples.sides, self.indices(step)
        lengths = [-max(len(row.ids) for row in examples[i * sides : (i + 1) * sides]) for i in indices.tolist()]
        own = indices[np.argsort(lengths, kind="stable")][rank::ranks]
        windows = [examples.window(index * sides + side) for index in own.tolist() for side in range(sides)]
        x, y = (array.reshape(len(own), sides, -1) for array in pad(windows))
        if sides == 1:
            return x[:, 0], y[:, 0]
        return x, y, examples.reference[own]


E = TypeVar("E", bound=Example)
T = TypeVar("T")


class Encoder(Generic[E]):
    """Encodes examples for a context of ``block_size`` tokens."""

    sides = 1

    def __init__(self, tokenizer: Tokenizer, block_size: int, skip_bad: bool) -> None:
        self.tokenizer, self.block_size, self.skip_bad = tokenizer, block_size, skip_bad
        self._unused_keys: Counter[str] = Counter()
        self._rejected = 0

    def encode(self, examples: Sequence[E]) -> ExampleRows:
        """Encodes the examples that have targets. Raises `UserError` for an example that cannot be encoded."""
        all_rows = ExampleRows()
        all_rows.sides = self.sides
        for example in examples:
            self._unused_keys.update(sorted(example.unused_keys(self.tokenizer.chat_template or "")))
            rows = self.rows(example)
            all_rows.examples += bool(rows)
            all_rows.extend(rows)
        all_rows.reference = np.zeros((len(all_rows) // 2, 2), np.float32)  # until it is computed
        return all_rows

    def rows(self, example: E) -> list[ExampleRow]:
        """Encodes an example. Returns no rows if it has no targets."""
        raise NotImplementedError

    def prompt(self, example: Any) -> tuple[str, list[int]]:
        """Returns the text before the first answer, and its ids."""
        if isinstance(example.prompt, str):
            return example.prompt, self.tokenizer.prompt(example.prompt)
        text = chat.render(self.tokenizer, example.prompt, variables=example.variables)
        return text, self.tokenizer.encode(text, specials=True).tolist()

    def _rendered(self, example: E, render: Callable[[], T]) -> T | None:
        """Returns ``render()``. If the chat template rejects the example, raises `UserError` with its place, or with
        ``skip_bad`` returns None."""
        try:
            return render()
        except UserError as error:
            if isinstance(error, WorkError):
                raise
            if not self.skip_bad:
                raise UserError(f"{example.where}: {error.message}", error.hint) from None
            self._rejected += 1
            return None

    def notes(self) -> Iterator[str]:
        """Yields notes about examples that were changed or skipped, and about their keys without effect."""
        if self._unused_keys:
            counts = self._unused_keys.most_common(20)
            yield "keys without effect: " + ", ".join(f'"{key}" in {counted(n, "record")}' for key, n in counts)
        if self._rejected:
            yield f"{counted(self._rejected, 'record')} skipped: rejected by the chat template"


class PairEncoder(Encoder[Pair]):
    """Encodes pairs. Targets are the completion and the end-of-text after it, unless it ends with an end token."""

    def __init__(self, tokenizer: Tokenizer, block_size: int, skip_bad: bool) -> None:
        super().__init__(tokenizer, block_size, skip_bad)
        self._specials = tokenizer.special_pattern()

    def rows(self, example: Pair) -> list[ExampleRow]:
        """Encodes a pair as one row. Raises `UserError` if it is longer than the context."""
        prompt, text = self.tokenizer.prompt(example.prompt), example.completion
        with_specials = bool(self.tokenizer.files)  # As in the prompt.
        completion = self.tokenizer.encode(text, specials=with_specials, continues=True).tolist()
        text = self._specials.sub("", text) if with_specials else text
        end = [] if self.tokenizer.ends.intersection(completion[-1:]) else [self.tokenizer.eot]
        ids = np.array([*prompt, *completion, *end], np.int64)
        if len(ids) - 1 > self.block_size:
            raise UserError(
                f"{example.where}: the pair has {len(ids) - 1:,} tokens, but the context holds {self.block_size:,}",
                "shorten it, or use a larger --block-size",
            )
        return [ExampleRow(ids, np.arange(len(ids)) >= len(prompt), utf8_size(text))]


class ChatEncoder(Encoder[Conversation]):
    """Encodes conversations. Targets are the assistant's answers and their end-of-turn tokens. The end-of-turn tokens
    are added to `tokenizer`'s end-of-text tokens. A conversation longer than the context is cut after the last answer
    that fits."""

    def __init__(self, tokenizer: Tokenizer, block_size: int, skip_bad: bool) -> None:
        super().__init__(chat.with_template(tokenizer), block_size, skip_bad)
        self._cut_after = self._cut_inside = self._skipped = self._split = 0

    def rows(self, example: Conversation) -> list[ExampleRow]:
        """Encodes a conversation as one row, or as one row per answer if the chat template requires it
        (`chat.answers`). Skips rows whose first answer starts beyond the context. Raises `UserError` if the chat
        template rejects the conversation, unless ``skip_bad``."""
        arguments = (self.tokenizer, example.messages, example.context, example.variables)
        rendered = self._rendered(example, lambda: chat.answers(*arguments))
        if rendered is None:
            return []
        texts, ends = rendered
        if not ends <= self.tokenizer.ends:
            self.tokenizer = replace(self.tokenizer, more_ends=(self.tokenizer.ends | ends) - {self.tokenizer.eot})
        self._split += len(texts) > 1
        return [row for text, spans in texts if (row := self._row(text, spans)) is not None]

    def _row(self, text: str, spans: list[chat.Span]) -> ExampleRow | None:
        ids, counts = self.tokenizer.encode_marked(text, spans)
        max_ids = self.block_size + 1  # The last id is only a target.
        if len(ids) > max_ids:
            answer_ends = np.flatnonzero(counts[:-1] & ~counts[1:]) + 1  # number of ids up to the end of each answer
            fitting_ends = answer_ends[answer_ends <= max_ids].tolist()
            length = fitting_ends[-1] if fitting_ends else max_ids
            ids, counts = ids[:length], counts[:length]
            cuts_answer = not fitting_ends and bool(counts[1:].any())
            self._cut_after += bool(fitting_ends)
            self._cut_inside += cuts_answer
            self._skipped += not fitting_ends and not cuts_answer
        if not counts[1:].any():
            return None
        specials = self.tokenizer.all_specials.values()
        text_ids = [id for id in ids[counts].tolist() if id not in specials]
        return ExampleRow(ids.astype(np.int64), counts, len(self.tokenizer.decode_bytes(text_ids)))

    def prompt(self, example: Conversation) -> tuple[str, list[int]]:
        """Returns the text before the first answer to a message, and its ids."""
        answers = (index for index, message in enumerate(example.messages) if index and message["role"] == "assistant")
        first = next(answers, len(example.messages))
        text = chat.render(self.tokenizer, example.messages[:first], variables=example.variables)
        return text, self.tokenizer.encode(text, specials=True).tolist()

    def notes(self) -> Iterator[str]:
        """Yields notes about conversations that were split, cut or skipped, and about keys without effect."""
        yield from super().notes()
        if self._split:
            yield (
                "the chat template changes earlier messages as a conversation grows: "
                f"{counted(self._split, 'conversation')} with several answers became a row per answer"
            )
        unit = "row" if self._split else "conversation"
        if total := self._cut_after + self._cut_inside + self._skipped:
            yield (
                f"{counted(total, f'{unit} is', f'{unit}s are')} longer than the context of "
                f"{self.block_size:,} tokens (--block-size): {self._cut_after:,} cut after the last answer that "
                f"fits, {self._cut_inside:,} within the first one, and {self._skipped:,} skipped, whose first answer "
                "starts too late"
            )


class PromptEncoder(Encoder[Prompt]):
    """Encodes prompts. Skips those that are longer than ``block_size``, which leaves out the answers."""

    _skipped = 0

    def rows(self, example: Prompt) -> list[ExampleRow]:
        """Encodes a prompt as one row. Raises `UserError` if the chat template rejects it, unless ``skip_bad``."""
        rendered = self._rendered(example, lambda: self.prompt(example))
        if rendered is None:
            return []
        ids = np.array(rendered[1], np.int64)
        self._skipped += len(ids) > self.block_size
        return [ExampleRow(ids, np.zeros(len(ids), bool), 0, example)] if len(ids) <= self.block_size else []

    def notes(self) -> Iterator[str]:
        """Yields notes about prompts that were skipped."""
        yield from super().notes()
        if self._skipped:
            yield (
                f"{counted(self._skipped, 'prompt')} skipped: longer than {self.block_size:,} tokens, which answers "
                "(--answer-tokens) leave of the context (--block-size)"
            )


class PreferenceEncoder(Encoder[Preference]):
    """Encodes preferences as TRL does. Targets are all ids after the common beginning of the prompt and the prompt with
    each answer. A text ends with end-of-text. A sequence longer than the context is truncated."""

    sides = 2

    def __init__(self, tokenizer: Tokenizer, block_size: int, skip_bad: bool) -> None:
        super().__init__(tokenizer, block_size, skip_bad)
        self._cut = self._skipped = 0

    def rows(self, example: Preference) -> list[ExampleRow]:
        """Encodes the chosen and the rejected answer. Skips a preference whose prompt fills the context. Raises
        `UserError` if the chat template rejects it, unless ``skip_bad``."""
        answers = (example.chosen, example.rejected)
        parts = self._rendered(example, lambda: [self.prompt(example)[1], *(self._encode(example, a) for a in answers)])
        if parts is None:
            return []
        prompt, *sequences = parts
        start = min(count_common(prompt, ids) for ids in sequences)
        max_ids = self.block_size + 1  # The last id is only a target.
        if start >= min(max_ids, *map(len, sequences)):
            self._skipped += 1
            return []
        self._cut += any(len(ids) > max_ids for ids in sequences)
        arrays = [np.array(ids[:max_ids], np.int64) for ids in sequences]
        return [ExampleRow(ids, np.arange(len(ids)) >= start, 0) for ids in arrays]

    def _encode(self, example: Preference, answer: Any) -> list[int]:
        if isinstance(answer, str):
            ids = self.tokenizer.prompt(example.prompt + answer)
            return ids if ids[-1] == self.tokenizer.eot else [*ids, self.tokenizer.eot]
        text = chat.render(self.tokenizer, example.prompt + answer, answer=False, variables=example.variables)
        return list(map(int, self.tokenizer.encode(text, specials=True)))

    def notes(self) -> Iterator[str]:
        """Yields notes about preferences that were cut or skipped, and about keys without effect."""
        yield from super().notes()
        if total := self._cut + self._skipped:
            yield (
                f"{counted(total, 'preference is', 'preferences are')} longer than the context of "
                f"{self.block_size:,} tokens (--block-size): {self._cut:,} cut, and {self._skipped:,} skipped, whose "
                "answers start too late"
            )
