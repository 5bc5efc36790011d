"""A backbone inside of a module is found: equal outputs, and the heatmaps of the backbone with that head by hand."""

import copy
import re

import pytest
import torch
from held import Net, Normalise, call, mlp
from library_models import converted
from torch import nn

from explainers import posthoc
from explainers.errors import InputError
from explainers.models import TargetModel, as_target
from explainers.models.heads import NoHead
from explainers.models.plain import PlainBackbone
from explainers.saved.identity import weights_hash

CLASSES = torch.tensor([3, 0])


class Functions(nn.Module):
    """A head of functions, and an output of several values."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.first, self.last = encoder, nn.Linear(24, 8), nn.Linear(8, 5)

    def forward(self, images):
        embeddings = self.encoder(images)
        return {"logits": self.last(torch.tanh(self.first(embeddings))), "embeddings": embeddings}


TIMM = {
    "a linear head": lambda vit: Net(vit(num_classes=0), call, nn.Linear(24, 5)),
    "several layers": lambda vit: Net(vit(num_classes=0), call, mlp(24)),
    "a sequence": lambda vit: nn.Sequential(vit(num_classes=0), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 5)),
    "behind its own head": lambda vit: nn.Sequential(vit(num_classes=9), nn.ReLU(), nn.Linear(9, 5)),
    "functions": lambda vit: Functions(vit(num_classes=0)),
    "class token": lambda vit: Net(vit(), lambda vit, x: vit.forward_features(x)[:, 0], mlp(24)),
    "its own pooling": lambda vit: Net(vit(), lambda vit, x: vit.forward_head(vit.forward_features(x), True), mlp(24)),
    "mean of patches": lambda vit: Net(vit(), lambda vit, x: vit.forward_features(x)[:, 1:].mean(1), mlp(24)),
    "mean of tokens": lambda vit: Net(vit(num_classes=0, global_pool=""), lambda vit, x: vit(x).mean(1), mlp(24)),
}
NORMALISED = torch.randn(3, 3, 32, 32)


@pytest.mark.situation(3)
@pytest.mark.parametrize("kind", TIMM)
def test_what_follows_a_vit_becomes_its_head(kind, make_model, capsys):
    def vit(**arguments):
        return copy.deepcopy(make_model(**arguments))

    torch.manual_seed(0)
    net = TIMM[kind](vit).train()
    before = weights_hash(net)
    target = as_target(net, mean=0, std=1)
    assert net.training and weights_hash(net) == before
    line = capsys.readouterr().err.splitlines()[-1]
    assert (
        line.startswith(f"{type(net).__name__}: a vit_tiny_patch16_224 of timm inside (")
        and "outputs differ by" in line
    )
    with torch.no_grad():
        expected = net.eval()(NORMALISED)
        expected = expected["logits"] if isinstance(expected, dict) else expected
        torch.testing.assert_close(target.classify(target.embed(NORMALISED)), expected)
    assert {"DecompX", "GAE", "AttnLRP"} <= set(posthoc.methods_for(target, target.grid))
    others = sum(weight.numel() for weight in target.head.parameters())
    assert others < 24 * 32  # no weights of the backbone


@pytest.mark.situation(3)
def test_heatmaps_are_those_of_the_backbone_with_the_head_by_hand(make_model, images):
    vit, head = make_model(num_classes=0), mlp(24)
    found, by_hand = as_target(Net(vit, call, head)), TargetModel(vit, head).eval()
    assert found.identity() == by_hand.identity() and type(found.head) is nn.Sequential
    rest = as_target(nn.Sequential(vit, *head))
    for method in ("DecompX-PLUS", "GAE", "IntegratedGradients"):
        expected = posthoc.build(method, by_hand, by_hand.grid)(images[:2], CLASSES)
        for target in (found, copy.deepcopy(rest)):
            heatmaps = posthoc.build(method, target, target.grid)(images[:2], CLASSES)
            torch.testing.assert_close(heatmaps, expected, rtol=1e-4, atol=1e-5)


OTHERS = {
    "class token": ("transformers ViT without a head", lambda m, x: m(x).last_hidden_state[:, 0], 32),
    "pooler": (
        "transformers ViT without a head",
        lambda m, x: torch.tanh(m(pixel_values=x).last_hidden_state)[:, 0],
        32,
    ),
    "mean": ("transformers DINOv2", lambda m, x: m(x, return_dict=False)[0][:, 1:].mean(1), 32),
    "embedding": ("transformers SigLIP", lambda m, x: m(x).pooler_output, 32),
    "logits": ("torchvision ViT", lambda m, x: m(x).relu(), 5),
    "maps": ("torchvision ConvNeXt", call, 5),
}


@torch.no_grad()
@pytest.mark.situation(3)
@pytest.mark.parametrize("kind", OTHERS)
def test_what_follows_a_model_of_another_library_becomes_its_head(kind, images, capsys):
    name, read, width = OTHERS[kind]
    net = Net(converted(name)[0].model, read, mlp(width)).eval()
    target = as_target(net, image_size=32)
    assert f" of {name.split()[0]} inside (encoder), with the rest as its head" in capsys.readouterr().err
    expected = net(target.normalise(images))
    torch.testing.assert_close(target(images), expected, rtol=1e-4, atol=1e-4)
    assert type(target.backbone).__module__.startswith("timm.")


@torch.no_grad()
def test_a_backbone_alone_keeps_what_it_is(make_model, images, capsys):
    alone = as_target(Net(make_model(num_classes=0), call, nn.Identity()))
    assert isinstance(alone.head, NoHead) and "inside (encoder), with no head;" in capsys.readouterr().err
    whole = as_target(Net(make_model(), call, nn.Identity()), classes=list("abcde"))
    assert whole.classes == list("abcde") and whole.identity() == TargetModel(make_model()).identity()


@torch.no_grad()
def test_a_module_that_normalises_its_images_states_the_mean(make_model, images):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    net = nn.Sequential(Normalise(mean, std), make_model())
    target = as_target(net)
    torch.testing.assert_close((target.mean.flatten(), target.std.flatten()), (torch.tensor(mean), torch.tensor(std)))
    torch.testing.assert_close(target(images), net(images / 255), rtol=1e-4, atol=1e-4)
    bytes_of = nn.Sequential(Normalise([255 * each for each in mean], [255 * each for each in std]), make_model())
    with pytest.raises(InputError, match=r"^std= is needed: .* give mean=0, std=1/255 if it takes pixels to 255$"):
        as_target(bytes_of)
    torch.testing.assert_close(as_target(bytes_of, std=1 / 255)(images), target(images), rtol=1e-4, atol=1e-4)


class Twice(Net):
    """A siamese net: the head reads an image and its mirror image."""

    def forward(self, images):
        return super().forward(images) + super().forward(images.flip(-1))


BOTH = "first token and mean"
APART = {
    BOTH: (Net, lambda vit, x: torch.cat([(y := vit.forward_features(x))[:, 0], y.mean(1)], 1), "differ by|it raises"),
    "pixels": (
        Net,
        lambda vit, x: torch.cat([vit(x), x.flatten(1)[:, :24]], 1),
        "the outputs of a head on its embedding",
    ),
    "a smaller image": (Net, lambda vit, x: vit(x[..., ::2].repeat(1, 1, 1, 2)).repeat(1, 2), "it sees other images"),
    "mirror": (Twice, lambda vit, x: vit(x).repeat(1, 2), "the outputs of a head on its embedding differ by"),
    "nothing": (Net, lambda vit, x: x.flatten(1)[:, :48], "is not followed by a head: its forward does not call it"),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", APART)
def test_what_is_no_function_of_the_embedding_is_said_and_explained_as_a_whole(kind, make_model, images, capsys):
    build, read, reason = APART[kind]
    net = build(make_model(num_classes=0), read, mlp(48)).eval()
    target = as_target(net)
    line = capsys.readouterr().err
    assert re.search(
        rf"^{build.__name__} stays as it is, because encoder inside \(VisionTransformer\) .*{reason}", line
    )
    assert "if you know its head, give TargetModel(backbone, head=head); mean 0.5 0.5 0.5" in line
    assert isinstance(target.backbone, PlainBackbone) and target.grid.size == (32, 32)
    torch.testing.assert_close(target(images), net(target.normalise(images)), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_largest_backbone_that_has_a_head_is_taken(make_model, capsys):
    net = Net(make_model(num_classes=0), call, mlp(24))
    net.teacher = make_model(depth=3)  # larger, and not called
    target = as_target(net)
    assert "VisionTransformer of timm" not in capsys.readouterr().err and len(target.backbone.blocks) == 2
