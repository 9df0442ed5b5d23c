"""A training run, from texts to a saved checkpoint."""

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from gpt import device, evaluate, events
from gpt.config import TrainConfig
from gpt.decoding.context import Context
from gpt.decoding.generate import generate
from gpt.device import Compute
from gpt.errors import Interrupted, WorkError
from gpt.files import disk_errors, to_json, write_file
from gpt.interrupt import StopSignal
from gpt.model.decoder import GPT
from gpt.model.loss import bits_per_byte
from gpt.model.params import breakdown
from gpt.runs import checkpoint, folder
from gpt.sample_config import SampleConfig
from gpt.text.corpus import open_corpus
from gpt.training import lora
from gpt.training.guard import LOWER, Guard, Snapshot
from gpt.training.optim import make_optimizer
from gpt.training.pace import END_SECONDS, PROBE_SECONDS, PROBE_SHARE, Pace
from gpt.training.pairs import PairData, make_pairs
from gpt.training.prepare import Data, make_data, open_data, tokenized
from gpt.training.recipe import Recipe, resolve
from gpt.training.record import run_record
from gpt.training.schedule import lr_at
from gpt.training.start import Start, find_start
from gpt.training.state import TrainState
from gpt.training.step import Stepper

Listener = Callable[[events.Event | events.Note | events.Plan | events.Progress], None]
EVAL_SHARE, EVAL_TOKENS = 0.005, (4096, 32_768)  # held-out tokens of a periodic evaluation: of all, within bounds
SAMPLE = SampleConfig(max_tokens=80)  # what is shown as the model learns


@dataclass(frozen=True)
class Result:
    """What a finished run gives; losses are the best checkpoint's over the whole held-out text."""

    run: Path
    checkpoint: Path
    steps: int
    tokens_seen: int
    val_loss: float | None  # nats a token
    bits_per_byte: float | None
    tokens_per_second: float  # of steps alone
    seconds: float  # the whole command
    parameters: int
    device: str
    dtype: str
    sample: str  # a few lines from the best checkpoint
    prompt: str  # that they began with


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

    start = find_start(config)
    run, data = _open_run(texts, config, compute, start, listen, note)
    try:
        held_out = len(data.held_out) > 0
        n_tokens, vocab_size = len(data.train), data.tokenizer.vocab_size
        shape = start.model if start else None

        def recipe_for(config: TrainConfig, note: Callable[[str], None] = lambda text: None) -> Recipe:
            return resolve(config, compute, data.bytes, n_tokens, vocab_size, held_out, note, shape, data.rows)

        recipe, pace = recipe_for(config, note), None
        if config.minutes is not None:
            pace = Trainer(run, data, recipe, compute, listen, began, start).rehearse(config.minutes)
            recipe = recipe_for(replace(config, minutes=None, steps=pace.steps(time.perf_counter())))
            note(pace.describe(recipe.batch_tokens))
        trainer = Trainer(run, data, recipe, compute, listen, began, start)
        trainer.pace = pace
        trainer.open(texts, config)
    except BaseException:  # nothing was trained yet
        _discard(run)
        raise
    try:
        with StopSignal() as stop:
            trainer.run_steps(stop)
        return trainer.finish()
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, f"interrupted after the last step; all is saved in {trainer.run}") from None
    finally:
        trainer.close()


def _open_run(
    texts: Sequence[str],
    config: TrainConfig,
    compute: Compute,
    start: Start | None,
    listen: Listener,
    note: Callable[[str], None],
) -> tuple[Path, Data | PairData]:
    """A new run folder and the data of the run, tokenized into it unless they come tokenized; where that fails, no
    folder is left."""
    tokenizer = start.tokenizer if start else None
    if config.pairs:
        pairs = make_pairs(texts, config, compute.device.type, note, tokenizer)
        return folder.create_run(config.out or os.path.join(folder.RUNS, pairs.corpus.name)), pairs
    path = tokenized(texts)
    if path is not None:
        data = open_data(path, config, note, tokenizer)
        return folder.create_run(config.out or os.path.join(folder.RUNS, path.absolute().name)), data
    corpus = open_corpus(texts, config, listen)
    run = folder.create_run(config.out or os.path.join(folder.RUNS, corpus.name))
    try:
        return run, make_data(corpus, config, run / "tokens", compute.device.type, listen, note, tokenizer)
    except Interrupted as stopped:
        _discard(run)
        raise Interrupted(stopped.signum, "interrupted before the first step: nothing is left of the run") from None
    except BaseException:
        _discard(run)
        raise


