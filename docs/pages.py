"""Draws docs/attention.png and docs/report.png: the pages as a browser shows them, of a run.

python docs/pages.py RUN PROMPT; needs the dev extra and a Chromium
"""

import shutil
import sys
import tempfile
from pathlib import Path

from gpt_cli.main import main
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent


def draw(run: str, prompt: str) -> None:
    """Makes both pages and takes their pictures, the upper part of each."""
    with tempfile.TemporaryDirectory() as place, sync_playwright() as driver:
        pages = Path(place)
        main(["inspect", "attention", "-m", run, "-p", prompt, "-o", str(pages / "attention.html")])
        main(["report", run, "-o", str(pages / "report.html")])
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, height in (("attention", 1350), ("report", 900)):
            page = browser.new_page(viewport={"width": 1100, "height": height}, color_scheme="light")
            page.goto((pages / f"{name}.html").as_uri())
            page.wait_for_selector("body[data-ready]")
            if name == "attention":
                page.click("button[data-layer='3'][data-head='1']")
            page.screenshot(path=HERE / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    draw(*sys.argv[1:])
