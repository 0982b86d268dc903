"""Ends: what other workers are told with the next message that goes to them anyway.

    ended      passes that were begun here in a context, and are done
    released   contexts
    forgotten  tensors that came from there outside of contexts: see plain.py

Nobody waits for these. Whoever asks another worker for gradients of a pass is answered after its end: a worker that
does not know of it yet asks the root, and the root's answer is the next message. So these cost no message of their own,
unless none follows soon. (`.grad` can be looked at without asking, so passes that go there are ended at once.)
"""

from __future__ import annotations

from _thread import RLock  # threading.RLock is Python code
from collections.abc import Iterable, Sequence
from functools import partial

from ..messages import MOST_ENDS, End, Envelope, Kind, Release
from .host import Host, tell
from .plain import Plain

_SOON = 20e-3  # seconds after which a worker is told, if no message went there meanwhile

Told = tuple[list[int], list[int]]  # passes and contexts


class Ends:
    """What one worker has to tell the others of ends."""

    def __init__(self, host: Host, plain: Plain) -> None:
        self._host = host
        self._plain = plain
        self._tell_soon = host.later(_SOON, self.tell_all)
        self._timer_is_set = False
        self._lock = RLock()  # guards the one below; held for a moment only
        self.untold: dict[int, Told] = {}  # by worker; a look whether there is any goes without the lock

    def add(self, workers: Iterable[int], *, passes: Sequence[int] = (), contexts: Sequence[int] = ()) -> None:
        """Has workers told, in the order of these calls."""
        with self._lock:
            for worker in workers:
                told = self.untold.get(worker)
                if told is None:
                    told = self.untold[worker] = ([], [])
                told[0].extend(passes)
                told[1].extend(contexts)
            set_timer, self._timer_is_set = not self._timer_is_set, True
        if set_timer:
            self._tell_soon()

    def outgoing(self, envelope: Envelope, to: int) -> None:
        """Has a message to that worker tell it, and which of the tensors that it has sent have died here."""
        if self._plain.dead or self._plain.to_forget:
            envelope.forgotten = self._plain.outgoing(to)
        if not self.untold:
            return
        with self._lock:
            passes, contexts = self.untold.get(to, ((), ()))
            if len(passes) + len(contexts) <= MOST_ENDS:  # else tell_all() is about to
                self.untold.pop(to, None)
                envelope.ended, envelope.released = tuple(passes), tuple(contexts)

    def not_written(self, envelope: Envelope, to: int) -> None:
        """Takes back what a message should have told that was not sent."""
        if envelope.forgotten:
            self._plain.not_written(envelope.forgotten, to)
        if envelope.ended or envelope.released:
            with self._lock:
                later = self.untold.pop(to, ((), ()))
                self.add((to,), passes=(*envelope.ended, *later[0]), contexts=(*envelope.released, *later[1]))
        envelope.forgotten = envelope.ended = envelope.released = ()  # it may be sent again

    def tell_all(self) -> None:
        """Tells all workers, in messages of their own."""
        self._timer_is_set = False
        while self.untold:
            with self._lock:
                if not self.untold:
                    return
                worker, (passes, contexts) = self.untold.popitem()
            for pass_id in passes:
                tell(self._host, worker, Kind.END, End(pass_id))
            for context_id in contexts:
                tell(self._host, worker, Kind.RELEASE, Release(context_id))

    def tell_pass(self, pass_id: int, workers: Sequence[int], aborted: str) -> None:
        """Tells workers at once of the end of a pass."""
        left = list(workers)
        try:
            while left:
                tell(self._host, left[0], Kind.END, End(pass_id, aborted))
                left.pop(0)
        except BaseException:  # Ctrl-C: the workers that were not told yet must hear of it all the same
            if left:
                self._host.submit(partial(self.tell_pass, pass_id, left, aborted))
            raise

    def on_lost(self, peer: int) -> None:
        """Has nothing more to tell a worker that is gone."""
        with self._lock:
            self.untold.pop(peer, None)
