"""What a finished run gives, and how ``run.json`` keeps it."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpt.files import checked


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

    def record(self) -> dict[str, Any]:
        """As ``run.json`` keeps it, so that the folder may be moved."""
        return asdict(self) | {"run": "", "checkpoint": self.checkpoint.name}

    @classmethod
    def of(cls, run: Path, record: Any) -> "Result":
        """What `record` kept. Raises `UserError` where it is damaged."""
        where = str(run / "run.json")
        paths = {key: Path(str(record[key]).replace("\0", "")).name for key in ("run", "checkpoint") if key in record}
        found = checked(cls, {**record, **{key: Path(name) for key, name in paths.items()}}, where)
        return replace(found, run=run, checkpoint=run / found.checkpoint)
