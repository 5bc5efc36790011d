"""Methods by their names."""

from functools import partial

import pytest
import torch

from explainers import posthoc
from explainers.errors import InputError
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


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("TokenTN", {}, "did you mean TokenTM"),
        ("Nonsense", {}, "expected a method .*: there are ALTI, .*XGradCAM"),
        ("DecompX-Plus", {}, "expected one of the aggregations PLUS, SkipPLUS, Rollout, got Plus"),
        ("LibraDecompX", {}, "Libra needs a method of plain gradients of tokens, such as XGradCAM; DecompX is not one"),
        ("LibraRISE", {}, "Libra needs .*; RISE is not one"),
        ("LibraRawAttention-PLUS", {}, "Libra needs .*; RawAttention is not one"),
        ("GAE", {"output": "prob"}, "expected output logit, probability or log_odds, got prob"),
        ("DecompX-PLUS", {"layer": 2}, "DecompX-PLUS has no option layer; it has output, start"),
        ("DecompX-PLUS", {"start": 2}, "expected a layer from -2 to 1 of vit_tiny_patch16_224, got 2"),
        ("DecompX-SkipPLUS", {"start": 1}, "DecompX-SkipPLUS has no option start; it has output"),
        ("RISE", {"masks": "many"}, "expected masks of type int, got 'many'"),
        ("DecompX-PLUS", {"start": 0.5}, r"expected start of type int \| None, got 0.5"),
        ("LIME", {"alpha": "low"}, r"expected alpha of type float \| None, got 'low'"),
        ("AttIxG", {"next_input": 1}, "expected next_input of type bool, got 1"),
        ("RISE-PLUS", {}, "PLUS needs a method that gives a map for each layer, such as DecompX; RISE does not"),
        ("DecompX-Rollout", {}, "Rollout needs a method that gives a matrix .* such as GenAtt; DecompX does not"),
        ("RISE", {"mask": 1}, "RISE has no option mask; it has masks, cells"),
    ],
)
def test_what_does_not_exist_is_refused(target, grid, method, options, message):
    with pytest.raises(InputError, match=message):
        posthoc.build(method, target, grid, options)


def test_the_prefix_libra_changes_every_method_that_goes_back_through_the_model(target, grid, images):
    for name in ("XGradCAM", "GAE", "TokenTM", "AttCAT", "TAM", "TransformerAttribution", "FullGrad-PLUS"):
        libra, plain = (posthoc.build(prefix + name, target, grid)(images, CLASSES) for prefix in ("Libra", ""))
        assert not torch.allclose(libra, plain, rtol=0.01, atol=0)
