"""Measures `gpt serve`: correctness under load, throughput and first tokens beside other servers, memory over time.

    python -m benchmarks.serve RUN                  writes a section of RESULTS.md, in some minutes
    python -m benchmarks.serve RUN --dtypes int8    throughput in other dtypes, compared with llama.cpp's file types
    python -m benchmarks.serve RUN --exact          only compares mixed requests with `gpt sample`
    python -m benchmarks.serve RUN --soak MINUTES   mixed load with clients that leave: memory at its start and its end

RUN is a trained model. Servers run in processes of their own, in float32 on one thread unless asked otherwise, and take
turns. llama.cpp is measured if the extra `interop` is installed, `transformers serve` if transformers[serving] is.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, SCRIPTS, machine, write_section
from gpt import api
from gpt.errors import UserError
from gpt.runs import folder
from gpt.sample_config import SampleConfig

CLIENTS = (1, 8, 32)
TOKENS = 64  # of each text whose speed is measured
REQUESTS, CONNECTIONS = 1000, 64
LONG = 1000  # tokens of the prompt beside which a short one is timed
CHUNK = 128  # as gpt/serve/worker.py has it
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@dataclass
class Reply:
    """An answer to one request: its texts, and when parts of it came, in seconds since it was asked for."""

    status: int
    texts: dict[int, str] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # of each chunk with text


@dataclass(frozen=True)
class Target:
    """A server that answers at a port, the name by which it knows the model, and its process."""

    port: int
    model: str
    pid: int
    extra: dict[str, Any]  # fields that it takes beside those of all


async def ask(target: Target, body: dict[str, Any], leave_after: float | None = None) -> Reply:
    """Asks for texts over a connection of its own; leaves after so many seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    data = json.dumps({"model": target.model, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\nConnection: close\r\n"
    began = time.perf_counter()
    try:
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        async with asyncio.timeout(leave_after):
            reply = Reply(int((await reader.readline()).split()[1]))
            while (await reader.readline()).strip():
                pass
            if not body.get("stream"):
                _take_whole(reply, await reader.read())
                return reply
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    _take_chunk(reply, json.loads(line[6:]), time.perf_counter() - began)
    except TimeoutError:
        return Reply(0)
    finally:
        writer.close()
    return reply


def _take_whole(reply: Reply, body: bytes) -> None:
    if reply.status == 200:
        found = json.loads(body)
        reply.texts = {choice["index"]: choice["text"] for choice in found["choices"]}


def _take_chunk(reply: Reply, chunk: dict[str, Any], at: float) -> None:
    for choice in chunk.get("choices", ()):
        reply.texts[choice["index"]] = reply.texts.get(choice["index"], "") + (choice.get("text") or "")
        if choice.get("text"):
            reply.times.append(at)


# Servers


def free_port() -> int:
    """Returns a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running(words: Sequence[str], port: int, model: str, **extra: Any) -> Iterator[Target]:
    """Runs a server until the end of the block. Raises `RuntimeError` where it does not answer within three minutes."""
    with tempfile.TemporaryFile() as log:
        one = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, **one}, stdin=subprocess.PIPE, stdout=log, stderr=log
        )
        try:
            target = Target(port, model, process.pid, extra)
            if not asyncio.run(_answers(process, target)):
                log.seek(0)
                said = log.read().decode("utf-8", "replace").strip().splitlines()
                raise RuntimeError(said[-1] if said else "it does not answer")
            yield target
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _answers(process: "subprocess.Popen[bytes]", target: Target) -> bool:
    end = time.monotonic() + 180
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError, IndexError):
            reply = await ask(target, {"prompt": "a", "max_tokens": 1}, leave_after=30)
            if reply.status == 200:
                return True
        await asyncio.sleep(0.2)
    return False


def ours(
    run: Path, batch: int = 32, dtype: str = "float32", threads: int = 1, compile: str = "auto"
) -> contextlib.AbstractContextManager[Target]:
    """`gpt serve`."""
    port = free_port()
    words = [str(SCRIPTS / "gpt"), "serve", "-m", str(run), "--port", str(port), "--name", "it", "--dtype", dtype]
    words += [
        "--threads",
        str(threads),
        "--max-batch",
        str(batch),
        "--queue",
        "200",
        "--defaults",
        "openai",
        "--compile",
        compile,
    ]
    return running(words, port, "it", ignore_eos=True)


def llama_cpp(run: Path, place: Path, dtype: str, threads: int) -> contextlib.AbstractContextManager[Target]:
    """llama.cpp's server with the exported model, one slot per client."""
    port, kind = free_port(), {"float32": "f32", "int8": "q8_0", "int4": "q4_0"}[dtype]
    path = place / f"{kind}.gguf"
    if not path.exists():
        words = [SCRIPTS / "gpt", "export", str(run), "-o", str(path), "--type", kind]
        subprocess.run(words, check=True, capture_output=True)
    words = [sys.executable, "-m", "benchmarks.serve", str(path), "--llama-cpp", str(port), "--threads", str(threads)]
    return running(words, port, "it", ignore_eos=True)


def serve_llama_cpp(path: str, port: int, threads: int) -> None:
    """Serves a .gguf file until standard input ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.port = path, port
    params.n_gpu_layers, params.n_parallel, params.verbosity = 0, max(CLIENTS), 1
    params.n_ctx = max(CLIENTS) * 256
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = params.fit_params = params.ui = False
    server = xllamacpp.Server(params)
    sys.stdin.read()
    del server


def transformers(run: Path, batches: bool) -> contextlib.AbstractContextManager[Target]:
    """`transformers serve` with the same checkpoint."""
    port, path = free_port(), str(folder.find_checkpoint(str(run)).absolute())
    start = "from transformers.cli.transformers import main; main()"
    words = [sys.executable, "-c", start, "serve", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    return running([*words, *(["--continuous-batching"] if batches else [])], port, path)


# Throughput and first tokens


def speed(target: Target, clients: int, prompts: Sequence[str]) -> tuple[float, float]:
    """Returns pieces of text, which are tokens, per second of so many equal requests at once, and the median seconds to
    a first one."""

    async def all_at_once() -> tuple[float, float]:
        asked = {"max_tokens": TOKENS, "temperature": 0, "stream": True, **target.extra}
        bodies = [{"prompt": prompts[at], **asked} for at in range(clients)]
        began = time.perf_counter()
        replies = await asyncio.gather(*(ask(target, body) for body in bodies))
        seconds = time.perf_counter() - began
        return sum(len(reply.times) for reply in replies) / seconds, statistics.median(
            reply.times[0] for reply in replies
        )

    return asyncio.run(all_at_once())


def compare(
    run: Path, prompts: Sequence[str], place: Path, dtypes: Sequence[str], threads: int, rounds: int
) -> list[str]:
    """Returns a table of servers that take turns. transformers' are compared in float32 on one thread."""
    rates: dict[str, dict[int, list[tuple[float, float]]]] = {}
    left_out: dict[str, str] = {}
    servers: dict[str, Callable[[], contextlib.AbstractContextManager[Target]]] = {
        name: server
        for dtype in dtypes
        for name, server in (
            (f"`gpt serve`, {dtype}", functools.partial(ours, run, dtype=dtype, threads=threads)),
            (f"llama.cpp, {dtype}", functools.partial(llama_cpp, run, place, dtype, threads)),
        )
    }
    if list(dtypes) == ["float32"] and threads == 1:
        servers["`transformers serve`"] = functools.partial(transformers, run, batches=False)
        servers["`transformers serve`, continuous batching"] = functools.partial(transformers, run, batches=True)
    for n, (name, manager) in itertools.product(range(rounds), servers.items()):
        try:
            with manager() as target:
                speed(target, max(CLIENTS), prompts)  # warm-up
                for clients in CLIENTS:
                    rates.setdefault(name, {}).setdefault(clients, []).append(speed(target, clients, prompts[n * 40 :]))
        except Exception as error:  # a server of others may fail in any way
            left_out[name] = f"- {name} was not measured: {type(error).__name__}: {str(error)[:200]}"
    lines = [
        "| server | clients | tokens per second | times one client's | median first token, ms |",
        "|---|---|---|---|---|",
    ]
    for name, of_one in rates.items():
        for clients, found in of_one.items():
            rate, first = (statistics.median(values) for values in zip(*found, strict=True))
            times = statistics.median(many[0] / one[0] for many, one in zip(found, of_one[1], strict=True))
            lines.append(f"| {name} | {clients} | {rate:,.0f} | {times:.1f} | {1000 * first:,.0f} |")
    return [*lines, "", *left_out.values()]


# A short request beside a long prompt


def random_run(place: Path) -> Path:
    """Writes an untrained model with a context long enough for a long prompt."""
    text = place / "text.txt"
    text.write_text("the cat sat on the mat while it was raining in the town; " * 400)
    api.train(
        text, out=str(place / "run"), steps=1, block_size=1024, n_layer=8, n_head=8, n_embd=256, vocab_size=270,
        dtype="float32", batch_tokens=1024, sample_every=0,
    )  # fmt: skip
    return place / "run"


async def beside_a_long_prompt(target: Target, rng: random.Random) -> tuple[float, float, float, float]:
    """Returns seconds to the first token of a short request alone, of a long one alone, of a short one beside a long
    one, and the longest pause of a running text beside a long prompt."""

    def body(length: int, tokens: int = 1) -> dict[str, Any]:
        ids = [rng.randrange(32, 120) for _ in range(length)]
        return {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}

    short = (await ask(target, body(16))).times[0]
    long = (await ask(target, body(LONG))).times[0]
    other = asyncio.create_task(ask(target, body(LONG)))
    await asyncio.sleep(rng.uniform(0.1, 0.6) * long)  # at any moment of a chunk
    beside = (await ask(target, body(16))).times[0]
    await other
    text = asyncio.create_task(ask(target, body(16, 100)))
    await asyncio.sleep(5 * short)
    await ask(target, body(LONG))
    times = (await text).times
    return short, long, beside, max(b - a for a, b in itertools.pairwise(times))


def first_tokens(place: Path) -> list[str]:
    """Returns lines about a short request beside a long prompt."""
    rng = random.Random(0)

    async def rounds(target: Target) -> list[tuple[float, float, float, float]]:
        await beside_a_long_prompt(target, rng)
        return [await beside_a_long_prompt(target, rng) for _ in range(15)]

    with ours(random_run(place), 8) as target:
        found = asyncio.run(rounds(target))
    short, long, beside, pause = (statistics.median(values) for values in zip(*found, strict=True))
    chunk = long / -(-LONG // CHUNK)
    return [
        "A model of 8 layers, 256 wide; milliseconds:", "",
        "| first token of 16 tokens alone | beside a prompt that is being read | bound: twice that and a chunk "
        "| longest pause of a running text beside such a prompt |", "|---|---|---|---|",
        f"| {1000 * short:.0f} | {1000 * beside:.0f} | {1000 * (2 * short + chunk):.0f} | {1000 * pause:.0f} |", "",
        f"The prompt has {LONG:,} tokens; alone its first token comes after {1000 * long:.0f} ms, "
        f"{1000 * chunk:.0f} ms per chunk of {CHUNK}.",
    ]  # fmt: skip


# Mixed load


def mixed(rng: random.Random, seed: int, prompts: Sequence[str]) -> dict[str, Any]:
    """Returns a request of any kind."""
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0}, {"temperature": 1.4, "top_k": 30}, {"top_p": 0.8}, {"min_p": 0.05, "ignore_eos": True},
        {"repetition_penalty": 1.3, "no_repeat_ngram": 3}, {"min_tokens": 6}, {"stop": ["a", "the c"]}, {"stop": "ing"},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3}, {"speculate": 4}, {"speculate": 4, "temperature": 0},
        {"regex": "[a-z]+( [a-z]+)*"}, {"choices": ["yes", "no", "maybe"]}, {"json_schema": SCHEMA},
    ]  # fmt: skip
    prompt = rng.choice(prompts) if rng.random() < 0.7 else " ".join(rng.choices(prompts, k=6))
    return {"prompt": prompt, "max_tokens": rng.randint(1, 40), "seed": seed, "n": rng.choice([1, 1, 1, 3]),
            "stream": rng.random() < 0.5, **rng.choice(kinds)}  # fmt: skip


