"""Options made from the dataclasses of `gpt.config`, and the few that commands share."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from gpt.config import from_dict, read_toml
from gpt.errors import UserError, did_you_mean

OUTPUT = "Output"

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, one object a line.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=OUTPUT)]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda or mps; auto: CUDA, else MPS, else the CPU.", rich_help_panel="Machine")
]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto, float32, bfloat16 or float16; auto: bfloat16 on newer CUDA devices, else float32.",
        rich_help_panel="Machine",
    ),
]


def takes(config_class: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command an option for each field of ``config_class``, and its body the ``settings`` made from them."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        names = [field.name for field in dataclasses.fields(config_class)]

        @functools.wraps(command)
        def with_options(**values: Any) -> Any:
            settings = from_dict(config_class, {name: values.pop(name) for name in names}, command.__name__)
            return command(settings=settings, **values)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
        made = [_as_parameter(config_class, field) for field in dataclasses.fields(config_class)]
        parameters = [*own, *made]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_options

    return decorate


def _as_parameter(config_class: type[Any], field: "dataclasses.Field[Any]") -> inspect.Parameter:
    meta = field.metadata
    kind = get_type_hints(config_class)[field.name]
    info = typer.Option(
        *meta["flags"],
        "--" + field.name.replace("_", "-"),
        help=meta["help"],
        rich_help_panel=meta["panel"],
        show_default=meta["shown"] or True,
        show_envvar=False,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[kind, info]
    )


def config_file(config_class: type[Any]) -> Any:
    """An option ``--config FILE.toml`` whose values stand behind options and environment, and before defaults."""
    known = [field.name for field in dataclasses.fields(config_class)]

    def read(context: typer.Context, path: Path | None) -> Path | None:
        if path is not None and not context.resilient_parsing:
            values = read_toml(path)
            for key in values:
                if key not in known:
                    raise UserError(f'{path}: unknown key "{key}"', did_you_mean(key, known))
            context.default_map = {**(context.default_map or {}), **values}
        return path

    return typer.Option(
        "--config", help="Settings from a TOML file; options and GPT_… variables beat it.",
        is_eager=True, callback=read, rich_help_panel=OUTPUT, show_default="none",
    )  # fmt: skip
