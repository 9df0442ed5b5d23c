import contextlib
import functools
import gc
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
import pytest

if TYPE_CHECKING:
    import torch

    from gpt.training import recipe

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
pytest.register_assert_rewrite("several")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
GPT2_RANKS = SHARED / "data" / "tiktoken"

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # Without bytecode files, each process would compile our modules.
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")  # A second thread does not help tiny models.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # Otherwise Inductor compiles a probe of each instruction set.

hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")  # A busy machine can stall.

for name in ("SIGINT", "SIGHUP"):  # Background jobs and nohup ignore these signals.
    if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
        # This handler also ignores the signal, but child processes do not inherit handlers.
        signal.signal(getattr(signal, name), lambda signum, frame: None)

for name in [name for name in os.environ if name.startswith("GPT_")]:
    del os.environ[name]  # The developer's settings must not change the tests.

WORDS = [
    "the", "cat", "sat", "on", "the", "mat", "while", "it’s", "raining", "in", "Zürich;", "naïve", "dogs", "🐕", "chased",
    "1234567", "cats,", "WE'LL", "SEE!\n\n\t",
]  # fmt: skip


def make_text(n_words: int = 4000, seed: int = 0) -> str:
    """Returns a learnable text with all kinds of characters that are difficult for tokenizers."""
    import random

    rng = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "er", "ing")]
    made_up = ["".join(random.Random(number).choices(syllables, k=1 + number % 4)) for number in range(200)]
    words = (rng.choice(WORDS) if rng.random() < 0.4 else rng.choice(made_up) for _ in range(n_words))
    return "".join(word + rng.choice([" ", " ", " ", "  ", "\n"]) for word in words)


@dataclass
class Done:
    code: int
    out: str
    err: str


Gpt = Callable[..., Done]
slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # slow case of a parametrized test
more = functools.partial(pytest.param, marks=pytest.mark.more)  # case that only `make test-more` runs


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the samples of training runs: 80 tokens would take as long as a dozen steps. Runs with ``minutes`` time
    their steps for a tenth of a second."""
    import gpt

    monkeypatch.setattr("gpt.training.evaluation.SAMPLE", gpt.SampleConfig(max_tokens=4))
    monkeypatch.setattr("gpt.training.measuring.PROBE_SECONDS", 0.1)


@pytest.fixture(scope="session")
def library_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(autouse=True)
def no_compiled_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, library_folder: Path) -> None:
    """Keeps tests from writing to the user's folder of compiled programs. Only `test_cpu_step` compiles training."""
    from gpt.system import programs

    def raise_none(*_: object) -> None:
        raise OSError("none in tests")

    if request.node.path.stem != "test_cpu_step":
        monkeypatch.setattr(programs, "own_folder", lambda: library_folder)
        monkeypatch.setattr(programs, "find", raise_none)


@pytest.fixture
def gpt(capfd: pytest.CaptureFixture[str]) -> Gpt:
    """Runs a command line in this process and returns its exit status, stdout and stderr."""
    import gpt_cli.main

    def run(*args: str | Path, stdin: bytes = b"") -> Done:
        original_stdin = sys.stdin
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
        capfd.readouterr()
        try:
            code = gpt_cli.main.main([str(arg) for arg in args])
        finally:
            sys.stdin = original_stdin
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Done(code, out, err)

    return run


def one_line_of_what_and_what_next(result: Done, message: str, code: int = 2) -> None:
    """Asserts that a command failed with ``code``, one error line containing ``message``, one hint and no output."""
    assert result.code == code, result.err
    lines = [line for line in result.err.splitlines() if line.startswith(("error:", "hint:"))]
    assert lines[0].startswith("error:")
    assert message in lines[0]
    assert lines[1].startswith("hint: ")
    assert len(lines) == 2
    assert result.out == ""


def spawn(*args: str | Path, cwd: Path | None = None, **kwargs: object) -> "subprocess.Popen[str]":
    code = "from gpt_cli.main import run; run()"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)], cwd=cwd, text=True, encoding="utf-8", **pipes | kwargs
    )  # type: ignore[call-overload]


