"""Adapters in a run: made, trained, and written with the name of what they belong to."""

from dataclasses import asdict

from torch.optim import AdamW

from gpt.errors import UserError
from gpt.model import lora
from gpt.model.decoder import GPT
from gpt.runs import hub
from gpt.runs.adapter import Adapter
from gpt.training.optim import BETAS, Optimizers
from gpt.training.recipe import Recipe
from gpt.training.start import Start


def adapt(model: GPT, recipe: Recipe) -> Optimizers:
    """Gives a model adapters, and an optimizer for them alone. Raises `UserError` for a rank above its width."""
    if recipe.lora_rank > model.config.n_embd:
        raise UserError(
            f"lora-rank {recipe.lora_rank} is more than the model's width, {model.config.n_embd}",
            "adapters are thin: 4 to 64 is usual",
        )
    added = lora.adapt(model, recipe.lora_rank, recipe.lora_alpha)
    return Optimizers([AdamW(added, lr=0.0, betas=BETAS, weight_decay=recipe.weight_decay, fused=True)])


def about(start: Start, recipe: Recipe) -> dict[str, object]:
    """What a checkpoint says of its adapters."""
    base = str(start.path.absolute())
    if hub.is_remote(start.asked):  # the cache may be emptied: a commit can be fetched again
        base = f"{start.asked.partition('@')[0]}@{start.path.name}"
    return asdict(Adapter(recipe.lora_rank, recipe.lora_alpha, base, start.sums))


def describe(model: GPT) -> str:
    """For whoever watches."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"adapters on the linear maps of the blocks: {trained:,} parameters train"
