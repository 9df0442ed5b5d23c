"""Blocks compiled for a CPU compute what blocks do, and no code comes from a folder that others can write to."""

import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import more
from models import CPU, FAMILIES

from gpt import programs
from gpt.config import GPTConfig
from gpt.decoding import native
from gpt.decoding.context import Context
from gpt.decoding.engine import generate
from gpt.decoding.weights import prepare
from gpt.device import Compute
from gpt.model.cache import KVCache, Placement
from gpt.model.decoder import GPT
from gpt.model.quantize import round_matrices
from gpt.sample_config import SampleConfig
from gpt.training.native import GradientProgram
from gpt.training.step import Objective

CONFIG = SampleConfig(greedy=True, max_tokens=40, ignore_eot=True)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled blocks, which is empty."""
    monkeypatch.setattr(programs, "user_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "programs"


def model_of(
    arch: str = "gpt2", bits: int | None = None, native_notes: list[str] | None = None, exact: bool = False, **more: Any
) -> GPT:
    torch.manual_seed(0)
    properties = {"block_size": 64, "n_layer": 3, "n_head": 4, "n_embd": 128, **FAMILIES[arch], **more}
    model = GPT(GPTConfig(vocab_size=64, **properties)).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    if bits is not None:
        round_matrices(model, bits)
    if not exact:
        prepare(model, CPU, keep=native_notes is not None)
    if native_notes is not None:
        native.use(model, native_notes.append)
    return model


@torch.inference_mode()
def stream(model: GPT) -> torch.Tensor:
    """The residual stream of 30 positions, computed one after the other."""
    cache = KVCache(model.config, 1, CPU.device, CPU.dtype)
    return torch.cat([model.trunk(torch.tensor([[id]]), Placement(cache, [(0, [id], 1)])) for id in range(30)], dim=1)


def written(model: GPT, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Ids that a model writes after a prompt, and their log-probabilities."""
    tokens = list(generate(Context(model, CPU, 1, 64), prompt, CONFIG, ends=()))
    return [token.id for token in tokens], torch.tensor([token.logprob for token in tokens])


needs_compiler = pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no compiler")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("arch", "bits", "more"),
    [
        ("qwen3", 4, {"n_kv_head": 2, "window": 9, "window_layers": (0, 2)}),
        ("qwen2", 8, {"n_kv_head": 1}),
        ("gpt2", None, {}),
        more("qwen3", None, {"n_kv_head": 2, "window": 9, "window_layers": (0, 2)}),
        more("gpt2", 8, {"n_embd": 36}),  # 108 rows, which are filled up to whole tiles
    ],
)
def test_compiled_blocks_write_the_same(arch: str, bits: int | None, more: dict[str, Any], place: Path) -> None:
    notes: list[str] = []
    compiled = model_of(arch, bits, notes, **more)
    prompt = list(range(3, 14))
    ids, logprobs = written(compiled, prompt)
    assert all(compiled.h[0].programs._made.values())
    assert [note[:9] for note in notes] == ["compiling"]
    expected, others = written(model_of(arch, bits, **more), prompt)
    if bits is None:
        assert ids == expected
        torch.testing.assert_close(logprobs, others, atol=2e-5, rtol=0)
    exact = stream(model_of(arch, bits, exact=True, **more))  # with the restored weights, and no rounding besides
    torch.testing.assert_close(stream(compiled), exact, atol=5e-5, rtol=0)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700 or sys.platform == "win32"
    kept = sorted(place.iterdir())
    assert [path.suffix for path in kept] == [".pt2"]
    assert kept[0].stat().st_size > 100_000
    before = {path: path.stat().st_ino for path in kept}
    again = model_of(arch, bits, second := [], **more)
    assert written(again, prompt)[0] == ids
    assert second == []  # it was found
    assert {path: path.stat().st_ino for path in place.iterdir()} == before


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 3
    if how == "zero pages":
        data[middle : 2 * middle] = bytes(middle)
    elif how == "flipped bit":
        data[middle] ^= 1
    elif how == "truncated":
        del data[middle:]
    path.write_bytes(data)
    if how == "another's checksum":
        path.rename(path.with_stem(path.stem[:-64] + "0" * 64))
    elif how == "no checksum":
        path.rename(path.with_stem(path.stem[:-65]))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Finds the program of a name in place of a graph: a file of text, which the compiler writes and torch reads."""

    def compiled(graph: str, scratch: Path, options: object) -> Path:
        (scratch / "program.pt2").write_text(f"{graph}: {99 * 'code '}")
        return scratch / "program.pt2"

    def opened(path: Path) -> str:
        text, _, code = path.read_text().partition(": ")
        assert code == 99 * "code ", "a segmentation fault"
        return text

    monkeypatch.setattr(programs, "compile", compiled)
    monkeypatch.setattr(programs, "_opened", opened)
    monkeypatch.setenv("CXX", sys.executable)
    return lambda name: programs.find(name, lambda: name, lambda text: None, "it")  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("how", ["zero pages", "flipped bit", "truncated", "another's checksum", "no checksum"])
def test_a_damaged_program_is_compiled_again(how: str, stand_ins: Callable[[str], str], place: Path) -> None:
    assert stand_ins("a") == "a"
    whole = next(place.iterdir())
    name, data = whole.name, whole.read_bytes()
    damage(whole, how)
    notes: list[str] = []
    assert programs.find("a", lambda: "a", notes.append, "it") == "a"  # type: ignore[arg-type, return-value, comparison-overlap]
    assert [note.split()[-1] for note in notes] == ["damaged", "once"][how == "no checksum" :]
    assert (place / name).read_bytes() == data
    assert programs.find("a", pytest.fail, pytest.fail, "it") == "a"  # type: ignore[comparison-overlap]


def test_a_program_that_this_system_cannot_load_is_compiled_again(
    stand_ins: Callable[[str], str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays, for the system that shares the folder."""
    stand_ins("a")
    before = set(place.iterdir())

    def missing(path: Path) -> str:
        monkeypatch.setattr(programs, "_opened", lambda path: "opened")
        raise RuntimeError("GLIBC_2.99 not found")

    monkeypatch.setattr(programs, "_opened", missing)
    assert stand_ins("a") == "opened"
    assert before <= set(place.iterdir())


