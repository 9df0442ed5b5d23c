"""Forged values: replaces single JSON values in the files of runs, checkpoints and token folders.

    python -m tests.stress.forged [CASES] [FILE]...

Checksums are updated to reach later checks. Every command must work, or reject the file with a one-line error, in
limited time and memory. POSIX only.
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
from gpt.corpus.token_folder import SOURCES
from gpt.documents.sources import MANIFEST, PROGRESS
from gpt.runs import folder
from tests.stress.faults import format_outcomes, peak_memory, write_text

CPU_SECONDS, WALL_SECONDS = 20, 300  # Limits per command
MEMORY = 2**30  # Bytes that a command can allocate
MAX_STEPS = 6  # Limit for resumed runs
DELETED = "(gone)"  # This value deletes the key.
DEEP = 100_000
VALUES = {
    DELETED: "",
    **{literal: literal for literal in ("null", "true", "-1", "0", "0.5", "7")},
    "2**40": str(2**40), "10**18": str(10**18), "10**30": str(10**30), "10**5000": "1" + 5000 * "0",
    **{literal: literal for literal in ("1e38", "1e308", "NaN", "-Infinity")},
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
JsonKey = str | int
JsonPath = tuple[JsonKey, ...]


class StepLimit(BaseException):  # A run has reached `MAX_STEPS` steps.
    pass


class CommandTimeout(BaseException):
    pass


@dataclass(frozen=True)
class Subject:
    """A file to forge, and commands that read its folder, ``BAD``. The command of a pair (command, n) runs on one in n
    forged values."""

    good: str  # Folder name
    file: str
    commands: tuple[tuple[str, int], ...]
    sign: Callable[[Path], None] = lambda bad: None


def make(place: Path) -> None:
    text = write_text(place / "text.txt", 3000)
    gpt.train(text, out=str(place / "run"), **TINY)
    gpt.train(text, out=str(place / "lora"), init=str(place / "run"), lora_rank=2, **_SHORT_RUN)
    for name in ("run", "lora"):
        _copy_unfinished(place / name, place / f"begun-{name}")
    gpt.export(place / "run", place / "exported", dtype="bfloat16")
    transformers_folder, step = place / "theirs", place / "run" / folder.step_name(12)
    transformers_folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(step / name, transformers_folder)
    part = "model-00001-of-00001.safetensors"
    shutil.copy(step / "model.safetensors", transformers_folder / part)
    from safetensors import safe_open

    from gpt.runs.checkpoint import INDEX

    with safe_open(transformers_folder / part, framework="np") as opened:
        (transformers_folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(opened.keys(), part)}))
    from gpt.config.text import TokenizeConfig
    from gpt.corpus import tokenize, unfinished_folder

    tokenize.tokenize_texts([str(text)], TokenizeConfig(out=str(place / "tokens"), tokenizer="bytes", jobs=1))
    with mock.patch.object(unfinished_folder, "finish", side_effect=StepLimit), contextlib.suppress(StepLimit):
        tokenize.tokenize_texts([str(text)], TokenizeConfig(out=str(place / "unfinished"), tokenizer="bytes", jobs=1))


_SHORT_RUN = {key: TINY[key] for key in ("batch_tokens", "dtype", "steps", "eval_every", "save_every")}


def _copy_unfinished(run: Path, copy: Path) -> None:
    shutil.copytree(run, copy)
    shutil.rmtree(copy / folder.step_name(12))
    record = json.loads((copy / "run.json").read_text())
    del record["ended"], record["result"]
    (copy / "run.json").write_text(json.dumps(record))


def _sign(name: str) -> Callable[[Path], None]:
    """Returns a function that updates the checksums of subfolder ``name``."""

    def sign(bad: Path) -> None:
        (bad / name / folder.CHECKSUMS).unlink()
        folder.write_checksums(bad / name)

    return sign


def _sign_sources(bad: Path) -> None:
    from gpt.system.files import file_sha256

    with contextlib.suppress(ValueError, TypeError, KeyError):
        manifest = json.loads((bad / MANIFEST).read_text())
        manifest["sources"]["sha256"] = file_sha256(bad / SOURCES)
        (bad / MANIFEST).write_text(json.dumps(manifest))


LAST, MIDDLE = folder.step_name(12), folder.step_name(8)
SAMPLE = "sample ab -m BAD -n 2 --greedy"
REPORT_COMMANDS = (
    ("report BAD", 1), ("report BAD --json", 1), ("report BAD GOOD -o report.html", 1),
)  # fmt: skip
EXPORT = ("export -m BAD -o new", 2)
RESUME = ("train --resume BAD --quiet", 1)
READ_COMMANDS = (
    (SAMPLE, 1), ("params BAD", 1), ("tokenizer encode --show abc -m BAD", 1), ("inspect neighbors ab -m BAD", 4),
    ("eval small.txt -m BAD --json", 4),
)  # fmt: skip
SUBJECTS = (
    Subject("run", "run.json", (*REPORT_COMMANDS, (SAMPLE, 2), EXPORT, RESUME)),
    Subject("begun-run", "run.json", (RESUME,)),
    Subject("begun-lora", "run.json", (RESUME,)),
    Subject("run", "metrics.jsonl", (*REPORT_COMMANDS, ("train --resume BAD --steps 13 --quiet", 10))),
    Subject("run", "index.json", ((SAMPLE, 1),)),
    Subject("run", f"{LAST}/gpt.json", READ_COMMANDS, _sign(LAST)),
    Subject("run", f"{LAST}/config.json", READ_COMMANDS, _sign(LAST)),
    Subject("run", f"{LAST}/checksums.json", ((SAMPLE, 1),)),
    Subject("begun-run", f"{MIDDLE}/gpt.json", (RESUME,), _sign(MIDDLE)),
    Subject("begun-run", f"{MIDDLE}/training.json", (RESUME,), _sign(MIDDLE)),
    Subject("begun-lora", f"{MIDDLE}/training.json", (RESUME,), _sign(MIDDLE)),
    Subject("lora", f"{LAST}/gpt.json", (*READ_COMMANDS, ("report BAD", 10)), _sign(LAST)),
    Subject("lora", f"{LAST}/adapter_config.json", READ_COMMANDS, _sign(LAST)),
    Subject("exported", "gpt.json", (*READ_COMMANDS, EXPORT), _sign(".")),
    Subject("exported", "config.json", READ_COMMANDS, _sign(".")),
    Subject("theirs", "config.json", READ_COMMANDS),
    Subject("theirs", "tokenizer.json", READ_COMMANDS),
    Subject("theirs", "model.safetensors.index.json", READ_COMMANDS),
    Subject("tokens", MANIFEST, (("train BAD --steps 2 --n-embd 16 --n-head 2 -o new --quiet", 4),
                                 ("eval BAD -m GOODRUN", 1), ("tokenizer show BAD", 4))),
    Subject("tokens", SOURCES, (("train BAD --steps 2 --n-embd 16 --n-head 2 -o new --quiet", 4),),
            _sign_sources),
    Subject("begun-run", f"tokens/{MANIFEST}", (RESUME, ("report BAD --json", 1))),
    Subject("begun-run", f"tokens/{SOURCES}", (RESUME,), lambda bad: _sign_sources(bad / "tokens")),
    Subject("unfinished", PROGRESS, (("tokenize text.txt -o BAD --tokenizer bytes --jobs 1 --resume --quiet", 1),)),
)  # fmt: skip


@dataclass(frozen=True)
class ForgedText:
    where: str  # Position and new value
    text: str


def forge(text: str, lines: bool, rng: random.Random) -> Iterator[ForgedText]:
    """Yields copies of ``text``, each with one JSON value replaced. If ``lines``, each line is a JSON value, and only a
    sample of lines is forged."""
    parts = text.splitlines() if lines else [text]
    line_numbers = sorted(
        {*range(min(2, len(parts))), *rng.sample(range(len(parts)), min(10, len(parts))), len(parts) - 1}
    )
    cases = [
        (n, path, value_name)
        for n in line_numbers
        for path in _json_paths(json.loads(parts[n]))
        for value_name in VALUES
    ]
    rng.shuffle(cases)
    for n, path, value_name in cases:
        value = json.loads(parts[n])
        forged_line = _replace_value(value, path, value_name)
        where = f"{f'line {n + 1}, ' if lines else ''}{'.'.join(map(str, path)) or 'all'} = {value_name}"
        yield ForgedText(where, "\n".join([*parts[:n], forged_line, *parts[n + 1 :]]) + "\n")


def _json_paths(value: Any, prefix: JsonPath = ()) -> Iterator[JsonPath]:
    """Yields the paths to nested values. In long lists and objects, visits only the first and last two items."""
    yield prefix
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    if len(items) > 40:
        items = items[:2] + items[-2:]
    for key, item in items:
        yield from _json_paths(item, (*prefix, key))


def _replace_value(value: Any, path: JsonPath, value_name: str) -> str:
    placeholder = "THE PLACE OF A FORGED VALUE"
    if not path:
        return VALUES[value_name]
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    if value_name == DELETED:
        del parent[path[-1]]
        return json.dumps(value)
    parent[path[-1]] = placeholder
    return json.dumps(value).replace(f'"{placeholder}"', VALUES[value_name], 1)


def run_command(words: list[str]) -> str:
    """Runs a command. Returns ``works``, ``refused`` or an error."""
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
    if code == 0 or StepLimit.__name__ in err:
        return "works"
    error_lines = [line for line in err.splitlines() if line.startswith("error:")][-1:]
    readable = error_lines and not any(
        words in error_lines[0] for words in ("internal error in gpt", "system error", "out of memory")
    )
    if code in (1, 2) and readable:  # A forged learning rate can make the loss NaN (status 1).
        return "refused" if len(error_lines[0]) < 6000 else f"LONG: {error_lines[0][:100]}"
    return f"exit {code}: {err.strip()[-300:]}"


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Raises `CommandTimeout` after `CPU_SECONDS` or `WALL_SECONDS`."""

    def raise_timeout(signum: int, frame: Any) -> NoReturn:
        raise CommandTimeout(f"{signal.Signals(signum).name}: it does not end")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, CPU_SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, WALL_SECONDS))
    previous = [signal.signal(signum, raise_timeout) for signum, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (signum, timer, _), handler in zip(timers, previous, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(signum, handler)


def run_commands(place: Path, subject: Subject, case: ForgedText, rng: random.Random) -> Iterator[tuple[str, str]]:
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
        yield command, run_command([names.get(word, word) for word in command.split()])


@contextlib.contextmanager
def limit_steps() -> Iterator[None]:
    """Limits runs to `MAX_STEPS` steps. A forged file can validly request 10¹⁸ steps."""
    from gpt.training.loop import Trainer

    original_step, original_train = Trainer.step, Trainer.train
    steps: list[int] = []

    def step_or_stop(self: Trainer) -> None:
        steps.append(1)
        if len(steps) > MAX_STEPS:
            raise StepLimit
        original_step(self)

    def reset_and_train(self: Trainer) -> Any:
        steps.clear()
        return original_train(self)

    with mock.patch.object(Trainer, "step", step_or_stop), mock.patch.object(Trainer, "train", reset_and_train):
        yield


def tried(place: Path, count: int, only: tuple[str, ...] = (), seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Tests about ``count`` forged files. Returns the outcomes and the errors."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    errors = []
    subjects = [subject for subject in SUBJECTS if not only or f"{subject.good}/{subject.file}" in only]
    (place / "small.txt").write_text("abc ab abd " * 10)
    with contextlib.chdir(place), limit_steps():
        for subject in subjects:
            text = (place / subject.good / subject.file).read_text()
            cases = forge(text, subject.file.endswith(".jsonl"), rng)
            for _, case in zip(range(-(-count // len(subjects))), cases, strict=False):
                for command, outcome in run_commands(place, subject, case, rng):
                    outcomes[outcome if outcome in ("works", "refused") else "wrong"] += 1
                    if outcome not in ("works", "refused"):
                        errors.append(f"{subject.good}/{subject.file}: {case.where}: gpt {command}: {outcome}")
                        if not __debug__ or os.environ.get("FORGED_SHOW"):
                            print(errors[-1], flush=True)
    return outcomes, errors


def main(words: list[str]) -> None:
    count = int(words[0]) if words else 5000
    with tempfile.TemporaryDirectory(prefix="gpt-forged-") as name:
        make(Path(name))
        outcomes, errors = tried(Path(name), count, tuple(words[1:]))
    print(format_outcomes(outcomes))
    print("\n".join(errors))
    sys.exit(bool(errors))


if __name__ == "__main__":
    main(sys.argv[1:])
