# Commands behind docs/papers.md, from the root of the project: bash docs/papers.sh models_tve|models_finetuned|models_vectors|tve|skipplus|tokentm|vit_cx|masks
# The first three train the models that docs/papers.yaml needs, at full size. The others made the tables of the page with ViT-Ti/16 and few images.
set -e
W="data_dir=/data"
W_TINY="target=vit_tiny weights=vit_tiny_patch16_224.augreg_in1k.safetensors data_dir=data trainer.precision=32-true"
W_DEIT="target=deit_tiny weights=deit_tiny_patch16_224.in1k.fp16.safetensors data_dir=data"

models_tve() { # for a target: vit_base, swin_base or deit_base; experiment=tve_vitb downloads facebook/vit-mae-base; data.download=true fetches CIFAR
  target=${1:-vit_base}
  T="target=$target"
  SHAPLEY="explainer.network.freeze=false" ROWS=
  case $target in
    swin*) SHAPLEY="explainers@explainer=shapley_light" ROWS="explainers@explainers.vit_shapley.explainer=shapley_light reference.target=Swin-Base" ;;
    deit*) ROWS="reference.target=DeiT-Base" ;;
  esac
  python train.py experiment=tve_vitb $T $W
  python train.py experiment=linear_head data=imagenette $T module.optimizer.lr=2e-4 trainer.max_epochs=5 $W
  python train.py experiment=linear_head data=cats_vs_dogs $T module.optimizer.lr=2e-4 trainer.max_epochs=5 $W
  python train.py experiment=linear_head data=cifar10_torchvision name=cifar10_${target}_head $T module.optimizer.lr=2e-4 trainer.max_epochs=5 $W
  python train.py experiment=vit_shapley $T $SHAPLEY data.train.roots=[/data/imagenet/train] data.val.roots=[/data/imagenet/val] data.num_workers=8 \
    cache=none trainer=ddp trainer.devices=4 trainer.max_epochs=-1 trainer.max_steps=200000 module.loss.coalitions=32 module.optimizer.lr=1e-4 $W
  python eval.py experiment=papers/tve $T $ROWS data@tasks.cifar10.data=cifar10_torchvision $W
  # Tables 6 to 8: target=vit_large data.batch_size=32 trainer.accumulate_grad_batches=2, heads of data=cifar100 and data=mura; they have no ViT-Shapley
}

models_finetuned() { # Figure 4 of TVE
  for task in imagenette cats_vs_dogs; do
    [ $task = imagenette ] && K=10 || K=2
    FT="target=vit_base task=$task target.model.num_classes=$K explainers@explainer=tve_paper cache=none module.loss.patches_per_image=1 module.min_crop=0.2"
    python train.py experiment=full_finetuning target=vit_base data=$task $W
    python train.py experiment=tve_finetune $FT $W
    python train.py experiment=tve_finetune arm=from_scratch explainer.weights=null $FT $W
  done
}

