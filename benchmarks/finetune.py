"""Measures fine-tuning with default settings: exact answers to pairs, and held-out loss on running text.

    python -m benchmarks.finetune [--folder FOLDER] [--only pairs|text] [--models nano,micro,mini,gpt2] [--tiny]

Trains base models of several sizes on `pydocs` for a few minutes and stores them in FOLDER. Fine-tunes each on pairs
and text, with default settings except those in the tables.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import gpt
from benchmarks.results import Table, measured, write_section
from gpt.config import events
from gpt.documents import catalogue

Pair = dict[str, str]

PERSONS = ("I", "you", "he", "we", "you all", "they")
ENDINGS = {  # endings of regular verbs by person
    "are": ("o", "i", "a", "iamo", "ate", "ano"),
    "ere": ("o", "i", "e", "iamo", "ete", "ono"),
    "ire": ("o", "i", "e", "iamo", "ite", "ono"),
}
VERBS = (
    "buy comprare", "find trovare", "bring portare", "wash lavare", "draw disegnare", "watch guardare", "use usare",
    "show mostrare", "count contare", "dream sognare", "sell vendere", "see vedere", "lose perdere", "take prendere",
    "close chiudere", "receive ricevere", "hide nascondere", "open aprire", "follow seguire", "offer offrire",
)  # fmt: skip
NOUNS = (
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
    """Returns English phrases with Italian translations: pairs that follow rules."""
    pairs = [
        {"prompt": f"{who} {_english(verb, who)} the {thing} =>", "completion": f" {_italian(verb, who)} {la_cosa}"}
        for who, verb, (thing, _, la_cosa) in product(PERSONS, VERBS, (thing.partition(" ") for thing in NOUNS))
    ]
    return random.Random(count).sample(pairs, count)


def _english(verb: str, who: str) -> str:
    word = verb.split()[0]
    return word if who != "he" else word + ("es" if word.endswith("ch") else "s")


def _italian(verb: str, who: str) -> str:
    infinitive = verb.split()[1]
    return infinitive[:-3] + ENDINGS[infinitive[-3:]][PERSONS.index(who)]


def phone_numbers(count: int) -> list[Pair]:
    """Returns made-up names with telephone numbers: pairs that can only be memorized."""
    rng = random.Random(count)
    names: dict[str, None] = {}
    while len(names) < count:
        names[" ".join("".join(rng.choices(SYLLABLES, k=k)).capitalize() for k in (2, 3))] = None
    return [{"prompt": f"{name}:", "completion": f" 040 {rng.randrange(10**6):06}"} for name in names]


KINDS = {"phrases": phrases, "numbers": phone_numbers}

# Training settings of the base models, for two cores.
MODELS: dict[str, dict[str, Any]] = {
    "nano": {"minutes": 2},
    "micro": {"minutes": 3},
    "mini": {"minutes": 4},
    "gpt2": {"vocab_size": 1024, "steps": 3, "batch_tokens": 1024},
}
RANK = 8
# Fine-tuning data: kinds and numbers of pairs, and bytes of text. To save time, larger models get less data.
PAIRS: dict[str, list[tuple[str, int]]] = {
    "nano": [("phrases", 20), ("phrases", 200), ("numbers", 200), ("phrases", 1000), ("phrases", 5000)],
    "micro": [("phrases", 20), ("phrases", 200), ("numbers", 200), ("phrases", 1000)],
    "mini": [("phrases", 200)],
    "gpt2": [("phrases", 20)],
}
TEXTS = {"nano": [20_000, 100_000, 1_000_000], "micro": [20_000, 100_000], "mini": [20_000], "gpt2": []}


def base_run(name: str, folder: Path, tiny: bool) -> Path:
    """Returns the run of a base model, which the first call trains."""
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

    with tempfile.TemporaryDirectory() as folder:
        result = gpt.train(text, out=Path(folder) / "run", init=model, sample_every=0, listen=listen, **settings)
        record: dict[str, Any] = json.loads((result.run / "run.json").read_text(encoding="utf-8"))
    return record["resolved"] | {"train": record["tokens"]["train"], "result": result, "losses": losses}


def pairs_table(models: Sequence[str], folder: Path, tiny: bool) -> tuple[list[str], Table]:
    """Counts the pairs that each fine-tuned model answers exactly."""
    rows = []
    for name in models:
        model = base_run(name, folder, tiny)
        for (kind, count), rank in product([("phrases", 20)] if tiny else PAIRS[name], (None, RANK)):
            file = folder / f"{kind}-{count}.jsonl"
            file.write_text("".join(json.dumps(pair) + "\n" for pair in KINDS[kind](count)), encoding="utf-8")
            run = tune(model, file, pairs=True, val_fraction=0.0, lora_rank=rank)
            epochs = run["steps"] * run["rows"] / count
            rows.append([
                name, f"{count:,} {kind}", _trained(rank), f"{run['steps']:,}", f"{epochs:.1f}", f"{run['lr']:.2g}",
                str(run["result"].answers), f"{run['result'].seconds:.0f}",
            ])  # fmt: skip
            print(*rows[-1], flush=True)
    notes = [
        "Nothing is held out (`--val-fraction 0`); the other settings are the defaults.",
        "*Phrases* are English with their Italian; *numbers* are made-up names with telephone numbers.",
        "At most 500 pairs are asked, with greedy decoding.",
    ]
    columns = ["model", "pairs", "trained", "steps", "epochs", "learning rate", "exact answers", "seconds"]
    return notes, Table(columns, rows)


def text_table(models: Sequence[str], folder: Path, tiny: bool, text: bytes) -> tuple[list[str], Table]:
    """Measures the first, best and final held-out loss on running text."""
    rows = []
    for name in models:
        model = base_run(name, folder, tiny)
        for size, rank in product([20_000] if tiny else TEXTS[name], (None, RANK)):
            file = folder / f"text-{size}.txt"
            file.write_bytes(text[:size])
            result = tune(model, file, lora_rank=rank)
            losses, epochs = result["losses"], result["steps"] * result["batch_tokens"] / result["train"]
            rows.append([
                name, f"{size:,}", _trained(rank), f"{result['steps']:,}", f"{epochs:.1f}", f"{result['lr']:.2g}",
                f"{losses[0]:.3f}", f"{min(losses):.3f}", f"{losses[-1]:.3f}", f"{result['result'].seconds:.0f}",
            ])  # fmt: skip
            print(*rows[-1], flush=True)
    notes = [
        f"The models of `pydocs`, fine-tuned on the first bytes of {TEXT}, whose last tenth is held out.",
        "Losses are in nats per token, evaluated during training on the same windows.",
    ]
    columns = [
        "model", "bytes", "trained", "steps", "epochs", "learning rate", "loss before", "best loss", "final loss",
        "seconds",
    ]  # fmt: skip
    return notes, Table(columns, rows)


def _trained(rank: int | None) -> str:
    return "all weights" if rank is None else f"adapters, rank {rank}"


def main() -> None:
    """Measures and writes the sections."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="keep the base models here, and reuse those of an earlier run")
    parser.add_argument("--text", type=Path, help=f"{TEXT} as a file; without it, the catalogue's copy is downloaded")
    parser.add_argument("--only", choices=["pairs", "text"])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    models = ["nano"] if args.tiny else args.models.split(",")
    with tempfile.TemporaryDirectory() as place:
        folder = args.folder or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        parts = {
            "pairs": ("Fine-tuning on pairs", lambda: pairs_table(models, folder, args.tiny)),
            "text": ("Fine-tuning on text", lambda: text_table(models, folder, args.tiny, _text(args.text))),
        }
        for name, (title, measure) in parts.items():
            if args.only in (None, name):
                notes, table = measure()
                section = measured(title, "python -m benchmarks.finetune", notes, [table])
                if args.tiny:
                    print(section)
                else:
                    write_section("finetune", section)


def _text(file: Path | None) -> bytes:
    if file is not None:
        return file.read_bytes()
    return b"".join(source.open().read() for source in catalogue.sources("shakespeare"))


if __name__ == "__main__":
    main()
