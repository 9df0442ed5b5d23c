"""Measures training and decoding of `nano` on a busy machine, by thread count and wait policy.

    python -m benchmarks.contention [--rounds N]

Takes about ten minutes on an otherwise idle machine. Figures are medians over rounds; in each round, the
settings take turns. If a training run reaches the time limit, its throughput until then counts.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results import SCRIPTS, Table, measured, write_section
from gpt.system.waiting import POLICY

STEPS, NEW_TOKENS, TIMEOUT = 60, 32, 25.0  # steps to train, tokens to decode, time limit in seconds
PROCESS_COUNTS = (0, 1, 4)
GPT = str(SCRIPTS / "gpt")
CORES = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
SPINNING = {"GOMP_SPINCOUNT": "299999"}  # close to GNU OpenMP's default; a set value disables `gpt.system.waiting`
SETTINGS: dict[str, tuple[dict[str, str], list[str]]] = {
    "default": (POLICY, []),
    "threads always spin": (SPINNING, ["--threads", CORES]),
    "threads always sleep (`OMP_WAIT_POLICY=passive`)": ({"OMP_WAIT_POLICY": "passive"}, ["--threads", CORES]),
    "`--threads 1`": (POLICY, ["--threads", "1"]),
}


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Runs ``count`` busy loops in other processes."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(environment: dict[str, str], *words: str) -> str:
    """Returns the stdout of a program, or an empty string after ``TIMEOUT`` seconds."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "GPT_"))}
    try:
        result = subprocess.run(
            words, env=clean | environment, capture_output=True, text=True, timeout=TIMEOUT, encoding="utf-8"
        )
    except subprocess.TimeoutExpired:
        return ""
    if result.returncode:
        sys.exit(result.stderr)
    return result.stdout


def training_speed(tokens: Path, environment: dict[str, str], words: list[str]) -> float:
    """Returns the training speed in tokens per second."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        intervals = ["--eval-every", str(STEPS), "--sample-every", "0"]
        options = ["--preset", "nano", "--steps", str(STEPS), "-o", str(folder), *intervals]
        run(environment, GPT, "train", str(tokens), *options, *words)
        if not (folder / "metrics.jsonl").exists():
            return 0.0
        events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return max((e["step"], e["tokens_per_second"]) for e in events if e["event"] == "step")[1]


def decoding_speed(environment: dict[str, str], words: list[str]) -> float:
    """Returns the decoding speed in tokens per second, excluding the prompt, or 0 after a timeout."""
    program = [sys.executable, "-m", "benchmarks.decoding_speed", "nano", "--new-tokens", str(NEW_TOKENS)]
    out = run(environment, *program, *words)
    return json.loads(out)["decode_tokens_per_second"] if out else 0.0


def measure_rows(tokens: Path, rounds: int) -> Iterator[list[str]]:
    """Yields the rows of the table."""
    for count in PROCESS_COUNTS:
        training: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
        decoding: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
        with busy_processes(count):
            for _ in range(rounds):
                for setting, (environment, words) in SETTINGS.items():
                    training[setting].append(training_speed(tokens, environment, words))
                    decoding[setting].append(decoding_speed(environment, words))
        for setting in SETTINGS:
            cells = [[f"{statistics.median(runs[setting]):,.0f}", ", ".join(f"{rate:,.0f}" for rate in runs[setting])]
                     for runs in (training, decoding)]  # fmt: skip
            yield [str(count), setting, *cells[0], *cells[1]]


def main() -> None:
    """Measures and writes the section."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as place:
        tokens = Path(place) / "tokens"
        run({}, GPT, "tokenize", "pydocs", "--vocab-size", "1024", "--val-fraction", "0.02", "-o", str(tokens))
        table_rows = list(measure_rows(tokens, rounds))
    notes = [
        f"`nano` next to other programs that only compute, in tokens per second: training ({STEPS} steps of 1,024 "
        f"tokens) and decoding ({NEW_TOKENS} tokens, greedy).",
        f"Medians of {rounds} rounds, and each round; the settings take turns. 0: not finished after {TIMEOUT:g} s.",
    ]
    columns = ["other programs", "threads", "training", "training, each round", "decoding", "decoding, each round"]
    section = measured("Beside other programs", "python -m benchmarks.contention", notes, [Table(columns, table_rows)])
    write_section("contention", section)


if __name__ == "__main__":
    main()
