"""Compares exported .gguf files in llama.cpp with `gpt`: token ids, greedy texts, losses and log-probabilities.

    python -m benchmarks.llama_cpp [MODEL TEXT] [--texts N] [--prompts N] [--tokens N]

Without arguments, trains a small model on the Python reference. In any case, trains more models for other vocabularies
and layouts. Takes a few minutes and needs the extra `interop`. Skips GPT-2's vocabulary if it cannot be downloaded.
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
from itertools import islice
from pathlib import Path
from typing import Any, Self
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results import ROOT, Table, measured, write_section
from gpt import api
from gpt.api import LanguageModel
from gpt.config.export import ExportConfig
from gpt.config.model import GPTConfig
from gpt.config.sample import SampleConfig
from gpt.exporting import export as run
from gpt.exporting import gguf, gguf_tokenizer
from gpt.exporting.source import SourceModel, open_source
from gpt.insight.evaluate import Encoded, Window, total_loss, windows
from gpt.model import decoder
from gpt.model.decoder import GPT
from gpt.runs import checkpoint
from gpt.system.errors import WorkError
from gpt.tokenizers.backends import ByteBPE
from gpt.tokenizers.boundaries import CL100K_PATTERN, DIGITS_PATTERN, GPT2_PATTERN, LLAMA3_PATTERN, MINBPE_PATTERN
from gpt.tokenizers.importing import gpt2_tokenizer
from gpt.tokenizers.tokenizer import Tokenizer, bytes_tokenizer

Float64Array = np.ndarray[Any, np.dtype[np.float64]]
TIE = 1e-3  # nats; rounding decides between two ids that differ by less
GREEDY = 64  # tokens per continuation


class LlamaCpp:
    """A llama.cpp server on one thread, in a separate process, since invalid files crash llama.cpp.

    ``exact`` selects a KV cache and attention in float32 instead of llama.cpp's float16.
    """

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
            raise RuntimeError(f"llama.cpp cannot read {self.path}: {self.log}")
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()  # The server exits when its stdin closes.
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.seek(0)
        self.log = self.errors.read().decode("utf-8", "replace")
        self.errors.close()

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        """Returns the server's JSON response."""
        self.connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        values: dict[str, Any] = json.loads(answer.read())
        if answer.status != 200:
            raise RuntimeError(f"llama.cpp answered {route} with {values}")
        return values

    def ids(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Returns the ids of a text. Names of special tokens are plain text unless ``parse_special``."""
        return list(
            self.post("/tokenize", content=text, add_special=add_special, parse_special=parse_special)["tokens"]
        )

    def continuation(self, prompt: str, count: int = GREEDY) -> list[int]:
        """Returns the greedy continuation of a prompt, up to end-of-text."""
        response = self.post(
            "/completion", prompt=prompt, n_predict=count, temperature=0, samplers=["temperature"], return_tokens=True
        )
        return list(response["tokens"])

    def logprob(self, ids: Sequence[int], following: int) -> float:
        """Returns the log-probability of ``following`` after ``ids``. A logit bias forces the id but does not change
        its log-probability."""
        result = self._probabilities(ids, 1, [[following, 1e9]])
        assert result["id"] == following
        return float(result["logprob"])

    def logprobs(self, ids: Sequence[int], vocab_size: int) -> Float64Array:
        """Returns the log-probabilities (V) after ``ids``. Forces the next id to be 65, the letter A, because llama.cpp
        returns no log-probabilities if the next id is an incomplete character."""
        values = np.full(vocab_size, np.nan)
        for candidate in self._probabilities(ids, vocab_size, [[65, 1e9]])["top_logprobs"]:
            values[candidate["id"]] = candidate["logprob"]
        return values

    def _probabilities(self, ids: Sequence[int], count: int, bias: list[list[float]]) -> dict[str, Any]:
        response = self.post(
            "/completion", prompt=list(ids), n_predict=1, n_probs=count, temperature=0, samplers=["temperature"],
            cache_prompt=True, logit_bias=bias,
        )  # fmt: skip
        return dict(response["completion_probabilities"][0])


# Simple sentences in several languages and scripts.
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
_SPECIAL_NAMES = ["<|endoftext|>", "<|im_end|>", "</s>", "[unused300]", "<s>", "<|", "|>"]
_QUOTES = ["'s", "'S", "'ll", "'LL", "'Ve", "'re", "'d", "'", "''", "’s", "`", '"', "d'accord", "o'clock", "'tis"]
_NUMERALS = ["0", "7", "12", "345", "6789", "1234567890", "3.14", "1,000,000", "٣٤", "Ⅷ", "½", "x²", "0x1F", "１２３"]


def _piece_generators() -> list[Callable[[random.Random], str]]:
    """Returns functions that draw random pieces of text, one per kind."""
    code = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "gpt").rglob("*.py"))]

    def draw_substring(sources: Sequence[str], random: random.Random) -> str:
        text = random.choice(sources)
        start = random.randrange(len(text) or 1)
        return text[start : start + random.randrange(1, 120)]

    def draw_character(random: random.Random) -> str:
        plane = random.choice((0x80, 0x3000, 0x10000, 0x20000, 0x110000))
        code = random.randrange(plane)
        return chr(code) if not 0xD800 <= code < 0xE000 else " "

    return [
        partial(draw_substring, LANGUAGES),
        partial(draw_substring, code),
        lambda random: random.choice(_SPACES) * random.randrange(1, 12),
        lambda random: "".join(random.choices(_SPACES, k=random.randrange(1, 8))),
        lambda random: "".join(random.choices(_NUMERALS, k=random.randrange(1, 4))),
        lambda random: "".join(random.choices(_MARKS, k=random.randrange(1, 4))),
        lambda random: "".join(random.choices(_QUOTES, k=random.randrange(1, 4))),
        lambda random: random.choice(_SPECIAL_NAMES),
        lambda random: "".join(draw_character(random) for _ in range(random.randrange(1, 6))),
    ]


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Returns random texts: a fifth from hypothesis, the rest from random pieces of all kinds."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    drawn_texts, rng, pieces = list[str](), random.Random(seed), _piece_generators()
    while len(drawn_texts) < count - count // 5:
        parts = (rng.choice(pieces)(rng) for _ in range(rng.randrange(1, 9)))
        drawn_texts.append(rng.choice(["", "", " "]).join(parts))

    @settings(max_examples=count // 5, phases=[Phase.generate], derandomize=True, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.text(max_size=60))
    def add_text(text: str) -> None:
        drawn_texts.append(text)

    add_text()
    return drawn_texts[:count]


def train_bpe(pattern: str, size: int, texts: Iterable[str]) -> Tokenizer:
    """Trains a byte-level BPE with ``pattern``; `gpt` itself trains only with GPT-2's pattern."""
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), size - 1, pattern=pattern)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    return Tokenizer("bpe", ByteBPE(pattern, ranks), len(ranks))


