"""Memsets of captured graphs become kernels: on a made-up driver, and on a GPU where there is one."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from potluck.engine.cuda import graph_nodes
from potluck.engine.cuda.graph_nodes import BLOCKS, THREADS, Driver, MemsetParameters, memsets

GRAPH, KERNEL, MEMSET = 7, 0, 2


class Library:
    """Answers as the CUDA driver does, for one graph whose nodes are kernels and memsets."""

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[int, Any]] = {}
        self.edges: set[tuple[int, int]] = set()
        self.loaded = 0

    def add(self, kind: int, content: Any, *before: int) -> int:
        node = 100 + len(self.nodes) + 1
        while node in self.nodes:
            node += 1
        self.nodes[node] = kind, content
        self.edges |= {(one, node) for one in before}
        return node

    def _listed(self, found: list[int], out: Any, count: Any) -> int:
        if out is not None:
            out[:] = found
        count._obj.value = len(found)
        return 0

    def cuGraphGetNodes(self, graph: Any, out: Any, count: Any) -> int:
        assert graph.value == GRAPH
        return self._listed([*self.nodes], out, count)

    def cuGraphNodeGetDependencies(self, node: Any, out: Any, count: Any) -> int:
        return self._listed(sorted(one for one, other in self.edges if other == node.value), out, count)

    def cuGraphNodeGetDependentNodes(self, node: Any, out: Any, count: Any) -> int:
        return self._listed(sorted(other for one, other in self.edges if one == node.value), out, count)

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.nodes[node.value][0]
        return 0

    def cuGraphMemsetNodeGetParams(self, node: Any, parameters: Any) -> int:
        given = self.nodes[node.value][1]
        ctypes.pointer(parameters._obj)[0] = given
        return 0

    def cuGraphAddKernelNode(self, node: Any, graph: Any, before: Any, count: Any, given: Any) -> int:
        launch = given._obj
        sizes = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint
        arguments = [
            ctypes.cast(launch.arguments[place], ctypes.POINTER(kind))[0] for place, kind in enumerate(sizes)
        ]
        content = launch.function, launch.grid[0], launch.block[0], tuple(arguments)
        node._obj.value = self.add(KERNEL, content, *(before[: count.value] if before else ()))
        return 0

    def cuGraphAddDependencies(self, graph: Any, start: Any, end: Any, count: Any) -> int:
        self.edges |= {(start[place], end[place]) for place in range(count.value)}
        return 0

    def cuGraphDestroyNode(self, node: Any) -> int:
        del self.nodes[node.value]
        self.edges = {edge for edge in self.edges if node.value not in edge}
        return 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        assert b".entry fill" in code
        self.loaded += 1
        module._obj.value = 1
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 5
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Library()


def replace_all(library: Library) -> None:
    driver = Driver(library)
    for node, memset, words in [*memsets(driver, GRAPH)]:
        driver.replace(GRAPH, node, memset, words)


def test_a_kernel_takes_the_place_of_a_memset(library: Library) -> None:
    first = library.add(KERNEL, "first")
    cleared = library.add(MEMSET, MemsetParameters(4096, 0, 0, 1, 4000, 1), first)
    after, last = library.add(KERNEL, "after", cleared), library.add(KERNEL, "last", cleared, first)
    replace_all(library)
    (fill,) = (node for node, (_, content) in library.nodes.items() if isinstance(content, tuple))
    assert library.nodes[fill][1] == (5, 4, THREADS, (4096, 1000, 0))
    assert library.edges == {(first, fill), (fill, after), (fill, last), (first, last)}
    assert all(kind == KERNEL for kind, _ in library.nodes.values())


@pytest.mark.parametrize(
    ("size", "value", "word"),
    [(1, 0xAB, 0xABABABAB), (2, 0x1234, 0x12341234), (4, 0xDEADBEEF, 0xDEADBEEF)],
)
def test_values_of_one_and_two_bytes_are_repeated(library: Library, size: int, value: int, word: int) -> None:
    library.add(MEMSET, MemsetParameters(64, 0, value, size, 64 // size, 1))
    replace_all(library)
    (content,) = (content for _, content in library.nodes.values())
    assert content[3] == (64, 16, word)


def test_large_memsets_have_few_blocks_and_the_kernel_is_loaded_once(library: Library) -> None:
    for _ in range(3):
        library.add(MEMSET, MemsetParameters(0, 0, 0, 4, 10**7, 1))
    replace_all(library)
    assert [content[1] for _, content in library.nodes.values()] == [BLOCKS] * 3
    assert library.loaded == 1


@pytest.mark.parametrize(
    "kept",
    [
        MemsetParameters(64, 0, 0, 1, 62, 1),  # no whole words
        MemsetParameters(62, 0, 0, 1, 64, 1),  # words that begin between two
        MemsetParameters(64, 256, 0, 4, 16, 3),  # rows with gaps
    ],
)
def test_what_the_kernel_cannot_do_stays_a_memset(library: Library, kept: MemsetParameters) -> None:
    node = library.add(MEMSET, kept)
    replace_all(library)
    assert [*library.nodes] == [node]


def test_rows_without_gaps_are_one_piece(library: Library) -> None:
    library.add(MEMSET, MemsetParameters(64, 64, 0, 4, 16, 3))
    replace_all(library)
    assert [content[3] for _, content in library.nodes.values()] == [(64, 48, 0)]


def test_an_error_of_the_driver_is_named(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cuGraphGetNodes", lambda *arguments: 700)
    with pytest.raises(RuntimeError, match=r"cuGraphGetNodes .* error 700"):
        Driver(library).nodes(GRAPH)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_a_graph_without_memsets_computes_the_same() -> None:
    driver = graph_nodes.driver()
    assert driver is not None
    runtime, stream = ctypes.CDLL(None), torch.cuda.Stream()
    a, copied = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    large, odd = torch.ones(1 << 20, device="cuda"), torch.full((64,), 7, device="cuda", dtype=torch.uint8)

    def clear(value: torch.Tensor, byte: int, size: int) -> None:
        runtime.cudaMemsetAsync(
            ctypes.c_void_p(value.data_ptr()),
            byte,
            ctypes.c_size_t(size),
            ctypes.c_void_p(stream.cuda_stream),
        )

    graph = graph_nodes.new_graph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        a.add_(1)
        copied.copy_(a)
        clear(a, 0, 4000)
        large.mul_(3)
        clear(large, 0, 4 << 20)
        clear(odd, 5, 62)
        large.add_(2)
        a.add_(5)
        graph.capture_end()
    raw = graph.raw_cuda_graph()
    assert sum(driver.memset(node) is not None for node in driver.nodes(raw)) == 3
    graph_nodes.finish(graph)
    assert sum(driver.memset(node) is not None for node in driver.nodes(raw)) == 1  # the one of 62 bytes
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert (a == 5).all()
    assert (large == 2).all()
    assert (copied == 6).all()
    assert (odd[:62] == 5).all()
    assert (odd[62:] == 7).all()
