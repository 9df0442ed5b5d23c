"""Tool calls, reasoning and the Responses API in `gpt serve`, and tool calls in `gpt chat`."""

import contextlib
import functools
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vocabularies
from conftest import Gpt, more
from models import loud, save
from serving import Served, load, request, served

from gpt import api
from gpt.api import LanguageModel
from gpt.chat import chat, tool_calls
from gpt.chat.tool_calls import PLAIN, AnswerParser, CallFormat, Parts, Tools
from gpt.config.model import GPTConfig
from gpt.config.sample import SampleConfig
from gpt.decoding.constraint import Constraint, ConstraintCache, Thinking
from gpt.serve.responses import to_chat
from gpt.tokenizers.finding import find_tokenizer
from gpt.tokenizers.saving import add_specials
from gpt.tokenizers.tokenizer import CHAT_TEMPLATE, Tokenizer, bytes_tokenizer

# Short forms of the templates of Qwen 2.5, Qwen 3, Mistral 7B v0.3 and Llama 3
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\nUse <tool_call>.\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>' + message.role }}{{- '\\n' + message.content if message.content }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
QWEN3 = QWEN.replace(
    "{{- '<|im_start|>' + message.role }}", "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' }}"
)
QWEN3 += "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs must have length 9') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}{{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
LLAMA = """\
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
    {%- else %}
        {%- if tools is not none and loop.first %}{{- tools | tojson(indent=4) }}{%- endif %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
NO_TOOLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
R1 = NO_TOOLS.replace("a:{%", "a:<think>\n{%") + "{# </think> #}"
BETWEEN = "\n</tool_call>\n<tool_call>\n"
QWEN_FORMAT = CallFormat("<tool_call>\n", "\n</tool_call>", BETWEEN)
MISTRAL_FORMAT = CallFormat("[TOOL_CALLS] [", "]", ", ")
LLAMA_FORMAT = CallFormat("", "", None, "parameters")
FORMATS = [
    (QWEN, QWEN_FORMAT),
    (QWEN3, QWEN_FORMAT),
    (MISTRAL, MISTRAL_FORMAT),
    (LLAMA, LLAMA_FORMAT),
    (NO_TOOLS, PLAIN),
]
IDS = ["qwen", "qwen3", "mistral", "llama", "no tools"]

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"enum": ["ü", '"}']}},
    "required": ["a"],
}
NOW = {"type": "function", "function": {"name": "now", "description": "The time"}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds", "parameters": ADD}}, NOW]
CALLS = [
    {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}},
    {"id": "call00002", "type": "function", "function": {"name": "now", "arguments": {}}},
]
QUESTION = {"role": "user", "content": "1 + 2?"}
CHAT = "/v1/chat/completions"


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return replace(tokenizer, files={**tokenizer.files, CHAT_TEMPLATE: template.encode()})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """A random model with a context that is long enough for tools."""
    tokenizer = with_template(add_specials(bytes_tokenizer(), ["<|im_end|>"]), QWEN)
    tokenizer = replace(tokenizer, more_ends=frozenset({257}))
    model = loud(GPTConfig.of("modern", 258, 2048, 1, 2, 16))
    return replace(load(save(tmp_path_factory.mktemp("model"), model, tokenizer)), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def server(model: LanguageModel) -> Iterator[Served]:
    with served(model, chunk=256) as api:
        yield api


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What constrained texts are, as far as their masks allow it: the first string of the list."""
    script, compute_mask, take, copy = [""], Constraint.compute_mask, Constraint.take, Constraint.copy

    def compute_scripted_mask(self: Constraint, V: int) -> Any:
        mask, ids = compute_mask(self, V), [*script[0].encode(), 256]
        id = ids[min(vars(self).get("taken", 0), len(ids) - 1)]
        return np.arange(V) == id if mask[id] else mask

    def count(self: Constraint, id: int) -> None:
        vars(self)["taken"] = vars(self).get("taken", 0) + 1
        take(self, id)

    monkeypatch.setattr(Constraint, "compute_mask", compute_scripted_mask)

    def copy_with_count(self: Constraint) -> Constraint:
        vars(copied := copy(self))["taken"] = vars(self).get("taken", 0)
        return copied

    monkeypatch.setattr(Constraint, "take", count)
    monkeypatch.setattr(Constraint, "copy", copy_with_count)
    return script


@pytest.mark.parametrize("template, call_format", FORMATS, ids=IDS)
def test_call_format_is_found_in_the_template(template: str, call_format: CallFormat) -> None:
    tokenizer = bytes_tokenizer()
    specials = {"<|im_end|>": 257, "<|eot_id|>": 258, "[TOOL_CALLS]": 259}
    tokenizer = replace(tokenizer, specials=specials, more_ends=frozenset({257, 258}))
    assert tool_calls.find_format(with_template(tokenizer, template)) == call_format


