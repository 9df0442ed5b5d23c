"""Reads and writes checkpoint folders: weights as safetensors, and the tokenizer, in the layout of `gpt.runs.hf`."""

import collections
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from gpt.config.model import GPT2_VOCAB, GPTConfig
from gpt.model import lora
from gpt.model.decoder import GPT
from gpt.model.params import named_parameters
from gpt.model.quantize import Blocks, Ends, QuantizedLinear, StoredEmbedding, to_tensor
from gpt.runs import adapter, folder, gguf_model, hf, model_config, tensors
from gpt.runs.sampling_defaults import FILE, NO_DEFAULTS, SamplingDefaults
from gpt.system.errors import UserError, warn
from gpt.system.files import (
    atomic_folder,
    disk_errors,
    is_file_name,
    map_in_threads,
    read_json,
    reading,
    to_json,
    write_pieces,
)
from gpt.system.gguf_header import is_gguf
from gpt.tokenizers.finding import described_file, read_described_tokenizer, read_template
from gpt.tokenizers.importing import gpt2_tokenizer, read_gguf, read_transformers
from gpt.tokenizers.saving import tokenizer_files
from gpt.tokenizers.tokenizer import Tokenizer, describe

FORMAT = 1
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
# As in Transformers, larger weights are sharded into files of at most this many bytes, with an index.
MAX_SHARD_BYTES = 5_000_000_000
_PART = re.compile(r"h\.\d+|\w+")  # a block, or another top-level module
Files = Mapping[str, bytes | tensors.Arrays]  # bytes or tensors of each file, by name
Parameters = Mapping[str, Callable[[], Tensor | Blocks]]
Store = Callable[[GPTConfig, tensors.Arrays], Files]  # shape and arrays → weight files


@dataclass(frozen=True)
class Checkpoint:
    """A model and its tokenizer."""

    model: GPT
    tokenizer: Tokenizer


class TokenizerFiles:
    """A tokenizer's files, serialized once for all checkpoints of a run, and the model's ``sampling`` defaults."""

    def __init__(self, tokenizer: Tokenizer, config: GPTConfig, sampling: SamplingDefaults = NO_DEFAULTS) -> None:
        self.tokenizer, self.sampling = tokenizer, sampling
        self.files = tokenizer_files(tokenizer, config.block_size)


def save(target: Path, model: GPT, tokenizer: TokenizerFiles, meta: Mapping[str, Any]) -> None:
    """Writes a model to the checkpoint ``target`` atomically. Adds ``meta`` to ``gpt.json``. Raises `WorkError`."""
    with disk_errors(target, folder.INTACT_HINT):
        write(target, contents(model.config, model.state_dict(), tokenizer, meta))


def contents(
    config: GPTConfig,
    weights: Mapping[str, Tensor | tensors.Array | tensors.Deferred],
    tokenizer: TokenizerFiles,
    meta: Mapping[str, Any],
    store: Store | None = None,
    dtype: str = "float32",
) -> Files:
    """Returns the files of a checkpoint by name. ``weights`` are on the host, by gpt's names. ``store`` makes the
    weight files; by default, they contain a full model. ``dtype`` is recorded in ``config.json``."""
    inner = tokenizer.tokenizer
    bos = inner.eot if inner.bos is None else inner.bos
    eos = [inner.eot, *sorted(inner.more_ends)] if inner.more_ends else inner.eot
    metadata = {
        "format": FORMAT,
        "tokenizer": describe(inner),
        **meta,
    }
    arrays = {
        name: each.detach().float().cpu().numpy() if isinstance(each, Tensor) else each
        for name, each in weights.items()
    }
    return {
        **tokenizer.files,
        "config.json": to_json(hf.to_hf_config(config, bos, eos, dtype)),
        FILE: to_json({"bos_token_id": bos, "eos_token_id": eos, **tokenizer.sampling.transformers_values()}),
        folder.META: to_json(metadata),
        **(store(config, arrays) if store else split_into_files(to_stored(config, arrays))),
    }


def split_into_files(arrays: tensors.Arrays) -> Files:
    """Returns one weight file, or shards of at most `MAX_SHARD_BYTES` with an index."""
    parts: list[dict[str, tensors.Array | tensors.Deferred]] = [{}]
    for name, array in arrays.items():
        if parts[-1] and tensors.nbytes(parts[-1]) + array.nbytes > MAX_SHARD_BYTES:
            parts.append({})
        parts[-1][name] = array
    if len(parts) == 1:
        return {MODEL: parts[0]}
    files = {f"model-{n:05}-of-{len(parts):05}.safetensors": part for n, part in enumerate(parts, 1)}
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in arrays.values())},
        "weight_map": {name: file for file, part in files.items() for name in part},
    }
    return {**files, INDEX: to_json(index)}


