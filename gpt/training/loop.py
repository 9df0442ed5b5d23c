"""The training loop: steps, and after each the evaluation, sample and checkpoint that are due."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from gpt import events
from gpt.device import Download
from gpt.errors import Interrupted, PeerLost, WorkError, device_failure
from gpt.evaluate import Window
from gpt.files import disk_errors
from gpt.interrupt import Stopped, StopSignal
from gpt.model.params import breakdown
from gpt.runs import checkpoint, folder
from gpt.runs.record import Resumed, RunRecord
from gpt.settings import checked
from gpt.training import logs
from gpt.training.budget import PROBE_SECONDS, PROBE_SHARE, PROBE_STEPS, SAVE_RATE, Costs, TimeBudget
from gpt.training.checkpointing import Checkpointer, check_room, error_text
from gpt.training.context import Result, RunContext, Session, now, versions
from gpt.training.data import Dataset
from gpt.training.evaluation import ASKED, Best, mean_loss, read_best, sample_lines, sample_seconds
from gpt.training.logs import Metrics, Speed
from gpt.training.parallel import Parallel
from gpt.training.recipe import Recipe
from gpt.training.state import TrainState, read_snapshot
from gpt.training.step import Stepper
from gpt.words import counted

EVAL_SHARE, EVAL_TOKENS = 0.005, (4096, 32_768)  # held-out tokens of a periodic evaluation: of all, within bounds
TOLERATED = 3  # bad steps in a row
LOWER = 0.3  # the factor of the learning rate after a rollback
LEARNED, LEARNED_STEPS = 0.01, 10  # nats per token, and steps in a row, of examples that are known by heart
MARGIN = 1.0  # nats per token: a loss so far above that of guessing has exploded


@dataclass(frozen=True)
class Pending:
    """A step that was launched, and maybe not computed yet."""

    step: int
    lr: float
    outcome: Download  # loss, in nats a token, and norm


class LossSpikeDetector:
    """Counts bad steps in a row in ``state``: those whose loss or gradient is not finite, or whose loss has
    exploded."""

    def __init__(self, vocab_size: int, state: TrainState) -> None:
        self.guessing = math.log(vocab_size)  # the loss of a model that knows nothing
        self.state = state

    def observe(self, loss: float, norm: float, scaled: bool) -> bool:
        """Judges a step. Returns whether there were too many bad ones in a row. An infinite gradient of a ``scaled``
        loss (float16) is the scaler's business."""
        finite = math.isfinite(loss) and (math.isfinite(norm) or scaled)
        self.state.has_learnt |= loss < self.guessing - MARGIN
        exploded = self.state.has_learnt and loss > self.guessing + MARGIN
        self.state.bad_steps = 0 if finite and not exploded else self.state.bad_steps + 1
        return self.state.bad_steps >= TOLERATED


