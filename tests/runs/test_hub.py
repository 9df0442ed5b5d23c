"""Models from the Hub, with a local server that imitates it."""

import hashlib
import http.server
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Done, Gpt, make_text, one_line_of_what_and_what_next, spawn
from huggingface_hub import constants

import gpt as library
from gpt.config.model import GPTConfig
from gpt.runs import checkpoint
from gpt.tokenizers.tokenizer import bytes_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """Serves a folder as the model ``me/tiny``. The model ``me/gated`` is gated, and other models do not exist."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.requests: list[str] = []
        self.broken = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        if self.server.broken:
            self.answer(500, {}, b"out of order")
        elif "/gated" in path:
            self.answer(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        elif not path.startswith(("/api/models/me/tiny", "/me/tiny")):
            self.answer(401, {"X-Error-Code": "RepoNotFound"})
        elif path in [f"/api/models/me/tiny/revision/{name}" for name in ("main", COMMIT)]:
            files = [{"rfilename": name} for name in sorted(os.listdir(self.server.folder))]
            self.answer(200, {}, json.dumps({"id": "me/tiny", "sha": COMMIT, "siblings": files}).encode())
        elif path == f"/api/models/me/tiny/tree/{COMMIT}":
            self.answer(200, {}, json.dumps([self.entry(p) for p in sorted(self.server.folder.iterdir())]).encode())
        elif path.startswith(f"/me/tiny/resolve/{COMMIT}/"):
            data = (self.server.folder / path.rpartition("/")[2]).read_bytes()
            self.answer(200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}, data)
        else:
            self.answer(404, {"X-Error-Code": "RevisionNotFound"})

    @staticmethod
    def entry(path: Path) -> dict[str, Any]:
        oid = hashlib.sha1(path.read_bytes()).hexdigest()
        return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": oid}

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    config = GPTConfig(257, 32, 1, 2, 16)
    torch.manual_seed(0)
    checkpoint.save(folder, library.GPT(config), checkpoint.TokenizerFiles(bytes_tokenizer(), config), {"step": 1})
    for name in ("gpt.json", "checksums.json", "tokenizer.tiktoken"):
        (folder / name).unlink()  # Transformers does not write these files.
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with Hub(folder) as httpd:
        thread = threading.Thread(target=lambda: httpd.serve_forever(0.01), daemon=True)
        thread.start()
        yield httpd
        httpd.shutdown()
        thread.join()


@pytest.fixture
def run_with_hub(
    server: Hub, gpt: Gpt, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Done]]:
    """Returns a function that runs ``gpt`` with the test server as the Hub."""

    def run(*args: str | Path, offline: bool = False, endpoint: str = server.url) -> Done:
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in (
            ("ENDPOINT", endpoint),
            ("HUGGINGFACE_CO_URL_TEMPLATE", template),
            ("HF_HUB_OFFLINE", offline),
        ):
            monkeypatch.setattr(constants, name, value)  # huggingface_hub reads the environment only at import.
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(workdir / "cache"))
        return gpt(*args)

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server.requests.clear()
    yield run
    server.broken = False


SAMPLE = ("sample", "ab", "-m", "hf:me/tiny", "--greedy", "-n", "8", "--ignore-eot")


@pytest.mark.slow
def test_models_are_downloaded_and_cached(run_with_hub: Gpt, gpt: Gpt, server: Hub, workdir: Path) -> None:
    """The first download runs in a separate process, configured by environment variables."""
    settings = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(workdir / "cache"), "HF_HUB_OFFLINE": "0"}
    with spawn(*SAMPLE, env={**os.environ, "NO_PROXY": "127.0.0.1", **settings}) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == gpt("sample", "ab", "-m", server.folder, *SAMPLE[4:]).out
    filenames = {path.name for path in (workdir / "cache").rglob("snapshots/*/*")}
    assert filenames == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    }  # fmt: skip
    assert not any(".bin" in path for path in server.requests)
    server.requests.clear()
    assert run_with_hub(*SAMPLE, offline=True).out == out  # The model is cached.
    assert server.requests == []
    server.broken = True
    assert run_with_hub(*SAMPLE).out == out


def test_hub_models_can_be_fine_tuned(run_with_hub: Gpt, workdir: Path) -> None:
    (workdir / "book.txt").write_bytes(make_text(800).encode())
    result = run_with_hub("train", "book.txt", "--init", f"hf:me/tiny@{COMMIT}", "--steps", "2", "--dtype", "float32")
    assert result.code == 0, result.err
    init = json.loads((workdir / "runs/book/run.json").read_text())["init"]
    assert init["model"] == f"hf:me/tiny@{COMMIT}"
    assert COMMIT in init["path"]
    assert set(init["sha256"]) == {"model.safetensors"}
    result = run_with_hub("train", "book.txt", "--init", "hf:me/tiny", "--lora-rank", "2", "--steps", "2", "--quiet")
    assert result.code == 0, result.err
    step = max((workdir / "runs/book-2").glob("step-*"))
    adapter_config = json.loads((step / "adapter_config.json").read_text())
    assert (adapter_config["base_model_name_or_path"], adapter_config["revision"]) == ("me/tiny", COMMIT)
    sample = run_with_hub("sample", "ab", "-m", "runs/book-2:latest", "--greedy", "-n", "8", offline=True)
    assert sample.code == 0
    (workdir / "theirs").mkdir()  # PEFT writes only these files.
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (workdir / "theirs" / name).write_bytes((step / name).read_bytes())
    assert run_with_hub("sample", "ab", "-m", "theirs", "--greedy", "-n", "8", offline=True).out == sample.out


def test_params_downloads_no_weights(run_with_hub: Gpt, server: Hub) -> None:
    result = run_with_hub("params", "hf:me/tiny", "--json")
    assert json.loads(result.out)["config"]["n_embd"] == 16
    assert not any("safetensors" in path for path in server.requests)
    offline = run_with_hub(*SAMPLE, offline=True)  # Only part of the model is cached.
    assert offline.code in (1, 2)
    assert offline.err.count("error: ") == 1


@pytest.mark.parametrize(
    ("model", "env", "code", "message"),
    [
        ("hf:me/nothing", {}, 2, "has no model me/nothing"),
        ("hf:me/gated", {}, 2, "me/gated is gated"),
        ("hf:me/tiny@v9", {}, 2, 'me/tiny has no revision "v9"'),
        ("hf:me/tiny", {"endpoint": "http://127.0.0.1:9"}, 1, "me/tiny is not in the cache and could not be"),
    ],
)
def test_missing_models_are_errors(run_with_hub: Gpt, model: str, env: dict[str, str], code: int, message: str) -> None:
    one_line_of_what_and_what_next(run_with_hub("sample", "x", "-m", model, **env), message, code)


def test_a_model_without_safetensors_is_an_error(run_with_hub: Gpt, server: Hub) -> None:
    (server.folder / "model.safetensors").rename(server.folder / "hidden")
    try:
        one_line_of_what_and_what_next(run_with_hub(*SAMPLE), "hf:me/tiny has no weights as safetensors")
    finally:
        (server.folder / "hidden").rename(server.folder / "model.safetensors")


def test_exports_name_the_hub_model(run_with_hub: Gpt, server: Hub, workdir: Path) -> None:
    """The card must not name the cache folder."""
    result = run_with_hub("export", "-m", f"hf:me/tiny@{COMMIT}", "-o", "out", "--dtype", "bfloat16")
    assert result.code == 0, result.err
    text = (workdir / "out" / "README.md").read_text(encoding="utf-8")
    assert (
        'license: unknown\nlibrary_name: transformers\npipeline_tag: text-generation\nbase_model: "me/tiny"\n' in text
    )
    assert "It is a copy of `me/tiny`, which has a license of its own." in text
    for file in (workdir / "out").iterdir():
        assert b"snapshots" not in file.read_bytes()
        assert str(workdir).encode() not in file.read_bytes()
