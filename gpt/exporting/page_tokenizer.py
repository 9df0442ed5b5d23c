"""A byte-level BPE for the JavaScript of a web page.

The page gives the same ids as `gpt`, except for letters and digits that are newer than the browser's version of
Unicode.
"""

import re
from typing import Any

from gpt.exporting.byte_bpe import BPE, added_words, require_bpe
from gpt.system.errors import UserError
from gpt.tokenizers.backends import to_gpt2_spelling
from gpt.tokenizers.boundaries import has_rules, remove_possessive
from gpt.tokenizers.tokenizer import Tokenizer

HINT = "export a folder or a .gguf file instead"


def check(tokenizer: Tokenizer) -> None:
    """Raises `UserError` for a tokenizer whose ids a page cannot reproduce."""
    bpe = require_bpe(tokenizer, "a page", HINT)
    if not has_rules(bpe.pattern):
        raise UserError("a page does not support this tokenizer's pattern for splitting text into words", HINT)
    if tokenizer.backend.pieces != {id: token for token, id in bpe.ranks.items()}:
        raise UserError("a page does not support this tokenizer's decoder", HINT)
    _merge_ids(bpe)


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a tokenizer as JSON. ``tokens`` has the ordinary token of each id, spelled as in GPT-2's files.
    ``merges`` has three numbers per merge: the ids of both parts and of the result. It is null if each pair has the
    rank of its concatenation. Call `check` first."""
    bpe = require_bpe(tokenizer, "a page", HINT)
    tokens: list[str | None] = [None] * tokenizer.usable
    for token, id in bpe.ranks.items():
        tokens[id] = to_gpt2_spelling(token)
    usable = {word: id for word, id in added_words(tokenizer).items() if id < tokenizer.usable}
    return {
        "tokens": tokens,
        "merges": _merge_ids(bpe),
        "skips_merges": bpe.skips_merges,
        "nfc": bpe.nfc,
        "pattern": to_javascript(bpe.pattern),
        "added": usable,
        "specials": sorted({id for word, id in usable.items() if word in tokenizer.all_specials}),
        "words": {word: id for word, id in usable.items() if word in tokenizer.words},
        "special_prompt": bool(tokenizer.files),
        "bos": tokenizer.bos,
        "eot": tokenizer.eot,
        "ends": sorted(tokenizer.ends),
    }


def _merge_ids(bpe: BPE) -> list[int] | None:
    if bpe.merge_list is None:
        return None
    ids = {to_gpt2_spelling(token): id for token, id in bpe.ranks.items()}
    pairs = [pair.split(" ") for pair in bpe.merge_list]
    try:
        return [ids[token] for left, right in pairs for token in (left, right, left + right)]
    except KeyError as error:
        raise UserError(f"a page does not support merges of the special token {error}", HINT) from None


def to_javascript(pattern: str) -> str:
    """Translates a known pattern to a JavaScript regular expression with the flag u, which matches the same text."""
    pattern = re.sub(r"\(\?i:(.*?)\)", _ignore_case, remove_possessive(pattern))
    # JavaScript's \s has U+FEFF, and lacks U+0085.
    return pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")


def _ignore_case(group: re.Match[str]) -> str:
    """Returns a group with all cases of its letters. Unicode has a third s, U+017F."""

    def spell(match: re.Match[str]) -> str:
        return "[" + "".join(each + each.upper() + "\u017f" * (each == "s") for each in match[0].strip("[]")) + "]"

    return "(?:" + re.sub(r"\[[a-z]+\]|[a-z]", spell, group[1]) + ")"
