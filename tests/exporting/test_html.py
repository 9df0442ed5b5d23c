"""Models as web pages, without a browser: weights, header, tokenizer, chat template and prompts."""

import base64
import json
import random
import re
import shutil
import subprocess
import zlib
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import vocabularies
from conftest import Gpt, make_text, one_line_of_what_and_what_next
from models import loud, source_of
from tokenizers import Regex, pre_tokenizers
from torch import Tensor

import gpt as library
from gpt.chat import chat
from gpt.config.export import PageDtype
from gpt.config.model import PRESETS, GPTConfig, RopeScaling
from gpt.corpus.token_folder import TokenFolder
from gpt.exporting import chat_pieces, html, page_tokenizer
from gpt.exporting.source import SourceModel
from gpt.insight.openings import _openings, choose_openings
from gpt.model.quantize import to_tensor
from gpt.runs import folder
from gpt.system.errors import UserError
from gpt.tokenizers import boundaries
from gpt.tokenizers.backends import ByteBPE, added_token, to_gpt2_spelling
from gpt.tokenizers.finding import find_tokenizer
from gpt.tokenizers.tokenizer import CHAT_TEMPLATE, Tokenizer, bytes_tokenizer, train_tokenizer

# Widths that are multiples of 16, and widths that are not.
SHAPES: dict[str, GPTConfig] = {
    "gpt2": GPTConfig(257, 24, 2, 2, 32),
    "gpt2, narrow, untied": GPTConfig(257, 24, 2, 2, 20, n_inner=24, tied=False),
    "llama": GPTConfig.of(
        "modern", 257, 24, 2, 4, 40, n_kv_head=2, head_dim=12, n_inner=24, qk_norm=False,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16),
    ),
    "qwen2": GPTConfig.of("modern", 257, 24, 1, 2, 32, biases="qkv", qk_norm=False, n_inner=16),
    "qwen3, windows": GPTConfig.of("modern", 257, 24, 3, 2, 36, head_dim=16, n_inner=40, window=8),
}  # fmt: skip
TYPES = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2"), "i8": np.dtype("i1")}
NO_TEXTS: dict[str, Any] = {"name": "it", "facts": [], "about": [], "prompts": [], "chat": None}


