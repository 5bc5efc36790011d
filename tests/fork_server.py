"""Forks of a process that has run no test.

A fork keeps the locks that other threads of its parent hold, and waits for them for ever. A process that has run tests
has had many threads: of page servers, of gloo, of autograd, of pools. So the server of `multiprocessing` starts before
the first test, when everything is imported and no thread computes; each process that a test wants is a fork of it.
What a test patches does not reach these forks: they patch what they need themselves. Work and arguments are pickled.
"""

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from unittest.mock import patch

from explainers.running.signals import end_with_parent

PATIENCE = 1200
"""Seconds after which something hangs. No test passes sooner or later for it, however busy the machine is."""


def start():
    """Start the server as a fork of this process: a new one would import for ten seconds."""
    resource_tracker.ensure_running()
    with patch("multiprocessing.util.spawnv_passfds", fork_in_place):
        forkserver.ensure_running()


def fork_in_place(executable, arguments, descriptors):
    """In place of a new Python with these arguments, of which the last one is its program."""
    if number := os.fork():
        return number
    try:
        end_with_parent()
        forkserver._forkserver.__init__()  # whose lock is held: forks that want a server of their own would wait for it
        gc.freeze()  # or the collector of a fork would look at, and so copy, all that is imported
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def do(environment, outputs, work, args, settings):
    """Be like the process that wants this work, as far as a new process would be, and do it."""
    for number, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), number)
    # pytest has put its own in their places
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    os.environ.clear()
    os.environ.update(environment)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    work(*args, **settings)


def fork(work, *args, **settings):
    """Start `work(*args, **settings)` in a process of its own.

    Processes that a fork starts are forks of itself: it is as clean as it has been.
    """
    if multiprocessing.parent_process():
        process = multiprocessing.get_context("fork").Process(target=work, args=args, kwargs=settings)
    else:
        outputs = [Connection(os.dup(number), readable=False) for number in (1, 2)]
        given = (dict(os.environ), outputs, work, args, settings)
        process = multiprocessing.get_context("forkserver").Process(target=do, args=given)
    process.start()
    return process


def join(process, seconds=PATIENCE):
    """Wait until a fork ends. One that hangs prints where, by faulthandler, and dies by SIGABRT."""
    process.join(seconds)
    if process.is_alive():
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGABRT)
        process.join()
