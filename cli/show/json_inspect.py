"""The data of ``gpt inspect``, for ``--json`` and pages."""

from typing import TYPE_CHECKING, Any

import numpy as np

from gpt.insight import inspect
from gpt.system.errors import UserError

from .page import pack_array

if TYPE_CHECKING:
    from gpt.tokenizers.tokenizer import Tokenizer

MAX_PAGE_BYTES = 96 * 2**20  # Maximum bytes of patterns on a page; browsers are slow long before that.
MAX_NEXT_TOKENS = 100  # Number of most likely next tokens to list.
Tree = dict[str, Any]


def _round(array: Any, digits: int = 6) -> Any:
    return np.round(np.asarray(array, np.float64), digits).tolist()


def attention_data(inspection: inspect.Inspection, tokenizer: "Tokenizer", model: str, prompt: str) -> Tree:
    """Returns the object of ``gpt inspect attention --json``."""

    def text(id: Any) -> str:
        return inspect.token_text(tokenizer, int(id))

    def likely(ids: Any, shares: Any) -> list[Tree]:
        pairs = zip(ids, shares, strict=True)
        return [{"token": int(id), "text": text(id), "probability": round(float(p), 6)} for id, p in pairs]

    layers = zip(inspection.lens.ids, inspection.lens.probabilities, strict=True)
    logits = inspection.logits.astype(np.float64)
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    best = np.argsort(-logits, kind="stable")[:MAX_NEXT_TOKENS]
    return {
        "model": model,
        "prompt": prompt,
        "dropped": inspection.dropped,
        "tokens": inspection.ids.tolist(),
        "pieces": [text(id) for id in inspection.ids],
        "layers": inspection.layers,
        "heads": inspection.heads,
        "patterns": _round(inspection.patterns),  # (layers, heads, queries, keys)
        "scores": _scores(inspection),
        "chance": _chance(inspection, 0),
        "lens": [[likely(*position) for position in zip(*layer, strict=True)] for layer in layers],
        "next": [
            {"token": int(id), "text": text(id), "logit": float(logits[id]), "probability": float(probabilities[id])}
            for id in best
        ],
    }


def _chance(inspection: inspect.Inspection, at: int) -> Tree:
    """Returns the scores that uniform attention would have in layer ``at``."""
    return {
        name: {kind: None if uniform is None else float(uniform[at]) for kind, uniform in measured.chance.items()}
        for name, measured in {"prompt": inspection.here, "probe": inspection.probe}.items()
    }


def _scores(inspection: inspect.Inspection) -> list[Tree]:
    here, probe = inspection.here, inspection.probe

    def rounded(scores: Any, at: int, column: int) -> float | None:
        return None if scores is None else round(float(scores[at, column]), 6)

    return [
        {
            "layer": layer,
            "head": head,
            "window": inspection.windows[at],
            "mostly": inspect.find_dominant_kind(here, probe, at, column),
            "entropy": rounded(here.entropy, at, column),
            "distance": rounded(here.distance, at, column),
            "prompt": {kind: rounded(scores, at, column) for kind, scores in here.scores.items()},
            "probe": {kind: rounded(scores, at, column) for kind, scores in probe.scores.items()},
            "chance": _chance(inspection, at),
        }
        for at, layer in enumerate(inspection.layers)
        for column, head in enumerate(inspection.heads)
    ]


def attention_page(inspection: inspect.Inspection, tokenizer: "Tokenizer", model: str) -> Tree:
    """Returns the data of ``pages/attention.js``. Packs attention weights in 16 bits to save space. Raises `UserError`
    for a page too large for browsers."""
    T = len(inspection.ids)
    lower = inspection.patterns[..., np.tri(T, dtype=np.bool_)]  # (layers, heads, T (T + 1) / 2)
    if 2 * lower.size > MAX_PAGE_BYTES:
        raise UserError(
            f"the page would contain {lower.size:,} weights for {T:,} tokens, {8 * lower.size // 3 / 2**20:,.0f} MB",
            "use a shorter prompt, a single --layer, or --json",
        )
    best = np.argsort(-inspection.logits, kind="stable")[:MAX_NEXT_TOKENS]
    shown = np.unique(np.concatenate([inspection.lens.ids.ravel(), best])).tolist()
    return {
        "model": model,
        "dropped": inspection.dropped,
        "tokens": [{"id": int(id), "text": inspect.token_text(tokenizer, int(id))} for id in inspection.ids],
        "layers": inspection.layers,
        "heads": inspection.heads,
        "patterns": pack_array(np.rint(lower * 65535).astype(np.uint16)),
        "kinds": inspect.KINDS,
        "scores": _scores(inspection),
        "clearest": inspection.clearest,
        "windows": inspection.windows,
        "lens": {"ids": inspection.lens.ids.tolist(), "probabilities": _round(inspection.lens.probabilities, 5)},
        "texts": {str(id): inspect.token_text(tokenizer, id) for id in shown},
        "next": {"logits": pack_array(inspection.logits.astype(np.float32))},
    }


def neighbors_data(words: list[inspect.Word], count: int, table: inspect.Embeddings, model: str) -> Tree:
    """Returns the object of ``gpt inspect neighbors --json``."""
    entries = []
    for word in words:
        pieces = [inspect.token_text(table.tokenizer, id) for id in word.ids]
        nearest = table.neighbors(word, count)
        neighbors = [{"token": near.id, "text": near.text, "cosine": round(near.cosine, 6)} for near in nearest]
        entries.append({"word": word.text, "tokens": word.ids, "pieces": pieces, "neighbors": neighbors})
    return {"model": model, "words": entries}


def near_group(entry: Tree) -> Tree:
    """Returns a word's nearest tokens for the page, with a note on how the word was encoded."""
    word, pieces = entry["word"], entry["pieces"]
    note = f'"{word}", one token'
    if len(pieces) > 1:
        quoted = " ".join(f'"{piece}"' for piece in pieces)
        note = f'"{word}" is {len(pieces)} tokens, represented by their mean: {quoted}'
    return {"title": word.strip(), "note": note, "near": entry["neighbors"]}
