"""Shows progress on stderr."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from gpt.config import events
from gpt.config.events import format_seconds

from .render import percent_of_peak, sample_text
from .terminal import stderr

LINE_SECONDS = 5.0  # Seconds between progress lines if stderr is not a terminal.


@contextlib.contextmanager
def startup_spinner(quiet: bool) -> Iterator[None]:
    """Shows a spinner on a terminal while torch is imported. Disables garbage collection during the import and freezes
    the new objects: they rarely become garbage, and a full collection takes 0.1 s."""
    gc.disable()
    try:
        with Bar("starting", "", quiet) as bar:
            bar.reach(0, 0)
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

    def draw(self, width: int) -> str:
        """Returns the last ``width`` bars."""
        visible = self.bars[-min(width, self.WIDTH) :]
        low, high = min(visible, default=0.0), max(visible, default=0.0)
        return "".join("▁▂▃▄▅▆▇█"[round((bar - low) / ((high - low) or 1) * 7)] for bar in visible)


class Bar:
    """Progress of a task: a live line on a terminal, or else a plain line every few seconds."""

    def __init__(self, verb: str, unit: str, quiet: bool, console: Console | None = None) -> None:
        self.verb, self.unit, self.quiet = verb, unit, quiet
        self.console = console or stderr()
        self.first_report: tuple[float, int] | None = None  # Time and progress at the first report.
        self.start = self.last_line = time.monotonic()
        self.draw: Callable[[int], Text] = lambda width: Text()  # Draws the live line for a width.
        self.live: Any = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.draw(options.max_width)

    def __enter__(self) -> Self:
        if not self.quiet and self.console.is_terminal:
            from rich.live import Live

            self.live = Live(
                self, console=self.console, refresh_per_second=8, transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def reach(self, done: int, total: int) -> None:
        """Shows the units done, the total, and after a second the throughput and the time left. Without a total, shows
        a spinner and the time that has passed."""
        if not total:
            self.show(self._draw_spinner, f"{self.verb} …")
            return
        now = time.monotonic()
        self.first_report = self.first_report or (now, done)
        seconds, new = now - self.first_report[0], done - self.first_report[1]
        count, rate, left = f"{done:,}/{total:,} {self.unit}", "", ""
        if seconds >= 1 and new > 0:
            rate = f"{new / seconds:,.0f} {self.unit}/s"
            left = f"{format_seconds((total - done) * seconds / new)} left"
        self.show(
            lambda width: fit_line(
                [(2, draw_bar(done / total, width)), (0, self.verb), (1, count), (3, rate), (0, left)], width
            ),
            "  ".join(filter(None, [f"{self.verb} {count}", rate, left])),
        )

    def show(self, draw: Callable[[int], Text], line: str) -> None:
        """Updates the live line. Without a terminal, prints ``line`` every few seconds."""
        self.draw = draw
        if self.live is None and not self.quiet and time.monotonic() - self.last_line >= LINE_SECONDS:
            self.last_line = time.monotonic()
            self.console.print(line)

    def _draw_spinner(self, width: int) -> Text:
        seconds = time.monotonic() - self.start
        frame = Text("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"[int(8 * seconds) % 10], "magenta")
        return fit_line([(0, frame), (0, self.verb), (1, format_seconds(seconds))], width)


def fit_line(parts: Sequence[tuple[int, str | Text]], width: int) -> Text:
    """Joins the parts that fit into ``width`` columns. Each has a rank: the parts with the highest are dropped."""
    kept: dict[int, Text] = {}
    for at, (_, part) in sorted(enumerate(parts), key=lambda item: item[1][0]):
        text = Text.assemble(part)
        size = text.cell_len + (2 if kept else 0)
        if text and size <= width:
            kept[at] = text
            width -= size
    return Text("  ").join(kept[at] for at in sorted(kept))


def draw_bar(fraction: float, width: int) -> Text:
    """Returns the progress bar of a line of ``width`` columns."""
    size = width // 8
    filled = round(size * min(1.0, fraction))
    return Text.assemble(("━" * filled, "magenta"), ("━" * (size - filled), "bright_black"))


def outcome(name: str, loss: float, scores: events.Rewards) -> str:
    """Returns a loss with its name, and with the accuracy and margin of preferences. Returns the reward of answers
    instead, with their length and the share of groups without a difference."""
    if scores.reward is not None:
        equal = "" if scores.equal_groups is None else f", {scores.equal_groups:.0%} of groups equal"
        return f"{name} reward {scores.reward:.3f} ({scores.answer_tokens:.1f} tokens{equal})".strip()
    has_margin = scores.accuracy is not None
    suffix = f" (accuracy {scores.accuracy:.0%}, margin {scores.margin:.2f})" if has_margin else ""
    return f"{name or 'loss'} {loss:.3f}{suffix}"


class TrainDisplay:
    """Shows a training run: events as lines, and the current task as a `Bar`."""

    def __init__(self, quiet: bool, console: Console | None = None) -> None:
        self.console = console or stderr()
        self.quiet = quiet
        self.plan, self.plan_time = events.Plan(0, 0), 0.0
        self.losses = Sparkline()
        self.held_out, self.step = "", 0  # The latest evaluation and step.
        self.bar: Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.__exit__()
            self.bar = None

    def __call__(self, event: events.Event | events.Opened | events.Note | events.Plan | events.Progress) -> None:
        """Shows an event. Training continues if the terminal is gone."""
        if not self.quiet:
            with contextlib.suppress(OSError):
                self._show(event)

    def _show(self, event: events.Event | events.Opened | events.Note | events.Plan | events.Progress) -> None:
        match event:
            case events.Note(text):
                if self.bar is not None and self.bar.first_report:
                    self.__exit__()  # The previous task has ended.
                self.console.print(Text(text, "dim"))
            case events.Progress(what, done, total, unit):
                self._task_bar(what, unit).reach(done, total)
            case events.Plan():
                self.__exit__()
                self.plan, self.plan_time = event, time.monotonic()
            case events.StepEvent():
                self.losses.add(event.loss)
                self.step = event.step
                parts = self._parts(event)
                line = "  ".join(text for _, text in parts if text)
                self._task_bar("", "steps").show(lambda width: self.draw_step(event, width), line)
            case events.EvalEvent():
                self.held_out = outcome("held-out", event.val_loss, event) + (" (best)" if event.best else "")
            case events.SampleEvent() if self.step == event.step < self.plan.steps:  # The result has the last one.
                self.console.print(Text(f"step {event.step:,}  {self.held_out}", "cyan"))
                self.console.print(sample_text(event.prompt, event.text))

    def _task_bar(self, verb: str, unit: str) -> Bar:
        if self.bar is None or self.bar.verb != verb:
            self.__exit__()
            self.bar = Bar(verb, unit, self.quiet, self.console).__enter__()
        return self.bar

    def _parts(self, event: events.StepEvent) -> list[tuple[int, str]]:
        """Returns the parts of a step's line with their ranks."""
        seconds = event.tokens / event.tokens_per_second
        seconds_left, total = (self.plan.steps - event.step) * seconds / event.step, f"/{self.plan.steps:,}"
        if self.plan.seconds:
            seconds_left, total = max(0.0, self.plan_time + self.plan.seconds - time.monotonic()), ""
        return [
            (3, self.plan.phase),
            (3, f"step {event.step:,}{total}"),
            (1, outcome("", event.loss, event)),
            (2, self.held_out),
            (6, f"{event.tokens_per_second:,.0f} tokens/s{percent_of_peak(event.mfu)}"),
            (0, f"{format_seconds(seconds_left)} left"),
        ]

    def draw_step(self, event: events.StepEvent, width: int) -> Text:
        """Returns the live line: a progress bar, the parts of the step, and a sparkline of the loss."""
        fraction = event.step / max(1, self.plan.steps)
        if self.plan.seconds:
            fraction = (time.monotonic() - self.plan_time) / self.plan.seconds
        curve = Text(self.losses.draw(width // 6), "magenta")
        return fit_line([(4, draw_bar(fraction, width)), *self._parts(event), (5, curve)], width)
