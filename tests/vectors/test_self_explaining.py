"""Self-explaining models: what they read, learn from labels, and leave behind."""

import copy
import math
from functools import partial

import pytest
import references
import timm
import torch
from lightning import Callback, Trainer
from timm.layers import HybridEmbed
from toys import SILENT, Marked, equal, exported, state

from datamodules.cached import Cached
from datamodules.images import Images
from explainers.models import TargetModel
from explainers.saved.identity import weights_hash
from explainers.saved.weights import read_weights
from explainers.shapley.kernel_shap import ShapleyLabels
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.model_files import exported_target
from explainers.vectors.projections import simplex, simplex_of
from explainers.vectors.self_explaining import HeadBuilder, SelfExplaining, SelfExplainingTraining

LABELS = partial(ShapleyLabels, budget=20)
CLASSES = torch.tensor([2, 0, 1, 1, 0])


@pytest.fixture
def twin(target, grid, tmp_path):
    """The file of a prediction-only model."""
    return exported(target, grid, tmp_path / "twin", seed=5)


def build(target, grid, twin=None, alpha=0.8, head=None, labels=LABELS, **settings):
    settings = {"optimizer": partial(torch.optim.Adam, lr=1e-3)} | settings
    head = head or HeadBuilder(simplex_of)
    return SelfExplainingTraining(SelfExplaining(target, grid), head, labels, twin, alpha, **settings)


def fit(module, folder=None, epochs=1, **settings):
    images = Images(partial(Marked, 12), partial(Marked, 5, seed=1), batch_size=4, num_workers=0)
    data = images if folder is None else Cached(images, str(folder), 4)
    trainer = Trainer(accelerator="cpu", max_epochs=epochs, log_every_n_steps=1, **SILENT, **settings)
    trainer.fit(module, data)
    return trainer


class Watch(Callback):
    """The weights before the first step, and the images of every step."""

    def __init__(self):
        self.images = []

    def on_train_start(self, trainer, module):
        self.weights, self.training = state(module.explainer.target), module.explainer.target.training

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.images.append(batch["image"])


@pytest.mark.parametrize(("alpha", "classes"), [(1, "label"), (0.8, "predicted"), (0.3, "all")])
def test_the_loss_is_that_of_the_explained_classes(target, grid, twin, alpha, classes):
    labels = partial(LABELS, classes=classes)
    module = build(target, grid, twin, alpha, labels=labels)
    fit(module, limit_train_batches=0)
    batch = Marked(5, seed=3)[torch.arange(5)]
    logits, attributions = module.explainer.predict_and_explain(batch["image"])
    rows = labels(module.teacher, grid)(batch)
    of_one_class = partial(references.self_explaining_loss, logits, attributions, batch["label"], alpha=alpha)
    if classes == "all":
        expected = sum(of_one_class(torch.full((5,), k), rows["shapley"][..., k]) for k in range(3)) / 3
    else:
        expected = of_one_class(rows["explained"], rows["shapley"])
    module.log = lambda *args, **kwargs: None
    assert module.training_step(batch, 0).item() == pytest.approx(expected, rel=1e-5)
    assert module.training_step(batch | rows, 0).item() == pytest.approx(expected, rel=1e-5)


def test_a_heatmap_explains_the_class_that_was_asked_for_or_the_predicted_one(target, grid, twin, images):
    model = exported_target(target, twin)
    module = SelfExplaining(target, grid, twin).eval()
    _, patches = model.embed_with_patches(model.normalise(images))
    for asked, answered in ((CLASSES, CLASSES), (None, model(images).argmax(-1))):
        units = patches / patches.norm(dim=-1, keepdim=True)
        expected = torch.stack([unit @ model.head.weight[k] for unit, k in zip(units, answered, strict=True)])
        torch.testing.assert_close(module(images, asked), expected.view(5, 4, 4))


def test_a_heatmap_of_a_score_compares_the_class_with_the_likely_others(target, grid, twin, images):
    module = SelfExplaining(target, grid, twin, temperature=2.0).eval()
    logits, attributions = module.predict_and_explain(images)
    heatmaps = module(images, CLASSES).flatten(1)
    for image, asked in enumerate(CLASSES.tolist()):
        others = [k for k in range(logits.shape[1]) if k != asked]
        odds = [math.exp(logits[image, k] / 2) for k in others]
        for patch in range(16):
            a = attributions[image, patch].tolist()
            mean = sum(o * a[k] for o, k in zip(odds, others, strict=True)) / sum(odds)
            assert heatmaps[image, patch].item() == pytest.approx(a[asked] - mean, rel=1e-3, abs=1e-5)


