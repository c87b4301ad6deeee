"""Captured graphs without memsets: each one becomes a small kernel.

cuDNN clears its buffers with memsets; a training step of a ResNet-152 has 316 of them. The driver sends a graph
that consists of kernels to the device in one go. A graph with more than a dozen memsets it sends in pieces, and the
host waits for room in the stream's queue: the steps of one client are nearly done before those of the next can be
sent. On an H200, 31 graphs of 250 kernels and 46 memsets on each of 20 streams took 619 ms, and 45 ms without the
memsets.

torch has no function for this, so the driver is called directly.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch

MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET
THREADS = 256  # of a block
BLOCKS = 528  # at most; four for each multiprocessor of an H200
REPEATED = {1: 0x01010101, 2: 0x00010001, 4: 1}  # makes a 32-bit word of a value of so many bytes

FILL = b"""
.version 6.3
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 place, .param .u64 words, .param .u32 value)
{
    .reg .pred  %past;
    .reg .b32   %value, %block, %blocks, %size, %thread;
    .reg .b64   %place, %words, %index, %stride, %at;
    ld.param.u64        %place, [place];
    ld.param.u64        %words, [words];
    ld.param.u32        %value, [value];
    cvta.to.global.u64  %place, %place;
    mov.u32             %block, %ctaid.x;
    mov.u32             %blocks, %nctaid.x;
    mov.u32             %size, %ntid.x;
    mov.u32             %thread, %tid.x;
    mul.wide.u32        %index, %block, %size;
    cvt.u64.u32         %at, %thread;
    add.u64             %index, %index, %at;
    mul.wide.u32        %stride, %blocks, %size;
LOOP:
    setp.ge.u64         %past, %index, %words;
@%past bra END;
    shl.b64             %at, %index, 2;
    add.u64             %at, %place, %at;
    st.global.u32       [%at], %value;
    add.u64             %index, %index, %stride;
    bra                 LOOP;
END:
    ret;
}
"""


class MemsetParameters(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: `height` rows of `width` elements of `size` bytes, `pitch` bytes apart."""

    _fields_ = (
        ("place", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("size", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )

    def words(self) -> int | None:
        """How many 32-bit words it fills; None if these do not lie in a row or are not whole."""
        row = self.width * self.size
        total = row * self.height
        in_a_row = self.height == 1 or self.pitch == row
        return total // 4 if in_a_row and not (total % 4 or self.place % 4) else None


class KernelParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS, in its first version."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_memory", c_uint),
        ("arguments", ctypes.POINTER(c_void_p)),
        ("extra", ctypes.POINTER(c_void_p)),
    )


class Driver:
    """The few functions of the CUDA driver that edit a graph. Nodes and graphs are addresses."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self._fill: dict[int, int] = {}  # device → the kernel

    def nodes(self, graph: int) -> list[int]:
        """All nodes of a graph."""
        return self._list("cuGraphGetNodes", graph)

    def memset(self, node: int) -> MemsetParameters | None:
        """What a memset fills; None for a node of another kind."""
        kind = ctypes.c_int()
        self._call("cuGraphNodeGetType", c_void_p(node), byref(kind))
        if kind.value != MEMSET:
            return None
        found = MemsetParameters()
        self._call("cuGraphMemsetNodeGetParams", c_void_p(node), byref(found))
        return found

    def replace(self, graph: int, node: int, memset: MemsetParameters, words: int) -> None:
        """Put a kernel that fills the same words in the place of a memset."""
        before = self._list("cuGraphNodeGetDependencies", node)
        after = self._list("cuGraphNodeGetDependentNodes", node)
        kernel = self._add_fill(graph, before, memset, words)
        self._call(
            "cuGraphAddDependencies",
            c_void_p(graph),
            _addresses([kernel] * len(after)),
            _addresses(after),
            c_size_t(len(after)),
        )
        self._call("cuGraphDestroyNode", c_void_p(node))

    def _add_fill(self, graph: int, before: list[int], memset: MemsetParameters, words: int) -> int:
        value = memset.value * REPEATED[memset.size] & 0xFFFFFFFF
        values = c_uint64(memset.place), c_uint64(words), c_uint(value)
        arguments = (c_void_p * 3)(*(ctypes.addressof(one) for one in values))
        blocks = min(-(-words // THREADS), BLOCKS)
        parameters = KernelParameters(
            self._fill_kernel(), (blocks, 1, 1), (THREADS, 1, 1), 0, arguments, None
        )
        kernel = c_void_p()
        self._call(
            "cuGraphAddKernelNode",
            byref(kernel),
            c_void_p(graph),
            _addresses(before),
            c_size_t(len(before)),
            byref(parameters),
        )
        assert kernel.value is not None
        return kernel.value

    def _fill_kernel(self) -> int:
        """The kernel, loaded once per device."""
        device = torch.cuda.current_device()
        if device not in self._fill:
            module, kernel = c_void_p(), c_void_p()
            self._call("cuModuleLoadData", byref(module), FILL)
            self._call("cuModuleGetFunction", byref(kernel), module, b"fill")
            assert kernel.value is not None
            self._fill[device] = kernel.value
        return self._fill[device]

    def _list(self, name: str, of: int) -> list[int]:
        """What the driver lists about a graph or node: it is asked for the number first."""
        count = c_size_t()
        self._call(name, c_void_p(of), None, byref(count))
        found = (c_void_p * count.value)()
        if count.value:
            self._call(name, c_void_p(of), found, byref(count))
        return [address for address in found if address is not None]

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self.library, name)(*arguments)
        if error:
            raise RuntimeError(f"{name} of the CUDA driver gave error {error}")


def _addresses(nodes: list[int]) -> Any:
    return (c_void_p * len(nodes))(*nodes) if nodes else None


@functools.cache
def driver() -> Driver | None:
    """The CUDA driver of this machine; None where it is not found under its usual name."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None


def new_graph() -> torch.cuda.CUDAGraph:
    """A graph that can be edited after its capture, where torch and the driver allow it."""
    if driver() is None or not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        return torch.cuda.CUDAGraph()
    return torch.cuda.CUDAGraph(keep_graph=True)


def finish(graph: torch.cuda.CUDAGraph) -> None:
    """Make a captured graph ready to be replayed, without memsets."""
    known = driver()
    if known is None or not hasattr(graph, "raw_cuda_graph"):
        return
    raw = graph.raw_cuda_graph()
    for node, memset, words in memsets(known, raw):
        known.replace(raw, node, memset, words)
    graph.instantiate()


def memsets(known: Driver, graph: int) -> Iterator[tuple[int, MemsetParameters, int]]:
    """The memsets of a graph that can be replaced, with the number of words that each fills."""
    for node in known.nodes(graph):
        memset = known.memset(node)
        words = memset.words() if memset is not None else None
        if memset is not None and words:
            yield node, memset, words
