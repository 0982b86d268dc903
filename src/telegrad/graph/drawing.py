"""Pictures of a graph: in graphviz's language, as SVG or PNG, and as HTML.

folding.py says what is drawn as one, pygraphviz does the layout. Without it there is the outline of text.py.
"""

from __future__ import annotations

import html as html_text
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DrawingError
from ..gradients.snapshot import Leaf, Node, Operation, Recv, Root, Send
from .folding import Arrow, Item, Picture, fold
from .text import bytes_of, counted, holds_up_others, outline, pass_lines, shape_of, size_of, some, tally, times

if TYPE_CHECKING:
    from .graph import Graph, WorkerPart

_INK, _PALE, _GREY, _RED, _BLUE = "#24292f", "#6e7781", "#b6bcc4", "#d1242f", "#0b62c4"
_NAMES_SHOWN = 3  # kinds of operations in the label of a fold
_LEAVES_SHOWN = 2
# Operations that compute nothing: where not all are named, these are left out first.
_VIEWS = (
    "Alias", "AsStrided", "Clone", "Expand", "Permute", "Reshape", "Select", "Slice", "Squeeze", "T", "Transpose",
    "UnsafeView", "Unsqueeze", "View",
)  # fmt: skip


def dot(graph: Graph, detail: str = "auto") -> str:
    """Returns the picture in graphviz's language."""
    picture = fold(graph, detail)
    caption = _rich(*_caption(graph, picture), align="left")
    font = {"fontname": "Helvetica", "fontcolor": _INK}
    # With newrank boxes stand side by side, and all arrows lead down.
    whole = _attributes(
        **font, fontsize="12", bgcolor="white", nodesep="0.3", ranksep="0.3", newrank="true", pad="0.2", labelloc="b",
        labeljust="l", label=caption,
    )  # fmt: skip
    node = _attributes(
        **font, fontsize="10", color=_PALE, shape="box", style="rounded,filled", fillcolor="white", margin="0.1,0.05",
        height="0.3",
    )  # fmt: skip
    edge = _attributes(fontname="Helvetica", fontsize="8", fontcolor=_PALE, color=_PALE, arrowsize="0.6")
    boxes = [line for part in graph.workers for line in _worker_box(graph, part, picture)]
    lines = [f"  graph {whole};", f"  node {node};", f"  edge {edge};", *boxes, *map(_arrow, picture.arrows)]
    return "\n".join(["digraph telegrad {", *lines, "}", ""])


def _caption(graph: Graph, picture: Picture) -> list[tuple[str, str]]:
    said = [(f"context {graph.context_id}: {size_of(graph)}", _INK)]
    folded = {
        "blocks": "What is between the same messages is drawn as one.",
        "groups": "What is between messages is drawn as one, and so is what is alike.",
        "workers": "What a worker does is drawn as one.",
    }
    if picture.detail in folded:
        said.append((folded[picture.detail], _PALE))
    if graph.sends:
        said.append(("Blue: what was sent. Gradients go against the arrows.", _PALE))
    if any(node.active is False for node in graph.nodes):
        said.append(("Grey: the roots do not lead there.", _PALE))
    said += [(line, _RED) for line in pass_lines(graph)[:4]]
    return said


def _worker_box(graph: Graph, part: WorkerPart, picture: Picture) -> list[str]:
    items = [place for place, item in enumerate(picture.items) if item.worker_id == part.id]
    if not items and part.status == "no part":
        return []
    is_here = part.status == "here"
    trouble = holds_up_others(graph, part) if is_here else part.status
    title = [(part.name, _INK), *([(trouble, _RED)] if trouble else [])]
    side = "left" if part is graph.workers[0] else "right"  # arrows come in from the left, mostly
    look = _attributes(
        label=_rich(*title, bold=True, align=side),
        labelloc="t",
        labeljust=side[0],
        style="rounded,filled" if is_here else "rounded,filled,dashed",
        fillcolor="#f6f8fa" if is_here else "#f0f0f0",
        color=_RED if trouble else _GREY,
    )
    lines = [f"    n{place} {_item(picture.items[place], is_here)};" for place in items]
    if not items:
        nothing = _attributes(label="nothing was sent or received", shape="plain", fontcolor=_PALE)
        lines = [f"    empty_{part.id} {nothing};"]
    return [f"  subgraph cluster_{part.id} {{", f"    graph {look};", *lines, "  }"]


