"""Fine-tuning from any checkpoint, with its tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Gpt, make_text, one_line_of_what_and_what_next, slow, train
from models import save

import gpt as library
from gpt.config import events
from gpt.config.model import PRESETS, GPTConfig
from gpt.config.train import TrainConfig
from gpt.model.decoder import GPT
from gpt.model.params import nearest_preset
from gpt.runs import checkpoint
from gpt.system.files import file_sha256
from gpt.tokenizers.tokenizer import bytes_tokenizer
from gpt.training import finetune
from gpt.training.recipe import auto_optimizer

CPU = torch.device("cpu")
QUIET: dict[str, Any] = {"dtype": "float32", "sample_every": 0}


def train_with_events(text: Path, **settings: Any) -> tuple[Any, list[Any]]:
    run_events: list[Any] = []
    return library.train(text, listen=run_events.append, **{**QUIET, **settings}), run_events


def losses_by_step(run_events: list[Any]) -> dict[int, float]:
    return {event.step: event.val_loss for event in run_events if isinstance(event, events.EvalEvent)}


def test_training_starts_from_the_base_weights(run_folder: Path, second_text: Path) -> None:
    base = library.load(run_folder)
    # These sizes match the base model.
    result, run_events = train_with_events(second_text, init=run_folder, steps=12, n_layer=2, vocab_size=400)
    tuned = library.load(result.run)
    assert tuned.model.config == base.model.config
    assert tuned.tokenizer.fingerprint == base.tokenizer.fingerprint
    losses = losses_by_step(run_events)
    assert min(losses) == 0  # Step 0 evaluates the base model.
    data = second_text.read_bytes()
    held_out = data[len(data) - round(len(data) * 0.1) :].decode()
    assert losses[0] == pytest.approx(base.loss(held_out), rel=1e-5)
    assert result.val_loss < losses[0]
    assert any("before the first step" in event.text for event in run_events if isinstance(event, events.Note))
    record = json.loads((result.run / "run.json").read_text())
    assert record["init"]["sha256"] == {"model.safetensors": file_sha256(base.path / "model.safetensors")}
    assert record["init"]["path"] == str(base.path)
    assert record["resolved"]["lr"] == pytest.approx(4e-3)  # Half of nano's learning rate with Muon


@pytest.mark.slow
def test_default_length_is_three_epochs(run_folder: Path, second_text: Path) -> None:
    result, _ = train_with_events(second_text, init=run_folder, eval_every=1000)
    tokens = json.loads((result.run / "run.json").read_text())["tokens"]["train"]
    assert result.tokens_seen == pytest.approx(3 * tokens, rel=0.05)
    assert result.steps >= 80


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_shorter_context_cuts_the_position_table(workdir: Path, second_text: Path, positions: Any) -> None:
    arch: Any = "modern" if positions == "rotary" else "gpt2"
    config = GPTConfig.of(arch, 257, 32, 1, 2, 16, positions=positions)
    model = GPT(config).eval()
    save(workdir / "base", model)
    result, _ = train_with_events(second_text, init="base", block_size=16, steps=1, lr=0.0, dropout=0.1)
    tuned = library.load(result.run).model
    context = 32 if positions == "rotary" else 16  # Rotary positions have no table to cut.
    assert (tuned.config.block_size, tuned.config.dropout, tuned.config.layout) == (context, 0.1, config.layout)
    assert json.loads((result.run / "run.json").read_text())["resolved"]["model"]["block_size"] == 16
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.allclose(tuned(ids), model(ids), atol=1e-6)


def test_fine_tuning_a_transformers_gpt2_folder(workdir: Path, second_text: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=257, n_layer=1, n_head=2, n_embd=16, n_positions=32)).save_pretrained(
        "theirs"
    )
    files = checkpoint.TokenizerFiles(bytes_tokenizer(), GPTConfig(257, 32, 1, 2, 16)).files
    (workdir / "theirs" / "tokenizer.json").write_bytes(files["tokenizer.json"])
    result, run_events = train_with_events(second_text, init="theirs", steps=8)
    assert result.val_loss < losses_by_step(run_events)[0]
    assert GPT2LMHeadModel.from_pretrained(result.checkpoint).config.n_positions == 32


@pytest.mark.parametrize("rank", [None, slow(2)])
def test_long_context_trains_on_shorter_sequences(workdir: Path, rank: int | None) -> None:
    """A Llama model keeps its context, resumes, and loads in Transformers."""
    from transformers import AutoModelForCausalLM

    config = GPTConfig.of("modern", 257, 4096, 1, 2, 16, qk_norm=False)
    model = GPT(config).eval()
    save(workdir / "base", model)
    Path("long.txt").write_bytes(make_text(6000).encode())
    result, run_events = train_with_events(Path("long.txt"), init="base", steps=2, batch_tokens=1024, lora_rank=rank)
    notes = [event.text for event in run_events if isinstance(event, events.Note)]
    assert any("training on sequences of 1,024 tokens; the model's context is 4,096" in note for note in notes)
    assert json.loads((result.run / "run.json").read_text())["resolved"]["model"]["block_size"] == 1024
    assert library.resume(result.run, steps=3).steps == 3
    tuned = library.load(result.run).model
    assert tuned.config == config
    library.export(result.checkpoint, "whole")
    reference = AutoModelForCausalLM.from_pretrained("whole")
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert reference.config.max_position_embeddings == 4096
        tuned = library.load(result.checkpoint).model
        assert torch.allclose(reference.eval()(ids).logits, tuned(ids), atol=1e-4)
    result, _ = train_with_events(Path("long.txt"), init="base", steps=1, block_size=2048)
    assert json.loads((result.run / "run.json").read_text())["resolved"]["model"]["block_size"] == 2048


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_last_evaluation_of_adapters_reports_what_gpt_eval_does(
    text: Path, second_text: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """The base model trains in bfloat16 and is loaded once."""
    loads = []
    load = checkpoint.load_model
    train(text, steps=2, out="base", arch=arch)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "load_model", lambda *args, **settings: loads.append(1) or load(*args, **settings))
        settings: dict[str, Any] = {"init": "base", "lora_rank": 2, "dtype": "bfloat16", "lr": 1e-2}
        result = library.train(text, val_text=str(second_text), steps=3, **settings)
    assert loads == [1]
    expected = library.load(result.run).loss(second_text.read_bytes().decode())
    assert result.val_loss == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize(
    ("kind", "arch", "settings"),
    [("int4", "modern", {}), ("int8", "gpt2", {"lora_targets": "attention", "recompute": True}),
     ("f32", "gpt2", {"base_dtype": "int8"}), ("int4", "modern", {"dtype": "bfloat16"})],
)  # fmt: skip
def test_adapters_over_quantized_weights(
    text: Path, second_text: Path, kind: str, arch: str, settings: dict[str, Any]
) -> None:
    """Products restore the file's weights, so losses are those over the restored model. Resumes to the bit."""
    train(text, steps=2, out="base", arch=arch, n_embd=64)
    library.export("base", "base.gguf", dtype=kind)
    settings = {"init": "base.gguf", "lora_rank": 2, "lr": 1e-2, "schedule": "constant", "warmup": 0, **settings}
    settings["val_text"] = str(second_text)
    result, run_events = train_with_events(text, steps=6, eval_every=2, **settings)
    full = settings | {"base_dtype": "full", "init": "base.gguf"}
    tolerance = 2e-5
    if kind == "f32":  # In the int8 file, the embedding is in int8 as well.
        tolerance = 1e-3
        library.export("base.gguf", "int8.gguf", dtype="int8")
        full["init"] = "int8.gguf"
    reference, reference_events = train_with_events(text, steps=6, eval_every=2, **full)
    assert losses_by_step(run_events) == pytest.approx(losses_by_step(reference_events), abs=tolerance)
    assert losses_by_step(run_events)[6] < losses_by_step(run_events)[0]
    # Over restored weights, the last evaluation is in float32.
    assert result.val_loss == pytest.approx(reference.val_loss, abs=1e-3 if "dtype" in settings else tolerance)
    if kind != "f32":
        loss = library.load(result.run).loss(second_text.read_bytes().decode())
        assert result.val_loss == pytest.approx(loss, abs=1e-3 if "dtype" in settings else tolerance)
    stopped, _ = train_with_events(text, steps=4, eval_every=2, **settings)
    resumed = library.resume(stopped.run, steps=6)
    weights = [file_sha256(each.checkpoint / "adapter_model.safetensors") for each in (resumed, result)]
    assert weights[0] == weights[1]


