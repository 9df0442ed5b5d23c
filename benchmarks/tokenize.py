"""Measures `gpt tokenize`, from files to checked shards, beside bare tiktoken and transformers' tokenizers.

    python -m benchmarks.tokenize [FOLDER OF TEXTS]

Without a folder the texts are the .py, .md, .rst and .txt files of Python and of the installed packages, which every
machine with this project has. GPT-2's vocabulary must be in the cache. POSIX only (it kills, and reads peak memory).
"""

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.results import SCRIPTS, machine, write_section
from gpt.files import cache_dir
from gpt.text.tokenizer import gpt2_tokenizer

LEAST = 64_000_000  # bytes of text
LARGE = 1_000_000_000
PEER = 10_000_000  # transformers' tokenizers are measured on so much
ROUNDS = 3  # each system in turn, so often; medians are shown
KILLS = 10
CHUNK = 2**20


def texts(folder: Path | None) -> Iterator[bytes]:
    """Yields the UTF-8 texts of a folder, or of Python and its packages."""
    roots = [folder] if folder else [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.suffix in (".py", ".md", ".rst", ".txt") and path.is_file():
                data = path.read_bytes()
                try:
                    data.decode()
                except UnicodeDecodeError:
                    continue
                if data and b"\0" not in data:
                    yield data


def make_corpora(place: Path, folder: Path | None) -> tuple[list[bytes], dict[str, Path]]:
    """Writes the texts as one file, as a folder of files, as JSON lines, and repeated to a gigabyte; returns all."""
    some: list[bytes] = []
    size = 0
    for data in texts(folder):
        some.append(data)
        size += len(data)
        if size >= LEAST:
            break
    if size < LEAST:
        sys.exit(f"{size:,} bytes of text were found; {LEAST:,} are needed")
    paths = {name: place / name for name in ("one.txt", "files", "lines.jsonl", "large.txt")}
    paths["one.txt"].write_bytes(b"".join(some))
    paths["files"].mkdir()
    for number, data in enumerate(some):
        (paths["files"] / f"{number:06d}.txt").write_bytes(data)
    with paths["lines.jsonl"].open("w", encoding="utf-8") as lines:
        for data in some:
            lines.write(json.dumps({"text": data.decode()}, ensure_ascii=False) + "\n")
    written = 0
    with paths["large.txt"].open("wb") as large:
        while written < LARGE:
            random.Random(written).shuffle(some)
            for data in some:
                written += large.write(data)
    return some, paths


def timed(args: list[str]) -> float:
    """Runs a command and returns its seconds."""
    started = time.perf_counter()
    subprocess.run(args, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


# Run by a small process in between: a child's peak includes what its parent held when the child was started.
_WATCH = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
)


def peak_memory(args: list[str]) -> float:
    """Runs a command and returns the peak memory, in MB, of its largest process."""
    peak = subprocess.run([sys.executable, "-c", _WATCH, *args], check=True, capture_output=True, text=True).stdout
    return int(peak) / (1e3 if sys.platform == "linux" else 1e6)


def ours(text: Path, out: Path, *options: str) -> list[str]:
    """Returns the command ``gpt tokenize`` to a new folder ``out``, which is deleted first."""
    shutil.rmtree(out, ignore_errors=True)
    return [str(SCRIPTS / "gpt"), "tokenize", str(text), "-o", str(out), "--tokenizer", "gpt2", "-q", *options]


def _start() -> None:
    global _encoding
    import tiktoken

    _encoding = tiktoken.get_encoding("r50k_base")


def _encode(text: str) -> int:
    return len(_encoding.encode_to_numpy(text, disallowed_special=()))


def chunks(text: Path) -> Iterator[str]:
    """Yields a text in parts of `CHUNK` characters, cut anywhere: wrong ids at the cuts do not change the speed."""
    with text.open(encoding="utf-8", newline="") as file:
        while part := file.read(CHUNK):
            yield part


def bare(text: Path, processes: int = 2) -> tuple[float, float]:
    """Runs tiktoken in processes, dropping the ids; returns seconds from start to end and of the encoding alone."""
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(processes, _start) as pool:
        pool.map(_encode, ["warm"] * processes * 4, chunksize=1)
        parts = list(chunks(text))
        warm = time.perf_counter()
        sum(pool.imap(_encode, parts))
        done = time.perf_counter()
    return done - started, done - warm


def transformers_tokenizers(some: Iterable[bytes]) -> float:
    """Returns MB/s of the tokenizers library, on all cores, with whole files as one batch."""
    from tokenizers import Tokenizer

    from gpt.text.tokenizer_files import to_tokenizer_json

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    theirs = Tokenizer.from_str(json.dumps(to_tokenizer_json(gpt2_tokenizer())))
    batch, size = [], 0
    for data in some:
        batch.append(data.decode())
        size += len(data)
        if size > PEER:
            break
    started = time.perf_counter()
    theirs.encode_batch(batch, add_special_tokens=False)
    return size / (time.perf_counter() - started) / 1e6


WARM = "bare tiktoken, two processes, encoding alone: text in memory, processes warm, ids dropped"
WHOLE = "bare tiktoken, two processes, from start to end, ids dropped"
OURS = "`gpt tokenize` one file, `--jobs 2`, whole command, to synced shards"


def table(title: str, rates: dict[str, list[float]]) -> list[str]:
    """Returns a table of median rates and their ratios to bare tiktoken's."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    rows = ["", f"{title}, GPT-2's vocabulary; medians of {ROUNDS} rounds in turn.", ""]
    rows += ["| system | MB/s | of bare tiktoken, whole | of its encoding alone |", "|---|---:|---:|---:|"]
    for name, rate in medians.items():
        rows.append(f"| {name} | {rate:.1f} | {rate / medians[WHOLE]:.2f} | {rate / medians[WARM]:.2f} |")
    return rows


def throughput(some: list[bytes], paths: dict[str, Path], out: Path) -> list[str]:
    """Returns tables of rates on the texts once, and repeated to a gigabyte."""
    size = paths["one.txt"].stat().st_size / 1e6
    cores = os.cpu_count() or 1
    rates: dict[str, list[float]] = {}

    def add(name: str, seconds: float) -> None:
        rates.setdefault(name, []).append(size / seconds)

    def add_bare_and_ours(text: Path) -> None:
        whole, alone = bare(text)
        add(WARM, alone)
        add(WHOLE, whole)
        add(OURS, timed(ours(text, out, "--jobs", "2")))

    for _ in range(ROUNDS):
        add_bare_and_ours(paths["one.txt"])
        add("`gpt tokenize` a folder of files, `--jobs 2`", timed(ours(paths["files"], out, "--jobs", "2")))
        add("`gpt tokenize` JSON lines, `--jobs 2`", timed(ours(paths["lines.jsonl"], out, "--jobs", "2")))
        for jobs in sorted({1, 4, cores} - {2}):
            add(f"`gpt tokenize` one file, `--jobs {jobs}`", timed(ours(paths["one.txt"], out, "--jobs", str(jobs))))
        rates.setdefault("transformers' tokenizers, batch, all cores", []).append(transformers_tokenizers(some))
    rows = table(f"{size:,.0f} MB in {len(some):,} texts", rates)
    size, rates = paths["large.txt"].stat().st_size / 1e6, {}
    for _ in range(ROUNDS):
        add_bare_and_ours(paths["large.txt"])
    return rows + table(f"The same texts repeated to {size:,.0f} MB", rates)


def memory(paths: dict[str, Path], out: Path) -> list[str]:
    """Returns a table of the largest process's peak memory, for texts of different sizes."""
    rows = ["", "| text | size | peak memory of the largest process |", "|---|---:|---:|"]
    for name in ("one.txt", "files", "lines.jsonl", "large.txt"):
        path = paths[name]
        files = list(path.iterdir()) if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files) / 1e6
        peak = peak_memory(ours(path, out, "--jobs", "2"))
        rows.append(f"| {name} | {size:,.0f} MB | {peak:,.0f} MB |")
    return rows


