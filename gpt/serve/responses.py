"""OpenAI's Responses API, as another form of chats: items become messages, and an answer becomes items and events."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpt.decoding.logits import Token
from gpt.serve.answers import Answer, Form, to_json
from gpt.serve.choices import Delta, chat_logprobs
from gpt.serve.protocol import REFUSED_IN_RESPONSES, ApiError, Fields, clean_object

_SENT_NAMES = {  # Field of a chat → field of the request.
    "messages": "input", "response_format": "text.format", "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip
_TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text")
_REPEATED: Mapping[str, Any] = {  # Fields of the request that the response repeats, with their defaults.
    "background": False, "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
    "previous_response_id": None, "reasoning": {}, "store": False, "temperature": 1.0,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": 1.0, "truncation": "disabled",
}  # fmt: skip


def to_chat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a request of ``/v1/responses`` as one of ``/v1/chat/completions``. Raises `ApiError`."""
    fields = Fields(values)
    fields.refuse(REFUSED_IN_RESPONSES)
    if "input" not in fields.values:
        raise ApiError(400, "input is missing", "input")
    text, items = fields.value("text", {}), fields.value("input", "", list)
    wants_logprobs = "message.output_text.logprobs" in fields.value("include", [])
    translated = {
        "messages": _read_items(fields.value("instructions", ""), items),
        "tools": [_nest_function(tool) for tool in fields.value("tools", [])],
        "tool_choice": _nest_function(fields.values.get("tool_choice")),
        "response_format": text.get("format"),
        "verbosity": text.get("verbosity"),
        "reasoning_effort": fields.value("reasoning", {}).get("effort"),
        "logprobs": wants_logprobs or bool(fields.values.get("top_logprobs")),
    }
    text_format = translated["response_format"]
    if isinstance(text_format, dict) and text_format.get("type") == "json_schema":
        translated["response_format"] = {"type": "json_schema", "json_schema": text_format}
    return fields.values | {name: value for name, value in translated.items() if value is not None}


def of_chat(error: ApiError, values: Mapping[str, Any]) -> ApiError:
    """Returns the error of a chat with the name of the field that the client sent in ``values``."""
    name = error.param if error.param in values else _SENT_NAMES.get(error.param or "", error.param)
    message = re.sub(rf"^{error.param}\b", str(name), error.message)
    return ApiError(error.status, message, name, error.code)


def _nest_function(value: Any) -> Any:
    """Returns a function, or the choice of one, as in a chat. Returns only the type of other tools, for the error."""
    if not isinstance(value, dict):
        return value
    function = {key: part for key, part in value.items() if key != "type" and part is not None}
    return {"type": value.get("type"), **({"function": function} if value.get("type") == "function" else {})}


def _read_items(instructions: str, items: str | list[Any]) -> list[dict[str, Any]]:
    """Returns items as messages. The items of one answer become one message, as do system messages at the start."""
    messages: list[dict[str, Any]] = []
    system = [{"role": "system", "content": instructions}] if instructions else []
    for item in system + ([{"role": "user", "content": items}] if isinstance(items, str) else items):
        message = _read_item(item)
        last: dict[str, Any] = messages[-1] if messages else {"role": None}
        roles, key = (last["role"], message["role"]), next(key for key in reversed(message) if key != "role")
        if roles == ("assistant", "assistant") and (
            key == "tool_calls" or (key == "content" and last.keys() == {"role", "reasoning_content"})
        ):
            last.setdefault(key, []).extend(message[key])
        elif len(messages) == 1 and all(role in ("system", "developer") for role in roles):
            last["content"] += [{"type": "text", "text": "\n\n"}, *message["content"]]
        else:
            messages.append(message)
    return messages


def _read_item(item: Any) -> dict[str, Any]:
    """Returns an item as a message."""
    kind = item.get("type", "message") if isinstance(item, dict) else item
    if kind == "message":
        return {"role": item.get("role"), "content": _read_content(item.get("content"))}
    if kind == "function_call":
        function = {key: item.get(key) for key in ("name", "arguments")}
        return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _read_content(item.get("output"))}
    if kind == "reasoning":
        parts = _read_content(item.get("content") or item.get("summary"))
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        return {"role": "assistant", "reasoning_content": "".join(texts)}
    raise ApiError(400, f"input has an item of type {kind!r:.80}, which this server does not support", "input")


