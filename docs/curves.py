"""Draws docs/pictures/curves.png: the held-out loss of two runs and of nanoGPT's CPU recipe against time.

    python -m docs.curves TEXT [FOLDER] [OPTION ...]

FOLDER stores the runs. OPTIONs are for `gpt train`, by default `--minutes 3`. The runs and the recipe train
concurrently, on a thread each, so other load slows them equally. The recipe (2,000 steps) stops when both runs have
ended. Needs the dev extra and Chromium.
"""

import contextlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gpt_cli.main import main
from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).resolve().parent / "pictures" / "curves.png"
ARCHITECTURES = ("gpt2", "modern")  # values of --arch, which also name the run folders
PEER = "nanogpt"


def train(text: str, options: list[str]) -> None:
    """Trains both runs and the recipe in the current folder on the first 90 % of a text; the rest is held out."""
    split_at = round(0.9 * len(text))
    for name, part in (("text.txt", text[:split_at]), ("held-out.txt", text[split_at:])):
        Path(name).write_text(part, encoding="utf-8", newline="")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    words = ["train", "text.txt", "--val-text", "held-out.txt", "--quiet", *options]
    python = [sys.executable, "-m"]
    runs = [
        subprocess.Popen([*python, "gpt_cli", *words, "-o", name, "--arch", name], env=environment)
        for name in ARCHITECTURES
    ]
    with subprocess.Popen([*python, "docs.curves", "--peer"], env=environment) as peer_process:
        statuses = [run.wait() for run in runs]
        peer_process.terminate()
    if any(statuses):
        sys.exit(1)


def peer() -> None:
    """Trains with nanoGPT's recipe on Transformers, with characters as tokens, and writes its curve as a run."""
    from benchmarks.run import nanogpt_recipe
    from gpt.config.events import EndEvent, EvalEvent, to_json
    from gpt.runs.record import RunRecord

    text, held_out = (Path(name).read_bytes().decode() for name in ("text.txt", "held-out.txt"))
    characters_per_byte = len(held_out) / len(held_out.encode())
    Path(PEER).mkdir()
    RunRecord(settings={"val_text": "held-out.txt"}).write(Path(PEER))
    with open(Path(PEER, "metrics.jsonl"), "w", encoding="utf-8") as file:

        def on_evaluation(step: int, seconds: float, loss: float) -> None:
            bits = loss / math.log(2) * characters_per_byte
            evaluation = EvalEvent(step, 0, seconds, loss, False)
            end = EndEvent(step, 0, seconds, "another program", None, loss, bits)  # The next evaluation revokes it.
            file.write(f"{to_json(evaluation)}\n{to_json(end)}\n")
            file.flush()

        nanogpt_recipe(text + held_out, on_evaluation)


def draw() -> None:
    """Takes a screenshot of the loss chart in a report on the runs in the current folder."""
    main(["report", *ARCHITECTURES, PEER, "-o", "curves.html"])
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 960, "height": 900}, color_scheme="light")
        page.goto(Path("curves.html").absolute().as_uri())
        page.wait_for_selector("body[data-ready]")
        page.select_option("#axis", "seconds")
        box = page.locator("section:has(#curves)").bounding_box()
        chart = page.locator("figure[data-chart='loss']").bounding_box()
        assert box is not None and chart is not None
        height = chart["y"] + chart["height"] - box["y"]
        page.screenshot(path=PICTURE, full_page=True, clip={"x": 0, "y": box["y"], "width": 960, "height": height})
        browser.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["--peer"]:
        peer()
        sys.exit()
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.chdir(folder):
            train(text, sys.argv[3:] or ["--minutes", "3"])
            draw()
