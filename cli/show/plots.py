"""Draws the data of pages as PNG, SVG or PDF, with matplotlib."""

import importlib.util
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpt.system.distribution import install_extra
from gpt.system.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gpt.insight.inspect import Inspection
    from gpt.tokenizers.tokenizer import Tokenizer

SUFFIXES = (".png", ".svg", ".pdf")
DPI, MAX_PIXELS = 150, 60_000  # Dots per inch, and maximum pixels per side; matplotlib's limit is 2**16.
PASTELS = ("#d6e4ff", "#f0d9f6", "#d7f0db", "#fde9c8", "#cdf0f0", "#ffd7e1")
LINE_LENGTH, FONT_SIZE = 96, 11  # Characters per line; font size in points.


def check() -> None:
    """Raises `UserError` if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("images need the package matplotlib", f"{install_extra('plots')}; or use -o FILE.html")


def _make_figure(width: float, height: float, title: str = "") -> "Figure":
    """Returns an empty figure of ``width`` × ``height`` inches. Ignores matplotlibrc, and draws $ literally."""
    os.environ["MPLBACKEND"] = "agg"  # matplotlib fails if the variable names an unknown backend.
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcdefaults()
    matplotlib.rcParams["text.parse_math"] = False
    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def as_bytes(figure: "Figure", suffix: str) -> bytes:
    """Returns a figure's file contents. Lowers the resolution of a figure that is too large for matplotlib."""
    file = io.BytesIO()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # Missing glyphs become boxes.
        figure.savefig(file, format=suffix[1:], dpi=min(DPI, MAX_PIXELS / max(figure.get_size_inches())))
    return file.getvalue()


def _draw_pattern(axes: "Axes", pattern: Any, **options: Any) -> None:
    """Draws an attention pattern (T, T), white to blue on a square-root scale."""
    from matplotlib.colors import PowerNorm

    axes.imshow(pattern, cmap="Blues", norm=PowerNorm(0.5, 0, 1), **options)


def attention(inspection: "Inspection", tokenizer: "Tokenizer", model: str) -> "Figure":
    """Draws attention patterns: layers down, heads across. Labels a single head with its tokens."""
    if len(inspection.layers) == len(inspection.heads) == 1:
        return _draw_head(inspection, tokenizer, model)
    from matplotlib.patches import Rectangle

    from gpt.insight.inspect import KINDS, find_dominant_kind

    head_count, layer_count = len(inspection.heads), len(inspection.layers)
    title = f"attention: {model}, {len(inspection.ids)} tokens"
    figure = _make_figure(max(5, head_count + 1), 1.2 * layer_count + 0.6, title)
    axes = figure.add_subplot(xlim=(0, head_count), ylim=(1.2 * layer_count, 0), aspect="equal", frame_on=False)
    labels = [
        f"layer {layer}" + ("" if window is None else f"\nwindow {window:,}")
        for layer, window in zip(inspection.layers, inspection.windows, strict=True)
    ]
    axes.set_xticks([])
    axes.set_yticks([1.2 * row + 0.5 for row in range(layer_count)], labels, fontsize=8)
    axes.tick_params(length=0)
    for row in range(layer_count):
        for column, head in enumerate(inspection.heads):
            left, top = column + 0.04, 1.2 * row + 0.04
            kind = find_dominant_kind(inspection.here, inspection.probe, row, column)
            _draw_pattern(axes, inspection.patterns[row, column], extent=(left, left + 0.92, top + 0.92, top))
            axes.add_patch(Rectangle((left, top), 0.92, 0.92, fill=False, edgecolor="lightgray", linewidth=0.6))
            axes.text(left, top + 0.95, f"{head} {kind if kind in KINDS else ''}", fontsize=7, verticalalignment="top")
    return figure


def _draw_head(inspection: "Inspection", tokenizer: "Tokenizer", model: str) -> "Figure":
    from gpt.insight.inspect import KINDS, find_dominant_kind, token_text

    kind = find_dominant_kind(inspection.here, inspection.probe, 0, 0)
    window = f", window {inspection.windows[0]:,}" if inspection.windows[0] else ""
    figure = _make_figure(7, 7.4, f"layer {inspection.layers[0]}{window}, head {inspection.heads[0]}: {model}")
    axes = figure.add_subplot(title=f"mostly {KINDS[kind]}" if kind else "no single kind of key")
    axes.title.set_fontsize(10)
    _draw_pattern(axes, inspection.patterns[0, 0])
    label_positions = range(0, len(inspection.ids), -(-len(inspection.ids) // 64))  # More labels would be illegible.
    labels = [token_text(tokenizer, int(inspection.ids[at]))[:14] for at in label_positions]
    size = max(4, min(9, 280 / len(label_positions)))
    axes.set_yticks(label_positions, labels, fontsize=size)
    axes.set_xticks(label_positions, labels, fontsize=size, rotation=90)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    return figure


def near(groups: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draws the cosines of the nearest tokens as bars."""
    rows = [len(group["near"]) + 3 for group in groups]
    figure = _make_figure(6.2, 0.2 * sum(rows))
    all_axes = figure.subplots(len(groups), height_ratios=rows, squeeze=False, subplot_kw={"frame_on": False})
    for axes, group in zip(all_axes.flat, groups, strict=True):
        axes.set_title(f"{group['title']}   {group['note'][:70]}", fontsize=10, loc="left")
        near, places = group["near"], range(len(group["near"]))
        bars = axes.barh(places, [max(0.0, neighbor["cosine"]) for neighbor in near])
        axes.bar_label(bars, [f"{neighbor['cosine']:.4f}" for neighbor in near], fontsize=8, padding=3)
        axes.set_yticks(places, [neighbor["text"].strip()[:24] for neighbor in near], fontsize=9)
        axes.set_xticks([])
        axes.set_xlim(0, 1.1)
        axes.invert_yaxis()
        axes.tick_params(length=0)
    return figure


def tokens(pieces: Sequence[str]) -> "Figure":
    """Draws a text's tokens on alternating background colours."""
    from matplotlib.patches import Rectangle

    places, column, line = [], 0, 0
    for piece in pieces:
        if column and column + len(piece) > LINE_LENGTH:
            column, line = 0, line + 1
        places.append((column, line))
        column += len(piece)
    width = max([LINE_LENGTH, *(column + len(piece) for (column, _), piece in zip(places, pieces, strict=True))])
    # A character is 0.602 em wide.
    figure = _make_figure(width * FONT_SIZE * 0.602 / 72 + 0.2, 0.26 * (line + 1) + 0.2)
    axes = figure.add_subplot(xlim=(0, width), ylim=(line + 1, 0))
    axes.set_axis_off()
    for index, ((x, y), piece) in enumerate(zip(places, pieces, strict=True)):
        colour = PASTELS[index % len(PASTELS)]
        axes.add_patch(Rectangle((x + 0.05, y), len(piece) - 0.1, 0.9, color=colour, linewidth=0))
        axes.text(x, y + 0.48, piece, family="monospace", fontsize=FONT_SIZE, verticalalignment="center")
    return figure
