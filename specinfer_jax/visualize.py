"""Token trees as pictures, in the terminal and as SVG.

What became of a node is told by a sign and a line style, and by colour besides:

    ■ last committed    ✔ accepted    ○ proposed only    ★ bonus token of the LLM
"""

import dataclasses
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from rich.cells import cell_len
from rich.text import Text
from rich.tree import Tree

from specinfer_jax.trace import TracedStep

_SIGNS = {"root": "■", "accepted": "✔", "proposed": "○", "bonus": "★"}
_MEANINGS = {
    "root": "last committed", "accepted": "accepted", "proposed": "proposed only", "bonus": "bonus token of the LLM",
}  # fmt: skip
_STYLES = {"root": "bold", "accepted": "bold green", "proposed": "dim", "bonus": "bold underline magenta"}
_VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


@dataclasses.dataclass(frozen=True)
class DrawnNode:
    """One node of a picture; the bonus token is a node too."""

    label: str
    """Its token, spaces and control characters made visible."""
    parent: int | None
    """Index of the parent, which comes before it; None for the root."""
    state: str
    """root, accepted, proposed or bonus."""
    note: str = ""
    """Shown smaller beside it: who proposed it, where there are several speculators."""


@dataclasses.dataclass(frozen=True)
class DrawnStep:
    """One step's picture."""

    title: str
    """What the step did, in a line."""
    nodes: list[DrawnNode]
    """Root first."""


def visible(token: bytes) -> str:
    """A token's bytes as one line of printable text: "␣the", "⏎", "\\xe6" for a piece of a character."""
    text = token.decode("utf-8", errors="backslashreplace")
    shown = "".join(_VISIBLE.get(c, repr(c)[1:-1] if unicodedata.category(c)[0] in "CZ" else c) for c in text)
    return shown or "∅"


def draw_step(number: int, step: TracedStep, token_bytes: Callable[[int], bytes]) -> DrawnStep:
    """Turn a traced step into a picture.

    Args:
      number: of the step, from 1.
      step: its tree and what was committed.
      token_bytes: the bytes of a token id (`Tokenizer.token_bytes`).
    """
    several = len({name for node in step.nodes for name in node.speculators}) > 1
    nodes = [
        DrawnNode(visible(token_bytes(n.token_id)), n.parent, n.state, "+".join(n.speculators) if several else "")
        for n in step.nodes
    ]
    accepted = [i for i, node in enumerate(nodes) if node.state == "accepted"]
    if step.bonus is not None:
        nodes.append(DrawnNode(visible(token_bytes(step.bonus)), accepted[-1] if accepted else 0, "bonus"))
    count = len(step.committed)
    title = (
        f"step {number}: {len(step.nodes) - 1} proposed, {len(accepted)} accepted, "
        f"{count} token{'s' if count != 1 else ''} committed"
    )
    return DrawnStep(title, nodes)


def legend() -> Text:
    """What the signs mean, in one line."""
    parts = [Text(f"{sign} {_MEANINGS[state]}", style=_STYLES[state]) for state, sign in _SIGNS.items()]
    return Text("   ").join(parts)


def to_terminal(step: DrawnStep) -> Tree:
    """A step for `rich.print`, its title above it; a run of nodes without branches stands on one line."""
    children = _children(step)
    top = Tree(Text(step.title, style="bold"), guide_style="dim")
    waiting = [(top, 0)]
    while waiting:
        above, i = waiting.pop()
        line = _terminal_node(step.nodes[i])
        while len(children[i]) == 1:
            i = children[i][0]
            line.append(" ─ ", style="dim").append_text(_terminal_node(step.nodes[i]))
        branch = above.add(line)
        waiting += [(branch, child) for child in reversed(children[i])]
    return top


def _terminal_node(node: DrawnNode) -> Text:
    text = Text()
    text.append(f"{_SIGNS[node.state]} {node.label}", style=_STYLES[node.state])
    if node.note:
        text.append(f" {node.note}", style="dim italic")
    return text


def _children(step: DrawnStep) -> list[list[int]]:
    """The children of every node, in order."""
    children: list[list[int]] = [[] for _ in step.nodes]
    for i, node in enumerate(step.nodes):
        if node.parent is not None:
            children[node.parent].append(i)
    return children


class _Place(NamedTuple):
    """Where a node's box stands, in pixels."""

    x: float
    y: float
    width: float


_CHAR, _ROW, _BOX, _GAP, _MARGIN = 8.4, 34.0, 24.0, 36.0, 20.0
_INK = {"root": "#1f2937", "accepted": "#15803d", "proposed": "#6b7280", "bonus": "#a21caf"}
_FILL = {"root": "#1f2937", "accepted": "#dcfce7", "proposed": "#ffffff", "bonus": "#fae8ff"}
_BORDER = {"root": 'stroke-width="1.5"', "accepted": 'stroke-width="2.5"'}
_BORDER |= {"proposed": 'stroke-width="1.2" stroke-dasharray="4 3"', "bonus": 'stroke-width="1.5"'}
_EDGE = {"accepted": 'stroke-width="3"', "proposed": 'stroke-width="1.2" stroke-dasharray="4 3"'}
_EDGE |= {"bonus": 'stroke-width="3" stroke-dasharray="1 6" stroke-linecap="round"'}


