"""The documentation: what is generated is current, what is quoted is there, the site builds and needs no network."""

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import ROOT

from docs import build_site, reference

PAGES = sorted((ROOT / "docs").glob("*.md"))
PICTURES = sorted((ROOT / "docs" / "pictures").iterdir())
LARGEST = 150_000


def test_the_reference_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert reference.page() == reference.PAGE.read_text(encoding="utf-8"), "python docs/reference.py writes it anew"


def test_variables_of_the_reference_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    root: Any = typer.main.get_command(reference.make_app())
    page = reference.PAGE.read_text(encoding="utf-8")
    count = 0
    for _, command, context in reference.commands(root, root.make_context("gpt", [], resilient_parsing=True)):
        for option in command.get_params(context):
            if option.param_type_name == "option" and "--help" not in option.opts and not option.hidden:
                variable = f"{context.auto_envvar_prefix}_{option.name.upper()}"
                assert f"| `{variable}` |" in page
                monkeypatch.setenv(variable, "a value")
                assert option.resolve_envvar_value(context) == "a value"
                count += 1
    assert count == len(re.findall(r"\| `GPT_[A-Z_]+` \|", page))


def test_quotes_are_lines_of_the_file_that_is_named() -> None:
    """On the page of the model each block of Python is a stretch of the file linked above it."""
    page = (ROOT / "docs" / "model.md").read_text(encoding="utf-8")
    quotes, named = 0, []
    for before, block in zip(*[iter(re.split(r"```python\n(.*?)```", page, flags=re.DOTALL)[:-1])] * 2, strict=True):
        named = re.findall(r"\]\(\.\./(gpt/[a-z_/]+\.py)\), `", before) or named
        code = [line.strip() for line in (ROOT / named[-1]).read_text(encoding="utf-8").splitlines()]
        quoted = [line.strip() for line in block.splitlines()]
        starts = [at for at, line in enumerate(code) if without_comment(line) == quoted[0]]
        found = [list(map(without_comment, code[at : at + len(quoted)])) for at in starts]
        assert quoted in found, f"{named[-1]} has no such lines:\n{block}"
        quotes += 1
    assert quotes == page.count("```python") >= 20
    for name, where in re.findall(r"\]\(\.\./(gpt/[a-z_/]+\.py)\), `([^`]+)`", page):
        text = (ROOT / name).read_text(encoding="utf-8")
        for word in where.split("."):
            assert re.search(rf"(class|def) {word}\b", text), f"{name} has no {where}"


def without_comment(line: str) -> str:
    return line.split("  #")[0]


def test_pictures_are_small_and_shown() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *PAGES])
    for path in PICTURES:
        assert path.stat().st_size < LARGEST, path
        assert f"pictures/{path.name})" in text, f"{path} is shown nowhere"
        assert b"https://" not in path.read_bytes() or path.suffix == ".svg"
    svg = (ROOT / "docs" / "pictures" / "run.svg").read_text(encoding="utf-8")
    assert "url(http" not in svg  # of a font


def test_files_that_contributing_names_are_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`(?:python )?((?:benchmarks|cli|data|docs|gpt|tests)/[\w./-]*)`", page)
    assert len(named) > 20
    for name in named:
        assert (ROOT / name).exists() or "NAME" in name, name


def listed(nav: Any) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    return set().union(*map(listed, nav.values() if isinstance(nav, dict) else nav))


def test_the_navigation_has_every_page() -> None:
    nav = tomllib.loads((ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    assert listed(nav) >= {"README.md", "CHANGELOG.md", "data/README.md", "benchmarks/RESULTS.md"}
    assert {page for page in listed(nav) if page.startswith("docs/")} == {f"docs/{path.name}" for path in PAGES}
    for page in listed(nav):
        assert (ROOT / page).exists()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="the extra docs is not installed")
    place = tmp_path_factory.mktemp("site")
    assert build_site.build(place) == 0
    return place


def test_the_site_has_every_page_and_asks_no_other_host(built: Path) -> None:
    for path in PAGES:
        page = (built / "site" / "docs" / f"{path.stem}.html").read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|iframe)[^>]*src=\"?([^\"> ]+)|<link[^>]*href=\"?([^\"> ]+)", page)
        assert fetched
        for each in fetched:
            assert "//" not in "".join(each), f"{path.name}: {each}"
    assert (built / "site" / "index.html").exists()


def test_a_link_that_leads_nowhere_fails_the_site(
    built: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(built / "docs", tmp_path / "docs")
    shutil.copy(built / "zensical.toml", tmp_path)
    path = tmp_path / "docs" / "docs" / "understand.md"
    whole = path.read_text(encoding="utf-8")
    links = ("nowhere.md", "formats.md#nowhere", "#nowhere")
    bad = "".join(f"[fine](formats.md), [x]({link}), [also fine](formats.md)\n" for link in links)
    path.write_text(f"{whole}\n{bad}", encoding="utf-8")
    assert build_site.render(tmp_path) == 1
    lines = sorted(capfd.readouterr().err.splitlines())
    assert len(lines) == len(links)
    for row, (line, link) in enumerate(zip(lines, links, strict=True), len(whole.splitlines()) + 2):
        assert line.startswith(f'error: docs/understand.md, line {row}: the link "{link}" leads nowhere: ')


def test_a_site_that_cannot_be_built_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zensical", reason="the extra docs is not installed")
    assert build_site.render(tmp_path) != 0
    assert "config" in capfd.readouterr().err


def test_the_site_is_read_and_searched_from_disk(built: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((built / "site" / "docs" / "generate.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("speculate")
    page.get_by_text(re.compile(r"^\d+ results?$")).wait_for()
    assert said == []
    assert all(url.startswith(("file:", "blob:", "data:")) for url in asked), asked
    page.close()
