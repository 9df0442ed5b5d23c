"""Adapters: they alone train and are saved, they come back with their base, and merged they compute the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Gpt, make_text, one_line_of_what_and_what_next
from safetensors.torch import load_file, save_file

import gpt as library
from gpt import events
from gpt.config import GPTConfig
from gpt.model import lora
from gpt.model.decoder import GPT
from gpt.runs import folder

LORA: dict[str, Any] = {"lora_rank": 4, "dtype": "float32", "sample_every": 0}
WORDS = ("--lora-rank", "4", "--steps", "3", "--dtype", "float32")


@pytest.fixture
def other(workdir: Path) -> Path:
    path = workdir / "other.txt"
    path.write_bytes(make_text(2500, seed=5).encode())
    return path


@pytest.fixture
def base(run_folder: Path, workdir: Path) -> Path:
    """A checkpoint of our own to move about."""
    return Path(shutil.copytree(folder.find_checkpoint(str(run_folder)), workdir / "base"))


def scrambled(config: GPTConfig, rank: int) -> GPT:
    """A model whose adapters do something."""
    torch.manual_seed(0)
    model = GPT(config)
    for parameter in lora.adapt(model, rank, 2.0 * rank):
        parameter.data.normal_(0, 0.2)
    return model.eval()


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_merged_weights_give_the_same_logits(arch: Any) -> None:
    config = GPTConfig.of(arch, 50, 16, 2, 2, 16)
    model = scrambled(config, 3)
    plain = GPT(config)
    plain.load_state_dict({name: p for name, p in model.state_dict().items() if not name.endswith((".a", ".b"))})
    ids = torch.arange(16)[None]
    with torch.no_grad():
        before = plain(ids)
        lora.merge(plain, lora.adapters(model), 2.0)
        assert torch.allclose(plain(ids), model(ids), atol=1e-5)
        assert not torch.allclose(before, model(ids), atol=1e-2)


def test_a_map_is_w_and_a_scaled_product() -> None:
    linear = torch.nn.Linear(5, 7)
    adapted = lora.LowRank(linear, 2, 0.5)
    x = torch.randn(3, 5)
    assert torch.equal(adapted(x), linear(x))  # B is 0 at first
    adapted.b.data.normal_()
    weight = linear.weight + 0.5 * adapted.b @ adapted.a
    assert torch.allclose(adapted(x), x @ weight.T + linear.bias, atol=1e-6)


def test_adapters_alone_train() -> None:
    model = scrambled(GPTConfig(50, 16, 2, 2, 16), 3)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(lora.adapters(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in lora.adapters(model).items()}
    assert shapes == lora.adapter_shapes(model.config, 3)
    assert len(shapes) == 2 * 4 * 2


def test_a_run_of_adapters(base: Path, other: Path) -> None:
    heard: list[Any] = []
    sums = folder.weight_checksums(base)
    result = library.train(other, init=base, steps=30, merge_lora=True, listen=heard.append, **LORA)
    assert folder.weight_checksums(base) == sums
    first = next(event.val_loss for event in heard if isinstance(event, events.EvalEvent))
    assert result.val_loss < first
    assert not (result.checkpoint / "model.safetensors").exists()
    saved = load_file(result.checkpoint / "adapter.safetensors")
    assert set(saved) == set(lora.adapter_shapes(library.load(base).model.config, 4))
    record = json.loads((result.checkpoint / "gpt.json").read_text())["adapter"]
    assert record == {"rank": 4, "alpha": 8.0, "base": str(base), "sha256": sums}
    assert json.loads((result.run / "run.json").read_text())["resolved"]["optimizer"] == "adamw"

    tuned, merged = library.load(result.run), library.load(result.run / "merged")
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.allclose(tuned.model(ids), merged.model(ids), atol=1e-5)
        assert not torch.allclose(tuned.model(ids), library.load(base).model(ids), atol=1e-3)
    weights = load_file(base / "model.safetensors")
    by_hand = weights["transformer.h.0.mlp.c_fc.weight"] + 2 * (saved["h.0.mlp.c_fc.b"] @ saved["h.0.mlp.c_fc.a"]).T
    assert torch.allclose(
        load_file(result.run / "merged" / "model.safetensors")["transformer.h.0.mlp.c_fc.weight"], by_hand, atol=1e-6
    )


def test_the_merged_model_needs_no_base(gpt: Gpt, base: Path, other: Path) -> None:
    assert gpt("train", other, "--init", base, *WORDS, "--merge-lora").code == 0
    from_run = gpt("sample", "the", "-m", "runs/other", "--greedy").out
    assert gpt("sample", "the", "-m", "runs/other:latest", "--greedy").code == 0
    assert json.loads(gpt("params", "runs/other", "--json").out)["config"]["n_embd"] == 32
    base.rename("elsewhere")
    one_line_of_what_and_what_next(gpt("sample", "the", "-m", "runs/other"), "base, which is not there")
    assert gpt("sample", "the", "-m", "runs/other/merged", "--greedy").out == from_run


def test_a_base_that_changed_is_refused(gpt: Gpt, base: Path, other: Path) -> None:
    assert gpt("train", other, "--init", base, *WORDS).code == 0
    weights = load_file(base / "model.safetensors")
    weights["transformer.ln_f.bias"] += 1
    save_file(weights, base / "model.safetensors")
    one_line_of_what_and_what_next(gpt("sample", "the", "-m", "runs/other"), "base, whose weights are others now")


def test_adapters_on_adapters_and_with_a_shorter_context(base: Path, other: Path) -> None:
    one = library.train(other, init=base, steps=4, block_size=16, **LORA)
    two = library.train(other, init=one.run, steps=4, out="two", **LORA)
    model = library.load(two.run).model
    assert model.config.block_size == 16
    whole = library.train(other, init=two.run, steps=1, lr=0.0, out="whole", dtype="float32")
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.allclose(library.load(whole.run).model(ids), model(ids), atol=1e-6)


def test_adapters_that_do_not_fit(gpt: Gpt, base: Path, other: Path) -> None:
    done = gpt("train", other, "--init", base, "--lora-rank", "33")
    one_line_of_what_and_what_next(done, "lora-rank 33 is more than the model's width, 32")
    result = library.train(other, init=base, steps=1, **LORA)
    save_file({"x": torch.zeros(1)}, result.checkpoint / "adapter.safetensors")
    one_line_of_what_and_what_next(gpt("sample", "-m", result.run), "its sha256 is not the one it was saved with")
    (result.checkpoint / "checksums.json").unlink()
    folder.write_checksums(result.checkpoint)
    one_line_of_what_and_what_next(
        gpt("sample", "-m", result.run), "has a tensor x that the model in config.json has no"
    )
