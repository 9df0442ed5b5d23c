"""The first words of lines of a text, as prompts for a model of it."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from gpt.corpus.shards import TokenStream
from gpt.insight.report import find_training_tokens
from gpt.system.errors import UserError
from gpt.tokenizers.tokenizer import Tokenizer

MAX_CHARACTERS = 60
_WORDS = 5
_PLACES = 4  # Places to search per opening, because some have no suitable line.
_TOKENS = 512  # Tokens to search at a place.


def find_openings(path: Path, tokenizer: Tokenizer, count: int) -> list[str]:
    """Returns up to ``count`` openings from places spread over the training text of the checkpoint at ``path``. Returns
    none if the run's tokens are gone or were not kept, as with pairs and conversations."""
    try:
        return choose_openings(find_training_tokens(path, tokenizer).stream("train"), tokenizer, count) if count else []
    except UserError:  # The page works without prompts.
        return []


def choose_openings(stream: TokenStream, tokenizer: Tokenizer, count: int) -> list[str]:
    """Returns up to ``count`` openings from places spread over a text."""
    openings: list[str] = []
    places = range(0, len(stream), max(1, len(stream) // (_PLACES * count)))
    for index, place in enumerate(places):
        if index >= _PLACES * len(openings):  # This part of the text has no opening yet.
            ids = stream.take(place, min(_TOKENS, len(stream) - place)).tolist()
            new = (each for each in _openings(tokenizer.decode(ids), tokenizer) if each not in openings)
            openings += islice(new, 1)
    return openings[:count]


def _openings(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the first words of each line that starts with a letter, except the text's first line and last word, which
    can be incomplete."""
    for line in text.rpartition(" ")[0].replace(tokenizer.eot_token, "\n").split("\n")[1:]:
        opening = " ".join(line.split(" ")[:_WORDS])[:MAX_CHARACTERS].rstrip()
        if opening[:1].isalpha() and opening.isprintable() and "\ufffd" not in opening:
            yield opening
