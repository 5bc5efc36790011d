"""Ways to hold a model: what is handed in is explained, or refused in one line; the caller's model stays as it is."""

import contextlib
import copy
import io
import re
from functools import partial

import pytest
import timm
import torch
from conftest import timm_model, wake
from held import Net, Trained, call, convnet
from library_models import converted
from test_wrappers import adapt
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as modules
from torch.nn.utils import prune, weight_norm

import explainers
from explainers import posthoc
from explainers.app.choosing import choose, print_once
from explainers.errors import InputError
from explainers.models import TargetModel, as_target
from explainers.saved.identity import find_changes, weights_hash

CNN = {"mean": 0.5, "std": 0.25, "image_size": 32}
LIBRARY = {"image_size": 32}


def vit(**settings):
    return copy.deepcopy(timm_model(**settings))


def change(function, **settings):
    """A ViT that a function changed in place."""
    model = vit(**settings)
    function(model)
    return model


def flip(logits):
    return logits.flip(1)


def held_by(read, *more, base=VisionTransformer):
    """A ViT of a class with its own forward, which computes `read` of the usual logits."""

    class Own(base):
        def forward(self, images):
            return read(super().forward(images))

    model = vit(**dict(more))
    model.__class__ = Own
    return model


def hook(model, function, part="", pre=False, **settings):
    """Register a forward hook, or a pre-hook."""
    layer = model.get_submodule(part)
    (layer.register_forward_pre_hook if pre else layer.register_forward_hook)(function, **settings)


def replace_closure(model):
    before = model.forward
    model.forward = lambda images: flip(before(images))
    return model


def replace_features(model):
    before = model.forward_features
    model.forward_features = lambda images: 2 * before(images.flip(-1))


def is_photo(images):
    """Whether an image is finer than the probes."""
    return (images[..., 1:] - images[..., :-1]).abs().mean() > 0.6


def replace_on_photos(model):
    before = model.forward
    model.forward = lambda images: flip(before(images)) if is_photo(images) else before(images)


def keep(model):
    hook(model, lambda layer, _, output: setattr(layer, "kept", output), "blocks.1")
    model(torch.randn(1, 3, 32, 32))


class KeepsFeatures(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.net, self.head, self.maps = convnet()[:-1], norm(nn.Linear(16, 5)), {}

    def forward(self, images):
        self.maps["last"] = self.net(images)
        return self.head(self.maps["last"])


def used(model):
    model(torch.randn(2, 3, 32, 32))
    return model.eval()


class Called(VisionTransformer):
    def __call__(self, images):
        return flip(super().__call__(images))


class MultiCrop(nn.Module):
    """DINO's wrapper: crops of several sizes, or one batch."""

    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, crops):
        crops = crops if isinstance(crops, list) else [crops]
        return self.head(torch.cat([self.backbone(each) for each in crops]))


class Itself(nn.Sequential):
    def __deepcopy__(self, memo):
        return self


class Nothing(nn.Sequential):
    def __deepcopy__(self, memo):
        return None


class Noise(nn.Module):
    def forward(self, values):
        return F.dropout(values, 0.5, training=True)


def everywhere(model):
    modules.register_module_forward_hook(lambda *call: None)
    return model


def inference():
    with torch.inference_mode():
        return vit()


def compiled(model):
    model.forward = torch.compile(model.forward, backend="eager")


def random_timm(name, **settings):
    model = wake(timm.create_model(name, num_classes=5, **settings)).eval()
    model(torch.randn(1, 3, 64, 64))
    return model


def hooked(model, *arguments, **settings):
    hook(model, *arguments, **settings)
    return model


LEVIT = {"img_size": 64, "embed_dim": (16, 24, 32), "num_heads": (1, 1, 2), "depth": (1, 1, 1), "key_dim": 8}
EFFICIENT = {"img_size": 64, "embed_dim": (16, 32, 48), "num_heads": (1, 2, 3), "depth": (1, 1, 1)}
SIZE = {"image_size": 64}
STAYS = "stays as it is, because"
SEVERAL = f"{STAYS} it has several layers from embeddings to logits"
DIFFERS = f"{STAYS} its own outputs differ by"
KEPT = "its hooks change its outputs; they stay, and run on every pass"
LEFT = "its hooks change no outputs of probe images; they are left out"
INSIDE = "of timm inside"
REFUSED = "refused: "
NO_COPY = f"{REFUSED}.*returns no copy"

