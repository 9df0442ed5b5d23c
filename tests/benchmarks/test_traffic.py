"""Memory traffic of compiled steps, counted by `benchmarks.traffic`."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from conftest import more
from models import push

from benchmarks.traffic import count
from gpt.config.device import Compute
from gpt.config.model import GPTConfig
from gpt.config.sample import SampleConfig
from gpt.decoding.context import Context
from gpt.decoding.logits import Filters
from gpt.decoding.token_step import next_tokens
from gpt.model.decoder import GPT
from gpt.model.memory import Setup

pytestmark = pytest.mark.filterwarnings("default")  # The compiler causes warnings.


def make_decoder(arch: Any, dtype: torch.dtype, block_size: int = 128) -> tuple[GPT, Compute]:
    torch.manual_seed(0)
    positions: Any = "rotary" if arch == "modern" else "learned"
    compute = Compute(torch.device("cpu"), dtype)
    model = GPT(GPTConfig.of(arch, 50, block_size, 2, 2, 32, positions=positions)).eval()
    return model, compute


@pytest.mark.slow
@pytest.mark.parametrize("arch", [more("gpt2"), "modern"])
def test_decoding_step_moves_only_weights_and_cache(arch: str) -> None:
    """If all layers shared one key tensor, writing one layer's keys would copy the whole tensor."""
    model, compute = make_decoder(arch, torch.float32)
    context = Context(model, compute, 2, 128, partial(torch.compile(next_tokens, dynamic=False), model))
    push(context, [1, 2, 3], [1, 2, 3])
    [step] = count(lambda: context.next_tokens(context.slots, Filters(SampleConfig(greedy=True), ())))
    read_bytes = sum(p.nbytes for name, p in model.named_parameters() if name != "wpe.weight") + context.cache.nbytes
    assert 0.95 * read_bytes <= step.bytes <= 1.15 * read_bytes, step.kernels[:9]


@pytest.mark.slow
def test_training_step_has_the_expected_traffic_on_an_h100() -> None:
    """Checks the generated code for 16 × 1,024 tokens of GPT-2 124M: a block, the last norm and loss, and the update.

    Logits are read and written five times in bfloat16. The residual stream has two bytes per element. Bias gradients do
    not reread gradients that the GELU and attention kernels write.
    """
    pytest.importorskip("triton")
    from benchmarks import h100

    config = h100._find_shape("gpt2")
    with h100.h100():
        block, loss = h100._block(config, 16), h100._loss(config, Setup(16))
        modern = h100._block(h100._find_shape("gpt2, modern"), 16)
        update = h100._optimizer(replace(config, n_layer=2))
    assert (block.bytes / 1e9, block.launches) == (pytest.approx(2.80, rel=0.02), 45)
    assert (modern.bytes / 1e9, modern.launches) == (pytest.approx(3.07, rel=0.02), 40)
    assert (loss.bytes / 1e9, loss.launches) == (pytest.approx(9.19, rel=0.02), 13)
    matrices = 2 * 12 * 768**2 * 4
    assert update.bytes < 25 * matrices + 28 * 1.1 * (50_257 + 1024) * 768 * 2
