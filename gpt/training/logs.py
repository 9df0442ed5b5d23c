"""Where else a run's events go: TensorBoard and Weights & Biases, each a listener of events and nothing more."""

import contextlib
import dataclasses
import hashlib
import html
import json
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from gpt.errors import UserError, did_you_mean
from gpt.events import EndEvent, Event, SampleEvent

COMMON = {field.name for field in dataclasses.fields(Event)}


class Log(Protocol):
    """What hears the events of a run."""

    def __call__(self, event: Event) -> None:
        """Writes what an event tells."""

    def close(self) -> None:
        """Writes the rest."""


def numbers(event: Event) -> dict[str, float]:
    """The numbers of an event as ``EVENT/KEY`` in the words of ``metrics.jsonl``: ``step/loss``, ``eval/val_loss``."""
    values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    return {f"{event.kind}/{k}": v for k, v in values.items() if k not in COMMON and type(v) in (int, float)}


class TensorBoard:
    """Curves and samples in ``RUN/tensorboard``: ``tensorboard --logdir runs`` shows them. What an earlier process told
    of steps after ``step``, from which the run goes on, is hidden."""

    def __init__(self, run: Path, record: Mapping[str, Any], step: int) -> None:
        tensorboard = import_module("torch.utils.tensorboard")
        self.writer = tensorboard.SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else None)
        self._write("settings", json.dumps(record["resolved"], indent=1), step)

    def __call__(self, event: Event) -> None:
        """Writes what an event tells."""
        for name, value in numbers(event).items():
            self.writer.add_scalar(name, value, event.step)
        if isinstance(event, SampleEvent):
            self._write("sample/text", event.text, event.step)

    def _write(self, name: str, text: str, step: int) -> None:
        """Text as it is: TensorBoard reads Markdown, where four spaces mean so."""
        self.writer.add_text(name, "\n".join("    " + line for line in text.splitlines()), step)

    def close(self) -> None:
        """Writes what is not yet on disk."""
        self.writer.close()


class Wandb:
    """A run of Weights & Biases. Project, entity, mode and all else are what its ``WANDB_…`` variables say."""

    def __init__(self, run: Path, record: Mapping[str, Any], step: int) -> None:
        self.wandb = import_module("wandb")
        self.run = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", "gpt"),
            name=os.environ.get("WANDB_NAME", run.name),
            # A run that is resumed goes on there too.
            id=hashlib.sha256(f"{run.name} {record['started']}".encode()).hexdigest()[:16],
            resume="allow",
            dir=str(run),
            config=dict(record["resolved"]),
            settings=self.wandb.Settings(silent=True, console="off"),
        )
        # Steps come again after a rollback, where wandb's own axis would refuse them.
        self.run.define_metric("*", step_metric="step")
        self.done = False

    def __call__(self, event: Event) -> None:
        """Sends what an event tells."""
        values: dict[str, Any] = dict(numbers(event))
        if isinstance(event, SampleEvent):
            values["sample/text"] = self.wandb.Html(f"<pre>{html.escape(event.text)}</pre>")
        if values:
            self.run.log(values | {name: getattr(event, name) for name in COMMON})
        self.done = isinstance(event, EndEvent) and event.reason in ("steps", "patience")

    def close(self) -> None:
        """Sends the rest, and whether the run came to its end."""
        self.run.finish(exit_code=0 if self.done else 1)


KINDS: dict[str, tuple[str, Callable[[Path, Mapping[str, Any], int], Log]]] = {  # and the module that each needs
    "tensorboard": ("torch.utils.tensorboard", TensorBoard),
    "wandb": ("wandb", Wandb),
}


def named(asked: str) -> list[str]:
    """The logs that ``asked`` names, with commas between; ``none``: none. `UserError` for one that there isn't."""
    names = [] if asked.strip() == "none" else list(dict.fromkeys(name.strip() for name in asked.split(",")))
    for name in names:
        if name not in KINDS:
            raise UserError(f'there is no log "{name}"', did_you_mean(name, [*KINDS, "none"]))
    return names


def check(asked: str) -> None:
    """Raises `UserError` for a log that there isn't, whose package is not installed, or that has no account: called
    before any work is done."""
    for name in named(asked):
        try:
            module = import_module(KINDS[name][0])
        except ImportError as error:
            raise UserError(f"--log {name} needs a package: {error}", f"pip install 'gpt[{name}]'") from None
        if name == "wandb" and module.setup().settings.mode == "online":
            try:
                module.login()  # on a terminal it asks
            except module.Error as error:
                raise UserError(f"wandb: {error}", "wandb login, or WANDB_MODE=offline") from None


class Logs:
    """All logs of a run, from ``step`` on. One that fails is closed, which is said, and the run goes on."""

    def __init__(
        self, asked: str, run: Path, record: Mapping[str, Any], note: Callable[[str], None], step: int = 0
    ) -> None:
        self.note = note
        self.logs: dict[str, Log] = {}
        for name in named(asked):
            with self._heeding(name):
                self.logs[name] = KINDS[name][1](run, record, step)

    def __call__(self, event: Event) -> None:
        """Tells each."""
        for name, log in list(self.logs.items()):
            with self._heeding(name):
                log(event)

    def close(self) -> None:
        """Closes each."""
        for name, log in list(self.logs.items()):
            with self._heeding(name):
                log.close()
        self.logs.clear()

    @contextlib.contextmanager
    def _heeding(self, name: str) -> Iterator[None]:
        """Lets no error of a log, of which there is every kind, end a run that may have taken days."""
        try:
            yield
        except Exception as error:
            self.note(f"--log {name} failed, and hears no more of this run: {type(error).__name__}: {error}")
            log = self.logs.pop(name, None)
            if log is not None:
                with contextlib.suppress(Exception):
                    log.close()
