"""Options of ``gpt params`` beside the shape: the cost of training and sampling. Imports no torch."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from gpt.errors import UserError
from gpt.peaks import KINDS, find_kind
from gpt.settings import check_options, option

_PANELS = ("Devices", "How a step is computed")
_devices, _step = (partial(option, panel=name) for name in _PANELS)


@dataclass(frozen=True)
class PlanConfig:
    """Options of ``gpt params``. Raises `UserError` for values that mean nothing."""

    kind: str = _devices("h100-80gb", "One of " + ", ".join(KINDS) + ", or cpu: this machine.")
    devices: int = _devices(1, "How many there are; a process each.", low=1, high=2**20)
    tokens: float | None = _devices(None, "To train on, as 300e9.", shown="20 a parameter", low=1, high=1e18)
    mfu: float = _devices(
        0.4, "Share of the devices' peak that the model's operations reach; what is computed again counts as lost.",
        low=1e-6, high=1,
    )  # fmt: skip
    dtype: Literal["bfloat16", "float16", "float32"] = _step(
        "bfloat16", "Of matrix products; weights, gradients and optimizer state are float32."
    )
    optimizer: Literal["muon", "adamw"] = _step("muon", "As `gpt train` has it.")
    batch_tokens: int | None = _step(None, "Tokens a step, over all ranks.", shown="by preset", low=1, high=2**40)
    micro_batch: int | None = _step(None, "Sequences at once on a rank.", shown="the most that fit", low=1)
    shard: Literal["auto", "none", "full"] = _step(
        "auto", "Whether ranks share out parameters, gradients and optimizer state; auto: where it must be."
    )
    tensor: int | None = _step(None, "Ranks that share each sequence.", shown="the least that fits", low=1, high=2**20)
    recompute: Literal["auto", "on", "off"] = _step(
        "auto", "Whether blocks are computed again for their gradient; auto: where it must be."
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
