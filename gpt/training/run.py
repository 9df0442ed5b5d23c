"""A training run, from texts to a saved checkpoint.

Rank 0 creates a new run's folder (`prepare`) or finds the run to resume (`find_and_lock`). Then all ranks read the
folder (`open_run`) and train (`Trainer`), so a new run resumes at step 0.
"""

import contextlib
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt import device, events
from gpt.config import TrainConfig
from gpt.device import Compute
from gpt.distribution import VERSION
from gpt.errors import Interrupted
from gpt.files import disk_errors
from gpt.interrupt import StopSignal
from gpt.parallel import environment
from gpt.parallel.world import join_world
from gpt.runs import folder
from gpt.settings import from_dict
from gpt.training import logs
from gpt.training.budget import Planner
from gpt.training.context import Listener, Result, RunContext, Session, data_record
from gpt.training.data import Dataset
from gpt.training.loop import Trainer
from gpt.training.preparing import Prepared, prepare
from gpt.training.recipe import Recipe, broadcast
from gpt.training.resuming import (
    StartedRun,
    apply_changes,
    find_and_lock,
    finished_result,
    open_data,
    prepare_teacher,
    read_started,
    refuse_fixed_options,
    restore_compute,
    restore_init,
    restore_teachers,
)
from gpt.training.state import seed_all
from gpt.training.strategy import make_strategy
from gpt.training.teachers import TEACHERS, Teachers, check_tokenizers, own_teachers, whole_run
from gpt.training.time_budget import MIN_TRAINING, Costs, TimeBudget

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
        with contextlib.ExitStack() as until_ended, contextlib.ExitStack() as until_first_step:
            prepared = None
            if world.is_main:
                prepared = prepare(texts, config, compute, session, until_ended, until_first_step)
            run = world.broadcast_object(lambda: str(prepared.run if prepared else ""))
            started = world.raise_on_all(lambda: read_started(Path(run)))
            trainer = open_phases(started, {}, session, prepared, until_first_step.close)
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
        return open_phases(started, changes, session).train()


@contextlib.contextmanager
def _session(nproc: int, listen: Listener, start_time: float | None) -> Iterator[Session]:
    """Handles signals and joins the other processes."""
    start_time = time.perf_counter() if start_time is None else start_time
    with StopSignal(at_once=True, is_ctrl_c=environment.is_ctrl_c) as stop, join_world(nproc) as world:
        yield Session(world, stop, listen, start_time)


def _code_versions() -> dict[str, str]:
    """The versions that must be equal on all ranks."""
    return {"the version of gpt": VERSION, "the version of torch": version("torch")}


