"""Preparing a new run: its folder and tokenized text."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpt.chat.examples import kind_of
from gpt.config.device import Compute
from gpt.config.train import TrainConfig
from gpt.corpus.corpus import Corpus, open_corpus
from gpt.corpus.token_folder import find_token_folders
from gpt.runs import folder
from gpt.runs.record import FORMAT, RunRecord
from gpt.system import files
from gpt.system.errors import Interrupted, UserError
from gpt.system.files import disk_errors, locked
from gpt.training.context import Inputs, Session, data_record, now
from gpt.training.data import Dataset, find_kind, make_tokens, open_examples, open_tokens
from gpt.training.finetune import find_init
from gpt.training.size import preset_for_minutes

TOKENS = "tokens"  # subfolder of the run folder


def prepare(
    texts: Sequence[str],
    config: TrainConfig,
    compute: Compute,
    session: Session,
    until_ended: contextlib.ExitStack,
    until_first_step: contextlib.ExitStack,
) -> tuple[Path, Inputs]:
    """Creates a run's folder, tokenizes the text into it, and writes ``run.json`` before and after tokenizing.

    The folder is locked until ``until_ended`` closes. If an error occurs before ``until_first_step`` closes, the folder
    is removed.
    """
    listen, note = session.listen, session.note
    config = requested = detect_examples(texts, config, note)
    if session.world.size > 1 and config.has_examples and "-" in texts:
        message = f"{find_kind(config).plural} cannot be read from stdin by several processes"
        raise UserError(message, "put them in a file")
    init = find_init(config)
    tokenizer = init.tokenizer if init else None
    source: Dataset | Corpus
    if config.has_examples:
        source = open_examples(texts, config, compute.device.type, note, tokenizer, init.model if init else None)
    elif paths := find_token_folders(texts):
        source = open_tokens(paths, config, note, tokenizer)
        config = preset_for_minutes(config, compute, source.bytes, note, session.world.size)
    else:
        source = open_corpus(texts, config, listen)
        config = preset_for_minutes(config, compute, source.survey.bytes, note, session.world.size)
    record = RunRecord(FORMAT, now(), list(texts), asdict(requested), config.preset)
    run = folder.create_run(config.out or os.path.join(folder.RUNS, files.usable_name(source.name)))
    until_first_step.enter_context(remove_on_failure(run))
    until_ended.enter_context(lock_run(run))
    with disk_errors(run):
        record.write(run)
    data = source
    if isinstance(data, Corpus):
        data = make_tokens(data, config, run / TOKENS, compute.device.type, listen, note, tokenizer)
    with disk_errors(run):
        data_record(record, data, init).write(run)
    return run, Inputs(compute, data, init)


def detect_examples(texts: Sequence[str], config: TrainConfig, note: Callable[[str], None]) -> TrainConfig:
    """Sets ``pairs``, ``chat`` or ``preferences`` if every record of ``texts`` has exactly the keys of one. Changes
    nothing if the user set one of them, or ``field``."""
    if not texts or config.has_examples or config.field != TrainConfig.field:
        return config
    kind = kind_of(texts, config)
    if kind is None:
        return config
    found = f"every record is a {kind.singular}: assuming {kind.option}"
    note(f"{', '.join(texts)}: {found} (--field KEY reads text instead)")
    settings: dict[str, Any] = {kind.option.removeprefix("--"): True}
    return replace(config, **settings)


def lock_run(run: Path) -> contextlib.AbstractContextManager[None]:
    """Locks a run folder for this process."""
    return locked(run, "it is being trained: wait for it, or choose another run folder with --out")


@contextlib.contextmanager
def remove_on_failure(run: Path) -> Iterator[None]:
    """Removes a run that fails inside this context, and then ``runs/`` if empty."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(run, ignore_errors=True)
        if run.parent == Path(folder.RUNS):
            with contextlib.suppress(OSError):
                run.parent.rmdir()
        if not isinstance(error, Interrupted):
            raise
        raise Interrupted(error.signum, "interrupted before the first step: the run was removed") from None
