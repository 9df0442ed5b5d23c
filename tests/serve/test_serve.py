"""The answers of `gpt serve` to correct and to wrong requests, against `gpt sample`."""

import codecs
import contextlib
import itertools
import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from serving import Served, load, served

from gpt.api import LanguageModel
from gpt.decoding.engine import Update, generate
from gpt.decoding.logits import Token
from gpt.decoding.write import Sample
from gpt.errors import UserError
from gpt.sample_config import SampleConfig
from gpt.serve import answers, protocol
from gpt.serve import server as servers
from gpt.serve.texts import Choice, Prompt, chat_logprobs, completion_logprobs
from gpt.serve_config import ServeConfig
from gpt.text import chat as template
from gpt.text.backends import ByteBPE
from gpt.text.boundaries import GPT2_PATTERN
from gpt.text.tokenizer import Tokenizer, bytes_tokenizer

PROMPT = "the cat sat on"
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
CHAT = [{"role": "system", "content": "Be a cat."}, {"role": "user", "content": [{"type": "text", "text": "the cat"}]}]
TEXT = "s:Be a cat.\nu:the cat\na:"


@pytest.fixture(scope="module")
def model(run_folder: Path) -> LanguageModel:
    return load(run_folder)


@pytest.fixture(scope="module")
def server(model: LanguageModel) -> Iterator[Served]:
    with served(model) as found:
        yield found


def sample(model: LanguageModel, prompt: str = PROMPT, seed: int = 0, index: int = 0, **settings: Any) -> Sample:
    """A text of `gpt sample` with the server's defaults."""
    config = SampleConfig(**{"temperature": 1.0, "max_tokens": 16, **settings})
    writing = model.write(prompt, config, seed, index)
    list(writing)
    return writing.sample


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"], "additionalProperties": False}
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of a request, and of `gpt sample`
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
    ({"speculate": 4, "temperature": 0, "max_tokens": 30}, {"greedy": True, "max_tokens": 30}),
    ({"max_tokens": 0}, {"max_tokens": 0}),
    ({"max_tokens": 16.0, "n": None, "stop": None, "logprobs": None, "logit_bias": {}, "suffix": None}, {}),
]  # fmt: skip


@pytest.mark.parametrize("asked, settings", SETTINGS, ids=str)
def test_a_text_is_that_of_gpt_sample(server: Served, model: LanguageModel, asked: Any, settings: Any) -> None:
    body = {"prompt": PROMPT, "seed": 3, "n": 2, **{key: value for key, value in asked.items() if key != "n"}}
    expected = [sample(model, seed=3, index=index, **settings) for index in range(2)]
    answer = server.ask(**body)
    assert [choice["text"] for choice in answer["choices"]] == [each.text for each in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    reasons = ["length" if each.finish_reason == "length" else "stop" for each in expected]
    assert [choice["finish_reason"] for choice in answer["choices"]] == reasons
    count = sum(len(each.tokens) + (each.finish_reason == "eot") for each in expected)
    prompt = len(model.tokenizer.prompt(PROMPT))
    usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    usage["prompt_tokens_details"] = {"cached_tokens": 0}  # it is shorter than what is reused
    assert answer["usage"] == usage
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert all(choice["logprobs"] is None for choice in answer["choices"])

    chunks = server.stream(**body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == usage
    for index, each in enumerate(expected):
        of_this = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in of_this) == each.text
        assert [choice["finish_reason"] for choice in of_this[:-1]] == [None] * (len(of_this) - 1)
        assert of_this[-1]["finish_reason"] == reasons[index]
    assert all(c["usage"] is None and c["id"] == chunks[0]["id"] for c in chunks[:-1])


def test_a_seed_is_that_of_gpt_sample(server: Served, model: LanguageModel) -> None:
    for seed in (7, -5, 2**63 - 1, -(2**63)):
        assert server.ask(prompt=PROMPT, seed=seed)["choices"][0]["text"] == sample(model, seed=seed).text
    for seed in ({}, {"seed": -1}):  # one is drawn
        assert len({server.ask(prompt=PROMPT, max_tokens=30, **seed)["choices"][0]["text"] for _ in range(4)}) > 1


def test_prompts_are_a_text_or_ids_or_several(server: Served, model: LanguageModel) -> None:
    texts = [PROMPT, "dogs chased", ""]
    ids = [model.tokenizer.prompt(text) for text in texts]
    expected = [sample(model, text, index=index).text for text in texts for index in range(2)]
    for prompts in (texts, ids):
        answer = server.ask(prompt=prompts, n=2, seed=0)
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert server.ask(prompt=ids[0], seed=0)["choices"][0]["text"] == expected[0]
    mixed = server.ask(prompt=[texts[0], ids[1]], seed=0)
    assert [choice["text"] for choice in mixed["choices"]] == [expected[0], expected[2]]


def test_cached_tokens_are_counted(server: Served) -> None:
    shared = list(range(40, 60))
    for prompts, n, cached in (([[*shared, 7]], 1, 0), ([[*shared, 7]], 2, 20), ([[*shared, 8], [*shared, 9]], 1, 40)):
        answer = server.ask(prompt=prompts, n=n, max_tokens=2)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    *_, last = server.stream(prompt=[*shared, 8, 9], max_tokens=2, stream_options={"include_usage": True})
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] in (20, 21)  # the id 8 if its text is still there


