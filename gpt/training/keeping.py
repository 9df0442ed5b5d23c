"""What a run keeps of itself: one copy in memory, to save and to go back to."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpt.model.decoder import GPT
from gpt.runs import checkpoint
from gpt.training import lora
from gpt.training.metrics import Metrics
from gpt.training.opening import Setting
from gpt.training.optim import Optimizers
from gpt.training.pace import Pace
from gpt.training.recipe import Recipe
from gpt.training.saving import Saver
from gpt.training.state import Machine, Snapshot, TrainState


def size_of(model: GPT, optimizers: Optimizers, tokenizer: checkpoint.TokenizerFiles) -> int:
    """About the bytes of a checkpoint."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    moments = sum(math.prod(shape) for shape in optimizers.shapes(model).values())
    return 4 * (trained + moments) + sum(map(len, tokenizer.files.values()))


@dataclass
class Keeper:
    """Copies the state of a run, and has it written while training goes on."""

    setting: Setting
    model: GPT
    optimizers: Optimizers
    scaler: torch.amp.GradScaler
    state: TrainState
    metrics: Metrics | None  # None: another process writes them
    saver: Saver
    tokenizer: checkpoint.TokenizerFiles

    def __post_init__(self) -> None:
        self.snapshot = Snapshot()  # the newest good state
        self.fixed = {name: tensor.cpu() for name, tensor in checkpoint.fixed(self.model).items()}

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

    @property
    def size(self) -> int:
        """About the bytes of a checkpoint."""
        return size_of(self.model, self.optimizers, self.tokenizer)

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
        weights = snapshot.weights if "adapter" in meta else self.fixed | snapshot.weights
        compute = setting.compute
        machine = Machine(str(compute.device), compute.dtype_name, torch.get_num_threads(), setting.world.size)
        if pace is not None:
            pace = replace(pace, deadline=pace.deadline - setting.began)

        def files() -> checkpoint.Files:
            if self.metrics is not None:
                self.metrics.sync()
            model = checkpoint.contents(recipe.model, weights, self.tokenizer, meta)
            return {**model, **snapshot.files(recipe, machine, pace)}

        return files
