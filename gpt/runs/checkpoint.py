"""Reads and writes checkpoint folders: weights and tokenizer in the layout of `gpt.runs.hf`, safetensors only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.config import GPT2_VOCAB, GPTConfig
from gpt.errors import UserError
from gpt.files import disk_errors, is_file_name, read_json, reading, side_by_side, to_json, whole_folder, write_pieces
from gpt.model import lora
from gpt.model.decoder import GPT, ROPE_TABLE, rotary_table
from gpt.model.params import named_parameters, parameters
from gpt.runs import adapter, folder, hf, tensors
from gpt.text.tokenizer import Tokenizer, describe, gpt2_tokenizer
from gpt.text.tokenizer_files import has_own, read_own, read_transformers, tokenizer_files

FORMAT = 1
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_BYTES = 5_000_000_000  # of a file of weights; more are written as several with an index, as transformers does
MOST_ADAPTERS = 100  # on top of each other; one that names itself as its base would never end
Files = Mapping[str, bytes | tensors.Arrays]  # a checkpoint's, by name: bytes, or tensors to be written


@dataclass(frozen=True)
class Checkpoint:
    """A model and its tokenizer."""

    model: GPT
    tokenizer: Tokenizer


class TokenizerFiles:
    """The files of a tokenizer, made once and written into every checkpoint of a run."""

    def __init__(self, tokenizer: Tokenizer, config: GPTConfig) -> None:
        self.tokenizer = tokenizer
        self.files = tokenizer_files(tokenizer, config.block_size)


def save(target: Path, model: GPT, tokenizer: TokenizerFiles, meta: Mapping[str, Any]) -> None:
    """Writes a model to the checkpoint ``target``, whole or not at all. ``meta`` goes into ``gpt.json``
    beside the arch. Raises `WorkError`."""
    with disk_errors(target, folder.KEPT):
        write(target, contents(model.config, {**model.state_dict(), **fixed(model)}, tokenizer, meta))


def contents(
    config: GPTConfig,
    weights: Mapping[str, Tensor | tensors.Array | tensors.Deferred],
    tokenizer: TokenizerFiles,
    meta: Mapping[str, Any],
) -> Files:
    """The files of a checkpoint by name. ``weights`` are a model's by our names, on the host, or its adapters alone if
    ``meta`` describes an adapter (`gpt.runs.adapter`)."""
    eot = tokenizer.tokenizer.eot
    own = {
        "format": FORMAT,
        "positions": config.positions,
        "tokenizer": describe(tokenizer.tokenizer),
        **meta,
    }
    arrays = {
        name: each.detach().float().cpu().numpy() if isinstance(each, Tensor) else each
        for name, each in weights.items()
    }
    return {
        **tokenizer.files,
        "config.json": to_json(hf.to_hf_config(config, eot)),
        "generation_config.json": to_json({"bos_token_id": eot, "eos_token_id": eot}),
        folder.META: to_json(own),
        **({adapter.FILE: arrays} if "adapter" in meta else _weights(config, arrays)),
    }


def _weights(config: GPTConfig, arrays: tensors.Arrays) -> Files:
    """The files of a model's weights."""
    table = named_parameters(config)
    parts: list[dict[str, tensors.Array | tensors.Deferred]] = [{}]
    for name, array in arrays.items():
        if parts[-1] and tensors.nbytes(parts[-1]) + array.nbytes > MOST_BYTES:
            parts.append({})
        parts[-1][hf.PREFIX + name] = array.T if table[name].is_matrix else array
    if len(parts) == 1:
        return {MODEL: parts[0]}
    files = {f"model-{n:05}-of-{len(parts):05}.safetensors": part for n, part in enumerate(parts, 1)}
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in arrays.values())},
        "weight_map": {name: file for file, part in files.items() for name in part},
    }
    return {**files, INDEX: to_json(index)}


def fixed(model: GPT) -> dict[str, Tensor]:
    """The tensors that a checkpoint stores beside the parameters: a fixed table of positions, if there is one."""
    return {"wpe.weight": model.sine.detach()} if model.config.positions == "sinusoidal" else {}


def write(target: Path, files: Files) -> None:
    """Writes a checkpoint, synced, whole or not at all. Before it takes its name it is read back from the disk, and its
    checksums are compared with those of what was to be written. Raises OSError."""
    with whole_folder(target, replace=True) as beside:

        def written(name: str) -> str:
            data = files[name]
            return write_pieces(beside / name, [data] if isinstance(data, bytes) else tensors.pieces(data))

        sums = side_by_side(written, sorted(files))
        folder.write_checksums(beside, sums)
        folder.read_back(beside, sums)


