"""Fine-tuning examples: prompt-completion pairs, conversations, preferences or prompts, from JSON, Parquet or
tables."""

import glob
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from gpt.chat import chat
from gpt.config.text import TextConfig
from gpt.corpus.corpus import MIN_HASHED_DOCUMENTS, empty_error, find_sources, hash_fraction
from gpt.decoding.context import count_common
from gpt.documents import sources
from gpt.documents.documents import OnNote, Reader, Skipped, has_records, utf8_size
from gpt.documents.formats import BadRecord, RecordForm, get_string, option_hint, parse_column
from gpt.documents.unpack import Source
from gpt.system.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
# docs/fine-tune.md has a table of these keys.
_ROLE_SYNONYMS = {"human": "user", "gpt": "assistant", "model": "assistant"}
_TRAIN_KEYS = ("weight", "train", "training", "trainable", "train_on_turn", "loss", "loss_mask")
_REFUSED = (
    "functions", "function_call", "images", "image", "videos", "video", "audios", "audio", "documents", "chosen",
    "rejected", "mask", "history", "train_detail", "training_detail",
)  # fmt: skip
HARMLESS = (
    "id", "idx", "index", "uuid", "hash", "source", "dataset", "split", "language", "lang", "category", "task", "topic",
    "tags", "title", "url", "license", "model", "score", "timestamp", "created_at", "metadata", "meta", "prompt_id",
    "conversation_id", "message_id", "num_turns", "tool_call_id", "parallel_tool_calls",
)  # fmt: skip
_MESSAGE_KEYS = {
    "role", "content", "from", "value", "masked", "tool_calls", *chat.REASONING_KEYS, *_TRAIN_KEYS, *_REFUSED,
}  # fmt: skip
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


class Example:
    """A training example: a record of a file."""

    option: ClassVar[str]
    singular: ClassVar[str]
    plural: ClassVar[str]
    content: ClassVar[str]  # The contents of a line, as named in notes.
    form: ClassVar[str]  # A sample line, for error messages.
    records: ClassVar[RecordForm[Any]]
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

    @property
    def group(self) -> str:
        """A key that examples share if they must be on the same side of the split, or "" if there are none."""
        return ""


@dataclass(frozen=True)
class Pair(Example):
    """A prompt and its completion. ``where`` is the file and line."""

    option = "--pairs"
    singular, plural = "pair", "pairs"
    content = "prompts and completions"
    form = '{"prompt": …, "completion": …}'
    records = RecordForm(
        ("prompt", "completion"),
        lambda record, where: _parse_pair(record, where),
        '--pairs reads records {"prompt": "…", "completion": "…"}; --chat reads lists of messages in their place',
        optional=_REFUSED,
    )

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
    ``tools`` and ``chat_template_kwargs``."""

    option = "--chat"
    singular, plural = "conversation", "conversations"
    content = "messages"
    form = '{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}'
    records = RecordForm(
        ("messages",),
        lambda record, where: _parse_conversation(record, where),
        '--chat reads records {"messages": [{"role": "user", "content": "…"}, …]}',
        strings=False,
        alternatives=(  # ShareGPT's, Alpaca's and TRL's.
            ("conversations",), ("conversation",), ("instruction", "input", "output"), ("instruction", "output"),
            ("prompt", "completion"),
        ),
        optional=("system", "tools", "chat_template_kwargs", *_REFUSED),
    )  # fmt: skip

    messages: list[dict[str, Any]]
    where: str
    context: Sequence[int] = ()
    variables: dict[str, Any] = field(default_factory=dict)
    ignored: Sequence[str] = ()

    def unused_keys(self, template: str) -> set[str]:
        """Returns the keys that neither the template nor training reads."""
        keys = {*self.variables, *(key for message in self.messages for key in message)}
        keys -= {"role", "content", "thinking", *HARMLESS}
        if re.search(r"\bthinking\b", template):
            keys.discard("reasoning_content")
        return {*self.ignored, *(key for key in keys if not re.search(rf"\b{re.escape(key)}\b", template))}

    @property
    def texts(self) -> list[str]:
        """The contents and the reasoning."""
        values = (message.get(key) for message in self.messages for key in ("content", "reasoning_content"))
        return [value for value in values if value]

    @property
    def words(self) -> list[str]:
        """Each message's role, as ChatML writes it, and content."""
        return [text for message in self.messages for text in (f"{message['role']}\n", message["content"] or "")]

    @property
    def identity(self) -> str:
        """The messages as JSON, which answers are excluded from the loss, and the variables."""
        left_out = {"thinking", *HARMLESS}  # The reasoning is stored under two keys.
        messages = [[value for key, value in message.items() if key not in left_out] for message in self.messages]
        return json.dumps([*messages, *self.context, *([self.variables] if self.variables else [])])


