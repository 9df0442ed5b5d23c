"""A training run, from texts to a saved checkpoint. A new run is prepared, and then resumed at step 0.

`prepare` makes the folder of a new run, on rank 0; `find` finds the run to resume. What follows is the same for both,
on all ranks: `open_run` reads the folder, and `Trainer` trains.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt import device, events
from gpt.config import TrainConfig
from gpt.distribution import VERSION
from gpt.interrupt import StopSignal
from gpt.parallel import environment
from gpt.parallel.world import joined
from gpt.settings import from_dict
from gpt.training import logs
from gpt.training.budget import Planner
from gpt.training.context import Listener, Result, RunContext, Session, data_record
from gpt.training.loop import Trainer
from gpt.training.parallel import parallelize
from gpt.training.preparing import Prepared, prepare
from gpt.training.recipe import broadcast
from gpt.training.resuming import (
    Begun,
    changed,
    find,
    finished,
    open_data,
    read_begun,
    refuse_others,
    same_compute,
    same_init,
)
from gpt.training.state import seed_all


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
    one, at step 0. ``given`` are settings that may change (`gpt.training.resuming.MAY_CHANGE`).

    Raises as `train` does, and `UserError` if there is no such run, or for a setting that may not change.
    """
    given = given or {}
    refuse_others(given, texts)
    asked = from_dict(TrainConfig, given, "resume")
    if not environment.is_one_of_many() and (result := finished(run, given)):
        listen(events.Note(f"{result.run} is finished"))
        return result  # which takes one process, however many the run had
    with _session(asked.nproc, listen, began) as session, contextlib.ExitStack() as until_ended:
        world = session.world
        world.assert_same({"resume": run, **given, **_code_versions()})
        path, at = world.broadcast_object(lambda: until_ended.enter_context(find(run, given, session)))
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
    return {"the version of gpt": VERSION, "the version of torch": version("torch")}


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
    recipe, budget = begun.recipe, None
    if recipe is None:
        recipe, budget = Planner(begun.config, compute, data, init, session).plan()
    step = begun.saved.state.step if begun.saved else 0
    recipe = broadcast(world, partial(changed, recipe, given, step, note, world.data_size))
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
