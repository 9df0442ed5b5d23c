"""GGUF files of random shapes beside llama.cpp itself, an extra (``interop``): log-probabilities of all ids."""

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from conftest import more
from models import FAMILIES, loud, source_of
from torch import Tensor

from benchmarks.llama_cpp import LlamaCpp
from gpt.config import GPTConfig, RopeScaling
from gpt.export_config import FileType
from gpt.exporting import gguf
from gpt.exporting.source import SourceModel
from gpt.model.decoder import GPT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("xllamacpp"), reason="the extra interop is not installed"),
]
# Most nats between its log-probability of an id and ours with the weights of the file. Before a product with a matrix
# that is not f32 it rounds activations as well: to float16, or to int8 in groups of 32. Of 400 files the most were
# 5e-6, 4e-3, 0.11 and 0.06.
NEAR = {"f32": 2e-5, "f16": 1e-2, "q8_0": 0.3, "q4_0": 0.3}
NEAR_GELU = 3e-3  # of GPT-2's in f32, whose GELU it looks up in a table of float16; of 80 files the most was 1.3e-3


def shape_of(family: str, number: int) -> GPTConfig:
    """A shape of a family, by chance."""
    chance = random.Random(f"{family} {number}")
    heads, width = chance.choice([1, 2, 3, 4, 6]), chance.choice([4, 6, 16, 32])
    found: dict[str, Any] = FAMILIES[family] | {
        "tied": chance.random() < 0.5,
        "n_inner": chance.choice([None, 1, 37, 64, 96]),
        "layer_norm_epsilon": chance.choice([1e-5, 1e-6, 1e-2]),
    }
    n_embd, block_size = heads * width, chance.choice([2, 16, 48, 300])
    if family == "gpt2":
        found["positions"] = chance.choice(["learned", "sinusoidal"])
    else:
        found["n_kv_head"] = chance.choice([n for n in range(1, heads + 1) if heads % n == 0])
        found["rope_base"] = chance.choice([10_000.0, 1e6, 100.0])
    if family in ("llama", "mistral", "qwen3"):
        found["head_dim"] = chance.choice([None, 2, 10, 32])
        n_embd = chance.choice([n_embd, 32, 50]) if found["head_dim"] or family == "qwen3" else n_embd
        n_embd = n_embd if found["head_dim"] else heads * width
    layers = chance.randint(1, 4)
    if family == "llama":
        n_embd = heads * chance.choice([7, 16]) if found["head_dim"] else n_embd
        found["rope_scaling"] = chance.choice([None, RopeScaling(8.0, 1.0, 4.0, 16), RopeScaling(2.0, 1.0, 2.0, 24)])
    if family == "mistral":
        found |= {"window": block_size, "window_layers": tuple(range(layers))}
    return GPTConfig(chance.choice([257, 300, 320]), block_size, layers, heads, n_embd, **found)


def their_logprobs(path: Path, prompts: list[list[int]], vocab_size: int) -> Tensor:
    with LlamaCpp(path) as server:
        return torch.from_numpy(np.stack([server.logprobs(each, vocab_size) for each in prompts]))


def our_logprobs(source: SourceModel, kind: str, prompts: list[list[int]]) -> Tensor:
    """Ours with the weights that the file has."""
    model = GPT(source.config).eval()
    for name, parameter in model.state_dict().items():
        parameter.copy_(gguf.restored(source.config, name, source.weights[name](), kind))
    with torch.no_grad():
        return torch.stack([model(torch.tensor([each]))[0, -1].log_softmax(-1) for each in prompts]).double()


def differences(path: Path, config: GPTConfig, kind: str) -> float:
    """Most nats between theirs and ours after prompts of several lengths, one of them the whole context."""
    source = source_of(loud(config, spread=0.1))
    gguf.check(source)
    gguf.write(path, source, kind, "shape")
    T = config.block_size
    prompts = [torch.randint(256, (length,)).tolist() for length in sorted({1, T // 2, T - 1})]
    return float((their_logprobs(path, prompts, config.vocab_size) - our_logprobs(source, kind, prompts)).abs().max())


@pytest.mark.parametrize("number", [0, 1, *map(more, range(2, 10))])
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same(tmp_path: Path, family: str, number: int) -> None:
    config = shape_of(family, number)
    assert config.layout == family
    for kind in ("f32", get_args(FileType)[1 + number % 3]):
        near = NEAR_GELU if family == "gpt2" and kind == "f32" else NEAR[kind]
        assert differences(tmp_path / f"{kind}.gguf", config, kind) <= near, kind
