"""The layout of checkpoints with quantized matrices: int8 per row, or int4 in groups of 32.

A matrix (out, in) has a tensor of levels, under gpt's name, and one of scales. The ``quantization_config`` has no
``quant_method``, so Transformers rejects the folder instead of misreading it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import UserError
from gpt.model.params import Parameter, Shape, named_parameters
from gpt.model.quantize import GROUP, Quantized, bits_of_rows, round_matrix, whole
from gpt.runs.tensors import HINT, Deferred

KEY = "quantization_config"
SCALES = ".scales"
BITS = {"int8": 8, "int4": 4}  # by --dtype


def describe(bits: int) -> dict[str, Any]:
    """Returns the ``config.json`` entry for quantized matrices."""
    return {"format": "gpt", "bits": bits, "group_size": GROUP}


def read_bits(values: Mapping[str, Any]) -> int | None:
    """Returns the bits of quantized matrices from ``config.json``; None if they are not quantized by `to_stored`."""
    return next((bits for bits in BITS.values() if values.get(KEY) == describe(bits)), None)


def of_others(values: Mapping[str, Any]) -> str:
    """Returns the ``config.json`` entry of another program's quantization; empty if there is none."""
    said = [f"{key} is {values[key]!r:.120}" for key in (KEY, "compression_config") if values.get(key) is not None]
    return said[0] if said and read_bits(values) is None else ""


def _bits_of(parameter: Parameter, bits: int) -> int | None:
    """Returns the bits of a stored parameter; None if it is not quantized. Embeddings have at least 8."""
    if parameter.kind in ("embedding", "unembedding"):
        return 8
    if parameter.kind != "linear":
        return None
    return bits_of_rows(parameter.shape[1], bits)


def layout(config: GPTConfig, bits: int) -> dict[str, tuple[Shape, str]]:
    """Returns each tensor's shape and dtype by its name in the files."""
    found: dict[str, tuple[Shape, str]] = {}
    for name, p in named_parameters(config).items():
        match _bits_of(p, bits):
            case 8:
                found |= {name: (p.shape, "I8"), name + SCALES: (p.shape[:1], "F32")}
            case 4:
                rows, columns = p.shape
                found |= {name: ((rows, columns // 2), "U8"), name + SCALES: ((rows, columns // GROUP), "F16")}
            case _:
                found[name] = (p.shape, "F32")
    return found


def to_stored(config: GPTConfig, bits: int, weights: Mapping[str, Callable[[], Tensor | Quantized]]) -> dict[str, Any]:
    """Returns the files' tensors. A matrix is quantized when its scales are written; all scales precede the levels."""
    table = named_parameters(config)

    held: dict[str, Quantized] = {}  # levels still to be written

    def part(name: str) -> np.ndarray[Any, Any]:
        matrix = name.removesuffix(SCALES)
        value = held.pop(matrix, None) or rounded(table[matrix], weights[matrix](), bits)
        if isinstance(value, Quantized) and name.endswith(SCALES):
            held[matrix] = value
            return value.scales.numpy()
        return (value.levels if isinstance(value, Quantized) else value).numpy()

    return {name: Deferred(shape, partial(part, name), code) for name, (shape, code) in layout(config, bits).items()}


def rounded(parameter: Parameter, value: Tensor | Quantized, bits: int) -> Tensor | Quantized:
    """Quantizes a parameter for a checkpoint of ``bits``. A matrix that already has the right bits is unchanged."""
    kept = _bits_of(parameter, bits)
    if isinstance(value, Quantized) and value.bits == kept:
        return value
    exact = whole(value)
    return exact.float() if kept is None else round_matrix(exact, kept)


def from_stored(
    config: GPTConfig, bits: int, get: Callable[[str], Tensor], where: str
) -> dict[str, Callable[[], Tensor | Quantized]]:
    """Returns loaders of the parameters by gpt's names. ``get`` returns a tensor of the files. A loader raises
    `UserError` if the scales are not finite."""

    def matrix(name: str) -> Quantized:
        found = Quantized(get(name), get(name + SCALES))
        if not found.scales.isfinite().all():
            raise UserError(f"{where} is damaged: the scales of {name} are not all finite", HINT)
        return found

    return {
        name: partial(get if _bits_of(p, bits) is None else matrix, name)
        for name, p in named_parameters(config).items()
    }
