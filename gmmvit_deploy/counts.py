"""Write a count with its noun."""


def counted(count: int, noun: str) -> str:
    """Return ``1 image`` or ``2,000 images``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"
