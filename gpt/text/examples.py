"""Fine-tuning examples: prompt-completion pairs or conversations, read from JSON, Parquet or tables."""

import glob
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from gpt.config import ReadConfig, TextConfig
from gpt.errors import UserError
from gpt.text import formats, sources
from gpt.text.corpus import MIN_HASHED_DOCUMENTS, empty_error, find_sources, hash_fraction
from gpt.text.documents import OnNote, Reader, Skipped, has_records, utf8_size
from gpt.text.unpack import Source


class Example:
    """A training example. Its fields are the items of the JSON list that ``records`` produces."""

    option: ClassVar[str]
    singular: ClassVar[str]
    plural: ClassVar[str]
    content: ClassVar[str]  # The contents of a line, as named in notes.
    form: ClassVar[str]  # A sample line, for error messages.
    records: ClassVar[formats.RecordForm]
    where: str  # The file and line.
    ignored: Sequence[str]  # The record's keys without effect.

    def unused_keys(self, template: str) -> set[str]:
        """Returns the keys without effect, given the chat template."""
        return {*self.ignored}

    @property
    def texts(self) -> list[str]:
        """All texts of the example."""
        raise NotImplementedError

    @property
    def words(self) -> list[str]:
        """The texts that a tokenizer is trained on."""
        return self.texts

    @property
    def identity(self) -> str:
        """The contents as JSON, without the source location."""
        return json.dumps(self.texts)


@dataclass(frozen=True)
class Pair(Example):
    """A prompt and its completion. ``where`` is the file and line."""

    option = "--pairs"
    singular, plural = "pair", "pairs"
    content = "prompts and completions"
    form = '{"prompt": …, "completion": …}'
    records = formats.PAIRS

    prompt: str
    completion: str
    where: str
    ignored: Sequence[str] = field(default=(), compare=False)

    @property
    def texts(self) -> list[str]:
        """The prompt and the completion."""
        return [self.prompt, self.completion]


@dataclass(frozen=True)
class Conversation(Example):
    """Messages with role, content, optional reasoning and other keys that a template can read. ``where`` is the file
    and line. ``context`` lists the indexes of assistant messages excluded from the loss. ``variables`` are the record's
    ``chat_template_kwargs``."""

    option = "--chat"
    singular, plural = "conversation", "conversations"
    content = "messages"
    form = '{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}'
    records = formats.CHATS

    messages: list[dict[str, Any]]
    where: str
    context: Sequence[int] = ()
    variables: dict[str, Any] = field(default_factory=dict)
    ignored: Sequence[str] = ()

    def unused_keys(self, template: str) -> set[str]:
        """Returns the keys that neither the template nor training reads."""
        keys = {*self.variables, *(key for message in self.messages for key in message)}
        keys -= {"role", "content", "thinking", *formats.HARMLESS}
        if re.search(r"\bthinking\b", template):
            keys.discard("reasoning_content")
        return {*self.ignored, *(key for key in keys if not re.search(rf"\b{re.escape(key)}\b", template))}

    @property
    def texts(self) -> list[str]:
        """The contents and the reasoning."""
        return [message[key] for message in self.messages for key in ("content", "reasoning_content") if key in message]

    @property
    def words(self) -> list[str]:
        """Each message's role, as ChatML writes it, and content."""
        return [text for message in self.messages for text in (f"{message['role']}\n", message["content"])]

    @property
    def identity(self) -> str:
        """The messages as JSON, which answers are excluded from the loss, and the variables."""
        left_out = {"thinking", *formats.HARMLESS}  # The reasoning is stored under two keys.
        messages = [[value for key, value in message.items() if key not in left_out] for message in self.messages]
        return json.dumps([*messages, *self.context, *([self.variables] if self.variables else [])])


E = TypeVar("E", bound=Example)


def kind_of(texts: Sequence[str], config: TextConfig) -> type[Example] | None:
    """Returns the example type whose keys match every record of ``texts`` exactly. Returns None if no type matches, or
    if ``texts`` are not readable record files on this disk."""
    kinds: dict[str, type[Example]] = {json.dumps(sorted(kind.records.keys)): kind for kind in (Pair, Conversation)}
    reader = Reader(replace(config, skip_bad=False), formats.KEYS)
    common_kind: type[Example] | None = None
    try:
        if not all(map(_is_on_disk, texts)):
            return None
        files = sources.find(texts)
        for source in files if all(map(has_records, files)) else ():
            for chunk in reader.documents(source):
                kind = kinds.get(chunk.text)
                if kind is None or common_kind not in (None, kind):
                    return None
                common_kind = kind
    except (UserError, OSError):  # The caller reads the texts again and gets this error.
        return None
    return common_kind


