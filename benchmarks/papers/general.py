"""Explains the images of a task with the explainer of a general classifier (TVE, Section 6.4)."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.inputs import validate_classes


class General(nn.Module):
    """Explains a class of a general classifier, such as one of ImageNet's 1000 classes, in the images of a task.

    TVE-H_g and a transferred ViT-Shapley explain in this way tasks that share no class with the general classifier. So
    does an explainer of another backbone that knows the same classes, such as that of ViT-B for ResNet-50 (Table 5).

    Args:
        target: the model of the task.
        explainer: explains the classes of `classifier`.
        classifier: the general classifier.
        class_map: the general class to explain for each class of the task; `same` for the class of the same number.
            `None` explains the class that the general classifier predicts, and ignores the requested class.

    Raises:
        InputError: if `class_map` has another length than the task has classes, or names a class that `classifier`
            lacks.
    """

    class_map: Tensor | None

    def __init__(
        self,
        target: TargetModel,
        explainer: nn.Module,
        classifier: TargetModel,
        class_map: Sequence[int] | Literal["same"] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(class_map, str):
            if class_map != "same":
                raise InputError(f"expected class_map=same, a list of classes or null, got {class_map}")
            class_map = range(classifier.num_classes)
        self.explainer = explainer.eval()
        self.classifier = classifier.eval()
        self.ignores_classes = class_map is None
        self.signed = getattr(explainer, "signed", None)
        self.forward_passes = getattr(explainer, "forward_passes", 1) + self.ignores_classes
        if class_map is not None and len(class_map) != target.num_classes:
            raise InputError(
                f"expected in class_map the general class of each of the task's {target.num_classes} classes, got "
                f"{len(class_map)} classes: give one for every class"
            )
        if class_map is not None and not 0 <= min(class_map) <= max(class_map) < classifier.num_classes:
            raise InputError(
                f"class_map names general classes {min(class_map)} to {max(class_map)}, and the general classifier has "
                f"{classifier.num_classes} classes, numbered from 0"
            )
        mapped = None if class_map is None else torch.tensor(list(class_map))
        self.register_buffer("class_map", mapped, persistent=False)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain `classes` (B,) of the task in uint8 images (B, C, H, W): heatmaps (B, rows, columns)."""
        explainer: Any = self.explainer
        return explainer(images, self.general_classes(images, classes))

    def general_classes(self, images: Tensor, classes: Tensor) -> Tensor:
        """The general class to explain in each image, (B,)."""
        grid: Any = getattr(self.explainer, "grid", None)
        if grid is not None:
            grid.check(images)
        if self.class_map is not None:
            return self.class_map[validate_classes(classes, images, len(self.class_map))]
        with torch.no_grad():
            return self.classifier(images).argmax(-1)
