"""Draws docs/pictures: what the tool shows of a small model, which this script trains first.

python docs/pages.py [TEXT] [RUN]; TEXT is tinyshakespeare by default, RUN a finished run on it, used instead of
training one; needs the dev extra and a Chromium
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpt_cli.main import main
from playwright.sync_api import Page, sync_playwright

PICTURES = Path(__file__).resolve().parent / "pictures"
BOOK, WAVES, BANDS = "runs/book", "runs/waves", "runs/bands"
PROMPT = "The king is dead, and the king's son is"
HEAD = ("2", "0")
# Commands whose `-o FILE.png` is drawn.
STILLS: dict[str, list[str]] = {
    "tokens": ["tokenizer", "encode", "--show", "-m", BOOK, PROMPT],
    "neighbors": ["inspect", "neighbors", "-m", BOOK, "king", "love", "-k", "6"],
    "learned": ["inspect", "positions", "-m", BOOK],
    "waves": ["inspect", "positions", "-m", WAVES],
    "head": ["inspect", "attention", "-m", BOOK, PROMPT, "--layer", HEAD[0], "--head", HEAD[1]],
    "heads": ["inspect", "attention", "-m", BOOK, PROMPT],
    "bands": ["inspect", "attention", "-m", BANDS, PROMPT],
}
# Commands whose `-o FILE.html` is photographed in a browser.
PAGES: dict[str, list[str]] = {
    "attention": ["inspect", "attention", "-m", BOOK, PROMPT],
    "params": ["params", BOOK],
    "shares": ["params", BOOK, "gpt2", "gpt3-175b"],
    "report": ["report", BOOK],
}


def train(text: str, run: str | None) -> None:
    """Trains the run that is shown, or copies ``run``; one step of a run with sine and cosine positions; and for a
    minute one whose layers 1 and 3 see four tokens."""
    if run is not None:
        shutil.copytree(run, BOOK)
    elif main(["train", text, "-o", BOOK]):
        sys.exit(1)
    main(["train", text, "-o", WAVES, "--positions", "sinusoidal", "--steps", "1"])
    main(["train", text, "-o", BANDS, "--arch", "modern", "--window", "4", "--minutes", "1"])


def draw(pictures: Path) -> None:
    """Draws all pictures from the runs in the current folder."""
    pictures.mkdir(exist_ok=True)
    for name, words in STILLS.items():
        main([*words, "-o", str(pictures / f"{name}.png")])
    for name, words in PAGES.items():
        main([*words, "-o", f"{name}.html"])
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 960, "height": 900}, color_scheme="light")
        for name, take in SHOTS.items():
            page.goto(Path(f"{PAGE_OF.get(name, 'attention')}.html").absolute().as_uri())
            page.wait_for_selector("body[data-ready]")
            page.screenshot(path=pictures / f"{name}.png", full_page=True, clip=take(page))
        with serving(BOOK) as address:
            page.goto(address)
            page.wait_for_selector("body[data-ready]")
            page.screenshot(path=pictures / "serve.png", clip=_served(page))
        browser.close()


@contextlib.contextmanager
def serving(run: str) -> Iterator[str]:
    """Serves a run while it is entered, and gives its address."""
    command = [sys.executable, "-c", "from gpt_cli.main import run; run()", "serve", "-m", run, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield next(line for line in process.stderr if line.startswith("serving")).split()[-1]
        finally:
            process.terminate()


def _served(page: Page) -> dict[str, float]:
    """Has the model write, and shows the alternatives of the last whole word that it was in doubt about."""
    for name, value in {"text": PROMPT, "max_tokens": "50", "seed": "4"}.items():
        page.fill(f"#{name}", value)
    page.click("#go")
    page.wait_for_selector("#status:text('.')")
    page.evaluate(
        "open(parts.findLastIndex((part) => /^ ..+/.test(part.text) && part.logprob > -3 && part.logprob < -1))"
    )
    page.evaluate("document.activeElement.blur()")
    box = _box(page, "#keys")
    return {"x": 0, "y": 0, "width": 960, "height": box["y"] + box["height"] + 16}


def _top(height: int) -> Callable[[Page], dict[str, float]]:
    """Returns a function that cuts out the upper part of a page."""
    return lambda page: {"x": 0, "y": 0, "width": 960, "height": height}


def _attention(page: Page) -> dict[str, float]:
    page.click(f"button[data-layer='{HEAD[0]}'][data-head='{HEAD[1]}']")
    return {"x": 0, "y": 0, "width": 960, "height": _box(page, "#readout")["y"] + 40}


def _strip(page: Page) -> dict[str, float]:
    """Cuts out the text, coloured by what its last token attends to in the chosen head."""
    _attention(page)
    return _section("#strip")(page)


def _section(selector: str, height: float | None = None) -> Callable[[Page], dict[str, float]]:
    """Returns a function that cuts out the section that holds ``selector``, or its upper ``height`` pixels."""

    def take(page: Page) -> dict[str, float]:
        box = _box(page, f"section:has({selector})")
        return {**box, "x": 0, "width": 960, "height": height or box["height"] + 10}

    return take


def _next(**controls: float) -> Callable[[Page], dict[str, float]]:
    """Returns a function that sets controls and cuts out the section of the next token."""

    def take(page: Page) -> dict[str, float]:
        for name, value in controls.items():
            page.evaluate(
                "([id, value]) => { const input = document.getElementById(id); input.value = value;"
                " input.dispatchEvent(new Event('input')); }",
                [name.replace("_", "-"), value],
            )
        return {**_section("#next", 430)(page), "width": 800}

    return take


def _box(page: Page, selector: str) -> dict[str, float]:
    box: Any = page.locator(selector).bounding_box()
    return dict(box)


SHOTS: dict[str, Callable[[Page], dict[str, float]]] = {
    "attention": _attention,
    "strip": _strip,
    "lens": _section("#lens"),
    "next": _next(),
    "cold": _next(temperature=0.5),
    "warm": _next(temperature=1.5),
    "filtered": _next(top_k=8, top_p=0.6),
    "greedy": _next(temperature=0),
    "params": _section("table"),
    "shares": _section("#compared"),
    "loss": _section("#curves", 500),
    "report": _top(1000),
}
# The page of each shot that is not on the page of attention.
PAGE_OF = {"params": "params", "shares": "shares", "loss": "report", "report": "report"}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        text, run = [*map(os.path.abspath, sys.argv[1:]), None, None][:2]
        with contextlib.chdir(place):
            train(text or "shakespeare", run)
            draw(PICTURES)
