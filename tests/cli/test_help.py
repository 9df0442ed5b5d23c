"""Help pages and their examples."""

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
LINES = 45  # Maximum lines of a short help page, at 80 columns


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def panels(name: str) -> dict[str, list[Any]]:
    return help_pages.panels(*COMMANDS[name])


def listed_options(name: str) -> list[Any]:
    return [option for group in panels(name).values() for option in group]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_on_a_screen_and_help_all_lists_every_option(gpt: Gpt, name: str) -> None:
    short, full = gpt(*name.split(), "--help").out, gpt(*name.split(), "--help-all").out
    assert gpt(*name.split(), "-h").out == short
    assert len(short.splitlines()) <= LINES
    assert max(map(len, full.splitlines())) <= 80
    is_long = len(listed_options(name)) > help_pages.MAX_LISTED_OPTIONS
    assert ("--help-all lists all" in short) == is_long
    if is_long:
        assert 5 <= len(panels(name)[help_pages.COMMON]) <= help_pages.MAX_LISTED_OPTIONS
        assert f"gpt {name} --help-all lists all {len(listed_options(name))} options." in short
    for option in listed_options(name):
        assert f"{max(option.opts, key=len)} " in full.replace("\n", " "), option.name
    for noise in ("<", "(none)", "[[", "[default", "default: )", "<bool>"):
        assert noise not in full.replace("<name of the text>", "NAME")


def test_help_all_prints_defaults(gpt: Gpt) -> None:
    for name in COMMANDS:
        full = " ".join(gpt(*name.split(), "--help-all").out.split())
        for option in listed_options(name):
            default = help_pages.default(option)
            assert default == "required" or not default or f"(default: {default})" in full, (name, option.name)
    assert help_pages.default(next(option for option in listed_options("sample") if option.name == "min_tokens")) == "0"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_texts_are_short(name: str) -> None:
    for param in [*COMMANDS[name][0].params]:
        if not param.hidden:
            assert param.help and not param.help.endswith("."), param.name
            assert len(param.help) <= 90, param.help
    assert len(help_pages.summary(COMMANDS[name][0])) <= 90


@pytest.mark.parametrize(
    "line",
    [line for command in [ROOT, *GROUPS.values(), *(command for command, _ in COMMANDS.values())]
     for line in help_pages.split_description(command)[1]],
)  # fmt: skip
def test_examples_are_valid_commands(gpt: Gpt, line: str) -> None:
    program, *words = shlex.split(line)
    result = gpt(*words, "--help")  # All words before --help are parsed.
    assert (program, result.code, result.err) == ("gpt", 0, "")
    assert result.out.startswith("Usage: gpt")


def test_every_long_command_has_examples() -> None:
    for name, (command, _) in COMMANDS.items():
        assert help_pages.split_description(command)[1] or not help_pages.arguments(command), name
    for name in ("train", "sample", "eval", "tokenize", "params"):
        assert len(help_pages.split_description(COMMANDS[name][0])[1]) == 3


def test_main_help_page_lists_every_command(gpt: Gpt) -> None:
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
        assert all(f"\n  {subcommand} " in page for subcommand, command in group.commands.items() if not command.hidden)


def test_help_width_follows_the_terminal_up_to_a_limit(gpt: Gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (60, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        page = gpt("train", "--help-all").out.splitlines()
        widest = max(len(line) for line in page if not line.startswith("  gpt "))
        assert widest <= min(columns, help_pages.WIDTH)
