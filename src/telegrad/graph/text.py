"""A graph as text: what each worker has and sends, and what holds it up. Also the words in pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..gradients.snapshot import Leaf, Node, Operation, Root, Send
from ..primitives.text import clean

if TYPE_CHECKING:
    from .graph import Graph, WorkerPart

_MOST_SENDS = 12  # of a worker, each with a line of its own


def outline(graph: Graph) -> str:
    """Returns what each worker has and sends, in lines."""
    lines = [f"graph of context {graph.context_id}: {size_of(graph)}"]
    for part in graph.workers:
        lines += _worker_lines(graph, part)
    if not graph.sends:
        lines.append("nothing that requires grad was sent in this context yet")
    elif all(node.active is None for node in graph.nodes):
        lines.append("what the loss leads to is not known: give it as roots=[loss]")
    return "\n".join(map(clean, [*lines, *pass_lines(graph)]))


def _worker_lines(graph: Graph, part: WorkerPart) -> list[str]:
    status = "" if part.status == "here" else f", {part.status}: {part.reason}"
    lines = [f"worker {part.name!r} (id {part.id}){status}"]
    nodes = [node for node in graph.nodes if node.worker_id == part.id]
    for root in (node for node in nodes if isinstance(node, Root)):
        lines.append(f"  {root.name}: {shape_of(root)} {root.dtype}")
    operations = [node for node in nodes if isinstance(node, Operation)]
    if operations:
        lines.append(f"  {counted(len(operations), 'node')}: {tally([node.name for node in operations], 6)}")
    leaves = [node for node in nodes if isinstance(node, Leaf)]
    if leaves:
        total = bytes_of(sum(leaf.nbytes for leaf in leaves))
        shapes = tally([f"{leaf.name} {shape_of(leaf)}" for leaf in leaves], 6)
        lines.append(f"  {counted(len(leaves), 'leaf')}, {total}: {shapes}")
    sends = [node for node in nodes if isinstance(node, Send)]
    lines += [f"  sends {_sent_line(graph, send)}" for send in sends[:_MOST_SENDS]]
    if len(sends) > _MOST_SENDS:
        rest = sends[_MOST_SENDS:]
        lines.append(f"  and {counted(len(rest), 'tensor')} more, {bytes_of(sum(s.nbytes for s in rest))}")
    return lines


def _sent_line(graph: Graph, send: Send) -> str:
    line = f"{send.label} to {send.peer!r}: {shape_of(send)} {send.dtype}, {bytes_of(send.nbytes)}"
    if send.awaited:
        line += f"; its gradient is {_awaited(graph, send)}"
    elif send.active is False:
        line += "; unused"
    return line


def pass_lines(graph: Graph) -> list[str]:
    """Returns a line for each Send that holds a pass up, or did when it failed."""
    return [
        f"{_awaited(graph, send)}: Send {send.label} of {send.worker!r}, from {send.peer!r}" for send in graph.awaited
    ]


def _awaited(graph: Graph, send: Send) -> str:
    states = [state for state in graph.passes if state.worker == send.worker_id]
    has_ended = any(state.is_over or state.has_failed for state in states)
    return "awaited when the pass failed" if has_ended else "awaited"


def holds_up_others(graph: Graph, part: WorkerPart) -> str:
    """Says why a worker holds others up that waits for none itself; empty for any other worker."""
    awaited_from = {send.peer_id for send in graph.awaited}
    if part.id not in awaited_from or any(send.worker_id == part.id for send in graph.awaited):
        return ""
    for state in graph.passes:
        if state.worker == part.id and not state.is_done:
            return "the pass failed here" if state.has_failed else "awaits nothing: the pass runs here"
    return ""


def size_of(graph: Graph) -> str:
    nodes = sum(isinstance(node, Operation | Leaf) for node in graph.nodes)
    messages = len({send.message for send in graph.sends})
    total = bytes_of(sum(send.nbytes for send in graph.sends))
    return (
        f"{counted(len(graph.workers), 'worker')}, {counted(nodes, 'node')}, {counted(messages, 'message')} ({total})"
    )


def counted(count: int, what: str) -> str:
    plural = {"leaf": "leaves"}.get(what, f"{what}s")
    return f"{count:,} {what if count == 1 else plural}"


def times(what: str, count: int) -> str:
    return what if count == 1 else f"{what} × {count:,}"


def some(texts: Sequence[str], most: int) -> str:
    return ", ".join([*texts[:most], *(["..."] if len(texts) > most else [])])


def tally(texts: Iterable[str], most: int) -> str:
    """Each text once, with how often it is there, the most frequent first."""
    return some([times(*each) for each in Counter(texts).most_common()], most)


def shape_of(node: Node) -> str:
    if node.shape is None:
        return ""
    if not node.shape:
        return "scalar"
    return f"({', '.join(map(str, node.shape))}{',' if len(node.shape) == 1 else ''})"


def bytes_of(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
