"""The data of a run: text tokenized by the run or by `gpt tokenize`, or examples: pairs, conversations, preferences,
prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gpt.chat import chat
from gpt.chat.examples import Conversation, Example, Pair, Preference, Prompt, find_copies, read_examples
from gpt.config.model import GPTConfig, find_preset
from gpt.config.text import TextConfig
from gpt.config.train import TrainConfig
from gpt.corpus import repeats
from gpt.corpus.batches import Batches
from gpt.corpus.corpus import Corpus, Listener, TextSample
from gpt.corpus.token_folder import TokenFolder
from gpt.corpus.tokenize import tokenize
from gpt.corpus.vocabulary import make_tokenizer, tokenizer_for
from gpt.documents.documents import Chunk, utf8_size
from gpt.documents.sources import MANIFEST, is_token_folder
from gpt.insight.evaluate import Window, spread_windows, windows
from gpt.insight.openings import choose_openings
from gpt.insight.yardsticks import Yardsticks, measure
from gpt.parallel import environment
from gpt.system.child import split_command
from gpt.system.errors import UserError
from gpt.system.files import file_sha256
from gpt.system.words import counted
from gpt.tokenizers.tokenizer import Tokenizer
from gpt.training.example_rows import (
    ChatEncoder,
    Encoder,
    ExampleRows,
    PairEncoder,
    PreferenceEncoder,
    PromptEncoder,
    RowBatches,
)
from gpt.training.recipe import Recipe, example_context, limit_answers, preset_name

BatchSource = Batches | RowBatches
ENCODERS: dict[type[Example], type[Encoder[Any]]] = {
    Pair: PairEncoder, Conversation: ChatEncoder, Preference: PreferenceEncoder, Prompt: PromptEncoder,
}  # fmt: skip

# A model of fewer documents has rarely seen the start of one, so its samples begin with words of the held-out text.
MIN_DOCUMENTS = 100


@dataclass(frozen=True)
class Dataset:
    """Training and held-out data."""

    name: str  # default name of the run
    tokenizer: Tokenizer
    bytes: int  # size of the text in UTF-8
    tokens: int  # training tokens
    held_out_tokens: int
    held_out_bytes: int
    held_out_targets: int  # held-out tokens that are predicted
    sources: list[dict[str, Any]]  # input files with checksums, for the run's record
    batches: Callable[[Recipe], BatchSource]
    windows: Callable[[int], Iterator[Window]]  # block_size → all held-out windows
    sample_windows: Callable[[int, int], list[Window]]  # (block_size, count) → at most count windows, spread evenly
    prompt_ids: list[int]  # prompt of the samples during training
    prompt: str = ""  # text of ``prompt_ids``; "" starts a document
    documents: int = 0  # documents of the text; 0 for examples
    rows: int = 0  # rows of training examples, preferences, or answers to all prompts; 0 for text
    pairs: "tuple[ExampleRows, ExampleRows] | None" = None  # training and held-out pairs
    preferences: "tuple[ExampleRows, ExampleRows] | None" = None  # training and held-out preferences
    prompts: "tuple[ExampleRows, ExampleRows] | None" = None  # training and held-out prompts
    chat: bool = False  # whether the examples are conversations
    measure_yardsticks: Callable[[], Yardsticks | None] = lambda: None  # of the held-out text; None for examples


def open_tokens(
    paths: Sequence[Path], config: TrainConfig, note: Callable[[str], None], tokenizer: Tokenizer | None = None
) -> Dataset:
    """Opens `gpt tokenize` folders as one. Notes settings that have no effect. Raises `UserError` for a tokenizer other
    than the base model's ``tokenizer``."""
    for name in (option.name for option in fields(TextConfig)):
        # ``seed`` still seeds training, and ``jobs`` never affects results.
        if name not in ("seed", "jobs") and getattr(config, name) != getattr(TextConfig, name):
            note(f"{paths[0]} is already tokenized: --{name.replace('_', '-')} has no effect")
    folder = TokenFolder(*paths)
    if tokenizer is not None and not folder.adopt_tokenizer(tokenizer):
        message = f"{folder.path} was made with another tokenizer ({folder.tokenizer.name}), not that of {config.init}"
        raise UserError(message, f"tokenize the text with the model's own: gpt tokenize … --tokenizer {config.init}")
    return _open_folder(folder, note)