@pytest.mark.slow
@pytest.mark.parametrize("template, call_format", FORMATS[:-1], ids=IDS[:-1])
def test_conversations_with_tools_render_as_in_transformers(
    template: str, call_format: CallFormat, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    vocabularies.write("llama2", folder := tmp_path / "tokenizer")
    (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    tokenizer, reference = find_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    results = [{"role": "tool", "content": "3", "tool_call_id": call["id"]} for call in CALLS]
    for count in range(1 if call_format.between is None else 2):
        answer = {"role": "assistant", "content": "", "tool_calls": CALLS[: count + 1]}
        messages = [QUESTION, answer, *results[: count + 1], QUESTION]
        expected = reference.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
        assert chat.render(tokenizer, messages, variables={"tools": TOOLS}) == expected


def test_tools_are_plain_text_for_templates_without_them() -> None:
    answer = {"role": "assistant", "content": "Wait.", "tool_calls": CALLS}
    results = [{"role": "tool", "content": text, "tool_call_id": "x"} for text in ("3", "noon")]
    system, question, call, result = tool_calls.as_plain_text([QUESTION, answer, *results], Tools(TOOLS, ["add"]))
    assert system["role"] == "system"
    assert '{"name": "now", "description": "The time"}' in system["content"]
    assert question == QUESTION
    parts = Parts()
    AnswerParser("", PLAIN).push(call["content"], True, parts)
    assert parts.text == "Wait."
    assert read_calls(parts.calls) == [("add", {"a": 1, "b": "ü"}), ("now", {})]
    responses = ["<tool_response>\n3\n</tool_response>", "<tool_response>\nnoon\n</tool_response>"]
    assert (result["role"], result["content"].split("\n<tool_response>")) == ("user", [responses[0], responses[1][15:]])
    system, *_ = tool_calls.as_plain_text([{"role": "system", "content": "Be kind."}, QUESTION], Tools(TOOLS, ["add"]))
    assert system["content"].startswith("Be kind.\n\nYou can call")


def read_calls(deltas: list[Any]) -> list[tuple[str, Any]]:
    """Returns names and arguments of streamed calls."""
    calls: list[list[str]] = []
    for delta in deltas:
        if "id" in delta:
            assert delta["index"] == len(calls)
            assert (delta["type"], len(delta["id"])) == ("function", 9)
            calls.append([delta["function"]["name"], ""])
        calls[delta["index"]][1] += delta["function"]["arguments"]
    return [(name, json.loads(arguments)) for name, arguments in calls]


ADD_CALL = '{"name": "add", "arguments": {"a": 1, "b": "\\"}"}}'
NOW_CALL = '{"name": "now", "arguments": {}}'
ANSWERS: list[tuple[CallFormat | None, Thinking, str, tuple[str, str, list[str]]]] = [
    (QWEN_FORMAT, "", "Hi. {a} ", ("", "Hi. {a} ", [])),
    (QWEN_FORMAT, "", f"<tool_call>\n{ADD_CALL}\n</tool_call>", ("", "", ["add"])),
    (QWEN_FORMAT, "", f"So: <tool_call>\n{ADD_CALL}{BETWEEN}{NOW_CALL}\n</tool_call>", ("", "So:", ["add", "now"])),
    (QWEN_FORMAT, "", f"```json\n{{\n  {ADD_CALL[1:]}", ("", "", ["add"])),
    (QWEN_FORMAT, "", '{"a": 1}', ("", '{"a": 1}', [])),
    (QWEN_FORMAT, "", "```\nx\n```", ("", "```\nx\n```", [])),
    (QWEN_FORMAT, "open", f"So <tool_call>\n</think>\n\n<tool_call>\n{NOW_CALL}\n</tool_call>", ("So <tool_call>", "", ["now"])),
    (QWEN_FORMAT, "optional", "<think>\nSo </think>\n\nHi.\n", ("So", "Hi.\n", [])),
    (QWEN_FORMAT, "optional", "<thin", ("", "<thin", [])),
    (None, "optional", "Hi <think>.", ("", "Hi <think>.", [])),
    (None, "open", "So\n", ("So\n", "", [])),
    (MISTRAL_FORMAT, "", f"[TOOL_CALLS] [{ADD_CALL}, {NOW_CALL}]", ("", "", ["add", "now"])),
    (LLAMA_FORMAT, "", ADD_CALL.replace("arguments", "parameters"), ("", "", ["add"])),
    (LLAMA_FORMAT, "", "A call: {", ("", "A call: {", [])),
    (PLAIN, "", f"<tool_call>\n{ADD_CALL}\n</tool_call>", ("", "", ["add"])),
]  # fmt: skip


@pytest.mark.parametrize("call_format, thinking, text, expected", ANSWERS, ids=lambda value: f"{value!s:.40}")
def test_answer_is_parsed_and_allowed(
    call_format: CallFormat | None, thinking: Thinking, text: str, expected: tuple[str, str, list[str]]
) -> None:
    """The pieces of a stream don't matter. The grammar allows the answers of models that follow it."""
    rng = random.Random(0)
    for _ in range(20):
        parser, parts, rest = AnswerParser(thinking, call_format), Parts(), text
        while rest:
            piece, rest = rest[: (length := rng.choice((1, 2, 9, 99)))], rest[length:]
            parser.push(piece, not rest, parts)
        assert (parts.reasoning, parts.text, [name for name, _ in read_calls(parts.calls)]) == expected
        assert parser.is_complete == bool(expected[2])
    if call_format is not None:
        allowed, ended = follow(call_format, text, thinking)
        assert allowed == text
        assert ended


def follow(call_format: CallFormat, text: str, thinking: Thinking = "", **options: Any) -> tuple[str, bool]:
    """Returns the part of a text that the grammar allows, and whether it then ends."""
    grammar = call_format.grammar(Tools(TOOLS, ["add", "now"], **options), thinking)
    constraint = ConstraintCache(bytes_tokenizer()).find(SampleConfig(), grammar, thinking)
    assert constraint is not None
    constraint = constraint.copy()
    for at, id in enumerate(text.encode()):
        if not constraint.compute_mask(257)[id]:
            return text.encode()[:at].decode(), constraint.ended
        constraint.take(id)
    return text, constraint.ended or bool(constraint.compute_mask(257)[256])


@pytest.mark.parametrize(
    "text, allowed, options",
    [
        ("A <tool_call> ", "A <tool_call>", {}), ('<tool_call>\n{"name": "no', '<tool_call>\n{"name": "no', {}),
        ('<tool_call>\n{"name": "nope', '<tool_call>\n{"name": "no', {}), ('{"name": "nope"', '{"name": "no', {}),
        ('{"names": "nope"', '{"names": "nope"', {}),
        ('<tool_call>\n{"name": "add", "arguments": {}', '<tool_call>\n{"name": "add", "arguments": {', {}),
        ('<tool_call>\n{"name": "now", "arguments": {"a"', '<tool_call>\n{"name": "now", "arguments": {', {}),
        (f"<tool_call>\n{NOW_CALL}{BETWEEN}x", f"<tool_call>\n{NOW_CALL}{BETWEEN}", {}),
        (f"<tool_call>\n{NOW_CALL}{BETWEEN}", f"<tool_call>\n{NOW_CALL}\n</tool_call>", {"parallel": False}),
        ("A", "", {"required": True}), (f" {NOW_CALL}", "", {"required": True}),
    ],
    ids=str,
)  # fmt: skip
def test_mask_forbids_what_is_no_valid_call(text: str, allowed: str, options: dict[str, bool]) -> None:
    assert follow(QWEN_FORMAT, text, **options)[0] == allowed


def ask(server: Served, **body: Any) -> Any:
    return server.ask(CHAT, **{"messages": [QUESTION], "tools": TOOLS, "max_tokens": 200, "seed": 0, **body})


def check(choice: Any, names: tuple[str, ...] = ("add", "now")) -> None:
    """Asserts that a choice has valid calls."""
    message = choice["message"]
    assert (choice["finish_reason"], message["content"], message["refusal"]) == ("tool_calls", None, None)
    for call in message["tool_calls"]:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        assert name in names
        assert arguments == {} if name == "now" else type(arguments["a"]) is int and arguments.keys() <= {"a", "b"}


@pytest.mark.parametrize("choice, names", [("required", ("add", "now")), ({"type": "function", "function": {"name": "now"}}, ("now",))], ids=str)  # fmt: skip
def test_required_calls_are_valid_beside_other_requests(server: Served, choice: Any, names: tuple[str, ...]) -> None:
    def run(seed: int) -> Any:
        if seed % 4 == 3:
            return server.ask(CHAT, messages=[QUESTION], seed=seed, max_tokens=30)["choices"][0]["message"]
        return ask(server, tool_choice=choice, seed=seed, n=2, temperature=1.5, parallel_tool_calls=seed % 2 > 0)

    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(run, range(12))]
    for seed, answer in enumerate(answers):
        if seed % 4 == 3:
            assert answer == run(seed)  # Its neighbours don't change it.
            continue
        for each in answer["choices"]:
            if each["finish_reason"] == "tool_calls":  # Random weights often write too many calls.
                check(each, names)
                assert seed % 2 or len(each["message"]["tool_calls"]) == 1
        if not seed % 2:
            assert all(each["finish_reason"] == "tool_calls" for each in answer["choices"])
            calls = [[call["function"] for call in each["message"]["tool_calls"]] for each in answer["choices"]]
            again = run(seed)["choices"]
            assert calls == [[call["function"] for call in each["message"]["tool_calls"]] for each in again]


def test_stream_has_the_pieces_of_the_calls(server: Served, script: list[str]) -> None:
    body = {"messages": [QUESTION], "tools": TOOLS, "max_tokens": 300, "logprobs": True}
    call = '{"name": "add", "arguments": {"a": 1, "b": "ü"}}'
    script[0] = f"Wait é.\n<tool_call>\n{call}{BETWEEN}{NOW_CALL}\n</tool_call>"
    (choice,) = server.ask(CHAT, **body)["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("Wait é.", "tool_calls")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1, "b": "ü"}'}, {"name": "now", "arguments": "{}"},
    ]  # fmt: skip
    chunks = [chunk["choices"][0] for chunk in server.stream(CHAT, **body)]
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "Wait é."
    assert sum("tool_calls" in delta for delta in deltas) > 15
    streamed_calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert read_calls(streamed_calls) == [("add", {"a": 1, "b": "ü"}), ("now", {})]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    tokens = [token for chunk in chunks[1:] for token in chunk["logprobs"]["content"]]
    assert len(tokens) == len(choice["logprobs"]["content"]) == len(script[0].encode()) + 1


@pytest.mark.parametrize(
    "settings, reason, arguments",
    [
        ({"max_tokens": 12}, "length", []), ({"max_tokens": 50}, "length", ['{"a": 1, ']),
        ({"max_tokens": 57}, "length", ['{"a": 1, "b": "�']), ({"stop": '"b"'}, "stop", ['{"a": 1, ']),
        ({"stop": "</tool"}, "tool_calls", ['{"a": 1, "b": "ü"}']), ({}, "tool_calls", ['{"a": 1, "b": "ü"}']),
    ],
    ids=str,
)  # fmt: skip
def test_call_that_is_cut_off_is_incomplete(
    server: Served, script: list[str], settings: dict[str, Any], reason: str, arguments: list[str]
) -> None:
    script[0] = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
    for _ in range(2):
        (choice,) = ask(server, **settings)["choices"]
        assert choice["finish_reason"] == reason
        assert [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())] == arguments
        chunks = server.stream(CHAT, messages=[QUESTION], tools=TOOLS, **settings)
        deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert ["".join(delta["function"]["arguments"] for delta in deltas)] == (arguments or [""])
        assert chunks[-1]["choices"][0]["finish_reason"] == reason


