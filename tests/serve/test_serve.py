"""Responses of `gpt serve`, compared with `gpt sample`."""

import base64
import codecs
import contextlib
import itertools
import json
import math
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, Gpt, make_text, one_line_of_what_and_what_next
from serving import Served, load, served

from gpt import api
from gpt.api import LanguageModel
from gpt.chat import chat as template
from gpt.config.sample import SampleConfig
from gpt.config.serve import ServeConfig
from gpt.decoding.engine import Update, generate
from gpt.decoding.logits import Token
from gpt.decoding.write import Sample
from gpt.insight.inspect import inspect_prompt
from gpt.insight.passages import TrainingText
from gpt.insight.report import find_training_tokens
from gpt.runs import folder
from gpt.serve import answers, protocol
from gpt.serve import server as servers
from gpt.serve.choices import Choice, Prompt, chat_logprobs, completion_logprobs
from gpt.system.errors import UserError
from gpt.tokenizers.backends import ByteBPE
from gpt.tokenizers.boundaries import GPT2_PATTERN
from gpt.tokenizers.tokenizer import Tokenizer, bytes_tokenizer

PROMPT = "the cat sat on"
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
CHAT = [{"role": "system", "content": "Be a cat."}, {"role": "user", "content": [{"type": "text", "text": "the cat"}]}]
TEXT = "s:Be a cat.\nu:the cat\na:"


@pytest.fixture(scope="module")
def model(run_folder: Path) -> LanguageModel:
    return load(run_folder)


@pytest.fixture(scope="module")
def server(model: LanguageModel) -> Iterator[Served]:
    with served(model) as api:
        yield api


