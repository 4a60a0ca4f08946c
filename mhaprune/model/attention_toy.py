"""A layer of two heads that one can follow with a pencil, on a sentence of ten words.

    The cat sat on the mat because it was tired
     0   1   2  3   4   5     6     7  8    9

**Embedding.** A word is four numbers, each 0 or 1: does it *seek* a noun (articles and pronouns:
The, the, it), is it a *noun* (cat, mat), is it the *first* word (The), and *one*, always 1. So
"the" is (1, 0, 0, 1), and "cat" and "mat" are both (0, 1, 0, 1).

**Queries and keys.** The left two columns of W_Q and W_K are head 0, the right two head 1.

    head 0: q = (2 seeks, 2 seeks)   k = (2 noun, 2 noun)     "I seek a noun" meets "I am one"
    head 1: q = (2 one, 2 one)       k = (2 first, 2 first)   everyone asks "are you the first?"

**Scores.** A query that meets its key scores (2*2 + 2*2) / sqrt(d_head) = 8 / sqrt(2) = 5.657, any
other pair 0. Softmax weighs them as e^5.657 = 286.25 to e^0 = 1. Keys after the query are hidden.

    head 0, "the" (4): sees one noun and 4 other words: "cat" gets 286.25 / 290.25 = 0.986
                       ("mat" has the key of "cat" but comes later)
    head 0, "it" (7):  sees two nouns and 6 others: 286.25 / 578.50 = 0.495 for each of them
    head 0, "sat" (2): seeks nothing, all scores are 0: 1/3 for each word so far
    head 1, word t:    "The" gets 286.25 / (286.25 + t); at "tired", t = 9, that is 0.970

**Values.** v = (noun, first) in head 0 and (first, one) in head 1, so that z is the share of the
pattern that lies on nouns and on "The", and on "The" and on everything (which is 1).

**Mixing.** W_O writes head 0's shares to the places of noun and first, head 1's to first and one.
At "the": head 0 adds (0, 0.986, 0.003, 0), head 1 adds (0, 0, 0.986, 1), the output is their sum
(0, 0.986, 0.990, 1). Both heads write to "first", where the sum alone does not tell them apart.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mhaprune.model.attention import Attended, MultiHeadAttention

WORDS = tuple("The cat sat on the mat because it was tired".split())

# seeks a noun, is a noun, is first, one
EMBEDDING = {
    "The": (1, 0, 1, 1),
    "cat": (0, 1, 0, 1),
    "sat": (0, 0, 0, 1),
    "on": (0, 0, 0, 1),
    "the": (1, 0, 0, 1),
    "mat": (0, 1, 0, 1),
    "because": (0, 0, 0, 1),
    "it": (1, 0, 0, 1),
    "was": (0, 0, 0, 1),
    "tired": (0, 0, 0, 1),
}

# Rows are inputs: seeks, noun, first, one. Columns 0 and 1 are head 0, columns 2 and 3 head 1.
W_Q = ((2, 2, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 2, 2))
W_K = ((0, 0, 0, 0), (2, 2, 0, 0), (0, 0, 2, 2), (0, 0, 0, 0))
W_V = ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 1, 0), (0, 0, 0, 1))

# Rows 0 and 1 read head 0, rows 2 and 3 head 1. Columns are outputs: seeks, noun, first, one.
W_O = ((0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 1, 0), (0, 0, 0, 1))


def toy_layer() -> MultiHeadAttention:
    """Return the layer: d_model 4, two heads of size 2, no biases, float64."""
    w_q, w_k, w_v, w_o = (torch.tensor(m, dtype=torch.float64) for m in (W_Q, W_K, W_V, W_O))
    return MultiHeadAttention(2, w_q, w_k, w_v, w_o)


def toy_embeddings() -> Float[Tensor, "1 pos d_model"]:
    """Return the sentence as a batch of one: `1 10 4`, float64."""
    return torch.tensor([[EMBEDDING[word] for word in WORDS]], dtype=torch.float64)


def toy_attention() -> Attended:
    """Return what the layer makes of the sentence."""
    return toy_layer().attend(toy_embeddings())
