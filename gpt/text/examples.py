"""Examples to learn answers from, of JSON, Parquet or tables, packed or not: pairs of prompt and completion, or
conversations."""

import glob
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from gpt.config import TextConfig
from gpt.errors import UserError
from gpt.text import formats, sources
from gpt.text.corpus import HASHED_SPLIT_FROM, hash_fraction
from gpt.text.documents import Reader, has_records, utf8_size
from gpt.text.unpack import Source


class Example:
    """An example. Its fields are the values in the JSON lists that ``records`` makes."""

    option: ClassVar[str]  # with which it is read
    plural: ClassVar[str]
    content: ClassVar[str]  # of a line, in words
    form: ClassVar[str]  # of a line
    records: ClassVar[formats.RecordForm]

    @property
    def texts(self) -> list[str]:
        """All of its texts."""
        raise NotImplementedError

    @property
    def words(self) -> list[str]:
        """The texts from which a vocabulary for it is learnt."""
        return self.texts

    @property
    def identity(self) -> str:
        """Everything in it but where it was read."""
        return json.dumps(self.texts)


@dataclass(frozen=True)
class Pair(Example):
    """A prompt and the completion that should follow it. ``where``: file and line."""

    option = "--pairs"
    plural = "pairs"
    content = "prompts and completions"
    form = '{"prompt": …, "completion": …}'
    records = formats.PAIRS

    prompt: str
    completion: str
    where: str

    @property
    def texts(self) -> list[str]:
        """The prompt and the completion."""
        return [self.prompt, self.completion]


@dataclass(frozen=True)
class Conversation(Example):
    """Messages, each with its role, its content and maybe its thoughts. ``where``: file and line. ``context``: the
    numbers of the answers that are read and not learned."""

    option = "--chat"
    plural = "conversations"
    content = "messages"
    form = '{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}'
    records = formats.CHATS

    messages: list[dict[str, str]]
    where: str
    context: Sequence[int] = ()

    @property
    def texts(self) -> list[str]:
        """The contents, and the thoughts."""
        return [text for message in self.messages for text in self._other(message)]

    @property
    def words(self) -> list[str]:
        """Roles, as they stand in ChatML, and contents."""
        return [text for message in self.messages for text in (f"{message['role']}\n", message["content"])]

    @property
    def identity(self) -> str:
        """The messages, and which are not learned."""
        messages: list[Any] = [[message["role"], *self._other(message)] for message in self.messages]
        return json.dumps([*messages, *self.context])

    @staticmethod
    def _other(message: dict[str, str]) -> list[str]:
        """Returns the content, and the thoughts, which have two names."""
        return [text for key, text in message.items() if key not in ("role", "thinking")]


E = TypeVar("E", bound=Example)


def kind_of(texts: Sequence[str], config: TextConfig) -> type[Example] | None:
    """Returns the kind of example whose keys, and no others, every record in ``texts`` has. Returns None if there is no
    such kind, if a record cannot be read, and if ``texts`` are not all files of records on this disk."""
    kinds: dict[str, type[Example]] = {json.dumps(sorted(kind.records.keys)): kind for kind in (Pair, Conversation)}
    reader = Reader(replace(config, skip_bad=False), formats.KEYS)
    found: type[Example] | None = None
    try:
        if not all(map(_is_on_disk, texts)):
            return None
        files = sources.find(texts)
        for source in files if all(map(has_records, files)) else ():
            for chunk in reader.documents(source):
                kind = kinds.get(chunk.text)
                if kind is None or found not in (None, kind):
                    return None
                found = kind
    except (UserError, OSError):  # reported when the texts are read
        return None
    return found


def _is_on_disk(text: str) -> bool:
    """Whether a text names files that can be read twice, unlike stdin, a pipe and an address."""
    if text == "-" or "://" in text:
        return False
    return Path(text).is_file() or Path(text).is_dir() or glob.has_magic(text)


@dataclass(frozen=True)
class ExampleCorpus(Generic[E]):
    """All examples, split into training and held-out ones, with a record of each source."""

    name: str
    train: list[E]
    held_out: list[E]
    sources: list[dict[str, Any]]
    skipped: int


def read_examples(
    texts: Sequence[str], config: TextConfig, kind: type[E], note: sources.OnNote = sources.no_note
) -> ExampleCorpus[E]:
    """Reads all examples of ``texts`` into memory and splits them. Raises `UserError` where there are none."""
    if not texts:
        raise UserError(f"{kind.option} needs a TEXT", f"give a file of {kind.form}, one per line")
    reader = Reader(config, kind.records)
    skipped = reader.skipped if config.skip_bad else None
    examples, read = _read(reader, kind, sources.find(texts, skipped, note=note))
    own: list[E] = []
    if config.val_text is not None:
        own, more = _read(reader, kind, sources.find([config.val_text], skipped, note=note))
        read += more
    if not examples:
        raise UserError(f"{texts[0]} is empty: 0 {kind.plural}", f"give {kind.form}, one per line")
    train, held_out = examples, own
    if config.val_text is None:
        train, held_out = split(examples, config.val_fraction, config.seed)
    return ExampleCorpus(sources.run_name(texts), train, held_out, read, reader.skipped.count)


def _read(reader: Reader, kind: type[E], found: Sequence[Source]) -> tuple[list[E], list[dict[str, Any]]]:
    """Returns the examples of sources, and of each source its size, number of examples, bytes and sha256."""
    examples: list[E] = []
    records: list[dict[str, Any]] = []
    for source in found:
        digest, first, size = hashlib.sha256(), len(examples), 0
        for chunk in reader.documents(source):
            example = kind(*json.loads(chunk.text))
            examples.append(example)
            size += sum(map(utf8_size, example.texts))
            digest.update(example.identity.encode())
        count = len(examples) - first
        about = {"name": source.name, "size": source.size, "documents": count, "bytes": size}
        records.append({**about, "sha256": digest.hexdigest()})
    return examples, records


def split(examples: Sequence[E], fraction: float, seed: int) -> tuple[list[E], list[E]]:
    """Returns the examples to train on and those held out: the last ``fraction``; from `HASHED_SPLIT_FROM` on by a
    hash of seed and example, so that adding some moves none. Never nothing, unless ``fraction`` is 0.

    Raises `UserError` where there are too few for two sides.
    """
    if fraction == 0:
        return list(examples), []
    if len(examples) < HASHED_SPLIT_FROM:
        kept = len(examples) - max(1, round(len(examples) * fraction))
        train, held_out = list(examples[:kept]), list(examples[kept:])
    else:
        shares = [hash_fraction(example.identity, seed) for example in examples]
        bound = max(fraction, min(shares) * 1.0000001)
        train = [example for example, at in zip(examples, shares, strict=True) if at >= bound]
        held_out = [example for example, at in zip(examples, shares, strict=True) if at < bound]
    if not train:
        raise UserError(
            f"there are too few {examples[0].plural} to hold out {fraction:g} of them: {len(examples):,}",
            "give more, or use --val-fraction 0 to hold out nothing",
        )
    return train, held_out
