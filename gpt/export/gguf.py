"""A model as a GGUF file, which llama.cpp, ollama and LM Studio run."""

from pathlib import Path

from torch import Tensor

from gpt.errors import WorkError
from gpt.export.source import SourceModel

TYPES = ("f32", "f16", "q8_0", "q4_0")


def check(source: SourceModel, kind: str) -> None:
    """Raises `UserError` for a model that llama.cpp does not compute as this decoder does, with the reason."""
    raise WorkError("GGUF is not written yet")


def write(path: Path, source: SourceModel, kind: str, name: str) -> int:
    """Writes a GGUF file, whole or not at all, with matrices of type ``kind``, and returns the number of its tensors.
    Raises OSError, and `UserError` as `check` does."""
    raise WorkError("GGUF is not written yet")


def restored(name: str, value: Tensor, kind: str) -> Tensor:
    """A parameter of ours, by its name, as a file with matrices of type ``kind`` holds it, in float32."""
    raise WorkError("GGUF is not written yet")