def open_phases(
    started: StartedRun,
    changes: Mapping[str, Any],
    session: Session,
    prepared: Prepared | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> Trainer:
    """Decides how many teachers a new run trains, trains those that are unfinished, then opens the run. ``on_start`` is
    called before the first step."""
    world = session.world
    if started.config.teachers == 0 or started.saved is not None:
        return open_run(started, changes, session, prepared)
    compute, inputs = open_inputs(started, changes, session, prepared)
    given_teachers = Teachers(inputs.teachers, compute)
    planner = Planner(started.config, compute, inputs.data, inputs.init, session, given_teachers)
    if started.config.teachers is None:
        started = choose_teachers(started, planner)
    config = planner.config = started.config
    if not config.teachers:
        return open_run(started, changes, session, inputs, costs=planner.costs)
    own_inputs = replace(inputs, teachers=[], data=replace(inputs.data, measure_yardsticks=lambda: None))
    plan = plan_teachers(started, planner)
    changes_of_teachers = {name: value for name, value in changes.items() if name not in ("steps", "log")}
    start = session.start_time  # of the run: earlier by the time that earlier commands spent on teachers
    for number in range(1, config.teachers + 1):
        path, checkpoint = world.broadcast_object(partial(prepare_teacher, started, number, plan, session.note))
        teacher = world.raise_on_all(partial(read_started, Path(path), checkpoint))
        if teacher.result is None:
            now, budget = time.perf_counter(), None
            if config.minutes is not None and planner.costs is not None:  # An equal share of the rest of the first half
                minutes = (config.minutes / 2 - (now - start) / 60) / (config.teachers - number + 1)
                minutes = max(minutes, MIN_TRAINING * config.minutes / config.teachers)
                budget = TimeBudget.fitting(minutes, 0.0, planner.costs, TEACHER_EVALUATIONS)
            phase = session.phase(f"teacher {number} of {config.teachers}", now)
            trainer = open_run(teacher, changes_of_teachers, phase, own_inputs, budget)
            on_start()
            result = trainer.train()
            start += time.perf_counter() - now - result.seconds
        else:
            start -= teacher.result.seconds
        if world.is_main:
            folder.keep_only_best(teacher.run)
    return open_run(started, changes, session.phase("pupil", start), inputs, costs=planner.costs)


def choose_teachers(started: StartedRun, planner: Planner) -> StartedRun:
    """Decides how many teachers the run trains first, and records it in ``run.json``."""
    count, session = planner.count_teachers(), planner.session
    if count:
        session.note(
            f"{count} teachers train first, in half of the {'steps' if started.config.minutes is None else 'time'}: a "
            "single run would read the text too often to learn more from it (--teachers 0 turns this off)"
        )
    record = replace(started.record, own_teachers=count)
    if session.world.is_main:
        with disk_errors(started.run):
            record.write(started.run)
    return replace(started, record=record, config=replace(started.config, teachers=count))


def plan_teachers(started: StartedRun, planner: Planner) -> dict[str, Any]:
    """Returns the settings of the run's own teachers that differ from its own. All of them have the same steps, and
    share half of the run's steps or minutes."""
    config, first, world = started.config, started.run / TEACHERS / "1", planner.session.world
    recipe = planner.resolve(config)
    steps = planner.count_teacher_steps(recipe)
    steps = world.broadcast_object(lambda: read_started(first).config.steps if folder.is_run(first) else steps) or steps
    in_the_run = ("epochs", "minutes", "warmup", "warmup_tokens", "decay", "batch_ramp", "save_every")
    return {
        **dict.fromkeys(in_the_run),
        "steps": steps,
        "eval_every": config.eval_every or math.ceil(steps / TEACHER_EVALUATIONS),
        "compile": "on" if recipe.compile else "off",
    }


def open_inputs(
    started: StartedRun, changes: Mapping[str, Any], session: Session, prepared: Prepared | None
) -> tuple[Compute, Prepared]:
    """Opens a run's device, data, base model and teachers on all ranks. ``prepared`` is what a rank already has."""
    world, note = session.world, session.note
    compute = world.place(world.raise_on_all(lambda: restore_compute(started, changes, world.size, note)))
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
    budget: TimeBudget | None = None,
    costs: Costs | None = None,
) -> Trainer:
    """Opens a run's data, device, recipe and model on all ranks. ``prepared`` is what a rank already has. ``budget`` is
    the time of a run's own teacher, and ``costs`` is what was measured before."""
    world, note = session.world, session.note
    compute, inputs = open_inputs(started, changes, session, prepared)
    data, init = inputs.data, inputs.init
    own = world.raise_on_all(lambda: own_teachers(started.run, started.config))
    teachers = Teachers([*own, *inputs.teachers], compute)
    environment.write_message(environment.RUN, whole_run(started.run))
    changes = {**started.requested_steps, **changes}
    planner, recipe = Planner(started.config, compute, data, init, session, teachers, costs), started.recipe
    if teachers.found:
        draft = recipe or planner.resolve(started.config)
        planner.check(draft)
        read_text(teachers, data, draft, started.run, session)
    if recipe is None:
        recipe, own_budget = planner.plan()
        if budget is not None:
            recipe = replace(recipe, by_clock="steps eval_every save_every")
        budget = budget or own_budget
    elif started.saved is not None:
        budget = started.saved.budget
    step = started.saved.state.step if started.saved else 0
    recipe = broadcast(world, partial(apply_changes, recipe, changes, step, note, world.size))
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
        teachers,
        recipe,
        changes,
        log,
        start,
        started.checkpoint,
        started.saved,
    )
    seed_all(recipe.seed)
    return Trainer(context, make_strategy(recipe, compute, world, init, started.checkpoint), budget)


def read_text(teachers: Teachers, data: Dataset, recipe: Recipe, run: Path, session: Session) -> None:
    """Lets the teachers read the text. A signal ends this at once."""
    stop, at_once = session.stop, session.stop.at_once
    stop.at_once = True
    try:
        if stop.signum is not None:
            raise Interrupted(stop.signum)
        teachers.read(
            data.batches(recipe),
            recipe,
            lambda done, total: session.listen(events.Progress("read by the teachers", done, total, "tokens")),
        )
    except Interrupted as error:
        hint = f"gpt train --resume {shlex.quote(str(whole_run(run)))}"
        raise Interrupted(error.signum, f"interrupted while the teachers read the text; resume with: {hint}") from None
    finally:
        stop.at_once = at_once
