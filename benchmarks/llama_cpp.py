"""Compares exported .gguf files in llama.cpp with ours: token ids, greedy texts, losses and log-probabilities.

    python -m benchmarks.llama_cpp [MODEL TEXT] [--texts N] [--prompts N] [--tokens N]

Without MODEL it trains one on TEXT, which is the Python reference where none is given. Further small models are trained
for further vocabularies and layouts. Takes some minutes and the extra `interop`; GPT-2's vocabulary is left out where
it is not in the cache.
"""

import argparse
import http.client
import json
import pydoc_data.topics
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Self
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results import ROOT, machine, write_section
from gpt import api
from gpt.api import LanguageModel
from gpt.config import GPTConfig
from gpt.errors import WorkError
from gpt.evaluate import Encoded, Window, total_loss, windows
from gpt.exporting import gguf, gguf_tokenizer, run
from gpt.exporting.source import SourceModel, open_source
from gpt.model import decoder
from gpt.model.decoder import GPT
from gpt.runs import checkpoint
from gpt.sample_config import SampleConfig
from gpt.text.backends import ByteBPE
from gpt.text.boundaries import CL100K_PATTERN, DIGITS_PATTERN, GPT2_PATTERN, LLAMA3_PATTERN, MINBPE_PATTERN
from gpt.text.tokenizer import Tokenizer, bytes_tokenizer, gpt2_tokenizer

Numbers = np.ndarray[Any, np.dtype[np.float64]]
TIE = 1e-3  # nats between the two likeliest ids, below which either may come first
GREEDY = 64  # tokens of a continuation


