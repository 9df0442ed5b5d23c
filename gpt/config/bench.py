"""The settings of ``gpt bench``. Imports no torch."""

from dataclasses import dataclass, replace

from gpt.config.settings import check_options, option
from gpt.system.errors import UserError

_PROMPT, _NEW = 32, 128  # Default lengths in tokens, if they fit in the context.


@dataclass(frozen=True)
class BenchConfig:
    """The settings of ``gpt bench``. Raises `UserError` for invalid values."""

    prompt_tokens: int | None = option(
        None, "Prompt length in tokens", panel="Text", shown="32, or a quarter of the context", low=1
    )
    new_tokens: int | None = option(
        None, "Tokens to generate", panel="Text", flags=("-n",), shown="128, or what fits", low=1
    )
    batch: int = option(1, "Sequences per batch", panel="Text", low=1, high=2**16)
    rounds: int = option(3, "Repetitions; medians are reported", panel="Text", low=1, high=1000)

    def __post_init__(self) -> None:
        check_options(self)

    def fitted(self, block_size: int) -> "BenchConfig":
        """Returns a copy whose token counts fit in the context. Raises `UserError` if the requested counts do not."""
        prompt = self.prompt_tokens or max(1, min(_PROMPT, block_size // 4))
        generated = self.new_tokens or max(1, min(_NEW, block_size - prompt))
        if prompt + generated > block_size:
            message = f"{prompt} + {generated} tokens do not fit in the context of {block_size:,}"
            raise UserError(message, "leave out --prompt-tokens or --new-tokens to use what fits")
        return replace(self, prompt_tokens=prompt, new_tokens=generated)
