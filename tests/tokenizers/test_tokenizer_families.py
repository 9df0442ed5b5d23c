"""Tokenizers of other model families."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vocabularies
from conftest import Gpt, make_text, more, one_line_of_what_and_what_next, train
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CPU, EOT, tiny_model
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

from gpt import SampleConfig, load
from gpt.corpus.token_folder import TokenFolder
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request
from gpt.decoding.stream import TextStream
from gpt.system.errors import UserError
from gpt.tokenizers import backends, boundaries, finding, saving
from gpt.tokenizers.backends import ByteBPE
from gpt.tokenizers.tokenizer import Tokenizer

TEXTS = [
    "", " ", "hello", "  two  spaces ", "a\r\nb\n\n\n c\t\td", "WE'LL SEE, it's we'Ve", "1234567 12 ٣² Ⅷ 3.14", "日本語 한국어 עברית",
    "🐕‍🦺 👩‍👩‍👧", "e\u0301 A\u030a \u1100\u1161 \u212b \u2126", "\u00a0\u2003 \u3000x", "\x00\x1f\ufffd", "   7", "x   7  y", "▁under▁", "<0x41>",
    "don't\u2019s", "ſ'ſ ß", "\U0001f9ff\U00011de0 \u0378", "(a)[b]{c}", "end \n", "\n 5", "'s 'S 'T",
]  # fmt: skip
HARD = st.text(st.sampled_from(" \n\r\t'sStTlL12.-!é\u0301\u1100\u1161日▁<>\u00a0"), max_size=30)
ANY = st.text(max_size=40) | HARD

LoadBoth = Callable[[str], tuple[Tokenizer, HFTokenizer]]


def copy_with(folder: Path, target: Path, **changes: Any) -> Path:
    """Copies a tokenizer folder with ``changes`` to its tokenizer.json."""
    shutil.copytree(folder, target)
    values = json.loads((target / "tokenizer.json").read_text(encoding="utf-8")) | changes
    (target / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    return target


def stream_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Streams ``ids``; asserts that the text equals ``decode``."""
    stream = TextStream(tokenizer)
    text = "".join(map(stream.push, ids)) + stream.flush()
    assert text == tokenizer.decode(ids)
    return text


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("vocabularies")
    return {form: vocabularies.write(form, parent / form) for form in vocabularies.FORMS}


@pytest.fixture(scope="session")
def load_both(folders: dict[str, Path]) -> LoadBoth:
    """Returns a function that loads our tokenizer and that of the tokenizers library."""
    pairs = {
        form: (finding.find_tokenizer(str(folder)), HFTokenizer.from_file(str(folder / "tokenizer.json")))
        for form, folder in folders.items()
    }
    return lambda form: pairs[form]


every_form = pytest.mark.parametrize("form", vocabularies.FORMS)


@every_form
@settings(max_examples=150)
@given(text=ANY)
def test_ids_equal_the_tokenizers_library(form: str, text: str, load_both: LoadBoth) -> None:
    tokenizer, reference = load_both(form)
    assert tokenizer.prompt(text) == (reference.encode(text).ids or [tokenizer.eot])
    reference.encode_special_tokens = True
    assert tokenizer.encode(text).tolist() == reference.encode(text, add_special_tokens=False).ids
    reference.encode_special_tokens = False


@every_form
def test_ids_equal_transformers(form: str, folders: dict[str, Path], load_both: LoadBoth) -> None:
    transformers = pytest.importorskip("transformers")
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(folders[form]), load_both(form)[0]
    words = [*tokenizer.all_specials, *tokenizer.words]
    for text in [*TEXTS, "".join(words), f"a {words[0]} b{words[-1]}c"]:
        assert tokenizer.prompt(text) == (reference(text).input_ids or [tokenizer.eot]), text


