"""`gpt export`: the folder, its model card, what is refused, and what is left where it ends early."""

import errno
import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from conftest import FAST, Gpt, make_text, one_line_of_what_and_what_next, send, train
from transformers import AutoModelForCausalLM, AutoTokenizer

import gpt as library
from gpt import api, events
from gpt.config import GPTConfig
from gpt.errors import Interrupted, WorkError
from gpt.evaluate import Evaluation
from gpt.export_config import ExportConfig
from gpt.exporting import card as cards
from gpt.exporting import provenance
from gpt.exporting.card import Comparison, Facts, card
from gpt.exporting.provenance import Ancestor, Provenance, Text, read_provenance, texts_of
from gpt.exporting.source import SourceModel
from gpt.model.params import breakdown
from gpt.runs import checkpoint, folder
from gpt.text.tokenizer import bytes_tokenizer

KEYS = {"out", "format", "type", "arch", "bytes", "tensors", "vocab_size", "loss_before", "loss_after", "seconds"}
DTYPES = ["float32", "bfloat16", "float16", "int8", "int4"]


@pytest.fixture
def chapter(workdir: Path) -> Path:
    """A text to measure on."""
    path = workdir / "chapter.txt"
    path.write_bytes(make_text(300, seed=1).encode())
    return path


def front(path: Path) -> dict[str, Any]:
    """The YAML of a folder's card."""
    text = (path / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\n")
    return dict(yaml.safe_load(text.split("---\n")[1]))


def read_card(path: Path) -> str:
    return (path / "README.md").read_text(encoding="utf-8")


def meta(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "gpt.json").read_text(encoding="utf-8")))


def a_source(config: GPTConfig | None = None, **changes: Any) -> SourceModel:
    return SourceModel(Path(), config or GPTConfig(257, 32, 2, 2, 32), bytes_tokenizer(), {}, **changes)


# The card


def test_the_card_of_a_run(run_folder: Path, chapter: Path) -> None:
    library.export(run_folder, "out", license="Apache-2.0", eval=str(chapter))
    said = huggingface_hub.ModelCard.load("out/README.md").data
    assert (said.license, said.library_name, said.pipeline_tag, said.tags) == (
        "apache-2.0", "transformers", "text-generation", ["gpt", "gpt2"],
    )  # fmt: skip
    text = read_card(Path("out"))
    record = json.loads((run_folder / "run.json").read_text())
    (source,) = record["sources"]
    config = checkpoint.peek(Path("out"))[0]
    for part in (
        f"| `text.txt` | 1 | {source['bytes']:,} | `{source['sha256']}` |",
        f"| parameters | {breakdown(config).trainable:,} |",
        f"| context | {config.block_size} tokens |",
        f"Trained for 30 steps, 7,680 tokens in all, on {record['tokens']['train']:,} tokens of text.",
        f"| `lr` | {record['resolved']['lr']:g} |",
        f"| `optimizer` | `{record['resolved']['optimizer']}` |",
        f"{record['result']['val_loss']:.4f} nats per token, {record['result']['bits_per_byte']:.4f} bits per byte.",
        "of `chapter.txt` (sha256 `",
        'gpt sample "Once upon" -m out',
        'AutoModelForCausalLM.from_pretrained("out")',
    ):
        assert part in text, part
    assert "## Samples" not in text


def test_a_folder_without_a_run_says_that_it_does_not_know(run_folder: Path, workdir: Path) -> None:
    shutil.copytree(folder.find_checkpoint(str(run_folder)), "theirs")
    (workdir / "theirs" / "README.md").write_text('---\nlicense: "mit"  # of theirs\n---\n', encoding="utf-8")
    library.export("theirs", "out")
    text = read_card(Path("out"))
    assert "How it was trained, and on which data, is not recorded" in text
    assert "It is a copy of `theirs`." in text
    assert "`theirs` is licensed under `mit`, which covers only that model" in text
    assert front(Path("out"))["license"] == "unknown"
    assert "base_model" not in front(Path("out"))  # a name on this disk is none of the hub


