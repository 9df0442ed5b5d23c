"""Events of a run, and their JSON lines in ``metrics.jsonl``."""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from gpt.config.settings import Amount, Count, checked
from gpt.system.errors import UserError
from gpt.system.words import as_json


@dataclass(frozen=True)
class Event:
    """Fields of every event: finished steps, trained tokens, and seconds since the command started."""

    kind: ClassVar[str]  # step, eval, sample …
    step: Count
    tokens: Count
    seconds: Amount

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__.removesuffix("Event").lower()


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Means over preferences, or over answers to prompts; None for other data. A preferred answer's reward is
    β · log(p / p₀), where p₀ is its probability under the model before training. The margin is the chosen answer's
    reward minus the rejected one's, and the accuracy the share of positive margins. Otherwise, a program gives the
    ``reward``; ``equal_groups`` is the share of prompts whose sampled answers all got the same."""

    accuracy: float | None = None
    margin: float | None = None
    chosen_reward: float | None = None
    rejected_reward: float | None = None
    reward: float | None = None
    equal_groups: float | None = None
    answer_tokens: float | None = None


@dataclass(frozen=True)
class StepEvent(Rewards, Event):
    """An optimizer step. ``loss`` is in nats per token or preference, or minus the mean reward, ``grad_norm`` is the
    norm before clipping, and ``tokens_per_second`` excludes evaluations. ``mfu`` (`gpt.training.logs.Speed`) is null if
    unknown."""

    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    mfu: float | None = None


@dataclass(frozen=True)
class EvalEvent(Rewards, Event):
    """An evaluation on held-out text, with a loss as in `StepEvent`. ``best`` marks the lowest loss so far."""

    val_loss: float
    best: bool


@dataclass(frozen=True)
class SampleEvent(Event):
    """A few lines sampled from the model of ``step``, which begin with the ``prompt``. The ``verdict`` ranks it among
    the yardsticks."""

    text: str
    prompt: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class FrameEvent(Event):
    """How the model of ``step`` reads a sentence of a few tokens, and how it continues a prompt. ``probabilities`` has
    that of each token after the first, given the tokens before. Some heads have their attention, and some layers the
    most likely next tokens after them."""

    text: str  # begins with the prompt
    prompt: str
    pieces: list[str]  # the sentence's tokens (T), for display
    probabilities: list[float]  # (T - 1)
    heads: list[list[int]]  # layer and head of each pattern
    kinds: list[str]  # what each head mostly attends to, or "" (`gpt.insight.inspect.KINDS`)
    attention: str  # base64 of the patterns' lower triangles, (heads, T (T + 1) / 2), with 255 for a weight of 1
    layers: list[int]  # blocks before each row of the lens; 0 is the embedding
    lens: list[list[str]]  # (layers, T)
    lens_probabilities: list[list[float]]  # (layers, T)


@dataclass(frozen=True)
class SaveEvent(Event):
    """A checkpoint that is complete on disk. ``checkpoint`` is a subfolder of the run."""

    checkpoint: str


@dataclass(frozen=True)
class TeacherEvent(Event):
    """One of the run's own teachers is trained. Its weights are in ``folder``, a subfolder of the run. All later events
    are about the next model."""

    folder: str


@dataclass(frozen=True)
class RollbackEvent(Event):
    """A rollback to ``step``, because the loss at ``failed_step`` exploded or was not finite. Multiplies the learning
    rate of the remaining steps by ``rate_factor``."""

    failed_step: int
    why: str
    rate_factor: float


@dataclass(frozen=True)
class ResumeEvent(Event):
    """A resume from a checkpoint, which deletes the metrics of later steps."""

    checkpoint: str


@dataclass(frozen=True)
class EndEvent(Event):
    """The end of a run and its reason: ``steps`` (all done), ``patience``, ``signal``, ``diverged`` or ``reward``.
    ``val_loss`` and ``bits_per_byte`` measure the best checkpoint on all held-out text. They are null without held-out
    text or after an early end."""

    reason: str
    checkpoint: str | None
    val_loss: float | None
    bits_per_byte: float | None


@dataclass(frozen=True)
class Opened:
    """The run has a folder. Not written to the metrics."""

    run: str


@dataclass(frozen=True)
class Note:
    """A message to the user. Not written to the metrics."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Progress:
    """The progress of a long operation. Not written to the metrics."""

    what: str  # "fetched", "tokenized" …
    done: int = 0
    total: int = 0  # 0 if it is unknown
    unit: str = "bytes"


@dataclass(frozen=True)
class Plan:
    """The length of the run, sent before the first step. Not written to the metrics."""

    steps: int
    batch_tokens: int
    phase: str = ""  # the part of the run that this plan is for, if there are several
    seconds: float = 0.0  # training time left in a timed run, whose steps are an estimate; 0 for other runs


REWARDS = tuple(field.name for field in dataclasses.fields(Rewards))  # left out of JSON for other data
OF_PREFERENCES, OF_ANSWERS = REWARDS[:4], REWARDS[4:]
_LOSSES = ("loss", "grad_norm", "val_loss")  # null in JSON if not finite


def to_json(event: Event) -> str:
    """Returns a line of ``metrics.jsonl``. Losses that are not finite become null, because JSON has no NaN."""
    values = {key: value for key, value in vars(event).items() if value is not None or key not in REWARDS}
    return as_json({"event": event.kind, **values})


def from_json(line: str | bytes) -> Event:
    """Parses a line of `to_json`. Raises `UserError` for a field of the wrong type, a number that is not finite, or
    text with a lone surrogate."""
    try:
        values = json.loads(line)
        kind = values.pop("event")
        cls = next(event_type for event_type in Event.__subclasses__() if event_type.kind == kind)
        for value in values.values():
            if isinstance(value, str):
                value.encode()  # Raises for a lone surrogate.
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, StopIteration):
        raise UserError(f"not an event: {line[:80]!r}") from None
    null_keys = [] if cls is EndEvent else [key for key in _LOSSES if key in values and values[key] is None]
    event = checked(cls, values | dict.fromkeys(null_keys, 0.0), "metrics")
    nans: dict[str, Any] = dict.fromkeys(null_keys, math.nan)
    return dataclasses.replace(event, **nans)


def format_seconds(seconds: float) -> str:
    """Formats a duration as ``47 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02d} min"
