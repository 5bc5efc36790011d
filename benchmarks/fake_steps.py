"""One training step and one evaluation batch of any experiment, as Lightning runs them, with real or fake tensors.

`benchmarks/fake_tensors.py` says how fake tensors stand for those of a GPU. Of the steps:

- The optimiser has the temporary tensors of its `foreach` implementation, which is the default on CUDA. Muon has none.
- Buckets of DDP are as large as the gradients, and exist if the config has several devices. With
  `gradient_as_bucket_view`, gradients lie in them.
- `drop` of ranked patches is counted as hiding them, which takes more memory and operations.
- The first step's calibration, which keeps nothing for a backward pass, and metrics are left out.
"""

import copy
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

sys.path.insert(0, str(Path(__file__).parents[1]))  # configs name modules of this folder that are not installed

from benchmarks.fake_tensors import count_bytes, cuda_autocast, fake
from explainers.masking import read_size
from explainers.models import TargetModel
from explainers.running import targets
from explainers.text import TextHead
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.projections import simplex

CLASSES = 10
"""Number of classes where the config takes it from the images."""


def compose_config(*overrides: str) -> DictConfig:
    """The config of `python train.py *overrides`, with random weights instead of files and downloads."""
    cfg = targets.compose_config("train", overrides)
    cfg.target.model.update(pretrained=False, checkpoint_path="")
    OmegaConf.to_container(cfg.grid, resolve=True)  # what follows from the model is remembered, before tensors are fake
    with open_dict(cfg):
        part: Any = cfg.module
        explainer: Any = cfg.get("explainer") or {}
        explainer.update({key: None for key in ("weights", "surrogate") if key in explainer})
        if OmegaConf.select(part, "head.projection"):  # prototypes need images; a simplex has their size
            part.head.projection = {"_target_": "explainers.vectors.projections.simplex_of", "_partial_": True}
        teacher = part.get("loss")
        if OmegaConf.is_dict(teacher) and teacher.get("functionals") == "texts":
            teacher.text_head = {"_target_": "benchmarks.fake_steps.make_text_head", "_partial_": True}
        if OmegaConf.is_dict(teacher) and teacher.get("fit") == "ranking":  # which patches leave is not known
            teacher.removals = [removal for removal in teacher.removals if removal != "drop"] or ["zero"]
        for key in {"mae", "pretrained"} & set(explainer.get("network") or {}):
            explainer.network[key] = None if key == "mae" else False
    return cfg


def make_text_head(target: TargetModel) -> TextHead:
    """A text head of a tower, with texts of the right width in place of those of a text tower."""
    projection = getattr(target.head, "weight", None)
    width = target.embed_dim if projection is None else len(projection)
    return TextHead(lambda texts: torch.ones(len(texts), width), projection)


def build(cfg: DictConfig) -> Any:
    """The module that `train.py` builds and sets up, with a stand-in for its trainer after the first step."""

    def trained(target: Any, path: str) -> Any:  # instead of the file of a trained self-explaining model
        model = copy.deepcopy(target)
        model.head = FixedHead(simplex(CLASSES, model.embed_dim, seed=0))
        return model

    part = cfg.module
    with patch("explainers.vectors.self_explaining.exported_target", trained):
        module = instantiate(part)
    unknown = part.get("num_classes", 0) is None or OmegaConf.select(part, "head.projection") is not None
    data = SimpleNamespace(classes=[str(i) for i in range(CLASSES)] if unknown else [])
    module.trainer = SimpleNamespace(datamodule=data, current_epoch=0, global_step=1)
    module.setup("fit")
    module.log = module.log_dict = lambda *args, **kwargs: None
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.update = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return module


def make_batch(cfg: DictConfig, module: Any, images: int, device: str = "cpu") -> dict[str, Tensor]:
    """A batch: images, or with `cache=sources` the rows that the module's sources compute of them."""
    batch = {
        "image": torch.zeros(images, 3, *read_size(cfg.grid.image_size), dtype=torch.uint8, device=device),
        "index": torch.arange(images, device=device),
        "label": torch.arange(images, device=device) % 2,
    }
    if cfg.get("cache") is None:
        return batch
    rows = {
        name: torch.zeros(images, *shape, dtype=dtype, device=device)
        for name, (shape, dtype) in row_shapes(cfg, module, device).items()
    }
    return {key: batch[key] for key in ("index", "label")} | rows


