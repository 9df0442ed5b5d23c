"""GGUF files as models: what gpt exports is read back, and blocks of every type are what the package gguf reads."""

import random
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Gpt, more, one_line_of_what_and_what_next
from models import ROPE_METADATA, loud, rewritten, source_of
from torch import Tensor

import gpt as library
from gpt.config.model import ARCHITECTURES, GPTConfig, RopeScaling
from gpt.decoding.native import PackedLinear, StoredMatrix, find
from gpt.exporting import gguf
from gpt.exporting.provenance import read_provenance
from gpt.model.decoder import GPT
from gpt.model.positions import rotary_rates
from gpt.model.quantize import to_tensor
from gpt.runs import checkpoint, folder, gguf_model, model_config
from gpt.system import gguf_header
from gpt.system.errors import UserError
from gpt.system.gguf_header import header

package = pytest.importorskip("gguf")

PLAIN = ARCHITECTURES["modern"] | {"qk_norm": False}
SCALING = RopeScaling(8.0, 1.0, 4.0, 8192)
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": ARCHITECTURES["gpt2"],
    "gpt2, untied": ARCHITECTURES["gpt2"] | {"tied": False},
    "llama": PLAIN | {"n_kv_head": 2, "head_dim": 24, "n_inner": 96},
    "llama, scaled": PLAIN | {"n_kv_head": 2, "head_dim": 24, "rope_base": 5e5, "rope_scaling": SCALING},
    "mistral": PLAIN | {"n_kv_head": 1, "tied": False, "layer_norm_epsilon": 1e-6},
    "qwen2": PLAIN | {"biases": "qkv", "n_kv_head": 2, "n_inner": 64},
    "qwen3": ARCHITECTURES["modern"] | {"head_dim": 8, "rope_base": 1e6},
}
QUANTIZED = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "BF16", "F16"]
IDS = torch.arange(0, 240, 7)[None] % 257


def model_of(family: str, seed: int = 0, **properties: Any) -> GPT:
    return loud(GPTConfig(320, 48, 2, 4, 64, **{**FAMILIES[family], **properties}), seed, spread=0.1)


def logits(model: GPT) -> Tensor:
    with torch.no_grad():
        return model(IDS)[0] if isinstance(model(IDS), tuple) else model(IDS)


