"""`gpt export`: folders, model cards, errors and interruptions."""

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
from conftest import FAST, Gpt, make_text, more, one_line_of_what_and_what_next, send, train
from transformers import AutoModelForCausalLM, AutoTokenizer

import gpt as library
from gpt import api
from gpt.config import events
from gpt.config.export import ExportConfig
from gpt.config.model import GPTConfig
from gpt.exporting.card import card
from gpt.exporting.export import find_target
from gpt.exporting.provenance import Base, Provenance, last_part
from gpt.exporting.source import SourceModel
from gpt.model.params import breakdown
from gpt.runs import checkpoint, folder
from gpt.system.errors import Interrupted, WorkError
from gpt.tokenizers.tokenizer import bytes_tokenizer

KEYS = {"out", "format", "type", "arch", "bytes", "tensors", "vocab_size", "loss_before", "loss_after", "seconds"}
DTYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture
def chapter(workdir: Path) -> Path:
    path = workdir / "chapter.txt"
    path.write_bytes(make_text(300, seed=1).encode())
    return path


def card_metadata(path: Path) -> dict[str, Any]:
    text = (path / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\n")
    return dict(yaml.safe_load(text.split("---\n")[1]))


def read_card(path: Path) -> str:
    return (path / "README.md").read_text(encoding="utf-8")


def gpt_json(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "gpt.json").read_text(encoding="utf-8")))


def make_source(config: GPTConfig | None = None, **changes: Any) -> SourceModel:
    return SourceModel(Path(), config or GPTConfig(257, 32, 2, 2, 32), bytes_tokenizer(), {}, **changes)


# The card


def test_card_describes_the_run(run_folder: Path, workdir: Path) -> None:
    library.export(run_folder, "out", license="Apache-2.0")
    data = huggingface_hub.ModelCard.load("out/README.md").data
    assert (data.license, data.library_name, data.pipeline_tag, data.tags) == (
        "apache-2.0", "transformers", "text-generation", ["gpt", "gpt2"],
    )  # fmt: skip
    text = read_card(Path("out"))
    record = json.loads((run_folder / "run.json").read_text())
    (source,) = record["sources"]
    config = checkpoint.peek(Path("out"))[0]
    for part in (
        f"Architecture gpt2; {breakdown(config).trainable:,} parameters in float32; a context of 32 tokens.",
        f"Trained for 30 steps, 7,680 tokens in all, on {record['tokens']['train']:,} tokens of text "
        f"({source['bytes']:,} bytes): `text.txt`.",
        f"{record['result']['val_loss']:.4f} nats per token, {record['result']['bits_per_byte']:.4f} bits per byte.",
        'gpt sample "Once upon" -m out',
    ):
        assert part in text, part


def test_card_of_a_model_without_a_run_says_training_is_unknown(run_folder: Path, workdir: Path) -> None:
    shutil.copytree(folder.find_checkpoint(str(run_folder)), "theirs")
    library.export("theirs", "out")
    text = read_card(Path("out"))
    assert "How it was trained, and on which data, is not recorded" in text
    assert "It is a copy of `theirs`." in text
    assert card_metadata(Path("out"))["license"] == "unknown"
    assert "base_model" not in card_metadata(Path("out"))  # A local name is not a Hub id.


@pytest.mark.parametrize(
    ("config", "dtype", "in_transformers"),
    [
        (GPTConfig(257, 32, 2, 2, 32, positions="rotary"), "float32", False),
        (GPTConfig.of("modern", 257, 32, 4, 2, 32, window=8), "float32", True),
    ],
)
def test_card_mentions_transformers_only_if_supported(config: GPTConfig, dtype: str, in_transformers: bool) -> None:
    text = card(make_source(config), "it", dtype)
    assert ("library_name: transformers" in text) == in_transformers