def load(
    path: Path,
    device: torch.device,
    shape: GPTConfig | None = None,
    above: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Checkpoint:
    """Loads the checkpoint at ``path``, ours or transformers', which is checked before anything is allocated from it.

    ``shape`` may differ from the checkpoint's own in dropout and by a shorter context, to which a table of positions is
    cut. An adapter is merged into the weights that it belongs to; ``above`` counts the adapters on top of this
    checkpoint. Weights are read straight into ``dtype``, with an adapter into float32. Raises `UserError` for damage (a
    checksum, a shape, a number), for a model of another kind, and for an adapter whose base is gone.
    """
    config, meta = _describe(path)
    if adapter.is_adapter(path):
        said = adapter.read(path)
        if above == MOST_ADAPTERS:
            raise UserError(f"{path} ends a chain of more than {MOST_ADAPTERS} adapters", "use --merge-lora in between")
        model = load(said.find_base(path), device, shape or config, above + 1).model
        lora.merge(model, adapter.tensors(path, config, said.rank), said.scale)
    else:
        model = _build(shape or config, open_tensors(path, config), device, dtype)
    return Checkpoint(model, load_tokenizer(path, config, meta))


def peek(path: Path) -> tuple[GPTConfig, Tokenizer]:
    """Reads the shape and the tokenizer of a checkpoint and verifies its checksums; its weights stay on the disk.

    Raises `UserError` as `load` does, for what can be seen without the weights.
    """
    config, meta = _describe(path)
    if adapter.is_adapter(path):
        adapter.read(path).find_base(path)
    else:
        _weight_files(path)
    return config, load_tokenizer(path, config, meta)


def _describe(path: Path) -> tuple[GPTConfig, dict[str, Any]]:
    """The shape of a checkpoint's model, and the object in its ``gpt.json``, empty where there is none."""
    with reading(path):
        ours = (path / folder.META).exists() or (path / folder.CHECKSUMS).exists()
    if ours:
        folder.verify_checksums(path)
    meta = read_json(path / folder.META) if ours else {}
    if ours and meta.get("format") != FORMAT:
        raise UserError(f"{path} has format {meta.get('format')!r}; this program reads format {FORMAT}", "update gpt")
    config = hf.load_config(path)
    return config, meta


def load_tokenizer(path: Path, config: GPTConfig, meta: Mapping[str, Any]) -> Tokenizer:
    """Loads the tokenizer beside the weights: ours, or one of transformers'. A folder without one and with
    50,257 ids means GPT-2's. Raises `UserError` where its size is not the model's."""
    tokenizer: Tokenizer | None
    if meta and has_own(path, meta.get("tokenizer")):
        tokenizer = read_own(path, meta.get("tokenizer"), str(path / folder.META))
    else:
        tokenizer = read_transformers(path)
    if tokenizer is None and config.vocab_size == GPT2_VOCAB:
        tokenizer = gpt2_tokenizer()
    if tokenizer is None:
        raise UserError(
            f"{path} has no tokenizer, and its {config.vocab_size:,} ids are not GPT-2's {GPT2_VOCAB:,}",
            "put the model's tokenizer.json into that folder",
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"{path}: the tokenizer has {tokenizer.vocab_size:,} ids and the model {config.vocab_size:,}")
    return tokenizer


def _weight_files(path: Path) -> list[Path]:
    """The one file of weights, or the parts that an index names."""
    index = path / INDEX
    if not index.exists():
        if not (path / MODEL).exists():
            pickled = any(path.glob("*.bin"))
            hint = "it holds pickles, which are never opened: save it as safetensors first" if pickled else ""
            raise UserError(f"{path} has no {MODEL}", hint)
        return [path / MODEL]
    parts = read_json(index).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(n, str) and is_file_name(n) for n in parts.values()):
        raise UserError(f"{index} does not name files of its own folder")
    return [path / name for name in sorted(set(parts.values()))]


def load_parts(path: Path, shape: GPTConfig, put: Callable[[str, Tensor], None]) -> None:
    """Passes every parameter of the checkpoint at ``path`` to ``put``, one after the other, whole and on the host.
    Raises `UserError` as `load` does."""
    if adapter.is_adapter(path):
        for name, parameter in load(path, torch.device("cpu"), shape).model.named_parameters():
            put(name, parameter.detach())
        return
    config, _ = _describe(path)
    table = named_parameters(shape)

    def keep(name: str, tensor: Tensor) -> Tensor:
        if name not in table or not table[name].trained:
            return tensor
        whole = tensor.t() if table[name].is_matrix else tensor
        put(name, (whole[: shape.block_size] if name == "wpe.weight" else whole).float())
        return tensor if name == "wte.weight" else tensor[:0].clone()

    open_tensors(path, config, keep)


def open_tensors(
    path: Path, config: GPTConfig, keep: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
) -> dict[str, Tensor]:
    """Reads every tensor by our name, as stored, or as ``keep`` returns it. Names, shapes and dtypes are compared with
    the configuration first."""
    files = _weight_files(path)
    _check_size(path, config)
    unembedding = {hf.UNEMBEDDING: (config.vocab_size, config.n_embd)} if config.tied else {}
    found = tensors.read(
        files, hf.stored_shapes(config), "config.json", ours=hf.our_name, optional=unembedding, keep=keep
    )
    other = found.pop(hf.UNEMBEDDING, None) if config.tied else None
    if other is not None and not torch.equal(other, found["wte.weight"]):
        raise UserError(f"{path}: its unembedding is not its embedding; this decoder ties them")
    return found


def _check_size(path: Path, config: GPTConfig) -> None:
    """Raises `UserError` for a shape that the files on disk are too small to hold, before memory is spent on it."""
    size = sum(file.stat().st_size for file in _weight_files(path) if file.exists())
    least = 2 * sum(p.numel * (config.n_layer if p.in_blocks else 1) for p in parameters(config))  # in 16 bits
    if size < least:
        raise UserError(
            f"{path}: the weights have {size:,} bytes; config.json asks for {least:,} at least", "copy it anew"
        )


def _build(config: GPTConfig, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> GPT:
    """Builds a model with these weights, for evaluation. Nothing is initialized only to be overwritten."""
    with torch.device("meta"):
        model = GPT(config)
    if "wpe.weight" in weights:
        weights["wpe.weight"] = weights["wpe.weight"][: config.block_size].clone()
    if config.positions == "sinusoidal":
        model.register_buffer("sine", weights.pop("wpe.weight").to(dtype), persistent=False)
    table = named_parameters(config)
    state = {
        name: (tensor.t() if table[name].is_matrix else tensor).to(dtype).contiguous()
        for name, tensor in weights.items()
    }
    if config.positions == "rotary":
        rope = rotary_table(min(config.block_size, ROPE_TABLE), config)
        model.register_buffer("rope", rope, persistent=False)
    model.load_state_dict(state, assign=True)
    return model.to(device).eval()
