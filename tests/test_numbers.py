"""Models that compute NaN or infinity: every command reports one clear error and none hangs."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY, Done, Gpt, make_text
from ranks import to_options
from torch import Tensor

import gpt as library
from gpt.decoding.context import Context
from gpt.model.decoder import GPT
from gpt.runs import checkpoint
from gpt.system.errors import NotANumber
from gpt.system.words import as_json

DAMAGE: dict[str, Callable[[GPT], Tensor]] = {
    "one NaN": lambda model: model.wte.weight[5].fill_(math.nan),
    "infinity": lambda model: next(model.h[0].mlp.parameters())[0].fill_(math.inf),  # type: ignore[union-attr]
}
SAMPLE_OPTIONS = (
    "-N 3 --seed 1", "--greedy", "--beam 2", "--dtype int8 --greedy",
    "--repetition-penalty 2 --no-repeat-ngram 2 --min-tokens 3 --seed 1",
)  # fmt: skip


@pytest.fixture(scope="module", params=DAMAGE)
def damaged(request: pytest.FixtureRequest, run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    loaded = library.load(run_folder)
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        DAMAGE[request.param](model)
    target = tmp_path_factory.mktemp("damaged") / "model"
    checkpoint.save(target, model, checkpoint.TokenizerFiles(loaded.tokenizer, model.config), {})
    return target


def assert_damage_error(result: Done, message: str) -> None:
    assert result.code == 1, result.err
    first, second = result.err.splitlines()[-2:]
    assert first.startswith("error: ")
    assert message in first
    assert second.startswith("hint: its weights are damaged")
    assert not result.out


@pytest.mark.parametrize("options", SAMPLE_OPTIONS)
def test_every_sampling_method_reports_damaged_weights(gpt: Gpt, damaged: Path, options: str) -> None:
    # The message names the weights if they are quantized, and the logits if not.
    assert_damage_error(gpt("sample", "the cat", "-m", damaged, "-n", "5", *options.split()), "NaN or infinite")


def test_batches_and_logprobs_report_damaged_weights(gpt: Gpt, damaged: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the"}\n{"prompt": "cat"}\n')
    for options in (["--greedy"], ["--beam", "2"]):
        result = gpt("sample", "-m", damaged, "--prompts", prompts, "-n", "4", "--json", *options)
        assert_damage_error(result, "NaN or infinite logits")
    result = gpt("sample", "the cat sat", "-m", damaged, "-n", "0", "--greedy", "--json", "--echo-logprobs")
    assert_damage_error(result, "NaN or infinite logits")


def test_a_conversation_continues_after_the_error(gpt: Gpt, damaged: Path) -> None:
    result = gpt("sample", "-i", "-m", damaged, "--seed", "1", stdin=b"the\n/set beam 2\ncat\n/set max-tokens 0\nmat\n")
    assert result.code == 0
    assert result.err.count("error: the model produced NaN or infinite logits") == 2
    assert result.out.endswith("mat\n")


def test_eval_and_inspect_report_damaged_weights(gpt: Gpt, damaged: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\n" * 20)
    assert_damage_error(gpt("eval", text, "-m", damaged), "the loss is nan: it is ")
    assert_damage_error(gpt("eval", text, "-m", damaged, "--json"), "it is not finite for")
    assert_damage_error(gpt("inspect", "attention", "the cat", "-m", damaged, "--json"), "logits of the model")
    result = gpt("eval", text, "-m", damaged, "--per-token")
    assert result.code == 1
    assert {json.loads(line)["logprob"] for line in result.out.splitlines()} == {None}


def test_inspecting_non_finite_embeddings_is_an_error(gpt: Gpt, run_folder: Path) -> None:
    from gpt.insight import inspect

    base_model = library.load(run_folder)
    model = copy.deepcopy(base_model.model)
    with torch.no_grad():
        model.wte.weight[5, 3] = math.nan
    with pytest.raises(NotANumber, match=r"^1 of 12,800 values of the embedding"):
        inspect.Embeddings(model, base_model.tokenizer)


def test_training_continues_if_samples_fail(gpt: Gpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a bad loss stops training."""
    text = tmp_path / "text.txt"
    text.write_bytes(make_text(500).encode())
    monkeypatch.setattr(Context, "logits", lambda self, x: x.new_full((*x.shape[:-1], 300), math.nan))
    tiny = {**TINY, "sample_every": 2}
    options = to_options(tiny)
    result = gpt("train", text, "-o", tmp_path / "run", "--steps", "4", "--json", *options)
    assert result.code == 0, result.err
    assert result.err.count("could not generate a sample: the model produced NaN or infinite logits") >= 2
    assert json.loads(result.out)["steps"] == 4


def test_json_replaces_nan_at_any_depth() -> None:
    values = {"a": math.nan, "b": [1.5, -math.inf, {"c": (math.inf, "x")}], "d": {"é": 1}}
    assert json.loads(as_json(values)) == {"a": None, "b": [1.5, None, {"c": [None, "x"]}], "d": {"é": 1}}
    assert as_json({"é": 1}) == '{"é": 1}'
    assert as_json({"é": 1}, ascii=True) == '{"\\u00e9": 1}'
