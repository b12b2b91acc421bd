"""A model is called with a float that changes; an edit above the model changes no output."""

import torch
from shared import check_edits

x = torch.randn(40, 64)
check_edits("self.down(F.gelu(self.up(x) * args[0]))", (x, 0.5), (x, 1.5), (x, 2.5))
