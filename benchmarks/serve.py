"""Measures `gpt serve`: throughput and latency compared with other servers, equality with `gpt sample`, memory.

    python -m benchmarks.serve RUN                  throughput, latency and equality, in a few minutes
    python -m benchmarks.serve RUN --dtypes int8    throughput in other dtypes
    python -m benchmarks.serve RUN --exact          equality of mixed requests with `gpt sample`
    python -m benchmarks.serve MODEL --soak MINUTES   memory under mixed load, with chats and tools if MODEL has a chat
                                                    template, and with clients that disconnect

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
from gpt.config.sample import SampleConfig
from gpt.runs import checkpoint, folder
from gpt.system.errors import UserError

CLIENTS = (1, 8, 32)
TOKENS = 64  # tokens generated per timed request
REQUESTS, CONNECTIONS = 1000, 64
LONG_PROMPT_TOKENS = 1000  # length of the prompt that delays short requests
CHUNK = 128  # tokens per prefill chunk, as in gpt/serve/worker.py
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": {**SCHEMA, "required": required}},
    }
    for name, required in (("birthday", ["age"]), ("search", []))
]

Content = tuple[list[str], list[Table]]  # notes and tables of a section


@dataclass
class Reply:
    """A response."""

    status: int
    texts: dict[int, str] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # seconds from the request to each chunk with text


@dataclass(frozen=True)
class Server:
    """A running server."""

    port: int
    model: str
    pid: int
    extra: dict[str, Any]  # additional request fields


async def send_request(server: Server, body: dict[str, Any], leave_after: float | None = None) -> Reply:
    """Sends a request over a new connection; disconnects after ``leave_after`` seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    data = json.dumps({"model": server.model, **body}).encode()
    route = "chat/completions" if "messages" in body else "completions"
    head = f"POST /v1/{route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\nConnection: close\r\n"
    start_time = time.perf_counter()
    try:
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        async with asyncio.timeout(leave_after):
            reply = Reply(int((await reader.readline()).split()[1]))
            while (await reader.readline()).strip():
                pass
            if not body.get("stream"):
                _read_response(reply, await reader.read())
                return reply
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    _read_chunk(reply, json.loads(line[6:]), time.perf_counter() - start_time)
    except TimeoutError:
        return Reply(0)
    finally:
        writer.close()
    return reply


def _read_response(reply: Reply, body: bytes) -> None:
    if reply.status == 200:
        response = json.loads(body)
        reply.texts = {choice["index"]: choice.get("text", "") for choice in response["choices"]}


def _read_chunk(reply: Reply, chunk: dict[str, Any], at: float) -> None:
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
def run_server(words: Sequence[str], port: int, model: str, **extra: Any) -> Iterator[Server]:
    """Runs a server during the block. Raises `RuntimeError` if the server does not answer within three minutes."""
    with tempfile.TemporaryFile() as log:
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=log, stderr=log
        )
        try:
            server = Server(port, model, process.pid, extra)
            if not asyncio.run(_wait_until_ready(process, server)):
                log.seek(0)
                lines = log.read().decode("utf-8", "replace").strip().splitlines()
                raise RuntimeError(lines[-1] if lines else "no answer")
            yield server
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _wait_until_ready(process: "subprocess.Popen[bytes]", server: Server) -> bool:
    end = time.monotonic() + 180
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError, IndexError):
            reply = await send_request(server, {"prompt": "a", "max_tokens": 1}, leave_after=30)
            if reply.status == 200:
                return True
        await asyncio.sleep(0.2)
    return False


def run_gpt(
    run: Path, batch: int = 32, dtype: str = "float32", threads: int = 1
) -> contextlib.AbstractContextManager[Server]:
    """Runs `gpt serve`."""
    port = free_port()
    words = [str(SCRIPTS / "gpt"), "serve", "-m", str(run), "--port", str(port), "--name", "it", "--dtype", dtype]
    words += ["--threads", str(threads), "--max-batch", str(batch), "--queue", "200", "--defaults", "openai"]
    return run_server(words, port, "it", ignore_eos=True)


def run_llama_cpp(run: Path, place: Path, dtype: str, threads: int) -> contextlib.AbstractContextManager[Server]:
    """Runs llama.cpp's server with the exported model and one slot per client."""
    port, kind = free_port(), {"float32": "f32", "int8": "q8_0", "int4": "q4_0"}[dtype]
    path = place / f"{kind}.gguf"
    if not path.exists():
        words = [SCRIPTS / "gpt", "export", "-m", str(run), "-o", str(path), "--dtype", kind]
        subprocess.run(words, check=True, capture_output=True)
    words = [sys.executable, "-m", "benchmarks.llama_server", str(path), "--threads", str(threads)]
    words += ["--clients", str(max(CLIENTS)), "--port", str(port)]
    return run_server(words, port, "it", ignore_eos=True)


