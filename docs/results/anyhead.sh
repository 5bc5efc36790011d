# The commands behind docs/results/anyhead.md, from the root of the project: bash docs/results/anyhead.sh train|tasks|images|deit|lite0|differences|parts
set -e
W="target=vit_tiny weights=vit_tiny_patch16_224.augreg_in1k.safetensors data_dir=data trainer.precision=bf16-mixed"

train() { # the explainer that is shipped, and the heads of the other tasks
  python train.py experiment=anyhead name=anyhead_vit_tiny data.train.roots=[data/imagenet_samples,data/imagenette/train,data/caltech] \
    data.val.roots=[data/imagenette/val] data.val.limit=200 trainer.max_epochs=8 trainer=ddp trainer.devices=2 data.batch_size=16 $W
  python train.py -m experiment=linear_head data=imagenette,cats_vs_dogs,cifar10 $W
}

tasks() {
  python eval.py experiment=studies/anyhead trainer=ddp trainer.devices=2 $W
  python eval.py results.files=[docs/results/anyhead.json] figures=[curves] differences=AttnLRP-PLUS name=anyhead_replot
}

deit() { # heads as in `train`; both results differ in the temperature alone
  D="target=deit_tiny weights=deit_tiny_patch16_224.in1k.fp16.safetensors data_dir=data trainer.precision=bf16-mixed trainer=ddp trainer.devices=2"
  python train.py experiment=anyhead name=anyhead_deit_tiny data.train.roots=[data/imagenet_samples,data/imagenette/train,data/caltech] \
    data.val.roots=[data/imagenette/val] data.val.limit=200 trainer.max_epochs=8 data.batch_size=16 $D
  python train.py -m experiment=linear_head data=imagenette,cats_vs_dogs,cifar10 $D trainer=default
  for TEMPERATURE in 2.0 1.0; do
    python eval.py experiment=studies/anyhead name=anyhead_deit_$TEMPERATURE $D explainers.anyhead.temperature=$TEMPERATURE \
      explainers.anyhead.weights=runs/anyhead_deit_tiny/explainer.safetensors tasks.imagenette.target.head=runs/imagenette_deit_tiny_head/head.safetensors \
      tasks.cats_vs_dogs.target.head=runs/cats_vs_dogs_deit_tiny_head/head.safetensors tasks.cifar10.target.head=runs/cifar10_deit_tiny_head/head.safetensors \
      'methods=[AttnLRP-PLUS,DecompX-PLUS,DecompX-SkipPLUS,{PathFlow:{output:log_odds}},GAE]'
  done
}

lite0() {
  E="target=efficientnet_lite0 weights=tf_efficientnet_lite0.in1k.fp16.safetensors data_dir=data trainer.precision=bf16-mixed trainer=ddp trainer.devices=2"
  python train.py experiment=anyhead name=anyhead_lite0 data.train.roots=[data/imagenet_samples,data/imagenette/train,data/caltech] data.train.limit=3000 \
    data.val.roots=[data/imagenette/val] data.val.limit=200 trainer.max_epochs=8 data.batch_size=16 $E
  python train.py -m experiment=linear_head data=imagenette,cats_vs_dogs,cifar10 data.limit.train=1500 $E trainer=default
  python eval.py experiment=studies/anyhead name=anyhead_lite0_eval $E explainers=[chance,anyhead] explainers.anyhead.weights=runs/anyhead_lite0/explainer.safetensors \
    'methods=[{CAM:{output:log_odds}},{GradCAM:{relu:false}},HiResCAM,IntegratedGradients,{StagePaths:{output:log_odds}}]' evaluation.removals=[zero,black] \
    evaluation.reference=HiResCAM tasks.imagenet_val.data.test.limit=100 tasks.imagenette.data.limit.test=50 tasks.cats_vs_dogs.data.limit.test=50 \
    tasks.cifar10.data.limit.test=50 tasks.imagenette.target.head=runs/imagenette_efficientnet_lite0_head/head.safetensors \
    tasks.cats_vs_dogs.target.head=runs/cats_vs_dogs_efficientnet_lite0_head/head.safetensors tasks.cifar10.target.head=runs/cifar10_efficientnet_lite0_head/head.safetensors
}

images() { # all 500 images
  python eval.py experiment=studies/anyhead $W explainers=[anyhead] methods=[AttnLRP-PLUS] ~tasks.imagenette ~tasks.cats_vs_dogs ~tasks.cifar10 \
    tasks.imagenet_val.data.test.limit=null figures=[] name=eval_500
}

parts() { # likewise the other rows; for paths=direct the second command also needs explainers.anyhead.network.paths=direct
  python train.py experiment=anyhead name=anyhead_1100 data.train.limit=1100 data.train.roots=[data/imagenet_samples,data/imagenette/train,data/caltech] \
    data.val.roots=[data/imagenette/val] data.val.limit=200 trainer.max_epochs=8 $W
  python eval.py experiment=studies/anyhead $W explainers=[anyhead] methods=[] evaluation.reference=null evaluation.removals=[zero,drop] \
    ~tasks.imagenette ~tasks.cats_vs_dogs ~tasks.cifar10 figures=[] explainers.anyhead.weights=runs/anyhead_1100/explainer.safetensors name=ablation_1100
}

differences() { # after `images`, whose results are committed
  python - <<'END'
from safetensors.torch import load_file

scores = load_file("docs/results/anyhead_500_scores.safetensors")
for removal in ("", "_black", "_drop"):
    for column in ("fidelity_plus", "fidelity_minus"):
        ours, other = (scores[f"imagenet_val/{name}/{column}{removal}"] for name in ("anyhead", "AttnLRP-PLUS"))
        print(column + removal, f"{(ours - other).mean():+.3f} ± {(ours - other).std() / len(ours) ** 0.5:.3f}")
END
}

"$1"
