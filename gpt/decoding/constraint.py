"""Structured output: restricts the next ids to a list of choices, a regular expression or a JSON schema."""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpt.config.device import upload
from gpt.config.sample import SampleConfig
from gpt.decoding.logits import EXCLUDED
from gpt.system.distribution import install_extra
from gpt.system.errors import UserError, check_text
from gpt.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:  # An optional dependency, imported lazily.
    from llguidance import LLMatcher, LLTokenizer

MAX_LENGTH = 2**20  # Maximum characters of a schema, a regular expression, or all choices together.
MAX_MULTIPLES = 10_000  # Maximum sum of all multipleOf in a schema. llguidance's time grows with this sum.
MAX_STATES = 20_000  # Maximum automaton states, of about 1 KB each. A nested schema needs a few hundred states.
MAX_UNCHECKED = 2**12  # Maximum characters of a grammar that needs no check in a separate process.
MAX_REFERENCES = 16  # Maximum references in such a grammar. Nested ones multiply.
SECONDS = 5.0  # Time limit of this check.
CACHE_SIZE = 16
THINK, END_THINK = "<think>", "</think>"
Thinking = Literal["", "optional", "open"]  # Whether a text can start with reasoning. "open" means that it does.
_THINK_RULES = "\nthink: end_think SPACE?\nend_think[lazy]: /(.|\\n)*<\\/think>/\nSPACE: /\\s+/"
_REASONING = {"": ("", ""), "optional": (f'("{THINK}" think)? ', _THINK_RULES), "open": ("think ", _THINK_RULES)}


class Constraint:
    """A constraint's state after the generated ids. ``ended`` means that the text is complete."""

    def __init__(self, matcher: "LLMatcher", clear_cache: Callable[[], None]) -> None:
        self._matcher, self._clear_cache = matcher, clear_cache
        self.ended = False

    def copy(self) -> "Constraint":
        """Returns an independent copy."""
        copy = Constraint(self._matcher.deep_copy(), self._clear_cache)
        copy.ended = self.ended
        return copy

    def compute_mask(self, V: int) -> npt.NDArray[np.bool_]:
        """Returns a mask (V) of the allowed next ids. If the text can end, this includes end-of-text."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=V, bitorder="little").view(np.bool_)

    def take(self, id: int) -> None:
        """Appends an allowed id. Raises `UserError` at a dead end or if the constraint is too complex."""
        self._matcher.consume_token(id)
        self.ended = self._matcher.is_stopped()
        if self.ended and not self._matcher.is_accepting():
            self._clear_cache()  # Copies share an automaton, whose errors are permanent.
            raise UserError(f"no text meets the constraint: {_describe_error(self._matcher)}", "relax the constraint")

    def with_token(self, id: int) -> "Constraint":
        """Returns a copy with ``id`` appended."""
        copy = self.copy()
        copy.take(id)
        return copy


class ConstraintCache:
    """Compiles constraints for a model's vocabulary, with an LRU cache."""

    def __init__(self, tokenizer: Tokenizer, find_mark: Callable[[], str] = lambda: "") -> None:
        """``find_mark`` returns a special token that grammars have as text, such as the one that begins tool calls."""
        self._tokenizer, self._find_mark = tokenizer, find_mark
        self._compiled = functools.lru_cache(CACHE_SIZE)(self._compile)

    def find(self, config: SampleConfig, tools: str = "", thinking: Thinking = "") -> Constraint | None:
        """Returns the constraint of ``config``, or None. The grammar of ``tools`` takes its place, and reasoning can
        come before the text. Raises `UserError` if it is invalid or unsatisfiable."""
        name, value = ("tools", tools) if tools else config.constraint or ("", "")
        if not name:
            return None
        text = "".join(value)
        check_text(name, text)
        if len(text) > MAX_LENGTH:
            raise UserError(f"{name} has {len(text):,} characters, which is too long", f"the limit is {MAX_LENGTH:,}")
        return self._compiled(name, value, thinking)

    def _compile(self, name: str, value: str | tuple[str, ...], thinking: Thinking) -> Constraint:
        vocabulary = self._vocabulary
        from llguidance import LLMatcher, LLParserLimits

        # The model chooses the tokens of forced text, so llguidance needs no tokenizer.
        before, rules = _REASONING[thinking]
        grammar = f'%llguidance {{"no_forcing": true}}\nstart: {before}text\ntext: {_grammar(name, value)}{rules}'
        if name in ("json_schema", "tools") and _sum_multiples(grammar) > MAX_MULTIPLES:
            raise UserError(f"{name}: multipleOf is too large", f"all of them together: up to {MAX_MULTIPLES:,}")
        if len(grammar) > MAX_UNCHECKED or grammar.count('"$ref"') > MAX_REFERENCES:
            _check(name, grammar)
        limits = LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # Fails if no text satisfies the grammar.
        if matcher.is_stopped() and not matcher.is_accepting():
            raise UserError(f"{name}: {_describe_error(matcher)}", "docs/generate.md lists what is supported")
        return Constraint(matcher, self._compiled.cache_clear)

    @functools.cached_property
    def _vocabulary(self) -> "LLTokenizer":
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            raise UserError("structured output needs the package llguidance", install_extra("structured")) from None
        tokenizer = self._tokenizer
        marks = (THINK, END_THINK, self._find_mark())
        specials = (id for word, id in tokenizer.all_specials.items() if word not in marks)
        wrapper = SimpleNamespace(
            is_tokenizer_wrapper=True,
            tokens=[tokenizer.decode_bytes([id]) for id in range(tokenizer.usable)],
            special_token_ids=sorted({*specials, *tokenizer.opening, *tokenizer.ends}),
            eos_token_id=tokenizer.eot,
            bos_token_id=None,
        )
        return LLTokenizer(wrapper, eos_token=sorted(tokenizer.ends))  # type: ignore[arg-type, unused-ignore]


