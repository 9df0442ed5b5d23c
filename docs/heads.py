"""Prints the table of docs/learning.md: when the heads of a small model start to look back.

    python docs/heads.py

Trains a model on the words of docs/exercises-inside.md, in a temporary folder.
"""

import contextlib
import statistics
import tempfile
from pathlib import Path

import numpy as np
from outputs import BLOCK

import gpt
from gpt.config.events import StepEvent
from gpt.insight import inspect

PAGE = Path(__file__).resolve().parent / "exercises-inside.md"
PROMPT = ">wqfkzcjbhm>wqfkzcjbhm"
EVERY, STEPS, SHOWN = 30, 600, 240  # steps between rows; of the run; up to which all rows are shown


def main() -> None:
    """Trains, and prints the most attention that a head gives to each of two kinds of keys, by step."""
    exec(next(code for kind, code, _ in BLOCK.findall(PAGE.read_text("utf-8")) if kind == "python"), {})
    losses = []

    def listen(event: object) -> None:
        if isinstance(event, StepEvent):
            losses.append(event.loss)

    run = gpt.train(
        "twice.jsonl", preset="pico", block_size=128, tokenizer="bytes", steps=STEPS, save_every=EVERY,
        keep=STEPS // EVERY, listen=listen,
    ).run  # fmt: skip
    print("| step | training loss | token before | token after an earlier occurrence |\n|---:|---:|---:|---:|")
    for step in [*range(EVERY, SHOWN + 1, EVERY), STEPS]:
        model = gpt.load(run / f"step-{step:06}", device="cpu", dtype="float32")
        ids = np.array([*model.tokenizer.prompt(""), *model.tokenizer.prompt(PROMPT)])  # As in training.
        scores = inspect.head_scores(inspect.trace(model.model, ids).patterns, ids).scores
        previous, matching = (np.max(scores[kind]) for kind in ("previous", "matching"))
        print(f"| {step} | {statistics.fmean(losses[step - 10 : step]):.2f} | {previous:.0%} | {matching:.0%} |")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        main()
