"""The GPT-2 layout of transformers: ``config.json``, and names and shapes of the weights as they are stored.

A checkpoint of ours is such a folder, and such a folder is a checkpoint to us; nothing is exported. One of another
architecture has the same layout and says in ``config.json`` that it is no GPT-2.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from gpt.config import GPTConfig, RopeScaling
from gpt.errors import UserError
from gpt.files import read_json
from gpt.model.params import Shape, named_parameters
from gpt.runs import folder
from gpt.settings import checked

PREFIX = "transformer."  # before every name but the unembedding's, in what transformers saves today
UNEMBEDDING = "lm_head.weight"
OWN_TYPE = "gpt"  # of models that are no GPT-2
BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks that older versions saved

# What GPT-2's configuration may say and this decoder computes; anything else would silently give other logits.
_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
_NAMES = {
    "vocab_size": "vocab_size",
    "block_size": "n_positions",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "layer_norm_epsilon": "layer_norm_epsilon",
}
# What a model that is no GPT-2 says beside these. A setting that came later has a default where it isn't said.
_ALWAYS = ("positions", "dropout")
_OWN = dict.fromkeys([*_ALWAYS, *(each.name for each in fields(GPTConfig) if each.name not in _NAMES)])


def to_hf_config(config: GPTConfig, eot: int) -> dict[str, Any]:
    """``config.json``, for `transformers.GPT2LMHeadModel` where it is a GPT-2. A sine table is stored as ``wpe``, as a
    learned one is."""
    values = {theirs: getattr(config, ours) for ours, theirs in _NAMES.items()}
    if config.layout != "gpt2":
        own = {name: value for name, value in asdict(config).items() if name in _OWN}
        return {"architectures": ["GPT"], "model_type": OWN_TYPE, **values, **own, "dtype": "float32"}
    fixed = {key: allowed[0] for key, allowed in _FIXED.items()}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **values,
        **fixed,
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "initializer_range": 0.02,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "dtype": "float32",
    }


def from_hf_config(values: Mapping[str, Any], where: str) -> GPTConfig:
    """The shape in a ``config.json`` of transformers. Raises `UserError` for another kind of model, a GPT-2 that
    computes what this decoder does not, or a number that is none."""
    kind = values.get("model_type")
    if kind == OWN_TYPE:
        return _from_own_config(values, where)
    if kind != "gpt2":
        raise UserError(f"{where} describes a model of type {kind!r}, not gpt2", "give a GPT-2 checkpoint")
    for key, allowed in _FIXED.items():
        if values.get(key, allowed[0]) not in allowed:
            raise UserError(f"{where}: {key} is {values[key]!r}; this decoder computes {allowed[0]!r} only")
    missing = [theirs for theirs in ("vocab_size", "n_layer", "n_head", "n_embd") if theirs not in values]
    if missing or not ("n_positions" in values or "n_ctx" in values):
        raise UserError(f"{where} has no {', '.join(missing) or 'n_positions'}")
    found = {ours: values[theirs] for ours, theirs in _NAMES.items() if theirs in values}
    found.setdefault("block_size", values.get("n_ctx"))
    try:
        config = GPTConfig(**found, dropout=values.get("resid_pdrop", 0.0))
    except UserError as error:
        raise UserError(f"{where}: {error.message}", error.hint) from None
    if values.get("n_inner") not in (None, 4 * config.n_embd):
        raise UserError(f"{where}: n_inner is {values['n_inner']!r}; this decoder's MLP is 4 × n_embd wide")
    return config


def _from_own_config(values: Mapping[str, Any], where: str) -> GPTConfig:
    values = GPTConfig.upgrade(values, where)
    missing = [name for name in (*_NAMES.values(), *_ALWAYS) if name not in values]
    if missing:
        raise UserError(f"{where} has no {missing[0]}")
    found = {ours: values[theirs] for ours, theirs in _NAMES.items()}
    try:
        own = {name: values[name] for name in _OWN if name in values}
        if isinstance(own.get("rope_scaling"), dict):
            own["rope_scaling"] = checked(RopeScaling, own["rope_scaling"], where)
        return GPTConfig(**found, **own)
    except UserError as error:
        raise UserError(f"{where}: {error.message}", error.hint) from None


def load_config(path: Path) -> GPTConfig:
    """The shape of the model in a checkpoint folder; `UserError` where it is of another kind. Opens no weights."""
    config = from_hf_config(read_json(path / "config.json"), str(path / "config.json"))
    if (
        config.layout == "gpt2" and (path / folder.META).exists()
    ):  # GPT-2's layout has no word for a table that is fixed
        config = replace(config, positions=read_json(path / folder.META).get("positions", ""))
    return config


def our_name(theirs: str) -> str | None:
    """Removes transformers' prefix from a tensor's name; None for a buffer that carries no weight."""
    name = theirs.removeprefix(PREFIX)
    return None if name.endswith(BUFFERS) else name


def stored_shapes(config: GPTConfig) -> dict[str, Shape]:
    """Every tensor of a checkpoint by our name, with its shape as it is stored: (in, out) for linear weights."""
    return {name: p.shape[::-1] if p.is_matrix else p.shape for name, p in named_parameters(config).items()}
