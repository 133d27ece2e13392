"""Reading checkpoints: names to tensors, straight from the mapped file to where they will live."""
