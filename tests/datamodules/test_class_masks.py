"""Masks with ids of classes, COCO's instances and ImageNet-Segmentation: what is planted comes out where it is."""

import json

import numpy as np
import pytest
import references_localization as slow
import torch
from PIL import Image

from datamodules.coco import coco_masks, draw, fill, run_lengths
from datamodules.ilsvrc import annotated_images
from datamodules.masks import class_masks, read_ids
from explainers.errors import InputError
from explainers.images.transform import ImageTransform

WNIDS = ("n01440764", "n01443537", "n15075141")


def write_ids(root, name, ids, mode="RGB", images="images", masks="masks"):
    """An image whose red channel is the ids, and their mask."""
    ids = np.asarray(ids)
    for folder in (images, masks):
        (root / folder / name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.stack([ids % 256] * 3, -1).astype(np.uint8)).save(root / images / f"{name}.bmp")
    if mode == "RGB":
        mask = Image.fromarray(np.stack([ids % 256, ids // 256, 0 * ids], -1).astype(np.uint8))
    else:
        mask = Image.fromarray(ids.astype(np.uint16 if mode == "I;16" else np.uint8))
        mask.putpalette(list(range(256)) * 3) if mode == "P" else None
    mask.save(root / masks / f"{name}.png")
    return mask


def regions(*parts, size=40):
    """Ids by columns: (id, number of columns), ..."""
    row = np.repeat([number for number, _ in parts], [columns for _, columns in parts])
    return np.tile(row, (size, 1))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "I;16"])
def test_ids_are_those_of_the_pixels(tmp_path, mode):
    ids = regions((0, 5), (2, 15), (200, 10), (919 if mode in ("RGB", "I;16") else 7, 10))
    assert write_ids(tmp_path, "a", ids, mode).mode == mode
    assert np.array_equal(read_ids(tmp_path / "masks" / "a.png"), ids)


def test_the_class_with_the_largest_area_is_the_label_and_its_pixels_are_the_truth(tmp_path):
    write_ids(tmp_path, "cat/1", regions((0, 20), (3, 8), (1, 12)))
    write_ids(tmp_path, "cat/2", regions((255, 30), (2, 10)))
    (tmp_path / "images" / "ant").mkdir(), (tmp_path / "images" / "dog").mkdir()
    dataset = class_masks(tmp_path, ImageTransform((20, 20)), ignored=[255])
    assert dataset.classes == ["ant", "cat", "dog"] and dataset.labels.tolist() == [0, 1]
    for i, columns in enumerate((range(14, 20), range(15, 20))):
        expected = torch.zeros(20, 20, dtype=torch.bool)
        expected[:, columns] = True
        assert torch.equal(dataset[i]["truth"], expected)


def test_areas_are_those_of_the_crop(tmp_path):
    write_ids(tmp_path, "a", np.tile(np.repeat([1, 2, 1], [30, 40, 30]), (40, 1)))  # the crop shows the middle alone
    dataset = class_masks(tmp_path, classes=["x", "y"], transform=ImageTransform((20, 20)))
    assert dataset.labels.tolist() == [1] and dataset[0]["truth"].all()


def test_imagenet_s_has_the_labels_of_imagenet_and_leaves_out_small_objects(tmp_path):
    """As published: folders by class, R + 256 · G, 1000 where it is ignored."""
    layout = {"images": "validation", "masks": "validation-segmentation"}
    write_ids(tmp_path, f"{WNIDS[0]}/a", regions((0, 4), (1000, 30), (3, 6)), **layout)
    write_ids(tmp_path, f"{WNIDS[1]}/b", regions((0, 39), (2, 1)), **layout)  # 2.5 %
    write_ids(tmp_path, f"{WNIDS[2]}/c", regions((0, 38), (2, 2)), **layout)  # 5 %
    with pytest.warns(UserWarning, match=r"left out: 1 file \(b.bmp\) without a class on 5 % of the sample$"):
        dataset = class_masks(tmp_path, ImageTransform((40, 40)), **layout, ignored=[1000], imagenet=True)
    assert dataset.labels.tolist() == [999, 1] and len(dataset.classes) == 1000
    assert torch.equal(dataset[0]["truth"], torch.from_numpy(regions((0, 34), (1, 6)) == 1))
    before = dataset.fingerprint()
    write_ids(tmp_path, f"{WNIDS[0]}/a", regions((0, 4), (1000, 30), (2, 6)), **layout)
    with pytest.warns(UserWarning, match="left out"):
        after = class_masks(tmp_path, ImageTransform((40, 40)), **layout, ignored=[1000], imagenet=True).fingerprint()
    assert before["label"] != after["label"] and before["truth"] != after["truth"]


def write_coco(root, annotations, size=(40, 30)):
    (root / "val2017").mkdir(exist_ok=True), (root / "annotations").mkdir(exist_ok=True)
    images = [{"id": i, "file_name": f"{i:012d}.jpg", "width": size[0], "height": size[1]} for i in (7, 3)]
    for row in images:
        Image.new("RGB", size).save(root / "val2017" / row["file_name"])
    categories = [{"id": 90, "name": "zebra"}, {"id": 1, "name": "elephant"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "annotations" / "instances_val2017.json").write_text(json.dumps(content))
    return root


def instance(image, category, segmentation, area):
    number = 100 * image + category
    return {"id": number, "image_id": image, "category_id": category, "segmentation": segmentation, "area": area}


LEFT, UPPER = [[0, 0, 10, 0, 10, 30, 0, 30]], [[0, 0, 40, 0, 40, 5, 0, 5]]
RIGHT = {"size": [30, 40], "counts": [20 * 30, 20 * 30]}  # column by column
BOTH = [instance(3, 90, LEFT, 300), instance(3, 1, UPPER, 200), instance(3, 90, RIGHT, 600), instance(7, 1, LEFT, 300)]


def test_the_instances_of_the_largest_category_are_the_truth(tmp_path):
    dataset = coco_masks(write_coco(tmp_path, BOTH), ImageTransform((30, 30)), labelled=True)
    assert dataset.classes == ["elephant", "zebra"] and dataset.labels.tolist() == [1, 0]
    columns = [dataset[i]["truth"].all(0).nonzero().flatten().tolist() for i in range(2)]  # the crop starts at column 5
    assert columns == [[*range(5), *range(15, 30)], [*range(5)]]
    assert coco_masks(tmp_path, ImageTransform((30, 30))).labels.tolist() == [-1, -1]


@pytest.mark.parametrize("name", ["../secret.jpg", "{elsewhere}/secret.jpg", "link.jpg", "folder/secret.jpg", "\0.jpg"])
def test_files_outside_the_folder_of_a_data_set_are_refused(tmp_path, name):
    Image.new("RGB", (40, 30)).save(tmp_path / "secret.jpg")
    root = tmp_path / "root" / "val2017"
    root.mkdir(parents=True), write_coco(root.parent, BOTH)
    (root / "link.jpg").symlink_to(tmp_path / "secret.jpg"), (root / "folder").symlink_to(tmp_path)
    name = name.format(elsewhere=tmp_path)
    file = root.parent / "annotations" / "instances_val2017.json"
    file.write_text(file.read_text().replace("000000000003.jpg", json.dumps(name)[1:-1]))
    with pytest.raises(InputError, match=r"instances_val2017.json: expected files below .*, got .*jpg, which is"):
        coco_masks(root.parent, ImageTransform((30, 30)))
    (root / "annotations.json").write_text(json.dumps([{"file": name, "label": 0, "boxes_xyxy": []}]))
    with pytest.raises(InputError, match=r"annotations.json: expected files below .*, got .*jpg, which is"):
        annotated_images(root, ImageTransform((30, 30)))
    (tmp_path / "linked").symlink_to(root)  # a link to the whole data set is the user's own
    (root / "annotations.json").write_text('[{"file": "000000000003.jpg", "label": 0, "boxes_xyxy": []}]')
    assert len(annotated_images(tmp_path / "linked", ImageTransform((30, 30)))) == 1


def test_polygons_are_filled_as_cocos_tools_fill_them():
    """Masks of pycocotools 2.0.11 (decode(merge(frPyObjects(polygons, rows, columns))))."""
    assert draw([[5, 5, 15, 5, 15, 15, 5, 15]], (30, 30)).nonzero()[0].tolist() == sorted([*range(5, 15)] * 10)
    polygons = [[1.3, 0.6, 7.9, 2.2, 5.5, 6.8, 2.0, 5.1], [8, 7, 12.5, 9, 9, -1.4], [0, 7, 0, 7, 3, 7.4, 3, 8]]
    shown = ["".join(".#"[value] for value in row) for row in draw(polygons, (8, 11)).astype(int)]
    assert shown == [
        ".........#.",
        "..###....#.",
        "..######.#.",
        "..#####.###",
        "..#####.###",
        "...###..###",
        ".....#..###",
        "..#......##",
    ]
    generator = np.random.default_rng(0)
    for _ in range(20):
        corners = (generator.random((5, 2)) * 20 - 4).round(1)
        assert np.array_equal(fill(corners, (12, 10)), slow.filled(corners.tolist(), 12, 10))


def encoded(numbers):
    """COCO's text, number by number: 5 bits a character until sign and value are said."""
    text = ""
    for i, number in enumerate(numbers):
        rest = number - (numbers[i - 2] if i > 2 else 0)
        while True:
            digit, rest = rest & 31, rest >> 5
            more = rest != (-1 if digit & 16 else 0)
            text += chr(digit + 32 * more + 48)
            if not more:
                break
    return text


def test_compressed_run_lengths_are_the_numbers_that_were_written():
    generator = np.random.default_rng(0)
    for most in (3, 40, 5000, 10**6):
        numbers = generator.integers(0, most, 50).tolist()
        assert run_lengths(encoded(numbers)) == numbers
    mask = draw({"size": [30, 40], "counts": encoded(RIGHT["counts"])}, (30, 40))
    assert np.array_equal(mask, draw(RIGHT, (30, 40))) and mask[:, 20:].all() and not mask[:, :20].any()
