"""What the trainings of all learned explainers share: rows of an image, steps, gradients, and weights as files."""

from functools import partial

import pytest
import torch
from torch import nn
from toys import LIGHT, PAPER, VECTORS, batch_of, equal, fit, state, step, training

from explainers.anyhead import AnyHead, AnyHeadNetwork, CoalitionTeacher, PropagationTeacher
from explainers.learned.sources import Features, complete
from explainers.shapley import FastSHAPNetwork, LightShapleyNetwork, Shapley, ShapleyLoss, ViTShapleyNetwork
from explainers.shapley.coalition_values import CoalitionValues
from explainers.tve import TVE, LightNetwork, PaperNetwork, TVELoss

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")  # steps are taken without a trainer, too

SHAPLEY = partial(LightShapleyNetwork, blocks=[0, 1], width=12, depth=1)
LEARNED = {
    "TVE": (partial(TVE, network=LIGHT), partial(TVELoss, patches_per_image=4)),
    "propagation": (partial(AnyHead, network=VECTORS), PropagationTeacher),
    "coalitions": (partial(AnyHead, network=VECTORS), partial(CoalitionTeacher, pairs=3)),
    "Shapley": (partial(Shapley, network=SHAPLEY), partial(ShapleyLoss, coalitions=4)),
}
OF_ANY_HEAD = ["TVE", "propagation", "coalitions"]
"""They explain heads that they were not trained for."""


@pytest.fixture
def build(request):
    explainer, loss = LEARNED[request.param]
    return lambda target, grid, **settings: training(explainer(target, grid), loss, **settings)


def of(names):
    return pytest.mark.parametrize("build", names, indirect=True)


SOURCES = {
    "features": lambda target, grid, **_: Features(target, [0, 1]),
    "meta-attributions": partial(TVELoss, hops=(0, 1), patches_per_image=4),
    "attributions": partial(PropagationTeacher, functionals=["predicted", "other", "mixture", "isotropic"]),
    "values": partial(CoalitionValues, count=3),
    **{
        fit: partial(CoalitionTeacher, pairs=4, fit=fit, removals=["zero", "black"])
        for fit in ("regions", "uniform", "mixed", "shapley")
    },
}


@pytest.mark.parametrize("name", SOURCES)
def test_rows_of_an_image_are_its_own_and_drawn_anew_in_every_epoch_and_for_every_seed(target, grid, images, name):
    source, batch = SOURCES[name], batch_of(images, first=70)
    together = source(target, grid)(batch, epoch=2)
    in_parts = source(target, grid, chunk_size=3)(batch, epoch=2)
    alone = source(target, grid)(batch_of(images[3:4], first=73), epoch=2)
    assert together.keys() == set(source(target, grid).provides)
    for row, value in together.items():
        assert not value.requires_grad
        torch.testing.assert_close(in_parts[row], value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alone[row][0], value[3], rtol=1e-4, atol=1e-5)
    for other in (source(target, grid)(batch, epoch=3), source(target, grid, seed=1)(batch, epoch=2)):
        same = [torch.allclose(other[row], together[row]) for row in together if row not in ("blank", "null", "grand")]
        assert not any(same) if name != "features" else all(same)


@torch.no_grad()
@of(LEARNED)
def test_a_step_on_stored_rows_is_the_step_on_images_and_these_are_not_cropped(build, target, grid, images):
    plain, cropping = (build(target, grid, min_crop=crop).eval() for crop in (None, 0.3))
    cropping.explainer.network.load_state_dict(plain.explainer.network.state_dict())
    plain.initialised = cropping.initialised = True
    seen = complete(batch_of(images), plain.sources)
    stored = {name: row for name, row in seen.items() if name != "image"}
    loss = step(plain, batch_of(images))
    torch.testing.assert_close(step(plain, stored), loss)
    assert not torch.allclose(step(cropping, batch_of(images)), loss)


