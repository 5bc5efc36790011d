"""Methods that read attention, against versions for one image that compute all matrices in full."""

import pytest
import references_attention as slow
import torch
from references_attention import MODELS, SWIN, agree

from explainers.errors import InputError
from explainers.posthoc import attention as methods
from explainers.posthoc.layerwise import PLUS, Rollout

CLASSES = torch.tensor([0, 1, 2, 3, 4])
CLASSLESS = {"RawAttention", "AttentionRollout"}
SPECIFIC = ["AttentionGradCAM", "GenAtt", "GAE", "GradSAM", "PartialLRP", "TransformerAttribution", "TAM", "LeGrad"]
ALL = [*sorted(CLASSLESS), *SPECIFIC]
SIGNED = [name.replace("CAM", "CAM of both signs") for name in ALL]  # a positive part of random weights is often empty


def build(name, target, grid, **options):
    name, _, signed = name.partition(" of ")
    options |= {"relu": False} if signed else {"steps": 4} if name == "TAM" else {}
    return getattr(methods, name)(target, grid, **options)


@pytest.fixture(params=MODELS)
def model(request, make_target):
    name, arguments = MODELS[request.param]
    return make_target(name, **arguments)


def wanted_maps(target, image, label):
    """Compute every method's heatmap with full matrices; relevance only for models without SwiGLU."""
    seen = slow.walk(target, target.double().normalise(image[None])[0])
    maps = {
        "RawAttention": slow.raw_attention(seen),
        "AttentionRollout": slow.attention_rollout(seen),
        "AttentionGradCAM": slow.attention_grad_cam(seen, label),
        "AttentionGradCAM of both signs": slow.attention_grad_cam(seen, label, relu=False),
        "GenAtt": slow.on_patches(seen, slow.gen_att(seen, label)[-1]),
        "GAE": slow.gae(seen, label),
        "GradSAM": slow.grad_sam(seen, label),
        "TAM": slow.tam(target, target.normalise(image[None])[0], label, steps=4),
        "LeGrad": slow.le_grad(seen, label),
    }
    if hasattr(target.backbone.blocks[0].mlp, "fc1_x") or "eva" in target.name:
        return maps
    relevance = slow.lrp_of_attention(seen, label)
    return maps | {
        "PartialLRP": slow.partial_lrp(seen, relevance),
        "TransformerAttribution": slow.transformer_attribution(seen, label, relevance),
    }


def test_every_method_is_its_formula_in_double_precision(model, grid, images):
    model = model.double()
    with slow.in_double():
        for name, wanted in wanted_maps(model, images[1], label=3).items():
            found = build(name, model, grid)(images[1:2], torch.tensor([3]))[0]
            assert found.dtype == torch.double
            agree(found, wanted, 1e-8)


def test_transformer_attribution_from_its_second_layer_on(make_target, grid, images):
    target = make_target(depth=3).double()
    with slow.in_double():
        seen = slow.walk(target, target.normalise(images[:1])[0])
        relevance = slow.lrp_of_attention(seen, 2)
        wanted = slow.transformer_attribution(seen, 2, relevance, start=1)
        found = methods.TransformerAttribution(target, grid, start=1)(images[:1], torch.tensor([2]))[0]
        agree(found, wanted, 1e-8)
        everything = methods.TransformerAttribution(target, grid)(images[:1], torch.tensor([2]))[0]
        assert (everything - found).abs().max() > 1e-3 * found.abs().max()


def test_relevance_of_attention_is_half_of_what_its_product_with_the_values_gets(make_target, images):
    """Equations 9 and 10 for products: relevance 1 at each output of attention, half of the sum for A."""
    target = make_target(depth=1).double()
    with slow.in_double(), torch.no_grad():
        block = target.backbone.blocks[0]
        seen = slow.walk(target, target.normalise(images[:1])[0])
        of_weights, _ = slow.lrp_attention(block, seen.inputs[0], torch.ones_like(seen.inputs[0]))
        assert torch.allclose(of_weights.sum(), torch.tensor(seen.inputs[0].numel() / 2.0), rtol=1e-8)


@pytest.mark.parametrize("steps", [2, 7])
def test_tam_integrates_over_any_number_of_images(target, grid, images, steps):
    found = methods.TAM(target, grid, steps=steps)
    assert found.forward_passes == steps
    with slow.in_double():
        wanted = slow.tam(target, target.normalise(images[:1])[0], 1, steps)
    agree(found(images[:1], torch.tensor([1]))[0], wanted, 1e-4)


def test_gae_is_a_product_of_means_of_identity_and_attention(make_target, grid, images):
    """R ← R + T R gives 2^L times the product of (I + T) / 2, which SkipPLUS writes."""

    class Means(methods.GenAtt):
        identity, weight = 0.5, 0.5

    target = make_target(depth=3)
    product = Rollout(target, grid, Means)(images, CLASSES)
    torch.testing.assert_close(methods.GAE(target, grid)(images, CLASSES), 2**3 * product)


def test_grad_sam_is_plus_of_gen_att_and_the_sum_of_its_rows(make_target, grid, images):
    target = make_target(depth=3)
    found = methods.GradSAM(target, grid)(images, CLASSES)
    assert torch.equal(found, PLUS(target, grid, methods.GenAtt)(images, CLASSES))
    rows = [methods.GenAtt(target, grid, layer=layer)(images, CLASSES) for layer in range(3)]
    torch.testing.assert_close(found, sum(rows))


def test_the_attention_of_the_class_token_and_its_patches_sum_to_one(target, grid, images):
    with torch.no_grad():
        seen = slow.walk(target, target.normalise(images[:1])[0])
    on_itself = seen.attention[-1][:, 0, 0].mean()
    found = methods.RawAttention(target, grid)(images[:1], CLASSES[:1])
    assert found.sum().item() == pytest.approx(1 - on_itself.item(), abs=1e-5)


@pytest.mark.parametrize("family", ["distilled", "eva"])
@pytest.mark.parametrize("name", SIGNED)
def test_a_batch_is_its_images_alone_and_each_functional_is_itself_alone(make_target, grid, images, family, name):
    model = make_target(MODELS[family][0], **MODELS[family][1])
    if name == "TAM":
        images = images[:2]
    method, classes = build(name, model, grid), CLASSES[: len(images)]
    found = method(images, classes)
    assert found.shape == (len(images), 4, 4) and found.isfinite().all() and not found.requires_grad
    alone = [method(images[i : i + 1], classes[i : i + 1])[0] for i in range(len(images))]
    for i, heatmap in enumerate(alone):
        agree(found[i], heatmap, 1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(method(images.clone(), classes.clone()), found)
    functionals = torch.randn(2, 3, model.embed_dim, generator=torch.Generator().manual_seed(5))
    together = method.explain(images[:2], functionals)
    assert together.shape == (2, 3, 4, 4)
    for i in range(3):
        torch.testing.assert_close(together[:, i], method.explain(images[:2], functionals[:, i]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SPECIFIC)
def test_the_probability_is_explained_too(target, grid, images, name):
    found = build(name, target, grid, output="probability")(images[:2], CLASSES[:2])
    assert found.isfinite().all() and not torch.allclose(found, build(name, target, grid)(images[:2], CLASSES[:2]))


@pytest.mark.parametrize("name", ALL)
def test_windows_and_attention_pooling_are_refused_before_anything_runs(make_target, grid, name):
    swin, arguments = SWIN
    with pytest.raises(InputError, match="global attention"):
        build(name, make_target(swin, **arguments), grid)
    with pytest.raises(InputError, match="pooling 'map'"):
        build(name, make_target(global_pool="map", class_token=False), grid)
