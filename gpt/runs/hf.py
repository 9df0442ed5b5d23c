"""Checkpoint layouts of Transformers families: ``config.json``, and names and shapes of the weights.

gpt and Transformers read each other's checkpoints without conversion. A model that no family supports has GPT-2's
tensor names and its own type.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from gpt.config.model import ARCHITECTURES, GPTConfig, RopeScaling
from gpt.config.settings import checked
from gpt.model.params import Shape, named_parameters
from gpt.system.errors import UserError

UNEMBEDDING = "lm_head.weight"
OWN_TYPE = "gpt"  # type of models that no family supports
SUPPORTED = "gpt runs GPT-2, Llama, Mistral, Qwen2, Qwen2.5 and Qwen3 models"
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # buffers that older versions saved
_GPT2 = "transformer."  # prefix of all names in current files, except the unembedding's
_LLAMA = "model."
_LLAMA_NAMES = {
    "wte": ("embed_tokens",),
    "ln_1": ("input_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.c_proj": ("self_attn.o_proj",),
    "ln_2": ("post_attention_layernorm",),
    "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.c_proj": ("mlp.down_proj",),
    "ln_f": ("norm",),
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint's files: a parameter, or rows of a fused one."""

    ours: str
    shape: Shape  # in the file
    rows: slice | None = None  # rows of gpt's parameter; None for all
    transposed: bool = False  # stored as (in, out)


def stored_tensors(config: GPTConfig) -> dict[str, Stored]:
    """Returns every tensor by its name in the files, in the model's order. Parts of fused parameters are in row
    order."""
    tensors: dict[str, Stored] = {}
    for name, p in named_parameters(config).items():
        if name == UNEMBEDDING:
            tensors[name] = Stored(name, p.shape)
        elif config.layout in (OWN_TYPE, "gpt2"):
            tensors[_GPT2 + name] = Stored(name, p.shape[:: -1 if p.is_matrix else 1], transposed=p.is_matrix)
        else:
            module, _, kind = p.name.rpartition(".")
            stored_modules = _LLAMA_NAMES[module]
            prefix = _LLAMA + name.removesuffix(p.name).replace("h.", "layers.")
            end = 0
            for stored_module, rows in zip(stored_modules, p.fused or p.shape[:1], strict=True):
                part = slice(end, end := end + rows) if p.fused else None
                tensors[f"{prefix}{stored_module}.{kind}"] = Stored(name, (rows, *p.shape[1:]), part)
    return tensors


def full_name(theirs: str, config: GPTConfig) -> str | None:
    """Returns a tensor's full name, or None for a buffer. Files of a model without an LM head omit the prefix of the
    full name."""
    if theirs.endswith(_BUFFERS):
        return None
    prefix = _GPT2 if config.layout in (OWN_TYPE, "gpt2") else _LLAMA
    return theirs if theirs == UNEMBEDDING else prefix + theirs.removeprefix(prefix)


def part_of(name: str) -> str:
    """Returns the part of the model that a full name belongs to: ``layers``, ``wte``, ``v_head`` …"""
    return name.removeprefix(_GPT2).removeprefix(_LLAMA).partition(".")[0]


