"""The interactive mode of ``gpt chat`` and ``gpt sample -i``."""

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.config.sample import SampleConfig
from gpt.system.errors import UserError, check_text, did_you_mean
from gpt.system.words import counted

from .. import inputs
from ..show import progress, render, terminal

if TYPE_CHECKING:
    from gpt.api import LanguageModel
    from gpt.chat.tool_calls import Rendered, Tools
    from gpt.decoding.constraint import Constraint

PLAIN_HELP = """\
TEXT             continues the text; end a line with \\ to continue on the next, or put \"\"\" before and after
/retry           generates another text from the same prompt
/more            continues the text where it ended
"""
CHAT_HELP = """\
TEXT             sends a message or a call's result; end a line with \\ to continue it, or put \"\"\" before and after
/retry           generates another answer
/more            continues the answer where it ended
/system TEXT     sets the system message; without TEXT, removes it
/clear           starts a new conversation
"""
HELP = """\
/set             lists the settings; /set NAME VALUE changes one: /set temperature 0.7
/help  /quit     shows this help; exits, as Ctrl-D does. Ctrl-C stops a text. Type // to start a prompt with /"""
QUOTES = '"""'
UNUSED = ("batch", "logprobs", "echo_logprobs")  # Settings without effect on a conversation.
TOOLS_FORM = '[{"type": "function", "function": {"name": "now", "parameters": {…}}}]'
THINKING = "(thinking …)\n\n"


