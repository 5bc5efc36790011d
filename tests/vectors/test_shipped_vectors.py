"""Explainability vectors as files that stand alone, and models to which they are added in one call."""

import copy
import logging
import math

import pytest
import timm
import torch
from commands import composed
from conftest import timm_model
from refusals import check_refused
from toys import Unlabelled, validate, vector_module

import explainers
from benchmarks.shipping import ship_vector
from datamodules.images import Images
from explainers.models import TargetModel
from explainers.models.heads import ProjectedHead
from explainers.saved.weights import part, read_header, read_tensors, read_weights, save_tensors
from explainers.share import catalogue
from explainers.vectors import VectorSources, adding, available
from explainers.vectors.fixed_head import FixedHead, embed_as_read
from explainers.vectors.method_labels import MethodLabels
from explainers.vectors.projections import simplex
from explainers.vectors.self_explaining import SelfExplaining
from explainers.vectors.vector_files import build_vector, find_vector, pack, unpack

NAME = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
RECORD = ("photos (CC0)", "python train.py experiment=studies/vector_source", {"kept ↑": {"vector": 0.5}})


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A self-explaining model whose second half was trained, and its vector."""
    torch.manual_seed(0)
    target = timm_model(as_target=True)
    module = SelfExplaining(target, target.grid)
    head = FixedHead(simplex(3, 24), reading="blank_patch", patch_scale=0.3, blocks=(1,))
    module.target.head = head
    torch.nn.init.normal_(head.read_out)
    tau = {name: torch.zeros_like(value) for name, value in target.backbone.state_dict().items()}
    with torch.no_grad():
        for name, weight in module.target.backbone.named_parameters():
            if name.startswith(("blocks.1.", "norm.")):
                tau[name] = 0.1 * torch.randn(weight.shape)
                weight += tau[name]
    return str(module.export(tmp_path_factory.mktemp("source"), alpha=0.5)), tau, head


@pytest.fixture(scope="module")
def home(source, tmp_path_factory):
    """A folder with its file, as if it were shipped for ViT-Tiny."""
    home = tmp_path_factory.mktemp("shipped")
    ship_vector(source[0], home / NAME / "vector", timm_model(as_target=True), 0.75, *RECORD)
    return home


@pytest.fixture
def shipped(home, monkeypatch):
    monkeypatch.setattr(catalogue, "SHIPPED", home)
    return home / NAME / "vector/vector.safetensors"


def tuned(seed=1, noise=0.05, **settings):
    """A model fine-tuned from the target, with another head; `seed` None for the weights of another training."""
    model = timm_model(num_classes=7, seed=0 if seed else 9, **settings)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * weight.std(correction=0) * torch.randn(weight.shape)
    return model.train()


def largest_half(tau):
    """The entries that are kept, one after the other."""
    sizes = sorted(abs(number) for value in tau.values() for number in value.flatten().tolist() if number)
    limit = sizes[len(sizes) // 2]
    kept = {name: torch.tensor([n if abs(n) >= limit else 0.0 for n in v.flatten()]) for name, v in tau.items()}
    return {name: value.view(tau[name].shape) for name, value in kept.items()}


def by_hand(model, tau, head, lambda_2, images):
    """Logits, and attributions of all classes, of a model whose weights were added to a vector by hand."""
    moved = TargetModel(model).eval()
    for name, weight in moved.backbone.named_parameters():
        weight.data += lambda_2 * tau[name] if name in tau and tau[name].any() else 0
    weight, bias = moved.head.weight.detach(), moved.head.bias.detach()
    weight, bias = weight - weight.mean(0), bias - bias.mean()
    reading = {"reading": head.reading, "patch_scale": 0.3, "blocks": head.blocks, "read_out": head.read_out}
    moved.head = FixedHead(weight, normalise=False, bias=bias, **reading)
    embeddings, patches, paths = embed_as_read(moved, moved.grid, images)
    vectors = head.read_out[0] * 0.3 * patches + paths
    return embeddings @ weight.mT + bias, vectors @ weight.mT


def test_a_vector_is_packed_to_a_bit_for_every_entry_and_16_for_those_that_are_kept(target):
    tau = {name: torch.randn(value.shape) for name, value in target.backbone.state_dict().items()}
    tau |= {name: torch.zeros_like(value) for name, value in tau.items() if name.startswith("blocks.0")}
    packed = pack(tau)
    assert {name.rpartition(".")[0] for name in packed} == {name for name in tau if not name.startswith("blocks.0")}
    entries = sum(value.numel() for name, value in tau.items() if not name.startswith("blocks.0"))
    assert sum(value.nbytes for value in packed.values()) == pytest.approx(entries * (1 / 8 + 2 / 2), rel=0.01)
    again = unpack(packed, target.backbone.state_dict(), "x")
    for name, value in largest_half(tau).items():
        torch.testing.assert_close(again[name], value, rtol=1e-3, atol=1e-6)
        assert torch.equal(again[name] == 0, value == 0)


def test_a_shipped_vector_is_listed_with_its_numbers(shipped):
    (entry,) = available()
    assert (entry.name, entry.explainer, entry.bytes) == (NAME, "vector", shipped.stat().st_size)
    assert "experiment=studies/vector_source target=<name in timm>" in repr(available())
    assert explainers.available() == [] == catalogue.for_target(timm_model(as_target=True))
    card = (shipped.parent / "README.md").read_text()
    assert "explainers.add_vector(model)" in card and NAME in card and "| vector | 0.500 |" in card


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"img_size": 48}], ids=["size of the vector", "larger images"])
def test_a_fine_tuned_model_explains_itself_after_one_call(shipped, source, images, settings, caplog, tmp_path):
    """Its logits and heatmaps are those of weights that were added by hand; the model itself stays as it was."""
    model = tuned(**settings)
    model.load_state_dict({n: v for n, v in tuned().state_dict().items() if n != "pos_embed"}, strict=False)
    before = copy.deepcopy(model.state_dict())
    images = images.repeat(1, 1, 2, 2)[..., : 48 if settings else 32, : 48 if settings else 32].contiguous()
    with caplog.at_level(logging.WARNING):
        module = explainers.add_vector(model)
    assert module.lambda_2 == 0.75 and "lambda_2=auto is 0.75, as the vector's file recommends" in caplog.text
    assert model.training and not module.training and not any(p.requires_grad for p in module.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    logits, heatmaps = module(images)
    tau = largest_half(source[1])
    expected, attributions = by_hand(model, tau, source[2], 0.75, images)
    torch.testing.assert_close(logits, expected, rtol=2e-3, atol=2e-3)
    explained = attributions[torch.arange(5), :, logits.argmax(-1)].view(heatmaps.shape)
    torch.testing.assert_close(heatmaps, explained, rtol=1e-2, atol=2e-3 * explained.abs().max().item())
    chosen = torch.tensor([0, 1, 2, 3, 6])
    assert torch.equal(module.explainer(images, chosen), module(images, chosen)[1])
    loaded = explainers.load(module.explainer.export(tmp_path / "moved"), TargetModel(model))
    torch.testing.assert_close(loaded(images), heatmaps)


@torch.no_grad()
def test_heads_of_all_kinds_keep_their_probabilities(shipped, images, target):
    model = tuned(noise=0.01)
    projected = TargetModel(model, ProjectedHead(simplex(3, 24), scale=10.0))
    for each in (TargetModel(model), projected, TargetModel(model, score="sigmoid")):
        module, each = explainers.add_vector(each, lambda_2=0), each.eval()
        torch.testing.assert_close(each.scores(module(images)[0]), each.scores(each(images)))


def test_models_that_were_fine_tuned_from_the_base_take_its_vector(shipped, target):
    """However near: rounded to 16 bits, or 20 % away. The base model of a training is the same up to rounding."""
    for model in (tuned(noise=0), tuned(noise=0.2), tuned(noise=0).bfloat16().float()):
        explainers.add_vector(model, 1.0, vector=shipped)
    find_vector("shipped", copy.deepcopy(target).bfloat16().float())


def packed(part, change, target):
    parts = pack({name: torch.randn(value.shape) for name, value in target.backbone.state_dict().items()})
    parts[f"norm.weight.{part}"] = parts[f"norm.weight.{part}"][change]
    unpack(parts, target.backbone.state_dict(), "x")


def add_file(path, folder, header):
    save_tensors(read_tensors(path)[1], folder / "other.safetensors", read_tensors(path)[0] | header)
    explainers.add_vector(tuned(), "auto", vector=folder / "other.safetensors")


def ship_for_another(source, tmp_path):
    ship_vector(source[0], tmp_path, timm_model(seed=3, as_target=True), 1.0, *RECORD)


def network():
    return torch.nn.Sequential(torch.nn.Linear(24, 2))


REFUSED = [
    # models that were not fine-tuned from the base model, files of something else, parts that do not fit each other
    ("vector", lambda shipped: explainers.add_vector(tuned(seed=None))),
    ("vector", lambda shipped: explainers.add_vector(tuned(depth=3))),
    ("vector", lambda shipped: find_vector("shipped", TargetModel(tuned()).eval())),
    ("vector", lambda shipped: build_vector(VectorSources(file="shipped"), timm_model(seed=9, as_target=True), {})),
    ("other.safetensors", lambda shipped, tmp_path: add_file(shipped, tmp_path, {"class": "AnyHead"})),
    ("norm.weight", lambda target: packed("bits", slice(1, None), target)),
    ("norm.weight", lambda target: packed("values", slice(1, None), target)),
    ("linear head", lambda shipped: explainers.add_vector(TargetModel(tuned(), network()))),
    ("path", lambda: ship_vector("x", "y", None, 1.0, "photos", "python train.py data_dir=/home/me", {})),
    ("base_sha256", ship_for_another),
    # a factor in the file that makes everything infinite
    ("other.safetensors", lambda shipped, tmp_path: add_file(shipped, tmp_path, {"lambda_2": 1e30})),
    *(
        (name, lambda shipped, name=name, value=value: explainers.add_vector(tuned(), **{name: value}))
        for name, values in [
            ("vector", ("vit_small_patch16_224", None, "a\0b")),
            ("lambda_2", ("1", math.nan, 10**400, 1e30)),
            ("images", (torch.zeros(1, 3, 32, 32).byte(), torch.rand(5, 3, 32, 32), "x")),
        ]
        for value in values
    ),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_does_not_fit_is_refused(told, call, request):
    check_refused(request, told, call)


@torch.no_grad()
def test_unlabelled_images_choose_lambda_2_and_hold_the_predictions(shipped, caplog, monkeypatch):
    model, images = tuned(), Unlabelled(40, seed=4)[torch.arange(40)]["image"]
    with caplog.at_level(logging.WARNING):
        module = explainers.add_vector(model, images=images)
    assert f"lambda_2=auto: best of 7 points: λ₁ = 1, λ₂ = {module.lambda_2:g}; kept 1 → " in caplog.text
    before = TargetModel(model).eval()(images).log_softmax(-1)
    moved = [explainers.add_vector(model, 1.0, images=given)(images)[0].log_softmax(-1) for given in (None, images)]
    far, near = ((before.exp() * (before - after)).sum(-1).mean() for after in moved)
    assert near < 0.5 * far
    divergences = []
    monkeypatch.setattr(adding, "summary", lambda sweep, *_: divergences.extend(row["divergence"] for row in sweep))
    explainers.add_vector(model, images=images)
    assert divergences[0] == 0 < min(divergences[1:])  # from the model without the vector


@torch.no_grad()
def test_equal_images_keep_their_predictions(shipped):
    model, images = tuned(), torch.full((2, 3, 32, 32), 90).byte()
    before = TargetModel(model).eval()(images).softmax(-1)
    module = explainers.add_vector(model, images=images.numpy())
    torch.testing.assert_close(module(images)[0].softmax(-1), before, rtol=0.02, atol=0.01)


def test_a_sweep_takes_a_shipped_vector_in_place_of_a_source(shipped, source, target, grid, three_files, tmp_path):
    taken = {"vector": VectorSources(file="shipped"), "lambda_2": [0.0, 1.0], "labels": MethodLabels}
    module = vector_module(target, grid, three_files, **taken)
    validate(module, Images(val=lambda: Unlabelled(6, seed=1), batch_size=4, num_workers=0))
    onto, tau = part(read_weights(three_files["onto"])[1], "backbone"), largest_half(source[1])
    model = module.sweep.load((1.0, 1.0)).target
    assert module.sweep.points == [(1.0, 0.0), (1.0, 1.0)] and model.head.blocks == (1,)
    for name, value in model.backbone.state_dict().items():
        torch.testing.assert_close(value, onto[name] + tau[name], rtol=1e-3, atol=1e-4)
    assert len(read_header(module.export(tmp_path / "run"))["vector_sha256"]) == 64
    cfg = composed("experiment=explainability_vector", "vector=shipped", folder=tmp_path)
    assert cfg.module.vector.file == "shipped" and cfg.module.lambda_2[0] == 0


def test_the_vectors_of_this_package_are_small_and_fit_their_models():
    for entry in available():
        assert {path.name for path in entry.folder.iterdir()} == {"README.md", "vector.safetensors", "measured.json"}
        header, packed = read_tensors(entry.folder / "vector.safetensors")
        assert entry.bytes <= 6e6 and header["model"] == entry.name and 0 < header["lambda_2"] <= 2
        with torch.device("meta"):
            model = TargetModel(timm.create_model(entry.name))
        tau = unpack(packed, model.backbone.state_dict(), "x")
        assert any(value.any() for value in tau.values()) and all(value.isfinite().all() for value in tau.values())
        assert len(header["sketch"]) % 8 == 0 and header["head"]["reading"] in ("difference", "blank_patch")