@every_form
@settings(max_examples=100)
@given(text=ANY)
def test_streamed_text_equals_decoded_text(form: str, text: str, load_both: LoadBoth) -> None:
    tokenizer, reference = load_both(form)
    ids = tokenizer.encode(text).tolist()
    assert [ids_of_text.tolist() for ids_of_text in tokenizer.encode_all([text, "a"])] == [
        ids,
        tokenizer.encode("a").tolist(),
    ]
    streamed, decoded = stream_text(tokenizer, ids), reference.decode(ids, skip_special_tokens=False)
    assert streamed in (decoded, f" {decoded}")  # The library drops the leading space.
    if form in ("gpt2", "llama3", "smollm2"):
        assert streamed == text


@pytest.mark.parametrize(
    ("form", "words", "text"),
    [
        ("llama2", [AddedToken("▁▁", normalized=False)], "word▁▁word"),  # Runs of spaces, as in Gemma
        ("llama2", ["<x>", "foo bar"], "word <x>word foo bar word"),  # The Llama 2 normalizer changes these tokens.
        ("unigram", ["▁yy"], "word▁yyword"),
    ],
)
def test_added_tokens_decode_like_the_library(
    form: str, words: list[Any], text: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    reference = HFTokenizer.from_file(str(folders[form] / "tokenizer.json"))
    reference.add_tokens(words)
    tokenizer = finding.find_tokenizer(str(copy_with(folders[form], tmp_path / "a", **json.loads(reference.to_str()))))
    ids = tokenizer.encode(text).tolist()
    assert max(ids) == tokenizer.vocab_size - 1  # The text contains the last added token.
    decoded = reference.decode(ids, skip_special_tokens=False)
    assert stream_text(tokenizer, ids) in (decoded, f" {decoded}")


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_older_post_processors_add_the_start_token(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    reference = HFTokenizer.from_file(str(folders["unigram"] / "tokenizer.json"))
    reference.add_special_tokens(["[CLS]", "[SEP]"])
    start, end = ((word, reference.token_to_id(word)) for word in ("[CLS]", "[SEP]"))
    reference.post_processor = getattr(processors, f"{kind}Processing")(end, start)
    folder = copy_with(folders["unigram"], tmp_path / "begun", **json.loads(reference.to_str()))
    expected = AutoTokenizer.from_pretrained(folder)("a word").input_ids
    assert [*finding.find_tokenizer(str(folder)).prompt("a word"), end[1]] == expected


def test_two_start_tokens_are_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    post = json.loads((folders["llama2"] / "tokenizer.json").read_text(encoding="utf-8"))["post_processor"]
    post["single"].insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})
    with pytest.raises(UserError, match="starts a text with 2 special tokens"):
        finding.find_tokenizer(str(copy_with(folders["llama2"], tmp_path / "a", post_processor=post)))


