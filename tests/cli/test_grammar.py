"""The option -m of every command, and hints for commands and options of other programs."""

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import Gpt, make_text
from conftest import one_line_of_what_and_what_next as assert_error


@pytest.fixture
def run(run_folder: Path, workdir: Path) -> str:
    """The newest run, and a text file."""
    shutil.copytree(run_folder, "runs/book")
    Path("t.txt").write_bytes(make_text(60).encode())
    return "runs/book"


# The model


def test_model_defaults_to_the_newest_run(gpt: Gpt, run: str) -> None:
    for words in (["eval", "t.txt", "--json"], ["tokenizer", "encode", "the cat"], ["tokenizer", "decode", "40", "50"]):
        newest, named = gpt(*words), gpt(*words, "-m", run)
        assert (newest.code, newest.out) == (0, named.out), newest.err
    assert gpt("export", "-o", "newest.gguf", "--quiet").code == 0
    assert gpt("export", "-m", run, "-o", "named.gguf", "--quiet").code == 0


def test_words_of_eval_are_texts(gpt: Gpt, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("nano").write_text("the cat sat on the mat")  # The file is named like a preset.
    assert json.loads(gpt("eval", "nano", "t.txt", "--json").out)["bytes"] > Path("t.txt").stat().st_size
    for model in (run, f"{run}:latest", "hf:me/tiny", "gpt2"):
        assert_error(gpt("eval", model, "t.txt"), model)
    monkeypatch.setenv("GPT_EVAL_MODEL", run)
    assert gpt("eval", "t.txt").code == 0


def test_export_takes_no_text(gpt: Gpt, run: str) -> None:
    result = gpt("export", run, "-o", "a.gguf")
    assert_error(result, f"unexpected extra argument(s) ({run})")
    assert "-m names the model" in result.err


# gpt chat


def test_chat_command_matches_interactive_sample(gpt: Gpt, run: str) -> None:
    options = ["-m", run, "-n", "6", "--seed", "3", "--temperature", "0.5"]
    chat, sample = (gpt(*words, *options, stdin=b"the cat\n/retry\n") for words in (["chat"], ["sample", "-i"]))
    assert (chat.code, chat.out, chat.err) == (0, sample.out, sample.err)
    assert chat.out.count("the cat") == 2
    assert gpt("chat", "-n", "6", "--seed", "3", "--temperature", "0.5", stdin=b"the cat\n/retry\n").out == chat.out
    result = gpt("chat", run)
    assert_error(result, f"unexpected extra argument(s) ({run})")
    assert "-m names the model" in result.err
    assert_error(gpt("chat", "--seed", "-1"), "Invalid value for '--seed'")
    assert_error(gpt("chat", "-m", "nowhere"), "there is no run or checkpoint nowhere")


# Commands and options of other programs


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("generate Once upon", "gpt sample PROMPT"),
        ("run llama3", "gpt chat"),
        ("finetune x.jsonl", "gpt train TEXT --init MODEL"),
        ("resume", "gpt train --resume"),
        ("pull qwen3", "-m hf:OWNER/NAME"),
        ("ls", "gpt params --list"),
        ("convert", "gpt export -m MODEL -o FILE.gguf"),
        ("encode x", "gpt tokenizer encode"),
        ("help train", "gpt COMMAND --help"),
        ("train --batch-size 8", "--batch-tokens: Tokens per step"),
        ("train --batch_size=8", "--micro-batch: "),
        ("sample --batch-size 8", "--batch: "),
        ("train --max-iters 5", "--steps: Optimizer steps"),
        ("train --context-length 5", "--block-size: Context"),
        ("train --model-name x", "--init: "),
        ("train -m gpt2", "--init: "),
        ("sample --model-name x", "--model: "),
        ("sample --max-new-tokens 5", "--max-tokens: "),
        ("sample --num-return-sequences 5", "--num: Number of samples"),
        ("sample --do-sample", "--greedy turns it off"),
        ("sample --ctx-size 5", "the context length is fixed when a model is trained"),
        ("serve --ctx-size 5", "--context: "),
        ("sample --n-gpu-layers 99", "--device: Device; auto: CUDA, else MPS, else the CPU"),
        ("sample --top_k 5", "--top-k: "),
        ("sample --prompt x", "PROMPT is positional: gpt sample PROMPT"),
        ("train --dataset x", "TEXT is positional: gpt train TEXT"),
        ("inspect attention --prompt x", "PROMPT is positional: gpt inspect attention PROMPT"),
    ],
)  # fmt: skip
def test_commands_and_options_of_other_programs_get_hints(gpt: Gpt, line: str, hint: str) -> None:
    words = shlex.split(line)
    result = gpt(*words)
    name = next((word.split("=")[0] for word in words if word.startswith("-")), words[0])
    kind = "option" if name.startswith("-") else "command"
    assert_error(result, f"there is no {kind} {name}")
    assert hint in result.err.splitlines()[1]


def test_other_unknown_names_get_the_usual_error(gpt: Gpt) -> None:
    assert_error(gpt("sample", "--learning-rate", "1"), "No such option: --learning-rate")
    assert_error(gpt("train", "--stesp", "1"), "--steps")
    assert_error(gpt("trian"), "train")


def test_hints_name_existing_options_and_commands(gpt: Gpt) -> None:
    """Hints name only options and commands that exist."""
    import typer
    from gpt_cli import main, other_programs

    root = typer.main.get_command(main.make_app())
    commands: dict[str, Sequence[str]] = {}
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        for subcommand in [command, *getattr(command, "commands", {}).values()]:
            commands[name] = [*commands.get(name, []), *(flag for param in subcommand.params for flag in param.opts)]
    known = {flag for flags in commands.values() for flag in flags}
    assert {option for option in other_programs._FOREIGN_OPTIONS if option not in known} == set()
    assert not {*other_programs.COMMANDS} & {*commands}
    for hint in other_programs.COMMANDS.values():
        for word in hint.replace(",", " ").split("gpt ")[1:]:
            assert word.split()[0] in {*commands, "--version", "--help", "COMMAND"}, hint


@pytest.mark.usefixtures("run")
def test_incomplete_model_names_get_hints(gpt: Gpt) -> None:
    for name, hint in {
        "book": 'did you mean "' + str(Path("runs", "book")) + '"?',
        "owner/model": '"hf:owner/model"',
        "runs/bok": f'did you mean "{Path("runs", "book")}"?',
    }.items():
        result = gpt("eval", "t.txt", "-m", name)
        assert_error(result, f"there is no run or checkpoint {Path(name)}")
        assert hint in result.err
