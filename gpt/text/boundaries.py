"""Where a text may be cut before it is tokenized: a document of any size in parts, a piece of any length in bounds.

A pattern cuts a text into pieces, and each piece is merged by itself. A cut between two pieces changes no id where
neither side looks across it: as ``\\s+(?!\\S)``, say, looks past the white space that it takes.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

from gpt.errors import UserError

# GPT-2's pattern, in the spelling of tiktoken's r50k_base: possessive where that changes no match but keeps the
# regex engine from backtracking.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# A run of white space this long overflows the regex engine's stack if something follows it (tiktoken 0.14: at a
# million). The patterns give its last character to what follows, so a cut before that one changes no id.
LONG_SPACE = 10_000
LONG_PIECE = 2**20  # characters; a single piece longer than this is cut: merging takes more than linear time
LONG_SPACE_PIECE = 2**19  # as much for white space, which o200k's pattern puts on that stack even at a text's end
PART = 2**18  # characters of a document to tokenize at a time

# What \s means to the regex engine: Unicode's White_Space (Python's own \s has four control characters more).
SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_BLANK = re.compile(f"[{SPACES}]")
_INLINE_SPACES = SPACES.replace(r"\t-\r", r"\t\x0b\x0c")

# Characters that are letters, and ones that are neither letter, number, mark, space nor apostrophe, in every version of
# Unicode, so that the engine, Python and we agree on them.
_LETTERS = (
    r"A-Za-z\xc0-\xd6\xd8-\xf6\xf8-\u021f\u0391-\u03a1\u03a3-\u03ce\u0400-\u0481\u05d0-\u05ea\u0621-\u063a"
    r"\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_OTHERS = r"!-&(-/:-@\[-`{-~\u2010-\u2027\u3001-\u3003\u3008-\u3011\uff01-\uff0f\uff1a-\uff20"

# Where two characters alone make a boundary: (the one before it, the one after it).
_WORD_ENDS = [
    (f"[{_LETTERS}]", f"[0-9{_OTHERS}{SPACES}]"),
    ("[0-9]", f"[{_LETTERS}{_OTHERS}{SPACES}]"),
]
_GPT2_RULES = [*_WORD_ENDS, (f"[^{_LETTERS}0-9{SPACES}]", f"[{SPACES}]")]
# Here punctuation takes the line ends after it (o200k: slashes too), and white space ends with its last line end.
_CL100K_RULES = [
    *_WORD_ENDS, (f"[^{_LETTERS}0-9{SPACES}]", f"[{_INLINE_SPACES}]"), (r"[\r\n]", f"[^{SPACES}]"),
]  # fmt: skip
_O200K_RULES = [*_CL100K_RULES[:-1], (r"[\r\n]", f"[^{SPACES}/]")]

_CONTRACTION, _CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\p{Lm}\p{Lo}\p{M}"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS, _SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_FAMILIES = {  # patterns without what makes them possessive
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$|\s+(?!\S)|\s": _GPT2_RULES,
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _GPT2_RULES,
    rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|\s+$|\s*[\r\n]|\s+(?!\S)|\s": _CL100K_RULES,
    rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACE}": _CL100K_RULES,  # Llama 3's
    rf"{_CONTRACTION}|{_WORDS}|\p{{N}}|{_MARKS}|{_SPACE}": _CL100K_RULES,  # Qwen's
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}]*[\p{{Ll}}{_CASED}]+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}]+[\p{{Ll}}{_CASED}]*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}": _O200K_RULES,
}

# How far the end of a text may reach back into the pieces that a pattern of unknown form finds.
_UNSETTLED_CHARACTERS, _UNSETTLED_PIECES, _TRIES = 256, 4, 32


def last_boundary(text: str, pattern: str) -> int:
    """The largest position found at which ``text``, which begins with a piece, may be cut: whatever follows it, the ids
    of both parts one after the other are those of the whole. 0 where there is none.

    For patterns of unknown form this holds if they look ahead less than some hundred characters. Raises `UserError`
    for one that cannot be understood.
    """
    return _last_sure(text, pattern, 0, len(text)) or _last_tried(text, pattern)


@lru_cache
def _sure(pattern: str) -> re.Pattern[str] | None:
    """Finds the last boundary that two characters alone make sure: ``.*`` takes all, and gives back what it must."""
    rules = _FAMILIES.get(re.sub(r"(?<=[+*?])\+|(?<=\d})\+", "", pattern))
    return re.compile("(?s:.*)(?:" + "|".join(f"{a}(?={b})" for a, b in rules) + ")") if rules else None


def _last_sure(text: str, pattern: str, start: int, end: int) -> int:
    """The last sure boundary between ``start`` and ``end``, both excluded; 0 where there is none."""
    sure = _sure(pattern)
    found = sure.match(text, start, end) if sure else None
    return found.end() if found else 0


@lru_cache
def _compiled(pattern: str) -> Any:
    import regex  # here, since only patterns of unknown form and odd texts need it

    try:
        return regex.compile(pattern)
    except (regex.error, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"the tokenizer's pattern {pattern[:60]!r} cannot be understood: {error}") from None


def _ends(text: str, pattern: str, start: int = 0, end: int | None = None) -> list[int]:
    return [found.end() for found in _compiled(pattern).finditer(text, start, len(text) if end is None else end)]


def _last_tried(text: str, pattern: str) -> int:
    """The last end of a piece that stays one when the text is cut there, as far as trying can tell."""
    ends = [0, *_ends(text, pattern)]
    settled = bisect_right(ends, len(text) - _UNSETTLED_CHARACTERS, 0, max(1, len(ends) - _UNSETTLED_PIECES))
    for k in range(settled - 1, max(0, settled - 1 - _TRIES), -1):
        cut, before = ends[k], max(0, k - 8)
        if (
            _is_old(text[max(0, cut - 16) : cut + 16])
            and not _within_spaces_after_a_long_piece(text, cut, ends[before : k + 1])
            and _ends(text, pattern, ends[before], cut) == ends[before + 1 : k + 1]
            and [cut + end for end in _ends(text[cut:], pattern)] == ends[k + 1 :]
        ):
            return cut
    return 0


def _within_spaces_after_a_long_piece(text: str, cut: int, ends: list[int]) -> bool:
    """Whether ``cut`` divides white space, and a piece before it will be cut for its length: what is left of its line
    ends would be one piece with the white space, if the text ended at ``cut``."""
    divides = bool(_BLANK.match(text, cut - 1) and _BLANK.match(text, cut))
    return divides and any(end - start > LONG_SPACE_PIECE for start, end in pairwise(ends))


def _is_old(text: str) -> bool:
    """Whether Unicode has long had these characters, so that engines agree what they are."""
    old, new = unicodedata.ucd_3_2_0.category, unicodedata.category
    return all(old(character) == new(character) for character in text)


def cuts(text: str, pattern: str) -> tuple[list[int], int]:
    """Where ``text`` is to be cut so that tiktoken takes about linear time and no regex engine's stack overflows, in
    order, and how many of these cuts are inside a piece, for its length: these alone change ids."""
    if len(text) <= LONG_SPACE:
        return [], 0
    inside, before = _piece_cuts(text, pattern)
    return sorted({*inside, *before, *_space_cuts(text, pattern)}), len(inside)


def _space_cuts(text: str, pattern: str) -> Iterator[int]:
    """Cuts between the pieces of each long run of white space that something follows, where they change no id."""
    step = LONG_SPACE // 8
    known = 0  # a boundary
    for samples in re.finditer(f"[{SPACES}]{{7,}}", text[::step]):  # a long run is seen 8 times, or 7
        start, end = max(0, samples.start() - 1) * step, (samples.end() + 1) * step
        for run in re.finditer(f"(?<![{SPACES}])[{SPACES}]{{{LONG_SPACE},}}", text[start:end]):
            first, after = start + run.start(), start + run.end()
            if after == len(text):
                return
            known = max(known, _last_sure(text, pattern, known, first + 1))
            known, *ends = _ends_around(text, pattern, known, first, after)
            within = [end for end in ends if first < end < after]
            if ends and len(within) < 8 and _stand_alone(text, pattern, [known, *within, ends[-1]], ends):
                yield from within
            known = max([known, *within])


def _ends_around(text: str, pattern: str, start: int, first: int, after: int) -> list[int]:
    """The end of the last piece up to ``first``, and those from there through the one that goes beyond ``after``."""
    ends = [start]
    for found in _compiled(pattern).finditer(text, start, after + LONG_SPACE):
        if found.end() <= first:
            ends.clear()
        ends.append(found.end())
        if found.end() > after:
            break
    return ends


def _stand_alone(text: str, pattern: str, parts: list[int], ends: list[int]) -> bool:
    """Whether the parts of a text, each by itself, have the pieces that they have in the whole."""
    alone = [a + end for a, b in pairwise(parts) for end in _ends(text[a:b], pattern)]
    return alone == ends


def _piece_cuts(text: str, pattern: str) -> tuple[list[int], list[int]]:
    """Cuts inside pieces that are too long, from left to right: each leaves a text that begins anew. And cuts before
    such pieces of white space, which would be one with the line ends before them if a text ended in them."""
    inside: list[int] = []
    before: list[int] = []
    at = 0
    while len(text) - at > LONG_SPACE_PIECE:
        sure = _last_sure(text, pattern, at, at + LONG_SPACE_PIECE + 1)
        if sure:
            at = sure
            continue
        start, at = _next_far(text, pattern, at)
        if start is not None:
            inside.append(at)
            if _BLANK.match(text, start) and text[start - 1 : start] in ("\r", "\n"):
                before.append(start)
    return inside, before


def _next_far(text: str, pattern: str, at: int) -> tuple[int | None, int]:
    """Of the pieces that begin near ``at``: the start of the first one that is too long and the cut inside it; else
    None and the end of the last one."""
    far = at + LONG_SPACE_PIECE
    for piece in _compiled(pattern).finditer(text, at, far + 2 * LONG_PIECE):
        start, end = piece.span()
        if end - start > _limit(text, start, end):
            # What decides this is as much text as `parts` is sure to have, so that both decide it alike.
            seen = _compiled(pattern).match(text, start, start + 2 * LONG_PIECE)
            end = seen.end() if seen else start
            limit = _limit(text, start, end)
            return (start, start + limit) if end - start > limit else (None, max(end, at + 1))
        if end >= far:
            return None, end
    return None, max(far, at + 1)  # the pattern passes over what is left


def _limit(text: str, start: int, end: int) -> int:
    return LONG_SPACE_PIECE if _BLANK.match(text, start) and _BLANK.match(text, max(start, end - 1)) else LONG_PIECE


def parts(chunks: Iterable[str], pattern: str, size: int = PART) -> Iterator[tuple[str, bool]]:
    """The chunks of one document, cut anew: parts of about ``size`` characters, or of as many as it takes, whose ids
    one after the other are the whole document's. With each, whether it ends inside a piece, which was too long.

    No part is empty.
    """
    held: list[str] = []
    length, wanted = 0, size
    for chunk in chunks:
        held.append(chunk)
        length += len(chunk)
        if length >= wanted:
            text = "".join(held)
            boundary = last_boundary(text, pattern)
            places = [(boundary, False)] if boundary else _forced(text, pattern)
            for (start, _), (end, inside) in pairwise([(0, False), *places]):
                yield text[start:end], inside
            held = [text[places[-1][0] :] if places else text]
            length = len(held[0])
            wanted = max(size, 2 * length)
    if length:
        yield "".join(held), False


def _forced(text: str, pattern: str) -> list[tuple[int, bool]]:
    """Cuts on account of pieces that are too long, whatever follows, and whether they are inside these."""
    settled = len(text) - 2 * LONG_PIECE
    if settled <= 0:
        return []
    inside, before = _piece_cuts(text, pattern)
    return sorted((cut, cut in inside) for cut in {*inside, *before} if cut < settled)