def sample(
    model: LanguageModel, prompt: str | list[int] = PROMPT, seed: int = 0, index: int = 0, **settings: Any
) -> Sample:
    """Generates a sample like `gpt sample`, with the server's defaults."""
    config = SampleConfig(**{"temperature": 1.0, "max_tokens": 16, **settings})
    writing = model.write(prompt, config, seed, index)
    list(writing)
    return writing.sample


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"], "additionalProperties": False}
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # Request fields, and `gpt sample` options
    ({}, {}),
    ({"temperature": 0}, {"greedy": True}),
    ({"temperature": 0.5, "top_p": 0.8}, {"temperature": 0.5, "top_p": 0.8}),
    ({"top_p": 0}, {"greedy": True}),
    ({"top_k": 5, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
    ({"top_k": 0, "min_p": 0, "top_p": 1, "stop": [], "echo": False, "logit_bias": None, "metadata": {}}, {}),
    ({"no_such_field": {"a": [1]}, "user": "me", "model": "tiny"}, {}),
    ({"repetition_penalty": 1.5, "no_repeat_ngram": 2}, {"repetition_penalty": 1.5, "no_repeat_ngram": 2}),
    ({"presence_penalty": 2, "frequency_penalty": -1.5}, {"presence_penalty": 2.0, "frequency_penalty": -1.5}),
    ({"max_tokens": 40, "min_tokens": 30}, {"max_tokens": 40, "min_tokens": 30}),
    ({"max_tokens": 60, "ignore_eos": True}, {"max_tokens": 60, "ignore_eot": True}),
    ({"stop": "a"}, {"stop": ("a",)}),
    ({"stop": ["ing", " the"], "max_tokens": 50}, {"stop": ("ing", " the"), "max_tokens": 50}),
    ({"choices": ["the", "a, cat"]}, {"choices": ("the", "a, cat")}),
    ({"guided_choice": ["sat", "\ud800"], "regex": None}, {"choices": ("sat", "\ufffd")}),
    ({"regex": "(cat|dog)s? [a-z]*", "top_k": 5}, {"regex": "(cat|dog)s? [a-z]*", "top_k": 5}),
    ({"guided_regex": "[a-c ]+"}, {"regex": "[a-c ]+"}),
    ({"json_schema": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}),
    ({"guided_json": json.dumps(SCHEMA), "choices": None}, {"json_schema": json.dumps(SCHEMA)}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": json.dumps(SCHEMA)}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        {"json_schema": json.dumps(SCHEMA)},
    ),
    ({"max_tokens": 0}, {"max_tokens": 0}),
    ({"max_tokens": 16.0, "n": None, "stop": None, "logprobs": None, "logit_bias": {}, "suffix": ""}, {}),
]  # fmt: skip


@pytest.mark.parametrize("fields, settings", SETTINGS, ids=str)
def test_text_equals_gpt_sample(server: Served, model: LanguageModel, fields: Any, settings: Any) -> None:
    body = {"prompt": PROMPT, "seed": 3, "n": 2, **{key: value for key, value in fields.items() if key != "n"}}
    expected = [sample(model, seed=3, index=index, **settings) for index in range(2)]
    answer = server.ask(**body)
    assert [choice["text"] for choice in answer["choices"]] == [expected_sample.text for expected_sample in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    reasons = ["length" if expected_sample.finish_reason == "length" else "stop" for expected_sample in expected]
    assert [choice["finish_reason"] for choice in answer["choices"]] == reasons
    count = sum(len(expected_sample.tokens) + (expected_sample.finish_reason == "eot") for expected_sample in expected)
    prompt = len(model.tokenizer.prompt(PROMPT))
    usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    usage["prompt_tokens_details"] = {"cached_tokens": 0}  # The prompt is too short for the prefix cache.
    assert answer["usage"] == usage
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert all(choice["logprobs"] is None for choice in answer["choices"])

    chunks = server.stream(**body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == usage
    for index, expected_sample in enumerate(expected):
        choices = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == expected_sample.text
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == reasons[index]
    assert all(c["usage"] is None and c["id"] == chunks[0]["id"] for c in chunks[:-1])


def test_seed_selects_the_text_of_gpt_sample(server: Served, model: LanguageModel) -> None:
    for seed in (7, -5, 2**63 - 1, -(2**63)):
        assert server.ask(prompt=PROMPT, seed=seed)["choices"][0]["text"] == sample(model, seed=seed).text
    for seed in ({}, {"seed": -1}):  # The server draws a random seed.
        assert len({server.ask(prompt=PROMPT, max_tokens=30, **seed)["choices"][0]["text"] for _ in range(4)}) > 1


def test_prompts_can_be_text_ids_or_lists(server: Served, model: LanguageModel) -> None:
    texts = [PROMPT, "dogs chased", ""]
    ids = [model.tokenizer.prompt(text) for text in texts]
    expected = [sample(model, text, index=index).text for text in texts for index in range(2)]
    for prompts in (texts, ids):
        answer = server.ask(prompt=prompts, n=2, seed=0)
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert server.ask(prompt=ids[0], seed=0)["choices"][0]["text"] == expected[0]
    response = server.ask(prompt=[texts[0], ids[1]], seed=0)
    assert [choice["text"] for choice in response["choices"]] == [expected[0], expected[2]]


def test_cached_tokens_are_counted(server: Served) -> None:
    prefix = list(range(40, 60))
    for prompts, n, cached in (([[*prefix, 7]], 1, 0), ([[*prefix, 7]], 2, 20), ([[*prefix, 8], [*prefix, 9]], 1, 40)):
        answer = server.ask(prompt=prompts, n=n, max_tokens=2)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    *_, last = server.stream(prompt=[*prefix, 8, 9], max_tokens=2, stream_options={"include_usage": True})
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] in (20, 21)  # The cached prefix can include id 8.


def test_second_turn_is_cached_beside_other_requests(server: Served, model: LanguageModel) -> None:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    turn = [*range(60, 77)]
    answer = sample(model, turn, greedy=True, max_tokens=4, ignore_eot=True).tokens
    next_turn = [*turn, *answer, 1, 2]
    with ThreadPoolExecutor() as pool:
        other = pool.submit(server.ask, prompt=[9] * 9, max_tokens=200)
        for prompt, cached in ((turn, 0), ([7] * 20, 0), (next_turn, 17 + 4 - 1)):
            usage = server.ask(prompt=prompt, **settings)["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": cached}
        assert other.result()["choices"]


def test_sampling_defaults_apply_to_missing_fields(model: LanguageModel) -> None:
    defaults = {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.5}
    with served(model, sampling=defaults) as server:
        assert server.client.get("/v1/models").json()["data"][0]["sampling"] == defaults  # The page starts with them.
        for fields, settings in (
            ({}, {}), ({"temperature": None, "top_p": 1}, {"top_p": 0.0}), ({"temperature": 0}, {"greedy": True}),
            ({"repeat_penalty": 1}, {"repetition_penalty": 0.0}),
        ):  # fmt: skip
            answer = server.ask(prompt=PROMPT, seed=1, **fields)
            assert answer["choices"][0]["text"] == sample(model, seed=1, **{**defaults, **settings}).text


@pytest.mark.parametrize("count, max_tokens, echo", [(5, 12, False), (5, 12, True), (1, 0, True), (0, 1, False)])
def test_logprobs_equal_gpt_sample(
    server: Served, model: LanguageModel, count: int, max_tokens: int, echo: bool
) -> None:
    prompt = "Zürich; naïve 🐕"
    expected = sample(model, prompt, max_tokens=max_tokens, logprobs=count, echo_logprobs=echo)
    answer = server.ask(prompt=prompt, seed=0, max_tokens=max_tokens, logprobs=count, echo=echo)
    choice, tokens = answer["choices"][0], [*(expected.prompt_logprobs or ()), *(expected.logprobs or ())]
    logprobs = choice["logprobs"]
    assert choice["text"] == (prompt if echo else "") + expected.text
    assert len(logprobs["tokens"]) == len(tokens)
    assert logprobs["tokens"] == [display_token(model, token.id) for token in tokens]
    if echo:
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
    for token, name, logprob, top in zip(
        tokens, logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        if token.logprob is None:
            continue
        assert logprob == pytest.approx(token.logprob, abs=1e-5)
        assert top[name] == logprob
        most_likely = [display_token(model, id) for id, _ in token.top]
        assert list(top)[:count] == most_likely
        assert len(top) == count + (name not in most_likely)
        assert max(top.values()) == next(iter(top.values()))
    data = [model.tokenizer.decode_bytes([token.id]) for token in tokens if token.id not in model.tokenizer.ends]
    assert b"".join(data).decode(errors="replace") == choice["text"]
    assert logprobs["text_offset"] == [token_offset(data, at) for at in range(len(tokens))]


def token_offset(data: list[bytes], at: int) -> int:
    """Returns the position of the character that contains a token's first byte."""
    all_bytes, bad_ends = b"".join(data), dict[int, int]()

    def record_error(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        bad_ends[error.start] = error.end
        return "�", error.end

    codecs.register_error("replaced", record_error)
    positions = list[int]()
    for number, char in enumerate(all_bytes.decode(errors="replaced")):
        positions += [number] * (bad_ends.get(len(positions), len(positions) + len(char.encode())) - len(positions))
    return [*positions, len(set(positions))][sum(map(len, data[:at]))]


PIECES = [
    bytes.fromhex(each) for each in ["78f0", "9f90", "9579", "e280", "9973", "20f09f90", "80f0", "efbfbd", "efbf"]
]


def test_text_offsets_are_correct_for_partial_characters() -> None:
    pieces = [*(bytes([byte]) for byte in range(256)), *PIECES]
    tokenizer = Tokenizer("bpe", ByteBPE(GPT2_PATTERN, {piece: id for id, piece in enumerate(pieces)}), len(pieces))
    rng = random.Random(1)
    partial_ids = [0x61, 0xF0, 0x9F, 0x90, 0x95, 0xE0, 0x80, 0xBD, *range(256, len(pieces))]
    for _ in range(500):
        ids = rng.choices(partial_ids, k=8)
        config = SampleConfig(logprobs=0)
        choice = Choice(tokenizer, config, Prompt([tokenizer.eot], 1), False)
        tokens = tuple(Token(id, -1.0) for id in [*ids, tokenizer.eot])
        delta = choice.push(Update(0, tokens=tokens, reason="eot"))
        data = [pieces[id] for id in ids]
        assert delta.text == b"".join(data).decode(errors="replace")
        assert [offset for _, offset in delta.tokens] == [token_offset(data, at) for at in range(9)]
        for (_, offset), token_bytes in zip(delta.tokens, data, strict=False):
            with contextlib.suppress(UnicodeDecodeError):
                assert delta.text[offset:].startswith(token_bytes.decode())


def display_token(model: LanguageModel, id: int) -> str:
    data = model.tokenizer.decode_bytes([id])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def test_lm_evaluation_harness_gets_correct_logprobs(server: Served, model: LanguageModel) -> None:
    """lm-evaluation-harness compares log-probabilities to see if a token is greedy."""
    prompts = [model.tokenizer.prompt(text) for text in (PROMPT, "dogs", "the mat while raining in")]
    answer = server.ask(prompt=prompts, temperature=0, max_tokens=1, logprobs=1, echo=True, seed=1234)
    for choice, ids in zip(answer["choices"], prompts, strict=True):
        logprobs_of_choice = choice["logprobs"]
        assert len(logprobs_of_choice["token_logprobs"]) == len(ids) + 1
        with torch.inference_mode():
            logits = model.model.unembed(model.model.trunk(torch.tensor([ids])))[0, :, : model.tokenizer.vocab_size]
            logprobs = logits.log_softmax(-1)
        for at in range(1, len(ids)):
            assert logprobs_of_choice["token_logprobs"][at] == pytest.approx(float(logprobs[at - 1, ids[at]]), abs=1e-5)
            greedy = logprobs_of_choice["token_logprobs"][at] == max(logprobs_of_choice["top_logprobs"][at].values())
            assert greedy == (int(logprobs[at - 1].argmax()) == ids[at])


def test_echo_marks_partial_characters(server: Served, model: LanguageModel) -> None:
    partial_ids = model.tokenizer.encode("🦊").tolist()[:-1]
    choice = server.ask(prompt=partial_ids, echo=True, logprobs=0, max_tokens=2, temperature=0)["choices"][0]
    assert choice["text"].startswith("�")
    assert all(token.startswith("bytes:") for token in choice["logprobs"]["tokens"][: len(partial_ids)])
    assert choice["logprobs"]["text_offset"][len(partial_ids)] == len(model.tokenizer.decode(partial_ids))


def test_empty_prompt_is_echoed(server: Served, model: LanguageModel) -> None:
    chunks = server.stream(prompt="", echo=True, max_tokens=3, seed=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == sample(model, "", max_tokens=3).text


def test_streamed_logprobs_equal_the_whole_response(server: Served) -> None:
    body = {"prompt": PROMPT, "seed": 2, "max_tokens": 12, "logprobs": 3, "echo": True, "stop": ["an"]}
    choice = server.ask(**body)["choices"][0]
    parts = [chunk["choices"][0] for chunk in server.stream(**body)]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for key in ("tokens", "text_offset"):
        assert [item for part in parts for item in part["logprobs"][key]] == choice["logprobs"][key]
    streamed_logprobs = [item for part in parts for item in part["logprobs"]["token_logprobs"]]
    assert streamed_logprobs[1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-5)


def test_streams_have_no_partial_characters_or_stop_strings(server: Served, model: LanguageModel) -> None:
    """A bias forces tokens that are parts of characters."""
    ids = model.tokenizer.encode("🦊").tolist()
    bias = {str(id): 100 for id in set(ids)}
    for seed, stop in enumerate(([], ["🦊"], ["�"])):
        body = {"prompt": "🦊", "logit_bias": bias, "seed": seed, "max_tokens": 20, "stop": stop}
        choice = server.ask(**body)["choices"][0]
        parts = [chunk["choices"][0]["text"] for chunk in server.stream(**body)]
        assert "".join(parts) == choice["text"]
        assert not any(stop_string in choice["text"] for stop_string in stop)
    text = server.ask(prompt=PROMPT, temperature=0, max_tokens=40)["choices"][0]["text"]
    for stop in (text[5:9], text[-6:], text[:2], text[3:30]):
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "stop": [stop]}
        parts = [chunk["choices"][0]["text"] for chunk in server.stream(**body)]
        assert "".join(parts) == text[: text.index(stop)] == server.ask(**body)["choices"][0]["text"]
        assert server.ask(**body)["choices"][0]["finish_reason"] == "stop"


def test_logit_bias_forces_and_forbids_tokens(server: Served, model: LanguageModel) -> None:
    id = int(model.tokenizer.encode("z")[0])
    assert server.ask(prompt=PROMPT, max_tokens=5, logit_bias={str(id): 100})["choices"][0]["text"] == "zzzzz"
    first = server.ask(prompt=PROMPT, temperature=0, max_tokens=1, logprobs=1)["choices"][0]
    (banned,) = model.tokenizer.encode(first["text"], continues=True).tolist()
    other = server.ask(prompt=PROMPT, temperature=0, max_tokens=1, logit_bias={str(banned): -100})["choices"][0]
    assert other["text"] != first["text"]


def test_text_with_penalties_matches_a_reference(server: Served, model: LanguageModel) -> None:
    """The expected text is decoded without a KV cache."""
    presence, frequency = 0.9, 0.6
    ids, counts = model.tokenizer.prompt(PROMPT), Counter[int]()
    start = len(ids)
    for _ in range(14):
        with torch.inference_mode():
            logits = model.model.unembed(model.model.trunk(torch.tensor([ids])))[0, -1, : model.tokenizer.vocab_size]
        logits = logits.clone()
        for id, count in counts.items():
            logits[id] -= presence + frequency * count
        ids.append(int(logits.argmax()))
        counts[ids[-1]] += 1
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 14, "ignore_eos": True}
    answer = server.ask(**body, presence_penalty=presence, frequency_penalty=frequency)
    assert answer["choices"][0]["text"] == model.tokenizer.decode(ids[start:])
    assert answer["choices"][0]["text"] != server.ask(**body)["choices"][0]["text"]


DEEP_LIST = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    "field, value",
    [
        ("prompt", 5), ("prompt", []), ("prompt", [[]]), ("prompt", [True]), ("prompt", [1, "a"]), ("prompt", [400]),
        ("prompt", [2**70]), ("prompt", DEEP_LIST), ("prompt", ["a"] * 129), ("prompt", "ab " * 3000), ("max_tokens", "5"),
        ("max_tokens", -2), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", 10**300), ("temperature", 101),
        ("temperature", [1]), ("top_p", 1.1), ("top_k", -2), ("min_p", 2), ("n", 0), ("n", 129),
        ("stop", {}), ("stop", [1]), ("stop", ["a"] * 257), ("stop", "a" * 1001), ("seed", 1.5), ("seed", 2**63),
        ("echo", 1), ("logprobs", 21), ("logit_bias", [1]), ("logit_bias", {"400": 1}), ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": "x"}), ("logit_bias", {"²": 1}), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
        ("repetition_penalty", -1), ("no_repeat_ngram", -1), ("min_tokens", -1), ("ignore_eos", "yes"),
        ("stream", "yes"), ("stream_options", {"include_usage": 1}),
    ],
    ids=lambda value: f"{value!s:.20}",
)  # fmt: skip
def test_invalid_value_error_names_the_field(server: Served, field: str, value: Any) -> None:
    error = server.refuse(**{"prompt": "a", field: value})
    assert error["param"] == field
    assert field in error["message"]
    assert len(error["message"]) < 400
    assert error["type"] == "invalid_request_error"


def test_contradictory_fields_are_an_error(server: Served) -> None:
    assert server.refuse(max_tokens=1)["param"] == "prompt"
    assert server.refuse(prompt=None)["param"] == "prompt"
    assert server.refuse(prompt=["a"] * 128, n=9)["param"] == "n"
    assert server.refuse(prompt="a", n=128, max_tokens=4096, logprobs=20)["param"] == "max_tokens"
    assert server.refuse(prompt="a", model="gpt-4", status=404)["code"] == "model_not_found"
    assert server.refuse(prompt="a", model="\ud800", status=404)["param"] == "model"
    assert server.refuse(prompt="a", model=["tiny"], status=404)["param"] == "model"


WRONG_CONSTRAINTS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"choices": "yes"}, 'choices is "yes"; it must be a list', "choices"),
    ({"guided_choice": {"a": 1}}, "guided_choice is {'a': 1}; it must be a list", "guided_choice"),
    ({"choices": ["a", ""]}, "choices must be a list of non-empty strings", "choices"),
    ({"regex": 1}, "regex is 1; it must be a string", "regex"),
    ({"json_schema": 0.5}, "json_schema is 0.5; it must be a string or an object", "json_schema"),
    ({"guided_json": True}, "guided_json is true; it must be a string or an object", "guided_json"),
    ({"response_format": "json"}, 'response_format is "json"; it must be an object', "response_format"),
    ({"response_format": {}}, "response_format must be of type text,", "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format must have a schema", "response_format"),
    ({"response_format": {"type": "json_object"}, "json_schema": {}}, "json_schema cannot be combined", "json_schema"),
    (
        {"response_format": {"type": "json_object"}, "regex": "a"},
        "regex cannot be combined with response_format",
        "regex",
    ),
    ({"regex": ""}, "regex is empty", "regex"),
    ({"guided_choice": []}, "guided_choice is empty", "guided_choice"),
    ({"json_schema": {"not": {}}}, 'json_schema: Unimplemented keys: ["not"]', "json_schema"),
    ({"json_schema": {"const": "\ud800"}}, "json_schema: ", "json_schema"),
    ({"regex": "a(?=b)"}, "regex: look-around", "regex"),
    ({"regex": "a", "ignore_eos": True}, "structured output cannot ignore end-of-text", None),
    ({"regex": "a" * 2**21}, "regex has 2,097,152 characters, which is too long", "regex"),
]


