"""Hostile command lines: runs and judges thousands of random cases.

    python -m tests.stress.hostile [--cases 3000] [--first 0] [--seed 1] [--each 100] [--case N]

A case is a command with options, environment variables, a TOML file, stdin and files. Any of them can be nonsense: an
empty file, a folder, a pipe without a writer, a device, control characters, invalid UTF-8, or numbers that are huge,
negative, NaN or in non-ASCII digits. A case must exit in time with a documented status, end errors with ``error`` and
``hint``, print only JSON if requested, leave no temporary files, and change no user files. A slow command is sent SIGINT
and must exit as after Ctrl-C.

Cases run in forks of this process, which has imported everything and computed nothing. Every ``--each``-th case is a
subprocess. ``--case N`` shows the output of case N.
"""

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import pkgutil
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpt_cli
import typer
from gpt_cli import main as cli

import gpt
from gpt.config.train import TrainConfig

PATIENCE = 4.0  # Seconds until a case is interrupted
GRACE = 60.0  # Seconds from interrupt to kill; a kill is an error
MEMORY = 6 * 2**30  # Additional address space per case, in bytes
STATUSES = (0, 1, 2, 130, 143)
EXAMPLE = "the cat sat on the mat, and the dog ran after the cat. " * 300
CHANCE = 0.25  # Probability of a nonsense value
WEIGHTS = {
    "train": 20, "sample": 24, "eval": 8, "tokenize": 8, "params": 8, "report": 4, "inspect": 12,
    "tokenizer": 10, "data": 3, "export": 6, "serve": 2, "chat": 4,
}  # fmt: skip
TINY = [
    "--n-layer", "1", "--n-head", "1", "--n-embd", "8", "--block-size", "8", "--batch-tokens", "64", "--steps", "2",
    "--vocab-size", "280", "--sample-every", "0",
]  # fmt: skip

NUMBERS = [
    "", " ", "-1", "0", "-0", "1e3", "1.5", "nan", "inf", "-inf", "1e309", "1e-400", str(2**31), str(2**53 + 1),
    str(2**63), str(-(2**63)), str(2**64), str(10**15), "9" * 5000, "1_000", "٣", "１２", "²", "0x10", "1,5", "true",
    "None", "1e15", "3 ", "+3", "65536", "1073741824", "½", "\udcff",
]  # fmt: skip
WORDS = [
    "", " ", "-", "--", "---", "missing", "empty", "folder", "fifo", "/dev/null", "/dev/zero", "/dev/urandom",
    "/proc/self/mem", "text.txt", "binary", "latin.txt", "prompts.jsonl", "broken.jsonl", "deep.json", "run",
    "run:best", "run:step-99", "run:", "run/run.json", "tokens", "🐕", "é" * 200, "a" * 5000, "a/" * 3000,
    "\udcff\udcfe", "a\nb", "\x1b[31m", "\u202e", "[/x]", "[red]", ":smile:", "C:\\x", "~", "$HOME", "../missing",
    "./", "*", "?", "[", "**/*", "hf:", "hf:a/b", "hf:../..", "http://127.0.0.1:9/x", "ftp://x", "file:///missing",
    "gpt2", "auto", "none", "nano", "0", "nan", "a=b", "=", "=1", "x=1e9", "%s", "{}", "<|endoftext|>", "\\", "'",
    '"',
]  # fmt: skip
GOOD: dict[str, list[str]] = {
    "model": ["run", "run", "run:latest"], "text": ["text.txt"], "texts": ["text.txt"], "targets": ["gpt2", "run"],
    "target": ["nano", "run"], "runs": ["run"], "prompt": ["the cat", ""], "tokenizer": ["bytes", "run", "auto"],
    "ids": ["1 2 3"], "words": ["the", "cat"], "name": ["pydocs", "tokens"], "part": ["tokens"], "init": ["run"],
    "prompt_file": ["text.txt", "-"], "prompts": ["prompts.jsonl", "-"], "file": ["text.txt", "-"], "bias": [" =1"],
    "stop": ["."], "val_text": ["text.txt"], "config": ["c.toml"], "resume": ["run", ""], "device": ["cpu"],
    "out": ["new.json", "new.html", "new.png", "new", "new/er", "text.txt", "folder"], "log": ["none"],
    "encoding": ["utf-8", "latin-1"], "special": ["<|x|>"], "preset": ["nano"], "micro_batch": ["auto", "1"],
    "eval": ["text.txt"], "license": ["mit", "Apache-2.0"], "samples": ["1"],
}  # fmt: skip
BOUNDED = {  # Options that start processes or downloads
    "nproc": ["0", "1", "-1", "x", "1025", "1000", "nan"],
    "jobs": ["0", "1", "2", "-1", "x", "1025", "1e9"],
    "tensor": ["0", "1", "-1", "x", "1025"],
    "compile": ["off", "auto", "of", ""],
    "log": ["none", "tensorbord", "", ","],
}
TOML = [
    "nan", "inf", "-inf", "1e400", "true", '""', '"x"', '"\\u0000"', '"\\u001b[31m"', "[]", "[1, 2]", "{}",
    "1979-05-27", "0x10", "1_000", "-1", "0", "9" * 30, "9" * 5000, "1.5", '"8"', '"a/b"', "3", "1", '["x"]',
]  # fmt: skip
BAD_TOML = ["= 3", "a", "[[", "steps = ", "steps = 1\nsteps = 2", "\udcff = 1", "[table]\nx = 1", "a.b.c = 1", "\x00"]


