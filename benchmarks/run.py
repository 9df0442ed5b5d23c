"""Measures this machine's limits, start-up and training, beside the peers, for `make bench` and RESULTS.md.

    python -m benchmarks.run [TEXT]

TEXT is tinyshakespeare, as a file; without it the catalogue's is fetched.
"""

import json
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.results import SCRIPTS, command, machine, median_seconds, write_section
from gpt.config import GPTConfig, find_preset
from gpt.model import decoder
from gpt.model.decoder import GPT
from gpt.model.loss import tied_cross_entropy
from gpt.model.params import breakdown
from gpt.runs import checkpoint
from gpt.text import catalogue
from gpt.text.tokenizer import bytes_tokenizer
from gpt.training.optim import make_optimizer

START_UPS = 7


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
ROWS, STEPS = 64, 5


def speed() -> list[str]:
    """Times steps of nanoGPT's recipe for a GPU (10.7 M parameters): ours, and transformers' GPT-2 in a plain loop."""
    config = GPTConfig(**RECIPE)
    x, y = (torch.randint(65, (ROWS, 256)) for _ in range(2))
    flops = 6 * (breakdown(config).trainable - breakdown(config).positions) + 12 * 6 * 384 * 256
    a = torch.randn(2048, 2048).to(torch.bfloat16)
    peak = 2 * 2048**3 / median_seconds(lambda: a @ a)
    rows = [
        f"{ROWS} sequences of 256, 6 layers of 384. MFU: {flops:,} FLOPs a token (6 N + 12·L·C·T), of the measured "
        f"{peak / 1e9:,.0f} GFLOP/s of a bfloat16 product.",
        "",
        "| system | s a step | tokens/s | MFU |",
        "|---|---:|---:|---:|",
    ]

    def add(name: str, step: Callable[[], object]) -> None:
        seconds = median_seconds(step, STEPS)
        rate = ROWS * 256 / seconds
        rows.append(f"| {name} | {seconds:.2f} | {rate:,.0f} | {rate * flops / peak:.1%} |")
        print(rows[-1], flush=True)

    def loop(model: nn.Module, optimizers: Sequence[Optimizer], dtype: torch.dtype) -> Callable[[], None]:
        def step() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                out = model(x)
            logits = getattr(out, "logits", out)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return step

    kinds: tuple[Literal["muon", "adamw"], ...] = ("muon", "adamw")
    for kind in kinds:
        model = GPT(config)
        optimizer = make_optimizer(model, kind, 0.1, torch.bfloat16)
        optimizer.set_lr(1e-3)
        add(f"`gpt train`'s step, bfloat16, {kind}", loop(model, optimizer.parts, torch.bfloat16))
    for dtype in (torch.bfloat16, torch.float32):
        peer = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=65, n_positions=256, n_layer=6, n_head=6, n_embd=384,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
        adamw = torch.optim.AdamW(peer.parameters(), lr=1e-3, fused=True)
        add(f"transformers' GPT-2, SDPA, fused AdamW, {str(dtype)[6:]}", loop(peer, [adamw], dtype))
        add(f"the same, torch.compile, {str(dtype)[6:]}", loop(torch.compile(peer), [adamw], dtype))  # type: ignore
    return rows


def profile() -> list[str]:
    """Returns the shares of a step's time for `nano`, ours and with torch's fused attention and torch.optim.Muon."""
    config = find_preset("nano").model
    rows = [
        "`nano`, 16 sequences of 64, bfloat16, Muon; medians of 15 steps.",
        "",
        "| step | ms | forward | unembedding and loss | backward | clip | optimizer |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    x, y = (torch.randint(config.vocab_size, (16, config.block_size)) for _ in range(2))
    for name in ("torch's fused attention, torch.optim.Muon", "ours"):
        model = GPT(config)
        parts: Sequence[Optimizer] = make_optimizer(model, "muon", 0.1, torch.bfloat16).parts
        if name != "ours":
            matrices = [p for group in parts[0].param_groups for p in group["params"]]
            parts = [torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"), parts[1]]
        plain, decoder.PLAIN_UP_TO = decoder.PLAIN_UP_TO, decoder.PLAIN_UP_TO if name == "ours" else 0
        times: list[list[float]] = []
        for _ in range(18):
            marks = [time.perf_counter()]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                stream = model.trunk(x)
                marks.append(time.perf_counter())
                loss = tied_cross_entropy(stream, model.wte.weight, y) / y.numel()
            marks.append(time.perf_counter())
            loss.backward()
            marks.append(time.perf_counter())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            marks.append(time.perf_counter())
            for part in parts:
                part.step()
                part.zero_grad()
            marks.append(time.perf_counter())
            times.append([b - a for a, b in pairwise(marks)])
        decoder.PLAIN_UP_TO = plain
        medians = [statistics.median(each) for each in zip(*times[3:], strict=True)]
        shares = " | ".join(f"{seconds / sum(medians):.0%}" for seconds in medians)
        rows.append(f"| {name} | {1000 * sum(medians):.0f} | {shares} |")
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
    write_section("Training: speed of a step", [*how, "", *speed()])
    write_section("Training: where a step's time goes", [*how, "", *profile()])
    write_section("Training: Muon and AdamW", [*how, "", *optimizers(shakespeare)])
    write_section("Training: held-out loss in a given time", [*how, "", *training(shakespeare)])


if __name__ == "__main__":
    main()
