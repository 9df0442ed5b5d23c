"""The learning rate schedule."""

import math

from gpt.training.recipe import Recipe

COSINE_FLOOR = 0.1  # final share of the peak learning rate in the cosine schedule (GPT-3, appendix B)


def lr_at(recipe: Recipe, step: float) -> float:
    """Returns the learning rate at ``step``, from 1 to ``steps``. It rises linearly to ``lr`` over ``warmup`` steps.

    Then it stays constant for ``constant``, or decays to a tenth for ``cosine``. For ``linear``, it decays towards 0 in
    the last ``decay`` steps (Hägele et al. 2024, arXiv 2405.18392). In a timed run, ``step`` is a position: the share
    of the time that has passed, times ``steps``.
    """
    if step < recipe.warmup:
        return recipe.lr * step / recipe.warmup
    if recipe.schedule == "constant":
        return recipe.lr
    if recipe.schedule == "linear":
        return recipe.lr * min(1.0, (recipe.steps + 1 - step) / max(1, recipe.decay))
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * (COSINE_FLOOR + (1 - COSINE_FLOOR) * (1 + math.cos(math.pi * progress)) / 2)
