"""Tokenizers: parity with other libraries, and saved files."""

import hashlib
import json
import shutil
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import tiktoken
import tiktoken_ext.openai_public as openai
from conftest import GPT2_RANKS, SHARED, make_text, needs_shared
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer

from gpt.corpus import vocabulary
from gpt.system.errors import UserError, WorkError
from gpt.tokenizers import finding, importing, saving, tokenizer
from gpt.tokenizers.backends import ByteBPE, LibraryTokenizer

HARD = [
    "", " ", "\n", "plain", "WE'LL SEE, I'm sure; THEY'VE", "1234567890123 12 3", "a\r\nb\r\n\r\n c", "tabs\t\tand  spaces   end ",
    "Zürich naïve 日本語 🐕‍🦺 עברית", "<|endoftext|>", "x <|endoftext|> y", " " * 300 + "z", "\n" * 50 + "a", "\u00a0\u2003\u3000b",
    "\x00\x01\x1c\x1f", "½ ² ٣ Ⅷ", "e\u0301\u0301", "\ufffd", "_under_score__", "''''s 'S 's",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> tokenizer.Tokenizer:
    return tokenizer.train_tokenizer([make_text()], 400)


@pytest.fixture(scope="module")
def hf_tokenizer(trained: tokenizer.Tokenizer) -> HFTokenizer:
    return HFTokenizer.from_str(json.dumps(saving.to_tokenizer_json(trained)))


@settings(max_examples=100)
@given(text=st.sampled_from(HARD) | st.text(max_size=60))
def test_round_trip_and_parity_on_any_text(text: str, trained: tokenizer.Tokenizer, hf_tokenizer: HFTokenizer) -> None:
    for tested_tokenizer in (trained, tokenizer.bytes_tokenizer()):
        ids = tested_tokenizer.encode(text).tolist()
        assert tested_tokenizer.decode(ids) == text
        assert tested_tokenizer.eot not in ids
    assert hf_tokenizer.encode(text).ids == trained.encode(text, specials=True).tolist()


@needs_shared
def test_gpt2_ids_equal_tiktoken_and_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(GPT2_RANKS))
    bpe = importing.gpt2_tokenizer()
    assert (bpe.vocab_size, bpe.eot) == (50_257, 50_256)
    reference = tiktoken.get_encoding("r50k_base")
    values = saving.to_tokenizer_json(bpe)
    assert len(values["model"]["merges"]) == 50_000
    hf_tokenizer = HFTokenizer.from_str(json.dumps(values))
    for text in [*HARD, make_text(500), (SHARED / "data" / "tinyshakespeare.txt").read_text()[:100_000]]:
        assert bpe.encode(text).tolist() == reference.encode_ordinary(text)
        if "<|endoftext|>" not in text:
            assert hf_tokenizer.encode(text).ids == bpe.encode(text).tolist()


def test_vocabulary_too_large_for_the_text_is_an_error() -> None:
    with pytest.raises(UserError, match=r"supports a vocabulary of at most \d+ ids, not 5,000") as error:
        vocabulary.make_tokenizer("auto", 5000, ["a tiny text"], 11)
    size = int(error.value.hint.split()[2])
    assert vocabulary.make_tokenizer("auto", size, ["a tiny text"], 11).vocab_size == size
    assert vocabulary.make_tokenizer("auto", None, ["a tiny text"], 11).vocab_size == size
    with pytest.raises(UserError, match="at least 257"):
        vocabulary.make_tokenizer("auto", 256, ["a tiny text"], 11)


def test_id_outside_the_vocabulary_is_an_error(trained: tokenizer.Tokenizer) -> None:
    with pytest.raises(UserError, match="id 400 is outside the vocabulary of 400"):
        trained.check([1, 400])
    assert trained.decode([ord("a"), 400, 2**40]) == "a"  # A model can have more ids.


def test_trained_tokens_have_a_maximum_length() -> None:
    text = "=" * 200_000 + " " * 200_000 + "ab1½" * 50_000 + "é\u0301" * 50_000
    start_time = time.monotonic()
    bpe = tokenizer.train_tokenizer_up_to([text], 5000)
    assert max(len(token.decode("utf-8", "replace")) for token in bpe.backend.ranks) <= tokenizer.MAX_LEARNED_LENGTH
    saving.to_tokenizer_json(bpe)
    assert time.monotonic() - start_time < 100  # A token of 100,000 bytes would take many minutes.


