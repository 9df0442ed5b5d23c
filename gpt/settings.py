"""What a setting is: a field of a dataclass that is also an option, checked, and read and written as TOML."""

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from gpt.errors import UserError, check_text, did_you_mean

T = TypeVar("T")
MOST_TOML = 2**20  # bytes


def without_none(kind: Any) -> Any:
    """What ``kind | None`` is where there is a value; another kind is itself."""
    kinds = [each for each in get_args(kind) if each is not type(None)]
    return kinds[0] if type(None) in get_args(kind) and len(kinds) == 1 else kind


def check_options(config: Any) -> None:
    """Raises `UserError` for a value that is not of its option's type, not finite, or below its least one."""
    hints = get_type_hints(type(config))
    for each in dataclasses.fields(config):
        name, value, kind = each.name.replace("_", "-"), getattr(config, each.name), without_none(hints[each.name])
        low, high = each.metadata["low"], each.metadata["high"]
        if value is None and kind is not hints[each.name]:
            continue
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                raise UserError(f'there is no {name} "{value}"', did_you_mean(str(value), get_args(kind)))
            continue
        if get_origin(kind) is tuple:  # an option that may be repeated
            words = (value,) if isinstance(value, str) else tuple(value)
            if not all(isinstance(word, str) and word for word in words):
                raise UserError(f"{name} is {'empty' if '' in words else repr(value)}; it must be a text, or several")
            for word in words:
                check_text(name, word)
            object.__setattr__(config, each.name, words)
            continue
        fits = (int, float) if kind is float else (kind,)
        if type(value) not in fits:
            raise UserError(f"{name} is {value!r}; it must be of the kind {kind.__name__}")
        if low is not None and not low <= value <= high:
            bounds = f"lie between {low:g} and {high:,}" if high < 2**53 else f"be {low:g} or more"
            if isinstance(value, float) and not math.isfinite(value):
                bounds += ", and finite"
            elif value > high >= 2**53:
                bounds = f"be at most {high:,.0f}"
            raise UserError(f"{name} is {value}; it must {bounds}")


def option(
    default: Any,
    help: str,
    *,
    panel: str,
    flags: tuple[str, ...] = (),
    shown: str = "",
    low: float | None = None,
    high: float = 2**53,
) -> Any:
    """A setting that is also an option: its help, the panel it is listed in, further flags, how its default reads,
    and its bounds."""
    meta = {"help": help, "panel": panel, "flags": flags, "shown": shown, "low": low, "high": high}
    return field(default=default, metadata=meta)


def from_dict(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """``cls(**values)`` for a dataclass; an unknown key is a `UserError` with a suggestion, naming ``where``."""
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise UserError(f'{where}: unknown key "{key}"', did_you_mean(key, known))
    try:
        return cls(**values)
    except TypeError as error:
        raise UserError(f"{where}: {error}") from None


def to_toml(values: Mapping[str, Any]) -> str:
    """A flat table of strings, numbers and booleans as TOML; ``None`` is left out, since TOML has no word for it."""
    # A JSON string, number or boolean is a TOML one too (DEL apart, which json leaves bare).
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines).replace("\x7f", "\\u007F") + "\n"


def parse_toml(data: bytes, where: str) -> dict[str, Any]:
    """The table in the bytes of a TOML file; `UserError` naming ``where`` for what is none."""
    try:
        return tomllib.loads(data.decode("utf-8").replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are not UTF-8, numbers of many digits
        raise UserError(f"{where} is not TOML: {error}", "gpt train --print-config shows the form") from None
