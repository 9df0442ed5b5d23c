"""Reads prompts from JSON Lines."""

import codecs
import json
from collections.abc import Iterable
from typing import Any

from gpt.system.errors import UserError, did_you_mean

KEY = "prompt"


def parse_prompts(lines: Iterable[bytes], source: str) -> list[str]:
    """Returns the prompts of lines ``{"prompt": …}``. Skips empty lines. Raises `UserError` for an invalid line, or if
    there is no prompt."""
    prompts = []
    for number, line in enumerate(lines, 1):
        line = line.removeprefix(codecs.BOM_UTF8)  # In concatenated files, any line can have a BOM.
        if not line.strip():
            continue
        values = _parse_object(line, f"{source}, line {number}")
        for key in values:
            if key != KEY:
                raise UserError(f'{source}, line {number}: unknown key "{key}"', did_you_mean(key, [KEY]))
        if not isinstance(values.get(KEY), str):
            raise UserError(f'{source}, line {number} has no text "{KEY}"', 'a line is {"prompt": "Once upon"}')
        prompts.append(values[KEY])
    if not prompts:
        raise UserError(f"{source} contains no prompt", 'a line is {"prompt": "Once upon"}')
    return prompts


def _parse_object(line: bytes, source: str) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8"))
        json.dumps(values, ensure_ascii=False).encode("utf-8")  # Fails for an unpaired surrogate.
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start:,}") from None
    except UnicodeEncodeError:
        raise UserError(f"{source} has an unpaired surrogate escape", "surrogates must come in pairs") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not JSON: {error}", 'a line is {"prompt": "Once upon"}') from None
    if not isinstance(values, dict):
        raise UserError(f"{source} is not a JSON object", 'a line is {"prompt": "Once upon"}')
    return values
