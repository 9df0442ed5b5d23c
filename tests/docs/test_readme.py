"""Runs every command and Python example of the README and docs with few steps.

Commands that need a network, a large model or an end are only parsed.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Done, make_text

from gpt.model import kernels

PARSED_ONLY = ("shakespeare", "--tokenizer gpt2", "hf:", "gpt serve", "--also", "report --watch")
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if page.name != "reference.md"  # The tests of --help parse its examples.
}
EXERCISES = "docs/exercises.md", "docs/exercises-inside.md"  # Their commands and Python examples need each other.


def commands(page: str) -> Iterator[str]:
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if line.startswith("$ gpt "):
                yield line[2:].split(" #")[0].strip()


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch, workdir: Path) -> None:
    monkeypatch.setenv("GPT_TRAIN_STEPS", "2")
    monkeypatch.setenv("GPT_TRAIN_EVAL_EVERY", "2")
    monkeypatch.setenv("GPT_TRAIN_BATCH_TOKENS", "256")
    monkeypatch.setenv("GPT_SAMPLE_MAX_TOKENS", "4")
    Path("book.txt").write_bytes(make_text(1500).encode())
    Path("chapter.txt").write_bytes(make_text(300, seed=1).encode())
    pairs = [{"prompt": f"{n} and 1 =>", "completion": f" {n + 1}"} for n in range(40)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    chat = [{"role": "user", "content": "What follows 1?"}, {"role": "assistant", "content": "2 follows."}]
    Path("chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 40)
    preferences = [{"prompt": f"{n} and 1 =>", "chosen": f" {n + 1}", "rejected": " none"} for n in range(40)]
    Path("prefs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in preferences))
    Path("prompts.jsonl").write_text('{"prompt": "Once upon"}\n{"prompt": "the cat"}\n')
    Path("score.py").write_text("import sys\nfor line in sys.stdin:\n    print(len(line))\n")
    person = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    Path("person.json").write_text(json.dumps(person))
    Path("notes").mkdir()
    Path("notes/one.md").write_bytes(make_text(1500, seed=2).encode())


@pytest.fixture(scope="module")
def book_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run is kept that most pages begin with."""
    return tmp_path_factory.mktemp("kept") / "book"


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(PAGES[page])) and page not in EXERCISES])
def test_documented_commands_run(gpt: Callable[..., Done], book_run: Path, page: str) -> None:
    run_commands(gpt, PAGES[page], book_run)


def run_commands(gpt: Callable[..., Done], page: str, book_run: Path | None = None) -> None:
    """Runs the commands of a page. Trains the run that most pages begin with once, and keeps it in ``book_run``."""
    import gpt_cli.main

    for line in commands(page):
        words = shlex.split(line)
        kept = book_run if line.removesuffix(" -o runs/book") == "gpt train book.txt" else None
        if kept and kept.exists() and not Path("runs/book").exists():
            shutil.copytree(kept, "runs/book")
            continue
        if any(mark in line for mark in PARSED_ONLY):
            command = gpt_cli.main.make_app()
            with pytest.raises(SystemExit) as stop:  # The words before --help are parsed first.
                command([*words[1:], "--help"])
            assert stop.value.code == 0
            continue
        stdin = b"What follows 1?\n" if {"-i", "chat"} & set(words) else b""
        if "<" in words:
            at = words.index("<")
            stdin = Path(words[at + 1]).read_bytes()
            words = words[:at]
        words = words[: words.index(">")] if ">" in words else words
        result = gpt(*words[1:], stdin=stdin)
        assert result.code == 0, f"{line}\n{result.err}"
        assert result.out
        if kept and not kept.exists():
            shutil.copytree("runs/book", kept)


def run_example(code: str) -> None:
    """Runs a Python example in this process, which has imported torch."""
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "import gpt\n" in "".join(python_blocks(PAGES[page])) and page not in EXERCISES]
)
def test_python_examples_run(page: str) -> None:
    run_example("\n".join(python_blocks(PAGES[page])).replace("steps=50", "steps=2, block_size=32, batch_tokens=256"))


@pytest.mark.usefixtures("few_steps")
def test_exercises_run_in_order(gpt: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "make_causal_mask", kernels.make_causal_mask)  # The last exercise replaces it.
    text = re.sub(r"steps[ =]\d+", lambda steps: f"{steps[0][:6]}2", "".join(PAGES[page] for page in EXERCISES))
    for block in re.findall(r"```(?:console|python)\n.*?```", text.replace("30_000", "300"), re.DOTALL):
        run_commands(gpt, block)
        for code in python_blocks(block):
            run_example(code)
    assert {path.name for path in Path("runs").iterdir()} == {"book", "small", "both", "twice", "cheat"}


@pytest.mark.usefixtures("few_steps")
def test_transformers_example_generates_the_same_text(
    gpt: Callable[..., Done], book_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "publish.md").read_text(encoding="utf-8")
    train, sample, *_ = commands(page)
    run_commands(gpt, f"```console\n$ {train}\n```", book_run)
    ours = gpt(*shlex.split(sample)[1:])
    (block,) = python_blocks(page)
    run_example(block)
    assert capfd.readouterr().out == ours.out


def test_relative_links_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "data" / "README.md"]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page}: {target}"