def to_stored(config: GPTConfig, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a model's arrays to its layout's names and shapes, as views or deferred arrays."""
    arrays: dict[str, Any] = {}
    for name, group in _group_by_parameter(config):
        rows = [each.rows for each in group.values() if each.rows is not None]
        if not rows:
            parts = [weights[name]]
        elif isinstance(weights[name], tensors.Deferred):
            parts = weights[name].split(rows)
        else:
            parts = [weights[name][each] for each in rows]
        for (stored_name, stored), part in zip(group.items(), parts, strict=True):
            arrays[stored_name] = part.T if stored.transposed else part
    return arrays


def from_stored(config: GPTConfig, get: Callable[[str], Tensor]) -> Parameters:
    """Returns loaders of the parameters by gpt's names. ``get`` returns a tensor by its name in the layout. Unfused
    parameters are views of the tensors from ``get``."""
    return {name: partial(_concatenate, group, get) for name, group in _group_by_parameter(config)}


def _concatenate(group: Mapping[str, hf.Stored], get: Callable[[str], Tensor]) -> Tensor:
    parts = [get(stored_name).t() if stored.transposed else get(stored_name) for stored_name, stored in group.items()]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _group_by_parameter(config: GPTConfig) -> Iterator[tuple[str, dict[str, hf.Stored]]]:
    for name, items in itertools.groupby(hf.stored_tensors(config).items(), key=lambda item: item[1].ours):
        yield name, dict(items)


def write(target: Path, files: Files) -> None:
    """Writes a checkpoint atomically and reads it back from the disk. Raises OSError."""
    with atomic_folder(target, replace=True) as temporary:
        checksums = map_in_threads(lambda name: write_one(temporary / name, files[name]), sorted(files))
        folder.write_checksums(temporary, checksums)


def write_one(path: Path, data: bytes | tensors.Arrays) -> str:
    """Writes a checkpoint file and returns its sha256. Raises OSError."""
    return write_pieces(path, [data] if isinstance(data, bytes) else tensors.pieces(data))


def load(path: Path, device: torch.device, *arguments: Any, **options: Any) -> Checkpoint:
    """Loads a gpt or Transformers checkpoint with its tokenizer. The arguments and errors are those of `load_model`."""
    model = load_model(path, device, *arguments, **options)
    return Checkpoint(model, load_tokenizer(path, model.config))


def load_model(
    path: Path,
    device: torch.device,
    shape: GPTConfig | None = None,
    dtype: torch.dtype | None = torch.float32,
    mapped: bool = False,
    finish: Callable[[nn.Module], object] | None = None,
    keep_blocks: bool = False,
) -> GPT:
    """Loads the model of a gpt or Transformers checkpoint. Validates it before allocating memory.

    ``shape`` replaces the checkpoint's shape. ``shape`` can have another dropout and a shorter context, which truncates
    position tables. Weights are read directly into ``dtype``; an adapter is merged into its base model in float32.

    With ``mapped``, weights that need no conversion stay memory-mapped, and the model cannot be trained. ``finish``
    quantizes weights or lays them out for decoding. It is called with the embedding and the LM head (`Ends`), with each
    block after the block is read, and then with the model. Without a ``dtype``, ``finish`` gets weights as they are
    stored, and an embedding that is not the LM head stays in the file. With ``keep_blocks``, quantized matrices stay in
    it too: with a ``dtype``, only those that are not the LM head.

    Raises `UserError` for damage (a checksum, a shape, a number), an unsupported model, or a missing base.
    """
    if folder.is_adapter(path):
        config, loaded_adapter, base = _open_adapter(path)
        model = load_model(base, device, shape or config)
        lora_tensors, roles = adapter.tensors(path, config, loaded_adapter.rank)
        lora.merge(model, lora_tensors, loaded_adapter.scale, roles)
        if finish is not None:
            finish(model)
    else:
        config, stored = open_weights(path)
        model = build(shape or config, stored, device, dtype, mapped, finish, keep_blocks)
    return model


def peek(path: Path) -> tuple[GPTConfig, Tokenizer]:
    """Reads a checkpoint's shape and tokenizer, without weights. Raises `UserError` like `open_weights`."""
    config, _ = open_weights(path)
    return config, load_tokenizer(path, config)


def open_weights(path: Path) -> tuple[GPTConfig, Parameters]:
    """Verifies a checkpoint's checksums. Returns its shape, and loaders of its parameters by gpt's names, in the
    model's order. A loader reads its parameter when called; the first call merges an adapter. Raises `UserError` like
    `load`, except for errors in weights."""
    if is_gguf(path):
        config = model_config.load_config(path)
        return config, gguf_model.open_weights(path, config)
    if not folder.is_adapter(path):
        return _stored_parameters(path, _read_shape(path))
    config, _, _ = _open_adapter(path)

    @functools.cache
    def merged() -> Mapping[str, Tensor]:
        return load_model(path, torch.device("cpu")).state_dict()

    return config, {name: partial(lambda name: merged()[name], name) for name in named_parameters(config)}


def _open_adapter(path: Path) -> tuple[GPTConfig, adapter.Adapter, Path]:
    """Returns the model's shape (the base's, for a PEFT adapter), the adapter, and its base folder."""
    config, loaded_adapter = _read_shape(path), adapter.read(path)
    base = loaded_adapter.find_base(path)
    return config if folder.home(path) == path else open_weights(base)[0], loaded_adapter, base


def _read_shape(path: Path) -> GPTConfig:
    """Returns the model's shape. Raises `UserError` if the checkpoint is damaged or of another version."""
    # Iterating raises `UserError` for a missing base or an endless chain of adapters.
    collections.deque(folder.lineage(path), maxlen=0)
    home = folder.home(path)
    with reading(home):
        is_gpt = (home / folder.META).exists() or (home / folder.CHECKSUMS).exists()
    if is_gpt:
        folder.verify_checksums(home)
        if (version := read_json(home / folder.META).get("format")) != FORMAT:
            raise UserError(f"{home} has format {version!r}; this program reads format {FORMAT}", "update gpt")
    return model_config.load_config(home)


def load_tokenizer(path: Path, config: GPTConfig) -> Tokenizer:
    """Loads a checkpoint's tokenizer, in gpt's or Transformers' format. An adapter can have its own tokenizer, or only
    a chat template for its base's tokenizer. A template can also accompany a gpt tokenizer. If there is no tokenizer
    and the vocabulary has 50,257 tokens, loads GPT-2's. Raises `UserError` if the tokenizer has no token to begin or
    end a text."""
    tokenizer, template = None, dict[str, bytes]()
    for folder_path in folder.lineage(path):
        tokenizer = _own_tokenizer(folder_path)
        if tokenizer is None or tokenizer.chat_template is None:
            template = template or read_template(folder_path)
        if tokenizer is not None:
            break
    if tokenizer is None and config.vocab_size == GPT2_VOCAB:
        tokenizer = gpt2_tokenizer()
    if tokenizer is None:
        raise UserError(
            f"{path} has no tokenizer, and its vocabulary of {config.vocab_size:,} is not GPT-2's {GPT2_VOCAB:,}",
            "put the model's tokenizer.json in that folder",
        )
    try:
        tokenizer = tokenizer.for_model(config.vocab_size)
    except UserError as error:
        raise UserError(f"{path}: {error.message}", error.hint) from None
    return replace(tokenizer, files={**tokenizer.files, **template}) if template else tokenizer


def _own_tokenizer(path: Path) -> Tokenizer | None:
    if is_gguf(path):
        return read_gguf(path)
    meta = read_json(path / folder.META) if (path / folder.META).is_file() else {}
    if meta and described_file(path, meta.get("tokenizer")).is_file():
        return read_described_tokenizer(path, meta.get("tokenizer"), str(path / folder.META))
    return read_transformers(path)


def _weight_files(path: Path) -> list[Path]:
    """Returns the single weight file, or the shards that an index names. Like Transformers, prefers the single file,
    because an index can be left over from an earlier save."""
    index = path / INDEX
    if (path / MODEL).exists():
        return [path / MODEL]
    if not index.exists():
        has_pickles = any(path.glob("*.bin"))
        hint = "it contains pickles, which gpt never opens: save it as safetensors first" if has_pickles else ""
        raise UserError(f"{path} has no {MODEL}", hint)
    parts = read_json(index).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(n, str) and is_file_name(n) for n in parts.values()):
        raise UserError(f"{index} does not name files of its own folder")
    return [path / name for name in sorted(set(parts.values()))]


