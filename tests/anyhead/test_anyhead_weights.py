"""What the module that learns vectors c_z starts from, reads and writes."""

from functools import partial

import pytest
import torch
from toys import VECTORS, batch_of, fit, step, training

from explainers.anyhead import AnyHead, CoalitionTeacher, PropagationTeacher
from explainers.learned.sources import complete

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")  # steps are taken without a trainer, too


@pytest.fixture(params=[PropagationTeacher, partial(CoalitionTeacher, pairs=3)], ids=["propagation", "coalitions"])
def teacher(request):
    return request.param


def test_the_first_step_sets_the_unit_and_no_later_one_does(target, grid, images, teacher, tmp_path):
    module = training(AnyHead(target, grid, VECTORS), teacher)
    unit = module.loss.unit(complete(batch_of(images[:4]), module.sources))  # of the first batch
    fit(module, images, epochs=2)
    torch.testing.assert_close(module.explainer.network.scale, unit)


def test_trained_weights_start_with_the_size_that_has_the_least_error(target, grid, images, teacher, tmp_path):
    """The teacher that they learned from may have given larger or smaller attributions."""
    module = training(AnyHead(target, grid, VECTORS), teacher)
    trained = fit(module, images, epochs=3).lightning_module.explainer
    rows = complete(batch_of(images), module.sources)

    def loss(size):
        return module.loss.compute(size * trained.predict(rows), rows).item()

    own = trained.network.scale.clone()
    for factor in (0.03, 1, 40):
        trained.network.scale.copy_(factor * own)
        again = AnyHead(target, grid, VECTORS, weights=str(trained.export(tmp_path)))
        going_on = training(again, teacher)
        step(going_on, rows)
        scale = again.network.scale.clone()
        size = (scale / trained.network.scale).item()
        assert loss(size) < min(loss(0.98 * size), loss(1.02 * size), loss(0))
        step(going_on, rows)
        assert torch.equal(again.network.scale, scale)


@torch.no_grad()
def test_the_same_weights_are_read_with_any_share_of_the_untrained_network_in_eval_mode(target, grid, images, tmp_path):
    network = partial(VECTORS, direct=[0, 1], paths="flow")
    trained = AnyHead(target, grid, network).eval()
    for parameter in trained.network.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    weights = str(trained.export(tmp_path))
    half, paths = (AnyHead(target, grid, network, weights=weights, blend=share) for share in (0.5, 1))
    learned, untrained = (explainer.decompose(images)[0] for explainer in (trained, paths))
    vectors = half.decompose(images)[0]
    torch.testing.assert_close(vectors, (learned + untrained) / 2, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(vectors, learned, rtol=1e-2)
    functionals = torch.randn(5, target.embed_dim)
    expected = (vectors @ functionals[..., None])[..., 0]
    torch.testing.assert_close(half.explain(images, functionals).flatten(1), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(half.train().decompose(images)[0], learned)