@dataclass
class Case:
    words: list[str]
    env: dict[str, str] = field(default_factory=dict)
    toml: str = ""
    stdin: bytes = b""
    encoding: str = "utf-8"

    def __str__(self) -> str:
        twins = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        command = " ".join([*twins, "gpt", shlex.join(self.words)])
        extra = f"  c.toml: {self.toml!r:.200}" if "c.toml" in command else ""
        return f"{command!r:.600}{extra}  stdin: {self.stdin[:40]!r}  {self.encoding}"


@dataclass
class Result:
    status: int
    out: str
    err: str
    seconds: float
    interrupted: bool


def import_modules() -> None:
    """Imports all modules once for all forks."""
    for package in (gpt, gpt_cli):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    importlib.import_module("torch._dynamo")  # Torch optimizers import this module.


def list_commands() -> dict[tuple[str, ...], Any]:
    root: Any = typer.main.get_command(cli.make_app())
    commands: dict[tuple[str, ...], Any] = {}
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        for subcommand, command_object in inner.items() if inner else [("", command)]:
            commands[(name, subcommand) if subcommand else (name,)] = command_object
    return commands


def draw(rng: random.Random, commands: dict[tuple[str, ...], Any]) -> Case:
    """Draws a command with arguments, options and environment variables."""
    group = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    path = rng.choice([item for item in commands if item[0] == group])
    case = Case(
        list(path),
        toml=draw_toml(rng),
        stdin=draw_stdin(rng),
        encoding=rng.choice(["utf-8"] * 4 + ["ascii", "latin-1"]),
    )
    params = [item for item in commands[path].params if item.name not in ("help", "context")]
    options = [item for item in params if item.opts[0].startswith("-")]
    arguments = [item for item in params if item not in options]
    if path == ("train",) and rng.random() < 0.9:
        case.words += TINY
    if path[0] in ("sample", "chat", "export", "tokenizer", "inspect", "eval", "serve") and rng.random() < 0.9:
        case.words += ["-m", "run"] if any(item.name == "model" for item in options) else []
    if path in (("sample",), ("chat",)):
        case.words += ["-n", "4"]
    if path == ("export",) and rng.random() < 0.8:
        case.words += ["-o", rng.choice(["new", "new.gguf"])]
    if path == ("serve",) and rng.random() < 0.9:
        case.words += ["--port", "0"]
    for option in rng.sample(options, min(len(options), rng.choice([0, 1, 1, 2, 2, 3, 5]))):
        add_option(rng, case, path, option)
    for argument in arguments:
        if argument.name and rng.random() < 0.9:
            case.words += [
                draw_value(rng, argument) for _ in range(1 if argument.nargs == 1 else rng.choice([1, 1, 2]))
            ]
    if rng.random() < 0.05:
        case.words.insert(rng.randrange(len(case.words) + 1), rng.choice(WORDS))
    return case


def add_option(rng: random.Random, case: Case, path: tuple[str, ...], option: Any) -> None:
    flag, variable = rng.choice(option.opts), "_".join(["GPT", *path, option.name]).upper()
    if option.is_flag:
        if rng.random() < 0.7:
            case.words.append(flag)
        else:
            case.env[variable] = rng.choice(["1", "0", "true", "x", "", "2"])
        return
    text = draw_value(rng, option)
    if rng.random() < 0.2:
        case.env[variable] = text
    elif flag.startswith("--") and rng.random() < 0.5:
        case.words.append(f"{flag}={text}")
    else:
        case.words += [flag, text]


def draw_value(rng: random.Random, param: Any) -> str:
    value_type = param.type_descriptor.annotation
    if param.name in BOUNDED:
        return rng.choice(BOUNDED[param.name])
    if rng.random() < CHANCE:
        return rng.choice(NUMBERS if value_type in (int, float) and rng.random() < 0.8 else WORDS)
    metavar = str(param.metavar or "")
    if param.name in GOOD:
        return rng.choice(GOOD[param.name])
    if "|" in metavar:
        return rng.choice(metavar.strip("[].").split("|"))
    return rng.choice({int: ["1", "2", "3", "8"], float: ["0.5", "1", "0"]}.get(value_type, WORDS))


