"""Tries faults by the hundred: runs killed or interrupted, failing disks, damaged checkpoints.

    python -m tests.stress.faults [--quick] [kills|signals|ranks|disk|damage]...

Every run that was killed or interrupted is resumed and must end in the same state as an uninterrupted one. POSIX only.
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

from gpt.errors import UserError
from gpt.runs import folder

COUNTS = {"kills": 200, "signals": 50, "ranks": 10, "damage": 5000}
QUICK = {"kills": 20, "signals": 10, "ranks": 10, "damage": 500}
PARTS = ["kills", "signals", "ranks", "disk", "damage"]
TINY = [
    "--n-layer", "2", "--n-head", "2", "--n-embd", "64", "--block-size", "32", "--batch-tokens", "256", "--dtype",
    "float32", "--dropout", "0.1", "--steps", "120", "--eval-every", "10", "--save-every", "5", "--sample-every",
    "40", "--keep", "2", "--vocab-size", "400", "--quiet",
]  # fmt: skip
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)


# Runs that end before their time


def write_text(path: Path, count: int = 12_000) -> Path:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(300)]
    path.write_text(" ".join(rng.choice(words) for _ in range(count)), encoding="utf-8")
    return path


def start(*words: str, cwd: Path) -> "subprocess.Popen[str]":
    command = [str(Path(sys.executable).with_name("gpt")), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=cwd, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)


def state_sum(run: Path) -> str:
    path = run / folder.checkpoints(run)[-1].name
    names = ("model.safetensors", "training.safetensors")
    return hashlib.sha256(b"".join((path / name).read_bytes() for name in names)).hexdigest()


def torn(run: Path) -> list[str]:
    """Returns errors for a run's checkpoints that have a name and are not whole."""
    bad = []
    for entry in folder.checkpoints(run):
        try:
            folder.verify_checksums(run / entry.name, training=True)
        except UserError as error:
            bad.append(error.message)
    return bad


def in_a_save(run: Path, process: "subprocess.Popen[str]", rng: random.Random) -> None:
    """Waits until a random one of the first twelve checkpoints is being written."""
    seen, wanted = 0, rng.randint(1, 12)
    was = False
    while process.poll() is None and seen < wanted:
        writing = run.is_dir() and any(run.glob(".tmp-step-*"))
        seen += writing and not was
        was = writing
    time.sleep(rng.random() * 0.01)


def at_a_step(run: Path, process: "subprocess.Popen[str]", rng: random.Random) -> None:
    metrics, wanted = run / "metrics.jsonl", rng.randint(1, 110)
    while process.poll() is None and (not metrics.exists() or metrics.read_text().count('"event": "step"') < wanted):
        time.sleep(rng.random() * 0.02)


def go_on(place: Path, run: Path, words: list[str], expected: str) -> str | None:
    """Resumes a run until its end, and deletes it; returns what went wrong, or None."""
    process = start(*words, cwd=place)
    _, err = process.communicate(timeout=600)
    if process.returncode:
        return f"exit {process.returncode}: {err.strip()[-300:]}"
    if "Traceback" in err:
        return err
    if torn(run):
        return f"torn: {torn(run)}"
    if state_sum(run) != expected:
        return "another state than that of a run that went through"
    shutil.rmtree(run, ignore_errors=True)
    return None


def resuming(run: Path) -> list[str]:
    """The words that resume a run; none where it had not begun, and what there is of it is deleted."""
    if folder.is_run(run):
        return ["train", "--resume", str(run), "--quiet"]
    shutil.rmtree(run, ignore_errors=True)
    return []


def killed(place: Path, text: Path, number: int, seconds: float, expected: str) -> str:
    """Kills a run and resumes it; returns when it was killed, or what went wrong.

    Runs with an odd ``number`` are killed within a save, every fourth at a random moment from the command's start on,
    the rest at a random step.
    """
    rng = random.Random(number)
    run = place / f"killed-{number}"
    train = ["train", str(text), "-o", str(run), *TINY]
    process = start(*train, cwd=place)
    if number % 2:
        in_a_save(run, process, rng)
    elif number % 4:
        at_a_step(run, process, rng)
    else:
        time.sleep(rng.random() * seconds)
    process.kill()
    process.communicate()
    when = "finished" if process.returncode == 0 else "before run.json"
    if folder.is_run(run) and process.returncode:
        when = "within a save" if any(run.glob(".tmp-step-*")) else "training" if any(run.glob("step-*")) else "begun"
        if torn(run):
            return f"torn after the kill: {torn(run)}"
    return go_on(place, run, resuming(run) or train, expected) or when


