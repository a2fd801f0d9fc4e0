"""The package over memory of the CPU, between processes. `python -m unittest discover -s python/tests`"""

import ctypes
import gc
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
import unittest
import weakref
from pathlib import Path

import numpy as np
from job import LONG, raises, run

import gdasync
from gdasync import Busy, Deadline, Error, PeerGone


class Exported:
    """An array as DLPack's structure, with some of its fields changed."""

    def __init__(self, array, major=1, shape=None):
        self.array = array
        self.shape = np.array(shape or array.shape, dtype=np.int64)
        tensor = struct.pack(
            "=QiiiBBHQQQ", array.ctypes.data, 1, 0, len(self.shape), 2, 64, 1, self.shape.ctypes.data, 0, 0
        )
        self.managed = ctypes.create_string_buffer(struct.pack("=IIQQQ", major, 0, 0, 0, 0) + tensor)

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor_versioned", None)


# Functions of ranks.


def messages(comm):
    peer, data = 1 - comm.rank, np.arange(5000, dtype=np.float64)
    for size in (1, 8, 500, 5000):
        if comm.rank == 0:
            comm.send(data[:size], peer)
            back = np.zeros(size)
            comm.recv(back, peer)
            assert (back == 2 * data[:size]).all()
        else:
            got = np.zeros(size)
            comm.recv(got, peer)
            comm.send(2 * got, peer)
    # A short message, into a buffer of bytes.
    into = bytearray(100)
    receive, send = comm.irecv(into, peer), comm.isend(data[:2], peer)
    assert (receive.wait(), send.wait()) == (16, 16)
    assert receive.test() == 16 and receive.rank == peer
    assert bytes(into[:16]) == data[:2].tobytes()
    # Registered memory, and a part of it.
    table = np.zeros((4, 16), dtype=np.int32)
    memory = comm.register(table)
    receive = comm.irecv(memory.part(64, 64), peer)
    table[3] = comm.rank + 1
    comm.isend(memory.part(192, 64), peer).wait()
    receive.wait()
    assert memory.nbytes == 256 and (table[1] == peer + 1).all()
    comm.finalize()


def refusals(comm):
    data = np.zeros((4, 4))
    raises(ValueError, lambda: comm.send(data[:, 0], 0), "contiguous")
    for empty in (data[:0], np.zeros((0, 3)), np.zeros((3, 0))):
        raises(ValueError, lambda: comm.send(empty, 0), "empty")
    raises(TypeError, lambda: comm.send("text", 0), "'str'", "tensor")
    raises(ValueError, lambda: comm.recv(b"bytes", 0), "read-only")
    frozen = np.zeros(4)
    frozen.setflags(write=False)
    raises((ValueError, BufferError), lambda: comm.recv(frozen, 0), "read")
    raises(Error, lambda: comm.send(data, 7), "rank 7", rank=7, operation="send")
    raises(TypeError, lambda: comm.allreduce(np.zeros(2, dtype=np.int8)), "int32")
    raises(ValueError, lambda: comm.allreduce(data, "mean"), "sum")
    raises(TypeError, lambda: comm.send(data, 0, stream="s"), "'str'", "stream")
    raises(ValueError, lambda: comm.irecv(data, 0).wait(-1.0), "timeout")

    class Fake:
        def __init__(self, **fields):
            self.__cuda_array_interface__ = {
                "shape": (8,), "typestr": "<f4", "data": (0xDEAD0000, False), "version": 3, **fields
            }

    raises(ValueError, lambda: comm.send(Fake(), 0), "CUDA knows no memory", "0xdead0000")
    raises(ValueError, lambda: comm.send(Fake(strides=(8,)), 0), "contiguous")
    raises(ValueError, lambda: comm.recv(Fake(data=(0xDEAD0000, True)), 0), "read-only")
    raises(ValueError, lambda: comm.send(Fake(typestr="f"), 0), "typestr")
    raises(BufferError, lambda: comm.send(Exported(data, major=2), 0), "version 2")
    raises(ValueError, lambda: comm.send(Exported(data, shape=(2**61, 1)), 0), "shape")
    window = comm.window(data)
    raises(ValueError, lambda: window.put(data[0], 0, signal_in=window), "signal_in without signal")
    raises(ValueError, lambda: gdasync.init("group", spawn=1), "spawn")
    raises(TypeError, lambda: gdasync.init("group"), "torch.distributed")
    late = comm.irecv(np.zeros(1), 0)
    error = raises(Deadline, lambda: late.wait(0.05), "50 ms", rank=0, operation="irecv")
    assert isinstance(error, TimeoutError) and "::" not in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank, again.cause) == (str(error), error.rank, error.cause)
    # Too long for its receive, which is the second one: the connection is broken.
    for _ in range(2):
        comm.isend(np.zeros(2), 0)
    error = raises(Error, late.wait, "longer")
    assert "mp." not in str(error), error


