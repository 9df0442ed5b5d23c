"""Help pages: what they list, that they fit on a screen, and that their examples are commands."""

import shlex
from typing import Any

import pytest
import typer
from conftest import Gpt
from gpt_cli import help_pages
from gpt_cli.main import make_app

from docs import reference

ROOT: Any = typer.main.get_command(make_app())
CONTEXT = ROOT.make_context("gpt", [], resilient_parsing=True)
COMMANDS = {
    path.removeprefix("gpt "): (command, context) for path, command, context in reference.commands(ROOT, CONTEXT)
}
GROUPS = {name: ROOT.commands[name] for name in ("tokenizer", "data", "inspect")}
LINES = 45  # of a screen of 80 columns


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def options(name: str) -> dict[str, list[Any]]:
    return help_pages.panels(*COMMANDS[name])


def listed(name: str) -> list[Any]:
    return [each for panel, found in options(name).items() if panel != help_pages.RARE for each in found]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_on_a_screen_and_help_all_has_every_option(gpt: Gpt, name: str) -> None:
    short, whole = gpt(*name.split(), "--help").out, gpt(*name.split(), "--help-all").out
    assert gpt(*name.split(), "-h").out == short
    assert len(short.splitlines()) <= LINES
    assert max(map(len, whole.splitlines())) <= 80
    is_long = len(listed(name)) > help_pages.SHORT
    assert ("--help-all lists all" in short) == is_long
    if is_long:
        assert 5 <= len(options(name)[help_pages.COMMON]) <= help_pages.SHORT
        assert f"gpt {name} --help-all lists all {len(listed(name))} options." in short
    for each in listed(name):
        assert f"{max(each.opts, key=len)} " in whole.replace("\n", " "), each.name
    for each in options(name).get(help_pages.RARE, []):
        assert f"{max(each.opts, key=len)} " not in whole, each.name
    for noise in ("<", "(none)", "[[", "[default", "default: )", "<bool>"):
        assert noise not in whole.replace("<name of the text>", "NAME")


def test_defaults_are_in_help_all(gpt: Gpt) -> None:
    for name in COMMANDS:
        whole = " ".join(gpt(*name.split(), "--help-all").out.split())
        for each in listed(name):
            shown = help_pages.default(each)
            assert shown == "required" or not shown or f"(default: {shown})" in whole, (name, each.name)
    assert help_pages.default(next(each for each in listed("train") if each.name == "patience")) == "0"


@pytest.mark.parametrize("name", COMMANDS)
def test_texts_are_short(name: str) -> None:
    for each in [*COMMANDS[name][0].params]:
        if not each.hidden and each.rich_help_panel != help_pages.RARE:
            assert each.help and not each.help.endswith("."), each.name
            assert len(each.help) <= 90, each.help
    assert len(help_pages.summary(COMMANDS[name][0])) <= 90


@pytest.mark.parametrize(
    "line",
    [line for command in [ROOT, *GROUPS.values(), *(command for command, _ in COMMANDS.values())]
     for line in help_pages.described(command)[1]],
)  # fmt: skip
def test_examples_are_commands(gpt: Gpt, line: str) -> None:
    program, *words = shlex.split(line)
    done = gpt(*words, "--help")  # which comes last: all other words are parsed first
    assert (program, done.code, done.err) == ("gpt", 0, "")
    assert done.out.startswith("Usage: gpt")


def test_every_long_command_has_examples() -> None:
    for name, (command, _) in COMMANDS.items():
        assert help_pages.described(command)[1] or not help_pages.arguments(command), name
    for name in ("train", "sample", "eval", "tokenize", "params"):
        assert len(help_pages.described(COMMANDS[name][0])[1]) == 3


def test_the_first_page(gpt: Gpt) -> None:
    page = gpt("--help").out
    assert gpt().out == gpt("-h").out == page
    assert len(page.splitlines()) <= LINES
    titles = [line[:-1] for line in page.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Examples", "Train", "Generate", "Understand", "Prepare", "Publish", "Options"]
    for name in ROOT.commands:
        assert f"\n  {name} " in page
    assert "GPT_TRAIN_STEPS=100" in page and "--debug" in page
    for name, group in GROUPS.items():
        page = gpt(name).out
        assert page == gpt(name, "--help").out
        assert all(f"\n  {each} " in page for each, command in group.commands.items() if not command.hidden)


def test_rarely_needed_options_are_options_all_the_same(gpt: Gpt) -> None:
    rare = {name: {each.name for each in options(name).get(help_pages.RARE, [])} for name in COMMANDS}
    assert rare["train"] == {"batch_ramp", "warmup_tokens", "sample_bytes"}
    assert rare["tokenize"] == {"part", "sample_bytes"}
    assert "batch_ramp = 5" in gpt("train", "--batch-ramp", "5", "--print-config").out


def test_pages_are_as_wide_as_the_terminal_up_to_a_limit(gpt: Gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (60, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        page = gpt("train", "--help-all").out.splitlines()
        widest = max(len(line) for line in page if not line.startswith("  gpt "))
        assert widest <= min(columns, help_pages.WIDTH)
