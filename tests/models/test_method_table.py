"""The table of docs/how_to/target.md counts the methods that explain each converted model."""

import re

import pytest
from commands import ROOT
from library_models import converted

from explainers.masking import PatchGrid
from explainers.posthoc.names import method_names, methods_for

ROWS = re.findall(
    r"^\| ((?:torchvision|transformers) .+?) \| .+? \| (\d+) of (\d+) \|",
    (ROOT / "docs/how_to/target.md").read_text(),
    re.M,
)


def test_the_table_has_every_family():
    words = " ".join(name for name, *_ in ROWS)
    families = ("ViT", "ResNet", "Swin", "ConvNeXt", "DeiT", "DINOv2", "BEiT", "CLIP", "SigLIP")
    assert all(family in words for family in families)


@pytest.mark.parametrize(("name", "count", "of"), ROWS)
def test_the_table_counts_the_methods_that_explain_a_model(name, count, of):
    methods = methods_for(converted(name)[1], PatchGrid(32, 8, differs=True))
    assert (len(methods), len(method_names())) == (int(count), int(of))
