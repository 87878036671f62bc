"""Write the list of commands, and that of the functions of the Python API, into their pages.

    python docs/lists.py            prints both lists
    python docs/lists.py --write    replaces the lists between their markers

The built site has the full reference below each list; the lists are for readers of the Markdown files.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from typer.main import get_command

import gmmvit_deploy
from gmmvit_cli.commands import JOBS
from gmmvit_cli.main import app

PAGES = Path(__file__).parent / "pages"
_EVERY = {"--json", "--force", "--quiet", "--verbose"}


def command_list() -> str:
    """Return Markdown: every command by job, with its purpose and the names of its options."""
    root: Any = get_command(app)
    lines = []
    for job, commands in JOBS.items():
        lines += [f"**{job}**", ""]
        for name, purpose in commands.items():
            parameters = root.get_command(None, name).params
            arguments = [p.name.upper() for p in parameters if p.param_type_name == "argument"]
            options = [f"`{option}`" for p in parameters for option in p.opts[-1:] if option not in _EVERY]
            usage = " ".join(["gmmvit", name, *arguments])
            lines.append(f"- `{usage}`: {purpose} {', '.join(o for o in options if o.startswith('`--'))}")
        lines.append("")
    return "\n".join(lines[:-1])


def api_list(page: str) -> str:
    """Return Markdown: the names of the package's face, then what else the page has a reference of."""
    lines = ["In `gmmvit_deploy`:", ""]
    lines += [_item(name, getattr(gmmvit_deploy, name)) for name in sorted(gmmvit_deploy.__all__)]
    lines += ["", "In its modules:", ""]
    for module, name in re.findall(r"^::: (\S+)\.(\w+)$", page, re.MULTILINE):
        value = getattr(importlib.import_module(module), name)
        if inspect.isfunction(value) and name not in gmmvit_deploy.__all__:
            lines.append(_item(f"{module.removeprefix('gmmvit_deploy.')}.{name}", value))
    return "\n".join(lines)


def _item(name: str, value: Any) -> str:
    """Return a list item with the first sentence of the docstring."""
    paragraph = (inspect.getdoc(value) or "").partition("\n\n")[0]
    sentence = " ".join(paragraph.split()).partition(". ")[0].removesuffix(".").replace("``", "`")
    return f"- `{name}`: {sentence}."


def written(name: str) -> str:
    """Return the text of a page with its current list."""
    text = (PAGES / name).read_text(encoding="utf-8")
    current = command_list() if name == "commands.md" else api_list(text)
    return re.sub(
        r"<!-- list -->\n.*?<!-- /list -->",
        lambda _: f"<!-- list -->\n{current}\n<!-- /list -->",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for page in ("commands.md", "python_api.md"):
        text = written(page)
        if "--write" in sys.argv:
            (PAGES / page).write_text(text, encoding="utf-8")
        else:
            sys.stdout.write(text)