def read_page(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns a page's header and its stream of weights, after checking both checksums."""
    text = path.read_bytes().decode()
    (head,) = re.findall(r'<script type="application/json" id="model-header" data-sum="(\w+)">(.*?)</script>', text)
    parts = re.findall(r'<script type="application/octet-stream" data-of="\d+" class="weights">(.*?)</script>', text)
    stream = b"".join(map(base64.b64decode, parts))
    header = json.loads(head[1])
    assert int(head[0]) == zlib.adler32(head[1].encode())
    assert (header["sum"], header["bytes"]) == (zlib.adler32(stream), len(stream))
    return header, stream


def padded(config: GPTConfig, name: str, value: torch.Tensor) -> torch.Tensor:
    """Returns a parameter with zeros after each head, and after the widths C and I."""
    C, D, hidden = config.n_embd, config.head_size, config.mlp_width
    name = re.sub(r"h\.\d+\.", "", name)
    is_output = name.endswith("c_proj.bias")
    rows = {"attn.c_attn": D, "attn.q_norm": D, "attn.k_norm": D, "mlp.c_fc": hidden}.get(name.rpartition(".")[0], 0)
    columns = {"attn.c_proj.weight": D, "mlp.c_proj.weight": hidden}.get(name, C)
    if value.dim() == 1:
        rows = 0 if is_output else rows or C
    if rows:
        value = torch.cat([torch.cat([part, torch.zeros(-rows % 16, *part.shape[1:])]) for part in value.split(rows)])
    if value.dim() == 2:
        zeros = torch.zeros(len(value), -columns % 16)
        value = torch.cat([torch.cat([part, zeros], 1) for part in value.split(columns, 1)], 1)
    return value


def stored_tensor(header: dict[str, Any], stream: bytes, name: str) -> torch.Tensor:
    """Returns a tensor of a page in float32."""
    kind, rows, columns, offset, scales_offset = header["tensors"][name]
    assert offset % 16 == 0
    values = np.frombuffer(stream, TYPES[kind], rows * columns, offset).reshape(rows, columns)
    if kind == "bf16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    values = values.astype(np.float32)
    if kind == "i8":
        assert scales_offset % 16 == 0
        values = values * np.frombuffer(stream, "<f4", rows, scales_offset)[:, None]
    return torch.from_numpy(values if rows > 1 else values[0])


@pytest.mark.parametrize("dtype", get_args(PageDtype))
@pytest.mark.parametrize("shape", SHAPES)
def test_page_contains_the_model(tmp_path: Path, shape: str, dtype: str) -> None:
    model = loud(SHAPES[shape])
    config, source = model.config, source_of(model)
    html.check(source, dtype)
    count = html.write(tmp_path / "it.html", source, dtype, NO_TEXTS)
    header, stream = read_page(tmp_path / "it.html")
    assert [path.name for path in tmp_path.iterdir()] == ["it.html"]
    assert count == len(header["tensors"])
    assert header["tensors"].keys() == source.weights.keys()
    ends = []
    for name, get in source.weights.items():
        kind, rows, columns, offset, _ = header["tensors"][name]
        stored, expected = stored_tensor(header, stream, name), html.restore_parameter(config, name, get(), dtype)
        assert torch.equal(stored, padded(config, name, to_tensor(expected))), name
        assert torch.equal(to_tensor(expected), get()) == (kind == "f32"), name
        assert (kind == "f32") == (
            dtype == "float32" or get().dim() == 1 or (name == "wpe.weight" and dtype != "float16")
        )
        ends += [offset + rows * columns * 2] if kind == "f16" else []
        assert offset < header["halves"] or kind != "f16"
    assert header["halves"] == max([0, *(end + -end % 16 for end in ends)])
    assert (header["format"], header["dtype"], header["name"]) == (1, dtype, "it")


def test_header_describes_the_shape(tmp_path: Path) -> None:
    for name, config in SHAPES.items():
        html.write(tmp_path / f"{name}.html", source_of(loud(config)), "float16", NO_TEXTS)
    shapes = [read_page(tmp_path / f"{name}.html")[0]["shape"] for name in SHAPES]
    assert [(shape["C"], shape["Cp"], shape["D"], shape["Dp"], shape["I"], shape["Ip"]) for shape in shapes] == [
        (32, 32, 16, 16, 128, 128), (20, 32, 10, 16, 24, 32), (40, 48, 12, 16, 24, 32), (32, 32, 16, 16, 16, 16),
        (36, 48, 16, 16, 40, 48),
    ]  # fmt: skip
    assert [shape["positions"] for shape in shapes] == ["learned", "learned", "rotary", "rotary", "rotary"]
    assert [(shape["norm"], shape["gated"], shape["qk"]) for shape in shapes] == [
        ("layernorm", False, False), ("layernorm", False, False), ("rmsnorm", True, False), ("rmsnorm", True, False),
        ("rmsnorm", True, True),
    ]  # fmt: skip
    llama, qwen3 = shapes[2], shapes[4]
    assert (llama["V"], llama["T"], llama["L"], llama["H"], llama["K"], llama["eps"]) == (257, 24, 2, 4, 2, 1e-6)
    assert qwen3["windows"] == [0, 8, 0]
    assert (len(llama["rates"]), qwen3["rates"][:2], shapes[0]["rates"]) == (6, [1.0, 10_000 ** (-2 / 16)], [])
    assert 0 < llama["rates"][-1] < 10_000 ** (-10 / 12) / 7.9  # Slower, for a longer context.


def round_rows(weight: Tensor) -> Tensor:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales).round() * scales


def test_long_streams_are_cut_into_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(loud(SHAPES["gpt2"]))
    html.write(tmp_path / "whole.html", source, "float32", NO_TEXTS)
    monkeypatch.setattr(html, "_PIECE_BYTES", 12 * 100)
    html.write(tmp_path / "cut.html", source, "float32", NO_TEXTS)
    whole, cut = read_page(tmp_path / "whole.html"), read_page(tmp_path / "cut.html")
    assert whole == cut
    pieces = re.findall(r'class="weights">(.*?)<', (tmp_path / "cut.html").read_text(encoding="utf-8"))
    assert {len(piece) for piece in pieces[:-1]} == {1600}


