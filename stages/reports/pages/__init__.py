"""Self-contained HTML pages: one file that opens offline, light or dark, on a phone and with a keyboard alone.

A page is a title and sections of blocks. Blocks are `markupsafe.Markup`, made by the functions here; any other text is
escaped. Colours are variables of `page.css` here and of `look.css`, which the page of the server shares: `text`,
`muted`, `rule`, `surface`, `raised`, `accent`, `good`, `warning`, `bad`, `host`, and `series-1` to `series-8`, which
colour-blind people can tell apart. The package knows no models and no targets.
"""

from stages.reports.pages.blocks import Page, colour, details, facts, note, svg, table, tag
from stages.reports.pages.charts import Axis, Curve, Dot, Series, Span, bars, columns, legend, lines, time_line
from stages.reports.pages.graph import Node, graph
