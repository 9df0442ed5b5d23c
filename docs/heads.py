"""Prints the table of docs/learning.md: when the heads of a small model start to look back.

    python docs/heads.py

Trains a model on the words of docs/exercises-inside.md, in a temporary folder.
"""

import contextlib
import tempfile
from pathlib import Path

import numpy as np
from outputs import BLOCK

import gpt
from gpt.insight import inspect

PAGE = Path(__file__).resolve().parent / "exercises-inside.md"
PROMPT = ">wqfkzcjbhm>wqfkzcjbhm"
EVERY = 30  # steps between rows


def main() -> None:
    """Trains, and prints the scores of the two heads that copy, by step."""
    exec(next(code for kind, code, _ in BLOCK.findall(PAGE.read_text("utf-8")) if kind == "python"), {})
    losses = {}

    def listen(event: object) -> None:
        if isinstance(event, gpt.config.events.EvalEvent):
            losses[event.step] = event.val_loss

    run = gpt.train(
        "twice.jsonl", preset="pico", tokenizer="bytes", steps=600, eval_every=EVERY, save_every=EVERY, keep=20,
        listen=listen,
    ).run  # fmt: skip
    print("| step | held-out loss | previous token | matching earlier pattern |\n|---:|---:|---:|---:|")
    for step, loss in losses.items():
        model = gpt.load(run / f"step-{step:06}", device="cpu", dtype="float32")
        ids = np.array(model.tokenizer.prompt(PROMPT))
        scores = inspect.head_scores(inspect.trace(model.model, ids).patterns, ids).scores
        previous, matching = (np.max(scores[kind]) for kind in ("previous", "matching"))
        print(f"| {step} | {loss:.2f} | {previous:.0%} | {matching:.0%} |")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        main()