def run_transformers(run: Path, batches: bool) -> contextlib.AbstractContextManager[Server]:
    """Runs `transformers serve` with the same checkpoint."""
    port, path = free_port(), str(folder.find_checkpoint(str(run)).absolute())
    start = "from transformers.cli.transformers import main; main()"
    words = [sys.executable, "-c", start, "serve", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    return run_server([*words, *(["--continuous-batching"] if batches else [])], port, path)


# Throughput and time to first token


def measure_speed(server: Server, clients: int, prompts: Sequence[str]) -> tuple[float, float]:
    """Sends concurrent requests; returns tokens per second (a chunk is a token) and the median time to first token."""

    async def send_concurrently() -> tuple[float, float]:
        request_options = {"max_tokens": TOKENS, "temperature": 0, "stream": True, **server.extra}
        bodies = [{"prompt": prompts[at], **request_options} for at in range(clients)]
        start_time = time.perf_counter()
        replies = await asyncio.gather(*(send_request(server, body) for body in bodies))
        seconds = time.perf_counter() - start_time
        return sum(len(reply.times) for reply in replies) / seconds, statistics.median(
            reply.times[0] for reply in replies
        )

    return asyncio.run(send_concurrently())


def compare(
    run: Path, prompts: Sequence[str], place: Path, dtypes: Sequence[str], threads: int, rounds: int
) -> Content:
    """Measures the servers in turn. Includes `transformers serve` only in float32 on one thread."""
    measurements: dict[str, dict[int, list[tuple[float, float]]]] = {}
    skipped: dict[str, str] = {}
    servers: dict[str, Callable[[], contextlib.AbstractContextManager[Server]]] = {
        name: server
        for dtype in dtypes
        for name, server in (
            (f"`gpt serve`, {dtype}", functools.partial(run_gpt, run, dtype=dtype, threads=threads)),
            (f"llama.cpp, {dtype}", functools.partial(run_llama_cpp, run, place, dtype, threads)),
        )
    }
    if list(dtypes) == ["float32"] and threads == 1:
        servers["`transformers serve`"] = functools.partial(run_transformers, run, batches=False)
        servers["`transformers serve`, continuous batching"] = functools.partial(run_transformers, run, batches=True)
    for n, (name, manager) in itertools.product(range(rounds), servers.items()):
        try:
            with manager() as target:
                measure_speed(target, max(CLIENTS), prompts)  # warm-up
                for clients in CLIENTS:
                    measurements.setdefault(name, {}).setdefault(clients, []).append(
                        measure_speed(target, clients, prompts[n * 40 :])
                    )
        except Exception as error:  # Other servers can fail in any way.
            skipped[name] = f"{name} was not measured: {type(error).__name__}: {str(error)[:200]}"
    rows = []
    for name, server_measurements in measurements.items():
        for clients, samples in server_measurements.items():
            rate, first = (statistics.median(values) for values in zip(*samples, strict=True))
            speedup = statistics.median(
                sample[0] / single[0] for sample, single in zip(samples, server_measurements[1], strict=True)
            )
            rows.append([name, str(clients), f"{rate:,.0f}", f"{speedup:.1f}", f"{1000 * first:,.0f}"])
    columns = ["server", "clients", "tokens/s", "speedup over one client", "first token, ms"]
    notes = [
        f"Each client asks for {TOKENS} tokens, greedily, after a prompt of 8 words.",
        f"Servers have {threads} thread{'s' * (threads > 1)} each.",
        f"Medians of {rounds} rounds; the servers take turns.",
    ]
    return [*notes, *skipped.values()], [Table(columns, rows)]


# Short requests during a long prefill


def make_random_run(place: Path) -> Path:
    """Writes an almost untrained model with a long context."""
    text = place / "text.txt"
    text.write_text("the cat sat on the mat while it was raining in the town; " * 400)
    api.train(
        text, out=str(place / "run"), steps=1, block_size=1024, n_layer=8, n_head=8, n_embd=256, vocab_size=270,
        dtype="float32", batch_tokens=1024, sample_every=0,
    )  # fmt: skip
    return place / "run"


async def measure_prefill_latency(server: Server, rng: random.Random) -> tuple[float, float, float, float]:
    """Returns four latencies in seconds. Three are times to first token: of a short prompt, of a long prompt, and of a
    short prompt during a long prefill. The fourth is the longest pause of a stream during a long prefill."""

    def body(length: int, tokens: int = 1) -> dict[str, Any]:
        ids = [rng.randrange(32, 120) for _ in range(length)]
        return {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}

    short = (await send_request(server, body(16))).times[0]
    long_seconds = (await send_request(server, body(LONG_PROMPT_TOKENS))).times[0]
    long_request = asyncio.create_task(send_request(server, body(LONG_PROMPT_TOKENS)))
    await asyncio.sleep(rng.uniform(0.1, 0.6) * long_seconds)  # The prefill is running.
    short_during_prefill = (await send_request(server, body(16))).times[0]
    await long_request
    stream = asyncio.create_task(send_request(server, body(16, 100)))
    await asyncio.sleep(5 * short)
    await send_request(server, body(LONG_PROMPT_TOKENS))
    times = (await stream).times
    return short, long_seconds, short_during_prefill, max(b - a for a, b in itertools.pairwise(times))


def prefill_table(place: Path) -> Table:
    """Measures short requests during a long prefill."""
    rng = random.Random(0)

    async def rounds(server: Server) -> list[tuple[float, float, float, float]]:
        await measure_prefill_latency(server, rng)
        return [await measure_prefill_latency(server, rng) for _ in range(15)]

    with run_gpt(make_random_run(place), 8) as server:
        latencies = asyncio.run(rounds(server))
    short_seconds, long_seconds, short_during_prefill, pause = (
        statistics.median(values) for values in zip(*latencies, strict=True)
    )
    chunk = long_seconds / -(-LONG_PROMPT_TOKENS // CHUNK)
    rows = [
        ["first token after 16 tokens", short_seconds],
        [f"first token after {LONG_PROMPT_TOKENS:,} tokens", long_seconds],
        [f"first token after 16 tokens, during a prompt of {LONG_PROMPT_TOKENS:,}", short_during_prefill],
        ["bound on this: twice the first line, and a chunk", 2 * short_seconds + chunk],
        [f"longest pause of a running text during a prompt of {LONG_PROMPT_TOKENS:,}", pause],
    ]
    caption = f"Latency of a model of 8 layers of width 256, which reads prompts in chunks of {CHUNK} tokens:"
    return Table(["latency", "ms"], [[name, f"{1000 * seconds:.0f}"] for name, seconds in rows], caption)


# Mixed load


def random_request(rng: random.Random, seed: int, prompts: Sequence[str], chats: bool = False) -> dict[str, Any]:
    """Returns a random request: a completion or, with ``chats``, perhaps a chat."""
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0}, {"temperature": 1.4, "top_k": 30}, {"top_p": 0.8}, {"min_p": 0.05, "ignore_eos": True},
        {"repetition_penalty": 1.3, "no_repeat_ngram": 3}, {"min_tokens": 6}, {"stop": ["a", "the c"]}, {"stop": "ing"},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"regex": "[a-z]+( [a-z]+)*"}, {"choices": ["yes", "no", "maybe"]}, {"json_schema": SCHEMA},
    ]  # fmt: skip
    prompt = rng.choice(prompts) if rng.random() < 0.7 else " ".join(rng.choices(prompts, k=6))
    text: dict[str, Any] = {"prompt": prompt}
    if chats and rng.random() < 0.5:
        text = {"messages": [{"role": "user", "content": prompt}]}
        kinds = [
            *kinds[:6],
            {"tools": TOOLS},
            {"tools": TOOLS, "tool_choice": "required"},
            {"reasoning_effort": "none"},
        ]
    return {**text, "max_tokens": rng.randint(1, 40), "seed": seed, "n": rng.choice([1, 1, 1, 3]),
            "stream": rng.random() < 0.5, **rng.choice(kinds)}  # fmt: skip


