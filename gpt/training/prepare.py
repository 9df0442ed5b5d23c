"""Texts → a folder of tokens, made in the run or found where `gpt tokenize` made it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from gpt.config import TextConfig, TrainConfig, find_preset
from gpt.errors import UserError
from gpt.evaluate import Window, spread_windows, windows
from gpt.files import file_sha256, reading
from gpt.text.batches import Batches
from gpt.text.corpus import Corpus, Listener
from gpt.text.shards import TokenStream
from gpt.text.token_folder import MANIFEST, TokenFolder, is_token_folder
from gpt.text.tokenize import tokenize
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import tokenizer_for
from gpt.training.recipe import Recipe, preset_name
from gpt.words import counted


@dataclass(frozen=True)
class Data:
    """What a run trains on and is measured by."""

    folder: TokenFolder
    tokenizer: Tokenizer
    train: TokenStream
    held_out: TokenStream
    found: bool  # the folder was there before the run

    rows = 0  # it is no text of rows
    prompt = ""  # its samples begin like documents

    @property
    def bytes(self) -> int:
        """The text's size in UTF-8."""
        return self.folder.bytes

    @property
    def held_out_bytes(self) -> int:
        """The held-out text's size in UTF-8."""
        return self.folder.bytes_of("val")

    @property
    def held_out_targets(self) -> int:
        """Held-out ids that are predicted: all but each document's first."""
        return int(np.maximum(self.held_out.documents.lengths - 1, 0).sum())

    def batches(self, recipe: Recipe) -> Batches:
        """The batches to train on."""
        return Batches(self.train, recipe.model.block_size, recipe.rows, recipe.seed, recipe.ramp)

    def windows(self, block_size: int) -> Iterator[Window]:
        """All that is held out."""
        return windows(self.held_out.documents, block_size)

    def some_windows(self, block_size: int, wanted: int) -> list[Window]:
        """At most ``wanted`` held-out windows, spread over all of them."""
        return spread_windows(self.held_out.documents, block_size, wanted)

    def sources(self) -> list[dict[str, Any]]:
        """What was read, for the run's record: each source with its sum, or the folder of tokens with its."""
        if self.found:
            return [{"name": str(self.folder.path), "sha256": file_sha256(self.folder.path / MANIFEST)}]
        keys = ("name", "size", "documents", "bytes", "sha256")
        return [{key: getattr(source, key) for key in keys} for source in self.folder.sources()]


def tokenized(texts: Sequence[str]) -> Path | None:
    """The folder that `gpt tokenize` made, where that is what is to be trained on."""
    folders = []
    for text in texts:
        with reading(Path(text)):
            folders += [text] if is_token_folder(text) else []
    if folders and len(texts) > 1:
        raise UserError(f"{folders[0]} is tokenized: it can only be trained on alone", "tokenize all texts together")
    return Path(folders[0]) if folders else None


def open_data(path: Path, config: TrainConfig, note: Callable[[str], None], tokenizer: Tokenizer | None = None) -> Data:
    """A folder of tokens, as it is. Settings that are about making one are not used, which is said.

    Raises `UserError` where it was made with another ``tokenizer`` than that of the model that is fine-tuned.
    """
    usual = TextConfig()
    unused = [each.name for each in fields(TextConfig) if each.name not in ("seed", "jobs")]  # jobs change no result
    for name in unused:
        if getattr(config, name) != getattr(usual, name):
            note(f"{path} is tokenized already: --{name.replace('_', '-')} is not used")
    folder = TokenFolder(path)
    if folder.manifest.get("part"):
        raise UserError(f"{path} is a part of a corpus", "join the parts: gpt data merge PART... -o DIR")
    if tokenizer is not None and tokenizer.fingerprint != folder.tokenizer.fingerprint:
        raise UserError(
            f"{path} was made with another tokenizer ({folder.tokenizer.name}) than that of {config.init}",
            f"tokenize the text with the model's own: gpt tokenize … --tokenizer {config.init}",
        )
    return _open(folder, note)


