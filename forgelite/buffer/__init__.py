"""The account of every trajectory, the pace of generation, the bound on age, and packing into batches."""
