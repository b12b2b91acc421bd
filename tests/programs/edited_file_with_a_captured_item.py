"""A graph captures ``.item()`` or ``nonzero``; an edit above the model changes no output."""

import torch
from shared import check_edits

torch._dynamo.config.capture_scalar_outputs = torch._dynamo.config.capture_dynamic_output_shape_ops = True
x = torch.randn(40, 64)
check_edits("self.down(F.gelu(self.up(x / x.abs().max().item())))", (x,))
check_edits("self.down(F.gelu(self.up(x[(x[:, 0] > 0).nonzero().squeeze(-1)])))", (x,))
