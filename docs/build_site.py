"""Builds the documentation site in build/site (`make docs`, or python docs/build_site.py).

Pages have the same paths as on GitHub, so links work in both places. Linked files outside docs/ are copied too; source
files become pages. A broken link fails the build.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build"
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
ANY_LINK = re.compile(r"(\]\()([^)#\s]*)(#[^)\s]*)?(\))")  # includes links within the page
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# A broken link in the generator's output: "╭─[ docs/report.md:32:13 ]", the line, "╰──── reason".
BROKEN = re.compile(r"╭─\[ ([^\n]+):(\d+):(\d+) \]$.*?╰─+ ([^\n]+)$", re.MULTILINE | re.DOTALL)

SHIM = "https://unpkg.com/iframe-worker/shim"  # the theme's workaround for search from disk
WORKER = """if (location.protocol === "file:") {
  const code = %s;
  window.Worker = class extends Worker {
    constructor() { super(URL.createObjectURL(new Blob([code], { type: "text/javascript" }))); }
  };
}
"""


def build(place: Path = PLACE) -> int:
    """Copies the pages to ``place``/docs and builds ``place``/site; returns the exit status."""
    shutil.rmtree(place / "docs", ignore_errors=True)
    for path in [ROOT / "README.md", ROOT / "docs" / "site.css", *sorted((ROOT / "docs").glob("*.md"))]:
        lay_out(path, place / "docs")
    shutil.copy(ROOT / "docs" / "zensical.toml", place)
    status = render(place)
    if status == 0:
        search_from_disk(place / "site")
    return status


def render(place: Path) -> int:
    """Builds ``place``/site and returns the exit status. Broken links and anchors fail the build.

    Prints one line per broken link instead of the generator's traceback.
    """
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "docs")}
    done = subprocess.run(
        command, cwd=place, env=environment, check=False, encoding="utf-8", errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output = COLOUR.sub("", done.stdout)
    if done.returncode == 0:
        print(output, end="")
        return 0
    for line in broken_links(place / "docs", output) or [output.rstrip()]:
        print(line, file=sys.stderr)
    return done.returncode


def broken_links(stage: Path, output: str) -> list[str]:
    """Parses the generator's output; returns a line for each broken link with file, line, link and reason."""
    lines = []
    for page, row, column, why in BROKEN.findall(output):
        line = (stage / page).read_text(encoding="utf-8").splitlines()[int(row) - 1]
        here = [found[2] + (found[3] or "") for found in ANY_LINK.finditer(line) if found.end() >= int(column)]
        link = f' "{here[0].replace(".py.md", ".py")}"' if here else ""
        lines.append(f"error: {page}, line {row}: the link{link} leads nowhere: {why.strip()}")
    return lines


def lay_out(path: Path, stage: Path) -> None:
    """Copies a file, and files that it links to, to the same paths below ``stage``."""
    place = stage / page_of(path.relative_to(ROOT))
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".py":
        code = path.read_text(encoding="utf-8")
        place.write_text(f"# {path.relative_to(ROOT).as_posix()}\n\n```python\n{code}```\n", encoding="utf-8")
        return
    if path.suffix != ".md":
        shutil.copy(path, place)
        return
    text = path.read_text(encoding="utf-8")
    pages = LINK.sub(lambda found: found[1] + page_of(found[2]) + (found[3] or "") + found[4], text)
    place.write_text(pages, encoding="utf-8")
    for _, target, _, _ in LINK.findall(text):
        linked = (path.parent / target).resolve()
        if "://" not in target and linked.is_file():
            lay_out(linked, stage)


def search_from_disk(site: Path) -> None:
    """Makes pages start the search worker from a string.

    Browsers don't start workers from files, and the theme's workaround fetches a script from another host.
    """
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    script = site / "assets" / "javascripts" / "worker.js"
    script.write_text(WORKER % json.dumps(worker.read_text(encoding="utf-8")), encoding="utf-8")
    for path in site.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        own = os.path.relpath(script, path.parent).replace(os.sep, "/")
        path.write_text(page.replace(SHIM, own), encoding="utf-8")


def page_of(path: "Path | str") -> str:
    """Returns a file's path in the site. Source files become pages."""
    return f"{path}.md" if str(path).endswith(".py") else str(path)


if __name__ == "__main__":
    sys.exit(build(*map(Path, sys.argv[1:])))