def test_calls_and_results_continue_the_cached_conversation(server: Served, script: list[str]) -> None:
    """The call that a client sends back is rendered as the model wrote it."""
    script[0] = f"<tool_call>\n{ADD_CALL}\n</tool_call>"
    answer = ask(server)
    message = answer["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    script[0] = "It is 3."
    second = ask(server, messages=[QUESTION, message, result])
    assert (second["choices"][0]["message"]["content"], second["choices"][0]["finish_reason"]) == ("It is 3.", "stop")
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= answer["usage"]["total_tokens"] - 1
    system = {"role": "system", "content": "x"}
    for choice in ("none", None):  # The model doesn't see tools that it cannot call.
        tokens = server.ask("/tokenize", messages=[system, QUESTION], tools=TOOLS, tool_choice=choice)["tokens"]
        assert (tokens == server.ask("/tokenize", messages=[system, QUESTION])["tokens"]) == (choice == "none")


def test_disconnect_cancels_a_call(server: Served) -> None:
    body = {"messages": [QUESTION], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}, "required": ["a"]}}}], "tool_choice": "required", "stream": True, "logit_bias": {"34": -100}}  # fmt: skip
    with server.connect() as connection:
        connection.sendall(request(body, CHAT))
        while b"arguments" not in connection.recv(2**16):
            pass
    server.idle()
    check(ask(server, tool_choice="required", parallel_tool_calls=False)["choices"][0])


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"tools": [{"type": "custom"}]}, "tools", "must be a function named"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "must be a function named"),
        ({"tools": [NOW, NOW]}, "tools", "now twice"),
        ({"tools": {}}, "tools", "must be a list"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}, NOW, {}]}, "tools", "must be a function named"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools", "not the schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]}, "tools", "Unimplemented"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools", "not the schema"),
        ({"tool_choice": "any"}, "tool_choice", "must be none, auto, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "one of the 2"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "one of the 2"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "one of the 2"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "one of the 0"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"response_format": {"type": "json_object"}}, "response_format", "cannot be combined with tools"),
        ({"guided_regex": "a"}, "guided_regex", "cannot be combined with tools"),
        ({"ignore_eos": True}, "ignore_eos", "cannot be combined with tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages", "arguments"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages", "needs a function"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages", "needs a function"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages", "old form"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages", "old form"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ],
    ids=lambda value: f"{value!s:.40}",
)  # fmt: skip
def test_invalid_tools_are_refused_by_name(server: Served, fields: Any, param: str, message: str) -> None:
    error = server.refuse(CHAT, **{"messages": [QUESTION], "tools": TOOLS, **fields})
    assert error["param"] == param
    assert message in error["message"], error["message"]


