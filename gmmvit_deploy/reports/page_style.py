"""Colours and stylesheet of all pages, for light and dark mode, for screen and paper.

Text has a contrast of at least 4.5:1 on each background, and lines and bars of plots a contrast of at least 3:1 (WCAG
2.2, level AA). The colours of the series remain distinguishable with protanopia, deuteranopia and tritanopia. In
addition, plots give each series a dash pattern, a marker or a hatching, and each verdict has a sign and a word.
"""

from __future__ import annotations

__all__ = ["DARK", "DARK_SERIES", "LIGHT", "SERIES", "STYLE"]

LIGHT = {
    "paper": "#ffffff",
    "panel": "#f3f5f8",
    "ink": "#1a1d21",
    "quiet": "#505862",
    "line": "#c3c9d1",
    "passed": "#00634a",
    "failed": "#a32a00",
    "undecided": "#744b00",
    "skipped": "#4b535d",
}
"""Name of a CSS variable → colour.  ``paper`` and ``panel`` are backgrounds, ``line`` is for borders; the other colours
are for text."""

DARK = {
    "paper": "#14171a",
    "panel": "#1f2429",
    "ink": "#eceff2",
    "quiet": "#aab3bd",
    "line": "#4a525b",
    "passed": "#5fd3ae",
    "failed": "#ff9a70",
    "undecided": "#f2c14e",
    "skipped": "#b3bcc6",
}

SERIES = ("#0072b2", "#d55e00", "#552222", "#9900ff", "#bb7777", "#221188", "#883300", "#553366")
"""Colours of the series in a plot, in the order of the series."""

DARK_SERIES = ("#56b4e9", "#ff8c42", "#9933ff", "#ffddcc", "#dd0055", "#bbff00", "#6666cc", "#999999")


def _variables(colours: dict[str, str], series: tuple[str, ...]) -> str:
    numbered = {f"series-{number}": colour for number, colour in enumerate(series, start=1)}
    return " ".join(f"--{name}: {colour};" for name, colour in {**colours, **numbered}.items())


STYLE = f"""
:root {{ color-scheme: light dark; {_variables(LIGHT, SERIES)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK, DARK_SERIES)} }} }}
* {{ box-sizing: border-box; }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
       max-width: 75rem; padding: 1rem; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; margin: 0 0 1rem; }}
h2 {{ font-size: 1.15rem; margin: 2rem 0 .5rem; border-top: 1px solid var(--line); padding-top: 1rem; }}
h3 {{ font-size: 1rem; margin: 1.5rem 0 .5rem; }}
p, li, dd {{ max-width: 75ch; }} ul {{ padding-left: 1.3rem; }}
.kind {{ color: var(--quiet); margin: 0; }} .quiet {{ color: var(--quiet); }}
.verdict {{ background: var(--panel); border-left: .5rem solid currentColor; padding: .75rem 1rem; }}
.verdict h2 {{ border: 0; margin: 0; padding: 0; font-size: 1.25rem; }}
.verdict p {{ color: var(--ink); font-size: 1.1rem; margin: .25rem 0 0; }}
.word {{ font-weight: 600; white-space: nowrap; }}
.passed {{ color: var(--passed); }} .failed {{ color: var(--failed); }}
.undecided {{ color: var(--undecided); }} .skipped {{ color: var(--skipped); }}
.verdict.failed {{ border-left-style: double; }} .verdict.undecided {{ border-left-style: dashed; }}
dl {{ display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .1rem 1rem; }}
dt {{ font-weight: 600; }} dd {{ margin: 0; min-width: 0; }}
.scroll {{ overflow-x: auto; margin: .75rem 0; }}
table {{ border-collapse: collapse; font-size: .875rem; }}
caption {{ text-align: left; font-weight: 600; padding-bottom: .25rem; }}
th, td {{ text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid var(--line);
         overflow-wrap: normal; }}
td.long {{ min-width: min(20rem, 45vw); max-width: 60ch; overflow-wrap: anywhere; }}
thead th {{ white-space: nowrap; }} tbody th {{ font-weight: 500; }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
details {{ margin: .75rem 0; border: 1px solid var(--line); padding: .5rem .75rem; }}
summary {{ font-weight: 600; cursor: pointer; }}
:focus-visible {{ outline: 3px solid var(--series-1); outline-offset: 2px; }}
figure {{ margin: 0; break-inside: avoid; border: 1px solid var(--line); border-radius: 6px; padding: .6rem; }}
figcaption {{ font-size: .875rem; margin-top: .4rem; }} figcaption b {{ display: block; font-size: 1rem; }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem;
         align-items: start; margin: 1rem 0; }}
.plots svg {{ display: block; width: 100%; height: auto; color: var(--ink); }} .plots svg text {{ fill: currentColor; }}
@media (max-width: 40rem) {{ dl {{ display: block; }} dd {{ margin: 0 0 .4rem; }} }}
@media print {{
  @page {{ margin: 1.5cm; }}
  :root {{ color-scheme: light; font-size: 10.5px; }} body {{ font-size: 1rem; max-width: none; padding: 0; }}
  .scroll {{ overflow: visible; }} th, td {{ padding-right: .6rem; overflow-wrap: break-word; }}
  thead {{ display: table-header-group; }} thead th {{ white-space: normal; }}
  tr, li, .verdict {{ break-inside: avoid; }} h2, h3, caption, summary {{ break-after: avoid; }}
  td.long {{ min-width: 0; }} .plots {{ grid-template-columns: 1fr 1fr; }}
  details::details-content {{ content-visibility: visible; height: auto; }}
}}
"""
