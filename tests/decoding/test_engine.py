"""Requests that come and go, each with settings of its own, beside others."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from conftest import slow
from models import CPU, EOT, PROMPTS, letters, tiny_model

from gpt.config import GPTConfig
from gpt.decoding import scheduler
from gpt.decoding.constraint import ConstraintCache
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request, Update
from gpt.decoding.token_step import next_tokens
from gpt.errors import NotANumber, UserError
from gpt.model.decoder import GPT
from gpt.sample_config import SampleConfig

SETTINGS: list[dict[str, Any]] = [
    {}, {"greedy": True}, {"temperature": 1.5, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05, "ignore_eot": True},
    {"repetition_penalty": 1.3, "no_repeat_ngram": 2}, {"min_tokens": 6}, {"logprobs": 3, "echo_logprobs": True},
    {"greedy": True, "speculate": 4}, {"temperature": 0.3, "speculate": 2}, {"max_tokens": 0}, {"max_tokens": 1},
    {"beam": 2}, {"beam": 3, "n_best": 3, "no_repeat_ngram": 2}, {"beam": 2, "logprobs": 2, "echo_logprobs": True},
]  # fmt: skip


# The model's 50 ids as letters, and what a text of them may have to be.
CONSTRAINTS = ConstraintCache(letters(*(bytes([65 + id]) for id in range(EOT))))
REGEXES = ["A[B-Z]{0,9}", "[^A-F]+K.*", "(B|CD|EFG){2,}Z?", "HIJ"]


def some_request(rng: random.Random) -> Request:
    config = SampleConfig(**{"max_tokens": rng.randint(2, 20), **rng.choice(SETTINGS)})
    bias = rng.choice([(), (), ((3, 2.0), (EOT, 1.5))])
    constraint = None
    if rng.random() < 0.3 and not config.ignore_eot:
        constraint = CONSTRAINTS.find(SampleConfig(regex=rng.choice(REGEXES)))
    return Request(rng.choice(PROMPTS), config, rng.randrange(3), rng.randrange(3), bias, constraint=constraint)


def told(events: list[Update]) -> Any:
    """All that the events of one request say, but for log-probabilities."""
    tokens = [token for event in events for token in event.tokens]
    prompts = [[token.id for token in event.prompt] for event in events if event.prompt]
    best = [(each.ids, each.reason) for each in events[-1].best]
    ids = [(token.id, [id for id, _ in token.top]) for token in tokens]
    return ids, prompts, events[-1].reason, best


def alone(model: GPT, request: Request) -> list[Update]:
    engine = Engine(Context(model, CPU, request.width), {EOT})
    engine.add(request)
    return list(engine.run())


@pytest.mark.parametrize(
    ("positions", "fixed", "chunk", "more"),
    [
        ("learned", True, 2, {}),
        slow("rotary", False, 2, {}),
        slow("rotary", True, 99, {}),
        slow("learned", False, 99, {}),
        slow("rotary", False, 9, {"window": 5, "window_layers": (1,)}),
    ],
)
def test_what_runs_beside_a_request_changes_nothing_of_it(
    positions: str, fixed: bool, chunk: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples, guesses, searches and penalties come one after the other while others run, more than there are slots;
    some are cancelled. Prompts are read in chunks too, and take over what slots have computed."""
    monkeypatch.setattr(scheduler, "REUSED_FROM", 1)
    model, rng = tiny_model(24, positions, **more), random.Random(0)
    context = Context(
        model, CPU, 5, step=partial(next_tokens, model) if fixed else None
    )  # as a compiled step is called
    engine = Engine(context, {EOT}, chunk)
    requests: list[Request] = []
    events: dict[int, list[Update]] = {}
    cancelled: set[int] = set()
    while len(requests) < 120 or engine.busy:
        for _ in range(rng.randrange(3) if len(requests) < 120 else 0):
            requests.append(some_request(rng))
            assert engine.add(requests[-1]) == len(requests) - 1
        for event in engine.step():
            assert event.number not in cancelled
            events.setdefault(event.number, []).append(event)
        if rng.random() < 0.1:
            cancelled.add(number := rng.randrange(max(1, len(requests))))
            engine.cancel(number)
    ended = [number for number, of_one in events.items() if of_one[-1].reason is not None]
    assert set(ended) | cancelled == set(range(len(requests)))
    assert engine.free == 5
    for number in ended:
        assert told(events[number]) == told(alone(model, requests[number])), requests[number]
    for number in cancelled - set(ended):
        ids, *_ = told(events.get(number, [Update(number)]))
        assert ids == told(alone(model, requests[number]))[0][: len(ids)]


