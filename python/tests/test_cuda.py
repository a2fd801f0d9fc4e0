"""Memory and streams of CUDA, with the simulated driver of the repository in place of a GPU's."""

import ctypes
import gc
import os
import tempfile
import unittest
import weakref
from pathlib import Path

import numpy as np
from job import LONG, raises, run

import gdasync
from gdasync import Deadline, Error

TARGET = Path(os.environ.get("CARGO_TARGET_DIR", Path(__file__).parents[2] / "target"))
DRIVER = TARGET / "debug" / "libsimulated_cuda.so"


class Cuda:
    """The driver, with its first device current."""

    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxPushCurrent_v2", context)

    def __call__(self, name, *arguments):
        status = getattr(self.lib, name)(*arguments)
        assert status == 0, f"{name}: {status}"

    def stream(self):
        stream = ctypes.c_void_p()
        self("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        return stream.value

    def synchronize(self, stream):
        self("cuStreamSynchronize", ctypes.c_void_p(stream))


class Array:
    """Numbers in memory of CUDA."""

    def __init__(self, cuda, count):
        self.cuda, self.count, address = cuda, count, ctypes.c_uint64()
        cuda("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(8 * count))
        self.address = address.value
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<f8", "data": (self.address, False), "strides": None, "version": 3
        }

    def write(self, value, stream):
        # Kept: the copy is made when the stream gets there.
        self.source = np.full(self.count, float(value))
        self._copy("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(self.address), self.source.ctypes, stream)

    def read(self, stream):
        into = np.zeros(self.count)
        self._copy("cuMemcpyDtoHAsync_v2", into.ctypes, ctypes.c_uint64(self.address), stream)
        self.cuda.synchronize(stream)
        return set(into.tolist())

    def _copy(self, name, to, of, stream):
        to, of = (each if isinstance(each, ctypes.c_uint64) else each.data_as(ctypes.c_void_p) for each in (to, of))
        self.cuda(name, to, of, ctypes.c_size_t(8 * self.count), ctypes.c_void_p(stream))


class OfTorch:
    def __init__(self, stream):
        self.cuda_stream, self.device_index = stream, 0


class OfCuda:
    def __init__(self, stream):
        self.stream = stream

    def __cuda_stream__(self):
        return 0, self.stream


def messages(comm):
    peer, cuda = 1 - comm.rank, Cuda()
    raw = cuda.stream()
    out, into = Array(cuda, 512), Array(cuda, 512)
    for round, stream in enumerate([raw, OfTorch(raw), OfCuda(raw), gdasync.Stream(raw)] * 3):
        out.write(round + comm.rank, raw)
        received = comm.irecv(into, peer, stream=stream)
        comm.send(out, peer, stream=stream)
        received.wait_on(stream)
        assert into.read(raw) == {float(round + peer)}
    gdasync.Stream(raw).synchronize(LONG)
    assert gdasync.Stream(raw).__cuda_stream__() == (0, raw)
    raises(ValueError, lambda: gdasync.Stream(raw, wait_limit=1.0), "wait limit")
    raises(ValueError, lambda: gdasync.Stream(raw, via="kernel"), "memop")
    raises(ValueError, lambda: gdasync.Stream(cuda.stream(), via="warp"), "memop, kernel or auto")
    # Without torch, None is the default stream.
    out.write(100 + comm.rank, None)
    received = comm.irecv(into, peer)
    comm.send(out, peer)
    received.wait_on()
    assert into.read(None) == {float(100 + peer)}
    # Registered memory.
    memory = comm.register(into)
    received = comm.irecv(memory, peer, stream=raw)
    comm.send(comm.register(out), peer, stream=raw)
    assert received.wait() == 4096
    # In a capture of others nothing is sent.
    cuda("cuStreamBeginCapture_v2", ctypes.c_void_p(raw), 2)
    raises(Error, lambda: comm.send(out, peer, stream=raw), "gdasync.Graph")
    graph = ctypes.c_void_p()
    cuda("cuStreamEndCapture", ctypes.c_void_p(raw), ctypes.byref(graph))
    gdasync.Stream(raw).synchronize(LONG)
    comm.finalize()


def graphs(comm):
    peer, cuda = 1 - comm.rank, Cuda()
    raw, out, into = cuda.stream(), Array(cuda, 64), Array(cuda, 64)
    (channel,) = comm.channels([(peer, [into])])
    graph = gdasync.Graph()
    with graph.capture(raw):
        channel.post_recv(raw)
        channel.send(out, raw)
        channel.wait_recv(raw)
    for round in range(5):
        out.write(round + comm.rank, raw)
        graph.replay()
        assert into.read(raw) == {float(round + peer)}
    gdasync.Stream(raw).synchronize(LONG)
    comm.finalize()


def windows(comm):
    peer, cuda = 1 - comm.rank, Cuda()
    raw, source = cuda.stream(), np.zeros(8)
    # In the CPU's memory: the driver cannot map its own, and words must be mapped.
    memory = np.zeros(512)
    alive = weakref.ref(memory)
    window = comm.window(memory)
    stream = gdasync.Stream(raw)
    for round in range(1, 6):
        source.fill(round)
        window.put(source, peer, 64, signal=(0, "add", 1), stream=raw).wait_on(raw)
        window.wait_signal(0, round, stream=raw)
        stream.synchronize(LONG)
        assert (memory[8:16] == round).all()
        # The peer may write again.
        window.signal(peer, (8, "set", round), stream=raw)
        window.wait_signal(8, round, stream=raw)
    stream.synchronize(LONG)
    window.close()
    # CUDA has the pages until they are given back: so long the array stays.
    del memory, window
    gc.collect()
    comm.finalize()
    del comm
    # Alone from here on, not one of the job.
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    for _ in range(1000):
        if alive() is None:
            break
        # Each part that was dropped looks at those that are kept.
        other = gdasync.init(spawn=1)
        host = np.zeros(512, dtype=np.uint64)
        window = other.window(host)
        window.wait_signal(0, 0, stream=raw)
        gdasync.Stream(raw).synchronize(LONG)
        window.close()
        del other, host, window
        gc.collect()
    assert alive() is None


# A stream whose wait has passed its limit can be used again once that is reported.
def failures(comm):
    raw, words = Cuda().stream(), comm.window(np.zeros(512, dtype=np.uint64))
    gdasync.Stream(raw, wait_limit=0.1)
    words.wait_signal(0, 1, stream=raw)
    raises(Deadline, lambda: gdasync.Stream(raw).synchronize(LONG), "wait_limit")
    stream = gdasync.Stream(raw, wait_limit=LONG)
    words.wait_signal(0, 0, stream=stream)
    stream.synchronize(LONG)
    words.close()
    comm.finalize()


# From and into memory that the CPU cannot map, on a stream that is given by its number; the signals are in memory of the CPU.
def puts(comm):
    peer, cuda = 1 - comm.rank, Cuda()
    raw, source, memory = cuda.stream(), Array(cuda, 8), Array(cuda, 64)
    memory.write(0, raw)
    cuda.synchronize(raw)
    counters = np.zeros(512, dtype=np.uint64)
    window = comm.window(memory)
    words = window.beside(counters)
    for round in range(1, 6):
        source.write(round, raw)
        window.put(source, peer, 64, signal=(0, "add", 1), signal_in=words, stream=raw).wait_on(raw)
        words.wait_signal(0, round, stream=raw)
        assert memory.read(raw) == {0.0, float(round)}
        # The peer may write again.
        words.signal(peer, (8, "set", round), stream=raw)
        words.wait_signal(8, round, stream=raw)
    gdasync.Stream(raw).synchronize(LONG)
    comm.finalize()


@unittest.skipUnless(DRIVER.exists(), f"no {DRIVER}: cargo build -p gdsync-simulated-cuda")
class Simulated(unittest.TestCase):
    def run_ranks(self, function):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "libcuda.so.1").symlink_to(DRIVER)
            run(2, function, environment={"LD_LIBRARY_PATH": folder})

    def test_messages_on_streams_of_others(self):
        self.run_ranks(messages)

    def test_graphs(self):
        self.run_ranks(graphs)

    def test_windows(self):
        self.run_ranks(windows)

    def test_failures(self):
        self.run_ranks(failures)

    def test_puts(self):
        self.run_ranks(puts)


if __name__ == "__main__":
    unittest.main()
