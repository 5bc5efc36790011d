"""AttIN, GlobEnc and ALTI, against versions that hold every vector T_i(x_j)."""

import pytest
import references_attention as slow
import torch
from references_attention import MODELS, agree

from explainers import posthoc
from explainers.posthoc.contributions import alti_contributions, contribution_norms
from explainers.transformer.blocks import value_paths
from explainers.transformer.recording import record_pass

CLASSES = torch.tensor([0, 1, 2, 3, 4])
ALL = ["AttIN", "AttIN-Rollout", "AttIN-PLUS", "GlobEnc", "ALTI", "GlobEnc-Rollout", "ALTI-Rollout", "GlobEnc-PLUS"]


@pytest.fixture(params=MODELS)
def model(request, make_target):
    name, arguments = MODELS[request.param]
    return make_target(name, **arguments)


def alti_matrices(seen, sum_to="attention"):
    totals = seen.middles if sum_to == "attention" else seen.outputs
    return [slow.alti(seen, layer, total.detach()) for layer, total in enumerate(totals)]


def wanted_maps(target, image):
    seen = slow.walk(target, target.double().normalise(image[None])[0])
    norms, distances = [slow.glob_enc(seen, layer) for layer in range(len(seen.inputs))], alti_matrices(seen)
    added = [slow.att_in(seen, layer) for layer in range(len(seen.inputs))]
    halves = [(torch.eye(len(each)) + each / each.sum(1, keepdim=True)) / 2 for each in added]
    return {
        "AttIN": slow.on_patches(seen, added[-1]),
        "AttIN-Rollout": slow.on_patches(seen, slow.product(halves)),
        "AttIN-PLUS": sum(slow.on_patches(seen, each) for each in added),
        "GlobEnc": slow.on_patches(seen, norms[-1]),
        "GlobEnc-Rollout": slow.on_patches(seen, slow.product(norms)),
        "GlobEnc-PLUS": sum(slow.on_patches(seen, each) for each in norms),
        "ALTI": slow.on_patches(seen, distances[-1]),
        "ALTI-Rollout": slow.on_patches(seen, slow.product(distances)),
    }


@pytest.mark.parametrize("tolerance", [1e-8, 1e-4], ids=["double", "single"])
def test_every_method_is_its_formula(model, grid, images, tolerance):
    model = model.double()
    with slow.in_double():
        wanted = wanted_maps(model, images[1])
        if tolerance == 1e-8:
            found = {name: posthoc.build(name, model, grid)(images[1:2], CLASSES[:1])[0] for name in ALL}
    if tolerance == 1e-4:
        found = {name: posthoc.build(name, model.float(), grid)(images[1:2], CLASSES[:1])[0] for name in ALL}
    for name in ALL:
        agree(found[name], wanted[name], tolerance)


def test_alti_can_compare_with_the_output_of_the_block(model, grid, images):
    model = model.double()
    with slow.in_double():
        seen = slow.walk(model, model.normalise(images[:1])[0])
        for layer, matrix in enumerate(alti_matrices(seen, "block")):
            found = posthoc.ALTI(model, grid, layer=layer, sum_to="block")(images[:1], CLASSES[:1])[0]
            agree(found, slow.on_patches(seen, matrix), 1e-8)


def test_parts_and_biases_sum_to_the_tokens_after_attention(model, images):
    with slow.in_double():
        seen = slow.walk(model, model.double().normalise(images[:1])[0])
        for layer, middle in enumerate(seen.middles):
            agree(slow.parts(seen, layer).sum(1) + seen.biases[layer], middle.detach(), 1e-10)


def test_the_library_knows_the_same_parts(model, images):
    model = model.double()
    with slow.in_double():
        normalised = model.normalise(images[:2])
        with record_pass(model, attention=True) as record:
            model.embed(normalised)
        for image in range(2):
            seen = slow.walk(model, normalised[image])
            for layer in range(len(seen.inputs)):
                agree(record.attention[layer][image].detach(), seen.attention[layer].detach(), 1e-10)
                agree(value_paths(model, record.values[layer], layer)[image], seen.paths[layer], 1e-10)
                agree(record.middles[layer][image].detach(), seen.middles[layer].detach(), 1e-10)


def test_norms_and_contributions_of_random_tensors():
    generator = torch.Generator().manual_seed(3)
    attention = torch.rand(2, 3, 5, 5, generator=generator).double().softmax(-1)
    paths = torch.randn(2, 3, 5, 4, generator=generator).double()
    tokens, output = torch.randn(2, 2, 5, 4, generator=generator).double()
    norms, contributions = (
        contribution_norms(attention, paths, tokens),
        alti_contributions(attention, paths, tokens, output),
    )
    for b in range(2):
        for i in range(5):
            parts = [sum(attention[b, h, i, j] * paths[b, h, j] for h in range(3)) for j in range(5)]
            parts[i] = parts[i] + tokens[b, i]
            agree(norms[b, i], torch.stack([part.norm() for part in parts]), 1e-10)
            near = [(output[b, i].abs().sum() - (output[b, i] - part).abs().sum()).clamp(min=0) for part in parts]
            agree(contributions[b, i], torch.stack(near) / sum(near), 1e-10)


def test_a_token_that_only_sees_itself_contributes_alone():
    attention, tokens = torch.eye(3).expand(1, 2, 3, 3), torch.randn(1, 3, 4)
    paths = torch.randn(1, 2, 3, 4)
    output = tokens + paths.sum(1)
    torch.testing.assert_close(alti_contributions(attention, paths, tokens, output), torch.eye(3)[None])
    expected = torch.diag_embed(output.norm(dim=-1))
    torch.testing.assert_close(contribution_norms(attention, paths, tokens), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["GlobEnc", "ALTI"])
def test_rows_of_all_layers_sum_to_one(model, grid, images, name):
    method = posthoc.build(name, model, grid)
    with record_pass(model, attention=True) as record:
        model.embed(model.normalise(images))
    matrices = method.transitions(record, None, 0)
    assert len(matrices) == len(record.inputs)
    for matrix in matrices:
        assert (matrix >= 0).all() and not matrix.requires_grad
        torch.testing.assert_close(matrix.sum(-1), torch.ones(matrix.shape[:-1]))
