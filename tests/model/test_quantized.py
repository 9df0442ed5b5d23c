"""Quantized model folders in every command."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Done, Gpt, curve, make_text, more, one_line_of_what_and_what_next, slow
from models import loud, save
from safetensors.torch import load_file, save_file
from torch import Tensor

import gpt as library
from gpt import api
from gpt.config import ARCHITECTURES, GPTConfig
from gpt.device import Compute
from gpt.errors import UserError
from gpt.model.params import named_parameters
from gpt.model.quantize import GROUP, Quantized, to_int4, to_int8
from gpt.runs import checkpoint, folder, hub
from gpt.sample_config import SampleConfig

MODERN = ARCHITECTURES["modern"]
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "modern": MODERN | {"n_kv_head": 1},
    "untied": MODERN | {"qk_norm": False, "biases": "qkv", "tied": False},
    "sinusoidal": {"positions": "sinusoidal"},
    "own": {"positions": "rotary"},
    "narrow": {"n_embd": 24},  # Rows of 24 do not divide into groups of 32.
}
SAMPLING = SampleConfig()


def save_shape(path: Path, **properties: Any) -> Path:
    shape = {"vocab_size": 257, "block_size": 48, "n_layer": 2, "n_head": 2, "n_embd": 64}
    return save(path, loud(GPTConfig(**shape | properties), spread=0.1))


def export(model: Path, dtype: str) -> Path:
    out = model.with_name(f"{model.name}-{dtype}")
    if not out.exists():
        api.export(model, out, dtype=dtype)
    return out


@pytest.fixture(scope="module")
def quantized_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Exports a shape to each dtype in turn: ``int4-float32`` quantizes, then dequantizes."""
    root = tmp_path_factory.mktemp("quantized")

    def get(shape: str, dtypes: str = "float32") -> Path:
        path = root / shape
        if not path.exists():
            save_shape(path, **SHAPES[shape])
        for dtype in dtypes.split("-"):
            path = export(path, dtype)
        return path

    return get


QuantizedFolder = Callable[..., Path]


def logits(path: Path, device: str = "cpu", **options: Any) -> Tensor:
    idx = torch.randint(257, (3, 40), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.inference_mode():
        output: Tensor = library.load(path, device=device, **options).model(idx)
        return output.float().cpu()


# Quantization


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_matches_gguf_q8_0(dtype: torch.dtype) -> None:
    """The format is GGUF's Q8_0. Levels are those of the rounded scale, so the error is no larger."""
    gguf = pytest.importorskip("gguf")
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    weight = (torch.randn(300, 64 * GROUP) * torch.logspace(-3, 3, 300)[:, None]).to(dtype)
    weight[3] = 0
    quantized, exact = to_int8(weight), weight.float()
    assert (quantized.bits, quantized.shape) == (8, (300, 2048))
    groups = exact.view(300, -1, GROUP)
    assert torch.equal(quantized.scales, (groups.abs().amax(-1) / 127).half())
    blocks = np.concatenate(
        [quantized.scales.numpy()[..., None].view(np.int8), quantized.levels.view(300, -1, GROUP).numpy()], axis=-1
    )
    restored = quantized.dequantize()
    assert np.array_equal(gguf.quants.dequantize(blocks.reshape(300, -1).view(np.uint8), q8_0), restored.numpy())
    reference = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(exact.numpy(), q8_0), q8_0))
    assert (restored - exact).square().sum() <= (reference - exact).square().sum()
    assert torch.equal(to_int8(weight[:, :40]).dequantize()[:, :32], restored[:, :32])  # The last group is shorter.


