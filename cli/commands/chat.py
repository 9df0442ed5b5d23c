"""``gpt chat``."""

from typing import Annotated, Any

from gpt.config.sample import SampleConfig

from ..options import Device, Dtype, Model, Seed, Threads, option, takes
from .interactive import UNUSED, converse, resolve_constraint


@takes(SampleConfig, without=UNUSED)
def chat(
    settings: SampleConfig,
    given: dict[str, Any],
    model: Model = None,
    system: Annotated[
        str, option("--system", metavar="TEXT", help="Begin the conversation with this system message")
    ] = "",
    no_think: Annotated[bool, option("--no-think", help="Answer without reasoning first, if the template can")] = False,
    seed: Seed = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """Talk with a model. A model without a chat template continues your text.

    gpt chat
    gpt chat -m hf:Qwen/Qwen3-0.6B --system "Answer in one sentence."
    """
    variables = {"enable_thinking": False} if no_think else {}
    settings = resolve_constraint(settings, given)
    converse(settings, given, model, seed, device, dtype, threads, system, variables)
