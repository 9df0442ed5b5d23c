"""The output of a run: ``run.json``, ``metrics.jsonl``, TensorBoard, and notes for the user."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from gpt.config import events
from gpt.config.events import format_seconds
from gpt.insight.yardsticks import MIN_COMPARED_BYTES, describe, is_overfitted
from gpt.model.decoder import GPT
from gpt.model.loss import bits_per_byte
from gpt.model.params import breakdown
from gpt.runs import folder
from gpt.runs.record import Resumed, RunRecord
from gpt.system.files import disk_errors
from gpt.system.words import counted
from gpt.training.context import Result, RunContext, now, versions
from gpt.training.logs import Metrics, Speed, TensorBoard
from gpt.training.recipe import Recipe, estimate_seconds
from gpt.training.state import TrainState

FEW_BYTES = 10_000  # A model of a shorter text writes hardly a word.


class Journal:
    """The output of a run on rank 0. Nothing is written until `open`."""

    def __init__(self, run: RunContext, state: TrainState) -> None:
        self.run, self.state, self.note, self.recipe = run, state, run.session.note, run.recipe
        self.record: RunRecord | None = None
        self.metrics: Metrics | None = None
        self.board: TensorBoard | None = None

    def start_cycle(self, recipe: Recipe, model: GPT) -> None:
        """Reports steps of this ``model`` from now on. Describes the run first, before its steps are compiled."""
        self.recipe, self.speed = recipe, Speed.of(model, recipe, self.run.compute, self.run.world.size)
        if self.record is None:
            self.describe(sum(p.numel() for p in model.parameters() if p.requires_grad))

    def open(self, resolved: dict[str, Any]) -> None:
        """Writes ``run.json`` with the ``resolved`` recipe, and opens the logs."""
        run, record, step = self.run, self.run.record, self.state.step
        if step == 0:
            yardsticks = asdict(measured) if (measured := run.data.measure_yardsticks()) else None
            record = replace(record, compute=run.machine(), versions=versions(), yardsticks=yardsticks)
        if step or run.changes:
            record = replace(record, resumed=[*record.resumed, Resumed(now(), step, dict(run.changes))])
        self.record = replace(record, ended=None, result=None)
        self.write(resolved=resolved)
        self.metrics = Metrics(run.path, run.session.warn, self.state.metrics_bytes)
        if run.log == "tensorboard":
            self.board = TensorBoard(run.path, vars(self.record), self.note, step)

    def write(self, **changes: Any) -> None:
        """Updates ``run.json``."""
        if self.record is not None:
            self.record = replace(self.record, **changes)
            with disk_errors(self.run.path, folder.INTACT_HINT):
                self.record.write(self.run.path)

    def emit(self, kind: Callable[..., events.Event], step: int | None = None, **values: Any) -> None:
        """Sends an event to the logs and the listener."""
        if self.metrics is None:
            return
        step = self.state.step if step is None else step
        values = {"seconds": self.elapsed(), **values}
        event = kind(step=step, tokens=step * self.recipe.batch_tokens, **values)
        self.metrics.write(events.to_json(event))
        if self.board is not None:
            self.board(event)
        self.run.session.listen(event)

    def elapsed(self) -> float:
        """The seconds of all commands so far."""
        return round(time.perf_counter() - self.run.start_time, 3)

    def close(self) -> None:
        """Closes the logs."""
        if self.metrics is not None:
            self.metrics.close()
        if self.board is not None:
            self.board.close()

    def describe(self, adapters: int) -> None:
        """Notes the model, the length of the run, the device and the sharding."""
        run, recipe, shape, world = self.run, self.run.recipe, self.run.recipe.model, self.run.world
        step, epochs = self.state.step, recipe.steps * recipe.batch_tokens / run.data.tokens
        steps = "about " * recipe.is_timed + counted(recipe.steps, "step")
        processes = f"{world.size} processes, each on " if world.size > 1 else ""
        duration = ""
        if recipe.budget:
            duration = f" ({format_seconds(recipe.budget.total)} in all)"
        elif not step and (seconds := estimate_seconds(recipe, run.compute.device.type, run.compute.dtype_name)) > 30:
            duration = f" (about {format_seconds(seconds)} on two cores)"
        self.note(
            f"model {run.record.init.model if run.record.init else recipe.preset}: "
            f"{breakdown(shape).trainable:,} parameters ({counted(shape.n_layer, 'layer')}, "
            f"{counted(shape.n_head, 'head')}, {shape.n_embd} wide, context {shape.block_size}, "
            f"dropout {shape.dropout:g})"
        )
        if recipe.lora_rank:
            self.note(f"adapters on the linear layers of the blocks: training {adapters:,} parameters")
        self.note(
            f"{steps} of {counted(recipe.batch_tokens, 'token')}, {epochs:.1f} times the text{duration}, "
            f"on {processes}{run.compute.describe()}; run {run.path}" + (f"; from step {step:,}" if step else "")
        )
        if not run.init and not run.data.rows and run.data.bytes < FEW_BYTES:
            size = counted(run.data.bytes, "byte")
            self.note(f"the text has only {size}: expect letters and broken words; for sentences, give a megabyte")
        if recipe.is_sharded:
            self.note("weights, gradients and optimizer state are sharded")

    def step(self, step: int, lr: float, loss: float, norm: float, scores: Mapping[str, float]) -> None:
        """Reports a step. ``scores`` are those of preferences or answers."""
        speed = self.speed.rates(step * self.recipe.batch_tokens, self.state.step_seconds)
        self.emit(events.StepEvent, step, loss=loss, lr=lr, grad_norm=norm, **speed, **scores)

    def report_sample(self, text: str) -> None:
        """Reports a sample, with a sentence that ranks the newest held-out loss among the yardsticks."""
        data, loss, verdict = self.run.data, self.state.measured_loss, ""
        if self.metrics is not None and loss is not None and data.held_out_bytes >= MIN_COMPARED_BYTES:
            bits = bits_per_byte(loss * data.held_out_targets, data.held_out_bytes)
            verdict = describe(bits, data.measure_yardsticks(), None)
        self.emit(events.SampleEvent, text=text, prompt=data.prompt, verdict=verdict)

    def report_save(self, step: int) -> None:
        """Reports a checkpoint that is complete on disk."""
        self.emit(events.SaveEvent, checkpoint=folder.step_name(step))

    def end(self, result: Result, reason: str) -> Result:
        """Reports and records the result of the run. Returns it with its duration."""
        best, state = int(result.checkpoint.name.partition("-")[2]), self.state
        self.emit(events.SampleEvent, best, text=result.sample, prompt=result.prompt, verdict=result.verdict)
        if best != state.step:
            is_worse = is_overfitted(state.measured_loss or 0.0, state.best_loss or 0.0)
            what = "overfitted after" if is_worse else "the held-out loss was lowest at"
            latest = f"-m {self.run.path}:latest has the last step's weights"
            self.note(f"{what} step {best:,}; that checkpoint is used ({latest})")
        result = replace(result, seconds=self.elapsed())
        values: dict[str, Any] = {key: getattr(result, key) for key in ("val_loss", "bits_per_byte", "seconds")}
        self.emit(events.EndEvent, reason=reason, checkpoint=result.checkpoint.name, **values)
        self.write(ended=reason, result=result.record())
        return result

    def report_early_end(self, reason: str) -> None:
        """Reports that the run ended early."""
        self.emit(events.EndEvent, reason=reason, checkpoint=None, val_loss=None, bits_per_byte=None)
