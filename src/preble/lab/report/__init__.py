"""Results for people: tables and figures, as one self-contained HTML page or in a terminal."""

from __future__ import annotations

from preble.lab.report.drawing import PALETTE, Drawing, draw, draw_png, require_matplotlib
from preble.lab.report.page import Section, Table, Text, html_page
from preble.lab.report.terminal import terminal_tables

__all__ = [
    "PALETTE",
    "Drawing",
    "Section",
    "Table",
    "Text",
    "draw",
    "draw_png",
    "html_page",
    "require_matplotlib",
    "terminal_tables",
]
