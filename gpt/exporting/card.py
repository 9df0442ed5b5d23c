"""The model card of an exported folder: ``README.md``, as the hub reads it. It names no path, user or host."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpt.errors import UserError
from gpt.evaluate import Evaluation
from gpt.exporting import gguf
from gpt.exporting.provenance import HUB_NAME, Text
from gpt.exporting.source import SourceModel
from gpt.model.params import breakdown
from gpt.runs import hf, quantized
from gpt.words import counted

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, **quantized.BITS}
_STORED = {
    "int8": "matrices and embeddings in int8 with a scale for each row; the rest in float32",
    "int4": "the blocks' matrices in int4 with a scale for each 32 numbers, embeddings in int8 with one for each row; "
    "the rest in float32",
}
_WORDS = {
    "layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "gelu": "GELU", "swiglu": "SwiGLU", "learned": "learned positions",
    "sinusoidal": "sine/cosine positions", "rotary": "rotary positions",
}  # fmt: skip
_LICENSE_OF_BASE = "that is the base's license, and says nothing of this model's"


@dataclass(frozen=True)
class Comparison:
    """The loss on a text before and after the weights were rounded."""

    text: Text
    before: Evaluation
    after: Evaluation


@dataclass(frozen=True)
class Facts:
    """The content of a card beside the checkpoint's own."""

    name: str
    dtype: str
    license: str | None = None
    comparison: Comparison | None = None
    samples: Sequence[str] = ()


def card(source: SourceModel, facts: Facts) -> str:
    """The card's text: the hub's YAML, then Markdown."""
    parts = [
        _front(source, facts),
        f"# {_plain(facts.name)}",
        _introduction(source, facts),
        "## Model",
        _table([("", ""), *_model(source, facts)]),
        "## Training",
        *_training(source),
        *_losses(source, facts),
        "## Use",
        *_use(source, facts),
        *_samples(facts),
        "## Limits",
        _LIMITS.format(context=source.config.block_size),
    ]
    return _visible("\n\n".join(parts) + "\n", "\n\t")  # some words are from a downloaded run.json


def _front(source: SourceModel, facts: Facts) -> str:
    provenance = source.provenance
    # Everything here is of a known form, or in JSON's quotes, which are YAML's too.
    named = [each.name for each in provenance.ancestors if each.on_hub and HUB_NAME.fullmatch(each.name)]
    datasets = sorted({text.dataset for text in provenance.texts or [] if text.dataset})
    lines = [
        f"license: {facts.license or 'unknown'}",
        f"library_name: {'transformers' if _in_transformers(source, facts) else 'gpt'}",
        "pipeline_tag: text-generation",
        *([f"base_model: {json.dumps(named[0])}"] if named else []),
        *(["datasets:", *(f"- {json.dumps(name)}" for name in datasets)] if datasets else []),
        "tags:",
        "- gpt",
        *([f"- {source.config.layout}"] if source.config.layout != hf.OWN_TYPE else []),
        *([f"- {facts.dtype}"] if facts.dtype in quantized.BITS else []),
    ]
    return "\n".join(["---", *lines, "---"])


def _in_transformers(source: SourceModel, facts: Facts) -> bool:
    return source.config.layout != hf.OWN_TYPE and facts.dtype not in quantized.BITS


def _introduction(source: SourceModel, facts: Facts) -> str:
    said = "A decoder that writes text on, token by token, made with the command line program `gpt`."
    line = source.provenance.ancestors
    if line:
        how = "It is fine-tuned from" if source.provenance.texts is not None else "It is a copy of"
        said += f" {how} {', made from '.join(_code(each.name) for each in line)}."
    said += "" if facts.license else " Its makers have not said under which license it may be used."
    for each in (each for each in line if each.license):
        said += f" The card of {_code(each.name)} gives the license {_code(each.license or '')}: {_LICENSE_OF_BASE}."
    return said


def _model(source: SourceModel, facts: Facts) -> Iterator[tuple[str, str]]:
    config, bits = source.config, BITS[facts.dtype]
    kind = f"`{config.layout}`" if config.layout != hf.OWN_TYPE else "of its own, which transformers does not have"
    parts = [_WORDS[part] for part in (config.norm, config.mlp, config.positions)]
    heads = f"{config.n_head}" + (f", {config.kv_heads} of keys and values" if config.kv_heads != config.n_head else "")
    yield "architecture", f"{kind}: {', '.join(parts)}"
    yield "layers", f"{config.n_layer}"
    yield "heads", heads
    yield "width", f"{config.n_embd:,}"
    yield "context", f"{config.block_size:,} tokens"
    if any(config.windows):
        yield "windows", f"{config.window:,} tokens in {sum(map(bool, config.windows))} of the layers"
    yield "vocabulary", f"{config.vocab_size:,} ids"
    yield "parameters", f"{breakdown(config).trainable:,}"
    yield "weights", f"{facts.dtype}" + (f": {_STORED[facts.dtype]}" if facts.dtype in _STORED else "")
    if source.provenance.bits < bits:
        yield (
            "rounded before",
            f"to {source.provenance.bits} bits: a wider dtype does not bring back what was lost then",
        )


