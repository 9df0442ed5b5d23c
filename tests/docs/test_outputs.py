"""docs/outputs.py: outputs in the docs are replaced by what the commands print."""

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


def test_an_output_is_replaced_and_stays_cut(tmp_path: Path) -> None:
    made = outputs.remade(PAGE, tmp_path)
    before, _, after = PAGE.partition("an old line\n…\n")
    assert made.startswith(before)
    assert "gpt2\n…\n" in made
    assert "124,439,808  trainable\n" in made
    assert made.endswith(after.split("```\n", 1)[1])


def test_cutting_keeps_the_last_line_with_a_word() -> None:
    assert outputs.cut("a 1\nb 2  \nc 3\nb 4\n\n", "a 0\n…\nb 0\n") == "a 1\n…\nb 4\n"
    assert outputs.cut("a 1\n\n", "b\nc\n") == "a 1\n"


def test_marked_pages_have_outputs() -> None:
    pages = [path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]]
    marked = [page for page in pages if outputs.MARK in page]
    assert len(marked) >= 2
    for page in marked:
        assert any(found[3] for found in outputs.BLOCK.finditer(page))
