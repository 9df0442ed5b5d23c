"""Tokenizes text into a token folder. The main thread reads and writes in text order; worker threads encode.

The shards depend only on the text and the settings, not on the number of threads or on interruptions. Sources form
groups. The text of a group is divided into items. A slice consists of whole items and has one shard per side. When a
slice is finished, a line is added to ``progress.jsonl``. A resume reads the unfinished groups again and encodes the
missing items.
"""

import contextlib
import hashlib
import os
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path

import numpy as np

from gpt import events
from gpt.config import TokenizeConfig
from gpt.errors import Interrupted, UserError, WorkError
from gpt.files import check_new, reading
from gpt.interrupt import Stopped, StopSignal
from gpt.peaks import cores
from gpt.text import repeats, unfinished_folder
from gpt.text.chat import special_pattern
from gpt.text.corpus import Corpus, Listener, cut_documents, open_corpus
from gpt.text.documents import Chunk, Reader, Skipped, utf8_size
from gpt.text.shards import Ids, Side, id_type
from gpt.text.token_folder import MANIFEST, SourceRecord, TokenFolder
from gpt.text.tokenizer import Tokenizer
from gpt.text.tokenizer_files import tokenizer_files
from gpt.text.unfinished_folder import EncodedItem, FinishedSlices, Item
from gpt.text.unpack import Source
from gpt.text.vocabulary import tokenizer_for
from gpt.words import counted

ITEM = 2**19  # Target size of an item in characters.
ITEM_DOCUMENTS = 4096  # Maximum number of texts in an item.

OnBytes = Callable[[int, int], None]  # Called with a source's index and its bytes read so far.


def read_items(corpus: Corpus, group: int, tokenizer: Tokenizer, on_bytes: OnBytes, skipped: Skipped) -> Iterator[Item]:
    """Yields the items of a group, in order. The last item can be empty. Adds what the reader skips to ``skipped``."""
    reader, skipped_before, specials = Reader(corpus.reading), skipped.count, special_pattern(tokenizer)
    reader.skipped = skipped
    item, size, cuts, special_count = Item(group, 1), 0, 0, 0

    def counts() -> dict[str, int]:
        return {
            "replaced": reader.replaced,
            "skipped": skipped.count - skipped_before,
            "cut_pieces": cuts,
            "end_of_text_in_text": special_count,
        }

    for index in corpus.groups[group]:
        source = corpus.sources[index]
        chunks = _CountedChunks(reader.documents(source, partial(on_bytes, index)))
        for text, begins, side, cut in cut_documents(corpus.assign(chunks, index), tokenizer.pattern):
            item.texts.append(text)
            item.begins.append(begins)
            item.sides.append(side)
            item.bytes[side] += utf8_size(text)
            size += len(text)
            cuts += cut
            special_count += sum(1 for _ in specials.finditer(text))
            if size >= ITEM or len(item.texts) >= ITEM_DOCUMENTS:
                item.counts = counts()
                yield item
                item, size = Item(group, item.number + 1), 0
        item.sources.append(chunks.record(source, group))
    item.counts, item.last = counts(), True
    yield item


