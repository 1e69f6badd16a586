"""The programs that a user runs and edits."""
