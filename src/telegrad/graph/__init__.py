"""The distributed graph of a context: gathered from its workers, folded until it can be read, and shown.

gathering  asks the workers       -> graph.Graph   plain data
folding    what is drawn as one   -> drawing       with pygraphviz;   text   without it
"""

from ..gradients.diagnosis import Awaited, PartState
from ..gradients.snapshot import Edge, Leaf, Node, Operation, Recv, Root, Send
from .graph import Graph, WorkerPart

__all__ = [
    "Awaited",
    "Edge",
    "Graph",
    "Leaf",
    "Node",
    "Operation",
    "PartState",
    "Recv",
    "Root",
    "Send",
    "WorkerPart",
]
