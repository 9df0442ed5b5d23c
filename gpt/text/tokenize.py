"""Text → a token folder: this thread reads and writes, others encode, all in the order of the text.

The shards depend on the text and the settings alone, not on the number of threads or on interruptions: sources form
groups, a group's text forms items, and a slice (one shard of each side) ends with an item. A finished slice is a line
of ``progress.jsonl``; a resume reads the unfinished group again and encodes what is missing.
"""

import contextlib
import hashlib
import os
import shutil
from collections import deque
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
from gpt.text import unfinished_folder
from gpt.text.corpus import Corpus, Listener, cut_documents, open_corpus
from gpt.text.documents import Chunk, Reader, utf8_size
from gpt.text.shards import Ids, Side, id_type
from gpt.text.token_folder import MANIFEST, SourceRecord, TokenFolder
from gpt.text.tokenizer import Tokenizer
from gpt.text.tokenizer_files import tokenizer_files
from gpt.text.unfinished_folder import EncodedItem, FinishedSlices, Item
from gpt.text.unpack import Source
from gpt.text.vocabulary import tokenizer_for
from gpt.words import counted

ITEM = 2**19  # characters of an item …
ITEM_DOCUMENTS = 4096  # … in at most so many texts

OnBytes = Callable[[int, int], None]  # gets a source's number and its bytes read so far


def read_items(corpus: Corpus, group: int, tokenizer: Tokenizer, on_bytes: OnBytes) -> Iterator[Item]:
    """Yields the items of a group, in order. The last one may be empty."""
    reader = Reader(corpus.reading)
    item, size, cuts, ends = Item(group, 1), 0, 0, 0

    def counts() -> dict[str, int]:
        return {
            "replaced": reader.replaced,
            "skipped": reader.skipped.count,
            "cut_pieces": cuts,
            "end_of_text_in_text": ends,
        }

    for number in corpus.groups[group]:
        source = corpus.sources[number]
        chunks = _Counted(reader.documents(source, partial(on_bytes, number)))
        for text, begins, side, cut in cut_documents(corpus.assign(chunks, number), tokenizer.pattern):
            item.texts.append(text)
            item.begins.append(begins)
            item.sides.append(side)
            item.bytes[side] += utf8_size(text)
            size += len(text)
            cuts += cut
            ends += text.count(tokenizer.eot_token)
            if size >= ITEM or len(item.texts) >= ITEM_DOCUMENTS:
                item.counts = counts()
                yield item
                item, size = Item(group, item.number + 1), 0
        item.sources.append(chunks.record(source, group))
    item.counts, item.last = counts(), True
    yield item


class _Counted:
    """The chunks of a source, with the sha256, bytes and documents of those that were read."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.chunks, self.documents, self.bytes, self.sum = chunks, 0, 0, hashlib.sha256()

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self.chunks:
            data = chunk.text.encode()
            self.sum.update(data)
            self.bytes += len(data)
            self.documents += chunk.begins
            yield chunk

    def record(self, source: Source, group: int) -> SourceRecord:
        sha256 = self.sum.hexdigest()
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


AHEAD = 16  # items in memory beyond two for each thread, to encode while this one writes


def _encoded(tokenizer: Tokenizer, items: Iterable[Item], jobs: int) -> Generator[tuple[Item, EncodedItem], None, None]:
    """Yields every item with its ids, in order. ``jobs`` threads encode: tiktoken and the tokenizers library let other
    threads run meanwhile."""
    tokenizer.encode("")  # what it makes for its first text is made once, and not by each thread
    waiting = deque[tuple[Item, Future[EncodedItem]]]()

    def finished(most: int) -> Iterator[tuple[Item, EncodedItem]]:
        while len(waiting) > most:
            item, done = waiting[0]
            yield item, done.result()
            waiting.popleft()

    pool = ThreadPoolExecutor(jobs)
    with contextlib.ExitStack() as held:
        held.callback(pool.shutdown, cancel_futures=True)
        held.enter_context(_one_thread_a_job())
        try:
            for item in items:
                waiting.append((item, pool.submit(encode, tokenizer, item)))
                yield from finished(2 * jobs + AHEAD)
        except Exception:  # what comes before a text that cannot be read is finished
            yield from finished(0)
            raise
        yield from finished(0)


@contextlib.contextmanager
def _one_thread_a_job() -> Iterator[None]:
    """Keeps the tokenizers library from using all cores for each of the threads that call it."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def tokenize_texts(texts: Sequence[str], config: TokenizeConfig, listen: Listener = lambda event: None) -> TokenFolder:
    """Tokenizes files, folders, addresses or corpora by name into the token folder ``config.out``.

    Raises as `tokenize` does, and `UserError` where the folder is there already and is not to be resumed.
    """
    if config.out is None:
        raise UserError("where should the tokens go?", "name a new folder: gpt tokenize TEXT -o DIR")
    out = Path(config.out)
    with reading(out):
        begun = config.resume and out.is_dir()
    if not begun:
        check_new(out, "choose another --out; if it is unfinished, --resume continues it")
    corpus = open_corpus(texts, config, listen)
    if begun:
        tokenizer = unfinished_folder.check_begun(out, corpus, config.share)
        if (out / MANIFEST).exists():
            return TokenFolder(out)
    else:
        tokenizer = tokenizer_for(corpus, config, lambda text: listen(events.Note(text)))
    return tokenize(corpus, tokenizer, out, config.jobs, config.share, listen)


def tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    out: Path,
    jobs: int | None = None,
    share: tuple[int, int] | None = None,
    listen: Listener = lambda event: None,
) -> TokenFolder:
    """Makes the token folder ``out``, or resumes it where it was begun with the same text and settings.

    ``share``: the I-th of N parts of the sources. Raises `UserError` for text that cannot be read, or where another
    process has ``out``; `WorkError` where the disk is full; `Interrupted` after a signal. Finished slices always stay
    valid.
    """
    about = unfinished_folder.provenance(corpus, tokenizer, share)
    i, n = share or (1, 1)
    mine = range(i - 1, len(corpus.groups), n)
    begun = out.exists()
    done = FinishedSlices()
    with contextlib.ExitStack() as held:
        if begun:
            held.enter_context(unfinished_folder.locked(out))
            done = unfinished_folder.read_progress(out, about)
        stop = held.enter_context(_stopped(out, done))
        items = _items(corpus, mine, done, tokenizer, listen)
        stream = held.enter_context(contextlib.closing(_encoded(tokenizer, items, min(jobs or cores(), cores()))))
        first = list(islice(stream, 1))
        if not begun:
            _check_room(corpus, first, len(mine) / len(corpus.groups), out, listen)
            unfinished_folder.begin(out, about, corpus, tokenizer_files(tokenizer))
            held.enter_context(unfinished_folder.locked(out))
        writer = unfinished_folder.ShardWriter(out, tokenizer.vocab_size, done)
        for item, encoded in stop.watching(chain(first, stream)):
            writer.add(item, encoded)
        unfinished_folder.finish(out, about, done)
    return TokenFolder(out)


@contextlib.contextmanager
def _stopped(out: Path, done: FinishedSlices) -> Iterator[StopSignal]:
    """Yields a `StopSignal`, and raises `Interrupted` where a signal stopped the work."""
    with StopSignal() as stop:
        try:
            yield stop
        except Stopped:
            assert stop.signum is not None
            finished = f"{counted(len(done.all()), 'slice')} finished in {out}"
            raise Interrupted(stop.signum, f"interrupted; {finished}: continue with --resume") from None


def _items(
    corpus: Corpus, groups: Sequence[int], done: FinishedSlices, tokenizer: Tokenizer, listen: Listener
) -> Iterator[Item]:
    """Yields the items that are still to be encoded."""
    sizes = [source.size for source in corpus.sources]
    mine = [number for group in groups for number in corpus.groups[group]]
    *starts, total = accumulate((sizes[number] for number in mine), initial=0)
    before = dict(zip(mine, starts, strict=True))  # bytes

    def on_bytes(number: int, position: int) -> None:
        listen(events.Progress("tokenized", before[number] + min(position, sizes[number]), total))

    for group in groups:
        if not done.is_whole(group):
            yield from islice(read_items(corpus, group, tokenizer, on_bytes), done.items(group), None)


def _check_room(
    corpus: Corpus, first: list[tuple[Item, EncodedItem]], share: float, out: Path, listen: Listener
) -> None:
    """Estimates the size of the tokens from the first item. Raises `WorkError` where the disk has less room."""
    size = sum(sum(item.bytes.values()) for item, _ in first)
    encoded_size = sum(ids.nbytes for _, encoded in first for ids in encoded.ids.values())
    needed = round(corpus.found.bytes * share * encoded_size / max(1, size))
    place = next(folder for folder in [out, *out.absolute().parents] if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise WorkError(
            f"the tokens need about {needed / 1e6:,.0f} MB, but only {free / 1e6:,.0f} MB are free at {place}",
            "free up space, or choose another path with --out",
        )
    if needed > 100_000_000:
        listen(events.Note(f"about {needed / 1e6:,.0f} MB of tokens; {free / 1e6:,.0f} MB are free at {place}"))
