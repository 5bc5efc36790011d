"""One number of any output: a region of a segmentation, a detected box, a module with a second input."""

from functools import partial

import pytest
import torch
from torch import nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.resnet import BasicBlock, ResNet

import explainers
from explainers import posthoc
from explainers.models import as_target

STATED = {"mean": 0.5, "std": 0.5, "image_size": 32}
IMAGES = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
CORNER = torch.tensor([0.0, 0.0, 16.0, 16.0])


class Segments(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.classifier = nn.Conv2d(6, 4, 1)

    def forward(self, x):
        return {"out": self.classifier(self.features(x))}


class Detects(nn.Module):
    """A list with boxes and scores for each image; brighter halves have boxes, of an image of zeros none."""

    @torch.no_grad()
    def forward(self, x):
        boxes = torch.cat([CORNER, CORNER + 16]).view(2, 4)
        halves = torch.stack([x[:, :, :16, :16].mean((1, 2, 3)), x[:, :, 16:, 16:].mean((1, 2, 3))], 1)
        return [{"boxes": boxes[own != 0], "scores": own[own != 0].sigmoid()} for own in halves]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.images, self.last = nn.Conv2d(3, 6, 3), nn.Linear(8, 5)

    def forward(self, x, meta):
        return self.last(torch.cat([self.images(x).relu().mean((2, 3)), meta], 1))


def region(output):
    return output["out"][:, 2, :16, :16].mean((1, 2))


def corner_box(output):
    """The best product of score and overlap with a corner, as D-RISE scores masked images."""

    def best(found):
        size = (torch.minimum(found["boxes"][:, 2:], CORNER[2:]) - found["boxes"][:, :2]).clamp(min=0).prod(-1)
        return torch.cat([found["scores"] * size / 256, torch.zeros(1)]).max()

    return torch.stack([best(found) for found in output])


@pytest.mark.situation(15)
def test_a_region_of_a_segmentation_is_explained():
    model = Segments().eval()
    target = as_target(model, target=region, **STATED)
    with torch.no_grad():
        torch.testing.assert_close(target(IMAGES)[:, 0], region(model(target.normalise(IMAGES))))
    assert target.score == "value" and target.backbone.feature_info[0]["num_chs"] == 6  # not the logits' own map
    grid = target.grid
    half = grid.shape[0] // 2
    for method in ("Occlusion", "Saliency"):
        heatmaps = posthoc.build(method, target, grid)(IMAGES, torch.zeros(2, dtype=torch.long))
        inside = heatmaps[:, :half, :half].abs().sum()
        assert inside > 0.8 * heatmaps.abs().sum()
        assert not heatmaps[:, half + 1 :, half + 1 :].any()
    photo = IMAGES[0].permute(1, 2, 0).numpy()
    found = explainers.explain(photo, target, method="Occlusion")
    assert found.title == f"value {target(IMAGES[:1]).item():.4g}" and found.quantity == "value"


@pytest.mark.situation(15)
def test_a_detected_box_is_explained_by_masks():
    target = as_target(Detects(), target=corner_box, **STATED)
    heatmap = posthoc.build("Occlusion", target, target.grid)(IMAGES[:1], torch.tensor([0]))[0]
    half = target.grid.shape[0] // 2
    assert heatmap[:half, :half].any() and not heatmap[half:, half:].any()
    assert "Saliency" not in posthoc.methods_for(target)


@pytest.mark.situation(16)
def test_a_second_input_is_fixed_by_partial():
    model, meta = Two().eval(), torch.tensor([[1.0, 2.0]])
    target = as_target(partial(model, meta=meta), **STATED)
    with torch.no_grad():
        torch.testing.assert_close(target(IMAGES), model(target.normalise(IMAGES), meta.expand(2, -1)))
    assert target.num_classes == 5 and target.score == "softmax"
    read = as_target(partial(model, meta=meta), target=lambda output: output[:, 3], **STATED)
    odds = as_target(partial(model, meta=meta), target=lambda output: output[:, 3], score="sigmoid", **STATED)
    with torch.no_grad():
        torch.testing.assert_close(read(IMAGES)[:, 0], target(IMAGES)[:, 3])
        torch.testing.assert_close(odds(IMAGES).softmax(-1)[:, 1], target(IMAGES)[:, 3].sigmoid())


@pytest.mark.slow
@pytest.mark.situation(15)
def test_networks_of_torchvision_are_explained():
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    resnet = ResNet(BasicBlock, [1, 1, 1, 1])
    segments = FCN(IntermediateLayerGetter(resnet, {"layer4": "out"}), FCNHead(512, 4))
    target = as_target(segments, target=lambda output: output["out"][:, 2, :32, :32].mean((1, 2)), image_size=64)
    assert target.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert posthoc.build("GradCAM", target, target.grid)(IMAGES.repeat(1, 1, 2, 2), torch.zeros(2).long()).std() > 0
    detects = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=4, min_size=64)
    target = as_target(detects, target=corner_box, image_size=64)
    assert not target.mean.any() and (target.std == 1).all()  # it normalises pixels itself
    assert target(IMAGES.repeat(1, 1, 2, 2)).shape == (2, 1)
