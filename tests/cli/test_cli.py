"""Command-line output, errors and exit statuses."""

import contextlib
import functools
import http.server
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import Gpt, make_text, more, one_line_of_what_and_what_next, slow
from gpt_cli.show import progress, render
from rich.cells import cell_len
from rich.console import Console
from safetensors.torch import load_file

import gpt as library
from gpt.config import events
from gpt.config.model import PRESETS
from gpt.documents import catalogue

QUICK = [
    "--steps", "4", "--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--block-size", "16", "--batch-tokens", "64",
    "--dtype", "float32",
]  # fmt: skip


# Start-up


# Runs the commands in its argument, a list of lists of words, in one process.
RUN_ALL = """
import json, sys
from gpt_cli.main import main
sys.exit(max(main(words) for words in json.loads(sys.argv[1])))
"""
LIGHT = (
    "--help", "train --help", "sample -h", "params gpt3-175b", "params --list", "data --help", "data list --help",
    "data list", "data show openwebtext", "tokenizer", "tokenizer --help",
    *(f"tokenizer {name} --help" for name in ("train", "show", "encode", "decode")), "report --help", "inspect",
    *(f"inspect {name} --help" for name in ("attention", "neighbors")),
)  # fmt: skip


def test_light_commands_do_not_import_torch(gpt: Gpt, run_folder: Path, tmp_path: Path) -> None:
    gpt("export", "-m", run_folder, "-o", tmp_path / "model.gguf")
    (tmp_path / "book.txt").write_text(make_text(500))
    lines = [
        f"params {run_folder}", f"params {tmp_path}/model.gguf",
        f"tokenizer train {tmp_path}/book.txt -o {tmp_path}/vocab --vocab-size 300",
        f"tokenizer show {tmp_path}/vocab",
        f"tokenizer encode x --tokenizer {tmp_path}/vocab --json", "tokenizer decode 1 --tokenizer bytes",
        f"tokenize {tmp_path}/book.txt -o {tmp_path}/tokens --tokenizer {tmp_path}/vocab -q",
    ]  # fmt: skip
    code = (
        "import sys\nfrom gpt_cli.main import main\n"
        "for line in sys.argv[1:]:\n"
        "    assert main(line.split()) == 0, line\n"
        "    heavy = {'torch', 'transformers', 'safetensors'} & set(sys.modules)\n"
        "    heavy |= {'numpy', 'tiktoken'} & set(sys.modules) if line in " + repr(LIGHT) + " else set()\n"
        "    assert not heavy, (line, heavy)"
    )
    result = subprocess.run([sys.executable, "-c", code, *LIGHT, *lines], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_names_of_the_library() -> None:
    assert set(library.__all__) <= set(dir(library))
    with pytest.raises(AttributeError):
        library.nothing  # noqa: B018


# Options


def test_completion_options_have_no_environment_variable(gpt: Gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPT_SHOW_COMPLETION", "1")
    monkeypatch.setenv("GPT_VERSION", "4.1")  # A variable of another program
    out = gpt("--help").out
    assert "--install-completion" in out
    assert "env var" not in out
    assert gpt("--version").out == f"gpt {library.__version__}\n"


# gpt train


@pytest.fixture
def book(workdir: Path) -> Path:
    path = workdir / "book.txt"
    path.write_bytes(make_text(1500).encode())
    return path


def test_train_prints_checkpoint_loss_and_next_command(gpt: Gpt, book: Path) -> None:
    result = gpt("train", book, *QUICK)
    assert result.code == 0
    assert re.search(r"saved\s+runs.book.step-00000\d", result.out)
    assert re.search(r"loss\s+\d\.\d{4} nats per token, \d\.\d{4} bits per byte", result.out)
    assert re.search(r'more\s+gpt sample "Once upon" -m runs.book', result.out)
    assert "1 document;" in result.err
    assert "held-out" in result.err


def test_train_json_keys(gpt: Gpt, book: Path) -> None:
    result = gpt("train", book, *QUICK, "--json")
    values = json.loads(result.out)
    assert list(values) == [
        "run", "checkpoint", "steps", "tokens_seen", "val_loss", "val_tokens", "bits_per_byte", "tokens_per_second",
        "step_seconds", "seconds", "parameters", "device", "dtype", "sample", "prompt", "yardsticks", "trend", "verdict",
    ]  # fmt: skip
    assert values["tokens_seen"] / values["tokens_per_second"] == pytest.approx(values["step_seconds"], 0.01, 0.001)
    assert values["seconds"] == json.loads(Path(values["run"], "run.json").read_text())["result"]["seconds"]
    report = json.loads(gpt("report", values["run"], "--json").out)
    last = Path(values["run"], "metrics.jsonl").read_text().splitlines()[-1]
    assert values["seconds"] == json.loads(last)["seconds"] == report["end"]["seconds"]
    assert (values["steps"], values["tokens_seen"], values["device"], values["dtype"]) == (4, 256, "cpu", "float32")
    assert Path(values["checkpoint"]).parent == Path(values["run"])
    result = gpt("train", book, *QUICK, "--json", "--quiet", "--val-fraction", "0")
    assert json.loads(result.out)["val_loss"] is None
    assert result.err == ""


def test_train_reads_stdin_and_folders(gpt: Gpt, workdir: Path) -> None:
    (workdir / "texts").mkdir()
    (workdir / "texts" / "a.md").write_text("one text " * 100)
    assert gpt("train", "-", *QUICK, stdin=b"from standard input " * 100).code == 0
    assert gpt("train", "texts", "-", *QUICK, "-o", "both", stdin=b"and more ").code == 0
    names = [source["name"] for source in json.loads(Path("both/run.json").read_text())["sources"]]
    assert names == [str(Path("texts/a.md")), "stdin"]
    assert Path("runs/stdin").exists()


def test_precedence_is_option_environment_file_default(
    gpt: Gpt, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tomllib

    def print_config(*args: str) -> dict[str, object]:
        result = gpt("train", "--print-config", *args)
        assert result.code == 0, result.err
        return tomllib.loads(result.out)

    assert print_config()["keep"] == 2
    Path("c.toml").write_text("keep = 3\nsteps = 30\nlr = 0.5\nmicro_batch = 2\n")
    assert print_config("--config", "c.toml")["keep"] == 3
    Path("marked.toml").write_bytes("\ufeffkeep = 7\r\n".encode())
    assert print_config("--config", "marked.toml")["keep"] == 7
    monkeypatch.setenv("GPT_TRAIN_KEEP", "4")
    monkeypatch.setenv("GPT_TRAIN_CONFIG", "c.toml")
    assert print_config()["keep"] == 4
    assert print_config("--keep", "5")["keep"] == 5
    assert print_config()["steps"] == 30
    config = gpt("train", "--print-config", "--out", "x").out
    Path("d.toml").write_text(config, encoding="utf-8")
    assert gpt("train", "--print-config", "--config", "d.toml").out == config
    for line, message in {
        "stesp = 3": 'unknown key "stesp"', "steps =": "is not TOML", "lr = true": "lr is true", "pairs = 'no'": "pairs is 'no'"
    }.items():  # fmt: skip
        Path("c.toml").write_text(line)
        one_line_of_what_and_what_next(gpt("train", "--config", "c.toml"), message)
    one_line_of_what_and_what_next(gpt("train", "--config", "none.toml"), "cannot read none.toml")


def test_environment_variables_work_for_every_command(
    gpt: Gpt, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPT_SAMPLE_MAX_TOKENS", "3")
    monkeypatch.setenv("GPT_SAMPLE_JSON", "1")
    monkeypatch.setenv("GPT_SAMPLE_MODEL", str(run_folder))
    assert len(json.loads(gpt("sample", "--ignore-eot").out)["tokens"]) == 3
    monkeypatch.setenv("GPT_PARAMS_JSON", "1")
    assert json.loads(gpt("params", "gpt2").out)["trainable"] == 124_439_808
    monkeypatch.setenv("GPT_DATA_SHOW_JSON", "1")
    assert json.loads(gpt("data", "show", "pydocs").out)["name"] == "pydocs"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "none.txt"], "there is no file none.txt"),
        (["train", "empty.txt"], "empty.txt is empty: 0 characters"),
        (["train", "byte.txt"], "too short to hold out 0.1 of it: 1 byte"),
        (["train", "binary.bin"], "is not text: it has a zero byte in line 1"),
        (["train", "latin.txt"], "is not UTF-8: byte 0xe9 at offset 9, line 2"),
        (["train", "book.txt", "--n-embd", "33"], "n_embd 33 is not divisible by n_head 4"),
        (["train", "book.txt", "--tokenizer", "gtp2"], 'there is no tokenizer "gtp2"'),
        (["train", "book.txt", "--vocab-size", "30000"], "supports a vocabulary of"),
        (["train", "book.txt", "--steps", "-1"], "steps is -1; it must be 1 or more"),
        (["train", "book.txt", "--out", "book.txt/x"], "cannot create the run folder"),
        (["sample", "hi"], "no run with a checkpoint"),
        (["sample", "hi", "-m", "book.txt"], "is not a run or a checkpoint"),
        (["sample", "--prompt-file", "none.txt"], "cannot read none.txt"),
        (["sample", "--stop", "\udcff"], "stop is not UTF-8"),
        (["sample", "\udcff"], "the prompt is not UTF-8"),
        (["train", "book.txt", "--encoding", "\udcff"], 'there is no encoding "'),
        (["sample", "-N", str(2**63)], "Invalid value for '--num' / '-N': Input should be less than or equal to"),
        (["sample", "-i", "--seed", "-1"], "Invalid value for '--seed': Input should be greater than or equal to 0"),
        (["sample", "hi", "-m", "hf:a/b/c"], '"hf:a/b/c" is not a Hugging Face Hub model'),
        (["train", "book.txt", "--lora-rank", "4"], "--lora-rank needs --init"),
        (["train", "book.txt", "--init", "x", "--lora-alpha", "2"], "--lora-alpha needs --lora-rank"),
        (["params", "gpt2", "--positions", "sinus"], 'there is no positions "sinus"'),
        (["params", "--list", "--n-layer", "3"], "--list shows all presets, but --n-layer asks for a single shape"),
        (["eval"], "text"),
        (["train", "book.txt", "--chat", "--pairs"], "--chat cannot be combined with --pairs"),
        (["train", "book.txt", "--minutes", "1", "--steps", "9"], "--steps and --minutes both set the length of training"),
        (["train", "book.txt", "--minutes", "0.001"], "there is no time to train"),
        (["train", "book.txt", "--positions", "rotary", "--n-embd", "12", "--n-head", "4"], "even width of a head, not 3"),
        (["params", "--n-layer", "2"], "without a preset, --n-head, --n-embd are required"),
        (["train", "book.txt", "--tokenizer", "book.txt"], "book.txt is not a tokenizer"),
        (["tokenizer", "train", "book.txt"], "Missing option '--out'"),
        (["tokenizer", "train", "book.txt", "-o", "new", "--vocab-size", "9"], "vocab-size is 9; it must be between 257"),
        (["tokenizer", "show", "."], "contains no tokenizer"),
        (["tokenizer", "encode", "x", "-m", "run", "--tokenizer", "bytes"], "--tokenizer and -m both name a tokenizer"),
        (["tokenizer", "encode", "x", "--file", "book.txt", "--tokenizer", "bytes"], "a text and --file were both given"),
        (["tokenizer", "decode", "1", "x", "--tokenizer", "bytes"], '"x" is not a token id'),
        (["tokenizer", "decode", "257", "--tokenizer", "bytes"], "id 257 is outside the vocabulary of 257"),
    ],
)  # fmt: skip
def test_invalid_input_is_one_error_line(gpt: Gpt, book: Path, args: list[str], message: str) -> None:
    Path("empty.txt").touch()
    Path("byte.txt").write_bytes(b"x")
    Path("binary.bin").write_bytes(b"ELF\0\1\2")
    Path("latin.txt").write_bytes(b"one\ntwo c\xe9")
    before = set(Path().rglob("*"))
    one_line_of_what_and_what_next(gpt(*args), message)
    assert set(Path().rglob("*")) == before  # No partial files are left.


