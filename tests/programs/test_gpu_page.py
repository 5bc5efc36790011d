"""`make gpu`, tried without a GPU: its commands exist, a failure stops none of them, and the page says so."""

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
