"""Models that compute NaN or infinity: one clear error in every command, and never a loop."""

import copy
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY, Done, Gpt, make_text
from torch import Tensor

import gpt as library
from gpt.decoding.context import Context
from gpt.errors import NotANumber
from gpt.model.decoder import GPT
from gpt.runs import checkpoint
from gpt.words import as_json

DAMAGE: dict[str, Callable[[GPT], Tensor]] = {
    "one NaN": lambda model: model.wte.weight[5].fill_(math.nan),
    "infinity": lambda model: next(model.h[0].mlp.parameters())[0].fill_(math.inf),  # type: ignore[union-attr]
}
WAYS = (
    "-N 3 --seed 1", "--greedy", "--beam 2", "--speculate 4 --greedy", "--dtype int8 --greedy",
    "--repetition-penalty 2 --no-repeat-ngram 2 --min-tokens 3 --seed 1",
)  # fmt: skip


@pytest.fixture(scope="module", params=DAMAGE)
def damaged(request: pytest.FixtureRequest, run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, whole on the disk, whose weights are no numbers."""
    loaded = library.load(run_folder)
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        DAMAGE[request.param](model)
    target = tmp_path_factory.mktemp("damaged") / "model"
    checkpoint.save(target, model, checkpoint.TokenizerFiles(loaded.tokenizer, model.config), {})
    return target


def failed(done: Done, message: str) -> None:
    assert done.code == 1, done.err
    first, second = done.err.splitlines()[-2:]
    assert first.startswith("error: ")
    assert message in first
    assert second.startswith("hint: its weights are damaged")
    assert not done.out


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_sampling_says_so(gpt: Gpt, damaged: Path, way: str) -> None:
    # Of weights that are to be rounded, or of logits.
    failed(gpt("sample", "the cat", "-m", damaged, "-n", "5", *way.split()), "NaN or infinite")


@pytest.mark.filterwarnings("default")  # the compiler warns of its own doings
def test_compiled_steps_say_so(gpt: Gpt, damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backend that compiles nothing, since that takes half a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    failed(gpt("sample", "the", "-m", damaged, "-n", "5", "--greedy", "--compile", "on"), "NaN or infinite logits")


def test_many_prompts_and_files_say_so(gpt: Gpt, damaged: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the"}\n{"prompt": "cat"}\n')
    for way in (["--greedy"], ["--beam", "2"]):
        done = gpt("sample", "-m", damaged, "--prompts", prompts, "-n", "4", "-o", tmp_path / "out.jsonl", *way)
        failed(done, "NaN or infinite logits")
        assert (tmp_path / "out.jsonl").read_bytes() == b""
    done = gpt("sample", "the cat sat", "-m", damaged, "-n", "0", "--greedy", "--json", "--echo-logprobs")
    failed(done, "NaN or infinite logits")


def test_a_conversation_goes_on(gpt: Gpt, damaged: Path) -> None:
    done = gpt("sample", "-i", "-m", damaged, "--seed", "1", stdin=b"the\n/set beam 2\ncat\n/set max-tokens 0\nmat\n")
    assert done.code == 0
    assert done.err.count("error: the model produced NaN or infinite logits") == 2
    assert done.out.endswith("mat\n")


def test_measuring_and_looking_say_so(gpt: Gpt, damaged: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\n" * 20)
    failed(gpt("eval", text, "-m", damaged), "the loss is nan: it is ")
    failed(gpt("eval", text, "-m", damaged, "--json"), "it is not finite for")
    failed(gpt("inspect", "attention", "the cat", "-m", damaged, "--json"), "logits of the model")
    done = gpt("eval", text, "-m", damaged, "--per-token")
    assert done.code == 1
    assert {json.loads(line)["logprob"] for line in done.out.splitlines()} == {None}


def test_looking_at_embeddings_that_are_no_numbers(gpt: Gpt, run_folder: Path) -> None:
    from gpt import inspect

    loaded = library.load(run_folder)
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        model.wte.weight[5, 3] = math.nan
        model.wpe.weight[1] = math.inf  # type: ignore[union-attr, index, operator]
    with pytest.raises(NotANumber, match=r"^1 of 12,800 values of the embedding"):
        inspect.Embeddings(model, loaded.tokenizer)
    with pytest.raises(NotANumber, match=r"^32 of 1,024 values of the position table"):
        inspect.positions(model)


def test_a_run_goes_on_without_its_samples(gpt: Gpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a run goes on is for its loss to say."""
    text = tmp_path / "text.txt"
    text.write_bytes(make_text(500).encode())
    monkeypatch.setattr(Context, "logits", lambda self, x: x.new_full((*x.shape[:-1], 300), math.nan))
    tiny = {**TINY, "sample_every": 2}
    options = [word for name, value in tiny.items() for word in ("--" + name.replace("_", "-"), str(value))]
    done = gpt("train", text, "-o", tmp_path / "run", "--steps", "4", "--json", *options)
    assert done.code == 0, done.err
    assert done.err.count("could not generate a sample: the model produced NaN or infinite logits") == 2
    assert json.loads(done.out)["steps"] == 4


def test_json_has_no_nan_at_any_depth() -> None:
    values = {"a": math.nan, "b": [1.5, -math.inf, {"c": (math.inf, "x")}], "d": {"é": 1}}
    assert json.loads(as_json(values)) == {"a": None, "b": [1.5, None, {"c": [None, "x"]}], "d": {"é": 1}}
    assert as_json({"é": 1}) == '{"é": 1}'
    assert as_json({"é": 1}, ascii=True) == '{"\\u00e9": 1}'
