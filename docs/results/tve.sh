# The commands behind docs/results/tve.md, from the root of the project: bash docs/results/tve.sh transfer|finetuned|networks|parts|theory
set -e
W="target=vit_tiny weights=vit_tiny_patch16_224.augreg_in1k.safetensors data_dir=data"

transfer() {
  python train.py experiment=tve_vit_tiny $W
  python train.py experiment=linear_head data=imagenette $W
  python train.py experiment=linear_head data=cats_vs_dogs $W
  python train.py experiment=linear_head data=cifar10 $W
  python train.py experiment=vit_shapley data.train.limit=2500 data.val.limit=100 trainer.max_epochs=5 $W
  python eval.py experiment=papers/tve name=transfer explainers@explainers.tve=tve 'explainers=[chance,oracle]' '~explainers.kernel_shap' methods=[] \
    evaluation.reference=oracle evaluation.levels=11 'tasks=[imagenet_val,imagenette,cats_vs_dogs,cifar10]' tasks.imagenet_val.data.test.limit=50 \
    tasks.imagenette.data.limit.test=100 tasks.cats_vs_dogs.data.limit.test=100 tasks.cifar10.data.limit.test=100 $W
  python eval.py name=replot results.files=[docs/results/transfer.json] \
    figures=[curves,bars,ablation] figures.ablation.explainers=[tve_untrained,tve_hg,tve]
  # Surrogate and FastSHAP, with far too few images
  python train.py experiment=surrogate data.train.limit=500 data.val.limit=50 trainer.max_epochs=2 $W
  python train.py experiment=vit_shapley explainers@explainer=fastshap cache=none name=fastshap data.train.limit=500 data.val.limit=50 trainer.max_epochs=2 $W
}

finetuned() { # after `transfer`, and for AnyHead anyhead.sh train
  python train.py experiment=full_finetuning data=imagenette data.batch_size=64 trainer.max_epochs=1 $W
  python train.py experiment=full_finetuning data=cats_vs_dogs data.batch_size=64 trainer.max_epochs=2 $W
  for task in imagenette cats_vs_dogs; do
    [ $task = imagenette ] && classes=10 || classes=2
    T="task=$task target.model.num_classes=$classes data_dir=data"
    python train.py experiment=tve_finetune data.train.limit=1000 data.val.limit=50 $T
    python train.py experiment=tve_finetune explainer.weights=null arm=from_scratch data.train.limit=1000 data.val.limit=50 $T
    python eval.py experiment=papers/tve_finetuned $T
    python eval.py results.files=[] name=losses_$task figures=losses \
      figures.losses.files="{LFScratch:runs/tve_from_scratch_${task}_vit_tiny/csv/version_0/metrics.csv,TVE-FT:runs/tve_finetune_${task}_vit_tiny/csv/version_0/metrics.csv}"
  done
  python train.py experiment=anyhead name=anyhead_finetune_cats_vs_dogs data.root=data/cats_vs_dogs data.val.limit=100 weights=runs/cats_vs_dogs_vit_tiny/target.safetensors \
    ++target.model.num_classes=2 explainer.weights=runs/anyhead_vit_tiny/explainer.safetensors explainer.allow_finetuned_backbone=true module.loss.pairs=4 \
    module.loss.fit=regions module.loss.removals=[zero,black] module.optimizer.lr=1e-3 trainer.max_epochs=1 trainer.gradient_clip_val=null
  python eval.py experiment=papers/tve_finetuned task=cats_vs_dogs target.model.num_classes=2 data_dir=data 'methods=[DecompX-PLUS]' \
    '~explainers.lfscratch' '~explainers.tve_pt' '~explainers.tve_ft'
  python eval.py name=replot results.files=[docs/results/finetuned_imagenette.json] figures=[curves] # likewise finetuned_cats_vs_dogs, finetuned_anyhead
}

networks() {
  BIG="data.scraps=4 data.size={train:3000,val:300}"
  python train.py experiment=demo/target data.scraps=4 data.size.train=6000 trainer.max_epochs=10
  python train.py -m experiment=demo/head $BIG data.task=odd,five_or_more,loop
  python train.py experiment=demo/tve $BIG
  python train.py experiment=demo/tve $BIG explainers@explainer=tve_paper_small trainer.max_epochs=8 name=demo_tve_paper
  python train.py experiment=demo/tve $BIG explainers@explainer=tve_paper_small trainer.max_epochs=8 name=demo_tve_shared \
    explainer.network.shared_trunk=true
  python eval.py experiment=demo/eval name=eval_networks 'explainers.oracle.cache_dir=${cache_dir}/oracle' \
    +explainers@explainers.tve_paper=tve_paper_small explainers.tve_paper.weights=runs/demo_tve_paper/explainer.safetensors \
    +explainers@explainers.tve_shared=tve_paper_small explainers.tve_shared.weights=runs/demo_tve_shared/explainer.safetensors \
    explainers.tve_paper.hops=[1] explainers.tve_shared.hops=[1] explainers.tve_shared.network.shared_trunk=true evaluation.levels=21 \
    tasks.odd.data.scraps=4 tasks.five_or_more.data.scraps=4 tasks.loop.data.scraps=4 \
    tasks.odd.data.size.test=200 tasks.five_or_more.data.size.test=200 tasks.loop.data.size.test=200
  python eval.py results.files=[docs/results/networks.json] name=networks
}

parts() { # after `transfer`, on the same 50 images and meta-attributions
  python train.py experiment=tve_vit_tiny name=tve_no_average explainer.network.hops=[0] $W
  python train.py experiment=tve_vit_tiny name=tve_width_128 explainer.network.width=128 $W
  python train.py experiment=tve_vit_tiny name=tve_six_blocks blocks=[1,3,5,7,9,11] $W
  python train.py experiment=tve_vit_tiny name=tve_last_block blocks=[11] $W
  python eval.py experiment=posthoc name=eval_ablation methods=[] explainers=[chance,oracle] evaluation.reference=oracle figures=curves \
    tasks.imagenet_val.data.test.limit=50 \
    +explainers@explainers.tve_last_block=tve explainers.tve_last_block.weights=runs/tve_last_block/explainer.safetensors explainers.tve_last_block.network.blocks=[11] \
    +explainers@explainers.tve_six_blocks=tve explainers.tve_six_blocks.weights=runs/tve_six_blocks/explainer.safetensors explainers.tve_six_blocks.network.blocks=[1,3,5,7,9,11] \
    +explainers@explainers.tve_width_128=tve explainers.tve_width_128.weights=runs/tve_width_128/explainer.safetensors explainers.tve_width_128.network.width=128 \
    +explainers@explainers.tve_no_average=tve explainers.tve_no_average.weights=runs/tve_no_average/explainer.safetensors explainers.tve_no_average.network.hops=[0] \
    +explainers@explainers.tve=tve explainers.tve.weights=runs/tve_vit_tiny/explainer.safetensors $W
}

theory() { # after `transfer`
  python eval.py results.files=[] name=theorem1 figures=theorem1 figures.theorem1.file=runs/tve_vit_tiny/csv/version_0/metrics.csv
  python eval.py name=eval_two_point crop_fraction=0.875 target=vit_tiny tasks=[imagenet_val] explainers=[] metrics=two_point figures=approximation \
    evaluation.chunk_size=64 'tasks.imagenet_val.data={num_workers:1,eval_batch_size:4,test:{limit:16}}' $W
  python eval.py name=two_point results.files=[docs/results/two_point.json] figures=[approximation]
}

"$1"
