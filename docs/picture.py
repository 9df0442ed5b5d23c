"""Draws docs/pictures/run.svg: an animation of `gpt train` in a terminal, from a real run.

    python docs/picture.py TEXT

Run it in the folder of TEXT, so that the picture shows only its name.
"""

import io
import re
import sys
import time
from collections import defaultdict
from pathlib import Path

from gpt_cli.show import progress, render, terminal
from rich.console import Console
from rich.text import Text

from gpt.config import events
from gpt.config.train import TrainConfig
from gpt.training import run

PICTURE = Path(__file__).parent / "pictures" / "run.svg"
COLUMNS, SNAPSHOTS = 118, 32  # width of the terminal; snapshots of the live line
REPLAY_SECONDS, FINAL_SECONDS = 10.0, 6.0
LINE_HEIGHT, CHARACTER_WIDTH, MARGIN = 24.4, 12.2, 18  # sizes in rich's SVG; margin around the text
SVG_TEMPLATE = (
    '<svg viewBox="0 0 {wide} {high}" xmlns="http://www.w3.org/2000/svg"><style>'
    "text {{ font: 20px Menlo, Consolas, DejaVu Sans Mono, monospace; white-space: pre }}\n{styles}</style>"
    '<rect width="{wide}" height="{high}" rx="8" fill="#292929"/><g transform="translate({margin},{margin})">\n'
    "{rows}</g></svg>\n"
)
# A piece of a line in rich's SVG: style, column, width, line, text.
PIECE = re.compile(
    r'<text class="[\w-]+-(r\d+)" x="([\d.]+)" y="[\d.]+" textLength="([\d.]+)" clip-path="\S+-line-(\d+)\)">'
    r"(.*?)</text>",
    re.DOTALL,
)


class Recorder(progress.TrainDisplay):
    """Prints a run to a recording console, and records the time of each line, and snapshots of the live line."""

    def __init__(self, console: Console) -> None:
        super().__init__(quiet=False, console=console)
        self.started = time.monotonic()
        self.line_times: list[float] = []  # time of each line in seconds
        self.live_lines: list[tuple[float, int, Text]] = []  # seconds, number of lines above, live line

    def __call__(self, event: events.Event | events.Note | events.Plan | events.Progress) -> None:
        """Shows events, but at most `SNAPSHOTS` steps and no other progress."""
        if isinstance(event, events.StepEvent):
            self.step, self.left = event.step, self._parts(event)[-1][1]
            if event.step * SNAPSHOTS >= len(self.live_lines) * self.plan.steps:
                line = self.draw_step(event, COLUMNS)
                self.live_lines.append((time.monotonic() - self.started, len(self.line_times), line))
        elif not isinstance(event, events.Progress):
            super().__call__(event)
            self.record_lines()

    def record_lines(self) -> None:
        """Records the time of lines printed since the last call."""
        assert isinstance(self.console.file, io.StringIO)
        new_lines = self.console.file.getvalue().count("\n") - len(self.line_times)
        self.line_times += [time.monotonic() - self.started] * new_lines


def animate(display: Recorder) -> str:
    """Returns the recording as an SVG that plays in a loop. Viewers without animation show the last frame."""
    console, lines, end = display.console, len(display.line_times), display.line_times[-1]
    for _, _, status in display.live_lines:
        console.print(status, no_wrap=True, overflow="crop")
    svg = console.export_svg(code_format="{styles}\n{matrix}")
    styles = "".join(f".{name} {{{rule}}}\n" for name, rule in re.findall(r"-(r\d+) \{(.*?)\}", svg))
    rows: dict[int, str] = defaultdict(str)
    for name, x, width, line, text in PIECE.findall(svg):
        if text.strip("\n"):
            rows[int(line)] += f'<text class="{name}" x="{x}" textLength="{width}">{text}</text>'
    # Fraction of the loop per second of the run.
    loop_share = REPLAY_SECONDS / (REPLAY_SECONDS + FINAL_SECONDS) / max(end, 1e-9)
    groups = ""
    for line, pieces in sorted(rows.items()):
        if line < lines:
            row, values, times, opacity = line, "0;1", [display.line_times[line]], 1
        else:
            seconds, row, _ = display.live_lines[line - lines]
            live_times = [each for each, _, _ in display.live_lines[line - lines + 1 :]]
            next_time = min(each for each in [*live_times, *display.line_times] if each > seconds)
            values, times, opacity = "0;1;0", [seconds, next_time], 0
        key_times = ";".join(["0", *(f"{loop_share * each:.4f}" for each in times)])
        animation = (
            f'<animate attributeName="opacity" dur="{REPLAY_SECONDS + FINAL_SECONDS:g}s" repeatCount="indefinite" '
            'calcMode="discrete" '
            f'values="{values}" keyTimes="{key_times}"/>'
        )
        attributes = f'transform="translate(0,{LINE_HEIGHT * row + 20:.1f})" opacity="{opacity}"'
        groups += f"<g {attributes}>{animation if times[0] else ''}{pieces}</g>\n"
    height = max(lines, 1 + max(above for _, above, _ in display.live_lines)) * LINE_HEIGHT + 2 * MARGIN
    wide = COLUMNS * CHARACTER_WIDTH + 2 * MARGIN
    return SVG_TEMPLATE.format(wide=round(wide), high=round(height), styles=styles, margin=MARGIN, rows=groups)


def main() -> None:
    """Trains and draws the animation."""
    console = Console(
        record=True, force_terminal=True, color_system="truecolor", width=COLUMNS, file=io.StringIO(), highlight=False
    )
    display = Recorder(console)
    console.print(Text("$ gpt train " + " ".join(sys.argv[1:])))
    display.line_times = [0.0]
    result = run.train(sys.argv[1:], TrainConfig(), display)
    terminal.stdout = lambda: console
    render.result(result)
    display.record_lines()
    PICTURE.write_text(animate(display), encoding="utf-8")


if __name__ == "__main__":
    main()
