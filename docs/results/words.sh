# The commands behind docs/results/words.md, from the root of the project: bash docs/results/words.sh texts|likeness|pictures
set -e
W="target=vit_tiny weights=vit_tiny_patch16_224.augreg_in1k.safetensors data_dir=data"
A=explainers/shipped/vit_tiny_patch16_224.augreg_in21k_ft_in1k/anyhead/explainer.safetensors

texts() {
  python eval.py experiment=studies/text $W explainers.anyhead.weights=$A
  python eval.py experiment=studies/text $W explainers.anyhead.weights=$A tasks=[ecssd] ~tasks.imagenet_val tasks.ecssd.data.num_workers=1 \
    tasks.ecssd.data.eval_batch_size=10 evaluation.classes=predicted name=eval_text_ecssd
  python eval.py experiment=studies/text_score $W explainers.anyhead.weights=$A trainer.precision=bf16-mixed
  python eval.py name=replot 'results.files=[docs/results/text.json,docs/results/text_ecssd.json]' 'figures=[]' differences=anyhead_other_text
}

likeness() { # measured by benchmarks/likeness.py of commit 35f0d398
  python train.py experiment=anyhead target=fastvit_t8 ++target.model.inference_mode=true ++target.model.num_classes=0 weights=fastvit_t8.reparam.fp16.safetensors \
    data.root=data/imagenet_samples data.val.limit=40 module.loss.functionals=images trainer.precision=bf16-mixed logger=csv name=anyhead_fastvit
}

pictures() { # words.jpg and likeness.jpg
  python - <<'END'
import json
import timm
import explainers
from explainers.models import TargetModel
from explainers.text import fit_text_head
from explainers.text.encoders import stored_encoder

target = TargetModel(timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", pretrained=True)).eval()
with open("data/text/prompts.json") as file:
    classes = json.load(file)["imagenet"]
encode = stored_encoder("data/text/embeddings.safetensors", "data/text/prompts.json")
head = fit_text_head(target, classes, encode)
texts = ["a photo of a cat", "something furry", "a photo of a eye", "a photo of a cup"]
photo = "docs/photos/cat_and_coffee.jpg"
found = explainers.explain(photo, target, text=texts, text_head=head)
pictures = [found.of(text).picture() for text in texts]  # words.jpg, two by two
like_cat = explainers.compare(photo, "docs/likeness/cat.jpg", target, against="data/imagenet_samples")
like_cup = explainers.compare(photo, "docs/likeness/coffee.jpg", target, against="data/imagenet_samples")
END
}

"$1"
