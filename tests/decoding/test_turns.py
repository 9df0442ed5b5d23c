"""One engine for all texts of a model: later turns compute only what is new, in any company and after failures."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import more
from models import CPU, loud

from gpt.api import LanguageModel
from gpt.config.device import Compute
from gpt.config.model import GPTConfig
from gpt.config.sample import SampleConfig
from gpt.decoding.context import CACHE_SHARE, Context
from gpt.decoding.engine import MIN_SLOTS
from gpt.decoding.weights import prepare
from gpt.model.params import cache_bytes
from gpt.model.quantize import quantize_model
from gpt.system.errors import UserError
from gpt.tokenizers.tokenizer import bytes_tokenizer

CONFIGS = {
    "learned": GPTConfig(257, 600, 2, 2, 16),
    "rotary": GPTConfig.of("modern", 257, 600, 2, 4, 64, n_kv_head=2),
    "ring": GPTConfig.of("modern", 257, 600, 2, 4, 64, n_kv_head=2, window=8, window_layers=(1,)),
}
CONFIG = SampleConfig(max_tokens=10, ignore_eot=True, logprobs=0)
PROMPT = np.random.default_rng(0).integers(256, size=240).tolist()


def make_model(family: str = "rotary", dtype: str = "float32") -> LanguageModel:
    model = loud(CONFIGS[family], spread=0.1)
    if dtype != "float32":
        quantize_model(model, {"int8": 8, "int4": 4}[dtype])
    return LanguageModel(prepare(model, CPU), bytes_tokenizer(), CPU, Path())


def write(model: LanguageModel, prompt: list[int], config: SampleConfig = CONFIG, **kind: Any) -> list[Any]:
    writing = model.write(prompt, config, **kind)
    for _ in writing:
        pass
    return [*(writing.sample.logprobs or []), writing.sample.score]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of positions that each step computes for texts that begin like `PROMPT`."""
    counts: list[int] = []
    forward = Context.forward

    def count(self: Context, work: Any, ids: torch.Tensor) -> torch.Tensor:
        counts.append(sum(n for slot, n in work if slot.token_ids[:20] == PROMPT[:20]))
        return forward(self, work, ids)

    monkeypatch.setattr(Context, "forward", count)
    return counts


@pytest.mark.parametrize("dtype", ["float32", "int8", more("int4")])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("in_company", [False, True])
def test_a_turn_computes_only_what_is_new(family: str, dtype: str, in_company: bool, computed: list[int]) -> None:
    """The KV cache grows in the second turn. Texts and log-probabilities equal those of a new engine to the last bit."""
    model = make_model(family, dtype)
    others = iter(model.write_all(["a", "b" * 30, "c"] * 9, replace(CONFIG, batch=2, max_tokens=40), num=2))

    def answer(prompt: list[int]) -> tuple[list[int], int]:
        if in_company:
            next(others)
        expected = write(replace(model), prompt)
        computed.clear()
        tokens = write(model, prompt)
        assert tokens == expected
        return [token.id for token in tokens[:-1]], sum(computed) - 9  # The last token is not computed.

    first, count = answer(PROMPT)
    assert count == 240
    _, count = answer([*PROMPT, *first, *range(20)])
    assert count == 21
    _, count = answer([*PROMPT, *first[:3], *range(50, 65)])  # An edit.
    assert count == 15
    again, count = answer(PROMPT)  # `/undo`.
    assert (again, count) == (first, 1)
    assert not in_company or next(others)


def test_a_short_shared_prefix_does_not_cost_another_conversation(computed: list[int]) -> None:
    model = make_model()
    write(model, PROMPT)
    write(model, [*PROMPT[:100], 1, 2])
    computed.clear()
    write(model, [*PROMPT, 7])
    assert sum(computed) == 1 + 9


def raise_error(kind: type[BaseException]) -> None:
    raise kind("CUDA error")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_an_interrupted_step_does_not_change_later_texts(
    error: type[BaseException], computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every moment of a step fails once: before and after it computes, and while it starts, chooses and copies."""
    model, turn = make_model("ring"), [*PROMPT, 5]
    searching = replace(CONFIG, beam=2)
    expected = [write(replace(model), turn), write(replace(model), turn, searching)]
    for owner, name in (
        (Context, "begin"), (Context, "forward"), (Context, "logits"), (Context, "copy"), (Context, "count_shared"),
        (model.engine.scheduler, "plan"), (model.engine.scheduler, "release"), (model.engine, "_choose"),
    ):  # fmt: skip
        for after in (False, True):
            write(model, PROMPT)
            original: Callable[..., Any] = getattr(owner, name)

            def fail(*args: Any, original: Any = original, after: bool = after, **kwargs: Any) -> None:
                if after:
                    original(*args, **kwargs)
                raise_error(error)

            other = iter(model.write([9] * 30, CONFIG))
            next(other)
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, fail)
                with pytest.raises(error):
                    write(model, turn, searching)
            with pytest.raises(UserError):
                list(other)
            computed.clear()
            assert [write(model, turn), write(model, turn, searching)] == expected
            if error is KeyboardInterrupt:
                assert sum(computed) < 240
    assert len(model.engine.scheduler.free) + 2 == len(model.engine.context.slots)


def test_threads_and_closed_generators_share_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts need more memory than there is at once, so some wait until the slots are reshaped."""
    memory = int(6 * cache_bytes(CONFIGS["rotary"], 600, 4) / CACHE_SHARE)
    model = make_model()
    jobs = [
        (prompt, replace(CONFIG, max_tokens=length, beam=beam))
        for prompt in ([1], PROMPT, PROMPT[:50])
        for length, beam in ((5, 0), (300, 0), (10, 3))
    ]
    expected = [write(replace(model), *job) for job in jobs]
    monkeypatch.setattr(Compute, "memory", lambda self: memory)
    results: dict[int, list[Any]] = {}
    closed = model.write_all(["x", "y", "z"], replace(CONFIG, max_tokens=500), num=5)
    next(closed)

    def work(number: int) -> None:
        results[number] = write(model, *jobs[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    closed.close()
    for thread in threads:
        thread.join()
    assert [results[number] for number in range(len(jobs))] == expected
    assert len(model.engine.context.slots) <= max(6, MIN_SLOTS)


def test_slots_fit_the_memory_and_keep_the_newest_texts(computed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, bytes_of_three_and_a_half = make_model(), int(3.5 * cache_bytes(CONFIGS["rotary"], 512, 4))
    monkeypatch.setattr(Compute, "memory", lambda self: int(bytes_of_three_and_a_half / CACHE_SHARE))
    for prompt, batch, shape, count in (
        (PROMPT, 1, (4, 256), 240 + 9),
        (PROMPT * 2, 1, (3, 512), 240 + 9),
        ([1], 9, (7, 256), 0),
        (PROMPT, 1, (7, 256), 240 + 9),
    ):
        computed.clear()
        assert len([*model.write_all([prompt] * batch, CONFIG)]) >= batch
        context = model.engine.context
        assert (len(context.slots), context.cache.max_positions) == shape
        assert context.cache.nbytes <= bytes_of_three_and_a_half
        assert sum(computed) == count
