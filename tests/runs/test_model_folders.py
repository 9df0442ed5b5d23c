"""Model folders from other programs, compared with Transformers: extra tensors, tokenizers, adapters."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vocabularies
from conftest import Gpt, make_text, one_line_of_what_and_what_next, slow
from models import CPU
from safetensors.torch import load_file, save_file, save_model

from gpt import api, load
from gpt.chat import chat
from gpt.config.model import GPTConfig
from gpt.model.decoder import GPT
from gpt.runs import checkpoint, folder
from gpt.system.errors import ModelWarning, UserError
from gpt.tokenizers.finding import find_tokenizer
from gpt.tokenizers.saving import save_tokenizer
from gpt.tokenizers.tokenizer import bytes_tokenizer, train_tokenizer

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT causes this warning.

LLAMA = GPTConfig(
    703, 64, 2, 2, 16, norm="rmsnorm", mlp="swiglu", positions="rotary", biases="none", layer_norm_epsilon=1e-6,
    tied=False, n_inner=32,
)  # fmt: skip
GPT2 = {"norm": "layernorm", "mlp": "gelu", "positions": "learned", "biases": "all", "n_inner": None}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Returns a function that writes a tiny Transformers model with the tokenizer ``form``."""

    def make(form: str = "smollm2", **shape: Any) -> Path:
        path = vocabularies.write(form, tmp_path / "theirs")
        tokenizer = find_tokenizer(str(path))
        torch.manual_seed(0)
        model = GPT(replace(LLAMA, **{"vocab_size": tokenizer.vocab_size, **shape}))
        torch.nn.init.normal_(model.get_submodule("wte").weight)
        files = checkpoint.contents(
            model.config, model.state_dict(), checkpoint.TokenizerFiles(bytes_tokenizer(), model.config), {}
        )
        save_file(
            {name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in files["model.safetensors"].items()},
            path / "model.safetensors",
        )
        config = json.loads(files["config.json"]) | {"bos_token_id": tokenizer.eot, "eos_token_id": tokenizer.eot}
        (path / "config.json").write_text(json.dumps(config))
        return path

    return make


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