def make_tokens(
    corpus: Corpus,
    config: TrainConfig,
    out: Path,
    device: str,
    listen: Listener,
    note: Callable[[str], None],
    tokenizer: Tokenizer | None = None,
) -> Dataset:
    """Tokenizes a corpus into the folder ``out``. ``tokenizer`` is the base model's; without it, ``--tokenizer``
    decides."""
    max_vocab_size = find_preset(preset_name(config, corpus.survey.bytes, device)).model.vocab_size
    tokenizer = tokenizer or tokenizer_for(corpus, config, note, max_vocab_size)
    return _open_folder(tokenize(corpus, tokenizer, out, config.jobs, listen=listen), note, corpus)


def load_tokens(folder: TokenFolder, found: bool) -> Dataset:
    """Opens the training and held-out data of a token folder. ``found`` means that it existed before the run."""
    train, held_out = folder.stream("train"), folder.stream("val")
    # The first token of a document is not a target.
    targets, held_out_bytes = int(np.maximum(held_out.documents.lengths - 1, 0).sum()), folder.count_text_bytes("val")
    keys = ("name", "size", "documents", "bytes", "sha256")
    sources = [{key: getattr(source, key) for key in keys} for source in folder.sources()]
    if found:
        sources = [{"name": str(path), "sha256": file_sha256(path / MANIFEST)} for path in folder.paths]
    prompt = ""
    if folder.documents < MIN_DOCUMENTS:  # The first opening can begin inside a word, where the text was split.
        prompt = "".join(choose_openings(held_out or train, folder.tokenizer, 2)[-1:])
    sizes = folder.bytes, len(train), len(held_out), held_out_bytes, targets
    return Dataset(
        folder.path.absolute().name,
        folder.tokenizer,
        *sizes,
        sources,
        batches=lambda r: Batches(train, r.model.block_size, r.rows, r.seed),
        windows=lambda block_size: windows(held_out.documents, block_size),
        sample_windows=lambda block_size, count: spread_windows(held_out.documents, block_size, count),
        prompt_ids=folder.tokenizer.prompt(prompt),
        prompt=prompt,
        documents=folder.documents,
        measure_yardsticks=cache(lambda: measure(folder.tokenizer, held_out, train, targets / max(1, held_out_bytes))),
    )


def _open_folder(folder: TokenFolder, note: Callable[[str], None], corpus: Corpus | None = None) -> Dataset:
    """Opens a folder and notes its contents. Raises `UserError` if it has no training tokens, or too few held-out
    tokens to predict one."""
    data = load_tokens(TokenFolder(*folder.paths), found=corpus is None)
    for line in [*describe(folder, corpus), *([] if environment.rank() else repeats.notes(folder))]:
        note(line)
    if not data.tokens:
        raise UserError(f"{folder.path} has nothing to train on: all of its text is held out")
    if not data.held_out_targets and (
        data.held_out_tokens or any(part.manifest["split"]["by"] == "end" for part in folder.folders)
    ):
        raise UserError(
            f"the text is too short: the {data.held_out_bytes:,} held-out bytes are one token, too few to predict",
            "give more text or a larger --val-fraction, or use --val-fraction 0 to hold out nothing",
        )
    return data


def describe(folder: TokenFolder, corpus: Corpus | None = None) -> list[str]:
    """Returns notes on the text and its tokenization."""
    texts = [text for part in folder.folders for text in part.manifest["texts"]]
    names = ", ".join(texts) or (corpus.name if corpus else str(folder.path))
    train, held_out = folder.count_text_bytes("train"), folder.count_text_bytes("val")
    first = corpus.first_held_out if corpus else None
    lines = [
        f"{names}: {counted(folder.documents, 'document')}; "
        f"{train:,} bytes to train on, {held_out:,} held out" + (f", starting at {first}" if first else "")
    ]
    lines += folder.notes() if corpus is None else []  # `tokenize` has reported them.
    tokens = sum(part.manifest["train"]["tokens"] for part in folder.folders)
    lines.append(
        f"tokenizer {folder.tokenizer.name}: {folder.tokenizer.vocab_size:,} ids, {tokens:,} tokens to train on, "
        f"{train / max(1, tokens):.2f} bytes each"
    )
    return lines


