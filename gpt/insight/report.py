"""The report of a run: its curves, settings and samples, and what the samples copy from the training text."""

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from gpt.config import events
from gpt.config.settings import checked
from gpt.corpus.shards import Side
from gpt.corpus.token_folder import TokenFolder
from gpt.documents.sources import MANIFEST, is_token_folder
from gpt.insight.copying import MAX_IDS, Copied, find_copies
from gpt.insight.passages import TrainingText
from gpt.insight.yardsticks import Trend, Yardsticks, describe, find_trend, measure
from gpt.runs import folder
from gpt.runs.record import RECORD, RunRecord
from gpt.system.errors import UserError
from gpt.system.files import LINES_LIMIT, file_sha256, open_regular, read_lines, reading
from gpt.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gpt.insight.before_after import BeforeAfter

STEP_KEYS = ("step", "tokens", "seconds", "loss", "lr", "grad_norm", "tokens_per_second", "mfu")
EVAL_KEYS = ("step", "tokens", "seconds", "val_loss")
Columns = dict[str, list[float | None]]


@dataclass
class History:
    """The events of a run, without its teachers, and without what a rollback or resume undid."""

    steps: list[events.StepEvent] = field(default_factory=list)
    evals: list[events.EvalEvent] = field(default_factory=list)
    samples: list[events.SampleEvent] = field(default_factory=list)
    frames: list[events.FrameEvent] = field(default_factory=list)
    rollbacks: list[events.RollbackEvent] = field(default_factory=list)
    resumes: list[events.ResumeEvent] = field(default_factory=list)
    end: events.EndEvent | None = None
    unread: int = 0  # lines that are not events: truncated, or of a later version

    def add(self, event: events.Event) -> None:
        """Adds the next event. A repeated step means that the run was rolled back or resumed."""
        match event:
            case events.StepEvent():
                self._drop_after(event.step - 1)
                self.steps.append(event)
            case events.EvalEvent():
                self._drop_after(event.step)
                _remove_after(self.evals, event.step - 1)
                self.evals.append(event)
            case events.SampleEvent():
                self.samples.append(event)
            case events.FrameEvent():
                _remove_after(self.frames, event.step - 1)
                self.frames.append(event)
            case events.RollbackEvent():
                self._drop_after(event.step)
                self.rollbacks.append(event)
            case events.ResumeEvent():
                self._drop_after(event.step)
                self.resumes.append(event)
            case events.TeacherEvent():  # What follows is about another model.
                vars(self).update(vars(History(unread=self.unread)))
            case events.EndEvent():
                self.end = event

    def _drop_after(self, step: int) -> None:
        if self.steps and self.steps[-1].step > step:
            _remove_after(self.steps, step)
            _remove_after(self.evals, step)
            _remove_after(self.samples, step)
            _remove_after(self.frames, step)
        self.end = None

    @property
    def best(self) -> events.EvalEvent | None:
        """The evaluation with the lowest held-out loss."""
        measured = (each for each in self.evals if math.isfinite(each.val_loss))
        return min(measured, key=lambda each: each.val_loss, default=None)

    @property
    def trend(self) -> Trend | None:
        """Whether the held-out loss still falls."""
        return find_trend(
            [(each.step, each.loss) for each in self.steps], [(each.step, each.val_loss) for each in self.evals]
        )


def _remove_after(events: list[Any], step: int) -> None:
    while events and events[-1].step > step:
        events.pop()


def read_history(run: Path) -> History:
    """Reads ``metrics.jsonl``. Raises `UserError` if it is missing or has no steps."""
    path, history = run / folder.METRICS, History()
    if not path.exists():
        message = f"the run {run} has no metrics: {folder.METRICS} is missing"
        raise UserError(message, "it stopped before its first step")
    with reading(path), open_regular(path, limit=LINES_LIMIT) as file:
        for line in read_lines(file):
            try:
                history.add(events.from_json(line))
            except UserError:
                history.unread += 1
    if not history.steps and not history.evals:
        raise UserError(f"the run {run} has no metrics: {path} contains no steps", "wait for its first one")
    return history