def vocabularies(text: str) -> Iterator[tuple[str, Tokenizer]]:
    """Yields names and tokenizers, which together have every kind of pattern that `gpt export` supports."""
    yield "bytes", bytes_tokenizer()
    for size in (512, 4096):
        yield f"trained on TEXT, {size} ids", train_bpe(GPT2_PATTERN, size, [text])
    languages = [" ".join(random.Random(number).sample(LANGUAGES, len(LANGUAGES))) for number in range(20)]
    for size in (400, 1500):
        yield f"trained on {len(LANGUAGES)} languages, {size} ids", train_bpe(GPT2_PATTERN, size, languages)
    texts = [*languages, text]
    yield "Llama 3's pattern", train_bpe(LLAMA3_PATTERN, 3000, texts)
    yield "Qwen's pattern", train_bpe(LLAMA3_PATTERN.replace("{1,3}", ""), 3000, texts)
    yield "SmolLM's pattern", train_bpe(DIGITS_PATTERN, 3000, texts)
    yield "minbpe's pattern", train_bpe(MINBPE_PATTERN, 3000, texts)
    yield "cl100k's pattern", train_bpe(CL100K_PATTERN, 3000, texts)
    try:
        yield "GPT-2's", gpt2_tokenizer()
    except WorkError as error:
        print(f"Skipped GPT-2's vocabulary: {error}")


