"""Help pages: ``--help`` shows a command's common options and examples, ``--help-all`` every panel of options.

Common options have no panel. Options in the panel `RARE` belong in a configuration file; only the reference lists them.
A command's docstring is its description, followed by an empty line and examples.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import typer.core
from rich.text import Text

from . import render

FLAGS = ["-h", "--help", "--help-all"]
COMMON, RARE = "Options", "Rarely needed"
SHORT = 12  # Maximum number of options that --help lists in full.
WIDTH = 100  # Maximum width of a page in columns.
VALUES = {"int": "N", "float": "X", "str": "TEXT", "path": "FILE", "list[str]": "TEXT"}


def help_page(command: Any, ctx: Any) -> str:
    """Returns the help page of a command or group, coloured for a terminal."""
    page = ctx.make_formatter()
    _write(command, ctx, page)
    return _coloured(page.getvalue().rstrip("\n"))


class Command(typer.core.TyperCommand):
    """A command with the help page of this module."""

    get_help = help_page


class Group(typer.core.TyperGroup):
    """A group of commands with the help page of this module."""

    get_help = help_page


def _coloured(page: str) -> str:
    console = render.stdout()
    if not console.is_terminal or console.legacy_windows:
        return page
    text = Text(page)
    text.highlight_regex(r"(?m)^(Usage|\w[\w ]*):", "bold")
    text.highlight_regex(r"(?m)^ +(-\w, )?--[\w-]+|^  [a-z]+(?=  )", "cyan")
    with console.capture() as captured:
        console.print(text, end="")
    return captured.get()


def _write(command: Any, context: Any, page: Any) -> None:
    whole = "--help-all" in (context.find_root().obj or ())  # The root's `obj` is the whole command line.
    found, listed = panels(command, context), arguments(command)
    rare = len(found.pop(RARE, []))
    count = sum(map(len, found.values()))
    description, examples = described(command)
    page.write_usage(context.command_path, usage(command, context))
    page.write_paragraph()
    page.write_text(description)
    if examples:
        with page.section("Examples"):
            page.write("".join(f"  {line}\n" for line in examples))
    for title, commands in by_purpose(command).items():
        _section(page, title, [(word, summary(each)) for word, each in commands.items()], 10)
    _section(page, "Arguments", [(name(each), _help(each)) for each in listed])
    if count <= SHORT:
        found = {COMMON: [each for each in listed_options(command, context) if each.rich_help_panel != RARE]}
    elif not whole:
        found = {COMMON: found[COMMON]}
    for title, options in found.items():
        _section(page, title, [(flags(each, context), _help(each)) for each in options], 24)
    notes = (command.epilog or "").splitlines()
    if count > SHORT and not whole:
        notes.append(f"{context.command_path} --help-all lists all {count} options.")
    elif whole and not hasattr(command, "commands"):
        first = next(iter(found.values()))[0]
        variable = f"{context.auto_envvar_prefix}_{first.name.upper()}"
        notes.append(f"Each option is also an environment variable: {max(first.opts, key=len)} is {variable}.")
        notes += [f"For {rare} rarely needed options see docs/reference.md."] if rare else []
    if notes:
        page.write_paragraph()
    for note in notes:
        page.write_text(note)


def _section(page: Any, title: str, rows: list[tuple[str, str]], width: int = 0) -> None:
    if rows:
        with page.section(title):
            page.write_dl([(name.ljust(width), words) for name, words in rows], col_max=28)


def described(command: Any) -> tuple[str, list[str]]:
    """Returns a command's description as one line, and its examples."""
    words, _, examples = inspect.cleandoc(command.help or "").partition("\n\n")
    return " ".join(words.split()), examples.splitlines()


def summary(command: Any) -> str:
    """Returns the first sentence of a command's description, without its period."""
    return described(command)[0].split(". ")[0].rstrip(".")


def by_purpose(group: Any) -> Mapping[str, Mapping[str, Any]]:
    """Returns a group's commands by heading; empty for a command that is not a group."""
    found: dict[str, dict[str, Any]] = {}
    for each, command in getattr(group, "commands", {}).items():
        if not command.hidden:
            found.setdefault(command.rich_help_panel or "Commands", {})[each] = command
    return found


def arguments(command: Any) -> list[Any]:
    """Returns a command's positional arguments."""
    return [each for each in command.params if each.param_type_name == "argument" and not each.hidden]


def listed_options(command: Any, context: Any) -> list[Any]:
    """Returns a command's options: ``--model`` first, then options with a short flag."""
    options = [each for each in command.get_params(context) if each.param_type_name == "option" and not each.hidden]
    options = [each for each in options if "--help" not in each.opts]
    return sorted(options, key=lambda each: ("-m" not in each.opts, len(each.opts) == 1 or "-q" in each.opts))


def panels(command: Any, context: Any) -> dict[str, list[Any]]:
    """Returns a command's options by panel, common options first."""
    found: dict[str, list[Any]] = {COMMON: []}
    for each in listed_options(command, context):
        found.setdefault(each.rich_help_panel or COMMON, []).append(each)
    return {title: options for title, options in found.items() if options}


def usage(command: Any, context: Any) -> str:
    """Returns the usage after a command's name: ``[OPTIONS] [TEXT...]``."""
    words = ["[OPTIONS]"] if panels(command, context) else []
    words += [name(each) if each.required else f"[{name(each)}]" for each in arguments(command)]
    return " ".join([*words, *(["COMMAND ..."] if hasattr(command, "commands") else [])])


def name(argument: Any) -> str:
    """Returns an argument's placeholder; ``TEXT...`` if it takes several values."""
    return f"{argument.metavar or argument.name.upper()}{'...' if argument.nargs == -1 else ''}"


def flags(option: Any, context: Any) -> str:
    """Returns an option's flags and value placeholder, with long flags aligned: ``-o, --out DIR``."""
    names = sorted(option.opts, key=len)
    return f"{'' if len(names) > 1 else '    '}{', '.join(names)} {value(option, context)}".rstrip()


def value(option: Any, context: Any) -> str:
    """Returns the placeholder or the choices of an option's value; empty for a switch."""
    if option.is_flag:
        return ""
    return str(option.metavar or VALUES[option.display_type(context).strip("<>")])


def default(parameter: Any) -> str:
    """Returns a parameter's default as text; empty if help need not show it."""
    if isinstance(parameter.show_default, str):
        return "" if parameter.show_default == "none" else parameter.show_default
    if parameter.param_type_name == "option" and parameter.required:
        return "required"
    given = parameter.default
    if given is None or given is False or given in ("", [], ()):
        return ""
    return "" if given == "none" and not parameter.metavar else str(given)


def _help(parameter: Any) -> str:
    found = default(parameter)
    label = found if found in ("", "required") else f"default: {found}"
    return f"{parameter.help or ''}{f' ({label})' if label else ''}"
