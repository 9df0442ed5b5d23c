"""Measures this machine's limits, start-up and training, beside the peers, for `make bench` and RESULTS.md.

    python -m benchmarks.run [TEXT]

TEXT is tinyshakespeare, as a file; without it the catalogue's is fetched.
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

from benchmarks.results import SCRIPTS, command, machine, median_seconds, write_section
from gpt.config import PRESETS, GPTConfig, Optimizer, TrainConfig, find_preset
from gpt.device import keep_freed_memory, pick
from gpt.model.decoder import GPT
from gpt.model.loss import tied_cross_entropy
from gpt.model.params import breakdown
from gpt.runs import checkpoint
from gpt.text import catalogue
from gpt.text.tokenizer import bytes_tokenizer
from gpt.training.optim import make_optimizer
from gpt.training.parallel import Single
from gpt.training.recipe import resolve
from gpt.training.step import Stepper

START_UPS = 7
COMPUTE = pick("cpu", training=True)  # as `gpt train` computes here
DTYPE = COMPUTE.dtype_name


def floors() -> list[str]:
    """Returns what this machine can do at most: matrix products and memory."""
    capabilities = torch.cpu.get_capabilities()
    has = ", ".join(name for name in ("avx512_f", "avx512_bf16", "amx_bf16") if capabilities.get(name)) or "neither"
    lines = [f"- torch {torch.__version__}, {torch.get_num_threads()} threads; {has}"]
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(2048, 2048).to(dtype)
        rate = 2 * 2048**3 / median_seconds(lambda a=a: a @ a) / 1e9
        lines.append(f"- matrix product 2048³ in {str(dtype)[6:]}: {rate:,.0f} GFLOP/s")
    big = torch.ones(2**27)
    lines.append(f"- reading memory: {big.nbytes / median_seconds(big.sum) / 1e9:.1f} GB/s")
    return lines


def start_up() -> list[str]:
    """Returns a table of whole commands' seconds, beside importing torch and transformers' own command. They take
    turns. Our modules are compiled to bytecode, as installing does."""
    found: dict[str, list[float]] = {}
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
            for turn in range(START_UPS + 1):
                for words in commands:
                    name, *args = shlex.split(words)
                    started = time.perf_counter()
                    command(str(SCRIPTS / name), *args, cwd=folder)
                    if turn:  # the first is warm-up
                        found.setdefault(words, []).append(time.perf_counter() - started)
    alone = found[commands[0]]
    rows = [f"| command | seconds, median of {START_UPS} | beside importing torch |", "|---|---:|---:|"]
    for words, seconds in found.items():
        more = statistics.median(a - b for a, b in zip(seconds, alone, strict=True))
        beside = f"{more:+.2f}" if words.startswith("gpt sample") else ""
        rows.append(f"| `{words}` | {statistics.median(seconds):.2f} | {beside} |")
    return rows


def ours(text: str, folder: Path, *options: str) -> dict[str, float]:
    """Runs ``gpt train TEXT`` in a process of its own; returns its JSON with ``whole_seconds`` of the command."""
    started = time.perf_counter()
    out = command(str(SCRIPTS / "gpt"), "train", text, "--json", "--quiet", *options, cwd=folder)
    values: dict[str, float] = json.loads(out.splitlines()[-1])
    return values | {"whole_seconds": time.perf_counter() - started}


def nanogpt_recipe(text: str, evaluated: Callable[[int, float, float], None] | None = None) -> tuple[float, float]:
    """Trains transformers' GPT-2 by nanoGPT's recipe for a CPU; returns held-out nats per character and seconds.

    From nanoGPT's README: 4 layers of 128, 64 characters of context, batch 12, 2,000 steps of AdamW, float32.
    ``evaluated`` is called every 100 steps with the step, the seconds but for those of evaluations, and the loss
    of the first 16,384 held-out characters.
    """
    started = time.perf_counter()
    torch.manual_seed(1337)
    characters = sorted(set(text))
    ids = torch.tensor([characters.index(c) for c in text])
    cut = round(0.9 * len(ids))
    config = GPT2Config(
        vocab_size=len(characters), n_positions=64, n_layer=4, n_head=4, n_embd=128,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(2000):
        progress = (step - 100) / 1900
        rate = 1e-3 * step / 100 if step < 100 else 1e-4 + 0.45e-3 * (1 + math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = rate
        starts = torch.randint(cut - 65, (12,))
        windows = torch.stack([ids[s : s + 65] for s in starts.tolist()])
        logits = model(windows[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if evaluated is not None and (step + 1) % 100 == 0:
            paused = time.perf_counter()
            evaluated(step + 1, paused - started, _held_out_loss(model, ids[cut : cut + 2**14 + 1]))
            started += time.perf_counter() - paused
    return _held_out_loss(model, ids[cut:]), time.perf_counter() - started


@torch.no_grad()
def _held_out_loss(model: GPT2LMHeadModel, ids: torch.Tensor) -> float:
    """Returns the loss over held-out ids, in windows of 64."""
    count = (len(ids) - 1) // 64
    x, y = ids[: count * 64].view(count, 64), ids[1 : count * 64 + 1].view(count, 64)
    model.eval()
    loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
    model.train()
    return loss.item()


def texts(shakespeare: Path, folder: Path) -> dict[str, tuple[Path, Path]]:
    """Writes each text's first 90 % and its last 10 % to files of their own, to train on and to measure."""
    whole = {"tinyshakespeare": shakespeare.read_bytes()}
    for name in ("pydocs", "stdlib"):
        whole[name] = b"".join(source.open().read() for source in catalogue.sources(name))
    files = {}
    for name, data in whole.items():
        cut = round(0.9 * len(data))
        files[name] = (folder / f"{name}.txt", folder / f"{name}.val.txt")
        files[name][0].write_bytes(data[:cut].decode("utf-8", "ignore").encode())
        files[name][1].write_bytes(data[cut:].decode("utf-8", "ignore").encode())
    return files


