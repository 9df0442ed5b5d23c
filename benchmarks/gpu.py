"""Compares `gpt` on a GPU with the CPU, and its speed with Transformers: GPT-2 124M and 355M, GPT-3 1.3B.

    python -m benchmarks.gpu --out FOLDER             measures, in less than nine minutes on one H100
    python -m benchmarks.gpu --out FOLDER --tiny      a smoke test for any machine, in seconds
    python -m benchmarks.gpu --record FOLDER          adds the measurement to the results

Needs torch, transformers, tiktoken, safetensors, typer and rich, and no network. Every case runs in a separate process
with a time limit, so other cases survive a crash or OOM. Each case updates ``gpu.json`` and ``gpu.md`` in FOLDER;
``log.txt`` contains the stderr of all cases.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from benchmarks.results import ROOT, Section, Table, about, write_section

TITLE = "Training on a GPU"
MINUTES = 9.0  # time limit of all cases together
CHECKED_STEPS = 20  # steps of the small model, trained on both devices
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}  # allowed difference of a step's loss, in nats
TIMED_SECONDS, TIMED_STEPS = 8.0, (3, 10)  # times steps for these seconds, within a minimum and maximum count
MIN_SECONDS = 5.0  # a case starts only if this much time is left
LR = 3e-4
NO_TIME = "no time left"


@dataclass(frozen=True)
class Shape:
    """A model and its training batch."""

    name: str
    preset: str
    batch_tokens: int
    rows: int  # micro-batch for Transformers; `gpt train` chooses its own
    block_size: int = 1024


# Batch sizes are from table 2.1 of the GPT-3 paper; 1.3B uses a quarter of its batch, so that a step takes seconds.
SHAPES = {
    "124M": Shape("GPT-2 124M", "gpt2", 524_288, 16),
    "355M": Shape("GPT-2 355M", "gpt2-medium", 524_288, 16),
    "1.3B": Shape("GPT-3 1.3B", "gpt3-1.3b", 262_144, 8),
    "6.7B": Shape("GPT-3 6.7B", "gpt3-6.7b", 262_144, 1),  # measured only for decoding
    "micro": Shape("micro", "micro", 8192, 64, 128),  # the default shape for a book
    "tiny": Shape("nano", "nano", 256, 2, 32),
}


@dataclass(frozen=True)
class Case:
    """One measurement in a separate process."""

    system: Literal["floors", "checks", "ours", "transformers", "decoding"]
    shape: str = "tiny"
    optimizer: Literal["muon", "adamw"] = "adamw"
    compile: str = "auto"
    seconds: float = 120.0  # time limit
    texts: int = 0  # decoded batch size; 0 for training

    def title(self) -> str:
        """Describes the case."""
        if self.texts:
            return f"{self.system} {self.shape} {self.texts} texts"
        return f"{self.system} {self.shape} {self.optimizer} compile {self.compile}" if self.shape else self.system


# The most important cases come first, since time can run out.
CASES = [
    Case("floors", "", seconds=60),
    Case("checks", ""),
    Case("ours", "124M", "muon"),
    Case("transformers", "124M"),
    Case("ours", "1.3B", "muon"),
    Case("transformers", "1.3B"),
    Case("decoding", "124M", texts=1),
    Case("decoding", "124M", texts=64),
    Case("ours", "micro", "muon", seconds=30),
    Case("transformers", "micro", compile="off", seconds=30),
    Case("ours", "124M", "adamw"),
    Case("ours", "355M", "muon"),
    Case("transformers", "355M"),
    Case("ours", "124M", "muon", compile="off", seconds=60),
    Case("transformers", "124M", compile="off", seconds=60),
    Case("decoding", "124M", texts=8),
    Case("decoding", "6.7B", texts=1, seconds=180),
]
TINY_CASES = [
    Case("floors", ""),
    Case("checks", ""),
    Case("ours", "tiny", "muon", compile="off"),
    Case("ours", "tiny", "adamw", compile="off"),
    Case("transformers", "tiny", compile="off"),
    Case("decoding", "tiny", texts=2),
]


# The process of one case


def floors(tiny: bool) -> dict[str, Any]:
    """Measures the device's limits: products of random bfloat16 matrices, and memory copies."""
    import torch

    from gpt.config.device import pick
    from gpt.system.peaks import peak_flops

    device = pick(training=True).device
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else device.type
    products = {}
    for size in (128,) if tiny else (4096, 8192, 16_384):
        a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        products[size] = 2 * size**3 / _median_seconds(lambda a=a, b=b: a @ b, device)
    source = torch.ones(2**16 if tiny else 2**30, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _median_seconds(lambda: target.copy_(source), device)
    return {
        "device": name,
        "memory": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        "cuda": torch.version.cuda,
        "products": products,
        "measured_peak": max(products.values()),
        "datasheet_peak": peak_flops(name, "bfloat16"),
        "copy_bytes_per_second": copied,
    }


def checks(tiny: bool) -> dict[str, Any]:
    """Trains a small model on the device and on the CPU, and compares losses and greedy texts. Also compares a resumed
    run with an uninterrupted run."""
    import gpt
    from gpt.config import events
    from gpt.config.device import pick
    from gpt.system.errors import UserError

    device, rows, expected = pick(training=True).device.type, list[dict[str, Any]](), list[float]()
    model_settings: dict[str, Any] = {
        "tokenizer": "bytes", "n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "batch_tokens": 1024,
        "lr": 3e-3, "sample_every": 0, "eval_every": CHECKED_STEPS, "compile": "off", "dropout": 0.0,
        "warmup": 1, "weight_decay": 0.1,
    }  # fmt: skip

    def losses(start: Callable[..., Any], *texts: Any, **settings: Any) -> tuple[Path, list[float]]:
        event_log: list[Any] = []
        run = start(*texts, listen=event_log.append, **settings).run.absolute()
        return run, [event.loss for event in event_log if isinstance(event, events.StepEvent)]

    def train(name: str, device: str, dtype: str, **overrides: Any) -> tuple[Path, list[float]]:
        settings = model_settings | {"out": name, "device": device, "dtype": dtype, "steps": CHECKED_STEPS} | overrides
        return losses(gpt.train, ROOT / "README.md", **settings)

    def generate_text(run: Path, device: str, **options: Any) -> str:
        model = gpt.load(run, device=device, dtype="float32", **options)
        return model.generate("The ", greedy=True, max_tokens=60)[0]

    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        start, expected = train("cpu", "cpu", "float32")
        for dtype in LOSS_TOLERANCE:
            for compiled in ("off", "on")[: 1 if tiny else 2]:
                row: dict[str, Any] = {"dtype": dtype, "compile": compiled}
                try:
                    run, device_losses = train(f"{dtype}-{compiled}", device, dtype, compile=compiled)
                    row["apart"] = max(abs(one - other) for one, other in zip(device_losses, expected, strict=True))
                    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
                    fell_back = compiled == "on" and not record["resolved"]["compile"]
                    row["error"] = "not compiled" if fell_back else ""
                except UserError as error:
                    row["error"] = str(error)
                rows.append(row)
        half_run = train("half", device, "float32", steps=CHECKED_STEPS // 2, schedule="constant")[0]
        resumed = losses(gpt.resume, half_run, steps=CHECKED_STEPS)[1]
        uninterrupted = train("whole", device, "float32", schedule="constant")[1][CHECKED_STEPS // 2 :]
        return {
            "losses": rows,
            "resumed_apart": max(abs(one - other) for one, other in zip(resumed, uninterrupted, strict=True)),
            "same_text": generate_text(start, device) == generate_text(start, "cpu"),
        }


def _median_seconds(work: Callable[[], object], device: Any) -> float:
    """Returns the median seconds of a call of ``work`` after three warm-up calls. Times 5 to 200 calls, for half a
    second if possible."""
    for _ in range(3):
        work()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < 0.5 and len(times) < 200):
        times.append(_timed(work, device))
    return statistics.median(times)


def _timed(work: Callable[[], object], device: Any) -> float:
    _synchronize(device)
    start_time = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start_time


def _synchronize(device: Any) -> None:
    """Waits until a GPU has finished all launched work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def training(case: Case) -> dict[str, Any]:
    """Trains on random ids; returns tokens per second, memory and losses."""
    import torch

    from gpt.model.params import breakdown, flops_per_token

    make_step = make_gpt_step if case.system == "ours" else make_transformers_step
    torch.manual_seed(1337)
    start_time = time.perf_counter()
    step, about = make_step(case)
    config, device = about.pop("config"), about.pop("device")
    losses, times = [step() for _ in range(3)], []  # warm-up: compilation, allocation, graph capture
    _synchronize(device)
    warm_up = time.perf_counter() - start_time
    min_steps, max_steps = (1, 1) if case.shape == "tiny" else TIMED_STEPS
    while len(times) < min_steps or (len(times) < max_steps and sum(times) < TIMED_SECONDS):
        times.append(_timed(lambda: losses.append(step()), device))
    if not all(map(math.isfinite, losses)):
        raise ArithmeticError(f"losses that are not finite: {losses}")
    shape = SHAPES[case.shape]
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return about | {
        "parameters": breakdown(config).trainable,
        "flops_per_token": flops_per_token(config, shape.block_size),
        "batch_tokens": shape.batch_tokens,
        "seconds_to_warm": round(warm_up, 1),
        "seconds": times,
        "tokens_per_second": shape.batch_tokens / statistics.median(times),
        "peak_memory": memory,
        "losses": losses,
    }


def decoding(case: Case) -> dict[str, Any]:
    """Measures decoding: random weights, greedy texts after random prompts."""
    from benchmarks.decoding_speed import measure
    from gpt.config.device import pick
    from gpt.config.model import PRESETS
    from gpt.decoding.weights import prepare
    from gpt.model.decoder import GPT
    from gpt.model.params import breakdown

    shape, compute, notes = PRESETS[SHAPES[case.shape].preset].model, pick(), list[str]()
    with compute.device:
        model = prepare(GPT(shape).eval(), compute)
    prompt, new = (4, 8) if case.shape == "tiny" else (32, 256)
    sizes = {"prompt_tokens": prompt, "new_tokens": new, "batch": case.texts}
    result = measure(model, compute, **sizes, rounds=2, note=notes.append)
    return {
        "parameters": breakdown(shape).trainable,
        "dtype": compute.dtype_name,
        "cuda_graphs": notes[-1] if notes else "yes" if compute.device.type == "cuda" else "no",
        "prompt_tokens": prompt,
        "new_tokens": new,
        "tokens_per_second": result.decode_tokens_per_second,
        "milliseconds_a_step": 1e3 * case.texts / result.decode_tokens_per_second,
        "prefill_tokens_per_second": result.prefill_tokens_per_second,
        "bandwidth_share": result.bandwidth_share,
        "peak_memory": result.memory_bytes,
    }


def _ids(shape: Shape, vocab_size: int, device: Any) -> tuple[Any, Any]:
    """Returns random inputs and targets, both (rows, T)."""
    import torch

    ids = torch.randint(vocab_size, (shape.batch_tokens // shape.block_size, shape.block_size + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def make_gpt_step(case: Case) -> tuple[Callable[[], float], dict[str, Any]]:
    """Returns a training step with the settings that `gpt train` chooses, and a description."""
    from gpt.config.device import pick
    from gpt.config.model import find_preset
    from gpt.config.train import TrainConfig
    from gpt.model.decoder import GPT
    from gpt.training.optim import make_optimizer
    from gpt.training.recipe import Facts, plan
    from gpt.training.step import Stepper
    from gpt.training.strategy import Single

    shape = SHAPES[case.shape]
    config = TrainConfig(
        preset=shape.preset, block_size=shape.block_size, batch_tokens=shape.batch_tokens, optimizer=case.optimizer,
        arch="gpt2", steps=1000, dropout=0.0, compile=case.compile,
    )  # fmt: skip
    compute = pick(config.device, config.dtype, training=True)
    vocab_size = 128 if case.shape == "tiny" else find_preset(shape.preset).model.vocab_size
    recipe = plan(config, Facts.on(compute, bytes=10**10, tokens=10**9, vocab_size=vocab_size, held_out=True))
    with compute.device:
        model = GPT(recipe.model)
    optimizer = make_optimizer(model, recipe.optimizer, recipe.weight_decay, compute.dtype)
    stepper = Stepper(Single(model, optimizer, compute), recipe)
    about: dict[str, Any] = {"config": recipe.model, "device": compute.device, "dtype": compute.dtype_name}
    failed = stepper.compile() if recipe.compile else None
    about["compiled"] = f"failed: {failed:.200}" if failed else "yes" if recipe.compile else "no"
    x, y = (ids.cpu().numpy() for ids in _ids(shape, vocab_size, compute.device))

    def step() -> float:
        loss, _ = stepper.step(x, y, LR).read()
        about["micro_batch"] = stepper.micro_batch
        return loss

    return step, about


def make_transformers_step(case: Case) -> tuple[Callable[[], float], dict[str, Any]]:
    """Returns a training step of Transformers' GPT-2, and a description. The step uses SDPA, autocast and fused AdamW,
    and is compiled unless the case says otherwise."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from gpt.config.device import pick
    from gpt.config.model import GPTConfig, find_preset

    shape = SHAPES[case.shape]
    compute = pick("auto", "auto", training=True)
    preset = find_preset(shape.preset).model
    vocab_size = 128 if case.shape == "tiny" else preset.vocab_size
    torch.set_float32_matmul_precision("high")
    settings = GPT2Config(
        vocab_size=vocab_size, n_positions=shape.block_size, n_layer=preset.n_layer, n_head=preset.n_head,
        n_embd=preset.n_embd, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        attn_implementation="sdpa", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with compute.device:
        model: Any = GPT2LMHeadModel(settings)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    call = torch.compile(model) if case.compile != "off" else model
    x, _ = _ids(shape, vocab_size, compute.device)
    about: dict[str, Any] = {"device": compute.device, "dtype": compute.dtype_name, "micro_batch": shape.rows}
    about["compiled"] = "no" if case.compile == "off" else "yes"
    about["config"] = GPTConfig(vocab_size, shape.block_size, preset.n_layer, preset.n_head, preset.n_embd)

    def step() -> float:
        total = torch.zeros((), device=compute.device)
        parts = x.split(shape.rows)
        for part in parts:
            with compute.autocast():
                loss = call(input_ids=part, labels=part).loss / len(parts)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return step, about


# The process that starts the cases


def main(args: list[str] | None = None) -> None:
    """Runs all cases or one case, or records a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write gpu.json, gpu.md and log.txt to this folder")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model: a smoke test")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"time limit of all cases ({MINUTES:g})")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="add the measurement in it to the results")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.case:
        case = Case(**json.loads(options.case))
        device_cases = {"floors": floors, "checks": checks}
        measure_case = decoding if case.system == "decoding" else training
        values = device_cases[case.system](options.tiny) if case.system in device_cases else measure_case(case)
        print(json.dumps(values), flush=True)
    elif options.record:
        write_section("gpu", section(json.loads((options.record / "gpu.json").read_text(encoding="utf-8"))))
    elif options.out:
        measure(options.out, options.tiny, time.monotonic() + 60 * options.minutes)
    else:
        parser.error("give --out FOLDER or --record FOLDER")


def measure(out: Path, tiny: bool, deadline: float) -> None:
    """Runs cases in separate processes until ``deadline``, and updates ``out`` after each case."""
    out.mkdir(parents=True, exist_ok=True)
    command = "python -m benchmarks.gpu" + " --tiny" * tiny
    about_run = about(command, ["torch", "transformers", "numpy"])
    report: dict[str, Any] = {"about": about_run, "floors": {}, "checks": {}, "cases": []}
    for case in TINY_CASES if tiny else CASES:
        words = [sys.executable, "-m", "benchmarks.gpu", "--case", json.dumps(asdict(case)), *["--tiny"] * tiny]
        result = run(words, min(case.seconds, deadline - time.monotonic()), out / "log.txt")
        if case.system in report:
            report[case.system] = result
        else:
            report["cases"].append(asdict(case) | result)
        _write(out / "gpu.json", json.dumps(report, indent=1) + "\n")
        _write(out / "gpu.md", f"{section(report)}\n")
        print(case.title(), json.dumps({k: v for k, v in result.items() if k not in ("losses", "seconds")}), flush=True)
    print((out / "gpu.md").read_text(encoding="utf-8"))


def _write(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def run(command: list[str], seconds: float, log: Path) -> dict[str, Any]:
    """Runs a command for up to ``seconds``, then kills its process group. Returns the last JSON object in stdout, or an
    ``error``."""
    if seconds < MIN_SECONDS:
        return {"error": NO_TIME}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=stderr, start_new_session=True)
        error = f"not finished after {seconds:.0f} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(seconds)
            error = f"exit status {code}" if code else ""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # This also kills compiler workers.
        process.wait()
        out, err = (_read_all(file) for file in (stdout, stderr))
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n{err}\n")
    results = [line for line in out.splitlines() if line.startswith("{")]
    if error or not results:
        error_lines = [line for line in err.splitlines() if "Error" in line][-1:]
        return {"error": "; ".join([error or "no output", *(line[:200] for line in error_lines)])}
    values: dict[str, Any] = json.loads(results[-1])
    return values


def _read_all(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def section(report: dict[str, Any]) -> Section:
    """Returns a report as a section of the results."""
    floors = report["floors"]
    if "error" in floors:
        notes = [f"The device's limits were not measured: {floors['error']}."]
    else:
        products = ", ".join(f"{rate / 1e12:,.1f} ({size}³)" for size, rate in floors["products"].items())
        sheet = floors["datasheet_peak"]
        notes = [
            f"bfloat16 matrix products: {products} TFLOP/s; datasheet: {f'{sheet / 1e12:,.1f}' if sheet else 'none'}.",
            f"Copying memory, read and write: {floors['copy_bytes_per_second'] / 1e9:,.0f} GB/s.",
        ]
    check_results, tables = report.get("checks") or {}, list[Table]()
    if "losses" in check_results:
        tables.append(_checks_table(check_results))
    elif check_results:
        notes.append(f"Not compared with the CPU: {check_results['error']}.")
    started_cases = [case for case in report["cases"] if case.get("error") != NO_TIME]
    tables.append(
        Table(
            ["system", "model", "optimizer", "compiled", "tokens/step", "micro-batch", "tokens/s", "MFU",
             "MFU, measured peak", "peak memory", "warm-up"],
            [_row(case, floors) for case in started_cases if not case["texts"]],
            "Training on random ids with 1,024 tokens of context (`micro`: 128) in bfloat16: medians of whole steps. "
            "MFU counts 6 N + 12·L·C·T FLOPs per token, relative to the datasheet's peak; the *measured peak* is that "
            "of the fastest product above. `gpt train` chooses its own micro-batch. Transformers: GPT-2 with SDPA, "
            "fused AdamW, autocast and torch.compile, with the loss in the graph.",
        )
    )  # fmt: skip
    decoding_rows = [_decoding_row(case) for case in started_cases if case["texts"]]
    if decoding_rows:
        columns = ["model", "dtype", "texts", "CUDA graphs", "decoding, tokens/s", "ms/step", "prompt, tokens/s",
                   "bandwidth", "peak memory"]  # fmt: skip
        caption = (
            "Decoding: greedy texts after random prompts, random weights, one token per text and "
            "step. *Bandwidth* is the share of what a sum over memory reaches in this run."
        )
        tables.append(Table(columns, decoding_rows, caption))
    machine = f"{floors.get('device', 'unknown device')}, CUDA {floors.get('cuda')}; {report['about']['machine']}"
    return Section(TITLE, **report["about"] | {"machine": machine}, notes=notes, tables=tables)


def _checks_table(check_results: dict[str, Any]) -> Table:
    rows = []
    for row in check_results["losses"]:
        name = f"losses in {row['dtype']}" + (", compiled" if row["compile"] == "on" else "")
        if "apart" in row:
            verdict = "" if row["apart"] <= LOSS_TOLERANCE[row["dtype"]] else ": **too far**"
            rows.append([name, f"at most {row['apart']:.1e} nats apart{verdict}"])
        if row["error"]:
            rows.append([name, f"**{row['error']}**"])
    resume_step = CHECKED_STEPS // 2
    rows.append(
        [f"losses after resuming at step {resume_step}", f"at most {check_results['resumed_apart']:.1e} nats apart"]
    )
    rows.append(["greedy text in float32", "the same" if check_results["same_text"] else "**different**"])
    caption = f"Compared with the CPU in float32, {CHECKED_STEPS} steps of a small model:"
    return Table(["check", "result"], rows, caption)


def _decoding_row(case: dict[str, Any]) -> list[str]:
    cells = [SHAPES[case["shape"]].name, case.get("dtype", ""), str(case["texts"])]
    if "error" in case:
        return [*cells, case["error"], *[""] * 5]
    return [
        *cells, case["cuda_graphs"], f"{case['tokens_per_second']:,.0f}", f"{case['milliseconds_a_step']:.2f}",
        f"{case['prefill_tokens_per_second']:,.0f}", f"{case['bandwidth_share']:.0%}",
        f"{case['peak_memory'] / 1e9:.1f} GB",
    ]  # fmt: skip


def _row(case: dict[str, Any], floors: dict[str, Any]) -> list[str]:
    shape = SHAPES[case["shape"]]
    system = "`gpt train`" if case["system"] == "ours" else "Transformers"
    cells = [system, shape.name, case["optimizer"], case.get("compiled", case["compile"]), f"{shape.batch_tokens:,}"]
    if "error" in case:
        return [*cells, case["error"], *[""] * 5]
    speed, flops = case["tokens_per_second"], case["flops_per_token"]
    shares = [floors.get(peak) for peak in ("datasheet_peak", "measured_peak")]
    return [
        *cells, f"{case['micro_batch']} × {shape.block_size:,}", f"{speed:,.0f}",
        *(f"{speed * flops / peak:.1%}" if peak else "" for peak in shares),
        f"{case['peak_memory'] / 1e9:.1f} GB" if case["peak_memory"] else "", f"{case['seconds_to_warm']:.0f} s",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
