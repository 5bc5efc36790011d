"""Self-explaining models: what they read, learn, and leave behind."""

import copy
import math
from functools import partial

import pytest
import references
import torch
from lightning import Callback, Trainer
from safetensors.torch import save_file
from toys import SILENT, Marked, equal, exported, state

from datamodules.cached import Cached
from datamodules.images import Images
from explainers.errors import InputError
from explainers.models.fetching import save_target
from explainers.saved.identity import weights_hash
from explainers.saved.weights import read_weights, save_weights
from explainers.shapley.kernel_shap import ShapleyLabels
from explainers.training.sources import Pixels
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.model_files import exported_target
from explainers.vectors.projections import simplex, simplex_of
from explainers.vectors.self_explaining import SelfExplaining

ADAM = partial(torch.optim.Adam, lr=1e-3)
LABELS = partial(ShapleyLabels, budget=20)
TRAIN, VAL = partial(Marked, 12), partial(Marked, 5, seed=1)


@pytest.fixture
def twin(target, grid, tmp_path):
    """The file of a prediction-only model."""
    return exported(target, grid, tmp_path / "twin", seed=5)


def build(target, grid, twin=None, alpha=0.8, **settings):
    settings = {"labels": LABELS, "optimizer": ADAM} | settings
    return SelfExplaining(copy.deepcopy(target), grid, simplex_of, alpha=alpha, teacher=twin, **settings)


def fit(module, folder=None, epochs=1, resume=None, **settings):
    images = Images(TRAIN, VAL, batch_size=4, num_workers=0)
    data = images if folder is None else Cached(images, str(folder), 4)
    trainer = Trainer(accelerator="cpu", max_epochs=epochs, log_every_n_steps=1, **SILENT, **settings)
    trainer.fit(module, data, ckpt_path=resume)
    return trainer


class Watch(Callback):
    """The weights before the first step, and the images of every step."""

    def __init__(self):
        self.images = []

    def on_train_start(self, trainer, module):
        self.weights, self.mode = state(module.target), (module.target.training, module.teacher)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.images.append(batch["image"])


@pytest.mark.parametrize(("alpha", "classes"), [(1, "label"), (0.8, "label"), (0.8, "predicted"), (0.3, "all")])
def test_the_loss_is_that_of_the_explained_classes(target, grid, twin, alpha, classes):
    module = build(target, grid, twin, alpha, labels=partial(LABELS, classes=classes))
    fit(module, limit_train_batches=0)
    batch = Marked(5, seed=3)[torch.arange(5)]
    logits, attributions = module.predict_and_explain(batch["image"])
    rows = partial(LABELS, classes=classes)(module.teacher, grid)(batch)
    of_one_class = partial(references.self_explaining_loss, logits, attributions, batch["label"], alpha=alpha)
    if classes == "all":
        each = [of_one_class(torch.full((5,), k), rows["shapley"][..., k]) for k in range(3)]
        expected = sum(each) / 3
    else:
        expected = of_one_class(rows["explained"], rows["shapley"])
    module.log = lambda *args, **kwargs: None
    assert module.training_step(batch, 0).item() == pytest.approx(expected, rel=1e-5)
    assert module.training_step(batch | rows, 0).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_is_no_class_is_refused(target, grid, label):
    module = build(target, grid, alpha=1)
    fit(module, limit_train_batches=0)
    batch = Marked(5, seed=3)[torch.arange(5)]
    with pytest.raises(InputError, match=f"^expected labels from 0 to 2, got {min(label, 0)} to {max(label, 2)}, "):
        module.training_step(batch | {"label": torch.tensor([0, 1, 2, 0, label])}, 0)


