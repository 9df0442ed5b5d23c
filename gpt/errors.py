"""The errors that a user can cause, and the ones that end a piece of work."""

import errno
import warnings
from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 5000  # characters of a message; a path may have 4,096
_OUT_OF_MEMORY = (
    "can't allocate memory",  # torch on a CPU
    "not enough memory",  # torch on a CPU, on Windows
    "could not create a primitive",  # oneDNN, which reports every failure so
    "could not create a memory",
    "could not execute a primitive",
    "std::bad_alloc",
    "out of memory",  # MPS, and CUDA outside of torch's allocator
    "ALLOC_FAILED",  # cuBLAS
    "Cannot allocate memory",  # mmap, also safetensors'
)


class UserError(Exception):
    """Something the user can mend: ``message`` says what is wrong, with the numbers; ``hint`` what to do next.

    The command line prints both, a line each, and exits with ``exit_code``.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = shortened(message)
        self.hint = shortened(hint)


def shortened(text: str) -> str:
    """A text of at most `LONGEST` characters: what is longer, such as a name from a damaged file, has a gap."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


class WorkError(UserError):
    """The input was fine and the work failed all the same: a full disk, a loss that is no number."""

    exit_code = 1


class NotANumber(WorkError):
    """A model computed NaN or infinity where there must be a number: damaged weights, or too narrow a dtype."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "its weights are damaged or overflow: use another checkpoint, or --dtype float32")


class PeerLost(WorkError):
    """Another process of the run has ended, for a reason that it tells itself."""

    exit_code = 75  # EX_TEMPFAIL: so a launcher knows that this is not why the run ended

    def __init__(self) -> None:
        super().__init__("another process of the run has ended", "gpt train --resume resumes from the last checkpoint")


class Interrupted(BaseException):
    """A signal ended the work in good order; ``message`` says what was saved. Like KeyboardInterrupt, it is no
    Exception, so that code which handles any error does not take it for one."""

    def __init__(self, signum: int, message: str = "interrupted") -> None:
        super().__init__(message)
        self.signum = signum
        self.message = message

    @property
    def exit_code(self) -> int:
        """The shell's convention: 128 + the signal's number (130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP)."""
        return 128 + self.signum


class ModelWarning(UserWarning):
    """A model is used in spite of something in its files."""


def warn(text: str) -> None:
    """Warns of a model's files. The command line prints it as a note."""
    warnings.warn(shortened(text), ModelWarning, stacklevel=2)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean "x"?`` for the nearest known name, else the list of the known ones."""
    known = list(known)
    near = get_close_matches(name[:100].lower(), known, n=1, cutoff=0.5)
    return f'did you mean "{near[0]}"?' if near else "known: " + ", ".join(known)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def device_failure(error: BaseException) -> str | None:
    """CUDA's message, in one line, if a device has failed and computes nothing more in this process; None for any
    other error."""
    message = str(error).strip()
    failed = isinstance(error, RuntimeError) and message.startswith("CUDA error") and not is_out_of_memory(error)
    return first_line(error) if failed else None


def check_text(what: str, text: str, hint: str = "set your terminal to UTF-8") -> None:
    """Raises `UserError` for bytes of a command line that are not UTF-8, which Python reads as lone surrogates."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise UserError(f"{what} is not UTF-8", hint)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. Only Python and CUDA have a type for it; elsewhere the message contains one of
    `_OUT_OF_MEMORY`."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return not isinstance(error, UserError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def is_out_of_threads(error: BaseException) -> bool:
    """Whether the system refused to start another thread: memory or the number of threads is limited."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)