def contents(folder: Path) -> str:
    """Returns a checksum over all files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def kills(text: Path, out: Path) -> list[str]:
    """Kills ``gpt tokenize`` at random moments, resumes it, and compares the bytes with an uninterrupted run's."""
    seconds = timed(ours(text, out, "--jobs", "2"))
    expected = contents(out)
    equal = finished = 0
    rng = random.Random(0)
    for _ in range(KILLS):
        shutil.rmtree(out)
        command = [str(SCRIPTS / "gpt"), "tokenize", str(text), "-o", str(out), "--tokenizer", "gpt2", "-q", "--resume"]
        process = subprocess.Popen([*command, "--jobs", "2"])
        time.sleep(rng.uniform(0.1, 0.95) * seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        finished += len({path.name.split("-", 1)[1] for path in out.glob("*.ids")}) if out.exists() else 0
        subprocess.run([*command, "--jobs", "2"], check=True)
        equal += contents(out) == expected
    return [
        "",
        f"Killed (SIGKILL) at {KILLS} random moments and resumed: equal to the byte {equal} of {KILLS} times; "
        f"{finished / KILLS:.1f} slices were finished at the kill, on average, and not made again.",
    ]


def main() -> None:
    """Measures, and writes the section of RESULTS.md."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(cache_dir() / "tiktoken"))
    gpt2_tokenizer()
    with tempfile.TemporaryDirectory() as place:
        some, paths = make_corpora(Path(place), folder)
        out = Path(place) / "out"
        steps: list[Callable[[], list[str]]] = [
            lambda: throughput(some, paths, out),
            lambda: memory(paths, out),
            lambda: kills(paths["one.txt"], out),
        ]
        lines = [*machine("python -m benchmarks.tokenize"), ""]
        for step in steps:
            lines += step()
            print("\n".join(lines[-8:]), flush=True)
    write_section("Tokenizing", lines)


if __name__ == "__main__":
    main()