@dataclass(frozen=True)
class Family:
    """A Transformers model type that computes the same as this decoder."""

    architecture: str  # class in Transformers
    names: Mapping[str, str]  # keys of ``config.json`` by property
    properties: Mapping[str, Any]  # properties of all models in the family
    # Defaults of missing keys. Shape keys are never missing.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Accepted values of keys. Other values would change the logits. The first value is the default, and is written.
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_SHAPE = {
    "vocab_size": "vocab_size",
    "block_size": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim",
    "layer_norm_epsilon": "rms_norm_eps",
    "dropout": "attention_dropout",
    "tied": "tie_word_embeddings",
}
_DEFAULTS = {"rms_norm_eps": 1e-6, "attention_dropout": 0.0, "tie_word_embeddings": False}
_QWEN3 = ARCHITECTURES["modern"]
_LLAMA_PROPERTIES = {**_QWEN3, "qk_norm": False}
_SILU = {"hidden_act": ("silu", "swish")}
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd", "n_inner", "layer_norm_epsilon")}
        | {"block_size": "n_positions", "dropout": "resid_pdrop", "tied": "tie_word_embeddings"},
        ARCHITECTURES["gpt2"],
        {"n_inner": None, "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1, "tie_word_embeddings": True},
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
    ),
    "llama": Family(
        "LlamaForCausalLM", _SHAPE, _LLAMA_PROPERTIES, {**_DEFAULTS, "num_key_value_heads": None, "head_dim": None},
        {**_SILU, "attention_bias": (False,), "mlp_bias": (False,)},
    ),
    "mistral": Family(
        "MistralForCausalLM", _SHAPE, _LLAMA_PROPERTIES, {**_DEFAULTS, "num_key_value_heads": 8, "head_dim": None},
        _SILU,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", _SHAPE, {**_LLAMA_PROPERTIES, "biases": "qkv"},
        {**_DEFAULTS, "num_key_value_heads": 32, "head_dim": None}, _SILU,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", _SHAPE, _QWEN3, {**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
        {**_SILU, "attention_bias": (False,)},
    ),
}  # fmt: skip
# Keys of other families and variants, with values that leave the computation unchanged.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), (None, 0)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logit_softcapping"), (None, 0)),
    **dict.fromkeys(("residual_multiplier", "embedding_multiplier", "logits_scaling", "logit_scale"), (None, 1)),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "scale_emb", "scale_depth"), (None,)),
    **dict.fromkeys(("clip_qkv", "no_rope_layers"), (None,)),
    **dict.fromkeys(("alibi", "use_qk_norm", "qk_layernorm", "use_mrope", "parallel_residual"), (None, False)),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention"), (None, False)),
    "dual_chunk_attention_config": (None,),
    "is_causal": (None, True),
    "partial_rotary_factor": (None, 1),
}
_QWENS = ("qwen2", "qwen3")
_ROPE_KEYS = ("rope_scaling", "rope_parameters")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_WINDOW, _MAX_WINDOW_LAYERS, _ROPE_THETA = 4096, 28, 10_000.0  # defaults of missing keys
# Keys of a model that no family supports.
_OWN_KEYS = {each.name: each.name for each in fields(GPTConfig)} | {"block_size": "n_positions"}


def to_hf_config(config: GPTConfig, bos: int, eos: int | list[int], dtype: str = "float32") -> dict[str, Any]:
    """Returns ``config.json`` for the Transformers family that computes the same model."""
    if config.layout == OWN_TYPE:
        own_values = {_OWN_KEYS[name]: value for name, value in asdict(config).items()}
        return {"architectures": ["GPT"], "model_type": OWN_TYPE, **own_values, "dtype": dtype}
    family = FAMILIES[config.layout]
    values = {config_key: getattr(config, field_name) for field_name, config_key in family.names.items()}
    if config.layout == "gpt2":
        values |= {"attn_pdrop": config.dropout, "embd_pdrop": config.dropout}
    else:
        values |= {
            "intermediate_size": config.mlp_width, "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size, **_write_rope(config), **_write_window(config),
        }  # fmt: skip
    return {
        "architectures": [family.architecture],
        "model_type": config.layout,
        **values,
        **{key: allowed[0] for key, allowed in family.fixed.items()},
        "initializer_range": 0.02,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "dtype": dtype,
    }


def find_quantization(values: Mapping[str, Any]) -> str:
    """Returns the ``config.json`` entry of a program's quantization, or an empty string."""
    keys = ("quantization_config", "compression_config")
    return next((f"{key} is {value!r:.120}" for key in keys if (value := values.get(key)) is not None), "")


def _write_rope(config: GPTConfig) -> dict[str, Any]:
    """Returns the RoPE frequencies in the keys of Transformers 5, and in the older keys that other programs read."""
    scaling = None
    if config.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low,
            "high_freq_factor": config.rope_scaling.high,
            "original_max_position_embeddings": config.rope_scaling.original,
        }
    return {
        "rope_theta": config.rope_base,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_base},
    }


def _write_window(config: GPTConfig) -> dict[str, Any]:
    windows, has_windows = config.windows, any(config.windows)
    window = config.window if has_windows else None
    if config.layout == "mistral":
        return {"sliding_window": window}
    if config.layout not in _QWENS:
        return {}
    # Readers without support for layer_types use the window in layer max_window_layers and all later layers.
    first_windowed = next((layer for layer, each in enumerate(windows) if each), len(windows))
    return {
        "use_sliding_window": has_windows,
        "sliding_window": window,
        "max_window_layers": first_windowed if all(windows[first_windowed:]) else len(windows),
        "layer_types": [_SLIDING if each else _FULL for each in windows],
    }


def from_hf_config(values: Mapping[str, Any], where: str) -> GPTConfig:
    """Returns the shape in a Transformers ``config.json``. Raises `UserError` for another model type, an unsupported
    computation, or an invalid number."""
    kind = values.get("model_type")
    if kind == OWN_TYPE:
        return checked(GPTConfig, {name: values.get(key) for name, key in _OWN_KEYS.items()}, where)
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(f"{where} describes a model of type {kind!r:.80}", SUPPORTED)
    try:
        return _from_family(kind, FAMILIES[kind], values)
    except UserError as error:
        raise UserError(f"{where}: {error.message}", error.hint or SUPPORTED) from None