def _item(item: Item, is_here: bool) -> str:
    nodes = item.nodes
    grey = item.active is False
    ink, pale, line = (_GREY, _GREY, _GREY) if grey else (_INK, _PALE, _PALE)
    tooltip = _tooltip(nodes)
    if not is_here:
        return _attributes(label="?", color=_PALE, fontcolor=_PALE, style="rounded,dashed", tooltip=tooltip)
    if item.is_recv:
        blue = _GREY if grey else _BLUE
        return _attributes(
            label=times("Recv", len(nodes)), shape="ellipse", fontsize="8", height="0.2", width="0.4",
            margin="0.03,0.01", style="filled", color=blue, fontcolor=blue, fillcolor="white", tooltip=tooltip,
        )  # fmt: skip
    first, fill = nodes[0], "white"
    if len(nodes) == 1 and isinstance(first, Root):
        label, fill, line = [(first.name, ink), (shape_of(first), _PALE)], "#fff3c4", "#b58407"
    elif all(isinstance(node, Leaf) for node in nodes):
        label, fill, line = _leaf_lines(nodes, ink), "#dff3e4", _GREY if grey else "#3f9a5a"
    elif len(nodes) == 1:
        label = [(first.name, ink), (shape_of(first), pale)]
    else:
        label, fill = _fold_lines(nodes, ink), "#e7eefb"
    return _attributes(label=_rich(*label), fillcolor="#fafafa" if grey else fill, color=line, tooltip=tooltip)


def _leaf_lines(leaves: Sequence[Node], ink: str) -> list[tuple[str, str]]:
    if len(leaves) == 1:
        leaf = leaves[0]
        return [(f"{leaf.name} {shape_of(leaf)}", ink), (f"{leaf.dtype}, {bytes_of(leaf.nbytes)}", _PALE)]
    total = bytes_of(sum(leaf.nbytes for leaf in leaves))
    return [(f"{len(leaves)} leaves, {total}", ink), (tally(map(shape_of, leaves), 3), _PALE)]


def _fold_lines(nodes: Sequence[Node], ink: str) -> list[tuple[str, str]]:
    operations = [node for node in nodes if isinstance(node, Operation)]
    leaves = [node for node in nodes if isinstance(node, Leaf)]
    found = Counter(node.name for node in operations).most_common()
    names = [times(*name) for name in sorted(found, key=lambda name: _is_view(name[0]))]
    shown = _NAMES_SHOWN if len(names) > _NAMES_SHOWN + 1 else len(names)
    lines = [(name, ink) for name in names[:shown]]
    if len(operations) > 1:
        lines.insert(0, (f"{counted(len(operations), 'node')}:", ink))
    if len(names) > shown:
        lines.append((f"and {len(names) - shown} more kinds", _PALE))
    if leaves:
        total = bytes_of(sum(leaf.nbytes for leaf in leaves))
        shapes = tally(map(shape_of, leaves), _LEAVES_SHOWN)
        lines.append((f"{counted(len(leaves), 'leaf')}, {total}: {shapes}", "#2c7a45"))
    return lines


def _is_view(name: str) -> bool:
    return name.rstrip("0123456789").removesuffix("Backward") in _VIEWS


def _arrow(arrow: Arrow) -> str:
    ends = f"  n{arrow.tail} -> n{arrow.head}"
    unused = arrow.active is False
    if not arrow.sends:
        return f"{ends} {_attributes(color=_GREY, style='dashed') if unused else '[]'};"
    colour, width = (_GREY, "1.2") if unused else (_BLUE, "1.6")
    lines = _sent_lines(arrow.sends)
    if arrow.is_awaited:
        colour, width = _RED, "2.6"
        lines.append(f"awaited from {arrow.sends[0].peer!r}")
    text = "<br/>".join(map(_escaped, lines))
    cell = f'<td><font color="{colour}">{text}</font></td>'
    label = f'<<table border="0" cellpadding="4"><tr>{cell}</tr></table>>'  # with some room around it
    tooltip, style = _tooltip(arrow.sends), "dashed" if unused else "solid"
    look = _attributes(
        color=colour, penwidth=width, style=style, arrowsize="0.8", label=label, tooltip=tooltip, labeltooltip=tooltip
    )
    return f"{ends} {look};"


def _sent_lines(sends: Sequence[Send]) -> list[str]:
    if len(sends) == 1:
        send = sends[0]
        return [f"{send.label}  {shape_of(send)}", f"{send.dtype}, {bytes_of(send.nbytes)}"]
    messages = len({send.message for send in sends})
    dtypes = some(sorted({send.dtype for send in sends}), 3)
    where = f"{messages} messages" if messages > 1 else sends[0].label.split(".")[0]
    total = bytes_of(sum(send.nbytes for send in sends))
    return [f"{counted(len(sends), 'tensor')} in {where}", f"{dtypes}, {total}"]


