"""Compares the speed of `gpt serve` with llama.cpp's server: the same GGUF files, threads and ids.

    python -m benchmarks.decode MODEL                          one text, 8 and 32 texts, and reading a prompt
    python -m benchmarks.decode MODEL --only one --threads 1
    python -m benchmarks.decode MODEL --llama build/bin/llama-server

MODEL is any model that `gpt export` reads: a run, a folder, a GGUF file. Without --llama, llama.cpp is the package
`xllamacpp` (extra `interop`). Both servers are ready before the first round, and take turns within it, so other load
slows them equally; ratios are taken within a round. Each figure is the time of requests minus the time of shorter
requests. Prints the section; --record also stores it.
"""

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.decoding_speed import measure_bandwidth
from benchmarks.results import SCRIPTS, Table, measured, write_section
from benchmarks.serve import Server, free_port, run_server, send_request
from gpt.config.device import Compute
from gpt.system.gguf_header import read_header

KINDS = {"float32": "f32", "int8": "q8_0", "int4": "q4_0"}  # GGUF type of each dtype
SHORT = 32  # prompt tokens of every request, except for reading a prompt


@dataclass(frozen=True)
class Part:
    """Concurrent requests of ``clients``, each with a prompt of ``prompt`` tokens and ``new`` tokens to generate."""

    title: str
    clients: int
    prompt: int
    new: int

    @property
    def tokens(self) -> int:
        """The number of timed tokens: those that requests of `SHORT` prompt tokens and one new token don't have."""
        return self.clients * (self.prompt - SHORT + self.new - 1)


