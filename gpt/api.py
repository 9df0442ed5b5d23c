"""The public Python API: trains and loads models, generates text, and measures loss."""

import contextlib
import functools
import gc
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from gpt.chat.tool_calls import CallFormat, find_format
from gpt.config import device as devices
from gpt.config import events
from gpt.config.device import Compute
from gpt.config.export import ExportConfig
from gpt.config.model import GPTConfig
from gpt.config.sample import Dtype, SampleConfig
from gpt.config.settings import from_dict
from gpt.config.text import ReadConfig, TextConfig
from gpt.config.train import TrainConfig
from gpt.corpus.shards import SIDES, Side
from gpt.decoding import native
from gpt.decoding.constraint import Constraint, ConstraintCache
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine
from gpt.decoding.weights import expected_bytes, find_library, prepare
from gpt.decoding.write import Piece, Sample, TextGenerator
from gpt.insight.evaluate import (
    WINDOW,
    Documents,
    Encoded,
    Evaluation,
    OnWindow,
    Window,
    evaluate,
    score_windows,
    total_loss,
    windows,
)
from gpt.model.decoder import GPT
from gpt.model.params import breakdown
from gpt.model.quantize import BITS, quantize_model
from gpt.runs import checkpoint, folder, gguf_model, model_config
from gpt.runs.record import RunRecord
from gpt.runs.sampling_defaults import SamplingDefaults, read_defaults
from gpt.system.errors import Interrupted, UserError, WorkError, did_you_mean
from gpt.system.interrupt import StopSignal
from gpt.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:  # Imported on use, so that sampling starts without them.
    from gpt.corpus.corpus import Listener
    from gpt.corpus.token_folder import TokenFolder
    from gpt.exporting.export import Exported
    from gpt.insight.before_after import BeforeAfter
    from gpt.training.context import Listener as RunListener
    from gpt.training.context import Result
    from gpt.training.data import Dataset


