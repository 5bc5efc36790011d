"""`make demo`, with the commands of the Makefile in their order, and few small images."""

import json
import re
import shlex
import subprocess

import pytest
from commands import NO_PICTURES, ROOT
from fork_server import fork, join
from forks import be_new, run_as_main

SMALL = {
    "train.py": ["data.size.train=16", "data.size.val=4", "data.batch_size=8", "trainer.max_epochs=1", NO_PICTURES],
    "eval.py": ["evaluation.levels=3", "pictures.images=1"],
}
TASKS = ("odd", "five_or_more", "loop")
SMALL["eval.py"] += [f"tasks.{task}.data.size.test=3" for task in TASKS]
SMALL["eval.py"] += [f"tasks.{task}.data.eval_batch_size=2" for task in TASKS]


def run(words):
    """A command of the demo, in the current folder."""
    be_new()
    run_as_main(ROOT / words[0], *words[1:])


@pytest.mark.slow
def test_the_demo_leaves_numbers_a_table_curves_and_a_gallery(tmp_path, monkeypatch):
    printed = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"python ((?:train|eval)\.py [^&;}\n]*)", printed.replace("\\\n", " "))
    assert len(commands) == 5
    monkeypatch.chdir(tmp_path)
    for command in commands:
        words = shlex.split(command)
        process = fork(run, [*words, *SMALL[words[0]]])
        join(process)
        assert process.exitcode == 0, command
    folder = tmp_path / "runs/demo_eval"
    written = json.loads((folder / "results.json").read_text())
    for task in TASKS:
        assert set(written["results"][task]) == {"chance", "oracle", "tve_untrained", "tve", "anyhead"}
        assert all(row["images"] == 3 for row in written["results"][task].values())
        identity = written["identity"][task]
        assert (identity["removals"], identity["classes"], identity["levels"]) == (["zero", "black"], "predicted", 3)
        assert len(identity["backbone_sha256"]) == 64
    assert all((folder / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("curves", *TASKS))
    assert len((folder / "results.csv").read_text().splitlines()) == 1 + 3 * 5
    assert len((folder / "table.md").read_text().splitlines()) == 2 + 3 * 5
    assert "demo_eval" in (folder / "gallery.html").read_text()
