"""LoRA adapters: training, saving, merging, and exchange with PEFT."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Gpt, one_line_of_what_and_what_next, slow
from models import SHAPES, save
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import gpt as library
from gpt.config import events
from gpt.config.model import GPTConfig
from gpt.config.train import LORA_ROLES
from gpt.model import lora, loss, memory
from gpt.model.decoder import GPT
from gpt.runs import adapter, checkpoint, folder, hf
from gpt.tokenizers.tokenizer import bytes_tokenizer

# PEFT uses an attribute name that Transformers 5 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
CPU = torch.device("cpu")


LORA: dict[str, Any] = {"lora_rank": 4, "dtype": "float32", "sample_every": 0}
OPTIONS = ("--lora-rank", "4", "--steps", "3", "--dtype", "float32")


@pytest.fixture
def base(run_folder: Path, workdir: Path) -> Path:
    """A checkpoint that tests can modify."""
    return Path(shutil.copytree(folder.find_checkpoint(str(run_folder)), workdir / "base"))


def scramble(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data.normal_(0, 0.2)


def model_with_adapters(config: GPTConfig, rank: int, targets: str = "all") -> GPT:
    torch.manual_seed(0)
    model = GPT(config)
    scramble(lora.adapt(model, rank, 2.0 * rank, targets))
    return model.eval()


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("targets", ["all", "mlp"])
def test_merged_weights_match_adapters(family: str, targets: str) -> None:
    config = SHAPES[family]
    model = model_with_adapters(config, 3, targets)
    merged = GPT(config)
    merged.load_state_dict({name: p for name, p in model.state_dict().items() if not name.endswith((".a", ".b"))})
    ids = torch.arange(16)[None]
    with torch.no_grad():
        before = merged(ids)
        lora.merge(merged, lora.adapters(model), 2.0, lora.find_roles(targets, config))
        assert torch.allclose(merged(ids), model(ids), atol=1e-5)
        assert not torch.allclose(before, model(ids), atol=1e-2)


@pytest.mark.parametrize("family", SHAPES)
def test_only_adapters_are_trained(family: str) -> None:
    config, ids = SHAPES[family], torch.arange(16)[None]
    model_before_training = GPT(config).eval()
    with torch.no_grad():
        before = model_before_training(ids)
        lora.adapt(model_before_training, 3, 6.0)
        assert torch.equal(model_before_training(ids), before)  # Matrix B starts at 0.
    model = model_with_adapters(config, 3)
    trained_names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained_names == set(lora.adapters(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in lora.adapters(model).items()}
    assert shapes == lora.adapter_shapes(config, 3, LORA_ROLES)
    assert len(shapes) == 2 * 4 * 2
    # Each stored tensor has one adapter, including fused tensors.
    stored_names = [
        name for name in hf.stored_tensors(config) if name.endswith(("_proj.weight", "c_attn.weight", "c_fc.weight"))
    ]
    assert sum(shape[0] // 3 for name, shape in shapes.items() if name.endswith(".a")) == len(stored_names)


def test_frozen_bfloat16_weights_keep_their_dtype() -> None:
    linear = torch.nn.Linear(8, 8).requires_grad_(False)
    x = torch.randn(4, 8)
    adapted = lora.LowRank(linear.bfloat16(), 2, 1.0, (lora.AdaptedMatrix(("up",), 0, 8),))
    assert (adapted.a.dtype, adapted.b.dtype) == (torch.float32, torch.float32)
    adapted.b.data.normal_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = adapted(x)
    expected = x @ (linear.weight.float() + adapted.b @ adapted.a).T + linear.bias.float()
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), expected, atol=0.05)
    out.float().square().sum().backward()
    assert adapted.a.grad is not None
    assert adapted.a.grad.dtype == torch.float32


@pytest.mark.parametrize("vocab_size", [301, 320])
def test_loss_with_a_frozen_unembedding_matches_autograd(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunked loss and gradient match autograd with a trained unembedding."""
    torch.manual_seed(0)
    monkeypatch.setattr(memory, "LOGITS_ON_CPU", vocab_size * 13)
    monkeypatch.setattr(memory, "MIN_POSITIONS_PER_CHUNK", 1)
    weight, x = torch.randn(vocab_size, 16), torch.randn(3, 50, 16, requires_grad=True)
    targets = torch.randint(0, vocab_size, (3, 50))
    targets[0, :7] = loss.IGNORED
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        results = []
        for is_trained in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                total = loss.tied_cross_entropy(x, weight.clone().requires_grad_(is_trained), targets)
            (grad,) = torch.autograd.grad(total / 7, x)
            results.append((total.item(), grad))
        assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
        assert torch.allclose(results[0][1], results[1][1], atol=tolerance)
        assert not results[0][1][0, :7].any()