def test_sampling_defaults_hold_where_a_request_says_nothing(model: LanguageModel) -> None:
    told = list[str]()
    config = {
        "temperature": 0.5, "top_k": "many", "top_p": 0.9, "min_p": math.nan, "repetition_penalty": 1.5,
        "do_sample": True, "max_new_tokens": 3, "eos_token_id": 0,
    }  # fmt: skip
    found = protocol.sampling_defaults(config, told.append)
    assert found == {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.5}
    assert [line.split()[3] for line in told] == ["top_k", "min_p"]
    assert protocol.sampling_defaults({**found, "do_sample": False}, pytest.fail)["temperature"] == 0
    assert not protocol.sampling_defaults({"do_sample": 1}, told.append)
    assert "do_sample is 1; it must be true or false" in told[-1]
    with served(model, sampling=found) as server:
        for asked, settings in (
            ({}, {}), ({"temperature": None, "top_p": 1}, {"top_p": 0.0}), ({"temperature": 0}, {"greedy": True}),
            ({"repeat_penalty": 1}, {"repetition_penalty": 0.0}),
        ):  # fmt: skip
            answer = server.ask(prompt=PROMPT, seed=1, **asked)
            assert answer["choices"][0]["text"] == sample(model, seed=1, **{**found, **settings}).text


def test_the_best_of_several(server: Served, model: LanguageModel) -> None:
    """Those with the highest mean log-probability, best first; all of them are counted."""
    every = [sample(model, index=index) for index in range(6)]
    mean = {each.text: each.logprob / (len(each.tokens) + (each.finish_reason == "eot")) for each in every}
    answer = server.ask(prompt=PROMPT, seed=0, n=2, best_of=6)
    assert [choice["text"] for choice in answer["choices"]] == sorted(mean, key=lambda text: -mean[text])[:2]
    counted = sum(len(each.tokens) + (each.finish_reason == "eot") for each in every)
    assert answer["usage"]["completion_tokens"] == counted


