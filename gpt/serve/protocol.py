"""Validates requests to OpenAI's API and formats errors. Needs no model or network."""

import json
import math
import re
import reprlib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpt.chat.chat import read_call, reasoning
from gpt.chat.tool_calls import Rendered, Tools, read_names
from gpt.config.sample import SampleConfig
from gpt.system.errors import UserError

MAX_CHOICES, MAX_LOGPROBS, MAX_STOPS, MAX_PROMPTS, MAX_BIASES = 128, 20, 256, 128, 1024
MAX_STOP_LENGTH = 1000  # Maximum characters of a stop string.
MAX_VARIABLES_LENGTH = 16_384  # Maximum JSON characters of chat_template_kwargs.
MAX_DEPTH = 64  # Maximum nesting of what templates read.
_SEED_LIMIT = 2**63
_COMMAND_PATTERN = re.compile(r"--[a-z]|\bgpt [a-z]")


class ApiError(Exception):
    """An error response. ``param`` is the name of the invalid field."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @staticmethod
    def of(error: BaseException) -> "ApiError":
        """Converts any error to an `ApiError`. Drops hints with options or commands, which address the operator."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, UserError):
            hint = f" ({error.hint})" if error.hint and not _COMMAND_PATTERN.search(error.hint) else ""
            return ApiError(400 if error.exit_code == 2 else 500, error.message + hint)
        return ApiError(500, f"internal error in gpt: {type(error).__name__}: {error!s:.200}")

    def body(self) -> dict[str, Any]:
        """Returns the error object that clients receive."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _field_error(name: str, problem: str) -> ApiError:
    return ApiError(400, f"{name} {problem}", name)


@dataclass(frozen=True)
class Gap:
    """What surrounds a text that fills a gap, apart from the text before it."""

    suffix: str
    start: str = ""  # Text before the gap that is tokenized separately.
    files: Sequence[tuple[str, str]] = ()  # Names and texts of other files.
    cuts: bool = False  # Whether to cut long texts.


@dataclass(frozen=True)
class Generation:
    """The settings of a request, without its prompt."""

    config: SampleConfig
    seed: int | None  # None means a random seed.
    n: int
    bias: tuple[tuple[int, float], ...]
    stream: bool
    include_usage: bool
    echo: bool
    stop_ids: frozenset[int] = frozenset()
    constrained_by: str | None = None  # Name of the constraint's field in the request.
    rendered: Rendered = Rendered("", "")  # Of a chat.
    token_details: bool = False  # Adds token ids and bytes to completions.
    gap: Gap | None = None  # Of a completion that fills a gap.


@dataclass(frozen=True)
class ChatPrompt:
    """Messages and the settings for rendering them."""

    messages: Sequence[Mapping[str, Any]]
    answer: bool  # Whether the template starts an answer.
    open_end: bool  # Whether to continue the last message.
    variables: Mapping[str, Any]  # Template variables.
    tools: Tools | None = None
    thinks: bool = True  # Whether the model may reason first.


def read_json(body: bytes) -> dict[str, Any]:
    """Parses a request's body, which must be a JSON object. Raises `ApiError`."""

    def read_finite(word: str) -> float:
        if not math.isfinite(number := float(word)):
            raise ValueError(f"{word} is not a finite number")
        return number

    try:
        values = json.loads(body, parse_constant=read_finite, parse_float=read_finite)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error!s:.200}") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body is not a JSON object")
    return values


