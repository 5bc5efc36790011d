from functools import partial

import pytest
import timm
import torch
from conftest import TINY_VIT
from lightning import Trainer
from torch.utils.data import DataLoader
from toys import SILENT, state

from datamodules.images import Images
from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.fetching import load_target, save_target
from explainers.models.heads import load_head
from explainers.saved.identity import weights_hash
from explainers.training.classifier import Classifier

SGD = partial(torch.optim.SGD, lr=0.05)
ADAM = partial(torch.optim.Adam, lr=1e-2)
SWIN = {"img_size": 32, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
FAMILIES = {
    "deit_tiny_distilled_patch16_224": TINY_VIT,
    "swin_tiny_patch4_window7_224": SWIN,
    "test_resnet": {},
    "test_convnext": {},
}


def samples(count):
    """Bright images are of class 1, dark ones of class 0."""
    images = torch.randint(
        0, 100, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)
    )
    labels = torch.arange(count) % 2
    images += (150 * labels).byte()[:, None, None, None]
    return [
        {"image": image, "label": label, "index": torch.tensor(i)}
        for i, (image, label) in enumerate(zip(images, labels, strict=True))
    ]


def fit(classifier, epochs=1, count=16):
    trainer = Trainer(accelerator="cpu", max_epochs=epochs, log_every_n_steps=1, **SILENT)
    trainer.fit(classifier, DataLoader(samples(count), batch_size=8), DataLoader(samples(6), batch_size=4))
    return trainer


def changed(module, before):
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("training", [True, False])  # a fresh timm model is in train mode, and the trainer leaves it so
def test_tuning_the_head_leaves_the_backbone_and_its_statistics_as_they_were(make_target, training):
    target = make_target("test_resnet").train(training)
    before = state(target.backbone)
    classifier = Classifier(target, 2, SGD)
    target, head = classifier.target, state(classifier.target.head)
    fit(classifier)
    assert changed(target.backbone, before) == set()
    assert changed(target.head, head) == {"weight", "bias"}
    assert all(weight.grad is None for weight in target.backbone.parameters())


def test_full_tuning_changes_the_backbone_and_its_statistics(make_target):
    target = make_target("test_resnet")
    before = state(target.backbone)
    classifier = Classifier(target, 2, SGD, tune="all")
    fit(classifier)
    assert {"conv1.0.weight", "bn1.running_mean", "bn1.weight", "layer4.0.conv1.weight"} <= changed(
        classifier.target.backbone, before
    )


def test_a_head_fit_on_stored_embeddings_is_the_one_fit_on_images(make_target):
    classifier = Classifier(make_target("test_resnet"), 2, SGD).eval()
    batch = {name: torch.stack([sample[name] for sample in samples(8)]) for name in ("image", "label")}
    (source,) = classifier.sources
    stored = source(batch)
    assert stored.keys() == set(source.provides) and not stored["embedding"].requires_grad
    loss = torch.nn.functional.cross_entropy(classifier(batch["image"]), batch["label"])
    for rows in (batch, stored | {"label": batch["label"]}):
        torch.testing.assert_close(classifier.training_step(rows, 0), loss)


@pytest.mark.parametrize("changing", [{"tune": "all"}, {"min_crop": 0.5}], ids=str)
def test_embeddings_that_change_cannot_be_stored(make_target, changing):
    with pytest.raises(InputError, match="cache"):
        _ = Classifier(make_target(), 2, SGD, **changing).sources


class Labelled(list):
    def __init__(self, labels, classes):
        super().__init__(
            sample | {"label": torch.tensor(y)} for sample, y in zip(samples(len(labels)), labels, strict=True)
        )
        self.classes = classes


def images_of(labels, classes):
    build = partial(Labelled, labels, classes)
    return Images(train=build, val=build, batch_size=4, num_workers=0)


def fit_images(classifier, data):
    Trainer(accelerator="cpu", max_epochs=1, log_every_n_steps=1, **SILENT).fit(classifier, data)


