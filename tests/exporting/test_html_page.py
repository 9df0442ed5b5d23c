"""Exported pages in a browser, opened from disk without a network: they compute what `gpt` computes."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vocabularies
from conftest import WATCH_TRACE, make_text
from models import CPU, FAMILIES, engine_of, loud, source_of

from gpt import api
from gpt.chat import chat
from gpt.config.model import ARCHITECTURES, GPTConfig, RopeScaling
from gpt.config.sample import SampleConfig
from gpt.config.text import TokenizeConfig
from gpt.corpus.token_folder import TokenFolder
from gpt.corpus.tokenize import tokenize_texts
from gpt.decoding.context import Context
from gpt.decoding.engine import Request
from gpt.exporting import chat_pieces, html
from gpt.insight.inspect import inspect_prompt
from gpt.insight.passages import TrainingText
from gpt.model.decoder import GPT
from gpt.tokenizers.finding import find_tokenizer
from gpt.tokenizers.tokenizer import CHAT_TEMPLATE, Tokenizer, bytes_tokenizer, train_tokenizer_up_to

pytestmark = pytest.mark.slow
MODERN, GPT2 = ARCHITECTURES["modern"], ARCHITECTURES["gpt2"]
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2, untied": GPT2 | {"tied": False},
    "qwen3, windows": MODERN | {"window": 8},
    "llama, scaled, odd sizes": FAMILIES["llama"]
    | {"n_kv_head": 2, "head_dim": 10, "n_inner": 44, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 16)},
    "mistral, untied": FAMILIES["mistral"] | {"n_kv_head": 1, "tied": False, "window": 6, "window_layers": (0, 1)},
    "qwen2": FAMILIES["qwen2"] | {"n_kv_head": 2},
}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1, "temperature": 1.3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.3},
    {"no_repeat_ngram": 3, "min_tokens": 20, "temperature": 0.5},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
]
Open = Callable[[Path], Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a file and waits for the model. Any request for something else, and any error in the console, fails the
    test."""
    context = browser.new_context(offline=True)
    context.set_default_timeout(60_000)
    requests: list[str] = []
    problems: list[str] = []

    def open_file(path: Path) -> Any:
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready=yes]")
        return page

    yield open_file
    context.close()
    assert [url for url in requests if not url.startswith(("file:", "blob:", "data:"))] == []
    assert problems == []


NO_TEXTS: dict[str, Any] = {"name": "it", "facts": [], "about": [], "prompts": [], "chat": None}


def export(path: Path, model: GPT, tokenizer: Tokenizer | None = None, dtype: str = "float32") -> Path:
    html.write(path, source_of(model, tokenizer), dtype, NO_TEXTS)
    return path


def complete(page: Any, ids: Sequence[int], **settings: Any) -> list[dict[str, Any]]:
    """The tokens that the page's engine generates after `ids`."""
    script = """async ([ids, settings]) => {
        const tokens = [];
        for await (const event of engine.complete({ ids, alternatives: 3, ...settings })) tokens.push(...event.tokens);
        return tokens;
    }"""
    defaults = vars(SampleConfig())
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    names += ("no_repeat_ngram", "min_tokens", "max_tokens")
    known = {name: defaults[name] for name in names}
    return page.evaluate(script, [list(ids), {**known, "seed": 0, **settings}])  # type: ignore[no-any-return]


def expected(model: GPT, ids: Sequence[int], seed: int = 0, **settings: Any) -> list[Any]:
    tokens: list[Any] = []
    engine = engine_of(Context(model, CPU, 1), [Request(tuple(ids))], SampleConfig(**settings), seed, eot=256)
    for event in engine.run():
        tokens += event.tokens
    return tokens


def ids_of(tokens: Sequence[Any]) -> list[int]:
    return [token["id"] if isinstance(token, dict) else token.id for token in tokens]


