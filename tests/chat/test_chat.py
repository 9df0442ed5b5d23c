"""Chat templates, and training on conversations."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import vocabularies
from conftest import TINY, Gpt, one_line_of_what_and_what_next, slow
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

import gpt as library
from gpt.api import LanguageModel
from gpt.chat import chat, examples
from gpt.chat.examples import Conversation, read_examples
from gpt.config import events
from gpt.config.sample import SampleConfig
from gpt.config.text import TextConfig
from gpt.decoding.context import Context
from gpt.decoding.write import Sample
from gpt.system.errors import UserError
from gpt.tokenizers.finding import find_tokenizer
from gpt.tokenizers.saving import save_tokenizer
from gpt.tokenizers.tokenizer import CHAT_TEMPLATE, Tokenizer, bytes_tokenizer
from gpt.training.example_rows import ChatEncoder

SYSTEM = {"role": "system", "content": "Answer briefly.\n"}
CHAT = [
    {"role": "user", "content": " What is 2 + 2? é日本 "},
    {"role": "assistant", "content": "It is 4.\n\nSure!"},
    {"role": "user", "content": 'And <b>"then"</b>?'},
    {"role": "assistant", "content": "  5"},
]
QUESTION = CHAT[:3]

# Short forms of well-known templates
LLAMA3 = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set said = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set said = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '\\n' + said + '<|eot_id|>' }}"
    "{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}"
    "{%- for message in messages %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
ZEPHYR = """\
{% for message in messages %}
    {% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
    {% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
    {% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
    {% else %}{% continue %}{% endif %}
    {% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
    {% endif %}
{% endfor %}
"""
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system line') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
TAGGED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOLS = "{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=2) }}{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}"


# Templates that rewrite earlier messages, or whose generation prompt differs from a finished answer
QWEN3 = """\
{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and not ns.seen %}
        {%- set ns.seen = true %}
        {%- set ns.last = messages|length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set text = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- set thought = message.content.split('</think>')[0].split('<think>')[-1] if '</think>' in message.content else '' %}
    {%- if message.role == "assistant" and loop.index0 > ns.last and (loop.last or thought) %}
        {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + text }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
R1 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ 'Assistant:' + content + eos_token }}{% elif message['role'] == 'user' %}{{ 'User:' + message['content'] }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:<think>\\n' }}{% endif %}"
)


TEMPLATES = {
    "llama3": ("llama3", LLAMA3), "qwen": ("qwen", QWEN3), "zephyr": ("mistral", ZEPHYR), "mistral": ("llama2", MISTRAL),
    "chatml": ("smollm2", chat.CHATML), "tagged": ("qwen", TAGGED), "unigram": ("unigram", ZEPHYR), "tools": ("gpt2", TOOLS),
}  # fmt: skip


def with_chat_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return replace(tokenizer, files={**tokenizer.files, CHAT_TEMPLATE: template.encode()})


def load_both(folder: Path, form: str, template: str) -> tuple[Tokenizer, Any]:
    """Returns our tokenizer and the Transformers tokenizer."""
    vocabularies.write(form, folder)
    (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    return find_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)


def read(name: str, **config: Any) -> list[Conversation]:
    return read_examples([name], TextConfig(val_fraction=0, **config), Conversation).train


def read_back(messages: list[Any]) -> Conversation:
    Path("one.jsonl").write_text(make_jsonl([messages]))
    (conversation,) = read("one.jsonl")
    return conversation


def make_jsonl(chats: list[Any]) -> str:
    return make_lines([{"messages": messages} for messages in chats])


def make_lines(records: list[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_text_and_ids_equal_transformers(name: str, tmp_path: Path) -> None:
    tokenizer, reference = load_both(tmp_path / "form", *TEMPLATES[name])
    for messages in (QUESTION, [SYSTEM, *QUESTION]):
        if messages[0] is SYSTEM and name == "mistral":
            with pytest.raises(UserError, match="no system line"):
                chat.render(tokenizer, messages)
            continue
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert chat.render(tokenizer, messages) == expected
        ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode(chat.render(tokenizer, messages), specials=True).tolist() == ids
    expected = reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=False)
    assert chat.render(tokenizer, CHAT, answer=False) == expected
    for last in ("  5", "The answer is ", "\n", "", "CONTINUE_FINAL_MESSAGE_TAG"):  # Unfinished answers
        messages = [*QUESTION, {"role": "assistant", "content": last}]
        try:
            expected = reference.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        except ValueError:  # The rendered text lacks the last message.
            with pytest.raises(UserError, match="cannot be continued"):
                chat.render(tokenizer, messages, answer=False, open_end=True)
            continue
        assert chat.render(tokenizer, messages, answer=False, open_end=True) == expected


def test_template_variables_equal_transformers(tmp_path: Path) -> None:
    template = (
        "{{ enable_thinking is defined }}{{ enable_thinking }}{{ more | tojson }}{{ self is defined }}{{ bos_token }}"
    )
    tokenizer, reference = load_both(tmp_path / "form", "llama2", template)
    for variables in ({}, {"enable_thinking": False}, {"more": {"é": [1, 2.5, None, "日本"]}}):
        variables = {"more": [], **variables}
        expected = reference.apply_chat_template(QUESTION, tokenize=False, **variables)
        assert chat.render(tokenizer, QUESTION, answer=False, variables=variables) == expected
    assert chat.render(tokenizer, QUESTION, variables={"more": 0, "self": 1, "bos_token": "x"}).endswith("True<s>")


@pytest.mark.parametrize("form", ["smollm2", "qwen", "llama2", "unigram"])
def test_answer_mask_equals_transformers(form: str, tmp_path: Path) -> None:
    """Transformers computes the mask only from generation tags, here in ChatML."""
    folder = vocabularies.write(form, tmp_path / "form")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = chat.with_template(find_tokenizer(str(folder)))
    save_tokenizer(tokenizer, tmp_path / "saved")
    reference = AutoTokenizer.from_pretrained(tmp_path / "saved")
    ((text, spans),), ends = chat.answers(tokenizer, [SYSTEM, *CHAT])
    ids, counts = tokenizer.encode_marked(text, spans)
    tagged = TAGGED if tokenizer.bos is None else "{{ bos_token }}" + TAGGED
    expected = reference.apply_chat_template(
        [SYSTEM, *CHAT], chat_template=tagged, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids.tolist() == expected["input_ids"]
    assert counts.astype(int).tolist() == expected["assistant_masks"]
    assert ends == {tokenizer.all_specials["<|im_end|>"]} <= tokenizer.ends
    ((text, spans),), _ = chat.answers(with_chat_template(tokenizer, tagged), [SYSTEM, *CHAT])
    assert tokenizer.encode_marked(text, spans)[1].tolist() == counts.tolist()


REASONING = "<think>\nthe question was and it is 4\n</think>\n\n"


@pytest.mark.parametrize(
    ("form", "template", "header", "thinks"),
    [("qwen", QWEN3, "<|im_start|>assistant\n", True), ("llama2", R1, "Assistant:", False)],
)
@pytest.mark.parametrize(
    "answer", ["4", "A", " A", "<b>4</b>", "", REASONING + "4", REASONING + "assistant", "a\n\nb "]
)
def test_rewriting_template_gives_one_row_per_answer(
    tmp_path: Path, form: str, template: str, header: str, thinks: bool, answer: str
) -> None:
    tokenizer, reference = load_both(tmp_path / "form", form, template)
    messages = [SYSTEM, *CHAT[:1], {"role": "assistant", "content": answer}, *CHAT[2:]]
    rows, ends = chat.answers(tokenizer, messages)
    end = "<|im_end|>" if thinks else "</s>"
    assert ends == {tokenizer.all_specials[end]}
    for (text, ((start, stop),)), number in zip(rows, (2, 4), strict=True):
        assert text == reference.apply_chat_template(messages[: number + 1], tokenize=False)
        content = messages[number]["content"]
        words = content.removeprefix(REASONING) if thinks else content.rpartition("</think>")[2]
        reasoning = content.removesuffix(words) or "<think>\n\n</think>\n\n"
        words = words.lstrip("\n") if thinks else words
        assert text[start:stop] == (reasoning if thinks else "") + words + end
        assert text[:start].endswith(header)
    encoder = ChatEncoder(tokenizer, 512, skip_bad=False)
    encoded = encoder.encode([Conversation(messages, "")])
    assert (len(encoded), encoded.examples) == (2, 1)
    assert "1 conversation with several answers became a row per answer" in next(encoder.notes())
    for row, number in zip(encoded, (2, 4), strict=True):
        assert row.ids.tolist() == reference.apply_chat_template(messages[: number + 1], return_dict=False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ namespace(__init__=1) }}", "no member"),
        ("{{ 'x' * 10 ** 7 }}", "more than 4,194,304 characters"),
        ("{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "rejects|longer"),
        ("{% for m in messages %}", "Unexpected end"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include 'x' %}", "rejects"),
    ],
)  # fmt: skip
def test_failing_or_oversized_template_is_an_error(template: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chat.render(with_chat_template(bytes_tokenizer(), template), QUESTION)


@pytest.mark.parametrize(
    "template",
    [
        slow("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        "{{ range(99999) | map('string') | sum(start='') if 0 else 7 ** (10 ** 9) }}",  # No Python code runs during this call.
    ],
)
def test_endless_template_times_out(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "TIME_LIMIT", 0.5)
    tokenizer = with_chat_template(bytes_tokenizer(), template)
    for _ in range(2):  # The second call starts a new process.
        with pytest.raises(UserError, match="takes longer than 0.5 s"):
            chat.render(tokenizer, QUESTION)


def test_missing_or_untrainable_template_is_an_error() -> None:
    with pytest.raises(UserError, match="no chat template"):
        chat.render(bytes_tokenizer(), QUESTION)
    rewriting = chat.CHATML.replace("message['content']", "(message['content'] if loop.last else '…')")
    tokenizer = chat.with_template(bytes_tokenizer())
    with pytest.raises(UserError, match="changes earlier messages when an answer is added"):
        chat.answers(with_chat_template(tokenizer, rewriting), CHAT)
    with pytest.raises(UserError, match="does not end an answer with a special token"):
        chat.answers(with_chat_template(bytes_tokenizer(), chat.CHATML), CHAT)


def test_long_conversation_is_truncated_after_an_answer() -> None:
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    turn = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    both_turns = f"{turn}\n{turn.replace('a<', 'c<').replace('b<', 'd<')}\n"
    tokens_of_both, tokens_of_turn = (len(re.sub(r"<\|\w+\|>", "s", text)) for text in (both_turns, turn))
    both_answers, first_answer = "b<|im_end|>d<|im_end|>", "b<|im_end|>"
    for size, text, counts, note in (
        (tokens_of_both - 1, both_turns, both_answers, ""),
        (tokens_of_both - 3, turn, first_answer, "1 cut after the last answer"),  # The second turn does not fit.
        (tokens_of_turn - 1, turn, first_answer, "1 cut after the last answer"),
        (tokens_of_turn - 2, turn.removesuffix("<|im_end|>"), "b", "1 within the first"),
        (tokens_of_turn - 3, "", "", "1 skipped"),
    ):
        encoder = ChatEncoder(bytes_tokenizer(), size, skip_bad=False)
        rows = encoder.rows(Conversation(messages, "line 1"))
        texts = [encoder.tokenizer.decode(row.ids.tolist()) for row in rows]
        trained_texts = [encoder.tokenizer.decode(row.ids[row.counts].tolist()) for row in rows]
        assert ("".join(texts), "".join(trained_texts), len(rows)) == (text, counts, bool(text)), size
        assert [row.bytes for row in rows] == [len(answer.replace("<|im_end|>", "")) for answer in trained_texts]
        assert note in next(encoder.notes(), "") and bool(note) == any(encoder.notes())


WORDS = ["zero", "one", "two", "three", "four", "five"]
CHATS = [
    [*([SYSTEM] if number % 3 else []), {"role": "user", "content": f"Spell {number}."},
     {"role": "assistant", "content": f"{word}!"}, {"role": "user", "content": f"And {5 - number}?"},
     {"role": "assistant", "content": f"{WORDS[5 - number]}."}]
    for number, word in enumerate(WORDS)
] * 4  # fmt: skip
SETTINGS: dict[str, Any] = {**TINY, "chat": True, "block_size": 128, "dtype": "float32"}


@pytest.fixture
def file(workdir: Path) -> Path:
    path = workdir / "chats.jsonl"
    path.write_text(make_jsonl(CHATS))
    return path


def assert_equal_in_transformers(folder: Path) -> None:
    """Compares a folder's ids, logits and end tokens with those in Transformers."""
    tokenizer, reference = library.load(folder), AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer.tokenizer.encode(chat.render(tokenizer.tokenizer, QUESTION), specials=True).tolist()
    assert reference.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False) == ids
    assert (
        reference.apply_chat_template(CHATS[1], tokenize=False) == chat.answers(tokenizer.tokenizer, CHATS[1])[0][0][0]
    )
    end = reference.convert_tokens_to_ids("<|im_end|>")
    assert end in tokenizer.tokenizer.ends
    assert set(model.generation_config.eos_token_id) == tokenizer.tokenizer.ends
    with torch.no_grad():
        x = torch.tensor([ids[-8:]])
        torch.testing.assert_close(
            model(x).logits, tokenizer.model(x)[..., : model.config.vocab_size], rtol=1e-3, atol=1e-4
        )


def test_chat_model_trained_from_scratch_loads_in_transformers(file: Path) -> None:
    result = library.train(file, steps=3, **SETTINGS)
    assert {"<|im_start|>", "<|im_end|>"} <= library.load(result.run).tokenizer.all_specials.keys()
    assert result.val_loss is not None
    assert_equal_in_transformers(result.checkpoint)


def test_missing_special_tokens_are_added_to_the_model(run_folder: Path, workdir: Path) -> None:
    file = workdir / "chats.jsonl"
    file.write_text(make_jsonl([[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 20))
    before = library.load(run_folder)
    old_size = before.tokenizer.vocab_size
    event_log: list[Any] = []
    result = library.train(file, init=run_folder, chat=True, steps=2, lr=0.0, dtype="float32", listen=event_log.append)
    after = library.load(result.run)
    assert after.tokenizer.vocab_size == after.model.config.vocab_size == old_size + 2
    table = after.model.wte.weight
    torch.testing.assert_close(table[:old_size], before.model.wte.weight)
    for id in (old_size, old_size + 1):
        torch.testing.assert_close(table[id], before.model.wte.weight.mean(0))
    assert any(isinstance(event, events.EvalEvent) and event.step == 0 for event in event_log)
    assert_equal_in_transformers(result.checkpoint)
    adapted = library.train(file, init=result.run, chat=True, steps=1, lora_rank=2, dtype="float32", sample_every=0)
    assert library.load(adapted.run).tokenizer == after.tokenizer
    with pytest.raises(UserError, match="lacks the special tokens for one, which adapters cannot learn"):
        library.train(file, init=run_folder, chat=True, steps=1, lora_rank=2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": []}, "it has no assistant message"),
        ({"messages": "hi"}, 'it has no list of objects "messages"'),
        ({"messages": [{"role": "user"}]}, 'it has no "content"'),
        ({"messages": [*CHAT[:1], {"role": "assistant", "content": None}]}, '"content" is not a string'),
        ({"messages": [{"role": "critic", "content": "x"}]}, "there is no role 'critic'"),
        ({"messages": [*CHAT[:2], {"role": "assistant", "content": "Let me see.", "tool_calls": [{}]}]}, '"tool_calls" is not a list of calls'),
        ({"messages": [*CHAT[:1], {**CHAT[1], "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, '"tool_calls" is not a list of calls'),
        ({"messages": [{**CHAT[0], "tool_calls": [{"function": {"name": "f"}}]}, CHAT[1]]}, '"tool_calls" is not a list of calls'),
        ({"messages": [*CHAT[:2], {"role": "assistant", "content": None, "function_call": {"name": "f"}}]}, '"function_call" is not supported'),
        ({"messages": [{"role": "tool", "content": {"x": 1}}, *CHAT]}, '"content" is not a string'),
        ({"messages": CHAT[:2], "tools": ["add"]}, '"tools" is not a list of objects'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, *CHAT]}, '"content" has a part that is not text'),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, '"weight" is 0.5, not 0 or 1'),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}, "every assistant message has .*: there is nothing to learn"),
        ({"conversations": [{"from": "observation", "value": "5"}, {"from": "gpt", "value": "5"}]}, "there is no role 'observation'"),
        ({"instruction": "Add.", "input": "1 2", "output": None}, '"output" is not a string'),
        ({"instruction": "Add.", "input": [1, 2], "output": "3"}, '"input" is not a string'),
        ({"prompt": "a", "completion": "b"}, 'it has no list of objects "prompt"'),
        ({"prompt": CHAT[:1], "completion": CHAT[:1]}, "it has no assistant message: there is nothing"),
    ],
)  # fmt: skip
def test_bad_conversation_is_named_or_skipped(workdir: Path, line: Any, message: str) -> None:
    Path("chats.jsonl").write_text(make_jsonl(CHATS[:1]) + json.dumps(line) + "\n")
    with pytest.raises(UserError, match=f"^chats.jsonl, line 2: {message}"):
        read("chats.jsonl")
    assert [conversation.messages for conversation in read("chats.jsonl", skip_bad=True)] == CHATS[:1]


def test_skip_bad_trains_on_the_valid_conversations(gpt: Gpt, workdir: Path) -> None:
    Path("chats.jsonl").write_text(make_jsonl([CHATS[0], []]))
    message = "chats.jsonl, line 2: it has no assistant message"
    one_line_of_what_and_what_next(gpt("train", "chats.jsonl", "--chat"), message)
    result = gpt("train", "chats.jsonl", "--chat", "--skip-bad", "--val-fraction", "0", "--steps", "1")
    assert result.code == 0, result.err
    assert "gpt chat -m" in result.out


def test_chat_is_inferred_from_the_messages_key(gpt: Gpt, workdir: Path) -> None:
    Path("chats.jsonl").write_text(make_jsonl(CHATS))
    result = gpt("train", "chats.jsonl", "--steps", "1")
    assert result.code == 0, result.err
    assert "chats.jsonl: every record is a conversation: assuming --chat (--field KEY reads text instead)" in result.err
    assert "gpt chat -m" in result.out
    assert json.loads(Path("runs/chats/run.json").read_text())["settings"]["chat"] is True


def test_conversations_are_read_from_parquet_and_json(workdir: Path) -> None:
    rows = [{"id": n, "messages": messages} for n, messages in enumerate(CHATS)]
    parquet.write_table(pa.Table.from_pylist(rows), "chats.parquet", row_group_size=5)
    Path("chats.json").write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")
    for name in ("chats.parquet", "chats.json"):
        assert [conversation.messages for conversation in read(name)] == CHATS
    assert read("chats.json")[1].where.startswith("chats.json, record ")
    tool_call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    for table, message in (
        (pa.table({"text": ["x"]}), 'x.parquet: it has no "messages"; its columns: text'),
        (pa.table({"messages": ["x"]}), 'x.parquet, row 1: it has no list of objects "messages"'),
        (pa.table({"messages": [CHAT], "tools": ["add"]}), 'row 1: "tools" is not a list of objects'),
        (
            pa.table({"messages": [CHAT, CHAT, [CHAT[0], tool_call]]}),
            'x.parquet, row 3: "tool_calls" is not a list of calls',
        ),
    ):
        parquet.write_table(table, "x.parquet")
        with pytest.raises(UserError, match=message):
            read("x.parquet")
    assert len(read("x.parquet", skip_bad=True)) == 2


def test_chat_session_equals_the_library(gpt: Gpt, file: Path) -> None:
    run = library.train(file, steps=2, **SETTINGS).run
    lines = (
        b"Spell 1.\n/retry\n/more\n/system Be brief.\nAnd 2?\n/clear\nHello\n/help\n" + b"And more words to read?\n" * 6
    )
    result = gpt("chat", "-m", run, "--seed", "1", "-n", "6", stdin=lines)
    assert result.code == 0, result.err
    assert "messages were dropped" in result.err
    assert "/system TEXT" in result.out
    model = library.load(run)
    ids = model.tokenizer.encode(
        chat.render(model.tokenizer, [{"role": "user", "content": "Spell 1."}]), specials=True
    ).tolist()
    assert result.out.startswith("".join(model.write(ids, SampleConfig(max_tokens=6), seed=1)))


def test_chat_options_set_the_system_message_and_thinking(
    gpt: Gpt, file: Path, monkeypatch: pytest.MonkeyPatch, run_folder: Path
) -> None:
    run = library.train(file, steps=1, **SETTINGS).run
    rendered: list[tuple[Any, Any]] = []
    render = chat.render
    monkeypatch.setattr(
        chat, "render", lambda *args, **rest: rendered.append((args[1], rest["variables"])) or render(*args, **rest)
    )
    options = ("--system", "Be brief.", "--no-think")
    assert gpt("chat", "-m", run, "-n", "2", *options, stdin=b"Hi\n/system\nHi\n").code == 0
    (first, variables), (second, _) = rendered
    assert first[0] == {"role": "system", "content": "Be brief."}
    assert variables == {"enable_thinking": False, "tools": None}
    assert second[0]["role"] == "user"
    assert "no chat template" in gpt("chat", "-m", run_folder, *options).err


def test_chat_reads_only_what_is_new(gpt: Gpt, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = library.train(file, steps=1, **SETTINGS).run
    counts: list[tuple[int, int]] = []
    begin = Context.begin

    def count(self: Context, slot: Any, prompt: list[int], source: Any, prefix_length: int, start: int) -> None:
        counts.append((len(prompt), len(prompt) - prefix_length))
        begin(self, slot, prompt, source, prefix_length, start)

    monkeypatch.setattr(Context, "begin", count)
    assert gpt("chat", "-m", run, "--choices", "yes,no", stdin=b"Spell 1, 2 and 3, and 4.\nAnd 5?\n/retry\n").code == 0
    (first, read), (second, read_later), (_, read_again) = counts
    assert read == first >= 16
    assert read_later <= second - first
    assert read_again == 1


class Pieces:
    """Text pieces, or exceptions to raise, and a sample as of `LanguageModel.write`."""

    def __init__(self, pieces: Sequence[str | BaseException], reason: str) -> None:
        self.pieces, self.sample = pieces, Sample("", [], 0.0, reason)

    def __iter__(self) -> Iterator[str]:
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes a chat write endless text, and collects its prompts. "fail" is an error, "stop" is an early Ctrl-C."""
    texts: list[str] = []

    def write(model: LanguageModel, prompt: list[int] | str, config: SampleConfig, *args: object) -> Pieces:
        if isinstance(prompt, str):  # Only checks the settings.
            return Pieces([], "")
        texts.append(model.tokenizer.decode(prompt))
        question = texts[-1].rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]
        if question == "late failure":
            return Pieces(["some", UserError("it failed")], "")
        if question in ("fail", "stop"):
            return Pieces(["", UserError("it failed") if question == "fail" else KeyboardInterrupt()], "")
        return Pieces(["x" * config.max_tokens], "eot" if question == "short" else "length")

    monkeypatch.setattr(LanguageModel, "write", write)
    return texts


def test_failed_messages_leave_the_conversation_as_it_was(gpt: Gpt, file: Path, prompts: list[str]) -> None:
    run = library.train(file, steps=1, **SETTINGS).run
    lines = ["short", "fail", "stop", "late failure", "/more", "/retry", "/clear", "fail", "/retry", "/more", "hi"]
    result = gpt("chat", "-m", run, "-n", "2", stdin="\n".join(lines).encode())
    questions = [re.findall("user\n(.*?)<", prompt) for prompt in prompts]
    failed = ["fail", "stop", "late failure"]
    assert questions == [["short"], *(["short", name] for name in failed), ["short"], ["fail"], ["hi"]]
    assert all("assistant\nxx<" in prompt for prompt in prompts[1:4])
    assert result.err.count("it failed") == 3
    assert result.err.count("the text is complete") == 1
    assert result.err.count("there is no prompt yet") == result.err.count("there is no text yet") == 1


def test_an_answer_can_use_the_rest_of_the_context(gpt: Gpt, file: Path, prompts: list[str]) -> None:
    run = library.train(file, steps=1, **SETTINGS).run
    result = gpt(
        "chat", "-m", run, stdin=b"a\n/more\nbc\n/more\n/set max-tokens 9\n/clear\nd\n/more\n" + b"qzjxkv" * 40
    )
    sizes = [len(library.load(run).tokenizer.encode(prompt, specials=True)) for prompt in prompts]
    texts = [line for line in result.out.splitlines() if line]
    assert [len(text) + size for text, size in zip(texts[:2], (sizes[0], sizes[1]), strict=True)] == [128, 128]
    assert [len(text) for text in texts[2:]] == [9, 9]
    assert prompts[3].endswith("x" * 9)
    full = "the context of 128 tokens is full: /more drops the oldest messages, /clear all of them"
    errors = "\n".join(line for line in result.err.splitlines())
    assert errors.count(full) == 2
    assert "the first 2 messages were dropped" in errors
    assert errors.count("stopped at 9 tokens: /more continues") == 2
    assert errors.count("fill the context of 128") == 3  # Two times /more, and a message that is too long


ALPACA = [
    {"instruction": "Add the numbers.", "input": "1 2", "output": "3"},
    {"instruction": "Say hello.", "input": "", "output": "Hello."},
    {"instruction": "Say hello.", "output": "Hello."},
]
TRL = [{"prompt": [SYSTEM, *CHAT[:3]], "completion": CHAT[3:]}, {"prompt": [], "completion": [SYSTEM, *CHAT]}]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv"])
def test_alpaca_and_trl_records_are_conversations(suffix: str, workdir: Path) -> None:
    for name, records in {"alpaca": ALPACA[:2] if suffix in ("csv", "parquet") else ALPACA, "trl": TRL[:1]}.items():
        path = Path(f"{name}.{suffix}")
        if suffix == "parquet":
            parquet.write_table(pa.Table.from_pylist(records), path)
        elif suffix == "csv":
            cells = [[value if isinstance(value, str) else json.dumps(value) for value in r.values()] for r in records]
            lines = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in [[*records[0]], *cells]]
            path.write_text("\n".join(lines))
        else:
            path.write_text(json.dumps(records) if suffix == "json" else make_lines(records))
        assert examples.kind_of([str(path)], TextConfig()) is Conversation
    questions = ["Add the numbers.\n1 2", "Say hello.", "Say hello."]
    assert [conversation.messages for conversation in read(f"alpaca.{suffix}")] == [
        [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]
        for question, record in zip(questions, ALPACA, strict=True)
    ][: 2 if suffix in ("csv", "parquet") else 3]
    (conversation,) = read(f"trl.{suffix}")
    assert (conversation.messages, conversation.context, conversation.ignored) == ([SYSTEM, *CHAT], [2], [])


def test_only_the_completion_of_messages_is_learned(workdir: Path) -> None:
    Path("trl.jsonl").write_text(make_lines([{**TRL[0], "prompt": CHAT[:3], "system": "Be brief."}, TRL[1]]))
    first, second = read("trl.jsonl")
    assert (first.messages[0]["role"], first.context, second.context) == ("system", [2], [])
    Path("mixed.jsonl").write_text(make_lines([TRL[0], {"prompt": "a", "completion": "b"}]))
    assert examples.kind_of(["mixed.jsonl"], TextConfig()) is None
    Path("lists.jsonl").write_text(make_lines([{"prompt": "[3, 1]", "completion": "[1, 3]"}]))
    assert examples.kind_of(["lists.jsonl"], TextConfig()) is examples.Pair
    with pytest.raises(UserError, match='^trl.jsonl, line 1: "prompt" is not a string') as error:
        examples.read_examples(["trl.jsonl"], TextConfig(val_fraction=0), examples.Pair)
    assert "--chat reads lists of messages" in str(error.value.hint)


def test_conversation_formats_of_other_tools_are_read(workdir: Path) -> None:
    role_names, expected = {"system": "system", "user": "human", "assistant": "gpt"}, [SYSTEM, *CHAT]
    sharegpt = {
        "conversations": [{"from": role_names[message["role"]], "value": message["content"]} for message in expected]
    }
    parts = [
        {**message, "content": [{"type": "text", "text": part} for part in message["content"]]} for message in CHAT
    ]
    lines: list[Any] = [
        sharegpt,
        {"conversation": expected, "tools": "[]"},
        {"messages": json.dumps(expected)},
        {"messages": parts, "system": SYSTEM["content"]},
        {"messages": [{**message, "tool_calls": None, "train": True} for message in expected], "tools": []},
    ]
    Path("chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("chats.json").write_text(json.dumps({"version": 1, "data": [sharegpt]}))
    parquet.write_table(pa.Table.from_pylist([sharegpt]), "one.parquet")
    parquet.write_table(pa.table({"messages": [json.dumps(expected)], "tools": [None]}), "two.parquet")
    quoted = json.dumps(expected).replace('"', '""')
    Path("chats.csv").write_text(f'messages\n"{quoted}"\n')
    for name in ("chats.jsonl", "chats.json", "one.parquet", "two.parquet", "chats.csv"):
        conversations = read(name)
        assert [conversation.messages for conversation in conversations] == [expected] * (
            len(lines) if name == "chats.jsonl" else 1
        ), name


@pytest.mark.parametrize("template", [chat.CHATML, TAGGED, QWEN3])
def test_answers_of_weight_0_are_not_trained(template: str, workdir: Path) -> None:
    conversation = read_back([CHAT[0], {**CHAT[1], "weight": 0}, CHAT[2], {**CHAT[3], "weight": 1}])
    assert (conversation.messages, conversation.context) == (CHAT, [1])
    tokenizer = with_chat_template(chat.with_template(bytes_tokenizer()), template)
    all_rows, _ = chat.answers(tokenizer, CHAT)
    weighted_rows, _ = chat.answers(tokenizer, conversation.messages, conversation.context)
    assert weighted_rows[-1][0] == all_rows[-1][0]
    trained_texts = [
        [text[start:end] for text, spans in rows for start, end in spans] for rows in (all_rows, weighted_rows)
    ]
    assert trained_texts[1] == trained_texts[0][1:]


MASKS = {**dict.fromkeys(examples._TRAIN_KEYS, (0, 1)), "masked": (1, 0)}


@pytest.mark.parametrize("key", MASKS)
def test_masks_of_other_tools_are_weights(key: str, workdir: Path) -> None:
    excluded, included = MASKS[key]
    for is_bool in (False, True):
        values = [bool(value) if is_bool else value for value in (excluded, included)]
        messages = [CHAT[0], {**CHAT[1], key: values[0]}, CHAT[2], {**CHAT[3], key: values[1]}]
        conversation = read_back(messages)
        assert (conversation.messages, conversation.context) == (CHAT, [1])
    for value in ("false", 2.3, [1]):
        with pytest.raises(UserError, match=f'"{key}" is .*, not 0 or 1'):
            read_back([CHAT[0], {**CHAT[1], key: value}])
    part = {"type": "text", "text": "x", key: excluded}
    with pytest.raises(UserError, match='a part of "content" is excluded from the loss'):
        read_back([CHAT[0], {"role": "assistant", "content": [part]}])


def test_generation_tag_without_the_end_of_turn_is_extended(tmp_path: Path) -> None:
    """A model must learn to end its answers."""
    closing = "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    assert closing in TAGGED
    tokenizer = with_chat_template(chat.with_template(bytes_tokenizer()), TAGGED)
    end = tokenizer.all_specials["<|im_end|>"]
    expected = ChatEncoder(tokenizer, 512, skip_bad=False).rows(Conversation(CHAT, ""))
    for replacement in (
        "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
        "{{ message['content'] }}{% endgeneration %}<|im_end|>",
    ):
        without_end = replace(
            with_chat_template(tokenizer, TAGGED.replace(closing, replacement)), more_ends=frozenset()
        )
        encoder = ChatEncoder(without_end, 512, skip_bad=False)
        (row,) = encoder.rows(Conversation(CHAT, ""))
        assert (row.ids.tolist(), row.counts.tolist()) == (expected[0].ids.tolist(), expected[0].counts.tolist())
        assert end in encoder.tokenizer.ends
        ((text, spans),), _ = chat.answers(without_end, CHAT, [1])
        assert [text[start:stop] for start, stop in spans] == ["  5<|im_end|>"]
    without_any = TAGGED.replace(closing, "{{ message['content'] }}{% endgeneration %}")
    with pytest.raises(UserError, match="does not end an answer with a special token"):
        chat.answers(with_chat_template(tokenizer, without_any), CHAT)


NO_THINKING = QWEN3.replace("message.role + ", "message.role + (message.name or '') + ") + (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)


@pytest.mark.parametrize("variables", [None, {"enable_thinking": False}, {"enable_thinking": True, "more": [1, "é"]}])
def test_names_and_template_variables_equal_transformers(workdir: Path, variables: dict[str, Any] | None) -> None:
    tokenizer, reference = load_both(workdir / "form", "qwen", NO_THINKING)
    messages: list[Any] = [{**CHAT[0], "name": "Ann"}, *CHAT[1:]]
    assert "Ann" in chat.render(tokenizer, messages)
    for name, column in {"x.jsonl": variables, "x.csv": json.dumps(variables) if variables else ""}.items():
        record = {"messages": messages, "chat_template_kwargs": column}
        Path("x.jsonl").write_text(json.dumps(record) + "\n")
        cells = [json.dumps(messages), column or ""]
        quoted = ",".join('"' + str(cell).replace('"', '""') + '"' for cell in cells)
        Path("x.csv").write_text(f"messages,chat_template_kwargs\n{quoted}\n")
        (conversation,) = read(name)
        encoder = ChatEncoder(tokenizer, 512, skip_bad=False)
        rows = encoder.encode([conversation])
        for row, count in zip(rows, (2, 4), strict=True):
            ids = reference.apply_chat_template(messages[:count], return_dict=False, **(variables or {}))
            assert row.ids.tolist() == ids
        prompt = reference.apply_chat_template(
            messages[:1], add_generation_prompt=True, return_dict=False, **(variables or {})
        )
        assert encoder.prompt(conversation)[1] == prompt
        trained = tokenizer.decode(rows[0].ids[rows[0].counts].tolist())
        assert trained.startswith("<think>") == (variables != {"enable_thinking": False})
        assert any('"more" in 1 record' in note for note in encoder.notes()) == ("more" in (variables or {}))
    for bad in ([1], "x", {"tools": []}, {"add_generation_prompt": True}):
        Path("x.jsonl").write_text(json.dumps({"messages": CHAT, "chat_template_kwargs": bad}) + "\n")
        with pytest.raises(UserError, match='"chat_template_kwargs" is not an object without'):
            read("x.jsonl")


def key_rows() -> list[tuple[str, str, str]]:
    """Returns key, place and treatment of each key in the guide's table."""
    guide = Path(__file__).parents[2] / "docs" / "fine-tune.md"
    rows = re.findall(r"^\| (`.*) \| (record|message|both) \| (\w+).*\|$", guide.read_text("utf-8"), re.MULTILINE)
    places = {"both": ("record", "message")}
    return [
        (key, place, treatment)
        for keys, where, treatment in rows
        for key in re.findall("`(.*?)`", keys)
        for place in places.get(where, (where,))
    ]


def test_guide_has_every_key() -> None:
    keys = {key for key, _, _ in key_rows()}
    lists = (
        examples.HARMLESS,
        examples._MESSAGE_KEYS,
        Conversation.records.keys,
        *(keys for keys in Conversation.records.alternatives if len(keys) == 1),
        Conversation.records.optional,
    )
    assert keys == {"name", *(key for names in lists for key in names)}


@pytest.mark.parametrize(("key", "place", "treatment"), key_rows())
def test_keys_are_taken_as_the_guide_says(key: str, place: str, treatment: str, workdir: Path) -> None:
    tokenizer = with_chat_template(
        chat.with_template(bytes_tokenizer()),
        chat.CHATML.replace(
            "message['content']",
            "(message.name or message.reasoning_content or message.tool_calls or tools or '') | string"
            " + message['content']",
        ),
    )
    values = {
        "chat_template_kwargs": {"enable_thinking": False}, "system": "Be brief.", "masked": True, "name": "Ann",
        "reasoning_content": "Hm.", "thinking": "Hm.", "reasoning": "Hm.", "messages": CHAT, "conversation": CHAT,
        "conversations": CHAT, "role": "assistant", "from": "assistant", "content": "x", "value": "x",
        "tools": [{"type": "function"}], "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }  # fmt: skip
    value = values.get(key, 0 if key in MASKS else "x")
    record: dict[str, Any] = {"messages": [dict(message) for message in CHAT]}
    plain = Conversation(CHAT, "")
    if place == "record":
        record = {key: value} if value is CHAT else {**record, key: value}
    elif key in ("from", "value"):
        record["messages"][1] = {"from": "gpt", "value": "x"}
    else:
        record["messages"][1][key] = value
    Path("x.jsonl").write_text(json.dumps(record) + "\n")
    if treatment == "refused":
        with pytest.raises(UserError, match=f'"{key}" is not supported'):
            read("x.jsonl")
        return
    (conversation,) = read("x.jsonl")
    encoder = ChatEncoder(tokenizer, 512, skip_bad=False)
    (row,) = encoder.encode([conversation])
    (plain_row,) = encoder.encode([plain])
    is_same = (row.ids.tolist(), row.counts.tolist()) == (plain_row.ids.tolist(), plain_row.counts.tolist())
    notes = "\n".join(encoder.notes())
    if key == "chat_template_kwargs":
        assert conversation.variables == value and '"enable_thinking" in 1 record' in notes
    else:
        assert is_same == (treatment == "harmless" or value is CHAT or key == "role"), key
        assert not notes
    if treatment == "harmless":
        Path("x.parquet").unlink(missing_ok=True)
        parquet.write_table(pa.table({"messages": [CHAT], key: ["x"], "unheard_of": ["x"]}), "x.parquet")
        (conversation,) = read("x.parquet")
        assert conversation.ignored == ["unheard_of"]


def test_unknown_keys_are_counted(gpt: Gpt, workdir: Path) -> None:
    records = [{"messages": [{**CHAT[0], "mood": "x"}, CHAT[1]], "rating": 5, "id": n} for n in range(3)]
    Path("x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    result = gpt("train", "x.jsonl", "--chat", "--val-fraction", "0", "--steps", "1", "--sample-every", "0")
    assert result.err.splitlines().count('keys without effect: "mood" in 3 records, "rating" in 3 records') == 1


def test_templates_receive_reasoning(workdir: Path) -> None:
    thinking = chat.CHATML.replace("message['content']", "message.get('reasoning_content', '') + message['content']")
    tokenizer = with_chat_template(chat.with_template(bytes_tokenizer()), thinking)
    for name in ("reasoning_content", "thinking", "reasoning"):
        conversation = read_back([CHAT[0], {**CHAT[1], name: "Two, two: "}])
        (((text, ((start, end),)),), _) = chat.answers(tokenizer, conversation.messages)
        assert text[start:end] == "Two, two: It is 4.\n\nSure!<|im_end|>"


def test_developer_role_falls_back_to_system(workdir: Path) -> None:
    conversation = read_back([{**SYSTEM, "role": "developer"}, *CHAT])
    tokenizer = chat.with_template(bytes_tokenizer())
    assert chat.render(tokenizer, conversation.messages) == chat.render(tokenizer, [SYSTEM, *CHAT])
    with_developer = with_chat_template(tokenizer, "{# developer #}" + chat.CHATML)
    assert chat.render(with_developer, conversation.messages).startswith("<|im_start|>developer\n")


def test_conversation_can_start_with_the_assistant() -> None:
    prefix = "{% if messages[0].role == 'system' %}!{% endif %}"
    messages = [{"role": "assistant", "content": "im_end"}, *CHAT]
    for template in (chat.CHATML, QWEN3):
        tokenizer = with_chat_template(chat.with_template(bytes_tokenizer()), prefix + template)
        rows, _ = chat.answers(tokenizer, messages)
        trained_texts = [text[start:end] for text, spans in rows for start, end in spans]
        answers = [f"{item['content']}<|im_end|>" for item in messages if item["role"] == "assistant"]
        assert [item.rpartition("</think>\n\n")[2] for item in trained_texts] == answers
        prompt, *_ = ChatEncoder(tokenizer, 64, skip_bad=False).prompt(Conversation(messages[:1], ""))
        assert prompt.count("im_start") > 1


def test_models_with_different_templates_keep_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    start = chat.start_program
    monkeypatch.setattr(
        chat,
        "start_program",
        lambda program, setup, *args: started.append(setup["template"]) or start(program, setup, *args),
    )
    tokenizers = [
        replace(bytes_tokenizer(), files={"chat_template.jinja": f"{name} {{{{ messages[0].content }}}}".encode()})
        for name in ("first", "second")
    ]
    texts = [chat.render(tokenizer, [{"role": "user", "content": "hi"}]) for _ in range(3) for tokenizer in tokenizers]
    assert texts == ["first hi", "second hi"] * 3
    assert len(started) == 2
