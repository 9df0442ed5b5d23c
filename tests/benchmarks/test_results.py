"""Benchmark results: pages are current, and every cited figure is in the linked section."""

import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from conftest import ROOT

from benchmarks import results
from benchmarks.results import Section, Table

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *results.FOLDER.glob("*.md")]


def parse_numbers(text: str) -> list[Decimal]:
    return [Decimal(digits.replace(",", "")) for digits in NUMBER.findall(text)]


def decimal_places(number: Decimal) -> int:
    return -int(number.as_tuple().exponent)


def contains_figure(figure: Decimal, text: str) -> bool:
    tolerance = Decimal(5).scaleb(-decimal_places(figure) - 1)
    return any(
        decimal_places(number) >= decimal_places(figure) and abs(number - figure) <= tolerance
        for number in parse_numbers(text)
    )


def sections(text: str) -> dict[str, str]:
    """Returns the sections of a page, including subsections, by anchor. The whole page has an empty anchor."""
    lines, fenced, headings = text.splitlines(), False, list[tuple[int, int, str]]()
    for at, line in enumerate(lines):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and (heading := re.match(r"(#+) (.+)", line)):
            headings.append((at, len(heading[1]), results.anchor(LINK.sub(r"\1", heading[2]))))
    section_texts = {"": text}
    for number, (at, level, name) in enumerate(headings):
        end = next((line for line, other, _ in headings[number + 1 :] if other <= level), len(lines))
        duplicates = sum(other == name for _, _, other in headings[:number])
        section_texts[f"{name}-{duplicates}" if duplicates else name] = "\n".join(lines[at:end])
    return section_texts


def test_pages_are_current() -> None:
    names = {path.stem for path in (results.FOLDER / "results").glob("*.json")}
    assert names <= {name for page in results.PAGES.values() for name in page}
    for name in results.PAGES:
        stored_page = (results.FOLDER / name).read_text(encoding="utf-8")
        assert stored_page == results.page(name), "python -m benchmarks.results writes the pages"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_cited_figures_are_in_the_results(page: Path) -> None:
    for words, target in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        evidence = (page.parent / path).resolve() if path else page
        if "://" in target or evidence.parent != results.FOLDER or evidence.suffix != ".md":
            continue
        section_texts = sections(evidence.read_text(encoding="utf-8"))
        assert anchor in section_texts, f"{target} does not exist"
        for figure in parse_numbers(words):
            assert contains_figure(figure, section_texts[anchor]), f"{figure} of [{words}] is not in {target}"


def test_readme_tables_link_every_figure() -> None:
    rows = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    for row in rows:
        if "](benchmarks/" in row:
            unlinked = [cell for cell in row.strip("|").split("|")[1:] if re.match(r"\s*\**\d", cell)]
            assert not unlinked, f"cells without a link to the results: {unlinked}"


@pytest.mark.parametrize(
    ("figure", "text", "expected"),
    [
        ("544,309", "| 544309 |", True), ("1.485", "1.4850", True), ("1.485", "1.4846", True),
        ("1.485", "1.4856", False), ("398", "397,886", False), ("2.50", "2.5", False), ("61", "61 s", True),
        ("3", "2.5", True), ("0.4", "10.4", False),
    ],
)  # fmt: skip
def test_cited_figures_can_be_rounded(figure: str, text: str, expected: bool) -> None:
    (number,) = parse_numbers(figure)
    assert contains_figure(number, text) is expected


def test_sections_are_replaced_by_title(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "FIGURES", ())
    table = Table(["what", "rate", "each"], [["a|b", "1,000", "1, 2"], ["c", "", "3"]], "A caption:")
    first = Section("One", "abc", "2026-01-01", "a machine", "make bench", ["A note."], [table])
    second = replace(first, title="Two", notes=[], tables=[])
    for section in (replace(first, commit="old"), second, first):
        results.write_section("run", section)
    assert results.load("run") == [first, second]
    page = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert "A caption:\n\n| what | rate | each |\n|---|---:|---|\n| a b | 1,000 | 1, 2 |\n| c |  | 3 |" in page
    assert page.endswith("## Two\n\n- a machine\n- commit abc, 2026-01-01, command `make bench`\n")


def test_summary_needs_exactly_one_matching_row() -> None:
    table = Table(["system", "dtype", "tokens/s"], [["`gpt`", "int8", "20"], ["peer", "int8", "10"]])
    section = Section("Speed", "abc", "2026-01-01", "a machine", "make bench", [], [table])
    figure = results.Figure("Decoding", "Speed", "tokens/s", ["`gpt`"], "a peer", ["peer", "int8"])
    assert figure.row([section]) == ["Decoding", "20 tokens/s", "10 (a peer)", "[Speed](#speed)"]
    with pytest.raises(LookupError, match="2 rows"):
        replace(figure, ours=["int8"]).row([section])
