"""``gpt chat``."""

from typing import Any

from gpt.config.sample import SampleConfig

from ..options import Base, Device, Dtype, Model, Seed, Threads, takes
from .interactive import UNUSED, converse, resolve_constraint
from .sample import check_numbers


@takes(SampleConfig, without=UNUSED)
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
    """Talk with a model. A model without a chat template continues your text.

    gpt chat
    gpt chat -m hf:Qwen/Qwen3-0.6B
    """
    check_numbers(1, seed)
    converse(resolve_constraint(settings, given), given, model, base, seed, device, dtype, threads)
