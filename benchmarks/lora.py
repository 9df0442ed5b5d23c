"""Measures LoRA fine-tuning, compared with Transformers and PEFT: steps per second and peak memory.

    python -m benchmarks.lora [--rounds N] [--steps N]

Trains adapters of rank 8 on all linear layers of SmolLM2-135M's shape with random weights, in bfloat16, with 8
sequences of 256 tokens per step. Both systems read the same folder, run in separate processes and take turns. Takes
about ten minutes on an otherwise idle machine.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import ROOT, Table, measured, write_section

PRESET, RANK, ROWS, LENGTH = "smollm2-135m", 8, 8, 256
WARM_UP_STEPS = 2
LEARNING_RATE = 1e-4


def write_inputs(base: Path, text: Path) -> None:
    """Writes a text of random words, and a Transformers folder with random bfloat16 weights and a tokenizer trained on
    the text."""
    import torch
    from safetensors.torch import load_file, save_file

    from gpt.config.model import find_preset
    from gpt.model.decoder import GPT
    from gpt.runs import checkpoint
    from gpt.tokenizers.tokenizer import train_tokenizer

    torch.manual_seed(0)
    letters = np.random.default_rng(0).integers(ord("a"), ord("z") + 1, (60_000, 8)).astype(np.uint8)
    words = b" ".join(word.tobytes() for word in letters)
    text.write_bytes(words)
    model = GPT(find_preset(PRESET).model)
    tokenizer = train_tokenizer([words.decode()], model.config.vocab_size)
    checkpoint.save(base, model, checkpoint.TokenizerFiles(tokenizer, model.config), {"step": 0})
    weights = {name: tensor.bfloat16() for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    for name in ("gpt.json", "checksums.json", "tokenizer.tiktoken"):  # Other programs do not write these files.
        (base / name).unlink()


def run_gpt(base: Path, text: Path, steps: int) -> dict[str, float]:
    """Fine-tunes with `gpt.train`; returns the median seconds of a step and the peak memory in bytes."""
    import gpt
    from gpt.config import events

    end_times: list[float] = []

    def listen(event: object) -> None:
        if isinstance(event, events.StepEvent):
            end_times.append(time.perf_counter())

    result = gpt.train(
        text, init=base, lora_rank=RANK, steps=steps, block_size=LENGTH, batch_tokens=ROWS * LENGTH, dtype="bfloat16",
        val_fraction=0.0, sample_every=0, save_every=steps, lr=LEARNING_RATE, device="cpu", out=text.parent / "run",
        listen=listen,
    )  # fmt: skip
    record = json.loads((result.run / "run.json").read_text(encoding="utf-8"))["resolved"]
    assert (record["rows"], record["micro_batch"]) == (ROWS, ROWS), record
    return summarize_times(end_times)


def run_peft(base: Path, _: Path, steps: int) -> dict[str, float]:
    """Fine-tunes with PEFT like Transformers' Trainer with ``bf16=True``: bfloat16 base model, float32 adapters,
    autocast. Returns the same figures as `run_gpt`."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    lora_config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora_config).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rng = np.random.default_rng(0)
    end_times = []
    for _ in range(steps):
        ids = torch.from_numpy(rng.integers(0, model.config.vocab_size, (ROWS, LENGTH)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        end_times.append(time.perf_counter())
    return summarize_times(end_times)


def summarize_times(end_times: list[float]) -> dict[str, float]:
    """Returns the process's peak memory and, from the end times of its steps, the median seconds of a step."""
    unit = 1 if sys.platform == "darwin" else 1024
    seconds = statistics.median(
        b - a for a, b in zip(end_times[WARM_UP_STEPS - 1 :], end_times[WARM_UP_STEPS:], strict=False)
    )
    return {"seconds": seconds, "peak": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


SIDES = {"`gpt`": run_gpt, "Transformers with PEFT": run_peft}


def run_side(side: str, base: Path, text: Path, steps: int) -> dict[str, float]:
    """Runs a system in a separate process."""
    words = [sys.executable, "-m", "benchmarks.lora", "--side", side, "--base", base, "--text", text, "--steps", steps]
    process = subprocess.run([str(word) for word in words], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    if process.returncode:
        sys.exit(process.stderr)
    figures: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return figures


def compare(rounds: int, steps: int) -> tuple[list[str], list[Table]]:
    """Returns notes with the ratios, and a table of medians over the rounds."""
    results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        base, text = Path(folder) / "base", Path(folder) / "text"
        write_inputs(base, text)
        for _ in range(rounds):
            for side in SIDES:
                results[side].append(run_side(side, base, text, steps))
                print(side, results[side][-1], flush=True)
    speeds = {side: [1 / sample["seconds"] for sample in side_results] for side, side_results in results.items()}
    peaks = {
        side: statistics.median(sample["peak"] for sample in side_results) for side, side_results in results.items()
    }
    ours, theirs = SIDES
    ratios = [a / b for a, b in zip(speeds[ours], speeds[theirs], strict=True)]
    notes = [
        f"`{PRESET}` with random weights, adapters of rank {RANK} on all linear layers, {ROWS} × {LENGTH} tokens per "
        "step, bfloat16.",
        f"Medians of {rounds} rounds of {steps} steps; the systems take turns, each in a new process, whose peak "
        "memory is shown.",
        f"`gpt` reaches {statistics.median(ratios):.2f} times the steps per second (in each round: "
        f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}) with {peaks[ours] / peaks[theirs]:.2f} times the memory.",
    ]
    rows = []
    for side, side_speeds in speeds.items():
        rounds_cell = ", ".join(f"{speed:.3f}" for speed in side_speeds)
        rows.append([side, f"{statistics.median(side_speeds):.3f}", rounds_cell, f"{peaks[side] / 1e9:.2f} GB"])
    return notes, [Table(["system", "steps/s", "each round", "peak memory"], rows)]


def main() -> None:
    """Measures and writes the section. With --side, only runs one system, in a process that `run_side` started."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--text", type=Path, help=argparse.SUPPRESS)
    args: Any = parser.parse_args()
    if args.side:
        print(json.dumps(SIDES[args.side](args.base, args.text, args.steps)))
    else:
        content = compare(args.rounds, args.steps)
        packages = ["torch", "transformers", "peft"]
        write_section("lora", measured("Fine-tuning with adapters", "python -m benchmarks.lora", *content, packages))


if __name__ == "__main__":
    main()