def test_int4_matches_gguf_q4_0() -> None:
    """The format is GGUF's Q4_0, and the error is smaller than that of GGUF's quantizer."""
    gguf = pytest.importorskip("gguf")
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    weight = (
        torch.randn(130, 4 * GROUP, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 130)[:, None]
    )
    weight[7] = 0
    weight[8, :GROUP] = 0
    quantized = to_int4(weight)
    assert (quantized.bits, quantized.shape) == (4, (130, 128))
    blocks = np.concatenate(
        [quantized.scales.numpy()[..., None].view(np.uint8), quantized.levels.view(130, 4, GROUP // 2).numpy()], axis=-1
    )
    restored = quantized.dequantize()
    assert np.array_equal(gguf.quants.dequantize(blocks.reshape(130, -1), q4_0), restored.numpy())
    reference = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), q4_0), q4_0))
    our_error, reference_error = ((values - weight).view(-1, GROUP).square().sum(1) for values in (restored, reference))
    assert our_error.sum() < 0.91 * reference_error.sum()
    assert (restored[7] == 0).all()
    ids = torch.tensor([[8, 0], [129, 7]])
    assert torch.equal(quantized.rows(ids), restored[ids])


@pytest.mark.parametrize("quantize", [to_int8, to_int4])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_not_quantized(quantize: Callable[[Tensor], Quantized], bad: float) -> None:
    weight = torch.ones(9000, 64)
    weight[8000, 40] = bad
    with pytest.raises(UserError, match="NaN or infinite"):
        quantize(weight)


@pytest.mark.parametrize(("quantize", "large", "too_large"), [(to_int4, 4e5, 1e6), (to_int8, 8e6, 1e7)])
def test_scales_at_the_limits_of_float16(
    quantize: Callable[[Tensor], Quantized], large: float, too_large: float
) -> None:
    assert (quantize(torch.full((2, 32), 1e-12)).dequantize() == 0).all()
    weight = torch.full((2, 32), large)
    torch.testing.assert_close(quantize(weight).dequantize(), weight, rtol=1e-3, atol=0)
    with pytest.raises(UserError, match="too large for int"):
        quantize(torch.full((2, 32), too_large))


# Models from quantized folders


@pytest.mark.parametrize("dtype", ["int4", slow("int8")])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantized_folder_matches_the_dtype_option(quantized_folder: QuantizedFolder, shape: str, dtype: str) -> None:
    unquantized, quantized = quantized_folder(shape), quantized_folder(shape, f"float32-{dtype}")
    for options in ({"sampling": SAMPLING}, {}):
        assert torch.equal(logits(quantized, dtype=dtype, **options), logits(unquantized, dtype=dtype, **options))
    assert torch.equal(logits(quantized, sampling=SAMPLING), logits(unquantized, dtype=dtype, sampling=SAMPLING))
    from_folder, from_option = (
        library.load(path, dtype=options, sampling=SAMPLING).generate("ab", greedy=True, max_tokens=60)
        for path, options in ((quantized, "auto"), (unquantized, dtype))
    )
    assert from_folder == from_option


@pytest.mark.parametrize("dtype", ["int8", slow("int4")])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantized_folder_matches_its_dequantized_weights(
    quantized_folder: QuantizedFolder, shape: str, dtype: str
) -> None:
    quantized, restored = (
        quantized_folder(shape, f"float32-{dtype}"),
        quantized_folder(shape, f"float32-{dtype}-float32"),
    )
    for options in (
        {}, {"sampling": SAMPLING, "dtype": "float32"},
    ):  # fmt: skip
        assert torch.equal(logits(quantized, **options), logits(restored, **options)), options
    config = checkpoint.peek(quantized)[0]
    _, stored = checkpoint.open_weights(quantized_folder(shape))
    weights = {name: tensor.detach() for name, tensor in library.load(quantized).model.state_dict().items()}
    for name, p in named_parameters(config).items():
        if p.kind in ("embedding", "unembedding") or (p.kind == "linear" and (dtype == "int8" or p.shape[1] % GROUP)):
            assert torch.equal(weights[name], to_int8(stored[name]()).dequantize())
        elif p.kind == "linear":
            assert torch.equal(weights[name], to_int4(stored[name]()).dequantize())
        elif p.trained:
            assert torch.equal(weights[name], stored[name]())
    parts: dict[str, Tensor] = {}
    checkpoint.load_parts(quantized, config, lambda name, tensor: parts.update({name: tensor.clone()}))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in parts.items())
    assert set(parts) == set(dict(library.load(quantized).model.named_parameters()))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantized_folder_can_be_exported_again(quantized_folder: QuantizedFolder, dtype: str) -> None:
    quantized = quantized_folder("untied", f"float32-{dtype}")
    exported = quantized_folder("untied", f"float32-{dtype}-{dtype}")
    assert (exported / "model.safetensors").read_bytes() == (quantized / "model.safetensors").read_bytes()
    for other_dtype, tolerance in (("bfloat16", 0.05), ("float16", 0.02), ("int8", 0.2)):
        expected = logits(quantized)
        assert (
            logits(quantized_folder("untied", f"float32-{dtype}-{other_dtype}")) - expected
        ).abs().max() < tolerance * expected.abs().max()