class Writing:
    """Iterates over a sample's text pieces as they are generated, and sets ``sample`` at the end."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self.sample: Sample

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            if piece.sample is not None:
                self.sample = piece.sample
            yield piece.text


@dataclass(frozen=True)
class LanguageModel:
    """A model and its tokenizer, on a device."""

    model: GPT
    tokenizer: Tokenizer
    compute: Compute
    path: Path
    note: Callable[[str], None] = lambda text: None

    @functools.cached_property
    def sampling(self) -> SamplingDefaults:
        """The sampling settings that the model recommends."""
        return read_defaults(self.path, self.note)

    @functools.cached_property
    def engine(self) -> Engine:
        """Generates the texts of all calls and threads. Its KV cache keeps earlier texts, so that later prompts that
        begin like them are computed only from there on."""
        # Calls reserve the positions that they need.
        context = Context(self.model, self.compute, positions=1, vocab_size=self.tokenizer.vocab_size, note=self.note)
        return Engine(context, self.tokenizer.ends)

    @functools.cached_property
    def call_format(self) -> CallFormat:
        """How the model writes tool calls."""
        return find_format(self.tokenizer)

    @functools.cached_property
    def constraints(self) -> ConstraintCache:
        """The compiled constraints of structured output and of answers that can call tools."""
        return ConstraintCache(self.tokenizer, lambda: self.call_format.trigger)

    def write(
        self,
        prompt: str | list[int] = "",
        config: SampleConfig | None = None,
        seed: int = 1337,
        index: int = 0,
        constraint: Constraint | None = None,
    ) -> Writing:
        """Generates a sample, or the best beam, as an iterable of text pieces. ``prompt`` is text or token ids. A
        ``constraint`` replaces that of ``config``. The result depends only on the arguments, except for rounding where
        steps don't run in C (docs/generate.md)."""
        config = config or self.sampling.apply(SampleConfig(), ())
        constraint = constraint or self.constraints.find(config)
        writer = TextGenerator(self.engine, self.tokenizer, config, seed, constraint)
        return Writing(writer.write([prompt], [0 if config.beam else index]))

    def write_all(
        self, prompts: Sequence[str], config: SampleConfig | None = None, seed: int = 1337, num: int = 1
    ) -> Iterator[Piece]:
        """Yields the text pieces of ``num`` samples or beams per prompt, one sample after another. Batching does not
        change the samples. Raises `UserError` for unsupported settings."""
        config = config or self.sampling.apply(SampleConfig(), ())
        config.check_num(num)
        writer = TextGenerator(self.engine, self.tokenizer, config, seed, self.constraints.find(config))
        return writer.write(prompts, range(num))

    def generate(self, prompt: str = "", *, seed: int = 1337, num: int = 1, **settings: Any) -> list[str]:
        """Returns ``num`` continuations of ``prompt``, with ``beam`` the best. ``settings`` are fields of
        `SampleConfig`: ``temperature``, ``top_k``, ``max_tokens`` … The defaults are the model's. Raises `UserError`
        for unknown settings."""
        config = self.sampling.apply(from_dict(SampleConfig, settings, "generate"), settings)
        pieces = self.write_all([prompt], config, seed, num)
        return [piece.sample.text for piece in pieces if piece.sample is not None]

    def loss(self, text: str, stride: int | None = None) -> float:
        """Returns the mean loss over ``text`` in nats per token. Raises `UserError` for a text of fewer than two
        tokens."""
        return self.evaluate([text], stride).loss

    def evaluate(
        self,
        texts: Sequence[str],
        stride: int | None = None,
        on_window: OnWindow | None = None,
        block_size: int | None = None,
    ) -> Evaluation:
        """Measures the loss over documents, in windows of ``block_size`` tokens (default: the context, up to 1,024)."""
        documents = Encoded(self.tokenizer.document(text).astype(np.int64) for text in texts)
        return evaluate(self.model, self.tokenizer, documents, self.compute, stride, on_window, block_size)

    def evaluate_files(
        self,
        texts: Sequence[str],
        config: ReadConfig | None = None,
        side: str = "val",
        stride: int | None = None,
        listen: "Listener" = lambda event: None,
        on_window: OnWindow | None = None,
        block_size: int | None = None,
        compare: bool = False,
    ) -> Evaluation:
        """Measures the loss over files, folders or named corpora of any size. In a token folder, which must have this
        model's tokenizer, measures the loss over one ``side``. With ``compare``, also measures the text's
        yardsticks."""
        config, scored = config or ReadConfig(), 0

        def report(window: Window, losses: Any, total: int) -> None:
            nonlocal scored
            scored += len(losses)
            if on_window is not None:
                on_window(window, losses, total)
            listen(events.Progress("scored", scored, total, "tokens"))

        if side not in SIDES:
            raise UserError(f'there is no split "{side}"', did_you_mean(side, SIDES))
        with _open_documents(texts, self.tokenizer, config, side, listen, self.note) as (tokens, documents):
            result = evaluate(self.model, self.tokenizer, documents, self.compute, stride, report, block_size)
            if compare:
                from gpt.insight.report import find_yardsticks

                side = side if tokens.path in map(Path, texts) else "train"  # Untokenized texts are one side.
                tokens_per_byte = result.tokens / max(1, result.bytes)
                yardsticks, trend = find_yardsticks(self.path.parent, tokens, side, tokens_per_byte)
                result = replace(result, yardsticks=yardsticks, trend=trend)
            return result


@contextlib.contextmanager
def _open_documents(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    config: ReadConfig,
    side: Side,
    listen: "Listener",
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple["TokenFolder", Documents]]:
    """Yields a token folder and its documents. ``texts`` are either token folders (then only one ``side`` is used) or
    texts to tokenize."""
    from gpt.corpus.corpus import open_corpus
    from gpt.corpus.token_folder import TokenFolder, find_token_folders
    from gpt.corpus.tokenize import tokenize

    if paths := find_token_folders(texts):
        for field in fields(ReadConfig):
            if getattr(config, field.name) != field.default:
                note(f"{paths[0]} is already tokenized: --{field.name.replace('_', '-')} has no effect")
        folder = TokenFolder(*paths)
        if not folder.adopt_tokenizer(tokenizer):
            raise UserError(
                f"{folder.path} was made with another tokenizer ({folder.tokenizer.name}), not the model's",
                "tokenize the text with the model's own: gpt tokenize … --tokenizer MODEL",
            )
        yield folder, folder.stream(side).documents
        return
    if side != "val":
        note(f"{texts[0]} is not a token folder: all of it is measured, and --split has no effect")
    corpus = open_corpus(texts, TextConfig(**vars(config), val_fraction=0), listen)
    try:
        with StopSignal(at_once=True), tempfile.TemporaryDirectory(prefix="gpt-eval-") as scratch:
            folder = tokenize(corpus, tokenizer, Path(scratch) / "tokens", listen=listen)
            stream = folder.stream("train")
            try:
                yield folder, stream.documents
            finally:
                stream.release()  # Windows cannot delete an open file.
    except Interrupted as interruption:
        # Drop the message of `tokenize`, which names the deleted folder.
        raise Interrupted(interruption.signum) from None