def test_nearest_preset() -> None:
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
def test_default_epochs_of_pairs_and_text(preset: str, device: str, tokens: int, passes: float) -> None:
    model = PRESETS[preset].model
    assert finetune.choose_epochs(tokens, True, model, device) == pytest.approx(passes)
    assert finetune.choose_epochs(tokens, False, model, device) == 3


def test_large_models_and_adapters_default_to_adamw() -> None:
    def optimizer_of(preset: str, **settings: Any) -> str:
        return auto_optimizer(TrainConfig(**settings), PRESETS[preset].model)

    assert [optimizer_of("mini", init="x"), optimizer_of("gpt2", init="x"), optimizer_of("gpt2")] == [
        "muon",
        "adamw",
        "muon",
    ]
    assert optimizer_of("gpt2", init="x", optimizer="muon") == "muon"
    assert optimizer_of("mini", init="x", lora_rank=2) == "adamw"


def test_token_folder_needs_the_base_models_tokenizer(gpt: Gpt, run_folder: Path, second_text: Path) -> None:
    assert gpt("tokenize", second_text, "-o", "bytes", "--tokenizer", "bytes", "--quiet").code == 0
    one_line_of_what_and_what_next(gpt("train", "bytes", "--init", run_folder), "made with another tokenizer (bytes)")
    assert gpt("tokenize", second_text, "-o", "own", "--tokenizer", run_folder, "--quiet").code == 0
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
def test_options_that_contradict_the_base_model_are_refused(
    gpt: Gpt, run_folder: Path, second_text: Path, options: list[str], message: str
) -> None:
    one_line_of_what_and_what_next(gpt("train", second_text, "--init", run_folder, *options), message)
    assert not Path("runs").exists()


def test_unreadable_base_model_is_refused_before_reading_the_text(
    gpt: Gpt, run_folder: Path, second_text: Path
) -> None:
    path = Path(shutil.copytree(library.load(run_folder).path, "base"))
    (path / "model.safetensors").write_bytes(b"damaged")
    one_line_of_what_and_what_next(gpt("train", second_text, "--init", path), "has changed since it was saved")
    for name in ("gpt.json", "checksums.json", "model.safetensors"):
        (path / name).unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    one_line_of_what_and_what_next(gpt("train", second_text, "--init", path), "has no model.safetensors")
    assert not Path("runs").exists()
