"""Frozen hashes of generated texts: every sampling setting, on small models of each kind.

Models compute in float64 with weights that are integers over a power of two, so hashes do not depend on the CPU. If
texts are meant to change, write new hashes: ``python tests/decoding/test_frozen_texts.py``.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt import GPTConfig, SampleConfig
from gpt.api import LanguageModel
from gpt.device import Compute
from gpt.model.decoder import GPT
from gpt.text.tokenizer import bytes_tokenizer

FROZEN = Path(__file__).with_name("frozen_texts.json")
PROMPTS = ["", "Once upon", "ab ab ab ab ab", "a prompt that is longer than the context"]
MODELS = [("gpt2", "learned"), ("gpt2", "sinusoidal"), ("gpt2", "rotary"), ("modern", "rotary")]
STOPS = ("v", "[z", '""', "0^", "e", "1")
ENDS = ("<|endoftext|>=4",)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.5, "max_tokens": 40},
    {"temperature": 0.3},
    {"temperature": 0.0},
    {"greedy": True, "max_tokens": 40},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "max_tokens": 40},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram": 1},
    {"no_repeat_ngram": 2, "repetition_penalty": 1.2, "greedy": True},
    {"bias": (" =3", "e=-5"), "top_k": 20},
    {"bias": ENDS},
    {"bias": ENDS, "min_tokens": 5},
    {"bias": ENDS, "ignore_eot": True},
    {"bias": ENDS, "batch": 2, "max_tokens": 30},
    {"stop": STOPS},
    {"stop": ("ab", *STOPS), "batch": 3, "max_tokens": 30},
    {"logprobs": 3, "echo_logprobs": True},
    {"logprobs": 0, "greedy": True},
    {"max_tokens": 0, "echo_logprobs": True, "logprobs": 2},
    {"max_tokens": 1},
    {"batch": 1, "max_tokens": 30},
    {"batch": 5, "max_tokens": 30, "top_p": 0.9},
    {"speculate": 4, "greedy": True, "max_tokens": 40},
    {"speculate": 3, "temperature": 0.2, "repetition_penalty": 1.1, "batch": 2},
    {"speculate": 5, "stop": STOPS, "bias": ENDS},
    {"beam": 1, "max_tokens": 30},
    {"beam": 2, "n_best": 2},
    {"beam": 4, "n_best": 4, "bias": ENDS, "length_penalty": 0.0},
    {"beam": 4, "n_best": 2, "bias": ENDS, "length_penalty": 2.0},
    {"beam": 3, "n_best": 3, "bias": ENDS, "length_penalty": -1.0, "early_stopping": "never"},
    {"beam": 5, "n_best": 3, "bias": ENDS, "early_stopping": "on"},
    {"beam": 3, "n_best": 2, "stop": STOPS},
    {"beam": 3, "no_repeat_ngram": 2, "repetition_penalty": 1.2},
    {"beam": 2, "bias": ENDS, "min_tokens": 6, "logprobs": 2, "echo_logprobs": True},
    {"beam": 3, "max_tokens": 40, "batch": 2},
    {"beam": 2, "max_tokens": 0, "echo_logprobs": True},
    {"beam": 2, "n_best": 2, "bias": ENDS, "ignore_eot": True, "max_tokens": 20},
]


def language_model(arch: Any, positions: Any) -> LanguageModel:
    config = GPTConfig.of(arch, 257, 24, 2, 2, 16, positions=positions)
    model = GPT(config).eval().double()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.from_numpy(rng.integers(-(2**15), 2**15, tuple(parameter.shape)) * 2.0**-15)
            norm = name.endswith("weight") and "ln_" in name
            parameter.copy_(1 + noise / 2 if norm else noise / 4 if name.startswith("w") else noise)
        model.ln_f.weight *= 4
    return LanguageModel(model, bytes_tokenizer(), Compute(torch.device("cpu"), torch.float64), Path("frozen"))


def hash_samples(model: LanguageModel, settings: dict[str, Any], seed: int) -> list[Any]:
    """Returns the hash of all samples, and the sum of their log-probabilities."""
    config = SampleConfig(**{"max_tokens": 12, **settings})
    records, total = [], 0.0
    for piece in model.write_all(PROMPTS, config, seed, 1 if config.beam else 2):
        if piece.sample is not None:
            sample = piece.sample
            tokens = [*(sample.logprobs or ()), *(sample.prompt_logprobs or ())]
            fields = [sample.text, sample.tokens, sample.finish_reason, sample.dropped, sample.slid]
            records.append([piece.prompt, piece.index, *fields, [[t.id, [id for id, _ in t.top]] for t in tokens]])
            total += sample.logprob + (sample.score or 0.0) + sum(token.logprob or 0.0 for token in tokens)
    return [hashlib.sha256(json.dumps(records).encode()).hexdigest()[:12], round(total, 3)]


def hash_all_settings(arch: str, positions: str) -> dict[str, list[Any]]:
    model = language_model(arch, positions)
    return {str(settings): hash_samples(model, settings, seed) for seed, settings in enumerate(SETTINGS)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With products this small, several threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("arch", "positions"), [MODELS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in MODELS[1:])]
)
def test_texts_match_the_frozen_hashes(arch: str, positions: str) -> None:
    frozen = json.loads(FROZEN.read_text(encoding="utf-8"))[f"{arch} {positions}"]
    actual = hash_all_settings(arch, positions)
    assert {settings: hash for settings, (hash, _) in actual.items()} == {
        settings: hash for settings, (hash, _) in frozen.items()
    }
    for settings, (_, total) in actual.items():
        assert total == pytest.approx(frozen[settings][1], abs=0.01), settings


if __name__ == "__main__":
    torch.set_num_threads(1)
    everything = {f"{arch} {positions}": hash_all_settings(arch, positions) for arch, positions in MODELS}
    lines = re.sub(r"\[\s+(\S+),\s+(\S+)\s+\]", r"[\1, \2]", json.dumps(everything, indent=1))
    FROZEN.write_text(lines + "\n", encoding="utf-8")