def load(
    path: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    note: Callable[[str], None] = lambda text: None,
    for_decoding: bool = False,
) -> LanguageModel:
    """Loads the model at ``path``: a run (its best checkpoint), ``RUN:best|latest|step-N``, a checkpoint, or a
    Transformers folder. The default is the newest run. If the latest checkpoint is damaged, calls ``note`` and loads
    the previous one. Raises `UserError` if the model is missing
    or damaged.

    With ``for_decoding``, the weights are laid out for generating text, in ``dtype``. The model can then be neither
    trained nor saved, and the default number of ``threads`` depends on its size. On a CPU, the quantized matrices of a
    GGUF file are used as they are, unless ``dtype`` is given. A ``dtype`` of "int8" or "int4" quantizes the weights.
    """
    model_path = folder.find_checkpoint(None if path is None else str(path), note)
    is_adapter, bits = folder.is_adapter(model_path), BITS.get(dtype)
    compute = pick(device, dtype)
    is_packed = for_decoding and find_library(compute, note) is not None
    quantized_types = {} if is_adapter else gguf_model.quantized_types(model_path)
    keep_blocks = is_packed and dtype in ("auto", *BITS) and bool(quantized_types)
    own_bytes = gguf_model.packed_bytes(model_path) if keep_blocks and bits is None else None
    casts = (for_decoding or bits is not None) and not is_adapter
    compute = _fit_dtype(model_path, compute, dtype, casts, own_bytes, note)
    parameters = breakdown(model_config.load_config(folder.home(model_path))).trainable
    devices.use_threads(compute, threads, parameters if for_decoding else None)
    finish: Callable[[torch.nn.Module], object] | None = None
    if for_decoding:
        finish = functools.partial(prepare, compute=compute, note=note, bits=bits)
    elif bits is not None:
        finish = functools.partial(quantize_model, bits=bits, dtype=compute.dtype)
    weight_dtype = None if is_packed else compute.dtype if finish is not None else torch.float32
    loaded = checkpoint.load(
        model_path, compute.device, dtype=weight_dtype, mapped=True, finish=finish, keep_blocks=keep_blocks
    )
    if native.is_packed(loaded.model):
        compute = devices.lend_threads(compute)
    if for_decoding:
        devices.trim_memory()
    if bits is not None:
        note(f"{dtype} rounds the weights: gpt eval TEXT with and without --dtype {dtype} shows the loss in quality")
    elif keep_blocks and (rounded := [name for name, is_exact in quantized_types.items() if not is_exact]):
        note(f"{', '.join(rounded)} weights are rounded to int8: --dtype float32 restores them")
    return LanguageModel(loaded.model, loaded.tokenizer, compute, model_path, note)


def _fit_dtype(
    path: Path, compute: Compute, dtype: str, casts: bool, own_bytes: int | None, note: Callable[[str], None]
) -> Compute:
    """Changes ``compute`` to bfloat16 if ``dtype`` is "auto", loading converts the weights (``casts``), and they do not
    fit in memory in float32. ``own_bytes`` is the size of quantized weights that are used as they are stored. Raises
    `UserError` if the weights do not fit."""
    config, memory = model_config.load_config(folder.home(path)), compute.memory()
    full_size = 4 * breakdown(config).trainable
    if casts and dtype == "auto" and own_bytes is None and full_size > memory:
        note(
            f"float32 weights take {full_size / 1e9:,.1f} GB, and {memory / 1e9:,.1f} GB are available: using bfloat16"
        )
        compute = replace(compute, dtype=torch.bfloat16)
    needed = own_bytes or (expected_bytes(config, compute, BITS.get(dtype)) if casts else full_size)
    if needed > memory:
        raise UserError(
            f"the weights of {path} take {needed / 1e9:,.1f} GB, and {memory / 1e9:,.1f} GB are available",
            "use --dtype bfloat16, int8 or int4, or a smaller model",
        )
    return compute


