"""Event logs of a run (``metrics.jsonl``, TensorBoard), and the throughput that they report."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch

from gpt.config.device import Compute
from gpt.config.events import Event, SampleEvent
from gpt.model.decoder import GPT
from gpt.model.params import flops_per_token
from gpt.runs.folder import INTACT_HINT, METRICS
from gpt.system.distribution import install_extra
from gpt.system.errors import UserError
from gpt.system.files import disk_errors, open_regular
from gpt.system.peaks import peak_flops
from gpt.training.recipe import Recipe

COMMON_FIELDS = {field.name for field in dataclasses.fields(Event)}


def scalars(event: Event) -> dict[str, float]:
    """Returns an event's numbers, named ``EVENT/KEY`` as in ``metrics.jsonl``: ``step/loss``, ``eval/val_loss``."""
    values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    return {f"{event.kind}/{k}": v for k, v in values.items() if k not in COMMON_FIELDS and type(v) in (int, float)}


def check(log: str) -> None:
    """Raises `UserError` if the package for ``log`` is missing. Called before training starts."""
    if log == "tensorboard":
        try:
            import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise UserError(f"--log tensorboard needs a package: {error}", install_extra("log")) from None


class TensorBoard:
    """Curves and samples in ``RUN/tensorboard``, for ``tensorboard --logdir runs``. Resuming from ``step`` hides later
    events. The first error ends the log with a note, and the run continues."""

    def __init__(self, run: Path, record: Mapping[str, Any], note: Callable[[str], None], step: int) -> None:
        self.note = note
        self.writer: Any = None
        with self._guarded():
            tensorboard = import_module("torch.utils.tensorboard")
            self.writer = tensorboard.SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else None)
            self._write("settings", json.dumps(record["resolved"], indent=1), step)

    def __call__(self, event: Event) -> None:
        """Writes an event."""
        if self.writer is not None:
            with self._guarded():
                for name, value in scalars(event).items():
                    self.writer.add_scalar(name, value, event.step)
                if isinstance(event, SampleEvent):
                    self._write("sample/text", event.text, event.step)

    def _write(self, name: str, text: str, step: int) -> None:
        """Writes text as a Markdown code block, because TensorBoard renders Markdown."""
        self.writer.add_text(name, "\n".join("    " + line for line in text.splitlines()), step)

    def close(self) -> None:
        """Flushes and closes the log."""
        if self.writer is not None:
            with self._guarded():
                self.writer.close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.writer = None
            self.note(f"--log tensorboard failed and is off for the rest of this run: {type(error).__name__}: {error}")


class Metrics:
    """``metrics.jsonl``, open for appending whole lines. A full disk leaves a gap in the metrics, with a warning."""

    def __init__(self, run: Path, warn: Callable[[str], None], size: int = 0) -> None:
        """Truncates the file to ``size`` bytes, because a resumed run repeats the later steps."""
        self.path, self.warn, self.failing = run / METRICS, warn, False
        with disk_errors(run, INTACT_HINT):
            old_bytes = b""
            if self.path.exists():
                with open_regular(self.path) as file:
                    old_bytes = file.read(size)
            self.file = self.path.open("ab", buffering=0)
            whole_bytes = old_bytes.rfind(b"\n") + 1
            self.file.truncate(whole_bytes)
        self.size = whole_bytes

    def write(self, line: str) -> None:
        """Appends a line."""
        data = (line + "\n").encode("utf-8", "backslashreplace")
        try:
            if self.file.write(data) != len(data):
                raise OSError(0, "only part of it was written")
            self.size += len(data)
            self.failing = False
        except OSError as error:
            if not self.failing:
                self.warn(f"cannot write {self.path}: {error.strerror}; the run continues, with a gap in its metrics")
            self.failing = True
            with contextlib.suppress(OSError):
                self.file.truncate(self.size)

    def sync(self) -> None:
        """Syncs the file to disk. Raises OSError."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


@dataclass(frozen=True)
class Speed:
    """Computes throughput and model FLOPs utilization (MFU)."""

    flops_per_token: int
    peak: float | None  # FLOP/s of all devices; None if unknown

    @classmethod
    def of(cls, model: GPT, recipe: Recipe, compute: Compute, processes: int = 1) -> Self:
        """Returns the speed of a run on ``processes`` devices. For examples, assumes the mean length."""
        adapters = sum(p.numel() for p in model.parameters() if p.requires_grad) if recipe.lora_rank else 0
        flops = flops_per_token(recipe.model, recipe.batch_tokens // (recipe.rows * recipe.sides), adapters)
        device = compute.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        peak = peak_flops(name, compute.dtype_name)
        return cls(flops, None if peak is None else processes * peak)

    def rates(self, tokens: int, seconds: float) -> dict[str, Any]:
        """Returns ``tokens_per_second`` and ``mfu``, which is None if the peak is unknown."""
        tokens_per_second = tokens / max(seconds, 1e-9)
        mfu = None if self.peak is None else tokens_per_second * self.flops_per_token / self.peak
        return {"tokens_per_second": tokens_per_second, "mfu": mfu}