# PEFT


def load_transformers(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def save_base(config: GPTConfig, path: Path) -> Path:
    torch.manual_seed(0)
    return save(path, GPT(config))


def write_adapter(model: GPT, base: Path, path: Path, rank: int, targets: str = "all") -> None:
    """Writes adapters as a run does, with alpha twice the rank."""
    config = adapter.Adapter(str(base), rank, 2.0 * rank, folder.weight_checksums(base))
    store = partial(adapter.contents, config, lora.find_roles(targets, model.config))
    files = checkpoint.TokenizerFiles(bytes_tokenizer(), model.config)
    meta = {"step": 1, "adapter": {"sha256": config.sha256}}
    checkpoint.write(path, checkpoint.contents(model.config, lora.adapters(model), files, meta, store))


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("targets", ["all", slow("attention"), "output,down", slow("query,value")])
def test_peft_loads_gpt_adapters(family: str, targets: str, workdir: Path) -> None:
    import peft  # The import takes seconds.

    config = SHAPES[family]
    if family == "gpt2" and targets == "query,value":
        targets = "query,key,value"
    base = save_base(config, workdir / "base")
    model = checkpoint.load(base, CPU).model
    scramble(lora.adapt(model, 3, 6.0, targets))
    write_adapter(model, base, workdir / "adapter", 3, targets)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        expected = model(ids)
        # PEFT warns about missing keys, and warnings are errors.
        peft_model = peft.PeftModel.from_pretrained(load_transformers(base), workdir / "adapter")
        assert torch.allclose(peft_model(ids).logits, expected, atol=1e-4)
        assert torch.allclose(checkpoint.load(workdir / "adapter", CPU).model(ids), expected, atol=1e-5)
        assert not torch.allclose(load_transformers(base)(ids).logits, expected, atol=1e-2)


PEFT_TARGETS = {"gpt2": ["c_attn", "mlp.c_proj"], "llama": "all-linear", "qwen2": ["q_proj", "v_proj"]}


def make_peft_adapter(config: GPTConfig, workdir: Path, **settings: Any) -> tuple[Any, Path]:
    import peft  # The import takes seconds.

    base = save_base(config, workdir / "base")
    targets = PEFT_TARGETS.get(config.layout, ["o_proj", "gate_proj"])
    lora_settings = {"r": 3, "lora_alpha": 7, "target_modules": targets, "init_lora_weights": False, **settings}
    torch.manual_seed(1)
    lora_config = peft.LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=config.layout == "gpt2", **lora_settings)
    model = peft.get_peft_model(load_transformers(base), lora_config).eval()
    model.save_pretrained(workdir / "theirs", save_embedding_layers=False)
    return model, workdir / "theirs"


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("use_rslora", [False, True])
def test_gpt_loads_peft_adapters(family: str, use_rslora: bool, workdir: Path) -> None:
    peft_model, path = make_peft_adapter(SHAPES[family], workdir, use_rslora=use_rslora)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.allclose(library.load(path).model(ids), peft_model(ids).logits, atol=1e-4)


@pytest.mark.parametrize("family", SHAPES)
def test_gradients_match_peft(family: str, workdir: Path) -> None:
    import peft  # The import takes seconds.

    config = SHAPES[family]
    base = save_base(config, workdir / "base")
    model = checkpoint.load(base, CPU).model.train()
    scramble(lora.adapt(model, 3, 6.0))
    write_adapter(model, base, workdir / "adapter", 3)
    peft_model = peft.PeftModel.from_pretrained(load_transformers(base), workdir / "adapter", is_trainable=True)
    ids = torch.randint(0, 257, (2, 17))
    x, y = ids[:, :-1], ids[:, 1:].contiguous()
    our_loss = loss.tied_cross_entropy(model.trunk(x), model.unembedding, y)
    our_loss.backward()
    peft_loss = torch.nn.functional.cross_entropy(peft_model(x).logits.flatten(0, 1), y.flatten(), reduction="sum")
    peft_loss.backward()
    assert our_loss.item() == pytest.approx(peft_loss.item(), rel=1e-5)
    grads = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    adapter_config = adapter.Adapter(str(base), 3, 6.0, {})
    stored = adapter.contents(adapter_config, lora.find_roles("all", config), config, grads)[adapter.FILE]
    peft_grads = {
        name.replace(".default.", "."): p.grad for name, p in peft_model.named_parameters() if p.grad is not None
    }
    assert set(stored) == set(peft_grads)
    for name, grad in stored.items():
        assert torch.allclose(torch.from_numpy(grad), peft_grads[name], rtol=1e-3, atol=1e-4), name


