"""The state of a run: what must survive a restart, and a copy of it in the host's memory."""

import copy
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from gpt.errors import UserError
from gpt.files import read_json, to_json
from gpt.runs import adapter, folder, tensors
from gpt.runs.record import Machine
from gpt.settings import LARGEST, Amount, Count, Positive, Within, checked
from gpt.text.batches import MOST_SIZES, Ramp
from gpt.training.pace import TimeBudget
from gpt.training.parallel import MOMENT, WEIGHT, Parallel
from gpt.training.recipe import Recipe

FORMAT = 1
STATE, TENSORS = folder.TRAINING
_RANDOM = "random:"  # before the names of a snapshot's tensors
_DTYPES = ("F32", "U8", "I64")


@dataclass
class TrainState:
    """Everything that decides how a run continues, beside weights, moments, random states and the recipe."""

    step: Count = 0  # optimizer steps done; the next batch is a function of it
    settled_step: Annotated[int, Within(-1)] = -1  # the newest step whose due actions are done
    measured_step: Annotated[int, Within(-1)] = -1  # the newest evaluation's …
    measured_loss: float | None = None  # … and its loss, nats a token
    windows: Count = 0  # of held-out text in a periodic evaluation
    best_loss: float | None = None  # lowest held-out loss so far
    evals_since_best: Count = 0  # for patience
    rate_factor: Annotated[float, Within(0, 1)] = 1.0  # of the learning rate; lower after a rollback
    bad_steps: Count = 0  # in a row, whose loss is not finite or has exploded
    has_learnt: bool = False  # whether a loss well below guessing was seen
    step_seconds: Amount = 0.0  # spent on steps alone, without evaluation, sampling and saving
    seconds: Amount = 0.0  # of all commands up to this state
    first_step: Amount = 0.0  # when the first step began, in those seconds
    metrics_bytes: Count = 0  # of metrics.jsonl up to this state


@dataclass(frozen=True)
class Scaling:
    """The state of `torch.amp.GradScaler`, which float16 alone uses."""

    scale: Annotated[float, Within(0, LARGEST)]
    growth_factor: Annotated[float, Within(1, 2**10)]
    backoff_factor: Annotated[float, Within(0, 1)]
    growth_interval: Positive
    _growth_tracker: Count


@dataclass(frozen=True)
class Draws:
    """The random states of Python and numpy beside the numbers that are tensors."""

    python_version: int
    python_gauss: float | None
    numpy_position: int
    numpy_has_gauss: int
    numpy_gauss: float


@dataclass(frozen=True)
class Saved:
    """``training.json``. ``pace`` is the time budget, if the run has one, counted from its start."""

    format: int
    state: TrainState
    recipe: Recipe
    machine: Machine
    draws: Draws
    scaling: Scaling | None
    pace: TimeBudget | None


@dataclass
class Snapshot:
    """A copy of a run at a step, in the host's memory: written into checkpoints while training continues, and restored
    after the loss has exploded. The next `take` uses its buffers again."""

    state: TrainState = field(default_factory=TrainState)
    draws: Draws | None = None
    scaling: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)  # `Parallel.state` and random states, by prefixed name

    def take(self, parallel: Parallel, scaler: torch.amp.GradScaler, state: TrainState) -> None:
        """Copies everything that is trained, the moments and the random states, but no frozen weights."""
        device = parallel.compute.device
        numbers, self.draws = _generator_states(device)
        live = parallel.state() | {_RANDOM + name: tensor for name, tensor in numbers.items()}
        self.tensors = {name: _copied(tensor, self.tensors.get(name)) for name, tensor in live.items()}
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.scaling = scaler.state_dict()
        self.state = copy.copy(state)

    def restore(self, parallel: Parallel, scaler: torch.amp.GradScaler) -> TrainState:
        """Sets everything to this copy; weights that it does not have stay. Returns the state."""
        parallel.restore(self.tensors)
        if self.draws is not None:
            states = {name.removeprefix(_RANDOM): t for name, t in self.tensors.items() if name.startswith(_RANDOM)}
            _restore_generators(states, self.draws, parallel.compute.device)
        if scaler.is_enabled() and self.scaling:
            scaler.load_state_dict(self.scaling)
        return copy.copy(self.state)

    def about(self, recipe: Recipe, machine: Machine, budget: TimeBudget | None) -> bytes:
        """``training.json`` of a checkpoint of this copy."""
        assert self.draws is not None, "taken"
        return to_json(
            {
                "format": FORMAT,
                "state": asdict(self.state),
                "recipe": asdict(recipe),
                "machine": asdict(machine),
                "draws": asdict(self.draws),
                "scaling": self.scaling or None,
                "pace": None if budget is None else asdict(budget),
            }
        )


