"""Conversations → text, by the chat template of a tokenizer."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpt.errors import UserError
from gpt.text.tokenizer import Tokenizer

LONGEST = 2**20  # characters of a conversation
SECONDS = 5.0  # that a template may take


class _TooMuch(Exception):
    pass


def render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> str:
    """The text of a conversation, up to where the assistant answers. Raises `UserError` where there is no template, or
    it refuses the conversation."""
    template = tokenizer.chat_template
    if template is None:
        raise UserError(
            "this model has no chat template, which turns a conversation into text",
            "train one with gpt train --chat, put a chat_template.jinja into its folder, or ask /v1/completions",
        )
    outcome: list[str | BaseException] = []

    def work() -> None:
        try:
            outcome.append(_render(template, tokenizer, messages))
        except BaseException as error:
            outcome.append(error)

    # A template comes with a model and may loop: it gets a thread that nobody waits for any longer than this.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if not outcome:
        raise UserError(f"the chat template takes longer than {SECONDS:g} s")
    if isinstance(outcome[0], BaseException):
        error = outcome[0]
        said = "it makes too long a text" if isinstance(error, _TooMuch) else f"{error!s:.200}"
        raise UserError(f"the chat template refuses this conversation: {said}")
    return outcome[0]


def _render(template: str, tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    words = {id: word for word, id in tokenizer.all_specials.items()}
    pieces, length = [], 0
    stream = environment.from_string(template).generate(
        messages=[dict(message) for message in messages],
        add_generation_prompt=True,
        bos_token="" if tokenizer.bos is None else words.get(tokenizer.bos, ""),
        eos_token=tokenizer.eot_token,
    )
    for piece in stream:
        pieces.append(piece)
        length += len(piece)
        if length > LONGEST:
            raise _TooMuch
    return "".join(pieces)


def _refuse(message: Any) -> str:
    raise TemplateError(str(message))
