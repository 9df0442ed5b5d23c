"""The app, and the one place where errors become lines and exit codes."""

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable

import typer

from gpt import __version__
from gpt.errors import Interrupted, UserError

from . import evaluate, params, render, sample, tokenizer, train

EPILOG = (
    "Every option has a twin in the environment, GPT_<COMMAND>_<OPTION>: GPT_TRAIN_STEPS=100 is --steps 100. "
    "With --debug, also after a command, an error shows where it came from."
)

app = typer.Typer(
    name="gpt",
    help="Train and use your own GPT: a decoder of the GPT-2/GPT-3 family, from any text.",
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "GPT", "help_option_names": ["-h", "--help"]},
)
COMMANDS: dict[str, Callable[..., object]] = {
    "train": train.train,
    "sample": sample.sample,
    "eval": evaluate.evaluate,
    "params": params.params,
}
GROUPS: dict[str, tuple[str, dict[str, Callable[..., object]]]] = {
    "tokenizer": (tokenizer.HELP, tokenizer.COMMANDS),
}


def _help_if_bare(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _register(parent: typer.Typer, commands: dict[str, Callable[..., object]], prefix: str) -> None:
    for name, command in commands.items():
        epilog = f"Each option has a twin in the environment: {prefix}_{name.upper()}_<OPTION>."
        parent.command(name, epilog=epilog)(command)


_register(app, COMMANDS, "GPT")
for group, (about, commands) in GROUPS.items():
    below = typer.Typer(callback=_help_if_bare, invoke_without_command=True, help=about)
    _register(below, commands, f"GPT_{group.upper()}")
    app.add_typer(below, name=group)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpt {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
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
    _help_if_bare(context)


def run() -> None:
    """The command ``gpt``."""
    sys.exit(main(sys.argv[1:]))


def main(args: list[str]) -> int:
    """Runs a command line and returns its exit status. Errors that a user can cause are two lines on stderr."""
    render.make_output_safe()
    debug = "--debug" in args or bool(os.environ.get("GPT_DEBUG"))
    try:
        status = app([arg for arg in args if arg != "--debug"], standalone_mode=False)
        sys.stdout.flush()
        if status == 130:  # typer's way of passing on a Ctrl-C
            render.note("interrupted")
        return int(status or 0)
    except BaseException as error:
        if _is_closed_pipe(error):
            return _pipe_closed()
        if debug and not isinstance(error, (Interrupted, KeyboardInterrupt)):
            traceback.print_exception(error)
        return _report(error, _command(args))


def _command(args: list[str]) -> str:
    """The words that name the command in ``args``."""
    at = next((i for i, arg in enumerate(args) if arg in COMMANDS or arg in GROUPS), None)
    if at is None:
        return "COMMAND"
    within = GROUPS[args[at]][1] if args[at] in GROUPS else {}
    return " ".join([args[at], *[arg for arg in args[at + 1 :] if arg in within][:1]])


def _report(error: BaseException, command: str) -> int:
    """Says what went wrong and returns the exit status for it."""
    if isinstance(error, UserError):
        render.error(error.message, error.hint or f"gpt {command} --help says what each setting takes")
        return error.exit_code
    if isinstance(error, typer.TyperException):  # the words themselves are wrong
        message, hint = render.usage_error(error)
        render.error(message, hint)
        return error.exit_code
    if isinstance(error, Interrupted):
        render.note(error.message)
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        render.note("interrupted")
        return 130
    if isinstance(error, ModuleNotFoundError):
        render.error(f"the package {error.name} is not installed", f"pip install {error.name}, or gpt itself anew")
        return 1
    if _is_out_of_memory(error):
        render.error("out of memory", "take a smaller --micro-batch, --preset or --block-size")
        return 1
    if isinstance(error, OSError):
        render.error(f"the system says: {error}", "--debug shows where")
        return 1
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    render.error(f"a fault in gpt itself: {type(error).__name__}: {error}", "--debug shows where; please report it")
    return 1


def _is_out_of_memory(error: BaseException) -> bool:
    """Python's, a GPU's, or torch's on a CPU, which has no type of its own."""
    own_type = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return own_type or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def _is_closed_pipe(error: BaseException | None) -> bool:
    """Whether the reader of stdout has gone; typer and rich turn the system's word for it into SystemExit."""
    if isinstance(error, SystemExit):
        error = error.__context__
    closed = (errno.EPIPE, errno.EINVAL) if sys.platform == "win32" else (errno.EPIPE,)
    return isinstance(error, OSError) and error.errno in closed


def _pipe_closed() -> int:
    """``gpt … | head``: the reader has what it wanted. Nothing more is written, not even at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