def pick(device: str, dtype: str) -> Compute:
    """Chooses the device and the dtype of unquantized weights. Raises `UserError` for an unknown dtype."""
    if dtype not in get_args(Dtype):
        raise UserError(f'there is no dtype "{dtype}"', did_you_mean(dtype, get_args(Dtype)))
    return devices.pick(device, "auto" if dtype in BITS else dtype)


def export(
    model: str | Path | None,
    out: str | Path,
    *,
    eval: str | None = None,
    device: str = "auto",
    note: Callable[[str], None] = lambda text: None,
    listen: "Listener" = lambda event: None,
    **settings: Any,
) -> "Exported":
    """Exports a model to ``out``: a GGUF file if the name ends in .gguf, a web page if it ends in .html, otherwise a
    folder for publishing. ``model`` is as in `load`. ``settings`` are fields of `ExportConfig`:
    ``dtype``, ``license``, ``title`` … ``eval`` names a text as in `train`; its loss is measured with the
    original and the exported weights. Calls ``listen`` with progress events. Raises `UserError`, `WorkError`, and
    `Interrupted` after a signal."""
    from gpt.exporting import export as exports
    from gpt.exporting.source import open_source

    start_time = time.monotonic()
    config = from_dict(ExportConfig, settings, "export")
    target = exports.find_target(str(out), config)
    model_name = None if model is None else str(model)
    path = folder.find_checkpoint(model_name, note)
    source = open_source(path, model_name or "", note)
    target = exports.check(source, target)
    for difference in exports.describe_differences(source, target):
        note(difference)
    compute, stored_weights = devices.pick(device, "float32"), exports.read_back(source, target)

    def build_model(weights: checkpoint.Parameters) -> LanguageModel:
        decoder = checkpoint.build(source.config, weights, compute.device, torch.float32)
        return LanguageModel(decoder, source.tokenizer, compute, path, note)

    with exports.write_atomically(target):
        models = (source.weights, stored_weights)
        losses = [build_model(weights).evaluate_files([eval], listen=listen).loss for weights in models if eval]
        before, after = losses or (None, None)
        opening = None
        if (plan := exports.plan_opening(source, target, compute.memory())) is not None:
            opening = [*build_model(stored_weights).write_all([plan[0]], plan[1])][-1].sample
        on_written = lambda done, total: listen(events.Progress("written", done, total, "parameters"))
        tensors, size = exports.write(source, target, opening, on_written)
    return exports.Exported(
        target.out,
        target.format,
        target.type,
        source.config.layout,
        size,
        tensors,
        source.config.vocab_size,
        before,
        after,
        time.monotonic() - start_time,
        source.tokenizer.chat_template is not None,
    )


