import pytest
from commands import ROOT, composed_once
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf


def told(compose, *overrides):
    """A config with what Hydra notes about it, or Hydra's error."""
    try:
        return OmegaConf.to_container(compose("train", *overrides))
    except ConfigCompositionException as error:
        return str(error)


def compose_anew(config, *overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose(config, ["hydra.mode=RUN", *overrides], return_hydra_config=True)


@pytest.mark.slow
def test_a_config_of_remembered_files_is_the_one_that_hydra_composes():
    for values in ("seed=4 +new.key=5 ~trainer.precision target=tiny", "explainer.misspelt=1"):
        overrides = ["experiment=demo/tve", *values.split()]
        remembered, anew = (told(each, *overrides) for each in (composed_once, compose_anew))
        if isinstance(anew, dict):
            del remembered["hydra"]["job"]["override_dirname"], anew["hydra"]["job"]["override_dirname"]
        assert remembered == anew
