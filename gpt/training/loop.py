"""The training loop: steps, with evaluations, samples and checkpoints at their intervals."""

import contextlib
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import torch

from gpt import events
from gpt.device import Download
from gpt.errors import Interrupted, PeerLost, WorkError, device_failure, is_out_of_memory
from gpt.interrupt import Stopped
from gpt.model.memory import divisors
from gpt.runs import checkpoint, folder
from gpt.runs.sampling import NO_DEFAULTS, read_defaults
from gpt.training.checkpointing import Checkpointer, check_disk_space, error_text
from gpt.training.context import Result, RunContext
from gpt.training.evaluation import evaluate_best, mean_loss, sample_lines, windows_to_evaluate
from gpt.training.journal import Journal
from gpt.training.logs import Speed
from gpt.training.memory_probe import fit_micro_batch
from gpt.training.state import TrainState, read_snapshot
from gpt.training.step import Stepper
from gpt.training.strategy import Strategy
from gpt.training.time_budget import END_SECONDS, INTERVALS, Clock

MAX_BAD_STEPS = 3  # consecutive bad steps after which a run has diverged
ROLLBACK_FACTOR = 0.3  # learning rate factor after a rollback
# A run has learnt once its loss is this far below that of a uniform guess, in nats per token. After that, a loss this
# far above a uniform guess has exploded.
LOSS_MARGIN = 1.0


@dataclass(frozen=True)
class PendingStep:
    """A step that a GPU may still be computing."""

    step: int
    lr: float
    outcome: Download  # loss in nats per token, and gradient norm


class Diverged(WorkError):
    """The loss is NaN or infinite, or has exploded."""

    def __init__(self, why: str, step: int, lr: float) -> None:
        super().__init__(f"{why} at step {step:,}, at a learning rate of {lr:.2g}")
        self.why, self.step = why, step