HOSTILE_NAMES = [
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


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_are_escaped(name: str) -> None:
    known_provenance = Provenance([name], 3, base=Base(name, on_hub=True))
    text = card(make_source(provenance=known_provenance), name, "float32")
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert metadata["license"] == "unknown"
    assert "base_model" not in metadata
    assert set(metadata) == {"license", "library_name", "pipeline_tag", "tags"}
    lines = text.split("\n")
    assert [line for line in lines if line.startswith("```")] == ["```console", "```"]
    titles = [line for line in lines if line.startswith("#")]
    assert titles[1:] == [f"## {title}" for title in ("Model", "Training", "Use", "Limits")]
    text_outside_code = re.sub(r"```.*?\n```|`[^`\n]*`", "", "\n".join(lines), flags=re.DOTALL)
    assert not re.search(r"<script>|\[a\]", text_outside_code)
    text.encode()  # Lone surrogates raise an error.
    assert not [char for char in text if not char.isprintable() and char != "\n"]


def test_card_shows_the_loss_before_rounding() -> None:
    known_provenance = Provenance(["a"], 5, val_loss=1.25, bits_per_byte=0.5)
    text = card(make_source(provenance=known_provenance), "it", "bfloat16")
    assert (
        "Loss on text that it was not trained on: 1.2500 nats per token, 0.5000 bits per byte, before its weights were rounded to 16 bits."
        in text
    )


# Provenance


def test_card_names_the_base_model(run_folder: Path, text: Path) -> None:
    base = Path("deep/base")
    shutil.copytree(folder.find_checkpoint(str(run_folder)), base)
    options = {key: FAST[key] for key in ("batch_tokens", "sample_every", "dtype")}
    for name, settings in (("tuned", {}), ("adapters", {"lora_rank": 2})):
        result = library.train(text, init=str(base), steps=2, out=f"runs/{name}", **options, **settings)
        library.export(result.run, name, license="mit")
        assert card_metadata(Path(name))["license"] == "mit"
        assert "base_model" not in card_metadata(Path(name))
        assert "It is fine-tuned from `base`." in read_card(Path(name))
    Path("peft").mkdir()  # PEFT writes only these files.
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folder.find_checkpoint("runs/adapters") / name, "peft")
    library.export("peft", "from-peft", dtype="float16")
    assert "It is a copy of `peft`" in read_card(Path("from-peft"))
    shutil.rmtree(base)
    library.export("runs/tuned", "later")
    assert "It is fine-tuned from `base`" in read_card(Path("later"))


def test_recorded_text_names_omit_folders_and_hosts() -> None:
    names = [
        "/home/me/secret/book.txt", "C:\\Users\\me\\notes.md", "https://me:key@host.example/a/b.csv?token=1",
        "s3://bucket/part.jsonl", "hf://datasets/OWNER/SET@main/data/x.parquet", "https://host.example", "stdin",
    ]  # fmt: skip
    assert [last_part(name) for name in names] == [
        "book.txt", "notes.md", "b.csv", "part.jsonl", "x.parquet", "an unnamed text", "stdin",
    ]  # fmt: skip


@pytest.mark.slow
def test_exports_do_not_leak_paths_user_or_host(workdir: Path) -> None:
    """No file contains a folder name of the inputs, the user name or the host name."""
    folder_names = ["telling-home", "telling-data", "telling-runs", "telling-base"]
    data, runs, base = (workdir / folder_names[0] / place for place in folder_names[1:])
    data.mkdir(parents=True)
    (data / "book.txt").write_bytes(make_text().encode())
    (data / "val.txt").write_bytes(make_text(300, seed=2).encode())
    first, _ = train(data / "book.txt", steps=2, out=str(base / "first"))
    tokenizer_config = json.loads((first.checkpoint / "tokenizer_config.json").read_text())
    shutil.copytree(first.checkpoint, base / "copy")
    leaks = {"name_or_path": str(base), "special_tokens_map_file": str(base / "x")}
    (base / "copy" / "tokenizer_config.json").write_text(json.dumps(tokenizer_config | leaks))
    for name in ("gpt.json", "checksums.json", "tokenizer.tiktoken"):
        (base / "copy" / name).unlink()  # Transformers does not write these files.
    options = {key: FAST[key] for key in ("batch_tokens", "sample_every", "dtype")}
    second = library.train(data / "book.txt", init=str(base / "copy"), steps=2, out=str(runs / "run"), **options)
    forbidden = [*folder_names, str(workdir), workdir.name, str(Path.home()), getpass.getuser(), socket.gethostname()]
    for model, dtype in ((second.run, "float32"), (base / "copy", "float16"), (first.run, "bfloat16")):
        out = workdir / f"out-{dtype}"
        library.export(model, out, dtype=dtype, eval=str(data / "val.txt"))
        for file in out.iterdir():
            content = file.read_bytes()
            for word in forbidden:
                assert len(word) < 4 or word.encode() not in content, (file.name, word)
        library.export(model, f"{dtype}.html", eval=str(data / "val.txt"))
        content = Path(f"{dtype}.html").read_bytes().rpartition(b' id="model-header"')[2]
        assert b'"tokenizer"' in content
        assert not [word for word in forbidden if len(word) >= 4 and word.encode() in content]
    AutoTokenizer.from_pretrained(workdir / "out-float32")


