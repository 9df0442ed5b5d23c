"""Measures `gpt tokenize`, compared with tiktoken and Transformers' tokenizers.

    python -m benchmarks.tokenize [FOLDER OF TEXTS]

The default texts are the .py, .md, .rst and .txt files of Python and its packages. GPT-2's vocabulary must be cached.
POSIX only: kills processes and reads peak memory.
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
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.results import SCRIPTS, Table, measured, write_section
from gpt.system.files import cache_dir
from gpt.tokenizers.importing import gpt2_tokenizer

CORPUS_BYTES = 64_000_000
LARGE_CORPUS_BYTES = 1_000_000_000
TOKENIZERS_BYTES = 10_000_000  # bytes that Transformers' tokenizers encode
ROUNDS = 3
KILLS = 10
CHUNK_CHARACTERS = 2**20


def read_texts(folder: Path | None) -> Iterator[bytes]:
    """Yields the UTF-8 texts of a folder, by default of Python and its packages."""
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
    """Writes the texts in four forms: a file, a folder of files, JSON lines, and a file that repeats the texts up to a
    gigabyte. Returns the texts and the paths."""
    corpus_texts: list[bytes] = []
    size = 0
    for data in read_texts(folder):
        corpus_texts.append(data)
        size += len(data)
        if size >= CORPUS_BYTES:
            break
    if size < CORPUS_BYTES:
        sys.exit(f"found {size:,} bytes of text, but {CORPUS_BYTES:,} are needed")
    paths = {name: place / name for name in ("one.txt", "files", "lines.jsonl", "large.txt")}
    paths["one.txt"].write_bytes(b"".join(corpus_texts))
    paths["files"].mkdir()
    for number, data in enumerate(corpus_texts):
        (paths["files"] / f"{number:06d}.txt").write_bytes(data)
    with paths["lines.jsonl"].open("w", encoding="utf-8") as lines:
        for data in corpus_texts:
            lines.write(json.dumps({"text": data.decode()}, ensure_ascii=False) + "\n")
    written = 0
    with paths["large.txt"].open("wb") as large:
        while written < LARGE_CORPUS_BYTES:
            random.Random(written).shuffle(corpus_texts)
            for data in corpus_texts:
                written += large.write(data)
    return corpus_texts, paths


def time_command(args: list[str]) -> float:
    """Runs a command and returns its seconds."""
    start_time = time.perf_counter()
    subprocess.run(args, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start_time


# A child's peak memory includes its parent's memory at the fork, so the parent is a small process.
_MEASURE_PEAK = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
)


def peak_memory(args: list[str]) -> float:
    """Runs a command and returns the peak memory, in MB, of its largest process."""
    peak = subprocess.run(
        [sys.executable, "-c", _MEASURE_PEAK, *args], check=True, capture_output=True, text=True
    ).stdout
    return int(peak) / (1e3 if sys.platform == "linux" else 1e6)


def make_command(text: Path, out: Path, *options: str) -> list[str]:
    """Deletes ``out`` and returns the `gpt tokenize` command that writes it."""
    shutil.rmtree(out, ignore_errors=True)
    return [str(SCRIPTS / "gpt"), "tokenize", str(text), "-o", str(out), "--tokenizer", "gpt2", "-q", *options]


def _load_encoding() -> None:
    global _encoding
    import tiktoken

    _encoding = tiktoken.get_encoding("r50k_base")


def _encode(text: str) -> int:
    return len(_encoding.encode_to_numpy(text, disallowed_special=()))


def read_chunks(text: Path) -> Iterator[str]:
    """Yields a text in chunks of `CHUNK_CHARACTERS` characters. At chunk ends, the ids can differ from the
    whole text's; the speed is the same."""
    with text.open(encoding="utf-8", newline="") as file:
        while part := file.read(CHUNK_CHARACTERS):
            yield part


def tiktoken_seconds(text: Path, processes: int = 2) -> tuple[float, float]:
    """Runs tiktoken in several processes and drops the ids; returns the total seconds and the seconds of encoding."""
    start_time = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(processes, _load_encoding) as pool:
        pool.map(_encode, ["warm"] * processes * 4, chunksize=1)
        parts = list(read_chunks(text))
        warmed_up = time.perf_counter()
        sum(pool.imap(_encode, parts))
        end_time = time.perf_counter()
    return end_time - start_time, end_time - warmed_up


def transformers_tokenizers(texts: Iterable[bytes]) -> float:
    """Returns the MB/s of the Tokenizers library on all cores, with all files in one batch."""
    from tokenizers import Tokenizer

    from gpt.tokenizers.saving import to_tokenizer_json

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = Tokenizer.from_str(json.dumps(to_tokenizer_json(gpt2_tokenizer())))
    batch, size = [], 0
    for data in texts:
        batch.append(data.decode())
        size += len(data)
        if size > TOKENIZERS_BYTES:
            break
    start_time = time.perf_counter()
    tokenizer.encode_batch(batch, add_special_tokens=False)
    return size / (time.perf_counter() - start_time) / 1e6


