"""Named corpora, and downloads from a faulty server."""

import errno
import hashlib
import http.server
import io
import os
import random
import re
import shutil
import stat
import sys
import sysconfig
import threading
import time
import urllib.request
import urllib.response
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, SHARED, Done, needs_shared

from gpt.corpus.token_folder import TokenFolder
from gpt.documents import catalogue, download
from gpt.documents.download import fetch
from gpt.documents.unpack import Source
from gpt.system.errors import UserError, WorkError
from gpt.system.words import format_bytes

DATA = random.Random(0).randbytes(1_000_000)
CHECKSUM = hashlib.sha256(DATA).hexdigest()


class Site:
    def __init__(self) -> None:
        self.url = ""
        self.files = {"/x": DATA}
        self.cuts: list[int] = []  # Bytes after which the next responses break off
        self.redirects: dict[str, str] = {}
        self.pause = 0.0  # Seconds between blocks
        self.log: list[tuple[int, int]] = []  # Of each request: status, bytes sent

    @property
    def sent(self) -> int:
        return sum(sent for _, sent in self.log)

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        if request.path in self.redirects or request.path not in self.files:
            status = 302 if request.path in self.redirects else 404
            self.log.append((status, 0))
            request.send_response(status)
            request.send_header("Location", self.redirects.get(request.path, ""))
            request.end_headers()
            return
        data = self.files[request.path]
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        body = data[: self.cuts.pop(0)] if self.cuts else data
        self.log.append((200, len(body)))
        request.end_headers()
        for at in range(0, len(body), 100_000):
            request.wfile.write(body[at : at + 100_000])
            time.sleep(self.pause)


@pytest.fixture
def site() -> Iterator[Site]:
    site, ignore = Site(), lambda *args: None  # Clients disconnect during responses.
    methods = {"do_GET": lambda request: site.answer(request), "log_message": ignore}
    handler = type("Handler", (http.server.BaseHTTPRequestHandler,), methods)
    with type("Server", (http.server.ThreadingHTTPServer,), {"handle_error": ignore})(
        ("127.0.0.1", 0), handler
    ) as httpd:
        site.url = f"http://127.0.0.1:{httpd.server_address[1]}"
        thread = threading.Thread(target=httpd.serve_forever, args=[0.01], daemon=True)
        thread.start()
        yield site
        httpd.shutdown()
        thread.join()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "x.bin"


# One file


def test_complete_file_is_downloaded_once(site: Site, target: Path) -> None:
    progress: list[tuple[int, int | None]] = []
    umask = os.umask(0o027)
    try:
        assert fetch(site.url + "/x", target, CHECKSUM, len(DATA), lambda *pair: progress.append(pair)) == target
    finally:
        os.umask(umask)
    assert target.read_bytes() == DATA
    if sys.platform != "win32":
        assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert {path.name for path in target.parent.iterdir()} == {"x.bin", ".x.bin.lock"}
    assert progress[0] == (0, len(DATA))
    assert progress[-1] == (len(DATA), len(DATA))
    assert all(a <= b for (a, _), (b, _) in pairwise(progress))
    fetch(site.url + "/x", target, CHECKSUM, len(DATA))
    assert len(site.log) == 1


@pytest.mark.parametrize(
    ("address", "cause"), [("{site}/none", "HTTP Error 404"), ("http://127.0.0.1:9/x", ".*refused")]
)
def test_a_download_that_fails_names_the_address_and_the_place(
    address: str, cause: str, site: Site, target: Path
) -> None:
    url = address.format(site=site.url)
    with pytest.raises(WorkError, match=f"cannot download {url}: {cause}") as error:
        fetch(url, target, CHECKSUM)
    assert f"download {url}; then put it at {target}" in error.value.hint


def test_wrong_checksum_removes_the_download(site: Site, target: Path) -> None:
    site.files["/x"] = b"x" + DATA[1:]
    with pytest.raises(WorkError, match=r"1,000,000 bytes that differ from the published file of the sha256 \w{16}…"):
        fetch(site.url + "/x", target, CHECKSUM, len(DATA))
    assert [path.name for path in target.parent.iterdir()] == [".x.bin.lock"]
    site.files["/x"] = DATA
    assert fetch(site.url + "/x", target, CHECKSUM, len(DATA)).read_bytes() == DATA


def test_wrong_size_is_an_error(site: Site, target: Path) -> None:
    with pytest.raises(WorkError, match=r"returned 131,072 bytes that differ from the published file of 999 bytes"):
        fetch(site.url + "/x", target, None, 999)
    site.cuts = [1000]
    with pytest.raises(WorkError, match="was cut after 1,000 of 1,000,000 bytes"):
        fetch(site.url + "/x", target)
    assert not target.exists()
    assert fetch(site.url + "/x", target).read_bytes() == DATA  # From the first byte, over the part that was left.


