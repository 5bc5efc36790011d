"""A folder of one's own images: with train/ and val/, or without."""

import pytest
from commands import draw_images

from datamodules.datasets import unlabelled_images
from datamodules.folders import ImageFolders
from datamodules.images import Images
from explainers.images.transform import ImageTransform

SPLITS = {"train": "train", "val": "val", "test": "val"}


def places(data, split):
    return [str(path.relative_to(path.parents[1])) for path in map(data.dataset(split).path, range(data.size(split)))]


def unlabelled(root):
    def build(**placed):
        return unlabelled_images(None, ImageTransform((8, 8)), **placed)

    return Images(build, build, root=str(root))


def test_of_a_folder_without_splits_every_tenth_image_is_held_out_and_a_line_says_so(tmp_path):
    draw_images(tmp_path, count=26)
    cats, dogs = ([f"{name}/{i}.jpg" for i in range(start, 26, 2)] for name, start in (("cat", 0), ("dog", 1)))
    files = sorted(cats) + sorted(dogs)
    for data in (ImageFolders(str(tmp_path), ImageTransform((8, 8)), SPLITS), unlabelled(tmp_path)):
        with pytest.warns(UserWarning, match=r"no train/ and val/: every tenth of its 26 images by name .* \(2\)$"):
            assert places(data, "val") == [files[9], files[19]]
        assert places(data, "train") == [file for file in files if file not in (files[9], files[19])]
    labelled = ImageFolders(str(tmp_path), ImageTransform((8, 8)), SPLITS)
    with pytest.warns(UserWarning, match="every tenth"):
        assert places(labelled, "test") == places(labelled, "val") and labelled.class_names("val") == ["cat", "dog"]
    assert labelled.dataset("val").labels.tolist() == [0, 1] and labelled.classes == ["cat", "dog"]


def test_a_folder_with_splits_is_read_as_it_is(tmp_path, recwarn):
    draw_images(tmp_path / "train"), draw_images(tmp_path / "val", count=2)
    for data in (ImageFolders(str(tmp_path), ImageTransform((8, 8)), SPLITS), unlabelled(tmp_path)):
        assert (data.size("train"), data.size("val")) == (6, 2)
    assert not recwarn.list