class Fields:
    """The fields of a request, validated when read. Null or missing fields get the ``defaults``."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] = types.MappingProxyType({})) -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self._sent_names: dict[str, str] = {}  # Field → the alias the client sent.
        for alias, name in ALIASES.items():
            if alias in self.values:
                if self.values.get(name, self.values[alias]) != self.values[alias]:
                    raise _field_error(alias, f"is an alias of {name}, which has another value; send one of them")
                self.values[name], self._sent_names[name] = self.values[alias], alias
        self.values = {**defaults, **self.values}

    def sent_name(self, name: str) -> str:
        """Returns the name that the client sent for a field."""
        return self._sent_names.get(name, name)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Returns a number. Raises `ApiError` unless it is from ``low`` to ``high``."""
        value, name = self.values.get(name, default), self.sent_name(name)
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            raise _field_error(name, f"is {_abbreviate(value)}; it must be a number from {low:g} to {high:g}")
        return float(value)

    def count(self, name: str, default: int, low: int, high: int) -> int:
        """Returns a whole number. Raises `ApiError` unless it is from ``low`` to ``high``."""
        value, name = self.values.get(name, default), self.sent_name(name)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise _field_error(name, f"is {_abbreviate(value)}; it must be a whole number from {low:,} to {high:,}")
        return value

    def value(self, name: str, default: Any, *kinds: type) -> Any:
        """Returns a field's value. Raises `ApiError` unless it has the default's type or one of ``kinds``."""
        value, name, kinds = self.values.get(name, default), self.sent_name(name), (type(default), *kinds)
        if not isinstance(value, kinds):
            expected = " or ".join(_TYPE_NAMES[kind] for kind in kinds)
            raise _field_error(name, f"is {_abbreviate(value)}; it must be {expected}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns a truth value."""
        return bool(self.value(name, default))

    def refuse(self, neutral: Mapping[str, Sequence[Any]]) -> None:
        """Raises `ApiError` for unsupported fields, unless their values are ``neutral``."""
        for name, allowed in neutral.items():
            if name in self.values and self.values[name] not in allowed:
                raise _field_error(name, "is not supported by this server; leave it out")


_TYPE_NAMES: dict[type, str] = {list: "a list", str: "a string", dict: "an object", bool: "true or false"}


def _abbreviate(value: Any) -> str:
    scalar = value is None or isinstance(value, (bool, int, float, str))
    return json.dumps(value if not isinstance(value, str) else value[:80])[:80] if scalar else reprlib.repr(value)


ALIASES = {  # Field names of llama.cpp's server, Transformers, vLLM and OpenAI's Responses API.
    "n_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "n_cmpl": "n",
    "no_repeat_ngram_size": "no_repeat_ngram", "guided_choice": "choices", "guided_regex": "regex",
    "guided_json": "json_schema", "max_output_tokens": "max_tokens",
}  # fmt: skip
ANY_OBJECT = {"type": "object"}
# Unsupported fields that would change the response, with the neutral values that the server accepts. Unlisted fields
# change nothing, or are unknown to OpenAI, llama.cpp and vLLM.
REFUSED: Mapping[str, Sequence[Any]] = {
    # OpenAI
    "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (),
    "web_search_options": (), "reasoning_effort": ("none",), "verbosity": ("medium",), "store": (False,),
    "best_of": (1,),
    # llama.cpp
    "typical_p": (1,), "top_n_sigma": (-1, 0), "dynatemp_range": (0,), "xtc_probability": (0,), "mirostat": (0,),
    "dry_multiplier": (0,), "adaptive_target": (-1,), "tfs_z": (1,), "min_keep": (0,), "samplers": (),
    "grammar": ("",), "lora": ([],), "n_keep": (0,), "n_discard": (0,), "n_indent": (0,),
    "t_max_predict_ms": (0, -1), "n_probs": (0,), "post_sampling_probs": (False,), "return_tokens": (False,),
    "response_fields": ([],), "reasoning_format": ("auto", "deepseek"), "thinking_budget_tokens": (-1,),
    # vLLM
    "use_beam_search": (False,), "include_stop_str_in_output": (False,), "truncate_prompt_tokens": (-1,),
    "prompt_logprobs": (), "prompt_embeds": (), "allowed_token_ids": ([],), "bad_words": ([],),
    "guided_grammar": ("",), "structured_outputs": ({},),
    "structural_tag": ("",), "logits_processors": ([],), "vllm_xargs": ({},), "detokenize": (True,),
    "return_tokens_as_token_ids": (False,), "return_token_ids": (False,), "documents": ([],), "chat_template": ("",),
    "thinking_token_budget": (), "include_reasoning": (True,),
}  # fmt: skip
REFUSED_IN_COMPLETIONS: Mapping[str, Sequence[Any]] = {
    "add_special_tokens": (True,), "tools": ([],), "tool_choice": ("none", "auto"),
}  # fmt: skip
REFUSED_IN_CHATS: Mapping[str, Sequence[Any]] = {"add_special_tokens": (False,), "echo": (False,), "suffix": ("",)}
REFUSED_IN_RESPONSES: Mapping[str, Sequence[Any]] = {
    "previous_response_id": (), "conversation": (), "background": (False,), "prompt": (), "truncation": ("disabled",),
    "context_management": ([],), "moderation": (), "n": (1,),
}  # fmt: skip
REFUSED_IN_INFILLS: Mapping[str, Sequence[Any]] = {"n": (1,), "echo": (False,), "suffix": ("",)}
IGNORED_IN_INFILLS = ("samplers", "n_indent", "t_max_predict_ms", "response_fields")  # Editors always send these.


def _read_generation(fields: Fields, limit: int, default_tokens: int, chat: bool) -> Generation:
    """Reads the settings of a request. ``default_tokens`` applies if the request sets no token limit."""
    n = fields.count("n", 1, 1, MAX_CHOICES)
    stream, echo = fields.flag("stream"), not chat and fields.flag("echo")
    if chat:
        logprobs = fields.count("top_logprobs", 0, 0, MAX_LOGPROBS) if fields.flag("logprobs") else None
        if logprobs is None and fields.values.get("top_logprobs"):
            raise _field_error("top_logprobs", "needs logprobs: true")
    else:
        logprobs = fields.count("logprobs", 0, 0, MAX_LOGPROBS) if "logprobs" in fields.values else None
    tokens_field = next((name for name in ("max_completion_tokens", "max_tokens") if name in fields.values), None)
    requested_tokens = fields.count(tokens_field or "max_tokens", default_tokens, -1, 2**31)  # -1 means no limit.
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
        max_tokens=limit if requested_tokens == -1 else min(requested_tokens, limit),
        min_tokens=fields.count("min_tokens", 0, 0, limit),
        ignore_eot=fields.flag("ignore_eos"),
        stop=_read_stops(fields.value("stop", [], str)),
        **_read_constraint(fields),
        logprobs=logprobs,
        echo_logprobs=echo and logprobs is not None,
    )
    has_penalty = config.presence_penalty or config.frequency_penalty or config.repetition_penalty not in (0, 1)
    if has_penalty and fields.count("repeat_last_n", -1, -1, 2**31) != -1:
        raise _field_error("repeat_last_n", "must be -1 or absent: penalties always apply to the whole text")
    stop_ids = fields.value("stop_token_ids", [])
    if not _are_ids(stop_ids) or len(stop_ids) > MAX_STOPS:
        raise _field_error("stop_token_ids", f"must be a list of at most {MAX_STOPS} ids")
    if stop_ids and config.min_tokens:
        raise _field_error("stop_token_ids", "cannot be combined with min_tokens")
    include_usage = fields.value("stream_options", {}).get("include_usage")
    if type(include_usage or False) is not bool:
        raise _field_error("stream_options", "has an include_usage that is neither true nor false")
    seed = fields.count("seed", -1, -_SEED_LIMIT, _SEED_LIMIT - 1)
    return Generation(
        config=config,
        seed=None if seed == -1 else seed,  # llama.cpp clients send -1 for a random seed.
        n=n,
        bias=_read_bias(fields.value("logit_bias", {})),
        stream=stream,
        include_usage=stream and bool(include_usage),
        echo=echo,
        stop_ids=frozenset(stop_ids),
        constrained_by=next(iter(_constraint_fields(fields)), None),
        token_details=not chat and fields.flag("token_details"),
    )


