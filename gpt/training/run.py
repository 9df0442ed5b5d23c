"""A training run, from texts to a saved checkpoint. A new run is prepared, and then resumed at step 0.

`prepare` makes the run's folder, on rank 0; `find` finds the one to resume. What follows is the same for both, on all
ranks: `open_run` reads the folder, and `Trainer` trains.
"""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gpt import device, events, files
from gpt.config import MOST_THREADS, TrainConfig
from gpt.device import Compute
from gpt.errors import Interrupted, UserError
from gpt.files import disk_errors, locked
from gpt.interrupt import StopSignal
from gpt.model.memory import divisors
from gpt.parallel import environment
from gpt.parallel.world import World, joined
from gpt.runs import checkpoint, folder, hub
from gpt.runs.record import FORMAT, Machine, RunRecord
from gpt.settings import checked, from_dict
from gpt.text.corpus import open_corpus
from gpt.text.token_folder import MANIFEST, TokenFolder
from gpt.text.tokenizer import Tokenizer
from gpt.training import logs
from gpt.training.budget import PROBE_SHARE, TimeBudget, preset_for_minutes
from gpt.training.context import Listener, Result, RunContext, Session, data_record, first_record, versions
from gpt.training.data import Dataset, load_tokens, make_tokens, open_examples, open_tokens, tokenized
from gpt.training.finetune import InitCheckpoint, find_init, open_init
from gpt.training.loop import Trainer, measure_budget
from gpt.training.parallel import parallelize
from gpt.training.recipe import Recipe, asked_micro_batch, check_heads, check_model, check_share, resolve
from gpt.training.state import Saved, read_saved, seed_all
from gpt.words import counted

TOKENS = "tokens"  # in the run folder
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


def train(
    texts: Sequence[str], config: TrainConfig, listen: Listener = lambda event: None, began: float | None = None
) -> Result:
    """Trains a decoder on ``texts`` (files, folders, ``-`` or corpora by name; none: ``pydocs``) and tells ``listen``
    how it goes. ``began`` is when the command did, on the clock of `time.perf_counter`.

    Raises `UserError` for input that cannot be used, `WorkError` if the work fails, and `Interrupted` after a signal,
    once the state is saved.
    """
    with _session(config.nproc, listen, began) as session:
        world = session.world
        world.assert_same({"text": list(map(str, texts)), **asdict(config), **_code_versions()})
        world.raise_on_all(lambda: logs.check(config.log))
        compute = world.raise_on_all(lambda: device.pick(config.device, config.dtype, training=True))
        world.raise_on_all(lambda: world.divide(config.tensor))
        with contextlib.ExitStack() as until_ended, contextlib.ExitStack() as until_first_step:
            prepared = None
            if world.is_main:
                prepared = prepare(texts, config, compute, session, until_ended, until_first_step)
            run = world.broadcast_object(lambda: str(prepared.run if prepared else ""))
            begun = world.raise_on_all(lambda: read_begun(Path(run)))
            trainer = open_run(begun, {}, session, prepared)
            until_first_step.close()
            return trainer.train()


def resume(
    run: str | None = None,
    given: Mapping[str, Any] | None = None,
    texts: Sequence[str] = (),
    listen: Listener = lambda event: None,
    began: float | None = None,
) -> Result:
    """Resumes ``run``, or the newest in ``runs/`` that is not finished, exactly at its newest whole checkpoint; without
    one, at step 0. ``given`` are settings that may change (`MAY_CHANGE`).

    Raises as `train` does, and `UserError` if there is no such run, or for a setting that may not change.
    """
    given = given or {}
    _refuse_others(given, texts)
    asked = from_dict(TrainConfig, given, "resume")
    if not environment.is_one_of_many() and (result := finished(run, given)):
        listen(events.Note(f"{result.run} is finished"))
        return result  # which takes one process, however many the run had
    with _session(asked.nproc, listen, began) as session, contextlib.ExitStack() as until_ended:
        world = session.world
        world.assert_same({"resume": run, **given, **_code_versions()})
        found = until_ended.enter_context(find(run, given, session)) if world.is_main else None
        path, at = world.broadcast_object(lambda: found or ("", None))
        begun = world.raise_on_all(lambda: read_begun(Path(path), at))
        if result := begun.ends_with(given):
            session.note(f"{begun.run} is finished")
            return result
        return open_run(begun, given, session).train()


@contextlib.contextmanager
def _session(nproc: int, listen: Listener, began: float | None) -> Iterator[Session]:
    """Hears signals, and joins the other processes."""
    began = time.perf_counter() if began is None else began
    with StopSignal(at_once=True) as stop, joined(nproc) as world:
        yield Session(world, stop, listen, began)


