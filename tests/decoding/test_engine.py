"""The engine: concurrent requests, cancellation, prefix reuse, chunked prefill."""

import random
from typing import Any

import pytest
import torch
from conftest import slow
from models import CPU, EOT, PROMPTS, letters, tiny_model

from gpt.config.model import GPTConfig
from gpt.config.sample import SampleConfig
from gpt.decoding import scheduler
from gpt.decoding.constraint import ConstraintCache
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request, Update
from gpt.decoding.scheduler import Scheduler
from gpt.decoding.sequence import RequestState
from gpt.model.decoder import GPT
from gpt.system.errors import NotANumber, UserError

SETTINGS: list[dict[str, Any]] = [
    {}, {"greedy": True}, {"temperature": 1.5, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05, "ignore_eot": True},
    {"repetition_penalty": 1.3, "no_repeat_ngram": 2}, {"min_tokens": 6}, {"logprobs": 3, "echo_logprobs": True},
    {"max_tokens": 0}, {"max_tokens": 1},
    {"beam": 2}, {"beam": 3, "no_repeat_ngram": 2}, {"beam": 2, "logprobs": 2, "echo_logprobs": True},
]  # fmt: skip


# Regular expressions over ids spelled as letters
CONSTRAINTS = ConstraintCache(letters(*(bytes([65 + id]) for id in range(EOT))))
REGEXES = ["A[B-Z]{0,9}", "[^A-F]+K.*", "(B|CD|EFG){2,}Z?", "HIJ"]


def random_request(rng: random.Random) -> Request:
    config = SampleConfig(**{"max_tokens": rng.randint(2, 20), **rng.choice(SETTINGS)})
    bias = rng.choice([(), (), ((3, 2.0), (EOT, 1.5))])
    constraint = None
    if rng.random() < 0.3 and not config.ignore_eot:
        constraint = CONSTRAINTS.find(SampleConfig(regex=rng.choice(REGEXES)))
    place = rng.choice(PROMPTS), config, rng.randrange(3), rng.randrange(3), bias
    return Request(*place, constraint=constraint, group=(rng.choice("a" * 14 + "b"),))


def summarize(events: list[Update]) -> Any:
    """Summarizes one request's updates, without log-probabilities."""
    tokens = [token for event in events for token in event.tokens]
    prompts = [[token.id for token in event.prompt] for event in events if event.prompt]
    best = [(hypothesis.ids, hypothesis.reason) for hypothesis in events[-1].best]
    ids = [(token.id, [id for id, _ in token.top]) for token in tokens]
    return ids, prompts, events[-1].reason, best


def run_alone(model: GPT, request: Request) -> list[Update]:
    engine = Engine(Context(model, CPU, request.width), {EOT})
    engine.add(request)
    return list(engine.run())


