"""Run folders and their checkpoints: names, checksums, index. Does not import torch."""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.config.settings import MAX_FLOAT32
from gpt.runs import hub
from gpt.runs.record import RECORD as RECORD
from gpt.runs.record import RunRecord
from gpt.system.errors import UserError, WorkError, check_text
from gpt.system.files import (
    TEMPORARY,
    file_sha256,
    is_file_name,
    make_folder,
    map_in_threads,
    read_json,
    reading,
    suggest_name,
    to_json,
    write_file,
)
from gpt.system.gguf_header import is_gguf, list_shards

RUNS = "runs"
METRICS = "metrics.jsonl"
SENTENCE = "sentence.txt"  # the sentence that the user watches
CHECKSUMS = "checksums.json"
META = "gpt.json"
ADAPTER = "adapter_config.json"  # PEFT's configuration of an adapter
# Limit on a chain of adapters, which is endless if an adapter names itself as its base.
MAX_ADAPTERS = 100
TRAINING = ("training.json", "training.safetensors")  # needed only for resuming; deleted from older checkpoints
INTACT_HINT = "earlier checkpoints, if any, are intact"
BASE_HINT = f"put it back, or name another in {ADAPTER} (base_model_name_or_path)"
HINT = "use another checkpoint of the run, or copy this one again"
_STEP = re.compile(r"step-(\d{6,12})")
_PART = re.compile(r"(.+):(best|latest|step-\d+)")
_HUB_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)


@dataclass(frozen=True)
class Entry:
    """A checkpoint's entry in the index."""

    step: int
    val_loss: float | None

    @property
    def name(self) -> str:
        """The checkpoint's folder in the run folder."""
        return step_name(self.step)


def step_name(step: int) -> str:
    """Returns a name such as ``step-000500``."""
    return f"step-{step:06d}"


def is_step_name(name: str) -> bool:
    """Whether a name has the form of a checkpoint's name."""
    return _STEP.fullmatch(name) is not None


def create_run(out: str) -> Path:
    """Creates a run folder at ``out``, or the first unused of ``out-2``, ``out-3`` …, without overwriting. Raises
    `UserError` if that fails, or the name is one on the Hub, or not UTF-8, which safetensors requires."""
    check_text(f"the name {out!r}", out, "choose another path with --out")
    if hub.is_remote(out):
        raise UserError(f"{out} names a model on the Hugging Face Hub, not a run folder", "choose another --out")
    first = Path(out)  # `Path` drops a trailing slash.
    for number in range(1, 10_000):
        path = first if number == 1 else first.with_name(f"{first.name}-{number}")
        try:
            make_folder(path)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"cannot create the run folder {path}: {error.strerror or error}", "choose another path with --out"
            ) from None
    raise UserError(f"{out}, and 9,999 names after it, are taken", "choose another path with --out")


