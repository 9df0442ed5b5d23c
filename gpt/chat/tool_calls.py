"""Reasoning and tool calls in answers: how a chat template writes them, the grammar that makes calls valid, and the
parser that separates them from the text."""

import contextlib
import json
import re
import reprlib
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpt.chat import chat
from gpt.chat.chat import Message, Variables
from gpt.decoding.constraint import END_THINK, THINK, Thinking
from gpt.decoding.stream import find_overlap
from gpt.system.errors import UserError
from gpt.tokenizers.tokenizer import Tokenizer

_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_HEADER = '{"name": "'
_UNMARKED = r'\s{0,8}(```(json)?\s{0,8})?\{\s{0,8}"name":\s{0,8}"'  # Small models often leave out the marks of a call.
_MAX_UNMARKED = 50  # Maximum characters of this pattern.
_CALL = re.compile(r'\{\s*"name":\s*"([^"]*)", "(?:arguments|parameters)": ')
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # As templates write JSON.
_INSTRUCTIONS = """You can call these functions:
{functions}

To call one, answer with its name and arguments as JSON inside <tool_call></tool_call> tags, such as:
<tool_call>
{{"name": "function-name", "arguments": {{"key": "value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class Tools:
    """Functions that an answer can call."""

    specs: Sequence[Mapping[str, Any]]  # As in OpenAI's API. Templates read them.
    names: Sequence[str]  # The functions that may be called now.
    required: bool = False  # Whether the answer must be a call.
    parallel: bool = True  # Whether it can have several calls.


def read_names(tools: Sequence[Any]) -> list[str]:
    """Returns the names of the functions in OpenAI's ``tools``. Raises `UserError` for anything else."""
    names: list[str] = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(f"has {reprlib.repr(tool)}; it must be a function named with a-z, 0-9 and _-.:/")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise UserError(f"has {name}, whose parameters are not the schema of an object")
        if name in names:
            raise UserError(f"has {name} twice")
        names.append(name)
    return names


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls: ``start``, ``{"name": "f", "arguments": {…}}``, ``between`` several, and ``end``. The
    ``start`` can be empty. If ``in_template`` is False, the chat template ignores tools."""

    start: str
    end: str
    between: str | None  # None if an answer can have only one call.
    key: str = "arguments"
    in_template: bool = True

    @property
    def trigger(self) -> str:
        """The token or tag that begins calls."""
        match = re.match(r"<[^>]+>|\[\w+\]|\S*", self.start)
        return match[0] if match else ""

    def grammar(self, tools: Tools, thinking: Thinking) -> str:
        """Returns the rule, in llguidance's Lark dialect, of an answer that can call ``tools``."""
        parameters = {spec["function"]["name"]: spec["function"].get("parameters") or {} for spec in tools.specs}
        more = f"({json.dumps(self.between)} call)*" if tools.parallel and self.between is not None else ""
        rules = [
            f"calls: {json.dumps(self.start.removeprefix(self.trigger))} call {more} {json.dumps(self.end)}",
            f"call: {json.dumps(_HEADER)} function", f"unmarked[lazy]: /{_UNMARKED}/",
            "function: " + " | ".join(f"function{n}" for n in range(len(tools.names))),
        ]  # fmt: skip
        for n, name in enumerate(tools.names):
            schema = json.dumps(_arguments_schema(parameters[name]))
            rules.append(f'function{n}: {json.dumps(f"""{name}", "{self.key}": """)} arguments{n} "}}"')
            rules.append(f"arguments{n}: %json {schema}")
        no_reasoning = f" & ~/{THINK}(.|\\n)*/" if thinking == "optional" else ""
        answer = ["TEXT", "unmarked function", *(["marked calls"] if self.start else [])]
        if tools.required:
            answer = [f"{json.dumps(self.trigger)} calls"]
        rules += [f"TEXT: /(.|\\n)*/{no_reasoning}", "marked[lazy]: MARKED"]
        trigger = re.escape(self.trigger).replace("/", r"\/")
        return "\n".join([" | ".join(answer), *rules, f"MARKED: /(.|\\n)*{trigger}/{no_reasoning}"])


PLAIN = CallFormat("<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n", in_template=False)


