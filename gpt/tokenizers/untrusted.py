"""Limits for tokenizers of downloaded models: text growth and run time.

The tokenizers library has no limits: a normalizer that doubles a text 60 times fills any memory, and a regular
expression can take quadratic time.
"""

import base64
import contextlib
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from gpt.system.errors import UserError

T = TypeVar("T")

MAX_GROWTH = 32  # Maximum growth factor of a text. Llama's normalizer needs 2; SentencePiece's NFKC needs 18.
MAX_STEPS = 100  # Maximum steps of a normalizer or decoder. Each step reads the text once.
MAX_UNTIMED = 256  # Shorter texts have no time limit: starting a thread would take as long as tokenizing them.
MAX_UNTIMED_IF_LINEAR = 100_000  # `MAX_UNTIMED` for tokenizers with linear run time.
SECONDS, CHARACTERS_PER_SECOND = (
    20.0,
    20_000,
)  # Limit of 20 s plus 1 s per 20,000 characters: 1/50 of the usual throughput.
_HINT = "use another --tokenizer or model; this one may be damaged or hostile"


def steps(part: Any, key: str) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer, pre-tokenizer or decoder, with Sequences flattened."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [step for child in part.get(key) or [] for step in steps(child, key)]


def check(values: Mapping[str, Any]) -> None:
    """Raises `UserError` if the normalizer or decoder of a ``tokenizer.json`` exceeds `MAX_GROWTH` or `MAX_STEPS`."""
    for name, key in (("normalizer", "normalizers"), ("decoder", "decoders")):
        step_list = steps(values.get(name), key)
        if len(step_list) > MAX_STEPS:
            raise UserError(
                f"the tokenizer.json has a {name} of {len(step_list):,} steps; at most {MAX_STEPS} run", _HINT
            )
        if math.prod(map(_growth, step_list), start=1.0) > MAX_GROWTH:
            problem = f"a {name} that may lengthen a text more than {MAX_GROWTH} times"
            raise UserError(f"the tokenizer.json has {problem}", _HINT)


def _growth(step: Mapping[str, Any]) -> float:
    """Returns the maximum growth factor of a step. Normal forms, lower case and similar steps count as 1, because only
    rare characters grow, and only a little."""
    if step.get("type") == "Prepend":
        return 1 + len(str(step.get("prepend", "")))  # The worst case is a text of one character.
    if step.get("type") == "Precompiled":
        return float(_longest_replacement(str(step.get("precompiled_charsmap", ""))))
    if step.get("type") == "Replace":
        pattern, content = step.get("pattern"), len(str(step.get("content", "")))
        text = pattern.get("String") if isinstance(pattern, dict) else None
        # A regular expression or an empty string can match between any two characters.
        return max(1.0, content / len(text)) if isinstance(text, str) and text else 1.0 + content
    return 1.0


def _longest_replacement(charsmap: str) -> int:
    """Returns the length of the longest replacement in SentencePiece's table."""
    with contextlib.suppress(ValueError):
        data = base64.b64decode(charsmap)
        texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
        return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))
    return 1  # The library rejects an invalid table.


def run_with_timeout(work: Callable[[], T], size: int, is_risky: bool = True) -> T:
    """Calls ``work``, native code for a text of ``size`` characters. Unless the text is short, uses a thread that
    Ctrl-C or the time limit can abandon. Raises `UserError` if risky work takes too long. Exceptions of ``work``
    propagate."""
    if size <= MAX_UNTIMED:
        return work()
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # A pyo3 panic is not an Exception.
            future.set_exception(error)

    limit = (
        SECONDS + size / CHARACTERS_PER_SECOND if is_risky else threading.TIMEOUT_MAX
    )  # Work without risk has no limit, because a suspended process would exceed it.
    threading.Thread(target=run, daemon=True, name="gpt-tokenizer").start()
    try:
        return future.result(limit)
    except TimeoutError:
        raise UserError(
            f"the tokenizer takes longer than {limit:,.0f} s for a text of {size:,} characters", _HINT
        ) from None
