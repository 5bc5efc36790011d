"""Images with what the explainer's loss needs of the target: computed once, kept on disk, read ever after."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm import tqdm

from datamodules.datasets import Sample
from datamodules.images import Images, collate, rank_and_world_size
from datamodules.store import Rows, Store


class StoredRows(Dataset[Rows]):
    """The rows of a store as samples; those left out, of corrupt images, are not among them."""

    def __init__(self, store: Store) -> None:
        self.store, self.rows = store, store.present()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Rows:
        return {"index": torch.tensor(self.rows[index])} | self.store.read(self.rows[index])


def collate_readable(samples: list[Sample | None]) -> dict[str, Tensor] | None:
    """A batch, or None where all are corrupt: the missing rows of a store that is as full as it gets."""
    return collate(samples) if any(sample is not None for sample in samples) else None


class Attributions(Images):
    """`Images` whose batches hold, instead of pixels, what `attributions` of the module in training makes of them.

    The first run computes them, with a progress bar, and goes on where a killed one stopped; every later run with the
    same backbone, images, patches and precision only reads. There are no random crops: images stay as they are.

    Args:
        folder: where the attributions are kept.
        compute_batch_size: images at a time while computing.
        train, val, test, batch_size, eval_batch_size, num_workers, seed: as of `Images`.
    """

    def __init__(
        self,
        folder: str,
        compute_batch_size: int = 16,
        train: Callable[[], Dataset] | None = None,
        val: Callable[[], Dataset] | None = None,
        test: Callable[[], Dataset] | None = None,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        num_workers: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(train, val, test, batch_size, eval_batch_size, num_workers, seed)
        self.folder, self.compute_batch_size = folder, compute_batch_size

    def samples(self, split: str) -> Dataset:
        """The rows of all images of a split, the missing ones computed by the module in training."""
        trainer: Any = self.trainer
        module, dataset, (rank, world_size) = trainer.lightning_module, self.dataset(split), rank_and_world_size(self)
        if trainer.fast_dev_run:
            return dataset  # the module computes the few that it needs
        key = module.attribution_key() | {"images": dataset.fingerprint(), "precision": str(trainer.precision)}
        store = Store(self.folder, key, len(dataset))
        missing = [index for index in store.missing() if index % world_size == rank]
        loader = DataLoader(
            Subset(dataset, missing), self.compute_batch_size, num_workers=self.num_workers, collate_fn=collate_readable
        )
        for batch in tqdm(loader, f"attributions ({split})", disable=not missing or rank > 0, unit="batch"):
            if batch is not None:
                store.write(batch["index"], self._compute(module, batch))
        trainer.strategy.barrier("attributions")
        return StoredRows(store)

    def _compute(self, module: Any, batch: dict[str, Tensor]) -> Rows:
        training = module.training
        with torch.no_grad(), self.trainer.precision_plugin.forward_context():  # type: ignore[union-attr]
            rows = module.eval().attributions(module.transfer_batch_to_device(batch, module.device, 0))
        module.train(training)
        return rows
