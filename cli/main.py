"""The app, and the one place where errors become lines and exit codes."""

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
import typer.core

from gpt import __version__, waiting
from gpt.errors import Interrupted, ModelWarning, UserError, device_failure, is_out_of_memory, is_out_of_threads
from gpt.parallel import environment

from . import names, processes, render

EPILOG = (
    "Every option has a twin in the environment, GPT_<COMMAND>_<OPTION>: GPT_TRAIN_STEPS=100 is --steps 100. "
    "With --debug, also after a command, an error shows where it came from."
)


def _help(context: typer.Context) -> None:
    """Prints the help of a group that is called without a command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_show_plainly = warnings.showwarning
_TWINS = "Each option has a twin in the environment: GPT_{}_<OPTION>."
COMMANDS = {  # by name, the module with a function of the same name; in the order of the help page
    "train": "train",
    "sample": "sample",
    "chat": "chat",
    "eval": "evaluate",
    "tokenize": "tokenize",
    "params": "params",
    "report": "report",
    "bench": "bench",
    "export": "export",
    "serve": "serve",
}
GROUPS = ("tokenizer", "data", "inspect")
_TOOK_MODEL = ("bench", "export")  # without -m; they read the words that no argument takes


class _Group(typer.core.TyperGroup):
    """The command ``gpt``. The options for completion, which typer adds to it, have no twin in the environment. A
    command of another program is answered with ours."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command. Raises `UserError` for one of another program."""
        if args[0] in names.COMMANDS and args[0] not in self.commands:
            raise UserError(f"there is no command {args[0]}", names.COMMANDS[args[0]])
        return super().resolve_command(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the options."""
        params = super().get_params(ctx)
        for param in params:
            if param.name in ("install_completion", "show_completion"):
                param.allow_from_autoenv = param.show_envvar = False  # type: ignore[attr-defined]
        return params


def make_app(args: Sequence[str] = ()) -> typer.Typer:
    """Builds the app with the one command or group that ``args`` begin with, or else with all of them: importing and
    building them takes time."""
    app = typer.Typer(
        name="gpt",
        cls=_Group,
        help="Train and use your own GPT: a decoder of the GPT-2/GPT-3 family, from any text.",
        epilog=EPILOG,
        pretty_exceptions_enable=False,
        context_settings={"auto_envvar_prefix": "GPT", "help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_main)
    names = [*COMMANDS, *GROUPS]
    for name in [name for name in names if name in args[:1]] or names:
        if name in COMMANDS:
            command = getattr(import_module(f"gpt_cli.{COMMANDS[name]}"), COMMANDS[name])
            extra = {"allow_extra_args": name in _TOOK_MODEL}
            app.command(name, epilog=_TWINS.format(name.upper()), context_settings=extra)(command)
        else:
            group = _group(name)
            for info in group.registered_commands:
                info.epilog = _TWINS.format(f"{name}_{info.name}".upper())
            group.callback(invoke_without_command=True)(_help)
            app.add_typer(group, name=name)
    return app


def _group(name: str) -> typer.Typer:
    group: typer.Typer = import_module(f"gpt_cli.{name}").app
    return group


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpt {__version__}")
        raise typer.Exit


def _main(
    context: typer.Context,
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the version.",
        is_eager=True,
        callback=_print_version,
        allow_from_autoenv=False,  # GPT_VERSION may mean something to others
        show_envvar=False,
    ),
) -> None:
    _help(context)


def run() -> None:
    """The command ``gpt``."""
    waiting.set_policy()
    status: list[int] = []
    processes.end_abruptly(status)
    status.append(main(sys.argv[1:]))
    sys.exit(status[0])


def main(args: list[str]) -> int:
    """Runs a command line and returns its exit status. Errors that a user can cause are two lines on stderr."""
    render.make_output_safe()
    warnings.showwarning = _show
    debug = "--debug" in args or bool(os.environ.get("GPT_DEBUG"))
    try:
        words = _with_values([arg for arg in args if arg != "--debug"])
        _check_current_folder(words)
        status = make_app(words)(words, prog_name="gpt", standalone_mode=False, obj=args)
        sys.stdout.flush()
        if status == 130:  # how typer passes on a Ctrl-C
            render.note("interrupted")
        return int(status or 0)
    except BaseException as error:
        if _is_closed_pipe(error):
            return _pipe_closed()
        if debug and not isinstance(error, (Interrupted, KeyboardInterrupt, SystemExit)):
            render.trace(error)
        silenced = processes.silenced(error)
        status = _report(error, _command(args)) if silenced is None else silenced
        environment.tell(environment.STATUS, status)
        return status


def _show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Prints a warning: of a model's files as a note, any other as Python does."""
    if issubclass(category, ModelWarning):
        render.note(str(message))
    else:
        _show_plainly(message, category, *where, **more)


def _check_current_folder(words: Sequence[str]) -> None:
    """Raises `UserError` if a command is called in a folder that has been deleted: MKL would end the process when torch
    loads it."""
    if _command([*words]) == "COMMAND" or {"-h", "--help"} & {*words}:
        return
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        raise UserError("the current folder no longer exists", "cd to another one: cd ~") from None


def _with_values(args: list[str]) -> list[str]:
    """Gives a bare ``--resume`` of ``gpt train`` an empty value: the parser has no options with an optional value."""
    if _command(args) != "train" or "--resume" not in args:
        return args
    at = args.index("--resume")
    bare = at + 1 == len(args) or args[at + 1].startswith("-")
    return [*args[:at], "--resume=", *args[at + 1 :]] if bare else args


def _command(args: list[str]) -> str:
    """Returns the command that ``args`` name, such as ``data show``; ``COMMAND`` where they name none."""
    at = next((i for i, arg in enumerate(args) if arg in COMMANDS or arg in GROUPS), None)
    if at is None:
        return "COMMAND"
    within = [info.name for info in _group(args[at]).registered_commands] if args[at] in GROUPS else []
    return " ".join([args[at], *[arg for arg in args[at + 1 :] if arg in within][:1]])


def _report(error: BaseException, command: str) -> int:
    """Says what went wrong and returns the exit status for it."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    status, message, hint = _described(error, command)
    if hint:
        render.error(message, hint)
    else:
        render.note(message)
    return status


def _described(error: BaseException, command: str) -> tuple[int, str, str]:
    """Returns the exit status, what went wrong, and a hint. An interruption has no hint."""
    if isinstance(error, UserError):
        return error.exit_code, error.message, error.hint or f"gpt {command} --help says what each setting takes"
    if isinstance(error, typer.TyperException):  # the command line cannot be parsed
        context = getattr(error, "ctx", None)
        if (answer := names.answer(error, context)) is not None:
            return error.exit_code, *answer
        path = context.command_path if context else "gpt"
        return error.exit_code, error.format_message().rstrip("."), f"{path} --help lists what there is"
    if isinstance(error, Interrupted):
        return error.exit_code, error.message, ""
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return 130, "interrupted", ""
    if isinstance(error, ModuleNotFoundError):
        return 1, f"the package {error.name} is not installed", f"pip install {error.name}, or reinstall gpt"
    if is_out_of_memory(error):
        return 1, "out of memory", "take a smaller --micro-batch, --preset or --block-size"
    if is_out_of_threads(error):
        message = "the system refuses to start another thread: memory or the number of threads is limited"
        return 1, message, "raise the limit (ulimit -v, ulimit -u, or a container's), or take fewer --threads"
    if (failure := device_failure(error)) is not None:
        return 1, f"the device has failed: {failure}", "try again; where it fails again, --device cpu computes too"
    if isinstance(error, OSError):
        return 1, f"the system says: {error}", "--debug shows where"
    message = f"a fault in gpt itself: {type(error).__name__}: {error}"
    return 1, message, "--debug shows where; please report it"


def _is_closed_pipe(error: BaseException | None) -> bool:
    """Whether the reader of stdout is gone; typer and rich turn that OSError into a SystemExit."""
    if isinstance(error, SystemExit):
        error = error.__context__
    closed = (errno.EPIPE, errno.EINVAL) if sys.platform == "win32" else (errno.EPIPE,)
    return isinstance(error, OSError) and error.errno in closed


def _pipe_closed() -> int:
    """Points stdout at nothing once its reader is gone (``gpt … | head``), so that no flush fails at exit; status 0."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
