"""Results for people: tables and figures, as one self-contained HTML page or in a terminal."""

from __future__ import annotations

from preble.lab.report.drawing import PALETTE as PALETTE
from preble.lab.report.drawing import Drawing as Drawing
from preble.lab.report.drawing import draw as draw
from preble.lab.report.drawing import draw_png as draw_png
from preble.lab.report.drawing import require_matplotlib as require_matplotlib
from preble.lab.report.page import Section as Section
from preble.lab.report.page import Table as Table
from preble.lab.report.page import Text as Text
from preble.lab.report.page import html_page as html_page
from preble.lab.report.terminal import print_tables as print_tables
from preble.lab.report.terminal import terminal_tables as terminal_tables
