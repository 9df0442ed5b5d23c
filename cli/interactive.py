"""The interactive mode of ``gpt chat`` and ``gpt sample -i``."""

import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.errors import UserError, check_text, did_you_mean
from gpt.files import user_folder
from gpt.sample_config import SampleConfig

from . import progress, render

if TYPE_CHECKING:
    from gpt.api import LanguageModel

PLAIN_HELP = """\
TEXT             continues the text; end a line with \\ to continue on the next, or put \"\"\" before and after
/retry           generates another text from the same prompt
/more            continues the text where it ended
"""
CHAT_HELP = """\
TEXT             sends a message; end a line with \\ to continue on the next, or put \"\"\" before and after
/retry           generates another answer
/more            continues the answer where it ended
/system TEXT     sets the system message; without TEXT, removes it
/clear           starts a new conversation
"""
HELP = """\
/set             lists the settings; /set NAME VALUE changes one: /set temperature 0.7
/model PATH      loads another model
/help  /quit     shows this help; exits, as Ctrl-D does. Ctrl-C stops a text. Type // to start a prompt with /"""
QUOTES = '"""'
HISTORY_LINES = 1000


class Interaction:
    """Reads prompts and commands until the input ends. With a chat template, prompts form a conversation. Otherwise the
    model continues each prompt."""

    def __init__(
        self, loaded: "LanguageModel", load: Callable[[str], "LanguageModel"], settings: SampleConfig, seed: int
    ) -> None:
        self.loaded, self.load, self.settings, self.seed = loaded, load, settings, seed
        self.messages: list[dict[str, str]] = []  # The conversation without the system message.
        self.system = ""
        self.index = 0  # Index of the current sample for this prompt.
        self.commands: dict[str, Callable[[str], object]] = {
            "/retry": self._retry, "/more": self._continue_answer, "/system": self._set_system,
            "/clear": self._clear_messages, "/set": self._change_setting, "/model": self._change_model,
            "/help": self._print_help,
            **dict.fromkeys(("/quit", "/exit", "/bye"), lambda _: sys.exit(0)),
        }  # fmt: skip

    @property
    def is_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self.loaded.tokenizer.chat_template is not None

    def run(self) -> None:
        """Reads and handles lines until stdin ends. Raises `UserError` if there is no stdin."""
        if sys.stdin is None:
            raise UserError("there is no standard input to read", "gpt sample PROMPT needs none")
        with contextlib.suppress(AttributeError, ValueError):
            sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        if sys.stdin.isatty():
            what = "messages" if self.is_chat else "prompts"
            render.note(f"enter {what}; /help lists commands, Ctrl-D exits")
        with _readline_history():
            while (words := read_prompt()) is not None:
                try:
                    self.handle(words)
                except UserError as error:
                    render.error(error.message, error.hint)
                except KeyboardInterrupt:
                    continue  # Ctrl-C only stops the current text.

    def handle(self, words: str) -> None:
        """Runs a command, continues a prompt or answers a message. Raises `UserError`."""
        check_text("the line", words)
        if not words.startswith("/") or words.startswith("//"):
            content = words.removeprefix("/") if words.startswith("//") else words
            if not self.is_chat:
                self.messages = []
            self.messages.append({"role": "user", "content": content})
            self.index = 0
            self._answer()
            return
        name, _, rest = words.partition(" ")
        if name not in self.commands:
            raise UserError(f"there is no command {name}", did_you_mean(name, self.commands) or "/help lists them")
        self.commands[name](rest.strip())

    def _retry(self, _: str) -> None:
        if not self.messages:
            raise UserError("there is no prompt yet", "enter one")
        if self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        self.index += 1
        self._answer()

    def _continue_answer(self, _: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UserError("there is no text yet", "enter a prompt")
        self._answer(more=True)

    def _answer(self, more: bool = False) -> None:
        """Answers the last message or, with ``more``, extends the answer. Drops a message that the chat template
        rejects."""
        previous = self.messages.pop()["content"] if more else ""
        try:
            prompt = self._chat_prompt() if self.is_chat else self.messages[-1]["content"]
        except UserError:
            self.messages.pop()
            raise
        if isinstance(prompt, str):
            render.write("" if more else prompt)
            prompt += previous
        else:
            prompt += self.loaded.tokenizer.encode(previous, continues=True).tolist()
        answer = {"role": "assistant", "content": previous}
        self.messages.append(answer)
        writing = self.loaded.write(prompt, self.settings, self.seed, self.index)
        try:
            for piece in writing:
                render.write(piece)
                answer["content"] += piece
        finally:
            render.write("\n")
        overflow = render.Overflow()
        overflow.add(writing.sample)
        render.context_notes(overflow, self.loaded.model.config.block_size)

    def _chat_prompt(self) -> list[int]:
        """Returns the conversation's ids. Drops the oldest turns to make room for an answer of ``max_tokens`` or of a
        quarter of the context, whichever is shorter."""
        from gpt.text import chat

        size = self.loaded.model.config.block_size
        max_prompt = size - min(self.settings.max_tokens, size // 4)
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = self.messages
        while True:
            ids = chat.prompt(self.loaded.tokenizer, [*system, *messages])
            later_turns = [at for at, message in enumerate(messages) if at and message["role"] == "user"]
            if len(ids) <= max_prompt or not later_turns:
                break
            messages = messages[later_turns[0] :]
        if dropped := len(self.messages) - len(messages):
            render.note(f"the context of {size:,} tokens is full: the first {dropped:,} messages were dropped")
            self.messages = messages
        return ids

    def _set_system(self, text: str) -> None:
        self._require_chat("/system")
        self.system = text

    def _clear_messages(self, _: str) -> None:
        self._require_chat("/clear")
        self.messages = []

    def _require_chat(self, command: str) -> None:
        if not self.is_chat:
            raise UserError(
                f"{command} needs a chat template, which {self.loaded.path} does not have",
                "a model trained with gpt train --chat has one",
            )

    def _print_help(self, _: str) -> None:
        render.write((CHAT_HELP if self.is_chat else PLAIN_HELP) + HELP + "\n")

    def _change_setting(self, words: str) -> None:
        name, value = (*re.split(r"[\s=]+", words, maxsplit=1), "")[:2]
        if not name:
            for field in dataclasses.fields(self.settings):
                setting = getattr(self.settings, field.name)
                setting = {True: "on", False: "off"}.get(setting, setting) if isinstance(setting, bool) else setting
                render.write(f"{field.name.replace('_', '-')} {setting}\n")
            return
        self.settings = self.settings.changed(name.replace("_", "-"), value.strip())

    def _change_model(self, path: str) -> None:
        if not path:
            render.write(f"{self.loaded.path}\n")
            return
        self.loaded = self.load(path)


def converse(
    settings: SampleConfig,
    model: str | None,
    base: str | None,
    seed: int | None,
    device: str,
    dtype: str,
    threads: int | None,
) -> None:
    """Loads a model and runs an `Interaction` with it."""
    with progress.startup_spinner(quiet=False):
        from gpt import api
    load = functools.partial(api.load, device=device, dtype=dtype, threads=threads, note=render.note, sampling=settings)
    loaded = load(model, base=base)
    Interaction(loaded, load, settings, render.draw_seed(announce=settings.draws) if seed is None else seed).run()


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
            render.write("\n")
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


@contextlib.contextmanager
def _readline_history() -> Iterator[None]:
    try:
        import readline
    except ImportError:  # Windows
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    with contextlib.suppress(OSError, UserError):  # The history file is optional.
        readline.read_history_file(_history_path())
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, UserError):
            readline.write_history_file(_history_path())


def _history_path() -> Path:
    folder = user_folder("state")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "history"