@pytest.mark.parametrize(
    ("config", "dtype", "in_transformers"),
    [
        (GPTConfig(257, 32, 2, 2, 32, positions="rotary"), "float32", False),
        (GPTConfig.of("modern", 257, 32, 4, 2, 32, window=8), "float32", True),
        (GPTConfig.of("modern", 257, 32, 2, 2, 32), "int8", False),
    ],
)
def test_the_card_names_transformers_if_it_reads_the_folder(
    config: GPTConfig, dtype: str, in_transformers: bool
) -> None:
    text = card(a_source(config), Facts("it", dtype))
    assert ("AutoModelForCausalLM" in text) == in_transformers
    assert ("library_name: transformers" in text) == in_transformers
    assert ("| windows | 8 tokens in 2 of the layers |" in text) == (config.window == 8)


HOSTILE = [
    "a\nlicense: mit",
    "a: b",
    "```",
    "| x |",
    "---",
    "<script>",
    "[a](b)",
    "a\u202eb",
    "\udcff",
    "\x1b]0;a\x07`",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_or_sample_ends_what_it_stands_in(name: str) -> None:
    known = Provenance(
        [Text(name, 1, 3, "0" * 64, None)],
        3,
        {"preset": name, name: name},
        ancestors=[Ancestor(name, True, None), Ancestor(name)],
    )
    samples = [name, f"a\n````\n{name}\n```", "~~~\n# no title"]
    text = card(a_source(provenance=known), Facts(name, "float32", None, None, samples))
    said = yaml.safe_load(text.split("---\n")[1])
    assert said["license"] == "unknown"
    assert "base_model" not in said
    assert set(said) == {"license", "library_name", "pipeline_tag", "tags"}
    lines = [line for line in text.split("\n") if not line.startswith("    ")]  # samples are indented
    assert [line for line in lines if line.startswith("```")] == ["```console", "```", "```python", "```"]
    titles = [line for line in lines if line.startswith("#")]
    assert titles[1:] == [f"## {title}" for title in ("Model", "Training", "Use", "Samples", "Limits")]
    plain = re.sub(r"```.*?\n```|`[^`\n]*`", "", "\n".join(lines), flags=re.DOTALL)
    assert not re.search(r"<script>|\[a\]", plain)
    assert {line.count("|") for line in plain.split("\n") if line.startswith("|")} == {3, 5}
    text.encode()  # no half of a character
    assert not [char for char in text if not char.isprintable() and char != "\n"]


def test_samples_stand_in_the_card_only_where_they_are_asked_for(run_folder: Path) -> None:
    library.export(run_folder, "out", samples=2, dtype="int8")
    text = read_card(Path("out"))
    assert "Sample 2:" in text and "Sample 3:" not in text
    loaded = api.load("out", dtype="float32")
    for sample in loaded.generate(num=2):  # of the weights that are in the folder
        assert all(f"\n    {cards._visible(line)}\n" in text for line in sample.expandtabs(4).split("\n"))


def test_losses_of_rounded_weights_are_told_apart() -> None:
    both = [Evaluation(loss, 10, 20, 3, 8, 8) for loss in (1.5, 1.75)]
    known = Provenance([Text("a")], 5, val_loss=1.25, bits_per_byte=0.5)
    text = card(a_source(provenance=known), Facts("it", "int4", None, Comparison(Text("b", 1, 20, "1" * 64), *both)))
    assert (
        "On all held-out text: 1.2500 nats per token, 0.5000 bits per byte, before its weights were quantized." in text
    )
    assert "| before | 1.5000 | 1.0820 |" in text
    assert "| as published, in int4 | 1.7500 | 1.2624 |" in text


# Where the model is from


def test_fine_tuned_from_a_folder_with_a_license(run_folder: Path, text: Path) -> None:
    base = Path("deep/base")
    shutil.copytree(folder.find_checkpoint(str(run_folder)), base)
    (base / "README.md").write_text("---\nlicense: cc-by-4.0\nbase_model: me/first\n---\n# It\n", encoding="utf-8")
    fast = {key: FAST[key] for key in ("batch_tokens", "sample_every", "dtype")}
    for name, settings in (("tuned", {}), ("adapters", {"lora_rank": 2})):
        result = library.train(text, init=str(base), steps=2, out=f"runs/{name}", **fast, **settings)
        library.export(result.run, name, license="mit")
        said, words = front(Path(name)), read_card(Path(name))
        assert (said["license"], said["base_model"]) == ("mit", "me/first")
        assert "It is fine-tuned from `base`, made from `me/first`." in words
        assert "`base` is licensed under `cc-by-4.0`" in words
        assert ("| `lora_rank` | `2` |" in words) == (name == "adapters")
    Path("peft").mkdir()  # with what PEFT writes alone
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folder.find_checkpoint("runs/adapters") / name, "peft")
    Path("peft/README.md").write_text("---\nlicense: other\nlicense_name: mine-1.0\n---\n", encoding="utf-8")
    library.export("peft", "from-peft", dtype="int8")
    words = read_card(Path("from-peft"))
    assert "It is a copy of `peft`, made from `base`, made from `me/first`." in words
    assert "`peft` is licensed under `mine-1.0`" in words
    again = library.train(text, init="tuned", steps=2, out="runs/again", **fast)
    library.export(again.run, "third")
    assert [each.name for each in read_provenance(Path("third"), "").ancestors] == ["tuned", "base", "me/first"]
    shutil.rmtree(base)
    library.export("runs/tuned", "later")
    assert "It is fine-tuned from `base`." in read_card(Path("later"))


