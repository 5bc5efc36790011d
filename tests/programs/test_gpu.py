"""What only a GPU can show. Where there is none, these tests skip."""

import json
import math
import subprocess
import sys

import pytest
import torch
from commands import ROOT, SMALL_DIGITS, composed, train
from hydra.utils import instantiate
from test_mid_epoch import TORCH, killed, results

from explainers import posthoc
from explainers.running.defaults import fastest_precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
RUN = ("experiment=demo/tve", "target=tiny", *SMALL_DIGITS, "explainer.network.width=24", "trainer.max_epochs=1")
EXPLAINERS = ("chance", "oracle", "kernel_shap", "tve", "tve_hg")
METHODS = ("DecompX-PLUS", "GAE", "ALTI-Rollout", "IntegratedGradients", "Occlusion", "RISE")


def test_a_training_step_in_bf16_has_a_finite_loss(tmp_path):
    precision = fastest_precision("auto")
    assert precision == "bf16-mixed"
    gpu = ("trainer.accelerator=gpu", f"trainer.precision={precision}", f"cache_dir={tmp_path / 'cache'}")
    assert math.isfinite(train(*RUN, *gpu, "cache=none", folder=tmp_path / "run"))
    assert torch.cuda.get_device_name() in json.loads((tmp_path / "run/versions.json").read_text())["devices"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_killed_training_ends_as_one_that_was_not(precision, tmp_path):
    """Bit for bit, on the same GPU."""
    command = (*TORCH, "trainer.accelerator=gpu", f"trainer.precision={precision}")
    train(*command, folder=tmp_path / "whole")
    killed(*command, saved=6, step=8, folder=tmp_path / "run")
    train(*command, "ckpt_path=last", folder=tmp_path / "run")
    (expected, history), (weights, resumed) = results(tmp_path / "whole"), results(tmp_path / "run")
    assert resumed == history and weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", [*EXPLAINERS, *METHODS])
def test_a_heatmap_is_the_same_as_on_the_cpu(name, tmp_path):
    settings = {"kernel_shap": ["explainers.kernel_shap.budget=20"], "oracle": ["explainers.oracle.cache_dir=null"]}
    named = [f"explainers=[{name}]", *settings.get(name, ())] if name in EXPLAINERS else []
    cfg = composed("target=tiny", *named, folder=tmp_path, config="eval")
    torch.manual_seed(0)
    target = instantiate(cfg.target)
    if name in EXPLAINERS:
        explainer = instantiate(cfg.explainers[name], target=target).eval()
    else:
        explainer = posthoc.build(name, target, instantiate(cfg.grid), {"masks": 50} if name == "RISE" else {})
    images, classes = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8), torch.tensor([0, 3, 9])
    with torch.no_grad():
        on_cpu = explainer(images, classes)
        on_gpu = explainer.cuda()(images.cuda(), classes.cuda())
    assert on_gpu.is_cuda
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-2, atol=1e-3 * on_cpu.abs().max().item())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than two CUDA devices")
def test_two_processes_train_with_nccl(tmp_path):
    gpus = ("trainer.accelerator=gpu", "trainer.devices=2", "trainer.strategy=ddp", "cache=none")
    command = [sys.executable, "train.py", *RUN, *gpus, f"hydra.run.dir={tmp_path}/run"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    assert math.isfinite(json.loads((tmp_path / "run/metrics.json").read_text())["val/loss"])