def draw_toml(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return rng.choice(BAD_TOML)
    names = [*TrainConfig.__dataclass_fields__, "stesp", "\x1b[31m", ""]
    drawn_names = rng.sample([name for name in names if name not in BOUNDED], rng.randint(0, 3))
    return "".join(f"{json.dumps(name)} = {rng.choice(TOML)}\n" for name in drawn_names)


def draw_stdin(rng: random.Random) -> bytes:
    return rng.choice(
        [
            b"", b"the cat\n", b"/set temperature nan\n/retry\nthe\n/more\n/quit\n", b"\xff\xfe\x00",
            b'{"prompt": "the"}\n{"prompt": ""}\n', b'{"prompt": 1}\n', b"[" * 5000, b"1 2 3\n", b'"""\nthe\n',
            b"/set\n/set x\n/set beam 99\nx\n/set greedy on\ny\n\\\n", EXAMPLE.encode(), b"\x1b[2J\r\n",
        ]
    )  # fmt: skip


def make_files(place: Path) -> None:
    place.mkdir()
    (place / "text.txt").write_text(EXAMPLE)
    (place / "latin.txt").write_bytes("é\n".encode("latin-1") * 20)
    (place / "binary").write_bytes(bytes(range(256)) * 8)
    (place / "empty").touch()
    (place / "folder").mkdir()
    (place / "prompts.jsonl").write_text('{"prompt": "the"}\n{"prompt": "cat"}\n')
    (place / "broken.jsonl").write_text('{"prompt": "the"\n{"text": 3}\nnull\n')
    (place / "deep.json").write_text("[" * 100_000)
    for words in (["train", "text.txt", *TINY, "-o", "run", "--quiet"], ["tokenize", "text.txt", "-o", "tokens"]):
        result = run(Case(words), place, place.parent / "made", patience=120)
        assert result.status == 0, result.err


def run(case: Case, cwd: Path, scratch: Path, as_subprocess: bool = False, patience: float = PATIENCE) -> Result:
    """Runs a case in ``cwd``. ``scratch`` receives output and temporary files."""
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "tmp").mkdir(parents=True)
    (scratch / "in").write_bytes(case.stdin)
    (scratch / "home").mkdir()
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GPT_")},
        "TMPDIR": str(scratch / "tmp"), "HOME": str(scratch / "home"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(scratch / "home"), "PYTHONIOENCODING": case.encoding,
        **dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9"), **case.env,
    }  # fmt: skip
    start_time = time.monotonic()
    with (
        (scratch / "in").open("rb") as stdin_file,
        (scratch / "out").open("wb") as out,
        (scratch / "err").open("wb") as err,
    ):
        files = (stdin_file.fileno(), out.fileno(), err.fileno())
        if as_subprocess:
            command = [sys.executable, "-m", "gpt_cli", *map(os.fsencode, case.words)]
            streams = {"stdin": stdin_file, "stdout": out, "stderr": err}
            process = subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **streams)
            pid = process.pid
        else:
            sys.stdout.flush()
            pid = os.fork()
            if not pid:
                _run_child(case, cwd, files, env, patience)
        status, interrupted = _wait(pid, start_time, 3 * patience if as_subprocess else patience)
        if as_subprocess:
            process.returncode = status
    texts = [(scratch / name).read_bytes().decode(case.encoding, "replace") for name in ("out", "err")]
    return Result(status, *texts, time.monotonic() - start_time, interrupted)