class Interaction:
    """Reads prompts and commands until the input ends. With a chat template, prompts form a conversation. Otherwise the
    model continues each prompt."""

    def __init__(
        self,
        loaded: "LanguageModel",
        chosen: SampleConfig,
        given: Collection[str],
        seed: int | None,
        system: str = "",
        variables: Mapping[str, Any] | None = None,
        tools: "Tools | None" = None,
    ) -> None:
        self.system, self.variables, self.tools = system, variables or {}, tools
        self._use(loaded, chosen, given, render.note)
        self.seed = render.draw_seed(announce=self.settings.draws) if seed is None else seed
        self.messages: list[dict[str, Any]] = []  # The conversation without the system message.
        self.finish_reason = ""  # Of the last answer; "" if it was interrupted.
        self.index = 0  # Index of the current sample for this prompt.
        self.commands: dict[str, Callable[[str], object]] = {
            "/retry": self._retry, "/more": self._continue_answer, "/system": self._set_system,
            "/clear": self._clear_messages, "/set": self._change_setting,
            "/help": lambda _: terminal.write((CHAT_HELP if self.is_chat else PLAIN_HELP) + HELP + "\n"),
            **dict.fromkeys(("/quit", "/exit", "/bye"), lambda _: sys.exit(0)),
        }  # fmt: skip

    @property
    def is_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self.loaded.tokenizer.chat_template is not None

    @property
    def last_answer(self) -> int:
        """Index of the last answer in the conversation, or -1."""
        return max((at for at, message in enumerate(self.messages) if message["role"] == "assistant"), default=-1)

    @property
    def pending_calls(self) -> list[dict[str, Any]]:
        """Calls of the last answer that have no result yet."""
        calls = self.messages[self.last_answer].get("tool_calls", []) if self.messages else []
        return calls[len(self.messages) - self.last_answer - 1 :]

    def run(self) -> None:
        """Reads and handles lines until stdin ends. Raises `UserError` if there is no stdin."""
        if sys.stdin is None:
            raise UserError("there is no standard input to read", "gpt sample PROMPT needs none")
        with contextlib.suppress(AttributeError, ValueError):
            sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        if sys.stdin.isatty():
            what = "messages" if self.is_chat else "prompts"
            render.note(f"enter {what}; /help lists commands, Ctrl-D exits")
            with contextlib.suppress(ImportError):  # Windows has no readline.
                import_module("readline")  # The arrow keys edit a line, and bring back earlier ones.
        while (words := read_prompt()) is not None:
            try:
                self.handle(words)
            except UserError as error:
                render.error(error.message, error.hint)
            except KeyboardInterrupt:
                pass  # Ctrl-C only stops the current text.
            for call in self.pending_calls[:1]:
                render.note(f"enter the result of {call['function']['name']}")

    def handle(self, words: str) -> None:
        """Runs a command, continues a prompt or answers a message. Raises `UserError`."""
        check_text("the line", words)
        if not words.startswith("/") or words.startswith("//"):
            content = words.removeprefix("/") if words.startswith("//") else words
            message = {"role": "user", "content": content}
            if calls := self.pending_calls:
                name = calls[0]["function"]["name"]
                message = {"role": "tool", "tool_call_id": calls[0]["id"], "name": name, "content": content}
            messages = [*(self.messages if self.is_chat else []), message]
            if len(calls) > 1:
                self.messages = messages
            else:
                self.index = 0
                self._answer(messages)
            return
        name, _, rest = words.partition(" ")
        if name not in self.commands:
            raise UserError(f"there is no command {name}", did_you_mean(name, self.commands) or "/help lists them")
        self.commands[name](rest.strip())

    def _use(
        self,
        loaded: "LanguageModel",
        chosen: SampleConfig,
        given: Collection[str],
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Sets the model and its settings. Raises `UserError` for settings that the model cannot use."""
        settings = loaded.sampling.apply(chosen, given, note)
        if (self.system or self.variables or self.tools) and loaded.tokenizer.chat_template is None:
            message = f"{loaded.path} has no chat template: --system, --no-think and --tools need one"
            raise UserError(message, "gpt sample -i continues texts")
        loaded.write("", settings)  # Nothing is generated, but a schema is compiled, for instance.
        if self.tools:
            if conflict := "ignore-eot" if settings.ignore_eot else settings.constraint and settings.constraint[0]:
                raise UserError(f"{conflict.replace('_', '-')} and --tools cannot be combined", "leave one of them out")
            loaded.constraints.find(settings, loaded.call_format.grammar(self.tools, ""))
        self.loaded, self.chosen, self.given, self.settings = loaded, chosen, {*given}, settings

    def _retry(self, _: str) -> None:
        if not self.messages:
            raise UserError("there is no prompt yet", "enter one")
        self.index += 1
        self._answer(self.messages[: self.last_answer])

    def _continue_answer(self, _: str) -> None:
        if not self.messages:
            raise UserError("there is no text yet", "enter a prompt")
        if self.finish_reason in ("eot", "stop"):
            raise UserError("the text is complete", "/retry generates another one")
        start = self.messages[-1]["content"].removesuffix("\ufffd")  # A character that the limit cut off begins again.
        self._answer(self.messages[:-1], start)

    def _answer(self, messages: list[dict[str, Any]], start: str | None = None) -> None:
        """Answers the last message or, if an answer's ``start`` is given, extends it. Does not show reasoning. After an
        error, or if Ctrl-C comes before any text, the conversation is as before."""
        from gpt.chat.chat import read_call, reasoning
        from gpt.chat.tool_calls import AnswerParser, Parts, Rendered

        before, settings, size = (self.messages, self.finish_reason), self.settings, self.loaded.model.config.block_size
        text, parts, rendered = start or "", Parts(), Rendered("", "")
        started = self.loaded.tokenizer.encode(text, continues=True).tolist()
        prompt: str | list[int] = messages[-1]["content"] + text
        if self.is_chat:
            prompt, messages, rendered = self._chat_prompt(messages, started)
            settings = replace(settings, max_tokens=min(self._max_tokens, size - len(prompt)))
        elif start is None:
            terminal.write(messages[-1]["content"])
        constraint = self._find_constraint(rendered, started)
        parser = AnswerParser(rendered.thinking, rendered.call_format)
        parser.push(text, False, parts)
        writing = self.loaded.write(prompt, settings, self.seed, self.index, constraint)
        try:
            for piece in writing:
                has_thought, length, count = bool(parts.reasoning), len(parts.text), len(parts.calls)
                parser.push(piece, False, parts)
                terminal.write(THINKING * (bool(parts.reasoning) - has_thought) + parts.text[length:])
                for delta in parts.calls[count:]:
                    if name := delta["function"].get("name"):  # Each call has a line of its own.
                        terminal.write("\n" * bool(parts.text or delta["index"]) + f"{name} ")
                    terminal.write(delta["function"]["arguments"])
                text += piece
                if piece:
                    self.messages, self.finish_reason = [*messages, {"role": "assistant", "content": text}], ""
        except UserError:
            self.messages, self.finish_reason = before
            raise
        finally:
            parser.push("", True, last := Parts())
            terminal.write(last.text + "\n")
        self.finish_reason = writing.sample.finish_reason
        answer: dict[str, Any] = {"role": "assistant", "content": text}
        if parser.is_complete and self.finish_reason != "length":
            answer |= {"content": parts.text, "tool_calls": [read_call(call) for call in parser.calls]}
            answer |= reasoning({"reasoning_content": parts.reasoning or None})
        self.messages = [*messages, answer]
        overflows = [(writing.sample.dropped, writing.sample.slid)]
        render.context_notes(overflows, size, "max_tokens" in self.given)
        if self.finish_reason == "length" and self.is_chat and len(prompt) + settings.max_tokens == size:
            render.note(f"the context of {size:,} tokens is full: /more drops the oldest messages, /clear all of them")
        elif self.finish_reason == "length":
            render.note(f"stopped at {counted(settings.max_tokens, 'token')}: /more continues")

    def _find_constraint(self, rendered: "Rendered", start: list[int]) -> "Constraint | None":
        """Returns the constraint of an answer after its ``start``, or None."""
        constraint = self.loaded.constraints.find(self.settings, rendered.grammar, rendered.thinking)
        for id in start:
            constraint = constraint and constraint.with_token(id)
        return constraint

    @property
    def _max_tokens(self) -> int:
        """The limit of a text. By default, an answer can use the rest of the context."""
        return self.settings.max_tokens if "max_tokens" in self.given or not self.is_chat else sys.maxsize

    def _chat_prompt(
        self, messages: list[dict[str, Any]], start: list[int]
    ) -> tuple[list[int], list[dict[str, Any]], "Rendered"]:
        """Returns the conversation's ids, followed by the ``start`` of the answer, its messages and its text. Drops the
        oldest turns to make room for ``max_tokens`` or a quarter of the context, whichever is less."""
        from gpt.chat import tool_calls

        find_format, tokenizer = lambda: self.loaded.call_format, self.loaded.tokenizer
        size, total = self.loaded.model.config.block_size, len(messages)
        system = [{"role": "system", "content": self.system}] if self.system else []
        while True:
            whole = [*system, *messages]
            rendered = tool_calls.render(tokenizer, whole, self.tools, find_format, variables=self.variables)
            ids = tokenizer.encode(rendered.text, specials=True).tolist() + start
            later_turns = [at for at, message in enumerate(messages) if at and message["role"] == "user"]
            if len(ids) + min(self._max_tokens, size // 4) <= size or not later_turns:
                break
            messages = messages[later_turns[0] :]
        if len(ids) >= size:
            message = f"the last message and its answer have {len(ids):,} tokens, which fill the context of {size:,}"
            raise UserError(message, "send a shorter message, or /clear starts a new conversation")
        if dropped := total - len(messages):
            render.note(f"the context of {size:,} tokens is full: the first {dropped:,} messages were dropped")
        return ids, messages, rendered

    def _set_system(self, text: str) -> None:
        self._require_chat("/system")
        self.system = text
        render.note(f"the system message is {'set' if text else 'removed'}")

    def _clear_messages(self, _: str) -> None:
        self._require_chat("/clear")
        self.messages = []
        render.note("this is a new conversation")

    def _require_chat(self, command: str) -> None:
        if not self.is_chat:
            message = f"{command} needs a chat template, which {self.loaded.path} does not have"
            raise UserError(message, "a model trained with gpt train --chat has one")

    def _change_setting(self, words: str) -> None:
        name, value = (*re.split(r"[\s=]+", words, maxsplit=1), "")[:2]
        key, name = name.replace("-", "_"), name.replace("_", "-")
        if key in UNUSED:
            raise UserError(f"{name} has no effect in a conversation", "/set lists the settings")
        if (key, value) == ("json_schema", "-"):
            raise UserError("a conversation cannot read its schema from stdin", "name a file")
        if name:
            chosen = self.chosen.changed(name, value.strip())
            chosen = resolve_constraint(chosen, {}) if key == "json_schema" else chosen
            self._use(self.loaded, chosen, {*self.given, key})
        panels = ("Text", "Sampling", *(["Beam search"] if self.settings.beam else []))
        for field in dataclasses.fields(self.settings):
            setting = getattr(self.settings, field.name)
            if field.name == "max_tokens" and self._max_tokens > setting:
                setting = "the rest of the context"
            elif isinstance(setting, tuple):
                setting = ", ".join(setting) or "off"
            elif type(setting) in (bool, str) or field.metadata["shown"] == "off":
                setting = "on" if setting is True else setting or "off"
            line = " ".join(f"{field.name.replace('_', '-')} {setting}".split())[:80]
            if field.name == key:
                render.note(line)
            elif not name and field.metadata["panel"] in panels:
                terminal.write(line + "\n")


def converse(
    settings: SampleConfig,
    given: Collection[str],
    model: str | None,
    seed: int | None,
    device: str,
    dtype: str,
    threads: int | None,
    system: str = "",
    variables: Mapping[str, Any] | None = None,
    tools: "Tools | None" = None,
) -> None:
    """Loads a model and runs an `Interaction` with it. A conversation starts with the ``system`` message, its template
    can read ``variables``, and answers can call ``tools``."""
    with progress.startup_spinner(quiet=False):
        from gpt import api
    loaded = api.load(model, device=device, dtype=dtype, threads=threads, note=render.note, for_decoding=True)
    Interaction(loaded, settings, given, seed, system, variables, tools).run()


def read_tools(file: Path) -> "Tools":
    """Reads the functions that answers can call. Raises `UserError` if the file is not a list like OpenAI's tools."""
    from gpt.chat.tool_calls import Tools, read_names

    text, name = inputs.read_text(None, file, "list of tools", "--tools"), inputs.display_name(file)
    try:
        tools = json.loads(text)
        check_text(name, json.dumps(tools, ensure_ascii=False))
        names = read_names(tools if isinstance(tools, list) else [tools])
    except UserError as error:
        raise UserError(f"{name} {error.message}", f"the form is {TOOLS_FORM}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON: {error!s:.200}", f"the form is {TOOLS_FORM}") from None
    if not names:
        raise UserError(f"{name} has no functions", f"the form is {TOOLS_FORM}")
    return Tools(tools, names)


def resolve_constraint(settings: SampleConfig, given: dict[str, Any]) -> SampleConfig:
    """Splits ``choices`` at commas and reads the schema file. Raises `UserError` for an empty constraint."""
    settings = settings.changed("choices", ",".join(settings.choices))
    if empty := next((name for name in ("choices", "regex", "json_schema") if name in given and not given[name]), None):
        raise UserError(f"--{empty.replace('_', '-')} is empty", "leave it out to allow any text")
    if settings.json_schema:
        schema = inputs.read_text(None, Path(settings.json_schema), "JSON schema", "--json-schema")
        if not schema.strip():
            raise UserError(f"{settings.json_schema} is empty", 'a schema is a JSON object, such as {"type": "object"}')
        settings = replace(settings, json_schema=schema)
    return settings


def read_prompt() -> str | None:
    """Reads a prompt or command of one or more lines. Returns None at the end of stdin."""
    lines: list[str] = []
    block = False
    while True:
        try:
            line = input(("… " if lines or block else "> ") if sys.stdin.isatty() else "").removeprefix("\ufeff")
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:  # Ctrl-C discards the lines typed so far.
            terminal.write("\n")
            lines, block = [], False
            continue
        if not lines and not block and line.startswith(QUOTES):
            block, line = True, line.removeprefix(QUOTES)
            if not line:
                continue
        if block:
            end = line.endswith(QUOTES)
            lines.append(line.removesuffix(QUOTES) if end else line)
            if end:
                return "\n".join(lines)
        elif line.endswith("\\"):
            lines.append(line.removesuffix("\\"))
        else:
            return "\n".join([*lines, line])
