"""A run's folder and its data, before anything is trained; and how both are taken back."""

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from gpt.config import TrainConfig
from gpt.device import Compute
from gpt.errors import Interrupted
from gpt.runs import folder
from gpt.text.corpus import Listener, open_corpus
from gpt.training.pairs import PairData, make_pairs
from gpt.training.prepare import Data, make_data, open_data, tokenized
from gpt.training.size import sized
from gpt.training.start import Start


def open_run(
    texts: Sequence[str],
    config: TrainConfig,
    compute: Compute,
    start: Start | None,
    listen: Listener,
    note: Callable[[str], None],
) -> tuple[Path, Data | PairData, TrainConfig]:
    """A new run folder, the data of the run, tokenized into it unless they come tokenized, and ``config`` with the size
    chosen where that depends on minutes and text. Where it fails, no folder is left."""
    tokenizer = start.tokenizer if start else None
    if config.pairs:
        pairs = make_pairs(texts, config, compute.device.type, note, tokenizer)
        return folder.create_run(config.out or os.path.join(folder.RUNS, pairs.corpus.name)), pairs, config
    path = tokenized(texts)
    if path is not None:
        data = open_data(path, config, note, tokenizer)
        config = sized(config, compute, data.bytes, note)
        return folder.create_run(config.out or os.path.join(folder.RUNS, path.absolute().name)), data, config
    corpus = open_corpus(texts, config, listen)
    config = sized(config, compute, corpus.found.bytes, note)
    run = folder.create_run(config.out or os.path.join(folder.RUNS, corpus.name))
    try:
        data = make_data(corpus, config, run / "tokens", compute.device.type, listen, note, tokenizer)
        return run, data, config
    except Interrupted as stopped:
        discard(run)
        raise Interrupted(stopped.signum, "interrupted before the first step: nothing is left of the run") from None
    except BaseException:
        discard(run)
        raise


def discard(run: Path) -> None:
    """Takes back a run folder, and ``runs/`` where nothing else is in it."""
    shutil.rmtree(run, ignore_errors=True)
    if run.parent == Path(folder.RUNS):
        with contextlib.suppress(OSError):
            run.parent.rmdir()
