"""Training on preferences with DPO."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Gpt, assert_same, curve, one_line_of_what_and_what_next
from models import CPU, SHAPES, loud, save
from transformers import AutoModelForCausalLM

import gpt as library
from gpt.chat import chat
from gpt.chat.examples import Preference, read_examples
from gpt.config.text import TextConfig
from gpt.insight.evaluate import score_windows
from gpt.model.decoder import GPT
from gpt.runs import checkpoint
from gpt.system.errors import UserError
from gpt.tokenizers.tokenizer import bytes_tokenizer
from gpt.training import preferences
from gpt.training.example_rows import ExampleRows, PreferenceEncoder, RowBatches
from gpt.training.step import PreferenceObjective

ANSWERS = [(f"{n} plus {n} is", f" {2 * n}", f" {n}{n}, I think" * (1 + n % 2)) for n in range(8)]
RECORDS = [dict(zip(("prompt", "chosen", "rejected"), answer, strict=True)) for answer in ANSWERS]
SETTINGS: dict[str, Any] = {"preferences": True, "dtype": "float32", "sample_every": 0}


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


CHATS = [{"chosen": turns(prompt, chosen), "rejected": turns(prompt, rejected)} for prompt, chosen, rejected in ANSWERS]
# Loss, rewards and gradient norm in four steps of TRL 1.16's DPOTrainer, with AdamW, on `base` and two records a step.
TRL = {
    "texts": [
        (0.693147, 0.0, 0.0, 4.321375), (0.569929, -0.006624, -0.273451, 4.011999),
        (0.370251, -0.040744, -0.894717, 3.153649), (0.353761, -0.026821, -0.994867, 2.020736),
    ],
    "messages": [
        (0.693147, 0.0, 0.0, 4.935423), (0.485184, -0.009672, -0.495053, 3.854562),
        (0.325057, -0.064976, -1.071578, 2.2397), (0.282992, -0.090961, -1.324566, 1.297531),
    ],
}  # fmt: skip


@pytest.fixture
def base(workdir: Path) -> Path:
    tokenizer = chat.with_template(bytes_tokenizer())
    config = replace(SHAPES["qwen2"], vocab_size=tokenizer.vocab_size, block_size=128)
    return save(workdir / "base", loud(config, spread=0.1), tokenizer)


def write(records: list[Any], name: str = "prefs.jsonl") -> Path:
    Path(name).write_text(
        "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)
    )
    return Path(name)


def read(records: list[Any], **config: Any) -> list[Preference]:
    return read_examples([str(write(records))], TextConfig(**{"val_fraction": 0, **config}), Preference).train


def open_rows(base: Path, records: list[Any]) -> tuple[GPT, ExampleRows]:
    """Returns the model, and the rows with their reference."""
    loaded = checkpoint.load(base, torch.device("cpu"))
    rows = PreferenceEncoder(loaded.tokenizer, 128, False).encode(read(records))
    sums = [-losses.sum() for _, losses in score_windows(loaded.model, map(rows.window, range(len(rows))), CPU)]
    rows.reference = np.array(sums, np.float32).reshape(-1, 2)
    return loaded.model.train(), rows


@pytest.mark.parametrize("form", TRL)
def test_losses_rewards_and_gradient_norms_equal_trl(form: str, base: Path) -> None:
    model, rows = open_rows(base, RECORDS if form == "texts" else CHATS)
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == is_matrix]} for is_matrix in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    objective = PreferenceObjective(model, 0, 0.1)
    for step, expected in enumerate(TRL[form]):
        ids = [[torch.from_numpy(rows[4 * step + 2 * pair + side].ids) for side in (0, 1)] for pair in (0, 1)]
        length = max(len(side) for pair in ids for side in pair) - 1
        x, y = torch.zeros(2, 2, length, dtype=torch.long), torch.full((2, 2, length), -100)
        for pair in (0, 1):
            for side in (0, 1):
                window = rows.window(4 * step + 2 * pair + side)
                x[pair, side, : len(window.x)] = torch.from_numpy(window.x)
                y[pair, side, : len(window.y)] = torch.from_numpy(window.y)
        assert rows.reference is not None
        scores = objective(x, y, torch.from_numpy(rows.reference[2 * step : 2 * step + 2])) / 2
        optimizer.zero_grad()
        scores[0].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert [*scores[[0, 3, 4]].tolist(), float(norm)] == pytest.approx(expected, abs=1e-5)


def test_gradients_equal_autograd_through_transformers(base: Path) -> None:
    """The reference is not the model, so that margins differ. Every gradient of the embedding is compared."""
    model, rows = open_rows(base, CHATS)
    assert rows.reference is not None
    rows.reference += np.random.default_rng(0).normal(0, 3, (8, 2)).astype(np.float32)
    x, y, reference = map(torch.from_numpy, RowBatches(rows, 8, 3).global_batch(0))
    scores = PreferenceObjective(model, 7, 0.3)(x, y, reference)
    scores[0].backward()
    other = AutoModelForCausalLM.from_pretrained(base).float()
    log_p = other(x.flatten(0, 1)).logits.log_softmax(-1).gather(-1, y.clamp(min=0).flatten(0, 1)[..., None])[..., 0]
    rewards = 0.3 * ((log_p * (y != -100).flatten(0, 1)).sum(-1).view(-1, 2) - reference)
    loss = -F.logsigmoid(rewards[:, 0] - rewards[:, 1]).sum()
    loss.backward()
    assert scores[0].item() == pytest.approx(loss.item(), rel=1e-5)
    assert scores[1].item() == int((rewards[:, 0] > rewards[:, 1]).sum())
    torch.testing.assert_close(scores[3:], rewards.sum(0), atol=1e-4, rtol=1e-5)
    embedding = other.get_input_embeddings().weight
    torch.testing.assert_close(model.wte.weight.grad, embedding.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": " b"}, 'it has no "rejected"'),
        ({"prompt": "a", "chosen": " b", "rejected": " b"}, '"chosen" and "rejected" are equal'),
        ({"prompt": "a", "chosen": turns("a", "b"), "rejected": turns("a", "c")}, "not all texts or all lists"),
        ({"prompt": "a", "chosen": 1, "rejected": " b"}, "not all texts or all lists"),
        ({"chosen": "a", "rejected": "b"}, "it has no prompt"),
        ({"chosen": turns("a"), "rejected": turns("a", "b")}, "it has no prompt, or no answer"),
        ({"chosen": turns("a", "b"), "rejected": [{"role": "user"}]}, 'it has no "content"'),
        ({"tools": [1], **RECORDS[0]}, '"tools" is not a list of objects'),
        ("{", "not JSON"),
    ],
)
def test_bad_record_is_named_or_skipped(record: Any, message: str, workdir: Path) -> None:
    with pytest.raises(UserError, match=r"prefs\.jsonl(:|, )?.*9") as raised:
        read([*RECORDS, record])
    assert message in raised.value.message
    assert len(read([*RECORDS, record], skip_bad=True)) == 8


def test_prompt_is_the_common_beginning(workdir: Path) -> None:
    """As TRL extracts it: a space before the answers is part of them."""
    texts, chats = read([{"chosen": "1 + 1 is two", "rejected": "1 + 1 is three"}]), read(CHATS)
    assert (texts[0].prompt, texts[0].chosen, texts[0].rejected) == ("1 + 1 is t", "wo", "hree")
    (spaced,) = read([{"chosen": "say a", "rejected": "say b"}])
    assert (spaced.prompt, spaced.chosen) == ("say", " a")
    assert [each.prompt for each in chats] == [turns(prompt) for prompt, _, _ in ANSWERS]


@pytest.mark.parametrize("copies", [3, 40])
def test_no_prompt_is_on_both_sides(copies: int, workdir: Path) -> None:
    records = [{**record, "chosen": f" {number}"} for number in range(copies) for record in RECORDS]
    corpus = read_examples([str(write(records))], TextConfig(val_fraction=0.2), Preference)
    train, held_out = ({example.prompt for example in side} for side in (corpus.train, corpus.held_out))
    assert train and held_out and not train & held_out
    assert len(corpus.train) + len(corpus.held_out) == len(records)


def test_long_answers_are_cut_and_long_prompts_skipped(workdir: Path) -> None:
    encoder = PreferenceEncoder(bytes_tokenizer(), 20, False)
    rows = encoder.encode(read([*RECORDS, {"prompt": "a" * 30, "chosen": "b", "rejected": "c"}]))
    assert (len(rows), rows.examples, max(len(row.ids) for row in rows)) == (16, 8, 21)
    assert "9 preferences are longer than the context of 20 tokens (--block-size): 8 cut, and 1 skipped" in " ".join(
        encoder.notes()
    )


def test_preferences_are_inferred_and_reported(gpt: Gpt, base: Path) -> None:
    file = write(RECORDS * 3)
    options = ["--init", base, "--steps", "4", "--lr", "0.01", "--dtype", "float32", "-o", "run", "--eval-every", "2"]
    result = gpt("train", file, *options)
    assert result.code == 0, result.err
    assert "every record is a preference: assuming --preferences" in result.err
    assert "nats per preference, on 3 held-out preferences" in result.out
    step, held_out = (
        next(line for line in curve(Path("run"))[::-1] if line["event"] == kind) for kind in ("step", "eval")
    )
    for line in (step, held_out):
        assert line["margin"] == pytest.approx(line["chosen_reward"] - line["rejected_reward"], abs=1e-5)
    assert held_out["accuracy"] == 1.0
    report = json.loads(gpt("report", "run", "--json").out)
    assert report["steps"]["margin"][-1] == step["margin"]
    assert "loss, nats per preference" in gpt("report", "run").out
    record = json.loads(Path("run/run.json").read_text())
    assert record["result"]["val_loss"] == pytest.approx(held_out["val_loss"], abs=1e-6)
    one_line_of_what_and_what_next(gpt("train", file, "--pairs"), 'it has no "completion"')


def test_batch_counts_a_preference_as_one_context(base: Path) -> None:
    run = library.train(write(RECORDS), init=base, steps=1, batch_tokens=3 * 128, **SETTINGS).run
    assert json.loads((run / "run.json").read_text())["resolved"]["rows"] == 3


def test_resume_keeps_the_reference_of_its_model(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run killed while the reference is computed starts again, and ends like a whole run."""
    file, settings = write(RECORDS), {"init": base, "steps": 3, "save_every": 1, **SETTINGS}

    def copy_run(*args: Any) -> Any:
        shutil.copytree("whole", "killed", dirs_exist_ok=True)
        return sum_log_probs(*args)

    sum_log_probs = preferences.sum_log_probs
    with monkeypatch.context() as patch:
        patch.setattr(preferences, "sum_log_probs", copy_run)
        whole = library.train(file, out="whole", **settings).run
    assert not Path("killed", preferences.REFERENCE).exists()
    killed = library.resume("killed").run
    assert_same(killed, whole)
    assert curve(killed) == curve(whole)
    path = killed / preferences.REFERENCE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the identity, which is the last tensor
    path.write_bytes(data)
    with pytest.raises(UserError, match="belongs to another model or other data"):
        library.resume("killed", steps=4)
    path.unlink()
    with pytest.raises(UserError, match="is missing"):
        library.resume("killed", steps=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beta", "0.2"], "--beta needs --preferences"),
        (["--preferences"], "--preferences needs --init"),
        (["--preferences", "--init", "base", "--beta", "0"], "beta is 0"),
        (["--preferences", "--init", "base", "--teachers", "2"], "--teachers cannot be combined with --preferences"),
        (["--preferences", "--init", "base", "--compile", "on"], "--compile on cannot be combined with --preferences"),
        (["--preferences", "--init", "base", "--chat"], "--preferences cannot be combined with --chat"),
    ],
)
def test_invalid_options_are_one_error_line(gpt: Gpt, base: Path, options: list[str], message: str) -> None:
    one_line_of_what_and_what_next(gpt("train", write([{"text": "a"}]), *options), message)
