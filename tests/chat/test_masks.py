"""Answers are learned as with TRL's ``assistant_only_loss``, which reads Transformers' masks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import vocabularies
from test_chat import with_chat_template
from transformers import AutoTokenizer

from gpt.chat.examples import Conversation, read_examples
from gpt.config.text import TextConfig
from gpt.system.errors import UserError
from gpt.tokenizers.finding import find_tokenizer
from gpt.training.example_rows import ChatEncoder

# Short forms of well-known templates. « and » enclose what the model writes, and become {% generation %}.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "«{{ message['content'] + '<|im_end|>' }}»{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SMOLLM2 = CHATML.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM<|im_end|>\\n' }}{% endif %}",
)
QWEN_CALLS = """
        {%- for call in message.tool_calls %}
            {%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}»{{- '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
QWEN_START = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You are Qwen.') }}
    {{- '\\n\\n# Tools\\n\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nReturn a json object within <tool_call></tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
"""
QWEN25 = QWEN_START + "{{- '<|im_start|>assistant\\n' }}«{{- content }}" + QWEN_CALLS
QWEN3 = (
    """\
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}{%- set ns.last_query = messages|length - loop.index %}
    {%- endif %}
{%- endfor %}
"""
    + QWEN_START
    + """\
        {%- set reasoning = message.reasoning_content or '' %}
        {{- '<|im_start|>assistant\\n' }}«
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{%- endif %}"""
    + QWEN_CALLS
)
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Today Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, respond with JSON.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- messages[0].content | trim + '<|eot_id|>' }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- elif message.role == 'assistant' %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}«
        {%- if 'tool_calls' in message %}
            {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{%- endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
        {%- else %}{{- message.content | trim }}{%- endif %}{{- '<|eot_id|>' }}»
    {%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """\
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}{%- endif %}
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == questions[-1] %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.first and system is defined else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}«
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs must have length 9') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}»
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}«{{- ' ' + message.content | trim + eos_token }}»
    {%- endif %}
{%- endfor %}"""
GEMMA = """\
{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {{ '<start_of_turn>model\\n' }}«{{- message['content'] | trim + '<end_of_turn>' }}»{{- '\\n' }}
    {%- else -%}
        {{ '<start_of_turn>user\\n' + (first_user_prefix if loop.first else '') }}{{ message['content'] | trim + '<end_of_turn>\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}"
    "«{{ message['content'] + '<|end|>' }}»{{ '\\n' }}{% else %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' }}«{{ message['content'] + eos_token }}»{{ '\\n' }}{% else %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
DEEPSEEK = """\
{%- set ns = namespace(system='', is_tool=false, last_user=false) %}
{%- for message in messages %}{%- if message.role == 'system' %}{%- set ns.system = ns.system + message.content %}{%- endif %}{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.is_tool = false %}{%- set ns.last_user = true %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'tool' %}{%- set ns.is_tool = true %}{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- elif message.role == 'assistant' %}
        {%- if ns.last_user %}{{- '<｜Assistant｜></think>' }}{%- endif %}{%- set ns.last_user = false %}{%- set ns.is_tool = false %}«
        {{- message.content or '' }}
        {%- if message.tool_calls is defined and message.tool_calls is not none %}{{- '<｜tool▁calls▁begin｜>' }}
            {%- for call in message.tool_calls %}
                {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
                {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
                {{- '<｜tool▁call▁end｜>' }}
            {%- endfor %}{{- '<｜tool▁calls▁end｜>' }}
        {%- endif %}{{- '<｜end▁of▁sentence｜>' }}»
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.last_user and not ns.is_tool %}{{- '<｜Assistant｜></think>' }}{%- endif %}"""

# Template, form of the vocabulary, and whether the answers of one conversation need a row each: never, in conversations
# with tools, or always.
TEMPLATES = {
    "SmolLM2": (SMOLLM2, "smollm2", "never"), "Qwen2.5": (QWEN25, "qwen", "never"), "Qwen3": (QWEN3, "qwen", "always"),
    "Llama 3": (LLAMA3, "llama3", "never"), "Mistral": (MISTRAL, "mistral", "with tools"),
    "Gemma": (GEMMA, "llama2", "never"), "Phi-3": (PHI3, "llama2", "never"), "ChatML": (CHATML, "gpt2", "never"),
    "Zephyr": (ZEPHYR, "mistral", "never"), "DeepSeek": (DEEPSEEK, "llama3", "never"),
}  # fmt: skip
ADD = {
    "name": "add",
    "description": "Adds é",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": ADD}]
SYSTEM = {"role": "system", "content": "Answer briefly."}
TURNS = [
    {"role": "user", "content": " What is 2 + 2? é日本 "},
    {"role": "assistant", "content": "It is 4.\n\nSure!"},
    {"role": "user", "content": "And 2?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "  5 <b>日</b>"},
]


def call(id: str, a: int, content: str | None) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": {"a": a}}
    calls = [{"id": id, "type": "function", "function": function}]
    return [
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "name": "add", "content": str(2 * a), "tool_call_id": id},
    ]


AGENT = [SYSTEM, *TURNS[:1], *call("call00001", 2, None), *TURNS[1:3], *call("call00002", 3, "Let me see."), *TURNS[3:]]


def find_specials(template: str) -> list[str]:
    return [
        *dict.fromkeys(
            re.findall(
                r"<[|｜][^|｜>{} ]+[|｜]>|<(?:start|end)_of_turn>|</?(?:tool_call|think)>|\[/?[A-Z_]{4,}\]", template
            )
        )
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_learned_ids_are_those_of_assistant_only_loss(name: str, workdir: Path) -> None:
    """Transformers masks what ``{% generation %}`` encloses. Without these tags, the answers are found."""
    template, form, splits = TEMPLATES[name]
    vocabularies.write(form, workdir / "form")
    reference = AutoTokenizer.from_pretrained(workdir / "form")
    reference.add_special_tokens({"additional_special_tokens": find_specials(template)})
    reference.save_pretrained(workdir / "tokenizer")
    tokenizer = find_tokenizer(str(workdir / "tokenizer"))
    tagged = template.replace("«", "{%- generation %}").replace("»", "{%- endgeneration %}")
    plain = re.sub("[«»]", "", template)

    def mask(messages: list[Any], tools: Any) -> tuple[list[int], list[int]]:
        result = reference.apply_chat_template(
            messages, tools=tools, chat_template=tagged, return_dict=True, return_assistant_tokens_mask=True
        )
        return result["input_ids"], result["assistant_masks"]

    def encode(template: str) -> list[tuple[list[int], list[int]]]:
        (conversation,) = read_examples(["chat.jsonl"], TextConfig(val_fraction=0), Conversation).train
        rows = ChatEncoder(with_chat_template(tokenizer, template), 4096, skip_bad=False).rows(conversation)
        return [(row.ids.tolist(), row.counts.astype(int).tolist()) for row in rows]

    for messages, tools in ((TURNS, None), ([SYSTEM, *TURNS], None), (AGENT, TOOLS)):
        Path("chat.jsonl").write_text(json.dumps({"messages": messages, "tools": tools}))
        if tools and "tool_calls" not in template:
            with pytest.raises(UserError, match=r"chat.jsonl, line 1: the chat template cannot write tool calls"):
                ChatEncoder(with_chat_template(tokenizer, plain), 4096, skip_bad=False).encode(
                    read_examples(["chat.jsonl"], TextConfig(val_fraction=0), Conversation).train
                )
            continue
        assert encode(tagged) == [mask(messages, tools)]
        expected = [mask(messages, tools)]
        if splits == "always" or (tools and splits == "with tools"):
            ends = [index + 1 for index, message in enumerate(messages) if message["role"] == "assistant"]
            expected = [mask(messages[:end], tools) for end in ends]
            for _, counts in expected:  # Only the last answer is learned.
                last = re.search("1*0*$", "".join(map(str, counts)))
                assert last is not None
                counts[: last.start()] = [0] * last.start()
        assert encode(plain) == expected
        assert all(1 in counts[1:] for _, counts in expected)