def make_parts(prompt: int, new: int) -> dict[str, Part]:
    """Returns the parts by name."""
    return {
        "one": Part("one text", 1, SHORT, new),
        "eight": Part("8 texts", 8, SHORT, max(2, new // 2)),
        "many": Part("32 texts", 32, SHORT, max(2, new // 2)),
        "prompt": Part(f"a prompt of {prompt}", 1, prompt, 1),
    }


def export(model: str, folder: Path, dtype: str) -> Path:
    """Returns the model as a GGUF file."""
    path = folder / f"{KINDS[dtype]}.gguf"
    if not path.exists():
        words = [str(SCRIPTS / "gpt"), "export", "-m", model, "-o", str(path), "--dtype", KINDS[dtype]]
        subprocess.run(words, check=True, capture_output=True)
    return path


@contextmanager
def run_both(path: Path, dtype: str, part: Part, threads: int, llama: Path | None) -> Iterator[dict[str, Server]]:
    """Runs both servers with a slot per client."""
    context, ports = -(-(part.prompt + part.new + 1) // 64) * 64, (free_port(), free_port())
    common_words = ["--port", str(ports[0]), "--threads", str(threads)]
    gpt = [str(SCRIPTS / "gpt"), "serve", "-m", str(path), "--name", "it", "--dtype", dtype, *common_words]
    gpt += ["--max-batch", str(part.clients), "--queue", "100", "--defaults", "openai"]
    common_words[1] = str(ports[1])
    if llama is None:
        words = [sys.executable, "-m", "benchmarks.llama_server", str(path), *common_words]
        words += ["--clients", str(part.clients), "--context", str(context)]
    else:
        words = [str(llama), "-m", str(path), *common_words, "-np", str(part.clients), "--threads-batch", str(threads)]
        words += ["-c", str(part.clients * context), "-ngl", "0", "--no-warmup", "--no-webui"]
    # llama.cpp's default samplers would sort the logits.
    options = {"ignore_eos": True, "cache_prompt": False, "samplers": ["temperature"]}
    with (
        run_server(gpt, ports[0], "it", ignore_eos=True) as ours,
        run_server(words, ports[1], "it", **options) as theirs,
    ):
        yield {"gpt": ours, "llama.cpp": theirs}


def measure_rate(server: Server, part: Part, vocab_size: int, rng: random.Random) -> float:
    """Returns the tokens per second of a part."""

    async def send(prompt: int, new: int) -> float:
        # Random ids share no prefix, so the prefix cache has no effect.
        prompts = [
            rng.choices(range(min(100, vocab_size // 2), vocab_size // 2 + 100), k=prompt) for _ in range(part.clients)
        ]
        bodies = [{"prompt": ids, "max_tokens": new, "temperature": 0, **server.extra} for ids in prompts]
        start_time = time.perf_counter()
        replies = await asyncio.gather(*(send_request(server, body) for body in bodies))
        assert all(reply.status == 200 for reply in replies), replies
        return time.perf_counter() - start_time

    short_seconds = asyncio.run(send(SHORT, 1))
    return part.tokens / (asyncio.run(send(part.prompt, part.new)) - short_seconds)


def describe_llama(llama: Path | None, path: Path) -> str:
    """Returns the instructions that llama.cpp uses, as it prints them."""
    if llama is None:
        import xllamacpp

        return f"xllamacpp {xllamacpp.__version__}, {xllamacpp.get_system_info().strip()}"
    words = [str(llama), "-m", str(path), "--port", str(free_port()), "-c", "64", "-ngl", "0", "-v"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert process.stdout is not None
    lines = (line.strip() for line in process.stdout)
    found = next((line for line in lines if "system_info:" in line or "listening" in line), "")
    process.kill()
    process.wait()
    return f"{llama.name}, {found.partition('system_info:')[2].strip() or 'unknown'}"


def main() -> None:
    """Measures and prints the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", choices=list(KINDS), nargs="+", default=list(KINDS))
    parser.add_argument("--only", choices=list(make_parts(1, 1)), nargs="+", default=list(make_parts(1, 1)))
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt that is read")
    parser.add_argument("--new", type=int, default=128, help="tokens of one text; several texts have half of that")
    parser.add_argument("--llama", type=Path, help="llama.cpp's llama-server")
    parser.add_argument("--folder", type=Path, help="keep the GGUF files here, or use those of an earlier run")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows, rng = [], random.Random(0)
    with tempfile.TemporaryDirectory(prefix="gpt-") as scratch:
        for dtype in args.dtypes:
            path = export(args.model, args.folder or Path(scratch), dtype)
            vocab_size = len(read_header(path).metadata["tokenizer.ggml.tokens"])
            for part in (make_parts(args.prompt, args.new)[name] for name in args.only):
                rates: dict[str, list[float]] = {"gpt": [], "llama.cpp": []}
                with run_both(path, dtype, part, args.threads, args.llama) as servers:
                    bandwidth = measure_bandwidth(Compute(torch.device("cpu"), torch.float32))
                    for at in range(args.rounds + 1):
                        for name, server in [*servers.items()][:: 1 if at % 2 else -1]:
                            rates[name].append(measure_rate(server, part, vocab_size, rng))
                ours, theirs = (times[1:] for times in rates.values())  # The first round is a warm-up.
                ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
                medians = [statistics.median(values) for values in (ours, theirs)]
                steps = medians[0] / part.clients if part.prompt == SHORT else 0
                rows.append([
                    f"{dtype}, {KINDS[dtype].upper()}", part.title, *(f"{rate:,.1f}" for rate in medians),
                    f"{statistics.median(ratios):.2f}", ", ".join(f"{ratio:.2f}" for ratio in ratios),
                    f"{path.stat().st_size * steps / bandwidth:.0%} of {bandwidth / 1e9:.1f}" if steps else "",
                ])  # fmt: skip
                print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
        notes = [
            f"{args.threads} threads. The last column is the share of memory bandwidth, measured just before, that "
            "`gpt` reaches if a step reads the file once.",
            f"llama.cpp: {describe_llama(args.llama, path)}.",
        ]
    columns = [
        "weights",
        "",
        "`gpt`, tokens/s",
        "llama.cpp, tokens/s",
        "ratio",
        "ratio in each round",
        "bandwidth, GB/s",
    ]
    title = f"Decoding compared with llama.cpp: {Path(args.model).stem}, threads: {args.threads}"
    section = measured(title, "python -m benchmarks.decode", notes, [Table(columns, rows)], ["torch", "xllamacpp"])
    print(section)
    if args.record:
        write_section("decode", section)


if __name__ == "__main__":
    main()
