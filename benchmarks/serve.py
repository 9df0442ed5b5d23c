"""Measures `gpt serve`: throughput and latency compared with other servers, equality with `gpt sample`, memory.

    python -m benchmarks.serve RUN                  throughput, latency and equality, in a few minutes
    python -m benchmarks.serve RUN --dtypes int8    throughput in other dtypes
    python -m benchmarks.serve RUN --exact          equality of mixed requests with `gpt sample`
    python -m benchmarks.serve RUN --soak MINUTES   memory under mixed load with clients that disconnect

RUN is a trained model. Servers take turns, by default in float32 on one thread. llama.cpp needs the extra `interop`,
`transformers serve` needs transformers[serving].
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import pydoc_data.topics
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

from benchmarks.results import ROOT, SCRIPTS, Table, measured, write_section
from gpt import api
from gpt.errors import UserError
from gpt.runs import folder
from gpt.sample_config import SampleConfig

CLIENTS = (1, 8, 32)
TOKENS = 64  # generated tokens per timed request
REQUESTS, CONNECTIONS = 1000, 64
LONG = 1000  # tokens of the long prompt that delays short requests
CHUNK = 128  # chunk of the prefill in tokens, as in gpt/serve/worker.py
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}

Content = tuple[list[str], list[Table]]  # notes and tables of a section


@dataclass
class Reply:
    """A response: its texts, and the arrival of chunks in seconds since the request."""

    status: int
    texts: dict[int, str] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # one per chunk with text


@dataclass(frozen=True)
class Target:
    """A running server."""

    port: int
    model: str
    pid: int
    extra: dict[str, Any]  # additional request fields


async def ask(target: Target, body: dict[str, Any], leave_after: float | None = None) -> Reply:
    """Sends a request over a new connection; disconnects after ``leave_after`` seconds."""
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
    """Returns an unused port."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running(words: Sequence[str], port: int, model: str, **extra: Any) -> Iterator[Target]:
    """Runs a server during the block. Raises `RuntimeError` if it does not answer within three minutes."""
    with tempfile.TemporaryFile() as log:
        one = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, **one}, stdin=subprocess.PIPE, stdout=log, stderr=log
        )
        try:
            target = Target(port, model, process.pid, extra)
            if not asyncio.run(_answers(process, target)):
                log.seek(0)
                lines = log.read().decode("utf-8", "replace").strip().splitlines()
                raise RuntimeError(lines[-1] if lines else "no answer")
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
    """Runs `gpt serve`."""
    port = free_port()
    words = [str(SCRIPTS / "gpt"), "serve", "-m", str(run), "--port", str(port), "--name", "it", "--dtype", dtype]
    words += ["--threads", str(threads), "--max-batch", str(batch), "--queue", "200", "--defaults", "openai"]
    words += ["--compile", compile]
    return running(words, port, "it", ignore_eos=True)


def llama_cpp(run: Path, place: Path, dtype: str, threads: int) -> contextlib.AbstractContextManager[Target]:
    """Runs llama.cpp's server with the exported model and one slot per client."""
    port, kind = free_port(), {"float32": "f32", "int8": "q8_0", "int4": "q4_0"}[dtype]
    path = place / f"{kind}.gguf"
    if not path.exists():
        words = [SCRIPTS / "gpt", "export", "-m", str(run), "-o", str(path), "--dtype", kind]
        subprocess.run(words, check=True, capture_output=True)
    words = [sys.executable, "-m", "benchmarks.llama_server", str(path), "--threads", str(threads)]
    words += ["--clients", str(max(CLIENTS)), "--port", str(port)]
    return running(words, port, "it", ignore_eos=True)


