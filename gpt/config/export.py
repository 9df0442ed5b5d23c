"""The settings of ``gpt export``. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from gpt.config.settings import check_options, option
from gpt.system.errors import UserError, check_text, did_you_mean

FolderDtype = Literal["float32", "bfloat16", "float16"]
PageDtype = Literal["float32", "bfloat16", "float16", "int8"]
FileType = Literal["f32", "f16", "q8_0", "q4_0"]  # GGUF's names of float32, float16, int8 and int4.
ExportDtype = Literal[FolderDtype, "int8", "int4", FileType]
PAGE_OPTIONS = ("title", "about", "prompts", "with_text")
# The Hub's license identifiers, from its model card documentation.
_LICENSES = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0
cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0
cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0
cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community h-research intel-research isc lgpl
lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by
ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0 other pddl postgresql unknown unlicense wtfpl zlib
"""
LICENSES = sorted(_LICENSES.split())


@dataclass(frozen=True)
class ExportConfig:
    """The settings of ``gpt export``. Raises `UserError` for invalid values."""

    dtype: ExportDtype | None = option(
        None, "Dtype of the weights; for a GGUF file also by GGUF's names: f32, f16, q8_0, q4_0", panel="Weights",
        shown="float16, in a page int8 above 20M parameters; in a folder float32",
    )  # fmt: skip
    license: str | None = option(
        None, "License in the model card, file or page, such as mit, apache-2.0 or other", panel="Card",
        shown="unknown", metavar="ID",
    )  # fmt: skip
    samples: int = option(
        0, "Samples in the model card; they may quote the training text", panel="Card", low=0, high=100
    )

    title: str | None = option(
        None, "Title of the page", panel="Page", shown="name of the file", metavar="TEXT", level="basic"
    )
    about: str | None = option(
        None, "Paragraph about the model on the page", panel="Page", metavar="TEXT", level="basic"
    )
    prompts: int | None = option(
        None, "Prompts to try on the page, quoted from the training text: first words of lines", panel="Page",
        shown="3", level="basic", low=0, high=3,
    )  # fmt: skip
    with_text: bool = option(
        False, "Put the whole training text into the page, which then shows where its text comes from", panel="Page",
        level="basic",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        for name, text in (("--title", self.title), ("--about", self.about)):
            check_text(name, text or "")
        if self.license is None:
            return
        object.__setattr__(self, "license", self.license.lower())  # SPDX identifiers have capitals: Apache-2.0.
        if self.license not in LICENSES:
            suggestion = did_you_mean(self.license, LICENSES)
            hint = suggestion if suggestion.startswith("did") else 'give "other", and add its name to the card by hand'
            raise UserError(f'the Hugging Face Hub has no license "{self.license}"', hint)
