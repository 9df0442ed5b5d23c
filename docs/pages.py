"""Trains a small model and draws the pictures of it in docs/pictures.

    python docs/pages.py TEXT [RUNS]

TEXT is tinyshakespeare. RUNS is a folder with finished runs (book, chat, gpt2, bands), to skip their training. Needs
the dev extra and Chromium.
"""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpt_cli.main import main
from outputs import BLOCK
from PIL import Image
from playwright.sync_api import Page, sync_playwright

PICTURES = Path(__file__).resolve().parent / "pictures"
BOOK, CHAT, GPT2, BANDS = "runs/book", "runs/chat", "runs/gpt2", "runs/bands"
TUTORIAL = Path(__file__).resolve().parent / "tutorial-chat.md"
PROMPT = "The king is dead, and the king's son is"
LAYER_AND_HEAD = ("2", "0")
QUESTION = "Who are you?"
# The tutorial's runs; the GPT-2 of model.md; one with a window of four tokens in layers 1 and 3.
TRAIN_COMMANDS: dict[str, list[str]] = {
    BOOK: ["book.txt"],
    CHAT: ["chats.jsonl", "--chat", "--init", BOOK],
    GPT2: ["book.txt", "--arch", "gpt2", "--block-size", "64"],
    BANDS: ["book.txt", "--preset", "nano", "--window", "4", "--steps", "400"],
}
# Commands that write a page with `-o FILE.html`, for screenshots.
PAGE_COMMANDS: dict[str, list[str]] = {
    "tokens": ["tokenizer", "encode", "--show", "-m", GPT2, PROMPT],
    "neighbors": ["inspect", "neighbors", "-m", GPT2, "king", "love", "-k", "6"],
    "bands": ["inspect", "attention", "-m", BANDS, PROMPT],
    "attention": ["inspect", "attention", "-m", GPT2, PROMPT],
    "params": ["params", GPT2],
    "shares": ["params", GPT2, "gpt2", "gpt3-175b"],
    "report": ["report", BOOK],
    "exported": ["export", "-m", BOOK, "--title", "A little Shakespeare"],
}


def train(text: str, runs: str | None) -> None:
    """Trains the runs that are not in ``runs``."""
    shutil.copy(text, "book.txt")
    if runs is not None:
        shutil.copytree(runs, "runs")
    exec(next(code for kind, code, _ in BLOCK.findall(TUTORIAL.read_text("utf-8")) if kind == "python"), {})
    for run, words in TRAIN_COMMANDS.items():
        if not Path(run).exists() and main(["train", *words, "-o", run]):
            sys.exit(1)


def draw(pictures: Path) -> None:
    """Draws all pictures from the runs in the current folder."""
    pictures.mkdir(exist_ok=True)
    for name, words in PAGE_COMMANDS.items():
        main([*words, "-o", f"{name}.html"])
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 960, "height": 900}, color_scheme="light")
        for name, clip_page in SCREENSHOTS.items():
            page.goto(Path(f"{PAGE_OF.get(name, 'attention')}.html").absolute().as_uri())
            page.wait_for_selector("body[data-ready]")
            page.screenshot(path=pictures / f"{name}.png", full_page=True, clip=clip_page(page))
        page.goto(Path("exported.html").absolute().as_uri())
        page.wait_for_selector("body[data-ready]")
        page.screenshot(path=pictures / "exported.png", full_page=True, clip=_look_inside(page))
        Image.open(pictures / "exported.png").quantize(128).save(pictures / "exported.png", optimize=True)
        page.set_viewport_size({"width": 560, "height": 900})
        page.goto(Path("report.html").absolute().as_uri())
        page.wait_for_selector("body[data-ready]")
        play_film(page, pictures / "film.webp")
        page.set_viewport_size({"width": 960, "height": 900})
        for name, run, clip_page in (("serve", BOOK, _generate), ("chat", CHAT, _chat)):
            with serving(run) as address:
                page.goto(address)
                page.wait_for_selector("body[data-ready]")
                page.screenshot(path=pictures / f"{name}.png", full_page=True, clip=clip_page(page))
        browser.close()


def play_film(page: Page, path: Path) -> None:
    """Saves the film on the page of a run as an animation."""
    slider, frames = page.locator("#frame"), list[Image.Image]()
    top, last = _find_box(page, "section:has(#then)"), _find_box(page, "section:has(#looks)")
    clip: Any = {"x": 0, "y": top["y"], "width": 560, "height": last["y"] + last["height"] - top["y"]}
    last_frame = int(slider.get_attribute("max") or 0)
    for at in sorted({*range(0, last_frame, 2), last_frame}):
        slider.fill(str(at))
        frames.append(Image.open(io.BytesIO(page.screenshot(full_page=True, clip=clip))).convert("RGB").quantize(24))
    times = [700] * (len(frames) - 1) + [4000]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0, lossless=True, method=6)


