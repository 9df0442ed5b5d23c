"""The data of results, for ``--json``: all commands except ``gpt inspect``, ``params`` and ``report``."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt.corpus.token_folder import TokenFolder
    from gpt.decoding.logits import Token
    from gpt.decoding.write import Piece
    from gpt.documents.catalogue import CatalogueEntry
    from gpt.exporting.export import Exported
    from gpt.insight.evaluate import Evaluation, Window
    from gpt.tokenizers.tokenizer import Tokenizer
    from gpt.training.context import Result

Tree = dict[str, Any]


def pick(source: Any, *names: str) -> Tree:
    """Returns some attributes as a dictionary."""
    return {name: getattr(source, name) for name in names}


def result(result: "Result") -> Tree:
    """Returns the object of ``gpt train --json``."""
    values = asdict(result)
    rewards = {key: value for key, value in (values.pop("rewards") or {}).items() if value is not None}
    for key in ("mfu", "answers", "held_out_answers", "chat"):
        del values[key]
    rounded = {"tokens_per_second": round(result.tokens_per_second, 1), "step_seconds": round(result.step_seconds, 3)}
    paths = {"run": str(result.run), "checkpoint": str(result.checkpoint)}
    return values | paths | rounded | {"verdict": result.verdict} | ({"rewards": rewards} if rewards else {})


def sample(piece: "Piece", prompt: str, seed: int | None, tokenizer: "Tokenizer") -> Tree:
    """Returns an object of ``gpt sample --json`` from the last piece of a text."""
    sample = piece.sample
    assert sample is not None
    values = {"prompt_index": piece.prompt, "index": piece.index, "prompt": prompt}
    values |= pick(sample, "text", "tokens", "logprob", "finish_reason") | {"seed": seed}
    if sample.score is not None:
        values["score"] = sample.score
    for name in ("logprobs", "prompt_logprobs"):
        if (tokens := getattr(sample, name)) is not None:
            values[name] = [_token(token, tokenizer) for token in tokens]
    return values


def _token(token: "Token", tokenizer: "Tokenizer") -> Tree:
    values = {"token": token.id, "text": tokenizer.decode([token.id]), "logprob": token.logprob}
    top = [{"token": id, "text": tokenizer.decode([id]), "logprob": logprob} for id, logprob in token.top]
    return values | ({"top": top} if top else {})


def evaluation(result: "Evaluation") -> Tree:
    """Returns the object of ``gpt eval --json``."""
    keys = ("loss", "perplexity", "bits_per_byte", "word_perplexity", "tokens", "bytes", "words", "stride",
            "block_size")  # fmt: skip
    yardsticks = result.yardsticks and asdict(result.yardsticks)
    return {**pick(result, *keys), "yardsticks": yardsticks, **pick(result, "trend", "verdict")}


def scored_tokens(window: "Window", losses: Any, tokenizer: "Tokenizer") -> Iterator[Tree]:
    """Yields an object for each scored token of a window, for ``gpt eval --per-token``."""
    for at, loss in enumerate(losses.tolist(), window.skipped):
        id = int(window.y[at])
        location = {"document": window.document, "position": window.start + at + 1}
        yield {**location, "token": id, "text": tokenizer.decode([id]), "logprob": -loss}


def exported(exported: "Exported") -> Tree:
    """Returns the object of ``gpt export --json``."""
    return {key: value for key, value in vars(exported).items() if key != "chat"} | {"out": str(exported.out)}


def status(entry: "CatalogueEntry") -> str:
    """Returns a corpus's download status: ``in Python``, ``here``, ``3 of 14 files`` or ``to fetch``."""
    if entry.python:
        return "in Python"
    downloaded = sum(entry.is_cached(file) for file in entry.all_files)
    if downloaded in (0, len(entry.all_files)):
        return "here" if downloaded else "to fetch"
    return f"{downloaded} of {len(entry.all_files)} files"


def corpus_summary(entry: "CatalogueEntry") -> Tree:
    """Returns an object of ``gpt data list --json``."""
    values = pick(entry, "name", "title", "license", "language", "homepage", "field", "rows", "size")
    return values | {"status": status(entry), "folder": None if entry.python else str(entry.folder)}


def corpus(entry: "CatalogueEntry") -> Tree:
    """Returns the object of ``gpt data show --json`` for a corpus."""
    files = [
        {
            "name": file.name,
            "split": "val" if file in entry.val else "train",
            **pick(file, "url", "size", "sha256"),
            "path": str(entry.folder / file.name),
            "here": entry.is_cached(file),
        }
        for file in entry.all_files
    ]
    return {**corpus_summary(entry), "about": entry.about, "files": files}


def fetched(entry: "CatalogueEntry", seconds: float, train: str) -> Tree:
    """Returns the object of ``gpt data fetch --json``."""
    files = [entry.folder / file.name for file in entry.all_files]
    folder, size = None if entry.python else str(entry.folder), sum(path.stat().st_size for path in files)
    values = {"name": entry.name, "folder": folder, "files": [str(path) for path in files], "bytes": size}
    return {**values, "seconds": round(seconds, 2), "train": train}


def tokens(folder: "TokenFolder", seconds: float, is_resumed: bool) -> Tree:
    """Returns the object of ``gpt tokenize --json``. The throughput of a resumed command is unknown."""
    return {
        "out": str(folder.path),
        **pick(folder, "documents", "bytes", "tokens"),
        "shards": len(folder.shards),
        "vocab_size": folder.tokenizer.vocab_size,
        "tokenizer": folder.tokenizer.name,
        "seconds": round(seconds, 2),
        "bytes_per_second": None if is_resumed else round(folder.bytes / max(seconds, 1e-9), 1),
        **{key: folder.manifest[key] for key in ("replaced", "skipped")},
    }


def trained_tokenizer(tokenizer: "Tokenizer", out: Path, sampled: int, total: int, seconds: float) -> Tree:
    """Returns the object of ``gpt tokenizer train --json``."""
    sizes = {"sampled_bytes": sampled, "bytes": total, "seconds": round(seconds, 2)}
    return {"out": str(out), **_tokenizer(tokenizer), "fingerprint": tokenizer.fingerprint, **sizes}


def _tokenizer(tokenizer: "Tokenizer") -> Tree:
    sizes = {"vocab_size": tokenizer.vocab_size, "end_of_text": tokenizer.eot}
    return {**sizes, "specials": dict(tokenizer.specials)}


def vocabulary(tokenizer: "Tokenizer", longest: int) -> Tree:
    """Returns the object of ``gpt tokenizer show --json``."""
    from gpt.corpus import vocabulary

    tokens = vocabulary.find_longest(tokenizer, longest)
    return {
        "name": tokenizer.name,
        **_tokenizer(tokenizer),
        "bos": tokenizer.bos,
        "ends": sorted(tokenizer.ends),
        **pick(tokenizer, "pattern", "fingerprint"),
        "longest": [{"id": id, "bytes": len(token), "text": vocabulary.to_printable(token)} for id, token in tokens],
    }


def encoded(words: str, ids: Sequence[int], tokenizer: "Tokenizer", name: str) -> Tree:
    """Returns the object of ``gpt tokenizer encode --json``, which its page shows too."""
    from gpt.corpus.vocabulary import to_printable

    pieces = [to_printable(tokenizer.decode_bytes([id])) for id in ids]
    return {"model": name, "tokens": ids, "pieces": pieces, "bytes": len(words.encode())}
