"""Modules whose inputs and outputs are what other libraries want: a target of normalised images, an exported graph."""

from typing import Any

import torch
from torch import Tensor, nn

from explainers.models import TargetModel


class NormalisedModel(nn.Module):
    """The view of a target that captum, Quantus and pytorch-grad-cam want: normalised float images → logits.

    It shares the weights of the target. Layers are found under `target.backbone`, as in timm:
    `GradCAM(model=view, target_layers=[view.target.backbone.layer4])` of pytorch-grad-cam.

    >>> import timm, torch
    >>> target = TargetModel(timm.create_model("test_resnet", num_classes=2)).eval()
    >>> images = torch.zeros(1, 3, 160, 160, dtype=torch.uint8)
    >>> torch.equal(NormalisedModel(target)(target.normalise(images)), target(images))
    True
    """

    def __init__(self, target: TargetModel) -> None:
        super().__init__()
        self.target = target
        self.eval()  # which Quantus checks

    def forward(self, inputs: Tensor) -> Tensor:
        """Classify images (B, C, H, W), normalised as `target.normalise` does → logits (B, K)."""
        return self.target.classify(self.target.embed(inputs))


class FunctionalGraph(nn.Module):
    """Explains functionals v of images by the vectors of an explainer, for torch.export and ONNX.

    Nothing depends on the number of images or functionals. `AnyHead.explain` chooses by the number of functionals what
    is faster, which a graph cannot.

    Args:
        explainer: an explainer with vectors c_z of patches, such as AnyHead.
    """

    def __init__(self, explainer: Any) -> None:
        super().__init__()
        self.explainer: Any = explainer

    def forward(self, images: Tensor, functionals: Tensor) -> Tensor:
        """Explain functionals (B, V, D) of the embedding in images (B, C, H, W): heatmaps (B, V, rows, columns)."""
        vectors, _ = self.explainer.decompose(images)
        with torch.autocast(images.device.type, enabled=False):
            heatmaps = functionals.float() @ vectors.float().mT
        return heatmaps.unflatten(-1, self.explainer.grid.shape)
