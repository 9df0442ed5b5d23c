"""``gpt params``."""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from gpt.config.model import ARCHITECTURES, GPT2_VOCAB, PRESETS, Arch, GPTConfig
from gpt.config.plan import SHAPE, PlanConfig
from gpt.model.params import breakdown
from gpt.system.errors import UserError, did_you_mean

from ..options import Json, OutPage, option, takes
from ..show import json_params, page, render, render_params


@takes(PlanConfig)
def params(
    settings: PlanConfig,
    given: dict[str, object],
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="PRESET|MODEL", help="Presets, or models as for gpt sample; several are compared"),
    ] = None,
    list_presets: Annotated[bool, option("--list", help="List all presets", envvar="GPT_PARAMS_LIST")] = False,
    out: OutPage = None,
    json: Json = False,
) -> None:
    """Count a model's parameters, and estimate what training it takes.

    gpt params gpt3-175b
    gpt params gpt2 gpt2-xl runs/book
    gpt params gpt3-175b --devices 512 --kind h100-80gb --tokens 300e9
    """
    shape_names = {field.name for field in fields(PlanConfig) if field.metadata["panel"] == SHAPE}
    overrides = {name: value for name, value in given.items() if name in shape_names}
    cost_names = [name for name in given if name not in shape_names]
    page.check_out(out)
    list_all = list_presets or (not targets and not overrides)
    if cost_names and (list_all or out is not None):
        flag = f"--{cost_names[0]}".replace("_", "-")
        if not list_all:
            raise UserError(f"{flag} estimates training, but a page does not show it", "leave out -o")
        raise UserError(f"{flag} estimates training, but a list of presets does not show it",
                        "name a preset or a model: gpt params gpt2 --devices 8")  # fmt: skip
    if list_presets and (targets or overrides):
        conflict = targets[0] if targets else f"--{next(iter(overrides))}".replace("_", "-")
        raise UserError(f"--list shows all presets, but {conflict} asks for a single shape", "leave one of them out")
    if list_all and out is None:
        render.json_line(*json_params.presets(PRESETS)) if json else render_params.presets(PRESETS)
        return
    selected: Sequence[str | None] = list(PRESETS) if list_all else targets or [None]
    shapes = [_find_shape(target, {} if list_all else overrides) for target in selected]
    costs = [json_params.Cost.from_config(shape.config, settings) for shape in shapes] if cost_names else []

    def describe() -> None:
        render_params.breakdown(shapes[0]) if len(shapes) == 1 else render_params.side_by_side(shapes)
        for shape, cost in zip(shapes, costs, strict=False):
            render_params.cost(cost, shape.name if len(shapes) > 1 else "")

    pairs = zip_longest(shapes, costs)
    page.show(
        "params", f"parameters: {', '.join(shape.name for shape in shapes)}", out, json,
        data=lambda: [{**shape.data(), **(cost.data() if cost else {})} for shape, cost in pairs],
        page=lambda: {"shapes": [{**s.data(), "note": s.note} for s in shapes], "names": render_params.NAMES},
        terminal=describe,
    )  # fmt: skip


def _find_shape(target: str | None, overrides: dict[str, Any]) -> json_params.Shape:
    """Returns the shape of ``target`` with ``overrides``. Without ``target``, uses only the overrides."""
    changes = dict(overrides)
    if arch := changes.pop("arch", None):
        changes = {**ARCHITECTURES[cast(Arch, arch)], **changes}
    if target is None:
        missing = [f"--{key.replace('_', '-')}" for key in ("n_layer", "n_head", "n_embd") if key not in overrides]
        if missing:
            message = f"without a preset, {', '.join(missing)} are required"
            raise UserError(message, "or name a preset: gpt params --list")
        config = GPTConfig(**{"vocab_size": GPT2_VOCAB, "block_size": 1024, **changes})
        return json_params.Shape("custom", config, breakdown(config))
    from gpt.system.files import reading, suggest_name

    with reading(Path(target)):
        exists = Path(target).exists()
    if target in PRESETS:
        config = PRESETS[target].model
    elif exists or ":" in target:
        from gpt.runs import folder, hub, model_config

        remote = hub.is_remote(target)
        path = hub.fetch(target, weights=False) if remote else folder.find_checkpoint(target)
        config = model_config.load_config(path)
    else:
        hint = suggest_name(target, did_you_mean(target, PRESETS))
        raise UserError(f'there is no preset, run or checkpoint "{target}"', hint)
    if config.window_layers is not None and "n_layer" in overrides:  # Repeat or truncate the pattern of windows.
        windows, layers = config.windows, range(int(changes["n_layer"]))
        changes["window_layers"] = tuple(layer for layer in layers if windows[layer % len(windows)])
    config = replace(config, **changes)
    note = PRESETS[target].note if target in PRESETS and not overrides else ""
    return json_params.Shape("custom" if overrides else target, config, breakdown(config), note)
