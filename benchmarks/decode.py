"""Measures decoding in whole commands beside llama.cpp and transformers: `gpt sample`, long less short.

    python -m benchmarks.decode                                    GPT-2 124M and SmolLM2-135M's shape, random weights
    python -m benchmarks.decode --only eight --model gpt2          a part of it
    python -m benchmarks.decode --tiny                             a tiny model in seconds, of no use as a measurement

A command's time less that of one that generates a single token after a short prompt is the time of the other tokens, or
of a longer prompt: start-up, which has a table of its own, is left out. All systems take turns in every round, so that
other work on the machine slows all of them alike; ratios are taken within a round. Needs the extras `interop` and `hf`
and GPT-2's vocabulary.
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
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import torch

from benchmarks import steps
from benchmarks.peers import THREADS
from benchmarks.results import ROOT, SCRIPTS, machine, write_section
from gpt import api
from gpt.config import PRESETS, GPTConfig
from gpt.decoding.bench import bandwidth_of
from gpt.device import Compute
from gpt.errors import UserError
from gpt.model.decoder import GPT
from gpt.runs import checkpoint
from gpt.sample_config import SampleConfig
from gpt.text.backends import ByteBPE
from gpt.text.tokenizer import Tokenizer, bytes_tokenizer, gpt2_tokenizer

CPU = Compute(torch.device("cpu"), torch.float32)
KINDS = {"float32": "f32", "int8": "q8_0", "int4": "q4_0"}  # dtypes of ours, and the file of llama.cpp's beside them
COMPILED = ", compiled"  # of a system's name
EIGHT, PROMPTS = 8, 4  # texts at once, and prompts that are read one after the other
TIE = 1e-4  # nats between two ids, below which the rounding of sums decides


@dataclass(frozen=True)
class Sizes:
    """Numbers of tokens: prompts, and what is generated after the short one."""

    prompt: int = 32
    long_prompt: int = 512
    new: int = 128
    new_of_eight: int = 64


TINY = Sizes(8, 40, 8, 8)


@dataclass(frozen=True)
class Work:
    """A command: ``new`` tokens of each of ``texts`` texts after a prompt, which has so many ids. ``batch`` of them are
    computed at once, all by default."""

    prompt: int
    new: int
    texts: int = 1
    batch: int = 0


@dataclass(frozen=True)
class Part:
    """A part of the measurement: the tokens that ``long`` computes and ``short`` does not.

    ``bars`` are the least ratios to llama.cpp by kind, and ``over_transformers`` in float32 to transformers.
    """

    title: str
    short: Work
    long: Work
    bars: dict[str, float]
    over_transformers: float | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens, of prompts or after them, by which the commands differ."""
        long, short = self.long, self.short
        if long.prompt == short.prompt:
            return long.texts * (long.new - short.new)
        return long.texts * long.prompt - short.texts * short.prompt


def parts(sizes: Sizes) -> dict[str, Part]:
    """Returns the parts by name."""
    one, eight = Work(sizes.prompt, 1), Work(sizes.prompt, 1, EIGHT)
    twice = dict.fromkeys(KINDS, 2.0)
    return {
        "one": Part("one text", one, replace(one, new=sizes.new), {"float32": 1.0, "int8": 1.0, "int4": 0.9}, 1.35),
        # Several prompts, one after the other: one alone is read within what start-up takes now more, now less.
        "prompt": Part("reading prompts", one, Work(sizes.long_prompt, 1, PROMPTS, batch=1), twice),
        "eight": Part("8 texts at once", eight, replace(eight, new=sizes.new_of_eight), twice),
    }


Command = Callable[[Work], list[str]]