def test_only_the_last_blocks_and_the_norm_learn(target, grid, tmp_path):
    module = build(target, grid, alpha=1, last_blocks=1)
    fit(module, tmp_path)
    before = state(target.backbone)
    after = state(module.explainer.target.backbone)
    last = f"blocks.{len(target.backbone.blocks) - 1}."
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.startswith((last, "norm."))}


def test_only_the_backbone_learns_and_the_teacher_is_not_saved(target, grid, twin, tmp_path):
    module, watch = build(target, grid, twin), Watch()
    before, teacher = state(target.backbone), state(module.teacher)
    trainer = fit(module, tmp_path / "rows", epochs=2, callbacks=[watch])
    trained = module.explainer.target
    assert watch.training and not module.teacher.training and equal(state(module.teacher), teacher)
    assert all(not torch.equal(value, before[name]) for name, value in trained.backbone.named_parameters())
    assert torch.equal(trained.head.weight, simplex(3, 24)) and list(trained.head.parameters()) == []
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert saved.keys() == {f"explainer.target.{name}" for name in trained.state_dict()}


def test_twins_start_alike_and_see_the_same_images_in_the_same_order(target, grid, twin, tmp_path):
    watches = Watch(), Watch()
    for watch, file, alpha in zip(watches, (None, twin), (1, 0.8), strict=True):
        torch.manual_seed(0)
        fit(build(target, grid, file, alpha), tmp_path, epochs=2, callbacks=[watch])
    assert equal(watches[0].weights, watches[1].weights) and len(watches[0].images) == 6
    assert torch.equal(torch.stack(watches[0].images), torch.stack(watches[1].images))
    assert not torch.equal(torch.cat(watches[0].images[:3]), torch.cat(watches[0].images[3:6]))


def test_an_exported_model_comes_back_with_what_it_is_or_is_read_otherwise(target, grid, twin, images, tmp_path):
    module = build(target, grid, twin)
    fit(module)
    path = module.eval().export(tmp_path)
    again, (identity, _) = exported_target(target, path), read_weights(path)
    assert path == tmp_path / "model.safetensors" and identity["alpha"] == 0.8
    assert identity["base_sha256"] == weights_hash(target.backbone) != identity["target"]["backbone_sha256"]
    assert identity["target"] == again.identity() and not again.training and again.num_classes == 3
    assert torch.equal(again(images), module.explainer.target(images))
    explainer = SelfExplaining(target, grid, str(path)).eval()
    expected = module.explainer.predict_and_explain(images)[1]
    assert torch.equal(explainer.predict_and_explain(images)[1], expected)
    assert torch.equal(exported_target(copy.deepcopy(target).backbone, path)(images), again(images))
    head = SelfExplaining(target, grid, str(path), "difference", path_blocks=1).target.head
    assert head.reading == "difference" and len(head.blocks) == 1 and torch.equal(head.weight, again.head.weight)


@pytest.mark.parametrize(("normalise", "reading"), [(True, "difference"), (False, "blank_patch")])
def test_every_option_of_the_head_comes_back(target, grid, images, tmp_path, normalise, reading):
    module, between = SelfExplaining(target, grid).eval(), torch.randn(7, 24)
    module.target.head = FixedHead(torch.randn(3, 7), between, normalise, 3.5, torch.randn(3), reading, 0.3)
    again = SelfExplaining(target, grid, str(module.export(tmp_path))).eval()
    for got, expected in zip(again.predict_and_explain(images), module.predict_and_explain(images), strict=True):
        assert torch.equal(got, expected)


def test_statistics_of_batch_norm_stay_those_of_the_base_model(make_model, grid, tmp_path):
    """They are no weights, so a vector would not contain what they become."""
    convolutions = timm.create_model("test_resnet", features_only=True, out_indices=[2])
    embed = partial(HybridEmbed, backbone=convolutions)
    target = TargetModel(make_model(patch_size=1, embed_layer=embed)).eval()
    module = build(target, grid, alpha=1)
    fit(module, limit_val_batches=0)
    before = {name: value for name, value in target.backbone.named_buffers() if "running" in name}
    after = dict(module.explainer.target.backbone.named_buffers())
    assert module.training and before and all(torch.equal(value, after[name]) for name, value in before.items())
