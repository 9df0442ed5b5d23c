"""Measures decoding, compared with llama.cpp and Transformers.

    python -m benchmarks.decode                               GPT-2 124M and the shape of SmolLM2-135M, random weights
    python -m benchmarks.decode --only eight --model gpt2     only one part and one model
    python -m benchmarks.decode --tiny                        a smoke test with a tiny model, in seconds

Each figure excludes start-up: it is the time of a long command minus the time of a short command, which generates one
token after a short prompt. The systems take turns in every round, so other load slows them equally, and ratios are
taken within a round. Needs the extras `interop` and `hf` and GPT-2's vocabulary.
"""

import argparse
import json
import os
import pydoc_data.topics
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from benchmarks import steps
from benchmarks.peers import THREADS
from benchmarks.results import ROOT, SCRIPTS, Table, measured, write_section
from gpt import api
from gpt.config.device import Compute
from gpt.config.model import PRESETS, GPTConfig
from gpt.config.sample import SampleConfig
from gpt.decoding.bench import measure_bandwidth
from gpt.model.decoder import GPT
from gpt.runs import checkpoint
from gpt.system.errors import UserError
from gpt.tokenizers.backends import ByteBPE
from gpt.tokenizers.importing import gpt2_tokenizer
from gpt.tokenizers.tokenizer import Tokenizer, bytes_tokenizer

CPU = Compute(torch.device("cpu"), torch.float32)
KINDS = {"float32": "f32", "int8": "q8_0", "int4": "q4_0"}  # GGUF type of each dtype
BATCH, PROMPTS = 8, 4  # texts per batch; prompts that one command reads in turn
TIE = 1e-4  # nats; rounding can reverse smaller differences


@dataclass(frozen=True)
class Sizes:
    """Token counts of the short and the long prompt, and of a text generated after the short prompt: alone, or as one
    of eight."""

    prompt: int = 32
    long_prompt: int = 512
    new: int = 128
    new_of_eight: int = 64


TINY = Sizes(8, 40, 8, 8)


@dataclass(frozen=True)
class Work:
    """A command that generates ``texts`` texts in batches of ``batch`` (0 for a single batch). ``prompt`` and ``new``
    are tokens per text."""

    prompt: int
    new: int
    texts: int = 1
    batch: int = 0


@dataclass(frozen=True)
class Part:
    """A measurement of the tokens that only the ``long`` command computes."""

    title: str
    short: Work
    long: Work

    @property
    def tokens(self) -> int:
        """The number of timed tokens."""
        long, short = self.long, self.short
        if long.prompt == short.prompt:
            return long.texts * (long.new - short.new)
        return long.texts * long.prompt - short.texts * short.prompt


def parts(sizes: Sizes) -> dict[str, Part]:
    """Returns the parts by name."""
    one, eight = Work(sizes.prompt, 1), Work(sizes.prompt, 1, BATCH)
    return {
        "one": Part("one text", one, replace(one, new=sizes.new)),
        # Start-up times vary by more than one prompt takes, so several prompts are timed.
        "prompt": Part("reading prompts", one, Work(sizes.long_prompt, 1, PROMPTS, batch=1)),
        "eight": Part("8 texts at once", eight, replace(eight, new=sizes.new_of_eight)),
    }


Command = Callable[[Work], list[str]]


