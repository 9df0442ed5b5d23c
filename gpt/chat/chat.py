"""Renders conversations as text with a tokenizer's chat template, or ChatML.

A template is a program written by the model's author, so it runs in a separate process
(`gpt.chat.template_process`) with limits on time, memory and output.
"""

import functools
import json
import re
import subprocess
import threading
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt.decoding.context import count_common
from gpt.system.child import end_program, start_program
from gpt.system.errors import UserError
from gpt.tokenizers.importing import content
from gpt.tokenizers.saving import SPECIAL_TOKENS, TOKENIZER_CONFIG, TOKENIZER_JSON, add_specials
from gpt.tokenizers.tokenizer import CHAT_TEMPLATE, Tokenizer

PROGRAM = Path(__file__).with_name("template_process.py")
MAX_CHARACTERS = 2**22  # Maximum characters of a rendered conversation.
TIME_LIMIT = 5.0  # Seconds per request to the template process.
MEMORY_LIMIT = 2**30  # Bytes for the whole template process.
START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    f"{{% for message in messages %}}{{{{ '{START}' + message['role'] + '\\n' + message['content'] + '{END}\\n' }}}}"
    f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{START}assistant\\n' }}}}{{% endif %}}"
)
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
Message = Mapping[str, Any]  # Role, content and other keys that templates read.
Variables = Mapping[str, Any]  # Further variables of a template, such as ``tools``.
NO_VARIABLES: Variables = types.MappingProxyType({})
Span = tuple[int, int]  # Start and end, in characters.


def reasoning(message: Message) -> dict[str, str]:
    """Returns a message's reasoning, if any, under both names that chat templates read."""
    reasoning_text = next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), None)
    return {} if reasoning_text is None else dict.fromkeys(REASONING_KEYS[:2], reasoning_text)


def read_call(call: Any) -> dict[str, Any] | None:
    """Returns a tool call with its arguments as an object, which chat templates read, or None if it is invalid."""
    function = call.get("function") if isinstance(call, dict) else None
    name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
    try:
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (ValueError, RecursionError):
        arguments = None
    is_valid = isinstance(name, str) and isinstance(arguments, dict)
    return {**call, "function": {"name": name, "arguments": arguments}} if is_valid else None


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    answer: bool = True,
    open_end: bool = False,
    variables: Variables = NO_VARIABLES,
) -> str:
    """Returns the text of a conversation, like Transformers' ``apply_chat_template``.

    ``answer`` adds the start of an answer (``add_generation_prompt``). ``open_end`` stops after the last message's
    content (``continue_final_message``). The template can read ``variables``. Only one call runs at a time. Raises
    `UserError` if the template is missing, rejects the conversation, takes too long or renders nothing.
    """
    if open_end:
        *earlier, last = messages
        messages = [*earlier, {**last, "content": last["content"] + _CONTINUE_TAG}]
    text = _render_parts(tokenizer, messages, [(len(messages), answer)], variables)[0][0]
    if open_end:
        text = _cut_at_tag(text, last["content"])
    if not text:
        raise UserError("the chat template renders this conversation as nothing", "use a model with another template")
    return text


# Transformers' tag for ``continue_final_message``. The trailing space shows whether the template trims messages.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def _cut_at_tag(text: str, content: str) -> str:
    """Returns the text before the tag. If the template trimmed the tag, removes trailing white space as well."""
    position = text.rfind(_CONTINUE_TAG.strip())
    if position < 0 or content.strip() not in text:
        raise UserError("the chat template drops the last message, which cannot be continued")
    return text[:position] if text.startswith(_CONTINUE_TAG, position) else text[:position].rstrip()


def answers(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    context: Collection[int] = (),
    variables: Variables = NO_VARIABLES,
) -> tuple[list[tuple[str, list[Span]]], set[int]]:
    """Returns a conversation's training texts with the spans of their answers (end-of-turn tokens included), and the
    ids that end turns. Excludes answers whose message index is in ``context``.

    One text is enough if ``{% generation %}`` marks the answers, or if every message only appends to the text. A mark
    that ends before the end-of-turn token is extended, because a model must learn to stop.
    Otherwise each answer needs its own text. For example, with Qwen3 and DeepSeek-R1 an answer does not continue the
    generation prompt, or changes when later messages follow. Raises `UserError` if an answer has no end-of-turn token,
    or changes earlier messages.
    """
    specials = tokenizer.special_pattern()
    if _GENERATION_TAG.search(tokenizer.chat_template or ""):
        (text,), spans = _render_parts(tokenizer, messages, [(len(messages), False)], variables)
        spans = [_with_end(text, *span, specials) for span in spans]
        rows = [(text, _select_spans(messages, context, spans))]
    else:
        rows = _find_answers(tokenizer, messages, context, variables)
    ends = [specials.findall(text[start:end])[-1:] for text, spans in rows for start, end in spans]
    return rows, {tokenizer.all_specials[word] for matches in ends for word in matches}


