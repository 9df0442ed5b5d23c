"""Contrast of colours on a page."""

import re


def luminance(colour: str) -> float:
    """Returns the relative luminance of a CSS colour, as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    r, g, b = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(first_colour: str, second_colour: str) -> float:
    low, high = sorted(map(luminance, (first_colour, second_colour)))
    return (high + 0.05) / (low + 0.05)
