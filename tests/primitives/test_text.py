"""Names and texts of other workers, wherever they are shown: a terminal must not obey them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from torch.distributed import HashStore

import telegrad
from telegrad import rpc
from telegrad.cli import output, trace
from telegrad.cli.views import GONE, SILENT, Row, View, table
from telegrad.events import logger
from telegrad.primitives.text import LONGEST_NAME, check_name, clean, clean_lines
from telegrad.profiler.averages import function_events
from telegrad.profiler.critical_path import Link
from telegrad.profiler.summary import Summary, WorkerTime
from telegrad.rendezvous.group import Group
from telegrad.worker import Worker

EVIL = "a\x1b]0;owned\x07[/]b"
SHOWN = r"a\x1b]0;owned\x07[/]b"


@pytest.mark.parametrize("name", ["ps", "worker 1", "a[/]b", "trainer:0", "größe", "x" * LONGEST_NAME])
def test_names_that_can_be_shown(name):
    check_name(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "not empty"),
        (7, "not empty, not 7"),
        ("x" * (LONGEST_NAME + 1), "has 256"),
        (EVIL, "cannot be printed"),
        ("two\nlines", "cannot be printed"),
        ("right\u202eleft", "cannot be printed"),
        ("null\x00", "cannot be printed"),
        ("\x9b31m", "cannot be printed"),
    ],
)
def test_names_that_are_refused_everywhere(name, why, tmp_path):
    starts = [
        lambda: rpc.init_rpc(name, init_method=f"file://{tmp_path}/s"),
        lambda: telegrad.LocalCluster([name]),
        lambda: telegrad.LocalCluster(["a"], driver=name),
        lambda: Worker.start(name, Group(HashStore(), None, 5.0)),
    ]
    for start in starts:
        with pytest.raises(ValueError, match=why):
            start()
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_clean():
    assert clean("plain größe [red]") == "plain größe [red]"
    assert clean(EVIL) == SHOWN
    assert clean("a\nb\ud800") == r"a\nb\ud800"
    assert clean_lines("a\x1b\nb") == "a\\x1b\nb"


def shown(thing: object) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=200, height=50)
    console.print(thing)
    return console.file.getvalue()


@pytest.mark.parametrize("state", [SILENT, GONE])
def test_top_shows_a_name_as_text(state):
    row = Row(EVIL, 0, None, state, problem=f"error {EVIL}")
    for thing in (table([row], 200), View("somewhere", None, [row])):
        text = shown(thing)
        assert SHOWN in text
        assert "\x1b]" not in text


def test_summaries_show_names_as_text():
    times = dict.fromkeys(("compute", "serialise", "wire", "wait", "idle"), 1.0)
    path = [Link(EVIL, "compute", EVIL, 0.0, 1.0)]
    summary = Summary(5.0, 1, [WorkerTime(EVIL, times, 1, 1, EVIL)], path, {EVIL: EVIL})
    for text in (str(summary), shown(summary), "\n".join(trace.narrow(summary))):
        assert "\x1b]" not in text
        assert text.count(SHOWN) >= 2


def test_averages_show_names_as_text():
    event = {"ph": "X", "cat": "cpu_op", "name": EVIL, "pid": 1, "tid": 1, "ts": 0.0, "dur": 1.0}
    (found,) = function_events([event], {}, per_worker=False)
    assert found.name == SHOWN


def test_an_error_of_a_command_is_text(capsys):
    from typer import Exit

    with pytest.raises(Exit):
        output.stop("top", EVIL)
    assert "\x1b]" not in capsys.readouterr().err


def test_the_log_is_harmless_for_terminals(caplog):
    try:
        raise ValueError("of a stranger \x1b]0;title\x07")
    except ValueError:
        logger.exception("from %s", "another \x1b[31m worker")
    assert "\x1b" not in caplog.text
    assert "another \\x1b[31m worker" in caplog.text and "of a stranger \\x1b]0;title" in caplog.text
