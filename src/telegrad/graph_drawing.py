"""Pictures of a graph: in graphviz's language, as SVG or PNG, as HTML, and as an outline in plain text.

graphviz does the layout. Without its program the outline is still there.
"""

from __future__ import annotations

import html as html_text
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DrawingError
from .gradients.snapshot import Leaf, Node, Operation, Recv, Root, Send
from .graph_folding import Arrow, Item, Picture, fold

if TYPE_CHECKING:
    from .graph import Graph, WorkerPart

_INK, _PALE, _GREY, _RED, _BLUE = "#24292f", "#6e7781", "#b6bcc4", "#d1242f", "#0b62c4"
_NAMES_SHOWN = 3  # kinds of operations in the label of a fold
_LEAVES_SHOWN = 2


# -- graphviz's language ------------------------------------------------------------------------------------


def dot(graph: Graph, detail: str = "auto") -> str:
    """The picture in graphviz's language."""
    picture = fold(graph, detail)
    lines = [
        "digraph telegrad {",
        f'  graph [fontname="Helvetica", fontsize=12, fontcolor="{_INK}", nodesep=0.3, ranksep=0.35, pad=0.2, '
        f"bgcolor=white, labelloc=b, labeljust=l, label={_rich(*_caption(graph, picture))}];",
        f'  node [fontname="Helvetica", fontsize=10, fontcolor="{_INK}", color="{_PALE}", shape=box, '
        'style="rounded,filled", fillcolor=white, margin="0.1,0.05", height=0.3];',
        f'  edge [fontname="Helvetica", fontsize=8, fontcolor="{_PALE}", color="{_PALE}", arrowsize=0.6];',
    ]
    for part in graph.workers:
        lines += _worker_box(graph, part, picture)
    lines += [_arrow(arrow, picture) for arrow in picture.arrows]
    return "\n".join([*lines, "}", ""])


def _caption(graph: Graph, picture: Picture) -> list[tuple[str, str]]:
    said = [(f"context {graph.context_id}: {_size_of(graph)}", _INK)]
    how = {
        "nodes": "",
        "chains": "",
        "blocks": "What is between the same messages is drawn as one. ",
        "groups": "What is between messages is drawn as one, and so is what is alike. ",
        "workers": "What a worker does is drawn as one. ",
    }[picture.detail]
    if any(node.active is False for node in graph.nodes):
        how += "Grey: the roots do not lead there. "
    said.append((f"{how}Gradients go against the arrows.", _PALE))
    said += [(line, _RED) for line in _pass_lines(graph)[:4]]
    return said


def _worker_box(graph: Graph, part: WorkerPart, picture: Picture) -> list[str]:
    items = [place for place, item in enumerate(picture.items) if item.worker_id == part.id]
    if not items and part.status == "no part":
        return []
    is_here = part.status == "here"
    title = [(part.name, _INK)]
    if not is_here:
        title.append((f"{part.status}: {_shortened(part.reason, 60)}", _RED))
    title += [(said, _RED) for said in _states_in_box(graph, part)]
    look = f'style="rounded,filled", fillcolor="#f6f8fa", color="{_GREY}"'
    if not is_here:
        look = f'style="rounded,filled,dashed", fillcolor="#f0f0f0", color="{_RED}"'
    lines = [
        f"  subgraph cluster_{part.id} {{",
        f"    graph [label={_rich(*title, bold=True)}, labelloc=t, {look}];",
    ]
    lines += [f"    {_item(place, picture.items[place], part)}" for place in items]
    if not items:
        lines.append(
            f'    empty_{part.id} [label="nothing was sent or received", shape=plain, fontcolor="{_PALE}"];'
        )
    return [*lines, "  }"]