@pytest.mark.parametrize("shape", SHAPES)
def test_ids_are_those_of_gpt_sample(shape: str, open_page: Open, tmp_path: Path) -> None:
    """Greedily and with seeds, past the context, with every filter."""
    model = loud(GPTConfig(257, 40, 2, 4, 64, **SHAPES[shape]), spread=0.08)
    page, generator = open_page(export(tmp_path / "model.html", model)), random.Random(0)
    for index in range(16):
        ids = [generator.randrange(256) for _ in range((1, 3, 12, 39, 40, 41, 60)[index % 7])]
        settings = {**SETTINGS[index % len(SETTINGS)], "max_tokens": (10, 60)[index % 2]}
        seed = index * 1_000_003
        tokens, reference = complete(page, ids, seed=seed, **settings), expected(model, ids, seed, **settings)
        assert ids_of(tokens) == ids_of(reference), (index, settings)
        assert [token["logprob"] for token in tokens] == pytest.approx([t.logprob for t in reference], abs=1e-4)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_p": 0.05}, {"top_k": 3}])
def test_lower_ids_win_ties(settings: dict[str, Any], open_page: Open, tmp_path: Path) -> None:
    """Each two ids have the same logit."""
    model = loud(GPTConfig(257, 40, 2, 4, 64, **SHAPES["gpt2, untied"]), spread=0.08)
    with torch.no_grad():
        model.unembedding[1::2] = model.unembedding[:-1:2]
    page = open_page(export(tmp_path / "model.html", model))
    for seed in range(8):
        settings = {**settings, "max_tokens": 30}
        tokens, reference = complete(page, [seed], seed=seed, **settings), expected(model, [seed], seed, **settings)
        assert ids_of(tokens) == ids_of(reference)


