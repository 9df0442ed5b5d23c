"""The package: its name, extras and install hints, and that the files around it name only what exists."""

import json
import re
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, Gpt, one_line_of_what_and_what_next

from gpt import distribution

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FOR_DEVELOPERS = {"bench", "dev", "docs", "interop"}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PRE_COMMIT, CITATION = ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"


def texts() -> dict[Path, str]:
    """The project's own text files."""
    folders = (".ci", ".github", "benchmarks", "cli", "data", "docs", "gpt", "tests")
    found = [*ROOT.iterdir(), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    suffixes = {"", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
    return {path: path.read_text(encoding="utf-8") for path in found if path.suffix in suffixes and path.is_file()}


def extras_in(text: str) -> set[str]:
    """The extras that ``text`` installs, of the distribution or of a clone."""
    named = re.findall(rf"(?:{distribution.NAME}|'\.|'/src)\[([\w,-]+)\]", text)
    return {extra for names in named for extra in names.split(",")}


def included(extra: str) -> set[str]:
    """An extra and those that it brings."""
    return {extra}.union(*(included(each) for each in extras_in(" ".join(EXTRAS[extra]))))


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_distribution_has_one_name_and_one_version() -> None:
    assert (PROJECT["name"], PROJECT["version"]) == (distribution.NAME, distribution.VERSION)
    assert str(read_yaml(CITATION)["version"]) == distribution.VERSION


def test_all_brings_every_extra_of_users() -> None:
    assert included("all") == EXTRAS.keys() - FOR_DEVELOPERS


def test_extras_that_files_name_exist() -> None:
    named = {path: extras for path, text in texts().items() if (extras := extras_in(text))}
    assert {ROOT / "Dockerfile", ROOT / "Makefile"} <= named.keys()
    for path, extras in named.items():
        assert extras <= EXTRAS.keys(), path


def test_hints_in_code_come_from_one_function() -> None:
    for path, text in texts().items():
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in ("gpt", "cli"):
            assert "pip install" not in text or path.name == "distribution.py", path
            for extra in re.findall(r'install_extra\("(\w+)"\)', text):
                assert extra in EXTRAS, path


def test_hints_install_into_the_running_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = f'"{distribution.NAME}[serve]"'
    scripts = Path(sysconfig.get_path("scripts"))
    for pip, hint in {
        scripts / "pip": f"pip install {wanted}",
        Path("elsewhere", "pip"): f'"/a b/python" -m pip install {wanted}',
        None: f'"/a b/python" -m pip install {wanted}',
    }.items():
        monkeypatch.setattr(sys, "executable", "/a b/python")
        monkeypatch.setattr("shutil.which", lambda name, found=pip: found and str(found))
        assert distribution.install_extra("serve") == hint
    monkeypatch.setattr("gpt.distribution.find_spec", lambda name: None)  # as uv makes environments
    monkeypatch.setattr(sys, "prefix", "/env")
    assert distribution.install_extra("serve") == f"uv pip install --python /env {wanted}"


def test_a_bug_report_has_versions_and_the_device(gpt: Gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads(gpt("--version", "--json").out)
    assert list(report) == ["gpt", "python", "platform", "device", "packages"]
    assert (report["gpt"], report["packages"]["torch"]) == (distribution.VERSION, torch.__version__)
    assert report["device"].split(",")[0] in ("cpu", "mps") or torch.cuda.is_available()

    def broken() -> None:
        raise OSError("libtorch.so: not found")

    monkeypatch.setattr("gpt.device.pick", broken)
    monkeypatch.setattr(distribution, "NAME", "a distribution that is not installed")
    report = json.loads(gpt("--json", "--version").out)
    assert (report["device"], report["packages"]) == ("OSError: libtorch.so: not found", {})


def test_json_without_a_command_is_an_error(gpt: Gpt) -> None:
    for words in (["--json"], ["--json", "params", "gpt2"]):
        one_line_of_what_and_what_next(gpt(*words), "--json comes after a command")


def test_workflows_and_forms_are_yaml_and_name_existing_targets() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert targets
    for path in [*WORKFLOWS, *FORMS, PRE_COMMIT, CITATION]:
        assert isinstance(read_yaml(path), dict), path
        for target in re.findall(r"\bmake ([a-z-]+)", path.read_text(encoding="utf-8")):
            assert target in targets[1].split(), path
    (job,) = read_yaml(ROOT / ".github" / "workflows" / "ci.yml")["jobs"].values()
    assert PROJECT["requires-python"] == f">={job['strategy']['matrix']['python'][0]}"


def test_the_image_gets_what_the_package_is_built_from() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == {"LICENSE", "README.md", "cli", "constraints.txt", "data", "gpt", "pyproject.toml"}
    assert all((ROOT / name).exists() for name in kept)
