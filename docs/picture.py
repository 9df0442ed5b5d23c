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

from gpt_cli import progress, render
from rich.console import Console
from rich.text import Text

from gpt import events
from gpt.config import TrainConfig
from gpt.training import run

PICTURE = Path(__file__).parent / "pictures" / "run.svg"
COLUMNS, SNAPSHOTS = 118, 32  # width of the terminal; snapshots of the live line
PLAYED, HELD = 10.0, 6.0  # seconds of the replay, and of its last frame
LINE, CHARACTER, MARGIN = 24.4, 12.2, 18  # line height and character width of rich; margin around the text
FRAME = (
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
    """Prints a run to a recording console, and records the times of lines and snapshots of the live line."""

    def __init__(self, console: Console) -> None:
        super().__init__(quiet=False, console=console)
        self.began = time.monotonic()
        self.appeared: list[float] = []  # time of each line in seconds
        self.live: list[tuple[float, int, Text]] = []  # seconds, number of lines above, live line

    def __call__(self, event: events.Event | events.Note | events.Plan | events.Progress) -> None:
        """Shows an event, at most `SNAPSHOTS` of the steps, without other progress."""
        if isinstance(event, events.StepEvent):
            self.losses.add(event.loss)
            if event.step * SNAPSHOTS >= len(self.live) * self.plan.steps:
                self.live.append((time.monotonic() - self.began, len(self.appeared), self.status(event)))
        elif not isinstance(event, events.Progress):
            super().__call__(event)
            self.note_lines()

    def note_lines(self) -> None:
        """Records the time of lines printed since the last call."""
        assert isinstance(self.console.file, io.StringIO)
        new = self.console.file.getvalue().count("\n") - len(self.appeared)
        self.appeared += [time.monotonic() - self.began] * new


def animated(display: Recorder) -> str:
    """Returns the recording as an SVG that plays in a loop. Viewers without animation show the last frame."""
    console, lines, end = display.console, len(display.appeared), display.appeared[-1]
    for _, _, status in display.live:
        console.print(status, no_wrap=True, overflow="crop")
    svg = console.export_svg(code_format="{styles}\n{matrix}")
    styles = "".join(f".{name} {{{rule}}}\n" for name, rule in re.findall(r"-(r\d+) \{(.*?)\}", svg))
    rows: dict[int, str] = defaultdict(str)
    for name, x, width, line, text in PIECE.findall(svg):
        if text.strip("\n"):
            rows[int(line)] += f'<text class="{name}" x="{x}" textLength="{width}">{text}</text>'
    share = PLAYED / (PLAYED + HELD) / max(end, 1e-9)  # fraction of the loop per second of the run
    drawn = ""
    for line, pieces in sorted(rows.items()):
        if line < lines:
            row, values, times, opacity = line, "0;1", [display.appeared[line]], 1
        else:
            seconds, row, _ = display.live[line - lines]
            following = [each[0] for each in display.live[line - lines + 1 :]] or [end]
            values, times, opacity = "0;1;0", [seconds, following[0]], 0
        keys = ";".join(["0", *(f"{share * each:.4f}" for each in times)])
        animation = (
            f'<animate attributeName="opacity" dur="{PLAYED + HELD:g}s" repeatCount="indefinite" calcMode="discrete" '
            f'values="{values}" keyTimes="{keys}"/>'
        )
        place = f'transform="translate(0,{LINE * row + 20:.1f})" opacity="{opacity}"'
        drawn += f"<g {place}>{animation if times[0] else ''}{pieces}</g>\n"
    high = max(lines, 1 + max(above for _, above, _ in display.live)) * LINE + 2 * MARGIN
    wide = COLUMNS * CHARACTER + 2 * MARGIN
    return FRAME.format(wide=round(wide), high=round(high), styles=styles, margin=MARGIN, rows=drawn)


def main() -> None:
    """Trains and draws the terminal."""
    console = Console(
        record=True, force_terminal=True, color_system="truecolor", width=COLUMNS, file=io.StringIO(), highlight=False
    )
    display = Recorder(console)
    console.print(Text("$ gpt train " + " ".join(sys.argv[1:])))
    display.appeared = [0.0]
    result = run.train(sys.argv[1:], TrainConfig(), display)
    render.result(result, console)
    display.note_lines()
    PICTURE.write_text(animated(display), encoding="utf-8")


if __name__ == "__main__":
    main()
