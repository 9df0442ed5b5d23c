"""Finding text sources: files, stdin, URLs, named corpora."""

import errno
import functools
import gzip
import http.server
import io
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpt.config.text import ReadConfig
from gpt.documents import documents, sources
from gpt.documents.documents import Skipped
from gpt.documents.unpack import Source
from gpt.system.errors import UserError, WorkError


def read_texts(all_sources: list[Source]) -> list[str]:
    reader = documents.Reader(ReadConfig())
    return [chunk.text for source in all_sources for chunk in reader.documents(source)]


def create_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {Path(name).name}")


def test_files_and_folders_are_read_in_order(workdir: Path) -> None:
    create_files(workdir, "b/2.txt", "b/1.txt", "b/.git/x", ".hidden", "a.txt", "b/c/3")
    os.mkfifo("b/pipe")
    Path("b/broken").symlink_to("nowhere")
    all_sources = sources.find(["b", "a.txt", "b"])
    assert [source.name for source in all_sources] == ["b/1.txt", "b/2.txt", "b/c/3", "a.txt"]
    assert all_sources[-1].size == len("text of a.txt")
    assert all_sources[-1].time == (workdir / "a.txt").stat().st_mtime_ns
    assert read_texts(all_sources) == ["text of 1.txt", "text of 2.txt", "text of 3", "text of a.txt"]
    # Worker processes receive pickled sources.
    assert read_texts(pickle.loads(pickle.dumps(all_sources))) == read_texts(all_sources)


def test_duplicate_files_are_read_once(workdir: Path) -> None:
    create_files(workdir, "b/1.txt", "b/2.txt")
    Path("link").symlink_to("b/1.txt")
    Path("b/3.txt").symlink_to("2.txt")
    for arguments in (["b", "b/1.txt"], ["b", "./b", "link"], ["b/*.txt", str(workdir / "b")]):
        assert len(read_texts(sources.find(arguments))) == 2, arguments
    assert len(sources.find(["link", "b"])) == 2


def find_with_notes(text: str) -> tuple[list[str], list[str]]:
    notes: list[str] = []
    return [source.name for source in sources.find([text], Skipped(note=notes.append))], notes


def test_links_to_folders_are_followed(workdir: Path) -> None:
    create_files(workdir, "c/b.txt", "c/e/f.txt", "d/x.txt", "d/y.txt", ".h/z.txt")
    for link, target in {
        "c/d": "../d", "c/d2": "../d", "c/a": "e", "c/x": "../d/x.txt", "c/h": "../.h", "d/back": "../c",
        "c/self": ".", "c/tokens": "../tokens",
    }.items():  # fmt: skip
        Path(link).symlink_to(target)
    create_files(workdir, "tokens/manifest.json", "tokens/tokenizer.tiktoken")
    # Every file is listed once, and files before folders.
    names = ["c/b.txt", "c/x", "c/a/f.txt", "c/d/y.txt", "c/h/z.txt"]
    assert find_with_notes("c") == (names, [])
    assert sorted(read_texts(sources.find(["c/**/*.txt"]))) == [f"text of {name}.txt" for name in "bfxyz"]
    assert sorted(read_texts(sources.find(["c/*"]))) == [f"text of {name}.txt" for name in "bfxyz"]


def test_skipped_links_are_reported(workdir: Path) -> None:
    create_files(workdir, "t/a.txt", "t/s/b.txt", "other.txt")
    for link, target in {"t/up": "..", "t/s/top": "/", "t/none": "nowhere", "t/loop": "loop"}.items():
        Path(link).symlink_to(target)
    os.mkfifo("t/pipe")
    notes = [
        "skipped links to folders above them: 2: t/up, t/s/top", "skipped broken links: 2: t/loop, t/none",
        "skipped pipes, sockets and devices: 1: t/pipe",
    ]  # fmt: skip
    for text in ("t", "t/**"):
        names, found_notes = find_with_notes(text)
        assert (names, sorted(found_notes)) == (["t/a.txt", "t/s/b.txt"], sorted(notes))
    assert "t/up" in find_with_notes("t/*")[1][0]
    assert len(find_with_notes("t/up")[0]) == 3  # A link given by name is followed.


def test_folders_that_gpt_wrote_are_skipped(workdir: Path) -> None:
    create_files(
        workdir, "a.txt", "whole/manifest.json", "whole/tokenizer.tiktoken", "whole/x.ids", "site/manifest.json"
    )
    create_files(workdir, "runs/a/tokens/progress.jsonl", "runs/a/tokens/tokenizer.tiktoken", "runs/a/run.json")
    create_files(workdir, "runs/a/metrics.jsonl", "runs/a/step-000001/config.json", "vocab/gpt.json", "mine/run.json")
    note = "skipped folders of runs and models: 2: ./runs/a, ./vocab"
    assert find_with_notes(".") == (["a.txt", "mine/run.json", "site/manifest.json"], [note])
    assert [*map(sources.is_token_folder, ("whole", "runs/a/tokens", "site"))] == [True, True, False]