def make_data(
    corpus: Corpus,
    config: TrainConfig,
    out: Path,
    device: str,
    listen: Listener,
    note: Callable[[str], None],
    tokenizer: Tokenizer | None = None,
) -> Data:
    """Tokenizes a corpus into the folder ``out``, with the ``tokenizer`` of the model that is fine-tuned; else the
    vocabulary is learnt from the training part alone."""
    if config.val_text is not None and config.val_fraction != TrainConfig().val_fraction:
        note("--val-text is what is held out; --val-fraction is not used")
    most = find_preset(preset_name(config, corpus.found.bytes, device)).model.vocab_size
    tokenizer = tokenizer or tokenizer_for(corpus, config, note, most)
    return _open(tokenize(corpus, tokenizer, out, config.jobs, listen=listen), note, corpus)


def reopen_data(path: Path) -> Data:
    """The tokens that a run made for itself. Raises `UserError` where a sum is not what it was."""
    TokenFolder(path).verify()
    return find_data(path, found=False)


def find_data(path: Path, found: bool) -> Data:
    """A folder of tokens; ``found``: it was there before the run."""
    folder = TokenFolder(path)
    return Data(folder, folder.tokenizer, folder.stream("train"), folder.stream("val"), found)


def _open(folder: TokenFolder, note: Callable[[str], None], corpus: Corpus | None = None) -> Data:
    """The two sides of a folder. Raises `UserError` where there is nothing to train on, or something was held out and
    no token of it can be predicted."""
    data = find_data(folder.path, found=corpus is None)
    for line in describe(folder, corpus):
        note(line)
    if not len(data.train):
        raise UserError(f"{folder.path} has nothing to train on: all of its text is held out")
    if len(data.held_out) and not any(data.held_out.documents.lengths > 1):
        raise UserError(
            f"the text is too short: {data.held_out_bytes:,} bytes held out are one token: nothing can be predicted",
            "give more text, a larger --val-fraction, or --val-fraction 0 to hold nothing out",
        )
    return data


def describe(folder: TokenFolder, corpus: Corpus | None = None) -> list[str]:
    """Lines for whoever watches: what was read, what was done with it."""
    manifest = folder.manifest
    names = ", ".join(manifest.get("texts") or []) or (corpus.name if corpus else str(folder.path))
    train, held_out = folder.bytes_of("train"), folder.bytes_of("val")
    first = corpus.first_held_out if corpus else None
    lines = [
        f"{names}: {counted(folder.documents, 'document')}; "
        f"{train:,} bytes to train on, {held_out:,} held out" + (f", from {first} on" if first else "")
    ]
    if manifest.get("end_of_text_in_text"):
        lines.append(
            f"the text contains {folder.tokenizer.eot_token} {counted(manifest['end_of_text_in_text'], 'time')}: "
            "there it is ordinary text"
        )
    if manifest.get("cut_pieces"):
        lines.append(
            counted(
                manifest["cut_pieces"],
                "piece of over 500,000 characters without a break is cut there",
                "pieces of over 500,000 characters without a break are cut there",
            )
            + ", to be tokenized in linear time"
        )
    if manifest.get("replaced"):
        lines.append(counted(manifest["replaced"], "wrong byte was", "wrong bytes were") + " replaced by U+FFFD")
    if manifest.get("skipped"):
        lines.append(
            counted(manifest["skipped"], "file, line or row", "files, lines or rows") + " could not be read: left out"
        )
    tokens = sum(shard.tokens for shard in folder.shards if shard.side == "train")
    lines.append(
        f"tokenizer {folder.tokenizer.name}: {folder.tokenizer.vocab_size:,} ids, {tokens:,} tokens to train on, "
        f"{train / max(1, tokens):.2f} bytes each"
    )
    return lines