def test_files_of_the_hub_come_from_its_mirror(site: Site, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", site.url + "/")
    assert fetch("https://huggingface.co/x", target, CHECKSUM).read_bytes() == DATA


def test_redirects_never_leave_https(site: Site, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.redirects["/moved"] = site.url + "/x"
    assert fetch(site.url + "/moved", target, CHECKSUM).read_bytes() == DATA
    target.unlink()
    for url, place in (("https://a.example/x", site.url + "/x"), ("http://a.example/x", "ftp://b.example/x")):
        response = urllib.response.addinfourl(io.BytesIO(DATA), Message(), place, 200)
        monkeypatch.setattr(urllib.request, "urlopen", lambda *args, response=response, **options: response)
        with pytest.raises(WorkError, match=f"a.example/x redirects to {place}, which is not secure"):
            fetch(url, target)
        assert not target.exists()


def test_full_disk_is_an_error(site: Site, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(download.os, "fsync", full)
    with pytest.raises(WorkError, match="cannot save .*No space left on device"):
        fetch(site.url + "/x", target)


def test_concurrent_calls_download_once(site: Site, target: Path) -> None:
    site.pause = 0.03
    with ThreadPoolExecutor(4) as pool:
        run = lambda _: fetch(site.url + "/x", target, CHECKSUM, len(DATA)).read_bytes()
        assert list(pool.map(run, range(4))) == [DATA] * 4
    assert site.sent == len(DATA)


def test_file_of_the_published_size_is_used(site: Site, target: Path) -> None:
    target.parent.mkdir()
    target.write_bytes(DATA[::-1])  # A file that gpt did not download
    assert fetch(site.url + "/x", target, CHECKSUM, len(DATA)).read_bytes() == DATA[::-1]
    target.write_bytes(DATA[:-1])
    assert fetch(site.url + "/x", target, CHECKSUM, len(DATA)).read_bytes() == DATA


# The catalogue


def read_source(source: Source) -> bytes:
    with source.open() as stream:
        return stream.read()


@pytest.mark.parametrize(("name", "low", "high"), [("pydocs", 400_000, 700_000), ("stdlib", 5_000_000, 100_000_000)])
def test_python_corpora_have_source_files(name: str, low: int, high: int) -> None:
    sources = catalogue.sources(name)
    assert len(sources) > 70
    assert low < sum(source.size for source in sources) < high
    for source in random.Random(0).sample(sources, 20):
        for _ in range(2):  # Every open starts at the first byte.
            assert len(read_source(source)) == source.size
    assert all((source.time > 0) == (name == "stdlib") for source in sources)
    assert ("stdlib/json/decoder.py" in {source.name for source in sources}) == (name == "stdlib")
    assert not any("/test/" in source.name or "site-packages" in source.name for source in sources)
    assert catalogue.val_sources(name) == catalogue.fetch(name) == []


def test_python_corpora_skip_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test").mkdir()
    for name, data in {"a.py": b"ok", "d.txt": b"ok", "test/e.py": b"ok"}.items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert [source.name for source in catalogue.sources("stdlib")] == ["stdlib/a.py"]
    (tmp_path / "a.py").unlink()
    with pytest.raises(UserError, match=r"no \.py files of its own"):
        catalogue.sources("stdlib")
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match="does not include pydoc_data"):
        catalogue.sources("pydocs")


@pytest.fixture
def toy(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two training files and a held-out file, in place of wikitext-2."""
    monkeypatch.setenv("GPT_CACHE_DIR", str(tmp_path / "corpora"))
    site.files |= {"/a.txt": b"to be " * 1000, "/b.txt": b"or not ", "/v.txt": b"to be?"}
    files = [{"url": "a.txt", "size": 6000, "sha256": hashlib.sha256(b"to be " * 1000).hexdigest()}, {"url": "b.txt"}]
    values = dict.fromkeys(("title", "license", "language", "about", "homepage"), "…")
    toy = {**values, "source": {"base": site.url + "/", "files": files, "val": [{"url": "v.txt", "size": 6}]}}
    monkeypatch.setattr(catalogue, "describe", lambda name: {**toy, "source": dict(toy["source"])})
    return toy


def test_corpus_is_downloaded_once(site: Site, toy: dict[str, Any], tmp_path: Path) -> None:
    corpus = catalogue.corpus("wikitext-2")
    assert corpus.size is None  # One file has no published size.
    assert not any(corpus.is_cached(file) for file in corpus.all_files)
    sources = catalogue.sources("wikitext-2")
    assert [(source.name, source.size) for source in sources] == [("wikitext-2/a.txt", 6000), ("wikitext-2/b.txt", 7)]
    assert read_source(sources[1]) == b"or not "
    assert (tmp_path / "corpora" / "wikitext-2" / "b.txt").stat().st_mtime_ns == sources[1].time
    assert [corpus.is_cached(file) for file in corpus.all_files] == [True, True, False]
    (val,) = catalogue.val_sources("wikitext-2")
    assert (val.name, read_source(val)) == ("wikitext-2/v.txt", b"to be?")
    site.files.clear()
    assert [path.name for path in catalogue.fetch("wikitext-2")] == ["a.txt", "b.txt", "v.txt"]
    assert [read_source(source) for source in catalogue.sources("wikitext-2")] == [b"to be " * 1000, b"or not "]


def test_progress_and_disk_check_cover_all_files(
    site: Site, toy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy["source"]["size"] = 6013
    catalogue.val_sources("wikitext-2")
    with monkeypatch.context() as patch, pytest.raises(WorkError, match="not enough space for 6,007 bytes"):
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=6006))
        catalogue.fetch("wikitext-2")
    assert len(site.log) == 1  # The check runs before the first download.
    progress: list[int] = []
    catalogue.fetch("wikitext-2", lambda done, total: progress.append(done) if total == 6013 else progress.append(-1))
    assert (progress[0], progress[-1]) == (0, 6007)  # The last file is already downloaded.
    assert progress == sorted(progress)


def test_parquet_rows_are_lines_and_the_published_split_is_used(
    gpt: Callable[..., Done], site: Site, toy: dict[str, Any], workdir: Path
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    for name, lines in {"a": [" = Title = \n", "", " To be . \n"], "v": [" Or not . \n"]}.items():
        parquet.write_table(pa.table({"text": lines}), stream := io.BytesIO())
        site.files[f"/{name}.parquet"] = stream.getvalue()
    toy |= {"rows": "lines", "field": "text"}
    toy["source"] |= {"files": [{"url": "a.parquet"}], "val": [{"url": "v.parquet"}]}

    def tokenize_corpus(out: str, *args: str) -> TokenFolder:
        result = gpt("tokenize", "wikitext-2", "-o", out, "--tokenizer", "bytes", "-q", *args)
        assert result.code == 0, result.err
        return TokenFolder(out)

    folder = tokenize_corpus("published")
    assert folder.documents == 2  # A file of three rows is one document.
    streams = (folder.stream(side) for side in ("train", "val"))
    texts = [bytes(id for id in stream.take(0, len(stream)) if id < 256).decode() for stream in streams]
    assert texts == [" = Title = \n \n To be . \n", " Or not . \n"]
    assert folder.manifest["split"]["by"] == "text"
    Path("book.txt").write_text("Mine.")  # Options override the published split.
    assert tokenize_corpus("fraction", "--val-fraction", "0.2").manifest["sources"]["count"] == 1
    assert tokenize_corpus("text", "--val-text", "book.txt").manifest["sources"]["count"] == 2


def test_unknown_corpus_is_an_error(tmp_path: Path) -> None:
    for name, hint in {"wikitext2": 'did you mean "wikitext-2"?', "../pyproject": "known: "}.items():
        with pytest.raises(UserError, match="there is no corpus") as error:
            catalogue.corpus(name)
        assert hint in error.value.hint


ROW = re.compile(r"\| `(?P<name>[^`]+)` \| [^|]+ \| (?P<size>[^|]+) \| (?P<license>[^|]+) \| [^|]+ \|")


def test_every_corpus_is_complete_and_in_the_table() -> None:
    text = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    rows = {row["name"]: (row["size"], row["license"]) for row in ROW.finditer(text)}
    assert set(rows) == set(catalogue.names()) == {path.stem for path in (ROOT / "data").glob("*.toml")}
    for name in catalogue.names():
        corpus = catalogue.corpus(name)
        about = "about " if corpus.python else ""
        assert rows[name] == (about + format_bytes(corpus.size or 0), corpus.license)
        assert all(len(value) > 5 for value in (corpus.title, corpus.about, corpus.homepage, corpus.language))
        assert bool(corpus.python) != bool(corpus.files)
        assert corpus.rows in ("documents", "lines")
        assert len({file.name for file in corpus.all_files}) == len(corpus.all_files)
        for file in corpus.all_files:
            assert re.fullmatch(r"https://[\w./-]+\.(txt|parquet)", file.url)
            assert file.sha256 is None or re.fullmatch("[0-9a-f]{64}", file.sha256)
        if any(file.name.endswith(".parquet") for file in corpus.all_files):
            assert corpus.field and "extra parquet" in corpus.about
        if not all(file.sha256 for file in corpus.all_files):
            assert "sums" in corpus.about
        else:
            assert all(file.size for file in corpus.all_files)
    revisions = [file.url for name in catalogue.names() for file in catalogue.corpus(name).all_files]
    assert all(re.search(r"/resolve/[0-9a-f]{40}/", url) for url in revisions if "huggingface" in url)


@needs_shared
def test_shakespeare_checksum_is_current() -> None:
    data = (SHARED / "data" / "tinyshakespeare.txt").read_bytes()
    (file,) = catalogue.corpus("shakespeare").files
    assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
