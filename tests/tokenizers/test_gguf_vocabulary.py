"""Tokenizers from GGUF metadata: ids against a written-out SentencePiece BPE, and against the tokenizer that was
exported."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vocabularies
from conftest import Gpt, make_text
from models import source_of

from gpt.config.model import GPTConfig
from gpt.exporting import gguf
from gpt.model.decoder import GPT
from gpt.system.errors import UserError
from gpt.system.gguf_header import header
from gpt.tokenizers import gguf_vocabulary
from gpt.tokenizers.finding import find_tokenizer
from gpt.tokenizers.importing import from_tokenizer_json
from gpt.tokenizers.tokenizer import Tokenizer, bytes_tokenizer

pytest.importorskip("gguf")

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)


def sentence_pieces(seed: int = 0) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary: pieces that merges of random text produce, each with a score."""
    rng = random.Random(seed)
    words = [f"▁{word}" for word in make_text(3000).split() if word.isascii()]
    pieces = sorted({char for word in words for char in word})
    counts: dict[str, int] = {}
    for word in words:
        for start in range(len(word)):
            for end in range(start + 2, min(len(word), start + 6) + 1):
                counts[word[start:end]] = counts.get(word[start:end], 0) + 1
    longer = sorted(counts, key=lambda piece: (len(piece), -counts[piece], piece))[:400]
    rng.shuffle(longer)
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *longer, *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(longer) + len(pieces))]
    scores = [0.0] * 259 + [-float(rank // 2) for rank in range(len(longer))] + [-1e9] * len(pieces)  # with ties
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32), "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    values, config, ends, _ = gguf_vocabulary.read_vocabulary(metadata, "it")
    return from_tokenizer_json(values, "it", {}, ({"eos_token_id": ends}, {}, config))


def merged(text: str, metadata: dict[str, Any]) -> list[int]:
    """The ids of SentencePiece's BPE: the neighbors whose union has the highest score are merged, the leftmost first;
    a character that is no piece becomes its bytes."""
    ids = {piece: id for id, piece in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(-scores[ids[a + b]], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not unions:
            break
        _, at = min(unions)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        id for symbol in symbols
        for id in ([ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()])
    ]  # fmt: skip


def test_sentence_pieces_are_merged_by_score() -> None:
    metadata = sentence_pieces()
    tokenizer = tokenizer_of(metadata)
    scores = np.arange(len(metadata["tokenizer.ggml.tokens"]), 0, -1).astype(np.float32)
    strict = metadata | {"tokenizer.ggml.scores": scores}
    strict_tokenizer = tokenizer_of(strict)
    texts = [*make_text(600, seed=1).split("\n"), "naïve 漢字", "a", "  two  spaces ", "\ttab"]
    for text in filter(None, texts):
        assert list(map(int, strict_tokenizer.encode(text))) == merged(text, strict), text
        assert tokenizer.decode(list(map(int, tokenizer.encode(text)))) == f" {text}"  # the space put before it
    assert tokenizer.prompt("a")[0] == 1
    assert tokenizer.eot == 2


@pytest.mark.parametrize("form", ["gpt2", "llama3", "qwen", "smollm2"])
def test_exported_tokenizer_gives_the_same_ids(form: str, tmp_path: Path) -> None:
    tokenizer = find_tokenizer(str(vocabularies.write(form, tmp_path / form)))
    model = GPT(GPTConfig.of("modern", tokenizer.vocab_size, 16, 1, 2, 32, qk_norm=False)).eval()
    gguf.write(tmp_path / "model.gguf", source_of(model, tokenizer), "f16", "It")
    again = find_tokenizer(str(tmp_path / "model.gguf"))
    for text in make_text(500, seed=2).split("\n"):
        assert list(again.encode(text)) == list(tokenizer.encode(text))
        if text:  # An empty prompt is the end-of-text token, and a file can have one more than the folder.
            assert again.prompt(text) == tokenizer.prompt(text)
    named = {"<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>"}  # llama.cpp stops at all of them.
    assert again.ends == tokenizer.ends | {id for word, id in tokenizer.all_specials.items() if word in named}
    assert again.chat_template == tokenizer.chat_template


def test_own_tokenizer_keeps_its_fingerprint(tmp_path: Path) -> None:
    model = GPT(GPTConfig.of("gpt2", 257, 16, 1, 2, 32)).eval()
    gguf.write(tmp_path / "model.gguf", source_of(model), "f16", "It")
    assert header(tmp_path / "model.gguf").metadata["tokenizer.ggml.pre"] == "gpt-2"
    assert find_tokenizer(str(tmp_path / "model.gguf")).fingerprint == bytes_tokenizer().fingerprint


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "1 of 2 tokens differ"),
        ({"tokenizer.ggml.tokens": 7}, "tokenizer.ggml.tokens is 7, not of type list"),
        ({"tokenizer.ggml.scores": np.array([1.0], np.float32)}, "no valid scores"),
        ({"tokenizer.ggml.token_type": np.array([1], np.int32)}, "no valid token_type"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}, "no merges"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "x"}, "'x', which gpt does not know"),
    ],
)
def test_damage_is_named(change: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        tokenizer_of(sentence_pieces() | change)


def test_vocabulary_without_ids_has_the_defaults_of_llama_cpp() -> None:
    """tests/exporting/test_llama_cpp.py compares such a file in llama.cpp."""
    metadata = sentence_pieces()
    del metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    tokenizer = tokenizer_of(metadata)
    assert (tokenizer.bos, tokenizer.ends, tokenizer.prompt("")) == (1, {2}, [1])


def test_invalid_utf8_is_refused() -> None:
    for key in ("tokens", "chat"):
        changed = sentence_pieces() | ({"tokenizer.chat_template": "\udcff"} if key == "chat" else {})
        changed["tokenizer.ggml.tokens"][300] = "\udcff" if key == "tokens" else "x"
        with pytest.raises(UserError, match="is not UTF-8"):
            tokenizer_of(changed)


def test_splits_of_pieces_are_limited() -> None:
    """Without a limit, 400 × 400 pieces aⁱbʲ have 45 million merges."""
    tokens = ["<unk>", "<s>", "</s>", *("a" * i + "b" * j for i in range(99) for j in range(99) if i + j)]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(len(tokens), np.float32),
    }  # fmt: skip
    with pytest.raises(UserError, match="splits of its tokens have .* characters; 33,554,432 is the limit"):
        tokenizer_of(metadata)


@pytest.mark.parametrize("merge", ["a", "a b c", "a <nothing>", "aa aa"])
def test_damaged_merges_are_named(merge: str, tmp_path: Path) -> None:
    gguf.write(tmp_path / "model.gguf", source_of(GPT(GPTConfig.of("gpt2", 257, 16, 1, 2, 32)).eval()), "f16", "It")
    metadata = {**header(tmp_path / "model.gguf").metadata, "tokenizer.ggml.merges": [merge, merge]}
    with pytest.raises(UserError, match=f"no token results from the merge '{merge}'") as error:
        tokenizer_of(metadata)
    assert "download it again" in error.value.hint


def test_tokenizer_command_reads_a_file(tmp_path: Path, gpt: Gpt) -> None:
    gguf.write(tmp_path / "model.gguf", source_of(GPT(GPTConfig.of("gpt2", 257, 16, 1, 2, 32)).eval()), "f16", "It")
    ids = gpt("tokenizer", "encode", "ab", "--tokenizer", tmp_path / "model.gguf")
    assert ids.out.split() == ["97", "98"]