@pytest.mark.parametrize("fields, message, param", WRONG_CONSTRAINTS, ids=lambda each: str(each)[:60])
def test_invalid_constraint_is_an_error(
    server: Served, fields: dict[str, Any], message: str, param: str | None
) -> None:
    error = server.refuse(prompt=PROMPT, **fields)
    assert error["message"].startswith(message), error["message"]
    assert error["param"] == param


def test_chat_follows_a_json_schema(chat: Served) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for settings in ({}, {"temperature": 0}, {"stream": True}):
        body = {"messages": CHAT, "response_format": response_format, "seed": 0, "max_tokens": 30, "n": 3, **settings}
        if "stream" in settings:
            chunks = [choice["choices"][0] for choice in chat.stream("/v1/chat/completions", **body)]
            texts = ["".join(c["delta"]["content"] for c in chunks if c["index"] == index) for index in range(3)]
        else:
            texts = [choice["message"]["content"] for choice in chat.ask("/v1/chat/completions", **body)["choices"]]
        assert all(json.loads(text) in ({"a": 1}, {"a": "b"}) for text in texts), texts


DOCS = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def documented_fields(prefix: str) -> set[str]:
    """Returns the documented fields whose description starts with ``prefix``."""
    rows = re.findall(r"^\| (.+) \| (.+) \|$", DOCS, re.MULTILINE)
    return {name for fields, happens in rows if happens.startswith(prefix) for name in re.findall(r"`(\w+)`", fields)}