def _arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a function's arguments. Undeclared arguments are not allowed."""
    is_combined = any(key in parameters for key in ("$ref", "allOf", "anyOf", "oneOf", "patternProperties"))
    closed = {} if is_combined else {"properties": {}, "additionalProperties": False}
    return {"type": "object", **closed, **parameters, "x-guidance": _SEPARATORS}


def find_format(tokenizer: Tokenizer) -> CallFormat:
    """Returns how a model writes calls, from a conversation with calls that its chat template renders."""
    functions = [{"name": "probe", "arguments": {"key": number}} for number in range(2)]
    calls = [{"id": f"12345678{at}", "type": "function", "function": each} for at, each in enumerate(functions)]
    question, schema = {"role": "user", "content": "question"}, {"type": "object", "properties": {"key": {}}}
    specs = [{"type": "function", "function": {"name": "probe", "description": "", "parameters": schema}}]

    def render(count: int) -> tuple[str, list[re.Match[str]]]:
        answer = {"role": "assistant", "content": "", "tool_calls": calls[:count]}
        text = chat.render(tokenizer, [question, answer], answer=False, variables={"tools": specs})
        call = r'\{"name": "probe", "(arguments|parameters)": \{"key": \d\}(?:, "id": "\d+")?\}'
        return text, [*re.finditer(call, text)][-count:]

    def before_end(text: str) -> str:
        specials = tokenizer.special_pattern().finditer(text)
        ends = (match.start() for match in specials if tokenizer.all_specials[match[0]] in tokenizer.ends)
        return text[: next(ends, None)]

    try:
        prompt = chat.render(tokenizer, [question], variables={"tools": specs}).rstrip().removesuffix(THINK).rstrip()
        text, [call] = render(1)
    except (UserError, ValueError):
        return PLAIN
    if "probe" not in prompt or not text.startswith(prompt):
        return PLAIN
    start, end, between = text[len(prompt) : call.start()], before_end(text[call.end() :]).rstrip(), None
    with contextlib.suppress(UserError, ValueError):  # Llama 3's template refuses several calls.
        text, [first, second] = render(2)
        between = text[first.end() : second.start()]
        between = between if between == before_end(between) else None
    return CallFormat(start.rpartition(END_THINK)[2].lstrip(), end, between, call[1])


def as_plain_text(messages: Sequence[Message], tools: Tools | None) -> list[Message]:
    """Returns messages for a template that ignores tools, with calls, results and functions as text."""
    plain_messages: list[Message] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if plain_messages and plain_messages[-1].get("results"):  # Many templates require alternating roles.
                content = f"{plain_messages.pop()['content']}\n{content}"
            message = {"role": "user", "content": content, "results": True}
        elif calls := message.get("tool_calls"):
            texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            content = f"{content}\n{''.join([PLAIN.start, str(PLAIN.between).join(texts), PLAIN.end])}".lstrip()
            message = {"role": role, "content": content}
        plain_messages.append(message)
    if tools:
        functions = "\n".join(json.dumps(spec["function"], ensure_ascii=False) for spec in tools.specs)
        system = [plain_messages.pop(0)["content"]] if messages[0]["role"] == "system" else []
        content = "\n\n".join([*system, _INSTRUCTIONS.format(functions=functions)])
        plain_messages.insert(0, {"role": "system", "content": content})
    return plain_messages


def find_thinking(tokenizer: Tokenizer, prompt: str) -> Thinking:
    """Returns whether the answer to a rendered prompt can start with reasoning."""
    prompt = prompt.rstrip()
    if END_THINK not in (tokenizer.chat_template or "") or prompt.endswith(END_THINK):
        return ""
    return "open" if prompt.endswith(THINK) else "optional"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and what its answer can contain."""

    text: str
    thinking: Thinking
    call_format: CallFormat | None = None  # If an answer can call tools.
    grammar: str = ""


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Tools | None,
    find_format: Callable[[], CallFormat],
    *,
    thinks: bool = True,
    open_end: bool = False,
    variables: Variables = chat.NO_VARIABLES,
    **options: Any,
) -> Rendered:
    """Renders a conversation whose answer can call ``tools``, and reason first if it ``thinks``. Calls
    ``find_format`` only if there are tools or calls. The other arguments are those of `chat.render`."""
    has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    call_format = find_format() if tools or has_calls else None
    is_plain = call_format is not None and not call_format.in_template
    variables = {**variables, "tools": tools.specs if tools and not is_plain else None}
    shown = as_plain_text(messages, tools) if is_plain else messages
    text = chat.render(tokenizer, shown, open_end=open_end, variables=variables, **options)
    thinking: Thinking = "" if open_end else find_thinking(tokenizer, text)
    if thinking == "open" and not thinks:  # The template cannot turn reasoning off.
        text, thinking = f"{text}\n{END_THINK}\n\n", ""
    if not tools or call_format is None:
        return Rendered(text, thinking)
    return Rendered(text, thinking, call_format, call_format.grammar(tools, thinking))


@dataclass
class Parts:
    """New parts of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)  # Deltas, as in OpenAI's API.


