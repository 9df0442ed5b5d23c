"""Exporting a model as a web page that runs it: one HTML file for any browser, without a server or a network.

The page is the playground of `gpt serve` with the model inside. Weights are a stream of bytes, in base64 in several
scripts. A JSON header follows them, because it has their checksum. Every tensor starts at a multiple of 16 bytes, and
is padded with zeros: the width C, the MLP's width and the width of each head become multiples of 16, so that the page's
kernels never see the end of a row.
"""

import base64
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from gpt.config.device import DTYPES
from gpt.config.export import ExportConfig, PageDtype
from gpt.config.model import GPTConfig
from gpt.corpus.shards import id_type
from gpt.corpus.token_folder import TokenFolder
from gpt.decoding.write import Sample
from gpt.exporting import page_tokenizer
from gpt.exporting.card import summary
from gpt.exporting.chat_pieces import find_pieces
from gpt.exporting.page_tokenizer import HINT
from gpt.exporting.source import SourceModel
from gpt.exporting.transformers_folder import round_values
from gpt.insight.copying import IDS_PER_PASS, MAX_IDS
from gpt.insight.openings import find_openings
from gpt.model.params import Parameter, breakdown, named_parameters
from gpt.model.positions import rotary_rates
from gpt.model.quantize import LEVELS, Blocks, to_tensor
from gpt.playground.page import MODEL, assemble
from gpt.runs import folder
from gpt.system.errors import NotANumber, UserError
from gpt.system.files import write_pieces
from gpt.system.words import counted
from gpt.tokenizers.tokenizer import Tokenizer

FORMAT = 1
# Maximum bytes of weights in the page's memory. WebAssembly addresses 4 GB, and phones have less.
MAX_MEMORY = 2**31
MAX_FLOAT16_PARAMETERS = 20_000_000  # Larger models are in int8 by default; float16 would take more than 53 MB.
_PIECE_BYTES = 12 * 2**20  # Bytes of weights per script: a multiple of 3 for base64.
_ALIGNMENT = 16
_KINDS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "i8"}
_DTYPES = {kind: dtype for dtype, kind in _KINDS.items()}
_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}
_ENGINE = ("local.js",)
_WORKER = ("sampler.js", "tokenizer.js", "decoder.js", "passages.js", "worker.js", "kernels.wasm")
_CHARSET = '<meta charset="utf-8">'
Array = np.ndarray[Any, Any]
Entry = tuple[str, int, int, int, int | None]  # Type, rows, columns, offset, offset of the scales.


def check(source: SourceModel, dtype: str) -> None:
    """Raises `UserError` for a model that a page cannot reproduce, or that is too large for a browser."""
    page_tokenizer.check(source.tokenizer)
    size = _Layout.of(source.config, dtype).memory
    if size > MAX_MEMORY:
        smaller = [each for each in get_args(PageDtype) if _Layout.of(source.config, each).memory <= MAX_MEMORY]
        raise UserError(
            f"the page would need {size / 2**30:,.1f} GB of memory, and browsers have about {MAX_MEMORY / 2**30:g}",
            f"use --dtype {smaller[0]}" if smaller else HINT,
        )


def default_dtype(config: GPTConfig) -> PageDtype:
    """Returns float16 for a small model, otherwise int8."""
    return "float16" if breakdown(config).trainable <= MAX_FLOAT16_PARAMETERS else "int8"


def describe_differences(tokenizer: Tokenizer) -> list[str]:
    """Describes differences of the page that don't prevent an export."""
    if tokenizer.chat_template is None or find_pieces(tokenizer) is not None:
        return []
    return ["the page has no chat: this chat template does more than put text around messages"]


