"""Forged values: in what a run, a checkpoint or a folder of tokens keeps, one JSON value after the other is replaced.

    python -m tests.stress.forged [CASES] [FILE]...

Sums that cover a file are made anew, so that what is tried is the check behind them. A command must work, or refuse the
file with one line; a fault, an error of the system, a hang or memory without bounds is reported. POSIX only.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import gpt
from gpt.runs import folder
from gpt.text.token_folder import MANIFEST, PROGRESS, SOURCES
from tests.stress.faults import listed, peak_memory, write_text

SECONDS, WAIT = 20, 300  # of CPU time and of wall time that a command may take
MEMORY = 2**30  # bytes that a command may take on top of what the process has
STEPS = 6  # after which a resumed run is stopped
GONE = "(gone)"  # the key itself is deleted
DEEP = 100_000
VALUES = {
    GONE: "",
    **{each: each for each in ("null", "true", "-1", "0", "0.5", "7")},
    "2**40": str(2**40), "10**18": str(10**18), "10**30": str(10**30), "10**5000": "1" + 5000 * "0",
    **{each: each for each in ("1e38", "1e308", "NaN", "-Infinity")},
    "empty text": '""', "escape": r'"\u001b[31m\u0007"', "half a pair": r'"\ud800"', "zero byte": r'"a\u0000b"',
    "dots": '"../.."', "device": '"/dev/zero"', "hub": '"hf:"',
    "long text": '"' + 300_000 * "x" + '"', "long path": '"' + 3000 * "x/" + '"',
    "list": "[]", "object": "{}", "list of null": "[null]", "object of lists": '{"a": [1, {"b": "c"}]}',
    "900 deep": 900 * "[" + 900 * "]", "too deep": DEEP * "[" + DEEP * "]",
}  # fmt: skip
TINY: dict[str, Any] = {
    "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "batch_tokens": 64, "vocab_size": 300,
    "dtype": "float32", "steps": 12, "eval_every": 4, "save_every": 4, "sample_every": 4, "warmup": 2,
}  # fmt: skip
Step = str | int
Place = tuple[Step, ...]


class Enough(BaseException):  # raised when a run has been trained for `STEPS` steps
    pass


class TooLong(BaseException):
    pass


@dataclass(frozen=True)
class Subject:
    """A file to forge and the commands to run on its folder, ``BAD``; (command, n) runs for one in n forged values."""

    good: str  # the folder
    file: str
    commands: tuple[tuple[str, int], ...]
    sign: Callable[[Path], None] = lambda bad: None


def make(place: Path) -> None:
    text = write_text(place / "text.txt", 3000)
    gpt.train(text, out=str(place / "run"), **TINY)
    gpt.train(text, out=str(place / "lora"), init=str(place / "run"), lora_rank=2, **{**_SHORT, "merge_lora": True})
    for name in ("run", "lora"):
        _cut(place / name, place / f"begun-{name}")
    gpt.export(place / "run", place / "exported", dtype="int8")
    theirs, step = place / "theirs", place / "run" / folder.step_name(12)
    theirs.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(step / name, theirs)
    part = "model-00001-of-00001.safetensors"
    shutil.copy(step / "model.safetensors", theirs / part)
    from safetensors import safe_open

    from gpt.runs.checkpoint import INDEX

    with safe_open(theirs / part, framework="np") as opened:
        (theirs / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(opened.keys(), part)}))
    from gpt.config import TokenizeConfig
    from gpt.text import tokenize, unfinished_folder

    tokenize.tokenize_texts([str(text)], TokenizeConfig(out=str(place / "tokens"), tokenizer="bytes", jobs=1))
    with mock.patch.object(unfinished_folder, "finish", side_effect=Enough), contextlib.suppress(Enough):
        tokenize.tokenize_texts([str(text)], TokenizeConfig(out=str(place / "unfinished"), tokenizer="bytes", jobs=1))


_SHORT = {key: TINY[key] for key in ("batch_tokens", "dtype", "steps", "eval_every", "save_every")}


def _cut(run: Path, copy: Path) -> None:
    shutil.copytree(run, copy)
    shutil.rmtree(copy / folder.step_name(12))
    record = json.loads((copy / "run.json").read_text())
    del record["ended"], record["result"]
    (copy / "run.json").write_text(json.dumps(record))


def _sign(name: str) -> Callable[[Path], None]:
    """Returns a function that rewrites the checksums of a forged run's checkpoint ``name``, or of a folder itself."""

    def sign(bad: Path) -> None:
        (bad / name / folder.CHECKSUMS).unlink()
        folder.write_checksums(bad / name)

    return sign


