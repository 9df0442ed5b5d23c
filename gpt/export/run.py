"""The work of ``gpt export``: a GGUF file, or a folder for publishing, whole or not at all."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from gpt.errors import UserError
from gpt.export import card, folder, gguf
from gpt.export.source import SourceModel
from gpt.export_config import ExportConfig
from gpt.files import check_new, disk_errors, side_by_side, whole_folder, write_file, write_pieces
from gpt.model.params import named_parameters
from gpt.model.quantize import Quantized
from gpt.runs import checkpoint, tensors
from gpt.runs import folder as run_folder

NEW = "give another place with -o"
Measure = Callable[[checkpoint.Parameters], float]  # the loss of a model with these weights, nats a token
OnBytes = Callable[[int, int], None]  # bytes of weights that have been read, and all of them


@dataclass(frozen=True)
class Exported:
    """What was written, and what was measured."""

    out: Path
    format: str  # "gguf" or "folder"
    type: str  # of the matrices
    arch: str  # as transformers and llama.cpp call it
    bytes: int
    tensors: int
    vocab_size: int
    loss_before: float | None  # nats a token, over --eval's text; None where there is none
    loss_after: float | None
    seconds: float


def export(
    source: SourceModel,
    out: Path,
    config: ExportConfig,
    measure: Measure | None = None,
    measured_on: str | None = None,
    sample: Callable[[], list[str]] = list,
    on_bytes: OnBytes = lambda done, total: None,
) -> Exported:
    """Writes ``source`` to ``out``: a GGUF file where it ends in .gguf, else a folder. Raises `UserError` for a model
    or type that cannot be exported, and where something of that name is there; `WorkError` for a full disk."""
    started = time.monotonic()
    is_file = out.suffix == ".gguf"
    if is_file and config.dtype is not None:
        raise UserError("--dtype is of folders", "a .gguf file takes --type")
    if not is_file and config.type is not None:
        raise UserError("--type is of .gguf files", "a folder takes --dtype, or give -o a name that ends in .gguf")
    kind = (config.type or "f16") if is_file else (config.dtype or "float32")
    check_new(out, NEW)
    if is_file:
        gguf.check(source, kind)
    rounded = _rounded(source, kind, is_file)
    losses = None if measure is None else (measure(source.weights), measure(rounded))
    shown = replace(source, weights=_watched(source, on_bytes))
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if is_file:
            count = gguf.write(out, shown, kind, out.stem)
        else:
            facts = card.Facts(kind, config.license, losses, measured_on, sample())
            count = _write_folder(out, shown, kind, facts)
        size = out.stat().st_size if is_file else sum(file.stat().st_size for file in out.iterdir())
    return Exported(
        out,
        "gguf" if is_file else "folder",
        kind,
        source.config.layout,
        size,
        count,
        source.tokenizer.vocab_size,
        None if losses is None else losses[0],
        None if losses is None else losses[1],
        time.monotonic() - started,
    )


def _write_folder(out: Path, source: SourceModel, kind: str, facts: card.Facts) -> int:
    """Writes a folder and returns the number of its tensors. The card has no checksum: it is there to be edited."""
    found = folder.files(source, kind, {})
    with whole_folder(out) as beside:

        def written(name: str) -> str:
            data = found[name]
            return write_pieces(beside / name, [data] if isinstance(data, bytes) else tensors.pieces(data))

        sums = side_by_side(written, sorted(found))
        run_folder.write_checksums(beside, sums)
        run_folder.read_back(beside, sums)
        write_file(beside / "README.md", card.card(source, facts).encode())
    return sum(len(data) for data in found.values() if not isinstance(data, bytes))


def _rounded(source: SourceModel, kind: str, is_file: bool) -> checkpoint.Parameters:
    """The weights as they will be written."""

    def get(name: str) -> Tensor | Quantized:
        value = source.weights[name]()
        if is_file:
            return gguf.restored(source.config, name, value, kind)
        return folder.restored(source.config, name, value, kind)

    return {name: partial(get, name) for name in source.weights}


def _watched(source: SourceModel, on_bytes: OnBytes) -> checkpoint.Parameters:
    """The weights, of which each tells when it is read."""
    sizes = {name: 4 * p.numel for name, p in named_parameters(source.config).items()}
    seen: set[str] = set()

    def get(name: str) -> Tensor | Quantized:
        value = source.weights[name]()
        seen.add(name)
        on_bytes(sum(sizes[each] for each in seen), sum(sizes.values()))
        return value

    return {name: partial(get, name) for name in source.weights}
