"""Applies a policy to the layers of a model: the deciding rules, unused rules and near misses."""

from mxcompile.rules.check import check_layers as check_layers
from mxcompile.rules.check import check_mistakes as check_mistakes
from mxcompile.rules.check import complaints as complaints
from mxcompile.rules.check import unused_rules as unused_rules
from mxcompile.rules.check import with_complaints as with_complaints
from mxcompile.rules.fit import fits as fits
from mxcompile.rules.layers import layers_of as layers_of
from mxcompile.rules.layers import name_signature as name_signature
from mxcompile.rules.layers import spelled as spelled
