"""What is trained on and what is held out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt.errors import UserError
from gpt.text.split import Document, split


def documents(*texts: str) -> list[Document]:
    return [Document(str(number), text) for number, text in enumerate(texts)]


@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=8), st.floats(0.01, 0.9))
def test_split_at_the_end_loses_nothing(texts: list[str], fraction: float) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    try:
        train, held_out = split(documents(*texts), fraction, 0)
    except UserError:  # too short to have two sides
        assert len("".join(texts)) < 2 / min(fraction, 1 - fraction) + 4
        return
    assert "".join(d.text for d in train) + "".join(d.text for d in held_out) == "".join(texts)
    size = sum(len(text.encode()) for text in texts)
    assert abs(sum(len(d.text.encode()) for d in held_out) - fraction * size) <= 4


def test_split_holds_out_the_end() -> None:
    train, held_out = split(documents("a" * 50, "b" * 50), 0.1, 0)
    assert [d.text for d in train] == ["a" * 50, "b" * 40]
    assert [d.text for d in held_out] == ["b" * 10]
    assert split(documents("abc"), 0, 0) == (documents("abc"), [])
    for fraction in (-0.1, 1.0, 1.5):
        with pytest.raises(UserError, match="val-fraction"):
            split(documents("abc"), fraction, 0)
    with pytest.raises(UserError, match="too short to hold 0.1 of it out: 1 character"):
        split(documents("a"), 0.1, 0)


def test_split_of_many_documents_is_by_hash() -> None:
    some = documents(*(f"document {i}" for i in range(1000)))
    train, held_out = split(some, 0.1, 7)
    assert len(train) + len(held_out) == 1000
    assert 60 < len(held_out) < 140
    more_train, more_held_out = split([*documents(*(f"new {i}" for i in range(500))), *some], 0.1, 7)
    assert {d.text for d in held_out} <= {d.text for d in more_held_out}  # adding documents moves none
    assert {d.text for d in train} <= {d.text for d in more_train}
    assert len(split(some, 1e-9, 7)[1]) == 1  # never nothing
    assert {d.text for d in split(some, 0.1, 8)[1]} != {d.text for d in held_out}
