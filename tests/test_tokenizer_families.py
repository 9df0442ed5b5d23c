"""Tokenizers of other families, against the tokenizers library and transformers."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer

from gpt.decoding.stream import TextStream
from gpt.errors import UserError
from gpt.text import tokenizer_files
from gpt.text.backends import ByteBPE
from gpt.text.tokenizer import Tokenizer

TEXTS = [
    "", " ", "hello", "  two  spaces ", "a\r\nb\n\n\n c\t\td", "WE'LL SEE, it's we'Ve", "1234567 12 ٣² Ⅷ 3.14", "日本語 한국어 עברית",
    "🐕‍🦺 👩‍👩‍👧", "e\u0301 A\u030a \u1100\u1161 \u212b \u2126", "\u00a0\u2003 \u3000x", "\x00\x1f\ufffd", "   7", "x   7  y", "▁under▁", "<0x41>",
    "don't\u2019s", "ſ'ſ ß", "\U0001f9ff\U00011de0 \u0378", "(a)[b]{c}", "end \n", "\n 5", "'s 'S 'T",
]  # fmt: skip
ANY = st.one_of(
    st.text(max_size=40), st.text(st.sampled_from(" \n\r\t'sStTlL12.-!é\u0301\u1100\u1161日▁<>\u00a0"), max_size=30)
)

Both = Callable[[str], tuple[Tokenizer, HFTokenizer]]


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
def test_tiktoken_runs_what_it_runs_alike(form: str, both: Both) -> None:
    assert isinstance(both(form)[0].backend, ByteBPE) == (form in vocabularies.TIKTOKEN)


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
    stream = TextStream(ours)
    whole = "".join(map(stream.push, ids)) + stream.flush()
    assert whole == ours.decode(ids)
    decoded = theirs.decode(ids, skip_special_tokens=False)
    assert whole in (decoded, f" {decoded}")  # the library takes the space before a whole text away
    if form in ("gpt2", "llama3", "smollm2"):
        assert whole == text


@pytest.mark.parametrize("form", ["llama2", "mistral"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20).filter(lambda text: "▁" not in text and not text.startswith(" ")))
def test_a_text_that_continues_gets_no_space(form: str, text: str, both: Both) -> None:
    ours = both(form)[0]
    assert ours.decode(ours.encode(text, continues=True).tolist()) == text
    assert ours.document_bytes(ours.document(text).tolist()).decode() == text


@every_form
def test_what_begins_and_ends_a_text(form: str, both: Both) -> None:
    ours, _ = both(form)
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
    config = tmp_path / "a" / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": [im_end, end]}))
    found = tokenizer_files.find_tokenizer(str(tmp_path / "a"))
    assert (found.ends, found.eot) == ({im_end, end}, end)
    for bad, message in (
        ([-1], "which is no id"),
        ("x", "which is no id"),
        (5, "none of its special tokens"),
        ([end, 4096], "no token 4096"),
    ):
        config.write_text(json.dumps({"eos_token_id": bad}))
        with pytest.raises(UserError, match=message):
            tokenizer_files.find_tokenizer(str(tmp_path / "a"))


@every_form
def test_saved_again_they_are_what_they_were(form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    first = tokenizer_files.find_tokenizer(str(folders[form]))
    tokenizer_files.save_tokenizer(first, tmp_path / "own")
    found = tokenizer_files.find_tokenizer(str(tmp_path / "own"))
    assert found == first
    assert found.fingerprint == first.fingerprint
    shutil.copy(folders[form] / "config.json", tmp_path / "own")
    before, after = (transformers.AutoTokenizer.from_pretrained(each) for each in (folders[form], tmp_path / "own"))
    assert before.get_vocab() == after.get_vocab()
    assert before.special_tokens_map == after.special_tokens_map
    assert [before(text).input_ids for text in TEXTS] == [after(text).input_ids for text in TEXTS]
    if first.chat_template:
        chat = [{"role": "user", "content": "hi"}]
        texts = [each.apply_chat_template(chat, tokenize=False) for each in (before, after)]
        assert texts[0] == texts[1] == "<|im_start|>hi<|im_end|>"


@every_form
def test_they_travel_to_other_processes(form: str, both: Both) -> None:
    ours = both(form)[0]
    ours.encode("warm")
    again = pickle.loads(pickle.dumps(ours.backend))
    assert set(again.__dict__) <= {"pattern", "ranks", "nfc", "data"}
    assert [again.encode(text, {}, False, False)[0].tolist() for text in TEXTS] == [
        ours.backend.encode(text, {}, False, False)[0].tolist() for text in TEXTS
    ]


def test_chat_template_in_a_file_of_its_own(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["llama2"], tmp_path / "a")
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    found = tokenizer_files.find_tokenizer(str(tmp_path / "a"))
    assert found.chat_template == "{{ messages }}"
    assert tokenizer_files.tokenizer_files(found)["chat_template.jinja"] == b"{{ messages }}"