def test_a_heatmap_explains_the_class_that_was_asked_for_or_the_predicted_one(target, grid, twin, images):
    model = exported_target(target, twin)
    module = SelfExplaining(target, grid, alpha=1, weights=twin).eval()
    _, patches = model.embed_with_patches(model.normalise(images))
    classes = torch.tensor([2, 0, 1, 1, 0])
    for asked, answered in ((classes, classes), (None, model(images).argmax(-1))):
        heatmaps = module(images, asked)
        assert heatmaps.shape == (5, 4, 4)
        for image in range(5):
            for patch in range(16):
                unit = patches[image, patch] / patches[image, patch].norm()
                expected = unit @ model.head.weight[answered[image]]
                torch.testing.assert_close(heatmaps[image, patch // 4, patch % 4], expected)
    with pytest.raises(InputError, match=r"the grid cuts 32 × 32 images; got \(32, 16\)"):
        module(images[..., :16])


def test_a_heatmap_of_a_score_compares_the_class_with_the_likely_others(target, grid, twin, images):
    module = SelfExplaining(target, grid, alpha=1, weights=twin, temperature=2.0).eval()
    logits, attributions = module.predict_and_explain(images)
    classes = torch.tensor([2, 0, 1, 1, 0])
    heatmaps = module(images, classes).flatten(1)
    for image, asked in enumerate(classes.tolist()):
        others = [k for k in range(logits.shape[1]) if k != asked]
        odds = [math.exp(logits[image, k] / 2) for k in others]
        for patch in range(16):
            a = attributions[image, patch].tolist()
            mean = sum(o * a[k] for o, k in zip(odds, others, strict=True)) / sum(odds)
            assert heatmaps[image, patch].item() == pytest.approx(a[asked] - mean, rel=1e-3, abs=1e-5)
    with pytest.raises(InputError, match="expected temperature above 0, got temperature=0"):
        SelfExplaining(target, grid, temperature=0)


def test_the_prediction_only_twin_needs_no_attributions(target, grid, tmp_path):
    for labels in (LABELS, None):
        module = build(target, grid, alpha=1, labels=labels)
        assert [type(source) for source in module.sources] == [Pixels]
        metrics = fit(module, tmp_path).callback_metrics
        assert {"train/loss", "val/loss", "val/accuracy"} == metrics.keys()


def test_alpha_is_a_part_and_what_explains_itself_needs_a_teacher(target, grid):
    for alpha in (0, 1.1):
        with pytest.raises(InputError, match=f"above 0 and at most 1 .* got {alpha}"):
            build(target, grid, alpha=alpha)
    for labels in (LABELS, None):
        with pytest.raises(InputError, match=r"^.*teacher=, a file or base, for alpha=0\.8, got none: train the"):
            fit(build(target, grid, labels=labels))


def test_only_the_last_blocks_and_the_norm_learn(target, grid, tmp_path):
    module = build(target, grid, alpha=1, labels=None, last_blocks=1)
    before = state(module.target.backbone)
    fit(module, tmp_path)
    changed = {name for name, value in state(module.target.backbone).items() if not torch.equal(value, before[name])}
    last = f"blocks.{len(target.backbone.blocks) - 1}."
    assert changed == {name for name in before if name.startswith((last, "norm."))}
    with pytest.raises(InputError, match=r"expected last_blocks from 1 to .*, got last_blocks=99"):
        build(target, grid, last_blocks=99)


def test_only_the_backbone_learns_and_the_teacher_is_not_saved(target, grid, twin, tmp_path):
    module = build(target, grid, twin)
    watch = Watch()
    before, teacher = state(target.backbone), state(module.teacher)
    trainer = fit(module, tmp_path / "rows", epochs=2, callbacks=[watch])
    assert watch.mode == (True, module.teacher) and not module.teacher.training
    assert all(not torch.equal(value, before[name]) for name, value in module.target.backbone.named_parameters())
    head = {name: value for name, value in watch.weights.items() if name.startswith("head.")}
    assert equal(head, {f"head.{name}": value for name, value in module.target.head.state_dict().items()})
    assert torch.equal(module.target.head.weight, simplex(3, 24))
    assert equal(state(module.teacher), teacher)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert saved.keys() == {f"target.{name}" for name in module.target.state_dict()}


def test_twins_start_alike_and_see_the_same_images_in_the_same_order(target, grid, twin, tmp_path):
    watches = []
    for file, alpha in ((None, 1), (twin, 0.8)):
        watches.append(Watch())
        torch.manual_seed(0)
        fit(build(target, grid, file, alpha), tmp_path, epochs=3, callbacks=[watches[-1]])
    assert equal(watches[0].weights, watches[1].weights)
    assert len(watches[0].images) == 9
    assert torch.equal(torch.stack(watches[0].images), torch.stack(watches[1].images))
    assert not torch.equal(torch.cat(watches[0].images[:3]), torch.cat(watches[0].images[3:6]))


def test_validation_is_over_all_images_of_uneven_batches(target, grid, twin, tmp_path):
    module = build(target, grid, twin)
    metrics = fit(module, tmp_path, limit_train_batches=1).callback_metrics
    images = Marked(5, seed=1)[torch.arange(5)]
    with torch.no_grad():
        logits, attributions = module.eval().predict_and_explain(images["image"])
        rows = module.sources[1](images)
    loss = references.self_explaining_loss(logits, attributions, images["label"], *rows.values(), 0.8)
    assert metrics["val/loss"].item() == pytest.approx(loss, rel=1e-3)  # the labels are kept in half precision
    assert metrics["val/accuracy"].item() == pytest.approx((logits.argmax(-1) == images["label"]).float().mean().item())


def test_an_exported_model_comes_back_with_what_it_is(target, grid, twin, images, tmp_path):
    module = build(target, grid, twin)
    fit(module)
    path = module.eval().export(tmp_path)
    again = exported_target(target, path)
    identity, _ = read_weights(path)
    assert path == tmp_path / "model.safetensors"
    assert identity["alpha"] == 0.8 and identity["base_sha256"] == weights_hash(target.backbone)
    assert identity["target"] == again.identity()
    assert identity["target"]["backbone_sha256"] != identity["base_sha256"]
    assert not again.training and again.num_classes == 3
    assert torch.equal(again(images), module.target(images))
    explainer = SelfExplaining(target, grid, alpha=1, weights=str(path))
    assert explainer.target.training and not explainer.eval().target.training  # a training goes on in its mode
    assert torch.equal(explainer.predict_and_explain(images)[1], module.predict_and_explain(images)[1])
    assert torch.equal(exported_target(copy.deepcopy(target).backbone, path)(images), again(images))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("reading", ["patch", "difference", "blank_patch"])
def test_every_option_of_the_head_comes_back(target, grid, images, tmp_path, normalise, reading):
    module = SelfExplaining(target, grid, alpha=1)
    between = torch.randn(7, 24)
    module.target.head = FixedHead(torch.randn(3, 7), between, normalise, 3.5, torch.randn(3), reading, 0.3)
    again = SelfExplaining(copy.deepcopy(target), grid, alpha=1, weights=str(module.export(tmp_path))).eval()
    for got, expected in zip(again.predict_and_explain(images), module.eval().predict_and_explain(images), strict=True):
        assert torch.equal(got, expected)


def test_the_file_of_another_architecture_or_of_something_else_is_refused(make_model, target, twin, tmp_path):
    for other, told in (
        (make_model(embed_dim=48), r"\[1, 1, 48\] for 'backbone\.cls_token', got F32 of shape \[1, 1, 24\]"),
        (make_model("test_resnet"), "'backbone.conv1.0.weight', got nothing"),
    ):
        with pytest.raises(InputError, match=told):
            exported_target(other, twin)
    save_target(target, tmp_path / "target.safetensors")
    save_file({"weight": torch.ones(2)}, tmp_path / "any.safetensors", {"head": "{}"})
    for name in ("target", "any"):
        with pytest.raises(InputError, match=rf"{name}\.safetensors: expected SelfExplaining for class, got None"):
            exported_target(target, tmp_path / f"{name}.safetensors")
    identity, weights = read_weights(twin)
    whole = save_weights(weights | {"backbone.norm.weight": torch.ones(24).int()}, tmp_path / "whole", identity)
    with pytest.raises(InputError, match="expected floats of .* for 'backbone.norm.weight', got I32"):
        exported_target(target, whole)