def _sign_sources(bad: Path) -> None:
    from gpt.files import file_sha256

    with contextlib.suppress(ValueError, TypeError, KeyError):
        manifest = json.loads((bad / MANIFEST).read_text())
        manifest["sources"]["sha256"] = file_sha256(bad / SOURCES)
        (bad / MANIFEST).write_text(json.dumps(manifest))


LAST, MIDDLE = folder.step_name(12), folder.step_name(8)
SAMPLE = "sample ab -m BAD -n 2 --greedy"
REPORTS = (
    ("report BAD", 1), ("report BAD --json", 1), ("report BAD GOOD -o report.html", 1), ("report BAD -o r.png", 20),
)  # fmt: skip
EXPORT = ("export BAD -o new", 2)
RESUME = ("train --resume BAD --quiet", 1)
LOOKS = (
    (SAMPLE, 1), ("params BAD", 1), ("inspect tokens abc -m BAD", 1), ("inspect neighbors ab -m BAD", 4),
    ("eval BAD small.txt --json", 4), ("bench BAD --new 2 --prompt 2 --quiet", 40),
)  # fmt: skip
SUBJECTS = (
    Subject("run", "run.json", (*REPORTS, (SAMPLE, 2), EXPORT, RESUME)),
    Subject("begun-run", "run.json", (RESUME,)),
    Subject("begun-lora", "run.json", (RESUME,)),
    Subject("run", "metrics.jsonl", (*REPORTS, ("train --resume BAD --steps 13 --quiet", 10))),
    Subject("run", "index.json", ((SAMPLE, 1),)),
    Subject("run", f"{LAST}/gpt.json", LOOKS, _sign(LAST)),
    Subject("run", f"{LAST}/config.json", LOOKS, _sign(LAST)),
    Subject("run", f"{LAST}/checksums.json", ((SAMPLE, 1),)),
    Subject("begun-run", f"{MIDDLE}/gpt.json", (RESUME,), _sign(MIDDLE)),
    Subject("begun-run", f"{MIDDLE}/training.json", (RESUME,), _sign(MIDDLE)),
    Subject("begun-lora", f"{MIDDLE}/training.json", (RESUME,), _sign(MIDDLE)),
    Subject("lora", f"{LAST}/gpt.json", (*LOOKS, ("report BAD", 10)), _sign(LAST)),
    Subject("lora", f"{LAST}/adapter_config.json", LOOKS, _sign(LAST)),
    Subject("exported", "gpt.json", (*LOOKS, EXPORT), _sign(".")),
    Subject("exported", "config.json", LOOKS, _sign(".")),
    Subject("theirs", "config.json", LOOKS),
    Subject("theirs", "tokenizer.json", LOOKS),
    Subject("theirs", "model.safetensors.index.json", LOOKS),
    Subject("tokens", MANIFEST, (("train BAD --steps 2 --n-embd 16 --n-head 2 -o new --quiet", 4),
                                 ("eval GOODRUN BAD", 1), ("tokenizer show BAD", 4))),
    Subject("tokens", SOURCES, (("data show BAD", 1), ("train BAD --steps 2 --n-embd 16 --n-head 2 -o new --quiet", 4)),
            _sign_sources),
    Subject("begun-run", f"tokens/{MANIFEST}", (RESUME, ("report BAD --json", 1))),
    Subject("begun-run", f"tokens/{SOURCES}", (RESUME,), lambda bad: _sign_sources(bad / "tokens")),
    Subject("unfinished", PROGRESS, (("tokenize text.txt -o BAD --tokenizer bytes --jobs 1 --resume --quiet", 1),)),
)  # fmt: skip


@dataclass(frozen=True)
class Forged:
    where: str  # and which value was put there
    text: str


def forged(text: str, lines: bool, rng: random.Random) -> Iterator[Forged]:
    """Yields ``text`` with one value replaced, in random order; in files of ``lines``, values of some lines only."""
    parts = text.splitlines() if lines else [text]
    some = sorted({*range(min(2, len(parts))), *rng.sample(range(len(parts)), min(10, len(parts))), len(parts) - 1})
    cases = [(n, place, what) for n in some for place in _places(json.loads(parts[n])) for what in VALUES]
    rng.shuffle(cases)
    for n, place, what in cases:
        value = json.loads(parts[n])
        changed = _with(value, place, what)
        where = f"{f'line {n + 1}, ' if lines else ''}{'.'.join(map(str, place)) or 'all'} = {what}"
        yield Forged(where, "\n".join([*parts[:n], changed, *parts[n + 1 :]]) + "\n")


