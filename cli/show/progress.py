"""Shows progress on stderr."""

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment, Segments
from rich.text import Text

from gpt.config import events
from gpt.config.events import format_seconds

from .render import percent_of_peak, sample_text
from .render_chart import Series, chart
from .terminal import stderr

LINE_SECONDS = 5.0  # Seconds between progress lines if stderr is not a terminal.
CHART_ROWS = 8
# The fewest rows of a terminal that shows the chart while training, and next to all samples and the result.
MIN_LIVE_ROWS, MIN_END_ROWS = 30, 45
SAMPLE_LINES = 4


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


class Curve:
    """Losses by step, as at most 2 · `POINTS` points. Every point is the mean of equally many losses."""

    POINTS = 40

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self.losses_per_point = 1
        self.pending: list[float] = []

    def add(self, step: int, loss: float) -> None:
        """Adds a loss; ignores NaN and infinity."""
        if not math.isfinite(loss):
            return
        self.pending.append(loss)
        if len(self.pending) == self.losses_per_point:
            self.points.append((step, statistics.fmean(self.pending)))
            self.pending = []
        if len(self.points) == 2 * self.POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [(step, (a + b) / 2) for (_, a), (step, b) in pairs]
            self.losses_per_point *= 2


class Bar:
    """Progress of a task: a live line on a terminal, or else a plain line every few seconds."""

    def __init__(self, verb: str, unit: str, quiet: bool, console: Console | None = None) -> None:
        self.verb, self.unit, self.quiet = verb, unit, quiet
        self.console = console or stderr()
        self.first_report: tuple[float, int] | None = None  # Time and progress at the first report.
        self.start = self.last_line = time.monotonic()
        self.draw: Callable[[int], Text] = lambda width: Text()  # Draws the live line for a width.
        self.below: list[Segment] = []  # What a terminal shows below the live line.
        self.live: Any = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.draw(options.max_width)
        yield from self.below

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
        self.losses, self.held_out_losses = Curve(), Curve()
        self.chart: list[Segment] = []  # Rendered once per evaluation: at 8 Hz it would slow training.
        self.held_out, self.step, self.left = "", 0, ""  # The latest evaluation, step and time left.
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
                self.losses.add(event.step, event.loss)
                parts = self._parts(event)
                self.step, self.left = event.step, parts[-1][1]
                line = "  ".join(text for _, text in parts if text)
                bar = self._task_bar("", "steps")
                bar.below = self.chart
                bar.show(lambda width: self.draw_step(event, width), line)
            case events.EvalEvent():
                self.held_out = outcome("held-out", event.val_loss, event) + (" (best)" if event.best else "")
                self.held_out_losses.add(event.step, event.val_loss)
                self.chart = self._draw_chart()
            # The result has the last sample. The steps of a timed run are an estimate, which it can exceed.
            case events.SampleEvent() if self.step == event.step < (math.inf if self.plan.seconds else self.plan.steps):
                facts = [f"step {event.step:,}", self.left, self.held_out, event.verdict]
                self.console.print(Text("  ".join(filter(None, facts)), "cyan"))
                self.console.print(sample_text(event.prompt, event.text, SAMPLE_LINES))
            case events.TeacherEvent():  # What follows is about another model.
                self.losses, self.held_out_losses, self.chart, self.held_out = Curve(), Curve(), [], ""
            case events.EndEvent() if self.chart and self.console.height >= MIN_END_ROWS:
                self.__exit__()
                self.console.print(Segments(self.chart))

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
        """Returns the live line: a progress bar and the parts of the step."""
        fraction = event.step / max(1, self.plan.steps)
        if self.plan.seconds:
            fraction = (time.monotonic() - self.plan_time) / self.plan.seconds
        return fit_line([(4, draw_bar(fraction, width)), *self._parts(event)], width)

    def _draw_chart(self) -> list[Segment]:
        """Returns a chart of the losses if the terminal has room for it."""
        if not self.console.is_terminal or self.console.height < MIN_LIVE_ROWS:
            return []
        curves = [Series("training", self.losses.points, pale=True), Series("held-out", self.held_out_losses.points, 1)]
        return list(self.console.render(chart("loss", "step", curves, self.console, CHART_ROWS)))
