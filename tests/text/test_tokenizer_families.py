"""Tokenizers of other families, against the tokenizers library and transformers."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vocabularies
from conftest import Gpt, make_text, more, one_line_of_what_and_what_next, train
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CPU, EOT, tiny_model
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

from gpt import SampleConfig, evaluate, load
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request
from gpt.decoding.stream import TextStream
from gpt.errors import UserError
from gpt.text import backends, boundaries, tokenizer_files
from gpt.text.backends import ByteBPE
from gpt.text.token_folder import TokenFolder
from gpt.text.tokenizer import Tokenizer

TEXTS = [
    "", " ", "hello", "  two  spaces ", "a\r\nb\n\n\n c\t\td", "WE'LL SEE, it's we'Ve", "1234567 12 ٣² Ⅷ 3.14", "日本語 한국어 עברית",
    "🐕‍🦺 👩‍👩‍👧", "e\u0301 A\u030a \u1100\u1161 \u212b \u2126", "\u00a0\u2003 \u3000x", "\x00\x1f\ufffd", "   7", "x   7  y", "▁under▁", "<0x41>",
    "don't\u2019s", "ſ'ſ ß", "\U0001f9ff\U00011de0 \u0378", "(a)[b]{c}", "end \n", "\n 5", "'s 'S 'T",
]  # fmt: skip
HARD = st.text(st.sampled_from(" \n\r\t'sStTlL12.-!é\u0301\u1100\u1161日▁<>\u00a0"), max_size=30)
ANY = st.text(max_size=40) | HARD

Both = Callable[[str], tuple[Tokenizer, HFTokenizer]]


def changed(folder: Path, place: Path, **changes: Any) -> Path:
    """A copy of a tokenizer, with other values in its tokenizer.json."""
    shutil.copytree(folder, place)
    values = json.loads((place / "tokenizer.json").read_text(encoding="utf-8")) | changes
    (place / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    return place


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of a stream of ids, which is the text of all of them."""
    stream = TextStream(tokenizer)
    text = "".join(map(stream.push, ids)) + stream.flush()
    assert text == tokenizer.decode(ids)
    return text


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("vocabularies")
    return {form: vocabularies.write(form, place / form) for form in vocabularies.FORMS}


@pytest.fixture(scope="session")
def both(folders: dict[str, Path]) -> Both:
    """Ours and the library's tokenizer of a form."""
    made = {
        form: (tokenizer_files.find_tokenizer(str(folder)), HFTokenizer.from_file(str(folder / "tokenizer.json")))
        for form, folder in folders.items()
    }
    return lambda form: made[form]


every_form = pytest.mark.parametrize("form", vocabularies.FORMS)


@every_form
@settings(max_examples=150, deadline=None)
@given(text=ANY)
def test_ids_are_the_librarys(form: str, text: str, both: Both) -> None:
    ours, theirs = both(form)
    assert ours.prompt(text) == (theirs.encode(text).ids or [ours.eot])
    theirs.encode_special_tokens = True
    assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids
    theirs.encode_special_tokens = False


@every_form
def test_ids_are_those_of_transformers(form: str, folders: dict[str, Path], both: Both) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folders[form]), both(form)[0]
    words = [*ours.all_specials, *ours.words]
    for text in [*TEXTS, "".join(words), f"a {words[0]} b{words[-1]}c"]:
        assert ours.prompt(text) == (theirs(text).input_ids or [ours.eot]), text


@every_form
@settings(max_examples=100, deadline=None)
@given(text=ANY)
def test_streams_join_to_the_whole_text(form: str, text: str, both: Both) -> None:
    ours, theirs = both(form)
    ids = ours.encode(text).tolist()
    assert [each.tolist() for each in ours.encode_all([text, "a"])] == [ids, ours.encode("a").tolist()]
    whole, decoded = streamed(ours, ids), theirs.decode(ids, skip_special_tokens=False)
    assert whole in (decoded, f" {decoded}")  # the library takes the space before a whole text away
    if form in ("gpt2", "llama3", "smollm2"):
        assert whole == text


