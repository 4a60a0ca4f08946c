"""What does each head look at? Its attention on a sentence, and its role on average.

python experiments/head_atlas.py text="The cat sat on the mat because it was tired"
python experiments/head_atlas.py model=gpt2 dataset=wikitext2

GPT-2's layers run written out (`mhaprune/model/attention.py`); other architectures bring their own.
"""

from mhaprune.run.atlas import head_atlas, main

__all__ = ["head_atlas"]

if __name__ == "__main__":
    main()
