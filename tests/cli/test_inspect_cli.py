"""``gpt inspect``."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import Gpt, one_line_of_what_and_what_next, slow

import gpt as library
from gpt.insight import inspect

PROMPT = "the cat sat on the mat while the cat"


def test_attention_json_contains_the_models_values(gpt: Gpt, run_folder: Path) -> None:
    values = json.loads(gpt("inspect", "attention", PROMPT, "-m", run_folder, "--json").out)
    model = library.load(run_folder, dtype="float32")
    ids = model.tokenizer.encode(PROMPT).tolist()
    traced = inspect.trace(model.model, ids)
    assert values["tokens"] == ids
    assert "".join(values["pieces"]) == PROMPT
    assert np.abs(np.array(values["patterns"]) - traced.patterns).max() < 1e-6
    assert values["prompt"] == PROMPT
    assert values["dropped"] == 0
    output = traced.logits[-1].softmax(-1)
    for entry in (values["next"][0], values["next"][-1]):
        assert entry["probability"] == pytest.approx(float(output[entry["token"]]), abs=1e-6)
    assert values["lens"][-1][-1][0]["token"] == values["next"][0]["token"] == int(output.argmax())
    assert [(entry["layer"], entry["head"]) for entry in values["scores"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    expected = traced.patterns[1, 0][np.arange(2, len(ids)), np.arange(1, len(ids) - 1)].mean()
    assert values["scores"][2]["prompt"]["previous"] == pytest.approx(float(expected), abs=1e-5)


def test_terminal_output_of_attention_matches_the_json(gpt: Gpt, run_folder: Path) -> None:
    result = gpt("inspect", "attention", PROMPT, "-m", run_folder, "--layer", "1", "--head", "0")
    assert "layer 1, head 0" in result.out
    values = json.loads(gpt("inspect", "attention", PROMPT, "-m", run_folder, "--json").out)
    rows = re.findall(r"^ *\S+ ((?:[.\d] )+) *$", result.out, re.MULTILINE)
    assert len(rows) == len(values["tokens"])
    for row, shares in zip(rows, values["patterns"][1][0], strict=True):
        tenths = [0 if mark == "." else int(mark) for mark in row.split()]
        assert len(tenths) == sum(share > 0 for share in shares)
        assert all(abs(tenth - 10 * share) <= 1 for tenth, share in zip(tenths, shares, strict=False))
    assert f"{100 * values['next'][0]['probability']:.2f} %" in result.out
    assert "what heads mostly attend to" in gpt("inspect", "attention", PROMPT, "-m", run_folder).out


def test_attention_truncates_a_long_prompt(gpt: Gpt, run_folder: Path) -> None:
    result = gpt("inspect", "attention", PROMPT * 9, "-m", run_folder, "--json")
    values = json.loads(result.out)
    assert len(values["tokens"]) == 32
    assert re.search(r"the prompt has \d+ tokens; showing the last 32, which fit the context", result.err)
    prompt_ids = library.load(run_folder).tokenizer.encode(PROMPT * 9).tolist()
    assert values["tokens"] == prompt_ids[-32:]
    assert values["dropped"] == len(prompt_ids) - 32


def test_attention_command_accepts_files_and_single_tokens(gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    Path("p.txt").write_text("z")
    values = json.loads(gpt("inspect", "attention", "--prompt-file", "p.txt", "-m", run_folder, "--json").out)
    assert values["patterns"] == [[[[1.0]]] * 2] * 2
    assert values["scores"][0]["prompt"]["previous"] is None
    result = gpt("inspect", "attention", "--prompt-file", "-", "-m", run_folder, "-o", "a.html", stdin=b"the cat")
    assert result.code == 0
    assert re.fullmatch(r"saved  a\.html  \([\d,]+ bytes\)\n", result.out)


def test_neighbors_command_matches_the_library(gpt: Gpt, run_folder: Path) -> None:
    result = gpt("inspect", "neighbors", "cat", "raining", "-k", "4", "-m", run_folder, "--json")
    values = json.loads(result.out)
    model = library.load(run_folder)
    table = inspect.Embeddings(model.model, model.tokenizer)
    for word, values_of_word in zip(("cat", "raining"), values["words"], strict=True):
        neighbors = table.neighbors(table.find(word), 4)
        assert [entry["token"] for entry in values_of_word["neighbors"]] == [neighbor.id for neighbor in neighbors]
        assert [entry["cosine"] for entry in values_of_word["neighbors"]] == pytest.approx(
            [neighbor.cosine for neighbor in neighbors], abs=1e-5
        )
    text = gpt("inspect", "neighbors", "zzzqx", "-m", run_folder).out
    assert re.search(r'"zzzqx" is \d tokens, represented by their mean: ', text)


def test_encode_command_shows_the_tokenizers_tokens(gpt: Gpt, run_folder: Path) -> None:
    values = json.loads(gpt("tokenizer", "encode", "Zürich\n\x00 cat", "--show", "-m", run_folder, "--json").out)
    tokenizer = library.load(run_folder).tokenizer
    assert tokenizer.decode(values["tokens"]) == "Zürich\n\x00 cat"
    assert values["bytes"] == 13
    assert "\\x00" in "".join(values["pieces"])
    result = gpt("tokenizer", "encode", "--show", "a cat", "-m", run_folder)
    pieces = [tokenizer.decode([id]) for id in tokenizer.encode("a cat").tolist()]
    assert result.out.splitlines()[0] == "|".join(pieces)


@pytest.mark.parametrize(
    "args",
    [
        slow(["inspect", "attention", PROMPT]), slow(["inspect", "attention", PROMPT, "--layer", "0", "--head", "1"]),
        ["inspect", "neighbors", "cat", "mat"], ["tokenizer", "encode", "--show", PROMPT + "\n🐕 <b>"],
    ],
    ids=lambda args: " ".join(args)[:28],
)  # fmt: skip
def test_page_is_self_contained(gpt: Gpt, run_folder: Path, workdir: Path, args: list[str]) -> None:
    result = gpt(*args, "-m", run_folder, "-o", "out.html")
    assert result.out.startswith("saved  out.html"), result.err
    page = Path("out.html").read_text(encoding="utf-8")
    external_reference = r"(src|href)\s*=|url\(|@import|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org/2000/svg)"
    assert re.search(external_reference, page) is None
    assert page.count("<script") == page.count("</script") == 2  # Data and program


def test_invalid_inspect_arguments_are_errors(gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    def assert_error(message: str, *args: str | Path) -> None:
        one_line_of_what_and_what_next(gpt("inspect", *args, "-m", run_folder), message)

    assert_error("there is no layer 2", "attention", "x", "--layer", "2")
    assert_error("there is no head 2", "attention", "x", "--head", "2")
    assert_error("there is no prompt to look at", "attention")
    assert_error("a prompt and --prompt-file were both given", "attention", "x", "--prompt-file", "y")
    assert_error("a word is empty", "neighbors", "")
    assert_error("Input should be greater than or equal to 1", "neighbors", "cat", "-k", "0")
    assert_error("there is no folder", "neighbors", "cat", "-o", "none/x.html")
    assert_error("is not the name of a page", "neighbors", "cat", "-o", "x.png")
    Path("x.html").mkdir()
    assert_error("x.html is a folder", "neighbors", "cat", "-o", "x.html")
    encode = ("tokenizer", "encode", "--show")
    one_line_of_what_and_what_next(gpt(*encode, "-m", run_folder), "there is nothing to encode")
    one_line_of_what_and_what_next(gpt(*encode, "x", "-m", "nowhere"), "there is no run or checkpoint")


def test_oversized_page_is_an_error(gpt: Gpt, run_folder: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpt_cli.show import json_inspect

    monkeypatch.setattr(json_inspect, "MAX_PAGE_BYTES", 100)
    result = gpt("inspect", "attention", PROMPT, "-m", run_folder, "-o", "a.html")
    one_line_of_what_and_what_next(result, "the page would contain")
    assert result.err.endswith("a single --layer, or --json\n")
    assert not Path("a.html").exists()


def test_words_that_are_not_utf8_are_an_error(gpt: Gpt, run_folder: Path) -> None:
    result = gpt("inspect", "neighbors", "\udcff", "-m", run_folder)
    assert (result.code, result.err.splitlines()[0]) == (2, "error: a word is not UTF-8")
