"""Renders one chat template in jinja2's sandbox. `gpt.chat.chat` runs this program in a separate process: a downloaded
template can loop forever or allocate gigabytes, and Python cannot stop a thread.

The first line of stdin is ``{"template", "words", "seconds", "memory", "longest"}``; each later line is a request
``{"messages", "parts", "variables"}``. A part ``[n, answer]`` requests the text of the first n messages, rendered with
``add_generation_prompt=answer``. ``variables`` are further template variables, such as ``tools``. The program answers
each request with a line: ``{"texts", "spans"}`` or ``{"error"}``. ``spans`` are the character ranges inside
``{% generation %}`` in the last text. A request that takes longer than ``seconds`` ends the process.

Filters, functions and tags match transformers' `apply_chat_template`. The program imports nothing from gpt.
"""

import contextlib
import datetime
import faulthandler
import json
import os
import signal
import sys
from typing import IO, Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class _Generation(Extension):
    """The tag ``{% generation %}`` of transformers, which encloses the assistant's text."""

    tags = {"generation"}  # noqa: RUF012
    length = 0
    spans: list[tuple[int, int]]

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the tag and its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_record_span"), [], [], body).set_lineno(line)

    def _record_span(self, caller: Any) -> str:
        text: str = caller()
        self.spans.append((self.length, self.length + len(text)))
        return text


class _PublicNamespace(Namespace):
    """A ``namespace`` that rejects member names with a leading underscore, such as Python's internal names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace has no member {name}")


def _raise_template_error(message: Any) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Renderer:
    """A compiled template. ``specials`` maps ``bos_token`` and other names to special tokens."""

    def __init__(self, template: str, specials: dict[str, str], max_length: int) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise_template_error,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
            "namespace": _PublicNamespace,
        }
        self.generation: Any = environment.extensions[_Generation.identifier]
        self.template, self.specials, self.max_length = environment.from_string(template), specials, max_length

    def render(self, messages: list[Any], answer: bool, variables: dict[str, Any]) -> str:
        """Returns the text of messages, and records the ``spans`` of the generation tag."""
        pieces: list[str] = []
        self.generation.length, self.generation.spans = 0, []
        arguments = {**self.specials, "messages": messages, "add_generation_prompt": answer}
        for piece in self.template.generate({"tools": None, "documents": None, **variables, **arguments}):
            pieces.append(piece)
            self.generation.length += len(piece)
            if self.generation.length > self.max_length:
                raise TemplateError(f"the text has more than {self.max_length:,} characters")
        return "".join(pieces)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request."""
        texts = [
            self.render(request["messages"][:count], answer, request["variables"]) for count, answer in request["parts"]
        ]
        return {"texts": texts, "spans": self.generation.spans}


def serve(lines: IO[bytes], out: IO[bytes]) -> None:
    """Answers all requests."""
    settings = json.loads(lines.readline())
    if sys.platform != "win32":
        import resource

        with contextlib.suppress(ValueError, OSError):  # macOS does not support this limit.
            resource.setrlimit(resource.RLIMIT_AS, (settings["memory"], settings["memory"]))
    renderer: Renderer | None = None
    with open(os.devnull, "w") as devnull:
        for line in lines:
            # A C thread that does not need the GIL ends the process after the time limit.
            faulthandler.dump_traceback_later(settings["seconds"], exit=True, file=devnull)
            try:
                renderer = renderer or Renderer(settings["template"], settings["words"], settings["longest"])
                answer = renderer.answer(json.loads(line))
            except Exception as error:  # Templates can raise any exception.
                answer = {"error": str(error)[:200] or type(error).__name__}
            faulthandler.cancel_dump_traceback_later()
            out.write(json.dumps(answer).encode() + b"\n")
            out.flush()


if __name__ == "__main__":
    for name in {"SIGINT", "SIGTERM", "SIGHUP"} & {*dir(signal)}:
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # Only the parent process ends this process.
    serve(sys.stdin.buffer, sys.stdout.buffer)
