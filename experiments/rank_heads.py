"""Which heads does the model need? Mask each in turn and rank them by the loss that follows.

python experiments/rank_heads.py                                   # the demo model, no network
python experiments/rank_heads.py model=gpt2 dataset=wikitext2      # GPT-2 on WikiText-2
python experiments/rank_heads.py -m ablation=zero,mean,resample    # a sweep
python experiments/rank_heads.py score=gradient                    # rank by an estimate
python experiments/rank_heads.py resume=RUN_DIR                    # go on after an interruption
"""

from mhaprune.run.rank import main, rank_heads

__all__ = ["rank_heads"]

if __name__ == "__main__":
    main()
