"""Where a document may be cut, so that one of any size is tokenized in parts.

A tokenizer's pattern cuts a text into pieces, and each piece is merged by itself. A cut between two pieces changes no
id where neither side looks across it: as ``\\s+(?!\\S)``, say, looks past the white space that it takes. A document
under a pattern of unknown form is encoded whole.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from gpt.errors import UserError

# GPT-2's pattern, in the spelling of tiktoken's r50k_base: possessive where that changes no match but keeps the
# regex engine from backtracking.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# The same after each digit is cut off by itself, as in SmolLM2's vocabulary: white space before a digit ends a part.
DIGITS_PATTERN = r"""'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s++(?=\p{N}|$)|\s+(?!\S)|\s"""

STEP = 2**18  # characters that are looked at for a place to cut
LONGEST = 2**19  # characters without such a place that are cut anywhere: longer runs of white space overflow the regex
# engine's stack (tiktoken 0.14: at a million), and longer words take more than linear time to merge
MOST_UNCUT = 2**27  # characters held of a document under a pattern of unknown form: a bomb must not fill the memory
MOST_WHOLE = 2**24  # as much for the tokenizers library, which takes some 110 bytes a character

# What \s means to the regex engine: Unicode's White_Space (Python's own \s has four control characters more).
SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
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


def is_known(pattern: str) -> bool:
    """Whether a pattern is of known form: its pieces join to the whole text, and it means the same to tiktoken's regex
    engine and to the tokenizers library's."""
    # The library's engine reads {1,3}+ as ({1,3})+, and $ as the end of a line, to which only a + lets it go back.
    alike = not re.search(r"\d\}\+|\$", pattern.replace(r"\s++$", ""))
    return alike and _rules(pattern) is not None


def _last_boundary(text: str, pattern: str) -> int:
    """Returns the largest position found at which ``text`` may be cut, and not 0 or its end; 0 where there is none.
    Whatever follows the cut, the ids of both sides are those of the whole."""
    rule = _last_rule(pattern)
    found = rule.match(text) if rule else None
    return found.end() if found else 0


def parts(chunks: Iterable[str], pattern: str, size: int = STEP) -> Iterator[tuple[str, bool]]:
    """Cuts the chunks of one document into parts of about ``size`` characters, or of as many as it takes, whose
    ids one after the other are the whole document's. After `LONGEST` characters without a place to cut, a part ends
    anywhere. With each part, whether it ends so.

    No part is empty. Under a pattern of unknown form there is one part. Raises `UserError` for a document of more than
    `MOST_UNCUT` characters there, or `MOST_WHOLE` where there is no pattern.
    """
    is_cut, most = _rules(pattern) is not None, MOST_UNCUT if pattern else MOST_WHOLE
    held: list[str] = []
    length, wanted = 0, size
    for step in (chunk[at : at + STEP] for chunk in chunks for at in range(0, len(chunk), STEP)):
        held.append(step)
        length += len(step)
        if is_cut and length >= wanted:
            text = "".join(held)
            end = _last_boundary(text, pattern)
            anywhere = not end and length >= LONGEST
            end = LONGEST if anywhere else end
            if end:
                yield text[:end], anywhere
            held, length = [text[end:]], length - end
            wanted = max(size, min(2 * length, LONGEST))
        elif not is_cut and length > most:
            raise UserError(
                f"a document has {length:,} characters that the tokenizer's pattern leaves no place to split",
                "split it into documents with --split-on, or use another --tokenizer",
            )
    if length:
        yield "".join(held), False


def parts_of(text: str, pattern: str) -> list[str]:
    """Returns the parts of a text, one for a text of usual length, so that a regex engine takes each of them."""
    if len(text) <= LONGEST + STEP or not _rules(pattern):
        return [text]
    return [part for part, _ in parts([text], pattern)]
