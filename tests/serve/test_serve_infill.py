"""Texts that fill a gap, in `gpt serve`."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import loud, save
from serving import Served, load, served

from gpt.api import LanguageModel
from gpt.config.model import GPTConfig
from gpt.serve.infill import fill
from gpt.serve.protocol import Gap
from gpt.tokenizers.saving import add_specials
from gpt.tokenizers.tokenizer import Tokenizer, bytes_tokenizer

QWEN = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"]
FILES = [("a.py", "x = 1\n"), ("b.py", "y")]


def tokenizer(words: list[str]) -> Tokenizer:
    return add_specials(bytes_tokenizer(), words)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    shape = GPTConfig.of("modern", 263, 128, 1, 2, 16)
    return load(save(tmp_path_factory.mktemp("model"), loud(shape), tokenizer(QWEN)))


@pytest.fixture(scope="module")
def server(model: LanguageModel) -> Iterator[Served]:
    with served(model) as api:
        yield api


@pytest.mark.parametrize(
    "words, prefix, gap, prompt",
    [
        (QWEN, "a(", Gap(")"), "<|repo_name|>myproject\n<|file_sep|>filename\n<|fim_prefix|>a(<|fim_suffix|>)<|fim_middle|>"),
        (QWEN, "a(", Gap("", "  b", FILES), "<|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\ny<|file_sep|>filename\n<|fim_prefix|>a(  b<|fim_suffix|><|fim_middle|>"),
        (QWEN[:3], "<|fim_middle|>", Gap(")"), "<|fim_prefix|><|fim_middle|><|fim_suffix|>)<|fim_middle|>"),
        (DEEPSEEK, "a(", Gap(")", "", FILES[1:]), "<｜begin▁of▁sentence｜>\n\n--- snippet ---\n\ny<｜fim▁begin｜>a(<｜fim▁hole｜>)<｜fim▁end｜>"),
        (QWEN, "0123456789" * 3, Gap("0123456789", "ab", FILES, cuts=True), "<|file_sep|>filename\n<|fim_prefix|>567890123456789ab<|fim_suffix|>0<|fim_middle|>"),
    ],
    ids=["Qwen", "files", "text is no token", "DeepSeek", "cut"],
)  # fmt: skip
def test_prompt_is_that_of_llama_cpp(words: list[str], prefix: str, gap: Gap, prompt: str) -> None:
    """The expected prompts follow llama.cpp's `format_prompt_infill`, except that BOS is always first."""
    fim_tokenizer = tokenizer(words)
    if words == DEEPSEEK:
        fim_tokenizer = replace(fim_tokenizer, bos=fim_tokenizer.specials[words[0]])
    ids = fill(fim_tokenizer, prefix, gap, context_length=40)
    assert fim_tokenizer.decode(ids) == prompt
    assert ids[-1] == fim_tokenizer.specials[next(word for word in words if "middle" in word or "end" in word)]
    assert fill(fim_tokenizer, list(prefix.encode()), gap, context_length=40) == ids


BODY = {"input_prefix": "def f(", "input_suffix": "):", "n_predict": 12, "seed": 5}


def test_infill_is_a_completion_of_its_prompt(server: Served, model: LanguageModel) -> None:
    ids = fill(model.tokenizer, "def f(", Gap("):"), 128)
    expected = server.ask(prompt=ids, max_tokens=12, seed=5)
    text = expected["choices"][0]["text"]
    answer = server.ask("/infill", **BODY)
    assert answer["content"] == text
    assert (answer["stop"], answer["stop_type"], answer["tokens_evaluated"]) == (True, "limit", len(ids))
    assert server.ask(prompt="def f(", suffix="):", max_tokens=12, seed=5)["choices"] == expected["choices"]
    response = server.post("/infill", **BODY, stream=True)
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in response.text.strip().split("\n\n")]
    assert "".join(chunk["content"] for chunk in chunks) == text
    assert (answer["timings"]["cache_n"], answer["timings"]["predicted_n"]) == (answer["tokens_cached"], 12)
    assert last == {**answer, "content": "", **{key: last[key] for key in ("tokens_cached", "timings")}}
    editor = {"samplers": ["top_k", "infill"], "n_indent": 4, "t_max_predict_ms": 500, "response_fields": ["content"]}
    assert server.ask("/infill", **BODY, **editor)["content"] == text
    assert server.ask("/infill", **BODY, stop=text[3])["stop_type"] == "word"
    for end in (model.tokenizer.eot, model.tokenizer.specials["<|fim_pad|>"]):
        answer = server.ask("/infill", **BODY, logit_bias={str(end): 100})
        assert (answer["content"], answer["stop_type"]) == ("", "eos")
    assert server.ask("/infill", input_prefix="a" * 999, input_suffix="b" * 999, n_predict=1)["tokens_predicted"] == 1


@pytest.mark.parametrize(
    "route, fields, param",
    [
        ("/infill", {"input_prefix": 1}, "input_prefix"), ("/infill", {"input_suffix": ["a"]}, "input_suffix"),
        ("/infill", {"prompt": ["a"]}, "prompt"), ("/infill", {"input_extra": [{"text": 1}]}, "input_extra"),
        ("/infill", {"input_extra": ["a"]}, "input_extra"), ("/infill", {"n": 2}, "n"),
        ("/infill", {"mirostat": 1}, "mirostat"), ("/infill", {"n_predict": "a"}, "n_predict"),
        ("/v1/completions", {"prompt": "a", "suffix": 1}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b" * 200}, "prompt"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_infills_are_refused_by_name(server: Served, route: str, fields: dict[str, Any], param: str) -> None:
    error = server.refuse(route, **fields)
    assert error["param"] == param
    assert param in error["message"]


def test_models_without_the_tokens_refuse_suffix_and_infill(run_folder: Path) -> None:
    with served(load(run_folder)) as server:
        for route, fields in (("/infill", {"input_prefix": "a"}), ("/v1/completions", {"prompt": "a", "suffix": "b"})):
            error = server.refuse(route, **fields)
            assert error["param"] == "suffix"
            assert "no fill-in-the-middle tokens" in error["message"]
