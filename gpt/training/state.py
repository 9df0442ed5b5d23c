"""The training state of a run, as saved in checkpoints, and its snapshots in host memory."""

import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from gpt.config.device import random_states, set_random_states
from gpt.config.settings import MAX_FLOAT32, Amount, Count, Positive, Within, checked
from gpt.runs import folder, tensors
from gpt.runs.record import Machine
from gpt.system.errors import UserError
from gpt.system.files import read_json, to_json
from gpt.training.recipe import Recipe
from gpt.training.strategy import MOMENT, Strategy, with_prefix

FORMAT = 1
STATE, TENSORS = folder.TRAINING
RANDOM = "random:"  # prefix of random states among a snapshot's tensors
_DTYPES = ("F32", "U8", "I64")


@dataclass
class TrainState:
    """The training state, without weights, moments, random states and the recipe."""

    step: Count = 0  # completed optimizer steps of the run
    cycle: Count = 0  # the run's own teachers that are trained
    start: Count = 0  # the step at which this cycle began: that of the next teacher, or of the model itself
    settled_step: Annotated[int, Within(-1)] = -1  # newest step whose evaluation, samples and checkpoint are done
    measured_step: Annotated[int, Within(-1)] = -1  # step of the newest evaluation
    measured_loss: float | None = None  # loss of the newest evaluation, nats per token
    windows: Count = 0  # held-out windows per periodic evaluation
    best_loss: float | None = None  # lowest held-out loss so far
    evals_since_best: Count = 0  # patience counter
    rate_factor: Annotated[float, Within(0, 1)] = 1.0  # learning rate multiplier, reduced by rollbacks
    bad_steps: Count = 0  # consecutive steps with a non-finite or exploded loss
    has_learnt: bool = False  # whether the loss has ever been well below a uniform guess
    step_seconds: Amount = 0.0  # time in training steps, without evaluation, sampling and saving
    seconds: Amount = 0.0  # total time of all commands so far
    first_step: Amount = 0.0  # value of ``seconds`` at the first step
    training_seconds: Amount = 0.0  # time for training in a timed run
    share: Annotated[float, Within(0, 1)] = 0.0  # share of ``training_seconds`` that has passed
    metrics_bytes: Count = 0  # bytes of metrics.jsonl so far

    @property
    def cycle_step(self) -> int:
        """The completed steps of this cycle. They determine the next batch."""
        return self.step - self.start

    def begin_next_cycle(self) -> None:
        """Keeps only what counts for the whole run."""
        kept = {name: getattr(self, name) for name in ("step", "step_seconds", "seconds", "first_step")}
        vars(self).update(vars(TrainState(**kept, cycle=self.cycle + 1, start=self.step)))


@dataclass(frozen=True)
class Scaling:
    """The state of `torch.amp.GradScaler` in float16."""

    scale: Annotated[float, Within(0, MAX_FLOAT32)]
    growth_factor: Annotated[float, Within(1, 2**10)]
    backoff_factor: Annotated[float, Within(0, 1)]
    growth_interval: Positive
    _growth_tracker: Count


@dataclass(frozen=True)
class SavedState:
    """The content of ``training.json``."""

    format: int
    state: TrainState
    recipe: Recipe
    machine: Machine
    scaling: Scaling | None


@dataclass
class Snapshot:
    """A copy of a run's state in host memory. It is for rollbacks, and for writing checkpoints while training
    continues. The next `take` reuses its buffers."""

    state: TrainState = field(default_factory=TrainState)
    scaling: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)  # `Strategy.state` and random states

    def take(self, strategy: Strategy, scaler: torch.amp.GradScaler, state: TrainState) -> None:
        """Copies trained weights, moments and random states."""
        device = strategy.compute.device
        sources = strategy.state() | {RANDOM + name: value for name, value in random_states(device).items()}
        self.tensors = {name: _copy_to_host(tensor, self.tensors.get(name)) for name, tensor in sources.items()}
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.scaling = scaler.state_dict()
        self.state = copy.copy(state)

    def restore(self, strategy: Strategy, scaler: torch.amp.GradScaler) -> TrainState:
        """Restores the run from this copy and returns its state. Weights that the copy lacks stay unchanged."""
        strategy.restore(self.tensors)
        try:
            set_random_states(strategy.compute.device, with_prefix(self.tensors, RANDOM))
        except (TypeError, RuntimeError) as error:
            raise UserError(f"the checkpoint's random states are damaged: {error}", folder.HINT) from None
        if scaler.is_enabled() and self.scaling:
            scaler.load_state_dict(self.scaling)
        return copy.copy(self.state)

    def to_training_json(self, recipe: Recipe, machine: Machine) -> bytes:
        """Returns this snapshot's ``training.json``."""
        values = {"format": FORMAT, "state": asdict(self.state), "recipe": asdict(recipe), "machine": asdict(machine)}
        return to_json(values | {"scaling": self.scaling or None})


def read_saved_state(path: Path) -> SavedState:
    """Reads a checkpoint's ``training.json``. Raises `UserError` if it is damaged."""
    file = path / STATE
    values = read_json(file)
    if values.get("format") != FORMAT:
        raise UserError(f"{file} has format {values.get('format')!r}; this program reads format {FORMAT}", "update gpt")
    saved = checked(SavedState, values, str(file))
    state, recipe = saved.state, saved.recipe
    is_possible = state.start <= state.step and state.cycle <= recipe.n_teachers and state.windows
    if not is_possible or (state.cycle_step > recipe.cycle(state.cycle).steps and not recipe.is_timed):
        raise UserError(f"{file} is damaged: step {state.step} of {recipe.steps}", folder.HINT)
    return saved


def read_snapshot(path: Path, saved: SavedState, strategy: Strategy) -> Snapshot:
    """Reads a checkpoint's snapshot, except weights, which `make_strategy` loads.

    Checks names, shapes and dtypes before reading. Each process keeps only its part. Raises `UserError` for damaged
    files.
    """
    moments = strategy.optimizer.shapes(strategy.shapes)
    moment_shapes = {MOMENT + name: shape for name, shape in moments.items()}
    # Allows unused states too, since a run can resume on another type of GPU.
    rng_shapes = {"torch": tuple(torch.get_rng_state().shape), "cuda": (16,), "mps": (44,)}
    allowed_shapes = moment_shapes | {RANDOM + name: shape for name, shape in rng_shapes.items()}

    files = [path / TENSORS]
    entries = tensors.find(files, allowed_shapes, "the model", dtypes=_DTYPES)
    loaded = {name: strategy.part(name, tensor.mapped()) for name, tensor in entries.items()}
    is_complete = set(moment_shapes) <= set(loaded) or not any(name.startswith(MOMENT) for name in loaded)
    if not is_complete or RANDOM + "torch" not in loaded:
        raise UserError(f"{path / TENSORS} is damaged: the training state is incomplete", folder.HINT)
    scaling = asdict(saved.scaling) if saved.scaling else {}
    return Snapshot(saved.state, scaling, loaded)


def _copy_to_host(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return buffer.copy_(tensor, non_blocking=tensor.device.type == "cuda")  # `take` waits only for CUDA.


def seed_all(seed: int) -> None:
    """Seeds the random generators whose states are saved."""
    torch.manual_seed(seed)
