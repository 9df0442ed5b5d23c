"""Conversations → text, by the chat template of a tokenizer; and ChatML, for a tokenizer that has none.

A template is a program of its model's maker. It is rendered in a process of its own (`gpt.text.template_process`),
whose time, memory and output are bounded.
"""

import functools
import importlib.util
import json
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt.errors import UserError, WorkError
from gpt.text.tokenizer import CHAT_TEMPLATE, Tokenizer
from gpt.text.tokenizer_files import SPECIAL_TOKENS, TOKENIZER_CONFIG, content, with_specials

LONGEST = 2**22  # characters of a conversation
SECONDS = 5.0  # that a template may take
MEMORY = 2**30  # bytes that it may have, with all of its process
START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    f"{{% for message in messages %}}{{{{ '{START}' + message['role'] + '\\n' + message['content'] + '{END}\\n' }}}}"
    f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{START}assistant\\n' }}}}{{% endif %}}"
)
_TAGGED = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = Mapping[str, str]  # its role and its content
Span = tuple[int, int]  # characters of a text, from and to


def render(tokenizer: Tokenizer, messages: Sequence[Message], lane: str = "") -> str:
    """Returns the text of a conversation, up to where the assistant answers. Each ``lane`` has a process of its own,
    for which others do not wait. Raises `UserError` where there is no template, or it refuses the conversation, takes
    too long or renders nothing."""
    text = _rendered(tokenizer, messages, [(len(messages), True)], lane)[0][0]
    if not text:
        raise UserError("the chat template renders nothing of this conversation", "take a model with another template")
    return text


def prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Returns the ids of `render`'s text, which are those of transformers' ``apply_chat_template``."""
    ids: list[int] = tokenizer.encode(render(tokenizer, messages), specials=True).tolist()
    return ids


def answers(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[str, list[Span], set[int]]:
    """Returns the text of a whole conversation, where in it each answer of the assistant's stands, its end of turn
    included, and the ids that end the turns.

    ``{% generation %}`` says where, if the template has it. Else each answer is what its message adds to the text
    before it, up to the first special token after its words. Raises `UserError` where the text before a message is
    not the beginning of the whole text, and where no special token ends an answer.
    """
    said = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    tagged = bool(_TAGGED.search(tokenizer.chat_template or ""))
    parts = [] if tagged else [part for n in said for part in ((n, True), (n + 1, False))]
    texts, spans = _rendered(tokenizer, messages, [*parts, (len(messages), False)])
    whole = texts.pop()
    words = tokenizer.all_specials
    specials = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))
    if not tagged:
        spans = []
        for number, before, after in zip(said, texts[::2], texts[1::2], strict=True):
            if not (whole.startswith(after) and after.startswith(before)):
                raise UserError(
                    "the chat template writes a message in another way once others follow it",
                    "give conversations with one answer each, or a template with {% generation %}",
                )
            spans.append((len(before), _end(after, len(before), messages[number]["content"].strip(), specials)))
    ends = [specials.findall(whole[start:end])[-1:] for start, end in spans]
    return whole, spans, {words[word] for found in ends for word in found}


def _end(text: str, start: int, said: str, specials: re.Pattern[str]) -> int:
    """Returns where the turn ends that begins at ``start``: after the first special token behind what was ``said``."""
    at = text.find(said, start)
    found = specials.search(text, max(at + len(said), start))
    if found is None:
        raise UserError(
            "the chat template ends an answer with no special token: a model would not learn to stop",
            "give a model or --tokenizer with another chat template",
        )
    return found.end()


def with_template(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a tokenizer with a chat template: itself, or with ChatML's and its special tokens, which are new ids
    where the tokenizer does not have them. The end of a turn ends a text."""
    if tokenizer.chat_template is not None:
        return tokenizer
    tokenizer = with_specials(tokenizer, [word for word in (START, END) if word not in tokenizer.all_specials])
    opening = "" if tokenizer.bos is None else "{{ bos_token }}"
    files = {**tokenizer.files, CHAT_TEMPLATE: (opening + CHATML).encode()}
    return replace(tokenizer, files=files, more_ends=tokenizer.ends - {tokenizer.eot} | {tokenizer.all_specials[END]})