def load_parts(path: Path, shape: GPTConfig, put: Callable[[str, Tensor], None]) -> None:
    """Passes every parameter of a checkpoint to ``put``, one at a time, unsharded and on the host. Raises `UserError`
    like `load`."""
    for name, get in open_weights(path)[1].items():
        value = to_tensor(get())
        put(name, (value[: shape.block_size] if name == "wpe.weight" else value).float())


def _stored_parameters(path: Path, config: GPTConfig) -> tuple[GPTConfig, Parameters]:
    """Returns the model's shape and loaders of its parameters by gpt's names, in the model's order and the file's
    dtype. Unfused parameters are views of the mapped file.

    First validates the names, shapes and dtypes of all tensors. The returned shape is untied if the unembedding in the
    files differs from the embedding. Raises `UserError`.
    """
    files = _weight_files(path)
    ignored_names: list[str] = []

    def map_name(stored_name: str) -> str | None:
        name = hf.full_name(stored_name, config)
        if name is None or hf.part_of(name) in parts:
            return name
        ignored_names.append(stored_name)
        return None

    quantization = hf.find_quantization(read_json(path / "config.json"))
    try:
        expected = {name: each.shape for name, each in hf.stored_tensors(config).items()}
        embedding, parts = next(iter(expected)), {*map(hf.part_of, expected), hf.part_of(hf.UNEMBEDDING)}
        optional = {hf.UNEMBEDDING: (config.vocab_size, config.n_embd)}
        entries = tensors.find(files, expected | optional, "config.json", ours=map_name)
        # safetensors' save_model writes tied weights only under the unembedding's name.
        if config.tied and hf.UNEMBEDDING in entries:
            entries.setdefault(embedding, entries[hf.UNEMBEDDING])
        tensors.check_all(path, expected, entries)
    except UserError as error:
        if not quantization:
            raise
        raise UserError(
            f"{path}: {quantization}, and gpt reads quantized weights only from GGUF files ({error.message})",
            "use the model in 16 or 32 bits, or as a GGUF file",
        ) from None
    if quantization:
        warn(f"{path}: {quantization}, but its weights are not quantized: they are used as they are")
    if ignored_names:
        more = f" and {len(ignored_names) - 1:,} more" if len(ignored_names) > 1 else ""
        warn(f"{path}: the tensor {ignored_names[0]:.80}{more} is not part of the decoder and is ignored")
    if config.tied and hf.UNEMBEDDING in entries:
        pair = [entries[name].mapped() for name in (embedding, hf.UNEMBEDDING)]
        common_dtype = torch.promote_types(pair[0].dtype, pair[1].dtype)
        if not torch.equal(pair[0].to(common_dtype), pair[1].to(common_dtype)):
            warn(f"{path}: {hf.UNEMBEDDING} differs from the embedding, although config.json ties them: it is used")
            config = replace(config, tied=False)
    return config, from_stored(config, lambda stored_name: entries[stored_name].mapped())


