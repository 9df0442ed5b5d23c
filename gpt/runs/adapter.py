"""Checkpoints of adapters alone: ``adapter.safetensors``, and in ``gpt.json`` the weights that they belong to."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import UserError
from gpt.files import read_json
from gpt.model import lora
from gpt.runs import folder, hub
from gpt.runs import tensors as files
from gpt.settings import checked

FILE = "adapter.safetensors"


@dataclass(frozen=True)
class Adapter:
    """An adapter's entry in ``gpt.json``. ``base`` is a folder, or ``hf:NAME@COMMIT``; ``sha256`` are the checksums of
    the base's weights by file."""

    rank: int
    alpha: float
    base: str
    sha256: dict[str, str]

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank

    def find_base(self, path: Path) -> Path:
        """Finds the folder of the weights that the adapter at ``path`` belongs to. Raises `UserError` where they are
        gone or have changed."""
        hint = "put it back as it was; where --merge-lora was given, RUN/merged needs no base"
        base = hub.fetch(self.base) if hub.is_remote(self.base) else Path(self.base)
        if not folder.is_checkpoint(base):
            raise UserError(f"{path} is an adapter to {self.base}, which is not there", hint)
        if folder.weight_checksums(base) != self.sha256:
            raise UserError(f"{path} is an adapter to {self.base}, whose weights are others now", hint)
        return base


def is_adapter(path: Path) -> bool:
    """Whether a checkpoint holds adapters alone."""
    return (path / FILE).is_file()


def read(path: Path) -> Adapter:
    """Reads an adapter's entry in ``gpt.json``. Raises `UserError` where it is missing or damaged."""
    said = read_json(path / folder.META).get("adapter")
    if not isinstance(said, dict):
        raise UserError(f"{path / folder.META} does not say what its adapter belongs to")
    adapter = checked(Adapter, said, str(path / folder.META))
    if adapter.rank < 1:
        raise UserError(f"{path / folder.META} is damaged: an adapter of rank {adapter.rank}")
    return adapter


def tensors(path: Path, config: GPTConfig, rank: int) -> dict[str, Tensor]:
    """Reads the tensors of the adapters at ``path``; their names and shapes are compared with the model's first."""
    return files.read([path / FILE], lora.adapter_shapes(config, rank), "the model in config.json")
