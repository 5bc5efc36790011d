"""`make gpu`, tried without a GPU: its commands exist, a failure stops none of them, and the page says so."""

import argparse
import shlex
from importlib import import_module

import pytest
import torch

from benchmarks import gpu

SCRIPTS = {
    "good": gpu.Part("It works", "-c 'print(\"| a | b |\")'", 10),
    "bad": gpu.Part("It breaks", "-c 'print(\"told\"); raise SystemExit(3)'", 10),
    "long": gpu.Part("It hangs", "-c 'import time; print(\"begun\", flush=True); time.sleep(60)'", 0.02),
    "last": gpu.Part("It comes last", "-c 'print(1)'", 10),
}


@pytest.fixture
def pretended(monkeypatch):
    """A machine with a GPU, and short parts."""
    monkeypatch.setattr(gpu, "PARTS", SCRIPTS)
    monkeypatch.setattr(gpu, "machine", lambda: iter(["- GPU 0: a fast one"]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_stops_no_other_and_the_page_says_so(pretended, tmp_path, capsys):
    assert gpu.main([], tmp_path) == 1
    page = (tmp_path / "README.md").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}/README.md: failed: bad, long"
    rows = [line.strip("| ").split(" | ")[:2] for line in page.splitlines() if line.startswith("| It ")]
    assert rows == [
        ["It works", "passed"],
        ["It breaks", "exit code 3"],
        ["It hangs", "longer than 0.02 minutes"],
        ["It comes last", "passed"],
    ]


class Understood(Exception):
    """The options of a program were parsed."""


@pytest.mark.parametrize("name", ["memory", "throughput", "float32", "bf16"])
def test_a_benchmark_understands_its_options(name, monkeypatch):
    program, *options = shlex.split(gpu.PARTS[name].arguments)
    parse = argparse.ArgumentParser.parse_args

    def stop(parser, *given):
        parse(parser, *given)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Understood):
        import_module(program.removesuffix(".py").replace("/", ".")).main(options)
