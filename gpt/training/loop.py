"""A training run, from texts to a saved checkpoint, in one go or resumed."""

import contextlib
import dataclasses
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from gpt import device, evaluate, events, files
from gpt.config import SampleConfig, TrainConfig
from gpt.decoding.generate import Context, generate
from gpt.device import Compute
from gpt.errors import Interrupted, WorkError
from gpt.files import disk_errors, to_json, write_file
from gpt.interrupt import Stopped, StopSignal
from gpt.model.decoder import GPT
from gpt.model.loss import bits_per_byte
from gpt.model.params import breakdown
from gpt.runs import checkpoint, folder
from gpt.settings import from_dict
from gpt.training import lora, opening, resume, saving
from gpt.training.guard import LOWER, Guard
from gpt.training.metrics import Metrics
from gpt.training.optim import make_optimizer
from gpt.training.pace import END_SECONDS, PROBE_SECONDS, PROBE_SHARE, Pace
from gpt.training.pairs import PairData
from gpt.training.prepare import Data
from gpt.training.recipe import Recipe, resolve
from gpt.training.record import first_record, now, run_record
from gpt.training.result import Result
from gpt.training.schedule import lr_at
from gpt.training.start import Start, find_start
from gpt.training.state import Machine, Saved, Snapshot, TrainState, read_snapshot
from gpt.training.step import Stepper

Listener = Callable[[events.Event | events.Note | events.Plan | events.Progress], None]
EVAL_SHARE, EVAL_TOKENS = 0.005, (4096, 32_768)  # held-out tokens of a periodic evaluation: of all, within bounds
SAMPLE = SampleConfig(max_tokens=80)  # what is shown as the model learns


@dataclass(frozen=True)
class Setting:
    """What a run is made of, before the model is."""

    run: Path
    data: Data | PairData
    compute: Compute
    start: Start | None
    listen: Listener
    began: float  # on the clock of time.perf_counter; of a run that is resumed, as if there had been no pause

    def note(self, text: str, warning: bool = False) -> None:
        """A line for the listener alone."""
        self.listen(events.Note(text, warning))


def train(
    texts: Sequence[str], config: TrainConfig, listen: Listener = lambda event: None, began: float | None = None
) -> Result:
    """Trains a decoder on ``texts`` (files, folders, ``-`` or corpora by name; none: ``pydocs``) and tells ``listen``
    how it goes. ``began`` is when the command did, on the clock of `time.perf_counter`.

    Raises `UserError` for input that cannot be used, `WorkError` where the work fails, and `Interrupted` after
    SIGINT or SIGTERM, once the state is saved.
    """
    began = time.perf_counter() if began is None else began
    compute = device.pick(config.device, config.dtype, training=True)

    def note(text: str) -> None:
        listen(events.Note(text))

    with contextlib.ExitStack() as held:
        stop = held.enter_context(StopSignal(at_once=True))
        start = find_start(config)
        tokenizer = start.tokenizer if start else None
        opened = opening.new_run(texts, config, compute.device.type, listen, note, tokenizer)
        run, data = held.enter_context(opened)
        setting = Setting(run, data, compute, start, listen, began)
        with opening.taken_back(run):
            trainer = _begin(setting, config, first_record(texts, config))
        return trainer.train(stop)


def go_on(
    run: str | None = None,
    given: Mapping[str, Any] | None = None,
    texts: Sequence[str] = (),
    listen: Listener = lambda event: None,
    began: float | None = None,
) -> Result:
    """Goes on with ``run``, or the newest in ``runs/`` that is not finished, exactly where its newest whole checkpoint
    is; without one, from step 0. ``given``: settings that may change (`gpt.training.resume.MAY_CHANGE`).

    Raises as `train` does, and `UserError` where there is no such run, or for what may not change.
    """
    began = time.perf_counter() if began is None else began
    given = given or {}

    def note(text: str) -> None:
        listen(events.Note(text))

    resume.refuse_others(given, texts)
    from_dict(TrainConfig, given, "resume")
    path = resume.find_run(run)
    with contextlib.ExitStack() as held:
        stop = held.enter_context(StopSignal(at_once=True))
        held.enter_context(opening.locked_run(path))
        begun = resume.read_begun(path)
        if begun.result is not None and (given.get("steps") or 0) <= begun.result.steps:
            note(f"{path} is finished")
            return begun.result
        files.recover(path)
        resume.find_checkpoint(begun, note)
        compute = resume.same_compute(begun, given.get("device"), note)
        start = resume.same_start(begun)
        tokenizer = start.tokenizer if start else begun.tokenizer
        data = opening.same_data(
            path, begun.record, begun.texts, begun.config, compute.device.type, listen, note, tokenizer
        )
        spent = begun.saved.state.seconds if begun.saved else 0.0
        setting = Setting(path, data, compute, start, listen, began - spent)
        return _begin(setting, begun.config, begun.record, begun, given).train(stop)


