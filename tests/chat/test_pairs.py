"""Training on pairs of prompt and completion."""

import csv
import gzip
import json
import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vocabularies
from conftest import TINY, Gpt, assert_same, losses, more, one_line_of_what_and_what_next, slow
from transformers import AutoTokenizer

import gpt as library
from gpt.chat.examples import Conversation, Pair, kind_of, read_examples, split
from gpt.config.sample import SampleConfig
from gpt.config.text import TextConfig
from gpt.model.loss import IGNORED
from gpt.system.errors import UserError
from gpt.tokenizers.finding import find_tokenizer
from gpt.tokenizers.tokenizer import bytes_tokenizer
from gpt.training import evaluation
from gpt.training.example_rows import ExampleRows, PairEncoder, RowBatches

VERBS = ["love ama", "see vede", "hear sente", "call chiama", "find trova", "know conosce", "help aiuta", "want vuole"]
OBJECTS = ["you ti", "him lo", "her la", "them li", "us ci", "me mi", "it lo", "all tutti"]
TRANSLATIONS = [
    {"prompt": f"{verb.split()[0]} {who.split()[0]} =>", "completion": f" {who.split()[1]} {verb.split()[1]}"}
    for verb in VERBS
    for who in OBJECTS
]
PAIRS = [{"prompt": "I love you =>", "completion": " ti amo"}, *TRANSLATIONS]
EOT = 256
SMALL = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--block-size", "64", "--dtype", "float32"]


def jsonl(pairs: list[Any]) -> str:
    return "".join(json.dumps(pair) + "\n" for pair in pairs)


@pytest.fixture
def file(workdir: Path) -> Path:
    path = workdir / "pairs.jsonl"
    path.write_text(jsonl(PAIRS))
    return path


def test_training_on_pairs_prints_counts_and_next_command(gpt: Gpt, file: Path) -> None:
    result = gpt("train", file, "--pairs", "--steps", "4", *SMALL)
    assert result.code == 0, result.err
    assert "59 pairs to train on, 6 held out" in result.err  # A tenth of the 65 pairs is held out.
    assert "gpt sample 'want her =>' --greedy -m" in result.out  # The first held-out prompt
    record = json.loads(Path("runs/pairs/run.json").read_text())
    assert record["sources"][0]["documents"] == 65
    assert not Path("runs/pairs/tokens").exists()


def test_pairs_are_inferred_from_the_keys(gpt: Gpt, file: Path) -> None:
    options = ["--steps", "2", *SMALL, "--sample-every", "0"]
    assert gpt("train", file, "--pairs", *options, "-o", "asked").code == 0
    result = gpt("train", file, *options, "-o", "inferred")
    assert result.code == 0, result.err
    line = f"{file}: every record is a pair: assuming --pairs (--field KEY reads text instead)"
    assert result.err.splitlines().count(line) == 1
    assert json.loads(Path("inferred/run.json").read_text())["settings"]["pairs"] is True
    assert_same(Path("asked"), Path("inferred"))
    result = gpt("train", file, "--field", "prompt", *options, "-o", "text")
    assert (result.code, "assuming" in result.err) == (0, False), result.err
    assert Path("text/tokens").exists()


