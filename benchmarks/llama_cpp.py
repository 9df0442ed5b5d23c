"""Compares exported .gguf files in llama.cpp with ours: token ids, greedy texts, losses and log-probabilities.

    python -m benchmarks.llama_cpp [MODEL TEXT] [--texts N] [--prompts N] [--tokens N]

Without MODEL it trains one on TEXT, which is the Python reference where none is given. Further small models are trained
for further vocabularies and layouts. Takes some minutes and the extra `interop`; GPT-2's vocabulary is left out where it
is not in the cache.
"""

import argparse
import http.client
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.results import ROOT, machine, write_section
from gpt import api
from gpt.api import LanguageModel
from gpt.config import GPTConfig
from gpt.errors import WorkError
from gpt.evaluate import Encoded, total_loss, windows
from gpt.exporting import gguf, gguf_tokenizer
from gpt.exporting.source import SourceModel
from gpt.model import decoder
from gpt.model.decoder import GPT
from gpt.sample_config import SampleConfig
from gpt.text.backends import ByteBPE
from gpt.text.boundaries import DIGITS_PATTERN, GPT2_PATTERN, LLAMA3_PATTERN, MINBPE_PATTERN
from gpt.text.tokenizer import Tokenizer, bytes_tokenizer, gpt2_tokenizer

TIE = 1e-3  # nats between the two likeliest ids, below which either may come first
GREEDY = 64  # tokens of a continuation


class LlamaCpp:
    """llama.cpp's server with the model of a .gguf file, on one thread with a cache in float32. It runs in a process of
    its own, since a bad file would end this one, until the context ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> "LlamaCpp":
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        words = [sys.executable, "-m", "benchmarks.llama_cpp", "--serve", str(self.path.absolute())]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=self.errors, text=True)
        assert self.process.stdout is not None
        address = self.process.stdout.readline().strip()
        if not address:
            self.__exit__()
            raise RuntimeError(f"llama.cpp does not read {self.path}: {self.said}")
        self.connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
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

    def continuation(self, prompt: str, count: int = GREEDY) -> tuple[list[int], str]:
        """Returns the likeliest ids after a prompt, one after the other, and ``limit`` or ``eos`` as their end."""
        found = self.post(
            "/completion", prompt=prompt, n_predict=count, temperature=0, samplers=["temperature"], return_tokens=True
        )
        return found["tokens"], found["stop_type"]

    def logprob(self, ids: Sequence[int], following: int) -> float:
        """Returns the log-probability of an id after others: the id is forced, which the logits told do not know."""
        found = self._probabilities(ids, 1, [[following, 1e9]])
        assert found["id"] == following
        return float(found["logprob"])

    def logprobs(self, ids: Sequence[int], vocab_size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Returns the log-probabilities (V) of all ids after others."""
        found = np.full(vocab_size, np.nan)
        for each in self._probabilities(ids, vocab_size, [])["top_logprobs"]:
            found[each["id"]] = each["logprob"]
        return found

    def _probabilities(self, ids: Sequence[int], count: int, bias: list[list[float]]) -> dict[str, Any]:
        found = self.post(
            "/completion", prompt=list(ids), n_predict=1, n_probs=count, temperature=0, samplers=["temperature"],
            cache_prompt=True, logit_bias=bias,
        )  # fmt: skip
        return dict(found["completion_probabilities"][0])


def serve(path: str) -> None:
    """Serves a file until standard input ends, and says where."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_gpu_layers, params.n_parallel, params.verbosity = 0, 1, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.warmup = params.fit_params = params.ui = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    del server


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


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