@dataclass(frozen=True)
class Preference(Example):
    """A prompt with a better and a worse continuation: texts, or lists of messages. ``where`` is the file and line.
    ``variables`` are the record's ``tools`` and ``chat_template_kwargs``."""

    option = "--preferences"
    singular, plural = "preference", "preferences"
    content = "prompts with a chosen and a rejected answer"
    form = '{"prompt": …, "chosen": …, "rejected": …}'
    records = RecordForm(
        ("prompt", "chosen", "rejected"),
        lambda record, where: _parse_preference(record, where),
        '--preferences reads records {"prompt": …, "chosen": …, "rejected": …}, each a text or a list of messages',
        strings=False,
        alternatives=(("chosen", "rejected"),),
        optional=("tools", "chat_template_kwargs", *(key for key in _REFUSED if key not in ("chosen", "rejected"))),
    )

    prompt: Any
    chosen: Any
    rejected: Any
    where: str
    variables: dict[str, Any] = field(default_factory=dict)
    ignored: Sequence[str] = ()

    @property
    def texts(self) -> list[str]:
        """The prompt and both answers, each as one text."""
        parts = (self.prompt, self.chosen, self.rejected)
        return [part if isinstance(part, str) else "\n".join(each["content"] or "" for each in part) for part in parts]

    @property
    def identity(self) -> str:
        """The prompt, both answers and the variables as JSON."""
        return json.dumps([self.prompt, self.chosen, self.rejected, self.variables])

    @property
    def group(self) -> str:
        """The prompt as text, marked as a group even if it is empty."""
        return f"prompt: {self.texts[0]}"


class _WholeRecord(RecordForm[Any]):
    def columns(self, available: Collection[str]) -> list[str]:
        return [*available] if {*self.keys} <= {*available} else [*self.keys]


@dataclass(frozen=True)
class Prompt(Example):
    """A prompt, as text or as a list of messages, whose answers a program rewards. The program gets the ``record``.
    ``where`` is the file and line. ``variables`` are the record's ``chat_template_kwargs``."""

    option = "--reward"
    singular, plural = "prompt", "prompts"
    content = "prompts"
    form = '{"prompt": …}'
    records = _WholeRecord(
        ("prompt",),
        lambda record, where: _parse_prompt(record, where),
        '--reward reads records with a "prompt", a text or a list of messages; the program gets all other keys',
        strings=False,
    )

    prompt: Any
    record: dict[str, Any]
    where: str
    variables: dict[str, Any] = field(default_factory=dict)
    ignored: Sequence[str] = ()

    @property
    def texts(self) -> list[str]:
        """The record as JSON."""
        return [json.dumps(self.record, ensure_ascii=False, default=str)]

    @property
    def group(self) -> str:
        """The prompt as JSON."""
        return json.dumps(self.prompt)


def _parse_prompt(record: dict[str, Any], where: Callable[[], str]) -> Prompt:
    prompt = _find_objects(record.get("prompt"))
    if prompt is None:
        text = get_string(record, "prompt", Prompt.records.hint, null=False)
        return Prompt(text, record, where())
    return Prompt(list(map(_parse_message, prompt)), record, where(), _read_variables(record))


def _parse_pair(record: dict[str, Any], where: Callable[[], str]) -> Pair:
    prompt, completion = (get_string(record, key, Pair.records.hint, null=False) for key in Pair.records.keys)
    _check_supported(record, Pair.records)
    return Pair(prompt, completion, where(), _unused_keys(record, Pair.records))


