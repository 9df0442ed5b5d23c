"""Texts → documents → held-out split → tokenizer → ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt.config import TrainConfig
from gpt.text import readers, shards
from gpt.text.tokenizer import END_OF_TEXT, Tokenizer, make_tokenizer


@dataclass(frozen=True)
class Data:
    """What a run trains on and is measured by."""

    corpus: readers.Corpus
    sources: list[readers.Source]  # of the held-out text too, where it is a file of its own
    tokenizer: Tokenizer
    train: shards.Shard
    held_out: shards.Shard
    train_bytes: int
    held_out_bytes: int


def prepare(texts: Sequence[str], config: TrainConfig, note: Callable[[str], None]) -> Data:
    """Reads, splits and tokenizes. The vocabulary is learnt from the training part alone."""
    corpus = readers.read(texts)
    sources = list(corpus.sources)
    if config.val_text is not None:
        other = readers.read([config.val_text])
        train, held_out = corpus.documents, other.documents
        sources += other.sources
    else:
        train, held_out = readers.split(corpus.documents, config.val_fraction, config.seed)
    train_bytes, held_out_bytes = _size(train), _size(held_out)
    note(
        f"{', '.join(texts)}: {len(corpus.documents):,} document{'s' * (len(corpus.documents) != 1)}; "
        f"{train_bytes:,} bytes to train on, {held_out_bytes:,} held out"
    )
    specials = sum(document.text.count(END_OF_TEXT) for document in train)
    if specials:
        note(f"the text contains {END_OF_TEXT} {specials:,} times: there it is ordinary text")
    tokenizer = make_tokenizer(config.tokenizer, config.vocab_size, [document.text for document in train])
    data = Data(
        corpus=corpus,
        sources=sources,
        tokenizer=tokenizer,
        train=shards.encode_documents(tokenizer, [document.text for document in train]),
        held_out=shards.encode_documents(tokenizer, [document.text for document in held_out]),
        train_bytes=train_bytes,
        held_out_bytes=held_out_bytes,
    )
    note(
        f"tokenizer {tokenizer.name}: {tokenizer.vocab_size:,} ids, {len(data.train.ids):,} tokens to train on, "
        f"{train_bytes / max(1, len(data.train.ids)):.2f} bytes each"
    )
    return data


def _size(documents: Sequence[readers.Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


def write_tokens(folder: Path, data: Data) -> None:
    """The ids of both parts as checked files in ``folder``, which is made."""
    folder.mkdir()
    shards.write(folder / "train.ids", data.train, data.tokenizer.vocab_size)
    shards.write(folder / "val.ids", data.held_out, data.tokenizer.vocab_size)
