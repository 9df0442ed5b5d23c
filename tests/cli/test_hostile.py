"""The stress test of hostile command lines."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it forks")


def test_judge_finds_violations(tmp_path: Path) -> None:
    from tests.stress import hostile

    cwd, scratch = tmp_path / "cwd", tmp_path / "beside"
    (scratch / "tmp").mkdir(parents=True)
    cwd.mkdir()
    (cwd / "text.txt").write_text("mine")
    before = hostile.snapshot(cwd)

    def find_faults(status: int, out: str = "", err: str = "", *words: str) -> list[str]:
        result = hostile.Result(status, out, err, 0.1, False)
        return list(hostile.judge(hostile.Case([*words]), result, cwd, scratch, before))

    assert find_faults(2, "", "note\nerror: what is wrong\nhint: what to do\n") == []
    assert find_faults(-9) == ["status -9"]
    assert find_faults(1, "", "error: internal error in gpt: x\nhint: y\n") == ["internal error in gpt"]
    assert find_faults(0, "NaN\n", "", "--json") == ["stdout is not JSON"]
    (cwd / "text.txt").write_text("gone")
    (cwd / ".tmp-1-x").touch()
    assert find_faults(0) == ["left behind: ['.tmp-1-x']", "changed: ['text.txt']"]


@pytest.mark.more
def test_hostile_cases_have_no_violations() -> None:
    command = [sys.executable, "-m", "tests.stress.hostile", "--cases", "4", "--seed", "7", "--each", "3"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.stdout.splitlines()[-1].startswith("4 cases of seed 7 in "), result.stderr
    assert "'clean': 4" in result.stdout
