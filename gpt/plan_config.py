"""Options of ``gpt params`` beside the shape: the cost of training and sampling. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from gpt.errors import UserError
from gpt.peaks import KINDS, find_kind
from gpt.settings import check_options, option

_COST, _DEVICES, _STEP = "What it costs", "Devices", "How a step is computed"


@dataclass(frozen=True)
class PlanConfig:
    """Options of ``gpt params``. Raises `UserError` for values that mean nothing."""

    memory: bool = option(False, "What a rank holds in training, and what fits; what sampling takes.", panel=_COST)
    flops: bool = option(False, "Floating-point operations a token, trained on and sampled.", panel=_COST)
    time: bool = option(False, "Days of training.", panel=_COST)
    kind: str = option("h100-80gb", "One of " + ", ".join(KINDS) + ", or cpu: this machine.", panel=_DEVICES)
    devices: int = option(1, "How many there are; a process each.", panel=_DEVICES, low=1, high=2**20)
    tokens: float | None = option(
        None, "To train on, as 300e9.", panel=_DEVICES, shown="20 a parameter", low=1, high=1e18
    )
    mfu: float = option(
        0.4, "Share of the devices' peak that the model's operations reach; what is computed again counts as lost.",
        panel=_DEVICES, low=1e-6, high=1,
    )  # fmt: skip
    dtype: Literal["bfloat16", "float16", "float32"] = option(
        "bfloat16", "Of matrix products; weights, gradients and optimizer state are float32.", panel=_STEP
    )
    optimizer: Literal["muon", "adamw"] = option("muon", "As `gpt train` has it.", panel=_STEP)
    batch_tokens: int | None = option(
        None, "Tokens a step, over all ranks.", panel=_STEP, shown="by preset", low=1, high=2**40
    )
    micro_batch: int | None = option(
        None, "Sequences at once on a rank.", panel=_STEP, shown="the most that fit", low=1
    )
    shard: Literal["auto", "none", "full"] = option(
        "auto", "Whether ranks share out parameters, gradients and optimizer state; auto: where it must be.",
        panel=_STEP,
    )  # fmt: skip
    tensor: int | None = option(
        None, "Ranks that share each sequence.", panel=_STEP, shown="the least that fits", low=1, high=2**20
    )
    recompute: Literal["auto", "on", "off"] = option(
        "auto", "Whether blocks are computed again for their gradient; auto: where it must be.", panel=_STEP
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.kind != "cpu":
            find_kind(self.kind)
        if self.tensor is not None and self.devices % self.tensor:
            raise UserError(
                f"--tensor {self.tensor} does not divide the {self.devices:,} devices",
                "each sequence is shared by so many of them: take a divisor",
            )
