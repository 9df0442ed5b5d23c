"""A ```math block as MathML, which browsers draw by themselves."""

from typing import Any

from latex2mathml.converter import convert


def fence(source: str, *_: Any, **__: Any) -> str:
    """TeX → a formula on lines of its own, for pymdownx.superfences."""
    return f'<div class="math">{convert(source, display="block")}</div>'
