"""Folders of models as people have them, beside transformers: what is beside the weights, and which tokenizer counts."""

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
from gpt.config import GPTConfig
from gpt.errors import ModelWarning, UserError
from gpt.model.decoder import GPT
from gpt.runs import checkpoint, folder
from gpt.text import chat
from gpt.text.tokenizer import bytes_tokenizer, learn_tokenizer
from gpt.text.tokenizer_files import find_tokenizer, save_tokenizer

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's

LLAMA = GPTConfig(
    703, 64, 2, 2, 16, norm="rmsnorm", mlp="swiglu", positions="rotary", biases="none", layer_norm_epsilon=1e-6,
    tied=False, n_inner=32,
)  # fmt: skip
GPT2 = {"norm": "layernorm", "mlp": "gelu", "positions": "learned", "biases": "all", "n_inner": None}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Makes a folder of transformers: a tiny model with the tokenizer of a form, in the family of its shape."""

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
        said = json.loads(files["config.json"]) | {"bos_token_id": tokenizer.eot, "eos_token_id": tokenizer.eot}
        (path / "config.json").write_text(json.dumps(said))
        return path

    return make


def change(path: Path, **values: Any) -> None:
    """Changes values of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


def add_padding(path: Path) -> int:
    """Gives a folder's tokenizer one more token, without a row in the model; returns its id."""
    values = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    size = find_tokenizer(str(path)).vocab_size
    values["added_tokens"].append({**values["added_tokens"][-1], "id": size, "content": "[PAD]", "special": True})
    (path / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    return size


def add_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(load_file(path / "model.safetensors") | tensors, path / "model.safetensors", {"format": "pt"})


def is_transformers(path: Path) -> None:
    """The logits are those of transformers."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    x = torch.randint(400, (2, 20))
    with torch.no_grad():
        assert torch.allclose(checkpoint.load(path, CPU.device).model(x), theirs(x).logits, atol=1e-4)


# What stands beside the weights of a decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_unembedding_that_is_not_the_embedding_is_used(
    made: Made, gpt: Gpt, family: str, dtype: torch.dtype
) -> None:
    path = made(tied=True, **(GPT2 if family == "gpt2" else {}))
    torch.manual_seed(1)
    size = find_tokenizer(str(path)).vocab_size
    add_tensors(path, {"lm_head.weight": torch.randn(size, 16).to(dtype)})
    with pytest.warns(ModelWarning, match=r"lm_head\.weight differs from the embedding"):
        is_transformers(path)
    done = gpt("sample", "the", "-m", path, "-n", 4, "--greedy")
    assert done.code == 0 and "differs from the embedding" in done.err
    assert gpt("export", "-m", path, "-o", path.parent / "out").code == 0
    said = json.loads((path.parent / "out/config.json").read_text())
    assert said["tie_word_embeddings"] is False
    is_transformers(path.parent / "out")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_tied_model_may_be_stored_by_its_unembedding(made: Made, family: str) -> None:
    """safetensors' `save_model` writes a tensor that has two names under the first of them."""
    path = made(tied=True, **(GPT2 if family == "gpt2" else {}))
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    save_model(model, str(path / "model.safetensors"), {"format": "pt"})
    assert "lm_head.weight" in load_file(path / "model.safetensors")
    is_transformers(path)
    api.export(path, path.parent / "out")
    is_transformers(path.parent / "out")


BESIDE = {
    "a head for values": {"v_head.summary.weight": torch.ones(1, 16), "v_head.summary.bias": torch.zeros(1)},
    "classes": {"score.weight": torch.ones(3, 16)},
    "numbers": {"step": torch.zeros((), dtype=torch.int64)},
}


@pytest.mark.parametrize("what", BESIDE)
def test_tensors_beside_the_decoder_are_left_out_with_a_word(made: Made, what: str) -> None:
    path = made()
    add_tensors(path, {**BESIDE[what], "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    with pytest.warns(ModelWarning, match=rf"{next(iter(sorted(BESIDE[what])))}.* is not part of the decoder"):
        is_transformers(path)
    with pytest.warns(ModelWarning):  # once in a process, however often the files are read
        api.export(path, path.parent / "out")
    is_transformers(path.parent / "out")


def test_tensors_that_a_decoder_would_compute_with_are_refused(made: Made) -> None:
    path = made()
    for name in ("model.layers.0.self_attn.q_norm.weight", "model.layers.7.mlp.up_proj.weight", "lm_head.bias"):
        before = (path / "model.safetensors").read_bytes()
        add_tensors(path, {name: torch.ones(8)})
        with pytest.raises(UserError, match=f"{name} that config.json does not expect"):
            checkpoint.load(path, CPU.device)
        (path / "model.safetensors").write_bytes(before)


@pytest.mark.parametrize(
    "left", [{"quantization_config": NF4}, {"quantization_config": {}}, {"compression_config": {"format": "pack"}}]
)
def test_a_quantization_that_is_over_is_left_out_with_a_word(made: Made, left: dict[str, Any], gpt: Gpt) -> None:
    path = made()
    expected = load(path).generate("the", max_tokens=5, greedy=True)
    change(path / "config.json", **left)
    done = gpt("sample", "the", "-m", path, "-n", 5, "--greedy", "--no-echo")
    assert done.code == 0 and "its weights are not quantized: they are used as they are" in done.err
    assert done.out.rstrip("\n") == expected[0].rstrip("\n")
    assert gpt("params", path).code == 0
    add_tensors(path, {"model.layers.0.mlp.up_proj.weight": torch.ones(256, 1, dtype=torch.uint8)})
    done = gpt("sample", "the", "-m", path)
    one_line_of_what_and_what_next(done, f"{next(iter(left))} is")
    assert "hint: use the model in 16 or 32 bits" in done.err


# Tokens that only the files beside tokenizer.json have

NEW = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
LISTED: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {
        "added_tokens_decoder": {"704": {**NEW, "content": "<|b|>"}, "703": {**NEW, "content": "<|a|>"}}
    },
    "added_tokens.json": {"<|a|>": 703, "<|b|>": 704},
    "special_tokens_map.json": {"additional_special_tokens": ["<|b|>", "<|a|>"], "pad_token": {"content": "[PAD]"}},
    "tokenizer_config.json, by name": {"extra_special_tokens": ["<|a|>"], "mask_token": "<|b|>", "sep_token": "cat"},
}


@pytest.mark.parametrize("whole", [True, False], ids=["tokenizer.json", "vocab.json"])
@pytest.mark.parametrize("where", LISTED)
def test_tokens_beside_a_vocabulary_have_their_ids(
    made: Made, where: str, whole: bool, gpt: Gpt, tmp_path: Path
) -> None:
    path = made("smollm2" if whole else "gpt2")
    if not whole:
        values = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
        (path / "tokenizer.json").unlink()
        vocab = values["model"]["vocab"] | {token["content"]: token["id"] for token in values["added_tokens"]}
        (path / "vocab.json").write_text(json.dumps(vocab))
        (path / "merges.txt").write_text("".join(f"{' '.join(pair)}\n" for pair in values["model"]["merges"]))
    add_tensors(path, {name: torch.randn(706, 16) for name in ("model.embed_tokens.weight", "lm_head.weight")})
    change(path / "config.json", vocab_size=706)
    file = path / where.partition(",")[0]
    said = (json.loads(file.read_text()) if file.exists() else {}) | LISTED[where]
    if not whole:
        said.pop("sep_token", None)  # tiktoken cannot both merge a word and cut it out
    file.write_text(json.dumps(said))
    for each in (path, tmp_path / "out"):
        theirs = transformers.AutoTokenizer.from_pretrained(each)
        model = load(each)
        for text in ("a<|a|>b <|b|> [PAD]c", "the cat sat<|im_end|>"):
            ids = theirs(text).input_ids
            assert model.tokenizer.prompt(text) == ids
            assert model.tokenizer.decode(ids) == theirs.decode(ids)
        if each == path:
            assert gpt("export", "-m", path, "-o", tmp_path / "out").code == 0


# A tokenizer that has more ids than its model


@pytest.fixture(params=["llama2", slow("gaps"), slow("smollm2")])
def padded(made: Made, request: pytest.FixtureRequest) -> Path:
    """A model whose tokenizer was given a padding token that has no row."""
    path = made(request.param)
    add_padding(path)
    change(path / "tokenizer_config.json", pad_token="[PAD]")
    return path


def test_only_a_text_that_needs_the_id_is_refused(padded: Path, gpt: Gpt, tmp_path: Path) -> None:
    size = checkpoint.peek(padded)[0].vocab_size
    theirs = transformers.AutoTokenizer.from_pretrained(padded)
    model = load(padded)
    assert model.tokenizer.vocab_size == size + 1
    assert model.tokenizer.prompt("the cat") == theirs("the cat").input_ids
    book = tmp_path / "book.txt"
    book.write_text(make_text(400) + " [PAD]")  # of a document it is text
    for words in (
        ["sample", "the", "-n", 5, "--greedy", "-m", padded],
        ["sample", "the", "-n", 5, "--beam", 3, "-m", padded],
        ["eval", book, "-m", padded],
        ["inspect", "neighbors", "the", "-m", padded],
        ["params", padded],
        ["export", "-m", padded, "-o", tmp_path / "out", "--dtype", "int8"],
        ["sample", "the", "-n", 5, "-m", tmp_path / "out"],
    ):
        done = gpt(*words)
        assert done.code == 0, done.err
    one_line_of_what_and_what_next(
        gpt("sample", "the [PAD]", "-m", padded),
        f'the text contains "[PAD]", token {size}, but the model has {size} ids',
    )


def test_training_goes_on_without_the_id(padded: Path, gpt: Gpt, tmp_path: Path) -> None:
    size = checkpoint.peek(padded)[0].vocab_size
    book = tmp_path / "book.txt"
    book.write_text(make_text(2000))
    for more in ({}, {"lora_rank": 2}):
        result = api.train(book, init=padded, steps=2, batch_tokens=64, block_size=16, out=tmp_path / "run", **more)
        again = load(result.checkpoint)
        assert again.model.config.vocab_size == size
        assert again.generate("the", max_tokens=3)
    assert gpt("tokenize", book, "-o", tmp_path / "tokens", "--tokenizer", padded).code == 0
    assert load(padded).evaluate_files([str(tmp_path / "tokens")]).tokens > 100


def test_turns_are_added_behind_the_id(made: Made, tmp_path: Path) -> None:
    """Each new row is the mean of those that the model had."""
    path = made()
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


def test_an_end_of_text_that_has_no_row_is_refused(made: Made, gpt: Gpt) -> None:
    path = made()
    change(path / "config.json", vocab_size=650)
    tensors = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:650].contiguous()
    save_file(tensors, path / "model.safetensors")
    done = gpt("sample", "the", "-m", path)
    one_line_of_what_and_what_next(done, "703 ids, the model 650, without the one that starts or ends a text")


def test_a_gguf_file_leaves_the_id_out(made: Made, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = made("gaps")
    size = add_padding(path)
    notes: list[str] = []
    api.export(path, tmp_path / "model.gguf", note=notes.append)
    tokens = gguf.GGUFReader(str(tmp_path / "model.gguf")).fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == size and "[PAD]" not in tokens
    assert any("no token for 6 of the 256 bytes" in note for note in notes)


# An adapter's own tokenizer and chat template

peft = pytest.importorskip("peft")
OWN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
CHAT = [{"role": "user", "content": "the cat"}]


@pytest.fixture
def adapter(made: Made, tmp_path: Path) -> Path:
    """An adapter as PEFT saves it, without a tokenizer."""
    base = made("qwen", vocab_size=704)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    about = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(model.eval(), about).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    return tmp_path / "adapter"


def prompt_of(path: Path) -> list[int]:
    return chat.prompt(checkpoint.peek(path)[1], CHAT)


def test_an_adapters_own_tokenizer_counts(adapter: Path, tmp_path: Path) -> None:
    base = checkpoint.peek(adapter)[1]
    assert base.chat_template == vocabularies.TEMPLATE
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    theirs.eos_token, theirs.chat_template = "<|endoftext|>", OWN
    theirs.save_pretrained(adapter)
    theirs = transformers.AutoTokenizer.from_pretrained(adapter)
    assert prompt_of(adapter) == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    ours = checkpoint.peek(adapter)[1]
    assert (ours.eot, ours.ends) == (theirs.eos_token_id, {theirs.eos_token_id})
    other = learn_tokenizer([make_text()], 400)  # another vocabulary
    for file in adapter.glob("*token*"):
        file.unlink()
    (adapter / "chat_template.jinja").unlink()
    save_tokenizer(other, tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "other" / name).rename(adapter / name)
    assert checkpoint.peek(adapter)[1].encode("the cat").tolist() == other.encode("the cat").tolist()


@pytest.mark.parametrize("form", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_beside_an_adapter_goes_with_its_bases_tokenizer(adapter: Path, tmp_path: Path, form: str) -> None:
    text = OWN if form.endswith("jinja") else json.dumps({"chat_template": OWN})
    (adapter / form).write_text(text, encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs", chat_template=OWN)
    assert prompt_of(adapter) == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert load(adapter).tokenizer.chat_template == OWN


def test_an_adapter_upon_an_adapter_has_the_nearest(adapter: Path, tmp_path: Path) -> None:
    (adapter / "chat_template.jinja").write_text(OWN, encoding="utf-8")
    upper = tmp_path / "upper"
    upper.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (upper / name).write_bytes((adapter / name).read_bytes())
    change(upper / "adapter_config.json", base_model_name_or_path=str(adapter))
    assert checkpoint.peek(upper)[1].chat_template == OWN
    (upper / "chat_template.jinja").write_text("nearer", encoding="utf-8")
    assert checkpoint.peek(upper)[1].chat_template == "nearer"


def test_a_template_may_be_put_beside_a_tokenizer_of_ours(run_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(folder.find_checkpoint(str(run_folder)), path)
    assert load(path).tokenizer.chat_template is None
    (path / "chat_template.jinja").write_text(OWN, encoding="utf-8")
    assert load(path).tokenizer.chat_template == OWN
    assert chat.render(load(path).tokenizer, CHAT) == "[user]the cat"


def test_an_adapter_to_a_tied_model_that_has_an_unembedding_of_its_own(adapter: Path, tmp_path: Path) -> None:
    expected = load(adapter).generate("the", max_tokens=5, greedy=True)
    change(tmp_path / "theirs/config.json", tie_word_embeddings=True)
    with pytest.warns(ModelWarning, match="differs from the embedding"):
        assert load(adapter).generate("the", max_tokens=5, greedy=True) == expected


# A config.json that another program left beside an adapter


@pytest.mark.parametrize(
    "left",
    [
        {"vocab_size": 999}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": 500.0},
        {"quantization_config": NF4},
    ],
)  # fmt: skip
def test_a_config_beside_an_adapter_does_not_count(
    adapter: Path, tmp_path: Path, left: dict[str, Any], gpt: Gpt
) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, adapter).eval()
    said = json.loads((tmp_path / "theirs/config.json").read_text()) | left
    for text in (json.dumps(said), json.dumps({"model_type": "llama"})):
        (adapter / "config.json").write_text(text)
        x = torch.randint(400, (2, 20))
        with torch.no_grad():
            assert torch.allclose(checkpoint.load(adapter, CPU.device).model(x), theirs(x).logits, atol=1e-4)
    for words in (["sample", "the", "-n", 3, "-m", adapter], ["export", "-m", adapter, "-o", tmp_path / "out"]):
        done = gpt(*words)
        assert done.code == 0, done.err


# A base that an adapter's files do not name rightly


@pytest.mark.parametrize("named", ["unsloth/llama-3.2-1b-bnb-4bit", "/gone", None])
def test_a_base_can_be_named(
    adapter: Path, tmp_path: Path, named: str | None, gpt: Gpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("gpt.runs.folder._bases", {})
    expected = load(adapter).generate("the", max_tokens=5, greedy=True)[0]
    change(adapter / "adapter_config.json", base_model_name_or_path=named, revision="unsloth")
    done = gpt("sample", "the", "-m", adapter)
    assert done.code != 0 and "--base" in done.err.splitlines()[-1]
    base = tmp_path / "theirs"
    done = gpt("sample", "the", "-m", adapter, "--base", base, "-n", 5, "--greedy", "--no-echo")
    assert done.out.rstrip("\n") == expected.rstrip("\n")
    book = tmp_path / "book.txt"
    book.write_text(make_text(400))
    assert gpt("eval", book, "-m", adapter, "--base", base).code == 0
    assert gpt("export", "-m", adapter, "-o", tmp_path / "whole", "--base", base).code == 0
    assert load(tmp_path / "whole").generate("the", max_tokens=5, greedy=True)[0] == expected
    one_line_of_what_and_what_next(gpt("sample", "-m", base, "--base", base), "is a full model")
    one_line_of_what_and_what_next(gpt("sample", "-m", adapter, "--base", tmp_path / "no"), "there is no run")


# What transformers 4 reads of ours


def test_special_tokens_are_named_as_all_of_transformers_reads_them(tmp_path: Path) -> None:
    """`extra_special_tokens` as a list is an AttributeError in transformers 4, which takes a mapping."""
    save_tokenizer(learn_tokenizer([make_text()], 400, ["<|user|>", "<|bot|>"]), tmp_path / "t")
    said = json.loads((tmp_path / "t/tokenizer_config.json").read_text())
    assert said["additional_special_tokens"] == ["<|user|>", "<|bot|>"]
    assert not isinstance(said.get("extra_special_tokens"), list)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    ours = find_tokenizer(str(tmp_path / "t"))
    assert theirs("a<|user|>b").input_ids == ours.encode("a<|user|>b", specials=True).tolist()
    assert {"<|user|>", "<|bot|>"} <= {*theirs.all_special_tokens}
