"""Writing on CUDA as it is on the CPU: every kind of request gives the same texts; evaluation and inspection too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import Gpt

import gpt
from gpt import SampleConfig, api, inspect
from gpt.bench_config import BenchConfig
from gpt.errors import UserError

Disguise = Callable[..., Any]
REQUESTS: list[dict[str, Any]] = [
    {"greedy": True},
    {},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.2, "no_repeat_ngram": 3, "min_tokens": 3, "bias": (" the=-2",)},
    {"logprobs": 2, "echo_logprobs": True},
    {"stop": ("e",)},
    {"beam": 3, "n_best": 2},
    {"greedy": True, "speculate": 3},
    {"compile": "on"},
    {"max_tokens": 40},  # past the context, 32
    {"max_tokens": 40, "compile": "on"},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each arch."""
    from conftest import TINY, make_text

    place = tmp_path_factory.mktemp("models")
    (place / "text.txt").write_bytes(make_text().encode())
    settings: dict[str, Any] = {**TINY, "steps": 8, "dtype": "float32", "vocab_size": 300}
    return {
        arch: gpt.train(place / "text.txt", out=str(place / arch), arch=arch, **settings).run
        for arch in ("gpt2", "modern")
    }


def texts(path: Path, device: str, settings: dict[str, Any]) -> list[tuple[str, float]]:
    config = SampleConfig(**{"max_tokens": 12, **settings})
    with mock.patch.object(torch, "compile", lambda model, **how: model):  # the steps that it would compile
        model = gpt.load(path, device=device, dtype="float32", sampling=config)
        pieces = model.write_all(["the cat ", "dogs"], config, 3, 1 if config.beam else 2)
        return [(piece.sample.text, piece.sample.logprob) for piece in pieces if piece.sample]


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("settings", REQUESTS, ids=str)
def test_texts_are_the_same(models: dict[str, Path], disguise: Disguise, settings: dict[str, Any], arch: str) -> None:
    here = texts(models[arch], "cpu", settings)
    with disguise():
        there = texts(models[arch], "cuda", settings)
    assert [text for text, _ in there] == [text for text, _ in here]
    assert [value for _, value in there] == pytest.approx([value for _, value in here], abs=1e-4)


def test_a_text_is_written_on_the_second_device(models: dict[str, Path], disguise: Disguise) -> None:
    here = texts(models["modern"], "cpu", {})
    with disguise(2):
        assert texts(models["modern"], "cuda:1", {})[0][0] == here[0][0]
        with pytest.raises(UserError, match='no device "cuda:2"'):
            gpt.load(models["modern"], device="cuda:2")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_narrow_weights_write(models: dict[str, Path], disguise: Disguise, dtype: str) -> None:
    """Texts may differ from float32's; their log-probabilities are about the same."""
    config = SampleConfig(greedy=True, max_tokens=5)
    (_, whole), *_ = texts(models["gpt2"], "cpu", {"greedy": True, "max_tokens": 5})
    with disguise():
        writing = gpt.load(models["gpt2"], device="cuda", dtype=dtype, sampling=config).write("the cat ", config)
        assert "".join(writing) == writing.sample.text
    assert writing.sample.logprob == pytest.approx(whole, abs=1.5)


def test_a_text_has_the_same_loss(models: dict[str, Path], disguise: Disguise) -> None:
    text = ["the cat sat on the mat while dogs chased cats, " * 3]
    here = gpt.load(models["modern"], device="cpu", dtype="float32").evaluate(text, stride=8)
    with disguise():
        there = gpt.load(models["modern"], device="cuda", dtype="float32").evaluate(text, stride=8)
    assert there.loss == pytest.approx(here.loss, abs=1e-5)
    assert there.tokens == here.tokens


def test_what_goes_on_inside_is_the_same(models: dict[str, Path], disguise: Disguise) -> None:
    def look(device: str) -> Any:
        model = gpt.load(models["gpt2"], device=device, dtype="float32")
        found = inspect.look(model.model, model.tokenizer.encode("the cat sat"), model.tokenizer)
        near = inspect.Embeddings(model.model, model.tokenizer)
        return found, near.neighbors(near.find("cat"), 3), inspect.positions(model.model)

    here = look("cpu")
    with disguise():
        there = look("cuda")
    assert np.allclose(there[0].patterns, here[0].patterns, atol=1e-5)
    assert np.allclose(there[0].logits, here[0].logits, atol=1e-4)
    assert [each.id for each in there[1]] == [each.id for each in here[1]]
    assert np.allclose(there[2].similarity, here[2].similarity, atol=1e-5)


def test_bench_measures(models: dict[str, Path], disguise: Disguise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt.decoding.bench._PROBE_BYTES", 2**16)
    with disguise():
        config = BenchConfig(prompt_tokens=4, new_tokens=4, rounds=1)
        found = api.bench(models["gpt2"], config, device="cuda", dtype="float32")
    assert found.device == "NVIDIA H100 80GB HBM3"
    assert found.speed.decode_tokens_per_second > 0


def test_a_lost_device_is_one_line(models: dict[str, Path], disguise: Disguise, gpt: Gpt) -> None:
    with disguise() as device:
        device.lost = "CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later.\n"
        done = gpt("sample", "-m", models["gpt2"], "--device", "cuda", "the cat")
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-2] == "error: the device has failed: CUDA error: unspecified launch failure"