def write_untrained(path: Path, tokenizer: Tokenizer) -> Path:
    """Writes a .gguf file of a tiny random model with this tokenizer."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(tokenizer.vocab_size + 3, block_size=64, n_layer=1, n_head=1, n_embd=32))
    weights = {name: partial(Tensor.detach, parameter) for name, parameter in model.named_parameters()}
    gguf_tokenizer.check(tokenizer)
    gguf.write(path, SourceModel(path, model.config, tokenizer, weights), "f32", "untrained")
    return path


def find_different_texts(tokenizer: Tokenizer, server: LlamaCpp, texts: Iterable[str]) -> list[str]:
    """Returns the texts that llama.cpp tokenizes differently."""
    return [text for text in texts if tokenizer.encode(text).tolist() != server.ids(text)]


_gelu = F.gelu


def table_gelu(x: Tensor, approximate: str) -> Tensor:
    """Computes GELU like llama.cpp on a CPU: a float16 lookup table between -10 and 10."""
    from_table = _gelu(x.half().float(), approximate=approximate).half().float()
    return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, from_table))


def use_table_gelu() -> Any:
    """Returns a context in which our decoder uses llama.cpp's GELU."""
    return mock.patch.object(decoder.F, "gelu", table_gelu)


@dataclass(frozen=True)
class GreedyComparison:
    """A comparison of greedy continuations."""

    prompts: int
    tokens: int  # number of tokens before the first mismatch, summed over prompts
    gaps: list[float]  # nats between our two most likely ids at each first mismatch


def draw_prompts(model: LanguageModel, text: str, count: int) -> list[str]:
    """Draws prompts from a text. They are short enough to leave context for a continuation."""
    rng, drawn_prompts = random.Random(0), list[str]()
    while len(drawn_prompts) < count:
        start = rng.randrange(len(text))
        prompt = text[start : start + rng.randrange(4, 160)]
        if prompt and len(model.tokenizer.prompt(prompt)) <= model.model.config.block_size - GREEDY:
            drawn_prompts.append(prompt)
    return drawn_prompts


def compare_greedy(model: LanguageModel, prompts: Sequence[str], theirs: Sequence[list[int]]) -> GreedyComparison:
    """Compares each continuation with llama.cpp's up to the first mismatch."""
    config = SampleConfig(temperature=0, max_tokens=GREEDY, logprobs=2)
    tokens, gaps = 0, []
    for piece in model.write_all(prompts, config):
        if piece.sample is None:
            continue
        assert piece.sample.logprobs is not None
        ours, ids = [token.id for token in piece.sample.logprobs], theirs[piece.prompt]
        mismatch = next((i for i, (a, b) in enumerate(zip(ours, ids, strict=False)) if a != b), None)
        tokens += len(ours) if mismatch is None else mismatch
        if mismatch is not None:
            (_, top_logprob), (_, second_logprob) = piece.sample.logprobs[mismatch].top
            gaps.append(top_logprob - second_logprob)
        elif len(ours) != len(ids):
            raise AssertionError(f"{prompts[piece.prompt]!r}: {len(ours)} tokens, in llama.cpp {len(ids)}")
    return GreedyComparison(len(prompts), tokens, sorted(gaps))


def train_model(text: Path, out: Path, steps: int, **settings: Any) -> LanguageModel:
    """Trains a small model and loads it."""
    api.train(
        text, out=out, steps=steps, dtype="float32", sample_every=0, save_every=steps, device="cpu",
        **{"n_layer": 3, "n_head": 4, "n_embd": 128, "block_size": 128, "batch_tokens": 1024, **settings},
    )  # fmt: skip
    return api.load(out, device="cpu")


def export_model(model: LanguageModel, out: Path, **settings: Any) -> Path:
    """Exports a model unless ``out`` exists."""
    if not out.exists():
        api.export(model.path, out, device="cpu", **settings)
    return out


def their_loss(server: LlamaCpp, eval_windows: Sequence[Window]) -> float:
    """Returns llama.cpp's loss in nats per token."""
    losses = [
        -server.logprob(w.x[: i + 1].tolist(), int(w.y[i])) for w in eval_windows for i in range(w.skipped, len(w.y))
    ]
    return float(np.mean(losses))


