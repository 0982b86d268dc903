"""Pictures of graphs: what is drawn as one, the text for graphviz, the SVG, the page, and what there is without
pygraphviz."""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.graph import Awaited, Edge, Graph, Leaf, Node, Operation, PartState, Recv, Root, Send, WorkerPart, drawing
from telegrad.graph.folding import DETAILS, Picture, fold
from telegrad.messages import COUNTER_BITS

RED, GREY, BLUE = "#d1242f", "#b6bcc4", "#0b62c4"


class Maker:
    """Builds a Graph by hand."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.messages = 0

    def add(self, node: Node, *used: int) -> int:
        self.nodes.append(replace(node, worker=self.names[node.worker_id]))
        place = len(self.nodes) - 1
        self.edges += [Edge(each, place) for each in used]
        return place

    def operation(self, worker: int, name: str, *used: int, active: bool | None = None) -> int:
        return self.add(Operation(worker_id=worker, name=name, shape=(2, 3), active=active), *used)

    def leaf(self, worker: int, *shape: int, active: bool | None = None) -> int:
        return self.add(Leaf(worker_id=worker, name="leaf", shape=shape, dtype="float32", nbytes=400, active=active))

    def root(self, worker: int, *used: int) -> int:
        return self.add(Root(worker_id=worker, name="root 0", shape=(), active=True), *used)

    def send(self, tail: int, to: int, **more: bool | None) -> int:
        """Returns the Recv."""
        self.messages += 1
        worker = self.nodes[tail].worker_id
        message = worker << COUNTER_BITS | self.messages
        active = more.pop("active", None)
        ends = {
            "shape": (2, 3),
            "dtype": "float16",
            "nbytes": 12,
            "id": message,
            "message": message,
            "active": active,
        }
        send = self.add(Send(worker_id=worker, peer=self.names[to], peer_id=to, **ends, **more), tail)
        return self.add(Recv(worker_id=to, peer=self.names[worker], peer_id=worker, **ends), send)

    def graph(self, *passes: PartState, gone: int = -1) -> Graph:
        workers = [
            WorkerPart(name, id, "gone" if id == gone else "here", "it ended" if id == gone else "")
            for id, name in enumerate(self.names)
        ]
        return Graph(7, tuple(workers), tuple(self.nodes), tuple(self.edges), passes)


def parsed(dot: str) -> tuple[dict[str, list[str]], dict[str, str], list[tuple[str, str, str]]]:
    """Items by worker, the attributes of each item, and (tail, head, attributes) of each arrow."""
    boxes: dict[str, list[str]] = {}
    attributes: dict[str, str] = {}
    arrows = []
    box = None
    for line in dot.splitlines():
        if found := re.match(r"\s*subgraph (cluster_\d+) \{", line):
            box = boxes.setdefault(found[1], [])
        elif found := re.match(r"\s*(n\d+) -> (n\d+) \[(.*)\];$", line):
            arrows.append((found[1], found[2], found[3]))
        elif found := re.match(r"\s*(n\d+) \[(.*)\];$", line):
            assert box is not None
            box.append(found[1])
            attributes[found[1]] = found[2]
    return boxes, attributes, arrows


def text_of(attributes: str) -> str:
    label = re.search(r"label=(<.*>|\"[^\"]*\")", attributes)
    return re.sub(r"<[^>]*>", " ", label[1] if label else "")


def counts(picture: Picture) -> list[int]:
    return sorted(len(item.nodes) for item in picture.items)


def is_in_order(picture: Picture) -> bool:
    """Whether no arrow leads back."""
    heads: dict[int, set[int]] = {}
    missing = Counter()
    for arrow in picture.arrows:
        if arrow.head not in heads.setdefault(arrow.tail, set()):
            heads[arrow.tail].add(arrow.head)
            missing[arrow.head] += 1
    ready = [place for place in range(len(picture.items)) if not missing[place]]
    done = 0
    while ready:
        done += 1
        for head in heads.get(ready.pop(), ()):
            missing[head] -= 1
            if not missing[head]:
                ready.append(head)
    return done == len(picture.items)


# -- what is drawn as one -------------------------------------------------------------------------------------------


def a_chain(length: int) -> Graph:
    """a: leaf ─▶ sin ─▶ ... ─▶ sin ─▶ Send ═▶ b"""
    make = Maker("a", "b")
    place = make.leaf(0, 2, 3)
    for number in range(length):
        place = make.operation(0, "MulBackward0" if number % 2 else "SinBackward0", place)
    make.send(place, 1)
    return make.graph()


def test_a_long_chain_is_one():
    picture = fold(a_chain(12), "chains")
    assert counts(picture) == [1, 1, 12]
    assert "12 nodes: SinBackward0 × 6 MulBackward0 × 6" in re.sub(r"\s+", " ", text_of_fold(a_chain(12)))


def text_of_fold(graph: Graph) -> str:
    boxes, attributes, _ = parsed(graph.dot())
    return " ".join(text_of(attributes[item]) for item in boxes["cluster_0"])


def test_a_short_chain_is_drawn_as_it_is():
    assert counts(fold(a_chain(2), "chains")) == [1, 1, 1, 1]


def test_each_node_by_itself():
    assert counts(fold(a_chain(12), "nodes")) == [1] * 14


def test_a_chain_ends_where_something_branches_off():
    """
    leaf ─▶ 3 in a row ─┬─▶ 3 in a row ─▶ Send
                        └─▶ Send
    """
    make = Maker("a", "b")
    place = make.leaf(0, 1)
    for _ in range(3):
        place = make.operation(0, "SinBackward0", place)
    make.send(place, 1)
    for _ in range(3):
        place = make.operation(0, "CosBackward0", place)
    make.send(place, 1)
    assert counts(fold(make.graph(), "chains")) == [1, 1, 1, 3, 3]


def test_a_chain_is_not_folded_over_what_is_not_active():
    make = Maker("a")
    place = make.leaf(0, 1, active=True)
    for _ in range(4):
        place = make.operation(0, "SinBackward0", place, active=True)
    make.root(0, place)
    for _ in range(4):
        place = make.operation(0, "SinBackward0", place, active=False)
    assert counts(fold(make.graph(), "chains")) == [1, 1, 4, 4]


def test_a_block_is_what_is_between_the_same_messages():
    """b gets x, computes with weights, sends h, gets k, and computes on: two blocks, each with its weights."""
    make = Maker("a", "b", "c")
    received = make.send(make.leaf(0, 2, 3), 1)
    weights = [make.leaf(1, 3, 3) for _ in range(4)]
    place = received
    for weight in weights[:2]:
        transposed = make.operation(1, "TBackward0", weight)
        place = make.operation(1, "MmBackward0", place, transposed)
    again = make.send(place, 2)
    place = make.operation(1, "AddBackward0", place, make.send(again, 1))
    for weight in weights[2:]:
        place = make.operation(1, "MmBackward0", place, make.operation(1, "TBackward0", weight))
    make.send(place, 0)
    picture = fold(make.graph(), "blocks")
    of_b = [Counter(n.name for n in item.nodes) for item in picture.items if item.worker_id == 1 and not item.is_recv]
    assert of_b == [
        {"leaf": 2, "TBackward0": 2, "MmBackward0": 2},
        {"leaf": 2, "TBackward0": 2, "MmBackward0": 2, "AddBackward0": 1},
    ]
    assert is_in_order(picture)


@pytest.mark.parametrize("seed", range(30))
def test_blocks_of_random_graphs_come_one_after_the_other(seed):
    """And no node is lost, whatever is drawn as one."""
    graph = random_graph(seed)
    for detail in ("nodes", "chains", "blocks"):
        assert is_in_order(fold(graph, detail)), detail
    drawn = sum(not isinstance(node, Send) for node in graph.nodes)
    for detail in DETAILS:
        picture = fold(graph, detail)
        assert sum(counts(picture)) == drawn
        assert sum(len(arrow.sends) for arrow in picture.arrows) == len(graph.sends)


def random_graph(seed: int) -> Graph:
    rng = random.Random(seed)
    make = Maker("a", "b", "c")
    there: dict[int, list[int]] = {worker: [make.leaf(worker, 2), make.leaf(worker, 3)] for worker in range(3)}
    for _ in range(60):
        worker = rng.randrange(3)
        if rng.random() < 0.25:
            to = rng.randrange(3)
            there[to].append(make.send(rng.choice(there[worker]), to))
        else:
            used = {rng.choice(there[worker]) for _ in range(rng.randint(1, 3))}
            there[worker].append(make.operation(worker, rng.choice(["MulBackward0", "AddBackward0"]), *sorted(used)))
    return make.graph()


def a_large_graph() -> Graph:
    """1,000 nodes and more on 8 workers: 14 batches go through a pipeline of 7 stages with 3 layers each."""
    make = Maker("driver", *(f"stage{number}" for number in range(1, 8)))
    weights = {stage: [make.leaf(stage, 16, 16) for _ in range(3)] for stage in range(1, 8)}
    results = []
    for _ in range(14):
        place = make.leaf(0, 4, 16)
        for stage in range(1, 8):
            place = make.send(place, stage)
            for weight in weights[stage]:
                place = make.operation(stage, "MmBackward0", place, make.operation(stage, "TBackward0", weight))
                place = make.operation(stage, "ReluBackward0", place)
        results.append(make.operation(0, "MeanBackward0", make.send(place, 0)))
    make.root(0, make.operation(0, "StackBackward0", *results))
    return make.graph()


def test_a_large_graph_can_still_be_read():
    graph = a_large_graph()
    assert len(graph.nodes) > 1000
    boxes, attributes, arrows = parsed(graph.dot())
    assert set(boxes) == {f"cluster_{id}" for id in range(8)}
    assert all(boxes.values())
    assert len(attributes) <= 100 and len(arrows) <= 200
    assert "14 tensors in 14 messages" in graph.dot()
    assert len(parsed(graph.dot(detail="nodes"))[1]) > 900


def test_a_graph_of_unlike_things_is_drawn_by_workers():
    """Where nothing is like anything else, each worker is one."""
    make = Maker(*"abcdefgh")
    there = [make.leaf(worker, 2) for worker in range(8)]
    rng = random.Random(1)
    for number in range(400):
        worker, to = rng.randrange(8), rng.randrange(8)
        there[to] = make.operation(to, f"Unlike{number}Backward0", make.send(there[worker], to))
    graph = make.graph()
    assert fold(graph).detail == "workers"
    assert len(parsed(graph.dot())[1]) == 8


def test_no_such_detail():
    with pytest.raises(ValueError, match="detail='much'; choose 'auto' or one of 'nodes', 'chains'"):
        a_chain(3).dot(detail="much")


# -- the text for graphviz --------------------------------------------------------------------------------------------


def test_arrows_have_sizes_and_dtypes_and_unused_ones_are_grey():
    make = Maker("a", "b")
    x = make.leaf(0, 2, 3, active=True)
    used = make.send(x, 1, active=True)
    make.send(x, 1, active=False)
    make.root(1, make.operation(1, "SumBackward0", used, active=True))
    boxes, attributes, arrows = parsed(make.graph().dot())
    sent = {text_of(look).split()[0]: look for *_, look in arrows if "float16" in look}
    assert set(sent) == {"m1", "m2"}
    assert "m1 (2, 3) float16, 12 B" in re.sub(r"\s+", " ", text_of(sent["m1"]))
    assert BLUE in sent["m1"] and "solid" in sent["m1"]
    assert GREY in sent["m2"] and "dashed" in sent["m2"]
    recvs = [look for item, look in attributes.items() if item in boxes["cluster_1"] and "Recv" in text_of(look)]
    assert sorted(GREY in look for look in recvs) == [False, True]
    assert "message 2 to 'b'" in sent["m2"], "the tooltip has the whole id"


def stuck(*, over: bool = False) -> Graph:
    """a awaits its Send 1 from b, which waits for none; its Send 2 has its gradient."""
    make = Maker("a", "b")
    x = make.leaf(0, 2, active=True)
    make.send(x, 1, active=True, awaited=True)
    make.send(x, 1, active=True)
    return make.graph(PartState(0, 9, (1, 2), (Awaited(1, 1),), is_over=over), PartState(1, 9, (), (), is_over=over))


def test_what_is_awaited_is_red():
    graph = stuck()
    _, _, arrows = parsed(graph.dot())
    red = [look for *_, look in arrows if f'color="{RED}", penwidth' in look]
    assert len(red) == 1
    assert "m1" in text_of(red[0]) and "awaited from &#x27;b&#x27;" in text_of(red[0])
    assert "awaits nothing: the pass runs here" in graph.dot()
    assert "awaited: Send m1 of 'a', from 'b'" in str(graph)
    assert "awaited when the pass failed: Send m1 of 'a', from 'b'" in str(stuck(over=True))


def test_a_worker_that_is_gone_has_a_box():
    make = Maker("a", "b")
    place = make.leaf(0, 2)
    there = make.send(place, 1)
    make.nodes[there] = replace(make.nodes[there], is_inferred=True)
    graph = make.graph(gone=1)
    boxes, attributes, arrows = parsed(graph.dot())
    (unknown,) = boxes["cluster_1"]
    assert text_of(attributes[unknown]) == '"?"'
    assert [head for _, head, _ in arrows] == [unknown]
    assert re.search(r"cluster_1 \{\n.*<b>b</b>.*gone", graph.dot())
    assert "worker 'b' (id 1), gone: it ended" in str(graph)


def test_an_empty_graph():
    graph = Maker("a", "b").graph()
    assert "nothing was sent or received" in graph.dot()
    assert "nothing that requires grad was sent in this context yet" in str(graph)


ODD = 'a <b> & "c"\n\\ \x07 é'


def test_names_of_any_kind_are_drawn():
    make = Maker(ODD, "b")
    make.send(make.operation(0, "<&\"'>", make.leaf(0, 2)), 1)
    drawn = ElementTree.fromstring(make.graph().svg())
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert 'a <b> & "c"?\\ ? é' in texts
    assert "<&\"'>" in texts


# -- drawn by pygraphviz ----------------------------------------------------------------------------------------------


@pytest.fixture
def small() -> Iterator[Graph]:
    """A real one: driver ─▶ b ─▶ driver, with one result that is not used."""
    with telegrad.LocalCluster(["b"], transport="inproc"), autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        used, _unused = rpc.rpc_sync("b", two_results, args=(x,))
        yield autograd.graph(context_id, [(used * x).sum()])


def two_results(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin(), x.cos()


SVG = "{http://www.w3.org/2000/svg}"


def test_the_svg_has_a_box_for_each_worker_and_an_arrow_for_each_send(small):
    drawn = ElementTree.fromstring(small.svg())
    groups = Counter(group.get("class") for group in drawn.iter(f"{SVG}g"))
    boxes, attributes, arrows = parsed(small.dot())
    assert groups["cluster"] == len(boxes) == 2
    assert groups["node"] == len(attributes)
    assert groups["edge"] == len(arrows)
    texts = " ".join(element.text or "" for element in drawn.iter(f"{SVG}text"))
    for word in ("driver", "b", "MulBackward0", "root 0", "leaf (3,)", "float32, 12 B"):
        assert word in texts
    strokes = Counter(path.get("stroke") for path in drawn.iter(f"{SVG}path"))
    assert strokes[BLUE] == sum(bool(send.active) for send in small.sends)
    assert strokes[GREY] >= len(small.unused) == 1


@pytest.mark.parametrize("detail", ["auto", "blocks", "groups", "workers"])
def test_a_large_graph_is_drawn(detail):
    ElementTree.fromstring(a_large_graph().svg(detail=detail))


def test_files_of_each_kind(small, tmp_path: Path):
    for suffix in ("dot", "svg", "png", "html"):
        small.save(tmp_path / f"graph.{suffix}")
    assert (tmp_path / "graph.dot").read_text(encoding="utf-8") == small.dot()
    ElementTree.fromstring((tmp_path / "graph.svg").read_text(encoding="utf-8"))
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG\r\n")
    page = (tmp_path / "graph.html").read_text(encoding="utf-8")
    assert "<svg" in page and "http" not in re.sub(r'"http://www.w3.org/[^"]*"', "", page), "it opens offline"
    check_html(page)


def test_nothing_is_imported_from_the_current_directory(small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pygraphviz.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    ElementTree.fromstring(small.svg())


def test_a_notebook_gets_the_picture(small):
    shown = small._repr_html_()
    assert shown.count("<svg") == shown.count("</svg>") == 1
    assert "<?xml" not in shown and "<!DOCTYPE" not in shown
    check_html(shown)


def test_another_ending(small, tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot be saved as '.pdf'; choose .dot, .svg, .png or .html"):
        small.save(tmp_path / "graph.pdf")


# -- and without it ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_pygraphviz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygraphviz", None)


class _Checker(HTMLParser):
    """Every tag that is opened is closed, in order."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_html(text: str) -> None:
    checker = _Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_needs_pygraphviz(small, no_pygraphviz, tmp_path: Path, suffix):
    with pytest.raises(errors.DrawingError, match=rf"as {suffix} by pygraphviz.*pip install 'telegrad\[tools\]'"):
        small.save(tmp_path / f"graph.{suffix}")
    assert not (tmp_path / f"graph.{suffix}").exists()


def test_without_it_there_is_an_outline(small, no_pygraphviz, tmp_path: Path):
    for shown in (small._repr_html_(), page_of(small, tmp_path)):
        assert "<svg" not in shown
        assert "sends m" in shown and "; unused" in shown
        assert "No picture:" in shown
        check_html(shown)
    assert parsed(small.dot())[2]


def page_of(graph: Graph, folder: Path) -> str:
    graph.save(folder / "graph.html")
    return (folder / "graph.html").read_text(encoding="utf-8")


def test_a_drawing_that_fails(small, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drawing, "dot", lambda graph, detail: "digraph { a [label=<<b>] }")
    with pytest.raises(errors.DrawingError, match="could not draw the graph as svg: .*Error: .*HTML"):
        small.svg()


def test_no_system_program_is_needed(small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "<svg" in small.svg()


def test_pictures_are_drawn_on_several_threads(small):
    with ThreadPoolExecutor(3) as threads:
        drawn = set(threads.map(lambda _: small.svg(), range(3)))
    assert len(drawn) == 1