@pytest.mark.parametrize("template, thinking", [(QWEN3, "optional"), (R1, "open"), (NO_TOOLS, "")], ids=str)
def test_reasoning_is_separate(model: LanguageModel, script: list[str], template: str, thinking: Thinking) -> None:
    """The mask of a choice after reasoning makes the texts known."""
    start = "<think>\n" if thinking == "optional" else ""
    reasoning = "So é <tool_call>." if thinking else ""
    script[0] = f"{start}{reasoning}\n</think>\n\nyes" if thinking else "yes"
    body = {"messages": [QUESTION], "choices": ["yes", "no"], "max_tokens": 100}
    with served(replace(model, tokenizer=with_template(model.tokenizer, template)), chunk=256) as server:
        (choice,) = (answer := server.ask(CHAT, **body))["choices"]
        assert (choice["message"].get("reasoning_content", ""), choice["message"]["content"]) == (reasoning, "yes")
        details = answer["usage"].get("completion_tokens_details")
        assert details == ({"reasoning_tokens": len(script[0].encode()) - 3} if thinking else None)
        deltas = [chunk["choices"][0]["delta"] for chunk in server.stream(CHAT, **body)]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == reasoning
        assert "".join(delta.get("content", "") for delta in deltas) == "yes"
        script[0] = "no"
        prompts = []
        for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
            if thinking != "open" or "reasoning_effort" in off:
                answer = server.ask(CHAT, **body, **off)
                prompts.append(answer["usage"]["prompt_tokens"])
                assert answer["choices"][0]["message"] == {"role": "assistant", "content": "no", "refusal": None}
        assert len({*prompts}) == 1