def test_quantized_weights_load_from_several_files(
    quantized_folder: QuantizedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single_file_folders = {dtype: quantized_folder("gpt2", f"float32-{dtype}") for dtype in ("int8", "int4")}
    monkeypatch.setattr(checkpoint, "MAX_SHARD_BYTES", 30_000)
    for dtype, single_file_folder in single_file_folders.items():
        api.export(quantized_folder("gpt2"), tmp_path / dtype, dtype=dtype)
        assert len(list((tmp_path / dtype).glob("model-*.safetensors"))) > 2
        assert torch.equal(logits(tmp_path / dtype), logits(single_file_folder))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantized_folder_loads_without_gpt_files(
    quantized_folder: QuantizedFolder, tmp_path: Path, dtype: str
) -> None:
    """Without `gpt`'s files and the model card, the folder loads like a Transformers folder."""
    quantized = quantized_folder("modern", f"float32-{dtype}")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(quantized / name, tmp_path)
    assert torch.equal(logits(tmp_path), logits(quantized))


# Commands


@pytest.fixture
def model_pair(run_folder: Path, workdir: Path) -> tuple[Path, Path]:
    """A trained model in int4, and its dequantized weights in float32."""
    run = Path("run")
    shutil.copytree(folder.find_checkpoint(str(run_folder)), run)
    return export(run, "int4"), export(export(run, "int4"), "float32")


@pytest.mark.parametrize(
    "command",
    [
        "sample the -m MODEL -n 20 --greedy --json --logprobs 2 --ignore-eot --dtype float32",
        "sample the -m MODEL -n 20 --seed 3 -N 3 --dtype float32",
        "sample the -m MODEL -n 12 --beam 3 --json --dtype float32",
        "sample -m MODEL -n 12 --greedy --prompts prompts.jsonl --dtype float32",
        "sample the -m MODEL -n 20 --greedy --speculate 4 --dtype float32",
        "sample the -m MODEL -n 12 --greedy --dtype bfloat16",
        "eval text.txt -m MODEL --json",
        "inspect attention the_cat -m MODEL --json",
        "inspect neighbors the -m MODEL --json",
        "tokenizer encode --show the_cat -m MODEL --json",
        "params MODEL --devices 1 --json",
    ],
)
def test_commands_match_for_quantized_and_dequantized_models(
    gpt: Gpt, model_pair: tuple[Path, Path], command: str
) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "the"}\n{"prompt": "a cat"}\n')
    Path("text.txt").write_bytes(make_text(300).encode())

    def run_command(model: Path) -> Done:
        done = gpt(*command.replace("MODEL", "MODEL.").split())
        shutil.rmtree("MODEL.")
        return done

    results = []
    for model in model_pair:
        shutil.copytree(model, "MODEL.")
        results.append(run_command(model))
    assert results[0].code == 0, results[0].err
    assert results[0].out == results[1].out


