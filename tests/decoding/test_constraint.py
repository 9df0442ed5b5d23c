"""Structured output: choices, regular expressions and JSON schemas."""

import contextlib
import json
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import slow
from models import CPU, letters, loud

from gpt.api import LanguageModel
from gpt.config.model import GPTConfig
from gpt.config.sample import SampleConfig
from gpt.decoding import constraint as constraints
from gpt.decoding.constraint import ConstraintCache
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request, Update
from gpt.system.distribution import install_extra
from gpt.system.errors import UserError
from gpt.tokenizers.tokenizer import bytes_tokenizer

EOT = 256
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "at": {
            "type": "object",
            "properties": {
                "x": {"type": "number", "minimum": -1, "maximum": 1},
                "y": {"type": "integer", "minimum": -9, "maximum": 99},
            },
            "required": ["x", "y"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 1, "maxItems": 3},
        "size": {"anyOf": [{"type": "boolean"}, {"const": "big"}]},
    },
    "required": ["name", "at", "tags"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-zé]{1,5}(, \d{2}){0,2}!?"
CHOICES = ("yes", "yes, but", "no", 'a "quoted"\nline\u2028', "🐕")


def follows_schema(text: str) -> bool:
    value = json.loads(text)
    keys = [["name", "at", "tags"], ["name", "at", "tags", "size"]]
    return (
        list(value) in keys
        and len(value["name"]) <= 6
        and list(value["at"]) == ["x", "y"]
        and -1 <= value["at"]["x"] <= 1
        and type(value["at"]["y"]) is int
        and 1 <= len(value["tags"]) <= 3
        and all(tag in ("red", "green", 3, None) for tag in value["tags"])
        and value.get("size", True) in (True, False, "big")
    )


VALID: dict[str, tuple[Any, Callable[[str], Any]]] = {
    "choices": (CHOICES, lambda text: text in CHOICES),
    "regex": (REGEX, lambda text: re.fullmatch(REGEX, text)),
    "json_schema": (json.dumps(SCHEMA), follows_schema),
}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(loud(GPTConfig(257, 128, 1, 2, 16), spread=0.1), bytes_tokenizer(), CPU, Path("nowhere"))


@pytest.mark.parametrize("settings", [
    {}, {"greedy": True}, {"temperature": 1.5}, {"top_k": 3, "min_p": 0.01}, {"beam": 3},
    {"min_tokens": 30, "no_repeat_ngram": 2, "repetition_penalty": 1.5}, {"presence_penalty": 1.0, "bias": ("e=5",)},
])  # fmt: skip
@pytest.mark.parametrize("name", VALID)
def test_constrained_texts_are_valid(model: LanguageModel, name: str, settings: dict[str, Any]) -> None:
    value, is_valid = VALID[name]
    config = SampleConfig(**{name: value, "max_tokens": 110, **settings})
    samples = [piece.sample for piece in model.write_all(["", "a b"], config, num=config.beam or 8) if piece.sample]
    complete = [sample for sample in samples if sample.finish_reason != "length"]
    assert len(complete) > len(samples) / 2
    for sample in complete:
        assert is_valid(sample.text), sample


def run(model: LanguageModel, config: SampleConfig, constrained: bool = True, **settings: Any) -> list[Update]:
    constraint = ConstraintCache(model.tokenizer).find(config) if constrained else None
    engine = Engine(Context(model.model, CPU, max(1, config.beam)), model.tokenizer.ends)
    engine.add(Request([EOT], config, constraint=constraint, **settings))
    return list(engine.run())


@pytest.mark.parametrize("settings", [
    {}, {"greedy": True}, {"temperature": 1.5, "top_k": 9}, {"beam": 3},
    {"min_tokens": 5, "frequency_penalty": 0.5},
])  # fmt: skip
def test_permissive_constraint_does_not_change_the_text(model: LanguageModel, settings: dict[str, Any]) -> None:
    """The constraint allows any ASCII text, and the bias excludes all other bytes."""
    config = SampleConfig(regex=r"(?s:.)*", **{"max_tokens": 30, **settings})
    bias = tuple((byte, -1e9) for byte in range(128, 256))
    actual, expected = (
        [(update.tokens, update.reason, [(best.ids, best.score) for best in update.best]) for update in updates]
        for updates in (run(model, config, True, bias=bias), run(model, config, False, bias=bias))
    )
    assert actual == expected


