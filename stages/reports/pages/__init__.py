"""Self-contained HTML pages: one file that opens offline, light or dark, on a phone and with a keyboard alone.

A page is a title and sections of blocks. Blocks are `markupsafe.Markup`, made by the functions here; any other text is
escaped. Colours are variables of `page.css` and nothing else: `text`, `muted`, `rule`, `surface`, `raised`, `accent`,
`good`, `warning`, `bad`, and `series-1` to `series-8`, which colour-blind people can tell apart; `colour` has their
notation, for drawings and charts alike. Knows no models and no targets.
"""

from stages.reports.pages.blocks import chart, colour, details, facts, note, preformatted, svg, table, tag
from stages.reports.pages.graph import Node, graph
from stages.reports.pages.page import Page

__all__ = [
    "Node",
    "Page",
    "chart",
    "colour",
    "details",
    "facts",
    "graph",
    "note",
    "preformatted",
    "svg",
    "table",
    "tag",
]