def test_first_come_first_served_and_a_cancelled_row_is_free_in_the_next_step() -> None:
    engine = Engine(Context(tiny_model(), CPU, 3), {EOT})
    config = SampleConfig(greedy=True, ignore_eot=True, max_tokens=50)
    for settings in ({}, {}, {"greedy": False, "beam": 2}, {}):
        engine.add(Request([1, 2], SampleConfig(**{**vars(config), **settings})))
    assert engine.free == -2
    assert [event.number for event in engine.step()] == [0, 1]  # the search waits for two rows, and the last for it
    engine.cancel(0)
    assert [event.number for event in engine.step()] == [1, 2]
    engine.cancel(3)  # while it waits
    engine.cancel(2)
    assert [event.number for event in engine.step()] == [1]
    engine.cancel(99)
    assert engine.free == 2


@pytest.mark.parametrize("how", [{"greedy": True}, {}, {"beam": 2}, {"echo_logprobs": True, "max_tokens": 0}])
def test_an_error_ends_its_request_alone(how: dict[str, Any]) -> None:
    """A model with one id whose embedding is NaN, in prompts; the rows that had it serve others."""
    model = tiny_model(24)
    with torch.no_grad():
        model.lm_head = torch.nn.Linear(16, 50, bias=False)
        model.lm_head.weight.copy_(model.wte.weight)
        model.wte.weight[7] = torch.nan
    good = Request([1, 2, 3], SampleConfig(max_tokens=8, ignore_eot=True), bias=((7, -1e9),))
    expected = told(alone(model, good))
    engine = Engine(Context(model, CPU, 4), {EOT})
    bad = Request([5, 7, 5, 5, 5], SampleConfig(**{"max_tokens": 8, **how}))
    numbers = [engine.add(request) for request in (good, bad, good, bad, good, good)]
    events: dict[int, list[Update]] = {}
    for event in engine.run():
        events.setdefault(event.number, []).append(event)
    for number in numbers:
        if number in (1, 3):
            assert isinstance(events[number][-1].error, NotANumber)
            assert events[number][-1].reason is None
        else:
            assert told(events[number]) == expected


@pytest.mark.parametrize("how", ["cancelled", "max_tokens"])
def test_nan_of_a_text_whose_logits_were_not_read_reaches_no_later_text(how: str) -> None:
    model = tiny_model(24)
    good = Request([1, 2, 3], SampleConfig(max_tokens=8, ignore_eot=True), bias=((7, -1e9),))
    expected = told(alone(model, good))
    with torch.no_grad():
        model.lm_head = torch.nn.Linear(16, 50, bias=False)
        model.lm_head.weight.copy_(model.wte.weight)
        model.wte.weight[7] = torch.nan
    engine = Engine(Context(model, CPU, 2), {EOT}, 4)
    bad = [5, 6] * 6 + [5, 7, 5, 7, 5, 5, 5, 5]
    number = engine.add(Request(bad, SampleConfig(max_tokens=0 if how == "max_tokens" else 8)))
    for _ in range(4 if how == "cancelled" else 9):  # of four ids each
        engine.step()
    engine.cancel(number)
    engine.add(
        Request([3, 4] * 8, SampleConfig(max_tokens=8, ignore_eot=True), bias=((7, -1e9),))
    )  # a longer one beside
    later = engine.add(good)
    assert told([event for event in engine.run() if event.number == later]) == expected


def test_what_the_model_cannot_serve_is_refused_before_it_runs() -> None:
    engine = Engine(Context(tiny_model(), CPU, 2, 8), {EOT})
    for request in (
        Request([1, 2], SampleConfig(max_tokens=7)), Request([1] * 9, SampleConfig(max_tokens=0)),
        Request([]), Request([50]), Request([-1, 3]), Request([1], bias=((99, 1.0),)), Request([1], SampleConfig(beam=3)),
    ):  # fmt: skip
        with pytest.raises(UserError):
            engine.add(request)
    assert not engine.busy


@pytest.mark.parametrize("seed", range(5))
def test_a_search_that_narrows_and_widens_keeps_to_its_rows(seed: int) -> None:
    """Most of its hypotheses end at once, and those that live have children again."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(4, 16, 1, 1, 8)).eval()

    def stops(ids: Any) -> bool:
        return len(ids) in (3, 6) and ids[-1] > 0

    config = SampleConfig(beam=5, n_best=5, max_tokens=9, early_stopping="never", length_penalty=2.0, ignore_eot=True)
    found = []
    for rows in (5, 9):
        engine = Engine(Context(model, CPU, rows), {0})
        engine.add(Request([1], config, stops=stops))
        found.append(told(list(engine.run())))
    assert found[0] == found[1]
    assert {reason for _, reason in found[0][-1]} <= {"length", "stop"}


class Counted(Context):
    """A context that counts the positions that it computes, by step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.positions: list[int] = []

    def forward(self, work: Any, ids: torch.Tensor) -> torch.Tensor:
        self.positions.append(len(ids))
        return super().forward(work, ids)