@contextlib.contextmanager
def serving(run: str) -> Iterator[str]:
    """Serves a run inside the ``with`` block and yields its address."""
    command = [sys.executable, "-c", "from gpt_cli.main import run; run()", "serve", "-m", run, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield next(line for line in process.stderr if line.startswith("serving")).split()[-1]
        finally:
            process.terminate()


def _generate(page: Page) -> dict[str, float]:
    """Generates a text and opens the alternatives of the last uncertain word."""
    for name, value in {"text": PROMPT, "max_tokens": "50", "seed": "4"}.items():
        page.fill(f"#{name}", value)
    page.click("#go")
    page.wait_for_selector("#status:text('.')")
    page.evaluate(
        "open(parts.findLastIndex((part) => /^ ..+/.test(part.text) && part.logprob > -3 && part.logprob < -1))"
    )
    page.evaluate("document.activeElement.blur()")
    return _clip_until(page, "#keys")


def _look_inside(page: Page) -> dict[str, float]:
    """Generates a text and waits for the panel "Inside the model"."""
    for name, value in {"text": PROMPT, "max_tokens": "30", "seed": "4"}.items():
        page.fill(f"#{name}", value)
    page.click("#go")
    page.wait_for_selector("#status:text('.')")
    page.wait_for_timeout(1000)
    page.evaluate("document.activeElement.blur()")
    page.set_viewport_size({"width": 660, "height": 600})  # A single column.
    return {**_clip_until(page, "#heads"), "width": 660}


def _chat(page: Page) -> dict[str, float]:
    """Asks a question, waits for the answer, and returns the clip."""
    for name, value in {"question": QUESTION, "max_tokens": "40", "seed": "1"}.items():
        page.fill(f"#{name}", value)
    page.click("#go")
    page.wait_for_selector("#status:text('.')")
    page.evaluate("document.activeElement.blur()")
    return _clip_until(page, "#chat-keys")


def _clip_until(page: Page, selector: str) -> dict[str, float]:
    """Returns the clip from the top of the page to the end of ``selector``."""
    box = _find_box(page, selector)
    return {"x": 0, "y": 0, "width": 960, "height": box["y"] + box["height"] + 16}


def _clip_top(height: int) -> Callable[[Page], dict[str, float]]:
    """Returns a function that clips the top of a page."""
    return lambda page: {"x": 0, "y": 0, "width": 960, "height": height}


def _clip_attention(page: Page) -> dict[str, float]:
    page.click(f"button[data-layer='{LAYER_AND_HEAD[0]}'][data-head='{LAYER_AND_HEAD[1]}']")
    return {"x": 0, "y": 0, "width": 960, "height": _find_box(page, "#readout")["y"] + 40}


def _clip_strip(page: Page) -> dict[str, float]:
    """Clips the text, coloured by the attention of its last token in the chosen head."""
    _clip_attention(page)
    return _clip_section("#strip")(page)


def _clip_section(selector: str, height: float | None = None) -> Callable[[Page], dict[str, float]]:
    """Returns a function that clips the section with ``selector``, or its top ``height`` pixels."""

    def clip(page: Page) -> dict[str, float]:
        box = _find_box(page, f"section:has({selector})")
        return {**box, "x": 0, "width": 960, "height": height or box["height"] + 10}

    return clip


def _clip_box(selector: str, width: float = 960) -> Callable[[Page], dict[str, float]]:
    """Returns a function that clips an element of at most ``width`` pixels."""
    return lambda page: (box := _find_box(page, selector)) | {"width": min(width, box["width"])}


def _clip_next_token(**controls: float) -> Callable[[Page], dict[str, float]]:
    """Returns a function that sets controls and clips the section of the next token."""

    def clip(page: Page) -> dict[str, float]:
        for name, value in controls.items():
            page.evaluate(
                "([id, value]) => { const input = document.getElementById(id); input.value = value;"
                " input.dispatchEvent(new Event('input')); }",
                [name.replace("_", "-"), value],
            )
        return {**_clip_section("#next", 430)(page), "width": 850}

    return clip


def _find_box(page: Page, selector: str) -> dict[str, float]:
    box: Any = page.locator(selector).bounding_box()
    return dict(box)


SCREENSHOTS: dict[str, Callable[[Page], dict[str, float]]] = {
    "tokens": _clip_section("#strip"),
    "neighbors": _clip_box(".cards"),
    "bands": _clip_box(".heads", 560),
    "heads": _clip_box(".heads", 480),
    "attention": _clip_attention,
    "head": _clip_box("#map"),
    "strip": _clip_strip,
    "lens": _clip_section("#lens"),
    "next": _clip_next_token(),
    "cold": _clip_next_token(temperature=0.5),
    "warm": _clip_next_token(temperature=1.5),
    "filtered": _clip_next_token(top_k=8, top_p=0.6),
    "greedy": _clip_next_token(temperature=0),
    "params": _clip_section("table"),
    "shares": _clip_section("#compared"),
    "loss": _clip_section("#curves", 500),
    "report": _clip_top(1000),
}
PAGE_OF = {name: name for name in PAGE_COMMANDS} | {"loss": "report"}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        text, runs = [*map(os.path.abspath, sys.argv[1:]), None][:2]
        with contextlib.chdir(place):
            train(text, runs)
            draw(PICTURES)
