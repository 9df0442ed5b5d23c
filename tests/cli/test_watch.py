"""The page of a run while it trains: its server, and the page in a browser."""

import http.client
import json
import shutil
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import Gpt, assert_same, one_line_of_what_and_what_next
from gpt_cli.show import live

from gpt.config import events

OPTIONS = ["--steps", "8", "--eval-every", "2", "--preset", "pico", "--n-embd", "32", "--block-size", "32",
           "--batch-tokens", "64", "--dropout", "0.1", "--dtype", "float32", "--vocab-size", "300", "-q"]  # fmt: skip
SENTENCE = ["<i>", " cat", "\\n"]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "POLL_SECONDS", 0.02)


@pytest.fixture
def run(run_folder: Path, workdir: Path) -> Path:
    """Returns a copy of a run as it was at its start. Markup in its name is text."""
    copy = workdir / "<b>run"
    shutil.copytree(run_folder, copy)
    (copy / "metrics.jsonl").write_text("")
    return copy


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Serves a run and returns the address of its page."""
    notes: list[str] = []
    with ExitStack() as stack:

        def start(run: Path) -> str:
            stack.enter_context(live.serving(run, notes.append))
            return notes[-1].split()[-1]

        yield start


def add(run: Path, *all_events: events.Event) -> None:
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(events.to_json(event) + "\n" for event in all_events)


def step(number: int, loss: float = 3.0) -> events.StepEvent:
    return events.StepEvent(number, 64 * number, float(number), loss, 0.01, 0.5, 64.0)


def frame(number: int, share: float, pieces: list[str] = SENTENCE, text: str = "the <b>") -> events.FrameEvent:
    """Returns a frame with one head, two rows of the lens, and the same share everywhere."""
    size = len(pieces)
    weights = b64encode(bytes([round(255 * share)] * (size * (size + 1) // 2))).decode()
    return events.FrameEvent(
        number, 64 * number, float(number), text, "the", pieces, [share] * (size - 1), [[0, 1]], ["previous"], weights,
        [0, 1], [["<u>"] * size] * 2, [[share] * size] * 2,
    )  # fmt: skip


def ask(address: str, path: str = "/", method: str = "GET", body: bytes = b"", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address.split("/")[2], timeout=100)
    connection.request(method, path, body or None, headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_foreign_hosts_and_origins_are_refused(
    run: Path, serve: Callable[[Path], str], headers: dict[str, str], status: int
) -> None:
    address = serve(run)
    assert ask(address, **headers)[0] == status
    assert ask(address, "/sentence", "POST", b"a cat", **headers)[0] == (204 if status == 200 else status)
    assert (run / "sentence.txt").exists() == (status == 200)


def test_only_a_short_sentence_is_written(run: Path, serve: Callable[[Path], str]) -> None:
    address, files = serve(run), set(run.rglob("*"))
    assert ask(address, "/sentence", "POST", b"x" * 2001)[0] == 413
    assert ask(address, "/../run.json")[0] == ask(address, "/run.json", "POST", b"x")[0] == 404
    assert ask(address, "/sentence", "PUT", b"x")[0] == 501
    assert set(run.rglob("*")) == files
    assert ask(address, "/sentence", "POST", b"x" * 2000)[0] == 204


def test_a_mark_continues_whole_lines_and_notices_a_cut_file(workdir: Path) -> None:
    path = workdir / "metrics.jsonl"
    path.write_bytes(b"one\ntwo\nthr")
    lines, mark = live.read_new_lines(path, "")
    assert lines == b'{"event": "restart"}\none\ntwo'
    assert live.read_new_lines(path, mark) == (b"", mark)
    path.write_bytes(b"one\ntwo\nthree\n")
    lines, later_mark = live.read_new_lines(path, mark)
    assert lines == b"three"
    path.write_bytes(b"one\nTWO\nmore and more\n")  # A resume has cut the file, and it is longer again.
    assert live.read_new_lines(path, later_mark)[0] == b'{"event": "restart"}\none\nTWO\nmore and more'
    for wrong in ("x", "-", "9" * 30, "-5-0", "3"):
        assert live.read_new_lines(path, wrong)[0].startswith(b'{"event": "restart"}')


def test_many_steps_are_thinned(run: Path) -> None:
    count = 20_000
    add(run, *map(step, range(1, count)), frame(count, 0.5))
    lines = live.read_new_lines(run / "metrics.jsonl", "")[0].splitlines()
    assert len(b"\n".join(lines)) < 2 * live.FULL_BYTES
    assert json.loads(lines[-1])["event"] == "frame"


def test_training_tells_a_browser_everything_and_waits_for_no_browser(
    text: Path, gpt: Gpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One browser reads, and another one never does. The weights are those of a run without a page."""
    monkeypatch.setattr("gpt.training.film.MAX_SHARE", 1e9)
    received: list[str] = []
    readers: list[Any] = []

    def note(line: str) -> None:
        address = line.split()[-1]
        stalled = socket.create_connection(("127.0.0.1", int(address.split(":")[2].strip("/"))))
        stalled.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection = http.client.HTTPConnection(address.split("/")[2])
        connection.request("GET", "/events")
        response = connection.getresponse()
        reader = threading.Thread(target=lambda: received.append(response.read().decode()))
        reader.start()
        readers.extend([stalled, reader])

    monkeypatch.setattr("gpt_cli.show.render.note", note)
    monkeypatch.setattr(live, "CLOSE_SECONDS", 60.0)
    assert gpt("train", text, "--watch", "-o", "watched", *OPTIONS).code == 0
    assert gpt("train", text, "-o", "plain", *OPTIONS).code == 0

    assert_same(Path("watched"), Path("plain"))
    stalled, reader = readers
    stalled.close()
    reader.join(60)
    lines = [json.loads(line[6:]) for line in received[0].splitlines() if line.startswith("data: ")]
    kinds = [line["event"] for line in lines]
    assert kinds[-1] == "closed"
    assert kinds.count("step") == 8 and kinds.count("frame") == 5 and kinds.count("end") == 1
    facts = [line for line in lines if line["event"] == "run"]
    assert facts[0]["name"] == "watched" and facts[-1]["steps"] == 8 and facts[-1]["sample"]


