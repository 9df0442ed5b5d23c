"""The model card of an exported folder: ``README.md`` for the Hub, without paths, users or hosts."""

import json
import shlex
from collections.abc import Callable

from gpt.exporting.provenance import HUB_NAME, Provenance
from gpt.exporting.source import SourceModel
from gpt.model.params import breakdown
from gpt.runs import hf
from gpt.system.words import counted

Quote = Callable[[str], str]  # Formats a name.
BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


def card(source: SourceModel, name: str, dtype: str, license: str | None = None) -> str:
    """Returns the card's text: YAML for the Hub, then Markdown."""
    command = "chat" if source.tokenizer.chat_template is not None else 'sample "Once upon"'
    parts = [
        _front_matter(source, license),
        f"# {name if HUB_NAME.fullmatch(name) else _code(name)}",
        _introduction(source, license),
        "## Model",
        _model(source, dtype),
        "## Training",
        _training(source, _code),
        *_held_out_loss(source, dtype),
        "## Use",
        f"```console\ngpt {command} -m {shlex.quote(_escape(name))}\n```",
        "## Limits",
        _LIMITS.format(context=source.config.block_size),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(source: SourceModel, license: str | None) -> str:
    base = source.provenance.base
    lines = [  # Values have a known form or are quoted as JSON, which is valid YAML.
        f"license: {license or 'unknown'}",
        f"library_name: {'transformers' if _loads_in_transformers(source) else 'gpt'}",
        "pipeline_tag: text-generation",
        *([f"base_model: {json.dumps(base.name)}"] if base and base.on_hub and HUB_NAME.fullmatch(base.name) else []),
        "tags:",
        "- gpt",
        *([f"- {source.config.layout}"] if _loads_in_transformers(source) else []),
    ]
    return "\n".join(["---", *lines, "---"])


def _loads_in_transformers(source: SourceModel) -> bool:
    return source.config.layout != hf.OWN_TYPE


def _introduction(source: SourceModel, license: str | None) -> str:
    sentences = [
        "A decoder that generates text token by token, made with the command-line program `gpt`.",
        *_origin(source.provenance, _code),
        *([] if license else ["Its authors have not stated a license."]),
    ]
    return " ".join(sentences)


def _origin(provenance: Provenance, quote: Quote, copied: str = "It is a copy of") -> list[str]:
    relation = "It is fine-tuned from" if provenance.texts is not None else copied
    base = provenance.base
    return [f"{relation} {quote(base.name)}{', which has a license of its own' * base.on_hub}."] if base else []


def _model(source: SourceModel, dtype: str) -> str:
    config, bits = source.config, source.provenance.bits
    kind = config.layout if _loads_in_transformers(source) else "gpt, which Transformers does not have"
    before = f", rounded before to {bits} bits" if bits < BITS[dtype] else ""
    size = f"{breakdown(config).trainable:,} parameters in {dtype}{before}"
    return f"Architecture {kind}; {size}; a context of {counted(config.block_size, 'token')}."


_UNKNOWN_TRAINING = "How it was trained, and on which data, is not recorded."


def _training(source: SourceModel, quote: Quote) -> str:
    """Returns how long the model was trained, and on which text."""
    saved, provenance = source.saved, source.provenance
    if provenance.texts is None:
        return _UNKNOWN_TRAINING
    tokens_seen = f", {saved['tokens_seen']:,} tokens in all" if saved.get("tokens_seen") else ""
    steps = f"{counted(saved['step'], 'step')}{tokens_seen}, " if "step" in saved else ""
    tokens = f"{provenance.tokens:,} tokens of text" if provenance.tokens else "text"
    size = f" ({provenance.bytes:,} bytes)" if provenance.bytes else ""
    names = ", ".join(map(quote, provenance.texts))
    return f"Trained for {steps}on {tokens}{size}{f': {names}' if names else ''}."


def _held_out_loss(source: SourceModel, dtype: str) -> list[str]:
    provenance = source.provenance
    loss = provenance.val_loss if provenance.val_loss is not None else source.saved.get("val_loss")
    if loss is None:
        return []
    bits = f", {provenance.bits_per_byte:.4f} bits per byte" if provenance.bits_per_byte is not None else ""
    scope = "" if provenance.val_loss is not None else " (parts of it, measured in training)"
    to = min(BITS.get(dtype, 8), provenance.bits)
    change = f", before its weights were rounded to {to} bits" if to < 32 else ""
    return [f"Loss on text that it was not trained on{scope}: {loss:.4f} nats per token{bits}{change}."]


def summary(source: SourceModel, dtype: str, license: str | None) -> list[str]:
    """Returns what is known about the model's training, losses and licenses: paragraphs of plain text."""
    return [
        *_origin(source.provenance, _escape, f"Converted to {dtype} from"),
        _training(source, _escape),
        *_held_out_loss(source, dtype),
        *([f"License: {license}."] if license else []),
    ]


_LIMITS = """\
The model predicts likely continuations of its last {context:,} tokens. Its output can be false, unsafe or unfit for a
purpose, and no figure above measures that. It reflects the language, topics and biases of its training text, and can
repeat parts of that text verbatim, including private information."""


def _escape(text: str) -> str:
    """Escapes control characters and lone surrogates."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _code(text: str) -> str:
    """Formats a text as inline code."""
    return f"`{_escape(text).replace('`', chr(39)) or ' '}`"
