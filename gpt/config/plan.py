"""The settings of ``gpt params``. Imports no torch."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from gpt.config.model import Arch, Positions
from gpt.config.settings import check_options, option
from gpt.system.peaks import find_kind

SHAPE = "Shape"
_shape, _devices, _step = (partial(option, panel=name) for name in (SHAPE, "Devices", "Training step"))


@dataclass(frozen=True)
class PlanConfig:
    """The model's shape, and what training and sampling cost. Raises `UserError` for invalid values."""

    n_layer: int | None = _shape(None, "Transformer blocks", level="basic")
    n_head: int | None = _shape(None, "Attention heads per block", level="basic")
    n_kv_head: int | None = _shape(None, "Key/value heads per block")
    head_dim: int | None = _shape(None, "Width of a head")
    n_embd: int | None = _shape(None, "Embedding width", level="basic")
    n_inner: int | None = _shape(None, "Hidden width of the MLP")
    window: int | None = _shape(None, "Sliding window of layers 1, 3, 5 …")
    block_size: int | None = _shape(None, "Context length in tokens")
    vocab_size: int | None = _shape(None, "Vocabulary size")
    positions: Positions | None = _shape(None, "Position encoding; only learned ones have parameters")
    arch: Arch | None = _shape(None, "Kind of norms, MLP, positions and biases")
    kind: str = _devices(
        "h100-80gb", "Device type, such as rtx-4090-24gb, or cpu (this machine)", metavar="NAME", level="basic"
    )
    devices: int = _devices(1, "Number of devices, with one process each", level="basic", low=1, high=2**20)
    tokens: float | None = _devices(
        None, "Tokens to train on, such as 300e9", shown="20 per parameter", level="basic", low=1, high=1e18
    )
    mfu: float = _devices(0.4, "Model FLOPs utilization; recomputed FLOPs do not count", low=1e-6, high=1)
    dtype: Literal["bfloat16", "float16", "float32"] = _step(
        "bfloat16", "Dtype of matrix products; weights and optimizer state are float32"
    )
    optimizer: Literal["muon", "adamw"] = _step("muon", "Optimizer, as in `gpt train`")
    batch_tokens: int | None = _step(
        None, "Tokens per step, over all ranks", shown="from the preset", low=1, high=2**40
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.kind != "cpu":
            find_kind(self.kind)
