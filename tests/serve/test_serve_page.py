"""The page of ``gpt serve`` in a real browser: it writes and answers what the API does, shows its numbers, and obeys
nobody else."""

import base64
import contextlib
import functools
import hashlib
import json
import math
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from colours import contrast, luminance
from conftest import FAST, make_text, more, spawn

KEY = "the key"
NAME = "<img src=x onerror='window.taken = 1'>"
# It refuses messages that begin with a bang, and otherwise lets any conversation be.
TEMPLATE = """{% for m in messages %}{% if m.content[:1] == "!" %}{{ raise_exception("no bangs") }}{% endif %}
{{- m.role[0] }}:{{ m.content }}
{% endfor %}a:"""
ANSWERED = "job === null && document.getElementById('go').textContent === 'Send'"
NAMELESS = (  # how many fields and buttons a screen reader has no words for
    "[...document.querySelectorAll('input, textarea, button')]"
    ".filter((x) => !(x.labels?.length || x.getAttribute('aria-label') || x.textContent.trim())).length"
)
DONE = "job === null && document.getElementById('go').textContent === 'Write on'"


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
        inside = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(inside) == 1
        assert f"/* page.{tag}" not in inside[0]
        digest = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"


@pytest.fixture(scope="module")
def address(run_folder: Path) -> Iterator[str]:
    """A server of a tiny model, which has a key, and a name that would be markup."""
    with serving(run_folder) as found:
        yield found


@pytest.fixture(scope="module")
def chat_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a tiny model that has a chat template, and room for a conversation."""
    import gpt

    folder = tmp_path_factory.mktemp("chat")
    (folder / "text.txt").write_bytes(make_text().encode())
    settings = FAST | {"block_size": 1024, "batch_tokens": 1024}
    run = gpt.train(folder / "text.txt", out=str(folder / "run"), steps=1, **settings).run
    (checkpoint,) = run.glob("step-*")
    ours = shutil.ignore_patterns("gpt.json", "checksums.json", "*.tiktoken", "training.*")
    shutil.copytree(checkpoint, folder / "model", ignore=ours)  # a Transformers folder
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    with serving(folder / "model") as found:
        yield found


@contextlib.contextmanager
def serving(model: Path) -> Iterator[str]:
    """Serves a model while it is entered, and gives its address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT_SERVE_API_KEY", KEY)
        patch.setenv("GPT_THREADS", "1")
        process = spawn("serve", "-m", model, "--port", "0", "--compile", "off", "--name", NAME)
    try:
        said = ""
        while not (found := re.search(r"at (http://\S+)", said)):
            line = process.stderr.readline()  # type: ignore
            assert line, said
            said += line
        yield found[1]
    finally:
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def ask(address: str, path: str, **values: Any) -> Any:
    """An answer of the API."""
    request = urllib.request.Request(
        f"{address}/{path}", json.dumps(values).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )  # fmt: skip
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def completion(address: str, **values: Any) -> dict[str, Any]:
    values = {"temperature": 0.8, "logprobs": 10, "token_details": True, **values}
    choice: dict[str, Any] = ask(address, "v1/completions", **values)["choices"][0]
    return choice


