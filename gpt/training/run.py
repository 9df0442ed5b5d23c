"""A training run, from texts to a saved checkpoint.

Rank 0 creates a new run's folder (`prepare`) or finds the run to resume (`find_and_lock`). Then all ranks read the
folder (`open_run`) and train (`Trainer`), so a new run resumes at step 0.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt import device, events
from gpt.config import TrainConfig
from gpt.device import Compute
from gpt.distribution import VERSION
from gpt.interrupt import StopSignal
from gpt.parallel import environment
from gpt.parallel.world import join_world
from gpt.settings import from_dict
from gpt.training import logs
from gpt.training.budget import Planner
from gpt.training.context import Listener, Result, RunContext, Session, data_record
from gpt.training.loop import Trainer
from gpt.training.preparing import Prepared, prepare
from gpt.training.recipe import broadcast
from gpt.training.resuming import (
    StartedRun,
    apply_changes,
    find_and_lock,
    finished_result,
    open_data,
    read_started,
    refuse_fixed_options,
    restore_compute,
    restore_init,
    restore_teachers,
)
from gpt.training.teachers import Teachers, check_tokenizers

TEACHER_EVALUATIONS = 5  # of a run's own teacher


def train(
    texts: Sequence[str], config: TrainConfig, listen: Listener = lambda event: None, start_time: float | None = None
) -> Result:
    """Trains a decoder on ``texts``: files, folders, ``-`` or names of corpora (by default ``pydocs``).

    Sends events to ``listen``. ``start_time`` is when the command started, in `time.perf_counter` seconds. Raises
    `UserError` for unusable input, `WorkError` if training fails, and `Interrupted` after a signal. Once training has
    started, a signal first saves a checkpoint.
    """
    with _session(config.nproc, listen, start_time) as session:
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
            started = world.raise_on_all(lambda: read_started(Path(run)))
            trainer = open_run(started, {}, session, prepared)
            until_first_step.close()
            return trainer.train()


def resume(
    run: str | None = None,
    changes: Mapping[str, Any] | None = None,
    texts: Sequence[str] = (),
    listen: Listener = lambda event: None,
    start_time: float | None = None,
) -> Result:
    """Resumes ``run``, or the newest unfinished run in ``runs/``, from the exact state of its newest intact checkpoint.

    Without a checkpoint, the run starts at step 0. ``changes`` are settings in
    `gpt.training.resuming.CHANGEABLE_OPTIONS`. Raises like `train`, and also `UserError` if the run is missing or other
    settings are given.
    """
    changes = changes or {}
    refuse_fixed_options(changes, texts)
    settings = from_dict(TrainConfig, changes, "resume")
    if not environment.is_distributed() and (result := finished_result(run, changes)):
        listen(events.Note(f"{result.run} is finished"))
        return result  # A finished run needs no other processes.
    with _session(settings.nproc, listen, start_time) as session, contextlib.ExitStack() as until_ended:
        world = session.world
        world.assert_same({"resume": run, **changes, **_code_versions()})
        path, checkpoint = world.broadcast_object(
            lambda: until_ended.enter_context(find_and_lock(run, changes, session))
        )
        started = world.raise_on_all(lambda: read_started(Path(path), checkpoint))
        if result := started.final_result(changes):
            session.note(f"{started.run} is finished")
            return result
        return open_run(started, changes, session).train()


@contextlib.contextmanager
def _session(nproc: int, listen: Listener, start_time: float | None) -> Iterator[Session]:
    """Handles signals and joins the other processes."""
    start_time = time.perf_counter() if start_time is None else start_time
    with StopSignal(at_once=True, is_ctrl_c=environment.is_ctrl_c) as stop, join_world(nproc) as world:
        yield Session(world, stop, listen, start_time)


def _code_versions() -> dict[str, str]:
    """The versions that must be equal on all ranks."""
    return {"the version of gpt": VERSION, "the version of torch": version("torch")}


def open_inputs(
    started: StartedRun, changes: Mapping[str, Any], session: Session, prepared: Prepared | None
) -> tuple[Compute, Prepared]:
    """Opens a run's device, data, base model and teachers on all ranks. ``prepared`` is what a rank already has."""
    world, note = session.world, session.note
    compute = world.place(world.raise_on_all(lambda: restore_compute(started, changes, world.size, note)))
    world.raise_on_all(lambda: world.divide(int(changes.get("tensor", (started.recipe or started.config).tensor))))
    init = world.raise_on_all(lambda: prepared.init if prepared else restore_init(started, world))
    found = world.raise_on_all(lambda: prepared.teachers if prepared else restore_teachers(started, world))
    data = prepared.data if prepared else None
    if world.is_main and data is None:  # Rank 0 goes first because it might have to tokenize the text.
        data = open_data(started, compute, init, found, session)
    world.broadcast_object(lambda: True)
    data = world.raise_on_all(lambda: data or open_data(started, compute, init, found, session))
    world.raise_on_all(lambda: check_tokenizers(found, data.tokenizer))
    world.assert_same({"text": data.sources})
    return compute, Prepared(started.run, data, init, found)


def open_run(
    started: StartedRun,
    changes: Mapping[str, Any],
    session: Session,
    prepared: Prepared | None = None,
) -> Trainer:
    """Opens a run's data, device, recipe and model on all ranks. ``prepared`` is what a rank already has."""
    world, note = session.world, session.note
    compute, inputs = open_inputs(started, changes, session, prepared)
    data, init = inputs.data, inputs.init
    environment.write_message(environment.RUN, started.run)
    changes = {**started.requested_steps, **changes}
    planner = Planner(started.config, compute, data, init, session, Teachers(inputs.teachers, compute))
    recipe, budget = started.recipe, None
    if recipe is None:
        planner.choose_teachers()
        recipe, budget = planner.plan()
    elif started.saved is not None:
        budget = started.saved.budget
    step = started.saved.state.step if started.saved else 0
    recipe = broadcast(world, partial(apply_changes, recipe, changes, step, note, world.data_size))
    start = session.start_time - (started.saved.state.seconds if started.saved else 0.0)
    record = started.record if started.saved else data_record(started.record, data, init, inputs.teachers)
    log = str(changes.get("log", started.config.log))
    context = RunContext(
        session,
        started.run,
        record,
        data,
        compute,
        init,
        inputs.teachers,
        recipe,
        changes,
        log,
        start,
        started.checkpoint,
        started.saved,
    )
    return Trainer(context, budget)
