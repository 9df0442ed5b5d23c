"""The data of ``gpt params``, for ``--json`` and its page: parameter counts, and the cost of training and sampling."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpt.config.model import PRESETS, GPTConfig, Preset
from gpt.config.plan import PlanConfig
from gpt.model.memory import count_saved_bytes
from gpt.model.params import Breakdown, breakdown, cache_bytes, flops_per_token, flops_sampled, nearest_preset
from gpt.model.plan import TrainingPlan, plans, trained_tokens

from .json_results import pick

GPT3_FLOPS = 6  # FLOPs per parameter and token in the GPT-3 paper, which ignores attention scores.


@dataclass(frozen=True)
class Shape:
    """A model's name, config, parameter counts and note."""

    name: str
    config: GPTConfig
    parts: Breakdown
    note: str = ""

    def data(self) -> dict[str, Any]:
        """Returns the object of ``gpt params --json``."""
        values = {"name": self.name, "config": asdict(self.config), "rows": [asdict(row) for row in self.parts.rows]}
        sums = pick(self.parts, "total_weights", "tied", "positions", "biases", "layer_norms", "trainable")
        return values | sums


@dataclass(frozen=True)
class Cost:
    """A model's config, the settings of ``gpt params``, and the resulting plans."""

    config: GPTConfig
    settings: PlanConfig
    plans: Sequence[TrainingPlan]

    @classmethod
    def from_config(cls, config: GPTConfig, settings: PlanConfig) -> "Cost":
        """Plans the training of ``config``. Raises `UserError` if heads or batches cannot be split evenly."""
        return cls(config, settings, plans(config, settings, PRESETS[nearest_preset(config)].batch_tokens))

    @property
    def main_plan(self) -> TrainingPlan:
        """The plan for all devices."""
        return self.plans[-1]

    def data(self) -> dict[str, Any]:
        """Returns the keys that describe the cost in ``gpt params --json``."""
        config, days, tokens = self.config, self.main_plan.days, trained_tokens(self.config, self.settings)
        per_trained_token = flops_per_token(config, config.block_size)
        flops = {
            "trained_token": per_trained_token,
            "sampled_token": flops_sampled(config, config.block_size),
            "tokens": tokens,
            "training": per_trained_token * tokens,
            "training_without_scores": GPT3_FLOPS * breakdown(config).trainable * tokens,
        }
        throughput = None if days is None else tokens / (86_400 * days)
        return {
            "plan": self._plan(self.main_plan),
            "memory": self._memory(),
            "plans": list(map(self._plan, self.plans)),
            "flops": flops,
            "time": {"tokens": tokens, "mfu": self.settings.mfu, "days": days, "tokens_per_second": throughput},
        }

    def _plan(self, plan: TrainingPlan) -> dict[str, Any]:
        return {
            "kind": self.settings.kind,
            "devices": plan.devices,
            "shard": "full" if plan.setup.shard else "none",
            **pick(plan.setup, "micro_batch", "recompute", "loss_chunk", "dtype", "optimizer"),
            "peak": plan.memory.peak,
            "room": plan.memory_limit,
            **pick(plan, "fits", "days"),
        }

    def _memory(self) -> dict[str, Any]:
        """Returns bytes per rank."""
        config, memory, setup = self.config, self.main_plan.memory, self.main_plan.setup
        full, recomputed = (count_saved_bytes(config, replace(setup, recompute=each)) for each in (False, True))
        sampling = {
            "weights": breakdown(config).trainable * setup.width,
            "cache": cache_bytes(config, config.block_size, setup.width),
        }
        return {
            **pick(memory, "parameters", "gradients", "optimizer"),
            "activations": full,
            "activations_recomputed": recomputed,
            **pick(memory, "logits", "copies"),
            "moments": dict(memory.moments),
            **pick(memory, "process", "peak", "snapshot"),
            "sampling": sampling,
        }


def presets(all_presets: Mapping[str, Preset]) -> Iterator[dict[str, Any]]:
    """Yields the objects of ``gpt params --list --json``."""
    for name, preset in all_presets.items():
        yield {"name": name, "config": asdict(preset.model), "trainable": breakdown(preset.model).trainable}
