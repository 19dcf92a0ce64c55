"""Figures as SVG in the colour of the surrounding text, so that one figure suits light and dark pages; or as PNG.

Needs matplotlib: the extra `plot`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from preble.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = ("#3d7fd1", "#e08a00", "#2e9e6b", "#d8476b", "#8a6fd1", "#a0743c", "#19a0b0", "#8a93a0")
"""Colours of series, distinct for most colour-blind readers, with enough contrast on white and on near-black."""

INK = "#010203"
"""Stands for the colour of the surrounding text while matplotlib draws."""

_STYLE: Mapping[Any, Any] = MappingProxyType(
    {
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.titlesize": "medium",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": INK,
        "grid.alpha": 0.15,
        "legend.frameon": False,
        "legend.fontsize": "small",
        "font.family": ["sans-serif"],
        "font.size": 10.0,
        "lines.linewidth": 1.8,
        "svg.fonttype": "none",
        "svg.hashsalt": "preble",
    }
)
_STANDALONE_STYLE = (
    "<style>svg{color:#1d2430;background:#fff}"
    "@media (prefers-color-scheme:dark){svg{color:#e4e8ee;background:#171b22}}</style>"
)
_REFERENCE = re.compile(r'(\bid="|url\(#|href="#)')


@dataclass(frozen=True, slots=True)
class Drawing:
    """An SVG element that scales to the width of its place, in the colour of the surrounding text."""

    svg: str
    caption: str = ""

    def inline(self, prefix: str) -> str:
        """Return the element with `prefix` before every id, so that one page can hold several."""
        return _REFERENCE.sub(rf"\g<1>{prefix}", self.svg)

    def standalone(self) -> str:
        """Return the drawing as a file, in the size it was drawn for and the reader's light or dark scheme."""
        width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', self.svg)[0]
        sized = self.svg.replace("<svg ", f'<svg width="{width}pt" height="{height}pt" ', 1)
        return sized.replace(">", f">{_STANDALONE_STYLE}", 1) + "\n"


def draw(
    fill: Callable[[Figure], None], caption: str = "", *, width_in: float = 5.0, height_in: float = 3.2
) -> Drawing:
    """Return what `fill` draws on an empty figure, in the style of our pages. The same calls give the same bytes.

    `fill` draws lines and bars in colours of `PALETTE` and leaves the colour of text, axes and grid alone.

    Raises: ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    with mpl.rc_context({**_STYLE, "axes.prop_cycle": cycler(color=PALETTE)}), warnings.catch_warnings():
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        fill(figure)
        text = StringIO()
        # matplotlib's font may lack letters: the reader's fonts draw the text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return Drawing(_element(text.getvalue()), caption)


def draw_png(fill: Callable[[Figure], None], path: Path, *, width_in: float = 13.0, height_in: float = 4.3) -> None:
    """Write what `fill` draws on an empty figure as a PNG at `path`; makes its folder.

    Raises: ConfigError: matplotlib is not installed. OSError: the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    fill(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=130)


def require_matplotlib() -> None:
    """Check that drawing is possible; call it before long work.

    Raises: ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib; install it with: pip install matplotlib") from error


def _element(document: str) -> str:
    """Return the <svg> element of matplotlib's document, without size and metadata, in the surrounding colour."""
    element = document[document.index("<svg ") :].rstrip()
    element = re.sub(r"<metadata>.*?</metadata>\s*", "", element, flags=re.DOTALL)
    element = re.sub(r' (?:width|height)="[\d.]+pt"', "", element, count=2)
    return element.replace(INK, "currentColor").replace("<svg ", '<svg role="img" ', 1)
