"""The evaluation of the TVE paper and the commands of its other tables, on a tiny target with random weights."""

import json

import pytest
import torch
from commands import NO_FIGURES, QUIET, composed, evaluate
from hydra.utils import instantiate
from omegaconf import OmegaConf

SMALL = ("target=tiny", "tasks=[digits]", "tasks.digits.data.size.test=3", "evaluation.levels=3", "data_dir=none")
LIGHT = ("explainers@explainers.tve=tve", "explainers.tve.network.width=24", "explainers.tve.hops=[1]")
ONE_FIGURE = ("pictures=null", "figures=[tradeoff]", "~figures.ablation", "tasks.digits.data.batch_size=1")
UNTRAINED = ("explainers.tve.weights=null", "explainers.vit_shapley.explainer.weights=null")


@pytest.mark.slow
def test_the_explainer_its_ablations_and_seven_baselines_are_measured(tmp_path):
    evaluate("experiment=papers/tve", *SMALL, *LIGHT, *UNTRAINED, *QUIET, *ONE_FIGURE, folder=tmp_path)
    (measured,) = json.loads((tmp_path / "results.json").read_text())["results"].values()
    gradients = ("IntegratedGradients", "DeepLift", "GradientSHAP")
    learned = {"chance", "kernel_shap", "vit_shapley", "tve_untrained", "tve_hg", "tve"}
    assert {name.partition("(")[0] for name in measured} == learned | {"LIME", "RISE", *gradients}
    assert all("multiply_by_inputs=False" in name for name in measured if name.startswith(gradients))
    assert measured["tve"]["fidelity_plus"] != measured["tve_hg"]["fidelity_plus"]
    assert (tmp_path / "tradeoff.png").exists()


@pytest.mark.slow
def test_runs_are_found_by_the_name_of_the_target(tmp_path):
    given = ("target=swin_base", "explainers@explainers.vit_shapley.explainer=shapley_light", "tasks=[cifar100,mura]")
    wanted = OmegaConf.to_container(
        composed("experiment=papers/tve", *given, folder=tmp_path, config="eval"), resolve=True
    )
    runs = {
        "tve_vitb": wanted["explainers"]["tve"]["weights"],
        "vit_shapley": wanted["explainers"]["vit_shapley"]["explainer"]["weights"],
        "linear_head data=mura": wanted["tasks"]["mura"]["target"]["head"],
    }
    for command, path in runs.items():
        cfg = composed(*f"experiment={command}".split(), "target=swin_base", folder=tmp_path)
        assert path.rpartition("/")[0] == f"runs/{cfg.name}"
    assert wanted["explainers"]["tve_hg"]["explainer"] == wanted["explainers"]["tve"]
    assert wanted["explainers"]["tve_untrained"] == wanted["explainers"]["tve"] | {"weights": None}


@torch.no_grad()
@pytest.mark.slow
def test_table_5_explains_one_model_by_the_explainer_of_another(tmp_path):
    """The task's target is a ResNet, and the explainer that of a ViT."""
    vit = ("target=timm", "target.model.model_name=test_vit", "target.model.pretrained=false", "grid.image_size=160")
    task = ("tasks=[digits]", "tasks.digits.data.size.test=2", "+target.model.num_classes=10", "evaluation.levels=3")
    resnet = ("+tasks.digits.target.model.model_name=test_resnet", "blocks=[0]")
    given = (*vit, *task, *resnet, "explainers=[tve_hg]", "explainers.tve_hg.class_map=same")
    evaluate(*given, *QUIET, *NO_FIGURES, folder=tmp_path)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["identity"]["digits"]["backbone"] == "test_resnet"
    cfg = composed(*given, folder=tmp_path, config="eval")
    general = instantiate(cfg.explainers.tve_hg, target=instantiate(cfg.target, **cfg.tasks.digits.target))
    assert type(general.explainer.target.backbone).__name__ == "VisionTransformer"
