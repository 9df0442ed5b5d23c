"""GGUF files of random shapes in llama.cpp, compared by the log-probabilities of all ids; needs the extra interop."""

import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from conftest import more
from models import FAMILIES, ROPE_METADATA, loud, rewritten, source_of
from torch import Tensor

from benchmarks.llama_cpp import LlamaCpp
from gpt.config.export import FileType
from gpt.config.model import GPTConfig, RopeScaling
from gpt.exporting import gguf
from gpt.exporting.source import SourceModel
from gpt.model.decoder import GPT
from gpt.runs import checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("xllamacpp"), reason="the extra interop is not installed"),
]
# Allowed differences in nats between llama.cpp's log-probabilities and ours with the file's weights. Except for f32,
# llama.cpp rounds activations before products: to float16, or to int8 in groups of 32. The largest differences in 400
# files were 5e-6, 4e-3, 0.11 and 0.06.
TOLERANCE = {"f32": 2e-5, "f16": 1e-2, "q8_0": 0.3, "q4_0": 0.3}
GELU_TOLERANCE = 3e-3  # llama.cpp's GELU is a float16 table; the largest difference in 80 files was 1.3e-3


def random_shape(family: str, number: int) -> GPTConfig:
    rng = random.Random(f"{family} {number}")
    heads, width = rng.choice([1, 2, 3, 4, 6]), rng.choice([4, 6, 16, 32])
    properties: dict[str, Any] = FAMILIES[family] | {
        "tied": rng.random() < 0.5,
        "n_inner": rng.choice([None, 1, 37, 64, 96]),
        "layer_norm_epsilon": rng.choice([1e-5, 1e-6, 1e-2]),
    }
    n_embd, block_size = heads * width, rng.choice([2, 16, 48, 300])
    if family != "gpt2":
        properties["n_kv_head"] = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
        properties["rope_base"] = rng.choice([10_000.0, 1e6, 100.0])
    if family in ("llama", "mistral", "qwen3"):
        properties["head_dim"] = rng.choice([None, 2, 10, 32])
        n_embd = rng.choice([n_embd, 32, 50]) if properties["head_dim"] or family == "qwen3" else n_embd
        n_embd = n_embd if properties["head_dim"] else heads * width
    layers = rng.randint(1, 4)
    if family == "llama":
        n_embd = heads * rng.choice([7, 16]) if properties["head_dim"] else n_embd
        properties["rope_scaling"] = rng.choice([None, RopeScaling(8.0, 1.0, 4.0, 16), RopeScaling(2.0, 1.0, 2.0, 24)])
    if family == "mistral":
        properties |= {"window": block_size, "window_layers": tuple(range(layers))}
    return GPTConfig(rng.choice([257, 300, 320]), block_size, layers, heads, n_embd, **properties)


def their_logprobs(path: Path, prompts: list[list[int]], vocab_size: int) -> Tensor:
    with LlamaCpp(path) as server:
        return torch.from_numpy(np.stack([server.logprobs(prompt, vocab_size) for prompt in prompts]))


def our_logprobs(source: SourceModel, kind: str, prompts: list[list[int]]) -> Tensor:
    """Returns our log-probabilities after each prompt, with weights as a file of type ``kind`` stores them."""
    model = GPT(source.config).eval()
    for name, parameter in model.state_dict().items():
        parameter.copy_(gguf.restore_parameter(source.config, name, source.weights[name](), kind))
    with torch.no_grad():
        return torch.stack([model(torch.tensor([prompt]))[0, -1].log_softmax(-1) for prompt in prompts]).double()


def largest_difference(path: Path, config: GPTConfig, kind: str) -> float:
    """Returns the largest difference in nats after prompts of several lengths, up to the context."""
    source = source_of(loud(config, spread=0.1))
    gguf.check(source)
    gguf.write(path, source, kind, "shape")
    T = config.block_size
    prompts = [torch.randint(256, (length,)).tolist() for length in sorted({1, T // 2, T - 1})]
    return float((their_logprobs(path, prompts, config.vocab_size) - our_logprobs(source, kind, prompts)).abs().max())


@pytest.mark.parametrize("number", [0, 1, *map(more, range(2, 10))])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_match_llama_cpp(tmp_path: Path, family: str, number: int) -> None:
    config = random_shape(family, number)
    assert config.layout == family
    for kind in ("f32", get_args(FileType)[1 + number % 3]):
        tolerance = GELU_TOLERANCE if family == "gpt2" and kind == "f32" else TOLERANCE[kind]
        assert largest_difference(tmp_path / f"{kind}.gguf", config, kind) <= tolerance, kind


@pytest.mark.parametrize("metadata", [metadata for metadata, _ in ROPE_METADATA])
def test_rope_scaling_of_a_file_is_that_of_llama_cpp(metadata: dict[str, Any], tmp_path: Path) -> None:
    config = replace(random_shape("llama", 3), rope_scaling=None, block_size=48)
    gguf.write(tmp_path / "model.gguf", source_of(loud(config, spread=0.1)), "f32", "shape")
    file = rewritten(tmp_path / "model.gguf", metadata)
    model, prompts = checkpoint.load(file, torch.device("cpu")).model, [list(range(40))]
    with torch.no_grad():
        ours = model(torch.tensor(prompts))[:, -1].log_softmax(-1).double()
    assert (their_logprobs(file, prompts, config.vocab_size) - ours).abs().max() < TOLERANCE["f32"]