def read_saved(path: Path) -> Saved:
    """Reads ``training.json`` of a checkpoint. Raises `UserError` if it is damaged."""
    where = path / STATE
    values = read_json(where)
    if values.get("format") != FORMAT:
        raise UserError(
            f"{where} has format {values.get('format')!r}; this program reads format {FORMAT}", "update gpt"
        )
    saved = checked(Saved, values, str(where))
    step, recipe = saved.state.step, saved.recipe
    if step > recipe.steps or not saved.state.windows or recipe.rows % recipe.micro_batch:
        raise UserError(
            f"{where} is damaged: step {step} of {recipe.steps}, {recipe.micro_batch} of {recipe.rows} rows"
        )
    ramp = recipe.ramp  # one that does not grow, or in too many sizes, would never end
    if ramp and not (ramp.first <= ramp.rows == recipe.rows and _even(ramp) and ramp.sizes <= MOST_SIZES):
        raise UserError(f"{where} is damaged: its batches grow from {ramp.first} to {ramp.rows} over {ramp.over} rows")
    return saved


def _even(ramp: Ramp) -> bool:
    return not any(n % ramp.by for n in (ramp.first, ramp.rows, ramp.unit))


def read_snapshot(path: Path, saved: Saved, parallel: Parallel) -> Snapshot:
    """The snapshot in a checkpoint: everything that a run resumes with, but for weights that are the model's own.
    Names, shapes and dtypes are compared with the model's before anything is read; each process keeps its part.

    Raises `UserError` if that is damaged.
    """
    moments = parallel.optimizer.shapes(parallel.own, parallel.shapes)
    expected = {MOMENT + name: shape for name, shape in moments.items()}
    numbers, _ = _generator_states(parallel.compute.device)
    drawn = {_RANDOM + name: tuple(tensor.shape) for name, tensor in numbers.items()}
    elsewhere = {} if "cuda" in numbers else {_RANDOM + "cuda": (16,)}  # the run was on another device
    optional = expected | drawn | elsewhere

    where = [path / TENSORS]
    stored = tensors.find(where, optional, "the model", dtypes=_DTYPES)
    found = {name: parallel.part(name, each.mapped()) for name, each in stored.items()}
    whole = set(expected) <= set(found) or not any(name.startswith(MOMENT) for name in found)
    if not whole or not all(name in found for name in drawn if name != _RANDOM + "cuda"):
        raise UserError(f"{path / TENSORS} is damaged: not all of the training state is in it")
    if folder.is_adapter(path):
        added, _ = adapter.tensors(path, saved.recipe.model, saved.recipe.lora_rank)
        if {name: tuple(each.shape) for name, each in added.items()} != parallel.shapes:
            raise UserError(f"{path} is damaged: its adapters are not those of its training state", folder.HINT)
        found |= {WEIGHT + name: tensor for name, tensor in added.items()}
    scaling = asdict(saved.scaling) if saved.scaling else {}
    return Snapshot(saved.state, saved.draws, scaling, found)


def _copied(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return buffer.copy_(tensor, non_blocking=True)


def seed_all(seed: int) -> None:
    """Seeds every generator whose state is saved."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _generator_states(device: torch.device) -> tuple[dict[str, Tensor], Draws]:
    """The random states of Python, numpy and torch."""
    version, numbers, gauss = random.getstate()
    _, words, position, has_gauss, numpy_gauss = np.random.get_state()
    states = {
        "python": torch.tensor(numbers, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(words).astype(np.int64)),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states, Draws(version, gauss, int(position), int(has_gauss), float(numpy_gauss))


def _restore_generators(states: Mapping[str, Tensor], draws: Draws, device: torch.device) -> None:
    try:
        random.setstate((draws.python_version, tuple(states["python"].tolist()), draws.python_gauss))
        words = states["numpy"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", words, draws.numpy_position, draws.numpy_has_gauss, draws.numpy_gauss))
        torch.set_rng_state(states["torch"].cpu())
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"].cpu(), device)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise UserError(f"the checkpoint's random states are damaged: {error}", folder.HINT) from None
