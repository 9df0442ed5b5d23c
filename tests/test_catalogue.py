"""Named corpora, and fetching them."""

import hashlib
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SHARED, needs_shared

from gpt.errors import UserError, WorkError
from gpt.text import catalogue, readers


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