def test_size_decides_the_dtype() -> None:
    assert html.default_dtype(PRESETS["mini"].model) == "float16"
    assert html.default_dtype(PRESETS["gpt2"].model) == "int8"
    source = lambda name: SourceModel(Path(), PRESETS[name].model, bytes_tokenizer(), {})
    html.check(source("gpt2"), "float32")
    with pytest.raises(UserError, match=r"the page would need 2\.9 GB of memory") as error:
        html.check(source("gpt2-large"), "float16")
    assert error.value.hint == "use --dtype bfloat16"
    with pytest.raises(UserError, match="browsers have about 2") as error:
        html.check(source("gpt3-6.7b"), "int8")
    assert error.value.hint == page_tokenizer.HINT


# The tokenizer


TRAINED = train_tokenizer([make_text()], 400, ["<|user|>"])


def test_trained_tokenizer_needs_no_merges() -> None:
    page_tokenizer.check(TRAINED)
    values = page_tokenizer.describe(replace(TRAINED, words={"<think>": 402}))
    assert isinstance(TRAINED.backend, ByteBPE)
    assert values["tokens"] == [*map(to_gpt2_spelling, TRAINED.backend.ranks), None, None, None, None, None]
    assert values["merges"] is None and values["skips_merges"]
    assert values["added"] == {"<|endoftext|>": 398, "<|user|>": 399, "<think>": 402}
    assert (values["specials"], values["words"]) == ([398, 399], {"<think>": 402})
    assert (values["eot"], values["ends"], values["bos"]) == (398, [398], None)
    assert not values["nfc"] and not values["special_prompt"]


@pytest.mark.parametrize("form", ["llama3", "qwen", "smollm2", "gaps"])
def test_tokenizers_of_families_keep_their_merges(tmp_path: Path, form: str) -> None:
    tokenizer = find_tokenizer(str(vocabularies.write(form, tmp_path / form)))
    page_tokenizer.check(tokenizer)
    values = page_tokenizer.describe(tokenizer)
    model = json.loads((tmp_path / form / "tokenizer.json").read_text())["model"]
    spelled = {token: id for token, id in model["vocab"].items() if id not in values["added"].values()}
    assert {token: id for id, token in enumerate(values["tokens"]) if token is not None} == spelled
    merges = np.array(values["merges"]).reshape(-1, 3).tolist()
    assert [[values["tokens"][id] for id in merge[:2]] for merge in merges] == model["merges"]
    assert all(values["tokens"][a] + values["tokens"][b] == values["tokens"][c] for a, b, c in merges)
    assert values["nfc"] == (form == "qwen")
    assert values["skips_merges"] == (form == "llama3") and values["special_prompt"]
    assert (values["bos"] is not None) == (form == "llama3")
    assert ("<think>" in values["words"]) == (form == "qwen")


def test_unusual_byte_level_tokenizers_are_refused(tmp_path: Path) -> None:
    assert isinstance(TRAINED.backend, ByteBPE)
    with pytest.raises(UserError, match="does not support this tokenizer's pattern"):
        page_tokenizer.check(replace(TRAINED, backend=replace(TRAINED.backend, pattern=r"\w+|\W")))
    with pytest.raises(UserError, match="ordinary tokens that the model does not have"):
        page_tokenizer.check(replace(TRAINED, limit=300))
    path = vocabularies.write("smollm2", tmp_path / "a") / "tokenizer.json"
    values = json.loads(path.read_text())
    decoder = {
        "type": "Sequence",
        "decoders": [{"type": "Replace", "pattern": {"String": "e"}, "content": "E"}, values["decoder"]],
    }
    path.write_text(json.dumps(values | {"decoder": decoder}))
    with pytest.raises(UserError, match="this tokenizer's decoder"):
        page_tokenizer.check(find_tokenizer(str(path.parent)))
    left, right = values["model"]["merges"][0]
    added = added_token(values["model"]["vocab"][left + right], left + right)
    path.write_text(json.dumps(values | {"added_tokens": [*values["added_tokens"], added]}))
    with pytest.raises(UserError, match="merges of the special token"):
        page_tokenizer.check(find_tokenizer(str(path.parent)))


