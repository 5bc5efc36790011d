"""AttIN, GlobEnc and ALTI, against versions that hold every vector T_i(x_j)."""

import pytest
import references_attention as slow
import torch
from references_attention import MODELS, agree

from explainers import posthoc

CLASSES = torch.tensor([0, 1, 2, 3, 4])


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


def test_every_method_is_its_formula(model, grid, images):
    model = model.double()
    with slow.in_double():
        for name, wanted in wanted_maps(model, images[1]).items():
            agree(posthoc.build(name, model, grid)(images[1:2], CLASSES[:1])[0], wanted, 1e-8)


def test_alti_can_compare_with_the_output_of_the_block(model, grid, images):
    model = model.double()
    with slow.in_double():
        seen = slow.walk(model, model.normalise(images[:1])[0])
        for layer, matrix in enumerate(alti_matrices(seen, "block")):
            found = posthoc.ALTI(model, grid, layer=layer, sum_to="block")(images[:1], CLASSES[:1])[0]
            agree(found, slow.on_patches(seen, matrix), 1e-8)