def test_complete_text_ends_with_end_of_text(model: LanguageModel) -> None:
    """A complete text that could continue ends with end-of-text."""
    config = SampleConfig(choices=("A", "AB"), max_tokens=9)
    reasons = {}
    for index in range(20):
        *_, last_update = updates = run(model, config, index=index)
        ids = [token.id for update in updates for token in update.tokens]
        reasons[bytes(id for id in ids if id != EOT)] = (last_update.reason, ids[-1])
    assert reasons == {b"A": ("eot", EOT), b"AB": ("stop", ord("B"))}
    assert run(model, replace(config, max_tokens=1))[-1].reason == "length"
    assert run(model, replace(config, choices=("A",), min_tokens=3))[-1].reason == "stop"


INVALID = [
    ({"regex": "a(?=b)"}, "regex: look-around, including look-ahead and look-behind, is not supported"),
    ({"regex": "["}, "regex: unclosed character class"),
    ({"regex": r"\bfoo"}, "lookarounds not supported yet"),
    ({"regex": "a" * (2**20 + 1)}, "regex has 1,048,577 characters, which is too long"),
    ({"regex": "\ud800"}, "regex is not UTF-8"),
    ({"json_schema": "{"}, "json_schema is not JSON: Expecting property name"),
    ({"json_schema": "[" * 10**5}, "json_schema is not JSON: "),
    ({"json_schema": "true"}, "json_schema is not a JSON object"),
    ({"json_schema": '{"type": "text"}'}, "json_schema: Invalid type: text"),
    ({"json_schema": '{"not": {}}'}, 'json_schema: Unimplemented keys: ["not"]'),
    ({"json_schema": '{"items": {"type": "integer", "multipleOf": 999983}}'}, "json_schema: multipleOf is too large"),
    ({"json_schema": '{"enum": []}'}, "json_schema: Unsatisfiable schema"),
    ({"json_schema": '{"$ref": "http://x/y"}'}, "json_schema: Resource 'http://x/y' is not present"),
    ({"json_schema": '{"$ref": "#"}'}, "json_schema: no text can match it"),
    ({"json_schema": '{"type": "string", "pattern": "(?=a)"}'}, "json_schema: look-around"),
    ({"json_schema": '{"x-guidance": 1}'}, "json_schema: "),
    ({"json_schema": '{"items":' * 500 + "{}" + "}" * 500}, "json_schema: "),
]


@pytest.mark.parametrize("settings, message", INVALID, ids=lambda value: str(value)[:40])
def test_invalid_constraints_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        ConstraintCache(bytes_tokenizer()).find(SampleConfig(**settings))
    assert error.value.message.startswith(message) or message in error.value.message
    assert "\n" not in error.value.message + error.value.hint
    assert len(error.value.message) < 400


def test_contradicting_settings_are_refused() -> None:
    with pytest.raises(UserError, match="choices and regex both constrain the text"):
        SampleConfig(choices=("a",), regex="b")
    with pytest.raises(UserError, match="structured output cannot ignore end-of-text"):
        SampleConfig(regex="b", ignore_eot=True)


def test_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match="structured output needs the package llguidance") as error:
        ConstraintCache(bytes_tokenizer()).find(SampleConfig(regex="a"))
    assert (error.value.hint, error.value.exit_code) == (install_extra("structured"), 2)


def test_constraint_that_needs_missing_tokens_is_refused() -> None:
    cache = ConstraintCache(letters(b"a", b"b", b"ab", b"a"))
    with pytest.raises(UserError, match="regex: no text can match it"):
        cache.find(SampleConfig(regex="z"))
    constraint = cache.find(SampleConfig(regex="aba?|abz"))
    assert constraint is not None
    assert constraint.compute_mask(5).tolist() == [True, False, True, True, False]
    constraint_after_ab = constraint.with_token(2)
    assert constraint_after_ab.compute_mask(5).tolist() == [True, False, False, True, True]
    assert constraint_after_ab.with_token(3).ended
    assert constraint.compute_mask(5).tolist() == [True, False, True, True, False]
    dead_end = cache.find(SampleConfig(regex="abz"))
    assert dead_end is not None
    dead_end = dead_end.with_token(2)
    assert dead_end.compute_mask(5).tolist() == [False] * 4 + [True]
    with pytest.raises(UserError, match="no text meets the constraint: "):
        dead_end.take(4)


