"""A picture of what tiers of several sizes compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COLOURS = ("#0068b5", "#d9822b", "#6b7280")
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 360" font-family="sans-serif"'


def draw(tokens: Sequence[int], computed: Mapping[str, Sequence[float]]) -> str:
    """Return an SVG picture with a line for each policy, over tiers of so many tokens.

    Lines are tokens computed, over those of endless memory: a ratio for each tier.
    """
    most = max(map(max, computed.values()))

    def x(place: int) -> float:
        return 60 + 520 * place / max(1, len(tokens) - 1)

    def y(ratio: float) -> float:
        return 320 - 280 * ratio / most

    parts = [SVG + ' font-size="12">', '<path d="M60 40V320H580" fill="none" stroke="#9ca3af"/>']
    for ratio in {1.0, most}:
        parts.append(f'<text x="55" y="{y(ratio):.0f}" text-anchor="end">{ratio:.3g}</text>')
    for place, size in enumerate(tokens):
        parts.append(f'<text x="{x(place):.0f}" y="340" text-anchor="middle">{size:,}</text>')
    for (name, ratios), colour, at in zip(computed.items(), COLOURS, (60, 160, 260), strict=True):
        points = " ".join(f"{x(place):.0f},{y(ratio):.1f}" for place, ratio in enumerate(ratios))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="{at}" y="20" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])