async def send_requests(
    server: Server, bodies: Sequence[dict[str, Any]], leave: Callable[[int], float | None]
) -> list[Reply]:
    """Sends the requests from `CONNECTIONS` concurrent clients, which disconnect after ``leave(index)`` seconds."""
    remaining = iter(enumerate(bodies))
    replies: dict[int, Reply] = {}

    async def client() -> None:
        for at, body in remaining:
            replies[at] = await send_request(server, body, leave(at))

    clients: list[Coroutine[Any, Any, None]] = [client() for _ in range(CONNECTIONS)]
    await asyncio.gather(*clients)
    return [replies[at] for at in range(len(bodies))]


def check_equality(run: Path, prompts: Sequence[str]) -> list[str]:
    """Compares the texts of mixed concurrent requests with `gpt sample`."""
    rng = random.Random(1)
    bodies = [random_request(rng, seed, prompts) for seed in range(REQUESTS)]
    disconnecting = {at for at in range(REQUESTS) if rng.random() < 0.1}
    with run_gpt(run, 16) as server:
        start_time = time.perf_counter()
        replies = asyncio.run(send_requests(server, bodies, lambda at: 0.05 if at in disconnecting else None))
        seconds = time.perf_counter() - start_time
    model = api.load(run, dtype="float32", threads=1, for_decoding=True)
    failed = [at for at, reply in enumerate(replies) if reply.status != 200 and at not in disconnecting]
    answered = [at for at, reply in enumerate(replies) if reply.status == 200]
    different = [
        at
        for at in answered
        if list(dict(sorted(replies[at].texts.items())).values()) != sample_texts(model, bodies[at])
    ]
    note = (
        f"{REQUESTS:,} mixed requests over {CONNECTIONS} connections in {seconds:.0f} s; "
        f"{REQUESTS - len(answered) - len(failed)} clients disconnected. {len(failed)} requests were lost, and "
        f"{len(answered) - len(different)} of {len(answered)} texts equal those of `gpt sample` in float32."
    )
    return [note, *(f"DIFFERENT: {json.dumps(bodies[at])}" for at in different)]