def model_with_file_weights(path: Path, model: LanguageModel, kind: str) -> GPT:
    """Returns our decoder in float32 with weights rounded as in a .gguf file of type ``kind``."""
    source = open_source(path)
    stored = run.read_back(source, run.Target(Path("model.gguf"), "gguf", kind, ExportConfig()))
    return checkpoint.build(source.config, stored, model.compute.device, torch.float32)


def our_logprobs(model: LanguageModel, eval_windows: Iterable[Window], count: int) -> Float64Array:
    """Returns our log-probabilities (count, V) at the first ``count`` positions of the windows."""
    logprobs: list[Float64Array] = []
    for window in eval_windows:
        with torch.inference_mode():
            logits = model.model(torch.from_numpy(window.x)[None])
        logprobs.append(logits[0].double().log_softmax(-1).numpy())
        if sum(map(len, logprobs)) >= count:
            break
    return np.concatenate(logprobs)[:count]


def their_logprobs(server: LlamaCpp, eval_windows: Iterable[Window], count: int, vocab_size: int) -> Float64Array:
    """Returns llama.cpp's log-probabilities (count, V) at the positions of `our_logprobs`."""
    positions = ((window, i) for window in eval_windows for i in range(len(window.x)))
    return np.stack([server.logprobs(w.x[: i + 1].tolist(), vocab_size) for w, i in islice(positions, count)])


def ids_table(text: str, count: int, place: Path) -> Table:
    """Compares the token ids of random texts, by vocabulary."""
    texts, rows = random_texts(count), []
    for number, (name, tokenizer) in enumerate(vocabularies(text)):
        with LlamaCpp(write_untrained(place / f"{number}.gguf", tokenizer)) as server:
            different_texts = find_different_texts(tokenizer, server, texts)
        rows.append([name, f"{tokenizer.vocab_size:,}", f"{len(different_texts):,}"])
        print(name, *map(ascii, different_texts), sep="\n  ", flush=True)
    characters = sum(map(len, texts))
    caption = f"Token ids of {count:,} texts ({characters:,} characters), which include the names of special tokens:"
    return Table(["vocabulary", "ids", "texts with different ids"], rows, caption)


def greedy_table(models: dict[str, LanguageModel], text: str, count: int, place: Path) -> Table:
    """Compares greedy continuations."""
    rows = []
    for number, (name, model) in enumerate(models.items()):
        prompts = draw_prompts(model, text, count)
        with LlamaCpp(export_model(model, place / f"greedy{number}.gguf", dtype="f32")) as server:
            theirs = [server.continuation(prompt) for prompt in prompts]
        for kind, gelu_context in gelu_contexts(model):
            with gelu_context():
                comparison = compare_greedy(model, prompts, theirs)
            gaps = ", ".join(f"{gap:.5f}" for gap in comparison.gaps)
            rows.append([name, f"{comparison.tokens:,}", kind, str(len(comparison.gaps)), gaps])
    columns = ["model", "tokens compared", "GELU", "prompts that differ", "nats between our two most likely ids there"]
    caption = f"Greedy continuations of {count:,} prompts, {GREEDY} tokens each, f32 files, float32 KV cache:"
    return Table(columns, rows, caption)


def gelu_contexts(model: LanguageModel) -> list[tuple[str, Callable[[], Any]]]:
    """Returns contexts by name: exact GELU and llama.cpp's table, or an empty context if the model has no GELU."""
    if model.model.config.mlp != "gelu":
        return [("none", nullcontext)]
    return [("exact", nullcontext), ("llama.cpp's table", use_table_gelu)]