@pytest.mark.parametrize("said", ["---\nlicense: [a, b]\n---", "---\n: \n", "\xff", "---\nlicense: /home/me/x\n---"])
def test_a_card_of_others_that_says_no_license(tmp_path: Path, said: str) -> None:
    (tmp_path / "README.md").write_bytes(said.encode("latin-1"))
    assert provenance._line("base", tmp_path) == [Ancestor("base")]


def test_texts_are_named_without_their_place() -> None:
    names = [
        "/home/me/secret/book.txt", "C:\\Users\\me\\notes.md", "https://me:key@host.example/a/b.csv?token=1",
        "s3://bucket/part.jsonl", "hf://datasets/OWNER/SET@main/data/x.parquet", "https://host.example", "stdin",
    ]  # fmt: skip
    found = texts_of([{"name": name, "bytes": 1, "sha256": "a" * 64} for name in names])
    assert [text.name for text in found] == [
        "book.txt", "notes.md", "b.csv", "part.jsonl", "x.parquet", "an unnamed text", "stdin",
    ]  # fmt: skip
    assert [text.dataset for text in found if text.dataset] == ["OWNER/SET"]


def test_a_corpus_is_one_text_and_many_files_are_a_few_lines() -> None:
    def several(names: list[str]) -> list[dict[str, Any]]:
        return [{"name": name, "bytes": 2, "sha256": f"{at:064x}"} for at, name in enumerate(names)]

    corpus = several(["wikitext-2/train-00000-of-00001.parquet"])
    corpus[0]["name"] = "wikitext-2/" + provenance.catalogue.corpus("wikitext-2").files[0].name
    (one,) = texts_of(corpus, ["wikitext-2"])
    assert (one.name, one.files, one.dataset) == ("wikitext-2", 1, "Salesforce/wikitext")
    (mine,) = texts_of(several(["wikitext-2/a.txt", "wikitext-2/b.txt"]), ["wikitext-2"])  # a folder of that name
    assert (mine.files, mine.bytes, mine.dataset) == (2, 4, None)
    assert mine.sha256 is None
    many = texts_of(several([f"f/{n}.txt" for n in range(50)]), ["f"])
    assert len(many) == 21
    assert (many[-1].name, many[-1].files, many[-1].bytes) == ("more files", 30, 60)
    assert texts_of([{"name": "x", "sha256": "`"}])[0].sha256 is None


