"""TensorBoard, FLOPs per token, and MFU (speed as a share of the device's peak)."""

import json
import re
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAST, TINY, Done
from ranks import to_options
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

import gpt
from gpt.config import events
from gpt.config.device import Compute
from gpt.config.model import PRESETS, GPTConfig
from gpt.model import lora
from gpt.model.decoder import GPT
from gpt.model.params import breakdown, flops_per_token
from gpt.runs import folder
from gpt.system.peaks import peak_flops
from gpt.system.words import percent
from gpt.training import logs
from gpt.training.run import resume


def metrics(run: Path, kind: str) -> list[Any]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(events.from_json, lines) if event.kind == kind]


# TensorBoard


def test_tensorboard_contains_the_metrics(text: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = gpt.train(text, steps=6, eval_every=3, log="tensorboard", **{**FAST, "sample_every": 3})
    board = EventAccumulator(str(result.run / "tensorboard"), {"scalars": 0, "tensors": 0})
    board.Reload()
    for key in ("loss", "lr", "grad_norm", "tokens_per_second"):
        points = [(point.step, point.value) for point in board.Scalars(f"step/{key}")]
        assert points == [(event.step, pytest.approx(getattr(event, key))) for event in metrics(result.run, "step")]
    held_out = [(point.step, point.value) for point in board.Scalars("eval/val_loss")]
    assert held_out == [(event.step, pytest.approx(event.val_loss)) for event in metrics(result.run, "eval")]
    assert [point.value for point in board.Scalars("end/bits_per_byte")] == [pytest.approx(result.bits_per_byte)]
    assert "step/mfu" not in board.Tags()["scalars"]  # The peak of a CPU is unknown.
    first, last = board.Tensors("sample/text/text_summary")
    assert (first.step, last.step) == (3, 6)
    sample_text = last.tensor_proto.string_val[0].decode()
    assert [line.removeprefix("    ") for line in sample_text.split("\n")] == result.sample.splitlines()
    (settings,) = board.Tensors("settings/text_summary")
    assert json.loads(settings.tensor_proto.string_val[0])["model"]["n_embd"] == 32


@pytest.mark.slow
def test_resumed_run_continues_its_tensorboard_curves(text: Path) -> None:
    """Steps after the checkpoint are logged once. `--log` can be added on resume."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def on_event(event: Any) -> None:
        if isinstance(event, events.StepEvent) and event.step == 6:
            raise RuntimeError("a fault")

    with pytest.raises(RuntimeError):
        gpt.train(text, listen=on_event, steps=8, save_every=4, eval_every=8, log="tensorboard", **FAST)
    time.sleep(1.1)  # TensorBoard orders log files by the seconds in their names.
    result = resume("runs/book")
    board = EventAccumulator(str(result.run / "tensorboard"))
    board.Reload()
    assert [point.step for point in board.Scalars("step/loss")] == list(range(1, 9))
    logged_losses = [point.value for point in board.Scalars("step/loss")]
    assert logged_losses == [pytest.approx(event.loss) for event in metrics(result.run, "step")]


@pytest.mark.slow
def test_logging_does_not_change_training(text: Path) -> None:
    pytest.importorskip("tensorboard")
    unlogged = gpt.train(text, steps=8, dropout=0.1, **FAST)
    logged = gpt.train(text, steps=8, dropout=0.1, log="tensorboard", **FAST)
    unlogged_weights, logged_weights = (
        load_file(folder.find_checkpoint(str(r.run)) / "model.safetensors") for r in (unlogged, logged)
    )
    assert all(torch.equal(unlogged_weights[name], logged_weights[name]) for name in unlogged_weights)


# User errors


@pytest.mark.parametrize(
    ("log", "message", "hint"),
    [
        ("tensorbord", 'there is no log "tensorbord"', 'did you mean "tensorboard"?'),
        ("tensorboard", "--log tensorboard needs a package: ", '"gpt-workshop[log]"'),
    ],
)
def test_unknown_or_missing_logger_is_refused(
    text: Path, gpt: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, log: str, message: str, hint: str
) -> None:
    for name in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    done = gpt("train", text, "--steps", "2", "--log", log)
    assert done.code == 2
    first, second = done.err.splitlines()
    assert first.startswith(f"error: {message}")
    assert second.startswith("hint: ")
    assert hint in second
    assert not Path("runs").exists()


@pytest.mark.parametrize("failing_function", ["__init__", "add_text", "add_scalar", "close"])
def test_failing_logger_does_not_stop_training(
    text: Path, monkeypatch: pytest.MonkeyPatch, failing_function: str
) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(tensorboard.SummaryWriter, failing_function, fail)
    run_events: list[Any] = []
    result = gpt.train(text, listen=run_events.append, steps=2, log="tensorboard", **FAST)
    notes = [event.text for event in run_events if isinstance(event, events.Note) and "--log" in event.text]
    assert notes == ["--log tensorboard failed and is off for the rest of this run: OSError: the disk is full"]
    assert result.steps == len(metrics(result.run, "step")) == 2


# FLOPs per token


def count_flops_per_token(config: GPTConfig, rank: int = 0) -> float:
    """Counts FLOPs per token of matrix products with torch's counter."""
    model = GPT(config)
    if rank:
        lora.adapt(model, rank, 1.0)
    x = torch.randint(config.vocab_size, (2, config.block_size))
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    return counter.get_total_flops() / x.numel()


@pytest.mark.parametrize(
    "config",
    [
        *[GPTConfig(96, 32, 3, 2, 64, positions=name) for name in ("learned", "rotary")],
        GPTConfig.of("modern", 96, 32, 3, 2, 64),
        GPTConfig.of("modern", 96, 32, 3, 4, 64, n_kv_head=2, head_dim=32, tied=False),
    ],
)
def test_flops_per_token_match_torchs_counter(config: GPTConfig) -> None:
    counts = breakdown(config)
    vectors = counts.biases + counts.layer_norms  # N includes vectors by convention, but they are in no matrix product.
    assert flops_per_token(config, 32) - 6 * vectors == count_flops_per_token(config)


def test_flops_per_token_with_adapters() -> None:
    config = GPTConfig(96, 32, 8, 2, 64)
    adapters = sum(p.numel() for p in lora.adapt(GPT(config), 4, 1.0))
    counts = breakdown(config)
    estimate = flops_per_token(config, 32, adapters) - 4 * (counts.biases + counts.layer_norms)
    # Layers before the first adapter need no gradient.
    assert count_flops_per_token(config, 4) == pytest.approx(estimate, rel=0.05)


def test_flops_of_gpt2_match_nanogpt() -> None:
    """``estimate_mfu`` in nanoGPT: 6 × (124,439,808 − 1,024 × 768) + 12 × 12 layers × 12 heads × 64 × 1,024."""
    assert flops_per_token(PRESETS["gpt2"].model, 1024) == 855_166_464


# Peak FLOP/s of devices

# (multiprocessors, operations per multiprocessor and clock, boost clock in GHz)
SPECS = {
    "NVIDIA B200": (148, 8192, 1.855), "NVIDIA H100 80GB HBM3": (132, 4096, 1.83),
    "NVIDIA H100 PCIe": (114, 4096, 1.62), "NVIDIA H100 NVL": (132, 4096, 1.545),
    "NVIDIA A100-SXM4-80GB": (108, 2048, 1.41), "NVIDIA A100 80GB PCIe": (108, 2048, 1.41),
    "NVIDIA A10": (72, 1024, 1.695), "NVIDIA L40S": (142, 1024, 2.49), "NVIDIA L40": (142, 512, 2.49),
    "NVIDIA L4": (58, 1024, 2.04), "NVIDIA GeForce RTX 4090": (128, 512, 2.52),
    "Tesla V100-SXM2-16GB": (80, 1024, 1.53), "Tesla T4": (40, 1024, 1.59),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_peak_flops_follow_from_the_hardware_specs(name: str) -> None:
    processors, operations, gigahertz = SPECS[name]
    assert peak_flops(name, "float16") == pytest.approx(processors * operations * gigahertz * 1e9, rel=0.01)
    assert peak_flops(name, "bfloat16") == (None if re.search("V100|T4", name) else peak_flops(name, "float16"))
    assert peak_flops(name, "float32") is None


@pytest.mark.parametrize(
    "name", ["", "cpu", "NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU"]
)
def test_unknown_devices_have_no_peak_flops(name: str) -> None:
    assert peak_flops(name, "bfloat16") is None


@pytest.mark.slow
def test_mfu_is_reported_when_the_peak_is_known(
    text: Path, gpt: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "peak_flops", lambda name, dtype: 1e12 if (name, dtype) == ("cpu", "float32") else None)
    monkeypatch.setattr("gpt_cli.show.progress.LINE_SECONDS", 0)
    options = to_options(FAST)
    done = gpt("train", text, "--steps", "5", *options)
    assert done.code == 0, done.err
    run = Path("runs/book")
    record = json.loads((run / "run.json").read_text())
    flops = flops_per_token(GPTConfig(**record["resolved"]["model"]), TINY["block_size"])
    steps = metrics(run, "step")
    for step in steps:
        assert step.mfu == pytest.approx(step.tokens_per_second * flops / 1e12)
    shown_speed = f"tokens/s ({percent(steps[-1].mfu, 1)} MFU)"
    assert shown_speed in done.out
    assert shown_speed in done.err
    monkeypatch.setattr(logs, "peak_flops", lambda name, dtype: None)
    done = gpt("train", text, "--steps", "5", "--json", *options)
    assert "MFU" not in done.err
    assert "mfu" not in json.loads(done.out)  # Scripts depend on this output.
    assert {step.mfu for step in metrics(Path("runs/book-2"), "step")} == {None}


def test_metrics_without_mfu_are_readable() -> None:
    line = '{"event": "step", "step": 1, "tokens": 2, "seconds": 3.0, "loss": 4.0, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 9.0}'
    event = events.from_json(line)
    assert isinstance(event, events.StepEvent)
    assert event.mfu is None


def test_flops_of_pairs_use_their_mean_length(workdir: Path) -> None:
    path = workdir / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{n} plus {n} is", "completion": f" {2 * n}"}) + "\n" for n in range(300))
    )
    result = gpt.train(path, pairs=True, steps=2, **{**FAST, "batch_tokens": 512})
    resolved = json.loads((result.run / "run.json").read_text())["resolved"]
    model = GPT(GPTConfig(**resolved["model"]))
    recipe = types.SimpleNamespace(
        lora_rank=0, model=model.config, batch_tokens=resolved["batch_tokens"], rows=resolved["rows"], sides=1
    )
    speed = logs.Speed.of(model, recipe, Compute(torch.device("cpu"), torch.float32))  # type: ignore[arg-type]
    mean_length = resolved["batch_tokens"] // resolved["rows"]
    assert mean_length < model.config.block_size
    assert speed.flops_per_token == flops_per_token(model.config, mean_length)