def _item(place: int, item: Item, part: WorkerPart) -> str:
    nodes = item.nodes
    grey = item.active is False
    ink, line = (_GREY, _GREY) if grey else (_INK, _PALE)
    tooltip = _quoted(_tooltip(nodes))
    if part.status != "here":
        return f'n{place} [label="?", color="{_PALE}", fontcolor="{_PALE}", style="rounded,dashed", tooltip={tooltip}];'
    if item.is_recv:
        colour = _GREY if grey else _BLUE
        return (
            f'n{place} [label="", shape=circle, width=0.13, height=0.13, fixedsize=true, style=filled, '
            f'color="{colour}", fillcolor=white, tooltip={tooltip}];'
        )
    first = nodes[0]
    if len(nodes) == 1 and isinstance(first, Root):
        label, fill, line = [(first.name, ink), (_shape(first), _PALE)], "#fff3c4", "#b58407"
    elif all(isinstance(node, Leaf) for node in nodes):
        label, fill = _leaf_lines(nodes, ink), "#dff3e4"
        line = _GREY if grey else "#3f9a5a"
    elif len(nodes) == 1:
        label, fill = [(first.name, ink), (_shape(first), _GREY if grey else _PALE)], "white"
    else:
        label, fill = _fold_lines(nodes, ink), "#e7eefb"
    if grey:
        fill = "#fafafa"
    return f'n{place} [label={_rich(*label)}, fillcolor="{fill}", color="{line}", tooltip={tooltip}];'


def _leaf_lines(leaves: Sequence[Node], ink: str) -> list[tuple[str, str]]:
    if len(leaves) == 1:
        leaf = leaves[0]
        return [(f"{leaf.name} {_shape(leaf)}", ink), (f"{leaf.dtype}, {_bytes(leaf.nbytes)}", _PALE)]
    shapes = [_times(shape, n) for shape, n in Counter(_shape(leaf) for leaf in leaves).most_common()]
    return [
        (f"{len(leaves)} leaves, {_bytes(sum(n.nbytes for n in leaves))}", ink),
        (_some(shapes, 3), _PALE),
    ]


def _fold_lines(nodes: Sequence[Node], ink: str) -> list[tuple[str, str]]:
    operations = [node for node in nodes if isinstance(node, Operation)]
    leaves = [node for node in nodes if isinstance(node, Leaf)]
    names = [_times(name, n) for name, n in Counter(node.name for node in operations).most_common()]
    lines = [(f"{_counted(len(operations), 'node')}:", ink)]
    lines += [(name, ink) for name in names[:_NAMES_SHOWN]]
    if len(names) > _NAMES_SHOWN:
        lines.append((f"and {len(names) - _NAMES_SHOWN} more kinds", _PALE))
    if leaves:
        shapes = [_times(shape, n) for shape, n in Counter(_shape(leaf) for leaf in leaves).most_common()]
        total = _bytes(sum(leaf.nbytes for leaf in leaves))
        lines.append((f"{_counted(len(leaves), 'leaf')}, {total}: {_some(shapes, _LEAVES_SHOWN)}", "#2c7a45"))
    return lines


def _arrow(arrow: Arrow, picture: Picture) -> str:
    ends = f"n{arrow.tail} -> n{arrow.head}"
    if not arrow.sends:
        look = f'color="{_GREY}", style=dashed' if arrow.active is False else ""
        return f"  {ends} [{look}];"
    colour, width = _BLUE, 1.6
    if arrow.active is False:
        colour, width = _GREY, 1.2
    label = [(line, colour) for line in _sent_lines(arrow.sends)]
    if arrow.is_awaited:
        colour, width = _RED, 2.6
        label = [(line, colour) for line, _ in label]
        label.append((f"awaited from {arrow.sends[0].peer!r}", colour))
    style = "dashed" if arrow.active is False else "solid"
    tooltip = _quoted(_tooltip(arrow.sends))
    return (
        f'  {ends} [color="{colour}", penwidth={width}, style={style}, arrowsize=0.8, label={_rich(*label)}, '
        f"tooltip={tooltip}, labeltooltip={tooltip}];"
    )


