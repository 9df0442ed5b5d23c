"""Turns config dataclasses into options, and defines shared options."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from gpt.config import sample as sample_config
from gpt.config import train as config
from gpt.config.settings import PANELS, field_types, from_dict, without_none
from gpt.system.errors import UserError, did_you_mean

from . import inputs

OUTPUT = "Output"

# Help texts of single options omit the environment variable. Options without a panel are common (see `help_pages`).
option = functools.partial(typer.Option, show_envvar=False)

Json = Annotated[bool, option("--json", help="Print JSON to stdout, one object per line")]
Quiet = Annotated[bool, option("--quiet", "-q", help="Do not show progress", rich_help_panel=OUTPUT)]
MODEL_HELP = "RUN[:best|latest|step-N], checkpoint, Transformers folder, .gguf or hf:NAME"
Model = Annotated[
    str | None, option("--model", "-m", metavar="MODEL", help=MODEL_HELP, show_default="best of the newest run")
]
PromptFile = Annotated[Path | None, option(help="Read the prompt from a file; - is stdin", rich_help_panel="Text")]
TextFile = Annotated[Path | None, option(help="Read the text from a file; - is stdin")]
Seed = Annotated[
    int | None, option(help="Random seed; the same seed gives the same text", show_default="random", min=0, max=2**53)
]


def one_of(values: tuple[str, ...], *flags: str, **settings: Any) -> Any:
    """Returns an option with choices. The library rejects other values, with a suggestion."""
    return option(*flags, metavar="|".join(values), autocompletion=lambda: list(values), **settings)


Device = Annotated[str, one_of(get_args(config.Device), help="Device; auto: CUDA, else MPS, else the CPU")]
Dtype = Annotated[
    str,
    one_of(
        get_args(sample_config.Dtype), help="auto: bfloat16 on recent GPUs, else float32; int8, int4: quantized weights"
    ),
]
Threads = Annotated[
    int | None,
    option(
        "--threads", help="CPU threads; overrides OMP_NUM_THREADS", rich_help_panel="Machine",
        show_default="one per core, fewer to decode with a small model",
    ),
]  # fmt: skip
OutPage = Annotated[Path | None, option("--out", "-o", help="Write a self-contained page to FILE.html")]


def takes(config_class: type[Any], without: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command an option for each field of ``config_class``, except the fields in ``without``.

    The command receives an instance of ``config_class`` as ``settings``. If it has parameters of these names, it also
    receives ``given`` (the settings that the user gave) and ``words`` (the command line).
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        fields = [field for field in dataclasses.fields(config_class) if field.name not in without]
        names = [field.name for field in fields]
        command_parameters = inspect.signature(command, eval_str=True).parameters

        @functools.wraps(command)
        def with_options(_context: typer.Context, **values: Any) -> Any:
            field_values = {name: values.pop(name) for name in names}
            for first, second, _ in getattr(config_class, "EXCLUSIVE", ()):
                _drop_weaker(_context, field_values, (first, second))
            if "given" in command_parameters:  # The user gave every setting whose source is not a default.
                set_values = {name: value for name, value in field_values.items() if value is not None}
                sources = {name: _context.get_parameter_source(name) for name in set_values}
                given = [name for name, source in sources.items() if source and source.name != "DEFAULT"]
                values["given"] = {name: set_values[name] for name in given}
            if "words" in command_parameters:
                values["words"] = _context.find_root().obj
            return command(settings=from_dict(config_class, field_values, command.__name__), **values)

        own_parameters = [p for p in command_parameters.values() if p.name not in ("settings", "given", "words")]
        ordered_fields = sorted(fields, key=lambda field: PANELS.index(field.metadata["panel"]))
        field_parameters = [_make_parameter(config_class, field) for field in ordered_fields]
        context_parameter = inspect.Parameter("_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        # Put the config's options first on the help page.
        parameters = [context_parameter, *field_parameters, *(p.replace(kind=p.KEYWORD_ONLY) for p in own_parameters)]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_options

    return decorate


_PRECEDENCE = ["COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP", "DEFAULT"]  # DEFAULT_MAP has --config's values.


def _drop_weaker(context: typer.Context, field_values: dict[str, Any], pair: tuple[str, str]) -> None:
    """Drops the setting of lower precedence from a pair of exclusive settings: for example, an option overrides an
    environment variable. Keeps both settings if they have the same source; the config then rejects them."""
    sources = [context.get_parameter_source(name) for name in pair]
    ranks = [_PRECEDENCE.index(source.name) if source else len(_PRECEDENCE) for source in sources]
    if all(field_values[name] is not None for name in pair) and ranks[0] != ranks[1]:
        field_values[pair[0] if ranks[0] > ranks[1] else pair[1]] = None


def _make_parameter(config_class: type[Any], field: "dataclasses.Field[Any]") -> inspect.Parameter:
    meta = field.metadata
    kind = field_types(config_class)[field.name]
    flags = [*meta["flags"], "--" + field.name.replace("_", "-")]
    panel = None if meta["level"] == "basic" else meta["panel"]
    settings = {"help": meta["help"], "rich_help_panel": panel, "show_default": meta["shown"] or True}
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
    """Returns the option ``--config FILE.toml``. The file only overrides defaults."""
    keys = [field.name for field in dataclasses.fields(config_class)]
    types = field_types(config_class)

    def read(context: typer.Context, path: Path | None) -> Path | None:
        if path is not None and not context.resilient_parsing:
            values = inputs.read_toml(path)
            for key, value in values.items():
                if key not in keys:
                    raise UserError(f'{path}: unknown key "{key}"', did_you_mean(key, keys))
                # The parser would convert booleans to the numbers 1 and 0.
                if (without_none(types[key]) is bool) != isinstance(value, bool):
                    literal = str(value).lower() if isinstance(value, bool) else repr(value)
                    message = f"{path}: {key} is {literal}"
                    raise UserError(message, "use true or false for switches, and only for switches")
            context.default_map = {**(context.default_map or {}), **values}
        return path

    return option(
        "--config", help="Read settings from a TOML file; options and GPT_… variables override them",
        is_eager=True, callback=read, rich_help_panel="Run",
    )  # fmt: skip
