"""The folder and the data of a run: made for a new one, found again for one that goes on."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt import events
from gpt.config import TrainConfig
from gpt.device import Compute
from gpt.errors import Interrupted, UserError
from gpt.files import disk_errors, locked
from gpt.model.decoder import GPT
from gpt.model.params import breakdown
from gpt.parallel.world import World
from gpt.runs import folder
from gpt.runs.record import RunRecord
from gpt.text.corpus import Corpus, open_corpus
from gpt.text.token_folder import MANIFEST
from gpt.text.tokenizer import Tokenizer
from gpt.training import lora
from gpt.training.pairs import PairData, make_pairs
from gpt.training.prepare import Data, find_data, make_data, open_data, reopen_data, tokenized
from gpt.training.recipe import Recipe
from gpt.training.record import first_record
from gpt.training.size import sized
from gpt.training.start import Start
from gpt.words import counted

TOKENS = "tokens"  # in the run folder
Notes = Callable[[str], None]
Listener = Callable[[events.Event | events.Note | events.Plan | events.Progress], None]


@dataclass(frozen=True)
class Setting:
    """What a run is made of, before the model is."""

    run: Path
    data: Data | PairData
    compute: Compute
    start: Start | None
    world: World
    listen: Listener
    began: float  # on the clock of time.perf_counter; of a run that is resumed, as if there had been no pause

    def note(self, text: str, warning: bool = False) -> None:
        """A line for the listener alone."""
        self.listen(events.Note(text, warning))

    def warn(self, text: str) -> None:
        """A line that should not be overlooked."""
        self.note(text, warning=True)


@contextlib.contextmanager
def new_run(
    texts: Sequence[str],
    config: TrainConfig,
    compute: Compute,
    listen: Listener,
    note: Notes,
    tokenizer: Tokenizer | None,
    processes: int = 1,
) -> Iterator[tuple[Path, Data | PairData, RunRecord]]:
    """A new run folder, this process's alone, the data of the run, tokenized into it unless they come tokenized, and
    what ``run.json`` says by then: it is there before the text is tokenized. Where something fails before the first
    step, no folder is left."""
    asked, device = config, compute.device.type
    if processes > 1 and config.pairs and "-" in texts:
        raise UserError("pairs from stdin cannot be read by several processes", "put them into a file")
    data: Data | PairData | None = None
    corpus: Corpus | None = None
    if config.pairs:
        data = make_pairs(texts, config, device, note, tokenizer)
        name = data.corpus.name
    elif path := tokenized(texts):
        data = open_data(path, config, note, tokenizer)
        config = sized(config, compute, data.bytes, note, processes)
        name = path.absolute().name
    else:
        corpus = open_corpus(texts, config, listen)
        config = sized(config, compute, corpus.found.bytes, note, processes)
        name = corpus.name
    record = first_record(texts, asked, config.preset)
    run = folder.create_run(config.out or os.path.join(folder.RUNS, name))
    with locked_run(run):
        with taken_back(run):
            with disk_errors(run):
                record.write(run)
            if data is None:
                assert corpus is not None
                data = make_data(corpus, config, run / TOKENS, device, listen, note, tokenizer)
        yield run, data, record


def shared(world: World, data: Data | PairData | None, pairs: Callable[[], PairData]) -> Data | PairData:
    """In all processes the data that the first one has opened or made. Others open the same folder, or read the
    ``pairs`` themselves; where those differ, the first one raises `UserError`."""

    def said() -> dict[str, Any] | None:
        return {"path": str(data.folder.path), "found": data.found} if isinstance(data, Data) else None

    place = world.decided(said)
    own = world.together(lambda: data or (find_data(Path(place["path"]), place["found"]) if place else pairs()))
    world.agree({"text": own.sources()})
    return own


def locked_run(run: Path) -> contextlib.AbstractContextManager[None]:
    """Holds a run folder for this process."""
    return locked(run, "it is being trained: wait for it, or train another run with --out")


@contextlib.contextmanager
def taken_back(run: Path) -> Iterator[None]:
    """Leaves nothing of a run that fails here, before its first step."""
    try:
        yield
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


def same_data(
    run: Path,
    record: RunRecord,
    texts: Sequence[str],
    config: TrainConfig,
    device: str,
    listen: Listener,
    note: Notes,
    tokenizer: Tokenizer | None,
) -> Data | PairData:
    """The data of a run that was begun: its own tokens, whose sums are compared, or what lies outside of it, read
    again. Raises `UserError` where that is not what it was."""
    data: Data | PairData
    if (run / TOKENS / MANIFEST).exists():
        data = reopen_data(run / TOKENS)
    elif config.pairs:
        data = make_pairs(texts, config, device, note, tokenizer)
    elif path := tokenized(texts):
        data = open_data(path, config, note, tokenizer)
    else:  # the run ended while it tokenized
        shutil.rmtree(run / TOKENS, ignore_errors=True)
        data = make_data(open_corpus(texts, config, listen), config, run / TOKENS, device, listen, note, tokenizer)
    made_with, was = record.tokenizer, record.sources
    if (was is not None and was != data.sources()) or (
        made_with and made_with.fingerprint != data.tokenizer.fingerprint
    ):
        raise UserError(
            f"the text of {run} is not what it was: {', '.join(texts) or run / TOKENS}",
            "put it back as it was, or fine-tune on the new text with --init",
        )
    return data


def describe(setting: Setting, recipe: Recipe, model: GPT, step: int) -> list[str]:
    """Lines for whoever watches: the model, and what is done with it from ``step`` on."""
    shape = recipe.model
    epochs = recipe.tokens(recipe.steps) / len(setting.data.train)
    processes = f"{setting.world.size} processes, each on " if setting.world.size > 1 else ""
    divided = [f"{recipe.tensor} processes compute each sequence"] if recipe.tensor > 1 else []
    divided += ["weights, gradients and moments are divided among all processes"] if recipe.shard == "full" else []
    return [
        f"model {recipe.preset}: {breakdown(shape).trainable:,} parameters ({counted(shape.n_layer, 'layer')}, "
        f"{counted(shape.n_head, 'head')}, {shape.n_embd} wide, context {shape.block_size}, dropout {shape.dropout:g})",
        *([lora.describe(model)] if recipe.lora_rank else []),
        f"{counted(recipe.steps, 'step')} of {counted(recipe.batch_tokens, 'token')}, {epochs:.1f} times the text, "
        f"on {processes}{setting.compute.describe()}; run {setting.run}" + (f"; from step {step:,}" if step else ""),
        *(["; ".join(divided)] if divided else []),
    ]
