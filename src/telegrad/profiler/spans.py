"""From recorded rows to spans and messages: pure, and in each worker's own time.

rows of a thread    started, started, complete, complete   ->   spans that lie inside of each other
rows of a message   `write` at its sender, `read` at its receiver   ->   one Message with both ends
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..events import Event
from ..runtime.recording import Part, Row, ask_recorder

# A stage's category in a trace.
_CATEGORIES = {
    "encode": "serialise",
    "decode": "serialise",
    "write": "wire",
    "read": "wire",
    "wait": "wait",
    "receive": "handle",
    "join": "profiler",
}
_NAMES = {"pass": "backward", "join": "the profiler starts"}


@dataclass(slots=True)
class Span:
    """A piece of a thread's work. Times are in seconds."""

    worker: str
    thread: int
    stage: str  # encode, write, read, receive, decode, run, wait, pass or join
    name: str
    start: float
    end: float
    message: int
    peer: str
    nbytes: int = 0

    @property
    def category(self) -> str:
        """serialise, wire, wait, handle, profiler or run."""
        return _CATEGORIES.get(self.stage, "run")


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
    """All spans and messages, without the profiler's own."""
    own = _own_messages(parts)
    events = [row.event for part in parts for row in part.rows]
    functions = {event.message_id: event.detail for event in events if event.stage == "run" and event.detail}
    own_sent = {
        event.message_id: event.nbytes for event in events if event.stage == "write" and event.message_id in own
    }
    spans: list[Span] = []
    sent: dict[int, tuple[End, Event]] = {}
    read: dict[int, End] = {}
    for part in parts:
        rows = [row for row in part.rows if row.event.message_id not in own]
        for event, _, thread in rows:
            end = End(part.worker, thread, event.at, event.nbytes)
            if event.stage == "write":
                sent[event.message_id] = end, event
            elif event.stage == "read":
                read[event.message_id] = end
        spans += _spans_of(part, rows, functions)
    messages = [
        Message(id, event.kind, event.reply_to, end, read[id]) for id, (end, event) in sent.items() if id in read
    ]
    return Recorded(spans, messages, len(sent.keys() ^ read.keys()), len(own_sent), sum(own_sent.values()))


def _own_messages(parts: Sequence[Part]) -> set[int]:
    """The calls that the profiler made itself, and their answers."""
    events = [row.event for part in parts for row in part.rows]
    calls = {event.message_id for event in events if event.detail == ask_recorder.__name__}
    calls |= {id for part in parts for id in (part.started_by, part.told_by) if id}
    return calls | {event.message_id for event in events if event.reply_to in calls}


def _spans_of(part: Part, rows: list[Row], functions: dict[int, str]) -> list[Span]:
    found: list[Span] = []
    open_spans: dict[int, list[Span]] = {}  # by thread, the innermost last

    def add(stage: str, row: Row, end: float) -> Span:
        event, name = row.event, _name_of(stage, row.event, functions)
        span = Span(
            part.worker, row.thread, stage, name, event.at, end, event.message_id, event.peer, event.nbytes
        )  # fmt: skip
        found.append(span)
        return span

    def begin(stage: str, row: Row) -> None:
        open_spans.setdefault(row.thread, []).append(add(stage, row, part.ended))

    def end(stages: tuple[str, ...], row: Row) -> None:
        stack = open_spans.get(row.thread, [])
        for place in reversed(range(len(stack))):
            if stack[place].stage in stages and stack[place].message == row.event.message_id:
                for span in stack[place:]:
                    span.end = row.event.at
                del stack[place:]
                return

    for row in rows:
        stage, is_start = row.event.stage, row.event.phase == "started"
        if row.until:
            add(stage, row, row.until)
        elif stage == "write":  # one event for the end of encoding and the start of writing
            end(("encode",), row)
            begin("write", row)
        elif is_start:
            begin("encode" if stage == "send" else stage, row)
        else:
            end(("encode", "write") if stage == "send" else (stage,), row)
    return [span for span in found if span.end >= span.start]


def _name_of(stage: str, event: Event, functions: dict[int, str]) -> str:
    match stage:
        case "run":
            return event.detail or "a function"
        case "wait" if event.kind == "call":
            return f"wait for {functions.get(event.message_id) or event.detail or 'an answer'}"
        case "wait":
            return "wait for gradients"
        case "receive":
            return f"handle {event.kind}"
    return _NAMES.get(stage) or f"{stage} {event.kind}"
