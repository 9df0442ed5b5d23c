"""The context of a run for the training loop, its entries in ``run.json``, and its result."""

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
    """One command on one process of a run. Only rank 0 sends events to the ``listener``."""

    world: World
    stop: StopSignal
    listener: Listener
    began: float  # start of the command, on the clock of time.perf_counter

    def listen(self, event: events.Event | events.Note | events.Plan | events.Progress) -> None:
        """Sends an event to the listener."""
        if self.world.is_main:
            self.listener(event)

    def note(self, text: str, warning: bool = False) -> None:
        """Sends a line of text."""
        self.listen(events.Note(text, warning))

    def warn(self, text: str) -> None:
        """Sends a warning."""
        self.note(text, warning=True)


@dataclass(frozen=True)
class RunContext:
    """A run that is ready to train, at step 0 or from ``checkpoint``."""

    session: Session
    run: Path
    record: RunRecord
    data: Dataset
    compute: Compute
    init: InitCheckpoint | None
    recipe: Recipe
    given: Mapping[str, Any]  # settings that this resume changes
    log: str
    began: float  # `Session.began` minus the seconds of earlier commands
    checkpoint: Path | None = None
    saved: Saved | None = None

    @property
    def world(self) -> World:
        """The processes that train the run."""
        return self.session.world

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        return f"gpt train --resume {shlex.quote(str(self.run))}"

    def machine(self) -> Machine:
        """Returns the properties of the machine that affect rounding."""
        return Machine(str(self.compute.device), self.compute.dtype_name, torch.get_num_threads(), self.world.size)


@dataclass(frozen=True)
class Answers:
    """Greedy decoding answers ``exact`` of ``asked`` pairs exactly, an even sample of all ``pairs``."""

    exact: int
    asked: int
    pairs: int

    def __str__(self) -> str:
        return f"{self.exact:,} of {self.asked:,}" + (f" (of {self.pairs:,})" if self.asked < self.pairs else "")


@dataclass(frozen=True)
class Result:
    """The result of a finished run. The loss is the best checkpoint's on all held-out text, or as much as ``--minutes``
    allows."""

    run: Path
    checkpoint: Path
    steps: int
    tokens_seen: int
    val_loss: float | None  # nats per token
    val_tokens: int = field(default=0, kw_only=True)  # number of tokens that ``val_loss`` averages
    bits_per_byte: float | None
    tokens_per_second: float  # in training steps only
    mfu: float | None  # model FLOPs utilization; None if the peak is unknown
    seconds: float  # total of all commands of the run
    parameters: int
    device: str
    dtype: str
    sample: str  # a short text from the best checkpoint
    prompt: str  # the prompt of ``sample``
    answers: Answers | None = None  # accuracy on training pairs; None for other data
    held_out_answers: Answers | None = None
    chat: bool = False

    def record(self) -> dict[str, Any]:
        """Returns the entry in ``run.json``, without paths, because the folder can be moved."""
        return asdict(self) | {"run": "", "checkpoint": self.checkpoint.name}

    @classmethod
    def of(cls, run: Path, record: Mapping[str, Any]) -> "Result":
        """Returns the result in a ``run.json`` entry. Raises `UserError` if the entry is damaged."""
        where = str(run / folder.RECORD)
        name = str(record.get("checkpoint"))
        if not folder.is_step_name(name):
            raise UserError(f"{where} is damaged: {name[:40]!r} is not a checkpoint")
        return checked(cls, {**record, "run": run, "checkpoint": run / name}, where)


def data_record(record: RunRecord, data: Dataset, init: InitCheckpoint | None) -> RunRecord:
    """Returns ``record`` with entries for the tokenized data."""
    return dataclasses.replace(
        record,
        tokenizer=TokenizerRecord(data.tokenizer.name, data.tokenizer.fingerprint),
        tokens=TokenCounts(data.tokens, data.held_out_tokens),
        sources=data.sources,
        init=init.record() if init else None,
    )


def versions() -> dict[str, str]:
    """Returns the versions of libraries, Python and platform."""
    return {
        **{name: version(name) for name in ("torch", "tiktoken", "safetensors", "numpy")},
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def now() -> str:
    """Returns the UTC time in a format that sorts by time."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
