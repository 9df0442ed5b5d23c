"""Requests → tokens: prompts fill rows of a context, and a step gives every row a token. Knows ids, not text."""

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from gpt.decoding.beam import Hypothesis, Search, Stops
from gpt.decoding.constraint import Constraint, masked
from gpt.decoding.context import Context
from gpt.decoding.logits import Filters, Token, as_int64, key_of, no_logits, scores, step_key, tokens
from gpt.decoding.lookup import Lookup
from gpt.device import Download, upload
from gpt.errors import NotANumber, UserError
from gpt.sample_config import SampleConfig

POSITIONS_AT_ONCE = 64  # of a prompt, whose logits are computed together
REUSED_FROM = 16  # ids that a prompt shares with a row from which they are not computed anew


@dataclass(frozen=True)
class Request:
    """A text to generate after ``ids``, of which there is at least one.

    Sample ``index`` of ``seed``, or a beam search where ``config`` has beams. ``config.stop`` and ``config.bias`` are
    texts, which the engine does not know: ``bias`` has ids and what is added to their logits; ``stops`` says where a
    hypothesis of a search ends. Whoever turns a sample's tokens into text cancels it at its stop text. ``constraint``:
    what the text has to be.
    """

    ids: Sequence[int]
    config: SampleConfig = SampleConfig()
    seed: int = 0
    index: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    stops: Stops | None = None
    constraint: Constraint | None = None

    @property
    def width(self) -> int:
        """The number of the context's rows that it needs at most."""
        return max(1, self.config.beam)


@dataclass(frozen=True)
class Update:
    """One update for request ``number``: new tokens and, at the end, the finish reason or the error.

    ``prompt`` are the prompt's tokens, in the first update, where their log-probabilities were asked for. A search's
    ``tokens`` are those that all of its hypotheses agree on; its texts are in ``best`` at the end, the best one first.
    ``reason`` is ``length``, ``eot`` or ``stop``. ``cached``: ids of the prompt that came from the prefix cache.
    """

    number: int
    tokens: Sequence[Token] = ()
    prompt: Sequence[Token] | None = None
    reason: str | None = None
    best: Sequence[Hypothesis] = ()
    error: UserError | None = None
    cached: int = 0


@dataclass(eq=False)
class _Job:
    """A request that waits or runs, with what its next update will say."""

    number: int
    request: Request
    filters: Filters
    search: Search | None
    key: int  # of its random numbers
    constraint: Constraint | None  # of its text so far; in a search each hypothesis has its own
    rows: list["_Row"] = field(default_factory=list)  # one; in a search one for each living hypothesis
    count: int = 0  # tokens so far
    chosen: int = 0  # these, and those that are under way from the device
    lookup: Lookup = field(default_factory=Lookup)
    cached: int = 0  # ids of its prompt that came from the prefix cache
    done: bool = False
    tokens: list[Token] = field(default_factory=list)
    prompt: Sequence[Token] | None = None
    reason: str | None = None
    error: UserError | None = None

    @property
    def runs_ahead(self) -> bool:
        """Whether its next token can be computed before the host knows its last one."""
        config = self.request.config
        known = self.search is not None or self.constraint is not None or self.filters.looks_back or config.speculate
        return not (known or self.chosen == config.max_tokens)

    def take(self, token: Token, ends: Collection[int]) -> None:
        """Appends a token, which may be the last."""
        config = self.request.config
        self.tokens.append(token)
        self.count += 1
        try:
            if self.constraint is not None:
                self.constraint.take(token.id)
        except UserError as error:
            self.end(error=error)
            return
        if token.id in ends and not config.ignore_eot:
            self.end("eot")
        elif self.constraint is not None and self.constraint.ended:
            self.end("stop")
        elif self.count == config.max_tokens:
            self.end("length")

    def end(self, reason: str | None = None, error: UserError | None = None) -> None:
        self.reason, self.error, self.done = reason, error, True

    def update(self) -> Update:
        """Returns what is new since the last update."""
        tokens, self.tokens = self.tokens, []
        prompt = None
        if self.rows:  # until then it is not read to its end
            prompt, self.prompt = self.prompt, None
        best: Sequence[Hypothesis] = ()
        if self.search is not None and self.error is None:
            tokens = self.search.agreed()
            if self.done:
                best = self.search.ended[: self.request.config.n_best]
        return Update(self.number, tokens, prompt, self.reason, best, self.error, self.cached)


