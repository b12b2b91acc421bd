"""The report of a model that is not run, and estimates for a target."""

from mxcompile.analysis.explain.explainer import explain as explain
