"""Reads prompts from a file of JSON lines, and writes samples into one that a later call completes."""

import codecs
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpt.errors import UserError, did_you_mean
from gpt.words import as_json

KEY = "prompt"
BEGINS = b'{"prompt_index": '  # how a sample's line begins


def parse_prompts(lines: Iterable[bytes], where: str) -> list[str]:
    """Returns the prompts of ``lines``, each ``{"prompt": …}``; empty lines are left out. Raises `UserError` with the
    number of a wrong line."""
    prompts = []
    for number, line in enumerate(lines, 1):
        line = line.removeprefix(codecs.BOM_UTF8)  # of the file, or of one that was appended
        if not line.strip():
            continue
        values = _object(line, f"{where}, line {number}")
        for key in values:
            if key != KEY:
                raise UserError(f'{where}, line {number}: unknown key "{key}"', did_you_mean(key, [KEY]))
        if not isinstance(values.get(KEY), str):
            raise UserError(f'{where}, line {number} has no text "{KEY}"', 'a line is {"prompt": "Once upon"}')
        prompts.append(values[KEY])
    if not prompts:
        raise UserError(f"{where} contains no prompt", 'a line is {"prompt": "Once upon"}')
    return prompts


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8"))
        json.dumps(values, ensure_ascii=False).encode("utf-8")  # half a surrogate pair is no character
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start:,}") from None
    except UnicodeEncodeError:
        raise UserError(f"{where} has an unpaired surrogate escape", "surrogates must come in pairs") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}", 'a line is {"prompt": "Once upon"}') from None
    if not isinstance(values, dict):
        raise UserError(f"{where} is not a JSON object", 'a line is {"prompt": "Once upon"}')
    return values


class Results:
    """A file of samples, a line of JSON each, to which samples are added. An existing file is resumed: ``done`` are its
    samples (prompt, index), ``seed`` is theirs, and a last line that was cut off is removed.

    Raises `UserError` for a file that holds something else or samples of other prompts or seeds, or cannot be written.
    """

    def __init__(self, path: Path, prompts: Sequence[str]) -> None:
        self.path = path
        self.done: set[tuple[int, int]] = set()
        self.seed: int | None = None
        self.count = 0  # of its lines
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}", "choose another file") from None
        try:
            self._read(prompts)
        except BaseException:
            self._file.close()
            raise

    def _read(self, prompts: Sequence[str]) -> None:
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):  # the last, cut off
                if not line.startswith(BEGINS[: len(line)]):
                    raise UserError(f"{self.path}, line {number} is not a sample", "choose another file")
                break
            self._take(line, f"{self.path}, line {number}", prompts)
            whole += len(line)
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)

    def _take(self, line: bytes, where: str, prompts: Sequence[str]) -> None:
        values = _object(line, where)
        try:
            number, index, prompt, seed = (values[key] for key in ("prompt_index", "index", KEY, "seed"))
        except KeyError as error:
            raise UserError(f"{where} is not a sample: it has no {error}", "choose another file") from None
        known = isinstance(number, int) and 0 <= number < len(prompts) and prompts[number] == prompt
        if not known or not isinstance(index, int):
            raise UserError(f"{where} is a sample for another prompt", "choose another file, or give the same prompts")
        if self.done and seed != self.seed:
            raise UserError(f"{where} has seed {seed}; earlier lines have {self.seed}", "choose another file")
        self.done.add((number, index))
        self.count += 1
        self.seed = seed

    def add(self, values: Mapping[str, Any]) -> None:
        """Writes and flushes a sample."""
        self._file.write(as_json(values).encode() + b"\n")
        self._file.flush()
        self.count += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
