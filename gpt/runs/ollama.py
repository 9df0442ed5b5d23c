"""Finds models in ollama's store: ``ollama:NAME:TAG`` → a GGUF file. Never writes to the store."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt.system.errors import UserError, did_you_mean
from gpt.system.files import in_home, read_json, read_regular, reading

PREFIX = "ollama:"
MAX_TEXT = 2**20  # Maximum bytes of a Modelfile's parameters.
_PART = re.compile(r"[A-Za-z0-9_][\w.-]{0,79}", re.ASCII)
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_KIND = "application/vnd.ollama.image."
_IGNORED = {"params": "parameters", "template": "template", "system": "system message", "adapter": "adapter"}


def is_ollama(model: str | None) -> bool:
    """Whether a model's name is one of ollama's."""
    return model is not None and model.startswith(PREFIX)


def stores() -> list[Path]:
    """Returns ollama's model folders: ``OLLAMA_MODELS``, or the folders of the user and the system service."""
    chosen = os.environ.get("OLLAMA_MODELS")
    if chosen:
        return [Path(chosen)]
    return [in_home(".ollama/models"), Path("/usr/share/ollama/.ollama/models"), Path("/var/lib/ollama/models")]


def find(model: str, note: Callable[[str], None] = lambda text: None) -> Path:
    """Returns the GGUF file of ``ollama:NAME``, ``ollama:NAME:TAG`` or ``ollama:USER/NAME:TAG``. Calls ``note`` with
    the Modelfile settings that have no effect. Raises `UserError` if ollama does not have the model."""
    name, _, tag = model.removeprefix(PREFIX).partition(":")
    parts = [*(["library"] if "/" not in name else []), *name.split("/"), tag or "latest"]
    if not all(map(_PART.fullmatch, parts)) or len(parts) > 4:
        raise UserError(f'"{model}" is not the name of an ollama model', "ollama:NAME:TAG, as `ollama list` prints it")
    host = [] if len(parts) == 4 else ["registry.ollama.ai"]
    for store in stores():
        manifest = store.joinpath("manifests", *host, *parts)
        if _exists(manifest):
            return _model_file(store, read_json(manifest), model, note)
    raise UserError(
        f"ollama has no model {name}:{parts[-1]} here", did_you_mean(model, known()) if known() else _hint()
    )


def _hint() -> str:
    return f"download it: ollama pull NAME; or set OLLAMA_MODELS (looked in {stores()[0]})"


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # The folder belongs to another user.
        return False


def known() -> list[str]:
    """Returns the names of all models in the stores."""
    found = []
    for store in stores():
        try:
            manifests = sorted((store / "manifests" / "registry.ollama.ai").glob("*/*/*"))
        except OSError:
            continue
        found += [f"{PREFIX}{'/'.join(path.parts[-3:-1]).removeprefix('library/')}:{path.name}" for path in manifests]
    return found


def _model_file(store: Path, manifest: Any, model: str, note: Callable[[str], None]) -> Path:
    layers = manifest.get("layers")
    blobs, sizes = dict[str, Path](), dict[str, Any]()
    for layer in layers if isinstance(layers, list) else []:
        kind, digest = (layer.get(key) if isinstance(layer, dict) else None for key in ("mediaType", "digest"))
        match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
        if isinstance(kind, str) and kind.startswith(_KIND) and match:
            blobs.setdefault(kind.removeprefix(_KIND), store / "blobs" / f"sha256-{match[1]}")
            sizes.setdefault(kind.removeprefix(_KIND), layer.get("size"))
    if "model" not in blobs or not _exists(blobs["model"]):
        raise UserError(f"the files of {model} are not in ollama's store {store}", "download it again: ollama pull")
    size = blobs["model"].stat().st_size  # Checking the sha256, as ollama does after a download, would take seconds.
    if size != sizes["model"]:
        what = f"{blobs['model']} has {size:,} bytes, not {sizes['model']!r:.40}"
        raise UserError(f"{model} is damaged: {what}", f"download it again: ollama pull {model.removeprefix(PREFIX)}")
    ignored = [what for kind, what in _IGNORED.items() if kind in blobs]
    if ignored:
        more = ""
        if "params" in blobs and _exists(blobs["params"]):
            with reading(blobs["params"]):
                more = f": {' '.join(read_regular(blobs['params'], MAX_TEXT).decode(errors='replace').split())[:200]}"
        note(f"the {' and '.join(ignored)} of {model}'s Modelfile have no effect here{more}")
    return blobs["model"]
