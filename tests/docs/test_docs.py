"""The documentation: generated pages are current, quotes match the code, and the site builds and works offline."""

import inspect
import re
import shutil
import tomllib
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import ROOT

from docs import build_site, reference
from gpt import api

PAGES = sorted((ROOT / "docs").glob("*.md"))
PICTURES = sorted((ROOT / "docs" / "pictures").iterdir())
MAX_PICTURE_BYTES = 150_000


def test_reference_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert reference.page() == reference.PAGE.read_text(encoding="utf-8"), "python docs/reference.py writes it anew"


def test_documented_environment_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule on top of the reference gives each option's variable."""
    root: Any = typer.main.get_command(reference.make_app())
    count = 0
    for name, command, context in reference.commands(root, root.make_context("gpt", [], resilient_parsing=True)):
        for option in command.get_params(context):
            if option.param_type_name == "option" and "--help" not in option.opts and not option.hidden:
                words = [*name.split(), *max(option.opts, key=len).strip("-").split("-")]
                monkeypatch.setenv("_".join(words).upper(), "a value")
                assert option.resolve_envvar_value(context) == "a value", option.opts
                count += 1
    assert count > 200


def test_documented_settings_of_load_exist() -> None:
    found = re.search(r"Further settings: (.*?)\. Returns", (ROOT / "docs/python.md").read_text(encoding="utf-8"))
    assert found is not None
    assert {*re.findall(r"`(\w+)", found[1])} <= {*inspect.signature(api.load).parameters}


@pytest.mark.parametrize("name", ["model", "attention", "next-token", "families"])
def test_quoted_code_matches_the_source(name: str) -> None:
    """Each Python block consists of consecutive lines of the file linked above it."""
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    quotes, linked_files = 0, []
    for before, block in zip(*[iter(re.split(r"```python\n(.*?)```", page, flags=re.DOTALL)[:-1])] * 2, strict=True):
        linked_files = re.findall(r"\]\(\.\./(gpt/[a-z_/]+\.py)\), `", before) or linked_files
        code = [line.strip() for line in (ROOT / linked_files[-1]).read_text(encoding="utf-8").splitlines()]
        quoted = [line.strip() for line in block.splitlines()]
        starts = [at for at, line in enumerate(code) if strip_comment(line) == quoted[0]]
        candidates = [list(map(strip_comment, code[at : at + len(quoted)])) for at in starts]
        assert quoted in candidates, f"{linked_files[-1]} has no such lines:\n{block}"
        quotes += 1
    assert quotes == page.count("```python") >= 5
    for file, definition in re.findall(r"\]\(\.\./(gpt/[a-z_/]+\.py)\), `([^`]+)`", page):
        text = (ROOT / file).read_text(encoding="utf-8")
        for word in definition.split("."):
            assert re.search(rf"(class|def) {word}\b", text), f"{file} has no {definition}"


def test_update_by_hand_has_the_numbers_of_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "learning.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "example", "exec"), {})
    printed = re.findall(r"\d+\.\d+", capsys.readouterr().out)
    assert len(printed) == 20
    on_page = [float(number) for number in re.findall(r"\d\.\d{3}", page)]
    for number in map(float, printed):
        assert min(abs(number - each) for each in on_page) <= 0.00055, number


def strip_comment(line: str) -> str:
    return line.split("  #")[0]


def test_pictures_are_small_and_used() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *PAGES])
    for path in PICTURES:
        assert path.stat().st_size < MAX_PICTURE_BYTES, path
        assert f"pictures/{path.name})" in text, f"{path} is shown nowhere"
        assert b"https://" not in path.read_bytes() or path.suffix == ".svg"
    svg = (ROOT / "docs" / "pictures" / "run.svg").read_text(encoding="utf-8")
    assert "url(http" not in svg  # Fonts must not come from another host.


def test_files_named_in_contributing_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names = re.findall(r"`(?:python )?((?:benchmarks|cli|data|docs|gpt|tests)/[\w./-]*)`", page)
    assert len(names) > 20
    for name in names:
        assert (ROOT / name).exists() or "NAME" in name, name


def test_every_pair_of_features_has_a_test() -> None:
    """The table names each pair once, and tests that exist."""
    section = (
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## What meets what")[2].split("\n## ")[0]
    )
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| ")][1:]
    pairs = [frozenset(pair) for first, second, _ in rows for pair in product(first.split(", "), second.split(", "))]
    assert sorted(map(sorted, pairs)) == [list(pair) for pair in combinations(sorted(frozenset().union(*pairs)), 2)]
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for _, _, test in rows:
        match = re.fullmatch(r"(?:refused: )?`(\w+)`|apart", test)
        assert match is not None, test
        assert match[1] is None or f"def {match[1]}(" in tests, f"there is no {match[1]}"


def nav_pages(nav: Any) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    return set().union(*map(nav_pages, nav.values() if isinstance(nav, dict) else nav))


def test_navigation_lists_every_page() -> None:
    nav = tomllib.loads((ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    assert nav_pages(nav) >= {"README.md", "CHANGELOG.md", "data/README.md", "benchmarks/RESULTS.md"}
    assert {page for page in nav_pages(nav) if page.startswith("docs/")} == {f"docs/{path.name}" for path in PAGES}
    for page in nav_pages(nav):
        assert (ROOT / page).exists()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="the extra docs is not installed")
    place = tmp_path_factory.mktemp("site")
    assert build_site.build(place) == 0
    return place


def test_site_has_every_page_and_needs_no_other_host(built: Path) -> None:
    for path in PAGES:
        page = (built / "site" / "docs" / f"{path.stem}.html").read_text(encoding="utf-8")
        addresses = re.findall(r"<(?:script|img|iframe)[^>]*src=\"?([^\"> ]+)|<link[^>]*href=\"?([^\"> ]+)", page)
        assert addresses
        for urls in addresses:
            assert "//" not in "".join(urls), f"{path.name}: {urls}"
    assert (built / "site" / "index.html").exists()


def test_broken_links_fail_the_build(built: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(built / "docs", tmp_path / "docs")
    shutil.copy(built / "zensical.toml", tmp_path)
    path = tmp_path / "docs" / "docs" / "understand.md"
    original = path.read_text(encoding="utf-8")
    links = ("nowhere.md", "formats.md#nowhere", "#nowhere")
    bad = "".join(f"[fine](formats.md), [x]({link}), [also fine](formats.md)\n" for link in links)
    path.write_text(f"{original}\n{bad}", encoding="utf-8")
    assert build_site.render(tmp_path) == 1
    lines = sorted(capfd.readouterr().err.splitlines())
    assert len(lines) == len(links)
    for row, (line, link) in enumerate(zip(lines, links, strict=True), len(original.splitlines()) + 2):
        assert line.startswith(f'error: docs/understand.md, line {row}: the link "{link}" leads nowhere: ')


def test_failed_builds_report_the_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zensical", reason="the extra docs is not installed")
    assert build_site.render(tmp_path) != 0
    assert "config" in capfd.readouterr().err


def test_site_and_search_work_from_disk(built: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    console_messages: list[str] = []
    requested_urls: list[str] = []
    page.on("console", lambda message: console_messages.append(message.text))
    page.on("pageerror", lambda error: console_messages.append(str(error)))
    page.on("request", lambda request: requested_urls.append(request.url))
    page.goto((built / "site" / "docs" / "generate.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("temperature")
    page.get_by_text(re.compile(r"^\d+ results?$")).wait_for()
    assert console_messages == []
    assert all(url.startswith(("file:", "blob:", "data:")) for url in requested_urls), requested_urls
    page.close()
