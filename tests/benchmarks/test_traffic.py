"""`benchmarks.traffic` on a compiled step of decoding: it moves the weights and the cache, and nothing else."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from conftest import more
from models import push

from benchmarks.traffic import count
from gpt.config import GPTConfig
from gpt.decoding import weights
from gpt.decoding.context import Context
from gpt.decoding.logits import Filters
from gpt.decoding.token_step import next_tokens
from gpt.device import Compute
from gpt.model.decoder import GPT
from gpt.model.memory import Setup
from gpt.sample_config import SampleConfig

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns of its own doings


def decoder(arch: Any, dtype: torch.dtype, block_size: int = 128) -> tuple[GPT, Compute]:
    torch.manual_seed(0)
    positions: Any = "rotary" if arch == "modern" else "learned"
    compute = Compute(torch.device("cpu"), dtype)
    model = GPT(GPTConfig.of(arch, 50, block_size, 2, 2, 32, positions=positions)).eval()
    return weights.prepare(model, compute, packed=False), compute


@pytest.mark.slow
@pytest.mark.parametrize("arch", [more("gpt2"), "modern"])
def test_a_step_moves_weights_and_cache_and_nothing_else(arch: str) -> None:
    """Were there one tensor for all layers' keys, each layer's would be written by copying it."""
    model, compute = decoder(arch, torch.float32)
    context = Context(model, compute, 2, 128, partial(torch.compile(next_tokens, dynamic=False), model))
    push(context, [1, 2, 3], [1, 2, 3])
    [step] = count(lambda: context.next_tokens(context.slots, Filters(SampleConfig(greedy=True), ())))
    read = sum(p.nbytes for name, p in model.named_parameters() if name != "wpe.weight") + context.cache.nbytes
    assert 0.95 * read <= step.bytes <= 1.15 * read, step.kernels[:9]


@pytest.mark.slow
def test_a_training_step_on_an_h100_moves_little() -> None:
    """GPT-2 124M's block, loss with the last norm, and update of 16 × 1,024 tokens, by generated code: logits are read
    and written five times in the dtype of products, the residual stream has two bytes a number, and the gradients that
    GELU's and attention's kernels write are not read again for the biases."""
    pytest.importorskip("triton")
    from benchmarks import h100

    config = h100._shape("gpt2")
    with h100.h100():
        block, loss = h100._block(config, 16), h100._loss(config, Setup(16))
        modern = h100._block(h100._shape("gpt2, modern"), 16)
        update = h100._optimizer(replace(config, n_layer=2))
    assert (block.bytes / 1e9, block.launches) == (pytest.approx(2.80, rel=0.02), 45)
    assert (modern.bytes / 1e9, modern.launches) == (pytest.approx(3.07, rel=0.02), 40)
    assert (loss.bytes / 1e9, loss.launches) == (pytest.approx(9.19, rel=0.02), 13)
    matrices = 2 * 12 * 768**2 * 4
    assert update.bytes < 25 * matrices + 28 * 1.1 * (50_257 + 1024) * 768 * 2