def test_javascript_without_simd_gives_the_same_ids(
    open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loud(GPTConfig(257, 40, 2, 4, 64, **SHAPES["llama, scaled, odd sizes"]), spread=0.08)
    for dtype in ("float32", "bfloat16", "int8"):
        file = export(tmp_path / f"{dtype}.html", model, dtype=dtype)
        with monkeypatch.context() as patch:
            patch.setattr(html, "_WORKER", [name for name in html._WORKER if name.endswith(".js")])
            plain = export(tmp_path / f"{dtype}-plain.html", model, dtype=dtype)
        assert plain.stat().st_size < file.stat().st_size
        settings = {"max_tokens": 30, "seed": 5}
        fast, slow = (complete(open_page(path), [1, 2, 3], **settings) for path in (file, plain))
        assert ids_of(fast) == ids_of(slow), dtype


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_rounded_weights_are_those_of_a_folder(dtype: str, open_page: Open, tmp_path: Path) -> None:
    """A float32 model with the weights of the exported folder gives the page's ids."""
    model = loud(GPTConfig(257, 40, 2, 4, 64, **MODERN), spread=0.08)
    page = open_page(export(tmp_path / "model.html", model, dtype=dtype))
    restored = GPT(model.config).eval()
    source = source_of(model)
    weights = {name: html.restore_parameter(model.config, name, get(), dtype) for name, get in source.weights.items()}
    restored.load_state_dict({name: html.to_tensor(value) for name, value in weights.items()})
    for seed in range(6):
        ids = [seed, 2 * seed, 3]
        tokens, reference = (
            complete(page, ids, seed=seed, max_tokens=30), expected(restored, ids, seed, max_tokens=30)
        )  # fmt: skip
        assert ids_of(tokens) == ids_of(reference)
        tolerance = 5e-3 if dtype == "int8" else 1e-4  # With int8, activations have 16 bits.
        assert [token["logprob"] for token in tokens] == pytest.approx([t.logprob for t in reference], abs=tolerance)


def inspect(page: Any, ids: Sequence[int], off: dict[str, Any] | None = None) -> dict[str, Any]:
    script = """async ([ids, off]) => {
        const { attention, ...rest } = await engine.inspect(ids, { off });
        return { attention: [...attention], ...rest };
    }"""
    return page.evaluate(script, [list(ids), off or {}])  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", ["gpt2", "qwen3, windows", "llama, scaled, odd sizes"])
def test_attention_and_lens_are_those_of_gpt_inspect(shape: str, open_page: Open, tmp_path: Path) -> None:
    model = loud(GPTConfig(257, 40, 2, 4, 64, **SHAPES[shape]), spread=0.08)
    page, ids = open_page(export(tmp_path / "model.html", model)), random.Random(1).choices(range(256), k=20)
    for length in (1, 13, 20):
        look, reference = inspect(page, ids[:length]), inspect_prompt(model, ids[:length], bytes_tokenizer())
        assert [token["id"] for token in look["tokens"]] == ids[:length]
        attention = torch.tensor(look["attention"], dtype=torch.float32).view(2, 4, length)
        assert torch.allclose(attention, torch.tensor(reference.patterns[:, :, -1]), atol=1e-5)
        for row, top, shares in zip(look["lens"], reference.lens.ids, reference.lens.probabilities, strict=True):
            assert [entry["id"] for entry in row] == top[-1].tolist()
            assert [entry["probability"] for entry in row] == pytest.approx(shares[-1].tolist(), abs=1e-4)
        logits = torch.tensor(reference.logits)
        assert [entry["id"] for entry in look["next"]] == logits.topk(200).indices.tolist()
        assert [entry["logit"] for entry in look["next"]] == pytest.approx(logits.topk(200).values.tolist(), abs=1e-3)


def test_switched_off_head_and_layer_are_zeroed(open_page: Open, tmp_path: Path) -> None:
    config = GPTConfig(257, 40, 3, 4, 64, **MODERN)
    model, zeroed = loud(config, spread=0.08), loud(config, spread=0.08)
    with torch.no_grad():
        zeroed.h[0].attn.c_proj.weight[:, 2 * 16 : 3 * 16] = 0  # type: ignore[union-attr, index]
        zeroed.h[1].attn.c_proj.weight[:] = 0  # type: ignore[union-attr, index]
        zeroed.h[1].mlp.c_proj.weight[:] = 0  # type: ignore[union-attr, index]
    page, off = open_page(export(tmp_path / "model.html", model)), {"heads": [[0, 2]], "layers": [1]}
    whole = complete(page, [1, 2, 3], max_tokens=40)
    assert ids_of(complete(page, [1, 2, 3], max_tokens=40, off=off)) == ids_of(
        expected(zeroed, [1, 2, 3], max_tokens=40)
    )
    assert (
        ids_of(whole)
        == ids_of(expected(model, [1, 2, 3], max_tokens=40))
        == ids_of(complete(page, [1, 2, 3], max_tokens=40))
    )
    logits = inspect_prompt(zeroed, [5, 6, 7], bytes_tokenizer()).logits
    assert inspect(page, [5, 6, 7], off)["next"][0]["id"] == int(logits.argmax())


def test_inspection_while_generating_changes_no_token(open_page: Open, tmp_path: Path) -> None:
    model = loud(GPTConfig(257, 400, 2, 4, 64, **MODERN), spread=0.08)
    page = open_page(export(tmp_path / "model.html", model))
    script = """async () => {
        const ids = [1, 2, 3], settings = { alternatives: 0, max_tokens: 300, temperature: 0.8, top_k: 0, top_p: 0, min_p: 0,
            repetition_penalty: 0, presence_penalty: 0, frequency_penalty: 0, no_repeat_ngram: 0, min_tokens: 300, seed: 3 };
        const write = async (look) => {
            const tokens = [];
            for await (const event of engine.complete({ ids, ...settings })) {
                tokens.push(...event.tokens.map((token) => token.id));
                if (look) await engine.inspect([...ids, ...tokens], {});
            }
            return tokens;
        };
        return [await write(false), await write(true)];
    }"""
    plain, inspected = page.evaluate(script)
    assert plain == inspected
    assert len(plain) == 300


SCRIPTS = [
    "The river's WE'LL it\u017f\u2019s",
    "größere Żółć",
    "Ёжик пьёт",
    "河在这里很宽。",
    "नदी यहाँ",
    "النهر واسع",
    "e\u0301 ﬁ 12345 ①",
]
SPACES = [" ", "  ", "\n", "\r\n", "\t", "\u0085", "\u00a0", "\u2003", "\ufeff", "", "!", "--", "<|endoftext|>", "🐕‍🦺"]


@pytest.mark.parametrize("form", ["trained", "bytes", "gpt2", "llama3", "qwen", "smollm2", "gaps"])
def test_ids_of_texts(form: str, open_page: Open, tmp_path: Path) -> None:
    """2,000 texts of six scripts and odd spaces, and words that take many merges."""
    if form in ("trained", "bytes"):
        tokenizer = (
            bytes_tokenizer() if form == "bytes" else train_tokenizer_up_to([make_text() + "".join(SCRIPTS)], 700)
        )
    else:
        tokenizer = find_tokenizer(str(vocabularies.write(form, tmp_path / form)))
    model, generator = loud(GPTConfig(tokenizer.usable, 16, 1, 1, 16)), random.Random(0)
    words = [word for text in (*SCRIPTS, make_text()[:2000]) for word in text.split()]
    texts = [
        "".join(generator.choice(words) + generator.choice(SPACES) for _ in range(generator.randrange(12)))
        for _ in range(2_000)
    ]
    texts += ["a" * 5000, "the" * 2000, "\n" * 3000]
    page = open_page(export(tmp_path / "model.html", model, tokenizer))
    ids = page.evaluate(
        "async (texts) => { const all = []; for (const text of texts) all.push(await engine.tokenize(text)); return all; }",
        texts,
    )
    assert ids == [tokenizer.prompt(text) for text in texts]


def test_generate_is_gpt_sample(run_folder: Path, open_page: Open, tmp_path: Path) -> None:
    """From an exported run, through `window.gpt`."""
    api.export(run_folder, tmp_path / "run.html", dtype="float32")
    page, ours = open_page(tmp_path / "run.html"), api.load(run_folder, dtype="float32")
    for prompt in ("", "the ", make_text()[:300]):
        settings = {"temperature": 0, "max_tokens": 40}
        assert (
            page.evaluate("(values) => gpt.generate(...values)", [prompt, settings])["text"]
            == ours.generate(prompt, **settings)[0]
        )
        assert (
            page.evaluate("(values) => gpt.generate(...values)", [prompt, {"seed": 7}])["text"]
            == ours.generate(prompt, seed=7)[0]
        )


def test_page_opens_with_a_written_text(run_folder: Path, open_page: Open, tmp_path: Path) -> None:
    """Its tokens have alternatives, and the model continues them as it continues their ids."""
    api.export(run_folder, tmp_path / "model.html", dtype="float32")
    page = open_page(tmp_path / "model.html")
    prompt, written = page.evaluate("[model.prompts[0], model.written]")
    model = api.load(run_folder, dtype="float32")
    size = model.model.config.block_size
    writing = model.write(prompt, SampleConfig(max_tokens=min(80, size - len(written["ids"]))))
    assert page.input_value("#text") == prompt + "".join(writing)
    ids = [*model.tokenizer.prompt(prompt), *writing.sample.tokens]
    assert page.evaluate("knownIds()") == ids
    assert page.locator("#shade .token").count() == len(writing.sample.tokens) > 1
    assert page.is_hidden("#prompts")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "5")
    page.click("#go")
    page.wait_for_selector("#status:text('.')")
    assert ids_of(complete(page, ids, temperature=0, max_tokens=5)) == page.evaluate("knownIds()")[len(ids) :]
    api.export(run_folder, tmp_path / "empty.html", prompts=0)
    assert open_page(tmp_path / "empty.html").input_value("#text") == ""


