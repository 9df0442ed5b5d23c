"""Named corpora, defined by TOML files in ``gpt_data``: parts of the Python installation, or verified downloads."""

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

from gpt.documents import download
from gpt.documents.download import OnBytes, ignore
from gpt.documents.unpack import Source, file_source
from gpt.system.errors import UserError, did_you_mean
from gpt.system.files import cache_dir


@dataclass(frozen=True)
class PublishedFile:
    """A file of a corpus."""

    url: str
    size: int | None = None  # Bytes.
    sha256: str | None = None

    @property
    def name(self) -> str:
        """The last component of the URL; its suffix determines the format."""
        return PurePosixPath(urlsplit(self.url).path).name


@dataclass(frozen=True)
class CatalogueEntry:
    """A corpus in the catalogue: a part of the Python installation, or files to download."""

    name: str
    title: str
    license: str
    language: str
    about: str
    homepage: str
    field: str | None = None  # The column that contains the text, if the files have columns.
    rows: str = "documents"  # What the rows are: "documents", or "lines" of one text.
    python: str | None = None  # Part of the Python installation: "stdlib" or "pydoc_data.topics".
    files: tuple[PublishedFile, ...] = ()
    val: tuple[PublishedFile, ...] = ()  # Files published as held-out text.
    size: int | None = None  # Bytes, approximate for parts of the Python installation.

    @property
    def all_files(self) -> tuple[PublishedFile, ...]:
        """All files to download."""
        return self.files + self.val

    @property
    def folder(self) -> Path:
        """The cache folder of the corpus."""
        return cache_dir() / self.name

    def is_cached(self, file: PublishedFile) -> bool:
        """Whether ``file`` is cached with the published size."""
        return download.has_published_size(self.folder / file.name, file.size)


def names() -> list[str]:
    """Returns the sorted names of all corpora."""
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in resources.files("gpt_data").iterdir()
        if entry.name.endswith(".toml")
    )


def describe(name: str) -> dict[str, Any]:
    """Returns the parsed TOML file of a corpus."""
    return tomllib.loads((resources.files("gpt_data") / f"{name}.toml").read_text(encoding="utf-8"))


def corpus(name: str) -> CatalogueEntry:
    """Returns the entry called ``name``. Raises `UserError` for an unknown name."""
    if name not in names():
        raise UserError(f'there is no corpus "{name}"', did_you_mean(name, names()))
    values = describe(name)
    source = {"files": (), "val": (), "base": "", **values.pop("source")}
    base = source.pop("base")
    for key in ("files", "val"):
        source[key] = tuple(PublishedFile(**entry | {"url": urljoin(base, entry["url"])}) for entry in source[key])
    return CatalogueEntry(name=name, **{"size": _total_size(source["files"] + source["val"]), **values, **source})


def _total_size(files: Sequence[PublishedFile]) -> int | None:
    """Returns the total size in bytes, or None if any size is unknown."""
    sizes = [file.size or 0 for file in files]
    return sum(sizes) if sizes and all(sizes) else None


def sources(name: str, on_bytes: OnBytes = ignore) -> list[Source]:
    """Returns the training sources of a corpus, downloading missing files.

    Raises `UserError` if this Python lacks the corpus, `WorkError` if a download fails.
    """
    entry = corpus(name)
    if entry.python == "pydoc_data.topics":
        return list(_pydoc_sources())
    if entry.python == "stdlib":
        return _stdlib_sources()
    return _fetch_sources(entry, entry.files, on_bytes)


def val_sources(name: str, on_bytes: OnBytes = ignore) -> list[Source]:
    """Returns the sources published as held-out text, if any, downloading missing files."""
    entry = corpus(name)
    return _fetch_sources(entry, entry.val, on_bytes)


def fetch(name: str, on_bytes: OnBytes = ignore) -> list[Path]:
    """Downloads the missing files of a corpus, including held-out text. Returns all paths."""
    entry = corpus(name)
    return _fetch_files(entry, entry.all_files, on_bytes)


def _fetch_sources(entry: CatalogueEntry, files: Sequence[PublishedFile], on_bytes: OnBytes) -> list[Source]:
    file_sources = [file_source(f"{entry.name}/{path.name}", path) for path in _fetch_files(entry, files, on_bytes)]
    return [replace(file, lines=entry.rows == "lines") for file in file_sources]


def _fetch_files(entry: CatalogueEntry, files: Sequence[PublishedFile], on_bytes: OnBytes) -> list[Path]:
    """Downloads files in turn, reporting their combined progress to ``on_bytes``."""
    targets = [entry.folder / file.name for file in files]
    total = _total_size(files) or entry.size
    if total is not None:  # Fail before the first download.
        cached_bytes = sum(
            target.stat().st_size for file, target in zip(files, targets, strict=True) if entry.is_cached(file)
        )
        download.check_space(entry.folder, total - cached_bytes)
    finished_bytes = 0
    for file, target in zip(files, targets, strict=True):
        download.fetch(file.url, target, file.sha256, file.size, _offset_progress(on_bytes, finished_bytes, total))
        finished_bytes += target.stat().st_size
    return targets


def _offset_progress(on_bytes: OnBytes, offset: int, total: int | None) -> OnBytes:
    return lambda done, _: on_bytes(offset + done, total)


def _pydoc_sources() -> Iterator[Source]:
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


def _stdlib_sources() -> list[Source]:
    """Returns the modules of the standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped_folders = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    modules = []
    for parent, folders, entries in os.walk(root):
        folders[:] = sorted(set(folders) - skipped_folders)
        for path in [Path(parent, entry) for entry in sorted(entries) if entry.endswith(".py")]:
            modules.append(file_source(f"stdlib/{path.relative_to(root).as_posix()}", path))
    if not modules:
        raise UserError(f"this Python has no .py files of its own in {root}", "train on your own text: gpt train FILE")
    return modules