# Options and output


@pytest.mark.parametrize(
    ("dtype", "type"),
    [("float32", "f32"), ("float16", "f16"), ("int8", "q8_0"), ("int4", "q4_0"), ("q8_0", "q8_0"), (None, "f16")],
)
def test_gguf_dtypes_have_both_names(dtype: Any, type: str) -> None:
    assert find_target("book.gguf", ExportConfig(dtype=dtype)).type == type


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-o", "out", "--dtype", "f16"], "a folder cannot have the dtype f16"),
        (["-o", "out.gguf", "--dtype", "bfloat16"], "a .gguf file cannot have the dtype bfloat16"),
        (["-o", "out.html", "--dtype", "int4"], "a page cannot have the dtype int4"),
        (["-o", "out", "--dtype", "int8"], "a folder cannot have the dtype int8"),
        (["-o", "out", "--title", "x"], "--title is only for a page, and out is a folder"),
        (["-o", "out.gguf", "--with-text"], "--with-text is only for a page, and out.gguf is a .gguf file"),
        (["-o", "out.gguf", "--prompts", "0"], "--prompts is only for a page, and out.gguf is a .gguf file"),
        (["-o", "out.html", "--prompts", "4"], "prompts is 4; it must be between 0 and 3"),
        (["-o", "out.html", "--about", "\udcff"], "--about is not UTF-8"),
        (["-o", "out", "--dtype", "int3"], 'there is no dtype "int3"'),
        (["-o", "out", "--license", "MIT\nx: y"], "is not a license identifier"),
        (["-o", ""], "-o is empty"),
        (["-o", "link"], "link already exists"),
        (["-o", "out", "--eval", "nowhere.txt"], "there is no file nowhere.txt"),
        (["-o", "out", "--eval", "empty.txt"], "empty"),
        (["-o", "out\udcff"], "is not UTF-8"),
    ],
)
def test_invalid_options_are_errors(run_folder: Path, chapter: Path, gpt: Gpt, args: list[str], message: str) -> None:
    Path("empty.txt").touch()
    Path("link").symlink_to("nowhere")
    before = sorted(Path().iterdir())
    one_line_of_what_and_what_next(gpt("export", "-m", run_folder, *args), message)
    assert sorted(Path().iterdir()) == before


def test_outputs_inside_a_run_are_restricted(run_folder: Path, gpt: Gpt) -> None:
    shutil.copytree(run_folder, "run")
    best = folder.find_checkpoint("run")
    one_line_of_what_and_what_next(gpt("export", "-m", "run", "-o", best / "x"), "is inside the model's own folder")
    one_line_of_what_and_what_next(gpt("export", "-m", "run", "-o", "run/step-999999"), "would look like a checkpoint")
    assert not Path("run/step-999999").exists()
    assert gpt("export", "-m", "run", "-o", "run/beside").code == 0


def test_unwritable_outputs_are_an_error(run_folder: Path, chapter: Path, gpt: Gpt) -> None:
    one_line_of_what_and_what_next(gpt("export", "-m", run_folder, "-o", "chapter.txt/out"), "cannot write", 1)
    Path("closed").mkdir(mode=0o500)
    if not os.access("closed", os.W_OK):
        one_line_of_what_and_what_next(gpt("export", "-m", run_folder, "-o", "closed/out"), "cannot write", 1)


