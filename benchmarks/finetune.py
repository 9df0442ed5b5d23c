"""Measures fine-tuning with default settings: pairs answered exactly, and held-out loss on running text.

    python -m benchmarks.finetune [--folder FOLDER] [--only pairs|text] [--models nano,micro,mini,gpt2] [--tiny]

Models of several sizes are first trained on `pydocs` for some minutes and kept in FOLDER for later calls. Each is then
fine-tuned on pairs and on text, with no options but those in the tables.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

import gpt
from benchmarks.results import machine, write_section
from gpt import events
from gpt.text import catalogue

Pair = dict[str, str]

PERSONS = ("I", "you", "he", "we", "you all", "they")
ENDINGS = {  # of regular verbs, in the order of the persons
    "are": ("o", "i", "a", "iamo", "ate", "ano"),
    "ere": ("o", "i", "e", "iamo", "ete", "ono"),
    "ire": ("o", "i", "e", "iamo", "ite", "ono"),
}
VERBS = (
    "buy comprare", "find trovare", "bring portare", "wash lavare", "draw disegnare", "watch guardare", "use usare",
    "show mostrare", "count contare", "dream sognare", "sell vendere", "see vedere", "lose perdere", "take prendere",
    "close chiudere", "receive ricevere", "hide nascondere", "open aprire", "follow seguire", "offer offrire",
)  # fmt: skip
THINGS = (
    "house la casa", "book il libro", "bread il pane", "apple la mela", "letter la lettera", "key la chiave",
    "bicycle la bicicletta", "boat la barca", "window la finestra", "door la porta", "chair la sedia",
    "table il tavolo", "picture il quadro", "flower il fiore", "garden il giardino", "dog il cane", "cat il gatto",
    "horse il cavallo", "bird l'uccello", "fish il pesce", "hat il cappello", "coat il cappotto", "shoe la scarpa",
    "cup la tazza", "plate il piatto", "knife il coltello", "spoon il cucchiaio", "bottle la bottiglia",
    "ticket il biglietto", "train il treno", "car la macchina", "road la strada", "bridge il ponte", "island l'isola",
    "mountain la montagna", "river il fiume", "sea il mare", "star la stella", "moon la luna", "song la canzone",
    "newspaper il giornale", "clock l'orologio",
)  # fmt: skip
SYLLABLES = ["ba", "co", "di", "fe", "gi", "lo", "ma", "ne", "pi", "ro", "sa", "te", "vi", "zu"]
TEXT = "tinyshakespeare"


def phrases(count: int) -> list[Pair]:
    """Returns English phrases with their Italian: pairs that follow a rule, as most people's pairs do."""
    pairs = [
        {"prompt": f"{who} {_english(verb, who)} the {thing} =>", "completion": f" {_italian(verb, who)} {la_cosa}"}
        for who, verb, (thing, _, la_cosa) in product(PERSONS, VERBS, (thing.partition(" ") for thing in THINGS))
    ]
    return random.Random(count).sample(pairs, count)


def _english(verb: str, who: str) -> str:
    word = verb.split()[0]
    return word if who != "he" else word + ("es" if word.endswith("ch") else "s")


def _italian(verb: str, who: str) -> str:
    infinitive = verb.split()[1]
    return infinitive[:-3] + ENDINGS[infinitive[-3:]][PERSONS.index(who)]


def numbers(count: int) -> list[Pair]:
    """Returns made-up names with telephone numbers: pairs that can only be learnt by heart."""
    chance = random.Random(count)
    names: dict[str, None] = {}
    while len(names) < count:
        names[" ".join("".join(chance.choices(SYLLABLES, k=k)).capitalize() for k in (2, 3))] = None
    return [{"prompt": f"{name}:", "completion": f" 040 {chance.randrange(10**6):06}"} for name in names]


KINDS = {"phrases": phrases, "numbers": numbers}

# Settings of the base models, trained on `pydocs`: minutes on two cores; for gpt2's shape a few steps, few ids.
MODELS: dict[str, dict[str, Any]] = {
    "nano": {"minutes": 2},
    "micro": {"minutes": 3},
    "mini": {"minutes": 4},
    "gpt2": {"vocab_size": 1024, "steps": 3, "batch_tokens": 1024},
}
RANK = 8
# Data that each model is fine-tuned on, (kind, pairs) and bytes of text: less for larger models, to save time.
PAIRS: dict[str, list[tuple[str, int]]] = {
    "nano": [("phrases", 20), ("phrases", 200), ("numbers", 200), ("phrases", 1000), ("phrases", 5000)],
    "micro": [("phrases", 20), ("phrases", 200), ("numbers", 200), ("phrases", 1000)],
    "mini": [("phrases", 200)],
    "gpt2": [("phrases", 20)],
}
TEXTS = {"nano": [20_000, 100_000, 1_000_000], "micro": [20_000, 100_000], "mini": [20_000], "gpt2": []}