def test_end_token_can_come_from_special_tokens_map(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(folders["llama2"] / "tokenizer.json", tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    assert finding.find_tokenizer(str(tmp_path)).eot_token == "</s>"


def test_byte_level_pieces_without_decoder_decode_to_bytes(folders: dict[str, Path], tmp_path: Path) -> None:
    """The tokenizers library runs this tokenizer, since it has a normalizer."""
    folder = copy_with(folders["gpt2"], tmp_path / "a", decoder=None, normalizer={"type": "Lowercase"})
    tokenizer = finding.find_tokenizer(str(folder))
    assert not isinstance(tokenizer.backend, ByteBPE)
    assert tokenizer.decode(tokenizer.encode("Zürich 日本 12").tolist()) == "zürich 日本 12"


@pytest.mark.parametrize("config_value", [None, True, False])
@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize(
    ("form", "kind"), [("gpt2", "GPT2Tokenizer"), ("gpt2", "PreTrainedTokenizerFast"), ("qwen", "Qwen2TokenizerFast")]
)
def test_prefix_space_equals_transformers(
    form: str, kind: str, in_file: bool, config_value: bool | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    pre = json.loads((folders[form] / "tokenizer.json").read_text(encoding="utf-8"))["pre_tokenizer"]
    pre.get("pretokenizers", [pre])[-1]["add_prefix_space"] = in_file
    path = copy_with(folders[form], tmp_path / form, pre_tokenizer=pre)
    config = json.loads((path / "tokenizer_config.json").read_text()) | {"tokenizer_class": kind}
    if config_value is not None:
        config["add_prefix_space"] = config_value
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, reference = finding.find_tokenizer(str(path)), transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.prompt("cat it's word") == reference("cat it's word").input_ids


@pytest.mark.parametrize("form", ["gpt2", "unigram"])
def test_byte_order_marks_are_ignored(form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    marked_file = tmp_path / "marked"
    shutil.copytree(folders[form], marked_file)
    (marked_file / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    original = finding.find_tokenizer(str(marked_file))
    for file in marked_file.iterdir():
        file.write_bytes("\ufeff".encode() + file.read_bytes())
    for path in (marked_file, marked_file / "tokenizer.json"):
        assert finding.find_tokenizer(str(path)).files == original.files
        assert finding.find_tokenizer(str(path)).fingerprint == original.fingerprint


@pytest.mark.parametrize("form", ["llama2", "mistral"])
@settings(max_examples=100)
@given(text=st.text(max_size=20).filter(lambda text: "▁" not in text and not text.startswith(" ")))
def test_continuation_gets_no_prefix_space(form: str, text: str, load_both: LoadBoth) -> None:
    tokenizer = load_both(form)[0]
    assert tokenizer.decode(tokenizer.encode(text, continues=True).tolist()) == text
    assert tokenizer.document_bytes(tokenizer.document(text).tolist()).decode() == text


@every_form
def test_start_and_end_tokens(form: str, load_both: LoadBoth) -> None:
    tokenizer = load_both(form)[0]
    start_token = {"llama3": "<|begin_of_text|>", "llama2": "<s>", "mistral": "<s>"}.get(form)
    assert tokenizer.bos == (None if start_token is None else tokenizer.all_specials[start_token])
    end = {"llama3": "<|eot_id|>", "qwen": "<|im_end|>", "llama2": "</s>", "mistral": "</s>", "unigram": "</s>"}
    assert tokenizer.eot_token == end.get(form, "<|endoftext|>")
    assert tokenizer.opening == ([tokenizer.eot] if tokenizer.bos is None else [tokenizer.eot, tokenizer.bos])
    assert tokenizer.chat_template == (vocabularies.TEMPLATE if form in ("llama3", "qwen") else None)


def test_generation_config_adds_end_tokens(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["qwen"], tmp_path / "a")
    original = finding.find_tokenizer(str(tmp_path / "a"))
    end, im_end = original.all_specials["<|endoftext|>"], original.all_specials["<|im_end|>"]
    assert (original.ends, original.eot) == ({im_end}, im_end)
    for eos_ids, ends, eot in (
        ([im_end, end], {im_end, end}, end),
        ([5, 10**6, im_end], {im_end, 5}, im_end),  # 5 is an ordinary token.
        ([50256, 5], {im_end}, im_end),  # Without added tokens, tokenizer_config.json decides.
        (5, {im_end}, im_end),
    ):
        (tmp_path / "a" / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_ids}))
        tokenizer = finding.find_tokenizer(str(tmp_path / "a"))
        assert (tokenizer.ends, tokenizer.eot) == (ends, eot), eos_ids
    for bad in ([-1], "x", 2**40, [[1]]):
        (tmp_path / "a" / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
        with pytest.raises(UserError, match="which is not an id"):
            finding.find_tokenizer(str(tmp_path / "a"))


@every_form
def test_saving_preserves_the_tokenizer(form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    first = finding.find_tokenizer(str(folders[form]))
    saving.save_tokenizer(first, tmp_path / "own")
    saved_tokenizer = finding.find_tokenizer(str(tmp_path / "own"))
    assert saved_tokenizer == first
    assert saved_tokenizer.fingerprint == first.fingerprint
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "own" / name).read_bytes() == (folders[form] / name).read_bytes()


# Commands and runs


@pytest.mark.parametrize("form", ["llama3", "mistral"])
def test_run_keeps_its_tokenizer_files(form: str, folders: dict[str, Path], load_both: LoadBoth, gpt: Gpt) -> None:
    """The checkpoint encodes prompts like Transformers, and token folders start documents like the model family."""
    transformers = pytest.importorskip("transformers")
    tokenizer = load_both(form)[0]
    lines = [f"document {i}: it's 2024,  {words} </s>" for i, words in enumerate(make_text(60).split("."))]
    Path("a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines * 30), encoding="utf-8")
    result = gpt("tokenize", "a.jsonl", "--tokenizer", folders[form], "-o", "tokens", "--jobs", "2")
    assert result.code == 0, result.err
    documents = list(TokenFolder("tokens").stream("train").documents)
    assert documents[0][:].tolist() == tokenizer.document(lines[0]).tolist()
    assert documents[0][:1].tolist() == [tokenizer.bos]
    step = train(Path("tokens"), steps=1, out="run", vocab_size=None)[0].checkpoint
    for name, data in tokenizer.files.items():
        assert (step / name).read_bytes() == (folders[form] / name).read_bytes() == data
    reference = transformers.AutoTokenizer.from_pretrained(step)
    prompts = ["document 7", "", f"{tokenizer.eot_token} x"]
    config = SampleConfig(greedy=True, max_tokens=3, echo_logprobs=True, logprobs=0)
    for piece in load(str(step), device="cpu").write_all(prompts, config):
        if piece.sample is not None:
            assert piece.sample.prompt_logprobs is not None
            prompt_ids = [token.id for token in piece.sample.prompt_logprobs]
            assert prompt_ids == reference(prompts[piece.prompt]).input_ids


@pytest.mark.parametrize(
    ("settings", "bias", "expected"),
    [
        ({}, {7: 100.0}, [7]),
        ({"min_tokens": 4}, {7: 100.0, EOT: 90.0, 8: 80.0}, [8, 8, 8, 8, 7]),
        ({"beam": 2}, {7: 100.0}, [7]),
    ],
)
def test_any_end_token_ends_generation(settings: dict[str, Any], bias: dict[int, float], expected: list[int]) -> None:
    engine = Engine(Context(tiny_model(), CPU, 2), {EOT, 7})
    engine.add(Request([1], SampleConfig(max_tokens=30, **settings), bias=tuple(bias.items())))
    updates = list(engine.run())
    ids = updates[-1].best[0].ids if "beam" in settings else [token.id for update in updates for token in update.tokens]
    assert ids == expected


def test_show_prints_start_and_end_tokens(folders: dict[str, Path], load_both: LoadBoth, gpt: Gpt) -> None:
    tokenizer, folder = load_both("mistral")[0], folders["mistral"]
    values = json.loads(gpt("tokenizer", "show", folder, "--json").out)
    assert (values["bos"], values["ends"], values["pattern"]) == (tokenizer.bos, sorted(tokenizer.ends), "")
    assert "tokenizers library" in gpt("tokenizer", "show", folder).out
    assert "tiktoken" in gpt("tokenizer", "show", folders["gpt2"]).out
    encoded = json.loads(gpt("tokenizer", "encode", "it's é☃", "--tokenizer", folder, "--json").out)
    assert encoded["tokens"] == tokenizer.encode("it's é☃").tolist()
    assert len(encoded["pieces"]) == len(encoded["tokens"])


# Errors


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_older_files_are_an_error_with_a_hint(name: str, gpt: Gpt, workdir: Path) -> None:
    Path("folder").mkdir()
    Path("folder", name).write_bytes(b"{}")
    result = gpt("tokenizer", "show", "folder")
    one_line_of_what_and_what_next(result, f"has only a {name}")
    assert "save_pretrained" in result.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}, "a value has the wrong type"),
        ({"model": {"type": "BPE"}}, "is not a tokenizers file: 'vocab' is missing"),
        ({"decoder": {"type": "Replace", "pattern": {"Regex": "a"}, "content": ""}}, "decoder .*Regex.* is not supported"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "decoder .*WordPiece.* is not supported"),
        ({"decoder": None}, "decoder .*null.* is not supported"),
        ({"added_tokens": [{"content": "</s>"}]}, "'id' is missing"),
        ({"added_tokens": 5}, "a value has the wrong type"),
        ({"normalizer": {"type": "Nothing"}}, "cannot read the tokenizer.json"),
    ],
)  # fmt: skip
def test_forged_tokenizer_json_is_an_error(
    change: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy_with(folders["llama2"], tmp_path / "a", **change)
    with pytest.raises(UserError, match=message):
        finding.find_tokenizer(str(folder))


def test_modified_saved_folder_is_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    saving.save_tokenizer(finding.find_tokenizer(str(folders["llama2"])), tmp_path / "own")
    file = tmp_path / "own" / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b'"\xe2\x96\x81th"', b'"\xe2\x96\x81tz"', 1) + b" ")
    with pytest.raises(UserError, match="the fingerprint differs"):
        finding.find_tokenizer(str(tmp_path / "own"))


