"""Weights and tokenizer ↔ a checkpoint folder, in the layout of `gpt.runs.hf`, safetensors only."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from gpt.config import GPT2_VOCAB, GPTConfig
from gpt.errors import UserError
from gpt.files import disk_errors, read_json, to_json, whole_folder, write_file
from gpt.model import lora
from gpt.model.decoder import GPT, rotary_table
from gpt.runs import adapter, folder, hf
from gpt.text.tokenizer import Tokenizer, describe, gpt2_tokenizer
from gpt.text.tokenizer_files import RANKS, read_own, read_transformers, tokenizer_files

FORMAT = 1
MODEL = "model.safetensors"
_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Checkpoint:
    """A model and its tokenizer."""

    model: GPT
    tokenizer: Tokenizer


class TokenizerFiles:
    """A tokenizer's files, made once and written into every checkpoint of a run."""

    def __init__(self, tokenizer: Tokenizer, config: GPTConfig) -> None:
        self.tokenizer = tokenizer
        self.files = tokenizer_files(tokenizer, config.block_size)


def save(target: Path, model: GPT, tokenizer: TokenizerFiles, meta: Mapping[str, Any]) -> None:
    """Writes the checkpoint ``target``, whole or not at all. ``meta`` goes into ``gpt.json`` beside the arch; where it
    tells of an adapter (`gpt.runs.adapter`), the model's adapters alone are written."""
    eot = tokenizer.tokenizer.eot
    own = {
        "format": FORMAT,
        "arch": model.config.arch,
        "positions": model.config.positions,
        "tokenizer": describe(tokenizer.tokenizer),
        **meta,
    }
    weights = adapter.file(model) if "adapter" in meta else {MODEL: to_safetensors(_to_hf(model), {"format": "pt"})}
    files = {
        **tokenizer.files,
        "config.json": to_json(hf.to_hf_config(model.config, eot)),
        "generation_config.json": to_json({"bos_token_id": eot, "eos_token_id": eot}),
        folder.META: to_json(own),
        **weights,
    }
    with disk_errors(target, folder.KEPT), whole_folder(target) as beside:
        for name, data in files.items():
            write_file(beside / name, data)
        folder.write_sums(beside)


def _to_hf(model: GPT) -> dict[str, Tensor]:
    state = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
    table = model.position_table()
    if table is not None:
        state["wpe.weight"] = table.detach().float().cpu()
    return {
        hf.PREFIX + name: (tensor.t() if hf.is_transposed(name) else tensor).contiguous()
        for name, tensor in sorted(state.items())
    }


def load(path: Path, device: torch.device, shape: GPTConfig | None = None) -> Checkpoint:
    """The checkpoint at ``path``, ours or transformers', checked before anything is allocated from it. ``shape`` is its
    own but for another dropout or a shorter context, to which a table of positions is cut. An adapter is merged into
    the weights that it belongs to.

    Raises `UserError` for damage (a sum, a shape, a number), for a model of another kind, and for an adapter to weights
    that are gone.
    """
    config, meta = _describe(path)
    if adapter.is_adapter(path):
        said = adapter.read(path)
        model = load(said.find_base(path), device, shape or config).model
        lora.merge(model, adapter.tensors(path, config, said.rank), said.scale)
    else:
        model = _build(shape or config, _open_tensors(path, config), device)
    return Checkpoint(model, load_tokenizer(path, config, meta))


def look(path: Path) -> tuple[GPTConfig, Tokenizer]:
    """The shape and the tokenizer of a checkpoint, whose sums are compared; its weights stay on the disk.

    Raises `UserError` as `load` does, for what can be seen without them.
    """
    config, meta = _describe(path)
    if adapter.is_adapter(path):
        adapter.read(path).find_base(path)
    else:
        _weight_files(path)
    return config, load_tokenizer(path, config, meta)


def _describe(path: Path) -> tuple[GPTConfig, dict[str, Any]]:
    """The shape and what ``gpt.json`` says, where there is one."""
    ours = (path / folder.META).exists() or (path / folder.CHECKSUMS).exists()
    if ours:
        folder.check_sums(path)
    meta = read_json(path / folder.META) if ours else {}
    if ours and meta.get("format") != FORMAT:
        raise UserError(f"{path} has format {meta.get('format')!r}; this program reads format {FORMAT}", "update gpt")
    return hf.load_config(path), meta


