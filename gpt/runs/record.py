"""``run.json``: a run's given and resolved settings, its machine, and its result."""

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, get_args

from gpt.config.settings import Count, Within, checked
from gpt.config.train import DEVICE, MAX_THREADS, Dtype
from gpt.system.errors import UserError
from gpt.system.files import read_json, to_json, write_file

RECORD = "run.json"
FORMAT = 1
Scalar = str | int | float | bool | None
Table = dict[str, Scalar]
Shape = dict[str, Scalar | list[int] | dict[str, int | float]]  # a `GPTConfig`


@dataclass(frozen=True)
class Machine:
    """The properties of a run's device that affect rounding."""

    device: str
    dtype: str
    threads: Annotated[int, Within(1, MAX_THREADS)]
    processes: Annotated[int, Within(1, 2**20)] = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(DEVICE, self.device):
            raise UserError(f"there is no device {self.device[:40]!r}")
        if self.dtype not in get_args(Dtype):
            raise UserError(f"there is no dtype {self.dtype[:40]!r}")


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer of a run."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class TokenCounts:
    """The number of training and held-out tokens."""

    train: Count
    held_out: Count


@dataclass(frozen=True)
class StartRecord:
    """The model that a run was fine-tuned from: the user's name for it, its folder, and its weight files' checksums."""

    model: str
    path: str
    sha256: dict[str, str]


@dataclass(frozen=True)
class Resumed:
    """When a run was resumed, from which step, and with which options."""

    at: str
    step: Count
    given: Table = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """The content of ``run.json``. A member is None if it is not known yet."""

    format: int | None = None
    started: str = ""  # UTC time, in a format that sorts
    texts: list[str] | None = None
    settings: dict[str, Scalar | list[str]] | None = None  # a `TrainConfig`
    size: str | None = None  # the preset, if it was chosen for ``--minutes``
    resolved: dict[str, Scalar | Shape] | None = None  # a `Recipe`; None before the first step
    compute: Machine | None = None
    versions: dict[str, str] | None = None  # software versions
    tokenizer: TokenizerRecord | None = None
    tokens: TokenCounts | None = None
    sources: list[Table] | None = None  # input files with checksums
    init: StartRecord | None = None
    yardsticks: Table | None = None  # `Yardsticks` of the held-out text, measured before the first step
    resumed: list[Resumed] = field(default_factory=list)
    ended: str | None = None  # reason for the end
    result: dict[str, Scalar | Table] | None = None  # a `Result`

    @property
    def is_taught(self) -> bool:
        """Whether the run learns from teachers."""
        return bool((self.resolved or {}).get("own_teachers"))

    @classmethod
    def read(cls, run: Path) -> "RunRecord":
        """Reads a run's record. Raises `UserError` if it is damaged."""
        return checked(cls, read_json(run / RECORD), str(run / RECORD))

    def write(self, run: Path) -> None:
        """Writes ``run.json`` atomically. Raises OSError."""
        values = asdict(self).items()
        members = {key: value for key, value in values if value is not None and (value or key != "resumed")}
        write_file(run / RECORD, to_json(members))