def _parse_conversation(record: dict[str, Any], where: Callable[[], str]) -> Conversation:
    form = Conversation.records
    messages, prompt_length = _read_messages(record)
    for item in [record, *messages]:
        _check_supported(item, form)
    variables = _read_variables(record)
    turns = [_parse_message(item) for item in messages]
    answers = [i for i, message in enumerate(turns) if message["role"] == "assistant"]
    context = [i for i in answers if i < prompt_length or not _is_trained_on(messages[i])]
    if len(context) == len(answers):
        problem = 'every assistant message has "weight": 0 or the like' if answers else "it has no assistant message"
        raise BadRecord(f"{problem}: there is nothing to learn", form.hint)
    system = record.get("system")
    if isinstance(system, str) and system and not any(message["role"] in ("system", "developer") for message in turns):
        turns, context = [{"role": "system", "content": system}, *turns], [i + 1 for i in context]
    return Conversation(turns, where(), context, variables, _unused_keys(record, form))


def _parse_preference(record: dict[str, Any], where: Callable[[], str]) -> Preference:
    form, variables = Preference.records, _read_variables(record)
    _check_supported(record, form)
    names = [name for name in form.columns(record) if name in form.keys]
    for name in names:
        if name not in record:
            get_string(record, name, form.hint)  # Raises.
    values: list[Any] = [_find_objects(record[name]) or record[name] for name in names]
    if all(isinstance(value, list) and all(isinstance(item, dict) for item in value) for value in values):
        for item in itertools.chain(*values):
            _check_supported(item, form)
        values = [[_parse_message(item) for item in value] for value in values]
    elif not all(isinstance(value, str) for value in values):
        problem = f"{', '.join(json.dumps(name) for name in names)} are not all texts or all lists of messages"
        raise BadRecord(problem, 'give each in the same form; "prompt" can be left out if both answers begin with it')
    prompt, chosen, rejected = values if len(values) == 3 else _extract_prompt(*values)
    is_empty = isinstance(prompt, list) and not (prompt and chosen and rejected)
    if chosen == rejected or is_empty or (len(values) == 2 and not prompt):
        problem = '"chosen" and "rejected" are equal' if chosen == rejected else "it has no prompt, or no answer to it"
        raise BadRecord(f"{problem}: there is nothing to learn", form.hint)
    return Preference(prompt, chosen, rejected, where(), variables, _unused_keys(record, form))


def _extract_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Returns the common beginning of two texts or lists of messages, and what follows it in each."""
    start = count_common(chosen, rejected)
    if start and chosen[start - 1] == " ":  # A tokenizer joins a space to the word after it.
        start -= 1
    return chosen[:start], chosen[start:], rejected[start:]


def _find_objects(value: Any) -> list[Any] | None:
    """Returns a column that is a list of objects, or None."""
    parsed = parse_column(value)
    return parsed if isinstance(parsed, list) and all(isinstance(item, dict) for item in parsed) else None


def _read_variables(record: dict[str, Any]) -> dict[str, Any]:
    variables = parse_column(record.get("chat_template_kwargs")) or {}
    if not isinstance(variables, dict) or not _RESERVED.isdisjoint(variables):
        problem = f'"chat_template_kwargs" is not an object without {", ".join(sorted(_RESERVED))}'
        raise BadRecord(problem, 'it has variables of the chat template, such as {"enable_thinking": false}')
    tools = _find_objects(record.get("tools") or [])
    if tools is None:
        raise BadRecord('"tools" is not a list of objects', "describe functions as in OpenAI's API")
    return {**variables, "tools": tools} if tools else variables


def _read_messages(record: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Returns the messages of a record of any format, and how many of them are only context."""
    key, hint = Conversation.records.columns(record)[0], Conversation.records.hint
    if key == "instruction":
        request, answer = (get_string(record, key, hint, null=False) for key in ("instruction", "output"))
        if added := get_string(record, "input", hint) if "input" in record else "":
            request = f"{request}\n{added}"
        return [{"role": "user", "content": request}, {"role": "assistant", "content": answer}], 0
    messages: list[dict[str, Any]] = []
    for name in ("prompt", "completion") if key == "prompt" else (key,):
        prompt_length, more = len(messages), _find_objects(record.get(name))
        if more is None:
            raise BadRecord(f'it has no list of objects "{name}"', option_hint(record, hint))
        messages += more
    return messages, prompt_length