# Parity with the tokenizers library


@pytest.mark.parametrize("step", [37, more(1)])
def test_both_regex_engines_classify_characters_alike(step: int) -> None:
    """The engines must tell letters, numbers, white space and contractions apart. Tests every character below U+0300
    and every ``step``-th character above. If two neighbors share a piece, a two-byte token shows it."""
    characters = backends.byte_characters()
    pairs = [bytes([first, second]) for first in b"a1 !\n'" for second in range(256)]
    ranks = {token: id for id, token in enumerate([*(bytes([byte]) for byte in range(256)), *pairs])}
    vocab = {"".join(characters[byte] for byte in token): id for token, id in ranks.items()}
    reference = HFTokenizer(models.BPE(vocab=vocab, merges=[(characters[a], characters[b]) for a, b in pairs]))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = ByteBPE(boundaries.GPT2_PATTERN, ranks)
    codes = {  # Omits scripts of 1,000 or more similar characters, and most private-use characters.
        *range(0x3400), *range(0x9FF0, 0xAC10), *range(0xD790, 0xD800), *range(0xE000, 0xE010), *range(0xF8F0, 0x12000),
        *range(0x13440, 0x14410), *range(0x16000, 0x17000), *range(0x18D00, 0x18E00), *range(0x1AFF0, 0x20000),
    }  # fmt: skip
    tested = [chr(code) for at, code in enumerate(sorted(codes)) if code < 0x300 or at % step == 0]
    for pattern in ("a{}", " {}", "1{}", "'{}l"):
        for start in range(0, len(tested), 10_000):
            texts = [pattern.format(character) + "!" for character in tested[start : start + 10_000]]
            ids = tokenizer._encoding.encode_ordinary_batch(texts, num_threads=1)
            assert ids == [encoding.ids for encoding in reference.encode_batch(texts)]


