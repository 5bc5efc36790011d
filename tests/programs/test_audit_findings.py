"""What single groups do: the benchmark of findings moves patches between photos."""

import pytest
import torch

from benchmarks.audit_findings import move
from explainers.models.scores import log_odds


def test_moved_patches_are_those_of_the_donor(target):
    receivers, donors = torch.randint(0, 256, (2, 2, 3, *target.grid.size), dtype=torch.uint8)
    patches = torch.zeros(2, target.grid.num_patches, dtype=torch.bool)
    patches[:, 1] = True
    mixed, side = receivers.clone(), target.grid.patch_size
    mixed[:, :, :side, side : 2 * side] = donors[:, :, :side, side : 2 * side]
    with torch.no_grad():
        whole, moved = (
            log_odds(target.classify(target.embed(target.normalise(each))), torch.tensor([1, 1]), target.score)
            for each in (receivers, mixed)
        )
    found = move(target, target.grid, patches, receivers, (donors, donors), 1)
    assert found["group"]["mean"] == pytest.approx((moved - whole).mean().item(), abs=1e-5) != 0
    assert found["difference"]["mean"] == 0 and found["difference"]["images"] == 2
    found = move(target, target.grid, patches, receivers, (donors, receivers), 1)
    assert found["same_places"]["mean"] == 0 and found["difference"]["mean"] == found["group"]["mean"]
