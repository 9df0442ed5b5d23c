"""The decoder against transformers' GPT-2, and against the definitions."""

import cmath
import itertools
import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from models import ours_with
from transformers import GPT2Config, GPT2LMHeadModel

from gpt.config import PRESETS, Arch, GPTConfig, Positions
from gpt.errors import UserError
from gpt.model import decoder
from gpt.model.cache import KVCache
from gpt.model.decoder import GPT, sine_table
from gpt.model.loss import bits_per_byte, tied_cross_entropy, token_losses
from gpt.model.params import breakdown, counts, named_parameters
from gpt.runs import hf

SMALL = GPTConfig(vocab_size=97, block_size=24, n_layer=3, n_head=4, n_embd=32)


def theirs_of(config: GPTConfig) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config.from_dict(hf.to_hf_config(config, 0))).eval()


@pytest.mark.parametrize("heads", [1, 4])
def test_logits_equal_transformers(heads: int) -> None:
    config = GPTConfig(vocab_size=97, block_size=24, n_layer=3, n_head=heads, n_embd=32)
    torch.manual_seed(1)
    theirs = theirs_of(config)
    for parameter in theirs.parameters():  # biases and LayerNorms at their initial 0 and 1 would hide a mix-up
        parameter.data += 0.3 * torch.randn_like(parameter)
    idx = torch.randint(97, (2, 24))
    with torch.no_grad():
        assert torch.allclose(ours_with(theirs, config)(idx), theirs(idx).logits, atol=1e-4, rtol=0)


def test_gradients_equal_transformers() -> None:
    torch.manual_seed(2)
    theirs = theirs_of(SMALL)
    ours = ours_with(theirs, SMALL)
    idx = torch.randint(97, (2, 24))
    theirs(idx, labels=idx).loss.backward()
    (tied_cross_entropy(ours.trunk(idx[:, :-1]), ours.wte.weight, idx[:, 1:]) / 46).backward()
    # The tied embedding gets its gradient from both ends.
    assert torch.allclose(ours.wte.weight.grad, theirs.transformer.wte.weight.grad, atol=1e-6)  # type: ignore
    assert torch.allclose(ours.h[1].mlp.c_fc.weight.grad, theirs.transformer.h[1].mlp.c_fc.weight.grad.t(), atol=1e-6)


