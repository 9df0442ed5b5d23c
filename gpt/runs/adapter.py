"""Reads and writes LoRA adapters in PEFT's layout: ``adapter_config.json`` and ``adapter_model.safetensors``.

``gpt.json`` adds the checksums of the base model's weights; PEFT's own folders have none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.config.model import GPTConfig
from gpt.config.train import LORA_ROLES
from gpt.model import lora
from gpt.runs import folder, hf, hub
from gpt.runs import tensors as files
from gpt.system.errors import UserError
from gpt.system.files import read_json, to_json

FILE = "adapter_model.safetensors"
_MAX_RANK = 2**20
_PREFIX = "base_model.model."  # prefix of module names
# PEFT keys with the values that leave W + s · B A unchanged. The first value is the default.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other values change the base model's weights.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
_READ_KEYS = (
    "base_model_name_or_path", "revision", "r", "lora_alpha", "use_rslora", "target_modules", "fan_in_fan_out",
)  # fmt: skip
# Keys that have no effect after training.
_IGNORED_KEYS = (
    "task_type", "auto_mapping", "peft_version", "inference_mode", "exclude_modules", "lora_dropout",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config",
    "qalora_group_size", "runtime_config",
)  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """A checkpoint's LoRA adapter. ``base`` is a folder or ``hf:NAME@COMMIT``; ``sha256`` has the checksums of its
    weight files, if known."""

    base: str
    rank: int
    alpha: float
    sha256: dict[str, str]
    rank_stabilized: bool = False  # scales B A by α/√R, as in rsLoRA (Kalajdzievski 2023)

    @property
    def scale(self) -> float:
        """The scaling factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def find_base(self, path: Path) -> Path:
        """Returns the base model's folder. ``path`` is the adapter's folder. Raises `UserError` if the weights are
        missing or have changed."""
        base = folder.base_folder(path)
        if self.sha256 and folder.weight_checksums(base) != self.sha256:
            raise UserError(f"{path} is an adapter for {self.base}, whose weights have changed", folder.BASE_HINT)
        return base


def read(path: Path) -> Adapter:
    """Reads an adapter's configuration. Raises `UserError` if it is damaged or not plain LoRA on the blocks' linear
    maps."""
    config_path = path / folder.ADAPTER
    values = read_json(config_path)
    for key, allowed in _NEUTRAL_VALUES.items():
        if values.get(key, allowed[0]) not in allowed:
            raise UserError(
                f"{config_path}: {key} is {values[key]!r:.80}; only adapters with {allowed[0]!r} are supported"
            )
    for key in values.keys() - {*_NEUTRAL_VALUES, *_READ_KEYS, *_IGNORED_KEYS}:
        if values[key]:
            raise UserError(f"{config_path}: {key:.80} is {values[key]!r:.80}, which is not supported")
    rank: Any = values.get("r")
    alpha: Any = values.get("lora_alpha")
    by_root = values.get("use_rslora", False)
    if type(rank) is not int or not 1 <= rank <= _MAX_RANK:
        raise UserError(f"{config_path} is damaged: the adapter has rank {rank!r:.80}")
    if type(alpha) not in (int, float) or not 0 <= alpha <= 1e12 or type(by_root) is not bool:
        raise UserError(f"{config_path} is damaged: the adapter has scale {alpha!r:.80}")
    meta = read_json(path / folder.META).get("adapter") if (path / folder.META).is_file() else {}
    checksums = meta.get("sha256", {}) if isinstance(meta, dict) else None
    if not isinstance(checksums, dict):
        raise UserError(f"{path / folder.META} does not name the base model of its adapter")
    return Adapter(folder.base_of(path), rank, float(alpha), checksums, by_root)


@dataclass(frozen=True)
class _AdapterTensor:
    """A tensor in an adapter file. It has ``rows`` of gpt's tensor ``ours``."""

    ours: str
    shape: tuple[int, int]
    rows: slice
    roles: tuple[str, ...]


def _adapter_tensors(config: GPTConfig, rank: int, roles: Sequence[str]) -> dict[str, _AdapterTensor]:
    """Returns the adapter tensors of ``roles`` by their PEFT names, in the model's order. The parts of a fused tensor
    are in row order."""
    modules = {
        (each.ours, each.rows.start if each.rows else 0): name for name, each in hf.stored_tensors(config).items()
    }
    shapes, entries = lora.adapter_shapes(config, rank, roles), dict[str, _AdapterTensor]()
    for ours, matrices in lora.select_adapted(config, roles).items():
        for kind in "ab":
            end, name = 0, f"{ours}.{kind}"
            for each in matrices:
                rows = rank if kind == "a" else each.rows
                entry = _AdapterTensor(name, (rows, shapes[name][1]), slice(end, end := end + rows), each.roles)
                module = modules[f"{ours}.weight", each.start].removesuffix(".weight")
                entries[f"{_PREFIX}{module}.lora_{kind.upper()}.weight"] = entry
    return entries


def contents(adapter: Adapter, roles: Sequence[str], config: GPTConfig, ours: files.Arrays) -> dict[str, Any]:
    """Returns an adapter's files by name: its configuration, and its arrays by their PEFT names."""
    table = _adapter_tensors(config, adapter.rank, roles)
    modules = [name.removeprefix(_PREFIX).partition(".lora_")[0] for name in table]
    # The last two parts of a name distinguish "attn.c_proj" from "mlp.c_proj".
    targets = dict.fromkeys(".".join(module.split(".")[-2:]) for module in modules)
    base, _, revision = adapter.base.partition("@") if hub.is_remote(adapter.base) else (adapter.base, "", "")
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.removeprefix(hub.PREFIX),
        "revision": revision or None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.rank_stabilized,
        "target_modules": list(targets),
        "fan_in_fan_out": config.layout in lora.STORED_FUSED,
        "bias": "none",
        "inference_mode": True,
    }
    return {
        folder.ADAPTER: to_json(description),
        FILE: {name: np.asarray(ours[each.ours])[each.rows] for name, each in table.items()},
    }


def tensors(path: Path, config: GPTConfig, rank: int) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Reads an adapter's tensors, in float32 and by gpt's names, and returns them with the roles that they adapt.
    Validates names and shapes first. Raises `UserError` if tensors are missing."""
    if not (path / FILE).is_file():
        has_pickles = any(path.glob("*.bin"))
        hint = "it contains pickles, which gpt never opens: save it as safetensors first" if has_pickles else ""
        raise UserError(f"{path} has no {FILE}", hint)
    candidates = _adapter_tensors(config, rank, LORA_ROLES)
    shapes = {name: each.shape for name, each in candidates.items()}
    entries = files.find([path / FILE], shapes, "an adapter to its base")
    roles = {role for name in entries for role in candidates[name].roles}
    ordered_roles = tuple(role for role in LORA_ROLES if role in roles)
    expected = _adapter_tensors(config, rank, ordered_roles)
    files.check_all(path / FILE, expected or ["of any adapter"], entries)
    parts: dict[str, list[Tensor]] = {}
    for name, each in expected.items():
        parts.setdefault(each.ours, []).append(entries[name].mapped().float())
    return {name: torch.cat(pieces) for name, pieces in parts.items()}, ordered_roles
