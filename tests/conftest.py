"""One thread for every test: more of them are slower on small models, and their number changes bits."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