def test_chat_has_the_date_of_today(open_page: Open, tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{{ strftime_now('%A %a, %d %m %B %b %Y %y: ') + message.content }}{% endfor %}"
    )
    tokenizer = replace(bytes_tokenizer(), files={CHAT_TEMPLATE: template.encode()})
    texts, messages = NO_TEXTS | {"chat": chat_pieces.find_pieces(tokenizer)}, [{"role": "user", "content": "Hi"}]
    html.write(tmp_path / "it.html", source_of(loud(GPTConfig(257, 40, 1, 1, 16)), tokenizer), "float32", texts)
    ids = open_page(tmp_path / "it.html").evaluate("(messages) => engine.template(messages)", messages)
    assert ids == tokenizer.encode(chat.render(tokenizer, messages), specials=True).tolist()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    """Documents with passages in common, and an empty one."""
    root, generator, text = tmp_path_factory.mktemp("tokens"), random.Random(0), make_text(600)
    (root / "texts").mkdir()
    for index in range(12):
        starts = [generator.randrange(len(text)) for _ in range(index)]
        parts = [text[start : start + generator.randrange(300)] for start in starts]
        (root / f"texts/{index}.txt").write_bytes("\n".join(parts).encode())
    config = TokenizeConfig(out=str(root / "folder"), vocab_size=400, val_fraction=0.0)
    return tokenize_texts([str(root / "texts")], config)