def read_held_out_losses(run: Path, max_points: int = 200) -> list[tuple[float, float]]:
    """Returns a run's held-out losses, each with the seconds since the first event. Skips most other lines of the
    metrics, which can be many. Returns nothing if the metrics are missing or damaged."""
    history, start = History(), math.inf
    with contextlib.suppress(UserError, OSError), open_regular(run / folder.METRICS, limit=LINES_LIMIT) as file:
        for line in read_lines(file):
            if math.isinf(start) or line.startswith((b'{"event": "eval"', b'{"event": "teacher"')):
                event = events.from_json(line)
                history.add(event)
                start = min(start, event.seconds)
    points = [(each.seconds - start, each.val_loss) for each in history.evals if math.isfinite(each.val_loss)]
    return points[:: 1 + len(points) // max_points]


@dataclass(frozen=True)
class Copying:
    """The spans that each sample shares with the training text."""

    samples: list[Copied]
    texts: list[str]  # the longest span of each sample
    pieces: list[list[dict[str, Any]]]  # each sample in pieces; copied ones have their passages
    compared: int  # training tokens compared
    trained: int  # training tokens in total


@dataclass(frozen=True)
class Report:
    """A run for display. ``copying`` is None if the training tokens are gone or were not kept, as with ``--pairs``."""

    path: Path
    record: RunRecord
    history: History
    copying: Copying | None
    before_after: "BeforeAfter | None" = None

    @property
    def name(self) -> str:
        """The run folder's name."""
        return self.path.resolve().name

    @property
    def bits_per_nat(self) -> float | None:
        """The factor from a held-out loss in nats per token to bits per byte, from the final evaluation."""
        end = self.history.end
        return finite(end.bits_per_byte / end.val_loss) if end and end.bits_per_byte and end.val_loss else None

    @property
    def yardsticks(self) -> Yardsticks | None:
        """The yardsticks of the held-out text, in bits per byte. None before the first step."""
        return stored_yardsticks(self.record)

    @property
    def verdict(self) -> str:
        """A sentence that ranks the model among the yardsticks and says whether more training helps, if known."""
        end = self.history.end
        return describe(end.bits_per_byte if end else None, self.yardsticks, self.trend)

    @property
    def trend(self) -> Trend | None:
        """Whether the held-out loss still falls. None with teachers, because they change the shape of the curve."""
        return None if self.record.is_taught else self.history.trend

    @property
    def held_out(self) -> tuple[Any, ...]:
        """What identifies the held-out text: its file, or the sources, and how much of them is held out."""
        record, settings = self.record, self.record.settings or {}
        if settings.get("val_text"):
            return (settings["val_text"],)
        sources = sorted(str(source.get("sha256")) for source in record.sources or [])
        return (*sources, settings.get("val_fraction"), settings.get("split_on"), settings.get("field"))

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved settings as one flat table: text, shape, training and machine."""
        record = self.record
        resolved = {"model": {}, **(record.resolved or {})}
        shape = resolved.pop("model")
        own_teachers, _ = resolved.pop("own_teachers", None), resolved.pop("budget", None)
        flat = {**(shape if isinstance(shape, dict) else {}), **resolved}
        return {
            "text": ", ".join(record.texts or []) or None,
            "init": record.init and record.init.model,
            "teachers": own_teachers.get("count") if isinstance(own_teachers, dict) else None,
            "tokenizer": record.tokenizer and record.tokenizer.name,
            "train_tokens": record.tokens and record.tokens.train,
            "held_out_tokens": record.tokens and record.tokens.held_out,
            **{key: str(value) if isinstance(value, dict) else value for key, value in flat.items()},
            "device": record.compute and record.compute.device,
            "dtype": record.compute and record.compute.dtype,
            "threads": record.compute and record.compute.threads,
            "started": record.started or None,
        }

    def columns(self, max_rows: int | None = None) -> tuple[Columns, Columns]:
        """Returns steps and evaluations as columns. Averages steps into at most ``max_rows`` rows. Unknown and
        non-finite numbers are None."""
        steps, evals = average_rows(self.history.steps, max_rows), [vars(event) for event in self.history.evals]
        return _columns(steps, (*STEP_KEYS, *self.scores)), _columns(evals, (*EVAL_KEYS, *self.scores))

    @property
    def scores(self) -> tuple[str, ...]:
        """What the run logs besides the loss, of preferences or answers."""
        last = [*self.history.steps[-1:], *self.history.evals[-1:]]
        return tuple(name for name in events.REWARDS if any(getattr(event, name) is not None for event in last))

    @property
    def loss_unit(self) -> str:
        """The unit of the loss."""
        units = {"margin": "nats per preference", "reward": "minus the reward"}
        return next((unit for name, unit in units.items() if name in self.scores), "nats per token")


def average_rows(steps: Sequence[events.StepEvent], max_rows: int | None) -> list[dict[str, Any]]:
    """Averages consecutive steps into at most ``max_rows`` rows. Step, tokens and seconds are those of a row's last
    step. Other values are means of the row's finite values."""
    size = 1 if max_rows is None else -(-len(steps) // max_rows)
    rows = []
    for start in range(0, len(steps), max(1, size)):
        group = [vars(step) for step in steps[start : start + size]]
        means = {key: _mean([row.get(key) for row in group]) for key in (*STEP_KEYS[3:], *events.REWARDS)}
        rows.append({key: group[-1][key] for key in STEP_KEYS[:3]} | means)
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    finite_values = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite_values) / len(finite_values) if finite_values else None


def _columns(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Columns:
    return {key: [finite(row[key]) for row in rows] for key in keys}


def finite(value: float | None) -> float | None:
    """Returns a finite number, or None."""
    return value if value is not None and math.isfinite(value) else None


def find_differing_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the settings that differ between runs, in order."""
    keys = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]


def report(run: Path, on_progress: Callable[[int, int], None] = lambda done, total: None) -> Report:
    """Reads a run, finished or not. ``on_progress`` is called with the training tokens compared so far and their total.
    Raises `UserError` if there are no metrics, or if ``run.json`` is damaged."""
    folder.check_run(run)
    record, history = RunRecord.read(run), read_history(run)
    tokens = training_tokens(run, record)
    return Report(run, record, history, None if tokens is None else _copying(history, tokens, on_progress))


@dataclass(frozen=True)
class RunSummary:
    """A run in the list of ``gpt runs``. A member is None if it is not known."""

    name: str
    text: str | None
    parameters: int | None
    bits_per_byte: float | None
    verdict: str
    started: str | None  # UTC time
    bytes: int  # of all its files


def summarize(run: Path) -> RunSummary:
    """Reads a run's summary. If it has not finished, or its record is damaged, the verdict says so."""
    size = 0
    for parent, _, names in os.walk(run):
        for name in names:
            with contextlib.suppress(OSError):  # A run that is training deletes files.
                size += Path(parent, name).lstat().st_size
    try:
        record = RunRecord.read(run)
    except UserError:
        return RunSummary(run.name, None, None, None, f"{RECORD} is damaged", None, size)
    result = record.result or {}
    parameters, bits = result.get("parameters"), result.get("bits_per_byte")
    bits = float(bits) if isinstance(bits, int | float) else None
    verdict = describe(bits, stored_yardsticks(record), stored_trend(record)) if result else "unfinished"
    text, count = ", ".join(record.texts or []) or None, parameters if isinstance(parameters, int) else None
    return RunSummary(run.name, text, count, bits, verdict, record.started or None, size)


def stored_yardsticks(record: RunRecord) -> Yardsticks | None:
    """Returns the yardsticks in a run's record, or None if there are none or they are damaged."""
    with contextlib.suppress(UserError):
        return checked(Yardsticks, record.yardsticks, RECORD)
    return None


def stored_trend(record: RunRecord) -> Trend | None:
    """Returns the trend in a run's record, or None if there is none."""
    trend = (record.result or {}).get("trend")
    return next((known for known in get_args(Trend) if known == trend), None)


def find_yardsticks(
    run: Path, text: TokenFolder, side: Side, tokens_per_byte: float
) -> tuple[Yardsticks | None, Trend | None]:
    """Returns the yardsticks of one ``side`` of ``text``. Those of the run's held-out text are stored, and returned
    with its trend. Without a run or its training tokens, xz compresses the text alone."""
    train = None
    with contextlib.suppress(UserError, OSError):
        record = RunRecord.read(run)
        tokens = training_tokens(run, record)
        is_own = tokens is not None and [*map(Path.resolve, tokens.paths)] == [*map(Path.resolve, text.paths)]
        if is_own and side == "val" and (stored := stored_yardsticks(record)):
            return stored, stored_trend(record)
        if tokens is not None and not (is_own and side == "train"):
            train = tokens.stream("train")
    return measure(text.tokenizer, text.stream(side), train, tokens_per_byte), None


def training_tokens(run: Path, record: RunRecord) -> TokenFolder | None:
    """Returns the training tokens in a run's folder, or in the unchanged token folders that its record names."""
    try:
        if is_token_folder(run / "tokens"):
            return TokenFolder(run / "tokens")
        paths = {Path(str(source["name"])): source["sha256"] for source in record.sources or []}
        if not paths or not all(map(is_token_folder, paths)):
            return None
        if any(file_sha256(path / MANIFEST) != sha256 for path, sha256 in paths.items()):
            return None
        return TokenFolder(*paths)
    except (UserError, OSError, KeyError, TypeError):  # Without tokens, the report still has curves.
        return None


def find_training_tokens(checkpoint: Path, tokenizer: Tokenizer) -> TokenFolder:
    """Returns the training tokens of the run that contains a checkpoint. Raises `UserError` if there are none."""
    run = checkpoint.absolute().parent
    tokens = training_tokens(run, RunRecord.read(run)) if folder.is_run(run) else None
    if tokens is None or not tokens.adopt_tokenizer(tokenizer) or not tokens.stream("train"):
        hint = "leave out --with-text, or give a run with its tokens; pairs and conversations leave none"
        raise UserError(f"the training tokens of {checkpoint} are not there", hint)
    return tokens


def _copying(history: History, tokens: TokenFolder, on_progress: Callable[[int, int], None]) -> Copying:
    tokenizer, stream = tokens.tokenizer, tokens.stream("train")
    ids = [tokenizer.encode(sample.text).tolist() for sample in history.samples]
    copies = find_copies(ids, stream, on_progress) if ids else []
    samples = list(zip(ids, copies, strict=True))
    texts = [tokenizer.decode(ids[copy.start : copy.start + copy.longest]) for ids, copy in samples]
    training = TrainingText(tokens)
    pieces = [training.split(ids, copy) for ids, copy in samples]
    return Copying(copies, texts, pieces, min(len(stream), MAX_IDS), len(stream))
