"""Policies: user-written rules that select the GEMMs to quantize and their formats."""

from mxcompile.policy.model import Backward as Backward
from mxcompile.policy.model import Block as Block
from mxcompile.policy.model import Choice as Choice
from mxcompile.policy.model import Decision as Decision
from mxcompile.policy.model import Ends as Ends
from mxcompile.policy.model import Gemm as Gemm
from mxcompile.policy.model import Layer as Layer
from mxcompile.policy.model import Limit as Limit
from mxcompile.policy.model import Match as Match
from mxcompile.policy.model import Rule as Rule
from mxcompile.policy.model import Saved as Saved
from mxcompile.policy.model import Sent as Sent
from mxcompile.policy.model import StepRange as StepRange
from mxcompile.policy.model import Use as Use
from mxcompile.policy.policy import Policy as Policy
from mxcompile.policy.policy import keeping as keeping
from mxcompile.policy.reason import Code as Code
from mxcompile.policy.reason import Reason as Reason
from mxcompile.policy.roles import ATTENTION_PRODUCTS as ATTENTION_PRODUCTS
from mxcompile.policy.roles import Role as Role
