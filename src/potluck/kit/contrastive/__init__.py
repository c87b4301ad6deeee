"""Contrastive losses: a client's representations of public samples against those of others.

The anchor is a matrix of B representations of one public batch (B×d) and carries the gradient. Peers are M such
matrices of the same samples in the same order; they are constants. Rows are scaled to length 1 unless
`normalize=False`. The positive of anchor i is the tuple in which every peer looks at sample i.

- `pairwise`: the sum over the peers of InfoNCE, −log softmax over a peer's rows.
- `muscle`: a softmax over all B^M tuples, weighted by how much the peers agree among themselves.
- `gramian`: a softmax over the volumes that anchor and peers span.
- `nt_xent`: two views of every sample, each against all other views (SimCLR).
- `intra` and `inter`: one row against a global one, or against a table of global ones (CreamFL).
- `theorem1_value` and `information_bounds`: what a loss says about the information that models share.

The first three take the same masks, for samples that a client lacks in its modality: `weight`, a number per anchor
(0: this client lacks the sample), and `present`, per peer None (it has all) or one truth value per row. A row that
is not present is never a positive and never a negative. An anchor is compared with the peers that have its sample,
as if the others did not exist; where none has it, it does not count.

Everything is computed at least in float32, also under autocast, in shapes that depend on no value, and nothing is
read back, so a step with these losses can be captured. In the precision `tf32` a GPU still rounds the factors of
the inner products.
"""

from potluck.kit.contrastive.bounds import information_bounds, theorem1_value
from potluck.kit.contrastive.global_tables import inter, intra, log_share
from potluck.kit.contrastive.losses import MEMORY, Negatives, Positive, gramian, muscle, pairwise
from potluck.kit.contrastive.temperatures import (
    TAU,
    TAU_PREV,
    LearnedTemperature,
    Temperature,
    Temperatures,
)
from potluck.kit.contrastive.views import nt_xent

__all__ = [
    "MEMORY",
    "TAU",
    "TAU_PREV",
    "LearnedTemperature",
    "Negatives",
    "Positive",
    "Temperature",
    "Temperatures",
    "gramian",
    "information_bounds",
    "inter",
    "intra",
    "log_share",
    "muscle",
    "nt_xent",
    "pairwise",
    "theorem1_value",
]
