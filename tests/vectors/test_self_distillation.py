"""Models that explain themselves for every head: patches that learn functionals, an embedding that is held."""

from functools import partial

import pytest
import torch
from lightning import Trainer
from toys import SILENT, Unlabelled

from datamodules.cached import Cached
from datamodules.images import Images
from explainers.anyhead import CoalitionTeacher, PropagationTeacher
from explainers.transformer.direct_paths import direct_paths
from explainers.transformer.path_flow import path_flow, record_flow
from explainers.vectors.fixed_head import embed_as_read
from explainers.vectors.model_files import exported_target
from explainers.vectors.self_distillation import SelfDistillation
from explainers.vectors.self_explaining import HeadBuilder, SelfExplaining, fix_head

TEACHERS = {
    "propagation": partial(PropagationTeacher, functionals=["predicted", "other"]),
    "coalitions": partial(CoalitionTeacher, pairs=3),
}


def build(target, grid, loss, patch_scale=None, **settings):
    head = HeadBuilder(patch_scale=patch_scale)
    settings = {"alpha": 0.3, "optimizer": partial(torch.optim.Adam, lr=1e-3)} | settings
    module = SelfDistillation(SelfExplaining(target, grid, reading="difference"), head, TEACHERS[loss], **settings)
    fix_head(module.explainer, head, None)
    module.log = lambda *args, **kwargs: None
    return module


def images_of(train, val):
    return Images(partial(Unlabelled, train), partial(Unlabelled, val, seed=1), batch_size=4, num_workers=0)


def fit(module, data, epochs):
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
def test_patches_are_read_as_differences_from_a_blank_image(target, grid, images, reading):
    module = SelfExplaining(target, grid, reading=reading).eval()
    fix_head(module, HeadBuilder(patch_scale=0.3), None)
    logits, attributions = module.predict_and_explain(images)
    weight = target.head.weight - target.head.weight.mean(0)
    torch.testing.assert_close(attributions, by_hand(target, images, 0.3, reading) @ weight.mT, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits.softmax(-1), target(images).softmax(-1))  # its own head, with its bias


def test_patches_are_read_from_untrained_paths_too(target, grid, images, tmp_path):
    """s a_0 (token − blank) + a_1 f_z + Σ_l a_l r_lz, one image at a time; gradients reach tokens and a, no paths."""
    module = SelfExplaining(target, grid, reading="blank_patch", path_blocks=2).eval()
    fix_head(module, HeadBuilder(patch_scale=0.3), None)
    head, blocks = module.target.head, range(len(target.backbone.blocks))[-2:]
    head.read_out.data = torch.tensor([0.5, 0.7, 2.0, -1.0])
    expected = []
    with torch.no_grad():
        for image in images:
            with record_flow(target, blocks) as record:
                target.embed(target.normalise(image[None]))
            first, second = direct_paths(target, record)[0]
            flow, token = path_flow(target, record)[0, 0], by_hand(target, image[None], 0.3, "blank_patch")[0]
            expected.append(0.5 * token + 0.7 * flow + 2 * first - second)
    _, patches, paths = embed_as_read(module.target, grid, images)
    vectors = head.vectors(patches, paths)
    torch.testing.assert_close(vectors, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert patches.requires_grad and not torch.autograd.grad(paths.sum(), patches, allow_unused=True)[0]
    paths.square().sum().backward()
    assert (head.read_out.grad[1:] != 0).all()
    assert all(weight.grad is None for weight in module.target.backbone.parameters())
    again = exported_target(target, module.export(tmp_path)).head
    assert again.blocks == tuple(blocks) and again.read_out.tolist() == pytest.approx([0.5, 0.7, 2.0, -1.0])
    again.scale_attributions(3.0)
    torch.testing.assert_close(again.vectors(patches, 3 * paths), 3 * vectors, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", TEACHERS)
def test_the_loss_is_that_of_the_teacher_and_of_what_changes_embeddings(target, grid, kind):
    module = build(target, grid, kind, patch_scale=0.5)
    model = module.explainer.target
    with torch.no_grad():
        for weight in model.backbone.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
        batch, source = Unlabelled(5, seed=3)[torch.arange(5)], TEACHERS[kind](target, grid)
        old, new = (each.embed(target.normalise(batch["image"])) for each in (target, model))
        rows = batch | source(batch) | {"embedding": old}
        explaining = source.compute(by_hand(module.eval().explainer.target, batch["image"], 0.5), rows).item()
    mean = [sum(column) / 5 for column in old.mT.tolist()]
    spread = sum((number - mean[i]) ** 2 for row in old.tolist() for i, number in enumerate(row))
    held = sum(number**2 for change in (new - old).tolist() for number in change) / spread
    assert module.training_step(batch, 0).item() == pytest.approx(0.3 * held + 0.7 * explaining, rel=1e-3)
    assert held > 1e-4


def test_the_first_batch_alone_sets_the_factor_of_patches(target, grid):
    """Also where gradients of several batches are summed before the first step."""
    module, factors = build(target, grid, "coalitions"), []
    for seed in (3, 4):
        module.training_step(Unlabelled(5, seed=seed)[torch.arange(5)], 0)
        factors.append(module.explainer.target.head.patch_scale.item())
    assert factors[0] == factors[1] != 1


def test_a_teacher_draws_anew_in_every_epoch(target, grid):
    module, epochs = build(target, grid, "coalitions"), []
    draw = module.loss._draw
    module.loss._draw = lambda batch, epoch: epochs.append(epoch) or draw(batch, epoch)
    Trainer(accelerator="cpu", max_epochs=2, limit_val_batches=0, **SILENT).fit(module, images_of(4, 4))
    assert epochs == [0, 1]


@pytest.mark.slow
def test_patches_learn_without_labels_and_predictions_are_held(target, grid, tmp_path):
    module, losses = build(target, grid, "coalitions"), []
    del module.log
    step = module.training_step
    module.training_step = lambda *batch: losses.append(step(*batch)) or losses[-1]
    metrics = fit(module, Cached(images_of(12, 5), str(tmp_path / "rows"), 4), epochs=8).callback_metrics
    assert metrics.keys() == {"train/loss", "val/loss", "val/accuracy"}
    assert sum(losses[-3:]) < 0.85 * sum(losses[:3]) and module.explainer.target.head.patch_scale != 1
    assert metrics["val/accuracy"] > 0.5  # of 5 predictions of the base model, among 5 classes
    assert all(torch.equal(a, b) for a, b in zip(module.teacher.parameters(), target.parameters(), strict=True))
    assert exported_target(target, module.export(tmp_path)).head.reading == "difference"
