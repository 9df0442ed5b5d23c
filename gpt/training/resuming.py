"""Resuming a run: finding it, reading it, and applying changed settings."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gpt.config import device
from gpt.config.device import Compute
from gpt.config.settings import checked, from_dict
from gpt.config.train import TrainConfig
from gpt.corpus.corpus import open_corpus
from gpt.corpus.token_folder import TokenFolder, find_token_folders
from gpt.documents.sources import MANIFEST
from gpt.model.memory import divisors
from gpt.parallel.world import World
from gpt.runs import checkpoint, folder, hub
from gpt.runs.record import FORMAT, Machine, RunRecord, StartRecord
from gpt.system import files
from gpt.system.errors import UserError
from gpt.system.files import disk_errors
from gpt.system.words import counted
from gpt.training import logs
from gpt.training.context import Result, Session, versions
from gpt.training.data import Dataset, load_tokens, make_tokens, open_examples, open_tokens
from gpt.training.finetune import InitCheckpoint, find_init, open_init
from gpt.training.preparing import TOKENS, lock_run
from gpt.training.recipe import Recipe, check_even_split, parse_micro_batch
from gpt.training.schedule import lr_at
from gpt.training.state import SavedState, TrainState, read_saved_state
from gpt.training.teachers import TEACHERS

# Without dropout, only ``steps`` changes the result beyond rounding.
CHANGEABLE_OPTIONS = ("steps", "nproc", "shard", "recompute", "device", "threads", "micro_batch", "keep", "log")


@dataclass(frozen=True)
class StartedRun:
    """A run to resume from ``checkpoint``, or from step 0 if it is None. ``saved`` is the checkpoint's training state.
    Only a finished run has a ``result``."""

    run: Path
    record: RunRecord
    texts: list[str]
    config: TrainConfig
    checkpoint: Path | None = None
    saved: SavedState | None = None
    result: Result | None = None

    def final_result(self, changes: Mapping[str, Any]) -> Result | None:
        """The result of a finished run, unless the user wants more steps."""
        return self.result if self.result is not None and (changes.get("steps") or 0) <= self.result.steps else None

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the checkpoint, or of ``run.json`` before the first checkpoint. None if a run with
        ``--minutes`` has to measure its speed again."""
        if self.saved is not None:
            return self.saved.recipe
        return None if self.record.resolved is None or self.config.minutes is not None else read_recipe(self.run)

    @property
    def requested_steps(self) -> dict[str, int]:
        """The ``steps`` that an earlier resume requested, or nothing if the recipe already has as many."""
        steps = [resume.given.get("steps") for resume in self.record.resumed]
        max_steps = max((n for n in steps if type(n) is int), default=0)
        return {"steps": max_steps} if self.recipe is not None and self.recipe.steps < max_steps < 2**53 else {}


@contextlib.contextmanager
def find_and_lock(run: str | None, changes: Mapping[str, Any], session: Session) -> Iterator[tuple[str, str | None]]:
    """Finds the run to resume and its checkpoint's name, locks the run, and repairs its folder."""
    path = find_run(run)
    with lock_run(path):
        started = read_started(path)
        if started.final_result(changes):
            yield str(path), None
            return
        logs.check(str(changes.get("log", started.config.log)))
        with disk_errors(path):
            files.recover(path)
            files.recover(path / TEACHERS)
            folder.write_index(path)
        yield str(path), find_checkpoint(path, session.note)


def find_run(name: str | None) -> Path:
    """Returns the run at ``name``, or the newest unfinished one in ``runs/``. Raises `UserError` if there is none."""
    if name:
        folder.check_run(Path(name))
        return Path(name)
    candidates = []
    for path in folder.runs_in(Path(folder.RUNS)):
        with contextlib.suppress(UserError):
            record = RunRecord.read(path)
            if not record.ended:
                candidates.append((record.started, path))
    if not candidates:
        raise UserError("there is no unfinished run in runs/ to resume", folder.known_runs())
    return max(candidates)[1]


def count_processes(name: str | None, changes: Mapping[str, Any]) -> int:
    """The number of local processes for a resume. It is one for a finished run. Otherwise, ``changes`` sets it, or else
    the last command that set ``nproc``. Raises like `find_run` and `read_started`."""
    started = read_started(find_run(name))
    if started.final_result(changes):
        return 1
    earlier_changes = (resume.given for resume in started.record.resumed)
    commands: list[Mapping[str, Any]] = [started.record.settings or {}, *earlier_changes, changes]
    counts = (options.get("nproc") for options in reversed(commands))
    return next((n for n in counts if type(n) is int and 1 <= n <= 1024), 1)


