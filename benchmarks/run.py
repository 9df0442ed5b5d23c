"""Measures the machine's limits, start-up and training, compared with Transformers and nanoGPT's recipe.

    python -m benchmarks.run [TEXT]

TEXT is tinyshakespeare, by default downloaded from the catalogue. `make bench` runs this first.
"""

import contextlib
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.results import SCRIPTS, Table, measured, median_seconds, output, write_section
from gpt.config.device import keep_freed_memory, pick
from gpt.config.model import ARCHITECTURES, PRESETS, GPTConfig, find_preset
from gpt.config.train import Optimizer, TrainConfig
from gpt.documents import catalogue
from gpt.model.decoder import GPT
from gpt.model.loss import tied_cross_entropy
from gpt.model.params import breakdown
from gpt.runs import checkpoint
from gpt.tokenizers.tokenizer import bytes_tokenizer
from gpt.training.optim import make_optimizer
from gpt.training.recipe import Facts, plan
from gpt.training.step import Stepper
from gpt.training.strategy import Single

START_UPS = 7
COMPUTE = pick("cpu", training=True)  # the device and dtype that `gpt train` chooses here
DTYPE = COMPUTE.dtype_name

Content = tuple[list[str], list[Table]]  # the notes and tables of a section


def measure_limits() -> Content:
    """Measures the machine's limits: matrix products and memory reads."""
    capabilities = torch.cpu.get_capabilities()
    features = [name for name in ("avx512_f", "avx512_bf16", "amx_bf16") if capabilities.get(name)]
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(2048, 2048).to(dtype)
        rate = 2 * 2048**3 / median_seconds(lambda a=a: a @ a) / 1e9
        rows.append([f"2048³ matrix product, {str(dtype)[6:]}", f"{rate:,.0f} GFLOP/s"])
    large_tensor = torch.ones(2**27)
    rows.append(["reading memory", f"{large_tensor.nbytes / median_seconds(large_tensor.sum) / 1e9:.1f} GB/s"])
    note = f"{torch.get_num_threads()} threads; CPU features: {', '.join(features) or 'neither AVX512 nor AMX'}."
    return [note], [Table(["limit", "rate"], rows)]


def measure_start_up() -> Content:
    """Times whole commands in turn, compared with importing torch and with Transformers' command.

    The warm-up compiles our modules to bytecode, as an installation does.
    """
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tokenizer = bytes_tokenizer()
        config = replace(find_preset("nano").model, vocab_size=tokenizer.vocab_size)
        checkpoint.save(folder / "nano", GPT(config), checkpoint.TokenizerFiles(tokenizer, config), {})
        commands = (
            'python -c "import torch"', "gpt sample Once -m nano -n 4 --greedy", "gpt --help", "gpt params gpt3-175b",
            "transformers --help",
        )  # fmt: skip
        with patch.dict(os.environ):
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
            for round_number in range(START_UPS + 1):
                for words in commands:
                    name, *args = shlex.split(words)
                    start_time = time.perf_counter()
                    output(str(SCRIPTS / name), *args, cwd=folder)
                    if round_number:  # Round 0 is the warm-up.
                        times.setdefault(words, []).append(time.perf_counter() - start_time)
    imports = times[commands[0]]
    rows = []
    for words, seconds in times.items():
        extra_seconds = statistics.median(a - b for a, b in zip(seconds, imports, strict=True))
        extra_cell = f"{extra_seconds:+.2f}" if words.startswith("gpt sample") else ""
        rows.append([f"`{words}`", f"{statistics.median(seconds):.2f}", extra_cell])
    note = f"Medians of {START_UPS} runs; the commands take turns."
    return [note], [Table(["command", "seconds", "beyond importing torch"], rows)]


def train(text: str, folder: Path, *options: str) -> dict[str, float]:
    """Runs ``gpt train TEXT``; returns its JSON and the ``whole_seconds`` of the command."""
    start_time = time.perf_counter()
    out = output(str(SCRIPTS / "gpt"), "train", text, "--json", "--quiet", *options, cwd=folder)
    result: dict[str, float] = json.loads(out.splitlines()[-1])
    return result | {"whole_seconds": time.perf_counter() - start_time}


