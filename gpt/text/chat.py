"""Conversations → text, by the chat template of a tokenizer; and ChatML, for a tokenizer that has none.

A template is a program of its model's maker. It is rendered in a process of its own (`gpt.text.template_process`),
whose time, memory and output are bounded.
"""

import functools
import json
import re
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt.errors import UserError
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


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    answer: bool = True,
    open_end: bool = False,
    variables: Mapping[str, Any] = types.MappingProxyType({}),
) -> str:
    """Returns the text of a conversation, as transformers' ``apply_chat_template`` does: with the beginning of an
    ``answer`` (``add_generation_prompt``), or with an ``open_end`` (``continue_final_message``): up to the last word of
    the last message. The template may read the ``variables``. Threads take turns. Raises `UserError` if there is no
    template, or if it refuses the conversation, takes too long or renders nothing."""
    if open_end:
        *earlier, last = messages
        messages = [*earlier, {**last, "content": last["content"] + _TAG}]
    text = _rendered(tokenizer, messages, [(len(messages), answer)], variables)[0][0]
    if open_end:
        text = _until_tag(text, last["content"])
    if not text:
        raise UserError("the chat template renders this conversation as nothing", "use a model with another template")
    return text


_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own, whose last space shows whether the template trims messages


def _until_tag(text: str, content: str) -> str:
    """Returns a conversation's text up to the tag after its last message. A template that trims messages has removed
    the tag's space, and would have removed those before it."""
    at = text.rfind(_TAG.strip())
    if at < 0 or content.strip() not in text:
        raise UserError("the chat template drops the last message, which cannot be continued")
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()


def prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Returns the ids of `render`'s text, which are those of transformers' ``apply_chat_template``."""
    ids: list[int] = tokenizer.encode(render(tokenizer, messages), specials=True).tolist()
    return ids


def answers(
    tokenizer: Tokenizer, messages: Sequence[Message], context: Collection[int] = ()
) -> tuple[list[tuple[str, list[Span]]], set[int]]:
    """Returns the texts from which a conversation's answers are learned, each with the spans of its answers, ends of
    turns included; and the ids that end turns. The messages of the numbers in ``context`` are not learned.

    It is one text where ``{% generation %}`` marks the answers, or where each adds to the text before it. A template
    that writes a message in another way once others follow it, or begins an answer in another way than it writes it
    (Qwen3's, DeepSeek-R1's), gives one text per answer: that of the conversation up to it. An answer ends at the first
    special token after its words. Raises `UserError` where no special token does, or the answer is not to be found.
    """
    if _TAGGED.search(tokenizer.chat_template or ""):
        texts, spans = _rendered(tokenizer, messages, [(len(messages), False)])
        rows = [(texts[0], _learned(messages, context, spans))]
    else:
        rows = _untagged(tokenizer, messages, context)
    words = tokenizer.all_specials
    ends = [_specials(tokenizer).findall(text[start:end])[-1:] for text, spans in rows for start, end in spans]
    return rows, {words[word] for found in ends for word in found}


def _learned(messages: Sequence[Message], context: Collection[int], spans: list[Span]) -> list[Span]:
    """Returns the spans of the answers that are learned, of those that a template marks."""
    said = _said(messages)
    if context and len(spans) != len(said):
        raise UserError(
            "the chat template does not mark one text per answer, so no answer can be left out",
            'use a model or --tokenizer with another chat template, or answers without "weight": 0',
        )
    return [span for number, span in zip(said, spans, strict=True) if number not in context] if context else spans


def _said(messages: Sequence[Message]) -> list[int]:
    """Returns the numbers of the assistant's messages."""
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def _untagged(
    tokenizer: Tokenizer, messages: Sequence[Message], context: Collection[int]
) -> list[tuple[str, list[Span]]]:
    said = [number for number in _said(messages) if number not in context]
    parts = [part for n in said for part in ((n or 1, True), (n + 1, False))]
    texts, _ = _rendered(tokenizer, messages, [*parts, (len(messages), False)])
    whole, prompts, afters = texts[-1], texts[:-1:2], texts[1:-1:2]
    if said[0] == 0:  # many templates fail on a conversation without messages
        (marked,), _ = _rendered(tokenizer, [{**messages[0], "content": _TAG}], [(1, False)])
        prompts[0] = marked[: max(0, marked.find(_TAG.strip()))]
    contents = [messages[n]["content"] for n in said]
    grows = all(
        whole.startswith(after) and after.startswith(prompt) for prompt, after in zip(prompts, afters, strict=True)
    )
    starts, specials = [len(prompt) for prompt in prompts], _specials(tokenizer)
    if not grows:
        befores, _ = _rendered(tokenizer, messages, [(n or 1, False) for n in said])
        befores[0] = befores[0] if said[0] else ""
        starts = [_start(*each, specials) for each in zip(befores, prompts, afters, contents, strict=True)]
    spans = [
        (start, _end(after, start, content, specials))
        for start, after, content in zip(starts, afters, contents, strict=True)
    ]
    return [(whole, spans)] if grows else [(after, [span]) for after, span in zip(afters, spans, strict=True)]


