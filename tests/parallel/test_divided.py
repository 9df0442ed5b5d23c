"""Runs whose weights are divided among processes: `gpt train --shard full`, `--tensor`. `parts.py` is what they run."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Gpt, assert_same, curve, more, one_line_of_what_and_what_next
from parts import BOTH, MODELS, TWO, four
from ranks import SHORT, WORDS, cut
from safetensors.torch import load_file
from several import PARTS, assert_stopped_and_gone_on, assert_trained_alike, losses, of_events, texts, trained

import gpt as library
from gpt.evaluate import Window
from gpt.interrupt import Stopped, StopSignal
from gpt.parallel.launch import Ended, launch
from gpt.parallel.world import World
from gpt.runs import checkpoint, folder
from gpt.training.checkpointing import Writer
from gpt.training.parallel import Sharded


@pytest.fixture(scope="module")
def several_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``one`` process and then two, into ``TWO``, have trained the same."""
    return trained(tmp_path_factory.mktemp("parts"), MODELS, PARTS)


def test_one_process_may_be_sharded(workdir: Path) -> None:
    """Which is good for measuring what it costs."""
    texts()
    library.train("book.txt", out="one", **{**SHORT, "steps": 4})
    library.train("book.txt", out="sharded", **{**SHORT, "steps": 4}, shard="full", recompute=True)
    assert_trained_alike(Path("one"), Path("sharded"), norms=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", TWO)
def test_two_train_as_one_does(several_trained: Path, name: str) -> None:
    one, divided = several_trained / "one" / TWO[name][0], several_trained / name
    narrow = name.startswith("narrow")
    assert_trained_alike(one, divided, norms=2e-2, abs=5e-3 if narrow else 1e-4)
    assert of_events(divided, "text", "sample") == of_events(one, "text", "sample")
    # Their checkpoints have files of the same names, tensors of the same names and shapes, and nearly the same numbers.
    one, divided = (folder.find_checkpoint(f"{run}:latest") for run in (one, divided))
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in divided.iterdir())
    for file in ("model.safetensors", "training.safetensors"):
        ours, theirs = load_file(divided / file), load_file(one / file)
        assert set(ours) == set(theirs)
        for key in ours:
            assert ours[key].shape == theirs[key].shape
            if not key.startswith("random:") and not narrow:  # whose sums differ in the third digit
                torch.testing.assert_close(ours[key], theirs[key], atol=1e-3, rtol=1e-2, msg=key)
    assert library.load(divided).loss("the cat sat") == pytest.approx(library.load(one).loss("the cat sat"), rel=1e-3)


def test_transformers_reads_it(several_trained: Path) -> None:
    from transformers import AutoModelForCausalLM

    for name in ("adamw-sharded", "files"):  # the second in several files
        path = folder.find_checkpoint(str(several_trained / name))
        idx = torch.arange(16)[None]
        ours = checkpoint.load(path, torch.device("cpu")).model(idx)
        theirs = AutoModelForCausalLM.from_pretrained(path).eval()(idx).logits
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-4)
    assert len(list(path.glob("model-0000?-of-0000?.safetensors"))) > 1


def test_a_run_goes_on_bit_for_bit_with_dropout(several_trained: Path) -> None:
    resumed, whole = several_trained / "resumed", several_trained / "dropout"
    assert_same(resumed, whole)
    assert curve(resumed) == curve(whole)


def test_any_run_goes_on_divided_in_any_way(several_trained: Path, workdir: Path) -> None:
    """From one process to two sharded, from these to two that share sequences, and from these to one."""
    assert losses(several_trained / "from-one") == pytest.approx(losses(several_trained / "one/muon"), abs=1e-4)
    assert losses(several_trained / "to-together") == pytest.approx(losses(several_trained / "one/adamw"), abs=1e-4)
    notes = json.loads((several_trained / "heard-0.json").read_text())
    assert "--shard full instead of none: equal up to rounding" in notes
    assert "--tensor 2 instead of 1: equal up to rounding" in notes
    cut(str(several_trained / "adamw-together"), "alone", 4)
    library.resume("alone", tensor=1)
    assert losses(Path("alone")) == pytest.approx(losses(several_trained / "one/adamw"), abs=1e-4)
    assert json.loads(Path("alone/run.json").read_text())["resolved"]["tensor"] == 1