def nanogpt_recipe(text: str, on_evaluation: Callable[[int, float, float], None] | None = None) -> tuple[float, float]:
    """Trains Transformers' GPT-2 with nanoGPT's CPU recipe; returns held-out nats per character and seconds.

    From nanoGPT's README: 4 layers of width 128, 64 characters of context, batch 12, 2,000 steps of AdamW, float32.
    ``on_evaluation`` is called every 100 steps with the step, the seconds without evaluations, and the loss on the
    first 16,384 held-out characters.
    """
    start_time = time.perf_counter()
    torch.manual_seed(1337)
    characters = sorted(set(text))
    ids = torch.tensor([characters.index(c) for c in text])
    split_at = round(0.9 * len(ids))
    config = GPT2Config(
        vocab_size=len(characters), n_positions=64, n_layer=4, n_head=4, n_embd=128,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(2000):
        progress = (step - 100) / 1900
        learning_rate = 1e-3 * step / 100 if step < 100 else 1e-4 + 0.45e-3 * (1 + math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = learning_rate
        starts = torch.randint(split_at - 65, (12,))
        windows = torch.stack([ids[s : s + 65] for s in starts.tolist()])
        logits = model(windows[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if on_evaluation is not None and (step + 1) % 100 == 0:
            paused = time.perf_counter()
            on_evaluation(step + 1, paused - start_time, _held_out_loss(model, ids[split_at : split_at + 2**14 + 1]))
            start_time += time.perf_counter() - paused
    return _held_out_loss(model, ids[split_at:]), time.perf_counter() - start_time


@torch.no_grad()
def _held_out_loss(model: GPT2LMHeadModel, ids: torch.Tensor) -> float:
    """Returns the loss on held-out ids in windows of 64."""
    count = (len(ids) - 1) // 64
    x, y = ids[: count * 64].view(count, 64), ids[1 : count * 64 + 1].view(count, 64)
    model.eval()
    loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
    model.train()
    return loss.item()


def write_splits(shakespeare: Path, folder: Path) -> dict[str, tuple[Path, Path]]:
    """Writes two files for each text: the first 90 % for training, the last 10 % for evaluation."""
    contents = {"tinyshakespeare": shakespeare.read_bytes()}
    for name in ("pydocs", "stdlib"):
        contents[name] = b"".join(source.open().read() for source in catalogue.sources(name))
    files = {}
    for name, data in contents.items():
        split_at = round(0.9 * len(data))
        files[name] = (folder / f"{name}.txt", folder / f"{name}.val.txt")
        files[name][0].write_bytes(data[:split_at].decode("utf-8", "ignore").encode())
        files[name][1].write_bytes(data[split_at:].decode("utf-8", "ignore").encode())
    return files


def measure_training(shakespeare: Path) -> Content:
    """Measures held-out losses after a given time, compared with nanoGPT's recipe."""
    settings = [(name, arch, 1) for name in ("tinyshakespeare", "pydocs", "stdlib") for arch in ("gpt2", "modern")]
    settings += [("tinyshakespeare", arch, 3) for arch in ("gpt2", "modern")]
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as place:
        files = write_splits(shakespeare, Path(place))
        for name, arch, minutes in settings:
            text, held_out = map(str, files[name])
            run = train(text, Path(place), "--val-text", held_out, "--arch", arch, "--minutes", str(minutes))
            nats = run["bits_per_byte"] * math.log(2)
            rows.append([
                f"`gpt train --arch {arch} --minutes {minutes}`", name, f"{run['whole_seconds']:.0f} s", f"{nats:.4f}",
                f"{run['bits_per_byte']:.4f}", f"{run['parameters']:,}", f"{run['tokens_per_second']:,.0f}",
            ])  # fmt: skip
            print(*rows[-1], flush=True)
        for name, (text_file, held_out_file) in files.items():
            text, held_out_text = (file.read_text(encoding="utf-8") for file in (text_file, held_out_file))
            if len(set(text + held_out_text)) > 300:
                continue  # The text has too many distinct characters.
            loss, seconds = nanogpt_recipe(text + held_out_text)
            per_byte = loss * len(held_out_text) / len(held_out_text.encode())  # Tokens are characters.
            rows.append([
                "nanoGPT's CPU recipe, on Transformers", name, f"{seconds:.0f} s", f"{per_byte:.4f}",
                f"{per_byte / math.log(2):.4f}", "", f"{2000 * 12 * 64 / seconds:,.0f}",
            ])  # fmt: skip
            print(*rows[-1], flush=True)
    note = "Whole commands, trained on the first 90 % of each text and measured on the last 10 %."
    columns = ["system", "text", "whole time", "nats per byte", "bits per byte", "parameters", "tokens/s"]
    return [note], [Table(columns, rows)]


RECIPE = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 65}  # nanoGPT's GPU recipe
ROWS = 64
ROUNDS = {"nano": 20, "tiny": 10, "micro": 10, "10.7 M": 3}  # timed steps per system


def measure_steps() -> Content:
    """Times training steps of small models in `gpt train` and of Transformers' GPT-2."""
    keep_freed_memory()
    a = torch.randn(2048, 2048).to(COMPUTE.dtype)
    rows: list[list[str]] = []
    for name, rounds in ROUNDS.items():
        preset = PRESETS.get(name)
        config = replace(preset.model, dropout=0.0, **ARCHITECTURES["gpt2"]) if preset else GPTConfig(**RECIPE)
        count = preset.batch_tokens // config.block_size if preset else ROWS
        systems: dict[str, Callable[[], object]] = {
            "`gpt train`, Muon": make_gpt_step(config, count, "muon", False),
            "`gpt train`, Muon, compiled": make_gpt_step(config, count, "muon", True),
            "`gpt train`, AdamW": make_gpt_step(config, count, "adamw", False),
            "`gpt train`, AdamW, compiled": make_gpt_step(config, count, "adamw", True),
            "Transformers": make_transformers_step(config, count, False),
            "Transformers, compiled": make_transformers_step(config, count, True),
            "peak": lambda: a @ a,
        }
        times: dict[str, list[float]] = {system: [] for system in systems}
        for round_number in range(rounds + 2):
            for system, step in systems.items():
                start_time = time.perf_counter()
                step()
                if round_number > 1:
                    times[system].append(time.perf_counter() - start_time)
        table = breakdown(config)
        flops = 6 * (table.trainable - table.positions) + 12 * config.n_layer * config.n_embd * config.block_size
        peak = 2 * 2048**3 / statistics.median(times.pop("peak"))
        baseline_times = next(iter(times.values()))
        for system, system_times in times.items():
            seconds = statistics.median(system_times)
            ratio = statistics.median(
                baseline / own_time for baseline, own_time in zip(baseline_times, system_times, strict=True)
            )
            tokens_per_second = count * config.block_size / seconds
            cells = [
                f"{1e3 * seconds:,.1f}",
                f"{tokens_per_second:,.0f}",
                f"{ratio:.2f}",
                f"{tokens_per_second * flops / peak:.1%}",
            ]
            rows.append([name, system, *cells])
            print(*rows[-1], flush=True)
    notes = [
        f"A step is batch, forward pass, loss, backward pass, clipping and update in {DTYPE}, without dropout.",
        "Systems take turns: medians, and the median speedup over `gpt train` with Muon in the same turn.",
        "10.7 M: 64 sequences of 256 tokens, 6 layers of width 384.",
        "Transformers: GPT-2 with SDPA and fused AdamW.",
        f"MFU counts 6 N + 12·L·C·T FLOPs per token, relative to a {DTYPE} matrix product measured in the same turns.",
    ]
    return notes, [Table(["model", "system", "ms/step", "tokens/s", "speedup", "MFU"], rows)]


def make_gpt_step(config: GPTConfig, count: int, kind: Optimizer, compiled: bool) -> Callable[[], object]:
    """Returns a training step of `gpt train` on ``count`` sequences."""
    settings = TrainConfig(
        n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, block_size=config.block_size,
        batch_tokens=count * config.block_size, steps=100, optimizer=kind, dropout=0.0,
    )  # fmt: skip
    facts = Facts.on(COMPUTE, bytes=10**6, tokens=10**6, vocab_size=config.vocab_size, held_out=False)
    recipe = plan(settings, facts)
    model = GPT(recipe.model)
    stepper = Stepper(Single(model, make_optimizer(model, kind, 0.1, COMPUTE.dtype), COMPUTE), recipe)
    if compiled and (failed := stepper.compile()):
        raise RuntimeError(failed)
    x, y = (torch.randint(config.vocab_size, (count, config.block_size)).numpy() for _ in range(2))
    return lambda: stepper.step(x, y, 1e-4).read()


def make_transformers_step(config: GPTConfig, count: int, compiled: bool) -> Callable[[], object]:
    """Returns a training step of Transformers' GPT-2 on ``count`` sequences."""
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size, n_positions=config.block_size, n_layer=config.n_layer, n_head=config.n_head,
            n_embd=config.n_embd, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    forward: Any = torch.compile(model) if compiled else model
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, y = (torch.randint(config.vocab_size, (count, config.block_size)) for _ in range(2))

    def step() -> None:
        with COMPUTE.autocast():
            logits = forward(x).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten()).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()

    return step


PHASES = ("forward", "loss", "backward", "clip", "optimizer")
PROFILE_STEPS = {"nano": 9, "micro": 5, "10.7 M, 16 sequences": 3}  # timed steps


def phase_seconds(config: GPTConfig, rows: int, steps: int, peak: float) -> list[list[float]]:
    """Returns four times in seconds for each of `PHASES`: total, matrix products at ``peak`` FLOP/s, other operators,
    and the rest (products below peak, allocation, call overhead)."""
    model = GPT(config)
    optimizer = make_optimizer(model, "muon", 0.1, COMPUTE.dtype)
    x, y = (torch.randint(config.vocab_size, (rows, config.block_size)) for _ in range(2))
    state: dict[str, Any] = {}

    def forward() -> None:
        state["stream"] = model.trunk(x)

    def loss() -> None:
        state["loss"] = tied_cross_entropy(state["stream"], model.unembedding, y) / y.numel()

    def update() -> None:
        optimizer.step(torch.tensor(False))
        optimizer.zero_grad()

    parts = (
        forward, loss, lambda: state["loss"].backward(), lambda: clip_grad_norm_(model.parameters(), 1.0), update,
    )  # fmt: skip
    times: list[list[float]] = []
    replayed = []
    for step in range(steps + 2):
        marks = [time.perf_counter()]
        for index, part in enumerate(parts):
            counter, recorder = FlopCounterMode(display=False), Recorder()
            with COMPUTE.autocast() if index < 2 else contextlib.nullcontext(), contextlib.ExitStack() as stack:
                if step > steps:  # The last step is recorded, not timed.
                    stack.enter_context(counter)
                    stack.enter_context(recorder)
                part()
            marks.append(time.perf_counter())
            if step > steps:
                replayed.append([counter.get_total_flops() / peak, _replay_seconds(recorder)])
        times.append([b - a for a, b in pairwise(marks)])
    medians = [statistics.median(each) for each in zip(*times[1:-1], strict=True)]
    return [[total, *parts, total - sum(parts)] for total, parts in zip(medians, replayed, strict=True)]


class Recorder(TorchDispatchMode):
    """Records operators with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls an operator and records it."""
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **kwargs or {})


@torch.no_grad()
def _replay_seconds(recorder: Recorder) -> float:
    """Replays the operators of a phase except matrix products; returns their seconds."""
    seconds = 0.0
    for func, args, kwargs in recorder.calls:
        if func.is_view or any(name in func.name() for name in ("mm", "linear", "set_")):
            continue
        start_time = time.perf_counter()
        func(*args, **kwargs)
        seconds += time.perf_counter() - start_time
    return seconds


def measure_phases() -> Content:
    """Measures the phases of training steps, and the time that their matrix products would take at peak speed."""
    keep_freed_memory()
    a = torch.randn(2048, 2048).to(COMPUTE.dtype)
    peak = 2 * 2048**3 / median_seconds(lambda: a @ a)
    rows = []
    for name, steps in PROFILE_STEPS.items():
        preset = PRESETS.get(name)
        config = preset.model if preset else GPTConfig(**RECIPE)
        count = preset.batch_tokens // config.block_size if preset else ROWS // 4
        phases = phase_seconds(config, count, steps, peak)
        step_times = [sum(phase_times) for phase_times in zip(*phases, strict=True)]
        for phase, phase_times in zip((*PHASES, "step"), (*phases, step_times), strict=True):
            rows.append([name, phase, *(f"{1e3 * seconds:.1f}" for seconds in phase_times)])
    notes = [
        f"Medians in milliseconds; {DTYPE}, Muon, not compiled.",
        f"Matrix products are computed from their FLOPs at the measured {peak / 1e9:,.0f} GFLOP/s; the other operators "
        "were replayed one by one.",
    ]
    return notes, [Table(["model", "phase", "ms", "matrix products", "other operators", "remainder"], rows)]


OPTIMIZER_STEPS, SEEDS = 800, (1, 2, 3)


def compare_optimizers(shakespeare: Path) -> Content:
    """Compares Muon with AdamW for equal tokens and for equal time."""
    rows: list[list[str]] = []

    def add(kind: str, steps: int) -> float:
        nats, seconds = [], []
        for seed in SEEDS:
            result = train(
                str(text), Path(place), "--val-text", str(held_out), "--arch", "gpt2", "--preset", "nano",
                "--optimizer", kind, "--steps", str(steps), "--seed", str(seed), "--sample-every", "0",
            )  # fmt: skip
            nats.append(result["bits_per_byte"] * math.log(2))
            seconds.append(result["tokens_seen"] / result["tokens_per_second"])
        nats_list = ", ".join(f"{value:.4f}" for value in nats)
        mean = statistics.mean(seconds)
        rows.append([kind, f"{steps:,}", nats_list, f"{statistics.mean(nats):.4f}", f"{mean:.0f}"])
        print(*rows[-1], flush=True)
        return mean

    with tempfile.TemporaryDirectory() as place:
        text, held_out = write_splits(shakespeare, Path(place))["tinyshakespeare"]
        muon = add("muon", OPTIMIZER_STEPS)
        adamw = add("adamw", OPTIMIZER_STEPS)
        add("adamw", round(OPTIMIZER_STEPS * muon / adamw))
    notes = [
        "`gpt train --arch gpt2 --preset nano` on the first 90 % of tinyshakespeare, measured on the rest, seeds "
        f"{', '.join(map(str, SEEDS))}; steps of 1,024 tokens.",
        "Each optimizer has its own default learning rate; the schedule is the same.",
    ]
    return notes, [Table(["optimizer", "steps", "nats per character, each seed", "mean", "mean seconds"], rows)]


def main() -> None:
    """Measures everything and writes the sections."""
    if len(sys.argv) > 1:
        shakespeare = Path(sys.argv[1]).resolve()
    else:
        (shakespeare,) = catalogue.fetch("shakespeare")
    sections: dict[str, Callable[[], Content]] = {
        "Floors": measure_limits,
        "Start-up": measure_start_up,
        f"Training: speed of a step, {DTYPE}": measure_steps,
        f"Training: where a step's time goes, {DTYPE}": measure_phases,
        "Training: Muon and AdamW": lambda: compare_optimizers(shakespeare),
        "Training: held-out loss in a given time": lambda: measure_training(shakespeare),
    }
    for title, measure in sections.items():
        write_section("run", measured(title, "python -m benchmarks.run", *measure(), ["torch", "transformers"]))


if __name__ == "__main__":
    main()