ENCODING = "tiktoken, two processes, encoding only (text in memory, processes warm, ids dropped)"
END_TO_END = "tiktoken, two processes, start to end, ids dropped"
OURS = "`gpt tokenize` one file, `--jobs 2`"


def speed_rows(size: float, rates: dict[str, list[float]]) -> list[list[str]]:
    """Returns rows of median MB/s and their ratios to tiktoken."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return [
        [f"{size:,.0f} MB", name, f"{rate:.1f}", f"{rate / medians[END_TO_END]:.2f}", f"{rate / medians[ENCODING]:.2f}"]
        for name, rate in medians.items()
    ]


def measure_throughput(data: list[bytes], paths: dict[str, Path], out: Path) -> Table:
    """Measures MB/s on the corpus, and on the corpus repeated to a gigabyte."""
    size = paths["one.txt"].stat().st_size / 1e6
    cores = os.cpu_count() or 1
    rates: dict[str, list[float]] = {}

    def add(name: str, seconds: float) -> None:
        rates.setdefault(name, []).append(size / seconds)

    def add_tiktoken_and_ours(text: Path) -> None:
        total, encoding = tiktoken_seconds(text)
        add(ENCODING, encoding)
        add(END_TO_END, total)
        add(OURS, time_command(make_command(text, out, "--jobs", "2")))

    for _ in range(ROUNDS):
        add_tiktoken_and_ours(paths["one.txt"])
        add(
            "`gpt tokenize` a folder of files, `--jobs 2`",
            time_command(make_command(paths["files"], out, "--jobs", "2")),
        )
        add(
            "`gpt tokenize` JSON lines, `--jobs 2`",
            time_command(make_command(paths["lines.jsonl"], out, "--jobs", "2")),
        )
        for jobs in sorted({1, 4, cores} - {2}):
            add(
                f"`gpt tokenize` one file, `--jobs {jobs}`",
                time_command(make_command(paths["one.txt"], out, "--jobs", str(jobs))),
            )
        rates.setdefault("Tokenizers, batch, all cores", []).append(transformers_tokenizers(data))
    table_rows = speed_rows(size, rates)
    size, rates = paths["large.txt"].stat().st_size / 1e6, {}
    for _ in range(ROUNDS):
        add_tiktoken_and_ours(paths["large.txt"])
    columns = ["corpus", "system", "MB/s", "ratio to tiktoken, whole", "ratio to its encoding"]
    return Table(columns, table_rows + speed_rows(size, rates))


def measure_memory(paths: dict[str, Path], out: Path) -> Table:
    """Measures the peak memory of the largest process for corpora of different sizes."""
    table_rows = []
    for name, path in paths.items():
        files = list(path.iterdir()) if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files) / 1e6
        peak = peak_memory(make_command(path, out, "--jobs", "2"))
        table_rows.append([name, f"{size:,.0f} MB", f"{peak:,.0f} MB"])
    return Table(["text", "size", "peak memory of the largest process"], table_rows)


def checksum(folder: Path) -> str:
    """Returns a checksum of all files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def kill_and_resume(text: Path, out: Path) -> str:
    """Kills and resumes `gpt tokenize` at random moments, and compares the output with an uninterrupted run."""
    seconds = time_command(make_command(text, out, "--jobs", "2"))
    expected = checksum(out)
    equal = finished_groups = 0
    rng = random.Random(0)
    for _ in range(KILLS):
        shutil.rmtree(out)
        command = [str(SCRIPTS / "gpt"), "tokenize", str(text), "-o", str(out), "--tokenizer", "gpt2", "-q", "--resume"]
        process = subprocess.Popen([*command, "--jobs", "2"])
        time.sleep(rng.uniform(0.1, 0.95) * seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        finished_groups += len({path.name.split("-", 1)[1] for path in out.glob("*.ids")}) if out.exists() else 0
        subprocess.run([*command, "--jobs", "2"], check=True)
        equal += checksum(out) == expected
    return (
        f"Killed (SIGKILL) at {KILLS} random moments and resumed: {equal} of {KILLS} results have the same bytes as an "
        f"uninterrupted run. On average {finished_groups / KILLS:.1f} groups were finished at the kill and reused."
    )


def main() -> None:
    """Measures and writes the section."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(cache_dir() / "tiktoken"))
    gpt2_tokenizer()
    with tempfile.TemporaryDirectory() as place:
        data, paths = make_corpora(Path(place), folder)
        out = Path(place) / "out"
        count = len(data)
        tables = [measure_throughput(data, paths, out), measure_memory(paths, out)]
        notes = [
            f"GPT-2's vocabulary; {count:,} texts of {CORPUS_BYTES / 1e6:.0f} MB, and the same texts repeated to a "
            "gigabyte.",
            f"Medians of {ROUNDS} rounds; the systems take turns. `gpt tokenize` is the whole command, down to synced "
            "shards.",
            kill_and_resume(paths["one.txt"], out),
        ]
    packages = ["tiktoken", "tokenizers"]
    write_section("tokenize", measured("Tokenizing", "python -m benchmarks.tokenize", notes, tables, packages))


if __name__ == "__main__":
    main()