def test_typos_get_suggestions(gpt: Gpt, book: Path) -> None:
    for line, suggestion in {
        "trian": "train", "train --stesp 3": "--steps", "train shakespear": "shakespeare", "params gpt3-175": "gpt3-175b",
        "train book.txt --preset gtp2": "gpt2", "train book.txt --device cdua": "cuda", "data show wikitext": "wikitext-2",
    }.items():  # fmt: skip
        one_line_of_what_and_what_next(gpt(*line.split()), "")
        assert suggestion in gpt(*line.split()).err


def test_option_overrides_conflicting_environment_variable(
    gpt: Gpt, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPT_TRAIN_STEPS", "5")
    result = gpt("train", "--print-config", "--epochs", "2")
    assert "epochs = 2.0" in result.out
    assert "steps" not in result.out
    conflict = gpt("train", "--print-config", "--epochs", "2", "--steps", "3")
    one_line_of_what_and_what_next(conflict, "--steps and --epochs both")


def test_out_can_end_in_a_slash_and_folders_do_not_shadow_corpora(gpt: Gpt, book: Path) -> None:
    for _ in range(2):
        assert gpt("train", book, *QUICK, "-o", "r/x/").code == 0
    assert sorted(path.name for path in Path("r").iterdir()) == ["x", "x-2"]
    Path("pydocs").mkdir()  # A folder must not shadow the default corpus.
    assert gpt("train", *QUICK, "--vocab-size", "300").code == 0
    assert json.loads(Path("runs/pydocs/run.json").read_text())["sources"][0]["name"].startswith("pydocs/")


def test_diverged_run_exits_with_1_and_saves_no_nan(gpt: Gpt, book: Path) -> None:
    result = gpt("train", book, *QUICK, "--lr", "1e12", "--warmup", "0", "--eval-every", "1", "--schedule", "constant")
    one_line_of_what_and_what_next(result, "at a learning rate of ", code=1)
    for path in Path("runs/book").glob("step-*/model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())


def test_out_of_memory_is_an_error(gpt: Gpt, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpt.training import strategy

    def fail(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(strategy, "GPT", fail)
    one_line_of_what_and_what_next(gpt("train", book, *QUICK), "out of memory", code=1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals to try this on")
def test_progress_on_stderr_does_not_affect_stdout(run_folder: Path, book: Path) -> None:
    """The terminal shows the progress bar, and stdout receives every line."""
    import pty

    commands = [["eval", str(book), "-m", str(run_folder), "--per-token"], ["train", str(book), *QUICK, "--json"]]
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_ALL, json.dumps(commands)], stdout=subprocess.PIPE, stderr=slave, cwd=book.parent
    )
    os.close(slave)
    terminal_output = bytearray()

    def read_terminal() -> None:  # A full terminal would block the process.
        with contextlib.suppress(OSError):  # Linux reports the end of output as an error.
            while part := os.read(master, 65536):
                terminal_output.extend(part)

    reader = threading.Thread(target=read_terminal)
    reader.start()
    out = process.communicate()[0]
    reader.join()
    os.close(master)
    *tokens, result = [json.loads(line) for line in out.decode().splitlines()]
    assert process.returncode == 0
    assert len(tokens) >= 1000 and "val_loss" in result
    assert b"scored" in terminal_output and b"steps of 64 tokens" in terminal_output


@pytest.mark.parametrize(
    "args",
    [
        ["train", "boook.txt"],
        ["tokenize", "boook.txt", "-o", "tokens"],
        ["sample", "x", "-m", "boook.txt"],
        ["sample", "--prompts", "boook.txt"],
        ["report", "boook.txt"],
        ["params", "boook.txt"],
    ],
)
def test_close_names_are_offered_for_missing_files(gpt: Gpt, book: Path, args: list[str]) -> None:
    result = gpt(*args)
    assert (result.code, result.err.splitlines()[-1]) == (2, 'hint: did you mean "book.txt"?')


def terminal(width: int, height: int = 25) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)


def live_line(display: progress.TrainDisplay) -> str:
    """Returns what the terminal shows now. Fails if it does not fit into one line."""
    assert display.bar is not None
    console = terminal(display.console.width)
    console.print(display.bar)
    line = console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]
    assert "\n" not in line and cell_len(line) <= console.width, line
    return line


@pytest.mark.parametrize("width", [20, 60, 80, 100, 140])
@pytest.mark.parametrize("plan", [events.Plan(12_000, 64), events.Plan(12_000, 64, "teacher 3 of 8", 3800.0)])
def test_training_line_fits_and_drops_the_least_important(width: int, plan: events.Plan) -> None:
    dropped = ["tokens/s (41.3 % MFU)", "━", "step 1,210", "held-out 3.250 (best)", "loss 4.500", " left"]
    with progress.TrainDisplay(quiet=False, console=terminal(width)) as display:
        display(plan)
        display(events.EvalEvent(5, 320, 1.0, val_loss=3.25, best=True))
        for step in range(1200, 1211):
            loss = 4.5 + (step < 1210)
            display(events.StepEvent(step, 640 * step, 2.0, loss, 0.1, 1.0, tokens_per_second=12_345.0, mfu=0.413))
        line = live_line(display)
    shown = [part in line for part in dropped]
    assert shown[-1] and all(shown[-3:] if width >= 60 else [True]) and all(shown if width >= 140 else [True])
    assert width < 80 or "step 1,210" in line
    assert width < 100 or "━" in line
    assert "step" not in line or "/12,000" in line or plan.seconds


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize(
    ("verb", "unit"),
    [("fetched", "bytes"), ("tokenized", "bytes"), ("read by the teachers", "tokens"), ("written", "parameters")],
)
def test_other_lines_fit(width: int, verb: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with progress.TrainDisplay(quiet=False, console=terminal(width)) as display:
        for now, done in ((10.0, 1_234_567), (4000.0, 1_234_567_890)):
            monkeypatch.setattr(time, "monotonic", lambda now=now: now)
            display(events.Progress(verb, done, 12_345_678_901, unit))
        line = live_line(display)
    assert verb in line and "9 h 59 min left" in line
    assert width < 100 or f"1,234,567,890/12,345,678,901 {unit}" in line


def test_a_task_without_a_total_shows_the_time_that_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 10.0)
    with progress.TrainDisplay(quiet=False, console=terminal(60)) as display:
        display(events.Progress("compiling the step"))
        display(events.Note("compiling the step for this CPU"))  # The spinner stays.
        monkeypatch.setattr(time, "monotonic", lambda: 107.0)
        assert live_line(display)[1:] == "  compiling the step  1 min 37 s"
        display(events.Plan(100, 64))
        assert display.bar is None


@pytest.mark.parametrize(("height", "shown"), [(25, (False, False)), (30, (True, False)), (45, (True, True))])
def test_chart_of_losses_is_shown_if_the_terminal_has_room(height: int, shown: tuple[bool, bool]) -> None:
    with progress.TrainDisplay(quiet=False, console=terminal(80, height)) as display:
        display(events.Plan(1000, 64))
        for step in range(1, 501):
            display(events.StepEvent(step, 64 * step, 2.0, 6 - step / 100, 0.1, 1.0, tokens_per_second=320.0))
            if step % 100 == 0:
                display(events.EvalEvent(step, 64 * step, 2.0, val_loss=7 - step / 100, best=True))
        display(events.StepEvent(501, 64 * 501, 2.0, 1.0, 0.1, 1.0, tokens_per_second=320.0))
        assert display.bar is not None
        live = terminal(80)
        live.print(display.bar)
        display(events.EndEvent(501, 64 * 501, 3.0, "steps", None, None, None))
    printed = display.console.file.getvalue().rpartition("\x1b")[2]  # type: ignore[attr-defined]
    texts = [live.file.getvalue(), printed]  # type: ignore[attr-defined]
    assert tuple("held-out" in text and "training" in text for text in texts) == shown
    assert all(cell_len(line) <= 80 for text in texts for line in text.splitlines())


def test_line_and_chart_of_a_model_have_nothing_of_its_teachers() -> None:
    with progress.TrainDisplay(quiet=False, console=terminal(140, 45)) as display:
        for first, phase in ((1, "teacher 1 of 1"), (51, "pupil")):
            display(events.Plan(100, 64, phase))
            for step in range(first, first + 50):
                display(events.StepEvent(step, 64 * step, 2.0, 4.5, 0.1, 1.0, tokens_per_second=320.0))
                line = live_line(display)  # The chart is below it after an evaluation.
            assert phase in line and "held-out" not in line
            display(events.EvalEvent(first + 49, 64 * first, 2.0, val_loss=3.25, best=True))
            assert display.chart and display.held_out
            display(events.TeacherEvent(first + 49, 64 * first, 2.0, "teachers/1"))


@pytest.mark.parametrize(
    ("plan", "left"), [(events.Plan(100, 64), "18 s"), (events.Plan(5, 64, "", 300_030.0), "83 h 20 min")]
)
def test_samples_while_training_tell_how_good_the_model_is(plan: events.Plan, left: str) -> None:
    """A timed run can take more steps than was estimated."""
    verdict = "worse than xz by 17%"
    with progress.TrainDisplay(quiet=False, console=terminal(120)) as display:
        display(plan)
        display(events.StepEvent(10, 640, 2.0, loss=4.5, lr=0.1, grad_norm=1.0, tokens_per_second=320.0))
        display(events.SampleEvent(10, 640, 2.0, text="first line\n\nsecond", prompt="first", verdict=verdict))
        display(events.SampleEvent(5, 320, 2.0, text="of the best checkpoint"))  # The result shows it.
    text = display.console.file.getvalue()  # type: ignore[attr-defined]
    assert f"step 10  {left} left  {verdict}" in text
    assert "first line" in text and "second" in text and "best" not in text
    spans = render.sample_text("first", "first line\n\nsecond", 4).spans
    assert [(span.start, span.end, span.style) for span in spans] == [(0, 9, "dim")]


# gpt sample


def test_same_seed_repeats_the_sample(gpt: Gpt, run_folder: Path) -> None:
    first = gpt("sample", "the cat", "-m", run_folder, "--seed", "5", "-n", "20")
    assert first.out.startswith("the cat")
    assert first.out.endswith("\n")
    assert first.err == ""
    assert gpt("sample", "the cat", "-m", run_folder, "--seed", "5", "-n", "20").out == first.out
    assert gpt("sample", "the cat", "-m", run_folder, "--seed", "6", "-n", "20").out != first.out
    no_echo = gpt("sample", "the cat", "-m", run_folder, "--seed", "5", "-n", "20", "--no-echo")
    assert "the cat" + no_echo.out == first.out


def test_printed_random_seed_repeats_the_sample(gpt: Gpt, run_folder: Path) -> None:
    result = gpt("sample", "the", "-m", run_folder, "-n", "30")
    seed = re.fullmatch(r".+step-\d+, seed (\d+)\n", result.err)
    assert seed
    assert gpt("sample", "the", "-m", run_folder, "-n", "30", "--seed", seed[1]).out == result.out
    assert gpt("sample", "the", "-m", run_folder, "-n", "30", "--greedy").err == ""


def test_sample_json_keys(gpt: Gpt, run_folder: Path) -> None:
    result = gpt("sample", "the cat", "-m", run_folder, "-N", "3", "--seed", "5", "-n", "12", "--ignore-eot", "--json")
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    tokenizer = library.load(run_folder).tokenizer
    for line in lines:
        assert list(line) == ["prompt_index", "index", "prompt", "text", "tokens", "logprob", "finish_reason", "seed"]
        values = [line[key] for key in ("prompt_index", "prompt", "finish_reason", "seed")]
        assert values == [0, "the cat", "length", 5]
        assert len(line["tokens"]) == 12
        assert line["logprob"] < 0
        assert tokenizer.decode(line["tokens"]) == line["text"]
    assert len({line["text"] for line in lines}) == 3
    greedy = json.loads(gpt("sample", "the cat", "-m", run_folder, "--greedy", "--json").out)
    assert greedy["seed"] is None


def test_sample_beyond_the_context_prints_a_note(gpt: Gpt, run_folder: Path) -> None:
    args = ["sample", "the", "-m", run_folder, "--greedy", "--ignore-eot"]
    assert "outgrew the context of 32 tokens" in gpt(*args, "-n", "100").err
    assert gpt(*args).err == ""  # The default length is longer than the context too.


@pytest.mark.parametrize("encoding", [slow("ascii"), more("cp1252")])
def test_commands_work_with_limited_output_encodings(run_folder: Path, encoding: str) -> None:
    env = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    sample = ["-n", "3", "--seed", "1", "-m", str(run_folder)]
    commands = [
        ["sample", "🐕 日本語", *sample],
        ["inspect", "attention", "Zürich 🐕 cat", "-m", str(run_folder)],
        ["params", "gpt2"],
        ["--help"],
        ["sample", "é 🐕", *sample, "--json"],
    ]
    code = "import json, sys; from gpt_cli.main import main; [print(main(words)) for words in json.loads(sys.argv[1])]"
    process = [sys.executable, "-c", code, json.dumps(commands)]
    result = subprocess.run(process, env=env, capture_output=True, check=True)
    *lines, sample_json, status = result.stdout.decode(encoding).splitlines()
    assert [line for line in [*lines, status] if line.isdigit()] == ["0"] * len(commands), result.stderr
    assert json.loads(sample_json)["prompt"] == "é 🐕"


# gpt eval


def test_eval_json_keys(gpt: Gpt, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes("the cat sat in Zürich\n".encode() * 9)
    values = json.loads(gpt("eval", tmp_path / "t.txt", "-m", run_folder, "--json").out)
    assert list(values) == [
        "loss", "perplexity", "bits_per_byte", "word_perplexity", "tokens", "bytes", "words", "stride", "block_size",
        "yardsticks", "trend", "verdict",
    ]  # fmt: skip
    assert (values["bytes"], values["words"], values["stride"], values["block_size"]) == (9 * 23, 45, 32, 32)
    shorter_stride = json.loads(gpt("eval", tmp_path / "t.txt", "-m", run_folder, "--json", "--stride", "4").out)
    assert shorter_stride["tokens"] == values["tokens"]
    assert shorter_stride["loss"] != values["loss"]
    one_line_of_what_and_what_next(gpt("eval", tmp_path / "t.txt", "-m", run_folder, "--stride", "33"), "stride is 33")
    output = gpt("eval", tmp_path / "t.txt", "-m", run_folder).out
    assert f"{values['loss']:.4f}" in output
    assert "nats per token" in output


def test_eval_loss_matches_the_token_logprobs(gpt: Gpt, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "t" / name).write_bytes(make_text(60).encode())
    values = json.loads(gpt("eval", tmp_path / "t", "-m", run_folder, "--json").out)
    lines = [json.loads(line) for line in gpt("eval", tmp_path / "t", "-m", run_folder, "--per-token").out.splitlines()]
    assert len(lines) == values["tokens"]
    assert -sum(line["logprob"] for line in lines) / len(lines) == pytest.approx(values["loss"], rel=1e-6)
    first = [line for line in lines if line["document"] == 0]
    assert [line["position"] for line in first] == list(range(1, len(first) + 1))
    ids = library.load(run_folder).tokenizer.encode((tmp_path / "t" / "a.txt").read_bytes().decode()).tolist()
    assert [line["token"] for line in first] == ids[1:]


# gpt params


def test_params_table_matches_the_gpt3_paper(gpt: Gpt) -> None:
    out = gpt("params", "gpt3-175b").out
    for number in ("617,558,016", "14,495,514,624", "57,982,058,496", "175,181,291,520", "174,604,259,328"):
        assert number in out
    assert "(128 × 12,288) × 96 × 96" in out
    assert "W_V" in out and "W_O" in out and "tied" in out
    bars = {line.split()[0]: (line.count("█"), line) for line in out.splitlines() if "%" in line}
    assert len(bars) == 8
    assert [bars[name][0] for name in ("Up-Projection", "Down-Projection", "Key")] == [20, 20, 5]
    assert " 8.3%" in bars["Key"][1] and "33.1%" in bars["Up-Projection"][1]
    assert "16 heads give the paper's total" in gpt("params", "gpt3-1.3b").out
    assert "5,120 gives the paper's total" in gpt("params", "gpt3-13b").out


def test_params_json_keys(gpt: Gpt, run_folder: Path) -> None:
    values = json.loads(gpt("params", "gpt2", "--json").out)
    assert list(values) == [
        "name", "config", "rows", "total_weights", "tied", "positions", "biases", "layer_norms", "trainable",
    ]  # fmt: skip
    assert values["trainable"] == 124_439_808
    assert [list(row) for row in values["rows"]] == [["matrix", "dimensions", "parameters"]] * 8
    assert json.loads(gpt("params", run_folder, "--json").out)["config"]["n_embd"] == 32
    rotary = json.loads(gpt("params", "gpt2", "--positions", "rotary", "--json").out)
    assert (rotary["positions"], rotary["trainable"]) == (0, 124_439_808 - 1024 * 768)


def test_params_compares_models(gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    out = gpt("params", "gpt2", "gpt3-125m", run_folder).out
    assert out.split()[:4] == ["Matrix", "gpt2", "gpt3-125m", str(run_folder)]
    values = [json.loads(line) for line in gpt("params", "gpt2", "gpt3-125m", "--json").out.splitlines()]
    assert values == [json.loads(gpt("params", name, "--json").out) for name in ("gpt2", "gpt3-125m")]
    one_line_of_what_and_what_next(gpt("params", "gpt2", "gtp3-125m"), 'no preset, run or checkpoint "gtp3-125m"')
    one_line_of_what_and_what_next(gpt("params", "gpt2", "-o", "x.png"), "is not the name of a page")


def test_params_list_contains_every_preset(gpt: Gpt) -> None:
    out = gpt("params", "--list").out
    assert all(name in out for name in PRESETS)
    assert gpt("params").out == out
    names = [json.loads(line)["name"] for line in gpt("params", "--list", "--json").out.splitlines()]
    assert names == list(PRESETS)


# gpt data


def test_data_list_is_sorted_and_complete(gpt: Gpt) -> None:
    out = gpt("data", "list").out
    assert all(word in out for word in ("pydocs", "in Python", "wikitext-103", "314.7 MB", "CC-BY-SA-3.0", "28.5 GB"))
    lines = [json.loads(line) for line in gpt("data", "list", "--json").out.splitlines()]
    assert [line["name"] for line in lines] == sorted(line["name"] for line in lines)
    assert {tuple(line) for line in lines} == {DATA_KEYS}
    assert gpt("data").out == gpt("data", "--help").out


DATA_KEYS = ("name", "title", "license", "language", "homepage", "field", "rows", "size", "status", "folder")


def test_data_show_prints_files_and_checksums(gpt: Gpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPT_CACHE_DIR", str(tmp_path))
    out = gpt("data", "show", "wikitext-2").out
    for word in ("6,357,543", "e83889baabc497075506", "validation-00000", "val", "to fetch", str(tmp_path), "lines"):
        assert word in out
    assert "none published" in gpt("data", "show", "openwebtext").out
    values = json.loads(gpt("data", "show", "wikitext-2", "--json").out)
    assert tuple(values) == (*DATA_KEYS, "about", "files")
    assert [(file["split"], file["here"]) for file in values["files"]] == [("train", False), ("val", False)]
    assert list(values["files"][0]) == ["name", "split", "url", "size", "sha256", "path", "here"]


def test_data_fetch_downloads_a_corpus(gpt: Gpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "served.txt").write_bytes(b"to be or not to be " * 1000)
    monkeypatch.setenv("GPT_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "shakespeare"
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        file = {"url": f"http://127.0.0.1:{httpd.server_address[1]}/served.txt", "size": 19_000}
        toml = catalogue.describe("shakespeare") | {"source": {"files": [file]}}
        monkeypatch.setattr(catalogue, "describe", lambda name: dict(toml))
        thread = threading.Thread(target=lambda: httpd.serve_forever(0.01), daemon=True)
        thread.start()
        result = gpt("data", "fetch", "shakespeare")
        httpd.shutdown()
        thread.join()
    assert result.code == 0, result.err
    assert f"{folder}  (1 file, 19,000 bytes)" in result.out
    assert "gpt train shakespeare" in result.out
    assert json.loads(gpt("data", "show", "shakespeare", "--json").out)["status"] == "here"
    values = json.loads(gpt("data", "fetch", "shakespeare", "--json", "--quiet").out)
    assert list(values) == ["name", "folder", "files", "bytes", "seconds", "train"]
    assert values["files"] == [str(folder / "served.txt")]


def test_fetching_a_python_corpus_downloads_nothing(gpt: Gpt) -> None:
    assert "nothing to download" in gpt("data", "fetch", "pydocs").out
    assert json.loads(gpt("data", "fetch", "stdlib", "--json").out)["folder"] is None


@pytest.mark.parametrize(
    "args",
    [
        ["train", "text.txt", "--config", "config.toml"],
        ["train", "table.csv", "--pairs"],
        ["train", "text.txt", f"--{'k' * 100_000}"],
        ["k" * 100_000],
    ],
)
def test_long_names_are_shortened(gpt: Gpt, workdir: Path, args: list[str]) -> None:
    Path("text.txt").write_text("the cat " * 20)
    Path("config.toml").write_text(f"{'k' * 100_000} = 1\n")
    Path("table.csv").write_text(f"{'k' * 100_000},b\n1,2\n")
    result = gpt(*args)
    one_line_of_what_and_what_next(result, "k" * 40)
    assert len(result.err) < 1000


def test_throughput_excludes_earlier_downloads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", -1e9)
    with progress.Bar("fetched", "bytes", quiet=False) as bar:
        for now, done in ((10, 900), (10.5, 901), (35, 950)):
            monkeypatch.setattr(time, "monotonic", lambda now=now: now)
            bar.reach(done, 1000)
    assert capsys.readouterr().err.splitlines() == [
        "fetched 900/1,000 bytes",  # Bytes of earlier downloads don't count.
        "fetched 901/1,000 bytes",  # The first second says little about the others.
        "fetched 950/1,000 bytes  2 bytes/s  25 s left",
    ]