@pytest.fixture(scope="module")
def whole_page(tokens: TokenFolder) -> str:
    file = tokens.path.parent / "model.html"
    html.write(
        file,
        source_of(loud(GPTConfig(tokens.tokenizer.usable, 40, 2, 4, 64)), tokens.tokenizer),
        "float32",
        NO_TEXTS,
        tokens,
    )
    return file.read_text()


@pytest.mark.parametrize("width", [2, 4])
def test_passages_of_the_training_text_are_those_of_python(
    width: int, tokens: TokenFolder, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "id_type", lambda vocab_size: np.dtype(f"<u{width}"))
    tokenizer, generator, path = tokens.tokenizer, random.Random(1), Path("it.html").absolute()
    model = loud(GPTConfig(tokenizer.usable, 16, 1, 1, 16))
    html.write(path, source_of(model, tokenizer), "float32", NO_TEXTS, tokens)
    page, training, stream = open_page(path), TrainingText(tokens), tokens.stream("train")
    assert page.evaluate("model.can_trace")
    queries: list[tuple[list[int], int, int]] = []
    for index in range(100):
        ids: list[int] = []
        for _ in range(6):
            start = generator.randrange(len(stream))
            ids += stream.take(start, generator.randrange(min(30, len(stream) - start))).tolist()
            ids += generator.choices(range(tokenizer.usable), k=generator.randrange(3))
        if index % 2:  # Otherwise passages around document borders.
            ids = [id for id in ids if id != tokenizer.eot]
        queries.append((ids, generator.randrange(len(ids)), generator.randrange(len(ids)) if index % 2 else len(ids)))
    script = "async (all) => { const found = []; for (const each of all) found.push(await engine.trace(...each)); return found; }"
    found, expected = page.evaluate(script, queries), [training.trace(*query) for query in queries]
    for ours, theirs in zip(expected, found, strict=True):
        assert theirs == ours | {"share": None if ours["share"] is None else pytest.approx(ours["share"])}
    assert max(each["length"] for each in expected) > 20 and max(len(each["passages"]) for each in expected) == 5
    assert {passage["document"] for each in expected for passage in each["passages"]} >= {2, 5, 10}


