"""The sampling settings that a model recommends, from ``generation_config.json`` or a GGUF file's metadata."""

import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpt.config.sample import SampleConfig
from gpt.runs import folder
from gpt.system.errors import UserError
from gpt.system.files import read_json
from gpt.system.gguf_header import header, is_gguf

FILE = "generation_config.json"
NAMES = {  # Names in llama.cpp and Transformers → names in `SampleConfig` and in requests.
    "temp": "temperature", "penalty_repeat": "repetition_penalty", "no_repeat_ngram_size": "no_repeat_ngram",
}  # fmt: skip
_DRAWN = ("temperature", "top_k", "top_p", "min_p")  # Settings without effect on greedy decoding and beam search.
_SUPPORTED = (*_DRAWN, "repetition_penalty", "no_repeat_ngram")
_UNSUPPORTED = (
    "num_beams", "typical_p", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "guidance_scale", "sequence_bias",
    "encoder_repetition_penalty", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "xtc_probability",
    "mirostat", "penalty_last_n", "sequence",
)  # fmt: skip


@dataclass(frozen=True)
class SamplingDefaults:
    """The settings that a model recommends, and the file that has them."""

    settings: dict[str, Any] = field(default_factory=dict)
    source: str = FILE

    def apply(
        self, config: SampleConfig, given: Collection[str], note: Callable[[str], None] = lambda text: None
    ) -> SampleConfig:
        """Returns ``config`` with the model's settings, except those in ``given``. Calls ``note`` with them."""
        names = [name for name in self.settings if name not in given and (config.draws or name not in _DRAWN)]
        if names:
            note(self.describe(names))
        return replace(config, **{name: self.settings[name] for name in names})

    def describe(self, names: Collection[str]) -> str:
        """Returns a line with the settings in ``names``."""
        settings = [f"{name.replace('_', '-')} {self.settings[name]:.15g}" for name in names]
        return f"sampling defaults from {self.source}: {', '.join(settings)}"

    def transformers_values(self) -> dict[str, Any]:
        """Returns the entries of ``generation_config.json``."""
        values = dict(self.settings)
        if "temperature" in values:
            draws = values["temperature"] > 0
            values = {"do_sample": draws, **{name: v for name, v in values.items() if draws or name not in _DRAWN}}
        return {"no_repeat_ngram_size" if name == "no_repeat_ngram" else name: v for name, v in values.items()}


NO_DEFAULTS = SamplingDefaults()


def read_defaults(path: Path, note: Callable[[str], None] = lambda text: None) -> SamplingDefaults:
    """Returns the settings that the checkpoint at ``path`` recommends. An adapter without any inherits its base
    model's. Calls ``note`` for each setting that cannot be used. Raises `UserError` for a damaged file."""
    for current in folder.lineage(path):
        settings, source, stored = dict[str, Any](), FILE, {}
        if is_gguf(current):
            source, stored = current.name, _read_gguf(current)
        elif (current / FILE).is_file():
            stored = {NAMES.get(key, key): value for key, value in read_json(current / FILE).items()}
        for name in (*_SUPPORTED, "do_sample", *_UNSUPPORTED):
            try:
                settings |= _convert(name, stored.get(name), settings)
            except UserError as error:
                note(f"ignored in {source}: {error.message:.160}")
        if settings:
            return SamplingDefaults(settings, source)
    return NO_DEFAULTS


def _read_gguf(path: Path) -> dict[str, Any]:
    """Returns the settings in a GGUF file. In llama.cpp, temperature 0 is greedy."""
    stored, metadata = dict[str, Any](), header(path).metadata
    for key, value in metadata.items():
        name = key.removeprefix("general.sampling.")
        if name != key:  # Seven digits restore 0.6 from the float32 0.60000002.
            value = float(f"{value:.7g}") if isinstance(value, float) else value
            stored[NAMES.get(name, name)] = value if isinstance(value, str | float | int) else repr(value)
    if stored.get("penalty_last_n") == metadata.get(f"{metadata.get('general.architecture')}.context_length"):
        stored.pop("penalty_last_n", None)  # The penalty applies to the whole text, as in `gpt`.
    return stored


def _convert(name: str, value: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that an entry of the file changes. Raises `UserError` for a value that cannot be used."""
    if value is None or (name in _UNSUPPORTED and value in (0, 1, -1, "", [], {})):
        return {}
    if name == "do_sample" and type(value) is bool:  # Transformers' temperature is 1.
        return {"temperature": settings.get("temperature", 1.0) if value else 0.0}
    if name not in _SUPPORTED:
        raise UserError(f"{name} is {reprlib.repr(value)}, which gpt does not support")
    if type(value) is float and value.is_integer() and name in ("top_k", "no_repeat_ngram"):
        value = int(value)
    if (name, str(value)) == ("top_k", "-1"):
        value = 0
    SampleConfig(**{name: value})  # Checks the value.
    return {name: value or 1e-9 if name == "top_p" else value}  # In `SampleConfig`, a top_p of 0 is off.
