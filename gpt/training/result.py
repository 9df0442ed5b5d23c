"""What a finished run gives, and how ``run.json`` keeps it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt.errors import UserError
from gpt.runs import folder
from gpt.settings import checked


@dataclass(frozen=True)
class Answers:
    """Pairs that greedy decoding gives back exactly: ``exact`` of the ``asked``, spread over all ``pairs``."""

    exact: int
    asked: int
    pairs: int

    def __str__(self) -> str:
        return f"{self.exact:,} of {self.asked:,}" + (f" (of {self.pairs:,})" if self.asked < self.pairs else "")


@dataclass(frozen=True)
class Result:
    """What a finished run gives; losses are the best checkpoint's over the whole held-out text."""

    run: Path
    checkpoint: Path
    steps: int
    tokens_seen: int
    val_loss: float | None  # nats a token
    bits_per_byte: float | None
    tokens_per_second: float  # of steps alone
    mfu: float | None  # the share of the device's peak that they need, where that is known
    seconds: float  # the whole command, or all of them where the run was resumed
    parameters: int
    device: str
    dtype: str
    sample: str  # a few lines from the best checkpoint
    prompt: str  # that they began with
    answers: Answers | None = None  # pairs that were trained on; None for running text
    held_out_answers: Answers | None = None

    def record(self) -> dict[str, Any]:
        """As ``run.json`` keeps it, so that the folder may be moved."""
        return asdict(self) | {"run": "", "checkpoint": self.checkpoint.name}

    @classmethod
    def of(cls, run: Path, record: Mapping[str, Any]) -> "Result":
        """What `record` kept. Raises `UserError` where it is damaged."""
        where = str(run / folder.RECORD)
        name = str(record.get("checkpoint"))
        if not folder.is_name(name):
            raise UserError(f"{where} is damaged: {name[:40]!r} is no checkpoint")
        return checked(cls, {**record, "run": run, "checkpoint": run / name}, where)
