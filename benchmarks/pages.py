"""Measures the page of `gpt inspect attention` for GPT-2 124M: 12 layers of 12 heads over 128 tokens.

    python -m benchmarks.pages

Needs the dev extra, Chromium and GPT-2's vocabulary, from TIKTOKEN_CACHE_DIR or downloaded by tiktoken.
"""

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.results import SCRIPTS, Table, measured, output, write_section

TOKENS, LOADS = 128, 5
PAINTED = "() => new Promise(f => requestAnimationFrame(() => requestAnimationFrame(() => f(performance.now()))))"


def write_page(place: Path) -> tuple[Path, float]:
    """Runs the command with a random model; returns the page's path and the command's seconds.

    The size of the page does not depend on the weights.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config()).save_pretrained(place / "model")
    prompt, page = place / "prompt.txt", place / "page.html"
    prompt.write_text(" the" * TOKENS)  # Each word is one token.
    start_time = time.perf_counter()
    words = ("inspect", "attention", "-m", str(place / "model"), "--prompt-file", str(prompt), "-o", str(page))
    output(str(SCRIPTS / "gpt"), *words)
    return page, time.perf_counter() - start_time


def time_loads(page: Path) -> tuple[list[float], str]:
    """Loads the page several times; returns the seconds until it is painted, and the browser's version."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or sys.exit("Chromium is not installed")
    seconds = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(LOADS):
            tab = browser.new_page(viewport={"width": 1200, "height": 900})
            tab.goto(page.as_uri())
            tab.wait_for_selector("body[data-ready]")
            seconds.append(tab.evaluate(PAINTED) / 1000)
            assert tab.locator(".heads button").count() == 12 * 13 + 1
            assert tab.locator("#strip .token").count() == TOKENS
            tab.close()
        version = browser.version
        browser.close()
    return seconds, version


def main() -> None:
    """Measures and writes the section."""
    with tempfile.TemporaryDirectory() as place:
        page, command_seconds = write_page(Path(place))
        size = page.stat().st_size
        seconds, version = time_loads(page)
    rows = [
        ["size of the page", f"{size / 1e6:.2f} MB"],
        [f"painted, median of {LOADS}", f"{statistics.median(seconds):.2f} s"],
        ["painted, slowest", f"{max(seconds):.2f} s"],
        ["`gpt inspect attention`, the whole command", f"{command_seconds:.1f} s"],
    ]
    note = f"GPT-2 124M, 12 layers × 12 heads × {TOKENS} tokens, in headless Chromium {version}."
    tables = [Table(["measure", "value"], rows)]
    write_section("pages", measured("The page of attention", "python -m benchmarks.pages", [note], tables))


if __name__ == "__main__":
    main()