def open_examples(
    texts: Sequence[str],
    config: TrainConfig,
    device: str,
    note: Callable[[str], None],
    tokenizer: Tokenizer | None = None,
    start: GPTConfig | None = None,
    block_size: int | None = None,
) -> Dataset:
    """Reads and encodes examples. ``tokenizer`` and ``start`` are the base model's tokenizer and shape;
    without a tokenizer, ``--tokenizer`` decides. ``block_size`` is the context of a resumed run. Raises `UserError` if
    no training examples remain."""
    kind = find_kind(config)
    if config.reward is not None:
        split_command(config.reward)
    for text in filter(is_token_folder, texts):
        raise UserError(f"{text} is tokenized: {kind.option} reads JSON lines", f"give the {kind.plural} as text")
    for name in ("field", "split_on"):
        if getattr(config, name) != getattr(TextConfig, name):
            note(f"{kind.option} reads {kind.content}: --{name.replace('_', '-')} has no effect")
    corpus = read_examples(texts, config, kind, note)
    n_bytes = sum(source["bytes"] for source in corpus.sources)
    block_size = block_size or example_context(config, n_bytes, device, start)
    group, answer_tokens = limit_answers(config, block_size)
    block_size = block_size + 1 - answer_tokens if answer_tokens else block_size
    encoder = ENCODERS[kind](tokenizer or _train_tokenizer(corpus.train, config, device), block_size, config.skip_bad)
    train, held_out = encoder.encode(corpus.train), encoder.encode(corpus.held_out)
    note(f"{', '.join(texts)}: {train.examples:,} {kind.plural} to train on, {held_out.examples:,} held out")
    if corpus.skipped:
        note(f"{corpus.skipped:,} files or lines could not be read and were skipped")
    if not config.reward and (copies := find_copies([*corpus.train, *corpus.held_out])):
        verb = f"{kind.singular} copies an earlier one", f"{kind.plural} copy earlier ones"
        places = ", ".join(copy.where for copy in copies[:3]) + (" …" if len(copies) > 3 else "")
        note(f"{counted(len(copies), *verb)}: {places}")
    for line in encoder.notes():
        note(line)
    tokenizer = encoder.tokenizer
    counts = f"{train.tokens:,} tokens to train on, {train.targets:,} of them predicted"
    note(f"tokenizer {tokenizer.name}: {tokenizer.vocab_size:,} ids" + ("" if config.reward else f", {counts}"))
    if not train:
        raise UserError(f"there are no {kind.plural} to train on", "give others, or a larger --block-size")
    first: Example = (corpus.held_out or corpus.train)[0]
    prompt, prompt_ids = encoder.prompt(first)
    tokens = group * (train.tokens + answer_tokens * len(train))
    targets = len(held_out) if config.reward else held_out.targets
    sizes = n_bytes, tokens, held_out.tokens, held_out.bytes, targets
    return Dataset(
        corpus.name,
        tokenizer,
        *sizes,
        corpus.sources,
        batches=lambda recipe: RowBatches(train, recipe.rows // group, recipe.seed),
        windows=lambda block_size: map(held_out.window, range(len(held_out))),
        sample_windows=lambda block_size, count: held_out.spread(count),
        prompt_ids=prompt_ids,
        prompt=prompt,
        rows=group * len(train) // train.sides,
        pairs=(train, held_out) if config.pairs else None,
        preferences=(train, held_out) if config.preferences else None,
        prompts=(train, held_out) if config.reward else None,
        chat=config.chat or (isinstance(first, Preference | Prompt) and not isinstance(first.prompt, str)),
    )


def find_kind(config: TrainConfig) -> type[Example]:
    """Returns the kind of the examples that a run trains on."""
    return next(kind for kind in ENCODERS if getattr(config, kind.option.removeprefix("--")) not in (None, False))


def _train_tokenizer(examples: Sequence[Example], config: TrainConfig, device: str) -> Tokenizer:
    """Makes the tokenizer that ``--tokenizer`` requests, with special tokens for chats."""
    n_bytes = sum(utf8_size(text) for example in examples for text in example.texts)
    chunks = (Chunk(text, True) for example in examples for text in example.words)
    max_vocab_size = find_preset(preset_name(config, n_bytes, device)).model.vocab_size
    sample = TextSample(chunks, n_bytes, config.sample_bytes)
    specials = (chat.START, chat.END) if config.chat else ()
    return make_tokenizer(config.tokenizer, config.vocab_size, sample, n_bytes, max_vocab_size, specials)
