import configparser
import os
import subprocess

import portable
import torch
from commands import ROOT, start
from fork_server import fork

SUITE = """
import os

def test_of_no_sum():
    assert os.environ["OMP_NUM_THREADS"] in ("1", "4")

def test_of_a_sum():
    assert os.environ["OMP_NUM_THREADS"] == "1"
"""


def test_the_suite_runs_on_three_kinds_of_kernels_with_one_thread_and_four(monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx512")  # of the user: native means the machine's own
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = {
        name: (environment.get("ATEN_CPU_CAPABILITY"), environment["OMP_NUM_THREADS"])
        for name, environment in portable.configurations()
    }
    kinds = {"default": "default", "avx2": "avx2", "native": None}
    assert found == {f"{name}-{threads}": (kind, threads) for name, kind in kinds.items() for threads in "14"}


def test_each_configuration_is_a_line_and_a_red_one_stops_none(tmp_path, monkeypatch, capsys):
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which load for longer than the tests run
    monkeypatch.setattr(portable, "CAPABILITIES", {"native": {}})
    monkeypatch.setattr(portable, "THREADS", ("4", "1"))
    assert portable.main([str(suite), "-p", "no:cacheprovider"], tmp_path) == 1
    red, green, last = capsys.readouterr().out.splitlines()
    assert red.startswith("FAIL native  4 threads: 1 failed, 1 passed, ")
    assert green.startswith("ok   native  1 threads: 2 passed, ")
    assert last == "failed: native-4; the logs say which tests"
    assert "test_of_a_sum" in (tmp_path / "native-4.log").read_text()


def test_a_configuration_that_ends_without_a_count_has_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(portable, "configurations", lambda: [("default-1", dict(os.environ))])
    assert portable.main([str(tmp_path), "--no-such-option"], tmp_path) == 1
    assert capsys.readouterr().out.startswith("FAIL default 1 threads: did not finish")


def say_threads():
    os._exit(torch.get_num_threads())


def test_the_number_of_threads_reaches_tests_and_commands_but_no_fork(tmp_path, monkeypatch):
    """A fork would wait for threads that it does not have."""
    assert torch.get_num_threads() == int(os.environ.get("OMP_NUM_THREADS", "1"))
    asked = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **_: asked.append(env["OMP_NUM_THREADS"]))
    for threads in ("3", "1"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        start("train.py", folder=tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS")
    start("train.py", folder=tmp_path)
    assert asked == ["3", "1", "1"]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        child = fork(say_threads)
        child.join(60)
    finally:
        torch.set_num_threads(before)
    assert child.exitcode == 1


def test_types_are_judged_alike_with_and_without_the_packages_that_only_some_machines_have():
    """mypy once failed where Quantus was installed, and nowhere else."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    (skipped,) = [section for section in config.sections() if "numba" in section]
    assert {"quantus.*", "ffcv.*"} <= set(skipped.removeprefix("mypy-").split(","))
