"""Sharded runs, executed by `parts.py`."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Gpt, assert_same, curve, one_line_of_what_and_what_next, spawn, state_of
from parts import FAMILY_RUNS, MODELS, SHARDED_RUNS
from ranks import OPTIONS, TWELVE_STEPS, copy_killed_run
from safetensors.torch import load_file
from several import PARTS, RANKS, assert_trained_alike, event_values, losses, train_all, write_texts

import gpt as library
from gpt.insight.evaluate import Window
from gpt.insight.report import read_history
from gpt.parallel.launch import launch
from gpt.parallel.world import World
from gpt.runs import checkpoint, folder
from gpt.system.errors import WorkError
from gpt.system.interrupt import Stopped, StopSignal
from gpt.training.checkpointing import Writer
from gpt.training.strategy import Sharded


@pytest.fixture(scope="module")
def several_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs trained by one process (in ``one``) and by two processes."""
    return train_all(tmp_path_factory.mktemp("parts"), MODELS | FAMILY_RUNS, PARTS)


def test_sharding_with_one_process_matches_no_sharding(workdir: Path) -> None:
    write_texts()
    library.train("book.txt", out="one", **{**TWELVE_STEPS, "steps": 4})
    library.train("book.txt", out="sharded", **{**TWELVE_STEPS, "steps": 4}, shard="full", recompute=True)
    assert_trained_alike(Path("one"), Path("sharded"), norm_tolerance=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", SHARDED_RUNS)
def test_sharded_training_matches_one_process(several_trained: Path, name: str) -> None:
    one, sharded = several_trained / "one" / SHARDED_RUNS[name][0], several_trained / name
    is_bfloat16 = name.startswith("narrow")
    assert_trained_alike(one, sharded, norm_tolerance=2e-2, abs=5e-3 if is_bfloat16 else 1e-4)
    assert event_values(sharded, "text", "sample") == event_values(one, "text", "sample")
    assert not read_history(sharded).frames
    # Checkpoints differ only by rounding.
    one, sharded = (folder.find_checkpoint(f"{run}:latest") for run in (one, sharded))
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in sharded.iterdir())
    for file in ("model.safetensors", "training.safetensors"):
        sharded_tensors, reference = load_file(sharded / file), load_file(one / file)
        assert set(sharded_tensors) == set(reference)
        for key in sharded_tensors:
            assert sharded_tensors[key].shape == reference[key].shape
            if not key.startswith("random:") and not is_bfloat16:  # Sums in bfloat16 differ in the third digit.
                torch.testing.assert_close(sharded_tensors[key], reference[key], atol=1e-3, rtol=1e-2, msg=key)
    assert library.load(sharded).loss("the cat sat") == pytest.approx(library.load(one).loss("the cat sat"), rel=1e-3)


