"""The zero-shot classifier: logits by hand, names of classes, and what is refused."""

from functools import partial

import pytest
import torch
from clips import clip, image_tower, open_clip, random_directions

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.names import class_names, match_classes
from explainers.text import TextHead, clip_text_head, zero_shot_head

TEMPLATES = ["a photo of a {}.", "{} in snow"]


@torch.no_grad()
def test_logits_are_100_cosines_of_the_image_and_the_mean_prompt_of_each_class():
    tower, images = image_tower(), torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    small, tokenise = clip(), open_clip().get_tokenizer("tiny-quickgelu")
    text_head = partial(clip_text_head, encode=lambda texts: small.encode_text(tokenise(texts)))
    head = zero_shot_head(tower, ["cat", "red_fox"], templates=TEMPLATES, text_head=text_head)
    target = TargetModel(tower.backbone, head)
    for b, projected in enumerate(tower.embed(tower.normalise(images)) @ tower.head.weight.mT):
        for k, name in enumerate(("cat", "red fox")):
            mean = torch.zeros(16)
            for template in TEMPLATES:
                text = small.encode_text(tokenise([template.replace("{}", name)]))[0]
                mean += text / text.norm() / len(TEMPLATES)
            cosine = mean @ projected / (mean.norm() * projected.norm())
            assert target(images)[b, k].item() == pytest.approx(100 * cosine.item(), abs=1e-3)
    assert target.classes == ["cat", "red_fox"] and class_names(target) == ["cat", "red fox"]
    assert match_classes(["cat", "red_fox"], target) == [0, 1]
    with pytest.raises(InputError, match=r"expected images of the head's 2 classes \(cat, red_fox\), got 2 \(dog, "):
        match_classes(["dog", "red_fox"], target)


def test_without_names_the_classes_are_those_of_imagenet_in_the_80_templates_of_openai():
    asked = []

    def encode(texts):
        asked.extend(texts)
        return random_directions(["any"], 24).expand(len(texts), -1)

    head = zero_shot_head(image_tower(num_classes=0), text_head=lambda tower: TextHead(encode))
    assert len(asked) == 80_000 and head.weight.shape == (1000, 24)
    assert asked[0] == "a bad photo of a tench." and "itap of my toilet paper." in asked
    assert head.class_names[0] == "n01440764" and head.class_names[999] == "n15075141"
