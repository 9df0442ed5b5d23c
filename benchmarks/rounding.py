"""Measures the held-out loss of quantized models, by the bits of each matrix.

    python -m benchmarks.rounding TEXT MODEL MODEL …

Rounds the weights but computes in float32, to measure only the rounding of weights. The last rows are `--dtype
int8` and `int4`, which also round activations.
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np

import gpt.api as api
from benchmarks.results import Table, measured, write_section
from gpt.decoding import weights
from gpt.insight.evaluate import Encoded, evaluate
from gpt.model.quantize import Quantized, to_int4, to_int8

MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
Bits = Callable[[int, str], int]  # bits of a matrix, given its block (−1: embedding) and name


def loss(model: api.LanguageModel, text: str) -> float:
    """Returns the loss on a text in nats per token."""
    ids = model.tokenizer.document(text).astype(np.int64)
    return evaluate(model.model, model.tokenizer, Encoded([ids]), model.compute, None, None).loss


def quantize_matrices(model: api.LanguageModel, bits: Bits) -> tuple[api.LanguageModel, int]:
    """Returns a copy with rounded and dequantized matrices, and their quantized size in bytes."""
    model_copy, size = copy.deepcopy(model.model), 0
    matrices = [(-1, "wte", model_copy.wte)]
    matrices += [
        (layer, name, block.get_submodule(name)) for layer, block in enumerate(model_copy.h) for name in MATRICES
    ]
    for layer, name, module in matrices:
        value: Quantized = (to_int4 if bits(layer, name) == 4 else to_int8)(module.weight)
        size += value.levels.nbytes + value.scales.nbytes
        module.weight.data = value.dequantize()
    return api.LanguageModel(model_copy, model.tokenizer, model.compute, model.path), size


def bit_choices(layers: int) -> dict[str, Bits]:
    """Returns the choices of bits to compare, by name."""

    def int4_except(*int8_matrices: str, blocks: tuple[int, ...] = (-1,)) -> Bits:
        return lambda at, name: 8 if name in int8_matrices or at in blocks else 4

    choices = {
        "all int8": lambda at, name: 8,
        "all int4": lambda at, name: 4,
        "int4, the embedding int8 (as in `gpt`)": int4_except(),
    }
    choices |= {f"… and `{name}` int8": int4_except(name) for name in MATRICES}
    choices["… and the first and last block int8"] = int4_except(blocks=(-1, 0, layers - 1))
    return choices


def main() -> None:
    """Measures and writes the section."""
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--characters", type=int, default=60_000, help="length of the text")
    arguments = parser.parse_args()
    text = Path(arguments.text).read_text(encoding="utf-8")[: arguments.characters]
    tables = []
    for path in arguments.models:
        base_model = api.load(path, device="cpu", dtype="float32")
        config, base_loss = base_model.model.config, loss(base_model, text)
        rows = [["float32", f"{base_loss:.4f}", "", ""]]
        for name, bits in bit_choices(config.n_layer).items():
            model, size = quantize_matrices(base_model, bits)
            new_loss = loss(model, text)
            rows.append([name, f"{new_loss:.4f}", f"{new_loss - base_loss:.4f}", f"{size / 1e6:.2f}"])
        for dtype, kernel_limit, suffix in (
            ("int8", 0, ""),
            ("int4", 0, ", many tokens at once"),
            ("int4", 10**9, ", the kernel"),
        ):
            weights._MAX_INT4_POSITIONS = kernel_limit
            new_loss = loss(api.load(path, device="cpu", dtype=dtype), text)
            rows.append([f"`--dtype {dtype}`{suffix}", f"{new_loss:.4f}", f"{new_loss - base_loss:.4f}", ""])
        caption = f"{config.n_layer} blocks of width {config.n_embd}, {config.norm}, {config.mlp}:"
        tables.append(Table(["weights", "loss", "increase", "MB"], rows, caption))
    note = f"Loss over {arguments.characters:,} characters of held-out text in nats per token, and the matrices' size."
    command = "python -m benchmarks.rounding TEXT MODEL MODEL"
    write_section("rounding", measured("Rounded weights", command, [note], tables))


if __name__ == "__main__":
    main()
