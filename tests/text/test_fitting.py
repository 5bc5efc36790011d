"""Text heads that are fitted to the rows of a classifier: ridge regression, unseen classes, and what is printed."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.linear_model import Ridge
from torch.nn import functional as F

from explainers.errors import InputError
from explainers.text import fit_text_head
from explainers.text.encoders import stored_encoder
from explainers.text.fitting import held_out_ranks, ridge_map, unseen_rows

CLASSES = 30


def texts_and_rows(width=24, noise=0.1):
    generator = torch.Generator().manual_seed(0)
    texts = F.normalize(torch.randn(CLASSES, 6, generator=generator), dim=-1)
    rows = texts @ torch.randn(6, width, generator=generator) + noise * torch.randn(CLASSES, width, generator=generator)
    return texts, rows - rows.mean(0)


def test_the_map_is_ridge_regression():
    texts, rows = texts_and_rows()
    peer = Ridge(alpha=0.7, fit_intercept=False).fit(texts.double().numpy(), rows.double().numpy())
    np.testing.assert_allclose(ridge_map(texts, rows, 0.7).T.numpy(), peer.coef_, rtol=1e-4, atol=1e-5)


def test_the_row_of_a_class_comes_from_a_fit_to_the_other_folds():
    texts, rows = texts_and_rows()
    found = unseen_rows(texts, rows, ridge=0.5, folds=4)
    for number in range(CLASSES):
        seen = [k for k in range(CLASSES) if k % 4 != number % 4]
        peer = Ridge(alpha=0.5, fit_intercept=False)
        centre = texts[seen].mean(0)
        peer.fit((texts[seen] - centre).double().numpy(), rows[seen].double().numpy())
        expected = peer.predict((texts[number] - centre)[None].double().numpy())[0]
        np.testing.assert_allclose(found[number].numpy(), expected, rtol=1e-3, atol=1e-4)


def test_ranks_are_among_the_unseen_classes_of_a_fold():
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(12, 5, generator=generator)
    embeddings, labels = torch.randn(40, 5, generator=generator), torch.randint(12, (40,), generator=generator)
    ranks, sizes = held_out_ranks(embeddings, labels, rows, folds=2)
    assert sizes.tolist() == [6] * 40
    for e, y, rank in zip(embeddings, labels.tolist(), ranks.tolist(), strict=True):
        scores = {k: float(rows[k] @ e) for k in range(12) if k % 2 == y % 2}
        assert sorted(scores, key=scores.get, reverse=True)[rank] == y


@pytest.fixture
def classifier(make_target):
    target = make_target(num_classes=CLASSES)
    target.head.weight.data = texts_and_rows(noise=0.02)[1]
    return target


@pytest.fixture
def files(tmp_path):
    prompts = [f"text {number}" for number in range(CLASSES)] + ["something else"]
    (tmp_path / "prompts.json").write_text(json.dumps({"imagenet": prompts[:CLASSES], "prompts": prompts}))
    texts = torch.cat([texts_and_rows()[0], torch.eye(6)[:1]])
    save_file({"embeddings": texts.half()}, tmp_path / "embeddings.safetensors")
    return tmp_path / "embeddings.safetensors", tmp_path / "prompts.json"


def test_a_fitted_text_head_has_functionals_near_the_rows_and_prints_how_it_generalises(classifier, files, capsys):
    encode = stored_encoder(*files)
    texts = [f"text {number}" for number in range(CLASSES)]
    generator = torch.Generator().manual_seed(1)
    rows = classifier.head.weight.detach()
    labels = torch.randint(CLASSES, (50,), generator=generator)
    head = fit_text_head(classifier, texts, encode, labelled=(5 * rows[labels], labels), ridge=0.01)
    printed = capsys.readouterr().out
    assert printed.startswith("text head: 9") or printed.startswith("text head: 100 %")
    assert "unseen classes, on 50 images (chance 33 %)" in printed
    found = head.functionals(torch.zeros(1, 24), texts)[0]
    assert F.cosine_similarity(found, rows - rows.mean(0)).min() > 0.95
    assert head.functionals(torch.zeros(1, 24), "something else").shape == (1, 1, 24)
    fit_text_head(classifier, texts, encode, ridge=0.01)
    assert capsys.readouterr().out.startswith("text head: mean cosine 1.00 of the rows of unseen classes")
    with pytest.raises(InputError, match="expected 30 texts, one for each class of vit_tiny_patch16_224, got 2"):
        fit_text_head(classifier, texts[:2], encode)
    with pytest.raises(InputError, match=r"expected texts of prompts.json, got 'text 99': did you mean text"):
        encode(["text 99"])