class Bench:
    """A model stored in every dtype, and the commands that generate with it."""

    def __init__(self, config: GPTConfig, tokenizer: Tokenizer, place: Path) -> None:
        self.tokenizer, self.place, self.model = tokenizer, place, make_random_model(config)
        if not place.exists():
            place.mkdir(parents=True)
            checkpoint.save(place / "float32", self.model, checkpoint.TokenizerFiles(tokenizer, config), {})
            for dtype, kind in KINDS.items():
                api.export(place / "float32", place / f"{kind}.gguf", dtype=kind, device="cpu")
                if dtype != "float32":
                    api.export(place / "float32", place / dtype, dtype=dtype, device="cpu")
        self.ids = tokenizer.encode("\n".join(pydoc_data.topics.topics.values())[:20_000]).tolist()

    def prompt(self, count: int) -> str:
        """Returns a text of about ``count`` tokens."""
        return self.tokenizer.decode(self.ids[:count])

    def gpt(self, dtype: str) -> Command:
        """Returns the command of `gpt sample`."""
        return lambda work: [
            str(SCRIPTS / "gpt"), "sample", *self.prompts(work), "--model", str(self.place / dtype),
            "--dtype", dtype, "--greedy", "--ignore-eot", "-n", str(work.new),
            "--batch", str(work.batch), "--json",
        ]  # fmt: skip

    def prompts(self, work: Work) -> list[str]:
        """Returns the arguments for one or several prompts. Prompts share no prefix, so the prefix cache has no
        effect."""
        if not work.batch:
            return [self.prompt(work.prompt), "-N", str(work.texts)]
        file = self.place / f"{work.texts}x{work.prompt}.jsonl"
        texts = [self.tokenizer.decode(self.ids[at * work.prompt :][: work.prompt]) for at in range(work.texts)]
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        return ["--prompts", str(file)]

    def peer(self, name: str, file: str) -> Command:
        """Returns the command of another system."""
        return lambda work: [
            sys.executable, "-m", "benchmarks.peers", name, str(self.place / file),
            json.dumps(self.tokenizer.prompt(self.prompt(work.prompt))), str(work.new), str(work.texts),
            str(work.batch or work.texts),
        ]  # fmt: skip

    def commands(self, wanted: Collection[str], dtypes: Collection[str], warm: bool) -> dict[str, dict[str, Command]]:
        """Returns the commands of each part by system, without unsupported dtypes.

        With ``warm``, runs `gpt` and llama.cpp once to fill caches.
        """
        common_commands: dict[str, Command] = {}
        short = Work(1, 1)
        for dtype, kind in KINDS.items():
            if dtype not in dtypes:
                continue
            try:
                if warm:
                    run(self.gpt(dtype)(short))
            except subprocess.CalledProcessError as error:
                print(f"Skipped {dtype}: {error.stderr.strip()}", file=sys.stderr)
                continue
            common_commands |= {dtype: self.gpt(dtype), f"llama.cpp {kind}": self.peer("llama.cpp", f"{kind}.gguf")}
            if warm:
                run(common_commands[f"llama.cpp {kind}"](short))
        systems = {part: dict(common_commands) for part in wanted}
        if "one" in wanted and "float32" in common_commands:
            systems["one"]["transformers"] = self.peer("transformers", "float32")
        return systems

    def loaded(self) -> Iterator[tuple[str, api.LanguageModel]]:
        """Yields the models as `gpt sample` loads them, without unsupported dtypes."""
        for dtype in KINDS:
            try:
                yield dtype, api.load(self.place / dtype, dtype=dtype, device="cpu", sampling=SampleConfig())
            except UserError as error:
                print(f"Skipped {dtype}: {error}", file=sys.stderr)


def make_random_model(config: GPTConfig) -> GPT:
    """Returns a random model with fourfold initial block weights; otherwise each token would predict itself."""
    torch.manual_seed(0)
    model = GPT(config).eval()
    for block in model.h:
        for parameter in block.parameters():
            if parameter.dim() == 2:
                parameter.data.mul_(4)
    return model