def training(shakespeare: Path) -> list[str]:
    """Returns a table of the losses that whole commands reach in a given time, beside nanoGPT's recipe."""
    rows = [
        "The first 90 % of each text is trained on, the last 10 % measured; whole commands.",
        "",
        "| system | text | whole time | nats per byte | bits per byte | parameters | tokens/s |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    plans = [(name, arch, 1) for name in ("tinyshakespeare", "pydocs", "stdlib") for arch in ("gpt2", "modern")]
    plans += [("tinyshakespeare", arch, 3) for arch in ("gpt2", "modern")]
    with tempfile.TemporaryDirectory() as place:
        files = texts(shakespeare, Path(place))
        for name, arch, minutes in plans:
            text, held_out = map(str, files[name])
            got = ours(text, Path(place), "--val-text", held_out, "--arch", arch, "--minutes", str(minutes))
            nats = got["bits_per_byte"] * math.log(2)
            rows.append(
                f"| `gpt train --arch {arch} --minutes {minutes}` | {name} | {got['whole_seconds']:.0f} s | {nats:.4f} "
                f"| {got['bits_per_byte']:.4f} | {got['parameters']:,} | {got['tokens_per_second']:,.0f} |"
            )
            print(rows[-1], flush=True)
        for name, (text_file, held_out_file) in files.items():
            text, held = (file.read_text(encoding="utf-8") for file in (text_file, held_out_file))
            if len(set(text + held)) > 300:
                continue  # not a text for one id a character
            loss, seconds = nanogpt_recipe(text + held)
            per_byte = loss * len(held) / len(held.encode())  # characters are bytes, but for a few
            rows.append(
                f"| nanoGPT's CPU recipe, on transformers | {name} | {seconds:.0f} s | {per_byte:.4f} | "
                f"{per_byte / math.log(2):.4f} | | {2000 * 12 * 64 / seconds:,.0f} |"
            )
            print(rows[-1], flush=True)
    return rows


RECIPE = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 65}  # nanoGPT's for a GPU
ROWS = 64
ROUNDS = {"nano": 20, "tiny": 10, "micro": 10, "10.7 M": 3}  # steps of each system, in turn