KINDS: list[dict[str, Any]] = [
    {}, {"temperature": 0}, {"stop": "a"}, {"n": 3}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "n": 2}, {"json_schema": ADD}, {"choices": ["yes", "no"]}, {"reasoning_effort": "none"},
    {"regex": "[a-z]{2,9}", "reasoning_effort": "none"}, {"logit_bias": {"60": 9}}, {"top_k": 5, "min_tokens": 9},
]  # fmt: skip


def collect(choices: list[Any]) -> list[list[str]]:
    """Returns reasoning, text, calls and finish reason of each choice, from messages or the deltas of a stream."""
    parts: dict[int, list[str]] = {}
    for choice in choices:
        part, whole = choice.get("message") or choice["delta"], parts.setdefault(choice["index"], [""] * 4)
        calls = [call["function"] for call in part.get("tool_calls", ())]
        texts = "".join(call.get("name", "") + call["arguments"] for call in calls)
        for at, text in enumerate((part.get("reasoning_content"), part.get("content"), texts, choice["finish_reason"])):
            whole[at] += text or ""
    return [whole for _, whole in sorted(parts.items())]


@pytest.mark.slow
@pytest.mark.parametrize("count", [80, more(1000)])
def test_mixed_requests_equal_each_alone(model: LanguageModel, tmp_path: Path, count: int) -> None:
    """Chats of all kinds with two models, streamed or not, while every tenth client disconnects."""
    rng = random.Random(0)
    other = load(save(tmp_path / "other", loud(GPTConfig.of("modern", 258, 2048, 2, 2, 16)), bytes_tokenizer()))
    other = replace(other, tokenizer=with_template(model.tokenizer, QWEN3))

    def make_body(seed: int) -> dict[str, Any]:
        message = {
            "role": "user",
            "content": " ".join(rng.choices(["1 + 2?", "the cat", "é", "what"], k=rng.randint(1, 60))),
        }
        return {"messages": [message], "model": rng.choice(["tiny", "other"]), "seed": seed, "stream": rng.random() < 0.5,
                "max_tokens": rng.randint(1, 60), **rng.choice(KINDS)}  # fmt: skip

    def answer(body: dict[str, Any]) -> list[list[str]]:
        if body["stream"]:
            return collect([choice for chunk in server.stream(CHAT, **body) for choice in chunk["choices"]])
        return collect(server.ask(CHAT, **body)["choices"])

    def run(body: dict[str, Any]) -> list[list[str]] | None:
        if body["seed"] % 10:
            return answer(body)
        with server.connect() as connection:
            connection.sendall(request({**body, "max_tokens": 2000}, CHAT))
            connection.settimeout(rng.random() / 10)
            with contextlib.suppress(TimeoutError):
                connection.recv(1)
        return None

    bodies = [make_body(seed) for seed in range(count)]
    with served(model, 4, 256, other=other, queue=100) as server, ThreadPoolExecutor(24) as pool:
        answers = [*pool.map(run, bodies)]
        for service in server.server.services.values():
            server.service = service
            server.idle()
        assert [body for body, text in zip(bodies, answers, strict=True) if text and text != answer(body)] == []
    assert sum(text is not None for text in answers) == count * 9 // 10


