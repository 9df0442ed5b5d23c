"""``gpt bench``: what it tells, and what a step reads."""

import json
from pathlib import Path

import pytest
import torch
from conftest import Gpt

from gpt.config import PRESETS, GPTConfig
from gpt.decoding.weights import prepare, weight_bytes
from gpt.device import Compute
from gpt.model.decoder import GPT
from gpt.model.params import cache_bytes
from gpt.model.quantize import round_matrices

CPU = Compute(torch.device("cpu"), torch.float32)


def test_json_has_every_figure(gpt: Gpt, run_folder: Path) -> None:
    done = gpt("bench", "-m", run_folder, "--json", "--rounds", "1", "--batch", "2")
    values = json.loads(done.out)
    assert list(values) == [
        "name", "parameters", "device", "dtype", "compiled", "prompt_tokens", "new_tokens", "batch", "rounds",
        "prefill_tokens_per_second", "decode_tokens_per_second", "first_token_seconds", "memory_bytes", "read_bytes",
        "bandwidth_bytes_per_second", "bandwidth_share",
    ]  # fmt: skip
    assert (values["prompt_tokens"], values["new_tokens"], values["batch"]) == (8, 24, 2)
    assert values["first_token_seconds"] * values["prefill_tokens_per_second"] == pytest.approx(16)
    share = values["decode_tokens_per_second"] / 2 * values["read_bytes"] / values["bandwidth_bytes_per_second"]
    assert values["bandwidth_share"] == pytest.approx(share)
    assert values["memory_bytes"] > values["read_bytes"] > 0


def test_a_preset_gets_random_weights(gpt: Gpt) -> None:
    shown = gpt("bench", "-m", "nano", "-n", "3", "--rounds", "1", "--dtype", "int8").out
    assert "nano" in shown
    assert "int8" in shown
    assert "GB/s" in shown
    done = gpt("bench", "-m", "nano", "-n", "60")
    assert (done.code, "16 + 60 tokens do not fit in the context of 64" in done.err) == (2, True)


def test_a_step_reads_each_matrix_once() -> None:
    """GPT-2 124M: all but the table of positions, in each arithmetic."""
    config = GPTConfig(50, 16, 2, 2, 8)
    model = GPT(config)
    all_but_positions = sum(parameter.numel() for parameter in model.parameters()) - 16 * 8
    assert weight_bytes(model, CPU) == 4 * all_but_positions
    assert weight_bytes(model, Compute(CPU.device, torch.bfloat16)) == 2 * all_but_positions
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2) - 16 * 8
    assert weight_bytes(prepare(round_matrices(model, 8), CPU), CPU) == matrices + 4 * (all_but_positions - matrices)
    assert cache_bytes(PRESETS["gpt2"].model, 10, 4) == 2 * 12 * 768 * 10 * 4


def test_what_no_machine_holds_is_refused_at_once(gpt: Gpt, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, said in (
        (["--batch", "1000000000"], "batch is 1000000000; it must be between 1 and 65,536"),
        (["--rounds", "1000000000000000"], "rounds is 1000000000000000; it must be between 1 and 1,000"),
    ):
        done = gpt("bench", "-m", run_folder, *words)
        assert done.code == 2
        assert said in done.err
    monkeypatch.setattr(Compute, "memory", lambda self: 2**20)
    kept = "the KV cache of 65,536 sequences of 32 tokens takes 1.1 GB, but the weights leave 0.0 GB"
    for words in (
        ["bench", "-m", run_folder, "--batch", "65536", "-n", "24"],
        ["sample", "x", "-m", run_folder, "-N", "65536", "--batch", "65536", "-n", "31", "--seed", "1"],
    ):
        done = gpt(*words)
        assert (done.code, done.out) == (2, "")
        assert kept in done.err
