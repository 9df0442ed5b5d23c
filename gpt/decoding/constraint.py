"""Structured output: the ids that may come next in one of several texts, a regular expression or a JSON schema."""

import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpt.decoding.logits import EXCLUDED
from gpt.device import upload
from gpt.distribution import install_extra
from gpt.errors import UserError, check_text
from gpt.sample_config import SampleConfig
from gpt.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # an extra, imported for the first constraint
    from llguidance import LLMatcher, LLTokenizer

LONGEST = 2**20  # characters of a schema, a regular expression, or all choices
MOST_MULTIPLES = 10_000  # the sum of all multipleOf, by which llguidance takes time without a limit of its own
MOST_STATES = 20_000  # of a constraint's automaton, about 1 KB each; a nested schema needs some hundreds
KEPT = 16  # compiled constraints


class Constraint:
    """What may follow a text so far. ``ended``: the text is complete, and nothing may follow."""

    def __init__(self, matcher: "LLMatcher", forget: Callable[[], None]) -> None:
        self._matcher, self._forget = matcher, forget
        self.ended = False

    def copy(self) -> "Constraint":
        """Returns a copy, whose text grows on its own."""
        return Constraint(self._matcher.deep_copy(), self._forget)

    def allowed(self, V: int) -> npt.NDArray[np.bool_]:
        """Returns which of V ids may come next. End-of-text is one of them if the text may end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=V, bitorder="little").view(np.bool_)

    def take(self, id: int) -> None:
        """Appends an allowed id. Raises `UserError` at a dead end, and once the constraint is too complex."""
        self._matcher.consume_token(id)
        self.ended = self._matcher.is_stopped()
        if self.ended and not self._matcher.is_accepting():
            self._forget()  # copies share an automaton, which never recovers from an error
            raise UserError(f"no text meets the constraint: {_reason(self._matcher)}", "relax the constraint")

    def after(self, id: int) -> "Constraint":
        """Returns a copy with a further id."""
        copy = self.copy()
        copy.take(id)
        return copy


class ConstraintCache:
    """Compiles constraints for a model's vocabulary, and keeps the last ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled = functools.lru_cache(KEPT)(self._compile)

    def find(self, config: SampleConfig) -> Constraint | None:
        """Returns the constraint of a text with these settings. Raises `UserError` if no text can satisfy it."""
        if config.constraint is None:
            return None
        name, value = config.constraint
        text = "".join(value)
        check_text(name, text)
        if len(text) > LONGEST:
            raise UserError(f"{name} has {len(text):,} characters, which is too long", f"the limit is {LONGEST:,}")
        return self._compiled(name, value)

    def _compile(self, name: str, value: str | tuple[str, ...]) -> Constraint:
        vocabulary = self._vocabulary
        from llguidance import LLMatcher, LLParserLimits

        # Otherwise llguidance would ask a tokenizer how to write what has to come next. The model decides.
        grammar = f'%llguidance {{"no_forcing": true}}\nstart: {_grammar(name, value)}'
        limits = LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # fails if no text satisfies it
        if matcher.is_stopped() and not matcher.is_accepting():
            raise UserError(f"{name}: {_reason(matcher)}", "docs/generate.md lists what is supported")
        return Constraint(matcher, self._compiled.cache_clear)

    @functools.cached_property
    def _vocabulary(self) -> "LLTokenizer":
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            raise UserError("structured output needs the package llguidance", install_extra("structured")) from None
        tokenizer = self._tokenizer
        wrapper = SimpleNamespace(
            is_tokenizer_wrapper=True,
            tokens=[tokenizer.decode_bytes([id]) for id in range(tokenizer.usable)],
            special_token_ids=sorted({*tokenizer.all_specials.values(), *tokenizer.opening, *tokenizer.ends}),
            eos_token_id=tokenizer.eot,
            bos_token_id=None,
        )
        return LLTokenizer(wrapper, eos_token=sorted(tokenizer.ends))  # type: ignore[arg-type, unused-ignore]


def masked(logits: Tensor, constraints: Sequence[Constraint | None]) -> Tensor:
    """Excludes from logits (N, V) what each row's constraint forbids."""
    if not any(constraints):
        return logits
    allowed = np.ones(logits.shape, np.bool_)
    for row, constraint in zip(allowed, constraints, strict=True):
        if constraint is not None:
            row[:] = constraint.allowed(len(row))
    return torch.where(upload(allowed, logits.device), logits, EXCLUDED)


def _grammar(name: str, value: str | tuple[str, ...]) -> str:
    """Returns a rule in llguidance's dialect of Lark. JSON has no white space between its parts, unless the
    schema has options of llguidance's."""
    from llguidance import regex_to_lark

    if isinstance(value, tuple):
        return "CHOICE\nCHOICE: " + " | ".join(map(json.dumps, value))
    if name == "regex":
        return f"/{regex_to_lark(value, use_ascii='d')}/"  # \d is 0-9, as programs expect
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise UserError(f"{name} is not a JSON object", 'such as {"type": "object"}')
    if _multiples(schema) > MOST_MULTIPLES:
        raise UserError(f"{name}: multipleOf is too large", f"all of them together: up to {MOST_MULTIPLES:,}")
    schema.setdefault("x-guidance", {"whitespace_flexible": False})
    return f"%json {json.dumps(schema)}"


def _multiples(schema: object) -> Decimal:
    """Returns the sum of all ``multipleOf`` in a schema, each without its places after the point: 1 for 0.01."""
    total, left = Decimal(0), [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            multiple = value.get("multipleOf")
            if isinstance(multiple, int | float) and math.isfinite(multiple):
                exact = Decimal(repr(multiple)) if isinstance(multiple, float) else Decimal(multiple)
                total += abs(exact.scaleb(max(0, -int(exact.as_tuple().exponent))))
            left += value.values()
        elif isinstance(value, list):
            left += value
    return total


def _reason(matcher: "LLMatcher") -> str:
    """Returns why a matcher failed, in one line, without a place in the grammar, which users have not written."""
    lines = matcher.get_error().splitlines()
    if not lines or lines[0].startswith("NoExtension"):
        return "no text can match it"
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", [*errors, lines[0]][0])[:300]
