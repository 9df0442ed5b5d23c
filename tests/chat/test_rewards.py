"""Training on rewards that a program gives."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Gpt, assert_same, curve, one_line_of_what_and_what_next
from models import SHAPES, loud, save
from ranks import steady_clock
from transformers import AutoModelForCausalLM

import gpt as library
from gpt.chat import chat
from gpt.config import events
from gpt.runs import checkpoint
from gpt.system import child
from gpt.system.errors import UserError, WorkError
from gpt.tokenizers.tokenizer import bytes_tokenizer
from gpt.training import rewards
from gpt.training.step import RewardObjective

RECORDS = [{"prompt": f"{n} plus {n} is", "answer": 2 * n} for n in range(12)]
# The program writes how many letters of a text are e, unless the file "fault" has other code.
PROGRAM = """
import json, os, sys, time
samples = [json.loads(line) for line in sys.stdin]
assert all(sample["record"]["prompt"] == sample["prompt"] and "answer" in sample["record"] for sample in samples)
rewards = [len(sample["text"]) / 7 for sample in samples]
if os.path.exists("fault"):
    exec(open("fault").read())
print(*rewards, sep="\\n")
"""
SETTINGS: dict[str, Any] = {
    "reward": f"{sys.executable} score.py", "group": 4, "answer_tokens": 5, "batch_tokens": 8 * 18, "dtype": "float32",
    "sample_every": 0, "val_fraction": 0.25, "lr": 1e-3,
}  # fmt: skip
# Samples of two prompts: the prompt, the answer and the reward of each.
GROUPS = [
    ([5, 6, 7], [8, 9, 256], 1.0), ([5, 6, 7], [10, 256], 0.25), ([5, 6, 7], [11, 12, 13, 14], 0.0),
    ([20, 21], [22, 256], -2.0), ([20, 21], [23, 24, 256], 1.5), ([20, 21], [25, 26, 27, 28], 0.0),
]  # fmt: skip
ANSWER_TOKENS, TRL_NORM = 4, 1.886885


@pytest.fixture
def base(workdir: Path) -> Path:
    Path("score.py").write_text(PROGRAM)
    Path("prompts.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in RECORDS))
    tokenizer = chat.with_template(bytes_tokenizer())
    config = replace(SHAPES["qwen2"], vocab_size=tokenizer.vocab_size, block_size=128)
    return save(workdir / "base", loud(config, spread=0.1), tokenizer)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns inputs, targets and scores of `GROUPS`."""
    length = max(len(prompt) + len(answer) for prompt, answer, _ in GROUPS) - 1
    x, y = torch.zeros(6, length, dtype=torch.long), torch.full((6, length), -100)
    for row, (prompt, answer, _) in enumerate(GROUPS):
        ids = torch.tensor(prompt + answer)
        x[row, : len(ids) - 1], y[row, len(prompt) - 1 : len(ids) - 1] = ids[:-1], ids[len(prompt) :]
    values = torch.tensor([reward for _, _, reward in GROUPS])
    advantages = (values.view(2, 3) - values.view(2, 3).mean(-1, keepdim=True)).flatten()
    lengths = torch.tensor([float(len(answer)) for _, answer, _ in GROUPS])
    return x, y, torch.stack([advantages, values, torch.zeros(6), lengths], -1)


def test_gradient_is_that_of_dr_grpo(base: Path) -> None:
    """Autograd computes the plain formula through Transformers. TRL 1.16's GRPOTrainer with loss_type="dr_grpo" had this
    gradient norm on these samples."""
    model, (x, y, scores) = checkpoint.load(base, torch.device("cpu")).model.train(), batch()
    summed = RewardObjective(model, 7, ANSWER_TOKENS)(x, y, scores) / 6
    summed[0].backward()
    other = AutoModelForCausalLM.from_pretrained(base).float()
    log_p = other(x).logits.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
    (-(log_p * scores[:, :1] * (y != -100)).sum() / (6 * ANSWER_TOKENS)).backward()
    embedding = other.get_input_embeddings().weight
    assert embedding.grad.abs().max() > 0.01
    torch.testing.assert_close(model.wte.weight.grad, embedding.grad, atol=1e-6, rtol=1e-5)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert float(norm) == pytest.approx(TRL_NORM, abs=1e-5)
    values = [reward for _, _, reward in GROUPS]
    assert summed.tolist() == pytest.approx([-np.mean(values), np.mean(values), 0, 3], abs=1e-6)