def compare_with_base(
    run: str | Path,
    also: str | None = None,
    *,
    listen: "Listener" = lambda event: None,
    note: Callable[[str], None] = lambda text: None,
) -> "BeforeAfter":
    """Compares a fine-tuned ``run`` with the model that it started from: losses on the run's held-out text and on
    ``also``, answers to the same prompts with the same seeds, and token probabilities in a held-out passage. Loads one
    model at a time. Raises `UserError` if the run has no base, or if the base or the held-out text is gone."""
    from gpt.insight import before_after
    from gpt.insight.openings import choose_openings
    from gpt.insight.report import training_tokens
    from gpt.training.resuming import place_of

    record, run = RunRecord.read(Path(run)), Path(run)
    if record.init is None:
        message = f"{run} has no base to compare with: it was not started from a model"
        raise UserError(message, "--before-after needs a run of gpt train --init MODEL")
    paths = [folder.find_checkpoint(place_of(record.init)), folder.find_checkpoint(str(run), note)]
    if folder.weight_checksums(paths[0]) != record.init.sha256:
        raise UserError(f"{run} was started from {record.init.model}, whose weights have changed", "restore them")
    (base, _), (tuned, tokenizer) = map(checkpoint.peek, paths)
    if tuned.vocab_size > base.vocab_size:
        message = f"{run} has {tuned.vocab_size - base.vocab_size:,} tokens that its base {record.init.model} lacks"
        raise UserError(message, "compare runs of a base with a chat template, or on text")
    block_size = min(WINDOW, base.block_size, tuned.block_size)
    tokens = training_tokens(run, record)
    data = _open_run_data(run, record, tokens, tokenizer, base, note)
    sides = 2 if data.preferences else 1  # Only chosen answers are measured.
    samples = data.sample_windows(block_size, before_after.PROMPTS * sides)[::sides]
    if not samples:
        raise UserError(f"{run} holds out no text to compare on", "train with --val-fraction above 0")
    prompts, passages = zip(*map(before_after.cut, samples), strict=True)
    name, passage = "held-out answers", passages[len(samples) // 2]
    if not data.rows and tokens is not None:
        openings = choose_openings(tokens.stream("val"), tokenizer, before_after.PROMPTS)
        name, prompts = "held-out text", tuple(map(tokenizer.prompt, openings or [""]))
    texts: dict[str, Any] = {name: lambda: itertools.islice(data.windows(block_size), 0, None, sides)}
    sampling = SampleConfig(max_tokens=before_after.ANSWER_TOKENS)

    def measure(path: Path) -> before_after.Measurement:
        gc.collect()  # Frees the other model, whose engine refers to itself.
        note(f"measuring {path}")
        model, means = load(path, note=note), []
        for text, open_windows in texts.items():
            total, count = total_loss(model.model, open_windows(), model.compute)
            if not math.isfinite(total) or not count:
                raise WorkError(f"the loss of {path} on {text} is {total} for {count:,} tokens", "use another text")
            means.append(total / count)
        answers = ["".join(model.write(prompt, sampling)) for prompt in prompts]
        ((_, losses),) = score_windows(model.model, [passage], model.compute)
        return means, answers, losses.tolist()

    with contextlib.ExitStack() as stack:
        if also is not None:
            opened = _open_documents([also], tokenizer, ReadConfig(), "val", listen, note)
            documents = stack.enter_context(opened)[1]
            texts[also] = lambda: windows(documents, block_size)
        before, after = map(measure, paths)
    names = record.init.model, str(paths[1])
    return before_after.compare(names, list(texts), prompts, passage, tokenizer, before, after)


def _open_run_data(
    run: Path,
    record: RunRecord,
    tokens: "TokenFolder | None",
    tokenizer: Tokenizer,
    base: GPTConfig,
    note: Callable[[str], None],
) -> "Dataset":
    """Opens the text of a run, or its examples. Raises `UserError` if it is gone or has changed."""
    from gpt.training.data import load_tokens, open_examples

    if tokens is not None and tokens.adopt_tokenizer(tokenizer):
        return load_tokens(tokens, found=False)
    config = from_dict(TrainConfig, record.settings or {}, "run.json")
    if not config.has_examples:
        raise UserError(f"the tokens of {run} are gone", "restore them, or compare on texts with two gpt eval")
    data = open_examples(record.texts or [], config, "cpu", note, tokenizer, base)
    if record.sources != data.sources:
        raise UserError(f"the text of {run} has changed: {', '.join(record.texts or [])}", "restore it")
    return data


def train(*texts: str | Path, listen: "RunListener" = lambda event: None, **settings: Any) -> "Result":
    """Trains on files, folders or named corpora (default: ``pydocs``). ``settings`` are fields of `TrainConfig`:
    ``steps``, ``preset``, ``out`` … Calls ``listen`` with every event. Raises `UserError`, `WorkError` and
    `Interrupted`."""
    from gpt.training import run as runs

    config = from_dict(TrainConfig, settings, "train")
    return runs.train([str(text) for text in texts], config, listen)


def resume(run: str | Path | None = None, listen: "RunListener" = lambda event: None, **settings: Any) -> "Result":
    """Resumes ``run`` exactly where it stopped. The default is the newest unfinished run in ``runs/``. ``settings`` are
    some of `gpt.training.resuming.CHANGEABLE_OPTIONS`. Raises the same errors as `train`."""
    from gpt.training import run as runs

    return runs.resume(None if run is None else str(run), settings, (), listen)