HOLDINGS = {
    "in training mode, with dropout": (lambda: vit(drop_rate=0.5, drop_path_rate=0.3).train(), ""),
    "drop path alone in training mode": (lambda: change(lambda model: model.blocks.train(), drop_path_rate=0.5), ""),
    "bfloat16": (lambda: vit().bfloat16(), ""),
    "weights made in inference_mode": (inference, ""),
    "subclass, own forward": (lambda: held_by(flip), DIFFERS),
    "subclass, a tuple": (lambda: held_by(lambda logits: (flip(logits), logits)), STAYS),
    "subclass, a dictionary": (lambda: held_by(lambda logits: {"logits": flip(logits)}), STAYS),
    "subclass, a dictionary without logits": (lambda: held_by(lambda logits: {"out": logits}), f"{REFUSED}.*target="),
    "subclass, NaN": (lambda: held_by(lambda logits: logits / 0), f"{REFUSED}.*finite logits"),
    "subclass, random outputs": (lambda: held_by(Noise()), f"{REFUSED}.*the same logits at every call"),
    "__call__ of its own": (lambda: change(lambda model: setattr(model, "__class__", Called)), DIFFERS),
    "forward replaced, a closure": (lambda: change(replace_closure), DIFFERS),
    "forward replaced, in training mode": (lambda: change(replace_closure).train(), DIFFERS),
    "forward replaced, photos alone": (lambda: change(replace_on_photos), f"{REFUSED}.*whole=True"),
    "forward compiled": (lambda: change(compiled), ""),
    "forward hook": (lambda: hooked(vit(), lambda *call: flip(call[-1])), f"(?s){DIFFERS}.*{KEPT}"),
    "pre-hook": (lambda: hooked(vit(), lambda _, x: x[0].flip(-1) / 2, pre=True), f"(?s){DIFFERS}.*{KEPT}"),
    "pre-hook with kwargs": (
        lambda: hooked(vit(), lambda _, x, more: ((x[0] / 2,), more), pre=True, with_kwargs=True),
        f"(?s){DIFFERS}.*{KEPT}",
    ),
    "hook on a block": (lambda: hooked(vit(), lambda *call: call[1][0], "blocks.0"), KEPT),
    "pre-hook on a block": (lambda: hooked(vit(), lambda _, x: (x[0] / 2,), "blocks.0", pre=True), KEPT),
    "hook on the last layer": (lambda: hooked(vit(), lambda *call: flip(call[-1]), "head"), KEPT),
    "hook that observes": (lambda: hooked(vit(), lambda *call: None, "blocks.0"), LEFT),
    "full backward hook": (lambda: change(lambda model: model.register_full_backward_hook(lambda *_: None)), ""),
    "hooks of all modules": (lambda: everywhere(vit()), f"{REFUSED}model= needs hooks of its own"),
    "forward_features replaced": (lambda: change(replace_features), ""),
    "forward_head replaced": (
        lambda: change(lambda model: setattr(model, "forward_head", lambda x, pre_logits=False: x[:, 3, :5])),
        STAYS,
    ),
    "pool replaced": (lambda: change(lambda model: setattr(model, "pool", lambda x, pool_type=None: x[:, 1])), ""),
    "weight_norm, old style": (lambda: used(change(lambda model: weight_norm(model.head))), ""),
    "pruned": (lambda: change(lambda model: prune.l1_unstructured(model.blocks[0].mlp.fc1, "weight", 0.5)), ""),
    "activations kept by a hook": (lambda: change(keep), LEFT),
    "old weight_norm, maps kept": (lambda: used(KeepsFeatures(weight_norm)), "", CNN),
    "levit_128s, after a pass": (partial(random_timm, "levit_128s", **LEVIT), SEVERAL, SIZE),
    "efficientvit_m0, after a pass": (partial(random_timm, "efficientvit_m0", **EFFICIENT), SEVERAL, SIZE),
    "DataParallel with a hook": (lambda: hooked(nn.DataParallel(vit()), lambda *call: flip(call[-1])), INSIDE),
    "LightningModule with a hook": (lambda: hooked(Trained(vit()), lambda *call: flip(call[-1])), INSIDE),
    "LoRA layers and a forward hook": (lambda: hooked(adapt(vit()), lambda *call: flip(call[-1])), DIFFERS),
    "multi-crop": (lambda: MultiCrop(vit(num_classes=0), nn.Linear(24, 5)), INSIDE),
    "own module around a subclass": (lambda: Net(held_by(flip), call, nn.Linear(5, 3)), ""),
    "own module around a hook on a block": (
        lambda: Net(hooked(vit(), lambda *call: call[1][0], "blocks.0"), call, nn.Linear(5, 3)),
        f"(?s){INSIDE}.*{KEPT}",
    ),
    "partial with a fixed input": (lambda: partial(held_by(flip), attn_mask=None), f"{REFUSED}.*attn_mask"),
    "own CNN with a hook": (lambda: hooked(convnet(), lambda *call: flip(call[-1])), KEPT, CNN),
    "__deepcopy__ returns itself": (lambda: Itself(*convnet()), NO_COPY, CNN),
    "__deepcopy__ returns None": (lambda: Nothing(*convnet()), NO_COPY, CNN),
    "transformers ViT with a hook": (
        lambda: hooked(
            copy.deepcopy(converted("transformers ViT")[0].model), lambda *c: {"logits": flip(c[-1].logits)}
        ),
        "of transformers inside",
        LIBRARY,
    ),
}