ROUTES = (
    ("/v1/completions", {"prompt": PROMPT}, {**protocol.REFUSED, **protocol.REFUSED_IN_COMPLETIONS}),
    ("/v1/chat/completions", {"messages": CHAT}, {**protocol.REFUSED, **protocol.REFUSED_IN_CHATS}),
    (
        "/v1/responses",
        {"input": CHAT},
        {**protocol.REFUSED, **protocol.REFUSED_IN_CHATS, **protocol.REFUSED_IN_RESPONSES},
    ),
)


@pytest.mark.parametrize("route, body, refused", ROUTES, ids=["completions", "chats", "responses"])
def test_unsupported_fields_are_refused_or_ignored(
    chat: Served, route: str, body: dict[str, Any], refused: dict[str, Any]
) -> None:

    def ask(**fields: Any) -> Any:
        answer = chat.ask(route, **body, seed=0, max_tokens=4, **fields)
        return answer["choices"] if "choices" in answer else answer["output"][0]["content"]

    expected = ask()
    for at in range(max(map(len, refused.values()))):
        assert ask(**{name: values[at % len(values)] for name, values in refused.items() if values}) == expected
    assert ask(**dict.fromkeys(refused)) == expected
    for name, value in zip(refused, itertools.cycle(("x", 0.5, {"a": 1})), strict=False):
        error = chat.refuse(route, **body, **{name: value})
        assert error["param"] == name
        assert name in error["message"]
    for value in (0, 0.5, "x", [1], {"a": 1}, True):
        assert ask(**dict.fromkeys(documented_fields("accepted"), value)) == expected


