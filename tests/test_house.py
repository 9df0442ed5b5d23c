"""Architecture and packaging: import direction, listed packages and modules, and the wheel."""

import ast
import graphlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_imports_respect_layers() -> None:
    from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == EXIT_STATUS_SUCCESS


def modules() -> dict[str, Path]:
    paths = {}
    for folder, package in (("gpt", "gpt"), ("cli", "gpt_cli")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            paths[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return paths


def imported_modules(name: str, path: Path, known: Collection[str]) -> Iterator[str]:
    """Yields the ``known`` modules that a module imports, including inside functions and under TYPE_CHECKING."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            parent_parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parent_parts, *([node.module] if node.module else [])])
            submodules = [f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in known]
            yield from submodules
            if base in known and len(submodules) < len(node.names):
                yield base


def test_no_import_cycle_even_inside_functions() -> None:
    all_modules = modules()
    graph = {name: set(imported_modules(name, path, all_modules)) - {name} for name, path in all_modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}")


def test_pyproject_lists_every_package() -> None:
    tree = {path.parent.relative_to(ROOT) for top in ("gpt", "cli") for path in (ROOT / top).rglob("__init__.py")}
    packages = {re.sub(r"^cli\b", "gpt_cli", ".".join(path.parts)) for path in tree}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages | {"gpt_data"}


def test_every_room_says_what_it_is_for() -> None:
    for path in [*(ROOT / "gpt").glob("*/__init__.py"), *(ROOT / "cli").glob("*/__init__.py")]:
        (docstring,) = ast.parse(path.read_text(encoding="utf-8")).body
        assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant), path


def test_house_page_lists_every_module() -> None:
    page = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## `((?:gpt|cli)/(?:\w+/)?)`: (.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    listed = {
        f"{folder}{name}.py"
        for folder, section in sections
        for cell in re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    }
    tree = {path.relative_to(ROOT).as_posix() for top in ("gpt", "cli") for path in (ROOT / top).rglob("*.py")}
    assert listed <= tree
    assert {path for path in tree if path.startswith("gpt/") and not path.endswith("__init__.py")} <= listed
    for name in re.findall(r"`((?:benchmarks|cli|data|docs|gpt|tests)/[\w./-]*)`", page):
        assert (ROOT / name).exists(), name


def test_dependencies_are_unpinned_constrained_and_documented() -> None:
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in pinned if line and line[0] != "#")
    docs = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    extras = PROJECT["project"]["optional-dependencies"]
    for requirement in [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["bench"]]:
        name = re.split(r"[\[<>=]", requirement)[0]
        assert "==" not in requirement
        assert name == "gpt-workshop" or (name in pins and f"`{name}`" in docs), name


def test_catalogue_page_lists_every_corpus() -> None:
    table = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "data").glob("*.toml"):
        assert f"`{path.stem}`" in table
        assert {"title", "license", "source"} <= set(tomllib.loads(path.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    copy = out / "source"  # Setuptools would leave build/ and an egg-info in ROOT.
    copy.mkdir()
    for name in ("gpt", "cli", "data"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(out.glob("*.whl"))


def test_wheel_contains_only_our_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"gpt", "gpt_cli", "gpt_data"}
    expected = {
        *(str(p.relative_to(ROOT)) for p in (ROOT / "gpt").rglob("*.py")),
        "gpt/py.typed",
        *(f"gpt/decoding/{p.name}" for p in (ROOT / "gpt" / "decoding").glob("*.[ch]")),
        *(f"gpt/playground/{p.name}" for p in (ROOT / "gpt" / "playground").iterdir() if p.is_file()),
        *(f"gpt_{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "cli").rglob("*.py")),
        *(f"gpt_cli/pages/{p.name}" for p in (ROOT / "cli" / "pages").iterdir()),
        *(f"gpt_data/{p.name}" for p in (ROOT / "data").iterdir() if p.suffix in (".py", ".toml")),
    }
    assert {name for name in names if ".dist-info" not in name} == {name.replace(os.sep, "/") for name in expected}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_installs_and_runs(wheel: Path, tmp_path: Path) -> None:
    """Installs into a new environment that uses this environment's dependencies."""
    venv.create(tmp_path / "env", with_pip=False)
    folder = "Scripts" if sys.platform == "win32" else "bin"
    python = tmp_path / "env" / folder / "python"
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    Path(site.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q"]
    subprocess.run([*pip, str(wheel)], check=True)
    gpt = tmp_path / "env" / folder / "gpt"
    result = subprocess.run([gpt, "--version"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout == f"gpt {PROJECT['project']['version']}\n"
    location = subprocess.check_output([python, "-c", "import gpt; print(gpt.__file__)"], text=True, cwd=tmp_path)
    assert str(tmp_path) in location
    output = subprocess.check_output([gpt, "params", "gpt2", "--json"], text=True, cwd=tmp_path)
    assert '"trainable": 124439808' in output


def test_versions_agree() -> None:
    import gpt

    assert PROJECT["project"]["version"] == gpt.__version__
    assert f"## {gpt.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
