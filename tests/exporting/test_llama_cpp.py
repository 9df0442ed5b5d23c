"""Exported .gguf files in llama.cpp; needs the extra interop. benchmarks/llama_cpp.py compares more texts."""

import json
import pydoc_data.topics
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import vocabularies
from conftest import GPT2_RANKS, make_text, more
from models import rewritten

pytest.importorskip("xllamacpp", reason="the extra interop is not installed")

from benchmarks import llama_cpp
from benchmarks.llama_cpp import LlamaCpp
from gpt import api
from gpt.api import LanguageModel
from gpt.chat import chat
from gpt.config.sample import SampleConfig
from gpt.exporting import gguf_tokenizer
from gpt.insight.evaluate import total_loss
from gpt.tokenizers.finding import find_tokenizer
from gpt.tokenizers.gguf_vocabulary import _END_WORDS
from gpt.tokenizers.tokenizer import Tokenizer, bytes_tokenizer

pytestmark = pytest.mark.slow
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
def texts() -> list[str]:
    return llama_cpp.random_texts(100)


@pytest.fixture(scope="module")
def tokenizers() -> list[Tokenizer]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TIKTOKEN_CACHE_DIR", str(GPT2_RANKS))
        if not GPT2_RANKS.is_dir():
            patched.setattr(llama_cpp, "gpt2_tokenizer", bytes_tokenizer)
        return [tokenizer for _, tokenizer in llama_cpp.vocabularies(make_text())]


@pytest.mark.parametrize("number", range(11))
def test_llama_cpp_gives_the_same_token_ids(
    number: int, tokenizers: list[Tokenizer], texts: list[str], served: Serve
) -> None:
    if number == 10 and not GPT2_RANKS.is_dir():
        pytest.skip("GPT-2's vocabulary is not here")
    assert llama_cpp.find_different_texts(tokenizers[number], served(tokenizers[number]), texts) == []


@pytest.mark.parametrize("form", ["gpt2", "llama3", "qwen", "smollm2", "gaps"])
def test_llama_cpp_encodes_prompts_of_other_families_alike(
    form: str, texts: list[str], served: Serve, tmp_path: Path
) -> None:
    tokenizer = find_tokenizer(str(vocabularies.write(form, tmp_path / form)))
    server = served(tokenizer)
    texts = [unicodedata.normalize("NFC", text) for text in texts] if form == "qwen" else texts
    words = ["<|im_start|>", "<|eot_id|>", "<think>", "<|begin_of_text|>", *tokenizer.all_specials]
    texts = [text + words[i % len(words)] + text[:5] for i, text in enumerate(texts)]
    assert llama_cpp.find_different_texts(tokenizer, server, texts) == []
    prompt_ids = [server.ids(text, add_special=True, parse_special=True) for text in texts]
    assert prompt_ids == [tokenizer.prompt(text) for text in texts]
    if tokenizer.chat_template is not None:
        response = server.post("/apply-template", messages=[{"role": "user", "content": "Hello"}])
        assert response["prompt"] == "<|im_start|>Hello<|im_end|>"


def stops(server: LlamaCpp, ids: Iterable[int]) -> set[int]:
    """Returns the ids at which llama.cpp stops, each forced by a logit bias."""

    def stop(id: int) -> str:
        response = server.post("/completion", prompt="a", n_predict=3, logit_bias=[[id, 1e9]], temperature=0)
        return str(response["stop_type"])

    return {id for id in ids if stop(id) == "eos"}


def with_specials(*words: str, ends: int = 0) -> Tokenizer:
    """Returns a bytes tokenizer with special tokens from id 257, the first of them end tokens."""
    specials = {word: id for id, word in enumerate(words, 257)}
    return Tokenizer(
        "bytes", bytes_tokenizer().backend, 256, specials=specials, more_ends=frozenset(range(257, 257 + ends))
    )


def test_llama_cpp_stops_at_the_same_tokens(served: Serve) -> None:
    tokenizer = with_specials("<|im_end|>", "<a>", "<b>", "<c>", ends=3)
    assert stops(served(tokenizer), range(256, 263)) == tokenizer.ends == {256, 257, 258, 259}


NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
NAMED = [
    *sorted(_END_WORDS - {"<|end|>", "</s>", "<|endoftext|>"}),
    "<a>",
    "<b>",
    "<c>",
    "<unused1>",
    "<|fim_pad|>",
    "<|file_sep|>",
]
TYPES = [NORMAL] * 256 + [CONTROL, USER_DEFINED, UNUSED, NORMAL] * 10
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
SENTENCE_PIECES = {
    "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": PIECES, "tokenizer.ggml.scores": [0.0] * 260,
    "tokenizer.ggml.token_type": [2, CONTROL, CONTROL, *[BYTE] * 256, NORMAL], "tokenizer.ggml.merges": None,
    **{f"tokenizer.ggml.{key}": None for key in ("bos_token_id", "eos_token_id", "add_bos_token", "add_space_prefix")},
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "metadata"),
    [
        (NAMED, {}),
        (NAMED, {"tokenizer.ggml.token_type": TYPES[: 260 + len(NAMED)]}),
        (["<|im_start|>", "<|im_end|>", "<a>"], {"tokenizer.ggml.eos_token_id": 259}),
        (["<|endoftext|>_", "<a>"], {"tokenizer.ggml.eos_token_id": 99_999, "tokenizer.ggml.eom_token_id": 258}),
        (["<|end|>", "<|return|>"], {}),
        (["<|end|>", "<|return|>", "<|call|>"], {"tokenizer.ggml.eos_token_id": 257}),
        (["<|end|>", "<|calls|>", "<|flush|>"], {}),
        (["<|end|>", "<|flush|>", "<|return|>"], {}),
        (["</s>", "<|tool_response>"], {"tokenizer.ggml.eos_token_id": 257}),
        (["</s>", "<s>"], {}),
        (["<fim_pad>", "<reponame>", "<|file_sep|>", "<a>"], {}),
        (
            ["<fim_pad>", "<reponame>", "<|file_sep|>", "<a>", "<b>", "<c>"],
            {f"tokenizer.ggml.fim_{key}_token_id": id for id, key in enumerate(("pad", "rep", "sep"), 260)},
        ),
        ([], SENTENCE_PIECES),
        ([], SENTENCE_PIECES | {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.add_bos_token": False}),
    ],
)
def test_files_end_where_llama_cpp_stops(words: list[str], metadata: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    with patch.object(gguf_tokenizer, "check"):  # It refuses some of these vocabularies.
        llama_cpp.write_untrained(file, with_specials(*words))
    file = rewritten(file, metadata)
    tokenizer = find_tokenizer(str(file))
    with LlamaCpp(file) as server:
        # Without eos_token_id, llama.cpp also stops at 11 in a byte-level vocabulary. That is Falcon's <|endoftext|>, and
        # an ordinary token in others.
        assert stops(server, [0, 1, 2, 3, *range(255, 260 + len(words))]) == tokenizer.ends
        for text in ("ab c", " a"):
            assert server.ids(text, add_special=True, parse_special=True) == tokenizer.prompt(text)


LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
ZEPHYR_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHAT_TOKENIZERS = {
    "chatml": ("bytes", None), "llama3": ("llama3", LLAMA3_TEMPLATE), "qwen": ("qwen", ZEPHYR_TEMPLATE),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAT_TOKENIZERS)
def test_chat_model_is_the_same_through_every_door(name: str, tmp_path: Path) -> None:
    """Run, file, folder and file again, and an adapter of the run as a file."""
    form, template = CHAT_TOKENIZERS[name]
    if template is not None:
        config = vocabularies.write(form, tmp_path / form) / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
        form = str(config.parent)
    turns = [[("user", f"question {i}"), ("assistant", f"answer {i}")] for i in range(4)]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in turn]}) for turn in turns]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(lines * 6))
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 64, "block_size": 64, "arch": "modern", "tokenizer": form}
    steps = {"chat": True, "steps": 120, "lr": 3e-3, "eval_every": 120, "sample_every": 0, "dtype": "float32"}
    run = api.train(chats, out=str(tmp_path / "run"), **shape, **steps).run
    lora = api.train(chats, out=str(tmp_path / "lora"), init=str(run), lora_rank=2, **steps | {"steps": 5}).run
    doors = [run, tmp_path / "1.gguf", tmp_path / "folder", tmp_path / "2.gguf"]
    for source, out in pairwise(doors):
        api.export(source, out, **({"dtype": "f32"} if out.suffix else {}))
    api.export(lora, tmp_path / "lora.gguf", dtype="f32")
    messages = [{"role": "user", "content": "question 2"}]
    results = []
    for door in (*doors, tmp_path / "lora.gguf"):
        model = api.load(door)
        prompt = model.tokenizer.encode(chat.render(model.tokenizer, messages), specials=True).tolist()
        answer = model.write(prompt, SampleConfig(greedy=True, max_tokens=30))
        text = "".join(answer)
        words = chat.special_words(model.tokenizer)
        results.append(
            (model.tokenizer.bos, words["eos_token"], model.tokenizer.chat_template, prompt, text, model.tokenizer.ends)
        )
        assert answer.sample.finish_reason == "eot"
        if door.suffix:
            with LlamaCpp(door) as server:
                rendered = server.post("/apply-template", messages=messages)["prompt"]  # Without BOS.
                assert server.ids(rendered, add_special=True, parse_special=True) == prompt
                response = server.post("/completion", prompt=prompt, n_predict=30, temperature=0)
                assert (response["content"], response["stop_type"]) == (text, "eos")
                assert stops(server, range(256, model.tokenizer.vocab_size)) == model.tokenizer.ends
    assert results[1:4] == results[1:2] * 3
    assert results[0][:-1] == results[1][:-1] == results[4][:-1]
    assert results[0][-1] <= results[1][-1]  # llama.cpp also stops at other names, and the export says so.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LanguageModel]:
    """Returns a function that trains each small model only once."""
    models: dict[str, LanguageModel] = {}

    def train(name: str, **settings: Any) -> LanguageModel:
        if name not in models:
            folder = tmp_path_factory.mktemp("llama")
            text = folder / "text.txt"
            text.write_text(TEXT, encoding="utf-8")
            shape = {"n_layer": 2, "n_embd": 96, "batch_tokens": 512, "split_on": "", "eval_every": 200}
            models[name] = llama_cpp.train_model(text, folder / "run", 200, **shape, **settings)
        return models[name]

    return train


MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"arch": "gpt2", "vocab_size": 600},
    "bytes": {"arch": "gpt2", "tokenizer": "bytes"},
    "modern": {"vocab_size": 600},
}


@pytest.mark.parametrize("name", ["gpt2", "modern", more("bytes")])
def test_llama_cpp_generates_the_same_greedy_texts(
    name: str, trained: Callable[..., LanguageModel], tmp_path: Path
) -> None:
    model = trained(name, **MODELS[name])
    prompts = llama_cpp.draw_prompts(model, TEXT, 8)
    with LlamaCpp(llama_cpp.export_model(model, tmp_path / "model.gguf", dtype="f32")) as server:
        theirs = [server.continuation(prompt) for prompt in prompts]
    with llama_cpp.use_table_gelu():
        comparison = llama_cpp.compare_greedy(model, prompts, theirs)
    assert all(gap < llama_cpp.TIE for gap in comparison.gaps), comparison
    assert comparison.tokens > 150 and len({tuple(ids) for ids in theirs}) > 5
    assert name == "bytes" or sum(ids[-1] == model.tokenizer.eot for ids in theirs) > 1


def test_llama_cpp_computes_the_same_losses_and_logprobs(trained: Callable[..., LanguageModel], tmp_path: Path) -> None:
    model = trained("gpt2", **MODELS["gpt2"])
    windows = llama_cpp.text_windows(model, TEXT)[:1]
    for kind, tolerance in (("f32", 2e-4), ("f16", 5e-4), ("q8_0", 5e-3), ("q4_0", 5e-3)):
        with LlamaCpp(llama_cpp.export_model(model, tmp_path / f"{kind}.gguf", dtype=kind)) as server:
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
    with LlamaCpp(llama_cpp.export_model(trained("gpt2", **MODELS["gpt2"]), tmp_path / "my-Phi3.gguf")) as server:
        assert server.ids("a")