def test_docs_list_every_field() -> None:
    assert documented_fields("not supported") == {name for _, _, refused in ROUTES for name in refused}
    assert documented_fields("other names") == set(protocol.ALIASES)
    assert len(documented_fields("accepted")) > 30


def test_field_aliases_of_other_servers_work(server: Served, model: LanguageModel) -> None:
    for fields, settings in (
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.5, "repeat_last_n": -1}, {"repetition_penalty": 1.5}),
        ({"repeat_penalty": 1.0, "repeat_last_n": 64}, {}),
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram": 2}),
    ):
        assert server.ask(prompt=PROMPT, seed=0, **fields)["choices"][0]["text"] == sample(model, **settings).text
    assert len(server.ask(prompt=PROMPT, n_cmpl=3)["choices"]) == 3
    for fields in ({"n_predict": "x"}, {"repeat_penalty": -1}, {"n_predict": 5, "max_tokens": 6}):
        error = server.refuse(prompt=PROMPT, **fields)
        assert error["param"] == next(iter(fields))
        assert error["param"] in error["message"]
    for penalty in ({"repeat_penalty": 2}, {"presence_penalty": 1}, {"frequency_penalty": -1}):
        for last in (0, 64):
            assert server.refuse(prompt=PROMPT, **penalty, repeat_last_n=last)["param"] == "repeat_last_n"


