"""What a user may ask of ``gpt bench``. Imports no torch."""

from dataclasses import dataclass

from gpt.settings import check_options, option


@dataclass(frozen=True)
class BenchConfig:
    """What ``gpt bench`` measures. Raises `UserError` for values that mean nothing."""

    prompt_tokens: int = option(32, "Tokens of each prompt.", panel="Text", low=1)
    new_tokens: int = option(128, "Tokens that are written after it.", panel="Text", flags=("-n",), low=1)
    batch: int = option(1, "Texts at once.", panel="Text", low=1)
    rounds: int = option(3, "Times that all of it is done; medians are shown.", panel="Text", low=1)

    def __post_init__(self) -> None:
        check_options(self)
