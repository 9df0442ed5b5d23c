"""Counts of parameters, operations and cache, against transformers', the built model, and loops."""

import json
import random
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import transformers
from conftest import Gpt, one_line_of_what_and_what_next

from gpt.config import PRESETS, GPTConfig
from gpt.model.cache import KVCache
from gpt.model.decoder import GPT
from gpt.model.params import SLACK, breakdown, cache_bytes, flops_per_token, flops_sampled

# As their config.json says on the hub.
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


def shapes(count: int) -> list[GPTConfig]:
    """Random small ones of every property."""
    rng = random.Random(0)
    found = []
    for _ in range(count):
        n_head, head = rng.choice([1, 2, 4, 6]), rng.choice([2, 4, 6])
        rms = rng.random() < 0.7
        n_layer, window = rng.randint(1, 5), rng.choice([None, 1, 3, 8, 30])
        found.append(
            GPTConfig(
                rng.randint(5, 99), rng.randint(2, 40), n_layer, n_head, n_head * head,
                positions="rotary" if rms else rng.choice(["learned", "sinusoidal", "rotary"]),
                norm="rmsnorm" if rms else "layernorm",
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
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_are_transformers(name: str) -> None:
    family, values, more = FAMILIES[name]
    settings = getattr(transformers, f"{family}Config")(**dict(zip(COLUMNS, values, strict=True)), **more)
    with torch.device("meta"):
        theirs = getattr(transformers, f"{family}ForCausalLM")(settings)
    parts = breakdown(PRESETS[name].model)
    assert parts.trainable == theirs.num_parameters()
    sizes = {row.matrix: row.parameters for row in parts.rows}
    said = {
        "Query": "q_proj.weight", "Key": "k_proj.weight", "Value-Up": "v_proj.weight", "Value-Down": "o_proj.weight",
        "Gate-Projection": "gate_proj", "Up-Projection": "up_proj", "Down-Projection": "down_proj",
        "Embedding": "embed_tokens",
    }  # fmt: skip
    for matrix, ending in said.items():
        assert sizes[matrix] == sum(p.numel() for n, p in theirs.named_parameters() if ending in n), matrix
    assert parts.layer_norms == sum(p.numel() for n, p in theirs.named_parameters() if "norm" in n)
    assert parts.biases == sum(p.numel() for n, p in theirs.named_parameters() if n.endswith("bias"))


def multiplications(config: GPTConfig, T: int) -> int:
    """Of a forward pass for the last of T positions, counted map by map, head by head and key by key."""
    total = sum(p.numel() for n, p in GPT(config).named_parameters() if n != "wpe.weight")
    total -= 0 if config.tied else config.vocab_size * config.n_embd  # a row of it is looked up
    for window in config.windows:
        for _ in range(config.n_head):
            seen = [key for key in range(T) if window is None or key > T - 1 - window]
            total += 2 * len(seen) * config.head_size  # the score, and the sum of values
    return total


def test_operations_and_cache_are_counted_one_by_one() -> None:
    for config in shapes(40):
        for T in (1, 9, 40):
            assert flops_sampled(config, T) == 2 * multiplications(config, T), config
            assert flops_per_token(config, T) == 3 * flops_sampled(config, T)
        long = replace(config, block_size=2 * SLACK)
        cache = KVCache(long, 3, torch.device("cpu"), torch.bfloat16)
        assert 3 * cache_bytes(long, 2 * SLACK, 2) == cache.nbytes


def test_a_window_costs_less(gpt: Gpt) -> None:
    words = ("params", "qwen3-0.6b", "--block-size", "8192", "--devices", "1", "--json")
    dense, banded = (json.loads(gpt(*words, *window).out) for window in ((), ("--window", "512")))
    assert banded["trainable"] == dense["trainable"]
    saved = 14 * (8192 - 512)  # positions that every other one of 28 layers doesn't see
    assert dense["flops"]["trained_token"] - banded["flops"]["trained_token"] == 12 * 16 * 128 * saved
    columns = 14 * (8192 - 512 - SLACK)
    assert dense["memory"]["sampling"]["cache"] - banded["memory"]["sampling"]["cache"] == 2 * 2 * 8 * 128 * columns
    assert "S = 121,856 tokens that the layers attend to" in gpt(*words[:-1], "--window", "512").out


# What is printed


def test_tables_of_families(gpt: Gpt) -> None:
    out = gpt("params", "mistral-7b").out
    for words in (
        "(128 × 4,096) × 8 × 32", "(128 × 4,096) × 32 × 32", "(14,336 × 4,096) × 32", "Gate-Projection",
        "not tied: the unembedding is a separate matrix", "RMSNorms, γ", "the linear layers have none",
    ):  # fmt: skip
        assert words in out
    assert "biases of queries, keys and values" in gpt("params", "qwen2.5-0.5b").out


@pytest.mark.parametrize("names", [("gpt2", "qwen3-0.6b"), ("mistral-7b", "gpt2")])
def test_rows_side_by_side_go_by_name(gpt: Gpt, names: tuple[str, str]) -> None:
    rows = {line[:16].strip(): line[16:].split() for line in gpt("params", *names).out.splitlines() if line.strip()}
    assert list(rows)[2:11] == [row.matrix for row in breakdown(PRESETS["qwen3-0.6b"].model).rows]
    for at, name in enumerate(names):
        parts = breakdown(PRESETS[name].model)
        sizes = {row.matrix: f"{row.parameters:,}" for row in parts.rows}
        for matrix in list(rows)[2:11]:
            cells = [cell for cell in rows[matrix] if not cell.endswith("%")]
            assert cells[at] == sizes.get(matrix, "–")
        assert rows["trainable"][at] == f"{parts.trainable:,}"
        assert rows["norms"][at] == f"+{parts.layer_norms:,}"


def test_a_shape_by_hand(gpt: Gpt) -> None:
    words = ["--n-layer", "3", "--n-head", "4", "--n-kv-head", "2", "--head-dim", "16", "--n-embd", "32"]
    words += ["--n-inner", "48", "--window", "9", "--block-size", "64", "--vocab-size", "99", "--arch", "modern"]
    said = json.loads(gpt("params", *words, "--json").out)
    config = GPTConfig.of("modern", 99, 64, 3, 4, 32, n_kv_head=2, head_dim=16, n_inner=48, window=9)
    assert said["config"] == json.loads(json.dumps(asdict(config)))
    assert said["trainable"] == sum(p.numel() for p in GPT(config).parameters())
    for n_layer in (3, 40):  # fewer or more layers keep their windows
        said = json.loads(gpt("params", "mistral-7b", "--n-layer", str(n_layer), "--json").out)["config"]
        assert said["window_layers"] == list(range(n_layer))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--n-kv-head", "5"], "n_head 12 is not divisible by n_kv_head 5"),
        (["--window", "0"], "window is 0; it must be between 1 and 16,777,216"),
        (["--arch", "modern", "--positions", "learned"], "learned positions do not work with --arch modern"),
        (["--n-kv-head", "4", "--devices", "8", "--tensor", "8"], "the model's 4 key/value heads cannot be"),
    ],
)
def test_shapes_that_cannot_be(gpt: Gpt, words: list[str], message: str) -> None:
    one_line_of_what_and_what_next(gpt("params", "gpt2", *words), message)