class LlamaCpp:
    """llama.cpp's server with the model of a .gguf file, on one thread. It runs in a process of its own, since a bad
    file would end this one, until the context ends. ``exact``: its cache and attention are in float32, and not in
    float16, which is its default."""

    def __init__(self, path: Path, exact: bool = True) -> None:
        self.path = path
        self.exact = exact

    def __enter__(self) -> Self:
        self.errors = tempfile.TemporaryFile()
        words = [sys.executable, "-m", "benchmarks.llama_server", str(self.path.absolute()), *["--exact"] * self.exact]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=self.errors, text=True)
        assert self.process.stdout is not None
        address = self.process.stdout.readline().strip()
        self.connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        if not address:
            self.__exit__()
            raise RuntimeError(f"llama.cpp does not read {self.path}: {self.said}")
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()  # at the end of its input the process ends
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.seek(0)
        self.said = self.errors.read().decode("utf-8", "replace")
        self.errors.close()

    def post(self, where: str, **body: Any) -> dict[str, Any]:
        """Returns the server's answer."""
        self.connection.request("POST", where, json.dumps(body), {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        found: dict[str, Any] = json.loads(answer.read())
        if answer.status != 200:
            raise RuntimeError(f"llama.cpp answers {where} with {found}")
        return found

    def ids(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Returns the ids of a text, in which special tokens are text unless ``parse_special``."""
        return list(
            self.post("/tokenize", content=text, add_special=add_special, parse_special=parse_special)["tokens"]
        )

    def continuation(self, prompt: str, count: int = GREEDY) -> list[int]:
        """Returns the likeliest ids after a prompt, one after the other, up to an end of text."""
        found = self.post(
            "/completion", prompt=prompt, n_predict=count, temperature=0, samplers=["temperature"], return_tokens=True
        )
        return list(found["tokens"])

    def logprob(self, ids: Sequence[int], following: int) -> float:
        """Returns the log-probability of an id after others: the id is forced, which the logits told do not know."""
        found = self._probabilities(ids, 1, [[following, 1e9]])
        assert found["id"] == following
        return float(found["logprob"])

    def logprobs(self, ids: Sequence[int], vocab_size: int) -> Numbers:
        """Returns the log-probabilities (V) of all ids after others. Id 65, an A, is forced: with a part of a character
        llama.cpp gives none."""
        found = np.full(vocab_size, np.nan)
        for each in self._probabilities(ids, vocab_size, [[65, 1e9]])["top_logprobs"]:
            found[each["id"]] = each["logprob"]
        return found

    def _probabilities(self, ids: Sequence[int], count: int, bias: list[list[float]]) -> dict[str, Any]:
        found = self.post(
            "/completion", prompt=list(ids), n_predict=1, n_probs=count, temperature=0, samplers=["temperature"],
            cache_prompt=True, logit_bias=bias,
        )  # fmt: skip
        return dict(found["completion_probabilities"][0])


# Two plain sentences in each of some languages and scripts.
LANGUAGES = [
    "The river is wide here, and it's cold. We don't swim until June.",
    "Der Fluss ist hier breit; größere Boote dürfen nicht weiterfahren. Schön wär's!",
    "La rivière est large ici, et l'été n'est qu'un souvenir. Où vas-tu, cœur léger ?",
    "El río es ancho aquí. ¿Mañana iremos con los niños? ¡Ojalá!",
    "O rio é largo aqui; amanhã não haverá pão nem maçãs.",
    "Il fiume è largo qui, perché più giù c'è una diga.",
    "Rzeka jest tu szeroka, a łódź płynie wolno. Żółć i gęś.",
    "Řeka je tu široká a příští týden bude ještě širší.",
    "A folyó itt széles, és hűvös szél fúj az őszi erdőből.",
    "Nehir burada geniştir; ığdır'a giden yol İstanbul'dan geçer.",
    "Sông ở đây rất rộng, và nước thì lạnh. Ngày mai chúng tôi sẽ đi.",
    "Река здесь широкая, и вода холодная. Ёжик пьёт молоко.",
    "Річка тут широка, і їжак іде п'ять кроків.",
    "Ο ποταμός είναι πλατύς εδώ· ας πάμε αύριο.",
    "הנהר רחב כאן, והמים קרים. נלך מחר בבוקר.",
    "النهر واسع هنا، والماء بارد. سنذهب غدًا في الصباح.",
    "رودخانه اینجا پهن است و آب سرد است؛ فردا می‌رویم.",
    "नदी यहाँ चौड़ी है और पानी ठंडा है। कल हम चलेंगे।",
    "নদী এখানে চওড়া, আর জল ঠান্ডা। কাল আমরা যাব।",
    "ஆறு இங்கே அகலமானது, தண்ணீர் குளிராக உள்ளது.",
    "แม่น้ำตรงนี้กว้าง และน้ำก็เย็นมาก พรุ่งนี้เราจะไป",
    "河在这里很宽,水也很冷。我们明天早上去。",
    "川はここで広く、水は冷たい。明日の朝、行きましょう。カタカナも。",
    "강은 여기서 넓고 물은 차갑다. 내일 아침에 가자.",
    "მდინარე აქ ფართოა და წყალი ცივია.",
    "Գետն այստեղ լայն է, իսկ ջուրը՝ սառը։",
    "ወንዙ እዚህ ሰፊ ነው፤ ውሃውም ቀዝቃዛ ነው።",
]
_SPACES = " \n\t\r\x0b\x0c\x85\u00a0\u2003\u2028\u3000"
_MARKS = [
    "e\u0301",
    "n\u0303o",
    "\u1112\u1161\u11ab",
    "क्षि",
    "🐕‍🦺",
    "👩‍👩‍👧",
    "🇨🇭",
    "👍🏽",
    "☃️",
    "\u200b",
    "\ufeff",
    "🧗",
]
_WRITTEN = ["<|endoftext|>", "<|im_end|>", "</s>", "[unused300]", "<s>", "<|", "|>"]
_QUOTES = ["'s", "'S", "'ll", "'LL", "'Ve", "'re", "'d", "'", "''", "’s", "`", '"', "d'accord", "o'clock", "'tis"]
_NUMBERS = ["0", "7", "12", "345", "6789", "1234567890", "3.14", "1,000,000", "٣٤", "Ⅷ", "½", "x²", "0x1F", "１２３"]


def _pieces() -> list[Callable[[random.Random], str]]:
    """Makers of pieces of text, one for each kind."""
    code = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "gpt").rglob("*.py"))]

    def part(found: Sequence[str], random: random.Random) -> str:
        text = random.choice(found)
        start = random.randrange(len(text) or 1)
        return text[start : start + random.randrange(1, 120)]

    def point(random: random.Random) -> str:
        plane = random.choice((0x80, 0x3000, 0x10000, 0x20000, 0x110000))
        code = random.randrange(plane)
        return chr(code) if not 0xD800 <= code < 0xE000 else " "

    return [
        partial(part, LANGUAGES),
        partial(part, code),
        lambda random: random.choice(_SPACES) * random.randrange(1, 12),
        lambda random: "".join(random.choices(_SPACES, k=random.randrange(1, 8))),
        lambda random: "".join(random.choices(_NUMBERS, k=random.randrange(1, 4))),
        lambda random: "".join(random.choices(_MARKS, k=random.randrange(1, 4))),
        lambda random: "".join(random.choices(_QUOTES, k=random.randrange(1, 4))),
        lambda random: random.choice(_WRITTEN),
        lambda random: "".join(point(random) for _ in range(random.randrange(1, 6))),
    ]


def texts(count: int, seed: int = 0) -> list[str]:
    """Returns texts: a fifth of hypothesis' own, the others of languages, code, white space, numbers, emoji, marks,
    quotes, the words of special tokens, and any characters."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    some, drawn, made = [], random.Random(seed), _pieces()
    while len(some) < count - count // 5:
        pieces = (drawn.choice(made)(drawn) for _ in range(drawn.randrange(1, 9)))
        some.append(drawn.choice(["", "", " "]).join(pieces))

    @settings(max_examples=count // 5, phases=[Phase.generate], derandomize=True, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.text(max_size=60))
    def take(text: str) -> None:
        some.append(text)

    take()
    return some[:count]


def learnt(pattern: str, size: int, texts: Iterable[str]) -> Tokenizer:
    """Learns a byte-level BPE of a pattern; `gpt` itself learns those of GPT-2's only."""
    import rustbpe

    learner = rustbpe.Tokenizer()
    learner.train_from_iterator(iter(texts), size - 1, pattern=pattern)
    ranks = {bytes(token): rank for token, rank in learner.get_mergeable_ranks()}
    return Tokenizer("bpe", ByteBPE(pattern, ranks), len(ranks))


def vocabularies(text: str) -> Iterator[tuple[str, Tokenizer]]:
    """Yields tokenizers of each pattern that llama.cpp has, with what each is called."""
    yield "bytes", bytes_tokenizer()
    for size in (512, 4096):
        yield f"learnt from TEXT, {size} ids", learnt(GPT2_PATTERN, size, [text])
    languages = [" ".join(random.Random(number).sample(LANGUAGES, len(LANGUAGES))) for number in range(20)]
    for size in (400, 1500):
        yield f"learnt from {len(LANGUAGES)} languages, {size} ids", learnt(GPT2_PATTERN, size, languages)
    both = [*languages, text]
    yield "Llama 3's pattern", learnt(LLAMA3_PATTERN, 3000, both)
    yield "Qwen's pattern", learnt(LLAMA3_PATTERN.replace("{1,3}", ""), 3000, both)
    yield "SmolLM's pattern", learnt(DIGITS_PATTERN, 3000, both)
    yield "minbpe's pattern", learnt(MINBPE_PATTERN, 3000, both)
    yield "cl100k's pattern", learnt(CL100K_PATTERN, 3000, both)
    try:
        yield "GPT-2's", gpt2_tokenizer()
    except WorkError as error:
        print(f"GPT-2's vocabulary is left out: {error}")


def untrained(path: Path, tokenizer: Tokenizer) -> Path:
    """Writes the .gguf file of a tiny model with random weights and this tokenizer."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(tokenizer.vocab_size + 3, block_size=64, n_layer=1, n_head=1, n_embd=32))
    weights = {name: partial(Tensor.detach, each) for name, each in model.named_parameters()}
    gguf_tokenizer.check(tokenizer)
    gguf.write(path, SourceModel(path, model.config, tokenizer, weights), "f32", "untrained")
    return path


def other_ids(tokenizer: Tokenizer, server: LlamaCpp, some: Iterable[str]) -> list[str]:
    """Returns the texts to which llama.cpp gives other ids."""
    return [text for text in some if tokenizer.encode(text).tolist() != server.ids(text)]


_gelu = F.gelu


def table_gelu(x: Tensor, approximate: str) -> Tensor:
    """GELU as llama.cpp's CPU computes it: a table from float16 to float16, between -10 and 10."""
    looked_up = _gelu(x.half().float(), approximate=approximate).half().float()
    return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, looked_up))


def with_table_gelu() -> Any:
    """Within the context, our decoder takes llama.cpp's GELU. SwiGLU has no table."""
    return mock.patch.object(decoder.F, "gelu", table_gelu)


@dataclass(frozen=True)
class Greedy:
    """Continuations of a model's prompts by the likeliest ids."""

    prompts: int
    tokens: int  # of ours, those after a difference left out
    apart: list[float]  # nats between our two likeliest ids where llama.cpp takes another


def prompts(model: LanguageModel, text: str, count: int) -> list[str]:
    """Returns prompts from a text that leave room for a continuation in the context."""
    drawn, found = random.Random(0), list[str]()
    while len(found) < count:
        start = drawn.randrange(len(text))
        prompt = text[start : start + drawn.randrange(4, 160)]
        if prompt and len(model.tokenizer.prompt(prompt)) <= model.model.config.block_size - GREEDY:
            found.append(prompt)
    return found


def greedy(model: LanguageModel, some: Sequence[str], theirs: Sequence[list[int]]) -> Greedy:
    """Compares continuations with llama.cpp's, up to the first other id of each."""
    config = SampleConfig(temperature=0, max_tokens=GREEDY, logprobs=2)
    tokens, apart = 0, []
    for piece in model.write_all(some, config):
        if piece.sample is None:
            continue
        assert piece.sample.logprobs is not None
        ours, ids = [token.id for token in piece.sample.logprobs], theirs[piece.prompt]
        same = next((i for i, (a, b) in enumerate(zip(ours, ids, strict=False)) if a != b), None)
        tokens += len(ours) if same is None else same
        if same is not None:
            (_, first), (_, second) = piece.sample.logprobs[same].top
            apart.append(first - second)
        elif len(ours) != len(ids):
            raise AssertionError(f"{some[piece.prompt]!r} ends after {len(ours)} tokens, there after {len(ids)}")
    return Greedy(len(some), tokens, sorted(apart))


def trained(text: Path, out: Path, steps: int, **settings: Any) -> LanguageModel:
    """Trains a small model and loads it."""
    api.train(
        text, out=out, steps=steps, dtype="float32", sample_every=0, save_every=steps, device="cpu",
        **{"n_layer": 3, "n_head": 4, "n_embd": 128, "block_size": 128, "batch_tokens": 1024, **settings},
    )  # fmt: skip
    return api.load(out, device="cpu")


def exported(model: LanguageModel, out: Path, **settings: Any) -> Path:
    """Exports a model, once."""
    if not out.exists():
        api.export(model.path, out, device="cpu", **settings)
    return out


def their_loss(server: LlamaCpp, some: Sequence[Window]) -> float:
    """Returns llama.cpp's loss over windows in nats per token."""
    losses = [-server.logprob(w.x[: i + 1].tolist(), int(w.y[i])) for w in some for i in range(w.skipped, len(w.y))]
    return float(np.mean(losses))


def with_weights_of(path: Path, model: LanguageModel, kind: str) -> GPT:
    """Our decoder in float32 with the numbers that a .gguf file of this kind holds."""
    source = open_source(path)
    stored = run.stored(source, run.Target(Path("model.gguf"), True, kind, None))
    return checkpoint.build(source.config, stored, model.compute.device, torch.float32)


def our_logprobs(model: LanguageModel, some: Iterable[Window], count: int) -> Numbers:
    """Returns the log-probabilities (count, V) of all ids at the first positions of windows."""
    found: list[Numbers] = []
    for window in some:
        with torch.inference_mode():
            logits = model.model(torch.from_numpy(window.x)[None])
        found.append(logits[0].double().log_softmax(-1).numpy())
        if sum(map(len, found)) >= count:
            break
    return np.concatenate(found)[:count]


def their_logprobs(server: LlamaCpp, some: Iterable[Window], count: int, vocab_size: int) -> Numbers:
    """Returns the same of llama.cpp."""
    places = ((window, i) for window in some for i in range(len(window.x)))
    return np.stack([server.logprobs(w.x[: i + 1].tolist(), vocab_size) for w, i in islice(places, count)])


def ids_table(text: str, count: int, place: Path) -> Iterator[str]:
    """Yields a table of vocabularies and the texts to which llama.cpp gives other ids."""
    some = texts(count)
    yield f"Token ids of {count:,} texts ({sum(map(len, some)):,} characters), special tokens written out among them:"
    yield ""
    yield "| vocabulary | ids | texts with other ids |"
    yield "|---|---:|---:|"
    for number, (name, tokenizer) in enumerate(vocabularies(text)):
        with LlamaCpp(untrained(place / f"{number}.gguf", tokenizer)) as server:
            other = other_ids(tokenizer, server, some)
        yield f"| {name} | {tokenizer.vocab_size:,} | {len(other):,} |"
        print(name, *map(ascii, other), sep="\n  ", flush=True)
    yield ""
    yield "llama.cpp has Unicode 15: the letters and digits of Unicode 16, 4,382 of them, are neither to it."


def greedy_table(models: dict[str, LanguageModel], text: str, count: int, place: Path) -> Iterator[str]:
    """Yields a table of models and the prompts that llama.cpp continues otherwise."""
    yield f"Greedy continuations, {GREEDY} tokens of {count:,} prompts each, of f32 files with a cache in float32:"
    yield ""
    yield "| model | tokens compared | GELU | prompts with another id | nats between our two likeliest ids there |"
    yield "|---|---:|---|---:|---|"
    for number, (name, model) in enumerate(models.items()):
        some = prompts(model, text, count)
        with LlamaCpp(exported(model, place / f"greedy{number}.gguf", type="f32")) as server:
            theirs = [server.continuation(prompt) for prompt in some]
        for kind, how in gelus(model):
            with how():
                found = greedy(model, some, theirs)
            apart = ", ".join(f"{each:.5f}" for each in found.apart)
            yield f"| {name} | {found.tokens:,} | {kind} | {len(found.apart)} | {apart} |"


def gelus(model: LanguageModel) -> list[tuple[str, Callable[[], Any]]]:
    """Returns how our decoder may compute the activations: as it is, and with llama.cpp's table if it has a GELU."""
    if model.model.config.mlp != "gelu":
        return [("none", nullcontext)]
    return [("ours", nullcontext), ("its table", with_table_gelu)]


def loss_table(model: LanguageModel, some: list[Window], place: Path) -> Iterator[str]:
    """Yields a table of the losses of exported folders here and of exported files in llama.cpp."""
    count = sum(len(window.y) - window.skipped for window in some)
    yield f"Loss over {count:,} tokens in windows of {len(some[0].x)} (llama.cpp takes no more), nats per token:"
    yield ""
    yield "| export | bytes | here | in llama.cpp |"
    yield "|---|---:|---:|---:|"
    for dtype in ("float32", "int8", "int4"):
        folder = exported(model, place / dtype, dtype=dtype)
        size = (folder / "model.safetensors").stat().st_size
        total, n = total_loss(api.load(folder, device="cpu").model, some, model.compute)
        yield f"| folder, {dtype} | {size:,} | {total / n:.4f} | |"
    for kind in ("f32", "f16", "q8_0", "q4_0"):
        path = exported(model, place / f"{kind}.gguf", type=kind)
        total, n = total_loss(with_weights_of(model.path, model, kind), some, model.compute)
        with LlamaCpp(path) as server:
            theirs = their_loss(server, some)
        yield f"| .gguf, {kind} | {path.stat().st_size:,} | {total / n:.4f} | {theirs:.4f} |"


def difference_table(models: dict[str, LanguageModel], text: str, count: int, place: Path) -> Iterator[str]:
    """Yields a table of how far llama.cpp's log-probabilities of all ids are from ours."""
    yield f"Log-probabilities of all ids at {count:,} positions, f32 files, nats from ours in float32:"
    yield ""
    yield "| model | its attention | GELU | mean | largest |"
    yield "|---|---|---|---:|---:|"
    for number, (name, model) in enumerate(models.items()):
        path = exported(model, place / f"difference{number}.gguf", type="f32")
        some = text_windows(model, text)
        for exact, attention in ((True, "float32"), (False, "float16, its default")):
            with LlamaCpp(path, exact) as server:
                theirs = their_logprobs(server, some, count, model.model.config.vocab_size)
            for kind, how in gelus(model):
                with how():
                    found = np.abs(theirs - our_logprobs(model, some, count))
                yield f"| {name} | {attention} | {kind} | {found.mean():.1e} | {found.max():.1e} |"
    yield ""
    yield "llama.cpp's GELU on a CPU is a table in half precision; SwiGLU has none."


def text_windows(model: LanguageModel, text: str) -> list[Window]:
    """Returns the windows of a text that `gpt eval` takes, but one position shorter, since llama.cpp's server predicts
    nothing at the last position of its context."""
    document = model.tokenizer.document(text).astype(np.int64)
    return list(windows(Encoded([document]), model.model.config.block_size - 1))


def main() -> None:
    """Runs everything and writes the section of RESULTS.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="a run or checkpoint; without it one is trained")
    parser.add_argument("text", nargs="?", help="a file; without it the Python reference")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=4000, help="tokens over which losses are measured")
    parser.add_argument("--positions", type=int, default=500, help="positions at which all ids are compared")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gpt-") as name:
        place = Path(name)
        file = Path(arguments.text) if arguments.text else place / "reference.txt"
        if not arguments.text:
            file.write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
        text = file.read_text(encoding="utf-8")
        if arguments.model:
            main_model = api.load(arguments.model, device="cpu")
            if main_model.model.config.block_size < 2 * GREEDY:
                sys.exit(f"the model's context is shorter than {2 * GREEDY}")
        else:
            main_model = trained(file, place / "main", 300, vocab_size=1024)
        models = {
            "learnt vocabulary": main_model,
            "bytes": trained(file, place / "bytes", 800, tokenizer="bytes"),
            "Qwen3's layout": trained(file, place / "modern", 300, arch="modern", vocab_size=1024),
        }
        try:
            gpt2_tokenizer()
            models["GPT-2's vocabulary"] = trained(
                file, place / "gpt2", 500, tokenizer="gpt2", n_embd=64, batch_tokens=256
            )
        except WorkError as error:
            print(f"GPT-2's vocabulary is left out: {error}")
        some = text_windows(main_model, text)
        some = some[: -(-arguments.tokens // len(some[0].x))]
        both = {each: models[each] for each in ("learnt vocabulary", "Qwen3's layout")}
        lines = [
            *ids_table(text, arguments.texts, place), "",
            *greedy_table(models, text, arguments.prompts, place), "",
            *loss_table(main_model, some, place), "",
            *difference_table(both, text, arguments.positions, place), "",
        ]  # fmt: skip
    about = f"- xllamacpp {version('xllamacpp')}, one thread; the model: {parameters(main_model):,} parameters"
    command = "python -m benchmarks.llama_cpp" + (" MODEL TEXT" if arguments.model else "")
    write_section("Exported files in llama.cpp", [*lines, *machine(command), about])


def parameters(model: LanguageModel) -> int:
    """Returns the number of a model's parameters."""
    return sum(each.numel() for each in model.model.parameters())


if __name__ == "__main__":
    main()
