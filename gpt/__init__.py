"""Train and use your own GPT: ``gpt.train("book.txt")``, ``gpt.load("runs/book").generate("Once upon")``.

``import gpt`` does not import torch: public names are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpt.system.distribution import VERSION

if TYPE_CHECKING:
    from gpt.api import LanguageModel, export, load, resume, train
    from gpt.config.model import GPTConfig
    from gpt.config.sample import SampleConfig
    from gpt.config.train import TrainConfig
    from gpt.model.decoder import GPT
    from gpt.system.errors import Interrupted, UserError, WorkError
    from gpt.tokenizers.tokenizer import Tokenizer

__version__ = VERSION
__all__ = [
    "GPT", "GPTConfig", "Interrupted", "LanguageModel", "SampleConfig", "Tokenizer", "TrainConfig", "UserError",
    "WorkError", "export", "load", "resume", "train",
]  # fmt: skip
_MODULES = {
    "GPT": "model.decoder", "GPTConfig": "config.train", "Interrupted": "system.errors",
    "SampleConfig": "config.sample", "Tokenizer": "tokenizers.tokenizer", "TrainConfig": "config.train",
    "UserError": "system.errors", "WorkError": "system.errors",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gpt' has no attribute {name!r}")
    return getattr(import_module(f"gpt.{_MODULES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
