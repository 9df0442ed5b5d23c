"""Memory traffic of compiled steps, counted by `benchmarks.traffic`."""

from dataclasses import replace

import pytest

from gpt.model.memory import Setup

pytestmark = pytest.mark.filterwarnings("default")  # The compiler causes warnings.


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
