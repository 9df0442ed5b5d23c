"""Hundreds of faults: killed and interrupted runs, failing disks, damaged checkpoints.

    python -m tests.stress.faults [--quick] [kills|signals|ranks|disk|damage]...

Every run is resumed and must end in the same state as an uninterrupted run. POSIX only.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

from gpt.runs import folder
from gpt.system.errors import UserError

COUNTS = {"kills": 200, "signals": 50, "ranks": 10, "damage": 5000}
QUICK = {"kills": 20, "signals": 10, "ranks": 10, "damage": 500}
PARTS = ["kills", "signals", "ranks", "disk", "damage"]
TINY = [
    "--n-layer", "2", "--n-head", "2", "--n-embd", "64", "--block-size", "32", "--batch-tokens", "256", "--dtype",
    "float32", "--dropout", "0.1", "--steps", "120", "--eval-every", "10", "--save-every", "5", "--sample-every",
    "40", "--keep", "2", "--vocab-size", "400", "--quiet",
]  # fmt: skip
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)


# Killed and interrupted runs


def write_text(path: Path, count: int = 12_000) -> Path:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(300)]
    path.write_text(" ".join(rng.choice(words) for _ in range(count)), encoding="utf-8")
    return path


def start(*words: str, cwd: Path) -> "subprocess.Popen[str]":
    command = [str(Path(sys.executable).with_name("gpt")), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=cwd, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)


def state_checksum(run: Path) -> str:
    path = run / folder.checkpoints(run)[-1].name
    names = ("model.safetensors", "training.safetensors")
    return hashlib.sha256(b"".join((path / name).read_bytes() for name in names)).hexdigest()


def torn(run: Path) -> list[str]:
    """Returns the checksum errors of a run's checkpoints."""
    errors = []
    for entry in folder.checkpoints(run):
        try:
            folder.verify_checksums(run / entry.name, training=True)
        except UserError as error:
            errors.append(error.message)
    return errors


def wait_for_save(run: Path, process: "subprocess.Popen[str]", rng: random.Random) -> None:
    """Waits until a random checkpoint is being written."""
    saves, target = 0, rng.randint(1, 12)
    was_writing = False
    while process.poll() is None and saves < target:
        writing = run.is_dir() and any(run.glob(".tmp-step-*"))
        saves += writing and not was_writing
        was_writing = writing
        time.sleep(0.0005)
    time.sleep(rng.random() * 0.01)


def wait_for_step(run: Path, process: "subprocess.Popen[str]", rng: random.Random) -> None:
    metrics, target = run / "metrics.jsonl", rng.randint(1, 110)
    while process.poll() is None and (not metrics.exists() or metrics.read_text().count('"event": "step"') < target):
        time.sleep(rng.random() * 0.02)


def resume_and_check(place: Path, run: Path, words: list[str], expected: str) -> str | None:
    """Resumes and deletes a run. Returns an error, or None."""
    process = start(*words, cwd=place)
    _, err = process.communicate(timeout=600)
    if process.returncode:
        return f"exit {process.returncode}: {err.strip()[-300:]}"
    if "Traceback" in err:
        return err
    if torn(run):
        return f"torn: {torn(run)}"
    if state_checksum(run) != expected:
        return "another state than that of a run that went through"
    shutil.rmtree(run, ignore_errors=True)
    return None


def resume_arguments(run: Path) -> list[str]:
    """Returns the arguments that resume a run. Deletes a run without ``run.json``."""
    if folder.is_run(run):
        return ["train", "--resume", str(run), "--quiet"]
    shutil.rmtree(run, ignore_errors=True)
    return []


def killed(place: Path, text: Path, number: int, seconds: float, expected: str) -> str:
    """Kills a run and resumes it. Returns the moment of the kill, or an error.

    Kills during a save if ``number`` is odd, at a random time if it is a multiple of four, otherwise at a random step.
    """
    rng = random.Random(number)
    run = place / f"killed-{number}"
    train = ["train", str(text), "-o", str(run), *TINY]
    process = start(*train, cwd=place)
    if number % 2:
        wait_for_save(run, process, rng)
    elif number % 4:
        wait_for_step(run, process, rng)
    else:
        time.sleep(rng.random() * seconds)
    process.kill()
    process.communicate()
    moment = "finished" if process.returncode == 0 else "before run.json"
    if folder.is_run(run) and process.returncode:
        moment = "within a save" if any(run.glob(".tmp-step-*")) else "training" if any(run.glob("step-*")) else "begun"
        if torn(run):
            return f"torn after the kill: {torn(run)}"
    return resume_and_check(place, run, resume_arguments(run) or train, expected) or moment