def test_chat_shows_calls_and_asks_for_their_results(
    gpt: Gpt, model: LanguageModel, script: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After both results, the model answers with the same text as in the server."""
    conversations: list[list[Any]] = []

    def render(tokenizer: Tokenizer, messages: list[Any], *args: Any, **options: Any) -> tool_calls.Rendered:
        conversations.append(messages)
        script[0] = f"Wait.\n<tool_call>\n{ADD_CALL}{BETWEEN}{NOW_CALL}\n</tool_call>"
        script[0] = script[0] if messages[-1]["role"] == "user" else "It is 3."
        return tool_calls_render(tokenizer, messages, *args, **options)

    tool_calls_render = tool_calls.render
    monkeypatch.setattr(tool_calls, "render", render)
    monkeypatch.setattr(api, "load", lambda *args, **options: model)
    Path("tools.json").write_text(json.dumps(TOOLS), encoding="utf-8")
    result = gpt(
        "chat", "--tools", "tools.json", "--seed", "1", stdin=b"1 + 2?\n3\nnoon\n/more\n/retry\nBye.\n/clear\n"
    )
    assert result.code == 0
    answer, calls = "It is 3.\n", f"Wait.\nadd {json.dumps(json.loads(ADD_CALL)['arguments'])}\nnow {{}}\n"
    assert result.out == calls + answer + answer + calls
    notes = [line.partition(" result of ")[2] for line in result.err.splitlines() if " result of " in line]
    assert notes == ["add", "now", "add"]
    assert "the text is complete" in result.err
    _, results, again, _ = conversations
    question, answered, first, second = results
    assert results == again
    assert (question["content"], answered["content"], first["content"], second["content"]) == (
        "1 + 2?",
        "Wait.",
        "3",
        "noon",
    )
    assert [call["function"]["arguments"] for call in answered["tool_calls"]] == [{"a": 1, "b": '"}'}, {}]
    assert [first["tool_call_id"], second["tool_call_id"]] == [call["id"] for call in answered["tool_calls"]]


def test_chat_continues_a_call_that_was_cut_off(
    gpt: Gpt, model: LanguageModel, script: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "load", lambda *args, **options: model)
    Path("tools.json").write_text(json.dumps(TOOLS), encoding="utf-8")
    script[0] = f"<tool_call>\n{NOW_CALL}\n</tool_call>"
    result = gpt("chat", "--tools", "tools.json", "-n", "30", stdin=b"When?\n/more\n")
    assert result.out.split() == ["now", "{}"]
    assert "result of now" in result.err


@pytest.mark.parametrize(
    ("template", "options", "answer", "shown"),
    [
        (QWEN3, ("--choices", "yes"), "<think>so it is</think>yes", "(thinking …)\n\nyes\n"),
        (R1, ("--choices", "yes"), "so it is</think>\n\nyes", "(thinking …)\n\nyes\n"),
        (QWEN3, ("--regex", "<b>yes"), "<b>yes", "<b>yes\n"),
        (QWEN, ("--regex", "<think>so"), "<think>so", "<think>so\n"),
    ],
)
def test_chat_does_not_show_reasoning(
    gpt: Gpt, model: LanguageModel, script: list[str], monkeypatch: pytest.MonkeyPatch,
    template: str, options: tuple[str, ...], answer: str, shown: str,
) -> None:  # fmt: skip
    model = replace(model, tokenizer=with_template(model.tokenizer, template))
    monkeypatch.setattr(api, "load", lambda *args, **settings: model)
    script[0] = answer
    assert gpt("chat", *options, stdin=b"Hi\n").out == shown


@pytest.mark.parametrize("template", [QWEN, R1, None], ids=["chat", "reasoning", "plain"])
def test_continued_text_meets_its_constraint(
    gpt: Gpt, model: LanguageModel, script: list[str], monkeypatch: pytest.MonkeyPatch, template: str | None
) -> None:
    files = {CHAT_TEMPLATE: template.encode()} if template else {}
    model = replace(model, tokenizer=replace(model.tokenizer, files=files))
    monkeypatch.setattr(api, "load", lambda *args, **settings: model)
    script[0] = "ü</think>0123é" if template == R1 else "0123é"
    lines = b"x\n" + b"/more\n" * (3 if template == R1 else 1)
    result = gpt("chat", "--regex", "[0-9]{4}é", "-n", "5", stdin=lines)
    assert "0123�é" in result.out.replace("\n", "")  # The first limit is inside of é.


@pytest.mark.parametrize(
    ("tools", "options", "message"),
    [
        ("[", (), "is not JSON"), ("[]", (), "tools.json has no functions"), ("{}", (), "must be a function named"),
        (json.dumps([NOW, NOW]), (), "tools.json has now twice"), ('[{"type": "\\ud800"}]', (), "is not UTF-8"),
        ("[" * 10**5, (), "is not JSON"), (json.dumps(TOOLS), ("--regex", "a"), "regex and --tools cannot"),
        (json.dumps(TOOLS), ("--ignore-eot",), "ignore-eot and --tools cannot"),
        (json.dumps([{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]), (), "Unimplemented"),
    ],
    ids=lambda value: f"{value!s:.20}",
)  # fmt: skip
def test_chat_refuses_tools(
    gpt: Gpt, model: LanguageModel, monkeypatch: pytest.MonkeyPatch, tools: str, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(api, "load", lambda *args, **options: model)
    Path("tools.json").write_text(tools, encoding="utf-8")
    result = gpt("chat", "--tools", "tools.json", *options, stdin=b"Hi\n")
    assert (result.code, result.out) == (2, "")
    assert message in result.err


RESPONSES = "/v1/responses"
FUNCTIONS = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": each} for each in texts]


@pytest.mark.parametrize(
    "request_values, messages",
    [
        ({"input": "1 + 2?"}, [{"role": "user", "content": text("1 + 2?")}]),
        (
            {
                "instructions": "Be kind.",
                "input": [
                    {"role": "developer", "content": "Be brief."},
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 + "}, {"type": "input_text", "text": "2?"}]},
                    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "So"}]},
                    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [{"type": "output_text", "text": "Wait.", "annotations": []}]},
                    {"type": "function_call", "call_id": "call00001", "name": "add", "arguments": "{}"},
                    {"type": "function_call", "call_id": "call00002", "name": "now", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "call00001", "output": "3"},
                    {"type": "function_call_output", "call_id": "call00002", "output": [{"type": "input_text", "text": "noon"}]},
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "It is."}]},
                    {"role": "assistant", "content": "It is 3."},
                    {"role": "assistant", "content": "At noon."},
                    {"type": "function_call", "call_id": "call00003", "name": "now", "arguments": "{}"},
                ],
            },
            [
                {"role": "system", "content": text("Be kind.", "\n\n", "Be brief.")},
                {"role": "user", "content": text("1 + ", "2?")},
                {"role": "assistant", "reasoning_content": "So", "content": [{"type": "text", "text": "Wait.", "annotations": []}], "tool_calls": [
                    {"id": "call00001", "function": {"name": "add", "arguments": "{}"}},
                    {"id": "call00002", "function": {"name": "now", "arguments": "{}"}},
                ]},
                {"role": "tool", "tool_call_id": "call00001", "content": text("3")},
                {"role": "tool", "tool_call_id": "call00002", "content": text("noon")},
                {"role": "assistant", "reasoning_content": "It is.", "content": text("It is 3.")},
                {"role": "assistant", "content": text("At noon."), "tool_calls": [{"id": "call00003", "function": {"name": "now", "arguments": "{}"}}]},
            ],
        ),
    ],
    ids=["text", "items"],
)  # fmt: skip
def test_items_become_messages(request_values: dict[str, Any], messages: list[Any]) -> None:
    assert to_chat(request_values)["messages"] == messages


def stream_response(server: Served, **body: Any) -> tuple[Any, list[Any]]:
    """Returns the response at the end of a stream, and its events."""
    answer = server.post(RESPONSES, stream=True, **body)
    assert answer.status_code == 200, answer.text
    events = []
    for number, block in enumerate(answer.text.strip().split("\n\n")):
        name, data = block.split("\n")
        events.append(event := json.loads(data.removeprefix("data: ")))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
    return events[-1]["response"], events


def without_ids(response: Any) -> Any:
    """Returns a response without what differs between two equal requests."""
    items = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    return {**response, "output": items, "id": 0, "created_at": 0, "completed_at": 0, "usage": 0}


REASONED = "So é.\n</think>\n\nyes"
CALLED = f"Wait é.\n<tool_call>\n{ADD_CALL}{BETWEEN}{NOW_CALL}\n</tool_call>"


@functools.cache  # Building them takes a second.
def response_validators() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Returns functions that check a response, and a list of events, with the types of OpenAI's client."""
    pytest.importorskip("openai")
    from openai.types import responses
    from pydantic import TypeAdapter

    return responses.Response.model_validate, TypeAdapter(list[responses.ResponseStreamEvent]).validate_python


@pytest.mark.parametrize(
    "template, script_text, fields, status, items",
    [
        (QWEN, CALLED, {"tools": FUNCTIONS}, "completed", ["message:Wait é.", 'function_call:{"a": 1, "b": "\\"}"}', "function_call:{}"]),
        (QWEN, CALLED, {"tools": FUNCTIONS, "max_output_tokens": 60}, "incomplete", ["message:Wait é.", 'function_call:{"a": 1, "']),
        (QWEN, CALLED, {"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "now"}, "parallel_tool_calls": False}, "completed", ["function_call:{}"]),
        (R1, REASONED, {"choices": ["yes", "no"]}, "completed", ["reasoning:So é.", "message:yes"]),
        (R1, REASONED, {"choices": ["yes", "no"], "max_output_tokens": 3}, "incomplete", ["reasoning:So "]),
        (R1, "no", {"choices": ["yes", "no"], "reasoning": {"effort": "none", "summary": "auto"}}, "completed", ["message:no"]),
        (QWEN, '{"a":1}', {"text": {"format": {"type": "json_schema", "name": "add", "schema": ADD}, "verbosity": "medium"}}, "completed", ['message:{"a":1}']),
        (QWEN, "{}", {"text": {"format": {"type": "json_object"}}, "top_logprobs": 2}, "completed", ["message:{}"]),
        (QWEN, "ab", {"regex": "ab", "stop": "ab"}, "completed", ["message:"]),
    ],
    ids=["calls", "cut off", "named", "reasoning", "only reasoning", "no reasoning", "schema", "object", "empty"],
)  # fmt: skip
def test_response_has_the_items_of_a_chat(
    model: LanguageModel, script: list[str], template: str, script_text: str, fields: dict[str, Any], status: str, items: list[str]
) -> None:  # fmt: skip
    script[0] = script_text
    body = {"input": "1 + 2?", "instructions": "Be kind.", "metadata": {"a": "\ud800"}, **fields}
    with served(replace(model, tokenizer=with_template(model.tokenizer, template)), chunk=256) as server:
        response = server.ask(RESPONSES, **body)
        streamed, events = stream_response(server, **body)
        assert server.ask(CHAT, **to_chat(body))["usage"]["prompt_tokens"] == response["usage"]["input_tokens"]
    assert without_ids(response) == without_ids(streamed)
    assert (response["status"], response["metadata"], response["top_p"]) == (status, {"a": "\ufffd"}, 1.0)
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)
    texts = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in response["output"]]
    assert [f"{item['type']}:{text}" for item, text in zip(response["output"], texts, strict=True)] == items
    if "top_logprobs" in fields:
        (part,) = response["output"][0]["content"]
        assert [len(token["top_logprobs"]) for token in part["logprobs"]] == [2, 2]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert (kinds[:2], kinds[-1]) == (["created", "in_progress"], status)
    for index, (item, text) in enumerate(zip(streamed["output"], texts, strict=True)):
        part = [event for event in events if event.get("output_index") == index]
        assert (part[0]["type"], part[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert part[0]["item"]["status"] == "in_progress" and part[-1]["item"] == item
        assert {event.get("item_id", item["id"]) for event in part} == {item["id"]}
        assert "".join(event.get("delta", "") for event in part) == text
    validate_response, validate_events = response_validators()
    validate_response(response)
    validate_events(events)


def test_response_that_is_sent_back_continues_the_cached_conversation(server: Served, script: list[str]) -> None:
    script[0] = f"<tool_call>\n{ADD_CALL}\n</tool_call>"
    first = server.ask(RESPONSES, input="1 + 2?", tools=FUNCTIONS)
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "3"}
    script[0] = "It is 3."
    second = server.ask(RESPONSES, input=[QUESTION, *first["output"], result], tools=FUNCTIONS)
    assert second["output"][0]["content"][0]["text"] == "It is 3."
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"input": None}, "input", "input is missing"),
        ({"input": 5}, "input", "input is 5"),
        ({"input": []}, "input", "input must be a list of at least one message"),
        ({"input": "a" * 9999}, "input", "the conversation has"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input has a part of type \"input_image\""),
        ({"input": [{"type": "reasoning", "summary": 1}, {"type": "function_call", "name": 1}]}, "input", "input has the call"),
        ({"input": [{"type": "function_call_output", "output": {}}]}, "input", "needs a role and a content"),
        ({"input": [{}]}, "input", "needs a role and a content"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools", "must be a function named"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice", "one of the 0 functions"),
        ({"text": {"format": {"type": "x"}}}, "text.format", "text.format must be of type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "text.verbosity is not supported"),
        ({"text": {"format": {"type": "json_object"}}, "tools": FUNCTIONS}, "text.format", "text.format cannot be combined"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "reasoning.effort is not supported"),
        ({"max_output_tokens": "x"}, "max_output_tokens", "max_output_tokens is"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"store": True}, "store", "not supported"),
        ({"n": 2}, "n", "not supported"),
        ({"model": "x"}, "model", "there is no model"),
    ],
    ids=lambda value: f"{value!s:.40}",
)  # fmt: skip
def test_invalid_responses_are_refused_by_name(server: Served, fields: Any, param: str, message: str) -> None:
    error = server.refuse(RESPONSES, 404 if "model" in fields else 400, **{"input": "a", **fields})
    assert error["param"] == param
    assert message in error["message"], error["message"]


def test_failed_response_ends_with_an_event(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service.worker.engine, "step", lambda: 1 / 0)
    response, events = stream_response(server, input="a")
    assert (events[-1]["type"], response["status"]) == ("response.failed", "failed")
    assert "division" in response["error"]["message"]