def test_commands_accept_a_peft_folder(gpt: Gpt, workdir: Path, second_text: Path) -> None:
    _, path = make_peft_adapter(SHAPES["llama"], workdir)
    assert json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(workdir / "base")
    assert gpt("sample", "the", "-m", path, "-n", "4").code == 0
    assert json.loads(gpt("params", path, "--json").out)["config"]["n_embd"] == 32
    assert gpt("eval", second_text, "-m", path).code == 0
    result = library.train(second_text, init=path, steps=2, **LORA)
    assert library.load(result.run).model.config.layout == "llama"
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    one_line_of_what_and_what_next(gpt("sample", "-m", path), "has no adapter_model.safetensors")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("alpha_pattern", {"q_proj": 4}),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("init_lora_weights", "pissa"),
        ("a_later_feature", "on"),
        ("r", 2**30),
        ("lora_alpha", float("inf")),
    ],
)
def test_unsupported_peft_settings_are_refused(gpt: Gpt, workdir: Path, key: str, value: Any) -> None:
    path = save_base(SHAPES["llama"], workdir / "base")
    model = checkpoint.load(path, CPU).model
    lora.adapt(model, 3, 6.0)
    write_adapter(model, path, workdir / "adapter", 3)
    for name in ("gpt.json", "checksums.json", "config.json"):
        (workdir / "adapter" / name).unlink()
    config_path = workdir / "adapter" / "adapter_config.json"
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | {key: value}))
    expected_name = {"r": "rank", "lora_alpha": "scale"}.get(key, key)
    done = gpt("sample", "-m", workdir / "adapter")
    assert (done.code, done.err.count("error: ")) == (2, 1)
    assert expected_name in done.err


def test_invalid_adapter_folders_are_refused(gpt: Gpt, workdir: Path) -> None:
    _, path = make_peft_adapter(SHAPES["mistral"], workdir, target_modules=["q_proj", "lm_head"])
    one_line_of_what_and_what_next(gpt("sample", "-m", path), "has a tensor base_model.model.lm_head.lora_A.weight")
    (workdir / "other").mkdir()
    _, path = make_peft_adapter(SHAPES["llama"], workdir / "other")
    arrays = load_file(path / "adapter_model.safetensors")
    del arrays["base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"]
    save_file(arrays, path / "adapter_model.safetensors")
    assert "layers.1.self_attn.k_proj.lora_B.weight is missing" in gpt("sample", "-m", path).err
    peft_config = json.loads((path / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(path)}
    (path / "adapter_config.json").write_text(json.dumps(peft_config))
    one_line_of_what_and_what_next(gpt("sample", "-m", path), "is in a chain of more than 100 adapters")


# Targets


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("query", "query, key, value are a single tensor in gpt2"),
        ("output,gate", "this model has no gate"),
        ("q_proj", 'there is no "q_proj"'),
        ("", 'there is no ""'),
    ],
)
def test_invalid_targets_are_refused(gpt: Gpt, base: Path, second_text: Path, targets: str, message: str) -> None:
    done = gpt("train", second_text, "--init", base, *OPTIONS, "--lora-targets", targets)
    assert (done.code, done.err.count("error: ")) == (2, 1)
    assert message in done.err
    assert not Path("runs").exists()


def test_lora_targets_without_a_rank_are_refused(gpt: Gpt, base: Path, second_text: Path) -> None:
    done = gpt("train", second_text, "--init", base, "--lora-targets", "mlp")
    one_line_of_what_and_what_next(done, "--lora-targets needs --lora-rank")


# Runs


@pytest.mark.parametrize("family", ["gpt2", slow("qwen3")])
def test_run_trains_only_its_targets(family: str, workdir: Path, second_text: Path) -> None:
    import peft  # The import takes seconds.

    base = save_base(SHAPES[family], workdir / "base")
    result = library.train(second_text, init=base, steps=4, lora_targets="mlp,output", **LORA)
    record = json.loads((result.run / "run.json").read_text())
    assert record["settings"]["lora_targets"] == record["resolved"]["lora_targets"] == "mlp,output"
    tensors = load_file(result.checkpoint / "adapter_model.safetensors")
    assert not any("q_proj" in name or "c_attn" in name for name in tensors)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        tuned = library.load(result.run).model(ids)
        assert torch.allclose(
            peft.PeftModel.from_pretrained(load_transformers(base), result.checkpoint)(ids).logits, tuned, atol=1e-4
        )
    library.export(result.run, "merged")
    with torch.no_grad():
        assert torch.allclose(load_transformers(Path("merged"))(ids).logits, tuned, atol=1e-4)
    extended_run = library.resume(result.run, steps=6)
    assert extended_run.steps == 6