@pytest.mark.parametrize("tune", ["head", "all"])
def test_the_head_has_the_classes_of_the_images(make_target, tmp_path, tune):
    classifier = Classifier(make_target("test_resnet"), None, SGD, tune=tune)
    fit_images(classifier, images_of([0, 1, 2, 1], ["a", "b", "c"]))
    classifier.export(tmp_path)
    assert (tmp_path / "target.safetensors").exists() == (tune == "all")
    head, identity = load_head(tmp_path / "head.safetensors")
    assert head.out_features == 3
    assert identity == {"target": classifier.target.backbone_identity(), "classes": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("num_classes", "labels", "classes", "told"),
    [
        (2, [0, 1], list("abcdefg"), "num_classes"),
        (None, [0, 0], ["a"], "2 classes"),
        (1, [0, 0], [], "num_classes"),
        (None, [-1, -1], [], "label"),
        (3, [-1, -1], [], "labels"),
        (3, [0, 1, 3], [], "num_classes"),
    ],
)
def test_labels_that_do_not_fit_the_head_are_refused(make_target, num_classes, labels, classes, told):
    with pytest.raises(InputError, match=told):
        fit_images(Classifier(make_target(), num_classes, SGD), images_of(labels, classes))


def test_without_names_of_classes_the_number_is_believed(make_target):
    classifier = Classifier(make_target(), 3, SGD)
    fit_images(classifier, images_of([0, 1, 2], []))
    assert classifier.target.head.out_features == 3


def test_a_head_tells_apart_what_the_backbone_tells_apart(make_target):
    trainer = fit(Classifier(make_target(), 2, ADAM, min_crop=0.5), epochs=15)
    assert trainer.callback_metrics["val/accuracy"] == 1


def test_accuracy_counts_images_and_not_classes_or_batches(make_target):
    """Of 6 images in batches of 4 and 2, all are said to be of class 1."""
    classifier = Classifier(make_target(), 2, SGD)
    torch.nn.init.zeros_(classifier.target.head.weight)
    classifier.target.head.bias.data = torch.tensor([0.0, 5.0])
    uneven = [sample | {"label": torch.tensor(int(i < 4))} for i, sample in enumerate(samples(6))]
    trainer = Trainer(accelerator="cpu", **SILENT)
    (found,) = trainer.validate(classifier, DataLoader(uneven, batch_size=4), verbose=False)
    assert found["val/accuracy"] == pytest.approx(4 / 6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "test_resnet"])
def test_a_saved_target_comes_back_with_its_head(make_target, images, tmp_path, name):
    target, blank = make_target(name), make_target(name, seed=1)
    target.head, blank.head = (torch.nn.Linear(target.embed_dim, 3) for _ in range(2))
    save_target(target, path := tmp_path / "target.safetensors")
    again = load_target(blank, path)
    torch.testing.assert_close(again(images), target(images))
    assert weights_hash(again.backbone) == weights_hash(target.backbone) != weights_hash(blank.backbone)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exported_target_loads_as_a_checkpoint_of_timm(make_target, images, tmp_path, name):
    target = make_target(name, **FAMILIES[name])
    classifier = Classifier(target, 3, SGD, tune="all").eval()
    classifier.export(tmp_path)
    path = str(tmp_path / "target.safetensors")
    loading = {"model_name": name, "num_classes": 3, "checkpoint_path": path} | FAMILIES[name]
    again = TargetModel(timm.create_model(**loading)).eval()
    torch.testing.assert_close(again(images), classifier(images))
    assert weights_hash(again.backbone) == weights_hash(classifier.target.backbone)
    with_head = TargetModel(timm.create_model(**loading), head=tmp_path / "head.safetensors")
    assert torch.equal(with_head.head.weight, classifier.target.head.weight)
    with pytest.raises(InputError, match="backbone_sha256"):
        TargetModel(timm.create_model(name, **FAMILIES[name]), head=tmp_path / "head.safetensors")
