"""Train and use your own GPT: ``gpt.train("book.txt")``, ``gpt.load("runs/book").generate("Once upon")``.

The names below are loaded when they are first used, so that ``import gpt`` imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt.api import LanguageModel, export, load, train
    from gpt.config import GPTConfig, TrainConfig
    from gpt.errors import Interrupted, UserError, WorkError
    from gpt.model.decoder import GPT
    from gpt.sample_config import SampleConfig
    from gpt.text.tokenizer import Tokenizer

__version__ = "0.1.0"

_HOME = {
    "GPT": "gpt.model.decoder",
    "GPTConfig": "gpt.config",
    "Interrupted": "gpt.errors",
    "LanguageModel": "gpt.api",
    "SampleConfig": "gpt.sample_config",
    "Tokenizer": "gpt.text.tokenizer",
    "TrainConfig": "gpt.config",
    "UserError": "gpt.errors",
    "WorkError": "gpt.errors",
    "export": "gpt.api",
    "load": "gpt.api",
    "resume": "gpt.api",
    "train": "gpt.api",
}

__all__ = [
    "GPT",
    "GPTConfig",
    "Interrupted",
    "LanguageModel",
    "SampleConfig",
    "Tokenizer",
    "TrainConfig",
    "UserError",
    "WorkError",
    "export",
    "load",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gpt' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