def write(path: Path, model: GPT, kind: str = "f32") -> Path:
    gguf.write(path, source_of(model), kind, "A model")
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_model_is_read_back(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    read = checkpoint.load(write(tmp_path / "model.gguf", model), torch.device("cpu"))
    assert replace(read.model.config, dropout=0.0) == replace(model.config, dropout=0.0)
    for name, value in model.state_dict().items():
        assert torch.equal(read.model.state_dict()[name], value), name
    assert list(read.tokenizer.encode("A text")) == list(b"A text")


def as_blocks(kind: str, value: Tensor) -> Any:
    """A matrix in a type: quantized if the package can, or else random blocks with scales of about a tenth."""
    type_ = package.GGMLQuantizationType[kind]
    try:
        return package.quants.quantize(value.numpy(), type_)
    except NotImplementedError:
        block, size = package.GGML_QUANT_SIZES[type_]
        blocks = np.random.default_rng(0).integers(0, 256, (value.numel() // block, size), np.uint8)
        at = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0]}[kind]
        for scale in at:
            blocks[:, scale : scale + 2] = np.float16([2e-3]).view(np.uint8)
        return blocks.reshape(len(value), -1)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(
    ("family", "count"),
    [("llama", 1), *(more(family, 10) for family in ("gpt2", "llama", "mistral", "qwen2", "qwen3"))],
)
def test_quantized_weights_are_those_of_the_package(family: str, count: int, kind: str, tmp_path: Path) -> None:
    """Random shapes whose rows are multiples of 256."""
    generator = random.Random(f"{family} {kind}")
    for index in range(count):
        heads, layers = generator.choice([2, 4, 8]), generator.randint(1, 3)
        config = {**FAMILIES[family], "n_inner": 256 * generator.randint(1, 3), "head_dim": None}
        if family != "gpt2":
            config["n_kv_head"] = generator.choice([n for n in (1, 2, 4, 8) if heads % n == 0])
        model = loud(GPTConfig(generator.randint(257, 400), 48, layers, heads, 256, **config), index, spread=0.1)
        check_weights(model, kind, tmp_path)


def check_weights(model: GPT, kind: str, tmp_path: Path) -> None:
    type_ = package.GGMLQuantizationType[kind]

    def change(name: str, value: Tensor, old: Any) -> tuple[Any, Any]:
        if value.dim() < 2 or "position" in name:
            return value.numpy(), old
        return as_blocks(kind, value), type_

    path = rewritten(write(tmp_path / "model.gguf", model), {}, change)
    exact = rewritten(path, {}, lambda name, value, old: (value.numpy(), package.GGMLQuantizationType.F32))
    exact = exact.rename(tmp_path / "exact.gguf")
    path = rewritten(write(tmp_path / "again.gguf", model), {}, change)
    read, reference = (checkpoint.load(each, torch.device("cpu")).model for each in (path, exact))
    for name, get in checkpoint.open_weights(path)[1].items():
        if not isinstance(blocks := get(), Tensor):
            restored = StoredMatrix(find(print), blocks)  # type: ignore[arg-type]
            assert torch.equal(restored.dequantize(), read.state_dict()[name])
            assert torch.equal(restored.dequantize(torch.bfloat16), read.state_dict()[name].bfloat16())
    assert {info.type for info in header(path).tensors.values()} == {0, int(type_)}
    assert torch.allclose(logits(read), logits(reference), rtol=0, atol=1e-5)
    assert not torch.allclose(logits(read), logits(model), rtol=0, atol=1e-5)
    check_packed(path, read, kind)
    for file in tmp_path.iterdir():
        file.unlink()


def check_packed(path: Path, exact: GPT, kind: str) -> None:
    """Compares the weights of a model that runs from its file's blocks."""
    packed = library.load(path, device="cpu", for_decoding=True).model
    ids = torch.arange(packed.config.vocab_size)
    wte = packed.get_submodule("wte")
    pairs = [(wte(ids), exact.wte.weight)]
    for name, module in packed.named_modules():
        if isinstance(module, PackedLinear) and name != "wte.matrix":
            own: Any = exact.wte if name == "lm_head" and exact.lm_head is None else exact.get_submodule(name)
            pairs.append((to_tensor(module.restore()).float(), own.weight))
            assert module.kind == {
                "Q4_0": "int4",
                "Q4_1": "int4",
                "Q4_K": "int4",
                "BF16": "bfloat16",
                "F16": "float32",
            }.get(kind, "int8")
    # Scales of Q4_K and Q5_K become float16. The other types that are not copied become int8.
    tolerance = {"Q4_K": 1e-3, "Q5_K": 1e-3}.get(kind, 1 / 250 if kind in ("Q2_K", "Q3_K", "Q6_K", "IQ4_NL") else 0)
    for actual, expected in pairs:
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


PEAK_SCRIPT = """
import sys
import gpt.api
from gpt.config.sample import SampleConfig

def status(key):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

gpt.api.load(sys.argv[1], device="cpu", for_decoding=True).generate("some text", max_tokens=4)  # what is lazy
before = status("VmRSS")
gpt.api.load(sys.argv[2], device="cpu", for_decoding=True).generate("some text", max_tokens=4)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("kind", "tied"), [("q4_0", True), ("q8_0", False), more("q4_0", False), more("q8_0", True)])
def test_weights_are_in_memory_once(kind: str, tied: bool, tmp_path: Path) -> None:
    shape = {**PLAIN, "n_head": 8, "n_embd": 1024, "tied": tied}
    small = write(tmp_path / "small.gguf", model_of("llama"), kind)
    large = write(tmp_path / "large.gguf", loud(GPTConfig(30_000, 48, n_layer=8, **shape)), kind)
    command = [sys.executable, "-c", PEAK_SCRIPT, small, large]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # While the LM head is packed, it is also mapped.
    assert int(done.stdout) < 1.2 * large.stat().st_size + 40e6


@pytest.mark.parametrize(("metadata", "factor"), ROPE_METADATA)
def test_linear_rope_scaling(metadata: dict[str, Any], factor: float, tmp_path: Path) -> None:
    """tests/exporting/test_llama_cpp_shapes.py compares the same files in llama.cpp."""
    model = model_of("llama")
    config = model_config.load_config(rewritten(write(tmp_path / "model.gguf", model), metadata))
    assert torch.allclose(rotary_rates(config) * factor, rotary_rates(model.config))


def test_shards_are_one_model(tmp_path: Path) -> None:
    model = model_of("qwen3")
    path = write(tmp_path / "model.gguf", model)
    names = list(header(path).tensors)
    for number, part in enumerate((names[:5], names[5:9], names[9:])):
        keep = lambda name, value, old, part=part: (value.numpy(), old) if name in part else (None, None)
        split = {"split.no": number, "split.count": 3, "split.tensors.count": len(names)}
        rewritten(path, split, keep).rename(tmp_path / f"it-{number + 1:05}-of-00003.gguf")
    read = checkpoint.load(tmp_path / "it-00002-of-00003.gguf", torch.device("cpu")).model
    assert torch.equal(logits(read), logits(model))
    assert len(folder.weight_checksums(tmp_path / "it-00001-of-00003.gguf")) == 3
    (tmp_path / "it-00003-of-00003.gguf").unlink()
    with pytest.raises(UserError, match="it-00003-of-00003.gguf is missing"):
        checkpoint.load(tmp_path / "it-00001-of-00003.gguf", torch.device("cpu"))


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling 'yarn'"),
        ({"llama.rope.scaling.factor": 0.5}, "RoPE scaling 'linear' by 0.5"),
        ({"llama.rope.scaling.factor": float("nan")}, "RoPE scaling 'linear' by nan"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor is 1.5"),
        ({"llama.rope.dimension_count": 12}, "only part of each head"),
        ({"llama.block_count": 3}, "the tensor blk.2.attn_k.weight and 8 more is missing"),
        ({"llama.block_count": 10**6}, "does not have a model's tensors"),
        ({"tokenizer.ggml.pre": "chameleon"}, "'chameleon', which gpt does not know"),
        ({"tokenizer.ggml.model": "t5"}, "a tokenizer of type 't5'"),
    ],
)
def test_unsupported_metadata_is_named(metadata: dict[str, Any], match: str, tmp_path: Path) -> None:
    path = rewritten(write(tmp_path / "model.gguf", model_of("llama")), metadata)
    with pytest.raises(UserError, match=match):
        checkpoint.load(path, torch.device("cpu"))


KEYS = [
    "general.architecture", "split.count",
    *(f"llama.{key}" for key in {**model_config._SHAPE, **model_config._WITHOUT}),
    "llama.rope.dimension_count", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scale_linear",
    "llama.rope.scaling.original_context_length",
    *(f"tokenizer.ggml.{key}" for key in (
        "model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_space_prefix",
        *(f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")),
    )),
    "tokenizer.chat_template",
]  # fmt: skip
WRONG = [
    "false", "", "\x1b[31m" * 99, True, False, -1, 0, 1, 7, 2**31, 2**63, 0.5, -1.0, 1e300, float("nan"), float("inf"),
    [0.5, float("inf")], [float("nan")] * 320, [float("inf")] * 320, [1e300] * 320, [-1] * 320, [7] * 257, [2**62] * 320, [True] * 320,
    ["a"], ["a", "a"], ["a b"] * 320, [f"{n}" for n in range(320)], ["\udcff"] + [f"{n}" for n in range(319)], [],
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_wrong_values_are_read_or_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries values of other types and sizes in every key that is read, with both kinds of vocabularies."""
    path = write(tmp_path / "model.gguf", model_of("llama"))
    file, refused = header(path), 0
    words = [f"<0x{byte:02X}>" for byte in range(256)] + [f"<{id}>" for id in range(256, 320)]
    pieces = {"model": "llama", "tokens": words, "scores": np.zeros(320, np.float32)}
    pieces = {f"tokenizer.ggml.{name}": value for name, value in pieces.items()}
    for kind, value in product(({}, pieces), WRONG):
        is_array = isinstance(value, list) and not all(isinstance(each, str) for each in value)
        metadata = {**file.metadata, **kind, key: np.array(value) if is_array else value}
        monkeypatch.setattr(gguf_header, "_read_file", lambda path, metadata=metadata: replace(file, metadata=metadata))
        gguf_header._kept.cache_clear()
        try:
            tokenizer = checkpoint.load(path, torch.device("cpu")).tokenizer
            tokenizer.encode("a")
            read_provenance(path, str(path))
        except UserError as error:
            refused += 1
            assert "\n" not in error.message and len(error.message) < 400 and error.hint, (value, error.message)
    assert refused > len(WRONG) / 4


@pytest.mark.parametrize(
    ("key", "value"),
    [("split.no", [0, 1]), ("split.no", 1.0), ("split.count", [2]), ("split.count", 2.5), ("general.alignment", [32])],
)
def test_wrong_values_of_shards_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", model_of("llama"))
    for number in range(2):
        metadata = {"split.no": number, "split.count": 2, "split.tensors.count": 20, key: value}
        rewritten(path, metadata).rename(tmp_path / f"it-0000{number + 1}-of-00002.gguf")
    with pytest.raises(UserError, match=f"{key} is .*, not of type int"):
        header(tmp_path / "it-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("key", "value"), [("add_bos_token", "false"), ("add_bos_token", 0), ("eos_token_id", "2"), ("bos_token_id", 2.0)]
)
def test_flags_and_ids_of_another_type_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = rewritten(write(tmp_path / "model.gguf", model_of("llama")), {f"tokenizer.ggml.{key}": value})
    with pytest.raises(UserError, match=f"tokenizer.ggml.{key} is {value!r}, not of type"):
        checkpoint.load(path, torch.device("cpu"))


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (b"llama", b"mamba", "a model of type 'mamba'"),
        (b"blk.0.attn_v", b"blk.0.extra_", "has a tensor blk.0.extra_.weight that no llama model of gpt has"),
    ],
)
def test_unknown_architecture_and_tensor_are_named(old: bytes, new: bytes, match: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", model_of("llama"))
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(UserError, match=match) as error:
        checkpoint.load(path, torch.device("cpu"))
    assert error.value.hint.startswith("run the file with llama.cpp (llama-cli -m FILE); gpt runs GPT-2, Llama, ")


@pytest.mark.parametrize(
    ("type_", "match"), [(999, "the unknown type 999"), (26, "the type I32, which cannot be read")]
)
def test_unsupported_tensor_type_is_named(
    type_: int, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "model.gguf", model_of("llama"))
    file = header(path)
    tensors = {name: replace(info, type=type_) for name, info in file.tensors.items()}
    monkeypatch.setattr(gguf_model, "header", lambda path: replace(file, tensors=tensors))
    with pytest.raises(UserError, match=match):
        checkpoint.load(path, torch.device("cpu"))


def test_commands_take_a_file(run_folder: Path, gpt: Gpt, tmp_path: Path) -> None:
    file = str(tmp_path / "model.gguf")
    gpt("export", "-m", str(run_folder), "-o", file, "--dtype", "f32")
    text = tmp_path / "text.txt"
    text.write_text("The same text, measured twice. " * 20)
    for command in (
        ["sample", "The", "--greedy", "--max-tokens", "12"],
        ["sample", "The", "--beam", "3", "--max-tokens", "6"],
        ["eval", str(text), "--json"],
        ["inspect", "attention", "The same text", "--json"],
    ):
        ours, theirs = (gpt(*command, "-m", each) for each in (str(run_folder), file))
        assert (ours.code, theirs.code) == (0, 0), ours.err + theirs.err
        if command[0] == "sample":
            assert ours.out == theirs.out
    assert gpt("params", file).out.splitlines()[2:] == gpt("params", str(run_folder)).out.splitlines()[2:]
    tuned = gpt("train", str(text), "--init", file, "--lora-rank", "2", "--steps", "3", "--out", "runs/tuned")
    assert tuned.code == 0, tuned.err
    gpt("export", "-m", "runs/tuned", "-o", "tuned.gguf", "--dtype", "f16")
    ours, theirs = (
        gpt("sample", "The", "--greedy", "--max-tokens", "12", "-m", each).out for each in ("runs/tuned", "tuned.gguf")
    )
    assert ours == theirs


def forged(data: bytes, header_size: int, rng: random.Random) -> bytes:
    """A file with some bytes of its header replaced, or cut short."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(header_size)
        if rng.random() < 0.5:
            value = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, rng.getrandbits(64)])
            changed[at : at + 8] = struct.pack("<Q", value)
        else:
            changed[at] = rng.randrange(256)
    return bytes(changed[: rng.randrange(len(data))] if rng.random() < 0.1 else changed)


@pytest.mark.parametrize("count", [60, more(2_000)])
def test_forged_files_are_read_or_refused(count: int, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", model_of("llama"))
    data = path.read_bytes()
    size = min(info.offset for info in header(path).tensors.values())
    outcomes = {"read": 0, "refused": 0}
    for seed in range(count):
        bad = tmp_path / f"{seed}.gguf"
        bad.write_bytes(forged(data, size, random.Random(seed)))
        try:
            if folder.is_checkpoint(bad):
                checkpoint.load(bad, torch.device("cpu"))
            outcomes["read"] += 1
        except UserError as error:
            assert "\n" not in error.message
            outcomes["refused"] += 1
        bad.unlink()
    assert outcomes["refused"] > count / 4
    assert outcomes["read"] > count / 20


@pytest.mark.parametrize(
    ("skip", "claim", "match"),
    [
        (16, 2**30, r"its header is cut short, or has more than 134,217,728 bytes"),  # bytes of the first token
        (8, 26_000_000, r"its lists have 26,000,000 texts or more, and the limit is 2,097,152"),  # tokens
        (8, 2**40, r"it claims to have 1,099,511,627,776 texts in tokenizer.ggml.tokens"),
    ],
)
def test_sizes_are_checked_before_they_are_read(skip: int, claim: int, match: str, tmp_path: Path) -> None:
    """The file is sparse: zeros follow."""
    data = write(tmp_path / "model.gguf", model_of("llama")).read_bytes()
    at = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + skip
    with (tmp_path / "large.gguf").open("wb") as file:
        file.write(data[:at] + struct.pack("<Q", claim) + data[at + 8 :])
        file.truncate(2**31)
    tracemalloc.start()
    with pytest.raises(UserError, match=match):
        header(tmp_path / "large.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_file_cut_anywhere_is_refused(tmp_path: Path, gpt: Gpt) -> None:
    data = write(tmp_path / "model.gguf", model_of("llama")).read_bytes()
    for size in (3, 4, 20, 100, 5_000, len(data) - 1000):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        result = gpt("sample", "The", "-m", str(tmp_path / "cut.gguf"))
        one_line_of_what_and_what_next(result, "cut.gguf")
