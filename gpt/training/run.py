"""A training run, from texts to a saved checkpoint.

Rank 0 creates a new run's folder (`prepare`) or finds the run to resume (`find_and_lock`), and writes the recipe of a
new run to ``run.json`` (`plan_on_all`). Then all ranks read the folder (`open_run`) and train (`Trainer`), so a new run
resumes at step 0.
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
from gpt.parallel.world import World, join_world
from gpt.runs import folder
from gpt.settings import from_dict
from gpt.training import logs
from gpt.training.context import Inputs, Listener, Result, RunContext, Session, data_record
from gpt.training.data import Dataset
from gpt.training.loop import Trainer
from gpt.training.measuring import Meter
from gpt.training.preparing import prepare
from gpt.training.recipe import Facts, Recipe, check_model, notes, plan
from gpt.training.resuming import (
    StartedRun,
    apply_changes,
    find_and_lock,
    finished_result,
    open_data,
    prepare_teacher,
    read_recipe,
    read_started,
    refuse_fixed_options,
    restore_compute,
    restore_init,
    restore_teachers,
)
from gpt.training.state import seed_all
from gpt.training.strategy import make_strategy
from gpt.training.teachers import (
    TEACHERS,
    Teachers,
    check_tokenizers,
    count_teacher_steps,
    count_teachers,
    own_teachers,
    whole_run,
)
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
        compute = world.raise_on_all(partial(check_machine, config, world))
        with contextlib.ExitStack() as until_ended, contextlib.ExitStack() as until_first_step:
            path, inputs = None, None
            if world.is_main:
                path, inputs = prepare(texts, config, compute, session, until_ended, until_first_step)
            run = world.broadcast_object(lambda: str(path))
            started = world.raise_on_all(lambda: read_started(Path(run)))
            trainer = open_phases(started, {}, session, inputs, until_first_step.close)
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


def check_machine(config: TrainConfig, world: World) -> Compute:
    """Chooses the device before rank 0 tokenizes. Raises `UserError` if this rank cannot train on it, or cannot log."""
    logs.check(config.log)
    compute = device.pick(config.device, config.dtype, training=True)
    world.place(compute)
    return compute


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
    prepared: Inputs | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> Trainer:
    """Decides how many teachers a new run trains, trains those that are unfinished, then opens the run. ``prepared`` is
    what rank 0 already has. ``on_start`` is called before the first step."""
    world = session.world
    inputs = open_inputs(started, changes, session, prepared)
    if started.config.teachers == 0 or started.saved is not None:
        return open_run(started, changes, session, inputs)
    teachers = Teachers(inputs.teachers, inputs.compute)
    facts = find_facts(inputs, teachers, world)
    meter = Meter(started.config.minutes or 0.0, inputs, teachers, session)
    if started.config.teachers is None:
        started, facts = choose_teachers(started, facts, meter)
    config = started.config
    if not config.teachers:
        return open_run(started, changes, session, inputs, costs=facts.costs)
    own_inputs = replace(inputs, teachers=[], data=replace(inputs.data, measure_yardsticks=lambda: None))
    settings, facts = plan_teachers(started, facts, meter)
    changes_of_teachers = {name: value for name, value in changes.items() if name not in ("steps", "log")}
    start = session.start_time  # of the run: earlier by the time that earlier commands spent on teachers
    for number in range(1, config.teachers + 1):
        path, checkpoint = world.broadcast_object(partial(prepare_teacher, started, number, settings, session.note))
        teacher = world.raise_on_all(partial(read_started, Path(path), checkpoint))
        if teacher.result is None:
            now, budget = time.perf_counter(), None
            if config.minutes is not None and facts.costs is not None:  # An equal share of the rest of the first half
                minutes = (config.minutes / 2 - (now - start) / 60) / (config.teachers - number + 1)
                minutes = max(minutes, MIN_TRAINING * config.minutes / config.teachers)
                budget = TimeBudget.fitting(minutes, 0.0, facts.costs, TEACHER_EVALUATIONS)
            phase = session.phase(f"teacher {number} of {config.teachers}", now)
            compute = world.place(restore_compute(teacher, changes, world.size, session.note))
            trainer = open_run(teacher, changes_of_teachers, phase, replace(own_inputs, compute=compute), budget)
            on_start()
            result = trainer.train()
            start += time.perf_counter() - now - result.seconds
        else:
            start -= teacher.result.seconds
        if world.is_main:
            folder.keep_only_best(teacher.run)
    return open_run(started, changes, session.phase("pupil", start), inputs, costs=facts.costs)


def choose_teachers(started: StartedRun, facts: Facts, meter: Meter) -> tuple[StartedRun, Facts]:
    """Decides how many teachers the run trains first, and records it in ``run.json``."""
    config, session = replace(started.config, teachers=0), meter.session
    if config.minutes is not None and not config.teacher:
        facts = meter.measure(plan_on_all(started, config, facts, session.world), facts)
    count = session.world.broadcast_object(lambda: count_teachers(config, facts))
    if count:
        session.note(
            f"{count} teachers train first, in half of the {'steps' if config.minutes is None else 'time'}: a "
            "single run would read the text too often to learn more from it (--teachers 0 turns this off)"
        )
    record = replace(started.record, own_teachers=count)
    if session.world.is_main:
        with disk_errors(started.run):
            record.write(started.run)
    return replace(started, record=record, config=replace(config, teachers=count)), facts


def plan_teachers(started: StartedRun, facts: Facts, meter: Meter) -> tuple[dict[str, Any], Facts]:
    """Returns the settings of the run's own teachers that differ from its own. All of them have the same steps, and
    share half of the run's steps or minutes."""
    config, first, world = started.config, started.run / TEACHERS / "1", meter.session.world
    recipe = plan(config, facts.unmeasured)
    if config.minutes is not None:
        recipe = plan_on_all(started, config, facts.unmeasured, world)
        while (facts.compiled_costs if recipe.compile else facts.costs) is None:
            facts = meter.measure(recipe, facts)
    steps = world.broadcast_object(
        lambda: (folder.is_run(first) and read_started(first).config.steps) or count_teacher_steps(config, facts)
    )
    in_the_run = ("epochs", "minutes", "warmup", "warmup_tokens", "decay", "batch_ramp", "save_every")
    settings = {
        **dict.fromkeys(in_the_run),
        "steps": steps,
        "eval_every": config.eval_every or math.ceil(steps / TEACHER_EVALUATIONS),
        "compile": "on" if recipe.compile else "off",
    }
    return settings, facts