def _discard(run: Path) -> None:
    """Takes back a run folder, and ``runs/`` where nothing else is in it."""
    shutil.rmtree(run, ignore_errors=True)
    if run.parent == Path(folder.RUNS):
        with contextlib.suppress(OSError):
            run.parent.rmdir()


class Trainer:
    """The parts of a run and what is done with them."""

    def __init__(
        self,
        run: Path,
        data: Data | PairData,
        recipe: Recipe,
        compute: Compute,
        listen: Listener,
        began: float,
        start: Start | None = None,
    ) -> None:
        self.run, self.data, self.recipe, self.compute, self.listen, self.began, self.start = (
            run, data, recipe, compute, listen, began, start,
        )  # fmt: skip
        torch.manual_seed(recipe.seed)
        self.model = start.load(recipe.model, compute.device) if start else GPT(recipe.model).to(compute.device)
        if recipe.lora_rank:
            self.optimizer = lora.adapt(self.model, recipe)
        else:
            self.optimizer = make_optimizer(self.model, recipe.optimizer, recipe.weight_decay, compute.dtype)
        self.stepper = Stepper(self.model, self.optimizer, compute, recipe, self.on_halved)
        self.record: dict[str, Any] | None = None  # what run.json holds
        self.batches = data.batches(recipe.model.block_size, recipe.rows, recipe.seed)
        tokens = min(max(EVAL_TOKENS[0], round(EVAL_SHARE * recipe.steps * recipe.batch_tokens)), EVAL_TOKENS[1])
        wanted = max(1, tokens // recipe.model.block_size)
        self.held_out = data.some_windows(recipe.model.block_size, wanted)
        self.tokenizer_files = checkpoint.TokenizerFiles(data.tokenizer, recipe.model)
        self.state = TrainState()
        self.measured: tuple[int, float] | None = None  # the newest evaluation's step and loss
        self.guard = Guard(recipe.model.vocab_size)
        self.pace: Pace | None = None  # where the run ends at a time
        self.first_step = 0.0  # when it began, on the clock of time.perf_counter

    def open(self, texts: Sequence[str], config: TrainConfig) -> None:
        """Writes ``run.json``, with which the folder is a run."""
        self.record = run_record(texts, config, self.recipe, self.compute, self.data)
        self.record["init"] = self.start.record() if self.start else None
        with disk_errors(self.run, folder.KEPT):
            write_file(self.run / "run.json", to_json(self.record))
            self.metrics = (self.run / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
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
        )
        self.listen(events.Plan(self.recipe.steps, self.recipe.batch_tokens))

    def run_steps(self, stop: StopSignal) -> None:
        """Steps, evaluations, checkpoints and samples until the end, the end of patience, or a signal."""
        state = self.state
        if self.start is not None and self.held_out:
            self.evaluate()
            self.note(f"held-out loss of {self.start.asked} before the first step: {state.best_loss:.4f} nats a token")
        self.first_step = time.perf_counter()
        last = False
        self.good = Snapshot.of(self.model, self.optimizer, state)
        while not last:
            self.step()
            if state.step == self.recipe.steps - self.recipe.decay:
                self.retime()
            recipe = self.recipe
            at_end = state.step == recipe.steps
            if at_end or (stop.signum is None and not self.guard.bad):
                better = self.evaluate() if at_end or state.step % recipe.eval_every == 0 else False
                last = state.step == recipe.steps or self.out_of_patience()
                if (last or better or state.step % recipe.save_every == 0) and state.step != state.saved_step:
                    self.save()
                if recipe.sample_every and state.step % recipe.sample_every == 0 and not last:
                    self.emit(events.SampleEvent, text=self.sample(self.model, self.compute))
            if stop.signum is not None:
                self.end_by_signal(stop.signum)

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
        if self.record is not None:
            self.record["resolved"] = dataclasses.asdict(self.recipe)
            with disk_errors(self.run, folder.KEPT):
                write_file(self.run / "run.json", to_json(self.record))

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
        self.good.restore(self.model, self.optimizer)
        vars(state).update(vars(self.good.state), rate_factor=LOWER, step_seconds=state.step_seconds)
        self.guard = Guard(self.recipe.model.vocab_size)
        self.emit(events.RollbackEvent, failed_step=failed, why=why, rate_factor=LOWER)
        self.note(f"{why} at step {failed:,}: back to step {state.step:,}, with {LOWER:g} times the rate")

    def evaluate(self) -> bool:
        """The loss on held-out windows, the same ones each time; whether it is the lowest so far."""
        if not self.held_out:
            return False
        loss = evaluate.mean_loss(self.model, self.held_out, self.compute)
        if not math.isfinite(loss):
            self.roll_back(f"the held-out loss became {loss}", self.recipe.lr)
            return False
        self.good = Snapshot.of(self.model, self.optimizer, self.state)
        better = loss < self.state.best_loss
        self.state.evals_since_best = 0 if better else self.state.evals_since_best + 1
        self.state.best_loss = min(loss, self.state.best_loss)
        self.measured = (self.state.step, loss)
        self.emit(events.EvalEvent, val_loss=loss, best=better)
        return better

    def save(self) -> None:
        """A checkpoint of the model as it stands, and the index that names it."""
        state = self.state
        target = self.run / folder.step_name(state.step)
        loss = self.measured[1] if self.measured and self.measured[0] == state.step else None
        meta: dict[str, Any] = {
            "step": state.step,
            "tokens_seen": state.step * self.recipe.batch_tokens,
            "val_loss": loss,
        }
        if self.start and self.recipe.lora_rank:
            meta["adapter"] = lora.about(self.start, self.recipe)
        checkpoint.save(target, self.model, self.tokenizer_files, meta)
        with disk_errors(self.run, folder.KEPT):
            folder.prune(self.run, self.recipe.keep)
            folder.write_index(self.run)
        state.saved_step = state.step
        self.good = Snapshot.of(self.model, self.optimizer, state)
        self.emit(events.SaveEvent, checkpoint=target.name)

    def sample(self, model: GPT, compute: Compute) -> str:
        """A few lines from a model, the same for the same weights; leaves torch's global random state alone."""
        training = model.training
        model.eval()
        eot, prompt = self.data.tokenizer.eot, self.data.prompt
        given = self.data.tokenizer.encode(prompt).tolist()
        how = dataclasses.replace(SAMPLE, greedy=True) if prompt else SAMPLE
        ids = [token.id for token in generate(Context(model, compute), given, how, eot, self.recipe.seed)]
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
            loss = evaluate.mean_loss(loaded.model, whole, compute)
            bits = bits_per_byte(loss * self.data.held_out_targets, self.data.held_out_bytes)
        if self.recipe.merge_lora:
            checkpoint.save(self.run / "merged", loaded.model, self.tokenizer_files, {"val_loss": loss})
            self.note(f"merged: {self.run / 'merged'}")
        text = self.sample(loaded.model, compute)
        self.emit(events.SampleEvent, text=text)
        reason = "patience" if self.state.step < self.recipe.steps else "steps"
        self.emit(events.EndEvent, reason=reason, checkpoint=best.name, val_loss=loss, bits_per_byte=bits)
        return Result(
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

    def end_by_signal(self, signum: int) -> None:
        """Saves what there is and raises `Interrupted`."""
        if self.state.saved_step != self.state.step:
            self.save()
        self.end("signal")
        raise Interrupted(
            signum,
            f"interrupted at step {self.state.step:,} of {self.recipe.steps:,}; the model as it stands is "
            f"{self.run / folder.step_name(self.state.step)}",
        )

    def end_diverged(self, what: str, step: int, lr: float) -> NoReturn:
        """Stops a run that computes no numbers any more; what was saved before stays as it is."""
        self.end("diverged")
        saved = (
            f"the checkpoints in {self.run} are from before" if self.state.saved_step >= 0 else "nothing was saved yet"
        )
        raise WorkError(f"{what} at step {step:,}, at a learning rate of {lr:.2g}", f"train with a lower --lr; {saved}")

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
        with disk_errors(self.run, folder.KEPT):
            self.metrics.write(events.to_json(event) + "\n")
        self.listen(event)

    def note(self, text: str) -> None:
        """A line for the listener alone."""
        self.listen(events.Note(text))

    def close(self) -> None:
        """Closes the metrics."""
        with disk_errors(self.run, folder.KEPT):
            self.metrics.close()