def _sent_lines(sends: Sequence[Send]) -> list[str]:
    if len(sends) == 1:
        send = sends[0]
        return [f"{send.label}  {_shape(send)}", f"{send.dtype}, {_bytes(send.nbytes)}"]
    messages = len({send.message for send in sends})
    dtypes = _some(sorted({send.dtype for send in sends}), 3)
    tensors = _counted(len(sends), "tensor")
    first = (
        f"{tensors} in {messages} messages"
        if messages > 1
        else f"{tensors} in {sends[0].label.split('.')[0]}"
    )
    return [first, f"{dtypes}, {_bytes(sum(send.nbytes for send in sends))}"]


def _tooltip(nodes: Iterable[Node], most: int = 12) -> str:
    lines = [_described(node) for node in nodes]
    return "\n".join(lines[:most] + ([f"and {len(lines) - most} more"] if len(lines) > most else []))


def _described(node: Node) -> str:
    text = f"{node.name} {_shape(node)} {node.dtype}".strip()
    if isinstance(node, Send):
        return f"{text}, message {node.message} to {node.peer!r}"
    if isinstance(node, Recv):
        return f"{text}, message {node.message} from {node.peer!r}"
    return text


def _rich(*lines: tuple[str, str], bold: bool = False) -> str:
    """A label of several lines, each with its colour; the first one may be bold. Left-aligned where it is long."""
    parts = []
    for number, (text, colour) in enumerate(lines):
        escaped = html_text.escape(text, quote=True) or " "
        if bold and number == 0:
            escaped = f"<b>{escaped}</b>"
        size = "" if number == 0 else ' point-size="8"'
        parts.append(f'<font color="{colour}"{size}>{escaped}</font>')
    return f"<{'<br/>'.join(parts)}>"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# -- with graphviz's program --------------------------------------------------------------------------------


def svg(graph: Graph, detail: str = "auto") -> str:
    """The picture as SVG.

    Raises:
        DrawingError: there is no graphviz program here, or it failed.
    """
    return _rendered(dot(graph, detail), "svg").decode("utf-8")


def _rendered(source: str, form: str) -> bytes:
    try:
        graphviz: Any = import_module("graphviz")  # only here: `import telegrad` does not need it
    except ImportError as error:
        raise DrawingError(
            f"a graph is drawn as {form} by the package graphviz, which is not installed; run `pip install graphviz`, "
            "or take .dot() and draw it elsewhere"
        ) from error
    try:
        drawn: bytes = graphviz.Source(source).pipe(format=form, quiet=True)
        return drawn
    except graphviz.ExecutableNotFound as error:
        raise DrawingError(
            f"a graph is drawn as {form} by graphviz's program `dot`, which is not on the PATH of this machine; "
            "install it (`apt install graphviz`, `brew install graphviz`), or take .dot() and draw it elsewhere"
        ) from error
    except graphviz.CalledProcessError as error:
        said = (error.stderr or b"").decode("utf-8", "replace").strip()
        raise DrawingError(f"graphviz could not draw the graph as {form}: {said or error}") from error


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
    """The picture for a page or a notebook; without graphviz, what it would show as an outline."""
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
    """A page by itself."""
    title = html_text.escape(f"telegrad: the graph of context {graph.context_id}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n'
        f'<body style="font-family:sans-serif;margin:1.5em">\n<h1 style="font-size:1.2em">{title}</h1>\n'
        f"{html(graph, detail)}\n<details><summary>In words</summary>\n"
        f"<pre>{html_text.escape(outline(graph))}</pre></details>\n</body></html>\n"
    )


# -- words ----------------------------------------------------------------------------------------------------


def outline(graph: Graph) -> str:
    """What each worker has, and sends to whom."""
    lines = [f"graph of context {graph.context_id}: {_size_of(graph)}"]
    for part in graph.workers:
        lines += _worker_lines(graph, part)
    if not graph.sends:
        lines.append("nothing that requires grad was sent in this context yet")
    elif all(node.active is None for node in graph.nodes):
        lines.append("what the loss leads to is not known: give it as roots=[loss]")
    return "\n".join([*lines, *_pass_lines(graph)])


