"""A recorded forward pass is the forward pass, and the model is afterwards what it was."""

import pytest
import torch

from explainers.posthoc.propagation import FROZEN, LRP_RULES
from explainers.transformer.recording import record_pass
from explainers.transformer.rules import Rules

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
SWIN = {"img_size": 32, "embed_dim": 12, "depths": (2, 1), "num_heads": (2, 2), "window_size": 4}
MODELS = {
    "vit": ("vit_tiny_patch16_224", {"init_values": 0.5}),
    "average": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "registers": ("vit_small_patch14_reg4_dinov2", {}),
    "DINOv3": ("vit_small_patch16_dinov3", {}),
    "EVA": ("eva02_tiny_patch14_224", TINY),  # rotary positions, SwiGLU
    "separate EVA": ("eva02_base_patch14_224", TINY),  # with a norm inside the MLP, and queries of their own
    "no biases": ("aimv2_large_patch14_224", TINY),  # and RMSNorm
    "Swin": ("swin_tiny_patch4_window7_224", SWIN),
}
RULES = {
    "gradient": Rules(),
    "frozen": FROZEN,
    "AttnLRP": Rules("halved", "frozen", "ratio"),
    "ResLRP": Rules("halved", "frozen", "ratio", residual="signed"),
    "LRP": LRP_RULES,
}


@pytest.fixture(params=MODELS)
def target(request, make_target):
    name, arguments = MODELS[request.param]
    return make_target(name, **arguments)


def embed(target, images):
    return target.embed(target.normalise(images))


def record_embedding(target, images, *args, **kwargs):
    with record_pass(target, *args, **kwargs) as record:
        embeddings = embed(target, images)
    return record, embeddings


def test_a_recorded_pass_computes_what_the_model_computes(target, images):
    """Under each set of rules, with and without attention; and gradients of several functionals are those of each."""
    images, functionals = images[:2], torch.randn(2, 3, target.embed_dim)
    with torch.no_grad():
        expected = embed(target, images)
    for name, rules in RULES.items():
        record, embeddings = record_embedding(target, images, rules)
        torch.testing.assert_close(embeddings, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
        assert not (record.attention or record.values or record.middles), name
        together = record.gradients(embeddings, functionals, record.inputs)
        alone = record.gradients(embeddings, functionals[:, 1, None], record.inputs)
        for all_of_them, one in zip(together, alone, strict=True):
            size = all_of_them.abs().max().item()
            torch.testing.assert_close(all_of_them[:, 1], one[:, 0], rtol=1e-3, atol=1e-4 * size)
        record, embeddings = record_embedding(target, images, rules, attention=True, biases=True, start=1)
        torch.testing.assert_close(embeddings, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
        count = len(record.inputs)
        assert len(record.outputs) == len(record.biases) == count
        assert len(record.attention) == len(record.values) == len(record.middles) == count


def blocks_and_modules(target):
    blocks = [m for m in target.backbone.modules() if hasattr(m, "attn") and hasattr(m, "mlp")]
    return blocks, list(target.modules())


def condition(target):
    """Everything that a trace could leave behind."""
    blocks, modules = blocks_and_modules(target)
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks), dict(m._backward_hooks)) for m in modules]
    flags = [block.attn.fused_attn for block in blocks]
    weights = [(p.requires_grad, None if p.grad is None else p.grad.clone(), p.clone()) for p in target.parameters()]
    return hooks, flags, [m.training for m in modules], weights


def assert_equal(condition, other):
    assert condition[:3] == other[:3]
    for (needs, grad, weight), (needs_other, grad_other, weight_other) in zip(condition[3], other[3], strict=True):
        assert needs == needs_other and torch.equal(weight, weight_other)
        assert (grad is None) == (grad_other is None) and (grad is None or torch.equal(grad, grad_other))


@pytest.mark.situation(38)
def test_the_model_is_as_before(target, images):
    blocks, _ = blocks_and_modules(target)
    blocks[0].attn.fused_attn, blocks[-1].attn.fused_attn = False, True
    blocks[0].register_forward_hook(lambda *call: None)
    weights = list(target.parameters())
    weights[0].requires_grad_(False)
    weights[1].grad = torch.ones_like(weights[1])
    before = condition(target)
    record, embeddings = record_embedding(target, images, FROZEN, attention=True, biases=True)
    assert_equal(condition(target), before)
    record.gradients(embeddings, torch.ones(5, 2, embeddings.shape[1]), record.inputs)
    assert_equal(condition(target), before)
    assert torch.is_grad_enabled()
    with pytest.raises(KeyError, match="inside"), record_pass(target, FROZEN):
        embed(target, images)
        raise KeyError("inside")
    assert_equal(condition(target), before)


def test_plain_gradients_are_those_of_the_model(target, images):
    record, embeddings = record_embedding(target, images, attention=True)
    functionals = torch.randn(5, 1, embeddings.shape[1])
    (gradient,) = record.gradients(embeddings, functionals, record.inputs[:1])
    first = blocks_and_modules(target)[0][0]
    seen = []
    hook = first.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    output = (embed(target, images) * functionals[:, 0]).sum()
    hook.remove()
    (expected,) = torch.autograd.grad(output, seen)
    torch.testing.assert_close(gradient[:, 0], expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_attention_rows_sum_to_one_and_make_the_output_of_attention(target, images):
    blocks, _ = blocks_and_modules(target)
    outputs = []
    hooks = [block.attn.register_forward_hook(lambda *call: outputs.append(call[-1])) for block in blocks]
    record, _ = record_embedding(target, images[:2], FROZEN, attention=True)
    for hook in hooks:
        hook.remove()
    for block, weights, values, output in zip(blocks, record.attention, record.values, outputs, strict=True):
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        heads = (weights @ values).transpose(1, 2).flatten(2)
        weight, bias = block.attn.proj.weight, block.attn.proj.bias
        torch.testing.assert_close(heads @ weight.T + (0 if bias is None else bias), output, rtol=1e-4, atol=1e-5)


def test_frozen_inputs_and_biases_sum_to_the_functional(target, images):
    """The network is then linear in its tokens and biases: nothing is lost, in any architecture."""
    target = target.double()
    record, embeddings = record_embedding(target, images[:2], FROZEN, biases=True)
    functionals = torch.randn(2, 3, embeddings.shape[1], dtype=torch.double)
    pairs = [(record.inputs[0], record.inputs[0]), *(pair for layer in record.biases for pair in layer)]
    gradients = record.gradients(embeddings, functionals, [output for output, _ in pairs])
    total = torch.zeros(2, 3, dtype=torch.double)
    for (output, summand), gradient in zip(pairs, gradients, strict=True):
        summand = summand[:, None] if summand is output else summand
        total += (gradient * summand).reshape(2, -1, 3, *gradient.shape[2:]).transpose(1, 2).flatten(2).sum(-1)
    torch.testing.assert_close(total, (functionals * embeddings[:, None]).sum(-1), rtol=1e-8, atol=1e-8)
