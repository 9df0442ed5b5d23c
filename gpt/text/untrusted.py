"""Limits for a tokenizer that came with a downloaded model: how much longer it may make a text, and how long it takes.

The library that runs it has no limits of its own: a normalizer that doubles a text 60 times fills any memory, and a
regular expression may take time that grows with the square of the text.
"""

import base64
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from gpt.errors import UserError

T = TypeVar("T")

MOST_GROWTH = 32  # times as many characters: 2 in a Llama's normalizer, 18 in SentencePiece's NFKC
MOST_CHARACTERS = 2**26  # of a text after it has grown; the library takes some 110 bytes for each
MOST_STEPS = 100  # of a normalizer or decoder, each of which reads the text once
LONGEST_AFFIX = 64  # characters that a model may put before or after each part of a word
SHORT = 256  # characters of a text that is not timed: starting a thread would take as long as tokenizing it …
SHORT_IF_LINEAR = 100_000  # … by a tokenizer whose time grows with the text
SECONDS, RATE = 20.0, 20_000  # that a text may take, and one more for so many characters: a fiftieth of the usual rate
_HINT = "use another --tokenizer or model; this one may be damaged or hostile"


def steps(part: Any, key: str) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer, pre-tokenizer or decoder, those in a Sequence one by one."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [step for each in part.get(key) or [] for step in steps(each, key)]


def check(values: Mapping[str, Any]) -> int:
    """Returns how many times longer the normalizer of a ``tokenizer.json`` may make a text. Raises `UserError` for more
    than `MOST_GROWTH`, in its decoder too, and for parts of unreasonable size."""
    growth = 1
    for name, key in (("normalizer", "normalizers"), ("decoder", "decoders")):
        found = steps(values.get(name), key)
        if len(found) > MOST_STEPS:
            raise UserError(f"the tokenizer.json has a {name} of {len(found):,} steps; at most {MOST_STEPS} run", _HINT)
        times = 1.0
        for step in found:
            times *= _growth(step)
            if times > MOST_GROWTH:
                raise UserError(
                    f"the tokenizer.json has a {name} that may lengthen a text more than {MOST_GROWTH} times "
                    f"({step.get('type')!s:.40})",
                    _HINT,
                )
        growth = round(times) if name == "normalizer" else growth
    model = values.get("model")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = model.get(name) if isinstance(model, dict) else None
        if isinstance(affix, str) and len(affix) > LONGEST_AFFIX:
            raise UserError(f"the tokenizer.json has a {name} of {len(affix):,} characters", _HINT)
    return growth


def _growth(step: Mapping[str, Any]) -> float:
    """Returns how many times as many characters a step may make of a text. Normal forms, lower case and the like grow
    rare characters alone, by little, and count as 1."""
    if step.get("type") == "Prepend":
        return 1 + len(str(step.get("prepend", "")))  # to a text of one character
    if step.get("type") == "Precompiled":
        return float(_longest_entry(str(step.get("precompiled_charsmap", ""))))
    if step.get("type") == "Replace":
        pattern, content = step.get("pattern"), len(str(step.get("content", "")))
        text = pattern.get("String") if isinstance(pattern, dict) else None
        # A regular expression may match between any two characters, as an empty text does.
        return max(1.0, content / len(text)) if isinstance(text, str) and text else 1.0 + content
    return 1.0


def _longest_entry(charsmap: str) -> int:
    """Returns the characters of the longest text that SentencePiece's table has in place of one character or more."""
    with contextlib.suppress(ValueError):
        data = base64.b64decode(charsmap)
        texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
        return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))
    return 1  # the library refuses it


def timed(work: Callable[[], T], size: int, is_risky: bool = True) -> T:
    """Returns ``work()``, a call of native code for a text of ``size`` characters, done in a thread: so Ctrl-C is
    answered, and it can be given up. Raises `UserError` where risky work takes too long, and whatever it raises."""
    if size <= SHORT:
        return work()
    done = Future[T]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # a panic of pyo3 is no Exception
            done.set_exception(error)

    limit = SECONDS + size / RATE if is_risky else threading.TIMEOUT_MAX  # the process may be suspended meanwhile
    threading.Thread(target=run, daemon=True, name="gpt-tokenizer").start()
    try:
        return done.result(limit)
    except TimeoutError:
        raise UserError(
            f"the tokenizer takes longer than {limit:,.0f} s for a text of {size:,} characters", _HINT
        ) from None


_silence = threading.Lock()
_silenced, _kept = 0, -1  # how many are silent at the moment, and what stderr was before


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keeps what Rust prints of a panic, before it becomes an error of ours, from stderr."""
    global _silenced, _kept
    with _silence:
        if not _silenced:
            with contextlib.suppress(OSError):  # stderr is closed
                _kept = os.dup(2)
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 2)
                os.close(nowhere)
        _silenced += 1
    try:
        yield
    finally:
        with _silence:
            _silenced -= 1
            if not _silenced and _kept >= 0:
                os.dup2(_kept, 2)
                os.close(_kept)
                _kept = -1