PATTERNS = [
    boundaries.GPT2_PATTERN, boundaries.DIGITS_PATTERN, boundaries.OLD_GPT2_PATTERN, boundaries.LLAMA3_PATTERN,
    boundaries.CL100K_PATTERN, boundaries.MINBPE_PATTERN, vocabularies.QWEN, *boundaries._FAMILIES,
]  # fmt: skip
LETTERS = [
    "abestdmlvrESTDMLVR", "0123456789", "'''’-_.,!?/\\()[]", "\t\n\r\v\f\x85\xa0\u1680\u2003\u2028\u3000\ufeff\u200b\x1c",
    "  \n\n", "αβγΣςάЖдёß\u017fKǅ", "אבגםابتة", "कखगािीְ\u0301", "日本語テキスト한국어", "²Ⅷ٣४½", "🐕👍🏽\u200d",
]  # fmt: skip


def test_patterns_without_case_have_all_letters() -> None:
    assert page_tokenizer.to_javascript("'(?i:[sdmt]|ll)|\\s++$|[^\\s]|(?!\\S)") == (
        "'(?:[sS\u017fdDmMtT]|[lL][lL])|\\p{White_Space}+$|[^\\p{White_Space}]|(?!\\P{White_Space})"
    )
    for pattern in PATTERNS:
        assert not re.search(r"\(\?i|\\s|\\S|[+*?]\+", page_tokenizer.to_javascript(pattern))


@pytest.mark.slow
def test_patterns_split_like_the_library(tmp_path: Path) -> None:
    if not (node := shutil.which("node")):
        pytest.skip("node is not installed")
    generator = random.Random(1)
    texts = ["'s'S'\u017f'LL'rE we'll I'VE 'd'"]
    texts += ["".join(generator.choice(generator.choice(LETTERS)) for _ in range(60)) for _ in range(500)]
    script = "const [patterns, texts] = JSON.parse(require('fs').readFileSync(0));" + (
        "console.log(JSON.stringify(patterns.map((p) => texts.map((t) => t.match(new RegExp(p, 'gu'))))));"
    )
    values = json.dumps([[*map(page_tokenizer.to_javascript, PATTERNS)], texts])
    result = subprocess.run([node, "-e", script], input=values, capture_output=True, text=True, check=True)
    for pattern, pieces in zip(PATTERNS, json.loads(result.stdout), strict=True):
        # The library's $ also matches before a line break, unless all white space is consumed.
        split = pre_tokenizers.Split(Regex(re.sub(r"\\s\+(?=\$|\(\?=)", r"\\s++", pattern)), "isolated")
        for text, theirs in zip(texts, pieces, strict=True):
            assert [piece for piece, _ in split.pre_tokenize_str(text)] == theirs, (pattern, text)


# The chat template


LLAMA3 = (
    "{{- bos_token }}{%- set said = 'None' %}{%- if messages[0]['role'] == 'system' %}"
    "{%- set said = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + said + '<|eot_id|>' }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
QWEN = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}"
    + chat.CHATML
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}{% else %}"
    "{{ raise_exception('only users and assistants') }}{% endif %}{% endfor %}"
)
IN_FIRST_QUESTION = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ '<<' + message.content + '>> ' }}"
    "{% elif message.role == 'user' %}{{ 'Q: ' if loop.first or messages[0].role == 'user' or loop.index > 2 }}"
    "{{ message.content + '\\n' }}{% else %}{{ 'A: ' + message.content + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
DATED = (
    "{% if strftime_now is defined %}{% set today = strftime_now('It\\'s %A, %d %b %Y (%a %B %m %y), \"now\".') %}{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}{{ today + '\\n' if loop.first }}{% endif %}"
    "{{ message.content + strftime_now('<%Y>') }}{% endfor %}"
)
THOUGHTS = chat.CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
CONVERSATION = [
    {"role": "user", "content": " Hi!\n"},
    {"role": "assistant", "content": "Hello <b>you</b> "},
    {"role": "user", "content": "Bye"},
]


def with_template(template: str) -> Tokenizer:
    return replace(bytes_tokenizer(), files={CHAT_TEMPLATE: template.encode()})


