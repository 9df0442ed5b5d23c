"""Checkpoints with rounded matrices: int8 a row, or int4 in groups of 32, by our names, (out, in).

``config.json`` has a ``quantization_config`` without a ``quant_method``, for which transformers refuses the folder
instead of reading it as something else. A matrix is the tensor of its name and one of its scales.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import UserError
from gpt.model.params import Parameter, Shape, named_parameters
from gpt.model.quantize import GROUP, Quantized, to_int4, to_int8
from gpt.runs.tensors import HINT, Deferred

KEY = "quantization_config"
SCALES = ".scales"
BITS = {"int8": 8, "int4": 4}  # by --dtype


def describe(bits: int) -> dict[str, Any]:
    """What ``config.json`` says of rounded matrices."""
    return {"format": "gpt", "bits": bits, "group_size": GROUP}


def read_bits(values: Mapping[str, Any]) -> int | None:
    """The bits of the rounded matrices of a ``config.json``; None where it has none. Raises `UserError` for those of
    other programs."""
    said = values.get(KEY)
    if said is None:
        return None
    if not isinstance(said, dict) or said not in [describe(bits) for bits in BITS.values()]:
        raise UserError(f"{KEY} is {said!r:.120}; what gpt export writes alone is read", "take the model in 16 bits")
    bits: int = said["bits"]
    return bits


def _bits_of(parameter: Parameter, bits: int) -> int | None:
    """The bits in which a parameter is stored; None: it is not rounded. Embeddings have 8 at least."""
    if parameter.kind in ("embedding", "unembedding"):
        return 8
    if parameter.kind != "linear":
        return None
    return bits if parameter.shape[1] % GROUP == 0 else 8


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
    """The tensors of the files, rounded when their scales are written; levels are held until they are."""
    places, found = layout(config, bits), dict[str, Any]()
    for name, p in named_parameters(config).items():
        each = _Rounding(partial(lambda p, get: rounded(p, get(), bits), p, weights[name]))
        for part, get in ((name, each.levels), (name + SCALES, each.scales)):
            if part in places:
                found[part] = Deferred(places[part][0], get, places[part][1])
    return found


def rounded(parameter: Parameter, value: Tensor | Quantized, bits: int) -> Tensor | Quantized:
    """A parameter as it is stored with matrices of ``bits``. One that has as many bits already stays as it is."""
    kept = _bits_of(parameter, bits)
    if isinstance(value, Quantized) and value.bits == kept:
        return value
    exact = value.dequantize() if isinstance(value, Quantized) else value.float()
    return exact if kept is None else (to_int8 if kept == 8 else to_int4)(exact)


class _Rounding:
    """A parameter that is rounded once, for its scales, which are written before its levels."""

    def __init__(self, get: Callable[[], Tensor | Quantized]) -> None:
        self.get = get
        self.held: Quantized | None = None

    def scales(self) -> np.ndarray[Any, Any]:
        """The scales; the levels are held."""
        found = self.get()
        assert isinstance(found, Quantized)
        self.held = found
        return found.scales.numpy()

    def levels(self) -> np.ndarray[Any, Any]:
        """The levels, which are let go; of a parameter that is not rounded its numbers."""
        held, self.held = self.held or self.get(), None
        return (held.levels if isinstance(held, Quantized) else held).numpy()


def from_stored(
    config: GPTConfig, bits: int, get: Callable[[str], Tensor], where: str
) -> dict[str, Callable[[], Tensor | Quantized]]:
    """The parameters by our names, each made when it is asked for of the tensors that ``get`` returns: views. Raises
    `UserError` then for scales that are no finite numbers."""

    def rounded(name: str) -> Quantized:
        found = Quantized(get(name), get(name + SCALES))
        if not found.scales.isfinite().all():
            raise UserError(f"{where} is damaged: the scales of {name} are not all finite numbers", HINT)
        return found

    return {
        name: partial(get if _bits_of(p, bits) is None else rounded, name)
        for name, p in named_parameters(config).items()
    }