def _code_versions() -> dict[str, str]:
    """The versions that must be the same on all ranks."""
    return {f"the version of {package}": version(package) for package in ("gpt", "torch")}


# A new run


@dataclass(frozen=True)
class Prepared:
    """A new run's folder, and its data, opened."""

    run: Path
    data: Dataset
    init: InitCheckpoint | None


def prepare(
    texts: Sequence[str],
    config: TrainConfig,
    compute: Compute,
    session: Session,
    until_ended: contextlib.ExitStack,
    until_first_step: contextlib.ExitStack,
) -> Prepared:
    """Makes a run's folder, holds its lock ``until_ended``, tokenizes the text into it unless it comes tokenized, and
    writes what ``run.json`` says by then: it is there before the text is tokenized. If anything fails
    ``until_first_step``, no folder is left."""
    listen, note, asked = session.listen, session.note, config
    if session.world.size > 1 and config.has_examples and "-" in texts:
        what = "conversations" if config.chat else "pairs"
        raise UserError(f"{what} from stdin cannot be read by several processes", "put them into a file")
    init = find_init(config)
    tokenizer = init.tokenizer if init else None
    data: Dataset | None = None
    corpus = None
    if config.has_examples:
        data = open_examples(texts, config, compute.device.type, note, tokenizer, init.model if init else None)
    elif path := tokenized(texts):
        data = open_tokens(path, config, note, tokenizer)
        config = preset_for_minutes(config, compute, data.bytes, note, session.world.size)
    else:
        corpus = open_corpus(texts, config, listen)
        config = preset_for_minutes(config, compute, corpus.found.bytes, note, session.world.size)
    record = first_record(texts, asked, config.preset)
    name = corpus.name if data is None and corpus else data.name if data else ""
    run = folder.create_run(config.out or os.path.join(folder.RUNS, files.usable_name(name)))
    until_first_step.enter_context(removed_on_failure(run))
    until_ended.enter_context(lock_run(run))
    with disk_errors(run):
        record.write(run)
    if data is None:
        assert corpus is not None
        data = make_tokens(corpus, config, run / TOKENS, compute.device.type, listen, note, tokenizer)
    with disk_errors(run):
        data_record(record, data, init).write(run)
    return Prepared(run, data, init)


def lock_run(run: Path) -> contextlib.AbstractContextManager[None]:
    """Holds a run folder for this process."""
    return locked(run, "it is being trained: wait for it, or train another run with --out")


@contextlib.contextmanager
def removed_on_failure(run: Path) -> Iterator[None]:
    """Removes a run that fails here, before its first step."""
    try:
        yield
    except Interrupted as stopped:
        _remove(run)
        raise Interrupted(stopped.signum, "interrupted before the first step: nothing is left of the run") from None
    except BaseException:
        _remove(run)
        raise


def _remove(run: Path) -> None:
    """Removes a run folder, and ``runs/`` if nothing else is in it."""
    shutil.rmtree(run, ignore_errors=True)
    if run.parent == Path(folder.RUNS):
        with contextlib.suppress(OSError):
            run.parent.rmdir()


# A run that was begun


