"""Helpers of the benchmarks: medians, commands, lines about the machine, and sections of RESULTS.md."""

import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
SCRIPTS = Path(sys.executable).parent
HEAD = "# Results\n\nWritten by `make bench`. Absolute figures are the machine's; compare within a section.\n"


def median_seconds(work: Callable[[], object], runs: int = 5) -> float:
    """Returns the median seconds of ``runs`` calls of ``work``, after one to warm up."""
    work()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def command(*args: str, cwd: Path | None = None) -> str:
    """Runs a command and returns its stdout."""
    return subprocess.run(args, cwd=cwd, check=True, capture_output=True, text=True, encoding="utf-8").stdout


def machine(how: str) -> list[str]:
    """Returns lines that name processor, versions, commit, date and the command ``how``."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(": ")[1] if names else cpu
    dirty = "-dirty" if command("git", "status", "--porcelain", "--untracked-files=no", cwd=ROOT) else ""
    commit = command("git", "rev-parse", "--short", "HEAD", cwd=ROOT).strip() + dirty
    return [
        f"- {cpu}, {os.cpu_count()} cores; {platform.platform()}; Python {platform.python_version()}",
        f"- commit {commit}, {datetime.now(UTC):%Y-%m-%d}, command `{how}`",
    ]


def write_section(title: str, lines: Sequence[str]) -> None:
    """Replaces the section ``title`` of RESULTS.md, or adds it at the end."""
    page = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else HEAD
    section = f"\n## {title}\n\n" + "\n".join(lines) + "\n"
    pattern = re.compile(rf"\n## {re.escape(title)}\n.*?(?=\n## |\Z)", re.DOTALL)
    page = pattern.sub(lambda _: section, page) if pattern.search(page) else page + section
    RESULTS.write_text(page, encoding="utf-8")
    print(section)
