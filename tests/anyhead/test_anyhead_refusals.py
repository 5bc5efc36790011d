"""Settings of AnyHead, its network and its teachers that do not fit are refused in one line, which names them."""

import pytest
import torch
from refusals import check_refused
from toys import VECTORS

from explainers.anyhead import AnyHead, AnyHeadNetwork, CoalitionTeacher, PropagationTeacher
from explainers.anyhead.functionals import build_vocabulary

REFUSED = [
    ("temperature", lambda target, grid: AnyHead(target, grid, VECTORS, temperature=0)),
    ("blend", lambda target, grid: AnyHead(target, grid, VECTORS, blend=1.5)),
    ("[5, 24]", lambda anyhead, images: anyhead.explain(images, torch.randn(10, 24))),  # not two of each image
    ("blocks", lambda target, grid: AnyHeadNetwork(target, grid, [])),
    ("heads", lambda target, grid: AnyHeadNetwork(target, grid, [0], heads=0)),
    ("pairs", lambda target, grid: CoalitionTeacher(target, grid, pairs=0)),
    ("removal", lambda target, grid: CoalitionTeacher(target, grid, removals=[])),
    ("pairs=2", lambda target, grid: CoalitionTeacher(target, grid, pairs=2, removals=["zero", "black", "drop"])),
    ("removal=drop", lambda make_target, grid: CoalitionTeacher(make_target("test_resnet"), grid, removals=["drop"])),
    ("functionals=head", lambda make_target, grid: CoalitionTeacher(make_target(num_classes=0), grid)),
    ("vocabulary", lambda target, grid: CoalitionTeacher(target, grid, functionals="images", vocabulary=["a", "b"])),
    ("vocabulary", lambda: build_vocabulary(["a cat"])),
    ("words.txt", lambda: build_vocabulary("words.txt")),
    ("fit=ranking", lambda target, grid: CoalitionTeacher(target, grid, functionals="images", fit="ranking")),
    ("GAE", lambda target, grid: PropagationTeacher(target, grid, "GAE")),  # not linear in the functional
    ("RISE", lambda target, grid: PropagationTeacher(target, grid, "RISE")),  # no white-box method
    ("functionals", lambda target, grid: PropagationTeacher(target, grid, functionals=[])),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_does_not_fit_is_refused(told, call, request):
    check_refused(request, told, call)
