"""`gpt report --before-after`: a fine-tuned run compared with its base."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from conftest import Gpt, one_line_of_what_and_what_next

import gpt as library
from gpt import api

SETTINGS: dict[str, Any] = {"dtype": "float32", "sample_every": 0, "out": "tuned", "steps": 3, "warmup": 0}


@pytest.mark.parametrize("examples", [False, True])
def test_untrained_adapter_changes_nothing(gpt: Gpt, run_folder: Path, second_text: Path, examples: bool) -> None:
    if examples:
        second_text.write_text(
            "".join(json.dumps({"prompt": f"{i} + 1 =", "completion": f" {i}"}) + "\n" for i in range(60))
        )
    library.train(second_text, init=run_folder, lora_rank=2, lr=0.0, pairs=examples, val_fraction=0.2, **SETTINGS)
    compared = json.loads(gpt("report", "tuned", "--before-after", "--json").out)["before_after"]
    changes = [*compared["losses"], *compared["passage"]]
    assert compared["passage"] and {row["change"] for row in changes} == {0.0}
    assert [answer["before"] for answer in compared["answers"]] == [answer["after"] for answer in compared["answers"]]
    assert any(answer["before"] for answer in compared["answers"])
    if examples:
        assert all(answer["prompt"].endswith(" + 1 =") for answer in compared["answers"])


def test_losses_are_those_of_gpt_eval(gpt: Gpt, run_folder: Path, second_text: Path) -> None:
    Path("also.txt").write_text("the cat\n[bold]sat</script>\n" * 20)
    library.train(second_text, init=run_folder, lr=0.01, **SETTINGS)
    arguments = ["report", "tuned", "--also", "also.txt"]
    compared = json.loads(gpt(*arguments, "--json").out)["before_after"]
    assert compared["losses"][0]["after"] != compared["losses"][0]["before"]
    for row, text in zip(compared["losses"], ("tuned/tokens", "also.txt"), strict=True):
        for when, model in (("before", run_folder), ("after", "tuned")):
            loss = json.loads(gpt("eval", text, "-m", model, "--json").out)["loss"]
            assert row[when] == pytest.approx(loss, abs=1e-6)
        assert row["change"] == row["after"] - row["before"]
    most, passage = compared["most"], compared["passage"]
    assert abs(passage[most[0]]["change"]) == max(abs(token["change"]) for token in passage) > 0
    lines = [
        json.loads(line)["logprob"]
        for line in gpt("eval", "tuned/tokens", "-m", "tuned", "--per-token").out.splitlines()
    ]
    values = [token["after"] for token in passage]
    starts = range(len(lines) - len(values) + 1)
    assert any(lines[at : at + len(values)] == pytest.approx(values, abs=1e-4) for at in starts)
    in_terminal = gpt(*arguments)
    assert f"{compared['losses'][1]['change']:+.4f}" in in_terminal.out


def test_run_needs_a_base_that_is_unchanged(gpt: Gpt, run_folder: Path, second_text: Path) -> None:
    one_line_of_what_and_what_next(gpt("report", run_folder, "--before-after"), "has no base to compare with")
    library.train(second_text, init=run_folder, **SETTINGS)
    record = json.loads(Path("tuned/run.json").read_text())
    record["init"]["sha256"] = {"model.safetensors": "0" * 64}
    Path("tuned/run.json").write_text(json.dumps(record))
    one_line_of_what_and_what_next(gpt("report", "tuned", "--before-after"), "whose weights have changed")


def test_only_one_model_is_in_memory(run_folder: Path, second_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Any] = []
    alive: list[int] = []
    load = api.load

    def observe(*arguments: Any, **options: Any) -> Any:
        alive.append(sum(model() is not None for model in models))
        loaded = load(*arguments, **options)
        models.append(weakref.ref(loaded.model))
        return loaded

    library.train(second_text, init=run_folder, **SETTINGS)
    monkeypatch.setattr(api, "load", observe)
    api.compare_with_base("tuned")
    assert alive == [0, 0]
