"""Writes results to self-contained HTML pages, pictures or JSON files."""

import base64
import json
import os
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from gpt.system.errors import UserError
from gpt.system.files import disk_errors, write_file

from . import plots, render

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.figure import Figure

Data = Mapping[str, Any]
SUFFIXES = (".html", *plots.SUFFIXES, ".json")


def check_out(out: Path | None, *suffixes: str) -> None:
    """Raises `UserError` for an output file with an unknown suffix or in a folder that is not writable."""
    if out is None:
        return
    allowed = suffixes or SUFFIXES
    if out.suffix.lower() not in allowed:
        raise UserError(f'the suffix of "{out}" does not name a format', f"use one of {', '.join(allowed)}")
    if out.suffix.lower() in plots.SUFFIXES:
        plots.check()
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
    data: Callable[[], Data],
    terminal: Callable[[], None],
    page: Callable[[], Data],
    picture: "Callable[[], Figure]",
) -> None:
    """Writes the page ``pages/NAME.js``, a picture or JSON to ``out``, depending on its suffix. With ``as_json``, also
    prints JSON. Prints text if neither is given."""
    if out is not None:
        suffix = out.suffix.lower()
        if suffix in plots.SUFFIXES:
            content = plots.as_bytes(picture(), suffix)
        elif suffix == ".html":
            content = html(name, title, page())
        else:
            content = (json.dumps(data(), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        write(out, content, as_json)
    if as_json:
        render.json_line(data())
    elif out is None:
        terminal()


def write(out: Path, content: bytes, quiet: bool) -> None:
    """Writes a file atomically, and prints its path unless ``quiet``."""
    with disk_errors(out):
        write_file(out, content)
    if not quiet:
        render.fact("saved", f"{out}  ({len(content):,} bytes)")


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
        script="\n".join(map(read_page_file, ("page.js", "chart.js", f"{name}.js"))),
    )
    return page.encode("utf-8", "backslashreplace")


def pack_array(array: "npt.NDArray[Any]") -> str:
    """Encodes an array for a page as little-endian base64."""
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(little_endian.tobytes()).decode()