@pytest.mark.parametrize("form", ["wordpiece", "spaced", "words"])
def test_words_are_spaced_as_the_library_spaces_them(form: str, both: Both, folders: dict[str, Path], gpt: Gpt) -> None:
    ours, theirs = both(form)
    text = "12 345, don't word . word ! <think> 2024 word <think>word"
    ids = ours.encode(text).tolist()
    decoded = theirs.decode(ids, skip_special_tokens=False)
    assert ids == theirs.encode(text).ids
    assert ours.document_bytes(ids).decode() == decoded
    assert gpt("tokenizer", "decode", *map(str, ids), "--tokenizer", str(folders[form])).out == decoded
    assert evaluate.count_text(ours, [np.array(ids, np.uint32)]) == (len(decoded.encode()), len(decoded.split()))
    assert ours.decode(ids[:5]) + ours.decode(ids[5:]) == f" {decoded}"


@pytest.mark.parametrize(
    ("form", "words", "text"),
    [
        ("llama2", [AddedToken("▁▁", normalized=False)], "word▁▁word"),  # Gemma's runs of spaces
        ("llama2", ["<x>", "foo bar"], "word <x>word foo bar word"),  # which Llama 2's normalizer changes
        ("unigram", ["▁yy"], "word▁yyword"),
        ("wordpiece", ["##zz"], "word ##zz word"),
    ],
)
def test_added_tokens_are_decoded_as_the_library_does(
    form: str, words: list[Any], text: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    theirs = HFTokenizer.from_file(str(folders[form] / "tokenizer.json"))
    theirs.add_tokens(words)
    ours = tokenizer_files.find_tokenizer(str(changed(folders[form], tmp_path / "a", **json.loads(theirs.to_str()))))
    ids = ours.encode(text).tolist()
    assert max(ids) == ours.vocab_size - 1  # an added one is among them
    decoded = theirs.decode(ids, skip_special_tokens=False)
    assert streamed(ours, ids) in (decoded, f" {decoded}")


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_older_post_processors_begin_a_text_too(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = HFTokenizer.from_file(str(folders["wordpiece"] / "tokenizer.json"))
    theirs.add_special_tokens(["[CLS]", "[SEP]"])
    begin, end = ((word, theirs.token_to_id(word)) for word in ("[CLS]", "[SEP]"))
    theirs.post_processor = getattr(processors, f"{kind}Processing")(end, begin)
    folder = changed(folders["wordpiece"], tmp_path / "begun", **json.loads(theirs.to_str()))
    expected = AutoTokenizer.from_pretrained(folder)("a word").input_ids
    assert [*tokenizer_files.find_tokenizer(str(folder)).prompt("a word"), end[1]] == expected


def test_several_tokens_before_a_text_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    post = json.loads((folders["llama2"] / "tokenizer.json").read_text(encoding="utf-8"))["post_processor"]
    post["single"].insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})
    with pytest.raises(UserError, match="starts a text with 2 special tokens"):
        tokenizer_files.find_tokenizer(str(changed(folders["llama2"], tmp_path / "a", post_processor=post)))


