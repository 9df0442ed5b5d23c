"""Hostile and clumsy command lines: thousands of them, each drawn from a seed, run, and judged.

    python -m tests.stress.hostile [--cases 3000] [--first 0] [--seed 1] [--each 100] [--case N]

A case is a command with options, environment twins, a TOML file, stdin and files, any of which may be nonsense:
missing, empty, a folder, a pipe that nobody writes, a device, a name of control characters or of bytes that are no
UTF-8, numbers that are huge, negative, NaN or written in other digits. It must end within its time with a status that
the contract knows, say on its last two lines what is wrong and what to do, print JSON alone where that was asked for,
leave no temporary file, and leave the user's files as they were. A command that is still running after a while (it may
have been asked for a trillion steps) gets SIGINT, and must end as a user's Ctrl-C would end it.

Cases run in forks of this process, which has imported everything and computed nothing; each ``--each``-th one is a
process of its own. ``--case N`` runs a single one and shows what it prints.
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
from gpt.config import TrainConfig

PATIENCE = 4.0  # seconds until a case is interrupted
GRACE = 60.0  # and until it is killed after that, which is a fault; a machine may be busy
MEMORY = 6 * 2**30  # bytes of address space that a case may take more than this process has
STATUSES = (0, 1, 2, 130, 143)
EXAMPLE = "the cat sat on the mat, and the dog ran after the cat. " * 300
CHANCE = 0.25  # that a value is nonsense
WEIGHTS = {
    "train": 20, "sample": 24, "eval": 8, "tokenize": 8, "params": 8, "report": 4, "bench": 3, "inspect": 12,
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
BOUNDED = {  # what starts processes, which take seconds, or downloads
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
        said = " ".join([*twins, "gpt", shlex.join(self.words)])
        extra = f"  c.toml: {self.toml!r:.200}" if "c.toml" in said else ""
        return f"{said!r:.600}{extra}  stdin: {self.stdin[:40]!r}  {self.encoding}"


@dataclass
class Ended:
    status: int
    out: str
    err: str
    seconds: float
    interrupted: bool


def warm() -> None:
    """Imports all that a command may import, so that forks need not."""
    for package in (gpt, gpt_cli):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    importlib.import_module("torch._dynamo")  # as torch's optimizers do


def commands() -> dict[tuple[str, ...], Any]:
    root: Any = typer.main.get_command(cli.make_app())
    found: dict[tuple[str, ...], Any] = {}
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        for sub, each in inner.items() if inner else [("", command)]:
            found[(name, sub) if sub else (name,)] = each
    return found


def draw(rng: random.Random, known: dict[tuple[str, ...], Any]) -> Case:
    """Draws a case: a command with some options, on the command line or in the environment, and arguments."""
    top = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    path = rng.choice([each for each in known if each[0] == top])
    case = Case(list(path), toml=toml(rng), stdin=stdin(rng), encoding=rng.choice(["utf-8"] * 4 + ["ascii", "latin-1"]))
    params = [each for each in known[path].params if each.name not in ("help", "context")]
    options = [each for each in params if each.opts[0].startswith("-")]
    arguments = [each for each in params if each not in options]
    if path == ("train",) and rng.random() < 0.9:
        case.words += TINY
    if path[0] in ("sample", "chat", "export", "tokenizer", "inspect", "eval", "bench", "serve") and rng.random() < 0.9:
        case.words += ["-m", "run"] if any(each.name == "model" for each in options) else []
    if path in (("sample",), ("chat",)):
        case.words += ["-n", "4"]
    if path == ("export",) and rng.random() < 0.8:
        case.words += ["-o", rng.choice(["new", "new.gguf"])]
    if path == ("serve",) and rng.random() < 0.9:
        case.words += ["--port", "0"]
    for option in rng.sample(options, min(len(options), rng.choice([0, 1, 1, 2, 2, 3, 5]))):
        give(rng, case, path, option)
    for argument in arguments:
        if argument.name and rng.random() < 0.9:
            case.words += [value(rng, argument) for _ in range(1 if argument.nargs == 1 else rng.choice([1, 1, 2]))]
    if rng.random() < 0.05:
        case.words.insert(rng.randrange(len(case.words) + 1), rng.choice(WORDS))
    return case


def give(rng: random.Random, case: Case, path: tuple[str, ...], option: Any) -> None:
    flag, twin = rng.choice(option.opts), "_".join(["GPT", *path, option.name]).upper()
    if option.is_flag:
        if rng.random() < 0.7:
            case.words.append(flag)
        else:
            case.env[twin] = rng.choice(["1", "0", "true", "x", "", "2"])
        return
    given = value(rng, option)
    if rng.random() < 0.2:
        case.env[twin] = given
    elif flag.startswith("--") and rng.random() < 0.5:
        case.words.append(f"{flag}={given}")
    else:
        case.words += [flag, given]


def value(rng: random.Random, param: Any) -> str:
    kind = param.type_descriptor.annotation
    if param.name in BOUNDED:
        return rng.choice(BOUNDED[param.name])
    if rng.random() < CHANCE:
        return rng.choice(NUMBERS if kind in (int, float) and rng.random() < 0.8 else WORDS)
    metavar = str(param.metavar or "")
    if param.name in GOOD:
        return rng.choice(GOOD[param.name])
    if "|" in metavar:
        return rng.choice(metavar.strip("[].").split("|"))
    return rng.choice({int: ["1", "2", "3", "8"], float: ["0.5", "1", "0"]}.get(kind, WORDS))


def toml(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return rng.choice(BAD_TOML)
    names = [*TrainConfig.__dataclass_fields__, "stesp", "\x1b[31m", ""]
    some = rng.sample([name for name in names if name not in BOUNDED], rng.randint(0, 3))
    return "".join(f"{json.dumps(name)} = {rng.choice(TOML)}\n" for name in some)


def stdin(rng: random.Random) -> bytes:
    return rng.choice(
        [
            b"", b"the cat\n", b"/set temperature nan\n/retry\nthe\n/model missing\n/more\n/quit\n", b"\xff\xfe\x00",
            b'{"prompt": "the"}\n{"prompt": ""}\n', b'{"prompt": 1}\n', b"[" * 5000, b"1 2 3\n", b'"""\nthe\n',
            b"/set\n/set x\n/set beam 99\nx\n/set greedy on\ny\n\\\n", EXAMPLE.encode(), b"\x1b[2J\r\n",
        ]
    )  # fmt: skip


