"""Text → a token folder: this process reads and writes, others encode, all in the order of the text.

The shards depend on the text and the settings alone, not on the number of processes or on interruptions: sources form
groups, a group's text forms items, and a slice (one shard of each side) ends with an item. A finished slice is a line
of ``progress.jsonl``; a resume reads the unfinished group again and encodes what is missing.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, islice
from pathlib import Path

from gpt import events
from gpt.config import TokenizeConfig
from gpt.errors import Interrupted, UserError, WorkError
from gpt.files import check_new, reading
from gpt.interrupt import Stopped, StopSignal
from gpt.peaks import cores
from gpt.text import unfinished_folder
from gpt.text.corpus import Corpus, Listener, cut_documents, open_corpus
from gpt.text.documents import Chunk, Reader, utf8_size
from gpt.text.encoders import EncodedItem, Encoders, Item
from gpt.text.token_folder import MANIFEST, SourceRecord, TokenFolder
from gpt.text.tokenizer import Tokenizer
from gpt.text.tokenizer_files import tokenizer_files
from gpt.text.unfinished_folder import FinishedSlices, ItemEnd
from gpt.text.unpack import Source
from gpt.text.vocabulary import tokenizer_for
from gpt.words import counted

ITEM = 2**19  # characters of an item …
ITEM_DOCUMENTS = 4096  # … in at most so many texts

OnBytes = Callable[[int, int], None]  # gets a source's number and its bytes read so far


def read_items(corpus: Corpus, group: int, pattern: str, on_bytes: OnBytes) -> Iterator[tuple[Item, ItemEnd]]:
    """Yields the items of a group, in order. The last one may be empty."""
    reader = Reader(corpus.reading)
    item, end, size, cuts = Item(), ItemEnd(group, 1), 0, 0

    def counts() -> dict[str, int]:
        return {"replaced": reader.replaced, "skipped": reader.skipped.count, "cut_pieces": cuts}

    for number in corpus.groups[group]:
        source = _Source(corpus, number, reader, on_bytes)
        for text, begins, side, cut in cut_documents(source.assigned(), pattern):
            item.texts.append(text)
            item.begins.append(begins)
            item.sides.append(side)
            end.bytes[side] += utf8_size(text)
            size += len(text)
            cuts += cut
            if size >= ITEM or len(item.texts) >= ITEM_DOCUMENTS:
                end.counts = counts()
                yield item, end
                item, end, size = Item(), ItemEnd(group, end.items + 1), 0
        end.sources.append(source.record(group))
    end.counts, end.last = counts(), True
    yield item, end


class _Source:
    """A source that is being read: the sha256, bytes and documents of its text."""

    def __init__(self, corpus: Corpus, number: int, reader: Reader, on_bytes: OnBytes) -> None:
        self.source: Source = corpus.sources[number]
        self.corpus, self.number, self.reader, self.on_bytes = corpus, number, reader, on_bytes
        self.documents = self.bytes = 0
        self.sum = hashlib.sha256()

    def assigned(self) -> Iterator[tuple[Chunk, bool]]:
        return iter(self.corpus.assign(self._counted(), self.number))

    def _counted(self) -> Iterator[Chunk]:
        for chunk in self.reader.documents(self.source, lambda position: self.on_bytes(self.number, position)):
            data = chunk.text.encode()
            self.sum.update(data)
            self.bytes += len(data)
            self.documents += chunk.begins
            yield chunk

    def record(self, group: int) -> SourceRecord:
        source = self.source
        return SourceRecord(
            group, source.name, source.size, source.time, self.documents, self.bytes, self.sum.hexdigest()
        )


INLINE_BYTES = 4_000_000  # of text; for less, starting processes takes longer than the work
MOST_PER_CORE = 2  # processes; a thousand on two cores take minutes to start, and gain nothing


def tokenize_texts(texts: Sequence[str], config: TokenizeConfig, listen: Listener = lambda event: None) -> TokenFolder:
    """Tokenizes files, folders, addresses or corpora by name into the token folder ``config.out``.

    Raises as `tokenize` does, and `UserError` where the folder is there already and is not to be resumed.
    """
    if config.out is None:
        raise UserError("where should the tokens go?", "name a new folder: gpt tokenize TEXT -o DIR")
    out, note = Path(config.out), lambda text: listen(events.Note(text))
    with reading(out):
        begun = config.resume and out.is_dir()
    if not begun:
        check_new(out, "give another --out; where it is unfinished, --resume continues it")
    corpus = open_corpus(texts, config, listen)
    with Encoders(_jobs(config.jobs, corpus), note) as encoders:
        if begun:
            tokenizer = unfinished_folder.check_begun(out, corpus, config.share)
            if (out / MANIFEST).exists():
                return TokenFolder(out)
        else:
            tokenizer = tokenizer_for(corpus, config, note)
        return tokenize(corpus, tokenizer, out, encoders=encoders, share=config.share, listen=listen)


def tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    out: Path,
    jobs: int | None = None,
    share: tuple[int, int] | None = None,
    listen: Listener = lambda event: None,
    encoders: Encoders | None = None,
) -> TokenFolder:
    """Makes the token folder ``out``, or resumes it where it was begun with the same text and settings.

    ``share``: the I-th of N parts of the sources. ``encoders``: processes that were started before, instead of
    ``jobs``. Raises `UserError` for text that cannot be read, or where another process has ``out``; `WorkError` where
    the disk is full; `Interrupted` after a signal. Finished slices always stay valid.
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
        items = _items(corpus, mine, done, tokenizer.pattern, listen)
        encoders = encoders or held.enter_context(Encoders(_jobs(jobs, corpus), lambda text: listen(events.Note(text))))
        stop = held.enter_context(_stopped(out, done))
        stream = encoders.encode(tokenizer, items)
        described = None if begun else tokenizer_files(tokenizer)  # half a second, while processes start and encode
        first = list(islice(stream, 1))
        if described is not None:
            _check_room(corpus, first, len(mine) / len(corpus.groups), out, listen)
            unfinished_folder.begin(out, about, corpus, described)
            held.enter_context(unfinished_folder.locked(out))
        writer = unfinished_folder.ShardWriter(out, tokenizer.vocab_size, done)
        for end, encoded in stop.watching(chain(first, stream)):
            writer.add(end, encoded)
        unfinished_folder.finish(out, about, done)
        unfinished_folder.finish(out, about, done)
    return TokenFolder(out)