def test_too_complex_constraint_ends_only_its_request(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later requests start with a new automaton."""
    monkeypatch.setattr(constraints, "MAX_STATES", 60)
    cache = ConstraintCache(model.tokenizer)
    config = SampleConfig(regex="[ab]*a[ab]{200}", max_tokens=100)
    engine = Engine(Context(model.model, CPU, 2), model.tokenizer.ends)
    for _ in range(2):
        unconstrained_number = engine.add(Request([EOT], SampleConfig(max_tokens=120)))
        number = engine.add(Request([EOT], config, constraint=cache.find(config)))
        last_updates = {update.number: update for update in engine.run()}
        assert last_updates[unconstrained_number].error is None
        error = last_updates[number].error
        assert error is not None
        assert error.message.startswith("no text meets the constraint: ")
        assert sum(map(len, [update.tokens for update in last_updates.values()])) > 0


HOSTILE: list[dict[str, Any]] = [
    {"regex": "(?:" * 30 + "a" + "|a?)+" * 30},
    {"regex": "((((((a{1,100}){1,100}){1,100}){1,100}){1,100}){1,100})"},
    {"regex": r"(.*a){20}b(\p{L}{1,1000}\s?){1,1000}"},
    {"regex": "[ab]*a[ab]{1000}"},
    {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"choices": tuple(f"{number:06}" for number in range(20_000))},
    {"json_schema": json.dumps({"enum": [f"{number:06}" * 8 for number in range(18_000)]})},
    {"json_schema": json.dumps({"properties": {f"p{at}": {"maxLength": at} for at in range(20_000)}})},
    {"json_schema": json.dumps({"allOf": [{"anyOf": [{"properties": {f"a{2 * at + side}": {"type": "integer"}}} for side in (0, 1)]} for at in range(20)]})},
    {"json_schema": json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 10**9})},
    {"json_schema": json.dumps({"type": "integer", "multipleOf": 10**9 + 7})},
    {"json_schema": json.dumps({"type": "string", "pattern": "^(([a-z]{1,50}){1,50}){1,50}$", "minLength": 1000})},
]  # fmt: skip


def refs(depth: int, schema: Any) -> dict[str, Any]:
    """Returns a chain of ``depth`` references, each in the place of ``schema``'s null."""
    text = json.dumps(schema)
    links = {f"a{at}": json.loads(text.replace("null", f'{{"$ref": "#/$defs/a{at + 1}"}}')) for at in range(depth)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{depth}": {"type": "integer"}}}


CRASHES: list[dict[str, Any]] = [
    *({"json_schema": json.dumps(refs(3000, schema))} for schema in (
        None, {"allOf": [None]}, {"anyOf": [None, {"type": "string"}]}, {"oneOf": [None]}, {"items": None},
        {"additionalProperties": None}, {"properties": {"x": None}, "required": ["x"]}, {"prefixItems": [None]},
    )),
    {"json_schema": json.dumps({"required": [f"r{at}" for at in range(20_000)]})},
    {"regex": "".join(f"[a-{chr(98 + at % 24)}]?" for at in range(10_000))},
]  # fmt: skip


@pytest.mark.parametrize("settings", [CRASHES[0], *map(slow, CRASHES[1:])], ids=lambda value: str(value)[:60])
def test_constraints_that_crash_the_compiler_are_refused(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "SECONDS", 1.0)
    with pytest.raises(UserError, match=r"is too complex: it is nested too deeply, or compiling it takes more than"):
        ConstraintCache(bytes_tokenizer()).find(SampleConfig(**settings))


def test_nested_references_are_checked_and_accepted() -> None:
    assert ConstraintCache(bytes_tokenizer()).find(SampleConfig(json_schema=json.dumps(refs(60, {"items": None}))))


@pytest.mark.parametrize("settings", HOSTILE, ids=lambda value: str(value)[:60])
def test_hostile_constraints_are_cheap_or_refused(settings: dict[str, Any]) -> None:
    """Compiling a constraint and generating 100 bytes with it takes less than 5 s of CPU time."""
    start, rng = time.thread_time(), random.Random(0)
    with contextlib.suppress(UserError):
        constraint = ConstraintCache(bytes_tokenizer()).find(SampleConfig(**settings))
        assert constraint is not None
        for _ in range(100):
            if not constraint.ended:
                constraint.take(int(rng.choice(constraint.compute_mask(257).nonzero()[0])))
    assert time.thread_time() - start < 5


@pytest.mark.more
@pytest.mark.parametrize("name", VALID)
def test_thousand_constrained_texts_are_valid(model: LanguageModel, name: str) -> None:
    value, is_valid = VALID[name]
    config = SampleConfig(**{name: value, "max_tokens": 110, "temperature": 1.0})
    samples = [piece.sample for piece in model.write_all([""], config, num=1000) if piece.sample]
    complete = [sample.text for sample in samples if sample.finish_reason != "length"]
    assert len(complete) > 900
    assert all(map(is_valid, complete))
