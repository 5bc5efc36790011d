"""experiment=papers/grad_eclip: a small CLIP with random weights, and the classes of ImageNet."""

import json
import math

import pytest
from clips import IMAGE
from commands import NO_FIGURES, QUIET, draw_images, evaluate

WNIDS = ("n01440764", "n02123045")


SMALL = (
    *("target.model.pretrained=false", *(f"++target.model.{key}={value}" for key, value in IMAGE.items())),
    *("target.head.text_head={_target_:clips.small_text_head,_partial_:true}", "target.head.templates=['a {}']"),
)
METHODS = ["chance", "GradECLIP", "MaskCLIP", "NACLIP", "DirectPaths", "LeGrad", "GAE", "DecompX-PLUS"]


@pytest.mark.slow
def test_every_method_explains_a_zero_shot_classifier_of_imagenet(tmp_path):
    root = draw_images(tmp_path / "data/imagenet_val", count=3, classes=WNIDS)
    boxes = [
        {"file": path.relative_to(root).as_posix(), "label": label, "boxes_xyxy": [[10, 10, 50, 60]]}
        for label, path in zip((0, 0, 281), sorted(root.rglob("*.jpg")), strict=True)
    ]
    (root / "annotations.json").write_text(json.dumps(boxes))
    evaluate(
        *("experiment=papers/grad_eclip", *SMALL, *QUIET, *NO_FIGURES),
        *(f"data_dir={tmp_path / 'data'}", "tasks.imagenet_val.data.num_workers=0"),
        folder=tmp_path / "run",
    )
    written = json.loads((tmp_path / "run/results.json").read_text())
    rows = written["results"]["imagenet_val"]
    assert [*rows] == METHODS
    for row in rows.values():
        curve, wider = (row[f"deletion_accuracy{top}_curve"] for top in ("", "_10"))
        assert all(one <= other for one, other in zip(curve, wider, strict=True))
        assert row["sparsity"] == pytest.approx([level / 20 for level in range(11)], abs=1e-3)
        assert math.isfinite(row["insertion_accuracy_5"]) and math.isfinite(row["mean_iou"])
    identity = written["identity"]["imagenet_val"]
    assert identity["num_classes"] == 1000 and identity["until"] == 0.5