@contextlib.contextmanager
def _stopped(out: Path, done: FinishedSlices) -> Iterator[StopSignal]:
    """Yields a `StopSignal`, and raises `Interrupted` where a signal stopped the work. It may have ended processes that
    encode as well: `timeout` sends it to the whole process group."""
    with StopSignal() as stop:
        try:
            yield stop
        except (Stopped, WorkError):
            if stop.signum is None:
                raise
            finished = f"{counted(len(done.all()), 'slice')} finished in {out}"
            raise Interrupted(stop.signum, f"interrupted; {finished}: continue with --resume") from None


def _items(
    corpus: Corpus, groups: Sequence[int], done: FinishedSlices, pattern: str, listen: Listener
) -> Iterator[tuple[Item, ItemEnd]]:
    """Yields the items that are still to be encoded."""
    sizes = [source.size for source in corpus.sources]
    mine = [number for group in groups for number in corpus.groups[group]]
    *starts, total = accumulate((sizes[number] for number in mine), initial=0)
    before = dict(zip(mine, starts, strict=True))  # bytes

    def on_bytes(number: int, position: int) -> None:
        listen(events.Progress("tokenized", before[number] + min(position, sizes[number]), total))

    for group in groups:
        if not done.is_whole(group):
            yield from islice(read_items(corpus, group, pattern, on_bytes), done.items(group), None)


def _jobs(asked: int | None, corpus: Corpus) -> int:
    """Returns the number of processes: one per core, or 1 (this one) for a small text."""
    if asked is None:
        return cores() if corpus.found.bytes > INLINE_BYTES else 1
    return min(asked, MOST_PER_CORE * cores())


def _check_room(
    corpus: Corpus, first: list[tuple[ItemEnd, EncodedItem]], share: float, out: Path, listen: Listener
) -> None:
    """Estimates the size of the tokens from the first item. Raises `WorkError` where the disk has less room."""
    size = sum(sum(end.bytes.values()) for end, _ in first)
    encoded_size = sum(ids.nbytes for _, encoded in first for ids in encoded.ids.values())
    needed = round(corpus.found.bytes * share * encoded_size / max(1, size))
    place = next(folder for folder in [out, *out.absolute().parents] if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise WorkError(
            f"the tokens need about {needed / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free at {place}",
            "make room, or give another place with --out",
        )
    if needed > 100_000_000:
        listen(events.Note(f"about {needed / 1e6:,.0f} MB of tokens; {free / 1e6:,.0f} MB are free at {place}"))