def _read_stops(value: str | list[Any]) -> tuple[str, ...]:
    stops = [stop for stop in ([value] if isinstance(value, str) else value) if stop != ""]  # It stops nothing.
    are_valid = all(isinstance(stop, str) and len(stop) <= MAX_STOP_LENGTH for stop in stops)
    if not are_valid or len(stops) > MAX_STOPS:
        raise _field_error("stop", f"must have at most {MAX_STOPS} strings of {MAX_STOP_LENGTH:,} characters")
    return tuple(map(clean, stops))


def _read_constraint(fields: Fields) -> dict[str, Any]:
    """Reads the constraint: ``choices``, ``regex``, or a schema in ``json_schema`` or ``response_format``."""
    empty_fields = [name for name in ("choices", "regex", "json_schema") if fields.values.get(name) in ([], "")]
    if empty_fields:
        raise _field_error(fields.sent_name(empty_fields[0]), "is empty")
    choices, regex = fields.value("choices", []), fields.value("regex", "")
    schema, output_format = fields.value("json_schema", "", dict), fields.value("response_format", {"type": "text"})
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise _field_error("choices", "must be a list of non-empty strings")
    if output_format.get("type") not in ("text", "json_object", "json_schema"):
        raise _field_error("response_format", "must be of type text, json_object or json_schema")
    if output_format["type"] != "text":
        parent = (
            output_format.get("json_schema")
            if output_format["type"] == "json_schema"
            else {"schema": output_format.get("schema") or ANY_OBJECT}
        )
        schema = parent.get("schema") if isinstance(parent, dict) else None
        if not isinstance(schema, dict):
            raise _field_error("response_format", "must have a schema that is an object")
    sent_fields = _constraint_fields(fields)
    if len(sent_fields) > 1:
        raise _field_error(sent_fields[1], f"cannot be combined with {sent_fields[0]}")
    try:
        schema = json.dumps(schema) if isinstance(schema, dict) else clean(schema)
    except RecursionError:
        raise _field_error(sent_fields[0], "is nested too deeply") from None
    return {"choices": tuple(map(clean, choices)), "regex": clean(regex), "json_schema": schema}


