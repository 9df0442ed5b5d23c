"""Measures LoRA fine-tuning, compared with Transformers and PEFT: steps per second and peak memory.

    python -m benchmarks.lora [--rounds N] [--steps N]

The shape of SmolLM2-135M with random weights, adapters of rank 8 on all linear layers, 8 sequences of 256 tokens per
step, in bfloat16. Both systems read the same folder, run in separate processes and take turns. Takes some ten minutes
on an otherwise idle machine.
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
WARM = 2  # warm-up steps
RATE = 1e-4


def make(base: Path, text: Path) -> None:
    """Writes a text of random words, and a Transformers folder with random bfloat16 weights and a tokenizer trained on
    the text."""
    import torch
    from safetensors.torch import load_file, save_file

    from gpt.config import find_preset
    from gpt.model.decoder import GPT
    from gpt.runs import checkpoint
    from gpt.text.tokenizer import learn_tokenizer

    torch.manual_seed(0)
    letters = np.random.default_rng(0).integers(ord("a"), ord("z") + 1, (60_000, 8)).astype(np.uint8)
    words = b" ".join(word.tobytes() for word in letters)
    text.write_bytes(words)
    model = GPT(find_preset(PRESET).model)
    tokenizer = learn_tokenizer([words.decode()], model.config.vocab_size)
    checkpoint.save(base, model, checkpoint.TokenizerFiles(tokenizer, model.config), {"step": 0})
    weights = {name: tensor.bfloat16() for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    for name in ("gpt.json", "checksums.json", "tokenizer.tiktoken"):  # other programs do not write these files
        (base / name).unlink()


def ours(base: Path, text: Path, steps: int) -> dict[str, float]:
    """Fine-tunes with `gpt.train`; returns the median seconds of a step and the peak memory in bytes."""
    import gpt
    from gpt import events

    at: list[float] = []

    def listen(event: object) -> None:
        if isinstance(event, events.StepEvent):
            at.append(time.perf_counter())

    result = gpt.train(
        text, init=base, lora_rank=RANK, steps=steps, block_size=LENGTH, batch_tokens=ROWS * LENGTH, dtype="bfloat16",
        val_fraction=0.0, sample_every=0, save_every=steps, lr=RATE, device="cpu", out=text.parent / "run",
        listen=listen,
    )  # fmt: skip
    record = json.loads((result.run / "run.json").read_text(encoding="utf-8"))["resolved"]
    assert (record["rows"], record["micro_batch"]) == (ROWS, ROWS), record
    return summarized(at)


def theirs(base: Path, _: Path, steps: int) -> dict[str, float]:
    """Fine-tunes with PEFT; returns the same figures. The base model is bfloat16, adapters are float32 under autocast,
    as in Transformers' Trainer with ``bf16=True``."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    about = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, about).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    drawn = np.random.default_rng(0)
    at = []
    for _ in range(steps):
        ids = torch.from_numpy(drawn.integers(0, model.config.vocab_size, (ROWS, LENGTH)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        at.append(time.perf_counter())
    return summarized(at)


def summarized(at: list[float]) -> dict[str, float]:
    """Returns the median seconds of a step and the process's peak memory, from the end times of steps."""
    unit = 1 if sys.platform == "darwin" else 1024
    seconds = statistics.median(b - a for a, b in zip(at[WARM - 1 :], at[WARM:], strict=False))
    return {"seconds": seconds, "peak": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


SIDES = {"`gpt`": ours, "Transformers with PEFT": theirs}


def in_a_process(side: str, base: Path, text: Path, steps: int) -> dict[str, float]:
    """Runs a system in a separate process."""
    words = [sys.executable, "-m", "benchmarks.lora", "--side", side, "--base", base, "--text", text, "--steps", steps]
    done = subprocess.run([str(word) for word in words], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(rounds: int, steps: int) -> tuple[list[str], list[Table]]:
    """Returns notes with the ratios, and a table of medians over the rounds."""
    got: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as place:
        base, text = Path(place) / "base", Path(place) / "text"
        make(base, text)
        for _ in range(rounds):
            for side in SIDES:
                got[side].append(in_a_process(side, base, text, steps))
                print(side, got[side][-1], flush=True)
    rates = {side: [1 / each["seconds"] for each in found] for side, found in got.items()}
    peaks = {side: statistics.median(each["peak"] for each in found) for side, found in got.items()}
    one, other = SIDES
    ratios = [a / b for a, b in zip(rates[one], rates[other], strict=True)]
    notes = [
        f"`{PRESET}` with random weights, adapters of rank {RANK} on all linear layers, {ROWS} × {LENGTH} tokens per "
        "step, bfloat16.",
        f"Medians of {rounds} rounds of {steps} steps; the systems take turns, each in a new process, whose peak "
        "memory is shown.",
        f"`gpt` reaches {statistics.median(ratios):.2f} times the steps per second (in each round: "
        f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}) with {peaks[one] / peaks[other]:.2f} times the memory.",
    ]
    rows = []
    for side, found in rates.items():
        each = ", ".join(f"{rate:.3f}" for rate in found)
        rows.append([side, f"{statistics.median(found):.3f}", each, f"{peaks[side] / 1e9:.2f} GB"])
    return notes, [Table(["system", "steps/s", "each round", "peak memory"], rows)]


def main() -> None:
    """Measures and writes the section; in a separate process, runs one system."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--text", type=Path, help=argparse.SUPPRESS)
    asked: Any = parser.parse_args()
    if asked.side:
        print(json.dumps(SIDES[asked.side](asked.base, asked.text, asked.steps)))
    else:
        content = compare(asked.rounds, asked.steps)
        packages = ["torch", "transformers", "peft"]
        write_section("lora", measured("Fine-tuning with adapters", "python -m benchmarks.lora", *content, packages))


if __name__ == "__main__":
    main()