def stopped(place: Path, text: Path, number: int, seconds: float, expected: str) -> str:
    """Sends a run SIGINT, SIGTERM or SIGHUP at a random step, and resumes it by the command that it prints."""
    rng = random.Random(1000 + number)
    run = place / f"stopped-{number}"
    process = start("train", str(text), "-o", str(run), *TINY, cwd=place)
    signum = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    at_a_step(run, process, rng)
    process.send_signal(signum)
    _, err = process.communicate(timeout=600)
    if process.returncode == 0:
        return "finished" if state_sum(run) == expected else "another state"
    if process.returncode not in (128 + signum, -signum) or "Traceback" in err:
        return f"exit {process.returncode}: {err}"
    command = re.search(r"resume with: gpt (.*)", err)
    if command is None and folder.is_run(run) and json.loads((run / folder.RECORD).read_text()).get("ended"):
        return "finished"  # it came while Python ended
    if command is None:
        return "before the first step" if not folder.is_run(run) else f"no command: {err}"
    return go_on(place, run, [*shlex.split(command[1]), "--quiet"], expected) or "saved and gone on with"


def process_of(launcher: int, rank: int) -> int | None:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            parent = (path.parent / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == launcher and f"\0RANK={rank}\0" in path.read_text():
                return int(path.parent.name)
    return None


def rank_killed(place: Path, text: Path, number: int, expected: str, took: list[float]) -> str:
    """Kills one of a run's two processes at a random moment, and resumes the run with two.

    ``took`` gets the seconds from the kill until the command ended.
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
    killed = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=600)
    if process.returncode == 0:
        return "finished"
    took.append(time.monotonic() - killed)
    lines = err.splitlines()
    if process.returncode != 1 or not lines[0].startswith(f"error: process {rank} of 2 was killed by SIGKILL"):
        return f"exit {process.returncode}: {err}"
    when = "while training" if any(run.glob("step-*")) else "before the first checkpoint"
    return go_on(place, run, resuming(run) or train, expected) or f"same state, rank {rank} killed {when}"


def ranks(count: int, place: Path) -> tuple[Counter[str], float]:
    """Returns the outcomes, and the longest time in seconds until all processes of a command had ended."""
    text, whole, took = write_text(place / "text.txt"), place / "whole", [0.0]
    _, err = start("train", str(text), "-o", str(whole), *TINY, "--nproc", "2", cwd=place).communicate(timeout=600)
    assert folder.checkpoints(whole), err
    expected = state_sum(whole)
    return Counter(rank_killed(place, text, number, expected, took) for number in range(count)), max(took)


def many(numbers: range, place: Path, *kinds: Callable[..., str]) -> list[Counter[str]]:
    """Returns the outcomes of the runs of ``numbers`` of each of ``kinds``, two at a time."""
    text = write_text(place / "text.txt", 4_000)
    began = time.monotonic()
    whole = start("train", str(text), "-o", str(place / "whole"), *TINY, cwd=place)
    _, err = whole.communicate(timeout=600)
    assert whole.returncode == 0, err
    seconds = time.monotonic() - began
    expected = state_sum(place / "whole")
    with ThreadPoolExecutor(2) as pool:
        return [
            Counter(pool.map(lambda number, one=one: one(place, text, number, seconds * 1.3, expected), numbers))
            for one in kinds
        ]


# A disk that fails


class FailingDisk:
    """Makes the n-th write, sync, rename or mkdir below ``root`` fail, and counts them all."""

    def __init__(self, root: Path, n: int, code: int) -> None:
        self.root, self.n, self.code = str(root), n, code
        self.count = 0
        self.what = ""
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._patches = contextlib.ExitStack()
        path_open, replace, fsync, mkdir = Path.open, os.replace, os.fsync, Path.mkdir

        def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if "b" in mode and any(c in mode for c in "wax") and self._mine(path):
                self._maybe_fail(f"open {path.name}")
                return _File(path_open(path, mode, *args, **kwargs), self, path.name)
            return path_open(path, mode, *args, **kwargs)

        def replaced(source: Any, target: Any, **kwargs: Any) -> None:
            if self._mine(target):
                self._maybe_fail(f"rename to {Path(target).name}")
            replace(source, target, **kwargs)

        def synced(descriptor: int) -> None:
            self._maybe_fail("sync")
            fsync(descriptor)

        def made(path: Path, *args: Any, **kwargs: Any) -> None:
            if self._mine(path):
                self._maybe_fail(f"make {path.name}")
            mkdir(path, *args, **kwargs)

        for target, name, new in (
            (Path, "open", opened), (os, "replace", replaced), (os, "fsync", synced), (Path, "mkdir", made),
        ):  # fmt: skip
            self._patches.enter_context(mock.patch.object(target, name, new))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _mine(self, path: Any) -> bool:
        return str(path).startswith(self.root)

    def _maybe_fail(self, what: str) -> None:
        with self._lock:  # two files are written side by side
            self.count += 1
            mine = self.count == self.n
        if mine:
            self.what = what
            raise OSError(self.code, os.strerror(self.code), what)


class _File:
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
    """Makes every write, sync and rename of a save, or one in ``every``, fail in turn; returns the outcomes."""
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
            failed = None
            with FailingDisk(run, n, code) as disk:
                try:
                    checkpoint.write(run / folder.step_name(2), files)
                    folder.prune(run, keep=1, newest=2)
                    folder.write_index(run)
                except OSError as error:
                    failed = error
            if not disk.what:
                break
            outcomes[_after_failure(run, before, failed, disk.what)] += 1
            checkpoint.write(run / folder.step_name(2), files)  # the disk works again
            assert not torn(run), disk.what
    return outcomes


def _after_failure(run: Path, before: dict[Path, bytes], failed: OSError | None, what: str) -> str:
    if failed is None:
        return f"no error: {what}"
    if torn(run):
        return f"torn: {what}"
    names = [entry.name for entry in folder.checkpoints(run)]
    if folder.step_name(2) not in names and any(not p.exists() or p.read_bytes() != d for p, d in before.items()):
        return f"the old one is harmed: {what}"
    return "the old one is intact, the new one " + ("whole" if folder.step_name(2) in names else "not there")


# Damage


@functools.cache
def small_checkpoint_files() -> dict[str, Any]:
    """Returns the files of a small model's checkpoint after three steps, training state included."""
    import gpt
    from gpt.runs import checkpoint

    kept: list[dict[str, Any]] = []
    write = checkpoint.write

    def keep(target: Path, contents: Any) -> None:
        kept.append(dict(contents))
        write(target, contents)

    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "batch_tokens": 64, "tokenizer": "bytes"}
    with tempfile.TemporaryDirectory() as place, mock.patch.object(checkpoint, "write", keep):
        text = write_text(Path(place) / "text.txt", 500)
        gpt.train(text, out=f"{place}/run", steps=3, dtype="float32", sample_every=0, **shape)
    return kept[-1]