def _specials(tokenizer: Tokenizer) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokenizer.all_specials, key=len, reverse=True))))


def _start(before: str, prompt: str, after: str, content: str, specials: re.Pattern[str]) -> int:
    """Returns where an answer begins in the text ``after`` it: where that differs from the ``prompt`` for it, but not
    within its words or its end, which may begin as the rest of the prompt does."""
    start = next((at for at, (one, other) in enumerate(zip(prompt, after, strict=False)) if one != other), len(prompt))
    if start < len(before):
        raise UserError(
            "the chat template changes earlier messages when an answer is added",
            "use a model or --tokenizer with another chat template, or one with {% generation %}",
        )
    if start < len(prompt):
        places = (after.rfind(words, len(before), start + len(words)) for words in _words_of(content))
        start = next((place for place in places if place >= 0), start)
    ends = (found.span() for found in specials.finditer(after, len(before)))
    return next((begin for begin, end in ends if begin < start < end), start)


def _end(text: str, start: int, content: str, specials: re.Pattern[str]) -> int:
    """Returns where the last answer of a text ends: after the first special token behind its words, or after the last
    one where the template has changed these."""
    places = ((text.find(words, start), words) for words in _words_of(content))
    behind = next((at + len(words) for at, words in places if at >= 0), None)
    ends = [found.end() for found in specials.finditer(text, start if behind is None else behind)]
    if not ends:
        raise UserError(
            "the chat template does not end an answer with a special token, so a model would not learn to stop",
            "use a model or --tokenizer with another chat template",
        )
    return ends[-1 if behind is None else 0]


def _words_of(content: str) -> list[str]:
    """Returns the words by which an answer is found, without the white space and the thoughts that a template may
    remove."""
    words = [content.rstrip(), content.rpartition("</think>")[2].rstrip()]
    return [each for each in [*words, *map(str.lstrip, words)] if each]


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
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    parts: Sequence[tuple[int, bool]],
    variables: Mapping[str, Any] = types.MappingProxyType({}),
) -> tuple[list[str], list[Span]]:
    """Returns the text of each part: of so many messages, with or without the beginning of an answer; and the spans of
    the last that the template marks."""
    if tokenizer.chat_template is None:
        raise UserError(
            "this model has no chat template, which turns a conversation into text",
            "train it with gpt train --chat, put a chat_template.jinja into its folder, or use it without chat: "
            "gpt sample PROMPT, /v1/completions",
        )
    renderer = _renderer(tokenizer.chat_template, tuple(sorted(_words(tokenizer).items())))
    # OpenAI's name for the system role, which most templates render as a role that the model has never seen.
    renamed = {} if "developer" in tokenizer.chat_template else {"developer": "system"}
    given = [{**message, "role": renamed.get(message["role"], message["role"])} for message in messages]
    asked = {"messages": given, "parts": parts, "variables": dict(variables)}
    answer = renderer.ask(asked)
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
            raise UserError(f"the chat template rejects this conversation: {answer['error']}")
        return answer

    def _begin(self) -> "subprocess.Popen[bytes]":
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


@functools.lru_cache(maxsize=1)  # another template ends the process of the one before
def _renderer(template: str, words: tuple[tuple[str, str], ...]) -> _Renderer:
    return _Renderer(template, dict(words))
