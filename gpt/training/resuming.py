"""A run that was started: finding and reading it, and what a resume may change of it."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gpt import device, files
from gpt.config import MOST_THREADS, TrainConfig
from gpt.device import Compute
from gpt.errors import UserError
from gpt.files import disk_errors
from gpt.model.memory import divisors
from gpt.parallel.world import World
from gpt.runs import checkpoint, folder, hub
from gpt.runs.record import FORMAT, RunRecord
from gpt.settings import checked, from_dict
from gpt.text.corpus import open_corpus
from gpt.text.token_folder import MANIFEST, TokenFolder
from gpt.training import logs
from gpt.training.context import Result, Session, versions
from gpt.training.data import Dataset, load_tokens, make_tokens, open_examples, open_tokens, tokenized
from gpt.training.finetune import InitCheckpoint, find_init, open_init
from gpt.training.preparing import TOKENS, lock_run
from gpt.training.recipe import Recipe, parse_micro_batch, check_heads, check_even_split
from gpt.training.state import Saved, read_saved
from gpt.words import counted

MAY_CHANGE = (
    "steps",
    "nproc",
    "shard",
    "tensor",
    "recompute",
    "device",
    "threads",
    "micro_batch",
    "keep",
    "log",
)  # in a resume: data and result stay, up to rounding


@dataclass(frozen=True)
class Begun:
    """A run that was begun. ``checkpoint`` is the one that it resumes from, ``saved`` its training state; without one
    it starts at step 0. ``result`` is that of a finished run."""

    run: Path
    record: RunRecord
    texts: list[str]
    config: TrainConfig
    checkpoint: Path | None = None
    saved: Saved | None = None
    result: Result | None = None

    def ends_with(self, given: Mapping[str, Any]) -> Result | None:
        """Its result, unless more steps are asked for."""
        return self.result if self.result is not None and (given.get("steps") or 0) <= self.result.steps else None

    @property
    def recipe(self) -> Recipe | None:
        """The checkpoint's recipe, or the one that was resolved before the first checkpoint. Minutes are measured anew
        if nothing was saved."""
        if self.saved is not None:
            return self.saved.recipe
        if self.record.resolved is None or self.config.minutes is not None:
            return None
        return checked(Recipe, self.record.resolved, str(self.run / folder.RECORD))

    @property
    def lengthened(self) -> dict[str, int]:
        """The steps that an earlier resume asked for, if the checkpoint is older."""
        steps = [each.given.get("steps") for each in self.record.resumed]
        most = max((n for n in steps if type(n) is int), default=0)
        return {"steps": most} if self.recipe is not None and self.recipe.steps < most < 2**53 else {}


@contextlib.contextmanager
def find(run: str | None, given: Mapping[str, Any], session: Session) -> Iterator[tuple[str, str | None]]:
    """Finds the run to resume and the name of its checkpoint, holds its lock, and repairs its folder."""
    path = find_run(run)
    with lock_run(path):
        begun = read_begun(path)
        if begun.ends_with(given):
            yield str(path), None
            return
        logs.check(str(given.get("log", begun.config.log)))
        with disk_errors(path):
            files.recover(path)
            folder.write_index(path)
        yield str(path), find_checkpoint(path, session.note)


def find_run(asked: str | None) -> Path:
    """The run that was asked for; None means the newest in ``runs/`` that is not finished. Raises `UserError` if there
    is none."""
    if asked:
        folder.check_run(Path(asked))
        return Path(asked)
    begun = []
    for path in folder.runs_in(Path(folder.RUNS)):
        with contextlib.suppress(UserError):
            record = RunRecord.read(path)
            if not record.ended:
                begun.append((record.started, path))
    if not begun:
        raise UserError("there is no unfinished run in runs/ to resume", folder.known_runs())
    return max(begun)[1]


def finished(asked: str | None, given: Mapping[str, Any]) -> Result | None:
    """The result of a finished run, unless more steps are asked for. Raises as `find_run` and `read_begun` do."""
    return read_begun(find_run(asked)).ends_with(given)


def processes_of(asked: str | None, given: Mapping[str, Any]) -> int:
    """The number of processes of one machine that resume a run: as ``given``, or as many as it had; one if it is
    finished. Raises as `find_run` and `read_begun` do."""
    begun = read_begun(find_run(asked))
    if begun.ends_with(given):
        return 1
    before = [each.given for each in begun.record.resumed]
    said = [each.get("nproc") for each in (begun.record.settings or {}, *before, given)]
    return next((n for n in reversed(said) if type(n) is int and 1 <= n <= 1024), 1)


def refuse_others(given: Mapping[str, Any], texts: Sequence[str]) -> None:
    """Raises `UserError` for anything that cannot be given with ``--resume``: all but `MAY_CHANGE`."""
    may = "allowed options: " + ", ".join(f"--{name.replace('_', '-')}" for name in MAY_CHANGE)
    if texts:
        raise UserError(
            f"a text ({texts[0]}) cannot be given with --resume: a run keeps its text",
            "gpt train --resume RUN continues a run; --init RUN starts another from its weights",
        )
    for name in given:
        if name not in MAY_CHANGE:
            raise UserError(
                f"--{name.replace('_', '-')} cannot be given with --resume: the run continues exactly as it started",
                may,
            )


def read_begun(run: Path, at: str | None = None) -> Begun:
    """Reads ``run.json``, and the checkpoint ``at`` which the run resumes. Raises `UserError` if they are damaged or of
    another version."""
    where = str(run / folder.RECORD)
    record = RunRecord.read(run)
    if record.format != FORMAT:
        raise UserError(f"{where} has format {record.format}; this program reads format {FORMAT}", "update gpt")
    if record.texts is None or record.settings is None:
        raise UserError(f"{where} is damaged: it does not contain the settings of the run", "train again")
    config = from_dict(TrainConfig, record.settings, where)
    config = replace(config, preset=record.size or config.preset)
    result = Result.of(run, record.result) if record.ended and record.result is not None else None
    saved = None if at is None else read_saved(run / at)
    return Begun(run, record, record.texts, config, None if at is None else run / at, saved, result)


def find_checkpoint(run: Path, note: Callable[[str], None]) -> str | None:
    """The name of the newest whole checkpoint that can be resumed from; None if there are none yet. Raises `UserError`
    if there are some, and none is whole."""
    entries = folder.checkpoints(run)
    if not entries:
        return None
    if not any(folder.can_resume(run / entry.name) for entry in entries):
        raise UserError(
            f"the checkpoints of {run} contain only weights: there is nothing to resume from",
            f"fine-tune from them: gpt train TEXT --init {run}",
        )
    path = folder.newest_whole(run, note, training=True)
    if checkpoint.peek(path)[0] != read_saved(path).recipe.saved_model:
        raise UserError(f"{path} is damaged: its training state is for a model of another shape", folder.HINT)
    return path.name


def same_compute(begun: Begun, given: Mapping[str, Any], processes: int, note: Callable[[str], None]) -> Compute:
    """The device, dtype and threads that the run had, or those that are ``given``; threads only if it had as many
    ``processes``. Notes every change that moves rounding."""
    machine = begun.saved.machine if begun.saved else begun.record.compute
    asked, threads = given.get("device"), given.get("threads", begun.config.threads)
    if machine is None:
        compute = device.pick(asked or begun.config.device, begun.config.dtype, training=True)
        device.use_threads(compute, threads)
        return compute
    where = asked if asked not in (None, "auto") else machine.device
    compute = device.pick(where, machine.dtype, training=True)
    before = torch.device(machine.device)
    moved = compute.device.type != before.type or compute.device.index not in (None, before.index)
    if moved:
        note(f"on {compute.device} instead of {machine.device}: equal up to rounding, not bit for bit")
    if processes != machine.processes:
        note(
            f"{counted(processes, 'process', 'processes')} instead of {machine.processes}: same batches; equal up to "
            "rounding, except for dropout"
        )
    elif not moved and compute.device.type == "cpu":
        if not 1 <= machine.threads <= MOST_THREADS:
            raise UserError(
                f"{begun.run} is damaged: it claims to have run on {counted(machine.threads, 'thread')}", folder.HINT
            )
        threads = given.get("threads", machine.threads)
        if threads != machine.threads:
            note(f"{counted(threads, 'thread')} instead of {machine.threads}: equal up to rounding, not bit for bit")
        elif threads != torch.get_num_threads():
            note(f"{counted(threads, 'thread')}, as before, instead of {torch.get_num_threads()}: it affects rounding")
    device.use_threads(compute, threads)
    was = begun.record.versions
    if was is not None and was.get("torch") != versions()["torch"]:
        note(f"torch {versions()['torch']} instead of {was.get('torch')}: equal up to rounding, not bit for bit")
    return compute


def same_init(begun: Begun, world: World) -> InitCheckpoint | None:
    """The checkpoint that the run was fine-tuned from, if it is still needed: its weights below adapters, or at step 0.
    Raises `UserError` if it is gone, or rank 0 finds other weights in it."""
    init, asked = begun.record.init, begun.config.init
    if asked is None or (begun.saved is not None and not begun.saved.recipe.lora_rank):
        return None
    if init is not None:
        if not world.is_main:
            return open_init(begun.config, init.model, Path(init.path), init.sha256)
        asked = init.path
        if hub.is_remote(begun.config.init or ""):
            asked = f"{str(begun.config.init).partition('@')[0]}@{Path(asked).name}"
    found = find_init(replace(begun.config, init=asked))
    if found is not None and init is not None and found.sha256 != init.sha256:
        raise UserError(f"{begun.run} was started from {asked}, whose weights have changed", "restore them")
    return found


def open_data(begun: Begun, compute: Compute, init: InitCheckpoint | None, session: Session) -> Dataset:
    """The data of a run that was begun: its own tokens, whose checksums rank 0 compares, or the texts outside of it,
    read again. Raises `UserError` if they have changed."""
    run, config, record, texts = begun.run, begun.config, begun.record, begun.texts
    peeked = checkpoint.peek(begun.checkpoint)[1] if begun.checkpoint else None
    tokenizer = init.tokenizer if init else peeked
    tokens, kind, note = run / TOKENS, compute.device.type, session.note
    data: Dataset
    if (tokens / MANIFEST).exists():
        own = TokenFolder(tokens)
        if session.world.is_main:
            own.verify()
        data = load_tokens(own, found=False)
    elif config.has_examples:
        block_size = begun.recipe.model.block_size if begun.recipe else None
        data = open_examples(texts, config, kind, note, tokenizer, init.model if init else None, block_size)
    elif path := tokenized(texts):
        data = open_tokens(path, config, note, tokenizer)
    else:  # the run ended while it tokenized
        shutil.rmtree(tokens, ignore_errors=True)
        corpus = open_corpus(texts, config, session.listen)
        data = make_tokens(corpus, config, tokens, kind, session.listen, note, tokenizer)
    made_with, was = record.tokenizer, record.sources
    if (was is not None and was != data.sources) or (made_with and made_with.fingerprint != data.tokenizer.fingerprint):
        raise UserError(
            f"the text of {run} has changed: {', '.join(texts) or tokens}",
            "restore it, or fine-tune on the new text with --init",
        )
    return data


def changed(
    recipe: Recipe, given: Mapping[str, Any], step: int, note: Callable[[str], None], processes: int = 1
) -> Recipe:
    """The recipe with the changes that are ``given``, for ``processes`` data ranks. Raises `UserError` for fewer steps,
    and for a batch that does not divide."""
    check_even_split(recipe.rows, processes)
    if recipe.ramp and recipe.ramp.by % processes:
        raise UserError(
            f"the batches grow in multiples of {recipe.ramp.by:,}, which {processes} processes cannot split evenly",
            f"resume with --nproc {recipe.ramp.by}",
        )
    share = recipe.rows // processes
    if share % recipe.micro_batch:
        recipe = replace(recipe, micro_batch=max(d for d in divisors(share) if d <= recipe.micro_batch))
    steps, micro_batch = given.get("steps"), given.get("micro_batch")
    for name in ("keep", "shard", "tensor", "recompute"):
        value, before = given.get(name), getattr(recipe, name)
        if value not in (None, before):
            recipe = replace(recipe, **{name: value})
            if name != "keep":
                note(f"--{name} {value} instead of {before}: equal up to rounding")
    check_heads(recipe.model, recipe.tensor)
    if recipe.lora_rank and recipe.is_sharded:
        raise UserError("adapters do not support sharded weights", "leave out --shard and --tensor")
    if micro_batch not in (None, "auto"):
        recipe = replace(recipe, micro_batch=parse_micro_batch(micro_batch, share))
        note(f"micro-batch {recipe.micro_batch}: the same sums in another order, so equal up to rounding")
    if steps is not None and steps < recipe.steps:
        raise UserError(f"the run has {recipe.steps:,} steps; --steps {steps:,} is fewer", "give at least that many")
    if steps is not None and steps > recipe.steps:
        longer = replace(recipe, steps=steps, planned=0)
        before, after = (each.lr_at(step + 1) for each in (recipe, longer))
        note(
            f"{steps:,} steps instead of {recipe.steps:,}: from step {step:,}, the {recipe.schedule} schedule is "
            f"that of {steps:,} steps, with {recipe.decay:,} of final decay; the next learning rate is {after:.2g}"
            + (f" instead of {before:.2g}" if step < recipe.steps and before != after else "")
        )
        recipe = longer
    return recipe
