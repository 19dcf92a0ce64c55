"""Results as one self-contained HTML page: tables and figures, no script, nothing fetched from elsewhere."""

from __future__ import annotations

from preble.report.drawing import PALETTE, Drawing, draw
from preble.report.page import Section, Table, Text, html_page

__all__ = ["PALETTE", "Drawing", "Section", "Table", "Text", "draw", "html_page"]