def test_stop_token_ids_end_generation(server: Served, model: LanguageModel) -> None:
    expected = sample(model, max_tokens=12, ignore_eot=True)
    body = {"prompt": PROMPT, "seed": 0, "max_tokens": 12, "ignore_eos": True}
    for at in (0, 5, 11):
        end = expected.tokens[at]
        first = expected.tokens.index(end)
        answer = server.ask(**body, stop_token_ids=[end], logprobs=0)
        (choice,) = answer["choices"]
        assert choice["text"] == model.tokenizer.decode(expected.tokens[:first])
        assert choice["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) == first + 1
        parts = [chunk["choices"][0]["text"] for chunk in server.stream(**body, stop_token_ids=[end], stop=["🦊"])]
        assert "".join(parts) == choice["text"]
    assert server.ask(**body, stop_token_ids=[])["choices"][0]["finish_reason"] == "length"
    for invalid in (5, [1.5], ["a"], {}, [True], [1] * 300):
        assert server.refuse(**body, stop_token_ids=invalid)["param"] == "stop_token_ids"
    assert server.refuse(**body, stop_token_ids=[1], min_tokens=3)["param"] == "stop_token_ids"


def test_unpaired_surrogates_are_replaced_and_control_characters_kept(server: Served) -> None:
    answer = server.ask(prompt="a\ud800b\x00\x1b[31m", echo=True, max_tokens=0, stop=["\udfff"])
    assert answer["choices"][0]["text"] == "a�b\x00\x1b[31m"


@pytest.mark.parametrize("settings, length", [({}, 32), ({"limit_tokens": 9}, 32), ({"context": 20}, 20)])
def test_prompt_limit_is_the_advertised_context(model: LanguageModel, settings: dict[str, int], length: int) -> None:
    with served(model, **settings) as api:
        (served_model,) = api.client.get("/v1/models").json()["data"]
        assert served_model["context_length"] == api.ask("/tokenize", prompt="a")["max_model_len"] == length
        assert api.ask(prompt=[97] * length, max_tokens=1)
        error = api.refuse(prompt=[97] * (length + 1), max_tokens=1)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_models_route_describes_the_model(server: Served) -> None:
    response = server.client.get("/v1/models").json()
    assert response["object"] == "list"
    (model,) = response["data"]
    assert (model["id"], model["object"], model["context_length"]) == ("tiny", "model", 32)
    assert server.client.get("/models/tiny").json() == model
    error = server.client.get("/v1/models/no/such").json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_tokenizer_routes_work_for_lm_evaluation_harness(server: Served, model: LanguageModel) -> None:
    info = server.client.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == ("<|endoftext|>", None, None)
    for text in ("", "it’s raining", "a <|endoftext|> b", "\x00🐕"):
        ids = server.ask("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
        assert ids == model.tokenizer.encode(text).tolist()
        assert server.ask("/detokenize", tokens=ids)["prompt"] == text
    assert server.ask("/tokenize", prompt=info["eos_token"], add_special_tokens=False)["tokens"] == [
        model.tokenizer.eot
    ]
    assert server.refuse("/tokenize", prompt=[1])["param"] == "prompt"
    for tokens in ([400], [-1], ["a"], 5, None, [True]):
        assert server.refuse("/detokenize", tokens=tokens)["param"] == "tokens"


@pytest.mark.parametrize("length", [1, 9, 100])
def test_inspection_equals_gpt_inspect(server: Served, run_folder: Path, length: int) -> None:
    loaded = api.load(run_folder, dtype="float32")  # Not laid out for decoding
    ids = (loaded.tokenizer.prompt(PROMPT) * 40)[:length]
    expected = inspect_prompt(loaded.model, ids, loaded.tokenizer)
    answer = server.ask("/inspect", ids=ids)
    assert [token["id"] for token in answer["tokens"]] == expected.ids.tolist()
    assert b"".join(bytes(token["bytes"]) for token in answer["tokens"]) == loaded.tokenizer.decode_bytes(expected.ids)
    attention = np.frombuffer(base64.b64decode(answer["attention"]), "<f4")
    shape = (answer["layers"], answer["heads"], len(expected.ids))
    assert np.allclose(attention.reshape(shape), expected.patterns[:, :, -1], atol=1e-5)
    shares = [[token["probability"] for token in row] for row in answer["lens"]]
    assert np.allclose(shares, expected.lens.probabilities[:, -1], atol=1e-5)
    assert [row[0]["id"] for row in answer["lens"]] == expected.lens.ids[:, -1, 0].tolist()
    logits = {token["id"]: token["logit"] for token in answer["next"]}
    assert len(logits) == 200
    assert np.allclose([expected.logits[id] for id in logits], [*logits.values()], atol=1e-4)
    others = np.logaddexp.reduce(np.delete(expected.logits, [*logits]))
    assert answer["rest"] == pytest.approx(others, abs=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_inspection_predicts_what_is_generated(run_folder: Path, dtype: str) -> None:
    loaded = api.load(run_folder, dtype=dtype, for_decoding=True)
    with served(loaded) as server:
        ids = loaded.tokenizer.prompt(PROMPT)
        fields = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 5, "token_details": True}
        (token,) = server.ask(**fields)["choices"][0]["logprobs"]["content"]
        best, *_ = server.ask("/inspect", ids=ids)["next"]
        assert best["id"] == token["id"]
        assert best["logprob"] == pytest.approx(token["logprob"], abs=0.05)


def test_inspections_run_beside_generation_and_reject_invalid_ids(server: Served) -> None:
    ids = [1, 2, 3]
    with ThreadPoolExecutor(9) as pool:
        text = pool.submit(server.ask, prompt=PROMPT, max_tokens=200, seed=1)
        answers = list(pool.map(lambda _: server.ask("/inspect", ids=ids), range(8)))
    assert text.result()["choices"] == server.ask(prompt=PROMPT, max_tokens=200, seed=1)["choices"]
    assert all(answer == answers[0] for answer in answers)
    for invalid in ([], [400], [-1], ["a"], 5, None, [True]):
        assert server.refuse("/inspect", ids=invalid)["param"] == "ids"


def test_trace_shows_training_text_only_if_allowed(server: Served, model: LanguageModel) -> None:
    training = TrainingText(find_training_tokens(model.path, model.tokenizer))
    ids = model.tokenizer.encode(make_text()[500:800]).tolist()
    error = server.refuse("/trace", status=403, ids=ids, at=3)
    assert error["message"] == "this server does not show passages of its training text"
    assert server.client.get("/v1/models").json()["data"][0]["can_trace"] is False
    with served(model, with_text=True) as tracing:
        assert tracing.client.get("/v1/models").json()["data"][0]["can_trace"] is True
        for at, first in ((0, 0), (10, 5), (len(ids) - 1, len(ids))):
            assert tracing.ask("/trace", ids=ids, at=at, first=first) == training.trace(ids, at, first)
        assert tracing.ask("/trace", ids=ids, at=3) == training.trace(ids, 3, 0)
        for field, value in (("ids", []), ("ids", [400]), ("at", -1), ("at", len(ids)), ("at", True), ("first", 999)):
            param = tracing.refuse("/trace", **{"ids": ids, "at": 0, field: value})["param"]
            assert param == ("at" if value == [] else field)


def test_with_text_needs_the_tokens_of_a_run(gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    shutil.copytree(folder.find_checkpoint(str(run_folder)), "alone")
    result = gpt("serve", "-m", "alone", "--with-text", "--port", "0")
    one_line_of_what_and_what_next(result, "the training tokens of alone are not there")


def test_health_and_metrics_work_and_unknown_routes_fail(server: Served) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    server.ask(prompt=PROMPT, max_tokens=3)
    text = server.client.get("/metrics").text
    for name in ("requests_total", "requests_waiting", "texts_running", "prompt_tokens_total", "generated_tokens_total",
                 "cached_prompt_tokens_total", "queue_seconds_bucket", "cache_positions", "step_seconds_bucket", "first_token_seconds_bucket", "request_seconds_bucket"):  # fmt: skip
        assert f"gpt_{name}" in text
    assert 'gpt_requests_total{route="/completions",status="200"}' in text
    assert server.client.get("/v1/completions").status_code == 405
    for path in ("/nothing", "/v1", "/v1x", "/embeddings", "/v1/embeddings", "/v1/%ff%00", "/" + "a" * 5000):
        answer = server.client.post(path, json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert server.client.get("/").headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize("include_usage", [False, True])
def test_timings_have_the_names_of_llama_cpp(server: Served, include_usage: bool) -> None:
    body = {"prompt": [*range(60, 90)], "max_tokens": 3, "n": 2, "ignore_eos": True}
    *chunks, last = server.stream(**body, stream_options={"include_usage": include_usage})
    assert not any("timings" in chunk for chunk in chunks)
    timings, usage = (answer := server.ask(**body))["timings"], answer["usage"]
    assert timings.keys() == last["timings"].keys()
    assert (timings["prompt_n"] + timings["cache_n"], timings["predicted_n"]) == (30, 6)
    assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"] > 0
    for name in ("prompt", "predicted"):
        count, milliseconds = timings[f"{name}_n"], timings[f"{name}_ms"]
        assert 0 < milliseconds < 60_000
        assert timings[f"{name}_per_second"] == pytest.approx(1000 * count / milliseconds)
        assert timings[f"{name}_per_token_ms"] == pytest.approx(milliseconds / count)


def test_routes_work_without_v1(server: Served, model: LanguageModel) -> None:
    assert server.ask("/completions", prompt=PROMPT, seed=0)["choices"][0]["text"] == sample(model).text
    assert server.client.get("/v1/health").status_code == server.client.get("/v1/tokenizer_info").status_code == 200


def chat_model(model: LanguageModel, template: str = TEMPLATE) -> LanguageModel:
    return replace(model, tokenizer=replace(model.tokenizer, files={"chat_template.jinja": template.encode()}))


@pytest.fixture(scope="module")
def chat(model: LanguageModel) -> Iterator[Served]:
    with served(chat_model(model)) as api:
        yield api


def test_chat_equals_completion_of_the_rendered_template(chat: Served, model: LanguageModel) -> None:
    expected = sample(model, TEXT, max_tokens=8, logprobs=2)
    body = {"messages": CHAT, "seed": 0, "max_completion_tokens": 8, "logprobs": True, "top_logprobs": 2}
    answer = chat.ask("/v1/chat/completions", **body)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == len(model.tokenizer.prompt(TEXT))
    logprobs = choice["logprobs"]["content"]
    assert [entry["token"] for entry in logprobs] == [
        display_token(model, token.id) for token in expected.logprobs or ()
    ]
    for entry, token in zip(logprobs, expected.logprobs or (), strict=True):
        assert entry["logprob"] == pytest.approx(token.logprob, abs=1e-5)
        assert bytes(entry["bytes"]) == model.tokenizer.decode_bytes([token.id])
        assert [other["token"] for other in entry["top_logprobs"]] == [display_token(model, id) for id, _ in token.top]
    chunks = chat.stream("/v1/chat/completions", **body, n=1, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == expected.text
    assert chunks[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["usage"] | answer["usage"] == answer["usage"]  # Cached tokens can differ.
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert [e for c in chunks[1:-1] for e in c["choices"][0]["logprobs"]["content"]] == [
        {**entry, "logprob": pytest.approx(entry["logprob"], abs=1e-5), "top_logprobs": [
            {**other, "logprob": pytest.approx(other["logprob"], abs=1e-5)} for other in entry["top_logprobs"]]}
        for entry in logprobs
    ]  # fmt: skip


@pytest.fixture(scope="module")
def template_server(model: LanguageModel) -> Iterator[Served]:
    """A server whose template prints its variables."""
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.reasoning_content }}{{ m.name }}{{ m.content }}\n{% endfor %}"
        "{{ enable_thinking }}{% if add_generation_prompt %}a:{% endif %}"
    )
    with served(chat_model(model, template)) as api:
        yield api


MESSAGES = [{"role": "user", "content": "it"}, {"role": "assistant", "content": "the cat "}]


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"enable_thinking": False}, "u:it\na:the cat \nFalsea:"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": "\ud800"}}, "u:it\na:the cat \n\ufffda:"),
        ({"add_generation_prompt": False}, "u:it\na:the cat \n"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "u:it\na:the cat "),
        ({"continue_final_message": False, "chat_template_kwargs": {}}, "u:it\na:the cat \na:"),
        ({"messages": [{"role": "user", "name": "bo", "reasoning": "so ", "content": "it"}]}, "u:so boit\na:"),
    ],
    ids=str,
)  # fmt: skip
def test_template_receives_request_fields(
    template_server: Served, model: LanguageModel, fields: dict[str, Any], text: str
) -> None:
    body = {"messages": MESSAGES, **fields}
    answer = template_server.ask("/v1/chat/completions", **body, seed=0, max_tokens=6)
    assert answer["choices"][0]["message"]["content"] == sample(model, text, max_tokens=6).text
    response = template_server.ask("/tokenize", **body)
    assert response["tokens"] == model.tokenizer.encode(text).tolist()
    assert response["count"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("chat_template_kwargs", [], "an object"), ("chat_template_kwargs", {"a": "x" * 20_000}, "16,384"),
        ("chat_template_kwargs", {"a": DEEP_LIST}, "deep"), ("enable_thinking", "no", "true or false"),
        ("continue_final_message", "content", "true or false"), ("add_generation_prompt", 1, "true or false"),
        *(("chat_template_kwargs", {name: 1}, f'"{name}"') for name in
          ("messages", "add_generation_prompt", "tools", "bos_token", "eos_token", "namespace", "documents")),
    ],
    ids=lambda value: f"{value!s:.20}",
)  # fmt: skip
def test_invalid_template_field_error_names_it(template_server: Served, field: str, value: Any, message: str) -> None:
    error = template_server.refuse("/v1/chat/completions", **{"messages": MESSAGES, field: value})
    assert error["param"] == field
    assert message in error["message"]
    assert template_server.refuse("/tokenize", **{"messages": MESSAGES, field: value}) == error


