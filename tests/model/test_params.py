"""Counts of parameters, FLOPs and cache bytes."""

import json
import random
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import transformers
from conftest import Gpt, one_line_of_what_and_what_next

from gpt.config.model import PRESETS, GPTConfig
from gpt.model.cache import KVCache
from gpt.model.decoder import GPT
from gpt.model.params import WINDOW_SLACK, breakdown, cache_bytes, flops_per_token, flops_sampled

# Values from config.json on the Hub
COLUMNS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
FAMILIES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "smollm2-135m": ("Llama", (49152, 576, 1536, 30, 9, 3, 8192, True), {}),
    "llama-3.2-1b": ("Llama", (128256, 2048, 8192, 16, 32, 8, 131072, True), {"head_dim": 64}),
    "mistral-7b": ("Mistral", (32000, 4096, 14336, 32, 32, 8, 32768, False), {"sliding_window": 4096}),
    "qwen2.5-0.5b": ("Qwen2", (151936, 896, 4864, 24, 14, 2, 32768, True), {}),
    "qwen3-0.6b": ("Qwen3", (151936, 1024, 3072, 28, 16, 8, 40960, True), {"head_dim": 128}),
}


def random_shapes(count: int) -> list[GPTConfig]:
    rng = random.Random(0)
    configs = []
    for _ in range(count):
        n_head, head = rng.choice([1, 2, 4, 6]), rng.choice([2, 4, 6])
        has_rms_norm = rng.random() < 0.7
        n_layer, window = rng.randint(1, 5), rng.choice([None, 1, 3, 8, 30])
        configs.append(
            GPTConfig(
                rng.randint(5, 99), rng.randint(2, 40), n_layer, n_head, n_head * head,
                positions="rotary" if has_rms_norm else rng.choice(["learned", "rotary"]),
                norm="rmsnorm" if has_rms_norm else "layernorm",
                mlp=rng.choice(["gelu", "swiglu"]),
                n_inner=rng.choice([None, 7, 32]),
                biases=rng.choice(["all", "qkv", "none"]),
                n_kv_head=rng.choice([None, *(k for k in (1, 2, 3) if n_head % k == 0)]),
                head_dim=rng.choice([None, 8, 10]),
                qk_norm=rng.random() < 0.5,
                window=window,
                window_layers=None if window is None or rng.random() < 0.5 else (0, n_layer - 1),
                tied=rng.random() < 0.5,
            )
        )  # fmt: skip
    return configs


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_match_transformers(name: str) -> None:
    family, values, extra = FAMILIES[name]
    settings = getattr(transformers, f"{family}Config")(**dict(zip(COLUMNS, values, strict=True)), **extra)
    with torch.device("meta"):
        reference = getattr(transformers, f"{family}ForCausalLM")(settings)
    parts = breakdown(PRESETS[name].model)
    assert parts.trainable == reference.num_parameters()
    sizes = {row.matrix: row.parameters for row in parts.rows}
    endings = {
        "Query": "q_proj.weight", "Key": "k_proj.weight", "Value-Up": "v_proj.weight", "Value-Down": "o_proj.weight",
        "Gate-Projection": "gate_proj", "Up-Projection": "up_proj", "Down-Projection": "down_proj",
        "Embedding": "embed_tokens",
    }  # fmt: skip
    for matrix, ending in endings.items():
        assert sizes[matrix] == sum(p.numel() for n, p in reference.named_parameters() if ending in n), matrix
    assert parts.layer_norms == sum(p.numel() for n, p in reference.named_parameters() if "norm" in n)
    assert parts.biases == sum(p.numel() for n, p in reference.named_parameters() if n.endswith("bias"))


def multiplications(config: GPTConfig, T: int) -> int:
    """Counts the multiplications of a forward pass for the last of T positions."""
    total = sum(p.numel() for n, p in GPT(config).named_parameters() if n != "wpe.weight")
    total -= 0 if config.tied else config.vocab_size * config.n_embd  # The embedding is a lookup.
    for window in config.windows:
        for _ in range(config.n_head):
            visible_keys = [key for key in range(T) if window is None or key > T - 1 - window]
            total += 2 * len(visible_keys) * config.head_size  # score, and weighted sum of values
    return total


