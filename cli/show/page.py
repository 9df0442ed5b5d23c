"""Shows results as self-contained HTML pages, JSON or text."""

import base64
import json
import os
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from gpt.system.errors import UserError
from gpt.system.files import disk_errors, write_file

from . import render

if TYPE_CHECKING:
    import numpy.typing as npt

Data = Mapping[str, Any]
COMMON = ("page.js", "chart.js", "views.js")
FILM = ("report", "watch")  # pages that show the film of a run


def check_out(out: Path | None) -> None:
    """Raises `UserError` for an output file that is not .html or in a folder that is not writable."""
    if out is None:
        return
    if out.suffix.lower() != ".html":
        raise UserError(f'"{out}" is not the name of a page', "give it the suffix .html; --json prints the numbers")
    if out.is_dir():
        raise UserError(f"{out} is a folder", "give the name of a file in it")
    folder = out.absolute().parent
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", "create it, or choose another place with --out")
    if not os.access(folder, os.W_OK):
        raise UserError(f"cannot write into {folder}", "choose another place with --out")


def show(
    name: str,
    title: str,
    out: Path | None,
    as_json: bool,
    *,
    data: Callable[[], Iterable[Data]],
    page: Callable[[], Data],
    terminal: Callable[[], None],
) -> None:
    """Writes the page ``pages/NAME.js`` to ``out`` and, with ``as_json``, prints JSON lines. Prints text if neither is
    given."""
    if out is not None:
        content = html(name, title, page())
        with disk_errors(out):
            write_file(out, content)
        if not as_json:
            render.fact("saved", f"{out}  ({len(content):,} bytes)")
    if as_json:
        render.json_line(*data())
    elif out is None:
        terminal()


def html(name: str, title: str, data: Data) -> bytes:
    """Returns the page of ``pages/NAME.js`` with inline style, scripts and ``data``."""
    pages = files("gpt_cli") / "pages"

    def read_page_file(file: str) -> str:
        return (pages / file).read_text(encoding="utf-8")

    # An escaped "<" keeps "</script" and "<!--" out of the script element.
    content = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    page = Template(read_page_file("page.html")).substitute(
        title=title.replace("&", "&amp;").replace("<", "&lt;"),
        style=read_page_file("page.css"),
        data=content,
        script="\n".join(map(read_page_file, (*COMMON, *["film.js"] * (name in FILM), f"{name}.js"))),
        connections="; connect-src 'self'" if name == "watch" else "",
    )
    return page.encode("utf-8", "backslashreplace")


def pack_array(array: "npt.NDArray[Any]") -> str:
    """Encodes an array for a page as little-endian base64."""
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(little_endian.tobytes()).decode()
