"""The distribution's name and version, and commands that install missing packages."""

import contextlib
import re
import shutil
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

NAME = "gpt-workshop"
VERSION = "0.1.0"
find_spec = PathFinder.find_spec  # Bypasses import hooks: setuptools' hook warns about pip.


def install(package: str) -> str:
    """Returns the command that installs a package into the running environment."""
    if find_spec("pip") is None:
        if Path(sys.prefix, "pipx_metadata.json").exists():
            return f"pipx runpip {NAME} install {package}"
        return f"uv pip install --python {_quoted(sys.prefix)} {package}"
    if Path(shutil.which("pip") or "").parent == Path(sysconfig.get_path("scripts")):
        return f"pip install {package}"
    return f"{_quoted(sys.executable)} -m pip install {package}"  # A `pip` on PATH belongs to another environment.


def install_extra(extra: str) -> str:
    """Returns the command that installs an extra. It downloads only the extra's packages, because gpt is already
    installed."""
    return install(f'"{NAME}[{extra}]"')


def _quoted(path: str) -> str:
    return f'"{path}"' if " " in path else path


def packages() -> dict[str, str]:
    """Returns the versions of installed dependencies, extras included."""
    from importlib.metadata import PackageNotFoundError, requires, version  # Takes 20 ms.

    versions = {}
    with contextlib.suppress(PackageNotFoundError):  # A source tree has no metadata.
        for requirement in requires(NAME) or []:
            name = re.split(r"[^\w.-]", requirement)[0]
            with contextlib.suppress(PackageNotFoundError):
                versions[name] = version(name) or "unknown"  # Damaged metadata has no version.
    versions.pop(NAME, None)
    return dict(sorted(versions.items()))
