"""Writes docs/reference.md, the page of all commands and options. A test checks that it is current.

python docs/reference.py
"""

import html
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from gpt_cli import help_pages
from gpt_cli.main import make_app

PAGE = Path(__file__).parent / "reference.md"
HEAD = """\
# Reference

Every command with all its options. `python docs/reference.py` writes this page from the commands themselves. In a
terminal, `gpt COMMAND --help` lists the options that most people use, here under **Options**, and `--help-all` the
others too.

- Each option is also an environment variable, which the command line overrides: `--max-tokens` of `gpt sample` is
  `GPT_SAMPLE_MAX_TOKENS`. That of a repeatable option has its values separated by spaces, so none can contain a space.
- The settings of `gpt train` are also keys of `--config FILE.toml`, which variables override: `--n-layer` is `n_layer`.
  `gpt train --print-config` prints all of them.
- Results go to stdout; progress, notes and errors to stderr. With `--json`, stdout has only JSON, one object per line.
- Exit status: 0 success; 1 the work failed; 2 the input was wrong; 130, 143 or 129 after SIGINT, SIGTERM or SIGHUP,
  with the work saved.
- `--debug`, or `GPT_DEBUG=1`, adds the traceback to an error.
- `gpt --version` prints the version; `gpt --install-completion` makes your shell complete commands, options and values.

## Commands
"""


def page() -> str:
    """Returns the page in Markdown."""
    root: Any = typer.main.get_command(make_app())
    context = root.make_context("gpt", [], resilient_parsing=True)
    visible_commands = list(commands(root, context))
    links = [
        f"- [`{name}`](#{name.replace(' ', '-')}): {_escape(help_pages.summary(each))}"
        for name, each, _ in visible_commands
    ]
    return "\n".join([HEAD, *links, "", *(_section(*each) for each in visible_commands)])


def commands(group: Any, context: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, command and context of each visible command, without groups that only contain others."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        command_context = command.make_context(name, [], parent=context, resilient_parsing=True)
        if not hasattr(command, "commands") or help_pages.panels(command, command_context):
            yield command_context.command_path, command, command_context
        if hasattr(command, "commands"):
            yield from commands(command, command_context)


def _section(name: str, command: Any, context: Any) -> str:
    description, examples = help_pages.split_description(command)
    lines = [f"## {name}", "", f"    {name} {help_pages.usage(command, context)}", "", _escape(description), ""]
    if examples:
        lines += ["```console", *(f"$ {line}" for line in examples), "```", ""]
    if arguments := help_pages.arguments(command):
        rows = [
            (f"`{help_pages.name(parameter)}`".replace("|", "\\|"), _escape(parameter.help or ""), _default(parameter))
            for parameter in arguments
        ]
        lines += [*_table(("argument", "what it is", "default"), rows), ""]
    for panel, options in help_pages.panels(command, context).items():
        lines += [f"**{panel}**", ""]
        lines += [*_table(("option", "what it does", "default"), [_row(each, context) for each in options]), ""]
    return "\n".join(lines)


def _row(option: Any, context: Any) -> tuple[str, ...]:
    value_hint = help_pages.value(option, context)
    choices = value_hint.split("|") if "|" in value_hint else []
    flags = " ".join(f"`{flag}`" for flag in sorted(option.opts, key=len, reverse=True))
    description = _escape(option.help or "") + (
        f". One of {', '.join(f'`{choice}`' for choice in choices)}" if choices else ""
    )
    return (flags if choices else f"{flags} {value_hint}".rstrip(), description, _default(option))


def _default(parameter: Any) -> str:
    """Formats a default, as code if a user could type it."""
    default = help_pages.default(parameter)
    if getattr(parameter, "is_flag", False):
        return "off"
    return _escape(default) if not default or isinstance(parameter.show_default, str) else f"`{default}`"


def _escape(text: str) -> str:
    """Escapes markup outside backticks."""
    return "`".join(
        part if index % 2 else html.escape(part, quote=False) for index, part in enumerate(text.split("`"))
    ).replace("|", "&#124;")


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    lines = [list(titles), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return ["| " + " | ".join(line) + " |" for line in lines]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