class AnswerParser:
    """Separates reasoning and calls from the text of an answer, as it is generated."""

    def __init__(self, thinking: Thinking, call_format: CallFormat | None) -> None:
        self.calls: list[dict[str, Any]] = []  # All calls so far, as in OpenAI's API.
        self.is_thinking = thinking == "open"
        self._rest, self._final, self._parsing = "", False, self._parse(thinking, call_format)

    @property
    def is_complete(self) -> bool:
        """Whether the answer ends with a complete call."""
        return bool(self.calls) and self._rest.startswith("}")

    def push(self, text: str, final: bool, parts: Parts) -> None:
        """Adds what ``text`` completes to ``parts``: everything, if it is the ``final`` text."""
        self._rest, self._final = self._rest + text, final
        while (part := next(self._parsing)) is not None:
            if isinstance(part, dict):
                parts.calls.append(part)
            elif self.is_thinking:
                parts.reasoning += part
            else:
                parts.text += part

    def _parse(self, thinking: Thinking, call_format: CallFormat | None) -> Iterator[str | dict[str, Any] | None]:
        """Yields parts of `_rest`, and None when it needs more text."""
        if thinking == "optional":
            while THINK.startswith(self._rest) and self._rest != THINK and not self._final:
                yield None
            self.is_thinking = self._rest.startswith(THINK)
            self._rest = self._rest.removeprefix(THINK)
        if self.is_thinking:
            yield from self._skip_space()
            yield from self._copy(END_THINK)
            yield from self._skip_space()
            self.is_thinking = False
        is_unmarked = call_format is not None and re.match(_UNMARKED, self._rest)
        while call_format and not is_unmarked and not self._final and len(self._rest) <= _MAX_UNMARKED:
            if self._rest.lstrip()[:1] not in ("", "{", "`"):
                break
            yield None
            is_unmarked = re.match(_UNMARKED, self._rest)
        if not is_unmarked:
            yield from self._copy(call_format.trigger if call_format else "")
        while True:
            while not (header := _CALL.search(self._rest)):
                yield None
            self._rest = self._rest[header.end() :]
            # Mistral's templates require ids of 9 letters and digits.
            id = "call" + "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(5))
            function = {"name": header[1], "arguments": ""}
            self.calls.append({"id": id, "type": "function", "function": function})
            yield {"index": len(self.calls) - 1, **self.calls[-1], "function": {**function}}
            yield from self._copy_arguments(function)

    def _copy_arguments(self, function: dict[str, str]) -> Iterator[dict[str, Any] | None]:
        """Moves a JSON object from `_rest` to ``function``."""
        while True:
            start, text, is_complete = len(function["arguments"]), function["arguments"] + self._rest, False
            end = len(text)
            if "}" in self._rest:
                with contextlib.suppress(ValueError, RecursionError):
                    _, end = json.JSONDecoder().raw_decode(text)
                    is_complete = True
            function["arguments"], self._rest = text[:end], text[end:]
            if end > start:
                yield {"index": len(self.calls) - 1, "function": {"arguments": text[start:end]}}
            if is_complete:
                return
            yield None

    def _skip_space(self) -> Iterator[None]:
        while not (text := self._rest.lstrip()) and not self._final:
            yield None
        self._rest = text

    def _copy(self, marker: str) -> Iterator[str | None]:
        """Yields the text before ``marker`` without the space in front of it, and drops the marker. Without a marker,
        never ends."""
        while not marker or marker not in self._rest:
            text = self._rest[: len(self._rest) - find_overlap(self._rest, [marker])].rstrip()
            text = self._rest if self._final or not marker else text
            self._rest = self._rest[len(text) :]
            yield text
            yield None
        text, _, self._rest = self._rest.partition(marker)
        yield text.rstrip()
