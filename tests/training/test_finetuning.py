"""Fine-tuning: from any checkpoint, its tokenizer taken along."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Gpt, make_text, one_line_of_what_and_what_next, slow

import gpt as library
from gpt import events
from gpt.config import PRESETS, GPTConfig, TrainConfig
from gpt.files import file_sha256
from gpt.model.decoder import GPT
from gpt.model.params import nearest_preset
from gpt.runs import checkpoint
from gpt.text.tokenizer import bytes_tokenizer
from gpt.training import finetune
from gpt.training.recipe import auto_optimizer

CPU = torch.device("cpu")
QUIET: dict[str, Any] = {"dtype": "float32", "sample_every": 0}


def heard_by(text: Path, **settings: Any) -> tuple[Any, list[Any]]:
    heard: list[Any] = []
    return library.train(text, listen=heard.append, **{**QUIET, **settings}), heard


@pytest.fixture
def other(workdir: Path) -> Path:
    """A text to go on with."""
    path = workdir / "other.txt"
    path.write_bytes(make_text(2500, seed=5).encode())
    return path


def evals(heard: list[Any]) -> dict[int, float]:
    return {event.step: event.val_loss for event in heard if isinstance(event, events.EvalEvent)}


def test_it_goes_on_from_the_weights(run_folder: Path, other: Path) -> None:
    base = library.load(run_folder)
    result, heard = heard_by(other, init=run_folder, steps=12, n_layer=2, vocab_size=400)  # as the model has it
    tuned = library.load(result.run)
    assert tuned.model.config == base.model.config
    assert tuned.tokenizer.fingerprint == base.tokenizer.fingerprint
    losses = evals(heard)
    assert min(losses) == 0  # measured before the first step
    data = other.read_bytes()
    held_out = data[len(data) - round(len(data) * 0.1) :].decode()
    assert losses[0] == pytest.approx(base.loss(held_out), rel=1e-5)
    assert result.val_loss < losses[0]
    assert any("before the first step" in event.text for event in heard if isinstance(event, events.Note))
    record = json.loads((result.run / "run.json").read_text())
    assert record["init"]["sha256"] == {"model.safetensors": file_sha256(base.path / "model.safetensors")}
    assert record["init"]["path"] == str(base.path)
    assert record["resolved"]["lr"] == pytest.approx(4e-3)  # half of nano's with Muon


@pytest.mark.slow
def test_the_default_length_is_three_times_the_text(run_folder: Path, other: Path) -> None:
    result, _ = heard_by(other, init=run_folder, eval_every=1000)
    tokens = json.loads((result.run / "run.json").read_text())["tokens"]["train"]
    assert result.tokens_seen == pytest.approx(3 * tokens, rel=0.05)
    assert result.steps >= 80


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
def test_a_shorter_context_cuts_the_table(workdir: Path, other: Path, positions: Any) -> None:
    arch: Any = "modern" if positions == "rotary" else "gpt2"
    config = GPTConfig.of(arch, 257, 32, 1, 2, 16, positions=positions)
    model = GPT(config).eval()
    checkpoint.save(workdir / "base", model, checkpoint.TokenizerFiles(bytes_tokenizer(), config), {"step": 1})
    result, _ = heard_by(other, init="base", block_size=16, steps=1, lr=0.0, dropout=0.1)
    tuned = library.load(result.run).model
    context = 32 if positions == "rotary" else 16  # without a table it stays as it was
    assert (tuned.config.block_size, tuned.config.dropout, tuned.config.layout) == (context, 0.1, config.layout)
    assert json.loads((result.run / "run.json").read_text())["resolved"]["model"]["block_size"] == 16
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.allclose(tuned(ids), model(ids), atol=1e-6)


def test_a_gpt2_folder_of_transformers(workdir: Path, other: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=257, n_layer=1, n_head=2, n_embd=16, n_positions=32)).save_pretrained(
        "theirs"
    )
    files = checkpoint.TokenizerFiles(bytes_tokenizer(), GPTConfig(257, 32, 1, 2, 16)).files
    (workdir / "theirs" / "tokenizer.json").write_bytes(files["tokenizer.json"])
    result, heard = heard_by(other, init="theirs", steps=8)
    assert result.val_loss < evals(heard)[0]
    assert GPT2LMHeadModel.from_pretrained(result.checkpoint).config.n_positions == 32


@pytest.mark.parametrize("rank", [None, slow(2)])
def test_a_long_context_is_not_the_length_of_training(workdir: Path, rank: int | None) -> None:
    """A llama is trained on 1,024 tokens at once, keeps its context, resumes, and is a model to transformers."""
    from transformers import AutoModelForCausalLM

    config = GPTConfig.of("modern", 257, 4096, 1, 2, 16, qk_norm=False)
    model = GPT(config).eval()
    checkpoint.save(workdir / "base", model, checkpoint.TokenizerFiles(bytes_tokenizer(), config), {"step": 1})
    Path("long.txt").write_bytes(make_text(6000).encode())
    adapters = {"lora_rank": rank, "merge_lora": bool(rank)}
    result, heard = heard_by(Path("long.txt"), init="base", steps=2, batch_tokens=1024, **adapters)
    notes = [event.text for event in heard if isinstance(event, events.Note)]
    assert any("training on sequences of 1,024 tokens; the model's context is 4,096" in note for note in notes)
    assert json.loads((result.run / "run.json").read_text())["resolved"]["model"]["block_size"] == 1024
    assert library.resume(result.run, steps=3).steps == 3
    tuned = library.load(result.run).model
    assert tuned.config == config
    theirs = AutoModelForCausalLM.from_pretrained(result.run / "merged" if rank else result.checkpoint)
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert theirs.config.max_position_embeddings == 4096
        if not rank:
            tuned = library.load(result.checkpoint).model
        assert torch.allclose(theirs.eval()(ids).logits, tuned(ids), atol=1e-4)
    result, _ = heard_by(Path("long.txt"), init="base", steps=1, block_size=2048)
    assert json.loads((result.run / "run.json").read_text())["resolved"]["model"]["block_size"] == 2048


def test_the_usual_batch_and_rate_are_those_of_the_nearest_size() -> None:
    assert nearest_preset(GPTConfig(50257, 1024, 12, 12, 768)) == "gpt2"
    assert nearest_preset(GPTConfig(300, 64, 2, 2, 32)) == "pico"


@pytest.mark.parametrize(
    ("preset", "device", "tokens", "passes"),
    [
        ("nano", "cpu", 4_000, 20),
        ("nano", "cpu", 200_000, 10),
        ("gpt2", "cpu", 4_000, 3e13 / (6 * 124_439_808 * 4_000)),
        ("gpt2", "cpu", 20_000, 3),
        ("gpt2", "cuda", 20_000, 20),
    ],
)
def test_few_pairs_are_read_often(preset: str, device: str, tokens: int, passes: float) -> None:
    model = PRESETS[preset].model
    assert finetune.usual_epochs(tokens, True, model, device) == pytest.approx(passes)
    assert finetune.usual_epochs(tokens, False, model, device) == 3


def test_adamw_tunes_large_models_and_adapters() -> None:
    def chosen(preset: str, **settings: Any) -> str:
        return auto_optimizer(TrainConfig(**settings), PRESETS[preset].model)

    assert [chosen("mini", init="x"), chosen("gpt2", init="x"), chosen("gpt2")] == ["muon", "adamw", "muon"]
    assert chosen("gpt2", init="x", optimizer="muon") == "muon"
    assert chosen("mini", init="x", lora_rank=2) == "adamw"


def test_a_token_folder_must_be_of_the_same_vocabulary(gpt: Gpt, run_folder: Path, other: Path) -> None:
    assert gpt("tokenize", other, "-o", "bytes", "--tokenizer", "bytes", "--quiet").code == 0
    one_line_of_what_and_what_next(gpt("train", "bytes", "--init", run_folder), "made with another tokenizer (bytes)")
    assert gpt("tokenize", other, "-o", "own", "--tokenizer", run_folder, "--quiet").code == 0
    done = gpt("train", "own", "--init", run_folder, "--steps", "2")
    assert done.code == 0, done.err
    assert "before the first step" in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n-layer", "3"], "--n-layer 3 contradicts --init"),
        (["--preset", "gpt2"], "--preset gpt2 contradicts --init"),
        (["--tokenizer", "bytes"], "--tokenizer bytes contradicts --init"),
        (["--arch", "modern"], "--arch modern contradicts --init"),
        (["--block-size", "64"], "block-size 64 exceeds the context of"),
    ],
)
def test_options_that_contradict_the_model(
    gpt: Gpt, run_folder: Path, other: Path, options: list[str], message: str
) -> None:
    one_line_of_what_and_what_next(gpt("train", other, "--init", run_folder, *options), message)
    assert not Path("runs").exists()


def test_a_model_that_cannot_be_read_is_refused_before_the_text_is(gpt: Gpt, run_folder: Path, other: Path) -> None:
    path = Path(shutil.copytree(library.load(run_folder).path, "base"))
    (path / "model.safetensors").write_bytes(b"damaged")
    one_line_of_what_and_what_next(gpt("train", other, "--init", path), "has changed since it was saved")
    for name in ("gpt.json", "checksums.json", "model.safetensors"):
        (path / name).unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    one_line_of_what_and_what_next(gpt("train", other, "--init", path), "has no model.safetensors")
    assert not Path("runs").exists()
