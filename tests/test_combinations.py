"""Runs with several features at once, compared with an oracle.

CONTRIBUTING's table "What meets what" names the tests of every pair of features.
"""

import json
import math
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same, curve, make_text, more, send, state_of
from models import SHAPES, loud, save
from ranks import steady_clock
from serving import served
from several import losses

import gpt as library
from gpt import api
from gpt.api import LanguageModel
from gpt.chat import chat
from gpt.config import events
from gpt.config.model import RopeScaling
from gpt.insight import report
from gpt.system.errors import Interrupted
from gpt.tokenizers.tokenizer import bytes_tokenizer

Bases = Callable[..., Path]
SHORT: dict[str, Any] = {
    "steps": 6, "batch_tokens": 256, "eval_every": 3, "save_every": 3, "sample_every": 3, "dtype": "float32",
    "dropout": 0.1,
}  # fmt: skip
NEW: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 270}
QUESTION = [{"role": "user", "content": "7 =>"}]
LORA: dict[str, Any] = {"lora_rank": 3, "lr": 1e-2}
VARIANTS: dict[str, dict[str, Any]] = {
    "windowed": {"window": 8, "window_layers": (0, 1)},
    "scaled": {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 16)},
}
TEXTS = {"pairs": "pairs.jsonl", "chat": "chats.jsonl", "preferences": "preferences.jsonl"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Returns a function that saves a base model, by default with ChatML. ``name`` is a family, or a family and a
    variant. ``forms`` are exports, each of the one before."""
    root = tmp_path_factory.mktemp("bases")

    def get(name: str, *forms: str) -> Path:
        path, (family, *variant) = root / name, name.split()
        if not path.exists():
            tokenizer = bytes_tokenizer() if variant == ["plain"] else chat.with_template(bytes_tokenizer())
            properties = VARIANTS.get(" ".join(variant), {})
            shape = {"vocab_size": tokenizer.vocab_size, "window": None, "window_layers": None, **properties}
            config = replace(SHAPES[family], **shape)
            save(path, loud(config, spread=0.1), tokenizer)
        for form in forms:
            path, source = Path(f"{path}-{form}" + ".gguf" * (form == "gguf")), path
            if not path.exists():
                api.export(source, path, **{"dtype": "f32"} if form == "gguf" else {"dtype": form})
        return path

    return get


@pytest.fixture(autouse=True)
def texts(workdir: Path) -> None:
    Path("book.txt").write_bytes(make_text(700).encode())
    questions = [(f"{n} =>", f" {n * n}" + " la" * (n % 4)) for n in range(40)]
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in questions]
    records = {
        "pairs": [{"prompt": q, "completion": a} for q, a in questions],
        "chat": [{"messages": m} for m in chats],
        "preferences": [{"chosen": m, "rejected": [m[0], {**m[1], "content": " la"}]} for m in chats[1:]],
    }
    for kind, name in TEXTS.items():
        Path(name).write_text("\n".join(map(json.dumps, records[kind])))


def train(out: str, listen: Any = lambda event: None, **settings: Any) -> Path:
    text = next((name for kind, name in TEXTS.items() if settings.get(kind)), "book.txt")
    return library.train(text, out=out, listen=listen, **{**SHORT, **settings}).run


def interrupt_and_resume(out: str, step: int, **settings: Any) -> Path:
    def on_event(event: Any) -> None:
        if isinstance(event, events.StepEvent) and event.step == step:
            send(signal.SIGINT)

    with pytest.raises(Interrupted):
        train(out, on_event, **settings)
    return library.resume(out).run


MEETINGS: dict[str, dict[str, Any]] = {
    "teachers": {**NEW, "teachers": 1, "steps": 12},
    "LoRA": {"init": "qwen3", **LORA},
    "pairs, LoRA": {"init": "mistral", **LORA, "pairs": True},
    "pairs, added context": {"init": "qwen2", "pairs": True, "block_size": 24},
    "chat, LoRA": {"init": "qwen2", **LORA, "chat": True},
    "chat, added tokens, untied": {"init": "mistral plain", "chat": True},
    "preferences, LoRA": {"init": "llama", **LORA, "preferences": True},
    "preferences, nothing held out": {"init": "gpt2", "preferences": True, "val_fraction": 0.0},
    "windows": {"init": "mistral windowed", "block_size": 16},
    "RoPE scaling, pairs, LoRA": {"init": "llama scaled", **LORA, "pairs": True},
}


def with_bases(bases: Bases, settings: dict[str, Any], *forms: str) -> dict[str, Any]:
    """Replaces the name of a family by the path of a base model."""
    return settings | ({"init": bases(settings["init"], *forms)} if "init" in settings else {})


def frames(run: Path) -> list[dict[str, Any]]:
    return [{**vars(frame), "seconds": 0.0} for frame in report.read_history(run).frames]


@pytest.mark.parametrize("name", MEETINGS)
def test_resume_is_bit_exact_and_accumulation_changes_nothing(
    name: str, bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt.training.film.MAX_SHARE", math.inf)
    settings = with_bases(bases, MEETINGS[name])
    whole = train("whole", **settings)
    parts = interrupt_and_resume("parts", 2, **settings)
    assert_same(parts, whole)
    assert curve(parts) == curve(whole)
    assert frames(parts) == frames(whole)
    last = 2 * settings.get("steps", SHORT["steps"]) // (1 + settings.get("teachers", 0)) // 2
    assert [frame["step"] - frames(whole)[0]["step"] for frame in frames(whole)] == list(range(0, last + 1, 3))
    # A forward pass of other rows draws other random numbers.
    settings |= {"dropout": 0.0, "steps": settings.get("steps", SHORT["steps"]) // 2}
    single, accumulated = train("single", **settings), train("accumulated", **settings, micro_batch="1")
    assert json.loads((accumulated / "run.json").read_text())["resolved"]["micro_batch"] == 1
    assert losses(accumulated) == pytest.approx(losses(single), rel=1e-4)


KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"init": "llama", **LORA},
    "pairs": {"init": "qwen2", "pairs": True},
    "chat, LoRA": {"init": "qwen3", **LORA, "chat": True},
    "preferences, LoRA": {"init": "qwen2", **LORA, "preferences": True},
    "chat, added tokens": {"init": "gpt2 plain", "chat": True},
}


@pytest.mark.parametrize("name", KINDS)
def test_training_from_a_gguf_file_equals_training_from_its_weights(name: str, bases: Bases) -> None:
    """The second run is interrupted and resumed."""
    whole = train("whole", **with_bases(bases, KINDS[name], "gguf", "float32"))
    parts = interrupt_and_resume("parts", 2, **with_bases(bases, KINDS[name], "gguf"))
    assert curve(parts) == curve(whole)
    expected = state_of(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state_of(parts).items())


@pytest.mark.parametrize("name", ["pairs", "chat, LoRA", "preferences, LoRA", "teachers"])
def test_timed_run_equals_a_run_of_its_steps(name: str, bases: Bases) -> None:
    settings = with_bases(bases, {**KINDS, "teachers": {**NEW, "teachers": 1}}[name])
    is_taught = name == "teachers"
    with steady_clock(6, cycles=1 + is_taught):
        timed = train("timed", **{**settings, "steps": None, "minutes": 1.0})
    resolved = json.loads((timed / "run.json").read_text())["resolved"]
    keys = ("steps",) if is_taught else ("steps", "warmup", "decay", "weight_decay", "lr")
    copied = {key: resolved[key] for key in keys}
    assert losses(train("repeated", **{**settings, **copied})) == losses(timed)


IDS = torch.arange(2, 250, 9)[None]
GREEDY: dict[str, Any] = {"greedy": True, "max_tokens": 50}  # The context has 32 tokens.


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.inference_mode():
        return model.model(IDS)


EXPORTED: dict[str, dict[str, Any]] = {
    "gpt2, chat, added tokens": {"init": "gpt2 plain", "chat": True},
    "llama, LoRA": {"init": "llama plain", **LORA},
    "mistral, pairs": {"init": "mistral plain", "pairs": True},
    "qwen2, chat, LoRA": {"init": "qwen2", **LORA, "chat": True},
    "qwen3, LoRA": {"init": "qwen3 plain", **LORA},
}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("gpt2, chat, added tokens", "float32"), ("qwen2, chat, LoRA", "gguf"), more("llama, LoRA", "gguf"),
        ("qwen3, LoRA", "float32"), more("llama, LoRA", "float32"), more("mistral, pairs", "float32"), more("gpt2, chat, added tokens", "gguf"),
    ],
)  # fmt: skip
def test_exports_have_the_logits_texts_and_ends_of_the_trained_model(name: str, form: str, bases: Bases) -> None:
    settings = with_bases(bases, EXPORTED[name], form)
    run = train("run", **{**settings, "lr": 1e-2, "dropout": 0.0})
    trained, prompt = library.load(run), IDS[0].tolist()
    size = len(logits(library.load(settings["init"]))[0, 0])
    assert not torch.allclose(logits(trained)[..., :size], logits(library.load(settings["init"])), atol=1e-2)
    api.export(run, "model.gguf", dtype="f32")
    api.export(run, "folder")
    api.export("model.gguf", "again.gguf", dtype="f32")
    for path in ("model.gguf", "folder", "again.gguf"):
        exported = library.load(path)
        assert torch.allclose(logits(exported), logits(trained), atol=1e-5), path
        assert exported.generate(prompt, **GREEDY) == trained.generate(prompt, **GREEDY), path
        assert exported.tokenizer.prompt("a<|im_end|>") == trained.tokenizer.prompt("a<|im_end|>"), path
        assert exported.tokenizer.ends == trained.tokenizer.ends, path
        assert exported.tokenizer.chat_template == trained.tokenizer.chat_template, path
    own, copy = (library.load(path, dtype="int8", for_decoding=True) for path in (run, "model.gguf"))
    assert torch.equal(logits(own), logits(copy))
    assert own.generate(prompt, **GREEDY) == copy.generate(prompt, **GREEDY)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gpt2", "int8"),
        ("qwen2", "int4"),
        ("mistral windowed", "float32"),
        *(more(family, dtype) for family, dtype in product(SHAPES, ("float32", "bfloat16", "int8", "int4"))),
    ],
)
def test_neighbours_in_the_server_do_not_change_a_text(family: str, dtype: str, bases: Bases) -> None:
    """Texts continue past the context."""
    model = library.load(bases(family), dtype=dtype, for_decoding=True)
    settings = {"max_tokens": 40, "ignore_eos": True, "logprobs": 0}
    bodies = [{"prompt": list(range(40, 40 + size)), "seed": size, **settings} for size in (1, 9, 30, 31)]
    chat_body = {"messages": QUESTION, "seed": 3, "max_tokens": 5, "ignore_eos": True, "logprobs": True}

    def ask(number: int) -> tuple[str, list[float]]:
        if number == len(bodies):
            choice = server.ask("/v1/chat/completions", **chat_body)["choices"][0]
            return choice["message"]["content"], [token["logprob"] for token in choice["logprobs"]["content"]]
        choice = server.ask(**bodies[number])["choices"][0]
        return choice["text"], choice["logprobs"]["token_logprobs"]

    with served(model) as server, ThreadPoolExecutor(5) as pool:
        alone = [ask(number) for number in range(5)]
        beside = list(pool.map(ask, range(5)))
    assert beside == alone
