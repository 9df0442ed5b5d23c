"""Requests of OpenAI's API as checked settings, and its errors. Knows no model and no network."""

import json
import math
import re
import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpt.errors import UserError
from gpt.sample_config import SampleConfig
from gpt.text.formats import reasoning

MOST_CHOICES, MOST_LOGPROBS, MOST_STOPS, MOST_PROMPTS, MOST_BIASES = 128, 20, 256, 128, 1024
LONGEST_STOP = 1000  # characters
LONGEST_VARIABLES, DEEPEST_VARIABLES = 16_384, 16  # characters of chat_template_kwargs in JSON, and levels
_SEEDS = 2**63
_COMMAND = re.compile(r"--[a-z]|\bgpt [a-z]")


class ApiError(Exception):
    """An answer that is an error: ``message`` for people, ``param`` the field that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @staticmethod
    def of(error: Exception) -> "ApiError":
        """Returns any error as an answer. Hints that name options or commands are for whoever runs the server."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, UserError):
            hint = f" ({error.hint})" if error.hint and not _COMMAND.search(error.hint) else ""
            return ApiError(400 if error.exit_code == 2 else 500, error.message + hint)
        return ApiError(500, f"internal error in gpt: {type(error).__name__}: {error!s:.200}")

    def body(self) -> dict[str, Any]:
        """Returns the object that clients read."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _wrong(name: str, what: str) -> ApiError:
    return ApiError(400, f"{name} {what}", name)


@dataclass(frozen=True)
class Generation:
    """The settings of a request: everything beside its prompt."""

    config: SampleConfig
    seed: int | None  # None: one that is drawn
    n: int
    best_of: int
    bias: tuple[tuple[int, float], ...]
    stream: bool
    include_usage: bool
    echo: bool
    open_ended: bool  # whether it does not say how many tokens it wants
    stop_ids: frozenset[int] = frozenset()
    constrained_by: str | None = None  # the field, by the name that was sent, that says what the text has to be
    token_details: bool = False  # of completions: the ids and bytes of tokens and alternatives beside their texts


@dataclass(frozen=True)
class Completion:
    """A request of ``/v1/completions``."""

    prompts: Sequence[str | Sequence[int]]
    generation: Generation


@dataclass(frozen=True)
class ChatPrompt:
    """Messages, and how the chat template turns them into one text."""

    messages: Sequence[Mapping[str, str]]
    answer: bool  # whether the template begins an answer
    open_end: bool  # whether the last message is continued
    variables: Mapping[str, Any]  # that the template may read


@dataclass(frozen=True)
class Chat:
    """A request of ``/v1/chat/completions``."""

    prompt: ChatPrompt
    generation: Generation


def read_json(body: bytes) -> dict[str, Any]:
    """Returns the object in a request's body. Raises `ApiError`."""

    def no_number(word: str) -> float:
        raise ValueError(f"{word} is not a JSON number")

    try:
        values = json.loads(body, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error!s:.200}") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body is not a JSON object")
    return values