def test_message_cannot_be_both_answered_and_continued(template_server: Served) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": True}
    error = template_server.refuse("/v1/chat/completions", messages=MESSAGES, **fields)
    assert error["param"] == "continue_final_message"


def test_tokenize_route_accepts_messages(chat: Served, server: Served) -> None:
    tokenizer = chat.service.tokenizer
    special = {"role": "user", "content": f"a{tokenizer.eot_token}b"}  # Chats parse special tokens.
    for messages in ([special], [{"role": "user", "content": "the cat " * 200}]):  # The second exceeds the context.
        response = chat.ask("/v1/tokenize", messages=messages, prompt=None, model="tiny", add_special_tokens=False)
        text = template.render(tokenizer, messages)
        assert response["tokens"] == tokenizer.encode(text, specials=True).tolist()
        assert (response["count"], response["max_model_len"]) == (len(response["tokens"]), 32)
    assert tokenizer.eot in chat.ask("/tokenize", messages=[special])["tokens"]
    info = chat.client.get("/tokenizer_info").json()
    assert info["eos_token_ids"] == info["special_token_ids"] == [tokenizer.eot]
    error = server.refuse("/tokenize", messages=CHAT)
    assert (error["param"], "chat template" in error["message"]) == ("messages", True)


@pytest.mark.parametrize(
    "field, value",
    [("messages", []), ("messages", "hi"), ("messages", [{"role": "user"}]), ("prompt", "hi"), ("tools", [{}]),
     ("add_special_tokens", True), ("chat_template", "{{ 1 }}")],
    ids=lambda value: f"{value!s:.20}",
)  # fmt: skip
def test_invalid_tokenize_field_error_names_it(chat: Served, field: str, value: Any) -> None:
    assert chat.refuse("/tokenize", **{"messages": CHAT, field: value})["param"] == field


def test_chat_supports_several_choices_and_no_max_tokens(chat: Served, model: LanguageModel) -> None:
    answer = chat.ask(
        "/v1/chat/completions", messages=[{**CHAT[0], "role": "developer"}, CHAT[1]], n=3, seed=1, max_tokens=6
    )
    expected = [sample(model, TEXT, 1, index, max_tokens=6).text for index in range(3)]
    assert [choice["message"]["content"] for choice in answer["choices"]] == expected
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    for no_limit in ({}, {"max_tokens": None}):
        full = chat.ask("/v1/chat/completions", messages=[{"role": "a", "content": "b"}], ignore_eos=True, **no_limit)
        assert full["usage"]["total_tokens"] == 32  # The answer fills the context.


