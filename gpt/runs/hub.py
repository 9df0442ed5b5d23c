"""Downloads models from the Hugging Face Hub or the server in ``HF_ENDPOINT``: ``hf:NAME`` → a checkpoint folder.

Downloads configuration, safetensors, tokenizer and model card, never pickles. Uses Transformers' cache, which has one
folder per commit and works offline.
"""

import os
import sys
from pathlib import Path

from gpt.system.errors import UserError, WorkError, first_line
from gpt.system.files import in_home

PREFIX = "hf:"
CONFIG = ["config.json", "adapter_config.json"]  # configurations of a model and an adapter
FILES = [
    *CONFIG, "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "adapter_model.safetensors",
    "vocab.json",  # refused without a tokenizer.json
    "gpt.json", "checksums.json", "tokenizer.tiktoken",  # gpt's own checkpoint files
    "README.md",  # contains the license
]  # fmt: skip


def is_remote(model: str | None) -> bool:
    """Whether a model's name is a Hub name."""
    return model is not None and model.startswith(PREFIX)


def fetch(model: str, weights: bool = True) -> Path:
    """Returns the folder of ``hf:NAME`` or ``hf:NAME@REVISION`` (a branch, a tag or a commit; default: ``main``),
    downloading it if needed. Without ``weights``, downloads only the model's shape.

    Raises `UserError` if the Hub has no such model or denies access, and `WorkError` if it cannot be reached.
    """
    name, _, revision = model.removeprefix(PREFIX).partition("@")
    folder = Path(_snapshot(name, revision or "main", FILES if weights else CONFIG))
    if not any((folder / name).is_file() for name in CONFIG):
        raise UserError(f"{model} has no config.json: not a Transformers model", "gpt2, llama, mistral, qwen2 …")
    if weights and not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{model} has no weights as safetensors", "gpt never opens pickles; use a revision with safetensors"
        )
    return folder


def _snapshot(name: str, revision: str, files: list[str]) -> str:
    cache = in_home(".cache/huggingface")
    if str(cache) != os.path.expanduser("~/.cache/huggingface") and not os.environ.get("XDG_CACHE_HOME"):  # noqa: PTH111
        os.environ.setdefault("HF_HOME", str(cache))  # The library would use a folder called "~", or fail.
    import huggingface_hub as hub  # a slow import
    from huggingface_hub import constants, errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    full_name = f"{name}@{revision}" if revision != "main" else name
    endpoint = constants.ENDPOINT
    try:
        path: str = hub.snapshot_download(name, revision=revision, allow_patterns=files)
        return path
    except errors.HFValidationError:
        hint = "hf:OWNER/NAME, such as hf:openai-community/gpt2"
        raise UserError(f'"hf:{full_name}" is not a Hugging Face Hub model', hint) from None
    except errors.GatedRepoError:
        hint = f"request access at {endpoint}/{name}, then log in: hf auth login"
        raise UserError(f"{full_name} is gated: its owners must grant you access", hint) from None
    except errors.RevisionNotFoundError:
        raise UserError(
            f'{name} has no revision "{revision}"', "give a branch, a tag or a commit; the default is main"
        ) from None
    except errors.RepositoryNotFoundError:
        hint = "check its name (OWNER/NAME); if it is private, log in: hf auth login"
        raise UserError(f"{endpoint} has no model {name}", hint) from None
    except Exception as error:  # The connection, the server and the disk raise many types of errors.
        raise WorkError(
            f"{full_name} is not in the cache and could not be downloaded from {endpoint} ({_reason(error)})",
            "check the connection (HF_HUB_OFFLINE, HF_ENDPOINT), or give a local folder with its files",
        ) from None


def _reason(error: BaseException) -> str:
    """Returns the first line of the error's root cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
