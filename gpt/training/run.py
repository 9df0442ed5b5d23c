"""A training run, from texts to a saved checkpoint, in one go or resumed."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpt import device, events, files
from gpt.config import TrainConfig
from gpt.interrupt import StopSignal
from gpt.runs import folder
from gpt.settings import from_dict
from gpt.training import logs, opening, resume
from gpt.training.loop import Trainer
from gpt.training.opening import Listener, Setting
from gpt.training.recipe import Recipe, resolve
from gpt.training.result import Result
from gpt.training.start import find_start


def train(
    texts: Sequence[str], config: TrainConfig, listen: Listener = lambda event: None, began: float | None = None
) -> Result:
    """Trains a decoder on ``texts`` (files, folders, ``-`` or corpora by name; none: ``pydocs``) and tells ``listen``
    how it goes. ``began`` is when the command did, on the clock of `time.perf_counter`.

    Raises `UserError` for input that cannot be used, `WorkError` where the work fails, and `Interrupted` after
    SIGINT or SIGTERM, once the state is saved.
    """
    began = time.perf_counter() if began is None else began
    logs.check(config.log)
    compute = device.pick(config.device, config.dtype, training=True)

    def note(text: str) -> None:
        listen(events.Note(text))

    with contextlib.ExitStack() as held:
        stop = held.enter_context(StopSignal(at_once=True))
        start = find_start(config)
        tokenizer = start.tokenizer if start else None
        opened = opening.new_run(texts, config, compute, listen, note, tokenizer)
        run, data, record = held.enter_context(opened)
        setting = Setting(run, data, compute, start, listen, began)
        with opening.taken_back(run):
            trainer = _begin(setting, replace(config, preset=record["size"]), record)
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

    def note(text: str) -> None:
        listen(events.Note(text))

    resume.refuse_others(given, texts)
    from_dict(TrainConfig, given, "resume")
    path = resume.find_run(run)
    with contextlib.ExitStack() as held:
        stop = held.enter_context(StopSignal(at_once=True))
        held.enter_context(opening.locked_run(path))
        begun = resume.read_begun(path)
        if begun.result is not None and (given.get("steps") or 0) <= begun.result.steps:
            note(f"{path} is finished")
            return begun.result
        with files.disk_errors(path):
            files.recover(path)
            folder.write_index(path)
        logs.check(str(given.get("log", begun.config.log)))
        resume.find_checkpoint(begun, note)
        compute = resume.same_compute(begun, given.get("device"), note)
        start = resume.same_start(begun)
        tokenizer = start.tokenizer if start else begun.tokenizer
        data = opening.same_data(
            path, begun.record, begun.texts, begun.config, compute.device.type, listen, note, tokenizer
        )
        spent = begun.saved.state.seconds if begun.saved else 0.0
        setting = Setting(path, data, compute, start, listen, began - spent)
        return _begin(setting, begun.config, begun.record, begun, given).train(stop)


def _begin(
    setting: Setting,
    config: TrainConfig,
    record: dict[str, Any],
    begun: resume.Begun | None = None,
    given: Mapping[str, Any] | None = None,
) -> Trainer:
    """A trainer that is ready for its first step, or for the next one of a run that was begun."""
    data, note = setting.data, setting.note
    held_out = len(data.held_out) > 0
    n_tokens, vocab_size = len(data.train), data.tokenizer.vocab_size
    shape = setting.start.model if setting.start else None

    def recipe_for(config: TrainConfig, note: Callable[[str], None] = lambda text: None) -> Recipe:
        return resolve(config, setting.compute, data.bytes, n_tokens, vocab_size, held_out, note, shape, data.rows)

    recipe, pace = begun.recipe if begun else None, None
    if recipe is None:
        recipe = recipe_for(config, note)
        if config.minutes is not None:
            pace = Trainer(setting, recipe).rehearse(config.minutes)
            recipe = recipe_for(replace(config, minutes=None, steps=pace.steps(time.perf_counter())))
            note(pace.describe(recipe.batch_tokens))
    saved = begun.saved if begun else None
    given = {**begun.lengthened, **(given or {})} if begun else {}
    if given:
        recipe = resume.changed(recipe, given, setting.compute, saved.state.step if saved else 0, note)
    if saved is not None and saved.pace is not None and "steps" not in given:
        pace = replace(saved.pace, deadline=saved.pace.deadline + setting.began)
    trainer = Trainer(setting, recipe, saved, begun.path if begun else None)
    if saved is not None and recipe.steps > saved.recipe.steps:
        trainer.state.evals_since_best = 0  # patience begins anew
    trainer.pace = pace
    trainer.open(record, str(given.get("log", config.log)), given)
    return trainer