@pytest.mark.parametrize(
    "field, value",
    [
        ("messages", []), ("messages", "hi"), ("messages", [5]), ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": ["x"]}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]), ("messages", [{"role": "user", "content": ["x"]}]),
        ("messages", [{"role": 1, "content": "a"}]), ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
        ("logprobs", 3), ("top_logprobs", 2), ("max_completion_tokens", "x"),
    ],
    ids=lambda value: f"{value!s:.20}",
)  # fmt: skip
def test_invalid_chat_value_error_names_the_field(chat: Served, field: str, value: Any) -> None:
    error = chat.refuse("/v1/chat/completions", **{"messages": CHAT, field: value})
    assert error["param"] == field


def test_null_content_of_an_assistant_is_its_refusal(chat: Served) -> None:
    for content, refusal in (("No.", "No."), ("", None)):
        texts = [
            chat.ask("/tokenize", messages=[*CHAT, {"role": "assistant", **message}, *CHAT])["tokens"]
            for message in ({"content": None, "refusal": refusal}, {"refusal": refusal}, {"content": content})
        ]
        assert texts[0] == texts[1] == texts[2]
    assert chat.refuse("/tokenize", messages=[{"role": "user", "content": None}])["param"] == "messages"
    assert chat.refuse("/tokenize", messages=[{"role": "assistant", "refusal": 5}])["param"] == "messages"


def test_chat_longer_than_the_context_is_an_error(chat: Served) -> None:
    messages = [{"role": "user", "content": "a cat " * 40}]
    error = chat.refuse("/v1/chat/completions", messages=messages, max_tokens=1)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "but the context has 32" in error["message"]


def test_shorter_context_option_slides_the_window(model: LanguageModel) -> None:
    config = ServeConfig(context=16, max_batch=2, limit_tokens=1)
    context = servers.make_context(model.model, model.compute, config, model.tokenizer.vocab_size, print, 1)
    assert (context.size, context.cache.max_positions, len(context.slots)) == (16, 16, 2)
    assert len([*generate(context, [1, 2, 3], SampleConfig(max_tokens=40, ignore_eot=True), ends=())]) == 40


def test_max_tokens_is_reduced_to_the_limit(model: LanguageModel) -> None:
    with served(chat_model(model), limit_tokens=5) as server:
        for tokens in (8192, -1, 2**31):
            for route, fields in (
                ("/v1/completions", {"prompt": PROMPT}),
                ("/v1/chat/completions", {"messages": CHAT}),
            ):
                answer = server.ask(route, **fields, max_tokens=tokens, ignore_eos=True)
                assert answer["choices"][0]["finish_reason"] == "length"
                assert answer["usage"]["completion_tokens"] == 5


def test_empty_and_unmatched_stop_strings_have_no_effect(server: Served) -> None:
    text = server.ask(prompt=PROMPT, temperature=0, max_tokens=20)["choices"][0]["text"]
    for stop in ("", [""], ["", *(f"🦊{n}" for n in range(200))]):
        assert server.ask(prompt=PROMPT, temperature=0, max_tokens=20, stop=stop)["choices"][0]["text"] == text


def test_json_escapes_every_line_separator() -> None:
    text = "".join(map(chr, range(0x3000)))
    data = answers.to_json({"text": text})
    assert json.loads(data) == {"text": text}
    assert len(data.decode().splitlines()) == 1


def test_chat_without_template_error_has_a_hint(server: Served) -> None:
    error = server.refuse("/v1/chat/completions", messages=CHAT)
    assert "chat template" in error["message"]
    assert "/v1/completions" in error["message"]


def test_empty_rendered_template_is_an_error(model: LanguageModel) -> None:
    with served(chat_model(model, "{% if false %}x{% endif %}")) as server:
        error = server.refuse("/v1/chat/completions", messages=CHAT)
    assert "the chat template renders this conversation as nothing" in error["message"]


def test_api_errors_have_no_command_line_hints() -> None:
    for error, message in (
        (UserError("too long", "take fewer --max-tokens"), "too long"),
        (UserError("no template", "train it with gpt train --chat"), "no template"),
        (UserError("no text", "send one"), "no text (send one)"),
    ):
        assert protocol.ApiError.of(error).message == message


def test_logprobs_are_always_valid_json() -> None:
    tokens = [(Token(97, -math.inf, ((98, 0.0), (99, -math.inf))), 0)]
    for logprobs in (completion_logprobs(bytes_tokenizer(), tokens), chat_logprobs(bytes_tokenizer(), tokens)):
        json.dumps(logprobs, allow_nan=False)


def test_every_response_has_a_request_id_and_an_access_log_line(model: LanguageModel) -> None:
    body = {"prompt": "a secret", "max_tokens": 2, "ignore_eos": True}
    key, drawn_id = {"Authorization": "Bearer sesame"}, r"[0-9a-f]{32}"
    cases: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions 200 2", {"json": body, "headers": key}),
        ("/v1/completions 200 2", {"json": {**body, "stream": True}, "headers": key}),
        ("/v1/completions 400 0", {"json": {}, "headers": key}),
        ("/v1/completions 401 0", {"json": body}),
        ("/no%0Asuch%20route 404 0", {"params": {"key": "sesame"}}),
        ("/health 403 0", {"headers": {"Host": "evil.example"}}),
    ]
    accepted = ("mine-1", "x" * 128)
    with served(model, access_log=True, api_key="sesame") as server:
        for request_id in (None, *accepted, "x" * 129, "a b", "é"):
            for case, fields in cases:
                path, status, tokens = case.split()
                id_header = {} if request_id is None else {"X-Request-ID": request_id.encode()}
                headers = {**fields.get("headers", {}), **id_header}
                answer = server.client.request("POST", path, **{**fields, "headers": headers})
                assert answer.status_code == int(status)
                id = answer.headers["x-request-id"]
                assert id == request_id if request_id in accepted else re.fullmatch(drawn_id, id)
                while not server.notes:  # The log line comes after the response.
                    time.sleep(0.001)
                assert re.fullmatch(
                    rf"time=\S+\+00:00 id={id} method=POST path={path} status={status} prompt_tokens=[0-9]+ "
                    rf"completion_tokens={tokens} seconds=[0-9.]+", server.notes.pop(),
                )  # fmt: skip
                assert not server.notes
