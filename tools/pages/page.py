"""The report as one HTML file that loads nothing: template.html, page.js, Plotly, and what they show."""

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from tools.pages.contents import Report, visible
from tools.pages.sections import COLOURS, Section, outcome_colours, sections, verdict

FOLDER = Path(__file__).parent


def page_html(report: Report) -> str:
    """The page. Its Content-Security-Policy allows two scripts, by their digests, and no request at all.

    All texts are escaped; nothing in the data can end its script element: "<" is written as an escape.
    """
    from plotly.offline import get_plotlyjs

    shown = sections(report)
    scripts = {"plotly": get_plotlyjs(), "script": (FOLDER / "page.js").read_text(encoding="utf-8")}
    parts = scripts | {
        "digests": " ".join(map(_digest, scripts.values())),
        "data": json.dumps(_data(report, shown), allow_nan=False).replace("<", "\\u003c"),
        "name": text(report.name),
        "made": text(f"{report.game.title}; report of {time.strftime('%Y-%m-%d %H:%M')}"),
        "verdict": "".join(f'<p class="verdict">{text(sentence)}</p>' for sentence in verdict(report)),
        "missing": "".join(f"<li>{text(line)}</li>" for line in report.missing),
        "nothing_missing": "" if report.missing else "hidden",
        "sections": "".join(map(section_html, shown)),
        "no_games": "" if report.games else "hidden",
        "sources": text("; ".join("{name}: {sampled:,} of {games:,}".format(**one) for one in report.sources)),
        "settings": "".join(
            f"<details><summary>{text(name)}</summary><p class='text'>{text(content)}</p></details>"
            for name, content in report.settings
        ),
    }
    return Template((FOLDER / "template.html").read_text(encoding="utf-8")).substitute(parts)


def section_html(section: Section) -> str:
    """A section with places for its charts, which the script draws."""
    figures = "".join(
        f"<figure><figcaption><h3>{text(chart['title'])}</h3></figcaption>"
        f'<div class="plot" role="img" aria-label="{text(chart["title"])}"></div></figure>'
        for chart in section.charts
    )
    tables = "".join(
        f"<details class='card' open><summary>{text(title)}</summary>{table(head, rows)}</details>"
        for title, head, rows in section.tables
    )
    return (
        f'<section id="{section.id}"><h2>{text(section.title)}</h2><p class="quiet">{text(section.intro)}</p>'
        f'<div class="charts">{figures}</div>{tables}</section>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; where the window is narrow, each cell shows its head beside it."""
    titles = "".join(f"<th>{text(title)}</th>" for title in head)
    body = ""
    for row in rows:
        cells = zip(head, row, strict=True)
        body += "<tr>" + "".join(f'<td data-head="{text(name)}">{text(cell)}</td>' for name, cell in cells) + "</tr>"
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def text(value: str) -> str:
    """Any text as HTML shows it."""
    return escape(visible(value))


def _data(report: Report, shown: Sequence[Section]) -> dict:
    """What the script reads."""
    colours = {name: COLOURS[number % len(COLOURS)] for name, number in outcome_colours(report.game).items()}
    return {
        "charts": [{"data": chart["data"], "layout": chart["layout"]} for one in shown for chart in one.charts],
        "outcomes": colours,
        "sources": [visible(source["name"]) for source in report.sources],
        "games": report.games,
    }


def _digest(script: str) -> str:
    """A script as a Content-Security-Policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
