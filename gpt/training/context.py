"""A run as the training loop gets it, what it writes of itself into ``run.json``, and its result."""

import dataclasses
import platform
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gpt import events
from gpt.device import Compute
from gpt.errors import UserError
from gpt.interrupt import StopSignal
from gpt.parallel.world import World
from gpt.runs import folder
from gpt.runs.record import Machine, RunRecord, TokenCounts, TokenizerRecord
from gpt.settings import checked
from gpt.training.data import Dataset
from gpt.training.finetune import InitCheckpoint
from gpt.training.recipe import Recipe
from gpt.training.state import Saved

Listener = Callable[[events.Event | events.Note | events.Plan | events.Progress], None]


@dataclass(frozen=True)
class Session:
    """One command on one process of a run: the processes, the signals and the listener. On other ranks than 0 nobody
    listens."""

    world: World
    stop: StopSignal
    listener: Listener
    began: float  # when the command did, on the clock of time.perf_counter

    def listen(self, event: events.Event | events.Note | events.Plan | events.Progress) -> None:
        """Tells the listener."""
        if self.world.is_main:
            self.listener(event)

    def note(self, text: str, warning: bool = False) -> None:
        """Tells the listener a line of text."""
        self.listen(events.Note(text, warning))

    def warn(self, text: str) -> None:
        """Tells the listener a line that should not be overlooked."""
        self.note(text, warning=True)


@dataclass(frozen=True)
class RunContext:
    """A run that is ready to train: its folder, data, device and recipe, and the checkpoint that it resumes from, None
    at step 0."""

    session: Session
    run: Path
    record: RunRecord
    data: Dataset
    compute: Compute
    init: InitCheckpoint | None
    recipe: Recipe
    given: Mapping[str, Any]  # the settings that this resume has changed
    log: str
    began: float  # as `Session.began`, less the time of the commands before
    checkpoint: Path | None = None
    saved: Saved | None = None

    @property
    def world(self) -> World:
        """The processes that train it."""
        return self.session.world

    @property
    def resume_command(self) -> str:
        """The command that resumes it."""
        return f"gpt train --resume {shlex.quote(str(self.run))}"

    def machine(self) -> Machine:
        """The machine, as far as it decides rounding."""
        return Machine(str(self.compute.device), self.compute.dtype_name, torch.get_num_threads(), self.world.size)


@dataclass(frozen=True)
class Answers:
    """The number of pairs that greedy decoding answers exactly: ``exact`` of the ``asked``, spread over all
    ``pairs``."""

    exact: int
    asked: int
    pairs: int

    def __str__(self) -> str:
        return f"{self.exact:,} of {self.asked:,}" + (f" (of {self.pairs:,})" if self.asked < self.pairs else "")


@dataclass(frozen=True)
class Result:
    """The result of a finished run; losses are the best checkpoint's over the whole held-out text."""

    run: Path
    checkpoint: Path
    steps: int
    tokens_seen: int
    val_loss: float | None  # nats per token
    val_tokens: int = field(default=0, kw_only=True)  # that it was measured on: all that is held out, but for --minutes
    bits_per_byte: float | None
    tokens_per_second: float  # of steps alone
    mfu: float | None  # model FLOPs utilization, if the device's peak is known
    seconds: float  # of the command, or of all of them if the run was resumed
    parameters: int
    device: str
    dtype: str
    sample: str  # a few lines from the best checkpoint
    prompt: str  # that they began with
    answers: Answers | None = None  # to the pairs that were trained on; None for running text
    held_out_answers: Answers | None = None
    chat: bool = False  # whether it is a model to talk with

    def record(self) -> dict[str, Any]:
        """Its entry in ``run.json``, without paths, so that the folder may be moved."""
        return asdict(self) | {"run": "", "checkpoint": self.checkpoint.name}

    @classmethod
    def of(cls, run: Path, record: Mapping[str, Any]) -> "Result":
        """The result of its entry. Raises `UserError` if that is damaged."""
        where = str(run / folder.RECORD)
        name = str(record.get("checkpoint"))
        if not folder.is_step_name(name):
            raise UserError(f"{where} is damaged: {name[:40]!r} is not a checkpoint")
        return checked(cls, {**record, "run": run, "checkpoint": run / name}, where)


def data_record(record: RunRecord, data: Dataset, init: InitCheckpoint | None) -> RunRecord:
    """The record with the data, once they are tokenized."""
    return dataclasses.replace(
        record,
        tokenizer=TokenizerRecord(data.tokenizer.name, data.tokenizer.fingerprint),
        tokens=TokenCounts(data.tokens, data.held_out_tokens),
        sources=data.sources,
        init=init.record() if init else None,
    )


def versions() -> dict[str, str]:
    """The versions of all that computes."""
    return {
        **{name: version(name) for name in ("torch", "tiktoken", "safetensors", "numpy")},
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def now() -> str:
    """The time in UTC, so that text sorts as time does."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