FAULTS = {
    "raise ValueError('boom')": "failed with exit code 1: ValueError: boom",
    "rewards.pop()": "lines for",
    "rewards[2] = float('nan')": 'wrote "nan" in line 3, which is not a finite number',
    "rewards[0] = 'good'": 'wrote "good" in line 1, which is not a finite number',
    "time.sleep(100)": "took more than 1 s",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_the_program_is_one_line_and_the_run_resumes(
    fault: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run ends like one without the fault."""

    def listen(event: Any) -> None:
        if isinstance(event, events.StepEvent) and event.step == 3:
            Path("fault").write_text(fault)
            patch.setattr(rewards, "SECONDS", 1.0 if "sleep" in fault else 60.0)

    settings = {"init": base, "steps": 5, "eval_every": 2, "save_every": 5, **SETTINGS}
    whole = library.train("prompts.jsonl", out="whole", **settings).run
    with monkeypatch.context() as patch, pytest.raises(WorkError) as raised:
        library.train("prompts.jsonl", out="broken", listen=listen, **settings)
    assert FAULTS[fault] in raised.value.message
    assert "resume with: gpt train --resume broken" in raised.value.hint
    assert Path("broken/step-000003").exists()
    Path("fault").unlink()
    assert_same(library.resume("broken").run, whole)


def test_equal_rewards_change_nothing(base: Path) -> None:
    Path("fault").write_text("rewards = [0.1] * len(rewards)")  # Its mean is rounded.
    run = library.train("prompts.jsonl", init=base, steps=3, **SETTINGS).run
    before, after = (
        checkpoint.load(path, torch.device("cpu")).model.state_dict() for path in (base, run / "step-000003")
    )
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert [line["equal_groups"] for line in curve(run) if line["event"] == "step"] == [1.0] * 3


@pytest.mark.parametrize("options", [["--steps", "12"], ["--steps", "12", "--lora-rank", "2"], ["--minutes", "1"]])
def test_rewards_are_raised_and_reported(gpt: Gpt, base: Path, options: list[str]) -> None:
    """The reward is the length of the text, and the prompts are messages."""
    records = [{"prompt": [{"role": "user", "content": f"{n}"}], "answer": n} for n in range(12)]
    Path("prompts.jsonl").write_text(json.dumps(records).replace("}, {", "}\n{")[1:-1])
    words = [word for key, value in SETTINGS.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    with steady_clock(12):
        result = gpt("train", "prompts.jsonl", *words, "--init", base, "-o", "run", "--lr", "0.01", *options)
    assert result.code == 0, result.err
    assert "held-out prompts (greedy, " in result.out
    steps = [line for line in curve(Path("run")) if line["event"] == "step"]
    assert all(step["loss"] == pytest.approx(-step["reward"], abs=1e-6) for step in steps)
    assert all(0 < step["answer_tokens"] <= 5 for step in steps)
    if options == ["--steps", "12"]:
        assert steps[-1]["reward"] > steps[0]["reward"]
    report = json.loads(gpt("report", "run", "--json").out)
    assert report["steps"]["reward"][-1] == pytest.approx(steps[-1]["reward"])
    assert "loss, minus the reward" in gpt("report", "run").out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group", "8"], "--group needs --reward"),
        (["--reward", "python score.py"], "--reward needs --init"),
        (["--reward", "no-such-program", "--init", "base"], 'there is no program "no-such-program"'),
        (["--reward", "", "--init", "base"], 'there is no program ""'),
        (["--reward", "'", "--init", "base"], "is not a command"),
        (["--reward", "python score.py", "--init", "base", "--pairs"], "--reward cannot be combined with --pairs"),
        (["--reward", "python score.py", "--init", "base", "--shard", "full"], "--shard full cannot be combined"),
        (["--reward", "python score.py", "--init", "base", "--answer-tokens", "125"], "there are no prompts"),
    ],
)
def test_invalid_options_are_one_error_line(gpt: Gpt, base: Path, options: list[str], message: str) -> None:
    one_line_of_what_and_what_next(gpt("train", "prompts.jsonl", *options), message)


def test_program_gets_no_shell(workdir: Path) -> None:
    Path("echo.py").write_text("import sys\nprint(sys.argv[1:], sys.stdin.read())")
    output = child.run_command(f"{sys.executable} echo.py '$HOME' ; true", b"$(touch made)\n", 60)
    assert output[0] == "['$HOME', ';', 'true'] $(touch made)"
    with pytest.raises(UserError, match="there is no program"):
        child.run_command("", b"", 60)