def speed() -> list[str]:
    """Times whole steps of small models: ours, plain and compiled, and transformers' GPT-2 in a plain loop."""
    keep_freed_memory()
    a = torch.randn(2048, 2048).to(COMPUTE.dtype)
    rows = [
        f"Batch, forward, loss, backward, clip and update in {DTYPE}, without dropout. Systems take turns: medians, "
        "and the median ratio to the plain step of the same turn. 10.7 M: 64 sequences of 256, 6 layers of 384. MFU: "
        f"6 N + 12·L·C·T FLOPs a token, of a {DTYPE} product's rate in the same turns.",
        "",
        "| model | system | ms a step | times the plain one's speed | MFU |",
        "|---|---|---:|---:|---:|",
    ]
    for name, rounds in ROUNDS.items():
        preset = PRESETS.get(name)
        config = replace(preset.model, dropout=0.0) if preset else GPTConfig(**RECIPE)
        count = preset.batch_tokens // config.block_size if preset else ROWS
        systems: dict[str, Callable[[], object]] = {
            "`gpt train`, Muon": our_step(config, count, "muon", False),
            "`gpt train`, Muon, compiled": our_step(config, count, "muon", True),
            "`gpt train`, AdamW": our_step(config, count, "adamw", False),
            "`gpt train`, AdamW, compiled": our_step(config, count, "adamw", True),
            "transformers, SDPA, fused AdamW": peers_step(config, count, False),
            "transformers, `torch.compile`": peers_step(config, count, True),
            "peak": lambda: a @ a,
        }
        times: dict[str, list[float]] = {system: [] for system in systems}
        for turn in range(rounds + 2):
            for system, step in systems.items():
                started = time.perf_counter()
                step()
                if turn > 1:
                    times[system].append(time.perf_counter() - started)
        table = breakdown(config)
        flops = 6 * (table.trainable - table.positions) + 12 * config.n_layer * config.n_embd * config.block_size
        peak = 2 * 2048**3 / statistics.median(times.pop("peak"))
        first = next(iter(times.values()))
        for system, each in times.items():
            seconds = statistics.median(each)
            ratio = statistics.median(plain / one for plain, one in zip(first, each, strict=True))
            mfu = count * config.block_size * flops / seconds / peak
            rows.append(f"| {name} | {system} | {1e3 * seconds:,.1f} | {ratio:.2f} | {mfu:.1%} |")
            print(rows[-1], flush=True)
    return rows


def our_step(config: GPTConfig, count: int, kind: Optimizer, compiled: bool) -> Callable[[], object]:
    """Returns the step of `gpt train` on ``count`` sequences."""
    settings = TrainConfig(
        n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, block_size=config.block_size,
        batch_tokens=count * config.block_size, steps=100, optimizer=kind, dropout=0.0,
    )  # fmt: skip
    recipe = resolve(settings, COMPUTE, 10**6, 10**6, config.vocab_size, False, print)
    model = GPT(recipe.model)
    stepper = Stepper(Single(model, make_optimizer(model, kind, 0.1, COMPUTE.dtype), COMPUTE), recipe, print)
    if compiled and (failed := stepper.compile()):
        raise RuntimeError(failed)
    x, y = (torch.randint(config.vocab_size, (count, config.block_size)).numpy() for _ in range(2))
    return lambda: stepper.step(x, y, 1e-4).read()


def peers_step(config: GPTConfig, count: int, compiled: bool) -> Callable[[], object]:
    """Returns a step of transformers' GPT-2 on ``count`` sequences."""
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


class _Recorder(TorchDispatchMode):
    """Records the operators of a step with their arguments, and the floating-point operations of its products."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls an operator and records it."""
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **kwargs or {})


PHASES = ("forward", "loss", "backward", "clip", "optimizer")
FLOORED = {"nano": 9, "micro": 5, "10.7 M, 16 sequences": 3}  # steps


def floor_of(config: GPTConfig, rows: int, steps: int, peak: float) -> list[list[float]]:
    """Returns for each of `PHASES` its seconds, what its products take at the ``peak`` FLOP/s, what other operators
    take when they are called again, and the rest: the products' distance from the peak, allocation, and calls."""
    model = GPT(config)
    optimizer = make_optimizer(model, "muon", 0.1, COMPUTE.dtype)
    x, y = (torch.randint(config.vocab_size, (rows, config.block_size)) for _ in range(2))
    held: dict[str, Any] = {}

    def forward() -> None:
        held["stream"] = model.trunk(x)

    def loss() -> None:
        held["loss"] = tied_cross_entropy(held["stream"], model.unembedding, y) / y.numel()

    def update() -> None:
        optimizer.step(torch.tensor(False))
        optimizer.zero_grad()

    parts = (
        forward, loss, lambda: held["loss"].backward(), lambda: clip_grad_norm_(model.parameters(), 1.0), update,
    )  # fmt: skip
    times: list[list[float]] = []
    found = []
    for step in range(steps + 2):
        marks = [time.perf_counter()]
        for at, part in enumerate(parts):
            counter, recorder = FlopCounterMode(display=False), _Recorder()
            with COMPUTE.autocast() if at < 2 else contextlib.nullcontext(), contextlib.ExitStack() as stack:
                if step > steps:  # the last one is taken apart
                    stack.enter_context(counter)
                    stack.enter_context(recorder)
                part()
            marks.append(time.perf_counter())
            if step > steps:
                found.append([counter.get_total_flops() / peak, _others(recorder)])
        times.append([b - a for a, b in pairwise(marks)])
    medians = [statistics.median(each) for each in zip(*times[1:-1], strict=True)]
    return [[whole, *parts, whole - sum(parts)] for whole, parts in zip(medians, found, strict=True)]