def send(signum: int) -> None:
    """Sends a signal to this process and waits for the handler, which Python 3.11 can delay while other threads run."""
    signal.raise_signal(signum)
    time.sleep(0.001)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import gpt

    folder = tmp_path_factory.mktemp("session")
    text = folder / "text.txt"
    text.write_bytes(make_text().encode())
    result = gpt.train(text, out=str(folder / "run"), steps=30, dtype="float32", vocab_size=400, **TINY)
    gpt.load(result.run, for_decoding=True)  # Compiles the decoder, so that no test sees the note about it.
    return result.run


TINY = {
    "arch": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_tokens": 256, "sample_every": 0,
}  # fmt: skip
FAST: dict[str, Any] = {**TINY, "dtype": "float32", "vocab_size": 400}


def train(text: Path, **settings: Any) -> tuple[Any, list[Any]]:
    """Trains a tiny model and returns the result and the events. Only evaluates and saves at the end: by default, a short
    run does it after each step, which takes longer than the steps."""
    import gpt

    event_log: list[Any] = []
    result = gpt.train(text, listen=event_log.append, **{**FAST, "eval_every": 1000, **settings})
    return result, event_log


def resolved(
    n_bytes: int = 400_000, n_tokens: int = 140_000, vocab_size: int = 1024, dtype: str = "float32",
    **settings: Any,
) -> "recipe.Recipe":  # fmt: skip
    """Returns the recipe of a CPU run on a text of ``n_bytes`` and ``n_tokens``."""
    from gpt.config.train import TrainConfig
    from gpt.training import recipe

    known = facts(bytes=n_bytes, tokens=n_tokens, vocab_size=vocab_size, dtype=dtype)
    return recipe.plan(TrainConfig(**settings), known)


def facts(**known: Any) -> "recipe.Facts":
    """Returns the facts of a run on a text of 140,000 tokens, on a CPU with 16 GB, except for those ``known``."""
    from gpt.training.recipe import Facts

    defaults = {"bytes": 400_000, "tokens": 140_000, "vocab_size": 1024, "held_out": True, "device": "cpu"}
    return Facts(**{**defaults, "dtype": "float32", "memory": 2**34, "host_memory": 2**34, **known})


def losses(event_log: list[Any]) -> list[float]:
    from gpt.config.events import StepEvent

    return [event.loss for event in event_log if isinstance(event, StepEvent)]


def curve(run: Path) -> list[Any]:
    """Returns the steps, evaluations, samples and rollbacks in a run's metrics, without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve_lines = [line for line in lines if line["event"] in ("step", "eval", "sample", "rollback", "end")]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in curve_lines]


def weights(run: Path) -> dict[str, "torch.Tensor"]:
    from safetensors.torch import load_file

    from gpt.runs import folder

    return load_file(folder.find_checkpoint(f"{run}:latest") / "model.safetensors")


def state_of(run: Path) -> dict[str, "torch.Tensor"]:
    """Returns all tensors of a run's newest checkpoint, including optimizer and random states."""
    from safetensors.torch import load_file

    from gpt.runs import folder

    path = run / folder.checkpoints(run)[-1].name
    weights = next(path / name for name in ("model.safetensors", "adapter_model.safetensors") if (path / name).exists())
    return load_file(weights) | load_file(path / "training.safetensors")