def _worker_lines(graph: Graph, part: WorkerPart) -> list[str]:
    status = "" if part.status == "here" else f", {part.status}: {part.reason}"
    lines = [f"worker {part.name!r} (id {part.id}){status}"]
    nodes = [node for node in graph.nodes if node.worker_id == part.id]
    for root in (node for node in nodes if isinstance(node, Root)):
        lines.append(f"  {root.name}: {_shape(root)} {root.dtype}")
    operations = [node for node in nodes if isinstance(node, Operation)]
    if operations:
        names = Counter(node.name for node in operations).most_common()
        lines.append(f"  {_counted(len(operations), 'node')}: {_some([_times(*name) for name in names], 6)}")
    leaves = [node for node in nodes if isinstance(node, Leaf)]
    if leaves:
        shapes = Counter(f"{leaf.name} {_shape(leaf)}" for leaf in leaves).most_common()
        total = _bytes(sum(leaf.nbytes for leaf in leaves))
        lines.append(
            f"  {_counted(len(leaves), 'leaf')}, {total}: {_some([_times(*shape) for shape in shapes], 6)}"
        )
    sends = [node for node in nodes if isinstance(node, Send)]
    lines += [f"  sends {_sent_line(send)}" for send in sends[:_MOST_SENDS]]
    if len(sends) > _MOST_SENDS:
        rest = sends[_MOST_SENDS:]
        lines.append(f"  and {_counted(len(rest), 'tensor')} more, {_bytes(sum(s.nbytes for s in rest))}")
    return lines


_MOST_SENDS = 12


def _sent_line(send: Send) -> str:
    line = f"{send.label} to {send.peer!r}: {_shape(send)} {send.dtype}, {_bytes(send.nbytes)}"
    if send.awaited:
        line += f"; its gradient is awaited from {send.peer!r}"
    elif send.active is False:
        line += "; unused"
    return line


def _pass_lines(graph: Graph) -> list[str]:
    """What holds passes up."""
    lines = []
    for send in graph.awaited:
        over = any(state.worker == send.worker_id and _has_ended(state) for state in graph.passes)
        verb = "was awaited when the pass failed:" if over else "is awaited:"
        lines.append(f"{verb} the gradient of {send.worker!r}'s Send {send.label}, from {send.peer!r}")
    return lines


def _has_ended(state: object) -> bool:
    return bool(getattr(state, "is_over", False) or getattr(state, "has_failed", False))


def _states_in_box(graph: Graph, part: WorkerPart) -> list[str]:
    """Of a worker that others wait for and that waits for nobody."""
    awaited_from = {send.peer_id for send in graph.awaited}
    if part.id not in awaited_from or any(send.worker_id == part.id for send in graph.awaited):
        return []
    for state in graph.passes:
        if state.worker == part.id and not state.is_done:
            return ["the pass failed here" if state.has_failed else "the pass runs here, and awaits nothing"]
    return []


def _size_of(graph: Graph) -> str:
    nodes = sum(isinstance(node, Operation | Leaf) for node in graph.nodes)
    messages = len({send.message for send in graph.sends})
    total = _bytes(sum(send.nbytes for send in graph.sends))
    return (
        f"{_counted(len(graph.workers), 'worker')}, {_counted(nodes, 'node')}, "
        f"{_counted(messages, 'message')} ({total})"
    )


def _counted(count: int, what: str) -> str:
    plural = {"leaf": "leaves"}.get(what, f"{what}s")
    return f"{count:,} {what if count == 1 else plural}"


def _times(what: str, count: int) -> str:
    return what if count == 1 else f"{what} × {count:,}"


def _some(texts: Sequence[str], most: int) -> str:
    return ", ".join([*texts[:most], *(["..."] if len(texts) > most else [])])


def _shape(node: Node) -> str:
    if node.shape is None:
        return ""
    if not node.shape:
        return "scalar"
    return f"({', '.join(map(str, node.shape))}{',' if len(node.shape) == 1 else ''})"


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
