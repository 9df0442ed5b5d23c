"""Named corpora: a TOML file each in ``gpt_data``; part of Python's installation, or fetched once and checked."""

import io
import os
import platform
import sysconfig
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urljoin, urlsplit

from gpt.errors import UserError, did_you_mean
from gpt.files import cache_dir
from gpt.text import download
from gpt.text.download import OnBytes, ignore
from gpt.text.unpack import Source, file_source


@dataclass(frozen=True)
class PublishedFile:
    """A file of a corpus, with its published size and sha256."""

    url: str
    size: int | None = None  # bytes
    sha256: str | None = None

    @property
    def name(self) -> str:
        """The last part of the address; its suffix tells the format."""
        return PurePosixPath(urlsplit(self.url).path).name


@dataclass(frozen=True)
class CatalogueEntry:
    """An entry of the catalogue: either a part of Python's installation or files to fetch."""

    name: str
    title: str
    license: str
    language: str
    about: str
    homepage: str
    field: str | None = None  # the column that holds the text, in files with columns
    rows: str = "documents"  # a row is one of the "documents", or of the "lines" of a file
    python: str | None = None  # the part of Python's installation that it is
    files: tuple[PublishedFile, ...] = ()
    val: tuple[PublishedFile, ...] = ()  # files published as the held-out text
    size: int | None = None  # bytes to fetch; for Python's own about

    @property
    def all_files(self) -> tuple[PublishedFile, ...]:
        """All files to fetch."""
        return self.files + self.val

    @property
    def folder(self) -> Path:
        """The folder of its files in the cache."""
        return cache_dir() / self.name

    def is_here(self, file: PublishedFile) -> bool:
        """Whether ``file`` is in the cache, by its size; the checksum is compared when it is used."""
        return download.seems_whole(self.folder / file.name, file.size)


def names() -> list[str]:
    """Returns the names of all corpora, sorted."""
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in resources.files("gpt_data").iterdir()
        if entry.name.endswith(".toml")
    )


def describe(name: str) -> dict[str, Any]:
    """Returns the TOML file of a corpus as a table."""
    return tomllib.loads((resources.files("gpt_data") / f"{name}.toml").read_text(encoding="utf-8"))


def corpus(name: str) -> CatalogueEntry:
    """Returns the entry called ``name``. Raises `UserError` where there is none."""
    if name not in names():
        raise UserError(f'there is no corpus "{name}"', did_you_mean(name, names()))
    values = describe(name)
    source = {"files": (), "val": (), "base": "", **values.pop("source")}
    base = source.pop("base")
    for key in ("files", "val"):
        source[key] = tuple(PublishedFile(**entry | {"url": urljoin(base, entry["url"])}) for entry in source[key])
    return CatalogueEntry(name=name, **{"size": _total(source["files"] + source["val"]), **values, **source})


def _total(wanted: Sequence[PublishedFile]) -> int | None:
    """Returns the bytes of all files; None where one size is unknown."""
    sizes = [file.size or 0 for file in wanted]
    return sum(sizes) if sizes and all(sizes) else None


def sources(name: str, on_bytes: OnBytes = ignore) -> list[Source]:
    """Returns the sources of a corpus, fetched if need be.

    Raises `UserError` where this Python comes without it, `WorkError` where it cannot be fetched.
    """
    found = corpus(name)
    if found.python == "pydoc_data.topics":
        return list(_pydocs())
    if found.python == "stdlib":
        return _stdlib()
    return _fetched(found, found.files, on_bytes)


def val_sources(name: str, on_bytes: OnBytes = ignore) -> list[Source]:
    """Returns the sources that are published as held-out text, fetched if need be; none where there are none."""
    found = corpus(name)
    return _fetched(found, found.val, on_bytes)


def fetch(name: str, on_bytes: OnBytes = ignore) -> list[Path]:
    """Fetches all files of a corpus that are not here, held-out ones too; returns their paths."""
    found = corpus(name)
    return _fetch(found, found.all_files, on_bytes)


def _fetched(found: CatalogueEntry, wanted: Sequence[PublishedFile], on_bytes: OnBytes) -> list[Source]:
    files = [file_source(f"{found.name}/{path.name}", path) for path in _fetch(found, wanted, on_bytes)]
    return [replace(file, lines=found.rows == "lines") for file in files]


def _fetch(found: CatalogueEntry, wanted: Sequence[PublishedFile], on_bytes: OnBytes) -> list[Path]:
    """Fetches files one after the other; ``on_bytes`` gets the bytes of all of them."""
    targets = [found.folder / file.name for file in wanted]
    total = _total(wanted) or found.size
    if total is not None:  # an error before the first file, not after it
        pairs = zip(wanted, targets, strict=True)
        here = sum(download.bytes_here(file.url, target, file.sha256, file.size) for file, target in pairs)
        download.check_space(found.folder, total - here)
    done = 0
    for file, target in zip(wanted, targets, strict=True):
        download.fetch(file.url, target, file.sha256, file.size, _shifted(on_bytes, done, total))
        done += target.stat().st_size
    return targets


def _shifted(on_bytes: OnBytes, before: int, total: int | None) -> OnBytes:
    return lambda done, _: on_bytes(before + done, total)


def _pydocs() -> Iterator[Source]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            f"this Python ({platform.python_version()}) does not include pydoc_data, the text of the corpus pydocs",
            "train on your own text: gpt train FILE (Debian has it in the package libpython3-stdlib)",
        ) from None
    for topic, text in topics.items():
        data = text.encode()
        yield Source(f"pydocs/{topic}", len(data), 0, partial(io.BytesIO, data))


def _stdlib() -> list[Source]:
    """Returns the standard library's modules, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found = []
    for parent, folders, entries in os.walk(root):
        folders[:] = sorted(set(folders) - skipped)
        for path in [Path(parent, entry) for entry in sorted(entries) if entry.endswith(".py")]:
            if _is_text(path.read_bytes()):  # a few modules declare another encoding
                found.append(file_source(f"stdlib/{path.relative_to(root).as_posix()}", path))
    if not found:
        raise UserError(f"this Python has no .py files of its own in {root}", "train on your own text: gpt train FILE")
    return found


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False