@dataclass(eq=False)
class _Row:
    """A row of the context in use."""

    job: _Job
    at: int  # its number
    last: int = 0  # the newest id, which the context does not have yet
    guessed: list[int] = field(default_factory=list)  # ids that may follow it
    right: int = 0  # guesses among them that turned out right
    free: bool = False  # of a hypothesis that has no child


@dataclass(frozen=True)
class _Draw:
    """A token for each of some rows, chosen on the device and under way to the host."""

    rows: list[_Row]
    ids: Tensor  # (n, 1), on the device
    scores: Download


@dataclass(eq=False)
class _Reader:
    """A prompt that is read in several steps, in a row at the end of the context."""

    job: _Job
    at: int  # the row
    left: list[int]  # ids that are still to be read


class Engine:
    """Generates for many requests at once, each with settings of its own, which come and go between steps. A text ends
    with any of the ids ``ends``.

    Requests wait until the context has rows for them, first come, first served. With ``chunk``, a step reads at most so
    many ids of prompts, so that running requests never wait longer for their next token; longer prompts are read in
    turn, a chunk each, and every other step is free for short ones. With ``reuse``, a prompt that begins as a row of
    the context does, whose request runs or has ended, takes over its keys and values.

    Tokens depend on the request alone and not on what runs beside it, up to the rounding of sums (docs/sampling.md). An
    error that is one request's own, such as NaN logits, ends that request with an update; an error that `step` raises
    ends the engine.
    """

    def __init__(self, context: Context, ends: Collection[int], chunk: int | None = None, reuse: bool = False) -> None:
        self.context = context
        self.ends = ends
        self.chunk = context.rows * context.size if chunk is None else chunk
        self.reuse = reuse
        self._number = 0  # of the next request
        self._filters: WeakValueDictionary[Any, Filters] = WeakValueDictionary()  # rows that share them are one group
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._rows: list[_Row] = []  # row r of the context is _rows[r]
        self._draws: list[_Draw] = []  # the last step's, unless they have been read
        self._readers: deque[_Reader] = deque()  # the next one to read is the first
        self._fills = True  # whether the next step is free for short prompts

    @property
    def busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        """The number of requests that run."""
        return len(self._running)

    @property
    def free(self) -> int:
        """The number of rows left for further requests; negative where requests wait for more than there are."""
        return self.context.rows - sum(job.request.width for job in (*self._waiting, *self._running))

    def add(self, request: Request) -> int:
        """Queues a request and returns its number, by which updates name it. Raises `UserError` for one that the model
        or the context cannot serve."""
        self._check(request)
        config = request.config
        filters = Filters(config, self.ends, request.bias)
        filters = self._filters.setdefault(filters.key, filters)
        constraint = request.constraint and request.constraint.copy()
        search = Search(config, self.ends, request.stops, constraint) if config.beam else None
        key = key_of(request.seed, request.index, request.ids)
        self._waiting.append(_Job(self._number, request, filters, search, key, constraint))
        self._number += 1
        return self._number - 1

    def _check(self, request: Request) -> None:
        size = self.context.vocab_size
        beam = request.config.beam
        if beam > self.context.rows:
            raise UserError(
                f"beam is {beam}; there is room for {self.context.rows:,} texts at once", "take fewer beams"
            )
        longest = min(len(request.ids) + request.config.max_tokens, self.context.size)
        if longest > self.context.cache.room:
            raise UserError(
                f"a request needs room for {longest:,} tokens; there is room for {self.context.cache.room:,}",
                "shorten the prompt, or take fewer --max-tokens",
            )
        ids = [*request.ids, *(id for id, _ in request.bias)]
        if not request.ids or not 0 <= min(ids) <= max(ids) < size:
            raise UserError(f"a request has ids from 0 to {size - 1:,}, and one at least", "take the model's tokenizer")

    def cancel(self, *numbers: int) -> None:
        """Ends requests without another update; their rows are free in the next step. Those that have ended are left
        alone."""
        wanted = set(numbers)
        for job in (*self._running, *self._waiting):
            if job.number in wanted:
                job.end()
        self._running = [job for job in self._running if not job.done]
        self._waiting = deque(job for job in self._waiting if not job.done)

    def run(self) -> Iterator[Update]:
        """Steps until no request waits or runs."""
        while self.busy:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Starts the waiting requests for which there are free rows, and gives every running one its next token, or
        several where guesses were right. Returns an update for each running request.

        On a GPU the tokens of a step are read after the next one has been launched, as long as no row ends and the next
        step needs nothing of them but their ids: the GPU never waits for the host. No row is given to another request
        before what was launched for it has been read."""
        if any(row.job.done for row in self._rows):  # it was cancelled
            self._take()
        self._free_rows()
        draws = self._draws
        self._draws = []
        self._decode(draws)
        self._prefill()
        for draw in draws:
            self._take_one(draw, appended=True)
        if not self._runs_ahead():
            self._take()
        updates = [job.update() for job in self._running]
        self._running = [job for job in self._running if not job.done]
        return updates

    def _runs_ahead(self) -> bool:
        """Whether the next step is launched before the tokens of this one are read."""
        return self.context.compute.device.type == "cuda" and all(
            row.job.runs_ahead and self.context.room(row.at) for row in self._rows
        )

    def _free_rows(self) -> None:
        """Frees the rows of ended requests. The last row in use moves into each gap, and what was there stays, for
        prompts that begin so, until the row is needed."""
        for at in reversed(range(len(self._rows))):
            if self._rows[at].free or self._rows[at].job.done:
                last = self._rows.pop()
                if at < last.at:
                    self._rows[at] = last
                    self.context.swap(last.at, at)
                last.at = at
        self._readers = deque(reader for reader in self._readers if not reader.job.done)
        self._settle()

    def _settle(self) -> None:
        """Moves readers to the last rows of the context, so that the others are free."""
        for back, reader in enumerate(sorted(self._readers, key=lambda reader: -reader.at), 1):
            self.context.swap(reader.at, self.context.rows - back)
            reader.at = self.context.rows - back

    def _decode(self, draws: Sequence[_Draw]) -> None:
        """Appends each row's last id and guesses to the context, padded to the most guesses, and chooses tokens after
        them. The last ids are those of ``draws``, where these have not been read."""
        if not self._rows:
            return
        if draws:
            ids: list[list[int]] | Tensor = self._drawn(draws)
        else:
            self._guess()
            T = 1 + max(len(row.guessed) for row in self._rows)
            ids = [[row.last, *row.guessed, *[0] * (T - 1 - len(row.guessed))] for row in self._rows]
        if self.context.compiled is not None and len(ids[0]) == 1:
            self._step_compiled(ids)
        else:
            self._choose(self.context.logits(self.context.step(ids)), self._rows)

    def _step_compiled(self, ids: list[list[int]] | Tensor) -> None:
        """Decodes by the context's compiled step, which chooses too where all rows have filters of logits alone."""
        filters = self._rows[0].job.filters
        if any(
            row.job.search or row.job.constraint or row.job.filters is not filters or filters.shapes(row.job.chosen)
            for row in self._rows
        ):
            [logits] = self.context.next_tokens(ids)
            self._choose(logits[:, None], self._rows)
            return
        keys = [step_key(row.job.key, row.job.chosen) for row in self._rows] if filters.draws else []
        top = max(row.job.request.config.logprobs or 0 for row in self._rows)
        scored = self.context.next_tokens(ids, filters, keys, top)
        last = self.context.last
        self._launched(self._rows, last if len(last) == len(ids) else last[: len(ids)], scored)

    def _launched(self, rows: Sequence[_Row], ids: Tensor, scored: Sequence[Tensor]) -> None:
        """Takes note of a token for each row, (n, 1), and starts to read it."""
        for row in rows:
            row.job.chosen += 1
        self._draws.append(_Draw([*rows], ids, Download(*scored)))

    def _drawn(self, draws: Sequence[_Draw]) -> Tensor:
        """Returns the last id of each row, (n, 1), from the device."""
        at = [row.at for draw in draws for row in draw.rows]
        ids = draws[0].ids if len(draws) == 1 else torch.cat([draw.ids for draw in draws])
        return ids if at == [*range(len(at))] else ids[upload(np.argsort(at), ids.device)]

    def _guess(self) -> None:
        """Guesses the next ids of samples that ask for it, from their text so far."""
        if not any(row.job.request.config.speculate for row in self._rows):
            return
        room = min(self.context.room(row.at) for row in self._rows) - 1
        for row in self._rows:
            job, config = row.job, row.job.request.config
            most = min(room, config.speculate, config.max_tokens - job.count - 1)
            if most > 0 and job.search is None:
                row.guessed = job.lookup.guess([*self.context.ids[row.at], row.last], most)

    def _prefill(self) -> None:
        """Reads prompts, and chooses a token after each that has been read to its end."""
        start = len(self._rows)
        logits = None
        if self._waiting and (self._fills or not self._readers) and (jobs := self._admit()):
            self._fills = False
            logits = self._fill(jobs)
        else:
            self._fills = True
            if self._readers:
                logits = self._read()
        if logits is not None:
            self._choose(logits, self._rows[start:])

    def _admit(self) -> list[_Job]:
        """Starts waiting requests for which there are rows. Returns those whose prompts are read together in this step;
        of the others readers are made."""
        free = self.context.rows - sum(job.request.width for job in self._running)
        jobs: list[_Job] = []
        longest = 0
        while self._waiting and (width := self._waiting[0].request.width) <= free:
            job = self._waiting[0]
            length = min(len(job.request.ids), self.context.size)
            source, job.cached = self._reusable(job.request)
            if source is None and length <= self.chunk:
                longest = max(longest, length)
                if jobs and longest * (len(jobs) + 1) > self.chunk:  # shorter ones are padded
                    break
                jobs.append(job)
            else:
                self._add_reader(job, source, job.cached)
            self._running.append(self._waiting.popleft())
            free -= width
        return jobs

    def _reusable(self, request: Request) -> tuple[int | None, int]:
        """Returns the row whose beginning a request takes over, and how much of it; the logits of a prompt that is
        echoed are computed from its start."""
        if not self.reuse or request.config.echo_logprobs:
            return None, 0
        source, same = self.context.reusable(request.ids)
        return (source, same) if same >= REUSED_FROM else (None, 0)

    def _add_reader(self, job: _Job, source: int | None, same: int) -> None:
        at = self.context.rows - len(self._readers) - 1
        self.context.begin(at, job.request.ids, source, same)
        left = list(job.request.ids[self.context.dropped[at] + same :])
        reader = _Reader(job, at, left)
        (self._readers.appendleft if len(left) <= self.chunk else self._readers.append)(reader)

    def _fill(self, jobs: list[_Job]) -> Tensor:
        """Fills rows with prompts."""
        start = len(self._rows)
        x = self.context.fill(start, [job.request.ids for job in jobs])  # (n, T, C)
        for job, of_job in zip(jobs, x, strict=True):
            self._start(job, len(self._rows))
            self._echo(job, of_job, job.request.ids[self.context.dropped[job.rows[0].at] :])
        ends = self.context.cache.lengths[start : len(self._rows)] - 1
        return self.context.logits(x[torch.arange(len(x), device=x.device), upload(ends, x.device)])[:, None]

    def _read(self) -> Tensor | None:
        """Reads a chunk of the first reader's prompt; the next one's turn is in a later step."""
        reader = self._readers.popleft()
        ids, reader.left = reader.left[: self.chunk], reader.left[self.chunk :]
        x = self.context.read(reader.at, ids)
        self._echo(reader.job, x, ids + reader.left[:1])
        if reader.job.done:  # its log-probabilities are no numbers
            self.context.clear(reader.at)
            return None
        if reader.left:
            self._readers.append(reader)
            return None
        at = len(self._rows)
        for other in self._readers:
            if other.at == at:
                other.at = reader.at
        self.context.swap(reader.at, at)
        self._settle()
        self._start(reader.job, at)
        return self.context.logits(x[-1:])[:, None]

    def _start(self, job: _Job, at: int) -> None:
        """Lets a request run whose prompt has been read."""
        job.rows = [_Row(job, at)]
        self._rows += job.rows
        if job.request.config.max_tokens == 0:
            job.end("length")

    def _echo(self, job: _Job, x: Tensor, ids: Sequence[int]) -> None:
        """Adds a prompt's tokens, where they were asked for: from the residual stream (T, C) of its next T ids. ``ids``
        are these, and the one after them if there is one."""
        config = job.request.config
        if config.echo_logprobs:
            first = [Token(ids[0], None)] if job.prompt is None else []
            try:
                following = next_tokens(self.context, x, ids[1:], config.logprobs or 0)
            except NotANumber as error:
                self._fail(job, error)
                return
            job.prompt = [*(job.prompt or first), *following]

    def _choose(self, logits: Tensor, rows: Sequence[_Row]) -> None:
        """Chooses the next tokens of ``rows``, which lie side by side, from logits (n, T, V) after their last T ids."""
        first, T = rows[0].at, logits.size(1)
        searches = {row.job: row.job.search for row in rows if row.job.search is not None and not row.job.done}
        t, going = 0, [row for row in rows if row.job.search is None and not row.job.done]
        while going:
            self._draw(logits[:, t], first, going, [self._past(row, T - t) for row in going])
            if T == 1:
                break
            self._take()
            going = [row for row in going if row.guessed[t : t + 1] == [row.last] and not row.job.done]
            t += 1
            for row in going:
                row.right = t
        for row in rows:
            self.context.rewind(row.at, T - 1 - row.right)
            row.right, row.guessed = 0, []
        for job, search in searches.items():
            self._search(job, search, _select(logits[:, 0], [row.at - first for row in job.rows]))

    def _draw(self, logits: Tensor, first: int, rows: Sequence[_Row], past: Sequence[Sequence[int]]) -> None:
        """Chooses a token for each of ``rows`` from logits (n, V) of those from row ``first`` on; rows with the same
        filters are filtered together. ``past``: the ids of each row."""
        groups: dict[Filters, list[tuple[_Row, Sequence[int]]]] = {}
        for row, text in zip(rows, past, strict=True):
            groups.setdefault(row.job.filters, []).append((row, text))
        rows = [row for group in groups.values() for row, _ in group]
        logits = _select(logits, [row.at - first for row in rows])
        chosen: list[Tensor] = []
        for filters, group in groups.items():
            done = sum(map(len, chosen))
            texts, counts = [text for _, text in group], [row.job.chosen for row, _ in group]
            allowed = masked(logits[done : done + len(group)], [row.job.constraint for row, _ in group])
            shaped = filters.shape(allowed, texts, counts)
            keys = [step_key(row.job.key, row.job.chosen) for row, _ in group] if filters.draws else []
            chosen.append(filters.choose(shaped, upload(as_int64(keys), logits.device))[:, None])
        ids = torch.cat(chosen) if len(chosen) > 1 else chosen[0]
        top = max(row.job.request.config.logprobs or 0 for row in rows)
        self._launched(rows, ids, scores(ids, logits, top))

    def _take(self) -> None:
        """Reads the tokens that are under way."""
        draws, self._draws = self._draws, []
        for draw in draws:
            self._take_one(draw)

    def _take_one(self, draw: _Draw, appended: bool = False) -> None:
        """Reads tokens, and gives them to their requests. ``appended``: whether the context has their ids already."""
        top = [row.job.request.config.logprobs or 0 for row in draw.rows]
        for row, [token] in zip(draw.rows, tokens(draw.scores.read(), top), strict=True):
            row.last = token.id
            if appended:
                self.context.ids[row.at].append(token.id)
            if math.isnan(token.logprob or 0.0):
                if not row.job.done:
                    row.job.end(error=no_logits())
                self.context.clear(row.at)
            elif not row.job.done:  # else it ended with the token before, or was cancelled
                row.job.take(token, self.ends)

    def _past(self, row: _Row, without: int) -> Sequence[int]:
        """Returns the ids of a row for filters that look at them, but for the last ``without`` − 1."""
        ids = self.context.ids[row.at]
        return ids[: len(ids) + 1 - without] if row.job.filters.looks_back else ()

    def _search(self, job: _Job, search: Search, logits: Tensor) -> None:
        """Extends a search by a token, from logits (n, V) after each of its living hypotheses."""
        logprobs = logits.log_softmax(-1)
        past = [self.context.ids[row.at] for row in job.rows]
        allowed = masked(logprobs, [each.constraint for each in search.live])
        shaped = job.filters.shape(allowed, past, [job.count] * len(past))
        try:
            parents = search.advance(logprobs, shaped)
        except UserError as error:
            self._fail(job, error)
            return
        job.count += 1
        if search.done:
            job.end(search.ended[0].reason)
        else:
            self._place(job, [job.rows[parent] for parent in parents])
            for row, each in zip(job.rows, search.live, strict=True):
                row.last = each.tokens[-1].id

    def _place(self, job: _Job, parents: list[_Row]) -> None:
        """Gives each hypothesis a row: a parent's first child stays in its row, the others get copies."""
        spare = [row for row in job.rows if row not in parents]
        job.rows = []
        for parent in parents:
            row = parent
            if parent in job.rows:
                if not spare:
                    spare.append(_Row(job, len(self._rows)))
                    self._rows += spare
                row = spare.pop()
                self.context.copy(parent.at, row.at)
            job.rows.append(row)
        for row in spare:
            row.free = True

    def _fail(self, job: _Job, error: UserError) -> None:
        """Ends a request with an error. Its rows may hold NaN, which must not reach later requests."""
        job.end(error=error)
        for row in job.rows:
            self.context.clear(row.at)


