"""`fit=false`: what is measured and exported without training."""

import json

import pytest
from commands import DIGITS, TVE_RUN, train
from safetensors.torch import load_file

RUN = (*TVE_RUN, *DIGITS, "module.optimizer.lr=0.01")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that the tests leave as it is."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    train(*RUN, "trainer.max_epochs=2", folder=folder)
    return folder


def contents(folder, *names):
    return [(folder / name).read_bytes() for name in names]


def measured(folder):
    metrics = json.loads((folder / "metrics.json").read_text())
    return {name: value for name, value in metrics.items() if name.startswith("val/")}


@pytest.mark.slow
def test_in_the_folder_of_a_run_it_measures_what_the_run_has_learned(trained, capsys):
    kept = "explainer.safetensors", "csv/version_0/metrics.csv", "checkpoints/last.ckpt"
    before, metrics = contents(trained, *kept), measured(trained)
    for asked in ((), ("ckpt_path=last",)):
        (trained / "metrics.json").unlink()
        train(*RUN, "trainer.max_epochs=2", "fit=false", *asked, folder=trained)
        assert measured(trained) == pytest.approx(metrics, rel=1e-5)
        assert contents(trained, *kept) == before
        assert f"measured {trained}/checkpoints/last.ckpt; " in capsys.readouterr().out
    train(*RUN, "trainer.max_epochs=2", folder=trained)  # and the run is still the same


@pytest.mark.slow
def test_a_checkpoint_of_another_folder_is_measured_and_exported(trained, tmp_path):
    asked = f"ckpt_path={trained}/checkpoints/last.ckpt"
    train(*RUN, "fit=false", asked, folder=tmp_path / "another")
    assert measured(tmp_path / "another") == pytest.approx(measured(trained), rel=1e-5)
    exported = [load_file(folder / "explainer.safetensors") for folder in (trained, tmp_path / "another")]
    assert exported[0].keys() == exported[1].keys()
    assert all(value.equal(exported[1][name]) for name, value in exported[0].items())


def test_an_untrained_network_is_measured_and_not_exported(tmp_path, capsys):
    train(*RUN, "fit=false", folder=tmp_path)
    assert measured(tmp_path) and not (tmp_path / "explainer.safetensors").exists()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("run: ")]
    assert "measured an untrained network (fit=false without ckpt_path), nothing exported; " in line