def read_all(path: Path) -> None:
    import torch

    from gpt.device import Compute
    from gpt.runs import checkpoint
    from gpt.training.optim import make_optimizer
    from gpt.training.parallel import Single
    from gpt.training.state import read_saved, read_snapshot

    folder.verify_checksums(path, training=True)
    saved = read_saved(path)
    if checkpoint.peek(path)[0] != saved.recipe.saved_model:
        raise UserError("another shape")
    model = checkpoint.load(path, torch.device("cpu"), saved.recipe.model).model
    optimizer = make_optimizer(model, saved.recipe.optimizer, saved.recipe.weight_decay)
    parallel = Single(model, optimizer, Compute(torch.device("cpu"), torch.float32))
    read_snapshot(path, saved, parallel).restore(parallel, torch.amp.GradScaler("cpu", enabled=False))


@dataclass(frozen=True)
class Damaged:
    """A damaged file of a copy. ``signed``: the checksums were made to fit, as a forger would."""

    file: str
    kind: str
    data: bytes
    signed: bool


HOSTILE_NUMBERS: list[Any] = [
    -1, 0, 2**31, 2**63, 10**30, 1e308, -0.5, float("nan"), float("inf"), "7", "", None, [], {}, [[]], True,
]  # fmt: skip
HOSTILE_NAMES = ["../../etc/passwd", "/etc/passwd", "a\0b", "x" * 10_000, "model.safetensors/../x"]


