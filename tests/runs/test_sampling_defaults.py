"""The sampling settings that a model recommends: from any kind of model to any command."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import pytest
from conftest import Gpt, make_text
from ranks import to_options
from transformers import GenerationConfig

from gpt import api
from gpt.config.sample import SampleConfig
from gpt.runs.sampling_defaults import read_defaults
from gpt.serve import server

STORED = {
    "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 4,
}  # fmt: skip
EXPECTED = {name.removesuffix("_size"): value for name, value in STORED.items() if name != "do_sample"}
IN_GGUF = {name: value for name, value in EXPECTED.items() if name != "no_repeat_ngram"}
LINE = "temperature 0.6, top-k 20, top-p 0.95, min-p 0.1, repetition-penalty 1.1"


def write_config(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 399, **values}))


@pytest.fixture(scope="module")
def base(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Transformers folder with sampling settings."""
    folder = tmp_path_factory.mktemp("base") / "base"
    api.export(run_folder, folder)
    for name in ("gpt.json", "checksums.json"):
        (folder / name).unlink()
    write_config(folder, **STORED)
    return folder


@pytest.fixture(scope="module")
def models(base: Path) -> dict[str, Path]:
    """Models made from the base, by kind."""
    text, place = base.parent / "text.txt", base.parent
    text.write_text(make_text(1500))
    settings: dict[str, Any] = {"init": base, "steps": 2, "block_size": 16, "batch_tokens": 64, "sample_every": 0}
    adapter = api.train(text, out=place / "adapter", lora_rank=2, **settings).checkpoint
    tuned = api.train(text, out=place / "tuned", **settings)
    resumed = api.resume(tuned.run, steps=3).checkpoint
    for name in ("folder", "file.gguf", "page.html"):
        api.export(tuned.run, place / name)
    api.export(place / "file.gguf", place / "again")
    api.export(adapter, place / "merged")
    bare = api.train(text, out=place / "bare", lora_rank=2, **settings).checkpoint
    (bare / "generation_config.json").unlink()
    (bare / "gpt.json").unlink()
    (bare / "checksums.json").unlink()
    return {
        "base": base, "adapter": adapter, "tuned": resumed, "folder": place / "folder", "GGUF": place / "file.gguf",
        "folder from a GGUF": place / "again", "merged": place / "merged", "PEFT adapter": bare,
    }  # fmt: skip


