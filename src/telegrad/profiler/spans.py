"""From what workers recorded to spans and messages: pure, and in each worker's own time.

rows of a thread    started, started, complete, complete   ->   spans that lie inside of each other
rows of a message   `write` at its sender, `read` at its receiver   ->   one Message with both ends
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.recording import OWN, Part, Row

# What a stage is called in a trace, and what of a step's time it is.
KINDS = {
    "encode": "serialise",
    "decode": "serialise",
    "write": "wire",
    "read": "wire",
    "wait": "wait",
    "receive": "handle",
    "join": "profiler",
}


@dataclass(slots=True)
class Span:
    """Something that a thread did. Times are in seconds."""

    worker: str
    thread: int
    stage: str  # encode, write, read, receive, decode, run, wait or pass
    name: str
    start: float
    end: float
    message: int
    peer: str
    nbytes: int = 0

    @property
    def category(self) -> str:
        """serialise, wire, wait, handle, profiler or run."""
        return KINDS.get(self.stage, "run")


@dataclass(slots=True)
class End:
    worker: str
    thread: int
    at: float
    nbytes: int


@dataclass(slots=True)
class Message:
    """A message of which both ends were recorded."""

    id: int
    kind: str
    reply_to: int
    sent: End
    read: End


@dataclass
class Recorded:
    spans: list[Span]
    messages: list[Message]
    one_ended: int  # messages of which only one end was recorded: with workers that take no part, or at the edges
    own_messages: int  # the profiler's own
    own_bytes: int


def read_parts(parts: Sequence[Part]) -> Recorded:
    """Everything that was recorded, without what the profiler itself did."""
    own = _own_messages(parts)
    functions = {row.message: row.detail for part in parts for row in part.rows if row.stage == "run" and row.detail}
    spans: list[Span] = []
    sent: dict[int, tuple[End, Row]] = {}
    read: dict[int, tuple[End, Row]] = {}
    own_sent: dict[int, int] = {}
    for part in parts:
        rows = []
        for row in part.rows:
            if row.stage == "write" and row.message in own:
                own_sent[row.message] = row.nbytes
            if row.message in own:
                continue
            rows.append(row)
            if row.stage in ("write", "read"):
                end = End(part.worker, row.thread, row.at, row.nbytes)
                (sent if row.stage == "write" else read)[row.message] = end, row
        spans += _spans_of(part, rows, functions)
    both = sent.keys() & read.keys()
    messages = [Message(id, row.kind, row.reply_to, end, read[id][0]) for id, (end, row) in sent.items() if id in both]
    return Recorded(spans, messages, len(sent.keys() ^ read.keys()), len(own_sent), sum(own_sent.values()))


def _own_messages(parts: Sequence[Part]) -> set[int]:
    """The calls that the profiler made itself, and their answers."""
    rows = [row for part in parts for row in part.rows]
    calls = {row.message for row in rows if row.detail in OWN}
    calls |= {id for part in parts for id in (part.started_by, part.told_by) if id}
    return calls | {row.message for row in rows if row.reply_to in calls}


def _spans_of(part: Part, rows: list[Row], functions: dict[int, str]) -> list[Span]:
    found: list[Span] = []
    open_spans: dict[int, list[Span]] = {}  # by thread, the innermost last

    def name_of(stage: str, row: Row) -> str:
        match stage:
            case "run":
                return row.detail or "a function"
            case "pass":
                return "backward"
            case "wait":
                what = functions.get(row.message) or row.detail or "an answer"
                return f"wait for {what}" if row.kind == "call" else "wait for gradients"
            case "receive":
                return f"handle {row.kind}"
        return f"{stage} {row.kind}"

    def begin(stage: str, row: Row) -> None:
        span = Span(
            part.worker, row.thread, stage, name_of(stage, row), row.at, part.ended, row.message, row.peer, row.nbytes
        )  # fmt: skip
        found.append(span)
        open_spans.setdefault(row.thread, []).append(span)

    def end(stages: tuple[str, ...], row: Row) -> None:
        stack = open_spans.get(row.thread, [])
        if any(span.stage in stages and span.message == row.message for span in stack):
            while stack:
                span = stack.pop()
                span.end = row.at
                if span.stage in stages and span.message == row.message:
                    return

    for row in rows:
        if row.until:
            name = f"read {row.kind}" if row.stage == "read" else "the profiler starts"
            found.append(
                Span(
                    part.worker, row.thread, row.stage, name, row.at, row.until, row.message, row.peer, row.nbytes
                )
            )  # fmt: skip
        elif row.stage == "send" and row.phase == "started":
            begin("encode", row)
        elif row.stage == "write":
            end(("encode",), row)
            begin("write", row)
        elif row.phase == "started":
            begin(row.stage, row)
        else:
            end(("encode", "write") if row.stage == "send" else (row.stage,), row)
    return [span for span in found if span.end >= span.start]
