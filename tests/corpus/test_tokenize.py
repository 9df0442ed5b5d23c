"""Token shards don't depend on threads or interruptions; several folders are trained on as one."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vocabularies
from conftest import TINY, Done, make_text, more, one_line_of_what_and_what_next, slow

import gpt
from gpt.config import events
from gpt.config.text import TokenizeConfig
from gpt.corpus import shards, unfinished_folder
from gpt.corpus.token_folder import TokenFolder
from gpt.corpus.tokenize import tokenize_texts
from gpt.documents.sources import PROGRESS
from gpt.system.errors import Interrupted, UserError, WorkError

SMALL = {
    "gpt.corpus.corpus.ENCODE_CHARACTERS": 300,
    "gpt.corpus.tokenize.BATCH": 700,
    "gpt.corpus.tokenize.BATCH_TEXTS": 5,
    "gpt.corpus.unfinished_folder.SHARD_IDS": 3000,
}


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes shards and batches so small that a short text has many."""
    for name, value in SMALL.items():
        monkeypatch.setattr(name, value)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long and short documents, and enough JSON lines for a split by hash."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_bytes(make_text(6000).encode())
    for number in range(8):
        (folder / f"b{number}.md").write_bytes(make_text(300 + 500 * number, seed=number).encode())
    lines = [json.dumps({"text": make_text(20, seed=number)}) for number in range(300)]
    (folder / "c.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


BYTES = {"tokenizer": "bytes", "vocab_size": None}


def tokenize(texts: Path | str, out: Path, **settings: object) -> TokenFolder:
    return tokenize_texts([str(texts)], TokenizeConfig(**{"out": str(out), "vocab_size": 400, **settings}))  # type: ignore


@pytest.fixture(scope="module")
def whole(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    """The texts in small shards, without an interruption."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(name, value)
        return tokenize(texts, tmp_path_factory.mktemp("whole") / "tokens")


# Output


def test_ids_decode_to_the_text(texts: Path, whole: TokenFolder) -> None:
    folder = whole
    folder.verify()
    tokenizer = folder.tokenizer
    documents = {side: list(folder.stream(side).documents) for side in shards.SIDES}
    expected = [path.read_bytes().decode() for path in sorted(texts.iterdir()) if path.suffix != ".jsonl"]
    expected += [json.loads(line)["text"] for line in (texts / "c.jsonl").read_text("utf-8").splitlines()]
    ids = sorted(document[:].tolist() for side in shards.SIDES for document in documents[side])
    assert ids == sorted(tokenizer.encode(text).tolist() for text in expected)
    assert folder.documents == len(expected) == sum(map(len, documents.values()))
    assert folder.bytes == sum(len(text.encode()) for text in expected)
    assert folder.manifest["split"]["by"] == "hash"
    assert 10 < len(documents["val"]) < 60
    assert len(folder.shards) > 10
    assert [source.name for source in folder.sources()] == [str(path) for path in sorted(texts.iterdir())]
    a = next(folder.sources())
    assert a.sha256 == hashlib.sha256((texts / "a.txt").read_bytes()).hexdigest()
    assert (a.size, a.time) == ((texts / "a.txt").stat().st_size, (texts / "a.txt").stat().st_mtime_ns)


@pytest.mark.usefixtures("small_shards")
def test_thread_count_does_not_change_the_output(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single = tokenize(texts, tmp_path / "one", jobs=1)
    monkeypatch.setattr("gpt.corpus.tokenize.cores", lambda: 3)
    threaded = tokenize(texts, tmp_path / "many", jobs=1024)
    assert hashes(single.path) == hashes(threaded.path)


def test_small_corpus_is_split_at_the_end_or_by_val_text(tmp_path: Path) -> None:
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text("one two three four five " * 20)
    b.write_text("six seven " * 10)

    def split(out: str, **settings: object) -> tuple[dict[str, object], list[bytes]]:
        folder = tokenize(a, tmp_path / out, **BYTES, **settings)
        sides = (folder.stream(side).documents for side in shards.SIDES)
        return folder.manifest["split"], [b"".join(bytes(document[:].tolist()) for document in side) for side in sides]

    split_record, (train, val) = split("end")
    assert (train + val, len(train)) == (a.read_bytes(), 432)
    assert split_record == {"by": "end", "fraction": 0.1, "seed": 1337, "kept": 432}
    split_record, sides = split("own", val_text=b)
    assert (split_record["by"], sides) == ("text", [a.read_bytes(), b.read_bytes()])
    assert split("none", val_fraction=0)[1] == [a.read_bytes(), b""]


def test_json_output_of_gpt_tokenize(gpt: Callable[..., Done], texts: Path, tmp_path: Path) -> None:
    args = ["tokenize", texts, "-o", tmp_path / "out", "--vocab-size", "400"]
    result = gpt(*args, "--json", "--quiet")
    assert (result.code, result.err) == (0, "")
    values = json.loads(result.out)
    assert list(values) == [
        "out", "documents", "bytes", "tokens", "shards", "vocab_size", "tokenizer", "seconds", "bytes_per_second",
        "replaced", "skipped",
    ]  # fmt: skip
    assert (values["documents"], values["vocab_size"], values["tokenizer"]) == (309, 400, "bpe")
    one_line_of_what_and_what_next(gpt(*args), "already exists")
    resumed = json.loads(gpt(*args, "--resume", "--json", "--quiet").out)
    assert (resumed["bytes"], resumed["bytes_per_second"]) == (values["bytes"], None)


def test_skipped_files_are_counted_and_named(gpt: Callable[..., Done], workdir: Path) -> None:
    Path("vault").mkdir()
    for number in range(12):
        Path(f"vault/{number:02}.txt").write_bytes("Привет, мир\n".encode("cp1251"))
    Path("vault/note.txt").write_text("one two <|endoftext|> " * 9)
    train_command = ["train", "vault", "--steps", "1", "--sample-every", "0", "--n-embd", "16", "--n-head", "2"]
    for command in (["tokenize", "vault", "-o", "out"], train_command):
        result = gpt(*command, "--skip-bad", "--tokenizer", "bytes")
        assert result.code == 0, result.err
        assert "12 files, lines or rows could not be read: left out" in result.err
        names = re.findall(r"skipped: (.*) is not UTF-8", result.err)
        assert names == [f"vault/{number:02}.txt" for number in range(10)]
        assert "the text contains <|endoftext|> 9 times: it is treated as ordinary text" in result.err
    assert json.loads(gpt("tokenize", "vault", "-o", "o2", "--skip-bad", "--json").out)["skipped"] == 12
    Path("vault/note.txt").unlink()
    result = gpt("tokenize", "vault", "-o", "o3", "--skip-bad")
    assert "without --skip-bad, gpt stops at the first thing that it cannot read" in result.err


def test_special_tokens_in_the_text_are_counted(gpt: Callable[..., Done], workdir: Path) -> None:
    (workdir / "x.jsonl").write_text(json.dumps({"text": "<|im_start|>user\na<|im_end|>\n" * 3}))
    vocabularies.write("qwen", workdir / "qwen")
    result = gpt("tokenize", "x.jsonl", "-o", "out", "--tokenizer", "qwen", "--val-fraction", "0")
    assert "the text contains special tokens 6 times: they are treated as ordinary text" in result.err


# Resume


class SimulatedCrash(Exception):
    pass


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("step", [5, more(1)])
def test_resume_after_any_group_is_byte_identical(texts: Path, tmp_path: Path, whole: TokenFolder, step: int) -> None:
    count = len({shard.file.partition("-")[2] for shard in whole.shards})
    assert count > 8
    for crash_at in range(0, count, step):
        out = tmp_path / str(crash_at)
        tokenize_until_crash(texts, out, crash_at)
        with pytest.raises(UserError, match="is not finished"):
            TokenFolder(out)
        with pytest.raises(UserError, match="already exists"):
            tokenize(texts, out)
        with pytest.MonkeyPatch.context() as patch:  # Rewriting a finished group would crash again.
            patch.setattr(unfinished_folder.ShardWriter, "finish_group", crash_after(count - crash_at))
            tokenize(texts, out, resume=True, jobs=1 + crash_at % 2)
        assert hashes(out) == hashes(whole.path)


finish_group = unfinished_folder.ShardWriter.finish_group


def crash_after(count: int) -> Callable[..., None]:
    writes = iter(range(count))

    def write(self: unfinished_folder.ShardWriter) -> None:
        if self._batches and next(writes, None) is None:
            (self.folder / ".tmp-1-torn.ids").write_bytes(b"torn")
            with (self.folder / PROGRESS).open("ab") as file:
                file.write(b'{"shards": [{"fi')
            raise SimulatedCrash
        finish_group(self)

    return write


def tokenize_until_crash(texts: Path, out: Path, count: int, **settings: object) -> None:
    """Crashes after writing ``count`` groups."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SimulatedCrash):
        patch.setattr(unfinished_folder.ShardWriter, "finish_group", crash_after(count))
        tokenize(texts, out, **settings)


SCRIPT = """
import os
import sys
for name, value in {small!r}.items():
    room, _, constant = name.rpartition(".")
    setattr(__import__(room, fromlist=["x"]), constant, value)
from gpt.corpus.unfinished_folder import ShardWriter
from gpt_cli.main import main
finish = ShardWriter.finish_group
def finish_group(writer):
    finish(writer)
    if f"{{len(writer.groups)}} groups" in os.environ:
        os.kill(os.getpid(), int(os.environ[f"{{len(writer.groups)}} groups"]))
ShardWriter.finish_group = finish_group
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    """A command that writes small shards, and after the group of an environment variable sends itself a signal."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(small=SMALL))
    return [sys.executable, str(path), "tokenize"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize("signum", [slow(signal.SIGINT), more(signal.SIGTERM)])
def test_resume_after_signals_is_byte_identical(
    texts: Path, tmp_path: Path, whole: TokenFolder, script: list[str], signum: int
) -> None:
    out = tmp_path / "out"
    command = [*script, str(texts), "-o", str(out), "--vocab-size", "400", "--resume", "--jobs", "2"]
    codes, errors = [], ""
    for signals in ({"2 groups": str(signum)}, {"7 groups": str(int(signal.SIGKILL))}, {}):
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | signals)
        errors += result.stderr
        codes.append(result.returncode)
    assert codes == [128 + signum, -signal.SIGKILL, 0]
    assert "continue with --resume" in errors
    assert "Traceback" not in errors
    assert hashes(out) == hashes(whole.path)


def finished_groups(out: Path) -> int:
    path = out / PROGRESS
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.usefixtures("small_shards")
def test_resume_refuses_changed_settings_and_files(texts: Path, tmp_path: Path) -> None:
    copy, out = tmp_path / "texts", tmp_path / "out"
    shutil.copytree(texts, copy)
    tokenize_until_crash(copy, out, 3)

    def assert_resume_refused(message: str, out: Path = out, **settings: object) -> None:
        with pytest.raises(UserError, match=message):
            tokenize(copy, out, resume=True, **settings)

    assert_resume_refused("started with another --vocab-size: 400, now 500", vocab_size=500)
    assert_resume_refused("another split", val_fraction=0.2)
    assert_resume_refused("started with another --split-on: None, now ---", split_on="---")
    (copy / "d.txt").write_text("new")
    assert_resume_refused(r"d\.txt was added, removed or changed since")
    (copy / "d.txt").unlink()
    (copy / "b3.md").rename(tmp_path / "b3.md")
    assert_resume_refused(r"b3\.md was added, removed")
    (copy / "b3.md").write_text("other")
    assert_resume_refused(r"b3\.md was added, removed")
    (tmp_path / "b3.md").replace(copy / "b3.md")
    resumed_hashes = hashes(tokenize(copy, out, resume=True).path)
    assert hashes(tokenize(copy, out, resume=True).path) == resumed_hashes
    assert_resume_refused("was started with another split", seed=2)
    (copy / "b3.md").write_text("other")
    assert_resume_refused(r"b3\.md was added, removed")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    assert_resume_refused("is not a token folder that gpt tokenize started", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(
    ("milder", "counted"), [({"skip_bad": True}, "skipped"), ({"errors": "replace"}, "replaced")], ids=str
)
def test_bad_text_keeps_finished_groups_and_can_be_skipped(
    tmp_path: Path, milder: dict[str, object], counted: str
) -> None:
    copy, out = tmp_path / "texts", tmp_path / "out"
    copy.mkdir()
    (copy / "one.txt").write_bytes(make_text(60_000).encode() + b"\xff")
    (copy / "two.txt").write_bytes(make_text(3000, seed=1).encode())
    with pytest.raises(UserError, match=r"one\.txt is not UTF-8"):
        tokenize(copy, out, **BYTES, val_fraction=0.0)
    assert finished_groups(out) > 1  # The text before the bad byte was written.
    single = tokenize(copy, tmp_path / "whole", **BYTES, val_fraction=0.0, **milder)
    assert single.manifest[counted] == 1
    assert hashes(tokenize(copy, out, resume=True, **BYTES, val_fraction=0.0, **milder).path) == hashes(single.path)
    # A resume can only relax the handling of bad text.
    with pytest.raises(UserError, match="was started with "):
        tokenize(copy, out, resume=True, **BYTES, val_fraction=0.0)


@pytest.mark.usefixtures("small_shards")
def test_damaged_shard_and_later_ones_are_rewritten(texts: Path, tmp_path: Path, whole: TokenFolder) -> None:
    for group in (0, 3):
        out = tmp_path / str(group)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(unfinished_folder, "finish", lambda *_: 1 / 0)
            tokenize(texts, out)
        truncated = out / f"train-{group:05d}.ids"
        truncated.write_bytes(truncated.read_bytes()[:-2])
        tokenize_until_crash(texts, out, 1, resume=True)
        assert hashes(tokenize(texts, out, resume=True).path) == hashes(whole.path)


@pytest.mark.usefixtures("small_shards")
def test_forged_progress_loses_no_text(texts: Path, tmp_path: Path, whole: TokenFolder) -> None:
    for key, value in (("source", 9), ("source", 10**9), ("texts_read", 10**9), ("shards", [])):
        out = tmp_path / f"{key} {value}"
        tokenize_until_crash(texts, out, 4)
        *lines, _ = (out / PROGRESS).read_text().splitlines()
        lines[-1] = json.dumps(json.loads(lines[-1]) | {key: value})
        (out / PROGRESS).write_text("".join(f"{line}\n" for line in lines))
        try:
            assert hashes(tokenize(texts, out, resume=True).path) == hashes(whole.path)
        except UserError as error:
            assert "is damaged" in error.message


@pytest.mark.slow
@pytest.mark.usefixtures("small_shards")
def test_only_one_process_can_write_a_folder(texts: Path, tmp_path: Path, script: list[str]) -> None:
    out = tmp_path / "out"
    command = [*script, str(texts), "-o", str(out), "--vocab-size", "400", "--jobs", "1", "-q", "--resume"]

    def second(self: unfinished_folder.ShardWriter) -> None:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert f"error: another process is writing {out}" in result.stderr
        raise SimulatedCrash

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SimulatedCrash):
        patch.setattr(unfinished_folder.ShardWriter, "finish_group", second)
        tokenize(texts, out)
    tokenize(texts, out, resume=True)
    assert not (out / ".lock").exists()


def test_resume_refuses_a_changed_tokenizer(texts: Path, tmp_path: Path) -> None:
    tokenizer_folder = tokenize(texts, tmp_path / "mine", val_fraction=0.2).path
    args = {"tokenizer": str(tokenizer_folder), "vocab_size": None}
    tokenize(texts, tmp_path / "other", **args)
    shutil.rmtree(tokenizer_folder)
    tokenize(texts, tokenizer_folder, vocab_size=300)
    with pytest.raises(UserError, match="was started with another tokenizer"):
        tokenize(texts, tmp_path / "other", resume=True, **args)


def test_stdin_cannot_be_resumed(gpt: Callable[..., Done], workdir: Path) -> None:
    args = ["tokenize", "-", "-o", "out", "--tokenizer", "bytes", "--resume"]
    assert gpt(*args, stdin=b"some text").code == 0
    one_line_of_what_and_what_next(
        gpt(*args, stdin=b"same size"), "stdin cannot be compared with the text it was made from"
    )


# Training


def train_tiny(path: Path, out: Path, **settings: Any) -> Any:
    return gpt.train(path, out=out, steps=6, dtype="float32", **TINY, **settings)


def test_training_on_tokens_equals_training_on_text(texts: Path, tmp_path: Path, gpt: Callable[..., Done]) -> None:
    folder = tokenize(texts, tmp_path / "tokens")
    received_events: list[events.Event] = []
    text_run, token_run = tmp_path / "a", tmp_path / "b"
    from_text = train_tiny(texts, text_run, vocab_size=400)
    from_tokens = train_tiny(folder.path, token_run, tokenizer="bytes", errors="replace", listen=received_events.append)
    assert "tokenized: --tokenizer has no effect" in str(received_events)
    assert "tokenized: --errors has no effect" in str(received_events)
    assert str(received_events).count("has no effect") == 2
    text_weights, token_weights = (result.checkpoint / "model.safetensors" for result in (from_text, from_tokens))
    assert text_weights.read_bytes() == token_weights.read_bytes()
    assert hashes(text_run / "tokens") == hashes(folder.path)
    assert not (token_run / "tokens").exists()
    record = json.loads((token_run / "run.json").read_text())
    assert record["sources"][0]["sha256"] == hashlib.sha256((folder.path / "manifest.json").read_bytes()).hexdigest()
    val = json.loads(gpt("eval", folder.path, "-m", token_run, "--json", "-q").out)
    assert val["loss"] == pytest.approx(from_tokens.val_loss) == pytest.approx(from_text.val_loss)
    train = json.loads(gpt("eval", folder.path, "-m", token_run, "--split", "train", "--json", "-q").out)
    assert train["bytes"] + val["bytes"] == folder.bytes
    assert gpt("eval", folder.path, "-m", token_run, "--split", "test").code == 2
    assert "tokenized: --field has no effect" in gpt("eval", folder.path, "-m", token_run, "--field", "x").err
    (tmp_path / "t.txt").write_text("the cat sat on the dog")
    eval_result = gpt("eval", tmp_path / "t.txt", "-m", token_run, "--split", "train", "-q")
    assert (eval_result.code, "t.txt is not a token folder" in eval_result.err) == (0, True), eval_result.err


def test_token_folder_with_another_tokenizer_is_an_error(
    texts: Path, tmp_path: Path, run_folder: Path, gpt: Callable[..., Done]
) -> None:
    other_folder = tokenize(texts, tmp_path / "other", vocab_size=300)
    one_line_of_what_and_what_next(gpt("eval", other_folder.path, "-m", run_folder), "was made with another tokenizer")
    tokens = tokenize(texts, tmp_path / "same", tokenizer=str(run_folder), vocab_size=None)
    assert gpt("eval", tokens.path, "-m", run_folder, "-q").code == 0
    for other, problem in (texts, f"{texts} is not"), (other_folder.path, "was made with another tokenizer than"):
        result = gpt("train", tokens.path, other, "--out", tmp_path / "run")
        one_line_of_what_and_what_next(result, problem)
    assert not (tmp_path / "run").exists()


def read_ids(folder: TokenFolder, side: shards.Side) -> list[int]:
    stream = folder.stream(side)
    return stream.take(0, len(stream)).tolist()


def test_several_token_folders_are_one_text(texts: Path, tmp_path: Path, gpt: Callable[..., Done]) -> None:
    tokenizer = tokenize(texts, tmp_path / "any").path
    paths = [tmp_path / name for name in ("one", "two")]
    parts = [
        tokenize(source, path, tokenizer=str(tokenizer), vocab_size=None)
        for source, path in zip((texts / "c.jsonl", texts / "a.txt"), paths, strict=True)
    ]
    both = TokenFolder(*paths)
    both.verify()
    for side in shards.SIDES:
        assert read_ids(both, side) == read_ids(parts[0], side) + read_ids(parts[1], side)
        assert both.count_text_bytes(side) == sum(part.count_text_bytes(side) for part in parts)
        assert len(both.stream(side).documents) == sum(len(part.stream(side).documents) for part in parts)
    result = gpt("train", *paths, "-o", tmp_path / "run", "--steps", "2", "--n-embd", "16", "--n-head", "2", "-q")
    assert result.code == 0, result.err
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [source["name"] for source in record["sources"]] == list(map(str, paths))
    assert gpt("train", "--resume", tmp_path / "run", "--steps", "3", "-q").code == 0
    evaluated = json.loads(gpt("eval", *paths, "-m", tmp_path / "run", "--json", "-q").out)
    assert evaluated["bytes"] == both.count_text_bytes("val")
    assert "in the training text" in gpt("report", tmp_path / "run").out


def test_damaged_token_folder_is_an_error(whole: TokenFolder, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shard = whole.shards[0].file
    flip_bit = lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:]
    escape_folder = lambda data: data.replace(shard.encode(), b"../" + shard.encode())
    for name, change, message in (
        (shard, flip_bit, "its sha256 "),
        (shard, lambda data: data[:-8], "its header requires"),
        ("tokenizer.tiktoken", lambda data: data.replace(b" 300\n", b" 999\n"), "fingerprint"),
        ("manifest.json", lambda data: data.replace(b'"format": 1', b'"format": 9', 1), "format 9"),
        ("manifest.json", lambda data: data[:-9], "is not JSON"),
        ("manifest.json", escape_folder, "is damaged"),
        ("sources.jsonl", lambda data: data.replace(b"a.txt", b"x.txt"), r"sources\.jsonl is damaged"),
    ):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(whole.path, bad)
        (bad / name).write_bytes(change((bad / name).read_bytes()))
        with pytest.raises(UserError, match=message):
            folder = TokenFolder(bad)
            _ = folder.tokenizer, folder.stream("train")
            folder.verify()


# Disk and signals


def test_full_disk_is_an_error(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, pieces: list[bytes]) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(WorkError, match=r"not enough space for [\d,]+ bytes in .*out: 1,000 are free"):
            tokenize(texts, tmp_path / "out")
    assert not (tmp_path / "out").exists()  # The check runs before any work.
    monkeypatch.setattr("gpt.corpus.shards.write_pieces", full)
    with pytest.raises(WorkError, match="No space left on device"):
        tokenize(texts, tmp_path / "out")


def test_progress_reaches_the_total(texts: Path, tmp_path: Path) -> None:
    received_events: list[events.Event] = []
    tokenize_texts([str(texts)], TokenizeConfig(out=str(tmp_path / "out"), tokenizer="bytes"), received_events.append)
    progress = [event for event in received_events if isinstance(event, events.Progress)]
    size = sum(path.stat().st_size for path in texts.iterdir())
    assert progress[-1] == events.Progress("tokenized", size, size)
    assert [event.done for event in progress] == sorted(event.done for event in progress)


def test_interrupt_before_the_first_step_removes_the_run(texts: Path, tmp_path: Path) -> None:
    def stop(event: object) -> None:
        if isinstance(event, events.Progress):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="the run was removed"):
        train_tiny(texts, tmp_path / "run", listen=stop)
    assert not (tmp_path / "run").exists()
