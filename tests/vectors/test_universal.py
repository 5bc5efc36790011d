"""Models that explain themselves for every head: patches that learn functionals, predictions held by a teacher."""

import copy
from functools import partial

import pytest
import timm
import torch
from lightning import Trainer
from test_label_free import Unlabelled
from timm.layers import HybridEmbed
from toys import SILENT, Marked, exported

from datamodules.cached import Cached
from datamodules.images import Images
from explainers.anyhead import CoalitionTeacher, PropagationTeacher
from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.shapley.kernel_shap import ShapleyLabels
from explainers.transformer.direct_paths import direct_paths
from explainers.transformer.path_flow import path_flow, record_flow
from explainers.vectors.explainability_vector import ExplainabilityVector
from explainers.vectors.fixed_head import FixedHead, embed_as_read
from explainers.vectors.model_files import exported_target
from explainers.vectors.projections import simplex, simplex_of
from explainers.vectors.self_explaining import SelfExplaining

ADAM = partial(torch.optim.Adam, lr=1e-3)
TEACHERS = {
    "propagation": partial(PropagationTeacher, functionals=["predicted", "other"]),
    "coalitions": partial(CoalitionTeacher, pairs=3),
}


def build(target, grid, labels, **settings):
    defaults = {"alpha": 0.5, "predictions": "teacher", "reading": "difference", "teacher": "base", "optimizer": ADAM}
    settings = defaults | settings
    return SelfExplaining(copy.deepcopy(target), grid, labels=labels, **settings)


def fit(module, folder, epochs=1):
    images = Images(partial(Unlabelled, 12), partial(Unlabelled, 5, seed=1), batch_size=4, num_workers=0)
    data = Cached(images, str(folder), 4)
    trainer = Trainer(accelerator="cpu", max_epochs=epochs, log_every_n_steps=1, **SILENT)
    trainer.fit(module, data)
    return trainer


def by_hand(model, images, scale=1.0, reading="difference"):
    """Vectors of patches, one image at a time: scale · (e_z − G(blank)), or minus the same patch of a blank image."""
    blank, blanks = model.embed_with_patches(torch.zeros_like(model.normalise(images[:1])))
    blanks = blanks[0] if reading == "blank_patch" else blank.expand_as(blanks[0])
    rows = []
    for image in images:
        _, patches = model.embed_with_patches(model.normalise(image[None]))
        rows.append(torch.stack([scale * (patch - other) for patch, other in zip(patches[0], blanks, strict=True)]))
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("reading", ["difference", "blank_patch"])
def test_patches_are_read_as_differences_from_a_blank_image(target, grid, images, tmp_path, reading):
    module = build(target, grid, None, alpha=1, predictions="labels", patch_scale=0.3, reading=reading)
    fit_nothing(module)
    logits, attributions = module.eval().predict_and_explain(images)
    weight = target.head.weight - target.head.weight.mean(0)
    torch.testing.assert_close(attributions, by_hand(target, images, 0.3, reading) @ weight.mT, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits.softmax(-1), target(images).softmax(-1))  # its own head, with its bias


