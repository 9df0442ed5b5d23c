"""What is said of numbers."""


def counted(n: int, one: str, many: str = "") -> str:
    """``1 step``, ``2,000 steps``; ``many`` is the plural where it is not ``one`` and an s."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"
