# The commands behind docs/results/speed.md, from the root of the project: bash docs/results/speed.sh tve|anyhead|steps|computed
set -e

tve() {
  python benchmarks/explain.py --threads 1 --precision bf16 --rounds 3 --output runs/explain.json
  python benchmarks/explain.py --threads 1 --precision bf16 --rounds 3 --target vit_base --skip oracle --tasks 1
  python eval.py name=replot results.files=[] figures=[throughput,cost] figures.throughput.file=docs/results/speed.json figures.cost.file=docs/results/speed.json
}

anyhead() {
  for PRECISION in fp32 bf16; do
    A="--threads 1 --classes 1000 --skip oracle --skip paper --skip shared --tasks 1 --precision $PRECISION"
    python benchmarks/explain.py $A --rounds 7
    python benchmarks/explain.py $A --rounds 5 --target vit_base --batch-size 8
  done
}

steps() {
  OMP_NUM_THREADS=1 python train.py experiment=demo/tve debug=profile target=vit_tiny target.model.pretrained=false cache=none \
    module.loss.patches_per_image=1 data.batch_size=8 'data.size={train:80,val:8,test:8}'
  python benchmarks/throughput.py --threads 1 --rounds 5
}

computed() {
  python benchmarks/memory.py
  python benchmarks/memory.py --check
}

"$1"