@pytest.mark.parametrize("ends", ["", "b", "e", "be"])
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer"])
def test_start_token_equals_autotokenizer(folders: dict[str, Path], tmp_path: Path, ends: str, kind: str) -> None:
    """The config has no flag, or ``add_eos_token`` false, or ``add_bos_token`` true, false or null."""
    from transformers import AutoTokenizer

    special = lambda word: [{"SpecialToken": {"id": word, "type_id": 0}}]
    template = json.loads((folders["llama2"] / "tokenizer.json").read_text(encoding="utf-8"))["post_processor"]
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    template["single"] = template["pair"] = special("<s>") * ("b" in ends) + text + special("</s>") * ("e" in ends)
    template["special_tokens"] = {w: {"id": w, "ids": [id], "tokens": [w]} for id, w in ((1, "<s>"), (2, "</s>"))}
    folder = copy_with(folders["llama2"], tmp_path / "a", post_processor=template if ends else None)
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": kind}
    for key, value in ((None, 0), ("add_eos_token", False), *(("add_bos_token", flag) for flag in (True, False, None))):
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, **({key: value} if key else {})}))
        expected = AutoTokenizer.from_pretrained(str(folder))("ab")["input_ids"]
        ids = finding.find_tokenizer(str(folder)).prompt("ab")
        assert [id == 1 for id in ids[:2]] == [id == 1 for id in expected[:2]], (key, value)