def _with_end(text: str, start: int, end: int, specials: re.Pattern[str]) -> Span:
    """Returns the span of an answer, extended by the special token after it unless the answer ends with one."""
    last_end = max((match.end() for match in specials.finditer(text, start, end)), default=start)
    if last_end > start and not text[last_end:end].strip():
        return start, end
    following = specials.search(text, end)
    if following is None or text[end : following.start()].strip():
        raise _no_end_error()
    return start, following.end()


def _select_spans(messages: Sequence[Message], context: Collection[int], spans: list[Span]) -> list[Span]:
    """Returns the spans marked by the template, except answers in ``context``."""
    indices = _assistant_indices(messages)
    if context and len(spans) != len(indices):
        raise UserError(
            "the chat template does not mark one text per answer, so no answer can be left out",
            'use a model or --tokenizer with another chat template, or answers without "weight": 0',
        )
    return [span for index, span in zip(indices, spans, strict=True) if index not in context] if context else spans


def _assistant_indices(messages: Sequence[Message]) -> list[int]:
    """Returns the indices of the assistant messages."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _find_answers(
    tokenizer: Tokenizer, messages: Sequence[Message], context: Collection[int], variables: Variables
) -> list[tuple[str, list[Span]]]:
    indices = [index for index in _assistant_indices(messages) if index not in context]
    parts = [part for index in indices for part in ((index or 1, True), (index + 1, False))]
    texts, _ = _render_parts(tokenizer, messages, [*parts, (len(messages), False)], variables)
    full_text, prompts, texts_after = texts[-1], texts[:-1:2], texts[1:-1:2]
    if indices[0] == 0:  # Many templates reject an empty conversation.
        tagged_message = {**messages[0], "content": _CONTINUE_TAG}
        (tagged_text,), _ = _render_parts(tokenizer, [tagged_message], [(1, False)], variables)
        prompts[0] = tagged_text[: max(0, tagged_text.find(_CONTINUE_TAG.strip()))]
    # Calls follow the content, so an answer with calls ends with the last special token.
    contents = ["" if "tool_calls" in messages[index] else messages[index]["content"] for index in indices]
    starts, specials = [len(prompt) for prompt in prompts], tokenizer.special_pattern()
    continues_prompts = all(map(str.startswith, texts_after, prompts))
    if not continues_prompts:
        texts_before, _ = _render_parts(tokenizer, messages, [(index or 1, False) for index in indices], variables)
        texts_before[0] = texts_before[0] if indices[0] else ""
        starts = [
            _find_start(*answer, specials) for answer in zip(texts_before, prompts, texts_after, contents, strict=True)
        ]
    ends = [_find_end(*answer, specials) for answer in zip(texts_after, starts, contents, strict=True)]
    rows = [(after, [(start, end)]) for after, start, end in zip(texts_after, starts, ends, strict=True)]
    if continues_prompts and all(full_text.startswith(after[: span[1]]) for after, (span,) in rows):
        return [(full_text, [span for _, (span,) in rows])]
    return rows


def _find_start(before: str, prompt: str, after: str, content: str, specials: re.Pattern[str]) -> int:
    """Returns the start of an answer in ``after``: the first difference from ``prompt``. If this position is inside the
    answer's content or end token, returns the start of the content or token."""
    start = count_common(prompt, after)
    if start < len(before):
        raise UserError(
            "the chat template changes earlier messages when an answer is added",
            "use a model or --tokenizer with another chat template, or one with {% generation %}",
        )
    if start < len(prompt):
        positions = (after.rfind(string, len(before), start + len(string)) for string in _search_strings(content))
        start = next((position for position in positions if position >= 0), start)
    ends = (match.span() for match in specials.finditer(after, len(before)))
    return next((token_start for token_start, token_end in ends if token_start < start < token_end), start)


def _find_end(text: str, start: int, content: str, specials: re.Pattern[str]) -> int:
    """Returns the end of a text's last answer: after the first special token that follows the content, or after the
    last special token if the template changed the content."""
    positions = ((text.find(string, start), string) for string in _search_strings(content))
    content_end = next((position + len(string) for position, string in positions if position >= 0), None)
    ends = [match.end() for match in specials.finditer(text, start if content_end is None else content_end)]
    if not ends:
        raise _no_end_error()
    return ends[-1 if content_end is None else 0]


def _no_end_error() -> UserError:
    return UserError(
        "the chat template does not end an answer with a special token, so a model would not learn to stop",
        "use a model or --tokenizer with another chat template",
    )