def build(
    config: GPTConfig,
    stored: Parameters,
    device: torch.device,
    dtype: torch.dtype | None,
    mapped: bool = False,
    finish: Callable[[nn.Module], object] | None = None,
    keep_blocks: bool = False,
) -> GPT:
    """Builds a model from ``stored`` weights, part by part and without initialization, for evaluation. The other
    arguments are as in `load_model`."""
    with torch.device("meta"):
        model = GPT(config)

    def fill(part: str, values: Mapping[str, Tensor | Blocks]) -> None:
        state: dict[str, Tensor] = {}
        for name, value in values.items():
            is_kept = keep_blocks and (dtype is None or part.startswith("h.") or (part == "wte" and not config.tied))
            tensor = value if is_kept or isinstance(value, Tensor) else value.dequantize(dtype or torch.float32)
            if part == "wte" and (dtype is None or not isinstance(tensor, Tensor)):
                model.set_submodule(part, StoredEmbedding(tensor, dtype or torch.float32))
            elif not isinstance(tensor, Tensor):
                linear: Any = model.get_submodule(name.removesuffix(".weight"))
                model.set_submodule(name.removesuffix(".weight"), QuantizedLinear(tensor, linear.bias))
            else:
                tensor = tensor[: config.block_size] if part == "wpe" else tensor
                state[name.removeprefix(part + ".")] = _convert(tensor, dtype or tensor.dtype, mapped)
        if state:
            model.get_submodule(part).load_state_dict(state, assign=True)
            model.get_submodule(part).to(device)

    parts = [
        (part, list(names))
        for part, names in itertools.groupby(stored, key=lambda name: _PART.match(name)[0])  # type: ignore[index]
    ]
    # The largest matrices come first, when the others are not in memory yet.
    for part, names in sorted(parts, key=lambda item: item[0] not in ("wte", "lm_head")):
        fill(part, {name: stored[name]() for name in names})
        if finish is not None and part == ("wte" if config.tied else "lm_head"):
            finish(ends := Ends(model.wte, model.lm_head))
            model.set_submodule("wte", ends.wte)
            model.lm_head = ends.lm_head
        if finish is not None and part.startswith("h."):
            finish(model.get_submodule(part))
    model.to(device).eval()
    if finish is not None:
        finish(model)
    return model


def _convert(tensor: Tensor, dtype: torch.dtype, mapped: bool) -> Tensor:
    """Returns a contiguous tensor in ``dtype``. Always copies it unless ``mapped``."""
    if mapped:
        return tensor.to(dtype).contiguous()
    return torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
