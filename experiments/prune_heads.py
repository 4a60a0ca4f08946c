"""How many heads can go? Prune in several orders and draw perplexity against heads removed.

python experiments/prune_heads.py                                  # the demo model, no network
python experiments/prune_heads.py pruning=greedy                   # greedy backward elimination
python experiments/prune_heads.py pruning.pairs=28                 # which heads stand in for others
python experiments/prune_heads.py export.dir=pruned export.max_increase=0.05

Orders come from calibration text, curves from evaluation text.
"""

from mhaprune.run.prune import main, prune_heads

__all__ = ["prune_heads"]

if __name__ == "__main__":
    main()