class _Fields:
    """The fields of a request, each checked as it is taken. Null is as good as absent: both get the ``defaults``."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] = types.MappingProxyType({})) -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self._given: dict[str, str] = {}  # the names in the request of fields that have several
        for alias, name in ALIASES.items():
            if alias in self.values:
                if self.values.get(name, self.values[alias]) != self.values[alias]:
                    raise _wrong(alias, f"is an alias of {name}, which has another value; send one of them")
                self.values[name], self._given[name] = self.values[alias], alias
        self.values = {**defaults, **self.values}

    def sent(self, name: str) -> str:
        """Returns the name that a field was sent by."""
        return self._given.get(name, name)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value, name = self.values.get(name, default), self._given.get(name, name)
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            raise _wrong(name, f"is {_shown(value)}; it must be a number from {low:g} to {high:g}")
        return float(value)

    def count(self, name: str, default: int, low: int, high: int) -> int:
        value, name = self.values.get(name, default), self._given.get(name, name)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise _wrong(name, f"is {_shown(value)}; it must be a whole number from {low:,} to {high:,}")
        return value

    def value(self, name: str, default: Any, *kinds: type) -> Any:
        """Returns a value of the default's type, or of one of ``kinds``."""
        value, name, kinds = self.values.get(name, default), self._given.get(name, name), (type(default), *kinds)
        if not isinstance(value, kinds):
            raise _wrong(name, f"is {_shown(value)}; it must be {' or '.join(_KINDS[kind] for kind in kinds)}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name, default)
        if type(value) is not bool:
            raise _wrong(name, f"is {_shown(value)}; it must be true or false")
        return value

    def refuse(self, neutral: Mapping[str, Sequence[Any]]) -> None:
        """Raises `ApiError` for fields that this server does not support, unless their values ask for nothing."""
        for name, allowed in neutral.items():
            if name in self.values and self.values[name] not in allowed:
                if name in _TOOLS:
                    raise ApiError(400, f"tools are not supported yet; leave {name} out", name)
                raise _wrong(name, "is not supported by this server; leave it out")


_KINDS: dict[type, str] = {list: "a list", str: "a string", dict: "an object"}


def _shown(value: Any) -> str:
    """A value of JSON, shortened."""
    scalar = value is None or isinstance(value, (bool, int, float, str))
    return json.dumps(value if not isinstance(value, str) else value[:80])[:80] if scalar else reprlib.repr(value)


_TOOLS = ("tools", "tool_choice", "functions", "function_call")
ALIASES = {  # of llama.cpp's server, transformers and vLLM
    "n_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "n_cmpl": "n",
    "no_repeat_ngram_size": "no_repeat_ngram", "guided_choice": "choices", "guided_regex": "regex",
    "guided_json": "json_schema",
}  # fmt: skip
# Fields that change what a client gets, and that this server does not support: the values that ask for nothing. Fields
# that are neither read nor listed change nothing, or are unknown to OpenAI, llama.cpp and vLLM.
OBJECT = {"type": "object"}
REFUSED: Mapping[str, Sequence[Any]] = {
    # OpenAI
    "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (),
    "web_search_options": (), "reasoning_effort": ("none",), "verbosity": ("medium",), "store": (False,),
    # llama.cpp
    "typical_p": (1,), "top_n_sigma": (-1, 0), "dynatemp_range": (0,), "xtc_probability": (0,), "mirostat": (0,),
    "dry_multiplier": (0,), "adaptive_target": (-1,), "tfs_z": (1,), "min_keep": (0,), "samplers": (),
    "grammar": ("",), "lora": ([],), "n_keep": (0,), "n_discard": (0,), "n_indent": (0,),
    "t_max_predict_ms": (0, -1), "n_probs": (0,), "post_sampling_probs": (False,), "return_tokens": (False,),
    "response_fields": ([],), "reasoning_format": ("none", "auto"), "thinking_budget_tokens": (-1,),
    # vLLM
    "use_beam_search": (False,), "include_stop_str_in_output": (False,), "truncate_prompt_tokens": (-1,),
    "prompt_logprobs": (), "prompt_embeds": (), "allowed_token_ids": ([],), "bad_words": ([],),
    "guided_grammar": ("",), "structured_outputs": ({},),
    "structural_tag": ("",), "logits_processors": ([],), "vllm_xargs": ({},), "detokenize": (True,),
    "return_tokens_as_token_ids": (False,), "return_token_ids": (False,), "documents": ([],), "chat_template": ("",),
    "thinking_token_budget": (),
}  # fmt: skip
REFUSED_IN_COMPLETIONS: Mapping[str, Sequence[Any]] = {"add_special_tokens": (True,)}
REFUSED_IN_CHATS: Mapping[str, Sequence[Any]] = {"add_special_tokens": (False,), "echo": (False,), "best_of": (1,)}


def _generation(fields: _Fields, limit: int, most: int, chat: bool) -> Generation:
    """Reads all settings of a request but its prompt; ``most``: its tokens where it does not say."""
    n = fields.count("n", 1, 1, MOST_CHOICES)
    best_of = n if chat else fields.count("best_of", n, 1, MOST_CHOICES)
    stream, echo = fields.flag("stream"), not chat and fields.flag("echo")
    if best_of < n:
        raise _wrong("best_of", f"is {best_of} and n is {n}; best_of must be at least n")
    if stream and best_of > n:
        raise _wrong("best_of", "cannot exceed n in a stream, which sends texts before they can be compared")
    if chat:
        logprobs = fields.count("top_logprobs", 0, 0, MOST_LOGPROBS) if fields.flag("logprobs") else None
        if logprobs is None and fields.values.get("top_logprobs"):
            raise _wrong("top_logprobs", "needs logprobs: true")
    else:
        logprobs = fields.count("logprobs", 0, 0, MOST_LOGPROBS) if "logprobs" in fields.values else None
    given = next((name for name in ("max_completion_tokens", "max_tokens") if name in fields.values), None)
    tokens = fields.count(given or "max_tokens", most, -1, 2**31)  # -1: as many as there is room for
    top_p = fields.number("top_p", 1.0, 0, 1)
    config = SampleConfig(
        temperature=fields.number("temperature", 1.0, 0, 100),
        top_p=0.0 if top_p == 1 else max(top_p, 1e-9),
        top_k=max(0, fields.count("top_k", 0, -1, 2**31)),
        min_p=fields.number("min_p", 0.0, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0, 100),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        no_repeat_ngram=fields.count("no_repeat_ngram", 0, 0, limit),
        max_tokens=limit if tokens == -1 else min(tokens, limit),
        min_tokens=fields.count("min_tokens", 0, 0, limit),
        ignore_eot=fields.flag("ignore_eos"),
        stop=_stops(fields.values.get("stop", [])),
        speculate=fields.count("speculate", 0, 0, 64),
        **_constraint(fields),
        logprobs=logprobs,
        echo_logprobs=echo and logprobs is not None,
    )
    penalized = config.presence_penalty or config.frequency_penalty or config.repetition_penalty not in (0, 1)
    if penalized and fields.count("repeat_last_n", -1, -1, 2**31) != -1:
        raise _wrong("repeat_last_n", "must be -1 or absent: penalties always apply to the whole text")
    stop_ids = fields.values.get("stop_token_ids", [])
    if not isinstance(stop_ids, list) or not _are_ids(stop_ids) or len(stop_ids) > MOST_STOPS:
        raise _wrong("stop_token_ids", f"is {_shown(stop_ids)}; it must be a list of at most {MOST_STOPS} ids")
    if stop_ids and config.min_tokens:
        raise _wrong("stop_token_ids", "cannot be combined with min_tokens")
    options = fields.values.get("stream_options", {})
    if not isinstance(options, dict) or type(options.get("include_usage") or False) is not bool:
        raise _wrong("stream_options", f"is {_shown(options)}; it must be an object with include_usage")
    seed = fields.count("seed", -1, -_SEEDS, _SEEDS - 1)
    return Generation(
        config=config,
        seed=None if seed == -1 else seed,  # llama.cpp's clients mean a random one by -1
        n=n,
        best_of=best_of,
        bias=_bias(fields.values.get("logit_bias", {})),
        stream=stream,
        include_usage=stream and bool(options.get("include_usage")),
        echo=echo,
        open_ended=given is None or tokens == -1,
        stop_ids=frozenset(stop_ids),
        constrained_by=next(iter(_constraint_fields(fields)), None),
        token_details=not chat and fields.flag("token_details"),
    )


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise _wrong("stop", f"is {_shown(value)}; it must be a string or a list of strings")
    stops = list(filter(None, stops))  # an empty one stops nothing
    if len(stops) > MOST_STOPS or any(len(each) > LONGEST_STOP for each in stops):
        raise _wrong("stop", f"has {len(stops)} strings; the limit is {MOST_STOPS} of {LONGEST_STOP:,} characters")
    return tuple(map(clean, stops))


def _constraint(fields: _Fields) -> dict[str, Any]:
    """Reads what the text has to be: ``choices``, ``regex``, or a schema in ``json_schema`` or ``response_format``."""
    empty = [name for name in ("choices", "regex", "json_schema") if fields.values.get(name) in ([], "")]
    if empty:
        raise _wrong(fields.sent(empty[0]), "is empty")
    choices, regex = fields.value("choices", []), fields.value("regex", "")
    schema, form = fields.value("json_schema", "", dict), fields.value("response_format", {"type": "text"})
    if not all(isinstance(each, str) and each for each in choices):
        raise _wrong("choices", "must be a list of non-empty strings")
    if form.get("type") not in ("text", "json_object", "json_schema"):
        raise _wrong("response_format", "must be of type text, json_object or json_schema")
    if form["type"] != "text":
        inner = form.get("json_schema") if form["type"] == "json_schema" else {"schema": form.get("schema") or OBJECT}
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict):
            raise _wrong("response_format", "must have a schema that is an object")
    given = _constraint_fields(fields)
    if len(given) > 1:
        raise _wrong(given[1], f"cannot be combined with {given[0]}")
    schema = json.dumps(schema) if isinstance(schema, dict) else clean(schema)
    return {"choices": tuple(map(clean, choices)), "regex": clean(regex), "json_schema": schema}


