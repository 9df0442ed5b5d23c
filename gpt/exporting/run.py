"""The ``gpt export`` command: writes a GGUF file or a folder for publishing, atomically."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

from torch import Tensor

from gpt.errors import Interrupted, UserError, check_text
from gpt.export_config import ExportConfig, FileType, FolderDtype
from gpt.exporting import folder, gguf
from gpt.exporting.card import BITS, Comparison, Facts, card
from gpt.exporting.provenance import KEY
from gpt.exporting.source import SourceModel
from gpt.files import check_new, disk_errors
from gpt.interrupt import StopSignal
from gpt.model.params import named_parameters
from gpt.model.quantize import Quantized
from gpt.runs import folder as run_folder
from gpt.runs import gguf_model
from gpt.runs.checkpoint import Parameters

OnBytes = Callable[[int, int], None]  # Called with the bytes of weights read so far and the total.


@dataclass(frozen=True)
class Target:
    """The file or folder to write."""

    out: Path
    is_file: bool
    type: str  # Type of the matrices: a GGUF type or a dtype.
    license: str | None


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    out: Path
    format: str  # "gguf" or "folder".
    type: str  # Type of the matrices.
    arch: str  # Name in Transformers.
    bytes: int
    tensors: int
    vocab_size: int
    loss_before: float | None  # Nats per token on the text of --eval.
    loss_after: float | None
    seconds: float
    chat: bool  # Whether the model has a chat template.


def find_target(out: str, config: ExportConfig) -> Target:
    """Returns the target for -o and the settings. Raises `UserError` for contradictory settings or an existing path,
    `WorkError` if the path cannot be written."""
    if not out:
        raise UserError("-o is empty", "give the name of a new folder, or of a new .gguf file")
    check_text("the name of -o", out)
    path = Path(out)
    is_file = path.suffix.lower() == ".gguf"
    types = get_args(FileType if is_file else FolderDtype)
    if config.dtype is not None and config.dtype not in types:
        target = "a .gguf file" if is_file else "a folder"
        raise UserError(f"{target} cannot have the dtype {config.dtype}", f"use {', '.join(types)}")
    if is_file and config.samples:
        raise UserError("--samples go into the model card, and a .gguf file has none", "leave them out")
    check_new(path, "choose another path with -o")
    return Target(path, is_file, config.dtype or ("f16" if is_file else "float32"), config.license)


def check(source: SourceModel, target: Target) -> None:
    """Raises `UserError` for a model that the format doesn't support, or for a target inside the model's folder or with
    the name of a checkpoint in a run."""
    if target.is_file:
        gguf.check(source)
        gguf_model.import_gguf()
    out_path, home = target.out.resolve(), source.path.resolve()
    if home in out_path.parents:
        raise UserError(f"{target.out} is inside the model's own folder", "choose a path outside it with -o")
    if run_folder.is_step_name(out_path.name) and run_folder.is_run(out_path.parent):
        raise UserError(f"{target.out} would look like a checkpoint of that run", "choose another name with -o")


def read_back(source: SourceModel, target: Target) -> Parameters:
    """Returns the weights after a round trip through the target."""
    restore = gguf.restore_parameter if target.is_file else folder.restore_parameter

    def get(name: str) -> Tensor | Quantized:
        return restore(source.config, name, source.weights[name](), target.type)

    return {name: partial(get, name) for name in source.weights}


@contextlib.contextmanager
def write_atomically(target: Target) -> Iterator[None]:
    """Creates missing parent folders of the target, and removes them after an error. A signal raises `Interrupted`
    immediately. A full disk raises `WorkError`."""
    new_folders = [parent for parent in target.out.absolute().parents if not parent.exists()]
    with StopSignal(at_once=True), disk_errors(target.out):
        try:
            target.out.parent.mkdir(parents=True, exist_ok=True)
            yield
        except BaseException as error:
            for parent in new_folders:
                with contextlib.suppress(OSError):
                    parent.rmdir()
            if isinstance(error, Interrupted):
                outcome = f"{target.out} is complete" if target.out.exists() else "nothing was written"
                raise Interrupted(error.signum, f"interrupted: {outcome}") from None
            raise


def write(
    source: SourceModel, target: Target, comparison: Comparison | None, samples: Sequence[str], on_bytes: OnBytes
) -> tuple[int, int]:
    """Writes the target and returns the numbers of tensors and bytes. Raises OSError, and `UserError` for values that
    the type cannot represent."""
    sizes = {name: 4 * p.numel for name, p in named_parameters(source.config).items()}
    unread_sizes = dict(sizes)

    def read_counted(name: str) -> Tensor | Quantized:
        value = source.weights[name]()
        unread_sizes.pop(name, None)
        on_bytes(sum(sizes.values()) - sum(unread_sizes.values()), sum(sizes.values()))
        return value

    counted_source = replace(source, weights={name: partial(read_counted, name) for name in source.weights})
    if target.is_file:
        count = gguf.write(target.out, counted_source, target.type, target.out.stem, target.license)
        return count, target.out.stat().st_size
    provenance = replace(source.provenance, bits=min(BITS[target.type], source.provenance.bits))
    losses = comparison and {
        "text": asdict(comparison.text),
        "tokens": comparison.before.tokens,
        "loss_before": comparison.before.loss,
        "loss_after": comparison.after.loss,
    }
    meta = {**source.saved, KEY: asdict(provenance), "export": {"dtype": target.type, **(losses or {})}}
    facts = Facts(target.out.name, target.type, target.license, comparison, samples)
    count = folder.write(target.out, counted_source, target.type, meta, card(source, facts))
    return count, sum(file.stat().st_size for file in target.out.iterdir())
