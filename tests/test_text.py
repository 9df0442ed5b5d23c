"""Reading, splitting, tokenizing, and ids on disk and in batches."""

import hashlib
import http.server
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from conftest import GPT2_RANKS, SHARED, make_text, needs_shared
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer

from gpt.errors import UserError, WorkError
from gpt.runs import hf
from gpt.text import catalogue, readers, shards, tokenizer
from gpt.text.batches import Batches, permute

HARD = [
    "", " ", "\n", "plain", "WE'LL SEE, I'm sure; THEY'VE", "1234567890123 12 3", "a\r\nb\r\n\r\n c", "tabs\t\tand  spaces   end ",
    "Zürich naïve 日本語 🐕‍🦺 עברית", "<|endoftext|>", "x <|endoftext|> y", " " * 300 + "z", "\n" * 50 + "a", "\u00a0\u2003\u3000b",
    "\x00\x01\x1c\x1f", "½ ² ٣ Ⅷ", "e\u0301\u0301", "\ufffd", "_under_score__", "''''s 'S 's",
]  # fmt: skip


@pytest.fixture(scope="module")
def learnt() -> tokenizer.Tokenizer:
    return tokenizer.learn_tokenizer([make_text()], 400)


@pytest.fixture(scope="module")
def hf_learnt(learnt: tokenizer.Tokenizer) -> HFTokenizer:
    return HFTokenizer.from_str(json.dumps(hf.to_tokenizer_json(learnt)))


# Readers


def test_files_folders_stdin_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in {"b/2.txt": "two", "b/1.txt": "one", ".hidden": "no", "a.txt": "first", "b/.git": "no"}.items():
        (tmp_path / name).write_text(text)
    corpus = readers.read([str(tmp_path), str(tmp_path / "a.txt")])
    assert [document.text for document in corpus.documents] == ["first", "one", "two", "first"]
    assert corpus.bytes == 16
    assert len(readers.read([str(tmp_path / "a.txt")] * 2).documents) == 1  # or held-out text could be trained on
    assert corpus.sources[0].sha256 == hashlib.sha256(b"first").hexdigest()
    assert corpus.name == tmp_path.name


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty: 0 characters"),
        (b"caf\xe9 au lait", "is not UTF-8: byte 0xe9 at offset 3, line 1"),
        (b"one\ntwo\nthr\xff", "is not UTF-8: byte 0xff at offset 11, line 3"),
        (b"PK\x03\x04\x00\x00", "is no text: it has a zero byte at offset 4"),
        ("hi".encode("utf-16"), "is UTF-16, not UTF-8"),
    ],
)
def test_what_is_no_text(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
        readers.read([str(path)])


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file nowhere\.txt"):
        readers.read(["nowhere.txt"])
    with pytest.raises(UserError, match='no corpus called "pydoc"') as error:
        readers.read(["pydoc"])
    assert "pydocs" in error.value.hint
    with pytest.raises(UserError, match="has no files"):
        readers.read([str(tmp_path)])


def test_text_is_read_exactly(tmp_path: Path) -> None:
    text = "".join(HARD).replace("\x00", "") + "\r\n\ufeff"
    (tmp_path / "t").write_bytes(text.encode())
    assert readers.read([str(tmp_path / "t")]).documents[0].text == text


# Split


def documents(*texts: str) -> list[readers.Document]:
    return [readers.Document(str(number), text) for number, text in enumerate(texts)]


@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=8), st.floats(0.01, 0.9))
def test_split_at_the_end_loses_nothing(texts: list[str], fraction: float) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    try:
        train, held_out = readers.split(documents(*texts), fraction, 0)
    except UserError:  # too short to have two sides
        assert len("".join(texts)) < 2 / min(fraction, 1 - fraction) + 4
        return
    assert "".join(d.text for d in train) + "".join(d.text for d in held_out) == "".join(texts)
    size = sum(len(text.encode()) for text in texts)
    assert abs(sum(len(d.text.encode()) for d in held_out) - fraction * size) <= 4


def test_split_holds_out_the_end() -> None:
    train, held_out = readers.split(documents("a" * 50, "b" * 50), 0.1, 0)
    assert [d.text for d in train] == ["a" * 50, "b" * 40]
    assert [d.text for d in held_out] == ["b" * 10]
    assert readers.split(documents("abc"), 0, 0) == (documents("abc"), [])
    for fraction in (-0.1, 1.0, 1.5):
        with pytest.raises(UserError, match="val-fraction"):
            readers.split(documents("abc"), fraction, 0)
    with pytest.raises(UserError, match="too short to hold 0.1 of it out: 1 character"):
        readers.split(documents("a"), 0.1, 0)