@pytest.mark.parametrize(
    ("template", "trims", "has_system"),
    [
        (chat.CHATML, False, True),
        (LLAMA3, True, True),
        (QWEN, False, True),
        (MISTRAL, False, False),
        (IN_FIRST_QUESTION, False, True),
        (DATED, False, True),
        ("\n  {% if true %}" + DATED + "{% endif %}", False, True),
    ],
)
def test_pieces_give_the_text_of_the_template(template: str, trims: bool, has_system: bool) -> None:
    tokenizer = with_template(template)
    pieces = chat_pieces.find_pieces(tokenizer)
    assert pieces is not None
    assert (pieces["trims"], pieces["system"] is not None) == (trims, has_system)
    systems = [[], [{"role": "system", "content": "Be brief. "}]] if has_system else [[]]
    assert f"{datetime.now():%Y}" not in json.dumps(pieces)
    for messages in ([*system, *CONVERSATION[:count]] for system in systems for count in (1, 3)):
        assert chat_pieces.assemble(pieces, messages) == chat.render(tokenizer, messages)


@pytest.mark.parametrize(
    "template",
    [
        THOUGHTS,
        DATED.replace("%d", "%H:%M"),
        DATED.replace("%d", "%%"),
        "{{ messages | length }}",
        "{{ raise_exception('no') }}",
        "{% for %}",
        "{{ '\\ud800' }}" + chat.CHATML,
    ],
)
def test_templates_that_are_programs_have_no_pieces(template: str) -> None:
    tokenizer = with_template(template)
    assert chat_pieces.find_pieces(tokenizer) is None
    (note,) = html.describe_differences(tokenizer)
    assert note.startswith("the page has no chat")
    assert html.describe_differences(bytes_tokenizer()) == html.describe_differences(with_template(chat.CHATML)) == []


# Texts on the page


def test_page_describes_the_run(run_folder: Path, gpt: Gpt) -> None:
    name, about = '</script><script>alert("1")</script>', "<b>Mine</b> & 'yours' <!-- é日本"
    result = gpt("export", "-m", run_folder, "-o", "a/book.html", "--title", name, "--about", about, "--license", "MIT")
    assert result.code == 0 and "open a/book.html" in result.out
    header, _ = read_page(Path("a/book.html"))
    assert [path.name for path in Path("a").iterdir()] == ["book.html"]
    record = json.loads((run_folder / "run.json").read_text())
    assert (header["name"], header["about"][0], header["dtype"]) == (name, about, "float16")
    rest = "\n".join(header["about"][1:])
    for part in (
        f"Trained for 30 steps, 7,680 tokens in all, on {record['tokens']['train']:,} tokens of text "
        f"({record['sources'][0]['bytes']:,} bytes): text.txt.",
        f"{record['result']['val_loss']:.4f} nats per token, {record['result']['bits_per_byte']:.4f} bits per byte, "
        "before its weights were rounded to 16 bits.",
        "License: mit.",
    ):
        assert part in rest, part
    text = Path("a/book.html").read_text(encoding="utf-8")
    assert "alert(" in text and "<script>alert" not in text and "<b>Mine" not in text
    assert str(run_folder) not in text


def test_prompts_quote_the_training_text(run_folder: Path, text: Path, gpt: Gpt) -> None:
    for count, options in ((3, []), (1, ["--prompts", "1"]), (0, ["--prompts", "0"])):
        assert gpt("export", "-m", run_folder, "-o", f"{count}.html", *options).code == 0
        prompts = read_page(Path(f"{count}.html"))[0]["prompts"]
        assert len(prompts) == len({*prompts}) == count
        lines = text.read_text(encoding="utf-8").split("\n")
        assert all(len(prompt) <= 60 and any(line.startswith(prompt) for line in lines) for prompt in prompts)
    shutil.copytree(folder.find_checkpoint(str(run_folder)), "alone")
    library.export("alone", "alone.html")
    header, _ = read_page(Path("alone.html"))
    assert (header["prompts"], header["name"]) == ([], "alone")
    assert "How it was trained, and on which data, is not recorded." in header["about"]