async def load_with(
    target: Target, bodies: Sequence[dict[str, Any]], leave: Callable[[int], float | None]
) -> list[Reply]:
    """Asks for all of them from `CONNECTIONS` clients at once; some leave."""
    left = iter(enumerate(bodies))
    replies: dict[int, Reply] = {}

    async def client() -> None:
        for at, body in left:
            replies[at] = await ask(target, body, leave(at))

    clients: list[Coroutine[Any, Any, None]] = [client() for _ in range(CONNECTIONS)]
    await asyncio.gather(*clients)
    return [replies[at] for at in range(len(bodies))]


def exact(run: Path, prompts: Sequence[str]) -> list[str]:
    """Returns lines about mixed requests at once whose texts are compared with those of `gpt sample`."""
    rng = random.Random(1)
    bodies = [mixed(rng, seed, prompts) for seed in range(REQUESTS)]
    leaving = {at for at in range(REQUESTS) if rng.random() < 0.1}
    with ours(run, 16, compile="off") as target:
        began = time.perf_counter()
        replies = asyncio.run(load_with(target, bodies, lambda at: 0.05 if at in leaving else None))
        seconds = time.perf_counter() - began
    model = api.load(run, dtype="float32", threads=1, sampling=SampleConfig(compile="off"))
    lost = [at for at, reply in enumerate(replies) if reply.status != 200 and at not in leaving]
    told = [at for at, reply in enumerate(replies) if reply.status == 200]
    differ = [
        at for at in told if list(dict(sorted(replies[at].texts.items())).values()) != expected(model, bodies[at])
    ]
    lines = [
        f"{REQUESTS:,} requests of mixed kinds from {CONNECTIONS} connections in {seconds:.0f} s, of which "
        f"{REQUESTS - len(told) - len(lost)} were left by their clients: {len(lost)} lost, "
        f"{len(told) - len(differ)} of {len(told)} equal to `gpt sample` in float32.",
    ]  # fmt: skip
    return [*lines, *(f"- differs: {json.dumps(bodies[at])}" for at in differ)]


