"""Asking several workers at once, where an answer is welcome and none must be waited for long.

ask(worker, others, function, args, seconds)  ->  what each of them said, and why the rest did not
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ..primitives import clock, current

_LEAST = 1e-3  # seconds; a call's time limit of 0 would mean none


class Caller(Protocol):
    """A worker, as far as it is needed here."""

    def call_async(
        self,
        to: int,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any: ...


def ask(
    worker: Caller, others: Iterable[int], function: Callable[..., Any], args: Sequence[Any], seconds: float
) -> tuple[dict[int, Any], dict[int, Exception]]:
    """Calls a function on each of these workers: (answers, errors), by worker. Takes `seconds` at most.

    The calls belong to no context and to no pass, whatever the code around them does.
    """
    deadline = clock.now() + seconds
    futures: dict[int, Any] = {}
    answers: dict[int, Any] = {}
    errors: dict[int, Exception] = {}
    context_token, pass_token = current.context_id.set(0), current.pass_id.set(0)
    try:
        for other in others:
            left = max(_LEAST, deadline - clock.now())
            try:
                futures[other] = worker.call_async(other, function, args, None, left)
            except Exception as error:
                errors[other] = error
    finally:
        current.pass_id.reset(pass_token)
        current.context_id.reset(context_token)
    for other, future in futures.items():
        try:
            answers[other] = future.wait()  # it fails by itself when its time is over
        except Exception as error:
            errors[other] = error
    return answers, errors
