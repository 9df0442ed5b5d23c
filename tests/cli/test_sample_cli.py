"""``gpt sample`` and interactive sessions."""

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
from conftest import Done, Gpt, deny_access, spawn
from conftest import one_line_of_what_and_what_next as assert_error

import gpt as library
from gpt.config.model import GPTConfig
from gpt.config.sample import SampleConfig
from gpt.model.decoder import GPT
from gpt.runs import checkpoint
from gpt.system.errors import UserError
from gpt.tokenizers.tokenizer import bytes_tokenizer

PROMPTS = ["the cat", "Zürich 🐕 and a longer prompt than the others", "", "it"]


def read_samples(result: Done) -> list[dict[str, Any]]:
    assert result.code == 0, result.err
    return [json.loads(line) for line in result.out.splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS) + "\n", encoding="utf-8")
    return path


# Beam search


def test_beams_are_printed_best_first(gpt: Gpt, run_folder: Path) -> None:
    args = ["sample", "the cat", "-m", run_folder, "--beam", "4", "-N", "3", "-n", "10"]
    lines = read_samples(gpt(*args, "--json"))
    assert [line["index"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["seed"] is None
        length = len(line["tokens"]) + (line["finish_reason"] == "eot")
        assert line["score"] == pytest.approx(line["logprob"] / length, abs=1e-5)
    scores = [line["score"] for line in lines]
    assert scores == sorted(scores, reverse=True)
    output = gpt(*args).out
    assert output == "".join(f"--- {i + 1} of 3 ---\nthe cat{line['text']}\n" for i, line in enumerate(lines))


def test_options_without_effect_print_a_note(gpt: Gpt, run_folder: Path) -> None:
    result = gpt("sample", "the", "-m", run_folder, "--beam", "2", "-n", "3", "-t", "0.5", "--top-k", "3")
    assert result.err == "--temperature, --top-k have no effect with --beam\n"
    assert gpt("sample", "the", "-m", run_folder, "-t", "0", "-n", "3").err == ""
    result = gpt("sample", "the", "-m", run_folder, "--beam", "2", "-n", "3", "--top-p", "0.5")
    assert result.err == "--top-p has no effect with --beam\n"
    args = ["--greedy", "--length-penalty", "2", "--early-stopping", "on"]
    notes = gpt("sample", "the", "-m", run_folder, "-n", "3", *args).err
    assert notes == "--length-penalty, --early-stopping have no effect without --beam\n"


# Many prompts


def test_batched_prompts_equal_single_prompts(gpt: Gpt, run_folder: Path, prompts: Path) -> None:
    for options in (["--seed", "3", "-N", "2"], ["--beam", "2", "-N", "2"], ["--greedy"]):
        args = ["-m", run_folder, "-n", "15", "--json", *options]
        together = read_samples(gpt("sample", "--prompts", prompts, *args))
        assert len(together) == len(PROMPTS) * (1 if options == ["--greedy"] else 2)
        for number, prompt in enumerate(PROMPTS):
            lines = [line for line in together if line["prompt_index"] == number]
            for line, single in zip(lines, read_samples(gpt("sample", prompt, *args)), strict=True):
                assert line["prompt"] == prompt
                for key in ("logprob", "score"):
                    assert line.pop(key, 0) == pytest.approx(single.pop(key, 0), abs=1e-4)
                assert line == {**single, "prompt_index": number}
        for batch in ("1", "3"):
            rebatched = read_samples(gpt("sample", "--prompts", prompts, *args, "--batch", batch))
            assert [line["tokens"] for line in rebatched] == [line["tokens"] for line in together]


def test_byte_order_marks_are_not_part_of_prompts(gpt: Gpt, run_folder: Path, prompts: Path, tmp_path: Path) -> None:
    args = ["-m", run_folder, "-n", "3", "--greedy", "--json"]
    data, prompts_with_bom = prompts.read_bytes(), tmp_path / "marked"
    prompts_with_bom.write_bytes("\ufeff".encode() + data + "\ufeff\n\ufeff".encode() + data)  # Two joined files
    texts = [line["text"] for line in read_samples(gpt("sample", "--prompts", prompts, *args))]
    assert [line["text"] for line in read_samples(gpt("sample", "--prompts", prompts_with_bom, *args))] == texts * 2
    prompts_with_bom.write_text(PROMPTS[1], encoding="utf-8-sig")
    for name, stdin in ((prompts_with_bom, b""), ("-", prompts_with_bom.read_bytes())):
        (line,) = read_samples(gpt("sample", "--prompt-file", name, *args, stdin=stdin))
        assert (line["prompt"], line["text"]) == (PROMPTS[1], texts[1])
    session = gpt("sample", "-i", *args[:-1], stdin=prompts_with_bom.read_bytes())
    assert session.out == gpt("sample", "-i", *args[:-1], stdin=PROMPTS[1].encode()).out


def test_quiet_prints_only_the_text(gpt: Gpt, run_folder: Path) -> None:
    args = ["sample", "the cat " * 40, "-m", run_folder, "-n", "3", "--length-penalty", "2"]
    verbose, quiet = gpt(*args), gpt(*args, "--quiet")
    assert verbose.err.count("\n") >= 3  # Notes on an unused option, the seed, a long prompt
    assert (quiet.code, quiet.err) == (0, "")
    assert quiet.out.startswith("the cat ")
    assert gpt("sample", "-q").code == 2  # Errors are printed anyway.


def test_every_prompt_gets_a_heading(gpt: Gpt, run_folder: Path, prompts: Path) -> None:
    out = gpt("sample", "--prompts", prompts, "-m", run_folder, "-n", "4", "--greedy").out
    assert out.startswith("--- prompt 1 of 4 ---\nthe cat")
    assert out.count("---\n") == 4
    piped = gpt("sample", "--prompts", "-", "-m", run_folder, "-n", "4", "--greedy", stdin=prompts.read_bytes())
    assert piped.out == out
    prompts.with_name("p.csv").write_text("prompt,answer\n" + "".join(f'"{each}",x\n' for each in PROMPTS), "utf-8")
    assert gpt("sample", "--prompts", prompts.with_name("p.csv"), "-m", run_folder, "-n", "4", "--greedy").out == out


def test_invalid_prompt_line_is_named(gpt: Gpt, run_folder: Path, tmp_path: Path) -> None:
    for line, message in {
        '{"promt": "b"}': 'line 2: it has no "prompt"; its keys: promt',
        '{"prompt": 5}': 'line 2: "prompt" is not a string',
        "[]": "line 2: not a JSON object",
        '{"prompt": "\\ud800"}': "line 2: an unpaired surrogate is not a character",
        "[" * 100_000: "line 2: JSON that is nested too deep",
    }.items():
        (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
        assert_error(gpt("sample", "--prompts", tmp_path / "p.jsonl", "-m", run_folder), message)


def test_prompt_file_that_cannot_be_read_is_an_error(gpt: Gpt, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    assert_error(gpt("sample", "--prompts", tmp_path / "latin.jsonl"), "line 1: not UTF-8: byte 0xe9")
    assert_error(gpt("sample", "--prompts", tmp_path / "empty.jsonl"), "contains no prompt")
    assert_error(gpt("sample", "--prompts", tmp_path / "none.jsonl"), "there is no file")
    assert_error(gpt("sample", "x", "--prompts", prompts), "a prompt and --prompts were both given")


# Stop strings, filters, bias


def test_stop_strings_end_the_text_and_are_not_printed(gpt: Gpt, run_folder: Path) -> None:
    args = ["sample", "the cat", "-m", run_folder, "--seed", "5", "-n", "40", "--ignore-eot"]
    [sample] = read_samples(gpt(*args, "--json"))
    for stop in (sample["text"][5:8], sample["text"][10], " "):
        [stopped_sample] = read_samples(gpt(*args, "--json", "--stop", stop, "--stop", "never there"))
        assert stopped_sample["text"] == sample["text"][: sample["text"].index(stop)]
        assert stopped_sample["finish_reason"] == "stop"
        assert stopped_sample["tokens"] == sample["tokens"][: len(stopped_sample["tokens"])]
        assert gpt(*args, "--stop", stop, "--no-echo").out == stopped_sample["text"] + "\n"


def test_bias_applies_to_a_named_token(gpt: Gpt, run_folder: Path) -> None:
    args = ["sample", "the cat", "-m", run_folder, "-n", "5", "--json"]
    [line] = read_samples(gpt(*args, "--greedy", "--bias", "z=1000"))
    assert line["text"] == "zzzzz"
    [line] = read_samples(gpt(*args, "--greedy", "--bias", "<|endoftext|>=1000"))
    assert (line["tokens"], line["finish_reason"]) == ([], "eot")
    assert_error(gpt(*args, "--bias", "qqq=1"), 'bias: "qqq" is 3 tokens')
    assert_error(gpt(*args, "--bias", "z"), 'bias is "z"')
    assert_error(gpt(*args, "--bias", "z=nan"), 'bias is "z=nan"')


def test_invalid_options_are_errors(gpt: Gpt, run_folder: Path) -> None:
    for args, message in {
        "--min-p 1.5": "min-p is 1.5",
        "-t nan": "temperature is nan",
        "--beam 2 --greedy": "--beam and --greedy",
        "--beam 2 -N 3": "num is 3 and beam is 2",
        "--beam 2 -N 3 --json": "num is 3 and beam is 2",
        "--beam 500": "beam is 500, but the model has only 400 tokens",
        "--length-penalty inf --beam 2": "length-penalty is inf",
        "--early-stopping nver": 'there is no early-stopping "nver"',
        "--stop ''": "stop is empty",
        "--logprobs 2": "--logprobs and --echo-logprobs need --json",
        "--logprobs -2 --json": "logprobs is -2",
        "--dtype int7": 'there is no dtype "int7"',
    }.items():
        assert_error(gpt("sample", "the", "-m", run_folder, "-n", "3", *shlex.split(args)), message)
    assert 'did you mean "int8"?' in gpt("sample", "the", "-m", run_folder, "--dtype", "int7").err


# Log-probabilities


def test_token_logprobs_sum_to_the_values_of_sample_and_eval(gpt: Gpt, run_folder: Path, tmp_path: Path) -> None:
    prompt = "the cat sat on the mat in Zürich"
    for sampling in (["--seed", "1"], ["--beam", "2"]):
        options = ["-n", "9", "--json", "--logprobs", "3", "--echo-logprobs", *sampling]
        [line] = read_samples(gpt("sample", prompt, "-m", run_folder, *options))
        assert sum(token["logprob"] for token in line["logprobs"]) == pytest.approx(line["logprob"], abs=1e-5)
        ids = [token["token"] for token in line["logprobs"]]
        assert ids[: len(line["tokens"])] == line["tokens"]
        (tmp_path / "t.txt").write_text(prompt, encoding="utf-8")
        values = json.loads(gpt("eval", tmp_path / "t.txt", "-m", run_folder, "--json").out)
        prompt_logprobs = [token["logprob"] for token in line["prompt_logprobs"]]
        assert prompt_logprobs[0] is None
        assert -sum(prompt_logprobs[1:]) == pytest.approx(values["loss"] * values["tokens"], abs=1e-3)
        for token in [*line["logprobs"], *line["prompt_logprobs"][1:]]:
            top = [other["logprob"] for other in token["top"]]
            assert len(top) == 3
            assert top == sorted(top, reverse=True)
            assert token["logprob"] <= top[0] + 1e-6
    [line] = read_samples(
        gpt("sample", prompt, "-m", run_folder, "-n", "0", "--json", "--echo-logprobs", "--seed", "1")
    )
    assert (line["tokens"], line["logprob"], line["finish_reason"]) == ([], 0, "length")
    assert [token["logprob"] for token in line["prompt_logprobs"]] == pytest.approx(prompt_logprobs, abs=1e-4)


def test_logprob_includes_end_of_text(gpt: Gpt, run_folder: Path) -> None:
    options = ["--greedy", "--bias", "<|endoftext|>=1000", "--json", "--logprobs", "0"]
    [line] = read_samples(gpt("sample", "the", "-m", run_folder, *options))
    assert line["tokens"] == []
    assert [token["text"] for token in line["logprobs"]] == ["<|endoftext|>"]
    assert line["logprob"] == line["logprobs"][0]["logprob"] < 0
    assert "top" not in line["logprobs"][0]


# The context


def test_long_prompt_is_truncated_from_the_left(gpt: Gpt, run_folder: Path) -> None:
    text = "the cat sat on the mat " * 20
    model = library.load(run_folder)
    ids = model.tokenizer.encode(text).tolist()
    result = gpt("sample", text, "-m", run_folder, "--greedy", "-n", "3")
    dropped = len(ids) - 32
    assert f"the prompt has {len(ids)} tokens, but the context only 32: dropped the first {dropped}" in result.err
    end = model.tokenizer.decode(ids[-32:])
    assert model.tokenizer.encode(end).tolist() == ids[-32:]
    assert gpt("sample", end, "-m", run_folder, "--greedy", "-n", "3", "--no-echo").out == result.out[len(text) :]


def test_python_api_generates_beams_and_batches(run_folder: Path) -> None:
    model = library.load(run_folder)
    beams = model.generate("the cat", beam=4, num=2, max_tokens=8)
    assert len(beams) == 2
    with pytest.raises(UserError, match="num is 5 and beam is 4"):
        model.generate("the cat", beam=4, num=5)
    for index in (0, 5):  # There is only one best beam.
        writer = model.write("the cat", SampleConfig(beam=4, max_tokens=8), index=index)
        assert "".join(writer) == writer.sample.text == beams[0]
    pieces = list(model.write_all(["a", "b"], seed=3))
    assert [piece.prompt for piece in pieces if piece.sample] == [0, 1]
    assert all(math.isfinite(piece.sample.logprob) for piece in pieces if piece.sample)


# Interactive sessions


def run_session(gpt: Gpt, run_folder: Path, *lines: str) -> Done:
    stdin = "".join(f"{line}\n" for line in lines).encode()
    return gpt("chat", "-m", run_folder, "-n", "8", "--seed", "1", stdin=stdin)


def test_session_prints_the_same_as_single_samples(gpt: Gpt, run_folder: Path) -> None:
    def sample(prompt: str, *args: str) -> str:
        return gpt("sample", prompt, "-m", run_folder, "-n", "8", "--seed", "1", *args).out

    assert run_session(gpt, run_folder, "the cat", "it").out == sample("the cat") + sample("it")
    result = run_session(gpt, run_folder, "the cat", "/retry")
    second = read_samples(gpt("sample", "the cat", "-m", run_folder, "-n", "8", "--seed", "1", "-N", "2", "--json"))[1]
    assert result.out == sample("the cat") + "the cat" + second["text"] + "\n"
    continued = run_session(gpt, run_folder, "the cat", "/more").out
    first = sample("the cat").removesuffix("\n")
    assert continued == first + "\n" + sample(first).removeprefix(first)
    assert run_session(gpt, run_folder, "/set temperature 0", "the").out == sample("the", "--greedy")
    assert run_session(gpt, run_folder, "/set max-tokens=3", "the").out == sample("the", "-n", "3")
    assert run_session(gpt, run_folder, "a\\", "b").out == sample("a\nb")
    assert run_session(gpt, run_folder, '"""', "a", "", 'b"""').out == sample("a\n\nb")
    assert run_session(gpt, run_folder, "//the").out == sample("/the")
    assert run_session(gpt, run_folder, "the", "/quit", "never").out == sample("the")
    assert "temperature 0.8\n" in run_session(gpt, run_folder, "/set").out
    assert "/retry" in run_session(gpt, run_folder, "/help").out


def test_errors_do_not_end_a_session(gpt: Gpt, run_folder: Path) -> None:
    mistakes = {
        "/set temprature 1": ('there is no setting "temprature"', 'did you mean "temperature"?'),
        "/set temperature x": ("temperature is 'x'", ""),
        "/set regex [": ("regex: ", ""),
        "/set bias the cat=1": ('bias: "the cat" is ', "give one token"),
        "/retyr": ("there is no command /retyr", 'did you mean "/retry"?'),
        "/retry": ("there is no prompt yet", "enter one"),
        "/more": ("there is no text yet", "enter a prompt"),
    }
    result = run_session(gpt, run_folder, *mistakes, "the")
    assert result.code == 0
    errors = result.err.split("error: ")[1:]
    for error, (message, hint) in zip(errors, mistakes.values(), strict=True):
        assert error.startswith(message) and hint in error
    assert result.out.startswith("the")


def test_session_says_why_a_text_ended_and_what_a_setting_is(gpt: Gpt, run_folder: Path) -> None:
    result = run_session(
        gpt, run_folder, "the", "/more", "/set max_tokens 3", "it", "/set", "/set top-k=5", "/set bias"
    )
    assert result.err.splitlines()[-6:] == [
        "stopped at 8 tokens: /more continues", "stopped at 8 tokens: /more continues", "max-tokens 3",
        "stopped at 3 tokens: /more continues", "top-k 5", "bias off",
    ]  # fmt: skip
    listed = dict(line.split(" ", 1) for line in result.out.splitlines() if re.fullmatch("[a-z-]+ \\S+", line))
    assert listed.items() >= {"temperature": "0.8", "top-k": "off", "max-tokens": "3", "min-tokens": "0"}.items()
    assert not listed.keys() & {"batch", "logprobs", "echo-logprobs", "compile", "length-penalty"}
    complete = run_session(gpt, run_folder, "/set choices cat,dog", "the", "/more", "/retry")
    assert complete.err.split("\n")[:2] == ["choices cat, dog", "error: the text is complete"]
    default = gpt("sample", "-i", "-m", run_folder, stdin=b"/set\nthe\n")  # The model has no chat template.
    assert "max-tokens 200\n" in default.out


@pytest.mark.parametrize(
    "words, name",
    [
        (["--no-echo"], "no-echo"), (["--batch", "2"], "batch"), (["--logprobs", "1"], "logprobs"),
        (["--echo-logprobs"], "echo-logprobs"),
    ],
)  # fmt: skip
def test_options_without_effect_on_a_session_are_named(words: list[str], name: str, gpt: Gpt, run_folder: Path) -> None:
    result = gpt("sample", "-i", "-m", run_folder, "-n", "2", *words, stdin=f"/set {name} 1\n".encode())
    assert f"--{name} has no effect with --interactive" in result.err
    no_setting = 'there is no setting "no-echo"' if name == "no-echo" else f"{name} has no effect in a conversation"
    assert no_setting in result.err


def test_set_reads_a_schema_as_the_option_does(gpt: Gpt, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"enum": [1, 2]}')
    (tmp_path / "empty.json").write_text(" ")
    (tmp_path / "bad.json").write_text('{"type": "no"}')
    lines = (f"/set json-schema {tmp_path}/{name}.json" for name in ("schema", "none", "empty", "bad"))
    result = run_session(gpt, run_folder, *lines, "/set json-schema -", "the ", "/set json-schema", "the")
    option = gpt("sample", "the ", "-m", run_folder, "--seed", "1", "--json-schema", tmp_path / "schema.json")
    assert result.out.startswith(option.out) and result.err.count("error: ") == 4
    assert 'json-schema {"enum": [1, 2]}' in result.err and "json-schema off" in result.err
    for message in ("none.json: No such file", "empty.json is empty", "a conversation cannot read its schema"):
        assert message in " ".join(result.err.split())


def test_interactive_rejects_conflicting_options(gpt: Gpt, run_folder: Path) -> None:
    for options in (["--json"], ["x"], ["-N", "2"]):
        assert_error(gpt("sample", "-i", "-m", run_folder, *options), "--interactive cannot be combined")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_ends_the_text_but_not_the_session(run_folder: Path) -> None:
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Children of background jobs ignore SIGINT.
        words = ["sample", "-i", "-m", str(run_folder), "-n", "10000000", "--ignore-eot"]
        os.execv(sys.executable, [sys.executable, "-c", "from gpt_cli.main import run; run()", *words])
    output = b""

    def wait_for(text: bytes) -> None:
        nonlocal output
        output = b""
        while text not in output:
            output += os.read(terminal, 4096)

    wait_for(b"> ")
    os.write(terminal, b"the cat\n")
    wait_for(b"the cat\r\n")  # Echo of the terminal
    while len(output) < 300:
        output += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    wait_for(b"> ")
    os.write(terminal, b"/set max-tokens 3\n")
    wait_for(b"> ")
    os.write(terminal, b"it\n")
    wait_for(b"> ")
    os.write(terminal, b"\x04")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


@pytest.mark.slow
def test_sampling_does_not_import_unused_modules(run_folder: Path, tmp_path: Path) -> None:
    """Protects startup time. Importing torch's compiler takes seconds."""
    config, rotary = GPTConfig.of("modern", 257, 32, 1, 2, 8), tmp_path / "rotary"
    checkpoint.save(rotary, GPT(config), checkpoint.TokenizerFiles(bytes_tokenizer(), config), {})
    code = (
        "import gc, sys, gpt\n"
        "assert gpt.GPTConfig and 'torch' not in sys.modules\n"
        "gpt.GPT\n"
        "assert 'torch' in sys.modules\n"
        "from gpt_cli.main import main\n"
        f"for model in {[str(run_folder), str(rotary)]}:\n"
        "    assert main(['sample', 'the', '-m', model, '-n', '2', '--seed', '1']) == 0\n"
        "assert gc.isenabled()  # it is not while torch is imported\n"
        "heavy = {'torch._dynamo', 'torch._inductor', 'sympy', 'transformers', 'tokenizers', 'huggingface_hub',"
        " 'gpt.training', 'gpt.exporting', 'gpt.serve', 'gpt.parallel.world', 'gpt.corpus.corpus', 'gpt.documents.download',"
        " 'gpt.corpus.tokenize', 'gpt.insight.inspect', 'gpt_cli.commands.train', 'gpt_cli.commands.params'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# Permissions


def test_unreadable_run_is_named(run_folder: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch, gpt: Gpt) -> None:
    shutil.copytree(run_folder, "runs/theirs")
    deny_access(monkeypatch, "theirs")
    Path("t.txt").write_text("the cat sat", encoding="utf-8")
    for command in (
        ["sample", "hi", "-m", "runs/theirs"],
        ["sample", "hi", "-m", "runs/theirs:latest"],
        ["eval", "t.txt", "-m", "runs/theirs"],
        ["params", "runs/theirs"],
        ["report", "runs/theirs"],
        ["inspect", "neighbors", "hi", "-m", "runs/theirs"],
        ["train", "--resume", "runs/theirs"],
        ["train", "t.txt", "--init", "runs/theirs"],
    ):
        result = gpt(*command)
        assert (result.code, "cannot read runs/theirs/run.json: Permission denied" in result.err) == (2, True), (
            result.err
        )
        assert result.err.splitlines()[-1] == "hint: check its permissions"
    shutil.copytree(run_folder, "runs/mine")
    assert gpt("sample", "hi", "-n", "1").code == 0
    assert "runs here: runs/mine\n" in gpt("sample", "hi", "-m", "nowhere").err
    assert "no unfinished run" in gpt("train", "--resume").err


def test_unreadable_checkpoint_is_named(
    run_folder: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch, gpt: Gpt
) -> None:
    shutil.copytree(run_folder, "mine")
    step = json.loads(Path("mine/index.json").read_text(encoding="utf-8"))["latest"]
    deny_access(monkeypatch, step)
    for model in (f"mine/{step}", f"mine:{step}"):
        result = gpt("sample", "hi", "-m", model)
        assert (result.code, f"cannot read mine/{step}/" in result.err) == (2, True), result.err
    result = gpt("sample", "hi", "-n", "1", "-m", "mine:latest")
    assert result.code == 0
    assert "Permission denied: using the checkpoint before it" in result.err


def test_damaged_best_checkpoint_prints_a_note(run_folder: Path, workdir: Path, gpt: Gpt) -> None:
    shutil.copytree(run_folder, "mine")
    step = json.loads(Path("mine/index.json").read_text(encoding="utf-8"))["best"]
    assert "other checkpoints" not in gpt("sample", "hi", "-n", "1", "-m", "mine").err
    Path("mine", step, "gpt.json").write_text("{", encoding="utf-8")
    result = gpt("sample", "hi", "-n", "1", "-m", "mine")
    assert f"mine/{step}/gpt.json is damaged: it is not JSON: using the best of the other checkpoints" in result.err


# Many samples


@pytest.mark.slow
def test_samples_are_generated_lazily(run_folder: Path, tmp_path: Path) -> None:
    """The first samples of a huge request are printed immediately. A closed pipe is not an error."""
    args = ["sample", "the", "-m", run_folder, "-n", "3", "--seed", "1", "--json"]
    with spawn(*args, "-N", str(2**63 - 1)) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(40)]
        process.stdout.close()
        assert (process.wait(timeout=60), "rror" in process.stderr.read()) == (0, False)
    assert [line["index"] for line in lines] == list(range(40))
    pieces = library.load(run_folder).write_all(["the"], SampleConfig(max_tokens=3), 1, 40)
    assert [piece.sample.text for piece in pieces if piece.sample] == [line["text"] for line in lines]


# Structured output


def test_output_follows_choices_regex_or_schema(gpt: Gpt, run_folder: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('\ufeff{"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"]}', "utf-8")
    args = ["sample", "the cat", "-m", run_folder, "--json", "-N", "3", "-t", "1"]
    for options, texts in (
        (["--choices", "yes,no", "--choices", "may be"], ["yes", "no", "may be"]),
        (["--regex", "x|y"], ["x", "y"]),
        (["--json-schema", schema], ['{"a":1', '{"a":"b"']),
        (["--beam", "2", "-N", "2", "--choices", "yes,no"], ["yes", "no"]),
    ):
        lines = read_samples(gpt(*args, *options))
        assert all(line["text"].startswith(tuple(texts)) for line in lines), lines
        assert {line["finish_reason"] for line in lines} <= {"stop", "eot", "length"}
    assert read_samples(gpt(*args, "--json-schema", "-", stdin=b'{"const": [1]}'))[0]["text"] == "[1]"


@pytest.mark.parametrize("options, message", [
    (["--regex", "a(?=b)"], "regex: look-around, including look-ahead and look-behind, is not supported"),
    (["--regex", "a", "--choices", "b,c"], "choices and regex both constrain the text"),
    (["--choices", "b,,c"], "choices is empty; it must be one or more strings"),
    (["--json-schema", "none.json"], "cannot read none.json: No such file or directory"),
    (["--regex", "a", "--ignore-eot"], "structured output cannot ignore end-of-text"),
])  # fmt: skip
def test_invalid_structured_output_options_are_errors(
    gpt: Gpt, run_folder: Path, options: list[str], message: str
) -> None:
    assert_error(gpt("sample", "the", "-m", run_folder, *options), message)
