"""What a run keeps of itself: one copy in memory, to save and to go back to."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpt.runs import checkpoint
from gpt.runs.record import Machine
from gpt.training import lora
from gpt.training.learner import Learner
from gpt.training.metrics import Metrics
from gpt.training.opening import Setting
from gpt.training.pace import Pace
from gpt.training.recipe import Recipe
from gpt.training.saving import NoSaver, Saver
from gpt.training.state import WEIGHT, Snapshot, TrainState, Whole, as_it_is


def size_of(learner: Learner, tokenizer: checkpoint.TokenizerFiles) -> int:
    """About the bytes of a checkpoint."""
    trained = sum(map(math.prod, learner.whole.values()))
    moments = sum(map(math.prod, learner.optimizer.shapes(learner.own, learner.whole).values()))
    return 4 * (trained + moments) + sum(map(len, tokenizer.files.values()))


@dataclass
class Keeper:
    """Copies the state of a run, and has it written while training goes on."""

    setting: Setting
    learner: Learner
    scaler: torch.amp.GradScaler
    state: TrainState
    metrics: Metrics | None  # None: another process writes them
    tokenizer: checkpoint.TokenizerFiles
    keep: int  # checkpoints
    saved: Callable[[int], None]  # hears of each that is whole

    def __post_init__(self) -> None:
        self.snapshot = Snapshot()  # the newest good state
        self.model, self.optimizers = self.learner.own, self.learner.optimizer
        self.size = size_of(self.learner, self.tokenizer)
        self.fixed = {name: tensor.cpu().numpy() for name, tensor in checkpoint.fixed(self.model).items()}
        self.whole: Whole = as_it_is
        self.saver = self._saver()

    def _saver(self) -> Saver:
        """Who writes what is saved: the first process; the others help it, where they have parts of that."""
        setting, world = self.setting, self.setting.world
        kind: type[Saver] = Saver if world.first else NoSaver
        if self.learner.sharded is None:
            return kind(setting.run, self.keep, self.saved, setting.warn)
        from gpt.training.parts import Answerer, Collector

        collector = Collector(self.learner.sharded, self.optimizers, world)
        self.whole = collector.whole
        if world.first:
            return Saver(setting.run, self.keep, self.saved, setting.warn, collector.close)
        return Answerer(collector, setting.run, lambda: self.snapshot.tensors)

    def remember(self) -> None:
        """Copies the state as it is."""
        self.saver.wait()  # it reads the copy before
        self.state.seconds = time.perf_counter() - self.setting.began
        self.state.metrics_bytes = self.metrics.size if self.metrics else 0
        self.snapshot.take(self.model, self.optimizers, self.scaler, self.state)

    def go_back(self, **but: Any) -> None:
        """Makes everything what it was when it was copied, ``but`` some of the state."""
        good = self.snapshot.restore(self.model, self.optimizers, self.scaler)
        vars(self.state).update(vars(good), **but)

    def save(self, recipe: Recipe, pace: Pace | None) -> None:
        """Copies the state, and begins to write it."""
        self.remember()
        self.saver.begin(self.state.step, self.size, self._files(recipe, pace))

    def save_last(self, recipe: Recipe, pace: Pace | None, stopped: Callable[[], bool]) -> None:
        """Copies the state, and writes it whatever it takes. Raises `WorkError` where the disk does not."""
        self.remember()
        self.saver.last(self.state.step, self.size, self._files(recipe, pace), stopped)

    def _files(self, recipe: Recipe, pace: Pace | None) -> Callable[[], checkpoint.Files]:
        """What gives the files of a checkpoint of the snapshot, in any thread."""
        snapshot, state, setting = self.snapshot, self.snapshot.state, self.setting
        meta: dict[str, Any] = {
            "step": state.step,
            "tokens_seen": recipe.tokens(state.step),
            "val_loss": state.measured_loss if state.measured_step == state.step else None,
        }
        if setting.start and recipe.lora_rank:
            meta["adapter"] = lora.about(setting.start, recipe)
        whole = self.whole
        weights = {name: whole(WEIGHT + name, tensor) for name, tensor in snapshot.weights.items()}
        weights = weights if "adapter" in meta else {**self.fixed, **weights}
        compute = setting.compute
        machine = Machine(str(compute.device), compute.dtype_name, torch.get_num_threads(), setting.world.size)
        if pace is not None:
            pace = replace(pace, deadline=pace.deadline - setting.began)

        def files() -> checkpoint.Files:
            if self.metrics is not None:
                self.metrics.sync()
            model = checkpoint.contents(recipe.model, weights, self.tokenizer, meta)
            return {**model, **snapshot.files(recipe, machine, pace, whole)}

        return files
