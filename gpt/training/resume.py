"""Which run ``--resume`` means, how far it came, and what may be changed as it goes on."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gpt import device
from gpt.config import MOST_THREADS, TrainConfig
from gpt.device import Compute
from gpt.errors import UserError
from gpt.model.memory import divisors
from gpt.runs import checkpoint, folder, hub
from gpt.runs.record import FORMAT, Machine, RunRecord
from gpt.settings import checked, from_dict
from gpt.text.tokenizer import Tokenizer
from gpt.training.recipe import Recipe, asked_micro_batch, check_heads, check_share
from gpt.training.record import versions
from gpt.training.result import Result
from gpt.training.schedule import lr_at
from gpt.training.start import Start, find_start
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
)  # data and result stay, up to rounding
Notes = Callable[[str], None]


@dataclass
class Begun:
    """A run that was begun. ``path``: the checkpoint that it goes on from, ``saved`` what that says; without one it
    starts at step 0. ``result``: of one that has come to its end."""

    run: Path
    record: RunRecord
    texts: list[str]
    config: TrainConfig
    path: Path | None = None
    saved: Saved | None = None
    result: Result | None = None

    def ends_with(self, given: Mapping[str, Any]) -> Result | None:
        """Its result, unless more steps are asked for."""
        return self.result if self.result is not None and (given.get("steps") or 0) <= self.result.steps else None

    @property
    def recipe(self) -> Recipe | None:
        """What is done: the checkpoint's, or what the run had settled before its first one. Minutes are counted anew
        where nothing was saved."""
        if self.saved is not None:
            return self.saved.recipe
        if self.record.resolved is None or self.config.minutes is not None:
            return None
        return checked(Recipe, self.record.resolved, str(self.run / folder.RECORD))

    @property
    def machine(self) -> Machine | None:
        """What it computed on."""
        return self.record.compute if self.saved is None else self.saved.machine

    @property
    def lengthened(self) -> dict[str, int]:
        """The steps that were asked for when the run was gone on with before, where its checkpoint is older."""
        steps = [each.given.get("steps") for each in self.record.resumed]
        most = max((n for n in steps if type(n) is int), default=0)
        return {"steps": most} if self.recipe is not None and self.recipe.steps < most < 2**53 else {}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer, where there is a checkpoint."""
        return checkpoint.look(self.path)[1] if self.path else None


def find_run(asked: str | None) -> Path:
    """The run that was asked for; None: the newest in ``runs/`` that is not finished. Raises `UserError` where there is
    none."""
    if asked:
        if not folder.is_run(Path(asked)):
            raise UserError(f"there is no run {asked} to go on with", folder.known_runs())
        return Path(asked)
    begun = []
    for path in folder.runs_in(Path(folder.RUNS)):
        with contextlib.suppress(UserError):
            record = RunRecord.read(path)
            if not record.ended:
                begun.append((record.started, path))
    if not begun:
        raise UserError("there is no unfinished run in runs/ to go on with", folder.known_runs())
    return max(begun)[1]


def finished(asked: str | None, given: Mapping[str, Any]) -> Result | None:
    """The result of a run that has come to its end, unless more steps are asked for. Raises as `find_run` and
    `read_begun` do."""
    return read_begun(find_run(asked)).ends_with(given)


def processes_of(asked: str | None, given: Mapping[str, Any]) -> int:
    """How many processes of one machine go on with a run: as many as are ``given``, or as it was last begun or gone on
    with; one where it is finished. Raises as `find_run` and `read_begun` do."""
    begun = read_begun(find_run(asked))
    if begun.ends_with(given):
        return 1
    before = [each.given for each in begun.record.resumed]
    said = [each.get("nproc") for each in (begun.record.settings or {}, *before, given)]
    return next((n for n in reversed(said) if type(n) is int and 1 <= n <= 1024), 1)


def division(begun: Begun, given: Mapping[str, Any]) -> tuple[int, bool]:
    """How processes divide the work, for `World.divide`: as before, unless it is given otherwise."""
    before = begun.recipe or begun.config
    return int(given.get("tensor", before.tensor)), given.get("shard", before.shard) == "full"


def refuse_others(given: Mapping[str, Any], texts: Sequence[str]) -> None:
    """Raises `UserError` for what cannot be joined to ``--resume``: all but `MAY_CHANGE`."""
    may = "it may be joined by " + ", ".join(f"--{name.replace('_', '-')}" for name in MAY_CHANGE)
    if texts:
        raise UserError(f"a text ({texts[0]}) cannot be given with --resume: the run has its own", may)
    for name in given:
        if name not in MAY_CHANGE:
            raise UserError(
                f"--{name.replace('_', '-')} cannot be given with --resume: the run goes on exactly as it was begun",
                may,
            )


def read_begun(run: Path, at: str | None = None) -> Begun:
    """What ``run.json`` says, and the checkpoint ``at`` which the run goes on. Raises `UserError` where that is damaged
    or from another version."""
    where = str(run / folder.RECORD)
    record = RunRecord.read(run)
    if record.format != FORMAT:
        raise UserError(f"{where} has format {record.format}; this program reads format {FORMAT}", "update gpt")
    if record.texts is None or record.settings is None:
        raise UserError(f"{where} is damaged: it does not say what the run was asked for", "train again")
    config = from_dict(TrainConfig, record.settings, where)
    begun = Begun(run, record, record.texts, replace(config, preset=record.size or config.preset))
    if record.ended and record.result is not None:
        begun.result = Result.of(run, record.result)
    if at is not None:
        begun.path = run / at
        begun.saved = read_saved(begun.path)
    return begun


