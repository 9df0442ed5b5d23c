"""Progress on stderr: live on a terminal, a plain line every few seconds elsewhere."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.text import Text

from gpt import events
from gpt.events import format_seconds

from .render import excerpt, percent_of_peak, stderr

if TYPE_CHECKING:
    from gpt.evaluate import OnWindow

PLAIN_SECONDS = 5.0  # between lines of progress where there is no terminal


@contextlib.contextmanager
def starting(quiet: bool) -> Iterator[None]:
    """Shows a spinner on a terminal while torch is imported. Garbage is not looked for meanwhile: an import makes many
    objects and hardly any garbage, and looking through them takes a tenth of its time."""
    console = stderr()
    shown = not quiet and console.is_terminal
    gc.disable()
    try:
        with console.status("starting …") if shown else contextlib.nullcontext():
            yield
    finally:
        gc.enable()


class Sparkline:
    """The recent course of a value: up to `WIDTH` bars of eight heights, each the mean of equally many values."""

    WIDTH = 24

    def __init__(self) -> None:
        self.bars: list[float] = []
        self.each = 1  # values per bar
        self.pending: list[float] = []

    def add(self, value: float) -> None:
        """Adds a value, unless it is not finite."""
        if not math.isfinite(value):
            return
        self.pending.append(value)
        if len(self.pending) == self.each:
            self.bars.append(sum(self.pending) / self.each)
            self.pending = []
        if len(self.bars) == 2 * self.WIDTH:
            self.bars = [(a + b) / 2 for a, b in zip(self.bars[::2], self.bars[1::2], strict=True)]
            self.each *= 2

    def __str__(self) -> str:
        shown = self.bars[-self.WIDTH :]
        low, high = min(shown, default=0.0), max(shown, default=0.0)
        return "".join("▁▂▃▄▅▆▇█"[round((bar - low) / ((high - low) or 1) * 7)] for bar in shown)


class TrainDisplay:
    """Shows a training run: a live line on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, quiet: bool, console: Console | None = None) -> None:
        self.console = console or stderr()
        self.quiet = quiet
        self.plan = events.Plan(0, 0)
        self.losses = Sparkline()
        self.last_line = time.monotonic()
        self.held_out = ""  # the newest evaluation
        self.bar: Bar | None = None
        self.live: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_bar()
        if self.live is not None:
            self.live.stop()

    def _end_bar(self) -> None:
        if self.bar is not None:
            self.bar.__exit__()
            self.bar = None

    def __call__(self, event: events.Event | events.Note | events.Plan | events.Progress) -> None:
        """Shows an event. Training continues when the terminal is gone."""
        if not self.quiet:
            with contextlib.suppress(OSError):
                self._show(event)

    def _show(self, event: events.Event | events.Note | events.Plan | events.Progress) -> None:
        match event:
            case events.Note(text):
                self._end_bar()
                self.console.print(Text(text, "dim"))
            case events.Progress():
                self._working(event)
            case events.Plan():
                self._begin(event)
            case events.StepEvent():
                self._step(event)
            case events.EvalEvent():
                self.held_out = f"  held-out {event.val_loss:.3f}" + (" (best)" if event.best else "")
            case events.SampleEvent() if event.step < self.plan.steps:
                self.console.print(Text(f"step {event.step:,}{self.held_out}", "cyan"))
                self.console.print(Text(excerpt(event.text), "italic"))
            case events.EndEvent():
                if self.live is not None:
                    self.live.stop()

    def _working(self, work: events.Progress) -> None:
        if self.bar is None or self.bar.verb != work.what:
            self._end_bar()
            self.bar = Bar(work.what, work.unit, self.quiet).__enter__()
            self.bar.skip(work.done)  # done before this command
        self.bar.reach(work.done, work.total)

    def _begin(self, plan: events.Plan) -> None:
        self._end_bar()
        self.plan = plan
        if self.console.is_terminal and self.live is None:
            from rich.live import Live

            self.live = Live(
                Text(""), console=self.console, refresh_per_second=8, transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self.live.start()

    def _step(self, event: events.StepEvent) -> None:
        self.losses.add(event.loss)
        if self.live is not None:
            self.live.update(self.status(event))
        elif time.monotonic() - self.last_line >= PLAIN_SECONDS:
            self.last_line = time.monotonic()
            self.console.print(self._facts(event))

    def _facts(self, event: events.StepEvent) -> str:
        spent = event.tokens / event.tokens_per_second
        left = events.time_left(event.step, self.plan.steps, 0, spent)
        rest = f"  {format_seconds(left)} left" if left is not None else ""
        return (
            f"step {event.step:,}/{self.plan.steps:,}  loss {event.loss:.3f}{self.held_out}  "
            f"{event.tokens_per_second:,.0f} tokens/s{percent_of_peak(event.mfu)}{rest}"
        )

    def status(self, event: events.StepEvent) -> Text:
        """Returns the live line: progress, the loss and its course, the rate, the time left."""
        done = round(20 * event.step / max(1, self.plan.steps))
        return Text.assemble(
            ("━" * done, "magenta"), ("━" * (20 - done), "bright_black"), " ",
            self._facts(event), "  ", (str(self.losses), "magenta"),
        )  # fmt: skip


class Bar:
    """Progress towards a known total: a live bar on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, verb: str, unit: str, quiet: bool) -> None:
        self.verb, self.unit, self.quiet = verb, unit, quiet
        self.console = stderr()
        self.done = self.skipped = 0
        self.started = self.last_line = time.monotonic()
        self.progress: Any = None

    def __enter__(self) -> Self:
        if not self.quiet and self.console.is_terminal:
            from rich import progress

            self.progress = progress.Progress(
                progress.BarColumn(), progress.TextColumn("{task.description}"), progress.TimeRemainingColumn(),
                console=self.console, transient=True, redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self.progress.start()
            self.task = self.progress.add_task("", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def skip(self, count: int) -> None:
        """Counts ``count`` units as done earlier; they are left out of the rate."""
        self.done += count
        self.skipped += count

    def advance(self, count: int, total: int) -> None:
        """Counts ``count`` more units as done, of ``total``."""
        self.reach(self.done + count, total)

    def reach(self, done: int, total: int) -> None:
        """Sets the number of units done, of ``total``."""
        self.done = done
        rate = max(self.done - self.skipped, 0) / max(time.monotonic() - self.started, 1e-9)
        line = f"{self.verb} {self.done:,}/{total:,} {self.unit}  {rate:,.0f} {self.unit}/s"
        if self.progress is not None:
            self.progress.update(self.task, completed=self.done, total=total, description=line)
        elif not self.quiet and time.monotonic() - self.last_line >= PLAIN_SECONDS:
            self.last_line = time.monotonic()
            left = f"  {format_seconds((total - self.done) / rate)} left" if rate else ""
            self.console.print(line + left)

    def watching(self, each: Callable[[Any, Any], None] | None) -> "OnWindow":
        """Returns a callback for each window of an evaluation: it calls ``each`` and advances the bar."""

        def watch(window: Any, losses: Any, total: int) -> None:
            if each is not None:
                each(window, losses)
            self.advance(len(losses), total)

        return watch
