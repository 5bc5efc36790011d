"""Explanations by masks and gradients, written out one image, one mask and one pixel at a time (see `references`)."""

import math

import torch
from references import both, neighbourhood, only, window


def patch_means(pixels, side):
    """The mean of each patch of a map (H, W), (rows, columns)."""
    rows, columns = both(side)
    means = torch.zeros(rows, columns)
    for patch in range(rows * columns):
        values = pixels[window(patch, side, len(pixels) // rows)].flatten().tolist()
        means[divmod(patch, columns)] = sum(values) / len(values)
    return means


def bilinear(small, size):
    """A map (h, w) stretched to `size`, (H, W); beyond the centres of the outer tokens it is constant."""
    (rows, columns), (height, width) = small.shape, both(size)
    values, large = small.tolist(), []

    def between(count, size, i):
        at = min(max((i + 0.5) * count / size - 0.5, 0), count - 1)
        return int(at), min(int(at) + 1, count - 1), at - int(at)

    for i in range(height):
        upper, lower, down = between(rows, height, i)
        large.append([])
        for j in range(width):
            left, right, across = between(columns, width, j)
            above = (1 - across) * values[upper][left] + across * values[upper][right]
            below = (1 - across) * values[lower][left] + across * values[lower][right]
            large[i].append((1 - down) * above + down * below)
    return torch.tensor(large, dtype=torch.double)


def unit(pixels):
    """A map from its least value, 0, to its greatest, 1."""
    low, high = pixels.min(), pixels.max()
    return (pixels - low) / (high - low)


def gradients(score, images):
    """∂ score / ∂ image of each of several normalised images (B, C, H, W)."""
    pixels = torch.stack(images).requires_grad_()
    return torch.autograd.grad(score(pixels).sum(), pixels)[0]


def smooth_grad(score, image, noises, side):
    """|mean gradient|, the maximum of the channels, the mean of a patch; one noise of zeros is Simyonan's saliency."""
    mean = sum(gradients(score, [image + noise for noise in noises])) / len(noises)
    return patch_means(mean.abs().max(0).values, side)


def path(score, image, positions, side, multiply=True):
    """The sum in a patch of x ⊙ ∇f(t x), of ∇f(t x) alone unless `multiply`; the mean over positions t."""
    total = torch.zeros_like(image)
    for gradient in gradients(score, [position * image for position in positions]):
        total += gradient * (image if multiply else 1) / len(positions)
    return patch_means(total.sum(0), side) * (image.shape[-1] // both(side)[1]) ** 2


def occlusion(predict, image, label, side, hops):
    """What the probability loses without the patches around z."""
    everything, heatmap = set(range(math.prod(both(side)))), torch.zeros(both(side))
    for patch in everything:
        hidden = only(image, everything - neighbourhood(patch, side, hops), side)
        drop = predict(image[None])[0, label] - predict(hidden[None])[0, label]
        heatmap[divmod(patch, both(side)[1])] = drop
    return heatmap


def rise_mask(grid, row, column, size):
    """Grid (c, c) stretched to one cell more than the image, from which the window at (row, column) is cut."""
    cells = len(grid)
    height, width = both(size)
    large = bilinear(grid, [(cells + 1) * math.ceil(side / cells) for side in (height, width)])
    return large[row : row + height, column : column + width]


def rise(predict, image, label, masks, probability, side):
    """Σ f(x ⊙ M) M / (p · number of masks), averaged over patches."""
    heatmap = torch.zeros(image.shape[1:])
    for mask in masks:
        score = predict((image * mask.float())[None])[0, label].item()
        heatmap += score * mask.float() / (probability * len(masks))
    return patch_means(heatmap, side)


def score_cam(predict, image, label, features, side):
    """ReLU(Σ softmax(scores)_c A_c) of feature maps (C, h, w), averaged over patches (Wang et al., 2020)."""
    maps = [bilinear(feature, image.shape[1:]) for feature in features]
    scores = [predict((image * unit(each).float())[None])[0, label].item() for each in maps]
    shares = [math.exp(score) / sum(math.exp(other) for other in scores) for score in scores]
    return patch_means(sum(share * each for share, each in zip(shares, maps, strict=True)).clamp(min=0), side)


def summed(predict, image, label, masks, side):
    """Σ f(x ⊙ M) M (ViT-CX, Equation 1)."""
    total = sum(predict((image * mask.float())[None])[0, label].item() * mask for mask in masks)
    return patch_means(total, side)


def distance(mask, other):
    """1 − the cosine of two masks (H, W)."""
    return 1 - (mask * other).sum().item() / math.sqrt(mask.square().sum().item() * other.square().sum().item())


def clusters(masks, delta):
    """Complete linkage: join the two clusters whose farthest members are closest, as long as these are nearer than δ.

    A list of lists of the numbers of masks.
    """
    count = len(masks)
    apart = {(i, j): distance(masks[i], masks[j]) for i in range(count) for j in range(count)}
    groups = [[i] for i in range(count)]
    while len(groups) > 1:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a)]
        farthest = {(a, b): max(apart[i, j] for i in groups[a] for j in groups[b]) for a, b in pairs}
        closest = min(pairs, key=farthest.get)
        if farthest[closest] >= delta:
            break
        groups[closest[1]] += groups.pop(closest[0])
    return sorted(sorted(group) for group in groups)


def vit_cx(predict, image, label, masks, delta, noises, side, rescale=False, combine="corrected"):
    """S^c of masks (H, W) (ViT-CX, Equations 2 and 5), averaged over patches; `noises` of a mask's first member.

    S without correction (Equation 1) for `combine="sum"`; without clusters for δ = 0.
    """
    merged, scores = [], []
    for group in clusters(masks, delta) if delta else [[i] for i in range(len(masks))]:
        mask = sum(masks[i] for i in group) / len(group)
        mask = unit(mask) if rescale else mask
        noise = (1 - mask.float()) * noises[group[0]]
        seen, noisy, clean = image * mask.float() + noise, image + noise, image
        f = [predict(each[None])[0, label].item() for each in (seen, clean, noisy)]
        merged.append(mask)
        scores.append(f[0] + f[1] - f[2])
    plain = sum(score * mask for score, mask in zip(scores, merged, strict=True))
    return patch_means(plain if combine == "sum" else corrected(merged, scores), side)


def corrected(masks, scores):
    """Σ s M / ρ, where the coverage ρ is the mean of the masks; 0 where ρ is 0."""
    saliency = torch.zeros(masks[0].shape, dtype=torch.double)
    of_pixels = torch.stack(masks, -1).tolist()
    for row in range(saliency.shape[0]):
        for column in range(saliency.shape[1]):
            values = of_pixels[row][column]
            coverage = sum(values) / len(values)
            if coverage > 1e-6:
                total = sum(score * value for score, value in zip(scores, values, strict=True))
                saliency[row, column] = total / coverage
    return saliency


def lime(predict, image, label, keeps, alpha, width):
    """Ridge regression (N,) on visible patches: the least Σ π (y − b − Σ w_z)² + α |w|², by its normal equations."""
    count = len(keeps[0])
    side = math.isqrt(count)
    system, wanted = torch.zeros(count + 1, count + 1, dtype=torch.double), torch.zeros(count + 1, dtype=torch.double)
    for keep in keeps:
        masked = only(image, {z for z in range(count) if keep[z]}, side)
        lengths = image.norm().item() * masked.norm().item()
        cosine = (image * masked).sum().item() / lengths if lengths else 0.0
        weight = math.exp(-((1 - cosine) ** 2) / (2 * width**2))
        row = torch.tensor([float(kept) for kept in keep] + [1.0], dtype=torch.double)
        system += weight * row[:, None] * row
        wanted += weight * predict(masked[None])[0, label].item() * row
    for patch in range(count):
        system[patch, patch] += alpha
    return torch.linalg.solve(system, wanted)[:count]
