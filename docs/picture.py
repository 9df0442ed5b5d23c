"""Draws docs/pictures/run.svg: `gpt train` as it looks in a terminal, from a real run.

python docs/picture.py [TEXT]
"""

import io
import re
import sys
from pathlib import Path

from gpt_cli import progress, render
from rich.console import Console
from rich.text import Text

from gpt import events
from gpt.config import TrainConfig
from gpt.training import run

PICTURE = Path(__file__).parent / "pictures" / "run.svg"


class Recorder(progress.TrainDisplay):
    """Shows a run on a recording console; the live line is drawn once, as it was at the end."""

    def __call__(self, event: events.Event | events.Note | events.Plan) -> None:
        """Shows an event, and the last step's live line."""
        if isinstance(event, events.StepEvent):
            self.losses.add(event.loss)
            self.last = event
            return
        if isinstance(event, events.EndEvent):
            self.console.print(self.status(self.last))
        super().__call__(event)


def main() -> None:
    """Trains, and draws the terminal."""
    console = Console(record=True, force_terminal=True, width=118, file=io.StringIO(), highlight=False)
    console.print(Text("$ gpt train " + " ".join(sys.argv[1:])))
    display = Recorder(quiet=False, console=console)
    result = run.train(sys.argv[1:], TrainConfig(), display)
    render.result(result, console)
    svg = console.export_svg(title="gpt train")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # fonts of another host
    PICTURE.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
