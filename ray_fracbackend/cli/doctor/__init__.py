"""Command ``doctor``: collect facts about a machine or about every node of a cluster, and check them."""