def _constraint_fields(fields: _Fields) -> list[str]:
    """Returns the fields that constrain the text, by the names that were sent."""
    form = fields.values.get("response_format", {})
    formed = ["response_format"] if isinstance(form, dict) and form.get("type", "text") != "text" else []
    names = [name for name in ("choices", "regex", "json_schema") if name in fields.values]
    return formed + [fields.sent(name) for name in names]


def clean(value: str) -> str:
    """Returns a text of JSON, in which half of a surrogate pair may stand alone, with U+FFFD in its place."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise _wrong("logit_bias", f"is {_shown(value)}; it must be an object with at most {MOST_BIASES} ids")
    found = []
    for id, number in value.items():
        if not (id.isascii() and id.isdigit() and len(id) < 10):
            raise _wrong("logit_bias", f"has {_shown(id)}, which is not a token id")
        if type(number) not in (int, float) or not -100 <= number <= 100:
            raise _wrong("logit_bias", f"for {id} is {_shown(number)}; it must be a number from -100 to 100")
        if number:
            found.append((int(id), float(number)))
    return tuple(found)


def sampling_defaults(config: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """Returns the fields that a model's ``generation_config.json`` sets for requests that leave them out. ``note`` is
    called for values that no request may have, which are ignored."""
    found: dict[str, Any] = {}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample"):
        fields = _Fields({name: config.get(name)})
        try:
            fields.flag("do_sample")
            _generation(fields, 1, 1, chat=True)
        except ApiError as error:
            note(f"ignored in generation_config.json: {error.message}")
        else:
            found |= fields.values
    if not found.pop("do_sample", True):
        found["temperature"] = 0
    return found


def read_completion(values: Mapping[str, Any], limit: int, defaults: Mapping[str, Any]) -> Completion:
    """Reads a request of ``/v1/completions``. ``limit``: tokens that it may ask for. Raises `ApiError`."""
    fields = _Fields(values, defaults)
    fields.refuse({**REFUSED, **REFUSED_IN_COMPLETIONS})
    if "prompt" not in fields.values:
        raise _wrong("prompt", "is missing")
    generation = _generation(fields, limit, min(16, limit), chat=False)
    return Completion(_prompts(fields.values["prompt"]), generation)


def _prompts(value: Any) -> list[str | Sequence[int]]:
    if isinstance(value, str) or (isinstance(value, list) and value and _are_ids(value)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise _wrong("prompt", f"is {_shown(value)}; it must be a string, a list of ids, or a list of these")
    if len(value) > MOST_PROMPTS:
        raise _wrong("prompt", f"has {len(value):,} entries; the limit is {MOST_PROMPTS}")
    prompts: list[str | Sequence[int]] = []
    for each in value:
        if not (isinstance(each, str) or (isinstance(each, list) and each and _are_ids(each))):
            raise _wrong("prompt", f"has {_shown(each)}, which is neither a string nor a list of ids")
        prompts.append(clean(each) if isinstance(each, str) else each)
    return prompts


def _are_ids(values: list[Any]) -> bool:
    return all(type(each) is int for each in values)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


_CALLS = ("tool_calls", "function_call")


def read_chat(values: Mapping[str, Any], limit: int, defaults: Mapping[str, Any]) -> Chat:
    """Reads a request of ``/v1/chat/completions``. ``limit``: tokens that it may ask for. Raises `ApiError`."""
    return Chat(read_chat_prompt(values), _generation(_Fields(values, defaults), limit, limit, chat=True))


def read_chat_prompt(values: Mapping[str, Any]) -> ChatPrompt:
    """Reads the messages of a request, and the fields that say how they are rendered. Raises `ApiError`."""
    fields = _Fields(values)
    fields.refuse({**REFUSED, **REFUSED_IN_CHATS})
    messages = fields.values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "must be a list of at least one message")
    found = []
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role in ("tool", "function") or (isinstance(message, dict) and any(map(message.get, _CALLS))):
            raise _wrong("messages", "has a tool call or tool result; tools are not supported yet")
        if isinstance(content, list):  # parts, of which texts can be read
            texts = [each["text"] for each in content if _is_text(each)]
            other = next(
                (each.get("type", "text") for each in content if isinstance(each, dict) and not _is_text(each)), "text"
            )
            if other != "text":
                raise _wrong("messages", f"has a part of type {_shown(other)}; only parts of type text are supported")
            content = "".join(texts) if len(texts) == len(content) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise _wrong("messages", f"has {_shown(message)}; a message needs a role and a content, both strings")
        words = {"role": role, "content": content, "name": message.get("name"), **reasoning(message)}
        found.append({key: clean(text) for key, text in words.items() if isinstance(text, str)})
    open_end = fields.flag("continue_final_message")
    answer = fields.flag("add_generation_prompt", not open_end)
    if open_end and answer:
        raise _wrong("continue_final_message", "continues the last message, so add_generation_prompt must be false")
    return ChatPrompt(found, answer, open_end, _variables(fields))


_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
          "raise_exception", "strftime_now", "namespace")  # fmt: skip


def _variables(fields: _Fields) -> Mapping[str, Any]:
    """Returns the names that a chat template may read besides its own, and their values."""
    name = "chat_template_kwargs"
    values = fields.values.get(name, {})
    if not isinstance(values, dict):
        raise _wrong(name, f"is {_shown(values)}; it must be an object")
    if "enable_thinking" in fields.values:  # Alibaba's clients, and some others, send it outside
        values = {"enable_thinking": fields.flag("enable_thinking"), **values}
    level = [values]
    for _ in range(DEEPEST_VARIABLES):
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        level = [part for part in level if isinstance(part, (dict, list))]
    if level:
        raise _wrong(name, f"is nested more than {DEEPEST_VARIABLES} deep")
    text = json.dumps(values, ensure_ascii=False)
    if len(text) > LONGEST_VARIABLES:
        raise _wrong(name, f"has {len(text):,} characters; the limit is {LONGEST_VARIABLES:,}")
    for key in values:
        if key in _GIVEN or key.endswith("_token"):
            raise _wrong(name, f"has {_shown(key)}, which the server sets itself")
    cleaned: dict[str, Any] = json.loads(clean(text))
    return cleaned
