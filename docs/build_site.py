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
BUILD_FOLDER = ROOT / "build"
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
ANY_LINK = re.compile(r"(\]\()([^)#\s]*)(#[^)\s]*)?(\))")  # also matches links within the page
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Matches the generator's output: "╭─[ docs/report.md:32:13 ]", the line, "╰──── reason".
BROKEN = re.compile(r"╭─\[ ([^\n]+):(\d+):(\d+) \]$.*?╰─+ ([^\n]+)$", re.MULTILINE | re.DOTALL)

SHIM = "https://unpkg.com/iframe-worker/shim"  # the theme's workaround for search from disk
WORKER = """if (location.protocol === "file:") {
  const code = %s;
  window.Worker = class extends Worker {
    constructor() { super(URL.createObjectURL(new Blob([code], { type: "text/javascript" }))); }
  };
}
"""


def build(build_folder: Path = BUILD_FOLDER) -> int:
    """Copies the pages to ``build_folder``/docs and builds ``build_folder``/site; returns the exit status."""
    shutil.rmtree(build_folder / "docs", ignore_errors=True)
    for path in [ROOT / "README.md", ROOT / "docs" / "site.css", *sorted((ROOT / "docs").glob("*.md"))]:
        copy_page(path, build_folder / "docs")
    shutil.copy(ROOT / "docs" / "zensical.toml", build_folder)
    status = render(build_folder)
    if status == 0:
        embed_search_worker(build_folder / "site")
    return status


def render(build_folder: Path) -> int:
    """Builds ``build_folder``/site and returns the exit status. Broken links and anchors fail the build.

    Prints one line per broken link instead of the generator's traceback.
    """
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "docs")}
    process = subprocess.run(
        command, cwd=build_folder, env=environment, check=False, encoding="utf-8", errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output = COLOUR.sub("", process.stdout)
    if process.returncode == 0:
        print(output, end="")
        return 0
    for line in broken_links(build_folder / "docs", output) or [output.rstrip()]:
        print(line, file=sys.stderr)
    return process.returncode


def broken_links(stage: Path, output: str) -> list[str]:
    """Returns a line for each broken link in the generator's output."""
    lines = []
    for page, line_number, column, reason in BROKEN.findall(output):
        line = (stage / page).read_text(encoding="utf-8").splitlines()[int(line_number) - 1]
        later_links = [match[2] + (match[3] or "") for match in ANY_LINK.finditer(line) if match.end() >= int(column)]
        link = f' "{later_links[0].replace(".py.md", ".py")}"' if later_links else ""
        lines.append(f"error: {page}, line {line_number}: the link{link} leads nowhere: {reason.strip()}")
    return lines


def copy_page(path: Path, stage: Path) -> None:
    """Copies a file and the files that it links to, to the same paths below ``stage``."""
    target_path = stage / site_path(path.relative_to(ROOT))
    if target_path.exists():
        return
    target_path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".py":
        code = path.read_text(encoding="utf-8")
        target_path.write_text(f"# {path.relative_to(ROOT).as_posix()}\n\n```python\n{code}```\n", encoding="utf-8")
        return
    if path.suffix != ".md":
        shutil.copy(path, target_path)
        return
    text = path.read_text(encoding="utf-8")
    pages = LINK.sub(lambda match: match[1] + site_path(match[2]) + (match[3] or "") + match[4], text)
    target_path.write_text(pages, encoding="utf-8")
    for _, target, _, _ in LINK.findall(text):
        linked = (path.parent / target).resolve()
        if "://" not in target and linked.is_file():
            copy_page(linked, stage)


def embed_search_worker(site: Path) -> None:
    """Makes pages start the search worker from a string.

    Browsers don't start workers from files, and the theme's workaround fetches a script from another host.
    """
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    script = site / "assets" / "javascripts" / "worker.js"
    script.write_text(WORKER % json.dumps(worker.read_text(encoding="utf-8")), encoding="utf-8")
    for path in site.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        relative_script = os.path.relpath(script, path.parent).replace(os.sep, "/")
        path.write_text(page.replace(SHIM, relative_script), encoding="utf-8")


def site_path(path: "Path | str") -> str:
    """Returns a file's path in the site. Source files become pages."""
    return f"{path}.md" if str(path).endswith(".py") else str(path)


if __name__ == "__main__":
    sys.exit(build(*map(Path, sys.argv[1:])))
