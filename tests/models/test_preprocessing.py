"""Image processors of transformers: the same pixels, the same predictions."""

import pytest
import timm
import torch
import transformers
from images.test_transform import PHOTOS, photo
from torchvision.models import ResNet18_Weights
from torchvision.models.segmentation import FCN_ResNet50_Weights

from explainers.errors import InputError
from explainers.images.transform import ImageTransform
from explainers.models.convert import as_target
from explainers.models.preprocessing import guess_transform, read_processor

SMALL = {"shortest_edge": 72}
SQUARE = {"height": 64, "width": 64}
PROCESSORS = {
    "ViTImageProcessor": {},
    "DeiTImageProcessor": {},
    "BeitImageProcessor": {"size": {"height": 72, "width": 80}},
    "BitImageProcessor": {"size": {"shortest_edge": 256}},
    "CLIPImageProcessor": {"size": SMALL, "crop_size": SQUARE},
    "SiglipImageProcessor": {"size": SQUARE},
    "ConvNextImageProcessor": {"size": {"shortest_edge": 224}},
    "LevitImageProcessor": {},
    "MobileNetV2ImageProcessor": {},
    "PoolFormerImageProcessor": {},
    "EfficientNetImageProcessor": {"size": SQUARE, "rescale_factor": 1 / 127.5, "rescale_offset": True},
}


@pytest.mark.situation(23)
@pytest.mark.parametrize(("backend", "tolerance"), [("Pil", 0.01), ("", 2.01)], ids=["pil", "torchvision"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_those_of_transformers(name, backend, tolerance):
    """The torchvision backend rounds otherwise than Pillow, by up to two levels of 256."""
    processor = getattr(transformers, name + backend)(**PROCESSORS[name])
    found = read_processor(processor)
    mean, std = (torch.tensor(values)[:, None, None] for values in (found.mean, found.std))
    for each in PHOTOS:
        theirs = torch.as_tensor(processor(photo(each), return_tensors="pt").pixel_values[0])
        difference = (255 * (theirs * std + mean) - found.transform(photo(each))).abs().max()
        assert difference < tolerance, each


def test_a_processor_says_mean_std_and_what_becomes_of_photos():
    model = timm.create_model("test_vit", num_classes=3)
    settings = {"size": {"height": 96, "width": 96}, "image_mean": [0.1] * 3, "image_std": [0.2] * 3}
    target = as_target(model, processor=transformers.ViTImageProcessor(**settings))
    assert target.transform == ImageTransform((96, 96), "squash", 1.0, "bilinear", (26, 26, 26), rounds=False)
    assert target.mean.flatten().tolist() == pytest.approx([0.1] * 3)
    assert target.std.flatten().tolist() == pytest.approx([0.2] * 3)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    assert as_target(net, processor=ResNet18_Weights.DEFAULT.transforms()).transform.crop_pct == 224 / 256
    with pytest.raises(InputError, match="^processor=: a TargetModel was made with its own"):
        as_target(target, processor=transformers.ViTImageProcessor())


@pytest.mark.parametrize("side", [224, 384, 512])
def test_the_transform_of_convnext_is_that_of_its_processor_at_this_size(side):
    processor = transformers.ConvNextImageProcessor(size={"shortest_edge": side}, resample=3)
    assert guess_transform("convnextv2", (side, side)) == read_processor(processor).transform


@pytest.mark.parametrize(
    "processor",
    [
        transformers.ViTImageProcessor(do_resize=False),
        transformers.ViTImageProcessor(size={"shortest_edge": 64, "longest_edge": 96}),
        transformers.ViTImageProcessor(size={"longest_edge": 96}),
        transformers.DeiTImageProcessor(crop_size={"height": 300, "width": 300}),
        transformers.MobileViTImageProcessor(size={"shortest_edge": 288}),  # it swaps red and blue
        FCN_ResNet50_Weights.DEFAULT.transforms(),
        "a name",
    ],
)
def test_a_processor_that_does_something_else_is_refused(processor):
    with pytest.raises(InputError, match="^processor= needs"):
        read_processor(processor)