def assert_same(first_run: Path, second_run: Path) -> None:
    """Asserts that two runs' newest checkpoints are bit-identical, except for times."""
    import torch

    from gpt.runs import folder

    a, b = state_of(first_run), state_of(second_run)
    assert set(a) == set(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name
    records = [
        json.loads((run / folder.checkpoints(run)[-1].name / "training.json").read_text())
        for run in (first_run, second_run)
    ]
    for record in records:
        for key in ("step_seconds", "seconds", "metrics_bytes", "first_step"):
            del record["state"][key]
    assert records[0] == records[1]


@pytest.fixture(autouse=True, scope="session")
def empty_session_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives session fixtures an empty current folder, so they do not see the clone's `runs/`."""
    with contextlib.chdir(tmp_path_factory.mktemp("nowhere")):
        yield


@pytest.fixture(autouse=True, scope="session")
def no_syncs() -> Iterator[None]:
    """Makes `os.fsync` do nothing, since no test loses power and each run syncs dozens of files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_thread_watcher() -> None:
    """Disables the watcher of waiting threads, since tests patch its clock and count threads."""
    from gpt.system import waiting

    waiting._watching.acquire(blocking=False)


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives every test an empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def text(workdir: Path) -> Path:
    path = workdir / "book.txt"
    path.write_bytes(make_text().encode())
    return path


@pytest.fixture
def second_text(workdir: Path) -> Path:
    path = workdir / "other.txt"
    path.write_bytes(make_text(2500, seed=5).encode())
    return path


@pytest.fixture
def two_runs(run_folder: Path, workdir: Path) -> list[Path]:
    """Returns two copies of the run. The second has another learning rate and half the steps, and its last sample copies
    training text."""
    from gpt.config import events
    from gpt.corpus.token_folder import TokenFolder

    shutil.copytree(run_folder, "one")
    shutil.copytree(run_folder, "two")
    record = json.loads(Path("two/run.json").read_text())
    record["resolved"]["lr"] = 0.123
    Path("two/run.json").write_text(json.dumps(record))
    folder = TokenFolder("two/tokens")
    text = folder.tokenizer.decode(folder.stream("train").take(40, 60).tolist())
    lines = [line for line in Path("two/metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] <= 15]
    kept_lines = [line for line in lines if json.loads(line)["event"] in ("step", "eval")]
    kept_lines.append(events.to_json(events.SampleEvent(15, 150, 1.5, "</script><b>Zürich</b>")))
    kept_lines.append(events.to_json(events.SampleEvent(15, 150, 1.5, text)))
    Path("two/metrics.jsonl").write_text("".join(line + "\n" for line in kept_lines))
    return [Path("one"), Path("two")]


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs except with ``-m gpu``, since other tests expect CPU results."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Freezes the million objects of imported modules, so that garbage collections skip them."""
    gc.collect()
    gc.freeze()


SLOW_FIXTURES = {"several_trained", "browser", "wheel", "built", "few_steps"}
# These files start first, so that no process is left with a long one at the end.
LONG_FILES = {
    f"test_{name}.py"
    for name in (
        "sharded_training", "parallel", "cpu_step", "serve_page", "html_page", "memory", "resume", "training", "readme",
    )
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
    for item in items:
        if SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


# Sets the promise `traced`, which the page's next search of the training text fulfils once it is shown.
WATCH_TRACE = """() => {
    window.search_ ??= engine.trace;
    window.traced = new Promise((done) => {
        engine.trace = async (...query) => { const found = await search_(...query); setTimeout(done); return found; };
    });
}"""


@pytest.fixture
def disguise(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Returns `fake_cuda.disguised`, a context that simulates CUDA devices on the CPU. Skips the test if the simulation
    is unavailable."""
    import fake_cuda

    if (reason := fake_cuda.why_not()) is not None:
        pytest.skip(reason)
    cache = getattr(request.config, "cache", None)  # Pytest keeps this folder between runs.
    folder = cache.mkdir("fake_cuda") if cache else tmp_path_factory.mktemp("fake_cuda")
    try:
        fake_cuda.build(folder)
    except fake_cuda.Unavailable as error:
        pytest.skip(str(error))
    return functools.partial(fake_cuda.disguised, folder)


@pytest.fixture(params=[pytest.param("real", marks=pytest.mark.gpu), "disguised"])
def cuda(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Runs a test on a CUDA device simulated on the CPU or, with ``-m gpu``, on a real one."""
    if request.param == "real":
        request.getfixturevalue("real_cuda")
        yield None
    else:
        with request.getfixturevalue("disguise")() as device:
            yield device


@pytest.fixture
def real_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and pytest -m gpu")


needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="../shared is not in a user's checkout")


def deny_access(monkeypatch: pytest.MonkeyPatch, folder_name: str) -> None:
    """Makes ``stat`` fail for files in folders called ``folder_name``."""
    stat = Path.stat

    def no_stat(path: Path, **kwargs: bool) -> os.stat_result:
        if path.parent.name == folder_name:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "stat", no_stat)


class Stream:
    """A stream of training tokens in memory."""

    def __init__(self, ids: Sequence[int], offsets: Any = ()) -> None:
        self.ids, self.offsets = np.array(ids, np.int64), offsets

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, start: int, length: int) -> Any:
        assert 0 <= start <= start + length <= len(self.ids)
        return self.ids[start : start + length]

    def release(self) -> None:
        pass
