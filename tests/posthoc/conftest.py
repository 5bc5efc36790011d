"""Small ViTs of all kinds, in double precision, whose heatmaps are compared with slow references."""

import pytest
import references_propagation as references

VITS = {
    "scaled": ("vit_tiny_patch16_224", {"init_values": 0.5, "depth": 3}),  # the middle of 3 layers is 2
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "average": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
}


@pytest.fixture(params=VITS)
def double(request, make_target):
    name, arguments = VITS[request.param]
    return references.in_double(make_target(name, **arguments))
