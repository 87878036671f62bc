"""Names of classes as text: the one form in which names are compared, and the files that list them.

Every text that names a class passes `clean_name`: labels of options, files and checkpoints, class folders, columns of
tables, thresholds and manifests. macOS stores ``é`` as two characters (Unicode's NFD), and keyboards type one (NFC):
both are the same name. Characters without width, and the several kinds of space, also make names differ that look the
same.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from gmmvit_deploy.errors import InputError

_WITHOUT_WIDTH = re.compile(r"[\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff]")
"""Characters that no reader sees, such as zero width space and byte order mark. U+200C and U+200D are kept: they change
how Persian and Indic words and emoji look.
"""
_SPACE = re.compile(r"[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
"""The spaces of Unicode beside U+0020, such as the no-break space."""
_INDEX_FIRST = re.compile(r"""[\[(#"']?(\d{1,999})["'\])]?\s*([,;:=\t]|[.)|-]\s|\s)\s*(.+)""")
_INDEX_LAST = re.compile(r"""(.+?)\s*([,;:=\t]|\s)\s*["']?(\d{1,999})["']?""")
_MARKED = re.compile(r"""["'{].*|\[\s*["'].*|[-*]\s.*|.*[,;]""")
"""A name with the marks of a list around it, as in JSON, YAML and program text."""
_QUOTED = re.compile(r"""(["'])(.*)\1,?""")
_HINT = "write the name of each class on a line, in the order of the class index, or a JSON list of the names"


def clean_name(text: str, source: str) -> str:
    """Return a name in Unicode's NFC, without characters that have no width and without spaces around it.

    source: where the name was read.  Errors: InputError when it is empty, not UTF-8, or has a control character.
    """
    name = unicodedata.normalize("NFC", _visible(text)).strip()
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise InputError(
            f"{source}: expected names in UTF-8, got {name!a}",
            hint="write labels in UTF-8, such as in a file for --labels; give class folders names in UTF-8",
        )
    if not name or any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in name):
        raise InputError(
            f"{source}: names must not be empty, or contain a line break or a control character, got {name!a}",
            hint=_HINT,
        )
    return name


def _visible(text: str) -> str:
    """Return a text without characters that have no width, and with U+0020 in place of every other space."""
    return _SPACE.sub(" ", _WITHOUT_WIDTH.sub("", text))


def shown_names(names: Iterable[str]) -> str:
    """Return names for an error, those beyond ASCII also as code points: two names can look the same."""
    return ", ".join(name if name.isascii() else f"{name} ({name!a})" for name in names)


def text_from_bytes(data: bytes, source: str) -> str:
    """Decode a text file.  Errors: InputError when the file is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise InputError(
            f"{source}: the file is not UTF-8 text",
            hint="convert the file, such as with iconv -f latin1 -t utf-8, or -f utf-16",
        ) from exc


def names_from_text(text: str, source: str, *, separator: str = "") -> tuple[str, ...]:
    """Return the names of the classes in the order of the class index.

    text: a name on each line; an index with each name (``0 cat``, ``0,cat`` or ``cat,0``, with any of ``,;:=`` or a tab
    or space between them); or JSON: a list of names, or an object index → name or name → index, also below ``id2label``
    or ``label2id``.  separator: what separates the names in place of the lines.
    Errors: InputError when the indices are not those from 0 on, or the list cannot be read.
    """
    text = _visible(text)
    content = text.strip()
    if content[:1] + content[-1:] in ("[]", "{}"):
        return tuple(clean_name(name, source) for name in _from_json(content, source))
    lines = [line.strip() for line in (text.split(separator) if separator else text.splitlines())]
    lines = lines if separator else [line for line in lines if line]
    names = _without_indices(lines, source)
    if len(names) > 1 and all(map(_MARKED.fullmatch, names)):
        raise InputError(
            f"{source}: expected a name on each line, got lines with the marks of a list: {names[0]}", hint=_HINT
        )
    return tuple(clean_name(name, source) for name in names)


def _without_indices(lines: Sequence[str], source: str) -> list[str]:
    """Return the names in the order of their indices; the lines, if they do not all have an index.

    Lines such as ``class 0`` and ``class 1``, whose rest is the same, are names, and so are ``1 star`` and ``2 stars``
    after ``0 stars``: only a space is between, and rests are repeated.
    """
    for pattern, index, name in ((_INDEX_FIRST, 1, 3), (_INDEX_LAST, 3, 1)):
        # A table may begin with the names of its columns.
        rows = lines[1:] if len(lines) > 1 and not re.search(r"\d", lines[0]) else lines
        found = [pattern.fullmatch(row) for row in rows]
        pairs = [(int(match[index]), _QUOTED.sub(r"\2", match[name])) for match in found if match]
        distinct = len({name for _, name in pairs})
        only_spaces = all(match and match[2] == " " for match in found)
        if len(pairs) != len(rows) or (distinct < len(pairs) and (distinct == 1 or only_spaces)):
            continue
        if rows is not lines and not all(match and match[2] in ",;\t" for match in found):
            continue
        in_order = sorted(pairs)
        if [number for number, _ in in_order] == list(range(len(pairs))):
            columns = [
                match[0]
                for match in found
                if match and match[2] in ",;\t" and match[2] in match[name] and not _QUOTED.fullmatch(match[name])
            ]
            if columns:
                raise InputError(
                    f"{source}: expected an index and a name on each line, got further columns: {columns[0]}",
                    hint="leave the index and the name; put the name in quotes if the separator belongs to it",
                )
            return [name for _, name in in_order]
        if pattern is _INDEX_FIRST or all(match and match[2] in ",;\t" for match in found):
            raise InputError(
                f"{source}: expected the indices 0 to {len(pairs) - 1}, each once, beside the names, got "
                f"{', '.join(str(number) for number, _ in pairs[:5])}{', …' if len(pairs) > 5 else ''}",
                hint="number the classes from 0; if the numbers are parts of the names, write a JSON list of the names",
            )
    return list(lines)


def _from_json(content: str, source: str) -> list[str]:
    try:
        data = json.loads(content, object_pairs_hook=_distinct)
        if isinstance(data, dict):
            data = data.get("id2label") or data.get("label2id") or data
            if all(type(value) is int for value in data.values()):
                data = {value: key for key, value in data.items()}
            elif not all(key.isdecimal() for key in data):
                raise ValueError("an object with other values than an index for each name")
            data = [data[index] for index in _in_order(data)]
        if not all(isinstance(name, str) for name in data):
            raise ValueError(f"{json.dumps(next(name for name in data if not isinstance(name, str)))[:40]} for a name")
    except (ValueError, AttributeError, TypeError, RecursionError) as exc:
        raise InputError(
            f"{source}: expected JSON with a list of names, or with the index of each name from 0 on, got {exc}",
            hint=_HINT,
        ) from exc
    return list(data)


def _in_order(data: dict[Any, Any]) -> list[Any]:
    keys = sorted(data, key=int)
    if [int(key) for key in keys] != list(range(len(keys))):
        raise ValueError(f"the indices {', '.join(map(str, keys[:5]))}{', …' if len(keys) > 5 else ''}")
    return keys


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same key twice")
    return found
