"""Any target with any data set: the files compose, what they describe can be built, and a tuned target comes back."""

import re
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from commands import QUIET, ROOT, SMALL_DIGITS, composed, draw_images, train
from conftest import timm_model
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image
from torch import nn

from explainers.models import TargetModel, as_target
from explainers.saved.identity import weights_hash
from explainers.training.classifier import Classifier
from explainers.transformer.direct_paths import check_direct
from explainers.transformer.stage_paths import check_stage_paths

SHARED = ("transform", "crop_fraction")
EXPERIMENTS = ("linear_head", "full_finetuning")
RUN = (*QUIET, "logger=csv", "trainer.max_epochs=1", "trainer.precision=32-true")


def test_a_target_and_a_data_set_have_the_images_in_common_and_nothing_else():
    """So that all pairs compose, because each composes with one of the others (`test_configs.py`)."""
    for path in (ROOT / "configs/target").glob("*.yaml"):
        assert {*OmegaConf.load(path)} <= {"defaults", "target", "blocks", "direct", "grid", *SHARED}
    for path in [ROOT / "configs/names/data.yaml", *(ROOT / "configs/data").glob("*.yaml")]:
        text = path.read_text()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        read = set(re.findall(r"\$\{([a-z_.]+)", "\n".join(lines)))
        assert {key for key in read if not key.startswith(".")} <= {"grid.image_size", "data_dir", "seed", *SHARED}


def test_the_weights_of_a_target_are_those_that_timm_has(tmp_path):
    names = OmegaConf.load(ROOT / "configs/names/target.yaml")
    assert {*names.values()} <= {*timm.list_pretrained()} and len(names) >= 12
    model = composed("target=deit_base_distilled", folder=tmp_path).target.model
    assert model.pretrained and model.model_name == names.deit_base_distilled


class Net(nn.Sequential):
    """A model as people hold it: a ViT, and layers behind it."""

    def __init__(self, **settings):
        vit = timm_model(num_classes=0, **settings)
        super().__init__(vit, nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 3))


def test_a_function_by_its_python_path_builds_a_target(tmp_path):
    cfg = composed(f"target={__name__}.Net", "+target.model.mean=0.3", "+target.model.model.depth=3", folder=tmp_path)
    target = instantiate(cfg.target)
    assert target.num_classes == 3 and len(target.backbone.blocks) == 3 and target.mean.unique() == 0.3
    assert instantiate(cfg.grid) == target.grid and cfg.direct == [1, 2] and cfg.blocks == [0, 1, 2]
    assert target.backbone_identity() == as_target(Net(depth=3), mean=0.3).backbone_identity()
    headed = TargetModel(target, nn.Linear(24, 2))
    assert headed.num_classes == 2 and headed.backbone_identity() == target.backbone_identity()


@pytest.mark.situation(22)
@pytest.mark.parametrize("name", ["test_vit", "beit_base_patch16_384"])
def test_data_sets_show_what_the_target_was_trained_to_see(name, tmp_path):
    (tmp_path / "images/val/a").mkdir(parents=True)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8))
    photo.save(tmp_path / "images/val/a/1.png")
    settings = [f"target={name}", "data=folder", f"data.root={tmp_path}/images"]
    cfg = composed(*settings, "target.model.pretrained=false", folder=tmp_path)
    with torch.device("meta"):
        model = timm.create_model(name)
    own = TargetModel(model).transform
    assert instantiate(cfg.transform) == own
    assert torch.equal(instantiate(cfg.data).dataset("val")[0]["image"], own(photo))
    wide = composed(*settings[:2], "transform.size=[96,160]", "crop_fraction=0.5", folder=tmp_path)
    assert wide.data.crop_fraction == 0.5 and instantiate(wide.data.transform) == replace(own, size=(96, 160))


def test_experiments_keep_the_crops_of_their_numbers(tmp_path):
    """Those without photos, and `explain`, which shows what the target sees, need none."""
    without = {"demo", "explain.yaml", "vectors_digits.yaml"}
    for path in (ROOT / "configs/experiment").rglob("*.yaml"):
        stated = OmegaConf.load(path).get("crop_fraction")
        assert stated == (None if without & {path.name, path.parent.name} else 0.875), path


