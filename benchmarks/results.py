"""Benchmark results: a JSON file per benchmark, and the pages generated from these files.

    python -m benchmarks.results     rewrites RESULTS.md and archive.md from results/*.json

A benchmark calls `measured` and `write_section`. Table cells are formatted text.
"""

import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"
SCRIPTS = Path(sys.executable).parent
_NUMERIC = re.compile(r"[-+−]?\d[\d.,e+-]*( ?[%A-Za-z/]{1,8})?")  # a number with an optional unit

PAGES = {
    "RESULTS.md": (
        "run", "curves", "gpu", "decode", "beams", "serve", "tokenize", "finetune", "lora", "llama_cpp", "rounding",
        "contention", "faults", "pages", "browser", "h100",
    ),
    "archive.md": ("archive",),
}  # fmt: skip
HEADS = {
    "RESULTS.md": [
        "# Results",
        "",
        "Generated from `benchmarks/results/*.json` by `python -m benchmarks.results`. Speeds depend on the machine, "
        "so compare them within a section only. Superseded measurements and logs are in the [archive](archive.md).",
    ],
    "archive.md": [
        "# Archive",
        "",
        "Superseded measurements and logs, generated from `benchmarks/results/archive.json`. Current figures are in "
        "the [results](RESULTS.md).",
    ],
}


@dataclass(frozen=True)
class Table:
    """A table of a section."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def lines(self) -> list[str]:
        """Returns the caption and the table in Markdown, with numeric columns right-aligned."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.columns)
        numeric = [all(not cell or _NUMERIC.fullmatch(cell) for cell in column) for column in columns]
        rule = "|" + "|".join("---:" if right else "---" for right in numeric) + "|"
        table = [_row(self.columns), rule, *map(_row, self.rows)]
        return [self.caption, "", *table] if self.caption else table


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |"


@dataclass(frozen=True)
class Section:
    """A measurement with its machine, date and command. ``notes`` are sentences."""

    title: str
    commit: str
    date: str
    machine: str
    command: str
    notes: Sequence[str] = ()
    tables: Sequence[Table] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [
            f"## {self.title}",
            f"- {self.machine}\n- commit {self.commit}, {self.date}, command `{self.command}`",
            "\n".join(self.notes),
            *("\n".join(table.lines()) for table in self.tables),
        ]
        return "\n\n".join(filter(None, parts))


def measured(
    title: str, command: str, notes: Sequence[str], tables: Sequence[Table], packages: Sequence[str] = ("torch",)
) -> Section:
    """Returns a section with the current commit, date and machine."""
    return Section(title, **about(command, packages), notes=notes, tables=tables)


def about(command: str, packages: Sequence[str]) -> dict[str, str]:
    """Returns the commit, date, machine and command of a measurement."""
    commit = "unknown"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = output("git", "rev-parse", "--short", "HEAD", cwd=ROOT).strip()
        written_files = [":!benchmarks/results", ":!benchmarks/*.md"]
        changes = output("git", "status", "--porcelain", "--untracked-files=no", "--", ".", *written_files, cwd=ROOT)
        commit += "-dirty" if changes else ""
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    return {"commit": commit, "date": today, "machine": machine(packages), "command": command}


def machine(packages: Sequence[str]) -> str:
    """Describes this machine: processor, cores, system, Python, versions of ``packages``."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = names[0] if names else cpu
    versions = [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]
    return f"{cpu}, {os.cpu_count()} cores; {platform.platform()}; {', '.join(versions)}"


def load(benchmark: str) -> list[Section]:
    """Returns the stored sections of a benchmark."""
    path = FOLDER / "results" / f"{benchmark}.json"
    if not path.exists():
        return []
    sections = json.loads(path.read_text(encoding="utf-8"))
    return [Section(**section | {"tables": [Table(**table) for table in section["tables"]]}) for section in sections]


def save(benchmark: str, sections: Sequence[Section]) -> None:
    """Writes the sections of a benchmark, with one table row per line."""
    text = json.dumps([asdict(section) for section in sections], indent=1, ensure_ascii=False)
    text = re.sub(r'\n {6}|\n {5}(?=["\]])|(?<=")\n {4}(?=\])', " ", text)
    (FOLDER / "results" / f"{benchmark}.json").write_text(text + "\n", encoding="utf-8")


def write_section(benchmark: str, section: Section) -> None:
    """Adds a section to the results, or replaces the stored section that has the same title. Rewrites the pages and
    prints the section."""
    sections = {stored.title: stored for stored in load(benchmark)} | {section.title: section}
    save(benchmark, list(sections.values()))
    write_pages()
    print(section)


def page(name: str) -> str:
    """Returns a page in Markdown."""
    sections = [section for benchmark in PAGES[name] for section in load(benchmark)]
    parts = ["\n".join(HEADS[name])]
    if name == "RESULTS.md":
        parts.append("\n".join(["## Summary", "", *summary(sections).lines()]))
    return "\n\n".join([*parts, *map(str, sections)]) + "\n"


def write_pages() -> None:
    """Rewrites the pages."""
    for name in PAGES:
        (FOLDER / name).write_text(page(name), encoding="utf-8")


def anchor(title: str) -> str:
    """Returns GitHub's anchor for a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


