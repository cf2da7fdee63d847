"""After a start that failed: which rank, link or node is at fault."""