def pretrained(name: str, folder: Path, tiny: bool) -> Path:
    """Returns the run of a base model, which is trained at the first call."""
    run = folder / name
    if not run.exists():
        gpt.train(out=run, preset=name, sample_every=0, **({"steps": 10} if tiny else MODELS[name]))
    return run


def tune(model: Path, text: Path, **settings: Any) -> dict[str, Any]:
    """Fine-tunes ``model`` in a temporary folder.

    Returns the resolved settings, the number of ``train`` tokens, the ``result`` and the held-out ``losses``.
    """
    losses: list[float] = []

    def listen(event: object) -> None:
        if isinstance(event, events.EvalEvent):
            losses.append(event.val_loss)

    with tempfile.TemporaryDirectory() as place:
        result = gpt.train(text, out=Path(place) / "run", init=model, sample_every=0, listen=listen, **settings)
        record: dict[str, Any] = json.loads((result.run / "run.json").read_text(encoding="utf-8"))
    return record["resolved"] | {"train": record["tokens"]["train"], "result": result, "losses": losses}


def pairs_table(models: Sequence[str], folder: Path, tiny: bool) -> list[str]:
    """Returns a table of how many pairs each fine-tuned model answers exactly; nothing is held out."""
    rows = [
        "Nothing is held out (`--val-fraction 0`); all else is left to the defaults. Phrases are English with its "
        "Italian, numbers are made-up names with telephone numbers; of more than 500 pairs 500 are asked.",
        "",
        "| model | pairs | trains | steps | passes | rate | given back exactly, greedy | seconds |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for name in models:
        model = pretrained(name, folder, tiny)
        for (kind, count), rank in product([("phrases", 20)] if tiny else PAIRS[name], (None, RANK)):
            file = folder / f"{kind}-{count}.jsonl"
            file.write_text("".join(json.dumps(pair) + "\n" for pair in KINDS[kind](count)), encoding="utf-8")
            got = tune(model, file, pairs=True, val_fraction=0.0, lora_rank=rank)
            passes = got["steps"] * got["rows"] / count
            rows.append(
                f"| {name} | {count:,} {kind} | {_what(rank)} | {got['steps']:,} | {passes:.1f} | {got['lr']:.2g} "
                f"| {got['result'].answers} | {got['result'].seconds:.0f} |"
            )
            print(rows[-1], flush=True)
    return rows


def text_table(models: Sequence[str], folder: Path, tiny: bool, text: bytes) -> list[str]:
    """Returns a table of held-out losses on running text: before, best and at the end of each run."""
    rows = [
        f"The first bytes of {TEXT}, whose last tenth is held out, on models of `pydocs`; nats a token, measured along "
        "the way on the same windows.",
        "",
        "| model | bytes | trains | steps | passes | rate | before | best | at the end | seconds |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in models:
        model = pretrained(name, folder, tiny)
        for size, rank in product([20_000] if tiny else TEXTS[name], (None, RANK)):
            file = folder / f"text-{size}.txt"
            file.write_bytes(text[:size])
            got = tune(model, file, lora_rank=rank)
            losses, passes = got["losses"], got["steps"] * got["batch_tokens"] / got["train"]
            rows.append(
                f"| {name} | {size:,} | {_what(rank)} | {got['steps']:,} | {passes:.1f} | {got['lr']:.2g} "
                f"| {losses[0]:.3f} | {min(losses):.3f} | {losses[-1]:.3f} | {got['result'].seconds:.0f} |"
            )
            print(rows[-1], flush=True)
    return rows


def _what(rank: int | None) -> str:
    return "all weights" if rank is None else f"adapters of rank {rank}"


def main() -> None:
    """Measures, and writes the sections of RESULTS.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="where the models to start from are, or are made")
    parser.add_argument("--text", type=Path, help=f"{TEXT}, as a file; without it the catalogue's is fetched")
    parser.add_argument("--only", choices=["pairs", "text"])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    models = ["nano"] if asked.tiny else asked.models.split(",")
    with tempfile.TemporaryDirectory() as place:
        folder = asked.folder or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        parts = {
            "pairs": ("Fine-tuning on pairs", lambda: pairs_table(models, folder, asked.tiny)),
            "text": ("Fine-tuning on text", lambda: text_table(models, folder, asked.tiny, _text(asked.text))),
        }
        for name, (title, work) in parts.items():
            if asked.only in (None, name):
                about = [*machine("python -m benchmarks.finetune"), f"- torch {torch.__version__}", ""]
                lines = about + work()
                if asked.tiny:
                    print("\n".join(lines))
                else:
                    write_section(title, lines)


def _text(file: Path | None) -> bytes:
    if file is not None:
        return file.read_bytes()
    return b"".join(source.open().read() for source in catalogue.sources("shakespeare"))


if __name__ == "__main__":
    main()