def stopped(place: Path, text: Path, number: int, seconds: float, expected: str) -> str:
    """Sends a signal to a run at a random step, and resumes it with the printed command."""
    rng = random.Random(1000 + number)
    run = place / f"stopped-{number}"
    process = start("train", str(text), "-o", str(run), *TINY, cwd=place)
    signum = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    wait_for_step(run, process, rng)
    process.send_signal(signum)
    _, err = process.communicate(timeout=600)
    if process.returncode == 0:
        return "finished" if state_checksum(run) == expected else "another state"
    if process.returncode not in (128 + signum, -signum) or "Traceback" in err:
        return f"exit {process.returncode}: {err}"
    command = re.search(r"resume with: gpt (.*)", err)
    if command is None and folder.is_run(run) and json.loads((run / folder.RECORD).read_text()).get("ended"):
        return "finished"  # The signal arrived while Python was exiting.
    if command is None:
        return "before the first step" if not folder.is_run(run) else f"no command: {err}"
    return resume_and_check(place, run, [*shlex.split(command[1]), "--quiet"], expected) or "saved and gone on with"


def process_of(launcher: int, rank: int) -> int | None:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            parent = (path.parent / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == launcher and f"\0RANK={rank}\0" in path.read_text():
                return int(path.parent.name)
    return None


def kill_rank(place: Path, text: Path, number: int, expected: str, seconds: list[float]) -> str:
    """Kills a random rank of a run with two ranks, and resumes the run.

    Appends to ``seconds`` how many seconds after the kill the command ended.
    """
    rng = random.Random(2000 + number)
    run = place / f"rank-{number}"
    train = ["train", str(text), "-o", str(run), *TINY, "--nproc", "2"]
    process = start(*train, cwd=place)
    rank, step = rng.randint(0, 1), rng.randint(0, 90)
    while (victim := process_of(process.pid, rank)) is None:
        time.sleep(0.01)
    while step >= 5 and process.poll() is None and not (run / folder.step_name(step // 5 * 5)).exists():
        time.sleep(0.005)
    time.sleep(rng.random() * (0.1 if step >= 5 else 5))
    killed_at = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=600)
    if process.returncode == 0:
        return "finished"
    seconds.append(time.monotonic() - killed_at)
    lines = err.splitlines()
    if process.returncode != 1 or not lines[0].startswith(f"error: process {rank} of 2 was killed by SIGKILL"):
        return f"exit {process.returncode}: {err}"
    moment = "while training" if any(run.glob("step-*")) else "before the first checkpoint"
    return (
        resume_and_check(place, run, resume_arguments(run) or train, expected)
        or f"same state, rank {rank} killed {moment}"
    )


def kill_ranks(count: int, place: Path) -> tuple[Counter[str], float]:
    """Kills a rank in each of ``count`` runs. Returns the outcomes, and the maximum seconds from kill to exit."""
    text, baseline, seconds = write_text(place / "text.txt"), place / "whole", [0.0]
    _, err = start("train", str(text), "-o", str(baseline), *TINY, "--nproc", "2", cwd=place).communicate(timeout=600)
    assert folder.checkpoints(baseline), err
    expected = state_checksum(baseline)
    return Counter(kill_rank(place, text, number, expected, seconds) for number in range(count)), max(seconds)


def many(numbers: range, place: Path, *kinds: Callable[..., str]) -> list[Counter[str]]:
    """Calls each of ``kinds`` with each of ``numbers``, two calls at a time. Returns the outcomes of each kind."""
    text = write_text(place / "text.txt", 4_000)
    start_time = time.monotonic()
    baseline = start("train", str(text), "-o", str(place / "whole"), *TINY, cwd=place)
    _, err = baseline.communicate(timeout=600)
    assert baseline.returncode == 0, err
    seconds = time.monotonic() - start_time
    expected = state_checksum(place / "whole")
    with ThreadPoolExecutor(2) as pool:
        return [
            Counter(pool.map(lambda number, kind=kind: kind(place, text, number, seconds * 1.3, expected), numbers))
            for kind in kinds
        ]


# Failing disks


class FailingDisk:
    """Counts writes, syncs, renames and mkdirs below ``root``; the ``n``-th fails."""

    def __init__(self, root: Path, n: int, code: int) -> None:
        self.root, self.n, self.code = str(root), n, code
        self.count = 0
        self.operation = ""
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._patches = contextlib.ExitStack()
        path_open, replace, fsync, mkdir = Path.open, os.replace, os.fsync, Path.mkdir

        def open_or_fail(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if "b" in mode and any(c in mode for c in "wax") and self._is_below_root(path):
                self._maybe_fail(f"open {path.name}")
                return _FailingFile(path_open(path, mode, *args, **kwargs), self, path.name)
            return path_open(path, mode, *args, **kwargs)

        def replace_or_fail(source: Any, target: Any, **kwargs: Any) -> None:
            if self._is_below_root(target):
                self._maybe_fail(f"rename to {Path(target).name}")
            replace(source, target, **kwargs)

        def sync_or_fail(descriptor: int) -> None:
            self._maybe_fail("sync")
            fsync(descriptor)

        def mkdir_or_fail(path: Path, *args: Any, **kwargs: Any) -> None:
            if self._is_below_root(path):
                self._maybe_fail(f"make {path.name}")
            mkdir(path, *args, **kwargs)

        for target, name, replacement in (
            (Path, "open", open_or_fail), (os, "replace", replace_or_fail), (os, "fsync", sync_or_fail), (Path, "mkdir", mkdir_or_fail),
        ):  # fmt: skip
            self._patches.enter_context(mock.patch.object(target, name, replacement))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _is_below_root(self, path: Any) -> bool:
        return str(path).startswith(self.root)

    def _maybe_fail(self, operation: str) -> None:
        with self._lock:  # Two files are written in parallel.
            self.count += 1
            fails = self.count == self.n
        if fails:
            self.operation = operation
            raise OSError(self.code, os.strerror(self.code), operation)


class _FailingFile:
    def __init__(self, file: Any, disk: FailingDisk, name: str) -> None:
        self._file, self._disk, self._name = file, disk, name

    def write(self, data: Any) -> int:
        self._disk._maybe_fail(f"write {self._name}")
        return int(self._file.write(data))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def failing_saves(place: Path, errors: tuple[int, ...] = ERRORS, every: int = 1) -> Counter[str]:
    """Repeats a save for each error code and each multiple n of ``every``. The n-th disk operation fails. Returns the
    outcomes."""
    files = small_checkpoint_files()
    run = place / "run"
    outcomes: Counter[str] = Counter()
    from gpt.runs import checkpoint

    for code in errors:
        n = 0
        while True:
            n += every
            shutil.rmtree(run, ignore_errors=True)
            run.mkdir()
            checkpoint.write(run / folder.step_name(1), files)
            before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
            save_error = None
            with FailingDisk(run, n, code) as disk:
                try:
                    checkpoint.write(run / folder.step_name(2), files)
                    folder.prune(run, keep=1, newest=2)
                    folder.write_index(run)
                except OSError as error:
                    save_error = error
            if not disk.operation:
                break
            outcomes[_check_after_failure(run, before, save_error, disk.operation)] += 1
            checkpoint.write(run / folder.step_name(2), files)
            assert not torn(run), disk.operation
    return outcomes


def _check_after_failure(run: Path, before: dict[Path, bytes], error: OSError | None, operation: str) -> str:
    if error is None:
        return f"no error: {operation}"
    if torn(run):
        return f"torn: {operation}"
    names = [entry.name for entry in folder.checkpoints(run)]
    if folder.step_name(2) not in names and any(not p.exists() or p.read_bytes() != d for p, d in before.items()):
        return f"the old one is harmed: {operation}"
    return "the old one is intact, the new one " + ("whole" if folder.step_name(2) in names else "not there")


# Damaged files


@functools.cache
def small_checkpoint_files() -> dict[str, Any]:
    """Returns the checkpoint files of a small training run."""
    import gpt
    from gpt.runs import checkpoint

    checkpoints: list[dict[str, Any]] = []
    write = checkpoint.write

    def record_files(target: Path, contents: Any) -> None:
        checkpoints.append(dict(contents))
        write(target, contents)

    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "batch_tokens": 64, "tokenizer": "bytes"}
    with tempfile.TemporaryDirectory() as place, mock.patch.object(checkpoint, "write", record_files):
        text = write_text(Path(place) / "text.txt", 500)
        gpt.train(text, out=f"{place}/run", steps=3, dtype="float32", sample_every=0, **shape)
    return checkpoints[-1]


def read_all(path: Path) -> None:
    import torch

    from gpt.config.device import Compute
    from gpt.runs import checkpoint
    from gpt.training.optim import make_optimizer
    from gpt.training.state import read_saved_state, read_snapshot
    from gpt.training.strategy import Single

    folder.verify_checksums(path, training=True)
    state = read_saved_state(path)
    if checkpoint.peek(path)[0] != state.recipe.saved_model:
        raise UserError("another shape")
    model = checkpoint.load(path, torch.device("cpu"), state.recipe.model).model
    optimizer = make_optimizer(model, state.recipe.optimizer, state.recipe.weight_decay)
    strategy = Single(model, optimizer, Compute(torch.device("cpu"), torch.float32))
    read_snapshot(path, state, strategy).restore(strategy, torch.amp.GradScaler("cpu", enabled=False))


@dataclass(frozen=True)
class Damaged:
    """A damaged file. ``signed`` means that matching checksums are written."""

    file: str
    kind: str
    data: bytes
    signed: bool


HOSTILE_NUMBERS: list[Any] = [
    -1, 0, 2**31, 2**63, 10**30, 1e308, -0.5, float("nan"), float("inf"), "7", "", None, [], {}, [[]], True,
]  # fmt: skip
HOSTILE_NAMES = ["../../etc/passwd", "/etc/passwd", "a\0b", "x" * 10_000, "model.safetensors/../x"]


def generate_damage(good: Path, rng: random.Random) -> Iterator[Damaged]:
    names = sorted(path.name for path in good.iterdir())
    while True:
        name = rng.choice(names)
        data = (good / name).read_bytes()
        kind = rng.choice(["cut", "flipped", "swapped", "emptied", "another file", "longer", "zeros", "hostile"])
        if kind == "hostile":
            yield from _generate_hostile(good, name, data, rng)
            continue
        start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        if kind == "flipped":
            start = min(start, len(data) - 1)
            damaged_data = data[:start] + bytes([data[start] ^ (1 << rng.randrange(8))]) + data[start + 1 :]
        else:
            damaged_data = {
                "cut": data[:start],
                "swapped": data[end:] + data[start:end] + data[:start],
                "emptied": b"",
                "another file": (good / rng.choice([other for other in names if other != name])).read_bytes(),
                "longer": data + data[start:end] + b"\0",
                "zeros": data[:start] + bytes(end - start) + data[end:],
            }[kind]
        if damaged_data != data:
            yield Damaged(name, kind, damaged_data, signed=False)


def _generate_hostile(good: Path, name: str, data: bytes, rng: random.Random) -> Iterator[Damaged]:
    if name.endswith(".safetensors"):
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        tensor = rng.choice([key for key in header if key != "__metadata__"])
        kind = rng.choice(["length", "shape", "offsets", "dtype", "name", "nested", "many"])
        if kind == "length":
            forged_length = rng.choice([0, 2**63, 2**64 - 1, length * 2, 10**8])
            yield Damaged(name, kind, struct.pack("<Q", forged_length) + data[8:], signed=True)
            return
        if kind == "nested":
            text = b'{"a":' * 50_000
        elif kind == "many":
            empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            text = json.dumps({f"t{i}": empty for i in range(20_000)}).encode()
        else:
            change: dict[str, Any] = {
                "shape": {"shape": rng.choice([[2**62, 4], [-1], [2**31, 2**31], [0], "x"])},
                "offsets": {"data_offsets": rng.choice([[0, 2**62], [5, 1], [-4, 0], [2**63, 2**63 + 4]])},
                "dtype": {"dtype": rng.choice(["F64", "BOOL", "F8_E4M3", "Q9", 7])},
            }.get(kind, {})
            entry = header.pop(tensor) | change
            header[tensor if kind != "name" else rng.choice(HOSTILE_NAMES)] = entry
            text = json.dumps(header).encode()
        yield Damaged(name, kind, struct.pack("<Q", len(text)) + text + data[8 + length :], signed=True)
    elif name == folder.CHECKSUMS:
        record = json.loads(data)
        record["sha256"][rng.choice(HOSTILE_NAMES)] = "0" * 64
        record["self"] = folder._checksum_of(record["sha256"])
        yield Damaged(name, "names", json.dumps(record).encode(), signed=False)
    elif name in ("config.json", "training.json", "gpt.json"):
        if rng.random() < 0.1:
            yield Damaged(name, "nested", b"[" * 200_000, signed=True)
            return
        parent = record = json.loads(data)
        key = rng.choice(sorted(parent))
        while isinstance(parent[key], dict) and parent[key] and rng.random() < 0.9:
            parent = parent[key]
            key = rng.choice(sorted(parent))
        value = rng.choice(HOSTILE_NUMBERS)
        if value == parent[key] or key in UNCHECKED_KEYS:
            return
        parent[key] = value
        yield Damaged(name, f"{key} = {str(value)[:20]}", json.dumps(record).encode(), signed=True)


# With matching checksums, readers accept any value of these keys.
UNCHECKED_KEYS = {
    "lr", "warmup", "decay", "weight_decay", "clip", "eval_every", "patience", "save_every", "keep",
    "sample_every", "seed", "steps", "batch_tokens", "loss_chunk", "lora_alpha", "compile",
    "preset", "step_seconds", "seconds", "first_step", "metrics_bytes", "settled_step", "measured_step",
    "measured_loss", "best_loss", "evals_since_best", "rate_factor", "windows", "bad_steps", "has_learnt", "threads",
    "device", "dtype", "pace", "scaling", "step", "val_loss", "numpy_gauss", "numpy_has_gauss",
    "python_gauss", "numpy_position", "dropout", "architectures", "bos_token_id", "eos_token_id",
    "initializer_range", "attn_pdrop", "embd_pdrop", "tokens_seen", "name", "layer_norm_epsilon", "lora_rank",
    "rows", "micro_batch", "optimizer", "schedule", "n_inner", "model_type",
}  # fmt: skip


@dataclass
class DamageResults:
    """Outcomes, and the peak memory as a multiple of the copy's size."""

    outcomes: Counter[str]
    memory: float = 0.0


def damaged_copies(place: Path, count: int) -> DamageResults:
    from gpt.runs import checkpoint

    valid_folder = place / folder.step_name(3)
    checkpoint.write(valid_folder, small_checkpoint_files())
    read_all(valid_folder)

    def sign(bad: Path) -> None:
        (bad / folder.CHECKSUMS).unlink()
        folder.write_checksums(bad)

    return _read_copies(valid_folder, generate_damage(valid_folder, random.Random(1)), count, read_all, sign)


def damaged_tokens(place: Path, count: int) -> DamageResults:
    """Reads damaged copies of a token folder. Ignores damage that changes no id."""
    from gpt.config.text import TokenizeConfig
    from gpt.corpus.tokenize import tokenize_texts

    valid_folder = place / "tokens"
    tokenize_texts(
        [str(write_text(place / "text.txt", 200_000))], TokenizeConfig(out=str(valid_folder), tokenizer="bytes")
    )
    expected = read_tokens(valid_folder)

    def read(path: Path) -> None:
        if read_tokens(path) == expected:
            raise UserError("nothing that is read was changed")

    unsigned = (damage for damage in generate_damage(valid_folder, random.Random(2)) if not damage.signed)
    return _read_copies(valid_folder, unsigned, count, read, lambda bad: None)


def read_tokens(path: Path) -> str:
    from gpt.corpus.token_folder import SIDES, TokenFolder

    tokens = TokenFolder(path)
    tokens.verify()
    digest = hashlib.sha256(tokens.tokenizer.fingerprint.encode())
    for side in SIDES:
        stream = tokens.stream(side)
        for start in range(0, len(stream), 2**16):
            digest.update(stream.take(start, min(2**16, len(stream) - start)).tobytes())
        stream.release()
    return digest.hexdigest()


def _read_copies(
    good: Path, damages: Iterator[Damaged], count: int, read: Callable[[Path], None], sign: Callable[[Path], None]
) -> DamageResults:
    results = DamageResults(Counter())
    size = sum(path.stat().st_size for path in good.iterdir())
    bad = good.with_name("bad")
    for number, damage in zip(range(count), damages, strict=False):
        shutil.rmtree(bad, ignore_errors=True)
        bad.mkdir()
        for path in good.iterdir():
            if path.name != damage.file:
                os.link(path, bad / path.name)
        (bad / damage.file).write_bytes(damage.data)
        if damage.signed:
            sign(bad)
        before = peak_memory(reset=True)
        results.outcomes[_read_outcome(damage, bad, read)] += 1
        if number > 20:  # The first reads warm up the allocators.
            results.memory = max(results.memory, (peak_memory() - before) / (size + len(damage.data)))
    return results


def _read_outcome(damage: Damaged, bad: Path, read: Callable[[Path], None]) -> str:
    try:
        read(bad)
    except UserError as error:
        return "refused" if "\n" not in error.message and len(error.message) < 500 else f"LONG: {error.message}"
    except Exception as error:
        return f"{type(error).__name__}: {damage.file} {damage.kind}: {error}"
    return f"LOADED: {damage.file} {damage.kind}"


def peak_memory(reset: bool = False) -> int:
    """Returns the peak resident memory in bytes since the last reset, or 0 if unknown."""
    with contextlib.suppress(OSError):
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        match = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        return 1024 * int(match[1]) if match else 0
    return 0


def main(words: list[str]) -> None:
    from benchmarks.results import Table, measured, write_section

    quick = "--quick" in words
    parts = [word for word in words if word != "--quick"] or PARTS
    if unknown := {*parts} - {*PARTS}:
        raise SystemExit(f"no part {unknown}")
    counts = QUICK if quick else COUNTS
    rows: list[list[str]] = []

    def add_row(label: str, outcomes: Counter[str], note: str = "") -> None:
        rows.append([label, f"{outcomes.total():,}", format_outcomes(outcomes) + note])
        print(*rows[-1], sep=": ", flush=True)

    for part in parts:
        place = Path(tempfile.mkdtemp(prefix="gpt-faults-"))
        if part in ("kills", "signals"):
            (outcomes,) = many(range(counts[part]), place, killed if part == "kills" else stopped)
            add_row("SIGKILL at a random moment" if part == "kills" else "a signal at a random moment", outcomes)
        elif part == "ranks":
            outcomes, seconds = kill_ranks(counts[part], place)
            add_row("SIGKILL of one of two ranks", outcomes, f"; all processes had ended within {seconds:.1f} s")
        elif part == "disk":
            outcomes = failing_saves(place, ERRORS[:1] if quick else ERRORS)
            add_row("a failing write, sync or rename of a save", outcomes)
        else:
            for label, read_damaged in (("checkpoint", damaged_copies), ("token folder", damaged_tokens)):
                results = read_damaged(place, counts["damage"])
                memory = f"; peak memory {results.memory:.2f} times its size"
                add_row(f"a damaged copy of a {label}", results.outcomes, memory)
        shutil.rmtree(place, ignore_errors=True)
    if not quick:
        command = f"python -m tests.stress.faults {' '.join(words)}".strip()
        write_section("faults", measured("Faults", command, [], [Table(["fault", "times", "outcomes"], rows)]))


def format_outcomes(outcomes: Counter[str]) -> str:
    return ", ".join(f"{outcome}: {count}" for outcome, count in outcomes.most_common())


if __name__ == "__main__":
    main(sys.argv[1:])
