"""The data of a run: running text in a folder of tokens, made in the run or by `gpt tokenize`, or pairs of prompt and
completion.

A row of pairs is ids(prompt) + ids(completion) + end-of-text, padded to the longest of its step. Sampling starts from
the same ids (`Tokenizer.prompt`), and the prompt is encoded apart from what follows. Only the completion's ids and the
end-of-text count as targets.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gpt.config import TextConfig, TrainConfig, find_preset
from gpt.errors import UserError
from gpt.evaluate import Window, spread_windows, windows
from gpt.files import file_sha256, reading
from gpt.model.loss import IGNORED
from gpt.text.batches import Batches, Int64s, shuffled
from gpt.text.corpus import Corpus, Listener, TextSample
from gpt.text.documents import Chunk, utf8_size
from gpt.text.pairs import Pair, read_pairs
from gpt.text.token_folder import MANIFEST, TokenFolder, is_token_folder
from gpt.text.tokenize import tokenize
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import make_tokenizer, tokenizer_for
from gpt.training.recipe import Recipe, preset_name
from gpt.words import counted


class Batched(Protocol):
    """Batches as a function of the step."""

    def global_batch(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Int64s, Int64s]:
        """Inputs and targets of a step, counted from 0, each (rows / ranks, T): those of one of ``ranks``."""


@dataclass(frozen=True)
class Dataset:
    """The data that a run trains on, and those that are held out to measure it."""

    name: str  # for the run
    tokenizer: Tokenizer
    bytes: int  # of the text in UTF-8
    tokens: int  # to train on
    held_out_tokens: int
    held_out_bytes: int
    held_out_targets: int  # held-out ids that are predicted
    sources: list[dict[str, Any]]  # that were read, for the run's record, each with its checksum
    batches: Callable[[Recipe], Batched]  # raises `UserError` for a pair that is longer than the context
    windows: Callable[[int], Iterator[Window]]  # all that is held out, for a context of so many tokens
    some_windows: Callable[[int, int], list[Window]]  # the same, but at most so many, spread over all
    rows: int = 0  # pairs to train on; 0 for running text
    prompt: str = ""  # of the samples that show how the model learns; "" begins them like documents
    pairs: "tuple[PairSet, PairSet] | None" = None  # to train on, and held out; None for running text


def tokenized(texts: Sequence[str]) -> Path | None:
    """The folder of `gpt tokenize` that ``texts`` name; None if they name text. Raises `UserError` for both at once."""
    folders = []
    for text in texts:
        with reading(Path(text)):
            folders += [text] if is_token_folder(text) else []
    if folders and len(texts) > 1:
        raise UserError(f"{folders[0]} is tokenized: it can only be trained on alone", "tokenize all texts together")
    return Path(folders[0]) if folders else None


def open_tokens(
    path: Path, config: TrainConfig, note: Callable[[str], None], tokenizer: Tokenizer | None = None
) -> Dataset:
    """Opens a folder of tokens that was there before the run. Notes the settings for making one, which are not used.

    Raises `UserError` if it was made with another ``tokenizer`` than that of the model that is fine-tuned.
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


def make_tokens(
    corpus: Corpus,
    config: TrainConfig,
    out: Path,
    device: str,
    listen: Listener,
    note: Callable[[str], None],
    tokenizer: Tokenizer | None = None,
) -> Dataset:
    """Tokenizes a corpus into the folder ``out`` with ``tokenizer``, that of the model that is fine-tuned; None learns
    a vocabulary from the training part alone."""
    if config.val_text is not None and config.val_fraction != TrainConfig().val_fraction:
        note("--val-text is what is held out; --val-fraction is not used")
    most = find_preset(preset_name(config, corpus.found.bytes, device)).model.vocab_size
    tokenizer = tokenizer or tokenizer_for(corpus, config, note, most)
    return _open(tokenize(corpus, tokenizer, out, config.jobs, listen=listen), note, corpus)


def load_tokens(folder: TokenFolder, found: bool) -> Dataset:
    """The two sides of a folder of tokens; ``found`` says that it was there before the run."""
    train, held_out = folder.stream("train"), folder.stream("val")
    keys = ("name", "size", "documents", "bytes", "sha256")
    sources = [{key: getattr(source, key) for key in keys} for source in folder.sources()]
    if found:
        sources = [{"name": str(folder.path), "sha256": file_sha256(folder.path / MANIFEST)}]
    return Dataset(
        folder.path.absolute().name,
        folder.tokenizer,
        folder.bytes,
        len(train),
        len(held_out),
        folder.bytes_of("val"),
        int(np.maximum(held_out.documents.lengths - 1, 0).sum()),  # all but each document's first
        sources,
        batches=lambda r: Batches(train, r.model.block_size, r.rows, r.seed, r.ramp),
        windows=lambda block_size: windows(held_out.documents, block_size),
        some_windows=lambda block_size, wanted: spread_windows(held_out.documents, block_size, wanted),
    )


def _open(folder: TokenFolder, note: Callable[[str], None], corpus: Corpus | None = None) -> Dataset:
    """Opens a folder and describes it. Raises `UserError` if there is nothing to train on, or nothing that is held out
    can be predicted."""
    data = load_tokens(TokenFolder(folder.path), found=corpus is None)
    for line in describe(folder, corpus):
        note(line)
    if not data.tokens:
        raise UserError(f"{folder.path} has nothing to train on: all of its text is held out")
    if data.held_out_tokens and not data.held_out_targets:
        raise UserError(
            f"the text is too short: {data.held_out_bytes:,} bytes held out are one token: nothing can be predicted",
            "give more text, a larger --val-fraction, or --val-fraction 0 to hold nothing out",
        )
    return data


