"""The decoder and its parameter table."""

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import naive
import pytest
import torch
import torch.nn.functional as F
from conftest import slow
from models import loud
from torch import Tensor

from gpt.config.model import PRESETS, GPTConfig, RopeScaling
from gpt.model import decoder
from gpt.model.cache import KVCache, OneEach, Placement
from gpt.model.decoder import GPT
from gpt.model.loss import IGNORED, bits_per_byte, tied_cross_entropy, token_losses
from gpt.model.params import breakdown, counts, named_parameters
from gpt.system.errors import UserError

SMALL = GPTConfig(vocab_size=97, block_size=24, n_layer=3, n_head=4, n_embd=32)


SCALED = RopeScaling(8.0, 1.0, 4.0, 16)
KINDS = {
    "gpt2": GPTConfig(97, 150, 3, 4, 32),
    "windowed gpt2": GPTConfig(97, 150, 3, 4, 32, window=5),
    "rotary gpt2": GPTConfig(97, 150, 3, 4, 32, positions="rotary", n_inner=40, tied=False),
    "modern": GPTConfig.of("modern", 97, 150, 3, 4, 32),
    "windowed modern": GPTConfig.of("modern", 97, 150, 4, 4, 32, n_kv_head=2, window=7),
    "llama": GPTConfig.of("modern", 97, 150, 2, 6, 32, qk_norm=False, n_kv_head=3, head_dim=10, rope_scaling=SCALED),
    "mistral": GPTConfig.of("modern", 97, 150, 2, 4, 32, qk_norm=False, n_kv_head=1, window=9, window_layers=(0, 1)),
    "qwen2": GPTConfig.of("modern", 97, 150, 3, 4, 32, qk_norm=False, biases="qkv", window=1, window_layers=(2,)),
    "qwen3": GPTConfig.of("modern", 97, 150, 2, 4, 32, n_kv_head=2, head_dim=16, rope_base=1e6, tied=False),
}
KINDS["wide window"] = GPTConfig.of("modern", 97, 150, 2, 4, 32, window=70)
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


@EACH_KIND
def test_logits_match_the_definition(kind: str) -> None:
    model = loud(KINDS[kind], 4)
    idx = torch.randint(97, (1, 20))
    with torch.no_grad():
        expected = naive.logits(model, idx[0].tolist())
        assert torch.allclose(model(idx)[0], expected, atol=2e-5)  # torch's fused attention
        assert torch.allclose(
            torch.stack(attention_patterns(model, idx)), torch.stack(attention_patterns(model, idx)).tril()
        )
    assert torch.allclose(model(idx)[0], expected, atol=2e-5)  # plain attention
    assert torch.allclose(torch.func.functional_call(model.double(), {}, (idx,))[0].float(), expected, atol=2e-5)


def attention_patterns(model: GPT, idx: Tensor) -> list[Tensor]:
    x, rope = model.embed(idx)
    patterns = []
    for layer, block in enumerate(model.h):
        patterns.append(block.attn.pattern(block.ln_1(x), rope)[0])
        x = block(x, layer, rope)
    return patterns


@EACH_KIND
@pytest.mark.parametrize("sizes", [(7, 1, 6, 1, 5, 90, 1, 1, 38), (67, 68, 1, 14)])
def test_kv_cache_matches_a_full_forward_pass(kind: str, sizes: tuple[int, ...]) -> None:
    model = loud(KINDS[kind], 4)
    idx = torch.randint(97, (2, 150))
    cache = KVCache(model.config, 2, torch.device("cpu"), torch.float32)
    # Sizes cover a prompt, single steps, chunks, and a chunk wider than a window's columns.
    pieces, position = [], 0
    with torch.no_grad():
        expected = model(idx)
        for part in idx.split(sizes, dim=1):
            pieces.append(model(part, Placement(cache, [(0, [position, position], part.size(1))])))
            position += part.size(1)
    assert torch.allclose(torch.cat(pieces, dim=1), expected, atol=1e-4)
    if kind != "mistral":  # Other models have a layer that attends to the whole context.
        with pytest.raises(ValueError, match="155 tokens do not fit"):
            model(idx[:, :5], Placement(cache, [(0, [150, 150], 5)]))