def _checksum_of(files: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def write_checksums(folder: Path, checksums: Mapping[str, str] | None = None) -> None:
    """Records the sha256 of every file in ``folder``, and of the record itself. Uses ``checksums`` instead of reading
    the files, if given."""
    if checksums is None:
        checksums = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    write_file(folder / CHECKSUMS, to_json({"sha256": checksums, "self": _checksum_of(checksums)}))


def read_checksums(folder: Path) -> dict[str, str]:
    """Reads recorded checksums. Raises `UserError` if the record is damaged or names a file outside the folder."""
    record = read_json(folder / CHECKSUMS) if _has_file(folder, CHECKSUMS) else {}
    checksums = record.get("sha256")
    if not isinstance(checksums, dict) or record.get("self") != _checksum_of(checksums):
        raise UserError(f"{folder} is damaged: it has no valid {CHECKSUMS}", HINT)
    for name in checksums:
        if not is_file_name(name):
            raise UserError(f"{folder / CHECKSUMS} names a file outside its folder: {name[:80]!r}", HINT)
    return checksums


def verify_checksums(folder: Path, training: bool = False) -> None:
    """Raises `UserError` unless all files of the checkpoint exist and are unchanged.

    Checks training state (``training.*``) only with ``training``. Its files can be missing, because old checkpoints
    keep only weights.
    """
    recorded = read_checksums(folder)
    for name in recorded:
        if name not in TRAINING and not (folder / name).is_file():
            raise UserError(f"{folder} is damaged: {name} is missing", HINT)
    names = [name for name in recorded if name not in TRAINING or (training and (folder / name).is_file())]
    with reading(folder):
        actual = map_in_threads(lambda name: file_sha256(folder / name), names)
    for name in names:
        if actual[name] != recorded[name]:
            raise UserError(f"{folder / name} is damaged: its sha256 has changed since it was saved", HINT)


def weight_checksums(folder: Path) -> dict[str, str]:
    """Returns the sha256 of each weight file by name. These checksums identify a model."""
    return {path.name: file_sha256(path) for path in weight_files(folder)}


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files of a model."""
    files = list_shards(folder) if is_gguf(folder) else sorted(folder.glob("*.safetensors"))
    return [path for path in files if path.name not in TRAINING]


def checkpoints(run: Path, note: Callable[[str], None] = lambda text: None) -> list[Entry]:
    """Returns a run's checkpoints by step, with their recorded losses. ``note`` is called for an unreadable loss.
    Raises `UserError` if the run cannot be read."""
    entries = []
    with reading(run):
        children = list(run.iterdir())
    for path in children:
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            loss: Any = None
            try:
                loss = read_json(path / META).get("val_loss")
            except UserError as error:
                note(f"{error.message}: using the best of the other checkpoints")
            is_number = type(loss) in (int, float) and abs(loss) <= MAX_FLOAT32
            entries.append(Entry(int(match[1]), float(loss) if is_number else None))
    return sorted(entries, key=lambda entry: entry.step)


def best(entries: list[Entry]) -> Entry:
    """Returns the checkpoint with the lowest held-out loss, or the newest if none was measured."""
    measured = [entry for entry in entries if entry.val_loss is not None]
    return min(measured, key=lambda entry: entry.val_loss or 0.0) if measured else entries[-1]


def write_index(run: Path) -> None:
    """Writes ``index.json`` from the checkpoint folders: the best, the latest, and all losses."""
    entries = checkpoints(run)
    if not entries:
        return
    index = {
        "best": best(entries).name,
        "latest": entries[-1].name,
        "checkpoints": {entry.name: {"val_loss": entry.val_loss} for entry in entries},
    }
    write_file(run / "index.json", to_json(index))


def prune(run: Path, keep: int, newest: float = math.inf, start: int = 0) -> None:
    """Deletes checkpoints after step ``newest``, because the run resumed before them, and those up to ``start``, which
    are of other models. Of the others, keeps the ``keep`` newest, and the weights of the best."""
    entries = checkpoints(run)
    for entry in entries:
        if not start < entry.step <= newest:
            _remove(run / entry.name)
    entries = [entry for entry in entries if start < entry.step <= newest]
    for entry in entries[: max(0, len(entries) - keep)]:
        if entry == best(entries):
            for name in TRAINING:
                (run / entry.name / name).unlink(missing_ok=True)
        else:
            _remove(run / entry.name)


def _remove(folder: Path) -> None:
    # Rename first, so that a run or a checkpoint is never incomplete.
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}")
    os.replace(folder, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def can_resume(path: Path) -> bool:
    """Whether a checkpoint has training state."""
    return all(_has_file(path, name) for name in TRAINING)


def is_checkpoint(path: Path) -> bool:
    """Whether a path looks like a checkpoint of gpt, Transformers or PEFT, or is a GGUF file. Raises `UserError` if
    unreadable."""
    return _has_file(path, "config.json") or is_adapter(path) or is_gguf(path)


def is_adapter(path: Path) -> bool:
    """Whether a checkpoint contains only adapters. Raises `UserError` if unreadable."""
    return _has_file(path, ADAPTER)


def base_of(path: Path) -> str:
    """Returns the base model of the adapter at ``path``: a folder or ``hf:NAME@REVISION``. Raises `UserError` if its
    files name no base."""
    values = read_json(path / ADAPTER)
    name, revision = values.get("base_model_name_or_path"), values.get("revision")
    if not isinstance(name, str) or not name or not isinstance(revision, str | None):
        raise UserError(f"{path / ADAPTER} does not name the base model of its adapter", BASE_HINT)
    is_local = not _HUB_NAME.fullmatch(name) or Path(name).is_dir()
    return name if is_local else f"{hub.PREFIX}{name}" + (f"@{revision}" if revision else "")


def base_folder(path: Path) -> Path:
    """Returns the folder of an adapter's base model. Raises `UserError` if it is unavailable."""
    base = base_of(path)
    if not hub.is_remote(base) and not is_checkpoint(Path(base)):
        raise UserError(f"{path} is an adapter for {base}, which does not exist", BASE_HINT)
    try:
        return hub.fetch(base) if hub.is_remote(base) else Path(base)
    except WorkError as error:
        raise WorkError(f"{path} is an adapter for {base}: {error.message}", error.hint) from None


def lineage(path: Path) -> Iterator[Path]:
    """Yields the folders of a checkpoint and its chain of base models, downloading from the Hub on demand. Raises
    `UserError` if the chain does not end."""
    current = path
    for _ in range(MAX_ADAPTERS):
        yield current
        if not is_adapter(current):
            return
        current = base_folder(current)
    raise UserError(f"{path} is in a chain of more than {MAX_ADAPTERS} adapters", "merge some of them")


def home(path: Path) -> Path:
    """Returns the folder that has a checkpoint's shape: its own, or that of a PEFT adapter's base. Like PEFT, ignores a
    ``config.json`` that other programs leave in an adapter folder."""
    for current in lineage(path):
        if _has_file(current, META) or not is_adapter(current):
            break
    return current


def is_run(path: Path) -> bool:
    """Whether a folder looks like a run. Raises `UserError` if unreadable."""
    return _has_file(path, RECORD)


def _has_file(path: Path, name: str) -> bool:
    with reading(path):
        return (path / name).is_file()


def runs_in(runs: Path) -> list[Path]:
    """Returns the readable runs in a folder, by name."""
    with reading(runs):
        children = sorted(runs.iterdir()) if runs.is_dir() else []
    run_folders = []
    for path in children:
        with contextlib.suppress(UserError):
            run_folders += [path] if is_run(path) else []
    return run_folders


def check_run(path: Path) -> None:
    """Raises `UserError` unless a path is a run folder."""
    if not is_run(path):
        if path.exists():
            raise UserError(f"{path} is not a run: it has no {RECORD}", known_runs())
        raise UserError(f"there is no run {path}", suggest_name(path, known_runs()))


def newest_run(runs: Path = Path(RUNS), file: str | None = None) -> Path:
    """Returns the run that started last and has ``file``, or by default a checkpoint. Raises `UserError` if there is
    none."""
    candidates: list[tuple[str, Path]] = []
    for path in runs_in(runs):
        with contextlib.suppress(UserError):
            if (path / file).exists() if file else checkpoints(path):
                candidates.append((RunRecord.read(path).started, path))
    if not candidates:
        raise UserError(
            f"there is no run with {file or 'a checkpoint'} in {runs}{os.sep}",
            "train one: gpt train FILE; or choose one with --model",
        )
    return max(candidates)[1]


def find_checkpoint(model: str | None, note: Callable[[str], None] = lambda text: None) -> Path:
    """Returns the checkpoint that ``--model`` names: a run (its best), ``RUN:best|latest|step-N``, a checkpoint, a
    Transformers folder, a GGUF file, or ``hf:NAME``, which is downloaded. None means the best of the newest run. If
    ``latest`` is damaged, calls ``note`` and uses the previous one. Raises `UserError` if there is none."""
    if model and hub.is_remote(model):
        return hub.fetch(model)
    match = _PART.fullmatch(model) if model else None
    with reading(Path(model or RUNS)):
        names_part = match and not Path(match[0]).exists()
    if match and names_part:
        return _of_run(Path(match[1]), match[2], note)
    path = Path(model) if model else newest_run()
    if is_run(path):
        return _of_run(path, "best", note)
    if is_checkpoint(path):
        return path
    if not path.exists():
        hint = suggest_name(path, known_runs())
        if is_run(Path(RUNS, path)):
            hint = f'did you mean "{Path(RUNS, path)}"?'
        elif re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)) and not path.parent.is_dir():
            hint = f'from the Hugging Face Hub: "hf:{model}"'
        raise UserError(f"there is no run or checkpoint {path}", hint)
    if path.suffix == ".gguf":
        raise UserError(f"{path} is not a GGUF file, whatever its name says", "download or copy it again")
    if path.is_dir() and any(path.glob("pytorch_model*.bin")):
        raise UserError(f"{path} has only pickled weights", "save them as safetensors first; gpt never opens pickles")
    raise UserError(f"{path} is not a run or a checkpoint: it has neither run.json nor config.json", known_runs())