def describe(folder: TokenFolder, corpus: Corpus | None = None) -> list[str]:
    """Notes about what was read and how it was tokenized."""
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


class PairSet:
    """Encoded pairs: the ids of each, how many of its targets do not count, and where it was read."""

    def __init__(self, pairs: Sequence[Pair], tokenizer: Tokenizer) -> None:
        self.ids: list[Int64s] = []
        self.skipped: list[int] = []
        self.where = [pair.where for pair in pairs]
        for pair in pairs:
            prompt = tokenizer.prompt(pair.prompt)
            completion = tokenizer.encode(pair.completion, continues=True).tolist()
            self.ids.append(np.array([*prompt, *completion, tokenizer.eot], np.int64))
            self.skipped.append(len(prompt) - 1)

    def __len__(self) -> int:
        """Ids of all pairs."""
        return sum(len(ids) for ids in self.ids)

    @property
    def counted(self) -> int:
        """Targets that count: the completions' ids and an end-of-text each."""
        return len(self) - len(self.ids) - sum(self.skipped)

    def window(self, number: int) -> Window:
        """A pair as a window to evaluate."""
        ids = self.ids[number]
        return Window(number, 0, ids[:-1], ids[1:], self.skipped[number])

    def spread(self, wanted: int) -> list[Window]:
        """At most ``wanted`` of the pairs, spread over all of them."""
        total = len(self.ids)
        return [self.window(i * total // min(wanted, total)) for i in range(min(wanted, total))]

    def check(self, block_size: int) -> None:
        """Raises `UserError` naming a pair that is longer than the context."""
        for ids, where in zip(self.ids, self.where, strict=True):
            if len(ids) - 1 > block_size:
                raise UserError(
                    f"{where}: the pair has {len(ids) - 1:,} tokens; the context holds {block_size:,}",
                    "shorten it, or give a larger --block-size",
                )


@dataclass(frozen=True)
class PairBatches:
    """Batches of ``rows`` pairs, as a function of seed and step. Each epoch has all pairs once, in an order of its
    own."""

    pairs: PairSet
    rows: int
    seed: int

    def global_batch(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Int64s, Int64s]:
        """See `Batched`; T is the length of the step's longest pair; targets that do not count are `IGNORED`."""
        places = np.arange(step * self.rows, (step + 1) * self.rows, dtype=np.int64)
        chosen = [self.pairs.window(number) for number in shuffled(places, len(self.pairs.ids), self.seed).tolist()]
        shape = (self.rows // ranks, max(len(window.x) for window in chosen))
        x, y = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        for row, window in enumerate(chosen[rank * shape[0] : (rank + 1) * shape[0]]):
            x[row, : len(window.x)] = window.x
            y[row, window.skipped : len(window.y)] = window.y[window.skipped :]
        return x, y


def open_pairs(
    texts: Sequence[str],
    config: TrainConfig,
    device: str,
    note: Callable[[str], None],
    tokenizer: Tokenizer | None = None,
) -> Dataset:
    """Reads and encodes the pairs of ``texts`` with ``tokenizer``, that of the model that is fine-tuned; None learns a
    vocabulary from the prompts and completions that are trained on."""
    for text in filter(is_token_folder, texts):
        raise UserError(f"{text} is tokenized: --pairs reads JSON lines", "give the pairs as text")
    usual = TextConfig()
    for name in ("field", "split_on"):
        if getattr(config, name) != getattr(usual, name):
            note(f"--pairs reads prompts and completions: --{name.replace('_', '-')} is not used")
    corpus = read_pairs(texts, config)
    data_bytes = sum(utf8_size(pair.prompt) + utf8_size(pair.completion) for pair in corpus.train)
    if tokenizer is None:
        words = (Chunk(text, True) for pair in corpus.train for text in (pair.prompt, pair.completion))
        most = find_preset(preset_name(config, data_bytes, device)).model.vocab_size
        sample = TextSample(words, data_bytes, config.sample_bytes)
        tokenizer = make_tokenizer(config.tokenizer, config.vocab_size, sample, data_bytes, most)
    train, held_out = PairSet(corpus.train, tokenizer), PairSet(corpus.held_out, tokenizer)
    note(f"{', '.join(texts)}: {len(corpus.train):,} pairs to train on, {len(corpus.held_out):,} held out")
    if corpus.skipped:
        note(f"{corpus.skipped:,} files or lines could not be read and were left out")
    note(
        f"tokenizer {tokenizer.name}: {tokenizer.vocab_size:,} ids, {len(train):,} tokens to train on, of which "
        f"{train.counted:,} count"
    )

    def batches(recipe: Recipe) -> PairBatches:
        for side in (train, held_out):
            side.check(recipe.model.block_size)
        return PairBatches(train, recipe.rows, recipe.seed)

    return Dataset(
        corpus.name,
        tokenizer,
        sum(source["bytes"] for source in corpus.sources),
        len(train),
        len(held_out),
        sum(utf8_size(pair.completion) for pair in corpus.held_out),
        held_out.counted,
        corpus.sources,
        batches,
        windows=lambda block_size: map(held_out.window, range(len(held_out.ids))),
        some_windows=lambda block_size, wanted: held_out.spread(wanted),
        rows=len(corpus.train),
        prompt=(corpus.held_out or corpus.train)[0].prompt,
        pairs=(train, held_out),
    )
