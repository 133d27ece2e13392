"""Several ranks that share a model: how they are started, what they tell each other."""