class _CountedChunks:
    """Iterates over the chunks of a source. Keeps the sha256 and the counts of bytes and documents read so far."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.chunks, self.documents, self.bytes, self.digest = chunks, 0, 0, hashlib.sha256()

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self.chunks:
            data = chunk.text.encode()
            self.digest.update(data)
            self.bytes += len(data)
            self.documents += chunk.begins
            yield chunk

    def record(self, source: Source, group: int) -> SourceRecord:
        sha256 = self.digest.hexdigest()
        return SourceRecord(group, source.name, source.size, source.time, self.documents, self.bytes, sha256)


def encode(tokenizer: Tokenizer, item: Item) -> EncodedItem:
    """Encodes the texts of an item."""
    dtype = id_type(tokenizer.vocab_size)
    opening = np.array(tokenizer.opening, dtype)
    encoded = EncodedItem()
    parts: dict[Side, list[Ids]] = {"train": [], "val": []}
    lengths = dict.fromkeys(parts, 0)
    for ids, begins, side in zip(tokenizer.encode_all(item.texts), item.begins, item.sides, strict=True):
        if begins:
            encoded.offsets[side].append(lengths[side])
            parts[side].append(opening)
        parts[side].append(ids.astype(dtype))
        lengths[side] += len(ids) + begins * len(opening)
    encoded.ids = {side: np.concatenate(arrays) for side, arrays in parts.items() if arrays}
    return encoded


AHEAD = 16  # Items in memory in addition to two per worker. They keep workers busy while the main thread writes.


def _encode_items(
    tokenizer: Tokenizer, items: Iterable[Item], jobs: int
) -> Generator[tuple[Item, EncodedItem], None, None]:
    """Yields every item with its ids, in order. Encodes in ``jobs`` threads, because tiktoken and the tokenizers
    library release the GIL."""
    tokenizer.encode("")  # Initializes the tokenizer before the threads start.
    pending = deque[tuple[Item, Future[EncodedItem]]]()

    def yield_finished(max_pending: int) -> Iterator[tuple[Item, EncodedItem]]:
        while len(pending) > max_pending:
            item, future = pending[0]
            yield item, future.result()
            pending.popleft()

    pool = ThreadPoolExecutor(jobs)
    with contextlib.ExitStack() as stack:
        stack.callback(pool.shutdown, cancel_futures=True)
        stack.enter_context(_single_threaded_library())
        try:
            for item in items:
                pending.append((item, pool.submit(encode, tokenizer, item)))
                yield from yield_finished(2 * jobs + AHEAD)
        except Exception:  # Finish the items that precede the unreadable text.
            yield from yield_finished(0)
            raise
        yield from yield_finished(0)


@contextlib.contextmanager
def _single_threaded_library() -> Iterator[None]:
    """Keeps the tokenizers library from using all cores in each calling thread."""
    name = "TOKENIZERS_PARALLELISM"
    old_value = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if old_value is not None:
            os.environ[name] = old_value


def tokenize_texts(texts: Sequence[str], config: TokenizeConfig, listen: Listener = lambda event: None) -> TokenFolder:
    """Tokenizes files, folders, URLs or named corpora into ``config.out``. Raises the errors of `tokenize`, and
    `UserError` if the folder exists and ``config.resume`` is not set."""
    if config.out is None:
        raise UserError("where should the tokens go?", "name a new folder: gpt tokenize TEXT -o DIR")
    out = Path(config.out)
    with reading(out):
        is_resumed = config.resume and out.is_dir()
    if not is_resumed:
        check_new(out, "choose another --out; if it is unfinished, --resume continues it")
    corpus = open_corpus(texts, config, listen)
    if is_resumed:
        tokenizer = unfinished_folder.check_resumable(out, corpus, config.share)
        if (out / MANIFEST).exists():
            return TokenFolder(out)
    else:
        tokenizer = tokenizer_for(corpus, config, lambda text: listen(events.Note(text)))
    folder = tokenize(corpus, tokenizer, out, config.jobs, config.share, listen)
    for line in repeats.notes(folder):
        listen(events.Note(line))
    return folder


def tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    out: Path,
    jobs: int | None = None,
    share: tuple[int, int] | None = None,
    listen: Listener = lambda event: None,
) -> TokenFolder:
    """Creates the token folder ``out``, or resumes it if it was started with the same text and settings. A ``share`` of
    (I, N) selects part I of N. Finished slices survive errors. Raises `UserError` for unreadable text or if another
    process has locked ``out``, `WorkError` if the disk is full, `Interrupted` after a signal."""
    about = unfinished_folder.provenance(corpus, tokenizer, share)
    i, n = share or (1, 1)
    groups = range(i - 1, len(corpus.groups), n)
    is_resumed = out.exists()
    progress: FinishedSlices = defaultdict(list)
    with contextlib.ExitStack() as stack:
        if is_resumed:
            stack.enter_context(unfinished_folder.locked(out))
            progress = unfinished_folder.read_progress(out, about)
        stop = stack.enter_context(_interruptible(out, progress))
        items = _missing_items(corpus, groups, progress, tokenizer, listen)
        stream = stack.enter_context(contextlib.closing(_encode_items(tokenizer, items, min(jobs or cores(), cores()))))
        first_items = list(islice(stream, 1))
        if not is_resumed:
            _check_disk_space(corpus, first_items, len(groups) / len(corpus.groups), out, listen)
            unfinished_folder.begin(out, about, corpus, tokenizer_files(tokenizer))
            stack.enter_context(unfinished_folder.locked(out))
        writer = unfinished_folder.ShardWriter(out, tokenizer.vocab_size, progress)
        for item, encoded in stop.until_signal(chain(first_items, stream)):
            writer.add(item, encoded)
        unfinished_folder.finish(out, about, progress)
    folder = TokenFolder(out)
    for line in folder.notes():
        listen(events.Note(line))
    return folder


@contextlib.contextmanager
def _interruptible(out: Path, progress: FinishedSlices) -> Iterator[StopSignal]:
    """Yields a `StopSignal`. Raises `Interrupted` after a signal."""
    with StopSignal() as stop:
        try:
            yield stop
        except Stopped:
            assert stop.signum is not None
            summary = f"{counted(len(unfinished_folder.all_slices(progress)), 'slice')} finished in {out}"
            raise Interrupted(stop.signum, f"interrupted; {summary}: continue with --resume") from None


def _missing_items(
    corpus: Corpus, groups: Sequence[int], progress: FinishedSlices, tokenizer: Tokenizer, listen: Listener
) -> Iterator[Item]:
    sizes = [source.size for source in corpus.sources]
    indexes = [index for group in groups for index in corpus.groups[group]]
    *starts, total = accumulate((sizes[index] for index in indexes), initial=0)
    offsets = dict(zip(indexes, starts, strict=True))

    def on_bytes(index: int, position: int) -> None:
        listen(events.Progress("tokenized", offsets[index] + min(position, sizes[index]), total))

    skipped = Skipped(lambda text: listen(events.Note(text)))
    for group in groups:
        slices = progress[group]
        if not unfinished_folder.is_whole(slices):
            finished_items = slices[-1].items if slices else 0
            yield from islice(read_items(corpus, group, tokenizer, on_bytes, skipped), finished_items, None)


def _check_disk_space(
    corpus: Corpus, first_items: list[tuple[Item, EncodedItem]], share: float, out: Path, listen: Listener
) -> None:
    """Estimates the size of the tokens from the first item. Raises `WorkError` if the disk has less free space."""
    size = sum(sum(item.bytes.values()) for item, _ in first_items)
    encoded_size = sum(ids.nbytes for _, encoded in first_items for ids in encoded.ids.values())
    needed = round(corpus.survey.bytes * share * encoded_size / max(1, size))
    parent = next(folder for folder in [out, *out.absolute().parents] if folder.exists())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise WorkError(
            f"the tokens need about {needed / 1e6:,.0f} MB, but only {free / 1e6:,.0f} MB are free at {parent}",
            "free up space, or choose another path with --out",
        )
    if needed > 100_000_000:
        listen(events.Note(f"about {needed / 1e6:,.0f} MB of tokens; {free / 1e6:,.0f} MB are free at {parent}"))
