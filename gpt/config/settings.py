"""Validates dataclass fields that are also options, and reads them from TOML and untrusted JSON."""

import dataclasses
import json
import math
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gpt.system.errors import UserError, check_text, did_you_mean

T = TypeVar("T")
Level = Literal["basic", "more"]
MAX_TOML_BYTES = 2**20  # Maximum bytes of a settings file.
MAX_FLOAT32 = 3.4028234663852886e38  # The largest float32.

# Option panels, in help order.
PANELS = (
    "Run", "Model", "Fine-tuning", "Text and tokens", "Reading TEXT", "Length and batch", "Optimizer",
    "Evaluation and checkpoints", "Text", "Sampling", "Beam search", "Weights", "Card", "Page", "Address", "Load",
    "Shape", "Devices", "Training step", "Machine", "Output",
)  # fmt: skip


def without_none(kind: Any) -> Any:
    """Returns ``kind`` for ``kind | None``, and other types unchanged."""
    kinds = [member for member in get_args(kind) if member is not type(None)]
    return kinds[0] if type(None) in get_args(kind) and len(kinds) == 1 else kind


@cache
def _field_types(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(cls)}


def field_types(cls: type[Any]) -> dict[str, Any]:
    """Returns the type of each field of a dataclass."""
    return _field_types(cls)  # type: ignore[arg-type]  # Classes are hashable.


def check_options(config: Any) -> None:
    """Raises `UserError` for a field of the wrong type or out of bounds. Converts paths to strings."""
    hints = field_types(type(config))
    for entry in dataclasses.fields(config):
        name, value, kind = entry.name, getattr(config, entry.name), without_none(hints[entry.name])
        if "help" in entry.metadata:  # Only options have help.
            name = name.replace("_", "-")
        if value is None and kind is not hints[entry.name]:
            continue
        if kind is str and isinstance(value, PurePath):
            value = str(value)
            object.__setattr__(config, entry.name, value)
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                raise UserError(f'there is no {name} "{value}"', did_you_mean(str(value), get_args(kind)))
            continue
        if kind == tuple[str, ...]:  # A repeatable option.
            object.__setattr__(config, entry.name, _check_strings(name, value))
            continue
        allowed_types = (int, float) if kind is float else (get_origin(kind) or kind,)
        if type(value) not in allowed_types:
            raise UserError(f"{name} is {reprlib.repr(value)}; it must be of type {kind.__name__}")
        _check_bounds(name, value, entry.metadata.get("low"), entry.metadata.get("high"))


def _check_strings(name: str, value: Any) -> tuple[str, ...]:
    values = (value,) if isinstance(value, (str, PurePath)) else value
    words = tuple(str(word) if isinstance(word, PurePath) else word for word in values)
    if not all(isinstance(word, str) and word for word in words):
        raise UserError(f"{name} is {'empty' if '' in words else repr(value)}; it must be one or more strings")
    for word in words:
        check_text(name, word)
    return words


def _check_bounds(name: str, value: float, low: float | None, high: float | None) -> None:
    if low is None or high is None or low <= value <= high:
        return
    bounds = f"be between {low:g} and {high:,}" if high < 2**53 else f"be {low:g} or more"
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
    metavar: str | None = None,
    level: Level = "more",
    low: float | None = None,
    high: float = 2**53,
) -> Any:
    """Returns a field for a setting that is also an option. ``shown`` describes the default on the help page. ``level``
    decides where the option is listed: ``--help`` (basic), or only ``--help-all`` (more)."""
    metadata = {
        "help": help, "panel": panel, "flags": flags, "shown": shown, "metavar": metavar, "level": level, "low": low,
        "high": high,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def bounded(low: float, high: float, default: Any = dataclasses.MISSING) -> Any:
    """Returns a field for a bounded number that is not an option."""
    return field(default=default, metadata={"low": low, "high": high})


def from_dict(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Returns ``cls(**values)``. For an unknown key, raises `UserError` naming ``where``, with a suggestion."""
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise UserError(f'{where}: unknown key "{key}"', did_you_mean(key, known))
    try:
        return cls(**values)
    except TypeError as error:
        raise UserError(f"{where}: {error}") from None


@dataclass(frozen=True)
class Within:
    """Bounds of a number for `checked`, such as ``Annotated[int, Within(0)]``."""

    low: float
    high: float = 2**53


Count = Annotated[int, Within(0)]
Positive = Annotated[int, Within(1)]
Amount = Annotated[float, Within(0)]


def checked(cls: type[T], values: Any, where: str) -> T:
    """Builds a dataclass from untrusted JSON. Fields are numbers, strings, nested dataclasses, or lists and tables of
    these. Checks types and bounds, and that numbers are finite in float32. Raises `UserError` naming
    ``where``."""
    if not isinstance(values, dict):
        raise UserError(f"{where} is damaged: it is not a JSON object")
    hints = field_types(cls)
    arguments = {}
    for key, value in values.items():
        if key not in hints:
            raise UserError(f"{where} is damaged: it has a key {key[:40]!r}")
        if not _has_type(value, hints[key]):
            raise UserError(f"{where} is damaged: {key} is {reprlib.repr(value)}")
        arguments[key] = _convert(value, hints[key], where)
    for entry in dataclasses.fields(cls):  # type: ignore[arg-type]
        if entry.name not in arguments and entry.default is entry.default_factory is dataclasses.MISSING:
            raise UserError(f"{where} is damaged: it has no {entry.name}")
    try:
        return cls(**arguments)
    except UserError as error:
        raise UserError(f"{where} is damaged: {error.message}", error.hint) from None


def _convert(value: Any, kind: Any, where: str) -> Any:
    """Converts tables in a value to dataclasses."""
    if not isinstance(value, (dict, list)):
        return value
    inner = without_none(kind)
    if dataclasses.is_dataclass(inner) and isinstance(inner, type) and isinstance(value, dict):
        return checked(inner, value, where)
    if get_origin(inner) in (list, tuple) and isinstance(value, list):
        return get_origin(inner)(_convert(item, get_args(inner)[0], where) for item in value)
    return value


def _has_type(value: Any, kind: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and abs(value) <= MAX_FLOAT32
    if kind is int:
        return type(value) is int and abs(value) < 2**63
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _has_type(value, kinds[0]) and kinds[1].low <= value <= kinds[1].high
    if origin in (Union, UnionType):
        return any(_has_type(value, item) for item in kinds)
    if origin is Literal:
        return value in kinds
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(_has_type(item, kinds[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_has_type(item, kinds[1]) for item in value.values())
    if dataclasses.is_dataclass(kind):
        return isinstance(value, dict)  # `_convert` checks the fields of the dataclass.
    return isinstance(value, kind) and (kind is bool or type(value) is not bool)


def to_toml(values: Mapping[str, Any]) -> str:
    """Returns a flat table as TOML, without None values, which TOML lacks."""
    # JSON strings, numbers and booleans are valid TOML, except that json does not escape DEL.
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines).replace("\x7f", "\\u007F") + "\n"


def parse_toml(data: bytes, where: str) -> dict[str, Any]:
    """Parses TOML. Raises `UserError` naming ``where``."""
    try:
        return tomllib.loads(data.decode("utf-8-sig").replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:  # Includes invalid UTF-8 and too many digits.
        raise UserError(f"{where} is not TOML: {error}", "gpt train --print-config prints an example") from None
