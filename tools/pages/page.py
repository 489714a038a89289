"""The report as one HTML file that loads nothing: template.html, page.js, Plotly and the data in it."""

import base64
import hashlib
import json
import re
from pathlib import Path

from tools.pages.contents import Report

FOLDER = Path(__file__).parent
SLOT = re.compile(r"\{\{(\w+)\}\}")


def html(report: Report) -> str:
    """The page. Its Content-Security-Policy allows two scripts, by their digests, and no request at all.

    Nothing in the data can end its script element: "<" is written as an escape.
    """
    from plotly.offline import get_plotlyjs

    scripts = {"plotly": get_plotlyjs(), "script": (FOLDER / "page.js").read_text(encoding="utf-8")}
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(map(_digest, scripts.values())),
        "style-src": "'unsafe-inline'",  # Plotly sets styles of its elements
        "img-src": "data:",
    }
    parts = scripts | {
        "policy": "; ".join(f"{kind} {allowed}" for kind, allowed in policy.items()),
        "data": json.dumps(report.data()).replace("<", "\\u003c"),
    }
    template = (FOLDER / "template.html").read_text(encoding="utf-8")
    return SLOT.sub(lambda slot: parts[slot[1]], template)


def _digest(script: str) -> str:
    """A script as a Content-Security-Policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
