"""The film of a run: at its evaluations, frames of how the model reads a sentence and continues a prompt."""

import contextlib
import math
import time
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpt.insight import inspect
from gpt.insight.evaluate import Window
from gpt.model.loss import IGNORED
from gpt.runs import folder
from gpt.system.errors import NotANumber, UserError
from gpt.system.files import read_regular
from gpt.training.context import RunContext
from gpt.training.evaluation import sample_lines
from gpt.training.recipe import Recipe
from gpt.training.strategy import Strategy

MAX_FRAMES = 100  # of a model, so that the metrics stay small
MAX_SHARE = 0.02  # of the time since the last frame
SAMPLE_TOKENS = SENTENCE_TOKENS = 24
CONTEXT_TOKENS = 8  # of the prompt, before an answer that is watched
MAX_SENTENCE_BYTES = 2000
MAX_LAYERS, MAX_HEADS, MAX_LENS_ROWS = 4, 4, 6


class Film:
    """Takes the frames of a model. The random state stays as it is, so a run has the same weights without them."""

    def __init__(self, run: RunContext, recipe: Recipe, held_out: Sequence[Window]) -> None:
        self.run, self.recipe = run, recipe
        self.size = min(SENTENCE_TOKENS, recipe.model.block_size)
        self.passage = self._choose_passage(held_out)
        self.progress, self.due_time = -math.inf, -math.inf  # the last frame's progress; when time allows the next one

    def take(self, strategy: Strategy, progress: float, is_last: bool) -> dict[str, Any] | None:
        """Returns a frame if it is due, given the run's ``progress`` from 0 to 1. Runs on all ranks. Raises `Stopped`
        after a signal."""
        run, start = self.run, time.perf_counter()
        if self.recipe.is_sharded:  # Patterns and lens need whole weights outside of the forward pass.
            return None
        ids = run.world.broadcast_object(lambda: self._choose_ids() if is_last or self._is_due(progress) else [])
        if not ids:
            return None
        # All ranks take part in the sample, so it comes before what only rank 0 does, and may fail to do.
        text = sample_lines(run, strategy, run.compute, self.recipe.seed, SAMPLE_TOKENS)
        frame: dict[str, Any] = {"pieces": [inspect.token_text(run.data.tokenizer, id) for id in ids]}
        try:
            if run.world.is_main:
                frame |= self._inspect(strategy, ids)
        except NotANumber:  # The loop itself handles a model that diverges.
            return None
        if self.progress >= 0:  # The first frame takes longer, because it loads code.
            self.due_time = time.perf_counter() + (time.perf_counter() - start) / MAX_SHARE
        self.progress = progress
        return {"text": text, "prompt": run.data.prompt, **frame}

    def _is_due(self, progress: float) -> bool:
        return progress >= self.progress + 1 / MAX_FRAMES and time.perf_counter() >= self.due_time

    def _choose_ids(self) -> list[int]:
        """Returns the ids of the user's sentence, or those of the passage if there is none."""
        with contextlib.suppress(UserError):
            data = read_regular(self.run.path / folder.SENTENCE, MAX_SENTENCE_BYTES)
            if text := data.decode(errors="replace").strip("\r\n"):
                return self.run.data.tokenizer.prompt(text)[: self.size]
        return self.passage

    def _choose_passage(self, held_out: Sequence[Window]) -> list[int]:
        """Returns ids from the middle of the held-out data: from the start of a line or, in an example, from shortly
        before an answer. Without held-out data, returns some of the training data."""
        if held_out:
            window = held_out[len(held_out) // 2]
            ids, targets = window.x, window.y
        else:
            batch = self.run.data.batches(self.recipe).global_batch(0)[:2]
            ids, targets = (rows.reshape(-1, rows.shape[-1])[0] for rows in batch)
        is_target = targets != IGNORED
        ids = ids[: len(ids) - int(is_target[::-1].argmax())]  # Rows are padded after the last target.
        start = max(0, int(is_target.argmax()) - CONTEXT_TOKENS)
        if not self.run.data.rows:
            tokens = [self.run.data.tokenizer.decode_bytes([id]) for id in ids[: len(ids) // 2].tolist()]
            start = next((at + 1 for at, token in enumerate(tokens) if token.endswith(b"\n")), 0)
        passage: list[int] = ids[start : start + self.size].tolist()
        return passage

    def _inspect(self, strategy: Strategy, ids: list[int]) -> dict[str, Any]:
        """Returns what `gpt inspect` shows of the sentence, for some heads and layers."""
        model, tokenizer = strategy.model, self.run.data.tokenizer
        seen = inspect.inspect_prompt(model, ids, tokenizer)
        layers, heads = spread(model.config.n_layer, MAX_LAYERS), spread(model.config.n_head, MAX_HEADS)
        shown = [[layer, head] for layer in layers for head in heads]
        patterns = np.stack([seen.patterns[layer, head] for layer, head in shown])[:, np.tri(len(ids), dtype=np.bool_)]
        rows = spread(model.config.n_layer + 1, MAX_LENS_ROWS)
        tokens = [[inspect.token_text(tokenizer, int(id)) for id in seen.lens.ids[row, :, 0]] for row in rows]
        return {
            "probabilities": [round(float(p), 7) for p in seen.probabilities],
            "heads": shown,
            "kinds": [inspect.find_dominant_kind(seen.here, seen.probe, *place) or "" for place in shown],
            "attention": b64encode(np.rint(255 * patterns).astype(np.uint8).tobytes()).decode(),
            "layers": rows,
            "lens": tokens,
            "lens_probabilities": np.round(seen.lens.probabilities[rows, :, 0].astype(np.float64), 3).tolist(),
        }


def spread(count: int, most: int) -> list[int]:
    """Returns up to ``most`` of the indices 0 … count - 1, spread evenly, with both ends."""
    most = min(count, most)
    return [round(i * (count - 1) / max(1, most - 1)) for i in range(most)]
