"""`weights=FILE` is the run, and the results, of the longer settings that it stands for."""

from functools import partial

import pytest
from commands import DIGITS, NO_PICTURES, TINY_RUN, composed, train
from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors.torch import save_file
from test_errors import error

from explainers.errors import InputError
from explainers.running.record import start_record
from explainers.running.settings import use_random_weights, use_weights
from explainers.saved.records import leaves

LONG = ("target.model.pretrained=false", "target.model.checkpoint_path={}")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Weights of target=tiny."""
    model = instantiate(composed("target=tiny", folder=tmp_path_factory.mktemp("cfg")).target.model)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_file(model.state_dict(), path)
    return str(path)


def resolved(*overrides, folder, config="train"):
    cfg = composed(*overrides, folder=folder, config=config)
    use_weights(cfg)
    return OmegaConf.to_container(cfg, resolve=True)


@pytest.mark.parametrize(
    ("config", "target"), [("train", "vit_tiny_r_s16_p8_224"), ("eval", "resnet50"), ("train", "digits")]
)
def test_it_is_the_config_of_the_longer_settings(config, target, file, tmp_path):
    given = [f"target={target}"]
    for_this = partial(resolved, *given, folder=tmp_path, config=config)
    short = for_this(f"weights={file}")
    assert short == for_this(*(text.format(file) for text in LONG)) and "weights" not in short
    assert short["target"]["model"]["checkpoint_path"] == file


def test_of_a_model_at_another_size_it_is_the_file_whose_position_embedding_timm_resizes(file, tmp_path):
    model = resolved("experiment=studies/vector_source", f"weights={file}", folder=tmp_path)["target"]["model"]
    assert model["pretrained"] and model["pretrained_cfg_overlay"] == {"file": file} and not model["checkpoint_path"]


def test_a_run_goes_on_whichever_way_its_weights_are_given(file, tmp_path):
    """And is that of the file's weights."""
    for number, given in enumerate([(f"weights={file}",), [text.format(file) for text in LONG], ()]):
        cfg = composed("experiment=demo/tve", "target=tiny", *given, folder=tmp_path)
        use_weights(cfg)
        if number == 2:
            with pytest.raises(InputError, match="target.model.checkpoint_path"):
                start_record(cfg, tmp_path, may_differ=False)
        else:
            start_record(cfg, tmp_path, may_differ=False)
            assert file in (tmp_path / "versions.json").read_text()
        (tmp_path / "checkpoints").mkdir(exist_ok=True)


def test_weights_that_cannot_be_used_are_refused_in_one_line(file, tmp_path):
    run = (*TINY_RUN, *DIGITS, NO_PICTURES)
    message = error(train, *run, "weights=gone.safetensors", folder=tmp_path)
    assert "weights=gone.safetensors" in message
    message = error(train, *run, f"weights={file}", "target.model.num_classes=7", folder=tmp_path)
    assert message.startswith("error: weights: ") and "[10, 48]" in message and "[7, 48]" in message
    (tmp_path / "own.yaml").write_text("no weights")
    assert "own.yaml" in error(train, *run, f"weights={tmp_path / 'own.yaml'}", folder=tmp_path)
    cfg = composed(*run, f"weights={file}", folder=tmp_path)
    cfg.target = {"_target_": "explainers.models.TargetModel", "model": {"_target_": "my.Model"}}
    with pytest.raises(InputError, match="target=tiny"):
        use_weights(cfg)


@pytest.mark.parametrize(
    ("overrides", "replaced"),
    [
        (["experiment=tve_vitb"], {"target.model.pretrained": False, "explainer.network.mae": None}),
        (
            ["experiment=anyhead_tower", "data.root=images"],
            {"target.model.pretrained": False, "module.loss.text_head.pretrained": ""},
        ),
        (
            ["experiment=self_explaining", "projection@module.head.projection=text", "target=digits"],
            {"module.head.projection.pretrained": ""},
        ),
        (["experiment=tve_vitb", "target=tiny", "explainer.network.mae={file}"], {}),
        (["experiment=studies/vector_source", "weights={file}"], {}),
    ],
)
def test_debug_downloads_no_weights(overrides, replaced, file, tmp_path, capsys):
    given = [text.format(file=file) for text in overrides]
    cfg = composed(*given, "debug=fast", folder=tmp_path)
    use_weights(cfg)
    before = dict(leaves(OmegaConf.to_container(cfg)))
    use_random_weights(cfg)
    after = dict(leaves(OmegaConf.to_container(cfg)))
    changed = {key: value for key, value in after.items() if before.get(key, ...) != value}
    assert {key: value for key, value in changed.items() if not key.endswith("_")} == replaced
    assert all(key.rpartition(".")[0] in capsys.readouterr().out for key in list(replaced)[:1])
