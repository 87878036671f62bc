"""``python -m tests.frozen.check [NAME ...]``: compute every frozen value again and list what differs.

Ends with status 1 if anything differs. Takes about a minute for each checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from tests.conftest import RELEASED
from tests.frozen.values import STORED, frozen_parts, machine


def differences(path: str, before: Any, now: Any) -> Iterator[str]:
    """Yield the places in which two JSON values differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from differences(f"{path}/{key}", before.get(key), now.get(key))
    elif before != now:
        yield f"{path}: frozen {before!r}, now {now!r}"


def main() -> int:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    if machine() != stored["machine"]:
        print(f"frozen on {stored['machine']}, this is {machine()}: bits of weights may differ")
    count = 0
    for name in sys.argv[1:] or RELEASED:
        for part, value in frozen_parts(name):
            changed = list(differences(f"{name}/{part}", stored[name][part], json.loads(json.dumps(value))))
            print(f"{name} {part}: {'as frozen' if not changed else f'{len(changed)} differences'}", flush=True)
            print("".join(f"  {line}\n" for line in changed), end="", flush=True)
            count += len(changed)
    print(f"{count} differences")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