@EACH_KIND
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_cache_rows_of_different_lengths_match_a_full_forward_pass(kind: str, fixed_shapes: bool) -> None:
    """Covers prompts in one pass, rewound positions, and copied rows."""
    model, lengths = loud(KINDS[kind], 4), [3, 80, 110]
    idx = torch.randint(97, (3, 150))
    cache = KVCache(model.config, 3, torch.device("cpu"), torch.float32)

    def logits_after(new: torch.Tensor) -> torch.Tensor:
        if not fixed_shapes or new.size(1) > 1:
            return model(new, Placement(cache, [(0, lengths, new.size(1))]))
        positions = torch.tensor(lengths)
        x, rope = model.embed_at(new, positions[:, None])
        return model.unembed(model.stack(x, rope, OneEach(cache, torch.arange(3), positions, 256, is_gathered=False)))

    def next_ids() -> torch.Tensor:
        return torch.stack([row[position : position + 1] for row, position in zip(idx, lengths, strict=True)])

    with torch.no_grad():
        full_logits = model(idx)
        packed = torch.cat([row[:length] for row, length in zip(idx, lengths, strict=True)])[None]
        logits = model(packed, Placement(cache, [(row, [0], length) for row, length in enumerate(lengths)]))
        expected = torch.cat([row[:length] for row, length in zip(full_logits, lengths, strict=True)])
        assert torch.allclose(logits[0], expected, atol=1e-4)
        for step, guesses in enumerate([0, 3, 20, 0, 1, 30]):
            logits = logits_after(torch.cat([next_ids(), torch.randint(97, (3, guesses))], dim=1))[:, 0]
            expected = torch.stack([row[position] for row, position in zip(full_logits, lengths, strict=True)])
            lengths = [length + 1 for length in lengths]
            assert torch.allclose(logits, expected, atol=1e-4), step
        for source, target in ((1, 0), (2, 1)):
            cache.copy(source, target, 0, lengths[source], max(lengths))
            idx[target], lengths[target] = idx[source], lengths[source]
        expected = torch.stack([row[position] for row, position in zip(model(idx), lengths, strict=True)])
        assert torch.allclose(logits_after(next_ids())[:, 0], expected, atol=1e-4)


def test_layers_keep_their_windows_past_the_context() -> None:
    """Rotary positions continue past the context."""
    config = GPTConfig.of("modern", 97, 16, 2, 2, 16, window=4)
    model = loud(config, 4)
    longer = GPT(replace(config, block_size=60, window=4)).eval()
    longer.load_state_dict(model.state_dict())
    idx = torch.randint(97, (1, 60))
    cache = KVCache(config, 1, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        actual = torch.cat(
            [model(idx[:, position : position + 1], Placement(cache, [(0, [position], 1)])) for position in range(60)],
            dim=1,
        )
        for block, window in zip(longer.h, (16, 4), strict=True):
            block.attn.window = window
        assert torch.allclose(actual, longer(idx), atol=1e-4)


def test_initialization_matches_gpt2() -> None:
    torch.manual_seed(5)
    model = GPT(GPTConfig(512, 256, 8, 4, 256))
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.wpe.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for block in model.h:
        assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.02)
        assert block.attn.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)  # Scaled by 1/√(2·8)
        assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
        assert block.attn.c_attn.bias.abs().max() == 0
        assert block.ln_1.weight.min() == block.ln_1.weight.max() == 1


def test_dropout_is_active_only_in_training() -> None:
    torch.manual_seed(6)
    model = GPT(GPTConfig(97, 24, 2, 4, 32, dropout=0.5))
    idx = torch.randint(97, (1, 24))
    assert not torch.equal(model(idx), model(idx))
    model.eval()
    assert torch.equal(model(idx), model(idx))