@pytest.mark.slow
def test_nothing_of_the_machine_is_in_the_folder(workdir: Path) -> None:
    """No part of a path but last ones, no user, no host: in no byte of any file."""
    places = ["telling-home", "telling-data", "telling-runs", "telling-base"]
    data, runs, base = (workdir / places[0] / place for place in places[1:])
    data.mkdir(parents=True)
    (data / "book.txt").write_bytes(make_text().encode())
    (data / "val.txt").write_bytes(make_text(300, seed=2).encode())
    first, _ = train(data / "book.txt", steps=2, out=str(base / "first"))
    said = json.loads((first.checkpoint / "tokenizer_config.json").read_text())
    shutil.copytree(first.checkpoint, base / "copy")
    leaks = {"name_or_path": str(base), "special_tokens_map_file": str(base / "x")}
    (base / "copy" / "tokenizer_config.json").write_text(json.dumps(said | leaks))
    for name in ("gpt.json", "checksums.json", "tokenizer.tiktoken"):
        (base / "copy" / name).unlink()  # as transformers would have saved it
    fast = {key: FAST[key] for key in ("batch_tokens", "sample_every", "dtype")}
    second = library.train(data / "book.txt", init=str(base / "copy"), steps=2, out=str(runs / "run"), **fast)
    forbidden = [*places, str(workdir), workdir.name, str(Path.home()), getpass.getuser(), socket.gethostname()]
    for model, dtype in ((second.run, "float32"), (base / "copy", "int4"), (first.run, "int8")):
        out = workdir / f"out-{dtype}"
        library.export(model, out, dtype=dtype, eval=str(data / "val.txt"), samples=1)
        for file in out.iterdir():
            found = file.read_bytes()
            for word in forbidden:
                assert len(word) < 4 or word.encode() not in found, (file.name, word)
    AutoTokenizer.from_pretrained(workdir / "out-float32")


# What is asked for


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-o", "out", "--type", "f16"], "a folder cannot have the dtype f16"),
        (["-o", "out.gguf", "--dtype", "int8"], "a .gguf file cannot have the dtype int8"),
        (["-o", "out.gguf", "--type", "f16", "--dtype", "f32"], "--dtype f32 and --type f16 contradict each other"),
        (["-o", "out.gguf", "--samples", "1"], "--samples go into the model card"),
        (["-o", "out", "--dtype", "int3"], 'there is no dtype "int3"'),
        (["-o", "out", "--license", "mti"], 'the Hugging Face Hub has no license "mti"'),
        (["-o", "out", "--samples", "-1"], "samples is -1"),
        (["-o", ""], "-o is empty"),
        (["-o", "link"], "link already exists"),
        (["-o", "out", "--eval", "nowhere.txt"], "there is no file nowhere.txt"),
        (["-o", "out", "--eval", "empty.txt"], "empty"),
        (["-o", "out\udcff"], "is not UTF-8"),
    ],
)
def test_what_cannot_be_meant(run_folder: Path, chapter: Path, gpt: Gpt, args: list[str], message: str) -> None:
    Path("empty.txt").touch()
    Path("link").symlink_to("nowhere")
    before = sorted(Path().iterdir())
    one_line_of_what_and_what_next(gpt("export", "-m", run_folder, *args), message)
    assert sorted(Path().iterdir()) == before


def test_a_license_is_suggested_and_in_any_case(gpt: Gpt) -> None:
    assert "mit" in gpt("export", "-m", "x", "-o", "out", "--license", "mti").err.splitlines()[1]
    assert "apache-2.0" in gpt("export", "-m", "x", "-o", "out", "--license", "apache").err.splitlines()[1]
    assert 'give "other"' in gpt("export", "-m", "x", "-o", "out", "--license", "???????").err.splitlines()[1]
    assert ExportConfig(license="MIT").license == "mit"


def test_places_that_are_a_runs_own(run_folder: Path, gpt: Gpt) -> None:
    shutil.copytree(run_folder, "run")
    best = folder.find_checkpoint("run")
    one_line_of_what_and_what_next(gpt("export", "-m", "run", "-o", best / "x"), "is inside the model's own folder")
    one_line_of_what_and_what_next(gpt("export", "-m", "run", "-o", "run/step-999999"), "would look like a checkpoint")
    assert not Path("run/step-999999").exists()
    assert gpt("export", "-m", "run", "-o", "run/beside").code == 0


