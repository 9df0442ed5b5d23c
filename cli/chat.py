"""``gpt chat``."""

from typing import Any

from gpt.sample_config import SampleConfig

from .interactive import converse
from .options import Base, Device, Dtype, Model, Seed, Threads, takes
from .sample import check_numbers, with_constraint


@takes(SampleConfig, without=("batch", "logprobs", "echo_logprobs"))
def chat(
    settings: SampleConfig,
    given: dict[str, Any],
    model: Model = None,
    base: Base = None,
    seed: Seed = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """Talk with a model, as `gpt sample -i` does. A model without a chat template continues each text."""
    check_numbers(1, seed)
    converse(with_constraint(settings, given), model, base, seed, device, dtype, threads)