def test_run_saves_only_adapters(base: Path, second_text: Path) -> None:
    run_events: list[Any] = []
    checksums = folder.weight_checksums(base)
    result = library.train(second_text, init=base, steps=30, listen=run_events.append, **LORA)
    assert folder.weight_checksums(base) == checksums
    first_loss = next(event.val_loss for event in run_events if isinstance(event, events.EvalEvent))
    assert result.val_loss < first_loss
    assert not (result.checkpoint / "model.safetensors").exists()
    saved_tensors = load_file(result.checkpoint / "adapter_model.safetensors")
    assert len(saved_tensors) == 2 * 4 * library.load(base).model.config.n_layer
    assert json.loads((result.checkpoint / "gpt.json").read_text())["adapter"] == {"sha256": checksums}
    peft_config = json.loads((result.checkpoint / "adapter_config.json").read_text())
    assert (peft_config["r"], peft_config["lora_alpha"], peft_config["base_model_name_or_path"]) == (4, 8.0, str(base))
    assert json.loads((result.run / "run.json").read_text())["resolved"]["optimizer"] == "adamw"

    library.export(result.run, "merged")
    tuned, merged = library.load(result.run), library.load("merged")
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.allclose(tuned.model(ids), merged.model(ids), atol=1e-5)
        assert not torch.allclose(tuned.model(ids), library.load(base).model(ids), atol=1e-3)


@pytest.mark.slow
def test_exported_model_needs_no_base(gpt: Gpt, base: Path, second_text: Path) -> None:
    assert gpt("train", second_text, "--init", base, *OPTIONS).code == 0
    assert gpt("export", "-m", "runs/other", "-o", "merged").code == 0
    from_run = gpt("sample", "the", "-m", "runs/other", "--greedy").out
    assert gpt("sample", "the", "-m", "runs/other:latest", "--greedy").code == 0
    assert json.loads(gpt("params", "runs/other", "--json").out)["config"]["n_embd"] == 32
    base.rename("elsewhere")
    one_line_of_what_and_what_next(gpt("sample", "the", "-m", "runs/other"), "base, which does not exist")
    assert gpt("sample", "the", "-m", "merged", "--greedy").out == from_run


def test_changed_base_is_refused(gpt: Gpt, base: Path, second_text: Path) -> None:
    assert gpt("train", second_text, "--init", base, *OPTIONS).code == 0
    weights = load_file(base / "model.safetensors")
    weights["transformer.ln_f.bias"] += 1
    save_file(weights, base / "model.safetensors")
    one_line_of_what_and_what_next(gpt("sample", "the", "-m", "runs/other"), "base, whose weights have changed")


@pytest.mark.slow
def test_adapted_model_with_a_shorter_context_can_be_adapted_again(base: Path, second_text: Path) -> None:
    first = library.train(second_text, init=base, steps=4, block_size=16, **LORA)
    second = library.train(second_text, init=first.run, steps=4, out="two", **LORA)
    model = library.load(second.run).model
    assert model.config.block_size == 16
    full = library.train(second_text, init=second.run, steps=1, lr=0.0, out="whole", dtype="float32")
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.allclose(library.load(full.run).model(ids), model(ids), atol=1e-6)


def test_mismatched_adapters_are_refused(gpt: Gpt, base: Path, second_text: Path) -> None:
    done = gpt("train", second_text, "--init", base, "--lora-rank", "33")
    one_line_of_what_and_what_next(done, "lora-rank 33 is more than the model's width, 32")
    result = library.train(second_text, init=base, steps=1, **LORA)
    save_file({"x": torch.zeros(1)}, result.checkpoint / "adapter_model.safetensors")
    one_line_of_what_and_what_next(gpt("sample", "-m", result.run), "its sha256 has changed since it was saved")
    (result.checkpoint / "checksums.json").unlink()
    folder.write_checksums(result.checkpoint)
    one_line_of_what_and_what_next(
        gpt("sample", "-m", result.run), "has a tensor x that an adapter to its base does not expect"
    )