def expected(model: api.LanguageModel, body: dict[str, Any]) -> list[str]:
    """Returns the texts of `gpt sample`."""
    own = ("prompt", "seed", "n", "stream", "ignore_eos")
    settings = {"temperature": 1.0, **{key: value for key, value in body.items() if key not in own}}
    settings |= {"json_schema": json.dumps(SCHEMA)} if "json_schema" in settings else {}
    config = SampleConfig(**settings, ignore_eot=body.get("ignore_eos", False))
    pieces = model.write_all([body["prompt"]], config, body["seed"], body["n"])
    return [piece.sample.text for piece in pieces if piece.sample is not None]


def soak(run: Path, prompts: Sequence[str], minutes: float) -> list[str]:
    """Returns lines about the memory of a server under mixed load with clients that leave."""
    import psutil

    rng = random.Random(2)
    with ours(run, 16, compile="off") as target:
        process, began = psutil.Process(target.pid), time.monotonic()
        first, count, at = 0, 0, 0.0
        while (at := time.monotonic() - began) < 60 * minutes:
            bodies = [mixed(rng, seed, prompts) for seed in range(256)]
            replies = asyncio.run(load_with(target, bodies, lambda _: rng.choice([None, None, None, rng.random()])))
            count += len(replies)
            if not first and at > min(60, 20 * minutes):
                first = process.memory_info().rss
                print(f"after {at:.0f} s: {first / 2**20:.1f} MiB", flush=True)
        last = process.memory_info().rss
        threads, files = process.num_threads(), process.num_fds()
    return [
        f"{minutes:g} minutes of mixed requests ({count:,}), of which a quarter is left by its client within a second: "
        f"{first / 2**20:.1f} MiB after the first minute, {last / 2**20:.1f} MiB at the end "
        f"({100 * (last / first - 1):+.1f} %), with {threads} threads and {files} open files.",
    ]  # fmt: skip


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--soak", type=float, metavar="MINUTES")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--dtypes", choices=["float32", "int8", "int4"], nargs="+", default=["float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-cpp", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--print", action="store_true", help="print, and leave RESULTS.md as it is")
    asked = parser.parse_args()
    if asked.llama_cpp:
        serve_llama_cpp(asked.run, asked.llama_cpp, asked.threads)
        return
    run, rng = Path(asked.run).absolute(), random.Random(0)
    words = (ROOT / "docs" / "generate.md").read_text(encoding="utf-8").split()
    prompts = [" ".join(words[at : at + 8]) for at in rng.sample(range(len(words) - 8), 200)]
    how = " ".join(["python -m benchmarks.serve RUN", *(["--soak", f"{asked.soak:g}"] if asked.soak else [])])
    if asked.soak:
        title, lines = "Serving: memory over time", soak(run, prompts, asked.soak)
    elif asked.exact:
        title, lines = "Serving: equality", exact(run, prompts)
    elif asked.dtypes != ["float32"] or asked.threads > 1:
        title = f"Serving: {asked.threads} threads"
        with tempfile.TemporaryDirectory() as place:
            lines = compare(run, prompts, Path(place), asked.dtypes, asked.threads, asked.rounds)
        lines = [f"Each client asks for {TOKENS} tokens, greedily, after a prompt of 8 words.", "", *lines]
    else:
        title = "Serving"
        with tempfile.TemporaryDirectory() as place:
            lines = compare(run, prompts, Path(place), asked.dtypes, asked.threads, asked.rounds)
            lines += [*first_tokens(Path(place)), "", *exact(run, prompts)]
        lines = [f"Each client asks for {TOKENS} tokens, greedily, after a prompt of 8 words.", "", *lines]
    if asked.print:
        print("\n".join(lines))
    else:
        write_section(title, [*machine(how), "", *lines])


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"{error.message}\n{error.hint}")
