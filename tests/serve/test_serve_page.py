"""The page of ``gpt serve`` in a browser, compared with the API."""

import base64
import contextlib
import functools
import hashlib
import json
import math
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from colours import contrast, luminance
from conftest import FAST, WATCH_TRACE, make_text, more

from gpt.decoding.engine import Engine
from gpt.playground import page as playground

KEY = "the key"
NAME = "<img src=x onerror='window.taken = 1'>"
# The template rejects messages with a leading exclamation mark.
TEMPLATE = """{% for m in messages %}{% if m.content[:1] == "!" %}{{ raise_exception("no bangs") }}{% endif %}
{{- m.role[0] }}:{{ m.content }}
{% endfor %}a:"""
ANSWERED = "job === null && document.getElementById('go').textContent === 'Send'"
NAMELESS = (  # Fields and buttons without a label for screen readers
    "[...document.querySelectorAll('input, textarea, button')]"
    ".filter((x) => !(x.labels?.length || x.getAttribute('aria-label') || x.textContent.trim())).length"
)
DONE = "job === null && document.getElementById('go').textContent === 'Continue'"


def test_the_page_is_self_contained() -> None:
    app = pytest.importorskip("gpt.serve.app", reason="the extra serve is not installed")
    text, policy = app.page()
    assert "://" not in text
    assert re.findall(r"""(?:src|href)=["']([^"']*)""", text) == ["data:,"]
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write|eval|unsafe", text + policy)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for tag in ("style", "script"):
        contents = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(contents) == 1
        assert f"/* {tag} */" not in contents[0]
        digest = base64.b64encode(hashlib.sha256(contents[0].encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"


def test_an_exported_page_may_run_a_worker_and_connects_to_nothing() -> None:
    text, policy = playground.assemble(("server.js",), worker=("page.js",))
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert (rules["connect-src"], rules["worker-src"], "frame-ancestors" in rules) == ("'none'", "blob:", False)
    assert re.fullmatch(r"'sha256-\S+' 'wasm-unsafe-eval'", rules["script-src"])
    worker, _, rest = text.partition('const KERNELS = "";\nfunction runWorker() {\n')[2].partition("}\n</script>")
    assert worker == (playground.FOLDER / "page.js").read_text(encoding="utf-8")
    assert rest.strip().startswith(playground.MODEL)


@pytest.fixture(scope="module")
def address(run_folder: Path) -> Iterator[str]:
    """A server with an API key and markup as the model name."""
    with serve_model(run_folder) as server_address:
        yield server_address


@pytest.fixture(scope="module")
def chat_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a chat template and a context of 1,024 tokens."""
    import gpt

    folder = tmp_path_factory.mktemp("chat")
    (folder / "text.txt").write_bytes(make_text().encode())
    settings = FAST | {"block_size": 1024, "batch_tokens": 1024}
    run = gpt.train(folder / "text.txt", out=str(folder / "run"), steps=1, **settings).run
    (checkpoint,) = run.glob("step-*")
    gpt_files = shutil.ignore_patterns("gpt.json", "checksums.json", "*.tiktoken", "training.*")
    shutil.copytree(checkpoint, folder / "model", ignore=gpt_files)  # A Transformers folder
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    with serve_model(folder / "model") as server_address:
        yield server_address


@contextlib.contextmanager
def serve_model(model: Path, **settings: Any) -> Iterator[str]:
    serving = pytest.importorskip("serving", reason="the extra serve is not installed")
    with serving.served(serving.load(model), chunk=128, name=NAME, api_key=KEY, **settings) as api:
        yield f"http://127.0.0.1:{api.port}"


def post(address: str, path: str, **values: Any) -> Any:
    request = urllib.request.Request(
        f"{address}/{path}", json.dumps(values).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )  # fmt: skip
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def request_completion(address: str, **values: Any) -> dict[str, Any]:
    values = {"temperature": 0.8, "logprobs": 10, "token_details": True, **values}
    choice: dict[str, Any] = post(address, "v1/completions", **values)["choices"][0]
    return choice


@pytest.fixture
def open_page(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Opens the page. Foreign requests, console messages and markup in text fail the test."""
    console_messages: list[str] = []
    requested_urls: list[str] = []
    pages = []
    addresses = [address, "data:,"]

    def open_url(
        key: str | None = KEY, width: int = 1100, address: str = address, changes: Any = None, ready: bool = True,
        **settings: Any,
    ) -> Any:  # fmt: skip
        addresses.append(address)
        page = browser.new_page(viewport={"width": width, "height": 800}, **settings)
        page.set_default_timeout(60_000)
        pages.append(page)
        page.on("console", lambda message: console_messages.append(message.text))
        page.on("pageerror", lambda error: console_messages.append(str(error)))
        page.on("request", lambda request: requested_urls.append(request.url))
        if key is not None:
            page.add_init_script(f"sessionStorage.setItem('gpt-key', {json.dumps(key)})")
        if changes is not None:
            change_source(page, address, changes)
        page.goto(address)
        page.wait_for_selector("body[data-ready]" if ready else "body")
        return page

    yield open_url
    for page in pages:
        assert page.evaluate("[document.images.length, document.scripts.length, window.taken]") == [0, 1, None]
        page.close()
    assert [text for text in console_messages if not text.startswith("Failed to load resource")] == []
    assert all(url.startswith(tuple(addresses)) for url in requested_urls)


def change_source(page: Any, address: str, changes: dict[str, str]) -> None:
    """Changes the text of the page."""
    with urllib.request.urlopen(address) as answer:
        text = answer.read().decode()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    page.route(f"{address}/", lambda route: route.fulfill(content_type="text/html", body=text))


def wait_until(page: Any, condition: str) -> None:
    """Polls a condition, since the page's content security policy blocks wait_for_function."""
    start_time = time.monotonic()
    while not page.evaluate(condition):
        assert time.monotonic() - start_time < 60, condition
        page.wait_for_timeout(20)


@pytest.fixture
def open_chat(open_page: Callable[..., Any], chat_address: str) -> Callable[..., Any]:
    return functools.partial(open_page, address=chat_address)


def write_text(page: Any, text: str | None = None, wait: bool = True, **settings: Any) -> str:
    """Types text and settings, generates, and returns the new text."""
    if settings:
        page.evaluate("$('tune').open = true")
    for name, value in settings.items():
        page.fill(f"#{name}", str(value))
    if text is not None:
        page.fill("#text", text)
    page.focus("#text")
    page.keyboard.press("Control+Enter")
    if wait:
        wait_until(page, DONE)
    return str(page.input_value("#text"))


def send_message(page: Any, content: str, wait: bool = True, **settings: Any) -> None:
    if settings:
        page.evaluate("$('tune').open = true")
    for name, value in settings.items():
        page.fill(f"#{name}", str(value))
    page.fill("#question", content)
    page.focus("#question")
    page.keyboard.press("Enter")
    if wait:
        wait_until(page, ANSWERED)


def read_conversation(page: Any) -> list[tuple[str, str]]:
    """Returns the author and text of every message."""
    turns = page.evaluate("[...document.querySelectorAll('.turn')].map((turn) => [turn.dataset.who, turn.textContent])")
    return [(author, text) for author, text in turns]


def messages(*contents: str, system: str = "") -> list[dict[str, str]]:
    """Returns alternating messages of user and assistant."""
    alternating = [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *alternating] if system else alternating


def record_requests(page: Any) -> list[dict[str, Any]]:
    """Returns a list that receives all later request bodies."""
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if "completions" in request.url else None)
    return bodies


def record_messages(page: Any) -> list[list[dict[str, str]]]:
    """Returns a list that receives the messages of all later requests for an answer."""
    conversations: list[list[dict[str, str]]] = []

    def record(request: Any) -> None:
        if request.url.endswith("tokenize") and "messages" in request.post_data_json:
            conversations.append(request.post_data_json["messages"])

    page.on("request", record)
    return conversations


def read_marks(page: Any) -> list[dict[str, Any]]:
    """Returns the highlighted tokens."""
    tokens: list[dict[str, Any]] = page.evaluate(
        "marks.filter((m) => m.shows.run).map((m) => ({ text: m.textContent, id: m.shows.id, kind: m.className,"
        " logprob: m.shows.logprob }))"
    )
    return tokens


def read_alternatives(page: Any) -> list[tuple[str, str]]:
    return [tuple(button.inner_text().split("\n")) for button in page.locator("#list button").all()]


def format_percent(logprob: float) -> str:
    share = 100 * math.exp(logprob)
    return "< 0.01 %" if share < 0.005 else f"{share:.2f} %"


def make_entry(data: bytes, id: int = 300, logprob: float = -0.5, top: list[Any] | None = None) -> dict[str, Any]:
    token = {"id": id, "token": "?", "bytes": list(data), "logprob": logprob}
    return {**token, "top_logprobs": [token] if top is None else top}


def mock_answer(page: Any, *entries: dict[str, Any], end: str = "data: [DONE]\n\n") -> None:
    """Answers all later requests with a stream of ``entries``."""
    choices = [
        {"delta": {"content": bytes(item["bytes"]).decode("utf-8", "replace")}, "logprobs": {"content": [item]}}
        for item in entries
    ]
    body = "".join(f"data: {json.dumps({'choices': [item]})}\n\n" for item in choices) + end
    page.route("**/v1/**completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def test_text_and_numbers_equal_the_api(open_page: Any, address: str) -> None:
    page = open_page()
    for prompt, seed in (("the cat", 3), ("Zürich; 🐕", 4), ("", 5)):  # An empty prompt starts with end-of-text.
        settings = {"seed": seed, "max_tokens": 40, "temperature": 1.1, "top_k": 50, "top_p": 0.9}
        text = write_text(page, prompt, **settings)
        expected = request_completion(address, prompt=prompt, **settings)
        assert text == re.sub("\r\n?", "\n", prompt + expected["text"])
        tokens = expected["logprobs"]["content"][: len(read_marks(page))]
        assert len(tokens) >= len(expected["logprobs"]["content"]) - 1
        assert [(entry["id"], entry["logprob"]) for entry in tokens] == [
            (m["id"], m["logprob"]) for m in read_marks(page)
        ]
        for at, token in list(enumerate(tokens))[::7]:
            page.evaluate("(at) => open(parts.findIndex((part) => part.run) + at)", at)
            rows = token["top_logprobs"] + ([] if token["id"] in [x["id"] for x in token["top_logprobs"]] else [token])
            assert [share for _, share in read_alternatives(page)] == [format_percent(row["logprob"]) for row in rows]
            assert page.locator("#list [aria-current]").count() == 1
            level = sum(math.exp(token["logprob"]) < bound for bound in (0.9, 0.5, 0.2, 0.05, 0.01))
            assert f"s{level}" in read_marks(page)[at]["kind"]
    assert re.match(r"40 tokens, \d+\.\d per second\.|\d+ tokens?", page.inner_text("#rate"))
    assert page.locator("h1").inner_text() == NAME
    assert page.locator("#facts").inner_text() == "context: 32 tokens"


def test_menu_chooses_one_of_several_models(open_page: Any, address: str) -> None:
    page = open_page()
    assert page.locator("#models").is_hidden()
    with urllib.request.urlopen(f"{address}/v1/models") as answer:
        (real,) = json.load(answer)["data"]
    body = json.dumps({"data": [{**real, "id": "first"}, real]})
    page.route("**/v1/models", lambda route: route.fulfill(content_type="application/json", body=body))
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    assert page.evaluate("[...$('models').options].map((option) => option.value)") == ["first", NAME]
    assert (page.input_value("#models"), page.inner_text("#name")) == ("first", "first")
    with page.expect_navigation():
        page.select_option("#models", NAME)
    page.wait_for_selector("body[data-ready]")
    assert page.inner_text("#name") == NAME
    bodies = record_requests(page)
    assert write_text(page, "the ", max_tokens=2)
    assert [body["model"] for body in bodies] == [NAME]
    assert page.input_value("#models") == NAME


def test_undo_and_redo_restore_text_and_marks(open_page: Any) -> None:
    page = open_page()
    texts = ["the cat", write_text(page, "the cat", max_tokens=5), write_text(page), write_text(page)]
    assert len(set(texts)) == 4
    shades = read_marks(page)
    page.keyboard.press("Control+z")
    assert page.input_value("#text") == texts[2]
    page.click("#undo")
    page.keyboard.press("Control+z")
    assert page.input_value("#text") == texts[0]
    page.keyboard.press("Control+z")
    assert page.input_value("#text") == ""
    assert page.get_attribute("#undo", "aria-disabled") == "true"
    for text in texts:
        page.keyboard.press("Control+Shift+Z")
        assert page.input_value("#text") == text
    assert read_marks(page) == shades


def test_undo_restores_the_text_before_typing(open_page: Any) -> None:
    page = open_page()
    text = write_text(page, "the cat", max_tokens=5)
    shades = read_marks(page)
    page.focus("#text")
    page.keyboard.type(" dog")
    assert page.inner_text("#status") == page.inner_text("#rate") == ""
    page.click("#undo")
    assert (page.input_value("#text"), read_marks(page)) == (text, shades)
    page.click("#redo")
    assert page.input_value("#text") == text + " dog"
    page.click("#undo")
    page.focus("#text")
    page.keyboard.press("Backspace")
    assert page.get_attribute("#redo", "aria-disabled") == "true"
    page.keyboard.press("Control+z")  # The browser's own undo
    assert page.input_value("#text") == text
    page.keyboard.press("Control+z")  # Nothing is typed any more, so this undoes the generation.
    assert page.input_value("#text") == "the cat"
    page.keyboard.type(" sat")
    write_text(page)
    for expected in ("the cat sat", "the cat", ""):
        page.click("#undo")
        assert page.input_value("#text") == expected
    page.click("#redo")
    page.click("#fresh")
    assert page.input_value("#text") == ""
    page.click("#undo")
    assert page.input_value("#text") == "the cat"


def test_text_typed_while_the_model_loads_becomes_a_message(open_chat: Any) -> None:
    page = open_chat(
        changes={"async info() {": "async info() { await new Promise((done) => { window.go_on = done; });"}, ready=False
    )
    status = page.locator("#status[role=status]")
    assert status.inner_text() == "Loading the model …"
    assert page.get_attribute("#go", "aria-disabled") == "true"
    page.keyboard.type("the cat")
    for key in ("Enter", "Control+Enter"):
        page.keyboard.press(key)
    page.click("#go", force=True)
    page.evaluate("showLoading(0.405)")
    assert (page.input_value("#text"), status.inner_text()) == ("the cat", "Loading the model … 40 %")
    page.evaluate("go_on()")
    page.wait_for_selector("body[data-ready]")
    assert page.evaluate("[chat, question.value, field.value, document.activeElement.id, past.length, other.past.length]") == [
        True, "the cat", "", "question", 0, 0,
    ]  # fmt: skip
    assert (status.inner_text(), page.get_attribute("#go", "aria-disabled")) == ("", "false")
    page.keyboard.press("Enter")
    wait_until(page, ANSWERED)
    assert read_conversation(page)[0] == ("You", "the cat")
    page.clock.install(time=0)
    page.clock.pause_at(3600)
    page.fill("#question", "and?")
    page.evaluate("endTime = performance.now()")
    for milliseconds, content in ((500, "and?"), (1, "")):  # The first click was meant for "Stop".
        page.clock.run_for(milliseconds)
        page.click("#go")
        assert page.input_value("#question") == content


def test_alternatives_can_be_chosen_with_the_keyboard(open_page: Any, address: str) -> None:
    page = open_page()
    text = write_text(page, "the cat", seed=7, max_tokens=10)
    tokens = read_marks(page)
    page.keyboard.press("Alt+ArrowDown")  # The last token is selected.
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    at = len(tokens) - 3
    assert page.evaluate("marks[seen].shows.id") == tokens[at]["id"]
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "3px"
    while page.evaluate("document.activeElement.parentNode.previousSibling"):
        page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowDown")
    alternative = page.evaluate("parts[seen].top[1]")
    before = post(address, "tokenize", prompt="the cat")["tokens"] + [token["id"] for token in tokens[:at]]
    page.keyboard.press("Enter")
    wait_until(page, DONE)
    assert page.evaluate("document.activeElement.id") == "text"
    after = request_completion(address, prompt=[*before, alternative["id"]], seed=7, max_tokens=10)
    ids = [token["id"] for token in after["logprobs"]["content"]]
    new_tokens = read_marks(page)
    assert [token["id"] for token in new_tokens[:at]] == [token["id"] for token in tokens[:at]]
    assert (new_tokens[at]["id"], new_tokens[at]["logprob"]) == (alternative["id"], alternative["logprob"])
    assert [token["id"] for token in new_tokens[at + 1 :]] == ids[: len(new_tokens) - at - 1]
    assert len(new_tokens) >= at + 1 + len(ids) - 1
    page.keyboard.press("Control+z")
    assert page.input_value("#text") == text
    page.keyboard.press("Alt+ArrowDown")
    page.keyboard.press("Escape")
    assert page.evaluate("[document.activeElement.id, likely.hidden]") == ["text", True]


def test_alternatives_can_be_chosen_with_the_mouse(open_page: Any) -> None:
    page = open_page()
    write_text(page, "the cat", seed=8, max_tokens=30)
    box = page.locator("#shade .token").nth(3).bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#likely", state="visible")
    wait_until(page, "marks.filter((m) => m.shows.run).indexOf(marks[seen]) === 3")
    assert page.evaluate("getComputedStyle(likely).pointerEvents") == "none"
    assert page.locator("#likely p:visible, #close:visible").count() == 1
    assert page.inner_text("#opened") == ""
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(box["x"] + 40, box["y"] + 40)  # Other tokens on the way to the list don't replace it.
    page.wait_for_timeout(200)
    assert page.evaluate("marks.filter((m) => m.shows.run).indexOf(marks[seen])") == 3
    assert page.inner_text("#opened").startswith("Alternatives")
    page.click("#close")
    assert page.locator("#likely").is_hidden()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    word = page.evaluate("parts[seen].top[2]")
    page.locator("#list button").nth(2).click()
    wait_until(page, DONE)
    assert read_marks(page)[3]["id"] == word["id"]
    page.mouse.move(5, 5)
    box = page.locator("#shade .token").nth(2).bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    wait_until(page, "marks.filter((m) => m.shows.run).indexOf(marks[seen]) === 2")
    page.mouse.click(5, 5)
    assert page.locator("#likely").is_hidden()


def test_escape_stops_generation(open_page: Any) -> None:
    page = open_page()
    write_text(page, "the cat", wait=False, max_tokens=1_000_000)
    wait_until(page, "marks.length > 20")
    assert page.locator("#text").get_attribute("readonly") is not None
    page.keyboard.press("Escape")
    wait_until(page, DONE)
    assert len(read_marks(page)) >= 20  # The prompt has a mark, too.
    assert page.inner_text("#status") == "Stopped."
    page.keyboard.type(" and on")
    assert page.input_value("#text").endswith(" and on")
    write_text(page, "the cat", wait=False)
    wait_until(page, "marks.length > 5")
    page.click("#go")
    wait_until(page, DONE)


def test_edit_removes_later_probabilities(open_page: Any, address: str) -> None:
    page = open_page()
    text = write_text(page, "the cat", seed=9, max_tokens=20)
    before = read_marks(page)
    edge = len("the cat") + sum(len(token["text"]) for token in before[:6])
    page.evaluate("(at) => field.setSelectionRange(at, at)", edge)
    page.keyboard.type("<b>")
    assert page.input_value("#text") == text[:edge] + "<b>" + text[edge:]
    assert read_marks(page) == before[:6]
    assert page.locator("#likely").is_hidden()
    for _ in range(3):
        page.keyboard.press("Backspace")
    assert read_marks(page) == before
    page.keyboard.press("Backspace")
    assert len(read_marks(page)) < 6
    edited = page.input_value("#text")
    ids = post(address, "tokenize", prompt=edited)["tokens"]
    after = request_completion(address, prompt=ids[-32:], seed=9, max_tokens=5)
    assert write_text(page, max_tokens=5) == edited + after["text"]
    assert page.evaluate("shade.textContent") == page.input_value("#text")


def test_text_is_never_markup(open_page: Any) -> None:
    page = open_page()
    markup = "<img src=x onerror='window.taken = 1'><script>window.taken = 2</script>"
    other = make_entry(f"</button>{markup}".encode(), 301)
    mock_answer(page, make_entry(markup.encode(), top=[other]), make_entry(b"\x1b[31m\xe2\x80\xae", 302))
    assert write_text(page, markup) == markup + markup + "\x1b[31m\u202e"
    page.evaluate("open(parts.findIndex((part) => part.run))")
    assert read_alternatives(page)[0][0] == f"</button>{markup}".replace(" ", "·")
    page.evaluate("open(parts.length - 1)")
    assert read_alternatives(page)[0][0] == "\\u{1b}[31m\\u{202e}"
    assert page.evaluate("shade.textContent") == page.input_value("#text")


def test_partial_characters_are_joined(open_page: Any) -> None:
    page = open_page()
    dog = "🐕".encode()
    tokens = (b"\xef\xbb\xbfa", dog[:1], dog[1:3], dog[3:] + b"\r", b"\nb", b"\xff", b"c\xc3")
    mock_answer(page, *(make_entry(data, id) for id, data in enumerate(tokens, 300)))
    assert write_text(page, "x") == "x\ufeffa🐕\nb\ufffdc\ufffd"
    assert [token["text"] for token in read_marks(page)] == ["\ufeffa", "", "", "🐕\n", "b", "", "\ufffdc\ufffd"]
    page.evaluate("open(2)")
    assert read_alternatives(page)[0][0] == "<0xF0>"
    page.click("#after")
    assert read_alternatives(page)[0][0] == "<0x9F><0x90>"
    page.unroute("**/v1/**completions")
    mock_answer(page, make_entry(b"\xa9!", 310))
    assert write_text(page) == "x\ufeffa🐕\nb\ufffdcé!"  # Generation continues inside a character.
    requests = record_requests(page)
    page.evaluate("pick(3, { id: 77, bytes: [0x9f, 0x90, 0x88], logprob: -1 })")
    wait_until(page, DONE)
    assert page.input_value("#text").startswith("x\ufeffa🐈")
    assert requests[0]["prompt"][-3:] == [300, 301, 77]


def test_errors_are_one_line_and_keep_the_text(open_page: Any) -> None:
    page = open_page()
    error = page.locator("#error")
    refusal = {"error": {"message": "temperature is 200; it must be a number from 0 to 100", "param": "temperature"}}
    page.route("**/v1/**completions", lambda route: route.fulfill(status=400, json=refusal))
    assert write_text(page, "the cat") == "the cat"
    assert error.inner_text() == refusal["error"]["message"]
    page.unroute("**/v1/**completions")
    assert page.evaluate("past.length") == 1  # The text before typing
    mock_answer(page, make_entry(b" sat"), end="")
    assert write_text(page, max_tokens=5) == "the cat sat"
    assert error.inner_text() == "The connection was lost. The text so far is kept."
    page.unroute("**/v1/**completions")
    mock_answer(page, make_entry(b" on"), end='data: {"error": {"message": "out of <b>memory</b>"}}\n\n')
    assert write_text(page) == "the cat sat on"
    assert error.inner_text() == "out of <b>memory</b>"
    page.unroute("**/v1/**completions")
    page.route("**/v1/**completions", lambda route: route.fulfill(status=502, body="<h1>no</h1>"))
    write_text(page)
    assert error.inner_text().startswith("The server answered 502")
    page.unroute("**/v1/**completions")
    page.route("**/v1/**completions", lambda route: route.abort())
    assert write_text(page) == "the cat sat on"
    assert error.inner_text() == "The server cannot be reached. Is it still running?"
    page.unroute("**/v1/**completions")
    write_text(page)
    assert error.is_hidden()


def test_api_key_is_requested_and_kept_in_the_tab(open_page: Any) -> None:
    page = open_page(key=None)
    assert page.locator("#key").is_visible()
    assert page.evaluate("document.activeElement.id") == "secret"
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    wait_until(page, "document.getElementById('key-says').textContent.startsWith('That is not')")
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#key", state="hidden")
    assert len(write_text(page, "the cat", max_tokens=5)) > len("the cat")
    assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert page.locator("#key").is_hidden()


def test_text_can_exceed_the_context(open_page: Any) -> None:
    page = open_page()
    page.fill("#text", "cat " * 10)
    wait_until(page, "/^The text has \\d+ tokens/.test(document.getElementById('length').textContent)")
    assert page.inner_text("#forgotten") == ""
    page.fill("#text", "cat " * 100)
    wait_until(page, "document.getElementById('forgotten').textContent")
    assert "longer than the model's context of 32 tokens" in page.inner_text("#forgotten")
    assert page.locator("#forgotten[role=status]").count() == 1
    assert len(write_text(page, max_tokens=5)) > 400


@pytest.mark.parametrize("scheme", ["light", more("dark")])
def test_page_fits_a_phone_with_enough_contrast(open_page: Any, scheme: str) -> None:
    page = open_page(width=360, color_scheme=scheme)
    assert page.is_hidden("#settings")
    tops = page.locator("#go, #tune summary, .legend").evaluate_all("all => all.map((each) => each.offsetTop)")
    assert tops == sorted(tops)
    write_text(page, "a" * 300 + " the cat", max_tokens=60, temperature=1.5)
    page.evaluate("open(parts.findLastIndex((part) => part.run && part.text.trim()))")
    page.click("summary")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("paper.scrollWidth <= paper.clientWidth")
    if page.locator("#likely").is_visible():
        box = page.locator("#likely").bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 360
    background, text = page.evaluate(
        "[document.body, field].map((x) => [getComputedStyle(x).backgroundColor, getComputedStyle(x).color])"
    )
    shades = page.evaluate(
        "[...document.querySelectorAll('.legend .token')].map((x) => getComputedStyle(x).backgroundColor)"
    )
    assert len(shades) == 6
    assert min(contrast(shade, text[1]) for shade in (background[0], *shades[1:])) >= 4.5
    steps = [luminance(shade) for shade in (background[0], *shades[1:])]
    assert steps == sorted(steps, reverse=scheme == "light")  # Color-blind users rely on lightness.
    assert page.evaluate(NAMELESS) == 0


def test_sliders_set_request_fields(open_page: Any) -> None:
    page = open_page()
    requests = record_requests(page)
    mock_answer(page, make_entry(b"!"))
    write_text(page, "the cat")
    names = ("temperature", "top_k", "top_p", "max_tokens")
    assert [requests[-1][name] for name in names] == [0.8, 0, 1, 200]  # Defaults of `gpt sample`
    page.focus("#temperature + input")
    page.keyboard.press("ArrowRight")
    assert page.input_value("#temperature") == "0.85"
    page.fill("#temperature", "0.3")
    assert page.input_value("#temperature + input") == "0.3"
    write_text(page, top_p=0.5, top_k=7, max_tokens=9, seed=11)
    assert [requests[-1][name] for name in (*names, "seed")] == [0.3, 7, 0.5, 9, 11]
    labels = page.evaluate(
        "[...document.querySelectorAll('#settings input')].map((x) => x.ariaLabel ?? x.labels[0].textContent)"
    )
    assert len(set(labels)) == len(labels) == 9
    for field in page.locator("#settings :is(input, textarea)").all():
        assert page.locator(f"#{field.get_attribute('aria-describedby')}").count() == 1


@pytest.mark.more
def test_long_text_stays_responsive(open_page: Any) -> None:
    """Pastes 100,000 characters and generates 4,000 tokens."""
    page = open_page()
    page.focus("#text")
    page.evaluate("(text) => { field.value = text; }", "The cat sat on the mat, 🐕.\n" * 3600)
    for key in "axv":
        page.keyboard.press(f"Control+{key}")
    assert len(page.input_value("#text")) > 90_000
    start_time = page.evaluate("performance.now()")
    for _ in range(10):
        page.keyboard.type("x")
    assert page.evaluate("performance.now()") - start_time < 5000
    assert page.evaluate("shade.textContent === field.value")
    page.evaluate(
        """() => {
          const asked = fetch, top = [...Array(10).keys()].map((id) => ({ id, bytes: [32, 97 + id], logprob: -2.3 }));
          const chunk = `data: ${JSON.stringify({ choices: [{ logprobs: { content: [{ ...top[3], top_logprobs: top }] } }] })}\\n\\n`;
          let left = 200;
          window.gaps = [];
          let before = performance.now();
          const frame = () => { const now = performance.now(); gaps.push(now - before); before = now; if (job) requestAnimationFrame(frame); };
          window.fetch = (path, options) => {
            if (path !== "v1/completions") return asked(path, options);
            requestAnimationFrame(frame);
            return Promise.resolve(new Response(new ReadableStream({ async pull(stream) {
              await new Promise((go) => setTimeout(go, 5));
              stream.enqueue(new TextEncoder().encode(left-- ? chunk.repeat(20) : "data: [DONE]\\n\\n"));
              if (left < 0) stream.close();
            } })));
          };
        }"""
    )
    assert write_text(page).endswith(" d d d")
    assert len(read_marks(page)) == 4000
    gaps = sorted(page.evaluate("gaps"))
    assert gaps[len(gaps) // 2] < 500  # Milliseconds between frames


def test_conversation_shows_the_answers_of_the_api(open_chat: Any, chat_address: str) -> None:
    page = open_chat()
    assert page.get_attribute("#chat", "aria-pressed") == "true"
    assert page.evaluate("document.activeElement.id") == "question"
    settings = {"seed": 3, "max_tokens": 12, "temperature": 1.1, "top_k": 50, "top_p": 0.9}
    options = {"logprobs": True, "top_logprobs": 10, **settings}
    contents: list[str] = []
    tokens: list[dict[str, Any]] = []
    for question in ("the cat <b>", "dogs\n\n 🐕?"):
        send_message(page, question, system="Be a cat.", **settings)
        contents.append(question)
        expected = post(
            chat_address, "v1/chat/completions", messages=messages(*contents, system="Be a cat."), **options
        )
        (choice,) = expected["choices"]
        contents.append(choice["message"]["content"])
        assert choice["finish_reason"] == "length"
        tokens += choice["logprobs"]["content"]
    turns = read_conversation(page)
    assert [author for author, _ in turns] == ["You", "Model"] * 2
    assert [text for _, text in turns] == [re.sub("\r\n?", "\n", entry) for entry in contents]
    marks = read_marks(page)
    assert [entry["id"] for entry in tokens] == [mark["id"] for mark in marks]
    assert [entry["logprob"] for entry in tokens] == pytest.approx([mark["logprob"] for mark in marks], abs=1e-5)
    assert page.inner_text("#length") == f"The conversation has {expected['usage']['total_tokens']} tokens."
    assert page.inner_text("#status") == "Stopped at the maximum length."
    assert page.input_value("#question") == ""
    page.keyboard.press("Alt+ArrowDown")
    for token in reversed(tokens):  # The arrow keys move from the last answer to the first.
        rows = token["top_logprobs"] + ([] if token["id"] in [x["id"] for x in token["top_logprobs"]] else [token])
        assert [share for _, share in read_alternatives(page)] == [format_percent(row["logprob"]) for row in rows]
        assert page.evaluate("[marks[seen].shows.id, likely.contains(document.activeElement)]") == [token["id"], True]
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("Escape")
    assert page.evaluate("[document.activeElement.id, likely.hidden, job]") == ["question", True, None]
    assert read_conversation(page) == turns
    page.locator(".token").nth(4).click()
    assert page.evaluate("marks[seen].shows.id") == tokens[4]["id"]
    page.locator(".turn").first.click()
    assert page.locator("#likely").is_hidden()


def open_alternatives(page: Any, turn: int, token: int) -> dict[str, Any]:
    """Clicks on a token; returns the most likely alternative."""
    page.locator(".turn").nth(turn).locator(".token").nth(token).click()
    alternative: dict[str, Any] = page.evaluate("parts[seen].top.find((each) => each.id !== parts[seen].id)")
    return alternative


def choose_alternative(page: Any, token: dict[str, Any]) -> None:
    at = page.evaluate("(id) => parts[seen].top.findIndex((x) => x.id === id)", token["id"])
    page.locator("#list button").nth(at).click()
    wait_until(page, ANSWERED)


def decode_tokens(tokens: list[dict[str, Any]]) -> str:
    return bytes(byte for token in tokens for byte in token["bytes"]).decode("utf-8", "replace")


def test_alternatives_replace_tokens_in_a_conversation(open_chat: Any, chat_address: str) -> None:
    page = open_chat()
    settings = {"seed": 3, "max_tokens": 12, "temperature": 1.1}
    options = {"logprobs": True, "top_logprobs": 10, **settings}
    for question in ("the cat 🐕", "dogs"):
        send_message(page, question, system="Be a cat.", **settings)
    first = messages("the cat 🐕", system="Be a cat.")
    answer = post(chat_address, "v1/chat/completions", messages=first, **options)["choices"][0]
    second = messages("the cat 🐕", answer["message"]["content"], "dogs", system="Be a cat.")
    turns, lengths = read_conversation(page), [page.inner_text("#length")]
    page.fill("#system", "Be a dog.")  # Earlier answers keep the old system message.
    for turn, history in ((3, second), (1, first)):
        tokens = post(chat_address, "v1/chat/completions", messages=history, **options)["choices"][0]["logprobs"][
            "content"
        ]
        other = open_alternatives(page, turn, 5)
        choose_alternative(page, other)
        expected_tokens = [*tokens[:5], other]
        prompt = post(chat_address, "tokenize", messages=history)["tokens"] + [token["id"] for token in expected_tokens]
        assert (
            prompt[: -len(expected_tokens)] == post(chat_address, "tokenize", prompt=render_template(history))["tokens"]
        )
        after = post(chat_address, "v1/completions", prompt=prompt, logprobs=10, token_details=True, **settings)
        expected_tokens += after["choices"][0]["logprobs"]["content"]
        shown_now = read_conversation(page)
        assert shown_now[:turn] == turns[:turn] and len(shown_now) == turn + 1
        assert [token["id"] for token in expected_tokens] == [m["id"] for m in read_marks(page)][
            -len(expected_tokens) :
        ]
        assert shown_now[turn] == ("Model", re.sub("\r\n?", "\n", decode_tokens(expected_tokens)))
        assert page.evaluate("document.activeElement.id") == "question"
        lengths.append(page.inner_text("#length"))
        assert lengths[-1] == f"The conversation has {after['usage']['total_tokens']} tokens."
    conversations = record_messages(page)
    send_message(page, "and?")
    assert conversations[0] == messages("the cat 🐕", decode_tokens(expected_tokens), "and?", system="Be a dog.")
    for _ in range(2):
        page.click("#undo")
    assert len(read_conversation(page)) == 4 and page.inner_text("#length") == lengths[1]
    page.click("#undo")
    assert (read_conversation(page), page.inner_text("#length")) == (turns, lengths[0])


def render_template(messages: list[dict[str, str]]) -> str:
    return "".join(f"{message['role'][0]}:{message['content']}\n" for message in messages) + "a:"


def test_special_tokens_can_be_alternatives(open_chat: Any, chat_address: str) -> None:
    """Choosing end-of-text ends the answer. Other special tokens are kept as ids. Later messages contain no special
    tokens."""
    page = open_chat()
    end, special = page.evaluate("model.end"), 301
    page.evaluate("(id) => model.specials.push(id)", special)
    dog = "🐕".encode()
    top = [make_entry(b"<|endoftext|>", end), make_entry(b"<|tool|>", special), make_entry(dog[1:], 302)]
    mock_answer(
        page,
        make_entry(b"a", top=top),
        make_entry(dog[:1], 303, top=top),
        make_entry(dog[1:], 302, top=top),
        make_entry(b"!", 304),
    )
    send_message(page, "the cat")
    turns = read_conversation(page)
    assert turns[1] == ("Model", "a🐕!")
    page.unroute("**/v1/**completions")
    requests = record_requests(page)
    for token, text in ((2, "a\ufffd"), (0, "")):
        page.evaluate("(at) => open(at)", 2 + token)
        assert [name for name, _ in read_alternatives(page)][:2] == ["‹<|endoftext|>›", "‹<|tool|>›"]
        choose_alternative(page, top[0])
        assert (read_conversation(page)[1], page.inner_text("#status")) == (("Model", text), "The answer ends here.")
        assert page.evaluate("document.activeElement.id") == "question"
        page.click("#undo")
        assert read_conversation(page) == turns
    assert requests == []
    mock_answer(page, make_entry(b" on", 305))
    page.evaluate("open(3)")
    choose_alternative(page, top[1])
    base = post(chat_address, "tokenize", messages=messages("the cat"))["tokens"]
    assert requests[0]["prompt"] == [*base, 300, special]
    conversations = record_messages(page)
    send_message(page, "and?")
    assert conversations[0] == messages("the cat", "a on", "and?")


def test_alternatives_work_at_the_context_limit_and_after_an_error(open_chat: Any) -> None:
    """An answer that fills the context ends with the alternative. Undo restores the answer after an error."""
    page = open_chat()
    send_message(page, "the cat", max_tokens=4, seed=1)
    turns = read_conversation(page)
    other = open_alternatives(page, 1, 3)
    page.route("**/v1/completions", lambda route: route.abort())
    choose_alternative(page, other)
    assert page.inner_text("#error") == "The server cannot be reached. Is it still running?"
    page.click("#undo")
    page.unroute("**/v1/completions")
    assert read_conversation(page) == turns
    requests = record_requests(page)
    length = int(re.findall(r"\d+", page.inner_text("#length"))[0])
    page.evaluate("(length) => { model.context_length = length; }", length)
    other = open_alternatives(page, 1, 3)
    choose_alternative(page, other)
    assert requests[0]["max_tokens"] == 0
    assert [m["id"] for m in read_marks(page)][3:] == [other["id"]]
    assert page.inner_text("#status") == "Stopped at the maximum length."


def test_regenerate_and_clear_can_be_undone(open_chat: Any) -> None:
    page = open_chat()
    conversations = record_messages(page)
    send_message(page, "the cat", max_tokens=5)
    send_message(page, "the dog", seed=1)
    first = read_conversation(page)
    page.fill("#question", "a draft")
    page.fill("#seed", "2")
    page.click("#again")
    wait_until(page, ANSWERED)
    second = read_conversation(page)
    assert second[:3] == first[:3]
    assert second[3] != first[3]
    assert [message["content"] for message in conversations[-1]] == ["the cat", first[1][1], "the dog"]
    assert page.input_value("#question") == "a draft"
    page.click("#fresh")
    assert read_conversation(page) == []
    assert page.get_attribute("#again", "aria-disabled") == "true"
    page.click("#again", force=True)
    send_message(page, "again")
    assert conversations[-1] == messages("again")
    for expected in ([], second, first):
        page.click("#undo")
        assert read_conversation(page) == expected
    page.click("#redo")
    assert read_conversation(page) == second


def test_stop_keeps_partial_answers_and_restores_unanswered_questions(
    open_chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: time.sleep(0.05) or step(engine))  # 900 tokens take 45 seconds.
    page = open_chat()
    send_message(page, "the cat", wait=False, max_tokens=900, temperature=0)
    wait_until(page, "marks.length > 20")
    assert page.inner_text("#go") == "Stop"
    page.keyboard.type("a draft")
    page.keyboard.press("Enter")  # Enter has no effect during an answer.
    page.keyboard.press("Escape")
    wait_until(page, ANSWERED)
    assert page.inner_text("#status") == "Stopped."
    assert page.input_value("#question") == "a draft"
    turns = read_conversation(page)
    assert len(turns) == 2 and page.locator("#turns .token").count() > 8
    send_message(page, "go on", max_tokens=2)
    assert read_conversation(page)[:2] == turns
    pending_routes: list[Any] = []
    page.route("**/v1/completions", lambda route: pending_routes.append(route))
    turns = read_conversation(page)
    for press in ("#again", None):  # No token has arrived yet.
        if press:
            page.click(press)
        else:
            send_message(page, "too slow", wait=False)
            page.keyboard.type("more")
        wait_until(page, "job !== null")
        page.click("#go")
        wait_until(page, ANSWERED)
        assert read_conversation(page) == turns
    wait_until(page, "question.value === 'too slow\\nmore'")
    assert page.evaluate("past.length") == 2


def test_errors_keep_the_conversation(open_chat: Any) -> None:
    page = open_chat()
    error = page.locator("#error")
    send_message(page, "!", max_tokens=3)
    assert "the chat template rejects this conversation: no bangs" in error.inner_text()
    assert (read_conversation(page), page.input_value("#question")) == ([], "!")
    send_message(page, "the cat", system="!")
    assert "no bangs" in error.inner_text()
    send_message(page, "the cat " * 1000, system="")
    assert error.inner_text().startswith("The conversation has 2,006 tokens, but the model reads at most 1,024.")
    assert page.input_value("#question") == "the cat " * 1000
    send_message(page, "the cat")
    assert error.is_hidden()
    turns = read_conversation(page)
    mock_answer(page, make_entry(b" sat"), end='data: {"error": {"message": "out of <b>memory</b>"}}\n\n')
    send_message(page, "and?")
    assert error.inner_text() == "out of <b>memory</b>"
    assert read_conversation(page) == [*turns, ("You", "and?"), ("Model", " sat")]
    page.unroute("**/v1/**completions")
    page.evaluate("sessionStorage.setItem('gpt-key', 'old')")
    send_message(page, "and the key?")
    assert page.locator("#key").is_visible()
    page.fill("#secret", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#key", state="hidden")
    assert page.input_value("#question") == "and the key?"
    page.fill("#temperature", "")
    send_message(page, "and the cat?")
    assert page.evaluate("document.activeElement.id") == "temperature"  # The browser focuses the invalid field.
    assert page.input_value("#question") == "and the cat?"


def test_answers_are_never_markup_and_are_sent_back_unchanged(open_chat: Any) -> None:
    page = open_chat()
    markup = "<img src=x onerror='window.taken = 1'><script>window.taken = 2</script>"
    mock_answer(
        page,
        make_entry(markup.encode(), top=[make_entry(markup.encode(), 301)]),
        make_entry(b"\r\n\xc3", 302),
        make_entry(b"\xa9", 303),
    )
    send_message(page, markup)
    assert read_conversation(page) == [("You", markup), ("Model", markup + "\n\u00e9")]
    page.locator(".token").first.click()
    assert read_alternatives(page)[0][0] == markup.replace(" ", "·")
    page.unroute("**/v1/**completions")
    end = {"choices": [{"delta": {"content": ""}, "logprobs": {"content": [make_entry(b"")]}, "finish_reason": "stop"}]}
    mock_answer(page, end=f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n")
    conversations = record_messages(page)
    send_message(page, "more")
    assert conversations[0][1]["content"].startswith(markup + "\r\n")
    assert read_conversation(page)[-1] == ("Model", "")  # An empty answer is still a message.
    assert page.inner_text("#status") == "The model ended its answer (probability 60.65 %)."


@pytest.mark.parametrize(
    "opening", [[b"<think>"], [b"<", b"think", b">"], []], ids=["one token", "three tokens", "in the prompt"]
)
def test_reasoning_is_folded(open_chat: Any, opening: list[bytes]) -> None:
    page = open_chat()
    mock_answer(page, *map(make_entry, [*opening, b"\nSo it is ", b"5 > 4", b"</", b"think>", b"\n\nYes", b" > no"]))
    send_message(page, "Is it?")
    shown = "[...document.querySelectorAll('.turn')].at(-1).innerText.trim()"
    assert page.evaluate(shown).split() == ["Reasoning", "Yes", ">", "no"]
    page.click(".turn summary")
    assert page.evaluate(shown).startswith("Reasoning\n" + b"".join(opening).decode() + "\nSo it is 5 > 4</think>")
    page.click("#undo")
    assert page.locator(".turn").count() == 0


def test_only_plain_enter_sends_a_message(open_chat: Any) -> None:
    page = open_chat()
    conversations = record_messages(page)
    mock_answer(page, make_entry(b"!"))
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    for name in ("isComposing", "keyCode"):  # Enter confirms the text of an input method.
        page.evaluate(
            "(name) => question.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', bubbles: true,"
            " [name]: name === 'keyCode' ? 229 : true }))",
            name,
        )
    assert (conversations, page.input_value("#question")) == ([], "one\ntwo")
    page.keyboard.press("Enter")
    wait_until(page, ANSWERED)
    assert conversations[0] == messages("one\ntwo")
    for blank in ("", " \n"):
        send_message(page, blank)
    assert len(conversations) == 1


def test_chat_and_plain_modes_keep_separate_texts(open_chat: Any, open_page: Any, chat_address: str) -> None:
    page = open_chat()
    send_message(page, "the cat", max_tokens=4, seed=1)
    turns = read_conversation(page)
    page.click("#plain")
    assert page.evaluate("document.activeElement.id") == "text"
    assert page.locator(".in-chat:visible").count() == 0
    wait_until(page, "/^The text has/.test(document.getElementById('length').textContent)")
    text = write_text(page, "the dog")
    expected = request_completion(chat_address, prompt="the dog", seed=1, max_tokens=4)["text"]
    assert text == re.sub("\r\n?", "\n", "the dog" + expected)
    tokens = read_marks(page)
    page.click("#chat")
    assert page.locator(".in-plain:visible").count() == 0
    assert read_conversation(page) == turns
    send_message(page, "and?")
    assert read_conversation(page)[:2] == turns
    page.click("#plain")
    assert (page.input_value("#text"), read_marks(page)) == (text, tokens)
    page.keyboard.press("Control+z")
    assert page.input_value("#text") == "the dog"
    plain_page = open_page()  # A model without a chat template
    assert plain_page.locator(".in-chat:visible, #modes:visible").count() == 0


def test_conversation_fits_a_phone(open_chat: Any) -> None:
    page = open_chat(width=390, color_scheme="dark", has_touch=True)
    send_message(page, "a" * 300 + " the cat", max_tokens=60, temperature=1.5, seed=1)
    page.locator(".token").nth(20).tap()
    page.wait_for_selector("#close")
    box = page.locator("#likely").bounding_box()
    assert (box["y"] + box["height"], box["height"] < 400) == (800, True)  # A sheet at the bottom
    assert page.locator(".token").nth(20).bounding_box()["y"] < box["y"]
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 390
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("paper.scrollWidth <= paper.clientWidth")
    texts = [".turn.user", ".token", "#question", "#system", "#chat", "#list button"]
    colors = "(name) => [getComputedStyle(document.querySelector(name)).color, getComputedStyle(document.body).color]"
    for name in texts:  # Browser defaults ignore the color scheme.
        color, body = page.evaluate(colors, name)
        assert color == body, name
    assert page.evaluate(NAMELESS) == 0


LOOKED = "!looking && !lookTimer && look !== null"


def open_panel(page: Any) -> None:
    page.click("#inside > summary")
    wait_until(page, LOOKED)


def read_texts(page: Any, selector: str) -> list[str]:
    return [str(text) for text in page.locator(selector).all_inner_texts()]


def test_panel_shows_what_the_api_returns(open_page: Any, address: str) -> None:
    page = open_page()
    assert page.get_attribute("#inside", "open") is None  # A server's time is shared.
    page.fill("#text", "the cat sat")
    page.fill("#temperature", "1")
    open_panel(page)
    ids = post(address, "tokenize", prompt="the cat sat")["tokens"]
    inspection = post(address, "inspect", ids=ids)
    assert page.evaluate("look.tokens.map((token) => token.id)") == ids
    assert "".join(read_texts(page, "#strip span")) == "the·cat·sat"
    assert page.locator("#heads .cell").count() == inspection["layers"] * inspection["heads"] == 4
    assert page.locator("[role=switch], .if-switches").count() == 0
    words = read_texts(page, "#lens .share")
    assert words == [format_percent(math.log(row[0]["probability"])) for row in inspection["lens"]]
    shares = read_texts(page, "#next .share")
    assert shares[:10] == [format_percent(token["logprob"]) for token in inspection["next"][:10]]
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.fill("#top_k", "2")
    first, second = (math.exp(token["logprob"]) for token in inspection["next"][:2])
    assert read_texts(page, "#next .share")[:3] == [
        format_percent(math.log(first / (first + second))), format_percent(math.log(second / (first + second))),
        "excluded",
    ]  # fmt: skip
    page.fill("#temperature", "0")
    assert read_texts(page, "#next .share") == ["100.00 %", *["excluded"] * 10]
    for name, value, problem in (
        ("temperature", "-1", "Temperature must be 0 or more."),
        ("top_k", "2.5", "Top-k must be a whole number."),
        ("top_p", "1.7", "Top-p must be 1 or less."),
        ("top_p", "", "Top-p must be a number."),
    ):
        valid = page.input_value(f"#{name}")
        page.fill(f"#{name}", value)
        assert (page.inner_text("#wrong"), page.get_attribute(f"#{name}", "aria-invalid")) == (problem, "true")
        assert page.locator("#next").is_hidden()
        page.fill(f"#{name}", valid or "1")
    assert page.locator("#next").is_visible()
    assert requests == []
    write_text(page, max_tokens=5, temperature=0.8)
    wait_until(page, f"{LOOKED} && look.tokens.length === {len(ids) + 5}")
    assert page.evaluate("look.tokens.at(-1).id") == read_marks(page)[-1]["id"]


def test_panel_shows_probabilities_as_settings_change_them(open_page: Any, address: str) -> None:
    """Compares all listed tokens with the distribution computed from all logits."""
    page = open_page()
    ids = post(address, "tokenize", prompt="the cat")["tokens"]
    logprobs = [token["logprob"] for token in post(address, "inspect", ids=ids)["next"]]
    for temperature, top_k, top_p in ((1, 0, 1), (0.5, 0, 1), (1, 3, 1), (1, 0, 0.3), (0.7, 20, 0.5), (1, 0, 0)):
        for name, value in {"temperature": temperature, "top_k": top_k, "top_p": top_p}.items():
            page.fill(f"#{name}", str(value))
        weights = [math.exp(logprob / temperature) for logprob in logprobs[: top_k or None]]
        total = sum(weights) if top_k else sum(weights) / sum(map(math.exp, logprobs)) if temperature == 1 else None
        shown = page.evaluate("(logprobs) => applySettings(logprobs)", logprobs)
        assert sum(shown["shares"]) + shown["others"] == pytest.approx(1)
        if total is None:
            continue
        kept, reached = [], 0.0
        for weight in weights:
            if kept and reached >= top_p * total:
                break
            kept.append(weight)
            reached += weight
        total = sum(kept) if top_p < 1 else total
        expected = [weight / total for weight in kept]
        assert shown["shares"][: len(kept)] == pytest.approx(expected, rel=1e-4)
        assert not any(shown["shares"][len(kept) :])


def test_panel_works_with_the_keyboard(open_page: Any) -> None:
    page = open_page()
    page.fill("#text", "the cat sat")
    page.focus("#inside > summary")
    page.keyboard.press("Enter")
    wait_until(page, LOOKED)
    assert page.inner_text("#sees").startswith("All heads on average attend most to “")
    for keys, head in (("Tab Tab", "0, head 0"), ("ArrowRight", "0, head 1"), ("ArrowDown", "1, head 1")):
        for key in keys.split():
            page.keyboard.press(key)
        assert page.inner_text("#sees").startswith(f"Layer {head} attends most to “")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(f"Layer {head}: “")
    assert page.locator("#sight path").count() > 0
    page.keyboard.press("Tab")
    assert page.inner_text("#sees").startswith("All heads")
    assert page.inner_text("#five").startswith("Before layer 0: “")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#five").startswith("After layer 0: “")
    assert page.evaluate(NAMELESS) == 0


def test_switched_off_heads_are_sent_with_every_request(open_page: Any) -> None:
    """Changes the page so that its engine can switch heads off, and records the engine's requests."""
    changes = {"can_switch: false": "can_switch: true", "const inside =": """
        const offs = [], { complete, inspect: look_ } = engine;
        engine.inspect = (ids, options) => { offs.push(options.off); return look_(ids, options); };
        engine.complete = (request, signal) => { offs.push(request.off); return complete(request, signal); };
        const inside ="""}  # fmt: skip
    page = open_page(changes=changes)
    assert page.get_attribute("#inside", "open") == ""  # The model runs in this page, so the panel is open.
    wait_until(page, LOOKED)
    assert page.evaluate("offs") == [{"heads": [], "layers": []}]
    for at in (1, 2):
        page.locator("#heads .cell").nth(at).click()
    page.locator("#heads [role=switch]", has_text="layer 1").press("Enter")
    wait_until(page, LOOKED)
    expected = {"heads": [[0, 1], [1, 0]], "layers": [1]}
    assert page.evaluate("offs.at(-1)") == expected
    assert page.inner_text("#off span") == (
        "Layer 1 is switched off. 1 of 4 heads is switched off, and the predictions below are made without it."
    )
    assert page.locator("[aria-checked=false]").count() == 4
    page.locator("#heads .cell").nth(3).click()  # The whole layer is off.
    assert page.evaluate("[...off.heads]") == [1, 2]
    assert page.inner_text("#sees") == "Layer 1, head 1 is switched off."
    page.hover("h1")
    page.evaluate("document.activeElement.blur()")
    average = page.evaluate("[attentionOf(-1), attentionOf(0)].map((shares) => [...shares])")
    assert average[0] == average[1]  # The other heads are off.
    page.locator("#heads .cell").nth(0).click()
    page.hover("h1")
    page.evaluate("document.activeElement.blur()")
    assert page.inner_text("#sees") == "All heads are switched off."
    assert page.locator("#sight path").count() == 0
    page.locator("#heads .cell").nth(0).click()
    write_text(page, "the cat", max_tokens=2)
    assert page.evaluate("offs").count(expected) >= 2
    page.locator("#heads [role=switch]", has_text="layer 0").click()
    assert page.inner_text("#off span") == "Layers 0–1 are switched off."
    page.click("#off button")
    assert page.evaluate("heads.contains(document.activeElement)")
    wait_until(page, LOOKED)
    assert page.evaluate("offs.at(-1)") == {"heads": [], "layers": []}
    assert page.locator("#off").is_hidden()
    assert page.locator("[aria-checked=false]").count() == 0


def test_first_tap_on_a_head_shows_it(open_page: Any) -> None:
    page = open_page(changes={"can_switch: false": "can_switch: true"}, width=390, is_mobile=True, has_touch=True)
    open_panel(page)
    assert page.locator("#keys:visible").count() == 0
    assert page.locator(".touch:visible").count() == 1
    cell = page.locator("#heads .cell").nth(2)
    cell.tap()
    assert page.inner_text("#sees").startswith("Layer 1, head 0 attends most to ")
    cell.tap()
    assert page.inner_text("#sees") == "Layer 1, head 0 is switched off."
    sizes = page.evaluate("[...document.querySelectorAll('button, summary, input')].map((x) => x.offsetHeight)")
    assert min(size for size in sizes if size) >= 32


def test_examples_start_a_text_and_a_conversation(open_page: Any, open_chat: Any) -> None:
    markup = "<b>the</b> dog"
    changes = {"prompts: []": f'prompts: ["the cat", "{markup}", "", "four"]', "about: [": 'about: ["<i>A model</i>", '}
    page = open_page(changes=changes)
    assert read_texts(page, "#prompts button") == ["the cat", markup, ""]
    page.click("#about summary")
    assert page.locator("#about p").first.inner_text() == "<i>A model</i>"
    page.fill("#max_tokens", "4")
    page.locator("#prompts button").nth(1).click()
    wait_until(page, DONE)
    assert page.input_value("#text").startswith(markup)
    assert page.locator("#prompts").is_hidden()
    page.fill("#text", "")
    assert page.locator("#prompts").is_visible()
    chat_page = open_chat(changes=changes)
    chat_page.fill("#max_tokens", "4")
    chat_page.locator("#prompts button").first.click()
    wait_until(chat_page, ANSWERED)
    assert read_conversation(chat_page)[0] == ("You", "the cat")
    open_panel(chat_page)
    assert "".join(read_texts(chat_page, "#strip span")).startswith("u:the·cat\\na:")


def test_panel_fits_a_phone(open_page: Any) -> None:
    page = open_page(width=360, color_scheme="dark")
    write_text(page, "a" * 100 + " the cat", max_tokens=30, temperature=1.5)
    open_panel(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("sight.scrollWidth <= sight.clientWidth")
    texts = page.evaluate(
        "[...strip.children].map((x) => [getComputedStyle(x).backgroundColor, getComputedStyle(x).color])"
    )
    assert len(texts) == 32


def test_scripts_continue_a_prompt_like_the_api(open_page: Any, address: str) -> None:
    page = open_page()
    result = page.evaluate("gpt.generate('the cat', { seed: 5, max_tokens: 12 })")
    expected = request_completion(address, prompt="the cat", seed=5, max_tokens=12)
    assert result["text"] == expected["text"]
    assert result["ids"] == [token["id"] for token in expected["logprobs"]["content"]][: len(result["ids"])]
    greedy = page.evaluate("gpt.generate('the cat', { temperature: 0, max_tokens: 12 })")
    assert greedy["text"] == request_completion(address, prompt="the cat", temperature=0, max_tokens=12)["text"]


def test_panel_shows_where_a_token_comes_from(open_page: Callable[..., Any], run_folder: Path) -> None:
    with serve_model(run_folder, with_text=True) as tracing:
        page = open_page(address=tracing)
        text = make_text()[2000:2200]
        write_text(page, text, max_tokens=20, temperature=0)
        page.focus("#text")
        page.keyboard.press("Alt+ArrowDown")
        page.click("#trace")
        page.wait_for_selector("#origins li")
        marks, prompt = read_marks(page), post(tracing, "tokenize", prompt=text)["tokens"]
        ids = [*prompt, *(token["id"] for token in marks)]
        found = post(tracing, "trace", ids=ids, at=len(ids) - 1, first=len(prompt))
        assert page.locator("#origins mark").all_text_contents() == [each["text"] for each in found["passages"]]
        place = f"document 1, line {found['passages'][0]['line']:,}"
        assert page.locator("#origins li span").first.text_content() == place
        assert f"has {found['length']} token" in page.text_content("#origins")
        page.evaluate(WATCH_TRACE)
        page.click("#before")
        page.evaluate("traced")
        found = post(tracing, "trace", ids=ids, at=len(ids) - 2, first=len(prompt))
        assert page.locator("#origins mark").all_text_contents() == [each["text"] for each in found["passages"]]
        assert page.evaluate(NAMELESS) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_passages_fit_a_phone_and_can_be_read(open_page: Callable[..., Any], scheme: str) -> None:
    """A server without training text has no button. Markup in passages stays text."""
    page = open_page(width=360, color_scheme=scheme)
    write_text(page, "the cat", max_tokens=12)
    page.focus("#text")
    page.keyboard.press("Alt+ArrowDown")
    assert page.locator("#trace").is_hidden()
    page.evaluate(
        """() => {
            const passage = { length: 2, before: "<b>a</b> ".repeat(6), text: "<img src=x onerror='window.taken = 1'>\\nb" };
            const passages = Array.from({ length: 5 }, () => ({ ...passage, after: "c".repeat(60), document: 1234, line: 56789 }));
            const rest = { share: 0.25, span: 8, compared: 10, trained: 20 };
            engine.trace = async (ids, at) => ({ start: at, length: 9, count: 1200, passages, ...rest });
            $("trace").hidden = false;
        }"""
    )
    page.click("#trace")
    page.wait_for_selector("#origins li")
    shown = page.inner_text("#origins")
    for part in (
        "has 9 tokens. It is in 1,200 places.",
        "first 10 tokens",
        "<img src=x",
        "line 56,789: 2 tokens",
        "25.00 %",
    ):
        assert part in shown, part
    box = page.locator("#likely").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["y"] + box["height"] <= 800
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    style = "(node) => [getComputedStyle(node).color, getComputedStyle(node).backgroundColor]"
    panel = page.locator("#likely").evaluate(style)[1]
    colour, background = page.locator("#origins mark").first.evaluate(style)
    soft = page.locator("#origins li .soft").first.evaluate(style)[0]
    assert min(contrast(colour, background), contrast(soft, panel)) >= 4.5
