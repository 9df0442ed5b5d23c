"""Inspects a decoder: attention patterns, logit lens, head scores, embedding neighbors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn as nn
from torch import Tensor

from gpt.corpus.vocabulary import to_printable
from gpt.model.decoder import GPT, Attention, Block
from gpt.system.errors import NotANumber, UserError, check_text
from gpt.system.peaks import host_memory
from gpt.tokenizers.tokenizer import Tokenizer

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Masks = dict[str, npt.NDArray[np.bool_]]
Module = TypeVar("Module", bound=nn.Module)

# Kinds of keys that a head can attend to, with descriptions.
KINDS = {
    "previous": "the token before",
    "first": "the first token",
    "itself": "the token itself",
    "same": "an earlier copy of the same token",
    "matching": "what came after the same token earlier (induction)",
}
MIN_LIFT = 0.25  # Minimum lift of a head's dominant kind.
PROBE_TOKENS = 50  # Number of random ids that the probe repeats.
LAYER_COPIES = 4  # Copies of a layer's patterns that are in memory next to all patterns.


@dataclass(frozen=True)
class Trace:
    """Attention patterns, residual stream and logits of T ids. A pattern has a row per query and a column per key. Rows
    sum to 1; later keys have weight 0. `trace` can omit queries and layers."""

    ids: Ints  # (T)
    patterns: Floats  # (layers, H, T, T)
    residual: Tensor  # (L + 1, T, C), after the embedding and after each block
    logits: Tensor  # (T, V)


@torch.inference_mode()
def trace(
    model: GPT, ids: Sequence[int] | Ints, layers: Sequence[int] | None = None, queries: slice = slice(None)
) -> Trace:
    """Runs the model over ids (T) and returns its activations. Keeps the patterns of ``layers``, and the patterns and
    logits of ``queries``, by default all. The model may be laid out for decoding.

    Raises ValueError for more ids than the context holds, and `NotANumber` for NaN or infinite logits.
    """
    selected_layers = list(range(model.config.n_layer)) if layers is None else list(layers)
    idx = torch.as_tensor(np.asarray(ids, np.int64), device=model.ln_f.weight.device)[None]
    size = idx.size(1)
    patterns = np.empty((len(selected_layers), model.config.n_head, len(range(size)[queries]), size), np.float32)
    residual: list[Tensor] = []
    training = model.training
    model.eval()
    try:
        x, rope = model.embed(idx)
        for layer, block in enumerate(model.h):
            residual.append(x[0])
            if layer in selected_layers:
                pattern = _find_module(block, Attention).pattern(_find_module(block, Block).ln_1(x), rope)
                patterns[selected_layers.index(layer)] = pattern[0, :, queries].cpu()
                del pattern
            x = block(x, layer, rope)
        residual.append(x[0])
        logits = _check_finite("logits", model.unembed(model.last_norm(x[:, queries]))[0].float())
    finally:
        model.train(training)
    return Trace(idx[0].cpu().numpy(), patterns, torch.stack(residual), logits)


def _find_module(block: nn.Module, kind: type[Module]) -> Module:
    """Returns the block's module of a class. `gpt.decoding` can wrap a block and bypass its attributes."""
    return next(module for module in block.modules() if isinstance(module, kind))


def _check_finite(what: str, tensor: Tensor) -> Tensor:
    """Returns the tensor. Raises `NotANumber` for NaN or infinite elements."""
    invalid = tensor.numel() - int(tensor.isfinite().sum())
    if invalid:
        raise NotANumber(f"{invalid:,} of {tensor.numel():,} {what} of the model are NaN or infinite")
    return tensor


@dataclass(frozen=True)
class Lens:
    """The logit lens (nostalgebraist 2020): the most likely next tokens after the embedding (row 0) and after each
    block. The final norm and the unembedding read them from the residual stream at that point. The last row is the
    model's prediction."""

    ids: Ints  # (L + 1, T, K), most likely first
    probabilities: Floats  # (L + 1, T, K)


@torch.inference_mode()
def lens(model: GPT, residual: Tensor, top: int = 5) -> Lens:
    """Applies the logit lens to the residual stream (L + 1, T, C)."""
    ids, probabilities = [], []
    for x in residual:  # One layer at a time, because logits are wide.
        best = model.unembed(model.ln_f(x)).float().softmax(-1).topk(min(top, model.config.vocab_size), dim=-1)
        ids.append(best.indices.cpu().numpy())
        probabilities.append(best.values.cpu().numpy())
    return Lens(np.stack(ids), np.stack(probabilities))