def test_timed_sharded_run_matches_one_process_with_its_steps(
    several_trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(several_trained)
    resolved = json.loads(Path("timed/run.json").read_text())["resolved"]
    copied = {key: resolved[key] for key in ("steps", "warmup", "decay", "weight_decay")}
    library.train("book.txt", out="one/timed", **{**MODELS["adamw"], **copied})
    assert losses(Path("timed")) == pytest.approx(losses(Path("one/timed")), abs=1e-4)


def test_transformers_loads_sharded_runs(several_trained: Path) -> None:
    from transformers import AutoModelForCausalLM

    for name in ("adamw-sharded", "files"):  # The second run has several weight files.
        path = folder.find_checkpoint(str(several_trained / name))
        idx = torch.arange(16)[None]
        expected = checkpoint.load(path, torch.device("cpu")).model(idx)
        actual = AutoModelForCausalLM.from_pretrained(path).eval()(idx).logits
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    assert len(list(path.glob("model-0000?-of-0000?.safetensors"))) > 1


def test_sharded_resume_is_bit_exact_with_dropout(several_trained: Path) -> None:
    resumed, whole = several_trained / "resumed", several_trained / "dropout"
    assert_same(resumed, whole)
    assert curve(resumed) == curve(whole)


def test_resume_with_another_sharding_matches(several_trained: Path, workdir: Path) -> None:
    assert losses(several_trained / "from-one") == pytest.approx(losses(several_trained / "one/muon"), abs=1e-4)
    notes = json.loads((several_trained / "heard-0.json").read_text())
    assert "--shard full instead of none: equal up to rounding" in notes


@pytest.mark.parametrize("name", FAMILY_RUNS)
def test_families_train_and_resume_alike_in_one_process_and_in_shards(
    several_trained: Path, name: str, workdir: Path
) -> None:
    """The resumed runs change between one process and two shards at step 3."""
    one = several_trained / "one" / name
    copy_killed_run(str(several_trained / f"{name}-sharded"), "alone", 3)
    library.resume("alone", shard="none")
    for run in (several_trained / f"{name}-sharded", several_trained / f"{name}-resumed", Path("alone")):
        assert losses(run) == pytest.approx(losses(one), abs=1e-6)
        actual, expected = state_of(run), state_of(one)
        assert set(actual) == set(expected)
        for key, tensor in expected.items():
            if name.startswith("gpt2") and "c_attn.bias" in key and tensor.dim():
                # Without RoPE, a bias of keys has no effect, so its gradient is noise.
                for noise in (actual[key], tensor):
                    noise[len(noise) // 3 : 2 * len(noise) // 3] = 0
            if not key.startswith("random:"):
                torch.testing.assert_close(actual[key], tensor, atol=1e-6, rtol=0, msg=f"{run} {key}")


def test_shards_do_not_support_adapters(workdir: Path, gpt: Gpt) -> None:
    write_texts()
    options = ["--init", "x", "--lora-rank", "2", "--shard", "full"]
    done = gpt("train", "book.txt", "--quiet", "-o", "run", *OPTIONS, *options)
    one_line_of_what_and_what_next(done, "--shard full cannot be combined with --lora-rank")
    assert not Path("run").exists()


def test_every_rank_evaluates_equally_many_windows() -> None:
    """A rank's last window can be padding, which is excluded from the loss."""
    ids = np.arange(5)
    all_windows = [Window(0, n, ids, ids, 0) for n in range(7)]
    counted_starts, window_counts = [], set()
    for rank in range(3):
        sharded = Sharded.__new__(Sharded)
        sharded.world = World()
        sharded.world.rank, sharded.world.size = rank, 3
        own_windows = list(sharded.windows(all_windows))
        window_counts.add(len(own_windows))
        counted_starts += [window.start for window in own_windows if window.skipped < len(window.y)]
    assert window_counts == {3}
    assert sorted(counted_starts) == list(range(7))


def test_full_disk_does_not_leave_other_ranks_waiting(tmp_path: Path) -> None:
    """A single notification tells other ranks that the checkpoint is written or abandoned."""
    notifications: list[int] = []
    saver = Writer(tmp_path, 1, 0, -1, lambda step: None, lambda text: None, lambda: notifications.append(1))

    def files() -> Any:
        raise OSError(28, "No space left on device")

    saver.begin(1, 0, files)
    saver.wait()
    assert len(notifications) == 1
    saver.begin(2, 2**62, files)
    saver.wait()
    assert len(notifications) == 2
    with pytest.raises(WorkError, match="step 2 could not be saved and is lost"):
        saver.finish()


def test_signal_to_one_rank_stops_all_and_the_run_resumes(
    several_trained: Path, workdir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_texts()
    assert launch([sys.executable, str(RANKS), "stopped"], 2).status == 143
    out, err = capfd.readouterr()
    assert re.fullmatch(
        r"interrupted at step [5-8] of 12, saved in .*; resume with: gpt train --resume runs/x\n", err
    ), err
    assert out == ""
    process = spawn("train", "--resume", "--quiet", "--json")  # The number of processes stays the same.
    out, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["steps"] == 12
    assert_same(Path("runs/x"), several_trained / "dropout")


def test_signal_to_one_rank_stops_all_at_the_same_window() -> None:
    """A rank that stopped earlier would leave the others waiting."""
    sharded, signal_numbers = Sharded.__new__(Sharded), iter([0, 0, 15])
    sharded.world = World()
    sharded.world.poll = lambda signum, share: (next(signal_numbers), share)  # type: ignore[method-assign]
    items = []
    with pytest.raises(Stopped):
        for item in sharded.until_stopped(StopSignal(), range(9)):
            items.append(item)
    assert items == [0, 1]