@pytest.mark.parametrize(
    ("platform", "there", "unasked"),
    [("linux", "g++", True), ("linux", "cl", False), ("win32", "cl", True), ("darwin", "clang++", False)],
)
def test_programs_are_compiled_unasked(
    platform: str, there: str, unasked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the compiler that Inductor calls is there."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == there else None)
    assert programs.compiles_unasked() == unasked
    monkeypatch.setenv("CXX", there)
    assert programs.compiles_unasked() == (platform != "darwin")


def test_programs_that_were_used_last_are_kept(
    monkeypatch: pytest.MonkeyPatch, stand_ins: Callable[[str], str], place: Path
) -> None:
    def use(name: str, at: int) -> None:
        assert stand_ins(name) == name
        path = next(place.glob(f"{programs.digest(name)}-*.pt2"))
        os.utime(path, (at, at))  # the clock of a disk may be coarse

    monkeypatch.setattr(programs, "KEPT", 2)
    use("a", 1)
    use("b", 2)
    assert programs.find("a", pytest.fail, pytest.fail, "it") == "a"  # later than b
    killed, at_work = (place / f"{programs.SCRATCH}{name}" for name in ("killed", "at-work"))
    for folder in (killed, at_work):
        folder.mkdir()
        (folder / "kernel.o").touch()
    os.utime(killed, (1, 1))
    use("c", 3)
    assert sorted(path.read_text()[0] for path in place.glob("*.pt2")) == ["a", "c"]
    assert at_work.exists()
    assert not killed.exists()

    def refused(*args: object) -> None:
        raise PermissionError("the folder is read-only")

    monkeypatch.setattr(os, "utime", refused)
    assert programs.find("c", pytest.fail, pytest.fail, "it") == "c"


def test_without_a_compiler_blocks_are_computed(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    def fail(*args: object) -> Path:
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr(programs, "compile", fail)
    notes: list[str] = []
    assert written(model_of("gpt2", None, notes), [1, 2])[0] == written(model_of("gpt2"), [1, 2])[0]
    assert [note for note in notes if "seconds, once" not in note] == ["blocks are not compiled: no C++ compiler"]
    assert list(place.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="folders have no mode there")
@pytest.mark.parametrize("how", ["open", "link", "file"])
def test_a_folder_that_is_not_ones_own_is_left_alone(how: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.parent.mkdir()
    if how == "open":
        place.mkdir()
        place.chmod(0o755)
    elif how == "link":
        (place.parent / "other").mkdir(mode=0o700)
        place.symlink_to(place.parent / "other")
    else:
        place.write_text("mine")
    monkeypatch.setattr(programs, "compile", lambda *args: pytest.fail("compiled"))
    notes: list[str] = []
    assert written(model_of("gpt2", None, notes), [1, 2])[0] == written(model_of("gpt2"), [1, 2])[0]
    assert len(notes) == 1
    assert str(place) in notes[0]
    assert how != "open" or list(place.iterdir()) == []


def test_programs_are_by_shape_and_not_by_length() -> None:
    def key(kinds: tuple[str, ...] = ("float",) * 4, **more: Any) -> str:
        shape = {"vocab_size": 64, "block_size": 64, "n_embd": 32, "n_head": 2, "n_layer": 2, **more}
        return programs.digest(native._key(GPTConfig(**shape), kinds))

    assert key() == key(n_layer=9, vocab_size=99, block_size=77)
    others = [key(("int8",) * 4), key(n_embd=64), key(n_head=4), key(biases="none"), key(layer_norm_epsilon=1e-6)]
    assert len({key(), *others}) == 6


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("arch", "layers", "dropout", "dtype"),
    [
        ("gpt2", 2, 0.0, torch.bfloat16),
        ("qwen3", 1, 0.0, torch.float32),
        ("gpt2", 1, 0.1, torch.bfloat16),
        more("gpt2", 1, 0.0, torch.float32),
        more("qwen3", 1, 0.0, torch.bfloat16),
    ],
)
def test_a_compiled_steps_gradients_are_the_same(arch: str, layers: int, dropout: float, dtype: torch.dtype) -> None:
    """To rounding; and with dropout the same again from the same seed."""
    compute, found = Compute(torch.device("cpu"), dtype), []
    model = model_of(arch, exact=True, dropout=dropout, n_layer=layers).train()
    objective = Objective(model, 0)
    program = GradientProgram(objective, model, compute, 4, lambda text: None)
    windows = torch.randint(64, (4, 65))
    x, y, counted = windows[:, :-1], windows[:, 1:], torch.tensor(256)
    for _ in range(2):
        torch.manual_seed(1)
        found.append([program(x, y, counted), *(p.grad for p in model.parameters())])
        model.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    if not dropout:
        with compute.autocast():
            loss = objective(x, y) / counted
        loss.backward()
        expected = [loss.detach(), *(p.grad for p in model.parameters())]
        for got, wanted in zip(found[0], expected, strict=True):
            assert (got - wanted).norm() < (0.05 if dtype == torch.bfloat16 else 1e-4) * wanted.norm()