def _is_on_disk(text: str) -> bool:
    """Whether ``text`` names files that can be read twice. Stdin, pipes and URLs cannot."""
    if text == "-" or "://" in text:
        return False
    return Path(text).is_file() or Path(text).is_dir() or glob.has_magic(text)


def read_all_examples(texts: Sequence[str], config: ReadConfig, note: OnNote) -> "ExampleCorpus[Any] | None":
    """Reads pairs or conversations, holding out nothing. Returns None if no record has their keys. Raises `UserError`
    for records that cannot be read."""
    reader = Reader(replace(config, skip_bad=True), formats.KEYS)
    for source in sources.find(texts):
        for chunk in reader.documents(source):
            keys = json.loads(chunk.text)
            for kind in (Pair, Conversation):
                if {*kind.records.columns(keys)} <= {*keys}:
                    return read_examples(texts, TextConfig(**asdict(config), val_fraction=0), kind, note)
    return None


@dataclass(frozen=True)
class ExampleCorpus(Generic[E]):
    """Training and held-out examples, with a record of each source."""

    name: str
    train: list[E]
    held_out: list[E]
    sources: list[dict[str, Any]]
    skipped: int


def read_examples(
    texts: Sequence[str], config: TextConfig, kind: type[E], note: OnNote = lambda note: None
) -> ExampleCorpus[E]:
    """Reads all examples of ``texts`` into memory and splits them. Raises `UserError` if a side has none."""
    hint = f"give {kind.form}, one per line"
    if not texts:
        raise UserError(f"{kind.option} needs a TEXT", hint)
    reader = Reader(config, kind.records)
    reader.skipped = Skipped(note)
    train_sources, val_sources = find_sources(texts, config, reader.skipped, note)
    train, records = _read(reader, kind, train_sources)
    held_out, val_records = _read(reader, kind, val_sources)
    if not train:
        raise empty_error(texts, kind.plural, config, hint)
    if config.val_text is None:
        train, held_out = split(train, config.val_fraction, config.seed)
    elif not held_out:
        raise empty_error([config.val_text], kind.plural, config, hint)
    return ExampleCorpus(sources.run_name(texts), train, held_out, records + val_records, reader.skipped.count)


def find_copies(examples: Iterable[E]) -> list[tuple[E, E]]:
    """Returns the examples that are equal to an earlier one, each with the first equal example."""
    firsts: dict[bytes, E] = {}
    pairs = [(e, firsts.setdefault(hashlib.sha256(e.identity.encode()).digest(), e)) for e in examples]
    return [(example, first) for example, first in pairs if example is not first]


def _read(reader: Reader, kind: type[E], files: Sequence[Source]) -> tuple[list[E], list[dict[str, Any]]]:
    """Returns the examples, and the size, example count, text bytes and sha256 of each source."""
    examples: list[E] = []
    records: list[dict[str, Any]] = []
    for source in files:
        digest, start, size = hashlib.sha256(), len(examples), 0
        for chunk in reader.documents(source):
            example = kind(*json.loads(chunk.text))
            examples.append(example)
            size += sum(map(utf8_size, example.texts))
            digest.update(example.identity.encode())
        count = len(examples) - start
        summary = {"name": source.name, "size": source.size, "documents": count, "bytes": size}
        records.append({**summary, "sha256": digest.hexdigest()})
    return examples, records


def split(examples: Sequence[E], fraction: float, seed: int) -> tuple[list[E], list[E]]:
    """Returns training and held-out examples. Holds out the last ``fraction``, at least one example unless ``fraction``
    is 0. With `MIN_HASHED_DOCUMENTS` examples or more, a hash of the seed and the example decides instead, so adding
    examples does not move others. Raises `UserError` if no example is left for training."""
    if fraction == 0:
        return list(examples), []
    if len(examples) < MIN_HASHED_DOCUMENTS:
        train_count = len(examples) - max(1, round(len(examples) * fraction))
        train, held_out = list(examples[:train_count]), list(examples[train_count:])
    else:
        hashes = [hash_fraction(example.identity, seed) for example in examples]
        threshold = min(max(fraction, min(hashes) * 1.0000001), max(hashes))
        train = [example for example, value in zip(examples, hashes, strict=True) if value >= threshold]
        held_out = [example for example, value in zip(examples, hashes, strict=True) if value < threshold]
    if not train or not held_out:
        problem = f"there are too few {examples[0].plural} to hold out {fraction:g} of them: {len(examples):,}"
        if len(examples) >= MIN_HASHED_DOCUMENTS:
            problem = f"all {len(examples):,} {examples[0].plural} are equal, so none can be held out"
        raise UserError(problem, "give others, or use --val-fraction 0 to hold out nothing")
    return train, held_out