@dataclass
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
    def machine(self) -> Machine | None:
        """The machine that it ran on."""
        return self.record.compute if self.saved is None else self.saved.machine

    @property
    def lengthened(self) -> dict[str, int]:
        """The steps that an earlier resume asked for, if the checkpoint is older."""
        steps = [each.given.get("steps") for each in self.record.resumed]
        most = max((n for n in steps if type(n) is int), default=0)
        return {"steps": most} if self.recipe is not None and self.recipe.steps < most < 2**53 else {}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer, if there is a checkpoint."""
        return checkpoint.peek(self.checkpoint)[1] if self.checkpoint else None


@contextlib.contextmanager
def find(run: str | None, given: Mapping[str, Any], session: Session) -> Iterator[tuple[str, str | None]]:
    """Finds the run to resume and the name of its checkpoint, holds its lock, and repairs its folder."""
    path = find_run(run)
    with lock_run(path):
        begun = read_begun(path)
        if begun.ends_with(given):
            yield str(path), None
            return
        with disk_errors(path):
            files.recover(path)
            folder.write_index(path)
        logs.check(str(given.get("log", begun.config.log)))
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


def _refuse_others(given: Mapping[str, Any], texts: Sequence[str]) -> None:
    """Raises `UserError` for anything that cannot be given with ``--resume``: all but `MAY_CHANGE`."""
    may = "it may be joined by " + ", ".join(f"--{name.replace('_', '-')}" for name in MAY_CHANGE)
    if texts:
        raise UserError(f"a text ({texts[0]}) cannot be given with --resume: the run has its own", may)
    for name in given:
        if name not in MAY_CHANGE:
            raise UserError(
                f"--{name.replace('_', '-')} cannot be given with --resume: the run continues exactly as it was begun",
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
        raise UserError(f"{where} is damaged: it does not say what the run was asked for", "train again")
    config = from_dict(TrainConfig, record.settings, where)
    begun = Begun(run, record, record.texts, replace(config, preset=record.size or config.preset))
    if record.ended and record.result is not None:
        begun.result = Result.of(run, record.result)
    if at is not None:
        begun.checkpoint = run / at
        begun.saved = read_saved(begun.checkpoint)
    return begun


def find_checkpoint(run: Path, note: Callable[[str], None]) -> str | None:
    """The name of the newest whole checkpoint that can be resumed from; None if there are none yet. Raises `UserError`
    if there are some, and none is whole."""
    entries = folder.checkpoints(run)
    if not entries:
        return None
    if not any(folder.can_resume(run / entry.name) for entry in entries):
        raise UserError(
            f"the checkpoints of {run} hold weights alone: there is nothing to resume from",
            f"fine-tune from them: gpt train TEXT --init {run}",
        )
    path = folder.newest_whole(run, note, training=True)
    if checkpoint.peek(path)[0] != read_saved(path).recipe.saved_model:
        raise UserError(f"{path} is damaged: its training state is of a model of another shape", folder.HINT)
    return path.name


# Both


def open_run(begun: Begun, given: Mapping[str, Any], session: Session, prepared: Prepared | None = None) -> Trainer:
    """Opens a run for its next step, on all ranks: its data, device, recipe, as changed by ``given``, and model.
    ``prepared`` is what rank 0 has open of a new one."""
    world, note = session.world, session.note
    compute = world.place(world.raise_on_all(lambda: same_compute(begun, given, world.size, note)))
    world.raise_on_all(lambda: world.divide(int(given.get("tensor", (begun.recipe or begun.config).tensor))))
    init = world.raise_on_all(lambda: prepared.init if prepared else same_init(begun, world))
    data = prepared.data if prepared else None
    if world.is_main and data is None:  # first, since it may have to tokenize the text
        data = open_data(begun, compute, init, session)
    world.broadcast_object(lambda: True)
    data = world.raise_on_all(lambda: data or open_data(begun, compute, init, session))
    world.assert_same({"text": data.sources})
    environment.tell(environment.RUN, begun.run)
    given = {**begun.lengthened, **given}
    recipe, budget = amend(begun, given, data, compute, init, session)
    began = session.began - (begun.saved.state.seconds if begun.saved else 0.0)
    if begun.saved is not None and begun.saved.pace is not None and "steps" not in given:
        budget = replace(begun.saved.pace, deadline=begun.saved.pace.deadline + began)
    record = begun.record if begun.saved else data_record(begun.record, data, init)
    log = str(given.get("log", begun.config.log))
    context = RunContext(
        session, begun.run, record, data, compute, init, recipe, given, log, began, begun.checkpoint, begun.saved
    )
    seed_all(recipe.seed)
    return Trainer(context, parallelize(recipe, compute, world, init, begun.checkpoint), budget)


def same_compute(begun: Begun, given: Mapping[str, Any], processes: int, note: Callable[[str], None]) -> Compute:
    """The device, dtype and threads that the run had, or those that are ``given``; threads only if it had as many
    ``processes``. Notes every change that moves rounding."""
    machine, asked, threads = begun.machine, given.get("device"), given.get("threads", begun.config.threads)
    if machine is None:
        compute = device.pick(asked or begun.config.device, begun.config.dtype, training=True)
        device.use_threads(compute, threads)
        return compute
    where = asked if asked not in (None, "auto") else machine.device
    compute = device.pick(where, machine.dtype, training=True)
    before = torch.device(machine.device)
    moved = compute.device.type != before.type or compute.device.index not in (None, before.index)
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
        raise UserError(
            f"{begun.run} was begun from {asked}, whose weights are others now", "put them back as they were"
        )
    return found


def open_data(begun: Begun, compute: Compute, init: InitCheckpoint | None, session: Session) -> Dataset:
    """The data of a run that was begun: its own tokens, whose checksums rank 0 compares, or the texts outside of it,
    read again. Raises `UserError` if they have changed."""
    run, config, record, texts = begun.run, begun.config, begun.record, begun.texts
    tokenizer = init.tokenizer if init else begun.tokenizer
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
            f"the text of {run} is not what it was: {', '.join(texts) or tokens}",
            "put it back as it was, or fine-tune on the new text with --init",
        )
    return data


def amend(
    begun: Begun,
    given: Mapping[str, Any],
    data: Dataset,
    compute: Compute,
    init: InitCheckpoint | None,
    session: Session,
) -> tuple[Recipe, TimeBudget | None]:
    """Rank 0's recipe of a run, on all ranks: resolved if it is new, with the changes that are ``given``; and the
    budget of a new run for so many minutes. Raises `UserError` for a change that cannot be made."""
    world, config, budget = session.world, begun.config, None

    def resolved(config: TrainConfig, note: Callable[[str], None], most_tokens: float = math.inf) -> Recipe:
        shape = init.model if init else None
        held_out = data.held_out_tokens > 0
        return _broadcast(
            world,
            lambda: resolve(
                config, compute, data.bytes, data.tokens, data.tokenizer.vocab_size, held_out, note, shape, data.rows,
                world.data_size, most_tokens,
            ),
        )  # fmt: skip

    def measured(recipe: Recipe, minutes: float, share: float) -> tuple[TimeBudget, int]:
        """The budget of a run, measured for a ``share`` of its minutes, and the steps that fit into it."""
        seed_all(recipe.seed)
        parallel = parallelize(recipe, compute, world, init)
        found = measure_budget(parallel, recipe, data, minutes, session, share)
        return found, world.broadcast_object(lambda: found.steps(time.perf_counter()))

    recipe = begun.recipe
    if recipe is None:
        recipe = resolved(config, session.note)
        world.raise_on_all(partial(check_model, recipe, compute, world.data_size))
        if config.minutes is not None:
            session.note("measuring how fast this machine trains it")
            # Whether it compiles is decided by the minutes, not by the steps that fit into them.
            known, fits = replace(config, minutes=None, compile="on" if recipe.compile else "off"), math.inf
            if init is not None and config.batch_tokens is None:  # a step of the usual batch may take minutes
                single = replace(resolved(config, _silent, 1), compile=False)
                fits = measured(single, config.minutes, 0.0)[1] * single.batch_tokens
                recipe = resolved(config, _silent, fits)
            if recipe.compile:  # it is for one dropout and micro-batch: those of as many uncompiled steps as fit
                _, steps = measured(replace(recipe, compile=False), config.minutes, 0.0)
                recipe = resolved(replace(known, steps=steps), _silent, fits)
                known = replace(known, dropout=recipe.model.dropout, micro_batch=str(recipe.micro_batch))
            budget, steps = measured(recipe, config.minutes, PROBE_SHARE)
            every = config.eval_every or math.ceil(steps / budget.pauses)
            samples = config.sample_every if config.sample_every is not None or budget.samples else 0
            recipe = resolved(replace(known, steps=steps, eval_every=every, sample_every=samples), _silent, fits)
            session.note(budget.describe(recipe.batch_tokens))
    step = begun.saved.state.step if begun.saved else 0
    return _broadcast(world, partial(changed, recipe, given, step, session.note, world.data_size)), budget


def _silent(note: str) -> None:
    """Drops the notes about a recipe that was resolved before."""


def _broadcast(world: World, make: Callable[[], Recipe]) -> Recipe:
    """Rank 0's recipe."""
    return checked(Recipe, world.broadcast_object(lambda: asdict(make())), "the recipe of process 0")


