"""What fine-tuning changed: the losses, answers and token probabilities of a run and of its base model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpt.insight.evaluate import Window
from gpt.insight.inspect import token_text
from gpt.model.loss import IGNORED
from gpt.tokenizers.tokenizer import Tokenizer

PROMPTS = 3
ANSWER_TOKENS = 100  # Maximum length of an answer.
PASSAGE_TOKENS = 200  # Maximum length of the passage.
MOST_CHANGED = 10
Measurement = tuple[list[float], list[str], list[float]]  # losses, answers, losses of the passage's tokens


@dataclass(frozen=True)
class Change:
    """The loss on a text, or the log-probability of a token, before and after."""

    text: str
    before: float
    after: float
    change: float


@dataclass(frozen=True)
class BeforeAfter:
    """The model ``base`` compared with the checkpoint ``tuned``. Each of ``answers`` has a prompt and both texts.
    ``most`` are the positions in ``passage`` whose log-probability changed most."""

    base: str
    tuned: str
    losses: list[Change]
    answers: list[dict[str, str]]
    passage: list[Change]
    most: list[int]


def cut(window: Window) -> tuple[list[int], Window]:
    """Returns the ids before a window's first target, and the window up to `PASSAGE_TOKENS` ids after them."""
    first = int(np.argmax(window.y != IGNORED))
    end = first + PASSAGE_TOKENS
    return window.x[: first + 1].tolist(), replace(window, x=window.x[:end], y=window.y[:end])


def compare(
    names: tuple[str, str],
    texts: Sequence[str],
    prompts: Sequence[list[int]],
    passage: Window,
    tokenizer: Tokenizer,
    before: Measurement,
    after: Measurement,
) -> BeforeAfter:
    """Compares measurements of the base model and the tuned model, which have these ``names``."""
    pieces = [token_text(tokenizer, id) for id in passage.y[passage.y != IGNORED].tolist()]
    tokens = [Change(*row, row[1] - row[2]) for row in zip(pieces, before[2], after[2], strict=True)]
    tokens = [replace(token, before=-token.before, after=-token.after) for token in tokens]
    answers = zip(map(tokenizer.decode, prompts), before[1], after[1], strict=True)
    return BeforeAfter(
        *names,
        [Change(*row, row[2] - row[1]) for row in zip(texts, before[0], after[0], strict=True)],
        [dict(zip(("prompt", "before", "after"), answer, strict=True)) for answer in answers],
        tokens,
        sorted(range(len(tokens)), key=lambda at: -abs(tokens[at].change))[:MOST_CHANGED],
    )
