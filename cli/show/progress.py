"""Shows progress on stderr."""

import contextlib
import gc
import math
import time
from collections.abc import Iterator
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from gpt.config import events
from gpt.config.events import format_seconds

from .render import excerpt, percent_of_peak
from .terminal import stderr

LINE_SECONDS = 5.0  # Seconds between progress lines if stderr is not a terminal.


@contextlib.contextmanager
def startup_spinner(quiet: bool) -> Iterator[None]:
    """Shows a spinner on a terminal while torch is imported. Disables garbage collection during the import and freezes
    the new objects: they rarely become garbage, and a full collection takes 0.1 s."""
    console = stderr()
    show_spinner = not quiet and console.is_terminal
    gc.disable()
    try:
        with console.status("starting …") if show_spinner else contextlib.nullcontext():
            yield
    finally:
        gc.freeze()
        gc.enable()


class Sparkline:
    """A sparkline of up to `WIDTH` bars with eight heights. Every bar is the mean of equally many values."""

    WIDTH = 24

    def __init__(self) -> None:
        self.bars: list[float] = []
        self.values_per_bar = 1
        self.pending: list[float] = []

    def add(self, value: float) -> None:
        """Adds a value; ignores NaN and infinity."""
        if not math.isfinite(value):
            return
        self.pending.append(value)
        if len(self.pending) == self.values_per_bar:
            self.bars.append(sum(self.pending) / self.values_per_bar)
            self.pending = []
        if len(self.bars) == 2 * self.WIDTH:
            self.bars = [(a + b) / 2 for a, b in zip(self.bars[::2], self.bars[1::2], strict=True)]
            self.values_per_bar *= 2

    def __str__(self) -> str:
        visible = self.bars[-self.WIDTH :]
        low, high = min(visible, default=0.0), max(visible, default=0.0)
        return "".join("▁▂▃▄▅▆▇█"[round((bar - low) / ((high - low) or 1) * 7)] for bar in visible)


class Bar:
    """Progress of a task: a live line on a terminal, or else a plain line every few seconds."""

    def __init__(self, verb: str, unit: str, quiet: bool, console: Console | None = None) -> None:
        self.verb, self.unit, self.quiet = verb, unit, quiet
        self.console = console or stderr()
        self.first_report: tuple[float, int] | None = None  # Time and progress at the first report.
        self.last_line = time.monotonic()
        self.live: Any = None

    def __enter__(self) -> Self:
        if not self.quiet and self.console.is_terminal:
            from rich.live import Live

            self.live = Live(
                Text(""), console=self.console, refresh_per_second=8, transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def reach(self, done: int, total: int) -> None:
        """Shows the units done, the total, and after a second the throughput and the time left."""
        now = time.monotonic()
        self.first_report = self.first_report or (now, done)
        seconds, new = now - self.first_report[0], done - self.first_report[1]
        line = f"{self.verb} {done:,}/{total:,} {self.unit}"
        if seconds >= 1 and new > 0:
            line += f"  {new / seconds:,.0f} {self.unit}/s  {format_seconds((total - done) * seconds / new)} left"
        self.show(draw_line(done / max(1, total), line), line)

    def show(self, live: Text, line: str) -> None:
        """Updates the live line. Without a terminal, prints ``line`` every few seconds."""
        if self.live is not None:
            self.live.update(live)
        elif not self.quiet and time.monotonic() - self.last_line >= LINE_SECONDS:
            self.last_line = time.monotonic()
            self.console.print(line)


def draw_line(fraction: float, text: str, sparkline: str = "") -> Text:
    """Returns a live line of a progress bar, text and a sparkline."""
    filled = round(20 * min(1.0, fraction))
    bar = (("━" * filled, "magenta"), ("━" * (20 - filled), "bright_black"))
    return Text.assemble(*bar, " ", text, "  ", (sparkline, "magenta"))


class TrainDisplay:
    """Shows a training run: events as lines, and the current task as a `Bar`."""

    def __init__(self, quiet: bool, console: Console | None = None) -> None:
        self.console = console or stderr()
        self.quiet = quiet
        self.plan, self.plan_time = events.Plan(0, 0), 0.0
        self.losses = Sparkline()
        self.held_out = ""  # The latest evaluation.
        self.bar: Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.__exit__()
            self.bar = None

    def __call__(self, event: events.Event | events.Note | events.Plan | events.Progress) -> None:
        """Shows an event. Training continues if the terminal is gone."""
        if not self.quiet:
            with contextlib.suppress(OSError):
                self._show(event)

    def _show(self, event: events.Event | events.Note | events.Plan | events.Progress) -> None:
        match event:
            case events.Note(text):
                if not self.plan.steps:
                    self.__exit__()  # The previous task has ended.
                self.console.print(Text(text, "dim"))
            case events.Progress(what, done, total, unit):
                self._task_bar(what, unit).reach(done, total)
            case events.Plan():
                self.__exit__()
                self.plan, self.plan_time = event, time.monotonic()
            case events.StepEvent():
                self.losses.add(event.loss)
                self._task_bar("", "steps").show(self.status(event), self._describe_step(event))
            case events.EvalEvent():
                self.held_out = f"  held-out {event.val_loss:.3f}" + (" (best)" if event.best else "")
            case events.SampleEvent() if event.step < self.plan.steps:
                self.console.print(Text(f"step {event.step:,}{self.held_out}", "cyan"))
                self.console.print(Text(excerpt(event.text), "italic"))

    def _task_bar(self, verb: str, unit: str) -> Bar:
        if self.bar is None or self.bar.verb != verb:
            self.__exit__()
            self.bar = Bar(verb, unit, self.quiet, self.console).__enter__()
        return self.bar

    def _describe_step(self, event: events.StepEvent) -> str:
        seconds = event.tokens / event.tokens_per_second
        seconds_left, total = (self.plan.steps - event.step) * seconds / event.step, f"/{self.plan.steps:,}"
        if self.plan.seconds:
            seconds_left, total = max(0.0, self.plan_time + self.plan.seconds - time.monotonic()), ""
        phase = f"{self.plan.phase}  " if self.plan.phase else ""
        return (
            f"{phase}step {event.step:,}{total}  loss {event.loss:.3f}{self.held_out}  "
            f"{event.tokens_per_second:,.0f} tokens/s{percent_of_peak(event.mfu)}  {format_seconds(seconds_left)} left"
        )

    def status(self, event: events.StepEvent) -> Text:
        """Returns the live line: progress, loss, throughput, time left and a sparkline of the loss."""
        fraction = event.step / max(1, self.plan.steps)
        if self.plan.seconds:
            fraction = (time.monotonic() - self.plan_time) / self.plan.seconds
        return draw_line(fraction, self._describe_step(event), str(self.losses))