def prepare(place: Path) -> None:
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
        done = run(Case(words), place, place.parent / "made", patience=120)
        assert done.status == 0, done.err


def run(case: Case, cwd: Path, beside: Path, apart: bool = False, patience: float = PATIENCE) -> Ended:
    """Runs a case in ``cwd``, in a fork or as a process of its own; ``beside`` is for what it prints and its TMPDIR."""
    shutil.rmtree(beside, ignore_errors=True)
    (beside / "tmp").mkdir(parents=True)
    (beside / "in").write_bytes(case.stdin)
    (beside / "home").mkdir()
    env = {
        **{name: each for name, each in os.environ.items() if not name.startswith("GPT_")},
        "TMPDIR": str(beside / "tmp"), "HOME": str(beside / "home"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(beside / "home"), "PYTHONIOENCODING": case.encoding,
        **dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9"), **case.env,
    }  # fmt: skip
    started = time.monotonic()
    with (beside / "in").open("rb") as given, (beside / "out").open("wb") as out, (beside / "err").open("wb") as err:
        files = (given.fileno(), out.fileno(), err.fileno())
        if apart:
            command = [sys.executable, "-m", "gpt_cli", *map(os.fsencode, case.words)]
            streams = {"stdin": given, "stdout": out, "stderr": err}
            process = subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **streams)
            pid = process.pid
        else:
            sys.stdout.flush()
            pid = os.fork()
            if not pid:
                _child(case, cwd, files, env, patience)
        status, interrupted = _wait(pid, started, 3 * patience if apart else patience)
        if apart:
            process.returncode = status
    texts = [(beside / name).read_bytes().decode(case.encoding, "replace") for name in ("out", "err")]
    return Ended(status, *texts, time.monotonic() - started, interrupted)


def _child(case: Case, cwd: Path, files: tuple[int, int, int], env: dict[str, str], patience: float) -> None:
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
        faulthandler.dump_traceback_later(patience + GRACE - 2)  # of a case that hangs
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
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
    """Waits for a case; returns its exit status, -9 if it had to be killed, and whether it was interrupted."""
    interrupted = False
    while True:
        got, status = os.waitpid(pid, os.WNOHANG)
        if got:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it may have left at work
            return os.waitstatus_to_exitcode(status), interrupted
        spent = time.monotonic() - started
        if not interrupted and spent > patience:
            interrupted = True
            os.kill(pid, signal.SIGINT)
        if spent > patience + GRACE:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -9, True
        time.sleep(0.002)