def damages(good: Path, rng: random.Random) -> Iterator[Damaged]:
    names = sorted(path.name for path in good.iterdir())
    while True:
        name = rng.choice(names)
        data = (good / name).read_bytes()
        kind = rng.choice(["cut", "flipped", "swapped", "emptied", "another file", "longer", "zeros", "hostile"])
        if kind == "hostile":
            yield from _hostile(good, name, data, rng)
            continue
        at, to = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        if kind == "flipped":
            at = min(at, len(data) - 1)
            new = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        else:
            new = {
                "cut": data[:at],
                "swapped": data[to:] + data[at:to] + data[:at],
                "emptied": b"",
                "another file": (good / rng.choice([other for other in names if other != name])).read_bytes(),
                "longer": data + data[at:to] + b"\0",
                "zeros": data[:at] + bytes(to - at) + data[to:],
            }[kind]
        if new != data:
            yield Damaged(name, kind, new, signed=False)


def _hostile(good: Path, name: str, data: bytes, rng: random.Random) -> Iterator[Damaged]:
    if name.endswith(".safetensors"):
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        tensor = rng.choice([key for key in header if key != "__metadata__"])
        kind = rng.choice(["length", "shape", "offsets", "dtype", "name", "nested", "many"])
        if kind == "length":
            forged = rng.choice([0, 2**63, 2**64 - 1, length * 2, 10**8])
            yield Damaged(name, kind, struct.pack("<Q", forged) + data[8:], signed=True)
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
            about = header.pop(tensor) | change
            header[tensor if kind != "name" else rng.choice(HOSTILE_NAMES)] = about
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
        at = record = json.loads(data)
        key = rng.choice(sorted(at))
        while isinstance(at[key], dict) and at[key] and rng.random() < 0.9:
            at = at[key]
            key = rng.choice(sorted(at))
        value = rng.choice(HOSTILE_NUMBERS)
        if value == at[key] or key in FREE:
            return
        at[key] = value
        yield Damaged(name, f"{key} = {str(value)[:20]}", json.dumps(record).encode(), signed=True)


# Keys that may hold another value of their kind, or are not read: with checksums that fit, no reader can object.
FREE = {
    "lr", "warmup", "decay", "weight_decay", "clip", "eval_every", "patience", "save_every", "keep",
    "sample_every", "seed", "steps", "batch_tokens", "loss_chunk", "lora_alpha", "compile", "merge_lora",
    "preset", "step_seconds", "seconds", "first_step", "metrics_bytes", "settled_step", "measured_step",
    "measured_loss", "best_loss", "evals_since_best", "rate_factor", "windows", "bad_steps", "has_learnt", "threads",
    "device", "dtype", "pace", "scaling", "ramp", "step", "val_loss", "numpy_gauss", "numpy_has_gauss",
    "python_gauss", "numpy_position", "dropout", "architectures", "bos_token_id", "eos_token_id",
    "initializer_range", "attn_pdrop", "embd_pdrop", "tokens_seen", "name", "layer_norm_epsilon", "lora_rank",
    "rows", "micro_batch", "optimizer", "schedule", "n_inner", "model_type",
}  # fmt: skip


@dataclass
class Tried:
    """Outcomes of reading damaged copies, and the most memory that one took, in multiples of the copy's size."""

    outcomes: Counter[str]
    memory: float = 0.0


def damaged_copies(place: Path, count: int) -> Tried:
    from gpt.runs import checkpoint

    good = place / folder.step_name(3)
    checkpoint.write(good, small_checkpoint_files())
    read_all(good)

    def sign(bad: Path) -> None:
        (bad / folder.CHECKSUMS).unlink()
        folder.write_checksums(bad)

    return _try(good, damages(good, random.Random(1)), count, read_all, sign)


def damaged_tokens(place: Path, count: int) -> Tried:
    """Reads ``count`` damaged copies of a folder of tokens; damage that changes no id may pass."""
    from gpt.config import TokenizeConfig
    from gpt.text.tokenize import tokenize_texts

    good = place / "tokens"
    tokenize_texts([str(write_text(place / "text.txt", 200_000))], TokenizeConfig(out=str(good), tokenizer="bytes"))
    expected = read_tokens(good)

    def read(path: Path) -> None:
        if read_tokens(path) == expected:
            raise UserError("nothing that is read was changed")

    plain = (damage for damage in damages(good, random.Random(2)) if not damage.signed)
    return _try(good, plain, count, read, lambda bad: None)


