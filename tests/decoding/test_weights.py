"""Weights for decoding: their dtypes, and the bytes read per step."""

import json
from pathlib import Path

import torch
from conftest import Gpt
from models import tiny_model

import gpt as library
from gpt.config.device import Compute
from gpt.config.model import PRESETS, GPTConfig
from gpt.decoding.context import Context
from gpt.decoding.native import PackedLinear
from gpt.decoding.weights import prepare, weight_bytes
from gpt.model.decoder import GPT
from gpt.model.params import cache_bytes
from gpt.model.quantize import quantize_model

CPU = Compute(torch.device("cpu"), torch.float32)
BF16 = Compute(torch.device("cpu"), torch.bfloat16)


def logits(model: GPT) -> torch.Tensor:
    idx = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(idx).float()


def test_int8_loss_is_close_to_float32(gpt: Gpt, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes("the cat sat on the mat in Zürich\n".encode() * 20)
    exact, rounded = (
        json.loads(gpt("eval", tmp_path / "t.txt", "-m", run_folder, "--json", "--dtype", dtype).out)["loss"]
        for dtype in ("float32", "int8")
    )
    assert exact != rounded
    assert abs(exact - rounded) < 0.01 * exact
    done = gpt("sample", "the cat", "-m", run_folder, "--dtype", "int8", "-n", "10", "--greedy")
    assert done.code == 0
    assert "int8" in done.err


def test_weights_are_loaded_in_their_final_dtype(run_folder: Path) -> None:
    head = library.load(run_folder, dtype="bfloat16", for_decoding=True).model.lm_head
    assert isinstance(head, PackedLinear)
    assert head.kind == "bfloat16"
    assert library.load(run_folder, dtype="bfloat16").model.wte.weight.dtype == torch.float32
    unprepared = library.load(run_folder)
    assert unprepared.model.lm_head is None
    loaded = library.load(run_folder, for_decoding=True)
    assert torch.allclose(logits(loaded.model), logits(unprepared.model), atol=1e-4)


def test_float32_weights_are_cast_in_each_product() -> None:
    model, ids = tiny_model(40), [[1, 2, 3, 4, 5]]
    context = Context(model, BF16)
    with torch.inference_mode():
        actual = context.logits(context.forward([(context.slots[0], 5)], torch.tensor(ids[0])))
        with BF16.autocast():
            expected = model(torch.tensor(ids)).float()
        assert torch.allclose(actual, expected, atol=1e-2)
        assert (actual - model(torch.tensor(ids))).abs().max() > 1e-2


def test_step_reads_every_matrix_once() -> None:
    """A step reads all weights except the position table."""
    config = GPTConfig(48, 16, 2, 2, 32)
    model = GPT(config)
    all_but_positions = sum(parameter.numel() for parameter in model.parameters()) - 16 * 32
    assert weight_bytes(model, CPU) == 4 * all_but_positions
    assert weight_bytes(model, Compute(CPU.device, torch.bfloat16)) == 2 * all_but_positions
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2) - 16 * 32
    int8_bytes = matrices + 2 * matrices // 32  # Each group of 32 elements has a scale.
    assert weight_bytes(prepare(quantize_model(model, 8), CPU), CPU) == int8_bytes + 4 * (all_but_positions - matrices)
    assert cache_bytes(PRESETS["gpt2"].model, 10, 4) == 2 * 12 * 768 * 10 * 4