def load_tokenizer(path: Path, config: GPTConfig, meta: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer beside the weights: ours, or a byte-level BPE of transformers'. A folder without one and with
    50,257 ids means GPT-2's. Raises `UserError` where its size is not the model's."""
    tokenizer: Tokenizer | None
    if (path / RANKS).exists() and meta:
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
    index = path / "model.safetensors.index.json"
    if not index.exists():
        if not (path / "model.safetensors").exists():
            pickled = any(path.glob("*.bin"))
            hint = "it holds pickles, which are never opened: save it as safetensors first" if pickled else ""
            raise UserError(f"{path} has no model.safetensors", hint)
        return [path / "model.safetensors"]
    parts = read_json(index).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(n, str) and Path(n).name == n for n in parts.values()):
        raise UserError(f"{index} does not name files of its own folder")
    return [path / name for name in sorted(set(parts.values()))]


def _open_tensors(path: Path, config: GPTConfig) -> dict[str, Tensor]:
    """Every tensor by our name, as stored. Names, shapes and dtypes are compared with the configuration first."""
    _check_size(path, config)
    expected = hf.parameter_shapes(config)
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                names = {theirs: hf.our_name(theirs) for theirs in opened.keys()}  # noqa: SIM118
                for theirs, name in names.items():
                    if name is not None and name != hf.UNEMBEDDING:
                        _check_tensor(file, theirs, opened.get_slice(theirs), expected.get(name))
                for theirs, name in names.items():
                    if name is not None:
                        tensors[name] = opened.get_tensor(theirs)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged or no safetensors file: {error}", "copy or save it anew") from None
    missing = sorted(set(expected) - set(tensors))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{path}: the tensor {missing[0]}{more} is missing from the weights")
    unembedding = tensors.pop(hf.UNEMBEDDING, None)
    if unembedding is not None and not torch.equal(unembedding, tensors["wte.weight"]):
        raise UserError(f"{path}: its unembedding is not its embedding; this decoder ties them")
    return tensors


def _check_size(path: Path, config: GPTConfig) -> None:
    """Raises `UserError` for a shape that the files on disk are far too small to hold, before memory is spent on it."""
    size = sum(file.stat().st_size for file in _weight_files(path) if file.exists())
    least = 2 * (config.vocab_size + config.block_size + 12 * config.n_layer * config.n_embd) * config.n_embd
    if size < least:
        raise UserError(
            f"{path}: the weights have {size:,} bytes; config.json asks for {least:,} at least", "copy it anew"
        )


def _check_tensor(file: Path, name: str, tensor: Any, expected: tuple[int, ...] | None) -> None:
    if expected is None:
        raise UserError(f"{file} has a tensor {name} that a GPT-2 has no place for")
    shape = tuple(tensor.get_shape())
    if shape != expected:
        raise UserError(f"{file}: {name} has the shape {shape}; config.json asks for {expected}")
    if tensor.get_dtype() not in _DTYPES:
        raise UserError(f"{file}: {name} is {tensor.get_dtype()}; weights are F32, F16 or BF16")


def _build(config: GPTConfig, tensors: dict[str, Tensor], device: torch.device) -> GPT:
    """A model with these weights, in float32, for evaluation. Nothing is initialized only to be overwritten."""
    with torch.device("meta"):
        model = GPT(config)
    if "wpe.weight" in tensors:
        tensors["wpe.weight"] = tensors["wpe.weight"][: config.block_size].clone()
    if config.positions == "sinusoidal":
        model.register_buffer("sine", tensors.pop("wpe.weight").float(), persistent=False)
    state = {
        name: (tensor.t() if hf.is_transposed(name) else tensor).float().contiguous()
        for name, tensor in tensors.items()
    }
    if config.positions == "rotary":
        model.register_buffer("turn", rotary_table(config.block_size, config.n_embd // config.n_head), persistent=False)
    model.load_state_dict(state, assign=True)
    return model.to(device).eval()