def _search_strings(content: str) -> list[str]:
    """Returns the forms that ``content`` can have in a rendered text: templates remove white space and reasoning."""
    strings = [content.rstrip(), content.rpartition("</think>")[2].rstrip()]
    return [string for string in [*strings, *map(str.lstrip, strings)] if string]


def with_template(tokenizer: Tokenizer) -> Tokenizer:
    """Adds ChatML and its special tokens to a tokenizer without a chat template. The end-of-turn token then ends a
    text."""
    if tokenizer.chat_template is not None:
        return tokenizer
    tokenizer = add_specials(tokenizer, [word for word in (START, END) if word not in tokenizer.all_specials])
    opening = "" if tokenizer.bos is None else "{{ bos_token }}"
    files = {**tokenizer.files, CHAT_TEMPLATE: (opening + CHATML).encode()}
    return replace(tokenizer, files=files, more_ends=tokenizer.ends - {tokenizer.eot} | {tokenizer.all_specials[END]})


def _render_parts(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    parts: Sequence[tuple[int, bool]],
    variables: Variables,
) -> tuple[list[str], list[Span]]:
    """Returns the text of each part, and the spans of the last text. A part is the number of messages to render, and
    whether to start an answer after them."""
    if tokenizer.chat_template is None:
        raise UserError(
            "this model has no chat template, which turns a conversation into text",
            "train it with gpt train --chat, put a chat_template.jinja into its folder, or use it without chat: "
            "gpt sample PROMPT, /v1/completions",
        )
    has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    if has_calls and "tool_calls" not in tokenizer.chat_template:
        raise UserError(
            "the chat template cannot write tool calls", "use a model or --tokenizer with another chat template"
        )
    renderer = _get_renderer(tokenizer.chat_template, tuple(sorted(special_words(tokenizer).items())))
    # "developer" is OpenAI's name for the system role. Most models never saw it in training.
    role_names = {} if "developer" in tokenizer.chat_template else {"developer": "system"}
    renamed_messages = [{**message, "role": role_names.get(message["role"], message["role"])} for message in messages]
    reply = renderer.ask({"messages": renamed_messages, "parts": parts, "variables": dict(variables)})
    return reply["texts"], [(start, end) for start, end in reply["spans"]]


def special_words(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the special tokens by their names in templates, such as ``bos_token``."""
    by_id = {id: word for word, id in tokenizer.all_specials.items()}
    words = {"eos_token": tokenizer.eot_token}
    if tokenizer.bos is not None:
        words["bos_token"] = by_id.get(tokenizer.bos, "")
    for file in (SPECIAL_TOKENS, TOKENIZER_CONFIG):
        for name, value in json.loads(tokenizer.files.get(file, b"{}")).items():
            if name.endswith("_token") and (word := content(value)):
                words[name] = word
    if TOKENIZER_JSON not in tokenizer.files:  # Same values as in the tokenizer_config.json that gpt writes.
        words |= dict.fromkeys(("bos_token", "unk_token"), tokenizer.eot_token)
    return words


class _Renderer:
    """A process that renders a template. Starts on the first request, and restarts if it was killed."""

    def __init__(self, template: str, words: Mapping[str, str]) -> None:
        self._setup = {
            "template": template, "words": words, "seconds": TIME_LIMIT, "memory": MEMORY_LIMIT,
            "longest": MAX_CHARACTERS,
        }  # fmt: skip
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the reply to a request. Raises `UserError` if the template fails or exceeds a limit."""
        with self._lock:
            process, is_complete = self._process, False
            if process is None or process.poll() is not None:
                process = self._process = start_program(PROGRAM, self._setup, self)
            try:
                line = self._send(process, request)
                is_complete = line.endswith(b"\n")
            finally:
                if not is_complete:  # The next request would read the rest of this reply.
                    self._process = None
                    end_program(process)
        if not is_complete:
            raise UserError(
                f"the chat template takes longer than {TIME_LIMIT:g} s, or more than {MEMORY_LIMIT >> 20:,} MiB"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise UserError(f"the chat template rejects this conversation: {reply['error']}")
        return reply

    @staticmethod
    def _send(process: "subprocess.Popen[bytes]", values: Mapping[str, Any]) -> bytes:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(values).encode() + b"\n")
            process.stdin.flush()
            return process.stdout.readline()
        except OSError:  # The process has ended.
            return b""


@functools.lru_cache(maxsize=8)  # Several models take turns. Evicting a renderer ends its process.
def _get_renderer(template: str, words: tuple[tuple[str, str], ...]) -> _Renderer:
    return _Renderer(template, dict(words))
