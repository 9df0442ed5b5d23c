"""The C decoder: equality with `gpt.model.decoder`, to the last bit in any company, and compilers that fail."""

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, more, slow
from models import CPU, SHAPES, engine_of, loud, push, tiny_model
from torch import Tensor

from gpt.config.model import GPTConfig
from gpt.config.sample import SampleConfig
from gpt.decoding import library, native
from gpt.decoding.context import Context
from gpt.decoding.engine import Request
from gpt.decoding.native import PackedLinear, pack
from gpt.decoding.weights import prepare
from gpt.model import cache
from gpt.model.decoder import GPT
from gpt.model.quantize import quantize_model
from gpt.system import programs

if shutil.which("cc") is None:
    pytest.skip("no C compiler", allow_module_level=True)

# Vector instructions that this CPU has: all, AVX2 with and without VNNI, and SSE2. `test_sanitizers_find_nothing` sets
# the variable.
BUILDS = {
    "native": os.environ.get("DECODER_FLAGS", "").split(), "avx2": ["-mno-avx512f"], "haswell": ["-march=haswell"],
    "plain": ["-march=x86-64"], "unoptimized": ["-O1"],
}  # fmt: skip
FAMILIES = SHAPES | {
    "odd": GPTConfig(50, 40, 2, 3, 27),
    "own": GPTConfig(50, 40, 2, 2, 16, positions="rotary"),
    "wide": GPTConfig.of("modern", 300, 64, 3, 6, 96, n_kv_head=2, head_dim=72, n_inner=100, window=8),
}
ODD_FAMILIES = ("qwen3", "odd", "wide")


@pytest.fixture(scope="module")
def compile_once(library_folder: Path) -> Callable[[], Path]:
    return functools.cache(lambda: next(library_folder.glob("decoder-*.so"), None) or library.compile(library_folder))


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, compile_once: Callable[[], Path]) -> Callable[[str], ctypes.CDLL]:
    """Returns the decoder compiled for some vector instructions."""
    libraries: dict[str, ctypes.CDLL] = {}

    def get(name: str) -> ctypes.CDLL:
        if any("-m" in flag for flag in BUILDS[name]) and platform.machine() not in ("x86_64", "AMD64"):
            pytest.skip("these instructions are those of x86-64")
        if name == "haswell" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
            pytest.skip("this CPU has no AVX2")
        if name not in libraries:
            flags = [*library.NATIVE, *BUILDS[name]]
            path = library.compile(tmp_path_factory.mktemp(name), flags) if BUILDS[name] else compile_once()
            libraries[name] = library.open_library(path)
        return libraries[name]

    return get


def make_model(config: GPTConfig, bits: int | None = None) -> GPT:
    model = loud(config, spread=0.1)
    return model if bits is None else quantize_model(model, bits)