@torch.no_grad()
def _others(recorder: _Recorder) -> float:
    """Returns the seconds of a phase's operators that are no products, called again."""
    seconds = 0.0
    for func, args, kwargs in recorder.calls:
        if func.is_view or any(name in func.name() for name in ("mm", "linear", "set_")):
            continue
        started = time.perf_counter()
        func(*args, **kwargs)
        seconds += time.perf_counter() - started
    return seconds


def profile() -> list[str]:
    """Returns where the time of steps goes, beside what their arithmetic takes at the machine's peak."""
    keep_freed_memory()
    a = torch.randn(2048, 2048).to(COMPUTE.dtype)
    peak = 2 * 2048**3 / median_seconds(lambda: a @ a)
    rows = [
        f"{DTYPE}, Muon, not compiled; medians, ms. *Products* is what they take at the measured "
        f"{peak / 1e9:,.0f} GFLOP/s, *other operators* what these take when called again, *rest* what is left.",
        "",
        "| model | phase | ms | products | other operators | rest |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, steps in FLOORED.items():
        preset = PRESETS.get(name)
        config = preset.model if preset else GPTConfig(**RECIPE)
        count = preset.batch_tokens // config.block_size if preset else ROWS // 4
        phases = floor_of(config, count, steps, peak)
        whole = [sum(each) for each in zip(*phases, strict=True)]
        for phase, each in zip((*PHASES, "step"), (*phases, whole), strict=True):
            rows.append(f"| {name} | {phase} | {' | '.join(f'{1e3 * seconds:.1f}' for seconds in each)} |")
    return rows


COMPARED_STEPS, SEEDS = 800, (1, 2, 3)


def optimizers(shakespeare: Path) -> list[str]:
    """Compares Muon with AdamW on the unchanged GPT-2 block, over equal tokens and over equal time."""
    rows = [
        "`gpt train --arch gpt2 --preset nano` on the first 90 % of tinyshakespeare, nats a character of the rest, "
        f"seeds {', '.join(map(str, SEEDS))}; each optimizer at its own default rate, the same schedule.",
        "",
        "| optimizer | steps of 1,024 tokens | nats a character, each seed | mean | seconds of steps, mean |",
        "|---|---:|---|---:|---:|",
    ]

    def add(kind: str, steps: int) -> float:
        nats, seconds = [], []
        for seed in SEEDS:
            got = ours(
                str(text), Path(place), "--val-text", str(held_out), "--preset", "nano", "--optimizer", kind,
                "--steps", str(steps), "--seed", str(seed), "--sample-every", "0",
            )  # fmt: skip
            nats.append(got["bits_per_byte"] * math.log(2))
            seconds.append(got["tokens_seen"] / got["tokens_per_second"])
        each = ", ".join(f"{value:.4f}" for value in nats)
        mean = statistics.mean(seconds)
        rows.append(f"| {kind} | {steps:,} | {each} | {statistics.mean(nats):.4f} | {mean:.0f} |")
        print(rows[-1], flush=True)
        return mean

    with tempfile.TemporaryDirectory() as place:
        text, held_out = texts(shakespeare, Path(place))["tinyshakespeare"]
        muon = add("muon", COMPARED_STEPS)
        adamw = add("adamw", COMPARED_STEPS)
        add("adamw", round(COMPARED_STEPS * muon / adamw))
    return rows


def main() -> None:
    """Measures all of it, and writes the sections of RESULTS.md."""
    if len(sys.argv) > 1:
        shakespeare = Path(sys.argv[1]).resolve()
    else:
        (shakespeare,) = catalogue.fetch("shakespeare")
    how = machine("python -m benchmarks.run")
    write_section("Floors", [*how, *floors()])
    write_section("Start-up", [*how, "", *start_up()])
    write_section(f"Training: speed of a step, {DTYPE}", [*how, "", *speed()])
    write_section(f"Training: where a step's time goes, {DTYPE}", [*how, "", *profile()])
    write_section("Training: Muon and AdamW", [*how, "", *optimizers(shakespeare)])
    write_section("Training: held-out loss in a given time", [*how, "", *training(shakespeare)])


if __name__ == "__main__":
    main()