class Bench:
    """A model in every form that is measured, and the commands that generate with it."""

    def __init__(self, config: GPTConfig, tokenizer: Tokenizer, place: Path) -> None:
        self.tokenizer, self.place, self.model = tokenizer, place, random_model(config)
        if not place.exists():
            place.mkdir(parents=True)
            checkpoint.save(place / "float32", self.model, checkpoint.TokenizerFiles(tokenizer, config), {})
            for dtype, kind in KINDS.items():
                api.export(place / "float32", place / f"{kind}.gguf", type=kind, device="cpu")
                if dtype != "float32":
                    api.export(place / "float32", place / dtype, dtype=dtype, device="cpu")
        self.ids = tokenizer.encode("\n".join(pydoc_data.topics.topics.values())[:20_000]).tolist()

    def prompt(self, count: int) -> str:
        """Returns a text of about ``count`` tokens."""
        return self.tokenizer.decode(self.ids[:count])

    def gpt(self, dtype: str, compile: str = "auto") -> Command:
        """Returns our command."""
        return lambda work: [
            str(SCRIPTS / "gpt"), "sample", *self.prompts(work), "--model", str(self.place / dtype),
            "--dtype", dtype, "--greedy", "--ignore-eot", "-n", str(work.new),
            "--batch", str(work.batch), "--compile", compile, "--json",
        ]  # fmt: skip

    def prompts(self, work: Work) -> list[str]:
        """Returns the words that name the prompts: a single one, or several that share no prefix, since the prefix
        cache would read a shared one only once."""
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
        """Returns the systems of each part with their commands. With ``warm`` each has run once, so that its files are
        in the system's cache and its blocks compiled, and a dtype that `gpt sample` refuses is left out."""
        shared: dict[str, Command] = {}
        short = Work(1, 1)
        for dtype, kind in KINDS.items():
            if dtype not in dtypes:
                continue
            try:
                if warm:
                    run(self.gpt(dtype)(short))
            except subprocess.CalledProcessError as error:
                print(f"{dtype} is left out: {error.stderr.strip()}", file=sys.stderr)
                continue
            shared |= {dtype: self.gpt(dtype), f"llama.cpp {kind}": self.peer("llama.cpp", f"{kind}.gguf")}
            if warm:
                run(shared[f"llama.cpp {kind}"](short))
        systems = {part: dict(shared) for part in wanted}
        if "one" in wanted:
            if "float32" in shared:
                systems["one"]["transformers"] = self.peer("transformers", "float32")
            for dtype in [dtype for dtype in KINDS if dtype in shared and warm]:
                systems["one"][f"{dtype}{COMPILED}"] = self.gpt(dtype, compile="on")
                run(self.gpt(dtype, compile="on")(replace(short, new=3)))
        return systems

    def loaded(self) -> Iterator[tuple[str, api.LanguageModel]]:
        """Yields the models as `gpt sample` loads them, but for dtypes that it refuses."""
        for dtype in KINDS:
            try:
                yield dtype, api.load(self.place / dtype, dtype=dtype, device="cpu", sampling=SampleConfig())
            except UserError as error:
                print(f"{dtype} is left out: {error}", file=sys.stderr)


def random_model(config: GPTConfig) -> GPT:
    """Makes a model with random weights. Those of blocks are larger than at the start of a training: they would add so
    little to the embeddings of the ids that each would be the likeliest to follow itself."""
    torch.manual_seed(0)
    model = GPT(config).eval()
    for block in model.h:
        for parameter in block.parameters():
            if parameter.dim() == 2:
                parameter.data.mul_(4)
    return model


def run(words: Sequence[str]) -> tuple[float, str]:
    """Runs a command, with threads left to its defaults, and returns its seconds and its stdout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "GPT_"))}
    started = time.perf_counter()
    done = subprocess.run(
        words, cwd=ROOT, env=environment | {"HF_HUB_OFFLINE": "1"}, check=True, capture_output=True, text=True,
        encoding="utf-8", timeout=600,
    )  # fmt: skip
    return time.perf_counter() - started, done.stdout


Rates = dict[str, list[float]]  # tokens per second of each round, by system


def measure(
    wanted: dict[str, Part], bench: Bench, rounds: int, dtypes: Collection[str], warm: bool
) -> tuple[dict[str, Rates], dict[str, list[int]]]:
    """Runs all systems in turn. Returns the rates of each part, and the float32 ids of one text that `gpt` and
    transformers chose."""
    systems = bench.commands(wanted, dtypes, warm) if wanted else {}
    rates = {name: {system: list[float]() for system in systems[name]} for name in wanted}
    texts: dict[str, list[int]] = {}
    for _ in range(rounds):
        seconds: dict[tuple[str, Work], float] = {}
        for name, part in wanted.items():
            for system, command in systems[name].items():
                for work in (part.short, part.long):
                    if (system, work) not in seconds:
                        seconds[system, work], out = run(command(work))
                if part.long.new > 1 and part.long.texts == 1 and system in ("float32", "transformers"):
                    found = json.loads(out)
                    texts[system] = found["tokens"] if system == "float32" else found[0]
                rates[name][system].append(part.tokens / (seconds[system, part.long] - seconds[system, part.short]))
    return rates, texts


def table(part: Part, rates: Rates) -> Iterator[str]:
    """Yields a table of medians, and of the medians of the rounds' ratios."""
    yield "| weights | `gpt`, tokens/s | llama.cpp | ratio | of rounds | at least |"
    yield "|---|---:|---:|---:|---|---:|"
    pairs = [
        (system, f"llama.cpp {kind}", part.bars[dtype])
        for dtype, kind in KINDS.items() for system in (dtype, f"{dtype}{COMPILED}") if system in rates
    ]  # fmt: skip
    if "transformers" in rates:
        pairs.append(("float32", "transformers", part.over_transformers or 0.0))
    for dtype, peer, bar in pairs:
        ours, theirs = rates[dtype], rates[peer]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        named = f"{dtype}, transformers" if peer == "transformers" else f"{dtype}, {peer.split()[1].upper()}"
        yield (
            f"| {named} | {statistics.median(ours):,.1f} | {statistics.median(theirs):,.1f} | "
            f"{statistics.median(ratios):.2f} | {', '.join(f'{each:.2f}' for each in ratios)} | {bar:.2f} |"
        )