@dataclass(frozen=True)
class HeadScores:
    """``scores`` has the share of attention that each head (layers, H) gives to each kind of keys, averaged over
    queries with a key of this kind. ``chance`` has the share that uniform attention within the layer's window would
    give. Without a query that has such a key, the values of a kind are None."""

    scores: dict[str, Floats | None]
    chance: dict[str, Floats | None]  # (layers)
    entropy: Floats  # (layers, H), in bits, averaged over queries
    distance: Floats  # (layers, H), average tokens from query to key

    def lift(self, kind: str) -> Floats | None:
        """Returns the score rescaled to 0 for uniform attention and 1 for attention to this kind only."""
        score, chance = self.scores[kind], self.chance[kind]
        if score is None or chance is None:
            return None
        uniform = chance[:, None]
        # In a window of 1, chance is 1, so avoid a division by 0.
        lifted: Floats = ((score - uniform) / np.maximum(1 - uniform, 1e-9)).astype(np.float32)
        return lifted


def head_scores(patterns: Floats, ids: Ints, windows: Sequence[int | None] | None = None) -> HeadScores:
    """Scores heads by their patterns (layers, H, T, T) over ids (T), given each layer's sliding window, or None for
    full attention."""
    T = len(ids)
    window_sizes = np.array([min(window or T, T) for window in windows or [None] * len(patterns)])[:, None, None]
    distance = np.arange(T)[:, None] - np.arange(T)
    attended = (distance >= 0) & (distance < window_sizes)  # (layers, T, T)
    scores: dict[str, Floats | None] = {}
    chance: dict[str, Floats | None] = {}
    for kind, mask in _masks(ids).items():
        has_key = mask.any(axis=1)
        scores[kind] = chance[kind] = None
        if has_key.any():
            scores[kind] = np.stack([(layer * mask).sum(axis=-1)[:, has_key].mean(axis=-1) for layer in patterns])
            uniform = (mask & attended).sum(axis=-1) / attended.sum(axis=-1)
            chance[kind] = uniform[:, has_key].mean(axis=-1)
    entropy, distances = [], []
    for layer in patterns:  # One layer at a time, because patterns are large.
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy.append(np.where(layer > 0, -layer * np.log2(layer), 0).sum(axis=-1).mean(axis=-1))
        distances.append((layer * distance).sum(axis=-1).mean(axis=-1))
    return HeadScores(scores, chance, np.stack(entropy), np.stack(distances))


def _masks(ids: Ints) -> Masks:
    """Returns a (T, T) mask per kind: whether a key (column) is of this kind for a query (row). Skips the first two
    queries, whose few keys belong to several kinds."""
    T = len(ids)
    query, key = np.arange(T)[:, None], np.arange(T)[None]
    earlier = (key < query) & (query >= 2)
    equal = ids[:, None] == ids[None]
    after_equal = np.zeros((T, T), np.bool_)
    after_equal[:, 1:] = equal[:, :-1]
    return {
        "previous": earlier & (key == query - 1),
        "first": earlier & (key == 0),
        "itself": (key == query) & (query >= 2),
        "same": earlier & equal,
        "matching": earlier & after_equal,
    }


