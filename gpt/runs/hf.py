"""The one table between our names and the GPT-2 layout of transformers: configuration, weights, tokenizer.

A checkpoint of ours is such a folder, and such a folder is a checkpoint to us; nothing is exported.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt.config import GPTConfig
from gpt.errors import UserError
from gpt.runs import folder
from gpt.text.tokenizer import END_OF_TEXT, GPT2_FINGERPRINT, GPT2_PATTERN, Tokenizer

PREFIX = "transformer."  # before every name but the unembedding's, in what transformers saves today
UNEMBEDDING = "lm_head.weight"
# transformers keeps these transposed, (in, out): its GPT-2 computes x W where torch's Linear computes x Wᵀ.
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


def to_hf_config(config: GPTConfig, eot: int) -> dict[str, Any]:
    """``config.json`` for `transformers.GPT2LMHeadModel`. A sine table is stored as ``wpe``, like a learned one."""
    values = {theirs: getattr(config, ours) for ours, theirs in _NAMES.items()}
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


def load_config(path: Path) -> GPTConfig:
    """The shape of the model in a checkpoint folder; `UserError` where it is of another kind. Opens no weights."""
    config = from_hf_config(folder.read_json(path / "config.json"), str(path / "config.json"))
    if (path / folder.META).exists():  # GPT-2's layout has no word for a table that is fixed
        config = replace(config, positions=folder.read_json(path / folder.META).get("positions", ""))
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
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (config.vocab_size, c), "wpe.weight": (config.block_size, c)}
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
    return shapes | {"ln_f.weight": (c,), "ln_f.bias": (c,)}


def byte_characters() -> dict[int, str]:
    """The printable character that GPT-2's files write for each byte: itself where it is printable and no space,
    else the next free one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs that make each token of two bytes or more, in merging order: what is left of the token's bytes when
    all merges of lower rank are done. tiktoken merges whatever pair makes the lowest rank, so these say the same."""
    pairs = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = [bytes([byte]) for byte in token]
            while len(parts) > 2:
                best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
                if ranks.get(parts[best] + parts[best + 1], rank) >= rank:
                    break
                parts[best : best + 2] = [parts[best] + parts[best + 1]]
            if len(parts) == 2:  # others cannot be reached by merging
                pairs.append((parts[0], parts[1]))
    return pairs


def to_tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """``tokenizer.json``, with which the tokenizers library gives the same ids."""
    characters = byte_characters()

    def written(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    by_rank = sorted(tokenizer.ranks.items(), key=lambda item: item[1])
    level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    pre = level
    if tokenizer.pattern != GPT2_PATTERN:
        split = {
            "type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False,
        }  # fmt: skip
        pre = {"type": "Sequence", "pretokenizers": [split, level | {"use_regex": False}]}
    eot = {
        "id": tokenizer.eot, "content": tokenizer.eot_token, "single_word": False,
        "lstrip": False, "rstrip": False, "normalized": False, "special": True,
    }  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [eot],
        "normalizer": None,
        "pre_tokenizer": pre,
        "post_processor": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {written(token): rank for token, rank in by_rank} | {tokenizer.eot_token: tokenizer.eot},
            "merges": [f"{written(a)} {written(b)}" for a, b in merges(tokenizer.ranks)],
        },
    }


def to_tokenizer_config(tokenizer: Tokenizer, block_size: int) -> dict[str, Any]:
    """``tokenizer_config.json``. Only GPT-2's own pattern may say GPT2Tokenizer: transformers 5 would put that pattern
    in the place of another."""
    gpt2 = tokenizer.pattern == GPT2_PATTERN
    return {
        "tokenizer_class": "GPT2Tokenizer" if gpt2 else "PreTrainedTokenizerFast",
        "bos_token": tokenizer.eot_token,
        "eos_token": tokenizer.eot_token,
        "unk_token": tokenizer.eot_token,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": block_size,
    }


def from_tokenizer_json(values: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer in a ``tokenizer.json``, where it is a byte-level BPE that tiktoken can run with the same ids.

    Raises `UserError` naming what it has that we cannot.
    """
    try:
        model = values["model"]
        if model.get("type", "BPE") != "BPE" or values.get("normalizer") is not None:
            raise UserError(f"{where}: only a byte-level BPE without normalizer can be run here")
        pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
        added = {token["content"]: token["id"] for token in values.get("added_tokens") or []}
        return _from_vocab(model["vocab"], pairs, added, _pattern(values.get("pre_tokenizer"), where), where)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{where} is no tokenizer of the tokenizers library: {type(error).__name__} {error}") from None


def from_vocab_and_merges(vocab: Mapping[str, int], merges_text: str, where: str) -> Tokenizer:
    """The tokenizer in the older pair ``vocab.json`` and ``merges.txt``, with GPT-2's pattern."""
    lines = [line for line in merges_text.split("\n") if line and not line.startswith("#version")]
    return _from_vocab(vocab, [tuple(line.split(" ")) for line in lines], {}, GPT2_PATTERN, where)


def _pattern(pre: Any, where: str) -> str:
    """The pattern of a pre-tokenizer: ByteLevel's own, or a Split before it."""
    steps = pre.get("pretokenizers", []) if isinstance(pre, dict) and pre.get("type") == "Sequence" else [pre]
    kinds = [step.get("type") if isinstance(step, dict) else None for step in steps]
    if kinds == ["ByteLevel"] and not steps[0].get("add_prefix_space") and steps[0].get("use_regex", True):
        return GPT2_PATTERN
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("add_prefix_space") and not steps[1].get("use_regex", True):
        regex = steps[0].get("pattern", {}).get("Regex")
        if isinstance(regex, str) and steps[0].get("behavior") == "Isolated" and not steps[0].get("invert"):
            return regex
    raise UserError(f"{where}: its pre-tokenizer {json.dumps(pre)[:120]} is not one that can be run here")


def _from_vocab(
    vocab: Mapping[str, int],
    pairs: list[tuple[str, ...]],
    added: Mapping[str, int],
    pattern: str,
    where: str,
) -> Tokenizer:
    characters = byte_characters()
    bytes_of = {character: byte for byte, character in characters.items()}
    special = {**{k: v for k, v in vocab.items() if k == END_OF_TEXT}, **added}
    if len(special) != 1:
        raise UserError(
            f"{where} has {len(special)} special tokens; GPT-2's one, {END_OF_TEXT}, is what can be run here"
        )
    eot_token, eot = next(iter(special.items()))
    try:
        ranks = {bytes(bytes_of[c] for c in token): rank for token, rank in vocab.items() if token != eot_token}
        in_order = [ranks[bytes(bytes_of[c] for c in "".join(pair))] for pair in pairs]
    except (KeyError, TypeError):
        raise UserError(f"{where}: its tokens are not written in GPT-2's byte characters") from None
    if in_order != sorted(in_order) or not all(type(rank) is int for rank in ranks.values()):
        raise UserError(f"{where}: its merges are in another order than its ids; tiktoken cannot run such a vocabulary")
    tokenizer = Tokenizer("bpe", pattern, ranks, eot, eot_token)
    if tokenizer.fingerprint == GPT2_FINGERPRINT:
        return replace(tokenizer, name="gpt2")
    # tiktoken merges whatever pair makes a token, the tokenizers library the listed pairs alone.
    written = [
        ("".join(map(characters.__getitem__, a)), "".join(map(characters.__getitem__, b))) for a, b in merges(ranks)
    ]
    if written != pairs:
        raise UserError(
            f"{where}: its merges are not those that its tokens imply; tiktoken cannot run such a vocabulary"
        )
    return tokenizer
