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
from ..profiler import Summary
from .accounts import Account
from .check import LIMIT, Difference, in_words
from .model import LAYERS, ROWS, Stage, Transformer
from .pictures import smoothed
from .progress import size
from .sights import Timeline
from .text import CHARACTERS
from .training import Training

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
    """What the demo has found out."""

    losses: Sequence[tuple[float, float]]  # seconds, loss
    loss_picture: str
    prompt: str
    untrained: str
    trained: str
    accounts: Sequence[Account]
    differences: Sequence[Difference]
    timeline: Timeline
    graph: Graph


def write_report(results: Results, path: Path) -> None:
    """Writes the page."""
    steps, seconds = len(results.losses), results.losses[-1][0]
    first, last = results.losses[0][1], smoothed([loss for _, loss in results.losses])[-1]
    sent = sum(sum(account.bytes_to.values()) for account in results.accounts)
    calls = sum(account.calls for account in results.accounts)
    worst = max(difference.largest for difference in results.differences)
    exact = all(difference.is_small for difference in results.differences)
    tiles = [
        _tile(f"{first:.2f} → {last:.2f}", f"loss, in {steps:,} steps"),
        _tile(f"{steps / seconds:.1f}", "steps per second"),
        _tile(size(sent), f"sent between workers, {size(sent / steps)} in a step"),
        _tile(in_words(worst), "largest difference of a gradient from one process", "good" if exact else "bad"),
    ]
    page = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    filled = page.substitute(
        headline="A transformer on four workers learns Python",
        lead=f"One program, four processes, {seconds:.0f} seconds of training. The backward pass found its way through "
        "all of them, and every number below was measured while it did.",
        tiles="".join(tiles),
        characters=len(CHARACTERS),
        blind=f"{math.log(len(CHARACTERS)):.2f}",
        loss=results.loss_picture,
        prompt=html.escape(results.prompt.strip()),
        untrained=html.escape(results.untrained),
        trained=_highlighted(results.trained),
        steps=f"{steps:,}",
        workers_text=f"While it trained: {calls:,} calls, and {size(sent)} that went from one process to another.",
        workers="".join(_worker(account, results.differences) for account in results.accounts),
        traffic=_traffic(results.accounts),
        timeline=_timeline(results.timeline),
        graph=_graph(results.graph),
        check=_check(results.differences),
        model_code=_source(Stage, Transformer),
        step_code=_source(Training.step, Training.batch),
        footer=f"telegrad on torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}",
    )
    path.write_text(filled, encoding="utf-8")


def _tile(value: str, label: str, kind: str = "") -> str:
    return f'<div class="card tile"><div class="value {kind}">{value}</div><div class="label">{label}</div></div>'


def _worker(account: Account, differences: Iterable[Difference]) -> str:
    parameters = sum(d.elements for d in differences if d.owner == account.name)
    rows = {
        "process": account.pid,
        "parameters": f"{parameters:,}",
        "calls served": f"{account.calls:,}",
        "messages sent": f"{account.messages:,}",
        "bytes sent": size(sum(account.bytes_to.values())),
        "bytes received": size(sum(account.bytes_from.values())),
        "processor time": f"{account.cpu_seconds:.1f} s",
        "memory, at most": size(account.memory),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows.items())
    return (
        f'<div class="card worker" style="--of: var(--{account.name})"><h3>{account.name}</h3>'
        f'<div class="holds">{HOLDS[account.name]}</div><dl>{listed}</dl></div>'
    )


def _traffic(accounts: Sequence[Account]) -> str:
    names = [account.name for account in accounts]
    rows = []
    for account in accounts:
        cells = [size(account.bytes_to[name]) if account.bytes_to.get(name) else "·" for name in names]
        rows.append([_named(account.name), *cells])
    return _table(["", *names], rows)