def test_the_end_may_stand_in_the_map_of_special_tokens(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(folders["llama2"] / "tokenizer.json", tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    assert tokenizer_files.find_tokenizer(str(tmp_path)).eot_token == "</s>"


def test_without_a_decoder_byte_level_pieces_are_bytes(folders: dict[str, Path], tmp_path: Path) -> None:
    """As tiktoken decodes them, where the library runs the tokenizer because of its normalizer."""
    folder = changed(folders["gpt2"], tmp_path / "a", decoder=None, normalizer={"type": "Lowercase"})
    ours = tokenizer_files.find_tokenizer(str(folder))
    assert not isinstance(ours.backend, ByteBPE)
    assert ours.decode(ours.encode("Zürich 日本 12").tolist()) == "zürich 日本 12"


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize(
    ("form", "kind"), [("gpt2", "GPT2Tokenizer"), ("gpt2", "PreTrainedTokenizerFast"), ("qwen", "Qwen2TokenizerFast")]
)
def test_a_space_before_a_text_is_transformers(
    form: str, kind: str, in_file: bool, said: bool | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    pre = json.loads((folders[form] / "tokenizer.json").read_text(encoding="utf-8"))["pre_tokenizer"]
    pre.get("pretokenizers", [pre])[-1]["add_prefix_space"] = in_file
    path = changed(folders[form], tmp_path / form, pre_tokenizer=pre)
    config = json.loads((path / "tokenizer_config.json").read_text()) | {"tokenizer_class": kind}
    if said is not None:
        config["add_prefix_space"] = said
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = tokenizer_files.find_tokenizer(str(path)), transformers.AutoTokenizer.from_pretrained(path)
    assert ours.prompt("cat it's word") == theirs("cat it's word").input_ids


@pytest.mark.parametrize("form", ["gpt2", "unigram"])
def test_byte_order_marks_of_other_editors_are_left_out(form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    marked = tmp_path / "marked"
    shutil.copytree(folders[form], marked)
    (marked / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    plain = tokenizer_files.find_tokenizer(str(marked))
    for file in marked.iterdir():
        file.write_bytes("\ufeff".encode() + file.read_bytes())
    for path in (marked, marked / "tokenizer.json"):
        assert tokenizer_files.find_tokenizer(str(path)).files == plain.files
        assert tokenizer_files.find_tokenizer(str(path)).fingerprint == plain.fingerprint


@pytest.mark.parametrize("form", ["llama2", "mistral"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20).filter(lambda text: "▁" not in text and not text.startswith(" ")))
def test_a_text_that_continues_gets_no_space(form: str, text: str, both: Both) -> None:
    ours = both(form)[0]
    assert ours.decode(ours.encode(text, continues=True).tolist()) == text
    assert ours.document_bytes(ours.document(text).tolist()).decode() == text


@every_form
def test_what_begins_and_ends_a_text(form: str, both: Both) -> None:
    ours = both(form)[0]
    begin = {"llama3": "<|begin_of_text|>", "llama2": "<s>", "mistral": "<s>"}.get(form)
    assert ours.bos == (None if begin is None else ours.all_specials[begin])
    end = {"llama3": "<|eot_id|>", "qwen": "<|im_end|>", "llama2": "</s>", "mistral": "</s>", "unigram": "</s>"}
    assert ours.eot_token == end.get(form, "<|endoftext|>")
    assert ours.opening == ([ours.eot] if ours.bos is None else [ours.eot, ours.bos])
    assert ours.chat_template == (vocabularies.TEMPLATE if form in ("llama3", "qwen") else None)


def test_generation_config_names_all_ends(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["qwen"], tmp_path / "a")
    plain = tokenizer_files.find_tokenizer(str(tmp_path / "a"))
    end, im_end = plain.all_specials["<|endoftext|>"], plain.all_specials["<|im_end|>"]
    assert (plain.ends, plain.eot) == ({im_end}, im_end)
    for said, ends, eot in (
        ([im_end, end], {im_end, end}, end),
        ([5, 10**6, im_end], {im_end, 5}, im_end),  # an ordinary token beside an added one
        ([50256, 5], {im_end}, im_end),  # no added tokens: tokenizer_config.json says it
        (5, {im_end}, im_end),
    ):
        (tmp_path / "a" / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
        found = tokenizer_files.find_tokenizer(str(tmp_path / "a"))
        assert (found.ends, found.eot) == (ends, eot), said
    for bad in ([-1], "x", 2**40, [[1]]):
        (tmp_path / "a" / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
        with pytest.raises(UserError, match="which is not an id"):
            tokenizer_files.find_tokenizer(str(tmp_path / "a"))


@every_form
def test_saved_again_they_are_what_they_were(form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    first = tokenizer_files.find_tokenizer(str(folders[form]))
    tokenizer_files.save_tokenizer(first, tmp_path / "own")
    found = tokenizer_files.find_tokenizer(str(tmp_path / "own"))
    assert found == first
    assert found.fingerprint == first.fingerprint
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "own" / name).read_bytes() == (folders[form] / name).read_bytes()


@pytest.mark.parametrize("form", ["llama3", "qwen", "smollm2", "gaps"])
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(ANY, max_size=9), size=st.integers(1, 40))
def test_a_document_in_parts_has_the_ids_of_the_whole(form: str, texts: list[str], size: int, both: Both) -> None:
    ours = both(form)[0]
    parts = [part for part, _ in boundaries.parts([*texts, "some words"], ours.pattern, size)]
    assert ours.encode("".join(texts) + "some words").tolist() == [id for part in parts for id in ours.encode(part)]
    assert len(list(boundaries.parts(["some words "] * 9, ours.pattern, 10))) > 4


def test_a_tokenizer_that_tiktoken_ran_in_older_versions_is_read(both: Both, tmp_path: Path) -> None:
    now = both("qwen")[0]
    ranks = {token: id for id, token in now.backend.pieces.items()}
    older = replace(now, backend=ByteBPE(now.pattern, ranks, nfc=True))
    tokenizer_files.save_tokenizer(older, tmp_path / "older")
    again = tokenizer_files.find_tokenizer(str(tmp_path / "older"))
    assert again == older
    assert [again.prompt(text) for text in TEXTS] == [now.prompt(text) for text in TEXTS]
    assert again.fingerprint != now.fingerprint
    assert again.gives_the_ids_of(now)  # so that its tokens can be trained on
    assert not again.gives_the_ids_of(both("llama3")[0])
    assert not again.gives_the_ids_of(replace(now, eot=now.all_specials["<|im_start|>"], specials={}))


# Through the program


@pytest.mark.parametrize("form", ["llama3", "mistral"])
def test_a_run_keeps_the_files_of_its_tokenizer(form: str, folders: dict[str, Path], both: Both, gpt: Gpt) -> None:
    """From ``gpt tokenize`` to a checkpoint, whose prompts are transformers' and whose documents begin as the family's."""
    transformers = pytest.importorskip("transformers")
    ours = both(form)[0]
    lines = [f"document {i}: it's 2024,  {words} </s>" for i, words in enumerate(make_text(60).split("."))]
    Path("a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines * 30), encoding="utf-8")
    done = gpt("tokenize", "a.jsonl", "--tokenizer", folders[form], "-o", "tokens", "--jobs", "2")
    assert done.code == 0, done.err
    documents = list(TokenFolder("tokens").stream("train").documents)
    assert documents[0][:].tolist() == ours.document(lines[0]).tolist()
    assert documents[0][:1].tolist() == [ours.bos]
    step = train(Path("tokens"), steps=1, out="run", vocab_size=None)[0].checkpoint
    for name, data in ours.files.items():
        assert (step / name).read_bytes() == (folders[form] / name).read_bytes() == data
    theirs = transformers.AutoTokenizer.from_pretrained(step)
    prompts = ["document 7", "", f"{ours.eot_token} x"]
    config = SampleConfig(greedy=True, max_tokens=3, echo_logprobs=True, logprobs=0)
    for piece in load(str(step), device="cpu").write_all(prompts, config):
        if piece.sample is not None:
            assert piece.sample.prompt_logprobs is not None
            fed = [token.id for token in piece.sample.prompt_logprobs]
            assert fed == theirs(prompts[piece.prompt]).input_ids


@pytest.mark.parametrize(
    ("settings", "bias", "written"),
    [
        ({}, {7: 100.0}, [7]),
        ({"min_tokens": 4}, {7: 100.0, EOT: 90.0, 8: 80.0}, [8, 8, 8, 8, 7]),
        ({"beam": 2}, {7: 100.0}, [7]),
    ],
)
def test_a_text_ends_with_any_of_its_ends(settings: dict[str, Any], bias: dict[int, float], written: list[int]) -> None:
    engine = Engine(Context(tiny_model(), CPU, 2), {EOT, 7})
    engine.add(Request([1], SampleConfig(max_tokens=30, **settings), bias=tuple(bias.items())))
    updates = list(engine.run())
    ids = updates[-1].best[0].ids if "beam" in settings else [token.id for each in updates for token in each.tokens]
    assert ids == written


def test_show_says_what_begins_and_ends_a_text(folders: dict[str, Path], both: Both, gpt: Gpt) -> None:
    ours, folder = both("mistral")[0], folders["mistral"]
    shown = json.loads(gpt("tokenizer", "show", folder, "--json").out)
    assert (shown["bos"], shown["ends"], shown["pattern"]) == (ours.bos, sorted(ours.ends), "")
    assert "tokenizers library" in gpt("tokenizer", "show", folder).out
    assert "tiktoken" in gpt("tokenizer", "show", folders["gpt2"]).out
    encoded = json.loads(gpt("tokenizer", "encode", "it's é☃", "--tokenizer", folder, "--json").out)
    assert encoded["tokens"] == ours.encode("it's é☃").tolist()
    assert len(encoded["pieces"]) == len(encoded["tokens"])


# What is refused


def test_sentencepiece_alone_is_refused_with_what_to_do(gpt: Gpt, workdir: Path) -> None:
    Path("folder").mkdir()
    Path("folder/tokenizer.model").write_bytes(b"\n")
    done = gpt("tokenizer", "show", "folder")
    one_line_of_what_and_what_next(done, "has only a tokenizer.model")
    assert "save_pretrained" in done.err


def test_the_older_pair_of_another_family_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    model = json.loads((folders["gpt2"] / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"] | {"<|endoftext|>": 900}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    assert tokenizer_files.find_tokenizer(str(tmp_path)).eot == 900
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(UserError, match="do not specify how Qwen2Tokenizer splits text into words"):
        tokenizer_files.find_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}, "a value has the wrong type"),
        ({"model": {"type": "BPE"}}, "is not a tokenizers file: 'vocab' is missing"),
        ({"decoder": {"type": "Replace", "pattern": {"Regex": "a"}, "content": ""}}, "decoder .*Regex.* is not supported"),
        ({"added_tokens": [{"content": "</s>"}]}, "'id' is missing"),
        ({"added_tokens": 5}, "a value has the wrong type"),
        ({"normalizer": {"type": "Nothing"}}, "cannot read the tokenizer.json"),
    ],
)  # fmt: skip
def test_forged_files(change: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["llama2"], tmp_path / "a", **change)
    with pytest.raises(UserError, match=message):
        tokenizer_files.find_tokenizer(str(folder))


def test_a_saved_folder_whose_files_are_changed_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer_files.save_tokenizer(tokenizer_files.find_tokenizer(str(folders["llama2"])), tmp_path / "own")
    file = tmp_path / "own" / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b'"\xe2\x96\x81th"', b'"\xe2\x96\x81tz"', 1) + b" ")
    with pytest.raises(UserError, match="the fingerprint differs"):
        tokenizer_files.find_tokenizer(str(tmp_path / "own"))


# Why the tokenizers library gives the same ids for a tokenizer.json of ours


@pytest.mark.parametrize("step", [37, more(1)])
def test_both_regex_engines_know_the_same_characters(step: int) -> None:
    """Every character, or one in ``step`` above Latin, in places that tell letters, numbers, white space and contractions
    apart: some tokens tell whether a character shares a piece with the one before it."""
    characters = backends.byte_characters()
    pairs = [bytes([first, second]) for first in b"a1 !\n'" for second in range(256)]
    ranks = {token: id for id, token in enumerate([*(bytes([byte]) for byte in range(256)), *pairs])}
    vocab = {"".join(characters[byte] for byte in token): id for token, id in ranks.items()}
    theirs = HFTokenizer(models.BPE(vocab=vocab, merges=[(characters[a], characters[b]) for a, b in pairs]))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ours = ByteBPE(boundaries.GPT2_PATTERN, ranks)
    codes = {  # scripts of a thousand like characters and more are left out, and all but the first for private use
        *range(0x3400), *range(0x9FF0, 0xAC10), *range(0xD790, 0xD800), *range(0xE000, 0xE010), *range(0xF8F0, 0x12000),
        *range(0x13440, 0x14410), *range(0x16000, 0x17000), *range(0x18D00, 0x18E00), *range(0x1AFF0, 0x20000),
    }  # fmt: skip
    every = [chr(code) for at, code in enumerate(sorted(codes)) if code < 0x300 or at % step == 0]
    for form_ in ("a{}", " {}", "1{}", "'{}l"):
        for start in range(0, len(every), 10_000):
            texts = [form_.format(character) + "!" for character in every[start : start + 10_000]]
            found = ours._encoding.encode_ordinary_batch(texts, num_threads=1)
            assert found == [each.ids for each in theirs.encode_batch(texts)]


@pytest.mark.parametrize("ends", ["", "b", "e", "be"])
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer"])
def test_the_beginning_is_what_autotokenizer_puts_there(
    folders: dict[str, Path], tmp_path: Path, ends: str, kind: str
) -> None:
    """Whatever ``add_bos_token`` and ``add_eos_token`` are: absent, null, true or false."""
    from transformers import AutoTokenizer

    special = lambda word: [{"SpecialToken": {"id": word, "type_id": 0}}]
    template = json.loads((folders["llama2"] / "tokenizer.json").read_text(encoding="utf-8"))["post_processor"]
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    template["single"] = template["pair"] = special("<s>") * ("b" in ends) + text + special("</s>") * ("e" in ends)
    template["special_tokens"] = {w: {"id": w, "ids": [id], "tokens": [w]} for id, w in ((1, "<s>"), (2, "</s>"))}
    folder = changed(folders["llama2"], tmp_path / "a", post_processor=template if ends else None)
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": kind}
    for key, value in ((None, 0), ("add_eos_token", False), *(("add_bos_token", each) for each in (True, False, None))):
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, **({key: value} if key else {})}))
        expected = AutoTokenizer.from_pretrained(str(folder))("ab")["input_ids"]
        found = tokenizer_files.find_tokenizer(str(folder)).prompt("ab")
        assert [id == 1 for id in found[:2]] == [id == 1 for id in expected[:2]], (key, value)
