"""A training run, from texts to a saved checkpoint, in one go or resumed."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt import device, events, files
from gpt.config import TrainConfig
from gpt.interrupt import StopSignal
from gpt.parallel import environment
from gpt.parallel.world import World, joined
from gpt.runs import folder
from gpt.runs.record import RunRecord
from gpt.settings import checked, from_dict
from gpt.training import logs, opening, resume
from gpt.training.loop import Trainer
from gpt.training.opening import Listener, Setting
from gpt.training.pace import Pace
from gpt.training.pairs import PairData, make_pairs
from gpt.training.prepare import Data
from gpt.training.recipe import Recipe, check_model, resolve
from gpt.training.result import Result
from gpt.training.start import find_start, shared_start


def train(
    texts: Sequence[str], config: TrainConfig, listen: Listener = lambda event: None, began: float | None = None
) -> Result:
    """Trains a decoder on ``texts`` (files, folders, ``-`` or corpora by name; none: ``pydocs``) and tells ``listen``
    how it goes. ``began`` is when the command did, on the clock of `time.perf_counter`.

    Raises `UserError` for input that cannot be used, `WorkError` where the work fails, and `Interrupted` after
    SIGINT or SIGTERM, once the state is saved.
    """
    began = time.perf_counter() if began is None else began
    with contextlib.ExitStack() as held:
        stop = held.enter_context(StopSignal(at_once=True))
        world = held.enter_context(joined(config.nproc))
        listen, note = _told(listen, world)
        world.agree({"text": list(map(str, texts)), **asdict(config), **_code()})
        world.together(lambda: logs.check(config.log))
        compute = world.place(world.together(lambda: device.pick(config.device, config.dtype, training=True)))
        device.use_threads(compute, config.threads)
        world.together(lambda: world.divide(config.tensor, config.shard == "full"))
        start = shared_start(world, lambda: find_start(config))
        tokenizer = start.tokenizer if start else None
        data: Data | PairData | None = None
        with contextlib.ExitStack() as until_begun:

            def made() -> tuple[str, dict[str, Any]]:
                nonlocal data
                opened = opening.new_run(texts, config, compute, listen, note, tokenizer, world.size)
                run, data, record = held.enter_context(opened)
                until_begun.enter_context(opening.taken_back(run))
                return str(run), record.members()

            run, said = world.decided(made)
            record = RunRecord.of(said, run)
            data = opening.shared(world, data, lambda: make_pairs(texts, config, compute.device.type, note, tokenizer))
            setting = Setting(Path(run), data, compute, start, world, listen, began)
            trainer = _begin(setting, replace(config, preset=record.size or config.preset), record)
        return trainer.train(stop)


def go_on(
    run: str | None = None,
    given: Mapping[str, Any] | None = None,
    texts: Sequence[str] = (),
    listen: Listener = lambda event: None,
    began: float | None = None,
) -> Result:
    """Goes on with ``run``, or the newest in ``runs/`` that is not finished, exactly where its newest whole checkpoint
    is; without one, from step 0. ``given``: settings that may change (`gpt.training.resume.MAY_CHANGE`).

    Raises as `train` does, and `UserError` where there is no such run, or for what may not change.
    """
    began = time.perf_counter() if began is None else began
    given = given or {}
    resume.refuse_others(given, texts)
    asked = from_dict(TrainConfig, given, "resume")
    if not environment.is_one_of_many() and (result := resume.finished(run, given)):
        listen(events.Note(f"{result.run} is finished"))
        return result  # which takes one process, however many the run had
    with contextlib.ExitStack() as held:
        stop = held.enter_context(StopSignal(at_once=True))
        world = held.enter_context(joined(asked.nproc))
        listen, note = _told(listen, world)
        world.agree({"resume": run, **given, **_code()})
        place, at = world.decided(lambda: _found(run, given, held, note))
        begun = world.together(lambda: resume.read_begun(Path(place), at))
        if result := begun.ends_with(given):
            note(f"{begun.run} is finished")
            return result
        setting = _found_again(begun, given, world, listen, began)
        return _begin(setting, begun.config, begun.record, begun, given).train(stop)


def _found(
    run: str | None, given: Mapping[str, Any], held: contextlib.ExitStack, note: Callable[[str], None]
) -> tuple[str, str | None]:
    """The run to go on with, which is this process's alone while ``held`` is, put in order, and its checkpoint."""
    path = resume.find_run(run)
    held.enter_context(opening.locked_run(path))
    begun = resume.read_begun(path)
    if begun.ends_with(given):
        return str(path), None
    with files.disk_errors(path):
        files.recover(path)
        folder.write_index(path)
    logs.check(str(given.get("log", begun.config.log)))
    return str(path), resume.find_checkpoint(path, note)