def test_a_place_where_no_folder_can_be_made(run_folder: Path, chapter: Path, gpt: Gpt) -> None:
    one_line_of_what_and_what_next(gpt("export", "-m", run_folder, "-o", "chapter.txt/out"), "cannot write", 1)
    Path("closed").mkdir(mode=0o500)
    if not os.access("closed", os.W_OK):
        one_line_of_what_and_what_next(gpt("export", "-m", run_folder, "-o", "closed/out"), "cannot write", 1)


def test_what_is_printed(run_folder: Path, chapter: Path, gpt: Gpt) -> None:
    done = gpt("export", "-m", run_folder, "-o", "a/b/out", "--eval", chapter, "--json")
    values = json.loads(done.out)
    assert set(values) == KEYS
    assert (values["out"], values["format"], values["type"], values["arch"]) == ("a/b/out", "folder", "float32", "gpt2")
    assert values["loss_before"] == values["loss_after"]
    assert values["bytes"] == sum(file.stat().st_size for file in Path("a/b/out").iterdir())
    assert values["vocab_size"] == 400
    done = gpt("export", "-m", run_folder, "-o", "out", "--dtype", "int4", "--eval", chapter, "--quiet")
    assert re.match(r"saved  out  \(.* tensors, int4\)\nloss   .* nats per token\n.*gpt sample .* -m out", done.out)
    assert done.err == ""
    done = gpt("export", "-m", run_folder, "-o", "b.GGUF")
    assert "llama-cli -m b.GGUF" in done.out
    assert Path("b.GGUF").is_file()
    assert json.loads(gpt("export", "-m", run_folder, "-o", "c.gguf", "--json").out)["loss_after"] is None


