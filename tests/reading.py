"""Reads bytes as a training text, for tests of file formats."""

import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from gpt.config.text import ReadConfig
from gpt.documents import documents as reading
from gpt.documents.documents import Reader
from gpt.documents.unpack import Source
from gpt.system.errors import UserError, WorkError


def source(name: str, data: bytes) -> Source:
    return Source(name, len(data), 0, partial(io.BytesIO, data))


def documents(reader: Reader, source: Source, on_bytes: Callable[[int], None] = lambda n: None) -> Iterator[str]:
    """Joins chunks to documents and checks the chunks."""
    chunks: list[str] = []
    for chunk in reader.documents(source, on_bytes):
        assert chunk.text
        if chunk.begins and chunks:
            yield "".join(chunks)
            chunks = []
        assert chunk.begins or chunks
        assert not chunks[1:] or len(chunks[0]) >= reading.MIN_FIRST_CHUNK
        chunks.append(chunk.text)
    if chunks:
        yield "".join(chunks)


def read(name: str, data: bytes, **config: Any) -> list[str]:
    return list(documents(Reader(ReadConfig(**config)), source(name, data)))


def assert_rejected(name: str, data: bytes, message: str) -> tuple[Reader, list[str]]:
    """A file is one error line with a hint. With ``--skip-bad``, it is counted and skipped. Returns the reader that
    skipped it, and the documents before the error."""
    with pytest.raises(UserError, match=message) as error:
        read(name, data)
    assert "\n" not in error.value.message
    assert error.value.hint
    assert type(error.value) is not WorkError
    reader, notes = Reader(ReadConfig(skip_bad=True)), list[str]()
    reader.skipped.note = notes.append
    texts = list(documents(reader, source(name, data)))
    assert (reader.skipped.count, notes) == (1, [f"skipped: {error.value.message}"])
    return reader, texts