def _found_again(
    begun: resume.Begun, given: Mapping[str, Any], world: World, listen: Listener, began: float
) -> Setting:
    """What a run was made of, as it was, but for what may have changed."""
    _, note = _told(listen, world)
    compute = world.together(lambda: resume.same_compute(begun, given, world.size, note))
    compute = world.place(compute)
    world.together(lambda: world.divide(*resume.division(begun, given)))
    start = shared_start(world, lambda: resume.same_start(begun))
    tokenizer = start.tokenizer if start else begun.tokenizer
    kind, texts, config = compute.device.type, begun.texts, begun.config
    data: Data | PairData | None = None
    if world.first:
        data = opening.same_data(begun.run, begun.record, texts, config, kind, listen, note, tokenizer)
    data = opening.shared(world, data, lambda: make_pairs(texts, config, kind, note, tokenizer))
    spent = begun.saved.state.seconds if begun.saved else 0.0
    return Setting(begun.run, data, compute, start, world, listen, began - spent)


def _told(listen: Listener, world: World) -> tuple[Listener, Callable[[str], None]]:
    """Who hears of the run, and of a line of text: of the first process alone."""

    def hears(event: Any) -> None:
        if world.first:
            listen(event)

    return hears, lambda text: hears(events.Note(text))


def _begin(
    setting: Setting,
    config: TrainConfig,
    record: RunRecord,
    begun: resume.Begun | None = None,
    given: Mapping[str, Any] | None = None,
) -> Trainer:
    """A trainer that is ready for its first step, or for the next one of a run that was begun."""
    data, note, world = setting.data, setting.note, setting.world
    held_out = len(data.held_out) > 0
    n_tokens, vocab_size = len(data.train), data.tokenizer.vocab_size
    shape = setting.start.model if setting.start else None

    def recipe_for(config: TrainConfig, note: Callable[[str], None] = lambda text: None) -> Recipe:
        return _decided(
            world,
            lambda: resolve(
                config, setting.compute, data.bytes, n_tokens, vocab_size, held_out, note, shape, data.rows, world.rows
            ),
        )

    environment.tell(environment.RUN, setting.run)
    recipe, pace = begun.recipe if begun else None, None
    if recipe is None:
        recipe = recipe_for(config, note)
        world.together(partial(check_model, recipe, setting.compute, world.rows))
        if config.minutes is not None:
            pace = Trainer(setting, recipe).rehearse(config.minutes)
            steps = world.decided(partial(_steps_now, pace))
            recipe = recipe_for(replace(config, minutes=None, steps=steps))
            note(pace.describe(recipe.batch_tokens))
    saved = begun.saved if begun else None
    given = {**begun.lengthened, **(given or {})} if begun else {}
    if begun:
        step = saved.state.step if saved else 0
        recipe = _decided(world, partial(resume.changed, recipe, given, step, note, world.rows))
    if saved is not None and saved.pace is not None and "steps" not in given:
        pace = replace(saved.pace, deadline=saved.pace.deadline + setting.began)
    trainer = Trainer(setting, recipe, saved, begun.path if begun else None)
    if saved is not None and recipe.steps > saved.recipe.steps:
        trainer.state.evals_since_best = 0  # patience begins anew
    trainer.pace = pace
    trainer.open(record, str(given.get("log", config.log)), given)
    return trainer


def _decided(world: World, do: Callable[[], Recipe]) -> Recipe:
    """The first process's recipe, in all."""
    return checked(Recipe, world.decided(lambda: asdict(do())), "what the first process decided")


def _code() -> dict[str, str]:
    """What has to be the same in all processes."""
    return {f"the version of {package}": version(package) for package in ("gpt", "torch")}


def _steps_now(pace: Pace) -> int:
    return pace.steps(time.perf_counter())
