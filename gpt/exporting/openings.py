"""The first words of lines of the training text, which a web page offers as prompts."""

from pathlib import Path

from gpt.corpus.openings import choose_openings
from gpt.insight.report import find_training_tokens
from gpt.system.errors import UserError
from gpt.tokenizers.tokenizer import Tokenizer


def find_openings(path: Path, tokenizer: Tokenizer, count: int) -> list[str]:
    """Returns up to ``count`` openings from places spread over the training text of the checkpoint at ``path``. Returns
    none if the run's tokens are gone or were not kept, as with pairs and conversations."""
    try:
        return choose_openings(find_training_tokens(path, tokenizer).stream("train"), tokenizer, count) if count else []
    except UserError:  # The page works without prompts.
        return []
