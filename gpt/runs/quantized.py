"""The layout of checkpoints with quantized matrices: int8 or int4, in groups of 32.

A matrix (out, in) is stored as two tensors: levels, under gpt's name, and scales. The ``quantization_config`` has no
``quant_method``, so Transformers rejects the folder instead of misreading it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from gpt.config.model import GPTConfig
from gpt.model.params import Parameter, Shape, named_parameters
from gpt.model.quantize import GROUP, Quantized, bits_of_rows, quantize_matrix, to_tensor
from gpt.runs.hf import BITS as BITS
from gpt.runs.tensors import HINT, Deferred
from gpt.system.errors import UserError

SCALES = ".scales"


def _bits_of(parameter: Parameter, bits: int) -> int | None:
    """Returns the bits of a stored parameter, or None if it is not quantized. Embeddings always have 8 bits."""
    if parameter.kind in ("embedding", "unembedding"):
        return 8
    if parameter.kind != "linear":
        return None
    return bits_of_rows(parameter.shape[1], bits)


def layout(config: GPTConfig, bits: int) -> dict[str, tuple[Shape, str]]:
    """Returns each tensor's shape and dtype by its name in the files."""
    tensors: dict[str, tuple[Shape, str]] = {}
    for name, p in named_parameters(config).items():
        match _bits_of(p, bits):
            case 8:
                rows, columns = p.shape
                tensors |= {name: (p.shape, "I8"), name + SCALES: ((rows, -(-columns // GROUP)), "F16")}
            case 4:
                rows, columns = p.shape
                tensors |= {name: ((rows, columns // 2), "U8"), name + SCALES: ((rows, columns // GROUP), "F16")}
            case _:
                tensors[name] = (p.shape, "F32")
    return tensors


def to_stored(config: GPTConfig, bits: int, weights: Mapping[str, Callable[[], Tensor | Quantized]]) -> dict[str, Any]:
    """Returns the files' tensors. A matrix is quantized when its scales are written. All scales precede all levels."""
    table = named_parameters(config)

    pending: dict[str, Quantized] = {}  # matrices with levels still to be written

    def compute(name: str) -> np.ndarray[Any, Any]:
        matrix = name.removesuffix(SCALES)
        value = pending.pop(matrix, None) or quantize_parameter(table[matrix], weights[matrix](), bits)
        if isinstance(value, Quantized) and name.endswith(SCALES):
            pending[matrix] = value
            return value.scales.numpy()
        return (value.levels if isinstance(value, Quantized) else value).numpy()

    return {name: Deferred(shape, partial(compute, name), code) for name, (shape, code) in layout(config, bits).items()}


def quantize_parameter(parameter: Parameter, value: Tensor | Quantized, bits: int) -> Tensor | Quantized:
    """Quantizes a parameter for a checkpoint of ``bits``. A matrix that already has the right bits is unchanged."""
    stored_bits = _bits_of(parameter, bits)
    if isinstance(value, Quantized) and value.bits == stored_bits:
        return value
    exact = to_tensor(value)
    return exact.float() if stored_bits is None else quantize_matrix(exact, stored_bits)


def from_stored(
    config: GPTConfig, bits: int, get: Callable[[str], Tensor], where: str
) -> dict[str, Callable[[], Tensor | Quantized]]:
    """Returns loaders of the parameters by gpt's names. ``get`` returns a tensor by its name in the files. A loader
    raises `UserError` if the scales are not finite."""

    def matrix(name: str) -> Quantized:
        quantized_matrix = Quantized(get(name), get(name + SCALES))
        if not quantized_matrix.scales.isfinite().all():
            raise UserError(f"{where} is damaged: the scales of {name} are not all finite", HINT)
        return quantized_matrix

    return {
        name: partial(get if _bits_of(p, bits) is None else matrix, name)
        for name, p in named_parameters(config).items()
    }