class Trainer:
    """The training loop: steps, evaluation, checkpoints, rollback."""

    def __init__(self, run: RunContext, parallel: Parallel, budget: TimeBudget | None = None) -> None:
        """Makes everything ready for the next step of ``run``, writes ``run.json``, and says what will be done. The run
        ends at the time of ``budget``, if there is one."""
        self.run, self.parallel, self.budget, self.recipe = run, parallel, budget, run.recipe
        self.session, self.world, self.data = run.session, run.world, run.data
        self.model = parallel.model
        self.stepper = Stepper(parallel, self.recipe, self.on_halved, self.on_uncompiled)
        self.speed = Speed.of(self.model, self.recipe, run.compute, self.world.size)
        self.record: RunRecord | None = None
        if self.recipe.compile:
            self.compile()
        self.batches = self.data.batches(self.recipe)
        self.tokenizer_files = checkpoint.TokenizerFiles(self.data.tokenizer, self.recipe.saved_model)
        self.state = self.initial_state()
        self.spikes = LossSpikeDetector(self.recipe.model.vocab_size, self.state)
        self.pending: Pending | None = None  # the step that a GPU may still compute
        self.learned = 0  # steps in a row whose loss was below `LEARNED`
        self.signum = 0  # the signal that one of the processes has heard
        self.held_out = self.data.some_windows(self.recipe.model.block_size, self.state.windows)
        self.checkpointer = Checkpointer(
            run, parallel, self.stepper.scaler, self.state, self.tokenizer_files, self.on_saved
        )
        self.metrics: Metrics | None = None
        self.logs: logs.Logs | None = None
        if self.world.is_main:
            self.open_files()
        for line in self.describe():
            self.session.note(line)
        self.session.listen(events.Plan(self.recipe.steps, self.recipe.batch_tokens))

    def initial_state(self) -> TrainState:
        """The state of the checkpoint that the run resumes from, restored; else that of step 0."""
        run, recipe = self.run, self.recipe
        if run.saved is not None and run.checkpoint is not None:
            state = read_snapshot(run.checkpoint, run.saved, self.parallel).restore(self.parallel, self.stepper.scaler)
            if recipe.steps > run.saved.recipe.steps:
                state.evals_since_best = 0  # patience begins anew
            return state
        usual = windows_to_evaluate(recipe)
        return TrainState(windows=min(usual, self.budget.windows or usual) if self.budget else usual)

    def open_files(self) -> None:
        """Checks the room on the disk, writes ``run.json`` and opens the logs. Raises `WorkError` for a full disk."""
        run, record, step = self.run, self.run.record, self.state.step
        if step == 0:
            record = replace(record, compute=run.machine(), versions=versions())
        else:
            record = replace(record, resumed=[*record.resumed, Resumed(now(), step, dict(run.given))])
        self.record = replace(record, ended=None, result=None)
        check_room(run.run, self.checkpointer.size)
        self.update_recipe()
        self.metrics = Metrics(run.run, self.session.warn, self.state.metrics_bytes)
        self.checkpointer.metrics = self.metrics
        self.logs = logs.Logs(run.log, run.run, vars(self.record), self.session.note, step)

    def describe(self) -> list[str]:
        """Notes about the model, and what will be done with it."""
        recipe, shape, step = self.recipe, self.recipe.model, self.state.step
        epochs = recipe.tokens(recipe.steps) / self.data.tokens
        processes = f"{self.world.size} processes, each on " if self.world.size > 1 else ""
        sharded = [f"{recipe.tensor} processes compute each sequence"] if recipe.tensor > 1 else []
        sharded += ["weights, gradients and moments are divided among all processes"] if recipe.shard == "full" else []
        name = self.run.record.init.model if self.run.record.init else recipe.preset
        adapters = sum(p.numel() for p in self.model.parameters() if p.requires_grad) if recipe.lora_rank else 0
        return [
            f"model {name}: {breakdown(shape).trainable:,} parameters ({counted(shape.n_layer, 'layer')}, "
            f"{counted(shape.n_head, 'head')}, {shape.n_embd} wide, context {shape.block_size}, "
            f"dropout {shape.dropout:g})",
            *([f"adapters on the linear maps of the blocks: {adapters:,} parameters train"] if adapters else []),
            f"{counted(recipe.steps, 'step')} of {counted(recipe.batch_tokens, 'token')}, {epochs:.1f} times the text, "
            f"on {processes}{self.run.compute.describe()}; run {self.run.run}"
            + (f"; from step {step:,}" if step else ""),
            *(["; ".join(sharded)] if sharded else []),
        ]

    def train(self) -> Result:
        """Trains until the end, the end of patience, or a signal."""
        self.session.stop.at_once = False
        try:
            with self.world.watching_peers():
                self.begin()
                ended = self.run_due_actions()
                self.checkpointer.remember()
                while not ended:
                    self.step()
                    if self.state.step == self.recipe.steps - self.recipe.decay:
                        self.fit_to_budget()
                    ended = self.run_due_actions()
                return self.finish()
        except Stopped:
            self.end_by_signal()
        except BaseException as error:
            self.fail(error)
        finally:
            if self.metrics is not None and self.logs is not None:
                self.metrics.close()
                self.logs.close()

    def begin(self) -> None:
        """Notes when the first step begins, or that the run is resumed."""
        if self.state.step == 0:
            self.state.first_step = time.perf_counter() - self.run.began
        else:
            self.emit(events.ResumeEvent, checkpoint=folder.step_name(self.state.step))
            self.checkpointer.writer.step = self.state.settled_step
        self.first_step = self.run.began + self.state.first_step

    def step(self) -> None:
        """Takes one optimizer step. A GPU computes it while the one before is reported and the next one is prepared."""
        recipe, state = self.recipe, self.state
        started = time.perf_counter()
        lr = state.rate_factor * recipe.lr_at(state.step + 1)
        self.world.seed(recipe.seed, state.step)
        x, y = self.batches.global_batch(state.step, self.world.data_rank, self.world.data_size)
        outcome = self.stepper.step(x, y, lr)
        state.step_seconds += time.perf_counter() - started
        if self.finish_pending_step():  # it was rolled back, with the step that was launched meanwhile
            return
        state.step += 1
        self.pending = Pending(state.step, lr, outcome)
        if outcome.arrived is None:  # the device does not compute beside the host
            self.finish_pending_step()

    def finish_pending_step(self) -> bool:
        """Waits for the step that was launched, reports and judges it. Returns whether the run was rolled back."""
        pending, self.pending = self.pending, None
        if pending is None:
            return False
        started = time.perf_counter()
        loss, norm = pending.outcome.read(self.world.synchronize)
        self.state.step_seconds += time.perf_counter() - started
        failed = self.spikes.observe(loss, norm, self.stepper.scaled)
        self.emit(events.StepEvent, pending.step, loss=loss, lr=pending.lr, grad_norm=norm, **self.rates(pending.step))
        self.note_learned(loss)
        if failed:
            self.roll_back(f"the loss became {loss:g} (gradient norm {norm:g})", pending.step, pending.lr)
        return failed

    def note_learned(self, loss: float) -> None:
        """Notes, once, that the examples are known by heart long before the run ends."""
        if not self.data.rows or self.learned == LEARNED_STEPS:
            return
        self.learned = self.learned + 1 if loss < LEARNED else 0
        if self.learned == LEARNED_STEPS and self.state.step < 0.9 * self.recipe.steps:
            self.session.note(
                f"the loss has been below {LEARNED} nats per token for {LEARNED_STEPS} steps: the examples are learned "
                "by heart, and the rest of the run adds little. Fewer --epochs or --steps, or --patience, end it sooner"
            )

    def run_due_actions(self) -> bool:
        """Evaluates, samples and saves, as is due after a step. Returns whether the run has come to its end."""
        state, recipe = self.state, self.recipe
        self.checkpointer.writer.poll()
        if not self.told_to_stop() and not self.pauses():
            return False
        rolled_back = self.finish_pending_step()
        if self.told_to_stop():
            raise Stopped
        if rolled_back:
            return False
        at_end = state.step == recipe.steps
        if state.settled_step == state.step:  # by the command before this one
            return at_end or self.out_of_patience()
        if state.bad_steps and not at_end:
            return False
        if self.due(recipe.eval_every) and self.held_out and not self.evaluate():
            return False  # it was rolled back
        better = state.step > 0 and state.measured_step == state.step and state.evals_since_best == 0
        last = at_end or self.out_of_patience()
        if self.due(recipe.sample_every) and state.step and not last:
            with self.stepper.eager():
                text = sample_lines(self.run, self.parallel, self.model, self.run.compute, recipe.seed)
            self.emit(events.SampleEvent, text=text)
        state.settled_step = state.step
        if last or better or (state.step and state.step % recipe.save_every == 0):
            self.save(last)
        return last

    def told_to_stop(self) -> bool:
        """Whether a signal has come to any process."""
        self.signum = self.world.all_reduce_max(self.session.stop.signum or 0)
        return self.signum > 0

    def due(self, every: int) -> bool:
        """Whether an action of every so many steps is due: also at the end, and before the first step of
        fine-tuning."""
        step = self.state.step
        first = step > 0 or self.run.init is not None
        return step == self.recipe.steps or (every > 0 and step % every == 0 and first)

    def pauses(self) -> bool:
        """Whether any action may be due after this step."""
        recipe = self.recipe
        every = (recipe.steps, recipe.eval_every, recipe.save_every, recipe.sample_every)
        return any(n and self.state.step % n == 0 for n in every)

    def out_of_patience(self) -> bool:
        """Whether ``patience`` evaluations in a row were no better."""
        return 0 < self.recipe.patience <= self.state.evals_since_best

    def evaluate(self) -> bool:
        """Measures the loss on held-out windows, the same ones each time. Returns whether it is finite; else the run is
        rolled back."""
        state = self.state
        if state.measured_step == state.step:  # by the command before this one
            return True
        with self.stepper.eager():
            loss = mean_loss(self.parallel, self.model, self.held_out, self.run.compute, self.session.stop)
        if not math.isfinite(loss):
            self.roll_back(f"the held-out loss became {loss}", state.step, self.recipe.lr)
            return False
        better = state.best_loss is None or loss < state.best_loss
        state.evals_since_best = 0 if better else state.evals_since_best + 1
        state.best_loss = loss if better else state.best_loss
        state.measured_step, state.measured_loss = state.step, loss
        self.emit(events.EvalEvent, val_loss=loss, best=better)
        if state.step == 0 and self.run.init:
            self.session.note(
                f"held-out loss of {self.run.init.asked} before the first step: {loss:.4f} nats per token"
            )
        return True

    def save(self, last: bool = False) -> None:
        """Saves a checkpoint while training continues; the ``last`` one while it waits."""
        if last:
            self.checkpointer.save_last(self.recipe, self.budget, lambda: self.session.stop.signum is not None)
        else:
            self.checkpointer.save(self.recipe, self.budget)

    def on_saved(self, step: int) -> None:
        """Reports a checkpoint that is whole on the disk."""
        self.emit(events.SaveEvent, checkpoint=folder.step_name(step))

    def roll_back(self, why: str, failed: int, lr: float) -> None:
        """Restores the last good state, once, with a lower rate. Raises `WorkError` the second time."""
        state = self.state
        if state.rate_factor < 1:
            self.end_diverged(why, failed, lr)
        self.checkpointer.roll_back(rate_factor=LOWER, step_seconds=state.step_seconds)
        self.emit(events.RollbackEvent, failed_step=failed, why=why, rate_factor=LOWER)
        self.session.note(f"{why} at step {failed:,}: back to step {state.step:,}, with {LOWER:g} times the rate")

    def fit_to_budget(self) -> None:
        """Plans as many steps of decay as fit into the time that is left, at the pace so far."""
        budget = self.budget
        if budget is None:
            return
        now = time.perf_counter()
        pace = (now - self.first_step) / self.state.step
        steps = self.world.broadcast_object(lambda: budget.steps_left(now, pace))
        self.update_recipe(steps=self.state.step + steps, decay=steps, planned=self.recipe.planned or self.recipe.steps)
        self.session.listen(events.Plan(self.recipe.steps, self.recipe.batch_tokens))

    def compile(self) -> None:
        """Compiles the step; if that fails, the run continues without."""
        started = time.perf_counter()
        failed = self.stepper.compile(self.session.note)
        if failed is None:
            self.session.note(f"compiled in {time.perf_counter() - started:.0f} s")
        else:
            self.on_uncompiled(failed, begun=self.run.saved is not None)

    def on_uncompiled(self, why: str, begun: bool = True) -> None:
        """Records that steps are not compiled, of a run that has ``begun`` from here on."""
        self.update_recipe(compile=False)
        rounded = "from here on steps are not compiled, and equal to compiled ones to rounding, not bit for bit"
        self.session.warn(f"{rounded if begun else 'steps are not compiled'}: {why:.200}")

    def on_halved(self, micro_batch: int) -> None:
        """Records a smaller micro-batch, after memory ran out."""
        rows = self.recipe.rows
        self.session.note(f"out of memory: from here on {micro_batch:,} of {rows:,} sequences at once")
        self.update_recipe(micro_batch=micro_batch)

    def update_recipe(self, **changes: Any) -> None:
        """Changes the recipe, and records it."""
        self.recipe = replace(self.recipe, **changes)
        self.write_record(resolved=dataclasses.asdict(self.recipe))

    def write_record(self, **changes: Any) -> None:
        """Writes ``run.json`` with changes, on rank 0 once it is open."""
        if self.record is not None:
            self.record = replace(self.record, **changes)
            with disk_errors(self.run.run, folder.KEPT):
                self.record.write(self.run.run)

    def finish(self) -> Result:
        """Reads back and measures the best checkpoint, which is the result of the run."""
        best = read_best(self.run, self.parallel, self.recipe, self.budget)
        if self.recipe.merge_lora and self.world.is_main:
            merged = self.run.run / "merged"
            checkpoint.save(merged, best.model, self.tokenizer_files, {"val_loss": best.val_loss})
            self.session.note(f"merged: {merged}")
        self.emit(events.SampleEvent, text=best.text)
        self.report_answers(best)
        reason = "patience" if self.state.step < self.recipe.steps else "steps"
        loss, bits = best.val_loss, best.bits_per_byte
        self.emit(events.EndEvent, reason=reason, checkpoint=best.path.name, val_loss=loss, bits_per_byte=bits)
        result = Result(
            run=self.run.run,
            checkpoint=best.path,
            steps=self.state.step,
            tokens_seen=self.recipe.tokens(self.state.step),
            val_loss=loss,
            val_tokens=best.val_tokens,
            bits_per_byte=bits,
            **self.rates(self.state.step),
            seconds=time.perf_counter() - self.run.began,
            parameters=breakdown(self.recipe.model).trainable,
            device=self.run.compute.device.type,
            dtype=self.run.compute.dtype_name,
            sample=best.text,
            prompt=self.data.prompt,
            answers=best.answers,
            held_out_answers=best.held_out_answers,
            chat=self.data.chat,
        )
        self.write_record(ended=reason, result=result.record())
        return result

    def report_answers(self, best: Best) -> None:
        """Reports how the best checkpoint answers the pairs, and whether it is the last one."""
        if best.answers is None:
            return
        held_out = {} if best.held_out_answers is None else vars(best.held_out_answers)
        counts = vars(best.answers) | {f"held_out_{key}": count for key, count in held_out.items()}
        self.emit(events.AnswersEvent, **counts)
        if best.path.name != folder.step_name(self.state.step):
            self.session.note(
                f"the loss of the held-out pairs was lowest at {best.path.name}, which is kept as the best; the last "
                f"step's weights: -m {self.run.run}:latest"
            )

    def end_by_signal(self) -> NoReturn:
        """Saves the run and raises `Interrupted`, or `WorkError` if the disk does not take it."""
        state, writer = self.state, self.checkpointer.writer
        self.told_to_stop()
        if state.step and self.world.broadcast_object(lambda: writer.step != state.step):
            self.save()
        self.world.wait_for_main()
        writer.wait()
        self.emit_cut_off("signal")
        if writer.failed is not None:
            raise WorkError(
                f"interrupted at step {state.step:,}, which could not be saved: {error_text(writer.failed)}",
                f"make room, then resume from the checkpoint before: {self.run.resume_command}",
            )
        saved = f", saved in {self.run.run / folder.step_name(state.step)}" if state.step else ""
        raise Interrupted(
            self.signum,
            f"interrupted at step {state.step:,} of {self.recipe.steps:,}{saved}; "
            f"resume with: {self.run.resume_command}",
        )

    def end_diverged(self, what: str, step: int, lr: float) -> NoReturn:
        """Stops a run whose loss is not finite any more; what was saved before stays as it is."""
        self.world.wait_for_main()
        self.checkpointer.writer.wait()
        self.emit_cut_off("diverged")
        self.write_record(ended="diverged")
        before = folder.checkpoints(self.run.run)
        saved = f"the checkpoints in {self.run.run} are from before" if before else "nothing was saved yet"
        raise WorkError(f"{what} at step {step:,}, at a learning rate of {lr:.2g}", f"train with a lower --lr; {saved}")

    def fail(self, error: BaseException) -> NoReturn:
        """Raises the error with a hint, when the checkpoint that is being written is whole."""
        if not isinstance(error, Interrupted):
            with contextlib.suppress(Exception):  # the first error is the one to report
                self.checkpointer.writer.wait()
        if isinstance(error, PeerLost):
            error.hint = f"resume with: {self.run.resume_command}"
        if (failure := device_failure(error)) is not None:
            message = f"the device {self.run.compute.device} has failed: {failure}"
            raise WorkError(message, f"resume with: {self.run.resume_command}") from error
        raise error

    def emit_cut_off(self, reason: str) -> None:
        """Emits the last event of a run that was cut off."""
        self.emit(events.EndEvent, reason=reason, checkpoint=None, val_loss=None, bits_per_byte=None)

    def rates(self, step: int) -> dict[str, Any]:
        """Tokens per second of the steps alone, from the start, and MFU."""
        return self.speed.rates(self.recipe.tokens(step), self.state.step_seconds)

    def emit(self, kind: Callable[..., events.Event], step: int | None = None, **values: Any) -> None:
        """Sends an event to the listener, ``metrics.jsonl`` and the logs, from rank 0."""
        if self.metrics is None or self.logs is None:
            return
        step = self.state.step if step is None else step
        event = kind(
            step=step,
            tokens=self.recipe.tokens(step),
            seconds=round(time.perf_counter() - self.run.began, 3),
            **values,
        )
        self.metrics.write(events.to_json(event))
        self.logs(event)
        self.session.listen(event)