def refuse_fixed_options(changes: Mapping[str, Any], texts: Sequence[str]) -> None:
    """Raises `UserError` for texts and for options that ``--resume`` cannot change."""
    hint = "allowed options: " + ", ".join(f"--{name.replace('_', '-')}" for name in CHANGEABLE_OPTIONS)
    if texts:
        message = f"a text ({texts[0]}) cannot be given with --resume: a run keeps its text"
        raise UserError(message, "gpt train --resume RUN continues a run; --init RUN starts another from its weights")
    for name in changes:
        if name not in CHANGEABLE_OPTIONS:
            raise UserError(
                f"--{name.replace('_', '-')} cannot be given with --resume: the run continues exactly as it started",
                hint,
            )


def read_started(run: Path, name: str | None = None) -> StartedRun:
    """Reads ``run.json`` and the training state of the checkpoint ``name``. Raises `UserError` for damaged files or
    other formats."""
    path = str(run / folder.RECORD)
    record = RunRecord.read(run)
    if record.format != FORMAT:
        raise UserError(f"{path} has format {record.format}; this program reads format {FORMAT}", "update gpt")
    if record.texts is None or record.settings is None:
        raise UserError(f"{path} is damaged: it does not contain the settings of the run", "train again")
    config = from_dict(TrainConfig, record.settings, path)
    result = Result.of(run, record.result) if record.ended and record.result is not None else None
    saved = None if name is None else read_saved_state(run / name)
    config = replace(config, preset=record.size or config.preset)
    return StartedRun(run, record, record.texts, config, None if name is None else run / name, saved, result)


def read_recipe(run: Path) -> Recipe:
    """Reads the recipe in ``run.json``, or its draft. Raises `UserError` if it is damaged."""
    return checked(Recipe, RunRecord.read(run).resolved, str(run / folder.RECORD))


def find_checkpoint(run: Path, note: Callable[[str], None]) -> str | None:
    """The name of the newest intact checkpoint to resume from, or None before the first checkpoint. Raises `UserError`
    if all checkpoints are damaged or contain only weights."""
    entries = folder.checkpoints(run)
    if not entries:
        return None
    if not any(folder.can_resume(run / entry.name) for entry in entries):
        message = f"the checkpoints of {run} contain only weights: there is nothing to resume from"
        raise UserError(message, f"fine-tune from them: gpt train TEXT --init {run}")
    path = folder.find_newest_intact(run, note, training=True)
    saved = read_saved_state(path)
    if checkpoint.peek(path)[0] != saved.recipe.cycle(saved.state.cycle).saved_model:
        raise UserError(f"{path} is damaged: its training state is for a model of another shape", folder.HINT)
    return path.name


def restore_compute(
    started: StartedRun, changes: Mapping[str, Any], processes: int, note: Callable[[str], None]
) -> Compute:
    """Restores the device, dtype and threads, except for ``changes``. Threads are restored only on the same device
    with the same number of ``processes``. Notes every change that affects rounding."""
    machine = started.saved.machine if started.saved else started.record.compute
    requested, threads = changes.get("device"), changes.get("threads", started.config.threads)
    kept: Machine | TrainConfig = machine or started.config
    compute = device.pick(kept.device if requested in (None, "auto") else requested, kept.dtype, training=True)
    version, old_version = versions()["torch"], (started.record.versions or {}).get("torch")
    changed: list[tuple[str, object, object]] = [(f"torch {version}", version, old_version or version)]
    if machine is not None:
        old_device = torch.device(machine.device)
        if compute.device.type != old_device.type or compute.device.index not in (None, old_device.index):
            changed.append((f"on {compute.device}", compute.device, machine.device))
        elif processes == machine.processes and compute.device.type == "cpu":
            threads = changes.get("threads", machine.threads)
            changed.append((counted(threads, "thread"), threads, machine.threads))
        if processes != machine.processes:
            number = counted(processes, "process", "processes")
            note(f"{number} instead of {machine.processes}: same batches; equal up to rounding, except for dropout")
    for text, new, old in changed:
        if new != old:
            note(f"{text} instead of {old}: equal up to rounding, not bit for bit")
    device.use_threads(compute, threads)
    return compute


def restore_init(started: StartedRun, world: World) -> InitCheckpoint | None:
    """Opens the base model if the run still needs it: at step 0, or for adapters. Raises `UserError` if it is
    missing or its weights have changed."""
    config, recorded, saved = started.config, started.record.init, started.saved
    if config.init is None or (saved is not None and not saved.recipe.lora_rank):
        return None
    if recorded is None:
        return find_init(config)
    if not world.is_main:
        return open_init(config, recorded.model, Path(recorded.path), recorded.sha256)
    current = find_init(replace(config, init=place_of(recorded)))
    if current is not None and current.sha256 != recorded.sha256:
        raise UserError(f"{started.run} was started from {current.name}, whose weights have changed", "restore them")
    return current


