"""Measures the held-out loss of quantized models, by the bits of each matrix.

    python -m benchmarks.rounding TEXT MODEL MODEL …

Replaces float32 weights by their rounded values, to measure only the rounding of weights. The last rows are `--dtype
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
from gpt.evaluate import Encoded, evaluate
from gpt.model.quantize import Quantized, to_int4, to_int8

MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
Bits = Callable[[int, str], int]  # block (−1 is the embedding) and matrix → bits


def loss(model: api.LanguageModel, text: str) -> float:
    """Returns the loss on a text in nats per token."""
    ids = model.tokenizer.document(text).astype(np.int64)
    return evaluate(model.model, model.tokenizer, Encoded([ids]), model.compute, None, None).loss


def rounded(model: api.LanguageModel, bits: Bits) -> tuple[api.LanguageModel, int]:
    """Returns a copy with rounded and dequantized matrices, and their quantized size in bytes."""
    found, size = copy.deepcopy(model.model), 0
    places = [(-1, "wte", found.wte)]
    places += [(at, name, block.get_submodule(name)) for at, block in enumerate(found.h) for name in MATRICES]
    for at, name, module in places:
        value: Quantized = (to_int4 if bits(at, name) == 4 else to_int8)(module.weight)
        size += value.levels.nbytes + value.scales.nbytes
        module.weight.data = value.dequantize()
    return api.LanguageModel(found, model.tokenizer, model.compute, model.path), size


def variants(layers: int) -> dict[str, Bits]:
    """Returns the compared choices of bits by name."""

    def all_but(*wider: str, blocks: tuple[int, ...] = (-1,)) -> Bits:
        return lambda at, name: 8 if name in wider or at in blocks else 4

    found = {
        "all int8": lambda at, name: 8,
        "all int4": lambda at, name: 4,
        "int4, the embedding int8 (as in `gpt`)": all_but(),
    }
    found |= {f"… and `{name}` int8": all_but(name) for name in MATRICES}
    found["… and the first and last block int8"] = all_but(blocks=(-1, 0, layers - 1))
    return found


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
        exact = api.load(path, device="cpu", dtype="float32")
        config, base = exact.model.config, loss(exact, text)
        rows = [["float32", f"{base:.4f}", "", ""]]
        for name, bits in variants(config.n_layer).items():
            model, size = rounded(exact, bits)
            found = loss(model, text)
            rows.append([name, f"{found:.4f}", f"{found - base:.4f}", f"{size / 1e6:.2f}"])
        for dtype, few, how in (
            ("int8", 0, ""),
            ("int4", 0, ", many tokens at once"),
            ("int4", 10**9, ", the kernel"),
        ):
            weights._FEW = few
            found = loss(api.load(path, device="cpu", dtype=dtype), text)
            rows.append([f"`--dtype {dtype}`{how}", f"{found:.4f}", f"{found - base:.4f}", ""])
        caption = f"{config.n_layer} blocks of width {config.n_embd}, {config.norm}, {config.mlp}:"
        tables.append(Table(["weights", "loss", "increase", "MB"], rows, caption))
    note = f"Loss over {arguments.characters:,} characters of held-out text in nats per token, and the matrices' size."
    command = "python -m benchmarks.rounding TEXT MODEL MODEL"
    write_section("rounding", measured("Rounded weights", command, [note], tables))


if __name__ == "__main__":
    main()