# tiktoken encodings


@pytest.fixture
def offline_encodings(trained: tokenizer.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces downloads with the trained ranks. Returns the list of requested URLs."""
    urls: list[str] = []

    def load(url: str, expected_hash: str) -> dict[bytes, int]:
        urls.append(url)
        return dict(trained.backend.ranks)

    init = tiktoken.Encoding.__init__
    init_without_count = lambda self, name, *, explicit_n_vocab=None, **kwargs: init(self, name, **kwargs)
    monkeypatch.setattr(openai, "load_tiktoken_bpe", load)
    monkeypatch.delattr(openai, "data_gym_to_mergeable_bpe_ranks")  # gpt2 is loaded as r50k_base.
    monkeypatch.setattr(tiktoken.Encoding, "__init__", init_without_count)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    return urls


def test_every_tiktoken_encoding_can_be_named(offline_encodings: list[str]) -> None:
    names = importing.named_tokenizers()
    assert {"bytes", "gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base"} <= set(names)
    for name in names:
        offline_encodings.clear()
        tiktoken.registry.ENCODINGS.clear()
        encoding = finding.find_tokenizer(name)
        assert encoding.name == ("gpt2" if name == "r50k_base" else name)
        assert encoding.decode(encoding.encode(HARD[4]).tolist()) == HARD[4]
        file = importing._FILES.get(name, name)  # Errors name this file.
        assert offline_encodings == ([] if name == "bytes" else [f"{importing.ENCODINGS_URL}{file}.tiktoken"])


def test_ids_can_have_gaps(offline_encodings: list[str]) -> None:
    cl100k = finding.find_tokenizer("cl100k_base")
    assert (cl100k.vocab_size, cl100k.eot) == (100_277, 100_257)
    assert cl100k.specials["<|endofprompt|>"] == 100_276
    ids = cl100k.encode("a<|fim_prefix|>b<|endoftext|>", specials=True).tolist()
    assert ids == [97, 100_258, 98, 100_257]
    assert 100_258 not in cl100k.encode("a<|fim_prefix|>b")
    assert cl100k.decode([97, 100_256, 50_000, 100_258, 98]) == "a<|fim_prefix|>b"  # Two of these ids have no token.
    for bad in (100_277, -1, 2**40):
        with pytest.raises(UserError, match=f"id {bad} is outside the vocabulary of 100,277"):
            cl100k.check([97, bad])
    assert len(set(finding.find_tokenizer("o200k_harmony").all_specials.values())) == 1090


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base"])
def test_offline_error_gives_url_and_cache_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import requests

    def no_network(*args: object, **kwargs: object) -> None:
        raise requests.ConnectionError("no network")

    monkeypatch.setattr(requests, "get", no_network)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    if name == "gpt2":
        monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
        monkeypatch.setenv("GPT_CACHE_DIR", str(tmp_path))
        description, file, folder = "GPT-2's vocabulary", "r50k_base", tmp_path / "tiktoken"
    else:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
        description, file, folder = f"the vocabulary {name}", name, tmp_path
    with pytest.raises(WorkError, match=f"{description} is not on this machine and could not be downloaded") as error:
        finding.find_tokenizer(name)
    url = f"https://openaipublic.blob.core.windows.net/encodings/{file}.tiktoken"
    assert url in error.value.hint
    assert str(folder / hashlib.sha1(url.encode()).hexdigest()) in error.value.hint


@lru_cache
def pattern_tokenizer(name: str) -> tuple[tokenizer.Tokenizer, HFTokenizer]:
    """Returns our tokenizer and that of the tokenizers library, both with the named pattern."""
    trained = tokenizer.train_tokenizer([make_text()], 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai, "load_tiktoken_bpe", lambda *_, **__: dict(trained.backend.ranks))
        patch.setattr(tiktoken.registry, "ENCODINGS", {})
        encodings = {name: importing.named_tokenizer(name) for name in ("cl100k_base", "o200k_base")}
    odd = tokenizer.Tokenizer("odd", ByteBPE(r"\S+\s*|\s+", trained.backend.ranks), 400, "<|end|>", {"<|user|>": 999})
    bpe = odd if name == "odd" else encodings[name]
    return bpe, HFTokenizer.from_str(json.dumps(saving.to_tokenizer_json(bpe)))


@settings(max_examples=100)
@given(text=st.text(max_size=50) | st.text(st.sampled_from(" \n\r\t'/sSlLtdm19.!-aBか。\u0301é\u00a0"), max_size=40))
@pytest.mark.parametrize("name", ["cl100k_base", "o200k_base", "odd"])
def test_other_patterns_match_the_library(name: str, text: str) -> None:
    bpe, reference = pattern_tokenizer(name)
    assert bpe.decode(bpe.encode(text).tolist()) == text
    assert reference.encode(text).ids == bpe.encode(text, specials=True).tolist()


@pytest.mark.parametrize("name", ["cl100k_base", "o200k_base", "odd"])
def test_tokenizer_json_round_trip(name: str, tmp_path: Path) -> None:
    bpe, reference = pattern_tokenizer(name)
    if name == "odd":
        with pytest.raises(UserError, match="has 2 special tokens, none of them"):
            importing.from_tokenizer_json(saving.to_tokenizer_json(bpe), "x")
        return
    (tmp_path / "tokenizer.json").write_text(reference.to_str(), encoding="utf-8")
    for word in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = finding.find_tokenizer(str(word))
        assert (loaded.pattern, loaded.all_specials) == (bpe.pattern, bpe.all_specials)
        assert [loaded.encode(text).tolist() for text in HARD] == [bpe.encode(text).tolist() for text in HARD]
    for word, id in bpe.all_specials.items():
        assert reference.token_to_id(word) == id


def test_tokens_can_lack_a_merge(trained: tokenizer.Tokenizer) -> None:
    ranks = {**trained.backend.ranks, b"zqxj": len(trained.backend.ranks)}
    bpe = tokenizer.Tokenizer("test", ByteBPE(tokenizer.GPT2_PATTERN, ranks), len(ranks))
    values = saving.to_tokenizer_json(bpe)
    hf_ids = lambda: HFTokenizer.from_str(json.dumps(values)).encode("zqxj").ids
    assert hf_ids() == bpe.encode("zqxj").tolist()
    assert importing.from_tokenizer_json(values, "x").fingerprint == bpe.fingerprint
    values["model"]["ignore_merges"] = False
    library_tokenizer = importing.from_tokenizer_json(values, "x")
    assert isinstance(library_tokenizer.backend, LibraryTokenizer)
    assert library_tokenizer.encode("zqxj").tolist() == hf_ids() != [399]


# Special tokens and saved folders


def test_special_tokens_have_the_last_ids_of_the_vocabulary(trained: tokenizer.Tokenizer) -> None:
    extended = tokenizer.train_tokenizer([make_text()], 400, ["<|user|>", "<|bot|>"])
    assert (extended.vocab_size, extended.eot, dict(extended.specials)) == (400, 397, {"<|user|>": 398, "<|bot|>": 399})
    assert extended.backend.ranks == {token: rank for token, rank in trained.backend.ranks.items() if rank < 397}
    with pytest.raises(UserError, match="at least 258"):
        tokenizer.train_tokenizer([make_text()], 257, ["<|user|>"])
    for bad in (["a", "a"], ["<|endoftext|>"], [""]):
        with pytest.raises(UserError, match="special token"):
            tokenizer.train_tokenizer([make_text()], 400, bad)


def make_bytes(**specials: int) -> tokenizer.Tokenizer:
    ranks = {bytes([byte]): byte for byte in range(256)}
    return tokenizer.Tokenizer("test", ByteBPE(tokenizer.GPT2_PATTERN, ranks), 256, specials=specials)


@pytest.mark.parametrize(
    ("specials", "message"),
    [
        ({"<|user|>": 256}, "has 258 tokens and 257 ids"),
        ({"<|user|>": -1}, "are not numbers from 0"),
        ({"<|user|>": 2**40}, "are not numbers from 0"),
        ({"<|endoftext|>": 257}, "are not all different"),
    ],
)
def test_invalid_special_token_id_is_an_error(specials: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_bytes(**specials)


def test_fingerprint_is_stable_and_includes_special_tokens() -> None:
    fingerprint = tokenizer.bytes_tokenizer().fingerprint
    assert fingerprint == "49d8b8f9301fe869454211d3a0086614920cd5fcab2f8e47e0be0ad54d280fdd"
    assert len({fingerprint, *(make_bytes(**ids).fingerprint for ids in ({}, {"a": 257}, {"a": 258}, {"b": 257}))}) == 4


def test_special_token_inside_another_is_not_matched() -> None:
    tokenizer_with_specials = make_bytes(**{"<a>": 257, "<a><b>": 258})
    assert tokenizer_with_specials.encode("<a><b><a>x", specials=True).tolist() == [258, 257, ord("x")]


def test_saved_folder_loads_here_and_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trained, saved_folder = (
        tokenizer.train_tokenizer([make_text()], 400, ["<|user|>", "<|bot|>"]),
        tmp_path / "a" / "own",
    )
    for source, folder in ((trained, saved_folder), (pattern_tokenizer("cl100k_base")[0], tmp_path / "foreign")):
        saving.save_tokenizer(source, folder)
        loaded = finding.find_tokenizer(str(folder))
        assert (loaded.fingerprint, loaded.specials) == (source.fingerprint, source.specials)
        reference = transformers.AutoTokenizer.from_pretrained(folder)
        assert all(reference.convert_tokens_to_ids(word) == id for word, id in source.all_specials.items())
        for text in [*HARD, "<|user|> the cat's mat <|bot|>WE'LL SEE<|endoftext|>"]:
            assert reference(text)["input_ids"] == source.encode(text, specials=True).tolist()
    with pytest.raises(UserError, match="already exists"):
        saving.save_tokenizer(trained, saved_folder)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["own"]


def test_every_path_to_a_tokenizer_is_found(tmp_path: Path, trained: tokenizer.Tokenizer) -> None:
    saving.save_tokenizer(trained, tmp_path / "own")
    for name in ("manifest", "run/tokens", "other/step-000002"):
        shutil.copytree(tmp_path / "own", tmp_path / name)
    for name in ("manifest", "run/tokens"):
        (tmp_path / name / "gpt.json").rename(tmp_path / name / "manifest.json")
        (tmp_path / name / "tokenizer.json").unlink()
    saving.save_tokenizer(tokenizer.bytes_tokenizer(), tmp_path / "other" / "step-000001")
    files = ("own/tokenizer.tiktoken", "own/tokenizer.json")
    for name in ("own", "manifest", "run", "run/tokens", "other", *files):
        assert finding.find_tokenizer(str(tmp_path / name)).fingerprint == trained.fingerprint, name


def test_bos_can_be_the_first_id(tmp_path: Path) -> None:
    saved = replace(tokenizer.bytes_tokenizer(), bos=0)
    saving.save_tokenizer(saved, tmp_path / "own")
    assert finding.find_tokenizer(str(tmp_path / "own")) == saved


def test_path_without_a_tokenizer_is_an_error(tmp_path: Path, trained: tokenizer.Tokenizer) -> None:
    def assert_refused(name: str | Path, message: str) -> str | None:
        with pytest.raises(UserError, match=message) as error:
            finding.find_tokenizer(str(name))
        return error.value.hint

    assert assert_refused("gtp2", 'there is no tokenizer "gtp2"') == 'did you mean "gpt2"?'
    saved_folder = tmp_path / "own"
    saving.save_tokenizer(trained, saved_folder)
    ranks_bytes = (saved_folder / "tokenizer.tiktoken").read_bytes()
    (saved_folder / "tokenizer.tiktoken").write_bytes(ranks_bytes[: ranks_bytes.rindex(b"\n", 0, -1) + 1])
    assert_refused(saved_folder, "the fingerprint differs")
    (saved_folder / "tokenizer.tiktoken").write_bytes(ranks_bytes)
    (saved_folder / "gpt.json").write_text('{"tokenizer": {"name": "x", "specials": [1]}}')
    assert_refused(saved_folder, "does not describe its tokenizer")
