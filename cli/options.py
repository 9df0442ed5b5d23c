"""Turns the fields of config dataclasses into options, and defines the options that commands share."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from gpt import config, sample_config
from gpt.errors import UserError, did_you_mean
from gpt.settings import field_types, from_dict, without_none

from . import help_pages, inputs, render

OUTPUT = "Output"

# Environment variables are not shown per option, because `gpt --help` explains them once. Options without a panel are
# common options (see `help_pages`).
option = functools.partial(typer.Option, show_envvar=False)

Json = Annotated[bool, option("--json", help="Print JSON to stdout, one object per line")]
Quiet = Annotated[bool, option("--quiet", "-q", help="Do not show progress", rich_help_panel=OUTPUT)]
MODEL_HELP = "RUN[:best|latest|step-N], a checkpoint, a Transformers or PEFT folder, or hf:NAME"
Model = Annotated[
    str | None, option("--model", "-m", metavar="MODEL", help=MODEL_HELP, show_default="best of the newest run")
]
PromptFile = Annotated[Path | None, option(help="Read the prompt from a file; - is stdin", rich_help_panel="Text")]
TextFile = Annotated[Path | None, option(help="Read the text from a file; - is stdin")]
Seed = Annotated[int | None, option(help="Random seed; the same seed gives the same text", show_default="random")]
Base = Annotated[
    str | None,
    option(
        "--base", metavar="MODEL", help="Base model of a PEFT adapter", show_default="the one that the adapter names",
        rich_help_panel="Fine-tuning",
    ),
]  # fmt: skip


def one_of(values: tuple[str, ...], *flags: str, **settings: Any) -> Any:
    """Returns an option with choices. The library, not the parser, rejects other values, with a suggestion."""
    return option(*flags, metavar="|".join(values), autocompletion=lambda: list(values), **settings)


Device = Annotated[str, one_of(get_args(config.Device), help="Device; auto: CUDA, else MPS, else the CPU")]
Dtype = Annotated[
    str,
    one_of(
        get_args(sample_config.Dtype),
        help="auto: bfloat16 on recent GPUs, else float32; int8, int4: quantized weights",
    ),
]
Threads = Annotated[
    int | None,
    option(
        "--threads", help="CPU threads; overrides OMP_NUM_THREADS", rich_help_panel="Machine",
        show_default="one per core, fewer to decode with a small model",
    ),
]  # fmt: skip


def model_and_texts(
    command: str, model: str | None, words: Sequence[str], takes_text: bool = True
) -> tuple[str | None, list[str]]:
    """Returns the model and the TEXT arguments, and still accepts the model as the first word, with a note.

    With ``-m``, every word is a TEXT. Without it, a first word that names a model is the model if another word
    follows. If the command takes no TEXT, the first word is the model."""
    from gpt.runs import folder

    texts = list(words)
    if model is None and texts and (not takes_text or folder.names_model(texts[0])):
        if takes_text and len(texts) == 1:
            raise UserError(f"{texts[0]} is a model, and there is no TEXT", f"gpt {command} TEXT -m {texts[0]}")
        model = texts.pop(0)
        render.note(f"use -m {model} to name the model; the next release drops the old form")
    if texts and not takes_text:
        raise UserError(f"gpt {command} takes no TEXT, and {texts[0]} was given", "-m names the model, -o the output")
    return model, texts


def takes(config_class: type[Any], without: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command an option for each field of ``config_class``, except the fields in ``without``.

    The command receives an instance as ``settings``. If it has the parameters, it also receives ``given`` (the settings
    that the user gave), ``words`` (the whole command line) and ``rest`` (the extra arguments).
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        kept = [field for field in dataclasses.fields(config_class) if field.name not in without]
        names = [field.name for field in kept]
        wanted = inspect.signature(command).parameters

        @functools.wraps(command)
        def with_options(_context: typer.Context, **values: Any) -> Any:
            asked = {name: values.pop(name) for name in names}
            for one, other, _ in getattr(config_class, "EXCLUSIVE", ()):
                _keep_the_stronger(_context, asked, (one, other))
            if "given" in wanted:  # Given as an option, an environment variable or in --config.
                sources = {name: _context.get_parameter_source(name) for name in asked if asked[name] is not None}
                given = [name for name, source in sources.items() if source and source.name != "DEFAULT"]
                values["given"] = {name: asked[name] for name in given}
            if "words" in wanted:
                values["words"] = _context.find_root().obj
            if "rest" in wanted:
                values["rest"] = _context.args
            return command(settings=from_dict(config_class, asked, command.__name__), **values)

        own = [
            p
            for p in inspect.signature(command, eval_str=True).parameters.values()
            if p.name not in ("settings", "given", "words", "rest")
        ]
        in_order = sorted(kept, key=lambda field: config.PANELS.index(field.metadata["panel"]))
        made = [_as_parameter(config_class, field) for field in in_order]
        context_parameter = inspect.Parameter("_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        # The help page lists what the command does first, and how it prints last.
        parameters = [context_parameter, *made, *(p.replace(kind=p.KEYWORD_ONLY) for p in own)]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_options

    return decorate


_STRENGTH = ["COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP", "DEFAULT"]  # DEFAULT_MAP is --config.


def _keep_the_stronger(context: typer.Context, asked: dict[str, Any], pair: tuple[str, str]) -> None:
    """Drops the one of two exclusive settings whose source has lower precedence: an option overrides an environment
    variable. If both have the same source, the config rejects them."""
    sources = [context.get_parameter_source(name) for name in pair]
    strength = [_STRENGTH.index(source.name) if source else len(_STRENGTH) for source in sources]
    if all(asked[name] is not None for name in pair) and strength[0] != strength[1]:
        asked[pair[0] if strength[0] > strength[1] else pair[1]] = None


def _as_parameter(config_class: type[Any], field: "dataclasses.Field[Any]") -> inspect.Parameter:
    meta = field.metadata
    kind = field_types(config_class)[field.name]
    flags = [*meta["flags"], "--" + field.name.replace("_", "-")]
    panel = {"basic": None, "config": help_pages.RARE}.get(meta["level"], meta["panel"])
    settings = {"help": meta["help"], "rich_help_panel": panel, "show_default": meta["shown"] or True,
                "hidden": meta["hidden"]}  # fmt: skip
    choice = without_none(kind)
    default = field.default
    if get_origin(choice) is tuple:
        kind, default, info = list[str], [], option(*flags, metavar=meta["metavar"], **settings)
    elif get_origin(choice) is Literal:
        kind, info = str if choice is kind else str | None, one_of(get_args(choice), *flags, **settings)
    else:
        info = option(*flags, metavar=meta["metavar"], **settings)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def config_file(config_class: type[Any]) -> Any:
    """Returns the option ``--config FILE.toml``. Its values override defaults only."""
    known = [field.name for field in dataclasses.fields(config_class)]
    kinds = field_types(config_class)

    def read(context: typer.Context, path: Path | None) -> Path | None:
        if path is not None and not context.resilient_parsing:
            values = inputs.read_toml(path)
            for key, value in values.items():
                if key not in known:
                    raise UserError(f'{path}: unknown key "{key}"', did_you_mean(key, known))
                # The parser would accept booleans as the numbers 1 and 0.
                if (without_none(kinds[key]) is bool) != isinstance(value, bool):
                    said = str(value).lower() if isinstance(value, bool) else repr(value)
                    raise UserError(f"{path}: {key} is {said}", "use true or false for switches, and only for switches")
            context.default_map = {**(context.default_map or {}), **values}
        return path

    return option(
        "--config", help="Read settings from a TOML file; options and GPT_… variables override them",
        is_eager=True, callback=read, rich_help_panel="Run",
    )  # fmt: skip