def collectives(comm):
    for dtype in (np.int32, np.int64, np.uint64, np.float32, np.float64):
        values = np.array([comm.rank, 1], dtype=dtype)
        comm.allreduce(values)
        assert values.tolist() == [sum(range(comm.size)), comm.size]
    values = np.array([float(comm.rank)])
    comm.allreduce(values, "max")
    assert values[0] == comm.size - 1
    comm.barrier()
    # A ring.
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got = np.zeros(2000)
    comm.sendrecv(np.full(2000, float(comm.rank)), right, got, left)
    assert (got == left).all()
    comm.finalize()


def streams(comm):
    peer, stream = 1 - comm.rank, gdasync.Stream.host()
    out, into, seen = np.zeros(300), np.zeros(300), []
    # More than the stream takes at once: calls wait for room.
    for round in range(300):
        stream.call(lambda round=round: out.fill(round + comm.rank))
        if round % 2:
            comm.sendrecv(out, peer, into, peer, stream=stream)
        else:
            received = comm.irecv(into, peer, stream=stream)
            comm.send(out, peer, stream=stream)
            received.wait_on(stream)
        stream.call(lambda: seen.append(set(into.tolist())))
    stream.synchronize(LONG)
    assert seen == [{float(round + peer)} for round in range(300)]
    # One direction, in which both the send and the receive hold the stream.
    for _ in range(5):
        comm.send(out, peer, stream=stream) if comm.rank else comm.recv(into, peer, stream=stream)
    stream.synchronize(LONG)
    stream.check()
    raises(ValueError, lambda: received.wait_on(), "stream=")
    raises(TypeError, lambda: stream.__cuda_stream__(), "host stream")
    # A function that raises fails the stream, and every later call says why.
    broken = gdasync.Stream.host()
    broken.call(lambda: 1 // 0)
    raises(Error, lambda: broken.synchronize(LONG), "ZeroDivisionError")
    raises(Error, broken.check, "ZeroDivisionError")
    comm.finalize()


def wait_limit(comm):
    stream = gdasync.Stream.host(wait_limit=0.05)
    if comm.rank == 0:
        comm.recv(np.zeros(4), 1, stream=stream)
        error = raises(Deadline, lambda: stream.synchronize(LONG), "wait_limit", operation="synchronize")
        assert "::" not in str(error)
    else:
        raises(Error, lambda: comm.recv(np.zeros(4), 0), rank=0)
    # Without finalize: the connection is broken.


def windows(comm):
    peer, memory = 1 - comm.rank, np.zeros(64, dtype=np.uint64)
    window = comm.window(memory)
    # By the CPU: data from byte 64 on, a counter at 0.
    for round in range(1, 11):
        window.put(np.full(8, round, dtype=np.uint64), peer, 64, signal=(0, "add", 1))
        window.wait_signal(0, round)
        assert (memory[8:16] >= round).all()
        comm.barrier()
    got = np.zeros(8, dtype=np.uint64)
    assert window.get(got, peer, 64).wait() == 64 and (got == 10).all()
    window.flush(peer)
    # In the order of a stream.
    stream, seen, source = gdasync.Stream.host(), [], np.zeros(8, dtype=np.uint64)
    for round in range(1, 11):
        stream.call(lambda round=round: source.fill(100 + round))
        window.put(source, peer, 256, signal=(8, "set", round), stream=stream).wait_on(stream)
        window.wait_signal(8, round, stream=stream)
        stream.call(lambda: seen.append(int(memory[32])))
        # The peer may write again.
        window.signal(peer, (16, "set", round), stream=stream)
        window.wait_signal(16, round, stream=stream)
    stream.synchronize(LONG)
    assert seen == [100 + round for round in range(1, 11)], seen
    error = raises(Error, lambda: window.put(source, peer, 8 * 64), rank=peer)
    assert error.operation == "put"
    raises(ValueError, lambda: window.signal(peer, (0, "xor", 1)), "'xor'")
    named = "at least 1", "(Window.signal, or Window.put with a signal)"
    raises(Deadline, lambda: window.wait_signal(24, 1, timeout=0.0), *named, operation="wait_signal")
    window.close()
    raises(ValueError, lambda: window.flush(peer), "closed")
    comm.finalize()


def graphs(comm):
    peer = 1 - comm.rank
    out, into = np.zeros(100), np.zeros(100)
    (channel,) = comm.channels([(peer, [into])])
    stream = gdasync.Stream.host()
    for round in range(3):
        out[:] = round
        channel.post_recv(stream)
        channel.send(out, stream)
        channel.wait_recv(stream)
        stream.synchronize(LONG)
        assert (into == round).all()
    graph = gdasync.Graph()
    raises(ValueError, graph.replay, "capture")
    kept = weakref.ref(temporary := np.zeros(100))
    with graph.capture(stream):
        channel.post_recv(stream)
        channel.send(temporary, stream)
        channel.wait_recv(stream)
        raises(Error, lambda: comm.send(out, peer, stream=stream), "Channel.send")
    memory = temporary.ctypes.data
    del temporary
    gc.collect()
    assert kept() is not None and kept().ctypes.data == memory, "the graph keeps what it sends"
    for round in range(10, 15):
        kept()[:] = round
        graph.replay()
        stream.synchronize(LONG)
        assert (into == round).all()
    # A function is called once, a graph runs many times.
    with gdasync.Graph().capture(stream):
        error = raises(Error, lambda: stream.call(print), "before or after each replay")
        assert "Batch" not in str(error)
    # What raises is not captured, and the stream goes on.
    try:
        with gdasync.Graph().capture(stream):
            raise KeyError
    except KeyError:
        pass
    channel.post_recv(stream)
    channel.send(out, stream)
    channel.wait_recv(stream)
    stream.synchronize(LONG)
    del graph
    stream.synchronize(LONG)
    gc.collect()
    assert kept() is None
    comm.finalize()


def lifetimes(comm):
    peer = 1 - comm.rank
    if comm.rank == 0:
        alive = weakref.ref(into := np.zeros(20_000))
        request = comm.irecv(into, peer)
        del into, request
        gc.collect()
        assert alive() is not None, "a message is under way into it"
        comm.barrier()
        comm.barrier()  # the message has been sent
        comm.recv(np.zeros(1), peer)  # behind it
        for _ in range(4):
            comm.isend(np.zeros(1), peer).wait()
            comm.isend(np.zeros(20_000), peer)  # dropped at once: looks at what is kept
        gc.collect()
        assert alive() is None, "the message is complete"
    else:
        comm.barrier()
        comm.isend(np.ones(20_000), peer).wait()
        comm.barrier()
        comm.send(np.ones(1), peer)
        for _ in range(4):
            comm.recv(np.zeros(1), peer)
            comm.recv(into := np.ones(20_000), peer)
            assert (into == 0).all()
    # On a stream that cannot go on yet: the array stays, and the peer gets its bytes.
    stream, go = gdasync.Stream.host(), threading.Event()
    if comm.rank == 0:
        stream.call(go.wait)
        alive = weakref.ref(out := np.full(20_000, 7.0))
        comm.send(out, peer, stream=stream)
        del out
        gc.collect()
        assert alive() is not None
        go.set()
        stream.synchronize(LONG)
    else:
        comm.recv(into := np.zeros(20_000), peer)
        assert (into == 7).all()
    # Other ranks reach memory of channels and of windows that are not closed.
    arrays = [np.zeros(8) for _ in range(3)]
    of_channel, of_window, closed = map(weakref.ref, arrays)
    comm.channels([(peer, [arrays[0]])])
    comm.window(arrays[1])
    comm.window(arrays[2]).close()
    del arrays
    gc.collect()
    assert of_channel() is not None and of_window() is not None and closed() is None
    comm.finalize()


def threads(comm):
    # Rank 1 answers only what another thread of rank 0 sends while its main thread waits.
    if comm.rank == 0:
        into, waits = np.zeros(1), threading.Event()

        def other():
            waits.wait(LONG)
            comm.send(np.ones(1), 1)

        thread = threading.Thread(target=other)
        thread.start()
        waits.set()
        comm.recv(into, 1)
        thread.join()
        assert into[0] == 2
    else:
        comm.recv(into := np.zeros(1), 0)
        comm.send(into + 1, 0)
    comm.finalize()


def collectives_of_threads(comm):
    if comm.rank == 0:
        # The other rank comes late. The thread of an earlier call may still be ending.
        earlier, thread = calls(""), threading.Thread(target=comm.barrier)
        thread.start()
        while not calls("S") - earlier:
            time.sleep(0.01)
        raises(Deadline, lambda: comm.barrier(timeout=0.2), "another thread", operation="barrier")
        comm.send(np.zeros(1), 1)
        thread.join()
    else:
        comm.recv(np.zeros(1), 0)
        comm.barrier()
    comm.finalize()


def calls(state):
    """The threads of this process that make a call of all ranks, if they are in this state: sleeping, or any."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        try:
            status = Path("/proc/self/task", task, "status").read_text()
        except OSError:
            continue  # It has ended.
        if "Name:\tgdasync-call\n" in status and f"State:\t{state}" in status:
            found.add(task)
    return found


def interrupt(comm):
    if comm.rank == 0:
        into, armed = np.zeros(4), threading.Event()

        def pressed(number, frame):
            if armed.is_set():
                armed.clear()
                raise KeyboardInterrupt

        def press():
            # Until one has come within the wait.
            while armed.is_set():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)

        signal.signal(signal.SIGINT, pressed)
        for wait in (lambda: comm.recv(into, 1), lambda: comm.barrier()):
            thread = threading.Thread(target=press)
            try:
                armed.set()
                thread.start()
                wait()
                raise AssertionError("the wait is over")
            except KeyboardInterrupt:
                pass
            if thread.ident is not None:
                thread.join()
        os.kill(os.getpid(), signal.SIGKILL)
    raises(PeerGone, lambda: comm.recv(np.zeros(4), 0), rank=0, operation="recv")


def fork(comm):
    peer = 1 - comm.rank
    kept = comm.isend(np.zeros(10), peer)
    child = os.fork()
    if child == 0:
        try:
            for call in (lambda: comm.send(np.zeros(1), peer), comm.barrier, comm.finalize, comm.shrink):
                raises(Error, call, "process", "by spawn")
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(3)
        del kept, comm
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    comm.recv(np.zeros(10), peer)
    kept.wait()
    comm.barrier()
    comm.finalize()


def killed(comm, how):
    victim = comm.size - 1
    comm.barrier()
    if comm.rank == victim:
        # Its last messages of the barrier may die with it: first all others have left it.
        for rank in range(victim):
            comm.recv(np.zeros(1), rank)
        os.kill(os.getpid(), signal.SIGKILL)
    kept = comm.isend(np.zeros(1), victim)
    into = np.zeros(4)
    if how == "recv":
        raises(PeerGone, lambda: comm.recv(into, victim), f"rank {victim}", rank=victim, operation="recv")
    elif how == "stream":
        stream = gdasync.Stream.host(wait_limit=LONG)

        # Refused at once where its end is already known.
        def receive():
            comm.recv(into, victim, stream=stream)
            stream.synchronize(LONG)

        raises(PeerGone, receive, rank=victim)
    elif how == "window":
        raises(PeerGone, lambda: comm.window(np.zeros(8)), rank=victim, operation="window")
    else:
        # It may name a rank that has left the barrier for the same reason.
        raises(Error, lambda: comm.barrier())
        raises(PeerGone, lambda: comm.recv(into, victim), rank=victim)
    assert victim in comm.lost()
    left = comm.shrink()
    assert left.size == victim
    values = np.ones(1)
    left.allreduce(values)
    assert values[0] == victim
    left.finalize()
    del kept


def two(comm, _):
    comm.barrier()
    comm.finalize()


SPAWNED = """
import numpy, gdasync
with gdasync.init(spawn=2) as comm:
    data = numpy.full(1000, comm.rank + 1)
    if comm.rank == 0:
        comm.send(data, 1)
    else:
        comm.recv(data, 0)
        assert (data == 1).all()
        print("received", comm.path(0), flush=True)
"""

# Ends with receives under way, a stream that waits and objects in globals.
LEAVES = """
import numpy, threading, gdasync
comm = gdasync.init(spawn=1)
into = numpy.zeros(1000)
request = comm.irecv(into, 0)
comm.irecv(numpy.zeros(1000), 0)
stream = gdasync.Stream.host()
comm.recv(numpy.zeros(10), 0, stream=gdasync.Stream.host())
stream.call(threading.Event().wait)
window = comm.window(numpy.zeros(8))
cycle = [comm]
cycle.append(cycle)
print("leaves", flush=True)
"""


def script(text):
    """The output of a program."""
    environment = {**os.environ, "GDSYNC_DEVICE": "soft0"}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=LONG, env=environment
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


class Ranks(unittest.TestCase):
    def test_messages(self):
        run(2, messages)

    def test_collectives_and_a_ring(self):
        run(4, collectives)

    def test_streams(self):
        run(2, streams)

    def test_wait_limit(self):
        run(2, wait_limit)

    def test_windows(self):
        run(2, windows)

    def test_channels_and_graphs(self):
        run(2, graphs)

    def test_tensors_are_kept(self):
        run(2, lifetimes)

    def test_a_wait_lets_other_threads_run(self):
        run(2, threads)

    def test_a_collective_waits_for_that_of_another_thread_until_its_timeout(self):
        run(2, collectives_of_threads)

    def test_an_interrupt_ends_a_wait(self):
        run(2, interrupt, killed=[0])

    def test_fork(self):
        run(2, fork)

    def test_a_killed_rank_is_an_exception_in_all_others(self):
        for size, how in ((2, "recv"), (3, "stream"), (3, "window"), (4, "collective")):
            with self.subTest(how):
                run(size, killed, how, killed=[size - 1])


class Alone(unittest.TestCase):
    def test_refusals(self):
        refusals(gdasync.init(spawn=1, timeout=LONG))

    def test_a_program_that_starts_its_ranks(self):
        self.assertIn("received", script(SPAWNED))

    def test_a_program_may_leave_at_any_time(self):
        self.assertIn("leaves", script(LEAVES))

    def test_exceptions(self):
        for kind in (PeerGone, Deadline, Busy, gdasync.CudaError):
            self.assertTrue(issubclass(kind, Error))

    def test_doctor(self):
        report = gdasync.doctor()
        self.assertIn("probes", report)
        self.assertTrue(all(probe["status"] in ("ok", "warn", "fail", "skip") for probe in report["probes"]))


if __name__ == "__main__":
    unittest.main()
