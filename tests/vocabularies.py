"""Small tokenizers in the formats of well-known families, as Transformers folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import make_text
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def _texts() -> list[str]:
    spaced = "".join(f"{space * n}word\n" for space in (" ", "\t", "\n") for n in range(1, 12))
    return [make_text(400), spaced * 3, "Zürich naïve 日本語 12 345 2024 🐕 it's WE'LL we've d'accord " * 9]


def _byte_level(size: int, specials: list[str], pre: list[Any]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pre) if len(pre) > 1 else pre[0]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in specials])
    return tokenizer


def _split_by(pattern: str) -> list[Any]:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _prepend_token(tokenizer: Tokenizer, word: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{word} $A", pair=f"{word} $A {word} $B", special_tokens=[(word, tokenizer.token_to_id(word))]
    )


def gpt2() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _byte_level(600, ["<|endoftext|>"], [pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer, {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}


def llama3() -> tuple[Tokenizer, dict[str, Any]]:
    """Returns a tokenizer with a merge for every pair that forms a token, and ``ignore_merges``."""
    tokenizer = _byte_level(700, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], _split_by(LLAMA3))
    values = json.loads(tokenizer.to_str())
    vocab = values["model"]["vocab"]
    merges = [
        ([token[:i], token[i:]], id)
        for token, id in sorted(vocab.items(), key=lambda item: item[1])
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab and id >= 256
    ]
    values["model"] |= {"merges": [pair for pair, _ in merges], "ignore_merges": True}
    tokenizer = Tokenizer.from_str(json.dumps(values))
    _prepend_token(tokenizer, "<|begin_of_text|>")
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "chat_template": TEMPLATE,
    }


def qwen() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _byte_level(700, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], _split_by(QWEN))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return tokenizer, {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }


def smollm2() -> tuple[Tokenizer, dict[str, Any]]:
    pre = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer = _byte_level(700, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pre)
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
    }


def gaps() -> tuple[Tokenizer, dict[str, Any]]:
    """Returns a tokenizer that, like SmolLM2's published one, has no tokens for the bytes its training text lacks."""
    tokenizer, config = smollm2()
    values = json.loads(tokenizer.to_str())
    missing_tokens = {chr(0xC0), chr(0xF5), chr(0xFF), "Ā", "ā", "Ă"}  # the bytes C0, F5, FF, 00, 01 and 02
    kept_tokens = [token for token in values["model"]["vocab"] if token not in missing_tokens]
    values["model"]["vocab"] = {token: id for id, token in enumerate(kept_tokens)}
    for id, token in enumerate(values["added_tokens"], len(kept_tokens)):
        token["id"] = id
    return Tokenizer.from_str(json.dumps(values)), config


def _sentencepiece(legacy: bool) -> Tokenizer:
    """Returns a SentencePiece BPE with byte fallback; ▁ marks a space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *bytes_], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = values["added_tokens"][:3]
    if legacy:
        prepend = {"type": "Prepend", "prepend": "▁"}
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        values |= {"normalizer": {"type": "Sequence", "normalizers": [prepend, replace]}, "pre_tokenizer": None}
    else:
        values["pre_tokenizer"] |= {"prepend_scheme": "first", "split": False}
    tokenizer = Tokenizer.from_str(json.dumps(values))
    strip = decoders.Strip(content=" ", left=1)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    _prepend_token(tokenizer, "<s>")
    return tokenizer


def llama2() -> tuple[Tokenizer, dict[str, Any]]:
    return _sentencepiece(legacy=True), {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"
    }  # fmt: skip


def mistral() -> tuple[Tokenizer, dict[str, Any]]:
    return _sentencepiece(legacy=False), {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"
    }  # fmt: skip


def unigram() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}


FORMS: dict[str, Callable[[], tuple[Tokenizer, dict[str, Any]]]] = {
    each.__name__: each for each in (gpt2, llama3, qwen, smollm2, gaps, llama2, mistral, unigram)
}
MODEL_TYPES = {"gpt2": "gpt2", "qwen": "qwen3", "mistral": "mistral"}


def write(form: str, folder: Path) -> Path:
    tokenizer, config = FORMS[form]()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES.get(form, "llama")}), encoding="utf-8")
    return folder