def apply_constraints(logits: Tensor, constraints: Sequence[Constraint | None]) -> Tensor:
    """Sets logits (N, V) to -inf for the ids that each row's constraint forbids."""
    if not any(constraints):
        return logits
    allowed = np.ones(logits.shape, np.bool_)
    for row, constraint in zip(allowed, constraints, strict=True):
        if constraint is not None:
            row[:] = constraint.compute_mask(len(row))
    return torch.where(upload(allowed, logits.device), logits, EXCLUDED)


def _check(name: str, grammar: str) -> None:
    """Compiles a grammar in a separate process. Raises `UserError` if that crashes or takes too long."""
    program = [sys.executable, "-P", str(Path(__file__).with_name("constraint_process.py"))]
    try:
        crashes = subprocess.run(program, input=grammar.encode(), capture_output=True, timeout=SECONDS).returncode != 0
    except subprocess.TimeoutExpired:
        crashes = True
    if crashes:
        reason = f"it is nested too deeply, or compiling it takes more than {SECONDS:g} s or too much memory"
        raise UserError(f"{name} is too complex: {reason}", "simplify it")


def _grammar(name: str, value: str | tuple[str, ...]) -> str:
    """Returns a rule in llguidance's Lark dialect. By default, JSON has no whitespace."""
    from llguidance import regex_to_lark

    if isinstance(value, tuple):
        return "CHOICE\nCHOICE: " + " | ".join(map(json.dumps, value))
    if name == "tools":
        return value
    if name == "regex":
        return f"/{regex_to_lark(value, use_ascii='d')}/"  # \d matches only 0-9, as programs expect.
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise UserError(f"{name} is not a JSON object", 'such as {"type": "object"}')
    schema.setdefault("x-guidance", {"whitespace_flexible": False})
    return f"%json {json.dumps(schema)}"


def _sum_multiples(schema: str) -> Decimal:
    """Returns the sum of all ``multipleOf`` in a schema, each scaled to an integer: 0.01 counts as 1."""
    numbers = [Decimal(number) for number in re.findall(r'"multipleOf": -?([0-9.]+(?:e[+-][0-9]+)?)', schema)]
    return sum((number.scaleb(max(0, -int(number.as_tuple().exponent))) for number in numbers), Decimal(0))


def _describe_error(matcher: "LLMatcher") -> str:
    """Returns a matcher's error in one line, without positions in the generated grammar."""
    lines = matcher.get_error().splitlines()
    if not lines or lines[0].startswith("NoExtension"):
        return "no text can match it"
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", [*errors, lines[0]][0])[:300]