def test_glob_patterns_select_files(workdir: Path) -> None:
    create_files(
        workdir, "t/b.txt", "t/a.txt", "t/c.md", "t/.d.txt", "t/sub/e.txt", "t/sub/.f/g.txt", "odd[1].txt", "pydocs"
    )

    def names(pattern: str) -> list[str]:
        return [source.name for source in sources.find([pattern])]

    assert names("t/?.[a-m]*") == ["t/c.md"]
    assert names("t/**/*.txt") == ["t/a.txt", "t/b.txt", "t/sub/e.txt"]
    assert names("t/*") == names("t/**") == ["t/a.txt", "t/b.txt", "t/c.md", "t/sub/e.txt"]
    assert names("odd[1].txt") == ["odd[1].txt"]  # Files take precedence over patterns.
    assert names("pydocs") == ["pydocs"]  # Files take precedence over corpora.
    with pytest.raises(UserError, match=r"no file matches t/\*.csv"):
        sources.find(["t/*.csv"])


def test_stdin_is_read_once_and_can_be_reopened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a line\n" * 100_000)))
    (source,) = sources.find(["-", "-"])
    assert (source.name, source.size, source.time) == ("stdin", 700_000, 0)
    first, second = source.open(), source.open()
    assert first.read(10) == b"a line\na l"
    assert second.read() == b"a line\n" * 100_000
    assert first.read() == (b"a line\n" * 100_000)[10:]
    first.seek(-3, io.SEEK_END)
    assert first.read() == b"ne\n"
    assert "".join(read_texts([source])) == "a line\n" * 100_000
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="no standard input"):
        sources.find(["-"])


def test_full_disk_while_buffering_stdin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        close = flush

    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a line\n")))
    with pytest.raises(WorkError, match="cannot write to .*: No space left on device"):
        sources.find(["-"])


@pytest.mark.parametrize("text", ["through a pipe", ""])
def test_named_pipe_is_read_once(workdir: Path, text: str) -> None:
    os.mkfifo("pipe")
    writer = threading.Thread(target=lambda: Path("pipe").write_text(text))
    writer.start()
    (source,) = sources.find(["pipe"])
    writer.join()
    assert read_texts([source]) == read_texts([source]) == [text] * bool(text)


def test_missing_source_is_an_error(workdir: Path) -> None:
    (workdir / "empty").mkdir()
    (workdir / "pydocs").mkdir()
    for text, message in {
        "nowhere.txt": r"there is no file nowhere\.txt",
        "a\0b.txt": "there is no file",
        "pydoc": 'there is no file and no corpus called "pydoc"',
        "empty": "the folder empty has no text files in it",
        "": 'called ""',
        "s3://bucket/x": "gpt cannot read s3:// addresses: s3://bucket/x",
    }.items():
        with pytest.raises(UserError, match=message) as error:
            sources.find([text], Skipped(skip_bad=True))
        assert type(error.value) is UserError
    assert sources.find([])[0].name.startswith("pydocs/")  # A folder does not shadow the default corpus.


@pytest.mark.parametrize(
    ("locked", "argument", "description"),
    [("t/a", "t", "the folder t/a"), ("t/a", "t/*", "the folder t/a"), ("t/a/1", "t", "t/a/1")],
)
def test_unreadable_paths_are_counted(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, locked: str, argument: str, description: str
) -> None:
    create_files(workdir, "t/a/1", "t/b/2")
    scandir, stat = os.scandir, Path.stat

    def refuse(real: Callable[..., Any], path: str | Path, **kwargs: bool) -> Any:
        if str(path) == locked and (real is scandir or sys._getframe(2).f_code.co_name == "_file"):
            raise PermissionError(13, "Permission denied", locked)
        return real(path, **kwargs)

    monkeypatch.setattr(os, "scandir", lambda path: refuse(scandir, path))
    monkeypatch.setattr(Path, "stat", lambda path, **kwargs: refuse(stat, path, **kwargs))
    message = f"cannot read {description}: Permission denied"
    with pytest.raises(UserError, match=message) as error:
        sources.find([argument])
    assert "--skip-bad" in error.value.hint
    notes: list[str] = []
    skipped = Skipped(True, notes.append)
    assert [source.name for source in sources.find([argument], skipped)] == ["t/b/2"]
    assert (skipped.count, notes) == (1, [f"skipped: {message}"])


