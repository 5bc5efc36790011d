"""Models and blocks whose inside is not known are refused in one line, which names them."""

import pytest
from references_attention import SWIN
from refusals import check_refused

from explainers.posthoc import StagePaths
from explainers.transformer.direct_paths import record_direct
from explainers.transformer.path_flow import record_flow
from explainers.transformer.recording import record_pass


@pytest.fixture
def record(make_target):
    """Records a pass through no image, or as many as are given."""

    def run(recorder, *blocks, name="vit_tiny_patch16_224", images=(), **arguments):
        target = make_target(name, **arguments)
        with recorder(target, *blocks):
            for each in images:
                target.embed(target.normalise(each))

    return run


DISTILLED = "deit_tiny_distilled_patch16_224"
REFUSED = [
    ("[2]", lambda record: record(record_direct, [2])),
    ("[1, 0]", lambda record: record(record_direct, [1, 0])),
    ("swin", lambda record: record(record_direct, [0], name=SWIN[0], **SWIN[1])),
    (DISTILLED, lambda record: record(record_direct, [0], name=DISTILLED)),
    ("0 blocks", lambda record: record(record_direct, [0])),
    ("got [0]", lambda record: record(record_flow, [0])),
    ("got []", lambda record: record(record_flow, [])),
    (DISTILLED, lambda record: record(record_flow, [1], name=DISTILLED)),
    ("0 blocks", lambda record: record(record_pass)),
    ("4 blocks", lambda record, images: record(record_pass, images=[images, images])),
    ("test_resnet", lambda record: record(record_pass, name="test_resnet")),
    ("test_vit", lambda make_target: StagePaths(target := make_target("test_vit"), target.grid)),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_is_not_known_is_refused(told, call, request):
    check_refused(request, told, call)
