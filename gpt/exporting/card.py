"""The model card of an exported folder: ``README.md``, as the hub reads it. It names no path, user or host."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpt.evaluate import Evaluation
from gpt.exporting.provenance import HUB_NAME, Text
from gpt.exporting.source import SourceModel
from gpt.model.params import breakdown
from gpt.runs import hf, quantized
from gpt.words import counted

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, **quantized.BITS}


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
        f"# {facts.name if HUB_NAME.fullmatch(facts.name) else _code(facts.name)}",
        _introduction(source, facts),
        "## Model",
        *_model(source, facts),
        "## Training",
        *_training(source),
        *_losses(source, facts),
        "## Use",
        *_use(source, facts),
        *_samples(facts),
        "## Limits",
        _LIMITS.format(context=source.config.block_size),
    ]
    return "\n\n".join(parts) + "\n"


def _front(source: SourceModel, facts: Facts) -> str:
    provenance = source.provenance
    # Everything here has a known form, or is quoted as in JSON, which YAML reads too.
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
    said = "A decoder that generates text token by token, made with the command-line program `gpt`."
    line = source.provenance.ancestors
    if line:
        how = "It is fine-tuned from" if source.provenance.texts is not None else "It is a copy of"
        said += f" {how} {', made from '.join(_code(each.name) for each in line)}."
    said += "" if facts.license else " Its authors have not stated a license."
    for each in line:
        if each.license:
            said += f" {_code(each.name)} is licensed under {_code(each.license)}, which covers only that model."
    return said


def _model(source: SourceModel, facts: Facts) -> Iterator[str]:
    config = source.config
    kind = config.layout if config.layout != hf.OWN_TYPE else "gpt, which Transformers does not have"
    rows = {
        "architecture": f"{kind}: {config.norm}, {config.mlp}, {config.positions} positions",
        "layers, heads, width": f"{config.n_layer}, {config.n_head} ({config.kv_heads} key/value), {config.n_embd:,}",
        "context": counted(config.block_size, "token"),
        "vocabulary": counted(config.vocab_size, "id"),
        "parameters": f"{breakdown(config).trainable:,}",
        "weights": facts.dtype,
    }
    if any(config.windows):
        rows["windows"] = f"{config.window:,} tokens in {sum(map(bool, config.windows))} of the layers"
    if source.provenance.bits < BITS[facts.dtype]:
        rows["quantized before"] = f"to {source.provenance.bits} bits: a wider dtype does not restore what was lost"
    yield _table(("", ""), *rows.items())


def _training(source: SourceModel) -> Iterator[str]:
    provenance, saved = source.provenance, source.saved
    if provenance.texts is None:
        yield "How it was trained, and on which data, is not recorded."
        return
    seen = f", {saved['tokens_seen']:,} tokens in all" if saved.get("tokens_seen") else ""
    steps = f"{counted(saved['step'], 'step')}{seen}, " if "step" in saved else ""
    where = f"{provenance.tokens:,} tokens of text" if provenance.tokens else "text"
    yield f"Trained for {steps}on {where}. The text, with the sha256 of each file:"
    rows = [
        (_code(text.name), f"{text.files:,}", f"{text.bytes:,}" if text.bytes else "", _code(text.sha256 or "unknown"))
        for text in provenance.texts
    ]
    yield _table(("text", "files", "bytes", "sha256"), *rows)
    if provenance.settings:
        settings = [
            (_code(name), f"{value:g}" if isinstance(value, float) else _code(str(value)))
            for name, value in provenance.settings.items()
        ]
        yield _table(("setting", "value"), *settings)


def _losses(source: SourceModel, facts: Facts) -> Iterator[str]:
    provenance, found = source.provenance, facts.comparison
    loss = provenance.val_loss if provenance.val_loss is not None else source.saved.get("val_loss")
    if loss is None and found is None:
        return
    yield "## Losses"
    if loss is not None:
        bits = f", {provenance.bits_per_byte:.4f} bits per byte" if provenance.bits_per_byte is not None else ""
        over = "all held-out text" if provenance.val_loss is not None else "windows of the held-out text, in training"
        exact = ", before its weights were quantized" if facts.dtype != "float32" or provenance.bits < 32 else ""
        yield f"On {over}: {loss:.4f} nats per token{bits}{exact}."
    if found is not None:
        checksum = f" (sha256 {_code(found.text.sha256)})" if found.text.sha256 else ""
        yield f"On {found.before.tokens:,} tokens of {_code(found.text.name)}{checksum}:"
        whens = (("before", found.before), (f"as published, in {facts.dtype}", found.after))
        rows = ((when, f"{each.loss:.4f}", f"{each.bits_per_byte:.4f}") for when, each in whens)
        yield _table(("", "nats per token", "bits per byte"), *rows)


def _use(source: SourceModel, facts: Facts) -> Iterator[str]:
    name, talks = _visible(facts.name), source.tokenizer.chat_template is not None
    how = "chat" if talks else 'sample "Once upon"'
    yield f"```console\ngpt {how} -m {shlex.quote(name)}\n```"
    if _in_transformers(source, facts):
        asked = 'tokenizer("Once upon", return_tensors="pt")'
        if talks:
            asked = (
                'tokenizer.apply_chat_template([{"role": "user", "content": "Hello!"}], add_generation_prompt=True,\n'
                '    return_dict=True, return_tensors="pt")'
            )
        yield _PYTHON.format(name=json.dumps(name), asked=asked)
    elif source.config.layout != hf.OWN_TYPE:
        yield "Transformers cannot load these weights; `gpt export` converts them to a float32 folder that it can."


_PYTHON = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({name})
tokenizer = AutoTokenizer.from_pretrained({name})
inputs = {asked}
print(tokenizer.decode(model.generate(inputs.input_ids, max_new_tokens=40, do_sample=True)[0]))
```"""


def _samples(facts: Facts) -> Iterator[str]:
    if facts.samples:
        yield "## Samples"
        yield "Sampled without a prompt, with the default settings of `gpt sample`, and not cherry-picked:"
    for number, sample in enumerate(facts.samples, 1):
        yield f"Sample {number}:"
        lines = sample.expandtabs(4).split("\n")
        yield "\n".join(f"    {_visible(line)}" for line in lines)  # nothing can end an indented block


_LIMITS = """\
The model continues a text with what is likely after its last {context:,} tokens. Nothing guarantees that what it
writes is true, safe or fit for a purpose, and no figure above measures it. It has the language, the topics and the
biases of the text it was trained on, and may repeat parts of that text verbatim, including private ones."""


def _table(*rows: Sequence[str]) -> str:
    """A table, the titles first."""
    titles, *lines = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([titles, "|" + "---|" * len(rows[0]), *lines])


def _visible(text: str) -> str:
    """A text whose control characters, and half characters, are written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _code(text: str) -> str:
    """A text as code, in which nothing is Markdown and nothing ends a cell of a table."""
    return f"`{_visible(text).replace('`', chr(39)).replace('|', chr(92) + '|') or ' '}`"