def test_split_of_many_documents_is_by_hash() -> None:
    some = documents(*(f"document {i}" for i in range(1000)))
    train, held_out = readers.split(some, 0.1, 7)
    assert len(train) + len(held_out) == 1000
    assert 60 < len(held_out) < 140
    more_train, more_held_out = readers.split([*documents(*(f"new {i}" for i in range(500))), *some], 0.1, 7)
    assert {d.text for d in held_out} <= {d.text for d in more_held_out}  # adding documents moves none
    assert {d.text for d in train} <= {d.text for d in more_train}
    assert len(readers.split(some, 1e-9, 7)[1]) == 1  # never nothing
    assert {d.text for d in readers.split(some, 0.1, 8)[1]} != {d.text for d in held_out}


# Catalogue


def test_pydocs_and_stdlib() -> None:
    pydocs = readers.read(["pydocs"])
    assert len(pydocs.documents) > 70
    assert 400_000 < pydocs.bytes < 700_000
    stdlib = readers.read(["stdlib"])
    assert stdlib.bytes > 5_000_000
    assert "stdlib/json/decoder.py" in {document.name for document in stdlib.documents}
    assert not any("/test/" in document.name or "site-packages" in document.name for document in stdlib.documents)


def test_python_without_pydoc_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match="comes without pydoc_data"):
        list(catalogue.read("pydocs"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    files: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = files.get(self.path)
            self.send_response(200 if data is not None else 404)
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}", files
        httpd.shutdown()
        thread.join()


def test_fetch_checks_and_caches(
    server: tuple[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, files = server
    monkeypatch.setenv("GPT_CACHE_DIR", str(tmp_path / "cache"))
    sha256 = hashlib.sha256(b"to be").hexdigest()
    with pytest.raises(WorkError, match="cannot download hamlet.*404"):
        catalogue.fetch("hamlet", url + "/x", sha256)
    files["/x"] = b"not to be"
    with pytest.raises(WorkError, match="9 bytes that are not hamlet"):
        catalogue.fetch("hamlet", url + "/x", sha256)
    assert not list(tmp_path.rglob("hamlet*"))
    files["/x"] = b"to be"
    assert catalogue.fetch("hamlet", url + "/x", sha256).read_bytes() == b"to be"
    del files["/x"]
    cached = catalogue.fetch("hamlet", url + "/x", sha256)
    cached.write_bytes(b"spoilt")
    with pytest.raises(WorkError) as error:
        catalogue.fetch("hamlet", url + "/x", sha256)
    assert str(cached) in error.value.hint


@needs_shared
def test_shakespeares_sum_is_the_usual_file() -> None:
    data = (SHARED / "data" / "tinyshakespeare.txt").read_bytes()
    assert catalogue.describe("shakespeare")["source"]["sha256"] == hashlib.sha256(data).hexdigest()


# Tokenizer


@pytest.mark.parametrize("text", HARD)
def test_round_trip_and_parity_on_hard_texts(text: str, learnt: tokenizer.Tokenizer, hf_learnt: HFTokenizer) -> None:
    for each in (learnt, tokenizer.bytes_tokenizer()):
        ids = each.encode(text)
        assert each.decode(ids.tolist()) == text
        assert each.eot not in ids
    if "<|endoftext|>" not in text:  # which the tokenizers library takes for the special token
        assert hf_learnt.encode(text).ids == learnt.encode(text).tolist()


@settings(max_examples=300)
@given(text=st.text(max_size=60))
def test_round_trip_and_parity_on_any_text(text: str, learnt: tokenizer.Tokenizer, hf_learnt: HFTokenizer) -> None:
    ids = learnt.encode(text).tolist()
    assert learnt.decode(ids) == text
    assert hf_learnt.encode(text).ids == ids


@needs_shared
def test_gpt2_is_tiktokens_and_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(GPT2_RANKS))
    ours = tokenizer.gpt2_tokenizer()
    assert (ours.vocab_size, ours.eot) == (50_257, 50_256)
    reference = tiktoken.get_encoding("r50k_base")
    theirs = HFTokenizer.from_str(json.dumps(hf.to_tokenizer_json(ours)))
    for text in [*HARD, make_text(500), (SHARED / "data" / "tinyshakespeare.txt").read_text()[:100_000]]:
        assert ours.encode(text).tolist() == reference.encode_ordinary(text)
        if "<|endoftext|>" not in text:
            assert theirs.encode(text).ids == ours.encode(text).tolist()
    assert len(hf.merges(ours.ranks)) == 50_000


def test_gpt2_offline_says_what_goes_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.setenv("GPT_CACHE_DIR", str(tmp_path))

    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(tokenizer.tiktoken, "get_encoding", offline)
    with pytest.raises(WorkError, match="could not be fetched") as error:
        tokenizer.gpt2_tokenizer()
    assert "r50k_base.tiktoken" in error.value.hint
    assert str(tmp_path / "tiktoken" / "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4") in error.value.hint


def test_vocabulary_size_counts_end_of_text(learnt: tokenizer.Tokenizer) -> None:
    assert (learnt.vocab_size, learnt.eot) == (400, 399)
    assert (tokenizer.bytes_tokenizer().vocab_size, tokenizer.bytes_tokenizer().eot) == (257, 256)


def test_learning_is_deterministic(learnt: tokenizer.Tokenizer) -> None:
    again = tokenizer.learn_tokenizer([make_text()], 400)
    assert again.ranks == learnt.ranks
    assert again.fingerprint == learnt.fingerprint
    assert tokenizer.learn_tokenizer([make_text(seed=1)], 400).fingerprint != learnt.fingerprint


def test_vocabulary_larger_than_the_text_supports() -> None:
    with pytest.raises(UserError, match=r"supports a vocabulary of \d+ ids at most, not 5,000") as error:
        tokenizer.make_tokenizer("auto", 5000, ["a tiny text"])
    size = int(error.value.hint.split()[2])
    assert tokenizer.make_tokenizer("auto", size, ["a tiny text"]).vocab_size == size
    assert tokenizer.make_tokenizer("auto", None, ["a tiny text"]).vocab_size == size
    with pytest.raises(UserError, match="at least 257"):
        tokenizer.make_tokenizer("auto", 256, ["a tiny text"])


def test_ids_outside_the_vocabulary(learnt: tokenizer.Tokenizer) -> None:
    with pytest.raises(UserError, match="id 400 is outside the vocabulary of 400"):
        learnt.decode([1, 400])


@pytest.mark.parametrize("run", [" " * 1_000_000, "\n" * 1_000_000, "a" * 1_500_000, "^" * 1_500_000, "7" * 1_500_000])
def test_long_runs_neither_panic_nor_take_quadratic_time(run: str, learnt: tokenizer.Tokenizer) -> None:
    started = time.monotonic()
    for text in (run, run + "z", "z" + run + " z"):
        assert learnt.decode(learnt.encode(text).tolist()) == text
    assert tokenizer.learn_tokenizer_up_to([run + "z"], 300).vocab_size <= 300
    assert time.monotonic() - started < 30  # quadratic time would take hours


@pytest.fixture(scope="module")
def spacious() -> tokenizer.Tokenizer:
    """With tokens of many spaces and line ends, which a wrong cut would break up."""
    text = "".join(f"{space * length}x" for space in " \n" for length in range(1, 40)) * 3
    return tokenizer.learn_tokenizer_up_to([text], 600)


@settings(max_examples=50, deadline=None)
@given(
    before=st.text(max_size=5),
    space=st.sampled_from(" \n\t\r\u00a0\u3000"),
    length=st.integers(9_995, 10_010),
    after=st.sampled_from(["", "z", " z", "\n", "\nz", "9", "!", "\x1c"]),
)
def test_cuts_in_long_white_space_change_no_id(
    before: str, space: str, length: int, after: str, spacious: tokenizer.Tokenizer
) -> None:
    assert max(map(len, spacious.ranks)) > 8
    text = before + space * length + after
    assert spacious.encode(text).tolist() == spacious._encoding.encode_ordinary(text)


def test_no_token_is_learnt_that_would_take_long_to_take_apart() -> None:
    text = "=" * 200_000 + " " * 200_000 + "ab1½" * 50_000 + "é\u0301" * 50_000
    ruler = tokenizer.learn_tokenizer_up_to([text], 5000)
    assert max(len(token.decode("utf-8", "replace")) for token in ruler.ranks) <= tokenizer.LONGEST_LEARNT
    started = time.monotonic()
    hf.to_tokenizer_json(ruler)
    assert time.monotonic() - started < 20  # a token of 100,000 bytes would take many minutes


def test_a_piece_over_the_limit_is_cut_and_counted(learnt: tokenizer.Tokenizer) -> None:
    assert tokenizer.count_cut_pieces("a" * 2**20 + " " + "b" * 2**20) == 0
    assert tokenizer.count_cut_pieces("a" * (2**21 + 1)) == 2
    assert [len(piece) for piece in tokenizer._pieces("a" * (2**21 + 1))] == [2**20, 2**20, 1]


@settings(max_examples=100)
@given(text=st.text(max_size=40), cut=st.integers(2, 6))
def test_pieces_are_the_whole_text(text: str, cut: int) -> None:
    assert "".join(tokenizer._pieces(text * 2000)) == text * 2000


# Shards


def test_shards_read_back(tmp_path: Path, learnt: tokenizer.Tokenizer) -> None:
    texts = ["one", "", "three 🐕"]
    shard = shards.encode_documents(learnt, texts)
    shards.write(tmp_path / "x.ids", shard, learnt.vocab_size)
    again, vocab_size = shards.read(tmp_path / "x.ids")
    assert vocab_size == 400
    assert again.ids.dtype == np.uint16
    assert [learnt.decode(ids.tolist()) for ids in again.documents()] == texts
    assert again.ids[again.offsets.astype(int)].tolist() == [learnt.eot] * 3
    assert [p.name for p in tmp_path.iterdir()] == ["x.ids"]
    shards.write(tmp_path / "none.ids", shards.encode_documents(learnt, []), 400)
    assert len(shards.read(tmp_path / "none.ids")[0].ids) == 0


def test_damaged_shards_are_refused(tmp_path: Path, learnt: tokenizer.Tokenizer) -> None:
    path = tmp_path / "x.ids"
    shards.write(path, shards.encode_documents(learnt, ["some text", "more"]), learnt.vocab_size)
    good = path.read_bytes()
    for bad in (
        b"",
        good[:20],
        good[:-1],
        good + b"x",
        b"X" + good[1:],
        good[:8] + b"\x09" + good[9:],
        good[:32] + b"\xff" + good[33:],
    ):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=r"x\.ids"):
            shards.read(path)
    shards.write(path, shards.encode_documents(learnt, ["some text"]), 300)  # a vocabulary smaller than its ids
    with pytest.raises(UserError, match="outside its vocabulary of 300"):
        shards.read(path)


# Batches


@given(n=st.integers(1, 300), key=st.integers(0, 2**63 - 1))
def test_permutation_is_one(n: int, key: int) -> None:
    assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


def test_permutation_of_a_trillion() -> None:
    some = np.arange(10**12, 10**12 + 1000)
    images = permute(some, 10**13, 5)
    assert len(set(images.tolist())) == 1000
    assert 0 <= images.min() <= images.max() < 10**13


@settings(deadline=None)
@given(length=st.integers(8, 200), rows=st.integers(1, 9), seed=st.integers(0, 99))
def test_an_epoch_sees_every_token_once(length: int, rows: int, seed: int) -> None:
    ids = np.arange(length, dtype=np.uint16)
    batches = Batches(ids, 8, rows, seed)
    inputs: list[np.ndarray] = []
    for step in range(-(-batches.windows // rows)):
        x, y = batches.global_batch(step)
        assert x.shape == y.shape == (rows, 8)
        assert np.array_equal(y, (x + 1) % length)  # the stream is a ring
        inputs += list(x)
    seen = np.concatenate(inputs[: batches.windows])
    assert len(set(seen.tolist())) == len(seen) == batches.windows * 8
    assert length - len(seen) < 8


def test_batches_are_a_function_of_seed_and_step() -> None:
    ids = np.arange(10_000, dtype=np.uint16)
    one, same, other = Batches(ids, 16, 4, 1), Batches(ids, 16, 4, 1), Batches(ids, 16, 4, 2)
    for step in range(5):
        one.global_batch(step)
    assert np.array_equal(one.global_batch(1000)[0], same.global_batch(1000)[0])
    assert not np.array_equal(one.global_batch(1000)[0], other.global_batch(1000)[0])
    epoch = batches_per_epoch = one.windows // 4
    first = {int(x) for step in range(batches_per_epoch) for x in one.global_batch(step)[0][:, 0]}
    second = {int(x) for step in range(epoch, 2 * epoch) for x in one.global_batch(step)[0][:, 0]}
    assert {x % 16 for x in first if x < 9000} != {x % 16 for x in second if x < 9000}  # the cuts shift