def _read_content(content: Any) -> list[Any]:
    """Returns a text, or content parts, as content parts of a chat."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [isinstance(part, dict) and part.get("type") in _TEXT_PARTS for part in parts]
    return [{**part, "type": "text"} if is_text else part for part, is_text in zip(parts, texts, strict=True)]


_ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_TEXTS = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}
_EMPTY_ITEMS: Mapping[str, dict[str, Any]] = {
    "reasoning": {"summary": [], "content": []}, "message": {"role": "assistant", "content": []},
    "function_call": {"arguments": ""},
}  # fmt: skip
_Event = tuple[str, dict[str, Any]]  # Its type and values.


class ResponseForm(Form):
    """The response format of ``/v1/responses``, for one request. The items grow with the answer."""

    end = b""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        sent_values = {name: value for name, value in values.items() if value is not None}
        repeated = {name: {**_REPEATED, **defaults, **sent_values}[name] for name in _REPEATED}
        self.repeated = {name: clean_object(name, {name: value})[name] for name, value in repeated.items()}
        self.items: list[dict[str, Any]] = []
        self._event_count = 0

    def whole(self, answer: Answer) -> bytes:
        """Returns a complete response."""
        self.chunks(answer, 0, answer.choices[0].whole)
        return to_json(self._response(answer))

    def first(self, answer: Answer) -> list[dict[str, Any]]:
        """Returns the events before any item."""
        response = self._response(answer)
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def chunks(self, answer: Answer, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Returns the events of new text."""
        return [self._event(kind, **values) for kind, values in self._add(answer, delta)]

    def last(self, answer: Answer) -> list[dict[str, Any]]:
        """Returns the event of the end."""
        response = self._response(answer)
        return [self._event(response["status"], response=response)]

    def failure(self, answer: Answer, error: ApiError) -> dict[str, Any]:
        """Returns the event of an error."""
        values = {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        return self._event("failed", response={**self._response(answer), **values})

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._event_count += 1
        return {"type": f"response.{kind}", "sequence_number": self._event_count - 1, **values}

    def _response(self, answer: Answer) -> dict[str, Any]:
        reason = answer.choices[0].whole.reason
        status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        return {
            "id": f"resp_{answer.id}", "object": "response", "created_at": answer.created, "status": status,
            "completed_at": int(time.time()) if status == "completed" else None, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": answer.service.name, "output": self.items, "usage": _usage(answer) if reason else None,
            **self.repeated,
        }  # fmt: skip

    def _add(self, answer: Answer, delta: Delta) -> Iterator[_Event]:
        """Adds a delta to the items and yields its events."""
        if delta.reasoning:
            yield from self._begin(answer, "reasoning")
            yield self._text_delta(delta.reasoning)
        if delta.text or (delta.reason and not self.items and not delta.calls):
            yield from self._begin(answer, "message")
            yield self._text_delta(delta.text, logprobs=_logprobs(answer, delta.tokens))
        for call in delta.calls:
            if "id" in call:
                yield from self._begin(answer, "function_call", call_id=call["id"], name=call["function"]["name"])
            yield self._text_delta(call["function"]["arguments"])
        if delta.reason is not None:
            is_call_cut_off = delta.reason == "stop" and self.items[-1]["type"] == "function_call"
            yield from self._end(answer, "incomplete" if delta.reason == "length" or is_call_cut_off else "completed")

    def _begin(self, answer: Answer, kind: str, **values: Any) -> Iterator[_Event]:
        """Begins an item, unless its text continues the last one's."""
        if self.items and self.items[-1]["type"] == kind != "function_call":
            return
        if self.items:
            yield from self._end(answer, "completed")
        id = f"{_ID_PREFIXES[kind]}_{answer.id}{len(self.items)}"
        self.items.append({"id": id, "type": kind, "status": "in_progress", **_EMPTY_ITEMS[kind], **values})
        yield "output_item.added", {"output_index": len(self.items) - 1, "item": {**self.items[-1]}}
        if kind != "function_call":
            yield "content_part.added", {**self._place(), "part": _part(kind)}

    def _text_delta(self, text: str, **values: Any) -> _Event:
        return f"{_TEXTS[self.items[-1]['type']]}.delta", {**self._place(), "delta": text, **values}

    def _end(self, answer: Answer, status: str) -> Iterator[_Event]:
        """Ends the last item."""
        item, choice, place = self.items[-1], answer.choices[0], self._place()
        kind, whole = item["type"], choice.whole
        item["status"] = status
        if kind == "function_call":
            number = sum(each["type"] == kind for each in self.items) - 1
            item["arguments"] = whole.calls[number]["function"]["arguments"]
            yield "function_call_arguments.done", {**place, "arguments": item["arguments"]}
        else:
            part = _part(kind, whole.text if kind == "message" else whole.reasoning)
            if kind == "message":
                part["logprobs"] = _logprobs(answer, whole.tokens[choice.reasoning_tokens :])
            item["content"] = [part]
            yield f"{_TEXTS[kind]}.done", {**place, **{key: part[key] for key in ("text", "logprobs") if key in part}}
            yield "content_part.done", {**place, "part": part}
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _place(self) -> dict[str, Any]:
        """Returns where the last item's text is."""
        item = self.items[-1]
        content = {} if item["type"] == "function_call" else {"content_index": 0}
        return {"item_id": item["id"], "output_index": len(self.items) - 1, **content}


def _part(kind: str, text: str = "") -> dict[str, Any]:
    """Returns a content part of an item."""
    details: Mapping[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": _TEXTS[kind], "text": text, **details}


def _logprobs(answer: Answer, tokens: Sequence[tuple[Token, int]]) -> list[dict[str, Any]]:
    if answer.generation.config.logprobs is None:
        return []
    content: list[dict[str, Any]] = chat_logprobs(answer.service.tokenizer, tokens)["content"]
    return content


def _usage(answer: Answer) -> dict[str, Any]:
    usage = answer.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": usage["prompt_tokens"] - cached},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }
