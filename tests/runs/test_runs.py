"""Checkpoints and run folders: compatibility with Transformers, damage, and selection of checkpoints."""

import json
import os
import shutil
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GPT2_RANKS, SHARED, make_text, needs_shared, slow
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import gpt
from gpt.config.model import GPTConfig
from gpt.config.sample import SampleConfig
from gpt.decoding.context import Context
from gpt.decoding.engine import generate
from gpt.model.decoder import GPT
from gpt.runs import checkpoint, folder, hf, model_config
from gpt.system import files
from gpt.system.errors import UserError, WorkError
from gpt.tokenizers import importing, tokenizer

CPU = torch.device("cpu")
# Keys of config.json before `arch` became a set of properties
PROMPTS = [
    "the cat", "The dog sat", "in Zürich", "日本語", "naïve 🐕 dogs", "12345", "\n\n", " it’s raining", "WE'LL", "a\r\n\tb",
]  # fmt: skip


def assert_equal_to_transformers(path: Path, with_tokenizer: bool = True) -> None:
    """Asserts equal ids of ten prompts, logits within 1e-4 and equal greedy continuations."""
    ours = gpt.load(path, device="cpu", dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    their_tokenizer = AutoTokenizer.from_pretrained(path) if with_tokenizer else None
    for prompt in PROMPTS:
        ids = ours.tokenizer.encode(prompt).tolist()
        assert their_tokenizer is None or their_tokenizer(prompt)["input_ids"] == ids
        x = torch.tensor([ids])
        with torch.no_grad():
            assert torch.allclose(ours.model(x), theirs(x).logits, atol=1e-4, rtol=0)
        max_tokens = ours.model.config.block_size - len(ids)
        expected = theirs.generate(
            x, attention_mask=torch.ones_like(x), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        config = SampleConfig(greedy=True, max_tokens=max_tokens, ignore_eot=True)
        continuation = generate(Context(ours.model, ours.compute), ids, config, ours.tokenizer.ends)
        assert [token.id for token in continuation] == expected[0, len(ids) :].tolist()


def add_noise(model: torch.nn.Module) -> None:
    """Adds noise to all weights: initial zeros and ones would hide mix-ups."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def save_ours(path: Path, config: GPTConfig, tok: tokenizer.Tokenizer) -> GPT:
    torch.manual_seed(0)
    model = GPT(config).eval()
    add_noise(model)
    checkpoint.save(path, model, checkpoint.TokenizerFiles(tok, config), {"step": 1, "val_loss": 2.5})
    return model


@pytest.mark.parametrize("kind", ["bpe", slow("bytes")])
def test_transformers_loads_our_checkpoints(tmp_path: Path, kind: str) -> None:
    tok = tokenizer.train_tokenizer([make_text()], 400) if kind == "bpe" else tokenizer.bytes_tokenizer()
    config = GPTConfig(tok.vocab_size, 64, 2, 4, 32, dropout=0.1)
    model = save_ours(tmp_path / "c", config, tok)
    assert_equal_to_transformers(tmp_path / "c")
    loaded_model = checkpoint.load(tmp_path / "c", CPU)
    assert loaded_model.model.config == config
    assert loaded_model.tokenizer.fingerprint == tok.fingerprint
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded_model.model.state_dict()[name], tensor)


@pytest.mark.parametrize("properties", [{"positions": "rotary"}, {"window": 5}])
def test_unsupported_shapes_use_our_model_type(tmp_path: Path, properties: dict[str, Any]) -> None:
    tok = tokenizer.bytes_tokenizer()
    config = GPTConfig(257, 64, 2, 4, 32, dropout=0.1, **properties)
    model = save_ours(tmp_path / "c", config, tok)
    config_json = json.loads((tmp_path / "c" / "config.json").read_text())
    assert (config_json["model_type"], config_json["positions"]) == ("gpt", config.positions)
    with pytest.raises(ValueError, match="gpt"):
        AutoConfig.from_pretrained(tmp_path / "c")
    loaded_model = checkpoint.load(tmp_path / "c", CPU)
    assert loaded_model.model.config == config
    idx = torch.randint(257, (2, 30))
    with torch.no_grad():
        assert torch.equal(loaded_model.model(idx), model(idx))
    for key in ("positions", "n_head"):
        (tmp_path / "c" / "config.json").write_text(json.dumps({k: v for k, v in config_json.items() if k != key}))
        with pytest.raises(UserError, match=f"{key} is None"):
            model_config.load_config(tmp_path / "c")


def test_checkpoint_has_one_tied_tensor_and_no_pickle(run_folder: Path) -> None:
    path = folder.find_checkpoint(str(run_folder))
    names = set(load_file(path / "model.safetensors"))
    assert "transformer.wte.weight" in names
    assert not any("lm_head" in name for name in names)
    assert {p.name for p in path.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "tokenizer.tiktoken", "gpt.json", "checksums.json", "training.json", "training.safetensors",
    }  # fmt: skip


@pytest.fixture
def gpt2_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Saves a random GPT-2 with Transformers, without a tokenizer: 50,257 ids imply GPT-2's vocabulary."""
    if not SHARED.exists():
        pytest.skip("../shared is not in a user's checkout")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(GPT2_RANKS))
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=24, n_positions=48))
    add_noise(model)
    model.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_transformers_checkpoints_are_loaded(gpt2_folder: Path) -> None:
    assert gpt.load(gpt2_folder, device="cpu").tokenizer.name == "gpt2"
    assert_equal_to_transformers(gpt2_folder, with_tokenizer=False)


def test_old_gpt2_files_are_loaded(gpt2_folder: Path) -> None:
    """The first GPT-2 on the Hub has tensor names without a prefix, and mask buffers."""
    tensors = load_file(gpt2_folder / "model.safetensors")
    expected = gpt.load(gpt2_folder, device="cpu").model.state_dict()
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old["h.0.attn.bias"] = torch.tril(torch.ones(1, 1, 48, 48))
    old["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    old["lm_head.weight"] = old["wte.weight"].clone()
    save_file(old, gpt2_folder / "model.safetensors")
    loaded_model = gpt.load(gpt2_folder, device="cpu")
    assert all(torch.equal(loaded_model.model.state_dict()[name], tensor) for name, tensor in expected.items())


def test_sharded_weights_are_loaded(gpt2_folder: Path) -> None:
    weights = gpt.load(gpt2_folder, device="cpu").model.state_dict()
    GPT2LMHeadModel.from_pretrained(gpt2_folder).save_pretrained(gpt2_folder.parent / "parts", max_shard_size="2MB")
    assert len(list((gpt2_folder.parent / "parts").glob("model-*.safetensors"))) > 1
    parts = gpt.load(gpt2_folder.parent / "parts", device="cpu").model.state_dict()
    assert all(torch.equal(parts[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("with_old_shards", [False, True])
def test_single_file_takes_precedence_over_an_old_index(gpt2_folder: Path, with_old_shards: bool) -> None:
    """Transformers prefers the single file too. The index can name missing files."""
    folder, model = gpt2_folder.parent / "both", GPT2LMHeadModel.from_pretrained(gpt2_folder)
    model.save_pretrained(folder, max_shard_size="2MB")
    old = {path.name: path.read_bytes() for path in folder.glob("model*")}
    with torch.no_grad():
        model.transformer.wte.weight += 1
    model.save_pretrained(folder)
    for name, data in old.items():
        if with_old_shards or name.endswith(".json"):
            (folder / name).write_bytes(data)
    their_embedding = GPT2LMHeadModel.from_pretrained(folder).transformer.wte.weight
    assert torch.equal(gpt.load(folder, device="cpu").model.wte.weight, their_embedding)
    assert torch.equal(their_embedding, model.transformer.wte.weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "has no max_position_embeddings, num_hidden_layers"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"tie_word_embeddings": False}, r"lm_head.weight is missing"),
        ({"n_inner": 7}, "config.json (expects|requires)"),
        ({"n_layer": 10**9}, "n_layer is 1000000000"),
        ({"n_layer": 3}, "is missing from the weights|config.json (expects|requires)"),
        ({"n_layer": 1}, "that config.json does not expect"),
        ({"vocab_size": 1000}, r"no tokenizer, and its vocabulary of 1,000|has the shape"),
    ],
)
def test_invalid_config_json_is_an_error(gpt2_folder: Path, changes: dict[str, object], message: str) -> None:
    values = json.loads((gpt2_folder / "config.json").read_text())
    (gpt2_folder / "config.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(UserError, match=message):
        gpt.load(gpt2_folder, device="cpu")


def test_damaged_transformers_weights_are_an_error(gpt2_folder: Path) -> None:
    path = gpt2_folder / "model.safetensors"
    original, weights = path.read_bytes(), load_file(path)
    for damaged in (original[: len(original) // 2], b"\xff" * 64 + original):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged|config.json (expects|requires)"):
            checkpoint.load(gpt2_folder, CPU)
    save_file(weights | {"transformer.h.0.ln_1.bias": torch.zeros(24, dtype=torch.int32)}, path)
    with pytest.raises(UserError, match="ln_1.bias is I32; F32, F16, BF16 can be read"):
        checkpoint.load(gpt2_folder, CPU)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf.to_hf_config(GPTConfig(300, 8, 1, 1, 8), 299, 299)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UserError, match=r"no model\.safetensors") as error:
        gpt.load(tmp_path)
    assert "never opens" in error.value.hint


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    tok = tokenizer.bytes_tokenizer()
    save_ours(tmp_path / "ours", GPTConfig(257, 16, 1, 2, 16), tok)
    return tmp_path / "ours"


FILES = [
    "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    "tokenizer.tiktoken", "gpt.json", "checksums.json",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "gone"])
def test_damage_is_refused(ours: Path, name: str, damage: str) -> None:
    checkpoint.load(ours, CPU)
    path = ours / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    new = {"cut": path.read_bytes()[: len(data) // 2], "flipped": bytes(data), "emptied": b"", "gone": None}[damage]
    if new is None:
        path.unlink()
    else:
        path.write_bytes(new)
    with pytest.raises(UserError, match="damaged|missing|sha256"):
        checkpoint.load(ours, CPU)


def test_checksums_cannot_name_files_outside_the_folder(ours: Path) -> None:
    record = json.loads((ours / "checksums.json").read_text())
    record["sha256"]["../../secret"] = "0"
    record["self"] = folder._checksum_of(record["sha256"])
    (ours / "checksums.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="names a file outside its folder"):
        checkpoint.load(ours, CPU)


def test_equal_models_give_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_ours(tmp_path / name, GPTConfig(257, 16, 1, 2, 16), tokenizer.bytes_tokenizer())
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no umask")
def test_file_modes_follow_the_umask(ours: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(ours.stat().st_mode) == 0o777 & ~mask
    for path in ours.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_failed_save_leaves_nothing(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_space(path: Path, pieces: Iterable[bytes]) -> str:
        if path.name == "model.safetensors":
            raise OSError(28, "No space left on device")
        return files.write_pieces(path, pieces)

    monkeypatch.setattr(checkpoint, "write_pieces", raise_no_space)
    with pytest.raises(WorkError, match="No space left on device") as error:
        save_ours(ours.parent / "second", GPTConfig(257, 16, 1, 2, 16), tokenizer.bytes_tokenizer())
    assert error.value.exit_code == 1
    assert [path.name for path in ours.parent.iterdir()] == ["ours"]


# Run folders


def fake_run(path: Path, started: str, losses: dict[int, float | None]) -> Path:
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"started": started}))
    for step, loss in losses.items():
        (path / folder.step_name(step)).mkdir()
        (path / folder.step_name(step) / "config.json").write_text("{}")
        (path / folder.step_name(step) / "gpt.json").write_text(json.dumps({"val_loss": loss}))
        folder.write_checksums(path / folder.step_name(step))
    return path


def test_checkpoints_are_found_by_name(workdir: Path) -> None:
    old = fake_run(Path("runs/old"), "2026-01-02", {10: 3.0, 20: 2.0, 30: 2.5})
    new = fake_run(Path("runs/new"), "2026-01-03", {5: None})
    fake_run(Path("runs/empty"), "2026-01-04", {})
    assert folder.find_checkpoint(None) == new / "step-000005"
    assert folder.newest_run(file=folder.RECORD) == Path("runs/empty")
    assert folder.find_checkpoint("runs/old") == old / "step-000020"
    assert folder.find_checkpoint("runs/old:best") == old / "step-000020"
    assert folder.find_checkpoint("runs/old:latest") == old / "step-000030"
    assert folder.find_checkpoint("runs/old:step-10") == old / "step-000010"
    assert folder.find_checkpoint("runs/old/step-000010") == old / "step-000010"
    for name, message in {
        "runs/old:step-11": "has no checkpoint step-11",
        "runs/none": "there is no run or checkpoint",
        "runs/none:best": "there is no run",
        "runs/empty": "no checkpoint yet",
        "runs": "is not a run or a checkpoint",
    }.items():
        with pytest.raises(UserError, match=message):
            folder.find_checkpoint(name)
    shutil.rmtree("runs")
    with pytest.raises(UserError, match="no run with a checkpoint"):
        folder.find_checkpoint(None)


def test_pruning_keeps_the_newest_and_the_best(workdir: Path) -> None:
    run = fake_run(Path("r"), "", {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: 2.0})
    folder.prune(run, keep=2)
    assert [entry.step for entry in folder.checkpoints(run)] == [2, 4, 5]
    folder.write_index(run)
    index = json.loads((run / "index.json").read_text())
    assert (index["best"], index["latest"]) == ("step-000002", "step-000005")
    # A rollback to ``newest`` deletes later checkpoints, even the best.
    run = fake_run(Path("again"), "", {1: 3.0, 2: 1.0, 3: 2.0, 4: 0.5, 5: 2.0})
    folder.prune(run, keep=1, newest=3)
    assert [entry.step for entry in folder.checkpoints(run)] == [2, 3]


def test_pruning_renames_checkpoints_before_deleting_them(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a kill after the rename, before the deletion."""
    run = fake_run(Path("r"), "", {1: None, 2: None, 3: None})
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    folder.prune(run, keep=1)
    assert [entry.step for entry in folder.checkpoints(run)] == [3]


def test_newest_checkpoint_is_best_without_losses(workdir: Path) -> None:
    run = fake_run(Path("r"), "", {1: None, 2: None})
    (run / "step-000002/gpt.json").write_text('{"val_loss": 1e999}')
    assert folder.best(folder.checkpoints(run)).step == 2
    assert folder.checkpoints(run)[1].val_loss is None


def test_existing_run_names_get_a_number(workdir: Path) -> None:
    assert [str(folder.create_run("r/x")) for _ in range(3)] == [str(Path(p)) for p in ("r/x", "r/x-2", "r/x-3")]
    Path("file").write_text("mine")
    assert str(folder.create_run("file")) == "file-2"
    with pytest.raises(UserError, match="cannot create the run folder"):
        folder.create_run("file/below")
    with pytest.raises(UserError, match="hf:a/b names a model on the Hugging Face Hub"):
        folder.create_run("hf:a/b")


@needs_shared
def test_checkpoints_contain_the_gpt2_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(GPT2_RANKS))
    save_ours(tmp_path / "c", GPTConfig(50_257, 64, 1, 2, 8), importing.gpt2_tokenizer())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "nothing"))  # The checkpoint contains the vocabulary.
    assert_equal_to_transformers(tmp_path / "c")