GREEDY = SampleConfig(greedy=True, ignore_eot=True, max_tokens=12)


def test_a_long_prompt_is_read_between_the_steps_of_others() -> None:
    """No step reads more than a chunk; running texts get a token in each, and a short prompt passes the long ones,
    which are read in order of arrival."""
    model = tiny_model(200)
    context = Counted(model, CPU, 6)
    engine = Engine(context, {EOT}, chunk=16)
    engine.add(Request([1, 2], GREEDY))
    engine.step()
    long = [Request([n, *range(40), *range(40), *range(40)], GREEDY) for n in range(2)]
    numbers = [engine.add(request) for request in long]
    said: list[dict[int, int]] = []
    added = 0
    while engine.busy:
        if len(said) == 3:
            added = engine.add(Request([5, 6, 7], GREEDY))
        context.positions = []
        said.append({update.number: len(update.tokens) for update in engine.step()})
        assert sum(context.positions) <= 16 + 4
    assert all(each[0] == 1 for each in said[:11])
    assert said[3][added] == 1
    first = [next(at for at, each in enumerate(said) if each.get(number)) for number in numbers]
    assert (first[0], first[1]) == (7, 15)  # 8 chunks each
    for number, request in zip(numbers, long, strict=True):
        assert sum(each.get(number, 0) for each in said) == len(told(alone(model, request))[0])


