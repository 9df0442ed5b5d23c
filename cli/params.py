"""``gpt params``."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from gpt.config import ARCHITECTURES, GPT2_VOCAB, PRESETS, Arch, GPTConfig, Positions
from gpt.errors import UserError, did_you_mean
from gpt.model.params import breakdown
from gpt.plan_config import PlanConfig

from . import page, render, render_params, render_plan
from .options import Json, one_of, option, takes
from .page import OutPage

_SHAPE = "Shape"


@takes(PlanConfig)
def params(
    settings: PlanConfig,
    given: dict[str, object],
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="PRESET|MODEL", help="Presets, runs, checkpoints or hf:NAME; several are compared"),
    ] = None,
    list_presets: Annotated[bool, option("--list", help="List all presets")] = False,
    n_layer: Annotated[int | None, option(help="Transformer blocks")] = None,
    n_head: Annotated[int | None, option(help="Attention heads per block")] = None,
    n_kv_head: Annotated[int | None, option(help="Key/value heads per block", rich_help_panel=_SHAPE)] = None,
    head_dim: Annotated[int | None, option(help="Width of a head", rich_help_panel=_SHAPE)] = None,
    n_embd: Annotated[int | None, option(help="Embedding width")] = None,
    n_inner: Annotated[int | None, option(help="Hidden width of the MLP", rich_help_panel=_SHAPE)] = None,
    window: Annotated[int | None, option(help="Sliding window of layers 1, 3, 5 …", rich_help_panel=_SHAPE)] = None,
    block_size: Annotated[int | None, option(help="Context length in tokens", rich_help_panel=_SHAPE)] = None,
    vocab_size: Annotated[int | None, option(help="Vocabulary size", rich_help_panel=_SHAPE)] = None,
    positions: Annotated[
        str | None,
        one_of(
            get_args(Positions), help="Position encoding; only learned ones have parameters", rich_help_panel=_SHAPE
        ),
    ] = None,
    arch: Annotated[
        str | None, one_of(get_args(Arch), help="Kind of norms, MLP, positions and biases", rich_help_panel=_SHAPE)
    ] = None,
    parts: Annotated[
        bool,
        option("--memory", "--flops", "--time", hidden=True,
               envvar=["GPT_PARAMS_MEMORY", "GPT_PARAMS_FLOPS", "GPT_PARAMS_TIME"]),
    ] = False,
    out: OutPage = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Count a model's parameters, and estimate what training it takes.

    gpt params gpt3-175b
    gpt params gpt2 gpt2-xl runs/book
    gpt params gpt3-175b --devices 1024 --kind h100-80gb --tokens 300e9
    """
    asked = {
        "n_layer": n_layer, "n_head": n_head, "n_kv_head": n_kv_head, "head_dim": head_dim, "n_embd": n_embd,
        "n_inner": n_inner, "window": window, "block_size": block_size, "vocab_size": vocab_size,
        "positions": positions, "arch": arch,
    }  # fmt: skip
    shape: dict[str, object] = {key: value for key, value in asked.items() if value is not None}
    page.check_out(out, ".html")
    every = list_presets or (not targets and not shape)
    if parts and not given:  # --memory, --flops and --time: former options, now always shown together.
        given = {"devices": settings.devices}
    if given and (every or out is not None):
        flag = f"--{next(iter(given))}".replace("_", "-")
        raise UserError(f"{flag} estimates training, but {'-o' if out else 'a list of presets'} does not show it",
                        "name a preset or a model: gpt params gpt2 --devices 8")  # fmt: skip
    if list_presets and (targets or shape):
        named = targets[0] if targets else f"--{next(iter(shape))}".replace("_", "-")
        raise UserError(f"--list shows all presets, but {named} asks for a single shape", "leave one of them out")
    if every and out is None:
        render_params.presets(PRESETS, json)
        return
    wanted: Sequence[str | None] = list(PRESETS) if every else targets or [None]
    shapes = [_counted(target, {} if every else shape) for target in wanted]
    costs = [render_plan.Cost.of(each.config, settings) for each in shapes] if given else []
    if json:
        for each, cost in zip_longest(shapes, costs):
            render.json_line({**each.data(), **(cost.data() if cost else {})})
    if out is not None:
        title = ", ".join(each.name for each in shapes)
        data = {"shapes": [{**each.data(), "note": each.note} for each in shapes], "names": render_params.NAMES}
        page.write(out, page.html("params", f"parameters: {title}", data), json)
    elif not json:
        render_params.breakdown(shapes[0]) if len(shapes) == 1 else render_params.side_by_side(shapes)
        for each, cost in zip(shapes, costs, strict=False):
            render_plan.cost(cost, each.name if len(shapes) > 1 else "")


def _counted(target: str | None, shape: dict[str, object]) -> render_params.Shape:
    name, config = _shape(target, shape)
    note = PRESETS[name].note if name in PRESETS and not shape else ""
    return render_params.Shape(name, config, breakdown(config), note)


def _shape(target: str | None, shape: dict[str, object]) -> tuple[str, GPTConfig]:
    """Returns the name and config of a preset, run or checkpoint with shape options, or of shape options only."""
    from dataclasses import replace

    if target is None:
        missing = [f"--{key.replace('_', '-')}" for key in ("n_layer", "n_head", "n_embd") if key not in shape]
        if missing:
            raise UserError(
                f"without a preset, {', '.join(missing)} are required", "or name a preset: gpt params --list"
            )
        return "custom", GPTConfig(**{"vocab_size": GPT2_VOCAB, "block_size": 1024, **_properties(shape)})
    from gpt.files import reading

    with reading(Path(target)):
        there = Path(target).exists()
    if target in PRESETS:
        config = PRESETS[target].model
    elif there or ":" in target:
        from gpt.runs import folder, hf, hub

        remote = hub.is_remote(target)
        config = hf.load_config(hub.fetch(target, weights=False) if remote else folder.find_checkpoint(target))
    else:
        raise UserError(f'there is no preset, run or checkpoint "{target}"', did_you_mean(target, PRESETS))
    changed = _properties(shape)
    if config.window_layers is not None and "n_layer" in shape:  # Repeats or cuts the pattern of windows.
        windows, layers = config.windows, range(int(changed["n_layer"]))
        changed["window_layers"] = tuple(layer for layer in layers if windows[layer % len(windows)])
    return "custom" if shape else target, replace(config, **changed)


def _properties(shape: dict[str, object]) -> dict[str, Any]:
    """Replaces ``arch`` among the shape options with the architecture's properties."""
    given = dict(shape)
    arch = given.pop("arch", None)
    return {**(ARCHITECTURES[cast(Arch, arch)] if arch else {}), **given}