def sample_texts(model: api.LanguageModel, body: dict[str, Any]) -> list[str]:
    """Returns the texts that `gpt sample` generates."""
    request_fields = ("prompt", "seed", "n", "stream", "ignore_eos")
    settings = {"temperature": 1.0, **{key: value for key, value in body.items() if key not in request_fields}}
    settings |= {"json_schema": json.dumps(SCHEMA)} if "json_schema" in settings else {}
    config = SampleConfig(**settings, ignore_eot=body.get("ignore_eos", False))
    pieces = model.write_all([body["prompt"]], config, body["seed"], body["n"])
    return [piece.sample.text for piece in pieces if piece.sample is not None]


def measure_memory(run: Path, prompts: Sequence[str], minutes: float, dtype: str) -> list[str]:
    """Measures the memory of a server under mixed load with disconnecting clients."""
    import psutil

    rng, chats = random.Random(2), checkpoint.peek(folder.find_checkpoint(str(run)))[1].chat_template is not None
    with run_gpt(run, 16, dtype) as server:
        process, start_time = psutil.Process(server.pid), time.monotonic()
        first_memory, count, elapsed = 0, 0, 0.0
        while (elapsed := time.monotonic() - start_time) < 60 * minutes:
            bodies = [random_request(rng, seed, prompts, chats) for seed in range(CONNECTIONS)]
            replies = asyncio.run(send_requests(server, bodies, lambda _: rng.choice([None, None, None, rng.random()])))
            count += len(replies)
            if not first_memory and elapsed > min(60, 20 * minutes):
                first_memory = process.memory_info().rss
                print(f"after {elapsed:.0f} s: {first_memory / 2**20:.1f} MiB", flush=True)
        last_memory = process.memory_info().rss
        threads, files = process.num_threads(), process.num_fds()
    kinds = "mixed requests, half of them chats" if chats else "mixed requests"
    return [
        f"{minutes:g} minutes of {kinds} ({count:,}); a quarter of the clients disconnect within a second.",
        f"Memory: {first_memory / 2**20:.1f} MiB after the first minute, {last_memory / 2**20:.1f} MiB at the end "
        f"({100 * (last_memory / first_memory - 1):+.1f} %), with {threads} threads and {files} open files.",
    ]


def main() -> None:
    """Runs the measurements that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--soak", type=float, metavar="MINUTES")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--dtypes", choices=["float32", "int8", "int4"], nargs="+", default=["float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--title", help="title of the section on throughput")
    parser.add_argument("--print", action="store_true", help="print the section instead of writing it")
    args = parser.parse_args()
    run, rng = Path(args.run).absolute(), random.Random(0)
    words = "\n".join(pydoc_data.topics.topics.values()).split()
    prompts = [" ".join(words[at : at + 8]) for at in rng.sample(range(len(words) - 8), 200)]
    command = "python -m benchmarks.serve RUN"
    content: Content
    if args.soak:
        command += f" --soak {args.soak:g}"
        title, content = "Serving: memory over time", (measure_memory(run, prompts, args.soak, args.dtypes[0]), [])
    elif args.exact:
        command += " --exact"
        title, content = "Serving: equality", (check_equality(run, prompts), [])
    else:
        is_variant = args.dtypes != ["float32"] or args.threads > 1
        command += f" --dtypes {' '.join(args.dtypes)} --threads {args.threads}" if is_variant else ""
        title = args.title or (f"Serving: {args.threads} threads" if is_variant else "Serving")
        with tempfile.TemporaryDirectory() as place:
            notes, tables = compare(run, prompts, Path(place), args.dtypes, args.threads, args.rounds)
            content = notes, tables
            if not is_variant:
                content = [*notes, *check_equality(run, prompts)], [*tables, prefill_table(Path(place))]
    section = measured(title, command, *content)
    if args.print:
        print(section)
    else:
        write_section("serve", section)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"{error.message}\n{error.hint}")