def _from_family(kind: str, family: Family, values: Mapping[str, Any]) -> GPTConfig:
    for key, allowed in (_NEUTRAL_VALUES | dict(family.fixed)).items():
        if values.get(key, allowed[0]) not in allowed:
            raise UserError(f"{key} is {values[key]!r:.80}; this decoder supports only {allowed[0]!r}")
    if kind == "gpt2" and "n_positions" not in values:
        values = {**values, **({"n_positions": values["n_ctx"]} if "n_ctx" in values else {})}
    values = {**family.defaults, **values}
    _require(values, [config_key for config_key in family.names.values() if config_key not in family.defaults])
    settings = {
        field_name: values[config_key] for field_name, config_key in family.names.items() if config_key in values
    }
    if kind == "gpt2":
        return GPTConfig(**{**family.properties, **settings})
    config = GPTConfig(**{**family.properties, **settings, **_read_rope(values)})
    window, layers = _read_window(kind, values, config.n_layer)
    return replace(config, window=window, window_layers=layers if window else None)


def _require(values: Mapping[str, Any], keys: list[str]) -> None:
    missing = [key for key in keys if key not in values]
    if missing:
        raise UserError(f"it has no {', '.join(missing)}")


def _read_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the RoPE frequencies from either key, or from both if they agree."""
    forms = [{}] if not any(map(values.get, _ROPE_KEYS)) else [values[key] for key in _ROPE_KEYS if values.get(key)]
    results = [_read_rope_form(form, values) for form in forms]
    if results[0] != results[-1]:
        raise UserError("rope_scaling and rope_parameters contradict each other")
    return results[0]


def _read_rope_form(form: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(form, dict) or any(isinstance(table, dict) for table in form.values()):
        raise UserError(f"rope_parameters is {form!r:.80}; this decoder supports only one set for all layers")
    rope_type = form.get("rope_type", form.get("type", "default"))
    bases = [table["rope_theta"] for table in (form, values) if table.get("rope_theta") is not None]
    if rope_type not in ("default", "llama3"):
        raise UserError(f"rope_type is {rope_type!r:.80}; this decoder supports only default and llama3")
    if form.get("partial_rotary_factor", 1) not in _NEUTRAL_VALUES["partial_rotary_factor"]:
        raise UserError(f"partial_rotary_factor is {form['partial_rotary_factor']!r:.80}; the only one supported is 1")
    if len(bases) == 2 and bases[0] != bases[1]:
        raise UserError(f"rope_theta is both {bases[0]!r:.80} and {bases[1]!r:.80}")
    base = bases[0] if bases else _ROPE_THETA
    if rope_type == "default":
        return {"rope_base": base}
    _require(form, ["factor", "low_freq_factor", "high_freq_factor"])
    length_key = "original_max_position_embeddings"
    length = values.get(length_key, form.get(length_key, values["max_position_embeddings"]))
    scaling = RopeScaling(form["factor"], form["low_freq_factor"], form["high_freq_factor"], length)
    return {"rope_base": base, "rope_scaling": scaling}


def _read_window(kind: str, values: Mapping[str, Any], n_layer: int) -> tuple[Any, tuple[int, ...]]:
    """Returns the sliding window, or None for full attention, and the layers with a window."""
    window, layers, types = values.get("sliding_window", _WINDOW), tuple(range(n_layer)), values.get("layer_types")
    if kind in _QWENS:
        if (is_used := values.get("use_sliding_window", False)) not in (True, False):
            raise UserError(f"use_sliding_window is {is_used!r:.80}; it must be true or false")
        first = values.get("max_window_layers", _MAX_WINDOW_LAYERS)
        if type(first) is not int or first < 0:
            raise UserError(f"max_window_layers is {first!r:.80}; it must be a whole number")
        window, layers = window if is_used else None, layers[first:]
    elif kind == "llama":
        window = values.get("sliding_window")
        if window is not None:
            raise UserError(f"sliding_window is {window!r:.80}; llama does not support it")
    if types is None:
        return window, layers
    if not isinstance(types, list) or len(types) != n_layer or any(each not in (_FULL, _SLIDING) for each in types):
        raise UserError(f"layer_types is {types!r:.80}; it must name {_FULL} or {_SLIDING} for each layer")
    sliding_layers = tuple(layer for layer, each in enumerate(types) if each == _SLIDING)
    if (sliding_layers and window is None) or (kind == "mistral" and window is not None and sliding_layers != layers):
        raise UserError("layer_types and sliding_window contradict each other")
    return window, sliding_layers
