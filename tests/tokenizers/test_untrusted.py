"""Untrusted tokenizers that exhaust memory, never finish, or make Rust panic."""

import base64
import json
import os
import signal
import struct
import sys
import threading
from typing import Any

import pytest

from gpt.system.errors import Interrupted, UserError
from gpt.system.interrupt import StopSignal
from gpt.tokenizers import untrusted
from gpt.tokenizers.backends import ByteBPE, LibraryTokenizer
from gpt.tokenizers.tokenizer import bytes_tokenizer


def make_library_tokenizer(**parts: Any) -> LibraryTokenizer:
    """Builds a BPE tokenizer whose tokens are single characters."""
    vocab = {char: id for id, char in enumerate(["<unk>", "\u2581", *map(chr, range(32, 127))])}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", **parts.pop("model", {})}
    values = {"version": "1.0", "added_tokens": [], "pre_tokenizer": None, "decoder": {"type": "Fuse"}, "model": model}
    return LibraryTokenizer(json.dumps({**values, **parts}).encode(), {**values, **parts})


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def chain(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def precompile(entry: bytes) -> dict[str, Any]:
    table = struct.pack("<I", 4) + b"\0" * 4 + entry + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


@pytest.mark.parametrize(
    "normalizer",
    [
        chain(*[replace("a", "a" * 1000)] * 3),
        replace("", "a" * 100),
        replace("x*", "a" * 100, "Regex"),
        chain(*[{"type": "Prepend", "prepend": "a"}] * 6),
        chain(replace("a", "a" * 8), {"type": "Prepend", "prepend": "a" * 8}),
        precompile(b"a" * 1000),
    ],
    ids=lambda step: json.dumps(step)[:40],
)
def test_expanding_normalizer_is_an_error(normalizer: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="a normalizer that may lengthen a text more than 32 times"):
        make_library_tokenizer(normalizer=normalizer).encode("a", {}, False, False)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": chain(*[{"type": "Lowercase"}] * 1000)}, "a normalizer of 1,000 steps"),
        (
            {"decoder": {"type": "Sequence", "decoders": [replace("a", "aa")] * 60}},
            "a decoder that may lengthen a text",
        ),
    ],
)
def test_oversized_tokenizer_part_is_an_error(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _ = make_library_tokenizer(**parts).pieces


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        chain({"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")),  # Llama and Mistral
        chain(replace("``", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}),  # ALBERT
        replace(" {2,}", " ", "Regex"),
    ],
)
def test_common_normalizers_match_the_library(normalizer: Any) -> None:
    from tokenizers import Tokenizer

    library = make_library_tokenizer(normalizer=normalizer)
    text = "Some  text, ``naive'', 100 a" * 20
    expected = Tokenizer.from_str(library.data.decode()).encode(text, add_special_tokens=False).ids
    assert library.encode(text, {}, False, False).tolist() == expected


def test_built_in_patterns_have_no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended process must not hit a time limit."""
    monkeypatch.setattr(untrusted, "SECONDS", 0.0)
    monkeypatch.setattr(untrusted, "CHARACTERS_PER_SECOND", 1e9)
    assert len(bytes_tokenizer().encode("ab " * 100_000)) == 300_000


SLOW_PRE_TOKENIZER = {"type": "Split", "pattern": {"Regex": "[ab ]*[^ab ]"}, "behavior": "Isolated", "invert": False}


def test_endless_pattern_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "SECONDS", 0.05)
    monkeypatch.setattr(untrusted, "CHARACTERS_PER_SECOND", 1e9)
    with pytest.raises(UserError, match="the tokenizer takes longer than 0 s for a text of 12,000 characters"):
        make_library_tokenizer(pre_tokenizer=SLOW_PRE_TOKENIZER).encode("ab " * 4000, {}, False, False)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")
def test_signal_interrupts_a_slow_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "SECONDS", 1e6)
    release = threading.Event()
    with pytest.raises(Interrupted), StopSignal(at_once=True):
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        untrusted.run_with_timeout(release.wait, 10**6)
    release.set()


@pytest.mark.parametrize("pattern", ["[", "", "x*", r"\b"])
def test_invalid_or_empty_pattern_is_an_error(pattern: str) -> None:
    tokenizer = ByteBPE(pattern, bytes_tokenizer().backend.ranks)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="the tokenizer's pattern (is not valid|fails on)"):
        tokenizer.encode("some text", {}, False, False)


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": {**SLOW_PRE_TOKENIZER, "pattern": {"Regex": "(a+)+$"}}},
        {"normalizer": replace("(a|aa)+$", "b", "Regex")},
    ],
)
def test_rust_panic_is_an_error(parts: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="the tokenizer"):
        make_library_tokenizer(**parts).encode("a" * 100 + " b", {}, False, False)