def test_run_without_a_page_continues(text: Path, gpt: Gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Path) -> None:
        raise OSError("there are no ports")

    monkeypatch.setattr(live, "PageServer", fail)
    result = gpt("train", text, "--watch", *OPTIONS)
    assert result.code == 0
    assert "the page cannot be served: there are no ports; the run continues" in result.err


def test_curves_of_earlier_runs_on_the_same_text(run: Path, run_folder: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    for name, text in {"same": record["sources"][0]["sha256"], "other": "another"}.items():
        shutil.copytree(run_folder, run.parent / name)
        changed = {**record, "started": "2000", "sources": [{**record["sources"][0], "sha256": text}]}
        (run.parent / name / "run.json").write_text(json.dumps(changed))
    with live.PageServer(run) as server:
        earlier = server.earlier
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    points = [(each["seconds"] - lines[0]["seconds"], each["val_loss"]) for each in lines if each["event"] == "eval"]
    assert earlier == [{"name": "same", "points": points}]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--json"], "--json cannot be combined with --watch"),
        (["-o", "film.html"], "--out cannot be combined with --watch"),
        (["<b>run"], "--watch shows one run, and 2 are given"),
        (["curve.jsonl"], "--watch shows one run, and 2 are given"),
    ],
)
def test_report_watch_refuses_what_it_cannot_show(gpt: Gpt, run: Path, args: list[str], message: str) -> None:
    one_line_of_what_and_what_next(gpt("report", run, *args, "--watch"), message)


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page of the server. Foreign requests, and errors on the page, fail the test."""
    errors: list[str] = []
    pages: list[Any] = []

    def open_address(address: str, width: int = 1280, **settings: Any) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900}, **settings)
        page.set_default_timeout(60_000)
        pages.append(page)
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: errors.append(request.url) if not request.url.startswith(address) else None)
        page.goto(address, wait_until="domcontentloaded")
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_address
    for page in pages:
        page.close()
    assert [error for error in errors if "ERR_" not in error] == []  # A lost connection is an error of the network.


def wait_for(page: Any, selector: str, text: str) -> None:
    """Waits until an element has a text. The content security policy blocks wait_for_function."""
    start = time.monotonic()
    while text not in (shown := page.inner_text(selector)):
        assert time.monotonic() - start < 60, (shown, text)
        page.wait_for_timeout(20)


def test_page_follows_the_run(run: Path, serve: Callable[[Path], str], open_page: Callable[..., Any]) -> None:
    page = open_page(serve(run))
    wait_for(page, "h1", "<b>run")
    assert page.locator("h1 b").count() == 0
    wait_for(page, "#status", "Getting ready")
    add(run, frame(0, 0.01), step(1, 5.0), step(2, 4.0), events.EvalEvent(2, 128, 2.0, 4.5, True), frame(2, 0.25))
    wait_for(page, "#numbers", "step\n2 of 30")
    wait_for(page, "#numbers", "4.5 (best)")
    wait_for(page, ".film output", "after 2 steps, 2 s")
    assert page.inner_text("#now") == page.inner_text("#then") == "the <b>"
    assert page.inner_text("#sentence") == "<i>·cat\\n"
    page.locator("#sentence .token").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#token") == "“·cat”: 25.00 % after 2 steps, 2 s; 1.00 % before the first step."
    assert page.inner_text(".heads button") == "previous token"
    assert page.locator("#layers td.mono").first.inner_text() == "<u>"
    page.focus("#frame")
    page.keyboard.press("ArrowLeft")
    wait_for(page, ".film output", "before the first step")
    add(run, step(3), frame(3, 0.5, text="the end"))  # An older frame that the user has chosen stays.
    wait_for(page, "#now", "the end")
    assert page.inner_text("#then") == "the <b>"
    page.keyboard.press("End")
    wait_for(page, "#then", "the end")
    page.fill("#own", "a <s>cat")
    page.keyboard.press("Enter")
    wait_for(page, ".own p", "at the next evaluation")
    assert (run / "sentence.txt").read_text() == "a <s>cat"
    add(run, events.EndEvent(3, 192, 3.0, "steps", "step-000003", 3.0, 2.0))
    wait_for(page, "#status", "The training is over")
    assert not page.is_visible("form.own")  # There is no further evaluation.
    assert f"gpt report '{run}' -o film.html" in page.inner_text("#commands")
    assert page.locator("figure text.level").all_text_contents() == ["uniform", "unigram", "xz"]


def test_page_of_a_killed_and_resumed_run(
    run: Path, serve: Callable[[Path], str], open_page: Callable[..., Any]
) -> None:
    """A resume cuts the metrics. The page of another run is not affected."""
    other = run.parent / "other"
    shutil.copytree(run, other)
    add(other, step(1), frame(1, 0.5, ["other"]))
    pages = [open_page(serve(run)), open_page(serve(other))]
    add(run, frame(0, 0.1), step(1), step(2))
    size = (run / "metrics.jsonl").stat().st_size
    add(run, step(3), frame(3, 0.2), events.EndEvent(3, 192, 3.0, "signal", None, None, None))
    wait_for(pages[0], "#status", "The training was interrupted")
    assert pages[0].inner_text("#commands") == f"gpt train --resume '{run}'"
    content = (run / "metrics.jsonl").read_bytes()[:size]
    (run / "metrics.jsonl").write_bytes(content)
    add(run, events.ResumeEvent(2, 128, 4.0, "step-000002"), *(step(n) for n in range(3, 8)), frame(7, 0.9))
    wait_for(pages[0], "#numbers", "step\n7 of 30")
    wait_for(pages[0], ".film output", "after 7 steps, 7 s")
    assert pages[0].get_attribute("#frame", "max") == "1"
    assert pages[0].inner_text("#status") == "Training …"
    assert pages[1].inner_text("#sentence") == "other"


def test_page_names_the_model_and_the_last_step(
    run: Path, serve: Callable[[Path], str], open_page: Callable[..., Any]
) -> None:
    record = json.loads((run / "run.json").read_text())
    record["resolved"]["own_teachers"] = {"count": 2}
    (run / "run.json").write_text(json.dumps(record))
    page = open_page(serve(run))
    phases = ["Training teacher 1 of 2 …", "Training teacher 2 of 2 …", "Training the model: its teachers are ready …"]
    for number, phase in enumerate(phases):
        teacher = events.TeacherEvent(number, 64 * number, float(number), f"teachers/{number}")
        add(run, *[teacher] * (number > 0), step(number + 1))
        wait_for(page, "#status", phase)
    add(run, events.EndEvent(30, 1920, 31.0, "steps", "step-000030", None, None))  # Of many steps, some are left out.
    wait_for(page, "#status", "The training is over.")
    assert "step\n30 of 30" in page.inner_text("#numbers")


def test_page_reconnects_and_keeps_its_last_state(
    run: Path, open_page: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add(run, step(1), frame(1, 0.5))
    with ExitStack() as stack:
        notes: list[str] = []
        stack.enter_context(live.serving(run, notes.append))
        address = notes[0].split()[-1]
        page = open_page(address)
        wait_for(page, "#numbers", "step\n1 of 30")
        # Ends the streams without a last word, as a crash does.
        monkeypatch.setattr(live._Handler, "_send", lambda *_: (_ for _ in ()).throw(ConnectionError))
        add(run, step(2))
        wait_for(page, "#status", "The connection to the training is lost")
        assert page.inner_text("#sentence") == "<i>·cat\\n"
        monkeypatch.undo()
        wait_for(page, "#numbers", "step\n2 of 30")
        assert page.get_attribute("#frame", "max") == "0"
    wait_for(page, "#status", "The command has ended")
    assert page.inner_text("#sentence") == "<i>·cat\\n"


@pytest.mark.parametrize("width", [390, 1280])
def test_film_in_the_report(gpt: Gpt, run: Path, open_page: Callable[..., Any], width: int) -> None:
    add(run, frame(0, 0.01), step(1), step(2), frame(2, 0.25), step(3), frame(3, 0.81))
    assert gpt("report", run, "-o", "film.html").code == 0
    page = open_page(Path("film.html").absolute().as_uri(), width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.inner_text(".film output") == "after 3 steps, 3 s"
    shade = "document.querySelectorAll('#sentence .token')[1].style.background"
    newest = page.evaluate(shade)
    page.clock.install(time=0)
    page.clock.pause_at(3600)  # On a busy machine, the film would be over before its first frame is read.
    page.click(".film button")
    for when in "before the first step", "after 2 steps, 2 s", "after 3 steps, 3 s":
        assert page.inner_text(".film output") == when
        assert (page.evaluate(shade) == newest) == (when == "after 3 steps, 3 s")
        assert page.inner_text(".film button") == "Pause"
        page.clock.run_for(400)
    assert page.inner_text(".film button") == "Play"
    assert page.locator("details > summary", has_text="What do I see?").count() == 5
