"""Both towers of models of Hugging Face transformers: the cosines are the model's own."""

import numpy as np
import pytest
import torch
from conftest import wake
from toys import equal, state

import explainers
from explainers.errors import InputError
from explainers.models import as_target
from explainers.posthoc import build
from explainers.text import TextExplainer, hugging_face_text_head, two_towers

open_clip = pytest.importorskip("open_clip", reason="needs open_clip")
library_models = pytest.importorskip("library_models", reason="needs torchvision and transformers")
TEXTS = ["a cat", "two red dogs", "grass"]
PIXELS = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


def model_of(name):
    return wake(library_models.TWO_TOWERS[name]()).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", library_models.TWO_TOWERS)
def test_the_score_of_two_towers_is_the_similarity_that_the_model_computes(name):
    model = model_of(name)
    before = state(model)
    target, head = two_towers(model, library_models.tokenise)
    outputs = model(pixel_values=target.normalise(PIXELS), **library_models.tokenise(TEXTS))
    offset = getattr(model, "logit_bias", torch.zeros(1))
    cosines = (outputs.logits_per_image - offset) / model.logit_scale.exp()
    embeddings = target.embed(target.normalise(PIXELS))
    torch.testing.assert_close(head(embeddings, TEXTS), cosines, rtol=0, atol=1e-4)
    assert cosines.std() > 0.02
    zero_shot = head.head(TEXTS)(embeddings)
    torch.testing.assert_close(zero_shot, outputs.logits_per_image - offset, rtol=1e-4, atol=1e-3)
    assert equal(state(model), before)
    heatmaps = TextExplainer(build("DecompX", target, target.grid), head, TEXTS).explain_all(PIXELS)
    assert heatmaps.shape == (3, 3, 4, 4) and heatmaps.isfinite().all()


@torch.no_grad()
def test_a_text_tower_in_training_mode_embeds_without_dropout_and_stays_in_its_mode():
    model = model_of("CLIP")
    _, head = two_towers(model, library_models.tokenise)
    for block in model.text_model.encoder.layers:
        block.self_attn.dropout = 0.5
    model.train().text_model.final_layer_norm.eval()
    modes = [module.training for module in model.modules()]
    _, trained = two_towers(model, library_models.tokenise)
    torch.testing.assert_close(trained.embed(TEXTS), head.embed(TEXTS))
    assert [module.training for module in model.modules()] == modes


def test_other_models_are_refused_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="^expected a model of transformers with two towers, .* got Linear: for an "):
        two_towers(torch.nn.Linear(1, 1), library_models.tokenise)
    target, _ = two_towers(model_of("CLIP"), library_models.tokenise)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="^expected a model of the Hugging Face Hub, .* got .*empty: ") as raised:
        hugging_face_text_head(target, str(tmp_path / "empty"))
    assert "\n" not in str(raised.value)


@torch.no_grad()
def test_a_text_tower_from_a_folder_is_that_of_its_model(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    model = model_of("CLIP")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda _: library_models.tokenise)
    target, head = two_towers(model, library_models.tokenise)
    loaded = hugging_face_text_head(target, str(tmp_path), templates=["{}"])
    torch.testing.assert_close(loaded.embed(TEXTS), head.embed(TEXTS))


WIDTHS = {"image_size": 32, "layers": 2, "width": 32, "head_width": 8, "patch_size": 8}
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}


def clip_of(quick_gelu=False, **vision):
    return wake(open_clip.CLIP(12, WIDTHS | vision, TEXT, quick_gelu=quick_gelu)).eval()


@torch.no_grad()
@pytest.mark.situation(5)
@pytest.mark.parametrize(
    "vision", [{}, {"quick_gelu": True}, {"ls_init_value": 0.1}, "trunk", {"layers": (1, 1, 1, 1)}]
)
def test_an_image_tower_of_open_clip_embeds_as_the_model_does_and_has_no_classes(vision, capsys):
    trunk = {"timm_model_name": "test_vit", "timm_pool": "", "image_size": 160}
    model = clip_of(**(trunk if vision == "trunk" else vision))
    before, size = state(model), 160 if vision == "trunk" else 32
    target, head = two_towers(model, open_clip.tokenize)
    assert capsys.readouterr().err.startswith("the image tower ")
    pixels = torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8)
    normalised = target.normalise(pixels)
    expected = model(normalised, open_clip.tokenize(TEXTS))[:2]
    cosines = torch.nn.functional.normalize(expected[0], dim=-1) @ torch.nn.functional.normalize(expected[1], dim=-1).T
    torch.testing.assert_close(head(target.embed(normalised), TEXTS), cosines, rtol=0, atol=1e-4)
    assert cosines.std() > 0.01 and equal(state(model), before)
    with pytest.raises(InputError):
        print(target.num_classes)
    if vision == "trunk":
        assert as_target(model, image_size=96).grid.size == (96, 96)


@pytest.mark.situation(5)
def test_a_text_is_explained_by_the_model_that_is_handed_in():
    model = clip_of(quick_gelu=True)
    photo = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    found = explainers.explain(photo, model, text=["a dog", "a cat"])
    target, head = two_towers(model, open_clip.tokenize)
    expected = explainers.explain(photo, target, text=["a dog", "a cat"], text_head=head)
    torch.testing.assert_close(found.heatmap, expected.heatmap)
    for part in (model, model.visual):
        with pytest.raises(InputError, match="embeds images for texts and has no classes: give text="):
            explainers.explain(photo, part)
    model.vocab_size = 100
    with pytest.raises(InputError, match="^text= needs the tokeniser of this CLIP, which is not OpenAI's: build"):
        explainers.explain(photo, model, text="a dog")