@pytest.fixture
def open_page(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Opens the page, with the key; fails the test where it asked anybody else, complained, or made markup of text."""
    said: list[str] = []
    asked: list[str] = []
    pages = []
    addresses = [address, "data:,"]

    def opened(key: str | None = KEY, width: int = 1100, address: str = address, **settings: Any) -> Any:
        addresses.append(address)
        page = browser.new_page(viewport={"width": width, "height": 800}, **settings)
        page.set_default_timeout(30_000)
        pages.append(page)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        if key is not None:
            page.add_init_script(f"sessionStorage.setItem('gpt-key', {json.dumps(key)})")
        page.goto(address)
        page.wait_for_selector("body[data-ready]")
        return page

    yield opened
    for page in pages:
        assert page.evaluate("[document.images.length, document.scripts.length, window.taken]") == [0, 1, None]
        page.close()
    assert [each for each in said if not each.startswith("Failed to load resource")] == []
    assert all(url.startswith(tuple(addresses)) for url in asked)


def until(page: Any, condition: str) -> None:
    """Waits until a condition holds. (Playwright's own way evaluates it in the page, whose policy forbids that.)"""
    for _ in range(1500):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    pytest.fail(condition)


@pytest.fixture
def open_chat(open_page: Callable[..., Any], chat_address: str) -> Callable[..., Any]:
    """Opens the page of the model that has a chat template."""
    return functools.partial(open_page, address=chat_address)


def write(page: Any, text: str | None = None, wait: bool = True, **settings: Any) -> str:
    """Types a text and settings, writes on, and returns what stands in the field then."""
    for name, value in settings.items():
        page.fill(f"#{name}", str(value))
    if text is not None:
        page.fill("#text", text)
    page.focus("#text")
    page.keyboard.press("Control+Enter")
    if wait:
        until(page, DONE)
    return str(page.input_value("#text"))


def send(page: Any, content: str, wait: bool = True, **settings: Any) -> None:
    """Types settings and a message, and sends it."""
    for name, value in settings.items():
        page.fill(f"#{name}", str(value))
    page.fill("#question", content)
    page.focus("#question")
    page.keyboard.press("Enter")
    if wait:
        until(page, ANSWERED)


def conversation(page: Any) -> list[tuple[str, str]]:
    """The messages that are shown, each with whose it is."""
    found = page.evaluate("[...document.querySelectorAll('.turn')].map((turn) => [turn.dataset.who, turn.textContent])")
    return [(who, text) for who, text in found]


def messages(*contents: str, system: str = "") -> list[dict[str, str]]:
    """Messages of a user and an assistant in turns."""
    turns = [{"role": ("user", "assistant")[at % 2], "content": each} for at, each in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def sent(page: Any) -> list[dict[str, Any]]:
    """The requests for texts from now on, which grow as they are made."""
    found: list[dict[str, Any]] = []
    page.on("request", lambda each: found.append(each.post_data_json) if "completions" in each.url else None)
    return found


def marks(page: Any) -> list[dict[str, Any]]:
    """The generated tokens that are marked, with the class of their shade."""
    found: list[dict[str, Any]] = page.evaluate(
        "marks.filter((m) => m.shows.run).map((m) => ({ text: m.textContent, id: m.shows.id, kind: m.className,"
        " logprob: m.shows.logprob }))"
    )
    return found


def likely(page: Any) -> list[tuple[str, str]]:
    """The alternatives that are shown, with their probabilities."""
    return [tuple(each.inner_text().split("\n")) for each in page.locator("#list button").all()]


def percent(logprob: float) -> str:
    share = 100 * math.exp(logprob)
    return "< 0.01 %" if share < 0.005 else f"{share:.2f} %"


def entry(data: bytes, id: int = 300, logprob: float = -0.5, top: list[Any] | None = None) -> dict[str, Any]:
    each = {"id": id, "token": "?", "bytes": list(data), "logprob": logprob}
    return {**each, "top_logprobs": [each] if top is None else top}


def answered(page: Any, *entries: dict[str, Any], end: str = "data: [DONE]\n\n") -> None:
    """Has a stream of such tokens be the answer of the next requests."""
    choices = [
        {"delta": {"content": bytes(each["bytes"]).decode("utf-8", "replace")}, "logprobs": {"content": [each]}}
        for each in entries
    ]
    body = "".join(f"data: {json.dumps({'choices': [each]})}\n\n" for each in choices) + end
    page.route("**/v1/**completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def test_text_and_numbers_are_those_of_the_api(open_page: Any, address: str) -> None:
    page = open_page()
    for prompt, seed in (("the cat", 3), ("Zürich; 🐕", 4), ("", 5)):  # an empty one begins with end-of-text
        settings = {"seed": seed, "max_tokens": 40, "temperature": 1.1, "top_k": 50, "top_p": 0.9}
        text = write(page, prompt, **settings)
        expected = completion(address, prompt=prompt, **settings)
        assert text == re.sub("\r\n?", "\n", prompt + expected["text"])
        tokens = expected["logprobs"]["content"][: len(marks(page))]
        assert len(tokens) >= len(expected["logprobs"]["content"]) - 1
        assert [(each["id"], each["logprob"]) for each in tokens] == [(m["id"], m["logprob"]) for m in marks(page)]
        for at, token in list(enumerate(tokens))[::7]:
            page.evaluate("(at) => open(parts.findIndex((part) => part.run) + at)", at)
            rows = token["top_logprobs"] + ([] if token["id"] in [x["id"] for x in token["top_logprobs"]] else [token])
            assert [share for _, share in likely(page)] == [percent(row["logprob"]) for row in rows]
            assert page.locator("#list [aria-current]").count() == 1
            level = sum(math.exp(token["logprob"]) < bound for bound in (0.9, 0.5, 0.2, 0.05, 0.01))
            assert f"s{level}" in marks(page)[at]["kind"]
    assert re.match(r"40 tokens, \d+\.\d per second\.|\d+ tokens?", page.inner_text("#rate"))
    assert page.locator("h1").inner_text() == NAME
    assert page.locator("#facts").inner_text() == "sees 32 tokens at once"


def test_undo_and_redo(open_page: Any) -> None:
    page = open_page()
    texts = ["the cat", write(page, "the cat", max_tokens=5), write(page), write(page)]
    assert len(set(texts)) == 4
    shades = marks(page)
    page.keyboard.press("Control+z")
    assert page.input_value("#text") == texts[2]
    page.click("#undo")
    page.keyboard.press("Control+z")
    assert page.input_value("#text") == texts[0]
    assert page.get_attribute("#undo", "aria-disabled") == "true"
    for text in texts[1:]:
        page.keyboard.press("Control+Shift+Z")
        assert page.input_value("#text") == text
    assert marks(page) == shades
    page.focus("#text")
    page.keyboard.type(" dog")
    page.click("#undo")
    assert page.input_value("#text") == texts[2]
    page.click("#redo")
    assert page.input_value("#text") == texts[3] + " dog"


def test_an_alternative_by_keys_alone(open_page: Any, address: str) -> None:
    page = open_page()
    text = write(page, "the cat", seed=7, max_tokens=10)
    tokens = marks(page)
    page.keyboard.press("Alt+ArrowDown")  # at the end: the last token
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    at = len(tokens) - 3
    assert page.evaluate("marks[seen].shows.id") == tokens[at]["id"]
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "3px"
    while page.evaluate("document.activeElement.parentNode.previousSibling"):
        page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowDown")
    chosen = page.evaluate("parts[seen].top[1]")
    before = ask(address, "tokenize", prompt="the cat")["tokens"] + [each["id"] for each in tokens[:at]]
    page.keyboard.press("Enter")
    until(page, DONE)
    assert page.evaluate("document.activeElement.id") == "text"
    after = completion(address, prompt=[*before, chosen["id"]], seed=7, max_tokens=10)
    ids = [each["id"] for each in after["logprobs"]["content"]]
    now = marks(page)
    assert [each["id"] for each in now[:at]] == [each["id"] for each in tokens[:at]]
    assert (now[at]["id"], now[at]["logprob"]) == (chosen["id"], chosen["logprob"])
    assert [each["id"] for each in now[at + 1 :]] == ids[: len(now) - at - 1]
    assert len(now) >= at + 1 + len(ids) - 1
    page.keyboard.press("Control+z")
    assert page.input_value("#text") == text
    page.keyboard.press("Alt+ArrowDown")
    page.keyboard.press("Escape")
    assert page.evaluate("[document.activeElement.id, likely.hidden]") == ["text", True]


def test_pointing_and_clicking(open_page: Any) -> None:
    page = open_page()
    write(page, "the cat", seed=8, max_tokens=30)
    box = page.locator("#shade .token").nth(3).bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#likely", state="visible")
    until(page, "marks.filter((m) => m.shows.run).indexOf(marks[seen]) === 3")
    word = page.evaluate("parts[seen].top[2]")
    page.locator("#list button").nth(2).click()
    until(page, DONE)
    assert marks(page)[3]["id"] == word["id"]
    page.mouse.move(5, 5)
    box = page.locator("#shade .token").nth(2).bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)  # also sets the cursor
    until(page, "marks.filter((m) => m.shows.run).indexOf(marks[seen]) === 2")
    page.mouse.click(5, 5)
    assert page.locator("#likely").is_hidden()


def test_stop(open_page: Any) -> None:
    page = open_page()
    write(page, "the cat", wait=False, max_tokens=4000)
    until(page, "marks.length > 20")
    assert page.locator("#text").get_attribute("readonly") is not None
    page.keyboard.press("Escape")
    until(page, DONE)
    assert 20 <= len(marks(page)) < 4000  # one of the marks is the prompt
    assert page.inner_text("#status") == "Stopped."
    page.keyboard.type(" and on")
    assert page.input_value("#text").endswith(" and on")
    write(page, "the cat", wait=False, max_tokens=4000)
    until(page, "marks.length > 5")
    page.click("#go")
    until(page, DONE)


def test_an_edit_takes_probabilities_away_from_there_on(open_page: Any, address: str) -> None:
    page = open_page()
    text = write(page, "the cat", seed=9, max_tokens=20)
    before = marks(page)
    edge = len("the cat") + sum(len(each["text"]) for each in before[:6])
    page.evaluate("(at) => field.setSelectionRange(at, at)", edge)
    page.keyboard.type("<b>")
    assert page.input_value("#text") == text[:edge] + "<b>" + text[edge:]
    assert marks(page) == before[:6]
    assert page.locator("#likely").is_hidden()
    for _ in range(3):
        page.keyboard.press("Backspace")
    assert marks(page) == before
    page.keyboard.press("Backspace")
    assert len(marks(page)) < 6
    edited = page.input_value("#text")
    ids = ask(address, "tokenize", prompt=edited)["tokens"]
    after = completion(address, prompt=ids[-32:], seed=9, max_tokens=5)
    assert write(page, max_tokens=5) == edited + after["text"]
    assert page.evaluate("shade.textContent") == page.input_value("#text")


def test_text_is_never_markup(open_page: Any) -> None:
    page = open_page()
    bad = "<img src=x onerror='window.taken = 1'><script>window.taken = 2</script>"
    other = entry(f"</button>{bad}".encode(), 301)
    answered(page, entry(bad.encode(), top=[other]), entry(b"\x1b[31m\xe2\x80\xae", 302))
    assert write(page, bad) == bad + bad + "\x1b[31m\u202e"
    page.evaluate("open(parts.findIndex((part) => part.run))")
    assert likely(page)[0][0] == f"</button>{bad}".replace(" ", "·")
    page.evaluate("open(parts.length - 1)")
    assert likely(page)[0][0] == "\\u{1b}[31m\\u{202e}"
    assert page.evaluate("shade.textContent") == page.input_value("#text")


def test_bytes_that_are_no_characters(open_page: Any) -> None:
    page = open_page()
    dog = "🐕".encode()
    tokens = (b"\xef\xbb\xbfa", dog[:1], dog[1:3], dog[3:] + b"\r", b"\nb", b"\xff", b"c\xc3")
    answered(page, *(entry(data, id) for id, data in enumerate(tokens, 300)))
    assert write(page, "x") == "x\ufeffa🐕\nb\ufffdc\ufffd"
    assert [each["text"] for each in marks(page)] == ["\ufeffa", "", "", "🐕\n", "b", "", "\ufffdc\ufffd"]
    page.evaluate("open(2)")
    assert likely(page)[0][0] == "\\xf0"
    page.click("#after")
    assert likely(page)[0][0] == "\\x9f\\x90"
    page.unroute("**/v1/**completions")
    answered(page, entry(b"\xa9!", 310))
    assert write(page) == "x\ufeffa🐕\nb\ufffdcé!"  # goes on in the middle of a character
    asked = sent(page)
    page.evaluate("pick(3, { id: 77, bytes: [0x9f, 0x90, 0x88], logprob: -1 })")
    until(page, DONE)
    assert page.input_value("#text").startswith("x\ufeffa🐈")
    assert asked[0]["prompt"][-3:] == [300, 301, 77]


def test_errors_are_one_line_and_the_text_stays(open_page: Any) -> None:
    page = open_page()
    error = page.locator("#error")
    refusal = {"error": {"message": "temperature is 200; it must be a number from 0 to 100", "param": "temperature"}}
    page.route("**/v1/**completions", lambda route: route.fulfill(status=400, json=refusal))
    assert write(page, "the cat") == "the cat"
    assert error.inner_text() == refusal["error"]["message"]
    page.unroute("**/v1/**completions")
    assert page.get_attribute("#undo", "aria-disabled") == "true"
    answered(page, entry(b" sat"), end="")
    assert write(page, max_tokens=5) == "the cat sat"
    assert error.inner_text() == "The connection was lost. The text so far stays."
    page.unroute("**/v1/**completions")
    answered(page, entry(b" on"), end='data: {"error": {"message": "out of <b>memory</b>"}}\n\n')
    assert write(page) == "the cat sat on"
    assert error.inner_text() == "out of <b>memory</b>"
    page.unroute("**/v1/**completions")
    page.route("**/v1/**completions", lambda route: route.fulfill(status=502, body="<h1>no</h1>"))
    write(page)
    assert error.inner_text().startswith("The server answered 502")
    page.unroute("**/v1/**completions")
    page.route("**/v1/**completions", lambda route: route.abort())
    assert write(page) == "the cat sat on"
    assert error.inner_text() == "The server cannot be reached. Is it still running?"
    page.unroute("**/v1/**completions")
    write(page)
    assert error.is_hidden()


def test_the_key_is_asked_for_and_kept_in_the_tab(open_page: Any) -> None:
    page = open_page(key=None)
    assert page.locator("#key").is_visible()
    assert page.evaluate("document.activeElement.id") == "secret"
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('key-says').textContent.startsWith('That is not')")
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#key", state="hidden")
    assert len(write(page, "the cat", max_tokens=5)) > len("the cat")
    assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert page.locator("#key").is_hidden()


def test_a_text_longer_than_the_context(open_page: Any) -> None:
    page = open_page()
    page.fill("#text", "cat " * 10)
    until(page, "/^The text has \\d+ tokens/.test(document.getElementById('length').textContent)")
    assert page.inner_text("#forgotten") == ""
    page.fill("#text", "cat " * 100)
    until(page, "document.getElementById('forgotten').textContent")
    assert "longer than the 32 tokens that the model sees" in page.inner_text("#forgotten")
    assert page.locator("#forgotten[role=status]").count() == 1
    assert len(write(page, max_tokens=5)) > 400


@pytest.mark.parametrize("scheme", ["light", more("dark")])
def test_a_phone_and_contrast(open_page: Any, scheme: str) -> None:
    page = open_page(width=360, color_scheme=scheme)
    write(page, "a" * 300 + " the cat", max_tokens=60, temperature=1.5)
    page.evaluate("open(parts.findLastIndex((part) => part.run && part.text.trim()))")
    page.click("summary")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("paper.scrollWidth <= paper.clientWidth")
    if page.locator("#likely").is_visible():
        box = page.locator("#likely").bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 360
    back, text = page.evaluate(
        "[document.body, field].map((x) => [getComputedStyle(x).backgroundColor, getComputedStyle(x).color])"
    )
    shades = page.evaluate(
        "[...document.querySelectorAll('.legend .token')].map((x) => getComputedStyle(x).backgroundColor)"
    )
    assert len(shades) == 6
    assert min(contrast(shade, text[1]) for shade in (back[0], *shades[1:])) >= 4.5
    steps = [luminance(shade) for shade in (back[0], *shades[1:])]
    assert steps == sorted(steps, reverse=scheme == "light")  # by lightness alone, for those who see few colours
    assert page.evaluate(NAMELESS) == 0


def test_sliders(open_page: Any) -> None:
    page = open_page()
    asked = sent(page)
    answered(page, entry(b"!"))
    write(page, "the cat")
    names = ("temperature", "top_k", "top_p", "max_tokens")
    assert [asked[-1][name] for name in names] == [0.8, 0, 1, 200]  # as `gpt sample`
    page.focus("#temperature + input")
    page.keyboard.press("ArrowRight")
    assert page.input_value("#temperature") == "0.85"
    page.fill("#temperature", "0.3")
    assert page.input_value("#temperature + input") == "0.3"
    write(page, top_p=0.5, top_k=7, max_tokens=9, seed=11)
    assert [asked[-1][name] for name in (*names, "seed")] == [0.3, 7, 0.5, 9, 11]


@pytest.mark.more
def test_much_text_stays_usable(open_page: Any) -> None:
    """100,000 characters pasted, and 4,000 tokens on top of them."""
    page = open_page()
    page.focus("#text")
    page.evaluate("(text) => { field.value = text; }", "The cat sat on the mat, 🐕.\n" * 3600)
    for key in "axv":
        page.keyboard.press(f"Control+{key}")
    assert len(page.input_value("#text")) > 90_000
    began = page.evaluate("performance.now()")
    for _ in range(10):
        page.keyboard.type("x")
    assert page.evaluate("performance.now()") - began < 5000
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
    assert write(page).endswith(" d d d")
    assert len(marks(page)) == 4000
    gaps = sorted(page.evaluate("gaps"))
    assert gaps[len(gaps) // 2] < 500  # milliseconds between frames


def test_a_conversation_is_that_of_the_api(open_chat: Any, chat_address: str) -> None:
    page = open_chat()
    assert page.get_attribute("#chat", "aria-pressed") == "true"
    assert page.evaluate("document.activeElement.id") == "question"
    settings = {"seed": 3, "max_tokens": 12, "temperature": 1.1, "top_k": 50, "top_p": 0.9}
    wanted = {"logprobs": True, "top_logprobs": 10, **settings}
    said: list[str] = []
    tokens: list[dict[str, Any]] = []
    for question in ("the cat <b>", "dogs\n\n 🐕?"):
        send(page, question, system="Be a cat.", **settings)
        said.append(question)
        expected = ask(chat_address, "v1/chat/completions", messages=messages(*said, system="Be a cat."), **wanted)
        (choice,) = expected["choices"]
        said.append(choice["message"]["content"])
        assert choice["finish_reason"] == "length"
        tokens += choice["logprobs"]["content"]
    shown = conversation(page)
    assert [who for who, _ in shown] == ["You", "Model"] * 2
    assert [text for _, text in shown] == [re.sub("\r\n?", "\n", each) for each in said]
    assert [(each["id"], each["logprob"]) for each in tokens] == [(m["id"], m["logprob"]) for m in marks(page)]
    assert page.inner_text("#length") == f"The conversation has {expected['usage']['total_tokens']} tokens."
    assert page.inner_text("#status") == "The length is reached."
    assert page.input_value("#question") == ""
    page.keyboard.press("Alt+ArrowDown")
    for token in reversed(tokens):  # by keys alone, from the last answer into the first one
        rows = token["top_logprobs"] + ([] if token["id"] in [x["id"] for x in token["top_logprobs"]] else [token])
        assert [share for _, share in likely(page)] == [percent(row["logprob"]) for row in rows]
        assert page.evaluate("[marks[seen].shows.id, likely.contains(document.activeElement)]") == [token["id"], True]
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("Escape")
    assert page.evaluate("[document.activeElement.id, likely.hidden, job]") == ["question", True, None]
    assert conversation(page) == shown
    page.locator(".token").nth(4).click()
    assert page.evaluate("marks[seen].shows.id") == tokens[4]["id"]
    page.locator(".turn").first.click()
    assert page.locator("#likely").is_hidden()


def chosen(page: Any, turn: int, token: int) -> dict[str, Any]:
    """The second alternative of a token of a turn, whose list it opens by a click on the token."""
    page.locator(".turn").nth(turn).locator(".token").nth(token).click()
    found: dict[str, Any] = page.evaluate("parts[seen].top.find((each) => each.id !== parts[seen].id)")
    return found


def take(page: Any, each: dict[str, Any]) -> None:
    """Clicks on an alternative that is shown."""
    at = page.evaluate("(id) => parts[seen].top.findIndex((x) => x.id === id)", each["id"])
    page.locator("#list button").nth(at).click()
    until(page, ANSWERED)


def text_of(tokens: list[dict[str, Any]]) -> str:
    """The text of tokens as the API has it."""
    return bytes(byte for each in tokens for byte in each["bytes"]).decode("utf-8", "replace")


def test_an_alternative_in_a_conversation(open_chat: Any, chat_address: str) -> None:
    page = open_chat()
    settings = {"seed": 3, "max_tokens": 12, "temperature": 1.1}
    wanted = {"logprobs": True, "top_logprobs": 10, **settings}
    for question in ("the cat 🐕", "dogs"):
        send(page, question, system="Be a cat.", **settings)
    first = messages("the cat 🐕", system="Be a cat.")
    answer = ask(chat_address, "v1/chat/completions", messages=first, **wanted)["choices"][0]
    second = messages("the cat 🐕", answer["message"]["content"], "dogs", system="Be a cat.")
    shown, lengths = conversation(page), [page.inner_text("#length")]
    page.fill("#system", "Be a dog.")  # does not change what was answered
    for turn, asked in ((3, second), (1, first)):  # in the last answer, and in the one before it
        tokens = ask(chat_address, "v1/chat/completions", messages=asked, **wanted)["choices"][0]["logprobs"]["content"]
        other = chosen(page, turn, 5)
        take(page, other)
        kept = [*tokens[:5], other]
        prompt = ask(chat_address, "tokenize", messages=asked)["tokens"] + [each["id"] for each in kept]
        assert prompt[: -len(kept)] == ask(chat_address, "tokenize", prompt=rendered(asked))["tokens"]
        after = ask(chat_address, "v1/completions", prompt=prompt, logprobs=10, token_details=True, **settings)
        kept += after["choices"][0]["logprobs"]["content"]
        now = conversation(page)
        assert now[:turn] == shown[:turn] and len(now) == turn + 1
        assert [each["id"] for each in kept] == [m["id"] for m in marks(page)][-len(kept) :]
        assert now[turn] == ("Model", re.sub("\r\n?", "\n", text_of(kept)))
        assert page.evaluate("document.activeElement.id") == "question"
        lengths.append(page.inner_text("#length"))
        assert lengths[-1] == f"The conversation has {after['usage']['total_tokens']} tokens."
    requests = sent(page)
    send(page, "and?")
    assert requests[0]["messages"] == messages("the cat 🐕", text_of(kept), "and?", system="Be a dog.")
    for _ in range(2):
        page.click("#undo")
    assert len(conversation(page)) == 4 and page.inner_text("#length") == lengths[1]
    page.click("#undo")
    assert (conversation(page), page.inner_text("#length")) == (shown, lengths[0])


def rendered(asked: list[dict[str, str]]) -> str:
    """A conversation as the template of the server's model renders it."""
    return "".join(f"{each['role'][0]}:{each['content']}\n" for each in asked) + "a:"


def test_alternatives_that_are_no_text(open_chat: Any, chat_address: str) -> None:
    """An end-of-text ends the answer, another special token is kept by its id, and neither is part of a message."""
    page = open_chat()
    end, special = page.evaluate("model.end"), 301
    page.evaluate("(id) => model.specials.push(id)", special)
    dog = "🐕".encode()
    top = [entry(b"<|endoftext|>", end), entry(b"<|tool|>", special), entry(dog[1:], 302)]
    answered(page, entry(b"a", top=top), entry(dog[:1], 303, top=top), entry(dog[1:], 302, top=top), entry(b"!", 304))
    send(page, "the cat")
    shown = conversation(page)
    assert shown[1] == ("Model", "a🐕!")
    page.unroute("**/v1/**completions")
    requests = sent(page)
    for token, text in ((2, "a\ufffd"), (0, "")):
        page.evaluate("(at) => open(at)", 2 + token)
        take(page, top[0])
        assert (conversation(page)[1], page.inner_text("#status")) == (("Model", text), "The answer ends here.")
        assert page.evaluate("document.activeElement.id") == "question"
        page.click("#undo")
        assert conversation(page) == shown
    assert requests == []
    answered(page, entry(b" on", 305))
    page.evaluate("open(3)")
    take(page, top[1])
    base = ask(chat_address, "tokenize", messages=messages("the cat"))["tokens"]
    assert requests[0]["prompt"] == [*base, 300, special]
    send(page, "and?")
    assert requests[1]["messages"] == messages("the cat", "a on", "and?")


def test_an_alternative_that_cannot_be_continued(open_chat: Any) -> None:
    """An answer that fills the context ends with the alternative; after an error undo brings the answer back."""
    page = open_chat()
    send(page, "the cat", max_tokens=4, seed=1)
    shown = conversation(page)
    other = chosen(page, 1, 3)
    page.route("**/tokenize", lambda route: route.abort())
    take(page, other)
    assert page.inner_text("#error") == "The server cannot be reached. Is it still running?"
    page.click("#undo")
    page.unroute("**/tokenize")
    assert conversation(page) == shown
    requests = sent(page)
    length = int(re.findall(r"\d+", page.inner_text("#length"))[0])
    page.evaluate("(length) => { model.context_length = length; }", length)
    other = chosen(page, 1, 3)
    take(page, other)
    assert requests[0]["max_tokens"] == 0
    assert [m["id"] for m in marks(page)][3:] == [other["id"]]
    assert page.inner_text("#status") == "The length is reached."


def test_regenerate_new_conversation_and_undo(open_chat: Any) -> None:
    page = open_chat()
    asked = sent(page)
    send(page, "the cat", max_tokens=5)
    send(page, "the dog", seed=1)
    first = conversation(page)
    page.fill("#question", "a draft")
    page.fill("#seed", "2")
    page.click("#again")
    until(page, ANSWERED)
    second = conversation(page)
    assert second[:3] == first[:3]
    assert second[3] != first[3]
    assert [each["content"] for each in asked[-1]["messages"]] == ["the cat", first[1][1], "the dog"]
    assert page.input_value("#question") == "a draft"
    page.click("#fresh")
    assert conversation(page) == []
    assert page.get_attribute("#again", "aria-disabled") == "true"
    page.click("#again", force=True)
    send(page, "again")
    assert asked[-1]["messages"] == messages("again")
    for expected in ([], second, first):
        page.click("#undo")
        assert conversation(page) == expected
    page.click("#redo")
    assert conversation(page) == second


def test_stop_keeps_the_answer_and_gives_back_a_question_without_one(open_chat: Any) -> None:
    page = open_chat()
    send(page, "the cat", wait=False, max_tokens=900, temperature=0)
    until(page, "marks.length > 8")
    assert page.inner_text("#go") == "Stop"
    page.keyboard.type("a draft")
    page.keyboard.press("Enter")  # waits for the answer's end
    page.keyboard.press("Escape")
    until(page, ANSWERED)
    assert page.inner_text("#status") == "Stopped."
    assert page.input_value("#question") == "a draft"
    shown = conversation(page)
    assert len(shown) == 2 and 8 <= page.locator(".token").count() < 900
    send(page, "go on", max_tokens=2)
    assert conversation(page)[:2] == shown
    held: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    shown = conversation(page)
    for press in ("#again", None):  # nothing has come yet
        if press:
            page.click(press)
        else:
            send(page, "too slow", wait=False)
            page.keyboard.type("more")
        until(page, "job !== null")
        page.click("#go")
        until(page, ANSWERED)
        assert conversation(page) == shown
    until(page, "question.value === 'too slow\\nmore'")
    assert page.evaluate("past.length") == 2


def test_errors_of_a_conversation(open_chat: Any) -> None:
    page = open_chat()
    error = page.locator("#error")
    send(page, "!", max_tokens=3)
    assert "the chat template rejects this conversation: no bangs" in error.inner_text()
    assert (conversation(page), page.input_value("#question")) == ([], "!")
    send(page, "the cat", system="!")
    assert "no bangs" in error.inner_text()
    send(page, "the cat " * 1000, system="")
    assert error.inner_text().startswith("messages have")
    assert page.input_value("#question") == "the cat " * 1000
    send(page, "the cat")
    assert error.is_hidden()
    shown = conversation(page)
    answered(page, entry(b" sat"), end='data: {"error": {"message": "out of <b>memory</b>"}}\n\n')
    send(page, "and?")
    assert error.inner_text() == "out of <b>memory</b>"
    assert conversation(page) == [*shown, ("You", "and?"), ("Model", " sat")]
    page.unroute("**/v1/**completions")
    page.evaluate("sessionStorage.setItem('gpt-key', 'old')")
    send(page, "and the key?")
    assert page.locator("#key").is_visible()
    page.fill("#secret", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#key", state="hidden")
    assert page.input_value("#question") == "and the key?"
    page.fill("#temperature", "")
    send(page, "and the cat?")
    assert page.evaluate("document.activeElement.id") == "temperature"  # the browser says what is wrong
    assert page.input_value("#question") == "and the cat?"


def test_answers_are_text_and_go_back_as_they_came(open_chat: Any) -> None:
    page = open_chat()
    bad = "<img src=x onerror='window.taken = 1'><script>window.taken = 2</script>"
    answered(page, entry(bad.encode(), top=[entry(bad.encode(), 301)]), entry(b"\r\n\xc3", 302), entry(b"\xa9", 303))
    send(page, bad)
    assert conversation(page) == [("You", bad), ("Model", bad + "\n\u00e9")]
    page.locator(".token").first.click()
    assert likely(page)[0][0] == bad.replace(" ", "·")
    page.unroute("**/v1/**completions")
    end = {"choices": [{"delta": {"content": ""}, "logprobs": {"content": [entry(b"")]}, "finish_reason": "stop"}]}
    answered(page, end=f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n")
    asked = sent(page)
    send(page, "more")
    assert asked[0]["messages"][1]["content"].startswith(bad + "\r\n")
    assert conversation(page)[-1] == ("Model", "")  # the model said nothing, which is an answer
    assert page.inner_text("#status") == "The model ended the answer (60.65 %)."


def test_keys_of_a_message(open_chat: Any) -> None:
    page = open_chat()
    asked = sent(page)
    answered(page, entry(b"!"))
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    for name in ("isComposing", "keyCode"):  # Enter ends what an input method composes
        page.evaluate(
            "(name) => question.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', bubbles: true,"
            " [name]: name === 'keyCode' ? 229 : true }))",
            name,
        )
    assert (asked, page.input_value("#question")) == ([], "one\ntwo")
    page.keyboard.press("Enter")
    until(page, ANSWERED)
    assert asked[0]["messages"] == messages("one\ntwo")
    for blank in ("", " \n"):
        send(page, blank)
    assert len(asked) == 1


def test_chat_and_plain_text_are_two_modes(open_chat: Any, open_page: Any, chat_address: str) -> None:
    page = open_chat()
    send(page, "the cat", max_tokens=4, seed=1)
    shown = conversation(page)
    page.click("#plain")
    assert page.evaluate("document.activeElement.id") == "text"
    assert page.locator(".in-chat:visible").count() == 0
    until(page, "/^The text has/.test(document.getElementById('length').textContent)")
    text = write(page, "the dog")
    expected = completion(chat_address, prompt="the dog", seed=1, max_tokens=4)["text"]
    assert text == re.sub("\r\n?", "\n", "the dog" + expected)
    tokens = marks(page)
    page.click("#chat")
    assert page.locator(".in-plain:visible").count() == 0
    assert conversation(page) == shown
    send(page, "and?")
    assert conversation(page)[:2] == shown
    page.click("#plain")
    assert (page.input_value("#text"), marks(page)) == (text, tokens)
    page.keyboard.press("Control+z")
    assert page.input_value("#text") == "the dog"
    plain = open_page()  # a model without a template
    assert plain.locator(".in-chat:visible, #modes:visible").count() == 0


def test_a_conversation_on_a_phone(open_chat: Any) -> None:
    page = open_chat(width=390, color_scheme="dark", has_touch=True)
    send(page, "a" * 300 + " the cat", max_tokens=60, temperature=1.5, seed=1)
    page.locator(".token").nth(20).tap()
    assert page.locator("#likely").is_visible()
    box = page.locator("#likely").bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 390
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("paper.scrollWidth <= paper.clientWidth")
    texts = [".turn.user", ".token", "#question", "#system", "#chat", "#list button"]
    colors = "(name) => [getComputedStyle(document.querySelector(name)).color, getComputedStyle(document.body).color]"
    for name in texts:  # none of them in a browser's own colour, which may not fit the scheme
        own, body = page.evaluate(colors, name)
        assert own == body, name
    assert page.evaluate(NAMELESS) == 0