def _parse_message(message: dict[str, Any]) -> dict[str, Any]:
    """Returns role, content, optional reasoning and the message's other keys, as chat templates read them."""
    if "from" in message and "role" not in message:  # ShareGPT's keys.
        message = {**message, "role": message["from"], "content": message.get("value")}
    role = get_string(message, "role", Conversation.records.hint, null=False)
    role = _ROLE_SYNONYMS.get(role, role)
    if role not in ROLES:
        raise BadRecord(f"there is no role {role!r:.40}", f"roles are {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise BadRecord('"content" has a part that is not text', "only text is supported; --skip-bad skips others")
        if not all(map(_is_trained_on, content)):
            raise BadRecord('a part of "content" is excluded from the loss', "only whole messages can be excluded")
        message = {**message, "content": "".join(part["text"] for part in content)}
    others = {key: value for key, value in message.items() if value is not None and key not in _MESSAGE_KEYS}
    if calls := message.get("tool_calls"):
        others["tool_calls"] = [*map(chat.read_call, calls if isinstance(calls, list) else [None])]
        if role != "assistant" or None in others["tool_calls"]:
            hint = 'an assistant calls {"type": "function", "function": {"name": "…", "arguments": {…}}}'
            raise BadRecord('"tool_calls" is not a list of calls of functions', hint)
    is_call = calls and message.get("content") is None
    text = None if is_call else get_string(message, "content", Conversation.records.hint, null=False)
    return {"role": role, "content": text, **chat.reasoning(message), **others}


def _is_trained_on(message: dict[str, Any]) -> bool:
    """Whether to train on an answer. OpenAI's format excludes answers with a ``weight`` of 0."""
    flags = {key: message[key] for key in (*_TRAIN_KEYS, "masked") if message.get(key) is not None}
    for key, value in flags.items():
        if value not in (0, 1):
            hint = "1 or true trains on the answer; 0 or false uses it only as context (the reverse for masked)"
            raise BadRecord(f'"{key}" is {value!r:.40}, not 0 or 1', hint)
    return all(bool(value) != (key == "masked") for key, value in flags.items())


def _check_supported(values: dict[str, Any], form: RecordForm[Any]) -> None:
    """Raises `BadRecord` if a record or message has something that cannot be trained on."""
    used = [key for key in form.optional if key in _REFUSED and str(parse_column(values.get(key)) or "").strip()]
    if used:
        hint = option_hint(values, "remove it, or use --skip-bad to skip such records")
        raise BadRecord(f'"{used[0]}" is not supported', hint)


def _unused_keys(record: dict[str, Any], form: RecordForm[Any]) -> list[str]:
    known = {*form.columns(record), *form.optional, *HARMLESS}
    return [key[:40] for key, value in record.items() if value is not None and key not in known]


KINDS: tuple[type[Example], ...] = (Conversation, Pair, Preference)


class _AnyKind(RecordForm[tuple[type[Example] | None, bool]]):
    def columns(self, available: Collection[str]) -> list[str]:
        return [*available] if any({*kind.records.columns(available)} <= {*available} for kind in KINDS) else [""]


def _find_kind(record: dict[str, Any]) -> tuple[type[Example] | None, bool]:
    """Returns the kind of example that a record is, and whether it has no other keys than that kind needs."""
    for kind in KINDS:
        columns = {*kind.records.columns(record)}
        has_texts = kind is Conversation and "prompt" in columns and not _has_messages(record["prompt"])
        if columns <= record.keys() and not has_texts:
            return kind, columns - {*kind.records.optional} == record.keys()
    return None, False


def _has_messages(value: Any) -> bool:
    messages = _find_objects(value)
    return messages is not None and all("role" in item for item in messages)


_ANY_KIND = _AnyKind((), lambda record, where: _find_kind(record), "", strings=False)
E = TypeVar("E", bound=Example)


def kind_of(texts: Sequence[str], config: TextConfig) -> type[Example] | None:
    """Returns the kind of example that every record of ``texts`` is, without other keys. Returns None if there is
    none, or if ``texts`` are not readable record files on this disk."""
    reader = Reader(replace(config, skip_bad=False))
    common_kind: type[Example] | None = None
    try:
        if not all(map(_is_on_disk, texts)):
            return None
        files = sources.find(texts)
        for source in files if all(map(has_records, files)) else ():
            for kind, is_exact in reader.records(source, _ANY_KIND):
                if not is_exact or common_kind not in (None, kind):
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
    reader = Reader(config, Skipped(config.skip_bad, note))
    train_sources, val_sources = find_sources(texts, config, reader.skipped)
    train, records = _read(reader, kind, train_sources)
    held_out, val_records = _read(reader, kind, val_sources)
    if not train:
        raise empty_error(texts, kind.plural, config, hint)
    if config.val_text is None:
        train, held_out = split(train, config.val_fraction, config.seed)
    elif not held_out:
        raise empty_error([config.val_text], kind.plural, config, hint)
    return ExampleCorpus(sources.run_name(texts), train, held_out, records + val_records, reader.skipped.count)


def find_copies(examples: Iterable[E]) -> list[E]:
    """Returns the examples that are equal to an earlier one."""
    firsts: dict[bytes, E] = {}
    return [e for e in examples if e is not firsts.setdefault(hashlib.sha256(e.identity.encode()).digest(), e)]


def _read(reader: Reader, kind: type[E], files: Sequence[Source]) -> tuple[list[E], list[dict[str, Any]]]:
    """Returns the examples, and the size, example count, text bytes and sha256 of each source."""
    examples: list[E] = []
    records: list[dict[str, Any]] = []
    for source in files:
        digest, start, size = hashlib.sha256(), len(examples), 0
        for example in reader.records(source, kind.records):
            examples.append(example)
            size += sum(map(utf8_size, example.texts))
            digest.update(example.identity.encode())
        count = len(examples) - start
        summary = {"name": source.name, "size": source.size, "documents": count, "bytes": size}
        records.append({**summary, "sha256": digest.hexdigest()})
    return examples, records


def split(examples: Sequence[E], fraction: float, seed: int) -> tuple[list[E], list[E]]:
    """Returns training and held-out examples, keeping groups together. Holds out the last ``fraction``, at least one
    example unless ``fraction`` is 0. With `MIN_HASHED_DOCUMENTS` examples or more, a hash of the seed and the example
    decides instead, so adding examples does not move others. Raises `UserError` if no example is left for training."""
    if fraction == 0:
        return list(examples), []
    is_hashed = len(examples) >= MIN_HASHED_DOCUMENTS
    keys = [each.group or (each.identity if is_hashed else str(index)) for index, each in enumerate(examples)]
    groups = [*dict.fromkeys(keys)]
    held_out_groups = {*groups[-max(1, round(len(groups) * fraction)) :]}
    if is_hashed:
        hashes = {key: hash_fraction(key, seed) for key in groups}
        threshold = min(max(fraction, min(hashes.values()) * 1.0000001), max(hashes.values()))
        held_out_groups = {key for key, value in hashes.items() if value < threshold}
    train, held_out = (
        [each for each, key in zip(examples, keys, strict=True) if (key in held_out_groups) == is_held_out]
        for is_held_out in (False, True)
    )
    if not train or not held_out:
        problem = f"there are too few {examples[0].plural} to hold out {fraction:g} of them: {len(examples):,}"
        if len(groups) == 1 < len(examples):
            what = "have the same prompt" if isinstance(examples[0], Preference | Prompt) else "are equal"
            problem = f"all {len(examples):,} {examples[0].plural} {what}, so none can be held out"
        raise UserError(problem, "give others, or use --val-fraction 0 to hold out nothing")
    return train, held_out