def _run_child(case: Case, cwd: Path, files: tuple[int, int, int], env: dict[str, str], patience: float) -> None:
    status = 99
    try:
        os.setsid()
        os.chdir(cwd)
        for target, source in enumerate(files):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None
        sys.stdin = open(0, encoding=case.encoding, errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding=case.encoding, closefd=False)  # noqa: SIM115
        sys.stderr = open(  # noqa: SIM115
            2, "w", encoding=case.encoding, errors="backslashreplace", buffering=1, closefd=False
        )
        faulthandler.dump_traceback_later(patience + GRACE - 2)  # Traceback of a hanging case
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY, used_bytes + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = cli.main(case.words)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        with contextlib.suppress(BaseException):
            print(f"LEFT main: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _wait(pid: int, started: float, patience: float) -> tuple[int, bool]:
    """Returns the exit status (-9 if killed), and whether the case was interrupted."""
    interrupted = False
    while True:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # Child processes that are still running
            return os.waitstatus_to_exitcode(status), interrupted
        elapsed = time.monotonic() - started
        if not interrupted and elapsed > patience:
            interrupted = True
            os.kill(pid, signal.SIGINT)
        if elapsed > patience + GRACE:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -9, True
        time.sleep(0.002)


def judge(case: Case, result: Result, cwd: Path, scratch: Path, before: dict[str, Any]) -> Iterator[str]:
    if result.status not in STATUSES:
        yield f"status {result.status}"
    if result.status in (130, 143) and not result.interrupted:
        yield f"status {result.status} without a signal"
    for pattern in ("Traceback", "internal error in gpt", "LEFT main"):
        if pattern in result.err and "--debug" not in case.words:
            yield pattern
    lines = result.err.splitlines()
    if result.status in (1, 2) and [line.split(": ")[0] for line in lines[-2:]] != ["error", "hint"]:
        yield "no error and hint at the end"
    if sum(line.startswith("error: ") for line in lines) > 1 and not {"-i", "--interactive", "chat"} & {*case.words}:
        yield "several errors"
    if "--json" in case.words and not {"--print-config", "--help"} & {*case.words}:
        output = result.out if result.status == 0 else result.out.rpartition("\n")[0]
        if not all(map(is_json, output.splitlines())):
            yield "stdout is not JSON"
    leftovers = [path for place in (cwd, scratch / "tmp") for path in place.rglob("*") if path.name.startswith(".tmp-")]
    # Torch creates torchinductor folders.
    leftovers += [path for path in (scratch / "tmp").iterdir() if not path.name.startswith("torchinductor")]
    if leftovers:
        yield f"left behind: {[path.name for path in leftovers]}"
    after = snapshot(cwd)
    changed_files = [name for name, state in before.items() if after.get(name) != state]
    allowed_prefixes = ("run",) if any(word.startswith("--resume") for word in case.words) else ()
    if changed_files := [name for name in changed_files if not name.startswith(allowed_prefixes or "\0")]:
        yield f"changed: {changed_files[:3]}"


def is_json(line: str) -> bool:
    """Returns whether a line is JSON without NaN or infinity."""
    try:
        json.loads(line, parse_constant=int)  # int() rejects NaN and Infinity.
    except (ValueError, RecursionError):
        return False
    return True


def snapshot(place: Path) -> dict[str, Any]:
    """Returns mode, size and time of every path below a folder."""
    return {
        str(path.relative_to(place)): (stat.st_mode, (stat.st_size, stat.st_mtime_ns) if path.is_file() else 0)
        for path in place.rglob("*")
        if (stat := path.lstat()) and path.name != ".lock"
    }


def run_case(
    seed: int, number: int, place: Path, commands: dict[tuple[str, ...], Any], subprocess_interval: int
) -> tuple[Any, ...]:
    """Draws, runs and judges case ``number``."""
    case = draw(random.Random(f"{seed}/{number}"), commands)
    cwd, scratch = place / "cwd", place / "beside"
    shutil.rmtree(cwd, ignore_errors=True)
    shutil.copytree(place / "files", cwd)
    os.mkfifo(cwd / "fifo")
    (cwd / "c.toml").write_bytes(case.toml.encode("utf-8", "surrogateescape"))
    before = snapshot(cwd)
    result = run(case, cwd, scratch, bool(subprocess_interval) and number % subprocess_interval == 0)
    return case, result, list(judge(case, result, cwd, scratch, before))


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.hostile")
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case, to run them in parts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=int, default=100, help="each so many is a process of its own; 0: none")
    parser.add_argument("--case", type=int, help="this one alone, with what it prints")
    args = parser.parse_args(words)
    numbers = range(args.first, args.first + args.cases) if args.case is None else [args.case]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Background jobs ignore SIGINT.
    import_modules()
    commands, start_time = list_commands(), time.monotonic()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="gpt-hostile-") as folder:
        place = Path(folder)
        make_files(place / "files")
        for number in numbers:
            case, result, faults = run_case(args.seed, number, place, commands, args.each)
            counts["interrupted" if result.interrupted else f"status {result.status}"] += 1
            counts["clean" if not faults else "unclean"] += 1
            if faults or args.case is not None:
                print(f"case {number}: {'; '.join(faults) or 'clean'} ({result.seconds:.1f} s)\n  {case}")
                output = (
                    result.err if args.case is not None else result.err[-600:] if result.status != -9 else result.err
                )
                print("".join(f"    {line!r:.300}\n" for line in output.splitlines()), flush=True)
    print(f"{len(numbers):,} cases of seed {args.seed} in {time.monotonic() - start_time:.0f} s: {dict(counts)}")


if __name__ == "__main__":
    main(sys.argv[1:])