def compute_logits(context: Context, *steps: list[tuple[int, list[int]]]) -> Tensor:
    """Appends ids to slots in steps, and returns the logits after the ids of slot 0."""
    logits = []
    for step in steps:
        ids = torch.tensor([id for _, new in step for id in new])
        x = context.forward([(context.slots[row], len(new)) for row, new in step], ids)
        logits += [
            context.logits(part)
            for (row, _), part in zip(step, x.split([len(new) for _, new in step]), strict=True)
            if row == 0
        ]
    return torch.cat(logits)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize(
    ("instructions", "family"),
    [
        *(("native", family) for family in FAMILIES),
        *(slow(name, family) for name in ("avx2", "plain") for family in ODD_FAMILIES),
        *(more(name, family) for name in ("avx2", "plain") for family in FAMILIES if family not in ODD_FAMILIES),
        *(more(name, family) for name in ("haswell", "unoptimized") for family in FAMILIES),
    ],
)
def test_logits_match_the_definition_in_any_company(
    family: str, bits: int | None, instructions: str, build: Callable[[str], ctypes.CDLL]
) -> None:
    """The definition is torch's decoder, which also rounds the inputs of int8 and int4 products."""
    config = FAMILIES[family]
    packed = make_model(config, bits)
    pack(packed, build(instructions))
    ids = torch.randint(config.vocab_size, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        expected = make_model(config, bits)(torch.tensor([ids]))[0]
        assert torch.equal(packed(torch.tensor([ids]))[0], expected)
    alone = compute_logits(Context(packed, CPU), [(0, ids)])
    difference = (alone - expected).abs().amax(-1) / expected.abs().max()
    if bits is None:
        assert difference.max() < 1e-5
    else:  # A rounding error can change the level of an input, and with it all later positions.
        assert difference.median() < 0.03
        assert difference[:5].max() < 1e-5
    context = Context(packed, CPU, 4)
    beside = compute_logits(
        context, *([(3, [7, 8])] * (at % 3 > 0) + [(0, [id])] + [(1, [1, 2, 3][: 1 + at % 2])] * (at < 20)
                   for at, id in enumerate(ids[:12])),
        [(2, [5] * 25), (0, ids[12:])],
    )  # fmt: skip
    assert torch.equal(beside, alone)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("window", [None, 5, 30])
def test_windows_and_full_contexts_match_the_definition(
    positions: str, window: int | None, build: Callable[[str], ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings of columns wrap around several times. Learned positions start again in the middle."""
    monkeypatch.setattr(native, "_found", [build("native")])
    ids = (torch.arange(300) ** 2 % 50).tolist()
    config = GPTConfig.of("modern" if positions == "rotary" else "gpt2", 50, 150, 2, 2, 16, window=window)
    context, reference = (Context(model, CPU, 2) for model in (prepare(loud(config), CPU), loud(config)))
    assert native.is_packed(context.model)
    # Prompts in chunks of several sizes, then single tokens.
    sizes = [100, 1, 37, 12] + [1] * 150
    for at, size in zip(np.cumsum([0, *sizes]).tolist(), sizes, strict=False):
        new = ids[at : at + size]
        x, expected = push(context, new), push(reference, new)
        torch.testing.assert_close(context.logits(x), reference.logits(expected), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", more("bfloat16"), "int8", "int4"])
@pytest.mark.parametrize("count", [40, more(1000)])
def test_a_text_does_not_depend_on_other_requests(dtype: str, count: int) -> None:
    """Requests differ in length, beams, log-probabilities and common prefixes."""
    config = GPTConfig.of("modern", 50, 48, 2, 4, 64, n_kv_head=2, window=12)
    bits = {"int8": 8, "int4": 4}.get(dtype)
    model = make_model(config, bits)
    prepare(model, replace(CPU, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32))
    random = np.random.default_rng(0)
    prompts = [random.integers(50, size=n).tolist() for n in (1, 20, 30, 70)]
    requests, settings = [], []
    for index in range(count):
        prompt = [*prompts[index % 4], *random.integers(50, size=random.integers(1, 20)).tolist()]
        kind = ({}, {"greedy": True}, {"beam": 2}, {"logprobs": 2}, {"repetition_penalty": 1.2})
        settings.append(SampleConfig(max_tokens=int(random.integers(1, 30)), **kind[index % 5]))
        requests.append(Request(prompt, settings[-1], seed=index))

    def generate(members: list[Request], rows: int) -> list[Any]:
        engine = engine_of(Context(model, CPU, rows), [], SampleConfig())
        numbers = [engine.add(request) for request in members]
        tokens: dict[int, list[Any]] = {number: [] for number in numbers}
        for update in engine.run():
            assert update.error is None
            tokens[update.number] += [(token.id, token.logprob) for token in update.tokens]
            tokens[update.number] += [[token.id for token in best.tokens] for best in update.best]
        return [tokens[number] for number in numbers]

    together = generate(requests, 16)
    for request, text in list(zip(requests, together, strict=True))[:: 1 + count // 100]:
        assert generate([request], 2) == [text]


def test_nan_reaches_the_logits() -> None:
    for bits in (None, 8):
        model = make_model(SHAPES["qwen3"], bits)
        pack(model, native.find(lambda text: None))  # type: ignore[arg-type]
        model.h[0].ln_1.weight.data[3] = torch.nan
        context = Context(model, CPU)
        assert compute_logits(context, [(0, [1, 2])]).isnan().all()


def test_float32_matrices_of_bfloat16_numbers_are_stored_in_bfloat16() -> None:
    lib = native.find(lambda text: None)
    assert lib is not None
    weight = torch.randn(20, 33)
    for matrix, kind in ((weight, "float32"), (weight.bfloat16().float(), "bfloat16"), (weight.half(), "float32")):
        packed = PackedLinear(lib, matrix, None)
        assert packed.kind == kind
        assert torch.equal(packed.restore().to(matrix.dtype), matrix)  # type: ignore[union-attr]


def test_ids_and_positions_out_of_range_are_refused() -> None:
    """C would read other memory."""
    context = Context(prepare(tiny_model(16), CPU), CPU)
    for ids in ([-1], [50], [1] * 17):
        with pytest.raises(ValueError, match="must be|do not fit"):
            compute_logits(context, [(0, ids)])


# Compiling


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[bool, list[str]]]:
    """Returns a function that finds the decoder like a new process, and returns whether it was found, and notes."""
    folder = tmp_path / "programs"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(programs, "own_folder", lambda: folder)

    def find() -> tuple[bool, list[str]]:
        notes: list[str] = []
        monkeypatch.setattr(native, "_found", [])
        return native.find(notes.append) is not None, notes

    return find


def write_compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "there is no C compiler (nothing); install gcc or clang"),
        ("echo 'decoder.c: error: no such instruction' >&2; exit 1", "cc failed: decoder.c: error: no such"),
        ("exit 3", "cc failed: status 3"),
        ("exit 0", "cc failed: status 0"),
        ("sleep 60 & wait", "took more than"),
        ('echo no library > "$(echo "$@" | sed \'s/.* -o //; s/ -lm//\')"', "decoding with torch"),
        ('exec cc "$@" -O1 -Dsqrtf=fabsf', "the compiled decoder computes wrong numbers"),
    ],
)
def test_compiler_that_fails_leaves_decoding_to_torch(
    script: str | None,
    reason: str,
    find: Callable[[], tuple[bool, list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CC", "nothing" if script is None else write_compiler(tmp_path / "cc", script))
    monkeypatch.setattr(library, "COMPILE_SECONDS", 1 if "sleep" in (script or "") else 120)
    found, notes = find()
    assert not found
    assert reason in notes[-1]
    assert len(notes) <= 2
    model = prepare(tiny_model(16), CPU)  # The reason is not printed again.
    assert not native.is_packed(model)
    expected = [
        token.id
        for update in engine_of(Context(tiny_model(16), CPU), [Request([1])], SampleConfig(max_tokens=5)).run()
        for token in update.tokens
    ]
    actual = [
        token.id
        for update in engine_of(Context(model, CPU), [Request([1])], SampleConfig(max_tokens=5)).run()
        for token in update.tokens
    ]
    assert actual == expected


@pytest.fixture
def cached(compile_once: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces compiling by a copy."""
    path = compile_once()
    monkeypatch.setattr(library, "compile", lambda folder: Path(shutil.copy(path, folder / "decoder.so")))


def test_damaged_library_is_compiled_again(find: Callable[[], tuple[bool, list[str]]], cached: None) -> None:
    assert find() == (True, ["compiling the decoder for this CPU: a few seconds, once"])
    assert find() == (True, [])
    [path] = programs.own_folder().iterdir()
    content = path.read_bytes()
    path.unlink()  # This process has loaded the file.
    path.write_bytes(content[:20_000] + bytes(8) + content[20_008:])
    found, notes = find()
    assert found
    assert notes[0] == f"{path} is damaged"
    assert find() == (True, [])


def test_another_cpu_and_a_changed_source_get_their_own_library(
    find: Callable[[], tuple[bool, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: None
) -> None:
    """Computers can share a home folder."""
    compiles = (True, ["compiling the decoder for this CPU: a few seconds, once"])
    assert find() == compiles
    changed = tmp_path / "decoder.c"
    changed.write_bytes(library.SOURCES[0].read_bytes() + b"\n")
    with monkeypatch.context() as patched:
        patched.setattr(library, "SOURCES", [changed, library.SOURCES[1]])
        assert find() == compiles
    read_text = Path.read_text
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", lambda path: read_text(path).replace("flags", "flags : more", 1))
        if Path("/proc/cpuinfo").exists():
            assert find() == compiles
    assert find() == (True, [])


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has files in memory")
def test_library_loads_from_a_folder_without_execution(
    find: Callable[[], tuple[bool, list[str]]], monkeypatch: pytest.MonkeyPatch, cached: None
) -> None:
    load = ctypes.CDLL

    def refuse(path: str) -> ctypes.CDLL:
        if not path.startswith("/proc/self/fd/"):
            raise OSError("failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert find()[0]


@pytest.mark.slow
def test_processes_compile_at_once_and_leave_one_library(tmp_path: Path, compile_once: Callable[[], Path]) -> None:
    script = f'sleep 1; cp {compile_once()} "$(echo "$@" | sed \'s/.* -o //; s/ -lm//\')"'
    code = "from gpt.decoding import native; assert native.find(lambda text: None) is not None"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CC": write_compiler(tmp_path / "cc", script)}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(list((tmp_path / "gpt/programs").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", more("-mno-avx512f"), more("-march=x86-64")])
def test_sanitizers_find_nothing(flags: str) -> None:
    """Runs the tests of logits, windows and rings in a process with AddressSanitizer and UndefinedBehaviorSanitizer."""
    runtime = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("the compiler has no AddressSanitizer")
    sanitizers = f"-fsanitize=address,undefined -fno-sanitize-recover=all -O1 {flags}"
    environment = {"DECODER_FLAGS": sanitizers, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    words = [sys.executable, "-m", "pytest", "-qxs", "-p", "no:cacheprovider", __file__]
    words += ["-k", "test_logits and (native-qwen3 or native-odd or native-wide) or test_windows and not 30"]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:3000]


@pytest.fixture(autouse=True)
def separate_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocates each matrix and each cache separately for the sanitizer, which finds accesses past an allocation."""
    if "-fsanitize" in os.environ.get("DECODER_FLAGS", ""):
        monkeypatch.setattr(
            native._Arena, "allocate", lambda self, size, dtype: torch.zeros(size, dtype=torch.uint8).view(dtype)
        )
        monkeypatch.setattr(
            cache, "_make_zeros", lambda shape, device, dtype: torch.zeros(shape, device=device, dtype=dtype)
        )
