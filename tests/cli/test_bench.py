"""``gpt bench``, and the bytes read per step."""

import json
from pathlib import Path

import pytest
import torch
from conftest import Gpt

from gpt import api
from gpt.config.device import Compute
from gpt.config.model import PRESETS, GPTConfig
from gpt.decoding import native
from gpt.decoding.weights import prepare, weight_bytes
from gpt.model.decoder import GPT
from gpt.model.params import cache_bytes
from gpt.model.quantize import quantize_model

CPU = Compute(torch.device("cpu"), torch.float32)


def test_bench_json_keys(gpt: Gpt, run_folder: Path) -> None:
    result = gpt("bench", "-m", run_folder, "--json", "--rounds", "1", "--batch", "2")
    values = json.loads(result.out)
    assert list(values) == [
        "name", "parameters", "device", "dtype", "prompt_tokens", "new_tokens", "batch", "rounds",
        "prefill_tokens_per_second", "decode_tokens_per_second", "first_token_seconds", "memory_bytes", "read_bytes",
        "bandwidth_bytes_per_second", "bandwidth_share",
    ]  # fmt: skip
    assert (values["prompt_tokens"], values["new_tokens"], values["batch"]) == (8, 24, 2)
    assert values["first_token_seconds"] * values["prefill_tokens_per_second"] == pytest.approx(16)
    share = values["decode_tokens_per_second"] / 2 * values["read_bytes"] / values["bandwidth_bytes_per_second"]
    assert values["bandwidth_share"] == pytest.approx(share)
    assert values["memory_bytes"] > values["read_bytes"] > 0


def test_bench_of_a_preset_uses_random_weights(gpt: Gpt) -> None:
    output = gpt("bench", "-m", "nano", "-n", "3", "--rounds", "1", "--dtype", "int8").out
    assert "nano" in output
    assert "int8" in output
    assert "GB/s" in output
    result = gpt("bench", "-m", "nano", "-n", "120")
    assert (result.code, "32 + 120 tokens do not fit in the context of 128" in result.err) == (2, True)


@pytest.mark.parametrize("is_preset", [True, False])
def test_bench_measures_what_gpt_sample_runs(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, is_preset: bool
) -> None:
    models: list[GPT] = []
    monkeypatch.setattr("gpt.decoding.bench.measure", lambda model, *rest: models.append(model))
    api.bench("nano" if is_preset else run_folder)
    assert native.is_packed(models[0])


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


def test_impossible_sizes_are_an_error(gpt: Gpt, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, message in (
        (["--batch", "1000000000"], "batch is 1000000000; it must be between 1 and 65,536"),
        (["--rounds", "1000000000000000"], "rounds is 1000000000000000; it must be between 1 and 1,000"),
    ):
        result = gpt("bench", "-m", run_folder, *words)
        assert result.code == 2
        assert message in result.err
    monkeypatch.setattr(Compute, "memory", lambda self: 2**20)
    cache_error = "the KV cache of 65,536 sequences of 32 tokens takes 1.1 GB, but the weights leave 0.0 GB"
    for words in (
        ["bench", "-m", run_folder, "--batch", "65536", "-n", "24"],
        ["sample", "x", "-m", run_folder, "-N", "65536", "--batch", "65536", "-n", "31", "--seed", "1"],
    ):
        result = gpt(*words)
        assert (result.code, result.out) == (2, "")
        assert cache_error in result.err