def add_padding(path: Path) -> int:
    """Adds a token to a folder's tokenizer but no row to its embedding; returns the token's id."""
    values = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    size = find_tokenizer(str(path)).vocab_size
    values["added_tokens"].append({**values["added_tokens"][-1], "id": size, "content": "[PAD]", "special": True})
    (path / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    return size


def add_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(load_file(path / "model.safetensors") | tensors, path / "model.safetensors", {"format": "pt"})


def assert_equal_to_transformers(path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    x = torch.randint(400, (2, 20))
    with torch.no_grad():
        assert torch.allclose(checkpoint.load(path, CPU.device).model(x), theirs(x).logits, atol=1e-4)


# Extra tensors and left-over quantization settings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_differing_lm_head_overrides_tied_embeddings(
    make_folder: MakeFolder, gpt: Gpt, family: str, dtype: torch.dtype
) -> None:
    path = make_folder(tied=True, **(GPT2 if family == "gpt2" else {}))
    torch.manual_seed(1)
    size = find_tokenizer(str(path)).vocab_size
    add_tensors(path, {"lm_head.weight": torch.randn(size, 16).to(dtype)})
    with pytest.warns(ModelWarning, match=r"lm_head\.weight differs from the embedding"):
        assert_equal_to_transformers(path)
    result = gpt("sample", "the", "-m", path, "-n", 4, "--greedy")
    assert result.code == 0 and "differs from the embedding" in result.err
    assert gpt("export", "-m", path, "-o", path.parent / "out").code == 0
    config = json.loads((path.parent / "out/config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert_equal_to_transformers(path.parent / "out")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tied_models_can_store_only_the_lm_head(make_folder: MakeFolder, family: str) -> None:
    """safetensors' `save_model` stores a shared tensor only under its first name."""
    path = make_folder(tied=True, **(GPT2 if family == "gpt2" else {}))
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    save_model(model, str(path / "model.safetensors"), {"format": "pt"})
    assert "lm_head.weight" in load_file(path / "model.safetensors")
    assert_equal_to_transformers(path)
    api.export(path, path.parent / "out")
    assert_equal_to_transformers(path.parent / "out")


EXTRA_TENSORS = {
    "a head for values": {"v_head.summary.weight": torch.ones(1, 16), "v_head.summary.bias": torch.zeros(1)},
    "classes": {"score.weight": torch.ones(3, 16)},
    "numbers": {"step": torch.zeros((), dtype=torch.int64)},
}


@pytest.mark.parametrize("extra", EXTRA_TENSORS)
def test_extra_tensors_are_ignored_with_a_warning(make_folder: MakeFolder, extra: str) -> None:
    path = make_folder()
    add_tensors(path, {**EXTRA_TENSORS[extra], "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    with pytest.warns(ModelWarning, match=rf"{next(iter(sorted(EXTRA_TENSORS[extra])))}.* is not part of the decoder"):
        assert_equal_to_transformers(path)
    with pytest.warns(ModelWarning):  # Outside tests, Python shows the warning only once.
        api.export(path, path.parent / "out")
    assert_equal_to_transformers(path.parent / "out")


def test_unexpected_decoder_tensors_are_refused(make_folder: MakeFolder) -> None:
    path = make_folder()
    for name in ("model.layers.0.self_attn.q_norm.weight", "model.layers.7.mlp.up_proj.weight", "lm_head.bias"):
        before = (path / "model.safetensors").read_bytes()
        add_tensors(path, {name: torch.ones(8)})
        with pytest.raises(UserError, match=f"{name} that config.json does not expect"):
            checkpoint.load(path, CPU.device)
        (path / "model.safetensors").write_bytes(before)


@pytest.mark.parametrize(
    "leftover", [{"quantization_config": NF4}, {"quantization_config": {}}, {"compression_config": {"format": "pack"}}]
)
def test_quantization_config_of_unquantized_weights_is_ignored(
    make_folder: MakeFolder, leftover: dict[str, Any], gpt: Gpt
) -> None:
    path = make_folder()
    expected = load(path).generate("the", max_tokens=5, greedy=True)
    change(path / "config.json", **leftover)
    result = gpt("sample", "the", "-m", path, "-n", 5, "--greedy", "--no-echo")
    assert result.code == 0 and "its weights are not quantized: they are used as they are" in result.err
    assert result.out.rstrip("\n") == expected[0].rstrip("\n")
    assert gpt("params", path).code == 0
    add_tensors(path, {"model.layers.0.mlp.up_proj.weight": torch.ones(256, 1, dtype=torch.uint8)})
    result = gpt("sample", "the", "-m", path)
    one_line_of_what_and_what_next(result, f"{next(iter(leftover))} is")
    assert "hint: use the model in 16 or 32 bits" in result.err


# Tokens that are missing from tokenizer.json

TOKEN_FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
TOKEN_LISTS: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {
        "added_tokens_decoder": {"704": {**TOKEN_FLAGS, "content": "<|b|>"}, "703": {**TOKEN_FLAGS, "content": "<|a|>"}}
    },
    "added_tokens.json": {"<|a|>": 703, "<|b|>": 704},
    "special_tokens_map.json": {"additional_special_tokens": ["<|b|>", "<|a|>"], "pad_token": {"content": "[PAD]"}},
    "tokenizer_config.json, by name": {"extra_special_tokens": ["<|a|>"], "mask_token": "<|b|>", "sep_token": "cat"},
}


@pytest.mark.parametrize("listing", TOKEN_LISTS)
def test_added_tokens_keep_their_ids(make_folder: MakeFolder, listing: str, gpt: Gpt, tmp_path: Path) -> None:
    path = make_folder("smollm2")
    add_tensors(path, {name: torch.randn(706, 16) for name in ("model.embed_tokens.weight", "lm_head.weight")})
    change(path / "config.json", vocab_size=706)
    file = path / listing.partition(",")[0]
    config = (json.loads(file.read_text()) if file.exists() else {}) | TOKEN_LISTS[listing]
    file.write_text(json.dumps(config))
    for model_path in (path, tmp_path / "out"):
        theirs = transformers.AutoTokenizer.from_pretrained(model_path)
        model = load(model_path)
        for text in ("a<|a|>b <|b|> [PAD]c", "the cat sat<|im_end|>"):
            ids = theirs(text).input_ids
            assert model.tokenizer.prompt(text) == ids
            assert model.tokenizer.decode(ids) == theirs.decode(ids)
        if model_path == path:
            assert gpt("export", "-m", path, "-o", tmp_path / "out").code == 0


# Tokenizers with more ids than the model


@pytest.fixture(params=["llama2", slow("gaps"), slow("smollm2")])
def padded(make_folder: MakeFolder, request: pytest.FixtureRequest) -> Path:
    """Returns a model whose tokenizer has a padding token without an embedding row."""
    path = make_folder(request.param)
    add_padding(path)
    change(path / "tokenizer_config.json", pad_token="[PAD]")
    return path


def test_only_texts_with_the_padding_token_are_refused(padded: Path, gpt: Gpt, tmp_path: Path) -> None:
    size = checkpoint.peek(padded)[0].vocab_size
    theirs = transformers.AutoTokenizer.from_pretrained(padded)
    model = load(padded)
    assert model.tokenizer.vocab_size == size + 1
    assert model.tokenizer.prompt("the cat") == theirs("the cat").input_ids
    book = tmp_path / "book.txt"
    book.write_text(make_text(400) + " [PAD]")  # Documents do not parse special tokens.
    for words in (
        ["sample", "the", "-n", 5, "--greedy", "-m", padded],
        ["sample", "the", "-n", 5, "--beam", 3, "-m", padded],
        ["eval", book, "-m", padded],
        ["inspect", "neighbors", "the", "-m", padded],
        ["params", padded],
        ["export", "-m", padded, "-o", tmp_path / "out", "--dtype", "bfloat16"],
        ["sample", "the", "-n", 5, "-m", tmp_path / "out"],
    ):
        result = gpt(*words)
        assert result.code == 0, result.err
    one_line_of_what_and_what_next(
        gpt("sample", "the [PAD]", "-m", padded),
        f'the text contains "[PAD]", token {size}, but the model has {size} ids',
    )


def test_training_works_without_a_row_for_the_padding_token(padded: Path, gpt: Gpt, tmp_path: Path) -> None:
    size = checkpoint.peek(padded)[0].vocab_size
    book = tmp_path / "book.txt"
    book.write_text(make_text(2000))
    for lora_options in ({}, {"lora_rank": 2}):
        result = api.train(
            book, init=padded, steps=2, batch_tokens=64, block_size=16, out=tmp_path / "run", **lora_options
        )
        trained = load(result.checkpoint)
        assert trained.model.config.vocab_size == size
        assert trained.generate("the", max_tokens=3)
    assert gpt("tokenize", book, "-o", tmp_path / "tokens", "--tokenizer", padded).code == 0
    assert load(padded).evaluate_files([str(tmp_path / "tokens")]).tokens > 100


def test_chat_tokens_are_added_after_the_padding_token(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Each new embedding row is the mean of the old rows."""
    path = make_folder()
    size = add_padding(path)
    values = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    names = {"<|im_start|>": "<|start|>", "<|im_end|>": "<|stop|>"}
    for token in values["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    (path / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    chats.write_text(f"{json.dumps({'messages': turns})}\n" * 9)
    result = api.train(chats, init=path, chat=True, steps=1, lr=1e-9, batch_tokens=64, block_size=32)
    model = load(result.checkpoint)
    assert model.tokenizer.all_specials["<|im_end|>"] == size + 2
    table = model.model.get_submodule("wte").weight
    assert table.shape[0] == size + 3 and bool(table.isfinite().all())
    mean = load_file(path / "model.safetensors")["model.embed_tokens.weight"].mean(0)
    assert torch.allclose(table[size:], mean.expand(3, -1), atol=1e-4)


def test_end_of_text_without_an_embedding_row_is_refused(make_folder: MakeFolder, gpt: Gpt) -> None:
    path = make_folder()
    change(path / "config.json", vocab_size=650)
    tensors = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:650].contiguous()
    save_file(tensors, path / "model.safetensors")
    result = gpt("sample", "the", "-m", path)
    one_line_of_what_and_what_next(result, "703 ids, the model 650, without the one that starts or ends a text")


def test_gguf_files_omit_a_padding_token_without_a_row(make_folder: MakeFolder, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = make_folder("gaps")
    size = add_padding(path)
    notes: list[str] = []
    api.export(path, tmp_path / "model.gguf", note=notes.append)
    tokens = gguf.GGUFReader(str(tmp_path / "model.gguf")).fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == size and "[PAD]" not in tokens
    assert any("no token for 6 of the 256 bytes" in note for note in notes)


# Tokenizers and chat templates of adapters

peft = pytest.importorskip("peft")
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "the cat"}]


@pytest.fixture
def adapter(make_folder: MakeFolder, tmp_path: Path) -> Path:
    """Returns an adapter that PEFT saved, without a tokenizer."""
    base = make_folder("qwen", vocab_size=704)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    lora_config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(model.eval(), lora_config).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    return tmp_path / "adapter"


def prompt_of(path: Path) -> list[int]:
    return checkpoint.peek(path)[1].encode(chat.render(checkpoint.peek(path)[1], MESSAGES), specials=True).tolist()


def test_adapter_tokenizer_overrides_the_base(adapter: Path, tmp_path: Path) -> None:
    base = checkpoint.peek(adapter)[1]
    assert base.chat_template == vocabularies.TEMPLATE
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    theirs.eos_token, theirs.chat_template = "<|endoftext|>", TEMPLATE
    theirs.save_pretrained(adapter)
    theirs = transformers.AutoTokenizer.from_pretrained(adapter)
    assert prompt_of(adapter) == theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    ours = checkpoint.peek(adapter)[1]
    assert (ours.eot, ours.ends) == (theirs.eos_token_id, {theirs.eos_token_id})
    other = train_tokenizer([make_text()], 400)  # The vocabulary differs.
    for file in adapter.glob("*token*"):
        file.unlink()
    (adapter / "chat_template.jinja").unlink()
    save_tokenizer(other, tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "other" / name).rename(adapter / name)
    assert checkpoint.peek(adapter)[1].encode("the cat").tolist() == other.encode("the cat").tolist()


@pytest.mark.parametrize("form", ["chat_template.jinja", "tokenizer_config.json"])
def test_adapter_template_works_with_the_base_tokenizer(adapter: Path, tmp_path: Path, form: str) -> None:
    text = TEMPLATE if form.endswith("jinja") else json.dumps({"chat_template": TEMPLATE})
    (adapter / form).write_text(text, encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs", chat_template=TEMPLATE)
    assert prompt_of(adapter) == theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert load(adapter).tokenizer.chat_template == TEMPLATE


def test_stacked_adapters_use_the_outermost_template(adapter: Path, tmp_path: Path) -> None:
    (adapter / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    upper = tmp_path / "upper"
    upper.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (upper / name).write_bytes((adapter / name).read_bytes())
    change(upper / "adapter_config.json", base_model_name_or_path=str(adapter))
    assert checkpoint.peek(upper)[1].chat_template == TEMPLATE
    (upper / "chat_template.jinja").write_text("nearer", encoding="utf-8")
    assert checkpoint.peek(upper)[1].chat_template == "nearer"


def test_chat_template_can_be_added_to_a_checkpoint(run_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(folder.find_checkpoint(str(run_folder)), path)
    assert load(path).tokenizer.chat_template is None
    (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    assert load(path).tokenizer.chat_template == TEMPLATE
    assert chat.render(load(path).tokenizer, MESSAGES) == "[user]the cat"


def test_adapters_work_on_a_base_with_a_differing_lm_head(adapter: Path, tmp_path: Path) -> None:
    expected = load(adapter).generate("the", max_tokens=5, greedy=True)
    change(tmp_path / "theirs/config.json", tie_word_embeddings=True)
    with pytest.warns(ModelWarning, match="differs from the embedding"):
        assert load(adapter).generate("the", max_tokens=5, greedy=True) == expected


# A config.json next to an adapter


@pytest.mark.parametrize(
    "leftover",
    [
        {"vocab_size": 999}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": 500.0},
        {"quantization_config": NF4},
    ],
)  # fmt: skip
def test_config_json_next_to_an_adapter_is_ignored(
    adapter: Path, tmp_path: Path, leftover: dict[str, Any], gpt: Gpt
) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, adapter).eval()
    config = json.loads((tmp_path / "theirs/config.json").read_text()) | leftover
    for text in (json.dumps(config), json.dumps({"model_type": "llama"})):
        (adapter / "config.json").write_text(text)
        x = torch.randint(400, (2, 20))
        with torch.no_grad():
            assert torch.allclose(checkpoint.load(adapter, CPU.device).model(x), theirs(x).logits, atol=1e-4)
    for words in (["sample", "the", "-n", 3, "-m", adapter], ["export", "-m", adapter, "-o", tmp_path / "out"]):
        result = gpt(*words)
        assert result.code == 0, result.err


# Adapters that do not name their base model correctly


@pytest.mark.parametrize(("base_name", "code"), [("unsloth/llama-3.2-1b-bnb-4bit", 1), ("/gone", 2), (None, 2)])
def test_missing_base_is_an_error(
    adapter: Path, base_name: str | None, code: int, gpt: Gpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    change(adapter / "adapter_config.json", base_model_name_or_path=base_name, revision="unsloth")
    one_line_of_what_and_what_next(gpt("sample", "the", "-m", adapter), str(adapter), code)


# Compatibility with Transformers 4


def test_special_tokens_are_listed_for_transformers_4(tmp_path: Path) -> None:
    """Transformers 4 needs a mapping as `extra_special_tokens`; a list is an AttributeError."""
    save_tokenizer(train_tokenizer([make_text()], 400, ["<|user|>", "<|bot|>"]), tmp_path / "t")
    config = json.loads((tmp_path / "t/tokenizer_config.json").read_text())
    assert config["additional_special_tokens"] == ["<|user|>", "<|bot|>"]
    assert not isinstance(config.get("extra_special_tokens"), list)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    ours = find_tokenizer(str(tmp_path / "t"))
    assert theirs("a<|user|>b").input_ids == ours.encode("a<|user|>b", specials=True).tolist()
    assert {"<|user|>", "<|bot|>"} <= {*theirs.all_special_tokens}
