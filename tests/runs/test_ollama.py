"""ollama's store: names to files, what is reported about a Modelfile, and names that must not leave the store."""

import hashlib
import json
from pathlib import Path

import pytest
from conftest import Gpt, one_line_of_what_and_what_next

from gpt.runs import ollama
from gpt.system.errors import UserError

KIND = "application/vnd.ollama.image."


def store(place: Path, name: str, **layers: bytes) -> Path:
    """Writes a model as ollama stores it."""
    listed = []
    (place / "blobs").mkdir(parents=True, exist_ok=True)
    for kind, data in layers.items():
        digest = hashlib.sha256(data).hexdigest()
        (place / "blobs" / f"sha256-{digest}").write_bytes(data)
        listed.append({"mediaType": KIND + kind, "digest": f"sha256:{digest}", "size": len(data)})
    manifest = place / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": listed}))
    return manifest


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "models"
    monkeypatch.setenv("OLLAMA_MODELS", str(place))
    return place


def test_names_and_tags(models: Path) -> None:
    store(models, "registry.ollama.ai/library/smollm2/135m", model=b"GGUF small")
    store(models, "registry.ollama.ai/library/smollm2/latest", model=b"GGUF latest")
    store(models, "registry.ollama.ai/somebody/own/v1", model=b"GGUF own")
    store(models, "hf.co/somebody/repo/Q8_0", model=b"GGUF hub")
    found = {
        name: ollama.find(f"ollama:{name}").read_bytes()
        for name in ("smollm2:135m", "smollm2", "somebody/own:v1", "hf.co/somebody/repo:Q8_0")
    }
    assert list(found.values()) == [b"GGUF small", b"GGUF latest", b"GGUF own", b"GGUF hub"]


def test_modelfile_settings_are_reported_and_not_applied(models: Path) -> None:
    store(models, "registry.ollama.ai/library/it/latest", model=b"GGUF", params=b'{"temperature": 0.1}', template=b"{{")
    notes: list[str] = []
    ollama.find("ollama:it", notes.append)
    assert notes == ['the parameters and template of ollama:it\'s Modelfile have no effect here: {"temperature": 0.1}']


@pytest.mark.parametrize("name", ["../x", "a/../../b", "a//b", "", "/etc/passwd", "a:b:c", "a b", "x" * 100, "a:../b"])
def test_names_stay_in_the_store(name: str, models: Path) -> None:
    with pytest.raises(UserError):
        ollama.find(f"ollama:{name}")


def test_manifest_outside_the_store_is_not_read(models: Path) -> None:
    manifest = store(models, "registry.ollama.ai/library/it/latest", model=b"GGUF")
    outside = models.parent / "outside" / "latest"
    outside.parent.mkdir()
    manifest.rename(outside)
    assert (models / "manifests" / ".." / ".." / "outside" / "latest").is_file()
    with pytest.raises(UserError, match="is not the name of an ollama model"):
        ollama.find("ollama:../../outside")


@pytest.mark.parametrize(
    "manifest",
    [
        "[]", "{}", "null", '{"layers": 7}', '{"layers": [7, {"mediaType": 1, "digest": 2}]}', "{",
        json.dumps({"layers": [{"mediaType": KIND + "model", "digest": "sha256:../../../etc/passwd"}]}),
        json.dumps({"layers": [{"mediaType": KIND + "model", "digest": "sha256:" + "0" * 64}]}),
    ],
)  # fmt: skip
def test_damaged_manifest_is_an_error(manifest: str, models: Path) -> None:
    store(models, "registry.ollama.ai/library/it/latest").write_text(manifest)
    with pytest.raises(UserError):
        ollama.find("ollama:it")


def test_file_of_another_size_is_refused(models: Path) -> None:
    manifest = store(models, "registry.ollama.ai/library/it/latest", model=b"GGUF")
    (blob,) = (models / "blobs").iterdir()
    blob.write_bytes(b"GGU")
    with pytest.raises(UserError, match="ollama:it is damaged: .* has 3 bytes, not 4") as error:
        ollama.find("ollama:it")
    assert error.value.hint == "download it again: ollama pull it"
    manifest.write_text(manifest.read_text().replace('"size": 4', '"size": "3"'))
    with pytest.raises(UserError, match="has 3 bytes, not '3'"):
        ollama.find("ollama:it")


def test_unknown_model_suggests_a_known_one(models: Path, gpt: Gpt) -> None:
    store(models, "registry.ollama.ai/library/smollm2/135m", model=b"GGUF")
    result = gpt("sample", "The", "-m", "ollama:smollm:135m")
    one_line_of_what_and_what_next(result, "ollama has no model smollm:135m")
    assert "ollama:smollm2:135m" in result.err


def test_store_is_only_read(models: Path) -> None:
    store(models, "registry.ollama.ai/library/it/latest", model=b"GGUF")
    before = sorted((str(path), path.stat().st_mtime_ns) for path in models.rglob("*"))
    for folder in (models / "blobs", models):
        folder.chmod(0o555)
    try:
        assert ollama.find("ollama:it").is_file()
    finally:
        for folder in (models, models / "blobs"):
            folder.chmod(0o755)
    assert sorted((str(path), path.stat().st_mtime_ns) for path in models.rglob("*")) == before