def test_output_describes_the_export(run_folder: Path, chapter: Path, gpt: Gpt) -> None:
    result = gpt("export", "-m", run_folder, "-o", "a/b/out", "--eval", chapter, "--json")
    values = json.loads(result.out)
    assert set(values) == KEYS
    assert (values["out"], values["format"], values["type"], values["arch"]) == ("a/b/out", "folder", "float32", "gpt2")
    assert values["loss_before"] == values["loss_after"]
    assert values["bytes"] == sum(file.stat().st_size for file in Path("a/b/out").iterdir())
    assert values["vocab_size"] == 400
    result = gpt("export", "-m", run_folder, "-o", "out", "--dtype", "float16", "--eval", chapter, "--quiet")
    assert re.match(
        r"saved  out  \(.* tensors, float16\)\nloss   .* nats per token\n.*gpt sample .* -m out", result.out
    )
    assert result.err == ""
    result = gpt("export", "-m", run_folder, "-o", "b.GGUF")
    assert "llama-cli -m b.GGUF" in result.out
    assert Path("b.GGUF").is_file()
    assert json.loads(gpt("export", "-m", run_folder, "-o", "c.gguf", "--json").out)["loss_after"] is None


# The folder as a model


@pytest.mark.parametrize("dtype", DTYPES)
def test_exported_folders_can_be_used_as_models(run_folder: Path, chapter: Path, gpt: Gpt, dtype: str) -> None:
    export = library.export(run_folder, "out", dtype=dtype, eval=str(chapter))
    assert export.loss_before is not None
    assert export.loss_after is not None
    for model, loss in ((run_folder, export.loss_before), (Path("out"), export.loss_after)):
        evaluation = json.loads(gpt("eval", chapter, "-m", model, "--json", "--dtype", "float32").out)
        assert evaluation["loss"] == loss
    assert (export.loss_before == export.loss_after) == (dtype == "float32")
    assert abs(export.loss_after - export.loss_before) < 0.1
    assert gpt_json(Path("out"))["export"] == {"dtype": dtype}
    source = gpt_json(folder.find_checkpoint(str(run_folder)))
    assert {key: gpt_json(Path("out"))[key] for key in ("step", "val_loss")} == {
        k: source[k] for k in ("step", "val_loss")
    }
    sampled = gpt("sample", "the", "-m", "out", "--greedy", "-n", "12", "--dtype", "float32")
    assert sampled.code == 0
    if dtype == "float32":
        words = ("sample", "the", "-m", run_folder, "--greedy", "-n", "12", "--dtype", "float32")
        assert gpt(*words).out == sampled.out
    assert gpt("inspect", "attention", "the cat", "-m", "out", "--json").code == 0
    assert gpt("params", "out").code == 0
    theirs, ids = AutoModelForCausalLM.from_pretrained("out"), torch.arange(20)[None]
    assert str(theirs.dtype) == f"torch.{dtype}"
    with torch.no_grad():
        assert torch.allclose(theirs.float()(ids).logits, api.load("out", dtype="float32").model(ids), atol=1e-4)


def test_exporting_again_keeps_the_provenance(run_folder: Path, workdir: Path) -> None:
    library.export(run_folder, "first", dtype="bfloat16")
    library.export("first", "second")
    library.export("second", "third", dtype="bfloat16")
    card_text = read_card(Path("second"))
    assert "in float32, rounded before to 16 bits;" in card_text
    assert "`text.txt`" in card_text
    assert "before its weights were rounded to 16 bits" in card_text
    assert "rounded before" not in read_card(Path("third"))
    first, second, third = (gpt_json(Path(name))["provenance"] for name in ("first", "second", "third"))
    assert first == second == third
    assert first["bits"] == 16
    library.export(run_folder, "it.gguf", dtype="int4")
    library.export("it.gguf", "fourth")
    assert gpt_json(Path("fourth"))["provenance"]["bits"] == 4


