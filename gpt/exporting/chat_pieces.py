"""A chat template without Jinja, which a web page cannot run: the text before, between and after messages.

A prompt is ``system[0] + content + system[1]``, or ``no_system`` without a system message; then for each message
``user[0] + content + user[1]`` or ``assistant[0] + content + assistant[1]``, in turn; then ``answer``, which starts the
next answer. A template that prints today's date leaves its format in the pieces, between two characters.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from gpt.chat import chat
from gpt.chat.chat import Message
from gpt.system.errors import UserError
from gpt.tokenizers.tokenizer import CHAT_TEMPLATE, Tokenizer

_SYSTEM = "The zeroth content."
_TURNS = ["The first content.", "The second content.", "The third content."]
_SPACED = " \n spaces on both sides \n\n "
# Contents that templates could change: they remove white space and thoughts, skip empty messages and escape characters.
_ODD_CONTENTS = [_SPACED, "<think>\nA thought.\n</think>\n\nAn answer", "<b>\"It's\" & 'so'</b> {{ 1 }} é日本"]
_KEEP_DATES = "{% macro strftime_now(format) %}\ue000{{ format }}\ue001{% endmacro %}\n"
_DATE = re.compile("\ue000((?:%[ABYabdmy]|[^%\ue001])*)\ue001")  # The page knows these codes of strftime.


def find_pieces(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Returns the pieces of a tokenizer's chat template. Returns None if there is no template, or if the pieces don't
    give the same text in every test conversation. ``system`` is null if the template takes no system message.
    ``trims`` means that contents lose their white space at both ends."""
    if tokenizer.chat_template is None:
        return None
    template = (_KEEP_DATES + tokenizer.chat_template).encode()
    undated = replace(tokenizer, files={**tokenizer.files, CHAT_TEMPLATE: template})
    if (parts := _split(undated, _TURNS)) is None:
        return None
    no_system, before_answer, after_answer, answer = parts
    with_system = _split(undated, _TURNS, _SYSTEM)
    pieces = {
        "bos": "",
        "system": with_system and with_system[:2],
        "no_system": no_system,
        "user": ["", ""],  # The answers' pieces include the text around the messages between them.
        "assistant": [before_answer, after_answer],
        "answer": answer,
    }
    candidates = ({**pieces, "trims": trims} for trims in (False, True))
    return next((candidate for candidate in candidates if _is_equivalent(candidate, tokenizer)), None)


def _split(tokenizer: Tokenizer, turns: Sequence[str], system: str | None = None) -> list[str] | None:
    """Returns the text around the contents of a conversation. Returns None if the template rejects the conversation or
    drops a content."""
    text, parts = _render(tokenizer, _to_messages(turns, system)) or "", []
    for content in turns if system is None else [system, *turns]:
        part, found, text = text.partition(content)
        if not found:
            return None
        parts.append(part)
    return [*parts, text]


def _to_messages(turns: Sequence[str], system: str | None) -> list[Message]:
    roles = itertools.cycle(("user", "assistant"))
    messages: list[Message] = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _render(tokenizer: Tokenizer, messages: Sequence[Message]) -> str | None:
    try:
        text = chat.render(tokenizer, messages)
        text.encode()  # Fails for lone surrogates, which a page cannot contain.
        return text
    except (UserError, UnicodeEncodeError):
        return None


def _is_equivalent(pieces: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether pieces give the template's text in conversations of one to three questions, with odd contents."""
    systems = [None] if pieces["system"] is None else [None, _SYSTEM, _SPACED]
    conversations = [_TURNS[:1], _TURNS, [*_TURNS, *_TURNS[:2]]]
    conversations += [[question, answer, question] for question in _ODD_CONTENTS for answer in (*_ODD_CONTENTS, "")]
    return all(
        assemble(pieces, messages) == _render(tokenizer, messages)
        for messages in itertools.starmap(_to_messages, itertools.product(conversations, systems))
    )


def assemble(pieces: Mapping[str, Any], messages: Sequence[Message]) -> str:
    """Returns the text of a conversation, as the page assembles it."""
    fill_in = lambda match: datetime.now().strftime(match[1])
    pieces = json.loads(_DATE.sub(fill_in, json.dumps(pieces, ensure_ascii=False)))
    text = str(pieces["bos"])
    if messages[0]["role"] != "system":
        text += pieces["no_system"]
    for message in messages:
        before, after = pieces[message["role"]]
        text += before + (message["content"].strip() if pieces["trims"] else message["content"]) + after
    return text + str(pieces["answer"])
