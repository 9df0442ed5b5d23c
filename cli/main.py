"""Builds and runs the command line app, and turns errors into messages and exit codes."""

import errno
import functools
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer

from gpt.parallel import environment
from gpt.system import waiting
from gpt.system.distribution import NAME, VERSION, install, packages
from gpt.system.errors import Interrupted, ModelWarning, UserError, device_failure, is_out_of_memory, is_out_of_threads
from gpt.system.words import as_json

from . import help_pages, processes
from .show import render, terminal

HELP = """Train a GPT on your own text, on the computer you have. Then look inside it.

gpt train book.txt
gpt sample "Once upon a time"
gpt inspect attention "Once upon a time" -o attention.html"""
EPILOG = """gpt COMMAND --help explains a command.
GPT_TRAIN_STEPS=100 means --steps 100, and so on; --debug shows tracebacks."""


def _print_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_python_showwarning = warnings.showwarning
# A switch without an environment variable: other programs could use GPT_VERSION.
_switch = functools.partial(typer.Option, False, allow_from_autoenv=False, show_envvar=False)
CONTEXT = {
    "auto_envvar_prefix": "GPT", "help_option_names": help_pages.FLAGS, "max_content_width": help_pages.WIDTH
}  # fmt: skip
GROUPS = ("tokenizer", "data", "inspect")
COMMANDS = {  # Each command's heading on the help page, in order.
    name: heading
    for heading, names_below in {
        "Train": ("train", "runs"),
        "Generate": ("sample", "chat", "serve"),
        "Understand": ("eval", "inspect", "report", "params"),
        "Prepare": ("data", "tokenizer", "tokenize"),
        "Publish": ("export",),
    }.items()
    for name in names_below
}


