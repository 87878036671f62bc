"""Names and texts state the noun: no identifier is called `found`, no message ends in "cannot be had"."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = {"found", "wanted", "told", "says", "said"}
"""Words that no part of an identifier may be."""
OTHERS = {"FileNotFoundError", "ModuleNotFoundError", "NOT_FOUND", "PackageNotFoundError"}
"""Names of other libraries."""
PHRASES = {
    r"\bcannot be had\b": "is not available",
    r"\b(was|were|is|are) wanted\b": "expected",
    r", found (also|none|nothing|\{)": "expected …, got …",
    r"\btold (to|apart|by|from)\b": "asked to, distinguished",
    r"\b([Tt]hat|[Ii]t|[Tt]here) (is|are) none\b": "the noun: there is no …",
    r"\bnobody (said|says)\b": "is not stated",
    r"\bbrings? (it|this file|them) along\b|\bgo(es)? along into\b": "is copied with",
}
"""Regular expression of a phrase that readers had to read twice → how to write it."""


def _tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split() if name != "tests/test_words.py"]


@cache
def _tokens(path: Path) -> tuple[tokenize.TokenInfo, ...]:
    with io.StringIO(path.read_text(encoding="utf-8")) as source:
        return tuple(tokenize.generate_tokens(source.readline))


def unclear_name(name: str) -> bool:
    """Return whether an identifier is `one`, or has one of the words as a part."""
    parts = {part.lower() for part in re.split(r"_|(?<=[a-z0-9])(?=[A-Z])", name)}
    return name not in OTHERS and (name == "one" or bool(parts & WORDS))


def unclear_phrases(text: str) -> list[str]:
    """Return each phrase of the text that has a plainer form, with that form."""
    matches = ((re.search(pattern, text), plain) for pattern, plain in PHRASES.items())
    return [f"{match.group()!r}: rather {plain!r}" for match, plain in matches if match]


def test_names_name_the_thing() -> None:
    places = [
        f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}"
        for path in _tracked("*.py")
        for token in _tokens(path)
        if token.type == tokenize.NAME and unclear_name(token.string)
    ]
    assert places == []


def test_texts_use_the_plain_phrase() -> None:
    texts = [
        (path, token.start[0], token.string)
        for path in _tracked("*.py")
        for token in _tokens(path)
        if token.type in (tokenize.STRING, tokenize.COMMENT)
    ]
    pages = [page for page in _tracked("*.md") if page.name != "CHANGELOG.md"]
    texts += [(path, n, line) for path in pages for n, line in enumerate(path.read_text("utf-8").splitlines(), 1)]
    places = [
        f"{path.relative_to(ROOT)}:{line}: {phrase}" for path, line, text in texts for phrase in unclear_phrases(text)
    ]
    assert places == []


@pytest.mark.parametrize("name", ["one", "found", "_FOUND", "wanted_class", "test_it_says_so", "FoundLayer"])
def test_a_name_without_its_noun_is_seen(name: str) -> None:
    assert unclear_name(name)


@pytest.mark.parametrize("name", ["batch_of_one", "ones_like", "FileNotFoundError", "foundation", "layers"])
def test_numbers_and_other_libraries_are_left_alone(name: str) -> None:
    assert not unclear_name(name)


@pytest.mark.parametrize("text", ["runner x cannot be had: why", "{path}: a graph was wanted", "expected y, found {z}"])
def test_a_phrase_with_a_plain_form_is_seen(text: str) -> None:
    assert unclear_phrases(text)
