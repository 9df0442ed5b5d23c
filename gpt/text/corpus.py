"""A corpus as it was asked for: its sources in groups, the split, and a tokenizer for it; none of its text is kept."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from gpt import events
from gpt.config import LearnConfig, ReadConfig, TextConfig
from gpt.errors import UserError
from gpt.text import sources as words
from gpt.text.readers import Reader
from gpt.text.source import Piece, Skipped, Source
from gpt.text.split import Halved, Split, Spread, Survey, plan_split, survey
from gpt.text.tokenizer import Tokenizer, auto_vocab_size, check_specials, learn_tokenizer, learn_tokenizer_up_to
from gpt.text.tokenizer_files import make_tokenizer
from gpt.words import counted

Listener = Callable[[events.Note | events.Progress], None]

GROUP_BYTES = 2**26  # of sources, as stored, that make a group; a larger source is one by itself


@dataclass(frozen=True)
class Corpus:
    """Sources and the rule that says which of their text is held out. ``own_from``: where those of a text of its own,
    which is held out whole, begin."""

    name: str
    texts: tuple[str, ...]
    asked: Mapping[str, Any]  # the words that say which tokenizer
    reading: ReadConfig
    sources: list[Source]
    own_from: int
    split: Split
    found: Survey

    @cached_property
    def groups(self) -> list[range]:
        """Sources that are read one after the other and whose ids share files. They depend on nothing else."""
        groups: list[range] = []
        size = 0
        for number, source in enumerate(self.sources):
            if not groups or number == self.own_from or size + source.size > GROUP_BYTES:
                groups.append(range(number, number))
                size = 0
            size += source.size
            groups[-1] = range(groups[-1].start, number + 1)
        return groups

    def halve(self, pieces: Iterable[Piece], number: int) -> Halved:
        """The pieces of source ``number``, each with whether it is held out."""
        if number >= self.own_from:
            return ((piece, True) for piece in pieces)
        return self.split.halve(pieces, number)

    @property
    def train_bytes(self) -> int:
        """Text to train on; an estimate where not all was counted."""
        if self.split.by == "end":
            return self.split.kept
        return round(self.found.bytes * (1 - self.split.fraction))

    @property
    def first_held_out(self) -> str | None:
        """The source from which on, or inside which, text is held out, where that is the end of several."""
        if self.split.by != "end" or len(self.sources) == 1:
            return None
        return next(
            source.name
            for source, start, size in zip(self.sources, self.split.starts, self.found.sizes or (), strict=True)
            if start + size > self.split.kept
        )

    def training_text(self) -> Iterator[Piece]:
        """All that is trained on."""
        reader = Reader(self.reading)
        for number, source in enumerate(self.sources[: self.own_from]):
            halves = self.halve(reader.documents(source), number)
            yield from (piece for piece, held_out in halves if not held_out)

    def identity(self) -> str:
        """A sum over what there is to read."""
        digest = hashlib.sha256(f"{self.own_from}\n".encode())
        for source in self.sources:
            digest.update((json.dumps([source.name, source.size]) + "\n").encode())
        return digest.hexdigest()


def open_corpus(texts: Sequence[str], config: TextConfig, listen: Listener = lambda event: None) -> Corpus:
    """Finds the sources and decides the split: what is held out as a text of its own is not trained on. ``listen``
    hears of that, and how far a corpus is fetched.

    Raises `UserError` for anything that is no text, or too short.
    """

    def on_bytes(done: int, total: int | None) -> None:
        listen(events.Progress("fetched", done, total or done))

    reading = ReadConfig(**{f.name: getattr(config, f.name) for f in fields(ReadConfig)})
    skipped = Skipped() if reading.skip_bad else None
    found_sources = words.find(texts, skipped, on_bytes)
    own: list[Source] = []
    if config.val_text is not None:
        own = words.find([config.val_text], skipped, on_bytes)
    elif config.val_fraction == TextConfig.val_fraction:
        own = words.published(texts, on_bytes)
    if skipped is not None and skipped.count:
        listen(events.Note(f"left out, since nobody may look at them: {skipped.count:,}; {skipped.examples[0]}"))
    found_sources = _without(found_sources, own, listen)
    found = survey(found_sources, reading)
    if not found.documents or not found.bytes:
        what = f"{texts[0]} is empty" if len(texts) == 1 else f"all of {', '.join(texts)} is empty"
        raise UserError(f"{what}: 0 characters", "give a file with some text in it")
    asked = {key: getattr(config, key) for key in ("tokenizer", "vocab_size", "sample_bytes")}
    split = plan_split(found_sources, found, reading, config.val_fraction, config.seed, bool(own))
    return Corpus(
        words.run_name(texts), tuple(texts), asked, reading, [*found_sources, *own], len(found_sources), split, found
    )


def _without(sources: list[Source], own: Sequence[Source], listen: Listener) -> list[Source]:
    """The sources that are not held out as a text of their own."""
    held_out = {words.place(source) for source in own}
    kept = [source for source in sources if words.place(source) not in held_out]
    if not kept:
        raise UserError("all of the text is in --val-text: nothing is left to train on", "hold out another text")
    if len(kept) < len(sources):
        count = len(sources) - len(kept)
        what = f"{counted(count, 'file')} of --val-text {'are' if count != 1 else 'is'} among the text"
        listen(events.Note(f"{what}: held out, not trained on"))
    return kept


def learn(
    texts: Sequence[str],
    config: LearnConfig,
    specials: Sequence[str] = (),
    listen: Listener = lambda event: None,
) -> tuple[Tokenizer, Spread]:
    """A vocabulary learnt from all of the texts, and what of them it was learnt from."""
    check_specials(specials)  # before anything is read
    corpus = open_corpus(texts, TextConfig(**asdict(config), val_fraction=0), listen)
    total = min(config.sample_bytes, corpus.found.bytes)
    sample = Spread(corpus.training_text(), corpus.found.bytes, config.sample_bytes)

    def watched() -> Iterator[str]:
        for text in sample:
            listen(events.Progress("read", sample.taken, max(total, sample.taken)))
            yield text

    if config.vocab_size is not None:
        return learn_tokenizer(watched(), config.vocab_size, specials), sample
    return learn_tokenizer_up_to(watched(), auto_vocab_size(corpus.found.bytes), specials), sample


def tokenizer_for(
    corpus: Corpus, config: TextConfig, note: Callable[[str], None] = lambda text: None, most: int = 2**24
) -> Tokenizer:
    """The tokenizer that ``--tokenizer`` and ``--vocab-size`` ask for; ``auto`` learns it from a sample, spread over
    what is trained on. ``most`` bounds the size where none was asked for."""
    size, limit = corpus.train_bytes, config.sample_bytes
    if config.tokenizer == "auto" and size > limit:
        note(f"learning the vocabulary from {limit / 1e6:,.0f} of {size / 1e6:,.0f} MB, spread over the text")
    sample = Spread(corpus.training_text(), size, limit)
    return make_tokenizer(config.tokenizer, config.vocab_size, sample, size, most)
