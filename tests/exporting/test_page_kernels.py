"""The WebAssembly of exported pages: the bytes in the package are those of its source.

python -m tests.exporting.test_page_kernels    writes the bytes
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

import gpt.playground

SOURCE = Path(gpt.playground.__path__[0]) / "kernels.wat"
KERNELS = SOURCE.with_suffix(".wasm")


def test_kernels_are_made_from_their_source() -> None:
    assert KERNELS.read_bytes() == assemble()


def assemble() -> bytes:
    """The module without custom sections, which contain names."""
    wasmtime = pytest.importorskip("wasmtime", reason="wasmtime is not installed")
    module = bytes(wasmtime.wat2wasm(SOURCE.read_text()))
    return module[:8] + b"".join(section for section in sections(module) if section[0] != 0)


def sections(module: bytes) -> Iterator[bytes]:
    """A section is its type, its size as a variable-length integer, and its contents."""
    end = 8
    while end < len(module):
        start, size, shift = end, 0, 0
        end += 1
        while True:
            byte = module[end]
            size |= (byte & 127) << shift
            end, shift = end + 1, shift + 7
            if byte < 128:
                break
        end += size
        yield module[start:end]


if __name__ == "__main__":
    KERNELS.write_bytes(assemble())
