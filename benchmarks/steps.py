"""Measures the parts of an engine step, for the part ``steps`` of `benchmarks.decode`.

Records the operators of a step, then replays them in order and times each. In this order, weights are read from memory
as in a real step. The rest of a real step's time is call overhead and the engine's bookkeeping. A profiler would add as
much time to each operator as a short operator takes.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.results import Table
from gpt.api import LanguageModel
from gpt.config.sample import SampleConfig
from gpt.decoding.bench import measure_bandwidth
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request
from gpt.decoding.weights import weight_bytes

WARM_UP_STEPS, ROUNDS, STEPS = 48, 5, 8  # Each round times STEPS steps and STEPS replays.
GROUPS = ("products", "attention and cache", "other arithmetic", "views", "selection")
NOTES = (
    "Milliseconds per step of the engine.",
    "*Selection*: from logits to an id. *Call overhead*: what a real step takes beyond its replayed operators. *Host*: "
    "the engine's bookkeeping.",
)
_PRODUCTS = ("linear", "pack_mm", "::mm", "::addmm", "::addmv", "::mv")
_ATTENTION = ("attention", "bmm", "softmax", "copy_", "index_put", "index_copy", "cat", "scatter")


class Recorder(TorchDispatchMode):
    """Records operators with their arguments. ``in_model`` is True inside the model, False in token selection."""

    def __init__(self) -> None:
        super().__init__()
        self.in_model = False
        self.calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls an operator and records it."""
        self.calls.append((find_group(func) if self.in_model else "selection", func, args, kwargs or {}))
        return func(*args, **kwargs or {})


def find_group(func: Any) -> str:
    """Returns the `GROUPS` entry of a model operator."""
    name = func.name()
    if func.is_view or name.startswith("aten::empty"):
        return "views"
    if any(part in name for part in _ATTENTION):
        return "attention and cache"
    return "products" if any(part in name for part in _PRODUCTS) else "other arithmetic"


class Steps:
    """Engine steps for ``rows`` greedy texts. ``model_seconds`` is the model's time in the last step."""

    def __init__(self, model: LanguageModel, rows: int) -> None:
        new = WARM_UP_STEPS + ROUNDS * STEPS + 3
        context = Context(model.model, model.compute, rows, 32 + new)
        self.recorder: Recorder | None = None
        self.model_seconds = 0.0
        for name in ("forward", "logits"):
            setattr(context, name, self._time_calls(getattr(context, name)))
        self.engine = Engine(context, ends=())
        config = SampleConfig(greedy=True, max_tokens=new, ignore_eot=True)
        for row in range(rows):
            self.engine.add(Request([(7 * at + row) % 250 for at in range(32)], config))

    def _time_calls(self, work: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def timed_work(*args: Any) -> torch.Tensor:
            if self.recorder is not None:
                self.recorder.in_model = True
            start_time = time.perf_counter()
            out = work(*args)
            self.model_seconds += time.perf_counter() - start_time
            if self.recorder is not None:
                self.recorder.in_model = False
            return out

        return timed_work

    def step(self) -> tuple[float, float]:
        """Runs a step; returns its seconds and the model's seconds."""
        self.model_seconds = 0.0
        start_time = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - start_time, self.model_seconds

    def record(self) -> Recorder:
        """Records a step."""
        with Recorder() as self.recorder:
            self.engine.step()
        recorder, self.recorder = self.recorder, None
        return recorder


@torch.inference_mode()
def replay(recorder: Recorder) -> dict[str, float]:
    """Replays recorded operators; returns the seconds of each group."""
    seconds = dict.fromkeys(GROUPS, 0.0)
    for name, func, args, kwargs in recorder.calls:
        start_time = time.perf_counter()
        func(*args, **kwargs)
        seconds[name] += time.perf_counter() - start_time
    return seconds


def measure_parts(model: LanguageModel, rows: int) -> dict[str, float]:
    """Returns the median seconds of a step and its parts: ``calls``, ``host``, and `GROUPS` except views."""
    torch.set_flush_denormal(True)  # Repeated in-place operators can produce denormals.
    steps = Steps(model, rows)
    for _ in range(WARM_UP_STEPS):
        steps.step()
    recorder = steps.record()
    step_times, replays = list[tuple[float, float]](), list[dict[str, float]]()
    for _ in range(ROUNDS):
        step_times += [steps.step() for _ in range(STEPS)]
        replays += [replay(recorder) for _ in range(STEPS)]
    step_seconds, model_seconds = (statistics.median(values) for values in zip(*step_times, strict=True))
    parts = {name: statistics.median(values[name] for values in replays) for name in GROUPS}
    parts.pop("views")
    computed = sum(parts.values()) - parts["selection"]
    return {
        "step": step_seconds,
        **parts,
        "calls": model_seconds - computed,
        "host": step_seconds - model_seconds - parts["selection"],
    }


def make_table(models: Iterable[tuple[str, LanguageModel]], rows: tuple[int, ...]) -> Table:
    """Returns a table of step times in milliseconds, for each batch size in ``rows``."""
    table_rows = []
    for name, model in models:
        for count in rows:
            read_seconds = weight_bytes(model.model, model.compute) / measure_bandwidth(model.compute)
            parts = measure_parts(model, count)
            seconds = [parts["step"], parts["products"], read_seconds, *list(parts.values())[2:]]
            table_rows.append([name, str(count), *(f"{1e3 * value:.2f}" for value in seconds)])
    columns = [
        "weights", "texts", "step", "matrix products", "reading the weights", "attention and cache",
        "norms, activations, rounding", "selection", "call overhead", "host",
    ]  # fmt: skip
    return Table(columns, table_rows)
