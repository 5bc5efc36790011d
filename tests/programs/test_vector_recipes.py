"""The benchmark of recipes of fine-tuning: each changes what it is called after, and its model takes the vector."""

import pytest
import torch
from test_vector_parts import write_task

from benchmarks import vector_recipes
from explainers.vectors.fixed_head import fix_own_head
from explainers.vectors.self_explaining import SelfExplaining


@pytest.mark.slow
def test_lora_is_merged_and_changes_no_other_weight(tmp_path):
    base = write_task(tmp_path).eval()
    images, labels = torch.randint(256, (8, 3, 48, 48), dtype=torch.uint8), torch.arange(8) % 2
    before = base.backbone.state_dict()
    for recipe in vector_recipes.RECIPES[:3]:
        tuned = vector_recipes.fine_tune(base, recipe, images, labels, steps=2)
        moved = {name: value - before[name] for name, value in tuned.backbone.state_dict().items()}
        rank = torch.linalg.matrix_rank(moved["blocks.5.attn.proj.weight"], rtol=1e-3)
        assert rank == 8 if recipe == "LoRA" else rank > 8
        assert moved["norm.bias"].any() == moved["blocks.0.mlp.fc1.weight"].any() == (recipe != "LoRA")
        assert not any(weight.requires_grad for weight in [*tuned.parameters(), tuned.head.weight])


@pytest.mark.slow
def test_models_of_all_recipes_take_the_vector(tmp_path, capsys):
    source = SelfExplaining(base := write_task(tmp_path), base.grid, alpha=1, last_blocks=3)
    source.target.head = fix_own_head(source.target, "blank_patch", 1.0)
    for weight in source.target.backbone.parameters():
        weight.data += 0.1 * torch.randn(weight.shape) * weight.requires_grad
    places = {"weights": tmp_path / "base.safetensors", "vector": source.export(tmp_path / "source"), "data": tmp_path}
    small = ["--model=test_vit", "--image-size=48", "--explained=2", "--steps=4", "--restore=4", "--lambdas=1"]
    vector_recipes.main([*small, *(f"--{name}={place}" for name, place in places.items())])
    lines = capsys.readouterr().out.strip().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names = [[recipe, name] for recipe in vector_recipes.RECIPES for name in ("chance", "λ₂ = 0", "λ₂ = 1")]
    assert [[row[0], row[2]] for row in rows] == names and all(0 < float(row[1]) < 0.5 for row in rows)
    for chance, paths, added in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert chance[-1] == paths[-1] and paths[3:6] != added[3:6]  # the accuracy is the fine-tuned model's own