def _rendered(
    tokenizer: Tokenizer, messages: Sequence[Message], parts: Sequence[tuple[int, bool]], lane: str = ""
) -> tuple[list[str], list[Span]]:
    """Returns the text of each part: of so many messages, with or without the beginning of an answer; and the spans of
    the last that the template marks."""
    if tokenizer.chat_template is None:
        raise UserError(
            "this model has no chat template, which turns a conversation into text",
            "train it with gpt train --chat, put a chat_template.jinja into its folder, or let it continue texts: "
            "gpt sample PROMPT, /v1/completions",
        )
    renderer = _renderer(tokenizer.chat_template, tuple(sorted(_words(tokenizer).items())), lane)
    answer = renderer.ask({"messages": [dict(message) for message in messages], "parts": parts})
    return answer["texts"], [(start, end) for start, end in answer["spans"]]


def _words(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the special tokens by the names that templates know them by, ``bos_token`` …"""
    by_id = {id: word for word, id in tokenizer.all_specials.items()}
    found = {"eos_token": tokenizer.eot_token}
    if tokenizer.bos is not None:
        found["bos_token"] = by_id.get(tokenizer.bos, "")
    for file in (SPECIAL_TOKENS, TOKENIZER_CONFIG):
        for name, value in json.loads(tokenizer.files.get(file, b"{}")).items():
            if name.endswith("_token") and (word := content(value)):
                found[name] = word
    if not tokenizer.keeps_files:  # as the configuration has it that is written for a vocabulary of ours
        found |= dict.fromkeys(("bos_token", "unk_token"), tokenizer.eot_token)
    return found


class _Renderer:
    """A process that renders a template, begun when it is first asked, and again after it was ended."""

    def __init__(self, template: str, words: Mapping[str, str]) -> None:
        self._given = {
            "template": template, "words": words, "seconds": SECONDS, "memory": MEMORY, "longest": LONGEST,
        }  # fmt: skip
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a line. Raises `UserError` where the template refuses, or is ended."""
        with self._lock:
            process, whole = self._process, False
            if process is None or process.poll() is not None:
                process = self._begin()
            try:
                line = self._say(process, asked)
                whole = line.endswith(b"\n")
            finally:
                if not whole:  # also where the wait was interrupted: no later question may get this answer
                    self._process = None
                    _end_process(process)
        if not whole:
            raise UserError(f"the chat template takes longer than {SECONDS:g} s, or more than {MEMORY >> 20:,} MiB")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise UserError(f"the chat template refuses this conversation: {answer['error']}")
        return answer

    def _begin(self) -> "subprocess.Popen[bytes]":
        if importlib.util.find_spec("jinja2") is None:
            raise WorkError("a chat template needs the package jinja2", "pip install 'gpt[serve]'")
        program = str(Path(__file__).with_name("template_process.py"))
        pipe = subprocess.PIPE
        # Without -P a module of Python's own would be looked for beside the program first.
        process = subprocess.Popen([sys.executable, "-P", program], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._process = process
        weakref.finalize(self, _end_process, process)
        self._say(process, self._given, answers=False)
        return process

    @staticmethod
    def _say(process: "subprocess.Popen[bytes]", values: Mapping[str, Any], answers: bool = True) -> bytes:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(values).encode() + b"\n")
            process.stdin.flush()
            return process.stdout.readline() if answers else b""
        except OSError:  # it has ended
            return b""


def _end_process(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


@functools.lru_cache(maxsize=8)
def _renderer(template: str, words: tuple[tuple[str, str], ...], lane: str) -> _Renderer:
    return _Renderer(template, dict(words))
