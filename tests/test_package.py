"""The package metadata: name, versions, extras, install hints, workflows and image."""

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

from gpt.system import distribution

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DEVELOPER_EXTRAS = {"bench", "dev", "docs", "interop"}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PRE_COMMIT, CITATION = ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"


def text_files() -> dict[Path, str]:
    folders = (".ci", ".github", "benchmarks", "cli", "data", "docs", "gpt", "tests")
    paths = [*ROOT.iterdir(), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    suffixes = {"", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
    return {path: path.read_text(encoding="utf-8") for path in paths if path.suffix in suffixes and path.is_file()}


def extras_in(text: str) -> set[str]:
    """Returns the extras that ``text`` installs, from the distribution or a clone."""
    lists = re.findall(rf"(?:{distribution.NAME}|'\.|'/src)\[([\w,-]+)\]", text)
    return {extra for names in lists for extra in names.split(",")}


def with_included_extras(extra: str) -> set[str]:
    return {extra}.union(*(with_included_extras(nested) for nested in extras_in(" ".join(EXTRAS[extra]))))


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_distribution_has_one_name_and_one_version() -> None:
    assert (PROJECT["name"], PROJECT["version"]) == (distribution.NAME, distribution.VERSION)
    assert str(read_yaml(CITATION)["version"]) == distribution.VERSION


def test_extra_all_includes_every_user_extra() -> None:
    assert with_included_extras("all") == EXTRAS.keys() - DEVELOPER_EXTRAS


def test_extras_named_in_files_exist() -> None:
    extras_by_path = {path: extras for path, text in text_files().items() if (extras := extras_in(text))}
    assert {ROOT / "Dockerfile", ROOT / "Makefile"} <= extras_by_path.keys()
    for path, extras in extras_by_path.items():
        assert extras <= EXTRAS.keys(), path


def test_install_hints_come_from_one_function() -> None:
    for path, text in text_files().items():
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in ("gpt", "cli"):
            assert "pip install" not in text or path.name == "distribution.py", path
            for extra in re.findall(r'install_extra\("(\w+)"\)', text):
                assert extra in EXTRAS, path


def test_install_hints_target_the_running_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requirement = f'"{distribution.NAME}[serve]"'
    scripts = Path(sysconfig.get_path("scripts"))
    for pip, hint in {
        scripts / "pip": f"pip install {requirement}",
        Path("elsewhere", "pip"): f'"/a b/python" -m pip install {requirement}',
        None: f'"/a b/python" -m pip install {requirement}',
    }.items():
        monkeypatch.setattr(sys, "executable", "/a b/python")
        monkeypatch.setattr("shutil.which", lambda name, path=pip: path and str(path))
        assert distribution.install_extra("serve") == hint
    monkeypatch.setattr("gpt.system.distribution.find_spec", lambda name: None)  # uv creates environments without pip.
    monkeypatch.setattr(sys, "prefix", "/env")
    assert distribution.install_extra("serve") == f"uv pip install --python /env {requirement}"
    (tmp_path / "pipx_metadata.json").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert distribution.install_extra("serve") == f"pipx runpip {distribution.NAME} install {requirement}"


def test_version_json_includes_versions_and_device(gpt: Gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads(gpt("--version", "--json").out)
    assert list(report) == ["gpt", "python", "platform", "device", "packages"]
    assert (report["gpt"], report["packages"]["torch"]) == (distribution.VERSION, torch.__version__)
    assert report["device"].split(",")[0] in ("cpu", "mps") or torch.cuda.is_available()

    def broken() -> None:
        raise OSError("libtorch.so: not found")

    monkeypatch.setattr("gpt.config.device.pick", broken)
    monkeypatch.setattr(distribution, "NAME", "a distribution that is not installed")
    report = json.loads(gpt("--json", "--version").out)
    assert (report["device"], report["packages"]) == ("OSError: libtorch.so: not found", {})


def test_json_without_a_command_is_an_error(gpt: Gpt) -> None:
    for words in (["--json"], ["--json", "params", "gpt2"]):
        one_line_of_what_and_what_next(gpt(*words), "--json comes after a command")


def test_workflows_are_valid_and_use_existing_make_targets() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert targets
    for path in [*WORKFLOWS, *FORMS, PRE_COMMIT, CITATION]:
        assert isinstance(read_yaml(path), dict), path
        for target in re.findall(r"\bmake ([a-z-]+)", path.read_text(encoding="utf-8")):
            assert target in targets[1].split(), path
    (job,) = read_yaml(ROOT / ".github" / "workflows" / "ci.yml")["jobs"].values()
    assert PROJECT["requires-python"] == f">={job['strategy']['matrix']['python'][0]}"


def test_image_build_receives_only_its_inputs() -> None:
    allowed_paths = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert allowed_paths == {"LICENSE", "README.md", "cli", "constraints.txt", "data", "gpt", "pyproject.toml"}
    assert all((ROOT / name).exists() for name in allowed_paths)