# The summary


@dataclass(frozen=True)
class Figure:
    """A row of the summary. The cells in ``ours`` identify exactly one row of ``section``; so do ``theirs``."""

    work: str
    section: str
    column: str
    ours: Sequence[str]
    peer: str = ""
    theirs: Sequence[str] = ()
    their_column: str = ""  # the peer's column, if different

    def row(self, sections: Sequence[Section]) -> list[str]:
        """Returns the work, our figure, the peer's figure, and a link to the section."""
        (section,) = (candidate for candidate in sections if candidate.title == self.section)
        unit = self.column.split(", ")[-1]
        ours = f"{_cell(section, self.ours, self.column)} {unit}"
        theirs = ""
        if self.peer:
            theirs = f"{_cell(section, self.theirs, self.their_column or self.column)} ({self.peer})"
        return [self.work, ours, theirs, f"[{self.section}](#{anchor(self.section)})"]


def _cell(section: Section, cells: Sequence[str], column: str) -> str:
    matches = [
        dict(zip(table.columns, row, strict=True))[column]
        for table in section.tables if column in table.columns
        for row in table.rows if set(cells) <= set(row)
    ]  # fmt: skip
    if len(matches) != 1:
        raise LookupError(f"{len(matches)} rows of {section.title!r} have {cells} and a column {column!r}")
    return matches[0]


_STEP = "Training: speed of a step, bfloat16"
_LOSS = "Training: held-out loss in a given time"
_GPU = "Training on a GPU"
_DECODE = "Decoding compared with llama.cpp: smollm2, threads: 2"
FIGURES = (
    Figure(
        "Training step, 10.7 M parameters, AdamW, compiled, two CPU cores", _STEP, "tokens/s",
        ["10.7 M", "`gpt train`, AdamW, compiled"], "Transformers, compiled", ["10.7 M", "Transformers, compiled"],
    ),
    Figure(
        "Held-out loss on tinyshakespeare after one minute, two CPU cores", _LOSS, "nats per byte",
        ["`gpt train --arch modern --minutes 1`", "tinyshakespeare"],
        "nanoGPT's CPU recipe", ["nanoGPT's CPU recipe, on Transformers", "tinyshakespeare"],
    ),
    Figure(
        "Training step, GPT-2 124M, AdamW, compiled, H200", _GPU, "tokens/s",
        ["`gpt train`", "GPT-2 124M", "adamw", "yes"], "Transformers, compiled",
        ["Transformers", "GPT-2 124M", "yes"],
    ),
    Figure("Training step, GPT-3 1.3B, Muon, compiled, H200", _GPU, "MFU", ["`gpt train`", "GPT-3 1.3B"]),
    Figure(
        "Decoding one text, GPT-2 124M, bfloat16, compiled, H200", _GPU, "decoding, tokens/s",
        ["GPT-2 124M", "1", "yes"],
    ),
    Figure(
        "Decoding one text, SmolLM2-135M, float32, two CPU cores", _DECODE, "`gpt`, tokens/s",
        ["float32, F32", "one text"], "llama.cpp", ["float32, F32", "one text"], "llama.cpp, tokens/s",
    ),
    Figure(
        "Decoding one text, SmolLM2-135M, int8, two CPU cores", _DECODE, "`gpt`, tokens/s",
        ["int8, Q8_0", "one text"], "llama.cpp, Q8_0", ["int8, Q8_0", "one text"], "llama.cpp, tokens/s",
    ),
    Figure(
        "Serving 32 clients, SmolLM2-135M, int8, two CPU cores", _DECODE, "`gpt`, tokens/s",
        ["int8, Q8_0", "32 texts"], "llama.cpp, Q8_0", ["int8, Q8_0", "32 texts"], "llama.cpp, tokens/s",
    ),
    Figure(
        "Tokenizing 64 MB with GPT-2's vocabulary, two CPU cores", "Tokenizing", "MB/s",
        ["64 MB", "`gpt tokenize` one file, `--jobs 2`"], "Transformers' tokenizers", ["Tokenizers, batch, all cores"],
    ),
    Figure(
        "LoRA steps, SmolLM2-135M, two CPU cores", "Fine-tuning with adapters", "steps/s", ["`gpt`"],
        "Transformers with PEFT", ["Transformers with PEFT"],
    ),
)  # fmt: skip


def summary(sections: Sequence[Section]) -> Table:
    """Returns the table of key figures."""
    return Table(["work", "`gpt`", "compared with", "measured in"], [figure.row(sections) for figure in FIGURES])


# Helpers for benchmarks


def median_seconds(work: Callable[[], object], runs: int = 5) -> float:
    """Returns the median seconds of ``runs`` calls after a warm-up."""
    work()
    times = []
    for _ in range(runs):
        start_time = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_time)
    return statistics.median(times)


def output(*args: str, cwd: Path | None = None) -> str:
    """Runs a command and returns its stdout."""
    return subprocess.run(args, cwd=cwd, check=True, capture_output=True, text=True, encoding="utf-8").stdout


if __name__ == "__main__":
    write_pages()
