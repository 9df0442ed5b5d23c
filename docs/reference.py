"""Writes docs/reference.md: every command and option, from the commands themselves.

python docs/reference.py; a test checks that the page is what this writes
"""

import dataclasses
import html
import inspect
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
from gpt_cli.main import make_app

from gpt.config import TrainConfig

PAGE = Path(__file__).parent / "reference.md"
HEAD = """\
# Reference

Every command with all its options. Written by `python docs/reference.py` from the commands themselves;
`gpt COMMAND --help` says the same in a terminal.

- Each option has a **variable**, which an option on the command line beats.
- The settings of `gpt train` also have a **key** for `--config FILE.toml`, which a variable beats.
  `gpt train --print-config` prints them all, as `--config` takes them.
- Results go to stdout; progress, notes and errors to stderr. With `--json` stdout has JSON alone, an object a line.
- Exit status: 0 done; 1 the work failed; 2 the input was wrong; 130, 143 or 129 stopped by SIGINT, SIGTERM or SIGHUP,
  after saving.
- `--debug`, also as `GPT_DEBUG=1`, shows where an error came from.
- `gpt --version` prints the version; `gpt --install-completion` has your shell complete commands, options and values.

## Commands
"""
KINDS = {"int": "N", "float": "X", "str": "WORD", "path": "PATH", "list[str]": "WORD, repeatable"}


def page() -> str:
    """Returns the whole page."""
    root: Any = typer.main.get_command(make_app())
    context = root.make_context("gpt", [], resilient_parsing=True)
    found = list(commands(root, context))
    listed = [f"- [`{name}`](#{name.replace(' ', '-')}): {_summary(command)}" for name, command, _ in found]
    return "\n".join([HEAD, *listed, "", *(_section(*each) for each in found)])


def commands(group: Any, context: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields each command that is no group and is not hidden: its words, the command, and its context."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        own = command.make_context(name, [], parent=context, resilient_parsing=True)
        if hasattr(command, "commands"):
            yield from commands(command, own)
        else:
            yield own.command_path, command, own


def _summary(command: Any) -> str:
    return _text(" ".join(inspect.cleandoc(command.help).split())).split(". ")[0].rstrip(".")


def _section(name: str, command: Any, context: Any) -> str:
    parameters = [each for each in command.get_params(context) if each.name != "help" and not each.hidden]
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = [each for each in parameters if each.param_type_name == "option"]
    words = " ".join([name, "[OPTIONS]" if options else "", *map(_argument, arguments)])
    lines = [f"## {name}", "", f"    {' '.join(words.split())}", "", _text(" ".join(command.help.split())), ""]
    if arguments:
        rows = [(f"`{_argument(each)}`", _described(each, context)[0]) for each in arguments]
        lines += [*_table(("argument", "what it is"), rows), ""]
    keys = {field.name for field in dataclasses.fields(TrainConfig)} if name == "gpt train" else set()
    for panel, some in groupby(_in_panels(options), key=_panel):
        lines += [f"**{panel}**", ""]
        titles = ("option", "what it does", "default", "variable", *(["key"] if keys else []))
        lines += [*_table(titles, [_row(each, context, keys) for each in some]), ""]
    return "\n".join(lines)


def _panel(parameter: Any) -> str:
    return parameter.rich_help_panel or "Options"


def _in_panels(options: list[Any]) -> list[Any]:
    """Groups options by panel; panels come in the order of their first option."""
    order = list(dict.fromkeys(map(_panel, options)))
    return sorted(options, key=lambda each: order.index(_panel(each)))


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()).strip("[].")
    name += "..." if parameter.nargs == -1 else ""
    return name if parameter.required else f"[{name}]"


def _row(option: Any, context: Any, keys: set[str]) -> tuple[str, ...]:
    said, default = _described(option, context)
    flags = " ".join(f"`{flag}`" for flag in sorted(option.opts, key=len, reverse=True)) + _value(option, context)
    variable = f"`{context.auto_envvar_prefix}_{option.name.upper()}`"
    key = (f"`{option.name}`" if option.name in keys else "",) if keys else ()
    return (flags, said + _choices(option), default, variable, *key)


def _value(option: Any, context: Any) -> str:
    """Returns the placeholder after a flag that takes a value."""
    kind = re.search(r"<(.*)>$", option.get_help_record(context)[0])
    if kind is None:
        return f" {option.metavar}" if option.metavar and "|" not in option.metavar else ""
    return f" {KINDS[kind[1]]}"


def _choices(option: Any) -> str:
    """Returns a sentence of the values that an option takes; empty where any value goes."""
    if not option.metavar or "|" not in option.metavar:
        return ""
    return " One of " + ", ".join(f"`{value}`" for value in option.metavar.strip("[]").split("|")) + "."


def _described(parameter: Any, context: Any) -> tuple[str, str]:
    """Returns a parameter's help and its default, in the words of `--help`."""
    _, said = parameter.get_help_record(context)
    said = re.sub(r"\s*\[required\]$", "", said)
    found = re.fullmatch(r"(?P<help>.*?)\s*\[default: (?P<default>.*)\]", said, re.DOTALL)
    if found is None:
        return _text(said), "off" if getattr(parameter, "is_flag", False) else ""
    default = found["default"]
    worded = default.startswith("(") or default in ("", "none", "off", "auto", "on")
    default = default.removeprefix("(").removesuffix(")")
    return _text(found["help"]), _text(default) if worded else f"`{default}`"


def _text(words: str) -> str:
    """Escapes markup, except inside backticks."""
    return "`".join(
        part if at % 2 else html.escape(part, quote=False) for at, part in enumerate(words.split("`"))
    ).replace("|", "&#124;")


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    lines = [list(titles), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return ["| " + " | ".join(line) + " |" for line in lines]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
