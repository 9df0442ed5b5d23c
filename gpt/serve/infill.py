"""Prompts with fill-in-the-middle tokens, as llama.cpp's server builds them."""

from collections.abc import Sequence

from gpt.serve.protocol import ApiError, Gap
from gpt.tokenizers.gguf_vocabulary import FIM_ENDS, FIM_WORDS
from gpt.tokenizers.tokenizer import Tokenizer

MAX_AROUND = 2048  # Maximum ids before and after the gap, as with llama.cpp's default batch size.


def find_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the fill-in-the-middle tokens by llama.cpp's names. Raises `ApiError` if there are none."""
    words = {**tokenizer.words, **tokenizer.all_specials}
    found = {name: [words[text] for text in texts if text in words] for name, texts in FIM_WORDS.items()}
    tokens = {name: ids[0] for name, ids in found.items() if ids}
    if not {"fim_pre", "fim_suf", "fim_mid"} <= tokens.keys():
        raise ApiError(400, "suffix is not supported: this model has no fill-in-the-middle tokens", "suffix")
    return tokens


def find_end_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the fill-in-the-middle tokens that end a text."""
    return frozenset(id for name, id in find_tokens(tokenizer).items() if name in FIM_ENDS)


def fill(tokenizer: Tokenizer, prefix: str | Sequence[int], gap: Gap, context_length: int) -> list[int]:
    """Returns the prompt for the text between ``prefix`` and the suffix of ``gap``."""

    def encode(text: str | Sequence[int]) -> list[int]:
        return list(tokenizer.encode(text).tolist() if isinstance(text, str) else text)

    tokens = find_tokens(tokenizer)
    others = [tokens["fim_rep"], *encode("myproject\n")] if "fim_rep" in tokens else []
    for name, text in gap.files:
        others += (
            [tokens["fim_sep"], *encode(f"{name}\n")] if "fim_sep" in tokens else encode("\n\n--- snippet ---\n\n")
        )
        others += encode(text)
    if "fim_sep" in tokens:
        others += [tokens["fim_sep"], *encode("filename\n")]
    before, start, after = encode(prefix), encode(gap.start), encode(gap.suffix)
    if gap.cuts:
        quarter = min(MAX_AROUND, context_length // 2) // 4
        before, after = before[-3 * quarter :], after[: max(0, quarter - 2 - len(start))]
        others = others[-(context_length // 4) :]
    opening = [] if tokenizer.bos is None else [tokenizer.bos]
    before = [*opening, *others, tokens["fim_pre"], *before, *start]
    return [*before, tokens["fim_suf"], *after, tokens["fim_mid"]]
