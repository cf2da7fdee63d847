"""Report of a start: its log line, its JSON and its file."""
