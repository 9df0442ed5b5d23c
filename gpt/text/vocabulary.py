"""What a vocabulary holds, and how much of it a text uses."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from gpt import events
from gpt.config import ReadConfig, TextConfig
from gpt.text.corpus import Listener, open_corpus
from gpt.text.items import cut_documents
from gpt.text.source import utf8_size
from gpt.text.tokenizer import Tokenizer

_BINS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, None))  # bytes a token, from and to


def lengths(tokenizer: Tokenizer) -> dict[str, int]:
    """How many tokens have 1, 2, 3–4, 5–8, 9–16, 17 and more bytes; special ones are not counted."""
    sizes = [len(token) for token in tokenizer.ranks]
    return {
        f"{low}+" if high is None else f"{low}–{high}" if high > low else f"{low}": sum(
            low <= size and (high is None or size <= high) for size in sizes
        )
        for low, high in _BINS
    }


def longest(tokenizer: Tokenizer, count: int) -> list[tuple[int, bytes]]:
    """The ids and bytes of the longest tokens, longest first, by id where they are as long."""
    ordered = sorted(tokenizer.ranks.items(), key=lambda item: (-len(item[0]), item[1]))
    return [(id, token) for token, id in ordered[:count]]


def visible(token: bytes) -> str:
    """A token in print: what is no UTF-8 or cannot be seen is escaped."""
    text = token.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class Usage:
    """What a tokenizer makes of texts."""

    bytes: int
    tokens: int
    ids_used: int  # how many different ids occur
    frequent: list[tuple[int, int]]  # the ids that occur most, and how often

    @property
    def bytes_per_token(self) -> float:
        """How far a token reaches, on average."""
        return self.bytes / max(1, self.tokens)


def usage(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    config: ReadConfig,
    listen: Listener = lambda event: None,
    most: int = 20,
) -> Usage:
    """Counts of the ids of all that ``texts`` name, with the ``most`` frequent ones."""
    corpus = open_corpus(texts, TextConfig(**asdict(config), val_fraction=0), listen)
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    size = 0
    for text, *_ in cut_documents(((piece, False) for piece in corpus.training_text()), tokenizer.pattern):
        size += utf8_size(text)
        counts += np.bincount(tokenizer.encode(text), minlength=tokenizer.vocab_size)
        listen(events.Progress("encoded", size, max(size, corpus.found.bytes)))
    order = np.argsort(-counts, kind="stable")[:most].tolist()
    frequent = [(id, int(counts[id])) for id in order if counts[id]]
    return Usage(size, int(counts.sum()), int(np.count_nonzero(counts)), frequent)