def _constraint_fields(fields: Fields) -> list[str]:
    """Returns the names of the constraint fields in a request."""
    output_format = fields.values.get("response_format", {})
    format_fields = (
        ["response_format"] if isinstance(output_format, dict) and output_format.get("type", "text") != "text" else []
    )
    names = [name for name in ("choices", "regex", "json_schema") if name in fields.values]
    return format_fields + [fields.sent_name(name) for name in names]


def clean(value: str) -> str:
    """Replaces unpaired surrogates, which JSON allows, with U+FFFD."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_bias(value: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    if len(value) > MAX_BIASES:
        raise _field_error("logit_bias", f"has {len(value):,} ids; the limit is {MAX_BIASES:,}")
    biases = []
    for id, bias in value.items():
        if not (id.isascii() and id.isdigit() and len(id) < 10):
            raise _field_error("logit_bias", f"has {_abbreviate(id)}, which is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise _field_error("logit_bias", f"for {id} is {_abbreviate(bias)}; it must be a number from -100 to 100")
        if bias:
            biases.append((int(id), float(bias)))
    return tuple(biases)


def read_completion(
    values: Mapping[str, Any], limit: int, defaults: Mapping[str, Any]
) -> tuple[list[str | Sequence[int]], Generation]:
    """Reads the prompts and settings of ``/v1/completions``, for at most ``limit`` tokens. Raises `ApiError`."""
    fields = Fields(values, defaults)
    fields.refuse({**REFUSED, **REFUSED_IN_COMPLETIONS})
    if "prompt" not in fields.values:
        raise _field_error("prompt", "is missing")
    generation = _read_generation(fields, limit, min(16, limit), chat=False)
    if suffix := fields.value("suffix", ""):
        if generation.echo:
            raise _field_error("suffix", "cannot be combined with echo")
        generation = replace(generation, gap=Gap(clean(suffix)))
    return _read_prompts(fields.values["prompt"]), generation


def read_infill(
    values: Mapping[str, Any], limit: int, defaults: Mapping[str, Any]
) -> tuple[list[str | Sequence[int]], Generation]:
    """Reads a request of ``/infill`` like `read_completion`. The prompt is the text before the gap."""
    fields = Fields(values, defaults)
    refused = {**REFUSED, **REFUSED_IN_COMPLETIONS, **REFUSED_IN_INFILLS}
    fields.refuse({name: neutral for name, neutral in refused.items() if name not in IGNORED_IN_INFILLS})
    files = []
    for file in fields.value("input_extra", []):
        name, text = (file.get("filename", "tmp"), file.get("text")) if isinstance(file, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise _field_error("input_extra", f"has {_abbreviate(file)}; it must be an object with filename and text")
        files.append((clean(name), clean(text)))
    prefix, suffix, start = (clean(fields.value(name, "")) for name in ("input_prefix", "input_suffix", "prompt"))
    generation = _read_generation(fields, limit, limit, chat=False)
    return [prefix], replace(generation, gap=Gap(suffix, start, files, cuts=True))


def _read_prompts(value: Any) -> list[str | Sequence[int]]:
    if isinstance(value, str) or (isinstance(value, list) and value and _are_ids(value)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise _field_error("prompt", f"is {_abbreviate(value)}; it must be a string, a list of ids, or a list of these")
    if len(value) > MAX_PROMPTS:
        raise _field_error("prompt", f"has {len(value):,} entries; the limit is {MAX_PROMPTS}")
    prompts: list[str | Sequence[int]] = []
    for entry in value:
        if not (isinstance(entry, str) or (isinstance(entry, list) and entry and _are_ids(entry))):
            raise _field_error("prompt", f"has {_abbreviate(entry)}, which is neither a string nor a list of ids")
        prompts.append(clean(entry) if isinstance(entry, str) else entry)
    return prompts


def _are_ids(values: list[Any]) -> bool:
    return all(type(id) is int for id in values)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def read_chat(values: Mapping[str, Any], limit: int, defaults: Mapping[str, Any]) -> tuple[ChatPrompt, Generation]:
    """Reads a request of ``/v1/chat/completions`` for at most ``limit`` tokens. Raises `ApiError`."""
    chat_prompt, fields = read_chat_prompt(values), Fields(values, defaults)
    generation = _read_generation(fields, limit, limit, chat=True)
    if chat_prompt.tools:
        conflict = "ignore_eos" if generation.config.ignore_eot else generation.constrained_by
        if conflict is not None:
            raise _field_error(conflict, "cannot be combined with tools")
        generation = replace(generation, constrained_by="tools")
    return chat_prompt, generation


def read_chat_prompt(values: Mapping[str, Any]) -> ChatPrompt:
    """Reads the messages of a request and the fields for rendering them. Raises `ApiError`."""
    fields = Fields(values)
    fields.refuse({**REFUSED, **REFUSED_IN_CHATS})
    messages = fields.values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _field_error("messages", "must be a list of at least one message")
    chat_messages = [_read_message(message) for message in messages]
    open_end = fields.flag("continue_final_message")
    answer = fields.flag("add_generation_prompt", not open_end)
    if open_end and answer:
        raise _field_error(
            "continue_final_message", "continues the last message, so add_generation_prompt must be false"
        )
    variables, thinks = _read_variables(fields), "reasoning_effort" not in fields.values
    if not thinks:
        variables = {"enable_thinking": False, **variables}
    return ChatPrompt(chat_messages, answer, open_end, variables, _read_tools(fields), thinks)


def _read_message(message: Any) -> dict[str, Any]:
    """Reads a message for a chat template."""
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if role == "assistant" and content is None:  # Clients send refusals, calls and empty answers back like this.
        content = message.get("refusal") or ""
    if isinstance(content, list):  # Content parts; only text is supported.
        texts = [part["text"] for part in content if _is_text(part)]
        other_type = next(
            (part.get("type", "text") for part in content if isinstance(part, dict) and not _is_text(part)), "text"
        )
        if other_type != "text":
            raise _field_error(
                "messages", f"has a part of type {_abbreviate(other_type)}; only parts of type text are supported"
            )
        content = "".join(texts) if len(texts) == len(content) else None
    if role == "developer":  # Most templates don't know OpenAI's newer name, and some drop the message.
        role = "system"
    if not isinstance(role, str) or not isinstance(content, str):
        raise _field_error(
            "messages", f"has {_abbreviate(message)}; a message needs a role and a content, both strings"
        )
    if role == "function" or message.get("function_call"):
        raise _field_error("messages", "has a function call of OpenAI's old form; send tool_calls and role tool")
    text_fields = {"role": role, "content": content, **reasoning(message)}
    text_fields |= {key: message.get(key) for key in ("name", "tool_call_id")}
    values: dict[str, Any] = {key: clean(text) for key, text in text_fields.items() if isinstance(text, str)}
    if calls := message.get("tool_calls"):
        values["tool_calls"] = [_read_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    return values


def _read_call(call: Any) -> dict[str, Any]:
    """Reads a call in an assistant message."""
    checked_call = read_call(call)
    if checked_call is None:
        problem = f"has the call {_abbreviate(call)}; it needs a function with a name, and arguments that are an object"
        raise _field_error("messages", problem)
    function = clean_object("messages", checked_call["function"])
    return {"id": clean(str(checked_call.get("id", ""))), "type": "function", "function": function}


def _read_tools(fields: Fields) -> Tools | None:
    """Returns the functions that the answer can call, or None."""
    tools, choice = fields.value("tools", []), fields.values.get("tool_choice", "auto")
    is_parallel = fields.flag("parallel_tool_calls", True)
    try:
        names = read_names(tools)
    except UserError as error:
        raise _field_error("tools", error.message) from None
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    chosen_name = named.get("name") if isinstance(named, dict) else None
    if choice not in (("none", "auto", "required") if tools else ("none", "auto")) and chosen_name not in names:
        what = f"none, auto, required, or one of the {len(tools)} functions in tools"
        raise _field_error("tool_choice", f"is {_abbreviate(choice)}; it must be {what}")
    if not tools or choice == "none":
        return None
    specs = clean_object("tools", {"tools": tools})["tools"]
    return Tools(specs, [str(chosen_name)] if named else names, choice != "auto", is_parallel)


_RESERVED_VARIABLES = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
    "raise_exception", "strftime_now", "namespace",
)  # fmt: skip


def _read_variables(fields: Fields) -> Mapping[str, Any]:
    """Returns additional variables for the chat template."""
    name = "chat_template_kwargs"
    values = fields.value(name, {})
    if "enable_thinking" in fields.values:  # Some clients, like Alibaba's, send this variable as a top-level field.
        values = {"enable_thinking": fields.flag("enable_thinking"), **values}
    cleaned = clean_object(name, values)
    if (length := len(json.dumps(values, ensure_ascii=False))) > MAX_VARIABLES_LENGTH:
        raise _field_error(name, f"has {length:,} characters; the limit is {MAX_VARIABLES_LENGTH:,}")
    for key in values:
        if key in _RESERVED_VARIABLES or key.endswith("_token"):
            raise _field_error(name, f"has {_abbreviate(key)}, which the server sets itself")
    return cleaned


def clean_object(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy without unpaired surrogates. Raises `ApiError` if a template could not print it."""
    level: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        level = [
            part for container in level for part in (container.values() if isinstance(container, dict) else container)
        ]
        level = [part for part in level if isinstance(part, (dict, list))]
    if level:
        raise _field_error(name, f"is nested more than {MAX_DEPTH} deep")
    cleaned: dict[str, Any] = json.loads(clean(json.dumps(values, ensure_ascii=False)))
    return cleaned