def test_run_names_come_from_the_first_text(workdir: Path) -> None:
    create_files(workdir, "x[1].txt", "notes.v2/a.b.txt")
    for text, name in {
        "-": "stdin", "a/b.txt": "b", "b.jsonl.gz": "b", "b.tar.zst": "b", "b.csv.gz": "b", "x[1].txt": "x[1]", "data/*.txt": "data",
        "a/**/*.txt": "a", "*": workdir.name, "s3://bucket/path/c.jsonl.gz": "c", "https://h/d.txt?x=/y.z": "d",
        "s3://bucket": "bucket", "notes.v2": "notes.v2", "notes.v2/*.txt": "notes.v2", "notes.v2/a.b.txt": "a.b", "/": "text", ".": workdir.name, "memory://t/*.txt": "t",
    }.items():  # fmt: skip
        assert sources.run_name([text, "more"]) == name, text
    assert sources.run_name([]) == "pydocs"


def test_files_of_the_hub_are_listed_and_opened(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.dirfs import DirFileSystem

    hub = DirFileSystem(str(workdir), target_protocol="file")  # Its names have no slash in front, as on the Hub.
    monkeypatch.setattr("huggingface_hub.HfFileSystem", lambda: hub)
    create_files(workdir, "t/b.txt", "t/a.txt", "t/.h")
    Path("t/s").mkdir()
    Path("t/s/c.txt.gz").write_bytes(gzip.compress(b"text of c.txt"))
    found = sources.find(["hf://t"])
    assert [source.name for source in found] == ["hf://t/a.txt", "hf://t/b.txt", "hf://t/s/c.txt.gz"]
    assert read_texts(found) == ["text of a.txt", "text of b.txt", "text of c.txt"]
    assert found[0].size == len("text of a.txt")
    assert read_texts(sources.find(["hf://t/*.txt"])) == ["text of a.txt", "text of b.txt"]
    assert read_texts(sources.find(["hf://t/b.txt"]) * 2) == ["text of b.txt"] * 2
    Path("t/a.txt").unlink()
    with pytest.raises(UserError, match="there is no hf://t/a.txt"):
        read_texts(found)
    with pytest.raises(UserError, match=r"there is no file at hf://t/\*.csv"):
        sources.find(["hf://t/*.csv"])


class WebHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files. /broken ends early and /secret is forbidden."""

    def do_GET(self) -> None:
        if self.path in ("/broken", "/secret"):
            self.send_response(200 if self.path == "/broken" else 403)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"only so much")
        else:
            super().do_GET()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(WebHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_web_files_are_downloaded_once(tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPT_CACHE_DIR", str(tmp_path / "cache"))
    create_files(tmp_path, "t/a.txt", "t/ü 1.txt")
    (tmp_path / "d.jsonl").write_text('{"text": "one"}\n' * 5000)
    (web_file,) = sources.find([f"{web}/t/a.txt"])
    assert (web_file.name, web_file.size) == (f"{web}/t/a.txt", 13)
    assert read_texts(sources.find([f"{web}/t/ü 1.txt"])) == ["text of ü 1.txt"]
    create_files(tmp_path, f"t/{250 * 'a'}.txt")  # Its unfinished download has a longer name.
    assert read_texts(sources.find([f"{web}/t/{250 * 'a'}.txt"])) == [f"text of {250 * 'a'}.txt"]
    (tmp_path / "t/a.txt").unlink()
    assert read_texts(sources.find([f"{web}/t/a.txt"]) * 2) == ["text of a.txt"] * 2
    assert len(read_texts(sources.find([f"{web}/d.jsonl?x=y"]))) == 5000


def test_web_errors_name_the_address(web: str) -> None:
    for address, message in (
        (f"{web}/nothing", "cannot download .*/nothing: HTTP Error 404"),
        (f"{web}/secret", "cannot download .*/secret: HTTP Error 403: Forbidden"),
        ("http://127.0.0.1:9/x", "cannot download http://127.0.0.1:9/x: "),
        (f"{web}/broken", ".*/broken was cut after 12 of 1,000 bytes"),
        (f"{web}/ä b", "cannot download .*/ä b: HTTP Error 404"),
        ("http://a..b/x", "cannot download http://a..b/x: encoding with 'idna' codec failed"),
        (f"{web}/\udcff", "cannot download .*surrogates not allowed"),
        ("http://[a/x", "http://.a/x is not an address: Invalid IPv6 URL"),
    ):
        with pytest.raises(UserError, match=message) as error:
            sources.find([address])
        assert "\n" not in error.value.message
