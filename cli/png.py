"""PNG pictures, drawn with pillow, of the same numbers as the pages."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpt.errors import UserError

from .ticks import axis

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image, ImageDraw

    from gpt.inspect import Floats, Look, Positions
    from gpt.text.tokenizer import Tokenizer

BACK, TEXT, SOFT, LINE = (255, 255, 255), (22, 25, 29), (84, 91, 102), (207, 212, 219)
HIGH, BLUE, RED = (10, 48, 105), (40, 90, 200), (210, 60, 30)
PASTELS = ((214, 228, 255), (240, 217, 246), (215, 240, 219), (253, 233, 200), (205, 240, 240), (255, 215, 225))


def check() -> None:
    """Raises `UserError` where pillow is not installed."""
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError:
        raise UserError("a PNG is drawn with the package pillow", "pip install 'gpt[png]'; or -o FILE.html") from None


def _canvas(width: int, height: int) -> "tuple[Image.Image, ImageDraw.ImageDraw]":
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, height), BACK)
    return image, ImageDraw.Draw(image)


def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _bytes(image: "Image.Image") -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def _coloured(strength: "np.ndarray[Any, Any]", end: tuple[int, int, int]) -> "np.ndarray[Any, Any]":
    """Maps ``strength`` (…) from 0 to 1 to colours (…, 3) from white to ``end``, on a square-root scale."""
    import numpy as np

    x = np.sqrt(np.clip(strength, 0, 1))[..., None]
    mixed: np.ndarray[Any, Any] = np.rint(np.array(BACK) + (np.array(end) - np.array(BACK)) * x).astype(np.uint8)
    return mixed


def _map(pattern: "Floats", size: int) -> "Image.Image":
    """Draws a pattern (T, T) as a square of at least ``size`` pixels, all cells of one size."""
    from PIL import Image

    image = Image.fromarray(_coloured(pattern, HIGH))
    cell = max(1, -(-size // len(pattern)))
    return image.resize((cell * len(pattern), cell * len(pattern)), Image.Resampling.NEAREST)


def attention(look: "Look", tokenizer: "Tokenizer", model: str) -> bytes:
    """Draws attention patterns, layers down and heads across; a single head with its tokens' texts."""
    if len(look.layers) == len(look.heads) == 1:
        return _one_head(look, tokenizer, model)
    from gpt.inspect import KINDS, mostly

    first = _map(look.patterns[0, 0], 96)
    side, gap, left, top = first.width, 22, 70, 56
    width = max(480, left + len(look.heads) * (side + 8) + 8)
    image, draw = _canvas(width, top + len(look.layers) * (side + gap) + 8)
    draw.text((10, 8), f"attention: {model}, {len(look.ids)} tokens", TEXT, _font(15))
    draw.text((10, 30), "layers down, heads across; in each, queries down and keys across", SOFT, _font(12))
    for at, layer in enumerate(look.layers):
        y = top + at * (side + gap)
        draw.text((10, y + side // 2 - 8), f"layer {layer}", SOFT, _font(12))
        if (window := look.windows[at]) is not None:
            draw.text((10, y + side // 2 + 8), f"window {window:,}", SOFT, _font(10))
        for column, head in enumerate(look.heads):
            x = left + column * (side + 8)
            image.paste(_map(look.patterns[at, column], 96), (x, y))
            draw.rectangle((x - 1, y - 1, x + side, y + side), outline=LINE)
            kind = mostly(look.here, look.probe, at, column)
            draw.text((x, y + side + 2), f"{head} {kind if kind in KINDS else ''}", SOFT, _font(11))
    return _bytes(image)


def _one_head(look: "Look", tokenizer: "Tokenizer", model: str) -> bytes:
    from gpt.inspect import KINDS, mostly, token_text

    picture = _map(look.patterns[0, 0], 640)
    cell, left, top = picture.width // len(look.ids), 120, 150
    image, draw = _canvas(left + picture.width + 12, top + picture.height + 12)
    kind = mostly(look.here, look.probe, 0, 0)
    window = f", window {look.windows[0]:,}" if look.windows[0] else ""
    draw.text((10, 8), f"layer {look.layers[0]}{window}, head {look.heads[0]}: {model}", TEXT, _font(15))
    draw.text((10, 30), f"mostly {KINDS[kind]}" if kind else "no one kind of key", SOFT, _font(12))
    image.paste(picture, (left, top))
    draw.rectangle((left - 1, top - 1, left + picture.width, top + picture.height), outline=LINE)
    size = max(7, min(13, cell - 1))
    every = -(-size // cell)  # not every token has room for its name
    for at in range(0, len(look.ids), every):
        text = token_text(tokenizer, int(look.ids[at]))[:14]
        draw.text((left - 6, top + at * cell + cell // 2), text, TEXT, _font(size), anchor="rm")
        label, pen = _canvas(100, size + 4)
        pen.text((0, 0), text, TEXT, _font(size))
        image.paste(label.rotate(90, expand=True), (left + at * cell + max(0, (cell - size) // 2), top - 104))
    return _bytes(image)


def near(groups: Sequence[Mapping[str, Any]]) -> bytes:
    """Draws the nearest neighbours of each token as bars of their cosines."""
    height = sum(48 + 22 * len(group["near"]) for group in groups) + 16
    image, draw = _canvas(620, height)
    y = 12
    for group in groups:
        draw.text((12, y), group["title"], TEXT, _font(15))
        draw.text((12, y + 20), group["note"][:95], SOFT, _font(11))
        y += 42
        for each in group["near"]:
            draw.text((190, y), each["text"].strip()[:24], TEXT, _font(13), anchor="ra")
            draw.rectangle((200, y + 2, 200 + max(1, round(320 * max(0.0, each["cosine"]))), y + 14), BLUE)
            draw.text((530, y), f"{each['cosine']:.4f}", SOFT, _font(12))
            y += 22
        y += 6
    return _bytes(image)


def positions(found: "Positions", model: str) -> bytes:
    """Draws the position table, negative blue and positive red, and similarity by distance as a curve."""
    import numpy as np
    from PIL import Image

    top, table = 56, found.table
    shape = (0, 600) if table is None else (min(900, max(240, len(table))), min(1600, max(600, table.shape[1])))
    image, draw = _canvas(shape[1] + 24, top + shape[0] + 240)
    draw.text((12, 8), f"positions: {model}, {found.kind}", TEXT, _font(15))
    if table is not None:
        draw.text((12, 30), f"{len(table):,} places down, {table.shape[1]:,} numbers across", SOFT, _font(12))
        strength = np.abs(table) / max(float(np.abs(table).max()), 1e-30)
        colours = np.where((table < 0)[..., None], _coloured(strength, BLUE), _coloured(strength, RED))
        picture = Image.fromarray(colours).resize((shape[1], shape[0]), Image.Resampling.NEAREST)
        image.paste(picture, (12, top))
    y0 = top + shape[0] + 40
    draw.text((12, y0 - 26), "similarity of two places by the tokens between them", SOFT, _font(12))
    _curve(draw, found.similarity.tolist(), (60, y0, shape[1] - 10, y0 + 160), "tokens apart")
    return _bytes(image)


def _curve(draw: "ImageDraw.ImageDraw", values: Sequence[float], box: tuple[int, int, int, int], x_name: str) -> None:
    """Draws values by index, 0 on the left, in ``box`` (left, top, right, bottom), with round ticks."""
    left, top, right, bottom = box
    across, up = axis(0, max(1, len(values) - 1), 8, extend=False), axis(min(0.0, *values), max(1.0, *values), 6)

    def x(place: float) -> float:
        return left + (right - left) * across.share(place)

    def y(value: float) -> float:
        return bottom - (bottom - top) * up.share(value)

    for tick, label in zip(up.ticks, up.labels, strict=True):
        draw.line((left, y(tick), right, y(tick)), LINE)
        draw.text((left - 8, y(tick)), label, SOFT, _font(11), anchor="rm")
    for tick, label in zip(across.ticks, across.labels, strict=True):
        draw.line((x(tick), bottom, x(tick), bottom + 4), LINE)
        draw.text((x(tick), bottom + 7), label, SOFT, _font(11), anchor="ma")
    draw.text(((left + right) / 2, bottom + 22), x_name, SOFT, _font(11), anchor="ma")
    if len(values) > 1:
        draw.line([(x(place), y(value)) for place, value in enumerate(values)], BLUE, 2)


def tokens(pieces: Sequence[str]) -> bytes:
    """Draws a text's tokens, each on a background colour of its own."""
    font, boxes, x, y = _font(15), [], 12, 12
    for at, piece in enumerate(pieces):
        width = max(6, round(font.getlength(piece)))
        if x + width > 880 and x > 12:
            x, y = 12, y + 28
        boxes.append((x, y, width, piece, PASTELS[at % len(PASTELS)]))
        x += width + 1
    image, draw = _canvas(max(900, *(x + width + 12 for x, _, width, _, _ in boxes)), y + 40)
    for x, y, width, piece, colour in boxes:
        draw.rectangle((x, y, x + width - 1, y + 23), colour)
        draw.text((x, y + 2), piece, TEXT, font)
    return _bytes(image)
