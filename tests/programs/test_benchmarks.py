"""The programs in benchmarks run, and count right. What they measure is another machine's business."""

import json

import pytest
import torch
from commands import PAPER_NETWORK
from torch import nn

from benchmarks import explain


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """One round on the tiny target, with a small paper's network."""
    small = [f"explainer.network.{key}={value}" for key, value in {**PAPER_NETWORK, "head_layers": 3}.items()]
    with pytest.MonkeyPatch.context() as patch:
        for method in ("paper", "shared"):
            patch.setitem(explain.METHODS, method, explain.METHODS[method] + small)
        path = tmp_path_factory.mktemp("benchmark") / "explain.json"
        once = ["--rounds", "1", "--batch-size", "2", "--tasks", "4", "--threads", "1", "--device", "cpu"]
        explain.main(["--target", "tiny", "--baselines", *once, "--output", str(path)])
        return json.loads(path.read_text())


@pytest.mark.slow
def test_every_method_is_measured_beside_plain_inference(found):
    assert found["networks"].keys() == found["throughput"].keys() == {"tiny"}
    baselines = ["kernel_shap", "vit_shapley", "LIME", "RISE", "IntegratedGradients", "DeepLift", "GradientSHAP"]
    networks = ["plain", "light", "anyhead", "anyhead_all_classes", "shared", "paper", "oracle"]
    assert list(found["networks"]["tiny"]) == [*networks, *baselines]
    for numbers in found["networks"]["tiny"].values():
        low, high = numbers["spread"]
        assert 0 < low <= numbers["images_per_second"] <= high
    light, plain = (found["throughput"]["tiny"][name] for name in ("light", "plain"))
    assert found["ratio_light_to_plain"]["tiny"] == pytest.approx(light / plain)  # of a single round


@pytest.mark.slow
def test_the_oracle_costs_two_forwards_a_patch_and_the_shared_trunk_less_than_two(found):
    numbers = found["networks"]["tiny"]
    head = 2 * 48 * 10 / 1e9  # operations of the classifier on one embedding, in 10⁹
    backbone = numbers["plain"]["gflops_per_image"] - head
    assert numbers["oracle"]["gflops_per_image"] == pytest.approx(2 * 64 * (backbone + head))
    assert numbers["plain"]["gflops_per_image"] < numbers["light"]["gflops_per_image"]
    assert numbers["shared"]["gflops_per_image"] < numbers["paper"]["gflops_per_image"]
    assert numbers["LIME"]["gflops_per_image"] == pytest.approx(25 * (backbone + head), rel=1e-3)
    assert numbers["IntegratedGradients"]["gflops_per_image"] is None  # of gradients


def test_operations_are_counted_by_hand():
    """A linear layer of 6 to 5 on 3 rows, and attention of 2 heads of 4 on 7 tokens: Q K', and then times V."""
    layer = nn.Linear(6, 5)
    assert explain.gflops(layer, torch.zeros(3, 6)) == pytest.approx(2 * 3 * 6 * 5 / 1e9)
    attend = lambda x: nn.functional.scaled_dot_product_attention(x, x, x)  # noqa: E731
    assert explain.gflops(attend, torch.zeros(1, 2, 7, 4)) == pytest.approx(2 * (2 * 2 * 7 * 7 * 4) / 1e9)
