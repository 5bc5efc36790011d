"""ILSVRC's own boxes, in all forms in which they are published, give the samples of annotations.json."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules.ilsvrc import annotated_images, imagenet_boxes
from explainers.images.transform import ImageTransform

WNIDS = {"n01440764": 0, "n01443537": 1, "n15075141": 999}
IMAGES = {
    "ILSVRC2012_val_00000001": ("n15075141", [(10, 4, 30, 20), (0, 0, 5, 5)]),
    "ILSVRC2012_val_00000002": ("n01440764", [(3, 3, 40, 30)]),
    "ILSVRC2012_val_00000003": ("n01443537", [(20, 10, 39, 29)]),
}


def write_images(folder, subfolders=False, size=(40, 30)):
    for number, (name, (wnid, _)) in enumerate(IMAGES.items()):
        path = folder / (f"{wnid}/" if subfolders else "") / f"{name}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(size).save(path)


def xml(wnid, boxes, size=(40, 30)):
    sides = "<xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax>"
    objects = "".join(f"<object><name>{wnid}</name><bndbox>{sides.format(*box)}</bndbox></object>" for box in boxes)
    return f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>{objects}</annotation>"


def write_xml(folder):
    folder.mkdir(parents=True)
    for name, (wnid, boxes) in IMAGES.items():
        (folder / f"{name}.xml").write_text(xml(wnid, boxes))


def write_csv(path):
    rows = [f"{name}," for name in IMAGES]
    for i, (wnid, boxes) in enumerate(IMAGES.values()):
        rows[i] += "".join(f"{wnid} {left} {top} {right} {bottom} " for left, top, right, bottom in boxes)
    path.write_text("\n".join(["ImageId,PredictionString", *reversed(rows)]) + "\n")


def by_annotations(root, images, **settings):
    rows = [
        {"file": f"{images}/{name}.JPEG", "label": WNIDS[wnid], "boxes_xyxy": boxes}
        for name, (wnid, boxes) in IMAGES.items()
    ]
    (root / "annotations.json").write_text(json.dumps(rows))
    return annotated_images(root, ImageTransform((16, 16)), **settings)


def same(first, second):
    assert len(first) == len(second) > 0
    for i in range(len(first)):
        one, other = first[i], second[i]
        assert one.keys() == other.keys() and (one["label"], one["index"]) == (other["label"], other["index"])
        assert torch.equal(one["image"], other["image"]) and torch.equal(one["truth"], other["truth"])
        assert one["truth"].any()


@pytest.mark.parametrize("form", ["xml beside images", "devkit", "kaggle", "csv", "wnid folders"])
def test_every_published_form_gives_the_same_samples(tmp_path, form):
    root = tmp_path / "root"
    folder = {"xml beside images": "images", "csv": "images", "wnid folders": "val", "devkit": "Data/CLS-LOC/val"}
    write_images(root / folder.get(form, "ILSVRC/Data/CLS-LOC/val"), subfolders=form == "wnid folders")
    if form in ("kaggle", "csv"):
        write_csv(root / "LOC_val_solution.csv")
    else:
        write_xml(root / ("val" if form == "xml beside images" else "Annotations/CLS-LOC/val"))
    dataset = imagenet_boxes(root, ImageTransform((16, 16)))
    write_images(tmp_path / "flat" / "images")
    same(dataset, by_annotations(tmp_path / "flat", "images"))
    assert len(dataset.classes) == 1000 and [dataset.classes[label] for _, label in WNIDS.items()] == list(WNIDS)


def test_xml_boxes_follow_an_image_that_was_stored_smaller(tmp_path):
    write_xml(tmp_path / "val"), write_images(tmp_path / "images", size=(20, 15))
    small = imagenet_boxes(tmp_path, ImageTransform((12, 12)))
    write_images(tmp_path / "images")
    large = imagenet_boxes(tmp_path, ImageTransform((12, 12)))
    assert all(torch.equal(small[i]["truth"], large[i]["truth"]) for i in range(3))


def test_what_has_no_other_half_is_counted_and_named(tmp_path):
    write_xml(tmp_path / "val"), write_images(tmp_path / "images")
    (tmp_path / "val" / "ILSVRC2012_val_00000002.xml").unlink()
    (tmp_path / "images" / "ILSVRC2012_val_00000003.JPEG").unlink()
    with pytest.warns(UserWarning, match="left out") as warned:
        assert len(imagenet_boxes(tmp_path, ImageTransform((16, 16)))) == 1
    assert [str(each.message) for each in warned] == [
        f"left out: 1 file (ILSVRC2012_val_00000002.JPEG) without boxes in {tmp_path}/val",
        f"left out: the boxes of 1 file (ILSVRC2012_val_00000003), which {tmp_path}/val names and no image has",
    ]
