"""Texts → documents → held-out split → tokenizer → ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt.config import TrainConfig, find_preset
from gpt.errors import UserError
from gpt.text import readers, shards
from gpt.text.split import HASHED_SPLIT_FROM, Document, split
from gpt.text.tokenizer import END_OF_TEXT, Tokenizer, count_cut_pieces, make_tokenizer
from gpt.training.recipe import preset_name


@dataclass(frozen=True)
class Data:
    """What a run trains on and is measured by."""

    corpus: readers.Corpus
    sources: list[readers.Record]  # of the held-out text too, where it is a file of its own
    tokenizer: Tokenizer
    train: shards.Shard
    held_out: shards.Shard
    held_out_bytes: int


def prepare(texts: Sequence[str], config: TrainConfig, device: str, note: Callable[[str], None]) -> Data:
    """Reads, splits and tokenizes. The vocabulary is learnt from the training part alone.

    Raises `UserError` where something was to be held out and no token of it could be predicted.
    """
    corpus = readers.read(texts)
    sources = list(corpus.sources)
    if config.val_text is not None:
        if config.val_fraction != TrainConfig().val_fraction:
            note("--val-text is what is held out; --val-fraction is not used")
        other = readers.read([config.val_text])
        train, held_out = corpus.documents, other.documents
        sources += other.sources
    else:
        train, held_out = split(corpus.documents, config.val_fraction, config.seed)
    train_bytes, held_out_bytes = _size(train), _size(held_out)
    at_end = config.val_text is None and 1 < len(corpus.documents) < HASHED_SPLIT_FROM and len(held_out) > 0
    note(
        f"{', '.join(texts) or corpus.name}: {len(corpus.documents):,} document{'s' * (len(corpus.documents) != 1)}; "
        f"{train_bytes:,} bytes to train on, {held_out_bytes:,} held out"
        + (f", from {held_out[0].name} on" if at_end else "")
    )
    specials = sum(document.text.count(END_OF_TEXT) for document in train)
    if specials:
        note(f"the text contains {END_OF_TEXT} {specials:,} times: there it is ordinary text")
    most = find_preset(preset_name(config, corpus.bytes, device)).model.vocab_size
    tokenizer = make_tokenizer(config.tokenizer, config.vocab_size, [document.text for document in train], most)
    data = Data(
        corpus=corpus,
        sources=sources,
        tokenizer=tokenizer,
        train=shards.encode_documents(tokenizer, [document.text for document in train]),
        held_out=shards.encode_documents(tokenizer, [document.text for document in held_out]),
        held_out_bytes=held_out_bytes,
    )
    if held_out and not any(len(ids) > 1 for ids in data.held_out.documents()):
        raise UserError(
            f"the text is too short: {held_out_bytes:,} bytes held out are one token, and nothing can be predicted",
            "give more text, a larger --val-fraction, or --val-fraction 0 to hold nothing out",
        )
    cuts = sum(count_cut_pieces(document.text) for document in train)
    if cuts:
        note(f"{cuts:,} pieces of over 1 MiB without a break are cut there, to be tokenized in linear time")
    note(
        f"tokenizer {tokenizer.name}: {tokenizer.vocab_size:,} ids, {len(data.train.ids):,} tokens to train on, "
        f"{train_bytes / max(1, len(data.train.ids)):.2f} bytes each"
    )
    return data


def _size(documents: Sequence[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


def write_tokens(folder: Path, data: Data) -> None:
    """The ids of both parts as checked files in ``folder``, which is made."""
    folder.mkdir()
    shards.write(folder / "train.ids", data.train, data.tokenizer.vocab_size)
    shards.write(folder / "val.ids", data.held_out, data.tokenizer.vocab_size)
