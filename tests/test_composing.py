from contextlib import nullcontext

import pytest
from commands import ROOT
from composing import forgetting
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf


def text(*overrides, context=nullcontext):
    """A config with what Hydra notes about it, or Hydra's error."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"), context():
        try:
            return OmegaConf.to_yaml(compose("train", list(overrides), return_hydra_config=True))
        except ConfigCompositionException as error:
            return str(error)


@pytest.mark.slow
def test_a_config_of_remembered_parts_is_the_one_that_hydra_composes():
    for values in ("seed=2", "seed=4 +new.key=5 ~trainer.precision target=vit_tiny", "explainer.misspelt=1"):
        overrides = ["experiment=demo/tve", *values.split()]
        assert text(*overrides) == text(*overrides, context=forgetting)