def transformers(run: Path, batches: bool) -> contextlib.AbstractContextManager[Target]:
    """Runs `transformers serve` with the same checkpoint."""
    port, path = free_port(), str(folder.find_checkpoint(str(run)).absolute())
    start = "from transformers.cli.transformers import main; main()"
    words = [sys.executable, "-c", start, "serve", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    return running([*words, *(["--continuous-batching"] if batches else [])], port, path)


# Throughput and time to first token


def speed(target: Target, clients: int, prompts: Sequence[str]) -> tuple[float, float]:
    """Sends concurrent requests; returns chunks (tokens) per second and the median time to first token."""

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
) -> Content:
    """Compares the servers in turn; `transformers serve` only in float32 on one thread."""
    rates: dict[str, dict[int, list[tuple[float, float]]]] = {}
    skipped: dict[str, str] = {}
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
        except Exception as error:  # a peer's server may fail in any way
            skipped[name] = f"{name} was not measured: {type(error).__name__}: {str(error)[:200]}"
    rows = []
    for name, of_one in rates.items():
        for clients, found in of_one.items():
            rate, first = (statistics.median(values) for values in zip(*found, strict=True))
            times = statistics.median(many[0] / one[0] for many, one in zip(found, of_one[1], strict=True))
            rows.append([name, str(clients), f"{rate:,.0f}", f"{times:.1f}", f"{1000 * first:,.0f}"])
    columns = ["server", "clients", "tokens/s", "speedup over one client", "first token, ms"]
    notes = [
        f"Each client asks for {TOKENS} tokens, greedily, after a prompt of 8 words.",
        f"Servers have {threads} thread{'s' * (threads > 1)} each.",
        f"Medians of {rounds} rounds; the servers take turns.",
    ]
    return [*notes, *skipped.values()], [Table(columns, rows)]


# Short requests during a long prefill


def random_run(place: Path) -> Path:
    """Writes an almost untrained model with a long context."""
    text = place / "text.txt"
    text.write_text("the cat sat on the mat while it was raining in the town; " * 400)
    api.train(
        text, out=str(place / "run"), steps=1, block_size=1024, n_layer=8, n_head=8, n_embd=256, vocab_size=270,
        dtype="float32", batch_tokens=1024, sample_every=0,
    )  # fmt: skip
    return place / "run"


async def delayed_by_a_long_prompt(target: Target, rng: random.Random) -> tuple[float, float, float, float]:
    """Returns four latencies in seconds: the time to first token of a short prompt, of a long prompt, and of a short
    prompt during a long prefill, and the longest pause of a stream during a long prefill."""

    def body(length: int, tokens: int = 1) -> dict[str, Any]:
        ids = [rng.randrange(32, 120) for _ in range(length)]
        return {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}

    short = (await ask(target, body(16))).times[0]
    long = (await ask(target, body(LONG))).times[0]
    other = asyncio.create_task(ask(target, body(LONG)))
    await asyncio.sleep(rng.uniform(0.1, 0.6) * long)  # a random moment of the prefill
    during = (await ask(target, body(16))).times[0]
    await other
    text = asyncio.create_task(ask(target, body(16, 100)))
    await asyncio.sleep(5 * short)
    await ask(target, body(LONG))
    times = (await text).times
    return short, long, during, max(b - a for a, b in itertools.pairwise(times))