@pytest.mark.slow
@pytest.mark.parametrize(  # one of each family
    "name", ["vit_tiny", "swin_tiny_patch4_window7_224", "deit_base_distilled", "resnet18"]
)
def test_a_target_can_be_explained_by_the_light_network(name, tmp_path):
    """In shapes alone: the images fit the backbone, the blocks are there, and their maps fit the network.

    So do the blocks of direct paths, which AnyHead reads.
    """
    cfg = composed(f"target={name}", "explainers@explainer=tve", "target.model.pretrained=false", folder=tmp_path)
    with torch.device("meta"):
        target, grid = instantiate(cfg.target).eval(), instantiate(cfg.grid)
        network = instantiate(cfg.explainer.network)(target, grid)
        if name.startswith(("swin", "resnet")):
            check_stage_paths(target, cfg.direct, grid.size)
        elif cfg.direct:
            check_direct(target, cfg.direct)
        images = torch.zeros(2, 3, *grid.size, dtype=torch.uint8)
        embeddings, maps = target.embed_with_maps(target.normalise(images), cfg.blocks)
        assert target.head(embeddings).shape == (2, 1000)
        assert network(images, embeddings, maps).shape == (2, grid.num_patches, 2, target.embed_dim)


def test_full_finetuning_has_the_hyperparameters_of_table_2(tmp_path):
    cfg = composed("experiment=full_finetuning", folder=tmp_path)
    classifier = cfg.module
    adam = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 2e-4, "weight_decay": 0.05}
    assert classifier.optimizer == adam
    assert classifier.scheduler._target_.endswith("warmup_linear") and classifier.scheduler.warmup == 0.05
    assert (classifier.tune, cfg.data.batch_size, cfg.trainer.max_epochs) == ("all", 256, 5)
    head = composed("experiment=linear_head", "module.optimizer.lr=2e-4", "trainer.max_epochs=5", folder=tmp_path)
    expected = OmegaConf.to_container(OmegaConf.merge(classifier, {"tune": "head"}), resolve=True)
    assert OmegaConf.to_container(head.module, resolve=True) == expected | {"target": dict(head.target)}
    assert (head.data.batch_size, head.trainer.max_epochs) == (256, 5)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Holds a folder of classes, and MURA."""
    root = tmp_path_factory.mktemp("data")
    for split in ("train", "val"):
        draw_images(root / split, count=3, classes=("a", "b", "c"))
    for split in ("train", "valid"):
        for study in ("study1_positive", "study2_negative"):
            folder = root / "MURA-v1.1" / split / "XR_WRIST" / "patient00001" / study
            folder.mkdir(parents=True)
            Image.fromarray(np.arange(6400, dtype=np.uint16).reshape(80, 80)).save(folder / "image1.png")
    return root


@pytest.fixture
def trained(monkeypatch):
    """The modules that were trained and exported."""
    modules, export = [], Classifier.export
    monkeypatch.setattr(Classifier, "export", lambda self, folder: (modules.append(self), export(self, folder)))
    return modules


CLASSES = {"mura": 2, "digits": 10}


@pytest.mark.slow
@pytest.mark.parametrize(("data", "experiment"), zip(CLASSES, reversed(EXPERIMENTS), strict=True))
def test_a_head_has_the_classes_of_the_data_set_without_being_told(data, experiment, data_dir, tmp_path, trained):
    options = SMALL_DIGITS if data == "digits" else ("data.num_workers=0", f"data_dir={data_dir}")
    options += (f"experiment={experiment}", "target=tiny", f"data={data}", f"cache_dir={tmp_path / 'cache'}")
    train(*options, *RUN, folder=tmp_path / "run")
    (classifier,) = trained
    assert classifier.target.head.out_features == CLASSES[data]
    assert classifier.tune == ("head" if experiment == "linear_head" else "all")


SMALL_GRID = ("grid.image_size=32", "grid.patch_size=8")
SMALL = {
    "vit": ("target=tiny",),
    "resnet": ("target=resnet50", "target.model.model_name=test_resnet", *SMALL_GRID),
}


@pytest.mark.slow
@pytest.mark.parametrize("small", SMALL)
def test_a_fully_tuned_target_comes_back_by_the_options_of_a_later_command(small, data_dir, tmp_path, trained):
    options = (*SMALL[small], "target.model.pretrained=false")
    data = ("data=folder", f"data.root={data_dir}", "data.num_workers=0", "data.batch_size=2")
    train("experiment=full_finetuning", *options, *data, *RUN, folder=tmp_path / "run")
    (classifier,) = trained
    path = tmp_path / "run" / "target.safetensors"
    options += ("++target.model.num_classes=3", f"target.model.checkpoint_path={path}")
    cfg = composed("explainers@explainer=tve", *options, folder=tmp_path)
    again, tuned = instantiate(cfg.target).eval(), classifier.target.eval()
    images = torch.randint(0, 256, (4, 3, cfg.grid.image_size, cfg.grid.image_size), dtype=torch.uint8)
    assert again(images).shape == (4, 3) and again(images).std() > 0
    torch.testing.assert_close(again(images), tuned(images))
    assert weights_hash(again.backbone) == weights_hash(tuned.backbone)
    same_head = instantiate(cfg.target, head=str(tmp_path / "run" / "head.safetensors")).eval()
    torch.testing.assert_close(same_head(images), tuned(images))