def describe_text(tokens: TokenFolder) -> str:
    """Describes the training text in a page. Raises `UserError` if it is too long."""
    ids, width = len(tokens.stream("train")), id_type(tokens.tokenizer.vocab_size).itemsize
    if ids > MAX_IDS:
        raise UserError(f"the training text has {ids:,} tokens; a page can have {MAX_IDS:,}", "leave out --with-text")
    return f"the page contains the whole training text: {counted(ids, 'token')}, {ids * width * 4 / 3e6:,.2f} MB"


def _find_prompts(source: SourceModel, config: ExportConfig) -> list[str]:
    return find_openings(source.path, source.tokenizer, 3 if config.prompts is None else config.prompts)


def choose_opening(source: SourceModel, config: ExportConfig) -> str | None:
    """Returns the beginning of the text that a page opens with. Returns None for a chat, for a page without prompts,
    and for a run without training text: it may never have seen a text begin."""
    if config.prompts == 0 or find_pieces(source.tokenizer) is not None:
        return None
    return next(iter(_find_prompts(source, config)), None if folder.is_run(source.path.parent) else "")


def _describe_written(prompt: str, sample: Sample, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a text as the page generates it: tokens with their alternatives, without an end-of-text."""

    def entry(id: int, logprob: float | None) -> dict[str, Any]:
        return {"id": id, "bytes": list(tokenizer.decode_bytes([id])), "logprob": round(logprob or 0.0, 4)}

    tokens = (sample.logprobs or [])[: len(sample.tokens)]
    return {
        "prompt": prompt,
        "ids": tokenizer.prompt(prompt),
        "tokens": [{**entry(token.id, token.logprob), "top": [entry(*each) for each in token.top]} for token in tokens],
    }


def describe(
    source: SourceModel, dtype: str, config: ExportConfig, name: str, written: Sample | None = None
) -> dict[str, Any]:
    """Returns the texts of the header. ``name`` is the title if ``config`` has none. ``written`` continues the
    opening."""
    prompts = _find_prompts(source, config)
    return {
        "name": config.title or name,
        "facts": [
            counted(breakdown(source.config).trainable, "parameter"),
            f"context of {counted(source.config.block_size, 'token')}",
            dtype,
        ],
        "about": [*([config.about] if config.about else []), *summary(source, dtype, config.license)],
        "prompts": prompts,
        "written": written and _describe_written(next(iter(prompts), ""), written, source.tokenizer),
        "chat": find_pieces(source.tokenizer),
    }


def write(
    path: Path, source: SourceModel, dtype: str, description: Mapping[str, Any], tokens: TokenFolder | None = None
) -> int:
    """Writes a page atomically, with matrices in ``dtype``, and with the training text in ``tokens``. Returns the
    number of tensors. ``description`` is the result of `describe`. Raises OSError, for example if ``path`` exists, and
    `UserError` for values that ``dtype`` cannot represent."""
    layout = _Layout.of(source.config, dtype)
    training, training_data = (None, b"") if tokens is None else _pack_text(tokens)
    before, _, after = _assemble_page(description["name"]).partition(MODEL)
    tag = (
        f'<script type="application/octet-stream" data-of="{-(-layout.size // _PIECE_BYTES)}" class="weights">'.encode()
    )

    def pieces() -> Iterator[bytes]:
        checksum = zlib.adler32(b"")
        yield before.encode()
        for piece in _cut(_stream(source, layout)):
            checksum = zlib.adler32(piece, checksum)
            yield tag
            yield base64.b64encode(piece)
            yield b"</script>\n"
        if training is not None:
            yield b'<script type="application/octet-stream" class="text">'
            yield base64.b64encode(training_data)
            yield b"</script>\n"
        header = {
            "format": FORMAT,
            "bytes": layout.size,
            "sum": checksum,
            "dtype": dtype,
            "shape": _shape(source.config),
            "halves": layout.halves,
            "tensors": layout.tensors,
            "tokenizer": page_tokenizer.describe(source.tokenizer),
            "settings": source.sampling.settings,
            "text": training,
            **description,
        }
        text = _to_script(header)
        yield f'<script type="application/json" id="model-header" data-sum="{zlib.adler32(text)}">'.encode()
        yield text
        yield b"</script>\n"
        yield after.encode()

    write_pieces(path, pieces(), new=True)
    return len(layout.tensors)


def restore_parameter(config: GPTConfig, name: str, value: Tensor | Blocks, dtype: str) -> Tensor:
    """Returns a parameter after a round trip through a page with matrices in ``dtype``."""
    parameter = named_parameters(config)[name]
    kind = _kind(parameter, dtype)
    if kind == "i8":
        levels, scales = _round_rows(value)
        return levels.float().mul_(scales[:, None])
    return to_tensor(value).to(DTYPES[_DTYPES[kind]]).float()


def _assemble_page(title: str) -> str:
    """Returns the playground with its Content-Security-Policy, and the marker `MODEL` for the model."""
    text, policy = assemble(_ENGINE, worker=_WORKER, title=title)
    return text.replace(_CHARSET, f'{_CHARSET}\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)


def _to_script(values: Mapping[str, Any]) -> bytes:
    """Returns JSON for an HTML script, where ``<`` could end the script."""
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").encode()


def _pack_text(tokens: TokenFolder) -> tuple[dict[str, Any], bytes]:
    """Returns the header of a training text and its bytes: ids, zeros up to 4 bytes, starts of documents, the end."""
    stream, dtype = tokens.stream("train"), id_type(tokens.tokenizer.vocab_size)
    parts = ((at, min(IDS_PER_PASS, len(stream) - at)) for at in range(0, len(stream), IDS_PER_PASS))
    data = b"".join(stream.take(*part).astype(dtype).tobytes() for part in parts)
    data += bytes(-len(data) % 4) + stream.offsets.astype("<u4").tobytes()
    values = {"ids": len(stream), "width": dtype.itemsize, "opening": len(tokens.tokenizer.opening)}
    return {**values, "sum": zlib.adler32(data)}, data


def _shape(config: GPTConfig) -> dict[str, Any]:
    """Returns the model's shape. ``Cp``, ``Dp`` and ``Ip`` are the padded widths."""
    widths = {"C": config.n_embd, "D": config.head_size, "I": config.mlp_width}
    return {
        "V": config.vocab_size,
        "T": config.block_size,
        "L": config.n_layer,
        "H": config.n_head,
        "K": config.kv_heads,
        **widths,
        **{f"{name}p": _pad_width(width) for name, width in widths.items()},
        "norm": config.norm,
        "eps": config.layer_norm_epsilon,
        "gated": config.mlp == "swiglu",
        "positions": config.positions,
        "qk": config.qk_norm,
        "windows": [window or 0 for window in config.windows],
        "rates": rotary_rates(config).tolist() if config.positions == "rotary" else [],
    }


def _pad_width(width: int) -> int:
    return width + -width % _ALIGNMENT


@dataclass(frozen=True)
class _Layout:
    """Where each tensor is in the stream of weights."""

    tensors: dict[str, Entry]
    size: int  # Bytes of the stream.
    halves: int  # Bytes in float16, at the start of the stream. The page expands them to float32.

    @property
    def memory(self) -> int:
        """Bytes of all weights in the page's memory."""
        return self.size + self.halves

    @classmethod
    def of(cls, config: GPTConfig, dtype: str) -> "_Layout":
        """Returns the layout of a model with matrices in ``dtype``: float16 tensors, then others, in model order."""
        table = named_parameters(config)
        tensors: dict[str, Entry] = {}
        end = halves = 0
        for name in sorted(table, key=lambda name: _kind(table[name], dtype) != "f16"):
            kind = _kind(table[name], dtype)
            shape = [
                n if not width else n // width * _pad_width(width)
                for n, width in zip(table[name].shape, _unit_widths(config, name), strict=False)
            ]
            rows, columns = [1, *shape][-2:]
            offset, end = end, _pad_width(end + _ITEM_BYTES[kind] * rows * columns)
            scales_offset = end if kind == "i8" else None
            if kind == "i8":
                end = _pad_width(end + 4 * rows)
            halves = end if kind == "f16" else halves
            tensors[name] = (kind, rows, columns, offset, scales_offset)
        return cls(tensors, end, halves)


def _kind(parameter: Parameter, dtype: str) -> str:
    """Returns a parameter's type in a page with matrices in ``dtype``."""
    is_float32 = parameter.kind in ("bias", "norm") or (parameter.kind == "positions" and dtype != "float16")
    return "f32" if is_float32 else _KINDS[dtype]


def _unit_widths(config: GPTConfig, name: str) -> tuple[int, int]:
    """Returns the width of the units that are padded in a parameter's rows and columns: a head, the MLP's width, or the
    width C. A width of 0 means no padding. A vector counts as rows."""
    C, D, width = config.n_embd, config.head_size, config.mlp_width
    rows = {"attn.c_attn": D, "attn.q_norm": D, "attn.k_norm": D, "mlp.c_fc": width, "ln_1": C, "ln_2": C, "ln_f": C}
    columns = {"attn.c_proj": D, "mlp.c_proj": width}
    module = re.sub(r"^h\.\d+\.", "", name).rpartition(".")[0]
    return rows.get(module, 0), columns.get(module, C)


def _pad(array: Array, unit_widths: tuple[int, int]) -> Array:
    """Pads each unit of each axis with zeros."""
    for axis, width in enumerate(unit_widths[: array.ndim]):
        extra = -width % _ALIGNMENT
        if extra:
            before, after = array.shape[:axis], array.shape[axis + 1 :]
            units = array.reshape(*before, -1, width, *after)
            zeros = [(0, 0)] * units.ndim
            zeros[axis + 1] = (0, extra)
            array = np.pad(units, zeros).reshape(*before, -1, *after)
    return array


def _stream(source: SourceModel, layout: _Layout) -> Iterator[Array]:
    """Yields the stream's arrays. Reads one parameter at a time."""
    table = named_parameters(source.config)
    for name, (kind, *_) in layout.tensors.items():
        unit_widths = _unit_widths(source.config, name)
        for array in _encode(name, table[name], source.weights[name](), kind):
            padded = np.ascontiguousarray(_pad(array, unit_widths)).reshape(-1).view(np.uint8)
            yield padded
            yield np.zeros(-len(padded) % _ALIGNMENT, np.uint8)


def _encode(name: str, parameter: Parameter, value: Tensor | Blocks, kind: str) -> list[Array]:
    """Returns a parameter's values, or its levels and scales. Raises `UserError` for values out of range."""
    if kind == "i8":
        return [tensor.numpy() for tensor in _round_rows(value)]
    return [round_values(name, value, _DTYPES[kind])]


def _round_rows(value: Tensor | Blocks) -> tuple[Tensor, Tensor]:
    """Returns int8 levels, and the scale of each row, whose largest element becomes ±127. Raises `NotANumber`."""
    rows = to_tensor(value).float()
    scales = rows.abs().amax(1) / LEVELS
    if not scales.isfinite().all():
        raise NotANumber("weights cannot be quantized: some are NaN or infinite")
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 1.0, scales)
    return (rows / scales[:, None]).round_().to(torch.int8), scales


def _cut(arrays: Iterable[Array]) -> Iterator[bytearray]:
    """Cuts a stream of bytes into pieces of `_PIECE_BYTES`."""
    piece = bytearray()
    for array in arrays:
        for start in range(0, len(array), _PIECE_BYTES):
            piece += array[start : start + _PIECE_BYTES].data
            if len(piece) >= _PIECE_BYTES:
                yield piece[:_PIECE_BYTES]
                del piece[:_PIECE_BYTES]
    if piece:
        yield piece
