"""Forged files in runs, checkpoints and token folders. `tests/stress/forged.py` tries thousands."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Gpt, more, one_line_of_what_and_what_next

from gpt.config import events
from gpt.config.settings import checked
from gpt.insight import report
from gpt.runs import folder
from gpt.runs.record import RunRecord
from gpt.system.errors import MAX_MESSAGE, UserError
from gpt.system.files import LINE_LIMIT, MAX_JSON_DEPTH, open_regular, read_json, read_lines, read_regular
from gpt.training.state import SavedState
from tests.stress import forged

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes with names and alarms are POSIX's")


@pytest.fixture(scope="module")
def forged_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("forged")
    forged.make(place)
    return place


@pytest.fixture
def run(forged_folder: Path, workdir: Path) -> Path:
    """Returns a copy of an unfinished run in the current folder."""
    shutil.copytree(forged_folder / "begun-run", "run")
    shutil.copytree(forged_folder / "theirs", "theirs")
    return Path("run")


@pytest.mark.parametrize("count", [15, more(60)])
def test_forged_values_are_read_or_refused(forged_folder: Path, count: int) -> None:
    outcomes, errors = forged.tried(forged_folder, count)
    assert not errors
    assert outcomes["works"] > count / 3
    assert outcomes["refused"] > count / 3


# Pipes, devices and limits


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("replace_file", [fifo, device])
@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("metrics.jsonl", "report run"),
        ("metrics.jsonl", "train --resume run"),
        ("run.json", "report run"),
        ("tokens/manifest.json", "train --resume run"),
        ("tokens/tokenizer.tiktoken", "train --resume run"),
        ("step-000008/gpt.json", "sample -m run:step-8"),
        ("step-000008/model.safetensors", "sample -m run:step-8"),
        ("theirs/model-00001-of-00001.safetensors", "sample -m theirs"),
    ],
)
def test_pipes_and_devices_are_refused_without_being_read(
    gpt: Gpt, run: Path, file: str, command: str, replace_file: Callable[[Path], None]
) -> None:
    path = Path(file) if file.startswith("theirs") else run / file
    path.unlink()
    replace_file(path)
    with forged.in_time():
        result = gpt(*command.split())
    assert result.code == 2, result
    assert len([line for line in result.err.splitlines() if line.startswith("error:")]) == 1
    assert "internal error" not in result.err


def test_links_to_regular_files_are_allowed(gpt: Gpt, run: Path) -> None:
    for path in [path for path in run.rglob("*") if path.is_file() and path.name != ".lock"]:
        elsewhere = Path(f"elsewhere-{path.parent.name}-{path.name}")
        shutil.move(path, elsewhere)
        path.symlink_to(elsewhere.absolute())
    assert gpt("report", run).code == 0
    assert gpt("sample", "-m", run, "-n", "1").code == 0


def test_file_size_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(UserError, match="has 5 bytes, more than the limit of 4"):
        read_regular(path, 4)
    with pytest.raises(UserError, match="cannot be the name"):
        open_regular(tmp_path / "a\0b")
    with pytest.raises(UserError, match="Is a directory"):
        read_regular(tmp_path, 5)


def test_size_limit_applies_to_growing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1234567")
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda descriptor: os.stat_result((*fstat(descriptor)[:6], 3, 0, 0, 0)))
    with pytest.raises(UserError, match="more than the limit of 4 bytes"):
        read_regular(path, 4)


def test_long_lines_are_truncated(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a\n" + 3 * LINE_LIMIT * b"b" + b"\nc\n" + LINE_LIMIT * b"d")
    with open_regular(path) as file:
        assert [(line[:1], len(line)) for line in read_lines(file)] == [
            (b"a", 2), (b"b", LINE_LIMIT), (b"c", 2), (b"d", LINE_LIMIT),
        ]  # fmt: skip


def test_json_depth_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": ' + (MAX_JSON_DEPTH - 1) * "[" + (MAX_JSON_DEPTH - 1) * "]" + "}")
    assert "a" in read_json(path)
    for depth in (MAX_JSON_DEPTH, 10**5):
        path.write_text('{"a": ' + depth * "[" + depth * "]" + "}")
        with pytest.raises(UserError, match="is damaged"):
            read_json(path)


def test_message_length_is_limited() -> None:
    assert len(UserError("x" * 10**6, "y" * 10**6).message) <= MAX_MESSAGE + 3
    assert UserError("x " * (MAX_MESSAGE // 2)).message == "x " * (MAX_MESSAGE // 2)


# run.json


def test_run_record_is_rewritten_unchanged(run: Path) -> None:
    values = json.loads((run / "run.json").read_text())
    record = RunRecord.read(run)
    assert record.compute is not None
    record.write(run)
    assert json.loads((run / "run.json").read_text()) == values


def test_old_run_records_can_be_read(run: Path) -> None:
    """Old records had no checksums, token counts or machine, and their ``init`` was null without fine-tuning."""
    values = json.loads((run / "run.json").read_text())
    old = {key: values[key] for key in ("format", "started", "texts", "settings")} | {"init": None}
    (run / "run.json").write_text(json.dumps(old))
    record = RunRecord.read(run)
    assert (record.init, record.compute, record.resumed) == (None, None, [])


@pytest.mark.parametrize("key", ["init", "tokens", "sources", "compute", "versions", "tokenizer", "resumed", "result"])
@pytest.mark.parametrize("value", ["a text", 7, {"a": {"b": []}}, [3], True])
def test_wrong_types_in_run_json_are_errors(gpt: Gpt, run: Path, key: str, value: Any) -> None:
    values = json.loads((run / "run.json").read_text()) | {key: value}
    (run / "run.json").write_text(json.dumps(values))
    for command in (("report", run), ("train", "--resume", run)):
        one_line_of_what_and_what_next(gpt(*command), f"{run / 'run.json'} is damaged")


# metrics.jsonl

STEP = {"event": "step", "step": 3, "tokens": 8, "seconds": 1.5, "loss": 2.5, "lr": 0.1, "grad_norm": 1.0,
        "tokens_per_second": 9.0, "mfu": None}  # fmt: skip


@pytest.mark.parametrize("key", [key for key in STEP if key != "event"])
def test_wrong_types_in_events_are_errors(key: str) -> None:
    line = json.dumps(STEP | {key: "HERE"})
    for value in ('"text"', "true", "[]", "1e308", "NaN", "1e999"):
        with pytest.raises(UserError):
            events.from_json(line.replace('"HERE"', value))
    null = line.replace('"HERE"', "null")
    if key in ("loss", "grad_norm"):
        event = events.from_json(null)
        assert getattr(event, key) != getattr(event, key)
        assert events.to_json(event) == null
    elif key != "mfu":
        with pytest.raises(UserError):
            events.from_json(null)


def test_unreadable_metrics_lines_are_counted(gpt: Gpt, run: Path) -> None:
    lines = [
        10**5 * "[", '{"event": ' + 10**5 * "[", json.dumps(STEP | {"step": 10**18}), json.dumps(STEP | {"step": -1}),
        '{"event": "sample", "step": 3, "tokens": 1, "seconds": 1, "text": "\\ud800"}', "\\", "\xff\x00", "[]", "null",
    ]  # fmt: skip
    with (run / "metrics.jsonl").open("a", encoding="latin-1") as file:
        file.write("".join(line + "\n" for line in lines))
    assert report.read_history(run).unread == len(lines)
    result = gpt("report", run)
    assert (result.code, f"{len(lines)} lines of its metrics could not be read" in result.out) == (0, True)


@pytest.mark.parametrize("number", [3e38, -3e38, 2**53, 1e-300])
def test_report_handles_extreme_values(gpt: Gpt, run: Path, number: float) -> None:
    extreme_event = STEP | dict.fromkeys(("seconds", "loss", "lr", "grad_norm", "tokens_per_second", "mfu"), number)
    extreme_event["seconds"] = min(abs(number), 2**53)
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(extreme_event | {"step": step, "tokens": 2**53}) + "\n" for step in (20, 21, 2**53))
    assert gpt("report", run).code == 0
    assert gpt("report", run, "--json").code == 0
    assert gpt("report", run, "-o", "page.html").code == 0
    history = report.read_history(run)
    assert (history.unread, len(history.steps)) == (0, 15)


# training.json


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("recipe.lr", 1e308), ("recipe.steps", 2**60), ("state.rate_factor", 2.0), ("state.step", -1),
        ("state.best_loss", 1e308), ("machine.device", "cuda\u001b[31m"),
    ],
)  # fmt: skip
def test_resume_refuses_values_out_of_range(gpt: Gpt, run: Path, place: str, value: Any) -> None:
    path = run / folder.step_name(8) / "training.json"
    values = json.loads(path.read_text())
    checked(SavedState, values, "x")
    table, key = place.split(".")
    values[table][key] = value
    path.write_text(json.dumps(values))
    forged._sign(folder.step_name(8))(run)
    one_line_of_what_and_what_next(gpt("train", "--resume", run), f"{path} is damaged")


# Names


@pytest.mark.parametrize(
    "name", ["a\0b", "../x", "/dev/zero", "", ".", "..", 300 * "x", "a\x1b[31m", "\ud800", 7, None]
)
def test_invalid_shard_names_are_errors(gpt: Gpt, run: Path, name: Any) -> None:
    index = Path("theirs/model.safetensors.index.json")
    values = json.loads(index.read_text())
    values["weight_map"]["transformer.wte.weight"] = name
    index.write_text(json.dumps(values))
    one_line_of_what_and_what_next(gpt("sample", "-m", "theirs"), "does not name files of its own folder")


@pytest.mark.parametrize("base", ["a\0b", 300 * "x", 5000 * "x/", "\ud800", "hf:", "hf:a\0b", "/dev/zero", "lora:x"])
def test_invalid_base_model_names_are_errors(gpt: Gpt, forged_folder: Path, workdir: Path, base: str) -> None:
    shutil.copytree(forged_folder / "lora", "lora")
    path = Path("lora") / folder.step_name(12) / "adapter_config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"base_model_name_or_path": base}))
    forged._sign(folder.step_name(12))(Path("lora"))
    result = gpt("sample", "-m", "lora:step-12")
    assert result.code == 2
    assert len(result.err) < MAX_MESSAGE + 500
    assert len(result.err.splitlines()) == 2
