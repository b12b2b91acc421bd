"""The first call skips a layer that the next call runs: no message or report claims that it ran outside."""

import torch
from shared import EVERYTHING, Dropped, messages

import mxcompile

texts = messages()
model = mxcompile.compile(Dropped().eval(), policy=EVERYTHING)
with torch.no_grad():
    for kept in ((True, True, True, False), (True, False, True, True)):
        model(torch.randn(40, 64), kept)
texts += map(str, mxcompile.reports())
assert texts, "there is no report"
assert not [text for text in texts if "outside of compiled code" in text], texts