def test_patches_are_read_from_untrained_paths_too(target, grid, images, tmp_path):
    """s a_0 (token − blank) + a_1 f_z + Σ_l a_l r_lz, one image at a time; gradients reach tokens and a, no paths."""
    settings = {"alpha": 1, "predictions": "labels", "patch_scale": 0.3, "reading": "blank_patch", "path_blocks": 2}
    module = build(target, grid, None, **settings)
    fit_nothing(module)
    module.eval().target.head.read_out.data = torch.tensor([0.5, 0.7, 2.0, -1.0])
    expected, blocks = [], range(len(target.backbone.blocks))[-2:]
    with torch.no_grad():
        for image in images:
            with record_flow(target, blocks) as record:
                target.embed(target.normalise(image[None]))
            first, second = direct_paths(target, record)[0]
            flow, token = path_flow(target, record)[0, 0], by_hand(target, image[None], 0.3, "blank_patch")[0]
            expected.append(0.5 * token + 0.7 * flow + 2 * first - second)
    _, patches, paths = embed_as_read(module.target, grid, images)
    vectors = module.target.head.vectors(patches, paths)
    torch.testing.assert_close(vectors, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert patches.requires_grad and not torch.autograd.grad(paths.sum(), patches, allow_unused=True)[0]
    paths.square().sum().backward()
    assert (module.target.head.read_out.grad[1:] != 0).all()
    assert all(weight.grad is None for weight in module.target.backbone.parameters())
    again = exported_target(target, module.export(tmp_path))
    assert again.head.blocks == tuple(blocks) and again.head.read_out.tolist() == pytest.approx([0.5, 0.7, 2.0, -1.0])
    again.head.scale_attributions(3.0)
    torch.testing.assert_close(again.head.vectors(patches, 3 * paths), 3 * vectors, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="path_blocks needs reading=difference or blank_patch"):
        FixedHead(torch.eye(2), blocks=[0])


def fit_nothing(module):
    trainer = Trainer(accelerator="cpu", max_epochs=1, limit_train_batches=0, limit_val_batches=0, **SILENT)
    trainer.fit(module, Images(partial(Unlabelled, 4), partial(Unlabelled, 4), batch_size=4, num_workers=0))


@pytest.mark.parametrize(
    ("kind", "predictions"), [("propagation", "teacher"), ("coalitions", "teacher"), ("coalitions", "embedding")]
)
def test_the_loss_is_that_of_the_teacher_and_of_what_holds_predictions(target, grid, kind, predictions):
    """The divergence from the predictions of the base model, or the part of the embedding's variance that is lost."""
    module = build(target, grid, TEACHERS[kind], alpha=0.3, patch_scale=0.5, predictions=predictions)
    fit_nothing(module)
    with torch.no_grad():
        for weight in module.target.backbone.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
        batch = Unlabelled(5, seed=3)[torch.arange(5)]
        images, source = target.normalise(batch["image"]), TEACHERS[kind](target, grid)
        old, new = target.embed(images), module.target.embed(images)
        rows = batch | source(batch) | {"embedding": old}
        explaining = source.loss(by_hand(module.eval().target, batch["image"], 0.5), rows).item()
    if predictions == "teacher":
        pairs = zip(target.classify(old).softmax(-1).flatten(), target.classify(new).softmax(-1).flatten(), strict=True)
        held = sum(p * (p / q).log() for p, q in pairs).item() / 5
    else:
        mean = [sum(column) / 5 for column in old.mT.tolist()]
        spread = sum((number - mean[i]) ** 2 for row in old.tolist() for i, number in enumerate(row))
        held = sum(number**2 for change in (new - old).tolist() for number in change) / spread
    module.log = lambda *args, **kwargs: None
    assert module.training_step(batch, 0).item() == pytest.approx(0.3 * held + 0.7 * explaining, rel=1e-3)
    assert held > 1e-4


def test_the_first_batch_alone_sets_the_factor_of_patches(target, grid):
    """Also where gradients of several batches are summed before the first step."""
    module = build(target, grid, TEACHERS["coalitions"], patch_scale=None)
    fit_nothing(module)
    module.log = lambda *args, **kwargs: None
    factors = []
    for seed in (3, 4):
        module.training_step(Unlabelled(5, seed=seed)[torch.arange(5)], 0)
        factors.append(module.target.head.patch_scale.item())
    assert factors[0] == factors[1] != 1


def test_a_teacher_draws_anew_in_every_epoch(target, grid):
    module, epochs = build(target, grid, TEACHERS["coalitions"]), []
    draw = module.labels._draw
    module.labels._draw = lambda batch, epoch: epochs.append(epoch) or draw(batch, epoch)
    images = Images(partial(Unlabelled, 4), partial(Unlabelled, 4), batch_size=4, num_workers=0)
    Trainer(accelerator="cpu", max_epochs=2, limit_val_batches=0, **SILENT).fit(module, images)
    assert epochs == [0, 1]


@pytest.mark.parametrize(
    "teacher",
    [TEACHERS["coalitions"], partial(PropagationTeacher, functionals=["predicted"])],
    ids=["coalitions", "propagation"],
)
def test_a_teacher_reads_a_head_of_prototypes_as_a_linear_one(target, grid, teacher):
    """Losses depend on the directions of functionals and on logits; so models with such heads can learn."""
    prototypes, linear = copy.deepcopy(target), copy.deepcopy(target)
    prototypes.head = FixedHead(simplex(5, target.embed_dim), scale=10.0)
    linear.head = FixedHead(simplex(5, target.embed_dim), normalise=False)
    linear.classify = prototypes.classify
    batch, losses = Unlabelled(4, seed=3)[torch.arange(4)], []
    vectors = torch.randn(4, grid.num_patches, target.embed_dim)
    for each in (prototypes, linear):
        source = teacher(each.eval(), grid)
        with torch.no_grad():
            rows = batch | source(batch) | {"embedding": each.embed(each.normalise(batch["image"]))}
        losses.append(source.loss(vectors, rows).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEACHERS)
def test_patches_learn_without_labels_and_predictions_are_held(target, grid, kind, tmp_path):
    module, losses = build(target, grid, TEACHERS[kind], patch_scale=None), []
    step = module.training_step
    module.training_step = lambda *batch: losses.append(step(*batch)) or losses[-1]
    metrics = fit(module, tmp_path / "rows", epochs=8).callback_metrics
    assert metrics.keys() == {"train/loss", "val/loss", "val/accuracy"}
    assert sum(losses[-3:]) < 0.85 * sum(losses[:3])
    assert module.target.head.patch_scale != 1
    assert metrics["val/accuracy"] > 0.5  # of 5 predictions of the base model, among 5 classes: it keeps 4
    assert all(torch.equal(a, b) for a, b in zip(module.teacher.parameters(), target.parameters(), strict=True))
    identity = module.provenance()
    assert identity["alpha"] == 0.5 and identity["head"]["reading"] == "difference"


@pytest.mark.slow
def test_its_vector_is_added_to_a_model_of_another_head(target, grid, images, tmp_path):
    module = build(target, grid, TEACHERS["coalitions"], patch_scale=0.25)
    fit(module, tmp_path / "rows", epochs=2)
    explaining = str(module.export(tmp_path))
    onto = exported(target, grid, tmp_path / "onto", seed=3)
    vector = ExplainabilityVector(
        copy.deepcopy(target), grid, None, explaining, onto, [1.0], [0.0, 1.0], labels=partial(ShapleyLabels, budget=20)
    )
    vector.best = (1.0, 1.0)
    moved = exported_target(target, onto)
    with torch.no_grad():
        for name, weight in moved.backbone.state_dict().items():
            weight.add_(module.target.backbone.state_dict()[name] - target.backbone.state_dict()[name])
        lengths = moved.embed(moved.normalise(images)).norm(dim=-1)[:, None, None]
        expected = by_hand(moved, images, 0.25) @ moved.head.weight.mT * moved.head.scale / lengths
        classes = torch.tensor([0, 1, 2, 0, 1])
        heatmaps = vector.eval()(images, classes).flatten(1)
    torch.testing.assert_close(heatmaps, expected[torch.arange(5), :, classes], rtol=1e-3, atol=1e-4)
    again = exported_target(target, vector.export(tmp_path / "moved"))
    assert (again.head.reading, again.head.patch_scale.item()) == ("difference", 0.25)


def test_statistics_of_batch_norm_stay_those_of_the_base_model(make_model, grid):
    """They are no weights, so a vector would not contain what they become."""
    convolutions = timm.create_model("test_resnet", features_only=True, out_indices=[2])
    embed = partial(HybridEmbed, backbone=convolutions)
    target = TargetModel(make_model(patch_size=1, embed_layer=embed)).eval()
    module = SelfExplaining(target, grid, simplex_of, alpha=1, optimizer=ADAM)
    before = {name: value.clone() for name, value in target.backbone.named_buffers() if "running" in name}
    data = Images(partial(Marked, 12), partial(Marked, 5, seed=1), batch_size=4, num_workers=0)
    Trainer(accelerator="cpu", max_epochs=1, log_every_n_steps=1, limit_val_batches=0, **SILENT).fit(module, data)
    assert module.training and before
    after = dict(module.target.backbone.named_buffers())
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_what_is_held_needs_a_teacher_and_a_kept_head_is_linear(make_model, target, grid, tmp_path):
    with pytest.raises(InputError, match=r"teacher=, a file or base, for predictions=teacher, got none"):
        fit(build(target, grid, None, alpha=1, teacher=None), tmp_path)
    other = TargetModel(make_model(), head=torch.nn.Sequential(torch.nn.Linear(24, 5))).eval()
    with pytest.raises(InputError, match="expected a linear head to keep, got Sequential of vit_tiny"):
        fit(build(other, grid, None, alpha=1, predictions="labels"), tmp_path)
