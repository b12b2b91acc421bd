"""The report of a model that is not run, and estimates for a target."""

from mxcompile.explain.explainer import explain as explain
