# The commands behind docs/results/posthoc.md, from the root of the project: bash docs/results/posthoc.sh all|pairs|tables|corners
set -e
W="target=vit_tiny weights=vit_tiny_patch16_224.augreg_in1k.safetensors data_dir=data"

all() {
  python eval.py experiment=posthoc $W
  python eval.py experiment=posthoc $W name=posthoc_masks explainers=[kernel_shap] explainers.kernel_shap.budget=300 \
    'methods=[Saliency,DeepLift,ViTCX,Occlusion,TAM,IntegratedGradients,SmoothGrad,GradientSHAP,ScoreCAM,{RISE:{masks:300}},{LIME:{samples:300}}]'
  python eval.py experiment=posthoc $W name=posthoc_vit_cx explainers=[] 'methods=[{ViTCX:{features:norm,released:true}}]'
  python eval.py experiment=posthoc $W name=posthoc_direct explainers=[] methods=[DirectPaths]
  python train.py experiment=tve_vit_tiny $W
  python eval.py experiment=posthoc $W name=posthoc_tve explainers=[tve] explainers.tve.weights=runs/tve_vit_tiny/explainer.safetensors methods=[]
  python eval.py experiment=posthoc $W name=posthoc_drop evaluation.removals=[drop] \
    methods=[DecompX,DecompX-PLUS,DecompX-SkipPLUS,AttnLRP-PLUS,GAE,AttCAT,ALTI-Rollout,TokenTM]
}

pairs() {
  python eval.py experiment=posthoc $W name=posthoc_pairs methods=[GAE,AttnLRP-PLUS,DecompX-PLUS,DecompX-SkipPLUS,LibraGAE] trainer.precision=32-true
}

tables() {
  python eval.py figures=[ranking] name=posthoc_all results.files=[docs/results/posthoc.json]
  python eval.py name=posthoc_drop results.files=[docs/results/posthoc_drop.json]
  python eval.py name=posthoc_pairs_again results.files=[docs/results/posthoc_pairs.json] differences=DecompX-PLUS figures=[radar]
}

corners() {
  python - <<'END'
from itertools import islice

import torch

from explainers import Session

for method in ("DecompX-PLUS", "GAE", "AttnLRP-PLUS", "anyhead", "Chance"):
    session = Session("vit_tiny_patch16_224", method, weights="vit_tiny_patch16_224.augreg_in1k.safetensors")
    heatmaps = torch.stack([each.heatmap for each in islice(session.stream("data/imagenet_val"), 100)])
    top = heatmaps.flatten(1).topk(10).indices
    print(method, torch.isin(top, torch.tensor([0, 13, 182, 195])).float().sum(1).mean().item() / 4)
END
}

"$1"