@pytest.mark.parametrize(
    ("positions", "chunk", "properties"),
    [
        ("learned", 2, {}),
        slow("rotary", 2, {}),
        slow("learned", 99, {}),
        slow("rotary", 9, {"window": 5, "window_layers": (1,)}),
    ],
)
def test_concurrent_requests_do_not_affect_each_other(
    positions: str, chunk: int, properties: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of all kinds outnumber the slots. Some are cancelled, and some are paused for another group's."""
    monkeypatch.setattr(scheduler, "MIN_SHARED_PREFIX", 1)
    pause, paused = Scheduler._pause, list[RequestState]()
    monkeypatch.setattr(Scheduler, "_pause", lambda self, state: (paused.append(state), pause(self, state)))
    model, rng = tiny_model(24, positions, **properties), random.Random(0)
    engine = Engine(Context(model, CPU, 5), {EOT}, chunk)
    requests: list[Request] = []
    events: dict[int, list[Update]] = {}
    cancelled_numbers: set[int] = set()
    while len(requests) < 80 or engine.busy:
        for _ in range(rng.randrange(3) if len(requests) < 80 else 0):
            requests.append(random_request(rng))
            assert engine.add(requests[-1]) == len(requests) - 1
        for event in engine.step():
            assert event.number not in cancelled_numbers
            events.setdefault(event.number, []).append(event)
        if rng.random() < 0.1:
            cancelled_numbers.add(number := rng.randrange(max(1, len(requests))))
            engine.cancel(number)
    ended_numbers = [number for number, updates in events.items() if updates[-1].reason is not None]
    assert set(ended_numbers) | cancelled_numbers == set(range(len(requests)))
    assert engine.step() == [] and len(engine.scheduler.free) == 5
    assert any(len(state.ids) > len(state.request.ids) for state in paused)
    for number in ended_numbers:
        assert summarize(events[number]) == summarize(run_alone(model, requests[number])), requests[number]
    for number in cancelled_numbers - set(ended_numbers):
        ids, *_ = summarize(events.get(number, [Update(number)]))
        assert ids == summarize(run_alone(model, requests[number]))[0][: len(ids)]


def test_tokens_that_are_read_late_are_not_lost() -> None:
    """On a GPU, a step starts before the previous step's tokens are read. A request can then end between two steps."""
    model, rng = tiny_model(64, "rotary"), random.Random(0)
    engine = Engine(Context(model, CPU, 5), {EOT}, 8)
    engine.runs_ahead = True
    requests = [
        Request(
            [number, 1], SampleConfig(max_tokens=rng.randint(1, 20)), bias=((EOT, 2.0),), group=(rng.choice("aab"),)
        )
        for number in range(50)
    ]
    events: dict[int, list[Update]] = {}
    for request in requests:
        number = engine.add(request)
        for event in engine.step() if number < 49 else engine.run():
            events.setdefault(event.number, []).append(event)
    for number, request in enumerate(requests):
        assert summarize(events[number]) == summarize(run_alone(model, request))


def test_requests_start_in_order_and_cancelling_frees_a_slot() -> None:
    engine = Engine(Context(tiny_model(), CPU, 3), {EOT})
    config = SampleConfig(greedy=True, ignore_eot=True, max_tokens=50)
    for settings in ({}, {}, {"greedy": False, "beam": 2}, {}):
        engine.add(Request([1, 2], SampleConfig(**{**vars(config), **settings})))
    # The beam search needs two slots; the last request queues behind it.
    assert [event.number for event in engine.step()] == [0, 1]
    engine.cancel(0)
    assert [event.number for event in engine.step()] == [1, 2]
    engine.cancel(3)
    engine.cancel(2)
    assert [event.number for event in engine.step()] == [1]
    engine.cancel(99)
    assert [event.number for event in engine.step()] == [1]
    assert len(engine.scheduler.free) == 2


@pytest.mark.parametrize("count, max_tokens", [(60, 20), (60, 1), (3, 400), (4, 60)])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_small_request_does_not_wait_for_a_large_one(positions: str, count: int, max_tokens: int) -> None:
    engine = Engine(Context(tiny_model(64, positions), CPU, 3), {EOT}, chunk=8)
    config = SampleConfig(greedy=True, ignore_eot=True, max_tokens=max_tokens)
    for index in range(count):
        engine.add(Request([1, 2, 3], config, index=index, group=("large",)))
    for _ in range(9 + max_tokens // 4):
        engine.step()
    number = engine.add(Request([4, 5], SampleConfig(ignore_eot=True, max_tokens=5), group=("small",)))
    reasons = [update.reason for _ in range(7) for update in engine.step() if update.number == number]
    assert len(reasons) <= 6 and reasons[-1] == "length"
    assert engine.busy
    assert all(update.cached == 0 for update in engine.run())  # Only a prompt counts, and it is too short.


def test_groups_take_turns() -> None:
    engine = Engine(Context(tiny_model(), CPU, 2), {EOT})
    config = SampleConfig(ignore_eot=True, max_tokens=3)
    groups = {engine.add(Request([1, 2], config, index=at, group=(name,))): name for name in "abcde" for at in range(9)}
    order = [groups[update.number] for update in engine.run() if update.reason]
    assert all(len({*order[start : start + 5]}) == 5 for start in range(0, 45, 5))


@pytest.mark.parametrize("slots", [1, 2, 4, 6])
def test_clients_and_then_their_requests_take_turns(slots: int) -> None:
    """One client has five requests of nine texts, another one request. Each gets half of the slots."""
    engine = Engine(Context(tiny_model(), CPU, slots), {EOT})
    config = SampleConfig(ignore_eot=True, max_tokens=3)
    places = [("many", name) for name in "abcde"] + [("few", "f")]
    groups = {engine.add(Request([1, 2], config, index=at, group=place)): place for place in places for at in range(9)}
    order = [groups[update.number] for update in engine.run() if update.reason]
    assert [sum(client == "few" for client, _ in order[:count]) for count in (4, 8, 16)] == [2, 4, 8]
    later = [name for client, name in order if client == "many"]
    assert all(len({*later[start : start + 5]}) == 5 for start in range(0, 45, 5))


def test_request_is_paused_for_another_client() -> None:
    engine = Engine(Context(tiny_model(), CPU, 4), {EOT})
    config = SampleConfig(ignore_eot=True, max_tokens=40)
    for name in "abcd":
        engine.add(Request([1, 2], config, group=("many", name)))
    engine.step()
    for index in range(3):
        engine.add(Request([3, 4], config, index=index, group=("few", "e")))
    engine.step()
    assert [state.request.group[0] for state in engine.scheduler.running] == ["many", "many", "few", "few"]


@pytest.mark.parametrize("settings", [{"greedy": True}, {}, {"beam": 2}, {"echo_logprobs": True, "max_tokens": 0}])
def test_nan_logits_end_only_their_request(settings: dict[str, Any]) -> None:
    """Failing prompts contain an id whose embedding is NaN. Later requests reuse the slots of failed ones."""
    model = tiny_model(24)
    with torch.no_grad():
        model.lm_head = torch.nn.Linear(16, 50, bias=False)
        model.lm_head.weight.copy_(model.wte.weight)
        model.wte.weight[7] = torch.nan
    good_request = Request([1, 2, 3], SampleConfig(max_tokens=8, ignore_eot=True), bias=((7, -1e9),))
    expected = summarize(run_alone(model, good_request))
    engine = Engine(Context(model, CPU, 4), {EOT})
    failing_request = Request([5, 7, 5, 5, 5], SampleConfig(**{"max_tokens": 8, **settings}))
    numbers = [
        engine.add(request)
        for request in (good_request, failing_request, good_request, failing_request, good_request, good_request)
    ]
    events: dict[int, list[Update]] = {}
    for event in engine.run():
        events.setdefault(event.number, []).append(event)
    for number in numbers:
        if number in (1, 3):
            assert isinstance(events[number][-1].error, NotANumber)
            assert events[number][-1].reason is None
        else:
            assert summarize(events[number]) == expected


@pytest.mark.parametrize("ended_by", ["cancelled", "max_tokens"])
def test_unread_nan_logits_do_not_reach_later_requests(ended_by: str) -> None:
    model = tiny_model(24)
    good = Request([1, 2, 3], SampleConfig(max_tokens=8, ignore_eot=True), bias=((7, -1e9),))
    expected = summarize(run_alone(model, good))
    with torch.no_grad():
        model.lm_head = torch.nn.Linear(16, 50, bias=False)
        model.lm_head.weight.copy_(model.wte.weight)
        model.wte.weight[7] = torch.nan
    engine = Engine(Context(model, CPU, 2), {EOT}, 4)
    bad_ids = [5, 6] * 6 + [5, 7, 5, 7, 5, 5, 5, 5]
    number = engine.add(Request(bad_ids, SampleConfig(max_tokens=0 if ended_by == "max_tokens" else 8)))
    for _ in range(4 if ended_by == "cancelled" else 9):  # Each step prefills four ids.
        engine.step()
    engine.cancel(number)
    engine.add(Request([3, 4] * 8, SampleConfig(max_tokens=8, ignore_eot=True), bias=((7, -1e9),)))
    later_number = engine.add(good)
    assert summarize([event for event in engine.run() if event.number == later_number]) == expected


def test_invalid_requests_are_refused_when_added() -> None:
    engine = Engine(Context(tiny_model(), CPU, 2, 8), {EOT})
    for request in (
        Request([1, 2], SampleConfig(max_tokens=7)), Request([1] * 9, SampleConfig(max_tokens=0)),
        Request([]), Request([50]), Request([-1, 3]), Request([1], bias=((99, 1.0),)), Request([1], SampleConfig(beam=3)),
    ):  # fmt: skip
        with pytest.raises(UserError):
            engine.add(request)
    assert not engine.busy


@pytest.mark.parametrize("seed", range(5))
def test_beam_search_keeps_its_slots_when_beams_end(seed: int) -> None:
    """Most hypotheses end in the same step, and the remaining ones branch again."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(4, 16, 1, 1, 8)).eval()

    def is_stopped(ids: Any) -> bool:
        return len(ids) in (3, 6) and ids[-1] > 0

    config = SampleConfig(beam=5, max_tokens=9, early_stopping="never", length_penalty=2.0, ignore_eot=True)
    results = []
    for rows in (5, 9):
        engine = Engine(Context(model, CPU, rows), {0})
        engine.add(Request([1], config, stops=is_stopped))
        results.append(summarize(list(engine.run())))
    assert results[0] == results[1]
    assert {reason for _, reason in results[0][-1]} <= {"length", "stop"}


class CountingContext(Context):
    """Records how many positions each step computes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.positions: list[int] = []

    def forward(self, work: Any, ids: torch.Tensor) -> torch.Tensor:
        self.positions.append(len(ids))
        return super().forward(work, ids)


GREEDY = SampleConfig(greedy=True, ignore_eot=True, max_tokens=12)


def test_long_prompts_are_prefilled_in_chunks() -> None:
    """Running requests get a token per step. Short prompts overtake long prompts, which are prefilled in order."""
    model = tiny_model(200)
    context = CountingContext(model, CPU, 6)
    engine = Engine(context, {EOT}, chunk=16)
    engine.add(Request([1, 2], GREEDY))
    engine.step()
    long_requests = [Request([n, *range(40), *range(40), *range(40)], GREEDY) for n in range(2)]
    numbers = [engine.add(request) for request in long_requests]
    token_counts: list[dict[int, int]] = []
    short_number = 0
    while engine.busy:
        if len(token_counts) == 3:
            short_number = engine.add(Request([5, 6, 7], GREEDY))
        context.positions = []
        token_counts.append({update.number: len(update.tokens) for update in engine.step()})
        assert sum(context.positions) <= 16 + 4
    assert all(counts[0] == 1 for counts in token_counts[:11])
    assert token_counts[3][short_number] == 1
    first_steps = [next(step for step, counts in enumerate(token_counts) if counts.get(number)) for number in numbers]
    assert (first_steps[0], first_steps[1]) == (7, 15)  # Each long prompt takes 8 chunks.
    for number, request in zip(numbers, long_requests, strict=True):
        assert sum(counts.get(number, 0) for counts in token_counts) == len(summarize(run_alone(model, request))[0])


@pytest.mark.parametrize("length_watched", [3, 100])
def test_waiting_times_are_bounded(length_watched: int) -> None:
    """Covers a short prompt among long ones, and a long one among short ones."""
    engine = Engine(Context(tiny_model(200), CPU, 8), {EOT}, chunk=16)
    rng = random.Random(0)

    def add(length: int) -> int:
        config = SampleConfig(greedy=True, ignore_eot=True, max_tokens=1)
        return engine.add(Request([rng.randrange(50) for _ in range(length)], config))

    watched_number, waits, added_at = add(length_watched), [], 0
    for step in range(200):
        for _ in range(7 - len(engine.scheduler.states)):
            add(103 - length_watched)
        if any(update.number == watched_number and update.reason for update in engine.step()):
            waits.append(step - added_at)
            watched_number, added_at = add(length_watched), step + 1
    assert len(waits) >= 10
    assert max(waits) <= (0 if length_watched == 3 else 2 * 100 // 16 + 1)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_slid_slot_is_not_reused_as_a_prefix(positions: str) -> None:
    model = tiny_model(24, positions)
    engine = Engine(Context(model, CPU, 2), {EOT})
    request = Request([*range(20)], SampleConfig(max_tokens=20, ignore_eot=True))
    expected = summarize(run_alone(model, request))
    for _ in range(2):
        engine.add(request)
        assert summarize([*engine.run()]) == expected


def test_shared_prefix_is_prefilled_once() -> None:
    model = tiny_model(200, "rotary", "modern")
    context = CountingContext(model, CPU, 4)
    engine = Engine(context, {EOT}, chunk=32)
    start = [n * 7 % 50 for n in range(100)]
    requests = [Request([*start, n], GREEDY) for n in range(4)]
    for request in requests:
        engine.add(request)
    events: dict[int, list[Update]] = {}
    for event in engine.run():
        events.setdefault(event.number, []).append(event)
    # Each of the other three prompts reuses 96 positions and computes 5.
    assert sum(context.positions) == 101 + 3 * 5 + 4 * 11
    assert [events[number][-1].cached for number in range(4)] == [0, 96, 96, 96]
    assert all(
        summarize(events[number]) == summarize(run_alone(model, request)) for number, request in enumerate(requests)
    )


@pytest.mark.parametrize("window", [None, 5])
def test_prompt_reuses_the_prefix_of_a_slot(window: int | None) -> None:
    """Covers slots of running and finished requests, and sliding-window layers."""
    properties: dict[str, Any] = {} if window is None else {"window": window, "window_layers": (1,)}
    model = tiny_model(300, "rotary", "modern", **properties)
    context = CountingContext(model, CPU, 4)
    engine = Engine(context, {EOT})
    rng = random.Random(1)
    start = [rng.randrange(50) for _ in range(180)]
    first = Request([*start, 1], SampleConfig(**{**vars(GREEDY), "max_tokens": 60}))
    engine.add(first)
    engine.step()
    cases = [(180, 1), (150, 1), (170, 30), (60, 1), (10, 1), (181, 5)]
    for shared, suffix in cases:
        request = Request([*start[:shared], *[49] * suffix], GREEDY)
        context.positions = []
        number = engine.add(request)
        events = [event for _ in range(14) for event in engine.step() if event.number == number]
        assert summarize(events) == summarize(run_alone(model, request))
        computed_positions = max(context.positions)
        reuses_prefix = shared >= 16 and (window is None or shared > 140)
        assert (computed_positions < shared) == reuses_prefix, (shared, computed_positions)
    assert not engine.busy
    number = engine.add(first)
    context.positions = []
    events = [*engine.run()]
    assert summarize(events) == summarize(run_alone(model, first))
    assert max(context.positions) == 1


def test_prompt_logprobs_do_not_depend_on_chunks() -> None:
    model = tiny_model(100)
    request = Request(list(range(45)), SampleConfig(greedy=True, max_tokens=3, echo_logprobs=True, logprobs=2))
    engine = Engine(Context(model, CPU, 2), {EOT}, chunk=7)
    for _ in range(2):
        engine.add(request)
        events = [*engine.run()]
        expected = run_alone(model, request)
        assert summarize(events) == summarize(expected)
        chunked, unchunked = (next(event.prompt for event in updates if event.prompt) for updates in (events, expected))
        assert chunked[0].logprob is None
        assert torch.allclose(
            torch.tensor([token.logprob for token in chunked[1:]]),
            torch.tensor([token.logprob for token in unchunked[1:]]),
            atol=1e-5,
        )


def test_overwritten_window_is_not_reused_as_a_prefix() -> None:
    """Long texts overwrite positions of the ring buffer."""
    model, rng = tiny_model(400, "rotary", "modern", window=8, window_layers=(0, 1)), random.Random(1)
    first_ids = [rng.randrange(40) for _ in range(300)]
    settings: dict[str, Any] = {"max_tokens": 4, "ignore_eot": True}
    rewound_ids = [first_ids, [*first_ids[:245], 41, 41], [*first_ids[:190], 42, 42]]
    context = Context(model, CPU, 1)
    for ids in rewound_ids:
        request, engine = Request(ids, SampleConfig(greedy=True, **settings)), Engine(context, {EOT})
        engine.add(request)
        actual, expected = (
            [token.logprob for update in updates for token in update.tokens]
            for updates in (engine.run(), run_alone(model, request))
        )
        assert actual == pytest.approx(expected, abs=1e-5)


def test_prefixes_of_waiting_requests_are_compared_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = Context.count_shared
    monkeypatch.setattr(Context, "count_shared", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    engine = Engine(Context(tiny_model(300), CPU, 4), {EOT}, chunk=16)
    for n in range(4):
        engine.add(Request([*range(40), *range(40), *range(40), n], GREEDY))
    engine.step()
    initial_calls = len(calls)
    engine.step()
    engine.step()
    assert len(calls) == initial_calls
    assert len([update for update in engine.run() if update.reason]) == 4
