"""Reads prompts from JSON Lines, and writes samples to a JSON Lines file that a later call can resume."""

import codecs
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt.system.errors import UserError, did_you_mean
from gpt.system.words import as_json

KEY = "prompt"
SAMPLE_START = b'{"prompt_index": '


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


class Results:
    """A JSON Lines file of samples. Resumes an existing file, and removes a truncated last line. ``done`` has the
    (prompt, index) pairs of the file's samples, and ``seed`` has their seed.

    Raises `UserError` if the file is not writable, or has other contents, other prompts or several seeds.
    """

    def __init__(self, path: Path, prompts: Sequence[str]) -> None:
        self.path = path
        self.done: set[tuple[int, int]] = set()
        self.seed: int | None = None
        self.count = 0  # Number of lines.
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}", "choose another file") from None
        try:
            self._read(prompts)
        except BaseException:
            self.close()
            raise

    def _read(self, prompts: Sequence[str]) -> None:
        self._file.seek(0)
        valid_bytes = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):  # The last line is truncated.
                if not line.startswith(SAMPLE_START[: len(line)]):
                    raise UserError(f"{self.path}, line {number} is not a sample", "choose another file")
                break
            self._add_line(line, f"{self.path}, line {number}", prompts)
            valid_bytes += len(line)
        self._file.truncate(valid_bytes)
        self._file.seek(0, os.SEEK_END)

    def _add_line(self, line: bytes, source: str, prompts: Sequence[str]) -> None:
        values = _parse_object(line, source)
        try:
            number, index, prompt, seed = (values[key] for key in ("prompt_index", "index", KEY, "seed"))
        except KeyError as error:
            raise UserError(f"{source} is not a sample: it has no {error}", "choose another file") from None
        is_known_prompt = isinstance(number, int) and 0 <= number < len(prompts) and prompts[number] == prompt
        if not is_known_prompt or not isinstance(index, int):
            raise UserError(f"{source} is a sample for another prompt", "choose another file, or give the same prompts")
        if self.done and seed != self.seed:
            raise UserError(f"{source} has seed {seed}; earlier lines have {self.seed}", "choose another file")
        self.done.add((number, index))
        self.count += 1
        self.seed = seed

    def add(self, values: Mapping[str, Any]) -> None:
        """Appends a sample and flushes."""
        self._file.write(as_json(values).encode() + b"\n")
        self._file.flush()
        self.count += 1

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
