import json
import re
import sys
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules.datasets import unlabelled_images
from datamodules.ffcv import FFCV
from datamodules.folders import ImageFolders, image_folder
from datamodules.ilsvrc import annotated_images
from datamodules.mura import mura
from explainers.errors import InputError
from explainers.images.transform import ImageTransform

SMALL = ImageTransform((8, 8))


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def write_folder(root, classes=("bird", "cat", "dog"), per_class=4, size=(40, 30)):
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            noise(*size, seed=100 * c + i).save(root / name / f"{i}.png")
    return root


def test_a_sample_is_a_resized_and_cropped_uint8_image(tmp_path):
    dataset = image_folder(write_folder(tmp_path), ImageTransform((14, 14), crop_pct=0.875, rounds=False))
    sample = dataset[5]
    resized = np.array(noise(40, 30, seed=101).resize((21, 16), Image.Resampling.BICUBIC))
    assert torch.equal(sample["image"], torch.from_numpy(resized[1:15, 3:17]).permute(2, 0, 1))
    assert sample["image"].dtype == torch.uint8 and sample["image"].is_contiguous()
    assert (sample["label"], sample["index"]) == (1, 5)
    assert dataset.classes == ["bird", "cat", "dog"] and "truth" not in sample


def test_the_truth_lies_on_the_object(tmp_path):
    """A white object on black: its pixels in the picture are those of its box."""
    picture = np.zeros((60, 90, 3), dtype=np.uint8)
    picture[12:36, 30:66] = 255
    Image.fromarray(picture).save(tmp_path / "a.png")
    entry = {"file": "a.png", "label": 7, "boxes_xyxy": [[30, 12, 50, 36], [48.7, 12, 66.2, 36]]}
    (tmp_path / "boxes.json").write_text(json.dumps([entry]))
    sample = annotated_images(tmp_path, ImageTransform((40, 40), crop_pct=0.8, rounds=False), "boxes.json")[0]
    assert sample["label"] == 7 and torch.equal(sample["image"][0] > 127, sample["truth"])


def test_unlabelled_images_are_found_in_all_folders(tmp_path):
    write_folder(tmp_path / "a"), write_folder(tmp_path / "b" / "deep", classes=("x",))
    (tmp_path / "b" / "notes.txt").write_text("not an image")
    (tmp_path / "a" / "cat" / "._1.png").write_bytes(b"what macOS notes of 1.png")
    dataset = unlabelled_images([str(tmp_path / "b"), str(tmp_path / "a")], SMALL)
    assert len(dataset) == 16 and set(dataset.labels.tolist()) == {-1} and dataset.classes == []
    assert dataset.path(0) == tmp_path / "b" / "deep" / "x" / "0.png"


def test_a_split_is_a_folder_below_the_root_and_two_splits_can_share_one(tmp_path):
    write_folder(tmp_path / "train"), write_folder(tmp_path / "val", per_class=2)
    splits = {"train": "train", "val": "val", "test": "val"}
    folders = partial(ImageFolders, str(tmp_path), SMALL, splits=splits)
    assert [len(folders().dataset(split)) for split in splits] == [12, 6, 6]
    assert [len(folders(limit={"train": 5, "test": 2}).dataset(split)) for split in splits] == [5, 6, 2]
    val, test = (folders(halve=True).dataset(split) for split in ("val", "test"))
    paths = [{data.path(i) for i in range(len(data))} for data in (val, test)]
    assert len(val) == len(test) == 3 and not paths[0] & paths[1]


def test_an_empty_class_folder_still_is_a_class(tmp_path):
    write_folder(tmp_path), (tmp_path / "ant").mkdir(), (tmp_path / ".cache").mkdir()
    dataset = image_folder(tmp_path, SMALL)
    assert dataset.classes == ["ant", "bird", "cat", "dog"] and dataset[0]["label"] == 1
    assert image_folder(write_folder(tmp_path / ".cache/one", classes=("all",)), SMALL).classes == ["all"]  # is enough


def test_each_real_folder_is_listed_once_however_many_links_lead_to_it(tmp_path):
    """A link to its own folder, to a folder above, and to a folder beside; a link to a folder elsewhere is followed."""
    root = write_folder(tmp_path / "data" / "train", classes=("bird", "cat"))
    write_folder(tmp_path / "elsewhere", classes=("dog",))
    (root / "cat" / "self").symlink_to(root / "cat")
    (root / "cat" / "up").symlink_to("../..")
    (root / "bird" / "loop").symlink_to(root)
    (root / "dog").symlink_to(tmp_path / "elsewhere" / "dog")
    dataset = image_folder(root, SMALL)
    assert dataset.classes == ["bird", "cat", "dog"]
    assert dataset.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert len({dataset.path(i) for i in range(12)}) == len({dataset.path(i).resolve() for i in range(12)}) == 12
    assert len(unlabelled_images([str(root)], SMALL)) == 12
    assert len(unlabelled_images([str(tmp_path)], SMALL)) == 12


LAYOUTS = {
    ("cat/0.png", "dog/0.png"): None,
    ("cat/0.png", "dog/"): r": no images of dog of 2 classes$",
    ("animals/cat/0.png", "cars/vw/0.png"): r"classes are its folders animals, cars; the folders cat, vw inside them",
    (
        "cat/0.png",
        ".git/1.png",
        "cat/.ipynb_checkpoints/0.png",
    ): r"left out: 2 files \(0.png, 1.png\) that lie in",
}


@pytest.mark.parametrize("files", LAYOUTS, ids=str)
def test_folders_that_are_hidden_empty_or_deeper_than_classes_are_said(files, tmp_path, recwarn):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        noise(8, 8).save(tmp_path / name) if name.endswith(".png") else (tmp_path / name).mkdir()
    images = image_folder(tmp_path, ImageTransform((8, 8)))
    assert images.classes == sorted({name.split("/")[0] for name in files if name[0] != "."})
    assert len(images) == sum(name.endswith(".png") and "." not in name[:-4] for name in files)
    messages = [str(each.message) for each in recwarn]
    assert len(messages) == (LAYOUTS[files] is not None) and all(re.search(LAYOUTS[files], each) for each in messages)


def test_a_missing_file_for_ffcv_is_named_before_ffcv_is_imported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ffcv", None)
    with pytest.raises(InputError, match=r"expected a .beton file .*none.beton, got none; write it: python -m"):
        FFCV(str(tmp_path / "none.beton"), transform=ImageTransform((8, 8))).setup("fit")


def test_the_images_of_mura_have_the_labels_of_their_studies(tmp_path):
    for study in ("XR_WRIST/patient2/study1_negative", "XR_HAND/patient7/study1_positive"):
        (tmp_path / "train" / study).mkdir(parents=True)
        noise(16, 16).convert("L").save(tmp_path / "train" / study / "image1.png")
        (tmp_path / "train" / study / "._image1.png").write_bytes(b"hidden")
    dataset = mura(tmp_path, "train", transform=SMALL)
    assert [dataset.path(i).parts[-4] for i in range(2)] == ["XR_HAND", "XR_WRIST"]
    assert dataset.classes == ["negative", "positive"] and dataset.labels.tolist() == [1, 0]
