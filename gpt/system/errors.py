"""Exceptions for user errors, failed work and interruptions."""

import errno
import re
import warnings
from collections.abc import Iterable
from difflib import get_close_matches

MAX_MESSAGE = 5000  # Maximum characters of a message. A path can have 4,096.
_LONG_WORD = re.compile(r"[^\s/\\]{300,}")  # Longer than any file name.
_OUT_OF_MEMORY = (
    "can't allocate memory",  # torch on a CPU
    "not enough memory",  # torch on a CPU, on Windows
    "could not create a primitive",  # oneDNN, for any failure
    "could not create a memory",
    "could not execute a primitive",
    "std::bad_alloc",
    "out of memory",  # MPS, and CUDA outside of torch's allocator
    "ALLOC_FAILED",  # cuBLAS
    "Cannot allocate memory",  # mmap, also in safetensors
)


class UserError(Exception):
    """An error that the user can fix: ``message`` is the problem, ``hint`` the next step.

    The command line prints both and exits with ``exit_code``.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = shorten(message)
        self.hint = shorten(hint)


def shorten(text: str) -> str:
    """Cuts the middle of long words, such as a key of a user's file, and of a text longer than `MAX_MESSAGE`."""
    text = _LONG_WORD.sub(lambda match: f"{match[0][:80]} … {match[0][-80:]}", text)
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE // 2]} … {text[-MAX_MESSAGE // 2 :]}"


class WorkError(UserError):
    """A failure despite valid input, such as a full disk or a NaN loss."""

    exit_code = 1


class ProgramFailure(WorkError):
    """The failure of a program of the user's."""


class NotANumber(WorkError):
    """A model computed NaN or infinity: its weights are damaged, or the dtype is too narrow."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "its weights are damaged or overflow: use another checkpoint, or --dtype float32")


class PeerLost(WorkError):
    """Another process of the run has ended, and reports the reason itself."""

    exit_code = 75  # EX_TEMPFAIL tells a launcher that this process is not the cause.

    def __init__(self) -> None:
        super().__init__("another process of the run has ended", "gpt train --resume resumes from the last checkpoint")


class Interrupted(BaseException):
    """A signal stopped the work; ``message`` lists the saved data. Like KeyboardInterrupt, this is not an Exception, so
    general handlers do not catch it."""

    def __init__(self, signum: int, message: str = "interrupted") -> None:
        super().__init__(message)
        self.signum = signum
        self.message = message

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as in shells (130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP)."""
        return 128 + self.signum


class ModelWarning(UserWarning):
    """A warning about a model's files."""


def warn(text: str) -> None:
    """Warns about a model's files; the command line prints a note."""
    warnings.warn(shorten(text), ModelWarning, stacklevel=2)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ``did you mean "x"?`` for the nearest known name, or a list of the known names."""
    known = list(known)
    matches = get_close_matches(name[:100].lower(), known, n=1, cutoff=0.5)
    return f'did you mean "{matches[0]}"?' if matches else "known: " + ", ".join(known)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type's name if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def device_failure(error: BaseException) -> str | None:
    """Returns the first line of CUDA's message if this process can no longer use the device, else None."""
    message = str(error).strip()
    is_failure = isinstance(error, RuntimeError) and message.startswith("CUDA error") and not is_out_of_memory(error)
    return first_line(error) if is_failure else None


def check_text(what: str, text: str, hint: str = "set your terminal to UTF-8") -> None:
    """Raises `UserError` for a text with lone surrogates, which is how Python decodes command-line bytes that are not
    UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{what} is not UTF-8", hint) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory (OOM). Only Python and CUDA have an exception type for OOM. Messages of
    other libraries contain a phrase of `_OUT_OF_MEMORY`."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return not isinstance(error, UserError) and any(phrase in str(error) for phrase in _OUT_OF_MEMORY)


def as_user_error(error: BaseException) -> UserError:  # A Rust panic is not an Exception.
    """Returns the error to report for an error in computing a text."""
    if isinstance(error, UserError):
        return error
    if is_out_of_memory(error):
        return WorkError("out of memory", "request fewer tokens at once")
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return WorkError("the text was interrupted, because another one in the same step was", "generate it again")
    return WorkError(f"internal error in gpt: {type(error).__name__}: {error}", "please report it")


def is_out_of_threads(error: BaseException) -> bool:
    """Whether the system refused to start a thread, because of a limit on memory or threads."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)
