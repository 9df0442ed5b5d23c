"""A bounded sample, spread evenly over texts: what a vocabulary is learnt from."""

from collections.abc import Iterator, Sequence

from gpt.text import readers

BLOCK = 2**16  # characters; the same share of each block is taken


class Sample(Iterator[str]):
    """Parts of texts, as they are asked for: of ``total`` bytes there are ``taken`` so far."""

    def __init__(self, texts: Sequence[str], limit: int) -> None:
        corpus = readers.read(texts)
        self.total = corpus.bytes
        self.taken = 0
        self._limit = min(limit, self.total)
        self._parts = self._spread([document.text for document in corpus.documents])

    def __next__(self) -> str:
        return next(self._parts)

    def _spread(self, documents: Sequence[str]) -> Iterator[str]:
        share = self._limit / self.total
        for text in documents:
            for start in range(0, len(text), BLOCK):
                block = text[start : start + BLOCK]
                data = block[: max(1, round(len(block) * share))].encode()[: self._limit - self.taken]
                self.taken += len(data)
                if data:
                    yield data.decode("utf-8", "ignore")


def sample(texts: Sequence[str], limit: int) -> Sample:
    """At most ``limit`` bytes of the texts that `readers.read` reads, from everywhere in them."""
    return Sample(texts, limit)
