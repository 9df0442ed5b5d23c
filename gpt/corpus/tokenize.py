"""Tokenizes text into a token folder. The main thread reads and writes in text order; worker threads encode.

The shards depend only on the text and the settings, not on the number of threads or on interruptions. When a group of
documents is complete, its shards and a line of ``progress.jsonl`` are written. A resume reads the first unfinished
source again and encodes what is missing.
"""

import contextlib
import hashlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path

import numpy as np

from gpt.config import events
from gpt.config.text import TokenizeConfig
from gpt.corpus import repeats, unfinished_folder
from gpt.corpus.corpus import Corpus, Listener, cut_documents, open_corpus
from gpt.corpus.shards import Ids, Side, id_type
from gpt.corpus.token_folder import SourceRecord, TokenFolder
from gpt.corpus.unfinished_folder import Batch, Group
from gpt.corpus.vocabulary import tokenizer_for
from gpt.documents.documents import Chunk, Reader, Skipped, utf8_size
from gpt.documents.download import check_space
from gpt.documents.sources import MANIFEST
from gpt.documents.unpack import Source
from gpt.system.errors import Interrupted, UserError
from gpt.system.files import check_new, reading
from gpt.system.interrupt import Stopped, StopSignal
from gpt.system.peaks import cores
from gpt.system.words import counted
from gpt.tokenizers.saving import tokenizer_files
from gpt.tokenizers.tokenizer import Tokenizer

BATCH = 2**19  # Target size of a batch in characters.
BATCH_TEXTS = 4096  # Maximum number of texts in a batch.


def read_batches(
    corpus: Corpus, tokenizer: Tokenizer, groups: Sequence[Group], listen: Listener, named: int
) -> Iterator[Batch]:
    """Yields the text after the finished ``groups`` in batches."""
    skipped = Skipped(corpus.reading.skip_bad, lambda text: listen(events.Note(text)), named)
    reader, specials = Reader(corpus.reading, skipped), tokenizer.special_pattern()
    first, texts_done = (groups[-1].source, groups[-1].texts_read) if groups else (0, 0)
    *starts, total = accumulate((source.size for source in corpus.sources), initial=0)

    def on_bytes(index: int, position: int) -> None:
        listen(events.Progress("tokenized", starts[index] + min(position, corpus.sources[index].size), total))

    batch, size = Batch(), 0
    for index, source in list(enumerate(corpus.sources))[first:]:
        replaced_before, skipped_before, cuts, special_count = reader.replaced, reader.skipped.count, 0, 0
        chunks = _CountedChunks(reader.documents(source, partial(on_bytes, index)))
        parts = cut_documents(corpus.assign(chunks, index), tokenizer.pattern)
        for number, (text, begins, side, cut) in enumerate(parts, 1):
            cuts += cut
            special_count += sum(1 for _ in specials.finditer(text))
            if index == first and number <= texts_done:
                continue
            batch.texts.append(text)
            batch.begins.append(begins)
            batch.sides.append(side)
            batch.bytes[side] += utf8_size(text)
            size += len(text)
            if size >= BATCH or len(batch.texts) >= BATCH_TEXTS:
                batch.source, batch.texts_read = index, number
                yield batch
                batch, size = Batch(), 0
        batch.sources.append(chunks.record(source))
        batch.counts["replaced"] += reader.replaced - replaced_before
        batch.counts["skipped"] += reader.skipped.count - skipped_before
        batch.counts["cut_pieces"] += cuts
        batch.counts["end_of_text_in_text"] += special_count
    if batch.sources:
        batch.source = len(corpus.sources)
        yield batch


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

    def record(self, source: Source) -> SourceRecord:
        return SourceRecord(source.name, source.size, source.time, self.documents, self.bytes, self.digest.hexdigest())


def encode(tokenizer: Tokenizer, batch: Batch) -> None:
    """Encodes the texts of a batch, and drops them."""
    dtype = id_type(tokenizer.vocab_size)
    opening = np.array(tokenizer.opening, dtype)
    parts: dict[Side, list[Ids]] = {"train": [], "val": []}
    lengths = dict.fromkeys(parts, 0)
    for ids, begins, side in zip(tokenizer.encode_all(batch.texts), batch.begins, batch.sides, strict=True):
        if begins:
            batch.offsets[side].append(lengths[side])
            parts[side].append(opening)
        parts[side].append(ids.astype(dtype))
        lengths[side] += len(ids) + begins * len(opening)
    batch.ids = {side: np.concatenate(arrays) for side, arrays in parts.items() if arrays}
    batch.texts = []


AHEAD = 16  # Batches in memory in addition to two per worker. They keep workers busy while the main thread writes.


