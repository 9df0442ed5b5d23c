"""Help pages: ``--help`` shows common options, and ``--help-all`` also the other options by panel.

Common options have no panel. A command's docstring contains a description, an empty line and examples.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import typer.core
from rich.text import Text

from .show import terminal

FLAGS = ["-h", "--help", "--help-all"]
COMMON = "Options"
MAX_LISTED_OPTIONS = 13  # Maximum number of options that --help lists in full.
WIDTH = 100  # Maximum width of a page in columns.
PLACEHOLDERS = {"int": "N", "int range": "N", "float": "X", "str": "TEXT", "path": "FILE", "list[str]": "TEXT"}


def help_page(command: Any, ctx: Any) -> str:
    """Returns the help page of a command or group, coloured on a terminal."""
    page = ctx.make_formatter()
    _write_page(command, ctx, page)
    return _colour(page.getvalue().rstrip("\n"))


class Command(typer.core.TyperCommand):
    """A command that prints `help_page`."""

    get_help = help_page


class Group(typer.core.TyperGroup):
    """A group of commands that prints `help_page`."""

    get_help = help_page


def _colour(page: str) -> str:
    console = terminal.stdout()
    if not console.is_terminal or console.legacy_windows:
        return page
    text = Text(page)
    text.highlight_regex(r"(?m)^(Usage|\w[\w ]*):", "bold")
    text.highlight_regex(r"(?m)^ +(-\w, )?--[\w-]+|^  [a-z]+(?=  )", "cyan")
    with console.capture() as captured:
        console.print(text, end="")
    return captured.get()


def _write_page(command: Any, context: Any, page: Any) -> None:
    show_all = "--help-all" in (context.find_root().obj or ())  # `obj` is the list of arguments.
    option_panels, positionals = panels(command, context), arguments(command)
    count = sum(map(len, option_panels.values()))
    description, examples = split_description(command)
    page.write_usage(context.command_path, usage(command, context))
    page.write_paragraph()
    page.write_text(description)
    if examples:
        with page.section("Examples"):
            page.write("".join(f"  {line}\n" for line in examples))
    for title, commands in _group_commands(command).items():
        _write_section(page, title, [(word, summary(subcommand)) for word, subcommand in commands.items()], 10)
    _write_section(page, "Arguments", [(name(argument), _help_text(argument)) for argument in positionals])
    if count <= MAX_LISTED_OPTIONS:
        option_panels = {COMMON: _listed_options(command, context)}
    elif not show_all:
        option_panels = {COMMON: option_panels[COMMON]}
    for title, options in option_panels.items():
        _write_section(page, title, [(_flags(option, context), _help_text(option)) for option in options], 24)
    notes = (command.epilog or "").splitlines()
    if count > MAX_LISTED_OPTIONS and not show_all:
        notes.append(f"{context.command_path} --help-all lists all {count} options.")
    elif show_all and not hasattr(command, "commands"):
        first = next(iter(option_panels.values()))[0]
        variable = f"{context.auto_envvar_prefix}_{first.name.upper()}"
        notes.append(f"Each option is also an environment variable: {max(first.opts, key=len)} is {variable}.")
    if notes:
        page.write_paragraph()
    for note in notes:
        page.write_text(note)


def _write_section(page: Any, title: str, rows: list[tuple[str, str]], width: int = 0) -> None:
    if rows:
        with page.section(title):
            page.write_dl([(term.ljust(width), words) for term, words in rows], col_max=28)


def split_description(command: Any) -> tuple[str, list[str]]:
    """Returns a command's description as one line, and its examples."""
    words, _, examples = inspect.cleandoc(command.help or "").partition("\n\n")
    return " ".join(words.split()), examples.splitlines()


def summary(command: Any) -> str:
    """Returns the first sentence of a command's description, without its period."""
    return split_description(command)[0].split(". ")[0].rstrip(".")


def _group_commands(group: Any) -> Mapping[str, Mapping[str, Any]]:
    """Returns a group's commands by heading, or an empty dict for a command."""
    headings: dict[str, dict[str, Any]] = {}
    for word, command in getattr(group, "commands", {}).items():
        headings.setdefault(command.rich_help_panel or "Commands", {})[word] = command
    return headings


def arguments(command: Any) -> list[Any]:
    """Returns a command's positional arguments."""
    return [each for each in command.params if each.param_type_name == "argument"]


def _listed_options(command: Any, context: Any) -> list[Any]:
    """Returns a command's options, with ``--model`` first and then options with a short flag."""
    options = [each for each in command.get_params(context) if each.param_type_name == "option" and not each.hidden]
    options = [option for option in options if "--help" not in option.opts]
    return sorted(options, key=lambda option: ("-m" not in option.opts, len(option.opts) == 1 or "-q" in option.opts))


def panels(command: Any, context: Any) -> dict[str, list[Any]]:
    """Returns a command's options by panel, common options first."""
    by_panel: dict[str, list[Any]] = {COMMON: []}
    for option in _listed_options(command, context):
        by_panel.setdefault(option.rich_help_panel or COMMON, []).append(option)
    return {title: options for title, options in by_panel.items() if options}


def usage(command: Any, context: Any) -> str:
    """Returns the usage line after the command's name, such as ``[OPTIONS] [TEXT...]``."""
    words = ["[OPTIONS]"] if panels(command, context) else []
    words += [name(argument) if argument.required else f"[{name(argument)}]" for argument in arguments(command)]
    return " ".join([*words, *(["COMMAND ..."] if hasattr(command, "commands") else [])])


def name(argument: Any) -> str:
    """Returns an argument's placeholder, such as ``TEXT...`` for several values."""
    return f"{argument.metavar or argument.name.upper()}{'...' if argument.nargs == -1 else ''}"


def _flags(option: Any, context: Any) -> str:
    """Returns an option's flags and placeholder, such as ``-o, --out DIR``. Aligns long flags."""
    names = sorted(option.opts, key=len)
    return f"{'' if len(names) > 1 else '    '}{', '.join(names)} {value(option, context)}".rstrip()


def value(option: Any, context: Any) -> str:
    """Returns the placeholder or choices of an option's value, or an empty string for a switch."""
    if option.is_flag:
        return ""
    return str(option.metavar or PLACEHOLDERS[option.display_type(context).strip("<>")])


def default(parameter: Any) -> str:
    """Returns a parameter's default value for display, or an empty string."""
    if isinstance(parameter.show_default, str):
        return "" if parameter.show_default == "none" else parameter.show_default
    if parameter.param_type_name == "option" and parameter.required:
        return "required"
    default_value = parameter.default
    if default_value is None or default_value is False or default_value in ("", [], ()):
        return ""
    return "" if default_value == "none" and not parameter.metavar else str(default_value)


def _help_text(parameter: Any) -> str:
    default_text = default(parameter)
    label = default_text if default_text in ("", "required") else f"default: {default_text}"
    return f"{parameter.help or ''}{f' ({label})' if label else ''}"
