"""Methods by their names."""

from functools import partial

import pytest
import torch
from refusals import check_refused

from explainers import posthoc
from explainers.masking import PatchGrid
from explainers.posthoc import method_names

CLASSES = torch.tensor([3, 0, 4, 1, 1])


def test_every_method_of_the_room_has_a_name(target, grid):
    names = method_names()
    assert {"GAE", "TokenTM", "ViTCX", "DecompX", "RISE", "Chance"} <= set(names)
    assert not {"PLUS", "SkipPLUS", "Rollout", "build", "build_all"} & set(names)
    for name in set(names) - {"CAM", "StagePaths"}:  # which explain no class token
        assert type(posthoc.build(name, target, grid)) is getattr(posthoc, name)


def test_a_name_with_an_aggregation_is_the_composition(target, grid, images):
    for name, composed in {
        "DecompX-PLUS": posthoc.PLUS(target, grid, posthoc.DecompX),
        "DecompX-SkipPLUS": posthoc.SkipPLUS(target, grid, posthoc.DecompX),
        "ALTI-Rollout": posthoc.Rollout(target, grid, posthoc.ALTI),
        "GenAtt-Rollout": posthoc.GAE(target, grid),
        "LibraInputXGradient-PLUS": posthoc.PLUS(target, grid, posthoc.DecompX),
    }.items():
        found, expected = posthoc.build(name, target, grid)(images, CLASSES), composed(images, CLASSES)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_options_reach_the_method_and_its_label(target, grid, images):
    built = posthoc.build_all(["GAE", {"TokenTM": {"scale": "softmax"}}, {"ResLRP-PLUS": {"gamma": 0.5}}], target, grid)
    assert list(built) == ["GAE", "TokenTM(scale=softmax)", "ResLRP-PLUS(gamma=0.5)"]
    expected = posthoc.TokenTM(target, grid, scale="softmax")(images, CLASSES)
    assert torch.equal(built["TokenTM(scale=softmax)"](images, CLASSES), expected)
    assert not torch.equal(
        built["ResLRP-PLUS(gamma=0.5)"](images, CLASSES), posthoc.build("ResLRP-PLUS", target, grid)(images, CLASSES)
    )


def test_plus_and_rollout_start_at_any_layer(target, grid, images):
    built = posthoc.build_all([{"DecompX-PLUS": {"start": [0, -1], "output": "probability"}}], target, grid)
    assert list(built) == ["DecompX-PLUS(start=0, output=probability)", "DecompX-PLUS(start=-1, output=probability)"]
    of = partial(posthoc.DecompX, output="probability")
    expected = posthoc.PLUS(target, grid, of, start=-1)(images, CLASSES)
    assert torch.equal(built["DecompX-PLUS(start=-1, output=probability)"](images, CLASSES), expected)
    late, early = (posthoc.build("GenAtt-Rollout", target, grid, {"start": start}).start for start in (1, 0))
    assert (late, early) == (1, 0)


@pytest.fixture
def named(target, grid):
    """Builds a method by its name, with options."""
    return lambda name, **options: posthoc.build(name, target, grid, options)


HIERA = {"img_size": 64, "stages": (1, 1, 1), "q_pool": 2, "embed_dim": 12, "mask_unit_size": (4, 4)}
REFUSED = [
    ("TokenTM", lambda named: named("TokenTN")),  # what may be meant
    ("XGradCAM", lambda named: named("Nonsense")),  # all that there are
    ("SkipPLUS", lambda named: named("DecompX-Plus")),
    ("DecompX is not", lambda named: named("LibraDecompX")),
    ("RawAttention is not", lambda named: named("LibraRawAttention-PLUS")),
    ("RISE does not", lambda named: named("RISE-PLUS")),
    ("DecompX does not", lambda named: named("DecompX-Rollout")),
    ("masks, cells", lambda named: named("RISE", mask=1)),
    ("has no option layer", lambda named: named("DecompX-PLUS", layer=2)),
    ("has no option start", lambda named: named("DecompX-SkipPLUS", start=1)),
    ("-2 to 1", lambda named: named("DecompX-PLUS", start=2)),
    ("-5 to 4", lambda make_target, grid: posthoc.GradCAM(make_target("test_resnet"), grid, layer=5)),
    ("masks", lambda named: named("RISE", masks="many")),
    ("start", lambda named: named("DecompX-PLUS", start=0.5)),
    ("alpha", lambda named: named("LIME", alpha="low")),
    ("next_input", lambda named: named("AttIxG", next_input=1)),
    ("map", lambda make_target, grid: posthoc.GAE(make_target(global_pool="map", class_token=False), grid)),
    # Hiera sorts patches by windows
    ("square", lambda make_target: posthoc.GradCAM(make_target("hiera_tiny_224", **HIERA), PatchGrid(64, 4), layer=0)),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_does_not_exist_is_refused(told, call, request):
    check_refused(request, told, call)


def test_the_prefix_libra_changes_every_method_that_goes_back_through_the_model(target, grid, images):
    for name in ("XGradCAM", "GAE", "TokenTM", "AttCAT", "TAM", "TransformerAttribution", "FullGrad-PLUS"):
        libra, plain = (posthoc.build(prefix + name, target, grid)(images, CLASSES) for prefix in ("Libra", ""))
        assert not torch.allclose(libra, plain, rtol=0.01, atol=0)