@pytest.mark.filterwarnings("default")  # Compiler warnings are not errors here.
@pytest.mark.parametrize(
    ("chunk", "padded", "compiled"),
    [*itertools.product([0, 1, 3, 10, 64], [False, True], [False]), (3, True, True), slow(0, True, True)],
)
def test_loss_and_gradients_match_autograd(
    chunk: int, padded: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference computes all logits together in float64."""
    torch.manual_seed(3)
    x, weight = torch.randn(2, 5, 4, dtype=torch.float64), torch.randn(11, 4, dtype=torch.float64)
    targets = torch.randint(11, (2, 5))
    targets[1, 2] = IGNORED

    def gradients(loss: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (x, weight)]
        total = loss(*leaves, targets) / 7
        return [total.detach(), *torch.autograd.grad(total, leaves)]

    def reference(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((x @ weight.t()).flatten(0, 1), targets.flatten(), reduction="sum")

    monkeypatch.setattr("gpt.model.memory.ALIGNED_ON", ("cpu",) if padded else ())
    torch._dynamo.reset()
    loss = torch.compile(tied_cross_entropy, backend="aot_eager", fullgraph=True) if compiled else tied_cross_entropy
    chunked_loss = partial(loss, chunk=chunk)
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        for actual, expected in zip(gradients(chunked_loss, dtype), gradients(reference, torch.float64), strict=True):
            assert torch.allclose(actual.double(), expected, atol=tolerance)


def test_half_precision_loss_does_not_overflow() -> None:
    """The gradients of 2¹⁷ equal positions sum to more than float16's maximum."""
    weight = torch.zeros(3, 2, requires_grad=True)
    x = torch.ones(1, 2**17, 2, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss = tied_cross_entropy(x, weight, torch.zeros(1, 2**17, dtype=torch.long))
    (grad,) = torch.autograd.grad(loss / 2**17, weight)
    assert grad.flatten().tolist() == pytest.approx([-2 / 3] * 2 + [1 / 3] * 4, rel=1e-3)


def test_token_losses_match_the_definition() -> None:
    torch.manual_seed(7)
    logits, targets = torch.randn(2, 5, 11), torch.randint(11, (2, 5))
    expected = [
        math.log(sum(math.exp(logits[b, t, v]) for v in range(11))) - logits[b, t, targets[b, t]].item()
        for b in range(2)
        for t in range(5)
    ]
    assert token_losses(logits.flatten(0, 1), targets.flatten()).tolist() == pytest.approx(expected, rel=1e-4)
    targets[0, 0] = -100
    assert token_losses(logits[0], targets[0])[0] == 0
    assert bits_per_byte(math.log(2) * 80, 10) == pytest.approx(8)


SHAPES = {name: preset.model for name, preset in PRESETS.items()} | KINDS


@pytest.mark.parametrize("name", SHAPES)
def test_parameter_table_matches_the_built_model(name: str) -> None:
    """The meta device needs no memory for 175B parameters."""
    config = SHAPES[name]
    with torch.device("meta"):
        model = GPT(config)
    table = named_parameters(config)
    built_shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert list(built_shapes.items()) == [(name, p.shape) for name, p in table.items()]
    assert model.unembed(torch.empty(1, config.n_embd, device="meta")).shape == (1, config.vocab_size)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    norms = {n for n, module in model.named_modules() if isinstance(module, torch.nn.LayerNorm | decoder.RMSNorm)}
    assert {name.removesuffix(".weight") for name, p in table.items() if p.is_matrix} == linear
    assert {name for name, p in table.items() if p.kind == "bias"} == {f"{name}.bias" for name in linear} & set(
        built_shapes
    )
    assert {name.rpartition(".")[0] for name, p in table.items() if p.kind == "norm"} == norms
    fused = {"attn.c_attn", *(["mlp.c_fc"] if config.mlp == "swiglu" else [])}
    assert {p.name.rpartition(".")[0] for p in table.values() if p.fused} == fused
    assert all(sum(p.fused) == p.shape[0] for p in table.values() if p.fused)
    parts = breakdown(config)
    assert sum(counts(config).values()) == sum(p.numel() for p in model.parameters()) == parts.trainable
    assert parts.trainable == parts.total_weights - parts.tied + parts.positions + parts.biases + parts.layer_norms
    assert parts.total_weights == sum(row.parameters for row in parts.rows)


PAPER_TOTALS = {  # Parameter counts of GPT-2, and of GPT-3 (table 2.1 of its paper)
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
}  # fmt: skip
PAPER_MILLIONS = {
    "gpt3-125m": 125, "gpt3-350m": 356, "gpt3-760m": 760, "gpt3-1.3b": 1320, "gpt3-2.7b": 2650, "gpt3-6.7b": 6660,
    "gpt3-13b": 12850, "gpt3-175b": 174600,
}  # fmt: skip


def test_parameter_totals_match_the_papers() -> None:
    for name, total in PAPER_TOTALS.items():
        assert breakdown(PRESETS[name].model).trainable == total
    for name, millions in PAPER_MILLIONS.items():
        assert breakdown(PRESETS[name].model).trainable / 1e6 == pytest.approx(millions, rel=0.01)
    assert breakdown(PRESETS["gpt3-175b"].model).total_weights == 175_181_291_520


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_embd": 33}, "n_embd 33 is not divisible by n_head 4"),
        ({"n_layer": 0}, "n_layer is 0"),
        ({"block_size": 2.5}, "block_size is 2.5"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"positions": "rotery"}, 'there is no positions "rotery"'),
        ({"n_head": 1, "n_embd": 33, "positions": "rotary"}, "even width of a head"),
    ],
)
def test_invalid_shapes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(SMALL, **change)  # type: ignore[arg-type]
