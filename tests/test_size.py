"""Which size is chosen for a time."""

from collections.abc import Callable

import pytest
import torch
from conftest import TINY

from gpt.config import TrainConfig
from gpt.device import Compute
from gpt.training.budget import NEEDS, largest_preset, measured_rate, parameters, preset_for_minutes

LADDER = list(NEEDS)
CPU = Compute(torch.device("cpu"), torch.float32)


def device(flops: float, asked: list[str]) -> Callable[[str], float]:
    """One that computes so many FLOPs a second, whatever the size."""

    def rate(name: str) -> float:
        asked.append(name)
        return flops / (6 * parameters(name))

    return rate


def test_sizes_grow_with_time_and_text() -> None:
    chosen = [
        largest_preset(minutes, 10**12, device(1e11, []))[0] for minutes in (0.1, 1, 3, 10, 30, 100, 1000, 1e5, 1e7)
    ]
    assert chosen == sorted(chosen, key=LADDER.index)
    assert chosen[0] == "pico"
    assert chosen[-1] == "gpt2"
    for name in LADDER[1:]:
        minutes = NEEDS[name][0] * 6 * parameters(name) ** 2 / 1e11 / 60  # when it has read so many tokens a parameter
        assert largest_preset(1.01 * minutes, 10**12, device(1e11, []))[0] == name
        below, why = largest_preset(0.99 * minutes, 10**12, device(1e11, []))
        assert below == LADDER[LADDER.index(name) - 1]
        assert f"; {name} would need at least {minutes:,.1f} minutes" in why


def test_a_size_needs_two_bytes_for_five_parameters() -> None:
    least = parameters("mini") * 2 // 5
    for n_bytes, chosen in ((least + 1, "mini"), (least - 1, "micro"), (1000, "nano")):
        name, why = largest_preset(1e7, n_bytes, device(1e14, []))
        assert name == chosen
        assert f"{LADDER[LADDER.index(name) + 1]} has" in why


def test_a_size_out_of_reach_is_not_tried() -> None:
    asked: list[str] = []
    assert largest_preset(1, 10**12, device(1e11, asked))[0] == "pico"
    assert asked == ["pico", "nano"]


@pytest.mark.parametrize(
    "settings", [{}, {"minutes": 1, "preset": "mini"}, {"minutes": 1, "n_layer": 3}, {"minutes": 1, **TINY}]
)
def test_what_was_asked_for_stays(settings: dict[str, object]) -> None:
    config = TrainConfig(**settings)  # type: ignore[arg-type]
    assert preset_for_minutes(config, CPU, 10**6, lambda text: pytest.fail(text)) is config


def test_the_rate_is_that_of_steps_here() -> None:
    said: list[str] = []
    config = preset_for_minutes(TrainConfig(minutes=10**6), CPU, 800_000, said.append)
    assert config.preset == "nano"
    assert said == ["size nano: tiny has 2,185,344 parameters, more than 2.5 for each byte of the text"]
    assert 100 < measured_rate("nano", TrainConfig(), CPU) < 1e7
