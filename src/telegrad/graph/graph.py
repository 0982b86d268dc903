"""A distributed graph as plain data: to inspect, and to see (drawing.py, text.py)."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from ..gradients.diagnosis import PartState
from ..gradients.snapshot import Edge, Leaf, Node, Recv, Root, Send
from . import drawing
from .text import outline


@dataclass(frozen=True)
class WorkerPart:
    """A worker that knows the context."""

    name: str
    id: int
    status: str  # "here", "gone", "no answer" or "no part" (it answers, but has nothing of this context)
    reason: str = ""


@dataclass(frozen=True)
class Graph:
    """The graph of a context, as it was when it was gathered. It holds plain data only, and keeps nothing alive.

    In a notebook it shows itself.
    """

    context_id: int
    workers: tuple[WorkerPart, ...]  # the one that asked is the first, then the workers that it knows, and so on
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]  # within workers; and from each Send to its Recv
    passes: tuple[PartState, ...]  # how far those are that run, or that have failed, on each worker

    @property
    def sends(self) -> tuple[Send, ...]:
        """The sender's ends of all tensors that were sent and require grad."""
        return tuple(node for node in self.nodes if isinstance(node, Send))

    @property
    def recvs(self) -> tuple[Recv, ...]:
        """The receiver's ends of them."""
        return tuple(node for node in self.nodes if isinstance(node, Recv))

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The tensors that gradients are gathered for."""
        return tuple(node for node in self.nodes if isinstance(node, Leaf))

    @property
    def roots(self) -> tuple[Root, ...]:
        """The given roots, and those of passes that run."""
        return tuple(node for node in self.nodes if isinstance(node, Root))

    @property
    def unused(self) -> tuple[Send, ...]:
        """The Sends that get no gradient from the roots."""
        return tuple(send for send in self.sends if send.active is False)

    @property
    def awaited(self) -> tuple[Send, ...]:
        """The Sends that hold a pass up, or held it up when it failed; `peer` has not sent the gradient."""
        return tuple(send for send in self.sends if send.awaited)

    def dot(self, *, detail: str = "auto") -> str:
        """The picture in graphviz's language.

        Args:
            detail: "nodes": each node by itself; "chains": nodes in a row are one; "blocks": all that is between
                the same messages is one; "groups": blocks that are alike are one; "workers": each worker is one.
                "auto" takes the first from "chains" on that is small enough to be read.
        """
        return drawing.dot(self, detail)

    def svg(self, *, detail: str = "auto") -> str:
        """The picture as SVG.

        Raises:
            DrawingError: pygraphviz is not installed.
        """
        return drawing.svg(self, detail)

    def save(self, path: str | PathLike[str], *, detail: str = "auto") -> None:
        """Writes the picture to a file: .dot, .svg, .png or .html, by its name. A page is written in any case; without
        pygraphviz it has an outline in place of the picture.

        Raises:
            DrawingError: it is to be an .svg or a .png, and pygraphviz is not installed.
            ValueError: another ending.
        """
        drawing.save(self, path, detail)

    def _repr_html_(self) -> str:
        return drawing.html(self)

    def __str__(self) -> str:
        return outline(self)

    def __repr__(self) -> str:
        return (
            f"<Graph of context {self.context_id}: {len(self.workers)} workers, {len(self.nodes)} nodes, "
            f"{len(self.sends)} sent tensors>"
        )