class Trainer:
    """The training loop: steps, evaluation, checkpoints, rollback."""

    def __init__(self, run: RunContext, strategy: Strategy) -> None:
        """Prepares the next step of ``run``, writes ``run.json`` and announces the plan."""
        self.run, self.strategy, self.recipe, budget = run, strategy, run.recipe, run.recipe.budget
        self.session, self.world, self.data, self.model = run.session, run.world, run.data, strategy.model
        self.stepper = Stepper(strategy, self.recipe, run.teachers, self.session.note, self.on_uncompiled)
        self.state = TrainState(windows=windows_to_evaluate(self.recipe))
        if budget is not None and budget.windows:
            self.state.windows = min(self.state.windows, budget.windows)
        self.journal = Journal(run, self.state, Speed.of(self.model, self.recipe, run.compute, self.world.size))
        self.fit_memory()
        if self.recipe.compile:
            self.compile()
        if run.saved is not None and run.checkpoint is not None:
            snapshot = read_snapshot(run.checkpoint, run.saved, strategy)
            vars(self.state).update(vars(snapshot.restore(strategy, self.stepper.scaler)))
            if self.recipe.steps > run.saved.recipe.steps:
                self.state.evals_since_best = 0  # Reset patience.
        self.batches = run.teachers.teach(self.data.batches(self.recipe))
        source = run.checkpoint or (run.init and run.init.path)
        sampling = read_defaults(source, self.session.note) if source else NO_DEFAULTS
        self.tokenizer_files = checkpoint.TokenizerFiles(self.data.tokenizer, self.recipe.saved_model, sampling)
        self.pending: PendingStep | None = None
        self.signum = 0  # signal received by any rank
        self.held_out = self.data.sample_windows(self.recipe.model.block_size, self.state.windows)
        scaler = self.stepper.scaler
        self.checkpointer = Checkpointer(run, strategy, scaler, self.state, self.tokenizer_files, self.journal)
        if self.world.is_main:
            check_disk_space(run.path, self.checkpointer.size)
            self.journal.open(asdict(self.recipe))
        self.journal.describe(sum(p.numel() for p in self.model.parameters() if p.requires_grad))
        self.clock: Clock | None = None
        if budget is not None:
            seconds = self.state.training_seconds
            seconds = seconds or budget.training_seconds(time.perf_counter() - run.start_time)
            self.state.training_seconds = seconds
            self.clock = Clock(seconds, self.state.share)
        self.earlier_position = self.position  # before the last step
        seconds_left = self.state.training_seconds * (1 - self.state.share)
        self.session.listen(events.Plan(self.recipe.steps, self.recipe.batch_tokens, seconds=seconds_left))

    @property
    def position(self) -> float:
        """How far the learning rate schedule is, in steps. In a timed run, the clock decides."""
        return self.state.share * self.recipe.steps if self.clock is not None else self.state.step

    @property
    def is_at_end(self) -> bool:
        """Whether all steps are done, or the time has passed."""
        return self.state.share == 1 if self.clock is not None else self.state.step == self.recipe.steps

    def train(self) -> Result:
        """Trains until the last step, early stopping, or a signal."""
        self.session.stop.at_once, self.session.stop.deadline = False, math.inf
        try:
            with self.world.watch_peers():
                if self.state.step == 0:
                    self.state.first_step = time.perf_counter() - self.run.start_time
                else:
                    self.journal.emit(events.ResumeEvent, checkpoint=folder.step_name(self.state.step))
                is_over = self.run_due_actions()
                self.checkpointer.take_snapshot()
                self.world.shorten_timeout()
                while not is_over:
                    try:
                        self.step()
                        is_over = self.run_due_actions()
                    except Diverged as diverged:
                        self.roll_back(diverged)
                return self.finish()
        except Stopped:
            self.end_by_signal()
        except Diverged as diverged:
            self.end_diverged(diverged)
        except BaseException as error:
            self.fail(error)
        finally:
            self.stepper.drop_graph()
            self.journal.close()

    def step(self) -> None:
        """Takes one optimizer step. Reports the previous step while a GPU computes this one."""
        recipe, state, world = self.recipe, self.state, self.world
        start, self.earlier_position = time.perf_counter(), self.position
        lr = state.rate_factor * recipe.lr_at(self.position + 1)
        world.seed(recipe.seed, state.step)
        x, y, *lesson = self.batches.global_batch(state.step, world.rank, world.size)
        pending = PendingStep(state.step + 1, lr, self.stepper.step(x, y, lr, *lesson))
        state.step_seconds += time.perf_counter() - start
        self.report_pending()
        state.step, self.pending = pending.step, pending
        if pending.outcome.arrived is None:  # This device is synchronous, so the step has ended.
            self.report_pending()

    def report_pending(self) -> None:
        """Waits for the pending step and reports it. Raises `Diverged` after `MAX_BAD_STEPS` consecutive bad steps. In
        float16, the loss scaler handles infinite gradients."""
        pending, self.pending, state = self.pending, None, self.state
        if pending is None:
            return
        start = time.perf_counter()
        loss, norm = pending.outcome.read(self.world.synchronize)
        state.step_seconds += time.perf_counter() - start
        uniform_loss = math.log(self.recipe.model.vocab_size)
        is_finite = math.isfinite(loss) and (math.isfinite(norm) or self.stepper.scaler.is_enabled())
        state.has_learnt |= loss < uniform_loss - LOSS_MARGIN
        has_exploded = state.has_learnt and loss > uniform_loss + LOSS_MARGIN
        state.bad_steps = 0 if is_finite and not has_exploded else state.bad_steps + 1
        self.journal.step(pending.step, pending.lr, loss, norm)
        if state.bad_steps >= MAX_BAD_STEPS:
            raise Diverged(f"the loss became {loss:g} (gradient norm {norm:g})", pending.step, pending.lr)

    def run_due_actions(self) -> bool:
        """Evaluates, samples and saves if due after this step. Returns True when training is over."""
        state, recipe = self.state, self.recipe
        self.checkpointer.writer.poll()
        self.poll()
        if not self.signum and not any(map(self.is_due, INTERVALS)):
            return False
        self.report_pending()
        if self.signum:
            raise Stopped
        if state.settled_step == state.step:  # These actions ran before the resume.
            return self.is_at_end or self.is_out_of_patience()
        if state.bad_steps and not self.is_at_end:
            return False
        if self.is_due("eval_every") and self.held_out and state.measured_step != state.step:
            self.evaluate()
        is_best = state.step > 0 and state.measured_step == state.step and state.evals_since_best == 0
        is_last = self.is_at_end or self.is_out_of_patience()
        if self.is_due("sample_every") and state.step and not is_last:
            text = self.stepper.run_eagerly(
                lambda: sample_lines(self.run, self.strategy, self.model, self.run.compute, recipe.seed)
            )
            self.journal.emit(events.SampleEvent, text=text)
        state.settled_step = state.step
        if is_last:
            self.checkpointer.save(recipe, lambda: self.session.stop.signum is not None)
        elif is_best or (state.step and self.is_due("save_every")):
            self.checkpointer.save(recipe)
        return is_last

    def poll(self) -> None:
        """Updates the signal and the share of the time, on all ranks."""
        share = self.state.share if self.clock is None else self.clock.share()
        self.signum, self.state.share = self.world.poll(self.session.stop.signum, share)

    def is_due(self, name: str) -> bool:
        """Whether a periodic action is due: after every interval ``name``, at the end, and before the first step of
        fine-tuning."""
        step, interval = self.state.step, int(getattr(self.recipe, name))
        if self.is_at_end or not interval or not step:
            return self.is_at_end or (interval > 0 and self.run.init is not None)
        if name in self.recipe.by_clock.split():
            return self.position // interval > self.earlier_position // interval
        return step % interval == 0

    def is_out_of_patience(self) -> bool:
        """Whether the last ``patience`` evaluations brought no improvement."""
        return 0 < self.recipe.patience <= self.state.evals_since_best

    def evaluate(self) -> None:
        """Measures the held-out loss, always on the same windows. Raises `Diverged` if it is not finite."""
        state = self.state
        loss = self.stepper.run_eagerly(
            lambda: mean_loss(self.strategy, self.model, self.held_out, self.run.compute, self.session.stop)
        )
        if not math.isfinite(loss):
            raise Diverged(f"the held-out loss became {loss}", state.step, self.recipe.lr)
        is_best = state.best_loss is None or loss < state.best_loss
        state.evals_since_best = 0 if is_best else state.evals_since_best + 1
        state.best_loss = loss if is_best else state.best_loss
        state.measured_step, state.measured_loss = state.step, loss
        self.journal.emit(events.EvalEvent, val_loss=loss, best=is_best)
        if state.step == 0 and self.run.init:
            self.session.note(f"held-out loss of {self.run.init.name} before the first step: {loss:.4f} nats per token")

    def roll_back(self, diverged: Diverged) -> None:
        """Restores the last good state with a lower learning rate. Raises ``diverged`` on the second rollback."""
        if self.state.rate_factor < 1:
            raise diverged
        self.pending = None
        self.checkpointer.roll_back(rate_factor=ROLLBACK_FACTOR, step_seconds=self.state.step_seconds)
        self.stepper.drop_graph()
        why, step = diverged.why, diverged.step
        self.journal.emit(events.RollbackEvent, failed_step=step, why=why, rate_factor=ROLLBACK_FACTOR)
        outcome = f"back to step {self.state.step:,}, with {ROLLBACK_FACTOR:g} times the learning rate"
        self.session.note(f"{why} at step {step:,}: {outcome}")

    def fit_memory(self) -> None:
        """Halves the micro-batch until a step fits into memory."""
        micro_batch = fit_micro_batch(self.stepper, self.data.batches(self.recipe).length)
        if micro_batch < self.recipe.micro_batch:
            rows = self.recipe.rows
            self.session.note(f"out of memory: from now on, {micro_batch:,} of {rows:,} sequences at once")
            self.update_recipe(micro_batch=micro_batch)

    def compile(self) -> None:
        """Compiles the step. If that fails, the run continues uncompiled."""
        start = time.perf_counter()
        error = self.stepper.compile()
        if error is None:
            self.session.note(f"compiled in {time.perf_counter() - start:.0f} s")
        else:
            self.on_uncompiled(error, started=self.run.saved is not None)

    def on_uncompiled(self, why: str, started: bool = True) -> None:
        """Records that steps are not compiled. ``started`` means that earlier steps were compiled."""
        self.update_recipe(compile=False)
        message = "from now on, steps are not compiled: equal to compiled ones up to rounding, not bit for bit"
        self.session.warn(f"{message if started else 'steps are not compiled'}: {why:.200}")

    def update_recipe(self, **changes: Any) -> None:
        """Changes the recipe and records it in ``run.json``."""
        self.recipe = replace(self.recipe, **changes)
        self.journal.write(resolved=asdict(self.recipe))

    def finish(self) -> Result:
        """Evaluates the best checkpoint and returns the result of the run."""
        self.stepper.drop_graph()
        if self.clock is not None and self.recipe.budget is not None:
            self.update_recipe(steps=self.state.step)
            self.session.stop.deadline = self.clock.end + self.recipe.budget.end - END_SECONDS
            self.session.listen(events.Plan(self.recipe.steps, self.recipe.batch_tokens))
        result = self.stepper.run_eagerly(
            lambda: evaluate_best(self.run, self.strategy, self.recipe, self.state, self.journal.speed)
        )
        if self.recipe.merge_lora and self.world.is_main:
            merged, model = self.run.path / "merged", checkpoint.load(result.checkpoint, torch.device("cpu")).model
            checkpoint.save(merged, model, self.tokenizer_files, {"val_loss": result.val_loss})
            self.session.note(f"merged: {merged}")
        self.journal.end(result, "steps" if self.is_at_end else "patience")
        return result

    def end_by_signal(self) -> NoReturn:
        """Saves the run and raises `Interrupted`, or `WorkError` if saving fails."""
        state, writer = self.state, self.checkpointer.writer
        self.poll()
        if state.step and self.world.broadcast_object(lambda: writer.step != state.step):
            self.checkpointer.save(self.recipe)
        self.world.wait_for_main()
        writer.wait()
        self.journal.report_early_end("signal")
        if writer.save_error is not None:
            raise WorkError(
                f"interrupted at step {state.step:,}, which could not be saved: {error_text(writer.save_error)}",
                f"free up space, then resume from the previous checkpoint: {self.run.resume_command}",
            )
        saved = f", saved in {self.run.path / folder.step_name(state.step)}" if state.step else ""
        raise Interrupted(
            self.signum,
            f"interrupted at step {state.step:,} of {'about ' * self.recipe.is_timed}{self.recipe.steps:,}{saved}; "
            f"resume with: {self.run.resume_command}",
        )

    def end_diverged(self, diverged: Diverged) -> NoReturn:
        """Ends a diverged run. Keeps its checkpoints."""
        self.world.wait_for_main()
        self.checkpointer.writer.wait()
        self.journal.report_early_end("diverged")
        self.journal.write(ended="diverged")
        checkpoints = folder.checkpoints(self.run.path)
        saved = f"the earlier checkpoints are in {self.run.path}" if checkpoints else "nothing was saved yet"
        diverged.hint = f"train with a lower --lr; {saved}"
        raise diverged

    def fail(self, error: BaseException) -> NoReturn:
        """Finishes the current checkpoint, then raises the error, with a hint if possible."""
        if not isinstance(error, Interrupted):
            with contextlib.suppress(Exception):  # Report only the first error.
                self.checkpointer.writer.wait()
        if isinstance(error, PeerLost):
            error.hint = f"resume with: {self.run.resume_command}"
        if is_out_of_memory(error):
            rows = divisors(self.recipe.rows // self.world.size)
            smaller = [n for n in rows if 2 * n <= self.stepper.micro_batch]
            hint = f"resume with: {self.run.resume_command}" + (f" --micro-batch {smaller[-1]}" if smaller else "")
            raise WorkError(f"out of memory at step {self.state.step:,}", hint) from error
        if (failure := device_failure(error)) is not None:
            message = f"the device {self.run.compute.device} failed: {failure}"
            raise WorkError(message, f"resume with: {self.run.resume_command}") from error
        raise error
