"""The training loop: steps, with evaluations, samples and checkpoints at their intervals. A run that trains teachers
goes through it once for each of them, and then for the model that learns from them."""

import contextlib
import gc
import math
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from gpt.config import events
from gpt.config.device import Download
from gpt.corpus.batches import Batches
from gpt.model.loss import TEACHER_WEIGHT
from gpt.model.memory import divisors
from gpt.runs import checkpoint, folder
from gpt.runs.sampling_defaults import NO_DEFAULTS, read_defaults
from gpt.system.errors import Interrupted, PeerLost, ProgramFailure, WorkError, device_failure, is_out_of_memory
from gpt.system.interrupt import Stopped
from gpt.training.checkpointing import Checkpointer, check_disk_space, error_text
from gpt.training.context import Result, RunContext
from gpt.training.evaluation import evaluate_best, measure_held_out, sample_lines, windows_to_evaluate
from gpt.training.film import Film
from gpt.training.journal import Journal
from gpt.training.memory_probe import fit_micro_batch
from gpt.training.preferences import open_reference
from gpt.training.rewards import with_answers
from gpt.training.schedule import lr_at
from gpt.training.state import TrainState, read_snapshot, seed_all
from gpt.training.step import Stepper
from gpt.training.strategy import make_strategy
from gpt.training.teachers import TEACHERS, TaughtBatches, keep_teacher, read_text
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
    outcome: Download  # loss in nats per token (with the scores of preferences or answers), and gradient norm


class Diverged(WorkError):
    """The loss is NaN or infinite, or has exploded."""

    def __init__(self, why: str, step: int, lr: float) -> None:
        super().__init__(f"{why} at step {step:,}, at a learning rate of {lr:.2g}")
        self.why, self.step = why, step


