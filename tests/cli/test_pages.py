"""HTML pages in a browser: numbers, keyboard navigation, and no network requests."""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from colours import contrast
from conftest import Gpt, make_text
from gpt_cli.show import json_inspect, json_report
from gpt_cli.show import page as pages

import gpt as library
from gpt.config.model import PRESETS, GPTConfig
from gpt.decoding import logits as filters
from gpt.insight import inspect, report
from gpt.insight.before_after import BeforeAfter, Change
from gpt.model.decoder import GPT
from gpt.tokenizers.tokenizer import bytes_tokenizer

PROMPT = 'the <script>a()</script> & "cat"'


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file. Requests and console messages fail the test."""
    console_messages: list[str] = []
    requested_urls: list[str] = []
    pages = []

    def open_file(path: Path, width: int = 1200, **settings: Any) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900}, **settings)
        page.set_default_timeout(60_000)
        pages.append(page)
        page.on("console", lambda message: console_messages.append(message.text))
        page.on("pageerror", lambda error: console_messages.append(str(error)))
        page.on("request", lambda request: requested_urls.append(request.url))
        page.goto(path.absolute().as_uri())
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_file
    for page in pages:
        page.close()
    assert console_messages == []
    assert all(url.startswith("file:") for url in requested_urls)
    assert len(requested_urls) == len(pages)


@pytest.fixture
def attention(gpt: Gpt, run_folder: Path, workdir: Path) -> tuple[Path, dict[str, Any]]:
    args = ["inspect", "attention", PROMPT, "-m", run_folder]
    assert gpt(*args, "-o", "a.html").code == 0
    return Path("a.html"), json.loads(gpt(*args, "--json").out)


def read_share(text: str) -> float:
    """Returns the first share in a text, such as ``5.69 %``."""
    match = re.search(r"(\d+\.\d\d) %", text)
    assert match, text
    return float(match[1]) / 100


def show_share(share: float | None) -> str:
    return "–" if share is None else "< 0.01 %" if 0 < share < 0.00005 else f"{100 * share:.2f} %"


def test_attention_page_shows_the_values_of_the_json(open_page: Any, attention: tuple[Path, dict[str, Any]]) -> None:
    path, values = attention
    page = open_page(path)
    assert page.inner_text("#strip").replace("·", " ") == PROMPT  # The prompt is never markup.
    assert page.locator("script").count() == 2
    lifts = {
        (score["layer"], score["head"]): max(
            (score["prompt"][kind] - score["chance"]["prompt"][kind]) / (1 - score["chance"]["prompt"][kind])
            for kind in ("previous", "same", "matching") if score["prompt"][kind] is not None
        )
        for score in values["scores"]
    }  # fmt: skip
    layer, head = max(lifts, key=lambda place: lifts[place])
    assert page.get_attribute("button[aria-pressed='true']", "aria-label").startswith(f"layer {layer}, head {head}")
    for scores in values["scores"]:
        layer, head = scores["layer"], scores["head"]
        page.click(f'button[data-layer="{layer}"][data-head="{head}"]')
        assert page.get_attribute(f'button[data-layer="{layer}"][data-head="{head}"]', "aria-pressed") == "true"
        cells = page.locator("#facts td").all_inner_texts()
        expected = [share for kind in scores["prompt"] for share in (
            scores["prompt"][kind], values["chance"]["prompt"][kind], scores["probe"][kind], values["chance"]["probe"][kind],
        )]  # fmt: skip
        assert cells == list(map(show_share, expected))
        for query in (0, 3, len(values["tokens"]) - 1):
            page.locator("#strip .token").nth(query).hover()
            listed = page.locator("#attends td.number").all_inner_texts()
            row = sorted(values["patterns"][layer][head][query][: query + 1], reverse=True)
            assert list(map(read_share, listed)) == pytest.approx(row[:8], abs=6e-5)
            assert read_share(page.inner_text("#readout")) == pytest.approx(row[0], abs=6e-4)
    average = [[sum(x) / len(x) for x in zip(*rows, strict=True)] for rows in zip(*values["patterns"][1], strict=True)]
    page.click('button[data-layer="1"][data-head="-1"]')
    page.locator("#strip .token").nth(4).hover()
    assert read_share(page.inner_text("#readout")) == pytest.approx(max(average[4]), abs=6e-4)


def test_keyboard_navigation_of_heads_tokens_and_map(open_page: Any, attention: tuple[Path, dict[str, Any]]) -> None:
    path, values = attention
    page = open_page(path)
    page.click('button[data-layer="0"][data-head="0"]')
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    focused = "document.activeElement.dataset"
    assert (page.evaluate(f"{focused}.layer"), page.evaluate(f"{focused}.head")) == ("1", "1")
    assert page.inner_text("#readout").startswith("layer 1, head 1")
    assert page.locator(".heads button[tabindex='0']").count() == 1
    page.locator("#strip .token").last.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert "(1) gives" in page.inner_text("#readout")
    page.focus("#map")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    share = read_share(page.inner_text("#readout"))
    assert share == pytest.approx(values["patterns"][1][1][2][0], abs=6e-4) or share == pytest.approx(
        values["patterns"][1][1][2][1], abs=6e-4
    )
    box = page.locator("#map").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 8, box["y"] + box["height"] - 8)
    assert read_share(page.inner_text("#readout")) == pytest.approx(values["patterns"][1][1][-1][-1], abs=6e-4)


def test_next_token_probabilities_equal_gpt_sample(
    open_page: Any, run_folder: Path, attention: tuple[Path, dict[str, Any]]
) -> None:
    path, values = attention
    model = library.load(run_folder, dtype="float32")
    with torch.no_grad():
        logits = model.model(torch.tensor([values["tokens"]]))[0, -1]
    page = open_page(path)
    for temperature, k, p in ((1, 0, 0), (1.5, 7, 0), (1, 0, 0.6), (0.8, 12, 0.7), (0, 0, 0)):
        for name, value in (("temperature", temperature), ("top-k", k), ("top-p", p)):
            page.evaluate(
                "([name, value]) => { const input = document.getElementById(name); input.value = value; input.dispatchEvent(new Event('input')); }",
                [name, value],
            )
        if temperature == 0:
            expected = torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
        else:
            scaled = filters.apply_temperature(logits, temperature)
            expected = filters.keep_top_p(filters.keep_top_k(scaled, k), p).softmax(-1)
        rows = page.locator("#next tbody tr").all()
        assert len(rows) == 25
        for row in rows:
            id = int(row.get_attribute("data-id"))
            assert row.locator(".now").inner_text() == "< 0.01 %" or read_share(
                row.locator(".now").inner_text()
            ) == pytest.approx(float(expected[id]), abs=6e-5)
        count = int((expected > 0).sum())
        assert page.inner_text("#next-facts").startswith(f"{count:,} of {len(logits):,} tokens can be drawn")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_have_enough_contrast(open_page: Any, attention: tuple[Path, dict[str, Any]], scheme: str) -> None:
    """WCAG AA requires a contrast of 4.5 to 1. The system or a button sets the color scheme."""
    page = open_page(attention[0], color_scheme=scheme)
    backgrounds = ["rgb(255, 255, 255)", "rgb(20, 23, 27)"][:: 1 if scheme == "light" else -1]
    style = "const s = getComputedStyle(document.documentElement), probe = document.createElement('i'); document.body.append(probe);"
    names = [
        *map("--{}".format, ("text", "soft", "mark", "warn", "hot", *(f"c{n}" for n in range(8)), "back", "panel"))
    ]
    colours = page.evaluate(
        f"() => {{ {style} return {names}.map(n => {{ probe.style.color = s.getPropertyValue(n); return getComputedStyle(probe).color; }}); }}"
    )
    *inks, background, panel = colours
    for name, ink in zip(names, inks, strict=False):
        assert min(contrast(ink, background), contrast(ink, panel)) >= 4.5, name
    cells = page.evaluate(
        "[...document.querySelectorAll('#lens td, #strip .token')].map(c => [getComputedStyle(c).color, getComputedStyle(c).backgroundColor])"
    )
    for text, background in cells:
        if "0, 0, 0, 0" not in background:
            assert contrast(text, background) >= 4.5, (text, background)
    for background in backgrounds:
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
        page.click("#theme")


def test_other_pages_show_the_values_of_the_json(open_page: Any, gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    for name, args in {
        "n": ["inspect", "neighbors", "cat", "<b>"],
        "t": ["tokenizer", "encode", "--show", PROMPT],
    }.items():  # fmt: skip
        assert gpt(*args, "-m", run_folder, "-o", f"{name}.html").code == 0
    neighbors = json.loads(gpt("inspect", "neighbors", "cat", "-m", run_folder, "--json").out)["words"][0]["neighbors"]
    page = open_page(Path("n.html"))
    cosines = page.locator("section").first.locator("tbody td:nth-child(3)").all_inner_texts()
    assert cosines == [f"{neighbor['cosine']:.4f}" for neighbor in neighbors]
    assert page.locator("h2").all_inner_texts() == ["cat", "<b>"]
    page = open_page(Path("t.html"))
    assert page.inner_text("#strip") == PROMPT
    page.locator("#strip .token").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#readout").startswith("token 1: ")


def test_sliding_window_is_shown(open_page: Any, workdir: Path) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(257, 16, 2, 4, 32, n_kv_head=2, window=3)).eval()
    look = inspect.inspect_prompt(model, list(b"a band here"), bytes_tokenizer())
    Path("w.html").write_bytes(pages.html("attention", "w", json_inspect.attention_page(look, bytes_tokenizer(), "w")))
    page = open_page(Path("w.html"))
    assert page.locator(".heads .label").all_inner_texts() == ["all", "layer 0", "layer 1, window 3"]
    page.click('button[data-layer="1"][data-head="2"]')
    assert page.inner_text("#readout").startswith("layer 1, window 3, head 2: ")
    shares = [read_share(x) for x in page.locator("#attends td.number").all_inner_texts()]
    assert sum(shares) == pytest.approx(1, abs=0.01) and sum(share > 0 for share in shares) == 3
    chances = [row.locator("td.number").all_inner_texts()[1] for row in page.locator("#facts tbody tr").all()]
    expected = [look.here.chance[kind] for kind in inspect.KINDS]
    assert chances == [show_share(None if chance is None else chance[1]) for chance in expected]


def test_data_cannot_end_its_script_tag() -> None:
    evil = "</script><script>a()</script><!--"
    text = pages.html("report", evil, {"name": evil}).decode()
    assert evil not in text
    assert text.count("a()") == 2  # The escaped title and the data contain a().
    assert json.dumps(evil).replace("<", "\\u003c") in text


def test_report_page_shows_the_values_of_the_json(open_page: Any, gpt: Gpt, two_runs: list[Path]) -> None:
    assert gpt("report", *two_runs, "-o", "r.html").code == 0
    values = [json.loads(line) for line in gpt("report", *two_runs, "--json").out.splitlines()]
    page = open_page(Path("r.html"))
    rows = page.locator("#results tbody tr").all()
    for row, run in zip(rows, values, strict=True):
        assert row.locator("th").inner_text() == run["name"]
        cells = row.locator("td").all_inner_texts()
        assert cells[0] == str(run["steps"]["step"][-1])
        loss = (run["end"] or {}).get("val_loss") or run["best"]["val_loss"]
        assert cells[-1] == ("all steps done" if run["end"] else "not finished")
        assert cells[3] == f"{loss:.4f}"
    charts = "figure[data-chart='loss'] path"
    charts = f"{charts}.curve:not(.key *)"
    assert page.locator(charts).count() == 6  # Raw, smoothed and held-out loss of two runs
    assert page.locator(charts).evaluate_all("all => all.map(each => each.classList.contains('pale'))") == [
        True, True, False, False, False, False,
    ]  # fmt: skip
    assert page.locator("figure[data-chart='loss'] figcaption").inner_text().split("\n")[0] == "Loss, nats per token"
    assert "training, smoothed" in page.locator("figure[data-chart='loss'] figcaption").inner_text()
    before = page.locator(charts).first.get_attribute("d")
    page.select_option("#axis", "seconds")
    assert page.locator(charts).first.get_attribute("d") != before
    page.locator(".legend button").first.click()
    assert page.locator(charts).count() == 3
    chart = page.locator("figure[data-chart='loss'] > svg")
    chart.focus()
    page.keyboard.press("ArrowRight")
    assert "two held-out" in page.locator("figure[data-chart='loss'] p").inner_text()
    assert page.locator("h2").all_inner_texts() == ["Results", "Curves", "Samples", "Copying", "Settings"]
    differing, others = page.locator(".scroll[aria-label*='settings'] tbody").all()
    assert differing.inner_text().split() == ["lr", *(str(run["settings"]["lr"]) for run in values)]
    assert others.is_hidden()
    page.click("summary")
    assert "batch_tokens" in others.inner_text()
    longest = values[1]["samples"][-1]["longest_text"].rstrip("\r\n")
    assert page.locator("[data-sample='1'] mark").inner_text() == longest
    mark, origins = page.locator("[data-sample='1'] mark"), page.locator(".origins").last
    assert origins.is_hidden()
    assert mark.evaluate("each => getComputedStyle(each).backgroundColor") != "rgb(255, 255, 0)"
    mark.focus()
    page.keyboard.press("Enter")
    assert mark.get_attribute("aria-pressed") == "true"
    assert "This passage of 60 tokens is in one place" in origins.inner_text()
    assert origins.locator("mark").text_content() == values[1]["samples"][-1]["longest_text"]
    trained = make_text()
    before = trained[: trained.index(longest)]
    assert origins.locator("q").text_content().startswith(f"…{before[-60:]}")
    assert origins.locator("li span").inner_text() == f"document 1, line {1 + before.count(chr(10))}"
    assert "pieces" not in values[1]["samples"][-1]
    page.locator("#sample-1").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("[data-sample='1']").inner_text() == "</script><b>Zürich</b>"
    assert origins.is_hidden()


def test_overfitted_run_does_not_flatten_others(open_page: Any, gpt: Gpt, two_runs: list[Path]) -> None:
    """The training loss of the second run falls to 0.0001, its held-out loss rises to 90, and its text is another."""
    lines = [json.loads(line) for line in Path("two/metrics.jsonl").read_text().splitlines()]
    losses = {"step": ("loss", 1e-4), "eval": ("val_loss", 90.0)}
    for name, (key, value) in losses.items():
        next(line for line in reversed(lines) if line["event"] == name)[key] = value
    Path("two/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = json.loads(Path("two/run.json").read_text())
    record["sources"][0]["sha256"] = "another"
    Path("two/run.json").write_text(json.dumps(record))
    assert gpt("report", "one", "two", "-o", "r.html").code == 0
    page, in_terminal = open_page(Path("r.html")), gpt("report", "one", "two").out
    labels = page.locator("figure[data-chart='loss'] .y text").all_text_contents()
    assert max(map(float, labels)) < 10
    for shown in (page.inner_text("main"), in_terminal):
        assert "two reaches 90" in shown
        assert "different held-out texts" in shown
    assert gpt("report", "one", "-o", "one.html").code == 0
    assert open_page(Path("one.html")).locator(".warn").count() == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_the_window_and_scroll_with_the_keyboard(
    open_page: Any, gpt: Gpt, two_runs: list[Path], width: int
) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(257, 32, 2, 8, 32)).eval()
    look = inspect.inspect_prompt(model, list(b"The king is dead, long live \xff"), bytes_tokenizer())
    Path("a.html").write_bytes(pages.html("attention", "a", json_inspect.attention_page(look, bytes_tokenizer(), "a")))
    assert gpt("report", *two_runs, "-o", "r.html").code == 0
    assert gpt("params", "gpt2", "gpt3-175b", "-o", "p.html").code == 0
    assert gpt("inspect", "neighbors", "cat", "-m", two_runs[0], "-o", "n.html").code == 0
    scrolls = """() => [...document.querySelectorAll("*")].filter((each) => /auto|scroll/.test(getComputedStyle(each).overflowX))
        .filter((each) => each.tabIndex !== 0 || !each.ariaLabel).map((each) => each.outerHTML.slice(0, 80))"""
    for name in "arpn":
        page = open_page(Path(f"{name}.html"), width)
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") == width, name
        assert page.evaluate(scrolls) == []
        if name == "a":
            assert "<0xFF>" in page.inner_text("#strip")
            answer = page.locator("#lens tr").last.locator("td").last.bounding_box()
            assert answer["x"] > 0 and answer["x"] + answer["width"] <= width
            head = page.locator(".heads button").last.bounding_box()
            assert width == 390 or head["x"] + head["width"] <= width


def test_report_of_a_run_has_yardsticks(open_page: Any, gpt: Gpt, two_runs: list[Path]) -> None:
    assert gpt("report", "one", "-o", "r.html").code == 0
    page = open_page(Path("r.html"))
    levels = page.locator("figure[data-chart='loss'] text.level")
    assert levels.all_text_contents() == ["xz", "unigram", "uniform"]
    heights = levels.evaluate_all("all => all.map((level) => +level.getAttribute('y'))")
    assert heights == sorted(heights, reverse=True)
    assert page.locator(".verdict").inner_text().startswith("The model is worse than ")
    for axis in ("tokens", "seconds"):
        page.select_option("#axis", axis)
        assert levels.count() == 3


AXES = [  # lowest and highest value, number of ticks, whether the axis ends at ticks
    (2.308, 6.942, 8, True, ["2", "3", "4", "5", "6", "7"]),
    (1.5e-5, 0.008, 6, True, ["0.000", "0.002", "0.004", "0.006", "0.008"]),
    (1e-5, 1.2e-4, 8, True, ["0", "0.2e-4", "0.4e-4", "0.6e-4", "0.8e-4", "1.0e-4", "1.2e-4"]),
    (0, 409_600, 6, False, ["0", "100,000", "200,000", "300,000", "400,000"]),
    (0, 2.5e6, 6, False, ["0", "0.5M", "1.0M", "1.5M", "2.0M", "2.5M"]),
    (-0.71, 1, 6, True, ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
    (2, 2, 6, True, ["1.0", "1.5", "2.0", "2.5", "3.0"]),
    (1e30, 3e30, 6, True, ["1.0e30", "1.5e30", "2.0e30", "2.5e30", "3.0e30"]),
    (5e-324, 1e-310, 6, True, ["-0.5", "0.0", "0.5"]),
]  # fmt: skip
LOG_AXES = [
    (0.002, 50, 8, ["0.001", "0.01", "0.1", "1", "10", "100"]),
    (2, 3e7, 5, ["1e0", "1e2", "1e4", "1e6", "1e8"]),
    (2, 3, 5, ["1", "10"]),
]
RANGES = [
    (0.0, 1.0), (1.0, 400.0), (437.8, 437.9), (-3e-7, -1e-7), (0.0, 0.0), (-3e38, 3e38), (3e38, 3e38),
    (1e18, 1e18 + 512), (0.1, 0.7), (3.0, 3.0 + 1e-6), (0.0, 3e12), (999.0, 1001.0), (1.0000001, 1.0000001),
]  # fmt: skip


def test_axes_have_round_ticks(open_page: Any, gpt: Gpt, workdir: Path) -> None:
    assert gpt("params", "gpt2", "-o", "p.html").code == 0
    evaluate = open_page(Path("p.html")).evaluate
    for name, cases in (("axis", AXES), ("logAxis", LOG_AXES)):
        for *args, labels in cases:
            assert evaluate(f"args => {name}(...args).labels", args) == labels
    for ends, count, extend in product(RANGES, (4, 6, 8), (True, False)):
        script = (
            "args => { const a = axis(...args); return [a.labels, ...[...args.slice(0, 2), ...a.ticks].map(a.share)]; }"
        )
        labels, first, last, *shares = evaluate(script, [*ends, count, extend])
        assert 1 <= len(shares) == len(labels) == len({*labels}) <= count
        assert -1e-6 <= first <= last <= 1 + 1e-6 and -1e-6 <= min(shares) <= max(shares) <= 1 + 1e-6
        steps = [after - before for before, after in pairwise(shares)]
        assert steps == pytest.approx(steps[:1] * len(steps), abs=1e-6)
        assert not extend or count == 4 or len(shares) >= 3


@pytest.mark.parametrize("width", [360, 1600])
def test_report_fits_the_window(open_page: Any, gpt: Gpt, two_runs: list[Path], width: int) -> None:
    assert gpt("report", *two_runs, "-o", "r.html").code == 0
    page = open_page(Path("r.html"))
    page.set_viewport_size({"width": width, "height": 800})
    # The page's content security policy blocks wait_for_function.
    charts_fit = (
        "[...document.querySelectorAll('figure > svg')].every(each => each.viewBox.baseVal.width === each.clientWidth)"
    )
    start_time = time.monotonic()
    while not page.evaluate(charts_fit):
        assert time.monotonic() - start_time < 60
        time.sleep(0.02)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    boxes = [chart.bounding_box() for chart in page.locator("figure > svg").all()]
    assert boxes[0]["width"] > 0.85 * width
    assert len({round(box["y"]) for box in boxes[1:]}) == {360: 3, 1600: 1}[width]
    for figure in page.locator("figure").all():
        for side in ("x", "y"):
            labels = figure.locator(f"svg .{side} text").all_text_contents()
            assert 3 <= len(labels) <= 8, labels
            assert len({len(label.partition(".")[2]) for label in labels}) == 1


def test_report_of_a_diverged_run_has_gaps(open_page: Any, gpt: Gpt, two_runs: list[Path]) -> None:
    """NaN, huge and missing numbers leave gaps."""
    metrics = [json.loads(line) for line in Path("one/metrics.jsonl").read_text().splitlines()]
    for at, record in enumerate(metrics):
        record["step"] += 10**15
        if record["event"] == "step":
            record["loss"] = [None, 1e30, 2.0, 3e38, 3.0][at % 5]
    Path("one/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    first = next(record for record in metrics if record["event"] == "step")
    Path("two/metrics.jsonl").write_text(json.dumps({**first, "loss": None, "grad_norm": 1e38}) + "\n")
    assert gpt("report", "one", "two").code == 0
    assert gpt("report", "one", "two", "-o", "r.html").code == 0
    page = open_page(Path("r.html"))
    assert page.locator("figure").count() == 4
    labels = page.locator("figure[data-chart='loss'] .y text").all_text_contents()
    assert labels[0] == "1e0"
    shapes = page.locator("svg path").evaluate_all("all => all.map(each => each.getAttribute('d'))")
    assert not any("NaN" in shape or "Infinity" in shape for shape in shapes)


def test_params_page_shows_the_values_of_the_json(open_page: Any, gpt: Gpt, workdir: Path) -> None:
    assert gpt("params", "gpt2", "gpt3-175b", "-o", "p.html").code == 0
    page = open_page(Path("p.html"))
    for name in ("gpt2", "gpt3-175b"):
        values = json.loads(gpt("params", name, "--json").out)
        rows = page.locator(f"section[data-shape='{name}'] tbody tr").all()
        assert [row.locator("td.number").first.inner_text() for row in rows] == [
            f"{row['parameters']:,}" for row in values["rows"]
        ]
        widths = [row.locator(".bar").bounding_box()["width"] for row in rows]
        largest = max(row["parameters"] for row in values["rows"])
        assert widths == pytest.approx([max(widths) * row["parameters"] / largest for row in values["rows"]], abs=1.1)
        assert f"{values['trainable']:,} trainable" in page.locator(f"section[data-shape='{name}']").inner_text()
    assert page.locator("#compared tbody tr").count() == 2
    assert page.locator("#compared tbody td.number").first.inner_text() == "124,439,808"
    gpt("params", "--list", "-o", "all.html")
    assert open_page(Path("all.html")).locator("#compared tbody tr").count() == len(PRESETS)


def test_before_and_after_shows_the_values_of_the_json(open_page: Any, gpt: Gpt, two_runs: list[Path]) -> None:
    evil = "<img src=x>"
    change = Change(evil, -2.0, -1.0, 1.0)
    answers = [{"prompt": evil, "before": f"{evil} old", "after": f"{evil} new"}]
    compared = BeforeAfter("base", "tuned", [Change("held-out text", 3.0, 2.5, -0.5)], answers, [change], [0])
    data = json_report.report_page([replace(report.report(two_runs[0]), before_after=compared)])
    Path("r.html").write_bytes(pages.html("report", "report", data))
    page = open_page(Path("r.html"))
    section = page.locator("section", has=page.get_by_role("heading", name="Before and after"))
    assert section.locator("td.number").all_inner_texts()[:3] == ["3.0000", "2.5000", "-0.5000"]
    assert section.locator("pre").all_inner_texts() == [evil, f"{evil} old", f"{evil} new"]
    assert section.locator(".token").all_inner_texts() == [evil]
    assert section.locator("td.number").all_inner_texts()[3:] == ["-2.0000", "-1.0000", "+1.0000"]
    assert page.locator("img").count() == 0