def _begin(
    setting: Setting,
    config: TrainConfig,
    record: dict[str, Any],
    begun: resume.Begun | None = None,
    given: Mapping[str, Any] | None = None,
) -> "Trainer":
    """A trainer that is ready for its first step, or for the next one of a run that was begun."""
    data, note = setting.data, setting.note
    held_out = len(data.held_out) > 0
    n_tokens, vocab_size = len(data.train), data.tokenizer.vocab_size
    shape = setting.start.model if setting.start else None

    def recipe_for(config: TrainConfig, note: Callable[[str], None] = lambda text: None) -> Recipe:
        return resolve(config, setting.compute, data.bytes, n_tokens, vocab_size, held_out, note, shape, data.rows)

    recipe, pace = begun.recipe if begun else None, None
    if recipe is None:
        recipe = recipe_for(config, note)
        if config.minutes is not None:
            pace = Trainer(setting, recipe).rehearse(config.minutes)
            recipe = recipe_for(replace(config, minutes=None, steps=pace.steps(time.perf_counter())))
            note(pace.describe(recipe.batch_tokens))
    saved = begun.saved if begun else None
    if given:
        recipe = resume.changed(recipe, given, setting.compute, saved.state.step if saved else 0, note)
    elif saved is not None and saved.pace is not None:
        pace = replace(saved.pace, deadline=saved.pace.deadline + setting.began)
    trainer = Trainer(setting, recipe, saved, begun.path if begun else None)
    trainer.pace = pace
    trainer.open(record, given)
    return trainer


