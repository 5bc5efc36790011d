"""Text heads: names of classes, prompts, embeddings of small CLIPs, and the accuracy that is printed."""

import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from clips import clip, image_tower, open_clip
from toys import Marked

from callbacks.samples import collect_samples
from datamodules.ffcv import FFCV
from datamodules.images import Images
from explainers.errors import InputError
from explainers.images.transform import ImageTransform
from explainers.text.encoders import TEMPLATES, open_clip_encoder, text_embeddings
from explainers.vectors.fixed_head import fix_projected_head
from explainers.vectors.projections import print_accuracy, prototypes_of, text_of

QUICK = "tiny-quickgelu"


@cache
def tokeniser():
    """The tokeniser of the small CLIPs, which takes long to build."""
    return open_clip().get_tokenizer(QUICK)


@pytest.fixture
def asked(monkeypatch):
    """The arguments of every call to `open_clip.create_model`, which gives the same model each time."""
    library, model, calls = open_clip(), clip(), []
    tokenise = tokeniser()

    def create_model(name, pretrained=None):
        calls.append((name, pretrained))
        return model.train()

    monkeypatch.setattr(library, "create_model", create_model)
    monkeypatch.setattr(library, "get_tokenizer", lambda _: tokenise)
    return calls


def marked(classes=("red", "green_ish", "n01440764"), **settings):
    def build():
        dataset = Marked(60)
        dataset.classes = classes
        return dataset

    return Images(train=build, val=build, num_workers=0, **settings)


def test_a_text_head_reads_names_and_prompts_of_the_data_unless_told_otherwise(asked):
    target, templates = image_tower(), ["a {}."]

    def head(data, **settings):
        return text_of(target, data, QUICK, "", images=0, **settings)

    def expected(names, prompts):
        return text_embeddings(open_clip_encoder(QUICK, ""), names, prompts)

    names = ["red", "green ish", "tench"]
    torch.testing.assert_close(head(marked()), expected(names, TEMPLATES))
    own = expected(names, templates)
    torch.testing.assert_close(head(marked(templates=templates)), own)
    torch.testing.assert_close(head(marked(templates=["b"]), templates=templates, names=names), own)
    for data, names in ((marked(), ["dog", "fox"]), (marked(()), None)):
        with pytest.raises(InputError, match="names="):
            head(data, names=names)


@torch.no_grad()
def test_patches_of_siglip_are_attributed_without_a_head_of_its_own(asked, images, capsys):
    target = image_tower("vit_base_patch16_siglip_224", num_classes=None, embed_dim=16, num_heads=2)
    weight = text_of(target, marked(), "tiny-map", "", images=6)
    assert asked == [("tiny-map", None)] and " % on 6 validation images" in capsys.readouterr().out
    head = fix_projected_head(target, weight, 100.0)
    embeddings, patches = target.embed_with_patches(target.normalise(images))
    attributions = head.attributions(patches, embeddings)
    assert head.projection is None and head(embeddings).shape == (5, 3)
    expected = torch.nn.functional.cosine_similarity(patches[2, 7], weight[1], dim=0)
    torch.testing.assert_close(attributions[2, 7, 1], expected, rtol=1e-3, atol=1e-5)


def test_the_accuracy_of_a_text_head_is_printed_with_chance(capsys, recwarn):
    target, data = image_tower(num_classes=24), marked()
    target.backbone.patch_embed.proj.weight.data *= 20  # so that the colour of a patch decides
    weight = prototypes_of(target, data, limit=60)
    print_accuracy(target, data, weight, 30)
    samples = [data.dataset("val")[i] for i in range(0, 60, 2)]
    with torch.no_grad():
        nearest = [int((target.embed(target.normalise(s["image"][None])) @ weight.mT).argmax()) for s in samples]
    share = 100 * sum(a == int(s["label"]) for a, s in zip(nearest, samples, strict=True)) / 30
    assert share > 50  # or else a warning
    assert capsys.readouterr().out == f"text head: {share:.3g} % on 30 validation images (chance 33 %)\n"
    assert not recwarn.list
    with pytest.warns(UserWarning, match="text head, .* %, is not clearly above chance: are image and"):
        print_accuracy(target, data, -weight, 30)
    beton = FFCV(transform=ImageTransform((32, 32)))  # which reads whole batches
    print_accuracy(target, beton, weight, 30)
    assert "text head: accuracy not measured, because FFCV reads no single" in capsys.readouterr().out
    with pytest.raises(InputError, match="FFCV"):
        prototypes_of(target, beton)
    assert collect_samples(SimpleNamespace(datamodule=beton), {"image": torch.arange(3)}, 2)["image"].tolist() == [0, 1]


def test_text_heads_say_in_one_line_what_is_not_installed(monkeypatch):
    library = open_clip()

    def fails(error):
        def call(*_, **__):
            raise error

        return call

    monkeypatch.setattr(library, "get_tokenizer", fails(ImportError("No module named 'transformers'")))
    monkeypatch.setattr(library, "create_model", lambda *_, **__: clip())
    with pytest.raises(InputError, match="transformers"):
        text_embeddings(open_clip_encoder(QUICK, ""), ["ant"], ["{}"])
    monkeypatch.setattr(library, "create_model", fails(ConnectionError("no route to host")))
    with pytest.raises(InputError, match=QUICK):
        open_clip_encoder(QUICK, "a")
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(InputError, match=r"open_clip.*\[clip\]"):
        text_of(image_tower(), SimpleNamespace(classes=["a"]))
