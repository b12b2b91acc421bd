"""What every matrix product of a model is: dataflow that all roles share, and one statement for each role."""
