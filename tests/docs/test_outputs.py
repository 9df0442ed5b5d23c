"""docs/outputs.py replaces outputs in the docs by those of real commands."""

from pathlib import Path

from conftest import ROOT

from docs import outputs

PAGE = """A page.

```console
$ gpt data fetch shakespeare
$ gpt params gpt2
```

```text
an old line
…
124,439,808  an old line
```

```console
$ gpt train no-such-file
```
"""


def test_outputs_are_replaced_and_stay_shortened(tmp_path: Path) -> None:
    page = outputs.update_page(PAGE, tmp_path)
    before, _, after = PAGE.partition("an old line\n…\n")
    assert page.startswith(before)
    assert "gpt2\n…\n" in page
    assert "124,439,808  trainable\n" in page
    assert page.endswith(after.split("```\n", 1)[1])


def test_shortening_keeps_only_the_last_of_lines_with_the_same_first_word() -> None:
    assert outputs.shorten("a 1\nb 2  \nc 3\nb 4\n\n", "a 0\n…\nb 0\n") == "a 1\n…\nb 4\n"
    assert outputs.shorten("a 1\n\n", "b\nc\n") == "a 1\n"


def test_marked_pages_have_outputs() -> None:
    pages = [path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]]
    marked_pages = [page for page in pages if outputs.MARKER in page]
    assert len(marked_pages) >= 2
    for page in marked_pages:
        assert any(match[3] for match in outputs.BLOCK.finditer(page))