def test_position_sees_only_what_came_before() -> None:
    torch.manual_seed(3)
    model = GPT(SMALL).eval()
    idx = torch.randint(97, (1, 24))
    changed = idx.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 97
    with torch.no_grad():
        before, after = model(idx), model(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.allclose(before[0, 10:], after[0, 10:])


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
def test_cache_equals_no_cache(positions: str, arch: str) -> None:
    config = GPTConfig.of(arch, 97, 24, 3, 4, 32, positions=positions)  # type: ignore[arg-type]
    torch.manual_seed(4)
    model = GPT(config).eval()
    idx = torch.randint(97, (2, 20))
    cache = KVCache(config, 2, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        whole = model(idx)
        # A prompt, one step, several at once, and steps again.
        pieces = [model(part, cache) for part in (idx[:, :7], idx[:, 7:8], idx[:, 8:14], idx[:, 14:15], idx[:, 15:])]
    assert torch.allclose(torch.cat(pieces, dim=1), whole, atol=1e-5)
    assert cache.lengths.tolist() == [20, 20]
    with pytest.raises(ValueError, match="25 positions"):
        model(idx[:, :5], cache)


def test_plain_attention_is_the_fused_one() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(20, 2, 9, 8, requires_grad=True) for _ in range(3))
    plain = decoder.attend(q, k, v, None, 0.0, None)
    fused = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(plain, fused, atol=1e-6)
    weight = torch.randn_like(plain)
    ours = torch.autograd.grad((plain * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((fused * weight).sum(), (q, k, v))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def test_rotary_positions_turn_pairs_by_their_angle() -> None:
    """By complex numbers: the pair (i, i + D/2) at position p is multiplied by e^(i p / 10000^(2i/D))."""
    x = torch.randn(1, 1, 5, 8, dtype=torch.float64)
    turned = decoder.rotate(x, decoder.rotary_table(5, 8).double())
    for p, i in itertools.product(range(5), range(4)):
        by_hand = complex(x[0, 0, p, i], x[0, 0, p, i + 4]) * cmath.exp(1j * p / 10_000 ** (2 * i / 8))
        assert complex(turned[0, 0, p, i], turned[0, 0, p, i + 4]) == pytest.approx(by_hand, abs=1e-6)


def test_modern_is_what_it_says() -> None:
    """One block, one position after the other, by its definition."""
    config = GPTConfig.of("modern", 11, 6, 1, 2, 8)
    torch.manual_seed(0)
    model = GPT(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    idx = torch.randint(11, (1, 6))
    block, norm = model.h[0], torch.nn.functional.layer_norm
    x = model.wte.weight[idx[0]]
    h = norm(x, (8,), block.ln_1.weight, block.ln_1.bias) @ block.attn.c_attn.weight.T
    heads = []
    for head in range(2):
        q, k, v = (h[:, 8 * part + 4 * head : 8 * part + 4 * head + 4] for part in range(3))
        q, k = (t / t.square().mean(-1, keepdim=True).add(torch.finfo(t.dtype).eps).sqrt() for t in (q, k))
        rope = decoder.rotary_table(6, 4)
        q, k = (decoder.rotate(t[None, None], rope)[0, 0] for t in (q, k))
        scores = (decoder.QK_SCALE / 2 * q @ k.T).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v)
    x = x + torch.cat(heads, -1) @ block.attn.c_proj.weight.T
    h = norm(x, (8,), block.ln_2.weight, block.ln_2.bias) @ block.mlp.c_fc.weight.T
    x = x + h.clamp(min=0).square() @ block.mlp.c_proj.weight.T
    logits = norm(x, (8,), model.ln_f.weight, model.ln_f.bias) @ model.wte.weight.T
    with torch.no_grad():
        assert torch.allclose(model(idx)[0], logits, atol=1e-5)


def test_sine_table_is_the_papers() -> None:
    table = sine_table(50, 16)
    for p in (0, 1, 7, 49):
        for i in range(8):
            angle = p / 10_000 ** (2 * i / 16)
            assert table[p, 2 * i] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[p, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-6)


def test_sine_table_is_fixed() -> None:
    model = GPT(GPTConfig(97, 24, 1, 2, 32, positions="sinusoidal"))
    assert not any("sine" in name or "wpe" in name for name, _ in model.named_parameters())
    assert torch.allclose(model.position_table(), 0.02 * sine_table(24, 32))


def test_initialization_is_gpt2s() -> None:
    torch.manual_seed(5)
    model = GPT(GPTConfig(512, 256, 8, 4, 256))
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.wpe.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for block in model.h:
        assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.02)
        assert block.attn.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)  # 1/√(2·8)
        assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
        assert block.attn.c_attn.bias.abs().max() == 0
        assert block.ln_1.weight.min() == block.ln_1.weight.max() == 1


def test_dropout_only_in_training() -> None:
    torch.manual_seed(6)
    model = GPT(GPTConfig(97, 24, 2, 4, 32, dropout=0.5))
    idx = torch.randint(97, (1, 24))
    assert not torch.equal(model(idx), model(idx))
    model.eval()
    assert torch.equal(model(idx), model(idx))


@pytest.mark.parametrize("chunk", [0, 1, 3, 10, 64])
def test_a_loss_in_chunks_and_of_a_filled_up_vocabulary_is_the_same(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    table, targets = torch.randn(11, 4), torch.randint(11, (2, 5))
    targets[1, 2] = -100

    def gradients(chunk: int) -> list[torch.Tensor]:
        x, weight = torch.linspace(-1, 1, 40).view(2, 5, 4).requires_grad_(), table.clone().requires_grad_()
        loss = tied_cross_entropy(x, weight, targets, chunk)
        return [loss.detach(), *torch.autograd.grad(loss, (x, weight))]

    whole = gradients(0)
    monkeypatch.setattr("gpt.model.loss.ALIGNED_ON", ("cpu",))
    for one, other in zip(whole, gradients(chunk), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_loss_equals_its_definition() -> None:
    torch.manual_seed(7)
    logits, targets = torch.randn(2, 5, 11), torch.randint(11, (2, 5))
    naive = [
        math.log(sum(math.exp(logits[b, t, v]) for v in range(11))) - logits[b, t, targets[b, t]].item()
        for b in range(2)
        for t in range(5)
    ]
    assert tied_cross_entropy(logits, torch.eye(11), targets).item() == pytest.approx(sum(naive), rel=1e-5)
    assert token_losses(logits, targets).flatten().tolist() == pytest.approx(naive, rel=1e-4)
    targets[0, 0] = -100
    assert token_losses(logits, targets)[0, 0] == 0
    assert bits_per_byte(math.log(2) * 80, 10) == pytest.approx(8)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("positions", get_args(Positions))
@pytest.mark.parametrize("arch", get_args(Arch))
def test_the_table_is_the_built_model(name: str, arch: Arch, positions: Positions) -> None:
    """Names in order, shapes, what is trained, and what each kind is; on the meta device, so that 175B fits too."""
    config = replace(PRESETS[name].model, arch=arch, positions=positions)
    with torch.device("meta"):
        model = GPT(config)
    table = named_parameters(config)
    built = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert list(built.items()) == [(name, p.shape) for name, p in table.items() if p.trained]
    fixed = {name: p.shape for name, p in table.items() if not p.trained}
    assert fixed == ({"wpe.weight": tuple(model.sine.shape)} if positions == "sinusoidal" else {})
    assert model.unembed(torch.empty(1, config.n_embd, device="meta")).shape == (1, config.vocab_size)  # it is tied
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    norms = {name for name, module in model.named_modules() if isinstance(module, torch.nn.LayerNorm)}
    assert {name.removesuffix(".weight") for name, p in table.items() if p.is_matrix} == linear
    assert {name for name, p in table.items() if p.kind == "bias"} == {f"{name}.bias" for name in linear} & set(built)
    assert {name.rpartition(".")[0] for name, p in table.items() if p.kind == "norm"} == norms
    assert {p.name for p in table.values() if p.fused} == {"attn.c_attn.weight", "attn.c_attn.bias"} & {
        p.name for p in table.values()
    }
    assert all(sum(p.fused) == p.shape[0] for p in table.values() if p.fused)
    assert sum(counts(config).values()) == sum(p.numel() for p in model.parameters()) == breakdown(config).trainable


@pytest.mark.parametrize("positions", get_args(Positions))
@pytest.mark.parametrize("arch", get_args(Arch))
def test_breakdown_of_odd_shapes(positions: Positions, arch: Arch) -> None:
    config = GPTConfig.of(arch, 101, 7, 3, 3, 18, positions=positions)
    parts = breakdown(config)
    assert parts.trainable == sum(p.numel() for p in GPT(config).parameters())
    assert parts.trainable == parts.total_weights - parts.tied + parts.positions + parts.biases + parts.layer_norms
    assert parts.total_weights == sum(row.parameters for row in parts.rows)


@pytest.mark.parametrize("name", PRESETS)
def test_breakdown_equals_transformers_count(name: str) -> None:
    """Every preset, 175B too: on the meta device nothing is allocated."""
    config = PRESETS[name].model
    with torch.device("meta"):
        theirs = GPT2LMHeadModel(GPT2Config.from_dict(hf.to_hf_config(config, 0)))
        ours = GPT(config)
    assert theirs.num_parameters() == breakdown(config).trainable == sum(p.numel() for p in ours.parameters())


PAPER_TOTALS = {  # GPT-2's own counts; table 2.1 of the GPT-3 paper, in millions
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
}  # fmt: skip
PAPER_MILLIONS = {
    "gpt3-125m": 125, "gpt3-350m": 356, "gpt3-760m": 760, "gpt3-1.3b": 1320, "gpt3-2.7b": 2650, "gpt3-6.7b": 6660,
    "gpt3-13b": 12850, "gpt3-175b": 174600,
}  # fmt: skip


def test_totals_are_the_papers() -> None:
    for name, total in PAPER_TOTALS.items():
        assert breakdown(PRESETS[name].model).trainable == total
    for name, millions in PAPER_MILLIONS.items():
        assert breakdown(PRESETS[name].model).trainable / 1e6 == pytest.approx(millions, rel=0.01)
    assert breakdown(PRESETS["gpt3-175b"].model).total_weights == 175_181_291_520


def test_rows_are_the_gpt3_tables() -> None:
    rows = {row.matrix: (row.dimensions, row.parameters) for row in breakdown(PRESETS["gpt3-175b"].model).rows}
    assert rows == {
        "Embedding": ("12,288 × 50,257", 617_558_016),
        "Key": ("(128 × 12,288) × 96 × 96", 14_495_514_624),
        "Query": ("(128 × 12,288) × 96 × 96", 14_495_514_624),
        "Value-Up": ("(128 × 12,288) × 96 × 96", 14_495_514_624),
        "Value-Down": ("(12,288 × 128) × 96 × 96", 14_495_514_624),
        "Up-Projection": ("(49,152 × 12,288) × 96", 57_982_058_496),
        "Down-Projection": ("(12,288 × 49,152) × 96", 57_982_058_496),
        "Unembedding": ("50,257 × 12,288", 617_558_016),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_embd": 33}, "n_embd 33 is not divisible by n_head 4"),
        ({"n_layer": 0}, "n_layer is 0"),
        ({"n_layer": -1}, "n_layer is -1"),
        ({"n_layer": True}, "n_layer is True"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({"block_size": 2.5}, "block_size is 2.5"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"positions": "rotery"}, "unknown positions"),
        ({"n_head": 1, "n_embd": 33, "positions": "sinusoidal"}, "even n_embd"),
    ],
)
def test_shapes_that_cannot_be_built(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GPTConfig(**{**SMALL.__dict__, **change})  # type: ignore[arg-type]