def outputs_of(model, images):
    """A model's own logits in eval mode and float32."""
    own = model.func if isinstance(model, partial) else model
    own = own.eval().float()
    own._compiled_call_impl = None
    own.forward = getattr(own.forward, "_torchdynamo_orig_callable", own.forward)  # to compile takes seconds
    with torch.no_grad():
        found = own(images)
    found = found.get("logits") if isinstance(found, dict) else getattr(found, "logits", found)
    return found[0] if isinstance(found, tuple) else found


def describe(name):
    """The largest difference of own and explained outputs, relative to the spread of the own ones, and what is said."""
    build, _, settings = (*HOLDINGS[name], {})[:3]
    torch.manual_seed(0)
    model, said = build(), io.StringIO()
    before = None if isinstance(model, partial) else (weights_hash(model), [part.training for part in model.modules()])
    with contextlib.redirect_stderr(said):
        try:
            target = as_target(model, **settings)
            images = torch.randint(0, 256, (2, target.channels, *target.grid.size), dtype=torch.uint8)
            with torch.no_grad():
                found = target(images)
        except InputError as error:
            assert "\n" not in str(error)
            return 0.0, f"{said.getvalue()}refused: {error}"
        finally:
            modules._global_forward_hooks.clear()
    if before is not None:
        assert before == (weights_hash(model), [part.training for part in model.modules()])
    own = outputs_of(model, target.normalise(images))
    return float((own - found).abs().max() / (own - own.mean(0)).abs().max()), said.getvalue()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HOLDINGS)
def test_no_way_to_hold_a_model_differs_silently(name):
    difference, said = describe(name)
    assert difference < 1e-3, said
    assert re.search(HOLDINGS[name][1] or "^(?!.*refused)", said), said


def test_hooks_run_on_none_of_our_passes_and_hold_copies(capsys):
    model, seen = vit(), []
    hook(model, lambda *call: seen.append(call[-1]), "blocks.0")
    session = explainers.Session(model, "GAE")
    session.explain(torch.zeros(3, 32, 32, dtype=torch.uint8))
    assert not seen and LEFT in capsys.readouterr().err and not find_changes(session.target)
    hook(model, lambda *call: seen.append(call[-1]) or 2 * call[-1], "blocks.0")
    target = as_target(model)
    assert not seen and KEPT in capsys.readouterr().err and find_changes(target.backbone) == ["blocks.0"]


def test_no_shipped_explainer_is_chosen_for_a_model_that_was_changed(capsys):
    model = vit()
    plain, changed = TargetModel(model), []
    hook(model, lambda *call: 2 * call[-1], "blocks.0")
    changed.append(as_target(model))
    model = vit()
    model.blocks[1].forward = lambda tokens, *_, **__: tokens
    changed.append(as_target(model))
    for number, target in enumerate(changed):
        assert target.backbone_identity() != plain.backbone_identity()
        print_once.cache_clear()
        choose(target)
        line = f"because hooks or replaced methods (blocks.{number}) are no part of the model that a shipped explainer"
        assert line in capsys.readouterr().err
        with pytest.raises(InputError, match="is shipped .* with other weights, hooks or replaced methods: train"):
            choose(target, "anyhead")


def test_a_target_by_hand_has_the_outputs_of_its_model():
    with pytest.raises(InputError, match=r"^expected a model with one layer .* got Own: its own outputs differ by .*"):
        TargetModel(held_by(flip))


@torch.no_grad()
def test_the_first_photo_is_compared_until_it_fits():
    target = as_target(change(replace_on_photos))
    photo = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    for each in (target, target, explainers.Session(target, "GAE").target):
        with pytest.raises(InputError, match="class ., not .*whole=True"):
            posthoc.build("GAE", each, each.grid)(photo, torch.tensor([0]))
    assert copy.deepcopy(target).origin is None
    model = change(replace_on_photos)
    whole = as_target(model, whole=True)
    torch.testing.assert_close(whole(photo), model(whole.normalise(photo)))
    fine = as_target(vit())
    fine(photo.new_zeros(1, 3, 32, 32))  # a blank image is no photo
    assert fine.origin is not None and fine(photo).shape == (1, 5) and fine.origin is None
