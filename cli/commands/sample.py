"""``gpt sample``."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpt.config.sample import SampleConfig
from gpt.system.errors import UserError, WorkError

from .. import inputs
from ..options import OUTPUT, Device, Dtype, Json, Model, PromptFile, Quiet, Seed, Threads, option, takes
from ..show import json_results, progress, render
from .interactive import UNUSED, converse, resolve_constraint

if TYPE_CHECKING:
    from gpt.api import LanguageModel
    from gpt.decoding.write import Piece

PROMPT_FORM = 'a line is {"prompt": "Once upon"}'


@takes(SampleConfig)
def sample(
    settings: SampleConfig,
    given: dict[str, Any],
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue", show_default="a new document")
    ] = None,
    model: Model = None,
    prompt_file: PromptFile = None,
    prompts: Annotated[
        Path | None,
        option(help='Many prompts: JSON lines of {"prompt": …}, or a table; - is stdin', rich_help_panel="Text"),
    ] = None,
    num: Annotated[
        int, option("--num", "-N", help="Number of samples, or of beams to return", min=1, max=2**63 - 1)
    ] = 1,
    seed: Seed = None,
    no_echo: Annotated[bool, option("--no-echo", help="Do not print the prompt", rich_help_panel=OUTPUT)] = False,
    json: Json = False,
    quiet: Quiet = False,
    interactive: Annotated[
        bool, option("--interactive", "-i", help="Chat, or enter prompt after prompt; /help lists commands")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:  # fmt: skip
    """Generate text from a prompt.

    gpt sample "Once upon a time"
    gpt sample "Once upon a time" -m runs/book -t 0.5 -n 100
    gpt sample -N 3 --top-p 0.9 -m hf:Qwen/Qwen3-0.6B
    """
    settings = resolve_constraint(settings, given)
    if interactive:
        if any([prompt, prompt_file, prompts, json, quiet, num > 1]):
            message = "--interactive cannot be combined with a prompt, --prompts, --json, --quiet or --num"
            raise UserError(message, "leave one of them out")
        for name in [*(name for name in UNUSED if name in given), *["no_echo"] * no_echo]:
            render.note(f"--{name.replace('_', '-')} has no effect with --interactive")
        converse(settings, given, model, seed, device, dtype, threads)
        return
    settings.check_num(num)
    note: Callable[[str], None] = (lambda text: None) if quiet else render.note
    texts = _read_prompts(prompt, prompt_file, prompts)
    if (settings.logprobs is not None or settings.echo_logprobs) and not json:
        raise UserError("--logprobs and --echo-logprobs need --json", "add --json")
    with progress.startup_spinner(quiet=json or quiet):
        from gpt import api
    loaded = api.load(model, device=device, dtype=dtype, threads=threads, note=note, for_decoding=True)
    settings = loaded.sampling.apply(settings, given, note)
    _note_ineffective(settings, given, note)
    if seed is None:
        seed = render.draw_seed(announce=settings.draws and not json and not quiet, model=loaded.path)
    overflows: set[tuple[int, bool]] = set()
    pieces = _collect_overflows(loaded.write_all(texts, settings, seed, num), overflows)
    if json:
        for values in _collect_samples(loaded, pieces, texts, seed if settings.draws else None):
            render.json_line(values)
    else:
        render.stream(pieces, texts, num, not no_echo)
    if not quiet:
        render.context_notes(overflows, loaded.model.config.block_size, "max_tokens" in given)


def _collect_overflows(pieces: Iterable["Piece"], overflows: set[tuple[int, bool]]) -> Iterator["Piece"]:
    for piece in pieces:
        yield piece
        if piece.sample is not None:
            overflows.add((piece.sample.dropped, piece.sample.slid))


def _collect_samples(
    loaded: "LanguageModel", pieces: Iterable["Piece"], texts: Sequence[str], seed: int | None
) -> Iterator[dict[str, Any]]:
    for piece in pieces:
        if piece.sample is not None:
            yield json_results.sample(piece, texts[piece.prompt], seed, loaded.tokenizer)


def _read_prompts(prompt: str | None, prompt_file: Path | None, prompts: Path | None) -> list[str]:
    if prompts is None:
        return [inputs.read_text(prompt, prompt_file, "prompt", "--prompt-file")]
    if prompt is not None or prompt_file is not None:
        raise UserError("a prompt and --prompts were both given", "give only one of them")
    from gpt.config.text import ReadConfig
    from gpt.documents import sources
    from gpt.documents.documents import Reader
    from gpt.documents.formats import text_form

    inputs.announce_stdin([str(prompts)], "prompts")
    found, reader = sources.find([str(prompts)]), Reader(ReadConfig())
    try:
        texts = [text for source in found for text in reader.records(source, text_form("prompt"))]
    except WorkError:
        raise
    except UserError as error:  # Its hint can name options of other commands.
        raise UserError(error.message, PROMPT_FORM) from None
    if not texts:
        raise UserError(f"{inputs.display_name(prompts)} contains no prompt", PROMPT_FORM)
    return texts


def _note_ineffective(settings: SampleConfig, given: Collection[str], note: Callable[[str], None]) -> None:
    draws_with = [*(["temperature"] if settings.temperature else []), "top_k", "top_p", "min_p"]
    greedy = "--beam" if settings.beam else "--greedy" if settings.greedy else "--temperature 0"
    for applies, names, where in (
        (not settings.beam, ["length_penalty", "early_stopping"], "without --beam"),
        (not settings.draws, draws_with, f"with {greedy}"),
    ):
        flags = [f"--{name.replace('_', '-')}" for name in names if name in given]
        if applies and flags:
            note(f"{', '.join(flags)} {'has' if len(flags) == 1 else 'have'} no effect {where}")
