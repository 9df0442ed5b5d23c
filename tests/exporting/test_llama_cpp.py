"""Exported .gguf files in llama.cpp; needs the extra interop. benchmarks/llama_cpp.py compares more texts."""

import pydoc_data.topics
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vocabularies
from conftest import GPT2_RANKS, make_text, more

pytest.importorskip("xllamacpp", reason="the extra interop is not installed")

from benchmarks import llama_cpp
from benchmarks.llama_cpp import LlamaCpp
from gpt.api import LanguageModel
from gpt.evaluate import total_loss
from gpt.text.tokenizer import Tokenizer, bytes_tokenizer
from gpt.text.tokenizer_files import find_tokenizer

pytestmark = pytest.mark.slow
TEXTS = llama_cpp.random_texts(100)
TEXT = "\n".join(pydoc_data.topics.topics.values())[:40_000]

Serve = Callable[..., LlamaCpp]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[[Tokenizer], LlamaCpp]]:
    """Returns a function that starts llama.cpp with an untrained model and a tokenizer."""
    servers = []

    def start(tokenizer: Tokenizer) -> LlamaCpp:
        server = LlamaCpp(llama_cpp.write_untrained(tmp_path / "untrained.gguf", tokenizer))
        servers.append(server.__enter__())
        return server

    yield start
    for server in servers:
        server.__exit__()


@pytest.fixture(scope="module")
def tokenizers() -> list[Tokenizer]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TIKTOKEN_CACHE_DIR", str(GPT2_RANKS))
        if not GPT2_RANKS.is_dir():
            patched.setattr(llama_cpp, "gpt2_tokenizer", bytes_tokenizer)
        return [tokenizer for _, tokenizer in llama_cpp.vocabularies(make_text())]


@pytest.mark.parametrize("number", range(11))
def test_llama_cpp_gives_the_same_token_ids(number: int, tokenizers: list[Tokenizer], served: Serve) -> None:
    if number == 10 and not GPT2_RANKS.is_dir():
        pytest.skip("GPT-2's vocabulary is not here")
    assert llama_cpp.find_different_texts(tokenizers[number], served(tokenizers[number]), TEXTS) == []


@pytest.mark.parametrize("form", ["gpt2", "llama3", "qwen", "smollm2", "gaps"])
def test_llama_cpp_encodes_prompts_of_other_families_alike(form: str, served: Serve, tmp_path: Path) -> None:
    tokenizer = find_tokenizer(str(vocabularies.write(form, tmp_path / form)))
    server = served(tokenizer)
    texts = [unicodedata.normalize("NFC", text) for text in TEXTS] if form == "qwen" else TEXTS
    words = ["<|im_start|>", "<|eot_id|>", "<think>", "<|begin_of_text|>", *tokenizer.all_specials]
    texts = [text + words[i % len(words)] + text[:5] for i, text in enumerate(texts)]
    assert llama_cpp.find_different_texts(tokenizer, server, texts) == []
    prompt_ids = [server.ids(text, add_special=True, parse_special=True) for text in texts]
    assert prompt_ids == [tokenizer.prompt(text) for text in texts]
    if tokenizer.chat_template is not None:
        response = server.post("/apply-template", messages=[{"role": "user", "content": "Hello"}])
        assert response["prompt"] == "<|im_start|>Hello<|im_end|>"


def test_llama_cpp_stops_at_the_same_tokens(served: Serve) -> None:
    bytes_ = bytes_tokenizer()
    ends = {"<|im_end|>": 257, "<a>": 258, "<b>": 259}
    tokenizer = Tokenizer(
        "bytes", bytes_.backend, 256, specials={**ends, "<c>": 260}, more_ends=frozenset(ends.values())
    )
    server = served(tokenizer)

    def stop(id: int) -> str:
        response = server.post("/completion", prompt="a", n_predict=3, logit_bias=[[id, 1e9]], temperature=0)
        return str(response["stop_type"])

    assert [id for id in range(256, 263) if stop(id) == "eos"] == [256, 257, 258, 259]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LanguageModel]:
    """Returns a function that trains each small model only once."""
    models: dict[str, LanguageModel] = {}

    def train(name: str, **settings: Any) -> LanguageModel:
        if name not in models:
            folder = tmp_path_factory.mktemp("llama")
            text = folder / "text.txt"
            text.write_text(TEXT, encoding="utf-8")
            models[name] = llama_cpp.train_model(
                text, folder / "run", 200, n_layer=2, n_embd=96, batch_tokens=512, split_on="", **settings
            )
        return models[name]

    return train


MODELS: dict[str, dict[str, Any]] = {
    "learnt": {"vocab_size": 600},
    "bytes": {"tokenizer": "bytes"},
    "modern": {"arch": "modern", "vocab_size": 600},
}


@pytest.mark.parametrize("name", ["learnt", "modern", more("bytes")])
def test_llama_cpp_generates_the_same_greedy_texts(
    name: str, trained: Callable[..., LanguageModel], tmp_path: Path
) -> None:
    model = trained(name, **MODELS[name])
    prompts = llama_cpp.draw_prompts(model, TEXT, 8)
    with LlamaCpp(llama_cpp.export_model(model, tmp_path / "model.gguf", type="f32")) as server:
        theirs = [server.continuation(prompt) for prompt in prompts]
    with llama_cpp.use_table_gelu():
        comparison = llama_cpp.compare_greedy(model, prompts, theirs)
    assert all(gap < llama_cpp.TIE for gap in comparison.gaps), comparison
    assert comparison.tokens > 150 and len({tuple(ids) for ids in theirs}) > 5
    assert name == "bytes" or sum(ids[-1] == model.tokenizer.eot for ids in theirs) > 1


def test_llama_cpp_computes_the_same_losses_and_logprobs(trained: Callable[..., LanguageModel], tmp_path: Path) -> None:
    model = trained("learnt", **MODELS["learnt"])
    windows = llama_cpp.text_windows(model, TEXT)[:1]
    for kind, tolerance in (("f32", 2e-4), ("f16", 5e-4), ("q8_0", 5e-3), ("q4_0", 5e-3)):
        with LlamaCpp(llama_cpp.export_model(model, tmp_path / f"{kind}.gguf", type=kind)) as server:
            theirs = llama_cpp.their_loss(server, windows)
            total, count = total_loss(
                llama_cpp.model_with_file_weights(model.path, model, kind), windows, model.compute
            )
            assert theirs == pytest.approx(total / count, abs=tolerance), kind
            if kind == "f32":
                difference = llama_cpp.their_logprobs(server, windows, 40, model.model.config.vocab_size)
                with llama_cpp.use_table_gelu():
                    difference = np.abs(difference - llama_cpp.our_logprobs(model, windows, 40))
                assert difference.mean() < 1e-4 and difference.max() < 2e-3


def test_llama_cpp_reads_a_file_with_phi3_in_its_name(trained: Callable[..., LanguageModel], tmp_path: Path) -> None:
    with LlamaCpp(llama_cpp.export_model(trained("learnt", **MODELS["learnt"]), tmp_path / "my-Phi3.gguf")) as server:
        assert server.ids("a")
