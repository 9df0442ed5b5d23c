"""The notebook docs/model.ipynb is valid and runs, and its steps equal the model's."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

NOTEBOOK = json.loads((ROOT / "docs" / "model.ipynb").read_text(encoding="utf-8"))


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_notebook_is_valid_and_has_no_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert NOTEBOOK["metadata"]["language_info"] == {"name": "python"}
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for cell in NOTEBOOK["cells"]:
        assert re.fullmatch(r"[\w-]{1,64}", cell["id"])
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        code = {"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {}
        assert cell == {key: cell[key] for key in ("cell_type", "id", "metadata", "source")} | code
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", "\n".join(map(source, NOTEBOOK["cells"])))
    for link in links:
        assert (ROOT / "docs" / link).exists(), link


@pytest.mark.slow
def test_notebook_runs(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    try:
        for cell in NOTEBOOK["cells"]:
            if cell["cell_type"] == "code":
                exec(compile(source(cell), cell["id"], "exec"), names)
    finally:
        torch.set_grad_enabled(True)
    assert capsys.readouterr().out.count("equal to the model's") >= 10