def test_prompts_are_spread_over_the_text() -> None:
    documents = [
        f"Story {'abcdefghijkl'[i]} begins here and goes on\n  indented line of words\n123 number\n" for i in range(12)
    ]
    ids = np.concatenate([[256, *document.encode()] for document in documents])
    stream: Any = type("", (), {"__len__": lambda _: len(ids), "take": lambda _, start, n: ids[start : start + n]})()
    found = choose_openings(stream, bytes_tokenizer(), 3)
    assert found == ["Story a begins here and", "Story e begins here and", "Story i begins here and"]
    assert [*_openings(f"x\n{'y' * 100} z\n\ufffdbad\na\x00b c\nlast wo", bytes_tokenizer())] == [
        "y" * 60,
        "last",
    ]


# The training text


def read_text(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns the header's part on the training text, and its stream, after checking its checksum."""
    header, _ = read_page(path)
    (data,) = re.findall(
        r'<script type="application/octet-stream" class="text">(.*?)</script>', path.read_text("utf-8")
    )
    stream = base64.b64decode(data)
    assert header["text"]["sum"] == zlib.adler32(stream)
    return header["text"], stream


def test_page_contains_the_training_text_only_if_asked(run_folder: Path, gpt: Gpt) -> None:
    with_text = gpt("export", "-m", run_folder, "-o", "with.html", "--with-text", "--prompts", "0")
    without = gpt("export", "-m", run_folder, "-o", "without.html", "--prompts", "0")
    assert (with_text.code, without.code) == (0, 0)
    tokens = TokenFolder(run_folder / "tokens").stream("train")
    values, stream = read_text(Path("with.html"))
    assert f"contains the whole training text: {len(tokens):,} tokens, {len(tokens) * 8 / 3e6:.2f} MB" in with_text.err
    assert (values["ids"], values["width"], values["opening"]) == (len(tokens), 2, 1)
    assert np.frombuffer(stream, "<u2", len(tokens)).tolist() == tokens.take(0, len(tokens)).tolist()
    assert np.frombuffer(stream[-8:], "<u4").tolist() == [0, len(tokens)]
    assert "training text" not in without.err
    header, weights = read_page(Path("without.html"))
    page = Path("without.html").read_text(encoding="utf-8")
    assert header["text"] is None
    assert 'class="text"' not in page
    quoted = base64.b64encode(stream[3000:3300]).decode()
    assert quoted in Path("with.html").read_text(encoding="utf-8") and quoted not in page
    assert stream[3000:3060] not in weights
    words = make_text()[: values["ids"]].split()
    assert not any(" ".join(words[at : at + 4]) in page for at in range(len(words) - 4))


def test_page_with_text_needs_the_tokens_of_its_run(
    run_folder: Path, gpt: Gpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder.find_checkpoint(str(run_folder)), "alone")
    message = "the training tokens of alone are not there"
    one_line_of_what_and_what_next(gpt("export", "-m", "alone", "-o", "it.html", "--with-text"), message)
    shutil.copytree(run_folder, "run")
    shutil.rmtree("run/tokens")
    message = "are not there"
    one_line_of_what_and_what_next(gpt("export", "-m", "run", "-o", "it.html", "--with-text"), message)
    monkeypatch.setattr(html, "MAX_IDS", 100)
    message = "tokens; a page can have 100"
    one_line_of_what_and_what_next(gpt("export", "-m", run_folder, "-o", "it.html", "--with-text"), message)
    assert not Path("it.html").exists()


def test_losses_are_those_of_the_rounded_weights(run_folder: Path, workdir: Path) -> None:
    (workdir / "val.txt").write_bytes(make_text(300, seed=1).encode())
    loaded = library.load(run_folder)
    for name, parameter in loaded.model.named_parameters():
        if parameter.dim() == 2 and name != "wpe.weight":
            parameter.data = round_rows(parameter.data)
    expected = loaded.evaluate_files(["val.txt"]).loss
    exported = library.export(run_folder, "it.html", dtype="int8", eval="val.txt")
    assert (exported.format, exported.type, exported.loss_after) == ("html", "int8", expected)
    assert exported.loss_before != exported.loss_after
    exact = library.export(run_folder, "exact.html", dtype="float32", eval="val.txt")
    assert exact.loss_before == exact.loss_after == exported.loss_before