def loss_table(model: LanguageModel, eval_windows: list[Window], place: Path) -> Table:
    """Compares losses: of exported folders in `gpt`, and of .gguf files in `gpt` and in llama.cpp."""
    rows = []
    for dtype in ("float32", "int8", "int4"):
        folder = export_model(model, place / dtype, dtype=dtype)
        size = (folder / "model.safetensors").stat().st_size
        total, n = total_loss(api.load(folder, device="cpu").model, eval_windows, model.compute)
        rows.append([f"folder, {dtype}", f"{size:,}", f"{total / n:.4f}", ""])
    for kind in ("f32", "f16", "q8_0", "q4_0"):
        path = export_model(model, place / f"{kind}.gguf", dtype=kind)
        total, n = total_loss(model_with_file_weights(model.path, model, kind), eval_windows, model.compute)
        with LlamaCpp(path) as server:
            theirs = their_loss(server, eval_windows)
        rows.append([f".gguf, {kind}", f"{path.stat().st_size:,}", f"{total / n:.4f}", f"{theirs:.4f}"])
    count, length = sum(len(window.y) - window.skipped for window in eval_windows), len(eval_windows[0].x)
    caption = f"Loss over {count:,} tokens in windows of {length}, llama.cpp's maximum, in nats per token:"
    return Table(["export", "bytes", "in `gpt`", "in llama.cpp"], rows, caption)


def difference_table(models: dict[str, LanguageModel], text: str, count: int, place: Path) -> Table:
    """Compares the log-probabilities of all ids."""
    rows = []
    for number, (name, model) in enumerate(models.items()):
        path = export_model(model, place / f"difference{number}.gguf", dtype="f32")
        eval_windows = text_windows(model, text)
        for exact, attention in ((True, "float32"), (False, "float16 (default)")):
            with LlamaCpp(path, exact) as server:
                theirs = their_logprobs(server, eval_windows, count, model.model.config.vocab_size)
            for kind, gelu_context in gelu_contexts(model):
                with gelu_context():
                    differences = np.abs(theirs - our_logprobs(model, eval_windows, count))
                rows.append([name, attention, kind, f"{differences.mean():.1e}", f"{differences.max():.1e}"])
    caption = f"Log-probabilities of all ids at {count:,} positions, f32 files, difference from float32 here in nats:"
    return Table(["model", "llama.cpp's attention", "GELU", "mean", "largest"], rows, caption)


def text_windows(model: LanguageModel, text: str) -> list[Window]:
    """Returns windows as in `gpt eval`, but one token shorter than the context, since llama.cpp's server predicts
    nothing at the last position."""
    document = model.tokenizer.document(text).astype(np.int64)
    return list(windows(Encoded([document]), model.model.config.block_size - 1))


def main() -> None:
    """Measures and writes the section."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="a run or checkpoint; without it, one is trained")
    parser.add_argument("text", nargs="?", help="a file; without it, the Python reference")
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
            main_model = train_model(file, place / "main", 300, arch="gpt2", vocab_size=1024)
        models = {
            "trained vocabulary": main_model,
            "bytes": train_model(file, place / "bytes", 800, arch="gpt2", tokenizer="bytes"),
            "Qwen3's layout": train_model(file, place / "modern", 300, vocab_size=1024),
        }
        try:
            gpt2_tokenizer()
            models["GPT-2's vocabulary"] = train_model(
                file, place / "gpt2", 500, arch="gpt2", tokenizer="gpt2", n_embd=64, batch_tokens=256
            )
        except WorkError as error:
            print(f"Skipped GPT-2's vocabulary: {error}")
        loss_windows = text_windows(main_model, text)
        loss_windows = loss_windows[: -(-arguments.tokens // len(loss_windows[0].x))]
        compared_models = {each: models[each] for each in ("trained vocabulary", "Qwen3's layout")}
        tables = [
            ids_table(text, arguments.texts, place),
            greedy_table(models, text, arguments.prompts, place),
            loss_table(main_model, loss_windows, place),
            difference_table(compared_models, text, arguments.positions, place),
        ]
    notes = [
        f"llama.cpp runs on one thread; the main model has {count_parameters(main_model):,} parameters.",
        "llama.cpp has Unicode 15 and treats the 4,382 letters and digits of Unicode 16 as neither.",
        "llama.cpp's GELU on a CPU is a table in half precision; SwiGLU has no table.",
    ]
    command = "python -m benchmarks.llama_cpp" + (" MODEL TEXT" if arguments.model else "")
    section = measured("Exported files in llama.cpp", command, notes, tables, ["torch", "xllamacpp"])
    write_section("llama_cpp", section)


def count_parameters(model: LanguageModel) -> int:
    """Returns the number of a model's parameters."""
    return sum(parameter.numel() for parameter in model.model.parameters())


if __name__ == "__main__":
    main()
