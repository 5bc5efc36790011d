"""An explainer of a general classifier, put to use on another task (TVE, Section 6.4)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from explainers.target import TargetModel


class General(nn.Module):
    """Explains images of a task by what a general classifier, say of ImageNet's 1000 classes, sees in them.

    Without `class_map` it explains the class that the general classifier predicts, whatever is asked for: so TVE-H_g
    and a transferred ViT-Shapley name a class where the two tasks have none in common.

    Args:
        explainer: explains the classes of `classifier`.
        classifier: the general one.
        class_map: for every class of the task its counterpart among the general ones; it is explained instead.

    Raises:
        ValueError: for a general class that the classifier does not have; in use, for a class without counterpart.
    """

    class_map: Tensor | None

    def __init__(self, explainer: nn.Module, classifier: TargetModel, class_map: Sequence[int] | None = None) -> None:
        super().__init__()
        self.explainer, self.classifier = explainer.eval(), classifier.eval()
        if class_map is not None and max(class_map) >= classifier.num_classes:
            raise ValueError(
                f"class_map names general class {max(class_map)}, and the general classifier has "
                f"{classifier.num_classes} classes, numbered from 0"
            )
        self.register_buffer(
            "class_map", None if class_map is None else torch.tensor(list(class_map)), persistent=False
        )

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain uint8 images (B, C, H, W), `classes` (B,) being those of the task: heatmaps (B, P, P)."""
        explainer: Any = self.explainer
        return explainer(images, self.general_classes(images, classes))

    def general_classes(self, images: Tensor, classes: Tensor) -> Tensor:
        """The general class that is explained in each image, (B,)."""
        if self.class_map is None:
            with torch.no_grad():
                return self.classifier(images).argmax(-1)
        if classes.max() >= len(self.class_map):
            raise ValueError(
                f"class_map holds {len(self.class_map)} classes of the task, and class {int(classes.max())} came: give "
                "the general class of every class"
            )
        return self.class_map[classes]
