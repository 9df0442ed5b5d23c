"""Writes docs/parallel-plan.md: what `gpt params` says of GPT-3's eight sizes on 8, 64 and 1,024 devices.

python docs/plan.py
"""

from pathlib import Path

from gpt.config import PRESETS
from gpt.model.params import breakdown, flops_per_token
from gpt.model.plan import USABLE, TrainingPlan, plans
from gpt.plan_config import PlanConfig

PAGE = Path(__file__).parent / "parallel-plan.md"
DEVICES, KIND, TOKENS, MFU = (8, 64, 1024), "h100-80gb", 300e9, 0.4
SIZES = [name for name in PRESETS if name.startswith("gpt3-")]

HEAD = f"""# GPT-3's sizes on 8, 64 and 1,024 devices

Written by `python docs/plan.py`, from the arithmetic of `gpt params`; [how it is counted](memory.md). For each of the
eight sizes of the GPT-3 paper (Brown et al. 2020, table 2.1, with its batches): the first way to train that fits into
{USABLE:.0%} of the memory of an {KIND}, the most bytes that a rank then holds (GB of 10⁹), and days for
{TOKENS / 1e9:.0f} billion tokens at {MFU:.0%} MFU, as

```console
$ gpt params gpt3-175b --devices 1024 --kind {KIND} --tokens {TOKENS / 1e9:.0f}e9 --mfu {MFU:g}
```

prints them. {MFU:.0%} is an assumption: what a cluster reaches depends on its network, and small models spread over
many devices reach less. Nothing of this table was run; [memory.md](memory.md) says what was compared with real runs.
"""


def page() -> str:
    """Returns the whole page."""
    parts = [HEAD]
    for devices in DEVICES:
        parts.append(
            f"\n## {devices:,} × {KIND}\n\n| model | `gpt train …` | GB a rank | days |\n|---|---|---:|---:|\n"
        )
        parts += [_row(name, _plan(name, devices)) for name in SIZES]
    parts.append("\n## Operations\n\nThe GPT-3 paper counts 6 operations a parameter and token (its table D.1). ")
    parts.append("MFU's\nformula adds the scores of attention, 12·L·C·T a token, as PaLM's does.\n\n")
    parts.append("| model | 6 N × 300 B | with scores |\n|---|---:|---:|\n")
    parts += [_operations(name) for name in SIZES]
    return "".join(parts)


def _plan(name: str, devices: int) -> TrainingPlan:
    preset = PRESETS[name]
    return plans(preset.model, PlanConfig(devices=devices, kind=KIND, tokens=TOKENS, mfu=MFU), preset.batch_tokens)[-1]


def _row(name: str, plan: TrainingPlan) -> str:
    if not plan.fits:
        return f"| {name} | nothing fits | {plan.memory.peak / 1e9:,.0f} at least | |\n"
    return f"| {name} | `{plan.options}` | {plan.memory.peak / 1e9:.1f} | {plan.days:,.3g} |\n"


def _operations(name: str) -> str:
    config = PRESETS[name].model
    plain = 6 * breakdown(config).trainable * TOKENS
    return f"| {name} | {plain:.2e} | {flops_per_token(config, config.block_size) * TOKENS:.2e} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