@pytest.mark.parametrize("many", [3, 100])
def test_waits_are_bounded(many: int) -> None:
    """Of a short prompt beside long ones that keep coming, and of a long one beside short ones that do."""
    engine = Engine(Context(tiny_model(200), CPU, 8), {EOT}, chunk=16)
    rng = random.Random(0)

    def add(length: int) -> int:
        config = SampleConfig(greedy=True, ignore_eot=True, max_tokens=1)
        return engine.add(Request([rng.randrange(50) for _ in range(length)], config))

    watched, waited, began = add(many), [], 0
    for at in range(200):
        for _ in range(engine.free - 1):
            add(103 - many)
        if any(each.number == watched and each.reason for each in engine.step()):
            waited.append(at - began)
            watched, began = add(many), at + 1
    assert len(waited) >= 10
    assert max(waited) <= (0 if many == 3 else 2 * 100 // 16 + 1)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_slot_that_has_lost_its_beginning_serves_no_other_prompt(positions: str) -> None:
    model = tiny_model(24, positions)
    engine = Engine(Context(model, CPU, 2), {EOT})
    request = Request([*range(20)], SampleConfig(max_tokens=20, ignore_eot=True))
    expected = told(alone(model, request))
    for _ in range(2):
        engine.add(request)
        assert told([*engine.run()]) == expected


def test_a_beginning_that_prompts_share_is_read_once() -> None:
    model = tiny_model(200, "rotary", "modern")
    context = Counted(model, CPU, 4)
    engine = Engine(context, {EOT}, chunk=32)
    start = [n * 7 % 50 for n in range(100)]
    requests = [Request([*start, n], GREEDY) for n in range(4)]
    for request in requests:
        engine.add(request)
    events: dict[int, list[Update]] = {}
    for event in engine.run():
        events.setdefault(event.number, []).append(event)
    assert sum(context.positions) == 101 + 3 * 5 + 4 * 11  # three chunks are waited for, and not the last few ids
    assert [events[number][-1].cached for number in range(4)] == [0, 96, 96, 96]
    assert all(told(events[number]) == told(alone(model, request)) for number, request in enumerate(requests))


@pytest.mark.parametrize("window", [None, 5])
def test_a_prompt_takes_over_what_a_row_has_computed(window: int | None) -> None:
    """Of running and of ended requests; of layers with a window as long as their ring still holds what is seen."""
    properties: dict[str, Any] = {} if window is None else {"window": window, "window_layers": (1,)}
    model = tiny_model(300, "rotary", "modern", **properties)
    context = Counted(model, CPU, 4)
    engine = Engine(context, {EOT})
    rng = random.Random(1)
    start = [rng.randrange(50) for _ in range(180)]
    first = Request([*start, 1], SampleConfig(**{**vars(GREEDY), "max_tokens": 60}))
    engine.add(first)
    engine.step()
    cases = [(180, 1), (150, 1), (170, 30), (60, 1), (10, 1), (181, 5)]
    for kept, more in cases:
        request = Request([*start[:kept], *[49] * more], GREEDY)
        context.positions = []
        number = engine.add(request)
        events = [event for _ in range(14) for event in engine.step() if event.number == number]
        assert told(events) == told(alone(model, request))
        read = max(context.positions)
        reused = kept >= 16 and (window is None or kept > 140)
        assert (read < kept) == reused, (kept, read)
    assert not engine.busy
    number = engine.add(first)  # its row, now that it has ended, serves it again
    context.positions = []
    events = [*engine.run()]
    assert told(events) == told(alone(model, first))
    assert max(context.positions) == 1


def test_log_probabilities_of_a_prompt_in_chunks_are_those_of_the_whole() -> None:
    model = tiny_model(100)
    request = Request(list(range(45)), SampleConfig(greedy=True, max_tokens=3, echo_logprobs=True, logprobs=2))
    engine = Engine(Context(model, CPU, 2), {EOT}, chunk=7)
    for _ in range(2):
        engine.add(request)
        events = [*engine.run()]
        expected = alone(model, request)
        assert told(events) == told(expected)
        ours, theirs = (next(event.prompt for event in some if event.prompt) for some in (events, expected))
        assert ours[0].logprob is None
        assert torch.allclose(
            torch.tensor([token.logprob for token in ours[1:]]), torch.tensor([token.logprob for token in theirs[1:]]),
            atol=1e-5,
        )  # fmt: skip


def test_windows_serve_no_prompt_whose_positions_were_written_over() -> None:
    """By a text in the same slot, before or since: one that was longer, or guesses that turned out wrong."""
    model, rng = tiny_model(400, "rotary", "modern", window=8, window_layers=(0, 1)), random.Random(1)
    first = [rng.randrange(40) for _ in range(300)]
    some: dict[str, Any] = {"max_tokens": 4, "ignore_eot": True}
    rewound = [first, [*first[:245], 41, 41], [*first[:190], 42, 42]]
    guessed = Request([7, 8, 9] * 23, SampleConfig(max_tokens=40, ignore_eot=True, speculate=64))
    after = Request([*guessed.ids[:20], 42, 42], SampleConfig(greedy=True, **some))
    for requests in ([Request(ids, SampleConfig(greedy=True, **some)) for ids in rewound], [guessed, after]):
        context = Context(model, CPU, 1)
        for request in requests:
            engine = Engine(context, {EOT})
            engine.add(request)
            found, expected = (
                [t.logprob for u in us for t in u.tokens] for us in (engine.run(), alone(model, request))
            )
            assert found == pytest.approx(expected, abs=1e-5)


def test_guesses_beyond_what_is_no_number_end_their_text_alone() -> None:
    model = tiny_model(64)
    model.get_parameter("wpe.weight").data[22:] = float("nan")
    engine = Engine(Context(model, CPU, 2), {EOT})
    engine.add(Request([1, 2, 3] * 7, SampleConfig(greedy=True, ignore_eot=True, speculate=4)))
    engine.add(Request([5, 6], SampleConfig(greedy=True, max_tokens=15, ignore_eot=True)))
    ends = [update for update in engine.run() if update.error or update.reason]
    assert [(type(end.error), end.reason) for end in ends] == [(NotANumber, None), (type(None), "length")]


def test_guesses_of_a_step_fit_its_chunk() -> None:
    """Their logits take memory too, and a client may ask for guesses."""
    context = Counted(tiny_model(64), CPU, 4)
    engine = Engine(context, {EOT}, chunk=6)
    for n in range(4):
        config = SampleConfig(greedy=True, ignore_eot=True, max_tokens=30, speculate=8)
        engine.add(Request([n, n, 7, 8] * 4, config))
    assert len([update for update in engine.run() if update.reason]) == 4
    assert 4 + 6 <= max(context.positions) <= 4 + 6 + 6  # newest ids, guesses, and prompts


def test_texts_that_wait_for_a_shared_prompt_are_compared_with_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    whole = Context.shared
    monkeypatch.setattr(Context, "shared", lambda *args, **kwargs: calls.append(1) or whole(*args, **kwargs))
    engine = Engine(Context(tiny_model(300), CPU, 4), {EOT}, chunk=16)
    for n in range(4):
        engine.add(Request([*range(40), *range(40), *range(40), n], GREEDY))
    engine.step()
    first = len(calls)
    engine.step()
    engine.step()
    assert len(calls) == first
    assert len([update for update in engine.run() if update.reason]) == 4