def first_tokens(place: Path) -> Table:
    """Measures short requests during a long prefill."""
    rng = random.Random(0)

    async def rounds(target: Target) -> list[tuple[float, float, float, float]]:
        await delayed_by_a_long_prompt(target, rng)
        return [await delayed_by_a_long_prompt(target, rng) for _ in range(15)]

    with ours(random_run(place), 8) as target:
        found = asyncio.run(rounds(target))
    short, long, during, pause = (statistics.median(values) for values in zip(*found, strict=True))
    chunk = long / -(-LONG // CHUNK)
    rows = [
        ["first token after 16 tokens", short],
        [f"first token after {LONG:,} tokens", long],
        [f"first token after 16 tokens, during a prompt of {LONG:,}", during],
        ["bound on this: twice the first line, and a chunk", 2 * short + chunk],
        [f"longest pause of a running text during a prompt of {LONG:,}", pause],
    ]
    caption = f"Latency of a model of 8 layers of width 256, which reads prompts in chunks of {CHUNK} tokens:"
    return Table(["latency", "ms"], [[name, f"{1000 * seconds:.0f}"] for name, seconds in rows], caption)


# Mixed load


def mixed(rng: random.Random, seed: int, prompts: Sequence[str]) -> dict[str, Any]:
    """Returns a random request."""
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
    """Sends the requests from `CONNECTIONS` concurrent clients, which disconnect after ``leave(index)`` seconds."""
    left = iter(enumerate(bodies))
    replies: dict[int, Reply] = {}

    async def client() -> None:
        for at, body in left:
            replies[at] = await ask(target, body, leave(at))

    clients: list[Coroutine[Any, Any, None]] = [client() for _ in range(CONNECTIONS)]
    await asyncio.gather(*clients)
    return [replies[at] for at in range(len(bodies))]


def exact(run: Path, prompts: Sequence[str]) -> list[str]:
    """Compares the texts of mixed concurrent requests with `gpt sample`."""
    rng = random.Random(1)
    bodies = [mixed(rng, seed, prompts) for seed in range(REQUESTS)]
    leaving = {at for at in range(REQUESTS) if rng.random() < 0.1}
    with ours(run, 16, compile="off") as target:
        began = time.perf_counter()
        replies = asyncio.run(load_with(target, bodies, lambda at: 0.05 if at in leaving else None))
        seconds = time.perf_counter() - began
    model = api.load(run, dtype="float32", threads=1, sampling=SampleConfig(compile="off"))
    lost = [at for at, reply in enumerate(replies) if reply.status != 200 and at not in leaving]
    answered = [at for at, reply in enumerate(replies) if reply.status == 200]
    differ = [
        at for at in answered if list(dict(sorted(replies[at].texts.items())).values()) != expected(model, bodies[at])
    ]
    note = (
        f"{REQUESTS:,} mixed requests over {CONNECTIONS} connections in {seconds:.0f} s; "
        f"{REQUESTS - len(answered) - len(lost)} clients disconnected. {len(lost)} requests were lost, and "
        f"{len(answered) - len(differ)} of {len(answered)} texts equal those of `gpt sample` in float32."
    )
    return [note, *(f"DIFFERENT: {json.dumps(bodies[at])}" for at in differ)]


def expected(model: api.LanguageModel, body: dict[str, Any]) -> list[str]:
    """Returns the texts of `gpt sample`."""
    own = ("prompt", "seed", "n", "stream", "ignore_eos")
    settings = {"temperature": 1.0, **{key: value for key, value in body.items() if key not in own}}
    settings |= {"json_schema": json.dumps(SCHEMA)} if "json_schema" in settings else {}
    config = SampleConfig(**settings, ignore_eot=body.get("ignore_eos", False))
    pieces = model.write_all([body["prompt"]], config, body["seed"], body["n"])
    return [piece.sample.text for piece in pieces if piece.sample is not None]


def soak(run: Path, prompts: Sequence[str], minutes: float) -> list[str]:
    """Measures the memory of a server under mixed load with disconnecting clients."""
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
        f"{minutes:g} minutes of mixed requests ({count:,}); a quarter of the clients disconnect within a second.",
        f"Memory: {first / 2**20:.1f} MiB after the first minute, {last / 2**20:.1f} MiB at the end "
        f"({100 * (last / first - 1):+.1f} %), with {threads} threads and {files} open files.",
    ]


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--soak", type=float, metavar="MINUTES")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--dtypes", choices=["float32", "int8", "int4"], nargs="+", default=["float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--title", help="title of the section on throughput")
    parser.add_argument("--print", action="store_true", help="print the section instead of writing it")
    asked = parser.parse_args()
    run, rng = Path(asked.run).absolute(), random.Random(0)
    words = "\n".join(pydoc_data.topics.topics.values()).split()
    prompts = [" ".join(words[at : at + 8]) for at in rng.sample(range(len(words) - 8), 200)]
    command = "python -m benchmarks.serve RUN"
    content: Content
    if asked.soak:
        command += f" --soak {asked.soak:g}"
        title, content = "Serving: memory over time", (soak(run, prompts, asked.soak), [])
    elif asked.exact:
        command += " --exact"
        title, content = "Serving: equality", (exact(run, prompts), [])
    else:
        other = asked.dtypes != ["float32"] or asked.threads > 1
        command += f" --dtypes {' '.join(asked.dtypes)} --threads {asked.threads}" if other else ""
        title = asked.title or (f"Serving: {asked.threads} threads" if other else "Serving")
        with tempfile.TemporaryDirectory() as place:
            notes, tables = compare(run, prompts, Path(place), asked.dtypes, asked.threads, asked.rounds)
            content = notes, tables
            if not other:
                content = [*notes, *exact(run, prompts)], [*tables, first_tokens(Path(place))]
    section = measured(title, command, *content)
    if asked.print:
        print(section)
    else:
        write_section("serve", section)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"{error.message}\n{error.hint}")
