"""Trains vocabularies, and lists their tokens."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

from gpt.config import events
from gpt.config.text import LearnConfig, TextConfig
from gpt.corpus.corpus import Corpus, Listener, TextSample, open_corpus
from gpt.tokenizers.finding import find_tokenizer
from gpt.tokenizers.tokenizer import Tokenizer, auto_vocab_size, check_specials, train_tokenizer, train_tokenizer_up_to


def train(
    texts: Sequence[str],
    config: LearnConfig,
    specials: Sequence[str] = (),
    listen: Listener = lambda event: None,
) -> tuple[Tokenizer, TextSample]:
    """Trains a vocabulary on texts. Returns the tokenizer and the training sample."""
    check_specials(specials)  # Fail before reading any text.
    corpus = open_corpus(texts, TextConfig(**asdict(config), val_fraction=0), listen)
    total = min(config.sample_bytes, corpus.survey.bytes)
    sample = TextSample(corpus.training_text(), corpus.survey.bytes, config.sample_bytes)

    def report_progress() -> Iterator[str]:
        for text in sample:
            listen(events.Progress("read", sample.bytes_taken, max(total, sample.bytes_taken)))
            yield text

    n_bytes = corpus.survey.bytes
    return make_tokenizer("auto", config.vocab_size, report_progress(), n_bytes, specials=specials), sample


def tokenizer_for(
    corpus: Corpus, config: TextConfig, note: Callable[[str], None] = lambda text: None, max_vocab_size: int = 2**24
) -> Tokenizer:
    """Returns the tokenizer for ``--tokenizer`` and ``--vocab-size``. ``auto`` trains one on a sample of the training
    text. ``max_vocab_size`` limits the default size."""
    size, limit = corpus.train_bytes, config.sample_bytes
    if config.tokenizer == "auto" and size > limit:
        note(f"training the tokenizer on {limit / 1e6:,.0f} of {size / 1e6:,.0f} MB, sampled evenly")
    sample = TextSample(corpus.training_text(), size, limit)
    return make_tokenizer(config.tokenizer, config.vocab_size, sample, size, max_vocab_size)


def make_tokenizer(
    kind: str,
    vocab_size: int | None,
    texts: Iterable[str],
    n_bytes: int,
    max_vocab_size: int = 2**24,
    specials: Sequence[str] = (),
) -> Tokenizer:
    """Returns the tokenizer for ``--tokenizer`` and ``--vocab-size``. ``auto`` trains one on ``texts``, a sample of
    ``n_bytes`` of text. ``max_vocab_size`` limits the default size."""
    if kind != "auto":
        return find_tokenizer(kind)
    if vocab_size is not None:
        return train_tokenizer(texts, vocab_size, specials)
    return train_tokenizer_up_to(texts, min(max_vocab_size, auto_vocab_size(n_bytes)), specials)


def find_longest(tokenizer: Tokenizer, count: int) -> list[tuple[int, bytes]]:
    """Returns ids and bytes of the longest tokens, sorted by length, then by id."""
    return sorted(tokenizer.backend.pieces.items(), key=lambda item: (-len(item[1]), item[0]))[:count]


def to_printable(token: bytes) -> str:
    """Returns a token as printable text. A byte that is no character of its own becomes ``<0xC3>``, and an invisible
    character ``\\n`` or ``\\u200b``."""

    def show(c: str) -> str:
        if "\udc80" <= c <= "\udcff":  # A byte of invalid UTF-8.
            return f"<0x{ord(c) - 0xDC00:02X}>"
        return c if c.isprintable() else c.encode("unicode_escape").decode()

    return "".join(map(show, token.decode("utf-8", "surrogateescape")))
