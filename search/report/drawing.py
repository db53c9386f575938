"""From a matplotlib figure to files: one look for all pictures, and an SVG that can stand inside a page.

matplotlib is imported here, when a picture is drawn, and nowhere else at import time. pyplot is never used.
"""

from __future__ import annotations

import html
import io
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerskip.errors import SearchError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BLUE", "GREEN", "GRID", "INK", "MUTED", "ORANGE", "SURFACE", "Drawing", "draw", "new_figure", "tidy"]

# Okabe and Ito's colours, which colour-blind readers can tell apart; in the page each follows the reader's theme.
SURFACE, INK, MUTED, GRID = "#ffffff", "#1b2733", "#566270", "#d8dee4"
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#00825f"
_THEME = {
    SURFACE: "surface",
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    BLUE: "blue",
    ORANGE: "orange",
    GREEN: "green",
}
_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": SURFACE,
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same on every machine
    "font.size": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.edgecolor": "none",
    "legend.fontsize": 9,
    "legend.framealpha": 0.0,
    "savefig.facecolor": SURFACE,
    "svg.fonttype": "path",  # text is drawn the same whatever fonts the reader has; the page gives it in words as well
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelsize": 9,
    "ytick.color": MUTED,
    "ytick.labelsize": 9,
}
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}
_DOTS_PER_INCH = 160
_PAGE_WIDTH = 9.2  # inches: at 10 points the text of a picture is then as large as the page's own
_lock = threading.Lock()


@dataclass(frozen=True)
class Drawing:
    """A picture as files, and as a part of a page.

    Attributes:
        svg, png: what the files hold.
        inline: the SVG as an element of an HTML page, its ids its own, its colours those of the page's theme.
    """

    svg: bytes
    png: bytes
    inline: str


def new_figure(height: float, width: float = _PAGE_WIDTH) -> Figure:
    """An empty figure, in inches.

    Raises:
        SearchError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SearchError(
            "got no matplotlib, which draws the pictures of a search's report; expected it to be installed: "
            'pip install "layerskip[search]"'
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: Axes, *, x: str, y: str) -> None:
    """Name the axes, and drop the marks that say nothing."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.tick_params(length=0)


def draw(name: str, alternative: str, make: Callable[[], Figure | None]) -> Drawing | None:
    """Make a figure and turn it into files; the same data give the same bytes.

    matplotlib's settings, which are the process's, are ours meanwhile; reports of several threads take turns.

    Args:
        name: of the picture: letters and hyphens.
        alternative: what the picture shows, for those who cannot see it.
        make: its result, None, is also ours: there is nothing to draw.
    """
    new_figure(1)  # says how to get matplotlib, if need be
    with _style(name):
        figure = make()
        if figure is None:
            return None
        svg, png = io.BytesIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata=_NO_METADATA)
        figure.set_layout_engine("none")  # all has its place by now, and finding it takes longest
        figure.savefig(png, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return Drawing(svg.getvalue(), png.getvalue(), _inline(svg.getvalue().decode("utf-8"), name, alternative))


@contextmanager
def _style(name: str) -> Iterator[None]:
    import matplotlib

    with _lock, matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever style the process has chosen for its own pictures
        settings: Any = _STYLE | {"svg.hashsalt": name}
        matplotlib.rcParams.update(settings)
        yield


def _inline(svg: str, name: str, alternative: str) -> str:
    """An SVG file as an element: without what belongs to a file, and with ids that no other picture has."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<!--.*?-->|<style.*?</style>", "", element, flags=re.DOTALL)
    element = element.replace("xlink:href=", "href=")
    element = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", element)
    for colour, variable in _THEME.items():
        element = re.sub(f"{colour}\\b", f"var(--{variable})", element, flags=re.IGNORECASE)
    (box,) = re.findall(r'viewBox="[^"]*"', element)[:1]
    head = f'<svg {box} class="picture" role="img" aria-label="{html.escape(alternative)}">'
    return head + re.sub(r"\s*\n\s*", "\n", element[element.index(">") + 1 :].strip())
