"""Read a table of multi-label images: a .csv file with a row for each image.

    file,4,even
    images/a.png,1,1
    images/b.png,0,0

The column ``file`` has paths relative to the table. Every other column is a label, with 1 for the images that have the
label and 0 for all others.
"""

from __future__ import annotations

import csv
from pathlib import Path

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.images import FileImages, Images, Label

__all__ = ["table"]

_FILE = "file"


def table(path: Path) -> Images:
    """Read a table.

    Errors: InputError when the file cannot be read, has no column ``file`` or no label, or when a row has another
    number of values, or a value other than 0 and 1.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head, *rows = [row for row in csv.reader(file) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise InputError(f"{path}: expected a .csv file: {reason}", hint="type --data table:FILE.csv") from exc
    names = [name.strip() for name in head]
    if names[:1] != [_FILE] or len(names) < 2:
        raise InputError(
            f"{path}: expected a first line with file and the labels, such as file,4,even; got {','.join(names[:4])}",
            hint="name the column of the paths file, and write a column of 0 and 1 for each label",
        )
    labels: list[Label] = []
    for number, row in enumerate(rows, 2):
        values = [value.strip() for value in row[1:]]
        if len(row) != len(names) or not set(values) <= {"0", "1"}:
            raise InputError(
                f"{path}, line {number}: expected a path and {len(names) - 1} values of 0 or 1, got "
                f"{','.join(row)[:60]}"
            )
        labels.append(tuple(index for index, value in enumerate(values) if value == "1"))
    return FileImages(str(path), [path.parent / row[0].strip() for row in rows], labels, tuple(names[1:]))
