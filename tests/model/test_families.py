"""Model families compared with Transformers."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import vocabularies
from conftest import Gpt, make_text, more, one_line_of_what_and_what_next, slow
from models import CPU, FAMILIES, engine_of, loud, ours_with, save
from safetensors.torch import load_file, save_file

import gpt as library
from gpt.config.device import Compute
from gpt.config.model import PRESETS, GPTConfig, RopeScaling
from gpt.config.sample import SampleConfig
from gpt.decoding.context import Context
from gpt.decoding.engine import Request
from gpt.model.decoder import GPT
from gpt.runs import checkpoint, hf
from gpt.system.errors import UserError

transformers = pytest.importorskip("transformers")

IDS, EOT = 257, 256
# One shape per family, and nine more for `make test-more`
SHAPES = [(family, 0) for family in FAMILIES] + [more(family, n) for family in FAMILIES for n in range(1, 10)]


def random_shape(family: str, number: int) -> GPTConfig:
    rng = random.Random(f"{family} {number}")
    heads, layers = rng.choice([2, 4, 6]), rng.randint(2, 4)
    properties: dict[str, Any] = FAMILIES[family] | {"tied": rng.random() < 0.5, "n_inner": rng.choice([None, 40])}
    properties["layer_norm_epsilon"] = rng.choice([1e-5, 1e-6, 1e-3])
    if family == "gpt2":
        return GPTConfig(IDS, 48, layers, heads, 8 * heads, **properties)
    properties["n_kv_head"] = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    properties["head_dim"] = rng.choice([None, 4, 16])
    properties["rope_base"] = rng.choice([10_000.0, 500_000.0, 100.0])
    properties["rope_scaling"] = rng.choice([None, RopeScaling(8.0, 1.0, 4.0, 16), RopeScaling(2.0, 1.0, 2.0, 24)])
    window_choices = {
        "mistral": [range(layers)],
        "qwen2": [(), (), range(1, layers)],
        "qwen3": [(), range(1, layers, 2), rng.sample(range(layers), 2)],
    }
    windowed = tuple(sorted(rng.choice(window_choices.get(family, [()]))))
    # With a window of 1, Transformers' cache keeps all columns instead of none.
    properties |= {"window": rng.choice([2, 5, 11]), "window_layers": windowed} if windowed else {}
    return GPTConfig(IDS, 48, layers, heads, 8 * heads, **properties)


def generate_ids(model: GPT, prompt: list[int], **settings: Any) -> list[list[int]]:
    """Returns the ids of the greedy text, or of the best hypotheses."""
    config = SampleConfig(max_tokens=24, **settings)
    context = Context(model, CPU, max(1, config.beam))
    updates = list(engine_of(context, [Request(prompt, config)], config, eot=EOT).run())
    if config.beam:
        return [hypothesis.ids for hypothesis in updates[-1].best]
    return [[token.id for update in updates for token in update.tokens]]


@pytest.mark.parametrize(("family", "number"), SHAPES)
def test_family_matches_transformers(tmp_path: Path, family: str, number: int) -> None:
    config = random_shape(family, number)
    assert config.layout == family
    model = loud(config, spread=0.1)
    save(tmp_path / "ours", model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    assert type(reference).__name__ == hf.FAMILIES[family].architecture
    stored = checkpoint.to_stored(config, model.state_dict())
    state = reference.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in stored.items())
    assert set(state) - set(stored) <= ({hf.UNEMBEDDING} if config.tied else set())

    x = torch.randint(IDS, (2, 40))
    with torch.no_grad():
        assert torch.allclose(model(x), reference(x).logits, atol=1e-4, rtol=0)
    prompt = x[:1, :20]
    for beams in (1, 3):
        expected = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False, num_beams=beams,
            num_return_sequences=beams, eos_token_id=None, pad_token_id=EOT,
        )  # fmt: skip
        settings = {"beam": beams, "length_penalty": 1.0} if beams > 1 else {"greedy": True}
        assert generate_ids(model, prompt[0].tolist(), **settings, ignore_eot=True) == expected[:, 20:].tolist()

    reference.save_pretrained(tmp_path / "theirs")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "theirs" / name).write_bytes((tmp_path / "ours" / name).read_bytes())
    for folder in ("ours", "theirs"):
        loaded = checkpoint.load(tmp_path / folder, CPU.device).model
        assert loaded.config == config
        assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    prepared = library.load(tmp_path / "ours", device="cpu", dtype="float32", for_decoding=True).model
    with torch.no_grad():
        assert torch.allclose(prepared(x), model(x), atol=1e-4)


@pytest.mark.parametrize(("family", "number"), SHAPES)
def test_loss_and_gradients_match_transformers(family: str, number: int) -> None:
    config = random_shape(family, number)
    hf_config = hf.to_hf_config(config, EOT, EOT)
    model_class = getattr(transformers, hf.FAMILIES[family].architecture)
    torch.manual_seed(1)
    reference = model_class(model_class.config_class.from_dict(hf_config))
    model = ours_with(reference, config).train()
    x = torch.randint(IDS, (3, 33))
    losses = [
        F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        for logits in (model(x[:, :-1]), reference.train()(x[:, :-1]).logits)
    ]
    assert torch.allclose(*losses, atol=1e-5)
    for loss in losses:
        loss.backward()
    gradients = checkpoint.to_stored(config, {name: p.grad for name, p in model.named_parameters()})
    for name, p in reference.named_parameters():
        assert torch.allclose(gradients[name], p.grad, atol=1e-5), name


@pytest.mark.parametrize("preset", ["smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b", "mistral-7b"])
def test_preset_configs_round_trip(preset: str) -> None:
    config = PRESETS[preset].model
    hf_config = hf.to_hf_config(config, 0, [1, 2])
    assert hf.from_hf_config(json.loads(json.dumps(hf_config)), "it") == config
    config_class = getattr(transformers, hf.FAMILIES[config.layout].architecture).config_class
    reference = config_class.from_dict(hf_config)
    for written in (reference.to_dict(), reference.to_diff_dict()):
        assert hf.from_hf_config(json.loads(json.dumps(written, default=str)), "it") == config


@pytest.mark.parametrize(
    ("family", "tokenizer", "ends"),
    [
        ("qwen3", "qwen", ["<|im_end|>", "<|endoftext|>"]),
        slow("llama", "llama3", ["<|end_of_text|>", "<|eot_id|>"]),
        more("qwen2", "qwen", ["<|im_end|>"]),
        more("mistral", "mistral", ["</s>"]),
        more("gpt2", "gpt2", ["<|endoftext|>"]),
    ],
)
def test_fine_tuned_model_loads_in_transformers(
    gpt: Gpt, workdir: Path, family: str, tokenizer: str, ends: list[str]
) -> None:
    """Fine-tuning keeps the family, tokenizer, and begin and end ids."""
    tokenizer_json = json.loads((vocabularies.write(tokenizer, Path("theirs")) / "tokenizer.json").read_text())
    size = len(tokenizer_json["model"]["vocab"])
    config = replace(random_shape(family, 1), vocab_size=size + 40, window=None, window_layers=None)
    torch.manual_seed(0)
    model_class = getattr(transformers, hf.FAMILIES[config.layout].architecture)
    added_tokens = {token["content"]: token["id"] for token in tokenizer_json["added_tokens"]}
    eos = [added_tokens[word] for word in ends]
    model_class(model_class.config_class.from_dict(hf.to_hf_config(config, 0, eos))).save_pretrained("theirs")
    Path("book.txt").write_bytes(make_text(800).encode())
    done = gpt("train", "book.txt", "--init", "theirs", "--steps", "2", "-o", "run", "--quiet", "--device", "cpu")
    assert done.code == 0, done.err
    saved_folder = Path("run/step-000002")
    assert json.loads((saved_folder / "config.json").read_text())["model_type"] == config.layout
    reference = transformers.AutoModelForCausalLM.from_pretrained(saved_folder, dtype=torch.float32).eval()
    model = library.load(saved_folder, device="cpu")
    eos_token_id = reference.generation_config.eos_token_id
    assert set(eos) == set(eos_token_id if isinstance(eos_token_id, list) else [eos_token_id])
    ids = model.tokenizer.prompt("the cat sat")
    assert transformers.AutoTokenizer.from_pretrained(saved_folder)("the cat sat")["input_ids"] == ids
    with torch.no_grad():
        assert torch.allclose(model.model(torch.tensor([ids])), reference(torch.tensor([ids])).logits, atol=1e-4)


# Defaults of missing keys

MINIMAL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 32,
    "max_position_embeddings": 48,
}  # fmt: skip


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt2"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"num_key_value_heads": 4},
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}},
        {"rope_theta": 50.0, "rope_scaling": {"type": "default"}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    ],
)
def test_missing_config_keys_have_transformers_defaults(family: str, keys: dict[str, Any]) -> None:
    hf_config = {"model_type": family, **MINIMAL, **keys}
    config = hf.from_hf_config(json.loads(json.dumps(hf_config)), "it")
    reference = getattr(transformers, hf.FAMILIES[family].architecture).config_class.from_dict(hf_config)
    assert config == hf.from_hf_config(reference.to_dict(), "it")
    assert config.rope_base == reference.rope_parameters["rope_theta"]


def test_missing_gpt2_config_keys_have_transformers_defaults() -> None:
    hf_config = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 8}
    config = hf.from_hf_config(hf_config, "it")
    reference = transformers.GPT2Config.from_dict(hf_config)
    assert config.dropout == reference.resid_pdrop
    assert (config.tied, config.layer_norm_epsilon) == (reference.tie_word_embeddings, reference.layer_norm_epsilon)
    without_positions = {key: value for key, value in hf_config.items() if key != "n_positions"}
    assert hf.from_hf_config(without_positions | {"n_ctx": 8}, "it") == config


# Unsupported features

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "rope_type is 'dynamic'"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one set for all layers"),
        ("llama", {"rope_scaling": "big"}, "rope_parameters is 'big'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "no factor, low_freq_factor, high_freq_factor"),
        ("llama", {"rope_scaling": LLAMA3 | {"factor": 1e99}}, "factor is 1e"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "high must be greater"),
        ("llama", {"rope_theta": 5.0, "rope_scaling": LLAMA3 | {"rope_theta": 6.0}}, "rope_theta is both 6.0 and 5.0"),
        ("llama", {"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 9.0}}, "contradict each other"),
        ("llama", {"rope_theta": -1}, "rope_base is -1"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("llama", {"num_local_experts": 8}, "num_local_experts is 8"),
        ("qwen3", {"num_experts": 128}, "num_experts is 128"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("llama", {"residual_multiplier": 0.2}, "residual_multiplier is 0.2"),
        ("llama", {"embedding_multiplier": 12}, "embedding_multiplier is 12"),
        ("llama", {"logits_scaling": 8}, "logits_scaling is 8"),
        ("llama", {"is_causal": False}, "is_causal is False"),
        ("llama", {"sliding_window": 9}, "sliding_window is 9"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "contradict"),
        ("mistral", {"sliding_window": "9"}, "window is '9'"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types is"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is -1"),
        ("llama", {"hidden_size": 10**12}, "n_embd is 1000000000000"),
        ("llama", {"num_attention_heads": 3}, "not divisible"),
        ("llama", {"num_key_value_heads": 5}, "n_kv_head 5"),
        ("llama", {"num_hidden_layers": True}, "n_layer is True"),
        ("qwen3", {"head_dim": 7}, "even width of a head"),
        ("llama", {"rms_norm_eps": float("nan")}, "layer_norm_epsilon is nan"),
        ("llama", {"tie_word_embeddings": "no"}, "tied is 'no'"),
        ("llama", {"attention_dropout": 2}, "dropout is 2"),
    ],
)  # fmt: skip
def test_unsupported_config_values_are_refused(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        hf.from_hf_config({"model_type": family, **MINIMAL, **change}, "config.json")
    assert "config.json" in error.value.message
    assert len(error.value.message) < 300


def test_unknown_family_is_refused_with_a_list(gpt: Gpt, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", **MINIMAL}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    done = gpt("sample", "x", "-m", tmp_path)
    one_line_of_what_and_what_next(done, "describes a model of type 'gemma3'")
    assert "gpt runs GPT-2, Llama, Mistral, Qwen2, Qwen2.5 and Qwen3 models" in done.err


def test_weights_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    config = random_shape("qwen2", 0)
    model = loud(config, spread=0.1)
    save(tmp_path / "c", model)
    (tmp_path / "c" / "checksums.json").unlink()
    (tmp_path / "c" / "gpt.json").unlink()
    good, hf_config = (
        load_file(tmp_path / "c" / "model.safetensors"),
        json.loads((tmp_path / "c/config.json").read_text()),
    )
    query = "model.layers.1.self_attn.q_proj.weight"
    for change, message in (
        ({query: good[query].T.contiguous()[:4]}, "q_proj.weight has the shape"),
        ({"model.layers.1.self_attn.o_proj.bias": torch.zeros(3)}, "o_proj.bias that config.json does not expect"),
        ({"model.layers.0.mlp.up_proj.weight": None}, "up_proj.weight is missing|expects|requires"),
        ({"model.layers.1.self_attn.k_proj.bias": None}, "k_proj.bias is missing"),
        ({query: good[query].to(torch.int8)}, "q_proj.weight is I8"),
    ):
        tensors = {name: tensor for name, tensor in (good | change).items() if tensor is not None}
        save_file(tensors, tmp_path / "c" / "model.safetensors")
        with pytest.raises(UserError, match=message):
            checkpoint.load(tmp_path / "c", CPU.device)
    # Base models lack the prefix `model.`. Older Transformers versions saved buffers.
    base = {name.removeprefix("model."): tensor for name, tensor in good.items()}
    base["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(base, tmp_path / "c" / "model.safetensors")
    loaded = checkpoint.load(tmp_path / "c", CPU.device).model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    # `gpt` never guesses whether embeddings are tied.
    untied = {name: tensor for name, tensor in good.items() if name != hf.UNEMBEDDING}
    save_file(untied, tmp_path / "c" / "model.safetensors")
    (tmp_path / "c" / "config.json").write_text(json.dumps(hf_config | {"tie_word_embeddings": False}))
    with pytest.raises(UserError, match=r"lm_head.weight is missing"):
        checkpoint.load(tmp_path / "c", CPU.device)


# Memory


def test_weights_too_large_for_memory_are_refused(gpt: Gpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", loud(GPTConfig.of("modern", 257, 48, 2, 2, 64), spread=0.1))
    parameter_count = sum(
        parameter.numel() for parameter in GPT(GPTConfig.of("modern", 257, 48, 2, 2, 64)).parameters()
    )
    monkeypatch.setattr(Compute, "memory", lambda self: 3 * parameter_count)
    command = ("sample", "x", "-m", tmp_path / "c", "-n", "4", "--device", "cpu")
    done = gpt(*command)
    assert done.code == 0, done.err
    assert "bfloat16" in done.err
    one_line_of_what_and_what_next(gpt(*command, "--dtype", "float32"), "the weights of")
    assert gpt(*command, "--dtype", "int8").code == 0
    with pytest.raises(UserError, match="the weights of"):
        library.load(tmp_path / "c", device="cpu")
