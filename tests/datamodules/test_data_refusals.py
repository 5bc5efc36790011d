"""What no data set can be made of is refused in one line that names the file or the setting."""

import json
from functools import partial

import numpy as np
import pytest
from commands import draw_images
from PIL import Image
from test_class_masks import LEFT, instance, regions, write_coco, write_ids
from test_ilsvrc import write_images, write_xml, xml
from test_images import Numbers
from test_mask_files import write_pair
from test_splitting import SPLITS

from datamodules.coco import coco_masks
from datamodules.datasets import ImageFiles, spread, unlabelled_images
from datamodules.digits import Digits
from datamodules.folders import ImageFolders, image_folder
from datamodules.ilsvrc import annotated_images, imagenet_boxes
from datamodules.images import Images
from datamodules.masks import class_masks, masked_images
from datamodules.torchvision_sets import torchvision_images
from datamodules.truth import Boxes, Crop
from explainers.errors import InputError
from explainers.images.transform import ImageTransform

SHOWN = ImageTransform((20, 20))


def read_ids(root, content=None, **settings):
    write_ids(root, "a", regions((0, 20), (3, 20)))
    if content:
        (root / "masks/a.png").write_bytes(content)
    return class_masks(root, SHOWN, **settings)


def read_coco(root, segmentation=LEFT, **settings):
    write_coco(root, [instance(3, 1, segmentation, 7)])
    (root / "annotations/captions.json").write_text('{"annotations": []}')
    return coco_masks(root, SHOWN, **settings)


def read_annotations(root, content):
    (root / "annotations.json").write_text(content)
    return annotated_images(root, SHOWN)


def read_xml(root, content, size=(40, 30)):
    write_xml(root / "val"), write_images(root / "images", size=size)
    (root / "val/ILSVRC2012_val_00000002.xml").write_text(content)
    return imagenet_boxes(root, SHOWN)[1]


def read_mask(root, pixels):
    write_pair(root)
    Image.fromarray(np.array(pixels, dtype=np.uint8)).save(root / "masks/a.png")
    return masked_images(root, SHOWN)[0]


def read_places(root, *places, exclude=(), splits=SPLITS):
    for place in places:
        draw_images(root / place, count=2, classes=(".",))
    if exclude:
        return unlabelled_images([str(root)], SHOWN, exclude=exclude)
    return ImageFolders(str(root), SHOWN, splits).setup("fit")


class Fewer(Numbers):
    """Labels go by the sorted folder names: a missing folder would shift them in silence."""

    classes = ["even"]


SEGMENTATIONS = [
    {"size": [30, 40], "counts": [7]},  # too few pixels
    {"size": [30, 40], "counts": [0.5, 1199.5]},
    {"size": [30, 40], "counts": [1300, -100]},
    {"size": [30, 40], "counts": "\u20ac"},
    {"size": [30, 40]},
    [[0, 0, 10, 0, 10]],
    [],
    [[0, 0, 10, 0, 10, float("nan")]],
    [[0, 0, 10, 0, 10, 1e9]],
    [[0, 0, 10, 0, 10, "5"]],
]
BOX = xml("n01440764", [(1, 2, 3, 4)])
XML = {
    "none": xml("n01440764", []),
    "cut": "<annotation>",
    "no side": BOX.replace("ymin", "y"),
    "order": xml("n01440764", [(9, 2, 3, 4)]),
    "size": xml("n01440764", [(1, 2, 3, 4)], (0, 0)),
    "two classes": xml("n01440764", [(1, 2, 3, 4)] * 2).replace("n01440764", "n01443537", 1),
}
ANNOTATIONS = ["{", "3", json.dumps([{"file": "a.png", "label": 1, "boxes_xyxy": [[1, 2]]}])]
REFUSED = {
    "an id without a class": (partial(read_ids, classes=["x", "y"]), "a.png"),
    "other classes than ImageNet's": (partial(read_ids, classes=["x", "y", "z"], imagenet=True), "got x, y, z"),
    "a damaged mask": (partial(read_ids, classes=["x", "y", "z"], content=b"no image"), "skip_corrupt"),
    "an unknown category": (partial(read_coco, category="lion"), "category"),
    "other annotations": (partial(read_coco, annotations="annotations/captions.json"), "captions.json"),
    **{f"segmentation {each}": (partial(read_coco, segmentation=each), "annotation 301") for each in SEGMENTATIONS},
    "no folder": (lambda root: image_folder(root / "nowhere", SHOWN), "nowhere"),
    "no classes": (lambda root: image_folder(root, SHOWN), "{root}"),
    "no images": (lambda root: unlabelled_images([str(root)], SHOWN), "{root}"),
    "no annotations": (lambda root: annotated_images(root, SHOWN), "annotations.json"),
    **{f"annotations {each}": (partial(read_annotations, content=each), "annotations.json") for each in ANNOTATIONS},
    "a crop above 1": (lambda root: ImageFiles([], [], SHOWN, crop_fraction=1.2), "crop_fraction"),
    "no image at all": (lambda root: spread(5, 0), "got 0"),
    **{f"boxes, {each}": (partial(read_xml, content=XML[each]), "2.xml") for each in XML},
    "boxes of a cat": (partial(read_xml, content=xml("cat", [(1, 2, 3, 4)])), "got cat"),
    "boxes of another size": (partial(read_xml, content=BOX, size=(16, 16)), "00000002.JPEG"),
    "a mask of several values": (partial(read_mask, pixels=[[0, 100, 127, 128, 200, 255]] * 4), "a.png"),
    "a mask of another size": (partial(read_mask, pixels=np.zeros((90, 60))), "a.png"),
    "boxes of a larger image": (
        lambda root: Boxes([[]], [(80, 60)]).mask(0, Crop((30, 40), SHOWN)),
        "40 × 30",
    ),
    "train/ alone": (lambda root: read_places(root, "train/cat"), "{root}"),
    "two images": (lambda root: read_places(root, "cat"), "{root}"),
    "two data sets": (lambda root: read_places(root, "imagenette/train/cat", "caltech/dog"), "{root}"),
    "an excluded folder": (lambda root: read_places(root, "cat", exclude=["cat", "owl"]), "exclude"),
    "a split without a folder": (lambda root: read_places(root, splits={"train": "gone"}), "gone"),
    "no such split": (lambda root: ImageFolders(str(root), SHOWN, {"train": "a"}).dataset("val"), "val"),
    "other classes in training": (lambda root: Images(Numbers, Fewer).setup("fit"), "odd"),
    "a domain that is not mixed": (lambda root: Digits(size=1, domain="plain", without="small"), "without"),
    "no domain of the mix": (lambda root: Digits(size=1, domain="mixed", without="spots"), "without"),
    "no name of torchvision": (lambda root: torchvision_images(root, "Mnist", "test", SHOWN), "data.name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_data_set_can_be_made_of_is_refused(case, tmp_path):
    call, named = REFUSED[case]
    with pytest.raises(InputError) as refused:
        call(tmp_path)
    assert named.format(root=tmp_path) in str(refused.value) and "\n" not in str(refused.value)