def place_of(recorded: StartRecord) -> str:
    """Returns the name of a recorded model, as `gpt.runs.folder.find_checkpoint` takes it."""
    path = Path(recorded.path)
    return f"{recorded.model.partition('@')[0]}@{path.name}" if hub.is_remote(recorded.model) else str(path)


def open_data(started: StartedRun, compute: Compute, init: InitCheckpoint | None, session: Session) -> Dataset:
    """Opens a run's stored tokens or its texts. Rank 0 verifies the tokens' checksums. Raises `UserError` if the text
    has changed."""
    run, config, record, texts = started.run, started.config, started.record, started.texts
    saved_tokenizer = checkpoint.peek(started.checkpoint)[1] if started.checkpoint else None
    tokenizer = init.tokenizer if init else saved_tokenizer
    tokens, kind, note = run / TOKENS, compute.device.type, session.note
    data: Dataset
    if (tokens / MANIFEST).exists():
        stored_tokens = TokenFolder(tokens)
        if session.world.is_main:
            stored_tokens.verify()
        data = load_tokens(stored_tokens, found=False)
    elif config.has_examples:
        block_size = started.recipe.model.block_size if started.recipe else None
        data = open_examples(texts, config, kind, note, tokenizer, init.model if init else None, block_size)
    elif paths := find_token_folders(texts):
        data = open_tokens(paths, config, note, tokenizer)
    else:  # The run was interrupted while tokenizing.
        shutil.rmtree(tokens, ignore_errors=True)
        corpus = open_corpus(texts, config, session.listen)
        data = make_tokens(corpus, config, tokens, kind, session.listen, note, tokenizer)
    run_tokenizer, sources = record.tokenizer, record.sources
    if (sources is not None and sources != data.sources) or (
        run_tokenizer and run_tokenizer.fingerprint != data.tokenizer.fingerprint
    ):
        message = f"the text of {run} has changed: {', '.join(texts) or tokens}"
        raise UserError(message, "restore it, or fine-tune on the new text with --init")
    return data


def apply_changes(
    recipe: Recipe, changes: Mapping[str, Any], state: TrainState, note: Callable[[str], None], processes: int = 1
) -> Recipe:
    """Applies ``changes`` to the recipe, for ``processes`` ranks. Raises `UserError` for fewer steps or a batch
    that the processes cannot split evenly."""
    check_even_split(recipe.rows // recipe.group, processes)
    share = recipe.rows // processes
    if share % recipe.micro_batch:
        recipe = replace(recipe, micro_batch=max(d for d in divisors(share) if d <= recipe.micro_batch))
    steps, micro_batch = changes.get("steps"), changes.get("micro_batch")
    for name in ("keep", "shard", "recompute"):
        value, current = changes.get(name), getattr(recipe, name)
        if value not in (None, current):
            recipe = replace(recipe, **{name: value})
            if name != "keep":
                note(f"--{name} {value} instead of {current}: equal up to rounding")
    if (recipe.lora_rank or recipe.reward) and recipe.is_sharded:
        what = "adapters" if recipe.lora_rank else "rewards"
        raise UserError(f"{what} do not support sharded weights", "leave out --shard")
    if micro_batch not in (None, "auto"):
        recipe = replace(recipe, micro_batch=parse_micro_batch(micro_batch, share))
        note(f"micro-batch {recipe.micro_batch}: the same sums in another order, so equal up to rounding")
    if steps is not None and recipe.is_timed:
        message = "--steps cannot extend a run with --minutes, because the clock sets its learning rate"
        raise UserError(message, "gpt train TEXT --init RUN starts another run from its weights")
    if steps is not None and steps < recipe.steps:
        raise UserError(f"the run has {recipe.steps:,} steps; --steps {steps:,} is fewer", "give at least that many")
    if steps is not None and steps > recipe.steps:
        new_recipe = replace(recipe, steps=steps)
        step = state.step
        current, new_lr = (lr_at(each.cycle(state.cycle), state.cycle_step + 1) for each in (recipe, new_recipe))
        note(
            f"{steps:,} steps instead of {recipe.steps:,}: from step {step:,}, the {recipe.schedule} schedule is "
            f"that of {steps:,} steps, with {recipe.decay:,} of final decay; the next learning rate is {new_lr:.2g}"
            + (f" instead of {current:.2g}" if step < recipe.steps and current != new_lr else "")
        )
        recipe = new_recipe
    return recipe