def test_panel_shows_the_passages_around_a_token(run_folder: Path, open_page: Open, tmp_path: Path) -> None:
    api.export(run_folder, tmp_path / "run.html", dtype="float32", with_text=True)
    page = open_page(tmp_path / "run.html")
    page.fill("#text", "the cat ")
    page.fill("#max_tokens", "30")
    page.focus("#text")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#status:has-text('Stopped')")
    page.keyboard.press("Alt+ArrowDown")
    assert page.locator("#origins").is_hidden()
    page.keyboard.press("Shift+Tab")  # From the alternatives.
    page.keyboard.press("Enter")
    page.wait_for_selector("#origins li")
    assert page.get_attribute("#trace", "aria-expanded") == "true"
    trace = "const own = parts.filter((part) => part.run), { base } = own[0].run;"
    trace += "return engine.trace([...base, ...own.map((part) => part.id)], base.length + own.indexOf(parts[seen]), base.length);"
    for key in ("ArrowLeft", "ArrowLeft", "ArrowRight"):
        page.evaluate(WATCH_TRACE)
        page.keyboard.press(key)
        page.evaluate("traced")
        found = page.evaluate(f"(() => {{ {trace} }})()")
        assert [*map(str.strip, page.locator("#origins mark").all_text_contents())] == [
            passage["text"].strip() for passage in found["passages"]
        ]
        first = found["passages"][0]
        assert (
            page.locator("#origins li span").first.inner_text() == f"document {first['document']}, line {first['line']}"
        )
        assert page.text_content("#origins li q").startswith(f"…{first['before']}"[: 1 + len(first["before"])])
        assert page.locator(".token.copied").count() == page.evaluate(
            "([start, length]) => Math.min(length, start + length - parts.find((part) => part.run).run.base.length)",
            [found["start"], found["length"]],
        )
        assert f"{100 * found['share']:.2f} %" in page.inner_text("#origins")
    page.keyboard.press("Escape")
    assert page.locator("#likely").is_hidden()
    assert page.locator(".token.copied").count() == 0
    page.keyboard.press("Alt+ArrowDown")  # The panel shows passages until the alternatives are chosen.
    assert page.evaluate("document.activeElement.id") == "origins"
    page.click("#trace")
    assert page.locator("#list button").first.is_visible() and page.locator("#origins").is_hidden()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r'(class="weights">.{3000}).*', r"\1"),
        (r'(class="weights">.{2000}).', r"\1="),
        (r'(class="text">.{100}).{4}', r"\1"),
        (r'(class="text">.{100})..', r"\1Cc"),
        ('class="text"', 'class="other"'),
        ('"format":1,"bytes"', '"format":1, "bytes"'),
        ('(data-sum=").', r"\1x"),
        ('id="model-header"', 'id="other"'),
        (r"Math\.sqrt\(", "Math.cbrt("),  # In the worker.
        ("(KERNELS = .{500}).", r"\1="),
        ("const DEFAULTS = ", "const DEFAULT = "),
        (r"(script-src 'sha256-.{9}).", r"\1="),
        ("<script>", "<scrip>"),
        ("JSON.parse", "JSON parse"),
        ('id="status"', 'id="state"'),
    ],
)
def test_damaged_file_says_so(old: str, new: str, browser: Any, whole_page: str, tmp_path: Path) -> None:
    file = tmp_path / "model.html"
    text, count = re.subn(old, new, whole_page, count=1, flags=re.DOTALL)
    assert count == 1
    file.write_text(text)
    page = browser.new_page()
    page.goto(file.as_uri())
    error = page.locator(
        "#error:not([hidden])", has_text=re.compile("^This (file is|page has not started.*is) damaged", re.DOTALL)
    )
    error.wait_for(timeout=60_000)
    page.close()


def test_text_of_a_model_is_never_markup(open_page: Open, tmp_path: Path) -> None:
    name = "</script><img src=x onerror='window.taken = 1'>"
    texts = {"name": name, "facts": [name], "about": [name], "prompts": [name], "chat": None}
    html.write(tmp_path / "model.html", source_of(loud(GPTConfig(257, 40, 2, 4, 64))), "float32", texts)
    page = open_page(tmp_path / "model.html")
    assert page.text_content("h1") == name
    assert not page.evaluate("window.taken || model.can_trace")
    assert page.evaluate("document.getElementById('trace').hidden")
    assert page.locator("img").count() == 0


def test_page_has_its_title_at_once_and_shows_how_much_is_loaded(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "_PIECE_BYTES", 12 * 2**10)
    file = export(tmp_path / "model.html", loud(GPTConfig(257, 40, 2, 4, 64)))
    page = browser.new_page()
    page.add_init_script(
        "window.states = []; new MutationObserver(() => states.push([document.title, document.getElementById('status')?.textContent]))"
        ".observe(document, { childList: true, subtree: true })"
    )
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready=yes]")
    states = page.evaluate("states.filter(([, status]) => status)")
    assert {title for title, _ in states} == {"it"}
    percents = [
        int(match[1]) for _, status in states if (match := re.fullmatch("Loading the model … ([0-9]+) %", status))
    ]
    assert percents == sorted(percents)
    assert len(set(percents)) > 5
    assert page.inner_text("#status") == ""
    page.close()