class Trainer:
    """The training loop: steps, evaluation, checkpoints, rollback."""

    def __init__(self, run: RunContext) -> None:
        """Announces the plan, prepares the next step of ``run`` and writes ``run.json``."""
        self.run, self.run_recipe = run, run.recipe
        self.session, self.world, self.data = run.session, run.world, run.data
        self.state = replace(run.saved.state) if run.saved else TrainState()
        self.journal = Journal(run, self.state)
        source = run.checkpoint or (run.init and run.init.path)
        sampling = read_defaults(source, self.session.note) if source else NO_DEFAULTS
        self.tokenizer_files = checkpoint.TokenizerFiles(self.data.tokenizer, run.recipe.saved_model, sampling)
        self.signum = 0  # signal received by any rank
        self.open_cycle(run.checkpoint)
        if self.world.is_main:
            check_disk_space(run.path, self.checkpointer.size)
            self.journal.open(asdict(self.run_recipe))
        self.start_clock()

    def open_cycle(self, path: Path | None = None) -> None:
        """Prepares the next step of the state's cycle, from the checkpoint at ``path``. At the start of a cycle, a
        teacher has the weights of the one before: the mean of such teachers is better (benchmarks/defaults.md)."""
        run, state = self.run, self.state
        self.clock: Clock | None = None
        self.recipe = recipe = self.run_recipe.cycle(state.cycle)
        batches = self.read_by_teachers()
        seed_all(recipe.seed)
        is_later_teacher = 0 < state.cycle < self.run_recipe.n_teachers
        start = run.path / TEACHERS / str(state.cycle) if path is None and is_later_teacher else path
        self.strategy = make_strategy(recipe, run.compute, self.world, run.init, start)
        self.model = self.strategy.model
        self.stepper = Stepper(self.strategy, recipe, self.session.note, self.on_uncompiled)
        if path is None:
            state.windows = windows_to_evaluate(recipe)
            if recipe.budget is not None and recipe.budget.windows:
                state.windows = min(state.windows, recipe.budget.windows)
        self.journal.start_cycle(recipe, self.model)
        self.fit_memory()
        if recipe.compile:
            self.compile()
        if self.data.preferences:
            self.stepper.run_eagerly(lambda: open_reference(run, self.strategy))
        if path is not None and run.saved is not None:
            read_snapshot(path, run.saved, self.strategy).restore(self.strategy, self.stepper.scaler)
            if self.run_recipe.steps > run.saved.recipe.steps:
                state.evals_since_best = 0  # Reset patience.
        self.batches = batches or with_answers(
            self.data.batches(recipe), self.strategy, recipe, self.data.tokenizer, self.session.stop
        )
        self.pending: PendingStep | None = None
        self.held_out = self.data.sample_windows(recipe.model.block_size, state.windows)
        self.film = Film(run, recipe, self.held_out)
        self.checkpointer = Checkpointer(
            run, self.strategy, self.stepper.scaler, state, self.tokenizer_files, self.journal
        )

    def read_by_teachers(self) -> TaughtBatches | None:
        """Lets the run's own teachers read the text, if this cycle is that of the model that learns from them."""
        run, recipe, batches = self.run, self.recipe, self.data.batches(self.recipe)
        if recipe.own_teachers is None or not isinstance(batches, Batches):
            return None
        weight = f"the teachers have a weight of {TEACHER_WEIGHT:g} in the loss"
        self.session.note(f"{weight}. The losses shown are the cross-entropy with the text")
        teachers = [run.path / TEACHERS / str(number) for number in range(1, recipe.n_teachers + 1)]
        read = partial(read_text, teachers, batches, run.compute, recipe.separator, self.session)
        taught = self.world.raise_on_all(read)
        self.poll()
        if self.signum:
            self.journal.report_early_end("signal")
            hint = f"resume with: {run.resume_command}"
            raise Interrupted(self.signum, f"interrupted while the teachers read the text; {hint}")
        return taught

    def start_clock(self) -> None:
        """Starts the clock of a timed run's cycle, and announces the cycle."""
        state, cycle, count = self.state, self.state.cycle, self.run_recipe.n_teachers
        seconds, budget = 0.0, self.recipe.budget
        if budget is not None:
            elapsed = time.perf_counter() - self.run.start_time
            training_seconds = budget.training_seconds(elapsed, count - cycle)
            state.training_seconds = state.training_seconds or training_seconds
            self.clock = Clock(state.training_seconds, state.share)
            seconds = state.training_seconds * (1 - state.share)
        self.earlier_position = self.position  # before the last step
        phase = "" if not count else f"teacher {cycle + 1} of {count}" if cycle < count else "pupil"
        self.session.listen(events.Plan(self.run_recipe.steps, self.recipe.batch_tokens, phase, seconds))

    @property
    def position(self) -> float:
        """How far the learning rate schedule is, in steps of this cycle. In a timed run, the clock decides."""
        return self.state.share * self.recipe.steps if self.clock is not None else self.state.cycle_step

    @property
    def is_at_end(self) -> bool:
        """Whether all steps of this cycle are done, or its time has passed after at least one."""
        state = self.state
        if self.clock is None:
            return state.cycle_step == self.recipe.steps
        return state.share == 1 and state.cycle_step > 0

    def train(self) -> Result:
        """Trains until the last step, early stopping, or a signal."""
        self.session.stop.at_once, self.session.stop.deadline = False, math.inf
        try:
            with self.world.watch_peers():
                if self.state.step == 0:
                    self.state.first_step = time.perf_counter() - self.run.start_time
                else:
                    self.journal.emit(events.ResumeEvent, checkpoint=folder.step_name(self.state.step))
                self.world.shorten_timeout()
                self.train_cycle()
                while self.state.cycle < self.run_recipe.n_teachers:
                    self.begin_next_cycle()
                    self.train_cycle()
                return self.finish()
        except Stopped:
            self.end_by_signal()
        except Diverged as diverged:
            self.end_diverged(diverged)
        except BaseException as error:
            self.fail(error)
        finally:
            self.journal.close()

    def train_cycle(self) -> None:
        """Trains until the end of a cycle."""
        is_over = self.run_due_actions()
        if not self.state.cycle_step:
            self.take_frame()
        self.checkpointer.take_snapshot()
        while not is_over:
            try:
                self.step()
                is_over = self.run_due_actions()
            except Diverged as diverged:
                self.roll_back(diverged)

    def begin_next_cycle(self) -> None:
        """Keeps the trained weights as a teacher, frees the memory of their training, and opens the next cycle."""
        number, start = self.state.cycle + 1, self.state.start
        kept = self.world.broadcast_object(lambda: keep_teacher(self.run.path, number, start))
        del self.strategy, self.model, self.stepper, self.checkpointer
        gc.collect()
        self.state.begin_next_cycle()
        self.open_cycle()
        self.journal.emit(events.TeacherEvent, folder=kept)
        self.start_clock()

    def step(self) -> None:
        """Takes one optimizer step. Reports the previous step while a GPU computes this one."""
        recipe, state, world = self.recipe, self.state, self.world
        start, self.earlier_position = time.perf_counter(), self.position
        lr = state.rate_factor * lr_at(recipe, self.position + 1)
        world.seed(recipe.seed, state.cycle_step)
        if recipe.reward:  # The weights that answer must be those of a whole step.
            self.report_pending()
        x, y, *lesson = self.batches.global_batch(state.cycle_step, world.rank, world.size)
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
        values, norm = pending.outcome.read(self.world.synchronize)
        loss, *scores = values if self.recipe.scores else [values]
        state.step_seconds += time.perf_counter() - start
        uniform_loss = math.log(self.recipe.model.vocab_size)
        is_finite = math.isfinite(loss) and (math.isfinite(norm) or self.stepper.scaler.is_enabled())
        state.has_learnt |= loss < uniform_loss - LOSS_MARGIN
        has_exploded = state.has_learnt and loss > uniform_loss + LOSS_MARGIN and not self.recipe.reward
        state.bad_steps = 0 if is_finite and not has_exploded else state.bad_steps + 1
        self.journal.step(pending.step, pending.lr, loss, norm, dict(zip(self.recipe.scores, scores, strict=True)))
        if state.bad_steps >= MAX_BAD_STEPS:
            raise Diverged(f"the loss became {loss:g} (gradient norm {norm:g})", pending.step, pending.lr)

    def run_due_actions(self) -> bool:
        """Evaluates, samples and saves if due after this step. Returns True when training is over."""
        state, recipe = self.state, self.recipe
        self.checkpointer.writer.poll()
        self.poll()
        is_settled = state.settled_step == state.step  # These actions ran before the resume.
        if not self.signum and not is_settled and not any(map(self.is_due, INTERVALS)):
            return False
        self.report_pending()
        if self.signum:
            raise Stopped
        if is_settled:
            return self.is_at_end or self.is_out_of_patience()
        if state.bad_steps and not self.is_at_end:
            return False
        if self.is_due("eval_every") and self.held_out and state.measured_step != state.step:
            self.evaluate()
        is_best = state.cycle_step > 0 and state.measured_step == state.step and state.evals_since_best == 0
        is_last = self.is_at_end or self.is_out_of_patience()
        if self.is_due("eval_every") and state.cycle_step:
            self.take_frame(is_last)
        if self.is_due("sample_every") and state.cycle_step and not is_last:
            sample = partial(sample_lines, self.run, self.strategy, self.run.compute, recipe.seed)
            text = self.stepper.run_eagerly(sample)
            self.journal.report_sample(text)
        state.settled_step = state.step
        if is_last:
            self.checkpointer.save(self.run_recipe)
            self.checkpointer.writer.finish()
        elif is_best or (state.cycle_step and self.is_due("save_every")):
            self.checkpointer.save(self.run_recipe)
        return is_last

    def poll(self) -> None:
        """Updates the signal and the share of the time, on all ranks."""
        share = self.state.share if self.clock is None else self.clock.share()
        self.signum, self.state.share = self.world.poll(self.session.stop.signum, share)

    def is_due(self, name: str) -> bool:
        """Whether a periodic action is due: after every interval ``name``, at the end, and before the first step of
        fine-tuning."""
        step, interval = self.state.cycle_step, int(getattr(self.recipe, name))
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
        state, run = self.state, self.run
        measure = partial(
            measure_held_out, self.strategy, self.data, self.recipe, self.held_out, run.compute, self.session.stop
        )
        loss, _, scores = self.stepper.run_eagerly(measure)
        if not math.isfinite(loss):
            raise Diverged(f"the held-out loss became {loss}", state.step, self.recipe.lr)
        is_best = state.best_loss is None or loss < state.best_loss
        state.evals_since_best = 0 if is_best else state.evals_since_best + 1
        state.best_loss = loss if is_best else state.best_loss
        state.measured_step, state.measured_loss = state.step, loss
        self.journal.emit(events.EvalEvent, val_loss=loss, best=is_best, **scores)
        if state.step == 0 and run.init and not self.recipe.beta:  # The model is its own reference, with rewards of 0.
            what = f"loss of {run.init.name} before the first step: {loss:.4f} nats per token"
            what = f"reward of {run.init.name} before the first step: {-loss:.4f}" if self.recipe.reward else what
            self.session.note(f"held-out {what}")

    def take_frame(self, is_last: bool = False) -> None:
        """Adds a frame to the film if it is due."""
        progress = self.position / self.recipe.steps
        frame = self.stepper.run_eagerly(lambda: self.film.take(self.strategy, progress, is_last))
        if frame is not None:
            self.journal.emit(events.FrameEvent, **frame)

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
        length = self.data.batches(self.recipe).length + self.recipe.answer_tokens
        micro_batch = fit_micro_batch(self.stepper, length)
        if micro_batch < self.recipe.micro_batch:
            rows = self.recipe.rows
            self.session.note(f"out of memory: from now on, {micro_batch:,} of {rows:,} sequences at once")
            self.update_recipe(micro_batch=micro_batch)

    def compile(self) -> None:
        """Compiles the step. If that fails, the run continues uncompiled."""
        start = time.perf_counter()
        self.session.listen(events.Progress("compiling the step"))
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
        self.run_recipe = replace(self.run_recipe, **changes)
        self.recipe = self.run_recipe.cycle(self.state.cycle)
        self.journal.write(resolved=asdict(self.run_recipe))

    def finish(self) -> Result:
        """Evaluates the best checkpoint and returns the result of the run."""
        self.stepper.drop_graph()
        if self.clock is not None and self.recipe.budget is not None:
            self.update_recipe(steps=self.state.step)
            self.session.stop.deadline = self.clock.end + self.recipe.budget.end - END_SECONDS
            self.session.listen(events.Plan(self.state.step, self.recipe.batch_tokens))
        self.session.listen(events.Progress("evaluating the best checkpoint"))
        measure = partial(evaluate_best, self.run, self.strategy, self.recipe, self.state, self.journal.speed)
        result = self.stepper.run_eagerly(measure)
        return self.journal.end(result, "steps" if self.is_at_end else "patience")

    def end_by_signal(self) -> NoReturn:
        """Saves the run and raises `Interrupted`, or `WorkError` if saving fails."""
        state, writer = self.state, self.checkpointer.writer
        self.poll()
        self.save_early("signal")
        if writer.save_error is not None:
            raise WorkError(
                f"interrupted at step {state.step:,}, which could not be saved: {error_text(writer.save_error)}",
                f"free up space, then resume from the previous checkpoint: {self.run.resume_command}",
            )
        saved = f", saved in {self.run.path / folder.step_name(state.step)}" if state.step else ""
        raise Interrupted(
            self.signum,
            f"interrupted at step {state.step:,} of {'about ' * self.recipe.is_timed}{self.run_recipe.steps:,}{saved}; "
            f"resume with: {self.run.resume_command}",
        )

    def save_early(self, reason: str) -> None:
        """Saves the last step, unless it is saved, and reports that the run ended early."""
        writer = self.checkpointer.writer
        if self.state.step and self.world.broadcast_object(lambda: writer.step != self.state.step):
            self.checkpointer.save(self.run_recipe)
        self.world.wait_for_main()
        writer.wait()
        self.journal.report_early_end(reason)

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
        elif isinstance(error, ProgramFailure):
            self.save_early("reward")
            error.hint = f"{error.hint}; then resume with: {self.run.resume_command}"
        if is_out_of_memory(error):
            rows = divisors(self.recipe.rows // self.world.size)
            smaller = [n for n in rows if 2 * n <= self.recipe.micro_batch]
            hint = f"resume with: {self.run.resume_command}" + (f" --micro-batch {smaller[-1]}" if smaller else "")
            raise WorkError(f"out of memory at step {self.state.step:,}", hint) from error
        if (failure := device_failure(error)) is not None:
            message = f"the device {self.run.compute.device} failed: {failure}"
            raise WorkError(message, f"resume with: {self.run.resume_command}") from error
        raise error