class _Root(help_pages.Group):
    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the options. Completion options have no environment variables."""
        params = super().get_params(ctx)
        for param in params:
            if param.name in ("install_completion", "show_completion"):
                param.allow_from_autoenv = param.show_envvar = False  # type: ignore[attr-defined]
        return params


def make_app(args: Sequence[str] = ()) -> typer.Typer:
    """Builds the app. Imports only the command or group that ``args`` start with, because importing all is slow."""
    app = typer.Typer(
        name="gpt", cls=_Root, help=HELP, epilog=EPILOG, pretty_exceptions_enable=False, context_settings=CONTEXT
    )
    app.callback(invoke_without_command=True)(_main)
    for name in [name for name in COMMANDS if name in args[:1]] or COMMANDS:
        settings: dict[str, Any] = {"name": name, "rich_help_panel": COMMANDS[name]}
        if name not in GROUPS:
            module = "evaluate" if name == "eval" else name
            command = getattr(import_module(f"gpt_cli.commands.{module}"), module)
            app.command(cls=help_pages.Command, **settings)(command)
        else:
            group = _load_group(name)
            for info in group.registered_commands:
                info.cls = help_pages.Command
            group.callback(invoke_without_command=True)(_print_help)
            app.add_typer(group, cls=help_pages.Group, **settings)
    return app


def _load_group(name: str) -> typer.Typer:
    group: typer.Typer = import_module(f"gpt_cli.commands.{name}").app
    return group


def _collect_versions() -> dict[str, Any]:
    """Returns versions for a bug report. If torch cannot be imported, reports the error as the device."""
    try:
        from gpt.config.device import pick

        device = pick().describe()
    except Exception as error:
        device = f"{type(error).__name__}: {error}"
    system = {"python": platform.python_version(), "platform": platform.platform()}
    return {"gpt": VERSION, **system, "device": device, "packages": packages()}


def _main(
    context: typer.Context,
    version: bool = _switch("--version", help="Print the version; with --json, also packages and device"),
    json: bool = _switch("--json", hidden=True),
) -> None:
    if version:
        typer.echo(as_json(_collect_versions()) if json else f"gpt {VERSION}")
        raise typer.Exit
    if json:
        raise UserError("--json comes after a command", "gpt params --json, or gpt --version --json")
    _print_help(context)


def run() -> None:
    """Runs ``gpt`` and exits."""
    waiting.set_policy()
    status: list[int] = []
    processes.exit_before_shutdown(status)
    status.append(main(sys.argv[1:]))
    sys.exit(status[0])


def main(args: list[str]) -> int:
    """Runs a command line and returns its exit status. Prints errors as a message and a hint on stderr."""
    terminal.make_output_safe()
    warnings.showwarning = _show_warning
    debug = "--debug" in args or bool(os.environ.get("GPT_DEBUG"))
    try:
        command_line = _add_resume_value([arg for arg in args if arg != "--debug"])
        _check_current_folder(command_line)
        status = make_app(command_line)(command_line, prog_name="gpt", standalone_mode=False, obj=args)
        sys.stdout.flush()
        if status == 130:  # Typer returns 130 after Ctrl-C.
            render.note("interrupted")
        return int(status or 0)
    except BaseException as error:
        if _is_closed_pipe(error):
            terminal.redirect_to_null(sys.stdout)
            return 0
        if debug and not isinstance(error, (Interrupted, KeyboardInterrupt, SystemExit)):
            render.trace(error)
        silent_status = processes.silent_status(error)
        status = _report_error(error, _command_name(args)) if silent_status is None else silent_status
        environment.write_message(environment.STATUS, status)
        return status


def _show_warning(message: Warning | str, category: type[Warning], *location: Any, **options: Any) -> None:
    """Prints a `ModelWarning` as a note, and other warnings as Python does."""
    if issubclass(category, ModelWarning):
        render.note(str(message))
    else:
        _python_showwarning(message, category, *location, **options)


def _check_current_folder(words: Sequence[str]) -> None:
    """Raises `UserError` if the current folder was deleted, since MKL would end the process while torch is imported."""
    if (_command_name([*words]) == "COMMAND" and "--json" not in words) or {*help_pages.FLAGS} & {*words}:
        return
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        raise UserError("the current folder no longer exists", "change to another folder: cd ~") from None


def _add_resume_value(args: list[str]) -> list[str]:
    """Adds an empty value to a bare ``--resume`` of ``gpt train``, because the parser has no optional values."""
    if _command_name(args) != "train" or "--resume" not in args:
        return args
    at = args.index("--resume")
    is_bare = at + 1 == len(args) or args[at + 1].startswith("-")
    return [*args[:at], "--resume=", *args[at + 1 :]] if is_bare else args


def _command_name(args: list[str]) -> str:
    """Returns the command in ``args``, such as ``data show``, or else ``COMMAND``."""
    at = next((i for i, arg in enumerate(args) if arg in COMMANDS), None)
    if at is None:
        return "COMMAND"
    subcommands = [info.name for info in _load_group(args[at]).registered_commands] if args[at] in GROUPS else []
    return " ".join([args[at], *[arg for arg in args[at + 1 :] if arg in subcommands][:1]])


def _report_error(error: BaseException, command: str) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    status, message, hint = _describe(error, command)
    render.error(message, hint) if hint else render.note(message)
    return status


def _describe(error: BaseException, command: str) -> tuple[int, str, str]:
    """Returns an error's exit status, message and hint. An interruption has no hint."""
    if isinstance(error, UserError):
        return error.exit_code, error.message, error.hint or f"see gpt {command} --help"
    if isinstance(error, typer.TyperException):  # The parser rejected the command line.
        context = getattr(error, "ctx", None)
        see_help = f"see {context.command_path if context else 'gpt'} --help"
        hint = _explain_extra_argument(error, context) or see_help
        return error.exit_code, error.format_message().rstrip("."), hint
    if isinstance(error, Interrupted):
        return error.exit_code, error.message, ""
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return 130, "interrupted", ""
    if isinstance(error, ModuleNotFoundError):
        return 1, f"the package {error.name} is not installed", f"{install(str(error.name))}, or reinstall {NAME}"
    if is_out_of_memory(error):
        return 1, "out of memory", "try a smaller --micro-batch, --preset or --block-size"
    if is_out_of_threads(error):
        message = "the system cannot start another thread: it is out of memory or at its thread limit"
        return 1, message, "use fewer --threads, or raise the limit (ulimit -v, ulimit -u, or the container's)"
    if (failure := device_failure(error)) is not None:
        return 1, f"the device failed: {failure}", "try again; if it keeps failing, use --device cpu"
    if isinstance(error, OSError):
        return 1, f"system error: {error}", "add --debug for the traceback"
    message = f"internal error in gpt: {type(error).__name__}: {error}"
    return 1, message, "please report it, with the traceback that --debug prints"


def _explain_extra_argument(error: Any, context: Any) -> str | None:
    """Returns a hint for an extra argument of a command with ``--model``, or None for other errors."""
    flags = {flag for param in context.command.params for flag in param.opts} if context is not None else set()
    if "unexpected extra argument" not in error.message or "--model" not in flags:
        return None
    takes_text = any(param.param_type_name == "argument" for param in context.command.params)
    quotes = f'a text of several words needs quotes: {context.command_path} "Once upon a time"; ' * takes_text
    return f"{quotes}-m names the model{', -o the output' if '--out' in flags else ''}"


def _is_closed_pipe(error: BaseException | None) -> bool:
    """Whether an error means that the reader of stdout is gone (``gpt … | head``). Typer and rich turn the original
    OSError into a SystemExit."""
    if isinstance(error, SystemExit):
        error = error.__context__
    error_codes = (errno.EPIPE, errno.EINVAL) if sys.platform == "win32" else (errno.EPIPE,)
    return isinstance(error, OSError) and error.errno in error_codes
