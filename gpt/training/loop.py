"""The loop: steps, and after each what is due, until a run has come to its end."""

import dataclasses
import math
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from gpt import events
from gpt.errors import Interrupted, PeerLost, WorkError, device_failure
from gpt.files import disk_errors
from gpt.interrupt import Stopped, StopSignal, interruption
from gpt.model.params import breakdown
from gpt.runs import checkpoint, folder
from gpt.runs.record import Resumed, RunRecord
from gpt.text.batches import Int64s
from gpt.training import logs
from gpt.training.best import Best, mean_loss, read_best, sample_lines
from gpt.training.guard import LOWER, Guard
from gpt.training.keeping import Keeper, size_of
from gpt.training.learner import make_learner
from gpt.training.metrics import Metrics
from gpt.training.opening import Setting, describe
from gpt.training.pace import END_SECONDS, PROBE_SECONDS, PROBE_SHARE, Pace
from gpt.training.recipe import Recipe
from gpt.training.record import now, run_record
from gpt.training.result import Result
from gpt.training.saving import check_room, said
from gpt.training.schedule import lr_at
from gpt.training.speed import Speed
from gpt.training.state import Saved, TrainState, read_snapshot, seed_all
from gpt.training.step import Outcome, Stepper

EVAL_SHARE, EVAL_TOKENS = 0.005, (4096, 32_768)  # held-out tokens of a periodic evaluation: of all, within bounds


@dataclass(frozen=True)
class Pending:
    """A step that was begun, and maybe not computed yet."""

    step: int
    lr: float
    outcome: Outcome


