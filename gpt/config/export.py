"""The settings of ``gpt export``. Imports no torch."""

import re
from dataclasses import dataclass
from typing import Literal

from gpt.config.settings import check_options, option
from gpt.system.errors import UserError, check_text

FolderDtype = Literal["float32", "bfloat16", "float16"]
PageDtype = Literal["float32", "bfloat16", "float16", "int8"]
FileType = Literal["f32", "f16", "q8_0", "q4_0"]  # GGUF's names of float32, float16, int8 and int4.
ExportDtype = Literal[FolderDtype, "int8", "int4", FileType]
PAGE_OPTIONS = ("title", "about", "prompts", "with_text")


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
        if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            message = f'"{self.license}" is not a license identifier'
            raise UserError(message, "such as mit or apache-2.0; give other, and add its name to the card by hand")