def to_svg(steps: Sequence[DrawnStep]) -> str:
    """One SVG file with the steps below each other, roots on the left.

    Accepted nodes have a thick border and thick lines, others dashed ones, the bonus token a double border and a dotted
    line: the picture can be read without colour.
    """
    body, y = [_svg_legend(_MARGIN)], _MARGIN + 2 * _ROW
    width = _MARGIN + sum(_text_width(f"{_SIGNS[s]} {_MEANINGS[s]}") + 2 * _GAP for s in _SIGNS)
    for step in steps:
        title = f'<text x="{_MARGIN:.0f}" y="{y:.0f}" font-weight="bold" fill="#111827">{escape(step.title)}</text>'
        places, height = _layout(step, y + _ROW * 0.5)
        body += [title, *_svg_edges(step, places), *_svg_nodes(step, places)]
        width = max(width, *(place.x + place.width + _MARGIN for place in places), _text_width(step.title) + 40)
        y += height + 1.5 * _ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y:.0f}" '
        f'viewBox="0 0 {width:.0f} {y:.0f}" font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" '
        f'font-size="14">\n<title>Token trees of {len(steps)} steps</title>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _text_width(text: str) -> float:
    return cell_len(text) * _CHAR


def _caption(node: DrawnNode) -> str:
    return f"{_SIGNS[node.state]} {node.label}" + (f" {node.note}" if node.note else "")


def _layout(step: DrawnStep, top: float) -> tuple[list[_Place], float]:
    """Every node's place and the height of all: leaves on lines of their own, parents level with their first child."""
    children, depth = _children(step), [0] * len(step.nodes)
    for i, node in enumerate(step.nodes):
        depth[i] = 0 if node.parent is None else depth[node.parent] + 1
    widths = [_text_width(_caption(node)) + 18 for node in step.nodes]
    columns = [max(w for w, d in zip(widths, depth, strict=True) if d == level) for level in range(max(depth) + 1)]
    line, lines, stack = [0] * len(step.nodes), 0, [0]
    while stack:  # depth first; a node stands on the line where its first leaf will be
        i = stack.pop()
        line[i] = lines
        stack += reversed(children[i])
        lines += not children[i]
    places = [
        _Place(_MARGIN + sum(columns[: depth[i]]) + _GAP * depth[i], top + line[i] * _ROW, widths[i])
        for i in range(len(step.nodes))
    ]
    return places, lines * _ROW


def _svg_edges(step: DrawnStep, places: Sequence[_Place]) -> list[str]:
    """Lines to the parents, proposed ones first: the others go over them."""
    below, above = [], []
    for node, place in zip(step.nodes, places, strict=True):
        if node.parent is None:
            continue
        parent = places[node.parent]
        x0, y0, x1, y1 = parent.x + parent.width, parent.y + _BOX / 2, place.x, place.y + _BOX / 2
        bend = x1 - _GAP / 2
        if y0 == y1:
            path = f"M{x0:.1f} {y0:.1f} H{x1:.1f}"
        else:
            # The first sibling's line runs along the parent's height already.
            start = f"M{bend:.1f} {y0:.1f}" if node.state == "proposed" else f"M{x0:.1f} {y0:.1f} H{bend:.1f}"
            path = f"{start} V{y1 - 8:.1f} Q{bend:.1f} {y1:.1f} {bend + 8:.1f} {y1:.1f} H{x1:.1f}"
        line = f'<path d="{path}" fill="none" stroke="{_INK[node.state]}" {_EDGE[node.state]}/>'
        (below if node.state == "proposed" else above).append(line)
    return [*below, *above]


def _svg_nodes(step: DrawnStep, places: Sequence[_Place]) -> list[str]:
    return [part for node, place in zip(step.nodes, places, strict=True) for part in _svg_box(node.state, node, place)]


def _svg_box(state: str, node: DrawnNode, place: _Place) -> list[str]:
    radius = 12 if state == "bonus" else 4
    box = (
        f'<rect x="{place.x:.1f}" y="{place.y:.1f}" width="{place.width:.1f}" height="{_BOX:.0f}" rx="{radius}" '
        f'fill="{_FILL[state]}" stroke="{_INK[state]}" {_BORDER[state]}/>'
    )
    ink = "#ffffff" if state == "root" else "#374151" if state == "proposed" else _INK[state]
    note = f' <tspan font-size="11" font-style="italic">{escape(node.note)}</tspan>' if node.note else ""
    text = (
        f'<text x="{place.x + 9:.1f}" y="{place.y + 17:.1f}" fill="{ink}">{_SIGNS[state]} {escape(node.label)}{note}'
        "</text>"
    )
    if state != "bonus":
        return [box, text]
    inner = (
        f'<rect x="{place.x + 3:.1f}" y="{place.y + 3:.1f}" width="{place.width - 6:.1f}" height="{_BOX - 6:.0f}" '
        f'rx="9" fill="none" stroke="{_INK[state]}" stroke-width="1"/>'
    )
    return [box, inner, text]


def _svg_legend(y: float) -> str:
    parts, x = [], _MARGIN
    for state, meaning in _MEANINGS.items():
        node = DrawnNode(meaning, None, state)
        width = _text_width(_caption(node)) + 18
        parts += _svg_box(state, node, _Place(x, y, width))
        x += width + _GAP / 2
    return "\n".join(parts)