def _of_run(run: Path, which: str, note: Callable[[str], None]) -> Path:
    check_run(run)
    entries = checkpoints(run, note) if which == "best" else checkpoints(run)
    if not entries:
        raise UserError(f"the run {run} has no checkpoint yet", "wait for its first one, or train again")
    if which == "best":
        return run / best(entries).name
    if which == "latest":
        return find_newest_intact(run, note)
    step = int(which.removeprefix("step-"))
    if step not in [entry.step for entry in entries]:
        raise UserError(f"{run} has no checkpoint {which}", "it has " + ", ".join(entry.name for entry in entries))
    return run / step_name(step)


def find_newest_intact(run: Path, note: Callable[[str], None], training: bool = False) -> Path:
    """Returns the newest intact checkpoint, or with ``training``, the newest that has training state. ``note`` is
    called for each checkpoint that is skipped. Raises `UserError` if none is intact."""
    reason = "none can be resumed from" if training else "none is there"
    for entry in reversed(checkpoints(run)):
        path = run / entry.name
        if training and not can_resume(path):
            continue
        try:
            verify_checksums(path, training)
            return path
        except UserError as error:
            reason = error.message
            note(f"{reason}: using the checkpoint before it")
    raise UserError(f"the run {run} has no intact checkpoint: {reason}", HINT)


def known_runs() -> str:
    """Returns a hint that lists the runs."""
    names = [str(path) for path in runs_in(Path(RUNS))]
    return "runs here: " + ", ".join(names) if names else "train one: gpt train FILE"
