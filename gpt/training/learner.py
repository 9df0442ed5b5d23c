"""What is trained, and what steps it: new, or that of the run to go on with, or of the model that is fine-tuned."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.device import Compute
from gpt.model.decoder import GPT
from gpt.parallel.world import World
from gpt.runs import checkpoint
from gpt.training import lora
from gpt.training.optim import Muon, Optimizers, make_optimizer
from gpt.training.recipe import Recipe
from gpt.training.start import Start

if TYPE_CHECKING:
    from gpt.parallel.shard import Sharded  # torch's part of it takes seconds to import


@dataclass(frozen=True)
class Learner:
    """A model and its optimizers. ``own``: what these step and a checkpoint is made of, the model itself or, where it
    is ``sharded``, this process's parts of it."""

    model: GPT
    own: GPT
    optimizer: Optimizers
    sharded: "Sharded | None" = None

    @property
    def whole(self) -> Mapping[str, tuple[int, ...]]:
        """The whole shapes of what is trained."""
        if self.sharded is not None:
            return {name: p.shape for name, p in self.sharded.table.items()}
        return {name: tuple(p.shape) for name, p in self.own.named_parameters() if p.requires_grad}


def make_learner(recipe: Recipe, compute: Compute, world: World, start: Start | None, path: Path | None) -> Learner:
    """For a run; ``path``: the checkpoint that it goes on from. Moments are new."""
    sharded = None
    muon: Callable[..., Muon] = Muon
    if world.in_step:
        from gpt.training import parts

        sharded = parts.divided(recipe, compute, world, path or (start.path if start else None))
        muon = partial(parts.MuonOfParts, sharded)
    model = sharded.model if sharded else _model(recipe, compute, start, path)
    model.recompute = recipe.recompute
    own = sharded.own if sharded else model
    if recipe.lora_rank:
        return Learner(model, own, lora.adapt(model, recipe))
    optimizer = make_optimizer(own, recipe.optimizer, recipe.weight_decay, compute.dtype, world, muon)
    return Learner(model, own, optimizer, sharded)


def _model(recipe: Recipe, compute: Compute, start: Start | None, path: Path | None) -> GPT:
    if path is not None and not recipe.lora_rank:
        return checkpoint.load(path, compute.device, recipe.model).model.train()
    return start.load(recipe.model, compute.device) if start else GPT(recipe.model).to(compute.device)
