"""The benchmark of the parts of an explainability vector: the parts are what they are called, and are measured."""

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from toys import exported

from benchmarks import vector_parts
from explainers.models import TargetModel

MODEL = {"model_name": "test_vit", "img_size": 48}


def write_task(folder):
    """Write the weights of a base model and the images of two classes; returns the model."""
    torch.manual_seed(0)
    model = timm.create_model(**MODEL)
    save_file(model.state_dict(), folder / "base.safetensors")
    for split in ("train", "val"):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (48, 48), (60 * number, 90, 200)).save(folder / split / name / f"{number}.png")
    return TargetModel(model)


def test_parts_of_a_vector():
    generator = torch.Generator().manual_seed(0)
    names = [f"blocks.{number}.{layer}.weight" for number in range(6) for layer in ("mlp.fc1", "attn")]
    tau = {name: torch.randn(6, 6, generator=generator) for name in names}
    tau["norm.bias"] = torch.randn(6, generator=generator)
    parts = vector_parts.split_vector(tau, [2], [0.5])
    assert list(parts) == ["λ₂ = 0.5", "rank 2", *list(parts)[2:]] and len(parts) == 7
    for name, matrix in parts["rank 2"].items():
        if matrix.dim() == 2:
            assert torch.linalg.matrix_rank(matrix) == 2, name
    kept = torch.cat([value.flatten() for value in parts["a fifth of the entries"].values()])
    whole = torch.cat([value.flatten() for value in tau.values()])
    assert kept.count_nonzero() == -(-len(whole) // 5) or kept.count_nonzero() == len(whole) // 5
    assert kept[kept != 0].abs().min() >= whole[kept == 0].abs().max()
    kept = {name: {key for key, value in part.items() if value.any()} for name, part in parts.items()}
    assert kept["last four blocks"] == {*names[4:], "norm.bias"}
    assert kept["without MLPs"] == {*names[1::2], "norm.bias"}
    assert kept["without attention"] == {*names[::2], "norm.bias"}
    assert torch.equal(parts["λ₂ = 0.5"]["norm.bias"], tau["norm.bias"] / 2)


@pytest.mark.slow
def test_teachers_and_every_part_are_measured(tmp_path, capsys):
    base = write_task(tmp_path)
    source = exported(base, base.grid, tmp_path / "source", alpha=0.5, seed=1, noise=0.1)
    onto = exported(base, base.grid, tmp_path / "onto", seed=2, classes=2)
    places = {"weights": tmp_path / "base.safetensors", "source": source, "onto": onto, "data": tmp_path}
    files = [word for name, place in places.items() for word in (f"--{name}", str(place))]
    small = ["--model", "test_vit", "--image-size", "48", "--explained", "3", "--ranks", "4", "--budgets", "4", "8"]
    vector_parts.main([*files, *small, "--methods", "DirectPaths"])
    lines = capsys.readouterr().out.strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    parts = vector_parts.split_vector({"blocks.0.w": torch.ones(2)}, [4], [0.5, 0.75, 1.0])
    teachers = ["chance", "DirectPaths", "KernelSHAP, 4 passes", "KernelSHAP, 8 passes"]
    assert [row[0] for row in rows[2:]] == [*teachers, "no vector", *parts]
    assert len({tuple(row[1:4]) for row in rows[6:]}) > 6  # the weights of no part are those of another one
    assert rows[2][4].startswith("0.000") and all(row[5] == "–" for row in rows[2:6])
    for row in rows[2:]:
        plus, minus, difference, rho = (float(cell.split(" ")[0]) for cell in row[1:5])
        assert difference == pytest.approx(plus - minus, abs=2e-3) and -1 <= rho <= 1
    assert all(0 <= float(row[5]) <= 1 for row in rows[6:])
