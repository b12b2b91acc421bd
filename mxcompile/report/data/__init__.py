"""The data of reports: records, figures, outlines and numerics."""
