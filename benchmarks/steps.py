"""Where a token's time goes: a step of the engine, taken apart. `benchmarks.decode` runs it as its part ``steps``.

The operators of one step are recorded with their arguments, and played again one after the other, each timed by the
clock: in the step's order, so that weights come from memory as they do in it, and without the Python between them. What
real steps, which take turns with these, need beyond that is calls. A profiler would add to each operator about what a
short one takes.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpt.api import LanguageModel
from gpt.decoding.bench import bandwidth_of
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request
from gpt.decoding.weights import weight_bytes
from gpt.sample_config import SampleConfig

WARM, ROUNDS, STEPS = 48, 5, 8  # steps before the recorded one; then so many times so many real and replayed steps
GROUPS = ("products", "attention and cache", "other arithmetic", "views", "choice")
_PRODUCTS = ("linear", "pack_mm", "::mm", "::addmm", "::addmv", "::mv")
_ATTENTION = ("attention", "bmm", "softmax", "copy_", "index_put", "index_copy", "cat", "scatter")


class Recorder(TorchDispatchMode):
    """Records operators and their arguments; ``within`` says whether they are the model's or the choice's."""

    def __init__(self) -> None:
        super().__init__()
        self.within = False
        self.calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls an operator and records it."""
        self.calls.append((group(func) if self.within else "choice", func, args, kwargs or {}))
        return func(*args, **kwargs or {})


def group(func: Any) -> str:
    """Returns which part of a step an operator of the model is."""
    name = func.name()
    if func.is_view or name.startswith("aten::empty"):
        return "views"
    if any(part in name for part in _ATTENTION):
        return "attention and cache"
    return "products" if any(part in name for part in _PRODUCTS) else "other arithmetic"


class Steps:
    """Steps of ``rows`` greedy texts after short prompts; ``model_seconds`` are what the last step's calls of the model
    took."""

    def __init__(self, model: LanguageModel, rows: int) -> None:
        new = WARM + ROUNDS * STEPS + 3
        context = Context(model.model, model.compute, rows, 32 + new)
        self.recorder: Recorder | None = None
        self.model_seconds = 0.0
        for name in ("forward", "logits"):
            setattr(context, name, self._timed(getattr(context, name)))
        self.engine = Engine(context, ends=())
        config = SampleConfig(greedy=True, max_tokens=new, ignore_eot=True)
        for row in range(rows):
            self.engine.add(Request([(7 * at + row) % 250 for at in range(32)], config))

    def _timed(self, work: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def timed(*args: Any) -> torch.Tensor:
            if self.recorder is not None:
                self.recorder.within = True
            started = time.perf_counter()
            out = work(*args)
            self.model_seconds += time.perf_counter() - started
            if self.recorder is not None:
                self.recorder.within = False
            return out

        return timed

    def step(self) -> tuple[float, float]:
        """Returns the seconds of a step, and those of the model in it."""
        self.model_seconds = 0.0
        started = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - started, self.model_seconds

    def record(self) -> Recorder:
        """Records a step."""
        with Recorder() as self.recorder:
            self.engine.step()
        recorder, self.recorder = self.recorder, None
        return recorder


@torch.inference_mode()
def replay(recorder: Recorder) -> dict[str, float]:
    """Calls the operators of a step again and returns the seconds of each group."""
    seconds = dict.fromkeys(GROUPS, 0.0)
    for name, func, args, kwargs in recorder.calls:
        started = time.perf_counter()
        func(*args, **kwargs)
        seconds[name] += time.perf_counter() - started
    return seconds


def split(model: LanguageModel, rows: int) -> dict[str, float]:
    """Returns the medians of a step's seconds and of its parts: `GROUPS`, but for views, ``calls`` and ``host``."""
    torch.set_flush_denormal(True)  # an operator that changes its argument in place does so in every replay
    steps = Steps(model, rows)
    for _ in range(WARM):
        steps.step()
    recorder = steps.record()
    real, again = list[tuple[float, float]](), list[dict[str, float]]()
    for _ in range(ROUNDS):
        real += [steps.step() for _ in range(STEPS)]
        again += [replay(recorder) for _ in range(STEPS)]
    whole, inside = (statistics.median(each) for each in zip(*real, strict=True))
    found = {name: statistics.median(each[name] for each in again) for name in GROUPS}
    found.pop("views")
    computed = sum(found.values()) - found["choice"]
    return {"step": whole, **found, "calls": inside - computed, "host": whole - inside - found["choice"]}


def table(models: Iterator[tuple[str, LanguageModel]], rows: tuple[int, ...]) -> Iterator[str]:
    """Yields a table of each model's steps, in milliseconds."""
    yield (
        "| weights | texts | a step | weights' products | their bytes at memory's speed | attention, cache | "
        "norms, activations, rounding | choice | calls | host |"
    )
    yield "|---|" + "---:|" * 9
    for name, model in models:
        for count in rows:
            least = weight_bytes(model.model, model.compute) / bandwidth_of(model.compute)
            found = split(model, count)
            parts = [found["step"], found["products"], least, *list(found.values())[2:]]
            yield f"| {name} | {count} | {' | '.join(f'{1e3 * each:.2f}' for each in parts)} |"
