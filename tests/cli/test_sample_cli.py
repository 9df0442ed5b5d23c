"""``gpt sample``: beams, many prompts, stops, log-probabilities, the context."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Done, Gpt, slow, spawn
from conftest import one_line_of_what_and_what_next as refused

import gpt as library
from gpt.config import GPTConfig
from gpt.model.decoder import GPT
from gpt.runs import checkpoint
from gpt.sample_config import SampleConfig
from gpt.text.tokenizer import bytes_tokenizer

PROMPTS = ["the cat", "Zürich 🐕 and a longer prompt than the others", "", "it"]


def lines_of(done: Done) -> list[dict[str, Any]]:
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS) + "\n", encoding="utf-8")
    return path


# Beams


def test_beams_are_told_best_first(gpt: Gpt, run_folder: Path) -> None:
    args = ["sample", "the cat", "-m", run_folder, "--beam", "4", "-N", "3", "-n", "10"]
    lines = lines_of(gpt(*args, "--json"))
    assert [line["index"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["seed"] is None
        length = len(line["tokens"]) + (line["finish_reason"] == "eot")
        assert line["score"] == pytest.approx(line["logprob"] / length, abs=1e-5)
    scores = [line["score"] for line in lines]
    assert scores == sorted(scores, reverse=True)
    shown = gpt(*args).out
    assert shown == "".join(f"--- {i + 1} of 3 ---\nthe cat{line['text']}\n" for i, line in enumerate(lines))


def test_what_beams_do_not_use_is_said(gpt: Gpt, run_folder: Path) -> None:
    done = gpt("sample", "the", "-m", run_folder, "--beam", "2", "-n", "3", "-t", "0.5", "--top-k", "3")
    assert done.err == "--temperature, --top-k have no effect with --beam\n"
    assert gpt("sample", "the", "-m", run_folder, "-t", "0", "-n", "3").err == ""
    done = gpt("sample", "the", "-m", run_folder, "--beam", "2", "-n", "3", "--speculate", "2")
    assert done.err == "--speculate has no effect with --beam\n"
    args = ["--greedy", "--length-penalty", "2", "--early-stopping", "on"]
    said = gpt("sample", "the", "-m", run_folder, "-n", "3", *args).err
    assert said == "--length-penalty has no effect without --beam\n--early-stopping has no effect without --beam\n"


# Many prompts


def test_many_prompts_equal_one_by_one(gpt: Gpt, run_folder: Path, prompts: Path) -> None:
    for how in (["--seed", "3", "-N", "2"], ["--beam", "2", "-N", "2"], ["--greedy"]):
        args = ["-m", run_folder, "-n", "15", "--json", *how]
        together = lines_of(gpt("sample", "--prompts", prompts, *args))
        assert len(together) == len(PROMPTS) * (1 if how == ["--greedy"] else 2)
        for number, prompt in enumerate(PROMPTS):
            mine = [line for line in together if line["prompt_index"] == number]
            for line, alone in zip(mine, lines_of(gpt("sample", prompt, *args)), strict=True):
                assert line["prompt"] == prompt
                for key in ("logprob", "score"):
                    assert line.pop(key, 0) == pytest.approx(alone.pop(key, 0), abs=1e-4)
                assert line == {**alone, "prompt_index": number}
        for batch in ("1", "3"):
            some = lines_of(gpt("sample", "--prompts", prompts, *args, "--batch", batch))
            assert [line["tokens"] for line in some] == [line["tokens"] for line in together]


def test_byte_order_marks_are_no_prompt(gpt: Gpt, run_folder: Path, prompts: Path, tmp_path: Path) -> None:
    args = ["-m", run_folder, "-n", "3", "--greedy", "--json"]
    plain, marked = prompts.read_bytes(), tmp_path / "marked"
    marked.write_bytes("\ufeff".encode() + plain + "\ufeff\n\ufeff".encode() + plain)  # two files, appended
    texts = [line["text"] for line in lines_of(gpt("sample", "--prompts", prompts, *args))]
    assert [line["text"] for line in lines_of(gpt("sample", "--prompts", marked, *args))] == texts * 2
    marked.write_text(PROMPTS[1], encoding="utf-8-sig")
    for name, stdin in ((marked, b""), ("-", marked.read_bytes())):
        (line,) = lines_of(gpt("sample", "--prompt-file", name, *args, stdin=stdin))
        assert (line["prompt"], line["text"]) == (PROMPTS[1], texts[1])
    told = gpt("sample", "-i", *args[:-1], stdin=marked.read_bytes())
    assert told.out == gpt("sample", "-i", *args[:-1], stdin=PROMPTS[1].encode()).out


def test_quiet_samples_print_the_text_alone(gpt: Gpt, run_folder: Path, tmp_path: Path) -> None:
    args = ["sample", "the cat " * 40, "-m", run_folder, "-n", "3", "--length-penalty", "2"]
    loud, quiet = gpt(*args), gpt(*args, "--quiet")
    assert loud.err.count("\n") >= 3  # a setting without effect, the seed, a long prompt
    assert (quiet.code, quiet.err) == (0, "")
    assert quiet.out.startswith("the cat ")
    file = gpt(*args, "-q", "--seed", "1", "-o", tmp_path / "s.jsonl")
    assert (file.code, file.err) == (0, "")
    assert gpt("sample", "-q").code == 2  # an error is no note


def test_prompts_on_a_terminal_have_a_line_above_each(gpt: Gpt, run_folder: Path, prompts: Path) -> None:
    out = gpt("sample", "--prompts", prompts, "-m", run_folder, "-n", "4", "--greedy").out
    assert out.startswith("--- prompt 1 of 4 ---\nthe cat")
    assert out.count("---\n") == 4
    piped = gpt("sample", "--prompts", "-", "-m", run_folder, "-n", "4", "--greedy", stdin=prompts.read_bytes())
    assert piped.out == out


@pytest.mark.parametrize("how", [slow(["--seed", "3", "-N", "2"]), ["--beam", "2", "-N", "2"]])
def test_a_file_of_samples_is_gone_on_with(
    gpt: Gpt, run_folder: Path, prompts: Path, tmp_path: Path, how: list[str]
) -> None:
    args = ["sample", "--prompts", prompts, "-m", run_folder, "-n", "12", *how]
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    assert gpt(*args, "-o", whole, "--batch", "1").code == 0
    data = whole.read_bytes()
    assert lines_of(gpt(*args, "--json", "--batch", "1")) == [json.loads(line) for line in data.splitlines()]
    ends = [match.end() for match in re.finditer(b"\n", data)]
    for cut in (0, 40, ends[0], ends[2], ends[2] + 7, ends[4], len(data) - 1, len(data)):
        part.write_bytes(data[:cut])
        without_seed = [arg for arg in args if arg not in ("--seed", "3")] if cut > ends[0] else args
        assert gpt(*without_seed, "-o", part, "--batch", "1").code == 0
        assert part.read_bytes() == data
    lines = data.splitlines(keepends=True)
    part.write_bytes(lines[0] + lines[3])  # not only the first ones
    assert gpt(*args, "-o", part, "--batch", "1").code == 0
    assert sorted(part.read_bytes().splitlines(keepends=True)) == sorted(lines)


def test_a_bad_line_of_prompts_is_named(gpt: Gpt, run_folder: Path, tmp_path: Path) -> None:
    for line, message in {
        '{"prompt": "b", "temperature": 1}': 'line 2: unknown key "temperature"',
        '{"prompt": 5}': 'line 2 has no text "prompt"',
        "[]": "line 2 is not a JSON object",
        '{"prompt": "\\ud800"}': "line 2 has an unpaired surrogate escape",
        "[" * 100_000: "line 2 is not JSON",
    }.items():
        (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
        refused(gpt("sample", "--prompts", tmp_path / "p.jsonl", "-m", run_folder), message)


def test_files_that_cannot_be_gone_on_with(gpt: Gpt, run_folder: Path, prompts: Path, tmp_path: Path) -> None:
    args = ["sample", "--prompts", prompts, "-m", run_folder, "-n", "3"]
    out = tmp_path / "o.jsonl"
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    refused(gpt("sample", "--prompts", tmp_path / "latin.jsonl"), "is not UTF-8: byte 0xe9")
    refused(gpt("sample", "--prompts", tmp_path / "empty.jsonl"), "contains no prompt")
    refused(gpt("sample", "--prompts", tmp_path / "none.jsonl"), "cannot read")
    refused(gpt("sample", "x", "--prompts", prompts), "a prompt and --prompts were both given")
    refused(gpt(*args, "-o", tmp_path / "none" / "o.jsonl"), "cannot write")
    refused(gpt(*args, "-o", tmp_path), "cannot write")
    assert gpt(*args, "-o", out, "--seed", "1").code == 0
    before = out.read_bytes()
    refused(gpt(*args, "-o", out, "--seed", "2"), "has seed 1, not 2")
    refused(gpt(*args, "-o", out, "--greedy"), "was written with different settings")
    first = before.splitlines(keepends=True)[0]
    for line, message in (
        (first.replace(b'"seed": 1', b'"seed": 2'), "line 5 has seed 2; earlier lines have 1"),
        (first.replace(b'"index": 0', b'"index": "0"'), "line 5 is a sample for another prompt"),
    ):
        (tmp_path / "two.jsonl").write_bytes(before + line)
        refused(gpt(*args, "-o", tmp_path / "two.jsonl"), message)
    refused(gpt("sample", "other", "-m", run_folder, "-o", out), "is a sample for another prompt")
    refused(gpt(*args, "-o", prompts), "line 1 is not a sample: it has no 'prompt_index'")
    assert out.read_bytes() == before
    assert len(prompts.read_text(encoding="utf-8").splitlines()) == 5


# Stops, filters, bias


def test_stop_texts_end_and_are_not_shown(gpt: Gpt, run_folder: Path) -> None:
    args = ["sample", "the cat", "-m", run_folder, "--seed", "5", "-n", "40", "--ignore-eot"]
    [whole] = lines_of(gpt(*args, "--json"))
    for stop in (whole["text"][5:8], whole["text"][10], " "):
        [cut] = lines_of(gpt(*args, "--json", "--stop", stop, "--stop", "never there"))
        assert cut["text"] == whole["text"][: whole["text"].index(stop)]
        assert cut["finish_reason"] == "stop"
        assert cut["tokens"] == whole["tokens"][: len(cut["tokens"])]
        assert gpt(*args, "--stop", stop, "--no-echo").out == cut["text"] + "\n"


def test_bias_names_a_token(gpt: Gpt, run_folder: Path) -> None:
    args = ["sample", "the cat", "-m", run_folder, "-n", "5", "--json"]
    [line] = lines_of(gpt(*args, "--greedy", "--bias", "z=1000"))
    assert line["text"] == "zzzzz"
    [line] = lines_of(gpt(*args, "--greedy", "--bias", "<|endoftext|>=1000"))
    assert (line["tokens"], line["finish_reason"]) == ([], "eot")
    refused(gpt(*args, "--bias", "qqq=1"), 'bias: "qqq" is 3 tokens')
    refused(gpt(*args, "--bias", "z"), 'bias is "z"')
    refused(gpt(*args, "--bias", "z=nan"), 'bias is "z=nan"')


def test_what_means_nothing_is_refused(gpt: Gpt, run_folder: Path) -> None:
    for args, message in {
        "--min-p 1.5": "min-p is 1.5",
        "-t nan": "temperature is nan",
        "--beam 2 --greedy": "--beam and --greedy",
        "--beam 2 --n-best 3": "n-best is 3 and beam is 2",
        "--n-best 2": "n-best is 2 and beam is off",
        "--beam 2 -N 3": "-N is 3 and --beam is 2",
        "--beam 3 -N 3 --n-best 2": "-N is 3 and --n-best is 2",
        "--beam 500": "beam is 500, but the model has only 400 tokens",
        "--length-penalty inf --beam 2": "length-penalty is inf",
        "--early-stopping nver": 'there is no early-stopping "nver"',
        "--stop ''": "stop is empty",
        "--logprobs 2": "--logprobs and --echo-logprobs need --json",
        "--logprobs -2 --json": "logprobs is -2",
        "--dtype int7": 'there is no dtype "int7"',
    }.items():
        refused(gpt("sample", "the", "-m", run_folder, "-n", "3", *shlex.split(args)), message)
    assert 'did you mean "int8"?' in gpt("bench", "-m", run_folder, "--dtype", "int7").err


# Log-probabilities


def test_log_probabilities_sum_to_the_samples_and_to_evals(gpt: Gpt, run_folder: Path, tmp_path: Path) -> None:
    prompt = "the cat sat on the mat in Zürich"
    for how in (["--seed", "1"], ["--beam", "2"]):
        wanted = ["-n", "9", "--json", "--logprobs", "3", "--echo-logprobs", *how]
        [line] = lines_of(gpt("sample", prompt, "-m", run_folder, *wanted))
        assert sum(token["logprob"] for token in line["logprobs"]) == pytest.approx(line["logprob"], abs=1e-5)
        ids = [token["token"] for token in line["logprobs"]]
        assert ids[: len(line["tokens"])] == line["tokens"]
        (tmp_path / "t.txt").write_text(prompt, encoding="utf-8")
        values = json.loads(gpt("eval", tmp_path / "t.txt", "-m", run_folder, "--json").out)
        of_prompt = [token["logprob"] for token in line["prompt_logprobs"]]
        assert of_prompt[0] is None
        assert -sum(of_prompt[1:]) == pytest.approx(values["loss"] * values["tokens"], abs=1e-3)
        for token in [*line["logprobs"], *line["prompt_logprobs"][1:]]:
            top = [other["logprob"] for other in token["top"]]
            assert len(top) == 3
            assert top == sorted(top, reverse=True)
            assert token["logprob"] <= top[0] + 1e-6
    [line] = lines_of(gpt("sample", prompt, "-m", run_folder, "-n", "0", "--json", "--echo-logprobs", "--seed", "1"))
    assert (line["tokens"], line["logprob"], line["finish_reason"]) == ([], 0, "length")
    assert [token["logprob"] for token in line["prompt_logprobs"]] == pytest.approx(of_prompt, abs=1e-4)


def test_end_of_text_counts_in_the_sum(gpt: Gpt, run_folder: Path) -> None:
    wanted = ["--greedy", "--bias", "<|endoftext|>=1000", "--json", "--logprobs", "0"]
    [line] = lines_of(gpt("sample", "the", "-m", run_folder, *wanted))
    assert line["tokens"] == []
    assert [token["text"] for token in line["logprobs"]] == ["<|endoftext|>"]
    assert line["logprob"] == line["logprobs"][0]["logprob"] < 0
    assert "top" not in line["logprobs"][0]


# The context


def test_a_long_prompt_keeps_its_end_and_says_so(gpt: Gpt, run_folder: Path) -> None:
    text = "the cat sat on the mat " * 20
    loaded = library.load(run_folder)
    ids = loaded.tokenizer.encode(text).tolist()
    done = gpt("sample", text, "-m", run_folder, "--greedy", "-n", "3")
    left_out = len(ids) - 32
    assert f"the prompt has {len(ids)} tokens, but the context only 32: dropped the first {left_out}" in done.err
    end = loaded.tokenizer.decode(ids[-32:])
    assert loaded.tokenizer.encode(end).tolist() == ids[-32:]
    assert gpt("sample", end, "-m", run_folder, "--greedy", "-n", "3", "--no-echo").out == done.out[len(text) :]


def test_generate_from_python(run_folder: Path) -> None:
    model = library.load(run_folder)
    best = model.generate("the cat", beam=4, n_best=2, max_tokens=8)
    assert len(best) == 2
    written = model.write("the cat", SampleConfig(beam=4, n_best=2, max_tokens=8))
    assert "".join(written) == written.sample.text == best[0]
    pieces = list(model.write_all(["a", "b"], seed=3))
    assert [piece.prompt for piece in pieces if piece.sample] == [0, 1]
    assert all(math.isfinite(piece.sample.logprob) for piece in pieces if piece.sample)


# Prompt after prompt


def talk(gpt: Gpt, run_folder: Path, *lines: str) -> Done:
    stdin = "".join(f"{line}\n" for line in lines).encode()
    return gpt("chat", "-m", run_folder, "-n", "8", "--seed", "1", stdin=stdin)


def test_a_conversation_writes_after_each_prompt(gpt: Gpt, run_folder: Path) -> None:
    def written(prompt: str, *args: str) -> str:
        return gpt("sample", prompt, "-m", run_folder, "-n", "8", "--seed", "1", *args).out

    assert talk(gpt, run_folder, "the cat", "it").out == written("the cat") + written("it")
    done = talk(gpt, run_folder, "the cat", "/retry")
    second = lines_of(gpt("sample", "the cat", "-m", run_folder, "-n", "8", "--seed", "1", "-N", "2", "--json"))[1]
    assert done.out == written("the cat") + "the cat" + second["text"] + "\n"
    more = talk(gpt, run_folder, "the cat", "/more").out
    first = written("the cat").removesuffix("\n")
    assert more == first + "\n" + written(first).removeprefix(first)
    assert talk(gpt, run_folder, "/set temperature 0", "the").out == written("the", "--greedy")
    assert talk(gpt, run_folder, "/set max-tokens=3", "the").out == written("the", "-n", "3")
    assert talk(gpt, run_folder, "a\\", "b").out == written("a\nb")
    assert talk(gpt, run_folder, '"""', "a", "", 'b"""').out == written("a\n\nb")
    assert talk(gpt, run_folder, "//the").out == written("/the")
    assert talk(gpt, run_folder, "the", "/quit", "never").out == written("the")
    assert "temperature 0.8\n" in talk(gpt, run_folder, "/set").out
    assert "/retry" in talk(gpt, run_folder, "/help").out
    assert talk(gpt, run_folder, f"/model {run_folder}", "the").out == written("the")


def test_a_mistake_ends_no_conversation(gpt: Gpt, run_folder: Path) -> None:
    mistakes = {
        "/set temprature 1": ('there is no setting "temprature"', 'did you mean "temperature"?'),
        "/set temperature x": ("temperature is 'x'", ""),
        "/retyr": ("there is no command /retyr", 'did you mean "/retry"?'),
        "/retry": ("there is no prompt yet", "enter one"),
        "/more": ("there is no text yet", "enter a prompt"),
        "/model nowhere": ("there is no run or checkpoint nowhere", "train one"),
    }
    done = talk(gpt, run_folder, *mistakes, "the")
    assert done.code == 0
    errors = done.err.split("error: ")[1:]
    for said, (message, hint) in zip(errors, mistakes.values(), strict=True):
        assert said.startswith(message) and hint in said
    assert done.out.startswith("the")


def test_a_conversation_is_alone(gpt: Gpt, run_folder: Path) -> None:
    for more in (["--json"], ["x"], ["-o", "o.jsonl"], ["-N", "2"]):
        refused(gpt("sample", "-i", "-m", run_folder, *more), "--interactive cannot be combined")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_on_a_terminal_ctrl_c_ends_the_text_and_not_the_program(run_folder: Path, tmp_path: Path) -> None:
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["XDG_STATE_HOME"] = str(tmp_path)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs ignore it, and so would what they start
        words = ["sample", "-i", "-m", str(run_folder), "-n", "10000000", "--ignore-eot"]
        os.execv(sys.executable, [sys.executable, "-c", "from gpt_cli.main import run; run()", *words])
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        shown = b""
        while text not in shown:
            shown += os.read(terminal, 4096)

    until(b"> ")
    os.write(terminal, b"the cat\n")
    until(b"the cat\r\n")  # what the terminal shows of the typing
    while len(shown) < 300:
        shown += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    until(b"> ")
    os.write(terminal, b"/set max-tokens 3\n")
    until(b"> ")
    os.write(terminal, b"it\n")
    until(b"> ")
    os.write(terminal, b"\x04")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "gpt" / "history").read_text().splitlines()[-3:] == ["the cat", "/set max-tokens 3", "it"]
    os.close(terminal)


@pytest.mark.slow
def test_sampling_imports_no_more_than_it_needs(run_folder: Path, tmp_path: Path) -> None:
    """Guards the time that it takes to start: torch's compiler alone takes seconds to import."""
    config, rotary = GPTConfig.of("modern", 257, 32, 1, 2, 8), tmp_path / "rotary"
    checkpoint.save(rotary, GPT(config), checkpoint.TokenizerFiles(bytes_tokenizer(), config), {})
    code = (
        "import gc, sys\nfrom gpt_cli.main import main\n"
        f"for model in {[str(run_folder), str(rotary)]}:\n"
        "    assert main(['sample', 'the', '-m', model, '-n', '2', '--seed', '1']) == 0\n"
        "assert gc.isenabled()  # it is not while torch is imported\n"
        "heavy = {'torch._dynamo', 'torch._inductor', 'sympy', 'transformers', 'tokenizers', 'huggingface_hub',"
        " 'gpt.training', 'gpt.exporting', 'gpt.serve', 'gpt.parallel.world', 'gpt.text.corpus', 'gpt.text.download',"
        " 'gpt.text.tokenize', 'gpt.decoding.bench', 'gpt.inspect', 'gpt_cli.train', 'gpt_cli.params'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# What may not be read


def locked(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Has the system refuse to say anything of what lies in folders called ``what``, as it does to other users."""
    stat = Path.stat

    def no_stat(path: Path, **kwargs: bool) -> os.stat_result:
        if path.parent.name == what:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "stat", no_stat)


def test_a_run_that_may_not_be_read_is_named(
    run_folder: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch, gpt: Gpt
) -> None:
    shutil.copytree(run_folder, "runs/theirs")
    locked(monkeypatch, "theirs")
    Path("t.txt").write_text("the cat sat", encoding="utf-8")
    for command in (
        ["sample", "hi", "-m", "runs/theirs"],
        ["sample", "hi", "-m", "runs/theirs:latest"],
        ["eval", "t.txt", "-m", "runs/theirs"],
        ["params", "runs/theirs"],
        ["report", "runs/theirs"],
        ["inspect", "positions", "-m", "runs/theirs"],
        ["train", "--resume", "runs/theirs"],
        ["train", "t.txt", "--init", "runs/theirs"],
    ):
        done = gpt(*command)
        assert (done.code, "cannot read runs/theirs/run.json: Permission denied" in done.err) == (2, True), done.err
        assert done.err.splitlines()[-1] == "hint: check its permissions"
    shutil.copytree(run_folder, "runs/mine")  # others are found beside it
    assert gpt("sample", "hi", "-n", "1").code == 0
    assert "runs here: runs/mine\n" in gpt("sample", "hi", "-m", "nowhere").err
    assert "no unfinished run" in gpt("train", "--resume").err


def test_a_checkpoint_that_may_not_be_read_is_named(
    run_folder: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch, gpt: Gpt
) -> None:
    shutil.copytree(run_folder, "mine")
    step = json.loads(Path("mine/index.json").read_text(encoding="utf-8"))["latest"]
    locked(monkeypatch, step)
    for model in (f"mine/{step}", f"mine:{step}"):
        done = gpt("sample", "hi", "-m", model)
        assert (done.code, f"cannot read mine/{step}/" in done.err) == (2, True), done.err
    done = gpt("sample", "hi", "-n", "1", "-m", "mine:latest")
    assert done.code == 0
    assert "Permission denied: using the checkpoint before it" in done.err


def test_a_best_that_cannot_be_told_is_said(run_folder: Path, workdir: Path, gpt: Gpt) -> None:
    shutil.copytree(run_folder, "mine")
    step = json.loads(Path("mine/index.json").read_text(encoding="utf-8"))["best"]
    assert "other checkpoints" not in gpt("sample", "hi", "-n", "1", "-m", "mine").err
    Path("mine", step, "gpt.json").write_text("{", encoding="utf-8")
    done = gpt("sample", "hi", "-n", "1", "-m", "mine")
    assert f"mine/{step}/gpt.json is damaged: it is not JSON: using the best of the other checkpoints" in done.err


# Many samples


@pytest.mark.slow
def test_samples_are_made_as_they_are_read(run_folder: Path, tmp_path: Path) -> None:
    """However many are asked for, the first ones come at once, and a pipe that is closed then is no error."""
    args = ["sample", "the", "-m", run_folder, "-n", "3", "--seed", "1", "--json"]
    with spawn(*args, "-N", str(2**63 - 1)) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(40)]
        process.stdout.close()
        assert (process.wait(timeout=60), "rror" in process.stderr.read()) == (0, False)
    assert [line["index"] for line in lines] == list(range(40))
    few = library.load(run_folder).write_all(["the"], SampleConfig(max_tokens=3), 1, 40)
    assert [piece.sample.text for piece in few if piece.sample] == [line["text"] for line in lines]


@pytest.mark.parametrize("content", [b"my diary", b"a line\nand another", b"{", b'{"prompt_index": 0, "in'])
def test_a_file_that_is_no_sample_is_left_as_it_is(gpt: Gpt, run_folder: Path, tmp_path: Path, content: bytes) -> None:
    """Also where it has no whole line: what was cut off by us begins as our lines do."""
    out = tmp_path / "diary.txt"
    out.write_bytes(content)
    done = gpt("sample", "the", "-m", run_folder, "-n", "2", "--seed", "1", "-o", out)
    if content.startswith(b"{"):
        assert (done.code, len(out.read_bytes().splitlines())) == (0, 1)
    else:
        refused(done, "diary.txt, line ")
        assert out.read_bytes() == content


# Structured output


def test_structured_output(gpt: Gpt, run_folder: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('\ufeff{"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"]}', "utf-8")
    args = ["sample", "the cat", "-m", run_folder, "--json", "-N", "3", "-t", "1"]
    for options, texts in (
        (["--choices", "yes,no", "--choices", "may be"], ["yes", "no", "may be"]),
        (["--regex", "x|y"], ["x", "y"]),
        (["--json-schema", schema], ['{"a":1', '{"a":"b"']),
        (["--beam", "2", "-N", "2", "--choices", "yes,no"], ["yes", "no"]),
    ):
        lines = lines_of(gpt(*args, *options))
        assert all(line["text"].startswith(tuple(texts)) for line in lines), lines
        assert {line["finish_reason"] for line in lines} <= {"stop", "eot", "length"}
    assert lines_of(gpt(*args, "--json-schema", "-", stdin=b'{"const": [1]}'))[0]["text"] == "[1]"


@pytest.mark.parametrize("options, message", [
    (["--regex", "a(?=b)"], "regex: look-around, including look-ahead and look-behind, is not supported"),
    (["--regex", "a", "--choices", "b,c"], "choices and regex both constrain the text"),
    (["--choices", "b,,c"], "choices is empty; it must be one or more strings"),
    (["--json-schema", "none.json"], "cannot read none.json: No such file or directory"),
    (["--regex", "a", "--ignore-eot"], "structured output cannot ignore end-of-text"),
])  # fmt: skip
def test_structured_output_that_cannot_be(gpt: Gpt, run_folder: Path, options: list[str], message: str) -> None:
    refused(gpt("sample", "the", "-m", run_folder, *options), message)
