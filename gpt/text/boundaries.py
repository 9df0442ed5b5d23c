"""Cuts of a text before it is tokenized: a document of any size in parts, a piece of any length in bounds.

A tokenizer's pattern cuts a text into pieces, and each piece is merged by itself. A cut between two pieces changes no
id where neither side looks across it: as ``\\s+(?!\\S)``, say, looks past the white space that it takes. A document
under a pattern of unknown form is encoded whole.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

from gpt.errors import UserError

# GPT-2's pattern, in the spelling of tiktoken's r50k_base: possessive where that changes no match but keeps the
# regex engine from backtracking.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# The same after each digit is cut off by itself, as in SmolLM2's vocabulary: white space before a digit ends a part.
DIGITS_PATTERN = r"""'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s++(?=\p{N}|$)|\s+(?!\S)|\s"""

# A run of white space this long overflows the regex engine's stack if something follows it (tiktoken 0.14: at a
# million). The patterns give its last character to the text after it, so a cut before that changes no id.
LONG_SPACE = 10_000
LONG_PIECE = 2**20  # characters; a single piece longer than this is cut: merging takes more than linear time
MOST_UNCUT = 2**27  # characters held of a document in which no place to cut is found: a bomb must not fill the memory
MOST_WHOLE = 2**24  # as much for the tokenizers library, which takes some 110 bytes a character
LONG_SPACE_PIECE = 2**19  # as much for white space, which o200k's pattern puts on that stack even at a text's end

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
OLD_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACE}"  # Qwen's too, with single digits
CL100K_PATTERN = rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|\s+$|\s*[\r\n]|\s+(?!\S)|\s"
MINBPE_PATTERN = rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|\s*[\r\n]|\s+(?!\S)|\s+"
_FAMILIES = {  # patterns, without the + of possessive quantifiers; digits may come in groups of any length
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$|\s+(?!\S)|\s": _GPT2_RULES,
    OLD_GPT2_PATTERN: _GPT2_RULES,
    r"'(?:[sdmt]|ll|ve|re)|\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N}|$)|\s+(?!\S)|\s": _GPT2_RULES,
    CL100K_PATTERN: _CL100K_RULES,
    MINBPE_PATTERN: _CL100K_RULES,
    LLAMA3_PATTERN: _CL100K_RULES,
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}]*[\p{{Ll}}{_CASED}]+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}]+[\p{{Ll}}{_CASED}]*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}": _O200K_RULES,
}


def backtracking(pattern: str) -> str:
    """Returns a pattern of known form without possessive quantifiers, which change no match there."""
    return re.sub(r"(?<=[+*?])\+|(?<=\d})\+", "", pattern)


@lru_cache
def _rules(pattern: str) -> list[tuple[str, str]] | None:
    """Returns the boundary rules of a pattern; None for one of unknown form."""
    return _FAMILIES.get(re.sub(r"\|\\p\{N\}(\{1,\d\})?\|", r"|\\p{N}{1,3}|", backtracking(pattern)))


@lru_cache
def _last_rule(pattern: str) -> re.Pattern[str] | None:
    """Returns a pattern that finds the last boundary between two characters: ``.*`` takes all and backtracks to it."""
    rules = _rules(pattern)
    return re.compile("(?s:.*)(?:" + "|".join(f"{a}(?={b})" for a, b in rules) + ")") if rules else None


@lru_cache
def _compiled(pattern: str) -> Any:
    import regex  # here, since only odd texts need it

    return regex.compile(pattern)


def is_known(pattern: str) -> bool:
    """Whether a pattern is of known form: its pieces join to the whole text, and it means the same to tiktoken's regex
    engine and to the tokenizers library's (tests/test_tokenizer_files.py compares them)."""
    # The library's engine reads {1,3}+ as ({1,3})+, and $ as the end of a line, to which only a + lets it go back.
    alike = not re.search(r"\d\}\+|\$", pattern.replace(r"\s++$", ""))
    return alike and _rules(pattern) is not None


def matches_nothing(pattern: str) -> bool:
    """Whether a pattern matches an empty part of some text, as far as a few characters show."""
    try:
        return any(match.end() == match.start() for match in _compiled(pattern).finditer("aA 1.\n\té漢'"))
    except Exception:  # a pattern that another engine understands
        return False


def last_boundary(text: str, pattern: str, start: int = 0, end: int | None = None) -> int:
    """Returns the largest position found, between ``start`` and ``end`` and neither of these, at which ``text`` may be
    cut; 0 where there is none. Whatever follows the cut, the ids of both sides are those of the whole."""
    rule = _last_rule(pattern)
    found = rule.match(text, start, len(text) if end is None else end) if rule else None
    return found.end() if found else 0


def cuts(text: str, pattern: str) -> tuple[list[int], int]:
    """Returns where ``text`` is to be cut so that tiktoken takes about linear time and no regex engine's stack
    overflows, in order, and how many of these cuts lie inside a piece that is too long: these alone change ids."""
    if len(text) <= LONG_SPACE or not _rules(pattern):
        return [], 0
    inside, before = _piece_cuts(text, pattern)
    return sorted({*inside, *before, *_space_cuts(text, pattern)}), len(inside)


