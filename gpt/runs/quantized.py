"""The layout of checkpoints with rounded matrices: int8 by rows, or int4 in groups of 32.

A matrix, (out, in), is a tensor of levels under our name and one of its scales. ``config.json`` has a
``quantization_config`` without a ``quant_method``: transformers refuses such a folder instead of misreading it.
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
    """The entry of ``config.json`` for rounded matrices."""
    return {"format": "gpt", "bits": bits, "group_size": GROUP}


def read_bits(values: Mapping[str, Any]) -> int | None:
    """The bits of the matrices that `to_stored` has rounded, as a ``config.json`` says; None where it does not."""
    return next((bits for bits in BITS.values() if values.get(KEY) == describe(bits)), None)


def of_others(values: Mapping[str, Any]) -> str:
    """What a ``config.json`` says of matrices that another program has rounded; empty where it says nothing."""
    said = [f"{key} is {values[key]!r:.120}" for key in (KEY, "compression_config") if values.get(key) is not None]
    return said[0] if said and read_bits(values) is None else ""


def _bits_of(parameter: Parameter, bits: int) -> int | None:
    """The bits in which a parameter is stored; None: it is not rounded. Embeddings have 8 at least."""
    if parameter.kind in ("embedding", "unembedding"):
        return 8
    if parameter.kind != "linear":
        return None
    return bits_of_rows(parameter.shape[1], bits)


def layout(config: GPTConfig, bits: int) -> dict[str, tuple[Shape, str]]:
    """The shape and dtype of each tensor by its name in the files."""
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
    """The tensors of the files. A matrix is rounded when its scales are written, which are before all levels."""
    table = named_parameters(config)

    held: dict[str, Quantized] = {}  # whose levels are still to be written

    def part(name: str) -> np.ndarray[Any, Any]:
        matrix = name.removesuffix(SCALES)
        value = held.pop(matrix, None) or rounded(table[matrix], weights[matrix](), bits)
        if isinstance(value, Quantized) and name.endswith(SCALES):
            held[matrix] = value
            return value.scales.numpy()
        return (value.levels if isinstance(value, Quantized) else value).numpy()

    return {name: Deferred(shape, partial(part, name), code) for name, (shape, code) in layout(config, bits).items()}


def rounded(parameter: Parameter, value: Tensor | Quantized, bits: int) -> Tensor | Quantized:
    """A parameter as it is stored beside matrices of ``bits``. One that has as many bits already stays as it is."""
    kept = _bits_of(parameter, bits)
    if isinstance(value, Quantized) and value.bits == kept:
        return value
    exact = whole(value)
    return exact.float() if kept is None else round_matrix(exact, kept)


def from_stored(
    config: GPTConfig, bits: int, get: Callable[[str], Tensor], where: str
) -> dict[str, Callable[[], Tensor | Quantized]]:
    """The parameters by our names, each made when it is asked for, of the files' tensors, which ``get`` returns. Raises
    `UserError` then for scales that are not finite."""

    def matrix(name: str) -> Quantized:
        found = Quantized(get(name), get(name + SCALES))
        if not found.scales.isfinite().all():
            raise UserError(f"{where} is damaged: the scales of {name} are not all finite", HINT)
        return found

    return {
        name: partial(get if _bits_of(p, bits) is None else matrix, name)
        for name, p in named_parameters(config).items()
    }