def test_the_license_of_a_gguf_file_stands_in_it(run_folder: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
    library.export(run_folder, "out.gguf", license="mit")
    assert gguf.GGUFReader("out.gguf").get_field("general.license").contents() == "mit"


# The folder as a model


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exported_folder_is_a_model(run_folder: Path, chapter: Path, gpt: Gpt, dtype: str) -> None:
    done = library.export(run_folder, "out", dtype=dtype, eval=str(chapter))
    assert done.loss_before is not None
    assert done.loss_after is not None
    for model, loss in ((run_folder, done.loss_before), (Path("out"), done.loss_after)):
        found = json.loads(gpt("eval", chapter, "-m", model, "--json", "--dtype", "float32").out)
        assert found["loss"] == loss
    assert (done.loss_before == done.loss_after) == (dtype == "float32")
    assert abs(done.loss_after - done.loss_before) < 0.1
    said = meta(Path("out"))["export"]
    assert (said["dtype"], said["loss_before"], said["loss_after"]) == (dtype, done.loss_before, done.loss_after)
    source = meta(folder.find_checkpoint(str(run_folder)))
    assert {key: meta(Path("out"))[key] for key in ("step", "val_loss")} == {k: source[k] for k in ("step", "val_loss")}
    sampled = gpt("sample", "the", "-m", "out", "--greedy", "-n", "12", "--dtype", "float32")
    assert sampled.code == 0
    if dtype == "float32":
        words = ("sample", "the", "-m", run_folder, "--greedy", "-n", "12", "--dtype", "float32")
        assert gpt(*words).out == sampled.out
    assert gpt("inspect", "attention", "-m", "out", "-p", "the cat", "--json").code == 0
    assert gpt("params", "out").code == 0


def test_exported_again(run_folder: Path, chapter: Path) -> None:
    library.export(run_folder, "first", dtype="int4", eval=str(chapter))
    library.export("first", "second")
    library.export("second", "third", dtype="int4")
    words = read_card(Path("second"))
    assert "| quantized before | to 4 bits: a wider dtype does not restore what was lost |" in words
    assert "`text.txt`" in words
    assert "before its weights were quantized" in words
    assert "quantized before" not in read_card(Path("third"))
    one, two, three = (meta(Path(name))["provenance"] for name in ("first", "second", "third"))
    assert one == two == three
    assert one["bits"] == 4
    assert "loss_before" not in meta(Path("second"))["export"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_transformers_reads_it(run_folder: Path, dtype: str) -> None:
    library.export(run_folder, "out", dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained("out")
    assert str(theirs.dtype) == f"torch.{dtype}"
    ours = api.load("out", dtype="float32").model
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(theirs.float()(ids).logits, ours(ids), atol=1e-4)


def test_numbers_that_a_dtype_cannot_hold(gpt: Gpt) -> None:
    config = GPTConfig(257, 16, 1, 1, 32)
    model = library.GPT(config)
    model.h[0].mlp.c_fc.weight.data[0, 0] = 1e6
    checkpoint.save(Path("wide"), model, checkpoint.TokenizerFiles(bytes_tokenizer(), config), {"step": 1})
    one_line_of_what_and_what_next(
        gpt("export", "-m", "wide", "-o", "a/out", "--dtype", "float16"), "float16 cannot represent"
    )
    assert [path.name for path in Path().iterdir()] == ["wide"]
    assert gpt("export", "-m", "wide", "-o", "out", "--dtype", "bfloat16").code == 0


# Where it ends early


@pytest.mark.parametrize(
    ("what", "signum", "code", "out"),
    [
        ("tokenized", signal.SIGINT, 130, "a/b/out"),
        ("scored", signal.SIGTERM, 143, "a/b/out"),
        ("written", signal.SIGINT, 130, "a/b/out"),
        ("written", signal.SIGTERM, 143, "a/b/out.gguf"),
    ],
)
def test_a_signal_leaves_nothing(run_folder: Path, chapter: Path, what: str, signum: int, code: int, out: str) -> None:
    def listen(event: Any) -> None:
        if isinstance(event, events.Progress) and event.what == what and event.done > event.total // 3:
            send(signum)

    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(Interrupted, match="^interrupted: nothing was written$") as stopped:
        library.export(run_folder, out, eval=str(chapter), listen=listen)
    assert stopped.value.exit_code == code
    assert [path.name for path in Path().iterdir()] == ["chapter.txt"]
    assert {each: signal.getsignal(each) for each in handlers} == handlers


def test_the_command_ends_with_the_signals_status(
    run_folder: Path, chapter: Path, gpt: Gpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt_cli.progress.TrainDisplay.__call__", lambda display, event: send(signal.SIGTERM))
    done = gpt("export", "-m", run_folder, "-o", "out")
    assert (done.code, done.out, done.err) == (143, "", "interrupted: nothing was written\n")
    assert [path.name for path in Path().iterdir()] == ["chapter.txt"]


@pytest.mark.parametrize("out", ["a/b/out", "a/b/out.gguf"])
def test_a_disk_that_is_full_leaves_nothing(
    run_folder: Path, gpt: Gpt, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    sync, left = os.fsync, 0

    def fills(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fills)
    for at in range(40):
        left = at
        done = gpt("export", "-m", run_folder, "-o", out)
        if done.code == 0:
            break
        one_line_of_what_and_what_next(done, "No space left on device", 1)
        # Once it has its name it is whole: only the sync of the folder around it has failed.
        assert list(Path().iterdir()) == [] or Path(out).is_file() or folder.is_checkpoint(Path(out))
        shutil.rmtree("a", ignore_errors=True)
    assert at >= 1


@pytest.mark.slow
@pytest.mark.parametrize("out", ["out", "out.gguf"])
def test_two_exports_to_one_place(run_folder: Path, chapter: Path, workdir: Path, out: str) -> None:
    """The second one to end finds what the first one wrote, and leaves it as it is."""
    heard: list[str] = []

    def listen(event: Any) -> None:
        if isinstance(event, events.Progress) and not heard:
            heard.append(event.what)
            code = f"import gpt; gpt.export({str(run_folder)!r}, {out!r}, license='mit')"
            subprocess.run([sys.executable, "-c", code], check=True, cwd=workdir)

    with pytest.raises(WorkError, match="another process has created it in the meantime"):
        library.export(run_folder, out, listen=listen)
    assert heard == ["written"]
    library.export(run_folder, f"again/{out}", license="mit")
    found, again = Path(out), Path(f"again/{out}")
    if found.is_dir():
        found, again = found / "checksums.json", again / "checksums.json"
    assert found.read_bytes() == again.read_bytes()
    assert sorted(path.name for path in Path().iterdir()) == ["again", "chapter.txt", out]