def measure_budget(
    parallel: Parallel, recipe: Recipe, data: Dataset, minutes: float, session: Session, share: float
) -> TimeBudget:
    """Measures how long steps, evaluations and samples take here, for a ``share`` of the minutes, and returns rank 0's
    budget. Moments and random states are of no use afterwards."""
    world = session.world
    stepper = Stepper(parallel, recipe, lambda micro_batch: None)
    if recipe.compile:
        stepper.compile(session.note)  # the run itself reports an error
    batches = data.batches(recipe)
    seconds: list[float] = []
    enough, most = min(share * 60 * minutes, PROBE_SECONDS), PROBE_SHARE * 60 * minutes

    def goes_on() -> bool:
        spent = sum(seconds)
        return spent < enough or (len(seconds) < PROBE_STEPS[1] and spent < most)

    while len(seconds) < PROBE_STEPS[0] or world.broadcast_object(goes_on):
        before = time.perf_counter()
        stepper.step(*batches.global_batch(len(seconds), world.data_rank, world.data_size), 0.0).read(world.synchronize)
        seconds.append(time.perf_counter() - before)
    timed = seconds[2:] or seconds[1:]
    held_out = data.some_windows(recipe.model.block_size, windows_to_evaluate(recipe))

    def measured(windows: Sequence[Window]) -> float:
        started = time.perf_counter()
        with stepper.eager():
            mean_loss(parallel, parallel.model, windows, parallel.compute, StopSignal())
        return (time.perf_counter() - started) / len(windows)

    window = measured(held_out[:1]) if held_out else 0.0
    if world.broadcast_object(lambda: 1 < len(held_out) // 4 < most / max(window, 1e-9)):
        window = measured(held_out[: len(held_out) // 4])
    with stepper.eager():
        sample = sample_seconds(parallel, data)
    targets = sum(len(each.y) - each.skipped for each in held_out) / max(1, len(held_out))
    trained = sum(parameter.numel() for parameter in parallel.model.parameters() if parameter.requires_grad)
    costs = Costs(
        step=sum(timed) / len(timed),
        window=max(window, 1e-9),
        sample=sample,
        save=3 * 4 * trained / SAVE_RATE,  # weights and two moments in float32
        usual_windows=len(held_out),
        whole_windows=math.ceil(data.held_out_targets / max(1.0, targets)),
        pairs=ASKED if data.pairs else 0,
    )
    evals = recipe.steps / recipe.eval_every
    return checked(
        TimeBudget,
        world.broadcast_object(
            lambda: dataclasses.asdict(TimeBudget.fitting(minutes, session.began, time.perf_counter(), costs, evals))
        ),
        "the budget of process 0",
    )


def windows_to_evaluate(recipe: Recipe) -> int:
    """The held-out windows of a periodic evaluation."""
    tokens = min(max(EVAL_TOKENS[0], round(EVAL_SHARE * recipe.steps * recipe.batch_tokens)), EVAL_TOKENS[1])
    return max(1, tokens // recipe.model.block_size)
