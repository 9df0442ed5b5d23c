"""Hostile command lines: their judge sees what is wrong, and `make test-more` runs some."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it forks")


def test_the_judge(tmp_path: Path) -> None:
    from tests.stress import hostile

    cwd, beside = tmp_path / "cwd", tmp_path / "beside"
    (beside / "tmp").mkdir(parents=True)
    cwd.mkdir()
    (cwd / "text.txt").write_text("mine")
    before = hostile.tree(cwd)

    def judged(status: int, out: str = "", err: str = "", *words: str) -> list[str]:
        ended = hostile.Ended(status, out, err, 0.1, False)
        return list(hostile.judge(hostile.Case([*words]), ended, cwd, beside, before))

    assert judged(2, "", "note\nerror: what is wrong\nhint: what to do\n") == []
    assert judged(-9) == ["status -9"]
    assert judged(1, "", "error: internal error in gpt: x\nhint: y\n") == ["internal error in gpt"]
    assert judged(0, "NaN\n", "", "--json") == ["stdout is not JSON"]
    (cwd / "text.txt").write_text("gone")
    (cwd / ".tmp-1-x").touch()
    assert judged(0) == ["left behind: ['.tmp-1-x']", "changed: ['text.txt']"]


@pytest.mark.more
def test_some_cases_are_run() -> None:
    command = [sys.executable, "-m", "tests.stress.hostile", "--cases", "4", "--seed", "7", "--each", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1].startswith("4 cases of seed 7 in "), done.stderr
    assert "'clean': 4" in done.stdout