def open_inputs(started: StartedRun, changes: Mapping[str, Any], session: Session, prepared: Inputs | None) -> Inputs:
    """Opens a run's device, data, base model and teachers on all ranks. Rank 0 goes first because it might have to
    tokenize the text."""
    world = session.world

    def open_here() -> Inputs:
        compute = world.place(restore_compute(started, changes, world.size, session.note))
        if prepared is not None:
            inputs = replace(prepared, compute=compute)
        else:
            init, found = restore_init(started, world), restore_teachers(started, world)
            inputs = Inputs(compute, open_data(started, compute, init, found, session), init, found)
        check_tokenizers(inputs.teachers, inputs.data.tokenizer)
        return inputs

    opened = open_here() if world.is_main else None
    world.broadcast_object(lambda: True)
    inputs = world.raise_on_all(lambda: opened or open_here())
    world.connect(inputs.compute)
    world.assert_same({"text": inputs.data.sources})
    return inputs


def find_facts(inputs: Inputs, teachers: Teachers, world: World, costs: Costs | None = None) -> Facts:
    """Returns what a rank knows about the run, with ``costs`` that were measured before."""
    data, init = inputs.data, inputs.init
    return Facts.on(
        inputs.compute, bytes=data.bytes, tokens=data.tokens, vocab_size=data.tokenizer.vocab_size,
        held_out=data.held_out_tokens > 0, processes=world.size, local_processes=world.local_size, rows=data.rows,
        base=init.model if init else None, teachers=tuple(teachers.shapes), costs=costs,
    )  # fmt: skip


def plan_on_all(started: StartedRun, config: TrainConfig, facts: Facts, world: World) -> Recipe:
    """Plans the run on rank 0, which writes the recipe to ``run.json``, where all ranks read it. Raises `UserError`
    without enough memory or time."""

    def write() -> None:
        recipe = plan(config, facts)
        check_model(recipe, facts)
        with disk_errors(started.run):
            replace(started.record, resolved=asdict(recipe)).write(started.run)

    world.broadcast_object(write)
    return read_recipe(started.run)


def open_run(
    started: StartedRun,
    changes: Mapping[str, Any],
    session: Session,
    inputs: Inputs,
    budget: TimeBudget | None = None,
    costs: Costs | None = None,
) -> Trainer:
    """Plans a new run, and opens the model of any run. ``budget`` is the time of a run's own teacher, and ``costs`` is
    what was measured before."""
    world, config, data = session.world, started.config, inputs.data
    own = world.raise_on_all(lambda: own_teachers(started.run, config)) if config.teachers else []
    teachers = Teachers([*own, *inputs.teachers], inputs.compute)
    environment.write_message(environment.RUN, whole_run(started.run))
    if started.saved is None:
        started = replace(started, record=data_record(started.record, data, inputs.init, inputs.teachers))
    costs = costs and replace(costs, elapsed=time.perf_counter() - session.start_time)
    facts = find_facts(inputs, teachers, world, costs)
    recipe = started.recipe or plan_on_all(started, config, facts, world)
    if teachers.found:
        read_text(teachers, data, recipe, started.run, session)
    if started.recipe is None:
        meter = Meter(config.minutes or 0.0, inputs, teachers, session)
        while config.minutes is not None and recipe.budget is None:
            facts = meter.measure(recipe, facts)
            recipe = plan_on_all(started, config, facts, world)
        for line in notes(config, facts, recipe):
            session.note(line)
    if started.saved is None and budget is not None:
        recipe = replace(recipe, by_clock="steps eval_every save_every", budget=budget)
    changes = {**started.requested_steps, **changes}
    step, seconds = (started.saved.state.step, started.saved.state.seconds) if started.saved else (0, 0.0)

    def change() -> Recipe:
        changed = apply_changes(recipe, changes, step, session.note, world.size)
        check_model(changed, facts)
        return changed

    recipe = world.raise_on_all(change)
    log = str(changes.get("log", config.log))
    context = RunContext(
        session, started.run, started.record, data, inputs.compute, inputs.init, teachers, recipe, changes, log,
        session.start_time - seconds, started.checkpoint, started.saved,
    )  # fmt: skip
    seed_all(recipe.seed)
    return Trainer(context, make_strategy(recipe, inputs.compute, world, inputs.init, started.checkpoint))


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