SWIN = {"img_size": 32, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
TARGETS = {
    "vit": ("vit_tiny_patch16_224", {}),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
    "cnn": ("test_resnet", {}),
}
SMALL = {"width": 12, "heads": 2, "head_width": 4}
NETWORKS = [
    *(("swin", AnyHead, partial(AnyHeadNetwork, blocks=[0, 1], **SMALL)),),
    *(("cnn", AnyHead, partial(AnyHeadNetwork, blocks=[1, 2, 4], **SMALL)),),
    *(("vit", AnyHead, partial(VECTORS, direct=[0, 1], paths=paths)) for paths in ("direct", "flow")),
    *(("vit", TVE, LIGHT), ("cnn", TVE, partial(LightNetwork, blocks=[1, 2, 4], width=12))),
    *(("vit", TVE, partial(PaperNetwork, **PAPER, shared_trunk=new, token_mixing=new)) for new in (False, True)),
    *(("vit", Shapley, partial(ViTShapleyNetwork, freeze=freeze)) for freeze in (False, True)),
    *(("vit", Shapley, partial(FastSHAPNetwork, backbone="test_convnext")), ("vit", Shapley, SHAPLEY)),
]


@pytest.mark.parametrize(("name", "kind", "network"), NETWORKS)
def test_every_weight_that_is_trained_gets_a_gradient(make_target, grid, images, name, kind, network):
    """Distributed training would wait for the others for ever."""
    target = make_target(TARGETS[name][0], **TARGETS[name][1])
    module = training(kind(target, grid, network))
    rows = complete(batch_of(images), module.sources)
    module.loss.compute(module.explainer.predict(rows), rows).backward()
    trained = {name: weight for name, weight in module.explainer.network.named_parameters() if weight.requires_grad}
    assert trained and [name for name, weight in trained.items() if weight.grad is None] == []


@pytest.mark.slow
@pytest.mark.parametrize(("build", "lr"), zip(OF_ANY_HEAD, (2e-2, 3e-3, 3e-3), strict=True), indirect=["build"])
def test_training_lowers_the_loss_and_leaves_the_target_as_it_was(build, lr, make_target, grid, images):
    target = make_target(drop_path_rate=0.5, proj_drop_rate=0.2)
    before = state(target)
    torch.manual_seed(0)  # of the network's weights
    module = build(target, grid, optimizer=partial(torch.optim.Adam, lr=lr))
    seen = complete(batch_of(images), module.sources, epoch=1000)  # other draws than those of the training
    if "scale" in dict(module.explainer.network.named_buffers()) and hasattr(module.loss, "unit"):
        module.explainer.network.scale.copy_(module.loss.unit(seen))
    start = module.loss.compute(module.explainer.predict(seen), seen).item()
    fit(module, images, epochs=8)
    assert module.loss.compute(module.explainer.predict(seen), seen) < 0.9 * start
    assert equal(state(target), before) and not any(module.training for module in target.modules())
    assert all(weight.grad is None for weight in target.parameters())


@of(OF_ANY_HEAD)
def test_exported_weights_explain_as_before_and_serve_another_head(build, make_target, grid, images, tmp_path):
    module = build(make_target(), grid)
    fit(module, images, epochs=1)
    explainer = module.explainer
    path = explainer.export(tmp_path)
    assert path == tmp_path / "explainer.safetensors"
    kind, network = type(explainer), {TVE: LIGHT, AnyHead: VECTORS}[type(explainer)]
    again = kind(explainer.target, grid, network, weights=str(path))  # loaded to explain: in eval mode
    assert torch.equal(again(images), explainer.eval()(images))
    other = make_target()
    other.head = nn.Linear(24, 2)
    of_task = kind(other, grid, network, weights=str(path)).eval()
    expected = explainer.explain_tasks(images, [other.head])[:, 0]
    torch.testing.assert_close(of_task(images), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
