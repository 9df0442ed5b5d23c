"""Teachers: other models whose probabilities a run learns from (Hinton et al. 2015, arXiv 1503.02531)."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from gpt.config import TrainConfig
from gpt.device import Compute
from gpt.errors import UserError
from gpt.model.decoder import GPT
from gpt.runs import checkpoint, folder
from gpt.text.tokenizer import Tokenizer
from gpt.training.finetune import InitCheckpoint

TEACHERS = "teachers"  # subfolder of the run folder, for the runs of its own teachers


class Teachers:
    """Teachers on a device, without gradients or dropout. ``found`` are their checkpoints."""

    def __init__(self, found: Sequence[InitCheckpoint], compute: Compute) -> None:
        self.found, self.compute = found, compute
        self.shapes = [teacher.model for teacher in found]

    @cached_property
    def models(self) -> list[GPT]:
        """The models, loaded on first use. Their weights are in bfloat16 if the run computes in it."""
        dtype = torch.bfloat16 if self.compute.dtype == torch.bfloat16 else torch.float32
        models = [checkpoint.load(each.path, self.compute.device, dtype=dtype).model.to(dtype) for each in self.found]
        return [model.eval().requires_grad_(False) for model in models]

    @torch.no_grad()
    def __call__(self, x: Tensor) -> list[Tensor]:
        """Computes each teacher's residual stream for ids x, (rows, T). Returns the streams, (rows, T, C), each with
        its teacher's unembedding, (V, C). The loss turns them into probabilities, a chunk at a time."""
        with self.compute.autocast():
            pairs = [(model.trunk(x).contiguous(), model.unembedding.detach()) for model in self.models]
        return [tensor for pair in pairs for tensor in pair]


def find_teacher(name: str) -> InitCheckpoint:
    """Returns the teacher that ``name`` names. Raises `UserError` if there is none."""
    path = folder.find_checkpoint(name)
    return InitCheckpoint(name, path, *checkpoint.peek(path), folder.weight_checksums(path))


def own_teachers(run: Path, config: TrainConfig) -> list[InitCheckpoint]:
    """Returns the teachers that the run trained itself. Raises `UserError` if one is missing or damaged."""
    return [find_teacher(str(run / TEACHERS / str(number))) for number in range(1, config.teachers + 1)]


def whole_run(path: Path) -> Path:
    """Returns the run that the run at ``path`` is a part of: for a run's own teacher, that run."""
    return path.parent.parent if path.parent.name == TEACHERS and folder.is_run(path.parent.parent) else path


def choose_tokenizer(
    config: TrainConfig, init: InitCheckpoint | None, teachers: Sequence[InitCheckpoint]
) -> Tokenizer | None:
    """Returns the tokenizer of the base model, or of the first teacher unless the user chose one."""
    if init is not None:
        return init.tokenizer
    return teachers[0].tokenizer if teachers and config.tokenizer == "auto" and config.vocab_size is None else None


def check_tokenizers(teachers: Sequence[InitCheckpoint], tokenizer: Tokenizer) -> None:
    """Raises `UserError` for a teacher with another tokenizer than the run's."""
    for teacher in teachers:
        if not tokenizer.is_same_as(teacher.tokenizer) or tokenizer.usable > teacher.model.vocab_size:
            raise UserError(
                f"the teacher {teacher.name} has another tokenizer ({teacher.tokenizer.name}, "
                f"{teacher.tokenizer.usable:,} ids) than the run ({tokenizer.name}, {tokenizer.usable:,} ids)",
                f"the run and all of its teachers need the same one: --tokenizer {teacher.path}",
            )
