"""The model card of an exported folder: ``README.md``, as the hub reads it."""

from dataclasses import dataclass, field

from gpt.export.source import SourceModel


@dataclass(frozen=True)
class Facts:
    """What a card says beside what the checkpoint itself does."""

    dtype: str
    license: str | None = None
    losses: tuple[float, float] | None = None  # before and after, nats a token
    measured_on: str | None = None  # the name of the text, without its folder
    samples: list[str] = field(default_factory=list)


def card(source: SourceModel, facts: Facts) -> str:
    """The card's text. It names no path, user or host of this machine."""
    return f"---\nlicense: {facts.license or 'unknown'}\n---\n\n# {source.config.layout}\n"
