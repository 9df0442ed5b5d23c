"""Benchmarks with tiny models, and failing cases of the GPU benchmark."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, train

from benchmarks import gpu

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no process groups to end")


def script(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.slow
def test_gpu_benchmark_runs_without_rustbpe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One case runs in a process of its own; the others run here, since each process would import torch."""
    run_process = gpu.run

    def run(command: list[str], seconds: float, log: Path) -> Any:
        if '"system": "floors"' in " ".join(command):
            return run_process(command, seconds, log)
        capfd.readouterr()
        gpu.main(command[3:])
        return json.loads(capfd.readouterr().out.splitlines()[-1])

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setitem(sys.modules, "rustbpe", None)
    out = tmp_path / "out"
    gpu.main(["--tiny", "--out", str(out)])
    report = json.loads((out / "gpu.json").read_text())
    assert report["floors"]["measured_peak"] > 0
    assert [(row["dtype"], bool(row["error"])) for row in report["checks"]["losses"]] == [
        ("float32", False), ("bfloat16", False), ("float16", True),
    ]  # fmt: skip
    assert (report["checks"]["resumed_apart"], report["checks"]["same_text"]) == (0, True)
    assert [(case["system"], case["optimizer"]) for case in report["cases"]] == [
        ("ours", "muon"), ("ours", "adamw"), ("transformers", "adamw"), ("decoding", "adamw"),
    ]  # fmt: skip
    *trained, decoding = report["cases"]
    assert "error" not in decoding, decoding
    assert decoding["tokens_per_second"] == pytest.approx(2e3 / decoding["milliseconds_a_step"])
    assert (decoding["texts"], decoding["cuda_graphs"]) == (2, "no")
    for case in trained:
        assert "error" not in case, case
        assert case["tokens_per_second"] == pytest.approx(256 / case["seconds"][0])
        assert case["losses"][0] == pytest.approx(math.log(128), abs=0.3)  # The model is untrained.
        assert len(case["losses"]) == 4
    assert len({case["parameters"] for case in trained}) == 1
    page = (out / "gpu.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(("| `gpt", "| Transformers"))]
    assert len(rows) == 3
    assert {row.count("|") for row in rows} == {12}
    assert page.splitlines()[-1].startswith("| nano | float32 | 2 | no | ")
    assert {line.count("|") for line in page.splitlines()[-3:]} == {10}


def test_a_failing_case_reports_its_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = gpu.run(script("print('{}'); raise MemoryError('CUDA out of memory')"), 60, log)
    assert result == {"error": "exit status 1; MemoryError: CUDA out of memory"}
    assert gpu.run(script("pass"), 60, log) == {"error": "no output"}
    assert "Traceback" in log.read_text()


@pytest.mark.slow
def test_a_hanging_case_is_killed_with_its_child_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MIN_SECONDS", 0)
    beats = tmp_path / "beats"
    child = f"import time\nwhile True: open({str(beats)!r}, 'a').write('.'); time.sleep(0.01)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    while not beats.exists():  # On a busy machine, the child may start too late.
        assert gpu.run(script(code), 1, tmp_path / "log") == {"error": "not finished after 1 s"}
    before = beats.read_text()
    time.sleep(0.3)
    assert beats.read_text() == before


@pytest.mark.more
def test_decode_benchmark_compares_with_llama_cpp(text: Path) -> None:
    pytest.importorskip("xllamacpp")
    result, _ = train(text, steps=4, block_size=64)
    words = ["benchmarks.decode", result.run.resolve(), "--rounds", "1", "--only", "one", "eight", "prompt"]
    words += ["--new", "8", "--prompt", "40", "--dtypes", "float32", "int8", "--threads", "1"]
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith(("| float32", "| int8"))]
    assert [row[1] for row in rows] == ["one text", "8 texts", "a prompt of 40"] * 2, done.stderr
    assert all(
        float(row[2].replace(",", "")) for row in rows
    )  # Differences of times, which can be below 0 when so short.
    assert "AVX" in done.stdout