@pytest.mark.parametrize("dtype", ["int8", slow("int4")])
def test_bench_reports_the_dtype(gpt: Gpt, quantized_folder: QuantizedFolder, dtype: str) -> None:
    command = (
        "bench",
        "-m",
        quantized_folder("gpt2", f"float32-{dtype}"),
        "-n",
        "2",
        "--rounds",
        "1",
        "--prompt-tokens",
        "4",
        "--json",
    )
    assert json.loads(gpt(*command).out)["dtype"] == dtype
    assert json.loads(gpt(*command, "--dtype", "float32").out)["dtype"] == "float32"


def test_requantization_is_reported(gpt: Gpt, quantized_folder: QuantizedFolder) -> None:
    def notes(dtype: str, *options: str) -> str:
        return gpt("sample", "x", "-m", quantized_folder("gpt2", f"float32-{dtype}"), "-n", "2", *options).err

    for dtype, other_dtype in (("int8", "int4"), ("int4", "int8")):
        for output in (notes(dtype), notes(dtype, "--dtype", dtype), notes(dtype, "--dtype", "float32")):
            assert "round" not in output
        assert f"{other_dtype} rounds the weights" in notes(dtype, "--dtype", other_dtype)


@pytest.mark.parametrize("rank", [0, slow(4)])
def test_training_is_equal_from_quantized_and_dequantized_weights(
    gpt: Gpt, model_pair: tuple[Path, Path], rank: int
) -> None:
    Path("text.txt").write_bytes(make_text().encode())
    runs = []
    for number, init in enumerate(model_pair):
        runs.append(Path(f"tuned-{number}"))
        options = ["--steps", "8", "--batch-tokens", "128", "--dtype", "float32", "--save-every", "4"]
        options += ["--lora-rank", str(rank), "--merge-lora"] if rank else []
        done = gpt("train", "text.txt", "--init", init, "-o", runs[-1], "--quiet", *options)
        assert done.code == 0, done.err
    assert curve(runs[0]) == curve(runs[1])
    samples = [gpt("sample", "the", "-m", run, "-n", "12", "--greedy", "--dtype", "float32").out for run in runs]
    assert samples[0] == samples[1] != ""
    done = gpt("train", "--resume", runs[0], "--steps", "10", "--quiet")
    assert done.code == 0, done.err
    exported = gpt("export", "-m", runs[0], "-o", "again", "--dtype", "int4")
    assert exported.code == 0, exported.err
    if rank:
        assert gpt("sample", "the", "-m", runs[0], "-n", "4", "--dtype", "int8").code == 0
        with pytest.raises(ValueError, match="quant_method"):
            pytest.importorskip("peft").AutoPeftModelForCausalLM.from_pretrained(folder.find_checkpoint(str(runs[0])))


# Memory


@pytest.mark.parametrize(
    ("dtype", "bytes_each", "requested_dtype"),
    [
        ("int8", 1, "auto"), ("int8", 4, "float32"), ("int4", 4, "float32"), ("int4", 1, "int8"),
        ("int8", 1, "int4"),
    ],
)  # fmt: skip
def test_quantized_weights_too_large_for_memory_are_refused(
    gpt: Gpt,
    quantized_folder: QuantizedFolder,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    bytes_each: int,
    requested_dtype: str,
) -> None:
    path = quantized_folder("gpt2", f"float32-{dtype}")
    model = library.load(path).model
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    # The float32 embedding is separate from the prepared unembedding.
    embedding_bytes = 4 * model.wte.weight.numel()
    command = ("sample", "x", "-m", path, "-n", "2", "--device", "cpu", "--dtype", requested_dtype)
    monkeypatch.setattr(Compute, "memory", lambda self: bytes_each * parameter_count - 1)
    one_line_of_what_and_what_next(gpt(*command), "the weights of")
    monkeypatch.setattr(Compute, "memory", lambda self: bytes_each * parameter_count + embedding_bytes + 100_000)
    assert gpt(*command).code == 0


