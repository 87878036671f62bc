"""The Markdown extension of this site: formulas as MathML, the command reference and the alert rules from the program.

    $x^2$                      a formula in the text
    $$ on a line of its own    begins and ends a formula of its own
    <!-- commands -->          becomes the reference of every command and option
    <!-- alert rules -->       becomes the alert rules that the package brings

All happen when the site is built; the pages need no script.  Fenced code is left alone.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

_INLINE = r"(?<![\\$\w])\$(?!\s)([^$\n]+?)(?<!\s)\$(?![\w$])"


def _mathml(latex: str, *, display: str) -> str:
    """Errors: ValueError on LaTeX that cannot be converted, so that the build fails."""
    try:
        mathml = convert(latex, display=display)
    except Exception as exc:
        raise ValueError(f"formula {latex!r}: {type(exc).__name__}: {exc}") from exc
    if "\\" in mathml:  # a command that the converter does not know is passed through as text
        raise ValueError(f"formula {latex!r}: it has a command that latex2mathml does not know")
    return mathml


class _FormulaBlocks(Preprocessor):
    """Lines between two lines of ``$$`` → one line of MathML, kept from the rest of Markdown."""

    def run(self, lines: list[str]) -> list[str]:
        out: list[str] = []
        formula: list[str] | None = None
        fenced = False
        for line in lines:
            fenced ^= line.lstrip().startswith("```")
            if fenced or line.strip() != "$$":
                (out if formula is None else formula).append(line)
            elif formula is None:
                formula = []
            else:
                mathml = _mathml("\n".join(formula), display="block")
                html = f'<div class="math-block">{mathml}</div>'
                out += ["", self.md.htmlStash.store(html), ""]
                formula = None
        if formula is not None:
            raise ValueError(f"a formula begins with $$ and does not end: {formula[:1]}")
        return out


class _InlineFormula(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Any, int, int]:  # type: ignore[override]  # noqa: N802
        return self.md.htmlStash.store(_mathml(m[1], display="inline")), m.start(0), m.end(0)


class _Included(Preprocessor):
    """A comment such as ``<!-- commands -->`` on a line of its own → Markdown that the program gives."""

    def run(self, lines: list[str]) -> list[str]:
        included = {"<!-- commands -->": command_reference, "<!-- alert rules -->": alert_rules}
        return [out for line in lines for out in (included[line]().splitlines() if line in included else [line])]


def alert_rules() -> str:
    """Markdown: the file of the alert rules."""
    from gmmvit_deploy.serving.gateway.files import ALERTS

    return f"```yaml\n{ALERTS.read_text(encoding='utf-8')}```"


def command_reference() -> str:
    """Markdown: every command with its usage, its text, its arguments and its options."""
    from typer.main import get_command

    from gmmvit_cli.commands import SUMMARIES
    from gmmvit_cli.main import app

    root: Any = get_command(app)
    parts = []
    for name, summary in SUMMARIES.items():
        command = root.get_command(None, name)
        context = command.make_context(f"gmmvit {name}", [], resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context))
        parts += [f"## {name}", "", summary, "", "```text", f"gmmvit {name} {usage}", "```", ""]
        parts += _table(command, context)
        parts += ["For example:", "", "```text", command.example, "```", ""]
    return "\n".join(parts)


def _table(command: Any, context: Any) -> list[str]:
    rows = []
    for parameter in command.params:
        names, text = parameter.get_help_record(context) or (parameter.name, "")
        rows.append(f"| {_code(names)} | {_cell(text)} |")
    return ["| argument or option | meaning |", "|---|---|", *rows, ""] if rows else []


def _code(text: str) -> str:
    return f"<code>{_cell(text)}</code>"


def _cell(text: str) -> str:
    return re.sub(r"([*_`$])", r"\\\1", escape(" ".join(text.split()), quote=False)).replace("|", "&#124;")


class DocumentationExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - the name is Markdown's
        md.preprocessors.register(_Included(md), "gmmvit_included", 40)
        # Behind the normalisation at 30, which would remove what stands for a formula; before fenced code, at 25.
        md.preprocessors.register(_FormulaBlocks(md), "gmmvit_formula_blocks", 28)
        md.inlinePatterns.register(_InlineFormula(_INLINE, md), "gmmvit_formulas", 185)  # code spans are at 190


def makeExtension(**options: Any) -> DocumentationExtension:  # noqa: N802 - the name is Markdown's
    """What Markdown calls to get the extension."""
    return DocumentationExtension(**options)