@torch.no_grad()
def row_shapes(cfg: DictConfig, module: Any, device: str = "cpu") -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of the cached rows of one image, from calls of the sources with two images."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    images = make_batch(DictConfig({"grid": OmegaConf.to_container(cfg.grid, resolve=True)}), module, 2, device)
    was_training = module.training
    module.eval()
    for source in module.sources:
        for name, row in source(images).items():
            shapes[name] = tuple(row.shape[1:]), torch.float32 if row.is_floating_point() else row.dtype
    module.train(was_training)
    return shapes


@dataclass(frozen=True)
class Account:
    """Bytes of one device in a training step and in an evaluation batch."""

    images: int  # per step of this device, without accumulation of gradients
    frozen: int  # weights and buffers that are not trained
    trained: int  # weights that are trained
    gradients: int  # without those that lie in buckets
    states: int  # the optimiser's
    buckets: int  # of DDP; 0 for one device
    step: int  # peak of a training step, with all of the above
    evaluation: int  # peak of an evaluation batch; the gradients of the last step are still there

    @property
    def peak(self) -> int:
        """The larger of both peaks."""
        return max(self.step, self.evaluation)

    @property
    def activations(self) -> int:
        """What a step needs besides weights, the optimiser's states and buckets, at its peak."""
        return self.step - self.frozen - self.trained - self.states - self.buckets


class Steps:
    """Training steps and evaluation batches as Lightning runs them, with tensors of any kind.

    Args:
        cfg: the config of `train.py`.
        module: the module, on its device.
        device: the device of fake or real tensors.
        cuda: types and the optimiser's implementation as on CUDA.
    """

    def __init__(self, cfg: DictConfig, module: Any, device: str = "cpu", cuda: bool = True) -> None:
        self.cfg = cfg
        self.module = module
        self.trained = [weight for weight in module.parameters() if weight.requires_grad]
        self.optimizer = module.optimizer(self.trained)
        for group in self.optimizer.param_groups if cuda else ():
            if "foreach" in group:
                group["foreach"] = True
        precision = OmegaConf.to_container(cfg.trainer, resolve=False)["precision"]  # type: ignore[call-overload, index]
        mixed = cuda and precision != "32-true"
        amp = partial(torch.autocast, "cuda", torch.bfloat16) if device == "cuda" else cuda_autocast
        self.types: Any = amp if mixed else nullcontext
        self.accumulated = cfg.trainer.accumulate_grad_batches
        sizes = [weight.numel() for weight in self.trained]
        distributed = cuda and cfg.trainer.devices != 1
        strategy = cfg.trainer.strategy
        self.buckets = torch.zeros(sum(sizes) if distributed else 0, device=device)
        self.views = distributed and not isinstance(strategy, str) and strategy.gradient_as_bucket_view
        parts = self.buckets.split(sizes) if self.views else [torch.zeros_like(weight) for weight in self.trained]
        for weight, gradient in zip(self.trained, parts, strict=True):
            weight.grad = gradient.view_as(weight)
        self.optimizer.step()

    def train(self, batch: dict[str, Tensor]) -> None:
        """One step, or with accumulation the last part of one."""
        self.update(self.loss(batch))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The forward pass."""
        self.module.train()
        with self.types():
            return self.module.training_step(batch, 0) / self.accumulated

    def update(self, loss: Tensor) -> None:
        """The backward pass and the optimiser. Lightning sets gradients to None between forward and backward pass."""
        if self.accumulated == 1:
            self.optimizer.zero_grad(set_to_none=not self.views)
        loss.backward()
        if self.cfg.trainer.gradient_clip_val is not None:
            clip_grad_norm_(self.trained, self.cfg.trainer.gradient_clip_val)
        self.optimizer.step()

    def evaluate(self, batch: dict[str, Tensor]) -> None:
        """One validation step."""
        self.module.eval()
        with torch.no_grad(), self.types():
            self.module.validation_step(batch, 0)


def account(cfg: DictConfig, cuda: bool = True) -> Account:
    """The bytes of one device, computed with fake tensors.

    Args:
        cfg: the config of `train.py`.
        cuda: as on CUDA; otherwise float32 on a CPU.
    """
    images = cfg.data.batch_size
    with fake(partial(build, cfg)) as (module, memory):
        weights = memory.current
        steps = Steps(cfg, module, cuda=cuda)
        trained = count_bytes(steps.trained)
        gradients = 0 if steps.views else trained
        buckets = count_bytes([steps.buckets])
        states = count_bytes(tree_leaves(dict(steps.optimizer.state)))
        batch = make_batch(cfg, module, images)
        memory.restart()
        steps.train(batch)
        step = memory.peak
        del batch
        batch = make_batch(cfg, module, cfg.data.get("eval_batch_size") or images)
        memory.restart()
        steps.evaluate(batch)
        return Account(images, weights - trained, trained, gradients, states, buckets, step, memory.peak)
