"""Where actors live: processes, their environment, and what happens when one dies."""