@pytest.mark.parametrize("door", ["library", "gpt sample", "gpt chat", "gpt serve"])
@pytest.mark.parametrize(
    "kind", ["base", "adapter", "tuned", "folder", "GGUF", "folder from a GGUF", "merged", "PEFT adapter"]
)
def test_sampling_defaults_travel(
    kind: str, door: str, models: dict[str, Path], gpt: Gpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = models[kind], IN_GGUF if "GGUF" in kind else EXPECTED
    source = path.name if kind == "GGUF" else "generation_config.json"
    line = f"sampling defaults from {source}: {LINE}" + ("" if "GGUF" in kind else ", no-repeat-ngram 4")
    if door == "library":
        model = api.load(path)
        assert model.sampling.settings == expected
        assert model.generate("the", max_tokens=4) == model.generate("the", **expected, max_tokens=4)
    elif door == "gpt sample":
        flags = to_options(expected)
        results = [gpt("sample", "the", "-m", path, "-n", "6", "--seed", "1", *words) for words in ([], flags)]
        assert results[0].out == results[1].out
        assert [" ".join(result.err.split()).count(line) for result in results] == [1, 0]
    elif door == "gpt chat":
        result = gpt("chat", "-m", path, "-n", "6", "--seed", "1", "--top-k", "0", stdin=b"/set\n")
        assert {"temperature 0.6", "top-k off", "repetition-penalty 1.1"} <= {*result.out.splitlines()}
    else:
        notes = list[str]()
        assert server._defaults(path, notes.append) == expected
        assert notes == [f"{line}; --defaults openai turns them off"]


def test_exported_formats_have_the_keys_of_their_programs(models: dict[str, Path], base: Path) -> None:
    for kind in ("tuned", "folder", "adapter"):
        config = GenerationConfig.from_pretrained(models[kind])
        assert {name: getattr(config, name) for name in STORED} == STORED
    fields = gguf.GGUFReader(models["GGUF"]).fields
    prefix = "general.sampling."
    stored = {name.removeprefix(prefix): fields[name].contents() for name in fields if name.startswith(prefix)}
    names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    assert stored.pop("penalty_last_n") == fields["gpt2.context_length"].contents()
    assert {names.get(name, name): pytest.approx(value) for name, value in stored.items()} == IN_GGUF
    header = (
        (base.parent / "page.html").read_text().split('id="model-header"')[1].split(">", 1)[1].split("</script>")[0]
    )
    assert json.loads(header)["settings"] == EXPECTED


@pytest.mark.parametrize(
    ("stored", "settings", "exported"),
    [
        ({}, {}, {}),
        ({"do_sample": False}, {"temperature": 0}, {"do_sample": False}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {"temperature": 0, "top_k": 5}, {"do_sample": False}),
        ({"do_sample": True}, {"temperature": 1}, {"do_sample": True, "temperature": 1}),
        ({"temperature": 0.6}, {"temperature": 0.6}, {"do_sample": True, "temperature": 0.6}),
        ({"top_k": 20.0, "top_p": 1.0}, {"top_k": 20, "top_p": 1}, {"top_k": 20, "top_p": 1}),
        ({"top_k": -1, "top_p": 0}, {"top_k": 0, "top_p": 1e-9}, {"top_k": 0, "top_p": 1e-9}),
        ({"num_beams": 1, "typical_p": 1.0, "suppress_tokens": [], "max_length": 9}, {}, {}),
    ],
)  # fmt: skip
def test_values_are_read_and_written_with_transformers_meaning(
    stored: dict[str, Any], settings: dict[str, Any], exported: dict[str, Any], tmp_path: Path
) -> None:
    write_config(tmp_path, **stored)
    defaults = read_defaults(tmp_path, pytest.fail)
    assert defaults.settings == settings
    assert defaults.transformers_values() == exported
    GenerationConfig(**exported).validate(strict="do_sample" in exported)
    assert read_defaults(tmp_path / "nowhere").settings == {}


HOSTILE = (math.nan, math.inf, -math.inf, -2, 10**300, "0.5", [0.5], [], {"a": 1}, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in [*STORED][1:] for value in HOSTILE),
        ("do_sample", 1), ("do_sample", "true"), ("num_beams", 4), ("typical_p", 0.9), ("bad_words_ids", [[1]]),
        ("top_p", 1.5), ("top_k", 2.5), ("temperature", 101), ("repetition_penalty", 101),
    ],
)  # fmt: skip
def test_unusable_values_are_ignored_by_name(name: str, value: Any, tmp_path: Path) -> None:
    for values in (STORED, {}):
        write_config(tmp_path, **{**values, name: value})
        notes = list[str]()
        found = read_defaults(tmp_path, notes.append).settings
        assert [name.removesuffix("_size").replace("_", "-") in note.replace("_", "-") for note in notes] == [True]
        assert notes[0].startswith("ignored in generation_config.json: ") and len(notes[0]) < 200
        SampleConfig(**found)
        wrong = "temperature" if name == "do_sample" else name.removesuffix("_size")
        rest = {key: value for key, value in (EXPECTED if values else {}).items() if key != wrong}
        if values and wrong == "temperature":  # Transformers' default with do_sample.
            rest["temperature"] = 0.6 if name == "do_sample" else 1.0
        assert found == rest


@pytest.mark.parametrize(
    ("entries", "settings", "ignored"),
    [
        ({"temp": 0.7, "top_k": -1, "penalty_last_n": 32, "mirostat": 0}, {"temperature": 0.7, "top_k": 0}, 1),
        ({"temp": 0.0, "top_p": 0.9}, {"temperature": 0, "top_p": 0.9}, 0),
        ({"temp": math.nan, "top_k": [1, 2], "top_p": "x", "min_p": ["a"], "penalty_repeat": math.inf}, {}, 5),
        ({"mirostat": 2, "sequence": "temperature;top_k", "xtc_probability": 0.5, "min_p": 0.05}, {"min_p": 0.05}, 3),
    ],
)  # fmt: skip
def test_gguf_settings_of_other_programs_are_read(
    entries: dict[str, Any], settings: dict[str, Any], ignored: int, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for name, value in entries.items():
        add = {float: writer.add_float32, int: writer.add_int32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"general.sampling.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    notes = list[str]()
    defaults = read_defaults(tmp_path / "x.gguf", notes.append)
    assert (defaults.settings, len(notes)) == (settings, ignored)
    assert all(note.startswith("ignored in x.gguf: ") for note in notes)