def next_tokens(context: Context, x: Tensor, ids: Sequence[int], top: int) -> list[Token]:
    """Returns the tokens ``ids``, each of which follows a position of the residual stream (T, C). Raises `NotANumber`
    where the log-probability of one is NaN."""
    found: list[Token] = []
    for start in range(0, len(ids), POSITIONS_AT_ONCE):
        part = ids[start : start + POSITIONS_AT_ONCE]
        logits = context.logits(x[start : start + len(part)])
        scored = Download(*scores(upload([[id] for id in part], x.device), logits, top)).read()
        found += [token for [token] in tokens(scored, [top] * len(part))]
    if any(math.isnan(token.logprob or 0.0) for token in found):
        raise no_logits()
    return found


def _select(tensor: Tensor, at: list[int]) -> Tensor:
    """Returns rows of a tensor, without a copy where they are the first ones."""
    return tensor[: len(at)] if at == [*range(len(at))] else tensor[upload(at, tensor.device)]


def generate(
    context: Context, prompt: Sequence[int], config: SampleConfig, ends: Collection[int], seed: int = 0, index: int = 0
) -> Iterator[Token]:
    """Yields tokens after ``prompt``, one id at least, until ``max_tokens`` or one of ``ends``, which is yielded last.
    Raises `NotANumber` where the logits are NaN."""
    engine = Engine(context, ends)
    engine.add(Request(prompt, config, seed, index))
    for update in engine.run():
        if update.error is not None:
            raise update.error
        yield from update.tokens