def test_kind_of_records_is_inferred(workdir: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    chats = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 3
    texts = [{"text": "a"}, {"text": "b"}]
    for name, records in {"pairs": TRANSLATIONS, "chats": chats, "texts": texts}.items():
        for extension in ("jsonl", "txt"):
            Path(f"{name}.{extension}").write_text(jsonl(records))
            Path(f"{name}.{extension}.gz").write_bytes(gzip.compress(jsonl(records).encode()))
        Path(f"{name}.json").write_text(json.dumps(records))
        parquet.write_table(pa.Table.from_pylist(records), f"{name}.parquet")
    Path("pairs.csv").write_text("completion,prompt\nb,a\n")
    Path("folder").mkdir()
    for name in ("pairs.jsonl", "pairs.json"):
        shutil.copy(name, "folder")
    Path("more.jsonl").write_text(jsonl([{"id": 1, **pair} for pair in TRANSLATIONS]))
    Path("late.jsonl").write_text(jsonl([*TRANSLATIONS, {"text": "a"}]))
    Path("bad.jsonl").write_text(jsonl(TRANSLATIONS) + "{")
    Path("empty.jsonl").touch()
    Path("objects.json").write_text("{}")

    def infer_kind(*names: str) -> Any:
        return kind_of(names, TextConfig(skip_bad=True))

    for names in (
        ["pairs.jsonl"], ["pairs.jsonl.gz"], ["pairs.json"], ["pairs.parquet"], ["pairs.csv"], ["folder"],
        ["pairs.jsonl", "folder"], ["pairs.json*"],
    ):  # fmt: skip
        assert infer_kind(*names) is Pair, names
    for name in ("chats.jsonl", "chats.jsonl.gz", "chats.json", "chats.parquet"):
        assert infer_kind(name) is Conversation, name
    for names in (
        ["texts.jsonl"], ["texts.json"], ["pairs.txt"], ["pairs.txt.gz"], ["chats.txt"], ["more.jsonl"], ["late.jsonl"],
        ["bad.jsonl"], ["empty.jsonl"], ["objects.json"], ["pairs.jsonl", "chats.jsonl"], ["pairs.jsonl", "pairs.txt"],
        ["nowhere.jsonl"], ["pairs.jsonl", "-"], ["pydocs"], ["http://127.0.0.1:9/pairs.jsonl"], [],
    ):  # fmt: skip
        assert infer_kind(*names) is None, names


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="they have no names that are not UTF-8")
def test_file_names_need_not_be_utf8(file: Path) -> None:
    file.rename("\udce9.jsonl")
    examples = read_examples(["\udce9.jsonl"], TextConfig(val_fraction=0), Pair)
    assert len(examples.train) == len(PAIRS)