def _tooltip(nodes: Sequence[Node], most: int = 12) -> str:
    lines = []
    for node in nodes[:most]:
        lines.append(f"{node.name} {shape_of(node)} {node.dtype}".strip())
        if isinstance(node, Send | Recv):
            lines[-1] += f", message {node.message} {'to' if isinstance(node, Send) else 'from'} {node.peer!r}"
    return "\n".join(lines + ([f"and {len(nodes) - most} more"] if len(nodes) > most else []))


def _attributes(**values: str) -> str:
    """The attributes of something in graphviz's language. A label in angle brackets is one of _rich()."""
    parts = []
    for name, value in values.items():
        if name != "label" or not value.startswith("<"):
            value = '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
        parts.append(f"{name}={value}")
    return f"[{', '.join(parts)}]"


def _rich(*lines: tuple[str, str], bold: bool = False, align: str = "center") -> str:
    """A label of several lines, each with its colour; the first one is larger, and may be bold."""
    parts = []
    for number, (text, colour) in enumerate(lines):
        escaped = _escaped(text) or " "
        if bold and number == 0:
            escaped = f"<b>{escaped}</b>"
        size = "" if number == 0 else ' point-size="8"'
        parts.append(f'<font color="{colour}"{size}>{escaped}</font>')
    new_line = f'<br align="{align}"/>'
    return f"<{new_line.join(parts)}{new_line if len(parts) > 1 else ''}>"


def _escaped(text: str) -> str:
    """For a label of graphviz's, which is XML: there is no way to write a control character in that."""
    return html_text.escape("".join(sign if sign.isprintable() else "?" for sign in text))


# -- with pygraphviz ----------------------------------------------------------------------------------------

# Graphviz keeps the interpreter's lock for as long as it works, and is not made for threads: it gets its own process.
_DRAW = """
import sys, pygraphviz
graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode())
sys.stdout.buffer.write(graph.draw(format=sys.argv[1], prog="dot"))
"""


def svg(graph: Graph, detail: str = "auto") -> str:
    """Returns the picture as SVG.

    Raises:
        DrawingError: pygraphviz is not installed, or it failed.
    """
    return _rendered(dot(graph, detail), "svg").decode("utf-8")


def _rendered(source: str, form: str) -> bytes:
    if find_spec("pygraphviz") is None:
        raise DrawingError(
            f"a graph is drawn as {form} by pygraphviz, which is not installed; run `pip install 'telegrad[tools]'`, "
            "or take .dot() and draw it elsewhere"
        )
    # -P: a file of the same name in the current folder is not imported
    command = [sys.executable, "-P", "-c", _DRAW, form]
    done = subprocess.run(command, input=source.encode(), capture_output=True, check=False)
    if done.returncode:
        said = (
            done.stderr.decode(errors="replace").partition("Traceback")[0].strip() or f"it ended with {done.returncode}"
        )
        raise DrawingError(f"graphviz could not draw the graph as {form}: {said}")
    return done.stdout


def save(graph: Graph, path: str | PathLike[str], detail: str = "auto") -> None:
    """Writes the picture to a file, in the form that its name says."""
    target = Path(path)
    match target.suffix.lower():
        case ".dot" | ".gv":
            target.write_text(dot(graph, detail), encoding="utf-8")
        case ".svg":
            target.write_text(svg(graph, detail), encoding="utf-8")
        case ".png":
            target.write_bytes(_rendered(dot(graph, detail).replace("{", "{ dpi=144;", 1), "png"))
        case ".html":
            target.write_text(page(graph, detail), encoding="utf-8")
        case other:
            raise ValueError(f"a graph cannot be saved as {other!r}; choose .dot, .svg, .png or .html")


# -- HTML -----------------------------------------------------------------------------------------------------


def html(graph: Graph, detail: str = "auto") -> str:
    """Returns the picture for a page or a notebook; without pygraphviz, the outline."""
    try:
        drawn = svg(graph, detail)
    except DrawingError as error:
        outlined = html_text.escape(outline(graph))
        reason = html_text.escape(str(error))
        return (
            f'<div class="telegrad-graph"><pre style="line-height:1.3">{outlined}</pre>'
            f'<p style="color:{_PALE}"><small>No picture: {reason}</small></p></div>'
        )
    return f'<div class="telegrad-graph" style="overflow:auto">{drawn[drawn.index("<svg") :]}</div>'


def page(graph: Graph, detail: str = "auto") -> str:
    """Returns a page by itself."""
    title = html_text.escape(f"telegrad: the graph of context {graph.context_id}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n'
        f'<body style="font-family:sans-serif;margin:1.5em">\n<h1 style="font-size:1.2em">{title}</h1>\n'
        f"{html(graph, detail)}\n<details><summary>In words</summary>\n"
        f"<pre>{html_text.escape(outline(graph))}</pre></details>\n</body></html>\n"
    )
