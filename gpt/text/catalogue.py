"""Named corpora: a TOML file each in ``gpt_data``, read from what Python carries or fetched once and checked."""

import hashlib
import http.client
import importlib
import io
import os
import platform
import sys
import sysconfig
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from gpt.errors import UserError, WorkError
from gpt.files import write_file
from gpt.text.source import Source


def names() -> list[str]:
    """The names of all corpora, sorted."""
    return sorted(
        entry.name.removesuffix(".toml") for entry in files("gpt_data").iterdir() if entry.name.endswith(".toml")
    )


def describe(name: str) -> dict[str, Any]:
    """The TOML file of a corpus: title, license, source, recipe."""
    return tomllib.loads((files("gpt_data") / f"{name}.toml").read_text(encoding="utf-8"))


def read(name: str) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the documents of a corpus.

    Raises `UserError` where this Python does not carry it, `WorkError` where it cannot be fetched.
    """
    source = describe(name)["source"]
    if source.get("python") == "pydoc_data.topics":
        yield from _pydocs()
    elif source.get("python") == "stdlib":
        yield from _stdlib()
    else:
        yield name, fetch(name, source["url"], source["sha256"]).read_bytes()


def sources(name: str) -> list[Source]:
    """The documents of a corpus as sources."""
    return [Source(entry, len(data), 0, partial(io.BytesIO, data)) for entry, data in read(name)]


def _pydocs() -> Iterator[tuple[str, bytes]]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise UserError(
            f"this Python ({platform.python_version()}) comes without pydoc_data, the text of the corpus pydocs",
            "train on a text of your own: gpt train FILE (Debian packages it in libpython3-stdlib)",
        ) from None
    for topic, text in topics.items():
        yield f"pydocs/{topic}", text.encode()


def _stdlib() -> Iterator[tuple[str, bytes]]:
    """The interpreter's own modules, without tests and without what was installed on top."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found = False
    for parent, folders, entries in os.walk(root):
        folders[:] = sorted(set(folders) - skipped)
        for entry in sorted(entries):
            if not entry.endswith(".py"):
                continue
            data = Path(parent, entry).read_bytes()
            if _is_utf8(data):  # a few modules declare another encoding
                found = True
                yield f"stdlib/{Path(parent, entry).relative_to(root).as_posix()}", data
    if not found:
        raise UserError(
            f"this Python has no .py files of its own in {root}", "train on a text of your own: gpt train FILE"
        )


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def cache_dir() -> Path:
    """The per-user folder for downloads: ``GPT_CACHE_DIR``, or where the platform keeps caches."""
    if os.environ.get("GPT_CACHE_DIR"):
        return Path(os.environ["GPT_CACHE_DIR"])
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "gpt" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "gpt"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt"


def fetch(name: str, url: str, sha256: str) -> Path:
    """The file behind ``url``, downloaded once into `cache_dir` and checked against its sum each time it is used."""
    target = cache_dir() / f"{name}-{sha256[:16]}.txt"
    if target.exists() and _sha256(target.read_bytes()) == sha256:
        return target
    hint = f"with a network elsewhere: download it and put it at {target}"
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            data = response.read()
    except urllib.error.HTTPError as error:
        error.close()
        raise WorkError(f"cannot download {name} from {url}: {error}", hint) from None
    except http.client.HTTPException as error:
        raise WorkError(f"cannot download {name} from {url}: {error}", hint) from None
    except OSError as error:  # URLError is one, around the reason
        raise WorkError(f"cannot download {name} from {url}: {getattr(error, 'reason', error)}", hint) from None
    if _sha256(data) != sha256:
        raise WorkError(f"{url} gave {len(data):,} bytes that are not {name}: the sha256 differs", hint)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, data)
    except OSError as error:
        raise WorkError(
            f"cannot write {target}: {error.strerror or error}", "set GPT_CACHE_DIR to a folder of yours"
        ) from None
    return target


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
