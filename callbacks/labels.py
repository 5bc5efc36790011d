"""Labels of a data set as logits of the model."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer


class LabelsAsLogits(Callback):
    """Replaces the labels in test batches by logits, for the module and for later callbacks.

    Args:
        logit_of: the logit of each label, see `match_classes`. A label of -1, for an unlabelled image, stays.
    """

    def __init__(self, logit_of: Sequence[int]) -> None:
        self.logit_of = list(logit_of)

    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        if self.logit_of != list(range(len(self.logit_of))):
            batch["label"] = torch.tensor([*self.logit_of, -1]).to(batch["label"])[batch["label"]]