def test_flops_and_cache_match_explicit_counts() -> None:
    for config in random_shapes(40):
        for T in (1, 9, 40):
            assert flops_sampled(config, T) == 2 * multiplications(config, T), config
            assert flops_per_token(config, T) == 3 * flops_sampled(config, T)
        long = replace(config, block_size=2 * WINDOW_SLACK)
        cache = KVCache(long, 3, torch.device("cpu"), torch.bfloat16)
        assert 3 * cache_bytes(long, 2 * WINDOW_SLACK, 2) == cache.nbytes


def test_window_reduces_flops_and_cache(gpt: Gpt) -> None:
    command = ("params", "qwen3-0.6b", "--block-size", "8192", "--devices", "1", "--json")
    dense, banded = (json.loads(gpt(*command, *window).out) for window in ((), ("--window", "512")))
    assert banded["trainable"] == dense["trainable"]
    saved_positions = 14 * (8192 - 512)  # Positions outside the window, in 14 of 28 layers
    assert dense["flops"]["trained_token"] - banded["flops"]["trained_token"] == 12 * 16 * 128 * saved_positions
    columns = 14 * (8192 - 512 - WINDOW_SLACK)
    assert dense["memory"]["sampling"]["cache"] - banded["memory"]["sampling"]["cache"] == 2 * 2 * 8 * 128 * columns
    assert "S = 121,856 tokens that the layers attend to" in gpt(*command[:-1], "--window", "512").out


# Printed tables


def test_printed_tables_describe_the_family(gpt: Gpt) -> None:
    out = gpt("params", "mistral-7b").out
    for fragment in (
        "(128 × 4,096) × 8 × 32", "(128 × 4,096) × 32 × 32", "(14,336 × 4,096) × 32", "Gate-Projection",
        "not tied: the unembedding is a separate matrix", "RMSNorms, γ", "the linear layers have none",
    ):  # fmt: skip
        assert fragment in out
    assert "biases of queries, keys and values" in gpt("params", "qwen2.5-0.5b").out


@pytest.mark.parametrize("names", [("gpt2", "qwen3-0.6b"), ("mistral-7b", "gpt2")])
def test_comparison_of_models_matches_rows_by_name(gpt: Gpt, names: tuple[str, str]) -> None:
    rows = {line[:16].strip(): line[16:].split() for line in gpt("params", *names).out.splitlines() if line.strip()}
    assert list(rows)[2:11] == [row.matrix for row in breakdown(PRESETS["qwen3-0.6b"].model).rows]
    for column, name in enumerate(names):
        parts = breakdown(PRESETS[name].model)
        sizes = {row.matrix: f"{row.parameters:,}" for row in parts.rows}
        for matrix in list(rows)[2:11]:
            cells = [cell for cell in rows[matrix] if not cell.endswith("%")]
            assert cells[column] == sizes.get(matrix, "–")
        assert rows["trainable"][column] == f"{parts.trainable:,}"
        assert rows["norms"][column] == f"+{parts.layer_norms:,}"


def test_shape_options_are_applied(gpt: Gpt) -> None:
    options = ["--n-layer", "3", "--n-head", "4", "--n-kv-head", "2", "--head-dim", "16", "--n-embd", "32"]
    options += ["--n-inner", "48", "--window", "9", "--block-size", "64", "--vocab-size", "99", "--arch", "modern"]
    output = json.loads(gpt("params", *options, "--json").out)
    config = GPTConfig.of("modern", 99, 64, 3, 4, 32, n_kv_head=2, head_dim=16, n_inner=48, window=9)
    assert output["config"] == json.loads(json.dumps(asdict(config)))
    assert output["trainable"] == sum(p.numel() for p in GPT(config).parameters())
    for n_layer in (3, 40):  # Every layer has a window.
        output = json.loads(gpt("params", "mistral-7b", "--n-layer", str(n_layer), "--json").out)["config"]
        assert output["window_layers"] == list(range(n_layer))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n-kv-head", "5"], "n_head 12 is not divisible by n_kv_head 5"),
        (["--window", "0"], "window is 0; it must be between 1 and 16,777,216"),
        (["--arch", "modern", "--positions", "learned"], "learned positions do not work with --arch modern"),
    ],
)
def test_invalid_shape_options_are_refused(gpt: Gpt, options: list[str], message: str) -> None:
    one_line_of_what_and_what_next(gpt("params", "gpt2", *options), message)