def judge(case: Case, ended: Ended, cwd: Path, beside: Path, before: dict[str, Any]) -> Iterator[str]:
    if ended.status not in STATUSES:
        yield f"status {ended.status}"
    if ended.status in (130, 143) and not ended.interrupted:
        yield f"status {ended.status} without a signal"
    for said in ("Traceback", "internal error in gpt", "LEFT main"):
        if said in ended.err and "--debug" not in case.words:
            yield said
    lines = ended.err.splitlines()
    if ended.status in (1, 2) and [line.split(": ")[0] for line in lines[-2:]] != ["error", "hint"]:
        yield "no error and hint at the end"
    if sum(line.startswith("error: ") for line in lines) > 1 and not {"-i", "--interactive", "chat"} & {*case.words}:
        yield "several errors"
    if "--json" in case.words and not {"--print-config", "--help"} & {*case.words}:
        whole = ended.out if ended.status == 0 else ended.out.rpartition("\n")[0]
        if not all(map(is_json, whole.splitlines())):
            yield "stdout is not JSON"
    left = [path for place in (cwd, beside / "tmp") for path in place.rglob("*") if path.name.startswith(".tmp-")]
    left += [path for path in (beside / "tmp").iterdir() if not path.name.startswith("torchinductor")]  # torch's own
    if left:
        yield f"left behind: {[path.name for path in left]}"
    after = tree(cwd)
    changed = [name for name, state in before.items() if after.get(name) != state]
    allowed = ("run",) if any(word.startswith("--resume") for word in case.words) else ()
    if changed := [name for name in changed if not name.startswith(allowed or "\0")]:
        yield f"changed: {changed[:3]}"


def is_json(line: str) -> bool:
    """Whether a line is JSON; NaN is not."""
    try:
        json.loads(line, parse_constant=int)  # which refuses them
    except (ValueError, RecursionError):
        return False
    return True


def tree(place: Path) -> dict[str, Any]:
    """Returns every path below a folder with its mode, size and modification time."""
    return {
        str(path.relative_to(place)): (about.st_mode, (about.st_size, about.st_mtime_ns) if path.is_file() else 0)
        for path in place.rglob("*")
        if (about := path.lstat()) and path.name != ".lock"
    }


def one(seed: int, number: int, place: Path, known: dict[tuple[str, ...], Any], each: int) -> tuple[Any, ...]:
    """Draws case ``number``, runs it in a copy of the user's files, and judges it."""
    case = draw(random.Random(f"{seed}/{number}"), known)
    cwd, beside = place / "cwd", place / "beside"
    shutil.rmtree(cwd, ignore_errors=True)
    shutil.copytree(place / "files", cwd)
    os.mkfifo(cwd / "fifo")
    (cwd / "c.toml").write_bytes(case.toml.encode("utf-8", "surrogateescape"))
    before = tree(cwd)
    ended = run(case, cwd, beside, bool(each) and number % each == 0)
    return case, ended, list(judge(case, ended, cwd, beside, before))


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.hostile")
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case, to run them in parts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=int, default=100, help="each so many is a process of its own; 0: none")
    parser.add_argument("--case", type=int, help="this one alone, with what it prints")
    asked = parser.parse_args(words)
    numbers = range(asked.first, asked.first + asked.cases) if asked.case is None else [asked.case]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has ignored for what runs behind it
    warm()
    known, started = commands(), time.monotonic()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="gpt-hostile-") as folder:
        place = Path(folder)
        prepare(place / "files")
        for number in numbers:
            case, ended, faults = one(asked.seed, number, place, known, asked.each)
            counts["interrupted" if ended.interrupted else f"status {ended.status}"] += 1
            counts["clean" if not faults else "unclean"] += 1
            if faults or asked.case is not None:
                print(f"case {number}: {'; '.join(faults) or 'clean'} ({ended.seconds:.1f} s)\n  {case}")
                shown = ended.err if asked.case is not None else ended.err[-600:] if ended.status != -9 else ended.err
                print("".join(f"    {line!r:.300}\n" for line in shown.splitlines()), flush=True)
    print(f"{len(numbers):,} cases of seed {asked.seed} in {time.monotonic() - started:.0f} s: {dict(counts)}")


if __name__ == "__main__":
    main(sys.argv[1:])