PEAK_SCRIPT = """
import sys
import gpt.api
from gpt.sample_config import SampleConfig

def status(key):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

gpt.api.load(sys.argv[1], device="cpu", sampling=SampleConfig()).generate("some text", max_tokens=4)  # what is lazy
before = status("VmRSS")
loaded = gpt.api.load(sys.argv[2], device="cpu", dtype=sys.argv[3], sampling=SampleConfig())
loaded.generate("some text", max_tokens=4)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("tied", "dtype"),
    [
        (True, "int4"),
        (False, "int8"),
        *(more(*case) for case in [(False, "int4"), (True, "int8"), (True, "bfloat16"), (False, "bfloat16")]),
    ],
)
def test_quantized_weights_are_in_memory_once(
    quantized_folder: QuantizedFolder, tmp_path: Path, tied: bool, dtype: str
) -> None:
    large = save_shape(tmp_path / "large", **MODERN, vocab_size=30_000, n_layer=4, n_head=8, n_embd=1024, tied=tied)
    quantized = export(large, dtype)
    command = [sys.executable, "-c", PEAK_SCRIPT, quantized_folder("gpt2", f"float32-{dtype}"), quantized, dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # FBGEMM takes some 60 MB. Duplicate weights would exceed the limit.
    assert int(done.stdout) < 1.5 * (quantized / "model.safetensors").stat().st_size + 90e6


# Damage


def rewrite_checksums(path: Path) -> None:
    (path / folder.CHECKSUMS).unlink()
    folder.write_checksums(path)


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({key: v for key, v in (config | changes).items() if v != "gone"}))


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def replace(name: str, transform: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: transform(tensors[name])})


def fill_last_row(number: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.clone().index_fill_(0, torch.tensor([tensor.size(0) - 1]), number)


BITS = {"format": "gpt", "bits": 8, "group_size": 32}
QKV, EMBEDDING = "h.1.attn.c_attn.weight", "wte.weight"
INVALID_CONFIGS: list[Any] = [
    {"quant_method": "gptq", "bits": 4, "group_size": 128}, {**BITS, "quant_method": "gpt"}, {**BITS, "bits": 3},
    {**BITS, "bits": "8"}, {**BITS, "group_size": 64}, {**BITS, "format": "other"}, {"bits": 8}, [], {**BITS, "more": 1},
]  # fmt: skip


@pytest.mark.parametrize("quantization_config", INVALID_CONFIGS)
def test_unknown_quantization_config_is_refused(
    gpt: Gpt, quantized_folder: QuantizedFolder, tmp_path: Path, quantization_config: Any
) -> None:
    shutil.copytree(quantized_folder("gpt2", "float32-int8"), tmp_path / "c")
    edit_config(tmp_path / "c", quantization_config=quantization_config)
    rewrite_checksums(tmp_path / "c")
    one_line_of_what_and_what_next(gpt("sample", "x", "-m", tmp_path / "c"), "quantization_config is")


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "scales gone": ("int8", lambda c: edit(c, lambda t: t.pop(f"{QKV}.scales")), f"{QKV}.scales is missing"),
    "scales of another shape": ("int8", lambda c: edit(c, replace(f"{QKV}.scales", lambda t: t[:-1])), "has the shape"),
    "scales of another dtype": ("int8", lambda c: edit(c, replace(f"{QKV}.scales", Tensor.float)), "is F32; F16"),
    "nan": ("int8", lambda c: edit(c, replace(f"{QKV}.scales", fill_last_row(torch.nan))), "not all finite"),
    "embedding": ("int4", lambda c: edit(c, replace(f"{EMBEDDING}.scales", fill_last_row(-torch.inf))), "not all finite"),
    "float levels": ("int8", lambda c: edit(c, replace(QKV, Tensor.float)), "is F32; I8"),
    "transposed": ("int8", lambda c: edit(c, replace(QKV, Tensor.t)), "has the shape"),
    "a level too few": ("int4", lambda c: edit(c, replace(QKV, lambda t: t[:, 1:])), "has the shape"),
    "more": ("int8", lambda c: edit(c, lambda t: t.update({"x": torch.ones(2)})), "does not expect"),
    "float that says int8": ("float32", lambda c: edit_config(c, quantization_config=BITS), "does not expect"),
    "int8 that says float": ("int8", lambda c: edit_config(c, quantization_config="gone"), "does not expect|expects|requires"),
    "int8 that says int4": ("int8", lambda c: edit_config(c, quantization_config={**BITS, "bits": 4}), "has the shape|is I8"),
    "larger": ("int8", lambda c: edit_config(c, vocab_size=10**7), "expects|requires"),
    "headless": ("int8", lambda c: (c / "model.safetensors").write_bytes(b"\xff" * 200_000), "header has"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_quantized_weights_are_refused(
    gpt: Gpt, quantized_folder: QuantizedFolder, tmp_path: Path, case: str
) -> None:
    dtype, damage, message = DAMAGES[case]
    shutil.copytree(quantized_folder("gpt2", "-".join(dict.fromkeys(("float32", dtype)))), tmp_path / "c")
    damage(tmp_path / "c")
    command = ("sample", "x", "-m", tmp_path / "c", "-n", "1")
    assert "is damaged: its sha256" in gpt(*command).err
    rewrite_checksums(tmp_path / "c")
    done = gpt(*command)
    assert done.code == 2, done
    assert len(done.err.splitlines()) <= 2
    assert any(alternative in done.err for alternative in message.split("|")), done.err
    with pytest.raises(UserError):
        library.load(tmp_path / "c")


# Transformers, the Hub, GPUs


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("shape", ["gpt2", "modern", "untied"])
def test_transformers_refuses_quantized_folders(quantized_folder: QuantizedFolder, shape: str, dtype: str) -> None:
    transformers = pytest.importorskip("transformers")
    path = quantized_folder(shape, f"float32-{dtype}")
    name = json.loads((path / "config.json").read_text())["architectures"][0]
    for reader in (transformers.AutoModelForCausalLM, getattr(transformers, name), transformers.AutoModel):
        with pytest.raises(ValueError, match="quant_method"):
            reader.from_pretrained(path)
    assert transformers.AutoTokenizer.from_pretrained(path)("ab")["input_ids"] == [97, 98]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("shape", ["gpt2", "modern", "untied"])
def test_quantized_tensors_do_not_match_transformers_models(
    quantized_folder: QuantizedFolder, shape: str, dtype: str
) -> None:
    """A reader that ignores quantization_config cannot load these tensors."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(quantized_folder(shape))
    )
    for model in (reference, reference.base_model):
        with pytest.raises(RuntimeError, match="Missing key|size mismatch"):
            model.load_state_dict(load_file(quantized_folder(shape, f"float32-{dtype}") / "model.safetensors"))


def test_hub_downloads_all_files_of_a_quantized_folder(quantized_folder: QuantizedFolder) -> None:
    names = {path.name for path in quantized_folder("gpt2", "float32-int4").iterdir()}
    assert {name for name in names if any(fnmatch(name, pattern) for pattern in hub.FILES)} == names


@pytest.mark.slow
def test_quantized_folder_matches_the_dtype_option_on_a_gpu(quantized_folder: QuantizedFolder, cuda: Any) -> None:
    """Matrix products use bfloat16 and int8."""
    for shape in ("gpt2", "untied"):
        unquantized, quantized = quantized_folder(shape), quantized_folder(shape, "float32-int8")
        expected = logits(unquantized, "cuda", dtype="int8", sampling=SAMPLING)
        assert torch.equal(logits(quantized, "cuda", sampling=SAMPLING), expected)
        exact = logits(quantized, "cuda", dtype="float32")
        assert (expected - exact).abs().max() < 0.1 * exact.abs().max()
        int4, dequantized = quantized_folder(shape, "float32-int4"), quantized_folder(shape, "float32-int4-float32")
        options = {"dtype": "float32", "sampling": SAMPLING}
        assert torch.equal(logits(int4, "cuda", **options), logits(dequantized, "cuda", **options))