class Trainer:
    """The parts of a run and what is done with them."""

    def __init__(self, setting: Setting, recipe: Recipe, saved: Saved | None = None, path: Path | None = None) -> None:
        """``saved`` and ``path``: the checkpoint that the run goes on from."""
        self.setting, self.recipe = setting, recipe
        self.run, self.data, self.compute, self.start = setting.run, setting.data, setting.compute, setting.start
        self.listen, self.note, self.began = setting.listen, setting.note, setting.began
        self.world = setting.world
        seed_all(recipe.seed)
        self.learner = learner = make_learner(recipe, self.compute, self.world, self.start, path)
        self.model, self.optimizer = learner.model, learner.optimizer
        self.stepper = Stepper(
            self.model, self.optimizer, self.compute, recipe, self.on_halved, self.world, learner.sharded
        )
        self.speed = Speed.of(self.model, recipe, self.compute, self.world.size)
        self.record: RunRecord | None = None
        if recipe.compile:
            self.compile()
        self.batches = self.data.batches(recipe)
        self.tokenizer_files = checkpoint.TokenizerFiles(self.data.tokenizer, recipe.model)
        tokens = min(max(EVAL_TOKENS[0], round(EVAL_SHARE * recipe.steps * recipe.batch_tokens)), EVAL_TOKENS[1])
        self.state = TrainState(windows=max(1, tokens // recipe.model.block_size))
        self.guard = Guard(recipe.model.vocab_size, self.state)
        self.pace: Pace | None = None  # where the run ends at a time
        self.pending: Pending | None = None  # the step that a GPU may still compute
        self.signum = 0  # the signal that one of the processes has heard
        if saved is not None and path is not None:
            before = read_snapshot(path, saved, learner)
            vars(self.state).update(vars(before.restore(learner.own, self.optimizer, self.stepper.scaler)))
        self.held_out = self.data.some_windows(recipe.model.block_size, self.state.windows)

    def open(self, record: RunRecord, log: str, given: Mapping[str, Any] | None = None) -> None:
        """Writes ``run.json``, looks for room, and says what is to be done."""
        self.metrics: Metrics | None = None
        if self.world.first:
            self._open_files(record, log, given)
        self.keeper = Keeper(
            self.setting, self.learner, self.stepper.scaler, self.state, self.metrics, self.tokenizer_files,
            self.recipe.keep, self.on_saved,
        )  # fmt: skip
        self.saver = self.keeper.saver
        for line in describe(self.setting, self.recipe, self.model, self.state.step):
            self.note(line)
        self.listen(events.Plan(self.recipe.steps, self.recipe.batch_tokens))

    def _open_files(self, record: RunRecord, log: str, given: Mapping[str, Any] | None) -> None:
        if self.state.step == 0:
            record = run_record(record, self.recipe, self.compute, self.data, self.start, self.world.size)
        else:
            again = Resumed(now(), self.state.step, dict(given or {}))
            record = replace(record, resumed=[*record.resumed, again])
        self.record = replace(record, ended=None, result=None)
        check_room(self.run, size_of(self.learner, self.tokenizer_files))
        self.change()
        self.metrics = Metrics(self.run, self.setting.warn, self.state.metrics_bytes)
        self.logs = logs.Logs(log, self.run, vars(self.record), self.note, self.state.step)

    def train(self, stop: StopSignal) -> Result:
        """All that is left to do, until the end, the end of patience, or a signal."""
        stop.at_once, self.stop = False, stop
        try:
            with self.world.watching_peers():
                self.run_steps()
                return self.finish()
        except Stopped:
            self.end_by_signal()
        except BaseException as error:
            if not isinstance(error, Interrupted):  # what is being written becomes whole
                self.saver.wait()
            if isinstance(error, PeerLost):
                error.hint = f"go on with: {self.command}"
            if (failure := device_failure(error)) is not None:
                message = f"the device {self.compute.device} has failed: {failure}"
                raise WorkError(message, f"go on with: {self.command}") from error
            raise
        finally:
            if self.metrics is not None:
                self.metrics.close()
                self.logs.close()

    def run_steps(self) -> None:
        """Steps, and after each what is due."""
        if self.state.step == 0:
            self.state.first_step = time.perf_counter() - self.began
        else:
            self.emit(events.ResumeEvent, checkpoint=folder.step_name(self.state.step))
            self.saver.step = self.state.settled_step
        self.first_step = self.began + self.state.first_step
        ended = self.attend()
        self.keeper.remember()
        while not ended:
            self.step()
            if self.state.step == self.recipe.steps - self.recipe.decay:
                self.retime()
            ended = self.attend()

    def attend(self) -> bool:
        """What is due after a step: evaluation, sample, checkpoint. Whether the run has come to its end."""
        state, recipe = self.state, self.recipe
        self.saver.poll()
        if not self.told_to_stop() and not self.pauses():
            return False
        went_back = self.settle()
        if self.told_to_stop():
            raise Stopped
        if went_back:
            return False
        at_end = state.step == recipe.steps
        if state.settled_step == state.step:  # by the run before this one
            return at_end or self.out_of_patience()
        if state.bad_steps and not at_end:
            return False
        if self.due(recipe.eval_every) and self.held_out and not self.evaluate():
            return False  # it went back
        better = state.step > 0 and state.measured_step == state.step and state.evals_since_best == 0
        last = at_end or self.out_of_patience()
        if self.due(recipe.sample_every) and state.step and not last:
            with self.stepper.as_written():
                text = sample_lines(self.setting, self.model, self.compute, recipe.seed, self.stop)
            self.emit(events.SampleEvent, text=text)
        state.settled_step = state.step
        if last or better or (state.step and state.step % recipe.save_every == 0):
            self.save(last)
        return last

    def told_to_stop(self) -> bool:
        """Whether a signal has come, to whichever process."""
        self.signum = self.world.most(self.stop.signum or 0)
        return self.signum > 0

    def due(self, every: int) -> bool:
        """Whether what is done every so many steps is, after this one; at the end always, before the first step where
        there is something to measure."""
        step = self.state.step
        return step == self.recipe.steps or (every > 0 and step % every == 0 and (step > 0 or self.start is not None))

    def pauses(self) -> bool:
        """Whether there is more to do after this step than the next one."""
        recipe = self.recipe
        every = (recipe.steps, recipe.eval_every, recipe.save_every, recipe.sample_every)
        return any(n and self.state.step % n == 0 for n in every)

    def step(self) -> None:
        """One optimizer step. A GPU computes it while the one before is told and the next one is prepared."""
        recipe, state = self.recipe, self.state
        started = time.perf_counter()
        lr = state.rate_factor * lr_at(
            state.step + 1, peak=recipe.lr, warmup=recipe.warmup, steps=recipe.steps,
            decay=recipe.decay, schedule=recipe.schedule,
        )  # fmt: skip
        self.world.seed(recipe.seed, state.step)
        outcome = self.stepper.step(*self.batch(state.step), lr)
        state.step_seconds += time.perf_counter() - started
        if self.settle():  # went back, behind what was begun meanwhile
            return
        state.step += 1
        self.pending = Pending(state.step, lr, outcome)
        if outcome.arrived is None:  # nothing goes on beside this
            self.settle()

    def batch(self, step: int) -> tuple[Int64s, Int64s]:
        """This process's share of a step's inputs and targets."""
        return self.batches.global_batch(step, self.world.row, self.world.rows)

    def settle(self) -> bool:
        """Waits for the step under way, tells it and judges it; whether the run had to go back."""
        pending, self.pending = self.pending, None
        if pending is None:
            return False
        started = time.perf_counter()
        loss, norm = pending.outcome.read()
        self.state.step_seconds += time.perf_counter() - started
        self.guard.judge(loss, norm, self.stepper.scaled)
        self.emit(events.StepEvent, pending.step, loss=loss, lr=pending.lr, grad_norm=norm, **self.rates(pending.step))
        if self.guard.failed:
            self.roll_back(f"the loss became {loss:g} (gradient norm {norm:g})", pending.step, pending.lr)
            return True
        return False

    def compile(self) -> None:
        """Compiles; where that fails, the run goes on without."""
        started = time.perf_counter()
        try:
            self.stepper.compile()
        except Exception as error:  # whatever its layers raise
            if (stopped := interruption(error)) is not None:
                raise stopped from None
            self.stepper.uncompile()
            self.change(compile=False)
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.listen(events.Note(f"torch.compile failed, so the run goes on without it: {why:.200}", warning=True))
        else:
            self.note(f"compiled in {time.perf_counter() - started:.0f} s")

    def on_halved(self, micro_batch: int) -> None:
        """The memory was too small for what was computed at once."""
        self.note(f"out of memory: from here on {micro_batch:,} of {self.recipe.rows:,} sequences at once")
        self.change(micro_batch=micro_batch)

    def change(self, **resolved: Any) -> None:
        """Settles something anew, and records it."""
        self.recipe = replace(self.recipe, **resolved)
        self.write_record(resolved=dataclasses.asdict(self.recipe))

    def write_record(self, **more: Any) -> None:
        """Writes ``run.json`` with something more, once the folder is a run."""
        if self.record is not None:
            self.record = replace(self.record, **more)
            with disk_errors(self.run, folder.KEPT):
                self.record.write(self.run)

    def rehearse(self, minutes: float) -> Pace:
        """Measures how long steps and evaluations take here. What it leaves of weights is of no use."""
        seconds: list[float] = []
        started = time.perf_counter()
        enough = min(PROBE_SHARE * 60 * minutes, PROBE_SECONDS)
        while len(seconds) < 6 or self.world.decided(lambda: time.perf_counter() - started < enough):
            before = time.perf_counter()
            self.stepper.step(*self.batch(len(seconds)), 0.0).read()
            seconds.append(time.perf_counter() - before)
        some = self.held_out[: max(1, len(self.held_out) // 4)]
        before = time.perf_counter()
        if some:
            with self.stepper.as_written():
                mean_loss(self.world, self.model, some, self.compute, StopSignal())
        window = (time.perf_counter() - before) / max(1, len(some))
        targets = sum(len(each.y) - each.skipped for each in self.held_out) / max(1, len(self.held_out))
        whole = self.data.held_out_targets / max(1.0, targets)  # windows
        return Pace(
            deadline=self.began + 60 * minutes,
            step=sum(seconds[2:]) / len(seconds[2:]),  # the first ones allocate
            evaluations=self.recipe.steps / self.recipe.eval_every * window * len(self.held_out),
            end=1.5 * window * whole + END_SECONDS,  # it computes in float32
        )

    def retime(self) -> None:
        """Where the run ends at a time: as many steps of decay as fit into what is left, at the pace so far."""
        if self.pace is None:
            return
        now = time.perf_counter()
        steps = self.world.decided(partial(self.pace.steps_left, now, (now - self.first_step) / self.state.step))
        self.change(steps=self.state.step + steps, decay=steps)
        self.listen(events.Plan(self.recipe.steps, self.recipe.batch_tokens))

    def roll_back(self, why: str, failed: int, lr: float) -> None:
        """Goes back to the last good state, once, with a lower rate. Raises `WorkError` the second time."""
        state = self.state
        if state.rate_factor < 1:
            self.end_diverged(why, failed, lr)
        self.keeper.go_back(rate_factor=LOWER, step_seconds=state.step_seconds)
        self.emit(events.RollbackEvent, failed_step=failed, why=why, rate_factor=LOWER)
        self.note(f"{why} at step {failed:,}: back to step {state.step:,}, with {LOWER:g} times the rate")

    def evaluate(self) -> bool:
        """The loss on held-out windows, the same ones each time. Whether it is a number; else the run goes back."""
        state = self.state
        if state.measured_step == state.step:  # by the run before this one
            return True
        with self.stepper.as_written():
            loss = mean_loss(self.world, self.model, self.held_out, self.compute, self.stop)
        if not math.isfinite(loss):
            self.roll_back(f"the held-out loss became {loss}", state.step, self.recipe.lr)
            return False
        better = state.best_loss is None or loss < state.best_loss
        state.evals_since_best = 0 if better else state.evals_since_best + 1
        state.best_loss = loss if better else state.best_loss
        state.measured_step, state.measured_loss = state.step, loss
        self.emit(events.EvalEvent, val_loss=loss, best=better)
        if state.step == 0 and self.start:
            self.note(f"held-out loss of {self.start.asked} before the first step: {loss:.4f} nats a token")
        return True

    def save(self, last: bool = False) -> None:
        """A checkpoint of the run as it stands, written while training goes on; the ``last`` one while it waits."""
        if last:
            self.keeper.save_last(self.recipe, self.pace, lambda: self.stop.signum is not None)
        else:
            self.keeper.save(self.recipe, self.pace)

    def on_saved(self, step: int) -> None:
        """A checkpoint is whole on the disk."""
        self.emit(events.SaveEvent, checkpoint=folder.step_name(step))

    def finish(self) -> Result:
        """The best checkpoint, read back and measured, is what the run gives."""
        best = read_best(self.setting, self.recipe, self.stop)
        if self.recipe.merge_lora and self.world.first:
            merged = self.run / "merged"
            checkpoint.save(merged, best.model, self.tokenizer_files, {"val_loss": best.val_loss})
            self.note(f"merged: {merged}")
        self.emit(events.SampleEvent, text=best.text)
        self.tell_answers(best)
        reason = "patience" if self.state.step < self.recipe.steps else "steps"
        loss, bits = best.val_loss, best.bits_per_byte
        self.emit(events.EndEvent, reason=reason, checkpoint=best.path.name, val_loss=loss, bits_per_byte=bits)
        result = Result(
            run=self.run,
            checkpoint=best.path,
            steps=self.state.step,
            tokens_seen=self.recipe.tokens(self.state.step),
            val_loss=loss,
            bits_per_byte=bits,
            **self.rates(self.state.step),
            seconds=time.perf_counter() - self.began,
            parameters=breakdown(self.recipe.model).trainable,
            device=self.compute.device.type,
            dtype=self.compute.dtype_name,
            sample=best.text,
            prompt=self.data.prompt,
            answers=best.answers,
            held_out_answers=best.held_out_answers,
        )
        self.write_record(ended=reason, result=result.record())
        return result

    def tell_answers(self, best: Best) -> None:
        """How the best checkpoint answers the pairs, and that it is not the last one."""
        if best.answers is None:
            return
        held_out = {} if best.held_out_answers is None else vars(best.held_out_answers)
        counts = vars(best.answers) | {f"held_out_{key}": count for key, count in held_out.items()}
        self.emit(events.AnswersEvent, **counts)
        if best.path.name != folder.step_name(self.state.step):
            self.note(
                f"the loss of the held-out pairs was lowest at {best.path.name}, which is kept as the best; the last "
                f"step's weights: -m {self.run}:latest"
            )

    def end_by_signal(self) -> NoReturn:
        """Saves what there is and raises `Interrupted`; `WorkError` where the disk does not take it."""
        state = self.state
        self.told_to_stop()
        if state.step and self.world.decided(lambda: self.saver.step != state.step):
            self.save()
        self.world.follow()
        self.saver.wait()
        self.end("signal")
        if self.saver.failed is not None:
            raise WorkError(
                f"interrupted at step {state.step:,}, which could not be saved: {said(self.saver.failed)}",
                f"make room, then go on from the checkpoint before: {self.command}",
            )
        saved = f", saved in {self.run / folder.step_name(state.step)}" if state.step else ""
        raise Interrupted(
            self.signum,
            f"interrupted at step {state.step:,} of {self.recipe.steps:,}{saved}; go on with: {self.command}",
        )

    @property
    def command(self) -> str:
        """What goes on with the run."""
        return f"gpt train --resume {shlex.quote(str(self.run))}"

    def end_diverged(self, what: str, step: int, lr: float) -> NoReturn:
        """Stops a run that computes no numbers any more; what was saved before stays as it is."""
        self.world.follow()
        self.saver.wait()
        self.end("diverged")
        self.write_record(ended="diverged")
        before = folder.checkpoints(self.run)
        saved = f"the checkpoints in {self.run} are from before" if before else "nothing was saved yet"
        raise WorkError(f"{what} at step {step:,}, at a learning rate of {lr:.2g}", f"train with a lower --lr; {saved}")

    def end(self, reason: str) -> None:
        """The last line of the metrics of a run that was cut off."""
        self.emit(events.EndEvent, reason=reason, checkpoint=None, val_loss=None, bits_per_byte=None)

    def out_of_patience(self) -> bool:
        """Whether ``patience`` evaluations in a row were no better."""
        return 0 < self.recipe.patience <= self.state.evals_since_best

    def rates(self, step: int) -> dict[str, Any]:
        """Tokens a second of the steps alone, from the start, and MFU."""
        return self.speed.rates(self.recipe.tokens(step), self.state.step_seconds)

    def emit(self, kind: Callable[..., events.Event], step: int | None = None, **values: Any) -> None:
        """Tells the listener and ``metrics.jsonl``."""
        if self.metrics is None:
            return
        step = self.state.step if step is None else step
        event = kind(
            step=step,
            tokens=self.recipe.tokens(step),
            seconds=round(time.perf_counter() - self.began, 3),
            **values,
        )
        self.metrics.write(events.to_json(event))
        self.logs(event)
        self.listen(event)
