"""Text → token shards: the same for any number of processes, after any interruption, in any number of parts."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TINY, Done, make_text
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt
from gpt import events
from gpt.config import TextConfig, TokenizeConfig
from gpt.errors import Interrupted, UserError, WorkError
from gpt.text import corpus, encoders, shards, token_folder, tokenize, unfinished_folder, vocabulary
from gpt.text.documents import Chunk
from gpt.text.token_folder import TokenFolder
from gpt.text.tokenize import tokenize_texts
from gpt.text.tokenizer import bytes_tokenizer
from gpt.text.tokenizer_files import find_tokenizer

SMALL = {
    "gpt.text.corpus.PART": 300,
    "gpt.text.tokenize.ITEM": 700,
    "gpt.text.tokenize.ITEM_DOCUMENTS": 5,
    "gpt.text.unfinished_folder.SLICE_IDS": 3000,
    "gpt.text.corpus.GROUP_BYTES": 20_000,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many groups, slices and items in little text."""
    for name, value in SMALL.items():
        monkeypatch.setattr(name, value)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: a long document, short ones, and JSON lines enough for the split to go by hash."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_bytes(make_text(6000).encode())
    for number in range(8):
        (folder / f"b{number}.md").write_bytes(make_text(300 + 500 * number, seed=number).encode())
    lines = [json.dumps({"text": make_text(20, seed=number)}) for number in range(300)]
    (folder / "c.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def make(texts: Path | str, out: Path, **settings: object) -> TokenFolder:
    return tokenize_texts([str(texts)], TokenizeConfig(**{"out": str(out), "vocab_size": 400, **settings}))  # type: ignore


# What comes out


@pytest.mark.usefixtures("small")
def test_the_ids_are_the_text(texts: Path, tmp_path: Path) -> None:
    folder = make(texts, tmp_path / "out")
    folder.verify()
    tokenizer = folder.tokenizer
    written = {side: list(folder.stream(side).documents) for side in shards.SIDES}
    expected = [(texts / "a.txt").read_text("utf-8", "strict")]
    expected = [path.read_bytes().decode() for path in sorted(texts.iterdir()) if path.suffix != ".jsonl"]
    expected += [json.loads(line)["text"] for line in (texts / "c.jsonl").read_text("utf-8").splitlines()]
    ids = sorted(document[:].tolist() for side in shards.SIDES for document in written[side])
    assert ids == sorted(tokenizer.encode(text).tolist() for text in expected)  # as if encoded whole
    assert folder.documents == len(expected) == sum(map(len, written.values()))
    assert folder.bytes == sum(len(text.encode()) for text in expected)
    assert folder.manifest["split"]["by"] == "hash"
    assert 10 < len(written["val"]) < 60
    assert len(folder.shards) > 10
    assert max(shard.group for shard in folder.shards) >= 3
    assert max(shard.slice for shard in folder.shards) >= 2
    assert [source.name for source in folder.sources()] == [str(path) for path in sorted(texts.iterdir())]
    a = next(folder.sources())
    assert a.sha256 == hashlib.sha256((texts / "a.txt").read_bytes()).hexdigest()
    assert (a.size, a.time) == ((texts / "a.txt").stat().st_size, (texts / "a.txt").stat().st_mtime_ns)


@pytest.mark.usefixtures("small")
def test_any_number_of_processes_makes_the_same(texts: Path, tmp_path: Path) -> None:
    one = make(texts, tmp_path / "one", jobs=1)
    three = make(texts, tmp_path / "three", jobs=3)
    assert contents(one.path) == contents(three.path)


def test_the_size_of_items_and_parts_decides_no_id(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(texts, tmp_path / "whole")
    for name, value in SMALL.items():
        monkeypatch.setattr(name, value)
    cut = make(texts, tmp_path / "cut")
    for side in shards.SIDES:
        a, b = whole.stream(side), cut.stream(side)
        assert len(a) == len(b)
        assert sorted(d[:].tolist() for d in a.documents) == sorted(d[:].tolist() for d in b.documents)


@settings(max_examples=150, deadline=None)
@given(text=st.text("ab 1.'\n字é", max_size=120), size=st.integers(4, 40))
def test_long_documents_are_cut_where_no_id_changes(text: str, size: int) -> None:
    tokenizer = bytes_tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PART", size)
        chunks = [(Chunk(text[at : at + 7], at == 0), False) for at in range(0, len(text), 7)]
        parts = list(corpus.cut_documents(iter(chunks), tokenizer.pattern))
    assert "".join(part[0] for part in parts) == text
    assert [part[1] for part in parts] == [True] * (text != "") + [False] * (len(parts) - 1)
    ids = [id for part in parts for id in _words(tokenizer.pattern, part[0])]
    assert ids == _words(tokenizer.pattern, text)


def _words(pattern: str, text: str) -> list[str]:
    import regex

    return regex.findall(pattern, text)


def test_few_documents_are_split_at_the_end_and_val_text_apart(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three four five " * 20)
    (tmp_path / "b.txt").write_text("six seven " * 10)
    folder = make(tmp_path / "a.txt", tmp_path / "end", tokenizer="bytes", vocab_size=None)
    text = "".join(
        bytes(document[:].tolist()).decode() for s in shards.SIDES for document in folder.stream(s).documents
    )
    assert text == (tmp_path / "a.txt").read_text()
    assert folder.manifest["split"] == {"by": "end", "fraction": 0.1, "seed": 1337, "kept": 432}
    apart = make(
        tmp_path / "a.txt", tmp_path / "own", tokenizer="bytes", vocab_size=None, val_text=tmp_path / "b.txt"
    )  # fmt: skip
    assert apart.manifest["split"]["by"] == "text"
    assert bytes(apart.stream("val").documents[0][:].tolist()) == (tmp_path / "b.txt").read_bytes()
    assert bytes(apart.stream("train").documents[0][:].tolist()) == (tmp_path / "a.txt").read_bytes()
    none = make(tmp_path / "a.txt", tmp_path / "none", tokenizer="bytes", vocab_size=None, val_fraction=0)
    assert len(none.stream("val")) == 0


def test_json_of_the_command(gpt: Callable[..., Done], texts: Path, tmp_path: Path) -> None:
    done = gpt("tokenize", texts, "-o", tmp_path / "out", "--vocab-size", "400", "--json", "--quiet")
    assert done.code == 0, done.err
    assert done.err == ""
    values = json.loads(done.out)
    assert list(values) == [
        "out", "documents", "bytes", "tokens", "shards", "vocab_size", "tokenizer", "seconds", "bytes_per_second",
    ]  # fmt: skip
    assert (values["documents"], values["vocab_size"], values["tokenizer"]) == (309, 400, "bpe")
    again = gpt("tokenize", texts, "-o", tmp_path / "out", "--vocab-size", "400")
    assert again.code == 2
    assert "is there already" in again.err


def test_the_command_loads_no_torch(texts: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from gpt_cli.main import main;"
        f"assert main(['tokenize', {str(texts / 'a.txt')!r}, '-o', {str(tmp_path / 'out')!r}, '-q']) == 0;"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Going on


class Stop(Exception):
    """Stands for the end of the process."""


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_resumed_after_any_slice_it_is_equal_to_the_byte(texts: Path, tmp_path: Path) -> None:
    expected = contents(make(texts, tmp_path / "whole").path)
    count = len({(shard.group, shard.slice) for shard in TokenFolder(tmp_path / "whole").shards})
    assert count > 8
    out = tmp_path / "out"
    for stop_at in range(count):
        shutil.rmtree(out, ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
            patch.setattr(unfinished_folder.ShardWriter, "_write", _failing_at(stop_at))
            make(texts, out)
        with pytest.raises(UserError, match="is not finished"):
            TokenFolder(out)
        with pytest.raises(UserError, match="is there already"):
            make(texts, out)
        made: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(unfinished_folder.ShardWriter, "_write", _recording(made))
            make(texts, out, resume=True, jobs=1 + stop_at % 2)
        assert len(made) == count - stop_at  # no finished slice is made again
        assert contents(out) == expected


_write = unfinished_folder.ShardWriter._write


def _failing_at(count: int) -> Callable[..., None]:
    done = iter(range(count))

    def write(self: unfinished_folder.ShardWriter, end: unfinished_folder.ItemEnd) -> None:
        if next(done, None) is None:
            (self.folder / ".tmp-1-torn.ids").write_bytes(b"torn")
            with (self.folder / token_folder.PROGRESS).open("ab") as file:
                file.write(b'{"group": 1, "it')
            raise Stop
        _write(self, end)

    return write


def _recording(made: list[str]) -> Callable[..., None]:
    def write(self: unfinished_folder.ShardWriter, end: unfinished_folder.ItemEnd) -> None:
        made.append(f"{end.group} {end.items}")
        _write(self, end)

    return write


SCRIPT = """
import sys
for name, value in {small!r}.items():
    room, _, constant = name.rpartition(".")
    setattr(__import__(room, fromlist=["x"]), constant, value)
from gpt_cli.main import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    """The command in a process of its own, with small slices."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(small=SMALL))
    return [sys.executable, str(path), "tokenize"]


@pytest.mark.usefixtures("small")
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_killed_and_resumed_it_is_equal_to_the_byte(texts: Path, tmp_path: Path, script: list[str]) -> None:
    expected = contents(make(texts, tmp_path / "whole").path)
    out = tmp_path / "out"
    command = [*script, str(texts), "-o", str(out), "--vocab-size", "400", "--resume", "--jobs", "2", "-q"]
    kills = 0
    for kill_at in (1, 4, 7, 100_000):
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        while process.poll() is None and _lines(out) <= kill_at:
            time.sleep(0.002)
        if process.poll() is None:
            process.kill()
            kills += 1
        assert process.stderr is not None
        process.stderr.close()
        process.wait()
    assert kills >= 1
    assert process.returncode == 0
    assert contents(out) == expected


def _lines(out: Path) -> int:
    path = out / token_folder.PROGRESS
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_good_order(texts: Path, tmp_path: Path, script: list[str], signum: int) -> None:
    out = tmp_path / "out"
    command = [*script, str(texts), "-o", str(out), "--vocab-size", "400", "--jobs", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and _lines(out) < 2:
        time.sleep(0.002)
    process.send_signal(signum)
    _, err = process.communicate()
    if process.returncode == 0:
        pytest.skip("it was faster than the signal")
    assert process.returncode == 128 + signum
    assert "continue with --resume" in err
    assert "Traceback" not in err
    assert subprocess.run([*command, "--resume", "-q"], check=False).returncode == 0
    TokenFolder(out).verify()


@pytest.mark.usefixtures("small")
def test_what_has_changed_is_noticed(texts: Path, tmp_path: Path) -> None:
    copy = tmp_path / "texts"
    shutil.copytree(texts, copy)
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(unfinished_folder.ShardWriter, "_write", _failing_at(3))
        make(copy, out)
    for settings_, what in (
        ({"seed": 1}, "another split"),
        ({"vocab_size": 500}, "begun with vocab_size 400"),
        ({"val_fraction": 0.2}, "another split"),
        ({"part": "1/2"}, "another part"),
        ({"split_on": "---"}, "begun with split_on None, now '---'"),
    ):
        with pytest.raises(UserError, match=what):
            make(copy, out, resume=True, **settings_)
    (copy / "d.txt").write_text("new")
    with pytest.raises(UserError, match=r"d\.txt was not there when"):
        make(copy, out, resume=True)
    (copy / "d.txt").unlink()
    (copy / "b3.md").rename(tmp_path / "b3.md")
    with pytest.raises(UserError, match=r"b3\.md is gone since"):
        make(copy, out, resume=True)
    (copy / "b3.md").write_text("other")
    with pytest.raises(UserError, match=r"b3\.md has changed since"):
        make(copy, out, resume=True)
    (tmp_path / "b3.md").replace(copy / "b3.md")
    finished = contents(make(copy, out, resume=True).path)
    assert contents(make(copy, out, resume=True).path) == finished  # finished: nothing is done
    with pytest.raises(UserError, match="was begun with another split"):
        make(copy, out, resume=True, seed=2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="no token folder that was begun here"):
        make(copy, tmp_path / "mine", resume=True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]


@pytest.mark.usefixtures("small")
def test_bad_text_leaves_what_is_finished_and_can_be_let_through(texts: Path, tmp_path: Path) -> None:
    copy = tmp_path / "texts"
    shutil.copytree(texts, copy)
    (copy / "d.txt").write_bytes(b"good\nbad \xff\n" + make_text(3000).encode())
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"d\.txt is not UTF-8: byte 0xff at offset 9, line 2"):
        make(copy, out, tokenizer="bytes", vocab_size=None)
    assert _lines(out) > 3
    resumed = make(copy, out, resume=True, errors="replace", tokenizer="bytes", vocab_size=None)
    whole = make(copy, tmp_path / "whole", errors="replace", tokenizer="bytes", vocab_size=None)
    assert resumed.manifest["replaced"] == whole.manifest["replaced"] == 1
    assert [s.sha256 for s in resumed.shards] == [s.sha256 for s in whole.shards]
    skipped = make(copy, tmp_path / "skipped", skip_bad=True, tokenizer="bytes", vocab_size=None)
    assert skipped.manifest["skipped"] == 1
    assert skipped.documents == whole.documents - 1


@pytest.mark.usefixtures("small")
def test_a_lost_shard_is_made_again_with_all_after_it(texts: Path, tmp_path: Path) -> None:
    expected = contents(make(texts, tmp_path / "whole").path)
    records = TokenFolder(tmp_path / "whole").shards
    group = max({shard.group for shard in records}, key=lambda g: max(s.slice for s in records if s.group == g))
    assert sum(shard.group == group and shard.side == "train" for shard in records) > 3
    out = tmp_path / "out"
    for lost in (f"train-{group:05d}-00000.ids", f"train-{group:05d}-00001.ids"):
        shutil.rmtree(out, ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(unfinished_folder, "finish", _stop)
            with pytest.raises(Stop):
                make(texts, out)
            (out / lost).write_bytes((out / lost).read_bytes()[:-2])
            patch.setattr(unfinished_folder.ShardWriter, "_write", _failing_at(1))
            with pytest.raises(Stop):
                make(texts, out, resume=True)
        assert contents(make(texts, out, resume=True).path) == expected


def _stop(*_: object) -> None:
    raise Stop


@pytest.mark.usefixtures("small")
def test_one_process_at_a_time(texts: Path, tmp_path: Path, script: list[str]) -> None:
    out = tmp_path / "out"
    command = [*script, str(texts), "-o", str(out), "--vocab-size", "400", "--jobs", "1", "-q", "--resume"]

    def second(self: unfinished_folder.ShardWriter, end: unfinished_folder.ItemEnd) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert f"error: another process is writing {out}" in done.stderr
        raise Stop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(unfinished_folder.ShardWriter, "_write", second)
        make(texts, out)
    assert subprocess.run(command, check=False).returncode == 0
    assert not (out / ".lock").exists()


@pytest.mark.usefixtures("small")
def test_settings_for_bad_text_may_only_become_milder(texts: Path, tmp_path: Path) -> None:
    copy = tmp_path / "texts"
    copy.mkdir()
    (copy / "one.txt").write_bytes(make_text(60_000).encode() + b"\xff")
    (copy / "two.txt").write_bytes(make_text(3000, seed=1).encode())
    settings_ = {"tokenizer": "bytes", "vocab_size": None, "val_fraction": 0.0}
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"one\.txt is not UTF-8"):
        make(copy, out, **settings_)
    assert _lines(out) > 1  # what came before the wrong byte
    resumed = make(copy, out, resume=True, skip_bad=True, **settings_)
    assert contents(resumed.path) == contents(make(copy, tmp_path / "whole", skip_bad=True, **settings_).path)
    with pytest.raises(UserError, match="was begun with skip_bad True, now False"):
        make(copy, out, resume=True, **settings_)


def test_a_finished_folder_is_not_taken_for_another(texts: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("one text")
    args = {"tokenizer": "bytes", "vocab_size": None}
    make(book, tmp_path / "out", **args)
    with pytest.raises(UserError, match="was begun with field 'text', now 'body'"):
        make(book, tmp_path / "out", resume=True, field="body", **args)
    time.sleep(0.01)
    book.write_text("two text")
    with pytest.raises(UserError, match="has changed since"):
        make(book, tmp_path / "out", resume=True, **args)
    mine = make(texts, tmp_path / "mine", val_fraction=0.2).path
    args = {"tokenizer": str(mine), "vocab_size": None}
    make(texts, tmp_path / "other", **args)
    shutil.rmtree(mine)
    make(texts, mine, vocab_size=300)
    with pytest.raises(UserError, match="was begun with another tokenizer"):
        make(texts, tmp_path / "other", resume=True, **args)


def test_standard_input_is_not_gone_on_with(gpt: Callable[..., Done], workdir: Path) -> None:
    assert gpt("tokenize", "-", "-o", "out", "--tokenizer", "bytes", "--resume", stdin=b"some text").code == 0
    done = gpt("tokenize", "-", "-o", "out", "--tokenizer", "bytes", "--resume", stdin=b"same size")
    assert done.code == 2
    assert "stdin cannot be compared with what it was made from" in done.err


# Parts


@pytest.mark.usefixtures("small")
def test_parts_of_different_texts_are_not_joined(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    args = {"tokenizer": "bytes", "vocab_size": None}
    for number in range(3):
        (texts / f"{number}.txt").write_text(make_text(4000, seed=number))
    (texts / "1.txt").write_text("x" * (texts / "0.txt").stat().st_size)
    names = [str(texts / f"{number}.txt") for number in range(3)]

    def part(texts: list[str], number: int, **settings_: object) -> Path:
        out = tmp_path / f"part{len(list(tmp_path.iterdir()))}"
        config = TokenizeConfig(**{"out": str(out), "part": f"{number}/2", **args, **settings_})  # type: ignore
        return tokenize_texts(texts, config).path

    first = part(names[:2], 1, val_text=names[2])
    with pytest.raises(UserError, match="not parts of one corpus: their corpus differs"):
        token_folder.merge([first, part(names[:1], 2, val_text=str(texts / "[12].txt"))], tmp_path / "merged")
    second = part(names[:2], 2, val_text=names[2])
    shard = TokenFolder(second).shards[0]
    (second / shard.file).write_bytes((second / shard.file).read_bytes()[:100])
    with pytest.raises(UserError, match=re.escape(shard.file)):
        token_folder.merge([first, second], tmp_path / "merged")
    second = part(names[:2], 2, val_text=names[2])
    (second / "notes").mkdir()
    manifest = json.loads((second / token_folder.MANIFEST).read_text())
    assert token_folder.merge([second, first], tmp_path / "merged").tokens
    shard = TokenFolder(first).shards[0]
    manifest["shards"][0] |= {"file": shard.file, "group": shard.group, "slice": shard.slice, "side": shard.side}
    (second / token_folder.MANIFEST).write_text(json.dumps(manifest))
    before = contents(first)
    with pytest.raises(UserError, match="two of the parts have the same shards|is damaged|is not what"):
        token_folder.merge([first, second], tmp_path / "other")
    assert contents(first) == before


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_parts_join_into_what_one_machine_makes(
    texts: Path, tmp_path: Path, count: int, gpt: Callable[..., Done]
) -> None:
    whole = make(texts, tmp_path / "whole")
    parts = [tmp_path / f"part{i}" for i in range(1, count + 1)]
    for i, part in enumerate(parts, 1):
        make(texts, part, part=f"{i}/{count}")
    if count == 3:
        with pytest.raises(UserError, match="part 2/3 is missing"):
            token_folder.merge([parts[0], parts[2]], tmp_path / "merged")
        with pytest.raises(UserError, match="one is there twice"):
            token_folder.merge([*parts, parts[1]], tmp_path / "merged")
        with pytest.raises(UserError, match="is no part"):
            token_folder.merge([whole.path, *parts], tmp_path / "merged")
        other = make(texts, tmp_path / "other", part="2/3", seed=3)
        with pytest.raises(UserError, match="not parts of one corpus: their split differs"):
            token_folder.merge([parts[0], other.path, parts[2]], tmp_path / "merged")
        with pytest.raises(UserError, match="is a part of a corpus"):
            _train(parts[0], tmp_path / "run")
        assert not (tmp_path / "merged").exists()
    merged = token_folder.merge(parts[::-1], tmp_path / "merged")
    assert contents(merged.path) == contents(whole.path)
    merged.verify()
    with pytest.raises(UserError, match="is there already"):
        token_folder.merge(parts, tmp_path / "merged")


# Trained on


def _train(path: Path, out: Path, **settings: object) -> object:
    return gpt.train(path, out=out, steps=6, dtype="float32", **TINY, **settings)


def test_trained_on_it_is_the_text_it_was_made_from(texts: Path, tmp_path: Path, gpt: Callable[..., Done]) -> None:
    folder = make(texts, tmp_path / "tokens")
    heard: list[events.Event] = []
    from_text = _train(texts, tmp_path / "a", vocab_size=400)
    from_tokens = _train(folder.path, tmp_path / "b", tokenizer="bytes", errors="replace", listen=heard.append)
    assert "already: --tokenizer is not used" in str(heard)
    assert "already: --errors is not used" in str(heard)
    assert str(heard).count("is not used") == 2
    assert from_text.val_loss == from_tokens.val_loss  # type: ignore[attr-defined]
    model = "model.safetensors"
    a, b = (result.checkpoint / model for result in (from_text, from_tokens))  # type: ignore[attr-defined]
    assert a.read_bytes() == b.read_bytes()
    assert contents(tmp_path / "a" / "tokens") == contents(folder.path)
    assert not (tmp_path / "b" / "tokens").exists()
    record = json.loads((tmp_path / "b" / "run.json").read_text())
    assert record["sources"][0]["sha256"] == hashlib.sha256((folder.path / "manifest.json").read_bytes()).hexdigest()
    val = json.loads(gpt("eval", tmp_path / "b", folder.path, "--json", "-q").out)
    assert val["loss"] == pytest.approx(from_tokens.val_loss)  # type: ignore[attr-defined]
    train = json.loads(gpt("eval", tmp_path / "b", folder.path, "--split", "train", "--json", "-q").out)
    assert train["bytes"] + val["bytes"] == folder.bytes
    assert gpt("eval", tmp_path / "b", folder.path, "--split", "test").code == 2
    assert "already: --field is not used" in gpt("eval", tmp_path / "b", folder.path, "--field", "x").err


def test_a_split_is_of_a_folder_of_tokens(tmp_path: Path, run_folder: Path, gpt: Callable[..., Done]) -> None:
    text = tmp_path / "t.txt"
    text.write_text("the cat sat on the dog", encoding="utf-8")
    done = gpt("eval", run_folder, text, "--split", "train", "-q")
    assert (done.code, "t.txt is no folder of tokens" in done.err) == (0, True), done.err
    assert gpt("eval", run_folder, text, "--split", "tset").code == 2


def test_a_folder_of_another_tokenizer_is_refused(
    texts: Path, tmp_path: Path, run_folder: Path, gpt: Callable[..., Done]
) -> None:
    other = make(texts, tmp_path / "other", vocab_size=300)
    done = gpt("eval", run_folder, other.path)
    assert done.code == 2
    assert "was made with another tokenizer" in done.err
    same = make(texts, tmp_path / "same", tokenizer=str(run_folder), vocab_size=None)
    assert same.tokenizer.fingerprint == find_tokenizer(str(run_folder)).fingerprint
    assert gpt("eval", run_folder, same.path, "-q").code == 0
    done = gpt("train", same.path, texts, "--out", tmp_path / "run")
    assert done.code == 2
    assert "can only be trained on alone" in done.err


@pytest.mark.usefixtures("small")
def test_damaged_folders_are_refused(texts: Path, tmp_path: Path) -> None:
    folder = make(texts, tmp_path / "good")
    shard = folder.shards[0].file

    def damaged(name: str, change: Callable[[bytes], bytes]) -> TokenFolder:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(folder.path, tmp_path / "bad")
        path = tmp_path / "bad" / name
        path.write_bytes(change(path.read_bytes()))
        return TokenFolder(tmp_path / "bad")

    with pytest.raises(UserError, match="sha256 is not the one"):
        damaged(shard, lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:]).verify()
    with pytest.raises(UserError, match="its header promises"):
        damaged(shard, lambda data: data[:-8]).stream("train")
    with pytest.raises(UserError, match="fingerprint"):
        _ = damaged("tokenizer.tiktoken", lambda data: data.replace(b" 300\n", b" 999\n")).tokenizer
    with pytest.raises(UserError, match="format 9"):
        damaged("manifest.json", lambda data: data.replace(b'"format": 1', b'"format": 9', 1))
    with pytest.raises(UserError, match="is not JSON"):
        damaged("manifest.json", lambda data: data[:-9])
    with pytest.raises(UserError, match="is damaged"):
        damaged("manifest.json", lambda data: data.replace(shard.encode(), b"../" + shard.encode()))
    with pytest.raises(UserError, match=r"sources\.jsonl is damaged"):
        damaged("sources.jsonl", lambda data: data.replace(b"a.txt", b"x.txt")).verify()


# The machine


def test_no_room_is_said_before_the_work(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(WorkError, match=r"the tokens need about 0 MB, and 0 MB are free"):
        make(texts, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("small")
def test_a_full_disk_leaves_finished_slices(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = contents(make(texts, tmp_path / "whole").path)
    whole_file = token_folder.whole_file
    written = iter(range(6))

    def full(path: Path) -> object:
        if next(written, None) is None:
            raise OSError(28, "No space left on device")
        return whole_file(path)

    monkeypatch.setattr("gpt.text.shards.whole_file", full)
    with pytest.raises(WorkError, match="No space left on device"):
        make(texts, tmp_path / "out")
    monkeypatch.undo()
    for name, value in SMALL.items():
        monkeypatch.setattr(name, value)
    assert contents(make(texts, tmp_path / "out", resume=True).path) == expected


def _die(*item: object) -> None:
    os._exit(9)


def test_a_process_that_dies_is_one_line(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_encode_in_process", _die)
    with pytest.raises(WorkError, match="ended unexpectedly"):
        make(texts, tmp_path / "out", jobs=2)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_processes_end_with_their_parent(texts: Path, tmp_path: Path) -> None:
    code = (
        "import os, time; from gpt.text.encoders import Encoders; from gpt.text.tokenizer import bytes_tokenizer\n"
        "with Encoders(2) as encoders:\n"  # not below `if __name__ == '__main__'`: nobody imports this again
        "    for _ in range(2):\n"
        "        encoders.tokenizers.put(bytes_tokenizer())\n"
        "    print(*{encoders.pool.submit(os.getpid).result() for _ in range(20)}, flush=True); time.sleep(60)"
    )
    path = tmp_path / "script.py"
    path.write_text(code)
    process = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    children = process.stdout.readline().split()
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert children


def test_progress_reaches_the_whole(texts: Path, tmp_path: Path) -> None:
    heard: list[object] = []
    tokenize_texts([str(texts)], TokenizeConfig(out=str(tmp_path / "out"), tokenizer="bytes"), heard.append)
    progress = [event for event in heard if isinstance(event, events.Progress)]
    size = sum(path.stat().st_size for path in texts.iterdir())
    assert progress[-1] == events.Progress("tokenized", size, size)
    assert [event.done for event in progress] == sorted(event.done for event in progress)


def test_the_vocabulary_is_learnt_from_a_sample(texts: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    config = TextConfig(vocab_size=300, sample_bytes=20_000)
    found = corpus.open_corpus([str(texts)], config)
    small = vocabulary.tokenizer_for(found, config, notes.append)
    assert small.fingerprint != vocabulary.tokenizer_for(found, TextConfig(vocab_size=300)).fingerprint
    assert "spread over the text" in notes[0]


def test_groups_depend_on_sizes_alone(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "GROUP_BYTES", 20_000)
    found = corpus.open_corpus([str(texts)], TextConfig(val_text=str(texts / "a.txt")))
    groups = found.groups
    assert [number for group in groups for number in group] == list(range(len(found.sources)))
    assert groups[-1] == range(found.val_from, found.val_from + 1)
    for group in groups:
        assert len(group) == 1 or sum(found.sources[number].size for number in group) <= 20_000


def test_interrupted_before_the_first_step_nothing_is_left(texts: Path, tmp_path: Path) -> None:
    def stop(event: object) -> None:
        if isinstance(event, events.Progress):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="nothing is left of the run"):
        _train(texts, tmp_path / "run", listen=stop)
    assert not (tmp_path / "run").exists()


def test_a_thousand_processes_are_not_begun(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    class Few(tokenize.Encoders):
        def __init__(self, jobs: int, note: Callable[[str], None]) -> None:
            begun.append(jobs)
            super().__init__(1)

    monkeypatch.setattr(tokenize, "Encoders", Few)
    make(texts, tmp_path / "out", jobs=1024)
    make(texts, tmp_path / "other", jobs=2)
    assert begun[0] <= 2 * (os.cpu_count() or 1)
    assert begun[1] == 2
