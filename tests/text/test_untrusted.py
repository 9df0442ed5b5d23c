"""Tokenizers of downloaded models that would fill the memory, never end, or make Rust print notes of its own."""

import base64
import json
import os
import signal
import struct
import sys
import threading
import time
from typing import Any

import pytest

from gpt.errors import Interrupted, UserError
from gpt.interrupt import StopSignal
from gpt.text import untrusted
from gpt.text.backends import ByteBPE, Library
from gpt.text.tokenizer import bytes_tokenizer


def a_tokenizer(**parts: Any) -> Library:
    """A BPE of single characters, with these parts of a ``tokenizer.json``."""
    vocab = {char: id for id, char in enumerate(["<unk>", "\u2581", *map(chr, range(32, 127))])}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", **parts.pop("model", {})}
    values = {"version": "1.0", "added_tokens": [], "pre_tokenizer": None, "decoder": {"type": "Fuse"}, "model": model}
    return Library(json.dumps({**values, **parts}).encode(), {**values, **parts})


def replaces(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def precompiled(entry: bytes) -> dict[str, Any]:
    table = struct.pack("<I", 4) + b"\0" * 4 + entry + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


@pytest.mark.parametrize(
    "normalizer",
    [
        sequence(*[replaces("a", "a" * 1000)] * 3),
        replaces("", "a" * 100),
        replaces("x*", "a" * 100, "Regex"),
        sequence(*[{"type": "Prepend", "prepend": "a"}] * 6),
        sequence(replaces("a", "a" * 8), {"type": "Prepend", "prepend": "a" * 8}),
        precompiled(b"a" * 1000),
    ],
    ids=lambda step: json.dumps(step)[:40],
)
def test_a_normalizer_that_lengthens_a_text_is_refused(normalizer: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="a normalizer that may lengthen a text more than 32 times"):
        a_tokenizer(normalizer=normalizer).encode("a", {}, False, False)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"normalizer": sequence(*[{"type": "Lowercase"}] * 1000)}, "a normalizer of 1,000 steps"),
        (
            {"decoder": {"type": "Sequence", "decoders": [replaces("a", "aa")] * 60}},
            "a decoder that may lengthen a text",
        ),
        ({"model": {"end_of_word_suffix": "#" * 1000}}, "a end_of_word_suffix of 1,000 characters"),
    ],
)
def test_parts_of_unreasonable_size_are_refused(parts: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        _ = a_tokenizer(**parts).pieces


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        sequence({"type": "Prepend", "prepend": "\u2581"}, replaces(" ", "\u2581")),  # Llama's, Mistral's
        sequence(replaces("``", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}),  # ALBERT's
        replaces(" {2,}", " ", "Regex"),
    ],
)
def test_usual_normalizers_are_accepted_and_give_the_librarys_ids(normalizer: Any) -> None:
    from tokenizers import Tokenizer

    library = a_tokenizer(normalizer=normalizer)
    text = "Some  text, ``naive'', 100 a" * 20
    expected = Tokenizer.from_str(library.data.decode()).encode(text, add_special_tokens=False).ids
    assert library.encode(text, {}, False, False).tolist() == expected


def test_memory_is_bounded_where_a_text_may_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "MOST_CHARACTERS", 1000)
    library = a_tokenizer(normalizer=replaces("a", "aaaa"))
    assert len(library.encode("a" * 250, {}, False, False)) == 1000
    with pytest.raises(UserError, match="a text of 251 characters is too long for a tokenizer .* 4 times"):
        library.encode("a" * 251, {}, False, False)
    assert [len(ids) for ids in library.encode_all(["a" * 200, "a" * 250], {})] == [800, 1000]  # each by itself


def test_our_own_patterns_have_no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is suspended for an hour goes on."""
    monkeypatch.setattr(untrusted, "SECONDS", 0.0)
    monkeypatch.setattr(untrusted, "RATE", 1e9)
    assert len(bytes_tokenizer().encode("ab " * 100_000)) == 300_000


SLOW = {"type": "Split", "pattern": {"Regex": "[ab ]*[^ab ]"}, "behavior": "Isolated", "invert": False}


def test_a_pattern_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "SECONDS", 0.2)
    monkeypatch.setattr(untrusted, "RATE", 1e9)
    with pytest.raises(UserError, match="the tokenizer takes longer than 0 s for a text of 60,000 characters"):
        a_tokenizer(pre_tokenizer=SLOW).encode("ab " * 20_000, {}, False, False)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")
def test_a_signal_is_answered_while_a_tokenizer_computes() -> None:
    began = time.monotonic()
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(Interrupted), StopSignal(at_once=True):
        a_tokenizer(pre_tokenizer=SLOW).encode("ab " * 40_000, {}, False, False)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("pattern", ["[", "", "x*", r"\b"])
def test_a_pattern_that_is_none_or_matches_nothing_is_refused(pattern: str) -> None:
    tokenizer = ByteBPE(pattern, bytes_tokenizer().backend.ranks)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="the tokenizer's pattern (is not valid|fails on)"):
        tokenizer.encode("some text", {}, False, False)


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": {**SLOW, "pattern": {"Regex": "(a+)+$"}}},
        {"normalizer": replaces("(a|aa)+$", "b", "Regex")},
    ],
)
def test_a_panic_of_rust_is_one_error(parts: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="the tokenizer"):
        a_tokenizer(**parts).encode("a" * 100 + " b", {}, False, False)
    os.write(2, b"stderr is back\n")
    assert capfd.readouterr().err == "stderr is back\n"


def test_silence_of_several_threads_ends_with_the_last(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = untrusted.silent(), untrusted.silent()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    os.write(2, b"hidden\n")
    second.__exit__(None, None, None)
    os.write(2, b"seen\n")
    assert capfd.readouterr().err == "seen\n"
