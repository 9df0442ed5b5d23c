"""The one table between our names and the GPT-2 layout of transformers: configuration and weights.

A checkpoint of ours is such a folder, and such a folder is a checkpoint to us; nothing is exported. One of another
architecture has the same layout and says in ``config.json`` that it is no GPT-2.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt.config import GPTConfig
from gpt.errors import UserError
from gpt.files import read_json
from gpt.runs import folder

PREFIX = "transformer."  # before every name but the unembedding's, in what transformers saves today
UNEMBEDDING = "lm_head.weight"
# transformers keeps these transposed, (in, out): its GPT-2 computes x W where torch's Linear computes x Wᵀ.
OWN_TYPE = "gpt"  # of models that are no GPT-2
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
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


def is_gpt2(config: GPTConfig) -> bool:
    """Whether transformers' GPT-2 computes the same."""
    return config.arch == "gpt2" and config.positions != "rotary"


def to_hf_config(config: GPTConfig, eot: int) -> dict[str, Any]:
    """``config.json``, for `transformers.GPT2LMHeadModel` where it is a GPT-2. A sine table is stored as ``wpe``, as a
    learned one is."""
    values = {theirs: getattr(config, ours) for ours, theirs in _NAMES.items()}
    if not is_gpt2(config):
        own = {"arch": config.arch, "positions": config.positions, "dropout": config.dropout}
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
    try:
        found = {ours: values[theirs] for ours, theirs in _NAMES.items()}
        return GPTConfig(**found, **{key: values[key] for key in ("arch", "positions", "dropout")})
    except KeyError as error:
        raise UserError(f"{where} has no {error.args[0]}") from None
    except UserError as error:
        raise UserError(f"{where}: {error.message}", error.hint) from None


def load_config(path: Path) -> GPTConfig:
    """The shape of the model in a checkpoint folder; `UserError` where it is of another kind. Opens no weights."""
    config = from_hf_config(read_json(path / "config.json"), str(path / "config.json"))
    if is_gpt2(config) and (path / folder.META).exists():  # GPT-2's layout has no word for a table that is fixed
        config = replace(config, positions=read_json(path / folder.META).get("positions", ""))
    return config


def our_name(theirs: str) -> str | None:
    """Our name for one of transformers' tensors; None for a buffer that carries no weight."""
    name = theirs.removeprefix(PREFIX)
    return None if name.endswith(BUFFERS) else name


def is_transposed(name: str) -> bool:
    """Whether transformers keeps this tensor transposed."""
    return name.endswith(TRANSPOSED)


def parameter_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint by our name, with its shape as it is stored: (in, out) for linear weights."""
    c = config.n_embd
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (config.vocab_size, c)}
    if config.positions != "rotary":
        shapes["wpe.weight"] = (config.block_size, c)
    for layer in range(config.n_layer):
        block: dict[str, tuple[int, ...]] = {
            "ln_1.weight": (c,), "ln_1.bias": (c,),
            "attn.c_attn.weight": (c, 3 * c), "attn.c_attn.bias": (3 * c,),
            "attn.c_proj.weight": (c, c), "attn.c_proj.bias": (c,),
            "ln_2.weight": (c,), "ln_2.bias": (c,),
            "mlp.c_fc.weight": (c, 4 * c), "mlp.c_fc.bias": (4 * c,),
            "mlp.c_proj.weight": (4 * c, c), "mlp.c_proj.bias": (c,),
        }  # fmt: skip
        shapes |= {f"h.{layer}.{name}": shape for name, shape in block.items()}
    if config.arch == "modern":  # its linear maps have no biases
        shapes = {
            name: shape for name, shape in shapes.items() if not name.endswith(("attn.bias", "proj.bias", "fc.bias"))
        }
    return shapes | {"ln_f.weight": (c,), "ln_f.bias": (c,)}