def changed(
    recipe: Recipe, given: Mapping[str, Any], step: int, note: Callable[[str], None], processes: int = 1
) -> Recipe:
    """The recipe with the changes that are ``given``, for ``processes`` data ranks. Raises `UserError` for fewer steps,
    and for a batch that does not divide."""
    check_share(recipe.rows, processes)
    if recipe.ramp and recipe.ramp.by % processes:
        raise UserError(
            f"the batches grow in multiples of {recipe.ramp.by:,}, which {processes} processes cannot share evenly",
            f"resume with --nproc {recipe.ramp.by}",
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
    if recipe.lora_rank and recipe.is_sharded:
        raise UserError("adapters are trained by processes that have all weights each", "leave out --shard, --tensor")
    if micro_batch not in (None, "auto"):
        recipe = replace(recipe, micro_batch=asked_micro_batch(micro_batch, share))
        note(f"micro-batch {recipe.micro_batch}: the same sums in another order, so equal to rounding")
    if steps is not None and steps < recipe.steps:
        raise UserError(f"the run has {recipe.steps:,} steps; --steps {steps:,} is fewer", "give as many or more")
    if steps is not None and steps > recipe.steps:
        longer = replace(recipe, steps=steps)
        before, after = (each.lr_at(step + 1) for each in (recipe, longer))
        note(
            f"{steps:,} steps instead of {recipe.steps:,}: from step {step:,} on, the {recipe.schedule} schedule is "
            f"that of {steps:,} steps, with {recipe.decay:,} of decay at its end; the next rate is {after:.2g}"
            + (f" instead of {before:.2g}" if step < recipe.steps and before != after else "")
        )
        recipe = longer
    return recipe
