"""The settings of ``gpt sample``. Imports no torch."""

import contextlib
import math
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, get_origin

from gpt.config.settings import check_options, field_types, option, without_none
from gpt.system.errors import UserError, did_you_mean

_PANELS = ("Text", "Sampling", "Beam search", "Machine", "Output")
_text, _filter, _beam, _machine, _output = (partial(option, panel=name) for name in _PANELS)
MAX_BEAMS = 1024
MAX_BIAS = 10**9  # Far above differences between logits, and far below overflow.


Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]


@dataclass(frozen=True)
class SampleConfig:
    """How to choose tokens and when to stop. Raises `UserError` for invalid values.

    Filters apply in this order: bias, repetition penalty, presence and frequency penalties, no-repeat n-gram, minimum
    tokens, temperature, top-k, top-p, min-p. Beam search uses only the filters before temperature.
    """

    temperature: float = _filter(
        0.8, "Sampling temperature; higher is less predictable, 0 is greedy", flags=("-t",), level="basic", low=0,
        high=100,
    )  # fmt: skip
    top_k: int = _filter(
        0, "Sample only from the K most likely tokens", metavar="K", shown="off", level="basic", low=0, high=2**31
    )
    top_p: float = _filter(
        0.0, "Sample only from the most likely tokens whose probabilities add up to P", metavar="P", shown="off",
        level="basic", low=0,
    )  # fmt: skip
    min_p: float = _filter(
        0.0, "Sample only from tokens at least P times as likely as the most likely one", metavar="P", shown="off",
        low=0,
    )  # fmt: skip
    repetition_penalty: float = _filter(
        0.0, "Above 1: make tokens of the prompt and the text so far less likely", shown="off", low=0, high=100
    )
    presence_penalty: float = _filter(
        0.0, "Subtract X from the logit of each token generated so far", shown="off", low=-MAX_BIAS, high=MAX_BIAS
    )
    frequency_penalty: float = _filter(
        0.0, "Subtract X from a token's logit for each time it was generated", shown="off", low=-MAX_BIAS,
        high=MAX_BIAS,
    )  # fmt: skip
    no_repeat_ngram: int = _filter(
        0, "Never repeat a sequence of N tokens, including those of the prompt", shown="off", low=0, high=1024
    )
    bias: tuple[str, ...] = _filter((), "Add X to the logit of a token; repeatable", metavar="TOKEN=X")
    greedy: bool = _filter(False, "Always pick the most likely token")
    beam: int = _beam(0, "Beam search with B beams; 1 is greedy", metavar="B", shown="off", low=0, high=MAX_BEAMS)
    length_penalty: float = _beam(
        1.0, "Rank beams by log-probability divided by length to the power of X", low=-100, high=100
    )
    early_stopping: Literal["off", "on", "never"] = _beam(
        "off", "Stop at B finished beams (on), when a better one is unlikely (off) or impossible (never)"
    )
    max_tokens: int = _text(200, "Maximum number of tokens to generate", flags=("-n",), level="basic", low=0)
    min_tokens: int = _text(0, "Suppress end-of-text for the first N tokens", low=0)
    stop: tuple[str, ...] = _text((), "Stop before this text; repeatable", metavar="TEXT", level="basic")
    choices: tuple[str, ...] = _text((), "Generate one of these texts; repeatable", metavar="A,B,C")
    regex: str = _text("", "Generate text that matches this regular expression", metavar="PATTERN")
    json_schema: str = _text("", "Generate JSON that fits the schema in FILE; - is stdin", metavar="FILE")
    ignore_eot: bool = _text(False, "Keep generating past end-of-text")
    batch: int = _machine(
        0, "Samples per batch; does not change the texts", shown="set by the device", low=0, high=2**16
    )
    logprobs: int | None = _output(
        None, "With --json: log-probabilities of each token and of the K most likely ones", metavar="K", shown="off",
        low=0, high=2**20,
    )  # fmt: skip
    echo_logprobs: bool = _output(False, "With --json: log-probabilities of the prompt's tokens too")

    def __post_init__(self) -> None:
        check_options(self)
        for name, value in (("top-p", self.top_p), ("min-p", self.min_p)):
            if value > 1:
                raise UserError(f"{name} is {value}; it must be in (0, 1], or 0 for off")
        self.biases()
        if self.constraint is not None and self.ignore_eot:
            raise UserError("structured output cannot ignore end-of-text, which ends it", "leave out one of them")
        if self.beam and self.greedy:
            raise UserError("--beam and --greedy cannot be combined", "give one of them; --beam 1 is greedy")

    def check_num(self, num: int) -> None:
        """Raises `UserError` if ``num`` texts need more beams."""
        if self.beam and num > self.beam:
            raise UserError(f"num is {num} and beam is {self.beam}", f"{num} texts need {num} beams: --beam {num}")

    @property
    def draws(self) -> bool:
        """Whether tokens are sampled at random."""
        return not (self.greedy or self.beam or self.temperature == 0)

    @property
    def looks_back(self) -> bool:
        """Whether a filter depends on previous tokens."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty not in (0, 1)
        return bool(penalties) or self.no_repeat_ngram > 0

    @property
    def constraint(self) -> tuple[str, Any] | None:
        """Name and value of the setting that constrains the text, or None. Raises `UserError` if several are set."""
        constraints = [(name, value) for name in ("choices", "regex", "json_schema") if (value := getattr(self, name))]
        if len(constraints) > 1:
            raise UserError(f"{constraints[0][0]} and {constraints[1][0]} both constrain the text", "give one of them")
        return constraints[0] if constraints else None

    @property
    def choice(self) -> tuple[Any, ...]:
        """The settings that determine the next token."""
        names = [field.name for field in fields(self) if field.metadata["panel"] == _PANELS[1]]
        return (self.draws, self.min_tokens, *(getattr(self, name) for name in names))

    def changed(self, name: str, word: str) -> "SampleConfig":
        """Returns a copy with ``name`` parsed from a command-line word. Raises `UserError`."""
        types = {key.replace("_", "-"): kind for key, kind in field_types(SampleConfig).items()}
        if name not in types:
            raise UserError(f'there is no setting "{name}"', did_you_mean(name, types))
        kind = without_none(types[name])
        value: Any = word
        if kind is bool:
            value = {"on": True, "off": False, "true": True, "false": False}.get(word.lower(), word)
        elif get_origin(kind) is tuple:
            value = tuple(word.split(",") if name == "choices" else [word]) if word else ()
        elif kind in (int, float):
            with contextlib.suppress(ValueError):
                value = kind(word)
        return replace(self, **{name.replace("-", "_"): value})

    def biases(self) -> list[tuple[str, float]]:
        """Returns the tokens' texts and the values to add to their logits. Raises `UserError`."""
        pairs = []
        for word in self.bias:
            token, separator, number = word.rpartition("=")
            try:
                value = float(number)
            except ValueError:
                value = math.nan
            if not (token and separator and abs(value) <= MAX_BIAS):
                message = f'bias is "{word}"; it must be TOKEN=NUMBER, from {-MAX_BIAS:,} to {MAX_BIAS:,}'
                raise UserError(message, "such as --bias ' the=-2.5'")
            pairs.append((token, value))
        return pairs
