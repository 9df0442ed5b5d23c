"""The ``gpt export`` command: writes a GGUF file, a web page or a folder for publishing, atomically."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from gpt.config.export import PAGE_OPTIONS, ExportConfig, FileType, FolderDtype, PageDtype
from gpt.config.sample import SampleConfig
from gpt.decoding.write import Sample
from gpt.exporting import gguf, gguf_tokenizer, html
from gpt.exporting import transformers_folder as folder
from gpt.exporting.card import BITS, card
from gpt.exporting.provenance import KEY
from gpt.exporting.source import SourceModel
from gpt.insight.report import find_training_tokens
from gpt.model.params import breakdown, named_parameters
from gpt.model.quantize import Blocks
from gpt.runs import folder as run_folder
from gpt.runs import gguf_model
from gpt.runs.checkpoint import Parameters
from gpt.system.errors import Interrupted, UserError, check_text
from gpt.system.files import check_new, disk_errors
from gpt.system.interrupt import StopSignal

OnWritten = Callable[[int, int], None]  # Called with the number of parameters written so far and the total.
Format = Literal["gguf", "html", "folder"]
_SUFFIXES: dict[str, Format] = {".gguf": "gguf", ".html": "html"}
_NAMES = {"gguf": "a .gguf file", "html": "a page", "folder": "a folder"}
_FILE_TYPES = {"float32": "f32", "float16": "f16", "int8": "q8_0", "int4": "q4_0"}
_TYPES = {  # Types by the value of --dtype.
    "gguf": _FILE_TYPES | {name: name for name in get_args(FileType)},
    "html": {name: name for name in get_args(PageDtype)},
    "folder": {name: name for name in get_args(FolderDtype)},
}
_WRITTEN_TOKENS, _ALTERNATIVES = 80, 10  # Tokens of the text that a page opens with, and alternatives to each.
_DEFAULT_TYPES = {"gguf": "f16", "folder": "float32"}


@dataclass(frozen=True)
class Target:
    """The file or folder to write."""

    out: Path
    format: Format
    type: str  # Type of the matrices: a GGUF type or a dtype. Empty if it depends on the model's size.
    config: ExportConfig


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    out: Path
    format: Format
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
        raise UserError("-o is empty", "give the name of a new folder, or of a new .gguf or .html file")
    check_text("the name of -o", out)
    path = Path(out)
    format = _SUFFIXES.get(path.suffix.lower(), "folder")
    types = _TYPES[format]
    if config.dtype is not None and config.dtype not in types:
        way = "use -o NAME.gguf" if config.dtype in _TYPES["gguf"] else f"use {', '.join(types)}"
        raise UserError(f"{_NAMES[format]} cannot have the dtype {config.dtype}", way)
    given = [name for name in PAGE_OPTIONS if getattr(config, name) is not None and getattr(config, name) is not False]
    if format != "html" and given:
        flag = f"--{given[0].replace('_', '-')}"
        raise UserError(f"{flag} is only for a page, and {out} is {_NAMES[format]}", "use -o NAME.html")
    check_new(path, "choose another path with -o")
    type = types[config.dtype] if config.dtype else _DEFAULT_TYPES.get(format, "")
    return Target(path, format, type, config)


def check(source: SourceModel, target: Target) -> Target:
    """Returns the target with its type. Raises `UserError` for a model that the format doesn't support, or for a target
    inside the model's folder or with the name of a checkpoint in a run."""
    if target.format == "gguf":
        gguf.check(source)
        gguf_model.import_gguf()
    if target.format == "html":
        target = replace(target, type=target.type or html.default_dtype(source.config))
        html.check(source, target.type)
    out_path, home = target.out.resolve(), source.path.resolve()
    if home in out_path.parents:
        raise UserError(f"{target.out} is inside the model's own folder", "choose a path outside it with -o")
    if run_folder.is_step_name(out_path.name) and run_folder.is_run(out_path.parent):
        raise UserError(f"{target.out} would look like a checkpoint of that run", "choose another name with -o")
    return target


def describe_differences(source: SourceModel, target: Target) -> list[str]:
    """Describes differences of the target from the model that don't prevent an export, and the training text in it.
    Raises `UserError` if that is not there."""
    if target.format == "gguf":
        lost = ["a GGUF file has no key for no-repeat-ngram"] * ("no_repeat_ngram" in source.sampling.settings)
        return gguf_tokenizer.describe_differences(source.tokenizer) + lost
    lines = html.describe_differences(source.tokenizer) if target.format == "html" else []
    if target.format == "html" and html.choose_opening(source, target.config):
        lines.append("the page quotes the beginnings of a few lines of the training text: --prompts 0 leaves them out")
    if target.config.with_text:
        lines.append(html.describe_text(find_training_tokens(source.path, source.tokenizer)))
    return lines


def read_back(source: SourceModel, target: Target) -> Parameters:
    """Returns the weights after a round trip through the target."""
    restore = {"gguf": gguf, "html": html, "folder": folder}[target.format].restore_parameter

    def get(name: str) -> Tensor:
        value: Tensor = restore(source.config, name, source.weights[name](), target.type)
        return value

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


def plan_opening(source: SourceModel, target: Target, memory: int) -> tuple[str, SampleConfig] | None:
    """Returns the prompt and settings of the text that a page opens with. It has none if the model takes more than half
    of ``memory`` in bytes."""
    opening = html.choose_opening(source, target.config) if target.format == "html" else None
    if opening is None or 8 * breakdown(source.config).trainable > memory:
        return None
    room = source.config.block_size - len(source.tokenizer.prompt(opening))
    config = SampleConfig(max_tokens=max(1, min(_WRITTEN_TOKENS, room)), logprobs=_ALTERNATIVES)
    return opening, source.sampling.apply(config, ("max_tokens",))


def write(source: SourceModel, target: Target, opening: Sample | None, on_written: OnWritten) -> tuple[int, int]:
    """Writes the target, a page with the text ``opening``, and returns the numbers of tensors and bytes. Raises
    OSError, and `UserError` for values that the type cannot represent."""
    unread = {name: p.numel for name, p in named_parameters(source.config).items()}
    total = sum(unread.values())

    def read_counted(name: str) -> Tensor | Blocks:
        on_written(total - sum(unread.values()), total)  # The parameters before this one.
        unread.pop(name, None)
        return source.weights[name]()

    counted_source = replace(source, weights={name: partial(read_counted, name) for name in source.weights})
    if target.format == "gguf":
        count = gguf.write(target.out, counted_source, target.type, target.out.stem, target.config.license)
    elif target.format == "html":
        texts = html.describe(source, target.type, target.config, target.out.stem, opening)
        tokens = find_training_tokens(source.path, source.tokenizer) if target.config.with_text else None
        count = html.write(target.out, counted_source, target.type, texts, tokens)
    else:
        provenance = replace(source.provenance, bits=min(BITS[target.type], source.provenance.bits))
        meta = {**source.saved, KEY: asdict(provenance), "export": {"dtype": target.type}}
        text = card(source, target.out.name, target.type, target.config.license)
        count = folder.write(target.out, counted_source, target.type, meta, text)
    files = [target.out] if target.out.is_file() else target.out.iterdir()
    return count, sum(file.stat().st_size for file in files)