@pytest.mark.parametrize("count, new, echo", [(5, 12, False), (5, 12, True), (1, 0, True), (0, 1, False)])
def test_log_probabilities_are_those_of_gpt_sample(
    server: Served, model: LanguageModel, count: int, new: int, echo: bool
) -> None:
    prompt = "Zürich; naïve 🐕"
    expected = sample(model, prompt, max_tokens=new, logprobs=count, echo_logprobs=echo)
    answer = server.ask(prompt=prompt, seed=0, max_tokens=new, logprobs=count, echo=echo)
    choice, tokens = answer["choices"][0], [*(expected.prompt_logprobs or ()), *(expected.logprobs or ())]
    found = choice["logprobs"]
    assert choice["text"] == (prompt if echo else "") + expected.text
    assert len(found["tokens"]) == len(tokens)
    assert found["tokens"] == [shown(model, token.id) for token in tokens]
    if echo:
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
    for token, name, logprob, top in zip(
        tokens, found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        if token.logprob is None:
            continue
        assert logprob == pytest.approx(token.logprob, abs=1e-5)
        assert top[name] == logprob  # the same float
        likeliest = [shown(model, id) for id, _ in token.top]
        assert list(top)[:count] == likeliest
        assert len(top) == count + (name not in likeliest)
        assert max(top.values()) == next(iter(top.values()))
    data = [model.tokenizer.decode_bytes([token.id]) for token in tokens if token.id not in model.tokenizer.ends]
    assert b"".join(data).decode(errors="replace") == choice["text"]
    assert found["text_offset"] == [place(data, at) for at in range(len(tokens))]


def place(data: list[bytes], at: int) -> int:
    """The place of a token in the text of all: that of the character which its first byte is a part of."""
    whole, bad = b"".join(data), dict[int, int]()

    def replaced(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        bad[error.start] = error.end
        return "�", error.end

    codecs.register_error("replaced", replaced)
    places = list[int]()
    for number, char in enumerate(whole.decode(errors="replaced")):
        places += [number] * (bad.get(len(places), len(places) + len(char.encode())) - len(places))
    return [*places, len(set(places))][sum(map(len, data[:at]))]


PIECES = [
    bytes.fromhex(each) for each in ["78f0", "9f90", "9579", "e280", "9973", "20f09f90", "80f0", "efbfbd", "efbf"]
]


def test_offsets_are_places_in_the_text_whatever_tokens_are_cut_off() -> None:
    every = [*(bytes([byte]) for byte in range(256)), *PIECES]
    tokenizer = Tokenizer("bpe", ByteBPE(GPT2_PATTERN, {piece: id for id, piece in enumerate(every)}), len(every))
    chance = random.Random(1)
    cut = [0x61, 0xF0, 0x9F, 0x90, 0x95, 0xE0, 0x80, 0xBD, *range(256, len(every))]
    for _ in range(500):
        ids = chance.choices(cut, k=8)
        config = SampleConfig(logprobs=0)
        choice = Choice(tokenizer, config, Prompt([tokenizer.eot], 1), False)
        tokens = tuple(Token(id, -1.0) for id in [*ids, tokenizer.eot])
        delta = choice.push(Update(0, tokens=tokens, reason="eot"))
        data = [every[id] for id in ids]
        assert delta.text == b"".join(data).decode(errors="replace")
        assert [offset for _, offset in delta.tokens] == [place(data, at) for at in range(9)]
        for (_, offset), each in zip(delta.tokens, data, strict=False):
            with contextlib.suppress(UnicodeDecodeError):
                assert delta.text[offset:].startswith(each.decode())


def shown(model: LanguageModel, id: int) -> str:
    data = model.tokenizer.decode_bytes([id])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def test_what_the_harness_asks_for(server: Served, model: LanguageModel) -> None:
    """lm-evaluation-harness: ids of several lengths, one more token than it looks at, greedy or not by comparison."""
    prompts = [model.tokenizer.prompt(text) for text in (PROMPT, "dogs", "the mat while raining in")]
    answer = server.ask(prompt=prompts, temperature=0, max_tokens=1, logprobs=1, echo=True, seed=1234)
    for choice, ids in zip(answer["choices"], prompts, strict=True):
        found = choice["logprobs"]
        assert len(found["token_logprobs"]) == len(ids) + 1
        with torch.inference_mode():
            logits = model.model.unembed(model.model.trunk(torch.tensor([ids])))[0, :, : model.tokenizer.vocab_size]
            logprobs = logits.log_softmax(-1)
        for at in range(1, len(ids)):
            assert found["token_logprobs"][at] == pytest.approx(float(logprobs[at - 1, ids[at]]), abs=1e-5)
            greedy = found["token_logprobs"][at] == max(found["top_logprobs"][at].values())
            assert greedy == (int(logprobs[at - 1].argmax()) == ids[at])


def test_an_echo_of_ids_that_are_no_characters(server: Served, model: LanguageModel) -> None:
    half = model.tokenizer.encode("🦊").tolist()[:-1]
    choice = server.ask(prompt=half, echo=True, logprobs=0, max_tokens=2, temperature=0)["choices"][0]
    assert choice["text"].startswith("�")
    assert all(token.startswith("bytes:") for token in choice["logprobs"]["tokens"][: len(half)])
    assert choice["logprobs"]["text_offset"][len(half)] == len(model.tokenizer.decode(half))


def test_an_echo_without_log_probabilities_and_an_empty_one(server: Served, model: LanguageModel) -> None:
    long = "the cat sat on the mat " * 20  # longer than the context
    assert server.ask(prompt=long, echo=True, max_tokens=0)["choices"][0]["text"] == long
    chunks = server.stream(prompt="", echo=True, max_tokens=3, seed=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == sample(model, "", max_tokens=3).text
    error = server.refuse(prompt=long, echo=True, logprobs=1)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_log_probabilities_of_a_stream_are_those_of_the_whole(server: Served) -> None:
    body = {"prompt": PROMPT, "seed": 2, "max_tokens": 12, "logprobs": 3, "echo": True, "stop": ["an"]}
    whole = server.ask(**body)["choices"][0]
    parts = [chunk["choices"][0] for chunk in server.stream(**body)]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for key in ("tokens", "text_offset"):
        assert [each for part in parts for each in part["logprobs"][key]] == whole["logprobs"][key]
    joined = [each for part in parts for each in part["logprobs"]["token_logprobs"]]
    assert joined[1:] == pytest.approx(whole["logprobs"]["token_logprobs"][1:], abs=1e-5)


def test_streams_have_whole_characters_and_nothing_of_a_stop_text(server: Served, model: LanguageModel) -> None:
    """Ids that are bytes of characters are forced, so that pieces would be halves."""
    ids = model.tokenizer.encode("🦊").tolist()
    bias = {str(id): 100 for id in set(ids)}
    for seed, stop in enumerate(([], ["🦊"], ["�"])):
        body = {"prompt": "🦊", "logit_bias": bias, "seed": seed, "max_tokens": 20, "stop": stop}
        whole = server.ask(**body)["choices"][0]
        parts = [chunk["choices"][0]["text"] for chunk in server.stream(**body)]
        assert "".join(parts) == whole["text"]
        assert not any(each in whole["text"] for each in stop)
    text = server.ask(prompt=PROMPT, temperature=0, max_tokens=40)["choices"][0]["text"]
    for stop in (text[5:9], text[-6:], text[:2], text[3:30]):
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "stop": [stop]}
        parts = [chunk["choices"][0]["text"] for chunk in server.stream(**body)]
        assert "".join(parts) == text[: text.index(stop)] == server.ask(**body)["choices"][0]["text"]
        assert server.ask(**body)["choices"][0]["finish_reason"] == "stop"


def test_a_bias_forces_and_forbids(server: Served, model: LanguageModel) -> None:
    id = int(model.tokenizer.encode("z")[0])
    assert server.ask(prompt=PROMPT, max_tokens=5, logit_bias={str(id): 100})["choices"][0]["text"] == "zzzzz"
    first = server.ask(prompt=PROMPT, temperature=0, max_tokens=1, logprobs=1)["choices"][0]
    (banned,) = model.tokenizer.encode(first["text"], continues=True).tolist()
    other = server.ask(prompt=PROMPT, temperature=0, max_tokens=1, logit_bias={str(banned): -100})["choices"][0]
    assert other["text"] != first["text"]


def test_penalties_by_brute_force(server: Served, model: LanguageModel) -> None:
    """Greedy texts with a loop that computes the whole model anew for each token."""
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


DEEP = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    "field, value",
    [
        ("prompt", 5), ("prompt", []), ("prompt", [[]]), ("prompt", [True]), ("prompt", [1, "a"]), ("prompt", [400]),
        ("prompt", [2**70]), ("prompt", DEEP), ("prompt", ["a"] * 129), ("prompt", "ab " * 3000), ("max_tokens", "5"),
        ("max_tokens", -2), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", 10**300), ("temperature", 101),
        ("temperature", [1]), ("top_p", 1.1), ("top_k", -2), ("min_p", 2), ("n", 0), ("n", 129), ("best_of", 129),
        ("stop", {}), ("stop", [1]), ("stop", ["a"] * 257), ("stop", "a" * 1001), ("seed", 1.5), ("seed", 2**63),
        ("echo", 1), ("logprobs", 21), ("logit_bias", [1]), ("logit_bias", {"400": 1}), ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": "x"}), ("logit_bias", {"²": 1}), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
        ("repetition_penalty", -1), ("no_repeat_ngram", -1), ("min_tokens", -1), ("ignore_eos", "yes"),
        ("stream", "yes"), ("stream_options", {"include_usage": 1}),
    ],
    ids=lambda value: f"{value!s:.20}",
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_name(server: Served, field: str, value: Any) -> None:
    error = server.refuse(**{"prompt": "a", field: value})
    assert error["param"] == field
    assert field in error["message"]
    assert len(error["message"]) < 400
    assert error["type"] == "invalid_request_error"


def test_what_contradicts_itself_is_refused(server: Served) -> None:
    assert server.refuse(max_tokens=1)["param"] == "prompt"
    assert server.refuse(prompt=None)["param"] == "prompt"
    assert server.refuse(prompt="a", n=3, best_of=2)["param"] == "best_of"
    assert server.refuse(prompt="a", stream=True, best_of=2)["param"] == "best_of"
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


@pytest.mark.parametrize("asked, message, param", WRONG_CONSTRAINTS, ids=lambda each: str(each)[:60])
def test_constraints_that_cannot_be_followed(
    server: Served, asked: dict[str, Any], message: str, param: str | None
) -> None:
    error = server.refuse(prompt=PROMPT, **asked)
    assert error["message"].startswith(message), error["message"]
    assert error["param"] == param


def test_a_chat_answers_in_json(chat: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for settings in ({}, {"temperature": 0}, {"stream": True}):
        asked = {"messages": CHAT, "response_format": form, "seed": 0, "max_tokens": 30, "n": 3, **settings}
        if "stream" in settings:
            chunks = [each["choices"][0] for each in chat.stream("/v1/chat/completions", **asked)]
            texts = ["".join(c["delta"]["content"] for c in chunks if c["index"] == index) for index in range(3)]
        else:
            texts = [each["message"]["content"] for each in chat.ask("/v1/chat/completions", **asked)["choices"]]
        assert all(json.loads(text) in ({"a": 1}, {"a": "b"}) for text in texts), texts


DOCS = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")


def documented(what: str) -> set[str]:
    """The fields for which the documentation's table says ``what`` happens."""
    rows = re.findall(r"^\| (.+) \| (.+) \|$", DOCS, re.MULTILINE)
    return {name for fields, happens in rows if happens.startswith(what) for name in re.findall(r"`(\w+)`", fields)}


ROUTES = (
    ("/v1/completions", {"prompt": PROMPT}, {**protocol.REFUSED, **protocol.REFUSED_IN_COMPLETIONS}),
    ("/v1/chat/completions", {"messages": CHAT}, {**protocol.REFUSED, **protocol.REFUSED_IN_CHATS}),
)


@pytest.mark.parametrize("route, asked, refused", ROUTES, ids=["completions", "chats"])
def test_each_field_of_other_servers_is_refused_by_name_or_changes_nothing(
    chat: Served, route: str, asked: dict[str, Any], refused: dict[str, Any]
) -> None:
    asked = {**asked, "seed": 0, "max_tokens": 4}
    expected = chat.ask(route, **asked)["choices"]
    for at in range(max(map(len, refused.values()))):
        neutral = {name: values[at % len(values)] for name, values in refused.items() if values}
        assert chat.ask(route, **asked, **neutral)["choices"] == expected
    assert chat.ask(route, **asked, **dict.fromkeys(refused))["choices"] == expected
    for name, value in zip(refused, itertools.cycle(("x", 0.5, {"a": 1})), strict=False):
        error = chat.refuse(route, **asked, **{name: value})
        assert error["param"] == name
        assert name in error["message"]
    for value in (0, 0.5, "x", [1], {"a": 1}, True):
        assert chat.ask(route, **asked, **dict.fromkeys(documented("accepted"), value))["choices"] == expected


def test_the_documentation_names_each_field() -> None:
    refused = {**protocol.REFUSED, **protocol.REFUSED_IN_COMPLETIONS, **protocol.REFUSED_IN_CHATS}
    assert documented("not supported") == set(refused)
    assert documented("other names") == set(protocol.ALIASES)
    assert len(documented("accepted")) > 30


def test_names_of_other_servers(server: Served, model: LanguageModel) -> None:
    for asked, settings in (
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.5, "repeat_last_n": -1}, {"repetition_penalty": 1.5}),
        ({"repeat_penalty": 1.0, "repeat_last_n": 64}, {}),
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram": 2}),
    ):
        assert server.ask(prompt=PROMPT, seed=0, **asked)["choices"][0]["text"] == sample(model, **settings).text
    assert len(server.ask(prompt=PROMPT, n_cmpl=3)["choices"]) == 3
    for asked in ({"n_predict": "x"}, {"repeat_penalty": -1}, {"n_predict": 5, "max_tokens": 6}):
        error = server.refuse(prompt=PROMPT, **asked)
        assert error["param"] == next(iter(asked))
        assert error["param"] in error["message"]
    for penalty in ({"repeat_penalty": 2}, {"presence_penalty": 1}, {"frequency_penalty": -1}):
        for last in (0, 64):
            assert server.refuse(prompt=PROMPT, **penalty, repeat_last_n=last)["param"] == "repeat_last_n"


def test_ids_that_end_a_text(server: Served, model: LanguageModel) -> None:
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
    for wrong in (5, [1.5], ["a"], {}, [True], [1] * 300):
        assert server.refuse(**body, stop_token_ids=wrong)["param"] == "stop_token_ids"
    assert server.refuse(**body, stop_token_ids=[1], min_tokens=3)["param"] == "stop_token_ids"


def test_halves_of_surrogates_and_control_characters(server: Served) -> None:
    answer = server.ask(prompt="a\ud800b\x00\x1b[31m", echo=True, max_tokens=0, stop=["\udfff"])
    assert answer["choices"][0]["text"] == "a�b\x00\x1b[31m"


def test_models(server: Served) -> None:
    listed = server.client.get("/v1/models").json()
    assert listed["object"] == "list"
    (one,) = listed["data"]
    assert (one["id"], one["object"], one["context_length"]) == ("tiny", "model", 32)
    assert server.client.get("/models/tiny").json() == one
    error = server.client.get("/v1/models/no/such").json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_the_tokenizer_as_the_harness_reads_it(server: Served, model: LanguageModel) -> None:
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


def test_health_metrics_and_unknown_routes(server: Served) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    server.ask(prompt=PROMPT, max_tokens=3)
    text = server.client.get("/metrics").text
    for name in ("requests_total", "requests_waiting", "texts_running", "prompt_tokens_total", "generated_tokens_total",
                 "cache_positions", "step_seconds_bucket", "first_token_seconds_bucket", "request_seconds_bucket"):  # fmt: skip
        assert f"gpt_{name}" in text
    assert 'gpt_requests_total{route="/completions",status="200"}' in text
    assert server.client.get("/v1/completions").status_code == 405
    for path in ("/nothing", "/v1", "/v1x", "/embeddings", "/v1/embeddings", "/v1/%ff%00", "/" + "a" * 5000):
        answer = server.client.post(path, json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert ("this server has no embeddings" in answer.text) == ("embeddings" in path)
    assert server.client.get("/").headers["content-security-policy"].startswith("default-src 'none'")


def test_the_routes_answer_without_v1(server: Served, model: LanguageModel) -> None:
    assert server.ask("/completions", prompt=PROMPT, seed=0)["choices"][0]["text"] == sample(model).text
    assert server.client.get("/v1/health").status_code == server.client.get("/v1/tokenizer_info").status_code == 200


def chat_model(model: LanguageModel, template: str = TEMPLATE) -> LanguageModel:
    return replace(model, tokenizer=replace(model.tokenizer, files={"chat_template.jinja": template.encode()}))


@pytest.fixture(scope="module")
def chat(model: LanguageModel) -> Iterator[Served]:
    """A server whose tokenizer has a chat template."""
    with served(chat_model(model)) as found:
        yield found


def test_a_chat_is_the_text_of_its_template(chat: Served, model: LanguageModel) -> None:
    expected = sample(model, TEXT, max_tokens=8, logprobs=2)
    body = {"messages": CHAT, "seed": 0, "max_completion_tokens": 8, "logprobs": True, "top_logprobs": 2}
    answer = chat.ask("/v1/chat/completions", **body)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == len(model.tokenizer.prompt(TEXT))
    told = choice["logprobs"]["content"]
    assert [each["token"] for each in told] == [shown(model, token.id) for token in expected.logprobs or ()]
    for each, token in zip(told, expected.logprobs or (), strict=True):
        assert each["logprob"] == pytest.approx(token.logprob, abs=1e-5)
        assert bytes(each["bytes"]) == model.tokenizer.decode_bytes([token.id])
        assert [other["token"] for other in each["top_logprobs"]] == [shown(model, id) for id, _ in token.top]
    chunks = chat.stream("/v1/chat/completions", **body, n=1, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == expected.text
    assert chunks[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["usage"] | answer["usage"] == answer["usage"]  # cached tokens apart
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert [e for c in chunks[1:-1] for e in c["choices"][0]["logprobs"]["content"]] == [
        {**each, "logprob": pytest.approx(each["logprob"], abs=1e-5), "top_logprobs": [
            {**other, "logprob": pytest.approx(other["logprob"], abs=1e-5)} for other in each["top_logprobs"]]}
        for each in told
    ]  # fmt: skip


@pytest.fixture(scope="module")
def prefilled(model: LanguageModel) -> Iterator[Served]:
    """A server whose template shows what it was given."""
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.reasoning_content }}{{ m.name }}{{ m.content }}\n{% endfor %}"
        "{{ enable_thinking }}{% if add_generation_prompt %}a:{% endif %}"
    )
    with served(chat_model(model, template)) as found:
        yield found


SAID = [{"role": "user", "content": "it"}, {"role": "assistant", "content": "the cat "}]


@pytest.mark.parametrize(
    "asked, text",
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
def test_fields_that_the_template_reads(
    prefilled: Served, model: LanguageModel, asked: dict[str, Any], text: str
) -> None:
    body = {"messages": SAID, **asked}
    answer = prefilled.ask("/v1/chat/completions", **body, seed=0, max_tokens=6)
    assert answer["choices"][0]["message"]["content"] == sample(model, text, max_tokens=6).text
    tokenized = prefilled.ask("/tokenize", **body)
    assert tokenized["tokens"] == model.tokenizer.encode(text).tolist()
    assert tokenized["count"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "field, value, says",
    [
        ("chat_template_kwargs", [], "an object"), ("chat_template_kwargs", {"a": "x" * 20_000}, "16,384"),
        ("chat_template_kwargs", {"a": DEEP}, "deep"), ("enable_thinking", "no", "true or false"),
        ("continue_final_message", "content", "true or false"), ("add_generation_prompt", 1, "true or false"),
        *(("chat_template_kwargs", {name: 1}, f'"{name}"') for name in
          ("messages", "add_generation_prompt", "tools", "bos_token", "eos_token", "namespace", "documents")),
    ],
    ids=lambda value: f"{value!s:.20}",
)  # fmt: skip
def test_wrong_fields_for_the_template_are_refused_by_name(
    prefilled: Served, field: str, value: Any, says: str
) -> None:
    error = prefilled.refuse("/v1/chat/completions", **{"messages": SAID, field: value})
    assert error["param"] == field
    assert says in error["message"]
    assert prefilled.refuse("/tokenize", **{"messages": SAID, field: value}) == error


def test_a_message_is_either_answered_or_continued(prefilled: Served) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    error = prefilled.refuse("/v1/chat/completions", messages=SAID, **both)
    assert error["param"] == "continue_final_message"


def test_conversations_are_tokenized(chat: Served, server: Served) -> None:
    tokenizer = chat.service.tokenizer
    special = {"role": "user", "content": f"a{tokenizer.eot_token}b"}  # an id of its own, as in a chat
    for messages in ([special], [{"role": "user", "content": "the cat " * 200}]):  # counted beyond the context too
        found = chat.ask("/v1/tokenize", messages=messages, prompt=None, model="tiny", add_special_tokens=False)
        assert found["tokens"] == template.prompt(tokenizer, messages)
        assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 32)
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
def test_a_wrong_field_beside_messages_is_refused_by_name(chat: Served, field: str, value: Any) -> None:
    assert chat.refuse("/tokenize", **{"messages": CHAT, field: value})["param"] == field


def test_chats_with_several_choices_and_without_a_number_of_tokens(chat: Served, model: LanguageModel) -> None:
    answer = chat.ask("/v1/chat/completions", messages=CHAT, n=3, seed=1, max_tokens=6)
    expected = [sample(model, TEXT, 1, index, max_tokens=6).text for index in range(3)]
    assert [choice["message"]["content"] for choice in answer["choices"]] == expected
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    for nothing in ({}, {"max_tokens": None}):
        short = chat.ask("/v1/chat/completions", messages=[{"role": "a", "content": "b"}], ignore_eos=True, **nothing)
        assert short["usage"]["total_tokens"] == 32  # what the context has room for


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
def test_a_wrong_value_of_a_chat_is_refused_by_its_name(chat: Served, field: str, value: Any) -> None:
    error = chat.refuse("/v1/chat/completions", **{"messages": CHAT, field: value})
    assert error["param"] == field


def test_tools_are_refused_by_name(chat: Served) -> None:
    for body in (
        {"tools": [{"type": "function"}]},
        {"messages": [*CHAT, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
        {"messages": [*CHAT, {"role": "tool", "content": "5", "tool_call_id": "1"}]},
    ):
        error = chat.refuse("/v1/chat/completions", **{"messages": CHAT, **body})
        assert "tools are not supported yet" in error["message"]


def test_a_chat_longer_than_the_context_is_refused(chat: Served) -> None:
    messages = [{"role": "user", "content": "a cat " * 40}]
    error = chat.refuse("/v1/chat/completions", messages=messages, max_tokens=1)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "the model's context has 32" in error["message"]


def test_a_context_that_is_shorter_than_the_models_slides(model: LanguageModel) -> None:
    config = ServeConfig(context=16, max_batch=2)
    context = servers.make_context(model.model, model.compute, config)
    assert (context.size, context.cache.room, len(context.slots)) == (16, 16, 2)
    assert len([*generate(context, [1, 2, 3], SampleConfig(max_tokens=40, ignore_eot=True), ends=())]) == 40


def test_more_tokens_than_there_is_room_for_are_as_many_as_there_is(model: LanguageModel) -> None:
    with served(chat_model(model), limit_tokens=20) as found:
        for tokens in (8192, -1, 2**31):
            for route, asked in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": CHAT})):
                answer = found.ask(route, **asked, max_tokens=tokens, ignore_eos=True)
                assert answer["choices"][0]["finish_reason"] == "length"
                room = 32 - answer["usage"]["prompt_tokens"] if "chat" in route else 20
                assert answer["usage"]["completion_tokens"] == min(20, room)


def test_many_stop_texts_and_empty_ones(server: Served) -> None:
    text = server.ask(prompt=PROMPT, temperature=0, max_tokens=20)["choices"][0]["text"]
    for stop in ("", [""], ["", *(f"🦊{n}" for n in range(200))]):
        assert server.ask(prompt=PROMPT, temperature=0, max_tokens=20, stop=stop)["choices"][0]["text"] == text


def test_no_line_end_of_any_kind_is_written_as_it_is() -> None:
    text = "".join(map(chr, range(0x3000)))
    data = answers.to_json({"text": text})
    assert json.loads(data) == {"text": text}
    assert len(data.decode().splitlines()) == 1


def test_a_chat_without_a_template_says_how_to_get_one(server: Served) -> None:
    error = server.refuse("/v1/chat/completions", messages=CHAT)
    assert "chat template" in error["message"]
    assert "/v1/completions" in error["message"]


def test_a_template_that_renders_nothing_is_told(model: LanguageModel) -> None:
    with served(chat_model(model, "{% if false %}x{% endif %}")) as found:
        error = found.refuse("/v1/chat/completions", messages=CHAT)
    assert "the chat template renders this conversation as nothing" in error["message"]


def test_clients_get_no_hint_for_the_command_line() -> None:
    for error, told in (
        (UserError("too long", "take fewer --max-tokens"), "too long"),
        (UserError("no template", "train it with gpt train --chat"), "no template"),
        (UserError("no text", "send one"), "no text (send one)"),
    ):
        assert protocol.ApiError.of(error).message == told


def test_a_log_probability_is_never_a_number_that_json_lacks() -> None:
    tokens = [(Token(97, -math.inf, ((98, 0.0), (99, -math.inf))), 0)]
    for found in (completion_logprobs(bytes_tokenizer(), tokens), chat_logprobs(bytes_tokenizer(), tokens)):
        json.dumps(found, allow_nan=False)


def test_every_answer_has_a_request_id_and_a_line_of_the_access_log(model: LanguageModel) -> None:
    body = {"prompt": "a secret", "max_tokens": 2, "ignore_eos": True}
    key, made = {"Authorization": "Bearer sesame"}, r"[0-9a-f]{32}"
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions 200 2", {"json": body, "headers": key}),
        ("/v1/completions 200 2", {"json": {**body, "stream": True}, "headers": key}),
        ("/v1/completions 400 0", {"json": {}, "headers": key}),
        ("/v1/completions 401 0", {"json": body}),
        ("/no%0Asuch%20route 404 0", {"params": {"key": "sesame"}}),
        ("/health 403 0", {"headers": {"Host": "evil.example"}}),
    ]
    valid = ("mine-1", "x" * 128)
    with served(model, access_log=True, api_key="sesame") as found:
        for given in (None, *valid, "x" * 129, "a b", "é"):
            for wanted, fields in asked:
                path, status, tokens = wanted.split()
                own = {} if given is None else {"X-Request-ID": given.encode()}
                headers = {**fields.get("headers", {}), **own}
                answer = found.client.request("POST", path, **{**fields, "headers": headers})
                assert answer.status_code == int(status)
                id = answer.headers["x-request-id"]
                assert id == given if given in valid else re.fullmatch(made, id)
                while not found.notes:  # it comes after the answer
                    time.sleep(0.001)
                assert re.fullmatch(
                    rf"time=\S+\+00:00 id={id} method=POST path={path} status={status} prompt_tokens=[0-9]+ "
                    rf"completion_tokens={tokens} seconds=[0-9.]+", found.notes.pop(),
                )  # fmt: skip
                assert not found.notes
