"""Helpers for tests of several processes: comparing runs, sending signals, resuming."""

import json
import os
import signal
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


def struck(words: list[str], rank: int, signum: int) -> tuple[str, str, float, int]:
    """Trains in two processes, and sends one of them a signal once a checkpoint of step 6 or later exists.

    Returns the command's stdout, its stderr, the seconds until it ended, and its exit status.
    """
    words = [*words, *in_words({key: WHOLE[key] for key in ("steps", "dropout", "save_every")}), "--nproc", "2"]
    run = Path("runs/x")
    process = spawn("train", "book.txt", *words, "-o", run, "--quiet")
    while not run.is_dir() or not any(entry.step >= 6 for entry in folder.checkpoints(run)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    victim = process_of(process.pid, rank)
    assert victim is not None
    os.kill(victim, signum)
    sent = time.monotonic()
    out, err = process.communicate(timeout=600)
    return out, err, time.monotonic() - sent, process.returncode


def assert_killed_and_gone_on(words: list[str], rank: int, whole: Path) -> None:
    """Kills ``rank`` of a run of two processes and resumes it.

    Asserts that all processes end, that this is reported once, and that the run ends as the uninterrupted ``whole``.
    """
    out, err, seconds, code = struck(words, rank, signal.SIGKILL)
    assert (code, out) == (1, "")
    assert err == (
        f"error: process {rank} of 2 was killed by SIGKILL, possibly by the system because memory ran out\n"
        "hint: resume with: gpt train --resume runs/x\n"
    )
    assert seconds < 15
    assert_gone_on(whole)


def assert_stopped_and_gone_on(words: list[str], whole: Path) -> None:
    """The same where rank 1 is told to stop, which saves first."""
    out, err, _, code = struck(words, 1, signal.SIGTERM)
    assert (code, out) == (143, "")
    assert err.startswith("interrupted at step ")
    assert err.endswith("; resume with: gpt train --resume runs/x\n")
    assert err.count("\n") == 1
    assert_gone_on(whole)


def assert_gone_on(whole: Path) -> None:
    again = spawn("train", "--resume", "--quiet", "--json")  # with as many processes as before
    out, err = again.communicate(timeout=600)
    assert (again.returncode, err) == (0, "")
    assert json.loads(out)["steps"] == WHOLE["steps"]
    assert_same(Path("runs/x"), whole)