def _encode_batches(tokenizer: Tokenizer, batches: Iterable[Batch], jobs: int) -> Generator[Batch, None, None]:
    """Yields every batch with its ids, in order. Encodes in ``jobs`` threads, because tiktoken and the tokenizers
    library release the GIL."""
    tokenizer.encode("")  # Initializes the tokenizer before the threads start.
    pending = deque[tuple[Batch, Future[None]]]()

    def yield_finished(max_pending: int) -> Iterator[Batch]:
        while len(pending) > max_pending:
            batch, future = pending[0]
            future.result()
            yield batch
            pending.popleft()

    pool = ThreadPoolExecutor(jobs)
    with contextlib.ExitStack() as stack:
        stack.callback(pool.shutdown, cancel_futures=True)
        try:
            for batch in batches:
                pending.append((batch, pool.submit(encode, tokenizer, batch)))
                yield from yield_finished(2 * jobs + AHEAD)
        except Exception:  # Finish the batches that precede the unreadable text.
            yield from yield_finished(0)
            raise
        yield from yield_finished(0)


def tokenize_texts(
    texts: Sequence[str],
    config: TokenizeConfig,
    listen: Listener = lambda event: None,
    named: int = Skipped.limit,
) -> TokenFolder:
    """Tokenizes files, folders, URLs or named corpora into ``config.out``. ``listen`` receives the names of at most
    ``named`` skipped files. Raises the errors of `tokenize`, and `UserError` if the folder exists and
    ``config.resume`` is not set."""
    if config.out is None:
        raise UserError("where should the tokens go?", "name a new folder: gpt tokenize TEXT -o DIR")
    out = Path(config.out)
    with reading(out):
        is_resumed = config.resume and out.is_dir()
    if not is_resumed:
        check_new(out, "choose another --out; if it is unfinished, --resume continues it")
    corpus = open_corpus(texts, config, listen, named)
    if is_resumed:
        tokenizer = unfinished_folder.check_resumable(out, corpus)
        if (out / MANIFEST).exists():
            return TokenFolder(out)
    else:
        tokenizer = tokenizer_for(corpus, config, lambda text: listen(events.Note(text)))
    folder = tokenize(corpus, tokenizer, out, config.jobs, listen, named)
    for line in repeats.notes(folder):
        listen(events.Note(line))
    return folder


def tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    out: Path,
    jobs: int | None = None,
    listen: Listener = lambda event: None,
    named: int = Skipped.limit,
) -> TokenFolder:
    """Creates the token folder ``out``, or resumes it if it was started with the same text and settings. Finished
    shards survive errors. Raises `UserError` for unreadable text or if another process has locked ``out``, `WorkError`
    if the disk is full, `Interrupted` after a signal."""
    about = unfinished_folder.provenance(corpus, tokenizer)
    is_resumed = out.exists()
    groups: list[Group] = []
    with contextlib.ExitStack() as stack:
        if is_resumed:
            stack.enter_context(unfinished_folder.locked(out))
            groups = unfinished_folder.read_progress(out, about)
        stop = stack.enter_context(_interruptible(out, groups))
        batches = read_batches(corpus, tokenizer, groups, listen, named)
        stream = _encode_batches(tokenizer, batches, min(jobs or cores(), cores()))
        stack.enter_context(contextlib.closing(stream))
        first_batches = list(islice(stream, 1))
        if not is_resumed:
            check_space(out, _estimate_size(corpus, first_batches), "choose another path with --out")
            unfinished_folder.begin(out, about, corpus, tokenizer_files(tokenizer))
            stack.enter_context(unfinished_folder.locked(out))
        writer = unfinished_folder.ShardWriter(out, tokenizer.vocab_size, groups)
        for batch in stop.until_signal(chain(first_batches, stream)):
            writer.add(batch)
        writer.finish_group()
        unfinished_folder.finish(out, about, groups)
    folder = TokenFolder(out)
    for line in folder.notes():
        listen(events.Note(line))
    return folder


@contextlib.contextmanager
def _interruptible(out: Path, groups: Sequence[Group]) -> Iterator[StopSignal]:
    """Yields a `StopSignal`. Raises `Interrupted` after a signal."""
    with StopSignal() as stop:
        try:
            yield stop
        except Stopped:
            assert stop.signum is not None
            summary = f"{counted(sum(len(group.shards) for group in groups), 'shard')} finished in {out}"
            raise Interrupted(stop.signum, f"interrupted; {summary}: continue with --resume") from None


def _estimate_size(corpus: Corpus, first_batches: Sequence[Batch]) -> int:
    """Returns the size of the tokens in bytes, estimated from the first batch."""
    size = sum(batch.bytes.total() for batch in first_batches)
    encoded_size = sum(ids.nbytes for batch in first_batches for ids in batch.ids.values())
    return round(corpus.survey.bytes * encoded_size / max(1, size))
