"""Helpers for tests of several processes: comparing runs, sending signals, resuming."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_same, curve, make_text, spawn
from ranks import SAMPLE, TEXTS, WHOLE, in_words

import gpt as library
from gpt.parallel.launch import Ended, launch
from gpt.runs import folder
from tests.stress.faults import process_of

RANKS, PARTS = (Path(__file__).with_name(name) for name in ("ranks.py", "parts.py"))


def texts() -> None:
    """Writes the texts to train on into the current folder."""
    Path("book.txt").write_bytes(make_text().encode())
    pairs = [{"prompt": f"{n} =>", "completion": " " + "la" * (n % 7) + f" {n * n}"} for n in range(60)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))


def trained(place: Path, runs: Mapping[str, Mapping[str, Any]], script: Path) -> Path:
    """Trains each run with one process, into ``place``/one, and then runs the script's scenario ``two`` in two.

    Returns ``place``.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr("gpt.training.evaluation.SAMPLE", SAMPLE)
        texts()
        for name, settings in runs.items():
            library.train(TEXTS.get(name, "book.txt"), out=f"one/{name}", **settings)
        assert launch([sys.executable, str(script), "two"], 2) == Ended(0)
    return place


def of_events(run: Path, key: str, *kinds: str) -> list[Any]:
    """Returns the values of ``key`` in a run's events of some kinds."""
    return [line[key] for line in curve(run) if line["event"] in kinds]


def losses(run: Path) -> list[float]:
    return of_events(run, "loss", "step")


def assert_trained_alike(one: Path, several: Path, norms: float, **near: float) -> None:
    """Asserts that losses are ``near`` (as `pytest.approx` takes it), and gradient norms within the share ``norms``."""
    assert losses(several) == pytest.approx(losses(one), **near)
    held_out = [of_events(run, "val_loss", "eval", "end") for run in (one, several)]
    assert held_out[1] == pytest.approx(held_out[0], **near)
    assert of_events(several, "grad_norm", "step") == pytest.approx(of_events(one, "grad_norm", "step"), rel=norms)


def strike(process: "subprocess.Popen[str]", run: Path, step: int, rank: int, signum: int) -> tuple[str, str, float]:
    """Sends a rank a signal once a checkpoint of ``step`` or later exists.

    Returns the command's stdout, its stderr, and the seconds until it ended.
    """
    while not run.is_dir() or not any(entry.step >= step for entry in folder.checkpoints(run)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    victim = process_of(process.pid, rank)
    assert victim is not None
    os.kill(victim, signum)
    sent = time.monotonic()
    out, err = process.communicate(timeout=600)
    return out, err, time.monotonic() - sent


def assert_ended_and_gone_on(words: list[str], rank: int, whole: Path | None = None) -> None:
    """Kills ``rank`` of a run of two processes, resumes it, and later stops rank 1.

    Asserts that either ends both processes and is reported once, and that the run ends as an uninterrupted one:
    ``whole``, made with the settings `WHOLE`, or that of a command.
    """
    words = [*words, *in_words({key: WHOLE[key] for key in ("steps", "dropout", "save_every")}), "--nproc", "2"]
    steps = WHOLE["steps"]
    if whole is None:
        whole = Path("whole")
        command = spawn("train", "book.txt", *words, "-o", whole, "--quiet", "--json")
        out, err = command.communicate(timeout=600)
        assert (command.returncode, err) == (0, "")
        assert json.loads(out)["steps"] == steps
    run = Path("runs/x")
    killed = spawn("train", "book.txt", *words, "-o", run, "--quiet")
    out, err, seconds = strike(killed, run, 6, rank, signal.SIGKILL)
    assert (killed.returncode, out) == (1, "")
    assert err == (
        f"error: process {rank} of 2 was ended by SIGKILL, maybe by the system, for want of memory\n"
        "hint: resume with: gpt train --resume runs/x\n"
    )
    assert seconds < 15
    stopped = spawn("train", "--resume", run, "--quiet")  # with as many processes as before
    step = folder.checkpoints(run)[-1].step
    out, err, _ = strike(stopped, run, step + 6, 1, signal.SIGTERM)
    assert (stopped.returncode, out) == (143, "")
    assert err.startswith("interrupted at step ")
    assert err.endswith("; resume with: gpt train --resume runs/x\n")
    assert err.count("\n") == 1
    again = spawn("train", "--resume", "--quiet", "--json")
    out, err = again.communicate(timeout=600)
    assert (again.returncode, err) == (0, "")
    assert json.loads(out)["steps"] == steps
    assert_same(run, whole)
