"""Finds safe places to cut a document, so documents of any size can be tokenized in parts.

A tokenizer's pattern splits text into pieces, and BPE merges each piece separately. A cut between two pieces changes no
id unless a match looks beyond the cut, as ``\\s+(?!\\S)`` does. If the pattern is unknown, documents are encoded whole.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from gpt.system.errors import UserError

# GPT-2's pattern as in tiktoken's r50k_base. Its possessive quantifiers avoid backtracking without changing a match.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# SmolLM2's version of GPT-2's pattern: digits are single, and white space before a digit is a separate piece.
DIGITS_PATTERN = r"""'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s++(?=\p{N}|$)|\s+(?!\S)|\s"""

SEARCH_BLOCK = 2**18  # Characters per search for a boundary.
# Maximum characters without a boundary before a forced cut. Longer white space overflows the regex engine's stack
# (tiktoken 0.14: at a million), and merging longer words takes superlinear time.
MAX_PART = 2**19
MAX_UNCUT = 2**27  # Maximum characters of a document with an unknown pattern, to limit memory.
MAX_UNCUT_LIBRARY = 2**24  # Limit for the tokenizers library, which needs about 110 bytes per character.

# The regex engine's \s is Unicode's White_Space. Python's \s has four more control characters.
SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_INLINE_SPACES = SPACES.replace(r"\t-\r", r"\t\x0b\x0c")

# Letters, and below them punctuation and symbols other than the apostrophe. Their categories are the same in all
# Unicode versions, so the regex engine and Python agree.
_LETTERS = (
    r"A-Za-z\xc0-\xd6\xd8-\xf6\xf8-\u021f\u0391-\u03a1\u03a3-\u03ce\u0400-\u0481\u05d0-\u05ea\u0621-\u063a"
    r"\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_PUNCTUATION = r"!-&(-/:-@\[-`{-~\u2010-\u2027\u3001-\u3003\u3008-\u3011\uff01-\uff0f\uff1a-\uff20"

# Pairs of adjacent character classes with a boundary between them in every known pattern. In some patterns, a piece of
# punctuation includes the line breaks after it.
_BOUNDARIES = (
    (f"[{_LETTERS}]", f"[0-9{_PUNCTUATION}{SPACES}]"),
    ("[0-9]", f"[{_LETTERS}{_PUNCTUATION}{SPACES}]"),
    (f"[^{_LETTERS}0-9{SPACES}]", f"[{_INLINE_SPACES}]"),
)
# The `.*` matches everything, then backtracks to the last boundary.
_LAST_BOUNDARY = re.compile("(?s:.*)(?:" + "|".join(f"{a}(?={b})" for a, b in _BOUNDARIES) + ")")

_CONTRACTION, _CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\p{Lm}\p{Lo}\p{M}"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS, _SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+|\s+(?!\S)|\s+"
OLD_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACE}"  # Qwen uses single digits.
CL100K_PATTERN = rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|\s+$|\s*[\r\n]|\s+(?!\S)|\s"
MINBPE_PATTERN = rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|\s*[\r\n]|\s+(?!\S)|\s+"
# Patterns without possessive quantifiers. \p{N}{1,3} stands for digit groups of any length.
_FAMILIES = {
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$|\s+(?!\S)|\s",
    OLD_GPT2_PATTERN,
    r"'(?:[sdmt]|ll|ve|re)|\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N}|$)|\s+(?!\S)|\s",
    CL100K_PATTERN,
    MINBPE_PATTERN,
    LLAMA3_PATTERN,
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}]*[\p{{Ll}}{_CASED}]+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}]+[\p{{Ll}}{_CASED}]*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}",
}


def remove_possessive(pattern: str) -> str:
    """Returns a known pattern without possessive quantifiers, which do not change its matches."""
    return re.sub(r"(?<=[+*?])\+|(?<=\d})\+", "", pattern)


def is_known(pattern: str) -> bool:
    """Whether a pattern is known and means the same in tiktoken and the tokenizers library."""
    # The library interprets {1,3}+ as ({1,3})+. Its $ matches at every line end, which is harmless only after \s++.
    is_portable = not re.search(r"\d\}\+|\$", pattern.replace(r"\s++$", ""))
    return is_portable and has_rules(pattern)


@lru_cache
def has_rules(pattern: str) -> bool:
    """Whether a pattern is known, in the form of tiktoken or of the tokenizers library."""
    return re.sub(r"\|\\p\{N\}(\{1,\d\})?\|", r"|\\p{N}{1,3}|", remove_possessive(pattern)) in _FAMILIES


def _last_boundary(text: str) -> int:
    """Returns the last position where a cut changes no id, whatever text follows. Returns 0 if there is none."""
    match = _LAST_BOUNDARY.match(text)
    return match.end() if match else 0


def parts(chunks: Iterable[str], pattern: str, size: int = SEARCH_BLOCK) -> Iterator[tuple[str, bool]]:
    """Cuts a document into nonempty parts of about ``size`` characters or more. Yields each part, and whether it ends
    inside a piece. Only a cut inside a piece, after `MAX_PART` characters without a boundary, can change ids.

    If the pattern is unknown, there is a single part. Raises `UserError` if this part exceeds `MAX_UNCUT` characters,
    or `MAX_UNCUT_LIBRARY` if ``pattern`` is empty.
    """
    can_cut, max_length = has_rules(pattern), MAX_UNCUT if pattern else MAX_UNCUT_LIBRARY
    pending: list[str] = []
    length, target_length = 0, size
    for block in (
        chunk[start : start + SEARCH_BLOCK] for chunk in chunks for start in range(0, len(chunk), SEARCH_BLOCK)
    ):
        pending.append(block)
        length += len(block)
        if can_cut and length >= target_length:
            text = "".join(pending)
            end = _last_boundary(text)
            is_forced = not end and length >= MAX_PART
            end = MAX_PART if is_forced else end
            if end:
                yield text[:end], is_forced
            pending, length = [text[end:]], length - end
            target_length = max(size, min(2 * length, MAX_PART))
        elif not can_cut and length > max_length:
            raise UserError(
                f"a document has {length:,} characters that the tokenizer's pattern leaves no place to split",
                "split it into documents with --split-on, or use another --tokenizer",
            )
    if length:
        yield "".join(pending), False


def cut_text(text: str, pattern: str) -> list[str]:
    """Cuts a text into parts short enough for the regex engine. Most texts stay whole."""
    if len(text) <= MAX_PART + SEARCH_BLOCK or not has_rules(pattern):
        return [text]
    return [part for part, _ in parts([text], pattern)]
