"""Command ``doctor``: the report of a machine or of every node of a cluster, and the lines about it."""