def probe_ids(tokenizer: Tokenizer, block_size: int) -> Ints:
    """Returns fixed random ids, repeated once and truncated to ``block_size``. They reveal induction heads (Olsson et
    al. 2022, "In-context Learning and Induction Heads")."""
    known_ids = np.array(sorted(tokenizer.backend.pieces), np.int64)
    count = max(1, min(PROBE_TOKENS, block_size // 2, len(known_ids)))
    sample = np.random.default_rng(0).choice(known_ids, count, replace=False)
    return np.tile(sample, 2)[:block_size]


def find_dominant_kind(here: HeadScores, probe: HeadScores, layer: int, head: int) -> str | None:
    """Returns the kind of keys with a head's highest lift, or None if no kind is clear. A kind without keys in the
    prompt is scored on the probe."""
    lifts = {}
    for kind in KINDS:
        lift = here.lift(kind)
        lift = probe.lift(kind) if lift is None else lift
        if lift is not None:
            lifts[kind] = float(lift[layer, head])
    best = max(lifts, key=lambda kind: lifts[kind], default=None)
    return best if best is not None and lifts[best] >= MIN_LIFT else None


@dataclass(frozen=True)
class Inspection:
    """Patterns, head scores and logit lens for a prompt, in the selected ``layers`` and ``heads``."""

    ids: Ints  # (T), truncated from the left to the context
    dropped: int  # number of truncated ids
    layers: list[int]
    heads: list[int]
    windows: list[int | None]  # windows of the selected layers
    patterns: Floats  # (len(layers), len(heads), T, T)
    here: HeadScores  # scores on the prompt
    probe: HeadScores  # scores on the probe
    lens: Lens
    probabilities: Floats  # (T - 1), of each id after the first, given the ids before
    logits: Floats  # (V), for the next token

    @property
    def clearest(self) -> tuple[int, int]:
        """The indices of the layer and head with the clearest kind. Ignores the kinds ``first`` and ``itself``."""
        lifts = [lift for kind in ("previous", "same", "matching") if (lift := self.here.lift(kind)) is not None]
        if not lifts:
            return 0, 0
        at, column = np.unravel_index(np.max(lifts, axis=0).argmax(), lifts[0].shape)
        return int(at), int(column)


def inspect_prompt(
    model: GPT, ids: Sequence[int] | Ints, tokenizer: Tokenizer, layer: int | None = None, head: int | None = None
) -> Inspection:
    """Inspects how a model reads ids, in all heads or in one ``layer`` or ``head``. Raises `UserError` for a missing
    layer or head, for no ids, and for patterns that do not fit in memory."""
    config = model.config
    layers, heads = _select("layer", layer, config.n_layer), _select("head", head, config.n_head)
    prompt_ids = np.asarray(ids, np.int64)
    if not len(prompt_ids):
        raise UserError("there is no prompt to look at", 'give one: gpt inspect attention "Once upon a time"')
    context_ids = prompt_ids[-config.block_size :]
    windows = [config.windows[index] for index in layers]
    pattern_bytes = 4 * (len(layers) + LAYER_COPIES) * config.n_head * len(context_ids) ** 2
    if pattern_bytes > host_memory():
        raise UserError(
            f"the patterns of {len(context_ids):,} tokens take {pattern_bytes / 1e9:,.1f} GB, but only "
            f"{host_memory() / 1e9:,.1f} GB are available",
            "use a shorter prompt, or one --layer",
        )
    activations = trace(model, context_ids, layers)
    patterns = activations.patterns if head is None else activations.patterns[:, heads]
    probe = trace(model, probe_ids(tokenizer, config.block_size), layers)
    targets = torch.from_numpy(context_ids[1:, None]).to(activations.logits.device)
    probabilities = activations.logits[:-1].softmax(-1).gather(1, targets)[:, 0]
    return Inspection(
        ids=context_ids,
        dropped=len(prompt_ids) - len(context_ids),
        layers=layers,
        heads=heads,
        windows=windows,
        patterns=patterns,
        here=head_scores(patterns, context_ids, windows),
        probe=head_scores(probe.patterns[:, heads], probe.ids, windows),
        lens=lens(model, activations.residual),
        probabilities=probabilities.cpu().numpy(),
        logits=activations.logits[-1].cpu().numpy(),
    )


def _select(what: str, number: int | None, count: int) -> list[int]:
    if number is None:
        return list(range(count))
    if not 0 <= number < count:
        raise UserError(f"there is no {what} {number}", f"the model has {count}, from 0 to {count - 1}")
    return [number]


@dataclass(frozen=True)
class Word:
    """A word and its ids. The mean direction of its tokens represents the word."""

    text: str  # as encoded, with or without a leading space
    ids: list[int]


@dataclass(frozen=True)
class Neighbor:
    """A token and its cosine similarity to a word."""

    id: int
    text: str
    cosine: float


class Embeddings:
    """The embedding's rows at unit length."""

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        table = _check_finite("values of the embedding", model.wte.weight.detach().float()).cpu().numpy()
        norms = np.linalg.norm(table, axis=1, keepdims=True)
        self.rows: Floats = table / np.maximum(norms, 1e-30)
        is_known = np.zeros(len(table), np.bool_)
        is_known[tokenizer.known] = True
        self.usable = is_known & (norms[:, 0] > 0)  # Excludes unused ids and zero rows.

    def find(self, word: str) -> Word:
        """Encodes a word as in running text, with a leading space. Omits the space if the word starts with white space,
        or has fewer tokens without the space. Raises `UserError` for an empty word."""
        if not word.strip():
            raise UserError("a word is empty", "give a word that has letters")
        check_text("a word", word)
        forms = [word] if word[0].isspace() else [" " + word, word]
        candidates = [Word(form, self.tokenizer.encode(form, continues=True).tolist()) for form in forms]
        return min(candidates, key=lambda candidate: len(candidate.ids))

    def vector(self, word: Word) -> Floats:
        """Returns the word's direction (C) at unit length."""
        mean: Floats = self.rows[word.ids].mean(axis=0)
        return mean / max(float(np.linalg.norm(mean)), 1e-30)

    def neighbors(self, word: Word, count: int) -> list[Neighbor]:
        """Returns the ``count`` tokens with the highest cosine similarity to a word, except the word's own."""
        cosines = np.where(self.usable, self.rows @ self.vector(word), -np.inf)
        cosines[word.ids] = -np.inf
        order = np.argsort(-cosines, kind="stable")[:count]
        nearest_ids = [int(id) for id in order if np.isfinite(cosines[id])]
        return [Neighbor(id, token_text(self.tokenizer, id), float(cosines[id])) for id in nearest_ids]


def token_text(tokenizer: Tokenizer, id: int) -> str:
    """Returns a token for display, with non-text and invisible characters escaped."""
    return to_printable(tokenizer.decode_bytes([id]))
