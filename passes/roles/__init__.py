"""Roles of matrix products: dataflow that all roles share, and one statement for each role."""