def run(words: Sequence[str]) -> tuple[float, str]:
    """Runs a command with default threads; returns the seconds and stdout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "GPT_"))}
    start_time = time.perf_counter()
    result = subprocess.run(
        words, cwd=ROOT, env=environment | {"HF_HUB_OFFLINE": "1"}, check=True, capture_output=True, text=True,
        encoding="utf-8", timeout=600,
    )  # fmt: skip
    return time.perf_counter() - start_time, result.stdout


Speeds = dict[str, list[float]]  # tokens per second in each round, by system


def measure(
    wanted: dict[str, Part], bench: Bench, rounds: int, dtypes: Collection[str], warm: bool
) -> tuple[dict[str, Speeds], dict[str, list[int]]]:
    """Runs the systems in turn. Returns the speeds of each part, and the ids that `gpt` and Transformers generate in
    float32 for one text."""
    systems = bench.commands(wanted, dtypes, warm) if wanted else {}
    speeds = {name: {system: list[float]() for system in systems[name]} for name in wanted}
    texts: dict[str, list[int]] = {}
    for _ in range(rounds):
        seconds: dict[tuple[str, Work], float] = {}
        for name, part in wanted.items():
            for system, command in systems[name].items():
                for work in (part.short, part.long):
                    if (system, work) not in seconds:
                        seconds[system, work], out = run(command(work))
                if part.long.new > 1 and part.long.texts == 1 and system in ("float32", "transformers"):
                    ids = json.loads(out)
                    texts[system] = ids["tokens"] if system == "float32" else ids[0]
                speeds[name][system].append(part.tokens / (seconds[system, part.long] - seconds[system, part.short]))
    return speeds, texts


def table(speeds: Speeds) -> Table:
    """Returns a table of median speeds, and of the median ratios of `gpt`'s speed to its peer's."""
    pairs = [
        (system, f"llama.cpp {kind.upper()}", f"llama.cpp {kind}")
        for system, kind in KINDS.items() if system in speeds
    ]  # fmt: skip
    if "transformers" in speeds:
        pairs.append(("float32", "Transformers", "transformers"))
    rows = []
    for system, name, peer in pairs:
        ours, theirs = speeds[system], speeds[peer]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        medians = [f"{statistics.median(ours):,.1f}", f"{statistics.median(theirs):,.1f}"]
        ratio_list = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        rows.append([system, name, *medians, f"{statistics.median(ratios):.2f}", ratio_list])
    return Table(["weights", "peer", "`gpt`, tokens/s", "peer, tokens/s", "ratio", "ratio in each round"], rows)


@torch.inference_mode()
def find_less_likely(model: GPT, prompt: Sequence[int], ids: Sequence[int]) -> list[tuple[int, float]]:
    """Finds the ids that are not the most likely ones, according to the model without packed weights or KV cache.

    Returns their positions, and how many nats less likely they are.
    """
    logits = model(torch.tensor([[*prompt, *ids[:-1]]]))[0, len(prompt) - 1 :]
    gaps = logits.amax(-1) - logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]
    return [(at, gap) for at, gap in enumerate(gaps.tolist()) if gap]


def check_texts(bench: Bench, part: Part, texts: dict[str, list[int]]) -> list[str]:
    """Returns notes: whether `gpt`'s ids are the most likely ones, and whether Transformers' ids are equal."""
    ids = texts["float32"]
    gaps = find_less_likely(bench.model, bench.tokenizer.prompt(bench.prompt(part.long.prompt)), ids)
    ties = [gap for _, gap in gaps if gap < TIE]
    errors = [f"token {at} by {gap:.1e} nats" for at, gap in gaps if gap >= TIE]
    note = (
        f"{len(ids) - len(gaps)} of {len(ids)} float32 ids ({len(set(ids))} distinct) are the most likely ones of "
        "the model without packed weights and KV cache"
    )
    note += f"; {len(ties)} are ties within {TIE:g} nats" if ties else ""
    note += f"; NOT THE MOST LIKELY: {', '.join(errors)}" if errors else ""
    theirs = texts["transformers"]
    split = next((at for at, pair in enumerate(zip(ids, theirs, strict=True)) if pair[0] != pair[1]), None)
    return [
        f"{note}.",
        f"Transformers' text is {'the same' if split is None else f'different from token {split} on'}.",
    ]


def models(tiny: bool) -> Iterator[tuple[str, GPTConfig, Tokenizer]]:
    """Yields names, shapes and tokenizers of models. Truncates GPT-2's vocabulary to the model's size."""
    if tiny:
        yield "tiny", GPTConfig(257, 128, 2, 2, 64), bytes_tokenizer()
        return
    gpt2 = gpt2_tokenizer()
    for name in ("gpt2", "smollm2-135m"):
        config = PRESETS[name].model
        tokenizer = gpt2
        if config.vocab_size < gpt2.vocab_size:
            assert isinstance(gpt2.backend, ByteBPE)
            ranks = dict(islice(sorted(gpt2.backend.ranks.items(), key=lambda each: each[1]), config.vocab_size - 1))
            backend = ByteBPE(gpt2.backend.pattern, ranks)
            tokenizer = replace(gpt2, name="cut", backend=backend, eot=config.vocab_size - 1)
        yield name, config, tokenizer


def main() -> None:
    """Measures and writes the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="use a tiny model and print the sections")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=[*parts(TINY), "steps"], nargs="+")
    parser.add_argument("--model", choices=["gpt2", "smollm2-135m"])
    parser.add_argument("--dtypes", choices=list(KINDS), nargs="+", default=list(KINDS), help="of the commands")
    parser.add_argument("--folder", type=Path, help="keep the models here, and reuse those of an earlier run")
    args = parser.parse_args()
    all_parts = parts(TINY if args.tiny else Sizes())
    parts_to_run = {name: part for name, part in all_parts.items() if name in (args.only or all_parts)}
    for name, config, tokenizer in models(args.tiny):
        if args.model not in (None, name):
            continue
        sections: dict[str, tuple[list[str], Table]] = {}
        with tempfile.TemporaryDirectory(prefix="gpt-") as folder:
            bench = Bench(config, tokenizer, (args.folder or Path(folder)) / name)
            machine_note = (
                f"{THREADS} threads; a read of memory just before reached {measure_bandwidth(CPU) / 1e9:.1f} GB/s."
            )
            speeds, texts = measure(parts_to_run, bench, args.rounds, args.dtypes, warm=not args.tiny)
            for key, part in parts_to_run.items():
                notes = check_texts(bench, part, texts) if key == "one" and texts else []
                sections[f"Decoding, {name}: {part.title}"] = notes, table(speeds[key])
            if "steps" in (args.only or ["steps"]):
                step_table = steps.make_table(bench.loaded(), (1, BATCH))
                sections[f"Where a token's time goes, {name}"] = list(steps.NOTES), step_table
        for title, (notes, content) in sections.items():
            packages = ["torch", "transformers", "xllamacpp"]
            section = measured(title, "python -m benchmarks.decode", [machine_note, *notes], [content], packages)
            if args.tiny:
                print(f"{section}\n")
            else:
                write_section("decode", section)


if __name__ == "__main__":
    main()