def _check(differences: Sequence[Difference]) -> str:
    """By worker; and below, by parameter."""
    if not all(difference.is_small for difference in differences):
        verdict = f'<span class="bad">Some gradients differ by more than {LIMIT:g}.</span>'
    elif any(difference.largest for difference in differences):
        verdict = f'<span class="good">No gradient differs by more than {LIMIT:g}.</span>'
    else:
        verdict = '<span class="good">The gradients are equal to the last bit.</span>'
    by_worker = []
    for name in HOLDS:
        mine = [difference for difference in differences if difference.owner == name]
        by_worker.append(
            [
                _named(name),
                f"{sum(d.elements for d in mine):,}",
                f"{max(d.scale for d in mine):.2e}",
                _marked(max(mine, key=lambda d: d.largest)),
            ]
        )
    by_parameter = [
        [f"<code>{html.escape(d.parameter)}</code>", d.owner, f"{d.elements:,}", f"{d.scale:.2e}", _marked(d)]
        for d in differences
    ]
    return (
        "<p>After the training, one step was made twice with the same batch, in float64: on the four workers, and by "
        f"the same model in one process with plain PyTorch. {verdict}</p>"
        '<div class="card scroll">'
        + _table(["owner", "parameters", "largest gradient", "largest difference"], by_worker)
        + "</div><details><summary>each parameter</summary><div class='card scroll'>"
        + _table(["parameter", "owner", "elements", "largest gradient", "largest difference"], by_parameter)
        + "</div></details>"
    )


def _marked(difference: Difference) -> str:
    return f'<span class="{"good" if difference.is_small else "bad"}">{in_words(difference.largest)}</span>'


def _timeline(timeline: Timeline) -> str:
    """The picture of a step; and where the time of all steps under the profiler went."""
    summary, encoded = timeline.summary, base64.b64encode(timeline.picture).decode("ascii")
    times = {worker.name: worker.time for worker in summary.workers}
    rows = "".join(f"<div>{_named(name)}</div>{_bar(times[name], summary.length)}" for name in HOLDS if name in times)
    keys = "".join(f'<span><i style="background: var(--{state})"></i>{title}</span>' for state, title in STATES.items())
    return (
        f"<p>{timeline.milliseconds:.0f} milliseconds: forward through both stages, backward through both, and a step "
        "of the optimizer everywhere. A band is a process, a lane in it a thread, an arrow a message. "
        f"<code>trace.json</code> has {summary.steps} such steps with every operator; it opens in ui.perfetto.dev.</p>"
        '<div class="card canvas scroll"><div class="picture wide painted">'
        f'<img alt="the timeline of one step on four workers" src="data:image/png;base64,{encoded}"></div></div>'
        f'<div class="halves below"><div class="card"><p class="quiet">Where the time of a step went: '
        f"{summary.length / summary.steps / 1000:.0f} ms each, {summary.steps} steps under the profiler</p>"
        f'<div class="bars">{rows}</div><div class="keys">{keys}</div></div>'
        '<div class="card"><p class="quiet">The critical path: what a step had to wait for</p>'
        f"{_path(summary)}</div></div>"
    )


def _bar(time: Mapping[str, float], length: float) -> str:
    pieces = "".join(
        f'<i style="width: {100 * time[state] / length:.2f}%; background: var(--{state})" '
        f'title="{title}: {time[state] / length:.0%}"></i>'
        for state, title in STATES.items()
    )
    return f'<div class="bar">{pieces}</div>'


def _path(summary: Summary) -> str:
    """The longest of its links."""
    links = summary.to_dict()["critical_path"]
    rows = [
        [_named(link["worker"]), html.escape(link["name"]), f"{link['time'] / summary.length:.0%}"]
        for link in links[:LINKS]
    ]
    rest = sum(link["time"] for link in links[LINKS:])
    rows.append(["", f"{len(links) - LINKS} others", f"{rest / summary.length:.0%}"])
    return _table(["worker", "what", "share of a step"], rows)


def _graph(graph: Graph) -> str:
    """The picture; where there is no graphviz, what it gives in its place."""
    return (
        f"<p>What autograd remembers of one forward pass, on {len(graph.workers)} workers, "
        f"joined by {len(graph.sends)} tensors that went from one to another. The backward pass goes the other way; "
        "the table on the server gets the sum of what comes from both stages.</p>"
        f'<div class="card canvas scroll"><div class="drawn painted">{graph._repr_html_()}</div></div>'
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _named(worker: str) -> str:
    return f'<span class="dot" style="--of: var(--{worker})"></span>{worker}'


def _source(*things: object) -> str:
    """The code itself, without the docstrings' indentation of a class around it."""
    return _highlighted("\n\n".join(textwrap.dedent(inspect.getsource(thing)).strip() for thing in things))  # type: ignore[arg-type]


def _highlighted(code: str) -> str:
    marked: str = highlight(code, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    return marked