def _places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Yields the path to every value inside a JSON value; in long lists and objects, to the first and last two."""
    yield at
    inside = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    if len(inside) > 40:
        inside = inside[:2] + inside[-2:]
    for step, each in inside:
        yield from _places(each, (*at, step))


def _with(value: Any, place: Place, what: str) -> str:
    mark = "THE PLACE OF A FORGED VALUE"
    if not place:
        return VALUES[what]
    inner = value
    for step in place[:-1]:
        inner = inner[step]
    if what == GONE:
        del inner[place[-1]]
        return json.dumps(value)
    inner[place[-1]] = mark
    return json.dumps(value).replace(f'"{mark}"', VALUES[what], 1)


def outcome(words: list[str]) -> str:
    """Runs a command; returns ``works`` or ``refused``, or else what is wrong."""
    from gpt_cli.main import main

    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2)]
    memory = peak_memory(reset=True)
    try:
        with in_time(), contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            code = main(words)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    for stream in streams:
        stream.flush()
    err = streams[1].buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]
    if peak_memory() - memory > MEMORY:
        return f"{(peak_memory() - memory) / 2**30:.1f} GiB of memory"
    if code == 0 or Enough.__name__ in err:
        return "works"
    last = [line for line in err.splitlines() if line.startswith("error:")][-1:]
    told = last and not any(words in last[0] for words in ("internal error in gpt", "system error", "out of memory"))
    if code in (1, 2) and told:  # 1: the rate is too high, say, and the loss no number
        return "refused" if len(last[0]) < 6000 else f"LONG: {last[0][:100]}"
    return f"exit {code}: {err.strip()[-300:]}"


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Raises `TooLong` in a block that computes for more than `SECONDS`, or takes longer than `WAIT`."""

    def too_long(signum: int, frame: Any) -> NoReturn:
        raise TooLong(f"{signal.Signals(signum).name}: it does not end")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, WAIT))
    before = [signal.signal(signum, too_long) for signum, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (signum, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(signum, handler)


def attempt(place: Path, subject: Subject, case: Forged, rng: random.Random) -> Iterator[tuple[str, str]]:
    for command, one_in in subject.commands:
        if rng.randrange(one_in):
            continue
        bad = place / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.rmtree(place / "new", ignore_errors=True)
        shutil.copytree(place / subject.good, bad)
        (bad / subject.file).write_text(case.text)
        subject.sign(bad)
        names = {"BAD": "bad", "GOOD": subject.good, "GOODRUN": "run"}
        yield command, outcome([names.get(word, word) for word in command.split()])


@contextlib.contextmanager
def short_runs() -> Iterator[None]:
    """Stops every run after `STEPS` steps: a forged file may ask for 10¹⁸, which is no fault."""
    from gpt.training.loop import Trainer

    step, train = Trainer.step, Trainer.train
    done: list[int] = []

    def counted(self: Trainer) -> None:
        done.append(1)
        if len(done) > STEPS:
            raise Enough
        step(self)

    def begins(self: Trainer) -> Any:
        done.clear()
        return train(self)

    with mock.patch.object(Trainer, "step", counted), mock.patch.object(Trainer, "train", begins):
        yield


def tried(place: Path, count: int, only: tuple[str, ...] = (), seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Tries about ``count`` forged files, spread over all subjects; returns the outcomes and what was wrong."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    wrong = []
    subjects = [subject for subject in SUBJECTS if not only or f"{subject.good}/{subject.file}" in only]
    (place / "small.txt").write_text("abc ab abd " * 10)
    with contextlib.chdir(place), short_runs():
        for subject in subjects:
            text = (place / subject.good / subject.file).read_text()
            cases = forged(text, subject.file.endswith(".jsonl"), rng)
            for _, case in zip(range(-(-count // len(subjects))), cases, strict=False):
                for command, came in attempt(place, subject, case, rng):
                    outcomes[came if came in ("works", "refused") else "wrong"] += 1
                    if came not in ("works", "refused"):
                        wrong.append(f"{subject.good}/{subject.file}: {case.where}: gpt {command}: {came}")
                        if not __debug__ or os.environ.get("FORGED_SHOW"):
                            print(wrong[-1], flush=True)
    return outcomes, wrong


def main(words: list[str]) -> None:
    count = int(words[0]) if words else 5000
    with tempfile.TemporaryDirectory(prefix="gpt-forged-") as name:
        make(Path(name))
        outcomes, wrong = tried(Path(name), count, tuple(words[1:]))
    print(listed(outcomes))
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
