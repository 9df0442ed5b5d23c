"""A program that renders one chat template in jinja2's sandbox. `gpt.text.chat` runs it in a process of its own, since
a template comes with a model, and Python cannot stop a thread that computes for ever or asks for gigabytes.

The first line of stdin is ``{"template", "words", "seconds", "memory", "longest"}``, each further one ``{"messages",
"parts", "variables"}``. A part ``[n, answer]`` asks for the text of the first n messages; ``answer`` is
``add_generation_prompt``, and ``variables`` are further names that the template may read.
Each is answered by a line of stdout: ``{"texts", "spans"}``, where spans are the characters within ``{% generation %}``
of the last text, or ``{"error"}``. The process ends where an answer takes longer than ``seconds``.

Filters, functions and tags are those of transformers' `apply_chat_template`. Nothing of gpt is imported.
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
    """The tag ``{% generation %}``, which encloses what the assistant says, as transformers has it."""

    tags = {"generation"}  # noqa: RUF012
    length = 0  # of the text so far
    spans: list[tuple[int, int]]

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the tag and what it encloses."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Any) -> str:
        text: str = caller()
        self.spans.append((self.length, self.length + len(text)))
        return text


class _PublicNamespace(Namespace):
    """A ``namespace`` whose members cannot have the names by which Python finds its own."""

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


def _refuse(message: Any) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Renderer:
    """A template, compiled. ``words`` are the special tokens by their names, ``bos_token`` …"""

    def __init__(self, template: str, words: dict[str, str], longest: int) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
            "namespace": _PublicNamespace,
        }
        self.generation: Any = environment.extensions[_Generation.identifier]
        self.template, self.words, self.longest = environment.from_string(template), words, longest

    def render(self, messages: list[Any], answer: bool, variables: dict[str, Any]) -> str:
        """Returns the text of messages. The generation's ``spans`` are its own then."""
        pieces: list[str] = []
        self.generation.length, self.generation.spans = 0, []
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": answer}
        for piece in self.template.generate({**variables, **self.words, **given}):
            pieces.append(piece)
            self.generation.length += len(piece)
            if self.generation.length > self.longest:
                raise TemplateError(f"the text has more than {self.longest:,} characters")
        return "".join(pieces)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Returns the object that answers a line."""
        texts = [self.render(asked["messages"][:count], answer, asked["variables"]) for count, answer in asked["parts"]]
        return {"texts": texts, "spans": self.generation.spans}


def _said(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__


def serve(lines: IO[bytes], out: IO[bytes]) -> None:
    """Answers every line until there are no more."""
    given = json.loads(lines.readline())
    if sys.platform != "win32":
        import resource

        with contextlib.suppress(ValueError, OSError):  # macOS takes no such limit
            resource.setrlimit(resource.RLIMIT_AS, (given["memory"], given["memory"]))
    renderer: Renderer | None = None
    with open(os.devnull, "w") as nowhere:
        for line in lines:
            # A thread of C that needs no lock of Python's ends the process, whatever computes by then.
            faulthandler.dump_traceback_later(given["seconds"], exit=True, file=nowhere)
            try:
                renderer = renderer or Renderer(given["template"], given["words"], given["longest"])
                answer = renderer.answer(json.loads(line))
            except Exception as error:  # a template may raise anything
                answer = {"error": _said(error)}
            faulthandler.cancel_dump_traceback_later()
            out.write(json.dumps(answer).encode() + b"\n")
            out.flush()


if __name__ == "__main__":
    for name in {"SIGINT", "SIGTERM", "SIGHUP"} & {*dir(signal)}:
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # the process that asks ends this one
    serve(sys.stdin.buffer, sys.stdout.buffer)