def _training(source: SourceModel) -> Iterator[str]:
    provenance, saved = source.provenance, source.saved
    if provenance.texts is None:
        yield "How it was trained, and on which data, was not recorded where this folder was made."
        return
    seen = f", {saved['tokens_seen']:,} tokens in all" if saved.get("tokens_seen") else ""
    steps = f"{counted(saved['step'], 'step')}{seen}, " if "step" in saved else ""
    where = f"{provenance.tokens:,} tokens of text" if provenance.tokens else "text"
    yield f"Trained for {steps}on {where}. The text, by name and checksum:"
    rows = [_text_row(text) for text in provenance.texts]
    yield _table([("text", "files", "bytes", "sha256"), *rows])
    if any(text.files > 1 for text in provenance.texts):
        yield (
            "A sha256 is that of the text in UTF-8; of several files it is that of their lines `SHA256  NAME`, with "
            "two spaces between and a newline at the end of each."
        )
    settings = [(_plain(name.replace("_", " ")), _setting(value)) for name, value in provenance.settings.items()]
    if settings:
        yield _table([("setting", "value"), *settings])


def _text_row(text: Text) -> tuple[str, ...]:
    size = "" if text.bytes is None else f"{text.bytes:,}"
    return _code(text.name), f"{text.files:,}", size, _code(text.sha256) if text.sha256 else "unknown"


def _setting(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else f"{value}" if isinstance(value, int) else _code(str(value))


def _losses(source: SourceModel, facts: Facts) -> Iterator[str]:
    provenance, found = source.provenance, facts.comparison
    loss = provenance.val_loss if provenance.val_loss is not None else source.saved.get("val_loss")
    if loss is None and found is None:
        return
    yield "## Losses"
    if loss is not None:
        bits = f", {provenance.bits_per_byte:.4f} bits per byte" if provenance.bits_per_byte is not None else ""
        over = "all held-out text" if provenance.val_loss is not None else "windows of the held-out text, in training"
        exact = ", before its weights were rounded" if facts.dtype != "float32" or provenance.bits < 32 else ""
        yield f"On {over}: {loss:.4f} nats per token{bits}{exact}."
    if found is not None:
        text, rows = found.text, [("", "nats per token", "bits per byte")]
        for when, each in (("before", found.before), (f"as it is here, in {facts.dtype}", found.after)):
            rows.append((when, f"{each.loss:.4f}", f"{each.bits_per_byte:.4f}"))
        sum = f" (sha256 {_code(text.sha256)})" if text.sha256 else ""
        yield f"On {found.before.tokens:,} tokens of {_code(text.name)}{sum}:"
        yield _table(rows)


_ASKED = (
    'messages = [{"role": "user", "content": "Hello!"}]',
    "ids = tokenizer.apply_chat_template(",
    '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
    ").input_ids",
)


def _use(source: SourceModel, facts: Facts) -> Iterator[str]:
    name = _visible(facts.name)
    yield "With `gpt`:"
    talks = source.tokenizer.chat_template is not None
    how = "-i" if talks else '"Once upon"'
    yield _fenced(f"gpt sample {how} -m {shlex.quote(name)}", "console")
    if _in_transformers(source, facts):
        yield "With transformers:"
        lines = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({json.dumps(name)})",
            f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)})",
            *(_ASKED if talks else ['ids = tokenizer("Once upon", return_tensors="pt").input_ids']),
            "print(tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=True)[0]))",
        )
        yield _fenced("\n".join(lines), "python")
    elif source.config.layout != hf.OWN_TYPE:
        yield "transformers does not read these weights: `gpt export` makes a folder in float32 of them that it reads."
    try:
        gguf.check(source)
    except UserError:
        return
    yield "With llama.cpp, ollama or LM Studio, as a GGUF file:"
    yield _fenced(f"gpt export {shlex.quote(name)} -o model.gguf", "console")


def _samples(facts: Facts) -> Iterator[str]:
    if facts.samples:
        yield "## Samples"
        yield "Drawn with the default settings of `gpt sample` from no prompt, and not chosen among others:"
        yield from (_fenced(_visible(sample, "\n\t"), "text") for sample in facts.samples)


_LIMITS = """\
The model continues a text with what is likely after it, given its last {context:,} tokens. Nothing here checks that
what it writes is true, safe or fit for a purpose, and no figure above says so. It knows the language, the subjects and
the prejudices of the text that it was trained on, and may repeat parts of that text word for word, private ones too."""


def _table(rows: Sequence[Sequence[str]]) -> str:
    """A table, the titles first."""
    lines = ["| " + " | ".join(each.replace("|", "\\|") for each in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _visible(text: str, kept: str = "") -> str:
    """A text whose control characters, and half characters, are written as escapes."""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def _plain(text: str) -> str:
    """A text in which nothing is Markdown."""
    return re.sub(r"([\\`*<>\[\]#|&!])", r"\\\1", _visible(text))


def _code(text: str) -> str:
    """A text between more backticks than it has in a row."""
    shown, fence = _visible(text), "`" * (_longest_run(text) + 1)
    space = " " if shown.startswith("`") or shown.endswith("`") or not shown.strip() else ""
    return f"{fence}{space}{shown}{space}{fence}"


def _fenced(text: str, language: str) -> str:
    """A block that nothing in the text can end."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
