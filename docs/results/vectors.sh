# The commands behind docs/results/vectors.md, from the root of the project: bash docs/results/vectors.sh paper|real|digits|transfers
# `paper` needs data/{imagenette,cats_vs_dogs,cifar10}; `real` needs data/{imagenet_samples,imagenette,caltech,cats_vs_dogs,cifar10}; `transfers` needs `real` and `digits`.
# `paper` and `real` train other models under the same names: each needs a folder runs/ of its own.
set -e
DEIT="weights=deit_tiny_patch16_224.in1k.fp16.safetensors"
W112="weights=vit_tiny_patch16_224.augreg_in1k.safetensors data_dir=data trainer.precision=bf16-mixed"
TWO="trainer=ddp trainer.devices=2 data.batch_size=16"
TASKS="cats_vs_dogs cifar10 caltech_12"
DOMAINS=plain,inverted,coloured,small

data() { # 12 categories of Caltech-101 that the source does not see, and small versions of its own images
  mkdir -p data/small
  for c in buddha dolphin electric_guitar ewer flamingo hawksbill ketch laptop menorah minaret scorpion umbrella; do
    mkdir -p data/caltech_12/{train,val}/$c
    ln -sf $(ls -d $PWD/data/caltech/$c/* | head -40) data/caltech_12/train/$c
    ln -sf $(ls -d $PWD/data/caltech/$c/* | sed -n 41,60p) data/caltech_12/val/$c
  done
  python - <<'END'
from pathlib import Path
from PIL import Image, ImageOps

left_out = {path.name for path in Path("data/caltech_12/train").iterdir()}
roots = "imagenet_samples", "imagenette/train", "caltech"
paths = [path for root in roots for path in sorted(Path("data", root).rglob("*.*")) if path.parent.name not in left_out]
for number, path in enumerate(paths[::4]):
    ImageOps.fit(Image.open(path).convert("RGB"), (32, 32)).save(f"data/small/{number:05}.png")
END
}

real() { # of ViT-Tiny, or `real deit` of DeiT-Tiny: the same commands
  data
  local OPTIONS=$W112 PREFIX= SUFFIX= MODELS=models=runs
  if [ "$1" = deit ]; then OPTIONS="target=deit_tiny ${W112/#weights=*.safetensors/$DEIT}" PREFIX=deit/ SUFFIX=_deit MODELS=models=runs/deit; fi
  python train.py experiment=studies/vector_source name=${PREFIX}studies_vector_source $TWO $OPTIONS
  for t in $TASKS; do
    python train.py experiment=studies/vector_target task=$t name=${PREFIX}${t}_predicting $TWO $OPTIONS
    python train.py experiment=studies/vector task=$t name=${PREFIX}vector_$t $MODELS $OPTIONS
    python train.py experiment=studies/vector task=$t name=${PREFIX}moved_$t module.lambda_2=1.0 $MODELS $OPTIONS
  done
  python eval.py experiment=studies/vectors name=vectors_real$SUFFIX trainer=ddp trainer.devices=2 $MODELS $OPTIONS
  CURVES="" # the sweeps of λ₂
  for t in $TASKS; do CURVES="$CURVES,$t:runs/${PREFIX}vector_$t/csv/version_0/metrics.csv"; done
  python eval.py results.files=[] name=vectors_real$SUFFIX figures=lambdas "figures.lambdas.files={${CURVES:1}}"
}

paper() { # the paper's own recipe, on 320 images of each task, each of which is the source of the two others
  local MODEL="target=vit_tiny +target.model.img_size=112 grid.image_size=112 grid.patch_size=16 ++grid.differs=false ${W112/bf16-mixed/32-true}"
  local IMAGES="data.halve=true data.limit.val=40" ALL="imagenette cats_vs_dogs cifar10"
  local FEW="module.head.scale=20 data.batch_size=32 trainer.max_epochs=20 data.limit.train=320 callbacks=train"
  for t in $ALL; do # the rate of `upper` explains better, but a vector that is learned with it destroys predictions
    python train.py experiment=self_explaining data=$t name=${t}_predicting module.alpha=1 module.teacher=null module.optimizer.lr=5e-5 $FEW $MODEL $IMAGES
    python train.py experiment=self_explaining data=$t name=${t}_explaining module.optimizer.lr=5e-5 $FEW $MODEL $IMAGES
    python train.py experiment=self_explaining data=$t name=${t}_upper module.optimizer.lr=2e-4 $FEW $MODEL $IMAGES
  done
  for t in $ALL; do
    local rows=""
    for s in ${ALL/$t/}; do
      python train.py experiment=explainability_vector data=$t source=$s name=vector_${s}_$t test=false $MODEL $IMAGES
      rows="$rows $(row from_$s runs/vector_${s}_$t/model.safetensors)"
    done
    python train.py experiment=explainability_vector data=$t vector=shipped name=shipped_$t lambda_2=1.0 test=false $MODEL $IMAGES
    rows="$rows $(row shipped runs/shipped_$t/model.safetensors) explainers.shipped.temperature=2"
    rows="$rows $(row paths runs/shipped_$t/scaled.safetensors) explainers.paths.temperature=2" # of the unchanged model
    python eval.py experiment=papers/vectors tasks=$t name=vectors_paper_$t ~explainers.transferred $rows methods=[DecompX-PLUS] "figures.passes.one=[chance,upper_bound]" \
      explainers.no_transfer_scaled.weights=runs/vector_${s}_$t/scaled.safetensors explainers.upper_bound.weights=runs/${t}_upper/model.safetensors \
      $MODEL tasks.$t.data.halve=true tasks.$t.data.batch_size=10 test_images=30
  done
}

row() { # a self-explaining model as one more row: its name and its file
  echo "+explainers@explainers.$1=self_explainer explainers.$1.weights=$2"
}

digits() {
  python train.py experiment=demo/base trainer=ddp trainer.devices=2
  python train.py -m experiment=demo/predicting data.domain=$DOMAINS
  python train.py -m experiment=demo/source data.without=$DOMAINS
  python train.py -m experiment=demo/vector data.domain=$DOMAINS
  python train.py -m experiment=demo/source name=demo_explaining data.domain=$DOMAINS data.without=null \
    'explainer.weights=runs/demo_predicting/${data.domain}/model.safetensors' \
    'title=A model of ${data.domain} digits that predicts and explains itself' 'hydra.sweep.subdir=${data.domain}'
  python eval.py experiment=studies/vectors_digits trainer=ddp trainer.devices=2
  change default
  change propagation teacher@module.loss=propagation ~module.loss.pairs
  change alpha module.alpha=0.5
  change decay module.optimizer.weight_decay=0.1
  change pairs module.loss.pairs=8
  change blank explainer.reading=blank_patch
}

change() { # its name, and the options of the source
  python train.py -m experiment=demo/source name=source_$1 data.without=$DOMAINS "${@:2}"
  python train.py -m experiment=demo/vector name=vector_$1 sources=runs/source_$1 data.domain=$DOMAINS module.labels.prior=null \
    module.labels.budget=200 data.size.val=400
}

transfers() {
  python train.py -m experiment=demo/vector name=transfers source=$DOMAINS data.domain=$DOMAINS sources=runs/demo_explaining \
    'module.vector.predicting=[${models}/${source}/model.safetensors]' 'hydra.sweep.subdir=${source}/${data.domain}'
  for s in $TASKS; do
    python train.py experiment=studies/vector_source name=${s}_explaining explainer.weights=runs/${s}_predicting/model.safetensors \
      data.train.roots=[data/$s/train] 'data.train.exclude=[]' data.train.limit=500 \
      data.val.roots=[data/$s/val] data.val.limit=60 trainer.max_epochs=6 module.optimizer.lr=1e-3 callbacks=train $TWO $W112
    for t in $TASKS; do
      python train.py experiment=studies/vector task=$t name=transfers/$s/$t source=runs/${s}_explaining/model.safetensors \
        module.vector.predicting=[runs/${s}_predicting/model.safetensors] $W112
    done
  done
  python eval.py results.files=[] name=vectors_similarity figures=similarity figures.similarity.folder=runs/transfers
  sum_of plain inverted coloured small
  sum_of inverted plain coloured small
  sum_of coloured plain inverted small
  sum_of small plain inverted coloured
}

sum_of() { # the target, and its sources
  p=$(printf ',runs/demo_predicting/%s/model.safetensors' "${@:2}") e=$(printf ',runs/demo_explaining/%s/model.safetensors' "${@:2}")
  python train.py experiment=demo/vector name=demo_sum/$1 data.domain=$1 "module.vector.predicting=[${p:1}]" "module.vector.explaining=[${e:1}]"
}

"$@"