def test_held_out_loss_counts_only_completions(file: Path) -> None:
    """The expected loss comes from the checkpoint's logits."""
    settings: dict[str, Any] = {**TINY, "block_size": 64, "pairs": True, "steps": 6, "dtype": "float32"}
    result = library.train(file, **settings)
    model = library.load(result.run)
    total, count, size = 0.0, 0, 0
    for pair in PAIRS[-6:]:
        prompt = model.tokenizer.encode(pair["prompt"]).tolist()
        completion = [*model.tokenizer.encode(pair["completion"]).tolist(), model.tokenizer.eot]
        with torch.no_grad():
            logprobs = model.model(torch.tensor([prompt + completion[:-1]]))[0].log_softmax(-1)
        total -= sum(float(logprobs[len(prompt) - 1 + at, id]) for at, id in enumerate(completion))
        count += len(completion)
        size += len(pair["completion"].encode())
    assert result.val_loss == pytest.approx(total / count, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(total / np.log(2) / size, rel=1e-5)


def encode_pairs(*pairs: tuple[str, str]) -> ExampleRows:
    encoder = PairEncoder(bytes_tokenizer(), 64, skip_bad=False)
    return encoder.encode([Pair(*pair, f"line {number}") for number, pair in enumerate(pairs)])


def test_only_completions_are_targets() -> None:
    pairs = encode_pairs(("ab", "cde"), ("", "x"), ("pqr", ""))
    x, y = RowBatches(pairs, 3, seed=1).global_batch(0)
    assert x.shape == y.shape == (3, 5)
    targets = {chr(row[0] % EOT): target.tolist() for row, target in zip(x, y, strict=True)}
    assert targets == {
        "a": [IGNORED, *b"cde", EOT],
        "\0": [ord("x"), EOT, *[IGNORED] * 3],  # End-of-text comes before an empty prompt.
        "p": [IGNORED, IGNORED, EOT, IGNORED, IGNORED],
    }
    assert pairs.targets == 4 + 2 + 1 == int((y != IGNORED).sum())


def test_batches_depend_only_on_seed_and_step() -> None:
    pairs = encode_pairs(*((f"p{number}", "c" * (number % 3)) for number in range(10)))
    batches = RowBatches(pairs, 4, seed=3)
    steps = [batches.global_batch(step) for step in range(5)]
    first_ids = [row[1] for x, _ in steps for row in x.tolist()]
    assert sorted(first_ids) == sorted(2 * [ord(str(number)) for number in range(10)])
    assert len(set(first_ids[:8])) == len(set(first_ids[12:])) == 8
    assert first_ids[:8] != first_ids[12:]
    for _, y in steps:
        counts = (y != IGNORED).sum(1).tolist()
        assert counts == sorted(counts, reverse=True)
    full_batch = batches.global_batch(2)
    for rank in range(2):
        for half, full in zip(batches.global_batch(2, rank, 2), full_batch, strict=True):
            assert np.array_equal(half, full[rank::2, : half.shape[1]])


def test_gradient_accumulation_weighs_targets_equally(file: Path) -> None:
    """Micro-batches differ in their number of targets."""

    def train_losses(micro_batch: str) -> tuple[Any, list[float]]:
        settings = {**TINY, "batch_tokens": 150, "pairs": True, "steps": 6, "dtype": "float32", "tokenizer": "bytes"}
        event_log: list[Any] = []
        result = library.train(file, micro_batch=micro_batch, listen=event_log.append, **settings)
        return json.loads((result.run / "run.json").read_text())["resolved"]["rows"], losses(event_log)

    rows, one_by_one = train_losses("1")
    assert rows > 1
    assert one_by_one == pytest.approx(train_losses(str(rows))[1], rel=1e-4)


def test_pairs_are_read_from_compressed_and_text_files(workdir: Path) -> None:
    Path("a.jsonl.gz").write_bytes(gzip.compress(jsonl(TRANSLATIONS[:5]).encode()))
    Path("b.txt").write_text("\n" + jsonl(TRANSLATIONS[5:9]) + "\n")
    examples = read_examples(["a.jsonl.gz", "b.txt"], TextConfig(val_fraction=0), Pair)
    assert [(pair.prompt, pair.completion) for pair in examples.train] == [tuple(p.values()) for p in TRANSLATIONS[:9]]
    assert examples.train[5].where == "b.txt, line 2"
    Path("bad.jsonl").write_text(jsonl([TRANSLATIONS[0], {"prompt": "x"}, TRANSLATIONS[1]]))
    examples = read_examples(["bad.jsonl"], TextConfig(val_fraction=0, skip_bad=True), Pair)
    assert (len(examples.train), examples.skipped) == (2, 1)


def test_pairs_are_read_from_tables_and_json(workdir: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    quoted = [{"prompt": pair["prompt"], "completion": f'{pair["completion"]}, "è"'} for pair in TRANSLATIONS[:9]]
    Path("a.json").write_text(json.dumps({"data": quoted}, indent=2))
    with Path("c.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["completion", "prompt"])
        writer.writeheader()
        writer.writerows(quoted)
    parquet.write_table(pa.Table.from_pylist([*quoted, {"prompt": "x", "completion": None}]), "d.parquet")
    for name, position in {"a.json": "record 1", "c.csv": "line 2", "d.parquet": "row 1"}.items():
        examples = read_examples([name], TextConfig(val_fraction=0, skip_bad=True), Pair)
        assert [{"prompt": pair.prompt, "completion": pair.completion} for pair in examples.train] == quoted
        assert (examples.train[0].where, examples.skipped) == (f"{name}, {position}", name == "d.parquet")


def test_pairs_are_split_by_hash_or_at_the_end() -> None:
    few_pairs = [Pair(str(number), "", "") for number in range(20)]
    assert split(few_pairs, 0.1, 1) == (few_pairs[:18], few_pairs[18:])
    assert split(few_pairs, 0.01, 1) == (few_pairs[:19], few_pairs[19:])
    assert split(few_pairs, 0, 1) == (few_pairs, [])
    many_pairs = [Pair(str(number), "", "") for number in range(1000)]
    train, held_out = split(many_pairs, 0.1, 1)
    assert 60 < len(held_out) < 140
    assert sorted([*train, *held_out], key=lambda pair: int(pair.prompt)) == many_pairs
    assert set(held_out) <= set(split([*many_pairs, *few_pairs], 0.1, 1)[1])  # Added pairs don't move the others.
    assert split(many_pairs, 0.1, 2)[1] != held_out
    assert len(split(many_pairs, 1e-9, 1)[1]) == 1
    with pytest.raises(UserError, match="too few pairs"):
        split(few_pairs[:1], 0.1, 1)
    with pytest.raises(UserError, match="all 300 pairs are equal, so none can be held out"):
        split(few_pairs[:1] * 300, 0.1, 1)
    assert [len(side) for side in split(few_pairs[:2] * 150, 0.99, 1)] == [150, 150]


def test_held_out_pairs_can_come_from_another_file(file: Path) -> None:
    Path("val.jsonl").write_text(jsonl(TRANSLATIONS[:3]))
    examples = read_examples([str(file)], TextConfig(val_text="val.jsonl"), Pair)
    assert (len(examples.train), len(examples.held_out)) == (65, 3)


FILES = {
    "--pairs": [jsonl([pair]) for pair in TRANSLATIONS[:2]],
    "--chat": [
        jsonl([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]}])
        for answer in ("b", "c")
    ],
    "--split-on=-": ["one two three\n" * 9, "four five six\n" * 9],
}


@pytest.mark.parametrize("option", FILES)
@pytest.mark.parametrize("val_text", ["data/val", "link", "data/v*", "subfolder"])
def test_held_out_files_are_not_trained_on(gpt: Gpt, workdir: Path, option: str, val_text: str) -> None:
    options = [option, "--steps", "1", "--tokenizer", "bytes", "--sample-every", "0", "-o", "run", *SMALL]
    suffix = ".txt" if option == "--split-on=-" else ".jsonl"
    for name, text in zip(("train", "val"), FILES[option], strict=True):
        Path(f"data/{name}{suffix}").parent.mkdir(exist_ok=True)
        Path(f"data/{name}{suffix}").write_text(text)
    held_out, link = Path(f"data/val{suffix}"), Path(f"link{suffix}")
    link.symlink_to(held_out)
    Path("subfolder").mkdir()
    Path(f"subfolder/x{suffix}").symlink_to(Path("..") / held_out)
    names = {"data/val": held_out, "link": link}
    result = gpt("train", "data", "--val-text", names.get(val_text, val_text), *options)
    assert result.code == 0, result.err
    assert "1 file of --val-text is also in TEXT: held out, not trained on" in result.err
    sources = json.loads(Path("run/run.json").read_text())["sources"]
    assert (Path(sources[0]["name"]).stem, sources[0]["documents"]) == ("train", 1)
    assert len(sources) == 2
    result = gpt("train", held_out, "--val-text", link, *options)
    one_line_of_what_and_what_next(result, "all of the text is in --val-text, so nothing is left to train on")


@pytest.mark.parametrize("option", FILES)
def test_empty_held_out_text_is_an_error(gpt: Gpt, workdir: Path, option: str) -> None:
    suffix = ".txt" if option == "--split-on=-" else ".jsonl"
    Path(f"train{suffix}").write_text(FILES[option][0])
    Path(f"empty{suffix}").touch()
    result = gpt("train", f"train{suffix}", "--val-text", f"empty{suffix}", option)
    one_line_of_what_and_what_next(result, f"empty{suffix} is empty: 0")
    assert not Path("runs").exists()


def test_copies_of_held_out_pairs_are_named(gpt: Gpt, file: Path) -> None:
    Path("val.jsonl.gz").write_bytes(gzip.compress((jsonl(TRANSLATIONS[:3]) + "{\n").encode()))
    options = ["--pairs", "--val-text", "val.jsonl.gz", "--skip-bad", "--steps", "1", "--sample-every", "0", *SMALL]
    result = gpt("train", file, *options)
    assert result.code == 0, result.err
    assert "skipped: val.jsonl.gz, line 4: not JSON" in result.err
    places = ", ".join(f"val.jsonl.gz, line {number}" for number in (1, 2, 3))
    assert f"3 pairs copy earlier ones: {places}\n" in result.err


def test_special_tokens_of_a_completion_are_single_ids(tmp_path: Path) -> None:
    tokenizer = find_tokenizer(str(vocabularies.write("qwen", tmp_path / "qwen")))
    reference = AutoTokenizer.from_pretrained(tmp_path / "qwen")
    encoder = PairEncoder(replace(tokenizer, more_ends=frozenset([tokenizer.all_specials["<|im_end|>"]])), 64, False)
    for word in ("<|im_start|>", "<|im_end|>"):
        (row,) = encoder.rows(Pair("<|im_start|>a", f"é 3{word}", ""))
        expected = reference("<|im_start|>a")["input_ids"] + reference(f"é 3{word}")["input_ids"]
        end = [tokenizer.eot] if word == "<|im_start|>" else []  # One end is enough.
        assert row.ids.tolist() == expected + end
        assert row.bytes == len("é 3".encode())
    plain = encode_pairs(("a", "<|endoftext|>"))[0]
    assert plain.ids.tolist() == [*b"a<|endoftext|>", EOT]


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model trained on shuffled words of the pairs."""
    folder, rng = tmp_path_factory.mktemp("base"), random.Random(0)
    words = sorted({word for pair in PAIRS for text in pair.values() for word in text.split()})
    text = "".join(rng.choice(words) + rng.choice("   \n") for _ in range(4000))
    (folder / "text.txt").write_text(text)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "batch_tokens": 512}
    return library.train(
        folder / "text.txt", out=folder / "run", steps=60, dtype="float32", vocab_size=300, sample_every=0,
        weight_decay=0.1, **shape,
    ).run  # fmt: skip


# With the default learning rate, adapters answer 2 to 37 of the 40 pairs correctly, depending on rounding and seed.
# With this learning rate, they answer 39 or 40. Untrained adapters answer none. When the base model had a weight decay
# of 0.25, the trained adapters of one seed of three answered none either.
@pytest.mark.parametrize(
    ("options", "minimum"), [slow([], 38), more(["--lora-rank", "8", "--lr", "0.004", "--epochs", "40"], 36)]
)
def test_trained_model_completes_its_pairs(
    gpt: Gpt, base_model: Path, file: Path, options: list[str], minimum: int
) -> None:
    pairs = PAIRS[:40]
    file.write_text(jsonl(pairs))
    result = gpt("train", file, "--pairs", "--val-fraction", "0", "--init", base_model, *options, "--dtype", "float32")
    assert result.code == 0, result.err
    score = re.search(r"answered exactly \(greedy\): (\d+) of 40$", result.out, re.MULTILINE)
    assert score is not None
    assert int(score[1]) >= minimum
    config = SampleConfig(greedy=True, max_tokens=20)
    pieces = library.load("runs/pairs").write_all([pair["prompt"] for pair in pairs], config)
    answers = [(piece.sample.text, piece.sample.finish_reason) for piece in pieces if piece.sample is not None]
    assert sum(answer == (p["completion"], "eot") for answer, p in zip(answers, pairs, strict=True)) == int(score[1])


def test_answers_are_checked_on_samples_of_training_and_held_out_pairs(
    gpt: Gpt, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "MAX_CHECKED_PAIRS", 10)
    result = gpt("train", file, "--pairs", "--steps", "2", *SMALL, "--json")
    assert "answers" not in result.out
    recorded = json.loads(Path("runs/pairs/run.json").read_text())["result"]
    counts = [[recorded[side][key] for key in ("asked", "pairs")] for side in ("answers", "held_out_answers")]
    assert counts == [[10, 59], [6, 6]]
    resumed = gpt("train", "--resume", "runs/pairs")
    assert "answered exactly (greedy): 0 of 10 (of 59) trained on, 0 of 6 held out" in resumed.out


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a"}], [], 'pairs.jsonl, line 2: it has no "completion"; its keys: prompt'),
        ([{"prompt": "\ud800", "completion": "b"}], [], "pairs.jsonl, line 1: an unpaired surrogate is not a character"),
        ([], [], "pairs.jsonl is empty: 0 pairs"),
        ([{"prompt": "a", "completion": "b"}], [], "too few pairs to hold out 0.1 of them: 1"),
        ([{"prompt": "a" * 80, "completion": "b" * 60}] * 3, ["--tokenizer", "bytes"], "line 1: the pair has 140 tokens, but the context holds 128"),
    ],
)  # fmt: skip
def test_invalid_pairs_are_one_error_line(
    gpt: Gpt, workdir: Path, lines: list[Any], options: list[str], message: str
) -> None:
    Path("pairs.jsonl").write_text(jsonl(lines))
    one_line_of_what_and_what_next(gpt("train", "pairs.jsonl", "--pairs", *options), message)
    assert not Path("runs").exists()


def test_pairs_need_a_text_that_is_not_tokenized(gpt: Gpt, file: Path) -> None:
    one_line_of_what_and_what_next(gpt("train", "--pairs"), "--pairs needs a TEXT")
    assert gpt("tokenize", file, "--field", "prompt", "-o", "tokens", "--tokenizer", "bytes", "--quiet").code == 0
    one_line_of_what_and_what_next(gpt("train", "tokens", "--pairs"), "tokens is tokenized")