def read_tokens(path: Path) -> str:
    from gpt.text.token_folder import SIDES, TokenFolder

    tokens = TokenFolder(path)
    tokens.verify()
    digest = hashlib.sha256(tokens.tokenizer.fingerprint.encode())
    for side in SIDES:
        stream = tokens.stream(side)
        for start in range(0, len(stream), 2**16):
            digest.update(stream.take(start, min(2**16, len(stream) - start)).tobytes())
        stream.release()
    return digest.hexdigest()


def _try(
    good: Path, some: Iterator[Damaged], count: int, read: Callable[[Path], None], sign: Callable[[Path], None]
) -> Tried:
    tried = Tried(Counter())
    size = sum(path.stat().st_size for path in good.iterdir())
    bad = good.with_name("bad")
    for number, damage in zip(range(count), some, strict=False):
        shutil.rmtree(bad, ignore_errors=True)
        bad.mkdir()
        for path in good.iterdir():
            if path.name != damage.file:
                os.link(path, bad / path.name)
        (bad / damage.file).write_bytes(damage.data)
        if damage.signed:
            sign(bad)
        before = peak_memory(reset=True)
        tried.outcomes[_refused(damage, bad, read)] += 1
        if number > 20:  # allocators are warm
            tried.memory = max(tried.memory, (peak_memory() - before) / (size + len(damage.data)))
    return tried


def _refused(damage: Damaged, bad: Path, read: Callable[[Path], None]) -> str:
    try:
        read(bad)
    except UserError as error:
        return "refused" if "\n" not in error.message and len(error.message) < 500 else f"LONG: {error.message}"
    except Exception as error:
        return f"{type(error).__name__}: {damage.file} {damage.kind}: {error}"
    return f"LOADED: {damage.file} {damage.kind}"


def peak_memory(reset: bool = False) -> int:
    """Returns the peak resident memory in bytes since the last reset; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        return 1024 * int(found[1]) if found else 0
    return 0


def main(words: list[str]) -> None:
    from benchmarks.results import Table, measured, write_section

    quick = "--quick" in words
    parts = [word for word in words if word != "--quick"] or PARTS
    if unknown := {*parts} - {*PARTS}:
        raise SystemExit(f"no part {unknown}")
    counts = QUICK if quick else COUNTS
    rows: list[list[str]] = []

    def add(what: str, outcomes: Counter[str], note: str = "") -> None:
        rows.append([what, f"{outcomes.total():,}", listed(outcomes) + note])
        print(*rows[-1], sep=": ", flush=True)

    for part in parts:
        place = Path(tempfile.mkdtemp(prefix="gpt-faults-"))
        if part in ("kills", "signals"):
            (outcomes,) = many(range(counts[part]), place, killed if part == "kills" else stopped)
            add("SIGKILL at a random moment" if part == "kills" else "a signal at a random moment", outcomes)
        elif part == "ranks":
            outcomes, seconds = ranks(counts[part], place)
            add("SIGKILL of one of two ranks", outcomes, f"; all processes had ended within {seconds:.1f} s")
        elif part == "disk":
            outcomes = failing_saves(place, ERRORS[:1] if quick else ERRORS)
            add("a failing write, sync or rename of a save", outcomes)
        else:
            for what, do in (("checkpoint", damaged_copies), ("token folder", damaged_tokens)):
                tried = do(place, counts["damage"])
                memory = f"; peak memory {tried.memory:.2f} times its size"
                add(f"a damaged copy of a {what}", tried.outcomes, memory)
        shutil.rmtree(place, ignore_errors=True)
    if not quick:
        command = f"python -m tests.stress.faults {' '.join(words)}".strip()
        write_section("faults", measured("Faults", command, [], [Table(["fault", "times", "outcomes"], rows)]))


def listed(outcomes: Counter[str]) -> str:
    return ", ".join(f"{outcome}: {count}" for outcome, count in outcomes.most_common())


if __name__ == "__main__":
    main(sys.argv[1:])
