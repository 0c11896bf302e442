"""The elements of the pictures: one style for all, dark text on a white panel.

Text is at least 12 pixels high in a picture of 420 pixels, so that it can be read on a phone.
"""

from html import escape

# One for each rank.
COLORS = ["#9ecae8", "#f7c08a", "#a8d8a0", "#d9b3e0"]
REDUCED, EMPTY = "#e6e6e6", "#ffffff"
ARROW = (
    '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
    'markerHeight="7" orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="#555"/>'
    "</marker></defs>"
)


class Canvas:
    """The elements of a picture, in the order in which they are painted."""

    def __init__(self, width: float, height: float, label: str):
        self.width, self.height, self.label = width, height, label
        self.elements: list[str] = []

    def text(
        self, x: float, y: float, words: str, size: int = 15, anchor: str = "middle",
        weight: str = "normal", color: str = "#222",
    ) -> None:  # fmt: skip
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'font-weight="{weight}" fill="{color}">{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, style: str = "",
        stroke: str = "#555",
    ) -> None:  # fmt: skip
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
            f'stroke="{stroke}"{style}/>'
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.elements.append(
            f'<path d="M{path}" fill="none" stroke="#555" stroke-width="1.5" '
            'marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        size = f'width="{self.width:g}" height="{self.height:g}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="sans-serif" role="img" '
            f'aria-label="{escape(self.label)}">\n{ARROW}\n'
            f'<rect width="{self.width:g}" height="{self.height:g}" fill="white"/>\n'
            + "\n".join(self.elements)
            + "\n</svg>\n"
        )
