"""The state of a run: what must survive a restart, and a copy of it in the host's memory."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from gpt.device import random_states, set_random_states
from gpt.errors import UserError
from gpt.files import read_json, to_json
from gpt.runs import adapter, folder, tensors
from gpt.runs.record import Machine
from gpt.settings import LARGEST, Amount, Count, Positive, Within, checked
from gpt.text.batches import MOST_SIZES
from gpt.training.pace import TimeBudget
from gpt.training.parallel import MOMENT, WEIGHT, Parallel
from gpt.training.recipe import Recipe

FORMAT = 1
STATE, TENSORS = folder.TRAINING
RANDOM = "random:"  # before the names of generators' states, among a snapshot's tensors
_DTYPES = ("F32", "U8", "I64")


@dataclass
class TrainState:
    """Everything that decides how a run continues, beside weights, moments, random states and the recipe."""

    step: Count = 0  # optimizer steps done; the next batch is a function of it
    settled_step: Annotated[int, Within(-1)] = -1  # the newest step whose due actions are done
    measured_step: Annotated[int, Within(-1)] = -1  # the newest evaluation's …
    measured_loss: float | None = None  # … and its loss, nats per token
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
class Saved:
    """``training.json``. ``pace`` is the time budget, if the run has one, counted from its start."""

    format: int
    state: TrainState
    recipe: Recipe
    machine: Machine
    scaling: Scaling | None
    pace: TimeBudget | None

    @staticmethod
    def upgrade(values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """What older versions wrote, without the random states of Python and numpy, from which nothing is drawn."""
        return {key: value for key, value in values.items() if key != "draws"}


@dataclass
class Snapshot:
    """A copy of a run at a step, in the host's memory: written into checkpoints while training continues, and restored
    after the loss has exploded. The next `take` uses its buffers again."""

    state: TrainState = field(default_factory=TrainState)
    scaling: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)  # `Parallel.state` and random states, by prefixed name

    def take(self, parallel: Parallel, scaler: torch.amp.GradScaler, state: TrainState) -> None:
        """Copies everything that is trained, the moments and the random states, but no frozen weights."""
        device = parallel.compute.device
        live = parallel.state() | {RANDOM + name: each for name, each in random_states(device).items()}
        self.tensors = {name: _copied(tensor, self.tensors.get(name)) for name, tensor in live.items()}
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.scaling = scaler.state_dict()
        self.state = copy.copy(state)

    def restore(self, parallel: Parallel, scaler: torch.amp.GradScaler) -> TrainState:
        """Sets everything to this copy; weights that it does not have stay. Returns the state."""
        parallel.restore(self.tensors)
        drawn = {name.removeprefix(RANDOM): each for name, each in self.tensors.items() if name.startswith(RANDOM)}
        try:
            set_random_states(parallel.compute.device, drawn)
        except (TypeError, RuntimeError) as error:
            raise UserError(f"the checkpoint's random states are damaged: {error}", folder.HINT) from None
        if scaler.is_enabled() and self.scaling:
            scaler.load_state_dict(self.scaling)
        return copy.copy(self.state)

    def about(self, recipe: Recipe, machine: Machine, budget: TimeBudget | None) -> bytes:
        """``training.json`` of a checkpoint of this copy."""
        return to_json(
            {
                "format": FORMAT,
                "state": asdict(self.state),
                "recipe": asdict(recipe),
                "machine": asdict(machine),
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
    even = not ramp or not any(n % ramp.by for n in (ramp.first, ramp.rows, ramp.unit))
    if ramp and not (ramp.first <= ramp.rows == recipe.rows and even and ramp.sizes <= MOST_SIZES):
        raise UserError(f"{where} is damaged: its batches grow from {ramp.first} to {ramp.rows} over {ramp.over} rows")
    return saved


def read_snapshot(path: Path, saved: Saved, parallel: Parallel) -> Snapshot:
    """The snapshot in a checkpoint: everything that a run resumes with, but for weights that are the model's own.
    Names, shapes and dtypes are compared with the model's before anything is read; each process keeps its part.

    Raises `UserError` if that is damaged.
    """
    moments = parallel.optimizer.shapes(parallel.own, parallel.shapes)
    expected = {MOMENT + name: shape for name, shape in moments.items()}
    # The host's; a GPU's, which may be another one now; and of Python and numpy, from which nothing is drawn any more.
    drawn = {
        "torch": tuple(torch.get_rng_state().shape),
        "cuda": (16,),
        "mps": (44,),
        "python": (625,),
        "numpy": (624,),
    }
    optional = expected | {RANDOM + name: shape for name, shape in drawn.items()}

    where = [path / TENSORS]
    stored = tensors.find(where, optional, "the model", dtypes=_DTYPES)
    found = {name: parallel.part(name, each.mapped()) for name, each in stored.items()}
    whole = set(expected) <= set(found) or not any(name.startswith(MOMENT) for name in found)
    if not whole or RANDOM + "torch" not in found:
        raise UserError(f"{path / TENSORS} is damaged: the training state is incomplete")
    if folder.is_adapter(path):
        added, _ = adapter.tensors(path, saved.recipe.model, saved.recipe.lora_rank)
        if {name: tuple(each.shape) for name, each in added.items()} != parallel.shapes:
            raise UserError(f"{path} is damaged: its adapters do not match its training state", folder.HINT)
        found |= {WEIGHT + name: tensor for name, tensor in added.items()}
    scaling = asdict(saved.scaling) if saved.scaling else {}
    return Snapshot(saved.state, scaling, found)


def _copied(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return buffer.copy_(tensor, non_blocking=True)


def seed_all(seed: int) -> None:
    """Seeds the generators whose states are saved."""
    torch.manual_seed(seed)