def test_two_times_two(several_trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(several_trained)
    library.train("book.txt", out="one/both", **{**BOTH, "shard": "none", "tensor": 1})
    assert launch([sys.executable, str(PARTS), four.__name__], 4) == Ended(0)
    assert losses(several_trained / "four") == pytest.approx(losses(several_trained / "one/both"), abs=1e-4)


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        more(["--nproc", "3", "--tensor", "2"], "3 processes cannot be divided into groups of 2", "--nproc 4"),
        (["--tensor", "2"], "one process cannot be divided into groups of 2", "--nproc 2"),
        (
            ["--init", "x", "--lora-rank", "2", "--shard", "full"],
            "--shard full cannot be combined with --lora-rank",
            "adapters",
        ),
    ],
)
def test_bad_input_is_one_line(words: list[str], what: str, hint: str, workdir: Path, gpt: Gpt) -> None:
    texts()
    done = gpt("train", "book.txt", "--quiet", "-o", "run", *WORDS, *words)
    one_line_of_what_and_what_next(done, what)
    assert hint in done.err
    assert not Path("run").exists()


def test_windows_are_as_many_for_each_row() -> None:
    """And each of them counts once."""
    ids = np.arange(5)
    all_windows = [Window(0, n, ids, ids, 0) for n in range(7)]
    counted, many = [], set()
    for rank in range(6):
        sharded = Sharded.__new__(Sharded)
        sharded.world = World()
        sharded.world.rank, sharded.world.size, sharded.world.tensor = rank, 6, 2
        mine = list(sharded.windows(all_windows))
        many.add(len(mine))
        counted += [window.start for window in mine if window.skipped < len(window.y)]
    assert many == {3}
    assert sorted(counted) == sorted(2 * list(range(7)))


def test_a_disk_that_is_full_leaves_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others give to a checkpoint is asked for until it is written or given up, and told so once."""
    told: list[int] = []
    saver = Writer(tmp_path, 1, -1, lambda step: None, lambda text: None, lambda: told.append(1))

    def files() -> Any:
        raise OSError(28, "No space left on device")

    saver.begin(1, 0, files)
    saver.wait()
    assert len(told) == 1
    saver.begin(2, 2**62, files)
    saver.wait()
    assert len(told) == 2
    monkeypatch.setattr("gpt.training.checkpointing.ROOM_SECONDS", 0.2)
    monkeypatch.setattr("gpt.training.checkpointing.ROOM_PAUSE", 0.05)
    with pytest.raises(Exception, match="could not be saved"):
        saver.last(3, 0, files, lambda: False)
    assert len(told) == 3


def test_a_signal_to_one_stops_all_and_the_run_goes_on(several_trained: Path, workdir: Path) -> None:
    """The others give what they have for the checkpoint."""
    texts()
    assert_stopped_and_gone_on([*WORDS, "--shard", "full"], several_trained / "whole")


def test_all_stop_at_the_same_window_when_a_signal_comes_to_one() -> None:
    """They compute each together: one that stopped alone would leave the others waiting."""
    sharded, heard = Sharded.__new__(Sharded), iter([0, 0, 15])
    sharded.world = World()
    sharded.world.all_reduce_max = lambda value: max(value, next(heard))  # type: ignore[method-assign]
    seen = []
    with pytest.raises(Stopped):
        for item in sharded.until_stopped(StopSignal(), range(9)):
            seen.append(item)
    assert seen == [0, 1]