def test_values_out_of_range_are_an_error(gpt: Gpt) -> None:
    config = GPTConfig(257, 16, 1, 1, 32)
    model = library.GPT(config)
    model.h[0].mlp.c_fc.weight.data[0, 0] = 1e6
    checkpoint.save(Path("wide"), model, checkpoint.TokenizerFiles(bytes_tokenizer(), config), {"step": 1})
    one_line_of_what_and_what_next(
        gpt("export", "-m", "wide", "-o", "a/out", "--dtype", "float16"), "float16 cannot represent"
    )
    assert [path.name for path in Path().iterdir()] == ["wide"]
    assert gpt("export", "-m", "wide", "-o", "out", "--dtype", "bfloat16").code == 0


# Interruptions and errors


@pytest.mark.parametrize(
    ("stage", "signum", "code", "out"),
    [
        ("tokenized", signal.SIGINT, 130, "a/b/out"),
        ("scored", signal.SIGTERM, 143, "a/b/out"),
        ("written", signal.SIGINT, 130, "a/b/out"),
        ("written", signal.SIGTERM, 143, "a/b/out.gguf"),
        ("written", signal.SIGTERM, 143, "a/b/out.html"),
    ],
)
def test_an_interrupted_export_leaves_nothing(
    run_folder: Path, chapter: Path, stage: str, signum: int, code: int, out: str
) -> None:
    def listen(event: Any) -> None:
        if isinstance(event, events.Progress) and event.what == stage and event.done > event.total // 3:
            send(signum)

    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(Interrupted, match="^interrupted: nothing was written$") as interrupted:
        library.export(run_folder, out, eval=str(chapter), listen=listen)
    assert interrupted.value.exit_code == code
    assert [path.name for path in Path().iterdir()] == ["chapter.txt"]
    assert {each: signal.getsignal(each) for each in handlers} == handlers


@pytest.mark.parametrize("out", ["out", "out.gguf", "out.html"])
def test_progress_counts_the_parameters_before_the_current_one(run_folder: Path, out: str) -> None:
    reports: list[Any] = []
    library.export(run_folder, out, listen=reports.append)
    total = sum(p.numel() for p in library.load(run_folder, dtype="float32").model.parameters())
    reports = [report for report in reports if report.what == "written"]  # A page also reports its sample.
    assert {(report.total, report.unit) for report in reports} == {(total, "parameters")}
    done = [report.done for report in reports]
    assert done == sorted(done) and done[0] == 0 and total // 3 < done[-1] < total


@pytest.mark.parametrize("out", ["a/b/out", "a/b/out.gguf", "a/b/out.html"])
def test_a_full_disk_leaves_nothing(run_folder: Path, gpt: Gpt, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    sync, syncs_left = os.fsync, 0

    def fail_after_syncs(descriptor: int) -> None:
        nonlocal syncs_left
        syncs_left -= 1
        if syncs_left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_after_syncs)
    for syncs in range(40):
        syncs_left = syncs
        result = gpt("export", "-m", run_folder, "-o", out)
        if result.code == 0:
            break
        one_line_of_what_and_what_next(result, "No space left on device", 1)
        # An export with its final name is complete: only the sync of its parent folder failed.
        assert list(Path().iterdir()) == [] or Path(out).is_file() or folder.is_checkpoint(Path(out))
        shutil.rmtree("a", ignore_errors=True)
    assert syncs >= 1


@pytest.mark.slow
@pytest.mark.parametrize("out", ["out", "out.gguf", more("out.html")])
def test_a_concurrent_export_is_not_overwritten(run_folder: Path, chapter: Path, workdir: Path, out: str) -> None:
    stages: list[str] = []

    def listen(event: Any) -> None:
        if isinstance(event, events.Progress) and event.what == "written" and not stages:
            stages.append(event.what)
            code = f"import gpt; gpt.export({str(run_folder)!r}, {out!r}, license='mit')"
            subprocess.run([sys.executable, "-c", code], check=True, cwd=workdir)

    with pytest.raises(WorkError, match="another process has created it in the meantime"):
        library.export(run_folder, out, listen=listen)
    assert stages == ["written"]
    library.export(run_folder, f"again/{out}", license="mit")
    output, expected = Path(out), Path(f"again/{out}")
    if output.is_dir():
        output, expected = output / "checksums.json", expected / "checksums.json"
    assert output.read_bytes() == expected.read_bytes()
    assert sorted(path.name for path in Path().iterdir()) == ["again", "chapter.txt", out]
