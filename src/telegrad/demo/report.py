"""The report: one page that needs nothing but itself. page.html is its frame."""

from __future__ import annotations

import base64
import html
import inspect
import math
import platform
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

import torch
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import PythonLexer  # type: ignore[import-untyped]

from ..graph import Graph
from ..graph.text import bytes_of
from ..profiler import Summary
from .check import LIMIT, Difference, in_words
from .model import LAYERS, ROWS, Stage, Transformer
from .pictures import Timeline, smoothed
from .text import CHARACTERS
from .training import Training
from .usage import Usage

HOLDS = {
    "driver": "the embedding, the head, and the loop: the program itself",
    "stage1": f"{LAYERS} layers of the transformer",
    "stage2": f"{LAYERS} more layers of the transformer",
    "server": f"a table of {ROWS:,} rows, which both stages use",
}
STATES = {
    "compute": "computing",
    "serialise": "serialising",
    "wire": "on the wire",
    "wait": "waiting for another worker",
    "idle": "idle",
}
LINKS = 6  # of the critical path, shown one by one


@dataclass(frozen=True, kw_only=True)
class Results:
    """The findings of one run of the demo."""

    losses: Sequence[tuple[float, float]]  # seconds, loss
    loss_picture: str
    prompt: str
    untrained: str
    trained: str
    usages: Sequence[Usage]
    differences: Sequence[Difference]
    timeline: Timeline
    graph: Graph


def write_report(results: Results, path: Path) -> None:
    """Writes the page."""
    steps, seconds = len(results.losses), results.losses[-1][0]
    first, last = results.losses[0][1], smoothed([loss for _, loss in results.losses])[-1]
    sent = sum(usage.sent for usage in results.usages)
    worst = max(results.differences, key=lambda difference: difference.largest)
    summary = results.timeline.summary
    tiles = {
        f"loss, in {steps:,} steps": f"{first:.2f} → {last:.2f}",
        "steps per second": f"{steps / seconds:.1f}",
        f"sent between workers, {bytes_of(sent // steps)} in a step": bytes_of(sent),
        "largest difference of a gradient from one process": _marked(worst),
    }
    page = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    filled = page.substitute(
        seconds=f"{seconds:.0f}",
        tiles="".join(_tile(value, label) for label, value in tiles.items()),
        characters=len(CHARACTERS),
        blind=f"{math.log(len(CHARACTERS)):.2f}",
        loss=results.loss_picture,
        prompt=html.escape(results.prompt.strip()),
        untrained=html.escape(results.untrained),
        trained=_highlighted(results.trained),
        steps=f"{steps:,}",
        calls=f"{sum(usage.calls for usage in results.usages):,}",
        sent=bytes_of(sent),
        workers="".join(_worker(usage, results.differences) for usage in results.usages),
        traffic=_traffic(results.usages),
        step_milliseconds=f"{results.timeline.milliseconds:.0f}",
        mean_milliseconds=f"{summary.length / summary.steps / 1000:.0f}",
        profiled=summary.steps,
        timeline=base64.b64encode(results.timeline.picture).decode("ascii"),
        bars="".join(f"<div>{_named(w.name)}</div>{_bar(w.time, summary.length)}" for w in summary.workers),
        keys="".join(f'<span><i style="background: var(--{s})"></i>{title}</span>' for s, title in STATES.items()),
        critical_path=_critical_path(summary),
        graph_workers=len(results.graph.workers),
        graph_sends=len(results.graph.sends),
        graph=results.graph._repr_html_(),
        verdict=_verdict(worst),
        by_worker=_by_worker(results.differences),
        by_parameter=_by_parameter(results.differences),
        model_code=_source(Stage, Transformer),
        step_code=_source(Training.step, Training.batch),
        footer=f"telegrad on torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}",
    )
    path.write_text(filled, encoding="utf-8")


def _tile(value: str, label: str) -> str:
    return f'<div class="card tile"><div class="value">{value}</div><div class="label">{label}</div></div>'


def _worker(usage: Usage, differences: Iterable[Difference]) -> str:
    rows = {
        "process": usage.pid,
        "parameters": f"{sum(d.elements for d in differences if d.owner == usage.name):,}",
        "calls served": f"{usage.calls:,}",
        "messages sent": f"{usage.messages:,}",
        "bytes sent": bytes_of(usage.sent),
        "bytes received": bytes_of(usage.bytes_from.total()),
        "processor time": f"{usage.cpu_seconds:.1f} s",
        "memory, at most": bytes_of(usage.memory),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows.items())
    return (
        f'<div class="card worker" style="--of: var(--{usage.name})"><h3>{usage.name}</h3>'
        f'<div class="holds">{HOLDS[usage.name]}</div><dl>{listed}</dl></div>'
    )


def _traffic(usages: Sequence[Usage]) -> str:
    names = [usage.name for usage in usages]
    rows = [[_named(u.name), *(bytes_of(u.bytes_to[n]) if u.bytes_to[n] else "·" for n in names)] for u in usages]
    return _table(["", *names], rows)


def _bar(time: Mapping[str, float], length: float) -> str:
    pieces = "".join(
        f'<i style="width: {100 * time[state] / length:.2f}%; background: var(--{state})" '
        f'title="{title}: {time[state] / length:.0%}"></i>'
        for state, title in STATES.items()
    )
    return f'<div class="bar">{pieces}</div>'


def _critical_path(summary: Summary) -> str:
    """The longest of its links."""
    links = summary.to_dict()["critical_path"]
    rows = [
        [_named(link["worker"]), html.escape(link["name"]), f"{link['time'] / summary.length:.0%}"]
        for link in links[:LINKS]
    ]
    rest = sum(link["time"] for link in links[LINKS:])
    rows.append(["", f"{len(links) - LINKS} others", f"{rest / summary.length:.0%}"])
    return _table(["worker", "what", "share of a step"], rows)


def _verdict(worst: Difference) -> str:
    if not worst.is_small:
        return f'<span class="bad">Some gradients differ by more than {LIMIT:g}.</span>'
    said = (
        f"No gradient differs by more than {LIMIT:g}." if worst.largest else "The gradients are equal to the last bit."
    )
    return f'<span class="good">{said}</span>'


def _by_worker(differences: Sequence[Difference]) -> str:
    rows = []
    for name in HOLDS:
        mine = [difference for difference in differences if difference.owner == name]
        largest = _marked(max(mine, key=lambda d: d.largest))
        rows.append([_named(name), f"{sum(d.elements for d in mine):,}", f"{max(d.scale for d in mine):.2e}", largest])
    return _table(["owner", "parameters", "largest gradient", "largest difference"], rows)


def _by_parameter(differences: Sequence[Difference]) -> str:
    rows = [
        [f"<code>{html.escape(d.parameter)}</code>", d.owner, f"{d.elements:,}", f"{d.scale:.2e}", _marked(d)]
        for d in differences
    ]
    return _table(["parameter", "owner", "elements", "largest gradient", "largest difference"], rows)


def _marked(difference: Difference) -> str:
    return f'<span class="{"good" if difference.is_small else "bad"}">{in_words(difference.largest)}</span>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _named(worker: str) -> str:
    return f'<span class="dot" style="--of: var(--{worker})"></span>{worker}'


def _source(*things: object) -> str:
    return _highlighted("\n\n".join(textwrap.dedent(inspect.getsource(thing)).strip() for thing in things))  # type: ignore[arg-type]


def _highlighted(code: str) -> str:
    marked: str = highlight(code, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    return marked