def find_checkpoint(run: Path, note: Notes) -> str | None:
    """The newest whole checkpoint that can be gone on from; None: there are none yet. Raises `UserError` where there
    are some, and none is whole."""
    entries = folder.checkpoints(run)
    if not entries:
        return None
    if not any(folder.can_go_on(run / entry.name) for entry in entries):
        raise UserError(
            f"the checkpoints of {run} hold weights alone: there is nothing to go on from",
            f"fine-tune from them: gpt train TEXT --init {run}",
        )
    path = folder.newest_whole(run, note, training=True)
    if checkpoint.look(path)[0] != read_saved(path).recipe.model:
        raise UserError(f"{path} is damaged: its training state is of a model of another shape", folder.HINT)
    return path.name


def changed(recipe: Recipe, given: Mapping[str, Any], step: int, note: Notes, processes: int = 1) -> Recipe:
    """The recipe with what was changed, for so many processes. Raises `UserError` for fewer steps, and for a batch that
    does not divide."""
    check_share(recipe.rows, processes)
    if recipe.ramp and recipe.ramp.by % processes:
        raise UserError(
            f"the batches grow in multiples of {recipe.ramp.by:,}, which {processes} processes cannot share evenly",
            f"go on with --nproc {recipe.ramp.by}",
        )
    share = recipe.rows // processes
    if share % recipe.micro_batch:
        recipe = replace(recipe, micro_batch=max(d for d in divisors(share) if d <= recipe.micro_batch))
    steps, keep, micro_batch = given.get("steps"), given.get("keep"), given.get("micro_batch")
    if keep is not None:
        recipe = replace(recipe, keep=keep)
    for name in ("shard", "tensor", "recompute"):
        value, before = given.get(name), getattr(recipe, name)
        if value not in (None, before):
            recipe = replace(recipe, **{name: value})
            note(f"--{name} {value} instead of {before}: equal to rounding")
    check_heads(recipe.model, recipe.tensor)
    if recipe.lora_rank and (recipe.tensor > 1 or recipe.shard == "full"):
        raise UserError("adapters are trained by processes that have all weights each", "leave out --shard, --tensor")
    if micro_batch not in (None, "auto"):
        recipe = replace(recipe, micro_batch=asked_micro_batch(micro_batch, share))
        note(f"micro-batch {recipe.micro_batch}: the same sums in another order, so equal to rounding")
    if steps is not None and steps < recipe.steps:
        raise UserError(f"the run has {recipe.steps:,} steps; --steps {steps:,} is fewer", "give as many or more")
    if steps is not None and steps > recipe.steps:
        longer = replace(recipe, steps=steps)
        before, after = (_rate(each, step + 1) for each in (recipe, longer))
        note(
            f"{steps:,} steps instead of {recipe.steps:,}: from step {step:,} on, the {recipe.schedule} schedule is "
            f"that of {steps:,} steps, with {recipe.decay:,} of decay at its end; the next rate is {after:.2g}"
            + (f" instead of {before:.2g}" if step < recipe.steps and before != after else "")
        )
        recipe = longer
    return recipe


def _rate(recipe: Recipe, step: int) -> float:
    return lr_at(
        step, peak=recipe.lr, warmup=recipe.warmup, steps=recipe.steps, decay=recipe.decay, schedule=recipe.schedule
    )


def same_compute(begun: Begun, given: Mapping[str, Any], processes: int, note: Notes) -> Compute:
    """The device, dtype and threads that the run had, or those that are ``given``; threads where it had as many
    ``processes``. Says what moves rounding."""
    machine, asked, threads = begun.machine, given.get("device"), given.get("threads", begun.config.threads)
    if machine is None:
        compute = device.pick(asked or begun.config.device, begun.config.dtype, training=True)
        device.use_threads(compute, threads)
        return compute
    where = asked if asked not in (None, "auto") else machine.device
    compute = device.pick(where, machine.dtype, training=True)
    moved = compute.device != torch.device(machine.device)
    if moved:
        note(f"on {compute.device} instead of {machine.device}: equal to rounding, not bit for bit")
    if processes != machine.processes:
        note(
            f"{counted(processes, 'process', 'processes')} instead of {machine.processes}: the same batches; equal to "
            "rounding, but for dropout"
        )
    elif not moved and compute.device.type == "cpu":
        if not 1 <= machine.threads <= MOST_THREADS:
            raise UserError(
                f"{begun.run} is damaged: it says that it ran on {counted(machine.threads, 'thread')}", folder.HINT
            )
        threads = given.get("threads", machine.threads)
        if threads != machine.threads:
            note(f"{counted(threads, 'thread')} instead of {machine.threads}: equal to rounding, not bit for bit")
        elif threads != torch.get_num_threads():
            note(f"{counted(threads, 'thread')}, as before, instead of {torch.get_num_threads()}: sums depend on it")
    device.use_threads(compute, threads)
    was = begun.record.versions
    if was is not None and was.get("torch") != versions()["torch"]:
        note(f"torch {versions()['torch']} instead of {was.get('torch')}: equal to rounding, not bit for bit")
    return compute


def same_start(begun: Begun) -> Start | None:
    """The model that the run was begun from, where it is still needed: its weights below adapters, or at step 0. Raises
    `UserError` where it is gone, or its weights are others."""
    init = begun.record.init
    asked = begun.config.init
    if asked is None or (begun.saved is not None and not begun.saved.recipe.lora_rank):
        return None
    if init is not None:
        asked = init.path
        if hub.is_remote(begun.config.init or ""):
            asked = f"{str(begun.config.init).partition('@')[0]}@{Path(asked).name}"
    start = find_start(replace(begun.config, init=asked))
    if start is not None and init is not None and start.sums != init.sha256:
        raise UserError(
            f"{begun.run} was begun from {asked}, whose weights are others now", "put them back as they were"
        )
    return start
