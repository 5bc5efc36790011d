"""Forks of a process that has run no test.

A fork keeps the locks that other threads of its parent hold, and waits for them for ever. A process that has run tests
has had many threads: of page servers, of gloo, of autograd, of pools. So a *server* is forked before the first test,
when everything is imported and no thread computes; each process that a test wants is a fork of the server.
What a test patches does not reach these forks: they patch what they need themselves. Work and arguments are pickled.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from importlib import import_module

LARGEST_JOB = 2**17
PATIENCE = 1200
"""Seconds after which something hangs. No test passes sooner or later for it, however busy the machine is."""
FORK = multiprocessing.get_context("fork")
server = None
"""The socket on which the server gets jobs; None in the server and in its forks."""


def start():
    """Fork the server."""
    global server
    server, jobs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flush()
    if os.fork() == 0:
        try:
            server.close()
            server = None
            serve(jobs)
        finally:
            os._exit(1)
    jobs.close()


def flush():
    """Print what is printed, or a fork would print it once more."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def stop():
    """End the server, which waits for no fork."""
    global server
    server.close()
    server = None


def serve(jobs):
    """Start a fork, and a process that watches it, for each job, until the process that sends them has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # watchers leave no zombies
    import_module("datamodules.digits")  # here once, and not in each fork: it imports scikit-learn
    with suppress(ImportError):
        import_module("ffcv.writer")  # seconds, in each fork that writes a .beton
    warm = False
    while True:
        job, files, *_ = socket.recv_fds(jobs, LARGEST_JOB, 3)
        if not job:
            os._exit(0)
        if not warm:
            warm_up()
            gc.freeze()  # or the collector of a fork would look at, and so copy, all that is imported
        warm = True
        if os.fork() == 0:
            jobs.close()
            watch(job, *files)
        for file in files:
            os.close(file)


def warm_up():
    """Compose and check the config of a run: each fork that runs a program would read the same files again."""
    if commands := sys.modules.get("commands"):
        cfg = commands.composed(*commands.TVE_RUN, *commands.DIGITS, folder="unused")
        commands.training.check_settings(cfg)
        commands.HydraConfig.instance().cfg = None


def watch(job, status, *outputs):
    """Fork a process that does the job; write its number and, once it has ended, its exit code."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        process = FORK.Process(target=do, args=(job, status, *outputs))
        process.start()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for output in outputs:
            os.close(output)
        os.write(status, struct.pack("i", process.pid))
        process.join()
        os.write(status, struct.pack("i", process.exitcode))
    finally:
        os._exit(0)


def do(job, status, *outputs):
    """Be like the process that sent the job, as far as a new process would be, and do it."""
    os.close(status)
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    # pytest has put its own in their places
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    environment, folder, sys.path[:], work = pickle.loads(job)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    work, args, settings = pickle.loads(work)
    work(*args, **settings)


class Fork:
    """A process that the server has forked, with the methods of `multiprocessing.Process`."""

    def __init__(self, job):
        self.status, status = os.pipe()
        flush()
        socket.send_fds(server, [job], [status, 1, 2])
        os.close(status)
        self.exitcode = None
        self.pid = self.read()

    def read(self):
        return struct.unpack("i", os.read(self.status, 4))[0]

    def join(self, timeout=None):
        if self.exitcode is None and select.select([self.status], [], [], timeout)[0]:
            self.exitcode = self.read()
            os.close(self.status)

    def is_alive(self):
        self.join(0)
        return self.exitcode is None

    def kill(self, number=signal.SIGKILL):
        if self.is_alive():
            with suppress(ProcessLookupError):  # it has ended, and its exit code is not written yet
                os.kill(self.pid, number)

    def terminate(self):
        self.kill(signal.SIGTERM)


def fork(work, *args, **settings):
    """Start `work(*args, **settings)` in a process of its own.

    Processes that a fork starts are forks of itself: it is as clean as it has been.
    """
    if server is None:
        process = FORK.Process(target=work, args=args, kwargs=settings)
        process.start()
        return process
    work = pickle.dumps((work, args, settings))
    return Fork(pickle.dumps((dict(os.environ), os.getcwd(), sys.path, work)))


def join(process, seconds=PATIENCE):
    """Wait until a fork ends. One that hangs prints where, by faulthandler, and dies by SIGABRT."""
    process.join(seconds)
    if process.is_alive():
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGABRT)
        process.join()
