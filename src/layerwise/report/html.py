"""The HTML page that every report is made of: one file, no network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1c2733; --muted: #5f6c7b; --line: #e3e8ee; --page: #f6f8fa; --card: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --muted: #9aa7b4; --line: #2d3742; --page: #12181f; --card: #1a222b; }
}
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; }
.lead { font-size: 1.15rem; margin: 0 0 1.5rem; max-width: 48rem; }
.note, figcaption { color: var(--muted); font-size: .9rem; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { padding: .42rem 1rem; text-align: right; white-space: nowrap; }
th[scope=row] { text-align: left; font-weight: 400; color: var(--muted); }
tr + tr > * { border-top: 1px solid var(--line); }
figure { margin: 0 0 1.5rem; }
figure svg { display: block; box-sizing: border-box; width: 100%; height: auto; padding: 1rem;
  background: #fff; border: 1px solid var(--line); border-radius: 10px; }
figcaption { margin-top: .5rem; max-width: 48rem; }
pre { overflow-x: auto; padding: 1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; font-size: .82rem; }
summary { cursor: pointer; }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""


def html_page(title: str, body: str, style: str = "") -> str:
    """The page with a title, plain text, and a body, HTML; `style` adds to the style sheet."""
    return _PAGE.format(title=html.escape(title), style=_STYLE + style, body=body)


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls where it is too wide; cells are plain text, and the first of a row is its heading."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        f"<tr><th scope='row'>{html.escape(name)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>"
