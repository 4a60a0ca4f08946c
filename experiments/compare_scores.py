"""Which score should one use? Judge every estimate of a head's importance by the measured effect.

python experiments/compare_scores.py                                  # the demo model, no network
python experiments/compare_scores.py model=gpt2 dataset=wikitext2 'heads=[L4H*,L10H*]'
python experiments/compare_scores.py '~scores.shapley' evaluation=quick

Scores are computed on calibration text, effects measured on evaluation text.
"""

from mhaprune.run.compare_scores import compare_scores, main

__all__ = ["compare_scores"]

if __name__ == "__main__":
    main()
