"""The settings of ``gpt export``. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from gpt.errors import UserError, did_you_mean
from gpt.settings import check_options, option

FileType = Literal["f32", "f16", "q8_0", "q4_0"]
FolderDtype = Literal["float32", "bfloat16", "float16", "int8", "int4"]


@dataclass(frozen=True)
class ExportConfig:
    """The settings of ``gpt export``. Raises `UserError` for values without a meaning."""

    type: FileType | None = option(None, "Of the matrices in a .gguf file.", panel="Weights", shown="f16")
    dtype: FolderDtype | None = option(None, "Of the weights in a folder.", panel="Weights", shown="float32")
    license: str | None = option(
        None, "The model's license, as the hub names it: mit, apache-2.0 …", panel="Card", shown="unknown"
    )
    samples: int = option(0, "Samples in the card. They may repeat what was trained on.", panel="Card", low=0, high=100)

    def __post_init__(self) -> None:
        check_options(self)
        for name, values in (("type", get_args(FileType)), ("dtype", get_args(FolderDtype))):
            value = getattr(self, name)
            if value is not None and value not in values:
                raise UserError(f'there is no {name} "{value}"', did_you_mean(value, values))