@torch.inference_mode()
def likeliest(model: GPT, prompt: Sequence[int], ids: Sequence[int]) -> list[tuple[int, float]]:
    """Returns where ids are not the likeliest ones after a prompt and those before them, with the nats that they lack,
    by a model whose weights are not packed and which has no cache."""
    logits = model(torch.tensor([[*prompt, *ids[:-1]]]))[0, len(prompt) - 1 :]
    gaps = logits.amax(-1) - logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]
    return [(at, gap) for at, gap in enumerate(gaps.tolist()) if gap]


def exactness(bench: Bench, part: Part, texts: dict[str, list[int]]) -> Iterator[str]:
    """Yields lines about the float32 ids of one text."""
    ids = texts["float32"]
    others = likeliest(bench.model, bench.tokenizer.prompt(bench.prompt(part.long.prompt)), ids)
    far = [f"token {at}: {gap:.1e}" for at, gap in others if gap >= TIE]
    near = ", ".join(f"token {at}: {gap:.1e}" for at, gap in others if gap < TIE) or "none"
    yield ""
    yield (
        f"Of {len(ids)} float32 ids ({len(set(ids))} different ones) {len(ids) - len(others)} are the likeliest by the "
        f"model without packing and cache; nearly (nats under {TIE:g}): {near}; "
        + (f"NOT THE LIKELIEST: {', '.join(far)}." if far else "others: none.")
    )
    theirs = texts["transformers"]
    same = next((at for at, pair in enumerate(zip(ids, theirs, strict=True)) if pair[0] != pair[1]), None)
    yield f"transformers' text is {'the same' if same is None else f'another from token {same} on'}."


def step_lines(bench: Bench) -> Iterator[str]:
    """Yields a table of where a token's time goes."""
    yield "Milliseconds; choice: from logits to an id; host: the engine's bookkeeping."
    yield ""
    yield from steps.table(bench.loaded(), (1, EIGHT))


def models(tiny: bool) -> Iterator[tuple[str, GPTConfig, Tokenizer]]:
    """Yields models' names, shapes and tokenizers: GPT-2's vocabulary, as far as the model has ids for it."""
    if tiny:
        yield "tiny", GPTConfig(257, 128, 2, 2, 64), bytes_tokenizer()
        return
    whole = gpt2_tokenizer()
    for name in ("gpt2", "smollm2-135m"):
        config = PRESETS[name].model
        tokenizer = whole
        if config.vocab_size < whole.vocab_size:
            assert isinstance(whole.backend, ByteBPE)
            ranks = dict(islice(sorted(whole.backend.ranks.items(), key=lambda each: each[1]), config.vocab_size - 1))
            backend = ByteBPE(whole.backend.pattern, ranks)
            tokenizer = replace(whole, name="cut", backend=backend, eot=config.vocab_size - 1)
        yield name, config, tokenizer


def main() -> None:
    """Measures, and writes the sections of RESULTS.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=[*parts(TINY), "steps"], nargs="+")
    parser.add_argument("--model", choices=["gpt2", "smollm2-135m"])
    parser.add_argument("--dtypes", choices=list(KINDS), nargs="+", default=list(KINDS), help="of the commands")
    parser.add_argument("--folder", type=Path, help="make the models here, or take those that are here")
    asked = parser.parse_args()
    every = parts(TINY if asked.tiny else Sizes())
    wanted = {name: part for name, part in every.items() if name in (asked.only or every)}
    for name, config, tokenizer in models(asked.tiny):
        if asked.model not in (None, name):
            continue
        with tempfile.TemporaryDirectory(prefix="gpt-") as folder:
            bench = Bench(config, tokenizer, (asked.folder or Path(folder)) / name)
            speed = bandwidth_of(CPU)
            rates, texts = measure(wanted, bench, asked.rounds, asked.dtypes, warm=not asked.tiny)
            sections = {
                f"Decoding, {name}: {part.title}": [
                    *table(part, rates[key]), *(exactness(bench, part, texts) if key == "one" and texts else [])
                ] for key, part in wanted.items()
            }  # fmt: skip
            if "steps" in (asked.only or ["steps"]):
                sections[f"Where a token's time goes, {name}"] = list(step_lines(bench))
        about = [
            *machine("python -m benchmarks.decode"),
            f"- torch {torch.__version__}, transformers {version('transformers')}, xllamacpp {version('xllamacpp')}, "
            f"{THREADS} threads; just before, memory read {speed / 1e9:.1f} GB/s",
            "",
        ]
        for title, lines in sections.items():
            if asked.tiny:
                print("\n".join(lines))
            else:
                write_section(title, [*about, *lines])


if __name__ == "__main__":
    main()