def _space_cuts(text: str, pattern: str) -> Iterator[int]:
    """Cuts between the pieces of each long run of white space that something follows.

    The last character of a run belongs to the piece after it. In some patterns a piece of white space ends with its
    last line end, and the rest of the run is another piece. In SmolLM2's a run before a digit is a piece: it is cut
    at its end, and not at all before what may be a digit to the regex engine.
    """
    digits = pattern == DIGITS_PATTERN
    by_line = _rules(pattern) is not _GPT2_RULES
    for start, end in _long_runs(text):
        line = max(text.rfind("\r", start, end), text.rfind("\n", start, end)) + 1 if by_line else 0
        if digits and not re.match(f"[{_LETTERS}{_OTHERS}]", text[end]):
            yield from [end] if text[end] in "0123456789" else []
        elif line < end:
            yield from {line, end - 1} if line > start else {end - 1}


def _long_runs(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each run of at least `LONG_SPACE` white-space characters that does not end the text."""
    step = LONG_SPACE // 8
    for samples in re.finditer(f"[{SPACES}]{{7,}}", text[::step]):  # a long run is seen 8 times, or 7
        start, end = max(0, samples.start() - 1) * step, (samples.end() + 1) * step
        for run in re.finditer(f"(?<![{SPACES}])[{SPACES}]{{{LONG_SPACE},}}", text[start:end]):
            if start + run.end() < len(text):
                yield start + run.start(), start + run.end()


def _piece_cuts(text: str, pattern: str) -> tuple[list[int], list[int]]:
    """Cuts inside pieces that are too long, from left to right; after each the text is cut into pieces again. And cuts
    before such pieces of white space, which would join the line ends before them if a text ended in them."""
    inside: list[int] = []
    before: list[int] = []
    at = 0
    while len(text) - at > LONG_SPACE_PIECE:
        boundary = last_boundary(text, pattern, at, at + LONG_SPACE_PIECE + 1)
        if boundary:
            at = boundary
            continue
        start, at = _next_far(text, pattern, at)
        if start is not None:
            inside.append(at)
            if _BLANK.match(text, start) and text[start - 1 : start] in ("\r", "\n"):
                before.append(start)
    return inside, before


def _next_far(text: str, pattern: str, at: int) -> tuple[int | None, int]:
    """Finds, near ``at``, the start of the first piece that is too long and the cut inside it; else
    None and the end of the last one."""
    far = at + LONG_SPACE_PIECE
    for piece in _compiled(pattern).finditer(text, at, far + 2 * LONG_PIECE):
        start, end = piece.span()
        if end - start > _limit(text, start, end):
            # Decided by no more text than `parts` is sure to have, so that both decide it alike.
            seen = _compiled(pattern).match(text, start, start + 2 * LONG_PIECE)
            end = seen.end() if seen else start
            limit = _limit(text, start, end)
            return (start, start + limit) if end - start > limit else (None, max(end, at + 1))
        if end >= far:
            return None, end
    return None, max(far, at + 1)


def _limit(text: str, start: int, end: int) -> int:
    return LONG_SPACE_PIECE if _BLANK.match(text, start) and _BLANK.match(text, max(start, end - 1)) else LONG_PIECE


def parts(chunks: Iterable[str], pattern: str, size: int) -> Iterator[tuple[str, bool]]:
    """Cuts the chunks of one document into parts of about ``size`` characters, or of as many as it takes, whose
    ids one after the other are the whole document's. With each, whether it ends inside a piece that was too long.

    No part is empty. Under a pattern of unknown form there is one part. Raises `UserError` for more than `MOST_UNCUT`
    characters between two places to cut, or for a longer document than `MOST_WHOLE` where there is no pattern.
    """
    held: list[str] = []
    length, wanted = 0, size
    for chunk in chunks:
        held.append(chunk)
        length += len(chunk)
        if length >= wanted and _rules(pattern):
            text = "".join(held)
            boundary = last_boundary(text, pattern)
            places = [(boundary, False)] if boundary else _forced(text, pattern)
            for (start, _), (end, inside) in pairwise([(0, False), *places]):
                yield text[start:end], inside
            held = [text[places[-1][0] :] if places else text]
            length = len(held[0])
            wanted = max(size, 2 * length)
        if length > (MOST_UNCUT if pattern else MOST_WHOLE):
            raise UserError(
                f"a document has {length:,} characters without a place to cut it under the tokenizer's pattern",
                "--split-on cuts it into documents; or take another --tokenizer",
            )
    if length:
        yield "".join(held), False


def _forced(text: str, pattern: str) -> list[tuple[int, bool]]:
    """Cuts in and before pieces that are too long, whatever text follows, and whether each is inside a piece."""
    settled = len(text) - 2 * LONG_PIECE
    if settled <= 0:
        return []
    inside, before = _piece_cuts(text, pattern)
    return sorted((cut, cut in inside) for cut in {*inside, *before} if cut < settled)
