"""A training run, from texts to a saved checkpoint.

Rank 0 creates a new run's folder (`prepare`) or finds the run to resume (`find_and_lock`), and writes the recipe of a
new run to ``run.json`` (`plan_on_all`). Then all ranks read the folder (`open_run`) and train (`Trainer`), so a new run
resumes at step 0.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt.config import device, events
from gpt.config.device import Compute
from gpt.config.settings import from_dict
from gpt.config.train import TrainConfig
from gpt.parallel import environment
from gpt.parallel.world import World, join_world
from gpt.system.distribution import VERSION
from gpt.system.files import disk_errors
from gpt.system.interrupt import StopSignal
from gpt.training import logs, resuming
from gpt.training.context import Inputs, Listener, Result, RunContext, Session, data_record
from gpt.training.loop import Trainer
from gpt.training.measuring import Meter
from gpt.training.preparing import prepare
from gpt.training.recipe import Facts, Recipe, check_model, notes, plan
from gpt.training.resuming import StartedRun, read_recipe, read_started
from gpt.training.state import TrainState


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
            trainer = open_run(started, {}, session, inputs)
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
    resuming.refuse_fixed_options(changes, texts)
    settings = from_dict(TrainConfig, changes, "resume")
    changes = {name: getattr(settings, name) for name in changes}
    if not environment.is_distributed() and (result := read_started(resuming.find_run(run)).final_result(changes)):
        listen(events.Note(f"{result.run} is finished"))
        return result  # A finished run needs no other processes.
    with _session(settings.nproc, listen, start_time) as session, contextlib.ExitStack() as until_ended:
        world = session.world
        world.assert_same({"resume": run, **changes, **_code_versions()})
        found = resuming.find_and_lock(run, changes, session)
        path, checkpoint = world.broadcast_object(lambda: until_ended.enter_context(found))
        started = world.raise_on_all(lambda: read_started(Path(path), checkpoint))
        if result := started.final_result(changes):
            session.note(f"{started.run} is finished")
            return result
        return open_run(started, changes, session).train()


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


def open_inputs(started: StartedRun, changes: Mapping[str, Any], session: Session, prepared: Inputs | None) -> Inputs:
    """Opens a run's device, data and base model on all ranks. Rank 0 goes first because it might have to tokenize the
    text."""
    world = session.world

    def open_here() -> Inputs:
        compute = world.place(resuming.restore_compute(started, changes, world.size, session.note))
        if prepared is not None:
            return replace(prepared, compute=compute)
        init = resuming.restore_init(started, world)
        return Inputs(compute, resuming.open_data(started, compute, init, session), init)

    opened = open_here() if world.is_main else None
    world.broadcast_object(lambda: True)
    inputs = world.raise_on_all(lambda: opened or open_here())
    world.connect(inputs.compute)
    world.assert_same({"text": inputs.data.sources})
    return inputs


def find_facts(inputs: Inputs, world: World) -> Facts:
    """Returns what a rank knows about the run."""
    data, init = inputs.data, inputs.init
    return Facts.on(
        inputs.compute, bytes=data.bytes, tokens=data.tokens, vocab_size=data.tokenizer.vocab_size,
        held_out=data.held_out_tokens > 0, processes=world.size, local_processes=world.local_size, rows=data.rows,
        documents=data.documents, separator=data.tokenizer.eot,
        sides=2 if data.preferences else 1, base=init.model if init else None,
        base_bytes=init.quantized_bytes if init else 0,
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
    started: StartedRun, changes: Mapping[str, Any], session: Session, prepared: Inputs | None = None
) -> Trainer:
    """Plans a new run, and opens the model of any run. ``prepared`` is what rank 0 already has."""
    world, config = session.world, started.config
    inputs = open_inputs(started, changes, session, prepared)
    environment.write_message(environment.RUN, started.run)
    session.listen(events.Opened(str(started.run)))
    if started.saved is None:
        started = replace(started, record=data_record(started.record, inputs.data, inputs.init))
    facts = find_facts(inputs, world)
    recipe = started.recipe or plan_on_all(started, config, facts, world)
    if started.recipe is None:
        meter = Meter(config.minutes or 0.0, inputs, session)
        while config.minutes is not None and recipe.budget is None:
            facts = meter.measure(recipe, facts)
            recipe = plan_on_all(started, config, facts, world)
        for line in notes(config, facts, recipe):
            session.note(line)
    changes = {**started.requested_steps, **changes}
    state = started.saved.state if started.saved else TrainState()

    def change() -> Recipe:
        changed = resuming.apply_changes(recipe, changes, state, session.note, world.size)
        check_model(changed, facts)
        return changed

    recipe = world.raise_on_all(change)
    log = str(changes.get("log", config.log))
    context = RunContext(
        session, started.run, started.record, inputs.data, inputs.compute, inputs.init, recipe, changes, log,
        session.start_time - state.seconds, started.checkpoint, started.saved,
    )  # fmt: skip
    return Trainer(context)