class Trainer:
    """The parts of a run and what is done with them."""

    def __init__(self, setting: Setting, recipe: Recipe, saved: Saved | None = None, path: Path | None = None) -> None:
        """``saved`` and ``path``: the checkpoint that the run goes on from."""
        self.run, self.data, self.compute, self.start = setting.run, setting.data, setting.compute, setting.start
        self.listen, self.note, self.began = setting.listen, setting.note, setting.began
        self.recipe = recipe
        torch.manual_seed(recipe.seed)
        self.model = self._model(path)
        if recipe.lora_rank:
            self.optimizer = lora.adapt(self.model, recipe)
        else:
            self.optimizer = make_optimizer(self.model, recipe.optimizer, recipe.weight_decay, self.compute.dtype)
        self.stepper = Stepper(self.model, self.optimizer, self.compute, recipe, self.on_halved)
        self.record: dict[str, Any] | None = None  # what run.json holds
        self.batches = self.data.batches(recipe.model.block_size, recipe.rows, recipe.seed)
        tokens = min(max(EVAL_TOKENS[0], round(EVAL_SHARE * recipe.steps * recipe.batch_tokens)), EVAL_TOKENS[1])
        wanted = max(1, tokens // recipe.model.block_size)
        self.held_out = self.data.some_windows(recipe.model.block_size, wanted)
        self.tokenizer_files = checkpoint.TokenizerFiles(self.data.tokenizer, recipe.model)
        self.state = TrainState()
        self.guard = Guard(recipe.model.vocab_size, self.state)
        self.pace: Pace | None = None  # where the run ends at a time
        self.snapshot = Snapshot()  # the newest good state: what is saved, and gone back to
        self.saver = saving.Saver(self.run, recipe.keep, self.on_saved, self.warn)
        if saved is not None and path is not None:
            before = read_snapshot(path, saved, self.model, self.optimizer)
            vars(self.state).update(vars(before.restore(self.model, self.optimizer, self.stepper.scaler)))

    def _model(self, path: Path | None) -> GPT:
        """New, or that of the run to go on with, or of the model that is fine-tuned."""
        shape, place = self.recipe.model, self.compute.device
        if path is not None and not self.recipe.lora_rank:
            return checkpoint.load(path, place, shape).model.train()
        return self.start.load(shape, place) if self.start else GPT(shape).to(place)

    def open(self, record: dict[str, Any], given: Mapping[str, Any] | None = None) -> None:
        """Writes ``run.json``, looks for room, and says what is to be done."""
        if self.state.step == 0:
            self.record = run_record(record, self.recipe, self.compute, self.data, self.start)
        else:
            again = {"at": now(), "step": self.state.step, "given": dict(given or {})}
            self.record = record | {"resumed": [*record.get("resumed", []), again]}
        self.record.pop("ended", None)
        self.change()
        saving.check_room(self.run, self.size)
        self.metrics = Metrics(self.run, self.warn, self.state.metrics_bytes)
        shape = self.recipe.model
        self.note(
            f"model {self.recipe.preset}: {breakdown(shape).trainable:,} parameters ({shape.n_layer} layers, "
            f"{shape.n_head} heads, {shape.n_embd} wide, context {shape.block_size}, dropout {shape.dropout:g})"
        )
        if self.recipe.lora_rank:
            self.note(lora.describe(self.model))
        epochs = self.recipe.steps * self.recipe.batch_tokens / len(self.data.train)
        self.note(
            f"{self.recipe.steps:,} steps of {self.recipe.batch_tokens:,} tokens, {epochs:.1f} times the text, "
            f"on {self.compute.describe()}; run {self.run}"
            + (f"; from step {self.state.step:,}" if self.state.step else "")
        )
        self.listen(events.Plan(self.recipe.steps, self.recipe.batch_tokens))

    def train(self, stop: StopSignal) -> Result:
        """All that is left to do, until the end, the end of patience, or a signal."""
        stop.at_once, self.stop = False, stop
        try:
            self.run_steps()
            return self.finish()
        except Stopped:
            self.end_by_signal()
        except BaseException as error:
            if not isinstance(error, Interrupted):  # what is being written becomes whole
                self.saver.wait()
            raise
        finally:
            self.metrics.close()

    def run_steps(self) -> None:
        """Steps, and after each what is due."""
        if self.state.step == 0:
            self.state.first_step = time.perf_counter() - self.began
        else:
            self.emit(events.ResumeEvent, checkpoint=folder.step_name(self.state.step))
            self.saver.step = self.state.settled_step
        self.first_step = self.began + self.state.first_step
        ended = self.settle()
        self.remember()
        while not ended:
            self.step()
            if self.state.step == self.recipe.steps - self.recipe.decay:
                self.retime()
            ended = self.settle()

    def settle(self) -> bool:
        """What is due after a step: evaluation, sample, checkpoint. Whether the run has come to its end."""
        state, recipe = self.state, self.recipe
        self.saver.poll()
        if self.stop.signum is not None:
            raise Stopped
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
            self.emit(events.SampleEvent, text=self.sample(self.model, self.compute))
        state.settled_step = state.step
        if last or better or (state.step and state.step % recipe.save_every == 0):
            self.save(last)
        return last

    def due(self, every: int) -> bool:
        """Whether what is done every so many steps is, after this one; at the end always, before the first step where
        there is something to measure."""
        step = self.state.step
        return step == self.recipe.steps or (every > 0 and step % every == 0 and (step > 0 or self.start is not None))

    def step(self) -> None:
        """One optimizer step: gradients of the whole batch, accumulated; clipped; applied."""
        recipe, state = self.recipe, self.state
        started = time.perf_counter()
        lr = state.rate_factor * lr_at(
            state.step + 1, peak=recipe.lr, warmup=recipe.warmup, steps=recipe.steps,
            decay=recipe.decay, schedule=recipe.schedule,
        )  # fmt: skip
        value, norm = self.update(state.step, lr)
        state.step += 1
        state.step_seconds += time.perf_counter() - started
        self.emit(events.StepEvent, loss=value, lr=lr, grad_norm=norm, tokens_per_second=self.tokens_per_second())
        if self.guard.failed:
            self.roll_back(f"the loss became {value:g} (gradient norm {norm:g})", lr)

    def update(self, step: int, lr: float) -> tuple[float, float]:
        """The batch of a step, its gradients and what the optimizer makes of them, unless they are no numbers. Gives
        loss and gradient norm."""
        x, y = (torch.from_numpy(a).to(self.compute.device) for a in self.batches.global_batch(step))
        self.optimizer.set_lr(lr)
        value, norm = self.stepper.gradients(x, y)
        if self.guard.judge(value, norm, self.stepper.scaled):
            self.stepper.apply()
        self.stepper.clear()
        return value, norm

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
            self.record |= more
            with disk_errors(self.run, folder.KEPT):
                write_file(self.run / folder.RECORD, to_json(self.record))

    def rehearse(self, minutes: float) -> Pace:
        """Measures how long steps and evaluations take here. What it leaves of weights is of no use."""
        seconds: list[float] = []
        started = time.perf_counter()
        while len(seconds) < 6 or time.perf_counter() - started < min(PROBE_SHARE * 60 * minutes, PROBE_SECONDS):
            before = time.perf_counter()
            self.update(len(seconds), 0.0)
            seconds.append(time.perf_counter() - before)
        some = self.held_out[: max(1, len(self.held_out) // 4)]
        before = time.perf_counter()
        if some:
            evaluate.mean_loss(self.model, some, self.compute)
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
        steps = self.pace.steps_left(now, (now - self.first_step) / self.state.step)
        self.change(steps=self.state.step + steps, decay=steps)
        self.listen(events.Plan(self.recipe.steps, self.recipe.batch_tokens))

    def roll_back(self, why: str, lr: float) -> None:
        """Goes back to the last good state, once, with a lower rate. Raises `WorkError` the second time."""
        state, failed = self.state, self.state.step
        if state.rate_factor < 1:
            self.end_diverged(why, failed, lr)
        good = self.snapshot.restore(self.model, self.optimizer, self.stepper.scaler)
        vars(state).update(vars(good), rate_factor=LOWER, step_seconds=state.step_seconds)
        self.emit(events.RollbackEvent, failed_step=failed, why=why, rate_factor=LOWER)
        self.note(f"{why} at step {failed:,}: back to step {state.step:,}, with {LOWER:g} times the rate")

    def evaluate(self) -> bool:
        """The loss on held-out windows, the same ones each time. Whether it is a number; else the run goes back."""
        state = self.state
        if state.measured_step == state.step:  # by the run before this one
            return True
        loss = evaluate.mean_loss(self.model, self.stop.watching(self.held_out), self.compute)
        if not math.isfinite(loss):
            self.roll_back(f"the held-out loss became {loss}", self.recipe.lr)
            return False
        better = state.best_loss is None or loss < state.best_loss
        state.evals_since_best = 0 if better else state.evals_since_best + 1
        state.best_loss = loss if better else state.best_loss
        state.measured_step, state.measured_loss = state.step, loss
        self.emit(events.EvalEvent, val_loss=loss, best=better)
        if state.step == 0 and self.start:
            self.note(f"held-out loss of {self.start.asked} before the first step: {loss:.4f} nats a token")
        return True

    def remember(self) -> None:
        """Copies the state as it is, to be saved, and to go back to."""
        self.saver.wait()  # it reads the copy before
        self.state.seconds = time.perf_counter() - self.began
        self.state.metrics_bytes = self.metrics.size
        self.snapshot.take(self.model, self.optimizer, self.stepper.scaler, self.state)

    def save(self, last: bool = False) -> None:
        """A checkpoint of the run as it stands, written while training goes on; the ``last`` one while it waits."""
        self.remember()
        step = self.state.step
        if last:
            self.saver.last(step, self.size, self.checkpoint_files(), lambda: self.stop.signum is not None)
        else:
            self.saver.begin(step, self.size, self.checkpoint_files())

    def checkpoint_files(self) -> Callable[[], checkpoint.Files]:
        """What gives the files of a checkpoint of the snapshot, in any thread."""
        snapshot, recipe, state = self.snapshot, self.recipe, self.snapshot.state
        meta: dict[str, Any] = {
            "step": state.step,
            "tokens_seen": state.step * recipe.batch_tokens,
            "val_loss": state.measured_loss if state.measured_step == state.step else None,
        }
        fixed = {name: tensor.cpu() for name, tensor in checkpoint.fixed(self.model).items()}
        if self.start and recipe.lora_rank:
            meta["adapter"], fixed = lora.about(self.start, recipe), {}
        machine = Machine(str(self.compute.device), self.compute.dtype_name, torch.get_num_threads())
        pace = self.pace and replace(self.pace, deadline=self.pace.deadline - self.began)

        def files() -> checkpoint.Files:
            self.metrics.sync()
            model = checkpoint.contents(recipe.model, fixed | snapshot.weights, self.tokenizer_files, meta)
            return {**model, **snapshot.files(recipe, machine, pace)}

        return files

    @property
    def size(self) -> int:
        """About the bytes of a checkpoint."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        memory = sum(math.prod(shape) for shape in self.optimizer.shapes(self.model).values())
        return 4 * (trained + memory) + sum(map(len, self.tokenizer_files.files.values()))

    def on_saved(self, step: int) -> None:
        """A checkpoint is whole on the disk."""
        self.emit(events.SaveEvent, checkpoint=folder.step_name(step))

    def sample(self, model: GPT, compute: Compute) -> str:
        """A few lines from a model, the same for the same weights; leaves torch's global random state alone."""
        training = model.training
        model.eval()
        eot, prompt = self.data.tokenizer.eot, self.data.prompt
        given = self.data.tokenizer.encode(prompt).tolist()
        how = dataclasses.replace(SAMPLE, greedy=True) if prompt else SAMPLE
        tokens = generate(Context(model, compute), given, how, eot, self.recipe.seed)
        try:
            ids = [token.id for token in self.stop.watching(tokens)]
        finally:
            model.train(training)
        return prompt + self.data.tokenizer.decode([id for id in ids if id != eot])

    def finish(self) -> Result:
        """Reads the best checkpoint back, measures it on the whole held-out text, and lets it speak."""
        best = folder.find_checkpoint(str(self.run))
        compute = self.compute
        if compute.dtype != torch.float32:  # `gpt eval` computes in its own default, so the two agree
            compute = device.pick(str(compute.device), "auto")
        loaded = checkpoint.load(best, compute.device)
        loss = bits = None
        if self.held_out:
            whole = self.data.windows(self.recipe.model.block_size)
            loss = evaluate.mean_loss(loaded.model, self.stop.watching(whole), compute)
            bits = bits_per_byte(loss * self.data.held_out_targets, self.data.held_out_bytes)
        if self.recipe.merge_lora:
            checkpoint.save(self.run / "merged", loaded.model, self.tokenizer_files, {"val_loss": loss})
            self.note(f"merged: {self.run / 'merged'}")
        text = self.sample(loaded.model, compute)
        self.emit(events.SampleEvent, text=text)
        reason = "patience" if self.state.step < self.recipe.steps else "steps"
        self.emit(events.EndEvent, reason=reason, checkpoint=best.name, val_loss=loss, bits_per_byte=bits)
        result = Result(
            run=self.run,
            checkpoint=best,
            steps=self.state.step,
            tokens_seen=self.state.step * self.recipe.batch_tokens,
            val_loss=loss,
            bits_per_byte=bits,
            tokens_per_second=self.tokens_per_second(),
            seconds=time.perf_counter() - self.began,
            parameters=breakdown(self.recipe.model).trainable,
            device=self.compute.device.type,
            dtype=self.compute.dtype_name,
            sample=text,
            prompt=self.data.prompt,
        )
        self.write_record(ended=reason, result=result.record())
        return result

    def end_by_signal(self) -> NoReturn:
        """Saves what there is and raises `Interrupted`; `WorkError` where the disk does not take it."""
        state, signum = self.state, self.stop.signum
        assert signum is not None
        command = f"gpt train --resume {shlex.quote(str(self.run))}"
        if state.step and self.saver.step != state.step:
            self.save()
        self.saver.wait()
        self.end("signal")
        if self.saver.failed is not None:
            raise WorkError(
                f"interrupted at step {state.step:,}, which could not be saved: {saving.said(self.saver.failed)}",
                f"make room, then go on from the checkpoint before: {command}",
            )
        saved = f", saved in {self.run / folder.step_name(state.step)}" if state.step else ""
        raise Interrupted(
            signum, f"interrupted at step {state.step:,} of {self.recipe.steps:,}{saved}; go on with: {command}"
        )

    def end_diverged(self, what: str, step: int, lr: float) -> NoReturn:
        """Stops a run that computes no numbers any more; what was saved before stays as it is."""
        self.saver.wait()
        self.end("diverged")
        self.write_record(ended="diverged")
        saved = folder.checkpoints(self.run)
        said = f"the checkpoints in {self.run} are from before" if saved else "nothing was saved yet"
        raise WorkError(f"{what} at step {step:,}, at a learning rate of {lr:.2g}", f"train with a lower --lr; {said}")

    def end(self, reason: str) -> None:
        """The last line of the metrics of a run that was cut off."""
        self.emit(events.EndEvent, reason=reason, checkpoint=None, val_loss=None, bits_per_byte=None)

    def out_of_patience(self) -> bool:
        """Whether ``patience`` evaluations in a row were no better."""
        return 0 < self.recipe.patience <= self.state.evals_since_best

    def tokens_per_second(self) -> float:
        """The rate of the steps alone, from the start."""
        return self.state.step * self.recipe.batch_tokens / max(self.state.step_seconds, 1e-9)

    def emit(self, kind: Callable[..., events.Event], **values: Any) -> None:
        """Tells the listener and ``metrics.jsonl``."""
        state = self.state
        event = kind(
            step=state.step,
            tokens=state.step * self.recipe.batch_tokens,
            seconds=round(time.perf_counter() - self.began, 3),
            **values,
        )
        self.metrics.write(events.to_json(event))
        self.listen(event)

    def warn(self, text: str) -> None:
        """A line that should not be overlooked."""
        self.note(text, warning=True)