models_vectors() { # CLIP ViT-B/32 with text heads; data.download=true fetches what torchvision can, RESISC45 and Cars are folders
  CLIP="target=clip_vit_b32"
  TEXT="projection=text module.head.scale=100"
  PREDICTING="module.alpha=1 module.teacher=null"
  python train.py experiment=self_explaining data=imagenet_folder task=imagenet name=imagenet_predicting $PREDICTING $CLIP $TEXT $W
  python train.py experiment=self_explaining data=imagenet_folder task=imagenet name=imagenet_explaining $CLIP $TEXT $W
  # Epochs of the published code of task vectors; the paper does not say its own
  for one in cars:35 cifar10_torchvision:6 cifar100:6 dtd:76 eurosat:12 gtsrb:11 mnist:5 resisc45:15 sun397:14 svhn:4; do
    d=${one%:*} E=trainer.max_epochs=${one#*:}
    python train.py experiment=self_explaining data=$d name=${d}_predicting $PREDICTING $CLIP $TEXT $E $W
    python train.py experiment=self_explaining data=$d name=${d}_explaining $CLIP $TEXT $E $W
    python train.py experiment=explainability_vector source=imagenet data=$d name=vector_$d $CLIP $W
    python eval.py experiment=papers/vectors tasks=$d tasks.$d.data.halve=true test_images=200 $W
  done
}

tve() {
  python train.py experiment=tve_vit_tiny module.loss.patches_per_image=4 $W_TINY
  python train.py experiment=linear_head data=imagenette data.limit.train=1000 data.limit.val=200 $W_TINY
  python train.py experiment=linear_head data=cats_vs_dogs data.limit.train=1000 data.limit.val=200 $W_TINY
  python eval.py experiment=papers/tve explainers@explainers.tve=tve '~explainers.vit_shapley' 'tasks=[imagenette,cats_vs_dogs]' evaluation.levels=11 \
    evaluation.chunk_size=64 test_images=30 $W_TINY trainer.precision=bf16-mixed
  python eval.py name=replot results.files=[docs/results/tve_imagenette.json,docs/results/tve_cats_vs_dogs.json] figures=[curves,bars]
}

skipplus() {
  python eval.py experiment=papers/skipplus $W_TINY test_images=50 evaluation.levels=6 name=skipplus
  python eval.py experiment=papers/skipplus $W_TINY tasks=[ecssd] evaluation.classes=predicted evaluation.curves=[] figures=[] test_images=50 name=skipplus_ecssd
  python eval.py results.files=[docs/results/skipplus.json] differences=DecompX-SkipPLUS figures=[radar] name=skipplus_radar \
    figures.radar.explainers=[chance,ALTI-SkipPLUS,AttCAT,GAE,InputXGradient-SkipPLUS,FullGrad-SkipPLUS,GradCAM-SkipPLUS,DecompX-SkipPLUS]
  python eval.py experiment=papers/skipplus $W_TINY test_images=50 evaluation.levels=6 explainers=[] figures=[cutoff] name=skipplus_cutoff \
    'methods=[{DecompX-PLUS:{start:[0,1,2,3,4,5,6,7,8,9,10,11]}},{AttIxG-PLUS:{start:[0,1,2,3,4,5,6,7,8,9,10,11]}}]'
  python eval.py figures=[cutoff] results.files=[docs/results/skipplus_cutoff.json] name=skipplus_cutoff_again
  python eval.py experiment=explain $W_TINY data.root=photos/ 'pictures.classes=[espresso,Egyptian cat]' name=skipplus_classes \
    'methods=[{DecompX:{layer:[0,3,6,9]}},DecompX-SkipPLUS,AttIxG-PLUS,InputXGradient-SkipPLUS,GAE,{GradCAM:{relu:false,tokens:input}}]'
}

tokentm() {
  python eval.py experiment=papers/tokentm $W_TINY trainer.precision=bf16-mixed tasks=[imagenet_val] test_images=50 name=tokentm
  python eval.py experiment=papers/tokentm $W_TINY tasks=[ecssd] evaluation.curves=[] ~figures test_images=50 name=tokentm_ecssd
  python train.py experiment=linear_head data=cifar10 trainer.max_epochs=5 $W_TINY
  python eval.py experiment=papers/tokentm $W_TINY trainer.precision=bf16-mixed tasks=[cifar10] test_images=50 \
    tasks.cifar10.target.head=runs/cifar10_vit_tiny_head/head.safetensors name=tokentm_cifar10
  python eval.py results.files=[docs/results/tokentm.json,docs/results/tokentm_ecssd.json] ~figures name=tokentm_again
}

vit_cx() {
  python eval.py experiment=papers/vit_cx $W_TINY trainer.precision=bf16-mixed evaluation.levels=6 test_images=50 tasks.imagenet_val.data.eval_batch_size=10 name=vit_cx \
    'methods=[ViTCX,{ViTCX:{delta:0}},{ViTCX:{random:100}},{ViTCX:{sigma:0}},{ViTCX:{combine:sum}},{ViTCX:{sigma:0,combine:sum}},{ViTCX:{features:norm,released:true}},AttentionRollout,PartialLRP,TransformerAttribution,GAE,{TAM:{steps:10}},{RISE:{masks:100}},{GradCAM:{relu:false,tokens:input}},{IntegratedGradients:{steps:10}},{SmoothGrad:{samples:10}}]'
  python eval.py experiment=papers/vit_cx $W_DEIT trainer.precision=bf16-mixed evaluation.levels=6 test_images=50 tasks.imagenet_val.data.eval_batch_size=10 name=vit_cx_deit \
    'methods=[ViTCX,{ViTCX:{delta:0}},{ViTCX:{features:norm,released:true}},AttentionRollout,PartialLRP,TransformerAttribution,GAE,{RISE:{masks:100}},{GradCAM:{relu:false,tokens:input}},{IntegratedGradients:{steps:10}},{SmoothGrad:{samples:10}}]'
  python eval.py experiment=papers/vit_cx $W_TINY trainer.precision=bf16-mixed explainers=[] evaluation.curves=[] ~figures test_images=50 tasks.imagenet_val.data.eval_batch_size=10 \
    name=vit_cx_coverage 'evaluation.reference=ViTCX\(combine\=coverage\)' 'methods=[ViTCX,{ViTCX:{combine:sum}},{ViTCX:{combine:coverage}}]'
  python eval.py results.files=[docs/results/vit_cx.json] figures=[bars] reference=paper name=vit_cx_again
}

masks() {
  python eval.py $W_TINY tasks=[ecssd] explainers=[chance] methods=[GAE,DecompX-SkipPLUS] evaluation.curves=[] figures=[] test_images=50 \
    'evaluation.localization=[pointing_game,average_precision,segmentation,box_accuracy]' name=ecssd
}

"$@"
